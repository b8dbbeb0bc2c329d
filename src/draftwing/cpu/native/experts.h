// Mixtures of experts: a router's scores choose some experts for each row, which are matrices times those rows alone.
//
// Pairs of a row and one of its experts are sorted by expert. A product over pairs multiplies each expert that any row chose by
// its rows, so a forward reads the weights of these experts once. A row's results are then summed in the order in which its
// experts were chosen: its bits do not depend on other rows.

#pragma once

#include "recurrence.h"

namespace {

thread_local Scratch gathered_rows, router_scores;

enum RouteScores : int32_t { SOFTMAX = 0, CHOSEN = 1, SIGMOID = 2 };  // `Routing.scores`

inline int padded_width(int width) { return (width + 15) / 16 * 16; }

// The buffer that ROUTE writes for R rows, which has 4 * k + 2 * experts + 2 words for each.
struct Routes {
    int32_t* chosen;  // (R, k) each row's experts, the best first
    float* weights;  // (R, k)
    int32_t* place;  // (R, k) the pair of each
    int32_t* row;  // (R * k) of each pair
    int32_t* num_active;
    int32_t* active;  // (experts) those with any rows, ascending
    int32_t* starts;  // (experts + 1) the first pair of each

    Routes(float* buffer, size_t pairs, int num_experts) {
        chosen = reinterpret_cast<int32_t*>(buffer);
        weights = buffer + pairs;
        place = chosen + 2 * pairs, row = chosen + 3 * pairs;
        num_active = chosen + 4 * pairs, active = num_active + 1, starts = active + num_experts;
    }
};

inline Routes routes_of(const Op& op, const Batch& batch, int buffer) {
    return {batch.buffers[buffer], static_cast<size_t>(batch.rows) * batch.nodes * op.num_chosen, op.num_experts};
}

// The index of the largest number that is not taken; the first of equal ones, and of NaN.
inline int best_of(const float* numbers, int count, const bool* is_taken) {
    int best = -1;
    for (int i = 0; i < count; ++i)
        if (!is_taken[i] && (best < 0 || numbers[i] > numbers[best])) best = i;
    return best;
}

// Takes the experts that are not in the best groups.
void take_groups(const Op& op, const float* ranked, bool* is_taken) {
    const int size = op.num_experts / op.num_groups;
    float worth[MAX_EXPERTS];
    bool is_kept[MAX_EXPERTS] = {};
    for (int group = 0; group < op.num_groups; ++group) {
        const float* own = ranked + group * size;
        bool is_seen[MAX_EXPERTS] = {};
        const int best = best_of(own, size, is_seen);
        worth[group] = own[best];
        is_seen[best] = true;
        if (op.sums_two && size > 1) worth[group] += own[best_of(own, size, is_seen)];
    }
    for (int i = 0; i < op.num_kept_groups; ++i) is_kept[best_of(worth, op.num_groups, is_kept)] = true;
    for (int expert = 0; expert < op.num_experts; ++expert) is_taken[expert] = !is_kept[expert / size];
}

// Chooses the experts of one row by its scores, and their weights.
void choose_experts(const Op& op, const float* scores, int32_t* chosen, float* weights) {
    const int count = op.num_experts, padded = padded_width(count), k = op.num_chosen;
    float* worth = router_scores.get<float>(2 * static_cast<size_t>(padded));
    float* ranked = worth + padded;
    memcpy(worth, scores, count * sizeof(float));
    for (int i = count; i < padded; ++i) worth[i] = -INFINITY;
    const auto softmax = [](float* x, int size) {
        const float top = *std::max_element(x, x + size);
        v16 sum{};
        for (int i = 0; i < size; i += 16) {
            const v16 part = exp_of(load(x + i) - top);
            store(x + i, part);
            sum += part;
        }
        const float total = sum_of(sum);
        for (int i = 0; i < size; i += 16) store(x + i, load(x + i) / total);
    };
    if (op.scores == SOFTMAX) softmax(worth, padded);
    if (op.scores == SIGMOID)
        for (int i = 0; i < padded; i += 16) store(worth + i, 1.0f / (1.0f + exp_of(-load(worth + i))));
    // Sigmoids without a bias are ranked before they saturate.
    for (int i = 0; i < count; ++i)
        ranked[i] = op.bias != nullptr ? worth[i] + op.bias[i] : op.scores == SIGMOID ? scores[i] : worth[i];
    bool is_taken[MAX_EXPERTS] = {};
    if (op.num_groups > 0) take_groups(op, ranked, is_taken);
    for (int i = 0; i < k; ++i) {
        const int best = best_of(ranked, count, is_taken);
        is_taken[best] = true;
        chosen[i] = best;
    }
    float own[MAX_EXPERTS + 16];
    for (int i = 0; i < padded_width(k); ++i) own[i] = i < k ? worth[chosen[i]] : -INFINITY;
    if (op.scores == CHOSEN) softmax(own, padded_width(k));
    float total = op.eps;
    for (int i = 0; i < k; ++i) total += own[i];
    for (int i = 0; i < k; ++i) {
        weights[i] = (op.normalises ? own[i] / total : own[i]) * op.scale;
        if (op.scales != nullptr) weights[i] *= op.scales[chosen[i]];
    }
}

// Sorts the pairs of rows and experts, by expert and then by row.
void sort_pairs(const Op& op, const Batch& batch) {
    const Routes routes = routes_of(op, batch, op.target);
    const int count = batch.rows * batch.nodes, k = op.num_chosen;
    std::fill(routes.starts, routes.starts + op.num_experts + 1, 0);
    for (int i = 0; i < count * k; ++i) ++routes.starts[routes.chosen[i] + 1];
    for (int expert = 0; expert < op.num_experts; ++expert) routes.starts[expert + 1] += routes.starts[expert];
    int32_t* next = routes.active;
    for (int expert = 0; expert < op.num_experts; ++expert) next[expert] = routes.starts[expert];
    for (int i = 0; i < count * k; ++i) {
        const int32_t place = routes.place[i] = next[routes.chosen[i]]++;
        routes.row[place] = i / k;
    }
    *routes.num_active = 0;
    for (int expert = 0; expert < op.num_experts; ++expert)
        if (routes.starts[expert] < routes.starts[expert + 1]) routes.active[(*routes.num_active)++] = expert;
}

// Tiles of one expert's matrix times its rows: piece `which` has `each` tiles of the experts that have rows.
void experts_piece(const Op& op, const Batch& batch, int which, int each) {
    const Routes routes = routes_of(op, batch, op.routes);
    const int tiles = (op.num_out + TILE - 1) / TILE, parts = (tiles + each - 1) / each;
    if (which / parts >= *routes.num_active) return;
    const int number = routes.active[which / parts], first = which % parts * each;
    const int begin = routes.starts[number], count = routes.starts[number + 1] - begin;
    const Expert& expert = static_cast<const Expert*>(op.weight)[number];
    Op own = op;
    own.format = expert.format, own.row_form = expert.row_form;
    own.weight = expert.weight, own.scales = expert.scales, own.sums = expert.sums, own.bias = expert.bias;
    Batch pairs = batch;
    pairs.rows = count, pairs.nodes = 1;
    const int in = padded_width(op.num_in), out = padded_width(op.num_out);
    pairs.widths[op.target] = out;
    pairs.buffers[op.target] += static_cast<size_t>(begin) * out;
    if (op.gathers) {
        float* rows = pairs.buffers[op.source] = gathered_rows.get<float>(static_cast<size_t>(count) * in);
        for (int i = 0; i < count; ++i) {
            const int row = routes.row[begin + i];
            float* to = rows + static_cast<size_t>(i) * in;
            memcpy(to, batch.buffers[op.source] + static_cast<size_t>(row) * batch.widths[op.source], op.num_in * sizeof(float));
            if (!op.scales_input) continue;
            int which = row * op.num_chosen;
            while (routes.place[which] != begin + i) ++which;
            for (int d = 0; d < op.num_in; ++d) to[d] *= routes.weights[which];
        }
    } else {
        pairs.buffers[op.source] += static_cast<size_t>(begin) * in;
    }
    pairs.widths[op.source] = in;
    linear(own, pairs, rows_for(own, pairs, nullptr), first, std::min(first + each, tiles));
}

// The weighted sum of a row's pairs, in the order in which its experts were chosen.
void combine_row(const Op& op, const Batch& batch, int row) {
    const Routes routes = routes_of(op, batch, op.routes);
    const int stride = padded_width(op.num_in);
    float* out = batch.buffers[op.target] + static_cast<size_t>(row) * batch.widths[op.target];
    for (int i = 0; i < op.num_in; i += 16) {
        v16 sum{};
        for (int which = row * op.num_chosen; which < (row + 1) * op.num_chosen; ++which)
            sum += load(batch.buffers[op.source] + static_cast<size_t>(routes.place[which]) * stride + i) *
                   (op.scales_input ? 1.0f : routes.weights[which]);
        put(out + i, sum, op.num_in - i, op.epilogue == ADD);
    }
}

}  // namespace
