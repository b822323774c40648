"""What is measured: something that decodes prompts and tells how."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from decodery.core.errors import UnknownMethod
from decodery.core.noise import nth_seed
from decodery.core.trace import Step
from decodery.engine.engine import Engine
from decodery.llm.llm import LLM
from decodery.llm.resolve_settings import resolve_drafter
from decodery.sampling.constraint import Constraint
from decodery.sampling.timed import Clock, timed
from decodery.search.base import Search
from decodery.step.draft_length_policy import MOST_NODES
from decodery.step.drafter_memory import Memory, Scope
from decodery.step.sequence import Sequence as Decoding

from .settings import Settings

PARTS = ("propose", "score", "choose", "commit")
COLD, HOT = "cold", "hot"


@dataclass
class Run:
    """What decoding one prompt (or several at once) took. What prefill gave and cost stands apart.

    outputs: the new token ids of every prompt, an EOS token included. passes, rows, emitted: target passes, rows fed to
    them, and how many passes emitted how many tokens, after prefill, one sequence's part in a pass counting as a
    pass; 0 and empty where the method cannot tell. seconds: of these passes. parts: seconds of the four steps.
    mask_seconds: what a constraint took of all passes.
    """

    outputs: list[list[int]]
    passes: int = 0
    rows: int = 0
    emitted: Counter[int] = field(default_factory=Counter)
    new_tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    parts: dict[str, float] | None = None
    mask_seconds: float = 0.0


class Subject(Protocol):
    """One method under test. name: as in the result's rows; dtype: the precision it computes in.

    store: "hot" or "cold" where what it learns outlives a prompt, else "". own: one of this package's.
    """

    name: str
    dtype: str
    store: str
    own: bool

    def new_round(self) -> None:
        """A round begins: nothing of an earlier one is remembered."""
        ...

    def decode(self, prompts: Sequence[list[int]], *, max_new_tokens: int, seed: int, concurrency: int = 1) -> Run:
        """Decode the prompts, `concurrency` of them at a time; prompt i has seed `seed + i`, modulo 2^64."""
        ...


class Own:
    """This package's engine with one drafter, whose memory is apart from that of all other subjects.

    A drafter that remembers beyond a prompt is measured twice: "hot" keeps what it has learned for a whole round, and
    "cold", which its name says, begins anew with every prompt, or with all of those that are decoded at once. Hot, too,
    begins anew where a prompt comes again, as in cases of other concurrency: its answer would come from memory.

    Args:
        request: Settings of a request in place of the drafter `spec`, which is then its name alone.
    """

    own = True

    def __init__(
        self,
        lm: LLM,
        spec: str,
        temperature: float,
        store: str = "",
        *,
        max_draft_tokens: int = MOST_NODES,
        request: Mapping[str, Any] | None = None,
    ) -> None:
        self.lm, self.spec, self.temperature, self.store = lm, spec, temperature, store
        self.max_draft_tokens = max_draft_tokens
        self.request = request
        self.name = f"{spec} (cold)" if store == COLD else spec
        self.dtype = lm.dtype
        self.new_round()

    def new_round(self) -> None:
        self.memory = _Watched()
        drafter = {"drafter": resolve_drafter(self.spec)} if self.request is None else {}
        own = self.request or {}
        self._settings = {
            "max_draft_tokens": self.max_draft_tokens, **_temperature(self.temperature, own), **drafter, **own,
        }  # fmt: skip
        self._engine = Engine(self.lm.model, detokenizer=self.lm.tokenizer.stream, memory=self.memory)
        self._seen: set[tuple[int, ...]] = set()

    def decode(
        self,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int,
        seed: int,
        concurrency: int = 1,
        constraint: Constraint | None = None,
    ) -> Run:
        clock = Clock()
        coming = {tuple(prompt) for prompt in prompts}
        if self.store != HOT or coming & self._seen:
            self.new_round()
        self._seen |= coming
        waiting = deque(enumerate(prompts))
        sequences: list[Decoding] = []
        run = Run([], parts=dict.fromkeys(PARTS, 0.0))
        while waiting or any(not seq.finished for seq in sequences):
            running = sum(not seq.finished for seq in sequences)
            while waiting and running < concurrency:
                number, prompt = waiting.popleft()
                held = {} if constraint is None else {"constraint": constraint}
                request = self.lm.request(
                    prompt, max_new_tokens=max_new_tokens, seed=nth_seed(seed, number), **{**self._settings, **held}
                )
                if constraint is not None:
                    request.sampler = timed(request.sampler, clock)
                sequences.append(self._engine.submit(request))
                running += 1
            self._step(self._engine, run, min(concurrency, len(prompts)))
        run.outputs = [seq.generated for seq in sequences]
        run.mask_seconds = clock.seconds
        return run

    def _step(self, engine: Engine, run: Run, full: int) -> None:
        """One pass; it counts as decoding if no sequence read its prompt in it and as many ran as should."""
        begin = perf_counter()
        advanced = engine.step()
        seconds = perf_counter() - begin
        steps: list[Step] = [seq.trace.steps[-1] for seq in advanced if isinstance(seq, Decoding)]
        if any(step.prefill for step in steps):
            run.prefill_seconds += seconds
        elif len(steps) == full:
            run.seconds += seconds
            run.passes += len(steps)
            run.rows += sum(step.rows for step in steps)
            run.new_tokens += sum(step.emitted for step in steps)
            run.emitted.update(step.emitted for step in steps)
            assert run.parts is not None
            for part in PARTS:
                run.parts[part] += getattr(steps[0], part)


class Searched:
    """A search, alone and with an empty memory for every prompt; reading the prompt is part of its time.

    Args:
        name: As in the result's rows.
        request: Settings of its texts.
    """

    own, store = True, ""

    def __init__(self, lm: LLM, name: str, search: Search, temperature: float, request: Mapping[str, Any]) -> None:
        self.lm, self.name, self.dtype = lm, name, lm.dtype
        self._search = search.bind(lm.tokenizer)
        self._settings = {"drafter": None, **_temperature(temperature, request), **request}

    def new_round(self) -> None:
        """Nothing is kept from prompt to prompt."""

    def decode(
        self,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int,
        seed: int,
        concurrency: int = 1,
        messages: str | list[dict[str, str]] | None = None,
    ) -> Run:
        """See `Subject`; texts are found one after the other.

        Args:
            messages: What the only prompt was made of, for searches that make prompts of it.
        """
        run = Run([])
        for number, prompt in enumerate(prompts):
            engine = Engine(self.lm.model, detokenizer=self.lm.tokenizer.stream, memory=Memory())
            settings = {"max_new_tokens": max_new_tokens, "seed": nth_seed(seed, number), **self._settings}
            request = self.lm.request_for(prompt if messages is None else messages, tokens=prompt, **settings)
            begin = perf_counter()
            best = self._search.run(engine, request)[0]
            run.seconds += perf_counter() - begin
            run.passes += best.trace.passes
            run.rows += best.trace.rows
            run.new_tokens += len(best.generated)
            run.outputs.append(best.generated)
        return run


def _temperature(temperature: float, request: Mapping[str, Any]) -> dict[str, float]:
    """The benchmark's temperature, where a request does not list its logits processors, among which it would stand."""
    return {} if "sampler" in request else {"temperature": temperature}


class _Watched(Memory):
    """A memory that knows whether anything was kept beyond a prompt."""

    used = False

    def recall(self, scope: Scope, seq: Decoding, key: Hashable, make: Callable[[], Any]) -> Any:
        self.used |= scope == "process"
        return super().recall(scope, seq, key, make)


def own_subjects(
    lm: LLM,
    spec: str,
    temperature: float,
    *,
    max_draft_tokens: int = MOST_NODES,
    request: Mapping[str, Any] | None = None,
) -> list[Own]:
    """The drafter `spec`, once, or hot and cold where it remembers beyond a prompt: a short try tells.

    Args:
        request: See `Own`.

    Raises:
        UnknownMethod: For a name that does not exist.
        SettingsError: For wrong settings.
    """
    made = partial(Own, lm, spec, temperature, max_draft_tokens=max_draft_tokens, request=request)
    once = made()
    once.decode([lm.encode("Hello.")], max_new_tokens=4, seed=0)
    return [made(store) for store in (HOT, COLD)] if once.memory.used else [once]


class UnavailableError(Exception):
    """Another program is not installed or cannot run this model; the message is one sentence."""


@dataclass(frozen=True)
class Peers:
    """Other programs that can be measured beside this package's methods.

    Args:
        names: What methods call them, without settings.
        opened: Opens the program of a method, or raises UnavailableError.
    """

    names: tuple[str, ...] = ()
    opened: Callable[[str, LLM, Settings], Subject] | None = None

    def __contains__(self, method: str) -> bool:
        return method.partition(":")[0] in self.names


NO_PEERS = Peers()
Requests = Mapping[str, tuple[Mapping[str, Any], Search | None]]
"""By name: settings of a request, and the search that it is of, if any."""
NO_REQUESTS: Requests = {}


def check_methods(methods: Sequence[str], peers: Peers = NO_PEERS) -> None:
    """Raise UnknownMethod or SettingsError for a method that is neither a drafter nor a peer."""
    for method in methods:
        if method not in peers:
            try:
                resolve_drafter(method)
            except UnknownMethod as error:
                known = f", and the peers are {', '.join(peers.names)}" if peers.names else ""
                raise UnknownMethod(f"{error}; none is plain decoding{known}") from error


def open_subjects(
    lm: LLM, settings: Settings, peers: Peers = NO_PEERS, requests: Requests = NO_REQUESTS
) -> tuple[list[Subject], dict[str, str]]:
    """What is measured, in the order of the settings, and why a peer is not: {name: one sentence}."""
    check_methods(settings.methods, peers)
    subjects: list[Subject] = []
    unavailable: dict[str, str] = {}
    for method in settings.methods:
        if method not in peers:
            subjects += own_subjects(lm, method, settings.temperature, max_draft_tokens=settings.max_draft_tokens)
            continue
        assert peers.opened is not None
        try:
            subjects.append(peers.opened(method, lm, settings))
        except UnavailableError as reason:
            unavailable[method] = str(reason)
    for name, (request, search) in requests.items():
        if search is not None:
            subjects.append(Searched(lm, name, search, settings.temperature, request))
            continue
        most = settings.max_draft_tokens
        subjects += own_subjects(lm, name, settings.temperature, max_draft_tokens=most, request=request)
    return subjects, unavailable
