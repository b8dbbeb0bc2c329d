// Products in bfloat16: rows are rounded like the weights, sums are float32.
//
// The order of summation is that of the processor's matrix tiles (AMX, TDPBF16PS), with or without tiles: of each 32 inputs
// the even and the odd ones are summed separately from zero, the two sums are added, and the result is added to that of the
// previous inputs. A product of two bfloat16 numbers is exact in float32. So a row's bits depend on nothing else.

#pragma once

#include "weights.h"

namespace {

constexpr int ROUNDED_INPUTS = 32;  // summed together
constexpr int SPLIT_PARTS = 3;  // of a float32 row

inline int rounded_inputs(int num_in) { return (num_in + ROUNDED_INPUTS - 1) / ROUNDED_INPUTS * ROUNDED_INPUTS; }

// Rounds sixteen numbers to bfloat16, ties to even; NaN stays NaN.
inline void round_lanes(uint16_t* to, const v16& x) {
    const w16 bits = (w16)x, up = bits + 0x7fffu + ((bits >> 16) & 1u);
    store_halves(to, (w16)select(x != x, (i16)(bits | 0x400000u), (i16)up) >> 16);
}

// Rounds a row of `width` numbers, with zeros up to `padded`.
void round_row(const float* x, int width, int padded, uint16_t* out) {
    int i = 0;
    for (; i + 16 <= width; i += 16) round_lanes(out + i, load(x + i));
    if (i < width) {
        float rest[16] = {};
        memcpy(rest, x + i, (width - i) * sizeof(float));
        round_lanes(out + i, load(rest));
        i += 16;
    }
    memset(out + i, 0, (padded - i) * sizeof(uint16_t));
}

// Splits a row of `width` numbers into three bfloat16 rows, `stride` numbers apart, that sum to it: each has 8 of a float's 24
// bits, the highest first. (Parts below 2^-126 are lost: products treat them as zero.) Zeros up to `padded`; NaN stays NaN.
void split_row(const float* x, int width, int padded, size_t stride, uint16_t* out) {
    const auto put_lanes = [&](int i, v16 rest) __attribute__((always_inline)) {
        for (int part = 0; part < SPLIT_PARTS; ++part) {
            const w16 bits = (w16)rest & 0xffff0000u;
            store_halves(out + part * stride + i, bits >> 16);
            rest -= (v16)bits;
        }
    };
    int i = 0;
    for (; i + 16 <= width; i += 16) put_lanes(i, load(x + i));
    if (i < width) {
        float rest[16] = {};
        memcpy(rest, x + i, (width - i) * sizeof(float));
        put_lanes(i, load(rest));
        i += 16;
    }
    for (int part = 0; part < SPLIT_PARTS && i < padded; ++part)
        memset(out + part * stride + i, 0, (padded - i) * sizeof(uint16_t));
}

// Adds the products of 2 * pairs inputs, ROUNDED_INPUTS at most, to the sums of R rows, P parts of the tile at a time.
template <int R, int P>
inline void rounded_step(const uint16_t* x, size_t stride, const char* w, int pairs, v16 (*sum)[PARTS]) {
    float wide[R][ROUNDED_INPUTS];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < ROUNDED_INPUTS; i += 16) store(wide[r] + i, (v16)(words_of(x + r * stride + i) << 16));
    for (int part = 0; part < PARTS; part += P) {
        v16 even[R][P], odd[R][P];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < P; ++c) even[r][c] = v16{}, odd[r][c] = v16{};
        const char* from = w + 64 * part;
        for (int k = 0; k < pairs; ++k, from += BFloat16::GROUP_BYTES) {
            v16 low[P], high[P];
            for (int c = 0; c < P; ++c) {
                const w16 bits = BFloat16::bits(from, c);
                low[c] = BFloat16::weight(bits, 0), high[c] = BFloat16::weight(bits, 1);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const v16 first = spread_from(wide[r] + 2 * k), second = spread_from(wide[r] + 2 * k + 1);
#pragma GCC unroll 4
                for (int c = 0; c < P; ++c) even[r][c] += first * low[c], odd[r][c] += second * high[c];
            }
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < P; ++c) sum[r][part + c] += even[r][c] + odd[r][c];
    }
}

#if defined(__AVX512F__)
template <int R> constexpr int rounded_parts() { return R <= 2 ? 4 : 2; }
#else
template <int R> constexpr int rounded_parts() { return R == 1 ? 2 : 1; }
#endif

template <int R = 1>
inline void rounded_rows(int num, const uint16_t* x, size_t stride, const char* w, int pairs, v16 (*sum)[PARTS]) {
    if (num == R) return rounded_step<R, rounded_parts<R>()>(x, stride, w, pairs, sum);
    if constexpr (R < MAX_ROWS) rounded_rows<R + 1>(num, x, stride, w, pairs, sum);
}

// Not inlined, so that it stays between the mode switches of `rounded_sums`.
__attribute__((noinline)) void add_rounded(const uint16_t* x, size_t stride, const char* w, int num_in, int count,
                                           v16 (*sums)[PARTS]) {
    const int passes = (count + MAX_ROWS - 1) / MAX_ROWS;
    for (int from = 0; from < num_in; from += ROUNDED_INPUTS, w += ROUNDED_INPUTS / 2 * BFloat16::GROUP_BYTES) {
        const int pairs = (std::min(num_in - from, ROUNDED_INPUTS) + 1) / 2;
        for (int line = 0; line < 4 * pairs; ++line) __builtin_prefetch(w + AHEAD + 64 * line);
        for (int pass = 0; pass < passes; ++pass) {
            const int first = static_cast<int>(static_cast<int64_t>(count) * pass / passes);
            const int num = static_cast<int>(static_cast<int64_t>(count) * (pass + 1) / passes) - first;
            rounded_rows(num, x + first * stride + from, stride, w, pairs, sums + first);
        }
    }
}

// Adds the products of rows, padded with zeros to ROUNDED_INPUTS, and a tile to sums (count, 64). Subnormal
// numbers (below 2^-126) count as zero, as in tiles.
void rounded_sums(const uint16_t* x, size_t stride, const char* w, int num_in, int count, v16 (*sums)[PARTS]) {
#if defined(__SSE2__)
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    add_rounded(x, stride, w, num_in, count, sums);
    _mm_setcsr(before);
#elif defined(__aarch64__)
    uint64_t before;
    asm volatile("mrs %0, fpcr" : "=r"(before));
    asm volatile("msr fpcr, %0" ::"r"(before | 1ull << 24));
    add_rounded(x, stride, w, num_in, count, sums);
    asm volatile("msr fpcr, %0" ::"r"(before));
#else
    add_rounded(x, stride, w, num_in, count, sums);
#endif
}

}  // namespace
