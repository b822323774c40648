"""Texts whose thinking has a budget, and that vote by what a head says of them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.adapters import Adapter, Thin, tuned
from decodery.models.torch.transformer import Transformer
from decodery.sampling import Sampler
from decodery.scorers.value_head import LinearValue
from decodery.search.best_of_n import BestOfN
from decodery.search.edge import Edge, _begun
from decodery.search.weighted_vote import WeightedVote
from decodery.step.scorer import Candidates
from decodery.testing import decode, tiny_transformer
from decodery.training.value import fit_switch, states_of
from methods import DRAFTERS, Even
from sampled import MODEL, OTHER, PROMPT, plain, run, told

NOT_SEEN = 63, 62


class Shifted(Even):
    """Weights, some of which a linear head would have put below 0."""

    bounds = -1.0, 1.0

    def score(self, candidates: Candidates) -> torch.Tensor:
        return super().score(candidates) - 0.5


WRITER = tiny_transformer(3)


def test_without_a_budget_it_is_a_weighted_vote_or_best_of_n() -> None:
    for most in (None, 100):
        edge = Edge(Even(), n=4, most=most, end=NOT_SEEN, answer="number")
        assert told(run(edge)) == told(run(WeightedVote(Even(), n=4, answer="number")))
    assert told(run(Edge(Even(), n=4, most=None, choose="best"))) == told(run(BestOfN(Even(), n=4)))


def test_what_a_head_finds_worth_less_than_nothing_has_no_weight() -> None:
    texts = run(Edge(Shifted(), n=6, most=None, choose="best"))
    assert min(seq.score or 0.0 for seq in texts) < 0 < max(seq.score or 0.0 for seq in texts)
    voted = run(Edge(Shifted(), n=6, most=None, answer="whole"))
    assert voted[0].generated == texts[0].generated and all((seq.score or 0.0) >= 0 for seq in voted)
    with pytest.raises(SettingsError, match="no less than 0"):
        run(WeightedVote(Shifted(), n=6, answer="whole"))


@pytest.mark.parametrize("drafter", [None, "draft-model"])
def test_thinking_ends_where_its_budget_does(drafter: str | None) -> None:
    settings = {"eos_ids": (), "drafter": None if drafter is None else DRAFTERS[drafter](OTHER)}
    edge = Edge(Even(), n=4, most=5, end=NOT_SEEN, cue=(6,), choose="best")
    found = run(edge, **settings)
    # Which is not where it would have ended, nor a text that is cut there.
    assert sorted(seq.generated[:8] for seq in found) == sorted([*text[:5], 63, 62, 6] for text in plain(4, eos_ids=()))
    assert all(len(seq.generated) == 12 for seq in found)
    assert found[0].trace.ledger.counts["forced"] == 4 * 3 and found[0].trace.ledger.tokens == 4 * 12
    greedy = {"sampler": Sampler.from_settings(), **settings}
    (text,) = {tuple(seq.generated) for seq in run(edge, **greedy)}
    thought = plain(1, eos_ids=(), sampler=greedy["sampler"])[0][:5]
    (after,) = decode(MODEL, [[*PROMPT, *thought, 63, 62, 6]], max_new_tokens=4)
    assert list(text) == [*thought, 63, 62, 6, *after.generated]
    # A mark that the model writes itself is not written twice, and one that it has begun is completed.
    own = Edge(Even(), n=1, most=8, end=tuple(thought[2:4]), choose="best")
    assert run(own, **greedy)[0].generated == plain(1, eos_ids=(), sampler=greedy["sampler"])[0]
    half = Edge(Even(), n=1, most=5, end=(thought[4], 63), choose="best")
    assert run(half, **greedy)[0].generated[:6] == [*thought, 63]
    assert [_begun([1, 2, 1], [1, 2, 1, 3]), _begun([1, 2, 2], [1, 2, 1, 3]), _begun([], [1])] == [3, 0, 0]


def test_what_it_cannot_do_is_named() -> None:
    for make, named in (
        (lambda: Edge(Even(), most=0), "most of at least 1"),
        (lambda: Edge(Even(), end=""), "the mark that ends thinking"),
        (lambda: run(Edge(Even())), "token ids, or search through `LLM`"),
    ):
        with pytest.raises(SettingsError, match=named):
            make()


def _adapter(size: float = 0.4) -> Adapter:
    draws = torch.Generator().manual_seed(4)
    width, layers = WRITER.config.hidden_size, range(WRITER.config.num_layers)
    thin = [
        [torch.randn(*shape, generator=draws).double() * size for shape in ((width, 2), (2, width))] for _ in layers
    ]
    return Adapter({f"layers.{number}.output": Thin(*pair) for number, pair in enumerate(thin)})


def _behind(adapter: Adapter | None, text: list[int], by: Transformer) -> torch.Tensor:
    """[len(text), vocab] logits of a text after `PROMPT`, which `by` has read but for its last token."""
    cache = WRITER.new_cache()
    by.forward(Batch([Segment.chunk(PROMPT[:-1], cache, logit_rows=[])]))
    cache.keep(range(len(PROMPT) - 1))
    writer = WRITER if adapter is None else tuned(WRITER, adapter)
    return writer.forward(Batch([Segment.chunk([PROMPT[-1], *text[:-1]], cache)])).logits


def test_texts_are_written_by_the_adapter_behind_a_prompt_that_the_model_itself_has_read() -> None:
    adapter = _adapter()
    greedy = {"model": WRITER, "sampler": Sampler.from_settings(), "eos_ids": ()}
    edge = Edge(Even(), n=1, most=None, choose="best", adapter=adapter)
    text = run(edge, **greedy)[0].generated
    assert text == _behind(adapter, text, WRITER).argmax(dim=1).tolist()
    # Where the adapter reads the prompt, too, or writes nothing, other texts come.
    whole, alone = tuned(WRITER, adapter), plain(1, **greedy)[0]
    assert text != plain(1, **greedy | {"model": whole})[0] and text != alone
    assert text != _behind(adapter, text, whole).argmax(dim=1).tolist()
    # Keys and values of the prompt are the model's to the bit, those after it are not.
    (found,), (other,) = run(edge, **greedy), run(replace(edge, adapter=None), **greedy)
    for layer in range(1, WRITER.config.num_layers):
        for mine, theirs in zip(found.cache.view(layer), other.cache.view(layer), strict=True):
            shared = len(PROMPT) - 1
            assert torch.equal(mine[:, :shared], theirs[:, :shared])
            assert not torch.equal(mine[:, shared : shared + 1], theirs[:, shared : shared + 1])
    # The model is as it was, and what adds nothing changes nothing.
    assert plain(1, **greedy)[0] == alone
    assert run(replace(edge, adapter=_adapter(0.0)), **greedy)[0].generated == alone
    # All texts share one reading, and each is what it is alone.
    sampled = {"model": WRITER, "eos_ids": ()}
    several = run(replace(edge, n=3), **sampled)
    assert sorted(seq.generated for seq in several) == sorted(
        run(edge, **sampled, seed=seed)[0].generated for seed in (7, 8, 9)
    )
    assert several[0].trace.ledger.counts["reasoned"] == 1
    assert several[0].trace.ledger.rows["model"] == len(PROMPT) - 1 + 3 * 12


def test_a_switch_decides_once_and_without_it_nothing_changes() -> None:
    settings = {"model": WRITER, "eos_ids": ()}
    head = LinearValue(torch.zeros(WRITER.config.hidden_size), torch.tensor(0.4), WRITER.config.num_layers)
    edge = Edge(Even(), n=3, most=5, end=NOT_SEEN, choose="best", adapter=_adapter(), switch=head)
    (found,) = run(edge, **settings)
    assert found.generated == plain(1, **settings)[0] and "reasoned" not in found.trace.ledger.counts
    on = run(replace(edge, threshold=0.3), **settings)
    assert [seq.generated for seq in on] == [seq.generated for seq in run(replace(edge, switch=None), **settings)]
    with pytest.raises(SettingsError, match="trained for this model"):
        run(replace(edge, switch=replace(head, weight=torch.zeros(3))), **settings)


def test_a_switch_learns_from_the_mean_of_a_prompts_states() -> None:
    random = Random(3)
    prompts = [[random.randrange(64) for _ in range(9)] for _ in range(120)]
    width, layers = WRITER.config.hidden_size, WRITER.config.num_layers
    way = torch.randn(width, generator=torch.Generator().manual_seed(1)).double()
    told = [float(states_of(WRITER, (), prompt, layers)[:-1].mean(dim=0) @ way) for prompt in prompts]
    hard = [each > sorted(told)[60] for each in told]
    head = fit_switch(WRITER, zip(prompts[:90], hard, strict=False))
    edge = Edge(Even(), switch=head, adapter=_adapter())
    said = [edge._hard(states_of(WRITER, (), prompt, head.tap)[:-1]) >= 0.5 for prompt in prompts[90:]]
    right = sum(map(bool.__eq__, said, hard[90:]))
    wrong = sum(map(bool.__eq__, said, hard[:30]))
    assert right >= 26 > 22 > wrong
    with pytest.raises(SettingsError, match="of both kinds"):
        fit_switch(WRITER, [(prompt, True) for prompt in prompts[:3]])
