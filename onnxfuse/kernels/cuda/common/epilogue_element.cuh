// The epilogue of one element: operands are read and outputs written element by element, straight from and to memory.
#pragma once
#include "common/arguments.cuh"
#include "common/ptx.cuh"
#include "common/addressing.cuh"

namespace onnxfuse {

template <typename T>
__device__ __forceinline__ float read_element(const T* element) {
  return to_float(load_global<Packed<T, 1>>(element).values[0]);
}

template <typename Access>
__device__ __forceinline__ float read_operand(const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer, int batch,
                                              int row, int column) {
  const bool by_row = Access::KIND == Kind::column || Access::KIND == Kind::tile;
  const bool by_column = Access::KIND == Kind::row || Access::KIND == Kind::tile;
  return read_element(element_of<Access>(tensor, outer, batch, by_row ? row : 0, by_column ? column : 0));
}

template <typename T>
__device__ __forceinline__ Packed<T, 1> from_float(float value) {
  Packed<T, 2> pair;
  store_pair(pair.values, value, value);
  return {{pair.values[0]}};
}

// Operands of one element of every output.
struct Operands {
  float values[LOADS + 1];

  __device__ __forceinline__ Operands(const OnnxfuseArguments& args, int batch, int row, int column) {
    static_for<0, LOADS>([&](auto index) {
      constexpr int I = decltype(index)::value;
      values[I] = read_operand<Load<I>>(args.loads[I], args.loads_outer[I], batch, row, column);
    });
  }
};

// One element of every output.
__device__ __forceinline__ void store_outputs(const float (&acc)[PARTS], const Operands& operands,
                                              const OnnxfuseArguments& args, int batch, int row, int column) {
  float results[OUTS];
  Epilogue::apply(acc, operands.values, results);
  static_for<0, OUTS>([&](auto index) {
    constexpr int I = decltype(index)::value;
    using T = typename Out<I>::Type;
    T* element = element_of<Out<I>>(args.outs[I], args.outs_outer[I], batch, row, column);
    store_global(element, from_float<T>(results[I]));
  });
}

}  // namespace onnxfuse
