"""What figures look like where they are printed, as at the end of a notebook's cell."""

from __future__ import annotations

from decodery.llm.sampling_params import SamplingParams
from decodery.step.draft_tree import DraftTree
from serving import tiny_lm


def test_a_trace_is_printed_in_one_short_line() -> None:
    trace = tiny_lm().generate("a b c " * 50, max_new_tokens=200, ignore_eos=True).trace
    assert len(trace.steps) > 50
    expected = f"Trace({len(trace.steps)} steps, {trace.tokens_per_pass:.2f} tokens per pass, {trace.seconds:.2f} s)"
    assert repr(trace) == expected


def test_what_is_printed_is_one_short_line() -> None:
    lm = tiny_lm()
    assert repr(lm) == "LLM('tiny', dtype='float64', context=2048)"
    output = lm.generate("a\nb", max_new_tokens=200, ignore_eos=True, return_draft_trees=True)
    figures = f"finish_reason='length', tokens=200, tokens_per_pass={output.trace.tokens_per_pass:.2f})"
    assert repr(output) == f"Output(text={output.text[:80] + '...'!r}, {figures}"
    assert repr(SamplingParams()) == "SamplingParams()"
    assert repr(SamplingParams(temperature=0.5, stop=["a"])) == "SamplingParams(temperature=0.5, stop=['a'])"
    tree = DraftTree.from_paths(1, [[2, 3], [4]])
    assert repr(tree) == "DraftTree(3 drafted tokens, depth 2, deterministic)"
    turns = [{"role": "user", "content": "What are tides?"}]
    assert repr(lm.conversation(turns)) == "Conversation('What are tides?', turns=1)"
    for each in (lm, output, tree, lm.conversation("word " * 99)):
        assert "\n" not in repr(each) and len(repr(each)) < 250
