// The mixer of a Mamba-2 layer between its projections: convolution, recurrence along every path of a tree, gated norm.
// Rows are gone through one after another, each from the state of the one before it, so that what a row says does not
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
    const int32_t width = mixing.channels + mixer.heads, rest = mixing.channels - c, n = rest < 16 ? rest : 16;
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

// How long every head's step is at one row, and what it leaves of a state.
static void step(const Mixing& mixing, int32_t row) {
    const Mixer& mixer = *mixing.mixer;
    const int32_t heads = mixer.heads;
    const float* raw = mixing.rows->held + int64_t(mixing.rows->reach + row) * (mixing.channels + heads) + mixing.channels;
    for (int32_t head = 0; head < heads; ++head) {
        const float x = raw[head] + mixer.step_bias[head];
        float wide = x > 20.0f ? x : log1pf(expf(x));
        wide = wide < mixer.least_step ? mixer.least_step : wide > mixer.most_step ? mixer.most_step : wide;
        mixing.steps[int64_t(row) * heads + head] = wide;
        mixing.left[int64_t(row) * heads + head] = expf(wide * mixer.decay[head]);
    }
}

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
        for (int32_t s = 0; s < size; s += 16) {
            const f16 b = load(mixed + led + s, size - s), c = load(mixed + told + s, size - s);
            for (int32_t q = 0; q < Q; ++q) {
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

static void run_mix(void* context, int32_t thread, Team& team) {
    const Mixing& mixing = *static_cast<const Mixing*>(context);
    const Mixer& mixer = *mixing.mixer;
    const Mixed& rows = *mixing.rows;
    const Range parts = share((mixing.channels + 15) / 16, thread, team.threads);
    for (int32_t i = parts.begin; i < parts.end; ++i) convolve(mixing, i * 16);
    const Range own = share(rows.rows, thread, team.threads);
    for (int32_t row = own.begin; row < own.end; ++row) step(mixing, row);
    team.barrier(thread);
    const int32_t fours = (mixer.head_dim + 3) / 4;
    const Range items = share(mixer.heads * fours, thread, team.threads);
    float* room = mixing.room + thread * mixing.room_stride;
    for (int32_t item = items.begin; item < items.end; ++item) {
        const int32_t head = item / fours, p = item % fours * 4;
        if (p + 4 <= mixer.head_dim) scan<4>(mixing, head, p, room);
        else for (int32_t q = p; q < mixer.head_dim; ++q) scan<1>(mixing, head, q, room);
    }
    if (rows.said == 0) return;
    team.barrier(thread);
    const Range said = share(rows.said, thread, team.threads);
    for (int32_t row = said.begin; row < said.end; ++row) gate(mixing, row);
}
