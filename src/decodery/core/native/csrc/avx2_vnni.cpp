// AVX2 with its own VNNI (AVX-VNNI).
#include "state.h"
#if defined(DECODERY_AVX_VNNI)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif
#include <immintrin.h>

#define DECODERY_TILE_ROWS 2
#define DECODERY_BOTH_ROWS 2
#define DECODERY_FLOAT_ROWS 4
#define DECODERY_VNNI 1

namespace avx2_vnni {
#include "avx2_kernels.h"
}  // namespace avx2_vnni

const Kernels avx2_vnni_kernels = {"AVX2 VNNI", avx2_vnni::run_layers, avx2_vnni::run_norm, avx2_vnni::run_head, avx2_vnni::run_linear, avx2_vnni::run_read,
    avx2_vnni::run_draft, avx2_vnni::run_mix, avx2_vnni::run_topk, avx2_vnni::run_chances, avx2_vnni::run_sums, avx2_vnni::run_race, avx2_vnni::run_pack, avx2_vnni::run_expand, avx2_vnni::run_sample};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
