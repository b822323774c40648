"""What single monitors compute, against a few lines of plain Python, and what wrong ones would be caught by."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, SettingsError, UnsupportedModel
from decodery.engine.monitoring import monitor_reports
from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.hooks import Intervention
from decodery.monitors.codebook import Codebook, Codebooks, coding
from decodery.monitors.confidence import Confidence
from decodery.monitors.context_awareness import ContextAwareness, adding
from decodery.monitors.neurofeedback import Neurofeedback
from decodery.monitors.probe import Pool, Probe
from decodery.monitors.program_probe import ProgramProbe
from decodery.monitors.sae import SAE, HeadCodes
from decodery.monitors.sequential import Sequential
from decodery.monitors.threshold import Threshold
from decodery.sampling.sampler import Sampler
from decodery.testing import decode, tiny_transformer, to_int8
from decodery.training import codebook
from decodery.training.codebook import CodebookSettings, train_codebook
from decodery.training.direction import axis_of
from decodery.training.sae import own_codes, train_sae
from decodery.training.sequential import built_in_talks, triples
from decodery_benchmarks.puzzles.robot import Robot
from decodery_benchmarks.training.program_probe import WrittenProgram, rows_and_states
from decodery_benchmarks.training.puzzle_model import TransformerShape, random_transformer
from methods import untrained_codebooks, untrained_codes, untrained_fields, untrained_probe
from serving import tiny_lm

MODEL = tiny_transformer(0)
EXACT = to_int8(MODEL)
PROMPT = np.random.default_rng(1).integers(0, 64, 17).tolist()
SAMPLED = Sampler.from_settings(temperature=1.0)


def told(text: Any, number: int = 0) -> list[float | None]:
    return list(monitor_reports(text)[number].scores)


def states(tokens: list[int], *taps: str) -> dict[Any, torch.Tensor]:
    return EXACT.forward(Batch([Segment.chunk(tokens, EXACT.new_cache())]), taps=list(taps)).hidden


def test_what_is_regenerated_is_the_text_of_the_seed_that_is_told() -> None:
    settings: dict[str, Any] = {"sampler": SAMPLED, "max_new_tokens": 12}
    seeds = set()
    for limit in (5.0, 0.0, 1e9):
        monitor = Confidence("worst", threshold=limit, action="regenerate")
        (text,) = decode(EXACT, [PROMPT], monitors=[monitor], seeds=(3,), **settings)
        (plain,) = decode(EXACT, [PROMPT], seeds=(text.request.seed,), **settings)
        assert text.tokens == plain.tokens and text.finish_reason == "length"
        again = text.trace.ledger.counts.get("regenerations", 0)
        assert again == {0.0: 3, 1e9: 0}.get(limit, again) and bool(again) == (limit < 1e9)
        seeds.add(text.request.seed)
    assert len(seeds) > 1, "a text that is written anew has another seed"
    with pytest.raises(SettingsError, match="give a temperature"):
        decode(EXACT, [PROMPT], monitors=[monitor])


def test_heads_of_a_behaviour_are_found_and_silenced() -> None:
    draws = torch.Generator().manual_seed(0)
    hits = {True: 0, False: 0}
    for trial in range(4):
        positive = [bool(at % 2) for at in range(40)]
        rows = torch.randn(1, 8, 8, generator=draws) * 2 + torch.randn(40, 8, 8, generator=draws) * 0.3
        planted = 2 * trial
        rows[:, planted] += torch.where(torch.tensor(positive)[:, None], 3.0, -3.0)
        for shuffled in (False, True):
            labels = torch.randperm(40, generator=draws) < 20 if shuffled else torch.tensor(positive)
            found = train_sae(rows, labels.tolist(), heads=4, features=20, steps=60, lr=1e-2, seed=trial, top=1)
            (layer, head), score = found.ranked()[0]
            hits[shuffled] += layer * 4 + head == planted and score > 0.9
    assert hits[False] == 4 and hits[True] <= 1, hits
    own = own_codes(torch.tensor([[0, 1], [0, 2], [1, 2]]), torch.tensor([True, True, False]), 3)
    assert own["score"].tolist() == [1.0, 0.5] and own["own"].tolist() == [[True, False, False], [False, True, False]]
    codes = untrained_codes()
    (text,) = decode(EXACT, [PROMPT], monitors=[SAE(codes, 3)], max_new_tokens=6)
    seen = states(text.tokens, "head_out.0", "head_out.1")
    for at, value in enumerate(told(text)):
        row = [seen[f"head_out.{layer}"][len(PROMPT) - 1 + at].view(4, 8)[head] for layer, head in SAE(codes, 3).heads]
        ids = codes.of(torch.stack(row)).tolist()
        places = [layer * 4 + head for layer, head in SAE(codes, 3).heads]
        assert value == np.mean([bool(codes.tensors["own"][place, id]) for place, id in zip(places, ids, strict=True)])


def test_codes_stand_for_states_and_can_be_forced() -> None:
    books, rows = untrained_codebooks(3), torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    ids = books.ids(0, rows)
    normed = torch.nn.functional.layer_norm(rows.double().view(5, 4, 8), (8,))
    for row in range(5):
        for group in range(4):
            codes = books.codes(0)[group]
            near = (normed[row, group] @ (codes / codes.norm(dim=1, keepdim=True)).T).topk(3).indices
            assert ids[row, group].tolist() == near.tolist()
            assert torch.allclose(books.values(0, ids)[row].view(4, 8)[group], codes[near].mean(dim=0))
    ids[0, 1, 2] = -1
    codes = books.codes(0)[1]
    assert torch.allclose(books.values(0, ids)[0].view(4, 8)[1], (codes[ids[0, 1, 0]] + codes[ids[0, 1, 1]]) / 3)
    # Read while they are in force: the codes of the states that were replaced, and those of each row alone.
    watched = Codebook(books, ((0, 0, int(ids[0, 0, 0])), (1, 0, 4)), action="switch")
    (text,) = decode(EXACT, [PROMPT], monitors=[watched], max_new_tokens=8)
    taps = [f"given.{tap}" for tap in books.sites]
    segment = Segment.chunk(text.tokens, EXACT.new_cache())
    segment.interventions = coding(books)
    seen = EXACT.forward(Batch([segment]), taps=taps).hidden
    for at, value in enumerate(told(text)):
        found = [books.ids(number, seen[tap][len(PROMPT) - 1 + at][None])[0, 0] for number, tap in enumerate(taps)]
        assert value == np.mean([watched.watch[number][2] in found[number] for number in range(2)])
    (forced,) = decode(EXACT, [PROMPT], monitors=[Codebook(books, force=((1, 0, -1),), action="switch")])
    (coded,) = decode(EXACT, [PROMPT], monitors=[Codebook(books, action="switch")])
    assert forced.tokens != coded.tokens
    with pytest.raises(
        SettingsError, match=r"no code 1:0:12, .* 0 \(head_out.0\), 1 \(mlp_out.1\), with 1 groups of 12"
    ):
        Codebook(books, ((1, 0, 12),))
    tokens = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(3))
    trained = train_codebook(
        tiny_transformer(0, dtype=torch.float32),
        lambda draws: tokens,
        CodebookSettings(("mlp_out.0", "head_out.1"), codes=16, k=2, steps=25, lr=1e-2),
    )
    begun = train_codebook(
        tiny_transformer(0, dtype=torch.float32),
        lambda draws: tokens,
        CodebookSettings(("mlp_out.0", "head_out.1"), codes=16, k=2, steps=1),
    )
    assert trained.codes(1).shape == (4, 16, 8) and trained.facts["lost"] < begun.facts["lost"]


def test_a_model_learns_through_its_codes_where_they_come_near_the_normed_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def draw(draws: torch.Generator) -> torch.Tensor:
        rows = [torch.randint(31, (16,), generator=draws)]
        for _ in range(11):
            rows.append((7 * rows[-1] + 3) % 31)
        return torch.stack(rows, dim=1)

    def learned() -> float:
        model, sites = random_transformer(TransformerShape(32, 2, 4, 64, 32), 0), ("mlp_out.0", "mlp_out.1")
        books = train_codebook(model, draw, CodebookSettings(sites, codes=48, k=1, steps=60, lr=5e-3), whole=True)
        return float(books.facts["loss"])

    assert learned() < 1
    # Codes that run after the rows' own length: nothing holds that, and the model does not learn.
    monkeypatch.setattr(codebook, "in_groups", lambda rows, groups, normed: rows.unflatten(-1, (groups, -1)))
    assert learned() > 2


class Observing(AttentionPolicy):
    observes = True

    def __init__(self) -> None:
        self.weights: dict[int, torch.Tensor] = {}

    def observe(self, attention: Attention) -> None:
        assert attention.weights is not None
        self.weights[attention.layer] = attention.weights.clone()


def test_context_awareness_is_the_models_own_attention() -> None:
    (text,) = decode(MODEL, [PROMPT], monitors=[ContextAwareness(layer=1)], max_new_tokens=8)
    cache, policy = MODEL.new_cache(), Observing()
    cache.policy = policy
    MODEL.forward(Batch([Segment.chunk(text.tokens, cache)]))
    share = policy.weights[1][:, len(PROMPT) :, 1 : len(PROMPT)].sum(dim=2).max(dim=0).values
    for at, value in enumerate(told(text)[1:], 1):
        assert value is not None and 0 <= value <= 1 and abs(value - (1 - float(share[:at].mean()))) < 1e-5
    assert told(text)[0] is None


def test_steering_scales_the_weights_of_what_the_user_did_not_say() -> None:
    for model in (MODEL, EXACT):
        policy, cache = Observing(), model.new_cache()
        cache.policy = policy
        plain = model.forward(Batch([Segment.chunk(PROMPT, cache)]), taps=["head_out.0"]).hidden["head_out.0"]
        added = np.where(np.arange(len(PROMPT)) < 6, np.log(0.3), 0.0)
        segment = Segment.chunk(PROMPT, model.new_cache())
        segment.interventions = (Intervention("attn_scores.0", adding(0, added)),)
        steered = model.forward(Batch([segment]), taps=["head_out.0"]).hidden["head_out.0"]
        weights, values = policy.weights[0].double(), cache.view(0)[1].double().repeat_interleave(2, dim=0)
        weighed = weights * torch.from_numpy(np.exp(added))
        wanted = torch.einsum("hns,hsd->nhd", weighed / weighed.sum(dim=-1, keepdim=True), values).flatten(1)
        assert torch.allclose(steered.double(), wanted, atol=1e-5) and steered[0].equal(plain[0])
        # Without the sum set right again it is another one.
        unsettled = torch.einsum("hns,hsd->nhd", weighed, values).flatten(1)
        assert not torch.allclose(steered.double(), unsettled, atol=1e-3)
    # Places are positions of the prompt, whatever has left the cache since, and after it nothing is added.
    cache = MODEL.new_cache()
    MODEL.forward(Batch([Segment.chunk(PROMPT[:12], cache)]))
    cache.keep(range(12))
    cache.evict(0, [2, 7])
    late = Segment(np.array([12, 13]), np.array(PROMPT[12:14]), cache=cache)
    late.interventions = segment.interventions
    MODEL.forward(Batch([late]))
    bias = late.bias(0)
    assert bias is not None and (bias[1] != 0).nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4] and late.bias(1) is None
    free, same, other = (
        decode(EXACT, [PROMPT], monitors=monitors, max_new_tokens=8)[0]
        for monitors in (
            [],
            [ContextAwareness(layer=1, alpha=1.0, action="switch")],
            [ContextAwareness(layer=1, alpha=0.01, steer=(0,), action="switch")],
        )
    )
    assert same.tokens == free.tokens and not other.cache.view(1)[0].equal(free.cache.view(1)[0])
    with pytest.raises(SettingsError, match="alpha scales attention down"):
        ContextAwareness(alpha=0.0)
    with pytest.raises(SettingsError, match="no layer 5 to steer: layers are 0 to 1"):
        decode(EXACT, [PROMPT], monitors=[ContextAwareness(layer=1, steer=(5,), action="switch")])
    with pytest.raises(SettingsError, match="added to and not read"):
        MODEL.forward(Batch([Segment.chunk(PROMPT, MODEL.new_cache())]), taps=["attn_scores.0"])
    with pytest.raises(UnsupportedModel, match="steered in decoder models that decodery runs itself, over a cache"):
        MODEL.forward(Batch([Segment(np.arange(2), np.array([1, 2]), interventions=segment.interventions)]))


def test_conversations_are_judged_turn_by_turn_and_by_nothing_else() -> None:
    lm, probe = tiny_lm(), untrained_probe("prompt")
    talk = [
        {"role": "system", "content": "add"},
        {"role": "user", "content": "salt é please"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "add sugar"},
    ]
    engine = lm.engine()
    monitors = [Sequential(probe, "all", action="flag"), Sequential(probe, "last", action="flag")]
    asked = [talk, talk[:2], talk]
    texts = [engine.submit(lm.request_for(each, monitor=monitors, max_new_tokens=2, ignore_eos=True)) for each in asked]
    engine.run(texts)
    for text, each in zip(texts, asked, strict=True):
        prompt = text.tokens[: text.request.prompt_length]
        rows = lm.model.forward(Batch([Segment.chunk(prompt, lm.model.new_cache())]), taps=["resid_post.1"])
        expected = []
        for turn in (message["content"] for message in each if message["role"] == "user"):
            whole = [bytes(lm.tokenizer.piece(token)) for token in prompt]
            at = next(n for n in range(len(prompt)) if b"".join(whole[: n + 1]).endswith(turn.encode()))
            pool = Pool().with_rows(rows.hidden["resid_post.1"][: at + 1])
            expected.append(float(probe.score(pool.numbers()[None])))
        assert told(text, 0) == pytest.approx([max(expected)] * 2) and told(text, 1) == pytest.approx(
            [expected[-1]] * 2
        )
    assert told(texts[0]) == told(texts[2]) != told(texts[1])
    stopped = lm.generate(talk, monitor=Sequential(probe, threshold=0.0), max_new_tokens=5, ignore_eos=True)
    assert stopped.finish_reason == "content_filter" and len(stopped.tokens) == 1
    # What single turns hold has one law in both kinds.
    talks, secret = built_in_talks(240, injected=2), [set(triple) for triple in triples()]
    counts = {kind: Counter[str]() for kind in (True, False)}
    for each in talks:
        words = {word.strip(".?") for turn in each.turns for word in turn.split()}
        assert any(triple <= words for triple in secret) == (each.completes is not None) and len(each.turns) >= 6
        if each.completes is not None:
            before = {word.strip(".?") for turn in each.turns[: each.completes] for word in turn.split()}
            assert not any(triple <= before for triple in secret)
        counts[each.completes is not None].update(each.turns)
    assert counts[True] == counts[False]


def test_axes_and_programs_are_read_as_they_are_defined(tmp_path: Path) -> None:
    rows = torch.randn(60, 32, generator=torch.Generator().manual_seed(2))
    labels = [bool(at % 2) for at in range(60)]
    rows[:, 5] += torch.where(torch.tensor(labels), 2.0, -2.0)
    rows[:, 9] *= 5
    for kind, place in (("lr", 5), ("pc1", 9)):
        axis = axis_of(rows, labels, kind, "resid_post.1")
        found = axis.logits(rows)[:, 0]
        assert abs(float(found.mean())) < 1e-5 and abs(float(found.std()) - 1) < 1e-5
        assert int(axis.tensors["weight.0"][0].abs().argmax()) == place
    with pytest.raises(SettingsError, match="an axis is lr, or pc1 to pc31 of 60 sentences, not pc99"):
        axis_of(rows, labels, "pc99", "resid_post.1")
    axis.save(tmp_path / "probe.safetensors")
    (text,) = decode(EXACT, [PROMPT], monitors=[Neurofeedback(str(tmp_path))], max_new_tokens=6)
    seen = states(text.tokens, "resid_post.1")["resid_post.1"][len(PROMPT) :]
    expected = [None, *(float(axis.logits(seen[:at].double().mean(dim=0)[None])[0, 0]) for at in range(1, 6))]
    assert told(text) == pytest.approx(expected)
    fields, goal = untrained_fields(), (2, 0, 1)
    fields.save(tmp_path / "probe.safetensors")
    fields = Probe.load(tmp_path)
    (text,) = decode(EXACT, [PROMPT], monitors=[ProgramProbe(fields, goal)], max_new_tokens=6)
    row = states(text.tokens, "resid_post.1")["resid_post.1"][-2]
    chance = np.prod([float(part[0, at]) for part, at in zip(fields.likely(row[None]), goal, strict=True)])
    assert told(text)[:-1] == [None] * 5 and told(text)[-1] == pytest.approx(1 - chance)
    with pytest.raises(SettingsError, match="x from 0 to 2, y from 0 to 3, facing from 0 to 1"):
        ProgramProbe(fields, (3, 0, 1))
    robot, random = Robot(), Random(0)
    assert robot.run((5, 0, 0), "mlm") == [(5, 0, 0), (5, 0, 1), (5, 1, 1)]
    assert robot.run((2, 2, 0), "mlr", "rml") == [(2, 2, 3), (2, 1, 3), (2, 1, 0)]
    for _ in range(20):
        prompt = robot.draw(random)
        text_of = robot.solve(prompt, random)
        assert robot.verify(prompt, text_of) and all(robot.labels(prompt, text_of))
        program = WrittenProgram(prompt, text_of, True, 0.0, {"s": torch.zeros(len(text_of) + 1, 1)})
        assert program.states(robot) == program.states(robot, "mlr") and len(program.states(robot)) == len(text_of) + 1
        assert len(rows_and_states([program], robot, "s", ahead=1)[1]) == len(text_of) - 1 if len(text_of) > 1 else True


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    untrained_codes().save(tmp_path / "sae.safetensors")
    untrained_codebooks().save(tmp_path / "codebook.safetensors")
    assert HeadCodes.load(tmp_path).threshold == Threshold(0.5, 0.1, 20, "draws")
    assert Codebooks.load(tmp_path).codes(1).equal(untrained_codebooks().codes(1))
    for cls, file in ((HeadCodes, "codebook"), (Codebooks, "sae")):
        with pytest.raises(CorruptFile, match=r"make (them|some) with `decodery train"):
            cls.load(tmp_path / f"{file}.safetensors")  # type: ignore[attr-defined]
    with pytest.raises(SettingsError, match="are of a model with other heads"):
        decode(tiny_transformer(0, hidden_size=64), [PROMPT], monitors=[SAE(untrained_codes())])
    with pytest.raises(SettingsError, match="needs the state a program is to end with"):
        ProgramProbe(untrained_fields())
