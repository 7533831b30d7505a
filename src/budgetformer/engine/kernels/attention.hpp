// One head of one input: queries, keys and values from the head's own weights, scores, softmax, average.
#pragma once
#include "gemm.hpp"

namespace bf {
namespace {

// Memory is handed out from one block per thread, 64 bytes aligned; the same calls without a block count the bytes.
struct Arena {
    char* at;
    size_t size;
    size_t used = 0;
    template <class T>
    T* take(long n) {
        T* p = at ? (T*)(at + used) : nullptr;
        const size_t bytes = (size_t)n * sizeof(T), room = (bytes + 63) / 64 * 64 + FENCE;
        used += room;
        if (at && used > size) __builtin_trap();  // a mistake of `scratch_size`: an end is better than others' memory
        if (at) fence(p, room, bytes);
        return p;
    }
};

BF_INLINE int round_up(int n, int to) { return (n + to - 1) / to * to; }

// A finished tile's values: products of int8 are whole numbers until scales and sums are brought in.
template <int D>
struct Finished {
    const typename Tag<D>::Acc* c;
    const int32_t* offset;      // int8: what OFFSET added to each output
    const float *scale, *rows;  // int8: of each output, of each row
    BF_INLINE vf get(const Finished& f, int row, int column) {
        if constexpr (D == I8) {
            vi whole = load(f.c + row * PANEL + column);
            if constexpr (Tag<I8>::OFFSET != 0) whole -= load(f.offset + column);
            return to_float(whole) * (load(f.scale + column) * f.rows[row]);
        } else {
            return load(f.c + row * PANEL + column);
        }
    }
};

constexpr int QKV_ROWS = 8 * TILE;  // rows whose tile of one panel stays in the first cache

BF_INLINE int score_rows(int padded_keys) {
    int rows = 64 * 1024 / (4 * padded_keys) / TILE * TILE;
    return rows < TILE ? TILE : rows > QKV_ROWS ? QKV_ROWS : rows;
}

template <int D>
struct AttendMemory {
    using C = Tag<Core<D>::type>;
    typename C::In *q, *k, *v, *p;
    typename Tag<D>::Acc* tile;
    float *scores, *core_tile, *inverse;
    int32_t* offset;
    size_t size;

    AttendMemory(char* at, size_t room, int length, int ep) {
        Arena a{at, room};
        const int keys = round_up(length, PANEL);
        // As many as any shorter input needs: where there are fewer keys, more rows of scores are computed at once.
        const long some = 64 * 1024 / 4, least = (long)TILE * keys, cells = some > least ? some : least;
        q = a.take<typename C::In>((long)length * ep);
        k = a.take<typename C::In>((long)keys * ep);
        v = a.take<typename C::In>((long)keys * ep);
        p = a.take<typename C::In>(cells);
        tile = a.take<typename Tag<D>::Acc>(QKV_ROWS * PANEL);
        scores = a.take<float>(cells);
        core_tile = a.take<float>(QKV_ROWS * PANEL);
        inverse = a.take<float>(QKV_ROWS);
        offset = a.take<int32_t>(PANEL);
        size = a.used;
    }
};

template <int D, class In>
BF_PASS void store_queries(const Finished<D>& f, int rows, const float* bias, float scale, In* q, long ldq) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < PANEL; j += W) store_as(q + i * ldq + j, (f.get(f, i, j) + load(bias + j)) * scale);
}

// Keys are turned into panels of 32 keys, as the weights of the product with the queries.
template <int D>
BF_PASS void store_keys(const Finished<D>& f, int first, int rows, const float* bias, float* k, int dim, int ep) {
    for (int i = 0; i < rows; i++) {
        float* to = k + (long)(first + i) / PANEL * PANEL * ep + (long)dim * PANEL + (first + i) % PANEL;
        alignas(64) float row[PANEL];
        for (int j = 0; j < PANEL; j += W) store(row + j, f.get(f, i, j) + load(bias + j));
        for (int j = 0; j < PANEL; j++) to[j * PANEL] = row[j];
    }
}

template <int D>
BF_PASS void store_values(const Finished<D>& f, int first, int rows, const float* bias, float* v) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < PANEL; j += W) store(v + (long)(first + i) * PANEL + j, f.get(f, i, j) + load(bias + j));
}

#if BF_HAS_BF16
template <int D>
BF_PASS void store_keys(const Finished<D>& f, int first, int rows, const float* bias, uint16_t* k, int dim, int ep) {
    for (int i = 0; i < rows; i++) {
        int32_t* to = (int32_t*)(k + (long)(first + i) / PANEL * PANEL * ep + (long)dim * PANEL) + (first + i) % PANEL;
        alignas(64) uint16_t row[PANEL];
        for (int j = 0; j < PANEL; j += W) store_as(row + j, f.get(f, i, j) + load(bias + j));
        for (int j = 0; j < PANEL / 2; j++) memcpy(to + j * PANEL, row + 2 * j, 4);
    }
}

// Values of two neighbouring tokens lie beside each other: they are the two k of one instruction.
template <int D>
BF_PASS void store_values(const Finished<D>& f, int first, int rows, const float* bias, uint16_t* v) {
    for (int i = 0; i < rows; i++) {
        const int token = first + i;
        for (int j = 0; j < PANEL; j += W) {
            vi now = bf16_bits(f.get(f, i, j) + load(bias + j));
            int32_t* to = (int32_t*)v + (long)(token / 2) * PANEL + j;
            store(to, token & 1 ? (load(to) | now << 16) : now);
        }
    }
}
#endif

BF_INLINE vf exp2_for(const float*, vf x) { return exp2_(x); }
#if BF_HAS_BF16
BF_INLINE vf exp2_for(const uint16_t*, vf x) { return exp2_rough(x); }
#endif

// exp2 of scores less their row's maximum, 0 beyond the last key; the sum's inverse is kept for the average.
template <class In>
BF_PASS void softmax(const float* scores, int rows, int keys, int padded, In* p, float* inverse) {
    vi lane;
    for (int j = 0; j < W; j++) lane[j] = j;
    for (int i = 0; i < rows; i++) {
        const float* s = scores + (long)i * padded;
        In* to = p + (long)i * padded;
        const vf none = set1(-INFINITY);
        int j = keys / W * W;
        const vi real = lane < set1(keys - j);
        vf top = highest_over(keys, none, [&](int at) { return load(s + at); });
        if (j < keys) top = vmax(top, real ? load(s + j) : none);
        const vf most = set1(highest(top));
        vf total = {};
        for (j = 0; j + W <= keys; j += W) {
            vf e = exp2_for(to, load(s + j) - most);
            total += e;
            store_as(to + j, e);
        }
        if (j < keys) {
            vf e = real ? exp2_for(to, load(s + j) - most) : vf{};
            total += e;
            store_as(to + j, e);
            j += W;
        }
        for (; j < padded; j += W) store_as(to + j, vf{});
        inverse[i] = 1.f / sum(total);
    }
}

template <class Out>
BF_PASS void store_average(const float* tile, int rows, const float* inverse, Out* to, long ld) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < PANEL; j += W) store_as(to + i * ld + j, load(tile + i * PANEL + j) * inverse[i]);
}

template <int D>
static void attend(const Job& job, int layer, int input, int slot, Scratch& scratch) {
    using T = Tag<D>;
    constexpr int CORE = Core<D>::type;
    using C = Tag<CORE>;
    const Spec& s = job.m->s;
    const Packed& w = job.m->layer[layer].qkv;
    const long begin = job.offsets[input];
    const int length = (int)(job.offsets[input + 1] - begin), keys = round_up(length, PANEL), ep = s.ep;
    const int head = job.heads[(long)input * s.H + slot], strips = ep / PANEL;
    AttendMemory<D> mem(scratch.memory, scratch.size, length, ep);

    const typename T::In* x = (const typename T::In*)job.typed + begin * s.dp;
    for (int panel = 0; panel < 3 * strips; panel++) {
        const int which = panel / strips, strip = panel % strips, column = (head * 3 * strips + panel) * PANEL;
        const Segment segment = {(const char*)w.panels + (long)(column / PANEL) * w.panel_bytes, s.dp};
        const float* bias = w.bias + column;
        if constexpr (D == I8)
            for (int j = 0; j < PANEL; j++) mem.offset[j] = T::OFFSET * w.sums[column + j];
        for (int r = 0; r < length; r += QKV_ROWS) {
            const int rows = length - r < QKV_ROWS ? length - r : QKV_ROWS;
            gemm<D>(x + (long)r * s.dp, s.dp, rows, &segment, 1, mem.tile, PANEL, w.panel_bytes);
            Finished<D> f = {mem.tile, mem.offset, w.scale + column, job.typed_scale + begin + r};
            if (which == 0) {
                const float scale = LOG2E / sqrtf((float)s.e);
                store_queries<D>(f, rows, bias, scale, mem.q + (long)r * ep + strip * PANEL, ep);
            } else if (which == 1) {
                store_keys<D>(f, r, rows, bias, mem.k, strip * PANEL, ep);
            } else {
                store_values<D>(f, r, rows, bias, mem.v + (long)strip * keys * PANEL);
            }
        }
    }
    // Beyond the last token nothing is read but the other half of an odd length's last pair, set to 0 by
    // `store_values`.

    const long ld = (long)job.heads_count[input] * ep;
    typename C::In* context = (typename C::In*)job.context + job.context_at[input] + slot * ep;
    const int step = score_rows(keys);
    for (int r = 0; r < length; r += step) {
        const int rows = length - r < step ? length - r : step;
        for (int panel = 0; panel < keys / PANEL; panel++) {
            const Segment segment = {mem.k + (long)panel * PANEL * ep, ep};
            gemm<CORE>(mem.q + (long)r * ep, ep, rows, &segment, 1, mem.scores + panel * PANEL, keys);
        }
        typename C::In* p = mem.p;
        if constexpr (CORE == F32) p = mem.scores;
        softmax(mem.scores, rows, length, keys, p, mem.inverse);
        for (int strip = 0; strip < strips; strip++) {
            const Segment segment = {mem.v + (long)strip * keys * PANEL, round_up(length, C::G)};
            gemm<CORE>(p, keys, rows, &segment, 1, mem.core_tile);
            store_average(mem.core_tile, rows, mem.inverse, context + r * ld + strip * PANEL, ld);
        }
    }
}

}  // namespace
}  // namespace bf
