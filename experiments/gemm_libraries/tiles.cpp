// Which register tile, does blocking K help, and how to cut few rows? Hot weights.
#include "problem.hpp"

template <class T> void tiles(Bench& b, const char* type, const char* what, int M, int N, int nseg, int Kseg, std::vector<int> chunks) {
    Problem<T> p(type, what, M, N, nseg, Kseg);
    first(b, p);
    variant<T, 8, 2>(b, p, "8x32"); variant<T, 10, 2>(b, p, "10x32"); variant<T, 12, 2>(b, p, "12x32"); variant<T, 14, 2>(b, p, "14x32");
    variant<T, 12, 2>(b, p, "12x32 and a rest", 0, false); variant<T, 8, 3>(b, p, "8x48"); variant<T, 6, 4>(b, p, "6x64");
    Problem<V32> v(type, what, M, N, nseg, Kseg);
    if constexpr (std::is_same<T, F32>::value) {
        variant<V32, 8, 2>(b, v, "8x32 vector extensions"); variant<V32, 12, 2>(b, v, "12x32 vector extensions");
    }
    for (int c : chunks) {
        std::string k = " KC=" + std::to_string(c * Kseg);
        variant<T, 8, 2>(b, p, "8x32" + k, c); variant<T, 12, 2>(b, p, "12x32" + k, c);
        variant<T, 14, 2>(b, p, "14x32" + k, c); variant<T, 8, 3>(b, p, "8x48" + k, c);
    }
    b.run();
}
template <class T> void rows(Bench& b, const char* type) {
    for (int M : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 18, 20, 23, 25, 28, 33, 40, 50, 64}) {
        Problem<T> p(type, "rows", M, 192, 1, 384);
        first(b, p);
        variant<T, 8, 2>(b, p, "8x32"); variant<T, 10, 2>(b, p, "10x32"); variant<T, 12, 2>(b, p, "12x32"); variant<T, 14, 2>(b, p, "14x32");
        variant<T, 8, 3>(b, p, "8x48"); variant<T, 6, 4>(b, p, "6x64"); variant<T, 4, 6>(b, p, "4x96");
        b.run();
    }
}
template <class T> void all(Bench& b, const char* type, std::vector<int> chunks) {
    tiles<T>(b, type, "FFN2", 64, 384, 12, 128, chunks);
    tiles<T>(b, type, "FFN1", 64, 1536, 1, 384, {});
    tiles<T>(b, type, "QKV", 128, 96, 1, 384, {});
    tiles<T>(b, type, "QKV", 32, 96, 1, 384, {});
    tiles<T>(b, type, "O", 64, 384, 3, 32, {});
    tiles<T>(b, type, "QKV", 10, 96, 1, 384, {});
    rows<T>(b, type);
}
int main(int argc, char** argv) {
    Bench b(argc, argv);
    all<F32>(b, "fp32", {1, 2, 3}); all<BF16>(b, "bf16", {2, 3, 4}); all<U8S8>(b, "int8", {3, 6});
}
