// Sixteen floats, or integers, as two registers of eight: the compiler would keep one vector of 64 bytes in memory, and
// compare and convert it lane by lane. What vec.h says of its vectors holds for these.

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
#define HALVES(expression) { const int i = 0; result.half[0] = expression; } { const int i = 1; result.half[1] = expression; } return result

struct i16 {
    i8 half[2];
    int32_t operator[](int32_t lane) const { return half[lane / 8][lane % 8]; }
};
struct f16 {
    f8 half[2];
};

INLINE f8 splat8(float x) { return _mm256_set1_ps(x); }
INLINE f16 splat(float x) { return {{splat8(x), splat8(x)}}; }
INLINE i16 isplat(int32_t x) { return {{i8(_mm256_set1_epi32(x)), i8(_mm256_set1_epi32(x))}}; }

#define DECODERY_OPERATOR(op) \
    INLINE f16 operator op(f16 a, f16 b) { f16 result; HALVES(a.half[i] op b.half[i]); } \
    INLINE f16 operator op(f16 a, float b) { return a op splat(b); } \
    INLINE f16 operator op(float a, f16 b) { return splat(a) op b; }
DECODERY_OPERATOR(+)
DECODERY_OPERATOR(-)
DECODERY_OPERATOR(*)
DECODERY_OPERATOR(/)
#undef DECODERY_OPERATOR
INLINE f16 operator-(f16 a) { f16 result; HALVES(-a.half[i]); }
INLINE i16 operator!=(f16 a, f16 b) { i16 result; HALVES(i8(a.half[i] != b.half[i])); }
INLINE i16 operator+(i16 a, i16 b) { i16 result; HALVES(a.half[i] + b.half[i]); }
INLINE i16 operator^(i16 a, i16 b) { i16 result; HALVES(a.half[i] ^ b.half[i]); }
INLINE i16 operator|(i16 a, i16 b) { i16 result; HALVES(a.half[i] | b.half[i]); }
INLINE i16& operator+=(i16& a, i16 b) { return a = a + b; }
INLINE i16& operator^=(i16& a, i16 b) { return a = a ^ b; }
INLINE i16& operator|=(i16& a, i16 b) { return a = a | b; }
INLINE i16 operator&(i16 a, int32_t b) { i16 result; HALVES(a.half[i] & b); }
INLINE i16 operator<<(i16 a, int32_t b) { i16 result; HALVES(a.half[i] << b); }
INLINE i16 operator>>(i16 a, int32_t b) { i16 result; HALVES(a.half[i] >> b); }

INLINE f16 sum_of_exact(f16 sum, f16 x, f16 y) { f16 result; HALVES(f8(_mm256_fmadd_ps(x.half[i], y.half[i], sum.half[i]))); }

INLINE i16 bits(f16 x) { i16 result; HALVES(reinterpret_cast<i8>(x.half[i])); }
INLINE f16 from_bits(i16 x) { f16 result; HALVES(reinterpret_cast<f8>(x.half[i])); }
INLINE i16 whole(f16 x) { i16 result; HALVES(__builtin_convertvector(x.half[i], i8)); }
INLINE f16 larger(f16 a, f16 b) { f16 result; HALVES(f8(_mm256_max_ps(a.half[i], b.half[i]))); }
INLINE f16 smaller(f16 a, f16 b) { f16 result; HALVES(f8(_mm256_min_ps(a.half[i], b.half[i]))); }
INLINE i16 larger(i16 a, i16 b) { i16 result; HALVES(i8(_mm256_max_epi32(__m256i(a.half[i]), __m256i(b.half[i])))); }

INLINE f16 load(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
INLINE void store(float* p, f16 x) {
    _mm256_storeu_ps(p, x.half[0]);
    _mm256_storeu_ps(p + 8, x.half[1]);
}
INLINE f8 load8(const float* p) { return _mm256_loadu_ps(p); }
INLINE f8 load8(const Bf16* p) {
    const __m128i upper = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(upper), 16));
}
INLINE f16 load(const Bf16* p) { return {{load8(p), load8(p + 8)}}; }
INLINE f8 load8(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }
INLINE f16 load_bytes(const uint8_t* p) { return {{load8(p), load8(p + 8)}}; }
INLINE f8 floats8(__m128i x) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)); }
INLINE f16 floats_of(u8x16 x) { return {{floats8(__m128i(x)), floats8(_mm_srli_si128(__m128i(x), 8))}}; }
INLINE f8 load8(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
INLINE f16 load(const Half* p) { return {{load8(p), load8(p + 8)}}; }
INLINE void narrow(f16 x, Half* to) {
    for (int i = 0; i < 2; ++i)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + i,
                         _mm256_cvtps_ph(x.half[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// The lanes' lowest bytes.
INLINE void store_bytes(int8_t* p, i16 x) {
    const __m256i low = _mm256_set1_epi32(255);
    const __m256i words = _mm256_packus_epi32(_mm256_and_si256(__m256i(x.half[0]), low), _mm256_and_si256(__m256i(x.half[1]), low));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}
#undef HALVES
