#include "axes.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <optional>
#include <ostream>

#include "error.h"

namespace onnxfuse {
namespace {

constexpr int kMostLevels = 2;   // in which a kernel walks a loop: runs, and within a run

// A tensor, or one dimension of it, for messages. Its text is made only when something is wrong: Compute passes these.
struct Place {
  const char* kind;
  size_t tensor;
  int dimension = kNone;
};

std::ostream& operator<<(std::ostream& stream, const Place& place) {
  if (place.dimension != kNone) stream << "dimension " << place.dimension << " of ";
  return stream << place.kind << ' ' << place.tensor;
}

std::string dimension_text(const Contract& contract, const Group& group) {
  if (group.size() == 1) return contract.axes[group[0]].name;
  std::string names;
  for (int axis : group) names += (names.empty() ? "" : " ") + contract.axes[axis].name;
  return group.empty() ? "1" : "(" + names + ")";
}

int64_t multiply(int64_t left, int64_t right, const char* what) {
  int64_t product = 0;
  if (__builtin_mul_overflow(left, right, &product)) fail(what, " does not fit in 64 bits");
  return product;
}

struct GroupSize {
  int64_t known = 1;   // product of the sizes that are known
  int unknown = kNone;
  int unknown_count = 0;
};

GroupSize group_size(const Group& group, const Sizes& sizes) {
  GroupSize result;
  for (int axis : group) {
    if (sizes[axis] == kUnknown) {
      result.unknown = axis;
      ++result.unknown_count;
    } else {
      result.known = multiply(result.known, sizes[axis], "the size of a dimension");
    }
  }
  return result;
}

std::string sizes_text(const Contract& contract, const Group& group, const Sizes& sizes) {
  std::string result;
  for (int axis : group) {
    result += text(result.empty() ? "" : ", ", contract.axes[axis].name, "=");
    result += sizes[axis] == kUnknown ? "?" : text(sizes[axis]);
  }
  return result.empty() ? "size 1" : result;
}

// What one dimension of one input says about the sizes. Returns whether it said something new.
bool bind_dimension(const Contract& contract, const Group& group, int64_t dim, const Place& where, Sizes& sizes) {
  if (group.whole != kUnknown) {   // a window says nothing of its dimension, nor the dimension of it
    if (dim != group.whole) fail(where, " is ", dim, " and should be ", group.whole);
    return false;
  }
  const GroupSize size = group_size(group, sizes);
  if (size.unknown_count > 1) return false;
  if (size.unknown_count == 0) {
    if (size.known != dim) {
      fail(where, " is ", dim, " but axes ", dimension_text(contract, group), " make ", size.known, " (",
           sizes_text(contract, group, sizes), ")");
    }
    return false;
  }
  const std::string& name = contract.axes[size.unknown].name;
  if (size.known == 0) {
    if (dim != 0) fail(where, " is ", dim, " but an axis of ", dimension_text(contract, group), " is empty");
    return false;   // any size of the unknown axis fits; another input may tell it
  }
  if (dim % size.known != 0) {
    fail(where, " is ", dim, ", which ", dimension_text(contract, group), " cannot make: axis ", name,
         " would be ", dim, " / ", size.known, " (", sizes_text(contract, group, sizes), ")");
  }
  sizes[size.unknown] = dim / size.known;
  return true;
}

Sizes static_sizes(const Contract& contract) {
  Sizes sizes;
  for (const Axis& axis : contract.axes) sizes.push_back(axis.size);
  return sizes;
}

void check_ranks(const Contract& contract, const std::vector<Shape>& inputs) {
  if (inputs.size() != contract.inputs.size()) {
    fail("axes has ", contract.inputs.size(), " inputs and the node got ", inputs.size());
  }
  for (size_t input = 0; input < inputs.size(); ++input) {
    if (inputs[input].size() != contract.inputs[input].size()) {
      fail("input ", input, " has ", inputs[input].size(), " dimensions and axes gives it ",
           contract.inputs[input].size());
    }
  }
}

// Row-major strides in elements, by axis; kUnknown for an axis that the tensor lacks.
Sizes strides_of(const Contract& contract, const std::vector<Group>& dims, const Sizes& sizes) {
  Sizes strides(contract.axes.size(), kUnknown);
  int64_t stride = 1;
  for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
    const int64_t inner = stride;
    for (auto axis = dim->rbegin(); axis != dim->rend(); ++axis) {
      strides[*axis] = stride;
      stride = multiply(stride, sizes[*axis], "the number of elements of a tensor");
    }
    if (dim->whole != kUnknown) stride = multiply(inner, dim->whole, "the number of elements of a tensor");
  }
  return strides;
}

// How a loop walks a tensor: `run` steps with one stride, and the next run begins outer_stride behind it.
struct Walk {
  int64_t stride = 0, run = 1, outer_stride = 0;
};

// Whether the stride that walks `inner` walks the axis outside of it as well.
bool continues(const Sizes& sizes, const Sizes& strides, int axis, int inner) {
  if (strides[axis] == kUnknown || strides[inner] == kUnknown) return strides[axis] == strides[inner];
  return strides[axis] == strides[inner] * sizes[inner];
}

// The strides of a group of axes, outermost first; 0 where the tensor is broadcast along them. A group that one stride
// walks is one run.
Walk walk_of(const Contract& contract, const Group& group, const Sizes& sizes, const Sizes& strides, int most_levels,
             const Place& tensor) {
  Walk walk;
  const auto is_empty = [&](int axis) { return sizes[axis] == 0; };
  if (std::any_of(group.begin(), group.end(), is_empty)) return walk;
  int inner = kNone;   // the last axis passed on the way out
  int levels = 1;
  for (auto axis = group.rbegin(); axis != group.rend(); ++axis) {
    if (sizes[*axis] <= 1) continue;
    const int64_t stride = strides[*axis] == kUnknown ? 0 : strides[*axis];
    if (inner == kNone) {
      walk.stride = stride;
    } else if (!continues(sizes, strides, *axis, inner)) {
      if (++levels > most_levels) {
        fail("axes ", dimension_text(contract, group), " of ", tensor, " cannot be walked with ",
             most_levels == 1 ? "one stride" : "two strides", ": axis ", contract.axes[*axis].name,
             " is not directly outside ", contract.axes[inner].name, " (", sizes_text(contract, group, sizes), ")");
      }
      walk.outer_stride = stride;
    }
    if (levels == 1) walk.run = multiply(walk.run, sizes[*axis], "the size of a dimension");
    inner = *axis;
  }
  return walk;
}

// Every axis that the kernel does not walk must have size 1 or be fixed by the part.
void check_walked(const Contract& contract, const std::vector<Group>& dims, const Sizes& sizes,
                  const Reference& reference, std::initializer_list<const Group*> walked, const Place& tensor) {
  for (const Group& dim : dims) {
    for (int axis : dim) {
      const bool reached = std::any_of(walked.begin(), walked.end(),
                                       [&](const Group* group) { return contains(*group, axis); });
      if (!reached && axis != reference.part_axis && sizes[axis] != 1) {
        fail("axis ", contract.axes[axis].name, "=", sizes[axis], " of ", tensor, " is in no dimension of it that the ",
             "kernel walks");
      }
    }
  }
}

// Where the window of a tensor begins, which must end within its dimension.
int64_t window_offset(const Contract& contract, const Sizes& sizes, const Sizes& strides,
                      const std::vector<Group>& dims, const Reference& reference, const Place& tensor) {
  const Group* dim = wide_dimension(dims);
  if (dim == nullptr) return 0;
  const int64_t width = group_size(*dim, sizes).known;
  if (width > dim->whole || reference.start > dim->whole - width) {
    fail(tensor, " has no ", width, " elements from ", reference.start, " on in ", dimension_text(contract, *dim), ":",
         dim->whole);
  }
  return reference.start * strides[dim->back()];
}

int64_t part_offset(const Contract& contract, const Sizes& sizes, const Sizes& strides, const std::vector<Group>& dims,
                    const Reference& reference, const Place& tensor) {
  if (reference.part_axis == kNone) return window_offset(contract, sizes, strides, dims, reference, tensor);
  if (reference.part >= sizes[reference.part_axis]) {
    fail(tensor, " has no index ", reference.part, " along axis ", contract.axes[reference.part_axis].name, "=",
         sizes[reference.part_axis]);
  }
  return reference.part * strides[reference.part_axis] +
         window_offset(contract, sizes, strides, dims, reference, tensor);
}

struct LevelledTensor {
  OnnxfuseTensor tensor;
  OnnxfuseOuter outer;
};

// A loop of a tensor, and how many levels a kernel can walk it in.
struct Loop {
  const Group& axes;
  int most_levels;
};

// What a reference of the contract reads or writes.
struct Stored {
  const Reference& reference;
  const std::vector<Group>& dims;
  void* base;
  int64_t element_bytes;
  Place place;
};

// The batches of an attention: a run is the heads, or those of the keys that several heads of q share.
Walk walk_of_heads(const Contract& contract, const Sizes& sizes, const Sizes& strides, const Place& tensor) {
  const Walk batch = walk_of(contract, contract.batch, sizes, strides, 1, tensor);
  Walk heads = walk_of(contract, contract.heads, sizes, strides, kMostLevels, tensor);
  if (heads.outer_stride != 0) {
    if (heads.stride != 0) fail("the heads of ", tensor, " cannot be walked with one stride");
    heads = {heads.outer_stride, group_size(contract.heads, sizes).known / heads.run, 0};
  }
  return {heads.stride, heads.run, batch.stride};
}

LevelledTensor make_tensor(const Contract& contract, const Sizes& sizes, const Stored& stored, const Loop& rows,
                           const Loop& columns) {
  const Place& place = stored.place;
  const Sizes strides = strides_of(contract, stored.dims, sizes);
  check_walked(contract, stored.dims, sizes, stored.reference,
               {&contract.batch, &contract.heads, &rows.axes, &columns.axes}, place);
  const int64_t offset = part_offset(contract, sizes, strides, stored.dims, stored.reference, place);
  OnnxfuseTensor result;
  // Integer arithmetic: the base of an empty tensor may be null.
  result.pointer = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(stored.base) + offset * stored.element_bytes);
  const Walk row = walk_of(contract, rows.axes, sizes, strides, rows.most_levels, place);
  const Walk column = walk_of(contract, columns.axes, sizes, strides, columns.most_levels, place);
  const Walk batch = contract.is_attention() ? walk_of_heads(contract, sizes, strides, place)
                                             : walk_of(contract, contract.batch, sizes, strides, kMostLevels, place);
  result.batch_stride = batch.stride;
  result.row_stride = row.stride;
  result.column_stride = column.stride;
  // Runs are no longer than their loop, which set_problem found to fit.
  return {result, {row.outer_stride, column.outer_stride, batch.outer_stride, static_cast<int>(row.run),
                   static_cast<int>(column.run), static_cast<int>(batch.run)}};
}

void set_keys_and_values(const LevelledTensor& keys, const LevelledTensor& values, OnnxfuseArguments* arguments) {
  arguments->rhs[0] = keys.tensor;
  arguments->rhs[1] = values.tensor;
  arguments->rhs_outer = keys.outer;
  arguments->values_outer = values.outer;
}

// The axes of a tensor that are neither columns nor parts: blocks of k, bytes of a block.
Group stored_depth(const Contract& contract, const Reference& reference) {
  Group depth;
  for (const Group& dim : contract.inputs[reference.tensor]) {
    for (int axis : dim) {
      if (axis != reference.part_axis && !contains(contract.n, axis)) depth.push_back(axis);
    }
  }
  return depth;
}

// A tensor of a quantized rhs, [n, depth], and how many elements of it one column has.
struct StoredColumns {
  LevelledTensor tensor;
  int64_t depth;
};

// Kernels step through a column element by element, and from one column to the next over all of it.
void check_columns_lie_dense(const StoredColumns& columns, int n, const Reference& reference) {
  const OnnxfuseTensor& tensor = columns.tensor.tensor;
  const bool dense = columns.tensor.outer.rows == columns.depth && (columns.depth == 1 || tensor.row_stride == 1) &&
                     (n == 1 || tensor.column_stride == columns.depth);
  if (!dense) fail("input ", reference.tensor, ", of a quantized weight, does not hold one column behind the other");
}

int extent(const Group& group, const Sizes& sizes, const char* name) {
  const int64_t size = group_size(group, sizes).known;
  if (size > std::numeric_limits<int>::max()) fail(name, "=", size, " does not fit in 32 bits");
  return static_cast<int>(size);
}

bool same_group(const Group& left, const Group& right) {
  return !left.empty() && left == right && left.whole == right.whole;
}

// The symbol of an input's dimension that is made of exactly these axes.
std::string symbol_of(const Contract& contract, const std::vector<std::vector<SymbolicDim>>& inputs,
                      const Group& group) {
  for (size_t input = 0; input < inputs.size(); ++input) {
    const std::vector<Group>& dims = contract.inputs[input];
    if (inputs[input].size() != dims.size()) continue;
    for (size_t dim = 0; dim < dims.size(); ++dim) {
      if (same_group(dims[dim], group) && !inputs[input][dim].symbol.empty()) return inputs[input][dim].symbol;
    }
  }
  return "";
}

// Learns what it can and never complains: a contradiction is reported by the run, with the sizes of the run.
Sizes infer_sizes(const Contract& contract, const std::vector<std::vector<SymbolicDim>>& inputs) {
  Sizes sizes = static_sizes(contract);
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t input = 0; input < std::min(inputs.size(), contract.inputs.size()); ++input) {
      const std::vector<Group>& dims = contract.inputs[input];
      if (inputs[input].size() != dims.size()) continue;
      for (size_t dim = 0; dim < dims.size(); ++dim) {
        if (inputs[input][dim].size < 0) continue;
        try {
          changed |= bind_dimension(contract, dims[dim], inputs[input][dim].size, Place{"input", input}, sizes);
        } catch (const Error&) {
        }
      }
    }
  }
  return sizes;
}

// The inputs of a run as a kernel's loops see them.
struct Inputs {
  const Contract& contract;
  const Sizes& sizes;
  const std::vector<void*>& pointers;

  LevelledTensor read(const Reference& reference, const Loop& rows, const Loop& columns, int64_t size) const {
    const size_t input = static_cast<size_t>(reference.tensor);
    const Stored stored{reference, contract.inputs[input], pointers[input], size, {"input", input}};
    return make_tensor(contract, sizes, stored, rows, columns);
  }

  StoredColumns read_columns(const Reference& reference, int64_t size, int64_t n) const {
    const Group depth = stored_depth(contract, reference);
    const StoredColumns columns{read(reference, {depth, 1}, {contract.n, 1}, size), group_size(depth, sizes).known};
    check_columns_lie_dense(columns, n, reference);
    return columns;
  }
};

void set_quantized(const Inputs& inputs, const ElementBytes& bytes, OnnxfuseArguments* arguments) {
  const Contract& contract = inputs.contract;
  for (size_t i = 0; i < contract.scales.size(); ++i) {
    const StoredColumns rhs = inputs.read_columns(contract.rhs[i], bytes.rhs[i], arguments->n);
    const StoredColumns scales = inputs.read_columns(contract.scales[i], bytes.scales[i], arguments->n);
    arguments->rhs[i] = rhs.tensor.tensor;
    arguments->rhs[i].column_stride = rhs.depth;
    arguments->rhs_outer = rhs.tensor.outer;
    arguments->scales[i] = {scales.tensor.tensor.pointer, nullptr, scales.depth, 0};
    if (contract.zero_points.empty()) continue;
    const StoredColumns zero_points = inputs.read_columns(contract.zero_points[i], 1, arguments->n);
    arguments->scales[i].zero_points = zero_points.tensor.tensor.pointer;
    arguments->scales[i].zero_points_pitch = zero_points.depth;
  }
}

// Elements of a row of k with the zeros behind it, of a weight that is stored so: its last dimension is a window of k.
std::optional<int> padded_row(const Contract& contract, const Reference& reference) {
  const std::vector<Group>& dims = contract.inputs[reference.tensor];
  if (dims.empty() || dims.back().whole == kUnknown || dims.back() != contract.k) return std::nullopt;
  return static_cast<int>(std::min<int64_t>(dims.back().whole, std::numeric_limits<int>::max()));
}

void set_factors(const Inputs& inputs, const ElementBytes& bytes, OnnxfuseArguments* arguments) {
  const Contract& contract = inputs.contract;
  const Loop k{contract.k, 1}, n{contract.n, 1};
  if (contract.has_product()) {
    const LevelledTensor lhs = inputs.read(contract.lhs, {contract.m, 1}, {contract.k, kMostLevels}, bytes.lhs);
    arguments->lhs = lhs.tensor;
    arguments->lhs_outer = lhs.outer;
  }
  if (contract.is_attention()) {
    set_keys_and_values(inputs.read(contract.rhs[0], k, n, bytes.rhs[0]),
                        inputs.read(contract.rhs[1], n, {contract.o, 1}, bytes.rhs[1]), arguments);
  }
  set_quantized(inputs, bytes, arguments);
  for (size_t i = 0; i < contract.rhs.size() && !contract.is_attention() && !contract.is_quantized(); ++i) {
    const LevelledTensor rhs = inputs.read(contract.rhs[i], k, n, bytes.rhs[i]);
    arguments->rhs[i] = rhs.tensor;
    arguments->rhs_outer = rhs.outer;   // the parts lie in one tensor, or in some of the same shape
    if (const auto row = padded_row(contract, contract.rhs[i])) arguments->rhs_outer.rows = *row;   // accesses end there
  }
}

}  // namespace

std::vector<std::vector<SymbolicDim>> infer_outputs(const Contract& contract,
                                                    const std::vector<std::vector<SymbolicDim>>& inputs) {
  const Sizes sizes = infer_sizes(contract, inputs);
  std::vector<std::vector<SymbolicDim>> outputs;
  for (const std::vector<Group>& dims : contract.outputs) {
    outputs.emplace_back();
    for (const Group& group : dims) {
      const GroupSize size = group_size(group, sizes);
      const bool known = size.unknown_count == 0;
      outputs.back().push_back({known ? size.known : kUnknown, known ? "" : symbol_of(contract, inputs, group)});
    }
  }
  return outputs;
}

Sizes bind_axes(const Contract& contract, const std::vector<Shape>& inputs) {
  check_ranks(contract, inputs);
  Sizes sizes = static_sizes(contract);
  // Repeats until nothing new is learnt: a group with two unknown axes waits for an input that tells one of them. The
  // last pass learns nothing and so has compared every dimension with the final sizes.
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t input = 0; input < inputs.size(); ++input) {
      for (size_t dim = 0; dim < inputs[input].size(); ++dim) {
        const Place where{"input", input, static_cast<int>(dim)};
        changed |= bind_dimension(contract, contract.inputs[input][dim], inputs[input][dim], where, sizes);
      }
    }
  }
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    if (sizes[axis] == kUnknown) fail("no input tells the size of axis ", contract.axes[axis].name);
  }
  return sizes;
}

Shape output_shape(const Contract& contract, const Sizes& sizes, size_t output) {
  Shape shape;
  for (const Group& group : contract.outputs[output]) shape.push_back(group_size(group, sizes).known);
  return shape;
}

ElementBytes element_bytes(const Contract& contract, const std::vector<int64_t>& input_bytes) {
  ElementBytes bytes;
  if (contract.has_product()) bytes.lhs = input_bytes[contract.lhs.tensor];
  for (size_t i = 0; i < contract.rhs.size(); ++i) bytes.rhs[i] = input_bytes[contract.rhs[i].tensor];
  for (size_t i = 0; i < contract.scales.size(); ++i) bytes.scales[i] = input_bytes[contract.scales[i].tensor];
  for (size_t i = 0; i < contract.loads.size(); ++i) bytes.loads[i] = input_bytes[contract.loads[i].tensor];
  for (size_t i = 0; i < contract.outs.size(); ++i) bytes.outs[i] = contract.out_types[contract.outs[i].tensor]->bytes;
  return bytes;
}

void set_problem(const Contract& contract, const Sizes& sizes, OnnxfuseArguments* arguments) {
  const int64_t heads = group_size(contract.heads, sizes).known;
  const int64_t batch = multiply(group_size(contract.batch, sizes).known, heads, "batch");
  if (batch > std::numeric_limits<int>::max()) fail("batch=", batch, " does not fit in 32 bits");
  arguments->batch = static_cast<int>(batch);
  arguments->m = extent(contract.m, sizes, "m");
  arguments->n = extent(contract.n, sizes, "n");
  arguments->k = extent(contract.k, sizes, "k");
}

void set_tensors(const Contract& contract, const Sizes& sizes, const std::vector<void*>& inputs,
                 const std::vector<void*>& outputs, const ElementBytes& bytes, OnnxfuseArguments* arguments) {
  const Inputs read{contract, sizes, inputs};
  const Loop m{contract.m, kMostLevels}, n{contract.n, kMostLevels};
  const Loop columns = contract.is_attention() ? Loop{contract.o, 1} : n;   // of what is stored
  set_factors(read, bytes, arguments);
  for (size_t i = 0; i < contract.loads.size(); ++i) {
    const LevelledTensor load = read.read(contract.loads[i], m, n, bytes.loads[i]);
    arguments->loads[i] = load.tensor;
    arguments->loads_outer[i] = load.outer;
  }
  for (size_t i = 0; i < contract.outs.size(); ++i) {
    const Reference& reference = contract.outs[i];
    const size_t output = static_cast<size_t>(reference.tensor);
    const Stored stored{reference, contract.outputs[output], outputs[output], bytes.outs[i], {"output", output}};
    const LevelledTensor out = make_tensor(contract, sizes, stored, m, columns);
    arguments->outs[i] = out.tensor;
    arguments->outs_outer[i] = out.outer;
  }
}

}  // namespace onnxfuse
