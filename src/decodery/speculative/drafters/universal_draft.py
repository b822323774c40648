"""A draft model of any vocabulary: what it writes is tokenised anew for the target."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import accumulate

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.models.loaders.named import Precision, named
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.tokenizers.vocabularies import tokenizer_of
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .follower import Follower

_LOOKBACK = 10
"""Tokens at the end of a text that are tokenised again when it grows, as its end decides how they are cut."""


@dataclass(slots=True)
class UniversalReading:
    """A text in the draft model's tokens.

    Attributes:
        target, draft: The two tokenizers.
        follower: What the draft model has read.
        known: The target's tokens that the text holds.
        data: Its bytes, without control tokens.
        tokens: Its tokens in the draft model's vocabulary.
        ends: How many bytes the text has after each of these.
    """

    target: Tokenizer
    draft: Tokenizer
    follower: Follower
    known: list[int] = field(default_factory=list)
    data: bytes = b""
    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @classmethod
    def begin(cls, model: Reader, target: Reader, name: str) -> UniversalReading:
        """Nothing read yet.

        Args:
            model, target: The draft model and the text's.
            name: The drafter, for messages.

        Raises:
            SettingsError: Where a tokenizer is not known.
        """
        own, other = tokenizer_of(target), tokenizer_of(model)
        if own is None or other is None:
            raise SettingsError(
                f"{name} needs the tokenizers of both models, and one of them is not known: load both with "
                "decodery.load"
            )
        return cls(own, other, Follower(model, model.new_cache()))

    def __deepcopy__(self, memo: dict[int, object]) -> UniversalReading:
        follower, known = deepcopy(self.follower, memo), list(self.known)
        return replace(self, follower=follower, known=known, tokens=list(self.tokens), ends=list(self.ends))

    def text(self, tokens: list[int]) -> list[int]:
        """The draft model's tokens of a text; none where it ends inside a character.

        Args:
            tokens: The target's.
        """
        if tokens[: len(self.known)] != self.known:
            self.known, self.data, self.tokens, self.ends = [], b"", [], []
        control = self.target.control_ids
        fresh = b"".join(self.target.piece(id) for id in tokens[len(self.known) :] if id not in control)
        self.known, self.data = list(tokens), self.data + fresh
        if not _whole(self.data):
            return []
        if fresh or not self.tokens:
            self._tokenise()
        return self.tokens

    def drafted(self, tokens: list[int]) -> list[int]:
        """The target's tokens of what the draft model has written after the text."""
        written = b"".join(self.draft.piece(id) for id in tokens)
        try:
            text = written.decode()
        except UnicodeDecodeError as error:
            # What follows is no character, or none yet.
            text = written[: error.start].decode()
        if not text:
            return []
        # The last tokens decide with what follows how it is cut: they are tokenised with it.
        tail = [id for id in self.known[-_LOOKBACK:] if id not in self.target.control_ids]
        while tail and not _begins(self.target.piece(tail[0])):
            tail = tail[1:]
        before = b"".join(self.target.piece(id) for id in tail)
        found = self.target.encode_after(before.decode("utf-8", "replace") + text)
        return found[len(tail) :] if found[: len(tail)] == tail else self.target.encode_after(text)

    def _tokenise(self) -> None:
        """Bring the draft model's tokens up to the text's end."""
        kept = max(0, len(self.ends) - _LOOKBACK)
        while kept and not _begins(self.data[self.ends[kept - 1] :]):
            kept -= 1
        begin = self.ends[kept - 1] if kept else 0
        rest = self.data[begin:].decode("utf-8", "replace")
        fresh = self.draft.encode_after(rest) if kept else self.draft.encode(rest)
        sizes = [0 if id in self.draft.control_ids else len(self.draft.piece(id)) for id in fresh]
        self.tokens = self.tokens[:kept] + fresh
        self.ends = self.ends[:kept] + [begin + end for end in accumulate(sizes)]
        if self.ends and self.ends[-1] != len(self.data):
            # This tokenizer changes texts: where its tokens end is not known, and all is tokenised again next time.
            self.ends = []


def _whole(data: bytes) -> bool:
    """Whether bytes end after a character."""
    for size in range(1, min(4, len(data)) + 1):
        if not _begins(data[-size:]):
            continue
        first = data[-size]
        return size >= (1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4)
    return True


def _begins(data: bytes) -> bool:
    """Whether bytes begin with a character, or there are none."""
    return not data or data[0] & 0xC0 != 0x80


@register(
    "universal-draft",
    paper="Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies "
    "(2025)",
    lossless=True,
    slower=True,
    requirements=("a second model, of any vocabulary",),
)
@dataclass(frozen=True)
class UniversalDraft(Drafter):
    """Drafts with a model of another vocabulary: its text is tokenised anew for the target.

    It is what transformers calls universal assisted decoding. The draft model writes its most likely tokens; control
    tokens of either model are left out. A draft is a guess of tokens without probabilities, so any acceptance rule
    keeps what it promises. Scope: the request; memory: one more cache.

    Attributes:
        model: A `LanguageModel` whose tokenizer is known, or a name `decodery.load` knows.
        dtype: What a named one is loaded in, such as "int4".
        length: Tokens that the draft model writes per step.
    """

    model: LanguageModel | str
    dtype: Precision = "auto"
    length: int = field(default=5, kw_only=True)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise SettingsError(f"universal-draft needs length >= 1, not {self.length}")

    def start(self, seq: Sequence) -> UniversalReading:
        return UniversalReading.begin(named(self.model, self.dtype), seq.request.model, "universal-draft")

    def auxiliary_models(self, target: Reader) -> tuple[Reader, ...]:
        return (named(self.model, self.dtype),)

    def largest(self) -> int | None:
        # A token of the draft model may be several of the target's.
        return None

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        reading: UniversalReading = seq.states[self]
        most = min(budget.nodes, budget.depth, seq.remaining)
        tokens = reading.text(seq.tokens) if most > 0 else []
        room = reading.follower.model.config.max_positions - len(tokens)
        if not tokens or room < 1:
            return DraftTree.root(seq.last_token)
        drafted: list[int] = []
        while len(drafted) < min(self.length, room):
            tree = DraftTree.chain(tokens[-1], drafted)
            logits = yield from reading.follower.after(tokens, tree, [len(drafted)])
            token = int(logits[0].argmax())
            if token in reading.draft.control_ids:
                break
            drafted.append(token)
        found = [id for id in reading.drafted(drafted) if id < seq.request.model.vocab_size]
        return DraftTree.chain(seq.last_token, found[:most])

    def more_for(self, seq: Sequence, tokens: int) -> int:
        reading: UniversalReading = seq.states[self]
        return reading.follower.more_for(tokens)

    def forget(self, seq: Sequence) -> None:
        reading: UniversalReading = seq.states[self]
        reading.follower.forget()
