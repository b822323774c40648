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
        const int64_t index = int64_t(row) * a.groups() + g;
        int32_t* sums = a.sums + 4 * index;
        for (int32_t i = 0; i < 4; ++i) {
            const i16 rounded = whole(nearest(v[i] * inverse));
            sums[i] = isum(rounded);
            store_bytes(q + i * 16, rounded);
        }
        const int32_t first = sums[0] + sums[1], second = sums[2] + sums[3];
        const float scale = !finite ? __builtin_nanf("") : tiny ? 0.0f : largest * (1.0f / 127.0f);
        a.scale[index] = scale;
        a.offset[index] = -weight_offset * (first + second);
        a.halves[2 * index] = scale * float(first);
        a.halves[2 * index + 1] = scale * float(second);
    }
}

// A block's sum of products with w, and what it comes to.
template <Form form>
INLINE Ints with_products(const Ints& sum, const Bytes& w, const Four& x) {
#if DECODERY_SUMS4
    if (form == blocks4) return dot4(sum, w, x);
#endif
    return dot(sum, w, x);
}
template <Form form>
INLINE Floats total_of(const Ints& sum) {
#if DECODERY_SUMS4
    if (form == blocks4) return floats4(sum);
#endif
    return floats(sum);
}

// todo(0), todo(1) ... todo(n - 1), all written out and with numbers that are known when this is compiled: sums that are
// chosen by them stay in registers.
template <class Todo, int... i>
INLINE void each_of(const Todo& todo, std::integer_sequence<int, i...>) { (todo(std::integral_constant<int, i>{}), ...); }
template <int n, class Todo>
INLINE void each(const Todo& todo) { each_of(todo, std::make_integer_sequence<int, n>{}); }
#define ALWAYS_INLINE __attribute__((always_inline))

constexpr int32_t vectors = panel_width / lanes;    // of a panel's outputs
// How many of them R rows are multiplied with at a time: all, where their sums stay in registers.
template <int R>
constexpr int32_t side_by_side = R > DECODERY_BOTH_ROWS ? vectors / 2 : vectors;

// Which part of a panel is multiplied: groups of inputs, or inputs of weights in floating point; how many bytes ahead of its
// reading it asks for weights, 0: it does not.
struct Stretch {
    int32_t begin, end;
    int64_t ahead;
};

// Adds R rows and one panel to sums[r][32].
template <int R>
static void tile(const uint8_t* w, const Quantized& a, int32_t row, float* sums, Stretch span) {
    constexpr int32_t V = side_by_side<R>, bytes = 4 * lanes, group_bytes = group_size * panel_width;
    const int32_t groups = a.groups();
    const int64_t stride = a.width;
    const int8_t* q = a.q + row * stride + span.begin * group_size;
    const float* scale = a.scale + int64_t(row) * groups;
    const int32_t* offset = a.offset + int64_t(row) * groups;
    w += span.begin * group_bytes;
    for (int32_t g = span.begin; g < span.end; ++g, w += group_bytes, q += group_size)
        each<vectors / V>([&](auto side) ALWAYS_INLINE {
            constexpr int32_t first = side * V;
            Ints acc[R][V];
            each<R>([&](auto r) ALWAYS_INLINE {
                const Ints begin = ints(offset[r * groups + g]);
                each<V>([&](auto v) ALWAYS_INLINE { acc[r][v] = begin; });
            });
            const uint8_t* p = w + bytes * first;
#pragma GCC unroll 4
            for (int32_t k = 0; k < group_size; k += 4, p += 4 * panel_width) {
                if (span.ahead != 0)
                    for (int32_t i = 0; i < V * bytes; i += 64) __builtin_prefetch(p + i + span.ahead, 0, 2);
                Bytes of[V];
                each<V>([&](auto v) ALWAYS_INLINE { of[v] = weights(p + bytes * v); });
                each<R>([&](auto r) ALWAYS_INLINE {
                    const Four x = four(q + r * stride + k);
                    each<V>([&](auto v) ALWAYS_INLINE { acc[r][v] = dot(acc[r][v], of[v], x); });
                });
            }
            each<R>([&](auto r) ALWAYS_INLINE {
                each<V>([&](auto v) ALWAYS_INLINE {
                    float* sum = sums + r * panel_width + lanes * (first + v);
                    store_lanes(sum, load_lanes(sum) + floats(acc[r][v]) * scale[r * groups + g]);
                });
            });
        });
}

constexpr bool has_least(Form form) { return form == blocks4 || form == blocks5; }

// The numbers of one vector of outputs and four inputs; a block's begin at p.
template <Form form>
INLINE Bytes numbers(const uint8_t* p, int32_t step, int32_t vector) {
    constexpr int32_t per_half = vectors / 2, bytes = 4 * lanes;
    const int32_t half = vector / per_half, at = vector % per_half * bytes, n = 2 * step + half;
    if (form == blocks8) return weights(p + 64 * n + at);
    const Bytes low = half == 0 ? low_halves(p + 64 * step + at) : high_halves(p + 64 * step + at);
    if (form == table4) return looked_up(low);
    p += 512;
    if (form == blocks5) return with_fifth(low, p + 8 * n + at / 8);
    if (form == blocks6) return with_two(low, p + n / 4 * 64 + at, n % 4);
    return low;
}

// The same for blocks.
template <int R, Form form>
static void tile_blocks(const uint8_t* w, const Quantized& a, int32_t row, float* sums, Stretch span) {
    constexpr int32_t V = side_by_side<R>, parts = has_least(form) ? 1 : 2, steps = block_size / 4 / parts;
    constexpr int32_t middle = form == blocks6 ? 32 : weight_offset;
    const int32_t blocks = a.groups() * 2;
    const int64_t stride = a.width;
    const int8_t* q = a.q + row * stride + span.begin * group_size;
    const float* scale = a.scale + int64_t(row) * a.groups();
    const float* halves = a.halves + int64_t(row) * blocks;
    const int32_t* totals = a.sums + int64_t(row) * 2 * blocks;
    w += int64_t(span.begin) * 2 * block_bytes(form);
    for (int32_t b = 2 * span.begin; b < 2 * span.end; ++b, w += block_bytes(form), q += block_size) {
        if (span.ahead != 0)
            for (int32_t i = 0; i < block_bytes(form); i += 64) __builtin_prefetch(w + i + span.ahead, 0, 2);
        each<vectors / V>([&](auto side) ALWAYS_INLINE {
            constexpr int32_t first = side * V;
            each<parts>([&](auto part) ALWAYS_INLINE {
                Ints acc[R][V];
                each<R>([&](auto r) ALWAYS_INLINE {
                    const Ints begin = ints(has_least(form) ? 0 : -middle * totals[(r * blocks + b) * 2 + part]);
                    each<V>([&](auto v) ALWAYS_INLINE { acc[r][v] = begin; });
                });
                each<steps>([&](auto k) ALWAYS_INLINE {
                    constexpr int32_t step = part * steps + k;
                    Bytes of[V];
                    each<V>([&](auto v) ALWAYS_INLINE { of[v] = numbers<form>(w + 4 * panel_width, step, first + v); });
                    each<R>([&](auto r) ALWAYS_INLINE {
                        const Four x = four(q + r * stride + 4 * step);
                        each<V>([&](auto v) ALWAYS_INLINE { acc[r][v] = with_products<form>(acc[r][v], of[v], x); });
                    });
                });
                each<V>([&](auto v) ALWAYS_INLINE {
                    constexpr int32_t output = lanes * (first + v);
                    const Floats step = half_floats(w + 2 * (part * panel_width + output));
                    const Floats least = half_floats(w + 2 * (panel_width + output));
                    each<R>([&](auto r) ALWAYS_INLINE {
                        const float s = scale[r * a.groups() + b / 2];
                        float* sum = sums + r * panel_width + output;
                        const Floats total = load_lanes(sum) + total_of<form>(acc[r][v]) * step * s;
                        store_lanes(sum, has_least(form) ? total + least * halves[r * blocks + b] : total);
                    });
                });
            });
        });
    }
}

template <int R>
INLINE void tile_any(Form form, const uint8_t* w, const Quantized& a, int32_t row, float* sums, Stretch span) {
    switch (form) {
        case blocks4: return tile_blocks<R, blocks4>(w, a, row, sums, span);
        case table4: return tile_blocks<R, table4>(w, a, row, sums, span);
        case blocks5: return tile_blocks<R, blocks5>(w, a, row, sums, span);
        case blocks6: return tile_blocks<R, blocks6>(w, a, row, sums, span);
        case blocks8: return tile_blocks<R, blocks8>(w, a, row, sums, span);
        default: return tile<R>(w, a, row, sums, span);
    }
}

static void tile_rows(int32_t r, Form form, const uint8_t* w, const Quantized& a, int32_t row, float* sums, Stretch span) {
    switch (r) {
        case 1: return tile_any<1>(form, w, a, row, sums, span);
        case 2: return tile_any<2>(form, w, a, row, sums, span);
#if DECODERY_TILE_ROWS > 2
        case 3: return tile_any<3>(form, w, a, row, sums, span);
#endif
#if DECODERY_TILE_ROWS > 3
        case 4: return tile_any<4>(form, w, a, row, sums, span);
        case 5: return tile_any<5>(form, w, a, row, sums, span);
        case 6: return tile_any<6>(form, w, a, row, sums, span);
        case 7: return tile_any<7>(form, w, a, row, sums, span);
        case 8: return tile_any<8>(form, w, a, row, sums, span);
#endif
    }
}

constexpr int32_t float_rows = DECODERY_FLOAT_ROWS;    // that share a load of weights of 16 bits

// The same for rows of floats and weights in bfloat16 or half precision, summed in the order of the inputs.
template <int R, bool half>
static void tile16(const uint8_t* w, const float* x, int32_t in, float* sums, Stretch span) {
    // What is read at once gives two vectors of outputs, 16 apart.
    constexpr int32_t V = R > 2 ? 1 : 16 / lanes;
    each<16 / lanes / V>([&](auto side) ALWAYS_INLINE {
        constexpr int32_t first = side * V;
        Floats acc[R][V][2];
        const auto place = [&](int32_t r, int32_t v, int32_t last) ALWAYS_INLINE {
            return sums + r * panel_width + lanes * (first + v) + 16 * last;
        };
        each<R * V>([&](auto i) ALWAYS_INLINE {
            acc[i / V][i % V][0] = load_lanes(place(i / V, i % V, 0));
            acc[i / V][i % V][1] = load_lanes(place(i / V, i % V, 1));
        });
        const uint8_t* p = w + int64_t(span.begin) * 2 * panel_width;
#pragma GCC unroll 2
        for (int32_t k = span.begin; k < span.end; ++k, p += 2 * panel_width) {
            if (first == 0 && span.ahead != 0) __builtin_prefetch(p + span.ahead, 0, 2);
            each<V>([&](auto v) ALWAYS_INLINE {
                Floats low, high;
                if (half) {
                    low = half_floats(p + 2 * lanes * (first + v));
                    high = half_floats(p + 2 * lanes * (first + v) + 32);
                } else widen(p + 4 * lanes * (first + v), low, high);
                each<R>([&](auto r) ALWAYS_INLINE {
                    const float by = x[int64_t(r) * in + k];
                    acc[r][v][0] = acc[r][v][0] + low * by;
                    acc[r][v][1] = acc[r][v][1] + high * by;
                });
            });
        }
        each<R * V>([&](auto i) ALWAYS_INLINE {
            store_lanes(place(i / V, i % V, 0), acc[i / V][i % V][0]);
            store_lanes(place(i / V, i % V, 1), acc[i / V][i % V][1]);
        });
    });
}

template <bool half>
static void tile_floats(int32_t r, const uint8_t* w, const float* x, int32_t in, float* sums, Stretch span) {
    switch (r) {
        case 1: return tile16<1, half>(w, x, in, sums, span);
        case 2: return tile16<2, half>(w, x, in, sums, span);
        case 3: return tile16<3, half>(w, x, in, sums, span);
        case 4: return tile16<4, half>(w, x, in, sums, span);
#if DECODERY_FLOAT_ROWS > 4
        case 5: return tile16<5, half>(w, x, in, sums, span);
        case 6: return tile16<6, half>(w, x, in, sums, span);
        case 7: return tile16<7, half>(w, x, in, sums, span);
        case 8: return tile16<8, half>(w, x, in, sums, span);
#endif
    }
}

constexpr int32_t most_rows = 64;    // rows whose sums are kept at a time

// out(panel, row, first 16 outputs, second 16) for all rows and this thread's panels.
//
// A panel is multiplied part by part with many rows, so that a part and the rows' inputs to it stay in the first-level
// cache.
template <class Out>
static void multiply(const Linear& linear, const Quantized& a, int32_t rows, int32_t thread, const Team& team, const Out& out) {
    // Into the second-level cache: asked for the first level, they cost a third of the speed at 8 rows and more.
    constexpr int64_t ahead = 16384;
    const bool floating = is_floating(linear.form);
    const int32_t most = floating ? float_rows : DECODERY_TILE_ROWS;
    const int32_t length = floating ? linear.in : a.groups(), part = floating ? 512 : 1024 / group_size;
    const int64_t size = panel_bytes(linear.form, linear.in);
    const Range mine = share(panels(linear), thread, team.threads);
    alignas(64) float sums[most_rows * panel_width];
    for (int32_t p = mine.begin; p < mine.end; ++p) {
        const uint8_t* w = linear.weight + p * size;
        const bool scaled = linear.scale != nullptr;
        const f16 s0 = scaled ? load(linear.scale + p * panel_width) : splat(1.0f);
        const f16 s1 = scaled ? load(linear.scale + p * panel_width + 16) : splat(1.0f);
        for (int32_t first = 0; first < rows; first += most_rows) {
            const int32_t count = rows - first < most_rows ? rows - first : most_rows, blocks = (count + most - 1) / most;
            for (int32_t i = 0; i < 2 * count; ++i) store(sums + i * 16, splat(0.0f));
            // Fewer rows than share a load need no parts.
            for (int32_t begin = 0, end; begin < length; begin = end) {
                end = blocks == 1 || begin + part > length ? length : begin + part;
                for (int32_t block = 0; block < blocks; ++block) {
                    const Range some = share(count, block, blocks);
                    const Stretch span = {begin, end, first == 0 && block == 0 ? ahead : 0};
                    const int32_t row = first + some.begin, n = some.end - some.begin;
                    const float* x = a.floats + int64_t(row) * linear.in;
                    float* to = sums + some.begin * panel_width;
                    if (linear.form == float16s) tile_floats<true>(n, w, x, linear.in, to, span);
                    else if (floating) tile_floats<false>(n, w, x, linear.in, to, span);
                    else tile_rows(n, linear.form, w, a, row, to, span);
                }
            }
            for (int32_t i = 0; i < count; ++i) {
                f16 y0 = load(sums + i * panel_width) * s0, y1 = load(sums + i * panel_width + 16) * s1;
                if (linear.bias != nullptr) {
                    y0 = y0 + load(linear.bias + p * panel_width);
                    y1 = y1 + load(linear.bias + p * panel_width + 16);
                }
                out(p, first + i, y0, y1);
            }
        }
    }
}
