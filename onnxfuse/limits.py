"""What a kernel takes at most, in one place. The bridge and the CUDA text state some of it again; a test compares."""

from __future__ import annotations

MAX_PARTS = 4  # right-hand sides of one launch
MAX_LOADS = 12
MAX_OUTS = 4
MAX_MAPS = 9  # tensor maps of one launch
MAX_BOX = 256  # elements of one side of a TMA box
QUANTIZED_BITS = (4, 8)  # of one element of a quantized rhs
QUANTIZED_BLOCKS = (16, 32, 64, 128, 256)  # elements of k that share a scale
MAX_BLOCK = 1 << 16  # rows and columns of a tile, as a launch rule has them
MAX_M = 2**31 - 1  # the kernels count rows in 32 bits
WIDEST_BYTES = 16  # of one access: ld.global.v4, cp.async 16
MOST_LEVELS = 2  # strides that walk one loop of a tensor: within a run, and from run to run
STAGE_ROW_BYTES = 128  # of k in a stage of the sm_90a kernel's ring, the widest swizzle; a run of k is a multiple of it
MOST_NORMALISED = 1 << 14  # columns of a row that is normalised: the registers of 1,024 threads hold them
MOST_ACROSS = 1 << 10  # the same where those of a row lie apart, as channels of images, and rows beside each other
