// A stage of a quantized weight and of the activations: how TMA brings it, and how wgmma reads it. The weight is the M side
// of wgmma, whose operand may come from registers: packed integers go from shared memory into a thread's registers, become
// Element there, and nothing but the tensor cores reads them. So the kernel's rows are columns n of the output (SWAPPED),
// and each conversion serves BLOCK_N rows of activations.
//
//   a stage    activations [BLOCK_K / 64][BLOCK_N][128 bytes], swizzled; then of each part [BLOCK_M][PACKED_BYTES],
//              swizzled over as many bytes; then of each part [BLOCK_M][SCALE_BYTES], and [BLOCK_M][4 bytes] of zero points
//   a chunk    16 bytes of a packed row: 32 elements of k in 4 bits, 16 in 8; of fp32, whose fragments take twice the
//              registers, 8 bytes. While the tensor cores multiply one chunk, the threads convert the next
//   scales     and zero points are copied by a warp of their own, as far ahead as there are stages
//
// A thread's fragment of 16 k is k = 2t, 2t+1, 2t+8, 2t+9 of rows g and g + 8, with t the lane in its quad and g the quad:
// in 4 bits one byte of two words, which all four lanes of a quad load. Of fp32, which is multiplied as TF32, it is of 8 k
// those of t and t + 4: the t-th 4 bits of either half of a word.
//
// With parts apart (APART) each group multiplies one part by twice as many rows of activations, which halves what is
// converted for a wgmma; then the groups exchange sums, such that each has both parts of half of the rows.
//
// Integers become numbers by bits alone: an integer in the last bits of 1024 or 64, or of 128 in bf16, is added to it; the
// same number with the zero point is subtracted, exactly, and the product with the scale is rounded once (of fp32 twice: the
// tensor cores would cut it off).
#pragma once
#include "hopper/ring.cuh"

namespace onnxfuse {

constexpr int BITS = QUANTIZED_BITS;
constexpr int ATOM_K = ROW_BYTES / sizeof(Element);         // of a swizzled row of activations
constexpr int ATOM_BYTES = TILE_COLUMNS * ROW_BYTES;
constexpr int ACTIVATION_BYTES = BLOCK_K / ATOM_K * ATOM_BYTES;
constexpr int PACKED_BYTES = BLOCK_K * BITS / 8;            // of a row of the weight
constexpr int PART_BYTES = BLOCK_M * PACKED_BYTES;
constexpr bool IS_FP32 = sizeof(Element) == 4;
constexpr int CHUNK_BYTES = IS_FP32 ? 8 : 16;
constexpr int CHUNK_WORDS = CHUNK_BYTES / 4;
constexpr int CHUNKS = PACKED_BYTES / CHUNK_BYTES;
constexpr int CHUNK_K = BLOCK_K / CHUNKS;
constexpr int CHUNK_STEPS = CHUNK_K / STEP_K;
constexpr int OWN_PARTS = APART ? 1 : PARTS;                // of a group
constexpr int UNITS = OWN_PARTS * SUBTILES;                 // wgmma of one k of a group
constexpr int STAGE_BLOCKS = BLOCK_K > QUANTIZED_BLOCK ? BLOCK_K / QUANTIZED_BLOCK : 1;
constexpr int WORD_SCALES = 4 / sizeof(Element);
constexpr int SCALES = STAGE_BLOCKS > WORD_SCALES ? STAGE_BLOCKS : WORD_SCALES;  // of a row in a stage: whole words
constexpr int SCALE_BYTES = SCALES * sizeof(Element);
constexpr int SCALE_WORDS = SCALES / WORD_SCALES;
constexpr int SCALE_COPY = SCALES_WIDTH < SCALES ? SCALES_WIDTH : SCALES;
constexpr int ZERO_BYTES = STAGE_BLOCKS * BITS > 8 ? STAGE_BLOCKS * BITS / 8 : 1;
constexpr int ZERO_PITCH = 4;
constexpr bool ZERO_WORDS = ZERO_POINTS_WIDTH >= ZERO_PITCH;  // whole words are copied, else the bytes of the stage
constexpr int NARROW_ZERO_COPY = ZERO_POINTS_WIDTH < ZERO_BYTES ? ZERO_POINTS_WIDTH : ZERO_BYTES;
constexpr int ZERO_COPY = ZERO_WORDS ? ZERO_PITCH : NARROW_ZERO_COPY;
constexpr int ZERO_COPIES = ZERO_WORDS ? 1 : ZERO_BYTES / ZERO_COPY;
constexpr int ZERO_SPAN = ZERO_COPY * ZERO_COPIES;  // bytes that a stage's zero points are looked for in
constexpr int STAGE_ROWS = PARTS * BLOCK_M;
constexpr int SCALES_OFFSET = ACTIVATION_BYTES + PARTS * PART_BYTES;
constexpr int ZEROS_OFFSET = SCALES_OFFSET + STAGE_ROWS * SCALE_BYTES;
constexpr int STAGE_END = ZEROS_OFFSET + (ZERO_POINTS ? STAGE_ROWS * ZERO_PITCH : 0);
constexpr bool PREPARES = true;

static_assert(SWAPPED && SCALE_WORDS <= 4, "the weight is the M side; one load of scales");
static_assert(STAGE_BYTES == (STAGE_END + 1023) / 1024 * 1024, "footprint and kernel agree");
static_assert(TEAMS == 1, "one warp prepares the stages, one brings the slabs of all groups");
static_assert(PACKED_BYTES >= 32 && PACKED_BYTES <= 128 && ZERO_BYTES <= 4, "a span of TMA's swizzles");
static_assert(BLOCK_N % (APART ? 16 : 8) == 0 && TILE_COLUMNS <= 256 && BLOCK_M <= 256, "one wgmma and one box");
static_assert(SHARING == 1 && (K_GROUPS == 1 || !APART), "blocks share no loads, and groups one thing");

// ---- producer

__device__ __forceinline__ int stage_bytes(const OnnxfuseArguments&, const OutTile&, bool) { return SCALES_OFFSET; }

__device__ __forceinline__ void load_lhs(unsigned stage, unsigned full, const OnnxfuseArguments& args, const Maps& maps,
                                         const OutTile& tile, int k, int) {
  const BatchPlace place(args.lhs, args.lhs_outer, tile.batch, false);
#pragma unroll
  for (int atom = 0; atom < BLOCK_K / ATOM_K; ++atom) {
    load_box(stage + atom * ATOM_BYTES, maps.lhs, full, k + atom * ATOM_K, tile.column, place.batch);
  }
}

__device__ __forceinline__ void load_rhs(unsigned, unsigned stage, unsigned full, const OnnxfuseArguments&, const Maps& maps,
                                         const OutTile& tile, int k, int) {
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    load_box(stage + ACTIVATION_BYTES + part * PART_BYTES, maps.rhs[part], full, k * BITS / 8, tile.row, 0);
  }
}

// ---- scales and zero points

struct Rows {
  const void* pointer;
  long long pitch;  // bytes
};

// What each row of a tile has beside its integers, by one warp: COPIES of BYTES each from a stage's first one on. A lane
// copies the same bytes of every ROWS-th row, so where its own begin is known for a whole tile.
template <int BYTES, int COPIES>
struct Beside {
  static constexpr int ROWS = WARP_SIZE / COPIES;  // of one pass
  static constexpr int PASSES = STAGE_ROWS / ROWS;
  static_assert(BLOCK_M % ROWS == 0, "a pass is of one part");

  const unsigned char* parts[PARTS];  // this lane's bytes of its first row
  int pitches[PARTS];
  int rows;  // that exist from there on

  static __device__ __forceinline__ int along() { return threadIdx.x % COPIES * BYTES; }

  // weight(part) has where its first row begins, and how many bytes the next one is behind that.
  template <typename Weight>
  __device__ __forceinline__ void go_to(const OnnxfuseArguments& args, const OutTile& tile, const Weight& weight) {
    const int row = tile.row + threadIdx.x % WARP_SIZE / COPIES;
    rows = rows_of(args) - row;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const Rows first = weight(part);
      pitches[part] = static_cast<int>(first.pitch);
      parts[part] = static_cast<const unsigned char*>(first.pointer) + row * first.pitch + along();
    }
  }

  // Bytes from `first` on, of which a row has `existing`: zeros behind them, and of rows that are not there. Rows of the
  // stage are SHARED_PITCH apart.
  template <int SHARED_PITCH>
  __device__ __forceinline__ void copy(unsigned shared, int first, int existing) const {
    const unsigned own = shared + threadIdx.x % WARP_SIZE / COPIES * SHARED_PITCH + along();
    const int left = first + along() < existing ? rows : 0;
    const auto at = [&](int pass) {
      const int part = pass * ROWS / BLOCK_M, row = pass * ROWS % BLOCK_M;
      return SmallCopy{own + pass * ROWS * SHARED_PITCH, parts[part] + (first + row * pitches[part]), row < left, true};
    };
    if constexpr (BYTES < CP_ASYNC_BYTES) {
      copy_small<BYTES, PASSES>(at);
    } else {
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        const SmallCopy copy = at(pass);
        copy_async<BYTES>(copy.shared, copy.global, copy.inside);
      }
    }
  }
};

using Scales = Beside<SCALE_COPY * int(sizeof(Element)), SCALES / SCALE_COPY>;
using Zeros = Beside<ZERO_COPY, ZERO_COPIES>;

// What of every stage TMA does not bring, by one warp.
__device__ __forceinline__ void prepare(const OnnxfuseArguments& args, unsigned shared, int rank) {
  const TileScheduler scheduler(args);
  const int steps = steps_of(args, SPLITS), first_k = SPLITS > 1 ? rank * steps * BLOCK_K : 0;
  const int blocks = (args.k - 1) / QUANTIZED_BLOCK + 1;
  const int scales_bytes = blocks * int(sizeof(Element)), zeros_bytes = (blocks * BITS + 7) / 8;
  Scales scales;
  Zeros zeros;
  RingPosition ring;
#pragma unroll 1
  for (int number = scheduler.first; number < scheduler.tiles; number += scheduler.clusters) {
    const OutTile tile = scheduler.at(number, rank);
    scales.go_to(args, tile, [&](int part) {
      return Rows{args.scales[part].scales, args.scales[part].scales_pitch * int(sizeof(Element))};
    });
    if constexpr (ZERO_POINTS) {
      zeros.go_to(args, tile, [&](int part) {
        return Rows{args.scales[part].zero_points, args.scales[part].zero_points_pitch};
      });
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const unsigned stage = shared + ring.stage * STAGE_BYTES;
      const int first = (first_k + step * BLOCK_K) / QUANTIZED_BLOCK;
      barrier_wait(shared + EMPTY_OFFSET + ring.stage * 8, ring.parity ^ 1);
      scales.copy<SCALE_BYTES>(stage + SCALES_OFFSET, first / WORD_SCALES * 4, scales_bytes);
      if constexpr (ZERO_POINTS) {
        zeros.copy<ZERO_PITCH>(stage + ZEROS_OFFSET, first * BITS / 8 / ZERO_SPAN * ZERO_SPAN, zeros_bytes);
      }
      barrier_arrive_copied(shared + FULL_OFFSET + ring.stage * 8);
      ring.next();
    }
  }
}

// Of a thread's rows, the scales and zero points of one stage, of 16 bits two scales in a word; the zero point of the stage's first
// block lies in the last bits.
struct StageScales {
  unsigned scales[UNITS][2][SCALE_WORDS];
  unsigned zeros[UNITS][2];

  // `row` is the number of the thread's first row, `first` that of the stage's first block.
  __device__ __forceinline__ StageScales(unsigned stage, int row, int first) {
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = row + unit % OWN_PARTS * BLOCK_M + unit / OWN_PARTS * GROUP_WGMMA_ROWS + half * 8;
        load_words(scales[unit][half], stage + SCALES_OFFSET + own * SCALE_BYTES);
        if (STAGE_BLOCKS == 1 && first % WORD_SCALES != 0) scales[unit][half][0] >>= 16;
        if constexpr (ZERO_POINTS) {
          zeros[unit][half] =
              load_shared_word(stage + ZEROS_OFFSET + own * ZERO_PITCH) >> first * BITS % (ZERO_WORDS ? 32 : 8);
        }
      }
    }
  }
};

// ---- conversion

// What a thread needs of a row to convert elements of one block: of pairs, of which the instruction takes one scale for both;
// of fp32 one each.
struct RowScale {
  unsigned zero, scale;
};

constexpr unsigned INTEGERS_OF_FP32 = 0x4b000000;  // 2^23, whose last bits are whole numbers

// (number - zero) * scale, of a number whose last bits are those of an integer.
__device__ __forceinline__ float scaled(unsigned number, unsigned zero, unsigned scale) {
  return (__uint_as_float(number) - __uint_as_float(zero)) * __uint_as_float(scale);
}

// How integers of BITS, in the words of eight elements, become what a register holds of a thread's elements. `selector` says
// which of them are lane t's; `zero` is what numbers are with a zero point; `scale` takes that of a block of a word.
template <typename T>
struct Conversion;

// Elements 2t and 2t + 1: of 4 bits, byte t twice, of 8 bits, bytes 2t and 2t + 1 of both words. `take` leaves two integers in
// the last bits of MAGIC's numbers.
template <>
struct Conversion<__half> {
  static constexpr unsigned MAGIC = BITS == 4 ? 0x54006400 : 0x64006400;  // 64 and 1024, of which 4 bits end 4 bits higher
  static constexpr unsigned MASK = BITS == 4 ? 0x00f0000f : 0x00ff00ff;

  static __device__ __forceinline__ unsigned selector(unsigned t) {
    return BITS == 8 ? 2 * t | (2 * t + 1) << 8 : t | t << 8;
  }
  static __device__ __forceinline__ unsigned zero(unsigned point) { return MAGIC | point | point << (BITS == 4 ? 20 : 16); }
  static __device__ __forceinline__ unsigned scale(unsigned word, int block) { return twice(__half(), word, block % 2); }
  static __device__ __forceinline__ unsigned convert(const unsigned* words, int, const RowScale& row, unsigned selector) {
    const unsigned bytes = permute_bytes(words[0], BITS == 8 ? words[1] : 0, selector);
    return scaled_pair(__half(), masked_or(bytes, MASK, MAGIC), row.zero, row.scale);
  }
};

// The same; but bf16 has no 4 bits above 4 bits, so byte t is taken of a word and of the same one shifted, and no integers of
// more than 8 bits, so those become fp32 on the way.
template <>
struct Conversion<__nv_bfloat16> {
  static constexpr bool IN_FP32 = BITS == 8;
  static constexpr unsigned MAGIC = 0x43004300, MASK = 0x000f000f;

  static __device__ __forceinline__ unsigned selector(unsigned t) {
    return BITS == 8 ? 2 * t | (2 * t + 1) << 8 : t | (4 + t) << 8;
  }
  static __device__ __forceinline__ unsigned zero(unsigned point) {
    return IN_FP32 ? INTEGERS_OF_FP32 | point : MAGIC | point | point << 16;
  }
  static __device__ __forceinline__ unsigned scale(unsigned word, int block) {
    return IN_FP32 ? (block % 2 ? word & 0xffff0000 : word << 16) : twice(__nv_bfloat16(), word, block % 2);
  }
  static __device__ __forceinline__ unsigned convert(const unsigned* words, int, const RowScale& row, unsigned selector) {
    const unsigned bytes = permute_bytes(words[0], BITS == 8 ? words[1] : words[0] >> 4, selector);
    if constexpr (IN_FP32) {
      const float low = scaled(permute_bytes(bytes, INTEGERS_OF_FP32, 0x7440), row.zero, row.scale);
      const float high = scaled(permute_bytes(bytes, INTEGERS_OF_FP32, 0x7442), row.zero, row.scale);
      return pack_pair(__nv_bfloat16(), low, high);
    } else {
      return scaled_pair(__nv_bfloat16(), masked_or(bytes, MASK, MAGIC), row.zero, row.scale);
    }
  }
};

// Element t or t + 4, as TF32: of 4 bits, those that a shift leaves in the last bits of either half of a word; of 8 bits, byte
// t of either word.
template <>
struct Conversion<float> {
  static constexpr unsigned HIGH_INTEGERS = 0x43000000;  // 128, whose whole numbers end 16 bits higher

  static __device__ __forceinline__ unsigned selector(unsigned t) { return BITS == 8 ? 0x7440 | t : 4 * t; }
  static __device__ __forceinline__ unsigned zero(unsigned point) { return INTEGERS_OF_FP32 | point; }
  static __device__ __forceinline__ unsigned scale(unsigned word, int) { return word; }
  static __device__ __forceinline__ unsigned convert(const unsigned* words, int four, const RowScale& row,
                                                     unsigned selector) {
    unsigned number, zero = row.zero;
    if (BITS == 8) {
      number = permute_bytes(words[four], INTEGERS_OF_FP32, selector);
    } else if (four == 0) {
      number = masked_or(words[0] >> selector, 0x0000000f, INTEGERS_OF_FP32);
    } else {
      number = masked_or(words[0] >> selector, 0x000f0000, HIGH_INTEGERS);
      zero = (row.zero & 15) << 16 | HIGH_INTEGERS;
    }
    unsigned element = __float_as_uint(scaled(number, zero, row.scale));
    round_to_tf32(element);
    return element;
  }
};

using Converted = Conversion<Element>;

__device__ __forceinline__ RowScale row_scale(const StageScales& stage, int unit, int half, int block) {
  unsigned point = 1u << (BITS - 1);
  if constexpr (ZERO_POINTS) point = stage.zeros[unit][half] >> block * BITS & ((1u << BITS) - 1);
  return {Converted::zero(point), Converted::scale(stage.scales[unit][half][block / WORD_SCALES], block)};
}

// ---- consumers

// What the tensor cores read of a chunk: of every unit and 16 k, four registers.
struct Fragments {
  unsigned words[CHUNK_STEPS][UNITS][4];
};

// A chunk of a thread's rows -> fragments. `row` is where its first row begins, `swizzle` what its chunks are swizzled with.
template <int CHUNK>
__device__ __forceinline__ void convert_chunk(Fragments& target, unsigned row, unsigned swizzle,
                                              const StageScales& scales, unsigned selector) {
  constexpr int WORDS = BITS == 4 ? 1 : 2;  // of eight elements
  constexpr int EIGHTS = STEP_K / 8;        // of a step, whose two registers of a row may have one each
  const unsigned chunk = row + (CHUNK * CHUNK_BYTES ^ swizzle);
#pragma unroll
  for (int unit = 0; unit < UNITS; ++unit) {
    const int first = (unit % OWN_PARTS * BLOCK_M + unit / OWN_PARTS * GROUP_WGMMA_ROWS) * PACKED_BYTES;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned words[CHUNK_WORDS];
      load_words(words, chunk + first + half * 8 * PACKED_BYTES);
#pragma unroll
      for (int step = 0; step < CHUNK_STEPS; ++step) {
        const int block = (CHUNK * CHUNK_K + step * STEP_K) / QUANTIZED_BLOCK % STAGE_BLOCKS;
        const RowScale scale = row_scale(scales, unit, half, block);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const unsigned* own = words + (step * EIGHTS + pair * (EIGHTS - 1)) * WORDS;
          target.words[step][unit][pair * 2 + half] = Converted::convert(own, pair, scale, selector);
        }
      }
    }
  }
}

// acc += weight * activations, of a chunk.
template <int CHUNK>
__device__ __forceinline__ void multiply_chunk(float (&acc)[SUBTILES][ACCUMULATORS], const Fragments& fragments,
                                               unsigned stage, int accumulate) {
#pragma unroll
  for (int step = 0; step < CHUNK_STEPS; ++step) {
    const int k = CHUNK * CHUNK_K + step * STEP_K;
    const unsigned atom = stage + k / ATOM_K * ATOM_BYTES;
    const unsigned long long activations =
        (K_CONTIGUOUS_DESCRIPTOR | descriptor_address(atom)) + k % ATOM_K * sizeof(Element) / 16;
    static_for<0, UNITS>([&](auto unit) {
      constexpr int UNIT = decltype(unit)::value;
      multiply<UNIT % OWN_PARTS * BLOCK_N / 2, TILE_COLUMNS>(acc[UNIT / OWN_PARTS], fragments.words[step][UNIT],
                                                         activations, accumulate | k);
    });
  }
  multiply_commit();
}

// acc = weight * activations over all of the block's k. A chunk is converted while the one before it is multiplied.
__device__ __forceinline__ void run_main_loop(float (&acc)[SUBTILES][ACCUMULATORS], RingPosition& ring,
                                              unsigned shared, int first_row, const OnnxfuseArguments&,
                                              const Work& work) {
  const int own = first_row + threadIdx.x % WARP_GROUP / WARP_SIZE * WARP_ROWS + threadIdx.x % WARP_SIZE / 4;
  const unsigned row = ACTIVATION_BYTES + own * PACKED_BYTES;
  const unsigned swizzle = (own * PACKED_BYTES / 128 & (PACKED_BYTES / 16 - 1)) * 16;
  const unsigned selector = Converted::selector(threadIdx.x % 4);
  Fragments fragments[2];
  int previous = 0;
  if constexpr (K_GROUPS > 1) ring.skip(work.k_group);
#pragma unroll 1
  for (int step = work.k_group; step < work.steps; step += K_GROUPS) {
    const int before = step - work.k_group;
    if (K_GROUPS > 1 && before > 0) ring.skip(K_GROUPS - 1);
    barrier_wait(shared + FULL_OFFSET + ring.stage * 8, ring.parity);
    const unsigned stage = shared + ring.stage * STAGE_BYTES;
    const StageScales scales(stage, own, (work.first_k + step * BLOCK_K) / QUANTIZED_BLOCK);
    static_for<0, CHUNKS>([&](auto chunk) {
      constexpr int CHUNK = decltype(chunk)::value;
      convert_chunk<CHUNK>(fragments[CHUNK % 2], stage + row, swizzle, scales, selector);
      multiply_fence();
      multiply_chunk<CHUNK>(acc, fragments[CHUNK % 2], stage, before);
      multiply_wait<1>();
      if (CHUNK == 0 && before > 0) release(shared, previous);
    });
    previous = ring.stage;
    ring.next();
  }
}

}  // namespace onnxfuse
