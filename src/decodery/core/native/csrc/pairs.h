// Rows of activations two by two: an instruction multiplies eight bytes of each with eight of each of two outputs. Sums
// are the same whole numbers as one by one, and are added up as floats in the same order. Included by gemm.h.

// sums[r][32] for R rows and one panel; an odd row is its own companion.
template <int R, Form form>
static void tile_pairs(const uint8_t* w, const Quantized& a, int32_t row, float* sums, Ahead ahead) {
    constexpr int32_t P = (R + 1) / 2, V = P == 1 ? 8 : P == 2 ? 4 : 2;    // pairs, and vectors of outputs at a time
    constexpr bool blocks = form != rows8 && form != rows2;
    constexpr int32_t parts = blocks ? halves_of(form) : 1, inputs = inputs_of(form);
    constexpr int32_t steps = inputs / 8 / parts;
    constexpr int32_t head = blocks ? 4 * panel_width : 0, bytes = form == rows8 ? group_size * panel_width : asked_bytes(form);
    const int32_t count = a.width / inputs;
    const int8_t* q = a.q + int64_t(row) * a.width;
    const float* scale = a.scale + int64_t(row) * a.groups();
    const float* halves = a.halves + int64_t(row) * 2 * a.groups();
    const int32_t* totals = a.sums + int64_t(row) * 4 * a.groups();
    for (int i = 0; i < R * vectors; ++i) store_lanes(sums + i * lanes, Floats{});
    for (int32_t b = 0; b < count; ++b, w += bytes, q += inputs) {
        for (int32_t i = 0; i < bytes; i += 64) __builtin_prefetch(ahead.next + i, 0, 2);
        ahead.next += form == rows8 ? ahead.step * (group_size / 4) : ahead.step;
        const auto begin = [&](int32_t r, int32_t part) { return ints(form == rows8 ? 0 : too_much<form>(totals, r * count + b, part)); };
        each<vectors / V>([&](auto side) ALWAYS_INLINE {
            constexpr int32_t first = side * V;
            each<parts>([&](auto part) ALWAYS_INLINE {
                // Of a pair and a vector: both rows' sums of its first two outputs, and of its last two.
                Ints acc[P][V][2];
                each<P>([&](auto p) ALWAYS_INLINE {
                    constexpr int32_t other = 2 * p + 1 < R ? 2 * p + 1 : R - 1;
                    const Ints both = first_row(begin(2 * p, part), begin(other, part));
                    each<V>([&](auto v) ALWAYS_INLINE { acc[p][v][0] = acc[p][v][1] = both; });
                });
                for (int32_t k = part * steps; k < (part + 1) * steps; ++k) {
                    Bytes x[P];
                    each<P>([&](auto p) ALWAYS_INLINE {
                        constexpr int32_t other = 2 * p + 1 < R ? 2 * p + 1 : R - 1;
                        x[p] = two_rows(q + 2 * p * int64_t(a.width) + 8 * k, q + other * int64_t(a.width) + 8 * k);
                    });
                    each<V>([&](auto v) ALWAYS_INLINE {
                        const Bytes low = numbers<form>(w + head, 2 * k, first + v), high = numbers<form>(w + head, 2 * k + 1, first + v);
                        const Bytes front = first_outputs(low, high), back = last_outputs(low, high);
                        each<P>([&](auto p) ALWAYS_INLINE {
                            acc[p][v][0] = products(acc[p][v][0], x[p], front);
                            acc[p][v][1] = products(acc[p][v][1], x[p], back);
                        });
                    });
                }
                each<V>([&](auto v) ALWAYS_INLINE {
                    constexpr int32_t output = lanes * (first + v);
                    const Floats step = blocks ? half_floats(w + 2 * (part * panel_width + output)) : Floats{};
                    const Floats least = has_least(form) ? half_floats(w + 2 * (panel_width + output)) : Floats{};
                    each<R>([&](auto r) ALWAYS_INLINE {
                        const Ints* both = acc[r / 2][v];
                        const Floats found = floats(r % 2 == 0 ? first_row(both[0], both[1]) : second_row(both[0], both[1]));
                        const float s = scale[r * a.groups() + (blocks ? b / 2 : b)];
                        float* sum = sums + r * panel_width + output;
                        const Floats total = load_lanes(sum) + (blocks ? found * step * s : found * s);
                        store_lanes(sum, has_least(form) ? total + least * halves[r * count + b] : total);
                    });
                });
            });
        });
    }
}
