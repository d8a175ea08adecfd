#include "fused_gemm.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "archive.h"
#include "axes.h"
#include "driver.h"
#include "error.h"
#include "ort.h"
#include "shared_table.h"

namespace onnxfuse {
namespace {

constexpr size_t kArchiveInput = 0;   // `kernels`; the tensors of the contract follow
constexpr size_t kFirstTensor = 1;
constexpr int64_t kMaxGridX = 2147483647;
constexpr int kMaxGridZ = 65535;

std::atomic<bool> g_run_on_cpu{false};

struct Op : OrtCustomOp {
  const OrtApi* api;
  std::string name;
};

// ---- What a node says ----------------------------------------------------------------------------------------------

std::string node_name(const OrtApi* api, const OrtKernelInfo* info) {
  size_t size = 0;
  check(api, api->KernelInfo_GetNodeName(info, nullptr, &size));
  std::string name(size, '\0');
  check(api, api->KernelInfo_GetNodeName(info, name.data(), &size));
  name.resize(size == 0 ? 0 : size - 1);
  return name.empty() ? "a fused node without a name" : "node '" + name + "'";
}

std::string attribute(const OrtApi* api, const OrtKernelInfo* info, const char* name, bool required) {
  size_t size = 0;
  OrtStatus* status = api->KernelInfoGetAttribute_string(info, name, nullptr, &size);
  if (status != nullptr && !required) {
    api->ReleaseStatus(status);
    return "";
  }
  check(api, status);
  std::string value(size, '\0');
  check(api, api->KernelInfoGetAttribute_string(info, name, value.data(), &size));
  value.resize(size == 0 ? 0 : size - 1);
  return value;
}

std::string attribute(const OrtApi* api, const OrtShapeInferContext* context, const char* name, bool required) {
  const OrtOpAttr* found = nullptr;
  OrtStatus* status = api->ShapeInferContext_GetAttribute(context, name, &found);
  if (status != nullptr && !required) {
    api->ReleaseStatus(status);
    return "";
  }
  check(api, status);
  size_t size = 0;
  // Too small a buffer is an error by design: it tells the size.
  status = api->ReadOpAttr(found, kOrtAttributeString, nullptr, 0, &size);
  if (status != nullptr) api->ReleaseStatus(status);
  // Versions of the runtime disagree on whether the size counts the final NUL; these texts hold no other.
  std::string value(size + 1, '\0');
  check(api, api->ReadOpAttr(found, kOrtAttributeString, value.data(), value.size(), &size));
  value.resize(std::strlen(value.c_str()));
  return value;
}

template <typename Source>
NodeText node_text(const OrtApi* api, const Source* source) {
  const auto read = [&](const char* name) { return attribute(api, source, name, true); };
  const auto read_optional = [&](const char* name) { return attribute(api, source, name, false); };
  return {read("kernel"),    read("axes"),      read_optional("sizes"),   read("problem"),
          read("arguments"), read("out_types"), read_optional("in_types")};
}

// ---- What a node holds ---------------------------------------------------------------------------------------------

// Records of the archive at one address. Nodes share it while any of them lives, so hundreds of nodes read and check
// one archive once, and an address that the allocator gives out again is checked again.
struct ArchiveTable {
  std::mutex mutex;
  std::map<std::pair<const void*, size_t>, std::weak_ptr<const Records>> archives;
};

std::shared_ptr<const Records> shared_archive(const void* data, size_t size) {
  static auto* table = new ArchiveTable;   // never destroyed: sessions may outlive the library's static objects
  std::lock_guard<std::mutex> lock(table->mutex);
  drop_expired(table->archives);
  std::weak_ptr<const Records>& slot = table->archives[{data, size}];
  std::shared_ptr<const Records> records = slot.lock();
  if (records == nullptr) {
    records = std::make_shared<const Records>(parse_archive(static_cast<const uint8_t*>(data), size));
    slot = records;
  }
  return records;
}

std::shared_ptr<const Records> node_archive(const OrtApi* api, const OrtKernelInfo* info) {
  int is_constant = 0;
  const OrtValue* value = nullptr;
  check(api, api->KernelInfoGetConstantInput_tensor(info, kArchiveInput, &is_constant, &value));
  if (!is_constant || value == nullptr) {
    fail("its first input must be an initializer, the model's archive of kernels; optimize the original again (inside ",
         "a branch or a loop ONNX Runtime finds it from version 1.29 on)");
  }
  int64_t bytes = 1;
  for (int64_t dim : shape_of(api, value)) bytes *= dim;
  return shared_archive(data_of(api, value), static_cast<size_t>(bytes));
}

const ElementType* type_of(const OrtApi* api, OrtTypeInfo* type_info, const char* kind, size_t index) {
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  OrtElementType onnx = kOrtUndefined;
  OrtStatus* status = api->CastTypeInfoToTensorInfo(type_info, &tensor);
  if (status == nullptr && tensor != nullptr) status = api->GetTensorElementType(tensor, &onnx);
  api->ReleaseTypeInfo(type_info);
  check(api, status);
  const ElementType* type = element_type(onnx);
  if (type == nullptr) fail(kind, " ", index, " has an element type (ONNX ", int{onnx}, ") that no kernel handles");
  return type;
}

void check_type(const ElementType* found, const ElementType* expected, const char* kind, size_t index) {
  if (found == expected) return;
  fail(kind, " ", index, " is ", found->name, " and its kernel was compiled for ", expected->name,
       "; another tool changed the model's types, optimize its output again");
}

// The code of one node in one context.
struct Loaded {
  Context context = nullptr;
  Device device;
  std::vector<const Record*> records;
  std::vector<Function> functions;   // one for each record
  std::vector<std::shared_ptr<Module>> modules;
};

class Kernel {
 public:
  Kernel(const OrtApi* api, const OrtKernelInfo* info)
      : api_(api), name_(node_name(api, info)), contract_(parse_contract(node_text(api, info))) {
    read_types(info);
    archive_ = node_archive(api, info);
    if (cuda_driver() == nullptr) fail("no CUDA device is usable; run without the onnxfuse library");
    loaded();
  }

  void compute(OrtKernelContext* context) const;
  const OrtApi* api() const { return api_; }
  const std::string& name() const { return name_; }

 private:
  void read_types(const OrtKernelInfo* info);
  std::vector<void*> allocate_outputs(OrtKernelContext* context, const Sizes& sizes) const;
  const Loaded& loaded() const;
  std::unique_ptr<const Loaded> load(Context context) const;
  Stream stream_of(OrtKernelContext* context) const;

  const OrtApi* api_;
  const std::string name_;
  const Contract contract_;
  ElementBytes bytes_;
  std::shared_ptr<const Records> archive_;

  // Contexts that this node has code in; grows only. The newest is read without the lock.
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<const Loaded>> contexts_;
  mutable std::atomic<const Loaded*> newest_{nullptr};
};

// Types are fixed when a session loads, so Compute need not ask for them again.
void Kernel::read_types(const OrtKernelInfo* info) {
  size_t inputs = 0, outputs = 0;
  check(api_, api_->KernelInfo_GetInputCount(info, &inputs));
  check(api_, api_->KernelInfo_GetOutputCount(info, &outputs));
  if (inputs != kFirstTensor + contract_.inputs.size() || outputs != contract_.outputs.size()) {
    fail("it has ", inputs, " inputs and ", outputs, " outputs; its attribute axes describes ",
         kFirstTensor + contract_.inputs.size(), " and ", contract_.outputs.size());
  }
  std::vector<int64_t> input_bytes;
  for (size_t i = 0; i < contract_.inputs.size(); ++i) {
    OrtTypeInfo* type_info = nullptr;
    check(api_, api_->KernelInfo_GetInputTypeInfo(info, kFirstTensor + i, &type_info));
    const ElementType* type = type_of(api_, type_info, "input", i);
    if (!contract_.in_types.empty()) check_type(type, contract_.in_types[i], "input", i);
    input_bytes.push_back(type->bytes);
  }
  for (size_t i = 0; i < contract_.outputs.size(); ++i) {
    OrtTypeInfo* type_info = nullptr;
    check(api_, api_->KernelInfo_GetOutputTypeInfo(info, i, &type_info));
    check_type(type_of(api_, type_info, "output", i), contract_.out_types[i], "output", i);
  }
  bytes_ = element_bytes(contract_, input_bytes);
}

std::unique_ptr<const Loaded> Kernel::load(Context context) const {
  const Driver& driver = *cuda_driver();
  auto result = std::make_unique<Loaded>();
  result->context = context;
  result->device = driver.device();
  result->records = records_for(*archive_, contract_, result->device);
  for (const Record* record : result->records) {
    result->modules.push_back(Module::acquire(driver, context, *record));
    result->functions.push_back(result->modules.back()->function(*record));
  }
  return result;
}

const Loaded& Kernel::loaded() const {
  const Context context = cuda_driver()->current_context();
  const Loaded* newest = newest_.load(std::memory_order_acquire);
  if (newest != nullptr && newest->context == context) return *newest;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& known : contexts_) {
    if (known->context == context) return *known;
  }
  contexts_.push_back(load(context));
  newest_.store(contexts_.back().get(), std::memory_order_release);
  return *contexts_.back();
}

std::vector<void*> Kernel::allocate_outputs(OrtKernelContext* context, const Sizes& sizes) const {
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

Stream Kernel::stream_of(OrtKernelContext* context) const {
  Stream stream = nullptr;
  check(api_, api_->KernelContext_GetGPUComputeStream(context, &stream));
  if (stream == nullptr && !g_run_on_cpu) fail("the runtime gave no stream to launch on");
  return stream;
}

constexpr uint64_t kTmaBoundary = 16;   // bytes that every stride of a tensor map is a multiple of

// A stride that is never stepped along may be anything, but must still be a stride.
uint64_t usable_stride(int64_t stride, int64_t bytes, uint64_t extent, uint64_t inside) {
  const uint64_t given = static_cast<uint64_t>(stride * bytes);
  return extent > 1 ? given : (inside + kTmaBoundary - 1) / kTmaBoundary * kTmaBoundary;
}

// [batch, rows, columns], or [batch, columns, rows] where rows are contiguous.
TensorBox plain_box(const MapRule& rule, const OnnxfuseTensor& tensor, int rows, int columns, int batch, int64_t size) {
  const bool turned = rule.rows_contiguous;
  const uint64_t inner = turned ? rows : columns, outer = turned ? columns : rows;
  const uint64_t batches = tensor.batch_stride == 0 ? 1 : batch;
  const uint64_t row_bytes =
      usable_stride(turned ? tensor.column_stride : tensor.row_stride, size, outer, inner * size);
  const uint64_t batch_bytes = usable_stride(tensor.batch_stride, size, batches, row_bytes * outer);
  return {tensor.pointer, size, 3, {inner, outer, batches}, {row_bytes, batch_bytes},
          {rule.box_inner, rule.box_outer, 1}, rule.swizzle, rule.tensor != Mapped::kOut};
}

// Columns in runs: those of all batches are the map's batches, which is_stacked() saw one stride walk.
TensorBox stacked_box(const MapRule& rule, const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer, int rows,
                      int columns, int batch, int64_t size) {
  const uint64_t runs = static_cast<uint64_t>(columns / outer.columns) * (tensor.batch_stride == 0 ? 1 : batch);
  const uint64_t inner = outer.columns;
  const uint64_t row_bytes = usable_stride(tensor.row_stride, size, rows, inner * size);
  const uint64_t run_bytes = usable_stride(outer.column_stride, size, runs, row_bytes * rows);
  return {tensor.pointer, size, 3, {inner, static_cast<uint64_t>(rows), runs}, {row_bytes, run_bytes},
          {rule.box_inner, rule.box_outer, 1}, rule.swizzle, rule.tensor != Mapped::kOut};
}

// A factor whose batches lie in runs: [runs, batches of a run, rows, columns], the last two as in plain_box.
TensorBox batches_box(const MapRule& rule, const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer, int rows,
                      int columns, int batch, int64_t size) {
  TensorBox box = plain_box(rule, tensor, rows, columns, outer.batches, size);
  const uint64_t runs = outer.batch_stride == 0 ? 1 : batch / outer.batches;
  box.rank = 4;
  box.extents[3] = runs;
  box.strides[2] = usable_stride(outer.batch_stride, size, runs, box.strides[1] * box.extents[2]);
  box.box[3] = 1;
  return box;
}

// [batch, runs of rows, runs of columns, rows of a run, columns of a run]
TensorBox runs_box(const MapRule& rule, const OnnxfuseTensor& tensor, const OnnxfuseOuter& outer, int rows, int columns,
                   int batch, int64_t size) {
  TensorBox box{tensor.pointer, size, kMaxRank,
                {static_cast<uint64_t>(outer.columns), static_cast<uint64_t>(outer.rows),
                 static_cast<uint64_t>(columns / outer.columns), static_cast<uint64_t>(rows / outer.rows),
                 static_cast<uint64_t>(batch)},
                {}, {rule.box_inner, rule.box_outer, 1, 1, 1}, rule.swizzle, false};
  const int64_t strides[] = {tensor.row_stride, outer.column_stride, outer.row_stride, tensor.batch_stride};
  uint64_t inside = box.extents[0] * size;
  for (size_t axis = 0; axis < kMaxRank - 1; ++axis) {
    box.strides[axis] = usable_stride(strides[axis], size, box.extents[axis + 1], inside);
    inside = box.strides[axis] * box.extents[axis + 1];
  }
  return box;
}

TensorBox tensor_box(const MapRule& rule, const Alignments& alignments, const ElementBytes& bytes,
                     const OnnxfuseArguments& args) {
  const auto has_batch_runs = [&](size_t tensor) { return (alignments.levels_of(tensor) & 4) != 0; };
  switch (rule.tensor) {
    case Mapped::kLhs:
      if (has_batch_runs(kLhsIndex)) {
        return batches_box(rule, args.lhs, args.lhs_outer, args.m, args.k, args.batch, bytes.lhs);
      }
      if (args.lhs_outer.columns < args.k) {
        return stacked_box(rule, args.lhs, args.lhs_outer, args.m, args.k, args.batch, bytes.lhs);
      }
      return plain_box(rule, args.lhs, args.m, args.k, args.batch, bytes.lhs);
    case Mapped::kRhs:
      if (has_batch_runs(kRhsIndex)) {
        return batches_box(rule, args.rhs[rule.index], args.rhs_outer, args.k, args.n, args.batch,
                           bytes.rhs[rule.index]);
      }
      return plain_box(rule, args.rhs[rule.index], args.k, args.n, args.batch, bytes.rhs[rule.index]);
    default:
      if ((alignments.levels_of(kFirstOut + rule.index) & 3) != 0) {
        return runs_box(rule, args.outs[rule.index], args.outs_outer[rule.index], args.m, args.n, args.batch,
                        bytes.outs[rule.index]);
      }
      return plain_box(rule, args.outs[rule.index], args.m, args.n, args.batch, bytes.outs[rule.index]);
  }
}

Driver::Grid grid_of(const Record& record, const OnnxfuseArguments& arguments, const Device& device) {
  const int64_t rows = (int64_t{arguments.m} + record.block_m - 1) / record.block_m;
  const int64_t columns = (int64_t{arguments.n} + record.block_n - 1) / record.block_n;
  const int64_t tiles = rows * columns * (record.cluster == 0 ? 1 : arguments.batch);
  if (tiles > kMaxGridX) {
    fail("m=", arguments.m, " and n=", arguments.n, " need ", tiles, " tiles, more than a grid has");
  }
  if (record.cluster == 0) {
    return {static_cast<unsigned>(tiles), static_cast<unsigned>(std::min(arguments.batch, kMaxGridZ))};
  }
  const int64_t clusters = std::max<int64_t>(device.multiprocessors / record.cluster, 1);
  return {static_cast<unsigned>(std::min(tiles, clusters) * record.cluster), 1};
}

void Kernel::compute(OrtKernelContext* context) const {
  std::vector<Shape> shapes;
  std::vector<void*> inputs;
  for (size_t i = 0; i < contract_.inputs.size(); ++i) {
    const OrtValue* value = nullptr;
    check(api_, api_->KernelContext_GetInput(context, kFirstTensor + i, &value));
    if (value == nullptr) fail("input ", i, " is missing");
    shapes.push_back(shape_of(api_, value));
    inputs.push_back(data_of(api_, value));
  }
  const Sizes sizes = bind_axes(contract_, shapes);
  OnnxfuseArguments arguments{};
  set_problem(contract_, sizes, &arguments);
  const std::vector<void*> outputs = allocate_outputs(context, sizes);
  if (arguments.m == 0 || arguments.n == 0 || arguments.batch == 0) return;
  set_tensors(contract_, sizes, inputs, outputs, bytes_, &arguments);
  const Loaded& code = loaded();
  const size_t chosen = choose(code.records, contract_, bytes_, arguments);
  const Record& record = *code.records[chosen];
  TensorMap maps[kMaxMaps]{};  // the kernel fetches all of them into its cache
  for (size_t i = 0; i < record.maps.size(); ++i) {
    const MapRule& rule = record.maps[i];
    if (rule.tensor == Mapped::kNothing) continue;
    cuda_driver()->encode(tensor_box(rule, record.alignments, bytes_, arguments), &maps[i]);
  }
  const bool waits = record.cluster > 0;  // the persistent kernel does
  cuda_driver()->launch(code.functions[chosen], grid_of(record, arguments, code.device), record.threads,
                        record.shared_bytes, waits, stream_of(context), &arguments,
                        record.maps.empty() ? nullptr : maps);
}

// ---- What the runtime calls ----------------------------------------------------------------------------------------

OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) noexcept {
  const auto who = [&] { return node_name(api, info); };
  return guarded(api, who, [&] { *kernel = new Kernel(api, info); });
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) noexcept {
  const auto* self = static_cast<const Kernel*>(kernel);
  return guarded(self->api(), [&] { return self->name(); }, [&] { self->compute(context); });
}

void destroy(void* kernel) noexcept { delete static_cast<Kernel*>(kernel); }

std::vector<SymbolicDim> known_shape(const OrtApi* api, const OrtShapeInferContext* context, size_t index) {
  OrtTensorTypeAndShapeInfo* info = nullptr;   // the context owns it
  check(api, api->ShapeInferContext_GetInputTypeShape(context, index, &info));
  const Shape shape = dimensions(api, info);
  std::vector<const char*> symbols(shape.size(), nullptr);
  check(api, api->GetSymbolicDimensions(info, symbols.data(), symbols.size()));
  std::vector<SymbolicDim> result;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    result.push_back({shape[dim], symbols[dim] == nullptr ? "" : symbols[dim]});
  }
  return result;
}

// A dimension that nobody knows still needs a name, because the API would store -1 as its size. The name is used once
// in a process: the runtime takes equal names for equal sizes.
std::string fresh_symbol() {
  static std::atomic<unsigned> count{0};
  return text("onnxfuse_unknown_", ++count);
}

void tell_shape(const OrtApi* api, OrtShapeInferContext* context, size_t index, const ElementType& type,
                const std::vector<SymbolicDim>& shape) {
  Shape sizes;
  std::vector<std::string> symbols;
  std::vector<const char*> pointers;
  for (const SymbolicDim& dim : shape) {
    sizes.push_back(dim.size);
    symbols.push_back(dim.size >= 0 ? "" : dim.symbol.empty() ? fresh_symbol() : dim.symbol);
  }
  for (const std::string& symbol : symbols) pointers.push_back(symbol.c_str());
  ShapeInfo info(api);
  check(api, api->CreateTensorTypeAndShapeInfo(info.out()));
  check(api, api->SetTensorElementType(info.get(), static_cast<OrtElementType>(type.onnx)));
  check(api, api->SetDimensions(info.get(), sizes.data(), sizes.size()));
  check(api, api->SetSymbolicDimensions(info.get(), pointers.data(), pointers.size()));
  check(api, api->ShapeInferContext_SetOutputTypeShape(context, index, info.get()));
}

OrtStatus* infer(const OrtCustomOp* op, OrtShapeInferContext* context) noexcept {
  const OrtApi* api = static_cast<const Op*>(op)->api;
  // The context does not know the node's name; the runtime adds it.
  OrtStatus* status = guarded(api, [] { return std::string("shape inference of a fused node"); }, [&] {
    const Contract contract = parse_contract(node_text(api, static_cast<const OrtShapeInferContext*>(context)));
    size_t count = 0;
    check(api, api->ShapeInferContext_GetInputCount(context, &count));
    std::vector<std::vector<SymbolicDim>> inputs;
    for (size_t i = kFirstTensor; i < count; ++i) inputs.push_back(known_shape(api, context, i));
    const auto outputs = infer_outputs(contract, inputs);
    for (size_t i = 0; i < outputs.size(); ++i) tell_shape(api, context, i, *contract.out_types[i], outputs[i]);
  });
  // The runtime (1.31) drops this status and says only "type inference failed"; the reason must not be lost.
  if (status != nullptr) std::fprintf(stderr, "%s\n", api->GetErrorMessage(status));
  return status;
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
    return g_run_on_cpu ? "CPUExecutionProvider" : "CUDAExecutionProvider";
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

bool run_on_cpu(bool value) { return g_run_on_cpu.exchange(value); }

std::vector<const OrtCustomOp*> fused_ops(const OrtApi* api, uint32_t api_version) {
  std::vector<const OrtCustomOp*> ops;
  for (const char* kind : kKinds) {
    ops.push_back(new Op(make_op(api, api_version, kind)));
    for (int number = 0; number < kPoolSize; ++number) {
      ops.push_back(new Op(make_op(api, api_version, text(kind, "_", number))));
    }
  }
  return ops;
}

}  // namespace onnxfuse
