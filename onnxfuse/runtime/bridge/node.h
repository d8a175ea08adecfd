// What ONNX Runtime says of one fused node: its name, its attributes, the types of its tensors, its archive.
#pragma once

#include <memory>
#include <string>

#include "archive.h"
#include "contract.h"
#include "ort.h"

namespace onnxfuse {

constexpr size_t kArchiveInput = 0;   // `kernels`; the tensors of the contract follow
constexpr size_t kFirstTensor = 1;

std::string node_name(const OrtApi* api, const OrtKernelInfo* info);

// The attributes, before shapes are known and when the session creates the kernel. Throws Error when one is missing.
NodeText node_text(const OrtApi* api, const OrtKernelInfo* info);
NodeText node_text(const OrtApi* api, const OrtShapeInferContext* context);

// The records of the model's archive. Throws Error when the runtime does not hand it out as a constant.
std::shared_ptr<const Records> node_archive(const OrtApi* api, const OrtKernelInfo* info);

// Element sizes of the node's tensors. Throws Error when their number or a type is not what the contract says.
ElementBytes node_types(const OrtApi* api, const OrtKernelInfo* info, const Contract& contract);

// Whether each rhs of the product is an initializer, which nothing writes while the model runs, and what a quantized one has
// beside its integers.
bool has_constant_rhs(const OrtApi* api, const OrtKernelInfo* info, const Contract& contract);

}  // namespace onnxfuse
