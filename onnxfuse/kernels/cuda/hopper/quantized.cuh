// The kernel of sm_90a for a quantized weight: the roles, the ring, the schedules and the epilogue of hopper/gemm.cuh, with
// the output seen as [n, m]; hopper/quantized_factors.cuh has what differs.
//
// Contract: as hopper/gemm.cuh; columns of the packed weight start on 16-byte boundaries. Of the arguments lhs is
// [batch, m, k], and rhs of each part the packed weight, whose scales and zero points `scales` has.
#pragma once
#include "hopper/quantized_factors.cuh"
#include "hopper/block.cuh"
