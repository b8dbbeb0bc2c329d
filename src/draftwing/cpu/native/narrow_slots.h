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

thread_local Scratch narrow_rows, narrow_factors, attention_sums, narrow_values, narrow_bytes, narrow_totals;

// Values may be narrower than keys: their slots have as many words.
void write_narrow(const float* key, int dim, const float* value, int value_dim, float* key_slot, float* value_slot) {
    int8_t levels[1024];
    key_slot[dim / 4 * PAGE] = round_levels(key, dim, levels);
    for (int word = 0; word < dim / 4; ++word) memcpy(key_slot + word * PAGE, levels + 4 * word, 4);
    value_slot[dim / 4] = round_levels(value, value_dim, levels);
    memcpy(value_slot, levels, value_dim);
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
        i16(*sums)[PARTS] = reinterpret_cast<i16(*)[PARTS]>(attention_sums.get<int32_t>(padded_rows(count_ + 1) * TILE));
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

// Puts the bytes of four slots next to each other.
inline void interleave(const int8_t* slots, int stride, int count, int8_t* __restrict out) {
    for (int d = 0; d < count; ++d)
        for (int i = 0; i < 4; ++i) out[4 * d + i] = slots[i * stride + d];
}

// Weights of queries in 16 bits, as rows of high and low bytes over places from `begin` to before `end`, multiples of 64.
// `page_of` returns the values of 64 places.
class NarrowWeights {
  public:
    template <typename F>
    NarrowWeights(int count, int dim, int words, int value_dim, int begin, int end, F page_of)
        : count_(count), slot_bytes_(4 * words), value_dim_(value_dim), begin_(begin), end_(end), stride_(row_bytes(static_cast<size_t>(end - begin) * ROW_WORDS)),
          rows_(narrow_rows.get<uint8_t>(padded_rows(2 * count) * stride_)), scales_(narrow_factors.get<float>(end)) {
        for (int place = begin; place < end; place += PAGE) {
            const float* page = page_of(place) + dim / 4;
            for (int i = 0; i < PAGE; ++i) scales_[place + i] = page[i * words];
        }
    }

    // Rounds the products of a query's weights and the values' scales from `first` on, a multiple of 16; returns the value of
    // a level. Not inlined: in a large function, GCC runs out of registers.
    __attribute__((noinline)) float round(int query, float* weights, int first) {
        v16 most{}, check{};
        for (int i = first; i < end_; i += 16) {
            const v16 weight = load(weights + i), part = select(weight > v16{}, weight * load(scales_ + i), v16{});
            store(weights + i, part);
            most = larger(part, most);
            check += part * 0.0f;
        }
        const float largest = largest_of(most);
        const float inverse = largest >= SMALLEST_WEIGHT ? MAX_WEIGHT_LEVEL / largest : 0.0f;
        const int num = end_ - begin_, skipped = first - begin_;
        uint8_t *row = rows_ + 2 * query * stride_, *high = row, *low = row + stride_;
        if constexpr (ROW_WORDS > 1) high = narrow_bytes.get<uint8_t>(2 * num), low = high + num;
        memset(high, 0, skipped);
        memset(low, 0, skipped);
        for (int i = skipped; i < num; i += 16) {
            const i16 level = nearest_whole(weights + begin_ + i, inverse);
            store_bytes(high + i, level >> 8);
            store_bytes(low + i, level);
        }
        if constexpr (ROW_WORDS > 1) {
            spread_fours(high, num, reinterpret_cast<uint32_t*>(row));
            spread_fours(low, num, reinterpret_cast<uint32_t*>(row + stride_));
        }
        return largest / MAX_WEIGHT_LEVEL + sum_of(check);
    }

    // The sums of the rounded weights times values: (count, value_dim), exact but for the last rounding to float32.
    template <typename F> void mix(F page_of, float* out) const {
        const int value_dim = value_dim_;
        double* totals = narrow_totals.get<double>(static_cast<size_t>(count_) * value_dim);
        memset(totals, 0, sizeof(double) * count_ * value_dim);
        int8_t* values = narrow_values.get<int8_t>(VALUES * TILE);
        int32_t* sums = attention_sums.get<int32_t>(static_cast<size_t>(padded_rows(2 * count_)) * TILE);
        for (int from = begin_; from < end_; from += VALUES) {
            const int num = std::min(VALUES, end_ - from);
            for (int first = 0; first < value_dim; first += TILE) {
                const int width = std::min(TILE, value_dim - first);
                for (int i = 0; i < num; i += PAGE) {
                    const int8_t* page = reinterpret_cast<const int8_t*>(page_of(from + i)) + first;
                    for (int j = 0; j < PAGE; j += 4) interleave(page + j * slot_bytes_, slot_bytes_, width, values + (i + j) * TILE);
                }
                byte_sums(rows_ + static_cast<size_t>(from - begin_) * ROW_WORDS, stride_, values, num, 2 * count_,
                          reinterpret_cast<i16(*)[PARTS]>(sums));
                for (int q = 0; q < count_; ++q) {
                    const int32_t *high = sums + 2 * q * TILE, *low = high + TILE;
                    double* total = totals + static_cast<size_t>(q) * value_dim + first;
                    for (int d = 0; d < width; ++d) total[d] += high[d] * 256.0 + low[d];
                }
            }
        }
        for (int i = 0; i < count_ * value_dim; ++i) out[i] = static_cast<float>(totals[i]);
    }

  private:
    int count_, slot_bytes_, value_dim_, begin_, end_;
    size_t stride_;
    uint8_t* rows_;
    float* scales_;
};

}  // namespace
