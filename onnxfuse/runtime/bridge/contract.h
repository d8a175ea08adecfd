// The contract of a fused node, read from its attributes. Pure: no runtime, no driver. Their grammar is documented in
// onnxfuse/lowering/fused_node.py.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/common/arguments.cuh"

namespace onnxfuse {

// The attributes as the node carries them. `in_types` may be empty.
struct NodeText {
  std::string kernel, axes, sizes, problem, arguments, out_types, in_types, original;
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

// Axes, outermost first. Those of a dimension may be a window of it, which then has `whole` elements.
struct Group : std::vector<int> {
  using vector::vector;
  int64_t whole = kUnknown;
};

struct Axis {
  std::string name;
  int64_t size = kUnknown;   // static size
};

// One argument of the kernel: a tensor, or index `part` along axis `part_axis` of it, or the window that begins at
// element `start` of its wide dimension.
struct Reference {
  int tensor = 0;
  int part_axis = kNone;
  int64_t part = 0;
  int64_t start = 0;
};

// An attribute of the op that a node stands for.
struct OriginalAttribute {
  std::string name;
  bool is_integer;
  int64_t integer;
  float number;
};

// Which size of a run decides which kernel it takes.
enum class ChosenBy { kRows, kColumns, kBatches };

struct Contract {
  std::string kernel;
  std::vector<Axis> axes;
  std::vector<std::vector<Group>> inputs;    // [tensor][dimension]
  std::vector<std::vector<Group>> outputs;
  Group batch, heads, m, n, k, o;   // heads and o of an attention alone
  Reference lhs;   // means nothing without a product
  std::vector<Reference> rhs, loads, outs;
  std::vector<Reference> scales, zero_points;   // of a quantized rhs, one for each part; zero points may be implied
  std::vector<const ElementType*> out_types, in_types;   // in_types may be empty
  std::vector<OriginalAttribute> original;   // of a node over a cache alone
  ChosenBy chosen_by = ChosenBy::kRows;

  // Whether the kernel multiplies; otherwise it only does what follows a product, and there is neither lhs nor rhs.
  bool has_product() const { return !rhs.empty(); }

  // Whether rhs is packed integers, [n, blocks of k, bytes].
  bool is_quantized() const { return !scales.empty(); }

  // Whether it is two products with a softmax between: of q and the keys, and of that and the values, [n, o].
  bool is_attention() const { return !o.empty(); }

  // Whether it is one token over a cache of keys and values; cached_attention.h tells what its loads are.
  bool is_cached() const { return !original.empty(); }
};

// Throws Error naming the attribute and the text at fault.
Contract parse_contract(const NodeText& node);

// The dimension of a tensor that is read through a window, or nullptr.
const Group* wide_dimension(const std::vector<Group>& dims);

bool contains(const Group& group, int axis);

}  // namespace onnxfuse
