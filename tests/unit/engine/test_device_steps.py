"""Steps of texts on a device choose the tokens that each text would have chosen by itself, and wait once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core import noise
from decodery.core.errors import NumericalError
from decodery.engine.array_batch import ArrayBatch
from decodery.engine.device_steps import DeviceSteps
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.torch.transformer import Transformer
from decodery.sampling import Sampler
from decodery.sampling.batched import BatchedSampling, batched_processors
from decodery.sampling.logits_processor import Context
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.speculative.drafters.suffix_tree import SuffixTree
from decodery.step.drafter import Drafter
from decodery.testing import Garbage, tiny_transformer
from far import HERE, Devices, FarTensor, done, moved

PROMPTS = [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4, [11], list(range(2, 40)), [3, 4] * 5]
SAMPLERS = [
    Sampler.from_settings(temperature=0.0),
    Sampler.from_settings(temperature=1.0),
    Sampler.from_settings(temperature=0.7, top_k=5),
    Sampler.from_settings(temperature=1.3, top_k=20, top_p=0.8, min_p=0.02),
    Sampler.from_settings(temperature=0.9, top_p=0.5),
]
DRAFTERS: dict[str, Drafter | None] = {
    "none": None,
    "prompt-lookup": PromptLookup(),
    "suffix-tree": SuffixTree(),
    "garbage trees": Garbage(nodes=7),
}


def together(model: Transformer) -> Transformer:
    model.pages_together = True
    return model


def written(model: Any, drafters: Sequence[Drafter | None], **settings: Any) -> tuple[list[list[int]], Engine]:
    """Texts of all prompts, each with a sampler, a seed and a drafter of its own."""
    engine = Engine(model)
    texts = [
        engine.submit(
            Request(prompt, sampler=sampler, seed=number, drafter=drafter, max_new_tokens=16 + number, **settings)
        )
        for number, (prompt, sampler, drafter) in enumerate(zip(PROMPTS, SAMPLERS, drafters, strict=True))
    ]
    engine.run(texts)
    return [text.generated for text in texts], engine


def steps_of(engine: Engine) -> DeviceSteps:
    steps = engine._arrays._steps
    assert isinstance(steps, DeviceSteps)
    return steps


@pytest.mark.usefixtures("pools_of_pytorch")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_are_those_of_one_by_one(drafter: str) -> None:
    drafters = [DRAFTERS[drafter]] * len(PROMPTS)
    expected, _ = written(tiny_transformer(), [None] * len(PROMPTS), eos_ids=(0,))
    found, engine = written(together(tiny_transformer()), drafters, eos_ids=(0,))
    assert found == expected and steps_of(engine).waits > 3
    mixed, engine = written(together(tiny_transformer()), [*DRAFTERS.values(), None], eos_ids=(0,))
    assert mixed == expected and steps_of(engine).waits > 3


@pytest.mark.usefixtures("pools_of_pytorch")
def test_noise_of_another_position_gives_other_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail."""
    expected, _ = written(tiny_transformer(), [None] * len(PROMPTS))
    real = noise.keys
    monkeypatch.setattr(noise, "keys", lambda seeds, positions: real(seeds, positions + 1))
    found, _ = written(together(tiny_transformer()), [None] * len(PROMPTS))
    assert found[0] == expected[0] and found[1:] != expected[1:]


@pytest.mark.usefixtures("pools_of_pytorch")
def test_texts_that_come_later_share_the_pass() -> None:
    alone, _ = written(tiny_transformer(), [None] * len(PROMPTS))
    engine, texts = Engine(together(tiny_transformer()), prefill_chunk=4), []
    for number, (prompt, sampler) in enumerate(zip(PROMPTS, SAMPLERS, strict=True)):
        request = Request(prompt, sampler=sampler, seed=number, max_new_tokens=16 + number)
        texts.append(engine.submit(request))
        for _ in range(3):
            engine.step()
    engine.run(texts)
    assert [text.generated for text in texts] == alone
    joined = sum(step.sequences > 1 for text in texts for step in text.trace.steps)
    assert joined and steps_of(engine).waits > 3


@pytest.mark.usefixtures("pools_of_pytorch")
def test_caches_equal_a_fresh_prefill_after_every_step() -> None:
    model, other, compared = together(tiny_transformer()), tiny_transformer(), 0
    engine = Engine(model)
    texts = [engine.submit(Request(prompt, drafter=Garbage(nodes=5), max_new_tokens=12)) for prompt in PROMPTS]
    while not any(text.finished for text in texts):
        engine.step()
        for text in texts:
            if text.finished or not text.position:
                continue
            n, fresh = len(text.tokens) - 1, other.new_cache()
            other.forward(Batch([Segment.chunk(text.tokens[:n], fresh)]))
            fresh.keep(range(n))
            assert text.cache.length == text.cache.next_position == n and not text.cache.tentative
            assert (text.cache.positions[:, :n] == np.arange(n)).all()
            assert torch.allclose(text.cache.data[:, :, :, :n], fresh.data[:, :, :, :n], rtol=0, atol=1e-10)
            compared += 1
    assert compared > 10 and steps_of(engine).waits


@pytest.mark.usefixtures("pools_of_pytorch")
def test_a_text_whose_logits_are_no_numbers_ends_and_the_others_go_on() -> None:
    model = together(tiny_transformer())
    expected, _ = written(tiny_transformer(), [None] * len(PROMPTS))
    real = BatchedSampling.choose

    def broken(self: Any, logits: torch.Tensor, owners: np.ndarray, keys: np.ndarray) -> torch.Tensor:
        logits[owners == 1] = torch.nan
        return real(self, logits, owners, keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchedSampling, "choose", broken)
        engine = Engine(model)
        texts = [
            engine.submit(Request(prompt, sampler=sampler, seed=number, max_new_tokens=16 + number))
            for number, (prompt, sampler) in enumerate(zip(PROMPTS[:3], SAMPLERS, strict=False))
        ]
        while not texts[1].finished:
            engine.step()
    assert isinstance(texts[1].error, NumericalError)
    engine.run([texts[0], texts[2]])
    assert [texts[0].generated, texts[2].generated] == [expected[0], expected[2]]


def test_batched_processors_are_those_of_each_text() -> None:
    random = np.random.default_rng(0)
    samplers = [
        *SAMPLERS,
        Sampler.from_settings(temperature=0.5, top_k=3, top_p=0.9),
        Sampler.from_settings(temperature=1.7, top_k=50, top_p=0.7),
        Sampler.from_settings(temperature=0.0, top_k=4),
        Sampler.from_settings(temperature=0.8, min_p=0.1, order="default"),
    ]
    found = [batched_processors(sampler, 200) for sampler in samplers]
    texts = [each for each in found if each is not None]
    assert len(texts) == len(samplers)
    sampling = BatchedSampling(texts)
    for _ in range(20):
        owners = np.repeat(np.arange(len(samplers)), random.integers(1, 5, len(samplers)))
        logits = torch.from_numpy(random.normal(0, 3, (len(owners), 200))).float()
        # Equals at every border.
        logits = (logits * 4).round() / 4
        seeds, positions = random.integers(0, 2**63, len(owners)).astype(np.uint64), random.integers(0, 99, len(owners))
        logits[1, 7] = torch.nan
        picks = sampling.choose(logits, owners, noise.keys(seeds, positions)).tolist()
        assert picks[1] == -1
        for row, owner in enumerate(owners.tolist()):
            if row != 1:
                law = samplers[owner].law(logits[row : row + 1], [Context(0, [])])
                expected = samplers[owner].pick(law, int(seeds[row]), [int(positions[row])]).tolist()
                assert [picks[row]] == expected


def test_what_is_applied_text_by_text_is_left_to_the_texts() -> None:
    for settings in ({"repetition_penalty": 1.2}, {"typical": 0.9}, {"mirostat": 2}, {"logit_bias": {3: 1.0}}):
        assert batched_processors(Sampler.from_settings(temperature=0.8, **settings), 64) is None


def test_keys_are_those_of_one_text() -> None:
    random = np.random.default_rng(1)
    seeds, positions = random.integers(0, 2**64, 50, dtype=np.uint64), random.integers(-3, 1 << 40, 50)
    found = noise.keys(seeds, positions)
    words = [noise.mix(int(seed), noise.TOKEN, int(place)) for seed, place in zip(seeds, positions, strict=True)]
    assert found.view(np.uint64).tolist() == words
    logits = torch.randn(130, 300, generator=torch.Generator().manual_seed(0))
    seeds, positions = random.integers(0, 2**64, 130, dtype=np.uint64), random.integers(0, 99, 130)
    picks = noise.keyed_argmax(logits, torch.from_numpy(noise.keys(seeds, positions))).tolist()
    for row, pick in enumerate(picks):
        assert [pick] == noise.gumbel_argmax(logits[row : row + 1], int(seeds[row]), [int(positions[row])]).tolist()


class Watched(Devices):
    """Counts what makes a program wait for a device that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.uploads = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func.overloadpacket)
        far = any(isinstance(each, FarTensor) for each in args if isinstance(each, torch.Tensor))
        asked = (kwargs or {}).get("device")
        if name in ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.unique_dim"):
            self.waits[name] += far
        if name == "aten._to_copy" and asked is not None:
            self.waits["copies out"] += far and torch.device(asked) == HERE
            self.uploads += not far and torch.device(asked) != HERE
        if name == "aten.copy_":
            self.waits["copies out"] += not isinstance(args[0], FarTensor) and isinstance(args[1], FarTensor)
        return done(func, args, kwargs or {})


def waited(drafters: Sequence[Drafter | None]) -> tuple[list[list[int]], list[tuple[int, int]], ArrayBatch]:
    """Texts on a device that is none, and of each step in which all are written its waits and its copies to there."""
    with Watched() as watched, pytest.MonkeyPatch.context() as patch:
        patch.setattr(FarTensor, "tolist", lambda far: [watched.waits.update(["tolist"]), far.near.tolist()][1])
        base = tiny_transformer()
        model = Transformer(base.config, moved(base.weights, "meta:0"))
        engine = Engine(model)
        texts = [
            engine.submit(Request(prompt, sampler=sampler, seed=number, drafter=each, max_new_tokens=16 + number))
            for number, (prompt, sampler, each) in enumerate(zip(PROMPTS, SAMPLERS, drafters, strict=True))
        ]
        while any(not text.position for text in texts):
            engine.step()
        engine.step()
        counts = []
        while not any(text.finished for text in texts):
            before = watched.waits.total(), watched.uploads
            engine.step()
            counts.append((watched.waits.total() - before[0], watched.uploads - before[1]))
        engine.run(texts)
    return [text.generated for text in texts], counts, engine._arrays


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup"])
def test_a_step_of_many_texts_waits_once(drafter: str) -> None:
    expected, _ = written(tiny_transformer(), [None] * len(PROMPTS))
    found, counts, arrays = waited([DRAFTERS[drafter]] * len(PROMPTS))
    assert found == expected and isinstance(arrays._steps, DeviceSteps)
    assert len(counts) > 3 and all(waits == 1 for waits, _ in counts)
    # Tokens, positions, what attention goes by, and what choosing goes by; at times page tables and rows that move.
    assert sorted(copies for _, copies in counts)[len(counts) // 2] == 4


def test_texts_one_by_one_wait_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count can fail."""
    monkeypatch.setattr(DeviceSteps, "serves", staticmethod(lambda model: False))
    expected, _ = written(tiny_transformer(), [None] * len(PROMPTS))
    found, counts, _ = waited([None] * len(PROMPTS))
    assert found == expected and all(waits >= len(PROMPTS) for waits, _ in counts)


def test_a_model_on_the_processor_keeps_its_own_steps() -> None:
    assert not DeviceSteps.serves(tiny_transformer())
