// The arguments of every onnxfuse GEMM kernel. This one definition is compiled by NVRTC into the kernels and by the C++
// compiler into the bridge, so the two cannot disagree. Plain C types only.
#pragma once

#define ONNXFUSE_MAX_PARTS 4
#define ONNXFUSE_MAX_LOADS 12
#define ONNXFUSE_MAX_OUTS 4

// A tensor seen as [batch, rows, columns]; strides in elements, 0 where the tensor is broadcast along that axis.
// Of an attention, lhs is q, rhs[0] the keys and rhs[1] the values, [batch, n, o]; its batches are heads, `batches` of an
// outer level's struct follow each other, and then comes the next outer batch.
struct OnnxfuseTensor {
  void* pointer;
  long long batch_stride;
  long long row_stride;
  long long column_stride;
};

// The outer level of a tensor whose rows, columns or batches no single stride walks, as those of a head-split output:
// `rows` rows lie row_stride of the tensor apart, and the next `rows` begin row_stride of this struct behind them. A
// kernel looks at it only for the tensors that it was compiled to walk in two levels.
struct OnnxfuseOuter {
  long long row_stride;
  long long column_stride;
  long long batch_stride;
  int rows;
  int columns;
  int batches;
};

// What a quantized rhs has beside its packed integers, of one part: scales [n, blocks], and zero points [n, bytes] or null;
// k runs fastest in all three. From column to column it is scales_pitch elements, zero_points_pitch bytes, and in the
// packed integers, of which an element is a byte, column_stride of rhs.
struct OnnxfuseScales {
  const void* scales;
  const void* zero_points;
  long long scales_pitch;
  long long zero_points_pitch;
};

struct OnnxfuseArguments {
  OnnxfuseTensor lhs;                         // [batch, m, k]
  OnnxfuseTensor rhs[ONNXFUSE_MAX_PARTS];     // [batch, k, n]
  OnnxfuseTensor loads[ONNXFUSE_MAX_LOADS];   // [batch, m, n]
  OnnxfuseTensor outs[ONNXFUSE_MAX_OUTS];     // [batch, m, n]
  int m;
  int n;                                      // columns of one part
  int k;
  int batch;
  OnnxfuseOuter lhs_outer;                    // of the same tensors
  OnnxfuseOuter rhs_outer;                    // of every part
  OnnxfuseOuter loads_outer[ONNXFUSE_MAX_LOADS];
  OnnxfuseOuter outs_outer[ONNXFUSE_MAX_OUTS];
  OnnxfuseOuter values_outer;                 // of rhs[1] of an attention
  OnnxfuseScales scales[ONNXFUSE_MAX_PARTS];  // of a quantized rhs
  int rhs_ready;                              // nothing of the run writes rhs: it may be read before the kernel before ends
};
