// The custom op `FusedGemm` of domain `onnxfuse`.
#pragma once

#include "ort_abi.h"

namespace onnxfuse {

constexpr char kDomain[] = "onnxfuse";

// The op for one version of the runtime's API; it lives as long as the process.
const OrtCustomOp* fused_gemm_op(const OrtApi* api, uint32_t api_version);

// For tests on a machine without a GPU: the op belongs to the CPU provider, which has no stream. Returns the old value.
bool run_on_cpu(bool value);

}  // namespace onnxfuse
