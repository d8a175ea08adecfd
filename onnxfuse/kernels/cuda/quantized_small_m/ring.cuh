// A warp's stages of integers, scales and zero points, and its slots of lhs: what loads are on their way to.
#pragma once
#include "common/narrow_copy.cuh"
#include "quantized_small_m/layout.cuh"

namespace onnxfuse {

// A tile's columns of integers.
struct Integers {
  static constexpr int LANES = STEP_BYTES / RHS_BYTES;  // of a column
  static constexpr int COLUMNS = WARP_SIZE / LANES;     // of one copy of all lanes
  static_assert(BLOCK_N % COLUMNS == 0, "whole copies");

  const unsigned char* parts[PARTS];  // this lane's bytes of its first column
  int columns;                        // from there on

  static __device__ __forceinline__ int along() { return lane() % LANES * RHS_BYTES; }

  __device__ __forceinline__ void go_to(const Work& work, const Tile& tile) {
    const int first = tile.column + lane() / LANES;
    columns = work.args.n - first;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const OnnxfuseTensor& rhs = work.args.rhs[part];
      parts[part] = static_cast<const unsigned char*>(rhs.pointer) + first * rhs.column_stride + along();
    }
  }

  // What lies beyond n or k is zero.
  __device__ __forceinline__ void copy(const Work& work, unsigned stage, int step) const {
    const int from = work.depth(step) / 8 * QUANTIZED_BITS;
    const int left = from + along() < work.blocks * (QUANTIZED_BLOCK * QUANTIZED_BITS / 8) ? columns : 0;
    const unsigned shared = stage + lane() / LANES * COLUMN_PITCH + along();
#pragma unroll
    for (int first = 0; first < WIDTH; first += COLUMNS) {
      const int part = first / BLOCK_N, column = first % BLOCK_N;
      const unsigned char* global = parts[part] + from + column * work.args.rhs[part].column_stride;
      copy_async<RHS_BYTES>(shared + first * COLUMN_PITCH, global, column < left);
    }
  }
};

// Rows of lhs in copies of ELEMENTS. Rows that the tensor does not have stay what they are: nothing of theirs is stored.
template <int ELEMENTS>
__device__ __forceinline__ void copy_rows(const Work& work, unsigned slot, const Tile& tile, int step) {
  constexpr int LANES = BLOCK_K / ELEMENTS, BYTES = ELEMENTS * int(sizeof(Element));
  const int k = work.depth(step), rows = work.rows(tile), first = tile.row;
  const auto copy_of = [&](int index) {
    const int row = index / LANES, along = index % LANES * ELEMENTS;
    const auto* from = factor_pointer<Element, LHS_OUTER_BATCH>(work.args.lhs, work.args.lhs_outer, work.batch,
                                                                first + row, k + along);
    const unsigned shared = slot + row * ROW_PITCH + (along * int(sizeof(Element)) ^ swizzle(row));
    return SmallCopy{shared, from, k + along < work.args.k, row < rows};
  };
  if constexpr (BYTES < CP_ASYNC_BYTES) {
    copy_small<BYTES, BLOCK_M * LANES / WARP_SIZE>([&](int i) {
      const SmallCopy copy = copy_of(lane() + i * WARP_SIZE);
      return SmallCopy{copy.shared, copy.global, copy.inside && copy.written, copy.written};
    });
  } else {
#pragma unroll(BLOCK_M * LANES / WARP_SIZE > 4 ? 4 : 1)
    for (int index = lane(); index < rows * LANES; index += WARP_SIZE) {
      const SmallCopy copy = copy_of(index);
      copy_async<BYTES>(copy.shared, copy.global, copy.inside);
    }
  }
}

// A step of this warp, and where in its memory it lies.
struct Place {
  int pass = 0, step = 0, stage = 0, slot = 0;

  __device__ __forceinline__ void advance(int steps, int slots) {
    if (++stage == STAGES) stage = 0;
    if (++slot == slots) slot = 0;
    if (++step == steps) step = 0, ++pass;
  }
};

// This warp's stages and slots, and the loads on their way to them.
struct Ring {
  const Work& work;
  unsigned char* memory;
  bool stays;  // lhs
  int slots;
  Place next;
  Integers integers;
  Scales scales;
  Zeros zeros;

  __device__ __forceinline__ Ring(const Work& work, unsigned char* memory) : work(work), memory(memory) {
    stays = work.steps <= LHS_SLOTS && work.tiles_m == 1;
    slots = stays ? work.steps : LHS_SLOTS;
  }
  __device__ __forceinline__ unsigned char* stage_at(int index) const { return memory + index * STAGE_BYTES; }
  __device__ __forceinline__ unsigned char* slot_at(int index) const {
    return memory + STAGES * STAGE_BYTES + index * SLOT_BYTES;
  }
  __device__ __forceinline__ bool exists(const Place& place) const { return place.pass < work.passes && work.steps > 0; }

  __device__ __forceinline__ void load_rhs(const Place& place) {
    if (!exists(place)) return;
    if (place.step == 0) {
      const Tile tile = work.tile(place.pass);
      integers.go_to(work, tile);
      scales.go_to([&](int column) { return work.scales(tile, column); });
      if constexpr (ZERO_POINTS) zeros.go_to([&](int column) { return work.zeros(tile, column); });
    }
    const unsigned shared = shared_address(stage_at(place.stage));
    integers.copy(work, shared, place.step);
    scales.copy(shared + SCALES_OFFSET, work.first_scale(place.step), work.blocks * int(sizeof(Element)));
    if constexpr (ZERO_POINTS) {
      zeros.copy(shared + ZEROS_OFFSET, work.first_zero(place.step), (work.blocks * QUANTIZED_BITS + 7) / 8);
    }
  }
  __device__ __forceinline__ void load_lhs(const Place& place) const {
    if (KEPT || !exists(place) || (stays && place.pass > 0)) return;
    const unsigned slot = shared_address(slot_at(place.slot));
    if constexpr (CHECKED && LHS_WIDTH > 1) {
      if (!work.is_wide) return copy_rows<1>(work, slot, work.tile(place.pass), place.step);
    }
    copy_rows<LHS_WIDTH>(work, slot, work.tile(place.pass), place.step);
  }

  // All stages but one; rhs, which no kernel writes, before the kernel before this one has ended.
  __device__ __forceinline__ void fill() {
    Place first = next;
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) {
      load_rhs(next);
      next.advance(work.steps, slots);
      if (KEPT) copy_async_commit();
    }
    wait_for_kernel_before();
    if (KEPT) return;
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) {
      load_lhs(first);
      first.advance(work.steps, slots);
      copy_async_commit();
    }
  }
  // The next step, or nothing behind the last one.
  __device__ __forceinline__ void load() {
    load_rhs(next);
    load_lhs(next);
    next.advance(work.steps, slots);
    copy_async_commit();
  }
};

}  // namespace onnxfuse
