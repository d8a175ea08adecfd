#include "fused_gemm.h"

#include <limits>
#include <string>
#include <utility>

#include "fused_kernel.h"
#include "node.h"
#include "ort.h"
#include "shape_inference.h"

namespace onnxfuse {
namespace {

struct Op : OrtCustomOp {
  const OrtApi* api;
  std::string name;
};

OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) noexcept {
  const auto who = [&] { return node_name(api, info); };
  return guarded(api, who, [&] { *kernel = new FusedKernel(api, info); });
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) noexcept {
  const auto* self = static_cast<const FusedKernel*>(kernel);
  return guarded(self->api(), [&] { return self->name(); }, [&] { self->compute(context); });
}

void destroy(void* kernel) noexcept { delete static_cast<FusedKernel*>(kernel); }

OrtStatus* infer(const OrtCustomOp* op, OrtShapeInferContext* context) noexcept {
  return infer_shapes(static_cast<const Op*>(op)->api, context);
}

void describe_inputs(Op& op) {
  op.GetInputTypeCount = [](const OrtCustomOp*) noexcept -> size_t { return 2; };
  op.GetInputType = [](const OrtCustomOp*, size_t i) noexcept {
    return i == kArchiveInput ? kOrtUint8 : kOrtUndefined;
  };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) noexcept {
    return i == kArchiveInput ? kOrtRequired : kOrtVariadic;
  };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t i) noexcept {
    return i == kArchiveInput ? kOrtCpuInput : kOrtDefaultMemory;
  };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) noexcept { return 1; };
  op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) noexcept { return 0; };
}

void describe_outputs(Op& op) {
  op.GetOutputTypeCount = [](const OrtCustomOp*) noexcept -> size_t { return 1; };
  op.GetOutputType = [](const OrtCustomOp*, size_t) noexcept { return kOrtUndefined; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) noexcept { return kOrtVariadic; };
  op.GetVariadicOutputMinArity = [](const OrtCustomOp*) noexcept { return 1; };
  op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) noexcept { return 0; };
}

Op make_op(const OrtApi* api, uint32_t api_version, std::string name) {
  Op op{};
  op.api = api;
  op.name = std::move(name);
  op.version = api_version;
  op.GetName = [](const OrtCustomOp* self) noexcept { return static_cast<const Op*>(self)->name.c_str(); };
  op.GetExecutionProviderType = [](const OrtCustomOp*) noexcept {
    return runs_on_cpu() ? "CPUExecutionProvider" : "CUDAExecutionProvider";
  };
  describe_inputs(op);
  describe_outputs(op);
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = compute;
  op.KernelDestroy = destroy;
  op.InferOutputShapeFn = infer;
  op.GetStartVersion = [](const OrtCustomOp*) noexcept { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) noexcept { return std::numeric_limits<int>::max(); };
  return op;
}

}  // namespace

std::vector<const OrtCustomOp*> fused_ops(const OrtApi* api, uint32_t api_version) {
  std::vector<const OrtCustomOp*> ops;
  for (const Kind& kind : kKinds) {
    if (kind.capability != 0 && !cuda_driver()->all_devices_have(kind.capability)) continue;
    ops.push_back(new Op(make_op(api, api_version, kind.name)));
    for (int number = 0; number < kPoolSize; ++number) {
      ops.push_back(new Op(make_op(api, api_version, text(kind.name, "_", number))));
    }
  }
  return ops;
}

}  // namespace onnxfuse
