// What a thread of the kernels without a product stores of a span: SPAN neighbours of each output.
#pragma once
#include "common/in_turns.cuh"
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

template <int INDEX>
__device__ __forceinline__ const auto& own_span(const Results<OUTS>& results) {
  return static_cast<const Results<INDEX + 1>&>(results).own;
}

template <int INDEX>
__device__ __forceinline__ void store_alone(const Results<OUTS>& results, const OnnxfuseArguments& args, int batch,
                                            int row, int column) {
  write_span(own_span<INDEX>(results), args.outs[INDEX], args.outs_outer[INDEX], batch, row, column, args.n - column);
}

// The outputs behind the one that leads are the other parts of its tensor.
template <int LEADER>
__device__ __forceinline__ void store_turns(const Results<OUTS>& results, const OnnxfuseArguments& args, int batch,
                                            int row, int column) {
  using Own = Out<LEADER>;
  const auto& tensor = args.outs[LEADER];
  if (!is_legal_in_turns<Own>(tensor)) {
    static_for<LEADER, LEADER + Own::TURN_PARTS>(
        [&](auto index) { store_alone<decltype(index)::value>(results, args, batch, row, column); });
    return;
  }
  const auto value_of = [&](auto part, int element) {
    return own_span<LEADER + decltype(part)::value>(results).at(element);
  };
  write_in_turns<Own>(tensor, args.outs_outer[LEADER], batch, row, column, args.n - column, value_of);
}

__device__ __forceinline__ void store_results(const Results<OUTS>& results, const OnnxfuseArguments& args, int batch,
                                              int row, int column) {
  static_for<0, OUTS>([&](auto index) {
    constexpr int I = decltype(index)::value;
    if constexpr (!IN_TURNS<Out<I>>) {
      store_alone<I>(results, args, batch, row, column);
    } else if constexpr (Out<I>::LEADER == I) {
      store_turns<I>(results, args, batch, row, column);
    }
  });
}

}  // namespace onnxfuse
