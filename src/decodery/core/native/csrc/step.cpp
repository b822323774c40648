// A whole step of n texts in one call: what their rows read, the pass, the choice of tokens, and the rows that stay.
#include <string.h>

#include "state.h"

extern "C" int32_t decodery_layers(const Model* model, Pass* pass, int64_t* ticks);
extern "C" int32_t decodery_head(const Model* model, const float* hidden, int32_t rows, float* logits);
extern "C" int32_t decodery_sample(const Sampling* sampling);
extern "C" int32_t decodery_expand_rows(int32_t kind, const uint8_t* const* rows, int32_t count, int32_t in, float* to);

namespace {

float widened(uint16_t half) {
    const uint32_t size = uint32_t(half & 0x7fff) << 13, sign = uint32_t(half & 0x8000) << 16;
    float x;
    memcpy(&x, &size, 4);
    x *= 0x1p112f;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits |= sign;
    memcpy(&x, &bits, 4);
    return x;
}

// To the nearest bfloat16, ties to even.
float rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    memcpy(&x, &bits, 4);
    return x;
}

// The embedding of a token, as the first layer reads it.
void embed(const ArrayStep& step, int64_t token, int32_t hidden, float* to) {
    const uint16_t* shorts = static_cast<const uint16_t*>(step.table) + token * hidden;
    const float* floats = static_cast<const float*>(step.table) + token * hidden;
    if (step.numbers == rows_of_blocks) {
        decodery_expand_rows(step.blocks, static_cast<const uint8_t* const*>(step.table) + token, 1, hidden, to);
        for (int32_t i = 0; i < hidden; ++i) to[i] = rounded(to[i]);
    }
    for (int32_t i = 0; step.numbers != rows_of_blocks && i < hidden; ++i) {
        if (step.numbers == float32_numbers) to[i] = floats[i];
        else if (step.numbers == float16_numbers) to[i] = widened(shorts[i]);
        else {
            const uint32_t bits = uint32_t(shorts[i]) << 16;
            memcpy(to + i, &bits, 4);
        }
    }
    if (step.scale != 1.0f)
        for (int32_t i = 0; i < hidden; ++i) to[i] *= step.scale;
}

// Writes what a pass reads of text number `text`.
void prepare(const Model& model, ArrayStep& step, int32_t text, uint8_t*& masks) {
    const Sampling& sampling = step.sampling;
    Segment& segment = const_cast<Segment*>(step.pass.segments)[text];
    const int32_t first = sampling.first[text], rows = step.sizes[text];
    const_cast<int32_t*>(sampling.first)[text + 1] = first + rows;
    int64_t* tokens = const_cast<int64_t*>(sampling.tokens) + first;
    int32_t* parents = const_cast<int32_t*>(sampling.parents) + first;
    const int64_t *drafted = step.drafts + int64_t(text) * step.stride, *below = drafted + int64_t(step.room) * step.stride;
    tokens[0] = step.last[text];
    parents[0] = -1;
    step.depths[first] = 0;
    bool chain = true;
    for (int32_t row = 1; row < rows; ++row) {
        tokens[row] = drafted[row];
        parents[row] = int32_t(below[row]);
        step.depths[first + row] = step.depths[first + parents[row]] + 1;
        chain = chain && parents[row] == row - 1;
    }
    int32_t* slots = const_cast<int32_t*>(segment.slots) + segment.lengths[0];
    for (int32_t row = 0; row < rows; ++row)
        step.positions[first + row] = slots[row] = int32_t(step.next[text] + step.depths[first + row]);
    segment.positions = step.positions + first;
    segment.rows = rows;
    segment.mask = chain ? nullptr : masks;
    for (int32_t row = 0; !chain && row < rows; ++row, masks += rows) {
        memset(masks, 0, size_t(rows));
        for (int32_t node = row; node >= 0; node = parents[node]) masks[node] = 1;
    }
    const int64_t half = model.head_dim / 2;
    for (int32_t row = first; row < first + rows; ++row) {
        if (step.numbers != no_numbers) embed(step, sampling.tokens[row], model.hidden, step.pass.hidden + int64_t(row) * model.hidden);
        for (int32_t kind = 0; kind < 2 && step.cos[kind] != nullptr; ++kind) {
            const int64_t from = step.positions[row] * half;
            memcpy(const_cast<float*>(step.pass.cos[kind]) + row * half, step.cos[kind] + from, size_t(half) * sizeof(float));
            memcpy(const_cast<float*>(step.pass.sin[kind]) + row * half, step.sin[kind] + from, size_t(half) * sizeof(float));
        }
    }
}

// Makes content of the root's row and of those of the accepted nodes, which move up to it.
void keep(const Model& model, ArrayStep& step, int32_t text) {
    const Segment& segment = step.pass.segments[text];
    const int32_t first = step.sampling.first[text], rows = step.sizes[text], accepted = step.sampling.accepted[text];
    const int32_t *path = step.sampling.paths + first, *parents = step.sampling.parents + first;
    int32_t* choices = step.choices + int64_t(first) * 2;
    step.kept[text] = accepted + 1;
    step.choice_counts[text] = 0;
    for (int32_t i = 0; i <= accepted; ++i) {
        const int32_t node = i == 0 ? 0 : path[i - 1], next = i < accepted ? path[i] : -1;
        step.emitted[first + i] = i < accepted ? step.sampling.tokens[first + next] : step.sampling.chosen[text];
        int32_t taken = -1, children = 0;
        for (int32_t child = node + 1; child < rows; ++child) {
            if (parents[child] != node) continue;
            if (child == next) taken = children;
            ++children;
        }
        if (children == 0) continue;
        int32_t* choice = choices + 2 * step.choice_counts[text]++;
        choice[0] = taken;
        choice[1] = children;
    }
    int64_t* lengths = const_cast<int64_t*>(segment.lengths);
    int32_t* slots = const_cast<int32_t*>(segment.slots);
    for (int32_t i = 0; i < accepted; ++i) {
        if (path[i] == i + 1) continue;
        const int32_t start = int32_t(lengths[0]), from = start + path[i], to = start + i + 1;
        for (int32_t layer = 0; layer < step.pass.run_count; ++layer)
            for (int32_t head = 0; head < model.kv_heads; ++head) copy_slot(segment, layer, head, from, to, model.head_dim);
        slots[to] = slots[from];
    }
    for (int32_t layer = 0; layer < step.pass.run_count; ++layer) lengths[layer] += accepted + 1;
    step.next[text] += accepted + 1;
    step.sampling.positions[text] += accepted + 1;
    step.last[text] = step.sampling.chosen[text];
    if (step.next[text] > step.ends[text]) step.full = 1;
}

}  // namespace

// Keeps what one text accepted where Python has chosen: see `ArrayStep`.
EXPORT void decodery_keep(const Model* model, ArrayStep* step, int32_t text) { keep(*model, *step, text); }

// Writes what the rows of all texts read.
EXPORT void decodery_prepare(const Model* model, ArrayStep* step) {
    uint8_t* masks = step->masks;
    for (int32_t text = 0; text < step->sampling.texts; ++text) prepare(*model, *step, text, masks);
}

// Chooses the tokens of all texts by the logits of their rows, and keeps the rows that stay. Returns as `decodery_step`.
EXPORT int32_t decodery_choose_tokens(const Model* model, ArrayStep* step) {
    if (decodery_sample(&step->sampling) != 0) return 1;
    step->sampling.waiting = 0;
    for (int32_t text = 0; text < step->sampling.texts; ++text) step->sampling.waiting += step->sampling.accepted[text] < -1;
    if (step->sampling.waiting != 0) return 3;
    step->full = 0;
    step->reach = 0;
    step->plain = step->pass.rows == step->sampling.texts;
    for (int32_t text = 0; text < step->sampling.texts; ++text) {
        step->kept[text] = 0;
        if (step->sampling.accepted[text] >= 0) keep(*model, *step, text);
        else step->plain = 0;
        step->reach += step->next[text];
    }
    return 0;
}

// A step of all texts, see `ArrayStep`. Returns 0, or 1 when there is no memory, and then nothing is kept, or 2 where experts have
// no weights yet: called again once they have some, with nothing else run meanwhile, it goes on from there; or 3 where texts wait
// for masks: `decodery_choose_tokens` goes on once they are known.
EXPORT int32_t decodery_step(const Model* model, ArrayStep* step) {
    step->sampling.waiting = 0;
    if (step->pass.stopped == 0) {
        if (step->numbers != no_numbers) decodery_prepare(model, step);
        step->pass.next = 0;
    }
    if (decodery_layers(model, &step->pass, nullptr) != 0) return 1;
    if (step->pass.stopped != 0) return 2;
    if (decodery_head(model, step->pass.hidden, step->pass.rows, step->sampling.logits) != 0) return 1;
    return decodery_choose_tokens(model, step);
}
