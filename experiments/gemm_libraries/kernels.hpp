// Candidate micro-kernels: MR rows times NV*16 columns of C in registers, weights packed in panels.
//
// Panel of one K-segment: [K/KP][NV*16][KP] with KP values of k next to each other (fp32 1, bf16 2, int8 4).
// C[M][N] = sum over segments s of A[:, s*Kseg : (s+1)*Kseg] * B_s, fp32 or int32, no epilogue.
#pragma once
#include <immintrin.h>
#include <cstdint>
#include <cstring>
#include <utility>

#define INL static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

struct F32 {
    typedef float A; typedef float B; typedef float C; typedef __m512 Acc;
    static constexpr int KP = 1;
    INL Acc zero() { return _mm512_setzero_ps(); }
    INL Acc load(const C* p) { return _mm512_loadu_ps(p); }
    INL void store(C* p, Acc v) { _mm512_storeu_ps(p, v); }
    typedef __m512 Vb;
    INL Vb loadb(const B* p) { return _mm512_loadu_ps(p); }
    INL Vb bcast(const A* p) { return _mm512_set1_ps(*p); }
    INL Acc step(Acc c, Vb a, Vb b) { return _mm512_fmadd_ps(a, b, c); }
};
struct V32 { // GCC vector extensions in place of intrinsics
    typedef float A; typedef float B; typedef float C;
    typedef float Acc __attribute__((vector_size(64))); typedef float U __attribute__((vector_size(64), aligned(4)));
    static constexpr int KP = 1;
    INL Acc zero() { return Acc{}; }
    INL Acc load(const C* p) { return *(const U*)p; }
    INL void store(C* p, Acc v) { *(U*)p = v; }
    typedef Acc Vb;
    INL Vb loadb(const B* p) { return *(const U*)p; }
    INL float bcast(const A* p) { return *p; }
    INL Acc step(Acc c, float a, Vb b) { return c + a * b; }
};
struct BF16 {
    typedef uint16_t A; typedef uint16_t B; typedef float C; typedef __m512 Acc;
    static constexpr int KP = 2;
    INL Acc zero() { return _mm512_setzero_ps(); }
    INL Acc load(const C* p) { return _mm512_loadu_ps(p); }
    INL void store(C* p, Acc v) { _mm512_storeu_ps(p, v); }
    typedef __m512bh Vb;
    INL Vb loadb(const B* p) { return (Vb)_mm512_loadu_si512(p); }
    INL Vb bcast(const A* p) { int32_t w; memcpy(&w, p, 4); return (Vb)_mm512_set1_epi32(w); }
    INL Acc step(Acc c, Vb a, Vb b) { return _mm512_dpbf16_ps(c, a, b); }
};
struct U8S8 {
    typedef uint8_t A; typedef int8_t B; typedef int32_t C; typedef __m512i Acc;
    static constexpr int KP = 4;
    INL Acc zero() { return _mm512_setzero_si512(); }
    INL Acc load(const C* p) { return _mm512_loadu_si512(p); }
    INL void store(C* p, Acc v) { _mm512_storeu_si512(p, v); }
    typedef __m512i Vb;
    INL Vb loadb(const B* p) { return _mm512_loadu_si512(p); }
    INL Vb bcast(const A* p) { int32_t w; memcpy(&w, p, 4); return _mm512_set1_epi32(w); }
    INL Acc step(Acc c, Vb a, Vb b) { return _mm512_dpbusd_epi32(c, a, b); }
};

// PF: lines of `ahead` to fetch per two steps of k (0: none); HINT: into which cache.
template <class T, int MR, int NV, bool ADD, int PF, int HINT>
static __attribute__((noinline)) void tile(const typename T::A* A, long lda, const typename T::B* const* Bs, int nseg, int Kseg,
                                           typename T::C* C, long ldc, const char* ahead) {
    typename T::Acc c[MR][NV];
    UNROLL for (int i = 0; i < MR; i++)
        UNROLL for (int j = 0; j < NV; j++) c[i][j] = ADD ? T::load(C + i * ldc + j * 16) : T::zero();
    constexpr int W = 16 * T::KP; // elements of one vector of B
    for (int s = 0; s < nseg; s++) {
        const typename T::B* b = Bs[s];
        const typename T::A* a = A + (long)s * Kseg;
        auto one = [&](int k) __attribute__((always_inline)) {
            typename T::Vb v[NV];
            UNROLL for (int j = 0; j < NV; j++) v[j] = T::loadb(b + j * W);
            b += NV * W;
            UNROLL for (int i = 0; i < MR; i++) {
                auto x = T::bcast(a + i * lda + k);
                UNROLL for (int j = 0; j < NV; j++) c[i][j] = T::step(c[i][j], x, v[j]);
            }
        };
        if constexpr (PF > 0) {
            for (int k = 0; k < Kseg; k += 2 * T::KP) {
                UNROLL for (int l = 0; l < PF; l++) _mm_prefetch(ahead + 64 * l, (_mm_hint)HINT);
                ahead += 64 * PF;
                one(k); one(k + T::KP);
            }
        } else
            for (int k = 0; k < Kseg; k += T::KP) one(k);
    }
    UNROLL for (int i = 0; i < MR; i++)
        UNROLL for (int j = 0; j < NV; j++) T::store(C + i * ldc + j * 16, c[i][j]);
}
template <class T> using Fn = void (*)(const typename T::A*, long, const typename T::B* const*, int, int, typename T::C*, long, const char*);
// The tiles of 1 to MR rows.
template <class T, int NV, bool ADD, int PF, int HINT, int... I> const Fn<T>* table(std::integer_sequence<int, I...>) {
    static constexpr Fn<T> t[] = {nullptr, tile<T, I + 1, NV, ADD, PF, HINT>...};
    return t;
}
enum Ahead { NOTHING, PANEL, PANEL_L2, STREAM, STREAM_L2 };
// chunk: K-segments that are accumulated before C goes back to memory (0 = all). even: rows spread evenly over the
// tiles, instead of full tiles and a rest. ahead: PANEL, the tiles of a panel fetch the next one between them, each
// 1, 2 or 4 lines per two steps of k; STREAM, the first tile fetches its own panel `distance` bytes ahead.
template <class T, int MR, int NV, int AHEAD = NOTHING>
void gemm(const typename T::A* A, long lda, int M, int N, const typename T::B* const* panels, int nseg, int Kseg,
          typename T::C* C, long ldc, int chunk, bool even, long distance = 0) {
    constexpr auto rows = std::make_integer_sequence<int, MR>();
    constexpr int HINT = AHEAD == PANEL_L2 || AHEAD == STREAM_L2 ? _MM_HINT_T1 : _MM_HINT_T0;
    constexpr bool panel = AHEAD == PANEL || AHEAD == PANEL_L2, stream = AHEAD == STREAM || AHEAD == STREAM_L2;
    const Fn<T>* plain = table<T, NV, false, 0, HINT>(rows);
    const Fn<T>* more = plain;
    if constexpr (AHEAD == NOTHING) more = table<T, NV, true, 0, HINT>(rows);
    if (chunk == 0) chunk = nseg;
    int tiles = even ? (M + MR - 1) / MR : M / MR + (M % MR > 0), base = M / tiles, extra = M % tiles;
    int lines = stream || tiles < 2 ? 2 * NV : tiles < 4 ? NV : (NV + 1) / 2, sharers = stream ? 1 : (2 * NV + lines - 1) / lines;
    const Fn<T>* fetch = plain;
    if constexpr (panel)
        fetch = tiles < 2   ? table<T, NV, false, 2 * NV, HINT>(rows)
                : tiles < 4 ? table<T, NV, false, NV, HINT>(rows)
                            : table<T, NV, false, (NV + 1) / 2, HINT>(rows);
    if constexpr (stream) fetch = table<T, NV, false, 2 * NV, HINT>(rows);
    for (int p = 0; p < N / (16 * NV); p++)
        for (int s = 0; s < nseg; s += chunk) {
            int n = chunk < nseg - s ? chunk : nseg - s;
            const typename T::B* const* Bs = panels + (long)p * nseg + s;
            long share = (long)n * Kseg / T::KP / 2 * 64 * lines;
            const char* ahead = stream ? (const char*)Bs[0] + distance : (const char*)Bs[n - 1] + (long)Kseg * NV * 16 * sizeof(typename T::B);
            for (int m = 0, t = 0; m < M; t++) {
                int r = even ? base + (t < extra) : (M - m < MR ? M - m : MR);
                Fn<T> f = s ? more[r] : t < sharers ? fetch[r] : plain[r];
                f(A + (long)m * lda + (long)s * Kseg, lda, Bs, n, Kseg, C + (long)m * ldc + p * NV * 16, ldc, ahead + t * share);
                m += r;
            }
        }
}
