// Attention of a step's tokens over the KV pool: blocks are read where they lie.

#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

// Where the keys of one KV head lie; its values lie half a block and layer further.
template <class T>
struct Cached {
    const T* pool;
    const int64_t* table;
    int64_t context, block_tokens, block_step, token_step;

    // Calls visit(at, row, count) for the count rows, token_step apart, of the tokens from at on that lie in one block. The
    // next block, which lies elsewhere, is asked for before: attention of 64 requests takes a fifth less.
    template <int WIDTH, class Each>
    void each(int64_t from, Each&& visit) const {
        for (int64_t at = 0, block = 0; at < context; at += block_tokens, ++block) {
            if (at + block_tokens < context) {
                const T* next = pool + from + table[block + 1] * block_step;
                for (int64_t i = 0; i < block_tokens; ++i, next += token_step)
                    for (int byte = 0; byte < WIDTH * int(sizeof(T)); byte += 64)
                        __builtin_prefetch((const char*)next + byte);
            }
            visit(at, pool + from + table[block] * block_step, std::min(block_tokens, context - at));
        }
    }
};

// WIDTH numbers in registers, as they are multiplied with others: as floats, or in pairs of bf16.
template <class T, int WIDTH, bool PAIRS = false>
struct Row {
    static constexpr int PARTS = WIDTH / LANES;
    Lane parts[PARTS];

    explicit Row(const T* from) {
        for (int part = 0; part < PARTS; ++part) parts[part] = load(from + part * LANES);
    }
    Lane times(const Row& other) const {
        Lane sum = parts[0] * other.parts[0];
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
    Lane times(const Row& other) const {
        __m512 sum = _mm512_setzero_ps();
        for (int part = 0; part < PARTS; ++part) sum = _mm512_dpbf16_ps(sum, parts[part], other.parts[part]);
        return (Lane)sum;
    }
};
#endif

// HEADS query heads that share a KV head: their weights over all keys, then the sum of the values.
template <class T, int WIDTH, int HEADS>
void attend_heads(const T* query, const Cached<T>& cached, T* out, float scale, std::vector<float>& room) {
    constexpr int PARTS = WIDTH / LANES, TOGETHER = 4;
    typedef Row<T, WIDTH, HAS_BF16 && sizeof(T) == 2 && WIDTH % 32 == 0> Key;
    Lane sums[HEADS][PARTS] = {};
    room.resize(HEADS * cached.context);
    float* const weights = room.data();
    cached.template each<WIDTH>(0, [&](int64_t at, const T* key, int64_t count) {
        int64_t i = 0;
        for (; i + TOGETHER <= count; i += TOGETHER, key += TOGETHER * cached.token_step) {
            const Key keys[TOGETHER]{Key(key), Key(key + cached.token_step), Key(key + 2 * cached.token_step),
                                     Key(key + 3 * cached.token_step)};
            for (int head = 0; head < HEADS; ++head) {
                const Key mine(query + head * WIDTH);
                const Lane dots[TOGETHER]{mine.times(keys[0]), mine.times(keys[1]), mine.times(keys[2]),
                                          mine.times(keys[3])};
                totals(dots, weights + head * cached.context + at + i);
            }
        }
        for (; i < count; ++i, key += cached.token_step)
            for (int head = 0; head < HEADS; ++head)
                weights[head * cached.context + at + i] = total(Key(query + head * WIDTH).times(Key(key)));
    });
    float shares[HEADS];
    for (int head = 0; head < HEADS; ++head) {
        float* mine = weights + head * cached.context;
        float top = mine[0], sum = 0;
#pragma omp simd reduction(max : top)
        for (int64_t at = 0; at < cached.context; ++at) top = mine[at] > top ? mine[at] : top;
#pragma omp simd reduction(+ : sum)
        for (int64_t at = 0; at < cached.context; ++at) sum += mine[at] = exponential((mine[at] - top) * scale);
        shares[head] = 1 / sum;
    }
    cached.template each<WIDTH>(cached.block_tokens * cached.token_step, [&](int64_t at, const T* value, int64_t count) {
        for (int64_t i = at; i < at + count; ++i, value += cached.token_step) {
            Lane row[PARTS];
            for (int part = 0; part < PARTS; ++part) row[part] = load(value + part * LANES);
            for (int head = 0; head < HEADS; ++head)
                for (int part = 0; part < PARTS; ++part) sums[head][part] += row[part] * weights[head * cached.context + i];
        }
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

// A pool of blocks, the block tables [works, table_width] of a step, and works, contexts [tokens]: whose table a token
// reads, and how many tokens it sees. Blocks are block_step elements apart.
template <class T>
struct Paged {
    T* pool;
    const int64_t *tables, *works, *contexts;
    int64_t table_width, tokens, kv_heads, head_dim, block_tokens, block_step;

    int64_t token_step() const { return kv_heads * head_dim; }
    T* layer(int64_t number) const { return pool + number * 2 * block_tokens * token_step(); }
};

// query, out [tokens, kv_heads * group, head_dim], query_step elements between tokens of query; the threads that call it
// share the work.
template <class T>
void attend(const T* query, int64_t query_step, const Paged<T>& paged, int64_t layer, T* out, int64_t group,
            float scale, std::vector<float>& room) {
    const int64_t width = paged.head_dim, token_step = paged.token_step();
    const auto heads = width == 16   ? attend_group<T, 16>
                       : width == 32 ? attend_group<T, 32>
                       : width == 64 ? attend_group<T, 64>
                                     : attend_group<T, 128>;
    const T* const pool = paged.layer(layer);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < paged.tokens * paged.kv_heads; ++task) {
        const int64_t token = task / paged.kv_heads, kv_head = task % paged.kv_heads, start = kv_head * group * width;
        const Cached<T> cached{pool + kv_head * width, paged.tables + paged.works[token] * paged.table_width,
                               paged.contexts[token],  paged.block_tokens,
                               paged.block_step,       token_step};
        heads(query + token * query_step + start, cached, out + token * group * token_step + start, group, scale, room);
    }
}

}  // namespace
