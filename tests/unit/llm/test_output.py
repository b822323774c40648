"""What figures look like where they are printed, as at the end of a notebook's cell."""

from __future__ import annotations

from serving import tiny_lm


def test_a_trace_is_printed_in_one_short_line() -> None:
    trace = tiny_lm().generate("a b c " * 50, max_new_tokens=200, ignore_eos=True).trace
    assert len(trace.steps) > 50
    expected = f"Trace({len(trace.steps)} steps, {trace.tokens_per_pass:.2f} tokens per pass, {trace.seconds:.2f} s)"
    assert repr(trace) == expected
