// What a thread of the kernels without a product stores of a span: SPAN neighbours of each output.
#pragma once
#include "common/span.cuh"

namespace onnxfuse {

template <int INDEX>
struct Results : Results<INDEX - 1> {
  Span<Out<INDEX - 1>> own;
};
template <>
struct Results<0> {};

__device__ __forceinline__ void round_results(Results<OUTS>& results, int element, const float (&values)[OUTS]) {
  static_for<0, OUTS>([&](auto index) {
    constexpr int I = decltype(index)::value;
    round_into(static_cast<Results<I + 1>&>(results).own, element, values[I]);
  });
}

__device__ __forceinline__ void store_results(const Results<OUTS>& results, const OnnxfuseArguments& args, int batch,
                                              int row, int column) {
  static_for<0, OUTS>([&](auto index) {
    constexpr int I = decltype(index)::value;
    write_span(static_cast<const Results<I + 1>&>(results).own, args.outs[I], args.outs_outer[I], batch, row, column,
               args.n - column);
  });
}

}  // namespace onnxfuse
