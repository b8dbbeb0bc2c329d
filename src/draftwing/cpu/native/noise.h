// Gumbel noise by seed and position, and acceptance of a tree's nodes with it.

#pragma once

#include <list>
#include <mutex>
#include <unordered_map>

#include "filters.h"
#include "products.h"

namespace {

// --- keyed noise -----------------------------------------------------------------------------------------------------

// A register of doubles.
typedef double dn __attribute__((vector_size(REGISTER)));
typedef uint64_t un __attribute__((vector_size(REGISTER)));
typedef float fn __attribute__((vector_size(REGISTER / 2)));
constexpr int DOUBLES = REGISTER / sizeof(double);

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull, MIX1 = 0xBF58476D1CE4E5B9ull, MIX2 = 0x94D049BB133111EBull;
constexpr int SIDES = 4;  // independent vectors: a logarithm is one long chain of products

// The finaliser of splitmix64, for a number or a vector.
template <typename T> inline T mixed(T x) {
    x = (x ^ (x >> 30)) * MIX1;
    x = (x ^ (x >> 27)) * MIX2;
    return x ^ (x >> 31);
}

// x = 2^e * m with m in [sqrt(1/2), sqrt(2)); log m = 2 artanh((m - 1) / (m + 1)).
inline void log_of(const dn* x, dn* out) {
    dn e[SIDES], s[SIDES], z[SIDES], p[SIDES];
    for (int i = 0; i < SIDES; ++i) {
        const un bits = (un)x[i] - 0x3fe6a09e667f3bcdull;
        const dn m = (dn)((bits & 0x000fffffffffffffull) + 0x3fe6a09e667f3bcdull);
        e[i] = __builtin_convertvector((bits + (1023ull << 52)) >> 52, dn) - 1023.0;
        s[i] = (m - 1.0) / (m + 1.0);
        z[i] = s[i] * s[i];
        p[i] = dn{} + 1.0 / 23;
    }
#pragma GCC unroll 10
    for (int k = 21; k >= 3; k -= 2)
#pragma GCC unroll 4
        for (int i = 0; i < SIDES; ++i) p[i] = p[i] * z[i] + 1.0 / k;
    for (int i = 0; i < SIDES; ++i)
        out[i] = e[i] * 6.93147180369123816490e-01 +
                 (2.0 * s[i] + (2.0 * s[i] * z[i] * p[i] + e[i] * 1.90821492927058770002e-10));
}

constexpr int NOISE_STEP = DOUBLES * SIDES;  // numbers that are computed at a time

inline un first_hash(uint64_t key, int64_t first) {
    un hash;
    for (int i = 0; i < DOUBLES; ++i) hash[i] = key + (first + i + 1) * GOLDEN;
    return hash;
}

// Standard Gumbel noise of `count` ids from `first` on: -log(-log(u)) of hashed bits, in double, then rounded to float.
void gumbel(uint64_t key, int64_t first, int64_t count, float* out) {
    un hash = first_hash(key, first);
    for (int64_t start = 0; start < count; start += NOISE_STEP, hash += NOISE_STEP * GOLDEN) {
        dn x[SIDES], y[SIDES];
        fn noise[SIDES];
        for (int i = 0; i < SIDES; ++i)
            x[i] = (__builtin_convertvector(mixed(hash + i * DOUBLES * GOLDEN) >> 12, dn) + 0.5) * 0x1p-52;
        log_of(x, y);
        for (int i = 0; i < SIDES; ++i) y[i] = -y[i];
        log_of(y, x);
        for (int i = 0; i < SIDES; ++i) noise[i] = __builtin_convertvector(-x[i], fn);
        if (start + NOISE_STEP <= count) {
            memcpy(out + start, noise, sizeof(noise));
        } else {
            memcpy(out + start, noise, (count - start) * sizeof(float));
        }
    }
}

// Upper bounds of the noise of ids 0, 1, ..., at most 0.06 above large noise: without logarithms, a quarter of the time. `out`
// has room for a multiple of 16.
//
// -log(-log(u)) <= -log(1 - u), and log2(x) is at least the bits of x, read as a fixed-point number.
void gumbel_bounds(uint64_t key, int64_t count, float* out) {
    constexpr uint64_t WHOLE = 0x4330000000000000ull;  // of 2^52: its low bits are those of a whole number that is added
    constexpr double MARGIN = 1e-6;  // more than the rounding of both
    const un middle = WHOLE - un{};
    un hash = first_hash(key, 0);
    for (int64_t start = 0; start < count; start += DOUBLES, hash += DOUBLES * GOLDEN) {
        const dn rest = (dn)(~mixed(hash) >> 12 | middle) - (0x1p52 - 0.5);  // (1 - u) * 2^52
        const dn bits = (dn)((un)rest >> 32 | middle) - 0x1p52;  // exponent and 20 bits of the mantissa
        const dn bound = ((1023 + 52) - bits * 0x1p-20) * 6.93147180559945309417e-01 + MARGIN;
        const fn rounded = __builtin_convertvector(bound, fn);
        memcpy(out + start, &rounded, sizeof(rounded));
    }
}

struct Place {  // of noise
    int64_t seed, position;
    bool operator==(const Place& other) const { return seed == other.seed && position == other.position; }
};

// The key that is mixed with the ids: `hash_bits(seed, (TARGET, position), ids)` of noise.py.
inline uint64_t key_of(const Place& place) {
    uint64_t key = mixed(static_cast<uint64_t>(place.seed) + GOLDEN);
    key = mixed((key + GOLDEN) ^ mixed(GOLDEN));  // the stream TARGET is 0
    return mixed((key + GOLDEN) ^ mixed(static_cast<uint64_t>(place.position) * MIX2 + GOLDEN));
}

struct KeyOf {
    size_t operator()(const Place& place) const { return key_of(place); }
};

// The noise of a place: bounds for the whole vocabulary, numbers for the few tokens that may win.
struct Noise {
    uint64_t key;
    const float* bounds;
};

// Scores + noise, for `top_of`.
struct NoisyScores {
    static_assert(TOP_STEP % NOISE_STEP == 0, "every number must be computed in a whole step, as by `gumbel` for all ids");
    const float* scores;
    Noise noise;
    float exact[TOP_STEP];

    v16 bound(int i) const { return load(scores + i) + load(noise.bounds + i); }
    const float* at(int first, int count) {
        gumbel(noise.key, first, count, exact);
        for (int i = 0; i < count; ++i) exact[i] += scores[first + i];
        return exact;
    }
};

// A least-recently-used cache of bounds of noise. Functions called from Python take a `turn`; noise that is requested during
// a turn stays valid until it ends, even beyond the capacity.
class NoiseStore {
  public:
    NoiseStore(int64_t vocab, int64_t capacity) : vocab(vocab), capacity_(capacity) {}

    std::unique_lock<std::mutex> turn() {
        auto lock = hold();
        ++call_;
        return lock;
    }

    // Takes the lock again within a turn.
    std::unique_lock<std::mutex> hold() { return std::unique_lock<std::mutex>(turn_); }

    Noise at(int64_t seed, int64_t position) {
        const Place place{seed, position};
        const auto known = places_.find(place);
        if (known != places_.end()) {
            entries_.splice(entries_.begin(), entries_, known->second);
        } else {
            make_room();
            entries_.front().place = place;
            gumbel_bounds(key_of(place), vocab, entries_.front().memory.get<float>((vocab + 15) / 16 * 16));
            places_[place] = entries_.begin();
        }
        entries_.front().call = call_;
        return Noise{key_of(place), static_cast<const float*>(entries_.front().memory.data)};
    }

    const int64_t vocab;

  private:
    struct Entry {
        Place place;
        uint64_t call;  // that used it last
        Scratch memory;
    };

    bool may_go() const { return !entries_.empty() && entries_.back().call != call_; }

    // A free entry at the front.
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
    std::mutex turn_;
    uint64_t call_ = 0;
    std::list<Entry> entries_;
    std::unordered_map<Place, std::list<Entry>::iterator, KeyOf> places_;
};

// --- acceptance --------------------------------------------------------------------------------------------------------

// The index of the first NaN, or -1.
int32_t first_nan(const float* scores, int32_t count) {
    i16 odd{};
    int32_t i = 0;
    for (; i + 16 <= count; i += 16) odd |= load(scores + i) != load(scores + i);
    for (i = largest_of(-odd) > 0 ? 0 : i; i < count; ++i)
        if (scores[i] != scores[i]) return i;
    return -1;
}

// argmax(scores + noise), the first among equals; noise may be null. The first NaN precedes every number. Clears `finite` if
// the choice is NaN or infinite: such scores are not a distribution.
int32_t drawn_from(const float* scores, const Noise* noise, int32_t count, bool* finite) {
    int32_t chosen = first_nan(scores, count);
    float best;
    if (chosen < 0) {
        chosen = 0;  // if all are -inf
        if (noise == nullptr) top_of(PlainScores{scores}, count, 1, &chosen, &best);
        else top_of(NoisyScores{scores, *noise}, count, 1, &chosen, &best);
    }
    if (!std::isfinite(scores[chosen])) *finite = false;
    return chosen;
}

thread_local Scratch accept_levels, walk_scores;

// Applies a row's temperature and filters to a node's logits.
const float* filtered(const Filter& filter, const float* scores, int32_t vocab) {
    float* own = walk_scores.get<float>(vocab);
    for (int32_t i = 0; i < vocab; ++i) own[i] = scores[i] / filter.temperature;
    const float cut = cut_of<true>(filter, own, vocab);
    for (int32_t i = 0; i < vocab; ++i) own[i] = own[i] < cut ? -INFINITY : own[i];
    return own;
}

struct Drawing {  // of a row
    Filter filter;
    int64_t seed, start;  // seed -1: greedy; start: position of the token after the root
};

// How the tokens after a batch of trees are drawn, and where the accepted nodes are written.
struct AcceptArgs {
    NoiseStore* noise;
    const int64_t* seeds;  // (rows) -1: greedy
    const int64_t* starts;  // (rows) positions of the tokens after the roots
    const Filter* filters;  // (rows) make scores from logits; null if these are scores
    int64_t* found;  // (rows, 5 + 2 * nodes): see `draftwing_accept`
    int32_t logits, out;  // the target's buffers; out -1: none
    int32_t layers, kv_heads;  // of the target's KV slots: see `draftwing_commit`
};

inline int64_t found_width(int32_t nodes) { return 5 + 2 * static_cast<int64_t>(nodes); }

// Fills `found` for one row: see `draftwing_accept`.
void accept_row(NoiseStore& store, const float* scores, int32_t nodes, const int64_t* tokens, const int64_t* parents,
              const Drawing& drawing, int32_t* own, int64_t* found) {
    int32_t *drawn = own, *depths = own + nodes, *level = own + 2 * nodes;  // drawn: -1 for nodes that were not reached
    int32_t used = 0, deepest = 0;
    for (int32_t node = 0; node < nodes; ++node) {
        drawn[node] = -1;
        depths[node] = node > 0 && parents[node] >= 0 ? depths[parents[node]] + 1 : 0;
        deepest = depths[node] > deepest ? depths[node] : deepest;
        used += tokens[node] >= 0;
    }
    bool finite = true;
    int32_t count = 1, last = 0, num = 0;
    for (level[0] = 0;; ++num) {  // more than one node per level only if siblings are equal
        last = level[0];
        const bool is_drawn = drawing.seed >= 0;
        const Noise noise = is_drawn ? store.at(drawing.seed, drawing.start + num) : Noise{};
        const int32_t vocab = static_cast<int32_t>(store.vocab);
        for (int32_t i = 0; i < count; ++i) {
            const float* own_scores = scores + static_cast<int64_t>(level[i]) * vocab;
            if (drawing.filter.changes()) own_scores = filtered(drawing.filter, own_scores, vocab);
            drawn[level[i]] = drawn_from(own_scores, is_drawn ? &noise : nullptr, vocab, &finite);
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

}  // namespace
