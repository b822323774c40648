// Arm with dot products: a vector of 64 bytes is four registers, each with four inputs of four outputs. Included by
// arm.cpp inside its namespace.

#include "vec.h"

using Ints = int32x4_t;
using Bytes = int8x16_t;
using Four = int8x16_t;
using Floats = float32x4_t;
constexpr int32_t lanes = 4;
constexpr int32_t weight_offset = 0;
INLINE Ints ints(int32_t x) { return vdupq_n_s32(x); }
INLINE Four four(const int8_t* p) {
    int32_t x;
    __builtin_memcpy(&x, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(x));
}
INLINE Floats floats(Ints x) { return vcvtq_f32_s32(x); }
INLINE Ints add_ints(Ints a, Ints b) { return vaddq_s32(a, b); }
INLINE Ints times128(Ints x) { return vshlq_n_s32(x, 7); }
INLINE Bytes small_bytes(const uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
INLINE Floats unsigned_floats(const uint8_t* p) {
    uint32_t bytes;
    __builtin_memcpy(&bytes, p, 4);
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes)))));
}
INLINE Floats signed_floats(const uint8_t* p) {
    uint32_t bytes;
    __builtin_memcpy(&bytes, p, 4);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(bytes)))));
}
// Powers of two by their exponents, see `power_bits`.
INLINE Floats powers(const uint8_t* p) {
    uint32_t bytes;
    __builtin_memcpy(&bytes, p, 4);
    const uint32x4_t x = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes))));
    const uint32x4_t end = vceqzq_u32(vandq_u32(vaddq_u32(x, vdupq_n_u32(1)), vdupq_n_u32(254)));
    return vreinterpretq_f32_u32(vorrq_u32(vshlq_n_u32(x, 23), vandq_u32(end, vdupq_n_u32(1 << 22))));
}
INLINE Floats add_exact(Floats sum, Floats x, Floats y) { return vfmaq_f32(sum, x, y); }
INLINE Floats load_lanes(const float* p) { return vld1q_f32(p); }
INLINE void store_lanes(float* p, Floats x) { vst1q_f32(p, x); }
INLINE Floats half_floats(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
INLINE Bytes weights(const uint8_t* p) { return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(0x80))); }
INLINE Bytes low_halves(const uint8_t* p) { return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(p), vdupq_n_u8(15))); }
INLINE Bytes high_halves(const uint8_t* p) { return vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(p), 4)); }
INLINE Bytes looked_up(Bytes low, const int8_t* values, int32_t) { return vqtbl1q_s8(vld1q_s8(values), vreinterpretq_u8_s8(low)); }
// With the fifth bit of each, of 16 at p.
INLINE Bytes with_fifth(Bytes low, const uint8_t* p) {
    const uint8x16_t each = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    const uint8x16_t set = vtstq_u8(vcombine_u8(vdup_n_u8(p[0]), vdup_n_u8(p[1])), each);
    return vorrq_s8(low, vreinterpretq_s8_u8(vandq_u8(set, vdupq_n_u8(16))));
}
// With two more bits of each: pair number `place` of those in each byte at p.
INLINE Bytes with_two(Bytes low, const uint8_t* p, int32_t place) {
    const uint8x16_t moved = vshlq_u8(vld1q_u8(p), vdupq_n_s8(int8_t(4 - 2 * place)));
    return vorrq_s8(low, vreinterpretq_s8_u8(vandq_u8(moved, vdupq_n_u8(48))));
}
// Numbers of two bits: number `place` of the four in each byte at p.
INLINE Bytes two_bits(const uint8_t* p, int32_t place) {
    const uint8x16_t moved = vshlq_u8(vld1q_u8(p), vdupq_n_s8(int8_t(-2 * place)));
    return vreinterpretq_s8_u8(vandq_u8(moved, vdupq_n_u8(3)));
}
INLINE Ints dot(Ints sum, Bytes w, Four x) { return vdotq_s32(sum, w, x); }
#if DECODERY_PAIRS
INLINE Bytes two_rows(const int8_t* a, const int8_t* b) { return vcombine_s8(vld1_s8(a), vld1_s8(b)); }
// Of four inputs of four outputs and the next four: all eight of the first two outputs, and of the last two.
INLINE Bytes first_outputs(Bytes a, Bytes b) {
    return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}
INLINE Bytes last_outputs(Bytes a, Bytes b) {
    return vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}
// Two rows by two outputs: the first row's two sums, then the second's.
INLINE Ints products(Ints sum, Bytes rows, Bytes outputs) { return vmmlaq_s32(sum, rows, outputs); }
INLINE Ints first_row(Ints a, Ints b) { return vcombine_s32(vget_low_s32(a), vget_low_s32(b)); }
INLINE Ints second_row(Ints a, Ints b) { return vcombine_s32(vget_high_s32(a), vget_high_s32(b)); }
#endif
// Four pairs of bfloat16: the first of each and the second.
INLINE void widen(const uint8_t* p, Floats& low, Floats& high) {
    const uint32x4_t pairs = vreinterpretq_u32_u8(vld1q_u8(p));
    low = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
    high = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000)));
}
// Four E4M3 numbers, over 256, as in avx512.cpp.
INLINE Floats small_floats(const uint8_t* p) {
    uint32_t bytes;
    __builtin_memcpy(&bytes, p, 4);
    const int16x4_t x = vshl_n_s16(vget_low_s16(vmovl_s8(vcreate_s8(bytes))), 7);
    return vcvt_f32_f16(vreinterpret_f16_s16(vand_s16(x, vdup_n_s16(int16_t(0xbfff)))));
}
// What four codes in halves of bytes stand for.
template <int half>
INLINE Floats coded_floats(const float* table, const uint8_t* p) {
    constexpr int32_t by = 4 * half;
    const float found[4] = {table[p[0] >> by & 15], table[p[1] >> by & 15], table[p[2] >> by & 15], table[p[3] >> by & 15]};
    return vld1q_f32(found);
}
INLINE int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
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
