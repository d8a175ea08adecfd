// The contract of a fused node, read from its attributes, and what it means for the shapes of one run. Pure: no runtime,
// no driver. onnxfuse/artifact.py documents the grammar.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/arguments.cuh"

namespace onnxfuse {

// The attributes as the node carries them. `in_types` may be empty.
struct NodeText {
  std::string kernel, axes, sizes, problem, arguments, out_types, in_types;
};

struct ElementType {
  const char* name;
  int onnx;
  int64_t bytes;
};

// nullptr when the runtime's element type cannot be an operand of a kernel.
const ElementType* element_type(int onnx);

constexpr int64_t kUnknown = -1;
constexpr int kNone = -1;

using Group = std::vector<int>;   // axes, outermost first
using Sizes = std::vector<int64_t>;
using Shape = std::vector<int64_t>;

struct Axis {
  std::string name;
  int64_t size = kUnknown;   // static size
};

// One argument of the kernel: a tensor, or index `part` along axis `part_axis` of it.
struct Reference {
  int tensor = 0;
  int part_axis = kNone;
  int64_t part = 0;
};

struct Contract {
  std::string kernel;
  std::vector<Axis> axes;
  std::vector<std::vector<Group>> inputs;    // [tensor][dimension]
  std::vector<std::vector<Group>> outputs;
  Group batch, m, n, k;
  Reference lhs;
  std::vector<Reference> rhs, loads, outs;
  std::vector<const ElementType*> out_types, in_types;   // in_types may be empty
};

// Throws Error naming the attribute and the text at fault.
Contract parse_contract(const NodeText& node);

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
  int64_t lhs = 0, rhs[ONNXFUSE_MAX_PARTS] = {}, loads[ONNXFUSE_MAX_LOADS] = {}, outs[ONNXFUSE_MAX_OUTS] = {};
};

// m, n, k and batch. Throws Error when one does not fit in 32 bits.
void set_problem(const Contract& contract, const Sizes& sizes, OnnxfuseArguments* arguments);

// Strides and part offsets of every tensor over the given base pointers. Throws Error when a group of axes cannot be
// walked with one stride.
void set_tensors(const Contract& contract, const Sizes& sizes, const std::vector<void*>& inputs,
                 const std::vector<void*>& outputs, const ElementBytes& bytes, OnnxfuseArguments* arguments);

ElementBytes element_bytes(const Contract& contract, const std::vector<int64_t>& input_bytes);

}  // namespace onnxfuse
