// Arm with matrix products of bytes besides (ARMv8.6 i8mm, as servers' cores since Neoverse V1 and Apple's since M2).
#include "state.h"
#if defined(__aarch64__)
#include <time.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod,i8mm"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
#pragma GCC optimize("O2")
#endif
#include <arm_neon.h>

#define DECODERY_TILE_ROWS 8
#define DECODERY_BOTH_ROWS 2
#define DECODERY_FLOAT_ROWS 4
#define DECODERY_REGISTERS 16
#define DECODERY_PAIRS 1

namespace arm_i8mm {
#include "arm_kernels.h"
}  // namespace arm_i8mm

const Kernels arm_i8mm_kernels = {"Arm matrix products", arm_i8mm::run_layers, arm_i8mm::run_norm, arm_i8mm::run_head,
    arm_i8mm::run_linear, arm_i8mm::run_read, arm_i8mm::run_draft, arm_i8mm::run_mix, arm_i8mm::run_topk, arm_i8mm::run_chances, arm_i8mm::run_sums,
    arm_i8mm::run_race, arm_i8mm::run_pack, arm_i8mm::run_expand, arm_i8mm::run_sample};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
