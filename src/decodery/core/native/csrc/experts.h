// The experts of a layer: rows choose some, and each that was chosen is read once for all rows that take it. What an expert
// finds for a row depends on that row alone. Included once per instruction set.

#if DECODERY_REGISTERS >= 32 && defined(__x86_64__)
typedef double doubles __attribute__((vector_size(64)));
typedef float halves_of_doubles __attribute__((vector_size(32), aligned(4), may_alias));
// Products of two floats are exact as doubles, so that fusing them with the sum changes nothing.
INLINE doubles sum_of_products(doubles sum, doubles x, doubles y) {
    return reinterpret_cast<doubles>(_mm512_fmadd_pd(reinterpret_cast<__m512d>(x), reinterpret_cast<__m512d>(y), reinterpret_cast<__m512d>(sum)));
}
#else
typedef double doubles __attribute__((vector_size(32)));
typedef float halves_of_doubles __attribute__((vector_size(16), aligned(4), may_alias));
INLINE doubles sum_of_products(doubles sum, doubles x, doubles y) { return sum + x * y; }
#endif
constexpr int32_t dot_lanes = 16, doubles_wide = sizeof(doubles) / sizeof(double);

INLINE doubles load_doubles(const float* p) { return __builtin_convertvector(*reinterpret_cast<const halves_of_doubles*>(p), doubles); }

// y[e * apart] = sum of x * weight[e] over n inputs for E outputs, in sixteen sums that are added in pairs.
template <int E>
static void dot_doubles(const float* x, const float* weight, int32_t n, double* y) {
    constexpr int32_t V = dot_lanes / doubles_wide;
    doubles sums[E][V] = {};
    const int32_t whole = n / dot_lanes * dot_lanes;
    for (int32_t i = 0; i < whole; i += dot_lanes)
        each<V>([&](auto v) ALWAYS_INLINE {
            const doubles by = load_doubles(x + i + v * doubles_wide);
            each<E>([&](auto e) ALWAYS_INLINE { sums[e][v] = sum_of_products(sums[e][v], load_doubles(weight + int64_t(e) * n + i + v * doubles_wide), by); });
        });
    for (int32_t e = 0; e < E; ++e) {
        double lanes[dot_lanes];
        __builtin_memcpy(lanes, sums[e], sizeof lanes);
        for (int32_t i = whole; i < n; ++i) lanes[i - whole] += double(x[i]) * double(weight[int64_t(e) * n + i]);
        for (int32_t width = dot_lanes / 2; width > 0; width /= 2)
            for (int32_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
        y[e] = lanes[0];
    }
}

// What a gate lets through of a value, see `Model`.
INLINE f16 opened(int32_t kind, f16 gate, f16 up) {
    if (kind == 0) return silu(gate) * up;
    if (kind == 1) return gelu(gate) * up;
    if (kind == 3) {
        const f16 positive = larger(splat(0.0f), gate);
        return positive * positive;
    }
    gate = smaller(splat(7.0f), gate);
    up = larger(splat(-7.0f), smaller(splat(7.0f), up));
    return (up + 1.0f) * (silu(gate * 1.702f) / splat(1.702f));
}

struct Mixture {
    const State& state;
    const Model& model;
    const Pass& pass;
    const Layer& layer;
    const Experts& experts;
    const int32_t thread;
    Team& team;

    const ExpertRoom& room() const { return state.experts; }
    const float* normed(int32_t row) const { return state.narrow.floats + int64_t(row) * model.hidden; }
    double* said(int32_t row) const { return room().said + int64_t(row) * experts.count; }
    double* free(int32_t row) const { return room().free + int64_t(row) * experts.count; }
    int32_t places() const { return pass.rows * experts.taken; }

    // What the router makes of rows, of this thread's experts.
    void score() const {
        const Range mine = share(experts.count, thread, team.threads);
        for (int32_t row = 0; row < pass.rows; ++row) {
            const float* x = normed(row);
            const auto weight = [&](int32_t expert) { return experts.router + int64_t(expert) * model.hidden; };
            int32_t expert = mine.begin;
            for (; expert + 4 <= mine.end; expert += 4) dot_doubles<4>(x, weight(expert), model.hidden, said(row) + expert);
            for (; expert < mine.end; ++expert) dot_doubles<1>(x, weight(expert), model.hidden, said(row) + expert);
        }
    }

    // How likely each expert is for some rows, and what it is chosen by.
    void judge(Range rows) const {
        for (int32_t row = rows.begin; row < rows.end; ++row) {
            double *by = said(row), *chosen_by = free(row);
            double largest = by[0], sum = 0.0;
            for (int32_t e = 0; e < experts.count; ++e) {
                if (experts.router_bias != nullptr) by[e] += double(experts.router_bias[e]);
                if (e == 0 || by[e] > largest) largest = by[e];
            }
            for (int32_t e = 0; e < experts.count; ++e) {
                by[e] = experts.sigmoid ? 1.0 / (1.0 + exp(-by[e])) : exp(by[e] - largest);
                sum += by[e];
            }
            for (int32_t e = 0; e < experts.count; ++e) {
                if (!experts.sigmoid) by[e] /= sum;
                chosen_by[e] = experts.choice_bias == nullptr ? by[e] : by[e] + double(experts.choice_bias[e]);
            }
            if (experts.groups > 0) leave_out(chosen_by);
        }
    }
    // Groups that are not among the best.
    void leave_out(double* chosen_by) const {
        const int32_t size = experts.count / experts.groups;
        const auto worth = [&](int32_t group) {
            int32_t best[most_best];
            const int32_t n = experts.group_best;
            largest_of(chosen_by + group * size, size, n, best);
            double sum = 0.0;
            for (int32_t i = 0; i < n; ++i) sum += chosen_by[group * size + best[i]];
            return sum;
        };
        double worths[most_groups];
        int32_t best[most_groups];
        for (int32_t group = 0; group < experts.groups; ++group) worths[group] = worth(group);
        largest_of(worths, experts.groups, experts.taken_groups, best);
        for (int32_t group = 0; group < experts.groups; ++group) {
            bool taken = false;
            for (int32_t i = 0; i < experts.taken_groups; ++i) taken |= best[i] == group;
            for (int32_t e = group * size; !taken && e < (group + 1) * size; ++e) chosen_by[e] = -HUGE_VAL;
        }
    }
    // The places of the k largest of n numbers, the largest first and of equals the first.
    static void largest_of(const double* x, int32_t n, int32_t k, int32_t* best) {
        int32_t count = 0;
        for (int32_t i = 0; i < n; ++i) {
            if (count == k && !(x[i] > x[best[k - 1]])) continue;
            int32_t at = count < k ? count++ : k - 1;
            for (; at > 0 && x[i] > x[best[at - 1]]; --at) best[at] = best[at - 1];
            best[at] = i;
        }
    }

    // The experts of some rows, and their weights.
    void choose(Range rows, int32_t* took) const {
        for (int32_t row = rows.begin; row < rows.end; ++row) {
            int32_t* ids = room().ids + int64_t(row) * experts.taken;
            float* weights = room().weights + int64_t(row) * experts.taken;
            largest_of(free(row), experts.count, experts.taken, ids);
            double sum = experts.nothing;
            for (int32_t i = 0; i < experts.taken; ++i) sum += said(row)[ids[i]];
            for (int32_t i = 0; i < experts.taken; ++i) {
                double weight = said(row)[ids[i]];
                if (experts.normed) weight /= sum;
                if (experts.scales != nullptr) weight *= double(experts.scales[ids[i]]);
                weights[i] = float(weight * experts.scale);
            }
            if (took != nullptr) __builtin_memcpy(took + int64_t(row) * experts.taken, ids, size_t(experts.taken) * sizeof(int32_t));
        }
    }

    // Rows in turn by expert; whether an expert has no weights yet.
    void sort() const {
        int32_t *begins = room().begins, missing = 0;
        for (int32_t e = 0; e <= experts.count; ++e) begins[e] = 0;
        for (int32_t i = 0; i < places(); ++i) ++begins[room().ids[i] + 1];
        for (int32_t e = 0; e < experts.count; ++e) {
            missing |= begins[e + 1] > 0 && experts.gate_up[e].weight == nullptr;
            begins[e + 1] += begins[e];
        }
        *room().missing = missing;
        if (missing) return;
        for (int32_t i = 0; i < places(); ++i) {
            const int32_t place = begins[room().ids[i]]++;
            room().order[place] = i;
            room().places[i] = place;
        }
        for (int32_t e = experts.count; e > 0; --e) begins[e] = begins[e - 1];
        begins[0] = 0;
    }

    // What experts read.
    void gather() const {
        const Range mine = share(places(), thread, team.threads);
        const Linear& first = *experts.gate_up;
        const Quantized& in = room().in;
        const int32_t n = model.hidden;
        float* scaled = state.scratch + thread * state.scratch_stride;
        for (int32_t place = mine.begin; place < mine.end; ++place) {
            const int32_t i = room().order[place], row = i / experts.taken;
            const bool floating = is_floating(first.form);
            if (floating || experts.scaled_inputs) {
                float* to = floating ? in.floats + int64_t(place) * n : scaled;
                const float by = experts.scaled_inputs ? room().weights[i] : 1.0f;
                for (int32_t k = 0; k < n; k += 16) store(to + k, load(normed(row) + k, n - k) * by, n - k);
                if (!floating) quantize(scaled, n, place, in, first.form);
            } else copy_row(state.narrow, row, in, place, is_super(first.form) && has_least(first.form));
        }
    }
    template <class T>
    static void copy_of(const T* from, int32_t row, T* to, int32_t place, int32_t n) {
        __builtin_memcpy(to + int64_t(place) * n, from + int64_t(row) * n, size_t(n) * sizeof(T));
    }
    static void copy_row(const Quantized& from, int32_t row, const Quantized& to, int32_t place, bool leasts) {
        copy_of(from.q, row, to.q, place, from.width);
        copy_of(from.scale, row, to.scale, place, from.groups());
        copy_of(from.offset, row, to.offset, place, from.groups());
        copy_of(from.sums, row, to.sums, place, from.groups() * 4);
        copy_of(from.halves, row, to.halves, place, from.groups() * 2);
        if (!leasts) return;
        copy_of(from.leasts, row, to.leasts, place, from.supers() * 16);
        copy_of(from.least_step, row, to.least_step, place, from.supers());
    }
    static Quantized from_row(Quantized a, int64_t row, int32_t in) {
        a.q += row * a.width;
        a.scale += row * a.groups();
        a.offset += row * a.groups();
        a.sums += row * a.groups() * 4;
        a.halves += row * a.groups() * 2;
        a.leasts += row * a.supers() * 16;
        a.least_step += row * a.supers();
        a.floats += row * in;
        return a;
    }
    // Some panels of a layer.
    static Linear part_of(const Linear& whole, Range span) {
        Linear part = whole;
        const int64_t first = int64_t(span.begin) * panel_width;
        part.weight += span.begin * panel_bytes(whole.form, whole.in);
        if (whole.scale != nullptr) part.scale += first;
        if (whole.bias != nullptr) part.bias += first;
        const int64_t end = int64_t(span.end) * panel_width;
        part.out = int32_t((end < whole.out ? end : whole.out) - first);
        return part;
    }

    // Rows at all places through their experts' matrices, of which threads take some panels at a time.
    void multiply_all(const Linear* matrices, const Quantized& a, float* y) const {
        const int32_t* begins = room().begins;
        const auto taken = [&](int32_t e) { return begins[e + 1] - begins[e]; };
        int32_t all = 0;
        for (int32_t e = 0; e < experts.count; ++e) all += taken(e) > 0 ? panels(matrices[e]) : 0;
        const int32_t at_once = all / (8 * team.threads) > 0 ? all / (8 * team.threads) : 1;
        Team alone;
        int32_t item = team.take(), first = 0;
        for (int32_t e = 0; e < experts.count; ++e) {
            if (taken(e) == 0) continue;
            const Linear& matrix = matrices[e];
            const int32_t count = panels(matrix), items = (count + at_once - 1) / at_once;
            for (; item < first + items; item = team.take()) {
                const Range span = share(count, item - first, items);
                float* to = y + int64_t(begins[e]) * matrix.out + int64_t(span.begin) * panel_width;
                const Linear part = part_of(matrix, span);
                multiply(part, from_row(a, begins[e], matrix.in), taken(e), state.tiles, 0, alone, [&](int32_t panel, int32_t row, f16 y0, f16 y1) {
                    const int32_t at = panel * panel_width, left = part.out - at;
                    store(to + int64_t(row) * matrix.out + at, y0, left);
                    if (left > 16) store(to + int64_t(row) * matrix.out + at + 16, y1, left - 16);
                });
            }
            first += items;
        }
    }
    void open() const { multiply_all(experts.gate_up, room().in, room().opened); }
    // What their second matrices read.
    void close() const {
        const Range mine = share(places(), thread, team.threads);
        const Linear& second = *experts.down;
        const int32_t inner = second.in;
        for (int64_t place = mine.begin; place < mine.end; ++place) {
            const float *gates = room().opened + place * experts.gate_up->out, *ups = gates + (experts.gate_up->out - inner);
            float* to = room().inner.floats + place * inner;
            for (int32_t i = 0; i < inner; i += 16)
                store(to + i, opened(model.opening, load(gates + i, inner - i), load(ups + i, inner - i)), inner - i);
            if (!is_floating(second.form)) quantize(to, inner, int32_t(place), room().inner, second.form);
        }
    }
    // What the experts of some rows found together, the most likely one first, and then what all rows take and state.branch has.
    void add_up(Range rows) const {
        const bool all = layer.down.weight != nullptr;
        for (int32_t row = rows.begin; row < rows.end; ++row) {
            const int32_t* own = room().places + int64_t(row) * experts.taken;
            const float* weights = room().weights + int64_t(row) * experts.taken;
            float *branch = state.branch + int64_t(row) * model.hidden, *to = branch;
            float more = 1.0f;
            if (experts.leave_norm != nullptr) to = state.scratch + thread * state.scratch_stride;
            if (all && experts.share != nullptr) {
                double logit;
                dot_doubles<1>(normed(row), experts.share, model.hidden, &logit);
                more = float(1.0 / (1.0 + exp(-logit)));
            }
            for (int32_t i = 0; i < model.hidden; i += 16) {
                const int32_t n = model.hidden - i;
                f16 sum = splat(0.0f);
                for (int32_t k = 0; k < experts.taken; ++k) {
                    const f16 found = load(room().found + int64_t(own[k]) * model.hidden + i, n) * (experts.scaled_inputs ? 1.0f : weights[k]);
                    sum = k == 0 ? found : sum + found;
                }
                if (all && to == branch) sum = sum + (experts.share != nullptr ? load(branch + i, n) * more : load(branch + i, n));
                store(to + i, sum, n);
            }
            if (to == branch) continue;
            normalize(to, experts.leave_norm, model.hidden, model.eps, to);
            for (int32_t i = 0; i < model.hidden; i += 16) store(branch + i, load(branch + i, model.hidden - i) + load(to + i, model.hidden - i), model.hidden - i);
        }
    }
};
