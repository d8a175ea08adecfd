#include "driver.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <tuple>

#include "error.h"
#include "shared_table.h"

namespace onnxfuse {
namespace {

// Values of cuda.h, which the bridge is built without.
constexpr int kCapabilityMajor = 75;
constexpr int kCapabilityMinor = 76;
constexpr int kSharedBytesOptIn = 97;
constexpr int kMultiprocessors = 16;
constexpr int kMapUint8 = 0, kMapUint16 = 1, kMapUint32 = 2;   // only their size matters: boxes are copied, and filled with zeros
constexpr int kMapTfloat32 = 11;   // fp32 rounded to TF32 on the way: the tensor cores would cut the last 13 bits off
constexpr int kMapNoInterleave = 0;
constexpr int kMapPromoteTo256Bytes = 3;
constexpr int kMapFillZero = 0;
constexpr int kMaxDynamicSharedBytes = 8;
constexpr int kCaptureRelaxed = 2;
constexpr int kStartEarly = 6;              // programmatic stream serialization
constexpr int kCapturesEarlyStart = 12030;  // the first driver that records such a launch into a CUDA graph
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56);

// (context, hash and size of the compressed code) -> module
using ModuleKey = std::tuple<Context, uint64_t, uint64_t>;
struct ModuleTable {
  std::mutex mutex;
  std::map<ModuleKey, std::weak_ptr<Module>> modules;
};

// Never destroyed: sessions may outlive the static objects of this library when a process ends.
ModuleTable& module_table() {
  static auto* table = new ModuleTable;
  return *table;
}

}  // namespace

const Driver* cuda_driver() {
  static const Driver* driver = []() -> const Driver* {
    auto* opened = new Driver;
    if (opened->open()) return opened;
    delete opened;
    return nullptr;
  }();
  return driver;
}

bool Driver::open() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return false;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    return function != nullptr;
  };
  const bool complete = find(init_, "cuInit") && find(device_count_, "cuDeviceGetCount") &&
                        find(device_get_, "cuDeviceGet") &&
                        find(error_name_, "cuGetErrorName") && find(error_string_, "cuGetErrorString") &&
                        find(context_current_, "cuCtxGetCurrent") && find(context_push_, "cuCtxPushCurrent_v2") &&
                        find(context_pop_, "cuCtxPopCurrent_v2") && find(context_device_, "cuCtxGetDevice") &&
                        find(device_attribute_, "cuDeviceGetAttribute") && find(module_load_, "cuModuleLoadData") &&
                        find(module_unload_, "cuModuleUnload") && find(module_function_, "cuModuleGetFunction") &&
                        find(function_attribute_, "cuFuncSetAttribute") && find(launch_, "cuLaunchKernel");
  find(capture_mode_, "cuThreadExchangeStreamCaptureMode");
  find(encode_, "cuTensorMapEncodeTiled");
  int (*tell_version)(int*) = nullptr;
  int version = 0;
  if (find(tell_version, "cuDriverGetVersion") && tell_version(&version) == 0 && version >= kCapturesEarlyStart) {
    find(launch_early_, "cuLaunchKernelEx");
  }
  int count = 0;
  return complete && init_(0) == 0 && device_count_(&count) == 0 && count > 0;
}

void Driver::check(int result, const char* what) const {
  if (result == 0) return;
  const char *name = nullptr, *description = nullptr;
  error_name_(result, &name);
  error_string_(result, &description);
  fail("the CUDA driver could not ", what, ": ", name ? name : "error ", name ? "" : std::to_string(result), " (",
       description ? description : "no description", ")");
}

Context Driver::current_context() const {
  Context context = nullptr;
  check(context_current_(&context), "tell the current context");
  if (context == nullptr) fail("this thread has no CUDA context; create the session with the CUDA provider");
  return context;
}

int Driver::attribute(int which, int device) const {
  int value = 0;
  check(device_attribute_(&value, which, device), "tell an attribute of the device");
  return value;
}

int Driver::capability(int device) const {
  return attribute(kCapabilityMajor, device) * 10 + attribute(kCapabilityMinor, device);
}

bool Driver::all_devices_have(int wanted) const {
  int count = 0;
  check(device_count_(&count), "count its devices");
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int device = 0;
    check(device_get_(&device, ordinal), "tell a device");
    if (capability(device) != wanted) return false;
  }
  return true;
}

Device Driver::device() const {
  int device = 0;
  check(context_device_(&device), "tell the context's device");
  return {static_cast<uint32_t>(capability(device)), static_cast<uint32_t>(attribute(kSharedBytesOptIn, device)),
          static_cast<uint32_t>(attribute(kMultiprocessors, device)), encode_ != nullptr};
}

void Driver::launch(Function function, Grid grid, unsigned threads, unsigned shared_bytes, bool early, Stream stream,
                    OnnxfuseArguments* arguments, TensorMap* maps) const {
  void* parameters[] = {arguments, maps};
  if (early && launch_early_ != nullptr) {
    const LaunchAttribute beside{kStartEarly, {1}};
    const LaunchConfig config{{grid.x, 1, grid.z}, {threads, 1, 1}, shared_bytes, stream, &beside, 1};
    check(launch_early_(&config, function, parameters, nullptr), "launch the kernel");
  } else {
    check(launch_(function, grid.x, 1, grid.z, threads, 1, 1, shared_bytes, stream, parameters, nullptr),
          "launch the kernel");
  }
}

void Driver::encode(const TensorBox& box, TensorMap* map) const {
  constexpr uint32_t kSteps[kMaxRank] = {1, 1, 1, 1, 1};
  const int swizzle = box.swizzle == 128 ? 3 : box.swizzle / 32;
  const int type = box.element_bytes == 1   ? kMapUint8
                   : box.element_bytes == 2 ? kMapUint16
                   : box.is_factor          ? kMapTfloat32
                                            : kMapUint32;
  check(encode_(map, type, box.rank, box.pointer, box.extents, box.strides, box.box, kSteps, kMapNoInterleave, swizzle,
                kMapPromoteTo256Bytes, kMapFillZero),
        "describe a tensor to the copy engine");
}

RelaxedCapture::RelaxedCapture(const Driver& driver)
    : driver_(driver),
      mode_(kCaptureRelaxed),
      exchanged_(driver.capture_mode_ != nullptr && driver.capture_mode_(&mode_) == 0) {}

RelaxedCapture::~RelaxedCapture() {
  if (exchanged_) driver_.capture_mode_(&mode_);
}

PushedContext::PushedContext(const Driver& driver, Context context)
    : driver_(driver), exists_(driver.context_push_(context) == 0) {}

PushedContext::~PushedContext() {
  Context popped = nullptr;
  if (exists_) driver_.context_pop_(&popped);
}

std::shared_ptr<Module> Module::acquire(const Driver& driver, Context context, const Record& record) {
  const ModuleKey key{context, content_hash(record.packed, record.packed_bytes), record.packed_bytes};
  ModuleTable& table = module_table();
  // Held while loading, so that two threads never load the same image. Module's destructor does not take it.
  std::lock_guard<std::mutex> lock(table.mutex);
  drop_expired(table.modules);
  std::weak_ptr<Module>& slot = table.modules[key];
  std::shared_ptr<Module> module = slot.lock();
  if (module == nullptr) slot = module = std::make_shared<Module>(driver, context, record);
  return module;
}

Module::Module(const Driver& driver, Context context, const Record& record) : driver_(driver), context_(context) {
  const std::vector<uint8_t> image = read_image(record);
  check_image(record, image);
  const RelaxedCapture relaxed(driver);
  driver.check(driver.module_load_(&handle_, image.data()), "load the kernel's code");
}

Module::~Module() {
  const PushedContext pushed(driver_, context_);
  if (pushed.exists()) driver_.module_unload_(handle_);   // else it went with the context
}

Function Module::function(const std::string& entry, uint32_t shared_bytes) const {
  Function function = nullptr;
  driver_.check(driver_.module_function_(&function, handle_, entry.c_str()),
                text("find the kernel's entry ", entry).c_str());
  driver_.check(driver_.function_attribute_(function, kMaxDynamicSharedBytes, static_cast<int>(shared_bytes)),
                text("give the kernel ", shared_bytes, " bytes of shared memory").c_str());
  return function;
}

}  // namespace onnxfuse
