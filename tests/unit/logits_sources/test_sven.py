"""SVEN: what counts as changed, what the losses are, that learning can be interrupted, and what the command says."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tokenizers.normalizers import Lowercase

from decodery.cli.main import cli
from decodery.core.errors import CorruptFile, PromptError, SettingsError, UnsupportedModel
from decodery.core.registry import resolve
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.logits_sources.sven import SVEN
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.torch.transformer import Transformer
from decodery.models.trained.prefix import KVPrefix, Prefixed, Prefixes
from decodery.testing import tiny_transformer
from decodery.testing.models import to_int8
from decodery.training import loop
from decodery.training.card import check_folder
from decodery.training.kind import KINDS, Run
from decodery.training.programs import (
    LabelledProgram,
    ProgramPair,
    built_in_pairs,
    changed_characters,
    programs_of,
    read_pairs,
    tokens_of,
)
from decodery.training.sven import CONTROLS, SVENRecipe, SVENTrainee, losses_of, train_sven
from tiny_models import VOCAB, make_tokenizer

BEFORE = "import yaml\n\ndef f(é):\n    return yaml.load(é)\n# end\n"
AFTER = "import yaml\n\ndef f(é):\n    return yaml.safe_load(é)\n# end\n"
PAIRS = [ProgramPair(f"y = 1\nx{n} = eval(a)\n", f"y = 1\nx{n} = int(a)\n") for n in range(20)]


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    tokenizer = Tokenizer(make_tokenizer(), bos_id=256, eos_ids=(257,))
    model = tiny_transformer(3, vocab_size=VOCAB, dtype=torch.float32)
    config = replace(model.config, vocabulary=tokenizer.fingerprint())
    return LoadedModel(Transformer(config, model.weights), tokenizer, None, "tiny", "float32")


def marked(text: str, which: np.ndarray) -> str:
    return "".join(character for character, is_marked in zip(text, which, strict=True) if is_marked)


@pytest.mark.parametrize(
    ("before", "after", "deleted", "added"),
    [
        (BEFORE, AFTER, "    return yaml.load(é)\n", "safe_"),
        ("a\nb\nc\n", "a\nc\n", "b\n", ""),
        ("a\nc\n", "a\nb\nc\n", "", "b\n"),
        ("f(md5)\ng(x)\n", "f(sha)\ng(x)\n", "f(md5)\n", "sha"),
        # A line is compared with what took its place, not with the same characters elsewhere.
        ("abc\nsame\n", "xyz\nsame\nabc", "abc\n", "xyzabc"),
    ],
)
def test_whole_deleted_lines_and_added_characters_count(before: str, after: str, deleted: str, added: str) -> None:
    old, new = changed_characters(before, after)
    assert (marked(before, old), marked(after, new)) == (deleted, added)


def test_weights_align_with_changed_characters(target: LoadedModel, smollm2_int8) -> None:
    for tokenizer, exact in ((target.tokenizer, True), (smollm2_int8.tokenizer, False)):
        for text, which in zip((BEFORE, AFTER), changed_characters(BEFORE, AFTER), strict=True):
            ids, changed = tokens_of(tokenizer, text, which)
            assert tokenizer.decode(ids.tolist()) == text
            # By hand: a token is changed if one of its characters is; one token a byte marks nothing else.
            chosen = [tokenizer.piece(id) for id, flag in zip(ids.tolist(), changed, strict=True) if flag]
            told = b"".join(chosen).decode()
            assert told == marked(text, which) if exact else marked(text, which).strip() in told
            others = b"".join(
                tokenizer.piece(id) for id, flag in zip(ids.tolist(), changed, strict=True) if not flag
            ).decode()
            assert len(told) + len(others) == len(text) and marked(text, which).strip() not in others


def test_texts_the_tokenizer_changes_are_refused() -> None:
    backend = make_tokenizer()
    backend.normalizer = Lowercase()
    with pytest.raises(PromptError, match="cannot be distinguished"):
        tokens_of(Tokenizer(backend), "ABC", np.ones(3, dtype=bool))


def test_losses_are_the_published_sums() -> None:
    random = torch.Generator().manual_seed(0)
    own, other, base = (torch.randn(6, 9, generator=random, dtype=torch.float64) for _ in range(3))
    targets, changed = torch.tensor([3, 1, 4, 1, 5, 8]), torch.tensor([0, 1, 1, 0, 0, 1], dtype=torch.bool)
    p, q, r = (each.softmax(-1).tolist() for each in (own, other, base))
    language, contrast, kl = [], [], []
    for row, (token, flag) in enumerate(zip(targets.tolist(), changed.tolist(), strict=True)):
        if flag:
            language.append(-np.log(p[row][token]))
            contrast.append(-np.log(p[row][token] / (p[row][token] + q[row][token])))
        else:
            kl.append(sum(sum(b * np.log(b / a) for a, b in zip(law[row], r[row], strict=True)) for law in (p, q)))
    found = losses_of(own, other, base, targets, changed)
    assert float(found.language) == pytest.approx(np.mean(language))
    assert float(found.contrast) == pytest.approx(np.mean(contrast))
    assert float(found.kl) == pytest.approx(np.mean(kl))
    equal = losses_of(own, own, own, targets, changed)
    assert float(equal.contrast) == pytest.approx(np.log(2)) and abs(float(equal.kl)) < 1e-12


def test_what_learns_is_what_decoding_sees() -> None:
    """The pass that gradients flow through gives the logits of one after the cache that decoding uses."""
    model = tiny_transformer(0)
    trainee = SVENTrainee(model, SVENRecipe(length=3, dropout=0.0))
    with torch.no_grad():
        for seed, name in enumerate(CONTROLS):
            trainee.parameters[name] = torch.randn(
                trainee.parameters[name].shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
            ).requires_grad_(True)
    program = LabelledProgram(np.array([5, 9, 2, 44, 17, 30]), np.array([0, 0, 1, 0, 1, 0], dtype=bool), control=1)
    logits = []
    for name in ("unsafe", "secure", None):
        scorer = model if name is None else Prefixed(model, KVPrefix(trainee.parameters[name].detach()))
        logits.append(scorer.forward(Batch([Segment.chunk(program.tokens[:-1], scorer.new_cache())])).logits)
    targets, changed = torch.from_numpy(program.tokens[1:]), torch.from_numpy(program.changed[1:])
    expected, (found,) = losses_of(*logits, targets, changed), trainee.losses([program])
    for name, value in vars(expected).items():
        assert float(getattr(found, name).detach()) == pytest.approx(float(value), abs=1e-9)
    trainee.total([found]).backward()
    # The slope along one direction of both prefixes, by differences.
    direction = [torch.randn(each.shape, dtype=torch.float64) for each in trainee.parameters.values()]
    slope = sum(float((d * each.grad).sum()) for d, each in zip(direction, trainee.parameters.values(), strict=True))
    sides = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            moved = SVENTrainee(model, trainee.recipe)
            moved.parameters = {
                name: each + step * d for (name, each), d in zip(trainee.parameters.items(), direction, strict=True)
            }
            sides.append(float(moved.total(moved.losses([program]))))
    assert slope == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-4)


def run(target: LoadedModel, out: Path, stop: int = 0, **recipe) -> Prefixes:
    def progress(what: str, done: int, total: int) -> None:
        if done == stop:
            raise KeyboardInterrupt

    made = SVENRecipe(**({"length": 2, "epochs": 2.0, "lr": 0.1, "batch": 6} | recipe))
    return train_sven(Run(target, out, (made,), progress=progress), PAIRS)


@pytest.mark.integration
def test_it_learns_and_resumes_to_the_same_weights(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(target, tmp_path / "whole")
    with monkeypatch.context() as patch:
        # As if validations were minutes apart: a checkpoint at each.
        patch.setattr(loop, "monotonic", itertools.count(0, 100).__next__)
        with pytest.raises(KeyboardInterrupt):
            run(target, tmp_path / "parts", stop=8)
    assert not (tmp_path / "parts" / Prefixes.FILE).exists()
    resumed = run(target, tmp_path / "parts")
    assert resumed.facts == whole.facts
    for name in CONTROLS:
        assert torch.equal(resumed.by_name[name].data, whole.by_name[name].data)
    figures = whole.facts["validation"]
    # Both programs of a pair are tested, or none.
    assert re.fullmatch(r"(\d+) programs of (\d+) pairs that chose nothing", figures["tested on"])
    assert figures["right"] > 0.7 and figures["contrast"] < figures["baselines"]["untrained"]["contrast"] - 0.1
    assert (tmp_path / "whole" / Prefixes.FILE).read_bytes() == (tmp_path / "parts" / Prefixes.FILE).read_bytes()
    with pytest.raises(SettingsError, match="other settings"):
        run(target, tmp_path / "parts", epochs=3.0)


def test_the_model_is_left_as_it_is_and_turned_both_ways(target: LoadedModel, tmp_path: Path) -> None:
    before = target.model.weights.layers[0].qkv.weight.clone()
    run(target, tmp_path)
    assert torch.equal(target.model.weights.layers[0].qkv.weight, before)
    engine, prompt = Engine(target.model), target.tokenizer.encode("y = 1\nx7 =")
    controls = [SVEN("secure", str(tmp_path)), SVEN("unsafe", str(tmp_path / Prefixes.FILE)), None]
    texts = [engine.submit(Request(prompt, max_new_tokens=8, logits_source=source)) for source in controls]
    engine.run(texts)
    assert len({tuple(text.generated) for text in texts}) == 3


def test_the_built_in_programs_are_python_and_differ_where_they_should(target: LoadedModel) -> None:
    pairs = built_in_pairs(200)
    assert len(set(pairs)) == 200 and built_in_pairs(7) == pairs[:7]
    for pair in pairs:
        compile(pair.before, "before", "exec"), compile(pair.after, "after", "exec")
    found = programs_of(target.tokenizer, pairs)
    assert len(found) == 400 and sum(program.control for program in found) == 200


def test_wrong_inputs_are_named(target: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    for text, message in (
        ("[1]", 'line 1 of .* is not {"before": text, "after": another text}'),
        ('\n{"before": "a"}', "line 2 of .* is not"),
        ('{"before": "a", "after": 3}', "line 1 of .* is not"),
        ('{"before": "a", "after": "a"}', "line 1 of .* is not"),
    ):
        path.write_text(text)
        with pytest.raises(CorruptFile, match=message):
            read_pairs(path)
    path.write_text(json.dumps({"before": "a", "after": "b"}))
    assert read_pairs(path) == [ProgramPair("a", "b")]
    with pytest.raises(PromptError, match="give at least 8"):
        train_sven(Run(target, tmp_path / "few"), PAIRS[:7])
    integers = replace(target, model=to_int8(target.model))
    with pytest.raises(SettingsError, match="floating point"):
        train_sven(Run(integers, tmp_path / "int8"), PAIRS)
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(SettingsError, match="name a new folder"):
        check_folder(tmp_path, KINDS["sven"].file)
    with pytest.raises(SettingsError, match="dropout"):
        SVENRecipe(dropout=1.0)


def test_the_command_refuses_wrong_pairs_before_it_loads_anything(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("{}")
    result = CliRunner().invoke(cli, ["train", "sven", str(tmp_path / "pairs.jsonl"), "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, CorruptFile) or "is not {" in result.output
    assert not (tmp_path / "out").exists()


def test_a_source_names_what_there_is() -> None:
    model = tiny_transformer(0)
    with pytest.raises(SettingsError, match="sven needs trained prefixes: train some"):
        SVEN().over(model, [1])
    prefixes = Prefixes({"polite": KVPrefix.zeros(model.config, 2)})
    with pytest.raises(SettingsError, match="no prefix for 'secure' here; there is polite"):
        SVEN(prefix=prefixes).over(model, [1])
    with pytest.raises(UnsupportedModel, match="another shape"):
        SVEN("polite", prefixes).over(tiny_transformer(0, num_layers=1), [1])
    assert resolve("logits-source", "sven(control=unsafe,prefix=DIR)") == SVEN("unsafe", "DIR")


def test_trained_prefixes_turn_the_embedded_model(smollm2_int8) -> None:
    prefix = Path(__file__).parents[3] / "benchmarks" / "prefixes" / "smollm2"
    prompt = "import yaml\n\ndef load_settings(path):\n    with open(path) as file:\n        return yaml."
    texts = {
        control: smollm2_int8.generate(
            prompt, apply_chat_template=False, max_new_tokens=4, logits_source=f"sven:control={control},prefix={prefix}"
        ).text
        for control in CONTROLS
    }
    assert texts["secure"].startswith("safe_load(") and texts["unsafe"].startswith("load(")
