#include "copied_lhs.h"

#include <algorithm>
#include <limits>

namespace onnxfuse {
namespace {

constexpr int64_t kLine = 128, kChunk = 16;   // bytes
constexpr int kMaxGridZ = 65535;

int64_t parts_of(int64_t value, int64_t step) { return (value + step - 1) / step; }

// Elements from row to row of the copy.
int64_t pitch_of(const OnnxfuseArguments& arguments, int64_t element_bytes) {
  return parts_of(arguments.k * element_bytes, kLine) * kLine / element_bytes;
}

int64_t batches_of(const OnnxfuseArguments& arguments) { return arguments.lhs.batch_stride == 0 ? 1 : arguments.batch; }

// Threads that copy a batch.
int64_t chunks_of(const OnnxfuseArguments& arguments, int64_t element_bytes) {
  return arguments.m * parts_of(arguments.k * element_bytes, kChunk);
}

}  // namespace

bool can_copy_lhs(const OnnxfuseArguments& arguments, int64_t element_bytes) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();   // the kernel counts threads and a row's bytes in 32 bits
  const OnnxfuseOuter& outer = arguments.lhs_outer;
  const bool plain = outer.rows >= arguments.m && outer.columns >= arguments.k && outer.batches >= arguments.batch;
  int64_t bytes = 0;
  const bool dense = arguments.lhs.column_stride == 1 || arguments.k == 1;
  return plain && dense && arguments.k * element_bytes <= kMost &&
         chunks_of(arguments, element_bytes) <= kMost - int64_t{kCopyThreads} &&
         !__builtin_mul_overflow(arguments.m * pitch_of(arguments, element_bytes) * element_bytes,
                                 batches_of(arguments), &bytes);
}

int64_t lhs_copy_bytes(const OnnxfuseArguments& arguments, int64_t element_bytes) {
  return arguments.m * pitch_of(arguments, element_bytes) * element_bytes * batches_of(arguments);
}

OnnxfuseArguments with_lhs_at(const OnnxfuseArguments& arguments, int64_t element_bytes, void* memory) {
  OnnxfuseArguments result = arguments;
  const int64_t pitch = pitch_of(arguments, element_bytes);
  result.lhs = {memory, arguments.lhs.batch_stride == 0 ? 0 : arguments.m * pitch, pitch, 1};
  return result;
}

OnnxfuseArguments copying(const OnnxfuseArguments& arguments, const OnnxfuseArguments& behind) {
  OnnxfuseArguments result{};
  result.lhs = arguments.lhs;
  result.outs[0] = behind.lhs;
  result.m = arguments.m;
  result.k = arguments.k;
  result.batch = static_cast<int>(batches_of(arguments));
  return result;
}

Driver::Grid copy_grid(const OnnxfuseArguments& copy, int64_t element_bytes) {
  const int64_t blocks = parts_of(chunks_of(copy, element_bytes), kCopyThreads);
  return {static_cast<unsigned>(blocks), static_cast<unsigned>(std::min(copy.batch, kMaxGridZ))};
}

}  // namespace onnxfuse
