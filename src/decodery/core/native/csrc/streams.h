// Streams beside the one that layers read, as in Gemma 3n: of all of them a layer predicts what it does, and corrects that by what it
// made of the active one (Alternating Updates). Each row is one thread's. Included once per instruction set.

constexpr int32_t most_streams = 16;    // a vector of them

struct Alternating {
    const State& state;
    const Model& model;
    const Pass& pass;
    const Streams* const all = model.streams;
    const int32_t hidden = model.hidden;

    float* stream(int32_t row, int32_t number) const { return state.streams + (int64_t(row) * all->count + number) * hidden; }
    float* active(int32_t row) const { return stream(row, all->active); }
    float* read(int32_t row) const { return pass.hidden + int64_t(row) * hidden; }
    void copy(float* to, const float* from) const { __builtin_memcpy(to, from, size_t(hidden) * sizeof(float)); }

    float mean_square(const float* x) const {
        f16 squares = splat(0.0f);
        for (int32_t i = 0; i < hidden; i += 16) {
            const f16 v = load(x + i, hidden - i);
            squares = squares + v * v;
        }
        return total(squares) * (1.0f / float(hidden));
    }
    // What x is multiplied by to be as large as `size`, a root mean square.
    float as_large(const float* x, float size) const {
        const float own = mean_square(x);
        return size / __builtin_sqrtf(own < 1e-5f ? 1e-5f : own);
    }

    // Streams that `in` made of what enters the first layer are made as large as that.
    void spread(Range rows) const {
        for (int32_t row = rows.begin; row < rows.end; ++row) {
            const float size = __builtin_sqrtf(mean_square(read(row)));
            copy(stream(row, 0), read(row));
            for (int32_t number = 1; number < all->count; ++number) {
                float* x = stream(row, number);
                const float by = as_large(x, size);
                for (int32_t i = 0; i < hidden; i += 16) store(x + i, load(x + i, hidden - i) * by, hidden - i);
            }
            copy(read(row), active(row));
        }
    }
    // The sum of what streams were turned into, in state.beside.
    void gather(Range rows, int32_t number) const {
        for (int32_t row = rows.begin; row < rows.end; ++row) {
            float *sum = state.beside + int64_t(row) * hidden, *made = state.branch + int64_t(row) * hidden;
            if (number == 0) {
                copy(sum, stream(row, 0));
                continue;
            }
            const float by = as_large(made, __builtin_sqrtf(mean_square(stream(row, 0))));
            for (int32_t i = 0; i < hidden; i += 16) store(sum + i, load(sum + i, hidden - i) + load(made + i, hidden - i) * by, hidden - i);
        }
    }
    void average(Range rows) const {
        for (int32_t row = rows.begin; row < rows.end; ++row) {
            const float *sum = state.beside + int64_t(row) * hidden, count = float(all->count);
            for (int32_t i = 0; i < hidden; i += 16) store(read(row) + i, load(sum + i, hidden - i) / count, hidden - i);
        }
    }

    // What shares are made of, of a row x; y is as wide.
    void route(const StreamLayer& own, const float* x, float* y, float* routed) const {
        alignas(64) float sums[most_streams] = {};
        normalize(x, own.norm, hidden, model.eps, y);
        for (int32_t number = 0; number < all->count; ++number) {
            f16 sum = splat(0.0f);
            for (int32_t i = 0; i < hidden; i += 16) sum = sum + load(y + i, hidden - i) * load(own.router + int64_t(number) * hidden + i, hidden - i);
            sums[number] = total(sum) / float(hidden);
        }
        store(routed, capped(load(sums), 1.0f));
    }
    float share_of(const float* weights, const float* routed) const {
        float sum = 0.0f;
        for (int32_t number = 0; number < all->count; ++number) sum = sum + weights[number] * routed[number];
        return sum;
    }

    // Streams become what they are expected to be after a layer, which reads the active one; y: room for a row.
    void predict(const StreamLayer& own, Range rows, float* y) const {
        alignas(64) float routed[most_streams], shares[most_streams * most_streams];
        for (int32_t row = rows.begin; row < rows.end; ++row) {
            copy(active(row), read(row));
            route(own, read(row), y, routed);
            for (int32_t i = 0; i < all->count * all->count; ++i) shares[i] = share_of(own.predict + i * all->count, routed);
            for (int32_t i = 0; i < hidden; i += 16) {
                f16 before[most_streams];
                for (int32_t from = 0; from < all->count; ++from) before[from] = load(stream(row, from) + i, hidden - i);
                for (int32_t to = 0; to < all->count; ++to) {
                    f16 sum = before[to];
                    for (int32_t from = 0; from < all->count; ++from) sum = sum + before[from] * shares[to * all->count + from];
                    store(stream(row, to) + i, sum, hidden - i);
                }
            }
            copy(read(row), active(row));
        }
    }
    // Streams are corrected by what the layer made of the active one; what it reads for its inputs is left in its place.
    void correct(const StreamLayer& own, Range rows, float* y) const {
        alignas(64) float routed[most_streams], shares[most_streams];
        for (int32_t row = rows.begin; row < rows.end; ++row) {
            float* made = read(row);
            route(own, made, y, routed);
            for (int32_t to = 0; to < all->count; ++to) shares[to] = share_of(own.correct + to * all->count, routed) + 1.0f;
            for (int32_t i = 0; i < hidden; i += 16) {
                const f16 off = load(made + i, hidden - i) - load(active(row) + i, hidden - i);
                for (int32_t to = 0; to < all->count; ++to) {
                    float* x = stream(row, to) + i;
                    store(x, load(x, hidden - i) + off * shares[to], hidden - i);
                }
                f16 next = load(active(row) + i, hidden - i);
                if (own.scale != nullptr) next = next * load(own.scale + i, hidden - i);
                store(made + i, next, hidden - i);
            }
        }
    }
};
