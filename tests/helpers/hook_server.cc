// Calls the bridge's test hooks for another process, so that a library of another architecture runs in an emulator.
//
//     hook_server LIBRARY
//
// A request on standard input: the function's name, a number of arguments, and each argument by its kind: `i` a number,
// `b` the bytes of a buffer, which come back as the call leaves them, `s` strings, passed as an array of pointers.
// Numbers have 8 bytes; names, buffers and strings stand behind their length. The answer: what the function returned,
// and the buffers in order.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

constexpr size_t kMostArguments = 12;

[[noreturn]] void end(int code, const char* why) {
  if (code != 0) std::fprintf(stderr, "hook_server: %s\n", why);
  std::exit(code);
}

void read(void* to, size_t size) {
  if (std::fread(to, 1, size, stdin) != size) end(std::feof(stdin) && size == 8 ? 0 : 1, "the request ends early");
}

int64_t read_number() {
  int64_t value = 0;
  read(&value, sizeof value);
  return value;
}

std::string read_bytes() {
  std::string bytes(static_cast<size_t>(read_number()), '\0');
  if (!bytes.empty()) read(bytes.data(), bytes.size());
  return bytes;
}

void write(const void* from, size_t size) { std::fwrite(from, 1, size, stdout); }

struct Argument {
  char kind;
  int64_t number = 0;
  std::vector<char> buffer;             // of exactly its size, so that a sanitizer sees a read past its end
  std::vector<std::string> strings;
  std::vector<const char*> pointers;

  explicit Argument(char kind) : kind(kind) {
    if (kind == 'i') number = read_number();
    if (kind == 'b') {
      const std::string bytes = read_bytes();
      buffer.assign(bytes.begin(), bytes.end());
    }
    if (kind != 's') return;
    for (int64_t left = read_number(); left > 0; --left) strings.push_back(read_bytes());
    for (const std::string& each : strings) pointers.push_back(each.c_str());
  }

  int64_t passed() {
    if (kind == 'i') return number;
    return reinterpret_cast<int64_t>(kind == 'b' ? static_cast<void*>(buffer.data()) : pointers.data());
  }
};

}  // namespace

int main(int count, char** words) {
  if (count != 2) end(2, "name a library");
  void* library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) end(1, dlerror());
  while (true) {
    const std::string name = read_bytes();
    void* function = dlsym(library, name.c_str());
    if (function == nullptr) end(1, dlerror());
    std::vector<Argument> arguments;
    for (int64_t left = read_number(); left > 0; --left) {
      char kind = 0;
      read(&kind, 1);
      arguments.emplace_back(kind);
    }
    int64_t a[kMostArguments] = {};
    if (arguments.size() > kMostArguments) end(1, "too many arguments");
    for (size_t i = 0; i < arguments.size(); ++i) a[i] = arguments[i].passed();
    using Hook = int64_t (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                             int64_t, int64_t);
    const int64_t result = reinterpret_cast<Hook>(function)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9],
                                                            a[10], a[11]);
    write(&result, sizeof result);
    for (const Argument& each : arguments) {
      if (each.kind == 'b') write(each.buffer.data(), each.buffer.size());
    }
    std::fflush(stdout);
  }
}
