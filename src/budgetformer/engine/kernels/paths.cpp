// The kernels of one instruction set: compiled several times, each with its own flags and -DBF_PATH=name.
//
// Nothing of the C++ library is used here: its templates have linkage, and the linker might let baseline code call
// an instance that was compiled for a newer processor.
#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "rows.hpp"

namespace bf {
namespace {

BF_PASS float dot(const float* a, const float* b, int n) {
    return sum(sum_over(n, [&](int i) { return load(a + i) * load(b + i); }));
}

float logistic(float x) { return 1.f / (1.f + expf(-x)); }

float activate_one(int activation, float x) {
    switch (activation) {
        case GELU:
            return 0.5f * x * (1.f + erff(x * 0.70710678f));
        case GELU_TANH:
            return 0.5f * x * (1.f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
        case RELU:
            return x > 0.f ? x : 0.f;
        case SILU:
            return x * logistic(x);
        default:
            return tanhf(x);
    }
}

// ---- embeddings ------------------------------------------------------------------------------------------------

template <int D>
void embed(const Job& job, long first, long last, Scratch& scratch) {
    const Model& m = *job.m;
    const Spec& s = m.s;
    Arena a{scratch.memory, scratch.size};
    float* narrow = a.take<float>(s.embedding + PANEL);
    float* tile = a.take<float>(PANEL);
    int input = 0;
    while (job.offsets[input + 1] <= first) input++;
    for (long r = first; r < last; r++) {
        while (job.offsets[input + 1] <= r) input++;
        const long at = r - job.offsets[input] + s.position_offset;
        if (r + 4 < last)  // the table is far larger than the caches, and its rows come in no order
            for (int i = 0; i < s.embedding; i += 16)
                __builtin_prefetch(m.word + (long)job.ids[r + 4] * s.embedding + i);
        const float *word = m.word + (long)job.ids[r] * s.embedding, *position = m.position + at * s.embedding;
        const int width = round_up(s.embedding, PANEL);
        memset(narrow, 0, (size_t)width * 4);
        for (int i = 0; i < s.embedding; i++) narrow[i] = word[i] + position[i];
        if (s.token_types) {
            const float* type = m.type + (long)(job.types ? job.types[r] : 0) * s.embedding;
            for (int i = 0; i < s.embedding; i++) narrow[i] += type[i];
        }
        float* x = job.x + r * s.dp;
        normalise(narrow, s.embedding == s.d ? x : narrow, 1, width, s.embedding, width, m.embed_gamma, m.embed_beta,
                  s.eps);
        if (s.embedding != s.d)
            for (int column = 0; column < s.dp; column += PANEL) {
                const Packed& w = m.projection;
                const Segment segment = {(const char*)w.panels + (long)(column / PANEL) * w.panel_bytes, width};
                gemm<F32>(narrow, width, 1, &segment, 1, tile);
                for (int j = 0; j < PANEL; j += W) store(x + column + j, load(tile + j) + load(w.bias + column + j));
            }
    }
    enter<D>(job, 0, first, last);
}

// ---- routing ---------------------------------------------------------------------------------------------------

// What a router or a classifier sees of an input's rows, token by token, so that it does not depend on threads.
void pool(const float* rows, long tokens, int dp, int view, float* to) {
    memset(to, 0, (size_t)dp * 4);
    for (long t = 0; t < tokens; t++)
        for (int i = 0; i < dp; i += W) store(to + i, load(to + i) + load(rows + t * dp + i));
    for (int i = 0; i < dp; i += W) store(to + i, load(to + i) * (1.f / (float)tokens));
    if (view == MEAN_FIRST) memcpy(to + dp, rows, (size_t)dp * 4);
    if (view == MEAN_MAX) {
        memcpy(to + dp, rows, (size_t)dp * 4);
        for (long t = 1; t < tokens; t++)
            for (int i = 0; i < dp; i += W) store(to + dp + i, vmax(load(to + dp + i), load(rows + t * dp + i)));
    }
}

// The `count` highest, ties to the lowest index: estimators.top_units.
void top(const float* score, int n, int count, uint8_t* chosen) {
    for (int i = 0; i < n; i++) {
        int better = 0;
        for (int j = 0; j < n; j++) better += score[j] > score[i] || (score[j] == score[i] && j < i);
        if (better < count) chosen[i] = 1;
    }
}

// A router's choice among `units` for one input, from the rows it pools over. estimators.py says why; this is what they
// do in use. count: how many, or -1 for the controller's own wish. Returns the share wished for.
float decide(const Spec& s, const Router& w, int units, const float* rows, long tokens, int count, uint8_t* chosen,
             Scratch& scratch) {
    Arena a{scratch.memory, scratch.size};
    float *pooled = a.take<float>(s.seen), *z = a.take<float>(units), *adjusted = a.take<float>(units);
    pool(rows, tokens, s.dp, s.view, pooled);
    float wish = w.down_bias;
    for (int i = 0; i < s.router_hidden; i++) {
        const float h = dot(w.up + (long)i * s.seen, pooled, s.seen) + w.up_bias[i];
        wish += w.down[i] * activate_one(GELU, h);
    }
    const int lowest = s.min_units < units ? s.min_units : units;
    const float wanted = lowest + logistic(wish) * (units - lowest), share = wanted / units;
    float mean = 0.f;
    for (int u = 0; u < units; u++) mean += z[u] = dot(w.scorer + (long)u * s.seen, pooled, s.seen) + w.scorer_bias[u];
    mean /= units;
    for (int u = 0; u < units; u++) z[u] -= mean;
    const bool named = count >= 0;
    if (!named) count = (int)floorf(wanted + 0.5f);
    count = count < lowest ? lowest : count > units ? units : count;
    if (named || s.estimator == TOP_K) {
        top(z, units, count, chosen);
    } else if (s.estimator == HARD_CONCRETE) {
        const float p = share < 1e-4f ? 1e-4f : share > 1.f - 1e-4f ? 1.f - 1e-4f : share;
        const float shift = logf(p) - log1pf(-p);
        for (int u = 0; u < units; u++) {
            adjusted[u] = z[u] + shift;
            chosen[u] = logistic(adjusted[u]) * 1.2f - 0.1f > 0.5f || wanted >= units;
        }
        top(adjusted, units, lowest, chosen);
    } else {  // TOP_P
        float most = z[0], total = 0.f;
        for (int u = 1; u < units; u++) most = z[u] > most ? z[u] : most;
        for (int u = 0; u < units; u++) total += adjusted[u] = expf(z[u] - most);
        for (int u = 0; u < units; u++) adjusted[u] /= total;
        for (int u = 0; u < units; u++) {
            float before = 0.f;
            for (int j = 0; j < units; j++)
                if (z[j] > z[u] || (z[j] == z[u] && j < u)) before += adjusted[j];
            chosen[u] = before < share || share >= 1.f;
        }
        top(z, units, lowest, chosen);
    }
    if (w.place) {  // how many is as before; which, is among those that are left
        int on = 0, left = 0;
        for (int u = 0; u < units; u++) {
            on += chosen[u], chosen[u] = 0;
            if (w.place[u] < 0) z[u] = -INFINITY;
            else left++;
        }
        top(z, units, on < left ? on : left, chosen);
    }
    return share;
}

// The units that run, by their places among those that are stored.
int list_of(const uint8_t* chosen, int units, const Router& w, int32_t* list) {
    int n = 0;
    for (int u = 0; u < units; u++)
        if (chosen[u]) list[n++] = w.place ? w.place[u] : u;
    return n;
}

// Without those that were cut.
int keep_stored(const Router& w, int units, uint8_t* chosen) {
    int on = 0;
    for (int u = 0; u < units; u++) on += chosen[u] = chosen[u] && (!w.place || w.place[u] >= 0);
    return on;
}

// The heads of one input in one layer, and its blocks where the caller names them.
void route(const Job& job, int layer, int input, Scratch& scratch) {
    const Spec& s = job.m->s;
    const long cell = (long)input * s.layers + layer, begin = job.offsets[input];
    const Layer& w = job.m->layer[layer];
    uint8_t* chosen = job.chosen + cell * s.H;
    memset(chosen, 0, (size_t)s.H);
    if (job.gates) {
        memcpy(chosen, job.gates + cell * s.H, (size_t)s.H);
        job.wanted[cell] = (float)keep_stored(w.router, s.H, chosen) / s.H;
    } else if (!s.routes && !job.counts) {
        memset(chosen, 1, (size_t)s.H);
        job.wanted[cell] = (float)keep_stored(w.router, s.H, chosen) / s.H;
    } else {
        job.wanted[cell] = decide(s, w.router, s.H, job.inner + begin * s.dp, job.offsets[input + 1] - begin,
                                  job.counts ? job.counts[cell] : -1, chosen, scratch);
    }
    job.heads_count[input] = list_of(chosen, s.H, w.router, job.heads + (long)input * s.H);
    if (job.ffn) {
        const uint8_t* on = job.ffn + cell * job.blocks;
        job.block_count[input] = list_of(on, job.blocks, w.ffn_router, job.block_list + (long)input * job.blocks);
    }
}

// The blocks of one input in one layer, chosen by their router from what enters the feed-forward layer.
void route_blocks(const Job& job, int layer, int input, Scratch& scratch) {
    const Spec& s = job.m->s;
    const long cell = (long)input * s.layers + layer, begin = job.offsets[input];
    uint8_t* chosen = job.block_chosen + cell * s.blocks;
    memset(chosen, 0, (size_t)s.blocks);
    const Router& w = job.m->layer[layer].ffn_router;
    decide(s, w, s.blocks, job.inner + begin * s.dp, job.offsets[input + 1] - begin,
           job.block_counts ? job.block_counts[cell] : -1, chosen, scratch);
    job.block_count[input] = list_of(chosen, s.blocks, w, job.block_list + (long)input * s.blocks);
}

// ---- the end of an input ---------------------------------------------------------------------------------------

void finish(const Job& job, int input, Scratch& scratch) {
    const Model& m = *job.m;
    const Spec& s = m.s;
    const long begin = job.offsets[input], tokens = job.offsets[input + 1] - begin;
    float* x = job.x + begin * s.dp;
    if (s.pre_norm) normalise(x, x, tokens, s.dp, s.d, s.dp, m.final_gamma, m.final_beta, s.eps);
    if (job.hidden)
        for (long t = 0; t < tokens; t++) memcpy(job.hidden + (begin + t) * s.d, x + t * s.dp, (size_t)s.d * 4);
    Arena a{scratch.memory, scratch.size};
    float *pooled = a.take<float>(s.dp), *inner = a.take<float>(s.dp);
    if (s.pool_first) memcpy(pooled, x, (size_t)s.dp * 4);
    else pool(x, tokens, s.dp, MEAN, pooled);
    if (s.head_hidden >= 0) {
        memset(inner, 0, (size_t)s.dp * 4);
        for (int i = 0; i < s.d; i++)
            inner[i] = activate_one(s.head_hidden, dot(m.dense + (long)i * s.dp, pooled, s.dp) + m.dense_bias[i]);
        pooled = inner;
    }
    for (int i = 0; i < s.labels; i++)
        job.logits[(long)input * s.labels + i] =
            dot(m.classifier + (long)i * s.dp, pooled, s.dp) + m.classifier_bias[i];
}

// ---- sizes, rates, table ---------------------------------------------------------------------------------------

template <int D>
size_t scratch_size(const Spec& s, int longest, int blocks, int block_rows) {
    const size_t attend = AttendMemory<D>(nullptr, 0, longest, s.ep).size;
    const size_t rest = RowsMemory<D>(nullptr, 0, s, block_rows, blocks).size;
    const size_t small =
        ((size_t)s.seen + 2 * (size_t)s.dp + 2 * (size_t)(s.H + s.blocks) + (size_t)s.embedding + 1024) * 4;
    const size_t most = attend > rest ? attend : rest;
    return (most > small ? most : small) + 64 + 16 * FENCE;
}

size_t scratch_of(const Model& m, int longest, int blocks, int block_rows) {
    if (m.s.dtype == F32) return scratch_size<F32>(m.s, longest, blocks, block_rows);
#if BF_HAS_BF16
    if (m.s.dtype == BF16) return scratch_size<BF16>(m.s, longest, blocks, block_rows);
#endif
    return scratch_size<I8>(m.s, longest, blocks, block_rows);
}

double cpu_seconds() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// Operations per second of a product (rows x columns x depth) with weights in the cache; a multiply-add counts as two.
template <int D>
double rate(int M, int N, int K, double seconds) {
    using T = Tag<D>;
    K = round_up(K, PANEL), N = round_up(N, PANEL);
    const size_t in = sizeof(typename T::In);
    typename T::In* a = (typename T::In*)calloc((size_t)M * K + 64, in);
    typename T::In* b = (typename T::In*)calloc((size_t)N * K + 64, in);
    typename T::Acc* c = (typename T::Acc*)calloc((size_t)M * PANEL + 64, 4);
    double spent = 0, done = 0;
    if (a && b && c)
        for (double start = cpu_seconds(); spent < seconds; spent = cpu_seconds() - start) {
            for (int n = 0; n < N; n += PANEL) {
                const Segment segment = {b + (long)n * K, K};
                gemm<D>(a, K, M, &segment, 1, c);
            }
            done += 2.0 * M * N * K;
        }
    free(a), free(b), free(c);
    return spent > 0 ? done / spent : 0;
}

double gemm_rate(int dtype, int M, int N, int K, double seconds) {
    if (dtype == F32) return rate<F32>(M, N, K, seconds);
    if (dtype == I8) return rate<I8>(M, N, K, seconds);
#if BF_HAS_BF16
    return rate<BF16>(M, N, K, seconds);
#else
    return 0;
#endif
}

// The same from registers alone: nothing on this core can be faster.
template <int D>
double peak(double seconds) {
    using T = Tag<D>;
    alignas(64) typename T::In b[W * T::G] = {}, a[T::G] = {};
    asm volatile("" : : "r"(a), "r"(b) : "memory");  // else the compiler knows that all is 0
    typename T::V acc[12] = {};
    double spent = 0, done = 0;
    for (double start = cpu_seconds(); spent < seconds; spent = cpu_seconds() - start) {
        const auto x = T::spread(a);
        for (int repeat = 0; repeat < 10000; repeat++) {
#pragma GCC unroll 12
            for (int i = 0; i < 12; i++) acc[i] = T::dot(acc[i], x, b);
#if defined(__x86_64__)
            asm volatile("" : "+v"(acc[0]), "+v"(acc[1]), "+v"(acc[2]), "+v"(acc[3]), "+v"(acc[4]), "+v"(acc[5]));
            asm volatile("" : "+v"(acc[6]), "+v"(acc[7]), "+v"(acc[8]), "+v"(acc[9]), "+v"(acc[10]), "+v"(acc[11]));
#endif
        }
        done += 2.0 * 12 * 10000 * W * T::G;
    }
    volatile float keep = 0;
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) keep = keep + (float)acc[i][0];  // unrolled, or the array would live in memory
    return done / spent;
}

double peak_rate(int dtype, double seconds) {
    if (dtype == F32) return peak<F32>(seconds);
    if (dtype == I8) return peak<I8>(seconds);
#if BF_HAS_BF16
    return peak<BF16>(seconds);
#else
    return 0;
#endif
}

// The type of a model is known when it is loaded; here it becomes a constant.
#if BF_HAS_BF16
#define BF_BY_TYPE(call)       \
    switch (job.m->s.dtype) {  \
        case F32:              \
            return call(F32);  \
        case BF16:             \
            return call(BF16); \
        default:               \
            return call(I8);   \
    }
#else
#define BF_BY_TYPE(call)      \
    switch (job.m->s.dtype) { \
        case F32:             \
            return call(F32); \
        default:              \
            return call(I8);  \
    }
#endif
void embed_any(const Job& job, long first, long last, Scratch& scratch) {
#define BF_CALL(D) embed<D>(job, first, last, scratch)
    BF_BY_TYPE(BF_CALL)
#undef BF_CALL
}
void attend_any(const Job& job, int layer, int input, int slot, Scratch& scratch){
#define BF_CALL(D) attend<D>(job, layer, input, slot, scratch)
    BF_BY_TYPE(BF_CALL)
#undef BF_CALL
}
#define BF_ROWS(name)                                                                                \
    void name##_any(const Job& job, int layer, int input, long first, long last, Scratch& scratch) { \
        BF_BY_TYPE(BF_CALL)                                                                          \
    }
#define BF_CALL(D) rows<D>(job, layer, input, first, last, scratch)
BF_ROWS(rows)
#undef BF_CALL
#define BF_CALL(D) rows_attention<D>(job, layer, input, first, last, scratch)
    BF_ROWS(rows_attention)
#undef BF_CALL
#define BF_CALL(D) rows_blocks<D>(job, layer, input, first, last, scratch)
        BF_ROWS(rows_blocks)
#undef BF_CALL

}  // namespace

#define BF_TEXT_(x) #x
#define BF_TEXT(x) BF_TEXT_(x)
#define BF_JOIN_(a, b) a##b
#define BF_JOIN(a, b) BF_JOIN_(a, b)

extern const Path BF_JOIN(path_, BF_PATH);
const Path BF_JOIN(path_, BF_PATH) = {
    BF_TEXT(BF_PATH),
    {true, BF_HAS_BF16 != 0, true},
    scratch_of,
    embed_any,
    route,
    attend_any,
    rows_any,
    rows_attention_any,
    route_blocks,
    rows_blocks_any,
    finish,
    gemm_rate,
    peak_rate,
};

}  // namespace bf
