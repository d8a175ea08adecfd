// The functor of the epilogue on what a thread of mma and of wgmma holds of a row: 2 adjacent columns.
#pragma once

namespace onnxfuse {

__device__ __forceinline__ void apply_to_pair(const float2 (&acc)[PARTS], const float2 (&operands)[LOADS + 1],
                                              float2 (&results)[OUTS]) {
  float first_acc[PARTS], second_acc[PARTS], first_operands[LOADS + 1], second_operands[LOADS + 1];
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    first_acc[part] = acc[part].x;
    second_acc[part] = acc[part].y;
  }
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    first_operands[load] = operands[load].x;
    second_operands[load] = operands[load].y;
  }
  float first_results[OUTS], second_results[OUTS];
  Epilogue::apply(first_acc, first_operands, first_results);
  Epilogue::apply(second_acc, second_operands, second_results);
#pragma unroll
  for (int out = 0; out < OUTS; ++out) results[out] = make_float2(first_results[out], second_results[out]);
}

}  // namespace onnxfuse
