// Whole drafts in one call: trees that grow level by level, by the worth of their nodes. Equals `TreeBuilder`.

#pragma once

#include "adjust.h"
#include "filters.h"
#include "noise.h"
#include "programs.h"

namespace {

// The target's program, which verifies finished trees in the same call.
struct VerifyArgs {
    const Op* ops;
    Batch* batch;  // with memory for the largest trees; their shape is written into it
    const AcceptArgs* accept;
    double seconds;  // written: duration of the verification
    int32_t num_ops;
};

// A tree to draft for every row: each expanded node gets its best children by score, logits / temperature + noise.
struct Draft {
    int32_t depth, width, max_nodes;  // maxima: levels; expanded nodes per level and children of each; nodes to keep
    int32_t vocab_size, room;  // room: nodes per row in the arrays that are written
    int32_t num_fuse, num_hidden;  // operations: for unread entries only; before those of the logits
    int32_t logits, read, states, fed_back;  // buffers, -1 for none; read: input of the logits
    int32_t num_tables, num_knots;  // no knots: the tree does not depend on a rule
    int32_t kept_out = -1;  // buffer that keeps the net's second output of every forward; -1: not kept
    float sharpness, hit_rate, scale;  // of probabilities under noise, see Calibration; hit_rate: 1 - miss
    float worth, share;  // value of a token in seconds; time of a further node of a level, as a share of the first
    const int64_t* counts;  // (rows) unread entries
    const int64_t* active;  // (rows) 0: lone root
    const float* temperatures;  // (rows) 0: greedy
    const int32_t* top_k;  // (rows) 0: none
    const float* top_p;  // (rows) 1: none
    const float* min_p;  // (rows) 0: none
    const Adjust* adjusts;  // (rows) applied to the logits first; null: none
    NoiseStore* noise;
    const int64_t* seeds;  // (rows) -1: no noise is added
    const int64_t* starts;  // (rows) positions of the tokens after the roots
    const float* knots;  // (tables, knots) drafter probabilities and their acceptance rates, by level
    const float* rates;
    const float* gains;  // (depth) value of reaching the next level, and seconds of its first node
    const float* costs;
    const float* verify;  // (max_nodes + 3) seconds to verify that many nodes, the root included
    int64_t* tokens;  // (rows, nodes) the finished trees; -1 for unused nodes
    int64_t* parents;
    int64_t* places;  // index among the expanded nodes, which is the order of their slots; -1 for leaves
    float* node_probs;  // the net's probability given the parent; acceptance probability of the path
    float* path_probs;
    VerifyArgs* verify_args;  // null: the trees are returned unverified
    int32_t num_levels, is_chain, deepest;  // written: drafted levels, shape of the finished trees
    float num_forwards;  // written: 1 per level, plus `share` for each further node of it
};

float interpolate(const float* x, const float* y, int count, float at) {
    int right = 0;
    while (right < count && x[right] < at) ++right;
    if (right == 0 || right == count) return y[right == 0 ? 0 : count - 1];
    const float gap = x[right] - x[right - 1], share = gap > 0 ? (at - x[right - 1]) / gap : 1.0f;
    return y[right - 1] + share * (y[right] - y[right - 1]);
}

// --- a draft ---------------------------------------------------------------------------------------------------------

constexpr int NUM_COMPARED = 8;  // scores under noise that a probability is normalised over

struct Node {
    int64_t token;
    int32_t parent, depth;
    int32_t place, entry;  // index among the expanded nodes, and among those of its level; -1: not expanded
    float node_prob, path_prob;
};

// The tree of one row while it grows. Nodes are in the order in which they were added: parents first.
struct Tree {
    Node* nodes;
    int32_t* order;  // all but the root by path probability; equal ones as they were added
    int32_t* expanded;  // nodes of the newest level; -1 if the row has fewer than others
    int32_t size, newest;  // newest: the first node of the newest level

    void add(const Node& node, bool is_ranked) {
        int place = size - 1;
        if (is_ranked)
            for (; place > 0 && node.path_prob > nodes[order[place - 1]].path_prob; --place) order[place] = order[place - 1];
        order[place] = size;
        nodes[size++] = node;
    }
};

thread_local Scratch draft_scores, draft_best, draft_trees, draft_nodes, draft_numbers, draft_parents, draft_tokens, draft_path;

// Applies penalties and biases to the logits after an expanded node, in place.
void adjust_after(const Draft& draft, int row, const TokenCounts& said, float* logits, const Tree& tree, int above) {
    const int count = tree.nodes[above].depth + 1;
    int64_t* path = draft_path.get<int64_t>(count);
    for (int place = count, node = above; place-- > 0; node = tree.nodes[node].parent) path[place] = tree.nodes[node].token;
    adjust_scores(draft.adjusts[row], said, path, count, logits, draft.vocab_size);
}

// Adds the children of an expanded node.
void branch(const Draft& draft, int row, int level, const float* logits, Tree& tree, int above) {
    const int vocab = draft.vocab_size;
    const float temperature = draft.temperatures[row];
    const auto held = draft.noise->hold();
    const bool is_drawn = draft.seeds[row] >= 0;
    if (temperature > 0.0f) {
        float* scores = draft_scores.get<float>(vocab);
        for (int i = 0; i < vocab; ++i) scores[i] = logits[i] / temperature;
        const Filter filter{temperature, draft.top_k[row], draft.top_p[row], draft.min_p[row]};
        const float cut = cut_of<false>(filter, scores, vocab), scale = is_drawn ? draft.scale : 1.0f;
        if (filter.cuts() || scale != 1.0f)
            for (int i = 0; i < vocab; ++i) {
                const float scaled = scores[i] * scale;
                scores[i] = scores[i] < cut ? -INFINITY : scaled;
            }
        logits = scores;
    }
    const bool weighs = draft.num_knots > 0 || draft.width > 1;
    const int wanted = weighs && is_drawn && draft.width < NUM_COMPARED ? NUM_COMPARED : draft.width;
    int* ids = draft_best.get<int>(2 * static_cast<size_t>(wanted));
    float* values = reinterpret_cast<float*>(ids + wanted);
    const int found = is_drawn ? top_of(NoisyScores{logits, draft.noise->at(draft.seeds[row], draft.starts[row] + level)}, vocab, wanted, ids, values)
                               : top_of(PlainScores{logits}, vocab, wanted, ids, values);
    float sharpness = 1.0f, whole = 1.0f;
    if (weighs && is_drawn) {
        sharpness = draft.sharpness, whole = 0.0f;
        for (int i = 0; i < found && i < NUM_COMPARED; ++i) whole += std::exp(sharpness * (values[i] - values[0]));
        whole /= draft.hit_rate;
    } else if (weighs && found > 0) {
        whole = sum_of_exp(logits, vocab, values[0]);
    }
    const int table = level < draft.num_tables ? level : draft.num_tables - 1;
    const size_t knots = static_cast<size_t>(table) * draft.num_knots;
    const Node parent = tree.nodes[above];
    for (int i = 0; i < found && i < draft.width; ++i) {
        Node child{ids[i], above, level + 1, -1, -1, 1.0f, 1.0f};
        if (weighs) {
            child.node_prob = std::exp(sharpness * (values[i] - values[0])) / whole;
            const float rate = draft.num_knots > 0 ? interpolate(draft.knots + knots, draft.rates + knots, draft.num_knots, child.node_prob) : child.node_prob;
            child.path_prob = parent.path_prob * rate;
            if (!(child.path_prob > 0.0f)) continue;
        }
        tree.add(child, weighs);
    }
}

// Returns how many nodes of every row are worth their verification.
int worth_verifying(const Draft& draft, const Tree* trees, int rows) {
    int best = 0, most = 0;
    for (int row = 0; row < rows; ++row) most = trees[row].size - 1 > most ? trees[row].size - 1 : most;
    if (most > draft.max_nodes) most = draft.max_nodes;
    float gain = 0.0f, greatest = -draft.verify[1];
    for (int count = 1; count <= most; ++count) {
        for (int row = 0; row < rows; ++row)
            if (count < trees[row].size) gain += trees[row].nodes[trees[row].order[count - 1]].path_prob;
        const float net = gain * draft.worth - draft.verify[count + 1];
        if (net > greatest) greatest = net, best = count;
    }
    return best;
}

// Chooses the newest level's nodes to expand; returns their number per row, 0 if another level is not worth its time.
int widen(const Draft& draft, Tree* trees, int rows, int level) {
    const bool plans = draft.num_knots > 0;
    const int kept = plans ? worth_verifying(draft, trees, rows) : 0;
    int entries = 0;
    for (int row = 0; row < rows; ++row) {
        Tree& tree = trees[row];
        int count = 0;
        for (int rank = 0; rank < tree.size - 1 && count < draft.width; ++rank) {
            if (plans && rank >= kept) break;  // neither it nor its descendants would be verified
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
            if (trees[row].expanded[worth] >= 0) reached += trees[row].nodes[trees[row].expanded[worth]].path_prob;
        if (worth > 0 && !(reached * gain > cost * draft.share)) break;
        sum += reached;
    }
    const float takes = cost * (1.0f + (worth - 1) * draft.share) + draft.verify[kept + 2] - draft.verify[kept + 1];
    return sum * gain > takes ? worth : 0;
}

// Runs the unread entries of every row; returns the logits after the last one of each.
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

// Writes the finished trees; returns the nodes per row, unused ones included.
int write_trees(Draft& draft, Tree* trees, int rows) {
    const bool plans = draft.num_knots > 0;
    const int limit = plans ? worth_verifying(draft, trees, rows) : draft.max_nodes;
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
            draft.node_probs[start + count] = found.node_prob;
            draft.path_probs[start + count] = found.path_prob;
            if (parent != count - 1) draft.is_chain = 0;
            if (found.depth > draft.deepest) draft.deepest = found.depth;
            ++count;
        }
        for (; count < width; ++count) {
            draft.tokens[start + count] = draft.parents[start + count] = draft.places[start + count] = -1;
            draft.node_probs[start + count] = draft.path_probs[start + count] = 0.0f;
        }
    }
    return width;
}

}  // namespace
