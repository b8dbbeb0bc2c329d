// Filtering by top-k, top-p and min-p: `SamplingBatch._filter`.

#pragma once

#include <algorithm>
#include <functional>

#include "products.h"

namespace {

struct Filter {  // of one row
    float temperature;  // 0: greedy, unfiltered
    int32_t top_k;  // 0: none
    float top_p, min_p;  // 1 and 0: none

    bool cuts() const { return top_k > 0 || top_p < 1.0f || min_p > 0.0f; }
    bool changes() const { return temperature > 0.0f && (temperature != 1.0f || cuts()); }
};

constexpr int TOP_STEP = 32;  // scores that `top_of` asks for at a time, a multiple of NOISE_STEP

struct PlainScores {
    const float* scores;

    v16 bound(int i) const { return load(scores + i); }
    const float* at(int first, int) const { return scores + first; }
};

// Finds the best scores in descending order, equal ones by id, without NaN and -inf; returns their number, at most `count`.
// Asks for the upper bounds of all scores, and for those scores that may be among the best.
template <typename S> int top_of(S scores, int size, int count, int* ids, float* values) {
    constexpr int BLOCK = 4 * TOP_STEP;
    int found = 0;
    float floor = -INFINITY;  // a score must exceed this to be among them
    const auto bounds_exceed = [&](int first, int num) __attribute__((always_inline)) {
        v16 most = spread(-INFINITY);
        for (int i = first; i < first + num; i += 16) most = larger(scores.bound(i), most);  // skips NaN
        return any_above(most, floor);
    };
    const auto look_at = [&](int first, int num) {
        const float* own = scores.at(first, num);
        for (int i = 0; i < num; ++i) {
            if (!(own[i] > floor)) continue;
            int place = found < count ? found++ : count - 1;
            for (; place > 0 && own[i] > values[place - 1]; --place) values[place] = values[place - 1], ids[place] = ids[place - 1];
            values[place] = own[i], ids[place] = first + i;
            if (found == count) floor = values[count - 1];
        }
    };
    int start = 0;
    for (; start + BLOCK <= size; start += BLOCK) {
        if (!bounds_exceed(start, BLOCK)) continue;
        for (int first = start; first < start + BLOCK; first += TOP_STEP)
            if (bounds_exceed(first, TOP_STEP)) look_at(first, TOP_STEP);
    }
    for (; start < size; start += TOP_STEP) look_at(start, std::min(TOP_STEP, size - start));
    return found;
}

// Sum of e^(score - highest).
float sum_of_exp(const float* scores, int size, float highest) {
    v16 lanes{};
    int i = 0;
    for (; i + 16 <= size; i += 16) lanes += exp_of(load(scores + i) - highest);
    float sum = sum_of(lanes);
    for (; i < size; ++i) sum += std::exp(scores[i] - highest);
    return sum;
}

// The lowest of the best scores (descending) that top-p keeps; -inf if these scores do not reach top_p.
float nucleus_of(const float* best, int count, float whole, float top_p) {
    const double wanted = static_cast<double>(top_p) * whole;
    double mass = 0.0;
    for (int i = 0; i < count; ++i) {
        mass += std::exp(best[i] - best[0]);
        if (mass >= wanted) return best[i];
    }
    return -INFINITY;
}

thread_local Scratch filter_sorted;

// `cut_of` by sorting all scores, if the best few do not decide it.
float sorted_cut_of(const Filter& filter, const float* scores, int vocab) {
    float* sorted = filter_sorted.get<float>(vocab);
    int count = 0;
    for (int i = 0; i < vocab; ++i)
        if (scores[i] > -INFINITY) sorted[count++] = scores[i];  // skips NaN too
    std::sort(sorted, sorted + count, std::greater<float>());
    float cut = -INFINITY;
    if (filter.top_k > 0 && filter.top_k <= count) {
        cut = sorted[filter.top_k - 1];
        count = static_cast<int>(std::upper_bound(sorted, sorted + count, cut, std::greater<float>()) - sorted);
    }
    if (filter.top_p >= 1.0f) return cut;
    const float nucleus = nucleus_of(sorted, count, sum_of_exp(sorted, count, sorted[0]), filter.top_p);
    return nucleus > cut ? nucleus : cut;
}

// The score below which the filters of a row mask all tokens. If not EXACT it may be lower: then a top-k above
// NUM_FILTERED masks nothing, nor does top-p if the best NUM_FILTERED tokens do not reach it.
template <bool EXACT> float cut_of(const Filter& filter, const float* scores, int vocab) {
    constexpr int NUM_FILTERED = 256;
    const int k = filter.top_k;
    const float p = filter.top_p, least = filter.min_p;
    if (!filter.cuts()) return -INFINITY;
    static thread_local int ids[NUM_FILTERED];
    static thread_local float values[NUM_FILTERED];
    const int wanted = k > 0 && k < NUM_FILTERED ? k : NUM_FILTERED, found = top_of(PlainScores{scores}, vocab, wanted, ids, values);
    if (found == 0) return -INFINITY;
    const float floor = least > 0.0f ? values[0] + std::log(least) : -INFINITY;
    const bool is_whole = k == 0 || k > NUM_FILTERED, is_far = is_whole && k > 0;
    float cut = is_whole ? -INFINITY : values[found - 1];
    if (p < 1.0f && !(EXACT && is_far)) {
        float whole = 0.0f;
        if (is_whole) whole = sum_of_exp(scores, vocab, values[0]);
        for (int i = 0; i < found && !is_whole; ++i) whole += std::exp(values[i] - values[0]);
        if (!is_whole) {  // tokens that tie with the k-th are kept, and count
            int equals = 0;
            for (int i = 0; i < vocab; ++i) equals += scores[i] == cut;
            for (int i = 0; i < found; ++i) equals -= values[i] == cut;
            whole += static_cast<float>(equals) * std::exp(cut - values[0]);
        }
        const float nucleus = nucleus_of(values, found, whole, p);
        cut = nucleus > cut ? nucleus : cut;
    }
    // If top-p is undecided, it may keep more than the best few.
    if (EXACT && (is_far || (p < 1.0f && is_whole && cut == -INFINITY))) cut = sorted_cut_of(filter, scores, vocab);
    return floor > cut ? floor : cut;
}

}  // namespace
