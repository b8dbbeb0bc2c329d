// One forward of a decoder on a CPU, as one parallel region: see kernel.py.
//
// A program is a list of operations over buffers of rows. Threads walk it side by side and claim pieces of each
// operation; an operation begins when every piece of the one before is done. Nobody waits for a thread that has not
// come: on a busy machine, where a helper may be away for milliseconds, the caller does the work alone.
//
// Every number of a row is computed in one order that depends on nothing but the row itself: products run along
// their inputs, attention runs along positions. So a row has the same bits whatever stands beside it: alone, in a
// chain, in any tree. Nothing here may be compiled with reassociation (-ffast-math).

#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <list>
#include <mutex>
#include <thread>
#include <unordered_map>
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#include <immintrin.h>
#endif

namespace {

typedef float v16 __attribute__((vector_size(64)));
typedef float v16u __attribute__((vector_size(64), aligned(4)));
typedef int32_t i16 __attribute__((vector_size(64)));

constexpr int TILE = 64;  // outputs computed together: 4 vectors
constexpr int PARTS = TILE / 16;
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 6;  // rows of one pass over a tile: 24 of 32 registers hold sums
#else
constexpr int MAX_ROWS = 2;
#endif
constexpr int KEYS = 16;  // slots whose keys lie transposed side by side
constexpr int MAX_OPS = 1024;
constexpr int NUM_BUFFERS = 16;

enum Kind : int32_t { EMBED = 0, NORM = 1, LINEAR = 2, ATTEND = 3, COPY = 4 };
enum Epilogue : int32_t { STORE = 0, ADD = 1, SILU = 2, GELU = 3, GELU_TANH = 4 };

inline v16 load(const float* from) { return *reinterpret_cast<const v16u*>(from); }
inline void store(float* to, v16 value) { *reinterpret_cast<v16u*>(to) = value; }
inline v16 spread(float value) { return v16{} + value; }

inline float sum_of(v16 lanes) {
    float half[8], sum[4];
    for (int i = 0; i < 8; ++i) half[i] = lanes[i] + lanes[i + 8];
    for (int i = 0; i < 4; ++i) sum[i] = half[i] + half[i + 4];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// e^x to about one unit in the last place; below -87 zero.
inline v16 exp_of(v16 x) {
    const v16 lowest = spread(-87.0f), highest = spread(88.0f);
    const i16 vanishes = x < lowest;
    v16 t = x < lowest ? lowest : x;
    t = t > highest ? highest : t;
    const v16 magic = spread(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const v16 n = (t * 1.44269504088896341f + magic) - magic;
    const v16 r = (t - n * 0.693359375f) - n * -2.12194440e-4f;
    v16 p = spread(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const i16 power = (__builtin_convertvector(n, i16) + 127) << 23;
    p *= (v16)power;  // the bits, not the numbers
    return vanishes ? v16{} : p;
}

inline v16 activate(int32_t kind, v16 x) {
    if (kind == SILU) return x / (1.0f + exp_of(-x));
    if (kind == GELU_TANH) {
        const v16 inner = 1.5957691216057308f * (x + 0.044715f * x * x * x);
        return x / (1.0f + exp_of(-inner));
    }
    v16 out;
    for (int i = 0; i < 16; ++i) out[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678118654752f));
    return out;
}

}  // namespace

extern "C" {

struct Op {
    int32_t kind, source, target, column;  // column: where in the target's rows the result begins
    int32_t num_in, num_out, epilogue, bits;  // bits of the weight: 32 or 8
    int32_t num_heads, num_kv_heads, head_dim, layer;
    int32_t window;  // 0: none
    float eps, scale;
    const float* norm;  // (num_in): the source is normed on its way in
    const void* weight;  // packed; of EMBED (V, num_out)
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

// --- memory of a thread ----------------------------------------------------------------------------------------------

struct Scratch {
    void* data = nullptr;
    size_t size = 0;
    ~Scratch() { free(data); }
    template <typename T> T* get(size_t count) {
        const size_t wanted = (count * sizeof(T) + 127) / 64 * 64;
        if (wanted > size) {
            free(data);
            data = aligned_alloc(64, wanted);
            if (data == nullptr) abort();
            size = wanted;
        }
        return static_cast<T*>(data);
    }
};

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

// Sums of four products of unsigned and signed bytes, added to 32 bits: exact in any order.
inline i16 dot4(i16 acc, int32_t four, const int8_t* w) {
#if defined(__AVX512VNNI__)
    return (i16)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32(four), _mm512_loadu_si512(w));
#elif defined(__AVXVNNI__)
    const __m256i value = _mm256_set1_epi32(four);
    __m256i halves[2];
    memcpy(halves, &acc, 64);
    for (int h = 0; h < 2; ++h) {
        const __m256i part = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32 * h));
        halves[h] = _mm256_dpbusd_avx_epi32(halves[h], value, part);
    }
    memcpy(&acc, halves, 64);
    return acc;
#else
    const uint8_t* x = reinterpret_cast<const uint8_t*>(&four);
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 4; ++j) acc[i] += static_cast<int32_t>(x[j]) * static_cast<int32_t>(w[4 * i + j]);
    return acc;
#endif
}

struct Floats {
    typedef v16 Lanes;
    typedef float Row;
    typedef float Weight;
    static constexpr int STEP = 1;  // inputs of one multiplication
    static constexpr int BLOCK = 32, OF_MANY = 64;  // of a part of a tile that stays in the nearest cache, see tile_sums
    static inline Row value_of(const float* x) { return *x; }
    static inline v16 add(v16 sum, float value, const float* w) { return sum + spread(value) * load(w); }
};

struct Bytes {
    typedef i16 Lanes;
    typedef uint8_t Row;
    typedef int8_t Weight;
    static constexpr int STEP = 4;
    static constexpr int BLOCK = 128, OF_MANY = 128;
    static inline int32_t value_of(const uint8_t* x) {
        int32_t four;
        memcpy(&four, x, 4);
        return four;
    }
    static inline i16 add(i16 sum, int32_t value, const int8_t* w) { return dot4(sum, value, w); }
};

// Adds the products of `count` inputs to the sums of R rows. Meanwhile `ahead` is fetched, LINES lines for each step.
template <typename T, int R, int LINES>
inline void tile_product(const typename T::Row* x, size_t stride, const typename T::Weight* w, int count, const char* ahead,
                         typename T::Lanes (*sum)[PARTS]) {
    typename T::Lanes acc[R][PARTS];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < PARTS; ++c) acc[r][c] = sum[r][c];
    constexpr int WIDE = 16 * T::STEP;
    for (int k = 0; k < count; k += T::STEP, w += TILE * T::STEP) {
        for (int line = 0; line < LINES; ++line, ahead += 64) __builtin_prefetch(ahead);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const auto value = T::value_of(x + r * stride + k);
#pragma GCC unroll 4
            for (int c = 0; c < PARTS; ++c) acc[r][c] = T::add(acc[r][c], value, w + c * WIDE);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < PARTS; ++c) sum[r][c] = acc[r][c];
}

template <typename T, int LINES>
inline void any_rows(int num, const typename T::Row* x, size_t stride, const typename T::Weight* w, int count,
                     const char* ahead, typename T::Lanes (*sum)[PARTS]) {
    switch (num) {
        case 1: return tile_product<T, 1, LINES>(x, stride, w, count, ahead, sum);
        case 2: return tile_product<T, 2, LINES>(x, stride, w, count, ahead, sum);
#if defined(__AVX512F__)
        case 3: return tile_product<T, 3, LINES>(x, stride, w, count, ahead, sum);
        case 4: return tile_product<T, 4, LINES>(x, stride, w, count, ahead, sum);
        case 5: return tile_product<T, 5, LINES>(x, stride, w, count, ahead, sum);
        case 6: return tile_product<T, 6, LINES>(x, stride, w, count, ahead, sum);
#endif
    }
}

// One tile of a matrix times all rows. Where the rows take several passes, they share a part of the tile that fits in
// the nearest cache with the next one, which all of them fetch: memory and arithmetic go on at the same time. (From a
// cache further away each line read would take one of the few places in which lines from memory are waited for.)
template <typename T>
void tile_sums(const typename T::Row* x, size_t stride, const typename T::Weight* w, int num_in, int count,
               typename T::Lanes (*sums)[PARTS]) {
    memset(sums, 0, sizeof(sums[0]) * count);
    const int passes = (count + MAX_ROWS - 1) / MAX_ROWS;
    if (passes == 1) {
        const char* ahead = reinterpret_cast<const char*>(w + 24 * T::STEP * TILE);
        return any_rows<T, 4>(count, x, stride, w, num_in, ahead, sums);
    }
    const int block = passes < 3 ? T::BLOCK : T::OF_MANY;
    for (int from = 0; from < num_in; from += block) {
        const int inputs = num_in - from < block ? num_in - from : block;
        const char* next = reinterpret_cast<const char*>(w + static_cast<size_t>(from + inputs) * TILE);
        const size_t step_lines = static_cast<size_t>(inputs) / T::STEP * 64;
        size_t fetched = 0;
        for (int pass = 0; pass < passes; ++pass) {
            const int first = static_cast<int>(static_cast<int64_t>(count) * pass / passes);
            const int num = static_cast<int>(static_cast<int64_t>(count) * (pass + 1) / passes) - first;
            const auto* part = x + first * stride + from;
            const auto* weight = w + static_cast<size_t>(from) * TILE;
            // Four lines for each step in all, as even as may be: 2 2, 2 1 1, or 1 1 1 1.
            if (passes == 2 || (passes == 3 && pass == 0)) {
                any_rows<T, 2>(num, part, stride, weight, inputs, next + fetched, sums + first);
                fetched += 2 * step_lines;
            } else if (pass < 4) {
                any_rows<T, 1>(num, part, stride, weight, inputs, next + fetched, sums + first);
                fetched += step_lines;
            } else {
                any_rows<T, 0>(num, part, stride, weight, inputs, next, sums + first);
            }
        }
    }
}

struct Rows {  // of a product, as its weight wants them
    const void* data;
    size_t stride;
    const float* scales;
};

inline int padded_inputs(const Op& op) { return (op.num_in + 3) / 4 * 4; }

Rows prepare(const Op& op, const Batch& batch) {
    const int count = batch.rows * batch.nodes, width = op.num_in;
    const float* x = batch.buffers[op.source];
    const size_t stride = batch.widths[op.source];
    if (op.bits == 32) {
        if (op.norm == nullptr) return {x, stride, nullptr};
        float* out = prepared_rows.get<float>(static_cast<size_t>(count) * width);
        for (int r = 0; r < count; ++r) norm_row(x + r * stride, op.norm, width, op.eps, out + static_cast<size_t>(r) * width);
        return {out, static_cast<size_t>(width), nullptr};
    }
    const int padded = padded_inputs(op);
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
    if (op.bits == 32) {
        const float* w = static_cast<const float*>(op.weight) + static_cast<size_t>(tile) * op.num_in * TILE;
        tile_sums<Floats>(static_cast<const float*>(rows.data), rows.stride, w, op.num_in, count, out);
    } else {
        const int padded = padded_inputs(op);
        const int8_t* w = static_cast<const int8_t*>(op.weight) + static_cast<size_t>(tile) * padded * TILE;
        i16(*sums)[PARTS] = reinterpret_cast<i16(*)[PARTS]>(out);
        tile_sums<Bytes>(static_cast<const uint8_t*>(rows.data), rows.stride, w, padded, count, sums);
        for (int c = 0; c < PARTS; ++c) {
            const int at = tile * TILE + 16 * c;
            const i16 offset = *reinterpret_cast<const i16*>(op.sums + at);
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

// --- the program -----------------------------------------------------------------------------------------------------

struct alignas(64) Progress {
    std::atomic<int32_t> claimed, done;
    int32_t pieces, each;  // each: tiles of a piece
};

// One walk of a program. It holds copies, since a helper may come late, find everything done, and leave.
struct Run {
    Op ops[MAX_OPS];
    Batch batch;
    int32_t num_ops, num_helpers;
    Progress progress[MAX_OPS];
    std::atomic<int32_t> inside{0};  // helpers that may still look at it
};

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

void piece(const Op& op, const Batch& batch, int which, int each, Rows& rows, bool& is_prepared) {
    const int count = batch.rows * batch.nodes;
    const size_t from = batch.widths[op.source], to = batch.widths[op.target];
    if (op.kind == LINEAR) {
        if (!is_prepared) rows = prepare(op, batch), is_prepared = true;
        const int tiles = (op.num_out + TILE - 1) / TILE, first = which * each;
        linear(op, batch, rows, first, first + each < tiles ? first + each : tiles);
    } else if (op.kind == ATTEND) {
        attend(op, batch, which / op.num_kv_heads, which % op.num_kv_heads);
    } else if (op.kind == NORM) {
        norm_row(batch.buffers[op.source] + which * from, op.norm, op.num_in, op.eps,
                 batch.buffers[op.target] + which * to + op.column);
    } else if (op.kind == COPY) {
        for (int r = 0; r < count; ++r)
            memcpy(batch.buffers[op.target] + r * to + op.column, batch.buffers[op.source] + r * from,
                   op.num_in * sizeof(float));
    } else {
        const float* table = static_cast<const float*>(op.weight);
        for (int r = 0; r < count; ++r) {
            const int64_t token = batch.tokens[r] < 0 ? 0 : batch.tokens[r];
            memcpy(batch.buffers[op.target] + r * to + op.column, table + token * op.num_out, op.num_out * sizeof(float));
        }
    }
}

void walk(Run& run) {
    for (int i = 0; i < run.num_ops; ++i) {
        Progress& progress = run.progress[i];
        Rows rows{};
        bool is_prepared = false;
        for (;;) {
            const int which = progress.claimed.fetch_add(1, std::memory_order_acq_rel);
            if (which >= progress.pieces) break;
            piece(run.ops[i], run.batch, which, progress.each, rows, is_prepared);
            progress.done.fetch_add(1, std::memory_order_acq_rel);
        }
        for (int spins = 0; progress.done.load(std::memory_order_acquire) < progress.pieces; ++spins) {
            pause();
            if (spins > 2000) std::this_thread::yield(), spins = 0;
        }
    }
}

// --- helpers ---------------------------------------------------------------------------------------------------------

class Pool {
  public:
    // The run to fill in: one that no late helper looks at any more. Hold `turn` until it is walked.
    Run& next() {
        for (;;) {
            for (Run& run : runs_)
                if (run.inside.load() == 0) return run;
            std::this_thread::yield();
        }
    }

    void walk_with_helpers(Run& run) {
        while (num_started_ < run.num_helpers) {
            std::thread(&Pool::help, this, num_started_).detach();
            ++num_started_;
        }
        current_.store(&run);
        number_.fetch_add(1);
        if (num_asleep_.load() > 0) {
            { std::lock_guard<std::mutex> lock(sleep_); }
            wake_.notify_all();
        }
        walk(run);
        current_.store(nullptr);
    }

    std::mutex turn;

  private:
    void help(int index) {
        uint64_t seen = 0;
        for (;;) {
            wait_for_another(seen);
            seen = number_.load();
            Run* run = current_.load();
            if (run == nullptr) continue;
            run->inside.fetch_add(1);
            // Only what is still current is whole: an older run may be being filled in anew.
            if (current_.load() == run && index < run->num_helpers) walk(*run);
            run->inside.fetch_sub(1);
        }
    }

    void wait_for_another(uint64_t seen) {
        const auto began = std::chrono::steady_clock::now();
        while (number_.load(std::memory_order_acquire) == seen) {
            for (int i = 0; i < 50; ++i) pause();
            std::this_thread::yield();
            if (std::chrono::steady_clock::now() - began < std::chrono::microseconds(1000)) continue;
            std::unique_lock<std::mutex> lock(sleep_);
            num_asleep_.fetch_add(1);
            wake_.wait(lock, [&] { return number_.load() != seen; });
            num_asleep_.fetch_sub(1);
        }
    }

    Run runs_[8];
    std::atomic<Run*> current_{nullptr};
    std::atomic<uint64_t> number_{0};
    std::atomic<int32_t> num_asleep_{0};
    std::mutex sleep_;
    std::condition_variable wake_;
    int num_started_ = 0;
};

// Never destroyed: helpers may outlive everything else. After a fork it has none, and nobody misses them.
Pool& pool() {
    static Pool* only = new Pool;
    return *only;
}

}  // namespace

namespace {

// --- keyed noise -----------------------------------------------------------------------------------------------------

typedef double d8 __attribute__((vector_size(64)));
typedef uint64_t u8 __attribute__((vector_size(64)));
typedef float f8 __attribute__((vector_size(32)));

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull, MIX1 = 0xBF58476D1CE4E5B9ull, MIX2 = 0x94D049BB133111EBull;
constexpr int SIDES = 4;  // vectors side by side: a logarithm is one long chain of products

// The finaliser of splitmix64, of a number or of a vector of them.
template <typename T> inline T mixed(T x) {
    x = (x ^ (x >> 30)) * MIX1;
    x = (x ^ (x >> 27)) * MIX2;
    return x ^ (x >> 31);
}

// x = 2^e * m with m in [sqrt(1/2), sqrt(2)); log m = 2 artanh((m - 1) / (m + 1)).
inline void log_of(const d8* x, d8* out) {
    d8 e[SIDES], s[SIDES], z[SIDES], p[SIDES];
    for (int i = 0; i < SIDES; ++i) {
        const u8 bits = (u8)x[i] - 0x3fe6a09e667f3bcdull;
        const d8 m = (d8)((bits & 0x000fffffffffffffull) + 0x3fe6a09e667f3bcdull);
        e[i] = __builtin_convertvector((bits + (1023ull << 52)) >> 52, d8) - 1023.0;
        s[i] = (m - 1.0) / (m + 1.0);
        z[i] = s[i] * s[i];
        p[i] = d8{} + 1.0 / 23;
    }
#pragma GCC unroll 10
    for (int k = 21; k >= 3; k -= 2)
#pragma GCC unroll 4
        for (int i = 0; i < SIDES; ++i) p[i] = p[i] * z[i] + 1.0 / k;
    for (int i = 0; i < SIDES; ++i)
        out[i] = e[i] * 6.93147180369123816490e-01 +
                 (2.0 * s[i] + (2.0 * s[i] * z[i] * p[i] + e[i] * 1.90821492927058770002e-10));
}

// Standard Gumbel noise of ids 0, 1, ... under a key: -log(-log(u)) of hashed bits, in double, rounded in the end.
void gumbel(uint64_t key, int64_t count, float* out) {
    constexpr int STEP = 8 * SIDES;
    u8 hash = key + u8{1, 2, 3, 4, 5, 6, 7, 8} * GOLDEN;
    for (int64_t start = 0; start < count; start += STEP, hash += STEP * GOLDEN) {
        d8 x[SIDES], y[SIDES];
        f8 noise[SIDES];
        for (int i = 0; i < SIDES; ++i)
            x[i] = (__builtin_convertvector(mixed(hash + i * 8 * GOLDEN) >> 12, d8) + 0.5) * 0x1p-52;
        log_of(x, y);
        for (int i = 0; i < SIDES; ++i) y[i] = -y[i];
        log_of(y, x);
        for (int i = 0; i < SIDES; ++i) noise[i] = __builtin_convertvector(-x[i], f8);
        if (start + STEP <= count) {
            memcpy(out + start, noise, sizeof(noise));
        } else {
            memcpy(out + start, noise, (count - start) * sizeof(float));
        }
    }
}

struct Place {  // of noise
    int64_t seed, position;
    bool operator==(const Place& other) const { return seed == other.seed && position == other.position; }
};

// What is mixed with the ids: the key in `hash_bits(seed, (TARGET, position), ids)` of sampling.py.
inline uint64_t key_of(const Place& place) {
    uint64_t key = mixed(static_cast<uint64_t>(place.seed) + GOLDEN);
    key = mixed((key + GOLDEN) ^ mixed(GOLDEN));  // the stream TARGET is 0
    return mixed((key + GOLDEN) ^ mixed(static_cast<uint64_t>(place.position) * MIX2 + GOLDEN));
}

struct KeyOf {
    size_t operator()(const Place& place) const { return key_of(place); }
};

// Noise over the whole vocabulary, made once while it is near; the least recently used goes first. For one caller at
// a time: whoever is called from outside says `begin`, and what is asked for from then on stays until the next one
// does, however much it is.
class NoiseStore {
  public:
    NoiseStore(int64_t vocab, int64_t capacity) : vocab(vocab), capacity_(capacity) {}

    void begin() { ++call_; }

    // (vocab)
    const float* at(int64_t seed, int64_t position) {
        const Place place{seed, position};
        const auto known = places_.find(place);
        if (known != places_.end()) {
            entries_.splice(entries_.begin(), entries_, known->second);
        } else {
            make_room();
            entries_.front().place = place;
            gumbel(key_of(place), vocab, entries_.front().memory.get<float>(vocab));
            places_[place] = entries_.begin();
        }
        entries_.front().call = call_;
        return static_cast<const float*>(entries_.front().memory.data);
    }

    const int64_t vocab;

  private:
    struct Entry {
        Place place;
        uint64_t call;  // that asked for it last
        Scratch memory;
    };

    bool may_go() const { return !entries_.empty() && entries_.back().call != call_; }

    // An entry to fill in, at the front.
    void make_room() {
        for (; static_cast<int64_t>(entries_.size()) > capacity_ && may_go(); entries_.pop_back())
            places_.erase(entries_.back().place);
        if (static_cast<int64_t>(entries_.size()) >= capacity_ && may_go()) {
            places_.erase(entries_.back().place);
            entries_.splice(entries_.begin(), entries_, std::prev(entries_.end()));
        } else {
            entries_.emplace_front();
        }
    }

    const int64_t capacity_;
    uint64_t call_ = 0;
    std::list<Entry> entries_;
    std::unordered_map<Place, std::list<Entry>::iterator, KeyOf> places_;
};

// --- the walk --------------------------------------------------------------------------------------------------------

// argmax(scores + noise), the first among equals; noise may be null. The first NaN comes before every number, and like
// a choice that is not finite it is no law to draw from: `finite` is then unset.
template <bool NOISY> int32_t drawn_from(const float* scores, const float* noise, int32_t count, bool* finite) {
    v16 best = spread(-INFINITY);
    i16 place{}, which{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, odd{};
    int32_t i = 0;
    for (; i + 16 <= count; i += 16, which += 16) {
        const v16 score = NOISY ? load(scores + i) + load(noise + i) : load(scores + i);
        odd |= score != score;
        place = score > best ? which : place;
        best = score > best ? score : best;
    }
    float top = best[0];
    int32_t chosen = place[0], num_odd = odd[0];
    for (int lane = 1; lane < 16; ++lane) {
        num_odd |= odd[lane];
        if (best[lane] > top || (best[lane] == top && place[lane] < chosen)) top = best[lane], chosen = place[lane];
    }
    for (; i < count; ++i) {
        const float score = NOISY ? scores[i] + noise[i] : scores[i];
        num_odd |= score != score;
        if (score > top) top = score, chosen = i;
    }
    for (i = 0; num_odd && i < count; ++i)
        if (scores[i] != scores[i]) {
            chosen = i;
            break;
        }
    if (!std::isfinite(scores[chosen])) *finite = false;
    return chosen;
}

// Of one row what `found` says: see `draftwing_walk`.
void walk_row(NoiseStore& store, const float* scores, int32_t nodes, const int64_t* tokens, const int64_t* parents,
              int64_t seed, int64_t start, int32_t* own, int64_t* found) {
    int32_t *drawn = own, *depths = own + nodes, *level = own + 2 * nodes;  // drawn: -1 where the walk has not come
    int32_t used = 0, deepest = 0;
    for (int32_t node = 0; node < nodes; ++node) {
        drawn[node] = -1;
        depths[node] = node > 0 && parents[node] >= 0 ? depths[parents[node]] + 1 : 0;
        deepest = depths[node] > deepest ? depths[node] : deepest;
        used += tokens[node] >= 0;
    }
    bool finite = true;
    int32_t count = 1, last = 0, num = 0;
    for (level[0] = 0;; ++num) {  // more than one node of a level only where siblings are equal
        last = level[0];
        const float* noise = seed < 0 ? nullptr : store.at(seed, start + num);
        const int32_t vocab = static_cast<int32_t>(store.vocab);
        for (int32_t i = 0; i < count; ++i) {
            const float* own_scores = scores + static_cast<int64_t>(level[i]) * vocab;
            drawn[level[i]] = noise == nullptr ? drawn_from<false>(own_scores, noise, vocab, &finite)
                                               : drawn_from<true>(own_scores, noise, vocab, &finite);
        }
        count = 0;
        for (int32_t node = 1; node < nodes; ++node) {
            const int64_t parent = parents[node];
            if (parent >= 0 && drawn[node] < 0 && drawn[parent] >= 0 && drawn[parent] == tokens[node]) level[count++] = node;
        }
        if (count == 0) break;
    }
    int64_t *path = found + 5, *emitted = path + nodes;
    for (int32_t i = num + 1; i < nodes; ++i) path[i] = emitted[i] = -1;
    path[num] = last;
    emitted[num] = drawn[last];
    for (int32_t i = num; i > 0; --i) {
        emitted[i - 1] = tokens[path[i]];
        path[i - 1] = parents[path[i]];
    }
    found[0] = num, found[1] = drawn[last], found[2] = used, found[3] = deepest, found[4] = finite;
}

thread_local Scratch walk_levels;

}  // namespace

extern "C" {

// Whether this CPU multiplies bytes four at a time.
int32_t draftwing_has_int8() {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    return 1;
#else
    return 0;
#endif
}

NoiseStore* draftwing_noise_new(int64_t vocab, int64_t capacity) { return new NoiseStore(vocab, capacity); }

void draftwing_noise_free(NoiseStore* store) { delete store; }

// The noise of `count` positions from `position` on, (count, vocab).
void draftwing_noise_copy(NoiseStore* store, int64_t seed, int64_t position, int64_t count, float* out) {
    store->begin();
    for (int64_t i = 0; i < count; ++i)
        memcpy(out + i * store->vocab, store->at(seed, position + i), store->vocab * sizeof(float));
}

// Descends in every row's tree along the tokens that the target itself draws: `accept.match`.
//
// scores (rows, nodes, vocab); tokens and parents (rows, nodes); seeds (rows), -1: greedy; starts (rows) the positions
// of the tokens after the roots. `found` (rows, 5 + 2 * nodes) holds how many drafted nodes are kept, the token after
// them, the tree's used nodes and its depth, whether all scores drawn from allow it; then the path, the root first, and
// the tokens that the row emits, -1 behind each.
void draftwing_walk(NoiseStore* store, const float* scores, int32_t rows, int32_t nodes, const int64_t* tokens,
                    const int64_t* parents, const int64_t* seeds, const int64_t* starts, int64_t* found) {
    store->begin();
    int32_t* own = walk_levels.get<int32_t>(3 * static_cast<size_t>(nodes));
    for (int32_t row = 0; row < rows; ++row) {
        const int64_t first = static_cast<int64_t>(row) * nodes;
        walk_row(*store, scores + first * store->vocab, nodes, tokens + first, parents + first, seeds[row], starts[row],
                 own, found + row * (5 + 2 * static_cast<int64_t>(nodes)));
    }
}

// A tree to draft for every row: of each expanded node the best children by their scores, logits / temperature + noise.
struct Draft {
    int32_t depth, width, most;  // levels; nodes that are expanded of each, and children of each; nodes to keep: at most
    int32_t vocab_size, room;  // room: of a row's nodes in what is written
    int32_t num_catch_up, num_hidden;  // operations: only of the catch-up; up to the states, the logits' come behind
    int32_t logits, read, states, fed_back;  // buffers; read: what the logits are made of. -1: none
    int32_t num_tables, num_knots;  // no knots: nothing is decided while the tree grows
    float sharpness, kept;  // of the chances under noise, see Calibration; kept: 1 - miss
    float worth, share;  // seconds that a token is worth; what one more node of a level takes, of the first one's time
    const float* first_logits;  // (rows, vocab) after the roots; null where there is a catch-up
    const int64_t* counts;  // (rows) entries of the catch-up
    const int64_t* wanted;  // (rows) 0: nothing is drafted
    const float* temperatures;  // (rows) 0: greedy
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
    int32_t levels, is_chain, deepest;  // written: levels that were drafted, and what the finished tree is
    float effort;  // levels, by the nodes expanded on them: 1 for the first of each, `share` for each other
};
}

namespace {

// The best scores in falling order, equal ones by their ids: how many there are, `count` at most. NaN is never among
// them, nor -inf.
int top_of(const float* scores, int size, int count, int* ids, float* values) {
    constexpr int BLOCK = 128;
    int found = 0;
    float floor = -INFINITY;  // what a score must exceed to be among them
    const auto look_at = [&](int id) {
        const float score = scores[id];
        if (!(score > floor)) return;
        int place = found < count ? found++ : count - 1;
        for (; place > 0 && score > values[place - 1]; --place) values[place] = values[place - 1], ids[place] = ids[place - 1];
        values[place] = score, ids[place] = id;
        if (found == count) floor = values[count - 1];
    };
    int start = 0;
    for (; start + BLOCK <= size; start += BLOCK) {
        v16 lanes = load(scores + start);
        for (int i = 16; i < BLOCK; i += 16) {
            const v16 part = load(scores + start + i);
            lanes = part > lanes ? part : lanes;
        }
        float top = -INFINITY;
        for (int lane = 0; lane < 16; ++lane) top = lanes[lane] > top ? lanes[lane] : top;
        bool may = top > floor;
        for (int lane = 0; lane < 16; ++lane) may |= lanes[lane] != lanes[lane];  // NaN hides what is beside it
        if (may)
            for (int id = start; id < start + BLOCK; ++id) look_at(id);
    }
    for (; start < size; ++start) look_at(start);
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

float interpolate(const float* x, const float* y, int count, float at) {
    int right = 0;
    while (right < count && x[right] < at) ++right;
    if (right == 0 || right == count) return y[right == 0 ? 0 : count - 1];
    const float gap = x[right] - x[right - 1], share = gap > 0 ? (at - x[right - 1]) / gap : 1.0f;
    return y[right - 1] + share * (y[right] - y[right - 1]);
}

void run_program(const Op* ops, int32_t num_ops, const Batch* batch, int32_t num_threads) {
    Pool& helpers = pool();
    std::lock_guard<std::mutex> turn(helpers.turn);
    Run& run = helpers.next();
    memcpy(run.ops, ops, num_ops * sizeof(Op));
    run.batch = *batch;
    run.num_ops = num_ops;
    run.num_helpers = num_threads - 1;
    for (int i = 0; i < num_ops; ++i) {
        const Op& op = ops[i];
        int pieces = 1, each = 1;
        if (op.kind == LINEAR) {
            const int tiles = (op.num_out + TILE - 1) / TILE;
            each = tiles / (4 * num_threads) > 1 ? tiles / (4 * num_threads) : 1;
            pieces = (tiles + each - 1) / each;
        } else if (op.kind == ATTEND) {
            pieces = batch->rows * op.num_kv_heads;
        } else if (op.kind == NORM) {
            pieces = batch->rows * batch->nodes;
        }
        run.progress[i].pieces = pieces;
        run.progress[i].each = each;
        run.progress[i].done.store(0);
        run.progress[i].claimed.store(0);
    }
    helpers.walk_with_helpers(run);
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

thread_local Scratch draft_scores, draft_best, draft_trees, draft_nodes, draft_numbers, draft_parents, draft_tokens;

// The children of an expanded node.
void branch(const Draft& draft, int row, int level, const float* logits, Tree& tree, int above) {
    const int vocab = draft.vocab_size;
    const float temperature = draft.temperatures[row];
    const float* noise = draft.seeds[row] < 0 ? nullptr : draft.noise->at(draft.seeds[row], draft.starts[row] + level);
    if (temperature > 0.0f) {
        float* scores = draft_scores.get<float>(vocab);
        for (int i = 0; i < vocab; ++i) scores[i] = logits[i] / temperature + (noise == nullptr ? 0.0f : noise[i]);
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
const float* catch_up(const Op* ops, int32_t num_ops, Batch batch, const Draft& draft, int32_t num_threads) {
    const int entries = batch.nodes;
    run_program(ops, draft.num_hidden, &batch, num_threads);
    for (int row = 0; row < batch.rows; ++row) {
        const size_t last = static_cast<size_t>(row) * entries + (draft.counts[row] > 0 ? draft.counts[row] - 1 : 0);
        for (const int buffer : {draft.read, draft.fed_back}) {
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

extern "C" {

// What Python must agree on.
int32_t draftwing_sizes(int32_t which) {
    return which == 0 ? sizeof(Op) : which == 1 ? sizeof(Batch) : which == 2 ? MAX_OPS : sizeof(Draft);
}

// Runs a program.
void draftwing_run(const Op* ops, int32_t num_ops, const Batch* batch, int32_t num_threads) {
    run_program(ops, num_ops, batch, num_threads);
}

// Drafts a tree for every row: how many nodes it has. `steps` is the batch of a level, `waiting` that of the catch-up or
// null; both have their rows' roots in `roots`.
int32_t draftwing_draft(const Op* ops, int32_t num_ops, const Batch* steps, const Batch* waiting, Draft* out, const int64_t* roots, int32_t num_threads) {
    Draft& draft = *out;
    Batch batch = *steps;
    const int rows = batch.rows, most_drafted = 1 + draft.depth * draft.width;
    const float* logits = waiting == nullptr ? draft.first_logits : catch_up(ops, num_ops, *waiting, draft, num_threads);
    Tree* trees = draft_trees.get<Tree>(rows);
    Node* nodes = draft_nodes.get<Node>(static_cast<size_t>(rows) * draft.room);
    int32_t* numbers = draft_numbers.get<int32_t>(static_cast<size_t>(rows) * (2 * draft.room + draft.width));
    int64_t* parents = draft_parents.get<int64_t>(static_cast<size_t>(rows) * most_drafted * 2);
    int64_t* packed = parents + static_cast<size_t>(rows) * most_drafted;
    int64_t* tokens = draft_tokens.get<int64_t>(static_cast<size_t>(rows) * draft.width);
    for (int row = 0; row < rows; ++row) {
        int32_t* own = numbers + static_cast<size_t>(row) * (2 * draft.room + draft.width);
        trees[row] = Tree{nodes + static_cast<size_t>(row) * draft.room, own, own + draft.room, 1, 1};
        trees[row].nodes[0] = Node{roots[row], -1, 0, 0, 0, 1.0f, 1.0f};
        trees[row].expanded[0] = draft.wanted[row] ? 0 : -1;
        parents[static_cast<size_t>(row) * most_drafted] = -1;
    }
    draft.noise->begin();
    draft.effort = 1.0f;
    int entries = 1, drafted = 1;
    for (int level = 0;; ++level) {
        for (int row = 0; row < rows; ++row) {
            Tree& tree = trees[row];
            tree.newest = tree.size;
            for (int entry = 0; entry < entries; ++entry)
                if (tree.expanded[entry] >= 0)
                    branch(draft, row, level, logits + (static_cast<size_t>(row) * entries + entry) * draft.vocab_size, tree, tree.expanded[entry]);
        }
        draft.levels = level + 1;
        if (level + 1 == draft.depth) break;
        const int before = entries;
        entries = widen(draft, trees, rows, level);
        if (entries == 0) break;
        draft.effort += 1.0f + (entries - 1) * draft.share;
        for (int row = 0; row < rows; ++row)
            for (int entry = 0; entry < entries; ++entry) {
                const size_t place = static_cast<size_t>(row) * entries + entry;
                int64_t& parent = parents[static_cast<size_t>(row) * most_drafted + drafted + entry];
                tokens[place] = parent = -1;
                int source = 0;
                if (trees[row].expanded[entry] >= 0) {
                    Node& node = trees[row].nodes[trees[row].expanded[entry]];
                    const Node& above = trees[row].nodes[node.parent];
                    node.place = drafted + entry, node.entry = entry;
                    tokens[place] = node.token, parent = above.place, source = above.entry;
                }
                if (draft.states < 0) continue;
                const size_t width = batch.widths[draft.states];
                memcpy(batch.buffers[draft.states] + place * width,
                       batch.buffers[draft.fed_back] + (static_cast<size_t>(row) * before + source) * batch.widths[draft.fed_back], width * sizeof(float));
            }
        batch.nodes = entries;
        batch.first_node = drafted;
        batch.tree_nodes = drafted += entries;
        for (int row = 0; row < rows; ++row)
            memcpy(packed + static_cast<size_t>(row) * drafted, parents + static_cast<size_t>(row) * most_drafted, drafted * sizeof(int64_t));
        batch.parents = packed;
        batch.tokens = tokens;
        run_program(ops + draft.num_catch_up, num_ops - draft.num_catch_up, &batch, num_threads);
        logits = batch.buffers[draft.logits];
    }
    return write_trees(draft, trees, rows);
}

// Moves the kept nodes of every row down to where committed slots go on: (rows, width) nodes, the root first, -1 behind.
void draftwing_commit(const Batch* batch, int32_t layers, int32_t kv_heads, int32_t dim, const int64_t* path, int32_t width) {
    for (int row = 0; row < batch->rows; ++row)
        for (int d = 1; d < width && path[row * width + d] >= 0; ++d) {
            const int64_t from = batch->lengths[row] + path[row * width + d], to = batch->lengths[row] + d;
            if (from == to) continue;
            for (int layer = 0; layer < layers; ++layer)
                for (int head = 0; head < kv_heads; ++head) {
                    float* keys = batch->cache + layer * batch->layer_stride + row * batch->row_stride + head * batch->head_stride;
                    float* values = keys + batch->value_stride;
                    const float* key = keys + from / KEYS * KEYS * dim + from % KEYS;
                    float* moved = keys + to / KEYS * KEYS * dim + to % KEYS;
                    for (int i = 0; i < dim; ++i) moved[i * KEYS] = key[i * KEYS];
                    memcpy(values + to * dim, values + from * dim, dim * sizeof(float));
                }
        }
}
}
