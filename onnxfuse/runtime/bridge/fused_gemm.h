// The custom ops of domain `onnxfuse`: `FusedGemm`, and `FusedPointwise` for what follows a product that stayed an
// ordinary node, and `FusedAttention`, each under as many names as a model may have different fallback bodies (op_names.py tells why).
// A node's attributes tell which kernel runs; the ops differ in nothing else.
#pragma once

#include <vector>

#include "ort_abi.h"

namespace onnxfuse {

constexpr char kDomain[] = "onnxfuse";

constexpr const char* kKinds[] = {"FusedGemm", "FusedPointwise", "FusedAttention"};
constexpr int kPoolSize = 24;   // of each kind: FusedGemm_0 to FusedGemm_23, and FusedGemm for nodes without a body

// The ops for one version of the runtime's API; they live as long as the process.
std::vector<const OrtCustomOp*> fused_ops(const OrtApi* api, uint32_t api_version);

}  // namespace onnxfuse
