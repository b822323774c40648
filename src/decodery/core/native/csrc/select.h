// Which slots rows read of those they see, where a policy leaves the choice to kernels: see Policy in abi.h. Included once
// per instruction set.
//
// What full pages of content are chosen by lies in pages of its own, so that forks share it and it is counted as keys and
// values are:
// Bounds of 16 pages of content: the least numbers [wide][16] of each channel, then the largest, in floats.
// Labels of one page of content: codes [channels][16] in bytes, then 16 least numbers and 16 steps in floats; with 0 bits
// the numbers [channels][16] themselves in floats.
// Both are computed of keys as they are stored. Those of other slots are computed when they are needed, in the same way.

// The key [0] or value [1] in a slot, as floats.
template <class E>
static void row_of(char* page, int32_t kind, int32_t slot, int32_t dim, float* row, E) {
    E numbers[most_dim];
    each_number<E>(page, kind, slot, dim, [&](int32_t i, const E* held) { numbers[i] = *held; });
    for (int32_t i = 0; i < dim; i += 16) store(row + i, load(numbers + i, dim - i), dim - i);
}
static void row_of(char* page, int32_t kind, int32_t slot, int32_t dim, float* row, Coded) {
    const float scale = scale_of(scales_of(page, kind, round_up(dim, 16))[slot % page_slots]);
    each_number<uint8_t>(page, kind, slot, dim, [&](int32_t i, const uint8_t* held) { row[i] = float(int32_t(*held) - 128) * scale; });
}

// The most worthy k of n: those above `above`, and the first `ties` that equal it.
struct Best {
    float above;
    int32_t ties;

    bool operator()(float x) { return x > above || (x == above && ties-- > 0); }
};
static int32_t count_above(const float* x, int32_t n, float limit) {
    int32_t found = 0;
    for (int32_t i = 0; i < n; ++i) found += x[i] > limit ? 1 : 0;
    return found;
}
// By halving what lies between the least and the largest number. Infinite ones come first.
static Best best_of(const float* x, int32_t n, int32_t k) {
    constexpr float infinite = __builtin_inff();
    if (k >= n) return {-infinite, n};
    f16 lows = splat(infinite), highs = splat(-infinite);
    for (int32_t i = 0; i + 16 <= n; i += 16) lows = smaller(load(x + i), lows), highs = larger(load(x + i), highs);
    float low = -maximum<float>(-lows), high = maximum<float>(highs);
    for (int32_t i = n / 16 * 16; i < n; ++i) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    if (high == infinite) {
        high = -infinite;
        for (int32_t i = 0; i < n; ++i) high = x[i] > high && x[i] < infinite ? x[i] : high;
    }
    int32_t above = count_above(x, n, high);
    if (above >= k) return {infinite, k};
    const int32_t above_least = count_above(x, n, low);
    if (above_least < k) return {low, k - above_least};
    for (;;) {
        const float middle = low + (high - low) * 0.5f;
        if (!(middle > low && middle < high)) return {high, k - above};
        const int32_t found = count_above(x, n, middle);
        if (found == k) return {middle, 0};
        if (found > k) low = middle;
        else high = middle, above = found;
    }
}

// What one key-value head of a layer chooses by.
template <class E>
struct Side {
    const Model& model;
    const Segment& segment;
    const Policy& policy;
    int32_t layer, kv_head;

    int32_t dim() const { return model.head_dim; }
    int32_t group() const { return model.heads / model.kv_heads; }
    bool labelled() const { return policy.channels != nullptr; }
    const int32_t* channels() const { return policy.channels + (int64_t(layer) * model.kv_heads + kv_head) * policy.channel_count; }
    char* page(int32_t i) const {
        return policy.side_base + policy.side_table[(int64_t(layer) * model.kv_heads + kv_head) * policy.side_pages + i] * policy.side_bytes;
    }
    void key(int32_t slot, float* to) const {
        row_of(segment.base + segment.table(layer, kv_head)[slot / page_slots] * segment.page_bytes, 0, slot, dim(), to, E());
    }

    // Fills in what is chosen by for pages that have become full; room: floats for a key.
    void summarise(float* room) const {
        for (int32_t p = policy.summarised[layer]; p < policy.known; ++p) {
            if (labelled())
                for (int32_t lane = 0; lane < page_slots; ++lane) label(p * page_slots + lane, page(p), lane, room);
            else bound(p, room);
        }
    }
    void bound(int32_t p, float* room) const {
        float* least = reinterpret_cast<float*>(page(p / page_slots)) + p % page_slots;
        float* most = least + page_slots * round_up(dim(), 16);
        for (int32_t lane = 0; lane < page_slots; ++lane) {
            key(p * page_slots + lane, room);
            for (int32_t i = 0; i < dim(); ++i) {
                float &low = least[i * page_slots], &high = most[i * page_slots];
                low = lane == 0 || room[i] < low ? room[i] : low;
                high = lane == 0 || room[i] > high ? room[i] : high;
            }
        }
    }
    void label(int32_t slot, char* to, int32_t lane, float* room) const {
        key(slot, room);
        const int32_t count = policy.channel_count, *chosen = channels();
        if (policy.bits == 0) {
            for (int32_t c = 0; c < count; ++c) reinterpret_cast<float*>(to)[c * page_slots + lane] = room[chosen[c]];
            return;
        }
        float low = room[chosen[0]], high = low;
        for (int32_t c = 1; c < count; ++c) {
            const float x = room[chosen[c]];
            low = x < low ? x : low;
            high = x > high ? x : high;
        }
        const float step = (high - low) / float((1 << policy.bits) - 1), divisor = step > 0.0f ? step : 1.0f;
        for (int32_t c = 0; c < count; ++c) {
            const float code = (room[chosen[c]] - low) / divisor;
            reinterpret_cast<uint8_t*>(to)[c * page_slots + lane] = uint8_t((code + 12582912.0f) - 12582912.0f);
        }
        float* ranges = reinterpret_cast<float*>(to + count * page_slots);
        ranges[lane] = low;
        ranges[page_slots + lane] = step;
    }

    // What 16 slots are worth to the heads of a group: the largest product with one of them. queries: [group][channels].
    void label_worth(const float* queries, const char* labels, float* worth) const {
        const int32_t count = policy.channel_count;
        f16 best = splat(-__builtin_inff());
        in_parts<4>(group(), [&](int32_t first, auto some) {
            constexpr int32_t Q = decltype(some)::value;
            f16 sums[Q];
            float all[Q];
            each<Q>([&](auto g) ALWAYS_INLINE { sums[g] = splat(0.0f), all[g] = 0.0f; });
            for (int32_t c = 0; c < count; ++c) {
                const f16 numbers = policy.bits == 0 ? load(reinterpret_cast<const float*>(labels) + c * page_slots)
                                                     : load_bytes(reinterpret_cast<const uint8_t*>(labels) + c * page_slots);
                each<Q>([&](auto g) ALWAYS_INLINE {
                    const float q = queries[(first + g) * count + c];
                    sums[g] = sums[g] + numbers * q;
                    all[g] += q;
                });
            }
            const float* ranges = reinterpret_cast<const float*>(labels + count * page_slots);
            each<Q>([&](auto g) ALWAYS_INLINE {
                const f16 found = policy.bits == 0 ? sums[g] : load(ranges) * all[g] + load(ranges + page_slots) * sums[g];
                best = larger(found, best);
            });
        });
        store(worth, best);
    }
    // What 16 pages are worth: a bound of the largest product of one of their keys with one of a group's queries.
    void bound_worth(const float* queries, char* bounds, float* worth) const {
        const int32_t wide = round_up(dim(), 16);
        const float *least = reinterpret_cast<const float*>(bounds), *most = least + page_slots * wide;
        f16 found = splat(-__builtin_inff());
        for (int32_t g = 0; g < group(); ++g) {
            f16 sum = splat(0.0f);
            for (int32_t i = 0; i < dim(); ++i) {
                const f16 q = splat(queries[g * wide + i]);
                sum = sum + larger(q * load(least + i * page_slots), q * load(most + i * page_slots));
            }
            found = larger(sum, found);
        }
        store(worth, found);
    }

    int32_t content() const { return int32_t(segment.length(layer, kv_head)); }
    int32_t position(int32_t slot) const { return segment.slots[layer * segment.slots_layer + slot]; }
    // Calls work(slot) for the tentative rows that a row sees.
    template <class Work>
    void each_own(const Visible& seen, const Work& work) const {
        for (int32_t slot = content(); slot < seen.end; ++slot) work(slot);
        for (int32_t i = 0; i < seen.count; ++i) work(seen.list[i]);
    }

    // The slots that a row reads, ascending. Content lies at its positions. room: see aside_floats; to: [policy.room].
    Chosen choose(const float* queries, int32_t row, const Visible& seen, float* room, int32_t* to) const {
        return labelled() ? choose_slots(queries, row, seen, room, to) : choose_pages(queries, row, seen, room, to);
    }
    Chosen choose_pages(const float* queries, int32_t row, const Visible& seen, float* worth, int32_t* to) const {
        const int32_t own = int32_t(segment.positions[row]) / page_slots;
        for (int32_t p = 0; p < policy.known; p += page_slots) bound_worth(queries, page(p / page_slots), worth + p);
        for (int32_t p = policy.known; p < own; ++p) worth[p] = partial_worth(queries, seen, p);
        worth[own] = __builtin_inff();
        Best best = best_of(worth, own + 1, policy.counts[row]);
        // Chosen pages lie side by side in a table of their own, before those that are not full.
        const int32_t* table = segment.table(layer, kv_head);
        int32_t full = 0;
        for (int32_t p = 0; p <= own; ++p) {
            const bool chosen = best(worth[p]);
            worth[p] = chosen ? 1.0f : 0.0f;
            if (chosen && p < policy.known) to[full++] = table[p];
        }
        const int32_t first = policy.known * page_slots, end = content() + segment.stays + segment.rows;
        const int32_t moved = full * page_slots - first;
        int32_t pages = full;
        for (int32_t p = policy.known; p * page_slots < end; ++p) to[pages++] = table[p];
        int32_t run = full * page_slots, listed = 0;
        const auto read = [&](int32_t slot) {
            if (worth[position(slot) / page_slots] == 0.0f) return;
            if (listed == 0 && slot + moved == run) ++run;
            else to[pages + listed++] = slot + moved;
        };
        for (int32_t slot = first; slot < content(); ++slot) read(slot);
        each_own(seen, read);
        return {run, listed, to + pages, to};
    }
    // The same of a page that is not full, or not content, as far as a row sees it.
    float partial_worth(const float* queries, const Visible& seen, int32_t p) const {
        const int32_t wide = round_up(dim(), 16);
        float least[most_dim], most[most_dim], row[most_dim];
        int32_t count = 0;
        const auto join = [&](int32_t slot) {
            if (position(slot) / page_slots != p) return;
            key(slot, row);
            for (int32_t i = 0; i < dim(); ++i) {
                least[i] = count == 0 || row[i] < least[i] ? row[i] : least[i];
                most[i] = count == 0 || row[i] > most[i] ? row[i] : most[i];
            }
            ++count;
        };
        for (int32_t slot = p * page_slots; slot < content(); ++slot) join(slot);
        each_own(seen, join);
        float found = -__builtin_inff();
        for (int32_t g = 0; g < group() && count > 0; ++g) {
            float sum = 0.0f;
            for (int32_t i = 0; i < dim(); ++i) {
                const float low = queries[g * wide + i] * least[i], high = queries[g * wide + i] * most[i];
                sum += low > high ? low : high;
            }
            found = sum > found ? sum : found;
        }
        return found;
    }
    Chosen choose_slots(const float* queries, int32_t row, const Visible& seen, float* worth, int32_t* to) const {
        const int32_t known = policy.known * page_slots, all = content(), at = int32_t(segment.positions[row]);
        const int32_t count = policy.channel_count, *looked_at = channels();
        float* asked = worth + all + segment.stays + segment.rows + page_slots;
        for (int32_t i = 0; i < group() * count; ++i) asked[i] = queries[i / count * round_up(dim(), 16) + looked_at[i % count]];
        for (int32_t p = 0; p < policy.known; ++p) {
            const char* soon = page(p + 4 < policy.known ? p + 4 : p);
            for (int32_t i = 0; i < policy.side_bytes; i += 64) fetch(soon + i);
            label_worth(asked, page(p), worth + p * page_slots);
        }
        // Slots of no full page, 16 at a time as those of one.
        alignas(64) char labels[(most_dim + 2) * page_slots * sizeof(float)];
        float key_room[most_dim];
        int32_t n = known, lane = 0;
        const auto flush = [&] {
            float found[page_slots];
            label_worth(asked, labels, found);
            for (int32_t i = 0; i < lane; ++i) worth[n++] = found[i];
            lane = 0;
        };
        const auto join = [&](int32_t slot) {
            label(slot, labels, lane, key_room);
            if (++lane == page_slots) flush();
        };
        for (int32_t slot = known; slot < all; ++slot) join(slot);
        each_own(seen, join);
        if (lane > 0) flush();
        // A row's own slot is the last of those it sees.
        const auto first_of_all = [&](int32_t place) { return place < policy.first || at - place < policy.recent || place == at; };
        for (int32_t i = 0; i < all && i < policy.first; ++i) worth[i] = __builtin_inff();
        for (int32_t i = at - policy.recent + 1 > 0 ? at - policy.recent + 1 : 0; i < all; ++i) worth[i] = __builtin_inff();
        int32_t i = all, found = 0;
        each_own(seen, [&](int32_t slot) {
            if (first_of_all(position(slot))) worth[i] = __builtin_inff();
            ++i;
        });
        Best best = best_of(worth, n, policy.counts[row]);
        if (best.ties == 0)
            for (int32_t slot = 0; slot < all; ++slot) {
                to[found] = slot;
                found += worth[slot] > best.above ? 1 : 0;
            }
        else
            for (int32_t slot = 0; slot < all; ++slot)
                if (best(worth[slot])) to[found++] = slot;
        i = all;
        each_own(seen, [&](int32_t slot) {
            if (best(worth[i]) || i == n - 1) to[found++] = slot;
            ++i;
        });
        return {0, found, to, nullptr};
    }
};
