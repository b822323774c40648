// Attention over latents, before and after attention itself: queries go to what is kept of rows, and sums of that become values.
// Every number is one sum in one order, whatever rows are beside it. Included once per instruction set.

// Columns [c, c + 16 * V) of to [R rows] = x [R rows][depth] times weight [depth][columns], times scale.
template <int V, int R, class E>
static void latent_tile(const float* x, int64_t x_apart, const E* weight, int32_t depth, int32_t columns, int32_t c, float scale, float* to, int64_t apart) {
    f16 sums[R][V] = {};
    const int32_t n = columns - c;
    for (int32_t p = 0; p < depth; ++p) {
        f16 by[V];
        each<V>([&](auto v) ALWAYS_INLINE { by[v] = load(weight + int64_t(p) * columns + c + v * 16, n - v * 16); });
        each<R>([&](auto r) ALWAYS_INLINE {
            const float one = x[r * x_apart + p];
            each<V>([&](auto v) ALWAYS_INLINE { sums[r][v] = sums[r][v] + by[v] * one; });
        });
    }
    each<R>([&](auto r) ALWAYS_INLINE { each<V>([&](auto v) ALWAYS_INLINE { store(to + r * apart + c + v * 16, sums[r][v] * scale, n - v * 16); }); });
}
template <int R, class E>
static void latent_rows(const float* x, int64_t x_apart, const E* weight, int32_t depth, int32_t columns, float scale, float* to, int64_t apart) {
    constexpr int32_t V = 4;
    int32_t c = 0;
    for (; c + 16 * V <= columns; c += 16 * V) latent_tile<V, R>(x, x_apart, weight, depth, columns, c, scale, to, apart);
    for (; c < columns; c += 16) latent_tile<1, R>(x, x_apart, weight, depth, columns, c, scale, to, apart);
}

struct Latents {
    const State& state;
    const Model& model;
    const Pass& pass;
    const Layer& layer;
    const int32_t thread, threads;
    const Latent& own = *layer.latent;
    const int32_t query = own.plain + own.turned, kept = own.rank + own.turned;

    // x [all rows] times one of a head's matrices, `number` of its kind.
    void multiply(const float* x, int64_t x_apart, const void* weights, int32_t number, int32_t depth, int32_t columns, float scale, float* to, int64_t apart) const {
        const int64_t at = int64_t(number) * depth * columns;
        const auto run = [&](const auto* weight) {
            int32_t row = 0;
            for (; row + 4 <= pass.rows; row += 4) latent_rows<4>(x + row * x_apart, x_apart, weight, depth, columns, scale, to + row * apart, apart);
            for (; row < pass.rows; ++row) latent_rows<1>(x + row * x_apart, x_apart, weight, depth, columns, scale, to + row * apart, apart);
        };
        if (own.narrow != 0) run(static_cast<const Bf16*>(weights) + at);
        else run(static_cast<const float*>(weights) + at);
    }
    const float* angles(const float* of, int32_t row) const { return of + int64_t(row) * (model.head_dim / 2); }

    // What queries are made of, normed.
    void norm_queries() const {
        const int32_t n = own.up.in;
        const Range mine = share(pass.rows, thread, threads);
        for (int32_t row = mine.begin; row < mine.end; ++row) {
            float* normed = state.raised.floats + int64_t(row) * n;
            normalize(state.qkv + int64_t(row) * layer.qkv.out, layer.q_norm, n, own.eps, normed);
            if (!is_floating(own.up.form)) quantize(normed, n, row, state.raised, own.up.form);
        }
    }
    // Queries [rows][heads][plain + turned], rows `apart`, for latents; of this thread's heads.
    void queries(const float* made, int64_t apart) const {
        const int32_t wide = round_up(model.head_dim, 16);
        const Range mine = share(model.heads, thread, threads);
        for (int32_t head = mine.begin; head < mine.end; ++head) {
            const float* x = made + int64_t(head) * query;
            float* to = state.queries + int64_t(head) * wide;
            multiply(x, apart, own.keys, head, own.plain, own.rank, model.attention_scale, to, int64_t(model.heads) * wide);
            for (int32_t row = 0; row < pass.rows; ++row) {
                float* q = to + int64_t(row) * model.heads * wide;
                rotate(x + row * apart + own.plain, angles(pass.cos[0], row), angles(pass.sin[0], row), own.turned, model.attention_scale, q + own.rank);
                for (int32_t i = kept; i < wide; ++i) q[i] = 0.0f;
            }
        }
    }
    // Latents, normed, and what is turned beside them go after the cache's content.
    void keep(int32_t index, float* room) const {
        const Range mine = share(pass.rows, thread, threads);
        int32_t s = 0;
        for (int32_t row = mine.begin; row < mine.end; ++row) {
            while (row >= state.rows[s].first + pass.segments[s].rows) ++s;
            const float* x = state.qkv + (int64_t(row) + 1) * layer.qkv.out - kept;
            normalize(x, layer.k_norm, own.rank, own.eps, room);
            rotate(x + own.rank, angles(pass.cos[0], row), angles(pass.sin[0], row), own.turned, 1.0f, room + own.rank);
            const Segment& segment = pass.segments[s];
            const int32_t slot = int32_t(segment.length(index, 0)) + segment.stays + row - state.rows[s].first;
            by_element(segment.element, [&](auto element) {
                char* page = Pages<decltype(element)>{segment.base, segment.table(index, 0), segment.page_bytes}[slot];
                for (int32_t kind = 0; kind < 2; ++kind) put_row(room, page, kind, slot, kept, element);
            });
        }
    }
    // What heads found, as values; of this thread's heads.
    void values() const {
        const Range mine = share(model.heads, thread, threads);
        const int64_t found = int64_t(model.heads) * model.head_dim, made = int64_t(model.heads) * own.value;
        for (int32_t head = mine.begin; head < mine.end; ++head)
            multiply(state.context + int64_t(head) * model.head_dim, found, own.values, head, own.rank, own.value, 1.0f,
                     state.values + int64_t(head) * own.value, made);
    }
    // Values to where the output matrix reads what attention found.
    void settle() const {
        const Range mine = share(pass.rows, thread, threads);
        const int64_t made = int64_t(model.heads) * own.value;
        __builtin_memcpy(state.context + mine.begin * made, state.values + mine.begin * made, size_t((mine.end - mine.begin) * made) * sizeof(float));
    }
};
