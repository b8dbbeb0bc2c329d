// One forward as one parallel region.
//
// A program is a list of operations over buffers of rows. Threads run it together and claim pieces of each operation; an
// operation begins when every piece of the previous one is done. Each thread has a range of pieces, since it prefetches the
// weights that follow, and then takes what is left of the others' ranges. Threads do not wait for helpers that have not joined:
// on a busy machine, where a helper may be descheduled for milliseconds, the caller does the work alone.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include <pthread.h>

#include "experts.h"

namespace {

// --- the program -----------------------------------------------------------------------------------------------------

// An operation takes one step, or two if all threads first prepare its input together.
enum Part : int32_t { WHOLE = 0, PREPARE = 1, PREPARED = 2 };

constexpr int MAX_RANGES = 16;

struct alignas(64) Step {
    std::atomic<int32_t> claimed[MAX_RANGES], done;  // claimed: of each range of pieces
    int32_t op, part, pieces, each;  // each: tiles, rows or nodes per piece
};

constexpr int SHARED_NUMBERS = 12288;  // in all rows: if fewer, each thread prepares them itself, which is faster than waiting
constexpr int QUERIES = 24;  // per piece of attention, so that their scores stay in the L2 cache

// One run of a program. It holds copies, since a late helper may still look at it after everything is done.
struct Run {
    Op ops[MAX_OPS];
    Batch batch;
    int32_t num_steps, num_helpers;
    Step steps[2 * MAX_OPS];
    Scratch shared;  // rows prepared by all threads
    std::atomic<int32_t> inside{0};  // helpers that may still look at it
};

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void attend_piece(const Op& op, const Batch& batch, const Step& step, int which) {
    const int row = which / op.num_kv_heads % batch.rows, kv_head = which % op.num_kv_heads;
    if (step.part != PREPARED) write_slots(op, batch, row, kv_head);
    const int first = which / (op.num_kv_heads * batch.rows) * step.each;
    if (step.part != PREPARE) attend(op, batch, row, kv_head, first, std::min(first + step.each, batch.nodes));
}

void piece(const Run& run, const Step& step, int which, Rows& rows, bool& is_prepared) {
    const Op& op = run.ops[step.op];
    const Batch& batch = run.batch;
    const int count = batch.rows * batch.nodes, first = which * step.each;
    const size_t from = batch.widths[op.source], to = batch.widths[op.target];
    char* shared = step.part == WHOLE ? nullptr : static_cast<char*>(run.shared.data);
    if (op.kind == LINEAR && step.part == PREPARE) {
        prepare(op, batch, first, std::min(first + step.each, count), prepared_at(op, count, shared));
    } else if (op.kind == LINEAR) {
        if (!is_prepared) rows = rows_for(op, batch, shared), is_prepared = true;
        linear(op, batch, rows, first, std::min(first + step.each, (op.num_out + TILE - 1) / TILE));
    } else if (op.kind == ATTEND) {
        attend_piece(op, batch, step, which);
    } else if (op.kind == CONVOLVE) {
        convolve(op, batch, which / op.num_kv_heads, which % op.num_kv_heads);
    } else if (op.kind == RECUR) {
        recur(op, batch, which / op.num_kv_heads, which % op.num_kv_heads);
    } else if (op.kind == ROUTE && step.part == PREPARE) {
        const Routes routes = routes_of(op, batch, op.target);
        choose_experts(op, batch.buffers[op.source] + which * from, routes.chosen + which * op.num_chosen, routes.weights + which * op.num_chosen);
    } else if (op.kind == ROUTE) {
        sort_pairs(op, batch);
    } else if (op.kind == EXPERTS) {
        experts_piece(op, batch, which, step.each);
    } else if (op.kind == COMBINE) {
        combine_row(op, batch, which);
    } else if (op.kind == NORM) {
        const float* x = batch.buffers[op.source] + which * from + op.first;
        float* out = batch.buffers[op.target] + which * to + op.column;
        for (int norm = 0; norm < std::max(op.num_heads, 1); ++norm, x += op.num_in, out += op.num_in)
            norm_row(op, x, out, op.epilogue == ADD);
    } else if (op.kind == COPY) {
        for (int r = 0; r < count; ++r) {
            const float* x = batch.buffers[op.source] + r * from + op.first;
            float* out = batch.buffers[op.target] + r * to + op.column;
            if (op.scale == 0.0f) memcpy(out, x, op.num_in * sizeof(float));
            else for (int i = 0; i < op.num_in; ++i) out[i] = x[i] * op.scale;
        }
    } else {
        const int64_t token = batch.tokens[which] < 0 ? 0 : batch.tokens[which];
        float* row = batch.buffers[op.target] + which * to + op.column;
        output_row(op.format, op.weight, token, op.num_out, row);
        if (op.scale != 0.0f)
            for (int i = 0; i < op.num_out; ++i) row[i] *= op.scale;
    }
}

void run_steps(Run& run, int thread) {
    const int ranges = std::min(run.num_helpers + 1, MAX_RANGES);
    for (int i = 0; i < run.num_steps; ++i) {
        Step& step = run.steps[i];
        Rows rows{};
        bool is_prepared = false;
        for (int turn = 0; turn < ranges; ++turn) {
            const int range = (thread + turn) % ranges, begin = step.pieces * range / ranges, end = step.pieces * (range + 1) / ranges;
            for (;;) {
                const int which = begin + step.claimed[range].fetch_add(1, std::memory_order_acq_rel);
                if (which >= end) break;
                piece(run, step, which, rows, is_prepared);
                step.done.fetch_add(1, std::memory_order_acq_rel);
            }
        }
        for (int spins = 0; step.done.load(std::memory_order_acquire) < step.pieces; ++spins) {
            pause();
            if (spins > 2000) std::this_thread::yield(), spins = 0;
        }
    }
    release_tiles();
}

// --- helpers ---------------------------------------------------------------------------------------------------------

class Pool {
  public:
    // A run that no late helper looks at any more, to be filled in. Hold `turn` until it is done.
    Run& next() {
        for (;;) {
            for (Run& run : runs_)
                if (run.inside.load() == 0) return run;
            std::this_thread::yield();
        }
    }

    void run_with_helpers(Run& run) {
        try {
            for (; num_started_ < run.num_helpers; ++num_started_) std::thread(&Pool::help, this, num_started_).detach();
        } catch (const std::system_error&) {  // fewer helpers are enough
        }
        current_.store(&run);
        number_.fetch_add(1);
        if (num_asleep_.load() > 0) {
            { std::lock_guard<std::mutex> lock(sleep_); }
            wake_.notify_all();
        }
        run_steps(run, 0);
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
            // Only the current run is complete: an older one may be being reused.
            if (current_.load() == run && index < run->num_helpers) run_steps(*run, index + 1);
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

// Never destroyed, since helpers may outlive everything else. A forked child has none of its parent's threads, and may have
// been forked while one of them held a lock, so it starts a new pool. Forks wait for the current run.
Pool* only_pool = nullptr;

Pool& pool() {
    static const bool is_made = [] {
        only_pool = new Pool;
        pthread_atfork([] { only_pool->turn.lock(); }, [] { only_pool->turn.unlock(); }, [] { only_pool = new Pool; });
        return true;
    }();
    (void)is_made;
    return *only_pool;
}

// Adds the steps of an operation.
void plan(Run& run, int which, int num_threads) {
    const Op& op = run.ops[which];
    const Batch& batch = run.batch;
    const int count = batch.rows * batch.nodes;
    const auto add = [&](Part part, int pieces, int each) {
        Step& step = run.steps[run.num_steps++];
        step.op = which, step.part = part, step.pieces = pieces, step.each = each;
        step.done.store(0);
        for (std::atomic<int32_t>& claimed : step.claimed) claimed.store(0, std::memory_order_relaxed);
    };
    if (op.kind == LINEAR) {
        const bool is_shared = num_threads > 1 && count * op.num_in >= SHARED_NUMBERS && needs_preparing(op);
        if (is_shared) {
            run.shared.get<char>(prepared_bytes(op, count));
            add(PREPARE, (count + 3) / 4, 4);
        }
        const int tiles = (op.num_out + TILE - 1) / TILE, each = std::max(1, tiles / (4 * num_threads));
        add(is_shared ? PREPARED : WHOLE, (tiles + each - 1) / each, each);
    } else if (op.kind == ATTEND) {
        // Split nodes so that threads share the last heads, and scores stay in the cache.
        const int heads = batch.rows * op.num_kv_heads, queries = batch.nodes * (op.num_heads / op.num_kv_heads);
        const int wanted = std::max((queries + QUERIES - 1) / QUERIES, (2 * num_threads + heads - 1) / heads);
        const int parts = batch.watch != nullptr ? 1 : std::min(wanted, batch.nodes);
        const int each = (batch.nodes + parts - 1) / parts;
        if (parts > 1) add(PREPARE, heads, batch.nodes);
        add(parts > 1 ? PREPARED : WHOLE, heads * ((batch.nodes + each - 1) / each), each);
    } else if (op.kind == ROUTE) {
        add(PREPARE, count, 1);
        add(PREPARED, 1, 1);
    } else if (op.kind == EXPERTS) {
        // Which experts have rows is not known yet: pieces of those that do not are empty.
        const int most = std::min(op.num_experts, count * op.num_chosen), tiles = (op.num_out + TILE - 1) / TILE;
        const int each = std::clamp(most * tiles / (4 * num_threads), 1, tiles);
        add(WHOLE, most * ((tiles + each - 1) / each), each);
    } else if (op.kind == CONVOLVE || op.kind == RECUR) {
        add(WHOLE, batch.rows * op.num_kv_heads, batch.nodes);
    } else {
        add(WHOLE, op.kind == COPY ? 1 : count, 1);
    }
}

void run_program(const Op* ops, int32_t num_ops, const Batch* batch, int32_t num_threads) {
    if (batch->rows == 0 || batch->nodes == 0) return;  // no rows
    Pool& helpers = pool();
    std::lock_guard<std::mutex> turn(helpers.turn);
    Run& run = helpers.next();
    memcpy(run.ops, ops, num_ops * sizeof(Op));
    run.batch = *batch;
    run.num_helpers = num_threads - 1;
    run.num_steps = 0;
    for (int i = 0; i < num_ops; ++i) plan(run, i, num_threads);
    helpers.run_with_helpers(run);
    if (std::any_of(ops, ops + num_ops, [](const Op& op) { return op.kind == RECUR; })) mark_states(*batch);
}

}  // namespace
