"""Canvases as texts: what is settled, what stopping one leaves, and which ids are never written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

import numpy as np
import pytest

from decodery.core.errors import SettingsError
from decodery.diffusion.texts import Fill, Filling
from decodery.engine.engine import Engine
from decodery.llm.llm import LLM
from decodery.models.batch import Segment
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.torch.transformer import Transformer
from decodery.step.forward_request import ForwardCoroutine, ForwardRequest
from decodery.testing import tiny_transformer
from diffusing import MASK, PROMPT, denoiser, named
from tiny_models import make_tokenizer

TOKENS = 260
"""What the tokenizer of bytes has, its special tokens included."""


def begun(spec: str, length: int = 12) -> tuple[Engine, Filling]:
    engine = Engine(model := denoiser())
    return engine, Filling(engine, model, Fill(PROMPT, length, named(spec)), (), lambda _, tokens: str(tokens))


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
