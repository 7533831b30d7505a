// The one product everything is made of: rows of activations times a panel of 32 outputs, over segments of K.
//
// A panel may be given as several segments, each a contiguous run of K: the chosen heads of an output projection or
// the chosen blocks of a feed-forward layer. No weight is gathered and nothing is added up through memory twice.
// Row i of a product is the same sum in the same order whatever rows stand beside it, so an input's answer does not
// depend on its batch, bit by bit.
#pragma once
#include "simd.hpp"

namespace bf {
namespace {

#if defined(__AVX512F__)
constexpr int TILE = 12, LANES = 2;  // 24 accumulators, 2 vectors of weights, 32 registers
#elif defined(__AVX2__)
constexpr int TILE = 6, LANES = 2;  // 12 accumulators, 2 vectors of weights, 16 registers
#else
constexpr int TILE = 4, LANES = 2;
#endif
constexpr int PARTS = PANEL / (LANES * W);  // a panel is done in so many strips of columns

struct Segment {
    const void* weights;  // [depth / G][32][G]
    long depth;           // a multiple of G
};

// Where the next product's weights lie, seen from this one's: while a panel is worked through, the next is fetched.
// Weights come from the third cache or memory when many models' worth of them pass; unfetched, that costs a fifth.
struct Ahead {
    long distance;    // bytes
    int part, parts;  // each tile of rows fetches its part
};

template <int D, int M>
static __attribute__((noinline)) void tile(const typename Tag<D>::In* a, long lda, const Segment* segments, int count,
                                           typename Tag<D>::Acc* c, long ldc, Ahead ahead) {
    using T = Tag<D>;
    constexpr int G = T::G;
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; part++) {
        const int column = part * LANES * W;
        typename T::V acc[M][LANES];
#pragma GCC unroll 16
        for (int i = 0; i < M; i++)
#pragma GCC unroll 2
            for (int v = 0; v < LANES; v++) acc[i][v] = typename T::V{};
        const typename T::In* row = a;
        for (int s = 0; s < count; s++) {
            const typename T::In* b = (const typename T::In*)segments[s].weights + column * G;
            const long depth = segments[s].depth, bytes = depth * PANEL * (long)sizeof(*b);
            const char* next = (const char*)segments[s].weights + ahead.distance + bytes / ahead.parts * ahead.part;
            const long step = PANEL * G * (long)sizeof(*b) / ahead.parts;
            for (long k = 0; k < depth; k += G, b += PANEL * G, next += step) {
                if (part == 0) {
                    __builtin_prefetch(next);
                    __builtin_prefetch(next + 64);
                }
#pragma GCC unroll 16
                for (int i = 0; i < M; i++) {
                    const auto x = T::spread(row + i * lda + k);
#pragma GCC unroll 2
                    for (int v = 0; v < LANES; v++) acc[i][v] = T::dot(acc[i][v], x, b + v * W * G);
                }
            }
            row += depth;
        }
#pragma GCC unroll 16
        for (int i = 0; i < M; i++)
#pragma GCC unroll 2
            for (int v = 0; v < LANES; v++) store(c + i * ldc + column + v * W, acc[i][v]);
    }
}

template <int D>
using TileFunction = void (*)(const typename Tag<D>::In*, long, const Segment*, int, typename Tag<D>::Acc*, long,
                              Ahead);

template <int D>
static constexpr TileFunction<D> TILES[] = {
    nullptr,    tile<D, 1>, tile<D, 2>, tile<D, 3>,  tile<D, 4>,
#if defined(__AVX2__)
    tile<D, 5>, tile<D, 6>,
#endif
#if defined(__AVX512F__)
    tile<D, 7>, tile<D, 8>, tile<D, 9>, tile<D, 10>, tile<D, 11>, tile<D, 12>,
#endif
};

// c[rows][32] = a[rows][K] times the panel given by `segments`; rows are split evenly into tiles. Panels are not cut
// along K: with the whole panel streaming from the second cache the products run as fast (measured), and C is written
// once.
template <int D>
static void gemm(const typename Tag<D>::In* a, long lda, int rows, const Segment* segments, int count,
                 typename Tag<D>::Acc* c, long ldc = PANEL, long distance = 0) {
    const int tiles = (rows + TILE - 1) / TILE;
    for (int t = 0, r = 0; t < tiles; t++) {
        const int m = rows / tiles + (t < rows % tiles);
        TILES<D>[m](a + r* lda, lda, segments, count, c + r* ldc, ldc, {distance, t, tiles});
        r += m;
    }
}

}  // namespace
}  // namespace bf
