"""PG-TD: a tree search over tokens that completes programs and lets their tests tell where to look next."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Literal

import torch

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register, resolve
from decodery.core.requirements import Requirements
from decodery.core.topk import topk
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Segment
from decodery.models.loaders.store import Progress, silent
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Scorer, judge
from decodery.step.sequence import Sequence

from .base import Branches, Search, candidates, choose, law
from .beams import BeamGroup, Ending

Variant = Literal["p_ucb", "p_uct", "uct"]
Path = tuple[int, ...]
"""Generated tokens from the end of the prompt on."""

_KEPT = 16
"""Beginnings of programs whose caches are kept, for those that begin alike."""


@register(
    "pg-td",
    paper="Planning with Large Language Models for Code Generation (2023)",
    guarantee="a larger budget never returns a program of smaller reward; budget 1 is greedy decoding",
    requirements=("a reward of programs",),
    local=True,
)
@dataclass(frozen=True)
class PGTD(Search):
    """Completes programs from the nodes of a token tree, and goes where their reward was highest.

    Returned is the best program seen anywhere, the first among equals, with its reward as score: below 1 it fails. The
    published search counts every visit of a node; here programs that are known already cost nothing and are not
    counted, and what holds no other program is left. Memory: the caches of 16 beginnings. Cost: one completion and one
    run of the tests per program.

    Attributes:
        tests: A scorer of finished texts, 1 for a program that passes, as in program-tests(file=tests.py), or any other
            whose scores tell which of two programs is better.
        budget: Programs to generate.
        k: Tokens a node may go on with.
        beams: The width of completions, 1 is greedy.
        c, c_base: How much likely and rarely tried tokens are favoured: Q + beta P sqrt(ln N) / (1 + n) with beta =
            ln((N + c_base + 1) / c_base) + c, where Q is the best reward seen after a token; variant "p_uct" has beta =
            c, "uct" no P and sqrt(ln N / (1 + n)).
        variant: The bound that nodes are chosen by: "p_ucb", "p_uct" or "uct".
        early_stop: End with the first reward of 1.
        caches: False computes again what is known, for the same result.
    """

    tests: Scorer | str
    budget: int = 256
    k: int = 3
    beams: int = 1
    c: float = 4.0
    c_base: float = 10.0
    variant: Variant = "p_ucb"
    early_stop: bool = True
    caches: bool = True

    requirements = Requirements(rows=True, alone=True, greedy=True, law=True)

    def __post_init__(self) -> None:
        if self.budget < 1 or self.k < 1 or self.beams < 1:
            raise SettingsError("pg-td needs budget, k and beams of at least 1")
        if self.variant not in ("p_ucb", "p_uct", "uct"):
            raise SettingsError(f"the variant of pg-td is p_ucb, p_uct or uct, not {self.variant!r}")
        require_number("the c of pg-td", self.c, least=0)
        require_number("the c_base of pg-td", self.c_base, above=0)
        object.__setattr__(self, "tests", resolve("scorer", self.tests))
        if not self.scorer.answers:
            raise SettingsError("pg-td judges whole programs: give a scorer of answers")

    @property
    def scorer(self) -> Scorer:
        assert isinstance(self.tests, Scorer)
        return self.tests

    def bind(self, tokenizer: Tokenizer) -> PGTD:
        return replace(self, tests=self.scorer.bind(tokenizer))

    def shortcoming(self, score: float) -> str | None:
        if score >= 1:
            return None
        return (
            f"no program passes all tests, the best one scores {score:.4g} of 1: give a larger budget than "
            f"{self.budget}, a larger k, or more tokens"
        )

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        programs = Programs(self, Branches(engine, request, self))
        yield from programs.begin()
        tree = Tree(self, programs, (yield from programs.edges(())))
        while not tree.done:
            yield from tree.rollout()
            progress("pg-td", len(programs.rewards), self.budget)
        return programs.finish(tree.rollouts)


@dataclass(slots=True)
class TreeEdge:
    """A token after a node.

    Attributes:
        visits: Rollouts through it.
        best: The highest reward of these, 0 before the first.
    """

    token: int
    probability: float
    visits: int = 0
    best: float = 0.0
    node: ProgramNode | None = None


@dataclass(slots=True)
class ProgramNode:
    """A beginning of programs.

    Attributes:
        visits: 1, and one more for every rollout through it.
        closed: Nothing new is after.
    """

    path: Path
    edges: list[TreeEdge]
    visits: int = 1
    closed: bool = False


@dataclass(frozen=True, slots=True)
class FinishedProgram:
    """A finished text: its tokens and what it is worth."""

    path: Path
    reward: float


class Tree:
    """The nodes, and the rollouts that were made.

    Args:
        rollouts: Per rollout, the path to its node and the reward.
    """

    def __init__(self, settings: PGTD, programs: Programs, edges: list[TreeEdge]) -> None:
        self.settings, self.programs = settings, programs
        self.root = ProgramNode((), edges)
        self.rollouts: list[tuple[Path, float]] = []

    @property
    def done(self) -> bool:
        known, best = self.programs.rewards, self.programs.best
        perfect = self.settings.early_stop and best is not None and best[0].reward >= 1
        return self.root.closed or perfect or len(known) >= self.settings.budget

    def rollout(self) -> ForwardCoroutine[None]:
        """Select, expand, evaluate, back-propagate."""
        nodes, edges = [self.root], [self._select(self.root)]
        while edges[-1].node is not None:
            nodes.append(edges[-1].node)
            edges.append(self._select(nodes[-1]))
        path = (*nodes[-1].path, edges[-1].token)
        program = yield from self.programs.completed(path)
        ended = program.path == path
        following = [] if ended else (yield from self.programs.edges(path))
        edges[-1].node = ProgramNode(path, following, closed=ended)
        self.rollouts.append((path, program.reward))
        for node, edge in zip(nodes[::-1], edges[::-1], strict=True):
            node.visits += 1
            edge.best = program.reward if not edge.visits else max(edge.best, program.reward)
            edge.visits += 1
            node.closed = all(each.node is not None and each.node.closed for each in node.edges)

    def _select(self, node: ProgramNode) -> TreeEdge:
        """The edge to follow; the most likely among equals."""
        open_edges = [edge for edge in node.edges if edge.node is None or not edge.node.closed]
        return max(open_edges, key=lambda edge: self._value(node, edge))

    def _value(self, node: ProgramNode, edge: TreeEdge) -> float:
        settings, log = self.settings, math.log(node.visits)
        if settings.variant == "uct":
            return edge.best + settings.c * math.sqrt(log / (1 + edge.visits))
        beta = settings.c
        if settings.variant == "p_ucb":
            beta += math.log((node.visits + settings.c_base + 1) / settings.c_base)
        return edge.best + beta * edge.probability * math.sqrt(log) / (1 + edge.visits)


class Programs:
    """What was generated: whole programs, and what may follow their beginnings.

    Args:
        rewards: Of every program, by its tokens, in the order they were found.
        best: The first of the best, and its sequence.
        completions: How often a program was written to its end.
    """

    def __init__(self, settings: PGTD, branches: Branches) -> None:
        self.settings, self.branches = settings, branches
        self.rewards: dict[Path, float] = {}
        self.best: tuple[FinishedProgram, Sequence] | None = None
        self.completions = 0
        # For every beginning met: the program that completes it greedily, and the most likely tokens after it.
        self._greedy: dict[Path, Path] = {}
        self._following: dict[Path, list[tuple[int, float]]] = {}
        self._points: OrderedDict[Path, Sequence] = OrderedDict()
        settings.scorer.fits(branches.model)

    def begin(self) -> ForwardCoroutine[None]:
        """Read the prompt."""
        root = self.branches.root
        self._learn(root, (yield from self.branches.score([root])))
        # The last token of a beginning stays to be read with what follows it.
        root.cache.truncate(len(root.tokens) - 1)

    def edges(self, path: Path) -> ForwardCoroutine[list[TreeEdge]]:
        """What may follow `path`, most likely first."""
        if not self.settings.caches and path:
            seq = yield from self._at(path)
            self._learn(seq, (yield from self.branches.score([seq])))
        return [TreeEdge(token, probability) for token, probability in self._following[path]]

    def completed(self, path: Path) -> ForwardCoroutine[FinishedProgram]:
        """The program that begins with `path`."""
        known = self._greedy.get(path) if self.settings.caches else None
        if known is None:
            seq = yield from self._complete((yield from self._at(path)), path)
            known = tuple(seq.generated)
            yield from self._value(known, seq)
        return FinishedProgram(known, self.rewards[known])

    def finish(self, rollouts: list[tuple[Path, float]]) -> list[Sequence]:
        """The best program, its trace with what the search did."""
        assert self.best is not None
        program, seq = self.best
        seq.score = program.reward
        count("programs", len(self.rewards))
        count("rollouts", len(rollouts))
        count("completions", self.completions)
        return self.branches.finish([seq])

    def _value(self, path: Path, seq: Sequence) -> ForwardCoroutine[None]:
        if path in self.rewards:
            return
        (reward,) = (yield from judge(self.settings.scorer, candidates([seq]))).tolist()
        self.rewards[path] = reward
        if self.best is None or reward > self.best[0].reward:
            self.best = FinishedProgram(path, reward), seq

    def _complete(self, seq: Sequence, path: Path) -> ForwardCoroutine[Sequence]:
        """`seq` written to its end, and what was met on the way."""
        self.completions += 1
        if self.settings.beams > 1 and not seq.finished:
            # Beams begun elsewhere may end elsewhere: only greedy completions are those of their own beginnings, too.
            self._learn(seq, (yield from self.branches.score([seq.fork()])))
            return (yield from self._beams(seq))
        met = [path]
        while not seq.finished:
            logits = yield from self.branches.score([seq])
            choose(seq, self._learn(seq, logits), logits[0])
            met.append(tuple(seq.generated))
        for beginning in met:
            self._greedy[beginning] = met[-1]
        return seq

    def _beams(self, seq: Sequence) -> ForwardCoroutine[Sequence]:
        group = BeamGroup(seq, Ending(self.settings.beams, 1.0, False))
        while group.running:
            beams = [beam.seq for beam in group.running]
            logits = yield from self.branches.score(beams)
            group.step(law(beams, logits), logits, {})
        return group.finished[0].seq

    def _learn(self, seq: Sequence, logits: torch.Tensor) -> int:
        """Keep what may follow the text of `seq`; returns the most likely of it. logits: [1, vocab] there."""
        probabilities = law([seq], logits).double().softmax(dim=-1)
        ids, values = topk(probabilities, self.settings.k)
        pairs = zip(ids[0].tolist(), values[0].tolist(), strict=True)
        self._following[tuple(seq.generated)] = [(token, value) for token, value in pairs if value > 0]
        return int(ids[0, 0])

    def _at(self, path: Path) -> ForwardCoroutine[Sequence]:
        """A sequence that stands after `path`: forked off the longest beginning at hand, the rest read in one pass."""
        found = next((path[:cut] for cut in range(len(path), 0, -1) if path[:cut] in self._points), ())
        seq = (self._points[found] if found else self.branches.root).fork()
        rest = path[len(found) :]
        if rest:
            chunk = [seq.last_token, *rest[:-1]]
            (scored,) = yield from self.branches.ask([Segment.chunk(chunk, seq.cache)])
            seq.cache.keep(range(len(chunk)))
            for row, token in enumerate(rest):
                choose(seq, token, scored.logits[row])
        if self.settings.caches:
            self._points[path] = seq.fork()
            self._points.move_to_end(path)
            if len(self._points) > _KEPT:
                self._points.popitem(last=False)
        return seq
