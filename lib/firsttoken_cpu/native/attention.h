// Attention of a step's tokens over the KV pool: blocks are read where they lie.

#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "team.h"
#include "vectors.h"

namespace {

// Where a token's keys lie, in the blocks of its table; the values lie half a block and layer further.
template <class T>
struct Cached {
    const T* keys;
    const int64_t* table;
    int64_t context, block_tokens, block_step, token_step;
    const T* following;  // rows that are read after this token's, those of the next one; none after the last

    const T* values() const { return keys + block_tokens * token_step; }

    // Calls visit(at, rows, next, count) for the count rows, token_step apart, of the tokens from at on that lie in one block
    // of what begins at base. next are the rows that are visited then, in the next block, which lies elsewhere, or behind.
    template <class Visit>
    void each(const T* base, const T* behind, Visit&& visit) const {
        for (int64_t at = 0, block = 0; at < context; at += block_tokens, ++block) {
            const T* const rows = base + table[block] * block_step;
            const T* const next = at + block_tokens < context ? base + table[block + 1] * block_step : behind;
            visit(at, rows, next == nullptr ? rows : next, std::min(block_tokens, context - at));
        }
    }
};

// Prefetches a row that will be read: a few at a time, in the middle of what is computed. Memory that is prefetched at once, a
// block's rows, holds up what is computed meanwhile.
template <class T, int WIDTH>
inline void prefetch(const T* row) {
    for (int byte = 0; byte < WIDTH * int(sizeof(T)); byte += 64) __builtin_prefetch((const char*)row + byte);
}

// WIDTH numbers in registers, as they are multiplied with others: as floats, or in pairs of bf16.
template <class T, int WIDTH, bool PAIRS = false>
struct Row {
    static constexpr int PARTS = WIDTH / LANES;
    Vector parts[PARTS];

    explicit Row(const T* from) {
        for (int part = 0; part < PARTS; ++part) parts[part] = load(from + part * LANES);
    }
    Vector times(const Row& other) const {
        Vector sum = parts[0] * other.parts[0];
        for (int part = 1; part < PARTS; ++part) sum += parts[part] * other.parts[part];
        return sum;
    }
};

#if defined(__AVX512BF16__)
template <int WIDTH>
struct Row<bf16, WIDTH, true> {
    static constexpr int PARTS = WIDTH / 32;
    __m512bh parts[PARTS];

    explicit Row(const bf16* from) {
        for (int part = 0; part < PARTS; ++part) parts[part] = (__m512bh)_mm512_loadu_si512(from + part * 32);
    }
    Vector times(const Row& other) const {
        __m512 sum = _mm512_setzero_ps();
        for (int part = 0; part < PARTS; ++part) sum = _mm512_dpbf16_ps(sum, parts[part], other.parts[part]);
        return (Vector)sum;
    }
};
#endif

// HEADS query heads times the keys of a block, count rows of them, to weights, context apart by head; the rows at next are
// prefetched.
template <class T, int WIDTH, int HEADS>
void qk(const T* query, const T* key, const T* next, int64_t count, int64_t token_step, float* weights, int64_t context) {
    constexpr int INTERLEAVE = 4;
    typedef Row<T, WIDTH, HAS_BF16 && sizeof(T) == 2 && WIDTH % 32 == 0> Key;
    int64_t i = 0;
    for (; i + INTERLEAVE <= count; i += INTERLEAVE, key += INTERLEAVE * token_step) {
        for (int ahead = 0; ahead < INTERLEAVE; ++ahead, next += token_step) prefetch<T, WIDTH>(next);
        const Key keys[INTERLEAVE]{Key(key), Key(key + token_step), Key(key + 2 * token_step), Key(key + 3 * token_step)};
        for (int head = 0; head < HEADS; ++head) {
            const Key row(query + head * WIDTH);
            const Vector sums[INTERLEAVE]{row.times(keys[0]), row.times(keys[1]), row.times(keys[2]), row.times(keys[3])};
            horizontal_sums(sums, weights + head * context + i);
        }
    }
    for (; i < count; ++i, key += token_step)
        for (int head = 0; head < HEADS; ++head)
            weights[head * context + i] = horizontal_sum(Key(query + head * WIDTH).times(Key(key)));
}

// Adds the values of a block, count rows of them, times the weights of HEADS heads to sums [HEADS, WIDTH]; the rows at next
// are prefetched.
template <class T, int WIDTH, int HEADS>
void add_values(const T* value, const T* next, int64_t count, int64_t token_step, const float* weights, int64_t context,
                float* sums) {
    constexpr int PARTS = WIDTH / LANES;
    Vector totals[HEADS][PARTS];
    std::memcpy(totals, sums, sizeof totals);
    for (int64_t i = 0; i < count; ++i, value += token_step, next += token_step) {
        prefetch<T, WIDTH>(next);
        Vector row[PARTS];
        for (int part = 0; part < PARTS; ++part) row[part] = load(value + part * LANES);
        for (int head = 0; head < HEADS; ++head)
            for (int part = 0; part < PARTS; ++part) totals[head][part] += row[part] * weights[head * context + i];
    }
    std::memcpy(sums, totals, sizeof totals);
}

// Calls work(n, head) for the heads of a group, as many at a time as the registers hold sums of: n is a constant.
template <int WIDTH, class Work>
void in_parts(int64_t group, Work&& work) {
    constexpr int MOST = WIDTH > 64 ? 2 : 4;
    for (int64_t head = 0; head < group; head += MOST) {
        const int64_t rest = group - head;
        if constexpr (MOST == 4) {
            if (rest >= 4) {
                work(std::integral_constant<int, 4>(), head);
                continue;
            }
            if (rest == 3) {
                work(std::integral_constant<int, 3>(), head);
                continue;
            }
        }
        if (rest >= 2)
            work(std::integral_constant<int, 2>(), head);
        else
            work(std::integral_constant<int, 1>(), head);
    }
}

// The query heads of so many KV heads that lie side by side, group of them each: their weights over all keys, then the sums
// of the values.
template <class T, int WIDTH>
void attend_token(const T* query, const Cached<T>& cached, T* out, int64_t kv_heads, int64_t group, float scale,
                  std::vector<float>& buffer) {
    const int64_t heads = kv_heads * group, context = (cached.context + LANES - 1) / LANES * LANES, step = cached.token_step;
    buffer.resize(heads * (context + WIDTH + 1));
    float *const sums = buffer.data(), *const shares = sums + heads * WIDTH, *const weights = shares + heads;
    std::fill(sums, shares, 0.0f);
    const T* const values = cached.values();
    const T* const first_values = values + cached.table[0] * cached.block_step;
    cached.each(cached.keys, first_values, [&](int64_t at, const T* keys, const T* next, int64_t count) {
        for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head)
            in_parts<WIDTH>(group, [&](auto n, int64_t part) {
                const int64_t head = kv_head * group + part;
                qk<T, WIDTH, n>(query + head * WIDTH, keys + kv_head * WIDTH, next + kv_head * WIDTH, count, step,
                                  weights + head * context + at, context);
            });
    });
    for (int64_t head = 0; head < heads; ++head) {
        float* const scores = weights + head * context;
        std::fill(scores + cached.context, scores + context, -INFINITY);
        Vector top = load(scores), sum = {};
        for (int64_t at = LANES; at < context; at += LANES) top = load(scores + at) > top ? load(scores + at) : top;
        float most = top[0];
        for (int i = 1; i < LANES; ++i) most = std::max(most, top[i]);
        for (int64_t at = 0; at < context; at += LANES) {
            const Vector weight = exponential((load(scores + at) - most) * scale);
            store(weight, scores + at);
            sum += weight;
        }
        shares[head] = 1 / horizontal_sum(sum);
    }
    cached.each(values, cached.following, [&](int64_t at, const T* rows, const T* next, int64_t count) {
        for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head)
            in_parts<WIDTH>(group, [&](auto n, int64_t part) {
                const int64_t head = kv_head * group + part;
                add_values<T, WIDTH, n>(rows + kv_head * WIDTH, next + kv_head * WIDTH, count, step,
                                        weights + head * context + at, context, sums + head * WIDTH);
            });
    });
    for (int64_t head = 0; head < heads; ++head)
        for (int64_t i = 0; i < WIDTH; ++i) narrow(sums[head * WIDTH + i] * shares[head], out[head * WIDTH + i]);
}

// A pool of blocks, the block tables [sequences, table_width] of a step, and of each of its tokens the index of the sequence
// whose table it reads, and how many tokens it sees. Blocks are block_step elements apart. As exports.py has it.
template <class T>
struct Paged {
    T* pool;
    const int64_t *tables, *sequences, *contexts;
    int64_t table_width, tokens, kv_heads, head_dim, block_tokens, block_step;

    int64_t token_step() const { return kv_heads * head_dim; }
    const int64_t* table(int64_t token) const { return tables + sequences[token] * table_width; }
    T* layer(int64_t number) const { return pool + number * 2 * block_tokens * token_step(); }
};

// From so many tokens on, one is an item: its keys and values are read from end to end, for all heads. Of fewer, each KV head
// is an item, so that all threads have some. Two threads, SmolLM2-135M's heads, 240 tokens before each: one token takes 0.13 ms
// by heads and 0.18 as a whole, 16 take 3.0 and 2.2.
constexpr int64_t WHOLE_TOKENS = 4;

// query, out [tokens, kv_heads * group, head_dim], query_step elements between tokens of query; buffer is the member's own.
template <class T>
void attend(Member& member, const T* query, int64_t query_step, const Paged<T>& paged, int64_t layer, T* out, int64_t group,
            float scale, std::vector<float>& buffer) {
    const int64_t width = paged.head_dim, token_step = paged.token_step();
    const auto heads = width == 16   ? attend_token<T, 16>
                       : width == 32 ? attend_token<T, 32>
                       : width == 64 ? attend_token<T, 64>
                                     : attend_token<T, 128>;
    const T* const pool = paged.layer(layer);
    const int64_t parts = paged.tokens < WHOLE_TOKENS ? paged.kv_heads : 1, kv_heads = paged.kv_heads / parts;
    member.share(paged.tokens * parts, [&](int64_t item) {
        const int64_t token = item / parts, first = item % parts * kv_heads, start = first * group * width;
        const T* const keys = pool + first * width;
        const bool more = parts == 1 && token + 1 < paged.tokens;
        const Cached<T> cached{keys,
                               paged.table(token),
                               paged.contexts[token],
                               paged.block_tokens,
                               paged.block_step,
                               token_step,
                               more ? keys + paged.table(token + 1)[0] * paged.block_step : nullptr};
        T* const context = out + token * group * token_step + start;
        heads(query + token * query_step + start, cached, context, kv_heads, group, scale, buffer);
    });
}

}  // namespace
