// The same as hopper/swapped.cuh, of a weight with n contiguous whose elements have 32 bits.
#pragma once
#include "hopper/swapped_fragments.cuh"
#include "hopper/block.cuh"
