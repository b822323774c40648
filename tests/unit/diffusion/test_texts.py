"""Canvases as texts: what is settled, what stopping one leaves, and which ids are never written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.errors import OutOfMemory, SettingsError
from decodery.diffusion import view
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.run import Run, finished
from decodery.diffusion.texts import Fill, Filling
from decodery.engine.engine import Engine
from decodery.engine.schedule import Limits
from decodery.llm.llm import LLM
from decodery.models.batch import Segment
from decodery.models.cache.memory_limit import MemoryLimit
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.torch.transformer import Transformer
from decodery.step.forward_request import ForwardCoroutine, ForwardRequest, run_sync
from decodery.testing import tiny_transformer
from diffusing import MASK, PROMPT, denoiser, fill, named, nats, order
from largest import Largest
from tiny_models import make_tokenizer

TOKENS = 260
"""What the tokenizer of bytes has, its special tokens included."""


def begun(spec: str, length: int = 12) -> tuple[Engine, Filling]:
    engine = Engine(model := denoiser())
    return engine, Filling(engine, model, Fill(PROMPT, length, named(spec)), (), lambda _, tokens: str(tokens))


class Peak:
    """The most bytes of distributions that a canvas has held at once, that of its passes' results included."""

    def __init__(self, run: Run) -> None:
        self.run, self.most, right = run, 0, run._guided

        def guided(logits: list[torch.Tensor]) -> torch.Tensor:
            found = right(logits)
            self.most = max(self.most, run.bytes + found.nbytes * (len(logits) + run.method.tempered))
            return found

        run._guided = guided  # type: ignore[method-assign]


@pytest.mark.parametrize("spec", ["random", "static:guidance=1.5,block=4", "threshold:tau=0.2,tempered=true", "edit"])
def test_distributions_at_open_positions_take_what_is_announced(spec: str) -> None:
    model = denoiser()
    run = Run(model, Canvas.of(model, PROMPT, 12), named(spec), 0.7)
    peak, announced = Peak(run), run.awaited
    run_sync(finished(run))
    assert announced / 2 < peak.most <= announced
    assert run.bytes == 0


SEVERAL = [
    "freedave", "freedave:cache=prefix,block=4", "freedave-plus:tau=0.2,cache=dual,block=4",
    "explore-exploit:branches=3,few=4,block=4", "explore-exploit:branches=3,few=4,block=4,cache=prefix",
    "dystruct:least=2,mean=4,most=6", "static:cache=prefix,block=4", "threshold:cache=dkv",
]  # fmt: skip


def passes_of(run: Run) -> list[tuple[int, int]]:
    """What each pass of a canvas takes, of distributions and pages, and what was announced before it."""
    found, right, limit = [], run.look_at, MemoryLimit(1 << 30)

    def look_at(*about: Any, **more: Any) -> ForwardCoroutine[list[view.View]]:
        before, announced = limit.used, run.awaited
        limit.peak = before
        views = yield from right(*about, **more)
        found.append((limit.peak - before + sum(each.bytes for each in views), announced))
        return views

    run.look_at = look_at  # type: ignore[method-assign]
    with limit.within():
        run._earlier = run._new_passes()
        run_sync(finished(run))
    return found


@pytest.mark.parametrize("spec", SEVERAL)
def test_a_pass_over_several_states_takes_what_is_announced(spec: str) -> None:
    model = denoiser()
    assert all(
        took <= announced for took, announced in passes_of(Run(model, Canvas.of(model, PROMPT, 40), named(spec)))
    )


@pytest.mark.parametrize("spec", [SEVERAL[1], SEVERAL[4]])
def test_states_that_compute_all_rows_after_a_block_take_what_is_announced(spec: str) -> None:
    model = denoiser()
    found = passes_of(Run(model, Canvas.of(model, PROMPT, 120), named(spec)))
    assert all(took <= announced for took, announced in found)
    drafts = Run(model, Canvas.of(model, PROMPT, 24), named("freedave:drafts=32,block=4"))
    assert max(announced for _, announced in passes_of(drafts)) < 8 * 4 * 4 * (MASK + 1) * 8


@pytest.mark.parametrize("spec", [SEVERAL[0], SEVERAL[3]])
def test_a_pass_that_is_announced_as_one_over_one_state_shows(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, method = denoiser(), named(spec)
    monkeypatch.setattr(type(method), "states", 1)
    monkeypatch.setattr(type(method), "blocks_at_once", 1)
    assert any(took > announced for took, announced in passes_of(Run(model, Canvas.of(model, PROMPT, 40), method)))


@pytest.mark.parametrize("spec", ["random", "threshold:tau=0.2,tempered=true,top_p=0.9", "static:guidance=1.5"])
def test_what_is_made_of_distributions_is_made_in_blocks(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fill(denoiser(), spec, 24, temperature=0.7)
    monkeypatch.setattr(view, "_AT_ONCE", 5 * (MASK + 1))
    right, largest = view.View.of.__func__, 0  # type: ignore[attr-defined]

    def of(cls: Any, logits: torch.Tensor, *about: Any, **more: Any) -> view.View:
        nonlocal largest
        with Largest() as found:
            made: view.View = right(cls, logits, *about, **more)
        # What there are two of is kept as a whole, and is not computed as one.
        largest = max(largest, found.numbers if not more["tempered"] else 0)
        return made

    monkeypatch.setattr(view.View, "of", classmethod(of))
    parts = fill(denoiser(), spec, 24, temperature=0.7)
    assert order(parts) == order(whole) and nats(parts).equal(nats(whole))
    assert largest <= 5 * (MASK + 1)


def test_a_canvas_waits_for_memory_of_its_distributions() -> None:
    """One at a time where two do not fit, and never where one does not."""
    model = denoiser()
    most, size = 0, 40 * (MASK + 1) * 8
    engine = Engine(model, limits=Limits(cache_bytes=size * 3 // 2))
    fills = [Filling(engine, model, Fill(PROMPT, 40, named("static")), (), lambda _, tokens: "") for _ in range(3)]
    while any(not each.work.finished for each in fills):
        engine.step()
        most = max(most, sum(each.canvas.passes > 0 and not each.work.finished for each in fills))
    assert most == 1 and all(each.work.error is None for each in fills)
    with pytest.raises(OutOfMemory, match="a pass over this canvas needs"):
        Filling(engine, model, Fill(PROMPT, 80, named("static")), (), lambda _, tokens: "")
    Filling(engine, model, Fill(PROMPT, 80, named("static:block=40")), (), lambda _, tokens: "")
    with pytest.raises(OutOfMemory, match="a pass over this canvas needs"):
        Filling(engine, model, Fill(PROMPT, 80, named("static:block=40,cache=prefix")), (), lambda _, tokens: "")
    with pytest.raises(OutOfMemory, match="a pass over this canvas needs"):
        Filling(engine, model, Fill(PROMPT, 40, named("freedave")), (), lambda _, tokens: "")


@pytest.mark.parametrize("spec", ["random", "threshold:tau=0.2", "static:block=4", "dystruct:least=2,mean=4,most=6"])
def test_a_canvas_that_is_stopped_gives_what_is_settled_and_says_so(spec: str) -> None:
    """After any number of passes: never a mask, nothing out of order, and nothing that was yet to be taken back."""
    whole = 0
    for passes in range(13):
        engine, filling = begun(spec)
        while filling.canvas.passes < passes and not filling.work.finished:
            engine.step()
        ended, canvas = filling.work.finished, filling.canvas
        filling.work.cancel()
        found = filling.output()
        assert filling.work.finished and filling.work.stopped != ended
        assert found.finish_reason == ("length" if ended else "cancelled")
        written = canvas.tokens[len(PROMPT) :].tolist()
        settled = list(takewhile(lambda token: token != MASK, written)) if ended or "dystruct" not in spec else []
        assert found.tokens == settled and found.text == str(settled)
        assert filling.release() == str(settled)
        whole += ended
    assert whole


def test_stopping_and_ending_are_two_states_of_any_task() -> None:
    def asks(fails: bool = False) -> ForwardCoroutine[int]:
        yield [ForwardRequest(model, Segment(np.arange(2), np.array([1, 2])))]
        if fails:
            raise RuntimeError("it failed")
        return 7

    engine = Engine(model := denoiser())
    ends, stops, fails = (engine.enter(asks(fails)) for fails in (False, False, True))
    stops.cancel()
    engine.run([ends])
    assert (ends.finished, ends.stopped, ends.result) == (True, False, 7)
    assert (stops.finished, stops.stopped, stops.result) == (True, True, None)
    assert isinstance(fails.error, RuntimeError) and not fails.stopped
    for each in (ends, fails):
        each.cancel()
        assert not each.stopped


@pytest.fixture(scope="module")
def padded() -> Iterator[LLM]:
    """A model of bytes whose last twenty ids have no token, the mask among them."""
    base = tiny_transformer(1, vocab_size=TOKENS + 20)
    model = Transformer(replace(base.config, causal=False, mask_id=TOKENS + 19), base.weights)
    yield LLM(LoadedModel(model, Tokenizer(make_tokenizer(), bos_id=256, eos_ids=(257,)), None, "tiny", "float64"))


@pytest.mark.parametrize("spec", ["static", "random:eos=never", "static:guidance=1", "freedave", "ccd"])
def test_ids_without_a_token_are_never_written(padded: LLM, spec: str) -> None:
    outputs = padded.diffuse("Hello", spec, n=4, max_new_tokens=24, temperature=8.0)
    tokens = [token for output in outputs for token in output.tokens]
    assert len(set(tokens)) > 10 and max(tokens) < TOKENS
    # Of a model whose tokens are not known such ids are as likely as others.
    unknown = Transformer(padded.model.config, padded.model.weights)  # type: ignore[attr-defined]
    engine = Engine(unknown)
    free = Filling(engine, unknown, Fill(PROMPT, 64, named(spec), 8.0), (), lambda *_: "")
    engine.run([free.work])
    assert max(free.output().tokens) >= TOKENS


def test_no_text_at_all_is_refused(padded: LLM) -> None:
    with pytest.raises(SettingsError, match="n must be at least 1, not 0"):
        padded.diffuse("Hello", n=0)
