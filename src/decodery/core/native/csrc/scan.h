// The mixer of a layer with a state, between its projections: convolution, recurrence along every path of a tree, gated
// norm. Rows are gone through one after another, each from the state of the one before it, so that what a row says does not
// depend on what shares its pass. Included once per instruction set, inside its namespace.

// The row right before tentative row i, as it lies in `held`; -1: none.
INLINE int32_t before(const Mixed& rows, int32_t place) {
    if (place < rows.reach || rows.parents == nullptr) return place - 1;
    const int32_t parent = rows.parents[place - rows.reach];
    return rows.reach + (parent < 0 ? -1 : parent);
}

// 16 channels from c on, or as many as there are, of every tentative row behind the convolution.
static void convolve(const Mixing& mixing, int32_t c) {
    const Mixer& mixer = *mixing.mixer;
    const Mixed& rows = *mixing.rows;
    const int32_t width = mixed_width(mixer), rest = mixing.channels - c, n = rest < 16 ? rest : 16;
    f16 taps[most_taps];
    for (int32_t k = 0; k < mixer.kernel; ++k) {
        float lanes[16] = {};
        for (int32_t i = 0; i < n; ++i) lanes[i] = mixer.conv[int64_t(c + i) * mixer.kernel + k];
        taps[k] = load(lanes);
    }
    const f16 bias = mixer.conv_bias != nullptr ? load(mixer.conv_bias + c, n) : splat(0.0f);
    for (int32_t row = 0; row < rows.rows; ++row) {
        f16 sum = splat(0.0f);
        int32_t place = rows.reach + row;
        for (int32_t k = mixer.kernel; k > 0 && place >= 0; --k, place = before(rows, place))
            sum = sum + load(rows.held + int64_t(place) * width + c, n) * taps[k - 1];
        store(mixing.mixed + int64_t(row) * mixing.channels + c, silu(sum + bias), n);
    }
}

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// x times y, of n numbers.
static float product(const float* x, const float* y, int32_t n) {
    f16 sums[2] = {splat(0.0f), splat(0.0f)};
    int32_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int32_t u = 0; u < 2; ++u) sums[u] = sums[u] + load(x + i + 16 * u) * load(y + i + 16 * u);
    for (; i < n; i += 16) sums[0] = sums[0] + load(x + i, n - i) * load(y + i, n - i);
    return total(sums[0] + sums[1]);
}

// Of mamba1: what a row's steps are made of, what leads into its states and out of them, and how long its steps are.
static void lead(const Mixing& mixing, int32_t at) {
    const Mixer& mixer = *mixing.mixer;
    const int32_t width = mixed_left(mixer);
    const float* weight = mixer.select_in + int64_t(at) * mixer.heads;
    for (int32_t row = 0; row < mixing.rows->rows; ++row)
        mixing.left[int64_t(row) * width + at] = product(weight, mixing.mixed + int64_t(row) * mixing.channels, mixer.heads);
}
static void norm_leads(const Mixing& mixing, int32_t row) {
    const Mixer& mixer = *mixing.mixer;
    float* led = mixing.left + int64_t(row) * mixed_left(mixer);
    const float* weight = mixer.select_norm;
    const int32_t sizes[3] = {mixer.rank, mixer.state, mixer.state};
    for (const int32_t n : sizes) {
        const float scale = 1.0f / sqrtf(product(led, led, n) / float(n) + mixer.step_eps);
        for (int32_t i = 0; i < n; ++i) led[i] = led[i] * scale * (weight != nullptr ? weight[i] : 1.0f);
        led += n;
        if (weight != nullptr) weight += n;
    }
}
static void widen(const Mixing& mixing, int32_t channel) {
    const Mixer& mixer = *mixing.mixer;
    const float* weight = mixer.select_out + int64_t(channel) * mixer.rank;
    for (int32_t row = 0; row < mixing.rows->rows; ++row) {
        const float x = product(weight, mixing.left + int64_t(row) * mixed_left(mixer), mixer.rank);
        mixing.steps[int64_t(row) * mixer.heads + channel] = softplus(x + mixer.step_bias[channel]);
    }
}

// How long every head's step is at one row, and what it leaves of a state.
static void step(const Mixing& mixing, int32_t row) {
    const Mixer& mixer = *mixing.mixer;
    const int32_t heads = mixer.heads;
    const float* raw = mixing.rows->held + int64_t(mixing.rows->reach + row) * mixed_width(mixer) + mixing.channels;
    const bool delta = mixer.rule == gated_delta;
    const float* written = raw;
    if (delta) raw += heads;
    for (int32_t head = 0; head < heads; ++head) {
        const float x = raw[head] + mixer.step_bias[head];
        float wide = softplus(x);
        wide = wide < mixer.least_step ? mixer.least_step : wide > mixer.most_step ? mixer.most_step : wide;
        mixing.steps[int64_t(row) * heads + head] = delta ? 1.0f / (1.0f + expf(-written[head])) : wide;
        mixing.left[int64_t(row) * heads + head] = expf(wide * mixer.decay[head]);
    }
}

constexpr int32_t states_ahead = 2048;    // numbers that are fetched before they are needed: states come in parts too short for the machine to see

// Q rows of one head's state, [Q][state] from p on, through all rows.
template <int32_t Q>
static void scan(const Mixing& mixing, int32_t head, int32_t p, float* room) {
    const Mixer& mixer = *mixing.mixer;
    const Mixed& rows = *mixing.rows;
    const int32_t size = mixer.state, inner = mixer.heads * mixer.head_dim, at = head * mixer.head_dim + p;
    const int32_t led = inner + head / (mixer.heads / mixer.groups) * size, told = led + mixer.groups * size;
    const float* begin = rows.state + int64_t(at) * size;
    float* after = rows.after == nullptr ? nullptr : rows.after + int64_t(at) * size;
    for (int32_t row = 0; row < rows.rows; ++row) {
        const float* mixed = mixing.mixed + int64_t(row) * mixing.channels;
        const int32_t parent = rows.parents != nullptr ? rows.parents[row] : row - 1;
        const int64_t place = rows.parents != nullptr ? row : 0, last = rows.parents != nullptr ? parent : 0;
        float* to = after != nullptr ? after : room + place * Q * size;
        const float* from = parent < 0 ? begin : after != nullptr ? after : room + last * Q * size;
        const f16 left = splat(mixing.left[int64_t(row) * mixer.heads + head]);
        const float wide = mixing.steps[int64_t(row) * mixer.heads + head];
        f16 added[Q], sums[Q];
        for (int32_t q = 0; q < Q; ++q) added[q] = splat(wide * mixed[at + q]), sums[q] = splat(0.0f);
        const float* soon = row == 0 ? begin + states_ahead : from;
        for (int32_t s = 0; s < size; s += 16) {
            const f16 b = load(mixed + led + s, size - s), c = load(mixed + told + s, size - s);
            for (int32_t q = 0; q < Q; ++q) {
                __builtin_prefetch(soon + q * size + s);
                const f16 state = load(from + q * size + s, size - s) * left + b * added[q];
                store(to + q * size + s, state, size - s);
                sums[q] = sums[q] + state * c;
            }
        }
        const int32_t said = row - (rows.rows - rows.said);
        if (said < 0) continue;
        for (int32_t q = 0; q < Q; ++q)
            rows.out[int64_t(said) * inner + at + q] = total(sums[q]) + mixed[at + q] * mixer.skip[head];
    }
}

// The states of Q channels of mamba1, [Q][state] from channel c on, through all rows.
template <int32_t Q>
static void scan_channels(const Mixing& mixing, int32_t c, float* room) {
    const Mixer& mixer = *mixing.mixer;
    const Mixed& rows = *mixing.rows;
    const int32_t size = mixer.state, inner = mixer.heads;
    const float *begin = rows.state + int64_t(c) * size, *decay = mixer.decay + int64_t(c) * size;
    float* after = rows.after == nullptr ? nullptr : rows.after + int64_t(c) * size;
    for (int32_t row = 0; row < rows.rows; ++row) {
        const float* mixed = mixing.mixed + int64_t(row) * mixing.channels + c;
        const float *led = mixing.left + int64_t(row) * mixed_left(mixer) + mixer.rank, *told = led + size;
        const int32_t parent = rows.parents != nullptr ? rows.parents[row] : row - 1;
        const int64_t place = rows.parents != nullptr ? row : 0, last = rows.parents != nullptr ? parent : 0;
        float* to = after != nullptr ? after : room + place * Q * size;
        const float* from = parent < 0 ? begin : after != nullptr ? after : room + last * Q * size;
        const int32_t said = row - (rows.rows - rows.said);
        for (int32_t q = 0; q < Q; ++q) {
            const float wide = mixing.steps[int64_t(row) * inner + c + q];
            const f16 added = splat(wide * mixed[q]), width = splat(wide);
            f16 sum = splat(0.0f);
            for (int32_t s = 0; s < size; s += 16) {
                const int32_t n = size - s;
                const f16 left = exponential(load(decay + q * size + s, n) * width);
                const f16 state = load(from + q * size + s, n) * left + load(led + s, n) * added;
                store(to + q * size + s, state, n);
                sum = sum + state * load(told + s, n);
            }
            if (said >= 0) rows.out[int64_t(said) * inner + c + q] = total(sum) + mixed[q] * mixer.skip[c + q];
        }
    }
}

// Queries and keys of one group at a row, made of length 1, queries over the root of their length. item: row, then queries
// and keys of each group.
static void shorten(const Mixing& mixing, int32_t item) {
    const Mixer& mixer = *mixing.mixer;
    const int32_t each = 2 * mixer.groups, size = mixer.state, part = item % each;
    float* x = mixing.mixed + int64_t(item / each) * mixing.channels + part * size;
    f16 squares = splat(0.0f);
    for (int32_t i = 0; i < size; i += 16) {
        const f16 v = load(x + i, size - i);
        squares = squares + v * v;
    }
    float scale = 1.0f / sqrtf(total(squares) + 1e-6f);
    if (part < mixer.groups) scale = scale / sqrtf(float(size));
    for (int32_t i = 0; i < size; i += 16) store(x + i, load(x + i, size - i) * scale, size - i);
}

// 16 values of one head's state from p on, or as many as there are, through all rows: a state forgets, what it has for a
// row's key is taken towards the row's value, and what it then has for the query is said.
template <bool whole>
static void scan_delta(const Mixing& mixing, int32_t head, int32_t p, float* room) {
    const Mixer& mixer = *mixing.mixer;
    const Mixed& rows = *mixing.rows;
    const int32_t size = mixer.state, dim = mixer.head_dim, n = dim - p;
    const int32_t group = mixer.in_turns != 0 ? head % mixer.groups : head / (mixer.heads / mixer.groups);
    const int32_t keys = (mixer.groups + group) * size, values = 2 * mixer.groups * size + head * dim + p;
    const int64_t at = int64_t(head) * size * dim + p;
    const auto get = [&](const float* x) { return whole ? load(x) : load(x, n); };
    const auto put = [&](float* x, f16 v) { whole ? store(x, v) : store(x, v, n); };
    float* after = rows.after == nullptr ? nullptr : rows.after + at;
    const int32_t to_stride = after != nullptr ? dim : 16;
    // Where the next values' states are.
    const int64_t ahead = p + 16 < dim ? 16 : int64_t(size) * dim - p;
    for (int32_t row = 0; row < rows.rows; ++row) {
        const float* mixed = mixing.mixed + int64_t(row) * mixing.channels;
        const float *key = mixed + keys, *query = mixed + group * size;
        const int32_t parent = rows.parents != nullptr ? rows.parents[row] : row - 1;
        const int64_t place = rows.parents != nullptr ? row : 0, last = rows.parents != nullptr ? parent : 0;
        float* to = after != nullptr ? after : room + place * 16 * size;
        const float* from = parent < 0 ? rows.state + at : after != nullptr ? after : room + last * 16 * size;
        const int32_t stride = parent < 0 ? dim : to_stride;
        const float left = mixing.left[int64_t(row) * mixer.heads + head];
        const float* soon = row == 0 ? from + ahead : from;
        f16 known[4], sums[4];
        for (int32_t u = 0; u < 4; ++u) known[u] = sums[u] = splat(0.0f);
        int32_t k = 0;
        for (; k + 4 <= size; k += 4)
            for (int32_t u = 0; u < 4; ++u) {
                __builtin_prefetch(soon + (k + u) * stride);
                known[u] = known[u] + get(from + (k + u) * stride) * splat(key[k + u]);
            }
        for (; k < size; ++k) known[0] = known[0] + get(from + k * stride) * splat(key[k]);
        const f16 told = ((known[0] + known[1]) + (known[2] + known[3])) * left;
        const f16 added = (get(mixed + values) - told) * mixing.steps[int64_t(row) * mixer.heads + head];
        const auto go = [&](int32_t i, f16& sum) {
            const f16 state = get(from + i * stride) * left + added * splat(key[i]);
            put(to + i * to_stride, state);
            sum = sum + state * splat(query[i]);
        };
        for (k = 0; k + 4 <= size; k += 4)
            for (int32_t u = 0; u < 4; ++u) go(k + u, sums[u]);
        for (; k < size; ++k) go(k, sums[0]);
        const int32_t said = row - (rows.rows - rows.said);
        if (said < 0) continue;
        put(rows.out + int64_t(said) * mixer.heads * dim + head * dim + p, (sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
}

// What a row says, normed by head and then gated.
static void gate_delta(const Mixing& mixing, int32_t said) {
    const Mixer& mixer = *mixing.mixer;
    const int32_t dim = mixer.head_dim;
    for (int32_t head = 0; head < mixer.heads; ++head) {
        const float* open = mixing.rows->gate + int64_t(said) * mixing.rows->gate_stride + head * dim;
        float* out = mixing.rows->out + (int64_t(said) * mixer.heads + head) * dim;
        f16 squares = splat(0.0f);
        for (int32_t i = 0; i < dim; i += 16) {
            const f16 x = load(out + i, dim - i);
            squares = squares + x * x;
        }
        const float scale = 1.0f / sqrtf(total(squares) / float(dim) + mixer.eps);
        for (int32_t i = 0; i < dim; i += 16) {
            const int32_t n = dim - i;
            store(out + i, load(out + i, n) * scale * load(mixer.gate_norm + i, n) * silu(load(open + i, n)), n);
        }
    }
}

// What a row says, gated and, where there is a norm, normed by group.
static void gate(const Mixing& mixing, int32_t said) {
    const Mixer& mixer = *mixing.mixer;
    const int32_t inner = mixer.heads * mixer.head_dim, group = inner / mixer.groups;
    const float* open = mixing.rows->gate + int64_t(said) * mixing.rows->gate_stride;
    float* out = mixing.rows->out + int64_t(said) * inner;
    for (int32_t first = 0; first < inner; first += group) {
        f16 squares = splat(0.0f);
        for (int32_t i = first; i < first + group; i += 16) {
            const int32_t n = first + group - i;
            const f16 x = load(out + i, n) * silu(load(open + i, n));
            squares = squares + x * x;
            store(out + i, x, n);
        }
        if (mixer.gate_norm == nullptr) continue;
        const float scale = 1.0f / sqrtf(total(squares) / float(group) + mixer.eps);
        for (int32_t i = first; i < first + group; i += 16) {
            const int32_t n = first + group - i;
            store(out + i, load(out + i, n) * scale * load(mixer.gate_norm + i, n), n);
        }
    }
}

// The stages of mixing, of this thread's part; all threads meet after each.
static void mix_inputs(const Mixing& mixing, int32_t thread, int32_t threads) {
    const Range parts = share((mixing.channels + 15) / 16, thread, threads);
    for (int32_t i = parts.begin; i < parts.end; ++i) convolve(mixing, i * 16);
    const Range own = share(mixing.rows->rows, thread, threads);
    for (int32_t row = own.begin; row < own.end && mixing.mixer->rule != mamba1; ++row) step(mixing, row);
}
static void mix_leads(const Mixing& mixing, int32_t thread, int32_t threads) {
    const Range own = share(mixed_left(*mixing.mixer), thread, threads);
    for (int32_t at = own.begin; at < own.end; ++at) lead(mixing, at);
}
static void mix_lead_norms(const Mixing& mixing, int32_t thread, int32_t threads) {
    const Range own = share(mixing.rows->rows, thread, threads);
    for (int32_t row = own.begin; row < own.end && mixing.mixer->step_eps > 0.0f; ++row) norm_leads(mixing, row);
}
static void mix_steps(const Mixing& mixing, int32_t thread, int32_t threads) {
    const Range own = share(mixing.mixer->heads, thread, threads);
    for (int32_t channel = own.begin; channel < own.end; ++channel) widen(mixing, channel);
}
static void mix_lengths(const Mixing& mixing, int32_t thread, int32_t threads) {
    const Range heads = share(mixing.rows->rows * 2 * mixing.mixer->groups, thread, threads);
    for (int32_t item = heads.begin; item < heads.end; ++item) shorten(mixing, item);
}
// Of several mixings of one layer: each begins where the one before it ends.
static void mix_states(const Mixing* mixings, int32_t count, int32_t thread, int32_t threads) {
    const Mixer& mixer = *mixings->mixer;
    if (mixer.rule == mamba1) {
        const Range own = share((mixer.heads + 3) / 4, thread, threads);
        float* room = mixings->room + thread * mixings->room_stride;
        for (int32_t item = own.begin; item < own.end; ++item)
            for (int32_t i = 0; i < count; ++i) {
                const int32_t c = 4 * item;
                if (c + 4 <= mixer.heads) scan_channels<4>(mixings[i], c, room);
                else for (int32_t q = c; q < mixer.heads; ++q) scan_channels<1>(mixings[i], q, room);
            }
        return;
    }
    const bool delta = mixer.rule == gated_delta;
    const int32_t step_of = delta ? 16 : 4, pieces = (mixer.head_dim + step_of - 1) / step_of;
    const Range items = share(mixer.heads * pieces, thread, threads);
    float* room = mixings->room + thread * mixings->room_stride;
    for (int32_t item = items.begin; item < items.end; ++item)
        for (int32_t i = 0; i < count; ++i) {
            const Mixing& mixing = mixings[i];
            const int32_t head = item / pieces, p = item % pieces * step_of;
            const bool fits = p + step_of <= mixer.head_dim;
            if (delta) fits ? scan_delta<true>(mixing, head, p, room) : scan_delta<false>(mixing, head, p, room);
            else if (fits) scan<4>(mixing, head, p, room);
            else for (int32_t q = p; q < mixer.head_dim; ++q) scan<1>(mixing, head, q, room);
        }
}
static void mix_gates(const Mixing& mixing, int32_t thread, int32_t threads) {
    const Range said = share(mixing.rows->said, thread, threads);
    for (int32_t row = said.begin; row < said.end; ++row) mixing.mixer->rule == gated_delta ? gate_delta(mixing, row) : gate(mixing, row);
}

static void run_mix(void* context, int32_t thread, Team& team) {
    const Mixing& mixing = *static_cast<const Mixing*>(context);
    mix_inputs(mixing, thread, team.threads);
    team.barrier(thread);
    if (mixing.mixer->rule == gated_delta) {
        mix_lengths(mixing, thread, team.threads);
        team.barrier(thread);
    }
    if (mixing.mixer->rule == mamba1) {
        mix_leads(mixing, thread, team.threads);
        team.barrier(thread);
        mix_lead_norms(mixing, thread, team.threads);
        team.barrier(thread);
        mix_steps(mixing, thread, team.threads);
        team.barrier(thread);
    }
    mix_states(&mixing, 1, thread, team.threads);
    if (mixing.rows->said == 0) return;
    team.barrier(thread);
    mix_gates(mixing, thread, team.threads);
}
