// The op of ONNX Runtime's that a node stands for, by its own kernel of the same provider: what runs where ours does not.
#pragma once

#include <vector>

#include "contract.h"
#include "ort.h"

namespace onnxfuse {

class OriginalOp {
 public:
  // GroupQueryAttention of elements of a type. Throws Error when the runtime has no kernel for it.
  OriginalOp(const OrtApi* api, const OrtKernelInfo* info, const Contract& contract, OrtElementType type);
  ~OriginalOp();
  OriginalOp(const OriginalOp&) = delete;
  OriginalOp& operator=(const OriginalOp&) = delete;

  // On the run's stream. Inputs may be nullptr where they are optional.
  void invoke(const OrtKernelContext* context, const std::vector<const OrtValue*>& inputs,
              const std::vector<OrtValue*>& outputs) const;

 private:
  const OrtApi* api_;
  OrtOp* op_ = nullptr;
};

// A number as a tensor without dimensions in the host's memory, which lives as long.
class HostScalar {
 public:
  HostScalar(const OrtApi* api, int32_t number);
  ~HostScalar();
  HostScalar(const HostScalar&) = delete;
  HostScalar& operator=(const HostScalar&) = delete;
  const OrtValue* value() const { return value_; }

 private:
  const OrtApi* api_;
  int32_t number_;
  OrtMemoryInfo* memory_ = nullptr;
  OrtValue* value_ = nullptr;
};

}  // namespace onnxfuse
