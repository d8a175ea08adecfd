// A stand-in for libcuda.so.1 on a machine without a GPU: it counts calls, remembers the last launch, and computes the
// product on the CPU from the same argument struct that a kernel gets. An entry is called `fake_pP_lL`: P parts that
// are multiplied with each other, then L loads that are added. All tensors are float; `fake_p9_l0` touches none. What
// copies lhs before a kernel has its real name, and copies floats.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "kernels/cuda/common/arguments.cuh"

using Arguments = OnnxfuseArguments;
using Tensor = OnnxfuseTensor;

// What a real driver packs into 128 bytes is kept as it was given.
struct alignas(64) TensorMap {
  const void* pointer;
  uint64_t extents[5], strides[4];
  uint32_t box[5], rank;
  int type, swizzle;
  char rest[16];
};
static_assert(sizeof(TensorMap) == 128, "as large as the real one");

struct Function {
  int parts, loads, shared;
  bool copies;
};

struct LaunchAttribute {
  int which;
  alignas(8) int value[16];
};

struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};

static std::atomic<int> loads, unloads, launches, copies;
static std::mutex last_mutex;
static unsigned last_grid[6], last_shared;
static Arguments last_arguments;
static TensorMap last_maps[9];
static int map_count;
static bool last_early;
static char last_image[64];
static thread_local void* current = reinterpret_cast<void*>(0x1000);

extern "C" {

int fake_loads() { return loads; }
int fake_unloads() { return unloads; }
int fake_launches() { return launches; }
int fake_copies() { return copies; }
const char* fake_last_image() { return last_image; }
void fake_set_context(void* context) { current = context; }
void fake_last_launch(unsigned* grid, unsigned* shared, Arguments* arguments) {
  memcpy(grid, last_grid, sizeof last_grid);
  *shared = last_shared;
  *arguments = last_arguments;
}

int fake_last_early() { return last_early; }
int fake_last_maps(TensorMap* maps) {
  memcpy(maps, last_maps, sizeof last_maps);
  return map_count;
}
int cuTensorMapEncodeTiled(TensorMap* map, int type, uint32_t rank, void* pointer, const uint64_t* extents,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                           int swizzle, int promotion, int fill) {
  const bool aligned = reinterpret_cast<uintptr_t>(map) % 64 == 0 && reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  if (rank < 3 || rank > 5 || !aligned || interleave != 0 || promotion != 3 || fill != 0) return 1;
  *map = {pointer, {}, {}, {}, rank, type, swizzle, {}};
  for (uint32_t axis = 0; axis < rank; ++axis) {
    if (extents[axis] == 0 || box[axis] == 0 || box[axis] > 256 || steps[axis] != 1) return 1;
    map->extents[axis] = extents[axis];
    map->box[axis] = box[axis];
  }
  for (uint32_t axis = 0; axis < rank - 1; ++axis) {
    if (strides[axis] % 16 != 0 || strides[axis] == 0) return 1;
    map->strides[axis] = strides[axis];
  }
  return 0;
}

static int setting(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value ? atoi(value) : otherwise;
}

int cuInit(unsigned flags) { return flags + setting("FAKE_CUINIT", 0); }
int cuDeviceGetCount(int* count) { *count = setting("FAKE_DEVICES", 1); return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDriverGetVersion(int* version) { *version = setting("FAKE_VERSION", 13000); return 0; }
int cuGetErrorName(int error, const char** name) {
  *name = error == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : nullptr;
  return 0;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == 719 ? "launch failed" : nullptr;
  return 0;
}
int cuCtxGetCurrent(void** context) { *context = current; return 0; }
int cuCtxPushCurrent_v2(void* context) { current = context; return 0; }
int cuCtxPopCurrent_v2(void** context) { *context = current; current = reinterpret_cast<void*>(0x1000); return 0; }
int cuCtxGetDevice(int* device) { *device = 0; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75   ? setting(device == 0 ? "FAKE_MAJOR" : "FAKE_MAJOR_OF_OTHERS", 9)
           : attribute == 76 ? setting("FAKE_MINOR", 0)
           : attribute == 16 ? 132
                             : 227 * 1024;
  return 0;
}
int cuModuleLoadData(void** module, const void* image) {
  ++loads;
  snprintf(last_image, sizeof last_image, "%s", static_cast<const char*>(image));
  *module = strdup(static_cast<const char*>(image));
  return setting("FAKE_LOAD_ERROR", 0);
}
int cuModuleUnload(void* module) {
  ++unloads;
  free(module);
  return 0;
}
int cuModuleGetFunction(void** function, void*, const char* entry) {
  auto* made = new Function{};
  made->copies = strcmp(entry, "onnxfuse_copy_rows") == 0;
  if (!made->copies && sscanf(entry, "fake_p%d_l%d", &made->parts, &made->loads) != 2) return 500;
  *function = made;
  return 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  if (attribute != 8) return 1;
  static_cast<Function*>(function)->shared = value;
  return 0;
}

static float* at(const Tensor& t, const OnnxfuseOuter& o, long long batch, long long row, long long column) {
  const long long rows = row / o.rows * o.row_stride + row % o.rows * t.row_stride;
  const long long columns = column / o.columns * o.column_stride + column % o.columns * t.column_stride;
  const long long batches = batch / o.batches * o.batch_stride + batch % o.batches * t.batch_stride;
  return static_cast<float*>(t.pointer) + batches + rows + columns;
}

static float element(const Function* f, const Arguments* a, int b, int m, int n) {
  float result = 1;
  for (int part = 0; part < f->parts; ++part) {
    float sum = 0;
    for (int k = 0; k < a->k; ++k) sum += *at(a->lhs, a->lhs_outer, b, m, k) * *at(a->rhs[part], a->rhs_outer, b, k, n);
    result *= sum;
  }
  for (int load = 0; load < f->loads; ++load) result += *at(a->loads[load], a->loads_outer[load], b, m, n);
  return result;
}

static void copy_lhs(const Arguments* a) {
  ++copies;
  for (int b = 0; b < a->batch; ++b)
    for (int m = 0; m < a->m; ++m)
      memcpy(static_cast<float*>(a->outs[0].pointer) + b * a->outs[0].batch_stride + m * a->outs[0].row_stride,
             static_cast<const float*>(a->lhs.pointer) + b * a->lhs.batch_stride + m * a->lhs.row_stride,
             a->k * sizeof(float));
}

int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void*, void** parameters, void**) {
  const auto* f = static_cast<const Function*>(function);
  const auto* a = static_cast<const Arguments*>(parameters[0]);
  const unsigned grid[6] = {gx, gy, gz, bx, by, bz};
  if (setting("FAKE_LAUNCH_ERROR", 0)) return setting("FAKE_LAUNCH_ERROR", 0);
  if (shared > static_cast<unsigned>(f->shared)) return 1;
  ++launches;
  {
    std::lock_guard<std::mutex> lock(last_mutex);
    memcpy(last_grid, grid, sizeof grid);
    last_shared = shared;
    last_arguments = *a;
    last_early = false;
    map_count = parameters[1] != nullptr;
    if (map_count) memcpy(last_maps, parameters[1], sizeof last_maps);
  }
  if (f->copies) copy_lhs(a);
  if (f->copies || f->parts == 9) return 0;
  for (int b = 0; b < a->batch; ++b)
    for (int m = 0; m < a->m; ++m)
      for (int n = 0; n < a->n; ++n) *at(a->outs[0], a->outs_outer[0], b, m, n) = element(f, a, b, m, n);
  return 0;
}

int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** parameters, void** extra) {
  constexpr int kProgrammaticStreamSerialization = 6;
  const auto& [grid, block, shared, stream, attributes, count] = *config;
  if (count != 1 || attributes->which != kProgrammaticStreamSerialization || attributes->value[0] != 1) return 1;
  const int result = cuLaunchKernel(function, grid[0], grid[1], grid[2], block[0], block[1], block[2], shared, stream,
                                    parameters, extra);
  std::lock_guard<std::mutex> lock(last_mutex);
  last_early = result == 0;
  return result;
}

}  // extern "C"
