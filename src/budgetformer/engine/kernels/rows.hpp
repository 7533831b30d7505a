// A block of token rows through the rest of a layer: output projection of the heads that ran, residual, norm,
// feed-forward blocks that were chosen, residual, norm. Rows of several inputs share a block: weights are read once.
#pragma once
#include "attention.hpp"

namespace bf {
namespace {

// Layer norm of R rows side by side: a row alone waits for its own sums most of the time. The same steps for every R,
// so a row's result does not depend on its neighbours. Width is padded with zeros up to dp; gamma and beta are 0 there,
// so the padding stays 0.
template <int R>
BF_INLINE void normalise_some(const float* x, float* y, long ld, int d, int dp, const float* gamma, const float* beta,
                              float eps) {
    constexpr int STEP = 2 * W;
    const int whole = d / STEP * STEP;  // the sum of squares is of the real part: what padding adds is far larger than
                                        // the sum itself where the mean is far from 0
    vf part[R][2] = {};
    float mean[R], scale[R];
    for (int i = 0; i < dp; i += STEP)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            part[r][0] += load(x + r * ld + i);
            part[r][1] += load(x + r * ld + i + W);
        }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        mean[r] = sum(part[r][0] + part[r][1]) / d;
        part[r][0] = part[r][1] = vf{};
    }
    for (int i = 0; i < whole; i += STEP)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const vf one = load(x + r * ld + i) - mean[r], other = load(x + r * ld + i + W) - mean[r];
            part[r][0] = one * one + part[r][0];
            part[r][1] = other * other + part[r][1];
        }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        float total = sum(part[r][0] + part[r][1]);
        for (int i = whole; i < d; i++) total += (x[r * ld + i] - mean[r]) * (x[r * ld + i] - mean[r]);
        scale[r] = 1.f / sqrtf(total / d + eps);
    }
    for (int i = 0; i < dp; i += W) {
        const vf g = load(gamma + i), b = load(beta + i);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) store(y + r * ld + i, (load(x + r * ld + i) - mean[r]) * scale[r] * g + b);
    }
}

BF_PASS void normalise(const float* x, float* y, long rows, long ld, int d, int dp, const float* gamma,
                       const float* beta, float eps) {
    long r = 0;
    for (; r + 4 <= rows; r += 4) normalise_some<4>(x + r * ld, y + r * ld, ld, d, dp, gamma, beta, eps);
    for (; r < rows; r++) normalise_some<1>(x + r * ld, y + r * ld, ld, d, dp, gamma, beta, eps);
}

// To int8, symmetric: the largest of the row, or `known` where it was found before, becomes 127. Returns the step.
template <class In>
BF_PASS float quantise(const In* x, uint8_t* q, int n, const float* known = nullptr) {
    const vf most = known ? load(known) : highest_over(n, vf{}, [&](int i) { return vabs(load_as(x + i)); });
    const float top = highest(most), inverse = top > 0.f ? 127.f / top : 0.f;
    const vf magic = set1(12582912.f);
    for (int i = 0; i < n; i += W) {
        vi whole = bits(load_as(x + i) * inverse + magic) - bits(magic) + Tag<I8>::OFFSET;
        *(vb_memory*)(q + i) = __builtin_convertvector(whole, vb_memory);
    }
    return top / 127.f;
}

// Rows in the engine's type, and their steps where there are any.
template <int D>
BF_INLINE void convert_row(const float* x, typename Tag<D>::In* to, int n, float* step) {
    if constexpr (D == I8) *step = quantise(x, to, n);
#if BF_HAS_BF16
    else if constexpr (D == BF16)
        for (int i = 0; i < n; i += W) store_as(to + i, load(x + i));
#endif
    else if (to != x) memcpy(to, x, (size_t)n * 4);
}

// int8: what activations stored with OFFSET added put into each output, for one more segment of weights.
BF_INLINE void add_offsets(int32_t* offset, const int32_t* sums, int n) {
    for (int j = 0; j < n; j += W) store(offset + j, load(offset + j) + load(sums + j) * Tag<I8>::OFFSET);
}

// What attention of `layer` reads of finished rows.
template <int D>
static void enter(const Job& job, int layer, long first, long last) {
    const Spec& s = job.m->s;
    const float* x = job.x + first * s.dp;
    float* inner = job.inner + first * s.dp;
    const Layer& w = job.m->layer[layer];
    if (s.pre_norm) normalise(x, inner, last - first, s.dp, s.d, s.dp, w.attention_gamma, w.attention_beta, s.eps);
    for (long r = first; r < last; r++)
        convert_row<D>(job.inner + r * s.dp, (typename Tag<D>::In*)job.typed + r * s.dp, s.dp,
                       D == I8 ? job.typed_scale + r : nullptr);
}

template <int D>
BF_PASS void add_product(const Finished<D>& f, int rows, const float* bias, const float* x, float* y, long ld) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < PANEL; j += W)
            store(y + i * ld + j, f.get(f, i, j) + load(bias + j) + load(x + i * ld + j));
}

// most: int8, the largest of each row so far, (rows, W).
template <int D, int A, class Out>
BF_PASS void store_activated(const Finished<D>& f, int rows, const float* bias, Out* h, long ld, float* most) {
    for (int i = 0; i < rows; i++) {
        vf high = {};
        for (int j = 0; j < PANEL; j += W) {
            vf v = activate<A, D != F32>(f.get(f, i, j) + load(bias + j));
            if constexpr (D == I8) high = vmax(high, vabs(v));
            store_as(h + i * ld + j, v);
        }
        if constexpr (D == I8) store(most + i * W, vmax(load(most + i * W), high));
    }
}

template <int D, class Out>
BF_INLINE void store_hidden(int activation, const Finished<D>& f, int rows, const float* bias, Out* h, long ld,
                            float* most) {
    switch (activation) {
        case GELU:
            return store_activated<D, GELU>(f, rows, bias, h, ld, most);
        case GELU_TANH:
            return store_activated<D, GELU_TANH>(f, rows, bias, h, ld, most);
        case RELU:
            return store_activated<D, RELU>(f, rows, bias, h, ld, most);
        case SILU:
            return store_activated<D, SILU>(f, rows, bias, h, ld, most);
        default:
            return store_activated<D, TANH>(f, rows, bias, h, ld, most);
    }
}

template <int D>
struct RowsMemory {
    float *y, *inner, *wide;
    typename Tag<D>::In *typed, *context, *hidden;
    float *typed_scale, *hidden_scale, *most;
    typename Tag<D>::Acc* tile;
    int32_t *offset, *ranges;
    Segment* segments;
    size_t size;

    RowsMemory(char* at, size_t room, const Spec& s, int rows, int blocks) {
        Arena a{at, room};
        const long widest = s.H * s.ep > s.fp ? s.H * s.ep : s.fp;
        y = a.take<float>((long)rows * s.dp);
        inner = s.pre_norm ? a.take<float>((long)rows * s.dp) : y;
        typed = D == F32 ? (typename Tag<D>::In*)inner : a.take<typename Tag<D>::In>((long)rows * s.dp);
        hidden = a.take<typename Tag<D>::In>((long)rows * widest);
        context = hidden;  // one is done with before the other begins
        wide = D == I8 ? a.take<float>((long)rows * s.fp) : nullptr;
        typed_scale = a.take<float>(rows);
        hidden_scale = a.take<float>(rows);
        most = a.take<float>((long)rows * W);
        tile = a.take<typename Tag<D>::Acc>((long)rows * PANEL);
        offset = a.take<int32_t>(s.dp > s.fp ? s.dp : s.fp);
        ranges = a.take<int32_t>(2L * blocks + 2);
        segments = a.take<Segment>((s.H > blocks ? s.H : blocks) + 1);
        size = a.used;
    }
};

BF_INLINE bool same(const int32_t* a, int na, const int32_t* b, int nb) {
    return na == nb && memcmp(a, b, sizeof(int32_t) * (size_t)na) == 0;
}

// y = x + sum over the heads that ran of context_h W_O^h + bias, for rows whose inputs chose the same heads.
template <int D>
static void project(const Job& job, const Layer& layer, int input, long first, int rows, float* y, RowsMemory<D>& mem) {
    const Spec& s = job.m->s;
    const Packed& w = layer.out;
    const int count = job.heads_count[input];
    const int32_t* heads = job.heads + (long)input * s.H;
    const long ld = (long)count * s.ep, at = job.context_at[input] + (first - job.offsets[input]) * ld;
    const typename Tag<D>::In* context;
    if constexpr (D == I8) {
        const auto* wide = (const typename Tag<Core<D>::type>::In*)job.context + at;
        for (int i = 0; i < rows; i++) mem.hidden_scale[i] = quantise(wide + i * ld, mem.context + i * ld, (int)ld);
        memset(mem.offset, 0, sizeof(int32_t) * (size_t)s.dp);
        for (int h = 0; h < count; h++) add_offsets(mem.offset, w.sums + (long)heads[h] * s.dp, s.dp);
        context = mem.context;
    } else {
        context = (const typename Tag<D>::In*)job.context + at;
    }
    for (int column = 0; column < s.dp; column += PANEL) {
        const char* panel = (const char*)w.panels + (long)(column / PANEL) * w.panel_bytes;
        for (int h = 0; h < count; h++)
            mem.segments[h] = {panel + (long)heads[h] * s.ep * PANEL * (long)sizeof(typename Tag<D>::In), s.ep};
        gemm<D>(context, ld, rows, mem.segments, count, mem.tile, PANEL, w.panel_bytes);
        Finished<D> f = {mem.tile, mem.offset + column, w.scale + column, mem.hidden_scale};
        add_product<D>(f, rows, w.bias + column, job.x + first * s.dp + column, y + column, s.dp);
    }
}

// out = y + feed-forward over the chosen blocks. ranges: runs of chosen neurons, (first, past the last) each.
template <int D>
static void feed_forward(const Spec& s, const Layer& layer, int rows, const int32_t* ranges, int count, const float* y,
                         const typename Tag<D>::In* typed, const float* typed_scale, float* out, RowsMemory<D>& mem) {
    using In = typename Tag<D>::In;
    long width = 0;
    for (int r = 0; r < count; r++) width += ranges[2 * r + 1] - ranges[2 * r];
    if constexpr (D == I8) memset(mem.most, 0, sizeof(float) * (size_t)rows * W);
    long at = 0;
    for (int r = 0; r < count; r++)
        for (int neuron = ranges[2 * r]; neuron < ranges[2 * r + 1]; neuron += PANEL, at += PANEL) {
            const Packed& w = layer.up;
            const Segment segment = {(const char*)w.panels + (long)(neuron / PANEL) * w.panel_bytes, s.dp};
            if constexpr (D == I8) {
                memset(mem.offset, 0, sizeof(int32_t) * PANEL);
                add_offsets(mem.offset, w.sums + neuron, PANEL);
            }
            gemm<D>(typed, s.dp, rows, &segment, 1, mem.tile, PANEL, w.panel_bytes);
            Finished<D> f = {mem.tile, mem.offset, w.scale + neuron, typed_scale};
            if constexpr (D == I8)
                store_hidden<D>(s.activation, f, rows, w.bias + neuron, mem.wide + at, width, mem.most);
            else store_hidden<D>(s.activation, f, rows, w.bias + neuron, mem.hidden + at, width, nullptr);
        }
    const Packed& w = layer.down;
    if constexpr (D == I8) {
        for (int i = 0; i < rows; i++)
            mem.hidden_scale[i] = quantise(mem.wide + i * width, mem.hidden + i * width, (int)width, mem.most + i * W);
        memset(mem.offset, 0, sizeof(int32_t) * (size_t)s.dp);
        for (int r = 0; r < count; r++)
            for (int neuron = ranges[2 * r]; neuron < ranges[2 * r + 1]; neuron += PANEL)
                add_offsets(mem.offset, w.sums + (long)(neuron / PANEL) * s.dp, s.dp);
    }
    for (int column = 0; column < s.dp; column += PANEL) {
        const In* panel = (const In*)((const char*)w.panels + (long)(column / PANEL) * w.panel_bytes);
        for (int r = 0; r < count; r++)
            mem.segments[r] = {panel + (long)ranges[2 * r] * PANEL, ranges[2 * r + 1] - ranges[2 * r]};
        gemm<D>(mem.hidden, width, rows, mem.segments, count, mem.tile, PANEL, w.panel_bytes);
        Finished<D> f = {mem.tile, mem.offset + column, w.scale + column, mem.hidden_scale};
        add_product<D>(f, rows, w.bias + column, y + column, out + column, s.dp);
    }
}

// Runs of neurons that a list of blocks of `size` stands for; neighbouring blocks become one run.
BF_INLINE int runs_of(const int32_t* list, int n, int size, int32_t* ranges) {
    int count = 0;
    for (int i = 0; i < n; i++) {
        const int first = list[i] * size;
        if (count && ranges[2 * count - 1] == first) {
            ranges[2 * count - 1] += size;
        } else {
            ranges[2 * count] = first;
            ranges[2 * count + 1] = first + size;
            count++;
        }
    }
    return count;
}

// Rows up to what the feed-forward layer reads: y = residual after attention, and inner and typed of it.
template <int D>
static void first_half(const Job& job, int layer_number, int input, long first, long last, float* y, float* inner,
                       typename Tag<D>::In* typed, float* typed_scale, RowsMemory<D>& mem) {
    const Spec& s = job.m->s;
    const Layer& layer = job.m->layer[layer_number];
    for (long r = first, b = input; r < last;) {  // runs of inputs that chose the same heads
        const long at = r, owner = b;
        do {
            r = job.offsets[b + 1] < last ? job.offsets[b + 1] : last;
            if (r == job.offsets[b + 1]) b++;
        } while (r < last &&
                 same(job.heads + owner * s.H, job.heads_count[owner], job.heads + b * s.H, job.heads_count[b]));
        project<D>(job, layer, (int)owner, at, (int)(r - at), y + (at - first) * s.dp, mem);
    }
    const long total = last - first;
    if (s.pre_norm) normalise(y, inner, total, s.dp, s.d, s.dp, layer.ffn_gamma, layer.ffn_beta, s.eps);
    else normalise(y, y, total, s.dp, s.d, s.dp, layer.attention_gamma, layer.attention_beta, s.eps);
    for (long i = 0; i < total; i++) convert_row<D>(inner + i * s.dp, typed + i * s.dp, s.dp, typed_scale + i);
}

// The rest of the layer, and what the next one reads.
template <int D>
static void second_half(const Job& job, int layer_number, int input, long first, long last, const float* y,
                        const typename Tag<D>::In* typed, const float* typed_scale, RowsMemory<D>& mem) {
    const Spec& s = job.m->s;
    const Layer& layer = job.m->layer[layer_number];
    const bool some = job.ffn || job.routed_blocks;
    for (long r = first, b = input; r < last;) {  // runs of inputs that chose the same blocks
        const long at = r, owner = b;
        do {
            r = job.offsets[b + 1] < last ? job.offsets[b + 1] : last;
            if (r == job.offsets[b + 1]) b++;
        } while (r < last && (!some || same(job.block_list + owner * job.blocks, job.block_count[owner],
                                            job.block_list + b * job.blocks, job.block_count[b])));
        int count = 1;
        if (some) {
            const int size = job.blocks > 1 ? s.f / job.blocks : layer.fp;
            count = runs_of(job.block_list + owner * job.blocks, job.block_count[owner], size, mem.ranges);
        } else {
            mem.ranges[0] = 0;
            mem.ranges[1] = layer.fp;
        }
        const long skip = at - first;
        feed_forward<D>(s, layer, (int)(r - at), mem.ranges, count, y + skip * s.dp, typed + skip * s.dp,
                        typed_scale + skip, job.x + at * s.dp, mem);
    }
    float* x = job.x + first * s.dp;
    if (!s.pre_norm) normalise(x, x, last - first, s.dp, s.d, s.dp, layer.ffn_gamma, layer.ffn_beta, s.eps);
    if (layer_number + 1 < s.layers) enter<D>(job, layer_number + 1, first, last);
}

template <int D>
static void rows(const Job& job, int layer, int input, long first, long last, Scratch& scratch) {
    RowsMemory<D> mem(scratch.memory, scratch.size, job.m->s, (int)(last - first), job.blocks);
    first_half<D>(job, layer, input, first, last, mem.y, mem.inner, mem.typed, mem.typed_scale, mem);
    second_half<D>(job, layer, input, first, last, mem.y, mem.typed, mem.typed_scale, mem);
}

// In halves, what passes between them lies where the layer's own input lay: attention is done with that.
template <int D>
static void rows_attention(const Job& job, int layer, int input, long first, long last, Scratch& scratch) {
    const Spec& s = job.m->s;
    RowsMemory<D> mem(scratch.memory, scratch.size, s, (int)(last - first), job.blocks);
    first_half<D>(job, layer, input, first, last, job.x + first * s.dp, job.inner + first * s.dp,
                  (typename Tag<D>::In*)job.typed + first * s.dp, job.typed_scale + first, mem);
}

template <int D>
static void rows_blocks(const Job& job, int layer, int input, long first, long last, Scratch& scratch) {
    const Spec& s = job.m->s;
    RowsMemory<D> mem(scratch.memory, scratch.size, s, (int)(last - first), job.blocks);
    second_half<D>(job, layer, input, first, last, job.x + first * s.dp,
                   (const typename Tag<D>::In*)job.typed + first * s.dp, job.typed_scale + first, mem);
}

}  // namespace
}  // namespace bf
