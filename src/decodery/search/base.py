"""What a search is: it follows several branches of a text and returns the best of them as sequences.

A search that scores its branches by itself does so through `Branches`; one that wants whole texts has the engine write
them, see `decodery.search.pool`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch

from decodery.core.abstract import Contract
from decodery.core.errors import SettingsError
from decodery.core.requirements import Requirements
from decodery.core.threads import one_thread
from decodery.core.trace import Step, Trace
from decodery.engine.commit import commit
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.engine.text import unread
from decodery.models.batch import Segment
from decodery.models.hooks import Tap
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import Reader
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.step.acceptance_rule import Accepted, NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.embedded import reading
from decodery.step.forward_request import ForwardCoroutine, ForwardResult, off_loop, run_sync, score_all
from decodery.step.scorer import Candidates
from decodery.step.sequence import Sequence
from decodery.step.writer import writes

__all__ = ["Branches", "Search"]

_SIZES = ("n", "width", "particles", "samples", "beams", "k")
"""Settings that say how many texts a search follows."""


@dataclass(frozen=True)
class Search(Contract):
    """A way of answering a request by more than one continuation.

    Fields are settings; one instance serves many.
    """

    @property
    def requirements(self) -> Requirements:
        """What it must find of a request whose `Branches` it follows.

        By default any temperature is allowed; a search that draws nothing says `greedy=True`, too.
        """
        return Requirements(rows=True, alone=True, law=True)

    @property
    def texts_at_once(self) -> int:
        """How many texts it follows at a time at most, by which a server counts it.

        At least what its sizes say.
        """
        sizes = (getattr(self, name, None) for name in _SIZES)
        return max((size for size in sizes if isinstance(size, int)), default=1)

    @property
    def resumable(self) -> bool:
        """Whether what it writes and scores can be kept in a record, from which it goes on."""
        return False

    def bind(self, tokenizer: Tokenizer) -> Self:
        """The same search with its texts turned into tokens; `LLM.search` calls it before `run`."""
        return self

    def fits(self, model: Reader) -> None:
        """Raise SettingsError where texts of this model cannot be searched."""
        return

    def shortcoming(self, score: float) -> str | None:
        """What the best result, of this score, lacks of what was to be found, in a sentence; None for nothing."""
        return None

    @abstractmethod
    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        """Finished sequences, best first, with their `score`; one trace is common to all of them.

        It asks for its passes, see `step.forward_request`, and so shares them with whatever else the engine does.

        Args:
            engine: What runs the passes.
            request: The prompt and its settings.
            progress: Called with the search's name, tokens written so far and the most that may be written.

        Raises:
            SettingsError: For a request this search cannot serve.
        """

    def run(self, engine: Engine, request: Request, progress: Progress = silent) -> list[Sequence]:
        """What `find` finds, looked for to the end."""
        return engine.finish(self.find(engine, request, progress))


class Branches:
    """The branches of one prompt: forked, scored together in one pass, and counted in one trace.

    Args:
        engine: What runs the passes.
        request: The prompt and its settings.
        search: The name of the search, for the trace.
        root: The prompt, of which nothing is read yet; branches are forks of it.

    Raises:
        SettingsError: If the request lacks what `search` needs.
    """

    def __init__(self, engine: Engine, request: Request, search: Search) -> None:
        self.root = engine.open(replace(request, search=search))
        self.model = self.root.request.model
        self.engine = engine

    def ask(
        self, segments: Ordered[Segment], *, taps: Ordered[Tap] = (), prefill: bool = False
    ) -> ForwardCoroutine[list[ForwardResult]]:
        """One pass over rows of any branches, recorded in the trace.

        Args:
            segments: Rows of each branch.
            taps: Where hidden states are wanted.
            prefill: The rows are prompt tokens.
        """
        self.engine.check_width(len(segments))
        found = yield from score_all(self.model, segments, taps)
        for scored in found:
            self.root.writable(scored.logits)
        rows = sum(len(segment) for segment in segments)
        self.root.trace.steps.append(Step(rows=rows, prefill=prefill))
        return found

    def score(self, branches: Ordered[Sequence]) -> ForwardCoroutine[torch.Tensor]:
        """Logits [n, vocab] after the last token of each branch, whose cache then holds all of its tokens.

        One pass, except that a prompt longer than the engine's chunks takes several.
        """
        logits: list[torch.Tensor | None] = [None] * len(branches)
        while waiting := [n for n, branch in enumerate(branches) if unread(branch)]:
            segments = []
            for n in waiting:
                chunk = branches[n].tokens[branches[n].cache.next_position :][: self.engine.prefill_chunk]
                rows = [len(chunk) - 1] if len(chunk) == unread(branches[n]) else []
                segments.append(reading(branches[n], chunk, rows))
            prefill = any(branches[n].position == 0 for n in waiting)
            found = yield from self.ask(segments, prefill=prefill)
            for n, segment, scored in zip(waiting, segments, found, strict=True):
                branches[n].cache.keep(range(len(segment)))
                if len(scored.logits):
                    logits[n] = scored.logits[0]
        yield from self.find_out(branches)
        return torch.stack([row for row in logits if row is not None])

    def find_out(self, branches: Ordered[Sequence]) -> ForwardCoroutine[None]:
        """Answer the questions of a constraint about the next tokens of branches, beside the engine's loop."""
        for branch in branches:
            if (question := branch.request.sampler.question(branch.processor_states)) is not None:
                yield from off_loop(question)

    def finish(self, found: list[Sequence]) -> list[Sequence]:
        """`found`, best first, as the results of the search: their caches hold all tokens but the last."""
        for seq in found:
            seq.cache.truncate(len(seq.tokens) - 1)
        if found:
            credit(self.root.trace, found[0])
        return found


def credit(trace: Trace, best: Sequence) -> None:
    """Let the steps of a search have written its best text."""
    if steps := trace.steps:
        # The prompt's pass gives the first token of a text; decoding passes are credited with the others. A text that
        # is drawn later reads the end of its prompt once more.
        decoding = [number for number, step in enumerate(steps) if not step.prefill] or [len(steps)]
        first = decoding[0] - 1
        steps[first].emitted = min(1, len(best.generated))
        steps[min(decoding[-1], len(steps) - 1)].emitted += len(best.generated) - steps[first].emitted


def require_written(tokenizer: Tokenizer, words: str, what: str) -> None:
    """Raise SettingsError for a text that is no text of this tokenizer's."""
    back = tokenizer.decode(tokenizer.encode(words, special=False), special=True)
    if words not in back:
        raise SettingsError(
            f"{what} is {words!r}, which this model's tokenizer cannot write (it makes {back!r} of it): give another "
            "text, or token ids"
        )


def candidates(
    branches: Ordered[Sequence], hidden: Mapping[Tap, torch.Tensor] | None = None, begins: Ordered[int] | None = None
) -> Candidates:
    """Branches of one prompt, as scorers see them.

    Args:
        hidden, begins: See `Candidates`.
    """
    first = branches[0]
    return Candidates(
        first.tokens[: first.request.prompt_length],
        [written(seq) for seq in branches],
        [seq.finished for seq in branches],
        hidden or {},
        texts=None if first.text is None else [seq.text.text for seq in branches if seq.text is not None],
        decode=None if first.request.detokenizer is None else partial(_decoded, first),
        model=first.request.model,
        states=[seq.cache for seq in branches],
        begins=begins,
        calls=first.request.calls,
        logprobs=[[each.logprob for each in seq.token_logprobs] for seq in branches]
        if writes(first.request.model)
        else None,
    )


def written(seq: Sequence) -> list[int]:
    """The tokens of a text without its end."""
    tokens = seq.generated
    return tokens[:-1] if tokens and tokens[-1] in seq.request.eos_ids else tokens


def _decoded(seq: Sequence, tokens: Ordered[int]) -> str:
    assert seq.request.detokenizer is not None
    stream = seq.request.detokenizer()
    return stream.push(list(tokens)) + stream.finish()


@one_thread()
def law(branches: Ordered[Sequence], logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [n, vocab] of each branch's next token, after masks and penalties.

    Masks and penalties are applied to log-probabilities, which are not normalised again, as is usual in beam search.

    Args:
        logits: [n, vocab], the model's own.
    """
    logprobs = logits.log_softmax(dim=-1)
    return branches[0].request.sampler.law(logprobs, [branch.context() for branch in branches])


def choose(seq: Sequence, token: int, logits: torch.Tensor) -> None:
    """Append a token as the loop would: sampler states move on, stop conditions are checked.

    Args:
        seq: The branch.
        token: The id to be appended.
        logits: [vocab], the model's own at the branch's end.
    """
    tree = DraftTree.root(seq.last_token)
    run_sync(commit(seq, tree, NodeDistributions(tree, logits[None], seq), Accepted([], token)))
