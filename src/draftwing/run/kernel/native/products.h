// The arithmetic of one forward: matrices times rows, norms, attention over a tree.
//
// Every number of a row is computed in one order that depends on nothing but the row itself: products run along
// their inputs, attention runs along positions. So a row has the same bits whatever stands beside it: alone, in a
// chain, in any tree. Nothing here may be compiled with reassociation (-ffast-math).

#pragma once

#include "weights.h"

namespace {

constexpr int KEYS = 16;  // slots whose keys lie transposed side by side
constexpr int MAX_OPS = 1024;
constexpr int NUM_BUFFERS = 16;

enum Kind : int32_t { EMBED = 0, NORM = 1, LINEAR = 2, ATTEND = 3, COPY = 4 };

}  // namespace

extern "C" {

struct Op {
    int32_t kind, source, target, column;  // column: where in the target's rows the result begins
    int32_t num_in, num_out, epilogue, format;  // format: of the weight
    int32_t num_heads, num_kv_heads, head_dim, layer;
    int32_t window;  // 0: none
    int32_t first;  // of NORM and COPY: where in the source's rows they begin to read
    float eps, scale;
    const float* norm;  // (num_in): the source is normed on its way in
    const void* weight;  // packed
    const float* scales;  // (padded num_out), of int8
    const int32_t* sums;  // (padded num_out), of int8: what the rows' offset of 128 adds
    const float* bias;  // (padded num_out)
    const int64_t* places;  // (num_out): where in the target's row each output goes; null: side by side
    const float* q_norm;  // (head_dim)
    const float* k_norm;
};

struct Batch {
    int32_t rows, nodes, first_node, tree_nodes;  // nodes forwarded for each row; the tree has tree_nodes
    int32_t rotary_half, rotation_by_row;
    const int64_t* tokens;  // (rows * nodes)
    const int64_t* parents;  // (rows, tree_nodes)
    const int64_t* lengths;  // (rows) committed slots
    const float* rotation;  // (positions or rows * nodes, rotary_half, 2)
    float* cache;  // this batch's first row: keys, then values
    int64_t layer_stride, value_stride, row_stride, head_stride;
    float* buffers[NUM_BUFFERS];
    int32_t widths[NUM_BUFFERS];
};
}

namespace {

thread_local Scratch prepared_rows, row_scales, attention_queries, attention_scores, attention_path;

// --- a matrix times rows ---------------------------------------------------------------------------------------------

void norm_row(const float* x, const float* weight, int width, float eps, float* out) {
    v16 squares{};
    int i = 0;
    for (; i + 16 <= width; i += 16) {
        const v16 part = load(x + i);
        squares += part * part;
    }
    float total = sum_of(squares);
    for (; i < width; ++i) total += x[i] * x[i];
    const float factor = 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
    for (i = 0; i + 16 <= width; i += 16) store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < width; ++i) out[i] = x[i] * factor * weight[i];
}

// To 8 bits, 128 for zero; what one level is worth comes back.
float quantise_row(const float* x, int width, int padded, uint8_t* out) {
    typedef uint8_t bytes __attribute__((vector_size(16), aligned(1)));
    v16 most{}, check{};  // NaN is never greater, and must stay visible
    int i = 0;
    for (; i + 16 <= width; i += 16) {
        const v16 part = load(x + i), size = part < 0.0f ? -part : part;
        most = size > most ? size : most;
        check += part * 0.0f;
    }
    float largest = 0.0f, unusual = sum_of(check);
    for (int lane = 0; lane < 16; ++lane) largest = most[lane] > largest ? most[lane] : largest;
    for (int k = i; k < width; ++k) {
        largest = std::fmax(largest, std::fabs(x[k]));
        unusual += x[k] * 0.0f;
    }
    const float levels = largest > 0.0f ? 127.0f / largest : 0.0f;
    for (i = 0; i + 16 <= width; i += 16) {
        const i16 level = __builtin_convertvector(load(x + i) * levels + 128.5f, i16);
        *reinterpret_cast<bytes*>(out + i) = __builtin_convertvector(level, bytes);
    }
    for (; i < width; ++i) out[i] = static_cast<uint8_t>(static_cast<int32_t>(x[i] * levels + 128.5f));
    for (; i < padded; ++i) out[i] = 128;
    return largest / 127.0f + unusual;
}

struct Rows {  // of a product, as its weight wants them
    const void* data;
    size_t stride;
    const float* scales;
};

Rows prepare(const Op& op, const Batch& batch) {
    const int count = batch.rows * batch.nodes, width = op.num_in;
    const float* x = batch.buffers[op.source];
    const size_t stride = batch.widths[op.source];
    if (op.format != INT8) {
        if (op.norm == nullptr) return {x, stride, nullptr};
        float* out = prepared_rows.get<float>(static_cast<size_t>(count) * width);
        for (int r = 0; r < count; ++r) norm_row(x + r * stride, op.norm, width, op.eps, out + static_cast<size_t>(r) * width);
        return {out, static_cast<size_t>(width), nullptr};
    }
    const int padded = padded_inputs(width);
    float* scales = row_scales.get<float>(count + width + 16);
    float* normed = scales + (count + 15) / 16 * 16;
    uint8_t* out = prepared_rows.get<uint8_t>(static_cast<size_t>(count) * padded);
    for (int r = 0; r < count; ++r) {
        const float* row = x + r * stride;
        if (op.norm != nullptr) {
            norm_row(row, op.norm, width, op.eps, normed);
            row = normed;
        }
        scales[r] = quantise_row(row, width, padded, out + static_cast<size_t>(r) * padded);
    }
    return {out, static_cast<size_t>(padded), scales};
}

thread_local Scratch sums_of_rows;

// One tile of a product: (count, 64) at `out`, the bias added.
void product(const Op& op, const Rows& rows, int count, int tile, v16 (*out)[PARTS]) {
    if (op.format != INT8) {
        float_tile(op.format, op.weight, tile, op.num_in, static_cast<const float*>(rows.data), rows.stride, count, out);
    } else {
        const int padded = padded_inputs(op.num_in);
        const int8_t* w = static_cast<const int8_t*>(op.weight) + static_cast<size_t>(tile) * padded * TILE;
        i16(*sums)[PARTS] = reinterpret_cast<i16(*)[PARTS]>(out);
        tile_sums<Bytes>(static_cast<const uint8_t*>(rows.data), rows.stride, w, padded, count, sums);
        for (int c = 0; c < PARTS; ++c) {
            const int at = tile * TILE + 16 * c;
            const i16 offset = *reinterpret_cast<const i16u*>(op.sums + at);
            const v16 scale = load(op.scales + at);
            for (int r = 0; r < count; ++r) {
                const v16 found = __builtin_convertvector(sums[r][c] - offset, v16) * rows.scales[r] * scale;
                out[r][c] = found;
            }
        }
    }
    if (op.bias != nullptr)
        for (int c = 0; c < PARTS; ++c) {
            const v16 bias = load(op.bias + tile * TILE + 16 * c);
            for (int r = 0; r < count; ++r) out[r][c] += bias;
        }
}

inline void put(float* to, v16 value, int room, bool add) {
    if (room >= 16) {
        store(to, add ? load(to) + value : value);
        return;
    }
    for (int i = 0; i < room; ++i) to[i] = add ? to[i] + value[i] : value[i];
}

void linear(const Op& op, const Batch& batch, const Rows& rows, int first_tile, int last_tile) {
    const int count = batch.rows * batch.nodes, width = batch.widths[op.target];
    const bool gated = op.epilogue >= SILU;
    v16(*found)[PARTS] = reinterpret_cast<v16(*)[PARTS]>(sums_of_rows.get<float>(static_cast<size_t>(2) * count * TILE));
    v16(*up)[PARTS] = found + count;
    for (int tile = first_tile; tile < last_tile; ++tile) {
        product(op, rows, count, gated ? 2 * tile : tile, found);
        if (gated) product(op, rows, count, 2 * tile + 1, up);  // what the gates of the tile before let through
        for (int r = 0; r < count; ++r) {
            float* row = batch.buffers[op.target] + static_cast<size_t>(r) * width + op.column + tile * TILE;
            for (int c = 0; c < PARTS; ++c) {
                const int room = op.num_out - tile * TILE - 16 * c;
                if (room <= 0) break;
                const v16 value = gated ? activate(op.epilogue, found[r][c]) * up[r][c] : found[r][c];
                if (op.places == nullptr) {
                    put(row + 16 * c, value, room, op.epilogue == ADD);
                    continue;
                }
                const int64_t* places = op.places + tile * TILE + 16 * c;
                for (int i = 0; i < 16 && i < room; ++i) row[places[i] - tile * TILE] = value[i];
            }
        }
    }
}

// --- attention -------------------------------------------------------------------------------------------------------
// Keys of 16 slots lie transposed, (dim, 16); values slot by slot, (dim).

inline void rotate(const float* x, const float* norm, float eps, const float* rotation, int half, int dim, float* out) {
    float normed[1024];
    if (norm != nullptr) {
        norm_row(x, norm, dim, eps, normed);
        x = normed;
    }
    for (int i = 0; i < half; ++i) {
        const float real = rotation[2 * i], imaginary = rotation[2 * i + 1];
        out[i] = x[i] * real - x[half + i] * imaginary;
        out[half + i] = x[i] * imaginary + x[half + i] * real;
    }
    for (int i = 2 * half; i < dim; ++i) out[i] = x[i];
}

template <int Q> inline void score_block(const float* queries, int dim, const float* keys, float* scores, size_t stride) {
    v16 sum[Q] = {};
    for (int d = 0; d < dim; ++d) {
        const v16 key = load(keys + d * KEYS);
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) sum[q] += key * queries[q * dim + d];
    }
    for (int q = 0; q < Q; ++q) store(scores + q * stride, sum[q]);
}

// Values of slots from..to, weighted by `weights`, added to `out` (dim): in the order of the slots.
template <int Q>
inline void mix(const float* weights, size_t stride, const float* values, int from, int to, int dim, float* out) {
    for (int d = 0; d < dim; d += 32) {
        v16 sum[Q][2];
        for (int q = 0; q < Q; ++q) sum[q][0] = load(out + q * dim + d), sum[q][1] = load(out + q * dim + d + 16);
        for (int s = from; s < to; ++s) {
            const v16 low = load(values + static_cast<size_t>(s) * dim + d);
            const v16 high = load(values + static_cast<size_t>(s) * dim + d + 16);
#pragma GCC unroll 8
            for (int q = 0; q < Q; ++q) {
                const float weight = weights[q * stride + s];
                sum[q][0] += low * weight;
                sum[q][1] += high * weight;
            }
        }
        for (int q = 0; q < Q; ++q) store(out + q * dim + d, sum[q][0]), store(out + q * dim + d + 16, sum[q][1]);
    }
}

// Positions from `low` to `last` of one query: scores to chances, in place; the sum comes back.
float softmax(float* scores, int low, int last) {
    const int begin = low / 16 * 16, end = (last + 16) / 16 * 16;
    for (int i = begin; i < low; ++i) scores[i] = -INFINITY;
    for (int i = last + 1; i < end; ++i) scores[i] = -INFINITY;
    v16 largest = spread(-INFINITY);
    for (int i = begin; i < end; i += 16) {
        const v16 part = load(scores + i);
        largest = part > largest ? part : largest;
    }
    float top = largest[0];
    for (int i = 1; i < 16; ++i) top = largest[i] > top ? largest[i] : top;
    v16 sum{};
    for (int i = begin; i < end; i += 16) {
        const v16 part = exp_of(load(scores + i) - top);
        store(scores + i, part);
        sum += part;
    }
    return sum_of(sum);
}

void attend(const Op& op, const Batch& batch, int row, int kv_head) {
    const int dim = op.head_dim, groups = op.num_heads / op.num_kv_heads, nodes = batch.nodes;
    const int length = static_cast<int>(batch.lengths[row]), half = batch.rotary_half;
    const int slots = length + batch.tree_nodes, padded = (slots + KEYS - 1) / KEYS * KEYS;
    const size_t stride = padded + 16;
    const int64_t* parents = batch.parents + static_cast<size_t>(row) * batch.tree_nodes;
    float* keys = batch.cache + op.layer * batch.layer_stride + row * batch.row_stride + kv_head * batch.head_stride;
    float* values = keys + batch.value_stride;
    const float* qkv = batch.buffers[op.source];
    const int width = batch.widths[op.source], out_width = batch.widths[op.target];
    const int num_queries = nodes * groups;
    float* queries = attention_queries.get<float>(static_cast<size_t>(2) * num_queries * dim + batch.tree_nodes + 16);
    float* mixed = queries + static_cast<size_t>(num_queries) * dim;
    int32_t* depths = reinterpret_cast<int32_t*>(mixed + static_cast<size_t>(num_queries) * dim);
    float* scores = attention_scores.get<float>(num_queries * stride);

    for (int node = 0; node < batch.tree_nodes; ++node)
        depths[node] = parents[node] < 0 ? 0 : depths[parents[node]] + 1;
    float turned[1024];
    for (int i = 0; i < nodes; ++i) {
        const int node = batch.first_node + i, slot = length + node;
        const size_t place = static_cast<size_t>(row) * nodes + i;
        const size_t angle = batch.rotation_by_row ? place : static_cast<size_t>(length + depths[node]);
        const float* rotation = batch.rotation + angle * 2 * half;
        const float* in = qkv + place * width;
        for (int g = 0; g < groups; ++g) {
            float* query = queries + (static_cast<size_t>(i) * groups + g) * dim;
            rotate(in + (kv_head * groups + g) * dim, op.q_norm, op.eps, rotation, half, dim, query);
            for (int d = 0; d < dim; ++d) query[d] *= op.scale;
        }
        rotate(in + (op.num_heads + kv_head) * dim, op.k_norm, op.eps, rotation, half, dim, turned);
        float* key = keys + static_cast<size_t>(slot / KEYS) * KEYS * dim + slot % KEYS;
        for (int d = 0; d < dim; ++d) key[d * KEYS] = turned[d];
        memcpy(values + static_cast<size_t>(slot) * dim, in + (op.num_heads + op.num_kv_heads + kv_head) * dim,
               dim * sizeof(float));
    }

    // With a window, what no query sees is not scored: positions grow along the queries' depths alone.
    const int lowest = op.window > 0 && length >= op.window ? (length - op.window + 1) / KEYS * KEYS : 0;
    for (int block = lowest; block < padded; block += KEYS) {
        const float* some = keys + static_cast<size_t>(block) * dim;
        int q = 0;
        for (; q + 6 <= num_queries; q += 6) score_block<6>(queries + q * dim, dim, some, scores + q * stride + block, stride);
        for (; q + 3 <= num_queries; q += 3) score_block<3>(queries + q * dim, dim, some, scores + q * stride + block, stride);
        for (; q < num_queries; ++q) score_block<1>(queries + q * dim, dim, some, scores + q * stride + block, stride);
    }

    // The scores of a node's ancestors, in the order of their depths, follow those of the committed slots.
    int* path = attention_path.get<int>(batch.tree_nodes);
    for (int i = 0; i < nodes; ++i) {
        const int depth = depths[batch.first_node + i], last = length + depth;
        for (int d = depth, node = batch.first_node + i; d >= 0; --d, node = static_cast<int>(parents[node])) path[d] = node;
        const int low = op.window > 0 && last >= op.window ? last - op.window + 1 : 0;
        for (int g = 0; g < groups; ++g) {
            const size_t query = static_cast<size_t>(i) * groups + g;
            float* own = scores + query * stride;
            for (int d = 0; d <= depth; ++d) own[length + d] = own[length + path[d]];
            const float sum = softmax(own, low, last);
            float* out = mixed + query * dim;
            memset(out, 0, dim * sizeof(float));
            own[padded] = sum;  // kept behind the scores until the values are mixed
        }
    }
    if (op.window == 0) {
        for (int from = 0; from < length; from += 64) {  // a block of values serves every query while it is near
            const int to = from + 64 < length ? from + 64 : length;
            int q = 0;
            for (; q + 6 <= num_queries; q += 6) mix<6>(scores + q * stride, stride, values, from, to, dim, mixed + q * dim);
            for (; q + 3 <= num_queries; q += 3) mix<3>(scores + q * stride, stride, values, from, to, dim, mixed + q * dim);
            for (; q < num_queries; ++q) mix<1>(scores + q * stride, stride, values, from, to, dim, mixed + q * dim);
        }
    }
    for (int i = 0; i < nodes; ++i) {
        const int depth = depths[batch.first_node + i], last = length + depth;
        for (int d = depth, node = batch.first_node + i; d >= 0; --d, node = static_cast<int>(parents[node])) path[d] = node;
        const int low = op.window > 0 && last >= op.window ? last - op.window + 1 : 0;
        const size_t place = static_cast<size_t>(row) * nodes + i;
        for (int g = 0; g < groups; ++g) {
            const size_t query = static_cast<size_t>(i) * groups + g;
            const float* own = scores + query * stride;
            float* sums = mixed + query * dim;
            if (op.window > 0 && low < length) mix<1>(own, stride, values, low, length, dim, sums);
            for (int d = low > length ? low - length : 0; d <= depth; ++d) {
                const float* value = values + static_cast<size_t>(length + path[d]) * dim;
                const v16 weight = spread(own[length + d]);
                for (int part = 0; part < dim; part += 16) store(sums + part, load(sums + part) + load(value + part) * weight);
            }
            const float whole = own[padded];
            float* out = batch.buffers[op.target] + place * out_width + op.column + (kv_head * groups + g) * dim;
            for (int part = 0; part < dim; part += 16) store(out + part, load(sums + part) / whole);
        }
    }
}

}  // namespace
