"""Caches of canvases: exact when fresh, else what a slow model makes of keys and values that are put in by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.errors import PromptError, SettingsError
from decodery.core.registry import resolve
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.run import Run, filled
from decodery.diffusion.scheduled import shuffled
from decodery.diffusion.texts import Fill, Filling
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Scores, Segment
from decodery.models.torch.rope import rope_table
from decodery.models.torch.transformer import Transformer
from decodery.step.forward_request import ForwardRequest, run_sync
from decodery.testing import tiny_transformer, to_int8
from decodery.testing.models import Counted
from diffusing import KINDS, MASK, PROMPT, denoiser, fill, nats, order

FRESH = ["prefix(refresh=1)", "dual(refresh=1)", "dkv(refresh=1)", "window(inner=32,outer=32,refresh=1)"]
GREEDY = "dkv-greedy(refresh=3,window=2)"


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_is_always_fresh_changes_nothing(kind: str) -> None:
    """Nor does the prefix cache of a model whose rows see nothing of later blocks, fresh or not."""
    model, block = denoiser(**KINDS[kind]), "" if kind == "blocks" else ",block=8"
    for method in ("static", "static:guidance=1.5", *(("threshold:tau=0.3",) if kind == "full" else ())):
        spec = f"{method}{',' if ':' in method else ':'}cache="
        bare = fill(model, f"{spec}none{block}", temperature=0.7)
        for cache in ("prefix", "prefix(refresh=2)") if kind == "blocks" else FRESH:
            found = fill(model, f"{spec}{cache}{block}", temperature=0.7)
            assert order(found) == order(bare), cache
            assert (nats(found) - nats(bare)).abs().max() < 1e-10, cache
            assert found.passes == bare.passes
            assert found.rows < bare.rows if kind == "blocks" else found.rows == bare.rows
    if kind != "blocks":
        ordered = [fill(model, f"random:cache={cache}{block}") for cache in ("none", "dkv-greedy(refresh=1)")]
        assert order(ordered[0]) == order(ordered[1]) and (nats(ordered[0]) - nats(ordered[1])).abs().max() < 1e-10
        stale = [fill(model, f"static:cache={cache}{block}") for cache in ("prefix", "dual", "dkv(refresh=4)")]
        exact = nats(fill(model, f"static{block.replace(',', ':')}"))
        assert all((nats(each) - exact).abs().max() > 1e-3 for each in stale), "these were to read what is stale"
        assert all(each.rows < 16 * 21 for each in stale)


def test_native_kernels_give_the_same_bits_with_and_without_a_cache() -> None:
    """Rows are exact there whatever shares their pass, and masks and selected slots are read in place."""
    base = tiny_transformer(1, vocab_size=MASK + 1, hidden_size=64)
    for kind, config in KINDS.items():
        settings = {"causal": False, "mask_id": MASK} | config
        model = to_int8(Transformer(replace(base.config, **settings), base.weights))
        block = "" if kind == "blocks" else ",block=8"
        alike, exact = "static:noise=position", "prefix" if kind == "blocks" else FRESH[2]
        bare = fill(model, f"{alike},cache=none{block}", 8, temperature=0.5)
        cached = fill(model, f"{alike},cache={exact}{block}", 8, temperature=0.5)
        free = fill(model, f"freedave:cache=none{block}", 8, temperature=0.5)
        for other in (cached, free):
            assert order(other) == order(bare) and torch.equal(nats(other), nats(bare))


class Slow:
    """A two-layer model in plain PyTorch that keeps keys and values by layer and position, and reads which it is told.

    Rows are computed one layer after another over [queries + keys], each key as it was when it was last computed.
    """

    def __init__(self, model: Transformer) -> None:
        self.model, self.kept = model, [dict[int, torch.Tensor](), dict[int, torch.Tensor]()]

    def rows(self, tokens: np.ndarray, queries: list[int], there: list[int]) -> dict[int, torch.Tensor]:
        weights, config = self.model.weights, self.model.config
        cos, sin = (each[:, None].double() for each in rope_table(config.rope, config.head_dim, 64))
        hidden = weights.embedding[torch.from_numpy(tokens[queries])]
        norm = lambda x: x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()  # noqa: E731
        for layer, kept in zip(weights.layers, self.kept, strict=True):
            q, k, v = layer.qkv(norm(hidden)).view(-1, 8, 8).split((4, 2, 2), dim=1)
            turn = lambda x: torch.cat((  # noqa: E731
                x[..., :4] * cos[queries] - x[..., 4:] * sin[queries],
                x[..., 4:] * cos[queries] + x[..., :4] * sin[queries],
            ), dim=-1)  # fmt: skip
            kept.update(zip(queries, torch.stack((turn(k), v), dim=1), strict=True))
            keys, values = torch.stack([kept[place] for place in there], dim=2).repeat_interleave(2, dim=1)
            weight = (torch.einsum("qhd,hkd->hqk", turn(q), keys) * config.attention_scale).softmax(-1)
            hidden = hidden + layer.output(torch.einsum("hqk,hkd->qhd", weight, values).flatten(1))
            gate, up = layer.gate_up(norm(hidden)).chunk(2, dim=-1)
            hidden = hidden + layer.down(torch.nn.functional.silu(gate) * up)
        return dict(zip(queries, weights.head(norm(hidden)), strict=True))


def slow_static(model: Transformer, block: int, queries: Callable[..., tuple[list[int], list[int]]]) -> list[Any]:
    """Static decoding, one token a pass; queries(pass, region, written at pass) -> computed, and there at all.

    A third value is the place that is written, where it is known before.
    """
    slow, length, shift = Slow(model), len(PROMPT) + 16, int(model.config.shifted)
    tokens = np.array(PROMPT + [MASK] * 16)
    at = np.where(tokens == MASK, 10**6, -1)
    found: list[Any] = []
    for start in range(len(PROMPT), length, block):
        for step in range(block):
            wanted = [i for i in range(start, start + block) if tokens[i] == MASK]
            computed, there, *due = queries(step, (start, start + block), at - len(found))
            wanted = due or wanted
            needed = {i - 1 for i in [start, *wanted]} if shift else set()
            rows = slow.rows(tokens, sorted({*computed, *needed}), there)
            laws = {i: rows[i - shift][:MASK].log_softmax(0) for i in wanted if i in computed}
            best = max(laws, key=lambda i: (float(laws[i].max()), -i))
            tokens[best], at[best] = int(laws[best].argmax()), len(found)
            found.append((best, int(tokens[best]), float(laws[best].max())))
    return found


def everything(length: int = 21) -> list[int]:
    return list(range(length))


def greedy(step: int, region: tuple[int, int], age: np.ndarray) -> tuple[list[int], list[int], int]:
    """Every third pass everything; else the next place, the last one and two open ones beside the next."""
    left = [place for place in shuffled(0, region).tolist() if age[place] > 0]
    near = sorted(left[1:], key=lambda place: (abs(place - left[0]), place))[:2]
    few = [left[0], *near, *(i for i in everything() if age[i] == -1 and i >= len(PROMPT))]
    return everything() if step % 3 == 0 else few, everything(), left[0]


PLANS: dict[str, Callable[..., tuple[list[int], list[int]]]] = {
    "prefix": lambda step, region, age: (everything()[region[0] if step else 0 :], everything()),
    "dual": lambda step, region, age: (list(range(*region)) if step else everything(), everything()),
    # Written two passes ago or earlier: age is counted from the pass that is to come.
    "dkv(refresh=3)": lambda step, region, age: (
        everything() if step < 2 or step % 3 == 0 else [i for i in everything() if age[i] > -2 and i > 4],
        everything(),
    ),
    "dkv(refresh=3,prompt=true)": lambda step, region, age: (
        (
            everything()[5 if (age[5:] < 0).any() else 0 :]
            if step < 2 or step % 3 == 0
            else [i for i in everything() if age[i] > -2 and i > 4]
        ),
        everything(),
    ),
    GREEDY: greedy,
}


@pytest.mark.parametrize("kind", ["full", "shifted"])
@pytest.mark.parametrize("cache", PLANS)
def test_what_is_read_is_what_was_left(kind: str, cache: str) -> None:
    """Against rows whose keys and values are chosen by hand, and told apart from those that are not."""
    model = denoiser(**KINDS[kind])
    canvas = fill(model, f"{'random' if cache == GREEDY else 'static'}:block=8,cache={cache}")
    expected = slow_static(model, 8, PLANS[cache])
    assert order(canvas) == [(place, token) for place, token, _ in expected]
    assert (nats(canvas) - torch.tensor([each[2] for each in expected], dtype=torch.float64)).abs().max() < 1e-9


def test_what_lies_beyond_the_window_is_not_there() -> None:
    """Noise in its embedding would change every row that sees it; and tokens come from left to right."""
    model, seen = Counted(denoiser()), list[int]()
    forward = model.model.forward

    def watch(batch: Batch, **settings: Any) -> Scores:
        (segment,) = batch.segments
        held = segment.cache.positions[0, : segment.cache.length].tolist() if segment.cache else []
        seen.append(max([*segment.positions, *held]))
        return forward(batch, **settings)

    model.model.forward = watch  # type: ignore[method-assign]
    canvas = fill(model, "static:cache=window(inner=2,outer=5,refresh=3)")
    places = [place for place, _ in order(canvas)]
    assert all(place - 5 - rank <= 1 for rank, place in enumerate(places)) and sorted(places) == list(range(5, 21))
    # A fresh pass sees the first five open places and nothing after them.
    assert seen[0] == 9 and seen[:3] == [9, 9, 9] and seen[3] == 12


@pytest.mark.parametrize("kind", KINDS)
def test_freedave_writes_what_static_decoding_writes_in_the_same_order(kind: str) -> None:
    block = "" if kind == "blocks" else ",block=4"
    saved = 0
    for seed in range(2):
        model = denoiser(seed, **KINDS[kind])
        for cache in ("none", "prefix") if kind == "blocks" else ("none", "prefix", "dual"):
            spec, settings = f"static:noise=position,cache={cache}{block}", {"temperature": 0.7 * (seed % 2)}
            static = fill(model, spec, 8, seed=seed, eos=[7], **settings)
            for drafts in (1, 4):
                spec = f"freedave:drafts={drafts},cache={cache}{block}"
                free = fill(model, spec, 8, seed=seed, eos=[7], **settings)
                assert order(free) == order(static) and free.output == static.output
                assert (nats(free) - nats(static)).abs().max() < 1e-10
                assert free.passes == static.passes if drafts == 1 else free.passes <= static.passes
                saved += static.passes - free.passes
    assert saved > 0, "nothing was drafted right, so nothing was verified"


def test_a_shifted_model_and_its_twin_write_the_same_text() -> None:
    """A model whose row i is the other's row i + 1 is the same model to whoever fills canvases."""
    plain = denoiser()

    class Ahead(Counted):
        config = replace(plain.config, shifted=True)

        def forward(self, batch: Batch, **settings: Any) -> Scores:
            ahead = [replace(each, logit_rows=[row + 1 for row in each.logit_rows]) for each in batch.segments]
            return self.model.forward(Batch(ahead), **settings)

    for method in ("static:block=4", "threshold:tau=0.3", "freedave"):
        assert order(fill(Ahead(plain), method, seed=3)) == order(fill(plain, method, seed=3))


def test_canvases_and_texts_share_an_engine_and_are_what_they_are_alone() -> None:
    diffusing, writing = Counted(denoiser()), tiny_transformer(5)
    specs = ["static:block=4,cache=dual", "threshold:tau=0.3", "freedave", "ccd", "static:block=8,cache=dkv"]
    alone = [fill(diffusing, spec, prompt=PROMPT[: 3 + n % 2], seed=n, temperature=0.5) for n, spec in enumerate(specs)]
    text = Engine(writing)
    plain = text.submit(Request([1, 2, 3], max_new_tokens=20))
    text.run([plain])
    for own in (writing, diffusing):
        engine, before = Engine(own), len(diffusing.rows)
        canvases = [Canvas.of(diffusing, PROMPT[: 3 + n % 2], 16, seed=n) for n in range(len(specs))]
        jobs = [
            engine.enter(filled(diffusing, canvas, resolve("diffusion", spec), 0.5), canvas.trace)
            for canvas, spec in zip(canvases, specs, strict=True)
        ]
        if own is writing:
            seq = engine.submit(Request([1, 2, 3], max_new_tokens=20))
            engine.run([*jobs, seq])
            assert seq.generated == plain.generated
        else:
            engine.run(jobs)
        assert [order(canvas) for canvas in canvases] == [order(canvas) for canvas in alone]
        passes = max(canvas.passes for canvas in canvases)
        assert len(diffusing.rows) - before == passes < sum(canvas.passes for canvas in canvases)
        assert all(sum(canvas.trace.ledger.rows.values()) == canvas.rows for canvas in canvases)
        assert all(canvas.trace.tokens == 16 for canvas in canvases)


@pytest.mark.parametrize(("spec", "length", "said"), [
    ("static:block=5", 16, "do not divide a canvas of 16"),
    ("static:steps=3,block=8", 16, "cannot be divided evenly"),
    ("threshold:tau=0", 16, "above 0 and up to 1"),
    ("threshold:tau=1.01", 16, "above 0 and up to 1"),
    ("local-leap:relaxed=2", 16, "relaxed must be a probability"),
    ("factor:phi=-1", 16, "phi must be 0 or more"),
    ("cad:least=3,most=2", 16, "1 <= least <= most"),
    ("static:cache=dkv(refresh=0)", 16, "give at least 1"),
    ("static:cache=window(inner=4,outer=2)", 16, "inner <= outer"),
    ("freedave:cache=dkv", 16, "several states"),
    ("static:noise=fixed", 16, "is not pass or position"),
    ("static:cache=dkv-greedy", 16, "only the policy random"),
    ("random:cache=dkv-greedy(window=-1)", 16, "window must be 0 or more"),
    ("ccd-agreement:places=0", 16, "places at least 1"),
    ("explore-exploit:branches=2,cache=dkv", 16, "several states"),
    ("static:top_p=0", 16, "top_p above 0"),
    ("static:alg_temp=-1", 16, "alg_temp must be 0 or more"),
    ("entropy-bounded:gamma=-1", 16, "gamma must be 0 or more"),
    ("edit:least=0", 16, "at least 1 token"),
    ("edit:cache=dual", 16, "leave cache out"),
    ("static:block=0", 16, "block must be at least 1"),
    ("static", 600, "exceed the model's context"),
    ("static", 0, "at least one token"),
])  # fmt: skip
def test_bad_settings_are_said_in_one_sentence(spec: str, length: int, said: str) -> None:
    with pytest.raises((SettingsError, PromptError), match=said) as error:
        fill(denoiser(), spec, length)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_models_that_do_not_fit_are_refused() -> None:
    for model, said in ((tiny_transformer(), "left to right"), (denoiser(mask_id=None), "no mask token")):
        with pytest.raises(SettingsError, match=said):
            Canvas.of(model, PROMPT, 8)
    with pytest.raises(PromptError, match="has the mask token"):
        Canvas.of(denoiser(), [1, MASK], 8)
    blocks = denoiser(block_length=4)
    for spec, said in (("static:block=8", "blocks of 4"), ("static:cache=dual", "use cache=prefix")):
        with pytest.raises(SettingsError, match=said):
            Run(blocks, Canvas.of(blocks, PROMPT, 8), resolve("diffusion", spec))
    with pytest.raises(SettingsError, match="diffusion model"):
        Engine(denoiser()).submit(Request([1, 2]))
    assert run_sync(filled(blocks, Canvas.of(blocks, PROMPT, 6), resolve("diffusion", "static:block=4"))).limit == 6


@torch.no_grad()
def test_a_canvas_whose_memory_is_taken_away_is_filled_as_if_it_were_not() -> None:
    """Whenever and however often, with every cache; keys and values that are read anew from what is written are not."""
    for kind, specs in {
        "full": ("static:block=8,cache=prefix", "static:block=8,cache=dual", "static:cache=dkv(refresh=5)",
                 "static:cache=window(inner=4,outer=8,refresh=3)", "static:cache=dkv(refresh=3,prompt=true)",
                 f"random:cache={GREEDY}", "freedave:block=8,cache=dual", "static"),
        "shifted": ("static:block=8,cache=dual", "static:cache=dkv(refresh=5)"),
        "blocks": ("threshold:tau=0.2,cache=prefix",),
    }.items():  # fmt: skip
        model = denoiser(**KINDS[kind])
        for spec in specs:
            wanted = fill(model, spec, temperature=0.7)
            engine = Engine(model)
            begun = Filling(engine, model, Fill(PROMPT, 16, resolve("diffusion", spec), 0.7), (), lambda *_: "")
            beside = Filling(engine, model, Fill(PROMPT[:3], 8, resolve("diffusion", spec)), (), lambda *_: "")
            for number in range(400):
                if begun.work.finished and beside.work.finished:
                    break
                if number % 2 == 0:
                    engine.preempt(begun.work)
                engine.step()
            assert begun.work.finished and begun.work.error is None, spec
            assert order(begun.canvas) == order(wanted), spec
            assert (nats(begun.canvas) - nats(wanted)).abs().max() < 1e-10, spec
            assert begun.canvas.passes == wanted.passes
            assert (engine.preemptions > 1) == (spec != "static"), (spec, engine.preemptions)
            assert order(beside.canvas) == order(fill(model, spec, 8, prompt=PROMPT[:3]))


@torch.no_grad()
def test_a_wrong_recovery_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_what_is_written(self: Run) -> Any:
        earlier = self._earlier
        for passed in earlier.passes[-1:]:
            earlier.select(passed)
            tokens = self.canvas.tokens[passed.rows]
            yield [ForwardRequest(self.model, Segment(passed.rows, tokens, cache=earlier.caches[0], logit_rows=[]))]
        if earlier.pending is not None:
            earlier.select(earlier.pending)

    model, spec = denoiser(), "static:cache=dkv(refresh=5)"
    monkeypatch.setattr(Run, "recover", from_what_is_written)
    engine = Engine(model)
    begun = Filling(engine, model, Fill(PROMPT, 16, resolve("diffusion", spec), 0.7), (), lambda *_: "")
    for number in range(400):
        if begun.work.finished:
            break
        if number % 3 == 0:
            engine.preempt(begun.work)
        engine.step()
    wanted = nats(fill(model, spec, temperature=0.7))
    assert begun.work.error is not None or (nats(begun.canvas) - wanted).abs().max() > 1e-6
