// Blocks of GGUF files as they lie in the file: into panels, and into floats. Included once per instruction set.
//
// A row is a chain of blocks of 32 inputs, or of 256 that share scales and are read 32 at a time.

// One block. value: step * number + least, or with two steps for its halves, see abi.h.
struct Block {
    uint8_t numbers[block_size];
    float first, second;
};

INLINE float half_at(const uint8_t* p) {
    uint16_t half;
    __builtin_memcpy(&half, p, 2);
    const uint32_t size = half & 0x7fff;
    uint32_t bits = size << 13;
    float x;
    __builtin_memcpy(&x, &bits, 4);
    // The exponent is 112 too small now. What is not a number must stay so.
    x *= 0x1p112f;
    __builtin_memcpy(&bits, &x, 4);
    bits |= (size >= 0x7c00 ? 0x7f800000u : 0u) | uint32_t(half & 0x8000) << 16;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

// The bits of a power of two by its exponent in MXFP4, plus 127; of 255 those of no number.
INLINE uint32_t power_bits(uint8_t exponent) { return uint32_t(exponent) << 23 | (exponent == 0 || exponent == 255 ? 1u << 22 : 0u); }

INLINE uint32_t word_at(const uint8_t* p) {
    uint32_t word;
    __builtin_memcpy(&word, p, 4);
    return word;
}
// Sixteen bytes whose low halves are the first 16 inputs. By words: compilers take bytes one by one here.
INLINE void split(const uint8_t* p, uint8_t* numbers) {
    for (int32_t i = 0; i < 16; i += 4) {
        const uint32_t word = word_at(p + i), low = word & 0x0f0f0f0f, high = word >> 4 & 0x0f0f0f0f;
        __builtin_memcpy(numbers + i, &low, 4);
        __builtin_memcpy(numbers + 16 + i, &high, 4);
    }
}
INLINE void add_fifths(const uint8_t* p, uint8_t* numbers) {
    const uint32_t bits = word_at(p);
    for (int32_t i = 0; i < block_size; i += 4) {
        // A bit for each byte of a word.
        const uint32_t fifths = ((bits >> i & 15) * 0x00204081u & 0x01010101) << 4, all = word_at(numbers + i) | fifths;
        __builtin_memcpy(numbers + i, &all, 4);
    }
}
// Integer scale and least value of the j-th of eight blocks, of 6 bits, which lie in 12 bytes after two scales.
INLINE void six_bits(const uint8_t* p, int32_t j, int32_t& scale, int32_t& least) {
    const uint8_t* s = p + 4;
    const int32_t i = j % 4;
    scale = j < 4 ? s[i] & 63 : (s[i + 8] & 15) | s[i] >> 6 << 4;
    least = j < 4 ? s[i + 4] & 63 : s[i + 8] >> 4 | s[i + 4] >> 6 << 4;
}
// The integer scales of the j-th of the blocks that share scales at p: of a step and a least value, or of both halves.
template <Blocks kind>
INLINE void integer_scales(const uint8_t* p, int32_t j, int32_t& first, int32_t& second) {
    if constexpr (kind == q6_k) {
        first = int8_t(p[192 + 2 * j]);
        second = int8_t(p[193 + 2 * j]);
    } else if constexpr (kind == iq4_xs) {
        uint16_t high;
        __builtin_memcpy(&high, p + 2, 2);
        first = second = ((p[4 + j / 2] >> (j % 2 * 4) & 15) | (high >> (2 * j) & 3) << 4) - 32;
    } else six_bits(p, j, first, second);
}
// And what these are multiplied with: one number, but of a least value, which is taken away.
template <Blocks kind>
INLINE void shared_scales(const uint8_t* p, float& first, float& second) {
    first = half_at(p + (kind == q6_k ? 208 : 0));
    second = kind == q4_k || kind == q5_k ? half_at(p + 2) : first;
}

// The numbers of block j of a super-block at p, without its scales.
template <Blocks kind>
INLINE void super_numbers_of(const uint8_t* p, int32_t j, uint8_t* numbers) {
    if constexpr (kind == q4_k || kind == q5_k) {
        // 32 bytes hold the low halves of one block's numbers and the high halves of the next one's.
        const uint8_t* low = p + (kind == q4_k ? 16 : 48) + j / 2 * 32;
        for (int32_t i = 0; i < block_size; ++i) numbers[i] = low[i] >> (j % 2 * 4) & 15;
        if (kind == q5_k)
            for (int32_t i = 0; i < block_size; ++i) numbers[i] = uint8_t(numbers[i] | (p[16 + i] >> j & 1) << 4);
    } else if constexpr (kind == q6_k) {
        // 64 bytes hold the low bits of 128 numbers, 32 bytes the others.
        const int32_t part = j % 4;
        const uint8_t *low = p + j / 4 * 64 + part % 2 * 32, *high = p + 128 + j / 4 * 32;
        for (int32_t i = 0; i < block_size; ++i)
            numbers[i] = uint8_t((low[i] >> (part / 2 * 4) & 15) | (high[i] >> (2 * part) & 3) << 4);
    } else split(p + 8 + 16 * j, numbers);
}

// Block b of a row.
template <Blocks kind>
INLINE void read_block(const uint8_t* row, int32_t b, Block& block) {
    constexpr int32_t unit = blocks_of(kind), size = bytes_of(kind);
    const uint8_t* p = row + int64_t(b / unit) * size;
    const int32_t j = b % unit;
    uint8_t* numbers = block.numbers;
    if constexpr (is_super(form_of(kind))) {
        int32_t first, second;
        integer_scales<kind>(p, j, first, second);
        shared_scales<kind>(p, block.first, block.second);
        block.first *= float(first);
        block.second *= has_least(form_of(kind)) ? -float(second) : float(second);
    }
    switch (kind) {
        case mxfp4: {
            split(p + 1, numbers);
            const uint32_t power = power_bits(p[0]);
            __builtin_memcpy(&block.first, &power, 4);
            block.second = block.first;
            break;
        }
        case q4_0:
        case iq4_nl:
            split(p + 2, numbers);
            block.first = half_at(p);
            block.second = kind == q4_0 ? -8.0f * block.first : block.first;
            break;
        case q4_1:
            split(p + 4, numbers);
            block.first = half_at(p);
            block.second = half_at(p + 2);
            break;
        case q5_0:
            split(p + 6, numbers);
            add_fifths(p + 2, numbers);
            block.first = half_at(p);
            block.second = -16.0f * block.first;
            break;
        case q5_1:
            split(p + 8, numbers);
            add_fifths(p + 4, numbers);
            block.first = half_at(p);
            block.second = half_at(p + 2);
            break;
        case q8_0:
            for (int32_t i = 0; i < block_size; ++i) numbers[i] = p[2 + i] ^ 0x80;
            block.first = block.second = half_at(p);
            break;
        default: super_numbers_of<kind>(p, j, numbers);
    }
}

// [16][8] words become [8][16].
INLINE void turn(const uint32_t (*words)[8], uint8_t* to) {
    for (int32_t word = 0; word < 8; ++word)
        for (int32_t lane = 0; lane < 16; ++lane) __builtin_memcpy(to + 64 * word + 4 * lane, &words[lane][word], 4);
}

// The numbers of one block of a panel of 32 outputs: see abi.h for how its bytes lie.
template <Form form>
static void place(const uint8_t (*numbers)[block_size], uint8_t* to) {
    constexpr int32_t quads = block_size / 4, middle = panel_width / 2;
    if (form == blocks8) {
        for (int32_t lane = 0; lane < panel_width; ++lane)
            for (int32_t quad = 0; quad < quads; ++quad) __builtin_memcpy(to + 128 * quad + 4 * lane, numbers[lane] + 4 * quad, 4);
        return;
    }
    alignas(64) uint32_t first[middle][quads], second[middle][quads];
    // Whole rows of bytes at a time: what takes time is turning them, four bytes by four.
    for (int32_t lane = 0; lane < middle; ++lane)
        for (int32_t quad = 0; quad < quads; ++quad) {
            const uint32_t a = word_at(numbers[lane] + 4 * quad), b = word_at(numbers[lane + middle] + 4 * quad);
            first[lane][quad] = (a & 0x0f0f0f0f) | (b & 0x0f0f0f0f) << 4;
            second[lane][quad] = (a >> 4 & 0x03030303) | (b >> 2 & 0x0c0c0c0c);
        }
    turn(first, to);
    if (form == blocks6)
        // Four vectors share bytes: those of this step and of the one before or behind it.
        for (int32_t pair = 0; pair < quads / 2; ++pair)
            for (int32_t lane = 0; lane < middle; ++lane) {
                const uint32_t both = second[lane][2 * pair] | second[lane][2 * pair + 1] << 4;
                __builtin_memcpy(to + 512 + 64 * pair + 4 * lane, &both, 4);
            }
    if (form == blocks5)
        for (int32_t lane = 0; lane < panel_width; lane += 2)
            for (int32_t quad = 0; quad < quads; ++quad) {
                const auto four_bits = [](uint32_t x) { return (x >> 4 & 0x01010101) * 0x01020408u >> 24 & 15; };
                // Two outputs share a byte: the even one comes first.
                const uint32_t even = four_bits(word_at(numbers[lane] + 4 * quad)), odd = four_bits(word_at(numbers[lane + 1] + 4 * quad));
                to[512 + 16 * quad + lane / 2] = uint8_t(even | odd << 4);
            }
}

// The integer scales of an output's super-block.
template <Blocks kind>
INLINE void place_scales(const uint8_t* p, int32_t lane, uint8_t* to) {
    if constexpr (kind == q4_k || kind == q5_k) {
        // As `six_bits`, of four blocks at a time.
        const uint32_t a = word_at(p + 4), b = word_at(p + 8), c = word_at(p + 12);
        const uint32_t scales[2] = {a & 0x3f3f3f3f, (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)};
        const uint32_t leasts[2] = {b & 0x3f3f3f3f, (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)};
        for (int32_t half = 0; half < 2; ++half) {
            __builtin_memcpy(to + 4 * panel_width + half * 4 * panel_width + 4 * lane, &leasts[half], 4);
            for (int32_t j = 0; j < 4; ++j) to[super_scales(form_of(kind)) + (4 * half + j) * panel_width + lane] = uint8_t(scales[half] >> (8 * j));
        }
    } else
        for (int32_t j = 0; j < 8; ++j) {
            int32_t first, second;
            integer_scales<kind>(p, j, first, second);
            put_scales<form_of(kind)>(to, lane, j, first, second);
        }
}

// A super-block of a panel, of which row i begins at rows[i], null for padding.
template <Blocks kind>
static void place_super(const uint8_t* const* rows, int32_t super, uint8_t* to) {
    constexpr Form form = form_of(kind);
    alignas(64) uint8_t numbers[8][panel_width][block_size];
    alignas(64) float scales[2][panel_width] = {};
    __builtin_memset(to, 0, super_numbers(form));
    for (int32_t lane = 0; lane < panel_width; ++lane) {
        if (rows[lane] == nullptr) {
            for (int32_t j = 0; j < 8; ++j) __builtin_memset(numbers[j][lane], 0, block_size);
            continue;
        }
        const uint8_t* p = rows[lane] + int64_t(super) * bytes_of(kind);
        shared_scales<kind>(p, scales[0][lane], scales[1][lane]);
        place_scales<kind>(p, lane, to);
        each<8>([&](auto j) ALWAYS_INLINE { super_numbers_of<kind>(p, j, numbers[j][lane]); });
    }
    for (int32_t side = 0; side < (has_least(form) ? 2 : 1); ++side)
        for (int32_t i = 0; i < panel_width; i += 16)
            store(reinterpret_cast<Half*>(to) + side * panel_width + i, load(scales[side] + i), 16);
    for (int32_t j = 0; j < 8; ++j) place<base_of(form)>(numbers[j], to + super_numbers(form) + j * number_bytes(form));
}

template <Blocks kind>
static void pack_supers(const uint8_t* const* rows, int32_t in, int32_t out, uint8_t* packed) {
    for (int32_t first = 0; first < out; first += panel_width)
        for (int32_t s = 0; s < in / super_size; ++s, packed += super_bytes(form_of(kind))) place_super<kind>(rows + first, s, packed);
}

template <Blocks kind>
static void pack_kind(const uint8_t* const* rows, int32_t in, int32_t out, uint8_t* packed) {
    constexpr Form form = form_of(kind);
    const int32_t blocks = round_up(in, group_size) / block_size, known = in / block_size;
    alignas(64) uint8_t numbers[panel_width][block_size] = {};
    alignas(64) float scales[2][panel_width] = {};
    for (int32_t first = 0; first < out; first += panel_width)
        for (int32_t b = 0; b < blocks; ++b) {
            uint8_t* group = packed + (int64_t(first / panel_width) * blocks + b / 2 * 2) * block_bytes(form);
            uint8_t *own = group + scales_at(form, b % 2), *to = group + numbers_at(form, b % 2);
            if (b >= known) {
                __builtin_memset(own, 0, steps_bytes(form));
                __builtin_memset(to, 0, number_bytes(form));
                continue;
            }
            for (int32_t lane = 0; lane < panel_width; ++lane) {
                Block block = {};
                if (rows[first + lane] != nullptr) read_block<kind>(rows[first + lane], b, block);
                __builtin_memcpy(numbers[lane], block.numbers, block_size);
                scales[0][lane] = block.first;
                scales[1][lane] = block.second;
                if (form == mxfp4s) own[lane] = rows[first + lane] == nullptr ? 0 : rows[first + lane][b * bytes_of(kind)];
            }
            for (int32_t side = 0; side < steps_bytes(form) / (2 * panel_width); ++side)
                for (int32_t i = 0; i < panel_width; i += 16)
                    store(reinterpret_cast<Half*>(own) + side * panel_width + i, load(scales[side] + i), 16);
            place<form>(numbers, to);
        }
}

template <Blocks kind>
static void expand_kind(const uint8_t* const* rows, int32_t count, int32_t in, float* to) {
    constexpr Form form = form_of(kind);
    for (int32_t row = 0; row < count; ++row)
        for (int32_t b = 0; b < in / block_size; ++b, to += block_size) {
            Block block;
            read_block<kind>(rows[row], b, block);
            for (int32_t i = 0; i < block_size; ++i) {
                const int32_t number = block.numbers[i];
                if (has_least(form)) to[i] = block.first * float(number) + block.second;
                else {
                    const float value = base_of(form) == table4 ? table_values[number] : form == mxfp4s ? 0.5f * float(e2m1_values[number] - e2m1_zero)
                        : float(number - (form == super6 ? 32 : 128));
                    to[i] = (i < block_size / 2 ? block.first : block.second) * value;
                }
            }
        }
}

// todo(kind) with a kind that is known when this is compiled. Returns whether there is such a kind.
template <class Todo>
static bool of_kind(int32_t kind, const Todo& todo) {
    switch (kind) {
#define DECODERY_KIND(name) \
    case name: todo(std::integral_constant<Blocks, name>()); return true;
        DECODERY_KIND(q4_0) DECODERY_KIND(q4_1) DECODERY_KIND(q5_0) DECODERY_KIND(q5_1) DECODERY_KIND(q8_0)
        DECODERY_KIND(q4_k) DECODERY_KIND(q5_k) DECODERY_KIND(q6_k) DECODERY_KIND(iq4_nl) DECODERY_KIND(iq4_xs) DECODERY_KIND(mxfp4)
#undef DECODERY_KIND
    }
    return false;
}

static bool run_pack(int32_t kind, const uint8_t* const* rows, int32_t in, int32_t out, uint8_t* packed) {
    return of_kind(kind, [&](auto known) {
        if constexpr (is_super(form_of(known()))) pack_supers<known()>(rows, in, out, packed);
        else pack_kind<known()>(rows, in, out, packed);
    });
}
static bool run_expand(int32_t kind, const uint8_t* const* rows, int32_t count, int32_t in, float* to) {
    return of_kind(kind, [&](auto known) { expand_kind<known()>(rows, count, in, to); });
}
