// Rows of int8 activations times panels of int8 weights. Included once per instruction set.
//
// Activations carry one scale per row and group of 64 inputs, weights one per output. A group's products are summed in
// integers, groups are added as floats in ascending order: a row's result does not depend on the rows beside it.

// The scaled sums of a row's super-block as integers of 15 bits.
static void quantize_halves(int32_t row, int32_t super, const Quantized& a) {
    const int64_t index = int64_t(row) * a.supers() + super;
    const f16 v = load(a.halves + int64_t(row) * a.groups() * 2 + super * 8, 8);
    // As in `quantize`.
    const int32_t most = maximum<int32_t>(bits(magnitude(v)));
    float largest;
    __builtin_memcpy(&largest, &most, 4);
    const bool finite = most < 0x7f800000, tiny = largest < 1e-30f;
    const i16 rounded = whole(nearest(v * (finite && !tiny ? least_most / largest : 0.0f)));
    for (int32_t i = 0; i < 8; ++i) {
        const int32_t upper = (rounded[i] + 64) >> 7;
        a.leasts[16 * index + i] = int8_t(upper);
        a.leasts[16 * index + 8 + i] = int8_t(rounded[i] - 128 * upper);
    }
    a.least_step[index] = !finite ? __builtin_nanf("") : tiny ? 0.0f : largest * (1.0f / least_most);
}

// One row of n floats, for weights of a form, in an order if there is one; the bytes after n are zero.
static void quantize(const float* x, int32_t n, int32_t row, const Quantized& a, Form form, const int32_t* order = nullptr) {
    int8_t* q = a.q + int64_t(row) * a.width;
    for (int32_t g = 0; g < a.groups(); ++g, q += group_size) {
        f16 v[4];
        i16 top = isplat(0);
        for (int32_t i = 0; i < 4; ++i) {
            const int32_t left = n - g * group_size - i * 16;
            const int32_t at = g * group_size + i * 16;
            v[i] = left <= 0 ? splat(0.0f) : order == nullptr ? load(x + at, left) : load_ordered(x, order + at, left);
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
    for (int32_t s = 0; is_super(form) && has_least(form) && s < a.supers(); ++s) quantize_halves(row, s, a);
}

#ifndef DECODERY_NARROW
#define DECODERY_NARROW 0
#endif
#ifndef DECODERY_BLOCK_ROWS
#define DECODERY_BLOCK_ROWS DECODERY_TILE_ROWS
#endif
// Of how many steps of a block products are added in 16 bits, as many as fit there together; 0: of none.
template <Form form>
constexpr int32_t narrow_steps = DECODERY_NARROW == 0 ? 0 : form == rows2 ? 16 : form == blocks4 ? 8 : form == blocks5 || is_e2m1(form) ? 4 : form == blocks6 ? 2 : 0;

// todo(0), todo(1) ... todo(n - 1), all written out and with numbers that are known when this is compiled: sums that are
// chosen by them stay in registers.
template <class Todo, int... i>
INLINE void each_of(const Todo& todo, std::integer_sequence<int, i...>) { (todo(std::integral_constant<int, i>{}), ...); }
template <int n, class Todo>
INLINE void each(const Todo& todo) { each_of(todo, std::make_integer_sequence<int, n>{}); }
#define ALWAYS_INLINE __attribute__((always_inline))
// Work for all of `count`, `most` at a time as far as possible: work(first, how many, which the compiler knows).
template <int most, class Work>
INLINE void rest_of(int32_t first, int32_t left, const Work& work) {
    if constexpr (most > 0) {
        if (left == most) return work(first, std::integral_constant<int, most>());
        rest_of<most - 1>(first, left, work);
    }
}
template <int most, class Work>
INLINE void in_parts(int32_t count, const Work& work) {
    int32_t first = 0;
    for (; first + most <= count; first += most) work(first, std::integral_constant<int, most>());
    rest_of<most - 1>(first, count - first, work);
}
// The same for the steps of a block, which are a loop where writing them out takes minutes to compile.
#if DECODERY_LOOP_STEPS
template <int n, class Todo>
INLINE void each_step(const Todo& todo) {
    for (int32_t i = 0; i < n; ++i) todo(i);
}
#else
template <int n, class Todo>
INLINE void each_step(const Todo& todo) { each<n>(todo); }
#endif

constexpr int32_t vectors = panel_width / lanes;    // of a panel's outputs
// How many of them R rows are multiplied with at a time: all, where their sums stay in registers. Those in 16 bits come
// beside the others, unless all products of a block fit.
template <Form form>
constexpr int32_t both_rows = narrow_steps<form> > 0 && narrow_steps<form> < inputs_of(form) / 4 ? 1 : DECODERY_BOTH_ROWS;
template <int R, Form form>
constexpr int32_t side_by_side = R > both_rows<form> ? vectors / 2 : vectors;

// Where the weights are that are asked for while others are multiplied, and how many bytes further at every step: every
// four inputs, every block, every group of rows2, every input of weights in floating point. Into the second-level cache:
// asked for the first level, they cost a third of the speed at 8 rows and more.
struct Ahead {
    const uint8_t* next;
    int64_t step;

    template <int32_t bytes>
    ALWAYS_INLINE void ask() {
        for (int32_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + i, 0, 2);
        next += step;
    }
    // The same, no line twice: of what many tiles share each asks for little.
    ALWAYS_INLINE void ask_lines() {
        for (const uint8_t* line = next + (-reinterpret_cast<intptr_t>(next) & 63); line < next + step; line += 64) __builtin_prefetch(line, 0, 2);
        next += step;
    }
};

// How many bytes are asked for at a time, see `Ahead`.
constexpr int32_t asked_bytes(Form form) {
    if (form == codes4) return 2 * panel_width;
    if (is_floating(form)) return (form == float8 ? 1 : 2) * panel_width;
    if (is_super(form)) return super_bytes(form) / 8;
    return form == rows8 ? 4 * panel_width : form == rows2 ? ternary_bytes : block_bytes(form);
}

// sums[r][32] for R rows and one panel.
template <int R>
static void tile(const uint8_t* w, const Quantized& a, int32_t row, float* sums, Ahead ahead) {
    constexpr int32_t V = side_by_side<R, rows8>, bytes = 4 * lanes;
    const int32_t groups = a.groups();
    const int64_t stride = a.width;
    const int8_t* q = a.q + row * stride;
    const float* scale = a.scale + int64_t(row) * groups;
    const int32_t* offset = a.offset + int64_t(row) * groups;
    for (int i = 0; i < R * vectors; ++i) store_lanes(sums + i * lanes, Floats{});
    for (int32_t g = 0; g < groups; ++g, w += group_size * panel_width, q += group_size) {
        for (int32_t first = 0; first < vectors; first += V) {
            Ints acc[R][V];
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < V; ++v) acc[r][v] = ints(offset[r * groups + g]);
            const uint8_t* p = w + bytes * first;
#pragma GCC unroll 4
            for (int32_t k = 0; k < group_size; k += 4, p += 4 * panel_width, ahead.next += ahead.step) {
                for (int32_t i = 0; i < V * bytes; i += 64) __builtin_prefetch(ahead.next + i, 0, 2);
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) {
                    const Bytes of = weights(p + bytes * v);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) acc[r][v] = dot(acc[r][v], of, four(q + r * stride + k));
                }
            }
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < V; ++v) {
                    float* sum = sums + r * panel_width + lanes * (first + v);
                    store_lanes(sum, load_lanes(sum) + floats(acc[r][v]) * scale[r * groups + g]);
                }
        }
    }
}

// Parts of a block with steps of their own.
constexpr int32_t halves_of(Form form) { return has_least(form) || form == super_table4 || form == blocks8 || form == mxfp4s ? 1 : 2; }
// What sums of numbers as they are kept begin with, for what they stand for: block `b` of all rows', and its half.
template <Form form>
INLINE int32_t too_much(const int32_t* totals, int32_t b, int32_t part) {
    if (has_least(form)) return 0;
    if (form == rows2) return -(totals[4 * b] + totals[4 * b + 1] + totals[4 * b + 2] + totals[4 * b + 3]);
    const bool whole = form == blocks8 || form == mxfp4s;
    return -(form == blocks6 ? 32 : is_e2m1(form) ? e2m1_zero : weight_offset) * (whole ? totals[2 * b] + totals[2 * b + 1] : totals[2 * b + part]);
}

// Which 16 outputs of a panel a vector is of, and where among the bytes of these.
constexpr int32_t half_of(int32_t vector) { return vector / (vectors / 2); }
constexpr int32_t at_vector(int32_t vector) { return vector % (vectors / 2) * 4 * lanes; }

// The numbers of one vector of outputs and four inputs; a block's begin at p.
template <Form form>
INLINE Bytes numbers(const uint8_t* p, int32_t step, int32_t vector) {
    if (form == rows8) return weights(p + 4 * panel_width * step + 4 * lanes * vector);
    const int32_t half = half_of(vector), at = at_vector(vector), n = 2 * step + half;
    if (form == rows2) return two_bits(p + step / 2 * 64 + at, step % 2 * 2 + half);
    if (form == blocks8) return weights(p + 64 * n + at);
    const Bytes low = half == 0 ? low_halves(p + 64 * step + at) : high_halves(p + 64 * step + at);
    if (form == table4) return looked_up(low, table_values, weight_offset);
    if (is_e2m1(form)) return looked_up(low, e2m1_values, 0);
    p += 512;
    if (form == blocks5) return with_fifth(low, p + 8 * n + at / 8);
    if (form == blocks6) return with_two(low, p + n / 4 * 64 + at, n % 4);
    return low;
}

// found[r][v]: what a part of a block comes to for R rows and V vectors of outputs, the first of which is `first`, in the
// numbers that the weights are kept as. parts: of a block. begin(r): what a row's sums begin with.
template <int R, int V, Form form, int parts, class Begin>
INLINE void row_sums(const uint8_t* w, const int8_t* q, int64_t stride, int32_t first, int32_t part, const Begin& begin, Floats (&found)[R][V]) {
    constexpr int32_t steps = block_size / 4 / parts, run = narrow_steps<form> > 0 ? narrow_steps<form> : 1;
    Ints acc[R][V];
    each<R>([&](auto r) ALWAYS_INLINE {
        const Ints by = ints(begin(r));
        each<V>([&](auto v) ALWAYS_INLINE { acc[r][v] = by; });
    });
    each_step<steps / run>([&](auto j) ALWAYS_INLINE {
        Ints narrow[R][V];
        each<run>([&](auto k) ALWAYS_INLINE {
            const int32_t step = part * steps + j * run + k;
            Bytes of[V];
            each<V>([&](auto v) ALWAYS_INLINE { of[v] = numbers<form>(w, step, first + v); });
            each<R>([&](auto r) ALWAYS_INLINE {
                const Four x = four(q + r * stride + 4 * step);
                each<V>([&](auto v) ALWAYS_INLINE {
                    if constexpr (run == 1) acc[r][v] = dot(acc[r][v], of[v], x);
                    else if constexpr (k == 0) narrow[r][v] = products16(of[v], x);
                    else narrow[r][v] = add16(narrow[r][v], products16(of[v], x));
                });
            });
        });
        if constexpr (run > 1)
            each<R>([&](auto r) ALWAYS_INLINE {
                each<V>([&](auto v) ALWAYS_INLINE { acc[r][v] = add_pairs(acc[r][v], narrow[r][v]); });
            });
    });
    each<R>([&](auto r) ALWAYS_INLINE {
        each<V>([&](auto v) ALWAYS_INLINE { found[r][v] = floats(acc[r][v]); });
    });
}

#if DECODERY_PAIRS
#include "pairs.h"
#else
template <int R, Form form>
constexpr int32_t outputs_at_a_time = side_by_side<R, form>;
template <int R, int V, Form form, int parts, class Begin>
INLINE void block_sums(const uint8_t* w, const int8_t* q, int64_t stride, int32_t first, int32_t part, const Begin& begin, Floats (&found)[R][V]) {
    row_sums<R, V, form, parts>(w, q, stride, first, part, begin, found);
}
#endif

// The steps of outputs from `output` on, of a part of a block whose scales begin at p; of mxfp4s twice those of the numbers.
template <Form form>
INLINE Floats steps_of(const uint8_t* p, int32_t part, int32_t output) {
    if constexpr (form == mxfp4s) return powers(p + output);
    else return half_floats(p + 2 * (part * panel_width + output));
}

// Adds blocks `of` a panel. as: the form whose numbers those are that begin at p; its own lie in the panel.
template <int R, Form form, Form as>
static void tile_blocks(const uint8_t* w, const uint8_t* p, const Quantized& a, int32_t row, Range of, float* sums, Ahead ahead) {
    constexpr int32_t V = outputs_at_a_time<R, as>;
    const int32_t groups = a.groups(), blocks = groups * 2;
    const int64_t stride = a.width;
    const int8_t* q = a.q + row * stride + of.begin * block_size;
    const float* scale = a.scale + int64_t(row) * groups;
    const float* halves = a.halves + int64_t(row) * blocks;
    const int32_t* totals = a.sums + int64_t(row) * 2 * blocks;
    for (int32_t b = of.begin; b < of.end; ++b, q += block_size) {
        const uint8_t* group = w + b / 2 * 2 * block_bytes(form);
        const uint8_t* scales = group + scales_at(form, b % 2);
        if constexpr (as == form) {
            p = group + numbers_at(form, b % 2);
            ahead.ask<block_bytes(form)>();
        } else ahead.ask_lines();
        each<vectors / V>([&](auto side) ALWAYS_INLINE {
            constexpr int32_t first = side * V;
            each<halves_of(form)>([&](auto part) ALWAYS_INLINE {
                Floats found[R][V];
                block_sums<R, V, as, halves_of(form)>(p, q, stride, first, part,
                                       [&](int32_t r) ALWAYS_INLINE { return too_much<form>(totals, r * blocks + b, part); }, found);
                each<V>([&](auto v) ALWAYS_INLINE {
                    constexpr int32_t output = lanes * (first + v);
                    const Floats step = steps_of<form>(scales, part, output);
                    each<R>([&](auto r) ALWAYS_INLINE {
                        const float s = scale[r * groups + b / 2];
                        float* sum = sums + r * panel_width + output;
                        Floats total = load_lanes(sum) + found[r][v] * step * s;
                        if constexpr (has_least(form)) total = total + steps_of<form>(scales, 1, output) * halves[r * blocks + b];
                        store_lanes(sum, total);
                    });
                });
            });
        });
        if constexpr (as != form) p += number_bytes(as);
    }
}

// The same for super-blocks. A group's sums times integer scales are exact: 24 bits, of super6 and super_table4 but for
// the sum of such products.
template <int R, Form form, Form as>
static void tile_supers(const uint8_t* w, const uint8_t* p, const Quantized& a, int32_t row, Range of, float* sums, Ahead ahead) {
    constexpr Form base = base_of(form);
    constexpr int32_t V = outputs_at_a_time<R, as>, parts = halves_of(form);
    const int32_t groups = a.groups(), supers = a.supers();
    const int64_t stride = a.width;
    const int8_t* q = a.q + row * stride + of.begin * super_size;
    const float* scale = a.scale + int64_t(row) * groups;
    const int32_t* totals = a.sums + int64_t(row) * 4 * groups;
    const int8_t* leasts = a.leasts + int64_t(row) * supers * 16;
    const float* least_step = a.least_step + int64_t(row) * supers;
    w += of.begin * super_bytes(form);
    for (int32_t s = of.begin; s < of.end; ++s, w += super_bytes(form)) {
        const uint8_t* scales = w + super_scales(form);
        if constexpr (as == base) p = w + super_numbers(form);
        Floats all[R][vectors] = {};
        for (int32_t g = 4 * s; g < 4 * s + 4; ++g) {
            Floats group[R][vectors] = {};
            for (int32_t block = 0; block < 2; ++block) {
                if constexpr (as == base) ahead.ask<asked_bytes(form)>();
                else ahead.ask_lines();
                each<vectors / V>([&](auto side) ALWAYS_INLINE {
                    constexpr int32_t first = side * V;
                    each<parts>([&](auto part) ALWAYS_INLINE {
                        Floats found[R][V];
                        block_sums<R, V, as, parts>(p, q, stride, first, part, [&](int32_t r) ALWAYS_INLINE {
                            const int32_t b = (r * groups + g) * 2 + block, only = too_much<base>(totals, b, part);
                            return form == super_table4 ? only + too_much<base>(totals, b, 1) : only;
                        }, found);
                        each<V>([&](auto v) ALWAYS_INLINE {
                            const uint8_t* of = scales + part * panel_width + lanes * (first + v);
                            const Floats by = has_least(form) ? unsigned_floats(of) : signed_floats(of);
                            each<R>([&](auto r) ALWAYS_INLINE { group[r][first + v] = add_exact(group[r][first + v], found[r][v], by); });
                        });
                    });
                });
                p += number_bytes(as);
                q += block_size;
                scales += parts * panel_width;
            }
            each<R>([&](auto r) ALWAYS_INLINE {
                const float by = scale[r * groups + g];
                each<vectors>([&](auto v) ALWAYS_INLINE { all[r][v] = all[r][v] + group[r][v] * by; });
            });
        }
        each<vectors>([&](auto v) ALWAYS_INLINE {
            constexpr int32_t output = lanes * v;
            const Floats step = half_floats(w + 2 * output), down = half_floats(w + 2 * (panel_width + output));
            const uint8_t* least = w + 4 * panel_width + 4 * output;
            each<R>([&](auto r) ALWAYS_INLINE {
                float* sum = sums + r * panel_width + output;
                Floats total = load_lanes(sum) + all[r][v] * step;
                if constexpr (has_least(form)) {
                    const int8_t* by = leasts + (r * supers + s) * 16;
                    const Bytes low = small_bytes(least), high = small_bytes(least + 4 * panel_width);
                    const Ints upper = dot(dot(ints(0), low, four(by)), high, four(by + 4));
                    const Ints found = dot(dot(times128(upper), low, four(by + 8)), high, four(by + 12));
                    total = total - floats(found) * least_step[r * supers + s] * down;
                }
                store_lanes(sum, total);
            });
        });
    }
}

// The same for weights of -1, 0 and 1. Loops in place of `each`: in a loop over steps its sums would not stay in registers.
template <int R>
static void tile_ternary(const uint8_t* w, const Quantized& a, int32_t row, float* sums, Ahead ahead) {
    constexpr int32_t V = side_by_side<R, rows2>;
    constexpr bool narrow = narrow_steps<rows2> > 0;
    const int32_t groups = a.groups();
    const int64_t stride = a.width;
    const int8_t* q = a.q + row * stride;
    const float* scale = a.scale + int64_t(row) * groups;
    const int32_t* totals = a.sums + int64_t(row) * 4 * groups;
    for (int i = 0; i < R * vectors; ++i) store_lanes(sums + i * lanes, Floats{});
    for (int32_t g = 0; g < groups; ++g, w += ternary_bytes, q += group_size) {
        for (int32_t i = 0; i < ternary_bytes; i += 64) __builtin_prefetch(ahead.next + i, 0, 2);
        ahead.next += ahead.step;
        for (int32_t first = 0; first < vectors; first += V) {
            Ints acc[R][V];
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < V; ++v) acc[r][v] = ints(narrow ? 0 : too_much<rows2>(totals, r * groups + g, 0));
            for (int32_t step = 0; step < group_size / 4; step += 2) {
#pragma GCC unroll 2
                for (int32_t odd = 0; odd < 2; ++odd) {
                    Bytes of[V];
#pragma GCC unroll 8
                    for (int v = 0; v < V; ++v) of[v] = two_bits(w + step / 2 * 64 + at_vector(first + v), 2 * odd + half_of(first + v));
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        const Four x = four(q + r * stride + 4 * (step + odd));
#pragma GCC unroll 8
                        for (int v = 0; v < V; ++v) {
                            if constexpr (narrow) acc[r][v] = add16(acc[r][v], products16(of[v], x));
                            else acc[r][v] = dot(acc[r][v], of[v], x);
                        }
                    }
                }
            }
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < V; ++v) {
                    if constexpr (narrow) acc[r][v] = add_pairs(ints(too_much<rows2>(totals, r * groups + g, 0)), acc[r][v]);
                    float* sum = sums + r * panel_width + lanes * (first + v);
                    store_lanes(sum, load_lanes(sum) + floats(acc[r][v]) * scale[r * groups + g]);
                }
        }
    }
}

// How many rows are multiplied with a load of weights. Without products of bytes the fourth only shares what unpacking five
// and six bits takes, and of few rows two tiles hide the reading better than one.
constexpr int32_t most_rows(Form form) {
    const Form base = base_of(form);
    if (DECODERY_NARROW && base != blocks5 && base != blocks6 && base != rows2) return 3;
    return base == rows8 || base == rows2 ? DECODERY_TILE_ROWS : DECODERY_BLOCK_ROWS;
}

template <int R, Form form>
INLINE void tile_as(const uint8_t* w, const Quantized& a, int32_t row, float* sums, Ahead ahead) {
    if constexpr (R > most_rows(form)) return;
#if DECODERY_PAIRS
    else if constexpr (R > 1 && (form == rows8 || form == rows2)) return tile_pairs<R, form>(w, a, row, sums, ahead);
#endif
    else if constexpr (form == rows8) return tile<R>(w, a, row, sums, ahead);
    else if constexpr (form == rows2) return tile_ternary<R>(w, a, row, sums, ahead);
    else {
        for (int i = 0; i < R * vectors; ++i) store_lanes(sums + i * lanes, Floats{});
        if constexpr (is_super(form)) tile_supers<R, form, base_of(form)>(w, w, a, row, {0, a.supers()}, sums, ahead);
        else tile_blocks<R, form, form>(w, w, a, row, {0, 2 * a.groups()}, sums, ahead);
    }
}

template <int R>
INLINE void tile_any(Form form, const uint8_t* w, const Quantized& a, int32_t row, float* sums, Ahead ahead) {
    switch (form) {
        case rows2: return tile_as<R, rows2>(w, a, row, sums, ahead);
        case blocks4: return tile_as<R, blocks4>(w, a, row, sums, ahead);
        case table4: return tile_as<R, table4>(w, a, row, sums, ahead);
        case blocks5: return tile_as<R, blocks5>(w, a, row, sums, ahead);
        case blocks6: return tile_as<R, blocks6>(w, a, row, sums, ahead);
        case blocks8: return tile_as<R, blocks8>(w, a, row, sums, ahead);
        case super4: return tile_as<R, super4>(w, a, row, sums, ahead);
        case super_table4: return tile_as<R, super_table4>(w, a, row, sums, ahead);
        case super5: return tile_as<R, super5>(w, a, row, sums, ahead);
        case super6: return tile_as<R, super6>(w, a, row, sums, ahead);
        case float4: return tile_as<R, float4>(w, a, row, sums, ahead);
        case mxfp4s: return tile_as<R, mxfp4s>(w, a, row, sums, ahead);
        default: return tile_as<R, rows8>(w, a, row, sums, ahead);
    }
}

static void tile_rows(int32_t r, Form form, const uint8_t* w, const Quantized& a, int32_t row, float* sums, Ahead ahead) {
    switch (r) {
        case 1: return tile_any<1>(form, w, a, row, sums, ahead);
        case 2: return tile_any<2>(form, w, a, row, sums, ahead);
#if DECODERY_TILE_ROWS > 2
        case 3: return tile_any<3>(form, w, a, row, sums, ahead);
#endif
#if DECODERY_TILE_ROWS > 3
        case 4: return tile_any<4>(form, w, a, row, sums, ahead);
        case 5: return tile_any<5>(form, w, a, row, sums, ahead);
        case 6: return tile_any<6>(form, w, a, row, sums, ahead);
        case 7: return tile_any<7>(form, w, a, row, sums, ahead);
        case 8: return tile_any<8>(form, w, a, row, sums, ahead);
#endif
    }
}

#if DECODERY_UNPACK
// Rows from which on the numbers of a block, or super-block, are unpacked once for all of them, and as many as share that.
constexpr int32_t unpacked_from = 12, unpacked_rows = 64;
// Those of super4 take as long to store and read again as to unpack for every four rows.
constexpr bool is_packed(Form form) { return form != super4 && form != rows8 && form != rows2 && form != blocks8 && !is_floating(form); }

// Numbers of blocks to those that blocks8 keeps.
template <Form form>
INLINE void unpack(const uint8_t* p, uint8_t* to) {
    each<block_size / 4>([&](auto step) ALWAYS_INLINE {
        each<vectors>([&](auto v) ALWAYS_INLINE { put(to + 64 * (2 * step + v), numbers<form>(p, step, v)); });
    });
}
template <Form form>
static void tile_unpacked(const uint8_t* w, const Quantized& a, int32_t row, int32_t rows, float* sums, Ahead ahead) {
    constexpr Form base = base_of(form);
    constexpr int32_t at_once = super_size / block_size, bytes = number_bytes(blocks8);
    alignas(64) uint8_t room[at_once * bytes];
    for (int i = 0; i < rows * vectors; ++i) store_lanes(sums + i * lanes, Floats{});
    for (int32_t b = 0, blocks = 2 * a.groups(); b < blocks; b += at_once) {
        const int32_t count = blocks - b < at_once ? blocks - b : at_once;
        for (int32_t i = 0; i < count; ++i) {
            const uint8_t* group = w + (b + i) / 2 * 2 * block_bytes(base);
            const uint8_t* p = is_super(form) ? w + b / at_once * super_bytes(form) + super_numbers(form) + i * number_bytes(form) : group + numbers_at(base, (b + i) % 2);
            unpack<base>(p, room + i * bytes);
        }
        in_parts<most_rows(form)>(rows, [&](int32_t first, auto some) {
            constexpr int32_t R = decltype(some)::value;
            float* own = sums + first * panel_width;
            if constexpr (is_super(form)) tile_supers<R, form, blocks8>(w, room, a, row + first, {b / at_once, b / at_once + 1}, own, ahead);
            else tile_blocks<R, form, blocks8>(w, room, a, row + first, {b, b + count}, own, ahead);
            ahead.next += count * ahead.step;
        });
    }
}
static void tile_many(Form form, const uint8_t* w, const Quantized& a, int32_t row, int32_t rows, float* sums, Ahead ahead) {
    switch (form) {
        case blocks4: return tile_unpacked<blocks4>(w, a, row, rows, sums, ahead);
        case table4: return tile_unpacked<table4>(w, a, row, rows, sums, ahead);
        case blocks5: return tile_unpacked<blocks5>(w, a, row, rows, sums, ahead);
        case blocks6: return tile_unpacked<blocks6>(w, a, row, rows, sums, ahead);
        case super_table4: return tile_unpacked<super_table4>(w, a, row, rows, sums, ahead);
        case super5: return tile_unpacked<super5>(w, a, row, rows, sums, ahead);
        case super6: return tile_unpacked<super6>(w, a, row, rows, sums, ahead);
        case float4: return tile_unpacked<float4>(w, a, row, rows, sums, ahead);
        default: return tile_unpacked<mxfp4s>(w, a, row, rows, sums, ahead);
    }
}
#endif

constexpr int32_t float_rows = DECODERY_FLOAT_ROWS;    // that share a load of weights in floating point

// The same for rows of floats and weights in bfloat16 or half precision, summed in the order of the inputs.
template <int R, bool half>
static void tile16(const uint8_t* w, const float* x, int32_t in, float* sums, Ahead ahead) {
    // What is read at once gives two vectors of outputs, 16 apart.
    constexpr int32_t V = R > 2 ? 1 : 16 / lanes;
    each<16 / lanes / V>([&](auto side) ALWAYS_INLINE {
        constexpr int32_t first = side * V;
        Floats acc[R][V][2] = {};
        const uint8_t* p = w;
#pragma GCC unroll 2
        for (int32_t k = 0; k < in; ++k, p += 2 * panel_width) {
            if (first == 0) __builtin_prefetch(ahead.next, 0, 2), ahead.next += ahead.step;
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
        each<R>([&](auto r) ALWAYS_INLINE {
            each<V>([&](auto v) ALWAYS_INLINE {
                store_lanes(sums + r * panel_width + lanes * (first + v), acc[r][v][0]);
                store_lanes(sums + r * panel_width + lanes * (first + v) + 16, acc[r][v][1]);
            });
        });
    });
}

// The same for weights in float8, group by group.
template <int R>
static void tile8(const uint8_t* w, const float* x, int32_t in, float* sums, Ahead ahead) {
    constexpr int32_t V = R > 2 ? vectors / 2 : vectors;
    each<vectors / V>([&](auto side) ALWAYS_INLINE {
        constexpr int32_t first = side * V;
        Floats total[R][V] = {};
        const uint8_t* group = w;
        for (int32_t g = 0; g < in; g += float8_group, group += float8_bytes) {
            Floats acc[R][V] = {};
            const uint8_t* p = group + 4 * panel_width;
            const int32_t end = g + float8_group < in ? g + float8_group : in;
            for (int32_t k = g; k < end; ++k, p += panel_width) {
                if (first == 0) __builtin_prefetch(ahead.next, 0, 2), ahead.next += ahead.step;
                each<V>([&](auto v) ALWAYS_INLINE {
                    const Floats of = small_floats(p + lanes * (first + v));
                    each<R>([&](auto r) ALWAYS_INLINE { acc[r][v] = acc[r][v] + of * x[int64_t(r) * in + k]; });
                });
            }
            each<V>([&](auto v) ALWAYS_INLINE {
                const Floats scale = load_lanes(reinterpret_cast<const float*>(group) + lanes * (first + v));
                each<R>([&](auto r) ALWAYS_INLINE { total[r][v] = total[r][v] + acc[r][v] * scale; });
            });
        }
        each<R>([&](auto r) ALWAYS_INLINE {
            each<V>([&](auto v) ALWAYS_INLINE { store_lanes(sums + r * panel_width + lanes * (first + v), total[r][v]); });
        });
    });
}

// The same for codes of four bits; every fourth input asks for as many bytes as four have.
template <int R>
static void tile_codes(const uint8_t* w, const float* x, int32_t in, float* sums, Ahead ahead) {
    constexpr int32_t V = R > 2 ? vectors / 2 : vectors;
    const float* table = reinterpret_cast<const float*>(w);
    each<vectors / V>([&](auto side) ALWAYS_INLINE {
        constexpr int32_t first = side * V;
        Floats total[R][V] = {};
        const uint8_t* group = w + codes4_table;
        for (int32_t g = 0; g < in; g += codes4_group, group += codes4_bytes) {
            Floats acc[R][V] = {};
            const uint8_t* p = group + 4 * panel_width;
            const int32_t end = g + codes4_group < in ? g + codes4_group : in;
            for (int32_t k = g; k < end; ++k, p += panel_width / 2) {
                if (first == 0 && k % 4 == 0) __builtin_prefetch(ahead.next, 0, 2), ahead.next += ahead.step;
                each<V>([&](auto v) ALWAYS_INLINE {
                    constexpr int32_t vector = first + v, half = half_of(vector);
                    const Floats of = coded_floats<half>(table, p + lanes * (vector % (vectors / 2)));
                    each<R>([&](auto r) ALWAYS_INLINE { acc[r][v] = acc[r][v] + of * x[int64_t(r) * in + k]; });
                });
            }
            each<V>([&](auto v) ALWAYS_INLINE {
                const Floats scale = load_lanes(reinterpret_cast<const float*>(group) + lanes * (first + v));
                each<R>([&](auto r) ALWAYS_INLINE { total[r][v] = total[r][v] + acc[r][v] * scale; });
            });
        }
        each<R>([&](auto r) ALWAYS_INLINE {
            each<V>([&](auto v) ALWAYS_INLINE { store_lanes(sums + r * panel_width + lanes * (first + v), total[r][v]); });
        });
    });
}

template <int R>
INLINE void tile_float(Form form, const uint8_t* w, const float* x, int32_t in, float* sums, Ahead ahead) {
    if (form == float8) return tile8<R>(w, x, in, sums, ahead);
    if (form == codes4) return tile_codes<R>(w, x, in, sums, ahead);
    return form == float16s ? tile16<R, true>(w, x, in, sums, ahead) : tile16<R, false>(w, x, in, sums, ahead);
}

static void tile_floats(int32_t r, Form form, const uint8_t* w, const float* x, int32_t in, float* sums, Ahead ahead) {
    switch (r) {
        case 1: return tile_float<1>(form, w, x, in, sums, ahead);
        case 2: return tile_float<2>(form, w, x, in, sums, ahead);
        case 3: return tile_float<3>(form, w, x, in, sums, ahead);
        case 4: return tile_float<4>(form, w, x, in, sums, ahead);
#if DECODERY_FLOAT_ROWS > 4
        case 5: return tile_float<5>(form, w, x, in, sums, ahead);
        case 6: return tile_float<6>(form, w, x, in, sums, ahead);
        case 7: return tile_float<7>(form, w, x, in, sums, ahead);
        case 8: return tile_float<8>(form, w, x, in, sums, ahead);
#endif
    }
}

#if DECODERY_TILES
#include "amx.h"
#endif

#if DECODERY_UNPACK
constexpr int32_t most_sums = unpacked_rows;
#else
constexpr int32_t most_sums = float_rows > DECODERY_TILE_ROWS ? float_rows : DECODERY_TILE_ROWS;
#endif

// out(panel, row, first 16 outputs, second 16) for all rows and this thread's panels. tiles: whether AMX may be used.
template <class Out>
static void multiply(const Linear& linear, const Quantized& a, int32_t rows, bool tiles, int32_t thread, const Team& team, const Out& out) {
    const bool floating = is_floating(linear.form);
    const int32_t most = floating ? float_rows : most_rows(linear.form);
    alignas(64) float sums[most_sums * panel_width];
    const int64_t size = panel_bytes(linear.form, linear.in);
    const int64_t step = asked_bytes(linear.form);
    // Numbers of mxfp4s are summed as twice what they are.
    const f16 whole = splat(linear.form == mxfp4s ? 0.5f : 1.0f);
    const Range mine = share(panels(linear), thread, team.threads);
    int32_t many = 0;
#if DECODERY_TILES
    if (tiles) many = amx_share(linear.form, rows);
    const Tiles held(many > 0, TileShapes(summed_inputs(linear.form)));
#else
    (void)tiles;
#endif
    const int32_t blocks = (rows - many + most - 1) / most;
#if DECODERY_UNPACK
    const bool unpacks = is_packed(linear.form) && rows - many >= unpacked_from;
#endif
    for (int32_t p = mine.begin; p < mine.end; ++p) {
        const uint8_t* w = linear.weight + p * size;
        const bool scaled = linear.scale != nullptr;
        const f16 s0 = scaled ? load(linear.scale + p * panel_width) : whole;
        const f16 s1 = scaled ? load(linear.scale + p * panel_width + 16) : whole;
        const auto finish = [&](int32_t begin, int32_t end, const float* sum) ALWAYS_INLINE {
            for (int32_t row = begin; row < end; ++row, sum += panel_width) {
                f16 y0 = load(sum) * s0, y1 = load(sum + 16) * s1;
                if (linear.bias != nullptr) {
                    y0 = y0 + load(linear.bias + p * panel_width);
                    y1 = y1 + load(linear.bias + p * panel_width + 16);
                }
                out(p, row, y0, y1);
            }
        };
#if DECODERY_TILES
        if (many > 0) multiply_many(linear, w, w + size, a, many, finish);
#endif
#if DECODERY_UNPACK
        if (unpacks) {
            const int32_t parts = (rows - many + unpacked_rows - 1) / unpacked_rows;
            for (int32_t part = 0; part < parts; ++part) {
                const Range span = share(rows - many, part, parts);
                const int32_t count = span.end - span.begin, first = many + span.begin, shares = (count + most - 1) / most;
                tile_many(linear.form, w, a, first, count, sums, {w + size + size / parts * part, step / parts / shares});
                finish(first, first + count, sums);
            }
            continue;
        }
#endif
        for (int32_t block = 0; block < blocks; ++block) {
            const Range span = share(rows - many, block, blocks);
            const int32_t count = span.end - span.begin, first = many + span.begin;
            // Of several blocks of rows the first would wait for its weights: all ask for a part of the next panel's, so
            // that memory is read while any of them multiplies.
            const Ahead asked = blocks == 1 ? Ahead{w + 16384, step} : Ahead{w + size + size / blocks * block, step / blocks};
            const float* x = a.floats + int64_t(first) * linear.in;
            if (floating) tile_floats(count, linear.form, w, x, linear.in, sums, asked);
            else tile_rows(count, linear.form, w, a, first, sums, asked);
            finish(first, first + count, sums);
        }
    }
}
