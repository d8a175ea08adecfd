// One block computes tile after tile of out[m, o] = result(softmax_n(score(q[m, k] * keys[k, n])) * values[n, o]): no
// score and no probability ever leaves the registers.
// sm_90a: TMA fills two rings, wgmma reads them; of each group of 64 rows the exponentials run beside products.
//
//   the last warps   producer: one thread keeps TMA busy, across tiles: q of every group once a tile; then, from the
//                    last block of keys to the first, keys with the masks on top of them, and the values
//                       |  cp.async.bulk.tensor, swizzled; what lies outside of a tensor arrives as zeros
//   rings            [keys + masks 0][keys + masks 1] ...     rows of 128 bytes, 64 columns of a head: an atom; the
//                    [values 0][values 1] ...                 next 64 columns lie behind all rows of the first
//   4 warps each     consumer groups of 64 rows
//                       |  scores = q * keys of the next block     wgmma, operands in shared memory
//                       |  sums += probabilities * values of this  wgmma, probabilities in registers
//                       |  score(), maximum, exp2, row sums        beside the second product and the others' products
//
//   a group          q k0 | max, exp | q k1, p0 v0 | max, exp of 1 | q k2, p1 v1 | ... | p v of the last | out
//                                                  (while p0 v0)
//   all groups       `turn` lines their products up behind each other, so that one's exponentials run beside another's
//                    products:      group 0  [q k, p v] max, exp   [q k, p v] ...
//                                   group 1             [q k, p v]  max, exp  [q k, p v]
//
//   fp32             in TF32, whose operands wgmma reads with the depth contiguous alone: TMA rounds them, and three
//                    warps beside the producer turn the values, [n, o] -> [o, n]:
//                       TMA -> [landed 0][landed 1] -> 4 x 4 elements of a lane -> [values 0][values 1]
//
//   few rows         with SPLITS the blocks of a cluster share a tile of 16 rows, each a range of its keys: the first warp
//                    of the others sends maxima, row sums and sums to that of the first one, which scales and adds them
//
// Launch: THREADS threads, SHARED_BYTES of dynamic shared memory, a grid of (blocks, 1, 1), at most one for each tile.
// Arguments: lhs is q [batch, m, k], rhs[0] the keys [batch, k, n], rhs[1] the values [batch, n, o], loads [batch, m,
// n], outs[0] [batch, m, o]. Batches are heads, and in lhs_outer.batches of them the next outer batch begins;
// rhs_outer.batches heads of keys and values_outer.batches of values serve them all. What is broadcast along either has a stride of 0 there.
//
// The generated text before this file defines Element, Stored (the output's), the constants, the table Load<I>, the functors Score and Result,
// and multiply_scores() and multiply_values(): one wgmma each.
#pragma once
#include "common/online_softmax.cuh"
#include "hopper/ptx.cuh"
#include "common/cluster_shares.cuh"
#include "common/first_lane.cuh"

namespace onnxfuse {

constexpr int GROUP_ROWS = 64;  // of one wgmma
constexpr int BLOCK_M = SPLITS > 1 ? WARP_ROWS : TOGETHER ? GROUP_ROWS : CONSUMERS * GROUP_ROWS;
constexpr int BLOCK_HEADS = TOGETHER ? CONSUMERS : 1;
constexpr int ROW_BYTES = 128;  // the widest swizzle
constexpr int ATOM = ROW_BYTES / sizeof(Element);
constexpr int STEP = 32 / sizeof(Element);  // k of one wgmma
constexpr int KEY_ATOMS = (HEAD - 1) / ATOM + 1;
constexpr int VALUE_ATOMS = (VALUE_HEAD - 1) / ATOM + 1;
constexpr int HEAD_STEPS = (HEAD - 1) / STEP + 1;

constexpr int QUERY_BYTES = KEY_ATOMS * GROUP_ROWS * ROW_BYTES;  // of a group
constexpr int KEY_BYTES = KEY_ATOMS * BLOCK_N * ROW_BYTES;
constexpr bool TURNED = sizeof(Element) == 4;
constexpr int LANDED_BYTES = VALUE_ATOMS * BLOCK_N * ROW_BYTES;  // values as TMA brings them
constexpr int TURNED_ATOM_BYTES = VALUE_HEAD * ROW_BYTES;        // a row for each column, of as many keys as an atom has
constexpr int VALUE_BYTES = TURNED ? BLOCK_N / ATOM * TURNED_ATOM_BYTES : LANDED_BYTES;
constexpr int KEYS_OFFSET = CONSUMERS * QUERY_BYTES;
constexpr int VALUES_OFFSET = KEYS_OFFSET + STAGES * KEY_BYTES;
constexpr int LANDED_OFFSET = VALUES_OFFSET + STAGES * VALUE_BYTES;
constexpr int MASKS_OFFSET = LANDED_OFFSET + LANDED_STAGES * LANDED_BYTES;
constexpr int SHARES_OFFSET = MASKS_OFFSET + STAGES * MASK_BYTES;
constexpr int BARRIERS_OFFSET = SHARES_OFFSET + (SPLITS - 1) * SHARE_BYTES;
constexpr int KEYS_FULL = BARRIERS_OFFSET;
constexpr int KEYS_EMPTY = KEYS_FULL + STAGES * 8;
constexpr int VALUES_FULL = KEYS_EMPTY + STAGES * 8;
constexpr int VALUES_EMPTY = VALUES_FULL + STAGES * 8;
constexpr int QUERY_FULL = VALUES_EMPTY + STAGES * 8;
constexpr int QUERY_EMPTY = QUERY_FULL + CONSUMERS * 8;
constexpr int LANDED_FULL = QUERY_EMPTY + CONSUMERS * 8;
constexpr int LANDED_EMPTY = LANDED_FULL + LANDED_STAGES * 8;
constexpr int CONSUMER_WARPS = CONSUMERS * 4;
constexpr int TURNERS = 3;  // warps, of the producer's group
constexpr int PRODUCER_THREAD = CONSUMERS * WARP_GROUP;

static_assert(THREADS == (CONSUMERS + 1) * WARP_GROUP, "a group of producers");
static_assert(TURNED == (LANDED_STAGES > 0) && (!TURNED || BLOCK_N % ATOM == 0), "whole atoms of keys are turned");
constexpr int VERDICT = LANDED_EMPTY + LANDED_STAGES * 8;  // all consumers have noted what is to be looked at again
constexpr int NOTED = VERDICT + 8;                    // a byte for each warp of the first tiles of a block
constexpr int NOTED_TILES = LOOKS_AGAIN ? 64 : 0;
using Shares = ClusterShares<SPLITS, SHARES_OFFSET, VERDICT>;
static_assert(SPLITS == 1 || (CONSUMERS == 1 && !LOOKS_AGAIN), "one warp sends, and all that it found");
static_assert(SHARED_BYTES == VERDICT + (LOOKS_AGAIN ? 8 + NOTED_TILES * CONSUMER_WARPS : SPLITS > 1 ? Shares::BARRIER_BYTES : 0),
              "footprint and kernel agree");
static_assert(BLOCK_N % 16 == 0 && BLOCK_N <= 256 && HEAD % 8 == 0 && VALUE_HEAD % 8 == 0, "one wgmma and one box");

// 65,536 registers: 128 * 32 + 3 * 128 * 160, or 128 * 40 + 2 * 128 * 232, or two blocks of 128 * 24 + 128 * 232. One
// block of one group has 255 a thread. Who turns values has 16 of them, and as much beside: 128 * 56 + 3 * 128 * 152, or
// 128 * 56 + 2 * 128 * 224.
constexpr bool GIVE_REGISTERS = CONSUMERS > 1 || RESIDENTS > 1;
constexpr int PRODUCER_REGISTERS = TURNED ? 56 : CONSUMERS == 3 ? 32 : CONSUMERS == 2 ? 40 : 24;
constexpr int CONSUMER_REGISTERS = (CONSUMERS == 3 ? 160 : 232) - (TURNED ? 8 : 0);
static_assert(RESIDENTS == 1 || (RESIDENTS == 2 && CONSUMERS == 1), "registers");

struct Maps {
  TensorMap query, keys, values;
  TensorMap masks[TILE_LOADS + 1];
};

// ---- shared-memory matrix descriptors of wgmma (PTX ISA, "Matrix Descriptor"); distances in units of 16 bytes

__device__ constexpr unsigned long long descriptor(int leading_bytes, int stride_bytes) {
  return 1ull << 62 | static_cast<unsigned long long>(stride_bytes / 16) << 32 |
         static_cast<unsigned long long>(leading_bytes / 16) << 16;
}
__device__ __forceinline__ unsigned long long descriptor_address(unsigned shared) { return (shared & 0x3ffff) >> 4; }

// q and keys: k contiguous, 8 rows are a period of the swizzle. Values: n is walked, o contiguous; a wgmma of more than
// 64 columns goes on in the next atom.
constexpr unsigned long long ROWS_DESCRIPTOR = descriptor(16, 8 * ROW_BYTES);
constexpr unsigned long long VALUES_DESCRIPTOR = descriptor(BLOCK_N * ROW_BYTES, 8 * ROW_BYTES);

// ---- which tile

template <int LENGTH>
struct RingPosition {
  int stage = 0;
  int parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == LENGTH) stage = 0, parity ^= 1;
  }
};

// Three groups that work through all tiles in so many turns may have little to do in the last one. Then the tiles of the
// last turn have fewer groups, so few that there are as many tiles as that turn has blocks.
//   4,096 rows of 20 heads, 132 blocks: 22 tiles of three groups each, 440, take four turns of three groups
//   19 of three and 7 of one, 520, take no block more than three turns of three groups and one of one
constexpr bool MIXED = CONSUMERS == 3 && !DIAGONAL && !TOGETHER;

// The tiles of a head's rows, those of all groups first, and how many groups the others have; those of all heads.
struct Tiling {
  int heads, of_head, tall, low_groups, tiles;

  Tiling() = default;
  __device__ __forceinline__ explicit Tiling(const OnnxfuseArguments& args) {
    heads = args.batch / BLOCK_HEADS;
    of_head = tall = (args.m - 1) / BLOCK_M + 1;
    low_groups = CONSUMERS;
    if constexpr (MIXED) {
      const int groups = (args.m - 1) / GROUP_ROWS + 1, blocks = static_cast<int>(gridDim.x);
      const int turns = (of_head * heads - 1) / blocks + 1;
      tall = min((turns - 1) * blocks / heads, groups / CONSUMERS);
      const int rest = groups - CONSUMERS * tall;
      low_groups = 0;
      do {
        ++low_groups;
        of_head = tall + (rest + low_groups - 1) / low_groups;
      } while (of_head * heads > turns * blocks);
    }
    tiles = of_head * heads;
  }
};

// Tiles of one head follow each other: the blocks that run together share its keys and values in L2. With a DIAGONAL
// the tiles of most keys come first, of all heads. TOGETHER, the groups of a block have the same rows of neighbouring
// heads, which share keys, values and masks.
struct Place {
  int row, head, batch, groups = CONSUMERS;

  Place() = default;
  __device__ __forceinline__ Place(const OnnxfuseArguments& args, int tile, const Tiling& tiling) {
    const int heads = args.lhs_outer.batches / BLOCK_HEADS, tall_tiles = tiling.tall * tiling.heads;
    const bool is_low = MIXED && tile >= tall_tiles;
    if (is_low) tile -= tall_tiles, groups = tiling.low_groups;
    const int of_head = is_low ? tiling.of_head - tiling.tall : MIXED ? tiling.tall : tiling.of_head;
    const int number = DIAGONAL ? tile % tiling.heads : tile / of_head;
    const int down = DIAGONAL ? of_head - 1 - tile / tiling.heads : tile - number * of_head;
    row = is_low ? tiling.tall * BLOCK_M + down * groups * GROUP_ROWS : down * BLOCK_M;
    batch = number / heads;
    head = (number - batch * heads) * BLOCK_HEADS;
  }
  __device__ __forceinline__ bool has_rows(int group) const { return !MIXED || group < groups; }
  __device__ __forceinline__ bool takes_turns() const { return !MIXED || groups > 1; }
  __device__ __forceinline__ int row_of(int group) const { return row + (TOGETHER ? 0 : group * GROUP_ROWS); }
  __device__ __forceinline__ int head_of(int group) const { return head + (TOGETHER ? group : 0); }
};

// The tile that a block comes to as its `number`th. Behind a diagonal lie fewer and fewer keys: every other time the
// blocks take theirs in the opposite order, so that they have as much to do.
__device__ __forceinline__ int tile_of(int number) {
  const int block = static_cast<int>(blockIdx.x) / SPLITS, blocks = static_cast<int>(gridDim.x) / SPLITS;
  return number * blocks + (DIAGONAL && number % 2 ? blocks - 1 - block : block);
}

// Which head of the keys, or of the values, serves one of the query: as many as share it follow each other.
struct Heads {
  int of_keys, of_values;

  Heads() = default;
  __device__ __forceinline__ Heads(const OnnxfuseArguments& args, const Place& place)
      : of_keys(of(args, place, args.rhs[0], args.rhs_outer)), of_values(of(args, place, args.rhs[1], args.values_outer)) {}

  static __device__ __forceinline__ int of(const OnnxfuseArguments& args, const Place& place, const OnnxfuseTensor& part,
                                           const OnnxfuseOuter& outer) {
    return part.batch_stride ? place.head / (args.lhs_outer.batches / outer.batches) : 0;
  }
};

// What the first loads wait for, with the divisions that it takes: found before the block's barrier, not behind it.
struct Start {
  Tiling tiling;
  Place place;
  Heads heads;

  Start() = default;
  __device__ __forceinline__ explicit Start(const OnnxfuseArguments& args)
      : tiling(args), place(args, tile_of(0), tiling), heads(args, place) {}
};

// ---- producer

__device__ __forceinline__ void load_masks(const OnnxfuseArguments& args, const Maps& maps, unsigned masks,
                                           unsigned full, const Place& place, int key) {
  int map = 0;
  unsigned target = masks;
  static_for<0, LOADS>([&](auto index) {
    constexpr int INDEX = decltype(index)::value;
    if constexpr (IS_MAPPED<INDEX>) {
      constexpr int COLUMNS = ROW_BYTES / sizeof(typename Load<INDEX>::Type);
      const int head = args.loads[INDEX].batch_stride ? place.head : 0;
      const int batch = args.loads_outer[INDEX].batch_stride ? place.batch : 0;
#pragma unroll
      for (int column = 0; column < BLOCK_N; column += COLUMNS) {
        load_box(target, maps.masks[map], full, key + column, place.row, head, batch);
        target += BLOCK_M * ROW_BYTES;
      }
      ++map;
    }
  });
}

// What the one thread of the producers keeps across tiles.
struct Producer {
  const OnnxfuseArguments& args;
  const Maps& maps;
  unsigned shared;
  RingPosition<STAGES> keys;
  RingPosition<TURNED ? LANDED_STAGES : STAGES> values;
  int query_parity = 0;

  __device__ __forceinline__ void load_query(const Place& place) {
    const int batch = args.lhs_outer.batch_stride ? place.batch : 0;
#pragma unroll
    for (int group = 0; group < CONSUMERS; ++group) {
      const unsigned full = shared + QUERY_FULL + group * 8;
      const unsigned target = shared + group * QUERY_BYTES;
      barrier_wait(shared + QUERY_EMPTY + group * 8, query_parity ^ 1);
      barrier_arrive_expect(full, QUERY_BYTES);
#pragma unroll
      for (int atom = 0; atom < KEY_ATOMS; ++atom) {
        load_box(target + atom * GROUP_ROWS * ROW_BYTES, maps.query, full, atom * ATOM, place.row_of(group),
                 args.lhs.batch_stride ? place.head_of(group) : 0, batch);
      }
    }
    query_parity ^= 1;
  }

  __device__ __forceinline__ void load_keys(const Place& place, int head, int block) {
    const int batch = args.rhs_outer.batch_stride ? place.batch : 0;
    const unsigned full = shared + KEYS_FULL + keys.stage * 8;
    const unsigned target = shared + KEYS_OFFSET + keys.stage * KEY_BYTES;
    barrier_wait(shared + KEYS_EMPTY + keys.stage * 8, keys.parity ^ 1);
    barrier_arrive_expect(full, KEY_BYTES + MASK_BYTES);
#pragma unroll
    for (int atom = 0; atom < KEY_ATOMS; ++atom) {
      load_box(target + atom * BLOCK_N * ROW_BYTES, maps.keys, full, atom * ATOM, block * BLOCK_N, head, batch);
    }
    load_masks(args, maps, shared + MASKS_OFFSET + keys.stage * MASK_BYTES, full, place, block * BLOCK_N);
    keys.next();
  }

  __device__ __forceinline__ void load_values(const Place& place, int head, int block) {
    const int batch = args.values_outer.batch_stride ? place.batch : 0;
    const unsigned full = shared + (TURNED ? LANDED_FULL : VALUES_FULL) + values.stage * 8;
    const unsigned target = shared + (TURNED ? LANDED_OFFSET : VALUES_OFFSET) + values.stage * LANDED_BYTES;
    barrier_wait(shared + (TURNED ? LANDED_EMPTY : VALUES_EMPTY) + values.stage * 8, values.parity ^ 1);
    barrier_arrive_expect(full, LANDED_BYTES);
#pragma unroll
    for (int atom = 0; atom < VALUE_ATOMS; ++atom) {
      load_box(target + atom * BLOCK_N * ROW_BYTES, maps.values, full, atom * ATOM, block * BLOCK_N, head, batch);
    }
    values.next();
  }
};

// Whether any warp has noted that of a tile.
__device__ __forceinline__ bool is_to_be_looked_at(const unsigned char* memory, int number) {
  bool again = false;
  for (int warp = 0; warp < CONSUMER_WARPS; ++warp) again |= memory[NOTED + number * CONSUMER_WARPS + warp] != 0;
  return again;
}

// Of a tile's blocks of keys, those of this block of the cluster: none where there are fewer.
__device__ __forceinline__ Blocks share_of(const Blocks& all) {
  if constexpr (SPLITS == 1) return all;
  const int rank = cluster_rank(), count = all.end - all.first;
  return {all.first + count * rank / SPLITS, all.first + count * (rank + 1) / SPLITS};
}

// Which tiles a block looks at, in order, with the blocks of keys: all with those in sight, and then tiles again, with
// all keys, of which a warp has noted that it found nothing there.
//   body(place, blocks, number): number is the tile's among the block's, or -1 where nothing is noted of it
template <typename Body, typename Verdict>
__device__ __forceinline__ void for_each_tile(const OnnxfuseArguments& args, const unsigned char* memory,
                                              const Tiling& tiling, const Place& first, const Body& body,
                                              const Verdict& verdict) {
  const int tiles = tiling.tiles, blocks = static_cast<int>(gridDim.x) / SPLITS;
#pragma unroll 1
  for (int pass = 0; pass < (LOOKS_AGAIN ? 2 : 1); ++pass) {
    if (pass > 0) verdict();
#pragma unroll 1
    for (int number = 0; number * blocks < tiles; ++number) {
      const bool is_noted = LOOKS_AGAIN && number < NOTED_TILES;
      if (tile_of(number) >= tiles || (pass > 0 && !(is_noted && is_to_be_looked_at(memory, number)))) continue;
      const Place place = pass == 0 && number == 0 ? first : Place(args, tile_of(number), tiling);
      const bool is_cut = DIAGONAL && pass == 0 && (!LOOKS_AGAIN || is_noted);
      const Blocks all = is_cut ? blocks_in_sight(args, place.row, BLOCK_M) : every_block(args);
      body(place, share_of(all), is_noted ? number : -1);
    }
  }
}

__device__ __forceinline__ void produce(const OnnxfuseArguments& args, const Maps& maps, const unsigned char* memory,
                                        unsigned shared, const Start& start) {
  Producer producer = {args, maps, shared};
  bool is_first = true;
  const auto load = [&](const Place& place, const Blocks& blocks, int) {
    const Heads heads = is_first ? start.heads : Heads(args, place);
    is_first = false;
    if (SPLITS > 1 && blocks.first == blocks.end) return;
    int block = blocks.end - 1;
    producer.load_query(place);
    producer.load_keys(place, heads.of_keys, block);
#pragma unroll 1
    for (; block > blocks.first; --block) {
      producer.load_keys(place, heads.of_keys, block - 1);
      producer.load_values(place, heads.of_values, block);
    }
    producer.load_values(place, heads.of_values, block);
  };
  for_each_tile(args, memory, start.tiling, start.place, load, [&] { barrier_wait(shared + VERDICT, 0); });
}

// ---- values of 32 bits, turned

// A warp that turns values: of a block of keys every third unit, half of what an atom of keys by one of columns has.
//
// A lane has four keys of four columns, 16 bytes of four rows, and writes 16 bytes of four others. Eight lanes read
// neighbouring columns, each of other keys, so that neither the rows read nor those written meet in a bank. In wgmma's
// fragment of probabilities a thread's two neighbours lie four apart along the depth: every second key is in a chunk.
struct Turner {
  unsigned shared;
  RingPosition<LANDED_STAGES> landed;
  RingPosition<STAGES> values;

  static __device__ __forceinline__ void turn(unsigned source, unsigned target, int unit) {
    const int keys = unit / 2 / VALUE_ATOMS, columns = unit / 2 % VALUE_ATOMS, column = lane() % 8;
    const int own = (column & 4) | (column >> 1 & 1) | (column & 1) << 1;  // bits 0 and 1 change places
    const int chunk = own ^ (lane() / 8 + unit % 2 * 4);
    const unsigned from = source + columns * (BLOCK_N * ROW_BYTES) + keys * (ATOM * ROW_BYTES);
    unsigned rows[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = chunk / 2 * 8 + chunk % 2 + 2 * i;
      load_words(rows[i], from + key * ROW_BYTES + (column ^ key % 8) * 16);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = columns * ATOM + column * 4 + i;
      const unsigned to = target + keys * TURNED_ATOM_BYTES + row * ROW_BYTES + (chunk ^ row % 8) * 16;
      if (row < VALUE_HEAD) store_shared(to, {{rows[0][i], rows[1][i], rows[2][i], rows[3][i]}});
    }
  }

  __device__ __forceinline__ void turn_block() {
    constexpr int UNITS = 2 * VALUE_ATOMS * (BLOCK_N / ATOM);
    const unsigned source = shared + LANDED_OFFSET + landed.stage * LANDED_BYTES;
    const unsigned target = shared + VALUES_OFFSET + values.stage * VALUE_BYTES;
    barrier_wait(shared + VALUES_EMPTY + values.stage * 8, values.parity ^ 1);
    barrier_wait(shared + LANDED_FULL + landed.stage * 8, landed.parity);
#pragma unroll 1
    for (int unit = threadIdx.x / WARP_SIZE % 4 - 1; unit < UNITS; unit += TURNERS) turn(source, target, unit);
    shared_to_tma_fence();
    __syncwarp();
    if (lane() == 0) {
      barrier_arrive(shared + VALUES_FULL + values.stage * 8);
      barrier_arrive(shared + LANDED_EMPTY + landed.stage * 8);
    }
    landed.next();
    values.next();
  }
};

__device__ __forceinline__ void turn_values(const OnnxfuseArguments& args, const unsigned char* memory,
                                            unsigned shared) {
  Turner turner = {shared};
  const auto turn = [&](const Place&, const Blocks& blocks, int) {
#pragma unroll 1
    for (int block = blocks.first; block < blocks.end; ++block) turner.turn_block();
  };
  const Start start(args);
  for_each_tile(args, memory, start.tiling, start.place, turn, [&] { barrier_wait(shared + VERDICT, 0); });
}

// ---- consumers

// This warp has read what lies behind the barrier.
__device__ __forceinline__ void release(unsigned empty) {
  if constexpr (TILE_LOADS > 0) __syncwarp();
  if (lane() == 0) barrier_arrive(empty);
}

__device__ __forceinline__ void start_scores(float (&scores)[SCORES], unsigned query, unsigned keys) {
  const unsigned long long lhs = ROWS_DESCRIPTOR | descriptor_address(query);
  const unsigned long long rhs = ROWS_DESCRIPTOR | descriptor_address(keys);
  multiply_fence();
#pragma unroll
  for (int step = 0; step < HEAD_STEPS; ++step) {
    const int atom = step * STEP / ATOM, within = step * STEP % ATOM * sizeof(Element) / 16;
    multiply_scores(scores, lhs + atom * (GROUP_ROWS * ROW_BYTES / 16) + within,
                    rhs + atom * (BLOCK_N * ROW_BYTES / 16) + within, step > 0);
  }
  multiply_commit();
}

__device__ __forceinline__ void start_sums(float (&sums)[SUMS], const unsigned (&probabilities)[WORDS],
                                           unsigned values, int accumulate) {
  const unsigned long long rhs = (TURNED ? ROWS_DESCRIPTOR : VALUES_DESCRIPTOR) | descriptor_address(values);
  multiply_fence();
#pragma unroll
  for (int step = 0; step < BLOCK_N / STEP; ++step) {
    const int bytes = TURNED ? step * STEP / ATOM * TURNED_ATOM_BYTES + step * STEP % ATOM * int(sizeof(Element))
                             : step * STEP * ROW_BYTES;
    multiply_values(sums, probabilities + 4 * step, rhs + bytes / 16, accumulate | step);
  }
  multiply_commit();
}

// ---- masks: what TMA has brought beside the keys

__device__ __forceinline__ float to_float_low(__half, unsigned word) { return __half2float(__ushort_as_half(static_cast<unsigned short>(word))); }
__device__ __forceinline__ float to_float_low(__nv_bfloat16, unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float to_float_high(__half, unsigned word) {
  return __half2float(__ushort_as_half(word >> 16));
}
__device__ __forceinline__ float to_float_high(__nv_bfloat16, unsigned word) {
  return __uint_as_float(word & 0xffff0000);
}

// The eight elements of a thread in 16 columns from `column` of the block on, in the order of its scores.
template <typename Access>
__device__ __forceinline__ void read_tile(float (&values)[8], const Operands& at, int column) {
  using T = typename Access::Type;
  constexpr int COLUMNS = ROW_BYTES / sizeof(T);
  const int offset = Access::OFFSET + column / COLUMNS * (BLOCK_M * ROW_BYTES);
  const int chunk = column % COLUMNS * sizeof(T) / 16;
  if constexpr (sizeof(T) == 2) {
    // Matrices: the 8 rows and then the next 8, of 8 columns; the same of the next 8 columns.
    const int row = at.warp_row + lane() % 16;
    unsigned words[4];
    load_matrices(words, at.masks + offset + row * ROW_BYTES + ((chunk + lane() / 16) ^ (lane() % 8)) * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = to_float_low(T(), words[i]);
      values[2 * i + 1] = to_float_high(T(), words[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = at.warp_row + lane() / 4 + i % 2 * 8;
      const int byte = (column % COLUMNS + i / 2 * 8 + lane() % 4 * 2) * sizeof(T);
      const int place = offset + row * ROW_BYTES + ((byte / 16) ^ (row % 8)) * 16 + byte % 16;
      const auto pair = load_packed<Packed<T, 2>>(reinterpret_cast<const T*>(at.memory + place));
      values[2 * i] = to_float(pair.values[0]);
      values[2 * i + 1] = to_float(pair.values[1]);
    }
  }
}

// Never taken, but only the exponentials tell: the compiler would else wait for the second product before them.
__device__ __forceinline__ void hold_back_wait(const Softmax& softmax) {
  if (softmax.sum[0] + softmax.sum[1] < 0.0f) pause();
}

constexpr int TURN_BARRIER = 1;  // named barrier of group 0; those of the others follow

__device__ __forceinline__ void hand_over(int group) {
  if constexpr (TURNS) {
#pragma unroll
    for (int other = 1; other < CONSUMERS; ++other) {
      named_arrive(TURN_BARRIER + (group + other) % CONSUMERS, CONSUMERS * WARP_GROUP);
    }
  }
}

__device__ __forceinline__ void await_turn(int group) {
  if constexpr (TURNS) named_sync(TURN_BARRIER + group, CONSUMERS * WARP_GROUP);
}

// As if the groups before this one had had their turn.
__device__ __forceinline__ void line_up(int group) {
  if constexpr (TURNS) {
    for (int before = 0; before < group; ++before) named_arrive(TURN_BARRIER + before, CONSUMERS * WARP_GROUP);
  }
}

// A group of consumers, and where it is in both rings.
struct Consumer {
  const OnnxfuseArguments& args;
  unsigned char* memory;
  unsigned shared;
  int group;
  RingPosition<STAGES> keys, values;
  bool is_again = false;  // tiles are looked at for the second time
  Shares shares = {memory, shared};

  static __device__ __forceinline__ bool has_rows(int warp_row) { return SPLITS == 1 || warp_row == 0; }
  __device__ __forceinline__ void await_keys() const {
    barrier_wait(shared + KEYS_FULL + keys.stage * 8, keys.parity);
  }
  __device__ __forceinline__ void await_values() const {
    barrier_wait(shared + VALUES_FULL + values.stage * 8, values.parity);
  }
  __device__ __forceinline__ void release_keys() {
    release(shared + KEYS_EMPTY + keys.stage * 8);
    keys.next();
  }
  __device__ __forceinline__ void release_values() {
    release(shared + VALUES_EMPTY + values.stage * 8);
    values.next();
  }
  __device__ __forceinline__ void multiply_query(float (&scores)[SCORES]) const {
    start_scores(scores, shared + group * QUERY_BYTES, shared + KEYS_OFFSET + keys.stage * KEY_BYTES);
  }
  __device__ __forceinline__ void multiply_probabilities(float (&sums)[SUMS], const unsigned (&probabilities)[WORDS],
                                                         int accumulate) const {
    start_sums(sums, probabilities, shared + VALUES_OFFSET + values.stage * VALUE_BYTES, accumulate);
  }

  // The product is there: its keys, and the masks on top of them, are not needed any more then.
  template <bool LAST>
  __device__ __forceinline__ void finish_scores(float (&scores)[SCORES], const Place& place, Operands& at) {
    pin_all(scores);
    at.masks = shared + MASKS_OFFSET + keys.stage * MASK_BYTES;
    at.memory = memory + MASKS_OFFSET + keys.stage * MASK_BYTES;
    if (has_rows(at.warp_row)) apply_score<LAST>(scores, args, place, at);
    release_keys();
  }

  __device__ __forceinline__ void finish_sums(float (&sums)[SUMS]) {
    multiply_wait<0>();
    pin_all(sums);
    release_values();
  }
};

// What a group without rows does while the others walk: it waits and hands on as they do, and multiplies nothing. No
// wgmma keeps the lanes of a warp together here, and one that fell two stages behind would wait for ever.
__device__ __forceinline__ void pass_by(Consumer& own, const Place& place, const Blocks& blocks) {
#pragma unroll 1
  for (int block = blocks.end - 1; block >= blocks.first; --block) {
    own.await_keys();
    if (block < blocks.end - 1 && place.takes_turns()) {
      await_turn(own.group);
      hand_over(own.group);
    }
    __syncwarp();
    own.release_keys();
    own.await_values();
    __syncwarp();
    own.release_values();
  }
  release(own.shared + QUERY_EMPTY + own.group * 8);
}

// Notes whether a warp has rows that found nothing in front of the diagonal; then their result comes later.
__device__ __forceinline__ bool is_left_for_later(const Consumer& own, const Softmax& softmax, const Place& place,
                                                  const Blocks& blocks, int number, int warp_row) {
  unsigned char& noted = own.memory[NOTED + number * CONSUMER_WARPS + threadIdx.x / WARP_SIZE];
  if (are_all(own.args, blocks)) return number >= 0 && own.is_again && noted == 0;
  const bool low = is_low(softmax, place.row + warp_row, own.args.m);
  if (low && lane() == 0) noted = 1;
  return low;
}

// The keys of a tile, from the last block to the first.
__device__ __forceinline__ void walk(float (&sums)[SUMS], Softmax& softmax, Consumer& own, const Place& place,
                                     const Blocks& blocks, int warp_row) {
  const bool in_turns = place.takes_turns();
  float scores[SCORES], rescale[2];
  unsigned probabilities[WORDS];
  Operands at = {0, nullptr, warp_row, (blocks.end - 1) * BLOCK_N + lane() % 4 * 2, own.args.n};
  own.await_keys();
  own.multiply_query(scores);
  multiply_wait<0>();
  own.finish_scores<true>(scores, place, at);
  exponentiate(scores, softmax, rescale);
  pack(probabilities, scores);
#pragma unroll 1
  for (int block = blocks.end - 2; block >= blocks.first; --block) {
    own.await_keys();
    if (in_turns) await_turn(own.group);
    own.multiply_query(scores);
    own.await_values();
    own.multiply_probabilities(sums, probabilities, block < blocks.end - 2);
    if (in_turns) hand_over(own.group);
    multiply_wait<1>();
    at.key -= BLOCK_N;
    own.finish_scores<false>(scores, place, at);
    exponentiate(scores, softmax, rescale);
    hold_back_wait(softmax);
    own.finish_sums(sums);
    pack(probabilities, scores);
    scale_sums(sums, rescale);
  }
  release(own.shared + QUERY_EMPTY + own.group * 8);
  own.await_values();
  own.multiply_probabilities(sums, probabilities, blocks.end - blocks.first > 1);
  own.finish_sums(sums);
}

__device__ __forceinline__ void attend(Consumer& own, const Place& place, const Blocks& blocks, int number,
                                       int warp_row) {
  float sums[SUMS];
  Softmax softmax;
  if (SPLITS == 1 || blocks.first < blocks.end) {
    walk(sums, softmax, own, place, blocks, warp_row);
  } else {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
  }
  if constexpr (LOOKS_AGAIN) {
    if (is_left_for_later(own, softmax, place, blocks, number, warp_row)) return;
  }
  if constexpr (SPLITS > 1) {
    if (!own.has_rows(warp_row) || !own.shares.gather(sums, softmax)) return;
  }
  finish(sums, softmax, own.args, place, warp_row);
}

__device__ __forceinline__ void consume(const OnnxfuseArguments& args, unsigned char* memory, unsigned shared,
                                        int group) {
  const int warp_row = (TOGETHER ? threadIdx.x % WARP_GROUP : threadIdx.x) / WARP_SIZE * WARP_ROWS;
  Consumer own = {args, memory, shared, group};
  int query_parity = 0;
  line_up(group);
  const auto look = [&](Place place, const Blocks& blocks, int number) {
    place.head = place.head_of(group);
    if (SPLITS == 1 || blocks.first < blocks.end) {
      barrier_wait(shared + QUERY_FULL + group * 8, query_parity);
      query_parity ^= 1;
    }
    if (!place.has_rows(group)) return pass_by(own, place, blocks);
    attend(own, place, blocks, number, warp_row);
  };
  const Start start(args);
  for_each_tile(args, memory, start.tiling, start.place, look, [&] {
    __syncwarp();
    if (lane() == 0) barrier_arrive(shared + VERDICT);
    barrier_wait(shared + VERDICT, 0);
    own.is_again = true;
  });
  if constexpr (SPLITS > 1) {
    if (own.has_rows(warp_row)) own.shares.await_read();
  }
}

__device__ __forceinline__ void init_barriers(unsigned shared) {
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
    barrier_init(shared + KEYS_FULL + stage * 8, 1);
    barrier_init(shared + KEYS_EMPTY + stage * 8, CONSUMER_WARPS);
    barrier_init(shared + VALUES_FULL + stage * 8, TURNED ? TURNERS : 1);
    barrier_init(shared + VALUES_EMPTY + stage * 8, CONSUMER_WARPS);
  }
#pragma unroll
  for (int group = 0; group < CONSUMERS; ++group) {
    barrier_init(shared + QUERY_FULL + group * 8, 1);
    barrier_init(shared + QUERY_EMPTY + group * 8, WARP_GROUP / WARP_SIZE);
  }
#pragma unroll
  for (int stage = 0; stage < LANDED_STAGES; ++stage) {
    barrier_init(shared + LANDED_FULL + stage * 8, 1);
    barrier_init(shared + LANDED_EMPTY + stage * 8, TURNERS);
  }
  if constexpr (LOOKS_AGAIN) barrier_init(shared + VERDICT, CONSUMER_WARPS);
  if constexpr (SPLITS > 1) Shares::init_barriers(shared);
  barrier_init_fence();
}

// What the block waits for, side by side in three warps, by one lane each: instructions of barriers and maps take uniform
// registers. What the first loads wait for is the producer's.
__device__ __forceinline__ Start prepare_block(const OnnxfuseArguments& args, const Maps& maps, unsigned shared) {
  Start start = {};
  if (threadIdx.x == PRODUCER_THREAD) {
    start = Start(args);
    pin_integers(start);
  } else if (threadIdx.x == PRODUCER_THREAD + WARP_SIZE) {
    init_barriers(shared);
  } else if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < 3 + TILE_LOADS; ++i) prefetch_map(reinterpret_cast<const TensorMap*>(&maps)[i]);
  }
  __syncwarp();
  return start;
}

}  // namespace onnxfuse

extern "C" __global__ void __launch_bounds__(onnxfuse::THREADS, onnxfuse::RESIDENTS) ONNXFUSE_CLUSTER
onnxfuse_attention(const __grid_constant__ OnnxfuseArguments args, const __grid_constant__ onnxfuse::Maps maps) {
  using namespace onnxfuse;
  extern __shared__ __align__(1024) unsigned char onnxfuse_shared[];
  const unsigned shared = shared_address(onnxfuse_shared);
  const Start start = prepare_block(args, maps, shared);
  for (int i = threadIdx.x; i < NOTED_TILES * CONSUMER_WARPS; i += THREADS) onnxfuse_shared[NOTED + i] = 0;
  if constexpr (SPLITS > 1) {
    cluster_meet();
  } else {
    __syncthreads();
  }
  wait_for_kernel_before();
  let_kernel_behind_start();
  // The same in all lanes: the compiler may keep what follows from it in uniform registers.
  const int group = __shfl_sync(0xffffffff, threadIdx.x / WARP_GROUP, 0);
  if (group == CONSUMERS) {
    if constexpr (GIVE_REGISTERS) give_registers<PRODUCER_REGISTERS>();
    if (__shfl_sync(0xffffffff, threadIdx.x < PRODUCER_THREAD + WARP_SIZE, 0)) {
      const Start own = of_first_lane(start);
      if (is_elected()) produce(args, maps, onnxfuse_shared, shared, own);
    } else if constexpr (TURNED) {
      turn_values(args, onnxfuse_shared, shared);
    }
  } else {
    if constexpr (GIVE_REGISTERS) take_registers<CONSUMER_REGISTERS>();
    consume(args, onnxfuse_shared, shared, group);
  }
}
