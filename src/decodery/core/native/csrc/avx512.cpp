// AVX-512 with VNNI: one instruction multiplies 64 bytes by 4 broadcast ones and adds to 16 integers.
#include "state.h"
#if defined(__x86_64__)
#if defined(__clang__)
#if DECODERY_AMX
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,amx-tile,amx-int8"))), apply_to = function)
#else
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma"))), apply_to = function)
#endif
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,prefer-vector-width=512")
#endif
#include <immintrin.h>

#define DECODERY_TILE_ROWS 8
#define DECODERY_BLOCK_ROWS 4    // more would not keep what is to be scaled in registers
#define DECODERY_BOTH_ROWS 8
#define DECODERY_FLOAT_ROWS 8
#define DECODERY_REGISTERS 32
#define DECODERY_TILES DECODERY_AMX
#define DECODERY_UNPACK 1

namespace avx512 {
#include "vec.h"

using Ints = __m512i;
using Bytes = __m512i;
using Four = __m512i;
using Floats = f16;
constexpr int32_t lanes = 16;
INLINE Floats load_lanes(const float* p) { return load(p); }
INLINE void store_lanes(float* p, Floats x) { store(p, x); }
constexpr int32_t weight_offset = 128;
INLINE Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
INLINE Bytes weights(const uint8_t* p) { return _mm512_load_si512(p); }
INLINE void put(uint8_t* p, Bytes x) { _mm512_store_si512(p, x); }
INLINE Bytes low_halves(const uint8_t* p) { return _mm512_and_si512(_mm512_load_si512(p), _mm512_set1_epi8(15)); }
INLINE Bytes high_halves(const uint8_t* p) {
    return _mm512_and_si512(_mm512_srli_epi16(_mm512_load_si512(p), 4), _mm512_set1_epi8(15));
}
// What these numbers stand for, of 16 values, and so much more.
INLINE Bytes looked_up(Bytes low, const int8_t* values, int32_t more) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_add_epi8(table, _mm_set1_epi8(int8_t(more)))), low);
}
// With the fifth bit of each, of 64 at p.
INLINE Bytes with_fifth(Bytes low, const uint8_t* p) {
    uint64_t bits;
    __builtin_memcpy(&bits, p, 8);
    return _mm512_mask_add_epi8(low, bits, low, _mm512_set1_epi8(16));
}
// With two more bits of each: pair number `place` of those in each byte at p.
INLINE Bytes with_two(Bytes low, const uint8_t* p, int32_t place) {
    const __m512i all = _mm512_load_si512(p), mask = _mm512_set1_epi8(48);
    const __m512i moved = place == 0 ? _mm512_slli_epi16(all, 4) : place == 1 ? _mm512_slli_epi16(all, 2) : place == 2 ? all : _mm512_srli_epi16(all, 2);
    return _mm512_ternarylogic_epi32(low, moved, mask, 0xf8);    // low | moved & mask
}
// Numbers of two bits: number `place` of the four in each byte at p.
INLINE Bytes two_bits(const uint8_t* p, int32_t place) {
    const __m512i all = _mm512_load_si512(p);
    const __m512i moved = place == 0 ? all : place == 1 ? _mm512_srli_epi16(all, 2) : place == 2 ? _mm512_srli_epi16(all, 4) : _mm512_srli_epi16(all, 6);
    return _mm512_and_si512(moved, _mm512_set1_epi8(3));
}
INLINE f16 half_floats(const uint8_t* p) {
    return reinterpret_cast<f16>(_mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p))));
}
INLINE Four four(const int8_t* p) {
    int32_t x;
    __builtin_memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
}
// Written out because the compiler copies every accumulator before and after the intrinsic.
INLINE Ints dot(Ints sum, Bytes w, Four x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
}
INLINE f16 floats(Ints x) { return __builtin_convertvector(reinterpret_cast<i16>(x), f16); }
INLINE Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
INLINE Ints times128(Ints x) { return _mm512_slli_epi32(x, 7); }
INLINE Bytes small_bytes(const uint8_t* p) { return _mm512_load_si512(p); }
INLINE Floats unsigned_floats(const uint8_t* p) { return reinterpret_cast<f16>(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))))); }
INLINE Floats signed_floats(const uint8_t* p) { return reinterpret_cast<f16>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))))); }
// Powers of two by their exponents, see `power_bits`.
INLINE Floats powers(const uint8_t* p) {
    const __m512i x = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))), bits = _mm512_slli_epi32(x, 23);
    const __mmask16 ends = _mm512_testn_epi32_mask(_mm512_add_epi32(x, _mm512_set1_epi32(1)), _mm512_set1_epi32(254));
    return reinterpret_cast<f16>(_mm512_mask_or_epi32(bits, ends, bits, _mm512_set1_epi32(1 << 22)));
}
INLINE Floats add_exact(Floats sum, Floats x, Floats y) { return sum_of_exact(sum, x, y); }
// Sixteen pairs of bfloat16: the first of each and the second.
INLINE void widen(const uint8_t* p, Floats& low, Floats& high) {
    const __m512i pairs = _mm512_load_si512(p);
    low = reinterpret_cast<f16>(_mm512_slli_epi32(pairs, 16));
    high = reinterpret_cast<f16>(_mm512_and_si512(pairs, _mm512_set1_epi32(int32_t(0xffff0000))));
}
// Sixteen E4M3 numbers, over 256. Moved to where half precision has exponent and mantissa they are that, also those without
// a leading one; what the sign leaves below its place is taken away.
INLINE Floats small_floats(const uint8_t* p) {
    const __m256i x = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(p))), 7);
    return reinterpret_cast<f16>(_mm512_cvtph_ps(_mm256_and_si256(x, _mm256_set1_epi16(int16_t(0xbfff)))));
}
// What sixteen codes in halves of bytes stand for.
template <int half>
INLINE Floats coded_floats(const float* table, const uint8_t* p) {
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
    // Of a place only the lowest four bits are looked at.
    return reinterpret_cast<f16>(_mm512_permutexvar_ps(half == 0 ? codes : _mm512_srli_epi32(codes, 4), _mm512_loadu_ps(table)));
}
INLINE int64_t now() { return int64_t(__builtin_ia32_rdtsc()); }

#include "gemm.h"
#include "blocks.h"
#include "coded.h"
#include "tiles.h"
#include "attention.h"
#include "select.h"
#include "scan.h"
#include "mix.h"
#include "pass.h"
#include "topk.h"
#include "race.h"
#include "sample.h"
#include "draft.h"
}  // namespace avx512

const Kernels avx512_kernels = {"AVX-512 VNNI", avx512::run_layers, avx512::run_norm, avx512::run_head, avx512::run_linear, avx512::run_read,
    avx512::run_draft, avx512::run_mix, avx512::run_topk, avx512::run_chances, avx512::run_sums, avx512::run_race, avx512::run_pack, avx512::run_expand, avx512::run_sample};
#if DECODERY_AMX
// The same, with AMX for many rows.
const Kernels amx_kernels = {"AMX", avx512::run_layers, avx512::run_norm, avx512::run_head, avx512::run_linear, avx512::run_read,
    avx512::run_draft, avx512::run_mix, avx512::run_topk, avx512::run_chances, avx512::run_sums, avx512::run_race, avx512::run_pack, avx512::run_expand, avx512::run_sample, true};
#endif
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
