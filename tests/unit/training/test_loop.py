"""Training text and the training loop: whole files, exact resumption, refusals."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, DecoderyError, NumericalError, PromptError, SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import silent
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.sampling.sampler import Sampler
from decodery.testing import tiny_transformer
from decodery.training import data, loop
from decodery.training.adadec_thresholds import read_solutions
from decodery.training.data import Corpus, cut_files, read_prompts, write_texts
from decodery.training.features import FeatureStore
from decodery.training.held_out import HeldOut
from decodery.training.loop import CHECKPOINT, TrainingPlan, batches, train
from tiny_models import VOCAB, whole_tokenizer

PROMPTS = [[256, *range(start, start + 3)] for start in range(10)]


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    model = tiny_transformer(3, vocab_size=VOCAB, dtype=torch.float32)
    return LoadedModel(model, Tokenizer(whole_tokenizer(), bos_id=256, eos_ids=(257,)), None, "tiny", "float32")


def write(target: LoadedModel, out: Path, **settings: object) -> Corpus:
    settings = {"max_new_tokens": 9, "top": 4, "batch": 3, "seed": 5} | settings
    return write_texts(target, PROMPTS, out, **settings)


def test_texts_are_what_the_target_writes(target: LoadedModel, tmp_path: Path) -> None:
    corpus = write(target, tmp_path / "text")
    assert len(corpus) == len(PROMPTS)
    for number, text in enumerate(corpus):
        temperature = (0.0, 0.6, 0.8, 1.0)[number % 4]
        sampler = Sampler.from_settings(temperature=temperature)
        engine = Engine(target.model)
        alone = engine.submit(
            Request(PROMPTS[number], max_new_tokens=9, sampler=sampler, seed=5 + number, eos_ids=(257,))
        )
        engine.run([alone])
        assert text.tokens.tolist() == alone.tokens and text.written == len(PROMPTS[number])


def test_the_most_likely_tokens_are_kept_beside_what_was_written(target: LoadedModel, tmp_path: Path) -> None:
    text = write(target, tmp_path / "text")[3]
    cache = target.model.new_cache()
    laws = target.model.forward(Batch([Segment.chunk(text.tokens, cache)])).logits.log_softmax(-1)
    assert text.likely is not None and text.logprobs is not None
    asked = np.isfinite(text.logprobs).all(axis=1)
    assert asked.tolist() == [text.written <= row < len(text.tokens) - 1 for row in range(len(text.tokens))]
    best = laws.topk(4)
    assert (text.likely[asked] == best.indices.numpy()[asked]).all()
    assert np.abs(text.logprobs[asked] - best.values.numpy()[asked]).max() < 1e-2


def test_an_interrupted_folder_is_continued_to_the_same_bytes(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SHARD", 4)
    write(target, tmp_path / "whole")

    def stop(what: str, done: int, total: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(target, tmp_path / "parts", progress=stop)
    assert len(Corpus(tmp_path / "parts")) == 4
    write(target, tmp_path / "parts")
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes()
    assert len(list((tmp_path / "parts").iterdir())) == 4
    with pytest.raises(SettingsError, match="another setting of seed"):
        write(target, tmp_path / "parts", seed=6)


def test_texts_and_features_that_the_disk_has_no_room_for_are_refused_before_any_is_made(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write(target, tmp_path / "text")
    # Ten prompts of 4 tokens and 9 more, with an id of 4 bytes and 4 likely tokens of 6 each.
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10 * 13 * 28 - 1))
    with pytest.raises(DecoderyError, match=r"takes about .* and its disk has"):
        write(target, tmp_path / "deep" / "other")
    assert not list((tmp_path / "deep").rglob("*.safetensors"))
    tokens, taps = sum(len(text.tokens) for text in corpus), [0, 1]
    size = tokens * (2 * 2 * target.model.config.hidden_size + 6 * 4)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=size - 1))
    with pytest.raises(DecoderyError, match="takes about"):
        FeatureStore(target.model, corpus, taps, tmp_path / "features", 4, silent)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=size))
    FeatureStore(target.model, corpus, taps, tmp_path / "features", 4, silent)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    # What is there takes no more room.
    assert len(FeatureStore(target.model, corpus, taps, tmp_path / "features", 4, silent)) == len(corpus)
    assert len(write(target, tmp_path / "text")) == len(corpus)


def test_what_is_written_of_texts_in_progress_counts(target: LoadedModel, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    write(target, tmp_path / "text", progress=lambda *each: told.append(each))
    done = [each[1] for each in told]
    # After the first pass of a batch no text is whole yet.
    assert done[0] == 0 and done == sorted(done) and done[-1] == told[-1][2] == len(PROMPTS)


def test_a_prompt_that_is_held_out_is_not_learned_from(target: LoadedModel, tmp_path: Path) -> None:
    for count in (2, 3, 12, 40):
        prompts = [[256, 1 + number // 8, number % 8] for number in range(count)]
        asked = [prompts[number % count] for number in range(3 * count + 20)]
        corpus = write_texts(target, asked, tmp_path / str(count), max_new_tokens=1)
        learned, held = corpus.split()
        known = HeldOut.of(held)
        seen, unseen = ({number % count for number in part} for part in (learned, held))
        assert not seen & unseen and seen | unseen == set(range(count))
        chose, tested = ({number % count for number in part} for part in (known.choosing, known.tested))
        assert count <= 3 or (chose and tested and not chose & tested)
    one = write_texts(target, [[256, 1]] * 20, tmp_path / "one", max_new_tokens=1)
    with pytest.raises(SettingsError, match="texts of one prompt"):
        one.split()
    alone = write_texts(target, [[256]] * 20, tmp_path / "alone", max_new_tokens=1)
    assert len(alone.split()[1]) == 2


def test_a_prompt_that_is_repeated_takes_all_temperatures(target: LoadedModel, tmp_path: Path) -> None:
    asked = [PROMPTS[number % 2] for number in range(4)]
    texts = [
        text.tokens.tolist()
        for text in write_texts(target, asked, tmp_path / "text", max_new_tokens=9, temperatures=(0.0, 1.0))
    ]
    greedy = write_texts(target, asked[:2], tmp_path / "greedy", max_new_tokens=9, temperatures=(0.0,))
    assert [texts[0], texts[3]] == [text.tokens.tolist() for text in greedy]
    assert texts[0] != texts[2] and texts[1] != texts[3]


def test_files_are_cut_into_texts(target: LoadedModel, tmp_path: Path) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    files[0].write_text("0123456789" * 3)
    files[1].write_text("xy")
    corpus = cut_files(files, tmp_path / "text", tokenizer=target.tokenizer, vocab_size=VOCAB, length=16)
    assert [len(text.tokens) for text in corpus] == [16, 15, 3]
    spelled = b"".join(target.tokenizer.piece(int(id)) for text in corpus for id in text.tokens)
    assert spelled == b"0123456789" * 3 + b"</s>" + b"xy</s>"
    assert corpus.split(every=2) == ([1, 2], [0])
    files[1].write_text("yx")
    with pytest.raises(SettingsError, match="another setting of files"):
        cut_files(files, tmp_path / "text", tokenizer=target.tokenizer, vocab_size=VOCAB, length=16)


def test_what_cannot_be_learned_from_is_refused(target: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(PromptError, match="holds no prompts"):
        read_prompts(tmp_path / "empty.txt")
    with pytest.raises(PromptError, match="not UTF-8"):
        read_prompts(tmp_path / "latin.txt")
    with pytest.raises(PromptError, match="no prompts"):
        write_texts(target, [], tmp_path / "none")
    with pytest.raises(SettingsError, match="give a folder of training text"):
        Corpus(tmp_path)
    with pytest.raises(SettingsError, match="holds no training text"):
        write(target, tmp_path)
    corpus = write(target, tmp_path / "text")
    path = corpus.folder / "00000.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorruptFile, match="is damaged"):
        Corpus(corpus.folder)


def test_batches_pass_over_everything_before_they_repeat() -> None:
    batch = batches(10, 4, seed=1)
    seen = [number for step in range(5) for number in batch(step)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert batches(10, 4, seed=1)(3) == batch(3)


def line(
    out: Path,
    steps: int = 12,
    stop: int | None = None,
    error: type[BaseException] = KeyboardInterrupt,
    interrupted: int | None = None,
    **plan: float,
) -> tuple[torch.Tensor, list[float], object]:
    """Fit y = 3 x - 1 by gradient descent; the error comes after `stop` steps, or in a validation."""
    weight = torch.zeros(2, 1, requires_grad=True)
    points = torch.tensor(np.random.default_rng(0).normal(size=(16, 1)), dtype=torch.float32)
    inputs, wanted = torch.cat((points, torch.ones_like(points)), 1), 3 * points - 1
    batch, losses, validations = batches(16, 4, seed=2), [], []

    def loss(step: int) -> torch.Tensor:
        rows = batch(step)
        value = (inputs[rows] @ weight - wanted[rows]).square().mean()
        losses.append(float(value.detach()))
        return value

    def interrupt(what: str, done: int, total: int) -> None:
        if done == stop:
            raise error

    def validate() -> dict[str, float]:
        validations.append(None)
        if len(validations) == interrupted:
            raise error
        return {"error": float((inputs @ weight - wanted).square().mean().detach())}

    history = train(
        {"weight": weight},
        loss,
        TrainingPlan(steps, **({"lr": 0.3, "validate_every": 2, "save_seconds": 0.0} | plan)),
        out,
        validate=validate,
        metric="error",
        progress=interrupt,
    )
    return weight.detach(), losses, history


def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole, losses, history = line(tmp_path / "whole")
    assert losses[-1] < 0.3 * losses[0]
    with pytest.raises(KeyboardInterrupt):
        line(tmp_path / "parts", stop=7)
    resumed, rest, after = line(tmp_path / "parts")
    assert torch.equal(whole, resumed)
    assert rest == losses[7:]
    assert after == history and set(history.metrics) == {"0", "2", "4", "6", "8", "10", "12"}
    assert line(tmp_path / "whole")[1] == []


RARE = {"validate_every": 100, "save_seconds": 30.0}
"""Intervals that no short run reaches, as plans have them by default."""


def test_a_run_that_is_interrupted_between_validations_keeps_its_steps(tmp_path: Path) -> None:
    whole, losses, history = line(tmp_path / "whole", **RARE)
    with pytest.raises(KeyboardInterrupt):
        line(tmp_path / "parts", stop=7, **RARE)
    resumed, rest, after = line(tmp_path / "parts", **RARE)
    assert rest == losses[7:] and torch.equal(whole, resumed) and after == history


def test_a_run_that_is_killed_between_validations_goes_on_from_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, losses, history = line(tmp_path / "whole", **RARE)
    monkeypatch.setattr(loop, "monotonic", itertools.count(step=10).__next__)
    with pytest.raises(SystemExit):
        line(tmp_path / "parts", stop=11, error=SystemExit, **RARE)
    # Step 4 is the first one after more than 30 seconds. Its checkpoint took 20 of them: the next one would be far off.
    resumed, rest, after = line(tmp_path / "parts", **RARE)
    assert rest == losses[4:] and torch.equal(whole, resumed) and after == history


def test_a_step_that_is_interrupted_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, losses, history = line(tmp_path / "whole")
    step, calls = torch.optim.AdamW.step, []

    def interrupted(*given: object) -> None:
        step(*given)
        calls.append(given)
        if len(calls) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(loop, "_BETWEEN", 0)
    monkeypatch.setattr(torch.optim.AdamW, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        line(tmp_path / "parts")
    resumed, rest, after = line(tmp_path / "parts")
    assert rest == losses[4:] and torch.equal(whole, resumed) and after == history


def test_a_validation_that_is_interrupted_is_done_again(tmp_path: Path) -> None:
    whole, losses, history = line(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        # After steps 0, 2, 4 and 6.
        line(tmp_path / "parts", interrupted=4)
    resumed, rest, after = line(tmp_path / "parts")
    assert rest == losses[6:] and torch.equal(whole, resumed) and after == history


def test_steps_inside_autocast_read_the_weights_of_the_step_before(tmp_path: Path) -> None:
    """PyTorch keeps copies of weights in bfloat16 until autocast is left; then every step would read the first ones."""
    with torch.autocast("cpu", torch.bfloat16):
        _, losses, history = line(tmp_path)
    assert losses[-1] < 0.3 * losses[0] and history.best < 0.3 * history.metrics["0"]["error"]


def test_the_best_values_are_kept(tmp_path: Path) -> None:
    # A rate this large overshoots: the last step is not the best one.
    weight, _, history = line(tmp_path, steps=9, lr=4.0)
    errors = {int(step): values["error"] for step, values in history.metrics.items()}
    assert history.best == min(errors.values()) == errors[history.best_step] < errors[9]
    assert torch.equal(line(tmp_path, steps=9, lr=4.0)[0], weight)


def test_a_share_of_the_rate_moves_as_much_less(tmp_path: Path) -> None:
    tensors = {name: torch.ones(3, requires_grad=True) for name in ("whole", "tenth")}
    train(
        tensors,
        lambda step: tensors["whole"].sum() + tensors["tenth"].sum(),
        TrainingPlan(1, lr=0.5),
        tmp_path,
        validate=lambda: {"sum": float(tensors["whole"].detach().sum())},
        metric="sum",
        shares={"tenth": 0.1},
    )
    # The first step of AdamW is as long as the rate.
    assert torch.allclose(1 - tensors["whole"], torch.full((3,), 0.5))
    assert torch.allclose(1 - tensors["tenth"], torch.full((3,), 0.05))


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    line(tmp_path)
    with pytest.raises(SettingsError, match="other settings"):
        line(tmp_path, steps=13)
    path = tmp_path / CHECKPOINT
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CorruptFile, match="is damaged"):
        line(tmp_path)
    with pytest.raises(NumericalError, match="smaller lr"):
        line(tmp_path / "far", lr=1e30)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DecoderyError, match=r"file.*may write to"):
        line(tmp_path / "file")


def test_a_json_line_may_hold_other_line_ends_but_must_be_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "solutions.jsonl"
    text = {"prompt": "one\u2028two\x85", "solution": "three\u2029"}
    path.write_bytes((json.dumps(text, ensure_ascii=False) + "\r\n\n").encode() * 2)
    assert read_solutions(path) == [tuple(text.values())] * 2
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(CorruptFile, match="line 1 of"):
        read_solutions(path)
