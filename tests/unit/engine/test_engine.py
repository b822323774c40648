"""The loop's bookkeeping: stops, lengths, batches, streams, shared prefills, reuse, and what it refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decodery.core.errors import NumericalError, PromptError, SettingsError
from decodery.core.registry import resolve
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Scores
from decodery.sampling import Sampler
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.detokenizer import TextStream
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence
from decodery.testing import Oracle, decode, tiny_transformer

MODEL = tiny_transformer(5)
PROMPT = [3, 1, 4, 1, 5]


class Letters:
    """A detokenizer whose token i is the i-th letter, every tenth token making two letters."""

    def push(self, ids: list[int]) -> str:
        return "".join("ab" if token % 10 == 0 else chr(97 + token % 26) for token in ids)

    def finish(self) -> str:
        return ""


def run(drafter=None, *, stop=(), **settings) -> tuple[Sequence, list[str]]:
    engine = Engine(MODEL, detokenizer=Letters)
    seq = engine.submit(Request(PROMPT, drafter=drafter, stop=stop, **settings))
    pieces = []
    while not seq.finished:
        engine.step()
        pieces.append(seq.text.release(final=seq.finished))
    if seq.error is not None:
        raise seq.error
    return seq, pieces


PLAIN, _ = run(max_new_tokens=60)
ORACLE = Oracle(tuple(PLAIN.tokens), nodes=30)
"""Drafts long right runs, so that every stop falls inside one."""


@pytest.mark.parametrize("drafter", [None, ORACLE], ids=["plain", "drafted"])
@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_texts_end_at_their_length(drafter, length: int) -> None:
    seq, _ = run(drafter, max_new_tokens=length)
    assert seq.generated == PLAIN.generated[:length]
    assert seq.finish_reason == "length" and seq.cache.next_position == len(seq.tokens) - 1


@pytest.mark.parametrize("kv", [None, "tova:budget=8"], ids=["all", "tova"])
def test_texts_end_where_the_context_does_and_say_so(kv: str | None) -> None:
    policy = None if kv is None else resolve("cache-policy", kv)
    short = tiny_transformer(0, max_positions=len(PROMPT) + 20)

    def written(drafter=None, **settings) -> Sequence:
        engine = Engine(short, detokenizer=Letters)
        seq = engine.submit(Request(PROMPT, drafter=drafter, cache_policy=policy, **settings))
        while not seq.finished:
            engine.step()
        return seq

    plain = written(max_new_tokens=60)
    drafted = written(Oracle(tuple(plain.tokens), nodes=8), max_new_tokens=60)
    assert drafted.generated == plain.generated and drafted.trace.passes < plain.trace.passes
    for seq in (plain, drafted):
        assert (seq.position, seq.finish_reason, seq.context_full) == (20, "length", True)
    # What ends for another reason says nothing of the context, not even in its last place.
    asked = written(max_new_tokens=19)
    assert (asked.position, asked.finish_reason, asked.context_full) == (19, "length", False)
    stopped = written(max_new_tokens=60, stop=[plain.text.text[-6:]])
    assert (stopped.position, stopped.finish_reason, stopped.context_full) == (20, "stop", False)


@pytest.mark.parametrize("drafter", [None, ORACLE], ids=["plain", "drafted"])
def test_texts_end_at_the_first_of_several_eos_ids(drafter) -> None:
    for at in (0, 3, 9, 17):
        eos = [PLAIN.generated[at], PLAIN.generated[at + 5]]
        first = min(PLAIN.generated.index(token) for token in eos)
        seq, pieces = run(drafter, max_new_tokens=60, eos_ids=eos)
        assert seq.generated == PLAIN.generated[: first + 1]
        assert seq.finish_reason == "stop" and seq.stopped_by == seq.generated[-1]
        assert "".join(pieces) == seq.text.text == Letters().push(seq.generated[:-1])
        assert seq.cache.next_position == len(seq.tokens) - 1


@pytest.mark.parametrize("drafter", [None, ORACLE], ids=["plain", "drafted"])
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_stop_strings_end_the_text_across_tokens(drafter, length: int) -> None:
    whole = PLAIN.text.text
    for start in range(0, 20, 3):
        stop = whole[start : start + length]
        at = whole.index(stop)
        seq, pieces = run(drafter, max_new_tokens=60, stop=["@never", stop, whole[start + 1 : start + 30]])
        assert seq.text.text == "".join(pieces) == whole[:at]
        assert (seq.finish_reason, seq.stopped_by) == ("stop", stop)
        # The tokens go just as far as was needed to complete the stop string.
        assert len(Letters().push(seq.generated)) >= at + length > len(Letters().push(seq.generated[:-1]))


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "aab", ""]), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_a_stream_never_shows_what_a_stop_string_takes_back(pieces: list[str], stop: list[str]) -> None:
    class Scripted:
        def push(self, ids: list[int]) -> str:
            return pieces[ids[0]]

        def finish(self) -> str:
            return ""

    stream, shown, found = TextStream(Scripted(), stop), "", None
    for token in range(len(pieces)):
        found = stream.push(token)
        shown += stream.release(final=found is not None)
        if found:
            break
    shown += stream.release(final=True)
    # Decoding ends with the token that first completes some stop string, wherever others would have begun.
    ending = (n for n in range(len(pieces) + 1) if any(string in "".join(pieces[:n]) for string in stop))
    whole = "".join(pieces[: next(ending, len(pieces))])
    ends = [whole.index(string) for string in stop if string in whole]
    assert shown == stream.text == (whole[: min(ends)] if ends else whole)


def test_min_new_tokens_and_logprobs() -> None:
    eos = PLAIN.generated[2]
    sampler = Sampler.from_settings(min_new_tokens=10, eos_ids=(eos,))
    seq, _ = run(ORACLE, max_new_tokens=30, eos_ids=[eos], sampler=sampler, logprobs=3)
    assert eos not in seq.generated[:10] and len(seq.generated) >= 10
    assert [entry.token for entry in seq.token_logprobs] == seq.generated
    tokens = seq.tokens[:-1]
    from decodery.models.batch import Segment

    logits = MODEL.forward(Batch([Segment.chunk(tokens, MODEL.new_cache())])).logits
    expected = torch.log_softmax(logits.float(), -1)[len(PROMPT) - 1 :]
    for entry, row in zip(seq.token_logprobs, expected, strict=True):
        assert abs(entry.logprob - row[entry.token]) < 1e-5
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()


def test_samples_share_one_prefill_and_are_what_they_are_alone() -> None:
    sampler = Sampler.from_settings(temperature=1.0)
    alone = decode(MODEL, [PROMPT], sampler=sampler, seeds=(4, 5, 6), max_new_tokens=12, together=False)
    engine = Engine(MODEL, prefill_chunk=2)
    first = engine.submit(Request(PROMPT, sampler=sampler, seed=4, max_new_tokens=12))
    others = [engine.submit(Request(PROMPT, sampler=sampler, seed=s, max_new_tokens=12), like=first) for s in (5, 6)]
    engine.run([first, *others])
    assert [seq.generated for seq in (first, *others)] == [seq.generated for seq in alone]
    assert [sum(step.rows for step in seq.trace.steps if step.prefill) for seq in (first, *others)] == [5, 1, 1]


def test_a_cancelled_owner_leaves_its_prompt_to_the_others() -> None:
    engine = Engine(MODEL, prefill_chunk=2)
    first = engine.submit(Request(PROMPT, max_new_tokens=12))
    other = engine.submit(Request(PROMPT, max_new_tokens=12), like=first)
    engine.step()
    first.cancel()
    engine.run([other])
    assert other.generated == PLAIN.generated[:12] and first.generated == []
    assert first.finish_reason == "cancelled"


def test_cancelling_keeps_what_was_committed() -> None:
    engine = Engine(MODEL)
    seq = engine.submit(Request(PROMPT, max_new_tokens=50))
    for _ in range(4):
        engine.step()
    seq.cancel()
    assert engine.step() == [] and seq.generated == PLAIN.generated[:4]


def test_sequences_join_while_others_write() -> None:
    engine = Engine(MODEL, prefill_chunk=2)
    early = engine.submit(Request(PROMPT, max_new_tokens=20, drafter=PromptLookup()))
    for _ in range(5):
        engine.step()
    late = engine.submit(Request(PROMPT, max_new_tokens=20))
    engine.run([early, late])
    assert early.generated == late.generated == PLAIN.generated[:20]


@pytest.mark.parametrize("shared", [0, 1, 4, 8, 30])
def test_an_earlier_cache_serves_as_far_as_the_tokens_agree(shared: int) -> None:
    (earlier,) = decode(MODEL, [PROMPT], max_new_tokens=20)
    prompt = [*earlier.tokens[:shared], 60, 61, 62]
    (fresh,) = decode(MODEL, [prompt], max_new_tokens=8)
    engine = Engine(MODEL)
    seq = engine.submit(Request(prompt, max_new_tokens=8, reuse=earlier))
    engine.run([seq])
    assert seq.generated == fresh.generated
    read = sum(step.rows for step in seq.trace.steps if step.prefill)
    assert read == len(prompt) - min(shared, len(earlier.tokens) - 1)


def test_traces_count_what_happened() -> None:
    seq, _ = run(ORACLE, max_new_tokens=40)
    assert seq.trace.tokens == 39 and seq.trace.steps[0].prefill
    for step in seq.trace.decoding:
        assert step.emitted == step.accepted + 1 and step.rows == step.nodes + 1 >= step.emitted
    assert seq.trace.tokens_per_pass == 39 / seq.trace.passes > 2
    assert sum(seq.trace.share.values()) == pytest.approx(1.0)


def test_bad_prompts_are_refused() -> None:
    engine = Engine(MODEL)
    for prompt, words in (([], "empty"), ([1] * 512, "512 tokens"), ([1, 64], "outside"), ([-1], "outside")):
        with pytest.raises(PromptError, match=words):
            engine.submit(Request(prompt))
    seq = engine.submit(Request([1] * 500, max_new_tokens=100))
    engine.run([seq])
    assert len(seq.tokens) == 512 and seq.finish_reason == "length"


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"max_new_tokens": 0}, "max_new_tokens"), ({"stop": [""]}, "non-empty"), ({"logprobs": -1}, "logprobs")],
)
def test_bad_settings_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Request(PROMPT, **settings)


def test_logits_that_are_no_distribution_are_an_error() -> None:
    class Broken:
        def __init__(self, value: float) -> None:
            self.value = value

        def __getattr__(self, name: str) -> object:
            return getattr(MODEL, name)

        def forward(self, batch: Batch, **options: object) -> Scores:
            scores = MODEL.forward(batch)
            scores.logits[:, 7] = self.value
            return scores

    for value in (float("nan"), float("inf")):
        with pytest.raises(NumericalError, match="not a distribution"):
            decode(Broken(value), [PROMPT])


def test_one_bad_request_leaves_the_others_alone() -> None:
    engine = Engine(MODEL)
    good = engine.submit(Request(PROMPT, max_new_tokens=10))
    bad = engine.submit(Request(PROMPT, sampler=Sampler.from_settings(logit_bias={999: 1.0}), max_new_tokens=10))
    with pytest.raises(SettingsError, match="token 999"):
        engine.run([good, bad])
    assert good.generated == PLAIN.generated[:10]
    assert bad.finish_reason == "error" and bad.generated == []


@pytest.mark.parametrize("settings", [{"max_new_tokens": 2.5}, {"seed": "x"}, {"seed": 1.5}])
def test_settings_of_the_wrong_type_are_refused(settings: dict) -> None:
    with pytest.raises(SettingsError, match="integer"):
        Request(PROMPT, **settings)


def test_only_equal_prompts_share_a_prefill() -> None:
    engine = Engine(MODEL)
    first = engine.submit(Request(PROMPT))
    with pytest.raises(SettingsError, match="prompts are the same"):
        engine.submit(Request([9, 8, 7]), like=first)
    with pytest.raises(ValueError, match="not submitted to this engine"):
        Engine(MODEL).run([first])


@pytest.mark.parametrize(("root", "length"), [(1, 2), (0, 100)], ids=["wrong root", "over budget"])
def test_a_draft_that_breaks_the_contract_is_an_error(root: int, length: int) -> None:
    class Unruly(Drafter):
        def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
            return DraftTree.chain((seq.last_token + root) % 64, [3] * length)

    with pytest.raises(ValueError, match="Unruly drafted"):
        run(Unruly(), max_new_tokens=90)

    class Careless(Drafter):
        def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
            return [3] * length  # type: ignore[return-value]

    with pytest.raises(ValueError, match=r"Careless\.propose returned an object of type list: return a DraftTree"):
        run(Careless(), max_new_tokens=90)


def test_biases_beyond_float32_are_an_error() -> None:
    for settings in ({"logit_bias": {5: 1e39}}, {"repetition_penalty": 1e-39}):
        sampler = Sampler.from_settings(temperature=0.7, top_p=0.9, **settings)
        with pytest.raises(SettingsError):
            decode(MODEL, [PROMPT], sampler=sampler)


def test_a_draft_model_says_nothing_beyond_its_own_context() -> None:
    short = tiny_transformer(5, max_positions=12)
    (seq,) = decode(MODEL, [PROMPT], drafter=DraftModel(short), max_new_tokens=30)
    assert seq.generated == PLAIN.generated[:30]
    assert seq.trace.decoding[0].nodes > 0 == seq.trace.decoding[-1].nodes


def test_overlapping_calls_restore_the_number_of_threads() -> None:
    sampler, row = Sampler.from_settings(temperature=0.7, top_p=0.9), torch.randn(1, 5000)
    context = sampler.context([1], 1, sampler.init([1]))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: sampler.law(row, [context]), range(200)))
        sampler.law(row, [context])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
