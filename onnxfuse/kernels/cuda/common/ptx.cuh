// The PTX instructions that the kernels use, one function each, and the only place with inline assembly: a test
// replaces this one file to run a kernel on the CPU. A shared-memory address is the 32-bit offset that the instructions
// take.
#pragma once
#include "common/element.cuh"

namespace onnxfuse {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// One or two bytes, zero where not `inside`. Volatile, so that several can be under way before the first is stored.
template <int BYTES>
__device__ __forceinline__ unsigned short load_small(const void* global, bool inside) {
  static_assert(BYTES == 2 || BYTES == 1, "small loads");
  unsigned short value;
  const int valid = inside;
  if constexpr (BYTES == 2) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; mov.b16 %0, 0; @p ld.global.nc.u16 %0, [%1]; }"
                 : "=&h"(value)
                 : "l"(global), "r"(valid));
  } else {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; mov.b16 %0, 0; @p ld.global.nc.u8 %0, [%1]; }"
                 : "=&h"(value)
                 : "l"(global), "r"(valid));
  }
  return value;
}

template <int BYTES>
__device__ __forceinline__ void store_small(unsigned shared, unsigned short value) {
  static_assert(BYTES == 2 || BYTES == 1, "small stores");
  if constexpr (BYTES == 2) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(shared), "h"(value) : "memory");
  } else {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(shared), "h"(value) : "memory");
  }
}

// Global -> shared without passing through registers. Where not `inside`, writes zeros and does not read: the address
// may then lie outside of the tensor.
template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned shared, const void* global, bool inside) {
  static_assert(BYTES == 16 || BYTES == 8 || BYTES == 4, "no such copy");
  const int outside = !inside;
  if constexpr (BYTES == 16) {
    // Past L1, which would hold a copy of what shared memory holds; the rest of the 128-byte line is wanted next.
    asm volatile(
        "{ .reg .pred p; setp.ne.s32 p, %2, 0; cp.async.cg.shared.global.L2::128B [%0], [%1], 16, p; }" ::"r"(shared),
        "l"(global), "r"(outside));
  } else {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; cp.async.ca.shared.global [%0], [%1], %3, p; }" ::"r"(shared),
                 "l"(global), "r"(outside), "n"(BYTES));
  }
}

// An aligned word of which `bytes` are read, and the others zero.
__device__ __forceinline__ void copy_async_part(unsigned shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes));
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's newest groups are under way.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Through the read-only path: a kernel never writes what it reads.
template <typename Vector>
__device__ __forceinline__ Vector load_global(const typename Vector::Type* global) {
  using Bits = typename Word<sizeof(Vector)>::Type;
  Vector packed;
  *reinterpret_cast<Bits*>(&packed) = __ldg(reinterpret_cast<const Bits*>(global));
  return packed;
}

// Zeros where not `inside`. Volatile, so that loads stay as far ahead of their use as they are written. A macro, since
// the cache operators are part of the instruction's text.
#define ONNXFUSE_WIDE_LOAD(NAME, OPERATORS)                                                                            \
  template <typename Vector>                                                                                           \
  __device__ __forceinline__ Vector NAME(const typename Vector::Type* global, bool inside) {                           \
    static_assert(sizeof(Vector) == 16 || sizeof(Vector) == 8 || sizeof(Vector) == 4, "words");                        \
    Vector packed;                                                                                                     \
    const int valid = inside;                                                                                          \
    if constexpr (sizeof(Vector) == 16) {                                                                              \
      auto& bits = reinterpret_cast<uint4&>(packed);                                                                   \
      asm volatile(                                                                                                    \
          "{ .reg .pred p; setp.ne.s32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; "         \
          "@p ld.global" OPERATORS ".v4.u32 {%0, %1, %2, %3}, [%4]; }"                                                 \
          : "=&r"(bits.x), "=&r"(bits.y), "=&r"(bits.z), "=&r"(bits.w)                                                 \
          : "l"(global), "r"(valid));                                                                                  \
    } else if constexpr (sizeof(Vector) == 8) {                                                                        \
      auto& bits = reinterpret_cast<uint2&>(packed);                                                                   \
      asm volatile(                                                                                                    \
          "{ .reg .pred p; setp.ne.s32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0; "                                       \
          "@p ld.global" OPERATORS ".v2.u32 {%0, %1}, [%2]; }"                                                         \
          : "=&r"(bits.x), "=&r"(bits.y)                                                                               \
          : "l"(global), "r"(valid));                                                                                  \
    } else {                                                                                                           \
      auto& bits = reinterpret_cast<unsigned&>(packed);                                                                \
      asm volatile(                                                                                                    \
          "{ .reg .pred p; setp.ne.s32 p, %2, 0; mov.b32 %0, 0; @p ld.global" OPERATORS ".u32 %0, [%1]; }"             \
          : "=&r"(bits)                                                                                                \
          : "l"(global), "r"(valid));                                                                                  \
    }                                                                                                                  \
    return packed;                                                                                                     \
  }

// What is read only once goes past L1, with the rest of its 128-byte line, which a neighbour reads next; what other
// blocks of the multiprocessor read as well goes through it; what the kernel before may just have written comes from L2.
ONNXFUSE_WIDE_LOAD(load_streamed, ".nc.L1::no_allocate.L2::128B")
ONNXFUSE_WIDE_LOAD(load_cached, ".nc")
ONNXFUSE_WIDE_LOAD(load_fresh, ".cg")
#undef ONNXFUSE_WIDE_LOAD

// In PTX where it is wide: the compiler takes a vector that it has seen as elements apart into stores of 4 bytes.
template <typename Vector>
__device__ __forceinline__ void store_global(typename Vector::Type* global, const Vector& packed) {
  using Bits = typename Word<sizeof(Vector)>::Type;
  const Bits& bits = reinterpret_cast<const Bits&>(packed);
  if constexpr (sizeof(Vector) == 16) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(bits.x), "r"(bits.y), "r"(bits.z),
                 "r"(bits.w)
                 : "memory");
  } else if constexpr (sizeof(Vector) == 8) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(global), "r"(bits.x), "r"(bits.y) : "memory");
  } else {
    *reinterpret_cast<Bits*>(global) = bits;
  }
}

__device__ __forceinline__ void store_shared(unsigned shared, const Packed<unsigned, 4>& packed) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(packed.values[0]), "r"(packed.values[1]),
               "r"(packed.values[2]), "r"(packed.values[3])
               : "memory");
}

__device__ __forceinline__ void load_shared(float (&values)[2], unsigned shared) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(values[0]), "=f"(values[1]) : "r"(shared));
}

__device__ __forceinline__ unsigned load_shared_word(unsigned shared) {
  unsigned value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(shared));
  return value;
}

// An mbarrier: a phase ends when all arrivals are in, and those that wait see what was written before them.
__device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, int parity) {
  unsigned done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  }
}

// Four 8 x 8 matrices of 16-bit elements, or 8 x 4 of 32-bit elements; lanes 8i .. 8i+7 give the row addresses of
// matrix i.
__device__ __forceinline__ void load_matrices(unsigned (&matrices)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared));
}

__device__ __forceinline__ void load_matrices_transposed(unsigned (&matrices)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared));
}

// acc[16, 8] += lhs[16, 16] * rhs[16, 8]
__device__ __forceinline__ void multiply_fragment(__half, float (&acc)[4], const unsigned (&lhs)[4],
                                                  const unsigned (&rhs)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(lhs[0]), "r"(lhs[1]), "r"(lhs[2]), "r"(lhs[3]), "r"(rhs[0]), "r"(rhs[1]));
}

__device__ __forceinline__ void multiply_fragment(__nv_bfloat16, float (&acc)[4], const unsigned (&lhs)[4],
                                                  const unsigned (&rhs)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(lhs[0]), "r"(lhs[1]), "r"(lhs[2]), "r"(lhs[3]), "r"(rhs[0]), "r"(rhs[1]));
}

// result[16, 8] = start + lhs[16, 16] * rhs[16, 8]
__device__ __forceinline__ void multiply_onto(__half, float (&result)[4], const float (&start)[4],
                                              const unsigned (&lhs)[4], const unsigned (&rhs)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, "
      "%13};"
      : "=f"(result[0]), "=f"(result[1]), "=f"(result[2]), "=f"(result[3])
      : "r"(lhs[0]), "r"(lhs[1]), "r"(lhs[2]), "r"(lhs[3]), "r"(rhs[0]), "r"(rhs[1]), "f"(start[0]), "f"(start[1]),
        "f"(start[2]), "f"(start[3]));
}

__device__ __forceinline__ void multiply_onto(__nv_bfloat16, float (&result)[4], const float (&start)[4],
                                              const unsigned (&lhs)[4], const unsigned (&rhs)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, "
      "%12, %13};"
      : "=f"(result[0]), "=f"(result[1]), "=f"(result[2]), "=f"(result[3])
      : "r"(lhs[0]), "r"(lhs[1]), "r"(lhs[2]), "r"(lhs[3]), "r"(rhs[0]), "r"(rhs[1]), "f"(start[0]), "f"(start[1]),
        "f"(start[2]), "f"(start[3]));
}

// acc[16, 8] += lhs[16, 8] * rhs[8, 8], operands already rounded to TF32.
__device__ __forceinline__ void multiply_fragment(float, float (&acc)[4], const unsigned (&lhs)[4],
                                                  const unsigned (&rhs)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(lhs[0]), "r"(lhs[1]), "r"(lhs[2]), "r"(lhs[3]), "r"(rhs[0]), "r"(rhs[1]));
}

// To nearest: the tensor cores would otherwise cut the 13 low bits off, which biases every product towards zero.
__device__ __forceinline__ void round_to_tf32(unsigned& value) {
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(value) : "f"(__uint_as_float(value)));
}

// Of kernels that are launched to start before the one before them has ended; before sm_90 none is.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_kernel_behind_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Brings a line into L2, where every write lands: no reader finds it older than memory is.
__device__ __forceinline__ void prefetch_into_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// Four bytes of eight, those of `first` before those of `second`, chosen by the digits of `selector`.
__device__ __forceinline__ unsigned permute_bytes(unsigned first, unsigned second, unsigned selector) {
  unsigned result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(first), "r"(second), "r"(selector));
  return result;
}

// The bits of `word` under `mask`, and those of `others`: one instruction, which the compiler would make two.
__device__ __forceinline__ unsigned masked_or(unsigned word, unsigned mask, unsigned others) {
  unsigned result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(others));
  return result;
}

// Two neighbours in one register, rounded to nearest even.
__device__ __forceinline__ unsigned pack_pair(__half, float first, float second) {
  unsigned packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  return packed;
}
__device__ __forceinline__ unsigned pack_pair(__nv_bfloat16, float first, float second) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  return packed;
}

// Two numbers less two others.
__device__ __forceinline__ unsigned subtract_pair(__half, unsigned first, unsigned second) {
  unsigned result;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(first), "r"(second));
  return result;
}
__device__ __forceinline__ unsigned subtract_pair(__nv_bfloat16, unsigned first, unsigned second) {
  unsigned result;  // before sm_90 there is no subtraction
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(second), "r"(0xbf80bf80), "r"(first));
  return result;
}

// Results below 2^-126 are zero; both are off by 2 ulp at most.
__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float fast_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// NaN if either argument is, as ONNX has it; fminf and fmaxf would drop the NaN.
__device__ __forceinline__ float minimum(float first, float second) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(first), "f"(second));
  return result;
}
__device__ __forceinline__ float maximum(float first, float second) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(first), "f"(second));
  return result;
}

}  // namespace onnxfuse
