// Checks that this processor has the instructions that the library was compiled for.
//
// Uses CPUID directly: the names that `__builtin_cpu_supports` accepts differ by compiler, and some do not implement it.
// This code must run on any processor, so it computes nothing with those instructions.

#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

#if defined(__x86_64__)

struct Processor {
    uint32_t leaf1_c = 0, leaf7_b = 0, leaf7_c = 0, leaf7_d = 0, leaf71_a = 0;
    uint64_t saved = 0;  // XCR0: the registers that the system saves for a thread

    Processor() {
        uint32_t a, b, c, d;
        if (!__get_cpuid(1, &a, &b, &c, &d)) return;
        leaf1_c = c;
        if (c >> 27 & 1) {  // OSXSAVE: XCR0 may be read
            uint32_t low, high;
            asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
            saved = static_cast<uint64_t>(high) << 32 | low;
        }
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        leaf7_b = b, leaf7_c = c, leaf7_d = d;
        if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) leaf71_a = a;
    }

    bool saves(uint64_t registers) const { return (saved & registers) == registers; }
};

inline bool has(uint32_t word, int bit) { return word >> bit & 1; }

bool runs_here() {
    const Processor cpu;
    bool found = true;
#if defined(__AVX__)
    found &= has(cpu.leaf1_c, 28) && cpu.saves(0x6);
#endif
#if defined(__FMA__)
    found &= has(cpu.leaf1_c, 12);
#endif
#if defined(__F16C__)
    found &= has(cpu.leaf1_c, 29);
#endif
#if defined(__BMI2__)
    found &= has(cpu.leaf7_b, 8);
#endif
#if defined(__AVX2__)
    found &= has(cpu.leaf7_b, 5);
#endif
#if defined(__AVX512F__)
    found &= has(cpu.leaf7_b, 16) && cpu.saves(0xe6);
#endif
#if defined(__AVX512DQ__)
    found &= has(cpu.leaf7_b, 17);
#endif
#if defined(__AVX512BW__)
    found &= has(cpu.leaf7_b, 30);
#endif
#if defined(__AVX512VL__)
    found &= has(cpu.leaf7_b, 31);
#endif
#if defined(__AVX512VBMI__)
    found &= has(cpu.leaf7_c, 1);
#endif
#if defined(__AVX512VNNI__)
    found &= has(cpu.leaf7_c, 11);
#endif
#if defined(__AVX512BF16__)
    found &= has(cpu.leaf71_a, 5);
#endif
#if defined(__AVXVNNI__)
    found &= has(cpu.leaf71_a, 4);
#endif
    return found;  // AMX tiles are tried before use: tiles.h
}

#elif defined(__aarch64__) && defined(__linux__)

bool runs_here() {
    [[maybe_unused]] const unsigned long has = getauxval(AT_HWCAP), has_2 = getauxval(AT_HWCAP2);
    bool found = true;
#if defined(__ARM_FEATURE_ATOMICS)
    found &= (has >> 8 & 1) != 0;
#endif
#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
    found &= (has >> 10 & 1) != 0;
#endif
#if defined(__ARM_FEATURE_DOTPROD)
    found &= (has >> 20 & 1) != 0;
#endif
#if defined(__ARM_FEATURE_SVE)
    found &= (has >> 22 & 1) != 0;
#endif
#if defined(__ARM_FEATURE_SVE2)
    found &= (has_2 >> 1 & 1) != 0;
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
    found &= (has_2 >> 13 & 1) != 0;
#endif
    return found;
}

#else

bool runs_here() { return true; }  // compiled for this processor, or for all of its kind

#endif

}  // namespace
