// Whole drafts: trees that grow by what their nodes are worth, level by level, without coming back in between.

#pragma once

#include "adjust.h"
#include "filters.h"
#include "noise.h"
#include "programs.h"

namespace {

// The verification of finished trees: by the target's program, without coming back in between.
struct Ahead {
    const Op* ops;
    Batch* batch;  // with room for the most nodes; the trees' own numbers are written into it
    const Walk* how;
    double seconds;  // written: what it took
    int32_t num_ops;
};

// A tree to draft for every row: of each expanded node the best children by their scores, logits / temperature + noise.
struct Draft {
    int32_t depth, width, most;  // levels; nodes that are expanded of each, and children of each; nodes to keep: at most
    int32_t vocab_size, room;  // room: of a row's nodes in what is written
    int32_t num_catch_up, num_hidden;  // operations: only of the catch-up; up to the states, the logits' come behind
    int32_t logits, read, states, fed_back;  // buffers; read: what the logits are made of. -1: none
    int32_t num_tables, num_knots;  // no knots: nothing is decided while the tree grows
    int32_t kept_out = -1;  // buffer: what the net gives out is kept, one pass behind another; -1: it is not
    float sharpness, kept, scale;  // of the chances under noise, see Calibration; kept: 1 - miss
    float worth, share;  // seconds that a token is worth; what one more node of a level takes, of the first one's time
    const int64_t* counts;  // (rows) entries of the catch-up
    const int64_t* wanted;  // (rows) 0: nothing is drafted
    const float* temperatures;  // (rows) 0: greedy
    const int32_t* top_k;  // (rows) filters of those that are not greedy; 0: none
    const float* top_p;  // (rows) 1: none
    const float* min_p;  // (rows) 0: none
    const Adjust* adjusts;  // (rows) what is made of the logits before all that; null: nothing
    NoiseStore* noise;
    const int64_t* seeds;  // (rows) -1: no noise is added
    const int64_t* starts;  // (rows) positions of the tokens after the roots
    const float* knots;  // (tables, knots) told chances, and at which chance such nodes were accepted, by level
    const float* rates;
    const float* gains;  // (depth) what reaching the level after this one is worth, and what its first node costs
    const float* costs;
    const float* verify;  // (most + 3) seconds of verifying so many nodes, the root counted
    int64_t* tokens;  // (rows, nodes) of the finished tree; unused nodes hold -1
    int64_t* parents;
    int64_t* places;  // where a node stands among the expanded ones, whose slots follow the root's in that order
    float* told;  // chance given the parent, as the net says, and of the whole path, as such came true
    float* reached;
    Ahead* ahead;  // null: the trees are handed out as they are
    int32_t levels, is_chain, deepest;  // written: levels that were drafted, and what the finished tree is
    float effort;  // levels, by the nodes expanded on them: 1 for the first of each, `share` for each other
};

float interpolate(const float* x, const float* y, int count, float at) {
    int right = 0;
    while (right < count && x[right] < at) ++right;
    if (right == 0 || right == count) return y[right == 0 ? 0 : count - 1];
    const float gap = x[right] - x[right - 1], share = gap > 0 ? (at - x[right - 1]) / gap : 1.0f;
    return y[right - 1] + share * (y[right] - y[right - 1]);
}

// --- a draft ---------------------------------------------------------------------------------------------------------

constexpr int NUM_COMPARED = 8;  // rivals that a score under noise is weighed against

struct Node {
    int64_t token;
    int32_t parent, depth;
    int32_t place, entry;  // among the expanded nodes, and among those of its level; -1: not expanded
    float told, reached;
};

// The tree of one row while it grows. Nodes stand in the order in which they were met: parents first.
struct Tree {
    Node* nodes;
    int32_t* order;  // all but the root, by what they are worth; equal ones as they were met
    int32_t* expanded;  // the newest level's, as many as there are entries; -1: none
    int32_t size, newest;  // newest: the first node of the newest level

    void add(const Node& node, bool is_ranked) {
        int place = size - 1;
        if (is_ranked)
            for (; place > 0 && node.reached > nodes[order[place - 1]].reached; --place) order[place] = order[place - 1];
        order[place] = size;
        nodes[size++] = node;
    }
};

thread_local Scratch draft_scores, draft_best, draft_trees, draft_nodes, draft_numbers, draft_parents, draft_tokens, draft_path;

// Lays penalties and biases on the logits after an expanded node, of which nobody asks again.
void adjust_after(const Draft& draft, int row, const Said& said, float* logits, const Tree& tree, int above) {
    const int count = tree.nodes[above].depth + 1;
    int64_t* path = draft_path.get<int64_t>(count);
    for (int place = count, node = above; place-- > 0; node = tree.nodes[node].parent) path[place] = tree.nodes[node].token;
    adjust_scores(draft.adjusts[row], said, path, count, logits, draft.vocab_size);
}

// The children of an expanded node.
void branch(const Draft& draft, int row, int level, const float* logits, Tree& tree, int above) {
    const int vocab = draft.vocab_size;
    const float temperature = draft.temperatures[row];
    const auto held = draft.noise->hold();
    const float* noise = draft.seeds[row] < 0 ? nullptr : draft.noise->at(draft.seeds[row], draft.starts[row] + level);
    if (temperature > 0.0f) {
        float* scores = draft_scores.get<float>(vocab);
        for (int i = 0; i < vocab; ++i) scores[i] = logits[i] / temperature;
        const bool is_scaled = noise != nullptr && draft.scale != 1.0f;
        const Filter filter{temperature, draft.top_k[row], draft.top_p[row], draft.min_p[row]};
        const float cut = cut_of<false>(filter, scores, vocab);
        for (int i = 0; i < vocab && is_scaled; ++i) scores[i] = scores[i] < cut ? -INFINITY : scores[i] * draft.scale;
        const float least = is_scaled ? -INFINITY : cut;  // what is below it is out by now
        for (int i = 0; i < vocab; ++i)
            scores[i] = scores[i] < least ? -INFINITY : scores[i] + (noise == nullptr ? 0.0f : noise[i]);
        logits = scores;
    }
    const bool weighs = draft.num_knots > 0 || draft.width > 1;
    const int wanted = weighs && noise != nullptr && draft.width < NUM_COMPARED ? NUM_COMPARED : draft.width;
    int* ids = draft_best.get<int>(2 * static_cast<size_t>(wanted));
    float* values = reinterpret_cast<float*>(ids + wanted);
    const int found = top_of(logits, vocab, wanted, ids, values);
    float sharpness = 1.0f, whole = 1.0f;
    if (weighs && noise != nullptr) {
        sharpness = draft.sharpness, whole = 0.0f;
        for (int i = 0; i < found && i < NUM_COMPARED; ++i) whole += std::exp(sharpness * (values[i] - values[0]));
        whole /= draft.kept;
    } else if (weighs && found > 0) {
        whole = sum_of_exp(logits, vocab, values[0]);
    }
    const int table = level < draft.num_tables ? level : draft.num_tables - 1;
    const size_t knots = static_cast<size_t>(table) * draft.num_knots;
    const Node parent = tree.nodes[above];
    for (int i = 0; i < found && i < draft.width; ++i) {
        Node child{ids[i], above, level + 1, -1, -1, 1.0f, 1.0f};
        if (weighs) {
            child.told = std::exp(sharpness * (values[i] - values[0])) / whole;
            const float rate = draft.num_knots > 0 ? interpolate(draft.knots + knots, draft.rates + knots, draft.num_knots, child.told) : child.told;
            child.reached = parent.reached * rate;
            if (!(child.reached > 0.0f)) continue;
        }
        tree.add(child, weighs);
    }
}

// How many nodes of every row are worth their verification.
int worth_verifying(const Draft& draft, const Tree* trees, int rows) {
    int best = 0, most = 0;
    for (int row = 0; row < rows; ++row) most = trees[row].size - 1 > most ? trees[row].size - 1 : most;
    if (most > draft.most) most = draft.most;
    float gain = 0.0f, greatest = -draft.verify[1];
    for (int count = 1; count <= most; ++count) {
        for (int row = 0; row < rows; ++row)
            if (count < trees[row].size) gain += trees[row].nodes[trees[row].order[count - 1]].reached;
        const float net = gain * draft.worth - draft.verify[count + 1];
        if (net > greatest) greatest = net, best = count;
    }
    return best;
}

// Chooses the nodes of the newest level to expand: how many of each row, 0 where another level is not worth its time.
int widen(const Draft& draft, Tree* trees, int rows, int level) {
    const bool plans = draft.num_knots > 0;
    const int kept = plans ? worth_verifying(draft, trees, rows) : 0;
    int entries = 0;
    for (int row = 0; row < rows; ++row) {
        Tree& tree = trees[row];
        int count = 0;
        for (int rank = 0; rank < tree.size - 1 && count < draft.width; ++rank) {
            if (plans && rank >= kept) break;  // it will not be verified, nor what comes below it
            if (tree.order[rank] >= tree.newest) tree.expanded[count++] = tree.order[rank];
        }
        for (int rest = count; rest < draft.width; ++rest) tree.expanded[rest] = -1;
        entries = count > entries ? count : entries;
    }
    if (!plans || entries == 0) return entries;
    const float gain = draft.gains[level], cost = draft.costs[level];
    float sum = 0.0f;
    int worth = 0;
    for (; worth < entries; ++worth) {
        float reached = 0.0f;
        for (int row = 0; row < rows; ++row)
            if (trees[row].expanded[worth] >= 0) reached += trees[row].nodes[trees[row].expanded[worth]].reached;
        if (worth > 0 && !(reached * gain > cost * draft.share)) break;
        sum += reached;
    }
    const float takes = cost * (1.0f + (worth - 1) * draft.share) + draft.verify[kept + 2] - draft.verify[kept + 1];
    return sum * gain > takes ? worth : 0;
}

// Runs the waiting entries of every row; the logits after the last of each.
float* catch_up(const Op* ops, int32_t num_ops, Batch batch, const Draft& draft, int32_t num_threads) {
    const int entries = batch.nodes;
    run_program(ops, draft.num_hidden, &batch, num_threads);
    for (int row = 0; row < batch.rows; ++row) {
        const size_t last = static_cast<size_t>(row) * entries + (draft.counts[row] > 0 ? draft.counts[row] - 1 : 0);
        for (const int buffer : {draft.read, draft.fed_back == draft.read ? -1 : draft.fed_back}) {
            if (buffer < 0) continue;
            const size_t width = batch.widths[buffer];
            memmove(batch.buffers[buffer] + row * width, batch.buffers[buffer] + last * width, width * sizeof(float));
        }
    }
    batch.nodes = 1;
    run_program(ops + draft.num_hidden, num_ops - draft.num_hidden, &batch, num_threads);
    return batch.buffers[draft.logits];
}

// Writes the finished trees, side by side; how many nodes each has room for.
int write_trees(Draft& draft, Tree* trees, int rows) {
    const bool plans = draft.num_knots > 0;
    const int limit = plans ? worth_verifying(draft, trees, rows) : draft.most;
    int width = 1;
    for (int row = 0; row < rows; ++row) {
        const int kept = trees[row].size - 1 < limit ? trees[row].size - 1 : limit;
        width = kept + 1 > width ? kept + 1 : width;
    }
    draft.is_chain = 1, draft.deepest = 0;
    for (int row = 0; row < rows; ++row) {
        Tree& tree = trees[row];
        const int kept = tree.size - 1 < limit ? tree.size - 1 : limit;
        int32_t* at = tree.expanded;  // no longer needed for anything else
        for (int node = 0; node < tree.size; ++node) at[node] = -1;
        at[0] = 0;
        for (int rank = 0; rank < kept; ++rank) at[tree.order[rank]] = 1;
        const size_t start = static_cast<size_t>(row) * width;
        int count = 0;
        for (int node = 0; node < tree.size; ++node) {
            if (at[node] < 0) continue;
            const Node& found = tree.nodes[node];
            at[node] = count;
            const int parent = node == 0 ? -1 : at[found.parent];
            draft.tokens[start + count] = found.token;
            draft.parents[start + count] = parent;
            draft.places[start + count] = found.place;
            draft.told[start + count] = found.told;
            draft.reached[start + count] = found.reached;
            if (parent != count - 1) draft.is_chain = 0;
            if (found.depth > draft.deepest) draft.deepest = found.depth;
            ++count;
        }
        for (; count < width; ++count) {
            draft.tokens[start + count] = draft.parents[start + count] = draft.places[start + count] = -1;
            draft.told[start + count] = draft.reached[start + count] = 0.0f;
        }
    }
    return width;
}

}  // namespace
