// The arithmetic of one forward: matrices times rows, norms. Attention over a tree: attention.h.
//
// The order in which a row's numbers are computed depends on the row alone: products run along their inputs, attention
// along positions. So a row's bits do not depend on other rows: alone, in a chain, in any tree. None of this may be compiled
// with reassociation (-ffast-math).

#pragma once

#include "block_tiles.h"

namespace {

constexpr int KEYS = 16;  // slots whose keys are stored transposed together
constexpr int MAX_OPS = 1024;
constexpr int NUM_BUFFERS = 16;
constexpr int MAX_EXPERTS = 1024;

enum Kind : int32_t { EMBED = 0, NORM = 1, LINEAR = 2, ATTEND = 3, COPY = 4, CONVOLVE = 5, RECUR = 6, ROUTE = 7, EXPERTS = 8, COMBINE = 9 };
enum RowForm : int32_t { AS_THEY_ARE = 0, ROUNDED = 1, SPLIT = 2, LEVELS = 3 };  // see layout.py

}  // namespace

extern "C" {

struct Op {
    int32_t kind, source, target, column;  // column: first column of the result in the target's rows
    int32_t num_in, num_out, epilogue, format;  // format: of the weight; num_out of CONVOLVE and RECUR: tokens
    // RECUR: value and key heads, width of a key head; num_in: of a value head. NORM: num_heads norms of num_in columns; 0: one
    int32_t num_heads, num_kv_heads, head_dim, layer;
    int32_t window;  // tokens that a query sees; negative: those of its chunk of that many tokens; 0: all
    int32_t first;  // of NORM, COPY and LINEAR: first column to read
    int32_t row_form;  // of LINEAR: how rows are converted for weights in BFLOAT16 or blocks
    int32_t is_gated;  // of LINEAR with an activation: half of the outputs are gates of the others; of ATTEND: gates follow values
    int32_t multiplies;  // of LINEAR: the result is multiplied by what it overwrites
    int32_t centers;  // the norm is a LayerNorm
    int32_t norms_rotated;  // of ATTEND: heads are normed after their rotation
    int32_t is_tiled;  // of RECUR: the result begins with the first value head of every key head
    int32_t rotation_first, rotation_pairs;  // of ATTEND: the factors that it uses; 0 pairs: all, -1: none
    int32_t value_dim;  // of ATTEND: width of a head's values, at most head_dim
    int32_t shared_dim;  // of ATTEND: first channels of the keys, which all heads share; their columns follow the values
    int32_t slot_layer, slot_first;  // of ATTEND: the layer of its slots, and the first word of its heads in these
    int32_t reads_only;  // of ATTEND: another layer has written its keys and values
    int32_t heads_apart;  // of ATTEND: heads of slots, in views and watched weights, for each KV head of this layer
    int32_t query_scale;  // of ATTEND: 1 + the factor whose real part multiplies queries; 0: none
    int32_t routes;  // of EXPERTS and COMBINE: the buffer that ROUTE wrote
    int32_t num_experts, num_chosen;  // of ROUTE, EXPERTS and COMBINE: experts of a layer, and of a row
    int32_t gathers;  // of EXPERTS: each row of the source is read by the experts of that row, instead of the row of each pair
    int32_t scales_input;  // of EXPERTS that gather: rows are multiplied by their weights, which COMBINE then leaves out
    int32_t scores, normalises, num_groups, num_kept_groups, sums_two;  // of ROUTE: see `Routing` in layers.py; 0 groups: none
    float eps;  // of a norm, or of the sum of a row's weights in ROUTE; alpha of CLAMPED
    float scale;  // of scores, of ROUTE's weights, or of the result of EMBED, COPY, LINEAR and EXPERTS, where 0 is none
    float cap;  // scores or results are capped to cap * tanh(x / cap), 0: not; the limit of CLAMPED
    const float* norm;  // (num_in): norm applied to the source; null: none
    const void* weight;  // packed; of EXPERTS: (num_experts) Expert
    const float* scales;  // (padded num_out), of int8; of ROUTE: (num_experts) factors of the weights
    const int32_t* sums;  // (padded num_out), of int8: contribution of the rows' offset of 128
    const float* bias;  // (padded num_out)
    const int64_t* places;  // (num_out): target column of each output; null: consecutive
    const float* q_norm;  // (head_dim)
    const float* k_norm;
    const float* v_norm;
    const float* norm_bias;  // (num_in); null: none
    const float* sinks;  // (num_heads): a further score of each query; null: none
};

// A matrix of an expert: see the fields of the same names in `Op`.
struct Expert {
    const void* weight;
    const float* scales;
    const int32_t* sums;
    const float* bias;
    int32_t format, row_form;
};

struct Batch {
    int32_t rows, nodes, first_node, tree_nodes;  // nodes run per row, from first_node on, of tree_nodes
    int32_t rotary_half, rotation_by_row;
    int32_t key_block;  // slots whose keys are stored transposed together: KEYS, or PAGE if slots are in 8 bits
    // of a slot's keys, and of its values: numbers, or (narrow_slots.h) bytes and their scale; heads may be narrower
    int32_t slot_words;
    const int64_t* tokens;  // (rows * nodes)
    const int64_t* parents;  // (rows, tree_nodes)
    const int64_t* lengths;  // (rows) committed slots
    const float* rotation;  // (positions or rows * nodes, rotary_half, 2)
    float* cache;  // of this batch's first row: keys, then values
    int64_t layer_stride, value_stride, row_stride, head_stride;
    const int32_t* pages;  // pages of each row's slots, in order; null: a row's slots are contiguous
    int64_t page_stride;  // pages from one row to the next
    const int32_t* view;  // committed slots to attend to, ascending, by row, layer and KV head; null: all
    const int64_t* viewed;  // (rows) their number
    int64_t view_row, view_layer, view_head;  // strides; 0: the same for all
    float* watch;  // sums of one row's attention weights, by layer and KV head; slots are then not written. Null: none
    int64_t watch_layer, watch_head;
    float* states;  // of recurrent layers (recurrence.h)
    float* kept;  // inputs of recurrent layers: of `kept_before` tokens, then of those that the states are not of
    int64_t* marks;  // (rows, 2) the tokens that the states are of, and those that `kept` ends with
    int64_t states_layer, states_row, kept_layer, kept_row, kept_width;
    int32_t kept_before, num_recurrent;
    int32_t keeps_all;  // the nodes are chains of tokens that are kept for certain
    float* buffers[NUM_BUFFERS];
    int32_t widths[NUM_BUFFERS];
};

constexpr int PAGE = TILE;  // slots per page: whole blocks of keys

// The slots of a row: index of each, counted from `keys` or `values` of its layer and KV head.
struct Slots {
    const int32_t* pages;  // null: contiguous

    size_t operator()(int64_t slot) const {
        return pages == nullptr ? slot : static_cast<size_t>(pages[slot / PAGE]) * PAGE + slot % PAGE;
    }
};

inline Slots slots_of(const Batch& batch, int row) {
    return {batch.pages == nullptr ? nullptr : batch.pages + row * batch.page_stride};
}

inline bool has_narrow_slots(const Batch& batch) { return batch.key_block == PAGE; }

// The first word of a slot's keys; the others are `key_block` words apart.
inline float* key_of(const Batch& batch, float* keys, const Slots& at, int64_t slot) {
    return keys + at(slot / batch.key_block * batch.key_block) * batch.slot_words + slot % batch.key_block;
}
}

namespace {

thread_local Scratch prepared_rows, normed_row, byte_row;

// --- a matrix times rows ---------------------------------------------------------------------------------------------

// RMSNorm.
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

float sum_row(const float* x, int width) {
    v16 sums{};
    int i = 0;
    for (; i + 16 <= width; i += 16) sums += load(x + i);
    float total = sum_of(sums);
    for (; i < width; ++i) total += x[i];
    return total;
}

thread_local Scratch centered_row;

// The norm of an operation; may be in place. With `add`, it is added to `out`.
void norm_row(const Op& op, const float* x, float* out, bool add = false) {
    const int width = op.num_in;
    if (!op.centers && op.norm_bias == nullptr && !add) return norm_row(x, op.norm, width, op.eps, out);
    float* normed = centered_row.get<float>(width);
    if (op.centers) {
        const float mean = sum_row(x, width) / static_cast<float>(width);
        for (int i = 0; i < width; ++i) normed[i] = x[i] - mean;
        x = normed;
    }
    norm_row(x, op.norm, width, op.eps, normed);
    if (op.norm_bias != nullptr)
        for (int i = 0; i < width; ++i) normed[i] += op.norm_bias[i];
    for (int i = 0; i < width; ++i) out[i] = add ? out[i] + normed[i] : normed[i];
}

// Quantises to 8 bits, 128 for zero; returns the value of a level.
float quantise_row(const float* x, int width, int padded, uint8_t* out) {
    v16 mosts[4] = {}, checks[4] = {};  // a comparison never selects NaN, which must not be lost
    int i = 0;
    const auto look = [&](int which) __attribute__((always_inline)) {
        const v16 part = load(x + i + 16 * which);
        mosts[which] = larger(larger(part, -part), mosts[which]);
        checks[which] += part * 0.0f;
    };
    for (; i + 64 <= width; i += 64)
        for (int which = 0; which < 4; ++which) look(which);
    for (; i + 16 <= width; i += 16) look(0);
    const v16 most = larger(larger(mosts[0], mosts[1]), larger(mosts[2], mosts[3]));
    float largest = 0.0f, unusual = sum_of((checks[0] + checks[1]) + (checks[2] + checks[3]));
    for (int lane = 0; lane < 16; ++lane) largest = most[lane] > largest ? most[lane] : largest;
    for (int k = i; k < width; ++k) {
        largest = std::fmax(largest, std::fabs(x[k]));
        unusual += x[k] * 0.0f;
    }
    const float levels = largest > 0.0f ? 127.0f / largest : 0.0f;
    for (i = 0; i + 16 <= width; i += 16) {
        store_bytes(out + i, whole_of(load(x + i) * levels + 128.5f));
    }
    for (; i < width; ++i) out[i] = static_cast<uint8_t>(static_cast<int32_t>(x[i] * levels + 128.5f));
    for (; i < padded; ++i) out[i] = 128;
    return largest / 127.0f + unusual;
}

struct Rows {  // of a product, in the form that its weight needs
    void* data;
    size_t stride;  // LEVELS: from one unit to the next
    float* scales;
};

inline bool needs_preparing(const Op& op) { return op.format == INT8 || op.row_form || op.norm != nullptr; }

// Number of rows to compute for `count` rows.
inline int multiplied_rows(const Op& op, int count) { return op.row_form == SPLIT ? SPLIT_PARTS * count : count; }

// Row stride: an odd number of cache lines, so that rows do not map to the same cache sets.
inline size_t row_bytes(size_t bytes) { return ((bytes + 63) / 64 | 1) * 64; }

// Bytes of a prepared row.
inline size_t prepared_row(const Op& op) {
    if (op.row_form == LEVELS) {
        size_t bytes = 0;
        with_blocks(op.format, [&](auto kind) {
            constexpr int UNIT = decltype(kind)::UNIT;
            bytes = op.num_in / UNIT * sizeof(RowUnit<UNIT>);
        });
        return bytes;
    }
    if (op.row_form) return row_bytes(rounded_inputs(op.num_in) * sizeof(uint16_t));
    return row_bytes(op.format == INT8 ? static_cast<size_t>(padded_inputs(op.num_in)) * ROW_WORDS : op.num_in * sizeof(float));
}

// Prepared rows in `memory` of `prepared_bytes`.
inline size_t prepared_bytes(const Op& op, int count) {
    const size_t scales = op.format == INT8 ? (static_cast<size_t>(count) * sizeof(float) + 63) / 64 * 64 : 0;
    return scales + padded_rows(multiplied_rows(op, count)) * prepared_row(op);
}

inline Rows prepared_at(const Op& op, int count, char* memory) {
    if (op.row_form == LEVELS) return {memory, static_cast<size_t>(count), nullptr};
    if (op.row_form) return {memory, prepared_row(op) / sizeof(uint16_t), nullptr};
    if (op.format != INT8) return {memory, prepared_row(op) / sizeof(float), nullptr};
    const size_t scales = (static_cast<size_t>(count) * sizeof(float) + 63) / 64 * 64;
    return {memory + scales, prepared_row(op), reinterpret_cast<float*>(memory)};
}

// Normalises and narrows the rows from `first` to before `last`.
void prepare(const Op& op, const Batch& batch, int first, int last, const Rows& rows) {
    const bool is_narrow = op.format == INT8 || op.row_form;
    float* normed = is_narrow && op.norm != nullptr ? normed_row.get<float>(op.num_in) : nullptr;
    for (int r = first; r < last; ++r) {
        const float* row = batch.buffers[op.source] + static_cast<size_t>(r) * batch.widths[op.source] + op.first;
        if (!is_narrow) {
            norm_row(op, row, static_cast<float*>(rows.data) + r * rows.stride);
            continue;
        }
        if (op.norm != nullptr) {
            norm_row(op, row, normed);
            row = normed;
        }
        if (op.row_form == LEVELS) {
            with_blocks(op.format, [&](auto kind) {
                typedef decltype(kind) T;
                round_units<T>(row, op.num_in, rows.stride, static_cast<RowUnit<T::UNIT>*>(rows.data) + r);
            });
            continue;
        }
        if (op.row_form) {
            uint16_t* out = static_cast<uint16_t*>(rows.data) + multiplied_rows(op, r) * rows.stride;
            if (op.row_form == ROUNDED) round_row(row, op.num_in, static_cast<int>(rows.stride), out);
            else split_row(row, op.num_in, static_cast<int>(rows.stride), rows.stride, out);
            continue;
        }
        uint8_t* out = static_cast<uint8_t*>(rows.data) + r * rows.stride;
        uint8_t* bytes = ROW_WORDS == 1 ? out : byte_row.get<uint8_t>(rows.stride / ROW_WORDS);
        rows.scales[r] = quantise_row(row, op.num_in, static_cast<int>(rows.stride) / ROW_WORDS, bytes);
        if constexpr (ROW_WORDS > 1) spread_fours(bytes, padded_inputs(op.num_in), reinterpret_cast<uint32_t*>(out));
    }
}

// The rows of a product, prepared by this thread or, in `shared` memory, by all threads.
Rows rows_for(const Op& op, const Batch& batch, char* shared) {
    const int count = batch.rows * batch.nodes;
    if (!needs_preparing(op)) return {batch.buffers[op.source] + op.first, static_cast<size_t>(batch.widths[op.source]), nullptr};
    if (shared != nullptr) return prepared_at(op, count, shared);
    const Rows rows = prepared_at(op, count, prepared_rows.get<char>(prepared_bytes(op, count)));
    prepare(op, batch, 0, count, rows);
    return rows;
}

thread_local Scratch sums_of_rows;

// One tile of a product with bias: (count, 64) at `out`, which has room for `multiplied_rows`.
void product(const Op& op, const Rows& rows, int count, int tile, v16 (*out)[PARTS]) {
    const auto tile_of = [&](size_t bytes) { return static_cast<const char*>(op.weight) + tile * bytes; };
    if (op.row_form == LEVELS) {
        with_blocks(op.format, [&](auto kind) {
            typedef decltype(kind) T;
            block_sums<T>(static_cast<const RowUnit<T::UNIT>*>(rows.data), static_cast<int>(rows.stride),
                         tile_of(tile_bytes<T>(op.num_in)), op.num_in, count, reinterpret_cast<float*>(out));
        });
    } else if (op.row_form) {
        const int multiplied = multiplied_rows(op, count);
        const char* w = tile_of(tile_bytes<BFloat16>(op.num_in));
        rounded_product(static_cast<const uint16_t*>(rows.data), rows.stride, w, op.num_in, multiplied, out);
        for (int r = 0; multiplied > count && r < count; ++r)
            for (int c = 0; c < PARTS; ++c) out[r][c] = out[3 * r][c] + (out[3 * r + 1][c] + out[3 * r + 2][c]);
    } else if (op.format != INT8) {
        float_tile(op.format, op.weight, tile, op.num_in, static_cast<const float*>(rows.data), rows.stride, count, out);
    } else {
        i16(*sums)[PARTS] = reinterpret_cast<i16(*)[PARTS]>(out);
        const int num_in = padded_inputs(op.num_in);
        byte_sums(static_cast<const uint8_t*>(rows.data), rows.stride,
                  reinterpret_cast<const int8_t*>(tile_of(static_cast<size_t>(num_in) * TILE)), num_in, count, sums);
        for (int c = 0; c < PARTS; ++c) {
            const int at = tile * TILE + 16 * c;
            const i16 offset = from_memory<i16>(op.sums + at);
            const v16 scale = load(op.scales + at);
            for (int r = 0; r < count; ++r) {
                const v16 found = numbers_of(sums[r][c] - offset) * rows.scales[r] * scale;
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

inline v16 some_of(const float* from, int room) {
    if (room >= 16) return load(from);
    v16 some{};
    for (int i = 0; i < room; ++i) some[i] = from[i];
    return some;
}

void linear(const Op& op, const Batch& batch, const Rows& rows, int first_tile, int last_tile) {
    const int count = batch.rows * batch.nodes, width = batch.widths[op.target];
    const bool gated = op.is_gated, activates = op.epilogue >= SILU;
    const size_t room = padded_rows(multiplied_rows(op, count));
    v16(*found)[PARTS] = reinterpret_cast<v16(*)[PARTS]>(sums_of_rows.get<float>(2 * room * TILE));
    v16(*up)[PARTS] = found + room;
    for (int tile = first_tile; tile < last_tile; ++tile) {
        product(op, rows, count, gated ? 2 * tile : tile, found);
        if (gated) product(op, rows, count, 2 * tile + 1, up);  // the values for the gates of the previous tile
        for (int r = 0; r < count; ++r) {
            float* row = batch.buffers[op.target] + static_cast<size_t>(r) * width + op.column + tile * TILE;
            for (int c = 0; c < PARTS; ++c) {
                const int room = op.num_out - tile * TILE - 16 * c;
                if (room <= 0) break;
                v16 value = found[r][c];
                if (op.epilogue == CLAMPED) {
                    value = clamped(value, up[r][c], op.eps, op.cap);
                } else {
                    if (activates) value = activate(op.epilogue, value);
                    if (gated) value = value * up[r][c];
                    if (op.scale != 0.0f) value = value * op.scale;
                    if (op.cap != 0.0f) value = capped(value, op.cap);
                    if (op.multiplies) value = value * some_of(row + 16 * c, room);
                }
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

}  // namespace
