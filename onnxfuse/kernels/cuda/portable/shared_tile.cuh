// How the tiles of lhs and rhs lie in a stage of the ring.
#pragma once

namespace onnxfuse {

constexpr int CHUNK_BYTES = 16;  // what one lane's address of ldmatrix, and the widest cp.async, covers
constexpr int CHUNK = CHUNK_BYTES / sizeof(Element);
constexpr int BANK_CHUNKS = 8;  // 32 banks of 4 bytes: 8 chunks that lie in different banks are read at once

// An operand's tile in shared memory. SWIZZLED: chunk c of row r lies at c ^ f(r), so that the 8 rows that ldmatrix
// reads at one c, and the copies of one row, fall into different banks. f takes as many values as 8 rows of CHUNKS
// chunks would otherwise meet each bank. Not SWIZZLED: rows are 8 elements longer, and the 4 rows by 8 columns of
// 32-bit elements that one rhs fragment reads fall into different banks.
template <int ROWS_, int COLUMNS_, bool SWIZZLED>
struct SharedTile {
  static constexpr int ROWS = ROWS_;
  static constexpr int COLUMNS = COLUMNS_;
  static constexpr int CHUNKS = COLUMNS / CHUNK;
  static constexpr int EVEN = CHUNKS & -CHUNKS;  // the largest power of two that divides CHUNKS
  static constexpr int SPREAD = EVEN < BANK_CHUNKS ? EVEN : BANK_CHUNKS;
  static constexpr int ROW_BYTES = (COLUMNS + (SWIZZLED ? 0 : 8)) * sizeof(Element);
  static constexpr int BYTES = ROWS * ROW_BYTES;
  static_assert(COLUMNS % CHUNK == 0, "rows are whole chunks");

  // `phase` is row modulo 8; a caller that knows it from its lane alone spares the kernel one register a row.
  static __device__ __forceinline__ int offset(int row, int column, int phase) {
    const int shuffle = SWIZZLED ? phase / (BANK_CHUNKS / SPREAD) % SPREAD : 0;
    return row * ROW_BYTES + ((column / CHUNK) ^ shuffle) * CHUNK_BYTES + column % CHUNK * sizeof(Element);
  }
  static __device__ __forceinline__ int offset(int row, int column) { return offset(row, column, row % 8); }
};

// Both in the order that they have in memory; only ldmatrix can transpose, and only 16-bit elements.
constexpr bool LHS_PADDED = !LHS_K_CONTIGUOUS && sizeof(Element) == 4;
constexpr bool RHS_PADDED = !RHS_K_CONTIGUOUS && sizeof(Element) == 4;
using LhsTile = SharedTile<LHS_K_CONTIGUOUS ? BLOCK_M : BLOCK_K, LHS_K_CONTIGUOUS ? BLOCK_K : BLOCK_M, !LHS_PADDED>;
using RhsTile = SharedTile<RHS_K_CONTIGUOUS ? BLOCK_N : BLOCK_K, RHS_K_CONTIGUOUS ? BLOCK_K : BLOCK_N, !RHS_PADDED>;

constexpr int STAGE_BYTES = LhsTile::BYTES + PARTS * RhsTile::BYTES;

}  // namespace onnxfuse
