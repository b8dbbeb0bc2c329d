// Keys and values in 8 bits with a scale per head and slot, and their products with queries and weights.
//
// The keys of a page are a tile of bytes, (dim / 4, 64 slots, 4), and 64 scales; values follow each other slot by slot, (dim)
// bytes and a scale. A query is rounded to 8 bits; its weights, times the scales of the values, to 16. Sums of integers are exact
// in any order, so a query's bits depend neither on other queries, nor on the slots of its path, nor on the processor.

#pragma once

#include "products.h"

namespace {

constexpr int VALUES = 1024;  // slots whose values are multiplied at a time: they stay in the L2 cache
constexpr float MAX_WEIGHT_LEVEL = 65535.0f;
constexpr float SMALLEST_WEIGHT = 0x1p-110f;  // of a query's largest: MAX_WEIGHT_LEVEL / it is a number

thread_local Scratch narrow_rows, narrow_factors, narrow_sums, narrow_values, narrow_bytes, narrow_totals;

void write_narrow(const float* key, const float* value, int dim, float* key_slot, float* value_slot) {
    int8_t levels[1024];
    key_slot[dim / 4 * PAGE] = round_levels(key, dim, levels);
    for (int word = 0; word < dim / 4; ++word) memcpy(key_slot + word * PAGE, levels + 4 * word, 4);
    value_slot[dim / 4] = round_levels(value, dim, levels);
    memcpy(value_slot, levels, dim);
}

// Queries in 8 bits, 128 for zero, followed by a row of ones, whose products are the sums of the keys' bytes.
class NarrowQueries {
  public:
    NarrowQueries(const float* queries, int count, int dim)
        : count_(count), dim_(dim), stride_(row_bytes(static_cast<size_t>(dim) * ROW_WORDS)),
          rows_(narrow_rows.get<uint8_t>(padded_rows(count + 1) * stride_)), factors_(narrow_factors.get<float>(count)) {
        uint8_t bytes[1024];
        const auto arrange = [&](int q) { spread_fours(bytes, dim, reinterpret_cast<uint32_t*>(rows_ + q * stride_)); };
        for (int q = 0; q < count; ++q) {
            factors_[q] = round_levels(queries + q * dim, dim, reinterpret_cast<int8_t*>(bytes));
            for (int d = 0; d < dim; ++d) bytes[d] ^= 128;
            arrange(q);
        }
        memset(bytes, 1, dim);
        arrange(count);
    }

    // The scores of the 64 slots of a page.
    void score(const float* page, float* scores, size_t stride) const {
        i16(*sums)[PARTS] = reinterpret_cast<i16(*)[PARTS]>(narrow_sums.get<int32_t>(padded_rows(count_ + 1) * TILE));
        byte_sums(rows_, stride_, reinterpret_cast<const int8_t*>(page), dim_, count_ + 1, sums);
        for (int part = 0; part < PARTS; ++part) {
            const v16 scale = load(page + dim_ / 4 * PAGE + 16 * part);
            const i16 zero = sums[count_][part] << 7;
            for (int q = 0; q < count_; ++q)
                store(scores + q * stride + 16 * part, numbers_of(sums[q][part] - zero) * factors_[q] * scale);
        }
    }

  private:
    int count_, dim_;
    size_t stride_;
    uint8_t* rows_;
    float* factors_;
};

// Weights of queries in 16 bits, as rows of high and low bytes over places from `begin` to before `end`, multiples of 64.
class NarrowWeights {
  public:
    NarrowWeights(int count, int begin, int end)
        : count_(count), begin_(begin), end_(end), stride_(row_bytes(static_cast<size_t>(end - begin) * ROW_WORDS)),
          rows_(narrow_rows.get<uint8_t>(padded_rows(2 * count) * stride_)) {}

    // Rounds the products of a query's weights and `scales` from `first` on, a multiple of 16; returns the value of a level.
    float round(int query, float* weights, const float* scales, int first) {
        v16 most{}, check{};
        for (int i = first; i < end_; i += 16) {
            const v16 weight = load(weights + i), part = select(weight > v16{}, weight * load(scales + i), v16{});
            store(weights + i, part);
            most = larger(part, most);
            check += part * 0.0f;
        }
        const float largest = largest_of(most);
        const float inverse = largest >= SMALLEST_WEIGHT ? MAX_WEIGHT_LEVEL / largest : 0.0f;
        uint8_t* bytes = narrow_bytes.get<uint8_t>(2 * (end_ - begin_));
        uint8_t* both[] = {bytes - begin_, bytes + (end_ - begin_) - begin_};
        for (int half = 0; half < 2; ++half) {
            memset(both[half] + begin_, 0, first - begin_);
            for (int i = first; i < end_; i += 16) store_bytes(both[half] + i, nearest_whole(weights + i, inverse) >> (8 - 8 * half));
            spread_fours(both[half] + begin_, end_ - begin_, reinterpret_cast<uint32_t*>(rows_ + (2 * query + half) * stride_));
        }
        return largest / MAX_WEIGHT_LEVEL + sum_of(check);
    }

    // The sums of the rounded weights times values: exact, (count, dim rounded up to 64). `value_of` returns those of a place.
    template <typename F> const double* mix(int dim, F value_of) const {
        const int tiles = (dim + TILE - 1) / TILE, rows = padded_rows(2 * count_);
        double* totals = narrow_totals.get<double>(static_cast<size_t>(count_) * tiles * TILE);
        memset(totals, 0, sizeof(double) * count_ * tiles * TILE);
        int8_t* values = narrow_values.get<int8_t>(VALUES * TILE);
        int32_t* sums = narrow_sums.get<int32_t>(static_cast<size_t>(rows) * TILE);
        for (int from = begin_; from < end_; from += VALUES) {
            const int num = std::min(VALUES, end_ - from);
            for (int tile = 0; tile < tiles; ++tile) {
                const int first = tile * TILE, width = std::min(TILE, dim - first);
                for (int i = 0; i < num; i += 4) {
                    const int8_t* four[4];
                    for (int j = 0; j < 4; ++j) four[j] = value_of(from + i + j) + first;
                    int8_t* to = values + i * TILE;
                    for (int d = 0; d < width; ++d)
                        for (int j = 0; j < 4; ++j) to[4 * d + j] = four[j][d];
                }
                byte_sums(rows_ + static_cast<size_t>(from - begin_) * ROW_WORDS, stride_, values, num, 2 * count_,
                          reinterpret_cast<i16(*)[PARTS]>(sums));
                for (int q = 0; q < count_; ++q) {
                    const int32_t *high = sums + 2 * q * TILE, *low = high + TILE;
                    double* total = totals + (static_cast<size_t>(q) * tiles + tile) * TILE;
                    for (int d = 0; d < TILE; ++d) total[d] += high[d] * 256.0 + low[d];
                }
            }
        }
        return totals;
    }

  private:
    int count_, begin_, end_;
    size_t stride_;
    uint8_t* rows_;
};

}  // namespace
