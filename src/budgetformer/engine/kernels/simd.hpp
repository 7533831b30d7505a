// Vectors of floats as wide as the instruction set at hand, and the few functions of them that a transformer needs.
//
// Written in the compiler's own vector type, so that one source serves every width; intrinsics stand only where the
// type has no operator: dot products of bf16 and int8, conversions, sums over lanes.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "model.hpp"

namespace bf {
namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef float vf_memory __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t vi_memory __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint16_t vh_memory __attribute__((vector_size(W * 2), aligned(2), may_alias));
typedef uint8_t vb_memory __attribute__((vector_size(W), aligned(1), may_alias));

#define BF_INLINE static inline __attribute__((always_inline))
// Passes over finished tiles stay out of line: inlined into a micro-kernel they cost it its registers.
#define BF_PASS static __attribute__((noinline))

BF_INLINE vf load(const float* p) { return *(const vf_memory*)p; }
BF_INLINE vi load(const int32_t* p) { return *(const vi_memory*)p; }
BF_INLINE void store(float* p, vf v) { *(vf_memory*)p = v; }
BF_INLINE void store(int32_t* p, vi v) { *(vi_memory*)p = v; }
BF_INLINE vf set1(float x) { return x - vf{}; }
BF_INLINE vi set1(int32_t x) { return x - vi{}; }
BF_INLINE vf bits(vi v) { return (vf)v; }
BF_INLINE vi bits(vf v) { return (vi)v; }
BF_INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }

#if defined(__AVX512F__)
BF_INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
BF_INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
BF_INLINE float sum(vf v) { return _mm512_reduce_add_ps((__m512)v); }
BF_INLINE float highest(vf v) { return _mm512_reduce_max_ps((__m512)v); }
#else
BF_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
BF_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
BF_INLINE float sum(vf v) {
    for (int n = W / 2; n; n /= 2)
        for (int i = 0; i < n; i++) v[i] += v[i + n];
    return v[0];
}
BF_INLINE float highest(vf v) {
    for (int n = W / 2; n; n /= 2)
        for (int i = 0; i < n; i++) v[i] = v[i] > v[i + n] ? v[i] : v[i + n];
    return v[0];
}
#endif
BF_INLINE vf vabs(vf v) { return bits(bits(v) & 0x7fffffff); }

// Sums and maxima over n numbers run in four vectors: in one, each step would wait for the one before.
template <class At>
BF_INLINE vf sum_over(int n, At at) {
    vf t[4] = {};
    int i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) t[u] += at(i + u * W);
    for (; i < n; i += W) t[0] += at(i);
    return (t[0] + t[1]) + (t[2] + t[3]);
}
template <class At>
BF_INLINE vf highest_over(int n, vf low, At at) {
    vf t[4] = {low, low, low, low};
    int i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) t[u] = vmax(t[u], at(i + u * W));
    for (; i + W <= n; i += W) t[0] = vmax(t[0], at(i));
    return vmax(vmax(t[0], t[1]), vmax(t[2], t[3]));
}

// 2^x; relative error below 2e-7 for x in [-126, 126], 0 or as good as 0 below.
#if defined(__AVX512F__)
BF_INLINE vf exp2_(vf x) {
    const vf whole = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vf f = x - whole;
    vf p = f * 1.5403530e-4f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.f;
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)whole);
}
#else
BF_INLINE vf exp2_(vf x) {
    x = vmin(vmax(x, set1(-126.f)), set1(126.f));
    const vf magic = set1(12582912.f);  // 1.5 * 2^23: adding it rounds to a whole number, which is then in the low bits
    vf shifted = x + magic;
    vf f = x - (shifted - magic);
    vf p = set1(1.5403530e-4f);
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.f;
    return bits(bits(p) + ((bits(shifted) - bits(magic)) << 23));
}
#endif
#if defined(__AVX512DQ__)
// The same where the result is rounded to bf16 at once: relative error below 8e-5, a twentieth of that rounding's.
BF_INLINE vf exp2_rough(vf x) {
    const vf f = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
    vf p = f * 0.07802452f + 0.22606717f;
    p = p * f + 0.69583353f;
    p = p * f + 0.99992522f;
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);  // p 2^floor(x)
}
#endif
constexpr float LOG2E = 1.44269504f;
BF_INLINE vf sigmoid(vf x) { return 1.f / (1.f + exp2_(x * -LOG2E)); }
BF_INLINE vf tanh_(vf x) {
    // Odd and saturating: 1 - 2 / (1 + e^2x), of |x| so that nothing cancels for negative x; near 0 by its series.
    vf a = vabs(x);
    vf big = 1.f - 2.f / (1.f + exp2_(vmin(a, set1(20.f)) * (2.f * LOG2E)));
    vf q = x * x;
    vf small = a * (1.f + q * (-0.33333333f + q * (0.13333333f + q * -0.05396825f)));
    vf r = a < 0.1f ? small : big;
    return bits(bits(r) | (bits(x) & (int32_t)0x80000000));
}
// x/2 (1 + erf(x / sqrt 2)), erf after Abramowitz and Stegun 7.1.26: absolute error of erf below 1.5e-7.
BF_INLINE vf gelu(vf x) {
    vf z = vabs(x) * 0.70710678f;
    vf t = 1.f / (z * 0.3275911f + 1.f);
    vf p = set1(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    p = p * t;
    vf erf = 1.f - p * exp2_(z * z * -LOG2E);
    erf = bits(bits(erf) | (bits(x) & (int32_t)0x80000000));
    vf half = x * 0.5f;
    return half * erf + half;
}
// The same where the result is rounded to bf16 or int8 at once: x (1/2 + x P(x^2)), P fitted for the least largest
// error of the result on [-4.3, 4.3] and held at its ends beyond; absolute error below 6e-5, and no division.
BF_INLINE vf gelu_rough(vf x) {
    vf z = vmin(vmax(x, set1(-4.3f)), set1(4.3f));
    vf q = z * z;
    vf p = q * 4.2021719e-11f - 4.2526744e-9f;
    p = p * q + 1.9034248e-7f;
    p = p * q - 5.0082129e-6f;
    p = p * q + 8.7138020e-5f;
    p = p * q - 1.0715040e-3f;
    p = p * q + 9.6955215e-3f;
    p = p * q - 6.6156177e-2f;
    p = p * q + 0.39880261f;
    return x * (z * p + 0.5f);
}
BF_INLINE vf gelu_tanh(vf x) { return 0.5f * x * (1.f + tanh_(0.79788456f * (x + 0.044715f * x * x * x))); }

template <int A, bool ROUGH>
BF_INLINE vf activate(vf x) {
    if constexpr (A == GELU) return ROUGH ? gelu_rough(x) : gelu(x);
    if constexpr (A == GELU_TANH) return gelu_tanh(x);
    if constexpr (A == RELU) return vmax(x, vf{});
    if constexpr (A == SILU) return x * sigmoid(x);
    return tanh_(x);
}

// ---- the engine's three types ---------------------------------------------------------------------------------
// Tag<D>::In is how activations and weights lie in memory, Acc what products are added up in, G how many k one
// instruction takes; `dot` adds G products to each lane, `spread` gives every lane the same G activations.

template <int D>
struct Tag;

template <>
struct Tag<F32> {
    using In = float;
    using Acc = float;
    using V = vf;
    static constexpr int G = 1;
    BF_INLINE V spread(const In* a) { return set1(*a); }
    BF_INLINE V dot(V c, V a, const In* b) { return a * load(b) + c; }
};

#if defined(__AVX512BF16__)
#define BF_HAS_BF16 1
template <>
struct Tag<BF16> {
    using In = uint16_t;
    using Acc = float;
    using V = vf;
    static constexpr int G = 2;
    BF_INLINE vi spread(const In* a) {
        int32_t pair;
        memcpy(&pair, a, 4);
        return set1(pair);
    }
    BF_INLINE V dot(V c, vi a, const In* b) {
        return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)_mm512_loadu_si512(b));
    }
};
BF_INLINE void store_as(uint16_t* p, vf v) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v)); }
BF_INLINE vf load_as(const uint16_t* p) {
    return bits((vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)) << 16);
}
BF_INLINE vi bf16_bits(vf v) { return (vi)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)); }
#else
#define BF_HAS_BF16 0
#endif
BF_INLINE void store_as(float* p, vf v) { store(p, v); }
BF_INLINE vf load_as(const float* p) { return load(p); }

// int8: weights in [-127, 127]. With VNNI, activations are stored with 128 added, as the instruction wants them
// unsigned; what that adds is taken away through the weights' sums. Every path gets the same whole numbers.
template <>
struct Tag<I8> {
    using In = uint8_t;
    using Acc = int32_t;
    using V = vi;
    static constexpr int G = 4;
    BF_INLINE vi spread(const In* a) {
        int32_t four;
        memcpy(&four, a, 4);
        return set1(four);
    }
#if defined(__AVX512VNNI__)
    static constexpr int OFFSET = 128;
    BF_INLINE V dot(V c, vi a, const In* b) {
        return (vi)_mm512_dpbusd_epi32((__m512i)c, (__m512i)a, _mm512_loadu_si512(b));
    }
#elif defined(__AVX2__)
    static constexpr int OFFSET = 0;
    BF_INLINE V dot(V c, vi a, const In* b) {
        // |a| is unsigned, and b takes a's sign: 2 * 127 * 127 fits into 16 bits, so nothing saturates.
        __m256i signed_b = _mm256_sign_epi8(_mm256_loadu_si256((const __m256i*)b), (__m256i)a);
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)a), signed_b);
        return c + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
#else
    static constexpr int OFFSET = 0;
    BF_INLINE V dot(V c, vi a, const In* b) {
        int8_t x[4];
        int32_t first = a[0];
        memcpy(x, &first, 4);
        for (int j = 0; j < W; j++) {
            int32_t s = 0;
            for (int g = 0; g < 4; g++) s += x[g] * (int8_t)b[4 * j + g];
            c[j] += s;
        }
        return c;
    }
#endif
};

// The type in which attention itself (scores, average) is computed: int8 products are for weights alone.
template <int D>
struct Core {
    static constexpr int type = D == I8 && BF_HAS_BF16 ? (int)BF16 : (D == I8 ? (int)F32 : D);
};

}  // namespace
}  // namespace bf
