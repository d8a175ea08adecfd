// The part of ONNX Runtime's C API that main.cc uses, under its public names, for machines without the C headers: no
// Python package ships them. The table of functions is frozen and append-only, so a function is its position in it.
// With the real headers at hand, build with -DONNXRUNTIME_INCLUDE_DIR=... and this file is not read.
#pragma once

#include <cstddef>
#include <cstdint>

#define ORT_API_VERSION 17

extern "C" {

struct OrtAllocator;
struct OrtEnv;
struct OrtMemoryInfo;
struct OrtRunOptions;
struct OrtSession;
struct OrtSessionOptions;
struct OrtStatus;
struct OrtTensorTypeAndShapeInfo;
struct OrtTypeInfo;
struct OrtValue;

enum OrtLoggingLevel { ORT_LOGGING_LEVEL_WARNING = 2 };
enum OrtAllocatorType { OrtArenaAllocator = 1 };
enum OrtMemType { OrtMemTypeDefault = 0 };
enum ONNXTensorElementDataType : int {};  // numbered as onnx.TensorProto.DataType numbers them

struct OrtApi {
  void* gap_0[2];
  const char* (*GetErrorMessage)(const OrtStatus*);
  OrtStatus* (*CreateEnv)(OrtLoggingLevel, const char*, OrtEnv**);
  void* gap_4[3];
  OrtStatus* (*CreateSession)(const OrtEnv*, const char*, const OrtSessionOptions*, OrtSession**);
  void* gap_8[1];
  OrtStatus* (*Run)(OrtSession*, const OrtRunOptions*, const char* const*, const OrtValue* const*, size_t,
                    const char* const*, size_t, OrtValue**);
  OrtStatus* (*CreateSessionOptions)(OrtSessionOptions**);
  void* gap_11[18];
  OrtStatus* (*RegisterCustomOpsLibrary)(OrtSessionOptions*, const char*, void**);
  OrtStatus* (*SessionGetInputCount)(const OrtSession*, size_t*);
  OrtStatus* (*SessionGetOutputCount)(const OrtSession*, size_t*);
  void* gap_32[1];
  OrtStatus* (*SessionGetInputTypeInfo)(const OrtSession*, size_t, OrtTypeInfo**);
  void* gap_34[2];
  OrtStatus* (*SessionGetInputName)(const OrtSession*, size_t, OrtAllocator*, char**);
  OrtStatus* (*SessionGetOutputName)(const OrtSession*, size_t, OrtAllocator*, char**);
  void* gap_38[11];
  OrtStatus* (*CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo*, void*, size_t, const int64_t*, size_t,
                                               ONNXTensorElementDataType, OrtValue**);
  void* gap_50[1];
  OrtStatus* (*GetTensorMutableData)(OrtValue*, void**);
  void* gap_52[3];
  OrtStatus* (*CastTypeInfoToTensorInfo)(const OrtTypeInfo*, const OrtTensorTypeAndShapeInfo**);
  void* gap_56[4];
  OrtStatus* (*GetTensorElementType)(const OrtTensorTypeAndShapeInfo*, ONNXTensorElementDataType*);
  OrtStatus* (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo*, size_t*);
  OrtStatus* (*GetDimensions)(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t);
  void* gap_63[2];
  OrtStatus* (*GetTensorTypeAndShape)(const OrtValue*, OrtTensorTypeAndShapeInfo**);
  void* gap_66[3];
  OrtStatus* (*CreateCpuMemoryInfo)(OrtAllocatorType, OrtMemType, OrtMemoryInfo**);
  void* gap_70[8];
  OrtStatus* (*GetAllocatorWithDefaultOptions)(OrtAllocator**);
  void* gap_79[13];
  void (*ReleaseEnv)(OrtEnv*);
  void (*ReleaseStatus)(OrtStatus*);
  void (*ReleaseMemoryInfo)(OrtMemoryInfo*);
  void (*ReleaseSession)(OrtSession*);
  void (*ReleaseValue)(OrtValue*);
  void* gap_97[1];
  void (*ReleaseTypeInfo)(OrtTypeInfo*);
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo*);
  void (*ReleaseSessionOptions)(OrtSessionOptions*);
};

static_assert(offsetof(OrtApi, CreateEnv) == 3 * sizeof(void*), "CreateEnv");
static_assert(offsetof(OrtApi, RegisterCustomOpsLibrary) == 29 * sizeof(void*), "RegisterCustomOpsLibrary");
static_assert(offsetof(OrtApi, GetTensorTypeAndShape) == 65 * sizeof(void*), "GetTensorTypeAndShape");
static_assert(offsetof(OrtApi, ReleaseSessionOptions) == 100 * sizeof(void*), "ReleaseSessionOptions");

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

const OrtApiBase* OrtGetApiBase();

}  // extern "C"
