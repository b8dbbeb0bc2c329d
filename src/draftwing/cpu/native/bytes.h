// 8-bit rows times 8-bit weights in registers of 16 or 32 bytes: AVX2, NEON, and generic code.
//
// Integer sums are exact in any order, so the results equal those of AVX-512 and of matrix tiles.

#pragma once

#include <algorithm>

#include "lanes.h"

namespace {

// --- four inputs at a time -------------------------------------------------------------------------------------------
// `Fours`: interleaved weights of four inputs for as many outputs as a register has words. ROW_WORDS: words per four inputs
// of a row. `add_fours` adds the products of unsigned and signed bytes to 32-bit sums.

#if defined(__AVX512F__)

constexpr int ROW_WORDS = 1;  // see weights.h and tiles.h

#elif defined(__AVX2__) && !defined(__AVXVNNI__)

// Even and odd bytes are widened to 16 bits separately: the sum of two products of unsigned and signed bytes does not fit
// in 16 bits, and the byte instruction would saturate it.
constexpr int ROW_WORDS = 2, MANY_BYTES = 4, COLUMNS = 2;
typedef __m256i Four;
struct Fours {
    __m256i even, odd;
};
struct FourInputs {
    __m256i even, odd;
};
inline Fours fours(const int8_t* w) {
    const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
    return {_mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), _mm256_srai_epi16(all, 8)};
}
inline FourInputs inputs(const uint32_t* row) {
    return {_mm256_set1_epi32(static_cast<int32_t>(row[0])), _mm256_set1_epi32(static_cast<int32_t>(row[1]))};
}
inline Four add_fours(Four sum, const Fours& w, const FourInputs& x) {
    __m256i even = _mm256_madd_epi16(w.even, x.even);
    hold_register(even);
    sum = _mm256_add_epi32(sum, even);
    hold_register(sum);
    __m256i odd = _mm256_madd_epi16(w.odd, x.odd);
    hold_register(odd);
    sum = _mm256_add_epi32(sum, odd);
    hold_register(sum);
    return sum;
}

#elif defined(__AVXVNNI__)

constexpr int ROW_WORDS = 1, MANY_BYTES = 6, COLUMNS = 2;
typedef __m256i Four;
typedef __m256i Fours;
typedef __m256i FourInputs;
inline Fours fours(const int8_t* w) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)); }
inline FourInputs inputs(const uint32_t* row) { return _mm256_set1_epi32(static_cast<int32_t>(*row)); }
inline Four add_fours(Four sum, Fours w, FourInputs x) { return _mm256_dpbusd_avx_epi32(sum, x, w); }

#elif defined(__ARM_FEATURE_MATMUL_INT8)

constexpr int ROW_WORDS = 1, MANY_BYTES = 6, COLUMNS = 4;
typedef int32x4_t Four;
typedef int8x16_t Fours;
typedef uint8x16_t FourInputs;
inline Fours fours(const int8_t* w) { return vld1q_s8(w); }
inline FourInputs inputs(const uint32_t* row) { return vreinterpretq_u8_u32(vld1q_dup_u32(row)); }
inline Four add_fours(Four sum, Fours w, FourInputs x) { return vusdotq_s32(sum, x, w); }

#elif defined(__ARM_FEATURE_DOTPROD)

// Signed bytes only: a row's bytes are reduced by 128, and the difference is added back once per four weights.
constexpr int ROW_WORDS = 1, MANY_BYTES = 4, COLUMNS = 2;
typedef int32x4_t Four;
struct Fours {
    int8x16_t weights;
    int32x4_t offset;
};
typedef int8x16_t FourInputs;
inline Fours fours(const int8_t* w) {
    const int8x16_t weights = vld1q_s8(w);
    return {weights, vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), weights, vdupq_n_s8(1)), 7)};
}
inline FourInputs inputs(const uint32_t* row) { return vreinterpretq_s8_u32(vdupq_n_u32(*row ^ 0x80808080u)); }
inline Four add_fours(Four sum, const Fours& w, FourInputs x) { return vdotq_s32(vaddq_s32(sum, w.offset), w.weights, x); }

#else

constexpr int ROW_WORDS = 4, MANY_BYTES = 2, COLUMNS = 2;
typedef int32_t Four __attribute__((vector_size(16)));
typedef Four Fours;
typedef const uint32_t* FourInputs;
inline Fours fours(const int8_t* w) {
    Fours found;
    memcpy(&found, w, 16);
    return found;
}
inline FourInputs inputs(const uint32_t* row) { return row; }
inline Four add_fours(Four sum, const Fours& w, FourInputs x) {
    for (int i = 0; i < 4; ++i) sum += ((w << (24 - 8 * i)) >> 24) * static_cast<int32_t>(x[i]);
    return sum;
}

#endif

// Arranges a row's inputs in groups of four for `inputs`.
inline void spread_fours(const uint8_t* x, int num_in, uint32_t* out) {
    for (int k = 0; k < num_in; k += 4, out += ROW_WORDS) {
        uint32_t word;
        memcpy(&word, x + k, 4);
        for (int i = 0; i < ROW_WORDS; ++i) {
            if (ROW_WORDS == 1) out[i] = word;
            if (ROW_WORDS == 2) out[i] = word >> (8 * i) & 0x00ff00ffu;
            if (ROW_WORDS == 4) out[i] = word >> (8 * i) & 0xffu;
        }
    }
}

#if !defined(__AVX512F__)

// --- a tile ----------------------------------------------------------------------------------------------------------

// Adds the products of `count` inputs to the sums of R rows, for C registers of outputs at a time. Prefetches
// `ahead`, `each` bytes per step, at most as many as it reads.
template <int R, int C>
void byte_rows(const uint32_t* rows, size_t stride, const int8_t* w, int count, const char* ahead, int each,
               i16 (*sum)[PARTS]) {
    for (int first = 0; first < 4 * TILE; first += C * static_cast<int>(sizeof(Four))) {
        Four acc[R][C];
        const auto at = [&](int r, int c) { return reinterpret_cast<char*>(sum[r]) + first + c * sizeof(Four); };
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) memcpy(&acc[r][c], at(r, c), sizeof(Four));
        const int8_t* from = w + first;
        const uint32_t* x = rows;
        for (int k = 0; k < count; k += 4, from += 4 * TILE, x += ROW_WORDS, ahead += each) {
#pragma GCC unroll 4
            for (size_t line = 0; line < C * sizeof(Four); line += 64) __builtin_prefetch(ahead + line);
            Fours weights[C];
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) weights[c] = fours(from + c * static_cast<int>(sizeof(Four)));
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                const FourInputs own = inputs(x + r * stride);
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) acc[r][c] = add_fours(acc[r][c], weights[c], own);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) memcpy(at(r, c), &acc[r][c], sizeof(Four));
    }
}

// One row reads whole tiles, in the order of memory: with less arithmetic to wait for, prefetched weights would be needed too
// soon if parts of a tile took turns.
constexpr int columns_of_rows(int num) { return num == 1 ? 4 * TILE / static_cast<int>(sizeof(Four)) : COLUMNS; }

// The same for 1 to MANY_BYTES rows.
template <int R = 1>
void some_bytes(int num, const uint32_t* rows, size_t stride, const int8_t* w, int count, const char* ahead, int each,
                i16 (*sum)[PARTS]) {
    if (num == R) return byte_rows<R, columns_of_rows(R)>(rows, stride, w, count, ahead, each, sum);
    if constexpr (R < MANY_BYTES) some_bytes<R + 1>(num, rows, stride, w, count, ahead, each, sum);
}

// One tile of a matrix times all rows, arranged and `stride` words apart; `num_in` is a multiple of four. Rows share a chunk
// of the tile that fits in the L1 cache together with the next one, which they prefetch.
void narrow_sums(const uint32_t* rows, size_t stride, const int8_t* w, int num_in, int count, i16 (*sums)[PARTS]) {
    constexpr int CHUNK = 256;
    memset(static_cast<void*>(sums), 0, sizeof(sums[0]) * count);
    const int passes = (count + MANY_BYTES - 1) / MANY_BYTES;
    for (int from = 0; from < num_in; from += CHUNK) {
        const int inputs = std::min(num_in - from, CHUNK);
        const int steps = inputs / 4 * (4 * TILE / static_cast<int>(sizeof(Four))) / columns_of_rows(count);
        const int8_t* part = w + static_cast<size_t>(from) * TILE;
        const char* next = reinterpret_cast<const char*>(part + static_cast<size_t>(inputs) * TILE);
        const int each = (inputs * TILE + steps * passes - 1) / (steps * passes);
        for (int pass = 0; pass < passes; ++pass) {
            const int first = static_cast<int>(static_cast<int64_t>(count) * pass / passes);
            const int num = static_cast<int>(static_cast<int64_t>(count) * (pass + 1) / passes) - first;
            const uint32_t* own = rows + first * stride + static_cast<size_t>(from) / 4 * ROW_WORDS;
            some_bytes(num, own, stride, part, inputs, next, each, sums + first);
            next += static_cast<size_t>(steps) * each;
        }
    }
}

#endif

}  // namespace
