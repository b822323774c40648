"""Calls of a model of `transformers`: what it takes, the logits it returns, and hooks on its blocks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from decodery.core.errors import UnsupportedModel

from ..hooks import HookPoint, Hooks

INSTEAD = "use generate() of transformers itself, or a model of another architecture"
"""What to do where a model cannot be decoded through this package."""


class ModelCalls:
    """One model of `transformers`, called with one text at a time.

    Args:
        hf_model: The model.

    Attributes:
        accepts: Names of the arguments that its `forward` names.
        takes_use_cache: Whether it may be told to keep a cache, or not to.
        blocks: Its layers, None where they are not found.
    """

    def __init__(self, hf_model: PreTrainedModel) -> None:
        self.hf_model = hf_model.eval()
        self.device = hf_model.device
        self.dtype = hf_model.dtype
        self.name = type(hf_model).__name__
        parameters = inspect.signature(hf_model.forward).parameters
        self.accepts = frozenset(parameters)
        passes_on = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        self.takes_use_cache = passes_on or "use_cache" in parameters
        self.blocks: torch.nn.ModuleList | None = None

    def find_blocks(self, layers: int) -> None:
        """Take the first list of `layers` modules for the model's layers."""
        lists = (module for module in self.hf_model.modules() if isinstance(module, torch.nn.ModuleList))
        self.blocks = next((module for module in lists if len(module) == layers), None)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n] ids -> [n, hidden]."""
        found: torch.Tensor = self.hf_model.get_input_embeddings()(tokens)
        return found

    def ids(self, tokens: np.ndarray) -> torch.Tensor:
        """Tokens [n] as the model takes them: [1, n]."""
        return torch.as_tensor(tokens, dtype=torch.int64, device=self.device)[None]

    def positions(self, positions: np.ndarray) -> torch.Tensor:
        """Positions [n] as the model takes them: [1, n]."""
        return torch.from_numpy(np.asarray(positions, dtype=np.int64)).to(self.device)[None]

    def logits(self, given: dict[str, Any], wanted: Sequence[int] | None) -> tuple[torch.Tensor, Any]:
        """Logits [m, vocab] float32 of these rows of a call, and all that the call returned.

        Args:
            given: The call's arguments.
            wanted: Numbers of rows, None for all.
        """
        if wanted is None:
            output = self.hf_model(**given)
            return output.logits[0].float(), output
        rows = torch.as_tensor(np.asarray(wanted, dtype=np.int64), device=self.device)
        if "logits_to_keep" in self.accepts:
            output = self.hf_model(**given, logits_to_keep=rows)
            return output.logits[0].float(), output
        output = self.hf_model(**given)
        return output.logits[0][rows].float(), output

    @torch.no_grad()
    def run_anew(
        self, tokens: np.ndarray, rows: Sequence[int] | None, *, positions: np.ndarray | None = None
    ) -> torch.Tensor:
        """Logits [m, vocab] float32 of these rows of a text by one plain call: no cache, no mask of ours.

        Args:
            tokens: [n] ids.
            rows: Numbers of rows, None for all.
            positions: [n], None for the model's own.
        """
        given: dict[str, Any] = {"input_ids": self.ids(tokens)}
        if self.takes_use_cache:
            given["use_cache"] = False
        if positions is not None:
            given["position_ids"] = self.positions(positions)
        return self.logits(given, rows)[0]

    @contextmanager
    def visiting(self, hooks: Hooks) -> Iterator[None]:
        """Hooks on the blocks that are visited; they see the residual stream before any final norm."""
        with self._hooked(self._places(hooks), hooks.visit):
            yield

    @contextmanager
    def recording(self, hooks: Hooks, rows: int) -> Iterator[None]:
        """Read the last `rows` rows of all calls within, taken together; nothing is changed."""
        seen: dict[HookPoint, list[torch.Tensor]] = {}

        def record(place: HookPoint, found: torch.Tensor) -> torch.Tensor:
            seen.setdefault(place, []).append(found)
            return found

        with self._hooked(self._places(hooks), record):
            yield
        for place, parts in seen.items():
            hooks.visit(place, torch.cat(parts)[-rows:])

    def _places(self, hooks: Hooks) -> list[HookPoint]:
        places = [place for place in hooks if place.name == "residual" and not place.given]
        if any(place not in places and place != HookPoint("logits") for place in hooks) or (
            places and self.blocks is None
        ):
            sites = "logits" if self.blocks is None else "logits and residual"
            raise UnsupportedModel(f"{self.name}, run through transformers, has no sites but {sites}")
        return places

    @contextmanager
    def _hooked(self, places: Sequence[HookPoint], visit: Any) -> Iterator[None]:
        handles = []
        for place in places:
            assert self.blocks is not None
            if place.layer == 0:
                enter = partial(_enter, visit)
                handles.append(self.blocks[0].register_forward_pre_hook(enter, with_kwargs=True))
            else:
                handles.append(self.blocks[place.layer - 1].register_forward_hook(partial(_leave, visit, place)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _enter(visit: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = visit(HookPoint("residual"), (args[0] if args else kwargs["hidden_states"])[0])[None]
    return ((rows, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": rows})


def _leave(visit: Any, place: HookPoint, module: Any, args: Any, output: Any) -> Any:
    plain = isinstance(output, torch.Tensor)
    rows = visit(place, (output if plain else output[0])[0])[None]
    return rows if plain else (rows, *output[1:])
