// What Python calls: see library.py.

#include <chrono>

#include <sys/mman.h>

#include "drafts.h"
#include "noise.h"
#include "processor.h"
#include "programs.h"

extern "C" {

// Whether products of 8 bits are faster than those of 32.
int32_t draftwing_has_int8() {
#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__)) || defined(__ARM_FEATURE_DOTPROD)
    return 1;
#else
    return 0;
#endif
}

// Computes 8-bit products by the processor's tiles, where it has any that work, or without; whether it does.
int32_t draftwing_use_tiles(int32_t wanted) { return use_tiles(wanted != 0); }

// Whether this processor has the instructions that this was compiled for: with -march=native it has.
int32_t draftwing_runs_here() { return runs_here(); }

NoiseStore* draftwing_noise_new(int64_t vocab, int64_t capacity) { return new NoiseStore(vocab, capacity); }

void draftwing_noise_free(NoiseStore* store) { delete store; }

// The noise of `count` positions from `position` on, (count, vocab).
void draftwing_noise_copy(NoiseStore* store, int64_t seed, int64_t position, int64_t count, float* out) {
    const auto turn = store->turn();
    for (int64_t i = 0; i < count; ++i)
        memcpy(out + i * store->vocab, store->at(seed, position + i), store->vocab * sizeof(float));
}

// Descends in every row's tree along the tokens that the target itself draws: `accept.match`.
//
// scores (rows, nodes, vocab), or logits where `filters` (rows) say what makes scores of them; tokens and parents
// (rows, nodes). `found` (rows, 5 + 2 * nodes) holds how many drafted nodes are kept, the token after them, the tree's
// used nodes and its depth, whether all scores drawn from allow it; then the path, the root first, and the tokens that
// the row emits, -1 behind each.
void draftwing_walk(const float* scores, int32_t rows, int32_t nodes, const int64_t* tokens, const int64_t* parents,
                    const Walk* how) {
    const auto turn = how->noise->turn();
    int32_t* own = walk_levels.get<int32_t>(3 * static_cast<size_t>(nodes));
    for (int32_t row = 0; row < rows; ++row) {
        const int64_t first = static_cast<int64_t>(row) * nodes;
        const Filter filter = how->filters == nullptr ? Filter{0.0f, 0, 1.0f, 0.0f} : how->filters[row];
        walk_row(*how->noise, scores + first * how->noise->vocab, nodes, tokens + first, parents + first,
                 Drawing{filter, how->seeds[row], how->starts[row]}, own, how->found + row * found_width(nodes));
    }
}

// What Python must agree on.
int32_t draftwing_sizes(int32_t which) {
    const int32_t sizes[] = {sizeof(Op), sizeof(Batch), MAX_OPS, sizeof(Draft), sizeof(Walk), sizeof(Ahead)};
    return sizes[which];
}

// Memory that will hold weights, from the beginning of a large page on: in such, where the system gives them, it is filled
// and read faster.
void draftwing_expect(char* memory, int64_t size) {
#if defined(MADV_HUGEPAGE)
    madvise(memory, size, MADV_HUGEPAGE);
#endif
}

// See `pack_tiles`. Numbers of a `format`, or words of a block; a word of bfloat16 is two numbers.
int32_t draftwing_pack(int32_t format, const char* rows, int64_t row_stride, int64_t num_out, int64_t outer,
                       int64_t outer_stride, int64_t groups, char* tiles, int64_t tile_stride, int64_t block_stride) {
    const auto pack = [&](auto pack_tiles_of) {
        return pack_tiles_of(rows, row_stride, num_out, outer, outer_stride, groups, tiles, tile_stride, block_stride);
    };
    switch (format) {
        case FLOAT32: return pack(pack_tiles<uint32_t, 0x7f800000u>);
        case BFLOAT16: return pack(pack_tiles<uint32_t, 0x7f80u, 0x7f800000u>);
        case FLOAT16: return pack(pack_tiles<uint16_t, 0x7c00u>);
        default: return pack(pack_tiles<uint32_t, 0xffffffffu>), 1;
    }
}

// The weights of some outputs of a matrix: (count, num_in).
void draftwing_rows(int32_t format, const void* weight, int32_t num_in, const int64_t* outputs, float* out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) output_row(format, weight, outputs[i], num_in, out + i * num_in);
}

// Runs a program.
void draftwing_run(const Op* ops, int32_t num_ops, const Batch* batch, int32_t num_threads) {
    run_program(ops, num_ops, batch, num_threads);
}

// Moves the kept nodes of every row down to where committed slots go on: `width` nodes of each, the root first, -1 behind,
// a row's `stride` after the last one's.
void draftwing_commit(const Batch* batch, int32_t layers, int32_t kv_heads, int32_t dim, const int64_t* path, int32_t width,
                      int32_t stride) {
    for (int row = 0; row < batch->rows; ++row) {
        const Slots at = slots_of(*batch, row);
        for (int d = 1; d < width && path[row * stride + d] >= 0; ++d) {
            const int64_t from = batch->lengths[row] + path[row * stride + d], to = batch->lengths[row] + d;
            if (from == to) continue;
            for (int layer = 0; layer < layers; ++layer)
                for (int head = 0; head < kv_heads; ++head) {
                    float* keys = batch->cache + layer * batch->layer_stride + row * batch->row_stride + head * batch->head_stride;
                    float* values = keys + batch->value_stride;
                    const float* key = keys + at(from / KEYS * KEYS) * dim + from % KEYS;
                    float* moved = keys + at(to / KEYS * KEYS) * dim + to % KEYS;
                    for (int i = 0; i < dim; ++i) moved[i * KEYS] = key[i * KEYS];
                    memcpy(values + at(to) * dim, values + at(from) * dim, dim * sizeof(float));
                }
        }
    }
}

// Moves what the net gave out of the kept nodes of every row to its first places.
void keep_outs(const Batch& batch, const Walk& how) {
    const int64_t width = batch.widths[how.out], stride = found_width(batch.nodes);
    for (int32_t row = 0; row < batch.rows; ++row) {
        const int64_t* path = how.found + row * stride + 5;
        float* outs = batch.buffers[how.out] + row * batch.nodes * width;
        for (int32_t d = 1; d < batch.nodes && path[d] >= 0; ++d)
            if (path[d] != d) std::memcpy(outs + d * width, outs + path[d] * width, width * sizeof(float));
    }
}

// Runs a target over its trees, descends in them, and moves what is kept to where it belongs: a step but for its draft.
void draftwing_verify(const Op* ops, int32_t num_ops, const Batch* batch, const Walk* how, int32_t num_threads) {
    run_program(ops, num_ops, batch, num_threads);
    const int32_t nodes = batch->nodes;
    draftwing_walk(batch->buffers[how->logits], batch->rows, nodes, batch->tokens, batch->parents, how);
    draftwing_commit(batch, how->layers, how->kv_heads, how->dim, how->found + 5, nodes, static_cast<int32_t>(found_width(nodes)));
    if (how->out >= 0) keep_outs(*batch, *how);
}

// The same with trees that were just drafted, of so many nodes.
static void verify_drafted(const Draft& draft, int32_t nodes, int32_t num_threads) {
    const auto start = std::chrono::steady_clock::now();
    Ahead& ahead = *draft.ahead;
    Batch& batch = *ahead.batch;
    batch.nodes = batch.tree_nodes = nodes;
    batch.first_node = 0;
    batch.tokens = draft.tokens, batch.parents = draft.parents;
    draftwing_verify(ahead.ops, ahead.num_ops, &batch, ahead.how, num_threads);
    ahead.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Drafts a tree for every row: how many nodes it has. `steps` is the batch of a level, `waiting` that of the
// catch-up, whose last entries are the `roots`. With `ahead` the trees are verified as well: a whole step.
int32_t draftwing_draft(const Op* ops, int32_t num_ops, const Batch* steps, const Batch* waiting, Draft* out, const int64_t* roots, int32_t num_threads) {
    Draft& draft = *out;
    Batch batch = *steps;
    const int rows = batch.rows, most_drafted = 1 + draft.depth * draft.width;
    float* logits = catch_up(ops, num_ops, *waiting, draft, num_threads);
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
    const Said* said = draft.adjusts == nullptr ? nullptr : said_of(draft.adjusts, rows, draft.vocab_size);
    draft.noise->turn();  // others may ask between two of this draft's nodes
    draft.effort = 1.0f;
    int entries = 1, drafted = 1;
    for (int level = 0;; ++level) {
        for (int row = 0; row < rows; ++row) {
            Tree& tree = trees[row];
            tree.newest = tree.size;
            for (int entry = 0; entry < entries; ++entry) {
                const int above = tree.expanded[entry];
                if (above < 0) continue;
                float* own = logits + (static_cast<size_t>(row) * entries + entry) * draft.vocab_size;
                if (said != nullptr) adjust_after(draft, row, said[row], own, tree, above);
                branch(draft, row, level, own, tree, above);
            }
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
        if (draft.kept_out >= 0) batch.buffers[draft.kept_out] += static_cast<size_t>(rows) * before * batch.widths[draft.kept_out];
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
    const int32_t num_nodes = write_trees(draft, trees, rows);
    if (draft.ahead != nullptr) verify_drafted(draft, num_nodes, num_threads);
    return num_nodes;
}

}
