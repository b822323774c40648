"""What a process has set for PyTorch changes no text, and no kernel reads what it does not take."""

from __future__ import annotations

import ast
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import decodery
from decodery.constraints import Regex
from decodery.core.native.kernels import address, library
from decodery.core.noise import gumbel_argmax
from decodery.core.threads import one_thread
from decodery.core.topk import topk
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import load
from decodery.models.native.int8 import Int8Linear
from decodery.models.torch.transformer import runs_natively
from decodery.testing.models import tiny_transformer
from tiny_models import make_model, save

SETTINGS: list[dict[str, Any]] = [
    {},
    {"drafter": None, "temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3},
    {"drafter": "prompt-lookup", "temperature": 1.1, "mirostat": 2, "logprobs": 2},
    {"drafter": "jacobi", "min_p": 0.01, "temperature": 1.0, "xtc": 0.5},
    {"drafter": "draft-model:model={},length=3", "acceptance_rule": "typical"},
    {"drafter": None, "cache_policy": "h2o:budget=0.5"},
    {"drafter": None, "logits_source": "dola"},
    {"drafter": None, "constraint": Regex("[a-z ]{2,4}")},
]
FACTORIES = [
    "arange", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm",
    "scalar_tensor", "tensor", "zeros",
]  # fmt: skip
CALLS = re.compile(rf"torch\.({'|'.join(FACTORIES)})\(")
OF_INTEGERS = {"arange", "randint", "randperm"}
"""These make int64 whatever the default is."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECODERY_HOME", str(home))
        yield save(make_model("llama"), home / "model")


def texts(lm: LLM, folder: Path) -> list[tuple[int, ...]]:
    found = []
    for settings in SETTINGS:
        given = {
            name: value.format(folder) if name == "drafter" and value else value for name, value in settings.items()
        }
        out = lm.generate("The cache keeps the keys", max_new_tokens=5, ignore_eos="constraint" not in given, **given)
        found.append(tuple(out.tokens))
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[tuple[int, ...]]]:
    return {dtype: texts(LLM(load(folder, dtype=dtype, device="cpu")), folder) for dtype in ("int8", "float32")}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
        assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "device": lambda: default_device("meta"),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "threads": lambda: threads(3),
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "int8") for name in STATES), ("float64", "float32"), ("autocast", "float32")]
)
def test_texts_are_the_same_whatever_the_process_has_set(
    name: str, dtype: str, folder: Path, expected: dict[str, list[tuple[int, ...]]]
) -> None:
    before = LLM(load(folder, dtype=dtype, device="cpu"))
    with STATES[name]():
        after = LLM(load(folder, dtype=dtype, device="cpu"))
        assert texts(before, folder) == texts(after, folder) == expected[dtype]
    # Nothing of it stays in the model, or in what drafters remember.
    assert texts(after, folder) == expected[dtype]


@pytest.mark.parametrize("outer", ["inference_mode", "grad"])
def test_a_cache_made_in_one_mode_is_gone_on_with_in_another(outer: str, folder: Path) -> None:
    modes: tuple[Callable[[], AbstractContextManager[Any]], ...] = torch.inference_mode, nullcontext
    first, second = modes if outer == "inference_mode" else modes[::-1]
    with first():
        lm = LLM(load(folder, dtype="int8", device="cpu"))
        begun = lm.generate(
            "The cache keeps", apply_chat_template=False, max_new_tokens=6, return_cache=True, ignore_eos=True
        )
    with second():
        went_on = lm.generate(
            "The cache keeps the", apply_chat_template=False, max_new_tokens=6, reuse=begun, ignore_eos=True
        )
    assert (
        went_on.tokens
        == lm.generate("The cache keeps the", apply_chat_template=False, max_new_tokens=6, ignore_eos=True).tokens
    )


def test_a_model_loaded_without_gradients_still_has_them(folder: Path) -> None:
    with torch.inference_mode():
        model = load(folder, dtype="float32", device="cpu").model
    weight = model.weights.layers[0].qkv.weight  # type: ignore[attr-defined]
    assert not weight.is_inference() and weight.clone().requires_grad_().sum().requires_grad


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_writes_the_same(folder: Path, expected: dict[str, list[tuple[int, ...]]]) -> None:
    lm = LLM(load(folder, dtype="int8", device="cpu"))
    lm.generate("Hi", max_new_tokens=3)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, pickle.dumps(texts(lm, folder)))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as given:
        found = given.read()
    os.waitpid(child, 0)
    assert pickle.loads(found) == expected["int8"]


def test_what_is_left_inside_another_is_still_on_one_thread() -> None:
    with threads(3):
        with one_thread():
            with one_thread():
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3


def test_kernels_are_given_nothing_else_than_they_take() -> None:
    rows = torch.zeros(4, 8, dtype=torch.float32, device="cpu")
    assert address(rows, torch.float32, 4, 8) == rows.data_ptr() == address(rows, torch.float32, None, 8)
    assert address(rows[:, :3], torch.float32, 4, 3, apart=True) == rows.data_ptr()
    wrong: list[tuple[Any, Any, tuple[int | None, ...]]] = [
        (rows.double(), torch.float32, (4, 8)),
        (rows.bfloat16(), torch.float32, (4, 8)),
        (rows.to("meta"), torch.float32, (4, 8)),
        (rows.T, torch.float32, (8, 4)),
        (rows[:, :3], torch.float32, (4, 3)),
        (rows, torch.float32, (4, 7)),
        (rows, torch.float32, (32,)),
        (np.zeros(3, dtype=np.int32), np.int64, (3,)),
        (np.zeros((4, 4), dtype=np.int64)[:, 0], np.int64, (4,)),
    ]
    for numbers, dtype, shape in wrong:
        with pytest.raises(ValueError, match=r"a kernel was given .*: it takes .*, contiguous on the CPU"):
            address(numbers, dtype, *shape)


@pytest.mark.skipif(library() is None, reason="the kernels were not built")
def test_rows_of_another_width_or_dtype_are_refused_before_a_kernel_reads_them() -> None:
    model = tiny_transformer(hidden_size=64, dtype=torch.bfloat16)
    assert runs_natively(model.config)
    layer = Int8Linear.quantize(torch.zeros(64, 64, dtype=torch.float32, device="cpu"))
    layer(torch.zeros(2, 64, dtype=torch.float64, device="cpu"))
    for run in (
        lambda: layer(torch.zeros(2, 48, dtype=torch.float32, device="cpu")),
        lambda: model.head(torch.zeros(2, 48, dtype=torch.float32, device="cpu")),
        lambda: model.forward(Batch([Segment(np.arange(2), states=torch.zeros(2, 48), cache=model.new_cache())])),
    ):
        with pytest.raises(ValueError, match="a kernel was given"):
            run()
    # What is not laid out for the kernels is read by itself.
    logits = torch.randn(3, 500, dtype=torch.float64, device="cpu", generator=torch.Generator().manual_seed(0))
    for rows in (logits, logits.float(), logits.float()[:, ::2], logits.half()):
        assert topk(rows, 1)[0][:, 0].tolist() == rows.argmax(dim=-1).tolist()
        assert len(gumbel_argmax(rows.float().log_softmax(-1), 5, range(3))) == 3


def test_every_allocation_says_its_dtype_and_its_device() -> None:
    found = []
    for path in sorted(Path(decodery.__file__).parent.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for call in ast.walk(ast.parse(text)) if CALLS.search(text) else ():
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            owner, name = call.func.value, call.func.attr
            if isinstance(owner, ast.Name) and owner.id == "torch" and name in FACTORIES:
                said = {keyword.arg for keyword in call.keywords}
                if None not in said and not ({"device"} if name in OF_INTEGERS else {"device", "dtype"}) <= said:
                    found.append(f"{path}:{call.lineno}: torch.{name}")
    assert not found
