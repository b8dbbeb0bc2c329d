// The gated delta rule (Gated DeltaNet, 2412.06464) over draft trees; `models/recurrent.py` computes the same.
//
// A row's states are those after its `marks[0]` first tokens. The inputs of the tokens and nodes from there on are kept, and
// those of the few tokens before, which the convolution reads. So committing moves inputs, as it moves slots, and the next
// forward begins by taking the states to the row's new length. It then walks the tree depth first: the states of one path are
// in memory at a time, and every node has the bits of baseline decoding.

#pragma once

#include "attention.h"

namespace {

thread_local Scratch recurrent_taps, recurrent_token, recurrent_levels, recurrent_links;

constexpr float LENGTH_EPS = 1e-6f;  // added to the squared lengths of queries and keys

// Sizes of a RECUR operation. Columns of its source: queries, keys and values (`conv`), gates of the result, shares, decays.
struct DeltaSizes {
    int keys, values, group;  // heads; value heads per key head
    int key_dim, value_dim, taps, conv;

    explicit DeltaSizes(const Op& op)
        : keys(op.num_kv_heads), values(op.num_heads), group(op.num_heads / op.num_kv_heads), key_dim(op.head_dim),
          value_dim(op.num_in), taps(op.num_out), conv(2 * keys * key_dim + values * value_dim) {}

    int shares() const { return conv + values * value_dim; }  // column in the source; that of kept inputs is `conv`
    size_t state() const { return static_cast<size_t>(key_dim) * value_dim; }
};

// Copies what the heads of one key head read of an input, whose shares are at `column`, to a kept one.
void keep_input(const DeltaSizes& sizes, int head, const float* from, int column, float* to) {
    const auto copy = [&](int source, int target, int count) { memmove(to + target, from + source, count * sizeof(float)); };
    const int keys = sizes.keys * sizes.key_dim, values = sizes.group * sizes.value_dim, shares = head * sizes.group;
    copy(head * sizes.key_dim, head * sizes.key_dim, sizes.key_dim);
    copy(keys + head * sizes.key_dim, keys + head * sizes.key_dim, sizes.key_dim);
    copy(2 * keys + head * values, 2 * keys + head * values, values);
    copy(column + shares, sizes.conv + shares, sizes.group);
    copy(column + sizes.values + shares, sizes.conv + sizes.values + shares, sizes.group);
}

// The convolution and SiLU of channels from `first` on; `taps` are the inputs of the last tokens, the oldest first.
void convolve_taps(const Op& op, const DeltaSizes& sizes, const float* const* taps, int first, int count, float* out) {
    const float* weights = static_cast<const float*>(op.weight) + first;
    for (int c = 0; c < count; c += 16) {
        v16 sum{};
        for (int tap = sizes.taps - 1; tap >= 0; --tap)
            sum += load(taps[tap] + first + c) * load(weights + static_cast<size_t>(tap) * sizes.conv + c);
        store(out + c, activate(SILU, sum));
    }
}

// Scales a head to length `scale`.
void scale_head(float* head, int dim, float scale) {
    v16 squares{};
    for (int d = 0; d < dim; d += 16) squares += load(head + d) * load(head + d);
    const float factor = scale / std::sqrt(sum_of(squares) + LENGTH_EPS);
    for (int d = 0; d < dim; d += 16) store(head + d, load(head + d) * factor);
}

// The query, the key, the values, decays and shares of one key head's states. `shares` are all heads'.
void read_token(const Op& op, const DeltaSizes& sizes, int head, const float* const* taps, const float* shares, float* token) {
    const int keys = sizes.keys * sizes.key_dim, values = sizes.group * sizes.value_dim;
    float *key = token + sizes.key_dim, *value = key + sizes.key_dim, *rates = value + values;
    convolve_taps(op, sizes, taps, head * sizes.key_dim, sizes.key_dim, token);
    convolve_taps(op, sizes, taps, keys + head * sizes.key_dim, sizes.key_dim, key);
    convolve_taps(op, sizes, taps, 2 * keys + head * values, values, value);
    scale_head(token, sizes.key_dim, op.scale);
    scale_head(key, sizes.key_dim, 1.0f);
    for (int g = 0; g < sizes.group; ++g) {
        const int own = head * sizes.group + g;
        const double time = static_cast<double>(shares[sizes.values + own]) + op.bias[own];
        const double softplus = time > 20.0 ? time : std::log1p(std::exp(time));
        rates[g] = static_cast<float>(std::exp(op.scales[own] * softplus));
        rates[sizes.group + g] = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(shares[own]))));
    }
}

// A state after one token, of P * 16 of its columns, and what the token reads from it. May be in place.
template <int P>
inline void step_columns(const float* from, float* to, int key_dim, int value_dim, const float* query, const float* key,
                         const float* value, float decay, float share, float* out) {
    v16 delta[P] = {}, sum[P] = {};
    for (int i = 0; i < key_dim; ++i) {
        const v16 weight = spread_from(key + i);
        for (int p = 0; p < P; ++p) {
            const size_t at = static_cast<size_t>(i) * value_dim + 16 * p;
            const v16 state = load(from + at) * decay;
            store(to + at, state);
            delta[p] += state * weight;
        }
    }
    for (int p = 0; p < P; ++p) delta[p] = (load(value + 16 * p) - delta[p]) * share;
    for (int i = 0; i < key_dim; ++i) {
        const v16 weight = spread_from(key + i), wanted = spread_from(query + i);
        for (int p = 0; p < P; ++p) {
            const size_t at = static_cast<size_t>(i) * value_dim + 16 * p;
            v16 state = load(to + at);
            state += weight * delta[p];
            store(to + at, state);
            sum[p] += state * wanted;
        }
    }
    for (int p = 0; p < P; ++p) store(out + 16 * p, sum[p]);
}

// The states of one key head after a token, and what it reads from them, (group, value_dim).
void step_states(const DeltaSizes& sizes, const float* from, float* to, const float* token, float* out) {
    const float *key = token + sizes.key_dim, *value = key + sizes.key_dim, *rates = value + sizes.group * sizes.value_dim;
    for (int g = 0; g < sizes.group; ++g, from += sizes.state(), to += sizes.state()) {
        const int first = g * sizes.value_dim;
        int d = 0;
        const auto step = [&](auto columns) {
            step_columns<decltype(columns)::value>(from + d, to + d, sizes.key_dim, sizes.value_dim, token, key, value + first + d, rates[g],
                                  rates[sizes.group + g], out + first + d);
        };
        for (; d + 64 <= sizes.value_dim; d += 64) step(std::integral_constant<int, 4>());
        for (; d < sizes.value_dim; d += 16) step(std::integral_constant<int, 1>());
    }
}

// Calls `visit(node, depth)` for a tree's used nodes, depth first.
template <typename F> void walk_tree(const int64_t* parents, int nodes, F visit) {
    int32_t* child = recurrent_links.get<int32_t>(2 * static_cast<size_t>(nodes));
    int32_t* sibling = child + nodes;
    std::fill(child, sibling + nodes, -1);
    for (int node = nodes - 1; node > 0; --node)
        if (parents[node] >= 0) sibling[node] = child[parents[node]], child[parents[node]] = node;
    for (int node = 0, depth = 0; node >= 0;) {
        visit(node, depth);
        if (child[node] >= 0) {
            node = child[node], ++depth;
            continue;
        }
        while (node >= 0 && sibling[node] < 0) node = static_cast<int>(parents[node]), --depth;
        if (node >= 0) node = sibling[node];
    }
}

// One key head's part of a recurrent layer, for a row's nodes.
void recur(const Op& op, const Batch& batch, int row, int head) {
    const DeltaSizes sizes(op);
    const int nodes = batch.nodes, first = batch.first_node, before = sizes.taps - 1;
    const int width = batch.widths[op.source], out_width = batch.widths[op.target];
    const int values = sizes.group * sizes.value_dim, pending = static_cast<int>(batch.lengths[row] - batch.marks[2 * row]);
    const size_t kept_width = batch.kept_width, states_size = sizes.group * sizes.state();
    const int64_t* parents = batch.parents + static_cast<size_t>(row) * batch.tree_nodes;
    float* committed = batch.states + op.layer * batch.states_layer + row * batch.states_row + head * states_size;
    float* kept = batch.kept + op.layer * batch.kept_layer + row * batch.kept_row;
    const float* source = batch.buffers[op.source] + static_cast<size_t>(row) * nodes * width;
    float* target = batch.buffers[op.target] + static_cast<size_t>(row) * nodes * out_width + op.column;
    const auto column_of = [&](int g) { return (op.is_tiled ? g * sizes.keys + head : head * sizes.group + g) * sizes.value_dim; };
    const float** taps = recurrent_taps.get<const float*>(sizes.taps);
    float* token = recurrent_token.get<float>(2 * sizes.key_dim + values + 2 * sizes.group + values);
    float* mixed = token + 2 * sizes.key_dim + values + 2 * sizes.group;

    // To the row's length.
    for (int p = 0; p < pending; ++p) {
        for (int tap = 0; tap < sizes.taps; ++tap) taps[tap] = kept + (p + tap) * kept_width;
        read_token(op, sizes, head, taps, taps[before] + sizes.conv, token);
        step_states(sizes, committed, committed, token, mixed);
    }
    for (int i = 0; i < before + first && pending > 0; ++i)
        keep_input(sizes, head, kept + (i + pending) * kept_width, sizes.conv, kept + i * kept_width);

    // The tree.
    const auto input_of = [&](int64_t node) {  // -1: the last committed token, -2: the one before
        return node >= first ? source + (node - first) * width : kept + (before + node) * kept_width;
    };
    for (int i = 0; i < nodes; ++i)  // unused ones
        for (int g = 0; g < sizes.group; ++g)
            memset(target + static_cast<size_t>(i) * out_width + column_of(g), 0, sizes.value_dim * sizeof(float));
    int depths = 1;
    if (!batch.keeps_all) walk_tree(parents, batch.tree_nodes, [&](int, int depth) { depths = std::max(depths, depth + 1); });
    float* levels = batch.keeps_all ? nullptr : recurrent_levels.get<float>(depths * states_size);
    walk_tree(parents, batch.tree_nodes, [&](int node, int depth) {
        for (int64_t tap = before, own = node; tap >= 0; --tap) {
            taps[tap] = input_of(own);
            own = own >= 0 ? parents[own] : own - 1;
        }
        read_token(op, sizes, head, taps, taps[before] + (node >= first ? sizes.shares() : sizes.conv), token);
        const float* from = depth == 0 || batch.keeps_all ? committed : levels + (depth - 1) * states_size;
        step_states(sizes, from, batch.keeps_all ? committed : levels + depth * states_size, token, mixed);
        if (node < first) return;
        const float* gates = source + static_cast<size_t>(node - first) * width + sizes.conv + head * values;
        for (int g = 0; g < sizes.group; ++g, gates += sizes.value_dim) {
            float* out = target + static_cast<size_t>(node - first) * out_width + column_of(g);
            norm_row(mixed + g * sizes.value_dim, op.norm, sizes.value_dim, op.eps, out);
            for (int d = 0; d < sizes.value_dim; d += 16) store(out + d, load(out + d) * activate(SILU, load(gates + d)));
        }
    });

    // The inputs that later forwards read.
    if (!batch.keeps_all) {
        for (int i = 0; i < nodes; ++i)
            keep_input(sizes, head, source + static_cast<size_t>(i) * width, sizes.shares(), kept + (before + first + i) * kept_width);
        return;
    }
    for (int i = 0; i < before; ++i) {
        const int node = nodes - before + i;
        const bool is_new = node >= 0;
        keep_input(sizes, head, input_of(node), is_new ? sizes.shares() : sizes.conv, kept + i * kept_width);
    }
}

// Notes which tokens the states and the kept inputs of a batch's rows are of, after a forward.
void mark_states(const Batch& batch) {
    for (int row = 0; row < batch.rows; ++row) {
        const int64_t length = batch.lengths[row], end = length + batch.tree_nodes;
        batch.marks[2 * row] = batch.keeps_all ? end : length;
        batch.marks[2 * row + 1] = end;
    }
}

// Moves the inputs of a row's node, in all layers, to where those of a committed token are.
void move_input(const Batch& batch, int row, int64_t from, int64_t to) {
    const int64_t first = batch.num_recurrent == 0 ? 0 : batch.lengths[row] - batch.marks[2 * row] + batch.kept_before;
    for (int layer = 0; layer < batch.num_recurrent; ++layer) {
        float* kept = batch.kept + layer * batch.kept_layer + row * batch.kept_row;
        memcpy(kept + (first + to) * batch.kept_width, kept + (first + from) * batch.kept_width, batch.kept_width * sizeof(float));
    }
}

}  // namespace
