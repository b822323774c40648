// Rows of int8 activations times panels of int8 weights. Included once per instruction set.
//
// Activations carry one scale per row and group of 64 inputs, weights one per output. A group's products are summed in
// integers, groups are added as floats in ascending order: a row's result does not depend on the rows beside it.

// One row of n floats; the bytes behind n are zero.
static void quantize(const float* x, int32_t n, int32_t row, const Quantized& a) {
    int8_t* q = a.q + int64_t(row) * a.width;
    for (int32_t g = 0; g < a.groups(); ++g, q += group_size) {
        f16 v[4];
        i16 top = isplat(0);
        for (int32_t i = 0; i < 4; ++i) {
            const int32_t left = n - g * group_size - i * 16;
            v[i] = left > 0 ? load(x + g * group_size + i * 16, left) : splat(0.0f);
            // As integers, magnitudes keep their order and NaN is the largest.
            top = larger(bits(magnitude(v[i])), top);
        }
        const int32_t most = maximum<int32_t>(top);
        float largest;
        __builtin_memcpy(&largest, &most, 4);
        const bool finite = most < 0x7f800000, tiny = largest < 1e-30f;
        const float inverse = finite && !tiny ? 127.0f / largest : 0.0f;
        i16 sum[2] = {isplat(0), isplat(0)};
        for (int32_t i = 0; i < 4; ++i) {
            const i16 rounded = whole(nearest(v[i] * inverse));
            sum[i / 2] += rounded;
            store_bytes(q + i * 16, rounded);
        }
        const int32_t first = isum(sum[0]), second = isum(sum[1]);
        const int64_t index = int64_t(row) * a.groups() + g;
        const float scale = !finite ? __builtin_nanf("") : tiny ? 0.0f : largest * (1.0f / 127.0f);
        a.scale[index] = scale;
        a.offset[index] = -weight_offset * (first + second);
        a.halves[2 * index] = scale * float(first);
        a.halves[2 * index + 1] = scale * float(second);
    }
}

// sums[r][32] for R rows and one panel. `ahead`: how many bytes ahead of its reading it asks for weights.
template <int R>
static void tile(const uint8_t* w, const Quantized& a, int32_t row, float* sums, int64_t ahead) {
    const int32_t groups = a.groups();
    const int64_t stride = a.width;
    const int8_t* q = a.q + row * stride;
    const float* scale = a.scale + int64_t(row) * groups;
    const int32_t* offset = a.offset + int64_t(row) * groups;
    f16 sum[R][2];
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = splat(0.0f);
    for (int32_t g = 0; g < groups; ++g) {
        Ints acc[R][2];
        for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = ints(offset[r * groups + g]);
#pragma GCC unroll 4
        for (int32_t k = 0; k < group_size; k += 4, w += 2 * 64) {
            __builtin_prefetch(w + ahead, 0, 2);
            __builtin_prefetch(w + ahead + 64, 0, 2);
            const Bytes w0 = weights(w), w1 = weights(w + 64);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Four x = four(q + r * stride + k);
                acc[r][0] = dot(acc[r][0], w0, x);
                acc[r][1] = dot(acc[r][1], w1, x);
            }
        }
        q += group_size;
        for (int r = 0; r < R; ++r) {
            const float s = scale[r * groups + g];
            sum[r][0] = sum[r][0] + floats(acc[r][0]) * s;
            sum[r][1] = sum[r][1] + floats(acc[r][1]) * s;
        }
    }
    for (int r = 0; r < R; ++r) {
        store(sums + r * panel_width, sum[r][0]);
        store(sums + r * panel_width + 16, sum[r][1]);
    }
}

#if !DECODERY_WIDE
constexpr int32_t wide_rows = 0, least_wide = 0;
static void tile_wide(int32_t, const uint8_t*, const Quantized&, int32_t, float*) {}
#endif

// The same for 4-bit weights: blocks of 32 inputs, each with a step and a least value per output.
template <int R>
static void tile4(const uint8_t* w, const Quantized& a, int32_t row, float* sums, int64_t ahead) {
    const int32_t blocks = a.groups() * 2;
    const int64_t stride = a.width;
    const int8_t* q = a.q + row * stride;
    const float* scale = a.scale + int64_t(row) * a.groups();
    const float* halves = a.halves + int64_t(row) * blocks;
    for (int i = 0; i < 2 * R; ++i) store(sums + i * 16, splat(0.0f));
    for (int32_t b = 0; b < blocks; ++b, w += block_bytes, q += block_size) {
        Ints acc[R][2];
        for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = ints(0);
        __builtin_prefetch(w + ahead, 0, 2);
        __builtin_prefetch(w + ahead + 64, 0, 2);
#pragma GCC unroll 4
        for (int32_t k = 0; k < 8; ++k) {
            const uint8_t* p = w + 128 + k * 64;
            __builtin_prefetch(p + ahead, 0, 2);
            const Bytes w0 = low_halves(p), w1 = high_halves(p);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Four x = four(q + r * stride + k * 4);
                acc[r][0] = dot(acc[r][0], w0, x);
                acc[r][1] = dot(acc[r][1], w1, x);
            }
        }
        const f16 step0 = half_floats(w), step1 = half_floats(w + 32);
        const f16 least0 = half_floats(w + 64), least1 = half_floats(w + 96);
        for (int r = 0; r < R; ++r) {
            const float s = scale[r * a.groups() + b / 2], half = halves[r * blocks + b];
            float* sum = sums + r * panel_width;
            store(sum, (load(sum) + floats(acc[r][0]) * step0 * s) + least0 * half);
            store(sum + 16, (load(sum + 16) + floats(acc[r][1]) * step1 * s) + least1 * half);
        }
    }
}

template <int R>
INLINE void tile_any(int32_t bits, const uint8_t* w, const Quantized& a, int32_t row, float* sums, int64_t ahead) {
    if (bits == 4) tile4<R>(w, a, row, sums, ahead);
    else tile<R>(w, a, row, sums, ahead);
}

static void tile_rows(int32_t r, int32_t bits, const uint8_t* w, const Quantized& a, int32_t row, float* sums, int64_t ahead) {
    switch (r) {
        case 1: return tile_any<1>(bits, w, a, row, sums, ahead);
        case 2: return tile_any<2>(bits, w, a, row, sums, ahead);
#if DECODERY_TILE_ROWS > 2
        case 3: return tile_any<3>(bits, w, a, row, sums, ahead);
        case 4: return tile_any<4>(bits, w, a, row, sums, ahead);
        case 5: return tile_any<5>(bits, w, a, row, sums, ahead);
        case 6: return tile_any<6>(bits, w, a, row, sums, ahead);
        case 7: return tile_any<7>(bits, w, a, row, sums, ahead);
        case 8: return tile_any<8>(bits, w, a, row, sums, ahead);
#endif
    }
}

// out(panel, row, first 16 outputs, second 16) for all rows and this thread's panels.
template <class Out>
static void multiply(const Linear& linear, const Quantized& a, int32_t rows, int32_t thread, const Team& team, const Out& out) {
    const bool widens = wide_rows > 0 && linear.bits == 8 && rows >= least_wide;
    const int32_t most = widens ? wide_rows : DECODERY_TILE_ROWS;
    // Into the second-level cache: asked for the first level, they cost a third of the speed at 8 rows and more.
    constexpr int64_t ahead = 4096;
    alignas(64) float sums[(wide_rows > DECODERY_TILE_ROWS ? wide_rows : DECODERY_TILE_ROWS) * panel_width];
    const int32_t blocks = (rows + most - 1) / most;
    const int64_t panel_bytes = linear.bits == 4 ? int64_t(a.groups()) * 2 * block_bytes : int64_t(a.width) * panel_width;
    const Range mine = share(panels(linear), thread, team.threads);
    for (int32_t p = mine.begin; p < mine.end; ++p) {
        const uint8_t* w = linear.weight + p * panel_bytes;
        const bool scaled = linear.scale != nullptr;
        const f16 s0 = scaled ? load(linear.scale + p * panel_width) : splat(1.0f);
        const f16 s1 = scaled ? load(linear.scale + p * panel_width + 16) : splat(1.0f);
        for (int32_t block = 0; block < blocks; ++block) {
            const Range span = share(rows, block, blocks);
            if (widens) tile_wide(span.end - span.begin, w, a, span.begin, sums);
            else tile_rows(span.end - span.begin, linear.bits, w, a, span.begin, sums, block == 0 ? ahead : 0);
            for (int32_t row = span.begin; row < span.end; ++row) {
                const float* sum = sums + (row - span.begin) * panel_width;
                f16 y0 = load(sum) * s0, y1 = load(sum + 16) * s1;
                if (linear.bias != nullptr) {
                    y0 = y0 + load(linear.bias + p * panel_width);
                    y1 = y1 + load(linear.bias + p * panel_width + 16);
                }
                out(p, row, y0, y1);
            }
        }
    }
}
