// Rows of bytes that share a scale in bfloat16: numbers from -127 to 127. Coded once more, what such a row stands for is
// the same row. Included once per instruction set.
//
// Attention sums integers, which no order changes: a query becomes integers of 14 bits and a step, and so do the weights of
// a chunk of values, their rows' scales a part of them. Both are split in two parts that fit bytes.

constexpr int32_t query_most = 8191;     // sums of 1,024 products with 127 fit 32 bits
constexpr int32_t weight_most = 16383;
constexpr float nothing = 1e-30f;        // rows with nothing larger are zeros

template <class E>
constexpr bool is_coded = std::is_same<E, Coded>::value;

INLINE float scale_of(uint16_t upper) {
    const uint32_t all = uint32_t(upper) << 16;
    float scale;
    __builtin_memcpy(&scale, &all, sizeof(scale));
    return scale;
}
INLINE f16 bounded(f16 x, float most) { return larger(splat(-most), smaller(splat(most), x)); }

// x [dim] as numbers [dim, rounded up to 16], and their scale. One number that is not finite makes the whole row none.
static uint16_t code_row(const float* x, int32_t dim, int8_t* numbers) {
    f16 top = splat(0.0f), strange = splat(0.0f);
    for (int32_t i = 0; i < dim; i += 16) {
        const f16 v = load(x + i, dim - i);
        top = larger(magnitude(v), top);
        strange = strange + v * 0.0f;
    }
    const float largest = maximum<float>(top), scale = largest < nothing ? 0.0f : largest / 127.0f;
    uint32_t all;
    __builtin_memcpy(&all, &scale, sizeof(all));
    // To the nearest, ties to even: so near that the largest number is 127.
    all = (all + 0x7fff + (all >> 16 & 1)) & 0xffff0000;
    const bool finite = total(strange) == 0.0f;
    if (!finite) all = 0x7fc00000;
    const uint16_t upper = uint16_t(all >> 16);
    const float inverse = finite && all != 0 ? 1.0f / scale_of(upper) : 0.0f;
    for (int32_t i = 0; i < dim; i += 16)
        store_bytes(numbers + i, whole(bounded(nearest((finite ? load(x + i, dim - i) : splat(0.0f)) * inverse), 127.0f)));
    return upper;
}

// q [wide] as integers, multiples of 128 first and then what they leave, and what one of them stands for. sums: of both.
static float code_query(const float* q, int32_t wide, int8_t* numbers, int32_t (&sums)[2]) {
    f16 top = splat(0.0f);
    for (int32_t i = 0; i < wide; i += 16) top = larger(magnitude(load(q + i)), top);
    const float largest = maximum<float>(top), inverse = largest < nothing ? 0.0f : float(query_most) / largest;
    i16 upper = isplat(0), lower = isplat(0);
    for (int32_t i = 0; i < wide; i += 16) {
        // A multiple of 128 is the nearest, so that what is left is from -64 to 63.
        const i16 all = whole(bounded(nearest(load(q + i) * inverse), float(query_most))) + isplat(64);
        const i16 high = all >> 7, low = (all & 127) + isplat(-64);
        store_bytes(numbers + i, high);
        store_bytes(numbers + wide + i, low);
        upper += high;
        lower += low;
    }
    sums[0] = isum(upper);
    sums[1] = isum(lower);
    return largest / float(query_most);
}

// Weights w [n], zeros up to a multiple of 16, as integers, split likewise, and what one of them stands for. most: the
// largest weight.
static float code_weights(const float* w, int32_t n, float most, uint8_t* high, uint8_t* low, int32_t (&sums)[2]) {
    const float inverse = most < nothing ? 0.0f : float(weight_most) / most;
    i16 upper = isplat(0), lower = isplat(0);
    for (int32_t i = 0; i < n; i += 16) {
        const i16 all = whole(nearest(smaller(splat(float(weight_most)), load(w + i) * inverse)));
        const i16 above = all >> 7, below = all & 127;
        store_bytes(reinterpret_cast<int8_t*>(high + i), above);
        store_bytes(reinterpret_cast<int8_t*>(low + i), below);
        upper += above;
        lower += below;
    }
    sums[0] = isum(upper);
    sums[1] = isum(lower);
    return most / float(weight_most);
}

// Puts a key, or value, x [dim] into a slot of a page.
INLINE void put_row(const float* x, char* page, int32_t kind, int32_t slot, int32_t dim, Coded) {
    int8_t numbers[most_dim];
    const uint16_t scale = code_row(x, dim, numbers);
    put_coded(page, kind, slot, dim, reinterpret_cast<const uint8_t*>(numbers), scale);
}
template <class E>
INLINE void put_row(const float* x, char* page, int32_t kind, int32_t slot, int32_t dim, E) {
    E numbers[most_dim];
    for (int32_t i = 0; i < dim; i += 16) store(numbers + i, load(x + i, dim - i), dim - i);
    put_numbers(page, kind, slot, dim, numbers);
}
// The same of a part of a page's row, `wide` numbers in all, from `shift` on; of floats.
template <class E>
INLINE void put_part(const float* x, char* page, int32_t kind, int32_t slot, int32_t dim, int32_t wide, int32_t shift, E element) {
    if constexpr (is_coded<E>) put_row(x, page, kind, slot, dim, element);
    else {
        E numbers[most_dim];
        for (int32_t i = 0; i < dim; i += 16) store(numbers + i, load(x + i, dim - i), dim - i);
        // Channels of keys are 16 numbers apart, those of values one.
        each_number<E>(page + (kind == 0 ? page_slots : 1) * shift * int32_t(sizeof(E)), kind, slot, dim, wide, [&](int32_t i, E* to) { *to = numbers[i]; });
    }
}
