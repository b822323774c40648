// The C interface Python calls: choice of instruction set, working memory, packing, measuring.
#include <string.h>
#include <time.h>

#include <algorithm>
#include <new>
#include <vector>

#include "pages.h"
#include "state.h"
#if defined(__x86_64__)
#include <cpuid.h>
#if DECODERY_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace {

#if defined(__x86_64__)
struct Features {
    bool avx2 = false, avx_vnni = false, avx512 = false;
};

// By CPUID and the registers that the system saves: not every compiler's runtime knows them, Zig's for Windows does not.
Features features() {
    Features found;
    unsigned a, b, c, d, saved, high;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c >> 27 & 1) == 0) return found;    // OSXSAVE
    const bool fma = c >> 12 & 1;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if ((saved & 6) != 6 || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
    found.avx2 = fma && (b >> 5 & 1);
    // F, DQ, BW and VL, and VNNI.
    constexpr unsigned needed = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    found.avx512 = (saved & 0xe6) == 0xe6 && (b & needed) == needed && (c >> 11 & 1);
    found.avx_vnni = found.avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1);
    return found;
}
#endif

#if DECODERY_AMX
// Whether there are tiles of bytes, which the system saves and this process may use. It must be asked for them, once; that
// changes nothing for code without tiles.
bool has_tiles() {
    constexpr long request_permission = 0x1023, tile_data = 18;    // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a, b, c, d, low, high;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d >> 24 & 3) != 3) return false;    // AMX-TILE, AMX-INT8
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c >> 27 & 1) == 0) return false;             // OSXSAVE
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low >> 17 & 3) != 3) return false;
    // The first palette: at least 8 tiles of 16 rows of 64 bytes.
    if (__get_cpuid_count(0x1d, 1, &a, &b, &c, &d) == 0 || (b & 0xffff) < 64 || b >> 16 < 8 || (c & 0xffff) < 16) return false;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

#if defined(__aarch64__)
bool has_dot_products() {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__APPLE__)
    return true;
#else
    return false;
#endif
}

bool has_matrix_products() {
#if defined(__linux__)
    return (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#elif defined(__APPLE__)
    int found = 0;
    size_t size = sizeof found;
    return sysctlbyname("hw.optional.arm.FEAT_I8MM", &found, &size, nullptr, 0) == 0 && found != 0;
#else
    return false;
#endif
}
#endif

// Every kernel set this machine can run, the fastest first; the list ends with null.
const Kernels* const* usable() {
    static const Kernels* list[6] = {};
    if (list[0] != nullptr) return list;
    int32_t n = 0;
#if defined(__x86_64__)
    const Features has = features();
    if (has.avx512) {
#if DECODERY_AMX
        if (has_tiles()) list[n++] = &amx_kernels;
#endif
        list[n++] = &avx512_kernels;
    }
#if defined(DECODERY_AVX_VNNI)
    if (has.avx_vnni) list[n++] = &avx2_vnni_kernels;
#endif
    if (has.avx2) list[n++] = &avx2_kernels;
#endif
#if defined(__aarch64__)
    if (has_dot_products() && has_matrix_products()) list[n++] = &arm_i8mm_kernels;
    if (has_dot_products()) list[n++] = &arm_kernels;
#endif
    list[n++] = &portable_kernels;
    return list;
}

const Kernels* chosen = usable()[0];
int32_t all_threads = 1;
// How many of them passes of the calling thread may take, 0 for all: others may run a pass at the same time.
thread_local int32_t allowed = 0;

int32_t usable_threads() { return allowed > 0 && allowed < all_threads ? allowed : all_threads; }

// Working memory of the calling thread, kept from pass to pass.
struct Arena {
    static constexpr std::align_val_t line{64};
    char* memory = nullptr;
    size_t size = 0;
    ~Arena() { operator delete(memory, line); }
    bool reserve(size_t wanted) {
        if (wanted <= size) return true;
        operator delete(memory, line);
        wanted += wanted / 4;
        memory = static_cast<char*>(operator new(wanted, line, std::nothrow));
        size = memory != nullptr ? wanted : 0;
        return memory != nullptr;
    }
};
thread_local Arena arena;

// First run with no memory to learn the size, then with memory to set the pointers.
struct Layout {
    char* base;
    size_t used = 0;

    template <class T>
    void take(T*& pointer, int64_t count) {
        pointer = reinterpret_cast<T*>(base + used);
        used += (size_t(count) * sizeof(T) + 63) / 64 * 64;
    }
    void take(Quantized& a, int64_t rows, int32_t width) {
        a.width = round_up(width, group_size);
        take(a.q, rows * a.width);
        take(a.scale, rows * a.groups());
        take(a.offset, rows * a.groups());
        take(a.sums, rows * a.groups() * 4);
        take(a.halves, rows * a.groups() * 2);
        take(a.leasts, rows * a.supers() * 16);
        take(a.least_step, rows * a.supers());
    }
};

// Slots one row can see; visible tentative rows in all; rows with a mask; slots that rows may see one by one; room to round
// a group in.
struct Sizes {
    int64_t longest = 0, listed = 0, marked = 0, lone = 0, rounded = 0;
    bool policies = false, chooses = false, in_turn = false;
};

// The layer of a cache that a layer reads.
int32_t read_by(const Model& model, int32_t layer) { return model.layers[layer].reads != 0 ? model.layers[layer].reads - 1 : layer; }

int64_t longest(const Model& model, const Pass& pass, const Segment& segment) {
    const int32_t heads = segment.lengths_head == 0 ? 1 : model.kv_heads;
    int64_t most = 0;
    for (int32_t i = 0; i < pass.run_count; ++i)
        for (int32_t head = 0; head < heads; ++head) most = std::max(most, segment.length(read_by(model, pass.run[i]), head));
    return most + segment.stays + segment.rows;
}

bool windows(const Model& model, const Pass& pass) {
    for (int32_t i = 0; i < pass.run_count; ++i)
        if (model.layers[pass.run[i]].window != 0) return true;
    return false;
}

bool gated(const Model& model, const Pass& pass) {
    for (int32_t i = 0; i < pass.run_count; ++i)
        if (model.layers[pass.run[i]].gate.weight != nullptr) return true;
    return false;
}

// How many slots a row of a segment may see one by one.
int32_t lone(const Segment& segment, bool windowed) {
    const bool near = segment.policy != nullptr && segment.policy->widths != nullptr;
    const int32_t own = segment.mask != nullptr || windowed || near ? segment.stays + segment.rows : 0;
    return own + (near ? segment.policy->sinks : 0);
}
// Whether a segment reads for itself what a policy says.
bool alone(const Segment& segment) { return segment.starts != nullptr || segment.policy != nullptr; }

Sizes measure(const Model& model, const Pass& pass) {
    Sizes sizes;
    const bool windowed = windows(model, pass);
    for (int32_t s = 0; s < pass.segment_count; ++s) {
        const Segment& segment = pass.segments[s];
        const int64_t seen = longest(model, pass, segment);
        if (seen > sizes.longest) sizes.longest = seen;
        sizes.lone += int64_t(segment.rows) * lone(segment, windowed);
        sizes.policies |= segment.policy != nullptr;
        sizes.in_turn |= segment.policy != nullptr && segment.policy->held != nullptr;
        if (segment.policy != nullptr) sizes.rounded = std::max(sizes.rounded, sealed_floats(*segment.policy, model.head_dim));
        sizes.chooses |= segment.policy != nullptr && segment.policy->counts != nullptr;
        if (segment.mask == nullptr) continue;
        sizes.marked += segment.rows + 1;
        const int64_t cells = int64_t(segment.rows) * (segment.stays + segment.rows);
        for (int64_t i = 0; i < cells; ++i) sizes.listed += segment.mask[i] != 0;
    }
    return sizes;
}

// What the layers of a pass have in place of attention, where one has.
const Mixer* mixer_of(const Model& model, const Pass& pass) {
    for (int32_t i = 0; i < pass.run_count; ++i)
        if (model.layers[pass.run[i]].mixer != nullptr) return model.layers[pass.run[i]].mixer;
    return nullptr;
}

// The experts of a pass's layers, where one has some; all have as many.
const Experts* experts_of(const Model& model, const Pass& pass) {
    for (int32_t i = 0; i < pass.run_count; ++i)
        if (model.layers[pass.run[i]].experts != nullptr) return model.layers[pass.run[i]].experts;
    return nullptr;
}

// What the layers of a pass keep latents with, where they do; all have the same sizes.
const Layer* latent_of(const Model& model, const Pass& pass) {
    const Layer* first = pass.run_count == 0 ? nullptr : &model.layers[pass.run[0]];
    return first != nullptr && first->latent != nullptr ? first : nullptr;
}

// Numbers that layers read of tokens, all as many.
int32_t inputs_of(const Model& model, const Pass& pass) {
    const TokenInputs* inputs = pass.run_count == 0 ? nullptr : model.layers[pass.run[0]].inputs;
    return inputs == nullptr ? 0 : inputs->gate.out;
}

// Whether layers of a pass have mixers beside attention.
bool mixes_beside(const Model& model, const Pass& pass) {
    for (int32_t i = 0; i < pass.run_count; ++i)
        if (model.layers[pass.run[i]].mix_in.weight != nullptr) return true;
    return false;
}

void arrange_experts(const Experts& experts, State& state, Layout& layout) {
    ExpertRoom& room = state.experts;
    const int64_t rows = state.pass->rows, places = rows * experts.taken;
    const int32_t hidden = state.model->hidden, inner = experts.down->in;
    layout.take(room.said, rows * experts.count);
    layout.take(room.free, rows * experts.count);
    layout.take(room.weights, places);
    layout.take(room.ids, places);
    layout.take(room.begins, experts.count + 1);
    layout.take(room.order, places);
    layout.take(room.places, places);
    layout.take(room.missing, 1);
    layout.take(room.opened, places * 2 * inner);
    layout.take(room.found, places * hidden);
    layout.take(room.in, places, hidden);
    layout.take(room.in.floats, is_floating(experts.gate_up->form) ? places * hidden : 0);
    layout.take(room.inner, places, inner);
    layout.take(room.inner.floats, places * inner);
}

void arrange_mixing(const Mixer& mixer, State& state, Layout& layout) {
    const Pass& pass = *state.pass;
    int64_t held = 0, most = 1;
    for (int32_t s = 0; s < pass.segment_count; ++s) {
        const Segment& segment = pass.segments[s];
        const int32_t tentative = segment.stays + segment.rows;
        held += mixer.kernel - 1 + mix_chunk + tentative;
        if (segment.parents != nullptr) most = std::max<int64_t>(most, tentative);
    }
    layout.take(state.mix.held, held * mixed_width(mixer));
    state.mix.room_stride = mixing_room(mixer, most);
    layout.take(state.mixed, pass.rows, mixed_inner(mixer));
    state.mixed.floats = state.context;
    if (mixer.rule == gated_conv) return;
    layout.take(state.mix.mixed, held * mixed_channels(mixer));
    layout.take(state.mix.steps, held * mixer.heads);
    layout.take(state.mix.left, held * mixed_left(mixer));
    layout.take(state.mix.room, usable_threads() * state.mix.room_stride);
}

// Where it is noted what rows belong together and what they see.
struct Notes {
    Rows* rows;
    Group* groups;
    int32_t *starts, *own, *order, *lists;
};

// Whether threads may share the queries of long texts.
bool divides(const State& state, const Sizes& sizes) {
    return usable_threads() > 1 && sizes.longest >= long_text &&
           int64_t(state.pass->rows) * state.model->heads * state.parts_stride <= most_shared;
}

void arrange(State& state, Layout& layout, const Sizes& sizes, Notes& notes) {
    const Model& model = *state.model;
    const Pass& pass = *state.pass;
    const int64_t n = pass.rows, wide = round_up(model.head_dim, 16);
    const int32_t heads = model.heads * model.head_dim;
    layout.take(notes.rows, pass.segment_count);
    layout.take(notes.groups, pass.segment_count);
    layout.take(notes.order, pass.segment_count);
    layout.take(notes.starts, sizes.marked);
    layout.take(notes.own, sizes.listed);
    layout.take(notes.lists, sizes.lone);
    layout.take(state.seen, n);
    layout.take(state.firsts, sizes.policies ? n : 0);
    layout.take(state.chosen, sizes.chooses || sizes.in_turn ? n * model.kv_heads : 0);
    state.longest = sizes.longest;
    state.chooses = sizes.chooses;
    state.in_turn = sizes.in_turn;
    state.aside_stride = sizes.policies ? std::max(aside_floats(model, sizes.longest), (sizes.rounded + 15) / 16 * 16) : 0;
    layout.take(state.aside, usable_threads() * state.aside_stride);
    const Mixer* mixer = mixer_of(model, pass);
    const Layer* latent = latent_of(model, pass);
    const int32_t found = latent == nullptr ? heads : std::max(heads, latent->output.in), up = latent == nullptr ? 0 : latent->latent->up.in;
    const int32_t projected = latent == nullptr ? heads + 2 * model.kv_heads * model.head_dim : latent->qkv.out;
    layout.take(state.qkv, n * std::max(projected, mixer == nullptr ? 0 : mixed_row(*mixer)));
    layout.take(state.ups, up == 0 ? 0 : n * latent->latent->up.out);
    layout.take(state.raised, n, up);
    layout.take(state.raised.floats, n * up);
    layout.take(state.given, n, inputs_of(model, pass));
    layout.take(state.given.floats, n * inputs_of(model, pass));
    layout.take(state.values, latent == nullptr ? 0 : n * latent->output.in);
    layout.take(state.queries, n * model.heads * wide);
    layout.take(state.context, n * std::max(found, mixer == nullptr ? 0 : mixed_inner(*mixer)));
    layout.take(state.gates, gated(model, pass) ? n * heads : 0);
    if (mixer != nullptr) arrange_mixing(*mixer, state, layout);
    if (const Experts* experts = experts_of(model, pass)) arrange_experts(*experts, state, layout);
    layout.take(state.branch, n * model.hidden);
    layout.take(state.beside, mixes_beside(model, pass) || model.streams != nullptr ? n * model.hidden : 0);
    layout.take(state.streams, model.streams == nullptr ? 0 : n * model.streams->count * model.hidden);
    const int32_t learned = model.streams == nullptr || pass.run_count == 0 ? 0 : model.layers[pass.run[0]].streams->in.out;
    layout.take(state.learned, n, learned);
    layout.take(state.learned.floats, n * learned);
    layout.take(state.act, n * model.intermediate);
    layout.take(state.gates_up, model.streams == nullptr ? 0 : n * model.intermediate);
    layout.take(state.narrow, n, model.hidden);
    layout.take(state.wide, n, found);
    layout.take(state.inner, n, model.intermediate);
    layout.take(state.narrow.floats, n * model.hidden);
    state.wide.floats = state.context;
    state.inner.floats = state.act;
    // See Runner::gather and Runner::read_first.
    const int64_t attention = (most_queries + 1) * (2 * key_chunk + 2 * page_slots + weight_bytes / 2 + 4 * wide);
    const int64_t normed = round_up(model.hidden > 2 * wide ? model.hidden : 2 * wide, 16);
    state.scratch_stride = attention > normed ? attention : normed;
    layout.take(state.scratch, usable_threads() * state.scratch_stride);
    state.parts_stride = (sizes.longest + key_chunk - 1) / key_chunk * (wide + 16);
    if (divides(state, sizes)) layout.take(state.parts, n * model.heads * state.parts_stride);
}

// How many of the first slots of two segments are the same memory in all layers and heads of a pass.
int32_t in_common(const Model& model, const Pass& pass, const Segment& a, const Segment& b) {
    if (a.base != b.base || a.page_bytes != b.page_bytes) return 0;
    const int64_t seen = std::min(longest(model, pass, a), longest(model, pass, b));
    int32_t common = int32_t(std::min<int64_t>((seen + page_slots - 1) / page_slots, std::min(a.table_pages, b.table_pages)));
    for (int32_t i = 0; i < pass.run_count && common > 0; ++i)
        for (int32_t head = 0; head < model.kv_heads; ++head) {
            const int32_t layer = read_by(model, pass.run[i]), *x = a.table(layer, head), *y = b.table(layer, head);
            common = int32_t(std::mismatch(x, x + common, y).first - x);
        }
    return common * page_slots;
}

// Puts segments that begin with the same memory into one group; returns how many groups there are.
int32_t group_segments(const Model& model, const Pass& pass, const Notes& notes) {
    int32_t* order = notes.order;
    // Layers with a window may have given back the first page.
    int32_t layer = pass.run[0];
    for (int32_t i = 0; i < pass.run_count && model.layers[layer].window != 0; ++i) layer = pass.run[i];
    const auto begin = [&](int32_t s) {
        const Segment& segment = pass.segments[s];
        return segment.base + *segment.table(read_by(model, layer), 0) * segment.page_bytes;
    };
    for (int32_t s = 0; s < pass.segment_count; ++s) order[s] = s;
    std::stable_sort(order, order + pass.segment_count, [&](int32_t a, int32_t b) { return begin(a) < begin(b); });
    int32_t groups = 0;
    for (int32_t i = 0; i < pass.segment_count; ++i) {
        const Segment& segment = pass.segments[order[i]];
        Group* last = notes.groups + groups - 1;
        // What a policy picks is read by each text for itself.
        const Segment* first = groups == 0 || alone(segment) ? nullptr : &pass.segments[order[last->first]];
        const int32_t common = first == nullptr || alone(*first) ? 0 : in_common(model, pass, *first, segment);
        if (common == 0) *++last = {i, i, INT32_MAX, 0, 0, false}, ++groups;
        else if (common < last->common) last->common = common;
        const int64_t seen = longest(model, pass, segment);
        last->last = i + 1;
        last->rows += segment.rows;
        last->longest = seen > last->longest ? seen : last->longest;
    }
    return groups;
}

// Fills in what `arrange` made room for.
void note(State& state, const Sizes& sizes, const Notes& notes) {
    const Pass& pass = *state.pass;
    const bool windowed = windows(*state.model, pass);
    int32_t first = 0, listed = 0;
    int32_t *starts = notes.starts, *own = notes.own, *lists = notes.lists;
    for (int32_t s = 0; s < pass.segment_count; ++s) {
        const Segment& segment = pass.segments[s];
        const int32_t apart = lone(segment, windowed);
        notes.rows[s] = {first, segment.mask != nullptr ? starts : nullptr, own, lists, apart};
        first += segment.rows;
        lists += int64_t(segment.rows) * apart;
        if (segment.mask == nullptr) continue;
        for (int32_t row = 0; row < segment.rows; ++row) {
            *starts++ = listed;
            const int32_t others = segment.stays + segment.rows;
            const uint8_t* sees = segment.mask + int64_t(row) * others;
            for (int32_t other = 0; other < others; ++other)
                if (sees[other] != 0) own[listed++] = other;
        }
        *starts++ = listed;
    }
    state.rows = notes.rows;
    state.order = notes.order;
    state.groups = notes.groups;
    state.group_count = group_segments(*state.model, pass, notes);
    const Model& model = *state.model;
    int32_t kv_heads = model.kv_heads;
    for (int32_t i = 0; i < pass.run_count; ++i)
        if (const int32_t own = model.layers[pass.run[i]].kv_heads) kv_heads = std::min(kv_heads, own);
    const bool few = divides(state, sizes) && kv_heads * state.group_count < 4 * usable_threads();
    for (int32_t i = 0; i < state.group_count; ++i) {
        Group& group = notes.groups[i];
        // What a policy picks has no order that chunks could follow.
        group.divided = few && group.longest >= long_text && group.rows * (model.heads / kv_heads) < few_queries &&
                        !alone(pass.segments[notes.order[group.first]]);
        state.divided += group.divided;
    }
}

}  // namespace

// Size of the i-th struct of abi.h, after the last the number of forms, their layout, and then 0: callers compare them with their
// own before the first pass.
EXPORT int32_t decodery_size(int32_t i) {
    constexpr size_t sizes[] = {sizeof(Linear), sizeof(Layer), sizeof(Model), sizeof(PageRows), sizeof(Policy), sizeof(Segment), sizeof(Pass),
                                sizeof(Draft), sizeof(Guess), sizeof(Mixer), sizeof(Mixed), sizeof(Expected),
                                sizeof(Proposed), sizeof(Drafting), sizeof(Happened), sizeof(Processor), sizeof(Sampling),
                                sizeof(ArrayStep), sizeof(Prices), sizeof(Experts), sizeof(Latent),
                                sizeof(TokenInputs), sizeof(Streams), sizeof(StreamLayer), sizeof(SealedGroups), sizeof(Lost), mxfp4s + 1, form_layout};
    return i >= 0 && size_t(i) < sizeof sizes / sizeof *sizes ? int32_t(sizes[i]) : 0;
}
// Name of the i-th usable kernel set, null past the last.
EXPORT const char* decodery_kernels(int32_t i) {
    for (int32_t n = 0; usable()[n] != nullptr; ++n)
        if (n == i) return usable()[n]->name;
    return nullptr;
}
// Rows of pages to memory, and back; whole pages [count] to others.
EXPORT void decodery_read_rows(const PageRows* rows) { read_page_rows(*rows); }
EXPORT void decodery_write_rows(const PageRows* rows) { write_page_rows(*rows); }
EXPORT void decodery_copy_pages(char* base, int64_t page_bytes, const int32_t* from, const int32_t* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        memcpy(base + to[i] * page_bytes, base + from[i] * page_bytes, size_t(page_bytes));
}
EXPORT void decodery_lose_slots(const Lost* lost) { lose_slots(*lost); }
EXPORT void decodery_choose(int32_t i) { chosen = usable()[i]; }
EXPORT void decodery_threads(int32_t n) { all_threads = n < 1 ? 1 : n; }
EXPORT void decodery_allow(int32_t n) { allowed = n; }

// Lays weight [.][in] out as `Linear` says; rows[i]: which of its rows output i is, -1 for none.
EXPORT void decodery_pack(const int8_t* weight, int32_t in, const int32_t* rows, int32_t out, uint8_t* packed) {
    const int32_t width = round_up(in, group_size);
    for (int32_t o = 0; o < out; ++o) {
        const int8_t* from = weight + int64_t(rows[o]) * in;
        uint8_t* panel = packed + int64_t(o / panel_width) * panel_width * width + (o % panel_width) * 4;
        for (int32_t k = 0; k < width; ++k)
            panel[k / 4 * panel_width * 4 + k % 4] = rows[o] >= 0 && k < in ? uint8_t(from[k]) ^ 0x80 : 0x80;
    }
}

// The same for rows2: weight [.][in / 4], four numbers of two bits a byte, the first lowest.
EXPORT void decodery_pack_ternary(const uint8_t* weight, int32_t in, const int32_t* rows, int32_t out, uint8_t* packed) {
    const int64_t panel = panel_bytes(rows2, in);
    memset(packed, 0, size_t(out / panel_width * panel));
    for (int32_t o = 0; o < out; ++o) {
        if (rows[o] < 0) continue;
        const uint8_t* from = weight + int64_t(rows[o]) * (in / 4);
        uint8_t* to = packed + o / panel_width * panel + o % 16 * 4;
        const int32_t half = o % panel_width / 16;
        for (int32_t k = 0; k < in; ++k)
            to[k / 8 * 64 + k % 4] |= uint8_t((from[k / 4] >> (k % 4 * 2) & 3) << (k / 4 % 2 * 4 + half * 2));
    }
}

// The numbers of block b of a row of weights [in * bits / 8]: the lowest four bits of all numbers, two inputs a byte, and
// then the others, eight or four inputs a byte, or of 8 bits whole bytes.
static void put_numbers(int32_t bits, const uint8_t* from, int32_t in, int32_t b, int32_t lane, uint8_t* numbers) {
    const uint8_t* above = from + in / 2;
    const int32_t half = lane / 16;
    uint8_t* others = numbers + 512;
    for (int32_t k = 0; k < block_size; ++k) {
        const int32_t i = b * block_size + k, at = lane % 16 * 4 + k % 4, vector = k / 4 * 2 + half;
        if (bits == 8) {
            numbers[vector * 64 + at] = from[i];
            continue;
        }
        numbers[k / 4 * 64 + at] |= uint8_t((from[i / 2] >> (i % 2 * 4) & 15) << (half * 4));
        if (bits == 5) others[vector * 8 + at / 8] |= uint8_t((above[i / 8] >> (i % 8) & 1) << (at % 8));
        if (bits == 6) others[vector / 4 * 64 + at] |= uint8_t((above[i / 4] >> (i % 4 * 2) & 3) << (vector % 4 * 2));
    }
}

// The same for blocks: weight as `put_numbers` has it; scales [.][in / 32][2] halves, one of blocks8; of mxfp4s a byte.
EXPORT void decodery_pack_blocks(Form form, const uint8_t* weight, const uint8_t* scales, int32_t in, const int32_t* rows,
                                 int32_t out, uint8_t* packed) {
    const int32_t blocks = round_up(in, group_size) / block_size, known = in / block_size, bits = bits_of(form);
    const int32_t each = steps_bytes(form) / panel_width;
    memset(packed, 0, size_t(out / panel_width) * panel_bytes(form, in));
    for (int32_t o = 0; o < out; ++o) {
        if (rows[o] < 0) continue;
        const int32_t lane = o % panel_width;
        const uint8_t* from = weight + int64_t(rows[o]) * in / 8 * bits;
        for (int32_t b = 0; b < known; ++b) {
            uint8_t* group = packed + (int64_t(o / panel_width) * blocks + b / 2 * 2) * block_bytes(form);
            uint8_t* to = group + scales_at(form, b % 2);
            const uint8_t* own = scales + (int64_t(rows[o]) * known + b) * each;
            if (form == mxfp4s) to[lane] = *own;
            for (int32_t side = 0; side < each / 2; ++side) memcpy(to + (side * panel_width + lane) * 2, own + 2 * side, 2);
            put_numbers(bits, from, in, b, lane, group + numbers_at(form, b % 2));
        }
    }
}

template <Form form>
static void pack_supers(const uint8_t* weight, const uint16_t* scales, const uint8_t* integers, int32_t in, const int32_t* rows, int32_t out, uint8_t* packed) {
    constexpr int32_t bits = bits_of(form), sides = has_least(form) ? 2 : 1;
    const int32_t supers = in / super_size;
    memset(packed, 0, size_t(out / panel_width) * panel_bytes(form, in));
    for (int32_t o = 0; o < out; ++o) {
        if (rows[o] < 0) continue;
        const int32_t lane = o % panel_width;
        for (int32_t s = 0; s < supers; ++s) {
            uint8_t* to = packed + (int64_t(o / panel_width) * supers + s) * super_bytes(form);
            const int64_t super = int64_t(rows[o]) * supers + s;
            for (int32_t side = 0; side < sides; ++side) memcpy(to + (side * panel_width + lane) * 2, scales + super * sides + side, 2);
            for (int32_t j = 0; j < 8; ++j) {
                put_scales<form>(to, lane, j, integers[(super * 8 + j) * 2], integers[(super * 8 + j) * 2 + 1]);
                put_numbers(bits, weight + int64_t(rows[o]) * in / 8 * bits, in, 8 * s + j, lane, to + super_numbers(form) + j * number_bytes(form));
            }
        }
    }
}

// The same for super-blocks: scales [.][in / 256][2, or 1 without least values] halves, integers [.][in / 32][2] bytes.
EXPORT void decodery_pack_supers(Form form, const uint8_t* weight, const uint16_t* scales, const uint8_t* integers, int32_t in,
                                 const int32_t* rows, int32_t out, uint8_t* packed) {
    switch (form) {
        case super4: return pack_supers<super4>(weight, scales, integers, in, rows, out, packed);
        case super_table4: return pack_supers<super_table4>(weight, scales, integers, in, rows, out, packed);
        case super5: return pack_supers<super5>(weight, scales, integers, in, rows, out, packed);
        default: return pack_supers<super6>(weight, scales, integers, in, rows, out, packed);
    }
}

// The same for rows of blocks where they lie in a GGUF file, see `Blocks`: rows [out], null for padding. Returns 0, or 1
// for an unknown kind. panel_bytes: of a panel. Threads take panels.
EXPORT int32_t decodery_pack_rows(int32_t kind, const uint8_t* const* rows, int32_t in, int32_t out, int64_t panel_bytes,
                                  uint8_t* packed) {
    struct Panels {
        int32_t kind, in, out;
        const uint8_t* const* rows;
        int64_t bytes;
        uint8_t* packed;
        bool known;
    } all = {kind, in, out, rows, panel_bytes, packed, true};
    const auto job = [](void* context, int32_t thread, Team& team) {
        Panels& all = *static_cast<Panels*>(context);
        const Range mine = share(all.out / 32, thread, team.threads);
        if (mine.begin == mine.end) return;
        uint8_t* to = all.packed + mine.begin * all.bytes;
        const int32_t count = (mine.end - mine.begin) * 32;
        if (!chosen->pack(all.kind, all.rows + mine.begin * 32, all.in, count, to)) __atomic_store_n(&all.known, false, __ATOMIC_RELAXED);
    };
    run_parallel(usable_threads(), job, &all);
    return all.known ? 0 : 1;
}
// What rows of blocks stand for: [count][in] floats.
EXPORT int32_t decodery_expand_rows(int32_t kind, const uint8_t* const* rows, int32_t count, int32_t in, float* to) {
    return chosen->expand(kind, rows, count, in, to) ? 0 : 1;
}

// The same for weights [.][in] of 16 bits.
EXPORT void decodery_pack16(Form form, const uint16_t* weight, int32_t in, const int32_t* rows, int32_t out,
                            uint16_t* packed) {
    for (int32_t o = 0; o < out; ++o) {
        const int32_t lane = o % panel_width, place = form == float16s ? lane : lane % 16 * 2 + lane / 16;
        uint16_t* to = packed + int64_t(o / panel_width) * panel_width * in + place;
        const uint16_t* from = weight + int64_t(rows[o]) * in;
        for (int32_t k = 0; k < in; ++k) to[int64_t(k) * panel_width] = rows[o] >= 0 ? from[k] : 0;
    }
}

// The same for E4M3 weights [.][in] and scales [.][groups of 128 inputs].
EXPORT void decodery_pack8(const uint8_t* weight, const float* scales, int32_t in, const int32_t* rows, int32_t out, uint8_t* packed) {
    const int32_t groups = round_up(in, float8_group) / float8_group;
    memset(packed, 0, size_t(out / panel_width) * panel_bytes(float8, in));
    for (int32_t o = 0; o < out; ++o) {
        if (rows[o] < 0) continue;
        uint8_t* panel = packed + int64_t(o / panel_width) * groups * float8_bytes;
        const int32_t lane = o % panel_width;
        for (int32_t g = 0; g < groups; ++g) {
            const float scale = 256.0f * scales[int64_t(rows[o]) * groups + g];
            memcpy(panel + int64_t(g) * float8_bytes + 4 * lane, &scale, 4);
        }
        for (int32_t k = 0; k < in; ++k)
            panel[int64_t(k / float8_group) * float8_bytes + (4 + k % float8_group) * panel_width + lane] = weight[int64_t(rows[o]) * in + k];
    }
}

// The same for codes [.][in / 2], the even input in the low half, scales [.][groups of 64 inputs], and a table of 16.
EXPORT void decodery_pack_codes(const uint8_t* weight, const float* scales, const float* table, int32_t in, const int32_t* rows, int32_t out, uint8_t* packed) {
    const int32_t groups = round_up(in, codes4_group) / codes4_group;
    const int64_t size = panel_bytes(codes4, in);
    memset(packed, 0, size_t(out / panel_width) * size);
    for (int32_t o = 0; o < out; ++o) {
        uint8_t* panel = packed + o / panel_width * size;
        const int32_t lane = o % panel_width;
        if (lane == 0) memcpy(panel, table, codes4_table);
        if (rows[o] < 0) continue;
        panel += codes4_table;
        for (int32_t g = 0; g < groups; ++g) memcpy(panel + int64_t(g) * codes4_bytes + 4 * lane, scales + int64_t(rows[o]) * groups + g, 4);
        const uint8_t* from = weight + int64_t(rows[o]) * in / 2;
        for (int32_t k = 0; k < in; ++k) {
            uint8_t* to = panel + int64_t(k / codes4_group) * codes4_bytes + 4 * panel_width + k % codes4_group * 16 + lane % 16;
            *to = uint8_t(*to | (from[k / 2] >> (k % 2 * 4) & 15) << (lane / 16 * 4));
        }
    }
}

// Bytes of working memory that a pass needs.
EXPORT int64_t decodery_room(const Model* model, const Pass* pass) {
    State state = {};
    state.model = model;
    state.pass = pass;
    Notes notes;
    Layout size{nullptr};
    arrange(state, size, measure(*model, *pass), notes);
    return int64_t(size.used);
}

// Runs a pass to its end or its next stop. Returns 0, or 1 when there is no memory. ticks: [stages] or null.
EXPORT int32_t decodery_layers(const Model* model, Pass* pass, int64_t* ticks) {
    State state = {};
    state.tiles = chosen->tiles;
    state.model = model;
    state.pass = pass;
    state.ticks = ticks;
    const Sizes sizes = measure(*model, *pass);
    Notes notes;
    char* memory = pass->memory;
    if (memory == nullptr) {
        if (!arena.reserve(size_t(decodery_room(model, pass)))) return 1;
        memory = arena.memory;
    }
    Layout layout{memory};
    arrange(state, layout, sizes, notes);
    note(state, sizes, notes);
    pass->queries = state.queries;
    pass->context = state.context;
    pass->branch = state.branch;
    pass->free = state.experts.free;
    // The threads read where they begin while one of them writes where they end.
    int32_t next = 0, stopped = 0;
    state.next = &next;
    state.stopped = &stopped;
    run_parallel(usable_threads(), chosen->layers, &state);
    pass->next = next;
    pass->stopped = stopped;
    return 0;
}

// Runs a draft head. Returns 0, 1 when there is no memory, or 2 where an output is not a number and k is not 0.
EXPORT int32_t decodery_draft(const Draft* draft, const Guess* guess) {
    const Model& model = draft->model;
    Pass pass = guess->pass;
    State state = {};
    state.tiles = chosen->tiles;
    int32_t strange = 0;
    state.model = &model;
    state.pass = &pass;
    state.draft = draft;
    state.guess = guess;
    state.strange = &strange;
    const int64_t n = pass.rows, half = model.head_dim / 2;
    const Sizes sizes = measure(model, pass);
    Notes notes;
    float *cos, *sin;
    Layout layout{nullptr};
    for (int32_t attempt = 0; attempt < 2; ++attempt) {
        layout = Layout{arena.memory};
        arrange(state, layout, sizes, notes);
        layout.take(pass.hidden, n * model.hidden);
        layout.take(cos, n * half);
        layout.take(sin, n * half);
        layout.take(state.entering, n, draft->taps * model.hidden);
        layout.take(state.entering.floats, n * draft->taps * model.hidden);
        layout.take(state.paired, n, 2 * model.hidden);
        layout.take(state.paired.floats, n * 2 * model.hidden);
        if (!arena.reserve(layout.used)) return 1;
    }
    note(state, sizes, notes);
    for (int64_t row = 0, s = 0; s < pass.segment_count; ++s)
        for (int64_t own = 0; own < pass.segments[s].rows; ++own, ++row) {
            const int64_t position = pass.segments[s].positions[own];
            memcpy(cos + row * half, guess->cos + position * half, size_t(half) * sizeof(float));
            memcpy(sin + row * half, guess->sin + position * half, size_t(half) * sizeof(float));
        }
    pass.cos[0] = cos;
    pass.sin[0] = sin;
    run_parallel(usable_threads(), chosen->draft, &state);
    return strange != 0 ? 2 : 0;
}

static int32_t run_one(Job job, const Model& model, const float* x, int32_t rows, float* y) {
    Pass pass = {};
    pass.hidden = const_cast<float*>(x);
    pass.rows = rows;
    State state = {};
    state.tiles = chosen->tiles;
    state.model = &model;
    state.pass = &pass;
    state.logits = y;
    state.scratch_stride = round_up(model.hidden, 16);
    Layout layout{nullptr};
    for (int32_t attempt = 0; attempt < 2; ++attempt) {
        layout = Layout{arena.memory};
        layout.take(state.narrow, rows, model.hidden);
        layout.take(state.narrow.floats, int64_t(rows) * model.hidden);
        layout.take(state.scratch, usable_threads() * state.scratch_stride);
        if (!arena.reserve(layout.used)) return 1;
    }
    run_parallel(usable_threads(), job, &state);
    return 0;
}

// Final norm: [rows][hidden] -> [rows][hidden].
EXPORT int32_t decodery_norm(const Model* model, const float* hidden, int32_t rows, float* normed) {
    return run_one(chosen->norm, *model, hidden, rows, normed);
}

// Final norm and head: [rows][hidden] -> logits [rows][vocab].
EXPORT int32_t decodery_head(const Model* model, const float* hidden, int32_t rows, float* logits) {
    return run_one(chosen->head, *model, hidden, rows, logits);
}

// One linear layer: x [rows][in] -> y [rows][out].
EXPORT int32_t decodery_linear(const Linear* linear, const float* x, int32_t rows, float* y) {
    Model model = {};
    model.head = *linear;
    model.hidden = linear->in;
    return run_one(chosen->linear, model, x, rows, y);
}

// Rows through the mixer of a layer with a state. Returns 0, or 1 when there is no memory.
EXPORT int32_t decodery_mix(const Mixer* mixer, const Mixed* rows) {
    Mixing mixing = {};
    mixing.mixer = mixer;
    mixing.rows = rows;
    mixing.channels = mixed_channels(*mixer);
    mixing.room_stride = mixing_room(*mixer, rows->parents != nullptr ? rows->rows : 1);
    Layout layout{nullptr};
    for (int32_t attempt = 0; attempt < 2; ++attempt) {
        layout = Layout{arena.memory};
        layout.take(mixing.mixed, int64_t(rows->rows) * mixing.channels);
        layout.take(mixing.steps, int64_t(rows->rows) * mixer->heads);
        layout.take(mixing.left, int64_t(rows->rows) * mixed_left(*mixer));
        layout.take(mixing.room, usable_threads() * mixing.room_stride);
        if (!arena.reserve(layout.used)) return 1;
    }
    run_parallel(usable_threads(), chosen->mix, &mixing);
    return 0;
}

// The k largest of each of `rows` rows [n], see topk.h: ids and values [rows][k]. Returns 0, or 1 where one is not a
// number.
EXPORT int32_t decodery_topk(const float* x, int32_t rows, int32_t n, int32_t k, int32_t* ids, float* values) {
    for (int64_t row = 0; row < rows; ++row)
        if (!chosen->topk(x + row * n, n, k, ids + row * k, values + row * k)) return 1;
    return 0;
}

constexpr int64_t parallel_values = 1 << 19;    // waking threads takes longer than the few rows of one text

// The same of rows anywhere, without values; strange [count]: where one is not a number. Threads take rows.
void topk_of_rows(const float* const* rows, int32_t count, int32_t n, int32_t k, int32_t* ids, bool* strange) {
    struct Rows {
        const float* const* rows;
        int32_t count, n, k;
        int32_t* ids;
        bool* strange;
    } all = {rows, count, n, k, ids, strange};
    const auto job = [](void* context, int32_t thread, Team& team) {
        const Rows& all = *static_cast<const Rows*>(context);
        std::vector<float> values(all.k);
        const Range mine = share(all.count, thread, team.threads);
        for (int64_t row = mine.begin; row < mine.end; ++row)
            all.strange[row] = !chosen->topk(all.rows[row], all.n, all.k, all.ids + row * all.k, values.data());
    };
    run_parallel(int64_t(count) * n < parallel_values ? 1 : usable_threads(), job, &all);
}

// The same with what a softmax over all of the row makes of the values.
EXPORT int32_t decodery_most_likely(const float* x, int32_t rows, int32_t n, int32_t k, int32_t* ids, float* chances) {
    if (decodery_topk(x, rows, n, k, ids, chances) != 0) return 1;
    for (int64_t row = 0; row < rows; ++row) chosen->chances(x + row * n, n, k, chances + row * k);
    return 0;
}

// Of a row [n] the log-probability of a token and the entropy, in nats, into found [2], see topk.h. Returns 0, or 1
// where one is not a number.
EXPORT int32_t decodery_softmax_sums(const float* row, int32_t n, int32_t token, double* found) {
    if (!chosen->sums(row, n, found)) return 1;
    found[0] = double(row[token]) - found[0];
    return 0;
}

// See race.h: which of row [n] may be the largest once noise is added, into ids [room]. Returns how many, or -1.
EXPORT int32_t decodery_race(const float* row, int32_t n, uint64_t key, int32_t room, int32_t* ids) {
    return chosen->race(row, n, key, room, ids);
}

// The tokens that texts choose, see `Sampling`. Returns 0, or 1 when there is no memory.
EXPORT int32_t decodery_sample(const Sampling* sampling) {
    const int32_t threads = usable_threads() < sampling->texts ? usable_threads() : sampling->texts;
    Choosing choosing = {sampling, nullptr, choosing_bytes(sampling->vocab)};
    if (!arena.reserve(size_t(threads * choosing.room_bytes))) return 1;
    choosing.room = arena.memory;
    run_parallel(threads, chosen->sample, &choosing);
    return 0;
}

// Seconds to read `bytes` of a buffer once with all threads.
EXPORT double decodery_read(const void* buffer, int64_t bytes) {
    Model model = {};
    model.hidden = int32_t(bytes / 64);
    Pass pass = {};
    pass.hidden = static_cast<float*>(const_cast<void*>(buffer));
    State state = {};
    state.model = &model;
    state.pass = &pass;
    if (!arena.reserve(size_t(usable_threads()) * 64)) return 0.0;
    state.logits = reinterpret_cast<float*>(arena.memory);
    timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    run_parallel(usable_threads(), chosen->read, &state);
    clock_gettime(CLOCK_MONOTONIC, &end);
    return double(end.tv_sec - begin.tv_sec) + 1e-9 * double(end.tv_nsec - begin.tv_nsec);
}
