// Tells the runtime the shapes of a fused node's outputs before a run.
#pragma once

#include "ort_abi.h"

namespace onnxfuse {

OrtStatus* infer_shapes(const OrtApi* api, OrtShapeInferContext* context) noexcept;

}  // namespace onnxfuse
