// Attention over tokens that a policy holds in integers: see SealedGroups in abi.h. Included once per instruction set.
//
// Products of codes with numbers of 16 bits are exact, so they may be fused with sums. Groups that rows of a pass seal but
// that are not stored yet are rounded from pages in the same way, so a row reads the same bits in every pass.

// The nearest of 16 bits.
INLINE f16 rounded16(f16 x) {
    const f16 far = x * 257.0f;
    return far - (far - x);
}

// Codes of one kind of a group, row after row, and the range of each row.
struct CodeRows {
    const uint8_t* codes;
    const float *low, *step;
};

enum CodePart : int32_t { all_bits, low_halves_of, high_halves_of };
// Up to 16 codes from p on.
template <CodePart part>
INLINE f16 codes_at(const uint8_t* p, int32_t n) {
    const u8x16 bytes = load16(p, n);
    if constexpr (part == low_halves_of) return floats_of(bytes & 15);
    else if constexpr (part == high_halves_of) return floats_of(bytes >> 4);
    else return floats_of(bytes);
}
template <CodePart part, class Work>
INLINE void each_of_part(int32_t first, int32_t end, int32_t byte, const Work& work) {
    for (; first + 16 <= end; first += 16, byte += 16) work(first, 16, byte, std::integral_constant<CodePart, part>());
    if (first < end) work(first, end - first, byte, std::integral_constant<CodePart, part>());
}
// Calls work(first code, how many, its byte, which part of it) for a row of n codes, 16 at a time.
template <class Work>
INLINE void each_codes(int32_t n, int32_t bits, const Work& work) {
    const int32_t half = code_bytes(n, bits);
    if (bits == 8) return each_of_part<all_bits>(0, n, 0, work);
    each_of_part<low_halves_of>(0, half, 0, work);
    each_of_part<high_halves_of>(half, n, 0, work);
}

// Queries that are scored, or read, together.
constexpr int32_t code_queries = float_queries < 3 ? float_queries : 3;
// Scores of Q queries for the tokens of a group, to `at` of each query's scores. asked: the queries as they are.
template <int Q>
static __attribute__((noinline)) void score_codes(const Query* queries, const float* const* asked, const CodeRows& keys, int32_t dim, int32_t tokens, int32_t bits, int32_t at) {
    float scaled[Q][most_dim], least[Q];
    each<Q>([&](auto q) ALWAYS_INLINE {
        f16 sum = splat(0.0f);
        for (int32_t i = 0; i < dim; i += 16) {
            const f16 x = load(asked[q] + i, dim - i);
            store(scaled[q] + i, rounded16(x * load(keys.step + i, dim - i)));
            sum = sum + x * load(keys.low + i, dim - i);
        }
        least[q] = total(sum);
    });
    const int32_t bytes = code_bytes(tokens, bits);
    each_codes(tokens, bits, [&](int32_t first, int32_t count, int32_t byte, auto part) ALWAYS_INLINE {
        f16 sums[Q];
        each<Q>([&](auto q) ALWAYS_INLINE { sums[q] = splat(least[q]); });
        const uint8_t* codes = keys.codes + byte;
        for (int32_t d = 0; d < dim; ++d, codes += bytes) {
            const f16 numbers = codes_at<decltype(part)::value>(codes, count);
            each<Q>([&](auto q) ALWAYS_INLINE { sums[q] = sum_of_exact(sums[q], numbers, splat(scaled[q][d])); });
        }
        each<Q>([&](auto q) ALWAYS_INLINE { store(queries[q].scores + at + first, sums[q], count); });
    });
}

// Adds a group's values under weights, which are its scores by now, to what each query has of the chunk. room: [Q][key_chunk].
template <int Q>
static __attribute__((noinline)) void add_codes(const Query* queries, const CodeRows& values, int32_t dim, int32_t tokens, int32_t bits, int32_t at, float* room, float* least) {
    each<Q>([&](auto q) ALWAYS_INLINE {
        const float* weights = queries[q].scores + at;
        f16 sum = splat(0.0f);
        for (int32_t i = 0; i < tokens; i += 16) {
            const f16 w = load(weights + i, tokens - i);
            store(room + q * key_chunk + i, rounded16(w * load(values.step + i, tokens - i)));
            sum = sum + w * load(values.low + i, tokens - i);
        }
        least[q] += total(sum);
    });
    const int32_t bytes = code_bytes(dim, bits);
    each_codes(dim, bits, [&](int32_t first, int32_t count, int32_t byte, auto part) ALWAYS_INLINE {
        f16 sums[Q];
        each<Q>([&](auto q) ALWAYS_INLINE { sums[q] = load(queries[q].chunk + first, count); });
        const uint8_t* codes = values.codes + byte;
        for (int32_t t = 0; t < tokens; ++t, codes += bytes) {
            const f16 numbers = codes_at<decltype(part)::value>(codes, count);
            each<Q>([&](auto q) ALWAYS_INLINE { sums[q] = sum_of_exact(sums[q], numbers, splat(room[q * key_chunk + t])); });
        }
        each<Q>([&](auto q) ALWAYS_INLINE { store(queries[q].chunk + first, sums[q], count); });
    });
}

// Rounds a row of n numbers, `apart` from one to the next, to codes of a range from its least to its largest.
static void round_row(const float* x, int32_t apart, int32_t n, int32_t bits, uint8_t* codes, float& low, float& step) {
    float high = low = x[0];
    for (int32_t i = 1; i < n; ++i) {
        low = x[i * apart] < low ? x[i * apart] : low;
        high = x[i * apart] > high ? x[i * apart] : high;
    }
    const float most = float((1 << bits) - 1);
    step = (high - low) / most;
    const float divisor = step > 0.0f ? step : 1.0f;
    const int32_t half = code_bytes(n, bits);
    for (int32_t i = 0; i < n; ++i) {
        const float found = ((x[i * apart] - low) / divisor + 12582912.0f) - 12582912.0f;
        const uint8_t code = uint8_t(found > 0.0f ? found < most ? found : most : 0.0f);
        codes[i % half] = i < half ? code : uint8_t(codes[i % half] | code << 4);
    }
}

// What one key-value head of a layer holds in integers.
template <class E>
struct Sealed {
    const Policy& policy;
    const SealedGroups* blocks;    // of the layer
    int32_t kv_head, dim;
    float* room;                   // see sealed_floats

    int32_t rows(int32_t kind) const { return kind == 0 ? dim : policy.group; }
    int32_t row(int32_t kind) const { return kind == 0 ? policy.group : dim; }
    bool is_stored(int32_t group) const { return group * policy.group < policy.stored; }
    CodeRows stored(int32_t group, int32_t kind) const {
        const SealedGroups& block = blocks[group / policy.block_groups];
        const int64_t first = (kv_head * block.groups + group % policy.block_groups) * rows(kind);
        return {block.codes[kind] + first * code_bytes(row(kind), policy.code_bits), block.low[kind] + first, block.step[kind] + first};
    }
    // Of a group that lies in pages, as a row sees it.
    CodeRows rounded(const Pages<E>& source, const Visible& seen, int32_t group, int32_t kind) const {
        const int32_t tokens = policy.group, first = group * tokens - policy.stored, run = seen.end - seen.begin;
        float *low = room + tokens * dim, *step = low + rows(kind);
        uint8_t* codes = reinterpret_cast<uint8_t*>(step + rows(kind));
        for (int32_t t = 0; t < tokens; ++t) {
            const int32_t i = first + t, slot = i < run ? seen.begin + i : seen.list[i - run];
            row_of(source[slot], kind, slot, dim, room + t * dim, E());
        }
        for (int32_t r = 0; r < rows(kind); ++r)
            round_row(kind == 0 ? room + r : room + r * dim, kind == 0 ? dim : 1, row(kind), policy.code_bits,
                      codes + r * code_bytes(row(kind), policy.code_bits), low[r], step[r]);
        return {codes, low, step};
    }
};
