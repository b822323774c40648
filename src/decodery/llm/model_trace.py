"""One pass of a model whose states are read and changed by name, in a `with` block."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.models.batch import Batch, Segment
from decodery.models.hooks import Intervention, Tap, hook_point
from decodery.models.protocol import LanguageModel

Change = torch.Tensor | Callable[[torch.Tensor], torch.Tensor]
"""Rows to put in place of those at a hook point, or a function of those."""

_LAYER = r"(?:(?:model|transformer|gpt_neox)\.)?(?:language_model\.)?(?:model\.)?(?:layers|h|blocks)\.(-?\d+)"
_ATTENTION, _MLP = r"\.(?:self_attn|attn|attention)", r"\.(?:mlp|feed_forward|block_sparse_moe)"
_PROJECTION = r"\.(?:o_proj|c_proj|out_proj|dense)"
_OUTER = r"(?:(?:model|transformer|gpt_neox)\.)?(?:language_model\.)?(?:model\.)?"
_MODULES = tuple(
    (re.compile(pattern), site)
    for pattern, site in (
        (_LAYER + r"(?:\.output|\.hook_resid_post)?", "resid_post.{}"),
        (_LAYER + r"(?:\.input|\.hook_resid_pre)", "resid_pre.{}"),
        (_LAYER + f"(?:{_ATTENTION}(?:{_PROJECTION})?(?:\\.output)?|\\.hook_attn_out)", "attn_out.{}"),
        (_LAYER + f"(?:{_ATTENTION}{_PROJECTION}\\.input|\\.attn\\.hook_z)", "head_out.{}"),
        (_LAYER + f"(?:{_MLP}(?:\\.output)?|\\.hook_mlp_out)", "mlp_out.{}"),
        (_OUTER + r"(?:embed_tokens|wte|embed_in)(?:\.output)?|hook_embed", "embed"),
        (
            _OUTER + r"(?:norm|ln_f|final_layer_norm)(?:\.output)?|ln_final\.hook_normalized|lm_head\.input",
            "final_norm",
        ),
        (r"(?:lm_head|embed_out|unembed)(?:\.output)?", "logits"),
    )
)


def site_of(name: Tap) -> Tap:
    """The hook point that a module of `transformers` or a hook of TransformerLens stands for.

    Args:
        name: Such as "model.layers.3.mlp", "transformer.h.3.attn.c_proj.input" or "blocks.3.hook_resid_pre".

    Returns:
        A name that `hook_point` reads; what is no module or hook is returned as it is.
    """
    if isinstance(name, int):
        return name
    for pattern, site in _MODULES:
        if found := pattern.fullmatch(name):
            return site.format(*found.groups())
    return name


class Saved:
    """States of one hook point, which exist after the `with` block.

    Attributes:
        site: The hook point.
    """

    def __init__(self, site: Tap) -> None:
        self.site = site
        self._value: torch.Tensor | None = None

    @property
    def value(self) -> torch.Tensor:
        """[n, width], a row for each token of the prompt. Raises SettingsError before the block has ended."""
        if self._value is None:
            raise SettingsError(
                f"{self.site} has no value yet: the pass runs where the `with` block ends; read it after that"
            )
        return self._value


class ModelTrace:
    """One pass over a prompt, whose states are read and changed; `LLM.trace` makes it.

    The pass runs where the `with` block ends. Nothing runs if the block raises.

    Attributes:
        tokens: Of the prompt.
    """

    def __init__(self, model: LanguageModel, tokens: Sequence[int]) -> None:
        if not tokens:
            raise SettingsError("a trace needs a prompt of one token or more")
        self.tokens = list(tokens)
        self._model = model
        self._saved: list[Saved] = []
        self._changes: list[Intervention] = []
        self._logits: torch.Tensor | None = None

    def read(self, name: Tap) -> Saved:
        """Save the states at a hook point, after all changes there.

        Args:
            name: A hook point, a module of `transformers` ("model.layers.3.mlp"), or a hook of TransformerLens.

        Raises:
            SettingsError: If the model has none of that name.
        """
        saved = Saved(self._site(name))
        self._saved.append(saved)
        return saved

    def write(self, name: Tap, change: Change, rows: int | slice | Sequence[int] | None = None) -> None:
        """Change the states at a hook point; several changes there apply in order.

        Args:
            name: As for `read`.
            change: What the rows are replaced by, a tensor that broadcasts to [k, width]; or a function of the k rows.
            rows: Which tokens of the prompt, None for all.

        Raises:
            SettingsError: If the model has none of that name, or the prompt no such token.
        """
        chosen = _chosen(rows, len(self.tokens))
        self._changes.append(Intervention(self._site(name), partial(_changed, change, chosen)))

    @property
    def logits(self) -> torch.Tensor:
        """[n, vocabulary], a row for each token. Raises SettingsError before the block has ended."""
        if self._logits is None:
            raise SettingsError(
                "there are no logits yet: the pass runs where the `with` block ends; read them after that"
            )
        return self._logits

    def __enter__(self) -> ModelTrace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        segment = Segment.chunk(np.array(self.tokens), self._model.new_cache())
        segment.interventions = tuple(self._changes)
        taps = tuple(dict.fromkeys(saved.site for saved in self._saved))
        result = self._model.forward(Batch([segment]), taps=taps)
        self._logits = result.logits
        for saved in self._saved:
            saved._value = result.hidden[saved.site]

    def _site(self, name: Tap) -> Tap:
        if self._logits is not None:
            raise SettingsError("the pass has run: begin another trace with lm.trace(prompt)")
        site = site_of(name)
        hook_point(site, self._model.config.num_layers)
        return site


def _chosen(rows: int | slice | Sequence[int] | None, length: int) -> np.ndarray:
    chosen = np.arange(length)
    if rows is None:
        return chosen
    try:
        return np.atleast_1d(chosen[rows if isinstance(rows, int | slice) else list(rows)])
    except IndexError:
        raise SettingsError(f"rows={rows!r} is outside the prompt: it has {length} tokens, 0 to {length - 1}") from None


def _changed(change: Change, chosen: np.ndarray, rows: torch.Tensor, segment: Segment) -> torch.Tensor:
    """All rows, with those chosen changed."""
    own = torch.as_tensor(chosen, device=rows.device)
    before = rows[own]
    given = change(before) if callable(change) else change
    try:
        value = torch.as_tensor(given, device=rows.device, dtype=rows.dtype).expand_as(before)
    except (RuntimeError, TypeError, ValueError):
        shape = list(given.shape) if isinstance(given, torch.Tensor) else repr(given)
        raise SettingsError(
            f"a change gives {shape!s:.60} in place of {list(before.shape)} (tokens, width): give numbers of that shape"
        ) from None
    return rows.index_copy(0, own, value)
