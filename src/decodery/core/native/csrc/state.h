// The working memory of one pass, laid out by native.cpp and used by every instruction set alike.
#pragma once
#include <math.h>

#include <type_traits>
#include <utility>

#include "abi.h"
#include "pages.h"
#include "parallel.h"

#include <type_traits>

constexpr int32_t group_size = 64;     // inputs that share one activation scale
constexpr int32_t block_size = 32;     // inputs of a block of weights
constexpr int32_t super_size = 256;    // inputs of a super-block
constexpr float least_most = 16256.0f;    // of sums of 32 inputs as integers: upper bytes go to 127
constexpr int32_t panel_width = 32;    // outputs computed side by side
constexpr int32_t most_queries = 24;   // queries of one attention work item
constexpr int32_t key_chunk = 256;     // logical indices whose values attention sums up before it merges them with others
// Bytes of a query's weights for values of a chunk, four slots at a time, from each of which one may be seen.
constexpr int32_t weight_bytes = 4 * key_chunk + key_chunk + 64;
constexpr float paid_unit = 1099511627776.0f;    // 2^40: integers that no order of a sum changes
constexpr int32_t long_text = 512;     // slots from which on they do
constexpr int32_t few_queries = 12;    // of a key-value head, below which they do
constexpr int64_t most_shared = 1 << 20;    // numbers that there is room for then

inline int32_t panels(const Linear& linear) { return (linear.out + panel_width - 1) / panel_width; }
constexpr bool is_floating(Form form) { return form == bfloat16s || form == float16s || form == float8 || form == codes4; }
constexpr bool is_super(Form form) { return form >= super4 && form <= super6; }
// The form of the numbers in a super-block.
constexpr Form base_of(Form form) {
    return form == super4 ? blocks4 : form == super_table4 ? table4 : form == super5 ? blocks5 : form == super6 ? blocks6 : form;
}
// Bits of a number in a block.
constexpr int32_t bits_of(Form form) {
    const Form base = base_of(form);
    return base == blocks8 ? 8 : base == blocks6 ? 6 : base == blocks5 ? 5 : 4;
}
// Whether a weight has a least value, beside its step.
constexpr bool has_least(Form form) { return base_of(form) == blocks4 || base_of(form) == blocks5; }
// What the numbers of table4 stand for: the values of GGML's IQ4_NL.
constexpr int8_t table_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// What codes of E2M1 stand for, which have a sign, two bits of exponent and one of mantissa: twice that, and `e2m1_zero` more.
// None is below 0, so that products of several fit 16 bits together.
constexpr int32_t e2m1_zero = 12;
constexpr int8_t e2m1_values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr bool is_e2m1(Form form) { return form == float4 || form == mxfp4s; }
// Inputs of float8 that share a scale, and the bytes of a panel's group of them.
constexpr int32_t float8_group = 128;
constexpr int32_t float8_bytes = (4 + float8_group) * panel_width;
// The same for codes4, behind a table in each panel.
constexpr int32_t codes4_group = 64;
constexpr int32_t codes4_table = 4 * 16;
constexpr int32_t codes4_bytes = 4 * panel_width + codes4_group * panel_width / 2;
// Inputs that are summed in whole numbers: of a block, of a group of rows2.
constexpr int32_t inputs_of(Form form) { return form == rows2 || form == rows8 ? group_size : block_size; }
// Of a panel's group of rows2.
constexpr int32_t ternary_bytes = group_size * panel_width / 4;
// Of a panel's block.
constexpr int32_t number_bytes(Form form) { return block_size * panel_width * bits_of(form) / 8; }
constexpr int32_t steps_bytes(Form form) { return (form == mxfp4s ? 1 : form == blocks8 ? 2 : 2 * 2) * panel_width; }
constexpr int32_t block_bytes(Form form) { return steps_bytes(form) + number_bytes(form); }
// Where scales and numbers of one of the two blocks of a group begin. Numbers begin with a cache line.
constexpr int32_t scales_at(Form form, int32_t block) { return block * (form == mxfp4s ? steps_bytes(form) : block_bytes(form)); }
constexpr int32_t numbers_at(Form form, int32_t block) {
    return form == mxfp4s ? 2 * steps_bytes(form) + block * number_bytes(form) : block * block_bytes(form) + steps_bytes(form);
}
// Of a panel's super-block: where integer scales begin and where numbers do, and all of it.
constexpr int32_t super_scales(Form form) { return (has_least(form) ? 2 * 2 + 8 : 2) * panel_width; }
constexpr int32_t super_numbers(Form form) { return super_scales(form) + (form == super6 ? 16 : 8) * panel_width; }
constexpr int32_t super_bytes(Form form) { return super_numbers(form) + 8 * number_bytes(form); }
// Puts the integer scales of block j of an output into a panel's super-block: of a step and a least value, or of halves.
template <Form form>
inline void put_scales(uint8_t* super, int32_t lane, int32_t j, int32_t first, int32_t second) {
    uint8_t* scales = super + super_scales(form);
    if (form == super6) {
        scales[2 * j * panel_width + lane] = uint8_t(first);
        scales[(2 * j + 1) * panel_width + lane] = uint8_t(second);
        return;
    }
    scales[j * panel_width + lane] = uint8_t(first);
    if (has_least(form)) super[4 * panel_width + j / 4 * 4 * panel_width + 4 * lane + j % 4] = uint8_t(second);
}
// Of a panel.
inline int64_t panel_bytes(Form form, int32_t in) {
    if (form == float8) return int64_t(round_up(in, float8_group)) / float8_group * float8_bytes;
    if (form == codes4) return codes4_table + int64_t(round_up(in, codes4_group)) / codes4_group * codes4_bytes;
    if (is_floating(form)) return int64_t(in) * 2 * panel_width;
    if (is_super(form)) return int64_t(in) / super_size * super_bytes(form);
    const int64_t width = round_up(in, group_size);
    return form == rows8 ? width * panel_width : form == rows2 ? width / group_size * ternary_bytes : width / block_size * block_bytes(form);
}

// What blocks of GGUF files become; how many blocks of 32 share scales there, and the bytes of these together.
constexpr Form form_of(Blocks kind) {
    switch (kind) {
        case q4_k: return super4;
        case iq4_xs: return super_table4;
        case q5_k: return super5;
        case q6_k: return super6;
        case iq4_nl: return table4;
        case mxfp4: return mxfp4s;
        case q8_0: return blocks8;
        default: return kind == q5_0 || kind == q5_1 ? blocks5 : blocks4;
    }
}
constexpr int32_t blocks_of(Blocks kind) { return kind == q4_k || kind == q5_k || kind == q6_k || kind == iq4_xs ? 8 : 1; }
constexpr int32_t bytes_of(Blocks kind) {
    switch (kind) {
        case mxfp4: return 17;
        case q4_1: return 20;
        case q5_0: return 22;
        case q5_1: return 24;
        case q8_0: return 34;
        case q4_k: return 144;
        case q5_k: return 176;
        case q6_k: return 210;
        case iq4_xs: return 136;
        default: return 18;
    }
}

// Rows of bytes, width a multiple of 64. scale, offset: [rows][width / 64]; offset is what weights stored as
// value + 128 would add too much. sums: [rows][width / 16], of 16 inputs each. halves: [rows][width / 32], the scaled
// sums of 32 inputs, for weights with a least value; of 256 inputs these are also integers of 15 bits, each of two bytes:
// leasts, [rows][width / 256][2][8], the upper bytes and the lower ones, which are signed, and what one stands for,
// least_step [rows][width / 256]. floats: the rows before that, for weights in floating point.
struct Quantized {
    int8_t* q;
    float* scale;
    int32_t* offset;
    int32_t* sums;
    float* halves;
    int8_t* leasts;
    float* least_step;
    float* floats;
    int32_t width;

    int32_t groups() const { return width / group_size; }
    int32_t supers() const { return width / super_size; }
};

// Slots a row sees: [begin, end), then `count` more at `list`.
struct Visible {
    int32_t begin, end;
    const int32_t* list;
    int32_t count;

    int32_t total() const { return end - begin + count; }
};

// Numbers that a thread works in for policies, of rows that see `longest` slots: what slots, or pages, are worth, or the
// weights of the queries of one work item and their sums in integers.
inline int64_t aside_floats(const Model& model, int64_t longest) {
    return (most_queries + 3) * ((longest + 47) / 16 * 16) + int64_t(model.heads) * model.head_dim;
}

// Bytes of a row of codes.
inline int32_t code_bytes(int32_t n, int32_t bits) { return bits == 8 ? n : (n + 1) / 2; }
// Numbers that a thread works in for groups that are sealed but not stored: one kind of a group, its codes and ranges.
inline int64_t sealed_floats(const Policy& policy, int32_t dim) {
    return policy.sealed == nullptr ? 0 : 2 * int64_t(policy.group) * dim + 2 * (policy.group + dim);
}

// What a row reads of what it sees: slots [0, run), then `count` more at `list`, in pages of the table, null: the text's.
struct Chosen {
    int32_t run, count;
    const int32_t *list, *table;
};

// Where a segment's rows start in the pass and, if it has a mask, which tentative rows each of them sees, ascending.
struct Rows {
    int32_t first;
    const int32_t* starts;    // [rows + 1] into own; null for causal order
    const int32_t* own;
    int32_t* lists;           // room for what each row sees one by one: [rows][list_stride]
    int32_t list_stride;
};

// Segments whose first `common` slots are the same memory: order[first] to order[last - 1].
struct Group {
    int32_t first, last, common, rows;
    int64_t longest;          // slots that one of their rows can see
    bool divided;             // whether threads share its queries, of which there are few, and cut what they see
};

// What layers that mix rows work in: all segments' rows one after another, each with `reach` rows and as much content as is
// mixed at once before its own. See Mixing.
struct MixRoom {
    float *held, *mixed, *steps, *left, *room;
    int64_t room_stride;
};

// What experts work in. said, free: [rows][experts], how likely the router finds each, and what they are chosen by. ids, weights:
// [rows][taken]. Rows are taken in turn by expert: begins [experts + 1] has the first place of each, order [rows * taken] which
// of `ids` stands at a place, and places [rows * taken] where each stands. opened, found: [places][2 * inner], [places][hidden].
struct ExpertRoom {
    double *said, *free;
    float *weights, *opened, *found;
    int32_t *ids, *begins, *order, *places, *missing;
    Quantized in, inner;
};

struct State {
    const Model* model;
    const Pass* pass;
    const Rows* rows;                      // [segments]
    const int32_t* order;                  // [segments], as groups follow each other
    const Group* groups;
    int32_t group_count;
    Visible* seen;                         // [rows], in the layer at hand
    Visible* firsts;                       // [rows], the first slots that a policy has read by themselves
    bool chooses, in_turn;                 // whether kernels choose slots for a policy, or leave some out after every row
    Chosen* chosen;                        // then [rows][kv_heads]
    float* aside;                          // per thread, for policies: see aside_floats
    int64_t aside_stride, longest;
    float *qkv, *queries, *context, *branch, *act;
    float* gates;                          // of what attention finds, [rows][heads * head_dim]
    float *ups, *values;                   // of layers that keep latents: queries made in two steps, and what heads find as values
    Quantized raised;                      // over what such queries are made of
    Quantized given;                       // over what layers read of tokens
    float* beside;                         // what is found beside attention, [rows][hidden]
    float *streams, *gates_up;             // [rows][count][hidden]; gates of an MLP of which few open, [rows][intermediate]
    Quantized learned;                     // over what a layer with streams has inside beside attention
    Quantized narrow, wide, inner;         // over hidden, heads * head_dim, what MLPs have inside
    MixRoom mix;
    ExpertRoom experts;
    Quantized mixed;                       // over what a layer finds that mixes rows
    float* scratch;                        // per thread: a normed row, then attention's queries, accumulators and scores
    int64_t scratch_stride;
    // Where several threads share a query: of each chunk the weighted sum of values, rounded up to 16 numbers, then 16 of
    // which two are the largest score and the sum of exponentials, [rows][heads][parts_stride].
    float* parts;
    int64_t parts_stride;
    int32_t divided;                       // how many groups are
    float* logits;                         // head only: [rows][vocab]
    int64_t* ticks;                        // thread 0's time per stage, or null
    int32_t *next, *stopped;               // where the pass has come to
    const Draft* draft;                    // draft heads only
    const Guess* guess;
    int32_t* strange;                      // set where an output is not a number
    Quantized entering, paired;            // over the states of all depths, and what attention reads
    bool tiles;                            // whether products of many rows may take AMX's
};

constexpr int32_t most_taps = 64;      // of a convolution
constexpr int32_t most_groups = 256;   // of experts
constexpr int32_t most_best = 16;      // experts by which groups are compared

constexpr int32_t mix_chunk = 64;      // rows of content that are mixed at once

// What is kept of a row, what it is made of, and what is said.
inline int32_t mixed_width(const Mixer& mixer) {
    if (mixer.rule == gated_conv) return mixer.head_dim;
    if (mixer.rule == mamba1) return mixer.heads;
    return mixer.heads * (mixer.head_dim + (mixer.rule == gated_delta ? 2 : 1)) + 2 * mixer.groups * mixer.state;
}

inline int32_t mixed_inner(const Mixer& mixer) { return mixer.heads * mixer.head_dim; }
inline int32_t mixed_row(const Mixer& mixer) { return mixed_width(mixer) + mixed_inner(mixer) * (mixer.rule == gated_conv ? 2 : 1); }
inline int32_t mixed_channels(const Mixer& mixer) { return mixed_inner(mixer) + (mixer.rule == mamba1 ? 0 : 2 * mixer.groups * mixer.state); }
// Numbers of `Mixing::left`.
inline int32_t mixed_left(const Mixer& mixer) { return mixer.rule == mamba1 ? mixer.rank + 2 * mixer.state : mixer.heads; }
// Numbers that a thread needs for the states of `rows` rows.
inline int64_t mixing_room(const Mixer& mixer, int64_t rows) {
    return rows * (mixer.rule == gated_delta ? 16 * mixer.state : round_up(4 * mixer.state, 16));
}

// What mixing rows works in. mixed: [rows][channels], behind the convolution; steps, left: [rows][heads], the steps (of
// gated_delta how much is written) and what is left of a state, of mamba1 [rows][rank + 2 * state] what select_in makes; room: per thread, states of four rows of a head, or of 16
// values, of every row where rows branch.
struct Mixing {
    const Mixer* mixer;
    const Mixed* rows;
    float *mixed, *steps, *left, *room;
    int64_t room_stride;
    int32_t channels;
};

// What choosing tokens works in: `room_bytes` per thread at `room`, see sample.h.
struct Choosing {
    const Sampling* sampling;
    char* room;
    int64_t room_bytes;
};
// Tokens there is room for, those that penalties go by included; each takes two floats, a number, two keys and a byte.
inline int64_t choosing_width(int32_t vocab) { return round_up(vocab, 64) + 1152; }
inline int64_t choosing_bytes(int32_t vocab) { return choosing_width(vocab) * (4 + 4 + 4 + 8 + 8 + 1) / 64 * 64 + 64; }

enum Stage { stage_norm, stage_matmul, stage_rope, stage_attention, stage_wait, stage_count };

// What one instruction set provides.
struct Kernels {
    const char* name;
    Job layers, norm, head, linear, read, draft, mix;
    bool (*topk)(const float* row, int32_t n, int32_t k, int32_t* ids, float* values);
    void (*chances)(const float* row, int32_t n, int32_t k, float* values);
    bool (*sums)(const float* row, int32_t n, double* found);
    int32_t (*race)(const float* row, int32_t n, uint64_t key, int32_t room, int32_t* ids);
    bool (*pack)(int32_t kind, const uint8_t* const* rows, int32_t in, int32_t out, uint8_t* packed);
    bool (*expand)(int32_t kind, const uint8_t* const* rows, int32_t count, int32_t in, float* to);
    Job sample;
    bool tiles = false;    // see State
};
#if defined(__x86_64__)
extern const Kernels avx512_kernels, avx2_kernels;
#if defined(__linux__) && (__clang_major__ >= 12 || (!defined(__clang__) && __GNUC__ >= 11))
#define DECODERY_AMX 1
extern const Kernels amx_kernels;
#else
#define DECODERY_AMX 0
#endif
#if defined(__clang__) || __GNUC__ >= 11
#define DECODERY_AVX_VNNI 1
extern const Kernels avx2_vnni_kernels;
#endif
#endif
#if defined(__aarch64__)
extern const Kernels arm_i8mm_kernels, arm_kernels;
#endif
extern const Kernels portable_kernels;
