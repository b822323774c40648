"""Writing while a source arrives: what is committed stays, and what is exact is what reading all of it anew gives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import decodery as dc
from covering import FULL
from decodery.core.errors import PromptError, SettingsError
from decodery.core.registry import methods, resolve
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.extras.simultaneous.base import SimultaneousPolicy, SourceStream, StreamOutput, listening
from decodery.extras.simultaneous.local_agreement import LocalAgreement
from decodery.extras.simultaneous.redecode import Redecode
from decodery.extras.simultaneous.stability import Stability
from decodery.extras.simultaneous.streaming_beam import StreamingBeam
from decodery.extras.simultaneous.wait_k import WaitK
from decodery.logits_sources.reads import Reads
from decodery.models.batch import Batch, Segment
from decodery.models.torch.encoder_decoder import EncoderDecoder
from decodery.step.forward_request import ForwardCoroutine, run_sync, score
from decodery.testing import tiny_transformer
from decodery_benchmarks.training.seq2seq import (
    Seq2SeqRecipe,
    leaves,
    random_encoder_decoder,
    right,
    train_seq2seq,
    training_batch,
)
from decodery_benchmarks.training.transductions import TRANSDUCTIONS, sources, transduction
from decodery_benchmarks.training.two_stacks import predicted
from tiny_encoder import tiny_encoder_decoder

BLOCK, START, ENDS = 3, 58, (56, 2)
SOURCE = [5, 40, 17, 33, 8, 21, 50, 2, 11, 45, 30, 9, 27, 14, 36, 3, 41]
LISTENING: list[SimultaneousPolicy] = [
    Redecode(),
    LocalAgreement(),
    LocalAgreement(3),
    Stability(),
    StreamingBeam(3),
    WaitK(4),
]


SHRINKING = {
    "streaming-beam": ["streaming-beam:width=1,lookback=1", "streaming-beam:width=2,lookback=2,cap=3"],
    "stability": ["stability:lookback=1", "stability:lookback=3,cap=2"],
    "local-agreement": ["local-agreement:n=1", "local-agreement"],
    "wait-k": ["wait-k:k=0", "wait-k"],
}


def heard(
    method: SimultaneousPolicy, size: int, source: Sequence[int] = SOURCE
) -> tuple[list[StreamOutput], SourceStream]:
    """What there is after every chunk of `size` tokens."""
    stream = SourceStream.of(tiny_encoder_decoder(BLOCK), ENDS)
    starts = range(0, len(source), size)
    found = [
        run_sync(listening(method, stream, source[first : first + size], first + size >= len(source)))
        for first in starts
    ]
    return found, stream


@cache
def anew(read: int) -> list[int]:
    """Greedy decoding of the first tokens of the source, all of them read anew."""
    engine = Engine(tiny_encoder_decoder(BLOCK))
    source = Reads(tuple(SOURCE[:read]))
    seq = engine.submit(Request([START], logits_source=source, max_new_tokens=30, eos_ids=ENDS))
    engine.run([seq])
    return [token for token in seq.generated if token not in ENDS]


def stays(found: Sequence[tuple[int, ...]]) -> bool:
    """Whether each begins with the one before it."""
    return all(after[: len(before)] == before for before, after in pairwise(found))


def test_an_encoder_in_blocks_gives_the_states_of_the_whole() -> None:
    encoder = tiny_encoder_decoder(BLOCK).encoder
    whole = encoder.forward(Batch([encoder.segment(SOURCE)]), taps=(-1,)).hidden[-1]
    kept = encoder.new_cache()
    parts = []
    for first, last in ((0, 3), (3, 9), (9, 12), (12, 17)):
        segment = encoder.segment(SOURCE[first:last], kept)
        parts.append(encoder.forward(Batch([segment]), taps=(-1,)).hidden[-1])
        kept.keep(range(last - first))
    assert (torch.cat(parts) - whole).abs().max() < 1e-9
    with pytest.raises(SettingsError, match="only the last one may be shorter"):
        encoder.segment(SOURCE, kept)
    # An encoder that sees all of a source changes what it has read when more comes.
    other = tiny_encoder_decoder().encoder
    short, long = (other.forward(Batch([other.segment(each)]), taps=(-1,)).hidden[-1] for each in (SOURCE[:9], SOURCE))
    assert (short - long[:9]).abs().max() > 1e-3


@pytest.mark.parametrize("size", [1, 4])
def test_verifying_the_earlier_text_equals_decoding_anew(size: int) -> None:
    found, stream = heard(Redecode(), size)
    for each in found[:-1]:
        assert each.committed == () and list(each.guess) == (anew(each.read) if each.read else [])
    assert list(found[-1].committed) == anew(len(SOURCE)) and not found[-1].guess
    # It saves passes, and the texts in between were not all beginnings of the later ones: there was something to do.
    passes = sum(len(anew(read)) + 1 for read in {each.read for each in found if each.read})
    assert len(stream.trace.steps) < passes
    assert not stays([each.guess for each in found[:-1]])


@pytest.mark.parametrize("method", LISTENING, ids=repr)
def test_what_is_committed_stays(method: SimultaneousPolicy) -> None:
    found, stream = heard(method, 2)
    assert stays([each.committed for each in found])
    last = found[-1].committed
    assert len(stream.reads) == len(last) and stream.reads == sorted(stream.reads) and last and not found[-1].guess
    # One that commits all it sees at once is caught by the same check.
    assert not stays([(*each.committed, *each.guess) for each in heard(Redecode(), 2)[0]])
    with pytest.raises(ValueError, match="source of this stream has ended"):
        run_sync(listening(method, stream, [1]))


@pytest.mark.parametrize("name", sorted(method.name for method in methods("simultaneous")))
def test_nothing_that_stands_is_taken_back_by_any_method(name: str) -> None:
    """Over random models and chunks, at the smallest settings, where hypotheses shrink; and the check can fail."""
    shrunk = 0
    for seed in range(30 if FULL else 12):
        model = tiny_encoder_decoder(BLOCK, seed)
        draws = np.random.default_rng(seed)
        for spec in SHRINKING.get(name, [name]):
            stream, method = SourceStream.of(model, ENDS), resolve("simultaneous", spec)
            source, found, first = draws.integers(0, 55, 14).tolist(), list[StreamOutput](), 0
            while first < len(source):
                last = first + int(draws.integers(1, 4))
                found.append(run_sync(listening(method, stream, source[first:last], last >= len(source))))
                first = last
            assert stays([each.committed for each in found]), (spec, seed)
            whole = [(*each.committed, *each.guess) for each in found]
            shrunk += not stays(whole)
    assert shrunk or name == "wait-k"


def test_a_method_that_takes_back_what_stands_is_caught() -> None:
    class Forgetful(SimultaneousPolicy):
        def hear(self, stream: SourceStream) -> ForwardCoroutine[None]:
            logits = yield from stream.reread(0)
            stream.written = [int(logits[-1].argmax()), stream.chunks]
            stream.commit(2)

    with pytest.raises(ValueError, match="does not begin with them any more"):
        heard(Forgetful(), 4)


def test_a_longer_lag_is_nearer_to_the_whole_source() -> None:
    whole = tuple(anew(len(SOURCE)))
    assert heard(LocalAgreement(99), 2)[0][-1].committed == whole
    assert heard(WaitK(99), 2)[0][-1].committed == whole
    assert heard(Stability(lookback=99), 2)[0][-1].read == len(SOURCE)
    early = heard(WaitK(0), 2)[0]
    assert [len(each.committed) for each in early[:2]] == [0, 3]


def test_scores_of_beams_are_those_of_the_newest_source() -> None:
    _, stream = heard(StreamingBeam(3, all=True), 4, SOURCE[:12])
    reading = Reads(tuple(SOURCE[:12])).over(tiny_encoder_decoder(BLOCK), [START])
    assert len(stream.state) == 3
    for beam in stream.state:
        rows = Segment.chunk([START, *beam.written], reading.new_cache())
        laws = run_sync(score(reading, rows)).logits.log_softmax(dim=-1)
        total = sum(float(laws[place, token]) for place, token in enumerate(beam.written))
        # A text that waits has an end among its tokens' probabilities, too.
        waited = beam.waits and len(beam.written) < stream.limit
        ends = [float(laws[-1, token]) for token in ENDS] if waited else [0.0]
        assert min(abs(total + end - beam.score) for end in ends) < 1e-6


@pytest.mark.integration
def test_a_small_model_is_trained_saved_and_listened_to(tmp_path: Path) -> None:
    recipe = Seq2SeqRecipe(hidden=16, heads=2, inner=16, encoder_layers=1, decoder_layers=1, block=2, batch=4, steps=3,
                           every=2, held=2)  # fmt: skip
    kind = transduction("reorder")
    model = random_encoder_decoder(recipe, kind.longest)
    given, written, said = training_batch(kind, recipe, 0)
    rows = predicted(model, given, written)
    source = Reads(tuple(given[1][given[1] >= 0].tolist()))
    reading = source.over(model, [START])
    alone = run_sync(score(reading, Segment.chunk(written[1].numpy(), reading.new_cache()))).logits
    assert (rows[1] - alone).abs().max() < 1e-4 < rows[1].std() and (said >= 0).any()
    assert all(tensor.is_leaf for tensor in leaves(model).values())
    found = train_seq2seq(kind, tmp_path, recipe=recipe)
    assert train_seq2seq(kind, tmp_path, recipe=recipe) == found
    lm = dc.load(tmp_path)
    assert isinstance(lm.model, EncoderDecoder) and lm.model.config.block == 2
    assert right(lm.model, kind, ["abc"]) in (0.0, 1.0)
    trace = dc.core.trace.Trace()
    texts = list(lm.simultaneous(["abc", "d2", "efg"], "local-agreement", trace=trace))
    assert [each.read for each in texts] == [2, 4, 8] and trace.ledger.passes["encoder"] == 3
    assert texts[-1].text == lm.tokenizer.decode(texts[-1].committed)
    for kind in TRANSDUCTIONS.values():
        assert all(
            len(kind.write(each)) <= kind.longest for each, _ in zip(sources(kind, "test"), range(50), strict=False)
        )


def test_what_cannot_be_listened_to_is_refused() -> None:
    for model in (tiny_transformer(0), tiny_encoder_decoder()):
        with pytest.raises(SettingsError, match=r"train\.py seq2seq"):
            SourceStream.of(model, ENDS)
    with pytest.raises(PromptError, match="outside the model's vocabulary"):
        run_sync(listening(Redecode(), SourceStream.of(tiny_encoder_decoder(BLOCK), ENDS), [99] * 3))
    for broken in (lambda: LocalAgreement(0), lambda: WaitK(-1), lambda: Stability(cap=0), lambda: StreamingBeam(0)):
        with pytest.raises(SettingsError, match="needs"):
            broken()
    with pytest.raises(SettingsError, match="leave block out"):
        train_seq2seq(transduction("normalise"), Path("nowhere"), recipe=Seq2SeqRecipe(block=2))
    assert transduction("normalise").write("3 may 1988") == "1988-05-03"
    assert transduction("normalise").write("quarter to one") == "12:45"
    assert transduction("normalise").write("three thousand forty two") == "3042"
    assert transduction("reorder").write("abc2d") == "npoq"
