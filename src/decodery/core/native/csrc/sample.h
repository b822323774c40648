// Which tokens texts choose: processors make distributions of logits, and noise, or the largest number, decides. Where
// the sums that a truncation goes by are too near to its border to tell how PyTorch's would come out, tokens are in
// doubt; only if one of these is chosen must Python look. Included once per instruction set, inside its namespace.

constexpr float unsure = 3e-5f;    // of the mass of a distribution, relative: what sums in float32 may differ by
constexpr int32_t few_ties = 8;

// A distribution: numbers x of the tokens `ids`, of all tokens in order while it is dense.
struct Law {
    float *x, *weights;
    int32_t* ids;
    uint8_t* doubts;    // by number: 1 where it may have to be left out
    uint64_t *keys, *spare;
    int32_t n, doubtful;
    bool dense;
    float known_top;    // the largest number, not finite where it has to be looked for

    Law(char* room, int32_t vocab) : n(vocab), doubtful(0), dense(true), known_top(__builtin_inff()) {
        const int64_t width = choosing_width(vocab);
        x = reinterpret_cast<float*>(room);
        weights = x + width;
        ids = reinterpret_cast<int32_t*>(weights + width);
        keys = reinterpret_cast<uint64_t*>(ids + width);
        spare = keys + width;
        doubts = reinterpret_cast<uint8_t*>(spare + width);
    }
    // Leaves out all numbers but those that stay(i).
    template <class Stays>
    void keep(const Stays& stays) {
        int32_t kept = 0;
        doubtful = 0;
        for (int32_t i = 0; i < n; ++i) {
            if (!stays(i)) continue;
            const uint8_t doubt = dense ? 0 : doubts[i];
            x[kept] = x[i];
            ids[kept] = dense ? i : ids[i];
            doubts[kept] = doubt;
            doubtful += doubt;
            ++kept;
        }
        n = kept;
        dense = false;
    }
    float largest() const { return known_top - known_top == 0 ? known_top : largest_of(x, n); }
    // Weights e^(x - top), and their sum. peaks: null, or where the largest weight of each 128 goes.
    double weigh(float top, float* peaks = nullptr) {
        double sum = 0;
        for (int32_t start = 0; start < n; start += 512) {
            f16 part = splat(0.0f);
            const int32_t stop = start + 512 < n ? start + 512 : n;
            for (int32_t block = start; block < stop; block += 128) {
                f16 most = splat(0.0f);
                for (int32_t i = block; i < block + 128 && i < stop; i += 16) {
                    store(weights + i, exponential(load(x + i, n - i) - top), n - i);
                    const f16 each = load(weights + i, n - i);
                    part = part + each;
                    most = larger(each, most);
                }
                if (peaks != nullptr) peaks[block / 128] = maximum<float>(most);
            }
            sum += double(total(part));
        }
        return sum;
    }
};

// Numbers as keys that ascend as the numbers fall; equals have the same.
INLINE uint64_t falling_key(float number, int32_t index) {
    const float plain = number + 0.0f;
    uint32_t bits;
    __builtin_memcpy(&bits, &plain, 4);
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    return uint64_t(~bits) << 32 | uint32_t(index);
}
// Sorts keys by their upper halves, equals in the order they stand in. Returns where they are then.
static uint64_t* sort_keys(uint64_t* keys, uint64_t* spare, int32_t n) {
    for (int32_t shift = 32; shift < 64; shift += 8) {
        int32_t starts[257] = {};
        for (int32_t i = 0; i < n; ++i) ++starts[(keys[i] >> shift & 255) + 1];
        for (int32_t i = 0; i < 256; ++i) starts[i + 1] += starts[i];
        for (int32_t i = 0; i < n; ++i) spare[starts[keys[i] >> shift & 255]++] = keys[i];
        uint64_t* sorted = spare;
        spare = keys;
        keys = sorted;
    }
    return keys;
}

// Whether the law after a top-k is known.
static bool apply_top_k(Law& law, int32_t k, int32_t vocab) {
    if (k >= vocab || k >= law.n) return true;
    if (law.n - law.doubtful < k) return false;
    float border;
    if (k <= 64) {
        int32_t ids[64];
        float values[64];
        run_topk(law.x, law.n, k, ids, values);
        border = values[k - 1];
    } else {
        const float top = law.largest();
        int32_t count = 0;
        for (float distance = 5.0f; count < k; distance = distance < 20.0f ? 2 * distance : __builtin_inff()) {
            count = 0;
            for (int32_t i = 0; i < law.n; ++i)
                if (law.x[i] >= top - distance) law.keys[count++] = falling_key(law.x[i], i);
        }
        border = law.x[uint32_t(sort_keys(law.keys, law.spare, count)[k - 1])];
    }
    law.keep([&](int32_t i) { return law.x[i] >= border; });
    return true;
}

static void apply_top_p(Law& law, double p) {
    float* peaks = reinterpret_cast<float*>(law.spare);
    const double sum = law.weigh(law.largest(), peaks);
    double uncertain = unsure;
    for (int32_t i = 0; law.doubtful > 0 && i < law.n; ++i)
        if (law.doubts[i]) uncertain += double(law.weights[i]) / sum;
    int32_t count = 0;
    for (double least = 1e-2;; least = least > 1e-7 ? least / 10 : 0.0) {
        double found = 0;
        count = 0;
        const float bound = float(least * sum);
        for (int32_t start = 0; start < law.n; start += 128) {
            const int32_t stop = start + 128 < law.n ? start + 128 : law.n;
            if (peaks[start / 128] < bound) continue;
            for (int32_t i = start; i < stop; ++i) {
                if (!(law.weights[i] >= bound) || law.x[i] == -__builtin_inff()) continue;
                law.keys[count++] = falling_key(law.x[i], i);
                found += double(law.weights[i]);
            }
        }
        if (found >= (p + 2 * uncertain) * sum || least == 0) break;
    }
    uint64_t* order = sort_keys(law.keys, law.spare, count);
    double before = 0;
    int32_t kept = 0;
    for (; kept < count && before < (p + uncertain) * sum; ++kept) {
        const uint32_t i = uint32_t(order[kept]);
        const bool doubt = (kept > 0 && before >= (p - uncertain) * sum) || (!law.dense && law.doubts[i]);
        before += double(law.weights[i]);
        order[kept] = uint64_t(i) << 32 | uint32_t(doubt);
    }
    // What stays, in the order it stood in.
    order = sort_keys(order, order == law.keys ? law.spare : law.keys, kept);
    law.doubtful = 0;
    for (int32_t j = 0; j < kept; ++j) {
        const int32_t i = int32_t(order[j] >> 32);
        law.x[j] = law.x[i];
        law.ids[j] = law.dense ? i : law.ids[i];
        law.doubts[j] = uint8_t(order[j] & 1);
        law.doubtful += law.doubts[j];
    }
    law.n = kept;
    law.dense = false;
}

static void apply_min_p(Law& law, double p) {
    const float top = law.largest();
    law.weigh(top);
    const float least = float(p * (1 - double(unsure))), sure = float(p * (1 + double(unsure)));
    int32_t kept = 0;
    law.doubtful = 0;
    for (int32_t i = 0; i < law.n; ++i) {
        if (!(law.weights[i] >= least) || law.x[i] == -__builtin_inff()) continue;
        const bool doubt = (!law.dense && law.doubts[i]) || (law.weights[i] <= sure && law.x[i] != top);
        law.x[kept] = law.x[i];
        law.ids[kept] = law.dense ? i : law.ids[i];
        law.doubts[kept] = doubt;
        law.doubtful += doubt;
        ++kept;
    }
    law.n = kept;
    law.dense = false;
}

// The tokens of a text's tail and of a path, ascending.
static int32_t sorted_tail(const Processor& processor, const int64_t* path, int32_t depth, int64_t* to) {
    int32_t count = 0;
    const auto put = [&](int64_t token) {
        int32_t place = count++;
        for (; place > 0 && to[place - 1] > token; --place) to[place] = to[place - 1];
        to[place] = token;
    };
    for (int32_t i = 0; i < processor.tail_count; ++i) put(processor.tail[i]);
    for (int32_t i = 0; i < depth; ++i) put(path[i]);
    return count;
}

// change(id, count) for every token that occurs.
template <class Change>
static void for_counts(const Processor& processor, const int64_t* path, int32_t depth, int32_t vocab, int64_t* room, const Change& change) {
    const int32_t more = sorted_tail(processor, path, depth, room);
    int32_t i = 0, j = 0;
    while (i < processor.count || j < more) {
        const int64_t id = j >= more || (i < processor.count && processor.ids[i] <= room[j]) ? processor.ids[i] : room[j];
        int64_t count = 0;
        if (i < processor.count && processor.ids[i] == id) count += processor.counts[i++];
        for (; j < more && room[j] == id; ++j) ++count;
        if (id < vocab && count > 0) change(id, count);
    }
}

// Whether all masks of a text after a node are known.
static bool masks_known(const Sampling& s, int32_t text, int32_t node) {
    for (int32_t i = 0; i < s.processor_counts[text]; ++i) {
        const Processor& processor = s.processors[text][i];
        if (processor.shape == mask && (node >= processor.count || processor.ids[node] == 0)) return false;
    }
    return true;
}

// Subtracts from all numbers [n] whose bit is 0.
static void apply_mask(float* x, int32_t n, const uint32_t* bits, float less) {
    for (int32_t start = 0; start < n; start += 32) {
        const uint32_t allowed = bits[start / 32];
        const int32_t stop = start + 32 < n ? start + 32 : n;
        for (int32_t i = start; i < stop; ++i) x[i] -= (allowed >> (i - start) & 1) != 0 ? 0.0f : less;
    }
}

// Applies one processor after a node; whether the law is known then.
static bool apply(const Processor& processor, Law& law, int64_t position, const int64_t* path, int32_t depth, int32_t node, int32_t vocab) {
    float* x = law.x;
    int64_t* room = reinterpret_cast<int64_t*>(law.keys);
    const float value = float(processor.value);
    switch (processor.shape) {
        case mask: apply_mask(x, law.n, reinterpret_cast<const uint32_t*>(processor.ids[node]), value); return true;
        case not_before:
            for (int32_t i = 0; position < int64_t(processor.value) && i < processor.count; ++i) x[processor.ids[i]] = -__builtin_inff();
            return true;
        case bias:
            for (int32_t i = 0; i < processor.count; ++i) x[processor.ids[i]] += processor.biases[i];
            return true;
        case repetition:
            for_counts(processor, path, depth, vocab, room, [&](int64_t id, int64_t) { x[id] = x[id] < 0 ? x[id] * value : x[id] / value; });
            return true;
        case frequency:
            for_counts(processor, path, depth, vocab, room, [&](int64_t id, int64_t count) { x[id] += float(count) * -value; });
            return true;
        case presence:
            for_counts(processor, path, depth, vocab, room, [&](int64_t id, int64_t) { x[id] += -value; });
            return true;
        case temperature:
            law.known_top = __builtin_inff();
            for (int32_t i = 0; i < law.n; i += 16) store(x + i, load(x + i, law.n - i) / value, law.n - i);
            return true;
        case top_k: return apply_top_k(law, int32_t(processor.value), vocab);
        case top_p: apply_top_p(law, processor.value); return true;
        default: apply_min_p(law, processor.value); return true;
    }
}

// core/noise.py: SplitMix64.
INLINE uint64_t mixed(uint64_t state, uint64_t word) {
    state = (state ^ word) + 0x9E3779B97F4A7C15u;
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
    state = (state ^ state >> 27) * 0x94D049BB133111EBu;
    return state ^ state >> 31;
}

// The token after a node whose logits are row [vocab], of which the first `limit` count; -1 where Python must look. path:
// the tokens of the node's path below the root. Its masks are known.
static int64_t choose_token(const Sampling& s, int32_t text, int32_t node, const float* row, const int64_t* path, int32_t depth, char* room) {
    const int64_t position = s.positions[text] + depth;
    const uint64_t key = mixed(mixed(mixed(0, s.seeds[text]), 0), uint64_t(position));
    int32_t best, ties[few_ties];
    float top;
    const auto finite = [&](const float* x, int32_t n) { return n > 0 && run_topk(x, n, 1, &best, &top) && top - top == 0; };
    if (s.processor_counts[text] == 0) {
        if (!finite(row, s.limit)) return -1;
        if (s.greedy[text]) return best;
        return run_race(row, s.limit, key, few_ties, ties) == 1 ? ties[0] : -1;
    }
    if (!finite(row, s.limit)) return -1;
    Law law(room, s.limit);
    const Processor* processors = s.processors[text];
    // A temperature that comes first is applied while the numbers are copied, and what was the largest one stays it.
    const bool tempered = processors[0].shape == temperature && processors[0].value > 0;
    if (tempered) {
        const float value = float(processors[0].value);
        for (int32_t i = 0; i < law.n; i += 16) store(law.x + i, load(row + i, law.n - i) / value, law.n - i);
        law.known_top = top / value;
    } else {
        __builtin_memcpy(law.x, row, size_t(s.limit) * sizeof(float));
    }
    for (int32_t i = tempered; i < s.processor_counts[text]; ++i) {
        const Processor& processor = processors[i];
        if (!apply(processor, law, position, path, depth, node, s.limit)) return -1;
        if (processor.shape < temperature && !finite(law.x, law.n)) return -1;
    }
    if (s.greedy[text]) return finite(law.x, law.n) ? best : -1;
    if (law.dense) return run_race(law.x, law.n, key, few_ties, ties) == 1 ? ties[0] : -1;
    const int32_t* ids = law.ids;
    if (race_of(law.x, law.n, key, few_ties, ties, [ids](int32_t i) { return uint64_t(ids[i]); }) != 1) return -1;
    return law.doubts[ties[0]] ? -1 : ids[ties[0]];
}

static void choose_text(const Sampling& s, int32_t text, char* room) {
    const int32_t first = s.first[text], rows = s.first[text + 1] - first;
    int32_t depth = s.waiting ? -2 - s.accepted[text] : 0, node = 0;
    int64_t path[1024];
    for (int32_t i = 0; i < depth; ++i) path[i] = s.tokens[first + (node = s.paths[first + i])];
    for (;;) {
        if (!masks_known(s, text, node)) {
            s.accepted[text] = -2 - depth;
            return;
        }
        float* row = s.logits + int64_t(first + node) * s.vocab;
        const int64_t token = choose_token(s, text, node, row, path, depth, room);
        if (token < 0) {
            s.accepted[text] = -1;
            return;
        }
        int32_t child = node + 1;
        while (child < rows && (s.parents[first + child] != node || s.tokens[first + child] != token)) ++child;
        if (child >= rows || depth == 1024) {
            s.accepted[text] = depth;
            s.chosen[text] = token;
            return;
        }
        path[depth] = token;
        s.paths[first + depth++] = node = child;
    }
}

static void run_sample(void* context, int32_t thread, Team& team) {
    const Choosing& choosing = *static_cast<const Choosing*>(context);
    const Sampling& s = *choosing.sampling;
    for (int32_t text = thread; text < s.texts; text += team.threads) {
        if (s.waiting && s.accepted[text] > -2) continue;
        for (int32_t row = s.first[text]; row < s.first[text + 1]; ++row) {
            float* x = s.logits + int64_t(row) * s.vocab;
            for (int32_t i = s.limit; i < s.vocab; ++i) x[i] = -__builtin_inff();
            for (int32_t i = 0; i < s.padding_count; ++i) x[s.padding[i]] = -__builtin_inff();
        }
        choose_text(s, text, choosing.room + thread * choosing.room_bytes);
    }
}
