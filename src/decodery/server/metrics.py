"""What a server counts, in Prometheus' form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import monotonic

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

from decodery.core.trace import Step

from .errors import as_api_error
from .job import FinishedText, Job
from .load import ServerLoad

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAPS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_PLACES = 8


_MONITORED = {
    "evaluation": "monitor_evaluations",
    "flag": "monitor_flags",
    "rollback": "rollbacks",
    "regeneration": "regenerations",
    "token_taken_back": "tokens_taken_back",
}
"""What is counted of monitors, and what that goes by in the ledger."""


class _Joined:
    """The metrics of several models, each under one heading."""

    def __init__(self, several: Sequence[Metrics]) -> None:
        self._several = several

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for each in self._several:
            for family in each.registry.collect():
                known = found.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        return found.values()


def exposition(several: Sequence[Metrics]) -> bytes:
    """The metrics of several models in Prometheus' text format."""
    return generate_latest(_Joined(several))


class Metrics:
    """Counters, gauges and histograms of one server, all with the label `model_name`.

    `docs/server-reference.md` lists them.

    Times are intervals of one monotonic clock. A pass that adds several tokens to a text counts as so many equal gaps.
    """

    def __init__(self, model: str, cache_limit: int) -> None:
        self.registry = CollectorRegistry()
        self._model, self._limit = model, cache_limit
        self._last = (0, 0, 0, 0)
        gauge, count, histogram = self._gauge, self._count, self._histogram
        self.running = gauge("requests_running", "Texts in progress")
        self.waiting = gauge("requests_waiting", "Texts that wait")
        self.cache = gauge("kv_cache_usage", "Share of the memory for keys and values that is held, 0 to 1")
        self.prefix_bytes = gauge("prefix_cache_bytes", "Bytes kept for texts that begin alike")
        self.preempted = count("preemptions", "Texts that gave their memory back")
        self.passes = count("passes", "Passes of the model")
        self.asked = count("prefix_cache_query_tokens", "Tokens of prompts looked up in the prefix cache")
        self.found = count("prefix_cache_hit_tokens", "Those of them that were there")
        self.prompt_tokens = count("prompt_tokens", "Tokens of prompts")
        self.tokens = count("generation_tokens", "Tokens written")
        self.drafted = count("draft_tokens", "Tokens drafted")
        self.accepted = count("accepted_tokens", "Drafted tokens that became text")
        self.accepted_at = count("accepted_tokens_at", "Drafts accepted at least so deep, up to 8", "position")
        self.target_passes = count("decoding_passes", "A text's passes after its prompt")
        self.ended_by = count("requests_finished", "Texts that ended, by reason", "reason")
        self.monitored = count("monitor_events", "What monitors did, by kind", "kind")
        self.rows = histogram("pass_rows", "Rows of a pass", _ROWS)
        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token", _SECONDS)
        self.gap = histogram("inter_token_seconds", "Between two tokens of a text", _GAPS)
        self.whole = histogram("request_seconds", "From arrival to the end", _SECONDS)
        self.queued = histogram("queue_seconds", "From arrival to the first pass", _SECONDS)
        self.prefill = histogram("prefill_seconds", "From the first pass to the first token", _SECONDS)
        self.decode = histogram("decode_seconds", "From the first token to the end", _SECONDS)
        self.prompt_length = histogram("prompt_length_tokens", "Tokens of a prompt", _TOKENS)
        self.length = histogram("output_length_tokens", "Tokens of a text", _TOKENS)
        self.nodes = histogram("draft_length_tokens", "Tokens drafted for a pass of a text", _ROWS)

    def unloaded(self) -> None:
        """The model is gone: counters stay, and those of its next load are counted from 0."""
        self._last = (0, 0, 0, 0)
        for gauge in (self.running, self.waiting, self.cache, self.prefix_bytes):
            gauge.set(0)

    def begun(self, job: Job) -> None:
        assert job.begun is not None
        self.queued.observe(job.begun - job.arrived)
        self.prompt_length.observe(len(job.request.prompt))
        self.prompt_tokens.inc(len(job.request.prompt))

    def grew(self, job: Job, tokens: int, steps: Sequence[Step]) -> None:
        """A job got so many tokens in these steps."""
        now = monotonic()
        for step in steps:
            self.drafted.inc(step.nodes)
            self.accepted.inc(step.accepted)
            if not step.prefill:
                self.target_passes.inc()
                self.nodes.observe(step.nodes)
            for place in range(min(step.accepted, _PLACES)):
                self.accepted_at.labels(self._model, place + 1).inc()
        if tokens <= 0:
            return
        self.tokens.inc(tokens)
        if job.first is None:
            job.first = now
            self.first_token.observe(now - job.arrived)
            assert job.begun is not None
            self.prefill.observe(now - job.begun)
        else:
            for _ in range(tokens):
                self.gap.observe((now - job.last) / tokens)
        job.last = now

    def ended(self, job: Job, end: Sequence[FinishedText] | BaseException | None) -> None:
        now = monotonic()
        if end is None:
            reason = "cancelled"
        elif isinstance(end, BaseException):
            reason = f"error_{as_api_error(end).status}"
        else:
            reason = end[0].reason if end else "nothing"
        self.ended_by.labels(self._model, reason).inc()
        for text in end if isinstance(end, Sequence) else ():
            for kind, name in _MONITORED.items():
                self.monitored.labels(self._model, kind).inc(text.trace.ledger.counts.get(name, 0))
        self.whole.observe(now - job.arrived)
        if job.first is not None:
            self.decode.observe(now - job.first)
            self.length.observe(job.sent)

    def observe(self, load: ServerLoad) -> None:
        """After every pass."""
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        self.cache.set(load.cache_bytes / self._limit)
        self.prefix_bytes.set(load.prefix_bytes)
        passes, asked, found, preempted = self._last
        if load.passes > passes:
            self.rows.observe(load.rows)
        self.passes.inc(load.passes - passes)
        self.asked.inc(load.prefix_asked - asked)
        self.found.inc(load.prefix_found - found)
        self.preempted.inc(load.preemptions - preempted)
        self._last = load.passes, load.prefix_asked, load.prefix_found, load.preemptions

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"decodery_{name}", what, ["model_name"], registry=self.registry).labels(self._model)

    def _count(self, name: str, what: str, *labels: str) -> Counter:
        made = Counter(f"decodery_{name}", what, ["model_name", *labels], registry=self.registry)
        return made if labels else made.labels(self._model)

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(f"decodery_{name}", what, ["model_name"], buckets=buckets, registry=self.registry)
        return made.labels(self._model)
