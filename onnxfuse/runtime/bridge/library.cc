// What ONNX Runtime finds in the shared library.
#include <map>
#include <mutex>

#include "driver.h"
#include "fused_gemm.h"
#include "ort.h"

#define ONNXFUSE_EXPORT extern "C" __attribute__((visibility("default")))

namespace onnxfuse {
namespace {

constexpr uint32_t kNewestApi = 23;
constexpr uint32_t kOldestApi = 18;   // the first whose OrtCustomOp has all the members that ort_abi.h declares

struct Api {
  const OrtApi* table = nullptr;
  uint32_t version = 0;
};

Api newest_api(const OrtApiBase* base) {
  for (uint32_t version = kNewestApi; version >= kOldestApi; --version) {
    if (const OrtApi* table = base->GetApi(version)) return {table, version};
  }
  return {};
}

// The domain of one runtime. Sessions keep raw pointers to it, so it is made once and never released.
OrtCustomOpDomain* domain_of(const Api& api) {
  static auto* mutex = new std::mutex;
  static auto* domains = new std::map<const OrtApi*, OrtCustomOpDomain*>;
  std::lock_guard<std::mutex> lock(*mutex);
  OrtCustomOpDomain*& domain = (*domains)[api.table];
  if (domain != nullptr) return domain;
  OrtCustomOpDomain* created = nullptr;
  check(api.table, api.table->CreateCustomOpDomain(kDomain, &created));
  for (const OrtCustomOp* op : fused_ops(api.table, api.version)) {
    check(api.table, api.table->CustomOpDomain_Add(created, op));
  }
  return domain = created;
}

OrtStatus* register_ops(OrtSessionOptions* options, const OrtApiBase* base) noexcept {
  // Without a device the op must not exist: the runtime then runs the node's function body.
  if (cuda_driver() == nullptr) return nullptr;
  const Api api = newest_api(base);
  if (api.table == nullptr) {
    return base->GetApi(1)->CreateStatus(kOrtFail, "onnxfuse needs ONNX Runtime 1.18 or later");
  }
  return guarded(api.table, [] { return std::string("registering the library"); },
                 [&] { check(api.table, api.table->AddCustomOpDomain(options, domain_of(api))); });
}

}  // namespace
}  // namespace onnxfuse

ONNXFUSE_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  return onnxfuse::register_ops(options, base);
}
