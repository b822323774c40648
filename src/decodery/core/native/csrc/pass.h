// A pass over some layers: every thread runs the same stages and meets the others at the barrier between them.
// Included once per instruction set.

// 1 / rms(x) over n floats.
static float inverse_rms(const float* x, int32_t n, float eps) {
    f16 squares = splat(0.0f);
    for (int32_t i = 0; i < n; i += 16) {
        const f16 v = load(x + i, n - i);
        squares = squares + v * v;
    }
    return 1.0f / __builtin_sqrtf(total(squares) * (1.0f / float(n)) + eps);
}
// y = x * r * weight over n floats.
static void scale_by(const float* x, float r, const float* weight, int32_t n, float* y) {
    for (int32_t i = 0; i < n; i += 16) store(y + i, load(x + i, n - i) * r * load(weight + i, n - i), n - i);
}

// y = x / rms(x) * weight over n floats.
static void normalize(const float* x, const float* weight, int32_t n, float eps, float* y) {
    scale_by(x, inverse_rms(x, n, eps), weight, n, y);
}

// Turns the pair (i, i + dim / 2) by the row's angle, times scale.
static void rotate(const float* x, const float* cos, const float* sin, int32_t dim, float scale, float* y) {
    const int32_t half = dim / 2;
    for (int32_t i = 0; i < half; i += 16) {
        const int32_t n = half - i;
        const f16 a = load(x + i, n), b = load(x + half + i, n), c = load(cos + i, n), s = load(sin + i, n);
        store(y + i, (a * c - b * s) * scale, n);
        store(y + half + i, (b * c + a * s) * scale, n);
    }
}

template <class Work>
static void by_element(Element element, const Work& work) {
    if (element == float32_elements) work(float());
    else if (element == float16_elements) work(Half());
    else work(Coded());
}

#include "experts.h"
#include "latent.h"
#include "sealed.h"
#include "worths.h"
#include "merges.h"
#include "streams.h"

struct Runner {
    const State& state;
    const Model& model;
    const Pass& pass;
    const int32_t thread;
    Team& team;
    int64_t clock;

    Runner(const State& s, int32_t thread_, Team& team_)
        : state(s), model(*s.model), pass(*s.pass), thread(thread_), team(team_), clock(timing() ? now() : 0) {}

    bool timing() const { return thread == 0 && state.ticks != nullptr; }
    void lap(Stage stage) {
        if (!timing()) return;
        const int64_t t = now();
        state.ticks[stage] += t - clock;
        clock = t;
    }
    void meet(Stage stage) {
        lap(stage);
        team.barrier(thread);
        lap(stage_wait);
    }
    Range my_rows() const { return share(pass.rows, thread, team.threads); }
    float* scratch() const { return state.scratch + thread * state.scratch_stride; }

    // What goes into `linear`, and into `other` where that has outputs, normed where there is a weight; `keeps` it as floats, too.
    void norm_quantize(const float* weight, const Linear& linear, const Linear& other = {}, bool keeps = false) {
        const Range mine = my_rows();
        const bool both = other.out != 0;
        const bool floats = keeps || is_floating(linear.form) || (both && is_floating(other.form));
        const bool whole = !is_floating(linear.form) || (both && !is_floating(other.form));
        // All forms read the same bytes, and some of super-blocks more.
        const Form form = both && is_super(other.form) && has_least(other.form) ? other.form : linear.form;
        for (int32_t row = mine.begin; row < mine.end; ++row) {
            float* normed = floats ? state.narrow.floats + int64_t(row) * model.hidden : scratch();
            const float* x = pass.hidden + int64_t(row) * model.hidden;
            if (weight != nullptr) normalize(x, weight, model.hidden, model.eps, normed);
            else __builtin_memcpy(normed, x, size_t(model.hidden) * sizeof(float));
            if (whole) quantize(normed, model.hidden, row, state.narrow, form, linear.order);
        }
        meet(stage_norm);
    }
    // What goes into `linear` as it is; floats are where they should be.
    void quantize_rows(const float* x, int32_t n, const Quantized& a, const Linear& linear) {
        if (is_floating(linear.form)) return;
        quantize_own(x, n, a, linear);
        meet(stage_norm);
    }
    void quantize_own(const float* x, int32_t n, const Quantized& a, const Linear& linear) const {
        const Range mine = my_rows();
        for (int32_t row = mine.begin; row < mine.end && !is_floating(linear.form); ++row)
            quantize(x + int64_t(row) * n, n, row, a, linear.form, linear.order);
    }

    void project(const Linear& linear, const Quantized& a, float* y, float cap = 0.0f) { project_apart(linear, a, y, linear.out, cap); }
    // Rows of y are `stride` apart.
    void project_apart(const Linear& linear, const Quantized& a, float* y, int64_t stride, float cap = 0.0f) {
        multiply_apart(linear, a, y, stride, cap);
        meet(stage_matmul);
    }
    void multiply_into(const Linear& linear, const Quantized& a, float* y) { multiply_apart(linear, a, y, linear.out, 0.0f); }
    void multiply_apart(const Linear& linear, const Quantized& a, float* y, int64_t stride, float cap) {
        multiply(linear, a, pass.rows, state.tiles, thread, team, [&](int32_t panel, int32_t row, f16 y0, f16 y1) {
            const int32_t first = panel * panel_width, left = linear.out - first;
            float* to = y + row * stride + first;
            if (cap != 0.0f) y0 = capped(y0, cap), y1 = capped(y1, cap);
            store(to, y0, left);
            if (left > 16) store(to + 16, y1, left - 16);
        });
    }
    // A panel holds 16 gates and the 16 values they open, or 32 values without gates.
    void project_gated(const Linear& linear, const Layer* sparse = nullptr) {
        if (sparse != nullptr) return project_sparse(linear, sparse->reach);
        if (model.opening == 3) {
            multiply(linear, state.narrow, pass.rows, state.tiles, thread, team, [&](int32_t panel, int32_t row, f16 y0, f16 y1) {
                const int32_t first = panel * panel_width, left = linear.out - first;
                float* to = state.act + int64_t(row) * linear.out + first;
                store(to, opened(3, y0, y0), left);
                if (left > 16) store(to + 16, opened(3, y1, y1), left - 16);
            });
            return;
        }
        const int32_t inner = linear.out / 2;
        multiply(linear, state.narrow, pass.rows, state.tiles, thread, team, [&](int32_t panel, int32_t row, f16 gate, f16 up) {
            const int32_t first = panel * 16;
            store(state.act + int64_t(row) * inner + first, opened(model.opening, gate, up), inner - first);
        });
    }
    // The same where gates count as far as they lie above most of their row's.
    void project_sparse(const Linear& linear, float reach) {
        const int32_t inner = linear.out / 2;
        multiply(linear, state.narrow, pass.rows, state.tiles, thread, team, [&](int32_t panel, int32_t row, f16 gate, f16 up) {
            const int64_t first = int64_t(row) * inner + panel * 16;
            store(state.gates_up + first, gate, inner - panel * 16);
            store(state.act + first, up, inner - panel * 16);
        });
        meet(stage_matmul);
        const Range mine = my_rows();
        for (int32_t row = mine.begin; row < mine.end; ++row) {
            float *gates = state.gates_up + int64_t(row) * inner, *act = state.act + int64_t(row) * inner;
            f16 sum = splat(0.0f), squares = splat(0.0f);
            for (int32_t i = 0; i < inner; i += 16) sum = sum + load(gates + i, inner - i);
            const float middle = total(sum) / float(inner);
            for (int32_t i = 0; i < inner; i += 16) {
                alignas(64) float lanes[16];
                store(lanes, load(gates + i, inner - i) - middle);
                const f16 off = load(lanes, inner - i);
                squares = squares + off * off;
            }
            const float bound = middle + __builtin_sqrtf(total(squares) / float(inner)) * reach;
            for (int32_t i = 0; i < inner; i += 16)
                store(act + i, opened(model.opening, larger(splat(0.0f), load(gates + i, inner - i) - bound), load(act + i, inner - i)), inner - i);
        }
    }
    // What an MLP has inside, of which layers may have more or less.
    Quantized inner_of(const Layer& layer) const {
        Quantized inner = state.inner;
        inner.width = round_up(layer.down.in, group_size);
        return inner;
    }
    // What the output matrix reads, of which layers that keep latents may have less.
    Quantized found_of(const Layer& layer) const {
        if (!attends(layer)) return state.mixed;
        Quantized found = state.wide;
        found.width = round_up(layer.output.in, group_size);
        return found;
    }
    // Adds the layer's result, normed first if the family does so, to the residual stream.
    void project_residual(const Linear& linear, const Quantized& a, const float* post_norm) {
        if (post_norm != nullptr) {
            project_branch(linear, a, post_norm);
            return add_branch();
        }
        const float scale = residual_scale();
        multiply(linear, a, pass.rows, state.tiles, thread, team, [&](int32_t panel, int32_t row, f16 y0, f16 y1) {
            const int32_t first = panel * panel_width, left = model.hidden - first;
            float* to = pass.hidden + int64_t(row) * model.hidden + first;
            store(to, load(to, left) + y0 * scale, left);
            if (left > 16) store(to + 16, load(to + 16, left - 16) + y1 * scale, left - 16);
        });
        meet(stage_matmul);
    }
    // The same in two halves, between which the result lies in state.branch.
    void project_branch(const Linear& linear, const Quantized& a, const float* post_norm) {
        project(linear, a, state.branch);
        finish_branch(post_norm);
    }
    void finish_branch(const float* post_norm) {
        if (post_norm == nullptr && model.residual_scale == 0.0f) return;
        const Range mine = my_rows();
        for (int32_t row = mine.begin; row < mine.end; ++row) {
            float* branch = state.branch + int64_t(row) * model.hidden;
            if (model.residual_scale != 0.0f)
                for (int32_t i = 0; i < model.hidden; ++i) branch[i] = branch[i] * model.residual_scale;
            if (post_norm != nullptr) normalize(branch, post_norm, model.hidden, model.eps, branch);
        }
        lap(stage_norm);
    }
    float residual_scale() const { return model.residual_scale == 0.0f ? 1.0f : model.residual_scale; }
    void add_branch() {
        const Range mine = my_rows();
        for (int32_t row = mine.begin; row < mine.end; ++row)
            add(pass.hidden + int64_t(row) * model.hidden, state.branch + int64_t(row) * model.hidden);
        meet(stage_norm);
    }
    // What a layer with streams adds beside attention, and its input once more, in state.beside.
    void learn(const StreamLayer& own) {
        const Range mine = my_rows();
        const int32_t n = own.in.out;
        project(own.in, state.narrow, state.learned.floats);
        quantize_rows(state.learned.floats, n, state.learned, own.out);
        project(own.out, state.learned, state.beside);
        for (int32_t row = mine.begin; row < mine.end; ++row) {
            float* learned = state.beside + int64_t(row) * model.hidden;
            normalize(learned, own.out_norm, model.hidden, model.eps, learned);
            add(learned, state.narrow.floats + int64_t(row) * model.hidden);
        }
        lap(stage_norm);
    }
    void add_learned() {
        const Range mine = my_rows();
        for (int32_t row = mine.begin; row < mine.end; ++row) {
            float *to = pass.hidden + int64_t(row) * model.hidden, *learned = state.beside + int64_t(row) * model.hidden;
            add(to, learned);
            for (int32_t i = 0; i < model.hidden; i += 16) store(to + i, load(to + i, model.hidden - i) * 0.70710678f, model.hidden - i);
        }
        meet(stage_norm);
    }
    // Streams of what enters the first layer, and what leaves the last one made of them.
    void spread_streams() {
        const Streams& all = *model.streams;
        norm_quantize(nullptr, all.in);
        project_apart(all.in, state.narrow, state.streams + model.hidden, int64_t(all.count) * model.hidden);
        Alternating{state, model, pass}.spread(my_rows());
        lap(stage_norm);
    }
    void merge_streams() {
        const Streams& all = *model.streams;
        const Alternating streams{state, model, pass};
        const Range mine = my_rows();
        for (int32_t row = mine.begin; row < mine.end; ++row) streams.copy(streams.active(row), streams.read(row));
        streams.gather(mine, 0);
        for (int32_t number = 1; number < all.count; ++number) {
            for (int32_t row = mine.begin; row < mine.end; ++row) streams.copy(streams.read(row), streams.stream(row, number));
            norm_quantize(nullptr, all.out[number - 1]);
            project(all.out[number - 1], state.narrow, state.branch);
            streams.gather(mine, number);
        }
        streams.average(mine);
        meet(stage_norm);
    }
    void add(float* to, const float* x) const {
        for (int32_t i = 0; i < model.hidden; i += 16)
            store(to + i, load(to + i, model.hidden - i) + load(x + i, model.hidden - i), model.hidden - i);
    }

    // Queries are normed, turned and scaled; keys and values go behind the cache's content.
    bool normed_late(const Layer& layer) const { return model.late_norms != 0 && layer.q_norm != nullptr; }
    void rope(const Layer& layer, int32_t index) {
        const Heads heads = heads_of(index);
        // A layer that reads another one's keys and values has queries alone.
        const int32_t dim = heads.dim, wide = heads.wide, per_row = model.heads + (layer.reads != 0 ? 0 : 2 * heads.kv_heads);
        const Range mine = share(pass.rows * per_row, thread, team.threads);
        float* turned = scratch();
        int32_t s = 0;
        for (int32_t item = mine.begin; item < mine.end; ++item) {
            const int32_t row = item / per_row, head = item % per_row;
            while (row >= state.rows[s].first + pass.segments[s].rows) ++s;
            const float* x = state.qkv + int64_t(item) * dim;
            const float* cos = pass.cos[layer.rope] + int64_t(row) * (dim / 2);
            const float* sin = pass.sin[layer.rope] + int64_t(row) * (dim / 2);
            const bool is_query = head < model.heads, is_value = head >= model.heads + heads.kv_heads;
            const bool normed = !is_value && layer.q_norm != nullptr, late = normed_late(layer);
            if (normed && !late) {
                norm_head(layer, x, is_query ? head : head - model.heads, is_query, dim, turned);
                x = turned;
            }
            if (is_value && layer.v_norm != nullptr) {
                normalize(x, layer.v_norm, dim, model.eps, turned);
                x = turned;
            }
            if (!is_value && late) {
                rotate(x, cos, sin, dim, 1.0f, turned + wide);
                norm_head(layer, turned + wide, 0, is_query, dim, turned);
                x = turned;
            }
            if (is_query) {
                float* q = state.queries + (int64_t(row) * model.heads + head) * wide;
                const float scale = layer.tempered != 0 ? model.attention_scale * pass.tempers[row] : model.attention_scale;
                if (!late) rotate(x, cos, sin, dim, scale, q);
                else
                    for (int32_t i = 0; i < dim; ++i) q[i] = x[i] * scale;
                for (int32_t i = dim; i < wide; ++i) q[i] = 0.0f;
                continue;
            }
            if (!is_value && !late) {
                rotate(x, cos, sin, dim, 1.0f, turned + wide);
                x = turned + wide;
            }
            const Segment& segment = pass.segments[s];
            const int32_t kind = is_value ? 1 : 0, kv_head = (head - model.heads) % heads.kv_heads, held = heads.row(kv_head);
            const int32_t slot = int32_t(segment.length(index, held)) + segment.stays + row - state.rows[s].first;
            by_element(segment.element, [&](auto element) {
                put_part(x, pages_of<decltype(element)>(segment, index, held)[slot], kind, slot, dim, heads.span, heads.shift(kv_head), element);
            });
        }
        look_around(layer, heads.index);
        meet(stage_rope);
    }

    // The same in layers that keep latents.
    void turn_latents(const Layer& layer, int32_t index) {
        const Latents latents{state, model, pass, layer, thread, team.threads};
        const Linear& up = layer.latent->up;
        if (up.weight != nullptr) {
            latents.norm_queries();
            meet(stage_norm);
            project(up, state.raised, state.ups);
            latents.queries(state.ups, up.out);
        } else latents.queries(state.qkv, layer.qkv.out);
        latents.keep(index, scratch());
        look_around(layer, index);
        meet(stage_rope);
    }
    void make_values(const Layer& layer) {
        const Latents latents{state, model, pass, layer, thread, team.threads};
        latents.values();
        meet(stage_attention);
        latents.settle();
        meet(stage_attention);
    }

    // A head of queries or keys normed, `head` of its kind.
    void norm_head(const Layer& layer, const float* x, int32_t head, bool is_query, int32_t dim, float* y) const {
        const float* weight = is_query ? layer.q_norm : layer.k_norm;
        if (model.wide_norms == 0) return normalize(x, weight, dim, model.eps, y);
        // All heads of a row lie side by side: each is divided by what they have in common.
        const float r = inverse_rms(x - int64_t(head) * dim, (is_query ? model.heads : model.kv_heads) * dim, model.eps);
        scale_by(x, r, weight + head * dim, dim, y);
    }

    // What every row sees in this layer.
    void look_around(const Layer& layer, int32_t index) {
        const Range mine = my_rows();
        int32_t s = 0;
        for (int32_t row = mine.begin; row < mine.end; ++row) {
            while (row >= state.rows[s].first + pass.segments[s].rows) ++s;
            const Segment& segment = pass.segments[s];
            const int32_t own = row - state.rows[s].first;
            const Policy* policy = segment.acting(index);
            const int32_t width = policy != nullptr && policy->widths != nullptr ? policy->widths[own] : 0;
            look(segment, state.rows[s], width != 0 ? width : layer.window, index, own, state.seen[row]);
            if (segment.policy == nullptr) continue;
            state.firsts[row] = {};
            if (width != 0) look_first(segment, state.rows[s], *policy, index, own, state.firsts[row]);
        }
    }
    // The slots at the first positions that one row sees.
    void look_first(const Segment& segment, const Rows& rows, const Policy& policy, int32_t index, int32_t row, Visible& seen) const {
        int32_t* list = rows.lists + int64_t(row) * rows.list_stride + segment.stays + segment.rows;
        const int32_t length = int32_t(segment.length(index, 0));
        const int32_t* slots = segment.slots + index * segment.slots_layer;
        seen = {0, 0, list, 0};
        for (int32_t i = 0; i < length && slots[i] < policy.sinks; ++i) *list++ = i;
        const int32_t first = rows.starts == nullptr ? 0 : rows.starts[row], last = rows.starts == nullptr ? row + 1 : rows.starts[row + 1];
        for (int32_t i = first; i < last; ++i) {
            const int32_t slot = length + (rows.starts == nullptr ? i : rows.own[i]);
            if (slots[slot] < policy.sinks) *list++ = slot;
        }
        seen.count = int32_t(list - seen.list);
    }

    // What one row sees; slots that are not one run go to its list.
    void look(const Segment& segment, const Rows& rows, int32_t window, int32_t index, int32_t row, Visible& seen) const {
        int32_t* list = rows.lists + int64_t(row) * rows.list_stride;
        const int32_t length = int32_t(segment.length(index, 0));
        const int32_t* slots = segment.slots + index * segment.slots_layer;
        const int64_t position = segment.positions[row];
        const auto near = [&](int64_t other) {
            if (window < 0) return other / -window == position / -window;
            const int64_t distance = other > position ? other - position : position - other;
            return window == 0 || distance < window;
        };
        seen = {0, length, list, 0};
        if (window != 0) {
            while (seen.begin < seen.end && !near(slots[seen.begin])) ++seen.begin;
            while (seen.end > seen.begin && !near(slots[seen.end - 1])) --seen.end;
        }
        if (rows.starts == nullptr) {
            // Causal order: own rows up to this one directly follow the cached slots.
            int32_t first = 0;
            while (!near(segment.positions[first])) ++first;
            if (first == 0 && seen.end == length) {
                seen.end = length + row + 1;
                return;
            }
            if (seen.begin == seen.end) {
                seen = {length + first, length + row + 1, list, 0};
                return;
            }
            for (int32_t i = first; i <= row; ++i) *list++ = length + i;
        } else {
            for (int32_t i = rows.starts[row]; i < rows.starts[row + 1]; ++i)
                if (window == 0 || near(slots[length + rows.own[i]])) *list++ = length + rows.own[i];
        }
        seen.count = int32_t(list - seen.list);
    }

    template <class Work>
    void by_kind(const Group& group, const Work& work) const {
        by_element(pass.segments[state.order[group.first]].element, work);
    }
    int32_t head_group() const { return model.heads / model.kv_heads; }
    int32_t wide() const { return round_up(model.head_dim, 16); }
    // A layer's heads, and where their keys and values lie: heads that are narrower than the model's side by side in its rows.
    struct Heads {
        int32_t index, dim, kv_heads, wide, group, whole, span;    // index: of the layer whose slots they read

        int32_t row(int32_t kv_head) const { return dim == whole ? kv_head : kv_head * dim / whole; }
        int32_t shift(int32_t kv_head) const { return dim == whole ? 0 : kv_head * dim % whole; }
    };
    Heads heads_of(int32_t index) const {
        const Layer& layer = model.layers[index];
        const int32_t dim = layer.head_dim != 0 ? layer.head_dim : model.head_dim, kv_heads = layer.kv_heads != 0 ? layer.kv_heads : model.kv_heads;
        return {layer.reads != 0 ? layer.reads - 1 : index, dim, kv_heads, round_up(dim, 16), model.heads / kv_heads, model.head_dim, wide()};
    }

    template <class E>
    static Pages<E> pages_of(const Segment& segment, int32_t index, int32_t kv_head) {
        return {segment.base, segment.table(index, kv_head), segment.page_bytes};
    }

    // Some of the queries that a group has for one key-value head, and what they work in.
    template <class E>
    Item<E> gather(int32_t index, const Group& group, int32_t kv_head, Range mine, Query* queries, Pages<E>* sources) const {
        const int32_t count = mine.end - mine.begin;
        const Heads heads = heads_of(index);
        float* room = scratch();
        const auto take = [&](int64_t floats) {
            float* const taken = room;
            room += floats;
            return taken;
        };
        int32_t source = 0, first = 0;
        for (int32_t k = group.first; k < group.last && first < mine.end; ++k) {
            const int32_t s = state.order[k];
            const Segment& segment = pass.segments[s];
            const int32_t last = first + segment.rows * heads.group;
            const Range own = {mine.begin > first ? mine.begin : first, mine.end < last ? mine.end : last};
            for (int32_t i = own.begin; i < own.end; ++i) {
                const int32_t row = (i - first) / heads.group, member = (i - first) % heads.group;
                const int64_t at = int64_t(state.rows[s].first + row) * model.heads + kv_head * heads.group + member;
                Query& query = queries[i - mine.begin] = {};
                query.out = state.context + at * heads.dim;
                query.seen = state.seen[state.rows[s].first + row];
                query.sink = sink_of(index, kv_head * heads.group + member);
                query.source = source;
                query.scores = take(key_chunk + 2 * page_slots);
                for (uint8_t*& weights : query.weights) weights = reinterpret_cast<uint8_t*>(take(weight_bytes / 4));
                query.chunk = take(heads.wide);
                query.sum = take(heads.wide);
                prepare(state.queries + at * heads.wide, heads.wide, take(heads.wide), query, E());
                if (segment.starts != nullptr) pick(segment, kv_head, row, member, query);
                else if (const Policy* policy = segment.acting(index)) follow(*policy, segment, kv_head, row, state.rows[s].first + row, i, mine.begin, query, sources);
            }
            if (own.begin < own.end) sources[source++] = pages_of<E>(segment, heads.index, heads.row(kv_head));
            first = last;
        }
        const bool alone = pass.segments[state.order[group.first]].policy != nullptr;
        return {queries, sources, count, alone ? 0 : group.common, heads.dim, heads.wide, heads.span, heads.shift(kv_head), model.attention_cap, room};
    }
    const float* sink_of(int32_t index, int32_t head) const {
        const float* sinks = model.layers[index].sinks;
        return sinks == nullptr ? nullptr : sinks + head;
    }
    // What a policy lets one row of a key-value head read.
    void pick(const Segment& segment, int32_t kv_head, int32_t row, int32_t member, Query& query) const {
        const int32_t* starts = segment.starts + kv_head * segment.rows;
        query.seen = {0, 0, segment.picked + starts[row], starts[row + 1] - starts[row]};
        const int64_t picked = segment.starts[model.kv_heads * segment.rows];
        if (segment.weights != nullptr) query.given = segment.weights + member * picked + starts[row];
        if (segment.mass != nullptr) query.mass = segment.mass + int64_t(row) * model.heads + kv_head * head_group() + member;
    }

    float* aside() const { return state.aside + thread * state.aside_stride; }
    // What kernels do for a policy with one query of its segment, the i-th, of a work item that begins with another.
    template <class E>
    void follow(const Policy& policy, const Segment& segment, int32_t kv_head, int32_t row, int32_t pass_row, int32_t i, int32_t begin,
                Query& query, Pages<E>* sources) const {
        if (policy.held != nullptr || (policy.counts != nullptr && policy.counts[row] != 0)) {
            const Chosen& chosen = state.chosen[int64_t(pass_row) * model.kv_heads + kv_head];
            query.seen = {0, chosen.run, chosen.list, chosen.count};
            if (chosen.table != nullptr) {
                // Rows of one work item have a table each; the text's own comes before these.
                query.source = 1 + i / head_group() - begin / head_group();
                sources[query.source] = {segment.base, chosen.table, segment.page_bytes};
            }
        }
        if (policy.lowered != nullptr) query.lowered = {policy.lowered[2 * row], policy.lowered[2 * row + 1], policy.lowered_by};
        if (policy.sealed != nullptr) leave_out(query.seen, policy.sealed[row] - policy.stored);
        if (policy.held == nullptr && (policy.paid == nullptr || row < policy.paid_from)) return;
        query.given = aside() + (i - begin) * round_up(int32_t(state.longest) + 16, 16);
    }

    // Of what a row sees the first n slots, where there are some.
    static void leave_out(Visible& seen, int32_t n) {
        if (n <= 0) return;
        const int32_t run = seen.end - seen.begin, straight = n < run ? n : run;
        seen.begin += straight;
        seen.list += n - straight;
        seen.count -= n - straight;
    }

    template <class E>
    void attend_whole(int32_t index, const Group& group, int32_t kv_head, Range mine) const {
        Query queries[most_queries];
        Pages<E> sources[most_queries + 2];
        const Item<E> item = gather(index, group, kv_head, mine, queries, sources);
        item.add_up();
        const int32_t s = state.order[group.first];
        const Policy* policy = pass.segments[s].acting(index);
        if (policy != nullptr && policy->sealed != nullptr) read_sealed(*policy, index, kv_head, state.rows[s].first, item);
        for (int32_t i = 0; i < item.count; ++i) {
            if (policy != nullptr && policy->widths != nullptr) read_first(*policy, state.rows[s].first, item, queries[i]);
            finish(queries[i], item.dim);
        }
        if (policy != nullptr && policy->paid != nullptr) pay(*policy, index, kv_head, queries, item.count);
    }
    // Adds what a query reads at the first positions, turned for them, to what it has read.
    template <class E>
    void read_first(const Policy& policy, int32_t first_row, const Item<E>& item, Query& query) const {
        const int64_t at = (query.out - state.context) / model.head_dim, row = at / model.heads;
        Query first = {};
        first.seen = state.firsts[row];
        if (first.seen.count == 0) return;
        first.source = query.source;
        float* room = item.spare + most_queries * key_chunk;
        const auto take = [&](int64_t floats) { return (room += floats) - floats; };
        first.scores = take(key_chunk + 2 * page_slots);
        for (uint8_t*& weights : first.weights) weights = reinterpret_cast<uint8_t*>(take(weight_bytes / 4));
        first.chunk = take(wide());
        first.sum = take(wide());
        float* turned = take(wide());
        const int64_t half = model.head_dim / 2, angles = (row - first_row) * half;
        rotate(state.queries + at * wide(), policy.cos + angles, policy.sin + angles, model.head_dim, 1.0f, turned);
        for (int32_t i = model.head_dim; i < wide(); ++i) turned[i] = 0.0f;
        prepare(turned, wide(), take(wide()), first, E());
        const Item<E> alone = {&first, item.sources, 1, 0, item.dim, item.wide, item.span, item.shift, item.cap, item.spare};
        alone.add_up();
        merge(query, {first.largest, first.total}, first.sum, wide());
    }
    // Adds what queries read in integers to what they have read, whole groups of a chunk's tokens at a time.
    template <class E>
    void read_sealed(const Policy& policy, int32_t index, int32_t kv_head, int32_t first_row, const Item<E>& item) const {
        const Sealed<E> sealed = {policy, policy.blocks + int64_t(index) * policy.block_count, kv_head, item.dim, aside()};
        const int32_t tokens = policy.group, at_once = key_chunk / tokens;
        const float* asked[most_queries];
        float least[most_queries];
        Part parts[most_queries];
        int32_t rows[most_queries], ends[most_queries], most = 0;
        for (int32_t i = 0; i < item.count; ++i) {
            const int64_t at = (item.queries[i].out - state.context) / item.dim;
            rows[i] = int32_t(at / model.heads);
            ends[i] = policy.sealed[rows[i] - first_row] / tokens;
            asked[i] = state.queries + at * item.wide;
            most = ends[i] > most ? ends[i] : most;
        }
        for (int32_t from = 0; from < most; from += at_once) {
            const int32_t end = from + at_once < most ? from + at_once : most;
            // Calls work(the first of some queries, how many, codes, the tokens' place in the chunk).
            const auto each_group = [&](int32_t kind, const auto& work) {
                for (int32_t group = from; group < end; ++group)
                    for (int32_t i = 0, last; i < item.count; i = last) {
                        last = i + 1;
                        if (ends[i] <= group) continue;
                        const bool stored = sealed.is_stored(group);
                        while (last < item.count && ends[last] > group && (stored || rows[last] == rows[i])) ++last;
                        const CodeRows codes = stored ? sealed.stored(group, kind) : sealed.rounded(item.sources[item.queries[i].source], state.seen[rows[i]], group, kind);
                        in_parts<code_queries>(last - i, [&](int32_t first, auto some) { work(i + first, some, codes, (group - from) * tokens); });
                    }
            };
            each_group(0, [&](int32_t i, auto some, const CodeRows& keys, int32_t at) {
                score_codes<decltype(some)::value>(item.queries + i, asked + i, keys, item.dim, tokens, policy.code_bits, at);
            });
            for (int32_t i = 0; i < item.count; ++i) {
                const Query& query = item.queries[i];
                if (ends[i] <= from) continue;
                float unused;
                parts[i] = weigh<float>(query.scores, ((ends[i] < end ? ends[i] : end) - from) * tokens, item.cap, {}, nullptr, nullptr, unused);
                least[i] = 0.0f;
                for (int32_t c = 0; c < item.wide; ++c) query.chunk[c] = 0.0f;
            }
            each_group(1, [&](int32_t i, auto some, const CodeRows& values, int32_t at) {
                add_codes<decltype(some)::value>(item.queries + i, values, item.dim, tokens, policy.code_bits, at, item.spare, least + i);
            });
            for (int32_t i = 0; i < item.count; ++i) {
                Query& query = item.queries[i];
                if (ends[i] <= from) continue;
                for (int32_t c = 0; c < item.wide; ++c) query.chunk[c] += least[i];
                merge(query, parts[i], query.chunk, item.wide);
            }
        }
    }
    // Adds the weights of queries of one key-value head to what its slots were paid.
    void pay(const Policy& policy, int32_t index, int32_t kv_head, const Query* queries, int32_t count) const {
        int32_t most = 0;
        for (int32_t i = 0; i < count; ++i)
            if (queries[i].given != nullptr) {
                const Visible& seen = queries[i].seen;
                const int32_t end = seen.count > 0 ? seen.list[seen.count - 1] + 1 : seen.end;
                most = end > most ? end : most;
            }
        const int64_t stride = round_up(int32_t(state.longest) + 16, 16);
        int64_t* sums = reinterpret_cast<int64_t*>(aside() + most_queries * stride);
        for (int32_t i = 0; i < most; ++i) sums[i] = 0;
        for (int32_t i = 0; i < count; ++i) {
            const float* given = queries[i].given;
            if (given == nullptr) continue;
            const Visible& seen = queries[i].seen;
            const int32_t run = seen.end - seen.begin;
            for (int32_t k = 0; k < run; ++k) sums[seen.begin + k] += int64_t(given[k] * paid_unit);
            for (int32_t k = 0; k < seen.count; ++k) sums[seen.list[k]] += int64_t(given[run + k] * paid_unit);
        }
        int64_t* paid = policy.paid + (int64_t(index) * model.kv_heads + kv_head) * policy.paid_slots;
        if (team.threads == 1)
            for (int32_t i = 0; i < most; ++i) paid[i] += sums[i];
        else
            for (int32_t i = 0; i < most; ++i) __atomic_fetch_add(paid + i, sums[i], __ATOMIC_RELAXED);
    }

    // The policy of a group whose rows are read in turn, or null.
    const Policy* in_turn(const Group& group, int32_t index) const {
        const Policy* policy = state.in_turn ? pass.segments[state.order[group.first]].acting(index) : nullptr;
        return policy != nullptr && policy->held != nullptr ? policy : nullptr;
    }
    // Attention of rows of which each leaves some slots out for those after it.
    void attend_in_turn(int32_t index) {
        if (!state.in_turn) return;
        for (const Group* group = state.groups; group < state.groups + state.group_count; ++group) {
            const Policy* policy = in_turn(*group, index);
            if (policy == nullptr) continue;
            const Worths worths = {model, pass.segments[state.order[group->first]], *policy, index};
            for (int32_t kv_head = thread; kv_head < model.kv_heads; kv_head += team.threads) worths.recall(kv_head);
            for (int32_t row = 0; row < group->rows; ++row) {
                for (int32_t kv_head = thread; kv_head < model.kv_heads; kv_head += team.threads)
                    by_kind(*group, [&](auto element) { attend_next<decltype(element)>(index, *group, *policy, kv_head, row); });
                if (policy->newest == 0) continue;
                meet(stage_attention);
                if (thread == 0) worths.share_out(row);
                meet(stage_attention);
            }
        }
        meet(stage_attention);
    }
    template <class E>
    void attend_next(int32_t index, const Group& group, const Policy& policy, int32_t kv_head, int32_t row) const {
        const int32_t s = state.order[group.first], members = head_group();
        const int64_t stride = round_up(int32_t(state.longest) + 16, 16);
        const Segment& segment = pass.segments[s];
        const Worths worths = {model, segment, policy, index};
        const Merges<E> merges = {model, segment, policy, index, kv_head};
        const int32_t* parents = policy.parents + segment.stays;
        if (policy.targets != nullptr) merges.move(row == 0 ? -1 : parents[row - 1], parents[row]);
        int64_t* sums = reinterpret_cast<int64_t*>(aside() + most_queries * stride);
        int32_t* list = reinterpret_cast<int32_t*>(sums + stride);
        const Chosen& seen = state.chosen[int64_t(state.rows[s].first + row) * model.kv_heads + kv_head] = worths.before(kv_head, row, list);
        const int32_t n = seen.run + seen.count;
        for (int32_t k = 0; k < n; ++k) sums[k] = 0;
        for (int32_t first = 0; first < members; first += most_queries) {
            Query queries[most_queries];
            Pages<E> sources[most_queries + 2];
            const Range mine = {row * members + first, row * members + (first + most_queries < members ? first + most_queries : members)};
            const Item<E> item = gather(index, group, kv_head, mine, queries, sources);
            item.add_up();
            for (int32_t i = 0; i < item.count; ++i) {
                finish(queries[i], item.dim);
                for (int32_t k = 0; k < n; ++k) sums[k] += int64_t(queries[i].given[k] * paid_unit);
            }
        }
        worths.after(kv_head, row, seen, sums);
        if (policy.targets == nullptr) return;
        merges.leave(row, seen, worths.of(kv_head, segment.stays + row), worths.slots(kv_head), aside());
        if (row + 1 == segment.rows) merges.move(parents[row], -1);
    }

    // Calls work(segment, its policy, its first row, kv_head) for the segments whose slots kernels choose, of its threads' part.
    template <class Work>
    void each_choosing(int32_t index, bool by_row, const Work& work) const {
        int32_t item = 0;
        for (int32_t s = 0; s < pass.segment_count; ++s) {
            const Segment& segment = pass.segments[s];
            const Policy* policy = segment.acting(index);
            if (policy == nullptr || policy->counts == nullptr) continue;
            for (int32_t i = 0; i < model.kv_heads * (by_row ? segment.rows : 1); ++i)
                if (item++ % team.threads == thread) work(segment, *policy, s, i / (by_row ? segment.rows : 1), by_row ? i % segment.rows : 0);
        }
    }
    // Which slots rows read, where kernels choose them.
    void choose(int32_t index) {
        if (!state.chooses) return;
        each_choosing(index, false, [&](const Segment& segment, const Policy& policy, int32_t, int32_t kv_head, int32_t) {
            by_element(segment.element, [&](auto element) {
                Side<decltype(element)>{model, segment, policy, index, kv_head}.summarise(aside());
            });
        });
        meet(stage_attention);
        each_choosing(index, true, [&](const Segment& segment, const Policy& policy, int32_t s, int32_t kv_head, int32_t row) {
            if (row == 0 && kv_head == 0) policy.summarised[index] = policy.known;
            if (policy.counts[row] == 0) return;
            const int64_t at = int64_t(kv_head) * segment.rows + row, pass_row = state.rows[s].first + row;
            const float* queries = state.queries + (pass_row * model.heads + kv_head * head_group()) * wide();
            by_element(segment.element, [&](auto element) {
                const Side<decltype(element)> side = {model, segment, policy, index, kv_head};
                state.chosen[pass_row * model.kv_heads + kv_head] = side.choose(queries, row, state.seen[pass_row], aside(), policy.picked + at * policy.room);
            });
        });
        meet(stage_attention);
    }
    // The same of one chunk of what they see, to where threads share it.
    template <class E>
    void attend_chunk(int32_t index, const Group& group, int32_t kv_head, Range mine, int32_t from) const {
        Query queries[most_queries];
        Pages<E> sources[most_queries + 2];
        gather(index, group, kv_head, mine, queries, sources).chunk(from, [&](const Query& query, Part part) {
            const Heads heads = heads_of(index);
            float* to = part_of((query.out - state.context) / heads.dim, from);
            __builtin_memcpy(to, query.chunk, size_t(heads.wide) * sizeof(float));
            to[heads.wide] = part.largest;
            to[heads.wide + 1] = part.total;
        });
    }
    // at: row * heads + head.
    float* part_of(int64_t at, int32_t from) const { return state.parts + at * state.parts_stride + from / key_chunk * (wide() + 16); }

    // Into how many parts the queries of one key-value head are cut.
    int32_t parts_of(const Group& group, const Heads& heads) const {
        const int32_t queries = group.rows * heads.group, least = (queries + most_queries - 1) / most_queries;
        if (team.threads == 1 || state.group_count * heads.kv_heads >= 4 * team.threads) return least;
        // A number of items that the threads can share evenly.
        int32_t parts = least;
        while (parts * heads.kv_heads % team.threads != 0 || parts * heads.kv_heads < 2 * team.threads) ++parts;
        return parts < queries ? parts : queries;
    }
    // Work items are (group, key-value head, some of its queries), handed out one by one.
    void attend_apart(int32_t index, bool windowed) {
        const Heads heads = heads_of(index);
        int32_t item = team.take(), first = 0;
        for (const Group* group = state.groups; group < state.groups + state.group_count; ++group) {
            if ((group->divided && !windowed) || in_turn(*group, index) != nullptr) continue;
            const int32_t queries = group->rows * heads.group, parts = parts_of(*group, heads), items = parts * heads.kv_heads;
            for (; item < first + items; item = team.take()) {
                const int32_t kv_head = (item - first) / parts;
                const Range mine = share(queries, (item - first) % parts, parts);
                by_kind(*group, [&](auto element) { attend_whole<decltype(element)>(index, *group, kv_head, mine); });
            }
            first += items;
        }
        meet(stage_attention);
    }

    // Chunks of the groups whose few queries threads share.
    void attend_chunks(int32_t index) {
        const Heads heads = heads_of(index);
        int32_t item = team.take(), first = 0;
        for (const Group* group = state.groups; group < state.groups + state.group_count; ++group) {
            if (!group->divided) continue;
            const Range all = {0, group->rows * heads.group};
            const int32_t along = int32_t((group->longest + key_chunk - 1) / key_chunk), items = heads.kv_heads * along;
            for (; item < first + items; item = team.take()) {
                const int32_t kv_head = (item - first) / along, from = (item - first) % along * key_chunk;
                by_kind(*group, [&](auto element) { attend_chunk<decltype(element)>(index, *group, kv_head, all, from); });
            }
            first += items;
        }
        meet(stage_attention);
    }
    void attend_shared(int32_t index) {
        attend_chunks(index);
        for (const Group* group = state.groups; group < state.groups + state.group_count; ++group)
            for (int32_t k = group->first; group->divided && k < group->last; ++k)
                for (int32_t i = 0; i < pass.segments[state.order[k]].rows; ++i) merge_chunks(index, state.rows[state.order[k]].first + i);
        meet(stage_attention);
    }
    // Merges the chunks of a row's heads, as far as they are this thread's.
    void merge_chunks(int32_t index, int32_t row) const {
        const Heads heads = heads_of(index);
        for (int32_t head = 0; head < model.heads; ++head) {
            const int64_t at = int64_t(row) * model.heads + head;
            if (at % team.threads != thread) continue;
            Query query = {};
            query.seen = state.seen[row];
            query.sum = scratch();
            query.out = state.context + at * heads.dim;
            begin(query, heads.wide, sink_of(index, head));
            for (int32_t from = 0; from < query.seen.total(); from += key_chunk) {
                const float* part = part_of(at, from);
                merge(query, {part[heads.wide], part[heads.wide + 1]}, part, heads.wide);
            }
            finish(query, heads.dim);
        }
    }

    void attention(const Layer& layer, int32_t index) {
        choose(index);
        attend_in_turn(index);
        // Behind a window every row's indices begin elsewhere.
        const bool windowed = layer.window != 0;
        if (windowed || state.divided < state.group_count) attend_apart(index, windowed);
        if (!windowed && state.divided > 0) attend_shared(index);
    }

    // The same where something else is in attention's place, or beside it.
    void mix(const Layer& layer, const Linear& first, int32_t index) {
        const Mixer& mixer = *layer.mixer;
        const int64_t stride = mixed_row(mixer);
        project_apart(first, state.narrow, state.qkv, stride);
        if (layer.steps.weight != nullptr) project_apart(layer.steps, state.narrow, state.qkv + layer.qkv.out, stride);
        Mix{state, pass, mixer, index, model.kv_heads, model.head_dim, thread, team}.run([&] { meet(stage_attention); });
    }
    static bool beside(const Layer& layer) { return layer.mix_in.weight != nullptr; }
    static bool attends(const Layer& layer) { return layer.mixer == nullptr || beside(layer); }
    void mix_beside(const Layer& layer, int32_t index) {
        mix(layer, layer.mix_in, index);
        quantize_rows(state.context, layer.mix_out.in, state.mixed, layer.mix_out);
        project(layer.mix_out, state.mixed, state.beside);
    }
    // What attention and a mixer beside it found, added to the stream.
    bool add_both(const Layer& layer, const Quantized& found, bool stops) {
        project(layer.output, found, state.branch);
        const Range mine = my_rows();
        for (int32_t row = mine.begin; row < mine.end; ++row)
            add(state.branch + int64_t(row) * model.hidden, state.beside + int64_t(row) * model.hidden);
        finish_branch(layer.post_attention_norm);
        if (!stops) add_branch();
        return stops;
    }
    // Closes what attention found as far as its gates say.
    void close_gates() {
        const int64_t width = int64_t(model.heads) * model.head_dim;
        const Range mine = my_rows();
        for (int64_t i = mine.begin * width; i < mine.end * width; i += 16) {
            const int32_t n = mine.end * width - i < 16 ? int32_t(mine.end * width - i) : 16;
            store(state.context + i, load(state.context + i, n) / (exponential(-load(state.gates + i, n)) + 1.0f), n);
        }
        meet(stage_attention);
    }

    // The layer's experts, and its MLP where it has one, from behind a mark on. Returns the mark they stop at, or 0 when what they
    // find lies in state.branch.
    int32_t mix_experts(const Layer& layer, int32_t place, int32_t marks, int32_t from) {
        const Experts& experts = *layer.experts;
        const Mixture mixture{state, model, pass, layer, experts, thread, team};
        const bool apart = experts.router_norm != nullptr, all = layer.down.weight != nullptr && !apart;
        const Linear& first = *experts.gate_up;
        if (from < at_router) {
            if (apart) read_apart(layer, experts);
            else norm_quantize(layer.mlp_norm, all ? layer.gate_up : first, all ? first : Linear{}, true);
            mixture.score();
            meet(stage_matmul);
            mixture.judge(my_rows());
            if (marks & at_router) {
                meet(stage_norm);
                return at_router;
            }
        }
        if (from < at_experts) {
            mixture.choose(my_rows(), pass.took == nullptr ? nullptr : pass.took + int64_t(place) * pass.rows * experts.taken);
            meet(stage_norm);
        }
        if (thread == 0) mixture.sort();
        meet(stage_norm);
        if (*state.experts.missing != 0) return at_experts;
        if (apart) norm_quantize(experts.enter_norm, first, {}, experts.scaled_inputs != 0);
        mixture.gather();
        meet(stage_norm);
        if (all) project_gated(layer.gate_up);
        mixture.open();
        meet(stage_matmul);
        mixture.close();
        const Quantized inner = inner_of(layer);
        if (all) quantize_own(state.act, layer.down.in, inner, layer.down);
        meet(stage_norm);
        if (all) multiply_into(layer.down, inner, state.branch);
        mixture.multiply_all(experts.down, state.experts.inner, state.experts.found);
        meet(stage_matmul);
        mixture.add_up(my_rows());
        finish_branch(layer.post_mlp_norm);
        return 0;
    }

    // What an MLP finds beside experts, normed, in state.branch; and what their router reads.
    void read_apart(const Layer& layer, const Experts& experts) {
        norm_quantize(layer.mlp_norm, layer.gate_up);
        project_gated(layer.gate_up);
        meet(stage_matmul);
        const Quantized inner = inner_of(layer);
        quantize_rows(state.act, layer.down.in, inner, layer.down);
        project(layer.down, inner, state.branch);
        const Range mine = my_rows();
        for (int32_t row = mine.begin; row < mine.end; ++row) {
            const int64_t at = int64_t(row) * model.hidden;
            normalize(state.branch + at, experts.mlp_leave_norm, model.hidden, model.eps, state.branch + at);
            normalize(pass.hidden + at, experts.router_norm, model.hidden, model.eps, state.narrow.floats + at);
        }
        meet(stage_norm);
    }

    // Runs the layer at a place of the run from behind the mark `from` on; returns the mark it stops at, 0 at its end.
    int32_t layer(int32_t place, int32_t from) {
        const int32_t index = pass.run[place], marks = pass.marks[place];
        const Layer& layer = model.layers[index];
        if (layer.streams != nullptr && from == 0) Alternating{state, model, pass}.predict(*layer.streams, my_rows(), scratch());
        if ((marks & skip_attention) == 0 && from <= at_attention) {
            if (from < at_select) {
                if (layer.streams != nullptr) {
                    norm_quantize(layer.attention_norm, layer.qkv, layer.streams->in, true);
                    learn(*layer.streams);
                } else norm_quantize(layer.attention_norm, layer.qkv, beside(layer) ? layer.mix_in : layer.mixer != nullptr ? layer.steps : layer.gate);
                if (beside(layer)) mix_beside(layer, index);
                if (!attends(layer)) mix(layer, layer.qkv, index);
                else {
                    project(layer.qkv, state.narrow, state.qkv);
                    if (layer.gate.weight != nullptr) project(layer.gate, state.narrow, state.gates);
                    if (layer.latent != nullptr) turn_latents(layer, index);
                    else rope(layer, index);
                    if (marks & at_select) return at_select;
                }
            }
            if (from < at_found) {
                if (attends(layer)) attention(layer, index);
                if (marks & at_found) return at_found;
            }
            if (from < at_heads) {
                if (layer.latent != nullptr) make_values(layer);
                if (layer.gate.weight != nullptr) close_gates();
                if (marks & at_heads) return at_heads;
            }
            if (from < at_attention) {
                const Quantized found = found_of(layer);
                quantize_rows(state.context, layer.output.in, found, layer.output);
                const bool stops = (marks & at_attention) != 0;
                if (beside(layer) ? add_both(layer, found, stops) : add_or_stop(layer.output, found, layer.post_attention_norm, stops)) return at_attention;
            } else add_branch();
            if (layer.streams != nullptr) add_learned();
        }
        if ((marks & skip_mlp) == 0 && from <= at_mlp) {
            if (from < at_mlp && layer.experts != nullptr) {
                const int32_t stop = mix_experts(layer, place, marks, from);
                if (stop != 0) return stop;
                if (marks & at_mlp) {
                    meet(stage_norm);
                    return at_mlp;
                }
                add_branch();
            } else if (from < at_mlp) {
                norm_quantize(layer.mlp_norm, layer.gate_up);
                project_gated(layer.gate_up, layer.sparse != 0 ? &layer : nullptr);
                meet(stage_matmul);
                const Quantized inner = inner_of(layer);
                quantize_rows(state.act, layer.down.in, inner, layer.down);
                if (add_or_stop(layer.down, inner, layer.post_mlp_norm, marks & at_mlp)) return at_mlp;
            } else add_branch();
        }
        if (from >= at_residual) return 0;
        end_layer(layer);
        return marks & at_residual;
    }
    // What a layer adds because of rows' tokens, and its scale.
    void end_layer(const Layer& layer) {
        if (layer.inputs == nullptr && layer.scale == 0.0f) return;
        const Range mine = my_rows();
        const float scale = layer.scale == 0.0f ? 1.0f : layer.scale;
        const Alternating streams{state, model, pass};
        if (layer.streams != nullptr) streams.correct(*layer.streams, mine, scratch());
        if (layer.inputs != nullptr) {
            const TokenInputs& own = *layer.inputs;
            const int32_t n = own.gate.out;
            norm_quantize(nullptr, own.gate);
            project(own.gate, state.narrow, state.given.floats);
            for (int32_t row = mine.begin; row < mine.end; ++row) {
                float* given = state.given.floats + int64_t(row) * n;
                const float* x = pass.inputs + int64_t(row) * own.stride + own.at;
                for (int32_t i = 0; i < n; i += 16) store(given + i, opened(model.opening, load(given + i, n - i), load(x + i, n - i)), n - i);
                if (!is_floating(own.out.form)) quantize(given, n, row, state.given, own.out.form);
            }
            meet(stage_norm);
            project(own.out, state.given, state.branch);
            for (int32_t row = mine.begin; row < mine.end; ++row) {
                float* branch = state.branch + int64_t(row) * model.hidden;
                normalize(branch, own.norm, model.hidden, model.eps, branch);
                if (layer.streams == nullptr) {
                    add(pass.hidden + int64_t(row) * model.hidden, branch);
                    continue;
                }
                for (int32_t number = 1; number < streams.all->count; ++number) add(streams.stream(row, number), branch);
                streams.copy(streams.read(row), streams.active(row));
            }
        }
        for (int64_t i = int64_t(mine.begin) * model.hidden; i < int64_t(mine.end) * model.hidden; ++i) pass.hidden[i] = pass.hidden[i] * scale;
        meet(stage_norm);
    }
    bool add_or_stop(const Linear& linear, const Quantized& a, const float* post_norm, int32_t stops) {
        if (stops) project_branch(linear, a, post_norm);
        else project_residual(linear, a, post_norm);
        return stops != 0;
    }
};

static void run_layers(void* context, int32_t thread, Team& team) {
    const State& state = *static_cast<const State*>(context);
    Runner runner(state, thread, team);
    const Pass& pass = *state.pass;
    int32_t from = pass.stopped;
    const bool alternates = state.model->streams != nullptr;
    if (alternates && pass.next == 0 && from == 0) runner.spread_streams();
    for (int32_t i = pass.next; i < pass.run_count; ++i, from = 0) {
        const int32_t stop = runner.layer(i, from);
        if (stop != 0) {
            if (thread == 0) *state.next = i, *state.stopped = stop;
            return;
        }
        if (pass.taps[i] == nullptr) continue;
        const Range mine = runner.my_rows();
        const int64_t hidden = state.model->hidden;
        __builtin_memcpy(pass.taps[i] + mine.begin * hidden, pass.hidden + mine.begin * hidden,
                         size_t(mine.end - mine.begin) * hidden * sizeof(float));
        // The next barrier comes before anybody writes the residual stream again.
    }
    if (alternates) runner.merge_streams();
    if (thread == 0) *state.next = pass.run_count, *state.stopped = 0;
}

static void run_norm(void* context, int32_t thread, Team& team) {
    const State& state = *static_cast<const State*>(context);
    const Runner runner(state, thread, team);
    const int64_t hidden = state.model->hidden;
    const Range mine = runner.my_rows();
    for (int64_t row = mine.begin; row < mine.end; ++row)
        normalize(state.pass->hidden + row * hidden, state.model->norm, int32_t(hidden), state.model->eps, state.logits + row * hidden);
}

static void run_head(void* context, int32_t thread, Team& team) {
    const State& state = *static_cast<const State*>(context);
    Runner runner(state, thread, team);
    runner.norm_quantize(state.model->norm, state.model->head);
    runner.project(state.model->head, state.narrow, state.logits, state.model->logit_cap);
}

// Rows times one layer: model.head and its input are those of this layer, nothing is normed.
static void run_linear(void* context, int32_t thread, Team& team) {
    const State& state = *static_cast<const State*>(context);
    Runner runner(state, thread, team);
    Quantized in = state.narrow;
    in.floats = state.pass->hidden;
    runner.quantize_rows(in.floats, state.model->hidden, in, state.model->head);
    runner.project(state.model->head, in, state.logits);
}

// Reads this thread's share of a buffer in order: pass.hidden has model.hidden vectors of 64 bytes.
static void run_read(void* context, int32_t thread, Team& team) {
    const State& state = *static_cast<const State*>(context);
    const int64_t vectors = state.model->hidden;
    const int64_t begin = vectors * thread / team.threads / 4 * 4, end = vectors * (thread + 1) / team.threads / 4 * 4;
    const float* x = state.pass->hidden;
    i16 sum[4] = {};
    for (int64_t i = begin; i < end; i += 4)
        for (int32_t j = 0; j < 4; ++j) {
            __builtin_prefetch(x + (i + j) * 16 + 1024);
            sum[j] ^= bits(load(x + (i + j) * 16));
        }
    // The result must be used, or nothing would be read.
    const i16 all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
    state.logits[thread * 16] = float(all[0] ^ all[7] ^ all[15]);
}
