// A tile of a matrix times rows, for all weight formats.
//
// Each output is summed along its inputs in float32, one product after another, so the bits equal those of the float32
// matrix. (8-bit rows times 8-bit weights are integer sums.)

#pragma once

#include <algorithm>
#include <type_traits>

#include "bytes.h"
#include "formats.h"

namespace {

// --- a tile times few rows -------------------------------------------------------------------------------------------

#if defined(__AVX512F__)  // see bytes.h for narrower registers

// Adds sums of four products of unsigned and signed bytes to 32 bits: exact in any order.
inline i16 dot4(i16 acc, int32_t four, const int8_t* w) {
#if defined(__AVX512VNNI__)
    return (i16)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32(four), _mm512_loadu_si512(w));
#elif defined(__AVX512BW__)  // widened to 16 bits: the sum of two byte products would not fit
    const __m512i all = _mm512_loadu_si512(w), value = _mm512_set1_epi32(four), low = _mm512_set1_epi32(0x00ff00ff);
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8), odd = _mm512_srai_epi16(all, 8);
    const __m512i sum = _mm512_add_epi32((__m512i)acc, _mm512_madd_epi16(even, _mm512_and_si512(value, low)));
    return (i16)_mm512_add_epi32(sum, _mm512_madd_epi16(odd, _mm512_srli_epi16(value, 8)));
#else
    const uint8_t* x = reinterpret_cast<const uint8_t*>(&four);
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 4; ++j) acc[i] += static_cast<int32_t>(x[j]) * static_cast<int32_t>(w[4 * i + j]);
    return acc;
#endif
}

struct Bytes {
    typedef i16 Lanes;
    typedef uint8_t Row;
    typedef int8_t Weight;
    static constexpr int STEP = 4;
    static constexpr int BLOCK = 128;  // of a part of a tile that stays in the L1 cache, see tile_sums
    static inline int32_t value_of(const uint8_t* x) {
        int32_t four;
        memcpy(&four, x, 4);
        return four;
    }
    static inline i16 add(i16 sum, int32_t value, const int8_t* w) { return dot4(sum, value, w); }
};

// Adds the products of `count` inputs to the sums of R rows. Prefetches `ahead`, LINES lines per step: for
// several rows of bytes only into the L2 cache, since the L1 cache has few line fill buffers.
template <typename T, int R, int LINES>
inline void tile_product(const typename T::Row* x, size_t stride, const typename T::Weight* w, int count, const char* ahead,
                         typename T::Lanes (*sum)[PARTS]) {
    typename T::Lanes acc[R][PARTS];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < PARTS; ++c) acc[r][c] = sum[r][c];
    constexpr int WIDE = 16 * T::STEP, NEAR = T::STEP > 1 && R > 2 ? 2 : 3;
    for (int k = 0; k < count; k += T::STEP, w += TILE * T::STEP) {
        for (int line = 0; line < LINES; ++line, ahead += 64) __builtin_prefetch(ahead, 0, NEAR);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const auto value = T::value_of(x + r * stride + k);
#pragma GCC unroll 4
            for (int c = 0; c < PARTS; ++c) acc[r][c] = T::add(acc[r][c], value, w + c * WIDE);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < PARTS; ++c) sum[r][c] = acc[r][c];
}

template <typename T, int LINES>
inline void any_rows(int num, const typename T::Row* x, size_t stride, const typename T::Weight* w, int count,
                     const char* ahead, typename T::Lanes (*sum)[PARTS]) {
    switch (num) {
        case 1: return tile_product<T, 1, LINES>(x, stride, w, count, ahead, sum);
        case 2: return tile_product<T, 2, LINES>(x, stride, w, count, ahead, sum);
        case 3: return tile_product<T, 3, LINES>(x, stride, w, count, ahead, sum);
        case 4: return tile_product<T, 4, LINES>(x, stride, w, count, ahead, sum);
        case 5: return tile_product<T, 5, LINES>(x, stride, w, count, ahead, sum);
        case 6: return tile_product<T, 6, LINES>(x, stride, w, count, ahead, sum);
    }
}

// One tile of a matrix times all rows. If rows take several passes, they share a part of the tile that fits in the L1 cache
// together with the next one, which they prefetch, so that memory and arithmetic overlap. (Each line read from a more distant
// cache would occupy one of the few line fill buffers.)
template <typename T>
void tile_sums(const typename T::Row* x, size_t stride, const typename T::Weight* w, int num_in, int count,
               typename T::Lanes (*sums)[PARTS]) {
    memset(sums, 0, sizeof(sums[0]) * count);
    const int passes = (count + MAX_ROWS - 1) / MAX_ROWS;
    if (passes == 1) {
        const char* ahead = reinterpret_cast<const char*>(w + 24 * T::STEP * TILE);
        return any_rows<T, 4>(count, x, stride, w, num_in, ahead, sums);
    }
    for (int from = 0; from < num_in; from += T::BLOCK) {
        const int inputs = num_in - from < T::BLOCK ? num_in - from : T::BLOCK;
        const char* next = reinterpret_cast<const char*>(w + static_cast<size_t>(from + inputs) * TILE);
        const size_t step_lines = static_cast<size_t>(inputs) / T::STEP * 64;
        size_t fetched = 0;
        for (int pass = 0; pass < passes; ++pass) {
            const int first = static_cast<int>(static_cast<int64_t>(count) * pass / passes);
            const int num = static_cast<int>(static_cast<int64_t>(count) * (pass + 1) / passes) - first;
            const auto* part = x + first * stride + from;
            const auto* weight = w + static_cast<size_t>(from) * TILE;
            // Four lines per step in total, distributed evenly: 2 2, 2 1 1, or 1 1 1 1.
            if (passes == 2 || (passes == 3 && pass == 0)) {
                any_rows<T, 2>(num, part, stride, weight, inputs, next + fetched, sums + first);
                fetched += 2 * step_lines;
            } else if (pass < 4) {
                any_rows<T, 1>(num, part, stride, weight, inputs, next + fetched, sums + first);
                fetched += step_lines;
            } else {
                any_rows<T, 0>(num, part, stride, weight, inputs, next, sums + first);
            }
        }
    }
}

#endif

// --- a tile in another format than float32 ---------------------------------------------------------------------------

constexpr int AHEAD = 12288;  // prefetch distance in bytes

// Rows per pass over a chunk, at most MANY, and parts of the tile at a time, so that sums stay in registers. With float32
// weights each row adds a load, and with very many rows it is better to read each weight for fewer of them.
#if defined(__AVX512F__)
constexpr int MANY = 12;
template <int R> constexpr int parts_of_rows() { return R <= MAX_ROWS ? PARTS : 2; }
#else
constexpr int MANY = 6;
template <int R> constexpr int parts_of_rows() { return 1; }
#endif

template <int BYTES> inline void fetch(const char* from) {
#pragma GCC unroll 32
    for (int at = 0; at < BYTES; at += 64) __builtin_prefetch(from + at);
}

template <typename T, int R>
void plain_rows(const float* x, size_t stride, const char* w, int num_in, v16 (*sum)[PARTS]) {
    v16 acc[R][PARTS];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < PARTS; ++c) acc[r][c] = sum[r][c];
    const auto group = [&](int k, int count) __attribute__((always_inline)) {
        typename T::Bits bits[PARTS];
        for (int c = 0; c < PARTS; ++c) bits[c] = T::bits(w, c);
#pragma GCC unroll 2
        for (int i = 0; i < count; ++i) {
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const v16 value = spread_from(x + r * stride + k + i);
#pragma GCC unroll 4
                for (int c = 0; c < PARTS; ++c) acc[r][c] += value * T::weight(bits[c], i);
            }
        }
    };
    int k = 0;
    for (; k + T::GROUP <= num_in; k += T::GROUP, w += T::GROUP_BYTES) {
        fetch<T::GROUP_BYTES>(w + AHEAD);
        group(k, T::GROUP);
    }
    if (k < num_in) group(k, num_in - k);
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < PARTS; ++c) sum[r][c] = acc[r][c];
}

// Widens the inputs of a tile from `from` on to float32: (count, 64).
template <typename T> void widen(const char* w, int from, int count, float* out) {
    if constexpr (T::IS_BLOCKS) {
        for (int k = from; k < from + count; k += T::UNIT, out += T::UNIT * TILE) {
            const char* block = w + static_cast<size_t>(k / T::INPUTS) * T::BYTES;
            const int unit = k % T::INPUTS / T::UNIT;
            for (int part = 0; part < PARTS; ++part) {
                const Scale<w16> scale = T::scale(block, unit, part);
                for (int four = 0; four < T::UNIT / 4; ++four) {
                    const auto bits = T::bits(block, unit, four, part);
#pragma GCC unroll 4
                    for (int i = 0; i < 4; ++i) store(out + (4 * four + i) * TILE + 16 * part, T::weight(bits, i, scale));
                }
            }
        }
    } else {
        w += static_cast<size_t>(from) / T::GROUP * T::GROUP_BYTES;
        for (int k = 0; k < count; k += T::GROUP, w += T::GROUP_BYTES, out += T::GROUP * TILE) {
            for (int part = 0; part < PARTS; ++part) {
                const auto bits = T::bits(w, part);
                for (int i = 0; i < std::min(T::GROUP, count - k); ++i) store(out + i * TILE + 16 * part, T::weight(bits, i));
            }
        }
    }
}

// Bytes of a tile with `num_in` inputs.
template <typename T> constexpr size_t tile_bytes(int num_in) {
    if constexpr (T::IS_BLOCKS) return static_cast<size_t>(num_in) * T::BYTES / T::INPUTS;
    else return (static_cast<size_t>(num_in) + T::GROUP - 1) / T::GROUP * T::GROUP_BYTES;
}

// Prefetches the next weights at an even rate: lines per step, or bytes if a step is short, so that memory is neither idle nor
// waited for.
struct Fetch {
#if defined(__AVX512F__)
    static constexpr int UNIT = 64;  // bytes: whole lines
#else
    static constexpr int UNIT = 1;
#endif
    const char* from;
    int each;  // units per step

    // Distributes `left` bytes over steps.
    static int evenly(int64_t left, int64_t steps) {
        return static_cast<int>((left + UNIT * steps - 1) / std::max<int64_t>(1, UNIT * steps));
    }
    inline void step() {
        for (int line = 0; line < (UNIT == 1 ? 1 : each); ++line, from += UNIT == 1 ? each : UNIT) __builtin_prefetch(from);
    }
};

// Adds the products of `count` inputs to the sums of R rows, and prefetches `ahead`.
template <typename T, int R>
void tall_rows(const float* x, size_t stride, const char* w, int count, Fetch ahead, v16 (*sum)[PARTS]) {
    constexpr int WIDE = parts_of_rows<R>();
    for (int part = 0; part < PARTS; part += WIDE) {
        v16 acc[R][WIDE];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < WIDE; ++c) acc[r][c] = sum[r][part + c];
        const char* from = w;
        const auto group = [&](int k, int inputs) __attribute__((always_inline)) {
            typename T::Bits bits[WIDE];
            for (int c = 0; c < WIDE; ++c) bits[c] = T::bits(from, part + c);
#pragma GCC unroll 2
            for (int i = 0; i < inputs; ++i) {
                v16 weight[WIDE];
                for (int c = 0; c < WIDE; ++c) weight[c] = T::weight(bits[c], i), hold(weight[c]);
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    const v16 value = spread_from(x + r * stride + k + i);
#pragma GCC unroll 4
                    for (int c = 0; c < WIDE; ++c) acc[r][c] += value * weight[c];
                }
            }
        };
        int k = 0;
        for (; k + T::GROUP <= count; k += T::GROUP, from += T::GROUP_BYTES) {
            ahead.step();
            group(k, T::GROUP);
        }
        if (k < count) group(k, count - k);
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < WIDE; ++c) sum[r][part + c] = acc[r][c];
    }
}

// The same for 1 to MANY rows.
template <typename T, int R = 1>
void some_rows(int num, const float* x, size_t stride, const char* w, int count, Fetch ahead, v16 (*sum)[PARTS]) {
    if (num == R) return tall_rows<T, R>(x, stride, w, count, ahead, sum);
    if constexpr (R < MANY) some_rows<T, R + 1>(num, x, stride, w, count, ahead, sum);
}

thread_local Scratch widened_weights;

// A tile times all rows. Few rows of plain numbers are summed in registers over all inputs. Others share a chunk of the tile,
// widened once for all of them if that takes work, and prefetch the next one, so that memory and arithmetic overlap.
template <typename T>
void row_sums(const float* x, size_t stride, const char* w, int num_in, int count, v16 (*sums)[PARTS]) {
    memset(static_cast<void*>(sums), 0, sizeof(sums[0]) * count);
#if defined(__AVX512F__)
    constexpr bool AS_IS = !T::IS_BLOCKS;
    if constexpr (AS_IS) {
        switch (count) {
            case 1: return plain_rows<T, 1>(x, stride, w, num_in, sums);
            case 2: return plain_rows<T, 2>(x, stride, w, num_in, sums);
            case 3: return plain_rows<T, 3>(x, stride, w, num_in, sums);
            case 4: return plain_rows<T, 4>(x, stride, w, num_in, sums);
            case 5: return plain_rows<T, 5>(x, stride, w, num_in, sums);
            case 6: return plain_rows<T, 6>(x, stride, w, num_in, sums);
        }
    }
#else
    constexpr bool AS_IS = std::is_same_v<T, Float32>;
    if constexpr (!AS_IS && !T::IS_BLOCKS)
        if (count == 1) return plain_rows<T, 1>(x, stride, w, num_in, sums);
#endif
    typedef std::conditional_t<AS_IS, T, Float32> Kind;
    const int most = count > MANY && std::is_same_v<Kind, Float32> ? std::min(MANY, 6) : MANY;
    const int passes = (count + most - 1) / most;
    float* wide = AS_IS ? nullptr : widened_weights.get<float>(T::CHUNK * TILE);
    for (int from = 0; from < num_in; from += T::CHUNK) {
        const int inputs = std::min(num_in - from, T::CHUNK);
        const char* part = w + tile_bytes<T>(from);
        const char* next = w + tile_bytes<T>(from + inputs);
        const char* last = next + tile_bytes<T>(inputs);  // end of the prefetched chunk
        if constexpr (!AS_IS) widen<T>(w, from, inputs, wide);
        for (int pass = 0; pass < passes; ++pass) {
            const int first = static_cast<int>(static_cast<int64_t>(count) * pass / passes);
            const int num = static_cast<int>(static_cast<int64_t>(count) * (pass + 1) / passes) - first;
            const float* rows = x + first * stride + from;
            // Distributed evenly over all passes.
            const int steps = inputs / Kind::GROUP * (num <= MAX_ROWS ? PARTS / parts_of_rows<1>() : PARTS / parts_of_rows<MANY>());
            const Fetch ahead{next, Fetch::evenly(std::max<int64_t>(last - next, 0), static_cast<int64_t>(steps) * (passes - pass))};
            if constexpr (AS_IS) some_rows<Kind>(num, rows, stride, part, inputs, ahead, sums + first);
            else some_rows<Kind>(num, rows, stride, reinterpret_cast<const char*>(wide), inputs, ahead, sums + first);
            next += static_cast<int64_t>(steps) * ahead.each * Fetch::UNIT;
        }
    }
}

inline int padded_inputs(int num_in) { return (num_in + 3) / 4 * 4; }

// Calls `with` a value of the type of a format; not for int8.
template <typename F> inline void with_format(int32_t format, F with) {
    switch (format) {
        case FLOAT32: return with(Float32{});
        case BFLOAT16: return with(BFloat16{});
        case FLOAT16: return with(Float16{});
        case Q8_0: return with(Q8_0Blocks{});
        case Q4_0: return with(Q4_0Blocks{});
        case Q4_1: return with(Q4_1Blocks{});
        case Q4_K: return with(Q4_KBlocks{});
        case Q5_K: return with(Q5_KBlocks{});
        case Q6_K: return with(Q6_KBlocks{});
        case IQ4_NL: return with(IQ4_NLBlocks{});
        case IQ4_XS: return with(IQ4_XSBlocks{});
        case MXFP4: return with(MXFP4Blocks{});
    }
}

// One tile of a matrix times float32 rows: (count, 64).
void float_tile(int32_t format, const void* weight, int tile, int num_in, const float* x, size_t stride, int count,
                v16 (*out)[PARTS]) {
    with_format(format, [&](auto kind) {
        typedef decltype(kind) T;
        const char* w = static_cast<const char*>(weight) + static_cast<size_t>(tile) * tile_bytes<T>(num_in);
        row_sums<T>(x, stride, w, num_in, count, out);
    });
}

// Packs rows (num_out, row_stride) into tiles: `outer` blocks of `groups` numbers of each row, each number interleaved for 64
// rows, zeros for missing rows. Returns whether all numbers are finite; one with all bits of an exponent mask set is not.
template <typename N, N... EXPONENTS>
bool pack_tiles(const char* rows, int64_t row_stride, int64_t num_out, int64_t outer, int64_t outer_stride, int64_t groups,
                char* tiles, int64_t tile_stride, int64_t block_stride) {
    constexpr int64_t WIDE = 256 / sizeof(N);  // numbers of each row at a time, so that their tiles stay in the L1 cache
    N worst = 0;
    for (int64_t first = 0; first < num_out; first += TILE, tiles += tile_stride) {
        const int64_t lanes = num_out - first < TILE ? num_out - first : TILE;
        for (int64_t o = 0; o < outer; ++o) {
            for (int64_t g = 0; g < groups; g += WIDE) {
                const int64_t count = groups - g < WIDE ? groups - g : WIDE;
                N* to = reinterpret_cast<N*>(tiles + o * block_stride) + g * TILE;
                const char* from = rows + first * row_stride + o * outer_stride + g * sizeof(N);
                for (int64_t lane = 0; lane < TILE; ++lane, from += row_stride) {
                    N part[WIDE] = {};
                    fetch<256>(from + 8 * row_stride);
                    if (lane < lanes) memcpy(part, from, count * sizeof(N));
                    for (int64_t i = 0; i < count; ++i) to[i * TILE + lane] = part[i];
                    for (int64_t i = 0; i < WIDE; ++i) worst |= (N{} | ... | static_cast<N>((part[i] & EXPONENTS) == EXPONENTS));
                }
            }
        }
    }
    return worst == 0;
}

// One output of a matrix, as a row: (num_in).
void output_row(int32_t format, const void* weight, int64_t output, int num_in, float* row) {
    const size_t tile = static_cast<size_t>(output / TILE);
    const int lane = static_cast<int>(output % TILE);
    with_format(format, [&](auto kind) {
        typedef decltype(kind) T;
        const char* w = static_cast<const char*>(weight) + tile * tile_bytes<T>(num_in);
        const int part = lane / 16, own = lane % 16;
        if constexpr (T::IS_BLOCKS) {
            for (int k = 0; k < num_in; k += T::UNIT) {
                const char* block = w + static_cast<size_t>(k / T::INPUTS) * T::BYTES;
                const int unit = k % T::INPUTS / T::UNIT;
                const Scale<w16> scale = T::scale(block, unit, part);
                for (int i = 0; i < T::UNIT; ++i)
                    row[k + i] = T::weight(T::bits(block, unit, i / 4, part), i % 4, scale)[own];
            }
        } else {
            for (int k = 0; k < num_in; ++k) {
                const auto bits = T::bits(w + static_cast<size_t>(k / T::GROUP) * T::GROUP_BYTES, part);
                row[k] = T::weight(bits, k % T::GROUP)[own];
            }
        }
    });
}

}  // namespace
