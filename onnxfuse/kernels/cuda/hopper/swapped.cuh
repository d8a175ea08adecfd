// The kernel of sm_90a whose M side is the weight: the roles, the ring and the epilogue of hopper/gemm.cuh, with the output
// seen as [n, m]; hopper/swapped_stage.cuh and hopper/swapped_factors.cuh have what differs.
//
// Contract: as hopper/gemm.cuh. Of the arguments lhs is [batch, m, k] with k contiguous, and rhs the weight of each part.
#pragma once
#include "hopper/swapped_factors.cuh"
#include "hopper/block.cuh"
