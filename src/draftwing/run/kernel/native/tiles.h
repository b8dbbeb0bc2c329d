// Sums of bytes by the processor's matrix tiles (AMX): 16 rows times 16 outputs times 64 inputs in one instruction.
//
// The tiles read weights where `weights.h` reads them, four inputs of 64 outputs side by side, so that nothing is packed
// twice. Sums of integers are exact in any order: it is the same number, whatever computes it.

#pragma once

#include <atomic>

#include "trial.h"
#include "weights.h"

namespace {

constexpr int TILE_INPUTS = 64, TILE_ROWS = 16;

constexpr int LATER_ROWS = TILE_ROWS + 1;  // fewer leave memory no time

// What is needed after the next chunk: fetched while many rows are computed, when memory would be idle.
struct Later {
    const char* at = nullptr;
    const char* end = nullptr;

    int left() const { return static_cast<int>((end - at) / 64); }
    void fetch() {
        if (at == end) return;
        __builtin_prefetch(at, 0, 2);
        at += 64;
    }
};

#if defined(__AMX_INT8__) && defined(__linux__)

std::atomic<bool> tiles_are_on{false};

struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
};

thread_local int tile_rows = 0;  // of the sums and of the rows' own tile; 0: this thread's tiles are not in use

inline void shape_tiles(int rows) {
    if (tile_rows == rows) return;
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.rows[tile] = tile < 5 ? rows : 16;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
    tile_rows = rows;
}

// Tiles in use make every switch of threads dearer.
inline void release_tiles() {
    if (tile_rows == 0) return;
    asm volatile("tilerelease" :::);
    tile_rows = 0;
}

// What is read is named by its address alone: the compiler must have written it.
#define TILE_LOAD(tile, from, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(static_cast<size_t>(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(static_cast<size_t>(stride)) : "memory")
#define TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
#define TILE_DOT(sum, rows, weights) asm volatile("tdpbusd %%tmm" #weights ", %%tmm" #rows ", %%tmm" #sum ::)

// Adds the products of 64 * steps inputs to the sums of the rows that the tiles are shaped for. Meanwhile `ahead` is
// fetched, 4 * lines lines for each step, and what is `later` from memory, 4 * later_lines.
inline void tile_steps(const uint8_t* x, size_t stride, const int8_t* w, int steps, bool is_first, const char* ahead, int lines,
                       Later& later, int later_lines, i16 (*sums)[PARTS]) {
    char* out = reinterpret_cast<char*>(sums);
    if (is_first) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    } else {
        TILE_LOAD(0, out, sizeof(*sums));
        TILE_LOAD(1, out + 64, sizeof(*sums));
        TILE_LOAD(2, out + 128, sizeof(*sums));
        TILE_LOAD(3, out + 192, sizeof(*sums));
    }
    const auto fetch_lines = [&]() __attribute__((always_inline)) {
        for (int line = 0; line < lines; ++line, ahead += 64) __builtin_prefetch(ahead);
        for (int line = 0; line < later_lines; ++line) later.fetch();
    };
    for (int step = 0; step < steps; ++step, x += TILE_INPUTS, w += TILE_INPUTS * TILE) {
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
    TILE_STORE(0, out, sizeof(*sums));
    TILE_STORE(1, out + 64, sizeof(*sums));
    TILE_STORE(2, out + 128, sizeof(*sums));
    TILE_STORE(3, out + 192, sizeof(*sums));
}

#undef TILE_LOAD
#undef TILE_STORE
#undef TILE_ZERO
#undef TILE_DOT

// As `tile_sums<Bytes>`, for one row too: its tiles are as fast, and fetch the same. Rows and sums have room for `padded_rows`; what stands there behind the last row says nothing.
void byte_sums(const uint8_t* x, size_t stride, const int8_t* w, int num_in, int count, Later& later, i16 (*sums)[PARTS]) {
    if (num_in < TILE_INPUTS || !tiles_are_on.load(std::memory_order_relaxed))
        return tile_sums<Bytes>(x, stride, w, num_in, count, sums);
    constexpr int CHUNK = 4;  // steps whose weights stay in the nearest cache for all passes
    const int passes = (count + TILE_ROWS - 1) / TILE_ROWS, each = (count + passes - 1) / passes;
    const int steps = num_in / TILE_INPUTS, chunk = passes == 1 ? steps : CHUNK;
    const int later_lines = (later.left() - 4 * count + 4 * steps * passes - 1) / (4 * steps * passes);
    shape_tiles(each);
    for (int from = 0; from < steps; from += chunk) {
        const int some = std::min(chunk, steps - from);
        const int8_t* part = w + static_cast<size_t>(from) * TILE_INPUTS * TILE;
        const char* next = reinterpret_cast<const char*>(part + static_cast<size_t>(passes == 1 ? 2 : some) * TILE_INPUTS * TILE);
        for (int pass = 0, left = 16; pass < passes; ++pass) {
            const int lines = (left + passes - pass - 1) / (passes - pass);
            tile_steps(x + pass * each * stride + from * TILE_INPUTS, stride, part, some, from == 0, next, lines, later,
                       later_lines, sums + pass * each);
            next += static_cast<size_t>(some) * lines * 4 * 64;
            left -= lines;
        }
    }
    const int done = steps * TILE_INPUTS;
    for (int first = 0; done < num_in && first < count; first += MAX_ROWS)
        any_rows<Bytes, 0>(std::min(MAX_ROWS, count - first), x + first * stride + done, stride,
                           w + static_cast<size_t>(done) * TILE, num_in - done, nullptr, sums + first);
}

// How many rows and sums there must be room for.
inline int padded_rows(int count) {
    const int passes = (count + TILE_ROWS - 1) / TILE_ROWS;
    return passes * ((count + passes - 1) / std::max(1, passes));
}

// Whether tiles may be used: the kernel gives them to a process that asks.
bool ask_for_tiles() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0; }

// A small product by tiles and without: whether they agree.
bool tiles_are_right() {
    constexpr int IN = 2 * TILE_INPUTS + 4, COUNT = 21, STRIDE = IN;
    static uint8_t x[(COUNT + TILE_ROWS) * STRIDE];
    alignas(64) static int8_t w[(IN + 2 * TILE_INPUTS) * TILE];
    static i16 found[COUNT + TILE_ROWS][PARTS], wanted[COUNT][PARTS];
    for (int i = 0; i < COUNT * STRIDE; ++i) x[i] = static_cast<uint8_t>(i * 37 + i / 11);
    for (int i = 0; i < IN * TILE; ++i) w[i] = static_cast<int8_t>(i * 73 + i / 7);
    tile_sums<Bytes>(x, STRIDE, w, IN, COUNT, wanted);
    Later nothing;
    byte_sums(x, STRIDE, w, IN, COUNT, nothing, found);
    release_tiles();
    return memcmp(found, wanted, sizeof(wanted)) == 0;
}

// Turns tiles on, where they work, or off; whether they are on. What is computed is the same.
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

inline void byte_sums(const uint8_t* x, size_t stride, const int8_t* w, int num_in, int count, Later&, i16 (*sums)[PARTS]) {
    tile_sums<Bytes>(x, stride, w, num_in, count, sums);
}

#endif

}  // namespace
