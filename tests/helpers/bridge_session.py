"""Sessions of ONNX Runtime on the CPU with the bridge registered; each case runs in a process of its own.

    python -m tests.helpers.bridge_session CASE[,CASE...] LIBRARY

The CUDA driver is whatever libcuda.so.1 the process finds: none, or the stand-in of fake_libcuda.cc, which computes on
the CPU. Test hooks give the op to the CPU provider, so that the runtime calls every entry point of the bridge for real.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.graph.archive import (
    FIRST_OUT,
    Flavour,
    Mapped,
    QuantizedRhs,
    Record,
    TensorFlag,
    TensorMap,
    pack,
    unpack,
)
from tests.helpers.many_commands import end_with
from tests.tools.fuzz_archive import flags, mended

K, N = 8, 12
RECORD = Record(
    kernel="ab12", entry="fake_p2_l2", capability=80, flavour=Flavour.PTX, min_m=0, max_m=2**31 - 1, block_m=16,
    block_n=8, threads=128, shared_bytes=1000, lhs_alignment=16, rhs_alignment=16, load_alignments=(4, 4),
    out_alignments=(4,), image=b"// PTX of the stand-in",
)  # fmt: skip
ATTRIBUTES = {
    "kernel": "ab12",
    "axes": "b m k, k (p n), (p n) -> b m n",
    "sizes": f"p=2 n={N} k={K}",
    "problem": "m=b*m n=n k=k",
    "arguments": "lhs=0 rhs=1[p=0],1[p=1] loads=2[p=0],2[p=1] outs=0",
    "out_types": "f32",
    "in_types": "f32,f32,f32",
    "math": "tf32",
    "fusion": "for people",
}
RANDOM = np.random.default_rng(7)
WEIGHT = RANDOM.standard_normal((K, 2 * N)).astype(np.float32)
BIAS = RANDOM.standard_normal(2 * N).astype(np.float32)
LIBRARY = ""


def reference(x: np.ndarray) -> np.ndarray:
    product = x @ WEIGHT
    return product[..., :N] * product[..., N:] + BIAS[:N] + BIAS[N:]


def model(
    *,
    nodes: int = 1,
    archive: bytes | None = None,
    constant: bool = True,
    fallback: bool = False,
    dims: tuple = ("B", "M", K),
    **attributes: str,
) -> bytes:
    """`nodes` fused nodes side by side."""
    kernels = np.frombuffer(pack([RECORD]) if archive is None else archive, np.uint8)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)]
    initializers = [numpy_helper.from_array(WEIGHT, "w"), numpy_helper.from_array(BIAS, "bias")]
    if constant:
        initializers.append(numpy_helper.from_array(kernels, "kernels"))
    else:
        inputs.append(helper.make_tensor_value_info("kernels", TensorProto.UINT8, [len(kernels)]))
    values = ATTRIBUTES | attributes
    body = [
        helper.make_node("FusedGemm", ["kernels", "x", "w", "bias"], [f"y{i}"], f"site{i}", domain="onnxfuse", **values)
        for i in range(nodes)
    ]
    outputs = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(nodes)]
    graph = helper.make_graph(body, "g", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("onnxfuse", 1)]
    functions = [fallback_function()] if fallback else []
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions)
    return made.SerializeToString()


def fallback_function() -> onnx.FunctionProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Split", ["h"], ["h0", "h1"], axis=-1),
        helper.make_node("Split", ["bias"], ["b0", "b1"], axis=-1),
        helper.make_node("Mul", ["h0", "h1"], ["product"]),
        helper.make_node("Add", ["product", "b0"], ["sum"]),
        helper.make_node("Add", ["sum", "b1"], ["y"]),
    ]
    names, opsets = ["kernels", "x", "w", "bias"], [helper.make_opsetid("", 13)]
    return helper.make_function("onnxfuse", "FusedGemm", names, ["y"], nodes, opsets)


def session(data: bytes, arena: bool = True) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.enable_cpu_mem_arena = arena
    options.log_severity_level = 4
    options.register_custom_ops_library(LIBRARY)
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def sample(*dims: int) -> np.ndarray:
    return RANDOM.standard_normal(dims).astype(np.float32)


def check(made: onnxruntime.InferenceSession, *dims: int) -> None:
    x = sample(*dims)
    for y in made.run(None, {"x": x}):
        np.testing.assert_allclose(y, reference(x), rtol=1e-4, atol=1e-4)


def error_of(data: bytes, *dims: int) -> str:
    """What a load, or a run where dimensions are given, fails with."""
    try:
        made = session(data)
        if dims:
            made.run(None, {"x": sample(*dims)})
    except Exception as error:
        return str(error)
    raise AssertionError("no error")


def expect(message: str, *words: str) -> None:
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


def on_cpu() -> None:
    ctypes.CDLL(LIBRARY).onnxfuse_test_run_on_cpu(1)


def driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.fake_last_image.restype = ctypes.c_char_p
    return library


def inside(wrap: str) -> bytes:
    """A fused node in a branch, a loop's body or a function; the archive and the weights stay in the main graph."""
    made = onnx.load_from_string(model())
    (node,) = made.graph.node
    inner = helper.make_graph([node], "inner", [], [helper.make_tensor_value_info("y0", TensorProto.FLOAT, None)])
    if wrap == "If":  # a condition that only the run knows: a constant one would be folded away
        made.graph.input.append(helper.make_tensor_value_info("yes", TensorProto.BOOL, []))
        outer = helper.make_node("If", ["yes"], ["z"], then_branch=inner, else_branch=inner)
    elif wrap == "Loop":
        for name, kind in (("i", TensorProto.INT64), ("going", TensorProto.BOOL)):
            inner.input.append(helper.make_tensor_value_info(name, kind, []))
        inner.node.append(helper.make_node("Identity", ["going"], ["going_on"]))
        inner.output.insert(0, helper.make_tensor_value_info("going_on", TensorProto.BOOL, []))
        made.graph.initializer.append(numpy_helper.from_array(np.array(1), "once"))
        outer = helper.make_node("Loop", ["once", ""], ["z"], body=inner)
    else:
        opsets = [helper.make_opsetid("onnxfuse", 1)]
        made.functions.append(helper.make_function("own", "Block", list(node.input), ["y0"], [node], opsets))
        made.opset_import.append(helper.make_opsetid("own", 1))
        outer = helper.make_node("Block", list(node.input), ["z"], domain="own")
    made.graph.node[0].CopyFrom(outer)
    made.graph.output[0].name = "z"
    return made.SerializeToString()


# ---- Cases -----------------------------------------------------------------------------------------------------------


def nothing_registered() -> None:
    for _ in range(2):
        check(session(model(fallback=True)), 2, 3, K)
    expect(error_of(model()), "FusedGemm", "not a registered function/op")


def registered_for_cuda() -> None:
    expect(error_of(model()), "implementation for FusedGemm(1) node with name 'site0'")


def hopper_alone() -> onnx.ModelProto:
    """A node whose name says that it has kernels for one architecture, and a body for all others."""
    made = onnx.load_from_string(model(fallback=True))
    made.graph.node[0].op_type = made.functions[0].name = "FusedGemm90_3"
    return made


def hopper_alone_runs() -> None:
    on_cpu()
    check(session(hopper_alone().SerializeToString()), 2, 3, K)
    assert driver().fake_launches() == 1


def hopper_alone_by_its_body() -> None:
    on_cpu()
    check(session(hopper_alone().SerializeToString()), 2, 3, K)
    assert driver().fake_launches() == 0
    check(session(model()), 2, 3, K)
    assert driver().fake_launches() == 1, "other names are registered"


def runs() -> None:
    on_cpu()
    made = session(model(nodes=3))
    assert [output.shape for output in made.get_outputs()] == [["B", "M", N]] * 3
    assert driver().fake_loads() == 1, "an image is loaded once, however many nodes use it"
    assert driver().fake_last_image() == RECORD.image, "decompressed, and ended by a zero byte"
    for dims in ((2, 3), (1, 1), (7, 70), (2, 3)):
        check(made, *dims, K)
    assert driver().fake_launches() == 12
    for dims in ((0, 3), (3, 0)):
        assert [y.shape for y in made.run(None, {"x": sample(*dims, K)})] == [(*dims, N)] * 3
    assert driver().fake_launches() == 12, "nothing is launched for an empty output"


def scopes() -> None:
    """The archive is found from wherever a fused node stands, and its code is loaded once."""
    on_cpu()
    for wrap in ("function", "If", "Loop"):
        made = session(inside(wrap))
        x = sample(2, 3, K)
        (y,) = made.run(None, {"x": x} | ({"yes": np.array(True)} if wrap == "If" else {}))
        np.testing.assert_allclose(y.reshape(2, 3, N), reference(x), rtol=1e-4, atol=1e-4)


def runs_behind_a_product() -> None:
    """MatMul stays the runtime's; the kernel of the stand-in, without parts, adds its loads to 1."""
    on_cpu()
    record = Record(**(vars(RECORD) | {"entry": "fake_p0_l4", "lhs_alignment": 0, "rhs_alignment": 0,
                                       "load_alignments": (4,) * 4}))  # fmt: skip
    proto = onnx.load_from_string(model(archive=pack([record])))
    (node,) = proto.graph.node
    proto.graph.node.insert(0, helper.make_node("MatMul", ["x", "w"], ["h"]))
    attributes = ATTRIBUTES | {
        "axes": "b m (p n), (p n) -> b m n", "sizes": f"p=2 n={N}", "problem": "m=b*m n=n", "in_types": "f32,f32",
        "arguments": "loads=0[p=0],0[p=1],1[p=0],1[p=1] outs=0",
    }  # fmt: skip
    inputs = ["kernels", "h", "bias"]
    proto.graph.node[1].CopyFrom(
        helper.make_node("FusedPointwise", inputs, node.output, "site0", domain="onnxfuse", **attributes)
    )
    made = session(proto.SerializeToString())
    assert made.get_outputs()[0].shape == ["B", "M", N]
    for dims in ((2, 3), (7, 70)):
        x = sample(*dims, K)
        h = x @ WEIGHT + BIAS
        np.testing.assert_allclose(made.run(None, {"x": x})[0], 1 + h[..., :N] + h[..., N:], rtol=1e-4, atol=1e-4)
    assert driver().fake_launches() == 2


def masks() -> None:
    """Operands of type bool, of single bytes; the kernel of the stand-in looks at the product only."""
    from tests.helpers.bridge_hooks import Arguments

    on_cpu()
    record = Record(**(vars(RECORD) | {"entry": "fake_p2_l0", "load_alignments": (4, 4)}))
    types = {"in_types": "f32,f32,bool", "axes": "b m k, k (p n), m (p n) -> b m n", "problem": "batch=b m=m n=n k=k"}
    proto = onnx.load_from_string(model(archive=pack([record]), **types))
    proto.graph.node[0].input[3] = "mask"
    proto.graph.input.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, ("M", 2 * N)))
    made = session(proto.SerializeToString())
    x = sample(2, 3, K)
    (y,) = made.run(None, {"x": x, "mask": np.ones((3, 2 * N), np.bool_)})
    product = x @ WEIGHT
    np.testing.assert_allclose(y, product[..., :N] * product[..., N:], rtol=1e-4, atol=1e-4)
    arguments = Arguments()
    driver().fake_last_launch((ctypes.c_uint * 6)(), ctypes.byref(ctypes.c_uint()), ctypes.byref(arguments))
    first, second = arguments.loads[0], arguments.loads[1]
    assert second.pointer - first.pointer == N, "a part is as many bytes away as it has elements"
    assert (first.row_stride, first.column_stride) == (2 * N, 1)
    proto.graph.input[-1].type.tensor_type.elem_type = TensorProto.UINT8
    expect(error_of(proto.SerializeToString()), "node 'site0'", "input 2 is u8", "compiled for bool")


def launch_contract() -> None:
    from tests.helpers.bridge_hooks import Arguments

    on_cpu()
    made = session(model(problem="batch=b m=m n=n k=k"))
    check(made, 3, 33, K)
    grid, shared, arguments = (ctypes.c_uint * 6)(), ctypes.c_uint(), Arguments()
    driver().fake_last_launch(grid, ctypes.byref(shared), ctypes.byref(arguments))
    assert list(grid) == [3 * 2, 1, 3, 128, 1, 1]
    assert not driver().fake_last_early(), "only a kernel that waits by itself may start before the last one's end"
    assert shared.value == 1000
    assert (arguments.batch, arguments.m, arguments.n, arguments.k) == (3, 33, N, K)
    check(made, 70_000, 1, K)
    driver().fake_last_launch(grid, ctypes.byref(shared), ctypes.byref(arguments))
    assert (grid[2], arguments.batch) == (65535, 70_000)


class EncodedMap(ctypes.Structure):
    _fields_ = (
        ("pointer", ctypes.c_uint64), ("extents", ctypes.c_uint64 * 5), ("strides", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint32 * 5), ("rank", ctypes.c_uint32), ("type", ctypes.c_int), ("swizzle", ctypes.c_int),
        ("rest", ctypes.c_char * 16),
    )  # fmt: skip


def head_split() -> None:
    """[b, m, k] -> [b, n1, m, n2]: the output's columns in two levels, and its shape as a session infers it."""
    on_cpu()
    split = {
        "axes": "b m k, k (p n1 n2), (p n1 n2) -> b n1 m n2", "sizes": f"p=2 n1=3 n2=4 k={K}",
        "problem": "batch=b m=m n=n1*n2 k=k",
    }  # fmt: skip
    columns_of_out, both_of_out = flags({FIRST_OUT: 2}), flags({FIRST_OUT: 3})
    archive = pack([Record(**(vars(RECORD) | {"flags": columns_of_out}))])
    made = session(model(archive=archive, **split))
    assert made.get_outputs()[0].shape == ["B", 3, "M", 4]
    x = sample(2, 5, K)
    (y,) = made.run(None, {"x": x})
    np.testing.assert_allclose(y, reference(x).reshape(2, 5, 3, 4).transpose(0, 2, 1, 3), rtol=1e-4, atol=1e-4)
    expect(error_of(model(**split), 2, 5, K), "node 'site0'", "out 0")
    # TMA sees [batch, runs of rows, runs of columns, rows of a run, columns of a run]; strides in bytes.
    rule = TensorMap(Mapped.OUT, 0, False, 0, 4, 16)
    for problem, levels, extents, strides in (
        ("batch=b m=m n=n1*n2 k=k", columns_of_out, [4, 5, 3, 1, 2], {0: 16, 1: 16 * 5, 3: 16 * 5 * 3}),
        ("m=b*m n=n1*n2 k=k", both_of_out, [4, 5, 3, 2, 1], {0: 16, 1: 16 * 5, 2: 16 * 5 * 3}),
    ):
        mapped = pack([Record(**(vars(RECORD) | {"flags": levels, "cluster": 1, "maps": (rule,)}))])
        made = session(model(archive=mapped, **split | {"problem": problem}))
        (again,) = made.run(None, {"x": x})
        np.testing.assert_array_equal(again, y)
        encoded = (EncodedMap * 9)()
        assert driver().fake_last_maps(encoded)
        assert (encoded[0].rank, list(encoded[0].extents), list(encoded[0].box)) == (5, extents, [4, 16, 1, 1, 1])
        assert {axis: encoded[0].strides[axis] for axis in strides} == strides


def tensor_maps() -> None:
    """A persistent kernel's grid and maps; each map reaches, element by element, what the arguments reach."""
    from tests.helpers.bridge_hooks import Arguments

    on_cpu()
    maps = (
        TensorMap(Mapped.LHS, 0, False, 128, 32, 64),
        TensorMap(Mapped.RHS, 0, False, 64, 16, 32),
        TensorMap(Mapped.RHS, 1, False, 32, 8, 32),
        TensorMap(Mapped.OUT, 0, False, 0, 4, 16),
    )
    archive = pack([Record(**(vars(RECORD) | {"cluster": 2, "early_depth": K, "full_early_depth": K, "maps": maps}))])
    for problem, rows, batch in (("m=b*m n=n k=k", 3 * 33, 1), ("batch=b m=m n=n k=k", 33, 3)):
        check(session(model(archive=archive, problem=problem)), 3, 33, K)
        grid, shared, arguments = (ctypes.c_uint * 6)(), ctypes.c_uint(), Arguments()
        driver().fake_last_launch(grid, ctypes.byref(shared), ctypes.byref(arguments))
        tiles = -(-rows // 16) * -(-N // 8) * batch
        assert list(grid) == [2 * min(tiles, 66), 1, 1, 128, 1, 1]
        assert driver().fake_last_early() == ("FAKE_VERSION" not in os.environ), "CUDA graphs of 12.2 cannot record it"
        encoded = (EncodedMap * 9)()
        assert driver().fake_last_maps(encoded)
        tensors = (arguments.lhs, arguments.rhs[0], arguments.rhs[1], arguments.outs[0])
        extents = ((K, rows), (N, K), (N, K), (N, rows))
        for rule, found, tensor, (inner, outer) in zip(maps, encoded, tensors, extents, strict=False):
            stacked = batch if tensor.batch_stride else 1
            assert (found.pointer, list(found.extents)) == (tensor.pointer, [inner, outer, stacked, 0, 0])
            assert found.strides[0] == 4 * tensor.row_stride
            assert stacked == 1 or found.strides[1] == 4 * tensor.batch_stride
            kind = (
                2 if rule.tensor == Mapped.OUT else 11
            )  # 32 bits as they are, or rounded to TF32 for the tensor cores
            assert (list(found.box), found.type) == ([rule.box_inner, rule.box_outer, 1, 0, 0], kind)
            assert found.swizzle == {0: 0, 32: 1, 64: 2, 128: 3}[rule.swizzle]
    check(session(model(archive=archive)), 1, 1, K)  # strides that are never stepped along are still strides


def early_start() -> None:
    """Beside the end of the kernel before where the tiles of a block, or a grid, have as much k as the record says."""
    on_cpu()
    known = "FAKE_VERSION" not in os.environ  # CUDA graphs of 12.2 cannot record it
    for cluster in (0, 1, 2):
        depths = (0, 0), (K - 1, K), (K, K), (K, 3 * K - 1), (3 * K - 1, 3 * K), (3 * K, 3 * K), (2**32 - 1, 2**32 - 1)
        for depth, full_depth in depths:
            own = {"cluster": cluster, "early_depth": depth, "full_early_depth": full_depth}
            made = session(model(archive=pack([Record(**(vars(RECORD) | own))])))
            for tiles_down in (1, 24, 25, 33, 34, 49, 50, 66, 67, 99, 100):
                check(made, 1, 16 * tiles_down, K)
                tiles, together = tiles_down * -(-N // 8), 132 // cluster if cluster else 1
                is_full = cluster > 0 and tiles >= 0.75 * together
                most = full_depth if is_full else depth
                pays = depth > 0 and (-(-tiles // together) * K <= most or depth == 2**32 - 1)
                assert driver().fake_last_early() == (known and pays), (cluster, depth, full_depth, tiles_down)


def rhs_that_is_ready() -> None:
    """Where a kernel starts early and its weights are initializers, it may read them before the last one's end."""
    from tests.helpers.bridge_hooks import Arguments

    on_cpu()
    for depth, constant in itertools.product((0, 2**32 - 1), (True, False)):
        archive = pack([Record(**(vars(RECORD) | {"early_depth": depth, "full_early_depth": depth}))])
        made = onnx.load_from_string(model(archive=archive))
        if not constant:
            made.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, WEIGHT.shape))
            made.graph.initializer.remove(next(each for each in made.graph.initializer if each.name == "w"))
        feeds = {"x": sample(1, 5, K)} | ({} if constant else {"w": WEIGHT})
        (y,) = session(made.SerializeToString()).run(None, feeds)
        np.testing.assert_allclose(y, reference(feeds["x"]), rtol=1e-4, atol=1e-4)
        arguments = Arguments()
        driver().fake_last_launch((ctypes.c_uint * 6)(), (ctypes.c_uint * 1)(), ctypes.byref(arguments))
        assert arguments.rhs_ready == (constant and depth > 0), (depth, constant)


def quantized_rhs_that_is_not_ready() -> None:
    """A kernel that reads few bits without waiting starts when the last one has ended, unless all are initializers."""
    on_cpu()
    record = vars(RECORD) | {
        "entry": "fake_p9_l0", "early_depth": 2**32 - 1, "full_early_depth": 2**32 - 1,
        "quantized": QuantizedRhs(4, 16, 4, 1), "lhs_alignment": 4, "rhs_alignment": 2, "load_alignments": (),
        "flags": flags({1: TensorFlag.TRANSPOSED}),
    }  # fmt: skip
    node = helper.make_node(
        "FusedGemm", ["kernels", "x", "w", "scales", "points"], ["y"], "site", domain="onnxfuse", kernel="ab12",
        axes="m k, n kb kq, n kb, n kz -> m n", sizes=f"n={N} k=32 kb=2 kq=8 kz=1", problem="m=m n=n k=k",
        arguments="lhs=0 rhs=1 scales=2 zero_points=3 outs=0", out_types="f32", in_types="f32,u8,f32,u8",
        math="tf32", fusion="for people",
    )  # fmt: skip
    weights = {
        "w": np.zeros((N, 2, 8), np.uint8), "scales": np.ones((N, 2), np.float32), "points": np.zeros((N, 1), np.uint8),
    }  # fmt: skip
    for computed in ((), *((name,) for name in weights)):
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("M", 32))]
        inputs += [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(weights[name].dtype), weights[name].shape
            )
            for name in computed
        ]
        stored = {name: array for name, array in weights.items() if name not in computed}
        stored["kernels"] = np.frombuffer(pack([Record(**record)]), np.uint8)
        outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
        initializers = [numpy_helper.from_array(array, name) for name, array in stored.items()]
        graph = helper.make_graph([node], "g", inputs, outputs, initializers)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("onnxfuse", 1)]
        made = session(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
        made.run(None, {"x": sample(5, 32)} | {name: weights[name] for name in computed})
        assert driver().fake_last_early() == (not computed), computed


def unknown_shapes() -> None:
    on_cpu()
    symbols = [
        session(model(dims=(None, None, K), nodes=2)).get_outputs()[index].shape for index in range(2)
    ]  # a dimension that nobody knows has a name of its own
    assert len({symbol for shape in symbols for symbol in shape[:2]}) == 4
    check(session(model(dims=None)), 2, 3, K)


def lifetimes() -> None:
    on_cpu()
    for round_number in range(1, 4):
        first, second = session(model()), session(model(nodes=2))
        check(first, 2, 3, K)
        del first
        gc.collect()
        check(second, 2, 3, K)
        assert (driver().fake_loads(), driver().fake_unloads()) == (round_number, round_number - 1)
        del second
        gc.collect()
        assert driver().fake_unloads() == round_number


def contexts() -> None:
    on_cpu()
    made = session(model(nodes=2))
    check(made, 2, 3, K)
    driver().fake_set_context(ctypes.c_void_p(0x2000))
    for _ in range(2):
        check(made, 2, 3, K)
        assert driver().fake_loads() == 2, "each context has its own copy of the code, loaded once"
    driver().fake_set_context(ctypes.c_void_p(0x1000))
    check(made, 2, 3, K)
    assert driver().fake_loads() == 2
    driver().fake_set_context(None)
    expect(error_of(model()), "site0", "no CUDA context")


def in_threads(made: onnxruntime.InferenceSession, expected: Callable[[np.ndarray], np.ndarray]) -> None:
    """Eight threads run a session in three contexts, with sizes of their own."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            driver().fake_set_context(ctypes.c_void_p(0x1000 * (1 + seed % 3)))
            for step in range(50):
                x = np.random.default_rng(seed * 100 + step).standard_normal((1 + step % 3, 1 + seed, K))
                x = x.astype(np.float32)
                for y in made.run(None, {"x": x}):
                    np.testing.assert_allclose(y, expected(x), rtol=1e-4, atol=1e-4)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[0]


def threads() -> None:
    on_cpu()
    made = session(model(nodes=2))
    in_threads(made, reference)
    assert driver().fake_loads() == 3


def load_errors() -> None:
    on_cpu()
    packed = pack([RECORD])
    expect(error_of(model(archive=packed[:-1])), "node 'site0'", "should have", "optimize the original again")
    expect(error_of(model(archive=packed[:-2] + b"xx")), "node 'site0'", "checksum")
    expect(error_of(model(archive=b"")), "node 'site0'", "0 bytes")
    expect(error_of(model(constant=False)), "node 'site0'", "must be an initializer")
    expect(error_of(model(kernel="ff")), "node 'site0'", "no kernel ff")
    expect(error_of(model(in_types="f32,f16,f32")), "node 'site0'", "input 1 is f32", "compiled for f16")
    specific = pack([Record(**(vars(RECORD) | {"capability": 100, "flavour": Flavour.CUBIN}))])
    expect(error_of(model(archive=specific)), "node 'site0'", "sm_100", "device is sm_90", "--arch sm_90a")
    cubin = pack([Record(**(vars(RECORD) | {"capability": 90, "flavour": Flavour.CUBIN}))])
    expect(error_of(model(archive=cubin)), "node 'site0'", "not a cubin")
    damaged = mended(packed[:-20] + bytes(20))
    expect(error_of(model(archive=damaged)), "node 'site0'", "kernel ab12 is damaged", "optimize the original again")
    entry = pack([Record(**(vars(RECORD) | {"entry": "missing"}))])
    expect(error_of(model(archive=entry)), "node 'site0'", "find the kernel's entry missing", "500")
    expect(error_of(model(axes="b m k, k (p n), (p n -> b m n")), "site0")


def archive_at_the_same_address() -> None:
    """A damaged archive is found even where an intact one was a moment ago."""
    on_cpu()
    for _ in range(5):
        made = session(model())
        check(made, 2, 3, K)
        del made
        gc.collect()
        expect(error_of(model(archive=pack([RECORD])[:-2] + b"xx")), "checksum")


def run_errors() -> None:
    on_cpu()
    anything = {"dims": (None, None, None)}
    expect(error_of(model(**anything), 2, 3, 7), "node 'site0'", "dimension 2 of input 0 is 7", "k=8")
    ranged = pack([Record(**(vars(RECORD) | {"min_m": 100}))])
    expect(error_of(model(archive=ranged, **anything), 2, 3, K), "node 'site0'", "m=6", "m=100..")


def other_version() -> None:
    """An archive of another format, with a checksum that is right."""
    on_cpu()
    body = bytearray(pack([RECORD]))
    body[8:12] = (99).to_bytes(4, "little")
    body[24:32] = zlib.crc32(body[32:], zlib.crc32(body[:24])).to_bytes(8, "little")
    expect(error_of(model(archive=bytes(body))), "node 'site0'", "version 99", "optimize the original again")


def refused(made: onnxruntime.InferenceSession, x: np.ndarray, *words: str) -> None:
    try:
        made.run(None, {"x": x})
    except Exception as error:
        expect(str(error), "node 'site0'", *words)
    else:
        raise AssertionError("no error")


def survives() -> None:
    """A run that fails, of whatever cause, leaves a session that runs."""
    on_cpu()
    made = session(model(dims=(None, None, None)))
    check(made, 2, 3, K)
    for rows, words in (((2, 3, 7), "dimension 2"), ((2, 3, 0), "dimension 2")):
        refused(made, sample(*rows), words)
        check(made, 2, 3, K)
    for fault in ("719", "2", "1"):
        os.environ["FAKE_LAUNCH_ERROR"] = fault
        refused(made, sample(2, 3, K), "launch the kernel")
        del os.environ["FAKE_LAUNCH_ERROR"]
        check(made, 2, 3, K)


def plain_product(k: int, n: int) -> onnxruntime.InferenceSession:
    """`[b, m, k] -> [b, m, n]` without an epilogue, k known to the run only."""
    record = Record(**(vars(RECORD) | {"entry": "fake_p1_l0", "load_alignments": (), "rhs_alignment": 4,
                                       "lhs_alignment": 4}))  # fmt: skip
    proto = onnx.load_from_string(model(archive=pack([record]), dims=(None, None, None)))
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((k, n), np.float32), "w"))
    attributes = ATTRIBUTES | {
        "axes": "b m k, k n -> b m n", "sizes": f"n={n}", "in_types": "f32,f32", "arguments": "lhs=0 rhs=1 outs=0",
    }  # fmt: skip
    node = helper.make_node("FusedGemm", ["kernels", "x", "w"], ["y0"], "site0", domain="onnxfuse", **attributes)
    proto.graph.node[0].CopyFrom(node)
    return session(proto.SerializeToString())


def absurd_shapes() -> None:
    """Rows that 32 bits cannot count, and an output that no memory holds: refused before anything is launched."""
    on_cpu()
    counted, wide = plain_product(0, 1), plain_product(1, 2**20)
    refused(counted, np.zeros((2**16, 2**16, 0), np.float32), "m=4294967296", "32 bits")
    refused(wide, np.zeros((2**10, 2**10, 1), np.float32), "memory")  # 4 TiB
    assert driver().fake_launches() == 0
    np.testing.assert_array_equal(counted.run(None, {"x": np.zeros((2, 3, 0), np.float32)})[0], np.zeros((2, 3, 1)))
    np.testing.assert_array_equal(
        wide.run(None, {"x": np.full((1, 2, 1), 3, np.float32)})[0], np.full((1, 2, 2**20), 3)
    )


def launch_error() -> None:
    on_cpu()
    expect(error_of(model(), 2, 3, K), "node 'site0'", "launch the kernel", "CUDA_ERROR_LAUNCH_FAILED", "launch failed")


def cache_models(form: str) -> tuple[bytes, bytes]:
    """GroupQueryAttention over a cache, and the same as a fused node whose kernels the stand-in launches."""
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name, each) for each in ("stock.onnx", "fused.onnx")]
        # In a process that does not find the stand-in, which the compiler would take for a driver.
        environment = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
        command = [sys.executable, "-m", "tests.helpers.cached_model", form, *map(str, files)]
        subprocess.run(command, check=True, env=environment)
        stock, fused = map(onnx.load, files)
    for initializer in fused.graph.initializer:
        if initializer.name == "onnxfuse.kernels":
            records = unpack(numpy_helper.to_array(initializer).tobytes())
            other = {"entry": "fake_p9_l0", "image": RECORD.image, "flavour": Flavour.PTX}
            held = pack([replace(record, **other) for record in records])
            initializer.CopyFrom(numpy_helper.from_array(np.frombuffer(held, np.uint8), initializer.name))
    return stock.SerializeToString(), fused.SerializeToString()


def cache() -> None:
    """A prompt, and a cache that grows, are the runtime's op; one token in a cache with room is a kernel's."""
    from tests.helpers.bridge_hooks import Arguments
    from tests.helpers.cached_model import FORMS, GROUPS, HEAD, HEADS, ROOM, cached_feeds

    on_cpu()
    for form, settings in FORMS.items():
        packed, has_sink = settings.get("packed", True), "sink" in settings
        stock, fused = map(session, cache_models(form))
        before = driver().fake_launches()
        for tokens, past, room, batch in ((5, 0, ROOM, 2), (2, 7, ROOM, 1), (1, 6, 6, 2), (1, 6, ROOM, 2)):
            feeds = cached_feeds(packed, tokens, past, room, batch=batch)
            (result, *ours), (expected, *theirs) = (each.run(None, feeds) for each in (fused, stock))
            np.testing.assert_array_equal(result, expected)
            for found, wanted in zip(ours, theirs, strict=True):
                assert found.shape == wanted.shape == (batch, GROUPS, max(room, past + tokens), HEAD)
                np.testing.assert_array_equal(found[:, :, : past + tokens], wanted[:, :, : past + tokens])
        assert driver().fake_launches() == before, "past and present lie apart: the cache would have to be copied"
        feeds = cached_feeds(packed, 1, 6, ROOM)
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in feeds.items()}
        binding = fused.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for each in ("key", "value"):
            binding.bind_ortvalue_output(f"present_{each}", values[f"past_{each}"])
        binding.bind_output("out", "cpu")
        fused.run_with_iobinding(binding)
        assert driver().fake_launches() == before + 1
        grid, shared, arguments = (ctypes.c_uint * 6)(), ctypes.c_uint(), Arguments()
        driver().fake_last_launch(grid, ctypes.byref(shared), ctypes.byref(arguments))
        assert list(grid) == [2 * GROUPS * 8, 1, 1, 256, 1, 1]
        assert driver().fake_last_early()
        query = values["query"].data_ptr()
        own = [query + HEADS * HEAD * 2, query + (HEADS + GROUPS) * HEAD * 2]
        own = own if packed else [values[each].data_ptr() for each in ("key", "value")]
        pointers = [values["past_key"].data_ptr(), values["past_value"].data_ptr(), *own]
        assert [arguments.rhs[place].pointer for place in range(4)] == pointers
        assert (arguments.lhs.pointer, arguments.loads[0].pointer) == (query, values["lengths"].data_ptr())
        found = [arguments.loads[place].pointer != 0 for place in range(1, 6)]
        assert found == [not has_sink] * 2 + [False] * 2 + [has_sink], "cosines, sines, norms, the sink"
        assert arguments.lhs.batch_stride == (HEADS + 2 * GROUPS * packed) * HEAD
        assert (arguments.batch, arguments.n, arguments.k) == (2, ROOM, 7)


def main() -> None:
    """The cases, each in a copy of this process: imports take longer than most of them."""
    global LIBRARY
    LIBRARY = sys.argv[2]
    for case in sys.argv[1].split(","):
        if (child := os.fork()) == 0:
            end_with(globals()[case])
        assert os.waitpid(child, 0)[1] == 0, case


if __name__ == "__main__":
    main()
