// A user's own operator, `own::Double`: y = 2 x, float alone, on the CPU. For the tests of --library.
#include "ort_abi.h"

namespace {

const OrtApi* g_api = nullptr;

OrtStatus* create(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void** kernel) {
  *kernel = &g_api;
  return nullptr;
}

OrtStatus* compute(void*, OrtKernelContext* context) {
  const OrtValue* x = nullptr;
  OrtValue* y = nullptr;
  OrtTensorTypeAndShapeInfo* info = nullptr;
  size_t rank = 0;
  int64_t dims[8] = {}, count = 1;
  void *from = nullptr, *to = nullptr;
  g_api->KernelContext_GetInput(context, 0, &x);
  g_api->GetTensorTypeAndShape(x, &info);
  g_api->GetDimensionsCount(info, &rank);
  g_api->GetDimensions(info, dims, rank);
  g_api->ReleaseTensorTypeAndShapeInfo(info);
  g_api->KernelContext_GetOutput(context, 0, dims, rank, &y);
  g_api->GetTensorMutableData(const_cast<OrtValue*>(x), &from);
  g_api->GetTensorMutableData(y, &to);
  for (size_t axis = 0; axis < rank; ++axis) count *= dims[axis];
  for (int64_t i = 0; i < count; ++i) static_cast<float*>(to)[i] = 2 * static_cast<float*>(from)[i];
  return nullptr;
}

OrtCustomOp double_op() {
  OrtCustomOp op = {};
  op.version = 18;
  op.GetName = [](const OrtCustomOp*) { return "Double"; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.GetInputType = op.GetOutputType = [](const OrtCustomOp*, size_t) { return kOrtFloat; };
  op.GetInputTypeCount = op.GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{1}; };
  op.GetInputCharacteristic = op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return kOrtRequired; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return kOrtDefaultMemory; };
  op.GetVariadicInputMinArity = op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = compute;
  op.KernelDestroy = [](void*) {};
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
  op.GetMayInplace = op.GetAliasMap = [](int**, int**) { return size_t{0}; };
  op.ReleaseMayInplace = op.ReleaseAliasMap = [](int*, int*) {};
  return op;
}

}  // namespace

extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  static const OrtCustomOp op = double_op();
  static OrtCustomOpDomain* domain = nullptr;
  g_api = base->GetApi(18);
  if (domain == nullptr) {
    g_api->CreateCustomOpDomain("own", &domain);
    g_api->CustomOpDomain_Add(domain, &op);
  }
  return g_api->AddCustomOpDomain(options, domain);
}
