// A stand-in for libcublasLt.so on a machine without a GPU: it counts what is made and asked, remembers the last product
// that it was given, and computes those of floats on the CPU from the descriptions that the real library would get.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

namespace {

struct Operation {
  int compute, scale, transpose_a, transpose_b;
};

struct Layout {
  int64_t type, rows, columns, pitch, batch, stride;
};

struct Preference {
  uint64_t workspace;
  uint32_t alignments[4], reductions;
};

struct Result {
  uint64_t algorithm[8];
  uint64_t workspace;
  int status;
  float waves;
  int reserved[4];
};

// What a test reads: all of one product.
struct Call {
  Operation operation;
  Layout a, b, d;
  uint64_t a_pointer, b_pointer, d_pointer, workspace, workspace_bytes, stream;
  uint64_t algorithm;   // number of the choice that it was made with
};

constexpr uint64_t kWorkspace = 1000;
constexpr int kRefused = 15, kInvalid = 7;

std::atomic<int> handles, created, choices, products, alive;
std::mutex mutex;
Call last;
Preference asked;

int setting(const char* name) {
  const char* value = getenv(name);
  return value ? atoi(value) : 0;
}

float element(const Layout& layout, const void* data, bool transposed, int64_t batch, int64_t row, int64_t column) {
  if (transposed) std::swap(row, column);
  return static_cast<const float*>(data)[batch * layout.stride + column * layout.pitch + row];
}

bool is_sound(const Layout& layout) {
  return layout.rows > 0 && layout.columns > 0 && layout.pitch >= layout.rows && layout.batch > 0;
}

template <typename Type>
int make(void** made, Type value) {
  *made = new Type(value);
  ++created;
  ++alive;
  return 0;
}

template <typename Type>
int unmake(void* made) {
  delete static_cast<Type*>(made);
  --alive;
  return 0;
}

}  // namespace

extern "C" {

int fake_lt_handles() { return handles; }   // now
int fake_lt_created() { return created; }   // descriptions so far
int fake_lt_alive() { return alive; }       // descriptions now
int fake_lt_choices() { return choices; }
int fake_lt_products() { return products; }
void fake_lt_last(Call* call) {
  std::lock_guard<std::mutex> lock(mutex);
  *call = last;
}
void fake_lt_asked(Preference* preference) {
  std::lock_guard<std::mutex> lock(mutex);
  *preference = asked;
}

int cublasLtCreate(void** handle) {
  if (setting("FAKE_LT_CREATE_ERROR")) return setting("FAKE_LT_CREATE_ERROR");
  ++handles;
  *handle = new int(0);
  return 0;
}
int cublasLtDestroy(void* handle) {
  --handles;
  delete static_cast<int*>(handle);
  return 0;
}

int cublasLtMatmulDescCreate(void** made, int compute, int scale) { return make(made, Operation{compute, scale, 0, 0}); }
int cublasLtMatmulDescDestroy(void* made) { return unmake<Operation>(made); }
int cublasLtMatmulDescSetAttribute(void* made, int attribute, const void* value, size_t bytes) {
  if (bytes != 4 || (attribute != 3 && attribute != 4)) return kInvalid;
  auto* operation = static_cast<Operation*>(made);
  memcpy(attribute == 3 ? &operation->transpose_a : &operation->transpose_b, value, bytes);
  return 0;
}

int cublasLtMatrixLayoutCreate(void** made, int type, uint64_t rows, uint64_t columns, int64_t pitch) {
  return make(made, Layout{type, static_cast<int64_t>(rows), static_cast<int64_t>(columns), pitch, 1, 0});
}
int cublasLtMatrixLayoutDestroy(void* made) { return unmake<Layout>(made); }
int cublasLtMatrixLayoutSetAttribute(void* made, int attribute, const void* value, size_t bytes) {
  auto* layout = static_cast<Layout*>(made);
  if (attribute == 5 && bytes == 4) {
    layout->batch = *static_cast<const int32_t*>(value);
  } else if (attribute == 6 && bytes == 8) {
    layout->stride = *static_cast<const int64_t*>(value);
  } else {
    return kInvalid;
  }
  return 0;
}

int cublasLtMatmulPreferenceCreate(void** made) { return make(made, Preference{0, {256, 256, 256, 256}, 7}); }
int cublasLtMatmulPreferenceDestroy(void* made) { return unmake<Preference>(made); }
int cublasLtMatmulPreferenceSetAttribute(void* made, int attribute, const void* value, size_t bytes) {
  auto* preference = static_cast<Preference*>(made);
  if (attribute == 1 && bytes == 8) {
    memcpy(&preference->workspace, value, bytes);
  } else if (attribute == 3 && bytes == 4) {
    memcpy(&preference->reductions, value, bytes);
  } else if (attribute >= 5 && attribute <= 8 && bytes == 4) {
    memcpy(&preference->alignments[attribute - 5], value, bytes);
  } else {
    return kInvalid;
  }
  return 0;
}

int cublasLtMatmulAlgoGetHeuristic(void*, void*, void* a, void* b, void* c, void* d, void* preference, int wanted,
                                   void* results, int* found) {
  const int number = ++choices;
  for (void* layout : {a, b, c, d}) {
    if (!is_sound(*static_cast<Layout*>(layout))) return kInvalid;
  }
  std::lock_guard<std::mutex> lock(mutex);
  asked = *static_cast<Preference*>(preference);
  *found = 0;
  if (setting("FAKE_LT_REFUSE")) return kRefused;
  if (wanted != 1 || asked.workspace < kWorkspace) return kInvalid;
  *static_cast<Result*>(results) = {{static_cast<uint64_t>(number)}, kWorkspace, 0, 1, {}};
  *found = 1;
  return 0;
}

int cublasLtMatmul(void*, void* operation, const void* alpha, const void* a, void* a_layout, const void* b,
                   void* b_layout, const void* beta, const void* c, void*, void* d, void* d_layout,
                   const void* algorithm, void* workspace, size_t workspace_bytes, void* stream) {
  if (setting("FAKE_LT_MULTIPLY_ERROR")) return setting("FAKE_LT_MULTIPLY_ERROR");
  const auto& made = *static_cast<Operation*>(operation);
  const auto &left = *static_cast<Layout*>(a_layout), &right = *static_cast<Layout*>(b_layout);
  const auto& out = *static_cast<Layout*>(d_layout);
  if (c != d || *static_cast<const float*>(alpha) != 1 || *static_cast<const float*>(beta) != 0) return kInvalid;
  ++products;
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto number = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
    last = {made,      left,      right,   out, number(a), number(b), number(d), number(workspace), workspace_bytes,
            number(stream), *static_cast<const uint64_t*>(algorithm)};
  }
  memset(workspace, 0x7f, workspace_bytes);   // a product that lies there as well is lost
  const int64_t depth = made.transpose_a ? left.rows : left.columns;
  if (depth != (made.transpose_b ? right.columns : right.rows) || left.batch != out.batch) return kInvalid;
  if (out.type != 0) return 0;   // 16-bit products are only looked at
  for (int64_t batch = 0; batch < out.batch; ++batch) {
    for (int64_t column = 0; column < out.columns; ++column) {
      for (int64_t row = 0; row < out.rows; ++row) {
        float sum = 0;
        for (int64_t k = 0; k < depth; ++k) {
          sum += element(left, a, made.transpose_a, batch, row, k) * element(right, b, made.transpose_b, batch, k, column);
        }
        static_cast<float*>(d)[batch * out.stride + column * out.pitch + row] = sum;
      }
    }
  }
  return 0;
}

}  // extern "C"
