"""The registry of kernel families: a row each."""

from __future__ import annotations

from onnxfuse.schedule.attention import ATTENTION, PORTABLE_ATTENTION
from onnxfuse.schedule.cached_attention import CACHED_ATTENTION
from onnxfuse.schedule.group_norm import GROUP_NORM
from onnxfuse.schedule.hopper import HOPPER
from onnxfuse.schedule.hopper_quantized import HOPPER_QUANTIZED
from onnxfuse.schedule.hopper_swapped import HOPPER_SWAPPED
from onnxfuse.schedule.kernel_family import KernelFamily, ProductFamily
from onnxfuse.schedule.library import LIBRARY
from onnxfuse.schedule.norm import NORM
from onnxfuse.schedule.pointwise import POINTWISE
from onnxfuse.schedule.portable import PORTABLE
from onnxfuse.schedule.quantized_small_m import QUANTIZED_SMALL_M
from onnxfuse.schedule.small_m import SMALL_M

# In the order in which a plan lists their tiles: of equals the first is taken, and the last two run everything,
# whether rhs is quantized or not.
HOPPERS: tuple[ProductFamily, ...] = (HOPPER, HOPPER_SWAPPED, HOPPER_QUANTIZED)
PRODUCTS: tuple[ProductFamily, ...] = (SMALL_M, *HOPPERS, PORTABLE, QUANTIZED_SMALL_M)
ATTENTIONS: tuple[KernelFamily, ...] = (ATTENTION, PORTABLE_ATTENTION, CACHED_ATTENTION)
FAMILIES: tuple[KernelFamily, ...] = (*PRODUCTS, POINTWISE, NORM, GROUP_NORM, LIBRARY, *ATTENTIONS)
