// Sums by the processor's matrix tiles (AMX): 16 rows times 16 outputs times 64 bytes of each in one instruction.
//
// Tiles read weights in the layout of `weights.h`, four bytes of 64 interleaved outputs, so nothing is packed twice. Integer
// sums are exact in any order, and those of bfloat16 use the order of the tiles everywhere (`rounded.h`): results are equal
// with and without tiles.

#pragma once

#include <atomic>

#include "rounded.h"
#include "trial.h"

namespace {

constexpr int TILE_BYTES = 64, TILE_ROWS = 16;  // of a row per instruction; rows per instruction

#if defined(__AMX_INT8__) && defined(__linux__)

std::atomic<bool> tiles_are_on{false};

struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
};

thread_local int tile_rows = 0;  // configured rows of this thread's tiles; negative: see block_tiles.h; 0: tiles are not in use

inline void shape_tiles(int rows) {
    if (tile_rows == rows) return;
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.rows[tile] = tile < 5 ? rows : 16;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
    tile_rows = rows;
}

// Tiles in use make context switches slower.
inline void release_tiles() {
    if (tile_rows == 0) return;
    asm volatile("tilerelease" :::);
    tile_rows = 0;
}

// Tile loads take a plain address: the memory clobber makes the compiler write everything before.
#define TILE_LOAD(tile, from, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(static_cast<size_t>(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(static_cast<size_t>(stride)) : "memory")
#define TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
#define TILE_DOT(sum, rows, weights)                                                         \
    if constexpr (IS_ROUNDED)                                                                \
        asm volatile("tdpbf16ps %%tmm" #weights ", %%tmm" #rows ", %%tmm" #sum ::);          \
    else                                                                                     \
        asm volatile("tdpbusd %%tmm" #weights ", %%tmm" #rows ", %%tmm" #sum ::)

constexpr int WEIGHT_BYTES = TILE_BYTES * TILE;  // for TILE_BYTES of a row
constexpr int SUM_BYTES = 4 * TILE;  // of a row

// Adds the products of `steps` times TILE_BYTES to the sums of the rows that the tiles are shaped for: of bytes, or of
// bfloat16. Prefetches `ahead`, 4 * lines lines per step: into the L2 cache if many rows compete for the L1 cache's line
// fill buffers.
template <bool IS_ROUNDED, bool IS_NEAR>
inline void tile_steps(const char* x, size_t stride, const char* w, int steps, bool is_first, const char* ahead, int lines, char* out) {
    if (is_first) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    } else {
        TILE_LOAD(0, out, SUM_BYTES);
        TILE_LOAD(1, out + 64, SUM_BYTES);
        TILE_LOAD(2, out + 128, SUM_BYTES);
        TILE_LOAD(3, out + 192, SUM_BYTES);
    }
    const auto fetch_lines = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int line = 0; line < lines; ++line, ahead += 64) __builtin_prefetch(ahead, 0, IS_NEAR ? 3 : 2);
    };
    for (int step = 0; step < steps; ++step, x += TILE_BYTES, w += WEIGHT_BYTES) {
        TILE_LOAD(4, x, stride);
        TILE_LOAD(5, w, 4 * TILE);
        fetch_lines();
        TILE_DOT(0, 4, 5);
        TILE_LOAD(6, w + 64, 4 * TILE);
        fetch_lines();
        TILE_DOT(1, 4, 6);
        TILE_LOAD(7, w + 128, 4 * TILE);
        fetch_lines();
        TILE_DOT(2, 4, 7);
        TILE_LOAD(5, w + 192, 4 * TILE);
        fetch_lines();
        TILE_DOT(3, 4, 5);
    }
    TILE_STORE(0, out, SUM_BYTES);
    TILE_STORE(1, out + 64, SUM_BYTES);
    TILE_STORE(2, out + 128, SUM_BYTES);
    TILE_STORE(3, out + 192, SUM_BYTES);
}

#undef TILE_LOAD
#undef TILE_STORE
#undef TILE_ZERO
#undef TILE_DOT

// The sums (count, 64) of the first `steps` times TILE_BYTES of rows, `stride` bytes apart, and a tile of weights. Rows
// and sums have room for `padded_rows`; values after the last row are undefined.
template <bool IS_ROUNDED>
void sums_by_tiles(const char* x, size_t stride, const char* w, int steps, int count, char* sums) {
    const int passes = (count + TILE_ROWS - 1) / TILE_ROWS, each = (count + passes - 1) / passes;
    shape_tiles(each);
    if (passes == 1) return tile_steps<IS_ROUNDED, true>(x, stride, w, steps, true, w + 2 * WEIGHT_BYTES, 16, sums);
    const int chunk = passes <= 5 ? 4 : 8;  // steps whose weights stay in the cache for all passes; sums of very many rows do not
    for (int from = 0; from < steps; from += chunk) {
        const int some = std::min(chunk, steps - from);
        const char* part = w + static_cast<size_t>(from) * WEIGHT_BYTES;
        const char* next = part + static_cast<size_t>(some) * WEIGHT_BYTES;
        for (int pass = 0, left = 16; pass < passes; ++pass) {
            const int lines = (left + passes - pass - 1) / (passes - pass);
            const char* rows = x + pass * each * stride + static_cast<size_t>(from) * TILE_BYTES;
            tile_steps<IS_ROUNDED, false>(rows, stride, part, some, from == 0, next, lines,
                                          sums + static_cast<size_t>(pass) * each * SUM_BYTES);
            next += static_cast<size_t>(some) * lines * 4 * 64;
            left -= lines;
        }
    }
}

// Like `tile_sums<Bytes>`, which is at least as fast for the rows of one pass: tiles add to few sums sequentially.
void byte_sums(const uint8_t* x, size_t stride, const int8_t* w, int num_in, int count, i16 (*sums)[PARTS]) {
    const int steps = num_in / TILE_BYTES, done = steps * TILE_BYTES;
    if (steps == 0 || count <= MAX_ROWS || !tiles_are_on.load(std::memory_order_relaxed))
        return tile_sums<Bytes>(x, stride, w, num_in, count, sums);
    sums_by_tiles<false>(reinterpret_cast<const char*>(x), stride, reinterpret_cast<const char*>(w), steps, count,
                         reinterpret_cast<char*>(sums));
    for (int first = 0; done < num_in && first < count; first += MAX_ROWS)
        any_rows<Bytes, 0>(std::min(MAX_ROWS, count - first), x + first * stride + done, stride,
                           w + static_cast<size_t>(done) * TILE, num_in - done, nullptr, sums + first);
}

// Rows in bfloat16 times a tile: (count, 64).
void rounded_product(const uint16_t* x, size_t stride, const char* w, int num_in, int count, v16 (*sums)[PARTS]) {
#if defined(__AMX_BF16__)
    const int steps = num_in / ROUNDED_INPUTS, done = steps * ROUNDED_INPUTS;
    if (steps > 0 && tiles_are_on.load(std::memory_order_relaxed)) {
        sums_by_tiles<true>(reinterpret_cast<const char*>(x), stride * sizeof(uint16_t), w, steps, count,
                            reinterpret_cast<char*>(sums));
        if (done < num_in) rounded_sums(x + done, stride, w + tile_bytes<BFloat16>(done), num_in - done, count, sums);
        return;
    }
#endif
    memset(sums, 0, sizeof(sums[0]) * count);
    rounded_sums(x, stride, w, num_in, count, sums);
}

// Number of rows and sums to reserve memory for.
inline int padded_rows(int count) { return (count + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; }

// Asks the operating system for permission to use tiles.
bool ask_for_tiles() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0; }

// Returns whether a small product agrees with and without tiles.
bool byte_tiles_are_right() {
    constexpr int IN = 2 * TILE_BYTES + 4, COUNT = 21, STRIDE = IN;
    static uint8_t x[(COUNT + TILE_ROWS) * STRIDE];
    alignas(64) static int8_t w[(IN + 2 * TILE_BYTES) * TILE];
    static i16 found[COUNT + TILE_ROWS][PARTS], wanted[COUNT][PARTS];
    for (int i = 0; i < COUNT * STRIDE; ++i) x[i] = static_cast<uint8_t>(i * 37 + i / 11);
    for (int i = 0; i < IN * TILE; ++i) w[i] = static_cast<int8_t>(i * 73 + i / 7);
    tile_sums<Bytes>(x, STRIDE, w, IN, COUNT, wanted);
    byte_sums(x, STRIDE, w, IN, COUNT, found);
    return memcmp(found, wanted, sizeof(wanted)) == 0;
}

// The same in bfloat16, with sums that depend on the order, and some subnormal numbers.
bool rounded_tiles_are_right() {
    constexpr int IN = 3 * ROUNDED_INPUTS + 5, COUNT = 21, STRIDE = 4 * ROUNDED_INPUTS;
    static uint16_t x[(COUNT + TILE_ROWS) * STRIDE];
    alignas(64) static uint16_t w[(IN + 1) * TILE];
    static v16 found[COUNT + TILE_ROWS][PARTS], wanted[COUNT][PARTS];
    const auto number = [](int i) { return static_cast<uint16_t>((i * 40503u & 0x807f) | (100 + i * 7 % 50) << 7); };
    for (int i = 0; i < COUNT * STRIDE; ++i) x[i] = i % STRIDE < IN ? i % 97 == 0 ? 0x0041 : number(i * 3 + i / 13) : 0;
    for (int i = 0; i < (IN + 1) * TILE; ++i) w[i] = number(i * 5 + i / 17);
    const char* weights = reinterpret_cast<const char*>(w);
    memset(wanted, 0, sizeof(wanted));
    rounded_sums(x, STRIDE, weights, IN, COUNT, wanted);
    rounded_product(x, STRIDE, weights, IN, COUNT, found);
    return memcmp(found, wanted, sizeof(wanted)) == 0;
}

bool tiles_are_right() {
    const bool found = byte_tiles_are_right() && rounded_tiles_are_right();
    release_tiles();
    return found;
}

// Turns tiles on, if they work, or off; returns whether they are on. Results do not change.
bool use_tiles(bool wanted) {
    const auto they_work = [] {
        if (!ask_for_tiles()) return false;
        tiles_are_on.store(true);
        return tiles_are_right();
    };
    static const bool work = works_in_a_child(they_work) && they_work();
    tiles_are_on.store(wanted && work);
    return wanted && work;
}

#else

inline void release_tiles() {}
inline int padded_rows(int count) { return count; }
inline bool use_tiles(bool) { return false; }

// Rows of bytes, arranged by ROW_WORDS.
inline void byte_sums(const uint8_t* x, size_t stride, const int8_t* w, int num_in, int count, i16 (*sums)[PARTS]) {
#if defined(__AVX512F__)
    tile_sums<Bytes>(x, stride, w, num_in, count, sums);
#else
    narrow_sums(reinterpret_cast<const uint32_t*>(x), stride / 4, w, num_in, count, sums);
#endif
}

inline void rounded_product(const uint16_t* x, size_t stride, const char* w, int num_in, int count, v16 (*sums)[PARTS]) {
    memset(sums, 0, sizeof(sums[0]) * count);
    rounded_sums(x, stride, w, num_in, count, sums);
}

#endif

}  // namespace
