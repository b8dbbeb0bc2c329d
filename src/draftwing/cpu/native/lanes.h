// Vectors of sixteen numbers, and functions of them.

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
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// A compiler may round a product and a sum once (FMA) if both are in one function. It must not leave operators out of line,
// which would then compute other bits.
#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace {

constexpr int TILE = 64;  // outputs per tile: 4 vectors
constexpr int PARTS = TILE / 16;
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 6;  // rows per pass over a tile: sums take 24 of 32 registers
#else
constexpr int MAX_ROWS = 2;
#endif

// Memory of a thread, which only grows.
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
constexpr int REGISTER = 64;  // bytes of a register
#elif defined(__AVX__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif

// Numbers in one register.
constexpr int LANES = REGISTER / 4;
typedef float Floats __attribute__((vector_size(REGISTER)));
typedef int32_t Ints __attribute__((vector_size(REGISTER)));
typedef uint32_t Words __attribute__((vector_size(REGISTER)));

template <typename T> ALWAYS_INLINE T one_register(const void* from) {
    static_assert(sizeof(T) == REGISTER);
    T found;
    memcpy(&found, from, REGISTER);
    return found;
}

// --- sixteen numbers -------------------------------------------------------------------------------------------------

#if defined(__AVX512F__) || defined(__clang__)
typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t w16 __attribute__((vector_size(64)));

ALWAYS_INLINE v16 spread(float x) { return v16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
ALWAYS_INLINE v16 select(i16 which, v16 a, v16 b) { return which ? a : b; }
ALWAYS_INLINE i16 select(i16 which, i16 a, i16 b) { return which ? a : b; }
ALWAYS_INLINE v16 numbers_of(i16 whole) { return __builtin_convertvector(whole, v16); }
ALWAYS_INLINE i16 whole_of(v16 numbers) { return __builtin_convertvector(numbers, i16); }
ALWAYS_INLINE w16 words_of(const uint16_t* from) {
    typedef uint16_t shorts __attribute__((vector_size(32), aligned(2)));
    return __builtin_convertvector(*reinterpret_cast<const shorts*>(from), w16);
}

template <typename T> ALWAYS_INLINE T from_memory(const void* from) {
    T found;
    memcpy(&found, from, sizeof(T));
    return found;
}
ALWAYS_INLINE void store(float* to, v16 value) { memcpy(to, &value, sizeof(value)); }
#else

// GCC keeps a vector wider than a register in memory, so this is an array of register-sized vectors.
template <typename T> struct alignas(64) Sixteen {
    typedef T Part __attribute__((vector_size(REGISTER)));
    typedef T PartAnywhere __attribute__((vector_size(REGISTER), aligned(4)));
    static constexpr int COUNT = 16 / LANES;
    Part part[COUNT];

    Sixteen() = default;
    // Reinterprets the bits.
    template <typename U> explicit Sixteen(const Sixteen<U>& other) {
        for (int p = 0; p < COUNT; ++p) part[p] = (Part)other.part[p];
    }
    T operator[](int lane) const { return part[lane / LANES][lane % LANES]; }
    T& operator[](int lane) { return reinterpret_cast<T*>(part)[lane]; }

#define DRAFTWING_BINARY(op)                                                       \
    friend ALWAYS_INLINE Sixteen operator op(const Sixteen& a, const Sixteen& b) { \
        Sixteen found;                                                             \
        for (int p = 0; p < COUNT; ++p) found.part[p] = a.part[p] op b.part[p];    \
        return found;                                                              \
    }                                                                              \
    friend ALWAYS_INLINE Sixteen operator op(const Sixteen& a, T b) {              \
        Sixteen found;                                                             \
        for (int p = 0; p < COUNT; ++p) found.part[p] = a.part[p] op b;            \
        return found;                                                              \
    }                                                                              \
    friend ALWAYS_INLINE Sixteen operator op(T a, const Sixteen& b) {              \
        Sixteen found;                                                             \
        for (int p = 0; p < COUNT; ++p) found.part[p] = a op b.part[p];            \
        return found;                                                              \
    }                                                                              \
    template <typename U> ALWAYS_INLINE Sixteen& operator op##=(const U& b) { return *this = *this op b; }
    DRAFTWING_BINARY(+)
    DRAFTWING_BINARY(-)
    DRAFTWING_BINARY(*)
    DRAFTWING_BINARY(/)
    DRAFTWING_BINARY(&)
    DRAFTWING_BINARY(|)
    DRAFTWING_BINARY(^)
#undef DRAFTWING_BINARY

#define DRAFTWING_COMPARE(op)                                                                                      \
    friend ALWAYS_INLINE Sixteen<int32_t> operator op(const Sixteen& a, const Sixteen& b) {                        \
        Sixteen<int32_t> found;                                                                                    \
        for (int p = 0; p < COUNT; ++p) found.part[p] = (typename Sixteen<int32_t>::Part)(a.part[p] op b.part[p]); \
        return found;                                                                                              \
    }
    DRAFTWING_COMPARE(<)
    DRAFTWING_COMPARE(>)
    DRAFTWING_COMPARE(!=)
#undef DRAFTWING_COMPARE

    friend ALWAYS_INLINE Sixteen operator<<(const Sixteen& a, int bits) {
        Sixteen found;
        for (int p = 0; p < COUNT; ++p) found.part[p] = a.part[p] << bits;
        return found;
    }
    friend ALWAYS_INLINE Sixteen operator>>(const Sixteen& a, int bits) {
        Sixteen found;
        for (int p = 0; p < COUNT; ++p) found.part[p] = a.part[p] >> bits;
        return found;
    }
    friend ALWAYS_INLINE Sixteen operator-(const Sixteen& a) {
        Sixteen found;
        for (int p = 0; p < COUNT; ++p) found.part[p] = -a.part[p];
        return found;
    }
};

typedef Sixteen<float> v16;
typedef Sixteen<int32_t> i16;
typedef Sixteen<uint32_t> w16;

template <typename T> ALWAYS_INLINE T from_memory(const void* from) {
    T found;
    for (int p = 0; p < T::COUNT; ++p)
        found.part[p] = reinterpret_cast<const typename T::PartAnywhere*>(from)[p];
    return found;
}
ALWAYS_INLINE void store(float* to, const v16& value) {
    for (int p = 0; p < v16::COUNT; ++p) reinterpret_cast<v16::PartAnywhere*>(to)[p] = value.part[p];
}
ALWAYS_INLINE v16 spread(float x) {
    v16 found;
    for (int p = 0; p < v16::COUNT; ++p) found.part[p] = x - v16::Part{};  // equals x, for -0 too
    return found;
}
template <typename T> ALWAYS_INLINE Sixteen<T> select(const i16& which, const Sixteen<T>& a, const Sixteen<T>& b) {
    Sixteen<T> found;
    for (int p = 0; p < v16::COUNT; ++p) found.part[p] = which.part[p] ? a.part[p] : b.part[p];
    return found;
}
ALWAYS_INLINE v16 numbers_of(const i16& whole) {
    v16 found;
    for (int p = 0; p < v16::COUNT; ++p) found.part[p] = __builtin_convertvector(whole.part[p], v16::Part);
    return found;
}
ALWAYS_INLINE i16 whole_of(const v16& numbers) {
    i16 found;
    for (int p = 0; p < v16::COUNT; ++p) found.part[p] = __builtin_convertvector(numbers.part[p], i16::Part);
    return found;
}
ALWAYS_INLINE w16 words_of(const uint16_t* from) {
    typedef uint16_t Shorts __attribute__((vector_size(REGISTER / 2), aligned(2)));
    w16 found;
    for (int p = 0; p < w16::COUNT; ++p)
        found.part[p] = __builtin_convertvector(reinterpret_cast<const Shorts*>(from)[p], w16::Part);
    return found;
}
#endif

ALWAYS_INLINE v16 load(const float* from) { return from_memory<v16>(from); }

// The types of as many numbers as there are words: sixteen, or those of a register.
template <typename W> struct Like {
    typedef v16 Number;
    typedef i16 Whole;
};
#if !defined(__AVX512F__)
template <> struct Like<Words> {
    typedef Floats Number;
    typedef Ints Whole;
};
ALWAYS_INLINE Floats numbers_of(Ints whole) { return __builtin_convertvector(whole, Floats); }
#endif

// Forces a value into a register: with 16 registers a compiler may spill sums to memory and reload numbers for each use.
template <typename T> ALWAYS_INLINE void hold_register(T& value) {
#if defined(__AVX__) && !defined(__AVX512F__)
    asm("" : "+x"(value));
#else
    (void)value;
#endif
}
ALWAYS_INLINE void hold(v16& value) {
#if defined(__AVX512F__) || defined(__clang__)
    (void)value;
#else
    for (int p = 0; p < v16::COUNT; ++p) hold_register(value.part[p]);
#endif
}

ALWAYS_INLINE i16 counted() {
    constexpr int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return from_memory<i16>(numbers);
}

// The low byte of each number.
ALWAYS_INLINE void store_bytes(uint8_t* to, const i16& value) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)value));
#else
    int32_t numbers[16];
    memcpy(numbers, &value, 64);
    for (int i = 0; i < 16; ++i) to[i] = static_cast<uint8_t>(numbers[i]);
#endif
}

// The low half of each number.
ALWAYS_INLINE void store_halves(uint16_t* to, const w16& value) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)value));
#else
    uint32_t numbers[16];
    memcpy(numbers, &value, 64);
    for (int i = 0; i < 16; ++i) to[i] = static_cast<uint16_t>(numbers[i]);
#endif
}

// Broadcasts the number at an address. Zen 4 broadcasts an integer word for free, but uses a vector unit for a float.
ALWAYS_INLINE v16 spread_from(const float* from) {
#if defined(__AVX512F__)
    int32_t bits;
    memcpy(&bits, from, 4);
    return (v16)_mm512_set1_epi32(bits);
#else
    return spread(*from);
#endif
}

// a * b + c, rounded once if the processor can; explicit where a compiler could fuse another product instead.
ALWAYS_INLINE float fused(float a, float b, float c) {
#if defined(__FP_FAST_FMAF) || defined(__FMA__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// a * b + c, rounded once on every processor.
ALWAYS_INLINE Floats fused_once(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < LANES; ++i) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
#endif
}

ALWAYS_INLINE float sum_of(v16 lanes) {
    float half[8], sum[4];
    for (int i = 0; i < 8; ++i) half[i] = lanes[i] + lanes[i + 8];
    for (int i = 0; i < 4; ++i) sum[i] = half[i] + half[i + 4];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// Maximum and minimum; the second operand if one is NaN.
ALWAYS_INLINE v16 larger(v16 a, v16 b) {
#if defined(__AVX512F__)
    return (v16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select(a > b, a, b);
#endif
}
ALWAYS_INLINE v16 smaller(v16 a, v16 b) {
#if defined(__AVX512F__)
    return (v16)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return select(a < b, a, b);
#endif
}

ALWAYS_INLINE i16 larger(const i16& a, const i16& b) {
#if defined(__AVX512F__)
    return (i16)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    return select(b < a, a, b);
#endif
}

// Joins all lanes, two halves at a time.
template <typename F> ALWAYS_INLINE int32_t folded(const i16& lanes, F join) {
    int32_t all[16];
    memcpy(all, &lanes, 64);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) all[i] = join(all[i], all[i + half]);
    return all[0];
}

ALWAYS_INLINE int32_t largest_of(const i16& lanes) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)lanes);
#else
    return folded(lanes, [](int32_t a, int32_t b) { return a > b ? a : b; });
#endif
}

ALWAYS_INLINE bool any_above(const v16& lanes, float floor) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)lanes, _mm512_set1_ps(floor), _CMP_GT_OQ) != 0;
#else
    bool found = false;
    for (int i = 0; i < 16; ++i) found |= lanes[i] > floor;
    return found;
#endif
}

ALWAYS_INLINE int32_t sum_of(const i16& lanes) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)lanes);
#else
    return folded(lanes, [](int32_t a, int32_t b) { return a + b; });
#endif
}

// The largest of numbers that are not negative, whose order is that of their bits; NaN is larger than all others.
ALWAYS_INLINE float largest_of(const v16& lanes) {
    const int32_t bits = largest_of((i16)lanes);
    float largest;
    memcpy(&largest, &bits, 4);
    return largest;
}

// x * factor, rounded once to the nearest whole number, ties to even; of at most 2^22.
ALWAYS_INLINE i16 nearest_whole(const float* x, float factor) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, in the low bits
    i16 found;
    for (int i = 0; i < 16; i += LANES) {
        const Floats shifted = fused_once(one_register<Floats>(x + i), factor - Floats{}, magic - Floats{});
        const Ints whole = (Ints)shifted - 0x4b400000;
        memcpy(reinterpret_cast<char*>(&found) + 4 * i, &whole, REGISTER);
    }
    return found;
}

// e^x to about one unit in the last place; zero below -87.
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
#if defined(__AVX512F__)  // the same, in one instruction
    p = (v16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const i16 power = (whole_of(n) + 127) << 23;
    p *= (v16)power;  // reinterprets the bits
#endif
    return select(vanishes, v16{}, p);
}

enum Epilogue : int32_t { STORE = 0, ADD = 1, SILU = 2, GELU = 3, GELU_TANH = 4, RELU_SQUARED = 5, CLAMPED = 6 };

inline v16 activate(int32_t kind, v16 x) {
    if (kind == SILU) return x / (1.0f + exp_of(-x));
    if (kind == GELU_TANH) {
        const v16 inner = 1.5957691216057308f * (x + 0.044715f * x * x * x);
        return x / (1.0f + exp_of(-inner));
    }
    if (kind == RELU_SQUARED) {
        const v16 positive = larger(v16{}, x);  // keeps NaN
        return positive * positive;
    }
    v16 out;
    for (int i = 0; i < 16; ++i) out[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678118654752f));
    return out;
}

// (up + 1) * gate * sigmoid(alpha * gate), with gate and up clamped to `limit` (gpt-oss); keeps NaN.
inline v16 clamped(v16 gate, v16 up, float alpha, float limit) {
    const v16 most = spread(limit), x = -larger(-most, -gate);
    const v16 y = -larger(-most, -larger(-most, up));
    return (y + 1.0f) * (x / (1.0f + exp_of(-alpha * x)));
}

// cap * tanh(x / cap)
inline v16 capped(v16 x, float cap) {
    return cap * (1.0f - 2.0f / (1.0f + exp_of(x * (2.0f / cap))));
}

}  // namespace

