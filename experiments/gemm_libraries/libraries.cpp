// Micro-kernels of libraries against ours, in one process: libxsmm 1.17 (BRGEMM), oneDNN's micro-kernels through
// ATen's cpublas::brgemm, Google Highway and GCC vector extensions in our own tile.
#include "problem.hpp"
#include <ATen/native/CPUBlas.h>
#include <hwy/highway.h>
#include <libxsmm.h>
namespace hn = hwy::HWY_NAMESPACE;

struct HWY32 { // the same tile, written with Highway
    typedef float A; typedef float B; typedef float C;
    typedef hn::FixedTag<float, 16> D; typedef hn::Vec<D> Acc; typedef Acc Vb;
    static constexpr int KP = 1;
    INL Acc zero() { return hn::Zero(D()); }
    INL Acc load(const C* p) { return hn::LoadU(D(), p); }
    INL void store(C* p, Acc v) { hn::StoreU(v, D(), p); }
    INL Vb loadb(const B* p) { return hn::LoadU(D(), p); }
    INL Vb bcast(const A* p) { return hn::Set(D(), *p); }
    INL Acc step(Acc c, Vb a, Vb b) { return hn::MulAdd(a, b, c); }
};
#if HWY_MAJOR >= 1 && HWY_MINOR >= 1
struct HWY16 {
    typedef uint16_t A; typedef uint16_t B; typedef float C;
    typedef hn::FixedTag<float, 16> D; typedef hn::Vec<D> Acc; typedef hn::FixedTag<hwy::bfloat16_t, 32> DB; typedef hn::Vec<DB> Vb;
    static constexpr int KP = 2;
    INL Acc zero() { return hn::Zero(D()); }
    INL Acc load(const C* p) { return hn::LoadU(D(), p); }
    INL void store(C* p, Acc v) { hn::StoreU(v, D(), p); }
    INL Vb loadb(const B* p) { return hn::LoadU(DB(), (const hwy::bfloat16_t*)p); }
    INL Vb bcast(const A* p) { int32_t w; memcpy(&w, p, 4); return hn::BitCast(DB(), hn::Set(hn::FixedTag<int32_t, 16>(), w)); }
    INL Acc step(Acc c, Vb a, Vb b) { Acc rest = hn::Zero(D()); return hn::ReorderWidenMulAccumulate(D(), a, b, c, rest); }
};
struct HWY8 {
    typedef uint8_t A; typedef int8_t B; typedef int32_t C;
    typedef hn::FixedTag<int32_t, 16> D; typedef hn::Vec<D> Acc;
    typedef hn::FixedTag<int8_t, 64> DB; typedef hn::Vec<DB> Vb; typedef hn::FixedTag<uint8_t, 64> DA;
    static constexpr int KP = 4;
    INL Acc zero() { return hn::Zero(D()); }
    INL Acc load(const C* p) { return hn::LoadU(D(), p); }
    INL void store(C* p, Acc v) { hn::StoreU(v, D(), p); }
    INL Vb loadb(const B* p) { return hn::LoadU(DB(), p); }
    INL hn::Vec<DA> bcast(const A* p) { int32_t w; memcpy(&w, p, 4); return hn::BitCast(DA(), hn::Set(D(), w)); }
    INL Acc step(Acc c, hn::Vec<DA> a, Vb b) { return hn::SumOfMulQuadAccumulate(D(), a, b, c); }
};
#else // older ones have no bf16 or int8 dot product
typedef BF16 HWY16;
typedef U8S8 HWY8;
#endif
// oneDNN: one call per segment and panel, the sum held in C
template <class T> using Aten = std::conditional_t<std::is_same<T, BF16>::value, at::BFloat16, typename T::A>;
template <class T> using AtenB = std::conditional_t<std::is_same<T, BF16>::value, at::BFloat16, typename T::B>;
template <class T> void onednn(Bench& b, Problem<T>& p, int width) {
    std::string name = "oneDNN brgemm, panels of " + std::to_string(width);
    typedef const Aten<T>* PA; typedef const AtenB<T>* PB;
    auto call = [&p, width, w = p.weights(width)](int calls, int depth) { // calls per panel, each of depth values of k
        auto panels = w();
        for (int n = 0; n < p.N / width; n++)
            for (int s = 0; s < calls; s++)
                at::native::cpublas::brgemm(p.M, width, depth, p.K, width, p.N, s > 0, (PA)p.a + (long)s * depth,
                                             (PB)panels[n * p.nseg + s], p.got.data() + n * width, T::KP > 1);
    };
    p.add(b, name, [call, &p] { call(p.nseg, p.Kseg); });
    // No choice of segments: what one call for all of them would give.
    if (p.nseg > 1) p.add(b, name + ", all of K", [call, &p] { call(1, p.K); });
}
// libxsmm counts columns first: its A is our panel, its B is our A
template <class T> void xsmm(Bench& b, Problem<T>& p, int width) {
    std::string name = "libxsmm BRGEMM, panels of " + std::to_string(width);
    int lda = width, ldb = p.K, ldc = p.N, sa = p.Kseg * width * sizeof(typename T::B), sb = p.Kseg * sizeof(typename T::A);
    int flags = LIBXSMM_GEMM_FLAG_VNNI_A, one = 1, nil = 0;
    float onef = 1, nilf = 0;
    void* kernel;
    if constexpr (std::is_same<T, F32>::value) kernel = (void*)libxsmm_smmdispatch_reducebatch_strd(width, p.M, p.Kseg, sa, sb, &lda, &ldb, &ldc,
                                                              &onef, &nilf, nullptr, nullptr);
    else if constexpr (std::is_same<T, BF16>::value) kernel = (void*)libxsmm_bsmmdispatch_reducebatch_strd(width, p.M, p.Kseg, sa, sb, &lda, &ldb, &ldc,
                                                              &onef, &nilf, &flags, nullptr);
    else kernel = (void*)libxsmm_subimmdispatch_reducebatch_strd(width, p.M, p.Kseg, sa, sb, &lda, &ldb, &ldc, &one, &nil, &flags, nullptr);
    if (!kernel) { printf("%s: no kernel\n", name.c_str()); return; }
    typedef void (*Kernel)(const void*, const void*, void*, const unsigned long long*);
    p.add(b, name, [&p, width, call = (Kernel)kernel, w = p.weights(width)] {
        unsigned long long count = p.nseg;
        auto panels = w();
        for (int n = 0; n < p.N / width; n++) call(panels[n * p.nseg], p.a, p.got.data() + n * width, &count);
    });
}
template <class T, class Twin> void all(Bench& b, const char* type, const char* what, int M, int N, int nseg, int Kseg, double mb) {
    Problem<T> p(type, what, M, N, nseg, Kseg, mb);
    Problem<Twin> h(type, what, M, N, nseg, Kseg, mb); // the same tile, written with Highway
    Problem<V32> v(type, what, M, N, nseg, Kseg, mb);
    first(b, p);
    variant<T, 8, 2>(b, p, "8x32"); variant<T, 12, 2>(b, p, "12x32");
    if (mb) { variant<T, 8, 2, PANEL>(b, p, "8x32 next panel"); variant<T, 12, 2, PANEL>(b, p, "12x32 next panel"); }
    if constexpr (std::is_same<T, F32>::value) variant<V32, 12, 2>(b, v, "12x32 GCC vector extensions");
    if constexpr (!std::is_same<T, Twin>::value) variant<Twin, 12, 2>(b, h, "12x32 Highway");
    for (int width : {32, 64, 96})
        if (N % width == 0) { onednn<T>(b, p, width); xsmm<T>(b, p, width); }
    b.run();
}
template <class T, class Twin> void shapes(Bench& b, const char* type, double mb) {
    all<T, Twin>(b, type, "QKV", 32, 96, 1, 384, 0); all<T, Twin>(b, type, "QKV", 128, 96, 1, 384, 0);
    all<T, Twin>(b, type, "FFN1", 64, 1536, 1, 384, 0);
    all<T, Twin>(b, type, "FFN2", 64, 384, 12, 128, 0); all<T, Twin>(b, type, "O", 64, 384, 3, 32, 0);
    all<T, Twin>(b, type, "QKV", 10, 96, 1, 384, 0);
    for (int M : {10, 32, 64}) all<T, Twin>(b, type, "QKV", M, 96, 1, 384, mb); // cold
    all<T, Twin>(b, type, "FFN2", 64, 384, 12, 128, mb);
}
int main(int argc, char** argv) {
    libxsmm_init();
    printf("Highway %d.%d.%d for %s, libxsmm for %s\n", HWY_MAJOR, HWY_MINOR, HWY_PATCH, hwy::TargetName(HWY_TARGET), libxsmm_get_target_arch());
    for (auto t : {at::kFloat, at::kBFloat16, at::kByte, at::kChar})
        printf("oneDNN wants its own packing of %s: %s\n", c10::toString(t), at::native::cpublas::could_pack(t) ? "yes" : "no");
    Bench b(argc, argv);
    shapes<F32, HWY32>(b, "fp32", 43); shapes<BF16, HWY16>(b, "bf16", 21); shapes<U8S8, HWY8>(b, "int8", 11);
}
