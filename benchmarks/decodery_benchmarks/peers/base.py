"""What another program must tell to be measured, and the checkpoint it runs."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from decodery.bench.subject import Run, UnavailableError
from decodery.core.abstract import Contract
from decodery.core.errors import SettingsError
from decodery.core.noise import nth_seed
from decodery.llm.llm import LLM

if TYPE_CHECKING:
    from decodery.bench.settings import Settings


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


@dataclass(frozen=True)
class Order:
    """What a peer is to run, told without the loaded model, for it runs in another process.

    name: as in the settings, "llama.cpp" or "llama.cpp-draft:model=FILE". model: as `decodery.load` takes it. dtype:
    the floating-point precision for a program that cannot run the model's own. max_positions: the model's context.
    threads: for matrix products.
    """

    name: str
    model: str
    dtype: str
    temperature: float
    eos_ids: tuple[int, ...]
    max_positions: int
    device: str
    threads: int

    @classmethod
    def of(cls, name: str, lm: LLM, settings: Settings) -> Order:
        """Of a method of these settings and the model that they name, loaded."""
        return cls(
            name,
            settings.model,
            dense_dtype(lm),
            settings.temperature,
            tuple(lm.tokenizer.eos_ids),
            lm.model.config.max_positions,
            str(lm.model.device),
            torch.get_num_threads(),
        )

    @property
    def peer(self) -> str:
        """Its name in `PEERS`."""
        return self.name.partition(":")[0]

    def draft(self) -> Path:
        """The file of the second model. Raises UnavailableError where none is named, or it is not there."""
        setting, _, file = self.name.partition(":")[2].partition("=")
        if setting != "model" or not file:
            raise UnavailableError(f"{self.peer} drafts with a second model: name it as {self.peer}:model=FILE.gguf")
        return gguf(file)


@dataclass
class Peer(Contract):
    """Another program that decodes the same model from the same token ids, one prompt at a time. dtype: its own."""

    order: Order
    dtype: str
    store: str = ""
    own: bool = field(default=False, init=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.order.name

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
    """The folder or .gguf file after a model's name."""
    from decodery.models.loaders import hub
    from decodery.models.loaders import package_index as embedded

    if name in embedded.EMBEDDED:
        return embedded.gguf_path(name)
    path = Path(name).expanduser()
    return path if path.exists() else hub.snapshot(name)


def gguf(name: str) -> Path:
    """The .gguf file after a name, for a program that reads nothing else. Raises UnavailableError where it is none."""
    from decodery.models.loaders import package_index as embedded

    path = embedded.gguf_path(name) if name in embedded.EMBEDDED else Path(name).expanduser()
    if path.suffix != ".gguf":
        raise UnavailableError(f"{name} is no .gguf file, and this program reads nothing else")
    if not path.is_file():
        raise UnavailableError(f"there is no file {name}")
    return path


def dense_dtype(lm: LLM) -> str:
    """The floating-point precision for a program that cannot run this model's own: the same, or the machine's best."""
    from decodery.models.loaders.dtype import computes_bfloat16

    if lm.dtype == "float32":
        return "float32"
    return "bfloat16" if computes_bfloat16(lm.model.device) else "float32"
