// Attention of a few queries that share one key-value head. Included once per instruction set.
//
// A row's visible slots have a logical order: cached slots, then its own pass's visible rows. Every score is a sum of
// its own, the softmax runs over lanes of the logical index, values are added in blocks of it. So the result is that of
// decoding one token at a time, whatever else is in the pass.

// Slots a row sees: [begin, end), then `count` more at `list`.
struct Visible {
    int32_t begin, end;
    const int32_t* list;
    int32_t count;

    int32_t total() const { return end - begin + count; }
};

// One layer's keys, or values, of one head in the slots of a sequence.
template <class E>
struct Slots {
    const Run *runs, *last;
    int64_t index, kind, head, dim;

    Slots(const Segment& segment, int32_t index_, int32_t kind_, int32_t head_, int32_t dim_)
        : runs(segment.runs), last(segment.runs + segment.run_count - 1), index(index_), kind(kind_), head(head_), dim(dim_) {}

    E* row(const Run& run, int64_t slot) const {
        const int64_t at = index * run.layer_stride + kind * run.kind_stride + head * run.head_stride;
        return static_cast<E*>(run.data) + at + (slot - run.first) * dim;
    }
    // Slots asked for one by one are mostly a pass's own, which lie in the last run.
    E* operator[](int32_t slot) const {
        const Run* run = last;
        while (slot < run->first) --run;
        return row(*run, slot);
    }
    // At most value_block of the slots [from, end) that lie side by side: how many they are, and where.
    const E* part(int32_t from, int32_t end, int32_t& n) const {
        const Run* run = runs;
        while (from >= run->end) ++run;
        const int32_t stop = run->end < end ? run->end : end;
        n = stop - from < value_block ? stop - from : value_block;
        return row(*run, from);
    }
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

// scores[i] = q . keys[slot(i)] for i in [0, n); the last vector may run over n.
template <int C>
static void score_range(const float* q, const float* keys, int32_t dim, int32_t n, float* scores) {
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const float* base = keys + int64_t(i) * dim;
        score16<C, float>(q, dim, [&](int32_t k) { return base + k * dim; }, scores + i);
    }
    if (i < n)
        score16<C, float>(q, dim, [&](int32_t k) { return keys + int64_t(i + k < n ? i + k : n - 1) * dim; }, scores + i);
}
template <int C, class E>
static void score_list(const float* q, const Slots<E>& keys, int32_t dim, const int32_t* list, int32_t n, float* scores) {
    for (int32_t i = 0; i < n; i += 16)
        score16<C, E>(q, dim, [&](int32_t k) { return keys[list[i + k < n ? i + k : n - 1]]; }, scores + i);
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

// o += sum of p[i] * values[i], in order.
template <int C, class E, class Value>
INLINE void add_values(float* o, const float* p, int32_t dim, int32_t n, const Value& value) {
    if constexpr (C > 0) {
        constexpr int32_t held = C < most_sums ? C : most_sums;
        for (int32_t from = 0; from < C; from += held) {
            f16 sum[held];
            for (int32_t c = 0; c < held; ++c) sum[c] = load(o + (from + c) * 16);
            for (int32_t i = 0; i < n; ++i) {
                const E* v = value(i) + from * 16;
                const f16 weight = splat(p[i]);
                for (int32_t c = 0; c < held; ++c) sum[c] = sum[c] + load(v + c * 16) * weight;
            }
            for (int32_t c = 0; c < held; ++c) store(o + (from + c) * 16, sum[c]);
        }
    } else {
        for (int32_t i = 0; i < n; ++i) {
            const E* v = value(i);
            for (int32_t c = 0; c < chunks<C>(dim); ++c)
                store(o + c * 16, load(o + c * 16) + load(v + c * 16, dim - c * 16) * p[i]);
        }
    }
}

// Moves a finished block's sum into the total.
INLINE void close_block(float* sum, float* block, int32_t wide) {
    for (int32_t c = 0; c < wide; c += 16) {
        store(sum + c, load(sum + c) + load(block + c));
        store(block + c, splat(0.0f));
    }
}

// One query's weighted sum of values: blocks of `value_block` logical indices are summed apart and added in order.
struct Weighted {
    float *sum, *block;    // [wide] each
    const float* p;        // weights by logical index
    int32_t done;

    template <int C, class E, class Value>
    inline __attribute__((always_inline)) void add(int32_t dim, int32_t wide, int32_t n, const Value& value) {
        for (int32_t i = 0; i < n;) {
            const int32_t room = value_block - done % value_block, m = n - i < room ? n - i : room;
            add_values<C, E>(block, p + done, dim, m, [&](int32_t k) { return value(i + k); });
            i += m;
            done += m;
            if (done % value_block == 0) close_block(sum, block, wide);
        }
    }
};

// `n` rows from `rows` on as floats: the rows themselves, or widened to `room`, so that all queries share the work.
template <int C>
INLINE const float* as_floats(const float* rows, int32_t, int32_t, float*) { return rows; }
template <int C>
INLINE const float* as_floats(const Bf16* rows, int32_t n, int32_t dim, float* room) {
    for (int32_t i = 0; i < n * dim; i += 16) store(room + i, load(rows + i, C > 0 ? 16 : n * dim - i));
    return room;
}

// Where each query's result goes, and if not null its weights and the logarithm of their sum.
struct Wanted {
    float *const *out, *const *weights, *const *mass;
};

// Queries (already scaled) with what each of them sees. scores: `count` rows of
// score_stride floats; sums: 2 * count rows of head_dim, rounded up; room: value_block rows of it.
template <int C, class E>
static void attend(const float* const* queries, const Visible* visible, const Wanted& wanted, int32_t count,
                   const Slots<E>& keys, const Slots<E>& values, int32_t dim, float* scores, int64_t score_stride,
                   float* sums, float* room) {
    const int32_t wide = chunks<C>(dim) * 16;
    int32_t begin = visible[0].begin, end = visible[0].end;
    for (int32_t i = 1; i < count; ++i) {
        begin = visible[i].begin < begin ? visible[i].begin : begin;
        end = visible[i].end > end ? visible[i].end : end;
    }
    for (int32_t from = begin, n; from < end; from += n) {
        const E* rows = keys.part(from, end, n);
        const float* block = as_floats<C>(rows, n, dim, room);
        for (int32_t i = 0; i < count; ++i)
            score_range<C>(queries[i], block, dim, n, scores + i * score_stride + (from - begin));
    }
    Weighted weighted[most_queries];
    float inverse[most_queries];
    for (int32_t i = 0; i < count; ++i) {
        const Visible& seen = visible[i];
        float* own = scores + i * score_stride + (seen.begin - begin);
        score_list<C, E>(queries[i], keys, dim, seen.list, seen.count, own + (seen.end - seen.begin));
        float largest;
        const float sum = softmax(own, seen.total(), largest);
        inverse[i] = 1.0f / sum;
        if (wanted.weights[i] != nullptr) {
            for (int32_t k = 0; k < seen.total(); ++k) wanted.weights[i][k] = own[k] * inverse[i];
            *wanted.mass[i] = largest + __builtin_logf(sum);
        }
        weighted[i] = {sums + 2 * i * wide, sums + (2 * i + 1) * wide, own, 0};
        for (int32_t c = 0; c < 2 * wide; c += 16) store(weighted[i].sum + c, splat(0.0f));
    }
    for (int32_t from = begin, n; from < end; from += n) {
        const E* rows = values.part(from, end, n);
        const float* block = as_floats<C>(rows, n, dim, room);
        for (int32_t i = 0; i < count; ++i) {
            const int32_t first = visible[i].begin > from ? visible[i].begin : from;
            const int32_t last = visible[i].end < from + n ? visible[i].end : from + n;
            const float* base = block + int64_t(first - from) * dim;
            weighted[i].template add<C, float>(dim, wide, last - first, [&](int32_t k) { return base + int64_t(k) * dim; });
        }
    }
    for (int32_t i = 0; i < count; ++i) {
        const int32_t* list = visible[i].list;
        weighted[i].template add<C, E>(dim, wide, visible[i].count, [&](int32_t k) { return values[list[k]]; });
        close_block(weighted[i].sum, weighted[i].block, wide);
        for (int32_t c = 0; c < wide; c += 16) store(wanted.out[i] + c, load(weighted[i].sum + c) * inverse[i], dim - c);
    }
}
