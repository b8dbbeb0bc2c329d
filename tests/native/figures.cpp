// Numbers of everything that the kernel computes, for a test to compare between processors: products of every format,
// norms, activations, attention, convolutions, recurrent layers, experts, noise, filters, the walk, drafts. Each line: a name, then words of 32 bits.

#include <cstdio>
#include <string>
#include <vector>

#include "kernel.cpp"

namespace {

uint64_t state = 1;

uint32_t word() {  // the same on every system, as the distributions of the library are not
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>(state >> 32);
}

float number() { return static_cast<float>(static_cast<int32_t>(word())) * 0x1p-31f; }

std::vector<float> numbers(size_t count, float scale = 1.0f) {
    std::vector<float> found(count);
    for (float& each : found) each = scale * number();
    return found;
}

// Memory for weights begins where a line does.
struct Memory {
    explicit Memory(size_t size) : data(static_cast<char*>(aligned_alloc(64, (size + 127) / 64 * 64))), size(size) {}
    ~Memory() { free(data); }
    char* data;
    size_t size;
};

void tell(const std::string& name, const void* from, size_t bytes) {
    printf("%s |", name.c_str());
    for (size_t at = 0; at + 4 <= bytes; at += 4) {
        uint32_t bits;
        memcpy(&bits, static_cast<const char*>(from) + at, 4);
        printf(" %x", bits);
    }
    printf("\n");
}

void tell(const std::string& name, const std::vector<float>& found) { tell(name, found.data(), found.size() * 4); }

// A matrix of any format: in blocks the scales, `halves` of 16 bits before `bytes` at the end, are small, and exponents near 128.
void fill(Memory& weight, int32_t format, int halves, int bytes) {
    for (size_t at = 0; at < weight.size; at += 4) {
        uint32_t bits = word();
        if (format == FLOAT32) {
            const float value = number();
            memcpy(&bits, &value, 4);
        } else if (format == BFLOAT16) {
            bits = (bits & 0x807f807fu) | 0x3f003f00u;
        } else if (format == FLOAT16) {
            bits = at % 24 == 0 ? bits & 0x83ff83ffu : (bits & 0x83ff83ffu) | 0x38003400u;  // subnormal ones, too
        }
        memcpy(weight.data + at, &bits, 4);
    }
    with_format(format, [&](auto kind) {
        typedef decltype(kind) T;
        if constexpr (T::IS_BLOCKS)
            for (char* block = weight.data; block < weight.data + weight.size; block += T::BYTES)
                for (int i = 0; i < (halves + bytes) * TILE; ++i) {
                    const uint16_t bits = static_cast<uint16_t>((word() & 0x83ff) | 0x2c00);
                    char* end = block + T::BYTES - bytes * TILE;
                    if (i < halves * TILE) memcpy(end - 2 * (i + 1), &bits, 2);
                    else end[i - halves * TILE] = static_cast<char>(format == MXFP4 ? 124 + bits % 8 : bits);
                }
    });
}

std::vector<float> linear(Op op, const std::vector<float>& x, int rows, int width, int threads = 1) {
    std::vector<float> in(x.begin(), x.begin() + static_cast<size_t>(rows) * op.num_in), out(static_cast<size_t>(rows) * width, 0.5f);
    Batch batch{};
    batch.rows = rows, batch.nodes = 1;
    batch.buffers[0] = in.data(), batch.widths[0] = op.num_in, batch.buffers[1] = out.data(), batch.widths[1] = width;
    op.kind = op.kind ? op.kind : LINEAR, op.target = 1, op.num_out = op.num_out ? op.num_out : width;
    draftwing_run(&op, 1, &batch, threads);
    return out;
}

const int COUNTS[] = {1, 2, 3, 4, 5, 6, 7, 12, 13, 17, 25};

void tell_products() {
    const struct {
        int32_t format;
        int halves, bytes, inputs;
        const char* name;
    } kinds[] = {{FLOAT32, 0, 0, 1, "float32"}, {BFLOAT16, 0, 0, 2, "bfloat16"}, {FLOAT16, 0, 0, 1, "float16"},
                 {Q8_0, 1, 0, 32, "Q8_0"},      {Q4_0, 1, 0, 32, "Q4_0"},        {Q4_1, 2, 0, 32, "Q4_1"},
                 {Q4_K, 2, 0, 256, "Q4_K"},     {Q5_K, 2, 0, 256, "Q5_K"},       {Q6_K, 1, 0, 256, "Q6_K"},
                 {IQ4_NL, 1, 0, 32, "IQ4_NL"},  {IQ4_XS, 1, 6, 256, "IQ4_XS"},   {MXFP4, 0, 1, 32, "MXFP4"}};
    const std::vector<float> x = numbers(25 * 512);
    for (const auto& kind : kinds) {
        const bool is_blocks = kind.inputs >= 32;
        const int num_in = is_blocks ? 512 : 201;
        size_t bytes = 0;
        with_format(kind.format, [&](auto type) { bytes = 2 * tile_bytes<decltype(type)>(num_in); });
        Memory weight(bytes);
        fill(weight, kind.format, kind.halves, kind.bytes);
        Op op{};
        op.format = kind.format, op.weight = weight.data, op.num_in = num_in;
        for (const int count : COUNTS) tell(std::string("product ") + kind.name + " " + std::to_string(count), linear(op, x, count, 100));
        if (kind.format == BFLOAT16) {
            for (const auto& [form, name] : {std::pair(ROUNDED, "rounded "), std::pair(SPLIT, "split ")}) {
                op.row_form = form;
                for (const int count : COUNTS) tell(std::string("product ") + name + std::to_string(count), linear(op, x, count, 100));
            }
        }
        if (is_blocks) {
            op.row_form = LEVELS;
            for (const int count : COUNTS) tell(std::string("blocks ") + kind.name + " " + std::to_string(count), linear(op, x, count, 100));
        }
        const int64_t outputs[] = {0, 5, 63, 64, 99};
        std::vector<float> rows(5 * num_in);
        draftwing_rows(kind.format, weight.data, num_in, outputs, rows.data(), 5);
        tell(std::string("rows ") + kind.name, rows);
    }
}

void tell_bytes() {
    for (const int num_in : {36, 201, 330}) {
        const int padded = padded_inputs(num_in);
        Memory weight(static_cast<size_t>(2) * padded * TILE);
        std::vector<int32_t> sums(128, 0);
        for (size_t at = 0; at < weight.size; ++at) {
            const int k = static_cast<int>(at / (4 * TILE)) % (padded / 4) * 4 + at % 4;
            const int8_t level = k < num_in ? static_cast<int8_t>(word() % 255 - 127) : 0;
            weight.data[at] = static_cast<char>(level);
            sums[at / (static_cast<size_t>(padded) * TILE) * TILE + at / 4 % TILE] += 128 * level;
        }
        const std::vector<float> x = numbers(25 * num_in), scales = numbers(128), bias = numbers(128);
        Op op{};
        op.format = INT8, op.weight = weight.data, op.num_in = num_in, op.sums = sums.data(), op.scales = scales.data();
        op.bias = bias.data();
        for (const int count : COUNTS)
            tell("bytes " + std::to_string(num_in) + " " + std::to_string(count), linear(op, x, count, 100, 1 + count % 3));
    }
}

void tell_rows() {
    std::vector<float> x = numbers(7 * 201, 4.0f);
    x[3] = -0.0f;
    const std::vector<float> norm = numbers(201), weight = numbers(256 * 201, 0.3f);
    Memory memory(weight.size() * 4);
    memcpy(memory.data, weight.data(), memory.size);
    Op op{};
    op.kind = NORM, op.norm = norm.data(), op.eps = 1e-5f, op.num_in = 201;
    tell("norm", linear(op, x, 7, 201));
    op.kind = LINEAR, op.weight = memory.data;
    tell("normed product", linear(op, x, 7, 128, 2));
    op.multiplies = 1;
    tell("multiplied", linear(op, x, 7, 128));
    op.multiplies = 0;
    for (const auto& [kind, name] : {std::pair{ADD, "added"}, {SILU, "SiLU"}, {GELU, "GELU"}, {GELU_TANH, "GELU by tanh"},
                                      {RELU_SQUARED, "squared ReLU"}}) {
        op.epilogue = kind, op.is_gated = kind >= SILU, op.num_out = 70;
        tell(name, linear(op, x, 7, 128));
    }
    op.epilogue = STORE, op.is_gated = 0, op.cap = 2.0f, op.scale = 0.4f, op.centers = 1, op.norm_bias = weight.data();
    tell("capped", linear(op, x, 7, 128));
    std::vector<float> powers = numbers(160, 90.0f);
    for (size_t i = 0; i < powers.size(); i += 16) store(&powers[i], exp_of(load(&powers[i])));
    tell("exponentials", powers);
}

// A tree of 7 nodes in each of two rows of 256 slots.
constexpr int ROWS = 2, NODES = 7, SLOTS = 256, LENGTH = 150;
const int64_t PARENTS[ROWS * NODES] = {-1, 0, 0, 1, 3, 2, 4, -1, 0, 1, 2, 0, 4, 5}, PATHS[ROWS * 4] = {0, 2, 5, -1, 0, 1, 2, 3};

// A batch of such trees. The slots of `heads` heads, in 8 bits if `narrow`, are contiguous or in pages.
Batch tree_batch(const int64_t* lengths, std::vector<float>& cache, int heads, int dim, bool narrow, bool paged = false) {
    static const int32_t pages[ROWS * SLOTS / PAGE] = {1, 6, 3, 0, 4, 7, 2, 5};
    Batch batch{};
    batch.rows = ROWS, batch.nodes = batch.tree_nodes = NODES, batch.parents = PARENTS, batch.lengths = lengths;
    batch.key_block = narrow ? PAGE : KEYS, batch.slot_words = narrow ? dim / 4 + 1 : dim;
    batch.head_stride = (paged ? ROWS : 1) * SLOTS * batch.slot_words;
    batch.value_stride = (paged ? 1 : ROWS) * heads * batch.head_stride;
    if (paged) batch.pages = pages, batch.page_stride = SLOTS / PAGE;
    else batch.row_stride = heads * batch.head_stride;
    cache.assign(2 * batch.value_stride, 0.0f);
    batch.cache = cache.data();
    return batch;
}

// The keys and values of the four slots from each row's length on.
std::vector<float> committed_slots(const Batch& batch, int heads) {
    const int words = batch.slot_words;
    std::vector<float> found;
    for (int row = 0; row < ROWS; ++row)
        for (int head = 0; head < heads; ++head)
            for (int64_t slot = batch.lengths[row]; slot < batch.lengths[row] + 4; ++slot) {
                const Slots at = slots_of(batch, row);
                float* keys = batch.cache + row * batch.row_stride + head * batch.head_stride;
                const float *key = key_of(batch, keys, at, slot), *value = keys + batch.value_stride + at(slot) * words;
                for (int i = 0; i < words; ++i) found.push_back(key[i * batch.key_block]);
                found.insert(found.end(), value, value + words);
            }
    return found;
}

// Trees over committed slots, in 32 and 8 bits, with and without a window, chunks, a view, pages. With six heads, scores are capped,
// with a sink each, values normed, results gated, and slots wider than the heads. With two heads of 96 channels, values are narrower than keys, which share channels.
void tell_attention() {
    const int64_t lengths[ROWS] = {LENGTH, 37}, none[ROWS] = {0, 0};
    std::vector<int64_t> chain(ROWS * LENGTH);
    for (int i = 0; i < ROWS * LENGTH; ++i) chain[i] = i % LENGTH - 1;
    std::vector<int32_t> view;
    for (int slot = 0; slot < 37; slot += 1 + slot % 3) view.push_back(slot);
    const int64_t viewed[ROWS] = {static_cast<int64_t>(view.size()), static_cast<int64_t>(view.size())};
    for (const bool narrow : {false, true})
        for (const int dim : {32, 96})
            for (const int heads : {2, 6})
                for (const int window : {0, 20, -40})
                    for (const int how : {0, 1, 2}) {
                        const int width = (heads + 2 * 2 + (heads > 2 ? heads : 0)) * dim, half = dim / 2 - 4;
                        const int value_dim = heads == 2 && dim == 96 ? 64 : dim;
                        std::vector<float> qkv = numbers(ROWS * NODES * width), out(ROWS * NODES * heads * value_dim), cache;
                        std::vector<float> prompt = numbers(ROWS * LENGTH * width);
                        const std::vector<float> rotation = numbers((LENGTH + NODES) * 2 * half), norm = numbers(dim), sinks = numbers(heads);
                        Op op{};
                        op.kind = ATTEND, op.target = 1, op.scale = 0.7f, op.num_heads = heads, op.num_kv_heads = 2, op.heads_apart = 1;
                        op.head_dim = dim, op.value_dim = value_dim, op.shared_dim = value_dim < dim ? 20 : 0, op.window = window, op.q_norm = op.k_norm = norm.data(), op.eps = 1e-6f;
                        if (heads > 2) op.cap = 3.0f, op.sinks = sinks.data(), op.is_gated = 1, op.v_norm = norm.data(), op.slot_first = narrow ? 8 : 32;
                        Batch batch = tree_batch(lengths, cache, 2, heads > 2 ? dim + 32 : dim, narrow, how == 2);
                        batch.rotary_half = half, batch.rotation = rotation.data();
                        batch.buffers[0] = prompt.data(), batch.widths[0] = width;
                        batch.buffers[1] = out.data(), batch.widths[1] = heads * value_dim;
                        Batch written = batch;
                        written.nodes = written.tree_nodes = LENGTH, written.parents = chain.data(), written.lengths = none;
                        for (int i = 0; i < 2 * ROWS; ++i) write_slots(op, written, i / 2, i % 2);
                        if (how == 1) batch.view = view.data(), batch.viewed = viewed;
                        batch.buffers[0] = qkv.data();
                        draftwing_run(&op, 1, &batch, 1 + how);
                        const std::string name = std::string(narrow ? "narrow " : "") + std::to_string(dim) + " " + std::to_string(heads) + " " +
                                                 std::to_string(window) + " " + std::to_string(how);
                        tell("attention " + name, out);
                        draftwing_commit(&batch, 1, 2, PATHS, 4, 4);
                        tell("slots " + name, committed_slots(batch, 2));
                    }
}

// A short convolution, three times: commits move what the next reads.
void tell_convolution() {
    constexpr int DIM = 32, CHANNELS = 100, TAPS = 3;
    const std::vector<float> weight = numbers(TAPS * CHANNELS);
    for (const bool narrow : {false, true}) {
        std::vector<float> x, out(ROWS * NODES * CHANNELS), cache;
        int64_t lengths[ROWS] = {0, 0};
        Batch batch = tree_batch(lengths, cache, 7, DIM, narrow);
        Op op{};
        op.kind = CONVOLVE, op.target = 1, op.num_in = CHANNELS, op.num_out = TAPS, op.num_kv_heads = 7, op.head_dim = DIM;
        op.weight = weight.data();
        batch.widths[0] = 3 * CHANNELS, batch.buffers[1] = out.data(), batch.widths[1] = CHANNELS;
        for (int turn = 0; turn < 3; ++turn) {
            x = numbers(ROWS * NODES * 3 * CHANNELS), batch.buffers[0] = x.data();
            draftwing_run(&op, 1, &batch, 2);
            tell(std::string("convolution ") + (narrow ? "narrow " : "") + std::to_string(turn), out);
            draftwing_commit(&batch, 1, 7, PATHS, 4, 4);
            lengths[0] += 3, lengths[1] += 4;
        }
    }
}

// The gated delta rule: a prompt, then trees of which a path is kept.
void tell_recurrence() {
    constexpr int KEY_HEADS = 2, HEADS = 4, KEY_DIM = 32, VALUE_DIM = 80, TAPS = 4, KEPT = 16;
    constexpr int CONV = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM, WIDTH = CONV + HEADS * VALUE_DIM + 2 * HEADS;
    const std::vector<float> weight = numbers(TAPS * CONV), norm = numbers(VALUE_DIM), bias = numbers(HEADS);
    const float decays[HEADS] = {-0.1f, -0.5f, -2.0f, -7.0f};
    std::vector<float> x, out(ROWS * NODES * HEADS * VALUE_DIM), cache;
    std::vector<float> states(ROWS * HEADS * KEY_DIM * VALUE_DIM), kept(ROWS * KEPT * (CONV + 2 * HEADS));
    int64_t lengths[ROWS] = {0, 0}, marks[2 * ROWS] = {0, 0, 0, 0};
    int64_t chain[ROWS * NODES];
    for (int i = 0; i < ROWS * NODES; ++i) chain[i] = i % NODES - 1;
    Op op{};
    op.kind = RECUR, op.target = 1, op.num_in = VALUE_DIM, op.num_out = TAPS, op.num_heads = HEADS, op.num_kv_heads = KEY_HEADS;
    op.head_dim = KEY_DIM, op.scale = 0.2f, op.eps = 1e-6f, op.weight = weight.data(), op.norm = norm.data(), op.scales = decays;
    op.bias = bias.data();
    Batch batch = tree_batch(lengths, cache, 1, 16, false);
    batch.states = states.data(), batch.states_row = HEADS * KEY_DIM * VALUE_DIM, batch.marks = marks;
    batch.kept = kept.data(), batch.kept_width = CONV + 2 * HEADS, batch.kept_row = KEPT * batch.kept_width;
    batch.kept_before = TAPS - 1, batch.num_recurrent = 1;
    batch.widths[0] = WIDTH, batch.buffers[1] = out.data(), batch.widths[1] = HEADS * VALUE_DIM;
    for (int turn = 0; turn < 4; ++turn) {
        x = numbers(ROWS * NODES * WIDTH, 2.0f), batch.buffers[0] = x.data();
        batch.keeps_all = turn == 0, batch.parents = turn == 0 ? chain : PARENTS;
        draftwing_run(&op, 1, &batch, 2);
        tell("recurrence " + std::to_string(turn), out);
        tell("recurrent states " + std::to_string(turn), states);
        if (turn > 0) draftwing_commit(&batch, 0, 1, PATHS, 4, 4);
        lengths[0] += turn == 0 ? NODES : 3, lengths[1] += turn == 0 ? NODES : 4;
    }
}

// A mixture of experts: routes, and what the experts of each row add to it.
void tell_experts() {
    constexpr int ROWS = 9, HIDDEN = 64, WIDTH = 40, COUNT = 24, BEST = 5;
    const std::vector<float> x = numbers(ROWS * HIDDEN), scores = numbers(ROWS * COUNT, 3.0f), bias = numbers(COUNT);
    const size_t up_bytes = 2 * tile_bytes<Float32>(HIDDEN), down_bytes = tile_bytes<Float32>(WIDTH);
    Memory up(COUNT * up_bytes), down(COUNT * down_bytes);
    fill(up, FLOAT32, 0, 0), fill(down, FLOAT32, 0, 0);
    std::vector<Expert> ups(COUNT), downs(COUNT);
    for (int i = 0; i < COUNT; ++i) ups[i].weight = up.data + i * up_bytes, downs[i].weight = down.data + i * down_bytes;
    const int sizes[] = {HIDDEN, COUNT, 4 * BEST + 2 * COUNT + 2, BEST * 48, BEST * HIDDEN, HIDDEN};
    for (const int32_t kind : {SOFTMAX, CHOSEN, SIGMOID})
        for (const int32_t groups : {0, 4}) {
            std::vector<float> buffers[6] = {x, scores};
            Batch batch{};
            batch.rows = ROWS, batch.nodes = 1;
            for (int i = 0; i < 6; ++i) {
                buffers[i].resize(ROWS * sizes[i], 0.5f);
                batch.buffers[i] = buffers[i].data(), batch.widths[i] = sizes[i];
            }
            Op ops[4]{};
            for (Op& op : ops) op.num_experts = COUNT, op.num_chosen = BEST, op.routes = 2;
            ops[0].kind = ROUTE, ops[0].source = 1, ops[0].target = 2, ops[0].scores = kind, ops[0].scale = 1.5f, ops[0].bias = bias.data();
            ops[0].num_groups = groups, ops[0].num_kept_groups = 2, ops[0].sums_two = kind == SIGMOID, ops[0].normalises = kind == SIGMOID;
            for (Op& op : ops) op.scales_input = kind == SOFTMAX;
            ops[1].kind = EXPERTS, ops[1].target = 3, ops[1].gathers = 1, ops[1].num_in = HIDDEN, ops[1].num_out = WIDTH, ops[1].is_gated = 1;
            ops[1].weight = ups.data(), ops[1].epilogue = groups ? CLAMPED : SILU, ops[1].eps = 1.7f, ops[1].cap = groups ? 2.0f : 0.0f;
            ops[2].kind = EXPERTS, ops[2].source = 3, ops[2].target = 4, ops[2].num_in = WIDTH, ops[2].num_out = HIDDEN, ops[2].weight = downs.data();
            ops[3].kind = COMBINE, ops[3].source = 4, ops[3].target = 5, ops[3].num_in = HIDDEN, ops[3].epilogue = ADD;
            draftwing_run(ops, 4, &batch, 2);
            tell("experts " + std::to_string(kind) + " of " + std::to_string(groups), buffers[5]);
        }
}

void tell_noise() {
    constexpr int VOCAB = 777;
    NoiseStore* store = draftwing_noise_new(VOCAB, 3);
    std::vector<float> noise(3 * VOCAB);
    draftwing_noise_copy(store, (1ll << 40) + 7, 12, 3, noise.data());
    tell("noise", noise);
    constexpr int ROWS = 5, NODES = 6;
    std::vector<float> scores = numbers(ROWS * NODES * VOCAB, 6.0f);
    scores[3 * NODES * VOCAB + 5] = NAN, scores[4 * NODES * VOCAB + 770] = INFINITY;
    int64_t tokens[ROWS * NODES], parents[ROWS * NODES], found[ROWS * (5 + 2 * NODES)];
    const int64_t above[NODES] = {-1, 0, 0, 1, 1, 3}, seeds[ROWS] = {-1, 3, 1ll << 33, 5, -1}, starts[ROWS] = {4, 5, 60, 7, 8};
    const Filter filters[ROWS] = {{0, 0, 1, 0}, {0.7f, 0, 0.9f, 0}, {1.3f, 300, 0.8f, 0}, {1, 0, 1, 0.01f}, {0, 0, 1, 0}};
    for (int i = 0; i < ROWS * NODES; ++i) tokens[i] = word() % VOCAB, parents[i] = above[i % NODES];
    for (int turn = 0; turn < 4; ++turn) {  // what is drawn becomes a node, so that the walk goes on
        const AcceptArgs how{store, seeds, starts, filters, found, 0, -1, 0, 0};
        draftwing_accept(scores.data(), ROWS, NODES, tokens, parents, &how);
        tell("walk " + std::to_string(turn), found, sizeof(found));
        for (int row = 0; row < ROWS; ++row) {
            const int64_t* own = found + row * (5 + 2 * NODES);
            const int64_t last = own[5 + own[0]];
            for (int node = 1; node < NODES; ++node)
                if (above[node] == last && own[1] >= 0) { tokens[row * NODES + node] = own[1]; break; }
        }
    }
    for (const auto& [k, p, least] : {std::tuple{0, 0.9f, 0.0f}, {40, 0.5f, 0.1f}, {300, 1.0f, 0.0f}, {500, 0.999f, 0.0f}, {0, 1.0f, 0.2f}})
        for (int row = 0; row < 3; ++row) {
            const Filter filter{1.0f, k, p, least};
            const float* own = scores.data() + row * VOCAB;
            const float cuts[] = {cut_of<true>(filter, own, VOCAB), cut_of<false>(filter, own, VOCAB)};
            tell("cut " + std::to_string(k) + " " + std::to_string(least) + " " + std::to_string(row), cuts, sizeof(cuts));
        }
    const int64_t said[] = {5, 9, 9, 700, 9, 5, 3};
    const int64_t biased[] = {8, 776};
    const float biases[] = {1.5f, -INFINITY};
    const Adjust adjust{1.3f, 0.2f, 0.11f, 2, said, 7, 3, biased, biases};
    const int64_t path[] = {3, 9, 44};
    adjust_scores(adjust, *count_tokens(&adjust, 1, VOCAB), path, 3, scores.data(), VOCAB);
    tell("adjusted", scores.data(), VOCAB * 4);
    draftwing_noise_free(store);
}

// Trees that a small net drafts, sampled and greedy, planned and not.
void tell_drafts() {
    constexpr int ROWS = 3, HIDDEN = 64, VOCAB = 192, DEPTH = 4, WIDTH = 4, DIM = 32, SLOTS = 64, ROOM = 1 + WIDTH + (DEPTH - 1) * WIDTH * WIDTH;
    const std::vector<float> embedding = numbers(VOCAB * HIDDEN), qkv = numbers(HIDDEN * 128), out = numbers(HIDDEN * 128, 0.3f);
    const std::vector<float> head = numbers(HIDDEN * VOCAB, 2.0f), norm = numbers(HIDDEN), rotation = numbers(SLOTS * DIM);
    Memory memory((embedding.size() + qkv.size() + out.size() + head.size()) * 4);
    std::vector<Op> ops(5);
    char* at = memory.data;
    const auto put_weight = [&](Op& op, const std::vector<float>& weight) {
        memcpy(at, weight.data(), weight.size() * 4);
        op.weight = at, at += weight.size() * 4;
    };
    ops[0].kind = EMBED, ops[0].num_out = HIDDEN, put_weight(ops[0], embedding);
    ops[1].kind = LINEAR, ops[1].target = 1, ops[1].num_in = HIDDEN, ops[1].num_out = 4 * DIM, put_weight(ops[1], qkv);
    ops[2].kind = ATTEND, ops[2].source = 1, ops[2].target = 2, ops[2].scale = 0.2f, ops[2].num_heads = 2;
    ops[2].num_kv_heads = ops[2].heads_apart = 1, ops[2].head_dim = ops[2].value_dim = DIM;
    ops[3].kind = LINEAR, ops[3].source = 2, ops[3].num_in = 2 * DIM, ops[3].num_out = HIDDEN, ops[3].epilogue = ADD;
    put_weight(ops[3], out);
    ops[4].kind = LINEAR, ops[4].target = 3, ops[4].num_in = HIDDEN, ops[4].num_out = VOCAB, ops[4].norm = norm.data();
    ops[4].eps = 1e-5f, put_weight(ops[4], head);
    const int sizes[] = {HIDDEN, 4 * DIM, 2 * DIM, VOCAB};
    for (const bool plans : {false, true}) {
        std::vector<float> cache(ROWS * 2 * SLOTS * DIM), buffers[4];
        Batch batch{};
        batch.rows = ROWS, batch.rotary_half = DIM / 2, batch.rotation = rotation.data(), batch.cache = cache.data();
        batch.key_block = KEYS, batch.layer_stride = ROWS * 2 * SLOTS * DIM, batch.value_stride = SLOTS * DIM, batch.row_stride = 2 * SLOTS * DIM;
        batch.head_stride = SLOTS * DIM, batch.slot_words = DIM;
        for (int i = 0; i < 4; ++i) {
            buffers[i].resize(ROWS * WIDTH * 3 * sizes[i]);
            batch.buffers[i] = buffers[i].data(), batch.widths[i] = sizes[i];
        }
        const int64_t tokens[ROWS * 3] = {1, 2, 3, 4, 5, 6, 7, 8, 9}, parents[ROWS * 3] = {-1, 0, 1, -1, 0, 1, -1, 0, 1};
        const int64_t none[ROWS] = {0, 0, 0}, some[ROWS] = {3, 3, 3}, roots[ROWS] = {3, 6, 9}, seeds[ROWS] = {-1, 8, 9};
        const int64_t starts[ROWS] = {4, 5, 6}, counts[ROWS] = {3, 3, 3}, wanted[ROWS] = {1, 1, 1};
        const int32_t top_k[ROWS] = {0, 50, 0};
        const float temperatures[ROWS] = {0, 0.7f, 1.0f}, top_p[ROWS] = {1, 1, 0.9f}, min_p[ROWS] = {0, 0, 0};
        const float knots[2] = {0, 1}, rates[2] = {0.01f, 0.9f}, gains[DEPTH] = {1, 1, 1, 1}, costs[DEPTH] = {0.1f, 0.1f, 0.1f, 0.1f};
        std::vector<float> verify;
        for (int i = 0; i < 32; ++i) verify.push_back(1 + 0.02f * i);
        std::vector<int64_t> trees(3 * ROWS * ROOM);
        std::vector<float> chances(2 * ROWS * ROOM);
        NoiseStore noise(VOCAB, 4);
        Draft draft{};
        draft.depth = DEPTH, draft.width = WIDTH, draft.max_nodes = 20, draft.vocab_size = VOCAB, draft.room = ROOM;
        draft.num_hidden = 4, draft.logits = 3, draft.states = -1, draft.sharpness = 2, draft.hit_rate = 0.9f, draft.scale = 1;
        draft.counts = counts, draft.active = wanted, draft.temperatures = temperatures;
        draft.top_k = top_k, draft.top_p = top_p, draft.min_p = min_p, draft.noise = &noise, draft.seeds = seeds, draft.starts = starts;
        if (plans) draft.num_tables = 1, draft.num_knots = 2, draft.worth = 1, draft.share = 0.3f;
        draft.knots = knots, draft.rates = rates, draft.gains = gains, draft.costs = costs, draft.verify = verify.data();
        draft.tokens = trees.data(), draft.parents = draft.tokens + ROWS * ROOM, draft.places = draft.parents + ROWS * ROOM;
        draft.node_probs = chances.data(), draft.path_probs = draft.node_probs + ROWS * ROOM;
        Batch waiting = batch, steps = batch;
        waiting.nodes = waiting.tree_nodes = 3, waiting.tokens = tokens, waiting.parents = parents, waiting.lengths = none;
        steps.nodes = steps.tree_nodes = 1, steps.lengths = some;
        const int nodes = draftwing_draft(ops.data(), 5, &steps, &waiting, &draft, roots, 2);
        const std::string name = plans ? "planned" : "fixed";
        tell(name + " tree's tokens", draft.tokens, ROWS * nodes * 8);
        tell(name + " tree's parents", draft.parents, ROWS * nodes * 8);
        tell(name + " tree's chances", draft.path_probs, ROWS * nodes * 4);
    }
}

}  // namespace

int main() {
    if (!runs_here()) return printf("this processor lacks what this was compiled for\n"), 1;
    tell_products();
    tell_bytes();
    tell_rows();
    tell_attention();
    tell_convolution();
    tell_recurrence();
    tell_experts();
    tell_noise();
    tell_drafts();
}
