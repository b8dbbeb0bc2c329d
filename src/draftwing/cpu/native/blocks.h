// Rows in 8 bits times weights in blocks, by integer products.
//
// A row is rounded to 255 levels for each unit of inputs that share a weight's scale. Products within a unit are sums of
// integers, exact in any order. Units are added in their order, by operations that are rounded once on every processor. So a
// row's bits depend neither on other rows nor on the processor.

#pragma once

#include <algorithm>

#include "weights.h"

namespace {

constexpr int MAX_ROW_LEVEL = 127;
constexpr float SMALLEST = 0x1p-119f;  // of a unit's largest number: its scale and 1 / its scale are then normal numbers

// A unit of inputs of a row: input i is levels[i] * scale.
template <int UNIT> struct alignas(16) RowUnit {
    int8_t levels[UNIT];
    float scale, sum;  // sum: of the inputs
    int32_t start;  // of the sum of products: the contribution of the weights' center
};

// --- products of four inputs -----------------------------------------------------------------------------------------
// `add_products` adds the sums of products of unsigned levels, at most WIDEST, and four bytes of a row to a register.

ALWAYS_INLINE Words four_of(const int8_t* x) {
    uint32_t four;
    memcpy(&four, x, 4);
    return four - Words{};
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_MATMUL_INT8) || defined(__ARM_FEATURE_DOTPROD)

#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int WIDEST = 127;
#else
constexpr int WIDEST = 255;
#endif

ALWAYS_INLINE Ints add_four(Ints sum, Words levels, const int8_t* x) {
#if defined(__AVX512VNNI__) && defined(__clang__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)levels, (__m512i)four_of(x));
#elif defined(__AVX512VNNI__)  // GCC would broadcast by another instruction: 4 to 16 rows take a fifth longer
    typedef int32_t Four __attribute__((aligned(1), may_alias));
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(levels), "m"(*reinterpret_cast<const Four*>(x)));
    return sum;
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)levels, (__m256i)four_of(x));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (Ints)vusdotq_s32((int32x4_t)sum, (uint8x16_t)levels, (int8x16_t)four_of(x));
#else
    return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)levels, (int8x16_t)four_of(x));
#endif
}

template <int MAX_LEVEL, int FOURS> ALWAYS_INLINE Ints add_products(Ints sum, const Words* levels, const int8_t* x) {
    Ints even = sum, odd{};  // two chains, since each sum waits for the one before
#pragma GCC unroll 8
    for (int four = 0; four < FOURS; ++four) {
        Ints& acc = four & 1 ? odd : even;
        acc = add_four(acc, levels[four], x + 4 * four);
    }
    return even + odd;
}

#elif defined(__AVX2__) && (!defined(__AVX512F__) || defined(__AVX512BW__))

constexpr int WIDEST = 128;
typedef int16_t Halves __attribute__((vector_size(REGISTER)));

// Sums of two products in 16 bits, and sums of two of these in 32 bits.
ALWAYS_INLINE Halves pairs(Words levels, Words x) {
#if defined(__AVX512BW__)
    return (Halves)_mm512_maddubs_epi16((__m512i)levels, (__m512i)x);
#else
    return (Halves)_mm256_maddubs_epi16((__m256i)levels, (__m256i)x);
#endif
}
ALWAYS_INLINE Ints widened(Halves pairs) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
#else
    return (Ints)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
#endif
}

template <int MAX_LEVEL, int FOURS> ALWAYS_INLINE Ints add_products(Ints sum, const Words* levels, const int8_t* x) {
    constexpr int FIT = std::min(FOURS, 32767 / (2 * MAX_LEVEL * MAX_ROW_LEVEL));  // pairs whose sum fits in 16 bits
#pragma GCC unroll 8
    for (int first = 0; first < FOURS; first += FIT) {
        Halves part = pairs(levels[first], four_of(x + 4 * first));
#pragma GCC unroll 8
        for (int four = first + 1; four < first + FIT && four < FOURS; ++four) part += pairs(levels[four], four_of(x + 4 * four));
        sum += widened(part);
    }
    return sum;
}

#else

constexpr int WIDEST = 255;

template <int MAX_LEVEL, int FOURS> ALWAYS_INLINE Ints add_products(Ints sum, const Words* levels, const int8_t* x) {
    for (int four = 0; four < FOURS; ++four)
        for (int i = 0; i < 4; ++i) sum += (Ints)(levels[four] >> (8 * i) & 255u) * static_cast<int32_t>(x[4 * four + i]);
    return sum;
}

#endif

// --- a tile ----------------------------------------------------------------------------------------------------------

constexpr int GROUP = 64;  // rows whose sums stay in the L1 cache

// Scales the products of a row's unit and adds them to the row's sum. Every operation rounds once.
template <typename T>
ALWAYS_INLINE Floats add_scaled(Floats sum, Ints products, const RowUnit<T::UNIT>& x, const Scale<Words>& scale) {
    if constexpr (T::HAS_OFFSET) sum = fused_once(x.sum - Floats{}, scale.offset, sum);
    return fused_once(numbers_of(products) * x.scale, scale.factor, sum);
}

// Adds the products of a unit to the sums (count, 64). Levels stay in registers for all rows; those that are too wide for
// `add_products` are multiplied in two halves of 4 bits.
template <typename T>
ALWAYS_INLINE void add_unit(const RowUnit<T::UNIT>* x, int count, const char* block, int unit, const char* ahead, float* sums) {
    constexpr int PLACES = TILE / LANES, STEP = T::BYTES / T::UNITS / PLACES, FOURS = T::UNIT / 4;
    constexpr bool IS_SPLIT = T::MAX_LEVEL > WIDEST;
    Ints high[IS_SPLIT ? GROUP : 1];
    for (int place = 0; place < PLACES; ++place, ahead += STEP, sums += LANES) {
        fetch<STEP>(ahead);
        Words levels[FOURS];
#pragma GCC unroll 8
        for (int four = 0; four < FOURS; ++four) levels[four] = T::levels(T::template bits<Words>(block, unit, four, place));
        if constexpr (IS_SPLIT) {
            Words halves[FOURS];
            for (int four = 0; four < FOURS; ++four) halves[four] = levels[four] >> 4 & 0x0f0f0f0fu;
            for (int r = 0; r < count; ++r) high[r] = add_products<15, FOURS>(Ints{}, halves, x[r].levels) << 4;
            for (int four = 0; four < FOURS; ++four) levels[four] &= 0x0f0f0f0fu;
        }
        const Scale<Words> scale = T::template scale<Words>(block, unit, place);
        float* to = sums;
        for (int r = 0; r < count; ++r, to += TILE) {
            Ints start = IS_SPLIT ? high[r] : Ints{};
            if constexpr (T::CENTER != 0) start += x[r].start;
            const Ints products = add_products<IS_SPLIT ? 15 : T::MAX_LEVEL, FOURS>(start, levels, x[r].levels);
            const Floats sum = add_scaled<T>(one_register<Floats>(to), products, x[r], scale);
            memcpy(to, &sum, REGISTER);
        }
    }
}

// A tile times rows, whose units are `stride` apart: (count, 64).
template <typename T>
void unit_sums(const RowUnit<T::UNIT>* x, int stride, const char* w, int num_in, int count, float* sums) {
    memset(sums, 0, sizeof(float) * TILE * count);
    for (int first = 0; first < count; first += GROUP, sums += GROUP * TILE) {
        const RowUnit<T::UNIT>* own = x + first;
        const char* block = w;
        for (int k = 0; k < num_in; k += T::INPUTS, block += T::BYTES)
            for (int unit = 0; unit < T::UNITS; ++unit, own += stride)
                add_unit<T>(own, std::min(GROUP, count - first), block, unit, block + AHEAD + unit * (T::BYTES / T::UNITS), sums);
    }
}

// --- rows ------------------------------------------------------------------------------------------------------------

// Rounds a multiple of 16 numbers to levels; returns their scale, which is NaN if a number is NaN or infinite. Adds the levels
// to `sums`.
ALWAYS_INLINE float round_levels(const float* x, int count, int8_t* levels, i16& sums) {
    i16 most{};
    for (int i = 0; i < count; i += 16) most = larger((i16)load(x + i) & 0x7fffffff, most);
    float largest = largest_of((v16)most);
    const float unusual = largest * 0.0f, inverse = largest >= SMALLEST ? MAX_ROW_LEVEL / largest : 0.0f;
    if (largest < SMALLEST) largest = 0.0f;
    for (int i = 0; i < count; i += 16) {
        const i16 whole = nearest_whole(x + i, inverse);
        store_bytes(reinterpret_cast<uint8_t*>(levels) + i, whole);
        sums += whole;
    }
    return largest / MAX_ROW_LEVEL + unusual;
}

ALWAYS_INLINE float round_levels(const float* x, int count, int8_t* levels) {
    i16 sums{};
    return round_levels(x, count, levels, sums);
}

template <typename T> void round_unit(const float* x, RowUnit<T::UNIT>& out) {
    i16 sums{};
    out.scale = round_levels(x, T::UNIT, out.levels, sums);
    const int32_t sum = sum_of(sums);
    out.sum = static_cast<float>(sum) * out.scale;
    out.start = -T::CENTER * sum;
}

// Rounds a row to units `stride` apart.
template <typename T> void round_units(const float* x, int width, int stride, RowUnit<T::UNIT>* out) {
    for (int i = 0; i < width; i += T::UNIT, out += stride) round_unit<T>(x + i, *out);
}

// Calls `with` a value of the type of a format of blocks.
template <typename F> inline void with_blocks(int32_t format, F with) {
    with_format(format, [&](auto kind) {
        if constexpr (decltype(kind)::IS_BLOCKS) with(kind);
    });
}

}  // namespace
