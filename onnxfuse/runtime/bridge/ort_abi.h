// The part of ONNX Runtime's C ABI that the bridge uses. No package ships the C headers, and the table of functions is
// frozen and append-only, so the slots that are called are declared here by position and checked by static_assert.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtShapeInferContext;
struct OrtValue;
struct OrtTypeInfo;
struct OrtTensorTypeAndShapeInfo;
struct OrtOpAttr;
struct OrtCustomOp;
struct OrtAllocator;
struct OrtOp;
struct OrtMemoryInfo;

enum OrtErrorCode { kOrtFail = 1 };
enum OrtElementType {
  kOrtUndefined = 0,
  kOrtFloat = 1,
  kOrtUint8 = 2,
  kOrtInt8 = 3,
  kOrtUint16 = 4,
  kOrtInt16 = 5,
  kOrtInt32 = 6,
  kOrtInt64 = 7,
  kOrtBool = 9,
  kOrtFloat16 = 10,
  kOrtDouble = 11,
  kOrtUint32 = 12,
  kOrtUint64 = 13,
  kOrtBfloat16 = 16
};
enum OrtCharacteristic { kOrtRequired = 0, kOrtOptional = 1, kOrtVariadic = 2 };
enum OrtMemoryType { kOrtCpuInput = -2, kOrtCpuOutput = -1, kOrtDefaultMemory = 0 };
enum OrtAttributeType { kOrtAttributeInt = 1, kOrtAttributeFloat = 3, kOrtAttributeString = 5 };
enum OrtAllocatorType { kOrtDeviceAllocator = 0 };

struct OrtApi {
  OrtStatus* (*CreateStatus)(OrtErrorCode, const char*);
  void* gap_1[1];
  const char* (*GetErrorMessage)(const OrtStatus*);
  void* gap_3[23];
  OrtStatus* (*CreateCustomOpDomain)(const char*, OrtCustomOpDomain**);
  OrtStatus* (*CustomOpDomain_Add)(OrtCustomOpDomain*, const OrtCustomOp*);
  OrtStatus* (*AddCustomOpDomain)(OrtSessionOptions*, OrtCustomOpDomain*);
  void* gap_29[20];
  OrtStatus* (*CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo*, void*, size_t, const int64_t*, size_t, OrtElementType,
                                               OrtValue**);
  void* gap_50[1];
  OrtStatus* (*GetTensorMutableData)(OrtValue*, void**);
  void* gap_52[3];
  OrtStatus* (*CastTypeInfoToTensorInfo)(const OrtTypeInfo*, const OrtTensorTypeAndShapeInfo**);
  void* gap_56[1];
  OrtStatus* (*CreateTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo**);
  OrtStatus* (*SetTensorElementType)(OrtTensorTypeAndShapeInfo*, OrtElementType);
  OrtStatus* (*SetDimensions)(OrtTensorTypeAndShapeInfo*, const int64_t*, size_t);
  OrtStatus* (*GetTensorElementType)(const OrtTensorTypeAndShapeInfo*, OrtElementType*);
  OrtStatus* (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo*, size_t*);
  OrtStatus* (*GetDimensions)(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t);
  OrtStatus* (*GetSymbolicDimensions)(const OrtTensorTypeAndShapeInfo*, const char**, size_t);
  void* gap_64[1];
  OrtStatus* (*GetTensorTypeAndShape)(const OrtValue*, OrtTensorTypeAndShapeInfo**);
  void* gap_66[3];
  OrtStatus* (*CreateCpuMemoryInfo)(OrtAllocatorType, OrtMemoryType, OrtMemoryInfo**);
  void* gap_70[5];
  OrtStatus* (*AllocatorAlloc)(OrtAllocator*, size_t, void**);
  OrtStatus* (*AllocatorFree)(OrtAllocator*, void*);
  OrtStatus* (*AllocatorGetInfo)(const OrtAllocator*, const OrtMemoryInfo**);
  void* gap_78[9];
  OrtStatus* (*KernelInfoGetAttribute_string)(const OrtKernelInfo*, const char*, char*, size_t*);
  void* gap_88[2];
  OrtStatus* (*KernelContext_GetInput)(const OrtKernelContext*, size_t, const OrtValue**);
  OrtStatus* (*KernelContext_GetOutput)(OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**);
  void* gap_92[1];
  void (*ReleaseStatus)(OrtStatus*);
  void (*ReleaseMemoryInfo)(OrtMemoryInfo*);
  void* gap_95[1];
  void (*ReleaseValue)(OrtValue*);
  void* gap_97[1];
  void (*ReleaseTypeInfo)(OrtTypeInfo*);
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo*);
  void* gap_100[32];
  void (*ReleaseAllocator)(OrtAllocator*);
  void* gap_133[60];
  OrtStatus* (*KernelContext_GetGPUComputeStream)(const OrtKernelContext*, void**);
  void* gap_194[17];
  OrtStatus* (*CreateOpAttr)(const char*, const void*, int, OrtAttributeType, OrtOpAttr**);
  void (*ReleaseOpAttr)(OrtOpAttr*);
  OrtStatus* (*CreateOp)(const OrtKernelInfo*, const char*, const char*, int, const char**, const OrtElementType*, int,
                         const OrtOpAttr* const*, int, int, int, OrtOp**);
  OrtStatus* (*InvokeOp)(const OrtKernelContext*, const OrtOp*, const OrtValue* const*, int, OrtValue* const*, int);
  void (*ReleaseOp)(OrtOp*);
  void* gap_216[14];
  OrtStatus* (*KernelInfo_GetInputCount)(const OrtKernelInfo*, size_t*);
  OrtStatus* (*KernelInfo_GetOutputCount)(const OrtKernelInfo*, size_t*);
  void* gap_232[2];
  OrtStatus* (*KernelInfo_GetInputTypeInfo)(const OrtKernelInfo*, size_t, OrtTypeInfo**);
  OrtStatus* (*KernelInfo_GetOutputTypeInfo)(const OrtKernelInfo*, size_t, OrtTypeInfo**);
  void* gap_236[8];
  OrtStatus* (*KernelInfo_GetNodeName)(const OrtKernelInfo*, char*, size_t*);
  void* gap_245[4];
  OrtStatus* (*KernelInfoGetConstantInput_tensor)(const OrtKernelInfo*, size_t, int*, const OrtValue**);
  void* gap_250[17];
  OrtStatus* (*ShapeInferContext_GetInputCount)(const OrtShapeInferContext*, size_t*);
  OrtStatus* (*ShapeInferContext_GetInputTypeShape)(const OrtShapeInferContext*, size_t, OrtTensorTypeAndShapeInfo**);
  OrtStatus* (*ShapeInferContext_GetAttribute)(const OrtShapeInferContext*, const char*, const OrtOpAttr**);
  OrtStatus* (*ShapeInferContext_SetOutputTypeShape)(const OrtShapeInferContext*, size_t,
                                                     const OrtTensorTypeAndShapeInfo*);
  OrtStatus* (*SetSymbolicDimensions)(OrtTensorTypeAndShapeInfo*, const char**, size_t);
  OrtStatus* (*ReadOpAttr)(const OrtOpAttr*, OrtAttributeType, void*, size_t, size_t*);
  void* gap_273[4];
  OrtStatus* (*KernelContext_GetScratchBuffer)(const OrtKernelContext*, const OrtMemoryInfo*, size_t, void**);
  OrtStatus* (*KernelInfoGetAllocator)(const OrtKernelInfo*, OrtMemoryType, OrtAllocator**);
};

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  OrtElementType (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  OrtElementType (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);
  void (*KernelDestroy)(void*);
  OrtCharacteristic (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  OrtCharacteristic (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  OrtMemoryType (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int**, int**);
  void (*ReleaseMayInplace)(int*, int*);
  size_t (*GetAliasMap)(int**, int**);
  void (*ReleaseAliasMap)(int*, int*);
};

}  // extern "C"

#define ONNXFUSE_CHECK_SLOT(function, slot) \
  static_assert(offsetof(OrtApi, function) == (slot) * sizeof(void*), "OrtApi::" #function)
ONNXFUSE_CHECK_SLOT(CreateStatus, 0);
ONNXFUSE_CHECK_SLOT(GetErrorMessage, 2);
ONNXFUSE_CHECK_SLOT(CreateCustomOpDomain, 26);
ONNXFUSE_CHECK_SLOT(CustomOpDomain_Add, 27);
ONNXFUSE_CHECK_SLOT(AddCustomOpDomain, 28);
ONNXFUSE_CHECK_SLOT(CreateTensorWithDataAsOrtValue, 49);
ONNXFUSE_CHECK_SLOT(GetTensorMutableData, 51);
ONNXFUSE_CHECK_SLOT(CastTypeInfoToTensorInfo, 55);
ONNXFUSE_CHECK_SLOT(CreateTensorTypeAndShapeInfo, 57);
ONNXFUSE_CHECK_SLOT(SetTensorElementType, 58);
ONNXFUSE_CHECK_SLOT(SetDimensions, 59);
ONNXFUSE_CHECK_SLOT(GetTensorElementType, 60);
ONNXFUSE_CHECK_SLOT(GetDimensionsCount, 61);
ONNXFUSE_CHECK_SLOT(GetDimensions, 62);
ONNXFUSE_CHECK_SLOT(GetSymbolicDimensions, 63);
ONNXFUSE_CHECK_SLOT(GetTensorTypeAndShape, 65);
ONNXFUSE_CHECK_SLOT(CreateCpuMemoryInfo, 69);
ONNXFUSE_CHECK_SLOT(AllocatorAlloc, 75);
ONNXFUSE_CHECK_SLOT(AllocatorFree, 76);
ONNXFUSE_CHECK_SLOT(AllocatorGetInfo, 77);
ONNXFUSE_CHECK_SLOT(KernelInfoGetAttribute_string, 87);
ONNXFUSE_CHECK_SLOT(KernelContext_GetInput, 90);
ONNXFUSE_CHECK_SLOT(KernelContext_GetOutput, 91);
ONNXFUSE_CHECK_SLOT(ReleaseStatus, 93);
ONNXFUSE_CHECK_SLOT(ReleaseMemoryInfo, 94);
ONNXFUSE_CHECK_SLOT(ReleaseValue, 96);
ONNXFUSE_CHECK_SLOT(ReleaseTypeInfo, 98);
ONNXFUSE_CHECK_SLOT(ReleaseTensorTypeAndShapeInfo, 99);
ONNXFUSE_CHECK_SLOT(ReleaseAllocator, 132);
ONNXFUSE_CHECK_SLOT(KernelContext_GetGPUComputeStream, 193);
ONNXFUSE_CHECK_SLOT(CreateOpAttr, 211);
ONNXFUSE_CHECK_SLOT(ReleaseOpAttr, 212);
ONNXFUSE_CHECK_SLOT(CreateOp, 213);
ONNXFUSE_CHECK_SLOT(InvokeOp, 214);
ONNXFUSE_CHECK_SLOT(ReleaseOp, 215);
ONNXFUSE_CHECK_SLOT(KernelInfo_GetInputCount, 230);
ONNXFUSE_CHECK_SLOT(KernelInfo_GetOutputCount, 231);
ONNXFUSE_CHECK_SLOT(KernelInfo_GetInputTypeInfo, 234);
ONNXFUSE_CHECK_SLOT(KernelInfo_GetOutputTypeInfo, 235);
ONNXFUSE_CHECK_SLOT(KernelInfo_GetNodeName, 244);
ONNXFUSE_CHECK_SLOT(KernelInfoGetConstantInput_tensor, 249);
ONNXFUSE_CHECK_SLOT(ShapeInferContext_GetInputCount, 267);
ONNXFUSE_CHECK_SLOT(ShapeInferContext_GetInputTypeShape, 268);
ONNXFUSE_CHECK_SLOT(ShapeInferContext_GetAttribute, 269);
ONNXFUSE_CHECK_SLOT(ShapeInferContext_SetOutputTypeShape, 270);
ONNXFUSE_CHECK_SLOT(SetSymbolicDimensions, 271);
ONNXFUSE_CHECK_SLOT(ReadOpAttr, 272);
ONNXFUSE_CHECK_SLOT(KernelContext_GetScratchBuffer, 277);
ONNXFUSE_CHECK_SLOT(KernelInfoGetAllocator, 278);
#undef ONNXFUSE_CHECK_SLOT

#define ONNXFUSE_CHECK_OFFSET(member, bytes) \
  static_assert(offsetof(OrtCustomOp, member) == (bytes), "OrtCustomOp::" #member)
ONNXFUSE_CHECK_OFFSET(version, 0);
ONNXFUSE_CHECK_OFFSET(CreateKernel, 8);
ONNXFUSE_CHECK_OFFSET(GetName, 16);
ONNXFUSE_CHECK_OFFSET(GetExecutionProviderType, 24);
ONNXFUSE_CHECK_OFFSET(GetInputType, 32);
ONNXFUSE_CHECK_OFFSET(GetInputTypeCount, 40);
ONNXFUSE_CHECK_OFFSET(GetOutputType, 48);
ONNXFUSE_CHECK_OFFSET(GetOutputTypeCount, 56);
ONNXFUSE_CHECK_OFFSET(KernelCompute, 64);
ONNXFUSE_CHECK_OFFSET(KernelDestroy, 72);
ONNXFUSE_CHECK_OFFSET(GetInputCharacteristic, 80);
ONNXFUSE_CHECK_OFFSET(GetOutputCharacteristic, 88);
ONNXFUSE_CHECK_OFFSET(GetInputMemoryType, 96);
ONNXFUSE_CHECK_OFFSET(GetVariadicInputMinArity, 104);
ONNXFUSE_CHECK_OFFSET(GetVariadicInputHomogeneity, 112);
ONNXFUSE_CHECK_OFFSET(GetVariadicOutputMinArity, 120);
ONNXFUSE_CHECK_OFFSET(GetVariadicOutputHomogeneity, 128);
ONNXFUSE_CHECK_OFFSET(CreateKernelV2, 136);
ONNXFUSE_CHECK_OFFSET(KernelComputeV2, 144);
ONNXFUSE_CHECK_OFFSET(InferOutputShapeFn, 152);
ONNXFUSE_CHECK_OFFSET(GetStartVersion, 160);
ONNXFUSE_CHECK_OFFSET(GetEndVersion, 168);
ONNXFUSE_CHECK_OFFSET(GetMayInplace, 176);
ONNXFUSE_CHECK_OFFSET(ReleaseMayInplace, 184);
ONNXFUSE_CHECK_OFFSET(GetAliasMap, 192);
ONNXFUSE_CHECK_OFFSET(ReleaseAliasMap, 200);
static_assert(sizeof(OrtCustomOp) == 208, "OrtCustomOp");
#undef ONNXFUSE_CHECK_OFFSET
