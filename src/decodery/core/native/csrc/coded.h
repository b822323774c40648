// Rows of bytes that share a scale: [dim] numbers from -127 to 127, and behind them the scale in bfloat16. Coded once
// more, what such a row stands for is the same row. Included once per instruction set.
//
// Scores are whole numbers' sums, which no order changes: a query becomes whole numbers of 13 bits and a step. A value's
// weight, its row's scale a part of it, has 17 bits, so that products with 7 bits are exact and may be fused with sums.

constexpr int32_t scale_elements = 2;
constexpr int32_t query_most = 8191;    // sums of 1,024 products with 127 fit 32 bits
constexpr float nothing = 1e-30f;       // rows with nothing larger are zeros

template <class E>
constexpr bool is_coded = std::is_same<E, Coded>::value;
// Elements from one row to the next.
template <class E>
INLINE int64_t row_elements(int32_t dim) { return is_coded<E> ? dim + scale_elements : dim; }

INLINE float scale_of(const Coded* row, int32_t dim) {
    uint16_t upper;
    __builtin_memcpy(&upper, row + dim, sizeof(upper));
    const uint32_t all = uint32_t(upper) << 16;
    float scale;
    __builtin_memcpy(&scale, &all, sizeof(scale));
    return scale;
}

INLINE f16 bounded(f16 x, float most) { return larger(splat(-most), smaller(splat(most), x)); }

// One number that is not finite makes the whole row none.
static void code_row(const float* x, int32_t dim, Coded* row) {
    f16 top = splat(0.0f), strange = splat(0.0f);
    for (int32_t i = 0; i < dim; i += 16) {
        const f16 v = load(x + i, dim - i);
        top = larger(magnitude(v), top);
        strange = strange + v * 0.0f;
    }
    const float largest = maximum<float>(top), scale = largest < nothing ? 0.0f : largest / 127.0f;
    uint32_t all;
    __builtin_memcpy(&all, &scale, sizeof(all));
    // To the nearest, ties to even: so near that the largest number is 127.
    all = (all + 0x7fff + (all >> 16 & 1)) & 0xffff0000;
    const bool finite = total(strange) == 0.0f;
    if (!finite) all = 0x7fc00000;
    const uint16_t upper = uint16_t(all >> 16);
    __builtin_memcpy(row + dim, &upper, sizeof(upper));
    const float inverse = finite && all != 0 ? 1.0f / scale_of(row, dim) : 0.0f;
    for (int32_t i = 0; i < dim; i += 16) {
        int8_t numbers[16];
        store_bytes(numbers, whole(bounded(nearest((finite ? load(x + i, dim - i) : splat(0.0f)) * inverse), 127.0f)));
        __builtin_memcpy(row + i, numbers, size_t(dim - i < 16 ? dim - i : 16));
    }
}

// q as whole numbers [wide], and what one of these stands for.
static float code_query(const float* q, int32_t wide, int16_t* numbers) {
    f16 top = splat(0.0f);
    for (int32_t i = 0; i < wide; i += 16) top = larger(magnitude(load(q + i)), top);
    const float largest = maximum<float>(top), inverse = largest < nothing ? 0.0f : float(query_most) / largest;
    for (int32_t i = 0; i < wide; i += 16)
        store_shorts(numbers + i, whole(bounded(nearest(load(q + i) * inverse), float(query_most))));
    return largest / float(query_most);
}

// Weights of n values of rows with these scales; all have room for n rounded up to 16.
INLINE void weigh(const float* p, const float* scales, int32_t n, float* weights) {
    for (int32_t k = 0; k < n; k += 16) {
        const f16 w = load(p + k, n - k) * load(scales + k), far = w * 129.0f;
        store(weights + k, far - (far - w));    // the nearest of 17 bits
    }
}

#if DECODERY_MADD
// The sums of eight vectors' lanes.
INLINE __m256i sums8(const __m256i* s) {
    const __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(s[0], s[1]), _mm256_hadd_epi32(s[2], s[3]));
    const __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(s[4], s[5]), _mm256_hadd_epi32(s[6], s[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

// products[i][j]: of the i-th query's numbers with those of key(j), for eight keys.
template <int C, class Query, class Count, class Key>
INLINE void products8(const Query* queries, Count count, const Key& key, int32_t (*products)[8]) {
    __m256i parts[most_queries][8];
    for (int32_t j = 0; j < 8; ++j) {
        const Coded* row = key(j);
        __m256i k[C];
#pragma GCC unroll 8
        for (int32_t c = 0; c < C; ++c)
            k[c] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + c * 16)));
        for (int32_t i = 0; i < count; ++i) {
            const __m256i* q = reinterpret_cast<const __m256i*>(queries[i].numbers);
            __m256i sum = _mm256_madd_epi16(_mm256_loadu_si256(q), k[0]);
#pragma GCC unroll 8
            for (int32_t c = 1; c < C; ++c) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_loadu_si256(q + c), k[c]));
            parts[i][j] = sum;
        }
    }
    for (int32_t i = 0; i < count; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(products[i]), sums8(parts[i]));
}
#endif

INLINE int32_t product(const int16_t* numbers, const Coded* row, int32_t dim) {
    int32_t sum = 0;
    for (int32_t d = 0; d < dim; ++d) sum += int32_t(numbers[d]) * int32_t(row[d].number);
    return sum;
}

// Scores of n keys, at most 16, for all queries; to(i): where those of the i-th go.
template <int C, class Query, class Count, class Key, class To>
INLINE void score_coded(const Query* queries, Count count, int32_t dim, int32_t n, const Key& key, const To& to) {
    for (int32_t from = 0; from < n; from += 8) {
        const int32_t left = n - from < 8 ? n - from : 8;
        const auto each = [&](int32_t j) { return key(from + (j < left ? j : left - 1)); };
        int32_t products[most_queries][8];
#if DECODERY_MADD
        if constexpr (C > 0) products8<C>(queries, count, each, products);
        else
#endif
            for (int32_t j = 0; j < 8; ++j)
                for (int32_t i = 0; i < count; ++i) products[i][j] = product(queries[i].numbers, each(j), C > 0 ? C * 16 : dim);
        float scales[8];
        for (int32_t j = 0; j < 8; ++j) scales[j] = scale_of(each(j), dim);
        for (int32_t i = 0; i < count; ++i) {
            float scores[8];
            for (int32_t j = 0; j < 8; ++j) scores[j] = float(products[i][j]) * (queries[i].step * scales[j]);
            __builtin_memcpy(to(i) + from, scores, size_t(left) * sizeof(float));
        }
    }
}
