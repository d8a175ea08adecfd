// What ONNX Runtime finds in the shared library.
#include <cstdio>
#include <map>
#include <mutex>

#include "driver.h"
#include "fused_gemm.h"
#include "ort.h"

#define ONNXFUSE_EXPORT extern "C" __attribute__((visibility("default")))

namespace onnxfuse {
namespace {

constexpr uint32_t kApi = 23;   // of the runtime's functions and of OrtCustomOp: what the kernels were run with
constexpr int kOldestMinor = 27;   // of ONNX Runtime 1: the first that kernels were run in on a GPU (docs/limits.md)

bool is_supported(const char* version) {
  int major = 0, minor = 0;
  return std::sscanf(version, "%d.%d", &major, &minor) == 2 && (major > 1 || (major == 1 && minor >= kOldestMinor));
}

// The domain of one runtime. Sessions keep raw pointers to it, so it is made once and never released.
OrtCustomOpDomain* domain_of(const OrtApi* api) {
  static auto* mutex = new std::mutex;
  static auto* domains = new std::map<const OrtApi*, OrtCustomOpDomain*>;
  std::lock_guard<std::mutex> lock(*mutex);
  OrtCustomOpDomain*& domain = (*domains)[api];
  if (domain != nullptr) return domain;
  OrtCustomOpDomain* created = nullptr;
  check(api, api->CreateCustomOpDomain(kDomain, &created));
  for (const OrtCustomOp* op : fused_ops(api, kApi)) {
    check(api, api->CustomOpDomain_Add(created, op));
  }
  return domain = created;
}

OrtStatus* register_ops(OrtSessionOptions* options, const OrtApiBase* base) noexcept {
  // Without a device the op must not exist: the runtime then runs the node's function body.
  if (cuda_driver() == nullptr) return nullptr;
  const OrtApi* api = is_supported(base->GetVersionString()) ? base->GetApi(kApi) : nullptr;
  if (api == nullptr) {
    const std::string message =
        text("onnxfuse needs ONNX Runtime 1.", kOldestMinor, " or later to run its kernels, and this is ",
             base->GetVersionString(), "; without this library it runs the original nodes");
    return base->GetApi(1)->CreateStatus(kOrtFail, message.c_str());
  }
  return guarded(api, [] { return std::string("registering the library"); },
                 [&] { check(api, api->AddCustomOpDomain(options, domain_of(api))); });
}

}  // namespace
}  // namespace onnxfuse

ONNXFUSE_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  return onnxfuse::register_ops(options, base);
}
