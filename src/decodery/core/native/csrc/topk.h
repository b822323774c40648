// The largest of many numbers in one sweep: blocks of 128 whose maximum does not reach the list so far are passed over.
// Included once per instruction set, inside its namespace.

// The k largest of row [n], best first, the lowest index among equals, into ids and values [k], k <= n; false: one is
// not a number.
static bool run_topk(const float* row, int32_t n, int32_t k, int32_t* ids, float* values) {
    constexpr int32_t block = 128;
    int32_t found = 0;
    i16 strange = isplat(0);
    for (int32_t start = 0; start < n; start += block) {
        const int32_t stop = start + block < n ? start + block : n;
        if (stop - start == block) {
            f16 most = load(row + start);
            strange |= most != most;
            for (int32_t i = 16; i < block; i += 16) {
                const f16 x = load(row + start + i);
                strange |= x != x;
                most = larger(x, most);
            }
            if (found == k && !(maximum<float>(most) > values[k - 1])) continue;
        }
        for (int32_t i = start; i < stop; ++i) {
            const float x = row[i];
            if (x != x) return false;
            if (found == k && !(x > values[k - 1])) continue;
            int32_t place = found < k ? found++ : k - 1;
            for (; place > 0 && x > values[place - 1]; --place) {
                values[place] = values[place - 1];
                ids[place] = ids[place - 1];
            }
            values[place] = x;
            ids[place] = i;
        }
    }
    return isum(strange) == 0;
}

// Of a row [n], the first of whose k given values is the largest: the values to probabilities.
static void run_chances(const float* row, int32_t n, int32_t k, float* values) {
    const float largest = values[0];
    f16 sum = splat(0.0f);
    for (int32_t i = 0; i < n; i += 16) {
        float lanes[16];
        store(lanes, exponential(load(row + i, n - i) - largest));
        sum = sum + load(lanes, n - i);
    }
    const float inverse = 1.0f / total(sum);
    for (int32_t i = 0; i < k; i += 16) store(values + i, exponential(load(values + i, k - i) - largest) * inverse, k - i);
}

// Of a row [n]: the logarithm of the sum of e^x, and the entropy in nats, into found [2]; false: one is not a number, or
// the largest is infinite.
static bool run_sums(const float* row, int32_t n, double* found) {
    constexpr int32_t block = 512;
    float last[16];
    for (int32_t lane = 0; lane < 16; ++lane) last[lane] = n / 16 * 16 + lane < n ? row[n / 16 * 16 + lane] : -__builtin_inff();
    f16 most = load(last);
    i16 strange = most != most;
    for (int32_t i = 0; i + 16 <= n; i += 16) {
        const f16 x = load(row + i);
        strange |= x != x;
        most = larger(x, most);
    }
    const float largest = maximum<float>(most);
    if (isum(strange) != 0 || largest - largest != 0) return false;
    double sum = 0, moment = 0;
    for (int32_t start = 0; start < n; start += block) {
        f16 part = splat(0.0f), weighted = splat(0.0f);
        for (int32_t i = start; i < start + block && i < n; i += 16) {
            // What is minus infinity weighs e^-87, not nothing, which no sum shows.
            const f16 apart = larger(splat(-87.0f), (i + 16 <= n ? load(row + i) : load(last)) - largest);
            const f16 weight = exponential(apart);
            part = part + weight;
            weighted = weighted + weight * apart;
        }
        sum += double(total(part));
        moment += double(total(weighted));
    }
    found[0] = double(largest) + __builtin_log(sum);
    found[1] = __builtin_log(sum) - moment / sum;
    return true;
}
