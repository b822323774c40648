// AVX2 without VNNI: exact by way of 16-bit products.
#include "state.h"
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>

#define DECODERY_TILE_ROWS 4
#define DECODERY_LOOP_STEPS 1
#define DECODERY_BOTH_ROWS 2
#define DECODERY_FLOAT_ROWS 4
#define DECODERY_VNNI 0

namespace avx2 {
#include "avx2_kernels.h"
}  // namespace avx2

const Kernels avx2_kernels = {"AVX2", avx2::run_layers, avx2::run_norm, avx2::run_head, avx2::run_linear, avx2::run_read,
    avx2::run_draft, avx2::run_mix, avx2::run_topk, avx2::run_chances, avx2::run_sums, avx2::run_race, avx2::run_pack, avx2::run_expand, avx2::run_sample};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
