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

// A lane is an element of a register. gcc takes vectors that are longer than one apart by way of memory: attention ran at
// 12 GFLOP/s in vectors of 16 on a processor with AVX2, at 50 in those of 8 (2 cores, heads of 64).
#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef uint16_t HalfBits __attribute__((vector_size(2 * LANES)));
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

inline Vector load(const float* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

// A register of numbers as they are stored, each rounded as narrow does, but that AVX-512 makes zeros of what is below 1.2e-38.
// Its own instructions are named where it has them, as gcc 12 takes several in their place.
inline void store(Vector vector, float* to) { std::memcpy(to, &vector, sizeof vector); }

#if defined(__AVX512BF16__)
inline Vector load(const bf16* from) {
    const __m256i half = _mm256_loadu_si256((const __m256i*)from);
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

inline void store(Vector vector, bf16* to) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)vector)); }
#else
inline Vector load(const bf16* from) {
    HalfBits half;
    std::memcpy(&half, from, sizeof half);
    const Bits bits = __builtin_convertvector(half, Bits) << 16;
    Vector vector;
    std::memcpy(&vector, &bits, sizeof vector);
    return vector;
}

inline void store(Vector vector, bf16* to) {
    Bits bits;
    std::memcpy(&bits, &vector, sizeof bits);
    const Bits near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, nan = (bits >> 16) | 0x40;
    const HalfBits half = __builtin_convertvector((bits & 0x7FFFFFFF) > 0x7F800000 ? nan : near, HalfBits);
    std::memcpy(to, &half, sizeof half);
}
#endif

template <class T>
inline Vector rounded(Vector vector) {
    T stored[LANES];
    store(vector, stored);
    return load(stored);
}

inline float horizontal_sum(Vector vector) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < LANES; ++i) sum += vector[i];
    return sum;
}

typedef int32_t Indices __attribute__((vector_size(4 * LANES)));

// The numbers of a and, behind them, of b that the indices name.
inline Vector pick(Vector a, Vector b, Indices indices) {
#if defined(__clang__)
    Vector out;
    for (int i = 0; i < LANES; ++i) out[i] = indices[i] < LANES ? a[indices[i]] : b[indices[i] - LANES];
    return out;
#else
    return __builtin_shuffle(a, b, indices);
#endif
}

// Sums of neighbours: those of a, and then those of b.
inline Vector add_neighbours(Vector a, Vector b) {
    Indices even;
    for (int i = 0; i < LANES; ++i) even[i] = 2 * i;
    return pick(a, b, even) + pick(a, b, even + 1);
}

// The horizontal sums of four registers, side by side.
inline void horizontal_sums(const Vector* vectors, float* out) {
    Vector sums = add_neighbours(add_neighbours(vectors[0], vectors[1]), add_neighbours(vectors[2], vectors[3]));
    for (int width = LANES / 4; width > 1; width /= 2) sums = add_neighbours(sums, sums);
    std::memcpy(out, &sums, 4 * sizeof(float));
}

inline int32_t truncated(float x) { return int32_t(x); }
inline Indices truncated(Vector x) { return __builtin_convertvector(x, Indices); }
inline float real(int32_t x) { return float(x); }
inline Vector real(Indices x) { return __builtin_convertvector(x, Vector); }

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
