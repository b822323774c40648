// What Python hands over: plain structs of pointers and counts, mirrored field by field in kernels.py.
#pragma once
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

// How the weights of a linear layer are kept, in panels of 32 outputs. `in` is padded to a multiple of 64 but for the last two.
// rows8: [panel][in / 4][2][16][4] unsigned bytes (value + 128), with a scale per output.
// rows2: [panel][in / 8][16][4] bytes of four numbers of two bits (value + 1, value -1, 0 or 1), with a scale per output: in
//   the lowest bits four inputs of outputs 0-15, then the same of 16-31, then the next four inputs of both.
// Blocks of 32 inputs, [panel][in / 32] of two numbers in half precision for each output, [2][32], and the weights' numbers:
//   blocks4, blocks5: step and least value: a weight is step * number + least.
//   table4, blocks6: steps of the first and the second 16 inputs: a weight is step * (number - 32), or of table4 step times what
//   `table_values` has for the number.
//   blocks8: the step alone, [32]: a weight is step * (number - 128).
//   Their lowest four bits are [8][64] bytes, whose low halves are outputs 0-15, the high ones 16-31, four inputs each. Of
//   the 16 vectors [8][2][64] that these make, blocks5 has the fifth bits behind, [8][2][64] bits, and blocks6 two bits
//   each, [4][64] bytes of four vectors' pairs. blocks8: [8][2][64] bytes.
// Super-blocks of 256 inputs, as K-quants and IQ4_XS have them, [panel][in / 256]: the steps d [32] in half precision, and
//   for super4 and super5 the steps of least values [32], [32][8] integer least values in two groups of four, [2][32][4];
//   integer scales [8][32], for super6 [8][2][32]; then the numbers of 8 blocks of 32 inputs, as in blocks4, table4, blocks5
//   and blocks6. A weight is d * scale * number - least step * least, d * scale * (number - 32) or d * scale * value.
// bfloat16s: [panel][in][16] pairs, output i and output i + 16. halves: [panel][in][32] of half precision.
// float4: blocks as table4 has them, whose numbers stand for twice what E2M1 has; with a scale per output.
// mxfp4s: the same numbers, 32 of which share a power of two: of every 64 inputs the exponents, as in MXFP4, of each output,
//   [2][32] bytes, and the numbers of both blocks.
// codes4: [panel] of 16 floats, what codes stand for before scales, and [groups of 64 inputs] of a scale of each output, [32]
//   floats, and codes [64][16], outputs 0-15 in the low halves and 16-31 in the high ones.
// float8: [panel][groups of 128 inputs] of 256 times a scale of each output, [32] floats, and E4M3 numbers [128][32].
enum Form : int32_t {
    rows8, rows2, blocks4, table4, blocks5, blocks6, blocks8, bfloat16s, float16s, super4, super_table4, super5, super6,
    float4, float8, codes4, mxfp4s
};

// Raised where a form is laid out in another way: LAYOUT in kernels.py.
constexpr int32_t form_layout = 1;

// Types of blocks in GGUF files, by GGML's numbers.
enum Blocks : int32_t {
    q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8, q4_k = 12, q5_k = 13, q6_k = 14, iq4_nl = 20, iq4_xs = 23, mxfp4 = 39
};

// bias [panels * 32] may be null, and so is scale but for rows8, rows2 and float4. order: [in] which input each column of the
// weight belongs to, or null; only weights of integers have one, and not those of experts or latents.
struct Linear {
    const uint8_t* weight;
    const float* scale;
    const float* bias;
    int32_t in, out;
    Form form;
    const int32_t* order;
};

struct Mixer;

// Experts of a layer, of which every row takes `taken`; the layer's MLP, where it has one, is added for all rows, as far as
// share [hidden] says of each, null: wholly. router: [count][hidden]; router_bias, choice_bias, scales: [count] or null; groups:
// of experts, from the best `taken_groups` of which they are taken, 0: from all; a group is as good as its best `group_best`
// together. gate_up: what opens follows the gates, [2 * inner], or [inner] without gates. Weights of gate_up and down [count] are null until a row takes
// the expert: a pass stops there. nothing: what is added to the sum of weights where they are `normed`.
// Where there are norms [hidden] of their own, the router reads the stream by router_norm and experts by enter_norm, and what they
// find is normed by leave_norm and added to what the MLP finds, normed by mlp_leave_norm; all four or none.
struct Experts {
    const float *router, *router_bias, *choice_bias, *scales, *share;
    const Linear *gate_up, *down;
    int32_t count, taken, groups, taken_groups, group_best;
    int32_t sigmoid, normed, scaled_inputs;
    double nothing, scale;
    const float *router_norm, *enter_norm, *leave_norm, *mlp_leave_norm;
};

// Attention over latents: a row keeps `rank` numbers, normed by k_norm, and `turned` rotated ones, as the one head of keys and
// values. qkv gives what queries are made of and what is kept. Of heads' queries, plain and then turned numbers, keys [heads]
// [plain][rank] make the plain ones those of latents, and values [heads][rank][value] make values of what heads find; both in
// bfloat16 where `narrow` is set. up: makes queries of what q_norm norms; without weights: qkv gives them.
struct Latent {
    Linear up;
    const void *keys, *values;
    int32_t rank, turned, plain, value, narrow;
    float eps;                                          // of both norms
};

// What a layer adds to the stream because of a row's token: `gate` of the stream, opened, times the pass's inputs [at, at +
// gate.out) of a row of `stride`, through `out`, normed.
struct TokenInputs {
    Linear gate, out;
    const float* norm;                                  // [hidden]
    int32_t at, stride;
};

// Streams beside the one that layers read: `in` makes those from the second on of what enters the first layer, which is the first,
// and out [count - 1] lead each of them back. Layers read the one `active`.
struct Streams {
    Linear in;
    const Linear* out;
    int32_t count, active;
};
// What a layer does with them. What is normed by `norm` router [count][hidden] makes numbers of, and these predict
// [count][count][count] and correct [count][count] shares of streams. scale [hidden] or null: of the active one before it meets the
// layer's inputs. Beside attention, what is normed goes through `in` and `out`, normed by out_norm, and is added with itself.
struct StreamLayer {
    Linear in, out;
    const float *out_norm, *norm, *router, *predict, *correct, *scale;
};

struct Layer {
    Linear qkv, output, gate_up, down;
    const float *attention_norm, *mlp_norm;             // [hidden], or null: rows are read as they are
    const float *q_norm, *k_norm;                       // [head_dim], or of all heads where `wide_norms`, or null
    const float *post_attention_norm, *post_mlp_norm;   // [hidden] or null
    int32_t window;                                     // 0: sees all positions; below 0: those since a multiple of -window
    int32_t rope;                                       // 0: global, 1: local angles
    const float* sinks;                                 // [heads] scores that have no value, or null
    int32_t tempered;                                   // queries are multiplied by the pass's `tempers`
    const Mixer* mixer;                                 // what is there in place of attention, or null
    Linear steps;                                       // of its steps, where `qkv` does not give them: else without weights
    Linear gate;                                        // what attention finds is multiplied by its sigmoid; without weights: not
    const Experts* experts;                             // or null
    const Latent* latent;                               // or null
    // Of heads, where they are not the model's: their width, a multiple of 16 that divides the model's, and the key-value heads,
    // which lie side by side in the slots' rows; both 0 where they are.
    int32_t head_dim, kv_heads;
    int32_t reads;                                      // 1 + the layer whose keys and values it reads; 0: its own
    const float* v_norm;                                // [head_dim], or null
    const TokenInputs* inputs;                          // or null
    float scale;                                        // of the stream after it; 0: 1
    Linear mix_in, mix_out;                             // of `mixer` where it is beside attention; without weights: in its place
    const StreamLayer* streams;                         // or null
    // Gates of its MLP count as far as they lie above their mean by `reach` standard deviations of a row's, where `sparse` is set.
    float reach;
    int32_t sparse;
};

struct Model {
    const Layer* layers;
    const float* norm;
    Linear head;
    int32_t hidden, intermediate, heads, kv_heads, head_dim;    // intermediate: of the widest MLP that is no expert
    int32_t opening;                                    // 0: silu, 1: gelu by tanh, 2: silu of clamped gates, as gpt-oss has it; 3: no gates, relu squared
    float eps, attention_scale;
    float residual_scale;                               // of what is added to the stream; 0: 1
    int32_t wide_norms;                                 // queries and keys are normed over all heads at once
    int32_t late_norms;                                 // and behind their rotation
    float attention_cap, logit_cap;                     // x becomes cap * tanh(x / cap); 0: as it is
    const Streams* streams;                             // or null
};

// What a cache's rows of head_dim numbers are made of: floats, or bytes with a scale of the row, see pages.h.
enum Element : int32_t { float32_elements, float16_elements, coded_elements };

// Keys [0] and values [1] of some groups of tokens in integers: codes of 8 or 4 bits, each of which stands for low + step *
// code. Of keys the tokens of one channel of a group are a row with one range, [kv_heads][groups][dim] rows; of values the
// channels of a token, [kv_heads][groups][group] rows. Of 4 bits the first half of a row are the low halves of its bytes.
struct SealedGroups {
    const uint8_t* codes[2];
    const float *low[2], *step[2];
    int64_t groups;
};

// What kernels do by themselves for the policy of a sequence's cache, in layers where `acts` [layers] is not 0.
// widths: [rows] or null. A row sees slots at less than so many positions before its own, 0: all. It then reads the slots at
// the first `sinks` positions, too, by queries turned by cos and sin, [rows][head_dim / 2].
// counts: [rows] or null, how many units a row reads of those it sees, 0: all; its own is one of them. A unit is a page,
// chosen by the bounds of its keys' channels. Where `channels` [layers][kv_heads][channel_count] is given a unit is a slot,
// chosen by these channels of its key in `bits` bits, 0: as they are; slots at the first `first` positions and at less than
// `recent` before the row come before others. What the first `known` pages of a head are chosen by lies in pages of its own
// (see select.h): side_table [layers][kv_heads][side_pages]. It is there for the first summarised[layer] of them, and is
// computed for the others. picked: [kv_heads][rows][room], where the choice goes.
// paid: [layers][kv_heads][paid_slots] or null: the weights of rows from `paid_from` on are added, times `paid_unit`.
// sealed: [rows] or null, how many first tokens each row reads in integers, whole groups of `group` tokens. The first `stored`
// of them are in `blocks` [layers][block_count], of `block_groups` groups each but the last; the others are the first slots
// that a row sees, rounded as these are.
// held: null, or what slots are worth, [layers][kv_heads][held_slots] of content: then rows are read in turn, each by the slots
// that a head holds after its parent, parents [stays + rows], -1: after content. A row's weights are added to what these slots are worth,
// their mean over the heads of a group; or are all that they are worth, their mean over all heads, where `newest` is set. Of
// the slots then the least worthy go until keeps [layers][rows] are left, but the first `firsts` and the last lasts
// [layers][rows] go after all others; of equals the later one. added: [stays + rows][evicting][kv_heads, or 1 of `newest`]
// [worth_slots] what each row adds, in 32 bits, -1: not held; those of the rows that stay are given. places: [layers] which of
// the `evicting` layers each is. worths: [stays + rows][kv_heads][worth_slots], room for what slots of the layer at hand are worth.
// targets: null, or a slot that goes is merged into the one that stays whose key is most similar, if their cosine reaches a limit,
// or without `threshold` always. The limit is beta times the mean cosine of the slots that a row leaves out, and 1 - beta times
// the limit before: known_limits [layers][kv_heads] after content, not a number: none; limits [stays + rows][evicting][kv_heads]
// after each row. Where `weighted` is set a slot that goes counts by the exponential of its cosine, and the other by e; else
// the mean is taken of both, the first times its cosine. The slots that a row has changed, targets [stays + rows][evicting]
// [kv_heads][merge_room], -1 after the last, become merged [..][2 (keys, values)], rows as pages have them.
// lowered: [rows][2] or null. lowered_by is added to a row's scores of what it sees from the first of these to before the
// second, counted from the first slot that it sees.
struct Policy {
    const uint8_t* acts;
    const int32_t* widths;
    const float *cos, *sin;
    const int32_t *counts, *channels;
    char* side_base;
    const int32_t* side_table;
    int32_t *summarised, *picked;
    int64_t* paid;
    int64_t side_bytes;
    int32_t sinks, channel_count, bits, first, recent, known, side_pages, room, paid_from, paid_slots;
    const int32_t* sealed;
    const SealedGroups* blocks;
    int32_t stored, group, block_groups, block_count, code_bits;
    const double* held;
    double* worths;
    float* added;
    const int32_t *places, *parents, *keeps, *lasts;
    int32_t evicting, held_slots, worth_slots, firsts, newest;
    const int32_t* lowered;
    float lowered_by;
    const double* known_limits;
    double* limits;
    int32_t* targets;
    char* merged;
    double beta;
    int32_t merge_room, threshold, weighted;
};

// One sequence's rows. Slot s of a layer's key-value head is row s % 16 of the page that pages[layer * table_layer + head *
// table_head + s / 16] names, and begins at base + name * page_bytes; -1: no page, whose slots nobody may read. Content is
// slots [0, length) of lengths[layer * lengths_layer + head * lengths_head], then come `stays` tentative rows of earlier
// passes, and the rows are written after these. slots has the positions of slots, with strides likewise; a stride is 0 where
// layers, or heads, share.
// mask: [rows][stays + rows] bytes, null for causal order where nothing stays.
// starts, picked: null, or which slots each row of each key-value head reads in the layer at hand, ascending: row r of
// head h reads picked[starts[h * rows + r]] up to where the next one's begin, [kv_heads * rows + 1] in all.
// weights, mass: null, or where attention's weights go, [heads / kv_heads][starts' last], and the logarithms of their
// sums before they were made to sum to one, [rows][heads].
// policy: null, or what is done for a policy without `starts`.
// Layers that mix rows keep what they need of each in the slots of their own layers where `keeps` is set, else the segment's
// rows are all there is. states: of all layers with a state, after the first `known` slots of content. after: where those after
// all content go where that is more, or those after the segment's rows where these are gone `through`, which then follow each
// other; null: nowhere, of rows that follow each other and at most mix_chunk slots of content. parents: [stays + rows], the
// tentative row right before each, -1: none; null: each follows the one before.
struct Segment {
    char* base;
    const int32_t* pages;
    const int64_t* lengths;
    const int32_t* slots;
    const int64_t* positions;                           // positions of the rows
    const uint8_t* mask;
    int64_t page_bytes, table_layer, table_head, lengths_layer, lengths_head, slots_layer, slots_head;
    int32_t rows, stays;
    Element element;                                    // of the cache
    int32_t table_pages;                                // that a table of one head has room for
    const int32_t *starts, *picked;
    float *weights, *mass;
    const Policy* policy;
    const float* states;
    float* after;
    const int32_t* parents;
    int32_t known, keeps, through;

    int64_t length(int32_t layer, int32_t head) const { return lengths[layer * lengths_layer + head * lengths_head]; }
    const int32_t* table(int32_t layer, int32_t head) const { return pages + layer * table_layer + head * table_head; }
    const Policy* acting(int32_t layer) const { return policy != nullptr && policy->acts[layer] != 0 ? policy : nullptr; }
};

// Slots that heads lose: slots [layers][heads][count], ascending, those from lengths [layers] on stand for none; a layer's heads
// lose as many. What lies after them moves up, and so do worths [layers][heads][worth_slots] of slots. Of positions [layers]
// [positions_layer] each slot has the latest of those its heads hold. Before that the slots targets [layers][heads][merged_count],
// -1 for none, become merged [..][2 (keys, values)], rows as pages have them, one after another.
struct Lost {
    char* base;
    const int32_t *tables, *slots;    // tables: [layers][heads][table_pages]
    const int64_t* lengths;
    int32_t* positions;
    double* worths;
    int64_t page_bytes, row_bytes, positions_layer, worth_slots;
    int32_t layers, heads, table_pages, count, number_bytes, merged_count;
    const int32_t* targets;
    const char* merged;
};

// Rows of some layers' key-value heads in pages, to be read or written. tables: [layers][heads][table_pages]. slots: [count]
// which, null for those from `start` on. rows: [layers][2 (keys, values)][heads][count] rows of row_bytes each, numbers one after another.
struct PageRows {
    char* base;
    const int32_t *tables, *slots;
    char* rows;
    int64_t page_bytes, row_bytes, count, start;
    int32_t layers, heads, table_pages;
    int32_t number_bytes;                               // 1 where rows are coded
};

// What is left out of a layer, and where a pass stops in it, in this order: before attention, when keys and values are
// written; after it; before the output projection, when latents are values and gates are closed; before each sublayer's result is added to the stream, that of the MLP
// also before rows choose experts and, unasked, where one of those has no weights yet; at the end.
enum Mark : int32_t {
    skip_attention = 1, skip_mlp = 2,
    at_select = 4, at_found = 8, at_heads = 16, at_attention = 32, at_router = 64, at_experts = 128, at_mlp = 256, at_residual = 512
};

// One pass over some layers. cos, sin: [2 (global, local)][rows][head_dim / 2], of the layers that turn by them. taps: per layer run, where the hidden
// states after it are copied, or null. marks: per layer run, of `Mark`.
// A pass that stops returns with next, the layer of the run it is in, and stopped, the mark; called again, it goes on
// from there. At the end next is run_count. memory: what it works in, which must last from call to call where it stops
// (of decodery_room bytes); null where it does not. queries [rows][heads][head_dim, rounded up to 16], context [rows][heads *
// head_dim], branch [rows][hidden] and free [rows][experts], the scores that experts are chosen by: set by the first call, to
// be read and changed at a stop. took: [run_count][rows][taken], the experts that rows took, or null.
struct Pass {
    float* hidden;
    const Segment* segments;
    const int32_t* run;
    const int32_t* marks;
    float* const* taps;
    const float *cos[2], *sin[2];
    int32_t rows, segment_count, run_count;
    int32_t next, stopped;
    char* memory;
    float *queries, *context, *branch;
    const float* tempers;                               // [rows], or null
    int32_t* took;
    double* free;
    const float* inputs;                                // [rows][stride] of `TokenInputs`, or null
};

// A draft head of one layer. What its attention reads is twice as wide as the model: a token's embedding and a feature,
// both normed, side by side. enter: states of `taps` depths, side by side, to features. norm_first: the residual stream
// begins with the normed feature.
struct Draft {
    Model model;
    Linear enter;
    const float *token_norm, *feature_norm;
    int32_t taps, norm_first;
};

// What is asked of it: a pass of texts over its one layer, each a segment with a cache of its own. given: a pointer for every
// row and depth, to states [hidden], where `entering`, else for every row to a feature [hidden]. embedded: for every
// row, the token's embedding [hidden], in bfloat16 where `narrow` is set. cos, sin: of all positions, [.][head_dim / 2].
// Of the rows `said` [spoken], or of all where it is null, there come out: features [spoken][hidden], what leaves the
// layer; logits [spoken][head.out]; and if k is not 0 the k most likely outputs, by the tokens [head.out] they stand for where those are
// given, and their probabilities, [spoken][k] each.
struct Guess {
    Pass pass;
    const float* const* given;
    const void* const* embedded;
    const float *cos, *sin;
    float *features, *logits;
    const int32_t *vocabulary, *said;
    int32_t* ids;
    float* chances;
    int32_t entering, narrow, spoken, k;
};

// The mixer of a layer with a state, between its projections. conv: [channels][kernel], of heads * head_dim + 2 * groups *
// state channels; conv_bias: [channels] or null; decay < 0 and step_bias: [heads].
// mamba2: channels are x [heads][head_dim], b and c [groups][state]; skip: [heads]; gate_norm: [heads * head_dim] or null.
// gated_delta: channels are queries and keys [groups][state] and values [heads][head_dim]; gate_norm: [head_dim]. Where
// in_turns is set, groups take turns from head to head; else the heads of a group follow each other.
// gated_conv: one head of `head_dim` numbers without a state, convolved between two gates; conv: [kernel][channels].
// mamba1: channels are heads of one number and all that is kept of a row, and decay is [heads][state]. Of a row behind the
// convolution select_in [rank + 2 * state][heads] makes what steps are made of, b and c, each normed by select_norm [rank + 2 *
// state], or without weights, where step_eps is above 0; select_out [heads][rank] makes steps.
// In a pass: what is kept of rows lies in the layers slots [slot_count] of a cache, one after another, keys before values;
// states begin at `state_at` of all layers' states. A row of `qkv` and `steps` is the gate [heads * head_dim] and what is kept,
// of gated_conv two gates, before and after the convolution, and the row.
enum Rule : int32_t { mamba2, gated_delta, gated_conv, mamba1 };
struct Mixer {
    const float *conv, *conv_bias, *step_bias, *decay, *skip, *gate_norm;
    int32_t heads, head_dim, groups, state, kernel;
    float least_step, most_step, eps;
    Rule rule;
    int32_t in_turns, slot_count;
    const int32_t* slots;
    int64_t state_at;
    const float *select_in, *select_out, *select_norm;
    int32_t rank;
    float step_eps;
};

// Rows that it mixes. held: [reach + rows][channels + heads], `reach` rows of content and then all tentative ones, each
// with its channels and what its steps are made of; of gated_delta [channels + 2 * heads], how much is written, then steps.
// parents: [rows], the tentative row right before each, -1: the last of content; null: each follows the one before. state:
// [heads][head_dim][state] after the content, of gated_delta [heads][state][head_dim]. after: where the state after the last
// row goes, which may be `state`, where rows follow each other; null: nowhere. The last `said` rows say something: out
// [said][heads * head_dim], gated by `gate`, [said] rows `gate_stride` apart.
struct Mixed {
    const float* held;
    const int32_t* parents;
    const float* state;
    float* after;
    const float* gate;
    float* out;
    int64_t gate_stride;
    int32_t reach, rows, said;
};

// What steps take: see step/pass_prices.py. factors, weights, counts, outliers: [8][8][18], by magnitude of texts and of context
// and by drafted rows. curves: [8][8][18], logarithms of factors as of the step `made` [8][8], -1: of none. read, row, token,
// row_token, text: the prior.
struct Prices {
    double *factors, *weights, *counts, *curves;
    int32_t* outliers;
    int64_t* made;
    double read, row, token, row_token, text, machine, gain;
    int64_t steps;
};

// What `auto` knows of a text. keys, rows: per order, longest first, a table of 2^17 contexts and of the `width` tokens
// that may follow each. rates, rated: [orders][orders][width], how often each place of a row was right, by the longest
// order that is known and the row's own, and after how many times. hits, tried: [8] of copies of the text itself and of
// earlier ones, by the length of the repetition. text, past: the n-grams of the text and of earlier texts, of
// decodery_ngrams, each null where there are none. ends: tokens that end a text. noise: what the noise of tokens counts for,
// 0 for nothing, and noise_mean what that comes to for a token on average; seed, position: of the noise of the token behind
// the last one. last: the text's last tokens, the latest first, of which there are `known`.
// decodery_propose sets what it goes by until decodery_learn: copied, what followed the text's end before, with room for as
// many tokens as a tree may have nodes, where `repeated` tokens were the same, in an earlier text if `others` is set; asked:
// whether anything was looked for. Where `text` is null the caller sets the copy. decodery_learn moves text, last, known and
// position on.
struct Expected {
    uint64_t* keys[3];
    int32_t* rows[3];
    double *rates, *rated, *hits[2], *tried[2];
    void *text, *past;
    const int64_t* ends;
    int64_t* copied;
    double noise, noise_mean;
    uint64_t seed;
    int64_t position, last[3];
    int32_t width, known, ends_count, copied_count, repeated, others, asked;
};

// Trees of `count` texts that share a pass. texts: pointers to each. limits, depths: [count], nodes of a tree and its depth at
// most. costs: [cost_count], seconds of the step with 0, 1, 2, ... drafted nodes of all of them together. own: [count] or null,
// seconds that each node of a text takes beyond these, by its context. weights: [count] or null, what a token of each text is
// worth, at most 1. given: tokens of the step without any draft, also those of other texts in it. ends: null, or [count] positions that the last token of a text may have at most behind its tree, which `next`,
// by place, has now; then limits are `nodes` at most, and depths are not read. Comes out: tokens, parents [.][stride] and sizes [.], the root included, text i's at places[i], or at i
// where that is null; and promised, the sum of the chances of all drafted nodes.
struct Proposed {
    Expected* const* texts;
    const int32_t *limits, *depths, *places;
    const double *costs, *own, *weights;
    int64_t *tokens, *parents;
    int32_t* sizes;
    const int64_t *ends, *next;
    double given, promised;
    int32_t count, cost_count, stride, nodes;
};

// What `auto` decides by for the texts of a step in arrays: see speculative/drafters/auto_text.py. step: those that it drafts for.
// prices: of steps of `sequences` texts, learned; null where costs are given, final. costs: room for those of `step`. kept,
// promised: tokens that drafts have promised and those that came true, which a step makes `remembered` of. balance: what drafts
// may lose, in units of steps without any, which a step adds `share` to. look: seconds that looking for drafts and learning of them is
// expected to take. leads, weights: [count], how many drafted tokens of each text became text beyond those of the slowest one, and room
// for what a token of each is worth; of texts `ahead` tokens in the lead or more it is only its own row. exposed: what drafts may
// lose beyond the balance of what leads are worth, at most. margin: by how much drafts are to be faster than none. Steps
// to skip: `resting`, as long as no fewer texts than `noted` take part; after a step in which no row could pay, of several
// texts `rests`; until a draft is affordable, `longest` at most; of one by itself one more after each step without a draft from the `patience`th on, `pause` at most;
// fruitless: those steps. nodes: of all trees together at most. Comes out: skipped, whether nothing was looked for, and drafted, how many nodes.
struct Drafting {
    Proposed step;
    Prices* prices;
    double *costs, *kept, *promised, *leads, *weights;
    double remembered, balance, share, look, ahead, exposed, margin;
    int32_t sequences, nodes, resting, noted, fruitless, silent, rests, longest, patience, pause, skipped, drafted;
};

// What became of a text's tree. emitted [count]: the tokens that came behind the last one. logits [rows][vocab]: of the tree's
// nodes, tokens and parents [rows], whose most likely tokens follow their contexts from now on; accepted [length]: the nodes that
// became text. failed: set where logits are no numbers.
struct Happened {
    const int64_t *emitted, *tokens, *parents, *accepted;
    const float* logits;
    int32_t count, rows, length, failed;
};

// What makes a distribution of logits, one after another: see decodery/sampling. not_before: `ids` are excluded before
// output position `value`. bias: of `ids`. Penalties go by how often tokens occur: `ids`, ascending, `counts` times each,
// and `tail`, whose tokens follow one by one. mask: `value` is subtracted from tokens whose bit is 0; `ids` are addresses of
// the bits (uint32 words, lowest bit first) after each node of the text's tree, 0 where they are not known yet.
enum Shape : int32_t { mask, not_before, bias, repetition, frequency, presence, temperature, top_k, top_p, min_p };
struct Processor {
    const int64_t *ids, *counts, *tail;
    const float* biases;
    double value;
    int32_t shape, count, tail_count;
};

// How n texts choose their next tokens. Of text i the rows [first[i], first[i + 1]) of the logits are the nodes of a tree:
// tokens, and parents counted from the text's own first row, -1 for the root. seeds, positions: of the noise of the token
// after the root. greedy: [texts] bytes. padding: ids below `limit` that are no token; from `limit` on none is one: their
// logits are made minus infinity.
// Result: the nodes that carry the tokens chosen one after another, `accepted[i]` of them from paths[first[i]] on, and
// the token after them; accepted is -1 where numbers are too near to each other, or are none, so that Python must look, and
// -2 - n where the text waits for the mask after the last of n nodes. waiting: how many texts do, by the call before; where it
// is not 0, these go on and others stay as they are.
struct Sampling {
    float* logits;
    const int64_t* tokens;
    const int32_t *parents, *first;
    const uint64_t* seeds;
    int64_t* positions;
    const Processor* const* processors;
    const int32_t* processor_counts;
    const uint8_t* greedy;
    const int64_t* padding;
    int32_t *paths, *accepted;
    int64_t* chosen;
    int32_t texts, vocab, limit, padding_count, waiting;
};

// Types of numbers in a table of embeddings. rows_of_blocks: the table is where each row lies in a GGUF file, see `Blocks`;
// what it stands for is rounded to bfloat16.
enum Numbers : int32_t { no_numbers, float32_numbers, bfloat16_numbers, float16_numbers, rows_of_blocks };

// One step of n texts: a pass over all layers, whose segments are those of the texts in order, the head, the choice of
// tokens, and their rows kept. last, next: [texts] the token at the root of each tree and its position, which move on, as
// sampling.positions do. sizes: [texts] the nodes of each tree, the root included, of which drafts has the tokens and then the
// parents, [2][texts that there is room for][stride]; where each tree begins, the rows of sampling, positions [rows], depths
// [rows], masks (room for the squares of all trees' rows) and the pass's angles, from tables [positions][head_dim / 2], are
// written, and the hidden states, from a table [vocab][hidden] of `numbers` (and `blocks`), times `scale`, unless there is none.
// Comes out: emitted [rows], from a tree's first row on what its text goes on by, kept [texts] tokens, 0 where Python must look;
// and choices [rows][2], from there on, of each node on the way that has children which of them came, -1 for none, and how many
// there are, of choice_counts [texts] nodes; full, whether the root of any text stands beyond its `ends` now, the last position
// from which there is room for another step; reach, the sum of all positions of roots; and plain, whether each text goes on by one
// token that needs no look.
struct ArrayStep {
    Pass pass;
    Sampling sampling;
    int64_t *last, *next, *positions;
    const int64_t* ends;
    int32_t *depths, *sizes;
    const int64_t* drafts;
    int64_t* emitted;
    int32_t *kept, *choices, *choice_counts;
    uint8_t* masks;
    const void* table;
    const float *cos[2], *sin[2];
    float scale;
    int32_t numbers, blocks, room, stride, full, plain;
    int64_t reach;
};
