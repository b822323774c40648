// What every kernel set of this machine computes of the same drawn numbers, as hashes: a line for each set and case.
// Linked with the native library; run by bits.sh on this machine and, under emulation, on another.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "../../src/decodery/core/native/csrc/state.h"

extern "C" {
const char* decodery_kernels(int32_t i);
void decodery_choose(int32_t i);
void decodery_threads(int32_t n);
void decodery_pack(const int8_t* weight, int32_t in, const int32_t* rows, int32_t out, uint8_t* packed);
void decodery_pack_ternary(const uint8_t* weight, int32_t in, const int32_t* rows, int32_t out, uint8_t* packed);
void decodery_pack16(Form form, const uint16_t* weight, int32_t in, const int32_t* rows, int32_t out, uint16_t* packed);
int32_t decodery_pack_rows(int32_t kind, const uint8_t* const* rows, int32_t in, int32_t out, int64_t panel_bytes, uint8_t* packed);
int32_t decodery_expand_rows(int32_t kind, const uint8_t* const* rows, int32_t count, int32_t in, float* to);
int32_t decodery_linear(const Linear* linear, const float* x, int32_t rows, float* y);
int32_t decodery_layers(const Model* model, Pass* pass, int64_t* ticks);
int32_t decodery_topk(const float* x, int32_t rows, int32_t n, int32_t k, int32_t* ids, float* values);
int32_t decodery_race(const float* row, int32_t n, uint64_t key, int32_t room, int32_t* ids);
}

static uint64_t state = 88172645463325252ull;
static uint32_t drawn() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return uint32_t(state >> 32);
}
static float uniform() { return float(drawn() >> 8) * 0x1p-23f - 1.0f; }
static std::vector<float> floats_of(size_t n) {
    std::vector<float> x(n);
    for (float& each : x) each = uniform();
    return x;
}
template <class T>
static uint64_t hash(const T* x, size_t n, uint64_t h = 1469598103934665603ull) {
    const uint8_t* p = reinterpret_cast<const uint8_t*>(x);
    for (size_t i = 0; i < n * sizeof(T); ++i) h = (h ^ p[i]) * 1099511628211ull;
    return h;
}

template <class T>
static T* aligned(size_t bytes) { return static_cast<T*>(aligned_alloc(64, (bytes + 63) / 64 * 64)); }

// Where a type's scales in half precision lie in its blocks.
static void tame(Blocks kind, std::vector<uint8_t>& raw) {
    const int32_t size = bytes_of(kind), at = kind == q6_k ? 208 : 0;
    const int32_t scales = kind == q4_1 || kind == q5_1 || kind == q4_k || kind == q5_k ? 2 : 1;
    for (size_t block = 0; block < raw.size(); block += size)
        for (int32_t i = 0; i < scales; ++i) raw[block + at + 2 * i + 1] = uint8_t((raw[block + at + 2 * i + 1] & 0x83) | 0x18);
}

static const int32_t counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 47};
static void multiply(const char* set, const char* name, const Linear& linear, const float* x) {
    uint64_t h = 1469598103934665603ull;
    for (int32_t rows : counts) {
        std::vector<float> y(size_t(rows) * linear.out);
        decodery_linear(&linear, x, rows, y.data());
        h = hash(y.data(), y.size(), h);
    }
    printf("%s\t%s\t%016llx\n", set, name, static_cast<unsigned long long>(h));
}

static Linear whole(int32_t in, int32_t out) {
    const int32_t wide = round_up(out, panel_width);
    std::vector<int8_t> weight(size_t(in) * out);
    for (int8_t& each : weight) each = int8_t(int32_t(drawn() % 255) - 127);
    std::vector<int32_t> rows(wide, -1);
    for (int32_t i = 0; i < out; ++i) rows[i] = i;
    Linear linear = {nullptr, nullptr, nullptr, in, out, rows8};
    uint8_t* packed = aligned<uint8_t>(panel_bytes(rows8, in) * (wide / panel_width));
    decodery_pack(weight.data(), in, rows.data(), wide, packed);
    float* scale = aligned<float>(4 * wide);
    for (int32_t i = 0; i < wide; ++i) scale[i] = 0.001f * (1.5f + uniform());
    linear.weight = packed;
    linear.scale = scale;
    return linear;
}

static Linear ternary(int32_t in, int32_t out) {
    const int32_t wide = round_up(out, panel_width);
    std::vector<uint8_t> weight(size_t(in) / 4 * out);
    for (uint8_t& each : weight) each = uint8_t(drawn() % 3 | drawn() % 3 << 2 | drawn() % 3 << 4 | drawn() % 3 << 6);
    std::vector<int32_t> rows(wide, -1);
    for (int32_t i = 0; i < out; ++i) rows[i] = i;
    uint8_t* packed = aligned<uint8_t>(panel_bytes(rows2, in) * (wide / panel_width));
    decodery_pack_ternary(weight.data(), in, rows.data(), wide, packed);
    float* scale = aligned<float>(4 * wide);
    for (int32_t i = 0; i < wide; ++i) scale[i] = 0.001f * (1.5f + uniform());
    return {packed, scale, nullptr, in, out, rows2};
}

// A pass over two layers: ten rows, then three behind them, two of which branch. Keys and values lie in `element`s.
static void pass_of(const char* set, const char* name, const Model& model, Element element) {
    constexpr int32_t slots = 32, rows = 10, more = 3;
    const int32_t dim = model.head_dim, bytes = element == float32_elements ? 4 : element == float16_elements ? 2 : 1;
    constexpr int32_t layers = 2, pages = slots / page_slots;
    const int64_t page = 2 * page_slots * (round_up(dim, 16) * bytes + (element == coded_elements ? scale_bytes : 0));
    const int32_t count = layers * model.kv_heads * pages;
    char* cache = aligned<char>(size_t(count * page));
    memset(cache, 0, size_t(count * page));
    std::vector<int32_t> table(count);
    for (int32_t i = 0; i < count; ++i) table[i] = i;
    std::vector<float> hidden = floats_of(size_t(rows) * model.hidden), next = floats_of(size_t(more) * model.hidden);
    int64_t lengths[2] = {0, 0}, positions[slots];
    int32_t places[2 * slots], order[2] = {0, 1}, marks[2] = {0, 0};
    for (int32_t i = 0; i < slots; ++i) positions[i] = i, places[i] = places[slots + i] = i;
    float* taps[2] = {nullptr, nullptr};
    std::vector<float> cos = floats_of(rows * dim / 2), sin = floats_of(rows * dim / 2);
    Segment segment = {};
    segment.base = cache, segment.pages = table.data(), segment.page_bytes = page;
    segment.table_layer = model.kv_heads * pages, segment.table_head = segment.table_pages = pages;
    segment.lengths = lengths, segment.lengths_layer = 1, segment.slots = places, segment.slots_layer = slots;
    segment.positions = positions, segment.rows = rows, segment.element = element;
    Pass pass = {};
    pass.hidden = hidden.data();
    pass.segments = &segment;
    pass.run = order, pass.marks = marks, pass.taps = taps;
    pass.cos[0] = pass.cos[1] = cos.data(), pass.sin[0] = pass.sin[1] = sin.data();
    pass.rows = rows, pass.segment_count = 1, pass.run_count = 2;
    decodery_layers(&model, &pass, nullptr);
    uint64_t h = hash(hidden.data(), hidden.size());
    const uint8_t mask[more * more] = {1, 0, 0, 1, 1, 0, 1, 0, 1};
    const int64_t behind[more] = {rows, rows + 1, rows + 1};
    lengths[0] = lengths[1] = rows;
    segment.positions = behind, segment.mask = mask, segment.rows = more;
    places[rows + 2] = places[slots + rows + 2] = rows + 1;
    pass.hidden = next.data(), pass.rows = more, pass.next = 0;
    decodery_layers(&model, &pass, nullptr);
    h = hash(next.data(), next.size(), hash(cache, size_t(count * page), h));
    free(cache);
    printf("%s\t%s\t%016llx\n", set, name, static_cast<unsigned long long>(h));
}

int main() {
    constexpr int32_t in = 1280, out = 70, wide = 96;
    decodery_threads(1);
    const std::vector<float> x = floats_of(47 * in);
    const std::pair<Blocks, const char*> kinds[] = {{q4_0, "Q4_0"}, {q4_1, "Q4_1"}, {q5_0, "Q5_0"}, {q5_1, "Q5_1"}, {q8_0, "Q8_0"},
        {q4_k, "Q4_K"}, {q5_k, "Q5_K"}, {q6_k, "Q6_K"}, {iq4_nl, "IQ4_NL"}, {iq4_xs, "IQ4_XS"}};
    std::vector<std::vector<uint8_t>> raws;
    for (const auto& [kind, name] : kinds) {
        std::vector<uint8_t> raw(size_t(out) * (in / block_size / blocks_of(kind)) * bytes_of(kind));
        for (uint8_t& each : raw) each = uint8_t(drawn());
        tame(kind, raw);
        raws.push_back(raw);
    }
    const Linear bytes = whole(in, out), trits = ternary(in, out);
    std::vector<uint16_t> sixteen(size_t(in) * out);
    for (uint16_t& each : sixteen) each = uint16_t((drawn() & 0x83ff) | 0x3000);
    constexpr int32_t hidden = 128, inner = 192, heads = 4, kv_heads = 2, dim = 64;
    const std::vector<float> norm(hidden, 1.0f);
    Layer layers[2] = {};
    for (Layer& layer : layers) {
        layer.qkv = whole(hidden, (heads + 2 * kv_heads) * dim);
        layer.output = whole(heads * dim, hidden);
        layer.gate_up = whole(hidden, 2 * inner);
        layer.down = whole(inner, hidden);
        layer.attention_norm = layer.mlp_norm = norm.data();
    }
    Model model = {layers, norm.data(), layers[0].output, hidden, inner, heads, kv_heads, dim, 0, 1e-5f, 0.125f};
    const std::vector<float> logits = floats_of(4000);
    const uint64_t begun = state;
    for (int32_t i = 0; decodery_kernels(i) != nullptr; ++i) {
        const char* set = decodery_kernels(i);
        decodery_choose(i);
        state = begun;
        size_t number = 0;
        for (const auto& [kind, name] : kinds) {
            const std::vector<uint8_t>& raw = raws[number++];
            std::vector<const uint8_t*> rows(wide, nullptr);
            for (int32_t row = 0; row < out; ++row) rows[row] = raw.data() + row * (raw.size() / out);
            const size_t size = panel_bytes(form_of(kind), in) * (wide / panel_width);
            uint8_t* packed = aligned<uint8_t>(size);
            decodery_pack_rows(kind, rows.data(), in, wide, panel_bytes(form_of(kind), in), packed);
            std::vector<float> expanded(size_t(out) * in);
            decodery_expand_rows(kind, rows.data(), out, in, expanded.data());
            printf("%s\t%s laid out\t%016llx\n", set, name, static_cast<unsigned long long>(hash(packed, size)));
            printf("%s\t%s expanded\t%016llx\n", set, name, static_cast<unsigned long long>(hash(expanded.data(), expanded.size())));
            multiply(set, name, {packed, nullptr, nullptr, in, out, form_of(kind)}, x.data());
            free(packed);
        }
        multiply(set, "int8", bytes, x.data());
        multiply(set, "ternary", trits, x.data());
        for (Form form : {bfloat16s, float16s}) {
            std::vector<int32_t> rows(wide, -1);
            for (int32_t row = 0; row < out; ++row) rows[row] = row;
            uint16_t* packed = aligned<uint16_t>(panel_bytes(form, in) * (wide / panel_width));
            decodery_pack16(form, sixteen.data(), in, rows.data(), wide, packed);
            multiply(set, form == bfloat16s ? "bfloat16" : "float16", {reinterpret_cast<uint8_t*>(packed), nullptr, nullptr, in, out, form}, x.data());
            free(packed);
        }
        pass_of(set, "pass", model, float32_elements);
        pass_of(set, "pass, float16 cache", model, float16_elements);
        pass_of(set, "pass, coded cache", model, coded_elements);
        int32_t ids[64];
        float values[64];
        decodery_topk(logits.data(), 1, 4000, 40, ids, values);
        const int32_t racing = decodery_race(logits.data(), 4000, 7, 64, ids);
        uint64_t h = hash(values, 40);
        h = racing > 0 ? hash(ids, racing, h) : h;
        printf("%s\tsearches\t%016llx\n", set, static_cast<unsigned long long>(h));
    }
}
