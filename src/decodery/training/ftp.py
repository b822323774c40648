"""Find how much each layer may be pruned, and train the routers that decide which tokens go around it.

FTP: A Fine-grained Token-wise Pruner for Large Language Models via Token Routing (2024). The paper's code is not
public: what routers are shown, how the losses are weighed and how decoding goes on are this implementation's reading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from decodery.core.errors import SettingsError
from decodery.core.topk import topk
from decodery.logits_sources.ftp import Climb, Pruned
from decodery.models.batch import Batch, Segment
from decodery.models.layer_plan import LayerPlan
from decodery.models.loaders.store import Progress, silent, write_text
from decodery.models.protocol import LanguageModel
from decodery.models.trained.token_routers import TokenRouters, inputs, least_important, uniform
from decodery.step.forward_request import run_sync, score

from .corpus import Corpus, TrainingText
from .held_out import HeldOut, Measured
from .kind import COUNT, NON_NEGATIVE, SHARE, Bounded, Run, bounded, kind, option
from .kind_data import OwnTexts, own_texts
from .loop import History, TrainingPlan, batches, known_figures, train
from .schedules import Evolution, evolve

TRIED = "tried.json"
_LIKELY = 64
"""Of how many of the whole model's most likely tokens the divergence is computed; all others count as one."""
_EVERY = 10
"""Schedules between two writings of what was tried."""


@dataclass(frozen=True)
class FTPRecipe(Bounded):
    """How routers are made.

    Attributes:
        evolution: The genetic search.
        guide: Weight of what the static router decides. It falls to 0 during the training.
    """

    sparsity: float = bounded(0.2, SHARE, "Mean share of layers that a token skips.")
    width: int = bounded(32, COUNT, "Width of the hidden layer of a router.")
    evolution: Evolution = field(default_factory=Evolution)
    read: int = bounded(16, COUNT, "Texts that rate a schedule.")
    length: int = bounded(256, "[8, inf)", "Maximum tokens of a text that are read.")
    steps: int = bounded(400, NON_NEGATIVE, "Training steps of one text each. 0: train no routers.")
    lr: float = 1e-3
    guide: float = bounded(1.0, NON_NEGATIVE)
    rate: float = bounded(10.0, NON_NEGATIVE, "Weight of the distance from a layer's target share.")
    divergence: float = bounded(1.0, NON_NEGATIVE, "Weight of the divergence from the whole model.")
    sinks: int = bounded(4, NON_NEGATIVE, "First tokens that are never skipped.")
    seed: int = option(0, "Random seed of texts, schedules and training.")


def pruned(model: LanguageModel, routers: TokenRouters, sinks: int, tokens: np.ndarray) -> tuple[Climb, torch.Tensor]:
    """Read tokens [n] as a prompt; gives the decisions and the states [n, hidden] after the last layer."""
    reader = Pruned(model, routers, sinks, tuple(tokens.tolist()))
    climb = Climb(reader, reader.new_cache(), "layers")
    return climb, run_sync(climb.run())


def masked(
    model: LanguageModel,
    tokens: np.ndarray,
    skips: Mapping[int, torch.Tensor],
    keeps: Mapping[int, torch.Tensor] | None = None,
) -> torch.Tensor:
    """[n, hidden] states after the last layer of tokens [n], all of them computed in every layer.

    Args:
        skips: {layer: [n] bool}, whose states stay as they were there and who is not seen.
        keeps: The same as numbers that gradients go through, 1 for those that go through the layer and 0 for the
            others.
    """
    causal, states = np.tri(len(tokens), dtype=bool), None
    for layer in range(model.config.num_layers):
        mask = causal
        if layer in skips:
            mask = causal & (~skips[layer].numpy()[None, :] | np.eye(len(tokens), dtype=bool))
        entering = {"tokens": tokens} if states is None else {"states": states}
        segment = Segment(np.arange(len(tokens)), **entering, mask=mask, logit_rows=[])  # type: ignore[arg-type]
        through = model.forward(Batch([segment]), taps=(layer + 1,), layer_plan=LayerPlan((layer,))).hidden[layer + 1]
        if layer in skips:
            assert states is not None
            gate = (~skips[layer]).to(through) if keeps is None else keeps[layer].to(through)
            through = through * gate[:, None] + states * (1 - gate[:, None])
        states = through
    assert states is not None
    return states


def said(model: LanguageModel, states: torch.Tensor) -> torch.Tensor:
    """[n, vocab] logits of states after the last layer."""
    return model.forward(Batch([Segment(np.arange(len(states)), states=states)]), layer_plan=LayerPlan(())).logits


@dataclass(frozen=True, eq=False)
class Expected:
    """The whole model's results for what follows a prompt, for m rows from the prompt's last one on."""

    text: TrainingText
    ids: torch.Tensor  # [m, k] the most likely tokens
    logprobs: torch.Tensor  # [m, k + 1] of these and of all others together

    @classmethod
    @torch.no_grad()
    def of(cls, model: LanguageModel, text: TrainingText) -> Expected:
        segment = Segment.chunk(text.tokens, model.new_cache(), logit_rows=_rows(text))
        logits = model.forward(Batch([segment])).logits
        ids = torch.from_numpy(topk(logits, min(_LIKELY, logits.shape[1] - 1))[0].astype(np.int64)).to(logits.device)
        return cls(text, ids, _gathered(logits, ids))

    def divergence(self, logits: torch.Tensor) -> torch.Tensor:
        """Mean KL divergence of logits [m, vocab] from what is expected, in nats per token."""
        return (self.logprobs.exp() * (self.logprobs - _gathered(logits, self.ids))).sum(dim=-1).mean()


def _rows(text: TrainingText) -> range:
    """The rows after which something was written."""
    return range(text.written - 1, len(text.tokens))


def _gathered(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[n, k + 1] log-probabilities of ids [n, k] and of all other tokens together."""
    logprobs = logits.float().log_softmax(dim=-1)
    others = logprobs.scatter(1, ids, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat((logprobs.gather(1, ids), others), dim=-1).clamp(min=-50.0)


def train_routers(
    model: LanguageModel,
    routers: TokenRouters,
    texts: Sequence[TrainingText],
    held: Sequence[TrainingText],
    out: Path,
    recipe: FTPRecipe,
    progress: Progress = silent,
) -> History:
    """Train the weights of `routers` in place on texts whose prompts they prune; the model stays as it is.

    Args:
        out: The folder of the checkpoint, from which an interrupted run goes on.
    """
    parameters = dict(routers.weights)
    chosen, expected = batches(len(texts), 1, recipe.seed), [Expected.of(model, text) for text in held]

    def loss(step: int) -> torch.Tensor:
        (number,) = chosen(step)
        return router_loss(model, routers, Expected.of(model, texts[number]), recipe, 1 - step / recipe.steps)

    def validate() -> dict[str, float]:
        found = [assess(model, routers, each, recipe) for each in expected]
        gap = abs(float(np.mean([share for _, share in found])) - recipe.sparsity)
        divergence = float(np.mean([value for value, _ in found]))
        return {"divergence": divergence, "gap": gap, "loss": recipe.divergence * divergence + recipe.rate * gap}

    return train(
        parameters,
        loss,
        TrainingPlan(recipe.steps, lr=recipe.lr, validate_every=max(1, recipe.steps // 4)),
        out,
        validate=validate,
        metric="loss",
        settings={"recipe": asdict(recipe), "texts": len(texts), "schedule": list(routers.schedule)},
        progress=progress,
        what="training routers",
    )


def router_loss(
    model: LanguageModel, routers: TokenRouters, expected: Expected, recipe: FTPRecipe, guiding: float
) -> torch.Tensor:
    """What routers are trained by, on one text."""
    tokens, written = expected.text.tokens, expected.text.written
    with torch.no_grad():
        climb, _ = pruned(model, routers, recipe.sinks, tokens[:written])
    skips, keeps, guide, rate = {}, {}, [], []
    for layer, around in climb.skips.items():
        importance, sparsity = climb.shown[layer], routers.schedule[layer]
        logits = routers.logits(layer, inputs(importance, sparsity))
        soft = logits.softmax(dim=-1)[:, 0]
        # Forward what was decided, backward as if the probability had been it.
        keep = (~around).float() + (soft - soft.detach()) * climb.free
        taught = least_important(importance, sparsity, climb.free)
        guide.append(cross_entropy(logits[climb.free], taught[climb.free].long()))
        rate.append(((1 - keep).mean() - sparsity).abs())
        behind = len(tokens) - written
        skips[layer] = torch.cat((around, torch.zeros(behind, dtype=torch.bool, device="cpu")))
        keeps[layer] = torch.cat((keep, torch.ones(behind, dtype=torch.float32, device="cpu")))
    states = masked(model, tokens, skips, keeps)[written - 1 :]
    divergence = expected.divergence(said(model, states))
    own = recipe.guide * guiding * torch.stack(guide).mean() + recipe.rate * torch.stack(rate).mean()
    return own + recipe.divergence * divergence.to(own.device)


@torch.no_grad()
def assess(model: LanguageModel, routers: TokenRouters, expected: Expected, recipe: FTPRecipe) -> tuple[float, float]:
    """How far what follows a pruned prompt is from what the whole model makes of it, in nats per token.

    Beside it the share of layers that the prompt's tokens left out.
    """
    tokens, written = expected.text.tokens, expected.text.written
    reader = Pruned(model, routers, recipe.sinks, tuple(tokens[:written].tolist()))
    cache = reader.new_cache()
    logits = run_sync(score(reader, Segment.chunk(tokens, cache, logit_rows=_rows(expected.text)))).logits
    cache.keep(range(len(tokens)))
    around = len(tokens) - cache.lengths
    return float(expected.divergence(logits)), float(around.mean() / written)


def find_schedule(
    model: LanguageModel, texts: Sequence[TrainingText], out: Path, recipe: FTPRecipe, progress: Progress = silent
) -> tuple[tuple[float, ...], list[float]]:
    """The schedule under which the static router changes least what follows prompts, and all losses tried.

    Interrupted, it goes on from what is in the folder `out`.
    """
    layers, expected = model.config.num_layers, [Expected.of(model, text) for text in texts]
    settings = {
        "evolution": asdict(recipe.evolution),
        "sparsity": recipe.sparsity,
        "sinks": recipe.sinks,
        "seed": recipe.seed,
        "model": model.fingerprint,
        "texts": [text.tokens.tolist() for text in texts],
    }
    known, tried = known_figures(out / TRIED, settings).get("losses", []), list[float]()

    def loss(schedule: tuple[float, ...]) -> float:
        number, last = len(tried), len(tried) + 1 == recipe.evolution.tried
        if number < len(known):
            tried.append(known[number])
        else:
            found = [assess(model, TokenRouters(schedule), each, recipe)[0] for each in expected]
            tried.append(float(np.mean(found)))
            if last or len(tried) % _EVERY == 0:
                write_text(out / TRIED, json.dumps({**settings, "losses": tried}) + "\n")
        progress("trying schedules", len(tried), recipe.evolution.tried)
        return tried[-1]

    return evolve(loss, layers, recipe.sparsity, recipe.evolution, recipe.seed)


def train_ftp(run: Run, corpus: Corpus) -> TokenRouters:
    """A schedule and routers, trained on the model's own texts, of which every twentieth is held out."""
    target, learning, out, recipe, progress = run.loaded, run.learning, run.out, run.of(FTPRecipe), run.progress
    model = target.model
    if not (model.capabilities.layer_plans and model.capabilities.policies and learning.capabilities.gradients):
        raise SettingsError(f"{target.name} cannot be pruned: use a model that this package runs itself")
    corpus.of_vocabulary(model.vocab_size, target.name)
    learned, others = (_usable(corpus, numbers, recipe) for numbers in corpus.split())
    schedule, losses = find_schedule(model, learned[: recipe.read], out, recipe, progress)
    routers = TokenRouters(schedule)
    known = HeldOut.of(others, [text.tokens[: text.written].tobytes() for text in others])
    contenders = {
        "static, uniform": TokenRouters(uniform(len(schedule), recipe.sparsity)),
        "static, scheduled": routers,
        "as many tokens at random": _Shuffled(schedule),
    }
    facts: dict[str, Any] = {**run.facts, "recipe": asdict(recipe), "losses": {"first": losses[0], "best": min(losses)}}
    if recipe.steps:
        routers = TokenRouters.initial(schedule, recipe.width, recipe.seed)
        history = train_routers(learning, routers, learned, known.choosing, out / "training", recipe, progress)
        facts["best_step"] = history.best_step
    expected = {id(text): Expected.of(learning, text) for text in known.tested}

    def tested(each: TokenRouters) -> Measured:
        def means(texts: Sequence[TrainingText]) -> dict[str, float]:
            rows = [assess(learning, each, expected[id(text)], recipe) for text in texts]
            return dict(zip(("divergence", "sparsity"), np.mean(rows, axis=0).tolist(), strict=True))

        return known.measured(means, "divergence")

    mixed = _Shuffled(schedule, routers.weights)
    report = known.report(
        tested(routers), {name: tested(each) for name, each in contenders.items()}, control=tested(mixed)
    )
    routers = replace(routers, facts=facts | {"validation": report}, model=model.fingerprint)
    routers.save(out / TokenRouters.FILE)
    return routers


class _Shuffled(TokenRouters):
    """Routers that take each token for another one."""

    def skips(self, layer: int, importance: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(len(importance), generator=torch.Generator().manual_seed(layer), device="cpu")
        return super().skips(layer, importance[order], free)


def _usable(corpus: Corpus, numbers: Sequence[int], recipe: FTPRecipe) -> list[TrainingText]:
    """The first tokens of those texts whose prompts have something to prune; at least a quarter of them is written."""
    most = 3 * recipe.length // 4
    found = [
        TrainingText(text.tokens[: recipe.length].astype(np.int64), min(text.written, most))
        for text in (corpus[number] for number in numbers)
        if text.written > recipe.sinks + 1 and len(text.tokens) > min(text.written, most)
    ]
    if not found:
        raise SettingsError(f"no prompt of the texts is longer than {recipe.sinks + 1} tokens: give longer prompts")
    return found


@kind(
    "The routers are ready: --logits-source ftp:routers={out}",
    (OwnTexts(400), FTPRecipe(), Evolution()),
    "--sparsity 0.2 --out routers",
    model="to prune",
    file=TokenRouters.FILE,
)
def _ftp(run: Run) -> dict[str, Any]:
    """Find how much each layer of MODEL can be pruned, and train routers that choose the tokens to skip.

    A genetic search finds the share of tokens that skip each layer, for a fixed mean. Then one small router per
    layer is trained. MODEL does not change.
    """
    run.settings = (replace(run.of(FTPRecipe), evolution=run.of(Evolution)), *run.settings)
    return dict(train_ftp(run, own_texts(run)).facts["validation"])
