// Many rows times a panel by AMX: its tiles take 16 rows, 64 inputs and 16 outputs in one instruction. What is not a product
// of integers is done as in gemm.h and in its order, so that the bits are the same. Included by gemm.h.
//
// Numbers are unpacked once for many rows, into bytes [inputs / 4][2][16][4] that are what the weights stand for.

constexpr int32_t amx_height = 16;     // rows that are multiplied together
constexpr int32_t amx_inputs = 768;    // of a panel that are unpacked at a time, at most
constexpr int32_t amx_rows = 128;      // whose sums wait meanwhile, at most

// Tiles 0 to 3 have sums, 4 and 5 rows, 6 and 7 weights.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    explicit TileShapes(int32_t inputs) {
        for (int32_t i = 0; i < 8; ++i) {
            bytes[i] = uint16_t(i == 4 || i == 5 ? inputs : 64);
            rows[i] = uint8_t(i < 6 ? amx_height : inputs / 4);
        }
    }
};
// If `any`, the calling thread has tiles as long as this lives, and none afterwards, as other code expects.
struct Tiles {
    const bool any;

    Tiles(bool any_, const TileShapes& shapes) : any(any_) {
        if (any) __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
    }
    ~Tiles() {
        if (any) __asm__ volatile("tilerelease");
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};
// Written out because the compilers' own functions do not say that memory is read and written.
template <int i>
INLINE void load_tiles(const int8_t* rows, int64_t stride, const int8_t* weights) {
    const int64_t wide = 4 * panel_width;
    if constexpr (i == 0) __asm__ volatile("tileloadd (%0,%1,1), %%tmm4\n\ttileloadd (%2,%3,1), %%tmm6" ::"r"(rows), "r"(stride), "r"(weights), "r"(wide) : "memory");
    else __asm__ volatile("tileloadd (%0,%1,1), %%tmm5\n\ttileloadd (%2,%3,1), %%tmm7" ::"r"(rows), "r"(stride), "r"(weights), "r"(wide) : "memory");
}
// Tile i has the sums of products of the rows and weights that were loaded into those of i % 2.
template <int i>
INLINE void multiply_tiles() {
    if constexpr (i == 0) __asm__ volatile("tilezero %tmm0\n\ttdpbssd %tmm6, %tmm4, %tmm0");
    if constexpr (i == 1) __asm__ volatile("tilezero %tmm1\n\ttdpbssd %tmm7, %tmm5, %tmm1");
    if constexpr (i == 2) __asm__ volatile("tilezero %tmm2\n\ttdpbssd %tmm6, %tmm4, %tmm2");
    if constexpr (i == 3) __asm__ volatile("tilezero %tmm3\n\ttdpbssd %tmm7, %tmm5, %tmm3");
}
template <int i>
INLINE void store_tile(int32_t* to) {
    const int64_t stride = 64;
    if constexpr (i == 0) __asm__ volatile("tilestored %%tmm0, (%0,%1,1)" ::"r"(to), "r"(stride) : "memory");
    if constexpr (i == 1) __asm__ volatile("tilestored %%tmm1, (%0,%1,1)" ::"r"(to), "r"(stride) : "memory");
    if constexpr (i == 2) __asm__ volatile("tilestored %%tmm2, (%0,%1,1)" ::"r"(to), "r"(stride) : "memory");
    if constexpr (i == 3) __asm__ volatile("tilestored %%tmm3, (%0,%1,1)" ::"r"(to), "r"(stride) : "memory");
}

// Inputs that are summed in integers before a scale comes, and how many such parts a group of 64 has.
constexpr int32_t summed_inputs(Form form) {
    return form == rows8 || form == rows2 ? group_size : block_size / halves_of(form);
}
template <Form form>
constexpr int32_t parts_of = group_size / summed_inputs(form);
// Bytes of a panel's `inputs`, which are whole groups, or super-blocks.
constexpr int32_t packed_bytes(Form form, int32_t inputs) {
    if (is_super(form)) return inputs / super_size * super_bytes(form);
    if (form == rows8 || form == rows2) return inputs / group_size * (form == rows8 ? group_size * panel_width : ternary_bytes);
    return inputs / block_size * block_bytes(form);
}

// What the numbers stand for that `numbers` gives.
template <Form form>
INLINE Bytes signed_bytes(Bytes x) {
    if constexpr (form == rows2) return _mm512_sub_epi8(x, _mm512_set1_epi8(1));
    else if constexpr (form == blocks6) return _mm512_sub_epi8(x, _mm512_set1_epi8(32));
    else if constexpr (is_e2m1(form)) return _mm512_sub_epi8(x, _mm512_set1_epi8(e2m1_zero));
    else if constexpr (has_least(form)) return x;
    else return _mm512_xor_si512(x, _mm512_set1_epi8(-128));
}
// So many inputs of a panel, which begin at w.
template <Form form>
static void unpack_numbers(const uint8_t* w, int32_t inputs, int8_t* to) {
    constexpr Form base = base_of(form);
    constexpr int32_t unit = inputs_of(base);
    for (int32_t k = 0; k < inputs; k += unit, to += unit * panel_width) {
        const uint8_t* p = w + packed_bytes(form, k / group_size * group_size);
        if (is_super(form)) p += super_numbers(form) + k % super_size / block_size * number_bytes(form);
        else if (base != rows8 && base != rows2) p += numbers_at(form, k / block_size % 2);
        for (int32_t step = 0; step < unit / 4; step += 4)
            each<8>([&](auto i) ALWAYS_INLINE {
                const Bytes found = numbers<base>(p, step + i / 2, i % 2);
                _mm512_store_si512(to + 128 * step + 64 * i, signed_bytes<base>(found));
            });
    }
}

// Weights are asked for by every group of every block of rows, a few lines at a time.
struct Asked {
    const uint8_t* next;
    int32_t lines;

    void ask() {
        for (int32_t i = 0; i < lines; ++i) __builtin_prefetch(next + 64 * i, 0, 2);
        next += 64 * lines;
    }
};

// Groups of inputs, packed and unpacked, of 16 outputs of a panel: the first ones or the others.
struct Inputs {
    const uint8_t* packed;
    const int8_t* numbers;
    int32_t first, groups, half;
};

// For each group g of the inputs: then(g, found), where found(part) are the sums [16][16] of one of its parts in integers.
template <int parts, class Then>
INLINE void each_group(const Inputs& inputs, const Quantized& a, int32_t row, Asked& asked, const Then& then) {
    constexpr int32_t depth = group_size / parts, turns = 4 / parts;
    // So many products later a tile is stored, and so many groups later all of a group are: the next ones are made meanwhile.
    constexpr int32_t lag = 3, behind = (lag + parts - 1) / parts;
    const int8_t *q = a.q + int64_t(row) * a.width + inputs.first * group_size, *w = inputs.numbers + 64 * inputs.half;
    alignas(64) int32_t room[8][amx_height * 16];
    for (int32_t i = 0; i < inputs.groups + behind; i += turns)
        each<turns>([&](auto turn) ALWAYS_INLINE {
            const int32_t g = i + turn;
            each<parts>([&](auto part) ALWAYS_INLINE {
                constexpr int32_t tile = turn * parts + part;
                const int32_t k = g * group_size + part * depth, stored = g * parts + part - lag;
                if (g < inputs.groups) {
                    load_tiles<tile % 2>(q + k, a.width, w + k * panel_width);
                    multiply_tiles<tile>();
                }
                if (stored >= 0 && stored < inputs.groups * parts) store_tile<(tile + 4 - lag) % 4>(room[stored % 8]);
            });
            if (g < behind || g - behind >= inputs.groups) return;
            asked.ask();
            then(g - behind, [&](auto part) ALWAYS_INLINE { return room[((g - behind) * parts + part) % 8]; });
        });
}
INLINE f16 sum_at(const int32_t* sums) { return floats(_mm512_load_si512(sums)); }

// sums[r][.] of 16 rows and 16 outputs go on by the inputs, for rows8 and rows2.
template <Form form>
static void add_inputs(const Inputs& inputs, const Quantized& a, int32_t row, float* sums, Asked& asked) {
    const int64_t stride = a.groups();
    const float* scale = a.scale + int64_t(row) * stride + inputs.first;
    f16 all[amx_height];
    each<amx_height>([&](auto r) ALWAYS_INLINE { all[r] = load(sums + r * panel_width); });
    each_group<parts_of<form>>(inputs, a, row, asked, [&](int32_t g, const auto& found) ALWAYS_INLINE {
        each<amx_height>([&](auto r) ALWAYS_INLINE { all[r] = all[r] + sum_at(found(std::integral_constant<int, 0>()) + 16 * r) * scale[r * stride + g]; });
    });
    each<amx_height>([&](auto r) ALWAYS_INLINE { store(sums + r * panel_width, all[r]); });
}

// The same for blocks.
template <Form form>
static void add_blocks(const Inputs& inputs, const Quantized& a, int32_t row, float* sums, Asked& asked) {
    constexpr int32_t parts = parts_of<form>, halves = halves_of(form);
    const int64_t stride = a.groups();
    const float* scale = a.scale + int64_t(row) * stride + inputs.first;
    const float* own = a.halves + 2 * (int64_t(row) * stride + inputs.first);
    f16 all[amx_height];
    each<amx_height>([&](auto r) ALWAYS_INLINE { all[r] = load(sums + r * panel_width); });
    each_group<parts>(inputs, a, row, asked, [&](int32_t g, const auto& found) ALWAYS_INLINE {
        each<parts>([&](auto part) ALWAYS_INLINE {
            constexpr int32_t block = part / halves, side = part % halves;
            const uint8_t* scales = inputs.packed + 2 * g * block_bytes(form) + scales_at(form, block);
            const f16 step = steps_of<form>(scales, side, 16 * inputs.half);
            each<amx_height>([&](auto r) ALWAYS_INLINE {
                all[r] = all[r] + sum_at(found(part) + 16 * r) * step * scale[r * stride + g];
                if constexpr (has_least(form)) all[r] = all[r] + steps_of<form>(scales, 1, 16 * inputs.half) * own[2 * (r * stride + g) + block];
            });
        });
    });
    each<amx_height>([&](auto r) ALWAYS_INLINE { store(sums + r * panel_width, all[r]); });
}

// The same for super-blocks, of which the inputs are whole ones.
template <Form form>
static void add_supers(const Inputs& inputs, const Quantized& a, int32_t row, float* sums, Asked& asked) {
    constexpr int32_t parts = parts_of<form>;
    const int32_t supers = a.supers();
    const int64_t stride = a.groups();
    const float* scale = a.scale + int64_t(row) * stride + inputs.first;
    f16 all[amx_height] = {};
    each_group<parts>(inputs, a, row, asked, [&](int32_t g, const auto& found) ALWAYS_INLINE {
        const uint8_t* w = inputs.packed + g / 4 * super_bytes(form);
        const uint8_t* scales = w + super_scales(form) + g % 4 * parts * panel_width + 16 * inputs.half;
        f16 by[parts];
        each<parts>([&](auto part) ALWAYS_INLINE {
            by[part] = has_least(form) ? unsigned_floats(scales + part * panel_width) : signed_floats(scales + part * panel_width);
        });
        each<amx_height>([&](auto r) ALWAYS_INLINE {
            f16 group = {};
            each<parts>([&](auto part) ALWAYS_INLINE { group = add_exact(group, sum_at(found(part) + 16 * r), by[part]); });
            all[r] = all[r] + group * scale[r * stride + g];
        });
        if (g % 4 != 3) return;
        const uint8_t* steps = w + 32 * inputs.half;
        const f16 step = half_floats(steps), down = half_floats(steps + 2 * panel_width);
        const uint8_t* least = w + 4 * panel_width + 64 * inputs.half;
        each<amx_height>([&](auto r) ALWAYS_INLINE {
            float* sum = sums + r * panel_width;
            f16 total = load(sum) + all[r] * step;
            if constexpr (has_least(form)) {
                const int64_t super = int64_t(row + r) * supers + (inputs.first + g) / 4;
                const int8_t* own = a.leasts + super * 16;
                const Bytes low = small_bytes(least), high = small_bytes(least + 4 * panel_width);
                const Ints upper = dot(dot(ints(0), low, four(own)), high, four(own + 4));
                total = total - floats(dot(dot(times128(upper), low, four(own + 8)), high, four(own + 12))) * a.least_step[super] * down;
            }
            store(sum, total);
            all[r] = f16{};
        });
    });
}

// todo(form), which the compiler knows then.
template <class Todo>
INLINE void of_form(Form form, const Todo& todo) {
    switch (form) {
#define DECODERY_FORM(name) \
    case name: return todo(std::integral_constant<Form, name>());
        DECODERY_FORM(rows2) DECODERY_FORM(blocks4) DECODERY_FORM(table4) DECODERY_FORM(blocks5) DECODERY_FORM(blocks6) DECODERY_FORM(blocks8)
        DECODERY_FORM(super4) DECODERY_FORM(super_table4) DECODERY_FORM(super5) DECODERY_FORM(super6) DECODERY_FORM(float4) DECODERY_FORM(mxfp4s)
        default: return todo(std::integral_constant<Form, rows8>());
#undef DECODERY_FORM
    }
}

static void add_rows(Form form, const Inputs& inputs, const Quantized& a, int32_t row, float* sums, Asked& asked) {
    of_form(form, [&](auto known) ALWAYS_INLINE {
        if constexpr (is_super(known())) add_supers<known()>(inputs, a, row, sums, asked);
        else if constexpr (known() == rows8 || known() == rows2) add_inputs<known()>(inputs, a, row, sums, asked);
        else add_blocks<known()>(inputs, a, row, sums, asked);
    });
}

// How many of these rows are multiplied here. By measurement: of most forms 16 rows alone gain nothing, and up to 11 beyond a
// multiple of 16 take less time without.
inline int32_t amx_share(Form form, int32_t rows) {
    const Form base = base_of(form);
    const int32_t least = base == rows2 || base == blocks5 || form == super_table4 ? 16 : 32;
    if (is_floating(form) || rows < least) return 0;
    return rows % amx_height < 12 ? rows / amx_height * amx_height : rows;
}

// Rows that are taken together, 16 of them: the last block ends with the last row and may have some of the one before it.
struct RowBlocks {
    int32_t rows, count;

    explicit RowBlocks(int32_t n) : rows(n), count((n + amx_height - 1) / amx_height) {}
    int32_t begin(int32_t block) const { return block == count - 1 ? rows - amx_height : block * amx_height; }
};

// sums: [16] rows of [32] for each block, of one panel, after which memory is read from `ahead` on.
static void panel_sums(const Linear& linear, const uint8_t* panel, const uint8_t* ahead, const Quantized& a, int32_t first, const RowBlocks& blocks, float* sums) {
    alignas(64) int8_t numbers[amx_inputs * panel_width];
    for (int32_t i = 0; i < blocks.count * amx_height * panel_width; i += 16) store(sums + i, splat(0.0f));
    const int32_t unit = is_super(linear.form) ? super_size : group_size, chunks = (a.width + amx_inputs - 1) / amx_inputs;
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
        const Range mine = share(a.width / unit, chunk, chunks);
        const int32_t from = mine.begin * unit, count = (mine.end - mine.begin) * unit, groups = count / group_size;
        const uint8_t* w = panel + packed_bytes(linear.form, from);
        of_form(linear.form, [&](auto known) ALWAYS_INLINE { unpack_numbers<known()>(w, count, numbers); });
        const int32_t bytes = packed_bytes(linear.form, count), asking = 2 * groups * blocks.count;
        Asked asked = {chunk == chunks - 1 ? ahead : w + bytes, (bytes / 64 + asking - 1) / asking};
        for (int32_t block = 0; block < blocks.count; ++block)
            for (int32_t half = 0; half < 2; ++half)
                add_rows(linear.form, {w, numbers, from / group_size, groups, half}, a, first + blocks.begin(block),
                         sums + block * amx_height * panel_width + 16 * half, asked);
    }
}

// finish(first row, end of rows, their sums) for the first `rows` rows, at least 16, and one panel.
template <class Finish>
static void multiply_many(const Linear& linear, const uint8_t* panel, const uint8_t* ahead, const Quantized& a, int32_t rows, const Finish& finish) {
    alignas(64) float sums[amx_rows * panel_width];
    const int32_t spans = (rows + amx_rows - 1) / amx_rows;
    for (int32_t i = 0; i < spans; ++i) {
        const Range span = share(rows, i, spans);
        const RowBlocks blocks(span.end - span.begin);
        panel_sums(linear, panel, ahead, a, span.begin, blocks, sums);
        for (int32_t block = 0; block < blocks.count; ++block) {
            const int32_t fresh = block * amx_height, begin = blocks.begin(block);
            finish(span.begin + fresh, span.begin + begin + amx_height, sums + (fresh + fresh - begin) * panel_width);
        }
    }
}
