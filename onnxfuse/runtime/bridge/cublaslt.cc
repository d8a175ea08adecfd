#include "cublaslt.h"

#include <dlfcn.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "error.h"
#include "shared_table.h"

namespace onnxfuse {

using Handle = void*;
using Description = void*;

// The part of cublasLt.h that is called; status 0 is success. It is the same in versions 12 and 13.
struct CublasltApi {
  int (*create)(Handle*);
  int (*destroy)(Handle);
  int (*create_operation)(Description*, int compute, int scale);
  int (*destroy_operation)(Description);
  int (*set_operation)(Description, int attribute, const void* value, size_t bytes);
  int (*create_layout)(Description*, int type, uint64_t rows, uint64_t columns, int64_t pitch);
  int (*destroy_layout)(Description);
  int (*set_layout)(Description, int attribute, const void* value, size_t bytes);
  int (*create_preference)(Description*);
  int (*destroy_preference)(Description);
  int (*set_preference)(Description, int attribute, const void* value, size_t bytes);
  int (*heuristic)(Handle, Description operation, Description a, Description b, Description c, Description d,
                   Description preference, int wanted, void* results, int* found);
  int (*multiply)(Handle, Description operation, const void* alpha, const void* a, Description a_layout, const void* b,
                  Description b_layout, const void* beta, const void* c, Description c_layout, void* d,
                  Description d_layout, const void* algorithm, void* workspace, size_t workspace_bytes, Stream stream);
};

namespace {

// Values of cublasLt.h and library_types.h.
constexpr int kTypeF32 = 0, kTypeF16 = 2, kTypeBf16 = 14;
constexpr int kComputeF32 = 68, kComputeTf32 = 77;
constexpr int kTransposeA = 3, kTransposeB = 4;   // of an operation
constexpr int32_t kByTransposing = 1;
constexpr int kBatchCount = 5, kBatchStride = 6;  // of a layout
constexpr int kMaxWorkspace = 1, kReductions = 3, kAlignmentA = 5, kAlignmentB = 6, kAlignmentC = 7, kAlignmentD = 8;
constexpr uint32_t kSumsInFp32 = 2;   // where k is split: partial sums are not rounded, and come in one order
constexpr uint64_t kWorkspaceBytes = uint64_t{32} << 20;   // as much as ONNX Runtime gives it on sm_90
constexpr size_t kMostMethods = 256;   // a session whose sizes never repeat must not grow

struct Result {   // cublasLtMatmulHeuristicResult_t
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Result) == 96);

struct Types {
  int element, compute;
};

Types types_of(int64_t math) {
  switch (static_cast<LibraryMath>(math)) {
    case LibraryMath::kF16:
      return {kTypeF16, kComputeF32};
    case LibraryMath::kBf16:
      return {kTypeBf16, kComputeF32};
    default:
      return {kTypeF32, kComputeTf32};
  }
}

void check(int status, const char* what) {
  if (status != 0) fail("cuBLASLt could not ", what, ": status ", status);
}

const CublasltApi* find_api(const char* name) {
  void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  auto* api = new CublasltApi;
  const auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, symbol));
    return function != nullptr;
  };
  const bool complete =
      find(api->create, "cublasLtCreate") && find(api->destroy, "cublasLtDestroy") &&
      find(api->create_operation, "cublasLtMatmulDescCreate") &&
      find(api->destroy_operation, "cublasLtMatmulDescDestroy") &&
      find(api->set_operation, "cublasLtMatmulDescSetAttribute") &&
      find(api->create_layout, "cublasLtMatrixLayoutCreate") &&
      find(api->destroy_layout, "cublasLtMatrixLayoutDestroy") &&
      find(api->set_layout, "cublasLtMatrixLayoutSetAttribute") &&
      find(api->create_preference, "cublasLtMatmulPreferenceCreate") &&
      find(api->destroy_preference, "cublasLtMatmulPreferenceDestroy") &&
      find(api->set_preference, "cublasLtMatmulPreferenceSetAttribute") &&
      find(api->heuristic, "cublasLtMatmulAlgoGetHeuristic") && find(api->multiply, "cublasLtMatmul");
  if (complete) return api;   // keeps the library in the process: sessions hold its handles
  delete api;
  dlclose(library);
  return nullptr;
}

// The runtime may load the library after a first session without it, so one that is missing is looked for again.
const CublasltApi* loaded_api() {
  static auto* mutex = new std::mutex;
  static const CublasltApi* api = nullptr;
  std::lock_guard<std::mutex> lock(*mutex);
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
    if (api == nullptr) api = find_api(name);
  }
  return api;
}

struct ContextTable {
  std::mutex mutex;
  std::map<Context, std::weak_ptr<Cublaslt>> contexts;
};

}  // namespace

Method::Method(const CublasltApi& api, void* handle, const Product& product) : api_(api) {
  try {
    describe(product);
    choose(handle, product);
  } catch (const Error&) {
    release();
    throw;
  }
}

Method::~Method() { release(); }

void Method::release() {
  for (Description layout : {rhs_, lhs_, out_}) {
    if (layout != nullptr) api_.destroy_layout(layout);
  }
  if (operation_ != nullptr) api_.destroy_operation(operation_);
}

// The library counts along columns first, so it is asked for the transposes: out' = rhs' * lhs'.
void Method::describe(const Product& product) {
  const Types types = types_of(product.math);
  check(api_.create_operation(&operation_, types.compute, kTypeF32), "describe a product");
  const auto transpose = [&](int which, const Matrix& matrix) {
    if (matrix.transposed == 0) return;
    check(api_.set_operation(operation_, which, &kByTransposing, sizeof(kByTransposing)), "transpose a matrix");
  };
  transpose(kTransposeA, product.rhs);
  transpose(kTransposeB, product.lhs);
  const auto layout = [&](Description* made, const Matrix& matrix, int64_t rows, int64_t columns) {
    if (matrix.transposed != 0) std::swap(rows, columns);
    check(api_.create_layout(made, types.element, static_cast<uint64_t>(columns), static_cast<uint64_t>(rows),
                             matrix.pitch),
          "describe a matrix");
    const auto count = static_cast<int32_t>(product.batch);
    if (count == 1) return;
    check(api_.set_layout(*made, kBatchCount, &count, sizeof(count)), "describe a batch");
    check(api_.set_layout(*made, kBatchStride, &matrix.batch_stride, sizeof(matrix.batch_stride)), "describe a batch");
  };
  layout(&rhs_, product.rhs, product.k, product.n);
  layout(&lhs_, product.lhs, product.m, product.k);
  layout(&out_, product.out, product.m, product.n);
}

void Method::choose(void* handle, const Product& product) {
  Description preference = nullptr;
  check(api_.create_preference(&preference), "begin a choice");
  const std::unique_ptr<void, int (*)(Description)> owner(preference, api_.destroy_preference);
  check(api_.set_preference(preference, kMaxWorkspace, &kWorkspaceBytes, sizeof(kWorkspaceBytes)), "bound its workspace");
  check(api_.set_preference(preference, kReductions, &kSumsInFp32, sizeof(kSumsInFp32)), "keep its sums");
  const std::pair<int, const Matrix*> matrices[] = {
      {kAlignmentA, &product.rhs}, {kAlignmentB, &product.lhs}, {kAlignmentC, &product.out}, {kAlignmentD, &product.out}};
  for (const auto& [attribute, matrix] : matrices) {
    const auto alignment = static_cast<uint32_t>(matrix->alignment);
    check(api_.set_preference(preference, attribute, &alignment, sizeof(alignment)), "tell an alignment");
  }
  Result results[2] = {};   // one is asked for; a later version's may be longer
  int found = 0;
  check(api_.heuristic(handle, operation_, rhs_, lhs_, out_, out_, preference, 1, results, &found), "choose a kernel");
  check(results[0].status, "choose a kernel");
  if (found == 0 || results[0].workspace_bytes > kWorkspaceBytes) fail("cuBLASLt has no kernel");
  std::copy(std::begin(results[0].algorithm), std::end(results[0].algorithm), algorithm_);
  workspace_bytes_ = results[0].workspace_bytes;
}

std::shared_ptr<Cublaslt> Cublaslt::acquire(const Driver& driver, Context context) {
  static auto* table = new ContextTable;   // never destroyed: sessions may outlive this library's static objects
  const CublasltApi* api = loaded_api();
  if (api == nullptr) return nullptr;
  std::lock_guard<std::mutex> lock(table->mutex);
  drop_expired(table->contexts);
  std::weak_ptr<Cublaslt>& slot = table->contexts[context];
  std::shared_ptr<Cublaslt> library = slot.lock();
  if (library != nullptr) return library;
  try {
    slot = library = std::make_shared<Cublaslt>(*api, driver, context);
  } catch (const Error&) {
    return nullptr;   // the node's own kernels run without it
  }
  return library;
}

Cublaslt::Cublaslt(const CublasltApi& api, const Driver& driver, Context context)
    : api_(api), driver_(driver), context_(context) {
  const RelaxedCapture relaxed(driver_);
  check(api_.create(&handle_), "start");
}

Cublaslt::~Cublaslt() {
  methods_.clear();
  const PushedContext pushed(driver_, context_);
  if (pushed.exists()) api_.destroy(handle_);
}

std::shared_ptr<const Method> Cublaslt::method(const Product& product) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = methods_.find(product);
  if (known != methods_.end()) return known->second;
  std::shared_ptr<const Method> made;
  try {
    const RelaxedCapture relaxed(driver_);
    made = std::make_shared<const Method>(api_, handle_, product);
  } catch (const Error&) {
    // Refused, which is known from now on as well.
  }
  if (methods_.size() == kMostMethods) {
    methods_.erase(oldest_first_.front());
    oldest_first_.pop_front();
  }
  oldest_first_.push_back(product);
  return methods_[product] = made;
}

bool Cublaslt::multiply(const Method& method, const void* lhs, const void* rhs, void* out, void* workspace,
                        Stream stream) const {
  constexpr float kOne = 1, kZero = 0;
  const RelaxedCapture relaxed(driver_);   // the library loads the code of a kernel when it is launched first
  return api_.multiply(handle_, method.operation_, &kOne, rhs, method.rhs_, lhs, method.lhs_, &kZero, out, method.out_,
                       out, method.out_, method.algorithm_, workspace, method.workspace_bytes_, stream) == 0;
}

}  // namespace onnxfuse
