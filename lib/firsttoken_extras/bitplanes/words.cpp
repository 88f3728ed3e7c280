// Streams of fields made words of 16 bits, or merged into words that are there, in one pass; where the model computes in
// float32, from its weights and back to them without a tensor in between. Built by native.py; one thread.

#include <algorithm>
#include <cstdint>
#include <cstring>

struct Field {  // of every word, as fields.py packs it: word i, i + bytes, i + 2 * bytes, ... share a byte
    const uint8_t* packed;
    int64_t bytes;
    int64_t width;
    int64_t low;
};

namespace {

struct Stored {  // the model computes in what is stored
    static constexpr int LANES = 16;
    typedef uint8_t Bytes __attribute__((vector_size(LANES)));
    typedef uint16_t Words __attribute__((vector_size(2 * LANES)));
    typedef Words Weights;
    static inline Words narrow(Words weights) { return weights; }
    static inline Words widen(Words words) { return words; }
};

struct InFloat32 {
    static constexpr int LANES = 8;
    typedef uint8_t Bytes __attribute__((vector_size(LANES)));
    typedef uint16_t Words __attribute__((vector_size(2 * LANES)));
    typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
    typedef int32_t Counts __attribute__((vector_size(4 * LANES)));
    typedef float Reals __attribute__((vector_size(4 * LANES)));
    typedef Bits Weights;
};

struct FromBf16 : InFloat32 {
    static inline Words narrow(Bits weights) { return __builtin_convertvector(weights >> 16, Words); }
    static inline Bits widen(Words words) { return __builtin_convertvector(words, Bits) << 16; }
};

struct FromF16 : InFloat32 {  // by its bits, so that a NaN keeps its payload: a conversion of the processor's would set one of them
    static constexpr uint32_t BIAS = 112u << 23, INFINITE = 0x7F800000, NORMAL = 113u << 23;

    static inline Words narrow(Bits weights) {
        const Bits magnitude = weights & 0x7FFFFFFF;
        const Reals small = (Reals)(magnitude < NORMAL ? magnitude : Bits{});
        const Bits steps = (Bits)__builtin_convertvector(small * 16777216.0f, Counts);
        const Bits usual = (magnitude - (magnitude >= INFINITE ? Bits{} + 2 * BIAS : Bits{} + BIAS)) >> 13;
        return __builtin_convertvector(((weights >> 16) & 0x8000) | (magnitude < NORMAL ? steps : usual), Words);
    }

    static inline Bits widen(Words words) {
        const Bits wide = __builtin_convertvector(words, Bits), magnitude = wide & 0x7FFF;
        const Bits small = (Bits)(__builtin_convertvector((Counts)magnitude, Reals) * (1.0f / 16777216.0f));
        const Bits usual = (magnitude << 13) + (magnitude >= 0x7C00 ? Bits{} + 2 * BIAS : Bits{} + BIAS);
        return ((wide & 0x8000) << 16) | (magnitude < 0x400 ? small : usual);
    }
};

struct Plane {
    const Field* fields;
    uint16_t keep, middle, infinite;
};

template <int FIELDS>
struct Turn {  // of each field, where the run begins and where its bits lie in a byte
    const uint8_t* packed[FIELDS];
    int shift[FIELDS], low[FIELDS];
    uint16_t mask[FIELDS];
};

template <class As, int FIELDS, bool FRESH, bool APART>
inline void merge_some(typename As::Weights* there, int64_t at, int lanes, Turn<FIELDS> turn, Plane plane) {
    typedef typename As::Weights Weights;
    typedef typename As::Words Words;
    Words found = Words{} + plane.middle;
    for (int f = 0; f < FIELDS; ++f) {
        typename As::Bytes bytes{};
        std::memcpy(&bytes, turn.packed[f] + at, lanes);
        found |= ((__builtin_convertvector(bytes, Words) >> turn.shift[f]) & turn.mask[f]) << turn.low[f];
    }
    if (APART) found = ((found & 0x80) << 8) | ((found >> 1) & 0x7F80) | (found & 0x7F);
    Weights weights{};
    const size_t bytes = lanes * sizeof weights / As::LANES;
    char* place = reinterpret_cast<char*>(there) + at * (sizeof weights / As::LANES);
    if (!FRESH) {
        std::memcpy(&weights, place, bytes);
        found |= As::narrow(weights) & plane.keep;
    }
    const Words unsure = found & uint16_t(~plane.middle);
    found = (found & 0x7FFF) >= plane.infinite ? unsure : found;
    weights = As::widen(found);
    std::memcpy(place, &weights, bytes);
}

template <class As, int FIELDS, bool FRESH, bool APART>
void merge_all(void* words, int64_t count, Plane plane) {
    for (int64_t from = 0; from < count;) {  // runs in which no field goes on to the next turn of its bytes
        int64_t to = count;
        Turn<FIELDS> turn;
        for (int f = 0; f < FIELDS; ++f) {
            const Field& field = plane.fields[f];
            const int64_t turns = from / field.bytes;
            to = std::min(to, (turns + 1) * field.bytes);
            turn.packed[f] = field.packed - turns * field.bytes;
            turn.shift[f] = int(turns * field.width);
            turn.low[f] = int(field.low);
            turn.mask[f] = uint16_t((1 << field.width) - 1);
        }
        auto* there = static_cast<typename As::Weights*>(words);
        int64_t at = from;
        for (; at + As::LANES <= to; at += As::LANES)
            merge_some<As, FIELDS, FRESH, APART>(there, at, As::LANES, turn, plane);
        if (at < to) merge_some<As, FIELDS, FRESH, APART>(there, at, int(to - at), turn, plane);
        from = to;
    }
}

template <class As, int FIELDS>
void merge(void* words, int64_t count, const Plane& plane, bool apart) {
    if (plane.keep) return merge_all<As, FIELDS, false, false>(words, count, plane);
    if (apart) return merge_all<As, FIELDS, true, true>(words, count, plane);
    merge_all<As, FIELDS, true, false>(words, count, plane);
}

template <class As>
int merge_any(void* words, int64_t count, const Plane& plane, int64_t many, bool apart) {
    switch (many) {
        case 1: merge<As, 1>(words, count, plane, apart); return 0;
        case 2: merge<As, 2>(words, count, plane, apart); return 0;
        case 3: merge<As, 3>(words, count, plane, apart); return 0;
        default: return 1;
    }
}

}  // namespace

// ``kind`` of the weights: 0 as they are stored, 1 float32 of bf16, 2 float32 of fp16. ``keep`` are the bits of a word that
// came before, none for fresh words; ``apart``: of fresh words, the sign lies before the mantissa. 0, or 1 for what is not
// compiled in.
extern "C" int merge_planes(void* words, int64_t count, int64_t kind, const Field* fields, int64_t many, int64_t keep,
                            int64_t middle, int64_t infinite, int64_t apart) {
    const Plane plane{fields, uint16_t(keep), uint16_t(middle), uint16_t(infinite)};
    switch (kind) {
        case 0: return merge_any<Stored>(words, count, plane, many, apart);
        case 1: return merge_any<FromBf16>(words, count, plane, many, apart);
        case 2: return merge_any<FromF16>(words, count, plane, many, apart);
        default: return 1;
    }
}
