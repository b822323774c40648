"""What another program must tell to be measured, and the checkpoint it runs."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...contract import Contract
from ...core.noise import nth_seed
from ...errors import SettingsError
from ...lm import LM
from ..subject import Run


class UnavailableError(Exception):
    """A peer is not installed or cannot run this model; the message is one sentence."""


@dataclass
class Told:
    """One generation of another program. tokens: new ids, EOS included, cut as this package cuts them.

    emitted, rows: tokens per pass and rows fed, after the pass that read the prompt; rows is 0 where it cannot tell.
    What the pass that read the prompt emitted counts as the first token does: in neither tokens nor passes.
    """

    tokens: list[int]
    emitted: list[int]
    seconds: float
    prefill_seconds: float
    rows: int = 0


@dataclass
class Peer(Contract):
    """Another program that decodes the same model from the same token ids, one prompt at a time."""

    name: str
    dtype: str
    temperature: float
    eos_ids: tuple[int, ...]
    store: str = ""
    own: bool = field(default=False, init=False)

    @abstractmethod
    def generate(self, prompt: list[int], max_new_tokens: int, seed: int) -> Told: ...

    def new_round(self) -> None:
        """A peer remembers nothing between prompts."""

    def decode(self, prompts: Sequence[list[int]], *, max_new_tokens: int, seed: int, concurrency: int = 1) -> Run:
        """See `Subject.decode`; prompts run one after the other."""
        if concurrency != 1:
            raise SettingsError(f"{self.name} is measured one prompt at a time")
        run = Run([])
        for number, prompt in enumerate(prompts):
            told = self.generate(prompt, max_new_tokens, nth_seed(seed, number))
            run.outputs.append(told.tokens)
            run.passes += len(told.emitted)
            run.rows += told.rows
            run.emitted += Counter(told.emitted)
            run.new_tokens += sum(told.emitted)
            run.seconds += told.seconds
            run.prefill_seconds += told.prefill_seconds
        return run


def checkpoint(name: str) -> Path:
    """The folder or .gguf file behind a model's name."""
    from ...model import embedded, hub

    if name in embedded.EMBEDDED:
        return embedded.gguf_path(name)
    path = Path(name).expanduser()
    return path if path.exists() else hub.snapshot(name)


def dense_dtype(lm: LM) -> str:
    """The floating-point precision for a program that cannot run this model's own: the same, or the machine's best."""
    from ...model.load import computes_bfloat16

    if lm.dtype == "float32":
        return "float32"
    return "bfloat16" if computes_bfloat16(lm.model.device) else "float32"
