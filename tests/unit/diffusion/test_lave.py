"""Canvases under a constraint: after every token some text that is allowed agrees with all of them, by brute force."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from covering import FULL
from decodery.constraints import Grammar, JSONSchema, Regex
from decodery.core.errors import SettingsError
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.closing import Closing
from decodery.diffusion.held import Held, Hold
from decodery.diffusion.lave import LAVE
from decodery.diffusion.run import Run, filled
from decodery.diffusion.texts import Fill, Filling
from decodery.engine.engine import Engine
from decodery.models.batch import Batch, Scores
from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.step.forward_request import gather, run_sync
from diffusing import MASK, PROMPT, denoiser, fill, named, order

END = 18
LETTERS = "abcdefghijklmnopqr"
WORDS = Vocabulary(
    [letter.encode() for letter in LETTERS] + [b"", b""],
    frozenset({END, MASK}),
    (END,),
    lambda text: [LETTERS.index(letter) for letter in text if letter in LETTERS],
)
PATTERN = "(ab?c|[de]{2,3}f)(gh){0,2}|i[jk]l[mn](op){1,2}q|ab?r{6}"
LENGTH = 8


def language() -> list[list[int]]:
    """All texts of the pattern that fit, each with ends up to the length of the canvas."""
    parts = [p + q for p in ("ac", "abc", *map("".join, (*product("de", "de", "f"), *product("de", "de", "de", "f"))))
             for q in ("", "gh", "ghgh")]  # fmt: skip
    parts += ["i" + a + "l" + b + c + "q" for a in "jk" for b in "mn" for c in ("op", "opop")]
    parts += ["arrrrrr", "abrrrrrr"]
    assert all(re.fullmatch(PATTERN, part) for part in parts)
    return [[*WORDS.encode(part), *[END] * (LENGTH - len(part))] for part in parts if len(part) <= LENGTH]


def held_to(constraint: Any) -> Hold:
    return Hold(constraint.compile(WORDS), WORDS)


@torch.no_grad()
def filled_under(hold: Hold, spec: str, seed: int = 0, length: int = LENGTH, temperature: float = 0.9) -> Canvas:
    model = denoiser(seed % 5)
    canvas = Canvas.of(model, PROMPT, length, eos_ids=[END], seed=seed)
    return run_sync(filled(model, canvas, LAVE.around(named(spec)), temperature, hold))


def agree(texts: list[list[int]], canvas: Canvas) -> list[bool]:
    """Of every token, as it was written, whether some text agrees with it and with all before it."""
    there, found = np.full(LENGTH, -1), []
    for place, token in order(canvas):
        there[place - len(PROMPT)] = token
        found.append(any(all(t in (-1, w) for t, w in zip(there, text, strict=True)) for text in texts))
    return found


@pytest.mark.parametrize(
    "spec",
    ["static", "random", "static:steps=2", "threshold:tau=0.05", "lave:policy=static,top=1,others=0,retries=0"],
)
def test_every_token_leaves_a_text_that_fits_and_every_output_is_one(spec: str) -> None:
    """And a lookahead that takes any filling for one that fits does not."""
    texts, hold = language(), held_to(Regex(PATTERN))
    for seed in range(8 if FULL else 4):
        canvas = filled_under(hold, spec, seed)
        assert all(agree(texts, canvas)), (seed, order(canvas))
        written = "".join(LETTERS[token] for token in canvas.output if token != END)
        assert re.fullmatch(PATTERN, written) and len(canvas.output) == min(len(written) + 1, LENGTH)
        assert "steps=2" not in spec or canvas.passes <= 2
        assert canvas.checks is not None and canvas.checks.tried >= canvas.checks.refused + canvas.checks.known


def test_a_rule_that_forgets_the_room_or_the_holes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, hold = language(), held_to(Regex(PATTERN))
    right = Closing.find
    monkeypatch.setattr(Closing, "find", lambda self, state, most, **settings: right(self, state, 99, **settings))
    found = [filled_under(hold, "static", seed) for seed in range(8)]
    assert not all(all(agree(texts, canvas)) for canvas in found)
    monkeypatch.undo()
    monkeypatch.setattr(Held, "_extended", lambda self, found, view, place, token: found)
    assert not all(all(agree(texts, filled_under(hold, "random", seed))) for seed in range(8))


def test_a_constraint_that_allows_everything_changes_nothing() -> None:
    hold, model = held_to(Regex("[a-r]*")), denoiser(2)
    for spec in ("static", "threshold:tau=0.1", "static:block=4,cache=dual", "ccd"):
        free = fill(model, spec, LENGTH, seed=3, temperature=0.7, eos=[END])
        held = Canvas.of(model, PROMPT, LENGTH, eos_ids=[END], seed=3)
        with torch.no_grad():
            run_sync(filled(model, held, LAVE.around(named(spec)), 0.7, hold))
        assert set(order(held)) == set(order(free)) and held.output == free.output and held.passes == free.passes


def test_canvases_under_a_grammar_share_passes_and_keep_their_texts() -> None:
    hold, model = held_to(Grammar('start: "a" start "b" | "c" "d"*')), denoiser(1)
    method = LAVE.around(named("threshold:tau=0.1,block=4"))
    with torch.no_grad():
        alone = [
            run_sync(filled(model, Canvas.of(model, PROMPT[:n], 8, eos_ids=[END], seed=n), method, 0.8, hold))
            for n in (2, 4)
        ]
        canvases = [Canvas.of(model, PROMPT[:n], 8, eos_ids=[END], seed=n) for n in (2, 4)]
        run_sync(gather([filled(model, canvas, method, 0.8, hold) for canvas in canvases]))
    assert [order(canvas) for canvas in canvases] == [order(canvas) for canvas in alone]
    for canvas in canvases:
        text = "".join(LETTERS[token] for token in canvas.output if token != END)
        depth = len(text) - len(text.lstrip("a"))
        assert re.fullmatch(f"a{{{depth}}}cd*b{{{depth}}}", text)


class Liking:
    """Logits of a denoiser with more for some tokens at every place."""

    def __init__(self, liked: dict[int, float], vocab: int = MASK + 1) -> None:
        base = denoiser()
        self._liked = liked
        self._vocab = vocab
        self.config = replace(base.config, vocab_size=vocab, mask_id=vocab - 1, max_positions=512)
        self.vocab_size = vocab
        self.capabilities, self.device, self.dtype, self.fingerprint = base.capabilities, base.device, base.dtype, ""

    def forward(self, batch: Batch, **settings: Any) -> Scores:
        _, bounds = batch.logit_rows
        logits = torch.randn(bounds[-1], self._vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for token, more in self._liked.items():
            logits[:, token] += more
        return Scores(logits, bounds, {}, batch.offsets)


@pytest.mark.parametrize("spec", ["static", "random", "threshold:tau=0.9", "static:steps=4", "static:block=8"])
def test_what_a_model_likes_is_not_begun_where_its_end_has_no_room(spec: str) -> None:
    """The only text of 24 places that begins with c has no end there; of 48 places it has, and there c is written."""
    hold = held_to(Regex("a*(b|c{40}d)"))
    model: Any = Liking({2: 20.0})
    for length, pattern in ((24, "a*b"), (48, "a*(b|c{40}d)")):
        canvas = Canvas.of(model, PROMPT, length, eos_ids=[END], seed=1)
        with torch.no_grad():
            run_sync(filled(model, canvas, LAVE.around(named(spec)), 0.0, hold))
        text = "".join(LETTERS[token] for token in canvas.output if token != END)
        assert re.fullmatch(pattern, text), text
    assert "c" in text


SCHEMAS: list[Any] = [
    {"type": "object", "required": ["name", "tags"], "properties": {
        "name": {"type": "string"}, "tags": {"type": "array", "items": {"enum": ["alpha", "beta"]}, "minItems": 2}}},
    {"type": "object", "required": ["point"], "properties": {"point": {
        "type": "object", "required": ["x", "y"], "properties": {"x": {"type": "integer"}, "y": {"type": "number"}}}}},
    {"anyOf": [{"type": "array", "minItems": 12, "items": {"type": "boolean"}}, {"enum": ["a much longer string"]}]},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_objects_are_whole_where_they_fit(schema: Any) -> None:
    """Of bytes, by a model that likes to go on: quotes and braces are what it likes least."""
    from jsonschema import validate

    bytes_ = Vocabulary(
        [bytes([i]) for i in range(256)] + [b"", b""], frozenset({256, 257}), (256,), lambda t: [*t.encode()]
    )
    hold = Hold(JSONSchema(schema).compile(bytes_), bytes_)
    model: Any = Liking({byte: 5.0 if bytes([byte]).isalnum() else 2.0 * (byte == 32) for byte in range(128)}, 258)
    for spec in ("block=8", "block=16,policy=static(steps=12)"):
        canvas = Canvas.of(model, PROMPT, 48, eos_ids=[256], seed=1)
        with torch.no_grad():
            run_sync(filled(model, canvas, named(f"lave:likely=2,top=1,others=1,retries=1,{spec}"), 0.0, hold))
        validate(json.loads(bytes(token for token in canvas.output if token < 256)), schema)


def test_a_text_that_is_complete_is_told_from_one_that_is_full() -> None:
    """Without a place for its end a text may be either; what a constraint holds is never cut."""
    model = denoiser()
    for pattern, reason in (("a{8}", "stop"), ("a{3}", "stop"), (None, "length")):
        engine, hold = Engine(model), None if pattern is None else held_to(Regex(pattern))
        method = named("static") if hold is None else LAVE.around(named("static"))
        filling = Filling(engine, model, Fill(PROMPT, LENGTH, method, hold=hold), (END,) if hold else (), lambda *_: "")
        engine.run([filling.work])
        found = filling.output()
        assert found.finish_reason == reason and len(found.tokens) == (4 if pattern == "a{3}" else LENGTH)
        assert found.stopped_by == (END if pattern == "a{3}" else None)


def test_what_cannot_be_held_is_refused_in_one_sentence() -> None:
    model = denoiser()
    long = held_to(Regex("a{12}"))
    with pytest.raises(SettingsError, match="was found that fits into 8 tokens: give a longer canvas"):
        filled_under(long, "static")
    assert filled_under(long, "static", length=12).output == [0] * 12
    with pytest.raises(SettingsError, match="give one, such as --json-schema"):
        fill(model, "lave", 4)
    with pytest.raises(SettingsError, match="one state per pass"):
        filled_under(held_to(Regex("a*")), "freedave")
    with pytest.raises(SettingsError, match="leave out eos=never"):
        filled_under(held_to(Regex("a*")), "static:eos=never")
    with pytest.raises(SettingsError, match="settings of lave itself"):
        named("lave:policy=static(block=4)")
    assert isinstance(Run(model, Canvas.of(model, PROMPT, 4), named("static")).hold, type(None))
