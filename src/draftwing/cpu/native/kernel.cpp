// The functions that Python calls (library.py).

#include <chrono>

#include <sys/mman.h>

#include "drafts.h"
#include "noise.h"
#include "processor.h"
#include "programs.h"

extern "C" {

// Returns 1 if 8-bit products are faster than 32-bit ones.
int32_t draftwing_has_int8() {
#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__)) || defined(__ARM_FEATURE_DOTPROD)
    return 1;
#else
    return 0;
#endif
}

// Turns the processor's matrix tiles on, if it has any that work, or off; returns whether they are on.
int32_t draftwing_use_tiles(int32_t wanted) { return use_tiles(wanted != 0); }

// Returns 1 if this processor has the instructions that the library was compiled for.
int32_t draftwing_runs_here() { return runs_here(); }

NoiseStore* draftwing_noise_new(int64_t vocab, int64_t capacity) { return new NoiseStore(vocab, capacity); }

void draftwing_noise_free(NoiseStore* store) { delete store; }

// Writes the noise of `count` positions from `position` on: (count, vocab).
void draftwing_noise_copy(const NoiseStore* store, int64_t seed, int64_t position, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i) gumbel(key_of(Place{seed, position + i}), 0, store->vocab, out + i * store->vocab);
}

// `accept.match`: descends in every row's tree along the tokens that the target draws.
//
// `scores` (rows, nodes, vocab) are logits if `filters` (rows) are given; tokens and parents are (rows, nodes). `found`
// (rows, 5 + 2 * nodes) receives the number of accepted nodes, the token after them, the tree's used nodes and its depth,
// and whether all scores drawn from are finite; then the path, the root first, and the emitted tokens, padded with -1.
void draftwing_accept(const float* scores, int32_t rows, int32_t nodes, const int64_t* tokens, const int64_t* parents,
                    const AcceptArgs* args) {
    const auto turn = args->noise->turn();
    int32_t* own = accept_levels.get<int32_t>(3 * static_cast<size_t>(nodes));
    for (int32_t row = 0; row < rows; ++row) {
        const int64_t first = static_cast<int64_t>(row) * nodes;
        const Filter filter = args->filters == nullptr ? Filter{0.0f, 0, 1.0f, 0.0f} : args->filters[row];
        accept_row(*args->noise, scores + first * args->noise->vocab, nodes, tokens + first, parents + first,
                 Drawing{filter, args->seeds[row], args->starts[row]}, own, args->found + row * found_width(nodes));
    }
}

// Sizes that Python compares with its own.
int32_t draftwing_sizes(int32_t which) {
    const int32_t sizes[] = {sizeof(Op), sizeof(Batch), MAX_OPS, sizeof(Draft), sizeof(AcceptArgs), sizeof(VerifyArgs), MAX_EXPERTS};
    return sizes[which];
}

// Asks for huge pages, which are filled and read faster; `memory` begins one.
void draftwing_advise(char* memory, int64_t size) {
#if defined(MADV_HUGEPAGE)
    madvise(memory, size, MADV_HUGEPAGE);
#endif
}

// `pack_tiles` for numbers of a `format`, or for parts of a block; a word of bfloat16 is two numbers. With an exponent of 253
// or more, a weight may be infinite.
int32_t draftwing_pack(int32_t format, const char* rows, int64_t row_stride, int64_t num_out, int64_t outer,
                       int64_t outer_stride, int64_t groups, char* tiles, int64_t tile_stride, int64_t block_stride) {
    const auto pack = [&](auto pack_tiles_of) {
        return pack_tiles_of(rows, row_stride, num_out, outer, outer_stride, groups, tiles, tile_stride, block_stride);
    };
    switch (format) {
        case FLOAT32: return pack(pack_tiles<uint32_t, 0x7f800000u>);
        case BFLOAT16: return pack(pack_tiles<uint32_t, 0x7f80u, 0x7f800000u>);
        case FLOAT16: return pack(pack_tiles<uint16_t, 0x7c00u>);
        case BYTES: return pack(pack_tiles<uint8_t>);
        case EXPONENTS: return pack(pack_tiles<uint8_t, 0xfdu, 0xfeu>);
        default: return pack(pack_tiles<uint32_t, 0xffffffffu>), 1;
    }
}

// Copies the weights of some outputs of a matrix: (count, num_in).
void draftwing_rows(int32_t format, const void* weight, int32_t num_in, const int64_t* outputs, float* out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) output_row(format, weight, outputs[i], num_in, out + i * num_in);
}

// Runs a program.
void draftwing_run(const Op* ops, int32_t num_ops, const Batch* batch, int32_t num_threads) {
    run_program(ops, num_ops, batch, num_threads);
}

// Moves the accepted nodes of every row to the slots after the committed ones. A row's path has `width` nodes, the root
// first, padded with -1; rows are `stride` apart.
void draftwing_commit(const Batch* batch, int32_t layers, int32_t kv_heads, const int64_t* path, int32_t width, int32_t stride) {
    const int words = batch->slot_words;
    for (int row = 0; row < batch->rows; ++row) {
        const Slots at = slots_of(*batch, row);
        for (int d = 1; d < width && path[row * stride + d] >= 0; ++d) {
            const int64_t from = batch->lengths[row] + path[row * stride + d], to = batch->lengths[row] + d;
            if (from == to) continue;
            move_input(*batch, row, path[row * stride + d], d);
            for (int layer = 0; layer < layers; ++layer)
                for (int head = 0; head < kv_heads; ++head) {
                    float* keys = batch->cache + layer * batch->layer_stride + row * batch->row_stride + head * batch->head_stride;
                    float* values = keys + batch->value_stride;
                    const float* key = key_of(*batch, keys, at, from);
                    float* moved = key_of(*batch, keys, at, to);
                    for (int i = 0; i < words; ++i) moved[i * batch->key_block] = key[i * batch->key_block];
                    memcpy(values + at(to) * words, values + at(from) * words, words * sizeof(float));
                }
        }
    }
}

// Moves the net's second output for the accepted nodes of every row to the front.
void keep_outs(const Batch& batch, const AcceptArgs& args) {
    const int64_t width = batch.widths[args.out], stride = found_width(batch.nodes);
    for (int32_t row = 0; row < batch.rows; ++row) {
        const int64_t* path = args.found + row * stride + 5;
        float* outs = batch.buffers[args.out] + row * batch.nodes * width;
        for (int32_t d = 1; d < batch.nodes && path[d] >= 0; ++d)
            if (path[d] != d) std::memcpy(outs + d * width, outs + path[d] * width, width * sizeof(float));
    }
}

// Runs a target over its trees, applies `accept.match`, and commits the accepted nodes: a step without its draft.
void draftwing_verify(const Op* ops, int32_t num_ops, const Batch* batch, const AcceptArgs* args, int32_t num_threads) {
    run_program(ops, num_ops, batch, num_threads);
    const int32_t nodes = batch->nodes;
    draftwing_accept(batch->buffers[args->logits], batch->rows, nodes, batch->tokens, batch->parents, args);
    draftwing_commit(batch, args->layers, args->kv_heads, args->found + 5, nodes, static_cast<int32_t>(found_width(nodes)));
    if (args->out >= 0) keep_outs(*batch, *args);
}

// `draftwing_verify` for the trees that were just drafted.
static void verify_drafted(const Draft& draft, int32_t nodes, int32_t num_threads) {
    const auto start = std::chrono::steady_clock::now();
    VerifyArgs& args = *draft.verify_args;
    Batch& batch = *args.batch;
    batch.nodes = batch.tree_nodes = nodes;
    batch.first_node = 0;
    batch.tokens = draft.tokens, batch.parents = draft.parents;
    draftwing_verify(args.ops, args.num_ops, &batch, args.accept, num_threads);
    args.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Drafts a tree for every row; returns the nodes per row. `steps` is the batch of a level, `waiting` that of the unread
// entries, the last of which are the `roots`. With `verify_args` it verifies the trees too: a whole step.
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
        trees[row].expanded[0] = draft.active[row] ? 0 : -1;
        parents[static_cast<size_t>(row) * most_drafted] = -1;
    }
    const TokenCounts* said = draft.adjusts == nullptr ? nullptr : count_tokens(draft.adjusts, rows, draft.vocab_size);
    draft.noise->turn();  // other threads may use the noise between two nodes
    draft.num_forwards = 1.0f;
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
        draft.num_levels = level + 1;
        if (level + 1 == draft.depth) break;
        const int before = entries;
        entries = widen(draft, trees, rows, level);
        if (entries == 0) break;
        draft.num_forwards += 1.0f + (entries - 1) * draft.share;
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
        run_program(ops + draft.num_fuse, num_ops - draft.num_fuse, &batch, num_threads);
        logits = batch.buffers[draft.logits];
    }
    const int32_t num_nodes = write_trees(draft, trees, rows);
    if (draft.verify_args != nullptr) verify_drafted(draft, num_nodes, num_threads);
    return num_nodes;
}

}
