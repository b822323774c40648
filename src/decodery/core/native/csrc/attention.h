// Attention of queries that share one key-value head. Included once per instruction set.
//
// A row's visible slots have a logical order: cached slots, then its own pass's visible rows. This order is cut into chunks
// of `key_chunk`. Every score is a sum of its own; a chunk has its largest score, its sum of exponentials over lanes of the
// logical index and its weighted sum of values, and chunks are merged in order. So the result is that of decoding one token
// at a time, whatever else is in the pass and whichever thread computes which chunk.
//
// Of coded pages both products are sums of integers, which no order changes, so values are added as they lie. Of float16
// pages queries and weights have 13 bits, so that products are exact and may be fused with sums.

// Slots of one chunk: `straight` ones from `first` on, then those listed.
struct Chunk {
    int32_t first, straight;
    const int32_t* list;
    int32_t listed;

    int32_t total() const { return straight + listed; }
    int32_t pages() const { return straight == 0 ? 0 : (first % page_slots + straight + page_slots - 1) / page_slots; }
};
// The chunk of what a row sees from the logical index `from` on.
INLINE Chunk chunk_of(const Visible& seen, int32_t from) {
    const int32_t run = seen.end - seen.begin, end = from + key_chunk < seen.total() ? from + key_chunk : seen.total();
    const int32_t straight = end < run ? end - from : run > from ? run - from : 0;
    return {seen.begin + from, straight, seen.list + (from > run ? from - run : 0), end - from - straight};
}

// The nearest of 13 bits.
INLINE f16 shortened(f16 x) {
    const f16 far = x * 2049.0f;
    return far - (far - x);
}
INLINE f16 first_lanes_of(f16 x, int32_t n) {
    if (n >= 16) return x;
    float all[16];
    store(all, x);
    return load(all, n);
}

// Sets a query up, q [wide], and room [wide].
INLINE void prepare(const float* q, int32_t wide, float* room, Query& query, Coded) {
    int8_t* numbers = reinterpret_cast<int8_t*>(room);
    int32_t sums[2];
    query.step = code_query(q, wide, numbers, sums);
    query.numbers = numbers;
    for (int32_t side = 0; side < 2; ++side) query.begin[side] = -weight_offset * sums[side];
}
INLINE void prepare(const float* q, int32_t wide, float* room, Query& query, Half) {
    for (int32_t i = 0; i < wide; i += 16) store(room + i, shortened(load(q + i)));
    query.q = room;
}
INLINE void prepare(const float* q, int32_t, float*, Query& query, float) { query.q = q; }

// What a chunk comes to for a query, beside its weighted sum of values.
struct Part {
    float largest, total;
};

// Scores [n] of a chunk to weights, and zeros up to a multiple of 16. scales: of coded values. most: the largest weight.
template <class E>
static Part weigh(float* scores, int32_t n, float cap, Lowered lowered, const float* scales, float* given, float& most) {
    for (int32_t i = 0; cap != 0.0f && i < n; i += 16) store(scores + i, capped(load(scores + i), cap));
    for (int32_t i = lowered.begin > 0 ? lowered.begin : 0, end = lowered.end < n ? lowered.end : n; i < end; ++i) scores[i] += lowered.by;
    for (int32_t i = n; i < round_up(n, 16); ++i) scores[i] = -__builtin_inff();
    f16 top = splat(-__builtin_inff());
    for (int32_t i = 0; i < n; i += 16) top = larger(load(scores + i), top);
    const float m = maximum<float>(top);
    f16 sum = splat(0.0f), strange = splat(0.0f);
    top = splat(0.0f);
    for (int32_t i = 0; i < n; i += 16) {
        const f16 e = first_lanes_of(exponential(load(scores + i) - m), n - i);
        sum = sum + e;
        if (given != nullptr) store(given + i, e, n - i);
        if constexpr (is_coded<E>) {
            const f16 w = e * load(scales + i, n - i);
            store(scores + i, w);
            top = larger(w, top);
            strange = strange + w;
        } else if constexpr (std::is_same<E, Half>::value) store(scores + i, shortened(e));
        else store(scores + i, e);
    }
    // The scale of a value that is not finite is not a number.
    const float all = total(strange);
    most = all == all ? maximum<float>(top) : all;
    return {m, total(sum)};
}

// Adds a chunk to those before it.
INLINE void merge(Query& query, Part part, const float* chunk, int32_t wide) {
    const float largest = part.largest > query.largest ? part.largest : query.largest;
    float distances[16] = {query.largest - largest, part.largest - largest};
    store(distances, exponential(load(distances)));
    const float before = distances[0], now = distances[1];
    for (int32_t i = 0; i < wide; i += 16) store(query.sum + i, load(query.sum + i) * before + load(chunk + i) * now);
    query.total = query.total * before + part.total * now;
    query.largest = largest;
}
// sink: a score that has no value, as if it were a chunk before the others, or null.
INLINE void begin(Query& query, int32_t wide, const float* sink) {
    query.largest = sink != nullptr ? *sink : -3e38f;
    query.total = sink != nullptr ? 1.0f : 0.0f;
    for (int32_t i = 0; i < wide; i += 16) store(query.sum + i, splat(0.0f));
}
INLINE void finish(const Query& query, int32_t dim) {
    const float inverse = 1.0f / query.total;
    for (int32_t i = 0; i < dim; i += 16) store(query.out + i, load(query.sum + i) * inverse, dim - i);
    for (int32_t i = 0; query.given != nullptr && i < query.seen.total(); ++i) query.given[i] *= inverse;
    if (query.mass != nullptr) *query.mass = query.largest + __builtin_logf(query.total);
}

// Queries of one key-value head, and the pages they read. The first `common` slots are the same memory for all.
template <class E>
struct Item {
    Query* queries;
    const Pages<E>* sources;
    int32_t count, common, dim, wide;
    int32_t span, shift;    // numbers of a row in pages, and where the head's begin
    float cap;       // of scores, or 0
    float* spare;    // [count][key_chunk]

    // Calls take(query, part) for every query with logical indices in the chunk from `from` on; its values are added up.
    template <class Take>
    void chunk(int32_t from, const Take& take) const {
        for (int32_t i = 0, last; i < count; i = last) {
            last = i + 1;
            if (queries[i].seen.total() <= from) continue;
            Chunk chunk = chunk_of(queries[i].seen, from);
            for (; last < count && together(queries[i], queries[last], chunk, from); ++last) {
                const Chunk other = chunk_of(queries[last].seen, from);
                if (other.straight > chunk.straight) chunk = other;
            }
            attend(queries + i, last - i, chunk, from, take);
        }
    }
    // Whether one pass over pages serves both: they see the same, or both see the chunk's first slots and no others.
    bool together(const Query& a, const Query& b, const Chunk& chunk, int32_t from) const {
        if (b.seen.total() <= from || a.seen.begin != b.seen.begin) return false;
        if (chunk.listed > 0) return a.source == b.source && a.seen.list == b.seen.list && a.seen.end == b.seen.end && a.seen.count == b.seen.count;
        const Chunk other = chunk_of(b.seen, from);
        const int32_t end = chunk.straight > other.straight ? chunk.straight : other.straight;
        return other.listed == 0 && (a.source == b.source || chunk.first + end <= common);
    }

    template <class Take>
    void attend(Query* own, int32_t n, const Chunk& chunk, int32_t from, const Take& take) const {
        const Pages<E>& source = sources[own->source];
        char* pages[key_chunk / page_slots + 1];
        const int32_t page_count = chunk.pages(), skipped = chunk.first % page_slots;
        for (int32_t p = 0; p < page_count; ++p) pages[p] = keys_of(source[chunk.first + p * page_slots]);
        if (from == 0)
            for (int32_t p = 0; p < page_count; ++p)
                for (int32_t i = 0; i < page_slots * wide * int32_t(sizeof(E)); i += 64) fetch(pages[p] + i);
        char* ahead[key_chunk / page_slots + 1];
        for (int32_t p = 0; p < page_count; ++p) ahead[p] = values_of(pages[p]);
        score_pages<E>(own, n, pages, ahead, page_count, dim, wide, [&](int32_t i) { return own[i].scores; });
        for (int32_t i = 0; i < n; ++i) own[i].scores += skipped;
        score_list(own, n, source, chunk);
        Part parts[most_queries];
        // Keys of the next chunk are asked for while this one's values are added.
        const int32_t on = own[n - 1].seen.end - chunk.first > 2 * key_chunk ? key_chunk : 0;
        if constexpr (is_coded<E>) add_coded_values(own, n, source, pages, page_count, chunk, from, on, parts);
        else add_float_values(own, n, source, chunk, from, on, parts);
        for (int32_t i = 0; i < n; ++i) {
            own[i].scores -= skipped;
            take(own[i], parts[i]);
        }
    }

    char* keys_of(char* page) const { return page + shift * page_slots * int32_t(sizeof(E)); }
    char* values_of(char* page) const { return page + page_slots * span * int32_t(sizeof(E)); }

    // Scores of the slots that are listed, after those before them. Where few of a page are, not all its values are wanted.
    void score_list(Query* own, int32_t n, const Pages<E>& source, const Chunk& chunk) const {
        for (int32_t first = 0, last; first < chunk.listed; first = last) {
            char *pages[key_chunk / page_slots], *ahead[key_chunk / page_slots];
            int32_t place[key_chunk], page = -1, found = 0;
            for (last = first; last < chunk.listed; ++last) {
                const int32_t slot = chunk.list[last];
                if (slot / page_slots != page) {
                    if (found == key_chunk / page_slots) break;
                    page = slot / page_slots;
                    pages[found++] = keys_of(source[slot]);
                }
                place[last - first] = (found - 1) * page_slots + slot % page_slots;
            }
            const bool dense = last - first >= found * page_slots / 2;
            for (int32_t p = 0; p < found; ++p)
                ahead[p] = dense ? values_of(pages[p]) : p + key_tiles < found ? pages[p + key_tiles] : last < chunk.listed ? source[chunk.list[last]] : pages[p];
            score_pages<E>(own, n, pages, ahead, found, dim, wide, [&](int32_t i) { return spare + i * key_chunk; });
            for (int32_t i = 0; i < n; ++i)
                for (int32_t k = first; k < last; ++k) own[i].scores[chunk.straight + k] = spare[i * key_chunk + place[k - first]];
        }
    }

    int32_t seen_of(const Query& query, const Chunk& chunk, int32_t from) const {
        const int32_t left = query.seen.total() - from;
        return left < chunk.total() ? left : chunk.total();
    }
    float* given_to(const Query& query, int32_t from) const { return query.given == nullptr ? nullptr : query.given + from; }

    static constexpr int32_t fetched = 12;
    void add_float_values(Query* own, int32_t n, const Pages<E>& source, const Chunk& chunk, int32_t from, int32_t on, Part* parts) const {
        const E *rows[key_chunk], *next[key_chunk];
        for (int32_t k = 0; k < chunk.total(); ++k) {
            const bool listed = k >= chunk.straight;
            const int32_t slot = listed ? chunk.list[k - chunk.straight] : chunk.first + k, lane = slot % page_slots;
            if (listed || k == 0 || lane == 0) {
                rows[k] = numbers_of<E>(source[slot], 1, span) + lane * span + shift;
                next[k] = listed ? rows[k] : numbers_of<E>(source[slot + on], 0, span) + lane * span;
                // Rows that are listed lie apart: they are asked for some rows before they are read.
                if (listed && k >= fetched) next[k - fetched] = rows[k];
            } else {
                rows[k] = rows[k - 1] + span;
                next[k] = next[k - 1] + span;
            }
        }
        int32_t least = key_chunk;
        for (int32_t i = 0; i < n; ++i) {
            const int32_t seen = seen_of(own[i], chunk, from);
            least = seen < least ? seen : least;
            float most;
            parts[i] = weigh<E>(own[i].scores, seen, cap, own[i].lowered.from(from), nullptr, given_to(own[i], from), most);
        }
        add_floats<E>(own, n, rows, next, 0, least, wide);
        // What a row does not see need not be a number.
        for (int32_t i = 0; i < n; ++i) {
            const int32_t seen = seen_of(own[i], chunk, from);
            if (seen > least) add_floats<E>(own + i, 1, rows, next, least, seen, wide);
        }
    }

    void add_coded_values(Query* own, int32_t n, const Pages<E>& source, char* const* pages, int32_t page_count,
                          const Chunk& chunk, int32_t from, int32_t on, Part* parts) const {
        const int32_t skipped = chunk.first % page_slots, shift = skipped % 4;
        // Room for 16 scales before the first and after the last.
        float room[key_chunk + 3 * page_slots];
        float* scales = room + page_slots;
        for (int32_t p = 0; p < page_count; ++p) store(scales + p * page_slots - skipped, load(reinterpret_cast<const Bf16*>(scales_of(pages[p], 1, wide))));
        char *quads[key_chunk / 4 + 1 + key_chunk], *next[key_chunk / 4 + 1 + key_chunk];
        const int32_t straight = chunk.straight == 0 ? 0 : (shift + chunk.straight + 3) / 4;
        for (int32_t k = 0; k < straight; ++k) {
            const int32_t quad = skipped / 4 + k;
            quads[k] = pages[quad / 4] + (page_slots + quad % 4 * 4) * wide;
            next[k] = quads[k];
        }
        for (int32_t p = 0; on > 0 && p + 1 < page_count; ++p) {
            char* page = source[chunk.first + on + p * page_slots];
            fetch(scales_of(page, 0, wide));
            for (int32_t k = p * 4 - skipped / 4, last = k + 4; k < last; ++k)
                if (k >= 0) next[k] = page + (k + skipped / 4) % 4 * 4 * wide;
        }
        int32_t place[key_chunk], found = straight;
        for (int32_t k = 0, last = -1; k < chunk.listed; ++k) {
            const int32_t slot = chunk.list[k];
            char* page = source[slot];
            if (slot / 4 != last) next[found] = page, quads[found++] = page + (page_slots + slot % page_slots / 4 * 4) * wide;
            last = slot / 4;
            place[k] = (found - 1) * 4 + slot % 4;
            scales[chunk.straight + k] = scale_of(scales_of(page, 1, wide)[slot % page_slots]);
        }
        for (int32_t i = 0; i < n; ++i) {
            const int32_t seen = seen_of(own[i], chunk, from);
            float most;
            parts[i] = weigh<E>(own[i].scores, seen, cap, own[i].lowered.from(from), scales, given_to(own[i], from), most);
            int32_t sums[2];
            own[i].weight_step = code_weights(own[i].scores, seen, most, own[i].weights[0] + shift, own[i].weights[1] + shift, sums);
            for (int32_t side = 0; side < 2; ++side) {
                own[i].weight_begin[side] = -weight_offset * sums[side];
                arrange(own[i].weights[side], shift, seen, found * 4, chunk, place);
            }
        }
        add_coded(own, n, quads, next, found, wide);
    }
    // Puts weights [shift, shift + seen) to where their values lie, zeros beside them.
    static void arrange(uint8_t* weights, int32_t shift, int32_t seen, int32_t size, const Chunk& chunk, const int32_t* place) {
        uint8_t listed[key_chunk];
        const int32_t straight = chunk.listed > 0 ? chunk.straight : seen;
        if (chunk.listed > 0) __builtin_memcpy(listed, weights + shift + straight, size_t(chunk.listed));
        for (int32_t i = 0; i < shift; ++i) weights[i] = 0;
        if (shift + straight < size) __builtin_memset(weights + shift + straight, 0, size_t(size - shift - straight));
        for (int32_t k = 0; k < chunk.listed; ++k) weights[place[k]] = listed[k];
    }

    int32_t longest() const {
        int32_t most = 0;
        for (int32_t i = 0; i < count; ++i) most = queries[i].seen.total() > most ? queries[i].seen.total() : most;
        return most;
    }
    // All of it, but for what `finish` does.
    void add_up() const {
        for (int32_t i = 0; i < count; ++i) begin(queries[i], wide, queries[i].sink);
        for (int32_t from = 0; from < longest(); from += key_chunk)
            chunk(from, [&](Query& query, Part part) {
                if (query.given != nullptr) rescale(query, part, from);
                merge(query, part, query.chunk, wide);
            });
    }
    // Makes weights given so far, and the chunk's, those of the largest score of both.
    static void rescale(const Query& query, Part part, int32_t from) {
        const float largest = part.largest > query.largest ? part.largest : query.largest;
        float distances[16] = {query.largest - largest, part.largest - largest};
        store(distances, exponential(load(distances)));
        const int32_t all = query.seen.total();
        for (int32_t k = 0; k < from; ++k) query.given[k] *= distances[0];
        for (int32_t k = from; k < all && k < from + key_chunk; ++k) query.given[k] *= distances[1];
    }
};
