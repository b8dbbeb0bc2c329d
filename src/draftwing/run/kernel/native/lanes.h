// Sixteen numbers at a time, and what is computed of them.

#pragma once

#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || \
    defined(__NO_SIGNED_ZEROS__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "flags like -ffast-math change the kernel's numbers: take them out of CXX"
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

typedef float v16 __attribute__((vector_size(64)));
typedef float v16u __attribute__((vector_size(64), aligned(4)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef int32_t i16u __attribute__((vector_size(64), aligned(4)));

constexpr int TILE = 64;  // outputs computed together: 4 vectors
constexpr int PARTS = TILE / 16;
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 6;  // rows of one pass over a tile: 24 of 32 registers hold sums
#else
constexpr int MAX_ROWS = 2;
#endif

// Memory of a thread.
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

#if defined(__AVX512F__)
inline v16 load(const float* from) { return *reinterpret_cast<const v16u*>(from); }
inline void store(float* to, v16 value) { *reinterpret_cast<v16u*>(to) = value; }
#else
// In two halves: 64 bytes at once GCC moves through memory, 16 at a time.
typedef float v8 __attribute__((vector_size(32)));
typedef float v8u __attribute__((vector_size(32), aligned(4)));
inline v16 load(const float* from) {
    v16 found;
    for (int h = 0; h < 2; ++h) {
        const v8 half = *reinterpret_cast<const v8u*>(from + 8 * h);
        memcpy(reinterpret_cast<char*>(&found) + 32 * h, &half, 32);
    }
    return found;
}
inline void store(float* to, v16 value) {
    *reinterpret_cast<v8u*>(to) = __builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7);
    *reinterpret_cast<v8u*>(to + 8) = __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15);
}
#endif
inline v16 spread(float x) { return v16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// The number at an address, sixteen times. Zen 4 loads a word into all lanes at no cost, but takes a vector unit's time for
// the same instruction on a float.
inline v16 spread_from(const float* from) {
#if defined(__AVX512F__)
    int32_t bits;
    memcpy(&bits, from, 4);
    return (v16)_mm512_set1_epi32(bits);
#else
    return spread(*from);
#endif
}

// Sixteen sums that stay in registers: without AVX-512 only as two halves.
#if defined(__AVX512F__)
typedef v16 Sums;
#else
struct Sums {
    v8 half[2];
};
inline void set(Sums& sums, const v16& from) { memcpy(&sums, &from, 64); }
inline void get(const Sums& sums, v16& to) { memcpy(&to, &sums, 64); }
inline void add_product(Sums& sums, const v16& x, const v16& weight) {
    v8 xs[2], weights[2];
    memcpy(xs, &x, 64);
    memcpy(weights, &weight, 64);
    for (int h = 0; h < 2; ++h) sums.half[h] += xs[h] * weights[h];
}
#endif
inline void set(v16& sums, const v16& from) { sums = from; }
inline void get(const v16& sums, v16& to) { to = sums; }
inline void add_product(v16& sums, const v16& x, const v16& weight) { sums += x * weight; }

inline float sum_of(v16 lanes) {
    float half[8], sum[4];
    for (int i = 0; i < 8; ++i) half[i] = lanes[i] + lanes[i + 8];
    for (int i = 0; i < 4; ++i) sum[i] = half[i] + half[i + 4];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// The larger and the smaller of two, the second where one is NaN.
inline v16 larger(v16 a, v16 b) {
#if defined(__AVX512F__)
    return (v16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}
inline v16 smaller(v16 a, v16 b) {
#if defined(__AVX512F__)
    return (v16)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}

// e^x to about one unit in the last place; below -87 zero.
inline v16 exp_of(v16 x) {
    const v16 lowest = spread(-87.0f), highest = spread(88.0f);
    const i16 vanishes = x < lowest;
    const v16 t = smaller(highest, larger(lowest, x));
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
#if defined(__AVX512F__)  // the same product, in one instruction
    p = (v16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const i16 power = (__builtin_convertvector(n, i16) + 127) << 23;
    p *= (v16)power;  // the bits, not the numbers
#endif
    return vanishes ? v16{} : p;
}

enum Epilogue : int32_t { STORE = 0, ADD = 1, SILU = 2, GELU = 3, GELU_TANH = 4 };

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

