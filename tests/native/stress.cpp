// Threads that run, draft, walk and ask for noise at the same time: each must find what it finds alone.
//
// Every thread has programs, slots and buffers of its own, as every decoder has; helpers and one store of noise are
// shared. Meanwhile the process forks, and its children compute too.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <random>
#include <vector>

#include "kernel.cpp"

namespace {

constexpr int HIDDEN = 64, VOCAB = 192, DIM = 32, HEADS = 2, SLOTS = 64, ROWS = 2;
constexpr int DEPTH = 4, WIDTH = 4, WAITING = 3, MOST_NODES = ROWS * WIDTH * 2;
constexpr int ROOM = 1 + WIDTH + (DEPTH - 1) * WIDTH * WIDTH;
constexpr double SECONDS = 0.5;
#if defined(__has_feature)
#define HAS_FEATURE(name) __has_feature(name)
#else
#define HAS_FEATURE(name) 0
#endif
#if defined(__SANITIZE_THREAD__) || HAS_FEATURE(thread_sanitizer)  // GCC's word and clang's
constexpr int CHILDS_THREADS = 1;  // a forked child must not start threads under this sanitizer
#else
constexpr int CHILDS_THREADS = 3;
#endif

NoiseStore shared_noise(VOCAB, 2);

// A model of one layer with everything that a decoder has for itself.
struct World {
    std::mt19937 random;
    std::vector<std::vector<float>> kept;
    std::vector<float> cache, rotation;
    std::vector<Op> ops;
    NoiseStore noise{VOCAB, 3};
    float* buffers[NUM_BUFFERS] = {};
    int32_t widths[NUM_BUFFERS] = {};

    explicit World(int seed) : random(seed), cache(ROWS * 2 * SLOTS * DIM), rotation(SLOTS * DIM) {
        for (float& value : rotation) value = draw();
        const int sizes[] = {HIDDEN, (HEADS + 2) * DIM, HEADS * DIM, VOCAB};
        for (int i = 0; i < 4; ++i) buffers[i] = numbers(MOST_NODES * sizes[i]), widths[i] = sizes[i];
        Op embed{};
        embed.kind = EMBED, embed.target = 0, embed.num_out = HIDDEN, embed.weight = numbers(VOCAB * HIDDEN);
        Op attend{};
        attend.kind = ATTEND, attend.source = 1, attend.target = 2, attend.scale = 0.2f;
        attend.num_heads = HEADS, attend.num_kv_heads = 1, attend.head_dim = attend.value_dim = DIM;
        ops = {embed, linear(0, 1, true), attend, linear(2, 0, false), linear(0, 3, true)};
        ops[3].epilogue = ADD;
    }

    float draw() { return std::normal_distribution<float>(0, 0.3f)(random); }

    float* numbers(size_t count) {
        kept.emplace_back(count + 16);
        for (float& value : kept.back()) value = draw();
        return kept.back().data();
    }

    Op linear(int source, int target, bool is_normed) {
        Op op{};
        op.kind = LINEAR, op.source = source, op.target = target, op.format = FLOAT32, op.eps = 1e-5f;
        op.num_in = widths[source], op.num_out = widths[target];
        op.weight = numbers(static_cast<size_t>(op.num_in) * (op.num_out + TILE - 1) / TILE * TILE);
        if (is_normed) op.norm = numbers(op.num_in);
        return op;
    }

    Batch batch(int nodes, const int64_t* tokens, const int64_t* parents, const int64_t* lengths) {
        Batch out{};
        out.rows = ROWS, out.nodes = out.tree_nodes = nodes;
        out.tokens = tokens, out.parents = parents, out.lengths = lengths;
        out.rotary_half = DIM / 2, out.key_block = KEYS, out.rotation = rotation.data(), out.cache = cache.data();
        out.layer_stride = ROWS * 2 * SLOTS * DIM, out.value_stride = SLOTS * DIM;
        out.row_stride = 2 * SLOTS * DIM, out.head_stride = SLOTS * DIM, out.slot_words = DIM;
        memcpy(out.buffers, buffers, sizeof(buffers));
        memcpy(out.widths, widths, sizeof(widths));
        return out;
    }

    // Everything once, from the same start: the numbers that came out. `other`: a second store of noise.
    std::vector<float> work(int num_threads, NoiseStore* other = &shared_noise) {
        std::fill(cache.begin(), cache.end(), 0.1f);
        std::vector<float> found;
        const int64_t tokens[ROWS * WAITING] = {1, 2, 3, 4, 5, 6}, parents[ROWS * WAITING] = {-1, 0, 1, -1, 0, 0};
        const int64_t none[ROWS] = {0, 0}, some[ROWS] = {2, 3};
        const Batch waiting = batch(WAITING, tokens, parents, none);
        draftwing_run(ops.data(), ops.size(), &waiting, num_threads);
        found.insert(found.end(), buffers[3], buffers[3] + ROWS * WAITING * VOCAB);

        const int64_t roots[ROWS] = {3, 6}, seeds[ROWS] = {7, 8}, starts[ROWS] = {4, 5}, counts[ROWS] = {3, 2};
        const int64_t wanted[ROWS] = {1, 1};
        const int32_t top_k[ROWS] = {0, 50};
        const float temperatures[ROWS] = {1.0f, 0.7f}, top_p[ROWS] = {0.9f, 1.0f}, min_p[ROWS] = {0, 0};
        std::vector<int64_t> trees(3 * ROWS * ROOM);
        std::vector<float> chances(2 * ROWS * ROOM);
        Draft draft{};
        draft.depth = DEPTH, draft.width = WIDTH, draft.max_nodes = 12, draft.vocab_size = VOCAB, draft.room = ROOM;
        draft.num_hidden = 4, draft.logits = 3, draft.states = -1, draft.sharpness = draft.hit_rate = draft.scale = 1;
        draft.read = draft.fed_back = 0;  // the same buffer: its rows are moved once
        draft.counts = counts, draft.active = wanted, draft.temperatures = temperatures;
        draft.top_k = top_k, draft.top_p = top_p, draft.min_p = min_p;
        draft.noise = &noise, draft.seeds = seeds, draft.starts = starts;
        draft.tokens = trees.data(), draft.parents = draft.tokens + ROWS * ROOM, draft.places = draft.parents + ROWS * ROOM;
        draft.node_probs = chances.data(), draft.path_probs = draft.node_probs + ROWS * ROOM;
        const Batch steps = batch(1, nullptr, nullptr, some);
        const int nodes = draftwing_draft(ops.data(), ops.size(), &steps, &waiting, &draft, roots, num_threads);
        for (int i = 0; i < ROWS * nodes; ++i) found.insert(found.end(), {float(draft.tokens[i]), draft.path_probs[i]});

        const int64_t chain[ROWS * WAITING] = {1, 2, 3, 4, 5, 6}, above[ROWS * WAITING] = {-1, 0, 1, -1, 0, 1};
        int64_t walked[ROWS * (5 + 2 * WAITING)];
        for (NoiseStore* store : {&noise, other}) {
            const AcceptArgs how{store, seeds, starts, nullptr, walked, 0, -1, 0, 0};
            draftwing_accept(found.data(), ROWS, WAITING, chain, above, &how);
            found.insert(found.end(), walked, walked + ROWS * (5 + 2 * WAITING));
            std::vector<float> copied(3 * VOCAB);
            draftwing_noise_copy(store, seeds[0], starts[0], 3, copied.data());
            found.insert(found.end(), copied.begin(), copied.end());
        }
        const int64_t path[ROWS * 3] = {0, 2, -1, 0, 1, 2};
        draftwing_commit(&waiting, 1, 1, path, 3, 3);
        found.insert(found.end(), cache.begin(), cache.end());
        return found;
    }
};

}  // namespace

int main() {
    constexpr int THREADS = 4;
    alarm(120);  // a thread that waits for ever fails the test
    std::vector<World*> worlds;
    std::vector<std::vector<float>> alone;
    for (int i = 0; i < THREADS; ++i) {
        worlds.push_back(new World(i));
        alone.push_back(worlds[i]->work(1));
        if (worlds[i]->work(1) != alone[i] || alone[i].size() < 1000) return printf("not repeatable\n"), 1;
    }
    std::atomic<int> wrong{0}, rounds{0};
    std::atomic<bool> is_over{false};
    std::vector<std::thread> threads;
    for (int i = 0; i < THREADS; ++i)
        threads.emplace_back([&, i] {
            for (int round = 0; !is_over; ++round, ++rounds) wrong += worlds[i]->work(1 + (round + i) % 4) != alone[i];
        });
    const auto began = std::chrono::steady_clock::now();
    World child(0);
    int forks = 0;
    while (rounds < 3 * THREADS || std::chrono::steady_clock::now() - began < std::chrono::duration<double>(SECONDS)) {
        const pid_t pid = fork();
        if (pid == 0) {
            alarm(20);
            _exit(child.work(CHILDS_THREADS, &child.noise) == alone[0] ? 0 : 1);
        }
        int status = 0;
        waitpid(pid, &status, 0);
        wrong += status != 0;
        ++forks;
        usleep(20000);
    }
    is_over = true;
    for (std::thread& thread : threads) thread.join();
    printf("%d rounds, %d forks, %d wrong\n", rounds.load(), forks, wrong.load());
    return wrong != 0 || forks == 0;
}
