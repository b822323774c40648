// Attention of queries that share one key-value head. Included once per instruction set.
//
// A row's visible slots have a logical order: cached slots, then its own pass's visible rows. Every score is a sum of
// its own, the softmax runs over lanes of the logical index, values are added in blocks of it. So the result is that of
// decoding one token at a time, whatever else is in the pass and whoever computes which part of it.

constexpr int32_t pages_ahead = 2;    // between the page that is read and the one that is asked for meanwhile

// One layer's keys, or values, of one head in the slots of a sequence.
template <class E>
struct Slots {
    char* base;
    const int32_t* pages;
    int64_t page_bytes;
    int64_t size;         // of a row
    int32_t kind;

    Slots() = default;
    Slots(const Segment& segment, int32_t layer, int32_t kind_, int32_t head, int32_t dim)
        : base(segment.base), pages(segment.table(layer, head)), page_bytes(segment.page_bytes), size(row_elements<E>(dim)),
          kind(kind_) {}

    E* operator[](int32_t slot) const {
        char* page = base + pages[slot / page_slots] * page_bytes;
        return reinterpret_cast<E*>(page + row_offset(kind, slot, size * int64_t(sizeof(E))));
    }
    // At most `most` of the slots [from, end) that lie side by side: how many they are, and where. next: where those some
    // pages later lie, null where they are beyond the end.
    const E* part(int32_t from, int32_t end, int32_t most, int32_t& n, const E*& next) const {
        const int32_t left = page_slots - from % page_slots, stop = end - from < left ? end - from : left;
        n = stop < most ? stop : most;
        const int32_t later = from + pages_ahead * page_slots;
        next = later < end ? (*this)[later] : nullptr;
        return (*this)[from];
    }
};

// One query, already scaled: what it sees, and what comes of it.
struct Query {
    const float* q;
    Visible seen;
    float* p;        // scores, then weights, by logical index
    float* blocks;   // sums of `value_block` values, `apart` floats from one to the next
    int64_t apart;
    float* sum;      // where every finished block is added at once, or null
    float* out;
    float *weights, *mass;    // where these go, or null
    const int16_t* numbers;   // q in whole numbers of `step`, where keys are coded
    float step;

    int32_t run() const { return seen.end - seen.begin; }
};

// Neighbouring queries of one segment.
template <class E>
struct Span {
    Slots<E> keys, values;
    int32_t first, count;
};

template <int C>
INLINE int32_t chunks(int32_t dim) { return C > 0 ? C : (dim + 15) / 16; }

// scores[i] = q . key(i) for i in [0, 16); every key is `dim` long.
template <int C, class E, class Key>
INLINE void score16(const float* q, int32_t dim, const Key& key, float* scores) {
#if DECODERY_HALVES
    if constexpr (C > 0) return score16_halves<C, E>(q, key, scores);
#endif
    f16 s[16];
#pragma GCC unroll 16
    for (int32_t i = 0; i < 16; ++i) {
        // This order of keys is what reduce16 puts into ascending lanes.
        const E* k = key((i % 4) * 4 + i / 4);
        s[i] = load(q) * load(k, C > 0 ? 16 : dim);
        for (int32_t c = 1; c < chunks<C>(dim); ++c)
            s[i] = s[i] + load(q + c * 16) * load(k + c * 16, C > 0 ? 16 : dim - c * 16);
    }
    store(scores, reduce16(s));
}

#if DECODERY_REGISTERS >= 32
// The same for all queries. Four keys at a time are loaded once; what four lanes hold of each sum waits in `parts`.
template <int C, class E, class Key>
INLINE void score16_all(const Query* queries, int32_t count, const Key& key, float (*parts)[4][16]) {
    for (int32_t g = 0; g < 4; ++g) {
        f16 k[4][C];
#pragma GCC unroll 4
        for (int32_t j = 0; j < 4; ++j)
#pragma GCC unroll 4
            for (int32_t c = 0; c < C; ++c) k[j][c] = load(key(j * 4 + g) + c * 16);
        for (int32_t i = 0; i < count; ++i) {
            const float* q = queries[i].q;
            f16 s[4];
#pragma GCC unroll 4
            for (int32_t j = 0; j < 4; ++j) s[j] = load(q) * k[j][0];
#pragma GCC unroll 4
            for (int32_t c = 1; c < C; ++c)
#pragma GCC unroll 4
                for (int32_t j = 0; j < 4; ++j) s[j] = s[j] + load(q + c * 16) * k[j][c];
            store(parts[i][g], reduce4(s));
        }
    }
}
#endif

// Scores of n keys, at most 16, for all queries; to(i): where those of the i-th go.
template <int C, class E, class Key, class To>
INLINE void score_keys(const Query* queries, int32_t count, int32_t dim, int32_t n, const Key& key, const To& to) {
    if constexpr (is_coded<E>) {
        // A number that the compiler knows, so that it unrolls the loops over queries.
        if (count == 3) return score_coded<C>(queries, std::integral_constant<int32_t, 3>(), dim, n, key, to);
        return score_coded<C>(queries, count, dim, n, key, to);
    }
#if DECODERY_REGISTERS >= 32
    if constexpr (C == 4) {
        alignas(64) float parts[most_queries][4][16];
        score16_all<C, E>(queries, count, key, parts);
        for (int32_t i = 0; i < count; ++i) {
            const f16 fours[4] = {load(parts[i][0]), load(parts[i][1]), load(parts[i][2]), load(parts[i][3])};
            store(to(i), reduce_fours(fours), n);
        }
        return;
    }
#endif
    for (int32_t i = 0; i < count; ++i) {
        if (n >= 16) {
            score16<C, E>(queries[i].q, dim, key, to(i));
            continue;
        }
        float found[16];
        score16<C, E>(queries[i].q, dim, key, found);
        __builtin_memcpy(to(i), found, size_t(n) * sizeof(float));
    }
}

// Asks for elements before they are needed: the machine does not foresee which page follows.
template <class E>
INLINE void fetch(const E* from, int64_t elements) {
    const char* bytes = reinterpret_cast<const char*>(from);
    for (size_t i = 0; i < elements * sizeof(E); i += 64) __builtin_prefetch(bytes + i);
}

// `n` rows from `rows` on as floats: the rows themselves, or widened to `room`, so that all queries share the work.
// floats_next: the next ones, where they are still to be asked for.
template <int C>
INLINE const float* as_floats(const float* rows, const float* next, int32_t, int32_t, float*, const float*& floats_next) {
    floats_next = next;
    return rows;
}
template <int C>
INLINE const float* as_floats(const Half* rows, const Half* next, int32_t n, int32_t dim, float* room, const float*& floats_next) {
    for (int32_t i = 0; i < n * dim; i += 16) {
        if (next != nullptr && i % 32 == 0) fetch(next + i, 32);
        store(room + i, load(rows + i, C > 0 ? 16 : n * dim - i));
    }
    floats_next = nullptr;
    return room;
}

// Scores of n slots from `from` on, whose keys lie side by side at `rows`, for all queries.
template <int C, class E>
INLINE void score_rows(const Query* queries, int32_t count, int32_t from, int32_t n, const E* rows, const E* next, int32_t dim) {
    const int64_t size = row_elements<E>(dim);
    for (int32_t i = 0; i < n; i += 16) {
        const auto to = [&](int32_t k) { return queries[k].p + (from + i - queries[k].seen.begin); };
        const E* base = rows + i * size;
        const int32_t left = n - i;
        if (next != nullptr) fetch(next + i * size, (left < 16 ? left : 16) * size);
        if (left >= 16) score_keys<C, E>(queries, count, dim, 16, [&](int32_t k) { return base + k * size; }, to);
        else score_keys<C, E>(queries, count, dim, left, [&](int32_t k) { return base + (k < left ? k : left - 1) * size; }, to);
    }
}

// Scores of the slots [from, end) for all queries, whether or not they see these.
template <int C, class E>
static void score_slots(const Query* queries, int32_t count, const Slots<E>& keys, int32_t from, int32_t end, int32_t dim,
                        float* room) {
    for (int32_t n; from < end; from += n) {
        const E* next;
        const E* rows = keys.part(from, end, value_block, n, next);
        if constexpr (is_coded<E> || (C == 4 && DECODERY_REGISTERS >= 32)) score_rows<C>(queries, count, from, n, rows, next, dim);
        else {
            const float* floats_next;
            const float* floats = as_floats<C>(rows, next, n, dim, room, floats_next);
            score_rows<C>(queries, count, from, n, floats, floats_next, dim);
        }
    }
}

// The same of the slots that a query sees one by one, for its logical indices [from, end).
template <int C, class E>
static void score_list(const Query& query, const Slots<E>& keys, int32_t from, int32_t end, int32_t dim) {
    for (int32_t n; from < end; from += n) {
        n = end - from < 16 ? end - from : 16;
        const int32_t* list = query.seen.list + (from - query.run());
        score_keys<C, E>(&query, 1, dim, n, [&](int32_t k) { return keys[list[k < n ? k : n - 1]]; },
                         [&](int32_t) { return query.p + from; });
    }
}

// In place: scores to exponentials of their distance from the largest; returns the sum.
static float softmax(float* scores, int32_t n, float& largest) {
    f16 top = splat(-__builtin_inff());
    int32_t seen = 0;
    for (; seen + 16 <= n; seen += 16) top = larger(load(scores + seen), top);
    largest = maximum<float>(top);
    for (; seen < n; ++seen) largest = scores[seen] > largest ? scores[seen] : largest;
    const float m = largest;
    f16 sum = splat(0.0f);
    for (int32_t i = 0; i < n; i += 16) {
        const f16 e = exponential(load(scores + i) - m);
        store(scores + i, e, n - i);
        sum = sum + load(scores + i, n - i);
    }
    return total(sum);
}

// Adds the values of the logical indices [at, at + n), all of one block, to that block's sum, for Q queries. touch(k): is
// called once for each of them.
template <int C, int Q, class E, class Value, class Touch>
INLINE void add_values(const Query* queries, int32_t at, int32_t n, int32_t dim, const Value& value, const Touch& touch) {
    const bool fresh = at % value_block == 0, full = (at + n) % value_block == 0;
    float* block[Q];
    const float* p[Q];
    for (int32_t i = 0; i < Q; ++i) {
        block[i] = queries[i].blocks + at / value_block * queries[i].apart;
        p[i] = queries[i].p + at;
    }
    [[maybe_unused]] float scales[is_coded<E> ? value_block : 1], weights[Q][is_coded<E> ? value_block : 1];
    if constexpr (is_coded<E>) {
        for (int32_t k = 0; k < n; ++k) scales[k] = scale_of(value(k), dim);
        for (int32_t i = 0; i < Q; ++i) {
            weigh(p[i], scales, n, weights[i]);
            p[i] = weights[i];
        }
    }
    const auto added = [](f16 sum, f16 x, f16 weight) {
        if constexpr (is_coded<E>) return sum_of_exact(sum, x, weight);
        else return sum + x * weight;
    };
    if constexpr (C > 0) {
        constexpr int32_t held = Q > 1 && DECODERY_REGISTERS < 32 ? 1 : Q > 1 || C < most_sums ? C : most_sums;
        for (int32_t from = 0; from < C; from += held) {
            f16 sum[Q][held];
            for (int32_t i = 0; i < Q; ++i)
                for (int32_t c = 0; c < held; ++c) sum[i][c] = fresh ? splat(0.0f) : load(block[i] + (from + c) * 16);
            for (int32_t k = 0; k < n; ++k) {
                if (from == 0) touch(k);
                const E* v = value(k) + from * 16;
                f16 weight[Q];
                for (int32_t i = 0; i < Q; ++i) weight[i] = splat(p[i][k]);
                for (int32_t c = 0; c < held; ++c) {
                    const f16 x = load(v + c * 16);
                    for (int32_t i = 0; i < Q; ++i) sum[i][c] = added(sum[i][c], x, weight[i]);
                }
            }
            for (int32_t i = 0; i < Q; ++i)
                for (int32_t c = 0; c < held; ++c) store(block[i] + (from + c) * 16, sum[i][c]);
        }
    } else {
        for (int32_t c = 0; fresh && c < chunks<C>(dim); ++c) store(block[0] + c * 16, splat(0.0f));
        for (int32_t k = 0; k < n; ++k) {
            touch(k);
            const E* v = value(k);
            for (int32_t c = 0; c < chunks<C>(dim); ++c)
                store(block[0] + c * 16, added(load(block[0] + c * 16), load(v + c * 16, dim - c * 16), splat(p[0][k])));
        }
    }
    for (int32_t i = 0; full && i < Q; ++i)
        for (int32_t c = 0; queries[i].sum != nullptr && c < chunks<C>(dim); ++c)
            store(queries[i].sum + c * 16, load(queries[i].sum + c * 16) + load(block[i] + c * 16));
}

// The same for all queries and rows that lie side by side.
template <int C, class E>
static void add_rows(const Query* queries, int32_t count, int32_t at, int32_t n, const E* rows, const E* next, int32_t dim) {
    const auto value = [&](int32_t k) { return rows + k * row_elements<E>(dim); };
    const auto first = [&](int32_t k) {
        if (next != nullptr) fetch(next + k * row_elements<E>(dim), dim);
    };
    const auto again = [](int32_t) {};
    constexpr int32_t most = DECODERY_REGISTERS < 32 ? (is_coded<E> && C > 0 ? 3 : 1) : C == 4 ? 6 : C == 8 ? 3 : 1;
    int32_t i = 0;
    // The first queries ask for the rows of the next ones too.
    if constexpr (most > 1) {
        if (count >= most) add_values<C, most, E>(queries, at, n, dim, value, first), i = most;
        else if (count >= 3) add_values<C, 3, E>(queries, at, n, dim, value, first), i = 3;
    }
    if (i == 0) add_values<C, 1, E>(queries, at, n, dim, value, first), i = 1;
    if constexpr (most > 3)
        for (; i + most <= count; i += most) add_values<C, most, E>(queries + i, at, n, dim, value, again);
    if constexpr (most > 1)
        for (; i + 3 <= count; i += 3) add_values<C, 3, E>(queries + i, at, n, dim, value, again);
    for (; i < count; ++i) add_values<C, 1, E>(queries + i, at, n, dim, value, again);
}

// Values of the slots [from, end) for all queries, as far as each sees these.
template <int C, class E>
static void add_slots(const Query* queries, int32_t count, const Slots<E>& values, int32_t from, int32_t end, int32_t dim,
                      float* room) {
    const int32_t begin = queries[0].seen.begin;
    int32_t least = queries[0].seen.end;
    for (int32_t i = 1; i < count; ++i) {
        const Visible& seen = queries[i].seen;
        least = seen.begin != begin ? 0 : seen.end < least ? seen.end : least;
    }
    const auto every = [&](const auto* rows, int32_t n, decltype(rows) next) {
        if (from >= begin && from + n <= least) return add_rows<C>(queries, count, from - begin, n, rows, next, dim);
        for (int32_t i = 0; i < count; ++i) {
            const Visible& seen = queries[i].seen;
            int32_t first = seen.begin > from ? seen.begin : from;
            const int32_t last = seen.end < from + n ? seen.end : from + n;
            for (int32_t m; first < last; first += m) {
                const int32_t at = first - seen.begin, room_left = value_block - at % value_block;
                m = last - first < room_left ? last - first : room_left;
                using Row = std::remove_cv_t<std::remove_pointer_t<decltype(rows)>>;
                const Row* nothing_next = nullptr;
                add_rows<C>(queries + i, 1, at, m, rows + (first - from) * row_elements<Row>(dim), nothing_next, dim);
            }
        }
    };
    for (int32_t n; from < end; from += n) {
        const int32_t most = from < begin ? value_block : value_block - (from - begin) % value_block;
        const E* next;
        const E* rows = values.part(from, from < least && least < end ? least : end, most, n, next);
        if constexpr (is_coded<E> || (C > 0 && DECODERY_REGISTERS >= 32)) every(rows, n, next);
        else {
            const float* floats_next;
            const float* floats = as_floats<C>(rows, next, n, dim, room, floats_next);
            every(floats, n, floats_next);
        }
    }
}

// The same of the slots that a query sees one by one, for its logical indices [from, end).
template <int C, class E>
static void add_list(const Query& query, const Slots<E>& values, int32_t from, int32_t end, int32_t dim) {
    for (int32_t n; from < end; from += n) {
        const int32_t left = value_block - from % value_block;
        n = end - from < left ? end - from : left;
        const int32_t* list = query.seen.list + (from - query.run());
        add_values<C, 1, E>(&query, from, n, dim, [&](int32_t k) { return values[list[k]]; }, [](int32_t) {});
    }
}

// What a query's blocks come to, to where it is wanted; its weights have this sum.
template <int C>
static void finish(const Query& query, int32_t dim, float inverse) {
    const int32_t blocks = (query.seen.total() + value_block - 1) / value_block;
    for (int32_t c = 0; c < chunks<C>(dim); ++c) {
        f16 sum = splat(0.0f);
        if (query.sum != nullptr) {
            sum = load(query.sum + c * 16);
            if (query.seen.total() % value_block != 0) sum = sum + load(query.blocks + c * 16);
        } else
            for (int32_t b = 0; b < blocks; ++b) sum = sum + load(query.blocks + b * query.apart + c * 16);
        store(query.out + c * 16, sum * inverse, dim - c * 16);
    }
}

// Queries of one key-value head, and the segments they are of. The first `common` slots are the same memory for all.
template <int C, class E>
struct Item {
    Query* queries;
    const Span<E>* spans;
    int32_t span_count, common, dim;
    float* room;    // value_block rows

    int32_t count() const { return spans[span_count - 1].first + spans[span_count - 1].count; }
    // Scores of what the queries see in slots [from, end), which is logical indices too where nothing precedes `from`.
    void score(int32_t from, int32_t end) const {
        const int32_t first = from;
        if (span_count > 1 && from < common) {
            const int32_t stop = common < end ? common : end;
            score_slots<C>(queries, count(), spans[0].keys, from, stop, dim, room);
            from = stop;
        }
        for (const Span<E>* span = spans; span < spans + span_count; ++span) {
            const Query* own = queries + span->first;
            int32_t last = 0;
            for (int32_t i = 0; i < span->count; ++i) last = own[i].seen.end > last ? own[i].seen.end : last;
            score_slots<C>(own, span->count, span->keys, from, last < end ? last : end, dim, room);
            for (int32_t i = 0; i < span->count; ++i) {
                const Range list = listed(own[i], first, end);
                score_list<C>(own[i], span->keys, list.begin, list.end, dim);
            }
        }
    }
    // Their values, by the weights the scores have become.
    void add(int32_t from, int32_t end) const {
        const int32_t first = from;
        if (span_count > 1 && from < common) {
            const int32_t stop = common < end ? common : end;
            add_slots<C>(queries, count(), spans[0].values, from, stop, dim, room);
            from = stop;
        }
        for (const Span<E>* span = spans; span < spans + span_count; ++span) {
            const Query* own = queries + span->first;
            int32_t last = 0;
            for (int32_t i = 0; i < span->count; ++i) last = own[i].seen.end > last ? own[i].seen.end : last;
            add_slots<C>(own, span->count, span->values, from, last < end ? last : end, dim, room);
            for (int32_t i = 0; i < span->count; ++i) {
                const Range list = listed(own[i], first, end);
                add_list<C>(own[i], span->values, list.begin, list.end, dim);
            }
        }
    }
    // Logical indices of a query's list within those of slots [from, end).
    static Range listed(const Query& query, int32_t from, int32_t end) {
        const int32_t begin = from - query.seen.begin, run = query.run();
        const int64_t stop = int64_t(end) - query.seen.begin;
        return {begin > run ? begin : run, int32_t(stop < query.seen.total() ? stop : query.seen.total())};
    }
    // All of it, block after block.
    void whole() const {
        int32_t begin = queries[0].seen.begin;
        for (int32_t i = 1; i < count(); ++i) begin = queries[i].seen.begin < begin ? queries[i].seen.begin : begin;
        // Scores of all of them begin at the same slot.
        for (int32_t i = 0; i < count(); ++i) queries[i].p += queries[i].seen.begin - begin;
        score(begin, INT32_MAX);
        float inverse[most_queries];
        for (int32_t i = 0; i < count(); ++i) {
            const Query& query = queries[i];
            float largest;
            const float sum = softmax(query.p, query.seen.total(), largest);
            inverse[i] = 1.0f / sum;
            if (query.weights != nullptr) {
                for (int32_t k = 0; k < query.seen.total(); ++k) query.weights[k] = query.p[k] * inverse[i];
                *query.mass = largest + __builtin_logf(sum);
            }
            for (int32_t c = 0; c < chunks<C>(dim); ++c) store(query.sum + c * 16, splat(0.0f));
        }
        add(begin, INT32_MAX);
        for (int32_t i = 0; i < count(); ++i) finish<C>(queries[i], dim, inverse[i]);
    }
};
