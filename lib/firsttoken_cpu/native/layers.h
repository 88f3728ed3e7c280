// Decoder layers of Llama's kind over a step's tokens: norms, rotary positions, products and attention, by one team
// of threads that is called once. Each function here is called by all members of the team, which share its rows.

#pragma once

#include "attention.h"
#include "products.h"

namespace {

// Root-mean-square norm of states [tokens, width], rounded where Hugging Face's Llama rounds.
template <class T>
void rms_norm(Member& member, const T* states, const T* weight, T* out, int64_t tokens, int64_t width, float epsilon) {
    member.share(tokens, [&](int64_t token) {
        const T* row = states + token * width;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; ++i) squares += widen(row[i]) * widen(row[i]);
        const float factor = 1 / std::sqrt(squares / float(width) + epsilon);
#pragma omp simd
        for (int64_t i = 0; i < width; ++i)
            narrow(rounded<T>(widen(row[i]) * factor) * widen(weight[i]), out[token * width + i]);
    });
}

// silu(gate) * up of states [tokens, 2 * width], a token's gate before its up; rounded where Hugging Face rounds.
template <class T>
void gated(Member& member, const T* states, T* out, int64_t tokens, int64_t width) {
    member.share(tokens, [&](int64_t token) {
        const T *gate = states + 2 * token * width, *up = gate + width;
        T* const row = out + token * width;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) store(rounded<T>(silu(load(gate + i))) * load(up + i), row + i);
        for (; i < width; ++i) narrow(rounded<T>(silu(widen(gate[i]))) * widen(up[i]), row[i]);
    });
}

// Rotate one token's heads [heads, head_dim] in place by its cos, sin [head_dim].
template <class T>
void rotate_token(T* states, const T* c, const T* s, int64_t heads, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for (int64_t head = 0; head < heads; ++head) {
        T *low = states + head * head_dim, *high = low + half;
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) {
            const float a = widen(low[i]), b = widen(high[i]);
            narrow(rounded<T>(a * widen(c[i])) - rounded<T>(b * widen(s[i])), low[i]);
            narrow(rounded<T>(b * widen(c[half + i])) + rounded<T>(a * widen(s[half + i])), high[i]);
        }
    }
}

// Rotate heads [tokens, heads, head_dim] in place by cos, sin [tokens, head_dim], tokens being step elements apart.
template <class T>
void rotate(Member& member, T* states, int64_t step, const T* cos, const T* sin, int64_t tokens, int64_t heads, int64_t head_dim) {
    member.share(tokens, [&](int64_t token) {
        rotate_token(states + token * step, cos + token * head_dim, sin + token * head_dim, heads, head_dim);
    });
}

// As exports.py has it.
template <class T>
struct Layer {
    int64_t number;  // in the pool
    const T *before_attention, *before_mlp;
    Weight<T> joint, out, gate_up, down;

    // Numbers that a row has between the two halves of the adapters of these weights, at most.
    int64_t widest() const {
        return std::max({joint.adapter.total, out.adapter.total, gate_up.adapter.total, down.adapter.total});
    }
};

// The adapters of one layer's four weights, of all variants of a step.
template <class T>
struct LayerAdapters {
    std::vector<Adapter> joint, out, gate_up, down;
    const int64_t* variant_of;

    void add(const Layer<T>& layer) {
        joint.push_back(layer.joint.adapter);
        out.push_back(layer.out.adapter);
        gate_up.push_back(layer.gate_up.adapter);
        down.push_back(layer.down.adapter);
    }
    Adapters of(const std::vector<Adapter>& variants) const {
        int64_t total = 0;
        for (const Adapter& adapter : variants) total = std::max(total, adapter.total);
        return {variants.data(), variant_of, total};
    }
};

// Where the states of a step go between the products of a layer.
template <class T>
struct Scratch {
    T *normed, *joint, *context, *gated;
    float* reduced;  // of adapters
};

constexpr int64_t PHASES = 12;  // of a layer: two norms, four products and what adapters reduce, rotations, attention

// One layer over states [tokens, hidden], in place; cos, sin [tokens, head_dim].
template <class T>
void run_layer(Member& member, const Layer<T>& layer, const LayerAdapters<T>& adapters, T* states, const T* cos, const T* sin, const Paged<T>& paged,
               const Scratch<T>& scratch, float epsilon, float scale, std::vector<float>& buffer) {
    const int64_t tokens = paged.tokens, hidden = layer.joint.inputs, width = layer.joint.outputs, head = paged.head_dim,
                  kv_width = paged.token_step(), heads = layer.out.inputs / head;
    rms_norm(member, states, layer.before_attention, scratch.normed, tokens, hidden, epsilon);
    product(member, scratch.normed, tokens, layer.joint, adapters.of(adapters.joint), (const T*)nullptr, scratch.joint, scratch.reduced);
    member.share(tokens, [&](int64_t token) {
        T* const row = scratch.joint + token * width;
        rotate_token(row, cos + token * head, sin + token * head, heads + paged.kv_heads, head);
        const int64_t position = paged.contexts[token] - 1;
        const int64_t block = paged.table(token)[position / paged.block_tokens];
        T* const key = paged.layer(layer.number) + block * paged.block_step + position % paged.block_tokens * kv_width;
        std::memcpy(key, row + heads * head, kv_width * sizeof(T));
        std::memcpy(key + paged.block_tokens * kv_width, row + heads * head + kv_width, kv_width * sizeof(T));
    });
    attend(member, scratch.joint, width, paged, layer.number, scratch.context, heads / paged.kv_heads, scale, buffer);
    product(member, scratch.context, tokens, layer.out, adapters.of(adapters.out), states, states, scratch.reduced);
    rms_norm(member, states, layer.before_mlp, scratch.normed, tokens, hidden, epsilon);
    product(member, scratch.normed, tokens, layer.gate_up, adapters.of(adapters.gate_up), (const T*)nullptr, scratch.gated, scratch.reduced);
    product(member, scratch.gated, tokens, layer.down, adapters.of(adapters.down), states, states, scratch.reduced);
}

}  // namespace
