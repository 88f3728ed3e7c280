// What library.py calls. No torch here: plain pointers come in, so that it compiles in seconds and fits every version of
// torch. Sums are in float. The number of threads is torch's, and told: a compiler's OpenMP may have another runtime than
// torch's.

#include "largest.h"
#include "layers.h"

namespace {

// The fields of a layer as int64_t, one behind the other: what library.py writes.
constexpr int64_t WEIGHT_FIELDS = 10, LAYER_FIELDS = 3 + 4 * WEIGHT_FIELDS;

template <class T>
Weight<T> read_weight(const int64_t* fields) {
    const Adapter adapter{(const float*)fields[5], (const float*)fields[6], (const int64_t*)fields[7], fields[8],
                          fields[9]};
    return {(const T*)fields[0], (const T*)fields[1], fields[2], fields[3], fields[4] != 0, adapter};
}

template <class T>
Layer<T> read_layer(const int64_t* fields) {
    const int64_t* const weights = fields + 3;
    return {fields[0],
            (const T*)fields[1],
            (const T*)fields[2],
            read_weight<T>(weights),
            read_weight<T>(weights + WEIGHT_FIELDS),
            read_weight<T>(weights + 2 * WEIGHT_FIELDS),
            read_weight<T>(weights + 3 * WEIGHT_FIELDS)};
}

// Pack one weight after another, until every one is somebody's: several threads may call this, each of which takes the next.
// A job is where the fields of its weight are and its PARTS parts, of which the last may be empty; without fields the numbers
// of the first part are copied to the rows of the second. done [count] becomes 1, or minus the number of an error, after
// which no more are taken.
template <class T, class Stored>
void pack_jobs(const int64_t* jobs, int64_t count, int64_t* taken, int64_t* done) {
    for (int64_t at; (at = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED)) < count;) {
        const int64_t* const job = jobs + at * (1 + 3 * PARTS);
        const Part* const parts = (const Part*)(job + 1);
        int64_t fault;
        if (job[0] == 0) {
            fault = copy_part<T, Stored>(parts[0], (T*)parts[1].rows);
        } else {
            const Weight<T> weight = read_weight<T>((const int64_t*)job[0]);
            fault = pack_parts<T, Stored>(parts, weight, (T*)weight.panels);
        }
        if (fault) __atomic_store_n(taken, count, __ATOMIC_RELAXED);
        __atomic_store_n(done + at, fault ? -fault : 1, __ATOMIC_RELEASE);
    }
}

// Numbers that a row has between the two halves of the adapters of these weights, at most.
template <class T>
int64_t widest(const Layer<T>& layer) {
    return std::max({layer.joint.adapter.total, layer.out.adapter.total, layer.gate_up.adapter.total,
                     layer.down.adapter.total});
}

}  // namespace

// Inputs that lie side by side in a panel's row, and the outputs of a panel: what library.py makes room for.
extern "C" int64_t panel_outputs() { return PANEL; }
extern "C" int64_t multiplies_bfloat16() { return HAS_BF16; }

constexpr int64_t FEW = 32;  // tokens that are not worth a second thread, where they cost no product
constexpr int64_t FEW_ROWS = 4;  // rows of logits that are not worth one

#define EXPORT(NAME, T)                                                                                              \
    extern "C" void attend_##NAME(const T* query, int64_t query_step, T* pool, const int64_t* tables,                \
                                  int64_t table_width, const int64_t* works, const int64_t* contexts, T* out,        \
                                  int64_t tokens, int64_t kv_heads, int64_t group, int64_t head_dim,                 \
                                  int64_t block_tokens, int64_t block_step, int64_t layer, float scale,              \
                                  int threads) {                                                                     \
        const Paged<T> paged{pool,   tables,   works,    contexts,     table_width,                                  \
                             tokens, kv_heads, head_dim, block_tokens, block_step};                                  \
        with_team(threads, 1, [&](Member& member) {                                                                  \
            std::vector<float> shares;                                                                               \
            attend(member, query, query_step, paged, layer, out, group, scale, shares);                              \
        });                                                                                                          \
    }                                                                                                                \
    extern "C" void rms_norm_##NAME(const T* states, const T* weight, T* out, int64_t tokens, int64_t width,         \
                                    float epsilon, int threads) {                                                    \
        with_team(tokens < FEW ? 1 : threads, 1,                                                                     \
                  [&](Member& member) { rms_norm(member, states, weight, out, tokens, width, epsilon); });           \
    }                                                                                                                \
    extern "C" void gated_##NAME(const T* states, T* out, int64_t tokens, int64_t width, int threads) {              \
        with_team(tokens < FEW ? 1 : threads, 1, [&](Member& member) { gated(member, states, out, tokens, width); });\
    }                                                                                                                \
    extern "C" void rotate_##NAME(T* states, int64_t step, const T* cos, const T* sin, int64_t tokens,               \
                                  int64_t heads, int64_t head_dim, int threads) {                                    \
        with_team(tokens < FEW ? 1 : threads, 1,                                                                     \
                  [&](Member& member) { rotate(member, states, step, cos, sin, tokens, heads, head_dim); });         \
    }                                                                                                                \
    extern "C" void largest_##NAME(const T* rows, int64_t count, int64_t width, int64_t* places, float* values,      \
                                   int threads) {                                                                    \
        with_team(count < FEW_ROWS ? 1 : threads, 1,                                                                 \
                  [&](Member& member) { largest_of(member, rows, count, width, places, values); });                  \
    }                                                                                                                \
    extern "C" void pack_##NAME(const T* rows, const int64_t* weight, int threads) {                                 \
        with_team(threads, 1,                                                                                        \
                  [&](Member& member) { pack(member, rows, read_weight<T>(weight), (T*)weight[0]); });               \
    }                                                                                                                \
    extern "C" void pack_jobs_##NAME(const int64_t* jobs, int64_t count, int64_t halves, int64_t* taken,             \
                                     int64_t* done) {                                                                \
        halves ? pack_jobs<T, bf16>(jobs, count, taken, done) : pack_jobs<T, float>(jobs, count, taken, done);       \
    }                                                                                                                \
    extern "C" int64_t pack_adapter_##NAME(const float* b, const int64_t* offsets, int64_t rank,                     \
                                           const int64_t* weight, float* packed, int64_t* packed_offsets) {          \
        return pack_adapter(b, offsets, rank, read_weight<T>(weight), packed, packed_offsets);                       \
    }                                                                                                                \
    extern "C" void product_##NAME(const T* rows, int64_t tokens, const int64_t* weight, const T* other, T* out,     \
                                   int threads) {                                                                    \
        const Weight<T> read = read_weight<T>(weight);                                                               \
        std::vector<float> reduced(tokens * read.adapter.total);                                                     \
        const Adapters adapters{&read.adapter, nullptr, read.adapter.total};                                         \
        with_team(threads, 2, [&](Member& member) {                                                                  \
            product(member, rows, tokens, read, adapters, other, out, reduced.data());                               \
        });                                                                                                          \
    }                                                                                                                \
    extern "C" void run_layers_##NAME(const int64_t* layers, int64_t variants, const int64_t* variant_of,            \
                                      int64_t count, T* states, const T* cos, const T* sin, T* pool,                 \
                                      const int64_t* tables, int64_t table_width, const int64_t* works,     \
                                      const int64_t* contexts, int64_t tokens, int64_t kv_heads, int64_t head_dim,   \
                                      int64_t block_tokens, int64_t block_step, T* rooms, float epsilon,             \
                                      float scale, int threads) {                                                    \
        const Paged<T> paged{pool,   tables,   works,    contexts,     table_width,                                  \
                             tokens, kv_heads, head_dim, block_tokens, block_step};                                  \
        const Layer<T> first = read_layer<T>(layers);                                                                \
        int64_t most = 0;                                                                                            \
        for (int64_t i = 0; i < variants * count; ++i)                                                               \
            most = std::max(most, widest(read_layer<T>(layers + i * LAYER_FIELDS)));                                 \
        std::vector<float> reduced(tokens * most);                                                                   \
        T* const joint = rooms + tokens * first.joint.inputs;                                                        \
        T* const seen = joint + tokens * first.joint.outputs;                                                        \
        const Rooms<T> between{rooms, joint, seen, seen + tokens * first.out.inputs, reduced.data()};                \
        with_team(threads, count * PHASES, [&](Member& member) {                                                     \
            std::vector<float> shares;                                                                               \
            for (int64_t i = 0; i < count; ++i) {                                                                    \
                LayerAdapters<T> adapters{{}, {}, {}, {}, variant_of};                                               \
                for (int64_t variant = 0; variant < variants; ++variant)                                             \
                    adapters.add(read_layer<T>(layers + (variant * count + i) * LAYER_FIELDS));                      \
                run_layer(member, read_layer<T>(layers + i * LAYER_FIELDS), adapters, states, cos, sin, paged,       \
                          between, epsilon, scale, shares);                                                          \
            }                                                                                                        \
        });                                                                                                          \
    }

EXPORT(float32, float)
EXPORT(bfloat16, bf16)
