// The pure parts of the bridge behind plain C functions, so that the Python tests can drive the code that ships.
// Every function returns 0, or 1 with the message in `error`.
#include <cstring>
#include <exception>

#include "archive.h"
#include "axes.h"
#include "choice.h"
#include "error.h"
#include "fused_kernel.h"
#include "library_product.h"
#include "ort_abi.h"
#include "tensor_maps.h"

#define ONNXFUSE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace onnxfuse;

struct Text {
  char* data;
  size_t size;
};

void put(const Text& out, const std::string& value) {
  if (out.size == 0) return;
  const size_t length = std::min(value.size(), out.size - 1);
  std::memcpy(out.data, value.data(), length);
  out.data[length] = '\0';
}

template <typename Body>
int reported(const Text& error, Body body) {
  try {
    body();
    return 0;
  } catch (const std::exception& caught) {
    put(error, caught.what());
    return 1;
  }
}

// In the order kernel, axes, sizes, problem, arguments, out_types, in_types, original.
NodeText node_text(const char* const* attributes) {
  return {attributes[0], attributes[1], attributes[2], attributes[3], attributes[4], attributes[5], attributes[6], attributes[7]};
}

std::vector<Shape> read_shapes(const int64_t* dims, const int32_t* ranks, int count) {
  std::vector<Shape> shapes;
  for (int i = 0; i < count; ++i) {
    shapes.emplace_back(dims, dims + ranks[i]);
    dims += ranks[i];
  }
  return shapes;
}

std::string record_text(const Record& record, const std::vector<uint8_t>& image) {
  std::string result = text(record.kernel, ' ', record.entry, ' ', record.capability, ' ',
                            static_cast<uint32_t>(record.flavour), ' ', record.min_m, ' ', record.max_m, ' ',
                            record.block_m, ' ', record.block_n, ' ', record.threads, ' ', record.shared_bytes);
  for (const TensorRule& rule : record.tensors) result += text(' ', int{rule.alignment});
  for (const TensorRule& rule : record.tensors) result += text(' ', int{rule.flags});
  result += text(' ', record.cluster, ' ', record.early_depth, ' ', record.full_early_depth, ' ', record.maps.size());
  for (const MapRule& rule : record.maps) {
    result += text(' ', int{static_cast<uint8_t>(rule.tensor)}, ' ', int{rule.index}, ' ', int{rule.rows_contiguous},
                   ' ', int{rule.swizzle}, ' ', rule.box_inner, ' ', rule.box_outer);
  }
  result += text(' ', static_cast<uint32_t>(record.library));
  const Quantized& form = record.quantized;
  result += text(' ', int{form.bits}, ' ', int{form.block}, ' ', int{form.scales_alignment}, ' ',
                 int{form.zero_points_alignment});
  return result + text(' ', record.image_bytes, ' ', content_hash(image.data(), record.image_bytes), '\n');
}

std::string shape_text(const std::vector<SymbolicDim>& shape) {
  std::string result;
  for (const SymbolicDim& dim : shape) {
    const std::string word = dim.size >= 0 ? text(dim.size) : dim.symbol.empty() ? "?" : dim.symbol;
    result += (result.empty() ? "" : " ") + word;
  }
  return result;
}

// `4 m ?`: sizes, symbols and unknown dimensions.
std::vector<SymbolicDim> read_shape(const std::string& words) {
  std::istringstream stream(words);
  std::vector<SymbolicDim> shape;
  for (std::string word; stream >> word;) {
    const bool is_size = word.find_first_not_of("0123456789") == std::string::npos;
    shape.push_back({is_size ? std::stoll(word) : kUnknown, is_size || word == "?" ? "" : word});
  }
  return shape;
}

}  // namespace

// Binds shapes and fills `arguments`; `out_dims` gets rank and dimensions of each output in turn.
ONNXFUSE_EXPORT int onnxfuse_test_arguments(const char* const* attributes, const int64_t* dims, const int32_t* ranks,
                                            const int64_t* input_bytes, const uint64_t* input_pointers, int inputs,
                                            const uint64_t* output_pointers, OnnxfuseArguments* arguments,
                                            int64_t* out_dims, char* error, size_t error_size) {
  return reported({error, error_size}, [&] {
    const Contract contract = parse_contract(node_text(attributes));
    const Sizes sizes = bind_axes(contract, read_shapes(dims, ranks, inputs));
    std::vector<void*> in, out;
    for (int i = 0; i < inputs; ++i) in.push_back(reinterpret_cast<void*>(input_pointers[i]));
    for (size_t i = 0; i < contract.outputs.size(); ++i) {
      const Shape shape = output_shape(contract, sizes, i);
      *out_dims++ = static_cast<int64_t>(shape.size());
      for (int64_t dim : shape) *out_dims++ = dim;
      out.push_back(reinterpret_cast<void*>(output_pointers[i]));
    }
    const ElementBytes bytes = element_bytes(contract, std::vector<int64_t>(input_bytes, input_bytes + inputs));
    *arguments = OnnxfuseArguments{};
    set_problem(contract, sizes, arguments);
    set_tensors(contract, sizes, in, out, bytes, arguments);
  });
}

// `shapes` has one line for each input; a line that does not fit its rank is an input of unknown rank.
ONNXFUSE_EXPORT int onnxfuse_test_infer(const char* const* attributes, const char* shapes, char* out, size_t out_size) {
  return reported({out, out_size}, [&] {
    const Contract contract = parse_contract(node_text(attributes));
    std::vector<std::vector<SymbolicDim>> inputs;
    std::istringstream stream(shapes);
    for (std::string line; std::getline(stream, line);) inputs.push_back(read_shape(line));
    std::string result;
    for (const auto& shape : infer_outputs(contract, inputs)) result += shape_text(shape) + '\n';
    put({out, out_size}, result);
  });
}

// One line for each record: its fields in order, the image's bytes and FNV-1a hash.
ONNXFUSE_EXPORT int onnxfuse_test_archive(const uint8_t* data, uint64_t size, char* out, size_t out_size) {
  return reported({out, out_size}, [&] {
    std::string result;
    for (const Record& record : parse_archive(data, size)) {
      const std::vector<uint8_t> image = read_image(record);
      result += record_text(record, image);
      try {
        check_image(record, image);
      } catch (const Error&) {
        // Only cubins can be wrong here; the reader itself does not look inside an image.
      }
    }
    put({out, out_size}, result);
  });
}

// Index into the archive of the record that would be launched.
ONNXFUSE_EXPORT int onnxfuse_test_choose(const uint8_t* data, uint64_t size, const char* const* attributes,
                                         const int64_t* input_bytes, int inputs, uint32_t capability,
                                         uint32_t shared_bytes,
                                         const OnnxfuseArguments* arguments, int* index, char* error,
                                         size_t error_size) {
  return reported({error, error_size}, [&] {
    const Records records = parse_archive(data, size);
    const Contract contract = parse_contract(node_text(attributes));
    const Device device{capability, shared_bytes, /*multiprocessors=*/1, /*has_tensor_maps=*/capability >= 90,
                        /*has_library=*/true};
    const auto candidates = records_for(records, contract, device);
    const ElementBytes bytes = element_bytes(contract, std::vector<int64_t>(input_bytes, input_bytes + inputs));
    *index = static_cast<int>(candidates[choose(candidates, contract, bytes, *arguments)] - records.data());
  });
}

// What the library would be asked for, and what the kernel behind it gets: a line of numbers for each product, after one
// of the bytes of scratch memory; nothing where it is not asked.
ONNXFUSE_EXPORT int onnxfuse_test_library(const char* const* attributes, const int64_t* input_bytes, int inputs,
                                          uint32_t math, const OnnxfuseArguments* arguments, OnnxfuseArguments* behind,
                                          char* out, size_t out_size) {
  return reported({out, out_size}, [&] {
    const Contract contract = parse_contract(node_text(attributes));
    const ElementBytes bytes = element_bytes(contract, std::vector<int64_t>(input_bytes, input_bytes + inputs));
    Record record;
    record.library = LibraryMath{math};
    const auto products = library_products(record, contract, bytes, *arguments);
    std::string result;
    if (products) {
      *behind = behind_library(*products, contract, *arguments, nullptr);
      result = text(products->bytes, '\n');
      for (size_t i = 0; i < products->count; ++i) {
        const PlacedProduct& placed = products->products[i];
        const Product& product = placed.product;
        result += text(product.math, ' ', product.m, ' ', product.n, ' ', product.k, ' ', product.batch);
        for (const Matrix& matrix : {product.lhs, product.rhs, product.out}) {
          result += text(' ', matrix.pitch, ' ', matrix.batch_stride, ' ', matrix.transposed, ' ', matrix.alignment);
        }
        const auto number = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
        result += text(' ', number(placed.lhs), ' ', number(placed.rhs), ' ', placed.out_offset, '\n');
      }
    }
    put({out, out_size}, result);
  });
}

// What the maps of one record say: a line each of pointer, bytes of an element, swizzle, rank; extents, strides and box.
ONNXFUSE_EXPORT int onnxfuse_test_maps(const uint8_t* data, uint64_t size, const char* const* attributes,
                                       const int64_t* input_bytes, int inputs, int index,
                                       const OnnxfuseArguments* arguments, char* out, size_t out_size) {
  return reported({out, out_size}, [&] {
    const Records records = parse_archive(data, size);
    const Contract contract = parse_contract(node_text(attributes));
    const ElementBytes bytes = element_bytes(contract, std::vector<int64_t>(input_bytes, input_bytes + inputs));
    const Record& record = records[static_cast<size_t>(index)];
    std::string result;
    for (const MapRule& rule : record.maps) {
      if (rule.tensor == Mapped::kNothing) continue;
      const TensorBox box = tensor_box(record, rule, bytes, *arguments, contract.is_attention());
      result += text(reinterpret_cast<uintptr_t>(box.pointer), ' ', box.element_bytes, ' ', int{box.swizzle}, ' ',
                     box.rank);
      for (uint32_t axis = 0; axis < box.rank; ++axis) result += text(' ', box.extents[axis]);
      for (uint32_t axis = 0; axis + 1 < box.rank; ++axis) result += text(' ', box.strides[axis]);
      for (uint32_t axis = 0; axis < box.rank; ++axis) result += text(' ', box.box[axis]);
      result += '\n';
    }
    put({out, out_size}, result);
  });
}

ONNXFUSE_EXPORT size_t onnxfuse_test_sizeof_arguments() { return sizeof(OnnxfuseArguments); }

// The op belongs to the CPU provider from the next registration on; used with a stand-in for libcuda.
ONNXFUSE_EXPORT int onnxfuse_test_run_on_cpu(int value) { return run_on_cpu(value != 0); }
