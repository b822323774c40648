// Products of queries with pages of keys, and of weights with values: what attention's time goes to. Included once per
// instruction set.

// Of vectors, or pages, and queries that stay in registers together.
#if DECODERY_REGISTERS >= 32
constexpr int32_t key_tiles = 2, key_queries = 6, value_vectors = 4, value_queries = 3, float_vectors = 4, float_queries = 6;
#elif DECODERY_HALVES
constexpr int32_t key_tiles = 1, key_queries = 3, value_vectors = 2, value_queries = 3, float_vectors = 2, float_queries = 3;
#elif defined(__aarch64__)
constexpr int32_t key_tiles = 1, key_queries = 3, value_vectors = 4, value_queries = 3, float_vectors = 1, float_queries = 4;
#else
constexpr int32_t key_tiles = 1, key_queries = 1, value_vectors = 1, value_queries = 1, float_vectors = 1, float_queries = 1;
#endif
constexpr int32_t tile_vectors = page_slots / lanes;

// One layer's pages of one key-value head of a sequence.
template <class E>
struct Pages {
    char* base;
    const int32_t* table;
    int64_t bytes;    // of a page

    char* operator[](int32_t slot) const { return base + table[slot / page_slots] * bytes; }
};

// What is added to scores [begin, end) of what a query sees.
struct Lowered {
    int32_t begin, end;
    float by;

    Lowered from(int32_t first) const { return {begin - first, end - first, by}; }
};

// One query, already scaled: what it sees, what it works in, and what comes of it.
struct Query {
    const float* q;             // of float16 pages rounded to 13 bits
    const int8_t* numbers;      // of coded pages: q in integers, see code_query
    int32_t begin[2];           // where sums of their products begin
    float step;
    Visible seen;
    int32_t source;             // whose pages
    float* scores;              // of a chunk; then its weights
    uint8_t* weights[2];        // of coded pages: the weights in integers, as the chunk's values lie
    int32_t weight_begin[2];
    float weight_step;
    float* chunk;               // [wide]: a chunk's weighted sum of values
    float* sum;                 // [wide]: that of the chunks so far, their largest score and sum of exponentials
    float largest, total;
    float* out;
    const float* sink;          // a score without a value, or null
    Lowered lowered;
    float *given, *mass;        // where weights and the logarithm of their sum go, or null

    int32_t run() const { return seen.end - seen.begin; }
};

// Asks for what is needed soon: a text's pages are more than what the machine foresees.
INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Scores of Q queries and T pages; to(i): where the 16 T scores of the i-th go. As many bytes as keys have are asked for
// meanwhile at each of `ahead`.
template <int Q, int T, class To>
INLINE void score_tiles(const Query* queries, char* const* pages, char* const* ahead, int32_t, int32_t wide, Coded, const To& to) {
    constexpr int32_t V = T * tile_vectors;
    Ints upper[Q][V], lower[Q][V];
    each<Q>([&](auto i) ALWAYS_INLINE {
        each<V>([&](auto v) ALWAYS_INLINE { upper[i][v] = ints(queries[i].begin[0]), lower[i][v] = ints(queries[i].begin[1]); });
    });
    for (int32_t d = 0; d < wide; d += 4) {
        Bytes keys[V];
        each<T>([&](auto t) ALWAYS_INLINE { fetch(ahead[t] + d * page_slots); });
        each<V>([&](auto v) ALWAYS_INLINE {
            const char* key = pages[v / tile_vectors] + d * page_slots + v % tile_vectors * int32_t(sizeof(Bytes));
            keys[v] = weights(reinterpret_cast<const uint8_t*>(key));
        });
        each<Q>([&](auto i) ALWAYS_INLINE {
            const Four high = four(queries[i].numbers + d), low = four(queries[i].numbers + wide + d);
            each<V>([&](auto v) ALWAYS_INLINE { upper[i][v] = dot(upper[i][v], keys[v], high); });
            each<V>([&](auto v) ALWAYS_INLINE { lower[i][v] = dot(lower[i][v], keys[v], low); });
        });
    }
    float scales[T * page_slots];
    for (int32_t t = 0; t < T; ++t) store(scales + t * page_slots, load(reinterpret_cast<const Bf16*>(scales_of(pages[t], 0, wide))));
    each<Q>([&](auto i) ALWAYS_INLINE {
        each<V>([&](auto v) ALWAYS_INLINE {
            const Ints all = add_ints(times128(upper[i][v]), lower[i][v]);
            store_lanes(to(i) + v * lanes, floats(all) * (load_lanes(scales + v * lanes) * queries[i].step));
        });
    });
}
template <class E>
INLINE f16 added(f16 sum, f16 x, f16 y) {
    if constexpr (std::is_same<E, Half>::value) return sum_of_exact(sum, x, y);
    else return sum + x * y;
}
template <int Q, int T, class E, class To>
INLINE void score_tiles(const Query* queries, char* const* pages, char* const* ahead, int32_t dim, int32_t wide, E, const To& to) {
    f16 sums[Q][T];
    each<Q>([&](auto i) ALWAYS_INLINE { each<T>([&](auto t) ALWAYS_INLINE { sums[i][t] = splat(0.0f); }); });
    for (int32_t d = 0; d < dim; ++d) {
        f16 keys[T];
        each<T>([&](auto t) ALWAYS_INLINE {
            if (d * page_slots * sizeof(E) % 64 == 0) fetch(ahead[t] + d * page_slots * int32_t(sizeof(E)));
            keys[t] = load(numbers_of<E>(pages[t], 0, wide) + d * page_slots);
        });
        each<Q>([&](auto i) ALWAYS_INLINE {
            const f16 q = splat(queries[i].q[d]);
            each<T>([&](auto t) ALWAYS_INLINE { sums[i][t] = added<E>(sums[i][t], keys[t], q); });
        });
    }
    each<Q>([&](auto i) ALWAYS_INLINE { each<T>([&](auto t) ALWAYS_INLINE { store(to(i) + t * page_slots, sums[i][t]); }); });
}
// Of all queries and n pages.
template <class E, class To>
static void score_pages(const Query* queries, int32_t count, char* const* pages, char* const* ahead, int32_t n, int32_t dim, int32_t wide, const To& to) {
    in_parts<key_tiles>(n, [&](int32_t at, auto tiles) {
        constexpr int32_t T = decltype(tiles)::value;
        in_parts<key_queries>(count, [&](int32_t first, auto some) {
            score_tiles<decltype(some)::value, T>(queries + first, pages + at, ahead + at, dim, wide, E(),
                                                  [&](int32_t i) { return to(first + i) + at * page_slots; });
        });
    });
}

// Coded values: `quads` are n times four slots' values, for which every query has four weights. As much at each of `next`
// is asked for meanwhile.
template <int Q, int V>
INLINE void add_quads(const Query* queries, char* const* quads, char* const* next, int32_t n, int32_t vector) {
    Ints upper[Q][V], lower[Q][V];
    each<Q>([&](auto i) ALWAYS_INLINE {
        each<V>([&](auto v) ALWAYS_INLINE {
            upper[i][v] = ints(queries[i].weight_begin[0]);
            lower[i][v] = ints(queries[i].weight_begin[1]);
        });
    });
    const int32_t at = vector * int32_t(sizeof(Bytes));
    for (int32_t k = 0; k < n; ++k) {
        Bytes values[V];
        each<V>([&](auto v) ALWAYS_INLINE {
            if (v * sizeof(Bytes) % 64 == 0) fetch(next[k] + at + v * int32_t(sizeof(Bytes)));
            values[v] = weights(reinterpret_cast<const uint8_t*>(quads[k]) + at + v * int32_t(sizeof(Bytes)));
        });
        each<Q>([&](auto i) ALWAYS_INLINE {
            const Four high = four(reinterpret_cast<const int8_t*>(queries[i].weights[0]) + 4 * k);
            const Four low = four(reinterpret_cast<const int8_t*>(queries[i].weights[1]) + 4 * k);
            each<V>([&](auto v) ALWAYS_INLINE { upper[i][v] = dot(upper[i][v], values[v], high); });
            each<V>([&](auto v) ALWAYS_INLINE { lower[i][v] = dot(lower[i][v], values[v], low); });
        });
    }
    each<Q>([&](auto i) ALWAYS_INLINE {
        each<V>([&](auto v) ALWAYS_INLINE {
            const Floats all = floats(upper[i][v]) * 128.0f + floats(lower[i][v]);
            store_lanes(queries[i].chunk + (vector + v) * lanes, all * queries[i].weight_step);
        });
    });
}
static void add_coded(const Query* queries, int32_t count, char* const* quads, char* const* next, int32_t n, int32_t wide) {
    in_parts<value_vectors>(wide / lanes, [&](int32_t vector, auto beside) {
        in_parts<value_queries>(count, [&](int32_t first, auto some) {
            add_quads<decltype(some)::value, decltype(beside)::value>(queries + first, quads, next, n, vector);
        });
    });
}

// Values in floating point: rows [from, end) of a chunk. As much at each of `next` is asked for meanwhile.
template <int Q, int V, class E>
INLINE void add_rows(const Query* queries, const E* const* rows, const E* const* next, int32_t from, int32_t end, int32_t vector) {
    f16 sums[Q][V];
    each<Q>([&](auto i) ALWAYS_INLINE {
        each<V>([&](auto v) ALWAYS_INLINE { sums[i][v] = from == 0 ? splat(0.0f) : load(queries[i].chunk + (vector + v) * 16); });
    });
    for (int32_t k = from; k < end; ++k) {
        f16 values[V];
        each<V>([&](auto v) ALWAYS_INLINE {
            if (v * 16 * sizeof(E) % 64 == 0) fetch(next[k] + (vector + v) * 16);
            values[v] = load(rows[k] + (vector + v) * 16);
        });
        each<Q>([&](auto i) ALWAYS_INLINE {
            const f16 weight = splat(queries[i].scores[k]);
            each<V>([&](auto v) ALWAYS_INLINE { sums[i][v] = added<E>(sums[i][v], values[v], weight); });
        });
    }
    each<Q>([&](auto i) ALWAYS_INLINE {
        each<V>([&](auto v) ALWAYS_INLINE { store(queries[i].chunk + (vector + v) * 16, sums[i][v]); });
    });
}
template <class E>
static void add_floats(const Query* queries, int32_t count, const E* const* rows, const E* const* next, int32_t from, int32_t end, int32_t wide) {
    in_parts<float_vectors>(wide / 16, [&](int32_t vector, auto beside) {
        in_parts<float_queries>(count, [&](int32_t first, auto some) {
            add_rows<decltype(some)::value, decltype(beside)::value>(queries + first, rows, next, from, end, vector);
        });
    });
}
