#include "node.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "axes.h"
#include "error.h"
#include "shared_table.h"

namespace onnxfuse {
namespace {

std::string attribute(const OrtApi* api, const OrtKernelInfo* info, const char* name, bool required) {
  size_t size = 0;
  OrtStatus* status = api->KernelInfoGetAttribute_string(info, name, nullptr, &size);
  if (status != nullptr && !required) {
    api->ReleaseStatus(status);
    return "";
  }
  check(api, status);
  std::string value(size, '\0');
  check(api, api->KernelInfoGetAttribute_string(info, name, value.data(), &size));
  value.resize(size == 0 ? 0 : size - 1);
  return value;
}

std::string attribute(const OrtApi* api, const OrtShapeInferContext* context, const char* name, bool required) {
  const OrtOpAttr* found = nullptr;
  OrtStatus* status = api->ShapeInferContext_GetAttribute(context, name, &found);
  if (status != nullptr && !required) {
    api->ReleaseStatus(status);
    return "";
  }
  check(api, status);
  size_t size = 0;
  // Too small a buffer is an error by design: it tells the size.
  status = api->ReadOpAttr(found, kOrtAttributeString, nullptr, 0, &size);
  if (status != nullptr) api->ReleaseStatus(status);
  // Versions of the runtime disagree on whether the size counts the final NUL; these texts hold no other.
  std::string value(size + 1, '\0');
  check(api, api->ReadOpAttr(found, kOrtAttributeString, value.data(), value.size(), &size));
  value.resize(std::strlen(value.c_str()));
  return value;
}

template <typename Source>
NodeText read_text(const OrtApi* api, const Source* source) {
  const auto read = [&](const char* name) { return attribute(api, source, name, true); };
  const auto read_optional = [&](const char* name) { return attribute(api, source, name, false); };
  return {read("kernel"),    read("axes"),      read_optional("sizes"),   read("problem"),
          read("arguments"), read("out_types"), read_optional("in_types"), read_optional("original")};
}

// Records of the archive at one address. Nodes share it while any of them lives, so hundreds of nodes read and check
// one archive once, and an address that the allocator gives out again is checked again.
struct ArchiveTable {
  std::mutex mutex;
  std::map<std::pair<const void*, size_t>, std::weak_ptr<const Records>> archives;
};

std::shared_ptr<const Records> shared_archive(const void* data, size_t size) {
  static auto* table = new ArchiveTable;   // never destroyed: sessions may outlive the library's static objects
  std::lock_guard<std::mutex> lock(table->mutex);
  drop_expired(table->archives);
  std::weak_ptr<const Records>& slot = table->archives[{data, size}];
  std::shared_ptr<const Records> records = slot.lock();
  if (records == nullptr) {
    records = std::make_shared<const Records>(parse_archive(static_cast<const uint8_t*>(data), size));
    slot = records;
  }
  return records;
}

const ElementType* type_of(const OrtApi* api, OrtTypeInfo* type_info, const char* kind, size_t index) {
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  OrtElementType onnx = kOrtUndefined;
  OrtStatus* status = api->CastTypeInfoToTensorInfo(type_info, &tensor);
  if (status == nullptr && tensor != nullptr) status = api->GetTensorElementType(tensor, &onnx);
  api->ReleaseTypeInfo(type_info);
  check(api, status);
  const ElementType* type = element_type(onnx);
  if (type == nullptr) fail(kind, " ", index, " has an element type (ONNX ", int{onnx}, ") that no kernel handles");
  return type;
}

void check_type(const ElementType* found, const ElementType* expected, const char* kind, size_t index) {
  if (found == expected) return;
  fail(kind, " ", index, " is ", found->name, " and its kernel was compiled for ", expected->name,
       "; another tool changed the model's types, optimize its output again");
}

// The number of bytes of each input's elements.
std::vector<int64_t> read_inputs(const OrtApi* api, const OrtKernelInfo* info, const Contract& contract) {
  std::vector<int64_t> bytes;
  for (size_t i = 0; i < contract.inputs.size(); ++i) {
    OrtTypeInfo* type_info = nullptr;
    check(api, api->KernelInfo_GetInputTypeInfo(info, kFirstTensor + i, &type_info));
    const ElementType* type = type_of(api, type_info, "input", i);
    if (!contract.in_types.empty()) check_type(type, contract.in_types[i], "input", i);
    bytes.push_back(type->bytes);
  }
  return bytes;
}

// nullptr where the input is no initializer, or the runtime does not say that it is one.
const OrtValue* constant_input(const OrtApi* api, const OrtKernelInfo* info, size_t input) {
  int is_constant = 0;
  const OrtValue* value = nullptr;
  check(api, api->KernelInfoGetConstantInput_tensor(info, input, &is_constant, &value));
  return is_constant ? value : nullptr;
}

void check_outputs(const OrtApi* api, const OrtKernelInfo* info, const Contract& contract) {
  for (size_t i = 0; i < contract.outputs.size(); ++i) {
    OrtTypeInfo* type_info = nullptr;
    check(api, api->KernelInfo_GetOutputTypeInfo(info, i, &type_info));
    check_type(type_of(api, type_info, "output", i), contract.out_types[i], "output", i);
  }
}

}  // namespace

std::string node_name(const OrtApi* api, const OrtKernelInfo* info) {
  size_t size = 0;
  check(api, api->KernelInfo_GetNodeName(info, nullptr, &size));
  std::string name(size, '\0');
  check(api, api->KernelInfo_GetNodeName(info, name.data(), &size));
  name.resize(size == 0 ? 0 : size - 1);
  return name.empty() ? "a fused node without a name" : "node '" + name + "'";
}

NodeText node_text(const OrtApi* api, const OrtKernelInfo* info) { return read_text(api, info); }

NodeText node_text(const OrtApi* api, const OrtShapeInferContext* context) { return read_text(api, context); }

std::shared_ptr<const Records> node_archive(const OrtApi* api, const OrtKernelInfo* info) {
  const OrtValue* value = constant_input(api, info, kArchiveInput);
  if (value == nullptr) {
    fail("its first input must be an initializer, the model's archive of kernels; optimize the original again (inside ",
         "a branch or a loop ONNX Runtime finds it from version 1.29 on)");
  }
  int64_t bytes = 1;
  for (int64_t dim : shape_of(api, value)) bytes *= dim;
  return shared_archive(data_of(api, value), static_cast<size_t>(bytes));
}

ElementBytes node_types(const OrtApi* api, const OrtKernelInfo* info, const Contract& contract) {
  size_t inputs = 0, outputs = 0;
  check(api, api->KernelInfo_GetInputCount(info, &inputs));
  check(api, api->KernelInfo_GetOutputCount(info, &outputs));
  if (inputs != kFirstTensor + contract.inputs.size() || outputs != contract.outputs.size()) {
    fail("it has ", inputs, " inputs and ", outputs, " outputs; its attribute axes describes ",
         kFirstTensor + contract.inputs.size(), " and ", contract.outputs.size());
  }
  const std::vector<int64_t> bytes = read_inputs(api, info, contract);
  check_outputs(api, info, contract);
  return element_bytes(contract, bytes);
}

bool has_constant_rhs(const OrtApi* api, const OrtKernelInfo* info, const Contract& contract) {
  const auto are_constant = [&](const std::vector<Reference>& parts) {
    return std::all_of(parts.begin(), parts.end(), [&](const Reference& part) {
      return constant_input(api, info, kFirstTensor + part.tensor) != nullptr;
    });
  };
  return are_constant(contract.rhs) && are_constant(contract.scales) && are_constant(contract.zero_points);
}

}  // namespace onnxfuse
