#include "tensor_maps.h"

namespace onnxfuse {
namespace {

constexpr uint64_t kTmaBoundary = 16;   // bytes that every stride of a tensor map is a multiple of

// One tensor as a kernel walks it, [batch, rows, columns].
struct Operand {
  const OnnxfuseTensor& tensor;
  const OnnxfuseOuter& outer;
  int batch, rows, columns;
  int64_t bytes;   // of an element
};

Operand operand_of(const Record& record, const MapRule& rule, const ElementBytes& bytes, const OnnxfuseArguments& args,
                   bool is_attention) {
  const size_t i = rule.index;
  const int depth = record.is_quantized() ? args.rhs_outer.rows : args.k;   // bytes of a column's integers
  if (is_attention && rule.tensor == Mapped::kRhs && i == 1) {
    return {args.rhs[1], args.values_outer, args.batch, args.n, args.values_outer.columns, bytes.rhs[1]};
  }
  switch (rule.tensor) {
    case Mapped::kLhs:
      return {args.lhs, args.lhs_outer, args.batch, args.m, args.k, bytes.lhs};
    case Mapped::kRhs:
      return {args.rhs[i], args.rhs_outer, args.batch, depth, args.n, bytes.rhs[i]};
    case Mapped::kLoad:
      return {args.loads[i], args.loads_outer[i], args.batch, args.m, args.n, bytes.loads[i]};
    default:
      return {args.outs[i], args.outs_outer[i], args.batch, args.m, args.n, bytes.outs[i]};
  }
}

// Its flags in the record.
uint8_t flags_of(const Record& record, const MapRule& rule) {
  const size_t factor = rule.tensor == Mapped::kLhs ? kLhsIndex : kRhsIndex;
  if (rule.tensor == Mapped::kLoad) return record.tensors[kFirstLoad + rule.index].flags;
  return record.tensors[rule.tensor == Mapped::kOut ? kFirstOut + rule.index : factor].flags;
}

// A stride that is never stepped along may be anything, but must still be a stride.
uint64_t usable_stride(int64_t stride, int64_t bytes, uint64_t extent, uint64_t inside) {
  const uint64_t given = static_cast<uint64_t>(stride * bytes);
  return extent > 1 ? given : (inside + kTmaBoundary - 1) / kTmaBoundary * kTmaBoundary;
}

bool is_factor(const MapRule& rule) { return rule.tensor == Mapped::kLhs || rule.tensor == Mapped::kRhs; }

// [batch, rows, columns], or [batch, columns, rows] where rows are contiguous.
TensorBox plain_box(const MapRule& rule, const Operand& of) {
  const OnnxfuseTensor& tensor = of.tensor;
  const bool down = rule.rows_contiguous;
  const uint64_t inner = down ? of.rows : of.columns, outer = down ? of.columns : of.rows;
  const uint64_t batches = tensor.batch_stride == 0 ? 1 : of.batch;
  const int64_t stride = down ? tensor.column_stride : tensor.row_stride;
  const uint64_t row_bytes = usable_stride(stride, of.bytes, outer, inner * of.bytes);
  const uint64_t batch_bytes = usable_stride(tensor.batch_stride, of.bytes, batches, row_bytes * outer);
  return {tensor.pointer, of.bytes, 3, {inner, outer, batches}, {row_bytes, batch_bytes},
          {rule.box_inner, rule.box_outer, 1}, rule.swizzle, is_factor(rule)};
}

// Columns in runs: those of all batches are the map's batches, which is_stacked() saw one stride walk.
TensorBox stacked_box(const MapRule& rule, const Operand& of) {
  const uint64_t batches = of.tensor.batch_stride == 0 ? 1 : of.batch;
  const uint64_t runs = static_cast<uint64_t>(of.columns / of.outer.columns) * batches;
  const uint64_t inner = of.outer.columns, rows = of.rows;
  const uint64_t row_bytes = usable_stride(of.tensor.row_stride, of.bytes, rows, inner * of.bytes);
  const uint64_t run_bytes = usable_stride(of.outer.column_stride, of.bytes, runs, row_bytes * rows);
  return {of.tensor.pointer, of.bytes, 3, {inner, rows, runs}, {row_bytes, run_bytes},
          {rule.box_inner, rule.box_outer, 1}, rule.swizzle, is_factor(rule)};
}

// A factor or load whose batches lie in runs: [runs, batches of a run, rows, columns], the last two as in plain_box.
TensorBox batches_box(const MapRule& rule, const Operand& of) {
  const OnnxfuseOuter& outer = of.outer;
  TensorBox box = plain_box(rule, {of.tensor, outer, outer.batches, of.rows, of.columns, of.bytes});
  const uint64_t runs = outer.batch_stride == 0 ? 1 : of.batch / outer.batches;
  box.rank = 4;
  box.extents[3] = runs;
  box.strides[2] = usable_stride(outer.batch_stride, of.bytes, runs, box.strides[1] * box.extents[2]);
  box.box[3] = 1;
  return box;
}

// [batch, runs of rows, runs of columns, rows of a run, columns of a run]
TensorBox runs_box(const MapRule& rule, const Operand& of) {
  const OnnxfuseOuter& outer = of.outer;
  TensorBox box{of.tensor.pointer, of.bytes, kMaxRank,
                {static_cast<uint64_t>(outer.columns), static_cast<uint64_t>(outer.rows),
                 static_cast<uint64_t>(of.columns / outer.columns), static_cast<uint64_t>(of.rows / outer.rows),
                 static_cast<uint64_t>(of.batch)},
                {}, {rule.box_inner, rule.box_outer, 1, 1, 1}, rule.swizzle, false};
  const int64_t strides[] = {of.tensor.row_stride, outer.column_stride, outer.row_stride, of.tensor.batch_stride};
  uint64_t inside = box.extents[0] * of.bytes;
  for (size_t axis = 0; axis < kMaxRank - 1; ++axis) {
    box.strides[axis] = usable_stride(strides[axis], of.bytes, box.extents[axis + 1], inside);
    inside = box.strides[axis] * box.extents[axis + 1];
  }
  return box;
}

}  // namespace

TensorBox tensor_box(const Record& record, const MapRule& rule, const ElementBytes& bytes,
                     const OnnxfuseArguments& arguments, bool is_attention) {
  const Operand operand = operand_of(record, rule, bytes, arguments, is_attention);
  const uint8_t flags = flags_of(record, rule);
  if (rule.tensor == Mapped::kOut) {
    return (flags & (kRowsInRuns | kColumnsInRuns)) != 0 ? runs_box(rule, operand) : plain_box(rule, operand);
  }
  if ((flags & kBatchesInRuns) != 0) return batches_box(rule, operand);
  const bool in_runs = rule.tensor == Mapped::kLhs && operand.outer.columns < operand.columns;
  return in_runs ? stacked_box(rule, operand) : plain_box(rule, operand);
}

}  // namespace onnxfuse
