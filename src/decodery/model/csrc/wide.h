// Rows of int8 activations times panels of int8 weights, both widened to 16 bits first. Machines without byte products
// that sum in 32 bits need two instructions for 16 products this way, whatever their signs; a panel's weights are
// widened once for many rows. Sums are the same integers as `tile`'s, so results are the same bits.

constexpr int32_t wide_rows = 50;       // that share a widened panel
constexpr int32_t wide_tile = 5;        // rows whose sums stay in registers: six take all 16, and are moved
constexpr int32_t least_wide = 4;       // rows from which widening pays

// 16 outputs times 64 inputs [16][16 outputs][4] as bytes to [32 pairs of inputs][16 outputs][2].
static void widen_weights(const uint8_t* w, int32_t stride, int16_t* wide) {
    const __m256i pairs = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,
                                           0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    for (int32_t k = 0; k < group_size / 4; ++k, w += stride, wide += 64)
        for (int32_t i = 0; i < 2; ++i) {
            __m256i x = _mm256_load_si256(reinterpret_cast<const __m256i*>(w + 32 * i));
            x = _mm256_xor_si256(x, _mm256_set1_epi8(-128));
            x = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(x, pairs), 0xd8);
            _mm256_store_si256(reinterpret_cast<__m256i*>(wide + 16 * i), _mm256_cvtepi8_epi16(_mm256_castsi256_si128(x)));
            _mm256_store_si256(reinterpret_cast<__m256i*>(wide + 32 + 16 * i),
                               _mm256_cvtepi8_epi16(_mm256_extracti128_si256(x, 1)));
        }
}

static void widen_activations(const int8_t* q, int16_t* wide) {
    for (int32_t i = 0; i < group_size; i += 16) {
        const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q + i));
        _mm256_store_si256(reinterpret_cast<__m256i*>(wide + i), _mm256_cvtepi8_epi16(x));
    }
}

// Adds one group of R rows and 16 outputs to sums[r][panel_width].
template <int R>
static void add_wide(const int16_t* w, const int16_t* x, const float* scale, int32_t groups, float* sums) {
    __m256i acc[R][2];
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 2
    for (int32_t pair = 0; pair < group_size / 2; ++pair) {
        const __m256i w0 = _mm256_load_si256(reinterpret_cast<const __m256i*>(w + 32 * pair));
        const __m256i w1 = _mm256_load_si256(reinterpret_cast<const __m256i*>(w + 32 * pair + 16));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            int32_t both;
            __builtin_memcpy(&both, x + r * group_size + 2 * pair, 4);
            const __m256i of = _mm256_set1_epi32(both);
            acc[r][0] = _mm256_add_epi32(acc[r][0], _mm256_madd_epi16(w0, of));
            acc[r][1] = _mm256_add_epi32(acc[r][1], _mm256_madd_epi16(w1, of));
        }
    }
    for (int r = 0; r < R; ++r) {
        const __m256 s = _mm256_set1_ps(scale[r * groups]);
        for (int i = 0; i < 2; ++i) {
            float* sum = sums + r * panel_width + 8 * i;
            _mm256_storeu_ps(sum, _mm256_add_ps(_mm256_loadu_ps(sum), _mm256_mul_ps(_mm256_cvtepi32_ps(acc[r][i]), s)));
        }
    }
}

static void add_wide_rows(int32_t r, const int16_t* w, const int16_t* x, const float* scale, int32_t groups, float* sums) {
    switch (r) {
        case 1: return add_wide<1>(w, x, scale, groups, sums);
        case 2: return add_wide<2>(w, x, scale, groups, sums);
        case 3: return add_wide<3>(w, x, scale, groups, sums);
        case 4: return add_wide<4>(w, x, scale, groups, sums);
        case 5: return add_wide<5>(w, x, scale, groups, sums);
    }
}

// sums[r][32] for at most `wide_rows` rows and one panel.
static void tile_wide(int32_t rows, const uint8_t* w, const Quantized& a, int32_t row, float* sums) {
    alignas(64) int16_t weights[2][group_size / 2 * 32], x[wide_rows * group_size];
    const int32_t groups = a.groups(), blocks = (rows + wide_tile - 1) / wide_tile;
    for (int32_t i = 0; i < 2 * rows; ++i) store(sums + i * 16, splat(0.0f));
    for (int32_t g = 0; g < groups; ++g, w += group_size * panel_width) {
        widen_weights(w, 128, weights[0]);
        widen_weights(w + 64, 128, weights[1]);
        const int8_t* q = a.q + int64_t(row) * a.width + g * group_size;
        for (int32_t r = 0; r < rows; ++r) widen_activations(q + int64_t(r) * a.width, x + r * group_size);
        for (int32_t block = 0; block < blocks; ++block) {
            const Range span = share(rows, block, blocks);
            const float* scale = a.scale + int64_t(row + span.begin) * groups + g;
            for (int32_t half = 0; half < 2; ++half)
                add_wide_rows(span.end - span.begin, weights[half], x + span.begin * group_size, scale, groups,
                              sums + span.begin * panel_width + 16 * half);
        }
    }
}
