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

inline Lane load(const bf16* from) {
    Half half;
    std::memcpy(&half, from, sizeof half);
    const Bits bits = __builtin_convertvector(half, Bits) << 16;
    Lane lane;
    std::memcpy(&lane, &bits, sizeof lane);
    return lane;
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

// e to the x for x <= 0, to 2e-7 of 1 (Cephes' polynomial): compilers vectorise this, and few of them expf.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float whole = std::floor(x * 1.44269504f + 0.5f), rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    for (const float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        sum = sum * rest + next;
    const int32_t bits = (int32_t(whole) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return (sum * rest * rest + rest + 1) * power;
}

// x times the logistic function of x.
inline float silu(float x) {
    const float small = exponential(x < 0 ? x : -x);  // never overflows
    return x * (x < 0 ? small : 1.0f) / (1.0f + small);
}

}  // namespace
