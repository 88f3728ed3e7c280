// Products of rows with a weight that is packed once: panels of 2 * LANES outputs, in the order in which they are read.
// What a panel costs is its bytes, up to about 16 rows. Every output is one sum over the inputs in their order, whatever
// the number of rows: a token's result does not depend on who shares its batch.

#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>
#include <vector>

#include "team.h"
#include "vectors.h"

namespace {

constexpr int64_t PANEL = 2 * LANES;
// Rows at a time: two registers of sums for each, and two of the weight.
constexpr int ROWS = LANES == 16 ? 14 : 6;

template <class T>
struct Inputs {  // of one output that lie side by side in a panel
    static constexpr int64_t INTERLEAVE = sizeof(float) / sizeof(T);
};

// What a LoRA adapter adds to a weight's outputs (Hu et al., ICLR 2022), in float: rows times a [total, inputs], and of these
// numbers the rank ones from an offset on times b. Several weights that are one product have an adapter each: the offsets say
// whose it is, for each half of a panel. b lies as the panels do: [halves, rank, LANES].
struct Adapter {
    const float *a, *b;
    const int64_t* offsets;
    int64_t total, rank;
};

// The adapters of a step's variants of one weight: whose a token is says variant_of [tokens], or none is given and all are the
// first's. total is the widest one's.
struct Adapters {
    const Adapter* of;
    const int64_t* variant_of;
    int64_t total;

    const Adapter& operator[](int64_t token) const { return of[variant_of == nullptr ? 0 : variant_of[token]]; }
};

// A weight [outputs, inputs] as panels; a gated one has a row of the gate and a row of the up projection side by side: half
// of its outputs are gates. Absent outputs are zeros. As exports.py has it, which makes room for the panels.
template <class T>
struct Weight {
    const T *panels, *bias;
    int64_t outputs, inputs, gated;
    Adapter adapter;  // total 0: none

    int64_t width() const { return gated ? outputs / 2 : outputs; }  // of the result
    int64_t step() const { return gated ? LANES : PANEL; }           // results of a panel
    int64_t count() const { return (width() + step() - 1) / step(); }
};

// Which row of the weight [outputs, inputs] an output of a panel is; -1 is none.
template <class T>
inline int64_t row_of(const Weight<T>& weight, int64_t panel, int64_t output) {
    const int64_t half = output / LANES, lane = output % LANES;
    const int64_t row = weight.gated ? panel * LANES + lane : panel * PANEL + output;
    return row < weight.width() ? row + (weight.gated ? half * weight.width() : 0) : -1;
}

// Copy one panel; row_at(row) is where the inputs of a row begin, as they are stored.
template <class T, class RowAt>
void pack_panel(const Weight<T>& weight, int64_t panel, T* panels, RowAt&& row_at) {
    constexpr int64_t INTERLEAVE = Inputs<T>::INTERLEAVE;
    for (int64_t output = 0; output < PANEL; ++output) {
        const int64_t row = row_of(weight, panel, output);
        const auto* const from = row < 0 ? nullptr : row_at(row);
        T* to = panels + panel * PANEL * weight.inputs + output * INTERLEAVE;
        for (int64_t i = 0; i < weight.inputs; i += INTERLEAVE, to += PANEL * INTERLEAVE)
            for (int64_t k = 0; k < INTERLEAVE; ++k) {
                to[k] = T{};
                if (from != nullptr) copy(from[i + k], to[k]);
            }
    }
}

template <class T>
void pack(Member& member, const T* rows, const Weight<T>& weight, T* panels) {
    member.share(weight.count(), [&](int64_t panel) {
        pack_panel(weight, panel, panels, [&](int64_t row) { return rows + row * weight.inputs; });
    });
}

// The parts of a weight, one below the other: rows of each, as they are stored, and how many. Where there is a file (an open
// one's number, or -1), rows is the byte in it at which they begin, or else their address.
constexpr int64_t PARTS = 3;
struct Part {
    int64_t rows, outputs, file;
};

// A weight that is to be packed, and its parts, of which the last may be empty; without a weight the numbers of the first part
// are copied to the rows of the second. As exports.py has it.
template <class T>
struct Job {
    const Weight<T>* weight;
    Part parts[PARTS];
};

// Read all of these bytes of an open file. Returns 0, or the error's number, ENODATA for a file that ends before them: a
// mapping of a file that somebody cuts would end the process instead.
inline int64_t read_all(int64_t file, char* to, int64_t size, int64_t offset) {
    while (size > 0) {
        const ssize_t bytes = pread((int)file, to, (size_t)size, (off_t)offset);
        if (bytes < 0 && errno == EINTR) continue;
        if (bytes <= 0) return bytes < 0 ? errno : ENODATA;
        to += bytes, size -= bytes, offset += bytes;
    }
    return 0;
}

// The rows [inputs] of a part, which are asked for in their order: of a file so many are read at a time as stay in the cache.
template <class Stored>
struct PartRows {
    static constexpr int64_t BYTES = 256 << 10;
    std::vector<Stored> read;
    int64_t first = 0, count = 0;

    // Where a row is; nullptr after a fault, which becomes the error's number.
    const Stored* at(const Part& part, int64_t row, int64_t inputs, int64_t& fault) {
        if (part.file < 0) return (const Stored*)part.rows + row * inputs;
        if (row >= first + count) {
            const int64_t size = inputs * (int64_t)sizeof(Stored);
            first = row, count = std::min(std::max(BYTES / size, (int64_t)1), part.outputs - row);
            read.resize(count * inputs);
            fault = read_all(part.file, (char*)read.data(), count * size, part.rows + row * size);
        }
        return fault ? nullptr : read.data() + (row - first) * inputs;
    }
};

// Returns 0, or the number of the error that met a file.
template <class T, class Stored>
int64_t pack_parts(const Part* parts, const Weight<T>& weight, T* panels) {
    int64_t fault = 0;
    PartRows<Stored> rows[PARTS];
    for (int64_t panel = 0; panel < weight.count() && !fault; ++panel)
        pack_panel(weight, panel, panels, [&](int64_t row) {
            int64_t number = 0;
            for (; row >= parts[number].outputs; ++number) row -= parts[number].outputs;
            return rows[number].at(parts[number], row, weight.inputs, fault);
        });
    return fault;
}

// Copy the numbers of a part that is in a file, one to a row. Returns as pack_parts.
template <class T, class Stored>
int64_t copy_part(const Part& part, T* to) {
    int64_t fault = 0;
    PartRows<Stored> rows;
    for (int64_t row = 0; row < part.outputs; row += rows.count) {
        const Stored* const from = rows.at(part, row, 1, fault);
        if (from == nullptr) return fault;
        for (int64_t i = 0; i < rows.count; ++i) copy(from[i], to[row + i]);
    }
    return 0;
}

// Lay out b [outputs, rank], whose outputs belong to the adapters at offsets [outputs], as an Adapter has it. Returns whether
// each half of a panel belongs to one adapter, which it must.
template <class T>
bool pack_adapter(const float* b, const int64_t* offsets, int64_t rank, const Weight<T>& weight, float* packed,
                  int64_t* packed_offsets) {
    for (int64_t half = 0; half < 2 * weight.count(); ++half) {
        packed_offsets[half] = 0;
        for (int64_t lane = 0, offset = -1; lane < LANES; ++lane) {
            const int64_t row = row_of(weight, half / 2, half % 2 * LANES + lane);
            if (row >= 0) {
                if (offset >= 0 && offsets[row] != offset) return false;
                packed_offsets[half] = offset = offsets[row];
            }
            for (int64_t k = 0; k < rank; ++k) packed[(half * rank + k) * LANES + lane] = row < 0 ? 0 : b[row * rank + k];
        }
    }
    return true;
}

// rows [tokens, inputs] times each one's a, to reduced [tokens, total].
template <class T>
void reduce(Member& member, const T* rows, int64_t tokens, int64_t inputs, const Adapters& adapters, float* reduced) {
    const int64_t total = adapters.total;
    member.share(tokens * total, [&](int64_t at) {
        const int64_t token = at / total, k = at % total;
        const Adapter& adapter = adapters[token];
        if (k >= adapter.total) return;
        const T* const row = rows + token * inputs;
        const float* const a = adapter.a + k * inputs;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < inputs; ++i) sum += widen(row[i]) * a[i];
        reduced[at] = sum;
    });
}

inline void add_products(Vector& sum, const float* input, const float* weights) { sum += load(weights) * *input; }

#if defined(__AVX512BF16__)
inline void add_products(Vector& sum, const bf16* input, const bf16* weights) {
    int32_t pair;
    std::memcpy(&pair, input, sizeof pair);
    const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
    sum = (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(weights), both);
}
#else
inline void add_products(Vector& sum, const bf16* input, const bf16* weights) {
    for (int i = 0; i < LANES; ++i)
        sum[i] += widen(weights[2 * i]) * widen(input[0]) + widen(weights[2 * i + 1]) * widen(input[1]);
}
#endif

// What is prefetched while a panel is multiplied: lines that lie step bytes apart, one pair of lines for each register pair.
struct Ahead {
    const char* next;
    int64_t step;
};

// Where a step's rows are one block, a panel is read once, and the caches need not keep it: what else a step reads, Python's
// objects too, is still in them then. SmolLM2-135M in bf16 on two cores of an AMD EPYC: a step of one request takes 5.7 ms
// instead of 6.1, of four 5.8 instead of 6.2; of 32, whose blocks read a panel again, 14.7 instead of 14.4. Other makes of
// processor were not measured, and keep it.
constexpr int READ_AGAIN = 3;  // as __builtin_prefetch says it
#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
constexpr int READ_ONCE = 0;
#else
constexpr int READ_ONCE = READ_AGAIN;
#endif

// COUNT rows of the input, which are inputs elements apart, times one panel.
template <class T, int LOCALITY, int COUNT>
void multiply(const T* panel, const T* rows, int64_t inputs, Ahead ahead, Vector (*sums)[2]) {
    constexpr int64_t INTERLEAVE = Inputs<T>::INTERLEAVE;
    Vector totals[COUNT][2] = {};
    for (int64_t i = 0; i < inputs; i += INTERLEAVE, panel += PANEL * INTERLEAVE, ahead.next += ahead.step) {
        __builtin_prefetch(ahead.next, 0, LOCALITY);
        __builtin_prefetch(ahead.next + 64, 0, LOCALITY);
        for (int row = 0; row < COUNT; ++row)
            for (int half = 0; half < 2; ++half)
                add_products(totals[row][half], rows + row * inputs + i, panel + half * LANES * INTERLEAVE);
    }
    for (int row = 0; row < COUNT; ++row)
        for (int half = 0; half < 2; ++half) sums[row][half] = totals[row][half];
}

template <class T>
using Multiply = void (*)(const T*, const T*, int64_t, Ahead, Vector (*)[2]);

template <class T, int LOCALITY, int... COUNTS>
constexpr std::array<Multiply<T>, ROWS> multiplies(std::integer_sequence<int, COUNTS...>) {
    return {multiply<T, LOCALITY, COUNTS + 1>...};
}

// What becomes of a row's sums of one panel; reduced [total] is the row times the adapter's a. Rounded where Hugging Face
// rounds.
template <class T>
void write(const Weight<T>& weight, int64_t panel, const Vector* sums, const Adapter& adapter, const float* reduced,
           const T* other, T* out) {
    Vector values[2] = {sums[0], sums[1]};
    for (int64_t half = 0; half < 2; ++half) {
        if (weight.bias != nullptr)
            for (int64_t i = 0; i < LANES; ++i) {
                const int64_t row = row_of(weight, panel, half * LANES + i);
                values[half][i] += row < 0 ? 0.0f : widen(weight.bias[row]);
            }
        if (adapter.total) {
            values[half] = rounded<T>(values[half]);
            const int64_t at = 2 * panel + half;
            const float* const shared = reduced + adapter.offsets[at];
            for (int64_t k = 0; k < adapter.rank; ++k)
                values[half] += load(adapter.b + (at * adapter.rank + k) * LANES) * shared[k];
        }
    }
    if (weight.gated) values[0] = rounded<T>(silu(rounded<T>(values[0]))) * rounded<T>(values[1]);
    for (int64_t half = 0; half < weight.step() / LANES; ++half) {
        const int64_t first = panel * weight.step() + half * LANES, count = weight.width() - first;
        if (count >= LANES) {
            store(other == nullptr ? values[half] : rounded<T>(values[half]) + load(other + first), out + first);
            continue;
        }
        for (int64_t i = 0; i < count; ++i) {
            const float value = values[half][i];
            narrow(other == nullptr ? value : rounded<T>(value) + widen(other[first + i]), out[first + i]);
        }
    }
}

// rows [tokens, inputs] times the weight, with other [tokens, width] added if it is given, to out [tokens, width]. An
// adapter wants reduced [tokens, total].
template <class T>
void product(Member& member, const T* rows, int64_t tokens, const Weight<T>& weight, const Adapters& adapters,
             const T* other, T* out, float* reduced) {
    if (adapters.total) reduce(member, rows, tokens, weight.inputs, adapters, reduced);
    static constexpr auto ONCE = multiplies<T, READ_ONCE>(std::make_integer_sequence<int, ROWS>());
    static constexpr auto AGAIN = multiplies<T, READ_AGAIN>(std::make_integer_sequence<int, ROWS>());
    const int64_t blocks = (tokens + ROWS - 1) / ROWS, inputs = weight.inputs, width = weight.width();
    const int64_t line = PANEL * Inputs<T>::INTERLEAVE * sizeof(T), bytes = PANEL * inputs * sizeof(T);
    member.share(weight.count(), [&](int64_t panel) {
        const T* const numbers = weight.panels + panel * PANEL * inputs;
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t start = tokens * block / blocks, count = tokens * (block + 1) / blocks - start;
            // one block waits for memory: what comes next is prefetched; of several, each prefetches a part of the next panel
            const Ahead ahead{(const char*)numbers + (blocks == 1 ? 4096 : bytes + bytes / blocks * block), line / blocks};
            Vector sums[ROWS][2];
            (blocks == 1 ? ONCE : AGAIN)[count - 1](numbers, rows + start * inputs, inputs, ahead, sums);
            for (int64_t row = 0; row < count; ++row) {
                const int64_t token = start + row, at = token * width;
                write(weight, panel, sums[row], adapters[token], reduced + token * adapters.total,
                      other == nullptr ? nullptr : other + at, out + at);
            }
        }
    });
}

}  // namespace
