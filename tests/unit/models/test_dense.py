"""Layers of 16 bits on the native kernels: the weights as they are, all else in float32, the same bits everywhere."""

from __future__ import annotations

import pytest
import torch

from decodery.core.native.kernels import choose, kernel_sets
from decodery.models.batch import Batch, Segment
from decodery.models.native.packed import Packed
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Layer, Linear, Weights, floating
from decodery.speculative.drafters import TokenRecycling
from decodery.testing import Garbage, check_identical, tiny_transformer

DTYPES = [torch.bfloat16, torch.float16]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_order(x: torch.Tensor, linear: Dense) -> torch.Tensor:
    """Products added one by one in the order of the inputs, each rounded."""
    weight, result = linear.weight.float(), torch.zeros(len(x), len(linear.weight))
    for k in range(weight.shape[1]):
        result = result + x[:, k : k + 1] * weight[:, k]
    return result if linear.bias is None else result + linear.bias.float()


@pytest.mark.parametrize("kernels", kernel_sets())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(33, 50), (128, 576), (70, 3)])
def test_every_kernel_adds_in_the_same_order_for_any_number_of_rows(
    shape: tuple[int, int], dtype: torch.dtype, kernels: str
) -> None:
    linear = Dense(random(*shape).to(dtype), random(shape[0], seed=1))
    x, packed = random(21, shape[1], seed=2), Packed(linear)
    expected = in_order(x, linear)
    choose(kernels)
    try:
        for n in (1, 2, 3, 4, 5, 8, 9, 21):
            assert torch.equal(packed(x[:n]), expected[:n])
    finally:
        choose(kernel_sets()[0])


def wide(part: torch.Tensor | Linear | None) -> torch.Tensor | Linear | None:
    if part is None or isinstance(part, torch.Tensor):
        return None if part is None else part.float()
    return floating(part)


def widened(model: Transformer) -> Transformer:
    """The same weights in float32."""
    weights = model.weights
    layers = [Layer(**{name: wide(part) for name, part in vars(layer).items()}) for layer in weights.layers]
    head = floating(weights.head)
    return Transformer(model.config, Weights(weights.embedding.float(), layers, weights.norm.float(), head))


def logits(model: Transformer, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.forward(Batch([Segment.chunk(ids, model.new_cache(), logit_rows=range(len(ids)))])).logits


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_is_that_of_its_weights_in_float32(dtype: torch.dtype) -> None:
    narrow = tiny_transformer(dtype=dtype)
    ids = torch.randint(64, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    ours, theirs = logits(narrow, ids), logits(widened(narrow), ids)
    assert ours.dtype == torch.float32 and narrow.capabilities.exact_rows
    # Activations of 16 bits would be a thousand times as far off.
    assert 0 < (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_drafts_change_no_text() -> None:
    """Rows do not depend on the pass they stand in, so texts are exact."""
    model = tiny_transformer(dtype=torch.bfloat16)
    for drafter in (TokenRecycling(), Garbage(nodes=9)):
        check_identical(model, [list(range(3, 15))], drafter=drafter, seeds=(0, 1), max_new_tokens=24)
