// What a thread of the kernels without a product reads of a span: SPAN neighbours of each load.
#pragma once
#include "common/in_turns.cuh"
#include "common/span.cuh"

namespace onnxfuse {

// Of the loads FIRST .. COUNT - 1.
template <int FIRST, int COUNT>
struct Operands : Operands<FIRST, COUNT - 1> {
  Span<Load<COUNT - 1>> own;
};
template <int FIRST>
struct Operands<FIRST, FIRST> {};

template <int INDEX, int FIRST>
__device__ __forceinline__ auto& own_span(Operands<FIRST, LOADS>& operands) {
  return static_cast<Operands<FIRST, INDEX + 1>&>(operands).own;
}

template <int INDEX, int FIRST>
__device__ __forceinline__ void read_alone(Operands<FIRST, LOADS>& operands, const OnnxfuseArguments& args, int batch,
                                           int row, int column) {
  const auto& tensor = args.loads[INDEX];
  const auto& outer = args.loads_outer[INDEX];
  with_way<Load<INDEX>>(args, tensor, outer, [&](auto way) {
    read_span<decltype(way)>(own_span<INDEX>(operands), tensor, outer, batch, row, column, args.n - column);
  });
}

// Body(index) of every load that is in turn with the one that leads.
template <int LEADER, int FIRST, typename Body>
__device__ __forceinline__ void for_each_in_turn(const Body& body) {
  static_for<FIRST, LOADS>([&](auto index) {
    if constexpr (IN_TURNS<Load<decltype(index)::value>> && Load<decltype(index)::value>::LEADER == LEADER) body(index);
  });
}

template <int LEADER, int FIRST>
__device__ __forceinline__ void read_turns(Operands<FIRST, LOADS>& operands, const OnnxfuseArguments& args, int batch,
                                           int row, int column) {
  const auto& tensor = args.loads[LEADER];
  if (!is_legal_in_turns<Load<LEADER>>(tensor)) {
    for_each_in_turn<LEADER, FIRST>(
        [&](auto index) { read_alone<decltype(index)::value>(operands, args, batch, row, column); });
    return;
  }
  const auto take = [&](auto part, int element, auto value) {
    constexpr int PART = decltype(part)::value;
    for_each_in_turn<LEADER, FIRST>([&](auto index) {
      constexpr int I = decltype(index)::value;
      if constexpr (Load<I>::TURN == PART) own_span<I>(operands).at(element) = value;
    });
  };
  read_in_turns<Load<LEADER>>(tensor, args.loads_outer[LEADER], batch, row, column, args.n - column, take);
}

// As wide as the tensor varies along the columns; what is in turn is read by the load that leads.
template <int INDEX, int FIRST>
__device__ __forceinline__ void read_operand(Operands<FIRST, LOADS>& operands, const OnnxfuseArguments& args, int batch,
                                             int row, int column) {
  using Own = Load<INDEX>;
  if constexpr (!varies_along_columns(Own::KIND)) {
    own_span<INDEX>(operands).chunks[0] = load_global<Packed<typename Own::Type, 1>>(
        element_of<Own>(args.loads[INDEX], args.loads_outer[INDEX], batch, row, 0));
  } else if constexpr (!IN_TURNS<Own>) {
    read_alone<INDEX>(operands, args, batch, row, column);
  } else if constexpr (Own::LEADER == INDEX) {
    read_turns<INDEX>(operands, args, batch, row, column);
  }
}

}  // namespace onnxfuse
