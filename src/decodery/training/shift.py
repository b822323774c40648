"""Train what FactCheckmate adds to hidden states: towards right answers where the model is wrong, little elsewhere."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.store import Progress
from decodery.models.protocol import OpenModel, is_open
from decodery.monitors.factcheckmate import SITE, Shift

from .activations import Answered
from .evaluation import ALONE, MonitorContext
from .loop import content, drawn, even_plan, train
from .tensors import bool_tensor, int_tensor, mlp, through

_INNER, _BATCH, _APART = 256, 64, 0.1
_STEPS, _LR = 400, 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class _Taught:
    """Rows at which tokens of right answers are chosen."""

    states: torch.Tensor  # [n, hidden]
    tokens: torch.Tensor  # [n]
    wrong: torch.Tensor  # [n] bool, whether the model's own answer was wrong


def train_shift(
    lm: LLM, answers: Ordered[Answered], *, chat: bool = False, seed: int = 0, context: MonitorContext = ALONE
) -> Shift:
    """The MLP, of three layers, that makes right answers more likely where the model was wrong.

    The model itself is frozen, and only its final norm and head are differentiated.

    Args:
        answers: To learn from, those of one part; of questions answered wrongly it learns the right answer, token by
            token, and of those answered rightly to leave the distribution as it is (0.1 of the divergence from it).
    """
    model = lm.model
    if not is_open(model) or not model.capabilities.gradients:
        raise UnsupportedModel("a shift is trained through the model's head: load the model with dtype=float32")
    taught = _taught(lm, answers, chat, context.progress)
    if not taught.wrong.any():
        raise SettingsError("a shift has nothing to learn from: give questions that the model answers wrongly")
    width = taught.states.shape[1]
    # The last layer begins at nothing: the first shift is the identity.
    tensors = mlp((width, _INNER, _INNER, width), torch.Generator().manual_seed(seed), 0.0)
    train(
        tensors,
        lambda step: _loss(model, tensors, taught, drawn(len(taught.states), _BATCH, seed, step)),
        even_plan(_STEPS, _LR, weight_decay=1e-2),
        context.out,
        settings={"rows": content([taught.states, taught.tokens, taught.wrong]), "seed": seed},
        progress=context.progress,
        what="training the shift",
        own=True,
    )
    kept = {name: tensor.detach() for name, tensor in tensors.items()}
    about = {**context.facts, "steps": _STEPS, "seed": seed, "rows": len(taught.states)}
    return Shift(kept, about, model.fingerprint)


def _loss(model: OpenModel, tensors: dict[str, torch.Tensor], taught: _Taught, batch: torch.Tensor) -> torch.Tensor:
    rows, wrong = taught.states[batch], taught.wrong[batch]
    found = through(tensors, rows)
    shifted = torch.log_softmax(model.project(model.final_norm(rows + found)).float(), dim=-1)
    with torch.no_grad():
        plain = torch.log_softmax(model.project(model.final_norm(rows)).float(), dim=-1)
    learned = -shifted[torch.arange(len(batch), device="cpu"), taught.tokens[batch]]
    apart = (shifted.exp() * (shifted - plain)).sum(dim=-1)
    return torch.where(wrong, learned, _APART * apart).mean()


@torch.no_grad()
def _taught(lm: LLM, answers: Ordered[Answered], chat: bool, progress: Progress) -> _Taught:
    """The states after each prompt and the right answer's tokens, up to the end of its line or turn."""
    states, tokens, wrong = [], list[int](), list[bool]()
    for number, each in enumerate(answers):
        prompt = lm.encode(each.question.prompt, apply_chat_template=chat)
        if chat:
            whole = [*prompt, *lm.tokenizer.encode(each.question.answer, special=False), *lm.tokenizer.eos_ids[:1]]
        else:
            whole = lm.encode(f"{each.question.prompt} {each.question.answer}\n", apply_chat_template=False)
        # Where the answer's beginning changes how the prompt's end is cut, it cannot be learned from.
        if whole[: len(prompt)] != prompt:
            continue
        segment = Segment.chunk(whole[:-1], lm.model.new_cache(), logit_rows=[])
        rows = lm.model.forward(Batch([segment]), taps=[SITE]).hidden[SITE]
        states.append(rows[len(prompt) - 1 :].float().cpu())
        tokens += whole[len(prompt) :]
        wrong += [each.wrong] * (len(whole) - len(prompt))
        progress("reading right answers", number + 1, len(answers))
    if not states:
        raise SettingsError("a shift has nothing to learn from: no answer begins where its prompt ends")
    return _Taught(torch.cat(states), int_tensor(tokens), bool_tensor(wrong))
