// Arm with dot products of bytes (ARMv8.2 dotprod, as phones, Apple's and servers' cores have them).
#include "state.h"
#if defined(__aarch64__)
#include <time.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#pragma GCC optimize("O2")
#endif
#include <arm_neon.h>

#define DECODERY_TILE_ROWS 4
#define DECODERY_BOTH_ROWS 2
#define DECODERY_FLOAT_ROWS 4
#define DECODERY_REGISTERS 16

namespace arm {
#include "arm_kernels.h"
}  // namespace arm

const Kernels arm_kernels = {"Arm dot products", arm::run_layers, arm::run_norm, arm::run_head, arm::run_linear, arm::run_read,
    arm::run_draft, arm::run_mix, arm::run_topk, arm::run_chances, arm::run_sums, arm::run_race, arm::run_pack, arm::run_expand, arm::run_sample};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
