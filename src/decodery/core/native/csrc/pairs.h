// Rows of activations two by two: an instruction multiplies eight bytes of each with eight of each of two outputs. Sums
// are the same whole numbers as one by one. Included by gemm.h.

// Pairs of R rows, and vectors of outputs that fit the registers with them.
template <int R>
constexpr int32_t pairs_of = (R + 1) / 2;
template <int R>
constexpr int32_t beside_pairs = pairs_of<R> == 1 ? 8 : pairs_of<R> == 2 ? 4 : 2;

// found[r][v]: integers of R rows and V vectors over steps [from, to) of eight inputs; an odd row is its own companion.
template <int R, int V, Form form, class Begin>
INLINE void pair_sums(const uint8_t* w, const int8_t* q, int64_t stride, int32_t first, int32_t from, int32_t to, const Begin& begin, Ints (&found)[R][V]) {
    constexpr int32_t P = pairs_of<R>;
    // Of a pair and a vector: both rows' sums of its first two outputs, and of its last two.
    Ints acc[P][V][2];
    each<P>([&](auto p) ALWAYS_INLINE {
        constexpr int32_t other = 2 * p + 1 < R ? 2 * p + 1 : R - 1;
        const Ints both = first_row(ints(begin(2 * p)), ints(begin(other)));
        each<V>([&](auto v) ALWAYS_INLINE { acc[p][v][0] = acc[p][v][1] = both; });
    });
    for (int32_t k = from; k < to; ++k) {
        Bytes x[P];
        each<P>([&](auto p) ALWAYS_INLINE {
            constexpr int32_t other = 2 * p + 1 < R ? 2 * p + 1 : R - 1;
            x[p] = two_rows(q + 2 * p * stride + 8 * k, q + other * stride + 8 * k);
        });
        each<V>([&](auto v) ALWAYS_INLINE {
            const Bytes low = numbers<form>(w, 2 * k, first + v), high = numbers<form>(w, 2 * k + 1, first + v);
            const Bytes front = first_outputs(low, high), back = last_outputs(low, high);
            each<P>([&](auto p) ALWAYS_INLINE {
                acc[p][v][0] = products(acc[p][v][0], x[p], front);
                acc[p][v][1] = products(acc[p][v][1], x[p], back);
            });
        });
    }
    each<R>([&](auto r) ALWAYS_INLINE {
        each<V>([&](auto v) ALWAYS_INLINE {
            const Ints* both = acc[r / 2][v];
            found[r][v] = r % 2 == 0 ? first_row(both[0], both[1]) : second_row(both[0], both[1]);
        });
    });
}

template <int R, Form form>
constexpr int32_t outputs_at_a_time = R > 1 ? beside_pairs<R> : side_by_side<R, form>;
template <int R, int V, Form form, int parts, class Begin>
INLINE void block_sums(const uint8_t* w, const int8_t* q, int64_t stride, int32_t first, int32_t part, const Begin& begin, Floats (&found)[R][V]) {
    if constexpr (R == 1) return row_sums<R, V, form, parts>(w, q, stride, first, part, begin, found);
    else {
        constexpr int32_t steps = block_size / 8 / parts;
        Ints whole[R][V];
        pair_sums<R, V, form>(w, q, stride, first, part * steps, (part + 1) * steps, begin, whole);
        each<R>([&](auto r) ALWAYS_INLINE {
            each<V>([&](auto v) ALWAYS_INLINE { found[r][v] = floats(whole[r][v]); });
        });
    }
}

// sums[r][32] for R rows and one panel of rows8 or rows2.
template <int R, Form form>
static void tile_pairs(const uint8_t* w, const Quantized& a, int32_t row, float* sums, Ahead ahead) {
    constexpr int32_t V = beside_pairs<R>, bytes = form == rows8 ? group_size * panel_width : ternary_bytes;
    const int32_t groups = a.groups();
    const int64_t stride = a.width;
    const int8_t* q = a.q + row * stride;
    const float* scale = a.scale + int64_t(row) * groups;
    const int32_t* totals = a.sums + int64_t(row) * 4 * groups;
    for (int i = 0; i < R * vectors; ++i) store_lanes(sums + i * lanes, Floats{});
    for (int32_t g = 0; g < groups; ++g, w += bytes, q += group_size) {
        for (int32_t i = 0; i < bytes; i += 64) __builtin_prefetch(ahead.next + i, 0, 2);
        ahead.next += form == rows8 ? ahead.step * (group_size / 4) : ahead.step;
        each<vectors / V>([&](auto side) ALWAYS_INLINE {
            constexpr int32_t first = side * V;
            Ints found[R][V];
            pair_sums<R, V, form>(w, q, stride, first, 0, group_size / 8,
                                  [&](int32_t r) ALWAYS_INLINE { return form == rows8 ? 0 : too_much<rows2>(totals, r * groups + g, 0); }, found);
            each<R>([&](auto r) ALWAYS_INLINE {
                each<V>([&](auto v) ALWAYS_INLINE {
                    float* sum = sums + r * panel_width + lanes * (first + v);
                    store_lanes(sum, load_lanes(sum) + floats(found[r][v]) * scale[r * groups + g]);
                });
            });
        });
    }
}
