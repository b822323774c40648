// AVX2, with or without its own VNNI: a vector of 64 bytes is two registers. Included by avx2.cpp and avx2_vnni.cpp
// inside their namespaces.

#define DECODERY_HALVES 1
#include "vec.h"

using Ints = __m256i;
using Bytes = __m256i;
using Four = __m256i;
using Floats = f8;
constexpr int32_t lanes = 8;
INLINE Ints ints(int32_t x) { return _mm256_set1_epi32(x); }
INLINE Four four(const int8_t* p) {
    int32_t x;
    __builtin_memcpy(&x, p, 4);
    return _mm256_set1_epi32(x);
}
INLINE Floats floats(Ints x) { return _mm256_cvtepi32_ps(x); }
INLINE Floats load_lanes(const float* p) { return load8(p); }
INLINE void store_lanes(float* p, Floats x) { _mm256_storeu_ps(p, x); }
INLINE Floats half_floats(const uint8_t* p) { return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p))); }
INLINE Bytes bytes_at(const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
INLINE Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
INLINE Ints times128(Ints x) { return _mm256_slli_epi32(x, 7); }
INLINE Bytes small_bytes(const uint8_t* p) { return bytes_at(p); }
INLINE Floats unsigned_floats(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }
INLINE Floats signed_floats(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }
// Powers of two by their exponents, see `power_bits`.
INLINE Floats powers(const uint8_t* p) {
    const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m256i other = _mm256_and_si256(_mm256_add_epi32(x, _mm256_set1_epi32(1)), _mm256_set1_epi32(254));
    const __m256i end = _mm256_and_si256(_mm256_cmpeq_epi32(other, _mm256_setzero_si256()), _mm256_set1_epi32(1 << 22));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(x, 23), end));
}
INLINE Floats add_exact(Floats sum, Floats x, Floats y) { return _mm256_fmadd_ps(x, y, sum); }
INLINE Bytes low_halves(const uint8_t* p) { return _mm256_and_si256(bytes_at(p), _mm256_set1_epi8(15)); }
INLINE Bytes high_halves(const uint8_t* p) { return _mm256_and_si256(_mm256_srli_epi16(bytes_at(p), 4), _mm256_set1_epi8(15)); }
// With the fifth bit of each, of 32 at p.
INLINE Bytes with_fifth(Bytes low, const uint8_t* p) {
    int32_t bits;
    __builtin_memcpy(&bits, p, 4);
    const __m256i bytes = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), bytes), each = _mm256_set1_epi64x(int64_t(0x8040201008040201));
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, each), each);
    return _mm256_or_si256(low, _mm256_and_si256(set, _mm256_set1_epi8(16)));
}
// With two more bits of each: pair number `place` of those in each byte at p.
INLINE Bytes with_two(Bytes low, const uint8_t* p, int32_t place) {
    const __m256i all = bytes_at(p);
    const __m256i moved = place == 0 ? _mm256_slli_epi16(all, 4) : place == 1 ? _mm256_slli_epi16(all, 2) : place == 2 ? all : _mm256_srli_epi16(all, 2);
    return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(48)));
}
// Numbers of two bits: number `place` of the four in each byte at p.
INLINE Bytes two_bits(const uint8_t* p, int32_t place) {
    const __m256i all = bytes_at(p);
    const __m256i moved = place == 0 ? all : place == 1 ? _mm256_srli_epi16(all, 2) : place == 2 ? _mm256_srli_epi16(all, 4) : _mm256_srli_epi16(all, 6);
    return _mm256_and_si256(moved, _mm256_set1_epi8(3));
}
// Eight pairs of bfloat16: the first of each and the second.
INLINE void widen(const uint8_t* p, Floats& low, Floats& high) {
    const __m256i pairs = bytes_at(p);
    low = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    high = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int32_t(0xffff0000))));
}
// Eight E4M3 numbers, over 256, as in avx512.cpp.
INLINE Floats small_floats(const uint8_t* p) {
    const __m128i x = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 7);
    return _mm256_cvtph_ps(_mm_and_si128(x, _mm_set1_epi16(int16_t(0xbfff))));
}
// What eight codes in halves of bytes stand for.
template <int half>
INLINE Floats coded_floats(const float* table, const uint8_t* p) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m256i codes = half == 0 ? bytes : _mm256_srli_epi32(bytes, 4);
    // Of a place the lowest three bits are looked at, and the fourth chooses.
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), codes), high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
}
INLINE int64_t now() { return int64_t(__builtin_ia32_rdtsc()); }

#if DECODERY_VNNI
constexpr int32_t weight_offset = 128;
INLINE Bytes weights(const uint8_t* p) { return bytes_at(p); }
INLINE Ints dot(Ints sum, Bytes w, Four x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#else
constexpr int32_t weight_offset = 0;
INLINE Bytes weights(const uint8_t* p) { return _mm256_xor_si256(bytes_at(p), _mm256_set1_epi8(-128)); }
INLINE Ints sum_pairs(__m256i x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }
// |w| times x with w's sign: two products of at most 127 * 127 fit 16 bits, so nothing saturates.
INLINE Ints dot(Ints sum, Bytes w, Four x) {
    return _mm256_add_epi32(sum, sum_pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))));
}
// Numbers of 4, 5 and 6 bits are not negative, and their products so small that several fit 16 bits together.
#define DECODERY_NARROW 1
INLINE Ints products16(Bytes w, Four x) { return _mm256_maddubs_epi16(w, x); }
// As written: the compiler would add products to each other first, and then has no room for all of them in registers.
INLINE Ints add16(Ints a, Ints b) {
    Ints sum = _mm256_add_epi16(a, b);
    __asm__("" : "+x"(sum));
    return sum;
}
INLINE Ints add_pairs(Ints sum, Ints pairs) { return _mm256_add_epi32(sum, sum_pairs(pairs)); }
#endif
// What these numbers stand for, of 16 values, and so much more.
INLINE Bytes looked_up(Bytes low, const int8_t* values, int32_t more) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_add_epi8(table, _mm_set1_epi8(int8_t(more)))), low);
}

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
