// What library.py and exports.py call. No torch here: plain pointers come in, so that it compiles in seconds and fits every
// version of torch. Sums are in float. The number of threads is torch's, and told: a compiler's OpenMP may have another runtime
// than torch's.

#include "largest.h"
#include "layers.h"

namespace {

constexpr int64_t FEW = 32;  // tokens that are not worth a second thread, where they cost no product
constexpr int64_t FEW_ROWS = 4;  // rows of logits that are not worth one

// Pack one weight after another, until every one is somebody's: several threads may call this, each of which takes the next.
// done [count] becomes 1, or minus the number of an error, after which no more are taken.
template <class T, class Stored>
void take_jobs(const Job<T>* jobs, int64_t count, int64_t* taken, int64_t* done) {
    for (int64_t index; (index = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED)) < count;) {
        const Job<T>& job = jobs[index];
        const int64_t fault = job.weight == nullptr
                                  ? copy_part<T, Stored>(job.parts[0], (T*)job.parts[1].rows)
                                  : pack_parts<T, Stored>(job.parts, *job.weight, (T*)job.weight->panels);
        if (fault) __atomic_store_n(taken, count, __ATOMIC_RELAXED);
        __atomic_store_n(done + index, fault ? -fault : 1, __ATOMIC_RELEASE);
    }
}

// The functions of a dtype, by the names and with the arguments of FUNCTIONS in exports.py.
template <class T>
struct Kernels {
    static void attend(const T* query, int64_t query_step, const Paged<T>* passed, T* out, int64_t group, int64_t layer,
                       float scale, int threads) {
        const Paged<T> paged = *passed;
        with_team(threads, 1, [&](Member& member) {
            std::vector<float> buffer;
            ::attend(member, query, query_step, paged, layer, out, group, scale, buffer);
        });
    }
    static void rms_norm(const T* states, const T* weight, T* out, int64_t tokens, int64_t width, float epsilon,
                         int threads) {
        with_team(tokens < FEW ? 1 : threads, 1,
                  [&](Member& member) { ::rms_norm(member, states, weight, out, tokens, width, epsilon); });
    }
    static void gated(const T* states, T* out, int64_t tokens, int64_t width, int threads) {
        with_team(tokens < FEW ? 1 : threads, 1, [&](Member& member) { ::gated(member, states, out, tokens, width); });
    }
    static void rotate(T* states, int64_t step, const T* cos, const T* sin, int64_t tokens, int64_t heads, int64_t head_dim,
                       int threads) {
        with_team(tokens < FEW ? 1 : threads, 1,
                  [&](Member& member) { ::rotate(member, states, step, cos, sin, tokens, heads, head_dim); });
    }
    static void largest(const T* rows, int64_t count, int64_t width, int64_t* indices, float* values, int threads) {
        with_team(count < FEW_ROWS ? 1 : threads, 1,
                  [&](Member& member) { largest_of(member, rows, count, width, indices, values); });
    }
    static void pack(const T* rows, const Weight<T>* weight, int threads) {
        with_team(threads, 1, [&](Member& member) { ::pack(member, rows, *weight, (T*)weight->panels); });
    }
    static void pack_jobs(const Job<T>* jobs, int64_t count, int64_t halves, int64_t* taken, int64_t* done) {
        halves ? take_jobs<T, bf16>(jobs, count, taken, done) : take_jobs<T, float>(jobs, count, taken, done);
    }
    static int64_t pack_adapter(const float* b, const int64_t* offsets, int64_t rank, const Weight<T>* weight, float* packed,
                                int64_t* packed_offsets) {
        return ::pack_adapter(b, offsets, rank, *weight, packed, packed_offsets);
    }
    static void product(const T* rows, int64_t tokens, const Weight<T>* passed, const T* other, T* out, int threads) {
        const Weight<T> weight = *passed;  // which nothing that is written may alias
        std::vector<float> reduced(tokens * weight.adapter.total);
        const Adapters adapters{&weight.adapter, nullptr, weight.adapter.total};
        with_team(threads, 2, [&](Member& member) {
            ::product(member, rows, tokens, weight, adapters, other, out, reduced.data());
        });
    }
    // layers [variants, count] differ in adapters alone between variants; those of a token are variant_of [tokens]'s.
    static void run_layers(const Layer<T>* layers, int64_t variants, const int64_t* variant_of, int64_t count, T* states,
                           const T* cos, const T* sin, const Paged<T>* passed, T* numbers, float epsilon, float scale,
                           int threads) {
        const Paged<T> paged = *passed;
        const Layer<T>& first = layers[0];
        int64_t most = 0;
        for (int64_t i = 0; i < variants * count; ++i) most = std::max(most, layers[i].widest());
        std::vector<float> reduced(paged.tokens * most);
        T* const joint = numbers + paged.tokens * first.joint.inputs;
        T* const context = joint + paged.tokens * first.joint.outputs;
        const Scratch<T> scratch{numbers, joint, context, context + paged.tokens * first.out.inputs, reduced.data()};
        with_team(threads, count * PHASES, [&](Member& member) {
            std::vector<float> buffer;
            for (int64_t i = 0; i < count; ++i) {
                const Layer<T> layer = layers[i];  // which nothing that is written may alias
                LayerAdapters<T> adapters{{}, {}, {}, {}, variant_of};
                for (int64_t variant = 0; variant < variants; ++variant) adapters.add(layers[variant * count + i]);
                run_layer(member, layer, adapters, states, cos, sin, paged, scratch, epsilon, scale, buffer);
            }
        });
    }
};

// Python's structs are of fields of 8 bytes.
static_assert(sizeof(Weight<bf16>) == 10 * 8 && sizeof(Layer<bf16>) == 43 * 8 && sizeof(Paged<bf16>) == 10 * 8);

}  // namespace

#define EACH_KERNEL(X) \
    X(attend) X(rms_norm) X(gated) X(rotate) X(largest) X(pack) X(pack_jobs) X(pack_adapter) X(product) X(run_layers)
#define EXPORT(NAME)                                               \
    const void* NAME##_float32 = (const void*)Kernels<float>::NAME; \
    const void* NAME##_bfloat16 = (const void*)Kernels<bf16>::NAME;

extern "C" {
EACH_KERNEL(EXPORT)

// The outputs of a panel, and whether bfloat16 is multiplied by instructions of its own.
int64_t panel_outputs() { return PANEL; }
int64_t multiplies_bfloat16() { return HAS_BF16; }
}
