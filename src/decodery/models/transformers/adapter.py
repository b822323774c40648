"""Any causal language model of `transformers` as a `LanguageModel`. Imports transformers."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from decodery.core.errors import CorruptFile, DecoderyError, SettingsError, UnsupportedModel

from ..batch import Batch, Cost, Scores, Segment
from ..cache.cache import KVCache
from ..hooks import HookPoint, Hooks, Tap
from ..layer_plan import WHOLE, LayerPlan
from ..loaders.dtype import choose_dtype
from ..loaders.folder import read_facts, read_texts
from ..loaders.load import LoadedModel
from ..loaders.shards import COMPUTED
from ..protocol import Capabilities
from ..tokenizers.chat import ChatTemplate
from ..tokenizers.tokenizer import TextFacts, Tokenizer
from ..torch.attention import visibility
from ..trained.artifact import digest
from .adapter_shapes import CACHE_NAMES, INSTEAD, read_shapes
from .adapter_trial import may_branch


class TransformersModel:
    """Runs a `transformers` model, one segment at a time, with keys and values in a `KVCache`.

    The model must keep one key and one value per token and layer, and take position ids and a mask for its rows.
    Whether it does as it is told is tried out at once, see `adapter_trial`: trees may then be refused, or all of it.

    Args:
        keeps_rows: Whether it can leave out logits that are not wanted.
    """

    def __init__(self, hf_model: PreTrainedModel) -> None:
        self.hf_model = hf_model.eval()
        self.device = hf_model.device
        self.dtype = hf_model.dtype
        name = type(hf_model).__name__
        if getattr(hf_model.config, "_attn_implementation", "eager") not in ("sdpa", "eager"):
            raise UnsupportedModel(f"{name} does not take masks for its rows: load it with attn_implementation='sdpa'")
        accepted = inspect.signature(hf_model.forward).parameters
        self._cache_argument = next((each for each in CACHE_NAMES if each in accepted), None)
        if "position_ids" not in accepted or self._cache_argument is None:
            raise UnsupportedModel(
                f"{name} takes no position ids or no cache, so it cannot be decoded step by step: {INSTEAD}"
            )
        self.keeps_rows = "logits_to_keep" in accepted
        with _refusing(name):
            self.config = read_shapes(hf_model)
            self._trees = may_branch(self)
        self._blocks = next(
            (
                module
                for module in hf_model.modules()
                if isinstance(module, torch.nn.ModuleList) and len(module) == self.config.num_layers
            ),
            None,
        )
        self._lock = threading.RLock()

    @cached_property
    def capabilities(self) -> Capabilities:
        sites = ("logits",) if self._blocks is None else ("logits", "residual")
        return Capabilities(trees=self._trees, states=True, sites=frozenset(sites))

    @cached_property
    def fingerprint(self) -> str:
        return digest(self.hf_model.get_input_embeddings().weight)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def embed_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `EmbeddingModel.embed_tokens`."""
        found: torch.Tensor = self.hf_model.get_input_embeddings()(tokens)
        return found

    def new_cache(self) -> KVCache:
        config = self.config
        return KVCache(config.num_layers, config.num_kv_heads, config.head_dim, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def forward(self, batch: Batch, *, taps: Sequence[Tap] = (), layer_plan: LayerPlan = WHOLE) -> Scores:
        """See `LanguageModel.forward`."""
        if layer_plan != WHOLE:
            raise UnsupportedModel("a model run through transformers always runs all of its layers")
        with self._lock:  # hooks sit on modules that all threads share
            return self._forward(batch, taps)

    def _forward(self, batch: Batch, taps: Sequence[Tap]) -> Scores:
        if not self._trees and any(_branches(segment) for segment in batch.segments):
            raise UnsupportedModel(
                f"{type(self.hf_model).__name__} reads no rows that branch: use drafters that propose chains"
            )
        parts = []
        for segment in batch.segments:
            alone = Batch([segment])
            hooks = Hooks.of(alone, taps, WHOLE, self.config.num_layers)
            with self._visiting(hooks):
                logits = hooks.visit(HookPoint("logits"), self.run(segment))
            parts.append((logits, hooks.tapped()))
        hidden = {tap: torch.cat([states[tap] for _, states in parts]) for tap in taps}
        row_bytes = 2 * self.config.num_kv_heads * self.config.head_dim * self.dtype.itemsize
        costs = [Cost.of(segment, WHOLE, self.config.num_layers, row_bytes) for segment in batch.segments]
        return Scores(torch.cat([logits for logits, _ in parts]), batch.logit_rows[1], hidden, batch.offsets, costs)

    @torch.no_grad()
    def run(self, segment: Segment) -> torch.Tensor:
        """Logits [m, vocab] float32 of the requested rows of one segment."""
        cache = self.new_cache() if segment.cache is None else segment.cache
        cache.reserve(segment.positions, segment.retained)
        slots = Cache(layers=[_Slots(cache, layer) for layer in range(self.config.num_layers)])
        return self.call(segment, cache, slots, segment.states)

    def call(
        self, segment: Segment, cache: KVCache, slots: Cache, states: torch.Tensor | None, *, masked: bool = True
    ) -> torch.Tensor:
        """`run` with these keys and values, where `cache` tells the positions.

        Args:
            masked: With our mask, not its own.
        """
        positions = torch.from_numpy(np.asarray(segment.positions, dtype=np.int64)).to(self.device)
        given: dict[str, Any] = {
            "position_ids": positions[None],
            "attention_mask": self._masks(segment, cache) if masked else None,
            str(self._cache_argument): slots,
            "use_cache": True,
        }
        if states is not None:
            given["inputs_embeds"] = states.to(self.device, self.dtype)[None]
        else:
            given["input_ids"] = torch.as_tensor(segment.tokens, device=self.device)[None]
        return self._logits(given, segment.logit_rows)

    @torch.no_grad()
    def run_anew(self, tokens: np.ndarray, rows: Sequence[int], *, placed: bool = False) -> torch.Tensor:
        """Logits [m, vocab] float32 of these rows of a text by one plain call: no cache, no mask of ours.

        Args:
            placed: With positions of ours.
        """
        given = {"input_ids": torch.as_tensor(tokens, dtype=torch.int64, device=self.device)[None], "use_cache": False}
        if placed:
            given["position_ids"] = torch.arange(len(tokens), device=self.device)[None]
        return self._logits(given, rows)

    def _logits(self, given: dict[str, Any], wanted: Sequence[int] | None) -> torch.Tensor:
        if wanted is None:
            found: torch.Tensor = self.hf_model(**given).logits[0]
            return found.float()
        rows = torch.as_tensor(np.asarray(wanted, dtype=np.int64), device=self.device)
        if self.keeps_rows:
            return self.hf_model(**given, logits_to_keep=rows).logits[0].float()
        return self.hf_model(**given).logits[0][rows].float()

    def _masks(self, segment: Segment, cache: KVCache) -> torch.Tensor | dict[str, torch.Tensor]:
        """What is added to attention weights, [1, 1, n, slots]; one for each kind of layer where there are two."""
        if cache.evicted:
            raise UnsupportedModel("a cache that lost some of its tokens cannot be used by a model of transformers")
        if cache.policy is not None:
            raise UnsupportedModel("attention inside of a model of transformers cannot ask a policy what to read")
        seen = dataclasses.replace(segment, cache=cache)
        shape = len(segment), cache.length + segment.retained + len(segment)

        def mask(window: int | None) -> torch.Tensor:
            visible = visibility(seen, 0, window)
            added = torch.zeros(shape, dtype=self.dtype, device=self.device)
            if visible is not None:
                hidden = torch.from_numpy(~visible).to(self.device)
                added.masked_fill_(hidden, torch.finfo(self.dtype).min)
            return added[None, None]

        sliding = self.config.sliding_layers
        if any(sliding) and not all(sliding):
            return {"full_attention": mask(None), "sliding_attention": mask(self.config.sliding_window)}
        return mask(self.config.sliding_window)

    @contextmanager
    def _visiting(self, hooks: Hooks) -> Iterator[None]:
        """Hooks on the blocks that are visited; they see the residual stream before any final norm."""
        layers = range(self.config.num_layers + 1)
        places = [place for after in layers if (place := HookPoint("residual", after)) in hooks]
        known = {*places, HookPoint("logits")}
        if any(place not in known for place in hooks) or (places and self._blocks is None):
            name, sites = type(self.hf_model).__name__, " and ".join(sorted(self.capabilities.sites))
            raise UnsupportedModel(f"{name}, run through transformers, has no sites but {sites}")

        def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            rows = hooks.visit(HookPoint("residual"), (args[0] if args else kwargs["hidden_states"])[0])[None]
            return ((rows, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": rows})

        def leave(place: HookPoint) -> Any:
            def hook(module: Any, args: Any, output: Any) -> Any:
                plain = isinstance(output, torch.Tensor)
                rows = hooks.visit(place, (output if plain else output[0])[0])[None]
                return rows if plain else (rows, *output[1:])

            return hook

        handles = []
        for place in places:
            assert self._blocks is not None
            if place.layer == 0:
                handles.append(self._blocks[0].register_forward_pre_hook(enter, with_kwargs=True))
            else:
                handles.append(self._blocks[place.layer - 1].register_forward_hook(leave(place)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Slots(DynamicLayer):
    """One layer of a `KVCache` as transformers sees it."""

    is_sliding = False

    def __init__(self, cache: KVCache, layer: int) -> None:
        super().__init__()
        self.cache, self.layer = cache, layer
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.cache.write(self.layer, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        keys, values = self.cache.view(self.layer)
        return keys[None], values[None]

    def get_seq_length(self) -> int:
        return int(self.cache.lengths[self.layer]) + self.cache.retained

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Whatever a model's own code raises, as it is tried, means that it cannot be run so."""
    try:
        yield
    except (DecoderyError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {_first_line(error)}"
        raise UnsupportedModel(f"{name} fails where it reads tokens behind a cache ({what}): {INSTEAD}") from error


def _branches(segment: Segment) -> bool:
    n, retained = len(segment), segment.retained
    return segment.mask is not None and not np.array_equal(segment.mask, np.tri(n, retained + n, retained, dtype=bool))


def load_folder(folder: Path, name: str, dtype: str, device: torch.device) -> LoadedModel:
    """Load a folder whose architecture only transformers knows.

    Its own code is never run, pickles never read.
    """
    if dtype in ("int8", "int4"):
        raise SettingsError(f"{name} runs through transformers, which has no {dtype} here: choose float32 or bfloat16")
    found: Any
    try:
        found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, KeyError, ImportError) as error:
        raise UnsupportedModel(f"transformers cannot load {folder}: {_first_line(error)}") from error
    except Exception as error:  # safetensors and transformers raise errors of their own for damaged files
        raise CorruptFile(f"transformers cannot load {folder}: {_first_line(error)}") from error
    hf_model, loaded = found
    _refuse_rest(folder, type(hf_model).__name__, loaded)
    chosen = choose_dtype(dtype, str(hf_model.dtype).removeprefix("torch."), device)
    model = TransformersModel(hf_model.to(device=device, dtype=getattr(torch, chosen)))
    backend, facts = _texts(folder)
    return LoadedModel(
        model=model,
        tokenizer=Tokenizer(backend, bos_id=facts.bos_id, eos_ids=facts.eos_ids),
        chat_template=ChatTemplate(facts.chat_template, facts.special) if facts.chat_template else None,
        name=name,
        dtype=chosen,
    )


def _refuse_rest(folder: Path, name: str, loaded: Mapping[str, Collection[str]]) -> None:
    """A tensor that is missing has random numbers in the model; one that is left over is a part that would not run.

    loaded: what `from_pretrained` says of its tensors.
    """
    if missing := sorted(loaded["missing_keys"]):
        raise CorruptFile(f"{folder} has no tensor {missing[0]}, which {name} needs: the weights are incomplete")
    left = sorted(each for each in loaded["unexpected_keys"] if not each.endswith(COMPUTED))
    if left:
        raise UnsupportedModel(f"{folder}: the tensor {left[0]} belongs to a part that {name} does not have")


def _texts(folder: Path) -> tuple[tokenizers.Tokenizer, TextFacts]:
    """The tokenizer of a folder, which transformers makes where there is only what it would make one from."""
    # A tokenizer.json says all; some classes of transformers make another tokenizer of the same file.
    if (folder / "tokenizer.json").is_file():
        return read_texts(folder)
    try:
        found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        backend: tokenizers.Tokenizer = found.backend_tokenizer
    except Exception as error:  # as above
        raise CorruptFile(f"{folder} has no tokenizer that can be read: add the model's tokenizer.json") from error
    return backend, read_facts(folder, backend)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
