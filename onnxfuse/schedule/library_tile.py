"""The library's product and the kernel behind it: what the text of that kernel depends on, and its tiles."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.ir.fusion import Step
from onnxfuse.schedule.kernel_spec import Access, KernelSpec, QuantizedAccess
from onnxfuse.schedule.pointwise_tile import PointwiseSpec, PointwiseTile


@dataclass(frozen=True)
class LibraryTile:
    """The shape of one thread block's work, behind the product."""

    pointwise: PointwiseTile

    @property
    def block_m(self) -> int:
        """Rows of the tile."""
        return self.pointwise.block_m

    @property
    def block_n(self) -> int:
        """Columns of the tile."""
        return self.pointwise.block_n

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return self.pointwise.threads

    def __str__(self) -> str:
        return f"cuBLASLt + epilogue {self.block_m}x{self.block_n}"


@dataclass(frozen=True)
class LibrarySpec:
    """A product that the library makes, and the kernel that reads its parts as its first loads."""

    product: KernelSpec
    epilogue: PointwiseSpec

    @property
    def factors(self) -> tuple[Access, ...]:
        """None that a kernel reads."""
        return ()

    @property
    def factor_alignments(self) -> tuple[int, int]:
        """Bytes of an element: the library takes any address of one."""
        return self.product.dtype.bytes, self.product.dtype.bytes

    @property
    def quantized_access(self) -> QuantizedAccess | None:
        """None: the library multiplies floats alone."""
        return None

    @property
    def library(self) -> str:
        """How the library multiplies."""
        return self.product.math

    @property
    def math(self) -> str:
        """How the library multiplies."""
        return self.product.math

    @property
    def loads(self) -> tuple[Access, ...]:
        """The parts of the product, and what the node's epilogue loads."""
        return self.epilogue.loads

    @property
    def outs(self) -> tuple[Access, ...]:
        """The stored tensors."""
        return self.epilogue.outs

    @property
    def steps(self) -> tuple[Step, ...]:
        """The epilogue."""
        return self.epilogue.steps

    @property
    def checked(self) -> bool:
        """As the kernel behind the product is."""
        return self.epilogue.checked

    @property
    def checks_outs(self) -> bool:
        """As of the kernel behind the product."""
        return self.epilogue.checks_outs
