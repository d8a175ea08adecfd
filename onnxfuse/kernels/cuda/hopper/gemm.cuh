// One block computes tile after tile of out[m, n] = epilogue(acc_0 .. acc_{PARTS-1}), acc_p = lhs[m, k] * rhs_p[k, n].
// sm_90a: TMA fills a ring of stages, wgmma reads it, and nobody waits for anybody who could still be working.
//
//   the last warps   producers: one thread keeps TMA busy, up to STAGES tiles of k ahead, across output tiles, and
//                    with rhs of the first ones before the kernel before has ended; a warp brings the row, column and
//                    scalar operands of the next tiles, and their places; for each consumer group a warp brings its
//                    tile operands
//                       |  cp.async.bulk.tensor, swizzled; in a cluster each block loads half and sends it to both;
//                       |  lhs in one box or, where m may be small, in LHS_BOXES, of which only those with rows come
//   ring             [stage 0][stage 1] ... [stage STAGES-1]      a stage: 128 bytes of k of BLOCK_M rows of lhs and of
//                       |  full[stage]: the bytes have landed     BLOCK_N columns of every part of rhs, side by side:
//                       |  empty[stage]: every reader is done     one wgmma leaves all parts in the same thread, or
//                       |                                         two where not all columns fill the widest swizzle
//   4 warps each     consumer groups
//                       |  wgmma m64 x (PARTS * BLOCK_N) x 32 bytes of k, fp32 accumulators in registers
//                    epilogue.cuh: functor, staging area of the warp, TMA store
//
//   ping-pong        a team, one group or two, owns every other tile; its epilogue runs behind the other's main loop
//                      team 0   [main loop 0]  epilogue 0   [main loop 2]  epilogue 2 ...
//                      team 1                [main loop 1]  epilogue 1   [main loop 3] ...
//                    two groups have half the registers each, and hide each other's latencies in the epilogue
//                    `turn` hands the tensor cores over as soon as the last wgmma is issued. It also keeps a team from
//                    waiting for a stage's phase after next, whose parity is that of the last one.
//   cooperative      all groups are one team and share each tile: larger tiles, the epilogue is exposed
//   split k          the SPLITS blocks of a cluster multiply one tile, each a range of its k; a warp's rows belong to
//                    one of them, which adds up the sums of all and runs their epilogue
//                      block 0   k [0 .......)  warp 0: adds, epilogue      warp 1: sums -> block 1
//                      block 1   k [....... k)  warp 0: sums -> block 0     warp 1: adds, epilogue
//                      sums_full: what the others have for this block's warps has come; sums_read: what this one sent is
//                      added
//   split last wave  in ping-pong: blocks compute tiles by themselves, and what remains behind whole waves is split along k
//                    by the blocks of a cluster, as above, where there is a cluster for each such tile
//                      block 0   [tile 0] [tile 4] [tile 8, first half of k ]
//                      block 1   [tile 1] [tile 5] [tile 8, second half of k]     2 and 3 likewise, tile 9
//   kept rhs         where all k of a block's columns fits: it comes with the stages of the block's first tile and stays
//                    behind the ring, whose stages hold lhs alone; the block's other tiles lie below
//                      [lhs 0][lhs 1] ... [lhs STAGES-1]   [rhs of step 0][rhs of step 1] ... [rhs of the last step]
//   shared k         K_GROUPS times as many consumer groups, where a warp's waits are what takes time: those with the same
//                    rows have every K_GROUPS-th stage each, and the first of them gets the sums of all
//                      group 0   [stage 0] [stage 2] ..  adds, epilogue
//                      group 1   [stage 1] [stage 3] ..  sums -> group 0
//
// Launch: THREADS threads, SHARED_BYTES of dynamic shared memory, a grid of (blocks, 1, 1): whole clusters, at
// most one for each tile; one block a multiprocessor is best. The second argument holds the tensor maps that
// `hopper_tile.map_rules` describes.
//
// Contract: k > 0; rows of lhs and rhs start on 16-byte boundaries; the WIDTH of a load or output divides n, its
// strides and its pointer.
//
// The generated text before this file defines Element, RHS_K_CONTIGUOUS, the constants, the tables Load<I> and Out<I>,
// the struct Epilogue, and multiply(): one wgmma of a piece of the columns.
#pragma once
#include "hopper/factors.cuh"
#include "hopper/block.cuh"
