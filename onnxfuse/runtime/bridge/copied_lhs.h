// lhs in scratch memory, with rows that begin on cache lines, for a kernel that reads it by TMA. Pure: no runtime, no
// driver.
#pragma once

#include <cstdint>

#include "driver.h"
#include "kernels/cuda/common/arguments.cuh"

namespace onnxfuse {

// The kernel that copies, in the image of the one behind it; kernels/cuda/common/copied_lhs.cuh.
constexpr char kCopyEntry[] = "onnxfuse_copy_lhs";
constexpr unsigned kCopyThreads = 256;

// Whether one stride walks each loop of lhs, its columns lie side by side, and the copy is of a possible size.
bool can_copy_lhs(const OnnxfuseArguments& arguments, int64_t element_bytes);

int64_t lhs_copy_bytes(const OnnxfuseArguments& arguments, int64_t element_bytes);

// The arguments of the kernel behind the copy, which lies at `memory`.
OnnxfuseArguments with_lhs_at(const OnnxfuseArguments& arguments, int64_t element_bytes, void* memory);

// The arguments of the kernel that copies: outs[0] is lhs of the kernel behind it. A batch that all share is copied once.
OnnxfuseArguments copying(const OnnxfuseArguments& arguments, const OnnxfuseArguments& behind);

// One thread for each 16 bytes of a batch.
Driver::Grid copy_grid(const OnnxfuseArguments& copy, int64_t element_bytes);

}  // namespace onnxfuse
