// What a node's contract means for the shapes of one run: sizes, strides, part offsets. Pure: no runtime, no driver.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "contract.h"

namespace onnxfuse {

using Sizes = std::vector<int64_t>;   // of every axis of a contract
using Shape = std::vector<int64_t>;

// A dimension that shape inference sees or tells: a size, or a symbol, or neither.
struct SymbolicDim {
  int64_t size = kUnknown;
  std::string symbol;
};

// Shapes of all outputs from what is known of the inputs before a run. Inputs whose rank does not fit tell nothing.
std::vector<std::vector<SymbolicDim>> infer_outputs(const Contract& contract,
                                                    const std::vector<std::vector<SymbolicDim>>& inputs);

// Size of every axis. Throws Error naming the axis and the sizes that disagree.
Sizes bind_axes(const Contract& contract, const std::vector<Shape>& inputs);

Shape output_shape(const Contract& contract, const Sizes& sizes, size_t output);

// Element sizes in bytes of what the arguments point to.
struct ElementBytes {
  int64_t lhs = 0, rhs[ONNXFUSE_MAX_PARTS] = {}, scales[ONNXFUSE_MAX_PARTS] = {};
  int64_t loads[ONNXFUSE_MAX_LOADS] = {}, outs[ONNXFUSE_MAX_OUTS] = {};
};

// m, n, k and batch. Throws Error when one does not fit in 32 bits.
void set_problem(const Contract& contract, const Sizes& sizes, OnnxfuseArguments* arguments);

// Strides and part offsets of every tensor over the given base pointers. Throws Error when a group of axes cannot be
// walked with one stride or, where a kernel may know how, with two.
void set_tensors(const Contract& contract, const Sizes& sizes, const std::vector<void*>& inputs,
                 const std::vector<void*>& outputs, const ElementBytes& bytes, OnnxfuseArguments* arguments);

ElementBytes element_bytes(const Contract& contract, const std::vector<int64_t>& input_bytes);

}  // namespace onnxfuse
