#include "copied_rows.h"

#include <algorithm>
#include <limits>

namespace onnxfuse {
namespace {

constexpr int64_t kLine = 128, kChunk = 16;   // bytes
constexpr int kMaxGridZ = 65535;

// A factor as rows of the axis along which kernels read it.
struct Rows {
  OnnxfuseTensor tensor;   // [batch, rows, columns]
  int rows, columns, batches;
  int64_t bytes;           // of an element
  bool in_one_level;
  bool is_turned = false;   // the columns are what the kernel calls rows

  bool is_dense() const { return in_one_level && (tensor.column_stride == 1 || columns == 1); }
  int64_t row_bytes() const { return columns * bytes; }
  int64_t pitch() const { return parts(row_bytes(), kLine) * kLine / bytes; }   // elements from row to row of the copy
  int64_t chunks() const { return rows * parts(row_bytes(), kChunk); }          // of a batch: a thread each
  int64_t copy_bytes() const { return rows * pitch() * bytes * batches; }
  static int64_t parts(int64_t value, int64_t step) { return (value + step - 1) / step; }
};

OnnxfuseTensor turned(const OnnxfuseTensor& tensor) {
  return {tensor.pointer, tensor.batch_stride, tensor.column_stride, tensor.row_stride};
}

int batches_of(const OnnxfuseTensor& tensor, int batch) { return tensor.batch_stride == 0 ? 1 : batch; }

Rows lhs_rows(const ElementBytes& bytes, const OnnxfuseArguments& args) {
  const OnnxfuseOuter& outer = args.lhs_outer;
  const bool plain = outer.rows >= args.m && outer.columns >= args.k && outer.batches >= args.batch;
  return {args.lhs, args.m, args.k, batches_of(args.lhs, args.batch), bytes.lhs, plain};
}

// [n, k] or, where n is contiguous, [k, n].
Rows rhs_rows(const Record& record, const ElementBytes& bytes, const OnnxfuseArguments& args, size_t part) {
  const OnnxfuseOuter& outer = args.rhs_outer;
  const OnnxfuseTensor& rhs = args.rhs[part];
  const bool plain = outer.rows >= args.k && outer.columns >= args.n && outer.batches >= args.batch;
  const int batches = batches_of(rhs, args.batch);
  const int64_t size = bytes.rhs[part];
  if ((record.tensors[kRhsIndex].flags & kTransposed) == 0) return {rhs, args.k, args.n, batches, size, plain};
  return {turned(rhs), args.n, args.k, batches, size, plain, /*is_turned=*/true};
}

// What a record wants copied, in the order of the copies: lhs, the parts of rhs.
std::vector<Rows> copied(const Record& record, const Contract& contract, const ElementBytes& bytes,
                         const OnnxfuseArguments& arguments) {
  std::vector<Rows> result;
  if (record.copies(kLhsIndex)) result.push_back(lhs_rows(bytes, arguments));
  for (size_t part = 0; record.copies(kRhsIndex) && part < contract.rhs.size(); ++part) {
    result.push_back(rhs_rows(record, bytes, arguments, part));
  }
  return result;
}

Copies::Launch launch_of(const Rows& from, const OnnxfuseTensor& to) {
  Copies::Launch launch;
  launch.arguments.lhs = from.tensor;
  launch.arguments.outs[0] = to;
  launch.arguments.m = from.rows;
  launch.arguments.k = from.columns;
  launch.arguments.batch = from.batches;
  launch.blocks = static_cast<unsigned>(Rows::parts(from.chunks(), kCopyThreads));
  launch.batches = static_cast<unsigned>(std::min(from.batches, kMaxGridZ));
  return launch;
}

}  // namespace

bool can_copy(const Record& record, const Contract& contract, const ElementBytes& bytes,
              const OnnxfuseArguments& arguments) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();   // the kernel counts threads and a row's bytes in 32 bits
  const std::vector<Rows> every = copied(record, contract, bytes, arguments);
  return std::all_of(every.begin(), every.end(), [](const Rows& rows) {
    return rows.is_dense() && rows.row_bytes() <= kMost && rows.chunks() <= kMost - int64_t{kCopyThreads};
  });
}

int64_t copy_bytes(const Record& record, const Contract& contract, const ElementBytes& bytes,
                   const OnnxfuseArguments& arguments) {
  int64_t result = 0;
  for (const Rows& rows : copied(record, contract, bytes, arguments)) result += rows.copy_bytes();
  return result;
}

Copies copies_at(const Record& record, const Contract& contract, const ElementBytes& bytes,
                 const OnnxfuseArguments& arguments, void* memory) {
  Copies result;
  result.behind = arguments;
  OnnxfuseTensor* rhs = result.behind.rhs;
  uintptr_t address = reinterpret_cast<uintptr_t>(memory);
  for (const Rows& from : copied(record, contract, bytes, arguments)) {
    const int64_t pitch = from.pitch(), batch_stride = from.tensor.batch_stride == 0 ? 0 : from.rows * pitch;
    const OnnxfuseTensor to{reinterpret_cast<void*>(address), batch_stride, pitch, 1};
    if (record.copies(kLhsIndex) && result.launches.empty()) {
      result.behind.lhs = to;
    } else {
      *rhs++ = from.is_turned ? turned(to) : to;
      result.behind.rhs_ready = 0;
    }
    result.launches.push_back(launch_of(from, to));
    address += from.copy_bytes();
  }
  return result;
}

}  // namespace onnxfuse
