// A product with known answer, its weights packed for any panel width, and our variants to time on it.
#pragma once
#include <sys/mman.h>
#include <map>
#include <memory>
#include <random>
#include "harness.hpp"
#include "kernels.hpp"
#include "prototype.hpp"

template <class X> void fill(X* p, size_t n) {
    static std::mt19937 g(1);
    for (size_t i = 0; i < n; i++) {
        int v = int(g() % 15) - 7; // small whole numbers: every kernel must give the same sums exactly
        if constexpr (sizeof(X) == 4) p[i] = v;
        else if constexpr (sizeof(X) == 2) { float f = v; uint32_t u; memcpy(&u, &f, 4); p[i] = u >> 16; }
        else p[i] = std::is_signed<X>::value ? v : v + 7;
    }
}
template <class X> float value(X v) {
    if constexpr (sizeof(X) == 2) { uint32_t u = (uint32_t)v << 16; float f; memcpy(&f, &u, 4); return f; }
    else return v;
}

template <class T> struct Problem {
    typedef typename T::A A; typedef typename T::B B; typedef typename T::C C;
    typedef const B* const* Panels; // [N / width][nseg]
    int M, N, nseg, Kseg, K, copies;
    std::string shape;
    A* a; std::vector<B> plain; std::vector<C> want, got;
    bool huge = false; // pack the weights into 2 MiB pages
    struct Packed { B* memory; std::vector<const B*> panels; };
    std::map<int, Packed> packed; // by panel width
    // megabytes: size of all copies of the weights, 0 for one copy that stays in the cache
    Problem(const char* type, const char* what, int M, int N, int nseg, int Kseg, double megabytes = 0)
        : M(M), N(N), nseg(nseg), Kseg(Kseg), K(nseg * Kseg), plain((size_t)K * N), want((size_t)M * N), got((size_t)M * N) {
        copies = 1 + megabytes * 1e6 / (double(K) * N * sizeof(B));
        shape = std::string(type) + " " + what + " " + std::to_string(M) + "x" + std::to_string(N) + "x" + std::to_string(K);
        if (megabytes) shape += " of " + std::to_string(int(megabytes + .5)) + " MB";
        a = (A*)aligned_alloc(4096, ((size_t)M * K * sizeof(A) + 4095) / 4096 * 4096);
        fill(a, (size_t)M * K); fill(plain.data(), plain.size());
        std::vector<float> af((size_t)M * K), bf(plain.size()), sum(N);
        for (size_t i = 0; i < af.size(); i++) af[i] = value(a[i]);
        for (size_t i = 0; i < bf.size(); i++) bf[i] = value(plain[i]);
        for (int m = 0; m < M; m++) {
            std::fill(sum.begin(), sum.end(), 0.f);
            for (int k = 0; k < K; k++) for (int n = 0; n < N; n++) sum[n] += af[(long)m * K + k] * bf[(long)k * N + n];
            for (int n = 0; n < N; n++) want[(long)m * N + n] = sum[n];
        }
    }
    Problem(const Problem&) = delete;
    ~Problem() { free(a); for (auto& x : packed) free(x.second.memory); }
    // Gives the panels of another copy at each call.
    std::function<Panels()> weights(int width) {
        constexpr int KP = T::KP;
        auto& x = packed[width];
        if (x.panels.empty()) {
            const size_t page = huge ? 2 << 20 : 4096, size = ((size_t)copies * K * N * sizeof(B) + 65536 + page - 1) / page * page;
            B* p = x.memory = (B*)aligned_alloc(page, size); // the end is readable for tiles that fetch ahead
            if (huge) madvise(p, size, MADV_HUGEPAGE);
            for (int copy = 0; copy < copies; copy++)
                for (int n = 0; n < N; n += width)
                    for (int s = 0; s < nseg; s++, p += (size_t)Kseg * width) {
                        x.panels.push_back(p);
                        for (int k = 0; k < Kseg; k++)
                            for (int j = 0; j < width; j++) p[(k / KP * width + j) * KP + k % KP] = plain[((size_t)s * Kseg + k) * N + n + j];
                    }
        }
        auto turn = std::make_shared<int>(0);
        int each = N / width * nseg;
        return [&x, turn, each, this] { return x.panels.data() + (size_t)((*turn)++ % copies) * each; };
    }
    bool check(const std::string& name) {
        bool right = got == want;
        if (!right) printf("%s: WRONG on %s\n", name.c_str(), shape.c_str());
        std::fill(got.begin(), got.end(), C(77));
        return right;
    }
    template <class F> void add(Bench& b, const std::string& name, F f) { // checked once, then timed
        f();
        if (check(name)) b.add(name, 2. * M * N * K, f);
    }
};
template <class T, int MR, int NV, int AHEAD = NOTHING>
void variant(Bench& b, Problem<T>& p, const std::string& name, int chunk = 0, bool even = true, long distance = 0) {
    if (p.N % (16 * NV)) return;
    p.add(b, name, [&p, chunk, even, distance, w = p.weights(16 * NV)] {
        gemm<T, MR, NV, AHEAD>(p.a, p.K, p.M, p.N, w(), p.nseg, p.Kseg, p.got.data(), p.N, chunk, even, distance);
    });
}
template <class T> void first(Bench& b, Problem<T>& p) { // what the others are compared with
    b.shape(p.shape);
    p.add(b, "prototype 8x32", [&p, w = p.weights(32)] { prototype(p.a, p.K, p.M, p.N, w(), p.nseg, p.Kseg, p.got.data()); });
}
