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
  int columns;                        // from there on, that exist

  static __device__ __forceinline__ int along() { return lane() % LANES * RHS_BYTES; }

  __device__ __forceinline__ void go_to(const Work& work, const Tile& tile) {
    const int first = tile.column + lane() / LANES;
    columns = WEIGHT_COLUMNS - first;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const OnnxfuseTensor& rhs = work.args.rhs[part];
      parts[part] = column_at(rhs.pointer, first, COLUMN_BYTES) + along();
    }
  }

  // What lies beyond n or k is zero.
  __device__ __forceinline__ void copy(unsigned stage, int step) const {
    const int from = (step * WARPS_K + warp()) * STEP_BYTES;
    const int left = WHOLE_DEPTH || from + along() < COLUMN_BYTES ? columns : 0;
    const unsigned shared = stage + lane() / LANES * COLUMN_PITCH + along();
#pragma unroll
    for (int first = 0; first < WIDTH; first += COLUMNS) {
      const int part = first / BLOCK_N, column = first % BLOCK_N;
      const unsigned char* global = parts[part] + (from + column * COLUMN_BYTES);
      const bool inside = (WHOLE_COLUMNS && WHOLE_DEPTH) || column < left;
      copy_async<RHS_BYTES>(shared + first * COLUMN_PITCH, global, inside);
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
    return SmallCopy{shared, from, k + along < WEIGHT_DEPTH, row < rows};
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

// A step of this warp: of which tile, and of k.
struct Place {
  int pass, step;

  // So many steps behind this one. Where `step` is a constant, so are the results' but for the pass.
  __device__ __forceinline__ Place ahead(int steps) const {
    return {pass + (step + steps) / STEPS, (step + steps) % STEPS};
  }
};

// Of `count`, the one behind `index`, all in a ring.
__device__ __forceinline__ int behind(int index, int count) { return index + 1 == count ? 0 : index + 1; }

// This warp's stages and slots, and the loads on their way to them.
struct Ring {
  const Work& work;
  unsigned char* memory;
  bool stays;  // lhs
  int stage = 0, coming_stage = 0;  // that is read next, and that is loaded next
  int slot = 0, coming_slot = 0;
  Integers integers;
  Scales scales;
  Zeros zeros;

  __device__ __forceinline__ Ring(const Work& work, unsigned char* memory) : work(work), memory(memory) {
    stays = STEPS <= LHS_SLOTS && work.tiles_m == 1;
  }
  __device__ __forceinline__ const unsigned char* stage_memory() const { return memory + stage * STAGE_BYTES; }
  __device__ __forceinline__ unsigned char* slot_memory(int ring_slot, const Place& place) const {
    return memory + STAGES * STAGE_BYTES + (stays ? place.step : ring_slot) * SLOT_BYTES;
  }
  __device__ __forceinline__ const unsigned char* lhs_memory(const Place& place) const {
    return slot_memory(slot, place);
  }
  // What was read is not any more: the next step's is.
  __device__ __forceinline__ void advance() {
    stage = behind(stage, STAGES);
    if (!KEPT) slot = behind(slot, LHS_SLOTS);
  }

  __device__ __forceinline__ void load_rhs(const Place& place) {
    const unsigned shared = shared_address(memory + coming_stage * STAGE_BYTES);
    coming_stage = behind(coming_stage, STAGES);
    if (place.pass >= work.passes) return;
    const Tile tile = work.tile(place.pass);
    if (place.step == 0) {
      integers.go_to(work, tile);
      scales.go_to([&](int column) { return work.scales(tile, column); });
      if constexpr (ZERO_POINTS) zeros.go_to([&](int column) { return work.zeros(tile, column); });
    }
    const int step = work.turned(tile, place.step);
    integers.copy(shared, step);
    scales.copy<COLUMN_SCALES_BYTES>(shared + SCALES_OFFSET, work.first_scale(step));
    if constexpr (ZERO_POINTS) zeros.copy<COLUMN_ZEROS_BYTES>(shared + ZEROS_OFFSET, work.first_zero(step));
  }
  __device__ __forceinline__ void load_lhs(const Place& place) {
    if (KEPT) return;
    const unsigned slot = shared_address(slot_memory(coming_slot, place));
    coming_slot = behind(coming_slot, LHS_SLOTS);
    if (place.pass >= work.passes || (stays && place.pass > 0)) return;
    if constexpr (CHECKED && LHS_WIDTH > 1) {
      if (!work.is_wide) return copy_rows<1>(work, slot, work.tile(place.pass), place.step);
    }
    copy_rows<LHS_WIDTH>(work, slot, work.tile(place.pass), place.step);
  }

  // All stages but one; rhs, which no kernel writes, before the kernel before this one has ended.
  __device__ __forceinline__ void fill() {
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
      load_rhs(Place{0, 0}.ahead(i));
      if (KEPT) copy_async_commit();
    }
    wait_for_kernel_before();
#pragma unroll
    for (int i = 0; !KEPT && i < STAGES - 1; ++i) {
      load_lhs(Place{0, 0}.ahead(i));
      copy_async_commit();
    }
  }
  // What all stages but one are ahead of a step, or nothing behind the last one.
  __device__ __forceinline__ void load_ahead(const Place& place) {
    const Place coming = place.ahead(STAGES - 1);
    load_rhs(coming);
    load_lhs(coming);
    copy_async_commit();
  }
};

}  // namespace onnxfuse
