// Attention of a tree's nodes over all or some committed slots and over their ancestors.

#pragma once

#include <algorithm>
#include <optional>

#include "narrow_slots.h"

namespace {

#if defined(__AVX512F__)
constexpr bool WIDE = true;  // enough registers for the sums of four vectors for each of six queries
#else
constexpr bool WIDE = false;
#endif

thread_local Scratch attention_queries, attention_scores, attention_path, attention_block, attention_page, attention_depths;

// Keys of 16 slots are stored transposed, (dim, 16); values slot by slot, (dim).

// Rotates and norms a head.
inline void rotate(const Op& op, const Batch& batch, const float* x, const float* norm, const float* rotation, float* out) {
    const int half = op.rotation_pairs > 0 ? op.rotation_pairs : op.rotation_pairs < 0 ? 0 : batch.rotary_half;
    const int dim = op.head_dim;
    float normed[1024];
    if (norm != nullptr && !op.norms_rotated) {
        norm_row(x, norm, dim, op.eps, normed);
        x = normed;
    }
    rotation += 2 * op.rotation_first;
    for (int i = 0; i < half; ++i) {
        const float real = rotation[2 * i], imaginary = rotation[2 * i + 1];
        out[i] = fused(x[i], real, -(x[half + i] * imaginary));
        out[half + i] = fused(x[i], imaginary, x[half + i] * real);
    }
    for (int i = 2 * half; i < dim; ++i) out[i] = x[i];
    if (norm != nullptr && op.norms_rotated) norm_row(out, norm, dim, op.eps, out);
}

// B blocks of keys of slots of `words` numbers at a time: enough independent sums to hide the latency of an addition.
template <int Q, int B>
inline void score_blocks(const float* queries, int dim, const float* keys, int words, float* scores, size_t stride) {
    v16 sum[Q][B] = {};
    for (int d = 0; d < dim; ++d) {
        v16 key[B];
        for (int b = 0; b < B; ++b) key[b] = load(keys + (b * words + d) * KEYS);
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) {
            const v16 value = spread_from(queries + q * dim + d);
#pragma GCC unroll 4
            for (int b = 0; b < B; ++b) sum[q][b] += key[b] * value;
        }
    }
    for (int q = 0; q < Q; ++q)
        for (int b = 0; b < B; ++b) store(scores + q * stride + b * KEYS, sum[q][b]);
}

// Adds the values of contiguous slots, `apart` numbers from each other, times `weights`, to `out` (dim), in the order of the slots.
template <int Q, int P>
inline void mix_parts(const float* weights, size_t stride, const float* values, int apart, int count, int dim, float* out) {
    v16 sum[Q][P];
    for (int q = 0; q < Q; ++q)
        for (int p = 0; p < P; ++p) sum[q][p] = load(out + q * dim + 16 * p);
    for (int s = 0; s < count; ++s, values += apart) {
        v16 value[P];
        for (int p = 0; p < P; ++p) value[p] = load(values + 16 * p);
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) {
            const v16 weight = spread_from(weights + q * stride + s);
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) sum[q][p] += value[p] * weight;
        }
    }
    for (int q = 0; q < Q; ++q)
        for (int p = 0; p < P; ++p) store(out + q * dim + 16 * p, sum[q][p]);
}

template <int Q>
inline void mix(const float* weights, size_t stride, const float* values, int apart, int count, int dim, float* out) {
    constexpr int P = WIDE ? 4 : Q > 3 ? 1 : 2;  // as many sums as fit in registers
    int d = 0;
    for (; d + 16 * P <= dim; d += 16 * P) mix_parts<Q, P>(weights, stride, values + d, apart, count, dim, out + d);
    for (; d < dim; d += 32) mix_parts<Q, 2>(weights, stride, values + d, apart, count, dim, out + d);
}

inline void mix_all(int count, const float* weights, size_t stride, const float* values, int apart, int slots, int dim, float* out) {
    int q = 0;
    for (; q + 6 <= count; q += 6) mix<6>(weights + q * stride, stride, values, apart, slots, dim, out + q * dim);
    for (; q + 3 <= count; q += 3) mix<3>(weights + q * stride, stride, values, apart, slots, dim, out + q * dim);
    for (; q < count; ++q) mix<1>(weights + q * stride, stride, values, apart, slots, dim, out + q * dim);
}

// Caps the scores at positions `low` to `last`.
void cap_scores(float* scores, int low, int last, float cap) {
    for (int i = low / 16 * 16; i <= last; i += 16) store(scores + i, capped(load(scores + i), cap));
}

// Exponentiates the scores of one query at positions `low` to `last` in place; returns their sum, with that of a sink.
float softmax(float* scores, int low, int last, const float* sink) {
    const int begin = low / 16 * 16, end = (last + 16) / 16 * 16;
    for (int i = begin; i < low; ++i) scores[i] = -INFINITY;
    for (int i = last + 1; i < end; ++i) scores[i] = -INFINITY;
    v16 largest = spread(-INFINITY);
    for (int i = begin; i < end; i += 16) {
        largest = larger(load(scores + i), largest);
    }
    float top = largest[0];
    for (int i = 1; i < 16; ++i) top = largest[i] > top ? largest[i] : top;
    if (sink != nullptr && *sink > top) top = *sink;
    v16 sum{};
    for (int i = begin; i < end; i += 16) {
        const v16 part = exp_of(load(scores + i) - top);
        store(scores + i, part);
        sum += part;
    }
    return sum_of(sum) + (sink != nullptr ? exp_of(spread(*sink - top))[0] : 0.0f);
}

// The committed slots that a row's queries attend to in one layer, for one KV head.
struct Seen {
    const int32_t* slots;  // ascending; null for all of them
    int count;

    int slot(int place) const { return slots == nullptr ? place : slots[place]; }

    // Index of the first slot at or past a position.
    int from(int position) const {
        if (slots == nullptr) return position < count ? position : count;
        return static_cast<int>(std::lower_bound(slots, slots + count, position) - slots);
    }

    // End of a contiguous range of slots in one page, small enough that their values stay in the cache for all queries.
    int run(int begin) const {
        const int room = PAGE - slot(begin) % PAGE, most = begin + room < count ? begin + room : count;
        if (slots == nullptr) return most;
        int end = begin + 1;
        while (end < most && slots[end] == slots[end - 1] + 1) ++end;
        return end;
    }
};

Seen seen_of(const Batch& batch, int row, int layer, int kv_head) {
    if (batch.view == nullptr) return {nullptr, static_cast<int>(batch.lengths[row])};
    const int32_t* slots = batch.view + row * batch.view_row + layer * batch.view_layer + kv_head * batch.view_head;
    return {slots, static_cast<int>(batch.viewed[row])};
}

template <int B = 1>
inline void score(const float* queries, int count, int dim, const float* keys, int words, float* scores, size_t stride) {
    int q = 0;
    for (; q + 6 <= count; q += 6) score_blocks<6, B>(queries + q * dim, dim, keys, words, scores + q * stride, stride);
    for (; q + 3 <= count; q += 3) score_blocks<3, B>(queries + q * dim, dim, keys, words, scores + q * stride, stride);
    for (; q < count; ++q) score_blocks<1, B>(queries + q * dim, dim, keys, words, scores + q * stride, stride);
}

// Computes the scores of the slots from index `begin` on, followed by those of the tree's slots. `score_block` computes those
// of a block of `size` slots.
template <typename F>
void score_view(const Seen& seen, int begin, int length, int nodes, int count, int size, float* scores, size_t stride,
                F score_block) {
    float* some = attention_block.get<float>(static_cast<size_t>(count) * size);
    const auto take = [&](int slot, int num, int place) {  // `num` slots of one block
        const int block = slot / size * size;
        const bool in_tree = place >= seen.count;
        score_block(block, some, size);
        for (int q = 0; q < count; ++q)
            for (int i = 0; i < num; ++i)
                scores[q * stride + place + i] = some[q * size + (in_tree ? slot + i : seen.slots[place + i]) - block];
    };
    for (int at = begin; at < seen.count;) {
        const int slot = seen.slots[at], next = slot / size * size + size;
        int end = at + 1;
        while (end < seen.count && seen.slots[end] < next) ++end;
        if (end - at == size)
            score_block(slot, scores + at, stride);
        else
            take(slot, end - at, at);
        at = end;
    }
    for (int node = 0; node < nodes;) {
        const int slot = length + node, room = size - slot % size, num = room < nodes - node ? room : nodes - node;
        take(slot, num, seen.count + node);
        node += num;
    }
}

// The first position that a query at `position` sees.
inline int first_visible(const Op& op, int position) {
    if (op.window < 0) return position / -op.window * -op.window;
    return op.window > 0 && position >= op.window ? position - op.window + 1 : 0;
}

// Returns whether the first `count` nodes of a row's tree are a chain.
inline bool is_chain(const Batch& batch, int row, int count) {
    const int64_t* parents = batch.parents + static_cast<size_t>(row) * batch.tree_nodes;
    for (int node = 0; node < count; ++node)
        if (parents[node] != node - 1) return false;
    return true;
}

// Depth of each node of a row's tree.
void depths_of(const Batch& batch, int row, int32_t* depths) {
    const int64_t* parents = batch.parents + static_cast<size_t>(row) * batch.tree_nodes;
    for (int node = 0; node < batch.tree_nodes; ++node)
        depths[node] = parents[node] < 0 ? 0 : depths[parents[node]] + 1;
}

// The rotation factors of a row's node.
inline const float* rotation_of(const Batch& batch, int row, int i, const int32_t* depths) {
    const size_t angle = batch.rotation_by_row ? static_cast<size_t>(row) * batch.nodes + i
                                               : static_cast<size_t>(batch.lengths[row] + depths[batch.first_node + i]);
    return batch.rotation + angle * 2 * batch.rotary_half;
}

// The first word of a layer's KV head in a row's slots.
inline float* head_of(const Op& op, const Batch& batch, int row, int kv_head) {
    return batch.cache + op.slot_layer * batch.layer_stride + row * batch.row_stride + kv_head * batch.head_stride;
}

// Writes the keys and values of a row's nodes into their slots, for one KV head.
void write_slots(const Op& op, const Batch& batch, int row, int kv_head) {
    if (batch.watch != nullptr || op.reads_only) return;
    const int dim = op.head_dim, words = batch.slot_words, width = batch.widths[op.source];
    const int shared = op.shared_dim, key_dim = dim - shared, after_keys = op.num_heads * dim + op.num_kv_heads * key_dim;
    float* head = head_of(op, batch, row, kv_head);
    float *keys = head + op.slot_first * batch.key_block, *values = head + batch.value_stride + op.slot_first;
    const Slots at = slots_of(batch, row);
    int32_t* depths = attention_depths.get<int32_t>(batch.tree_nodes);
    depths_of(batch, row, depths);
    float turned[1024], joined[1024], normed[1024];
    for (int i = 0; i < batch.nodes; ++i) {
        const int slot = static_cast<int>(batch.lengths[row]) + batch.first_node + i;
        const float* in = batch.buffers[op.source] + (static_cast<size_t>(row) * batch.nodes + i) * width;
        const float *own = in + op.num_heads * dim + kv_head * key_dim, *own_value = in + after_keys + kv_head * op.value_dim;
        if (shared > 0) {
            memcpy(joined, in + after_keys + op.num_kv_heads * op.value_dim, shared * sizeof(float));
            memcpy(joined + shared, own, key_dim * sizeof(float));
            own = joined;
        }
        rotate(op, batch, own, op.k_norm, rotation_of(batch, row, i, depths), turned);
        if (op.v_norm != nullptr) {
            norm_row(own_value, op.v_norm, op.value_dim, op.eps, normed);
            own_value = normed;
        }
        float *key = key_of(batch, keys, at, slot), *value = values + at(slot) * words;
        if (has_narrow_slots(batch)) {
            write_narrow(turned, dim, own_value, op.value_dim, key, value);
            continue;
        }
        for (int d = 0; d < dim; ++d) key[d * KEYS] = turned[d];
        memcpy(value, own_value, op.value_dim * sizeof(float));
    }
}

// Attention of a row's nodes from `begin` to before `end`, for one KV head; keys and values are in their slots already.
void attend(const Op& op, const Batch& batch, int row, int kv_head, int begin, int end) {
    const int dim = op.head_dim, value_dim = op.value_dim, groups = op.num_heads / op.num_kv_heads, nodes = batch.nodes;
    const int length = static_cast<int>(batch.lengths[row]);
    const int slot_head = kv_head * op.heads_apart;  // its number in views and watched weights
    const Seen seen = seen_of(batch, row, op.layer, slot_head);
    const int upto = batch.first_node + end;  // ancestors precede a node
    const bool is_narrow = has_narrow_slots(batch);
    const int words = batch.slot_words, size = batch.key_block;
    const int padded = (seen.count + upto + size - 1) / size * size;
    const size_t stride = padded + 16;
    const int64_t* parents = batch.parents + static_cast<size_t>(row) * batch.tree_nodes;
    float* head = head_of(op, batch, row, kv_head);
    float *keys = head + op.slot_first * batch.key_block, *values = head + batch.value_stride + op.slot_first;
    const Slots at = slots_of(batch, row);
    const float* qkv = batch.buffers[op.source];
    const int width = batch.widths[op.source], out_width = batch.widths[op.target];
    const int num_queries = (end - begin) * groups;
    float* queries = attention_queries.get<float>(static_cast<size_t>(num_queries) * (dim + value_dim));
    float* mixed = queries + static_cast<size_t>(num_queries) * dim;
    float* scores = attention_scores.get<float>(num_queries * stride);
    int32_t* depths = attention_depths.get<int32_t>(batch.tree_nodes);
    depths_of(batch, row, depths);
    for (int i = begin; i < end; ++i) {
        const float* in = qkv + (static_cast<size_t>(row) * nodes + i) * width;
        const float* rotation = rotation_of(batch, row, i, depths);
        const float scale = op.query_scale > 0 ? op.scale * rotation[2 * (op.query_scale - 1)] : op.scale;
        for (int g = 0; g < groups; ++g) {
            float* query = queries + (static_cast<size_t>(i - begin) * groups + g) * dim;
            rotate(op, batch, in + (kv_head * groups + g) * dim, op.q_norm, rotation, query);
            for (int d = 0; d < dim; ++d) query[d] *= scale;
        }
    }

    // With a window, slots that no query sees are not scored: positions increase with the queries' depths.
    const int lowest = first_visible(op, length) / size * size;
    std::optional<NarrowQueries> narrow;
    if (is_narrow) narrow.emplace(queries, num_queries, dim);
    const auto score_block = [&](int block, float* to, size_t apart) {
        const float* some = keys + at(block) * words;
        if (is_narrow) narrow->score(some, to, apart);
        else score(queries, num_queries, dim, some, words, to, apart);
    };
    if (seen.slots != nullptr)
        score_view(seen, seen.from(lowest), length, upto, num_queries, size, scores, stride, score_block);
    else if (is_narrow)
        for (int block = lowest; block < padded; block += size) score_block(block, scores + block, stride);
    else
        for (int block = lowest; block < padded;) {
            const float* some = keys + at(block) * words;
            const int together = WIDE ? std::min(padded - block, PAGE - block % PAGE) / KEYS : 1;  // in one page
            if (together == 4) score<4>(queries, num_queries, dim, some, words, scores + block, stride);
            else if (together > 1) score<2>(queries, num_queries, dim, some, words, scores + block, stride);
            else score(queries, num_queries, dim, some, words, scores + block, stride);
            block += (together == 3 ? 2 : together) * KEYS;
        }

    // The scores of a node's ancestors, by depth, follow those of the committed slots. Those that all queries have in common are
    // read like committed slots if they are a chain: most of a prompt's.
    int* path = attention_path.get<int>(batch.tree_nodes);
    const bool follows = seen.slots == nullptr && is_chain(batch, row, upto);
    const int before = follows ? batch.first_node + begin : 0;
    const Seen common{seen.slots, seen.count + before};
    const auto find_path = [&](int node) {
        for (int d = depths[node]; d >= 0; --d, node = static_cast<int>(parents[node])) path[d] = node;
    };
    if (follows) find_path(upto - 1);
    const auto page_of = [&](int first) -> const float* {  // the values of a page of places
        if (seen.slots == nullptr) return values + at(first) * words;
        float* page = attention_page.get<float>(static_cast<size_t>(PAGE) * words);
        for (int i = 0; i < PAGE; ++i) {
            const int place = std::min(first + i, seen.count + upto - 1);
            const int slot = place < seen.count ? seen.slots[place] : length + place - seen.count;
            memcpy(page + i * words, values + at(slot) * words, (dim / 4 + 1) * sizeof(float));
        }
        return page;
    };
    std::optional<NarrowWeights> weights;
    if (is_narrow) weights.emplace(num_queries, dim, words, value_dim, seen.from(lowest) / size * size, padded, page_of);
    for (int i = begin; i < end; ++i) {
        const int depth = depths[batch.first_node + i], last = length + depth;
        if (!follows) find_path(batch.first_node + i);
        const int low = first_visible(op, last);
        const int first = low < length ? seen.from(low) : seen.count + low - length;
        for (int g = 0; g < groups; ++g) {
            const size_t query = static_cast<size_t>(i - begin) * groups + g;
            float* own = scores + query * stride;
            if (!follows)
                for (int d = 0; d <= depth; ++d) own[seen.count + d] = own[seen.count + path[d]];
            if (op.cap != 0.0f) cap_scores(own, first, seen.count + depth, op.cap);
            const float* sink = op.sinks == nullptr ? nullptr : op.sinks + kv_head * groups + g;
            const float sum = softmax(own, first, seen.count + depth, sink);
            memset(mixed + query * value_dim, 0, value_dim * sizeof(float));
            own[padded] = sum;  // stored after the scores until the values are summed
            if (batch.watch != nullptr) {
                float* watched = batch.watch + op.layer * batch.watch_layer + (slot_head + g * op.heads_apart / groups) * batch.watch_head;
                for (int place = first; place < seen.count; ++place) watched[seen.slot(place)] += own[place] / sum;
            }
            if (!is_narrow) continue;
            std::fill(own + seen.count + depth + 1, own + padded, 0.0f);
            for (int d = depth; d >= 0; --d) {  // back to their nodes' places
                const float weight = length + d < low ? 0.0f : own[seen.count + d];
                own[seen.count + d] = 0.0f;
                own[seen.count + path[d]] = weight;
            }
            own[padded + 1] = weights->round(static_cast<int>(query), own, first / 16 * 16);
        }
    }
    if (is_narrow)
        weights->mix(page_of, mixed);
    else if (op.window == 0) {
        for (int from = 0, to; from < common.count; from = to) {  // all queries use a block of values while it is in the cache
            to = common.run(from);
            const float* some = values + at(common.slot(from)) * words;
            mix_all(num_queries, scores + from, stride, some, words, to - from, value_dim, mixed);
        }
    }
    for (int i = begin; i < end; ++i) {
        const int depth = depths[batch.first_node + i], last = length + depth;
        if (!follows) find_path(batch.first_node + i);
        const int low = first_visible(op, last);
        const size_t place = static_cast<size_t>(row) * nodes + i;
        for (int g = 0; g < groups; ++g) {
            const size_t query = static_cast<size_t>(i - begin) * groups + g;
            float* own = scores + query * stride;
            float* sums = mixed + query * value_dim;
            float* out = batch.buffers[op.target] + place * out_width + op.column + (kv_head * groups + g) * value_dim;
            const float whole = own[padded];
            if (is_narrow) {
                for (int part = 0; part < value_dim; part += 16) store(out + part, load(sums + part) * own[padded + 1] / whole);
                continue;
            }
            for (int from = op.window != 0 ? common.from(low) : common.count, to; from < common.count; from = to) {
                to = common.run(from);
                mix<1>(own + from, stride, values + at(common.slot(from)) * words, words, to - from, value_dim, sums);
            }
            for (int d = std::max(before, low - length); d <= depth; ++d) {
                const float* value = values + at(length + path[d]) * words;
                const v16 weight = spread(own[seen.count + d]);
                for (int part = 0; part < value_dim; part += 16) store(sums + part, load(sums + part) + load(value + part) * weight);
            }
            for (int part = 0; part < value_dim; part += 16) store(out + part, load(sums + part) / whole);
        }
    }
    if (!op.is_gated) return;
    for (int i = begin; i < end; ++i) {
        const size_t place = static_cast<size_t>(row) * nodes + i;
        const int first = kv_head * groups * dim;
        const float* gates = qkv + place * width + (op.num_heads + 2 * op.num_kv_heads) * dim + first;
        float* out = batch.buffers[op.target] + place * out_width + op.column + first;
        for (int d = 0; d < groups * dim; d += 16) store(out + d, load(out + d) / (1.0f + exp_of(-load(gates + d))));
    }
}

// A short convolution of a row's nodes along their paths, over the channels that the slots of one KV head hold: `num_in`
// channels of b * x, half of a head's in its keys, half in its values. The source's columns are b, gates of the result, x.
void convolve(const Op& op, const Batch& batch, int row, int kv_head) {
    const int dim = batch.slot_words, channels = op.num_in, first = 2 * dim * kv_head;
    const int count = std::min(2 * dim, channels - first);
    if (count <= 0) return;
    const int width = batch.widths[op.source], out_width = batch.widths[op.target];
    const int length = static_cast<int>(batch.lengths[row]);
    const int64_t* parents = batch.parents + static_cast<size_t>(row) * batch.tree_nodes;
    float* keys = batch.cache + op.layer * batch.layer_stride + row * batch.row_stride + kv_head * batch.head_stride;
    float* values = keys + batch.value_stride;
    const Slots at = slots_of(batch, row);
    const int in_keys = std::min(dim, count);
    for (int i = 0; i < batch.nodes && batch.watch == nullptr; ++i) {
        const float* in = batch.buffers[op.source] + (static_cast<size_t>(row) * batch.nodes + i) * width + first;
        const int slot = length + batch.first_node + i;
        float *key = key_of(batch, keys, at, slot), *value = values + at(slot) * dim;
        for (int d = 0; d < in_keys; ++d) key[d * batch.key_block] = in[d] * in[2 * channels + d];
        for (int d = in_keys; d < count; ++d) value[d - dim] = in[d] * in[2 * channels + d];
    }
    float sums[2048];
    for (int i = 0; i < batch.nodes; ++i) {
        const size_t place = static_cast<size_t>(row) * batch.nodes + i;
        int64_t node = batch.first_node + i;  // -1: the last committed token, -2: the one before
        memset(sums, 0, count * sizeof(float));
        for (int tap = op.num_out - 1; tap >= 0 && length + node >= 0; --tap) {
            const int64_t slot = length + node;
            const float* weight = static_cast<const float*>(op.weight) + static_cast<size_t>(tap) * channels + first;
            const float *key = key_of(batch, keys, at, slot), *value = values + at(slot) * dim;
            for (int d = 0; d < in_keys; ++d) sums[d] = fused(key[d * batch.key_block], weight[d], sums[d]);
            for (int d = in_keys; d < count; ++d) sums[d] = fused(value[d - dim], weight[d], sums[d]);
            node = node >= 0 ? parents[node] : node - 1;
        }
        const float* gates = batch.buffers[op.source] + place * width + channels + first;
        float* out = batch.buffers[op.target] + place * out_width + op.column + first;
        for (int d = 0; d < count; ++d) out[d] = sums[d] * gates[d];
    }
}

}  // namespace
