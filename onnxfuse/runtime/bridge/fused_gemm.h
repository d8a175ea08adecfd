// The custom ops of domain `onnxfuse`: `FusedGemm`, and `FusedPointwise` for what follows a product that stayed an
// ordinary node, `FusedAttention`, and `FusedCache90` of one token over a cache, each under as many names as a model may have different fallback bodies (op_names.py tells why).
// A node's attributes tell which kernel runs; the ops differ in nothing else.
#pragma once

#include <vector>

#include "ort_abi.h"

namespace onnxfuse {

constexpr char kDomain[] = "onnxfuse";

// A kind with a compute capability exists only where every device has it: elsewhere the runtime takes the node's
// body, as kernels that a file has for one architecture alone would lose to it on others.
struct Kind {
  const char* name;
  int capability;   // 0 for every device
};
constexpr Kind kKinds[] = {{"FusedGemm", 0}, {"FusedPointwise", 0}, {"FusedAttention", 0}, {"FusedGemm90", 90},
                          {"FusedCache90", 90}};
constexpr int kPoolSize = 24;   // of each kind: FusedGemm_0 to FusedGemm_23, and FusedGemm for nodes without a body

// The ops for one version of the runtime's API; they live as long as the process.
std::vector<const OrtCustomOp*> fused_ops(const OrtApi* api, uint32_t api_version);

}  // namespace onnxfuse
