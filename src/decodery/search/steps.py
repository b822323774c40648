"""Texts that grow by steps: lines of thought that are drawn by the loop, judged, kept or left.

A step ends with its delimiter, with its text, or when it is as long as a step may be; drafts, rules and budgets of the
request write it. A text's first continuation keeps its seed and further ones are hashed from it, so that a search of
width one writes what the request would write, and what a branch writes does not hang on which others there are.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np

from decodery.core.errors import OutOfMemory, ServerError, SettingsError
from decodery.core.ledger import count
from decodery.core.noise import PARTICLE, RESAMPLE, draw, mix, nth_seed
from decodery.core.registry import method_of
from decodery.core.requirements import Requirements
from decodery.core.trace import Grown, Step, Trace
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.engine.schedule import share_prompt
from decodery.engine.text import unread
from decodery.models.loaders.store import Progress, silent
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.sampling.logits_processor import require_number
from decodery.step.embedded import reading
from decodery.step.forward_request import ForwardCoroutine, score
from decodery.step.sequence import Sequence
from decodery.step.writer import writes

from .answers import AnswerExtractor, Kind, Projection
from .base import Search, credit, require_written
from .judged import JudgedSearch
from .particles import multinomial
from .pool import leave_out, require_count, scored, write_on
from .step_nodes import Aggregate, Node, StepEnd, aggregated, identity, require_pattern
from .votes import elected, vote_weights


@dataclass(frozen=True)
class Stepped(Search):
    """Settings of what writes its texts step by step; see the descriptions of the methods.

    Attributes:
        delimiter: What ends a step, and belongs to it: a text, which may stand within a token, or token ids; a step has
            something before it; None where steps have a length alone. In a text, \\n is a line feed and \\t a tab.
        step_tokens: Of a step at most.
        rounds: Steps of a text; the last one goes on to the text's end.
        step_pattern: A regular expression that ends a step beside the delimiter, such as the marker of an answer,
            \\\\boxed\\{[^{}]*\\}; "" for none.
        step_seconds: After which a step ends at the next token; None for any time. Texts then depend on the machine.
    """

    delimiter: str | tuple[int, ...] | None = "\n\n"
    step_tokens: int = 2048
    rounds: int = 40
    step_pattern: str = ""
    step_seconds: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.delimiter, str):
            # What a shell passes on between single quotes.
            object.__setattr__(self, "delimiter", self.delimiter.replace("\\n", "\n").replace("\\t", "\t"))
        for name in ("step_tokens", "rounds"):
            require_count(self._name, name, getattr(self, name))
        if self.delimiter is not None and not self.delimiter:
            raise SettingsError(f"{self._name} needs a delimiter that ends a step, such as a blank line")
        require_pattern(self.step_pattern)
        if self.step_seconds is not None:
            require_number(f"step_seconds of {self._name}", self.step_seconds, above=0.0)

    @property
    def _name(self) -> str:
        method = method_of(self)
        return type(self).__name__ if method is None else method.name

    @property
    def resumable(self) -> bool:
        # Where time ends steps, no second run has the same.
        return self.step_seconds is None

    def bind(self, tokenizer: Tokenizer) -> Self:
        if isinstance(self.delimiter, str):
            require_written(tokenizer, self.delimiter, f"the delimiter of {self._name}")
        return super().bind(tokenizer)

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        return (yield from self.follow(Growth(engine, request, self, progress)))

    def ends(self, seq: Sequence) -> Callable[[Sequence], bool]:
        """What holds a text at the end of the step that it is about to write after what it has."""
        return StepEnd(seq, self.delimiter, self.step_tokens, self.step_pattern, self.step_seconds)

    @abstractmethod
    def follow(self, growth: Growth) -> ForwardCoroutine[list[Sequence]]:
        """What `find` finds, in texts that grow from `growth.root`."""


@dataclass(frozen=True)
class StepSearch(Stepped, JudgedSearch):
    """What searches over steps have in common; see their own descriptions.

    Attributes:
        aggregate: How the scores of its steps make what a text is worth.
        choose: "best" returns the finished texts by worth; "vote" one for each of their answers, that of most weight
            first, see weighted-vote; "draw" all of them, one drawn by weight first.
        answer, pattern: As there.
        scorer: Of beginnings and answers, as in value-head(head=prm.safetensors).
    """

    aggregate: Aggregate = "last"
    choose: Literal["best", "vote", "draw"] = "best"
    answer: Kind | Projection = "auto"
    pattern: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        JudgedSearch.__post_init__(self)
        if self.aggregate not in ("last", "min", "prod", "mean"):
            raise SettingsError(f"{self._name} aggregates by last, min, prod or mean, not {self.aggregate!r}")
        if self.choose not in ("best", "vote", "draw"):
            raise SettingsError(f"{self._name} chooses the best, by vote or by a draw, not {self.choose!r}")
        if not (self.judge.answers and self.judge.prefixes):
            raise SettingsError(f"{self._name} judges texts step by step: give a scorer of beginnings and answers")
        AnswerExtractor(self.answer, self.pattern)

    @property
    def requirements(self) -> Requirements:
        return Requirements.merged((Requirements(continues=True), self.judge.requirements))

    def worth(self, node: Node) -> float:
        """What a text's scores make it worth; nothing is worth -inf."""
        return aggregated(self.aggregate, node.scores, self.judge)

    def reward(self, node: Node) -> float:
        """What a text is worth as a probability.

        Raises:
            SettingsError: If it is none.
        """
        reward = math.exp(self.worth(node)) if self.judge.log else self.worth(node)
        if not 0 <= reward <= 1:
            raise SettingsError(
                f"{type(self.judge).__name__} gave a reward of {reward:.4g}, and {self._name} takes rewards between 0 "
                "and 1: give a scorer of probabilities"
            )
        return reward


class Growth:
    """The tree of texts that a search over steps writes after one prompt.

    Texts that are not held any more give their memory back.

    Args:
        root: The prompt.
        trace: Of all of it; its `grown` is the tree, from which everything that was chosen can be followed again
            without a model.
    """

    def __init__(self, engine: Engine, request: Request, search: Stepped, progress: Progress) -> None:
        seq = engine.open(replace(request, search=search))
        engine.recall(seq)
        self.engine = engine
        self.search = search
        self.progress = progress
        self.root = Node(seq, len(seq.tokens))
        self.trace = Trace(ledger=seq.trace.ledger)
        self._settled = request.settled
        if request.followed is not None:
            request.followed(self.trace)
        self._scores: dict[Hashable, float | None] = {}
        self._failed: Exception | None = None
        search.fits(seq.request.model)
        if isinstance(search.delimiter, tuple) and writes(seq.request.model):
            raise SettingsError("a server's token ids are not known here: give the delimiter of steps as a text")
        if isinstance(search.delimiter, str) and seq.text is None:
            raise SettingsError("the delimiter of steps is a text: give token ids, or search through `LLM`")

    def extend(self, parents: Ordered[Node], *, whole: bool = False) -> ForwardCoroutine[list[Node]]:
        """A continuation by one step of each of these texts, none of which may be finished.

        A text that comes several times gets as many; where the sampler draws nothing they are one and the same node,
        however often it is asked for.

        Args:
            whole: The step goes on to the text's end.
        """
        self.engine.check_width(len(parents))
        if not self.root.seq.request.sampler.greedy:
            made = [self._begun(parent, whole) for parent in parents]
            yield from self._written(made)
            return made
        fresh = {id(parent): parent for parent in parents if whole or parent.only is None}.values()
        for parent in fresh:
            parent.only = self._begun(parent, whole)
        yield from self._written([parent.only for parent in fresh if parent.only is not None])
        return [parent.only for parent in parents if parent.only is not None]

    def _written(self, made: list[Node]) -> ForwardCoroutine[None]:
        yield from self.write([child.seq for child in made])
        for child in made:
            grown = self.trace.grown[child.number]
            grown.tokens, grown.finish = child.seq.tokens[child.begin :], child.seq.finish_reason

    def judge(self, nodes: Ordered[Node]) -> ForwardCoroutine[list[Node]]:
        """Those of these texts whose last step has got a score, which is noted; equal texts are scored once.

        Raises the scorer's error where it fails for all, and no text has got a score yet.
        """
        assert isinstance(self.search, JudgedSearch)
        fresh = list({id(node): node for node in nodes if not node.judged}.values())
        texts = yield from self.shown(fresh)
        keys = [identity(text) for text in texts]
        asked = {key: number for number, key in enumerate(keys) if key not in self._scores}
        if asked:
            begins = [fresh[number].begin - self.root.seq.request.prompt_length for number in asked.values()]
            scores = yield from self._scored([texts[number] for number in asked.values()], begins)
            self._scores |= dict(zip(asked, scores, strict=True))
        for node, key in zip(fresh, keys, strict=True):
            if (worth := self._scores[key]) is not None:
                node.scores, node.judged = (*node.scores, worth), True
                self.trace.grown[node.number].score = worth
        return [node for node in nodes if node.judged]

    def _scored(self, texts: list[Sequence], begins: list[int]) -> ForwardCoroutine[list[float | None]]:
        assert isinstance(self.search, JudgedSearch)
        try:
            return (yield from scored(self.search.judge, texts, begins))
        except (OutOfMemory, ServerError):
            raise
        except Exception as error:
            if all(known is None for known in self._scores.values()):
                raise
            # These end here; others may go on, or have ended before.
            leave_out([error] * len(texts), len(texts))
            self._failed = error
            return [None] * len(texts)

    def shown(self, nodes: Ordered[Node]) -> ForwardCoroutine[list[Sequence]]:
        """The texts that the scorer sees for these: they themselves."""
        return [node.seq for node in nodes]
        yield

    def settle(self, candidates: Iterable[Node]) -> None:
        """Report as final what these texts have in common.

        What is found first is one of them, or continues one.
        """
        if self._settled is not None:
            texts = [(node.seq.text, node.finished) for node in candidates]
            safe = [text.text if done else text.safe for text, done in texts if text is not None]
            # What the first and the last one in order share is what all share.
            first, last = min(safe, default=""), max(safe, default="")
            pairs = enumerate(zip(first, last, strict=False))
            self._settled(first[: next((at for at, (one, other) in pairs if one != other), len(first))])

    def finish(self, found: Ordered[Node], weights: Ordered[float] | None = None) -> ForwardCoroutine[list[Sequence]]:
        """These texts as the results of the search, as its `choose` has it; of equals the one that came first.

        Raises the scorer's error where nothing has come to its end for that.

        Args:
            weights: What each of them counts in a vote, at least 0; by default what it is worth.
        """
        search = self.search
        assert isinstance(search, StepSearch)
        if not found and self._failed is not None:
            raise self._failed
        each = {id(node): node for node in found}.values()
        ranked = sorted(each, key=lambda node: -search.worth(node))
        texts = [node.seq for node in ranked]
        for seq, node in zip(texts, ranked, strict=True):
            seq.score = search.worth(node)
        if search.choose == "best":
            return self.close(texts)
        if weights is None:
            weights = vote_weights(search.judge, [search.worth(node) for node in found])
        votes = dict(zip(map(id, found), weights, strict=True))
        if search.choose == "draw":
            shares = np.array([votes[id(node)] for node in ranked])
            uniform = draw(self.root.seq.request.seed, 0, stream=RESAMPLE)
            (first,) = multinomial(shares / shares.sum(), [uniform]) if shares.sum() else (0,)
            texts.insert(0, texts.pop(first))
        else:
            answers = yield from AnswerExtractor(search.answer, search.pattern).of_texts(texts)
            texts = elected(texts, answers, [votes[id(node)] for node in ranked])
        return self.close(texts)

    def close(self, texts: list[Sequence]) -> list[Sequence]:
        """These texts, best first, as the results; what else was written counts as discarded."""
        for seq in texts:
            seq.trace, seq.segment_end = self.trace, None
        count("discarded", self.trace.ledger.tokens - len(texts[0].generated))
        credit(self.trace, texts[0])
        return texts

    def _begun(self, parent: Node, whole: bool) -> Node:
        """A child of which nothing is written."""
        seq = parent.seq.branch(self._seed(parent))
        if not whole and parent.depth + 1 < self.search.rounds:
            seq.segment_end = self.search.ends(seq)
        if parent is self.root and unread(seq) > 1:
            # The first one reads the prompt for all.
            if parent.seq.scheduling.prompt_owner is None:
                parent.seq.scheduling.prompt_owner = seq
            else:
                seq.scheduling.prompt_owner = parent.seq.scheduling.prompt_owner
        parent.children += 1
        self.trace.grown.append(Grown(parent.number, []))
        return Node(seq, len(seq.tokens), len(self.trace.grown) - 1, parent.scores, parent.depth + 1)

    def _seed(self, parent: Node) -> int:
        seed = parent.seq.request.seed
        if parent is self.root:
            return nth_seed(seed, parent.children)
        return mix(seed, PARTICLE, parent.seq.position, parent.children) if parent.children else seed

    def read(self, seq: Sequence) -> ForwardCoroutine[None]:
        """Let a text's model read all of it but the last token, which its next turn reads."""
        while not writes(seq.request.model) and (missing := unread(seq)) > 1:
            start = seq.cache.next_position
            chunk = seq.tokens[start : start + min(missing - 1, self.engine.prefill_chunk)]
            yield from score(seq.request.model, reading(seq, chunk, []))
            seq.cache.keep(range(len(chunk)))
            self.trace.steps.append(Step(rows=len(chunk), prefill=start < seq.request.prompt_length - 1))

    def write(self, texts: list[Sequence], trace: Trace | None = None) -> ForwardCoroutine[None]:
        """A step of each of these texts, or all of those that nothing holds.

        Args:
            trace: Where its turns are recorded.
        """

        def goes_on(seq: Sequence) -> bool:
            return seq.segment_end is None or seq.position == begun[id(seq)] or not seq.segment_end(seq)

        def note(active: Ordered[Sequence]) -> None:
            self.progress("drawing steps", max(seq.position for seq in active), self.root.seq.request.max_new_tokens)

        begun = {id(seq): seq.position for seq in texts}
        yield from write_on(self.engine, texts, trace or self.trace, goes_on, note)
        if cut := sum(not seq.complete for seq in texts):
            count("cut", cut)
        prompt = self.root.seq
        if prompt.scheduling.prompt_owner is not None:
            share_prompt(prompt, prompt.scheduling.prompt_owner)
