#include "original_op.h"

#include "cached_attention.h"
#include "error.h"

namespace onnxfuse {
namespace {

constexpr char kOp[] = "GroupQueryAttention", kOpDomain[] = "com.microsoft";
constexpr int kOutputs = 3;

// The attributes of an op while it is created.
class Attributes {
 public:
  explicit Attributes(const OrtApi* api) : api_(api) {}
  ~Attributes() {
    for (OrtOpAttr* made : made_) api_->ReleaseOpAttr(made);
  }
  Attributes(const Attributes&) = delete;
  Attributes& operator=(const Attributes&) = delete;

  void add(const OriginalAttribute& attribute) {
    const void* data = attribute.is_integer ? static_cast<const void*>(&attribute.integer) : &attribute.number;
    const OrtAttributeType type = attribute.is_integer ? kOrtAttributeInt : kOrtAttributeFloat;
    OrtOpAttr* made = nullptr;
    check(api_, api_->CreateOpAttr(attribute.name.c_str(), data, 1, type, &made));
    made_.push_back(made);
  }
  const OrtOpAttr* const* data() const { return made_.data(); }
  int count() const { return static_cast<int>(made_.size()); }

 private:
  const OrtApi* api_;
  std::vector<OrtOpAttr*> made_;
};

}  // namespace

OriginalOp::OriginalOp(const OrtApi* api, const OrtKernelInfo* info, const Contract& contract, OrtElementType type)
    : api_(api) {
  // Versions of the runtime differ in which of these the op has; it asks for its own.
  const char* names[] = {"T", "M", "T_CACHE", "T_KV_SCALE"};
  const OrtElementType types[] = {type, kOrtInt32, type, kOrtFloat};
  Attributes attributes(api);
  for (const OriginalAttribute& attribute : contract.original) attributes.add(attribute);
  check(api, api->CreateOp(info, kOp, kOpDomain, 1, names, types, static_cast<int>(std::size(types)), attributes.data(),
                           attributes.count(), static_cast<int>(original_inputs(CachedInputs(contract))), kOutputs, &op_));
}

OriginalOp::~OriginalOp() {
  if (op_ != nullptr) api_->ReleaseOp(op_);
}

void OriginalOp::invoke(const OrtKernelContext* context, const std::vector<const OrtValue*>& inputs,
                        const std::vector<OrtValue*>& outputs) const {
  check(api_, api_->InvokeOp(context, op_, inputs.data(), static_cast<int>(inputs.size()), outputs.data(),
                             static_cast<int>(outputs.size())));
}

HostScalar::HostScalar(const OrtApi* api, int32_t number) : api_(api), number_(number) {
  check(api, api->CreateCpuMemoryInfo(kOrtDeviceAllocator, kOrtDefaultMemory, &memory_));
  check(api, api->CreateTensorWithDataAsOrtValue(memory_, &number_, sizeof number_, nullptr, 0, kOrtInt32, &value_));
}

HostScalar::~HostScalar() {
  if (value_ != nullptr) api_->ReleaseValue(value_);
  if (memory_ != nullptr) api_->ReleaseMemoryInfo(memory_);
}

}  // namespace onnxfuse
