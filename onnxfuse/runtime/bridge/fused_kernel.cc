#include "fused_kernel.h"

#include "cached_attention.h"
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
      archive_(node_archive(api, info)),
      rhs_is_constant_(has_constant_rhs(api, info, contract_)) {
  if (cuda_driver() == nullptr) fail("no CUDA device is usable; run without the onnxfuse library");
  if (contract_.is_cached()) {
    const auto type = static_cast<OrtElementType>(contract_.out_types[0]->onnx);
    original_ = std::make_unique<OriginalOp>(api, info, contract_, type);
  }
  if (loaded().needs_scratch()) scratch_ = std::make_unique<ScratchAllocator>(api, info);
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
    inputs.values.push_back(value);
    inputs.shapes.push_back(shape_of(api_, value));
    inputs.pointers.push_back(data_of(api_, value));
  }
  return inputs;
}

template <typename ShapeOf>
FusedKernel::Outputs FusedKernel::allocate_outputs(OrtKernelContext* context, const ShapeOf& shape_of_output) const {
  Outputs outputs;
  for (size_t i = 0; i < contract_.outputs.size(); ++i) {
    const Shape shape = shape_of_output(i);
    OrtValue* value = nullptr;
    check(api_, api_->KernelContext_GetOutput(context, i, shape.data(), shape.size(), &value));
    if (value == nullptr) fail("the runtime gave no output ", i);
    outputs.values.push_back(value);
    outputs.pointers.push_back(data_of(api_, value));
  }
  return outputs;
}

Stream FusedKernel::stream_of(OrtKernelContext* context) const {
  Stream stream = nullptr;
  check(api_, api_->KernelContext_GetGPUComputeStream(context, &stream));
  if (stream == nullptr && !runs_on_cpu()) fail("the runtime gave no stream to launch on");
  return stream;
}

// The op's own inputs, in its order: those that a node lacks are optional.
void FusedKernel::invoke_original(OrtKernelContext* context, const Inputs& inputs, const Outputs& outputs,
                                  int64_t keys) const {
  const CachedInputs at(contract_);
  const auto read = [&](int input) { return input == kNone ? nullptr : inputs.values[input]; };
  const auto written = [&](size_t out) { return outputs.values[contract_.outs[out].tensor]; };
  const HostScalar total(api_, static_cast<int32_t>(keys));
  std::vector<const OrtValue*> all = {
      read(at.query), read(at.own_key), read(at.own_value), read(at.keys), read(at.values), read(at.lengths),
      total.value(), read(at.cosines), read(at.sines), nullptr, nullptr, read(at.sink), nullptr, nullptr,
      read(at.query_norm), read(at.key_norm)};
  all.resize(original_inputs(at));
  original_->invoke(context, all, {written(0), written(1), written(2)});
}

// One token of each sequence is our kernel's; a prompt, and a cache that has to grow, are the runtime's.
void FusedKernel::compute_cached(OrtKernelContext* context, const Inputs& inputs) const {
  const CachedSizes sizes = cached_sizes(contract_, inputs.shapes);
  const Outputs outputs =
      allocate_outputs(context, [&](size_t i) { return cached_output_shape(contract_, sizes, i); });
  const Loaded& code = loaded();
  const bool decodes = is_decoding(contract_, sizes, inputs.pointers, outputs.pointers);
  for (size_t i = 0; decodes && i < code.records.size(); ++i) {
    const Record& record = *code.records[i];
    if (sizes.batch < record.min_m || record.max_m < sizes.batch) continue;
    OnnxfuseArguments arguments = cached_arguments(contract_, sizes, inputs.pointers, outputs.pointers);
    return launch_blocks(code, i, cached_blocks(record, sizes), arguments, stream_of(context));
  }
  invoke_original(context, inputs, outputs, sizes.keys);
}

void FusedKernel::compute(OrtKernelContext* context) const {
  const Inputs inputs = inputs_of(context);
  if (contract_.is_cached()) return compute_cached(context, inputs);
  const Sizes sizes = bind_axes(contract_, inputs.shapes);
  OnnxfuseArguments arguments{};
  set_problem(contract_, sizes, &arguments);
  arguments.rhs_ready = rhs_is_constant_;
  if (contract_.is_attention() && arguments.n == 0) fail("an attention over no keys");
  const Outputs outputs = allocate_outputs(context, [&](size_t i) { return output_shape(contract_, sizes, i); });
  if (arguments.m == 0 || arguments.n == 0 || arguments.batch == 0) return;
  set_tensors(contract_, sizes, inputs.pointers, outputs.pointers, bytes_, &arguments);
  const Stream stream = stream_of(context);
  ScratchMemory memory(api_, scratch_.get(), context, stream != nullptr);
  launch(loaded(), contract_, bytes_, arguments, [&](size_t bytes) { return memory.take(bytes); }, stream);
}

}  // namespace onnxfuse
