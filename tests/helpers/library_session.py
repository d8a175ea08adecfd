"""Sessions of ONNX Runtime on the CPU whose nodes take the library's product; each case in a process of its own.

    python -m tests.helpers.library_session CASE BRIDGE LIBRARY

The stand-ins are those of bridge_session.py, and that of fake_cublaslt.cc. A kernel behind the library adds what it
loads, both parts among it, to 1; the one that takes over multiplies them: results tell which of them has run.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.graph.archive import Library, Record, pack
from tests.helpers import bridge_session
from tests.helpers.bridge_session import (
    ATTRIBUTES,
    BIAS,
    RECORD,
    WEIGHT,
    K,
    N,
    driver,
    in_threads,
    model,
    on_cpu,
    reference,
    sample,
    session,
)
from tests.helpers.many_commands import end_with

OWN = Record(**(vars(RECORD) | {"lhs_alignment": 4, "rhs_alignment": 4}))
BEHIND = Record(**(vars(OWN) | {"entry": "fake_p0_l4", "load_alignments": (4,) * 4, "library": Library.TF32,
                                "max_m": 100}))  # fmt: skip
ARCHIVE = pack([BEHIND, OWN])


class Operation(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("compute", "scale", "transpose_a", "transpose_b")]


class Layout(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("type", "rows", "columns", "pitch", "batch", "stride")]


class Call(ctypes.Structure):
    _fields_ = (
        ("operation", Operation), ("a", Layout), ("b", Layout), ("d", Layout),
        *((name, ctypes.c_uint64) for name in ("a_pointer", "b_pointer", "d_pointer", "workspace", "workspace_bytes",
                                               "stream", "algorithm")),
    )  # fmt: skip


class Preference(ctypes.Structure):
    _fields_ = (("workspace", ctypes.c_uint64), ("alignments", ctypes.c_uint32 * 4), ("reductions", ctypes.c_uint32))


STAND_IN = None


def library() -> ctypes.CDLL:
    """The stand-in, loaded as ONNX Runtime's CUDA provider loads the real one."""
    global STAND_IN
    STAND_IN = STAND_IN or ctypes.CDLL(sys.argv[3], mode=ctypes.RTLD_LOCAL)
    return STAND_IN


def last() -> Call:
    call = Call()
    library().fake_lt_last(ctypes.byref(call))
    return call


def behind(x: np.ndarray) -> np.ndarray:
    """What the kernel behind the library makes of it."""
    product = x @ WEIGHT + BIAS
    return 1 + product[..., :N] + product[..., N:]


def aligned(values: np.ndarray) -> np.ndarray:
    """A copy that lies as the arena of a GPU places it: how a pointer is aligned is part of a problem."""
    memory = np.empty(values.nbytes + 256, np.uint8)
    start = -memory.ctypes.data % 256
    copy = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[:] = values
    return copy


def check(made, expected, *dims: int) -> None:
    x = aligned(sample(*dims))
    for y in made.run(None, {"x": x}):
        np.testing.assert_allclose(y, expected(x), rtol=1e-4, atol=1e-4)


# ---- Cases -----------------------------------------------------------------------------------------------------------


def takes_it() -> None:
    """In its range of rows; a product is described and chosen for once, however many nodes and runs want it."""
    on_cpu()
    library()
    made = session(model(nodes=3, archive=ARCHIVE))
    assert library().fake_lt_handles() == 1
    for dims in ((2, 3), (2, 3), (1, 6), (3, 2)):  # 6 rows each: one problem, whatever the shape
        check(made, behind, *dims, K)
    assert (library().fake_lt_products(), library().fake_lt_choices()) == (12, 1)
    made_before = library().fake_lt_created()
    check(made, behind, 2, 3, K)
    assert library().fake_lt_created() == made_before, "nothing is made in a second run, which may be captured"
    check(made, reference, 2, 51, K)
    assert library().fake_lt_products() == 15, "beyond its range the node's own kernel runs"
    call, asked = last(), Preference()
    library().fake_lt_asked(ctypes.byref(asked))
    assert (call.operation.compute, call.operation.scale) == (77, 0)
    assert (call.a.rows, call.a.columns, call.a.pitch) == (2 * N, K, 2 * N), "both parts at once"
    assert (call.b.rows, call.b.columns, call.b.pitch) == (K, 6, K)
    assert (call.d.rows, call.d.columns, call.d.pitch) == (2 * N, 6, 2 * N)
    assert (asked.workspace, asked.alignments[3]) == (32 << 20, 256)
    assert asked.reductions == 2, "partial sums stay fp32"
    assert asked.alignments[0] == min(256, call.a_pointer & -call.a_pointer)
    assert call.d_pointer % 256 == call.workspace % 256 == 0
    assert call.workspace >= call.d_pointer + 4 * 6 * 2 * N
    assert call.workspace_bytes == 1000
    del made
    gc.collect()
    assert (library().fake_lt_handles(), library().fake_lt_alive()) == (0, 0)


def without_it() -> None:
    """A process without such a library runs the node's own kernels; one that is loaded later serves later sessions."""
    on_cpu()
    early = session(model(archive=ARCHIVE))
    check(early, reference, 2, 3, K)
    assert driver().fake_loads() == 1, "the kernel behind the library is not even loaded"
    library()
    check(early, reference, 2, 3, K)
    check(session(model(archive=ARCHIVE)), behind, 2, 3, K)


def refusals() -> None:
    """What the library refuses, of whatever cause, the node's own kernel computes; it is not asked again in vain."""
    on_cpu()
    library()
    os.environ["FAKE_LT_CREATE_ERROR"] = "1"
    check(session(model(archive=ARCHIVE)), reference, 2, 3, K)
    del os.environ["FAKE_LT_CREATE_ERROR"]
    made = session(model(archive=ARCHIVE))
    os.environ["FAKE_LT_REFUSE"] = "1"
    for _ in range(3):
        check(made, reference, 2, 3, K)
    assert library().fake_lt_choices() == 1
    del os.environ["FAKE_LT_REFUSE"]
    check(made, reference, 2, 3, K)
    check(made, behind, 2, 4, K)
    os.environ["FAKE_LT_MULTIPLY_ERROR"] = "13"
    check(made, reference, 2, 4, K)
    del os.environ["FAKE_LT_MULTIPLY_ERROR"]
    check(made, behind, 2, 4, K)


def bounded() -> None:
    """Sizes that never repeat leave no more behind than so many products."""
    on_cpu()
    library()
    made = session(model(archive=pack([Record(**(vars(BEHIND) | {"max_m": 2**31 - 1})), OWN])))
    for rows in range(1, 400):
        check(made, behind, 1, rows, K)
    assert library().fake_lt_choices() == 399, library().fake_lt_choices()
    assert library().fake_lt_alive() == 256 * 4, "three matrices and an operation each"
    check(made, behind, 1, 399, K)
    assert library().fake_lt_choices() == 399, library().fake_lt_choices()
    check(made, behind, 1, 1, K)
    assert library().fake_lt_choices() == 400


def contexts() -> None:
    """A handle for each context, which all nodes there share."""
    on_cpu()
    library()
    made = session(model(nodes=2, archive=ARCHIVE))
    for context, handles in ((0x2000, 2), (0x1000, 2), (0x3000, 3)):
        driver().fake_set_context(ctypes.c_void_p(context))
        check(made, behind, 2, 3, K)
        assert library().fake_lt_handles() == handles
    assert library().fake_lt_choices() == 3
    driver().fake_set_context(ctypes.c_void_p(0x1000))
    other = session(model(archive=ARCHIVE))
    check(other, behind, 2, 3, K)
    assert library().fake_lt_handles() == 3


def threads() -> None:
    on_cpu()
    library()
    made = session(model(nodes=2, archive=ARCHIVE))
    in_threads(made, behind)
    assert library().fake_lt_handles() == 3


def no_memory() -> None:
    """A product that scratch memory does not hold is computed without any."""
    on_cpu()
    library()
    wide = 2**22  # 16 MiB of one row of a part
    own = Record(**(vars(OWN) | {"entry": "fake_p3_l0", "load_alignments": ()}))
    taken = Record(**(vars(own) | {"entry": "fake_p0_l3", "load_alignments": (4,) * 3, "library": Library.TF32}))
    proto = onnx.load_from_string(model(archive=pack([taken, own]), dims=(None, None, None)))
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((1, 3 * wide), np.float32), "w"))
    attributes = ATTRIBUTES | {
        "axes": "b m k, k (p n) -> b m n", "sizes": f"n={wide} p=3", "in_types": "f32,f32",
        "arguments": "lhs=0 rhs=1[p=0],1[p=1],1[p=2] outs=0",
    }  # fmt: skip
    node = helper.make_node("FusedGemm", ["kernels", "x", "w"], ["y0"], "site0", domain="onnxfuse", **attributes)
    proto.graph.node[0].CopyFrom(node)
    made = session(proto.SerializeToString(), arena=False)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + 10 * 4 * wide  # the output of four rows and its copy, but not their product
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for rows, expected in ((1, 1 + 3 * 2), (4, 2**3)):
        (y,) = made.run(None, {"x": np.full((1, rows, 1), 2, np.float32)})
        assert (y == expected).all()
        del y


def sixteen_bit() -> None:
    """Types as the library knows them; what the stand-in's kernels are given they do not touch."""
    on_cpu()
    library()
    for kind, element, math, name in ((2, TensorProto.FLOAT16, Library.F16, "f16"),
                                      (14, TensorProto.BFLOAT16, Library.BF16, "bf16")):  # fmt: skip
        changes = {"entry": "fake_p9_l0", "lhs_alignment": 2, "rhs_alignment": 2, "out_alignments": (2,)}
        own = Record(**(vars(OWN) | changes | {"load_alignments": (2, 2)}))
        taken = Record(**(vars(own) | {"load_alignments": (2,) * 4, "library": math}))
        types = {"in_types": f"{name},{name},{name}", "out_types": name}
        proto = onnx.load_from_string(model(archive=pack([taken, own]), **types))
        proto.graph.input[0].type.tensor_type.elem_type = proto.graph.output[0].type.tensor_type.elem_type = element
        for tensor in proto.graph.initializer[:2]:
            shape = list(tensor.dims)
            tensor.Clear()
            values = [0] * int(np.prod(shape))
            tensor.CopyFrom(helper.make_tensor("w" if len(shape) == 2 else "bias", element, shape, values))
        made = session(proto.SerializeToString())
        before = library().fake_lt_products()
        x = np.ones((2, 3, K), np.uint16)
        value = bridge_session.onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(x, element)
        binding = made.io_binding()
        binding.bind_ortvalue_input("x", value)
        binding.bind_output("y0")
        made.run_with_iobinding(binding)
        assert library().fake_lt_products() == before + 1
        call = last()
        assert (call.operation.compute, call.operation.scale) == (68, 0)
        assert (call.a.type, call.b.type, call.d.type) == (kind,) * 3
        assert call.d.pitch == 2 * N


def main() -> None:
    """One case."""
    bridge_session.LIBRARY = sys.argv[2]
    end_with(globals()[sys.argv[1]])


if __name__ == "__main__":
    main()
