// Weights that come from L3 or memory, as in a model: each call uses the next of many copies. Does prefetching pay?
#include "problem.hpp"

template <class T> void one(Bench& b, const char* type, const char* what, int M, int N, int nseg, int Kseg, double mb) {
    Problem<T> p(type, what, M, N, nseg, Kseg, mb), h(type, what, M, N, nseg, Kseg, mb);
    h.huge = true;
    first(b, p);
    variant<T, 8, 2>(b, p, "8x32");
    variant<T, 8, 2, PANEL>(b, p, "8x32 next panel");
    variant<T, 12, 2>(b, p, "12x32");
    variant<T, 12, 2, PANEL>(b, p, "12x32 next panel");
    variant<T, 12, 2, PANEL_L2>(b, p, "12x32 next panel to L2");
    for (long d : {4096, 8192, 16384}) variant<T, 12, 2, STREAM>(b, p, "12x32 own panel +" + std::to_string(d), 0, true, d);
    if (mb) {
        variant<T, 12, 2>(b, h, "12x32, huge pages");
        variant<T, 12, 2, PANEL>(b, h, "12x32 next panel, huge pages");
        variant<T, 12, 2, STREAM>(b, h, "12x32 own panel +16384, huge pages", 0, true, 16384);
    }
    b.run();
}
template <class T> void all(Bench& b, const char* type, double model) {
    for (double mb : {0., model, 100.}) // hot; the encoder weights of a MiniLM; more than any cache
        for (int M : {10, 20, 32, 64}) {
            one<T>(b, type, "FFN2", M, 384, 12, 128, mb);
            one<T>(b, type, "FFN1", M, 1536, 1, 384, mb);
            one<T>(b, type, "QKV", M, 96, 1, 384, mb);
        }
}
int main(int argc, char** argv) {
    Bench b(argc, argv);
    all<F32>(b, "fp32", 43);
    all<BF16>(b, "bf16", 21);
    all<U8S8>(b, "int8", 11);
}
