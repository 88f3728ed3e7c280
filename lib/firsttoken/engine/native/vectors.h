// Registers of floats, and the numbers that models are stored in.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512BF16__)
constexpr bool HAS_BF16 = true;
#else
constexpr bool HAS_BF16 = false;
#endif

// As many floats as one register holds: gcc takes longer vectors apart by way of memory, and attention ran at 12 GFLOP/s
// in vectors of 16 on a processor with AVX2, at 50 in those of 8 (2 cores, heads of 64).
#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Lane __attribute__((vector_size(4 * LANES)));
typedef uint16_t Half __attribute__((vector_size(2 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));

struct bf16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }

inline float widen(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline void narrow(float x, float& out) { out = x; }

inline void narrow(float x, bf16& out) {  // to the nearest, ties to even; a NaN stays one
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    out.bits = (bits & 0x7FFFFFFF) > 0x7F800000 ? uint16_t((bits >> 16) | 0x40) : uint16_t(rounded);
}

// A stored number as it computes: as it is, or a half as a float.
inline void copy(float x, float& out) { out = x; }
inline void copy(bf16 x, bf16& out) { out = x; }
inline void copy(bf16 x, float& out) { out = widen(x); }
inline void copy(float x, bf16& out) { narrow(x, out); }

template <class T>
inline float rounded(float x) {
    T out;
    narrow(x, out);
    return widen(out);
}

inline Lane load(const float* from) {
    Lane lane;
    std::memcpy(&lane, from, sizeof lane);
    return lane;
}

// A register of numbers as they are stored, each rounded as narrow does, but that AVX-512 makes zeros of what is below 1.2e-38.
// Its own instructions are named where it has them, as gcc 12 takes several in their place.
inline void store(Lane lane, float* to) { std::memcpy(to, &lane, sizeof lane); }

#if defined(__AVX512BF16__)
inline Lane load(const bf16* from) {
    const __m256i half = _mm256_loadu_si256((const __m256i*)from);
    return (Lane)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

inline void store(Lane lane, bf16* to) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)lane)); }
#else
inline Lane load(const bf16* from) {
    Half half;
    std::memcpy(&half, from, sizeof half);
    const Bits bits = __builtin_convertvector(half, Bits) << 16;
    Lane lane;
    std::memcpy(&lane, &bits, sizeof lane);
    return lane;
}

inline void store(Lane lane, bf16* to) {
    Bits bits;
    std::memcpy(&bits, &lane, sizeof bits);
    const Bits near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, nan = (bits >> 16) | 0x40;
    const Half half = __builtin_convertvector((bits & 0x7FFFFFFF) > 0x7F800000 ? nan : near, Half);
    std::memcpy(to, &half, sizeof half);
}
#endif

template <class T>
inline Lane rounded(Lane lane) {
    T stored[LANES];
    store(lane, stored);
    return load(stored);
}

inline float total(Lane lane) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < LANES; ++i) sum += lane[i];
    return sum;
}

typedef int32_t Places __attribute__((vector_size(4 * LANES)));

// The numbers of a and, behind them, of b that stand at places.
inline Lane pick(Lane a, Lane b, Places places) {
#if defined(__clang__)
    Lane out;
    for (int i = 0; i < LANES; ++i) out[i] = places[i] < LANES ? a[places[i]] : b[places[i] - LANES];
    return out;
#else
    return __builtin_shuffle(a, b, places);
#endif
}

// Sums of neighbours: those of a, and then those of b.
inline Lane add_neighbours(Lane a, Lane b) {
    Places even;
    for (int i = 0; i < LANES; ++i) even[i] = 2 * i;
    return pick(a, b, even) + pick(a, b, even + 1);
}

// The totals of four registers, side by side.
inline void totals(const Lane* lanes, float* out) {
    Lane sums = add_neighbours(add_neighbours(lanes[0], lanes[1]), add_neighbours(lanes[2], lanes[3]));
    for (int left = LANES / 4; left > 1; left /= 2) sums = add_neighbours(sums, sums);
    std::memcpy(out, &sums, 4 * sizeof(float));
}

inline int32_t truncated(float x) { return int32_t(x); }
inline Places truncated(Lane x) { return __builtin_convertvector(x, Places); }
inline float real(int32_t x) { return float(x); }
inline Lane real(Places x) { return __builtin_convertvector(x, Lane); }

// e to the x for x <= 0, to 2e-7 of 1 (Cephes' polynomial), of a number or of each in a register.
template <class Real>
inline Real exponential(Real x) {
    x = x < -87.0f ? Real{} - 87.0f : x;
    const Real exact = x * 1.44269504f + 0.5f;
    auto power = truncated(exact);
    power = real(power) > exact ? power - 1 : power;  // rounded down
    const Real rest = x - real(power) * 0.693359375f + real(power) * 2.12194440e-4f;
    Real sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    for (const float next : {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) sum = sum * rest + next;
    const auto bits = (power + 127) << 23;
    Real two;  // to the power
    std::memcpy(&two, &bits, sizeof two);
    return (sum * rest * rest + rest + 1) * two;
}

// x times the logistic function of x.
template <class Real>
inline Real silu(Real x) {
    const Real small = exponential(x < 0.0f ? x : -x);  // never overflows
    return x * (x < 0.0f ? small : Real{} + 1.0f) / (1.0f + small);
}

}  // namespace
