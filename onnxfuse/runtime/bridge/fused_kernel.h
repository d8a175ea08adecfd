// One fused node of one session: what the runtime creates, computes with and destroys.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "axes.h"
#include "contract.h"
#include "launch.h"
#include "original_op.h"
#include "ort.h"
#include "scratch.h"

namespace onnxfuse {

class FusedKernel {
 public:
  // Throws Error when no kernel of the node runs on the current device.
  FusedKernel(const OrtApi* api, const OrtKernelInfo* info);

  void compute(OrtKernelContext* context) const;
  const OrtApi* api() const { return api_; }
  const std::string& name() const { return name_; }

 private:
  struct Inputs {
    std::vector<const OrtValue*> values;
    std::vector<Shape> shapes;
    std::vector<void*> pointers;
  };
  struct Outputs {
    std::vector<OrtValue*> values;
    std::vector<void*> pointers;
  };
  Inputs inputs_of(OrtKernelContext* context) const;
  template <typename ShapeOf>
  Outputs allocate_outputs(OrtKernelContext* context, const ShapeOf& shape_of_output) const;
  void compute_cached(OrtKernelContext* context, const Inputs& inputs) const;
  void invoke_original(OrtKernelContext* context, const Inputs& inputs, const Outputs& outputs, int64_t keys) const;
  const Loaded& loaded() const;
  Stream stream_of(OrtKernelContext* context) const;

  const OrtApi* api_;
  const std::string name_;
  const Contract contract_;
  const ElementBytes bytes_;
  const std::shared_ptr<const Records> archive_;
  const bool rhs_is_constant_;
  std::unique_ptr<const OriginalOp> original_;   // of a node over a cache alone
  std::unique_ptr<const ScratchAllocator> scratch_;   // nothing for a node whose kernels need none

  // Contexts that this node has code in; grows only. The newest is read without the lock.
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<const Loaded>> contexts_;
  mutable std::atomic<const Loaded*> newest_{nullptr};
};

// For tests on a machine without a GPU: the ops belong to the CPU provider, which has no stream. Returns the old value.
bool run_on_cpu(bool value);
bool runs_on_cpu();

}  // namespace onnxfuse
