// Sixteen floats at a time, the same on every instruction set. Multiplications and additions are never fused and sums
// run in a fixed lane order, so the result of a row is the same bits everywhere; the compiler lowers the vectors to
// whatever the machine has.
// Included once per instruction set, inside its namespace.

#define INLINE static inline __attribute__((always_inline))

// bfloat16 is the upper half of a float. float16 has 10 bits of mantissa up to 65504; storing rounds to nearest even, and
// what is larger becomes the largest.
struct Bf16 {
    uint16_t bits;
};
struct Half {
    uint16_t bits;
};
// A number of a row that shares one scale.
struct Coded {
    int8_t number;
};

#ifndef DECODERY_REGISTERS
#define DECODERY_REGISTERS 16    // for vectors
#endif

typedef uint8_t u8x16 __attribute__((vector_size(16)));
// The first n of 16 bytes; the others are zero.
INLINE u8x16 load16(const uint8_t* p, int32_t n) {
    u8x16 bytes = {};
    if (n >= 16) __builtin_memcpy(&bytes, p, 16);
    else __builtin_memcpy(&bytes, p, size_t(n > 0 ? n : 0));
    return bytes;
}

#if DECODERY_HALVES
#include "halves.h"
#else
typedef float f16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef float f16_loose __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x16_loose __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int8_t s8x16 __attribute__((vector_size(16)));
typedef int8_t s8x16_loose __attribute__((vector_size(16), aligned(1), may_alias));

INLINE f16 splat(float x) { return f16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE i16 isplat(int32_t x) { return i16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE f16 load(const float* p) { return *reinterpret_cast<const f16_loose*>(p); }
INLINE void store(float* p, f16 x) { *reinterpret_cast<f16_loose*>(p) = x; }
INLINE f16 load(const Bf16* p) {
    return reinterpret_cast<f16>(__builtin_convertvector(*reinterpret_cast<const u16x16_loose*>(p), u32x16) << 16);
}
#if DECODERY_REGISTERS >= 32
INLINE f16 load(const Half* p) {
    return reinterpret_cast<f16>(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
INLINE void narrow(f16 x, Half* to) {
    const __m256i rounded = _mm512_maskz_cvtps_ph(0xffff, reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rounded);
}
#else
INLINE f16 load(const Half* p) {
    const u32x16 all = __builtin_convertvector(*reinterpret_cast<const u16x16_loose*>(p), u32x16);
    const u32x16 sign = (all & 0x8000) << 16, size = all & 0x7fff;
    // Moving exponent and mantissa up leaves the exponent 112 too small, which a multiplication puts right, exactly and
    // for numbers without a leading one too. What is not a number must stay so.
    const u32x16 moved = reinterpret_cast<u32x16>(reinterpret_cast<f16>(size << 13) * 0x1p112f);
    return reinterpret_cast<f16>(moved | sign | (reinterpret_cast<u32x16>(size >= 0x7c00) & 0x7f800000));
}
INLINE void narrow(f16 x, Half* to) {
    const u32x16 all = reinterpret_cast<u32x16>(x), sign = (all >> 16) & 0x8000, size = all & 0x7fffffff;
    const u32x16 usual = (size + 0xfff + ((size >> 13) & 1) - 0x38000000) >> 13;
    // One half has float16's smallest step as its own, so adding it rounds what has no leading one.
    const u32x16 small = reinterpret_cast<u32x16>(reinterpret_cast<f16>(size) + 0.5f) - 0x3f000000;
    const u32x16 is_small = reinterpret_cast<u32x16>(size < 0x38800000), strange = reinterpret_cast<u32x16>(size > 0x7f800000);
    const u32x16 finite = (small & is_small) | (usual & ~is_small);
    *reinterpret_cast<u16x16_loose*>(to) = __builtin_convertvector(sign | (finite & ~strange) | (0x7e00 & strange), u16x16);
}
#endif
INLINE void store_bytes(int8_t* p, i16 x) { *reinterpret_cast<s8x16_loose*>(p) = __builtin_convertvector(x, s8x16); }

// sum + x * y, whose product is exact, so that fusing the two changes nothing.
#if DECODERY_REGISTERS >= 32
INLINE f16 sum_of_exact(f16 sum, f16 x, f16 y) {
    return reinterpret_cast<f16>(_mm512_fmadd_ps(reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(y), reinterpret_cast<__m512>(sum)));
}
#else
INLINE f16 sum_of_exact(f16 sum, f16 x, f16 y) { return sum + x * y; }
#endif

INLINE i16 bits(f16 x) { return reinterpret_cast<i16>(x); }
INLINE f16 from_bits(i16 x) { return reinterpret_cast<f16>(x); }
INLINE i16 whole(f16 x) { return __builtin_convertvector(x, i16); }
#if DECODERY_REGISTERS >= 32
// Written out because compilers take bytes that come from memory one by one.
INLINE f16 floats_of(u8x16 x) {
    return reinterpret_cast<f16>(_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepu8_epi32(0xffff, reinterpret_cast<__m128i>(x))));
}
#else
INLINE f16 floats_of(u8x16 x) { return __builtin_convertvector(__builtin_convertvector(x, i16), f16); }
#endif
INLINE f16 load_bytes(const uint8_t* p) { return floats_of(load16(p, 16)); }
// Each lane's larger, or smaller; the second where one is not a number.
#if DECODERY_REGISTERS >= 32
INLINE f16 larger(f16 a, f16 b) { return reinterpret_cast<f16>(_mm512_maskz_max_ps(0xffff, reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b))); }
INLINE f16 smaller(f16 a, f16 b) { return reinterpret_cast<f16>(_mm512_maskz_min_ps(0xffff, reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b))); }
#else
INLINE f16 larger(f16 a, f16 b) { return from_bits(((a > b) & bits(a)) | (~(a > b) & bits(b))); }
INLINE f16 smaller(f16 a, f16 b) { return from_bits(((a < b) & bits(a)) | (~(a < b) & bits(b))); }
#endif
INLINE i16 larger(i16 a, i16 b) { return a > b ? a : b; }
#endif

// The first n of 16 lanes; the others are zero.
#if DECODERY_REGISTERS >= 32
INLINE __mmask16 first_lanes(int32_t n) { return __mmask16((1u << (n < 0 ? 0 : n)) - 1); }
INLINE f16 load_part(const float* p, int32_t n) { return reinterpret_cast<f16>(_mm512_maskz_loadu_ps(first_lanes(n), p)); }
INLINE void store_part(float* p, f16 x, int32_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), reinterpret_cast<__m512>(x)); }
#else
static __attribute__((noinline)) f16 load_part(const float* p, int32_t n) {
    float lanes[16] = {};
    for (int32_t i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}
static __attribute__((noinline)) void copy_lanes(float* p, const float* lanes, int32_t n) {
    for (int32_t i = 0; i < n; ++i) p[i] = lanes[i];
}
INLINE void store_part(float* p, f16 x, int32_t n) {
    float lanes[16];
    store(lanes, x);
    copy_lanes(p, lanes, n);
}
#endif
INLINE f16 load(const float* p, int32_t n) { return n >= 16 ? load(p) : load_part(p, n); }
// The first n of 16 lanes, each from a place of its own.
static __attribute__((noinline)) f16 load_ordered(const float* p, const int32_t* places, int32_t n) {
    float lanes[16] = {};
    for (int32_t i = 0; i < n && i < 16; ++i) lanes[i] = p[places[i]];
    return load(lanes);
}
INLINE void store(float* p, f16 x, int32_t n) { n >= 16 ? store(p, x) : store_part(p, x, n); }

static __attribute__((noinline)) f16 load_part(const Bf16* p, int32_t n) {
    Bf16 lanes[16] = {};
    for (int32_t i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}
static __attribute__((noinline)) f16 load_part(const Half* p, int32_t n) {
    Half lanes[16] = {};
    for (int32_t i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}
INLINE f16 load(const Bf16* p, int32_t n) { return n >= 16 ? load(p) : load_part(p, n); }
INLINE f16 load(const Half* p, int32_t n) { return n >= 16 ? load(p) : load_part(p, n); }
INLINE void store(Half* p, f16 x, int32_t n) {
    x = larger(splat(-65504.0f), smaller(splat(65504.0f), x));
    if (n >= 16) return narrow(x, p);
    Half lanes[16];
    narrow(x, lanes);
    __builtin_memcpy(p, lanes, size_t(n > 0 ? n : 0) * sizeof(Half));
}

INLINE f16 magnitude(f16 x) { return from_bits(bits(x) & 0x7fffffff); }

#if DECODERY_REGISTERS >= 32
// What `join` makes of all lanes, in whatever order.
template <class Join>
INLINE int32_t joined(i16 x, const Join& join) {
    typedef int32_t i8 __attribute__((vector_size(32)));
    typedef int32_t i4 __attribute__((vector_size(16)));
    const __m512i all = reinterpret_cast<__m512i>(x);
    const i8 half = join(reinterpret_cast<i8>(_mm512_maskz_extracti64x4_epi64(15, all, 0)), reinterpret_cast<i8>(_mm512_maskz_extracti64x4_epi64(15, all, 1)));
    const __m256i halves = reinterpret_cast<__m256i>(half);
    i4 four = join(reinterpret_cast<i4>(_mm256_castsi256_si128(halves)), reinterpret_cast<i4>(_mm256_extracti128_si256(halves, 1)));
    four = join(four, reinterpret_cast<i4>(_mm_shuffle_epi32(reinterpret_cast<__m128i>(four), 0x4e)));
    four = join(four, reinterpret_cast<i4>(_mm_shuffle_epi32(reinterpret_cast<__m128i>(four), 0xb1)));
    return four[0];
}
INLINE int32_t isum(i16 x) {
    return joined(x, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}
#else
INLINE int32_t isum(i16 x) {
    int32_t sum = 0;
    for (int32_t i = 0; i < 16; ++i) sum += x[i];
    return sum;
}
#endif

// Nearest integer, ties to even, for magnitudes below 2^22.
INLINE f16 nearest(f16 x) { return (x + 12582912.0f) - 12582912.0f; }

// Lanes i and i + 8 first, then 4 apart, 2, 1.
INLINE float total(f16 x) {
    float s[16];
    store(s, x);
    for (int32_t width = 8; width > 0; width /= 2)
        for (int32_t i = 0; i < width; ++i) s[i] = s[i] + s[i + width];
    return s[0];
}
template <class T, class Vector>
INLINE T maximum(Vector x) {
#if DECODERY_REGISTERS >= 32
    if constexpr (std::is_same<T, int32_t>::value) return joined(x, [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
#endif
    T s[16];
    __builtin_memcpy(s, &x, 64);
    for (int32_t width = 8; width > 0; width /= 2)
        for (int32_t i = 0; i < width; ++i) s[i] = s[i + width] > s[i] ? s[i + width] : s[i];
    return s[0];
}

// e^x to within two units in the last place; below -87 it is the smallest normal number's neighbourhood.
INLINE f16 exponential(f16 x) {
    x = larger(splat(-87.0f), smaller(splat(88.0f), x));
    const f16 n = nearest(x * 1.44269504f);
    const f16 r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    f16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r) * r + r + 1.0f;
    return from_bits(bits(p) + (whole(n) << 23));
}

INLINE f16 silu(f16 x) { return x / (exponential(-x) + 1.0f); }
// cap * tanh(x / cap)
INLINE f16 capped(f16 x, float cap) {
    const f16 u = x * (1.0f / cap);
    return (1.0f - 2.0f / (exponential(u + u) + 1.0f)) * cap;
}
INLINE f16 gelu(f16 x) {
    const f16 u = (x + x * x * x * 0.044715f) * 0.7978845608f;
    return x * 0.5f * (2.0f - 2.0f / (exponential(u + u) + 1.0f));
}
