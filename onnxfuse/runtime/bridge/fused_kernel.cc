#include "fused_kernel.h"

#include "error.h"
#include "node.h"

namespace onnxfuse {
namespace {

std::atomic<bool> g_run_on_cpu{false};

}  // namespace

bool run_on_cpu(bool value) { return g_run_on_cpu.exchange(value); }

bool runs_on_cpu() { return g_run_on_cpu; }

FusedKernel::FusedKernel(const OrtApi* api, const OrtKernelInfo* info)
    : api_(api),
      name_(node_name(api, info)),
      contract_(parse_contract(node_text(api, info))),
      bytes_(node_types(api, info, contract_)),
      archive_(node_archive(api, info)) {
  if (cuda_driver() == nullptr) fail("no CUDA device is usable; run without the onnxfuse library");
  if (loaded().library != nullptr) scratch_ = std::make_unique<ScratchAllocator>(api, info);
}

const Loaded& FusedKernel::loaded() const {
  const Context context = cuda_driver()->current_context();
  const Loaded* newest = newest_.load(std::memory_order_acquire);
  if (newest != nullptr && newest->context == context) return *newest;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& known : contexts_) {
    if (known->context == context) return *known;
  }
  contexts_.push_back(load(contract_, *archive_, context));
  newest_.store(contexts_.back().get(), std::memory_order_release);
  return *contexts_.back();
}

FusedKernel::Inputs FusedKernel::inputs_of(OrtKernelContext* context) const {
  Inputs inputs;
  for (size_t i = 0; i < contract_.inputs.size(); ++i) {
    const OrtValue* value = nullptr;
    check(api_, api_->KernelContext_GetInput(context, kFirstTensor + i, &value));
    if (value == nullptr) fail("input ", i, " is missing");
    inputs.shapes.push_back(shape_of(api_, value));
    inputs.pointers.push_back(data_of(api_, value));
  }
  return inputs;
}

std::vector<void*> FusedKernel::allocate_outputs(OrtKernelContext* context, const Sizes& sizes) const {
  std::vector<void*> outputs;
  for (size_t i = 0; i < contract_.outputs.size(); ++i) {
    const Shape shape = output_shape(contract_, sizes, i);
    OrtValue* value = nullptr;
    check(api_, api_->KernelContext_GetOutput(context, i, shape.data(), shape.size(), &value));
    if (value == nullptr) fail("the runtime gave no output ", i);
    outputs.push_back(data_of(api_, value));
  }
  return outputs;
}

Stream FusedKernel::stream_of(OrtKernelContext* context) const {
  Stream stream = nullptr;
  check(api_, api_->KernelContext_GetGPUComputeStream(context, &stream));
  if (stream == nullptr && !runs_on_cpu()) fail("the runtime gave no stream to launch on");
  return stream;
}

void FusedKernel::compute(OrtKernelContext* context) const {
  const Inputs inputs = inputs_of(context);
  const Sizes sizes = bind_axes(contract_, inputs.shapes);
  OnnxfuseArguments arguments{};
  set_problem(contract_, sizes, &arguments);
  if (contract_.is_attention() && arguments.n == 0) fail("an attention over no keys");
  const std::vector<void*> outputs = allocate_outputs(context, sizes);
  if (arguments.m == 0 || arguments.n == 0 || arguments.batch == 0) return;
  set_tensors(contract_, sizes, inputs.pointers, outputs, bytes_, &arguments);
  const Stream stream = stream_of(context);
  ScratchMemory memory(api_, scratch_.get(), context, stream != nullptr);
  launch(loaded(), contract_, bytes_, arguments, [&](size_t bytes) { return memory.take(bytes); }, stream);
}

}  // namespace onnxfuse
