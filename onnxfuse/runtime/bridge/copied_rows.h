// Factors in scratch memory, with rows that begin on cache lines, for a kernel that reads them by TMA. Pure: no runtime,
// no driver.
#pragma once

#include <cstdint>
#include <vector>

#include "archive.h"
#include "axes.h"
#include "contract.h"
#include "kernels/cuda/common/arguments.cuh"

namespace onnxfuse {

// The kernel that copies, in the image of the one behind it; kernels/cuda/common/copied_rows.cuh.
constexpr char kCopyEntry[] = "onnxfuse_copy_rows";
constexpr unsigned kCopyThreads = 256;

// Whether of all that a record wants copied one stride walks each loop, rows are contiguous, and the copy of a possible size.
bool can_copy(const Record& record, const Contract& contract, const ElementBytes& bytes,
              const OnnxfuseArguments& arguments);

// What runs before the kernel, and the kernel's own arguments.
struct Copies {
  struct Launch {
    OnnxfuseArguments arguments{};   // lhs is what is copied, outs[0] the copy
    unsigned blocks = 0, batches = 0;   // of the grid
  };
  std::vector<Launch> launches;   // one for each factor; a batch that all share is copied once
  OnnxfuseArguments behind{};
};

// Of all copies. Only where can_copy(), as what follows.
int64_t copy_bytes(const Record& record, const Contract& contract, const ElementBytes& bytes,
                   const OnnxfuseArguments& arguments);

// The copies at `memory`, which begins on a cache line, one behind the other.
Copies copies_at(const Record& record, const Contract& contract, const ElementBytes& bytes,
                 const OnnxfuseArguments& arguments, void* memory);

}  // namespace onnxfuse
