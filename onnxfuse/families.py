"""The registry of kernel families: a row each."""

from __future__ import annotations

from onnxfuse.hopper_family import HOPPER
from onnxfuse.kernel_family import KernelFamily, ProductFamily
from onnxfuse.pointwise_family import POINTWISE
from onnxfuse.portable_family import PORTABLE
from onnxfuse.small_m_family import SMALL_M

# In the order in which a plan lists their tiles: of equals the first is taken, and the last runs everything.
PRODUCTS: tuple[ProductFamily, ...] = (SMALL_M, HOPPER, PORTABLE)
FAMILIES: tuple[KernelFamily, ...] = (*PRODUCTS, POINTWISE)
