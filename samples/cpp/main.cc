// Runs a fused model without Python: load the bridge, open the model, feed raw bytes, write raw bytes.
//
//   sample MODEL --cuda --library libonnxfuse.so sample=2,4,64,64:sample.bin timestep=2:timestep.bin
//
// Each input is NAME=SIZES:FILE, its values in the file as the model's type lays them out. Each output is written to
// NAME.bin in the current folder. Without --cuda and --library the model runs on the CPU by the original subgraphs that
// it carries.
#include <dlfcn.h>

#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef ONNXRUNTIME_INCLUDE_DIR
#include <onnxruntime_c_api.h>
#else
#include "ort_minimal.h"
#endif

namespace {

const OrtApi* const api = OrtGetApiBase()->GetApi(ORT_API_VERSION);

void check(OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = api->GetErrorMessage(status);
  api->ReleaseStatus(status);
  throw std::runtime_error(message);
}

// What the runtime made is released at the end of the scope.
template <typename T>
using Owned = std::unique_ptr<T, std::function<void(T*)>>;

template <typename T, typename Make>
Owned<T> make(Make create, void (*release)(T*)) {
  T* made = nullptr;
  check(create(&made));
  return Owned<T>(made, release);
}

struct Input {
  std::string name, bytes;
  std::vector<int64_t> shape;
};

struct Request {
  std::string model, library;
  bool cuda = false;
  std::vector<Input> inputs;
};

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + ": cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

Input parse_input(const std::string& text) {
  const size_t equals = text.find('='), colon = text.find(':', equals);
  if (equals == std::string::npos || colon == std::string::npos) {
    throw std::runtime_error(text + ": expected NAME=2,4,64:FILE");
  }
  Input input{text.substr(0, equals), read_file(text.substr(colon + 1)), {}};
  std::istringstream sizes(text.substr(equals + 1, colon - equals - 1));
  for (std::string size; std::getline(sizes, size, ',');) input.shape.push_back(std::stoll(size));
  return input;
}

Request parse(const std::vector<std::string>& arguments) {
  Request request;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--cuda") {
      request.cuda = true;
    } else if (arguments[i] == "--library" && i + 1 < arguments.size()) {
      request.library = arguments[++i];
    } else if (request.model.empty()) {
      request.model = arguments[i];
    } else {
      request.inputs.push_back(parse_input(arguments[i]));
    }
  }
  if (request.model.empty()) throw std::runtime_error("usage: sample MODEL [--cuda] [--library FILE] NAME=SIZES:FILE...");
  return request;
}

// A runtime built for CUDA exports this function; one that is not does not have it.
void append_cuda(OrtSessionOptions* options) {
  using Append = OrtStatus* (*)(OrtSessionOptions*, int);
  const auto append = reinterpret_cast<Append>(dlsym(RTLD_DEFAULT, "OrtSessionOptionsAppendExecutionProvider_CUDA"));
  if (append == nullptr) throw std::runtime_error("this ONNX Runtime was built without CUDA");
  check(append(options, 0));
}

Owned<OrtSession> open_session(const OrtEnv* env, const Request& request) {
  auto options = make<OrtSessionOptions>(api->CreateSessionOptions, api->ReleaseSessionOptions);
  void* handle = nullptr;  // of the bridge; it stays loaded as long as the process lives
  if (!request.library.empty()) check(api->RegisterCustomOpsLibrary(options.get(), request.library.c_str(), &handle));
  if (request.cuda) append_cuda(options.get());
  return make<OrtSession>(
      [&](OrtSession** out) { return api->CreateSession(env, request.model.c_str(), options.get(), out); },
      api->ReleaseSession);
}

ONNXTensorElementDataType element_type(const OrtSession* session, const std::string& name) {
  OrtAllocator* allocator = nullptr;
  check(api->GetAllocatorWithDefaultOptions(&allocator));
  size_t count = 0;
  check(api->SessionGetInputCount(session, &count));
  for (size_t i = 0; i < count; ++i) {
    char* found = nullptr;  // a few bytes, once a process: left to it
    check(api->SessionGetInputName(session, i, allocator, &found));
    if (name != found) continue;
    auto type = make<OrtTypeInfo>([&](OrtTypeInfo** out) { return api->SessionGetInputTypeInfo(session, i, out); },
                                  api->ReleaseTypeInfo);
    const OrtTensorTypeAndShapeInfo* tensor = nullptr;
    check(api->CastTypeInfoToTensorInfo(type.get(), &tensor));
    ONNXTensorElementDataType element{};
    check(api->GetTensorElementType(tensor, &element));
    return element;
  }
  throw std::runtime_error("the model has no input '" + name + "'");
}

Owned<OrtValue> tensor_of(const OrtSession* session, Input& input) {
  auto memory = make<OrtMemoryInfo>(
      [](OrtMemoryInfo** out) { return api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, out); },
      api->ReleaseMemoryInfo);
  const ONNXTensorElementDataType element = element_type(session, input.name);
  return make<OrtValue>(
      [&](OrtValue** out) {
        return api->CreateTensorWithDataAsOrtValue(memory.get(), input.bytes.data(), input.bytes.size(),
                                                   input.shape.data(), input.shape.size(), element, out);
      },
      api->ReleaseValue);
}

size_t element_bytes(ONNXTensorElementDataType element) {
  switch (static_cast<int>(element)) {
    case 2: case 3: case 9: return 1;
    case 4: case 5: case 10: case 16: return 2;
    case 1: case 6: case 12: return 4;
    case 7: case 11: case 13: return 8;
    default: throw std::runtime_error("an output whose type this sample does not write");
  }
}

void write_output(const std::string& name, OrtValue* value) {
  auto info = make<OrtTensorTypeAndShapeInfo>(
      [&](OrtTensorTypeAndShapeInfo** out) { return api->GetTensorTypeAndShape(value, out); },
      api->ReleaseTensorTypeAndShapeInfo);
  size_t rank = 0;
  check(api->GetDimensionsCount(info.get(), &rank));
  std::vector<int64_t> shape(rank);
  check(api->GetDimensions(info.get(), shape.data(), rank));
  ONNXTensorElementDataType element{};
  check(api->GetTensorElementType(info.get(), &element));
  size_t bytes = element_bytes(element);
  std::cout << name;
  for (int64_t size : shape) {
    bytes *= static_cast<size_t>(size);
    std::cout << ' ' << size;
  }
  std::cout << '\n';
  void* data = nullptr;
  check(api->GetTensorMutableData(value, &data));
  std::ofstream file(name + ".bin", std::ios::binary);
  if (!file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes))) {
    throw std::runtime_error(name + ".bin: cannot be written");
  }
}

void run(Request& request) {
  auto env = make<OrtEnv>(
      [](OrtEnv** out) { return api->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "sample", out); }, api->ReleaseEnv);
  auto session = open_session(env.get(), request);
  std::vector<Owned<OrtValue>> values;
  std::vector<const OrtValue*> inputs;
  std::vector<const char*> input_names, output_names;
  for (Input& input : request.inputs) {
    values.push_back(tensor_of(session.get(), input));
    inputs.push_back(values.back().get());
    input_names.push_back(input.name.c_str());
  }
  OrtAllocator* allocator = nullptr;
  check(api->GetAllocatorWithDefaultOptions(&allocator));
  size_t count = 0;
  check(api->SessionGetOutputCount(session.get(), &count));
  for (size_t i = 0; i < count; ++i) {
    char* name = nullptr;
    check(api->SessionGetOutputName(session.get(), i, allocator, &name));
    output_names.push_back(name);
  }
  std::vector<OrtValue*> outputs(count, nullptr);
  check(api->Run(session.get(), nullptr, input_names.data(), inputs.data(), inputs.size(), output_names.data(), count,
                 outputs.data()));
  for (size_t i = 0; i < count; ++i) {
    const Owned<OrtValue> output(outputs[i], api->ReleaseValue);
    write_output(output_names[i], output.get());
  }
}

}  // namespace

int main(int count, char** arguments) {
  try {
    Request request = parse({arguments + 1, arguments + count});
    run(request);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
}
