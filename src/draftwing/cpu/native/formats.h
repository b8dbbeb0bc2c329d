// Weight formats.
//
// A matrix is stored in tiles of 64 outputs, interleaved for each input or block of inputs. In every format weights are
// widened to float32 exactly.

#pragma once

#include "lanes.h"

namespace {

enum Format : int32_t {  // see layout.py
    FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, Q8_0 = 4, Q4_0 = 5, Q4_1 = 6, Q4_K = 7, Q5_K = 8, Q6_K = 9
};

// --- narrow numbers -------------------------------------------------------------------------------------------

ALWAYS_INLINE w16 words(const char* from) { return from_memory<w16>(from); }

// 16 finite half-precision numbers.
ALWAYS_INLINE v16 halves(const char* from) {
#if defined(__AVX512F__)
    return (v16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
    v16 found;
    for (int h = 0; h < 2; ++h) {
        const __m256 part = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * h)));
        memcpy(reinterpret_cast<char*>(&found) + 32 * h, &part, 32);
    }
    return found;
#elif defined(__aarch64__)
    v16 found;
    for (int q = 0; q < 4; ++q) {
        const float32x4_t part = vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(from) + 8 * q)));
        memcpy(reinterpret_cast<char*>(&found) + 16 * q, &part, 16);
    }
    return found;
#else
    const w16 bits = words_of(reinterpret_cast<const uint16_t*>(from));
    return (v16)(((w16)((v16)((bits & 0x7fff) << 13) * 0x1p112f)) | ((bits & 0x8000) << 16));
#endif
}

// The four bits of each word from `shift` on, minus `OFFSET` (0 or 8), as numbers.
template <int OFFSET> ALWAYS_INLINE v16 nibbles(w16 word, int shift) {
#if defined(__AVX512F__)
    const v16 table = v16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} - static_cast<float>(OFFSET);
    return (v16)_mm512_permutexvar_ps((__m512i)(word >> shift), (__m512)table);  // table lookup by four bits
#else
    if constexpr (OFFSET == 8) return numbers_of((i16)((word ^ 0x88888888u) << (28 - shift)) >> 28);
    return numbers_of((i16)((word >> shift) & 15));
#endif
}

ALWAYS_INLINE v16 signed_bytes(w16 word, int which) { return numbers_of((i16)(word << (24 - 8 * which)) >> 24); }

// --- plain numbers ---------------------------------------------------------------------------------------------------
// Each format has GROUP inputs whose weights are read together, in GROUP_BYTES of a tile, and `weight` of input `i` of a
// group and outputs 16 * part to 16 * part + 15. CHUNK: inputs that stay in the cache while many rows are multiplied.

struct Float32 {
    static constexpr bool IS_BLOCKS = false;
    static constexpr int GROUP = 1, GROUP_BYTES = 4 * TILE, CHUNK = 32, FEW = 0;
    typedef v16 Bits;
    static ALWAYS_INLINE Bits bits(const char* group, int part) { return load(reinterpret_cast<const float*>(group) + 16 * part); }
    static ALWAYS_INLINE v16 weight(Bits bits, int) { return bits; }
};

struct Float16 {
    static constexpr bool IS_BLOCKS = false;
    static constexpr int GROUP = 1, GROUP_BYTES = 2 * TILE, CHUNK = 64, FEW = 1;
    typedef v16 Bits;
    static ALWAYS_INLINE Bits bits(const char* group, int part) { return halves(group + 32 * part); }
    static ALWAYS_INLINE v16 weight(Bits bits, int) { return bits; }
};

struct BFloat16 {  // two inputs in a word
    static constexpr bool IS_BLOCKS = false;
    static constexpr int GROUP = 2, GROUP_BYTES = 4 * TILE, CHUNK = 64, FEW = 1;
    typedef w16 Bits;
    static ALWAYS_INLINE Bits bits(const char* group, int part) { return words(group + 64 * part); }
    static ALWAYS_INLINE v16 weight(Bits bits, int i) { return (v16)(i ? bits & 0xffff0000u : bits << 16); }
};

// --- blocks ----------------------------------------------------------------------------------------------------------
// Each format has blocks of INPUTS, of which UNIT share a scale and an offset; WORDS of 32 bits and HALVES of 16 per block,
// interleaved in a tile for 64 outputs. `bits` hold the levels of four inputs. For many rows CHUNK inputs (16 KB) are
// widened at a time. FEW: at most this many rows are multiplied while weights are widened, if registers are narrower than
// with AVX-512.

struct Scale {
    v16 factor, offset;
};

template <int I, int U, int W, int H> struct Blocks {
    static constexpr bool IS_BLOCKS = true;
    static constexpr int CHUNK = 64, INPUTS = I, UNIT = U, UNITS = I / U, BYTES = TILE * (4 * W + 2 * H), FEW = 5;
    static ALWAYS_INLINE w16 word(const char* block, int which, int part) { return words(block + 4 * (TILE * which + 16 * part)); }
    static ALWAYS_INLINE v16 half(const char* block, int which, int part) {
        return halves(block + 4 * TILE * W + 2 * (TILE * which + 16 * part));
    }
};

struct Q8_0Blocks : Blocks<32, 32, 8, 1> {
    typedef w16 Bits;
    static ALWAYS_INLINE Scale scale(const char* block, int, int part) { return {half(block, 0, part), v16{}}; }
    static ALWAYS_INLINE Bits bits(const char* block, int, int four, int part) { return word(block, four, part); }
    static ALWAYS_INLINE v16 weight(Bits bits, int i, const Scale& own) { return signed_bytes(bits, i) * own.factor; }
};

// 4-bit levels: the first half of a block in the low bits, the second in the high bits.
template <int H> struct Halved : Blocks<32, 32, 4, H> {
    static ALWAYS_INLINE w16 bits(const char* block, int, int four, int part) {
        return Halved::word(block, four & 3, part) >> (four & 4);
    }
};

struct Q4_0Blocks : Halved<1> {
    typedef w16 Bits;
    static ALWAYS_INLINE Scale scale(const char* block, int, int part) { return {half(block, 0, part), v16{}}; }
    static ALWAYS_INLINE v16 weight(Bits bits, int i, const Scale& own) { return nibbles<8>(bits, 8 * i) * own.factor; }
};

struct Nibbles {
    typedef w16 Bits;
    static ALWAYS_INLINE v16 weight(Bits bits, int i, const Scale& own) { return nibbles<0>(bits, 8 * i) * own.factor + own.offset; }
};

struct Q4_1Blocks : Halved<2>, Nibbles {
    static ALWAYS_INLINE Scale scale(const char* block, int, int part) { return {half(block, 0, part), half(block, 1, part)}; }
};

// Q4_K and Q5_K: for every 32 inputs a 6-bit scale and a 6-bit offset, packed in three words, times one factor each.
template <int W> struct Packed6 : Blocks<256, 32, W, 2> {
    typedef Blocks<256, 32, W, 2> Base;
    static constexpr int FEW = 2;
    static ALWAYS_INLINE Scale scale(const char* block, int unit, int part) {
        const int shift = 8 * (unit & 3);
        const w16 low = Base::word(block, 0, part) >> shift, high = Base::word(block, 1, part) >> shift;
        w16 factor, offset;
        if (unit < 4) {
            factor = low & 63, offset = high & 63;
        } else {
            const w16 both = Base::word(block, 2, part) >> shift;
            factor = (both & 15) | (low & 0xc0) >> 2;
            offset = (both >> 4 & 15) | (high & 0xc0) >> 2;
        }
        return {numbers_of((i16)factor) * Base::half(block, 0, part),
                numbers_of((i16)offset) * -Base::half(block, 1, part)};
    }
};

struct Q4_KBlocks : Packed6<35>, Nibbles {
    static ALWAYS_INLINE Bits bits(const char* block, int unit, int four, int part) {
        return word(block, 3 + 8 * (unit / 2) + four, part) >> (4 * (unit & 1));
    }
};

struct Q5_KBlocks : Packed6<43> {
    struct Bits {
        w16 low, high;
    };
    static ALWAYS_INLINE Bits bits(const char* block, int unit, int four, int part) {
        const w16 low = word(block, 11 + 8 * (unit / 2) + four, part) >> (4 * (unit & 1));
        return {low & 0x0f0f0f0fu, (word(block, 3 + four, part) >> unit & 0x01010101u) << 4};
    }
    static ALWAYS_INLINE v16 weight(const Bits& bits, int i, const Scale& own) {
        return numbers_of((i16)((bits.low | bits.high) >> (8 * i) & 255)) * own.factor + own.offset;
    }
};

struct Q6_KBlocks : Blocks<256, 16, 52, 1> {
    typedef w16 Bits;
    static ALWAYS_INLINE Scale scale(const char* block, int unit, int part) {
        const v16 factor = half(block, 0, part) * signed_bytes(word(block, 48 + unit / 4, part), unit & 3);
        return {factor, factor * -32.0f};
    }
    static ALWAYS_INLINE Bits bits(const char* block, int unit, int four, int part) {
        const int half = unit / 8, group = unit % 8 / 2, place = unit % 2 * 4 + four;
        const w16 low = word(block, 16 * half + 8 * (group & 1) + place, part) >> (4 * (group >> 1));
        const w16 high = word(block, 32 + 8 * half + place, part) >> (2 * group);
        return (low & 0x0f0f0f0fu) | (high & 0x03030303u) << 4;
    }
    static ALWAYS_INLINE v16 weight(Bits bits, int i, const Scale& own) {
        return numbers_of((i16)(bits >> (8 * i) & 255)) * own.factor + own.offset;
    }
};

}  // namespace
