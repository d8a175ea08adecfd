#include "shape_inference.h"

#include <atomic>
#include <cstdio>
#include <string>
#include <vector>

#include "axes.h"
#include "node.h"
#include "ort.h"

namespace onnxfuse {
namespace {

std::vector<SymbolicDim> known_shape(const OrtApi* api, const OrtShapeInferContext* context, size_t index) {
  OrtTensorTypeAndShapeInfo* info = nullptr;   // the context owns it
  check(api, api->ShapeInferContext_GetInputTypeShape(context, index, &info));
  const Shape shape = dimensions(api, info);
  std::vector<const char*> symbols(shape.size(), nullptr);
  check(api, api->GetSymbolicDimensions(info, symbols.data(), symbols.size()));
  std::vector<SymbolicDim> result;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    result.push_back({shape[dim], symbols[dim] == nullptr ? "" : symbols[dim]});
  }
  return result;
}

// A dimension that nobody knows still needs a name, because the API would store -1 as its size. The name is used once
// in a process: the runtime takes equal names for equal sizes.
std::string fresh_symbol() {
  static std::atomic<unsigned> count{0};
  return text("onnxfuse_unknown_", ++count);
}

void tell_shape(const OrtApi* api, OrtShapeInferContext* context, size_t index, const ElementType& type,
                const std::vector<SymbolicDim>& shape) {
  Shape sizes;
  std::vector<std::string> symbols;
  std::vector<const char*> pointers;
  for (const SymbolicDim& dim : shape) {
    sizes.push_back(dim.size);
    symbols.push_back(dim.size >= 0 ? "" : dim.symbol.empty() ? fresh_symbol() : dim.symbol);
  }
  for (const std::string& symbol : symbols) pointers.push_back(symbol.c_str());
  ShapeInfo info(api);
  check(api, api->CreateTensorTypeAndShapeInfo(info.out()));
  check(api, api->SetTensorElementType(info.get(), static_cast<OrtElementType>(type.onnx)));
  check(api, api->SetDimensions(info.get(), sizes.data(), sizes.size()));
  check(api, api->SetSymbolicDimensions(info.get(), pointers.data(), pointers.size()));
  check(api, api->ShapeInferContext_SetOutputTypeShape(context, index, info.get()));
}

}  // namespace

OrtStatus* infer_shapes(const OrtApi* api, OrtShapeInferContext* context) noexcept {
  // The context does not know the node's name; the runtime adds it.
  OrtStatus* status = guarded(api, [] { return std::string("shape inference of a fused node"); }, [&] {
    const Contract contract = parse_contract(node_text(api, context));
    size_t count = 0;
    check(api, api->ShapeInferContext_GetInputCount(context, &count));
    std::vector<std::vector<SymbolicDim>> inputs;
    for (size_t i = kFirstTensor; i < count; ++i) inputs.push_back(known_shape(api, context, i));
    auto outputs = infer_outputs(contract, inputs);
    // A cache that lacks room comes out with more.
    for (size_t i = 1; contract.is_cached() && i < outputs.size(); ++i) outputs[i][2] = {};
    for (size_t i = 0; i < outputs.size(); ++i) tell_shape(api, context, i, *contract.out_types[i], outputs[i]);
  });
  // The runtime (1.31) drops this status and says only "type inference failed"; the reason must not be lost.
  if (status != nullptr) std::fprintf(stderr, "%s\n", api->GetErrorMessage(status));
  return status;
}

}  // namespace onnxfuse
