"""Beam search and Diverse Beam Search: against transformers, against the definition, and against all texts."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
import torch

from covering import FULL
from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.load import load
from decodery.models.protocol import LanguageModel
from decodery.sampling import Sampler
from decodery.search.base import Search
from decodery.search.beam import Beam
from decodery.search.diverse_beam import DiverseBeam
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.sequence import Sequence
from decodery.testing import TableModel, decode, tiny_transformer
from tiny_models import make_model, random_ids, save, without_tokenizer

HF = make_model("llama", seed=3)
PROMPTS = [random_ids(n, seed=n).tolist() for n in (1, 6, 17)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return without_tokenizer(load(save(HF, tmp_path_factory.mktemp("model")), dtype="float32").model)


def run(model: LanguageModel, search: Search, prompt: list[int], **settings) -> list[Sequence]:
    return search.run(Engine(model, prefill_chunk=7), Request(prompt, **settings))


def theirs(prompt: list[int], eos: list[int], **settings) -> list[tuple[list[int], float]]:
    """What transformers returns: generated tokens without padding, and scores."""
    with torch.inference_mode():
        out = HF.generate(
            torch.tensor([prompt]),
            do_sample=False,
            num_return_sequences=settings["num_beams"],
            eos_token_id=eos,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **settings,
        )
    texts = []
    for row in out.sequences[:, len(prompt) :].tolist():
        end = next((at for at, token in enumerate(row) if token in eos), len(row) - 1)
        texts.append(row[: end + 1])
    return list(zip(texts, out.sequences_scores.tolist(), strict=True))


@cache
def written(model: LanguageModel, *prompt: int) -> list[int]:
    """The tokens of wide beams."""
    return [token for seq in run(model, Beam(16), list(prompt), max_new_tokens=6) for token in seq.generated]


def often(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    """Tokens that beams use often, so that as end tokens they end many texts."""
    tokens = written(model, *prompt)
    ids, counts = np.unique(tokens, return_counts=True)
    return ids[np.argsort(-counts, kind="stable")][:count].tolist()


TURNS = (PROMPTS[0], 4, 2), (PROMPTS[1], 8, 5), (PROMPTS[2], 1, 3), (PROMPTS[2], 8, 4)
"""Prompt, how many tokens end a text, width."""
ENDING = list(itertools.product((1.0, 0.0, 2.5, -1.0), (True, False, "never")))


@pytest.mark.parametrize("number", range(len(ENDING)))
def test_texts_and_scores_are_those_of_transformers(model, number: int) -> None:
    ended, (length_penalty, early_stopping) = 0, ENDING[number]
    # Each penalty and each way to stop meets all of them.
    for prompt, ends, width in TURNS if FULL else TURNS[number % 2 :: 2]:
        eos = often(model, prompt, ends)
        expected = theirs(
            *(prompt, eos),
            num_beams=width,
            max_new_tokens=9,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        found = run(model, Beam(width, length_penalty, early_stopping), prompt, max_new_tokens=9, eos_ids=eos)
        assert [seq.generated for seq in found] == [tokens for tokens, _ in expected]
        assert np.allclose([seq.score for seq in found], [score for _, score in expected], atol=2e-5)
        assert [seq.finish_reason for seq in found] == [
            "stop" if seq.generated[-1] in eos else "length" for seq in found
        ]
        ended += sum(len(seq.generated) < 9 for seq in found)
    # Elsewhere the longest texts win, whatever ended before them.
    assert ended > 1 or (length_penalty > 0 and early_stopping is not True)


def test_masks_and_penalties_act_as_in_transformers(model) -> None:
    for prompt in PROMPTS:
        eos = often(model, prompt, 1)
        settings = {"no_repeat_ngram": 2, "repetition_penalty": 1.4, "min_new_tokens": 5}
        sampler = Sampler.from_settings(**settings, eos_ids=eos)
        expected = theirs(
            *(prompt, eos),
            num_beams=4,
            max_new_tokens=14,
            no_repeat_ngram_size=2,
            repetition_penalty=1.4,
            min_new_tokens=5,
        )
        found = run(model, Beam(4), prompt, max_new_tokens=14, eos_ids=eos, sampler=sampler)
        assert [seq.generated for seq in found] == [tokens for tokens, _ in expected]
        assert np.allclose([seq.score for seq in found], [score for _, score in expected], atol=2e-5)


TABLE = TableModel(4, order=3, seed=1)


def logprob(model: TableModel, prompt: list[int], tokens: list[int]) -> float:
    """The sum of the tokens' log-probabilities, each found from scratch."""
    rows = [model.logits(prompt + tokens[:n]).log_softmax(-1) for n in range(len(tokens))]
    return sum(float(row[token]) for row, token in zip(rows, tokens, strict=True))


def test_one_beam_is_greedy_decoding() -> None:
    model = tiny_transformer(5)
    for prompt in PROMPTS:
        prompt = [token % 64 for token in prompt]
        for eos in ([], [7, 20, 33]):
            (plain,) = decode(model, [prompt], max_new_tokens=20, eos_ids=eos)
            (found,) = run(model, Beam(1), prompt, max_new_tokens=20, eos_ids=eos)
            assert (found.generated, found.finish_reason) == (plain.generated, plain.finish_reason)
            assert (found.cache.lengths == len(found.tokens) - 1).all()


def test_a_beam_as_wide_as_the_tree_finds_the_most_likely_texts() -> None:
    found = run(TABLE, Beam(256), [1, 2], max_new_tokens=4)
    texts = sorted(itertools.product(range(4), repeat=4), key=lambda text: -logprob(TABLE, [1, 2], list(text)))
    assert [tuple(seq.generated) for seq in found] == texts
    assert found[0].score == pytest.approx(logprob(TABLE, [1, 2], list(texts[0])) / 4)


def test_all_beams_share_one_pass_per_token() -> None:
    model = tiny_transformer(5)
    for search, prefill in ((Beam(5), 2), (DiverseBeam(6, 3), 2)):
        found = run(model, search, list(range(10)), max_new_tokens=8)
        trace = found[0].trace
        assert len(trace.steps) == prefill + 7 and trace.passes == 7
        assert trace.rows == 7 * search.width and sum(step.rows for step in trace.steps[:prefill]) == 10
        assert trace.tokens == 7 and all(seq.trace is trace for seq in found)


def test_branches_never_touch_each_other() -> None:
    """After a search every result's cache equals a fresh reading of its own tokens."""
    model = tiny_transformer(5)
    for seq in run(model, DiverseBeam(6, 3), [3, 1, 4], max_new_tokens=12):
        fresh = run(model, Beam(1), seq.tokens[:-1], max_new_tokens=1)[0].cache
        n = len(seq.tokens) - 1
        assert seq.cache.next_position == fresh.next_position == n
        assert (seq.cache.data[:, :, :, :n] - fresh.data[:, :, :, :n]).abs().max() < 1e-9


def slow_groups(
    model: TableModel, prompt: list[int], width: int, groups: int, diversity: float, length: int
) -> list[list[tuple[list[int], float]]]:
    """Diverse Beam Search as the paper defines it, without end tokens: every group's texts and penalised sums."""
    beams: list[list[tuple[list[int], float]]] = [[([], 0.0)] for _ in range(groups)]
    for _ in range(length):
        chosen: list[int] = []
        for g in range(groups):
            extended = []
            for tokens, total in beams[g]:
                row = model.logits(prompt + tokens).log_softmax(-1).tolist()
                extended += [
                    ([*tokens, v], total + row[v] - diversity * chosen.count(v)) for v in range(model.vocab_size)
                ]
            beams[g] = sorted(extended, key=lambda beam: -beam[1])[: width // groups]
            chosen += [tokens[-1] for tokens, _ in beams[g]]
    return beams


@pytest.mark.parametrize("diversity", [0.0, 0.3, 1.5])
@pytest.mark.parametrize(("width", "groups"), [(4, 4), (6, 3), (6, 2), (3, 1), (512, 2)])
def test_groups_follow_the_definition(width: int, groups: int, diversity: float) -> None:
    for prompt in ([0], [1, 2], [3, 3, 1]) if width < 512 else ([1, 2],):
        expected = [tokens for group in slow_groups(TABLE, prompt, width, groups, diversity, 4) for tokens, _ in group]
        found = run(TABLE, DiverseBeam(width, groups, diversity), prompt, max_new_tokens=4)
        assert sorted(seq.generated for seq in found) == sorted(expected)
        scores = [seq.score for seq in found]
        assert scores == sorted(scores, reverse=True)
        assert scores == pytest.approx([logprob(TABLE, prompt, seq.generated) / 4 for seq in found])


@pytest.mark.parametrize("eos", [[], [2], [0, 3]])
def test_without_groups_or_diversity_it_is_beam_search(eos: list[int]) -> None:
    settings = {"max_new_tokens": 9, "eos_ids": eos}
    for prompt in ([0], [1, 2], [3, 3, 1]):
        beam = [seq.generated for seq in run(TABLE, Beam(3), prompt, **settings)]
        assert [seq.generated for seq in run(TABLE, DiverseBeam(3, 1), prompt, **settings)] == beam
        alike = [seq.generated for seq in run(TABLE, DiverseBeam(6, 2, 0.0), prompt, **settings)]
        assert alike == [tokens for tokens in beam for _ in range(2)]
        # The first group is a beam search of its own, whatever the others do.
        diverse = [seq.generated for seq in run(TABLE, DiverseBeam(6, 2, 0.8), prompt, **settings)]
        assert all(tokens in diverse for tokens in beam)


def test_diversity_makes_texts_differ() -> None:
    model = tiny_transformer(5)
    distinct = []
    for diversity in (0.0, 0.5, 4.0):
        found = run(model, DiverseBeam(6, 6, diversity), [3, 1, 4], max_new_tokens=10)
        distinct.append(len({pair for seq in found for pair in itertools.pairwise(seq.generated)}))
    assert distinct[0] < distinct[1] < distinct[2]


class Letters:
    """Token i is the i-th letter."""

    def push(self, ids: list[int]) -> str:
        return "".join(chr(97 + token % 26) for token in ids)

    def finish(self) -> str:
        return ""


def test_stop_strings_end_a_beam() -> None:
    model, request = tiny_transformer(5), {"prompt": [3, 1, 4], "max_new_tokens": 10}
    free = Beam(4).run(Engine(model, detokenizer=Letters), Request(**request))
    stop = free[0].text.text[4:6]
    stopped = Beam(4).run(Engine(model, detokenizer=Letters), Request(**request, stop=(stop,)))
    ended = [seq for seq in stopped if seq.finish_reason == "stop"]
    assert ended and all(
        seq.stopped_by == stop and seq.text.text + stop == Letters().push(seq.generated) for seq in ended
    )
    assert all(stop not in seq.text.text for seq in stopped)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafter": PromptLookup()}, "the search beam needs passes without drafts"),
        ({"sampler": Sampler.from_settings(temperature=0.7)}, "use temperature 0"),
    ],
)
def test_requests_it_cannot_serve_are_refused(settings, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        run(TABLE, Beam(2), [1], **settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Beam(0), "width >= 1"),
        (lambda: Beam(2, float("nan")), "length_penalty"),
        (lambda: Beam(2, 1.0, "sometimes"), "early_stopping"),
        (lambda: DiverseBeam(6, 4), "groups must divide"),
        (lambda: DiverseBeam(4, 2, -1.0), "diversity"),
    ],
)
def test_settings_out_of_range_are_refused(make, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make()
