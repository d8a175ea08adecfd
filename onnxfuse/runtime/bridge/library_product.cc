#include "library_product.h"

#include <algorithm>
#include <iterator>

namespace onnxfuse {
namespace {

constexpr int64_t kPitchBytes = 16;   // of the product's rows: as the widest accesses want it

int64_t rounded_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

int64_t alignment_of(uintptr_t address) {
  const uintptr_t lowest_bit = address & -address;
  return address == 0 ? kScratchAlignment : std::min<int64_t>(static_cast<int64_t>(lowest_bit), kScratchAlignment);
}

struct Strides {
  int64_t rows, columns, batches;
};

// [rows, columns] as one of the two orders of a matrix. A stride that is never stepped along says nothing.
std::optional<Matrix> matrix_of(int64_t rows, int64_t columns, const Strides& strides, const void* pointer) {
  Matrix result;
  result.batch_stride = strides.batches;
  result.alignment = alignment_of(reinterpret_cast<uintptr_t>(pointer));
  if ((strides.columns == 1 || columns == 1) && (strides.rows >= columns || rows == 1)) {
    result.pitch = rows == 1 ? columns : strides.rows;
    return result;
  }
  if ((strides.rows == 1 || rows == 1) && (strides.columns >= rows || columns == 1)) {
    result.pitch = columns == 1 ? rows : strides.columns;
    result.transposed = 1;
    return result;
  }
  return std::nullopt;
}

Strides strides_of(const OnnxfuseTensor& tensor) {
  return {tensor.row_stride, tensor.column_stride, tensor.batch_stride};
}

// Whether the parts are column ranges of one matrix, each right behind the one before it.
bool lie_side_by_side(const Contract& contract, const ElementBytes& bytes, const OnnxfuseArguments& arguments) {
  const OnnxfuseTensor& first = arguments.rhs[0];
  for (size_t part = 1; part < contract.rhs.size(); ++part) {
    const OnnxfuseTensor& rhs = arguments.rhs[part];
    const int64_t step = int64_t{arguments.n} * first.column_stride * bytes.rhs[0];
    // Integer arithmetic: the parts may lie in tensors of their own.
    const uintptr_t distance = reinterpret_cast<uintptr_t>(rhs.pointer) - reinterpret_cast<uintptr_t>(first.pointer);
    const bool alike = rhs.row_stride == first.row_stride && rhs.column_stride == first.column_stride &&
                       rhs.batch_stride == first.batch_stride;
    if (!alike || distance != static_cast<uintptr_t>(static_cast<int64_t>(part) * step)) return false;
  }
  return true;
}

bool is_in_one_level(const OnnxfuseArguments& arguments) {
  const OnnxfuseOuter &lhs = arguments.lhs_outer, &rhs = arguments.rhs_outer;
  return lhs.rows >= arguments.m && lhs.columns >= arguments.k && lhs.batches >= arguments.batch &&
         rhs.rows >= arguments.k && rhs.columns >= arguments.n && rhs.batches >= arguments.batch;
}

// The rows of all batches as those of one, where they lie so and share rhs.
bool folds(const Contract& contract, const OnnxfuseArguments& arguments) {
  const auto is_shared = [](const OnnxfuseTensor& rhs) { return rhs.batch_stride == 0; };
  const OnnxfuseTensor& lhs = arguments.lhs;
  return arguments.batch > 1 && std::all_of(arguments.rhs, arguments.rhs + contract.rhs.size(), is_shared) &&
         lhs.batch_stride != 0 && (arguments.m == 1 || lhs.batch_stride == arguments.m * lhs.row_stride);
}

// The product but for n and rhs.
std::optional<Product> with_lhs(const Record& record, const Contract& contract, const OnnxfuseArguments& arguments) {
  Product product;
  product.math = static_cast<int64_t>(record.library);
  product.k = arguments.k;
  Strides strides = strides_of(arguments.lhs);
  const bool folded = folds(contract, arguments);
  if (folded && arguments.m == 1) strides.rows = strides.batches;
  product.m = int64_t{arguments.m} * (folded ? arguments.batch : 1);
  product.batch = folded ? 1 : arguments.batch;
  if (product.batch == 1) strides.batches = 0;
  const auto lhs = matrix_of(product.m, product.k, strides, arguments.lhs.pointer);
  if (!lhs) return std::nullopt;
  product.lhs = *lhs;
  return product;
}

}  // namespace

std::optional<LibraryProducts> library_products(const Record& record, const Contract& contract,
                                                const ElementBytes& bytes, const OnnxfuseArguments& arguments) {
  if (arguments.k == 0 || !is_in_one_level(arguments)) return std::nullopt;
  const auto base = with_lhs(record, contract, arguments);
  if (!base) return std::nullopt;
  const bool joint = lie_side_by_side(contract, bytes, arguments);
  const int64_t parts = static_cast<int64_t>(contract.rhs.size()), n = arguments.n, element = bytes.lhs;
  const int64_t multiple = kPitchBytes / element;
  const int64_t part_columns = joint ? n : rounded_up(n, multiple);
  LibraryProducts result;
  result.row_stride = rounded_up(part_columns * parts, multiple);
  if (__builtin_mul_overflow(result.row_stride, int64_t{arguments.m}, &result.batch_stride) ||
      __builtin_mul_overflow(result.batch_stride, arguments.batch * element, &result.bytes)) {
    return std::nullopt;
  }
  result.count = joint ? 1 : contract.rhs.size();
  for (int64_t part = 0; part < parts; ++part) result.part_offsets[part] = part * part_columns * element;
  for (size_t i = 0; i < result.count; ++i) {
    PlacedProduct& placed = result.products[i];
    placed.product = *base;
    placed.product.n = joint ? n * parts : n;
    Strides strides = strides_of(arguments.rhs[i]);
    if (base->batch == 1) strides.batches = 0;
    const auto rhs = matrix_of(base->k, placed.product.n, strides, arguments.rhs[i].pointer);
    if (!rhs) return std::nullopt;
    placed.product.rhs = *rhs;
    placed.out_offset = result.part_offsets[i];
    const int64_t out_batches = base->batch == 1 ? 0 : result.batch_stride;
    placed.product.out = {result.row_stride, out_batches, 0, alignment_of(static_cast<uintptr_t>(placed.out_offset))};
    placed.lhs = arguments.lhs.pointer;
    placed.rhs = arguments.rhs[i].pointer;
  }
  return result;
}

OnnxfuseArguments behind_library(const LibraryProducts& products, const Contract& contract,
                                 const OnnxfuseArguments& arguments, void* scratch) {
  OnnxfuseArguments result = arguments;
  const size_t parts = contract.rhs.size();
  std::copy(arguments.loads, arguments.loads + contract.loads.size(), result.loads + parts);
  std::copy(arguments.loads_outer, arguments.loads_outer + contract.loads.size(), result.loads_outer + parts);
  for (size_t part = 0; part < parts; ++part) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(scratch) + products.part_offsets[part];
    result.loads[part] = {reinterpret_cast<void*>(address), products.batch_stride, products.row_stride, 1};
    result.loads_outer[part] = {0, 0, 0, arguments.m, arguments.n, arguments.batch};
  }
  result.lhs = OnnxfuseTensor{};
  result.lhs_outer = result.rhs_outer = OnnxfuseOuter{};
  std::fill(std::begin(result.rhs), std::end(result.rhs), OnnxfuseTensor{});
  result.k = 0;
  return result;
}

ElementBytes behind_library(const Contract& contract, const ElementBytes& bytes) {
  ElementBytes result = bytes;
  const size_t parts = contract.rhs.size();
  std::copy(bytes.loads, bytes.loads + contract.loads.size(), result.loads + parts);
  std::fill(result.loads, result.loads + parts, bytes.lhs);
  return result;
}

}  // namespace onnxfuse
