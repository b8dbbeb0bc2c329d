// One forward as one parallel region.
//
// A program is a list of operations over buffers of rows. Threads walk it side by side and claim pieces of each
// operation; an operation begins when every piece of the one before is done. Nobody waits for a thread that has not
// come: on a busy machine, where a helper may be away for milliseconds, the caller does the work alone.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include <pthread.h>

#include "attention.h"

namespace {

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
        norm_row(batch.buffers[op.source] + which * from + op.first, op.norm, op.num_in, op.eps,
                 batch.buffers[op.target] + which * to + op.column);
    } else if (op.kind == COPY) {
        for (int r = 0; r < count; ++r)
            memcpy(batch.buffers[op.target] + r * to + op.column, batch.buffers[op.source] + r * from + op.first,
                   op.num_in * sizeof(float));
    } else {
        const int64_t token = batch.tokens[which] < 0 ? 0 : batch.tokens[which];
        output_row(op.format, op.weight, token, op.num_out, batch.buffers[op.target] + which * to + op.column);
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
        try {
            for (; num_started_ < run.num_helpers; ++num_started_) std::thread(&Pool::help, this, num_started_).detach();
        } catch (const std::system_error&) {  // as many as the system gives are enough
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

// Never destroyed: helpers may outlive everything else. A forked child has none of its parent's, and may have been
// forked while one of them held a lock: it begins with a pool of its own. No run is under way while a process forks.
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
        } else if (op.kind == NORM || op.kind == EMBED) {
            pieces = batch->rows * batch->nodes;
        }
        run.progress[i].pieces = pieces;
        run.progress[i].each = each;
        run.progress[i].done.store(0);
        run.progress[i].claimed.store(0);
    }
    helpers.walk_with_helpers(run);
}

}  // namespace
