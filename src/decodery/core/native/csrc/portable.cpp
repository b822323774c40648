// Plain C++ for any machine, vectorised as far as the compiler can.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O2")    // more takes half a minute to compile and gains nothing here
#endif
#include "state.h"

#if !defined(__x86_64__)
#include <time.h>
#endif

#define DECODERY_TILE_ROWS 4
#define DECODERY_BOTH_ROWS 4
#define DECODERY_FLOAT_ROWS 4
#define DECODERY_LOOP_STEPS 1

namespace portable {
#include "vec.h"

using Ints = i16;
struct Bytes {
    int8_t value[64];
};
struct Four {
    int32_t value[4];
};
using Floats = f16;
constexpr int32_t lanes = 16;
INLINE Floats load_lanes(const float* p) { return load(p); }
INLINE void store_lanes(float* p, Floats x) { store(p, x); }
constexpr int32_t weight_offset = 0;
INLINE Ints ints(int32_t x) { return isplat(x); }
INLINE Bytes weights(const uint8_t* p) {
    Bytes w;
    for (int i = 0; i < 64; ++i) w.value[i] = int8_t(p[i] ^ 0x80);
    return w;
}
INLINE Bytes low_halves(const uint8_t* p) {
    Bytes w;
    for (int i = 0; i < 64; ++i) w.value[i] = int8_t(p[i] & 15);
    return w;
}
INLINE Bytes high_halves(const uint8_t* p) {
    Bytes w;
    for (int i = 0; i < 64; ++i) w.value[i] = int8_t(p[i] >> 4);
    return w;
}
INLINE Bytes looked_up(Bytes low, const int8_t* values, int32_t) {
    for (int8_t& value : low.value) value = values[value];
    return low;
}
INLINE Bytes with_fifth(Bytes low, const uint8_t* p) {
    for (int i = 0; i < 64; ++i) low.value[i] = int8_t(low.value[i] | (p[i / 8] >> (i % 8) & 1) << 4);
    return low;
}
INLINE Bytes with_two(Bytes low, const uint8_t* p, int32_t place) {
    for (int i = 0; i < 64; ++i) low.value[i] = int8_t(low.value[i] | (p[i] >> (2 * place) & 3) << 4);
    return low;
}
INLINE Bytes two_bits(const uint8_t* p, int32_t place) {
    Bytes w;
    for (int i = 0; i < 64; ++i) w.value[i] = int8_t(p[i] >> (2 * place) & 3);
    return w;
}
INLINE f16 half_floats(const uint8_t* p) {
    u16x16_loose bits = *reinterpret_cast<const u16x16_loose*>(p);
    const u32x16 x = __builtin_convertvector(bits, u32x16), sign = (x & 0x8000) << 16;
    // Moving exponent and mantissa up leaves the exponent 112 too small, which a multiplication puts right, exactly
    // and for numbers without a leading one too.
    const f16 size = reinterpret_cast<f16>((x & 0x7fff) << 13) * 0x1p112f;
    return reinterpret_cast<f16>(reinterpret_cast<u32x16>(size) | sign);
}
INLINE Four four(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
INLINE Ints dot(Ints sum, const Bytes& w, const Four& x) {
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 4; ++j) sum[i] += w.value[4 * i + j] * x.value[j];
    return sum;
}
INLINE f16 floats(Ints x) { return __builtin_convertvector(x, f16); }
INLINE Ints add_ints(Ints a, Ints b) { return a + b; }
INLINE Ints times128(Ints x) { return x << 7; }
INLINE Bytes small_bytes(const uint8_t* p) {
    Bytes w;
    __builtin_memcpy(w.value, p, 64);
    return w;
}
INLINE f16 unsigned_floats(const uint8_t* p) {
    f16 x;
    for (int i = 0; i < 16; ++i) x[i] = float(p[i]);
    return x;
}
INLINE f16 signed_floats(const uint8_t* p) {
    f16 x;
    for (int i = 0; i < 16; ++i) x[i] = float(int8_t(p[i]));
    return x;
}
// Powers of two by their exponents, see `power_bits`.
INLINE f16 powers(const uint8_t* p) {
    u32x16 bits;
    for (int i = 0; i < 16; ++i) bits[i] = uint32_t(p[i]) << 23 | (p[i] == 0 || p[i] == 255 ? 1u << 22 : 0u);
    return reinterpret_cast<f16>(bits);
}
INLINE f16 add_exact(f16 sum, f16 x, f16 y) { return sum + x * y; }
INLINE void widen(const uint8_t* p, Floats& low, Floats& high) {
    u32x16 pairs;
    __builtin_memcpy(&pairs, p, 64);
    low = reinterpret_cast<f16>(pairs << 16);
    high = reinterpret_cast<f16>(pairs & 0xffff0000);
}
// Sixteen E4M3 numbers, over 256. Moved to where single precision has exponent and mantissa, the exponent is 112 too small.
INLINE Floats small_floats(const uint8_t* p) {
    u32x16 x;
    for (int i = 0; i < 16; ++i) x[i] = p[i];
    return reinterpret_cast<f16>((x & 127) << 20 | (x & 128) << 24) * 0x1p112f;
}
// What sixteen codes in halves of bytes stand for.
template <int half>
INLINE Floats coded_floats(const float* table, const uint8_t* p) {
    f16 x;
    for (int i = 0; i < 16; ++i) x[i] = table[p[i] >> (4 * half) & 15];
    return x;
}
INLINE int64_t now() {
#if defined(__x86_64__)
    return int64_t(__builtin_ia32_rdtsc());
#else
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
#endif
}

#include "gemm.h"
#include "blocks.h"
#include "coded.h"
#include "tiles.h"
#include "attention.h"
#include "select.h"
#include "scan.h"
#include "mix.h"
#include "pass.h"
#include "topk.h"
#include "race.h"
#include "sample.h"
#include "draft.h"
}  // namespace portable

const Kernels portable_kernels = {"portable C++", portable::run_layers, portable::run_norm, portable::run_head, portable::run_linear, portable::run_read,
    portable::run_draft, portable::run_mix, portable::run_topk, portable::run_chances, portable::run_sums, portable::run_race, portable::run_pack, portable::run_expand, portable::run_sample};
