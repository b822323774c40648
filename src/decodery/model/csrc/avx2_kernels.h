// AVX2, with or without its own VNNI: a vector of 64 bytes is two registers. Included by avx2.cpp and avx2_vnni.cpp
// inside their namespaces.

#define DECODERY_HALVES 1
#include "vec.h"

struct Ints {
    __m256i half[2];
};
using Four = __m256i;
INLINE Ints ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE Four four(const int8_t* p) {
    int32_t x;
    __builtin_memcpy(&x, p, 4);
    return _mm256_set1_epi32(x);
}
INLINE f16 floats(const Ints& x) {
    return {{_mm256_cvtepi32_ps(x.half[0]), _mm256_cvtepi32_ps(x.half[1])}};
}
INLINE int64_t now() { return int64_t(__builtin_ia32_rdtsc()); }

INLINE f16 half_floats(const uint8_t* p) {
    f16 x;
    for (int i = 0; i < 2; ++i) x.half[i] = _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p + 16 * i)));
    return x;
}

#if DECODERY_VNNI
using Bytes = Ints;
constexpr int32_t weight_offset = 128;
INLINE Bytes weights(const uint8_t* p) {
    return {_mm256_load_si256((const __m256i*)p), _mm256_load_si256((const __m256i*)(p + 32))};
}
INLINE Ints dot(const Ints& sum, const Bytes& w, Four x) {
    return {_mm256_dpbusd_avx_epi32(sum.half[0], w.half[0], x), _mm256_dpbusd_avx_epi32(sum.half[1], w.half[1], x)};
}
#else
// |w| times x with w's sign: two products of at most 127 * 127 fit 16 bits, so nothing saturates.
struct Bytes {
    __m256i value[2], size[2];
};
constexpr int32_t weight_offset = 0;
INLINE Bytes weights(const uint8_t* p) {
    Bytes w;
    for (int i = 0; i < 2; ++i) {
        w.value[i] = _mm256_xor_si256(_mm256_load_si256((const __m256i*)(p + 32 * i)), _mm256_set1_epi8(-128));
        w.size[i] = _mm256_abs_epi8(w.value[i]);
    }
    return w;
}
INLINE Ints dot(const Ints& sum, const Bytes& w, Four x) {
    Ints result;
    for (int i = 0; i < 2; ++i) {
        const __m256i pairs = _mm256_maddubs_epi16(w.size[i], _mm256_sign_epi8(x, w.value[i]));
        result.half[i] = _mm256_add_epi32(sum.half[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return result;
}
#endif

INLINE Bytes halves(const uint8_t* p, int shift) {
    Bytes w;
    for (int i = 0; i < 2; ++i) {
        const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(p + 32 * i));
        const __m256i one = _mm256_and_si256(_mm256_srli_epi16(both, shift), _mm256_set1_epi8(15));
#if DECODERY_VNNI
        w.half[i] = one;
#else
        w.value[i] = w.size[i] = one;
#endif
    }
    return w;
}
INLINE Bytes low_halves(const uint8_t* p) { return halves(p, 0); }
INLINE Bytes high_halves(const uint8_t* p) { return halves(p, 4); }

// The totals of 16 vectors, lanes added 8 apart, 4, 2, 1; vector (i % 4) * 4 + i / 4 of the result's order is s[i].
INLINE f16 reduce16(const f16* s) {
    __m256 a[16], b[8], c[4], d[2];
    for (int i = 0; i < 16; ++i) {
        const float* x = reinterpret_cast<const float*>(s + i);
        a[i] = _mm256_add_ps(_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8));
    }
    // b[j]: the pairs whose results stand in lanes 0-7 (even j) and 8-15 (odd j): rows i and i + 1 of four.
    for (int j = 0; j < 8; ++j) {
        const int i = (j / 2) * 4 + (j % 2) * 2;
        b[j] = _mm256_add_ps(_mm256_permute2f128_ps(a[i], a[i + 1], 0x20), _mm256_permute2f128_ps(a[i], a[i + 1], 0x31));
    }
    for (int j = 0; j < 4; ++j) {
        const __m256 x = b[(j / 2) * 4 + j % 2], y = b[(j / 2) * 4 + j % 2 + 2];
        c[j] = _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x44), _mm256_shuffle_ps(x, y, 0xee));
    }
    for (int j = 0; j < 2; ++j)
        d[j] = _mm256_add_ps(_mm256_shuffle_ps(c[j], c[j + 2], 0x88), _mm256_shuffle_ps(c[j], c[j + 2], 0xdd));
    f16 result;
    __builtin_memcpy(&result, d, 64);
    return result;
}

#if DECODERY_VNNI
#define DECODERY_WIDE 0
#else
#define DECODERY_WIDE 1
#include "wide.h"
#endif
#include "gemm.h"
#include "attention.h"
#include "pass.h"
#include "topk.h"
