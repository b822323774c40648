// Who wins a race of numbers with noise, without making the noise of those that cannot. Included once per instruction
// set, inside its namespace.

// The upper 52 bits of the hash of token `token` under a key: core/noise.py, SplitMix64.
INLINE int64_t noise_bits(uint64_t key, uint64_t token) {
    uint64_t state = key + token * 0x9E3779B97F4A7C15u;
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
    state = (state ^ state >> 27) * 0x94D049BB133111EBu;
    return int64_t((state ^ state >> 31) >> 12);
}
INLINE double noise_of(int64_t bits) { return -__builtin_log(-__builtin_log((double(bits) + 0.5) * 0x1p-52)); }

// The largest of `count` numbers. A loop over single ones would wait for each comparison.
INLINE float largest_of(const float* x, int32_t count) {
    float most = x[0];
    if (count >= 16) {
        f16 each = load(x);
        for (int32_t i = 16; i + 16 <= count; i += 16) each = larger(load(x + i), each);
        most = maximum<float>(each);
    }
    for (int32_t i = count / 16 * 16; i < count; ++i) most = x[i] > most ? x[i] : most;
    return most;
}

// The indices of row [n] whose number plus Gumbel noise may be the largest, ascending, into ids [room]: mostly one, and
// others only where the last bits of logarithms decide. token(i): the token that number i is of. Returns how many there
// are, -1 where there is no room for them or the row's largest is not finite.
template <class Token>
static int32_t race_of(const float* row, int32_t n, uint64_t key, int32_t room, int32_t* ids, const Token& token) {
    constexpr int32_t block = 128, farthest = 37;    // no noise exceeds 36.8
    const float top = n > 0 ? largest_of(row, n) : 0.0f;
    if (n < 1 || !(top - top == 0)) return -1;
    double best = -__builtin_inf();
    for (int32_t start = 0; start < n; start += block) {
        const int32_t stop = start + block < n ? start + block : n;
        if (largest_of(row + start, stop - start) < top - 4.0f) continue;
        for (int32_t i = start; i < stop; ++i) {
            if (!(row[i] >= top - 4.0f)) continue;
            const double reached = double(row[i]) + noise_of(noise_bits(key, token(i)));
            best = reached > best ? reached : best;
        }
    }
    // The least bits whose noise is at least so large.
    struct Least {
        int64_t of[farthest + 1];
        Least() {
            for (int32_t i = 0; i <= farthest; ++i) of[i] = int64_t(__builtin_exp(-__builtin_exp(-double(i))) * 0x1p52) - 2;
        }
    };
    static const Least least;
    int32_t found = 0;
    for (int32_t start = 0; start < n; start += block) {
        const int32_t stop = start + block < n ? start + block : n;
        const double gap = best - double(largest_of(row + start, stop - start));
        if (!(gap < farthest)) continue;
        if (gap >= 1) {
            int64_t largest = 0;
            for (int32_t i = start; i < stop; ++i) {
                const int64_t bits = noise_bits(key, token(i));
                largest = bits > largest ? bits : largest;
            }
            if (largest < least.of[int32_t(gap)]) continue;
        }
        for (int32_t i = start; i < stop; ++i) {
            const double reached = double(row[i]) + noise_of(noise_bits(key, token(i)));
            const double slack = 1e-9 + 1e-12 * (best < 0 ? -best : best);
            if (!(reached >= best - slack)) continue;
            if (reached > best + slack) found = 0;
            if (reached > best) best = reached;
            if (found == room) return -1;
            ids[found++] = i;
        }
    }
    return found;
}
static int32_t run_race(const float* row, int32_t n, uint64_t key, int32_t room, int32_t* ids) {
    return race_of(row, n, key, room, ids, [](int32_t i) { return uint64_t(i); });
}
