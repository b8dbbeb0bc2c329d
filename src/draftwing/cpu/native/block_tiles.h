// Many rows in 8 bits times weights in blocks, by matrix tiles.
//
// A unit of weights is unpacked once for all rows. Its products with sixteen rows are integers, exact in any order, and are
// scaled and added by `add_scaled`, so results are equal.

#pragma once

#include "blocks.h"
#include "tiles.h"

namespace {

#if defined(__AMX_INT8__) && defined(__linux__)

constexpr int FEWEST_ROWS = 48;  // fewer are as fast by `add_unit`: levels are written before tiles read them
// Units whose sums stay in registers. The products of two groups of rows, the levels and the rows fit in the L1 cache.
constexpr int UNITS_TOGETHER = 6;

template <typename T> struct UnpackedUnits {
    Words levels[UNITS_TOGETHER][T::UNIT / 4];
    Scale<Words> scales[UNITS_TOGETHER];
    Ints products[2][UNITS_TOGETHER][TILE_ROWS];
};

thread_local Scratch unpacked_units;

// Tiles 0 and 1: products of rows and outputs. 2 and 3: levels of rows. 4 and 5: levels of weights.
template <int UNIT> void shape_unit_tiles() {
    if (tile_rows == -UNIT) return;
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.rows[tile] = tile < 4 ? TILE_ROWS : UNIT / 4;
    shapes.bytes[2] = shapes.bytes[3] = UNIT;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
    tile_rows = -UNIT;
}

#define MULTIPLY(sum, rows, weights)                                                                                       \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #rows "\n\ttileloadd (%2,%3,1), %%tmm" #weights "\n\ttilezero %%tmm" #sum     \
                 "\n\ttdpbsud %%tmm" #weights ", %%tmm" #rows ", %%tmm" #sum "\n\ttilestored %%tmm" #sum ", (%4,%3,1)"     \
                 ::"r"(x), "r"(sizeof(*x)), "r"(levels), "r"(static_cast<size_t>(REGISTER)), "r"(products) : "memory")

// Products of sixteen rows and the levels of a unit, for sixteen outputs.
template <int UNIT>
ALWAYS_INLINE void multiply_unit(const RowUnit<UNIT>* x, const Words* levels, int parity, Ints* products) {
    if (parity) MULTIPLY(1, 3, 5);
    else MULTIPLY(0, 2, 4);
}

#undef MULTIPLY

// A tile times rows, whose units are `stride` apart: (count, 64). Rows and sums have room for `padded_rows`.
template <typename T>
void unit_sums_by_tiles(const RowUnit<T::UNIT>* x, int stride, const char* w, int num_in, int count, float* sums) {
    constexpr int FOURS = T::UNIT / 4;
    UnpackedUnits<T>& unpacked = *unpacked_units.get<UnpackedUnits<T>>(1);
    const int units = num_in / T::UNIT, groups = (count + TILE_ROWS - 1) / TILE_ROWS;
    shape_unit_tiles<T::UNIT>();
    for (int first = 0; first < units; first += UNITS_TOGETHER) {
        const int some = std::min(UNITS_TOGETHER, units - first);
        for (int place = 0; place < TILE / LANES; ++place) {
            for (int u = 0; u < some; ++u) {
                const int unit = (first + u) % T::UNITS;
                const char* block = w + static_cast<size_t>((first + u) / T::UNITS) * T::BYTES;
                constexpr int STEP = T::BYTES / T::UNITS / (TILE / LANES);
                fetch<STEP>(block + AHEAD + (unit * (TILE / LANES) + place) * STEP);
#pragma GCC unroll 8
                for (int four = 0; four < FOURS; ++four)
                    unpacked.levels[u][four] = T::levels(T::template bits<Words>(block, unit, four, place));
                unpacked.scales[u] = T::template scale<Words>(block, unit, place);
            }
            const auto multiply = [&](int group, int u) __attribute__((always_inline)) {
                multiply_unit(x + static_cast<size_t>(first + u) * stride + group * TILE_ROWS, unpacked.levels[u], u & 1,
                              unpacked.products[group & 1][u]);
            };
            for (int u = 0; u < some; ++u) multiply(0, u);
            for (int group = 0; group < groups; ++group) {
                float* to = sums + static_cast<size_t>(group) * TILE_ROWS * TILE + place * LANES;
                Floats sum[TILE_ROWS];
#pragma GCC unroll 16
                for (int r = 0; r < TILE_ROWS; ++r) sum[r] = first == 0 ? Floats{} : one_register<Floats>(to + r * TILE);
                for (int u = 0; u < some; ++u) {
                    if (group + 1 < groups) multiply(group + 1, u);  // the tiles work while the previous group is scaled
                    const RowUnit<T::UNIT>* own = x + static_cast<size_t>(first + u) * stride + group * TILE_ROWS;
                    const Ints* products = unpacked.products[group & 1][u];
                    const Scale<Words> scale = unpacked.scales[u];
#pragma GCC unroll 16
                    for (int r = 0; r < TILE_ROWS; ++r) {
                        Ints product = products[r];
                        if constexpr (T::CENTER != 0) product += own[r].start;
                        sum[r] = add_scaled<T>(sum[r], product, own[r], scale);
                    }
                }
#pragma GCC unroll 16
                for (int r = 0; r < TILE_ROWS; ++r) memcpy(to + r * TILE, &sum[r], REGISTER);
            }
        }
    }
}

template <typename T>
void block_sums(const RowUnit<T::UNIT>* x, int stride, const char* w, int num_in, int count, float* sums) {
    if (count < FEWEST_ROWS || !tiles_are_on.load(std::memory_order_relaxed)) return unit_sums<T>(x, stride, w, num_in, count, sums);
    // A tile takes as long for a few rows as for sixteen.
    const int rest = count % TILE_ROWS, tiled = rest < TILE_ROWS / 2 ? count - rest : count;
    unit_sums_by_tiles<T>(x, stride, w, num_in, tiled, sums);
    if (tiled < count) unit_sums<T>(x + tiled, stride, w, num_in, count - tiled, sums + static_cast<size_t>(tiled) * TILE);
}

#else

template <typename T>
void block_sums(const RowUnit<T::UNIT>* x, int stride, const char* w, int num_in, int count, float* sums) {
    unit_sums<T>(x, stride, w, num_in, count, sums);
}

#endif

}  // namespace
