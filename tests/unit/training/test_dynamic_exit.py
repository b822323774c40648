"""Exits for del: what is counted of every layer, and that the sets that are found promise most."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from decodery.cli.main import cli
from decodery.core.errors import SettingsError
from decodery.core.registry import resolve
from decodery.models.batch import Batch, Segment
from decodery.models.layer_plan import LayerPlan
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.speculative.drafters.dynamic_exit import DEL
from decodery.testing import tiny_transformer
from decodery.training.corpus import TrainingText
from decodery.training.dynamic_exit import ExitSettings, choose, find_exits, shadows
from tiny_models import VOCAB, make_tokenizer

MODEL = tiny_transformer(3, vocab_size=VOCAB, num_layers=4, dtype=torch.float32)
TEXT = TrainingText(np.random.default_rng(0).integers(0, VOCAB, 40).astype(np.int32), 7)


def test_a_layer_is_right_where_its_head_says_what_the_model_says() -> None:
    right, asked = shadows(MODEL, TEXT)
    assert asked == 34 and right[-1] == asked
    said = []
    for layers in range(1, 5):
        segment = Segment.chunk(TEXT.tokens.astype(np.int64), MODEL.new_cache(), logit_rows=range(6, 40))
        said.append(MODEL.forward(Batch([segment]), layer_plan=LayerPlan(tuple(range(layers)))).logits.argmax(dim=-1))
    assert right.tolist() == [int((each == said[-1]).sum()) for each in said]
    assert 0 < right[2] < asked


def test_exits_promise_most_among_all_sets_of_one_and_nearly_most_among_others() -> None:
    random = np.random.default_rng(1)
    for _ in range(20):
        asked = np.full(6, 50)
        right = np.sort(random.integers(0, 51, (6, 8)), axis=1)
        right[:, -1] = 50

        def promised(exits: tuple[int, ...], right: np.ndarray = right) -> float:
            total = 0.0
            for row in right:
                rates, each = (row[:-1] + 1) / 52, []
                for layer in exits:
                    sums = [sum(rates[layer - 1] ** n for n in range(d + 1)) / (d * layer + 8) for d in range(19)]
                    each.append(max(sums))
                total += max(each)
            return 8 * total / 6

        (one, two) = (choose(right, asked, ExitSettings(exits=number)) for number in (1, 2))
        assert one.gain == pytest.approx(max(promised((layer,)) for layer in range(1, 8)))
        assert two.gain == pytest.approx(promised(two.layers)) and two.gain >= one.gain >= one.fixed - 1e-9
        assert two.gain > 0.98 * max(promised(pair) for pair in combinations(range(1, 8), 2))
    # An early layer that knows everything is the only exit; one that knows nothing drafts nothing.
    sure, never = np.full((3, 8), 50), np.zeros((3, 8), dtype=np.int64)
    first = choose(sure, np.full(3, 50), ExitSettings())
    assert first.layers == (1,) and first.gain > 4
    assert choose(never, np.full(3, 50), ExitSettings(head=8.0)).gain == pytest.approx(1.0)


def test_what_cannot_be_found_is_refused() -> None:
    with pytest.raises(SettingsError, match="no texts"):
        find_exits(MODEL, [], ExitSettings())
    for wrong in ({"exits": 0}, {"longest": 0}, {"head": -1.0}):
        with pytest.raises(SettingsError, match="give one in"):
            ExitSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [["--exits", "0"], ["--longest", "0"], ["--head", "-1"]])
def test_the_command_refuses_them_before_texts_are_written(wrong: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["train", "del", "--out", str(tmp_path / "out"), "-m", "nothing", *wrong])
    assert done.exit_code == 2 and "give one in" in done.output and not (tmp_path / "out").exists()


def test_the_command_prints_settings_that_del_takes(tmp_path: Path, monkeypatch) -> None:
    target = LoadedModel(MODEL, Tokenizer(make_tokenizer(), bos_id=256, eos_ids=(257,)), None, "tiny", "float32")
    monkeypatch.setattr("decodery.models.loaders.load.load", lambda name, **options: target)
    (tmp_path / "prompts.txt").write_text("one and two\nthree and four\n")
    given = ["--prompts", str(tmp_path / "prompts.txt"), "--texts", "20", "--max-new-tokens", "6", "--exits", "2"]
    done = CliRunner().invoke(cli, ["train", "del", "--out", str(tmp_path / "out"), *given], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    spec = done.output.strip().splitlines()[-1].split("--drafter ")[1]
    drafter = resolve("drafter", spec)
    assert isinstance(drafter, DEL) and 1 <= len(drafter.layers) <= 2 and max(drafter.layers) < 4
