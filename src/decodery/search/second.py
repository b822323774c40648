"""A second model that writes steps of a search's texts."""

from __future__ import annotations

from typing import cast

import torch

from decodery.core.errors import SettingsError
from decodery.core.trace import Grown, Trace
from decodery.engine.remote import RemoteModel
from decodery.models.batch import Segment
from decodery.models.hooks import Tap
from decodery.models.loaders.named import Precision
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.tokenizers.vocabularies import fitted
from decodery.speculative.acceptance.coupled import Coupled
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.step.forward_request import ForwardCoroutine, score
from decodery.step.sequence import Sequence

from .step_nodes import Node
from .steps import Growth

_ROLE = "draft"


class SecondModel:
    """A second model that writes steps with the request's sampler and the noise of the text.

    In ledgers it is the "draft", as it is in the tree.

    Args:
        model: A `LanguageModel`, a name `decodery.load` knows, or None for the draft that comes with this package for
            the target.
            After a server it is the URL of another one, see `RemoteModel.beside`.
        dtype: See `models.loaders.named`. Its cache holds what it has read of the text that it wrote on last; of
            another one it reads again from where the two part.

    Raises:
        SettingsError: For a model whose context is too short, VocabularyMismatch for one with other tokens.
    """

    def __init__(self, growth: Growth, model: LanguageModel | str | None, dtype: Precision = "auto") -> None:
        root = growth.root.seq
        self.growth = growth
        self.model = second_model(model, dtype, root.request.model)
        if (room := self.model.config.max_positions) < root.request.prompt_length + root.request.max_new_tokens:
            raise SettingsError(
                f"the second model has room for {room} tokens, and this text may have "
                f"{root.request.prompt_length + root.request.max_new_tokens}: ask for fewer new tokens, or name "
                "another model"
            )
        self._text: Sequence | None = None

    def write(self, parent: Node) -> ForwardCoroutine[Node]:
        """A step after a text, of which the text's own model has read nothing yet."""
        written = self._taken_over(parent.seq)
        if parent.depth + 1 < self.growth.search.rounds:
            written.segment_end = self.growth.search.ends(written)
        yield from self.growth.write([written], written.trace)
        return Node(
            self._given_back(parent.seq, written),
            len(parent.seq.tokens),
            self._entered(parent, written),
            parent.scores,
            parent.depth + 1,
        )

    def state(self, tap: Tap) -> ForwardCoroutine[torch.Tensor]:
        """[hidden] of the last token that it has written, which is read on a fork."""
        assert self._text is not None
        segment = Segment.chunk([self._text.last_token], self._text.cache.fork(), logit_rows=[])
        return (yield from score(self.model, segment, (tap,), _ROLE)).hidden[tap][0]

    def _entered(self, parent: Node, written: Sequence) -> int:
        """The number of the step in the tree."""
        tree = self.growth.trace.grown
        step = written.tokens[len(parent.seq.tokens) :]
        tree.append(Grown(parent.number, step, finish=written.finish_reason, author=_ROLE))
        return len(tree) - 1

    def _taken_over(self, seq: Sequence) -> Sequence:
        """The same text, for this model to go on with: no drafts, no source, and no rule that is made for another."""
        clone, before = seq.fork(), self._text
        if before is None or isinstance(self.model, RemoteModel):
            cache = self.model.new_cache()
            if seq.request.slots is not None:
                cache.provide(seq.request.slots)
        else:
            cache, known = before.cache, before.tokens[: before.cache.next_position]
            pairs = enumerate(zip(known, seq.tokens, strict=False))
            shared = next((at for at, (one, other) in pairs if one != other), min(len(known), len(seq.tokens)))
            cache.truncate(min(shared, len(seq.tokens) - 1))
        clone.cache, clone.scheduling.prompt_owner = cache, None
        clone.rebind(
            model=self.model,
            role=_ROLE,
            acceptance_rule=Coupled(),
            draft_length=None,
            logits_source=None,
            prompt_logprobs=None,
        )
        clone.trace = Trace(ledger=seq.trace.ledger)
        self._text = clone
        return clone

    def _given_back(self, seq: Sequence, written: Sequence) -> Sequence:
        """What was written, as a text of the target."""
        text = seq.branch(seq.request.seed)
        text.scheduling.prompt_owner, text.tokens = None, list(written.tokens)
        text.token_logprobs, text.processor_states = list(written.token_logprobs), written.processor_states
        text.text = None if written.text is None else written.text.fork()
        text.finish_reason, text.stopped_by = written.finish_reason, written.stopped_by
        if text.request.drafter is not None:
            text.start_drafter()
            text.observed = len(text.tokens) - 1
        return text


def second_model(model: LanguageModel | str | None, dtype: Precision, target: Reader) -> LanguageModel:
    """The model that steps beside `target`; see `SecondModel`."""
    if isinstance(target, RemoteModel):
        if not isinstance(model, str) or "://" not in model:
            raise SettingsError(
                "texts of a server are continued by another server alone: give its URL, as in "
                f"model=http://localhost:8001, not {model!r}"
            )
        return target.beside(model)
    (found,) = DraftModel(model, dtype).auxiliary_models(target)
    return cast(LanguageModel, fitted(found, target))
