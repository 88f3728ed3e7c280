// What a step does between its matrix products, without intermediate tensors. Built by library.py; no torch here: plain
// pointers come in, so that it compiles in seconds and fits every version of torch. Sums are in float. The number of threads
// is torch's, and told: a compiler's OpenMP may have another runtime than torch's.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

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

// Where the keys of one KV head lie; its values lie half a block and layer further.
template <class T>
struct Cached {
    const T* pool;
    const int64_t* table;
    int64_t context, block_tokens, block_step, token_step;

    template <class Each>
    void each(int64_t from, Each&& visit) const {
        for (int64_t at = 0, block = 0; at < context; ++block) {
            const T* row = pool + from + table[block] * block_step;
            for (int64_t i = 0; i < block_tokens && at < context; ++i, ++at, row += token_step) visit(at, row);
        }
    }
};

// HEADS query heads that share a KV head: their weights over all keys, then the sum of the values.
template <class T, int WIDTH, int HEADS>
void attend_heads(const T* query, const Cached<T>& cached, T* out, float scale, std::vector<float>& room) {
    constexpr int PARTS = WIDTH / LANES;
    Lane wide[HEADS][PARTS], sums[HEADS][PARTS];
    for (int head = 0; head < HEADS; ++head)
        for (int part = 0; part < PARTS; ++part) {
            wide[head][part] = load(query + head * WIDTH + part * LANES) * scale;
            sums[head][part] = Lane{};
        }
    room.resize(HEADS * cached.context);
    float* const weights = room.data();
    cached.each(0, [&](int64_t at, const T* key) {
        Lane row[PARTS];
        for (int part = 0; part < PARTS; ++part) row[part] = load(key + part * LANES);
        for (int head = 0; head < HEADS; ++head) {
            Lane dot = wide[head][0] * row[0];
            for (int part = 1; part < PARTS; ++part) dot += wide[head][part] * row[part];
            weights[head * cached.context + at] = total(dot);
        }
    });
    float shares[HEADS];
    for (int head = 0; head < HEADS; ++head) {
        float* mine = weights + head * cached.context;
        float top = mine[0], sum = 0;
#pragma omp simd reduction(max : top)
        for (int64_t at = 0; at < cached.context; ++at) top = mine[at] > top ? mine[at] : top;
#pragma omp simd reduction(+ : sum)
        for (int64_t at = 0; at < cached.context; ++at) sum += mine[at] = exponential(mine[at] - top);
        shares[head] = 1 / sum;
    }
    cached.each(cached.block_tokens * cached.token_step, [&](int64_t at, const T* value) {
        Lane row[PARTS];
        for (int part = 0; part < PARTS; ++part) row[part] = load(value + part * LANES);
        for (int head = 0; head < HEADS; ++head)
            for (int part = 0; part < PARTS; ++part) sums[head][part] += row[part] * weights[head * cached.context + at];
    });
    for (int head = 0; head < HEADS; ++head)
        for (int part = 0; part < PARTS; ++part)
            for (int i = 0; i < LANES; ++i)
                narrow(sums[head][part][i] * shares[head], out[head * WIDTH + part * LANES + i]);
}

// As many heads at a time as the registers hold sums of.
template <class T, int WIDTH>
void attend_group(const T* query, const Cached<T>& cached, T* out, int64_t group, float scale,
                  std::vector<float>& room) {
    constexpr int MOST = WIDTH > 64 ? 2 : 4;
    for (int64_t head = 0; head < group; head += MOST, query += MOST * WIDTH, out += MOST * WIDTH) {
        const int64_t left = group - head;
        if constexpr (MOST == 4) {
            if (left >= 4) {
                attend_heads<T, WIDTH, 4>(query, cached, out, scale, room);
                continue;
            }
            if (left == 3) {
                attend_heads<T, WIDTH, 3>(query, cached, out, scale, room);
                continue;
            }
        }
        if (left >= 2)
            attend_heads<T, WIDTH, 2>(query, cached, out, scale, room);
        else
            attend_heads<T, WIDTH, 1>(query, cached, out, scale, room);
    }
}

// query, out [tokens, kv_heads * group, head_dim], query_step elements between tokens of query; tables [works, width];
// works, contexts [tokens]: whose table a token reads, and how many tokens it sees.
template <class T>
void attend(const T* query, int64_t query_step, const T* pool, const int64_t* tables, int64_t table_width,
            const int64_t* works, const int64_t* contexts, T* out, int64_t tokens, int64_t kv_heads, int64_t group,
            int64_t head_dim, int64_t block_tokens, int64_t block_step, int64_t layer, float scale, int threads) {
    const auto heads = head_dim == 16   ? attend_group<T, 16>
                       : head_dim == 32 ? attend_group<T, 32>
                       : head_dim == 64 ? attend_group<T, 64>
                                        : attend_group<T, 128>;
    const int64_t token_step = kv_heads * head_dim;
    pool += layer * 2 * block_tokens * token_step;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> room;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tokens * kv_heads; ++task) {
            const int64_t token = task / kv_heads, kv_head = task % kv_heads, start = kv_head * group * head_dim;
            const Cached<T> cached{pool + kv_head * head_dim, tables + works[token] * table_width,
                                   contexts[token],           block_tokens,
                                   block_step,                token_step};
            heads(query + token * query_step + start, cached, out + token * group * token_step + start, group, scale,
                  room);
        }
    }
}

// Root-mean-square norm of states [tokens, width], rounded where Hugging Face's Llama rounds.
template <class T>
void rms_norm(const T* states, const T* weight, T* out, int64_t tokens, int64_t width, float epsilon, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens >= 32)
    for (int64_t token = 0; token < tokens; ++token) {
        const T* mine = states + token * width;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; ++i) squares += widen(mine[i]) * widen(mine[i]);
        const float factor = 1 / std::sqrt(squares / float(width) + epsilon);
#pragma omp simd
        for (int64_t i = 0; i < width; ++i)
            narrow(rounded<T>(widen(mine[i]) * factor) * widen(weight[i]), out[token * width + i]);
    }
}

// silu(gate) * up of states [tokens, 2 * width], a token's gate before its up; rounded where Hugging Face rounds.
template <class T>
void gated(const T* states, T* out, int64_t tokens, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens >= 32)
    for (int64_t token = 0; token < tokens; ++token) {
        const T *gate = states + 2 * token * width, *up = gate + width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            const float x = widen(gate[i]), small = exponential(x < 0 ? x : -x);  // never overflows
            narrow(rounded<T>(x * (x < 0 ? small : 1.0f) / (1.0f + small)) * widen(up[i]), out[token * width + i]);
        }
    }
}

// Rotate heads [tokens, heads, head_dim] in place by cos, sin [tokens, head_dim], tokens being step elements apart.
template <class T>
void rotate(T* states, int64_t step, const T* cos, const T* sin, int64_t tokens, int64_t heads, int64_t head_dim,
            int threads) {
    const int64_t half = head_dim / 2;
#pragma omp parallel for num_threads(threads) if (tokens >= 32)
    for (int64_t token = 0; token < tokens; ++token) {
        const T *c = cos + token * head_dim, *s = sin + token * head_dim;
        for (int64_t head = 0; head < heads; ++head) {
            T *low = states + token * step + head * head_dim, *high = low + half;
#pragma omp simd
            for (int64_t i = 0; i < half; ++i) {
                const float a = widen(low[i]), b = widen(high[i]);
                narrow(rounded<T>(a * widen(c[i])) - rounded<T>(b * widen(s[i])), low[i]);
                narrow(rounded<T>(b * widen(c[half + i])) + rounded<T>(a * widen(s[half + i])), high[i]);
            }
        }
    }
}

}  // namespace

#define EXPORT(NAME, T)                                                                                              \
    extern "C" void attend_##NAME(const T* query, int64_t query_step, const T* pool, const int64_t* tables,          \
                                  int64_t table_width, const int64_t* works, const int64_t* contexts, T* out,        \
                                  int64_t tokens, int64_t kv_heads, int64_t group, int64_t head_dim,                 \
                                  int64_t block_tokens, int64_t block_step, int64_t layer, float scale,              \
                                  int threads) {                                                                     \
        attend(query, query_step, pool, tables, table_width, works, contexts, out, tokens, kv_heads, group,          \
               head_dim, block_tokens, block_step, layer, scale, threads);                                           \
    }                                                                                                                \
    extern "C" void rms_norm_##NAME(const T* states, const T* weight, T* out, int64_t tokens, int64_t width,         \
                                    float epsilon, int threads) {                                                    \
        rms_norm(states, weight, out, tokens, width, epsilon, threads);                                              \
    }                                                                                                                \
    extern "C" void gated_##NAME(const T* states, T* out, int64_t tokens, int64_t width, int threads) {              \
        gated(states, out, tokens, width, threads);                                                                  \
    }                                                                                                                \
    extern "C" void rotate_##NAME(T* states, int64_t step, const T* cos, const T* sin, int64_t tokens,               \
                                  int64_t heads, int64_t head_dim, int threads) {                                    \
        rotate(states, step, cos, sin, tokens, heads, head_dim, threads);                                            \
    }

EXPORT(float32, float)
EXPORT(bfloat16, bf16)
