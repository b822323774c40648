"""The same chain of linear layers in each library: builders that turn weights into a callable."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn.functional import linear

from decodery.core.threads import one_thread
from decodery.models.native.int4 import Int4Linear
from decodery.models.native.int8 import Int8Linear
from decodery.models.native.packed import Arena, Packed, packed_size

HIDDEN, BLOCKS = 576, 30
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # fused QKV, output, fused gate and up, down
OURS = "decodery int8"

Weights = list[torch.Tensor]
Chain = Callable[[torch.Tensor], object]


def random_weights() -> Weights:
    """[out, in] float32 each, scaled so that activations keep their size along the chain."""
    generator = torch.Generator().manual_seed(0)
    shapes = [*SHAPES * BLOCKS, (49152, HIDDEN)]
    return [torch.randn(shape, generator=generator) * shape[1] ** -0.5 for shape in shapes]


def builders(inductor: bool) -> dict[str, Callable[[Weights], Chain]]:
    """Library name -> builder."""
    table: dict[str, Callable[[Weights], Chain]] = {
        OURS: lambda weights: ours([Int8Linear.quantize(w) for w in weights]),
        "decodery int4": lambda weights: ours([Int4Linear.quantize(w) for w in weights]),
        "torch bfloat16": torch_bfloat16,
        "torch _weight_int8pack_mm": torch_int8pack,
        "torch _weight_int4pack_mm_for_cpu": torch_int4pack,
        "torch dynamic int8 (oneDNN)": lambda weights: torch_dynamic(weights, "onednn"),
        "torch dynamic int8 (FBGEMM)": lambda weights: torch_dynamic(weights, "fbgemm"),
        "torchao int8 dynamic": torchao_int8,
        "onnxruntime MatMulInteger": lambda weights: onnxruntime_chain(weights, 0),
        "onnxruntime MatMulNBits 8": lambda weights: onnxruntime_chain(weights, 8),
        "onnxruntime MatMulNBits 4": lambda weights: onnxruntime_chain(weights, 4),
        "openvino int8": lambda weights: openvino_chain(weights, 8),
        "openvino int4": lambda weights: openvino_chain(weights, 4),
    }
    if inductor:
        table["inductor weight-only int8"] = inductor_int8
    return table


def through(layers: list[Callable[[torch.Tensor], torch.Tensor]], dtype: torch.dtype = torch.float32) -> Chain:
    """Runs the layers one after the other, cutting each result to the next layer's input."""
    inputs = [shape[1] for shape in SHAPES] * BLOCKS + [HIDDEN]

    def run(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.to(dtype)
        for width, layer in zip(inputs, layers, strict=True):
            rows = layer(rows if rows.shape[1] == width else rows[:, :width].contiguous())
        return rows

    return run


def ours(layers: Sequence[Int8Linear | Int4Linear]) -> Chain:
    """This project's kernels, with PyTorch's threads asleep as the engine keeps them."""
    return one_thread()(through([Packed(layer, Arena(packed_size(layer))) for layer in layers]))


def torch_bfloat16(weights: Weights) -> Chain:
    kept = [w.bfloat16() for w in weights]
    return through([lambda rows, w=w: linear(rows, w) for w in kept], torch.bfloat16)


def steps(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values [out, in] and scales [out]."""
    layer = Int8Linear.quantize(weight)
    return layer.weight, layer.scale


def torch_int8pack(weights: Weights) -> Chain:
    kept = [(values, scale.bfloat16()) for values, scale in map(steps, weights)]
    return through([lambda rows, k=k: torch._weight_int8pack_mm(rows, *k) for k in kept], torch.bfloat16)


def torch_int4pack(weights: Weights) -> Chain:
    def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer = Int4Linear.quantize(weight)
        values = torch.ops.aten._convert_weight_to_int4pack_for_cpu(layer.values().to(torch.int32), 1)
        # This kernel's zero is the middle value 8.
        zeros = layer.least.float() + 8 * layer.step.float()
        both = torch.stack((layer.step.float(), zeros), dim=-1).transpose(0, 1).contiguous().bfloat16()
        return values, both

    kept = [packed(w) for w in weights]
    run = torch.ops.aten._weight_int4pack_mm_for_cpu
    return through([lambda rows, k=k: run(rows, k[0], 32, k[1]) for k in kept], torch.bfloat16)


def torch_dynamic(weights: Weights, engine: str) -> Chain:
    warnings.simplefilter("ignore")
    torch.backends.quantized.engine = engine
    layers = []
    for weight in weights:
        values, scale = steps(weight)
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        quantized = torch._make_per_channel_quantized_tensor(values, scale.double(), zeros, 0)
        packed = torch.ops.quantized.linear_prepack(quantized, None)
        layers.append(lambda rows, p=packed: torch.ops.quantized.linear_dynamic(rows, p, reduce_range=False))
    return through(layers)


def torchao_int8(weights: Weights) -> Chain:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    layers = []
    for weight in weights:
        module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        module.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        quantize_(module, Int8DynamicActivationInt8WeightConfig())
        layers.append(module)
    return through(layers)


def inductor_int8(weights: Weights) -> Chain:
    import torch._inductor.config as config

    torch._dynamo.config.recompile_limit = 10 * len(weights)
    config.max_autotune = True
    config.max_autotune_gemm_backends = "CPP,ATEN"
    config.freezing = True

    class Layer(torch.nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            values, scale = steps(weight)
            self.register_buffer("values", values)
            self.register_buffer("scale", scale.bfloat16())

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return linear(rows, self.values.to(rows.dtype)) * self.scale

    # One compiled layer per shape and number of rows would share the code but freeze one weight; compile each.
    return through([torch.compile(Layer(w).eval(), dynamic=False) for w in weights], torch.bfloat16)


def onnxruntime_chain(weights: Weights, bits: int) -> Chain:
    """bits 0: dynamic quantization and MatMulInteger; 4 and 8: MatMulNBits in blocks of 32 with int8 activations."""
    import tempfile
    from pathlib import Path

    import onnx
    import onnxruntime
    from onnx import helper, numpy_helper

    nodes, constants, name = [], [], "x"

    def constant(label: str, values: np.ndarray) -> str:
        constants.append(numpy_helper.from_array(np.ascontiguousarray(values), label))
        return label

    constant("zero", np.array([0], np.int64))
    constant("one", np.array([1], np.int64))
    for i, weight in enumerate(weights):
        inputs = weight.shape[1]
        cut = constant(f"width{i}", np.array([inputs], np.int64))
        nodes.append(helper.make_node("Slice", [name, "zero", cut, "one"], [f"cut{i}"]))
        if bits == 0:
            values, scale = steps(weight)
            w = constant(f"w{i}", values.T.numpy())
            s = constant(f"s{i}", scale.numpy())
            nodes += [
                helper.make_node("DynamicQuantizeLinear", [f"cut{i}"], [f"q{i}", f"qs{i}", f"qz{i}"]),
                helper.make_node("MatMulInteger", [f"q{i}", w, f"qz{i}"], [f"int{i}"]),
                helper.make_node("Cast", [f"int{i}"], [f"float{i}"], to=onnx.TensorProto.FLOAT),
                helper.make_node("Mul", [f"qs{i}", s], [f"both{i}"]),
                helper.make_node("Mul", [f"float{i}", f"both{i}"], [f"y{i}"]),
            ]
        else:
            values, scale = blocked(weight, bits)
            w = constant(f"w{i}", values)
            s = constant(f"s{i}", scale)
            settings = {"K": inputs, "N": len(weight), "bits": bits, "block_size": 32, "accuracy_level": 4}
            operands = [f"cut{i}", w, s]
            nodes.append(helper.make_node("MatMulNBits", operands, [f"y{i}"], domain="com.microsoft", **settings))
        name = f"y{i}"
    shape = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "chain", [shape("x", onnx.TensorProto.FLOAT, ["n", HIDDEN])],
        [shape(name, onnx.TensorProto.FLOAT, ["n", len(weights[-1])])], constants,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chain.onnx"
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
        session = onnxruntime.InferenceSession(str(path), options)
    return lambda rows: session.run(None, {"x": rows.numpy()})


def blocked(weight: torch.Tensor, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric blocks of 32 around the middle value: bytes [out, in / 32, 32 * bits / 8], scales [out, in / 32]."""
    blocks = weight.view(len(weight), -1, 32)
    middle = 2 ** (bits - 1)
    scale = blocks.abs().amax(dim=-1) / (middle - 1)
    values = ((blocks / scale[..., None]).round() + middle).to(torch.uint8)
    if bits == 4:
        values = values[..., ::2] | values[..., 1::2] << 4
    return values.numpy(), scale.numpy()


def openvino_chain(weights: Weights, bits: int) -> Chain:
    """Compressed weights; activations quantized on the fly in groups of 32 where the plugin does so."""
    import openvino
    from openvino import opset13 as op

    x = op.parameter([-1, HIDDEN], np.float32)
    y = x
    for weight in weights:
        inputs = weight.shape[1]
        y = op.slice(y, [0], [inputs], [1], [1])
        if bits == 8:
            values, scale = steps(weight)
            w = op.convert(op.constant(values.numpy()), np.float16)
            w = op.multiply(w, op.constant(scale.half().numpy()[:, None]))
        else:
            packed, scale = blocked(weight, 4)
            codes = openvino.Tensor(packed, [len(weight), inputs // 32, 32], openvino.Type.u4)
            w = op.subtract(op.convert(op.constant(codes), np.float16), op.constant(np.float16(8)))
            w = op.multiply(w, op.constant(scale.astype(np.float16)[..., None]))
            w = op.reshape(w, [len(weight), inputs], False)
        y = op.matmul(y, op.convert(w, np.float32), False, True)
    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 32,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    model = openvino.Core().compile_model(openvino.Model([y], [x]), "CPU", settings)
    request = model.create_infer_request()
    return lambda rows: request.infer([rows.numpy()])
