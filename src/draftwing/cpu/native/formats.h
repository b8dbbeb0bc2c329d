// Weight formats.
//
// A matrix is stored in tiles of 64 outputs, interleaved for each input or block of inputs. In every format weights are
// widened to float32 exactly.

#pragma once

#include "lanes.h"

namespace {

enum Format : int32_t {  // see layout.py
    FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, Q8_0 = 4, Q4_0 = 5, Q4_1 = 6, Q4_K = 7, Q5_K = 8, Q6_K = 9,
    IQ4_NL = 10, IQ4_XS = 11, MXFP4 = 12,
    BYTES = -1, EXPONENTS = -2  // parts of blocks
};

// --- narrow numbers -------------------------------------------------------------------------------------------

template <typename W = w16> ALWAYS_INLINE W words(const char* from) {
    if constexpr (sizeof(W) == REGISTER) return one_register<W>(from);
    else return from_memory<W>(from);
}

// A register of finite half-precision numbers.
ALWAYS_INLINE Floats register_of_halves(const char* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__aarch64__)
    return (Floats)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(from))));
#else
    typedef uint16_t Shorts __attribute__((vector_size(REGISTER / 2)));
    Shorts shorts;
    memcpy(&shorts, from, sizeof(shorts));
    const Words bits = __builtin_convertvector(shorts, Words);
    return (Floats)((Words)((Floats)((bits & 0x7fff) << 13) * 0x1p112f) | (bits & 0x8000) << 16);
#endif
}

// A `V` whose registers are `part` of their byte offsets.
template <typename V, typename F> ALWAYS_INLINE V by_registers(F part) {
    if constexpr (sizeof(V) == REGISTER) {
        return (V)part(0);
    } else {
        V found;
        for (size_t at = 0; at < sizeof(V); at += REGISTER) {
            const auto one = part(at);
            memcpy(reinterpret_cast<char*>(&found) + at, &one, REGISTER);
        }
        return found;
    }
}

template <typename V = v16> ALWAYS_INLINE V halves(const char* from) {
    return by_registers<V>([&](size_t at) __attribute__((always_inline)) { return register_of_halves(from + at / 2); });
}

ALWAYS_INLINE Words register_of_bytes(const char* from) {
#if defined(__AVX512F__)  // GCC widens one byte after another otherwise
    return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    typedef uint8_t Quarter __attribute__((vector_size(REGISTER / 4)));
    Quarter part;
    memcpy(&part, from, sizeof(part));
    return __builtin_convertvector(part, Words);
#endif
}

template <typename W> ALWAYS_INLINE W bytes(const char* from) {
    return by_registers<W>([&](size_t at) __attribute__((always_inline)) { return register_of_bytes(from + at / 4); });
}

// The entry of a table of 16 bytes for each byte of `indices`, from 0 to 15.
ALWAYS_INLINE Words register_of_entries(const uint8_t* table, Words indices) {
#if defined(__AVX512BW__)
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return (Words)_mm512_shuffle_epi8(all, (__m512i)indices);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return (Words)_mm256_shuffle_epi8(all, (__m256i)indices);
#elif defined(__aarch64__)
    return (Words)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)indices);
#else
    uint8_t each[REGISTER];
    memcpy(each, &indices, REGISTER);
    for (uint8_t& index : each) index = table[index];
    return one_register<Words>(each);
#endif
}

template <typename W> ALWAYS_INLINE W entries(const uint8_t* table, const W& indices) {
    return by_registers<W>([&](size_t at) __attribute__((always_inline)) {
        return register_of_entries(table, one_register<Words>(reinterpret_cast<const char*>(&indices) + at));
    });
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

template <typename W> ALWAYS_INLINE auto unsigned_bytes(W word, int which) {
    return numbers_of((typename Like<W>::Whole)(word >> (8 * which) & 255u));
}
template <typename W> ALWAYS_INLINE auto signed_bytes(W word, int which) {
    return numbers_of((typename Like<W>::Whole)(word << (24 - 8 * which)) >> 24);
}

// --- plain numbers ---------------------------------------------------------------------------------------------------
// Each format has GROUP inputs whose weights are read together, in GROUP_BYTES of a tile, and `weight` of input `i` of a
// group and outputs 16 * part to 16 * part + 15. CHUNK: inputs that stay in the cache while many rows are multiplied.

struct Float32 {
    static constexpr bool IS_BLOCKS = false;
    static constexpr int GROUP = 1, GROUP_BYTES = 4 * TILE, CHUNK = 32;
    typedef v16 Bits;
    static ALWAYS_INLINE Bits bits(const char* group, int part) { return load(reinterpret_cast<const float*>(group) + 16 * part); }
    static ALWAYS_INLINE v16 weight(Bits bits, int) { return bits; }
};

struct Float16 {
    static constexpr bool IS_BLOCKS = false;
    static constexpr int GROUP = 1, GROUP_BYTES = 2 * TILE, CHUNK = 64;
    typedef v16 Bits;
    static ALWAYS_INLINE Bits bits(const char* group, int part) { return halves(group + 32 * part); }
    static ALWAYS_INLINE v16 weight(Bits bits, int) { return bits; }
};

struct BFloat16 {  // two inputs in a word
    static constexpr bool IS_BLOCKS = false;
    static constexpr int GROUP = 2, GROUP_BYTES = 4 * TILE, CHUNK = 64;
    typedef w16 Bits;
    static ALWAYS_INLINE Bits bits(const char* group, int part) { return words(group + 64 * part); }
    static ALWAYS_INLINE v16 weight(Bits bits, int i) { return (v16)(i ? bits & 0xffff0000u : bits << 16); }
};

// --- blocks ----------------------------------------------------------------------------------------------------------
// Each format has blocks of INPUTS, of which UNIT share a scale and an offset; W words of 32 bits, H numbers of 16 and B of 8
// per block, interleaved in a tile for 64 outputs. A weight is (level - CENTER) * factor + offset, with unsigned levels. `bits` hold the
// levels of four inputs of a register W of outputs, number `place` of a tile's, and `levels` makes bytes of them. In
// float32 arithmetic CHUNK inputs (16 KB) are widened at a time.

template <typename W> struct Scale {
    typename Like<W>::Number factor, offset;
};

template <int I, int U, int W, int H, int B = 0> struct Blocks {
    static constexpr bool IS_BLOCKS = true, HAS_OFFSET = false;
    static constexpr int CHUNK = 64, INPUTS = I, UNIT = U, UNITS = I / U, BYTES = TILE * (4 * W + 2 * H + B);
    template <typename T> static ALWAYS_INLINE T word(const char* block, int which, int place) {
        return words<T>(block + 4 * TILE * which + sizeof(T) * place);
    }
    template <typename T> static ALWAYS_INLINE auto half(const char* block, int which, int place) {
        return halves<typename Like<T>::Number>(block + 4 * TILE * W + 2 * TILE * which + sizeof(T) / 2 * place);
    }
    template <typename T> static ALWAYS_INLINE T byte(const char* block, int which, int place) {
        return bytes<T>(block + TILE * (4 * W + 2 * H + which) + sizeof(T) / 4 * place);
    }
    template <typename T> static ALWAYS_INLINE T levels(T bits) { return bits; }
    static ALWAYS_INLINE v16 weight(w16 bits, int i, const Scale<w16>& own) { return unsigned_bytes(bits, i) * own.factor + own.offset; }
};

struct Q8_0Blocks : Blocks<32, 32, 8, 1> {
    static constexpr int MAX_LEVEL = 255, CENTER = 128;
    template <typename W = w16> static ALWAYS_INLINE Scale<W> scale(const char* block, int, int place) {
        return {half<W>(block, 0, place), typename Like<W>::Number{}};
    }
    template <typename W = w16> static ALWAYS_INLINE W bits(const char* block, int, int four, int place) {
        return word<W>(block, four, place);
    }
    template <typename W> static ALWAYS_INLINE W levels(W bits) { return bits ^ 0x80808080u; }
    static ALWAYS_INLINE v16 weight(w16 bits, int i, const Scale<w16>& own) { return signed_bytes(bits, i) * own.factor; }
};

struct Nibbles {
    static constexpr int MAX_LEVEL = 15;
    template <typename W> static ALWAYS_INLINE W levels(W bits) { return bits & 0x0f0f0f0fu; }
    static ALWAYS_INLINE v16 weight(w16 bits, int i, const Scale<w16>& own) { return nibbles<0>(bits, 8 * i) * own.factor + own.offset; }
};

// 4-bit levels: the first half of a block in the low bits, the second in the high bits.
template <int H> struct Halved : Blocks<32, 32, 4, H>, Nibbles {
    using Nibbles::levels, Nibbles::weight;
    template <typename W = w16> static ALWAYS_INLINE W bits(const char* block, int, int four, int place) {
        return Halved::template word<W>(block, four & 3, place) >> (four & 4);
    }
};

struct Q4_0Blocks : Halved<1> {
    static constexpr int CENTER = 8;
    template <typename W = w16> static ALWAYS_INLINE Scale<W> scale(const char* block, int, int place) {
        return {half<W>(block, 0, place), typename Like<W>::Number{}};
    }
    static ALWAYS_INLINE v16 weight(w16 bits, int i, const Scale<w16>& own) { return nibbles<CENTER>(bits, 8 * i) * own.factor; }
};

struct Q4_1Blocks : Halved<2> {
    static constexpr bool HAS_OFFSET = true;
    static constexpr int CENTER = 0;
    template <typename W = w16> static ALWAYS_INLINE Scale<W> scale(const char* block, int, int place) {
        return {half<W>(block, 0, place), half<W>(block, 1, place)};
    }
};

// Q4_K and Q5_K: for every 32 inputs a 6-bit scale and a 6-bit offset, packed in three words, times one factor each.
template <int W> struct Packed6 : Blocks<256, 32, W, 2> {
    typedef Blocks<256, 32, W, 2> Base;
    static constexpr bool HAS_OFFSET = true;
    static constexpr int CENTER = 0;
    template <typename T = w16> static ALWAYS_INLINE Scale<T> scale(const char* block, int unit, int place) {
        typedef typename Like<T>::Whole Whole;
        const int shift = 8 * (unit & 3);
        const T low = Base::template word<T>(block, 0, place) >> shift, high = Base::template word<T>(block, 1, place) >> shift;
        T factor, offset;
        if (unit < 4) {
            factor = low & 63u, offset = high & 63u;
        } else {
            const T both = Base::template word<T>(block, 2, place) >> shift;
            factor = (both & 15u) | (low & 0xc0u) >> 2;
            offset = (both >> 4 & 15u) | (high & 0xc0u) >> 2;
        }
        return {numbers_of((Whole)factor) * Base::template half<T>(block, 0, place),
                numbers_of((Whole)offset) * -Base::template half<T>(block, 1, place)};
    }
};

struct Q4_KBlocks : Packed6<35>, Nibbles {
    using Nibbles::levels, Nibbles::weight;
    template <typename W = w16> static ALWAYS_INLINE W bits(const char* block, int unit, int four, int place) {
        return word<W>(block, 3 + 8 * (unit / 2) + four, place) >> (4 * (unit & 1));
    }
};

struct Q5_KBlocks : Packed6<43> {
    static constexpr int MAX_LEVEL = 31;
    template <typename W = w16> static ALWAYS_INLINE W bits(const char* block, int unit, int four, int place) {
        const W low = word<W>(block, 11 + 8 * (unit / 2) + four, place) >> (4 * (unit & 1));
        return (low & 0x0f0f0f0fu) | (word<W>(block, 3 + four, place) >> unit & 0x01010101u) << 4;
    }
};

struct Q6_KBlocks : Blocks<256, 16, 52, 1> {
    static constexpr int MAX_LEVEL = 63, CENTER = 32;
    template <typename W = w16> static ALWAYS_INLINE Scale<W> scale(const char* block, int unit, int place) {
        const auto factor = half<W>(block, 0, place) * signed_bytes(word<W>(block, 48 + unit / 4, place), unit & 3);
        return {factor, factor * -static_cast<float>(CENTER)};
    }
    template <typename W = w16> static ALWAYS_INLINE W bits(const char* block, int unit, int four, int place) {
        const int half = unit / 8, group = unit % 8 / 2, at = unit % 2 * 4 + four;
        const W low = word<W>(block, 16 * half + 8 * (group & 1) + at, place) >> (4 * (group >> 1));
        const W high = word<W>(block, 32 + 8 * half + at, place) >> (2 * group);
        return (low & 0x0f0f0f0fu) | (high & 0x03030303u) << 4;
    }
};

// 4-bit indices into a table of levels, those of the first 16 inputs of a unit in the low bits.
template <typename T, int I, int H, int B> struct Tabled : Blocks<I, 32, I / 8, H, B> {
    template <typename W = w16> static ALWAYS_INLINE W bits(const char* block, int unit, int four, int place) {
        const W word = Tabled::template word<W>(block, 4 * unit + (four & 3), place);
        return entries(T::TABLE, word >> (four & 4) & 0x0f0f0f0fu);
    }
    static ALWAYS_INLINE v16 weight(w16 bits, int i, const Scale<w16>& own) {
        return (unsigned_bytes(bits, i) - static_cast<float>(T::CENTER)) * own.factor;
    }
};

struct Uneven {  // more levels near zero
    static constexpr int MAX_LEVEL = 241, CENTER = 128;
    static constexpr uint8_t TABLE[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
};

struct IQ4_NLBlocks : Tabled<Uneven, 32, 1, 0>, Uneven {
    template <typename W = w16> static ALWAYS_INLINE Scale<W> scale(const char* block, int, int place) {
        return {half<W>(block, 0, place), typename Like<W>::Number{}};
    }
};

// For every 32 inputs a 6-bit scale, its low 4 bits behind the high 2 bits of all.
struct IQ4_XSBlocks : Tabled<Uneven, 256, 1, 6>, Uneven {
    template <typename W = w16> static ALWAYS_INLINE Scale<W> scale(const char* block, int unit, int place) {
        const W low = byte<W>(block, 2 + unit / 2, place) >> (4 * (unit & 1)) & 15u;
        const W high = byte<W>(block, unit / 4, place) >> (2 * (unit & 3)) & 3u;
        const auto whole = numbers_of((typename Like<W>::Whole)(low | high << 4)) - 32.0f;
        return {whole * half<W>(block, 0, place), typename Like<W>::Number{}};
    }
};

// Numbers of 4 bits with 2 of exponent and one of mantissa, doubled, times a power of two: 2^(exponent - 128).
struct Fp4 {
    static constexpr int MAX_LEVEL = 24, CENTER = 12;
    static constexpr uint8_t TABLE[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
};

struct MXFP4Blocks : Tabled<Fp4, 32, 0, 1>, Fp4 {
    template <typename W = w16> static ALWAYS_INLINE Scale<W> scale(const char* block, int, int place) {
        typedef typename Like<W>::Number Number;
        const W exponent = byte<W>(block, 0, place), half = exponent >> 1;  // the power may be subnormal, its factors are not
        return {(Number)((half + 63u) << 23) * (Number)((exponent - half + 63u) << 23), Number{}};
    }
};

}  // namespace
