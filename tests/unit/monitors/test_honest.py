"""What is said of trained monitors: on a part that chose nothing, beside baselines, and as they are used."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from commands import inside
from decodery.core.errors import CorruptFile, SettingsError
from decodery.models.batch import Batch, Segment
from decodery.monitors.factcheckmate import FactCheckmate
from decodery.monitors.los import LOS, LOSHead
from decodery.monitors.neurofeedback import Neurofeedback
from decodery.monitors.probe import Probe
from decodery.monitors.program_probe import ProgramProbe
from decodery.monitors.sae import SAE
from decodery.monitors.threshold import Threshold
from decodery.testing import decode, tiny_transformer, to_int8
from decodery.training import direction, head_texts, sae, sequential
from decodery.training.activations import Answered, collect
from decodery.training.checkable import CheckableQuestion, built_in
from decodery.training.codebook import CodebookSettings, train_codebook
from decodery.training.cut import parameters
from decodery.training.evaluation import Evaluation, MonitorContext, doubts
from decodery.training.head_texts import Read
from decodery.training.held_out import CONTROL
from decodery.training.los import highest, train_los
from decodery.training.probe import train_probe, trial, worst
from decodery.training.ranking import parts
from decodery.training.sae import BehaviourExample, shares, train_sae
from decodery.training.sequential import ReadConversation, Talk
from methods import untrained_codes, untrained_fields
from methods import untrained_probe as probe
from serving import tiny_lm
from tiny_models import make_model, save, tiny_loaded

EXACT = to_int8(tiny_transformer(0))
SITES = ("resid_post.1",)


@dataclass(frozen=True)
class Coin:
    """An item of which a length tells its label; group: by its number."""

    number: int
    wrong: bool
    length: float


def coins(count: int = 300) -> list[Coin]:
    random = np.random.default_rng(0)
    labels = random.random(count) < 0.4
    return [Coin(at, bool(wrong), float(random.normal() - 3 * wrong)) for at, wrong in enumerate(labels)]


def chance(coin: Coin) -> float:
    return float(np.random.default_rng(coin.number).random())


def test_the_report_is_of_a_part_that_chose_nothing_and_has_baselines_and_a_control() -> None:
    items, seen, scored = coins(), list[set[int]](), list[set[int]]()

    def train(given: Ordered[Coin], seed: int) -> dict[int, bool]:
        part = parts([str(each.number) for each in given], seed)
        seen.append({each.number for each, own in zip(given, part, strict=True) if own != "test"})
        return {each.number: each.wrong for each in given if each.number in seen[-1]}

    def score(known: dict[int, bool], given: Ordered[Coin]) -> list[float]:
        # Knows by heart what it has learned, and nothing else.
        scored.append({each.number for each in given})
        return [float(known.get(each.number, chance(each))) for each in given]

    trial = Evaluation[Coin, dict[int, bool]](
        train,
        score,
        label=lambda each: each.wrong,
        group=lambda each: str(each.number),
        relabel=lambda one, other: replace(one, wrong=other.wrong),
        baselines={"length": lambda each: each.length},
        limit=lambda known: 0.5,
        words=lambda each: "a tail" if each.wrong else "a head",
    )
    _, found = trial.run(items, 0, "coins")
    assert all(not learned & tested for learned, tested in zip(seen, scored, strict=True)) and len(seen) == 4
    low, high = found["interval"]
    assert low <= 0.5 <= high and found["items"] == len(scored[0]) and found["unit"] == "coins"
    # Which way round a length tells the label is learned where nothing is tested.
    assert found["baselines"]["length"]["auroc"] > 0.85 and found["baselines"]["length"]["interval"][0] > 0.7
    test = [each for each in items if each.number in scored[0]]
    assert found["base rate"] == pytest.approx(np.mean([each.wrong for each in test]), abs=1e-4)
    flags = [chance(each) > 0.5 for each in test if not each.wrong]
    assert found["flagged of harmless"] == pytest.approx(np.mean(flags), abs=1e-4)
    assert found["auroc by seed"][0] == found["auroc"] and all(0.2 < each < 0.8 for each in found["auroc by seed"])
    # A word that goes with the label is found where nothing is tested.
    assert found["baselines"]["bag of words"]["auroc"] > 0.9
    assert found["baselines"]["bag of words"]["interval of gain"][1] < 0
    assert found["gain"] == f"worse than length, bag of words; not shown to be better than {CONTROL}"
    control = found[CONTROL]
    assert control["interval"][0] <= 0.5 <= control["interval"][1]
    json.dumps(found, allow_nan=False)
    lone, _ = trial.tested({}, [replace(each, wrong=False) for each in items], 0)
    assert lone["auroc"] is None and lone["interval"] is None and lone["flagged of wanted"] is None


def answers(count: int = 140, *, told: float = 1.5, tokens: int = 3) -> list[Answered]:
    """Answers of which one site, and the signatures, say which are wrong."""
    draws, found = torch.Generator().manual_seed(0), list[Answered]()
    for number in range(count):
        wrong = bool(torch.rand((), generator=draws) < 0.4)
        rows, numbers = torch.randn(tokens, 32, generator=draws), torch.randn(tokens, 13, generator=draws)
        rows[:, 3] += told * wrong
        numbers[:, 8] -= told * wrong
        numbers[:, 11] = 1.0
        asked = CheckableQuestion(f"p{number}", "a", f"g{number // 2}", stratum="")
        states = {"resid_post.1": rows}
        found.append(Answered(asked, wrong, [1] * tokens, numbers, {"resid_post.1": rows[:2].reshape(-1)}, states))
    return found


@pytest.mark.integration
def test_probes_and_los_are_reported_on_answers_that_nothing_has_seen() -> None:
    given = answers(told=2.5)
    learn = partial(train_probe, sites=SITES, rows="new", inner=(8,), steps=60, lr=1e-2)
    trained, report = trial(learn, worst).run(given, 0, "answers")
    part = parts([each.question.group for each in given])
    test = [each for each, own in zip(given, part, strict=True) if own == "test"]
    assert report["items"] == len(test) and report["auroc"] > 0.75
    flagged = np.array(worst(trained, test)) > trained.threshold.value
    right = ~np.array([each.wrong for each in test])
    assert report["flagged of harmless"] == pytest.approx(flagged[right].mean(), abs=1e-4)
    assert report["baselines"]["mean log-probability"]["auroc"] > 0.75
    assert report["baselines"]["length of the answer"]["auroc"] == 0.5
    assert report[CONTROL]["interval"][0] <= 0.5 <= report[CONTROL]["interval"][1]


@pytest.mark.integration
def test_few_answers_do_not_end_the_training_of_los_at_once() -> None:
    given, fresh = answers(90, told=2.0), answers(200, told=2.0)[90:]
    head = train_los(given, k=8, width=16, dropout=0.0, rate=0.3)
    assert head.facts["steps"] >= 300
    _, report = trial(lambda items, seed: head, highest).run(given, 0, "answers")
    assert set(report) >= {"auroc", "interval", "baselines", CONTROL}
    from decodery.training.ranking import auroc

    assert auroc(highest(head, fresh), [each.wrong for each in fresh]) > 0.9


def test_a_threshold_is_of_the_decision_that_is_used() -> None:
    given = answers(200, tokens=24)
    head = train_los(given, k=8, width=16, epochs=2, every=4)
    part = parts([each.question.group for each in given])
    harmless = [each for each, own in zip(given, part, strict=True) if own == "calibration" and not each.wrong]
    wanted = [max(head.score(list(each.signatures[:end])) for end in range(4, 25, 4)) for each in harmless]
    assert highest(head, harmless) == wanted and head.threshold == Threshold.calibrated(wanted, 0.1, "")
    assert (
        head.threshold.value > Threshold.calibrated([head.score(list(e.signatures)) for e in harmless], 0.1, "").value
    )
    for every in (None, 4, 8):
        assert LOS(head, every).apart == (every or 4)
    with pytest.raises(SettingsError, match="set on an evaluation every 4 tokens, not 3: leave every out"):
        LOS(head, 3)
    assert LOS(head, 3, threshold=0.5).apart == 3
    # Programs: of all beginnings the worst one decides, where all of them are scored.
    fields = untrained_fields()
    always = replace(fields, facts={**fields.facts, "always": Threshold(0.75, 0.1, 20, "").facts()})
    goal = (2, 0, 1)
    assert ProgramProbe(always, goal, "always").limit == 0.75 and ProgramProbe(always, goal).limit == 0.5
    assert ProgramProbe(always, goal, "always", threshold=0.25).limit == 0.25


def test_the_threshold_of_head_codes_is_of_groups_that_were_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, positive = [str(at // 2) for at in range(40)], [at // 2 % 2 == 0 for at in range(40)]
    rows = torch.arange(40.0)[:, None, None].div(2, rounding_mode="floor").expand(40, 8, 8)
    learned, others, encoder = set[float](), set[float](), sae._encoder

    def noted(rows: torch.Tensor, *given: object) -> dict[str, torch.Tensor]:
        learned.update(rows[:, 0].tolist())
        return encoder(rows, *given)

    def highest(codes: object, texts: Ordered[torch.Tensor], top: int) -> list[float]:
        others.update(float(text.flatten()[0]) for text in texts)
        return [0.0] * len(texts)

    monkeypatch.setattr(sae, "_encoder", noted)
    monkeypatch.setattr(sae, "highest", highest)
    how: dict[str, Any] = {"heads": 4, "features": 4, "steps": 1, "rate": 0.4}
    train_sae(rows, positive, groups=groups, **how)
    assert len(learned) == 10 and others and not learned & others
    with pytest.raises(SettingsError, match="at least two groups"):
        train_sae(rows, positive, groups=["one" if kind else "two" for kind in positive], **how)


def test_heads_are_reported_on_held_out_examples_and_the_threshold_is_of_whole_texts() -> None:
    draws = torch.Generator().manual_seed(0)
    positive = [bool(at % 2) for at in range(120)]
    rows = torch.randn(1, 8, 8, generator=draws) * 2 + torch.randn(120, 8, 8, generator=draws) * 0.3
    rows[:, 4] += torch.where(torch.tensor(positive)[:, None], 3.0, -3.0)
    read = [
        Read(BehaviourExample(f"p{at}", kind, f"{at // 2}"), torch.stack([rows[at], rows[at - at % 2 + 1]]), 0.0)
        for at, kind in enumerate(positive)
    ]
    learn = partial(train_sae, heads=4, features=20, steps=60, lr=1e-2, top=1)
    trained, report = head_texts.evaluated(read, learn, 1, 0)
    # The second row of every text is one of the behaviour's: as a text none is harmless.
    assert trained.threshold.value == 1.0 and report["flagged of harmless"] == 0.0 == report["flagged of wanted"]
    assert report["auroc"] == 0.5 and report["heads"][0][:2] == [1, 0]
    assert report["heads"][0][2] > 0.9 and report["heads"][0][3] < 0.1
    alone = train_sae(rows, positive, heads=4, features=20, steps=60, lr=1e-2, top=1)
    assert alone.threshold.value == 0.0
    mixed = torch.randperm(120, generator=draws).tolist()
    empty = [
        replace(each, example=replace(each.example, positive=positive[at]))
        for each, at in zip(read, mixed, strict=True)
    ]
    listed = head_texts.evaluated(empty, partial(learn, top=3), 3, 0)[1]["heads"]
    # Codes of heads that only the learned half showed are as frequent without the behaviour as with it.
    assert all(abs(share - other) < 0.45 for _, _, share, other in listed)
    assert shares(trained.tensors["own"], trained.of(rows[:1, :].flatten(0, 1)).view(1, 8), [4]).tolist() == [0.0]


def test_conversations_are_reported_with_the_number_of_turns_beside_them() -> None:
    draws, heard = torch.Generator().manual_seed(0), list[ReadConversation]()
    for number in range(160):
        size, positive = 4 + number % 4, bool(number % 2)
        states = [torch.randn(64, generator=draws) for _ in range(size)]
        for at, row in enumerate(states):
            row[0] = float(at)
        talk = Talk(tuple(f"turn {at}" for at in range(size)), size - 1 if positive else None, f"{number}")
        heard.append(ReadConversation(talk, tuple({"resid_post.1": row} for row in states), 1.0))
    learn = partial(sequential.train_sequential, sites=SITES, rate=0.3)
    trained, report = sequential.evaluated(heard, learn, 0)
    turns = report["turns"]
    # The states say the turn's number alone: that tells beginnings apart, and conversations no better than chance.
    assert turns["auroc"] > 0.6 and turns["auroc"] < turns["baselines"]["number of the turn"]["interval"][1]
    assert report["interval"][0] <= 0.5 <= report["interval"][1]
    assert report["unit"] == "conversations" and report["items"] == sum(
        own == "test" for own in parts([each.talk.group for each in heard])
    )
    assert trained.threshold.chat is True
    assert set(report["baselines"]) == {
        "number of turns", "length in words", "log-probability of the answer's first token", "bag of words"
    }  # fmt: skip


def test_axes_are_reported_on_statements_that_chose_nothing() -> None:
    lm, statements = tiny_lm(), direction.built_in_statements()[:80]
    read = direction.read_by(lm, statements, ("resid_post.0", "resid_post.1"))
    prompt = lm.encode([{"role": "user", "content": direction.ASKED}])
    text = lm.tokenizer.encode(statements[0].text, special=False)
    tokens = torch.tensor([*prompt, *text])
    logits = lm.model.forward(Batch([Segment(np.arange(len(tokens)), tokens=tokens.numpy())])).logits
    loss = cross_entropy(logits[len(prompt) - 1 : -1], tokens[len(prompt) :])
    assert read[0].doubt == pytest.approx(float(loss)) and read[0].tokens == len(text)
    assert doubts(lm, [(prompt, text)]) == [read[0].doubt]
    learn = partial(direction.axis_by, kind="pc1", context=MonitorContext(chat=True))
    trained, report = direction.trial(learn).run(read, 0, "statements")
    assert report["items"] == sum(own == "test" for own in parts([each.group for each in statements]))
    assert set(report["baselines"]) == {"length", "mean log-probability", "bag of words"} and trained.facts["way"] in (
        1,
        -1,
    )


def test_codes_are_compared_on_texts_that_nothing_was_learned_from() -> None:
    model = tiny_transformer(0, dtype=torch.float32)
    held = torch.randint(0, 64, (6, 12), generator=torch.Generator().manual_seed(5))
    found = train_codebook(
        model,
        lambda draws: torch.randint(0, 64, (4, 12), generator=draws),
        CodebookSettings(("mlp_out.0",), codes=16, k=2, steps=5),
        held=held,
    ).facts["report"]
    plain = [
        cross_entropy(model.forward(Batch([Segment(np.arange(11), tokens=text[:-1].numpy())])).logits, text[1:])
        for text in held
    ]
    assert found["without codes"] == pytest.approx(float(torch.stack(plain).mean()), abs=1e-3)
    low, high = found["interval"]
    assert low <= found["more than without"] <= high and found["tested on"] == "6 texts that chose nothing"
    assert set(found["baselines"]) == {"codes as begun", "random codes", "the mean alone"}
    begun = found["baselines"]["codes as begun"]
    # Less is better.
    assert begun["gain"] == pytest.approx(begun["more than without"] - found["more than without"], abs=2e-4)
    # Another state's codes say something else than its own.
    assert found[CONTROL]["more than without"] != found["more than without"]


def test_a_scrambled_model_has_the_numbers_of_the_model_and_says_nothing() -> None:
    loaded = tiny_loaded()
    before = {name: each.detach().clone() for name, each in parameters(loaded.model).items()}  # type: ignore[arg-type]
    after = parameters(direction.scrambled(loaded, 0).model)  # type: ignore[arg-type]
    assert all(
        torch.equal(each.flatten().sort().values, after[name].flatten().sort().values) for name, each in before.items()
    )
    assert not torch.equal(before["embedding"], after["embedding"])


def test_what_is_collected_is_what_is_read_where_it_is_used(tmp_path: Path) -> None:
    lm = tiny_lm()
    asked = [CheckableQuestion(f"What is {number}?", "a", f"{number}") for number in range(3)]
    settings = {"sites": SITES, "k": 4, "max_new_tokens": 5}
    chat = collect(lm, asked, tmp_path / "chat", chat=True, **settings)  # type: ignore[arg-type]
    raw = collect(lm, asked, tmp_path / "raw", **settings)  # type: ignore[arg-type]
    known = replace(probe("prompt"), threshold=Threshold(0.5, 0.1, 20, "", chat=True))
    for each, plain in zip(chat, raw, strict=True):
        (found,) = lm.generate(each.question.prompt, max_new_tokens=5, monitor=FactCheckmate(known)).monitors
        # States are collected in half precision.
        assert found.scores[-1] == pytest.approx(worst(known, [each])[0], abs=1e-3)
        assert abs(worst(known, [each])[0] - worst(known, [plain])[0]) > 2e-3
    with pytest.raises(SettingsError, match="name another folder"):
        collect(lm, asked, tmp_path / "chat", **settings)  # type: ignore[arg-type]
    question = CheckableQuestion("", "Brasilia", "")
    assert (
        question.held_by("Its capital is Brasília.") and not question.held_by("Brasilian") and not question.held_by("")
    )
    assert CheckableQuestion("", "42", "").held_by("12 + 30 = 42.") and not CheckableQuestion("", "42", "").held_by(
        "It is 142."
    )
    ordinary = built_in(20, chat=True)
    assert all(each.prompt.endswith("?") and "Question" not in each.prompt for each in ordinary)
    assert [each.answer for each in ordinary] == [each.answer for each in built_in(20)]


def test_what_was_trained_on_another_form_of_text_is_refused_or_warned_of() -> None:
    lm, made = tiny_lm(), Threshold(0.5, 0.1, 20, "", chat=True, tokens=8)
    assert Threshold.of(made.facts()) == made
    for wrong in ({"chat": "yes"}, {"tokens": 0}, {"tokens": True}):
        with pytest.raises(CorruptFile):
            Threshold.of(made.facts() | wrong)
    codes = untrained_codes()
    settings = {"max_new_tokens": 4, "drafter": None}
    monitors = {
        "factcheckmate": lambda **more: FactCheckmate(replace(probe("prompt"), threshold=made), **more),
        "los": lambda **more: LOS(_los(made), **more),
        "sae": lambda **more: SAE(replace(codes, threshold=made), **more),
    }
    for name, monitor in monitors.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lm.generate("abc", monitor=monitor(), **settings)
        with pytest.raises(
            SettingsError, match=f"{name} was trained on prompts with the chat template, and this prompt"
        ):
            lm.generate("abc", apply_chat_template=False, monitor=monitor(), **settings)
        with pytest.warns(UserWarning, match="this prompt is without it"):
            lm.generate("abc", apply_chat_template=False, monitor=monitor(threshold=0.7), **settings)
    plain = FactCheckmate(replace(probe("prompt"), threshold=replace(made, chat=False)))
    with pytest.raises(SettingsError, match=r"without the chat template, and this prompt is with it: .* like this one"):
        lm.generate("abc", monitor=plain, **settings)
    lm.generate("abc", apply_chat_template=False, monitor=plain, **settings)
    with pytest.warns(
        UserWarning, match=r"rate of 0\.1 is promised for texts of up to 8 tokens, and this one may have more"
    ):
        lm.generate("abc", monitor=monitors["los"](), **settings | {"max_new_tokens": 9})
    axis = Probe(probe("new").tensors, "resid_post.1", "answer", Threshold(9, 0.1, 0, "", chat=True))
    with pytest.warns(UserWarning, match="neurofeedback was trained on prompts with the chat template"):
        lm.generate("abc", apply_chat_template=False, monitor=Neurofeedback(axis), **settings)
    # Of what was made of tokens alone nothing is known.
    decode(EXACT, [[1, 2, 3]], monitors=[monitors["factcheckmate"]()], max_new_tokens=2)


def _los(threshold: Threshold) -> LOSHead:
    return replace(train_los(answers(120), k=8, width=16, epochs=1), threshold=threshold)


@pytest.mark.integration
def test_the_commands_print_what_was_held_out(tmp_path: Path) -> None:
    model = str(save(make_model("llama"), tmp_path / "model"))
    learning = ("--steps", "3", "--features", "8", "--rate", "0.5", "--count", "30", "--max-new-tokens", "2")
    code, output, errors = inside("train", "sae", "-m", model, "--out", str(tmp_path / "sae"), *learning)
    assert code == 0, errors
    said = json.loads(output[: output.rindex("}") + 1])
    assert said["tested on"] == "the test part, which chose nothing" and said["threshold"]["tokens"] == 2
    assert {"auroc", "interval", "baselines", CONTROL, "heads"} <= set(said) and said["threshold"]["chat"] is False
    file = tmp_path / "text.txt"
    file.write_text("tide moon sand crab gull wave " * 200)
    shape = ("--length", "16", "--codes", "8", "--k", "2", "--steps", "2", "--texts", "12")
    code, output, errors = inside("train", "codebook", str(file), "-m", model, "--out", str(tmp_path / "codes"), *shape)
    assert code == 0, errors
    assert json.loads(output[: output.rindex("}") + 1])["tested on"] == "3 texts that chose nothing"
    code, _, errors = inside("train", "codebook", str(file), "-m", model, "--out", "x", *shape[:-1], "4")
    assert code == 1 and "--texts takes 4 pieces of 16 tokens, and 6 are needed" in errors
