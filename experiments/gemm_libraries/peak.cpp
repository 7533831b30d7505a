// Register-only peak rates of one core: what FMA, bf16 dot and int8 dot instructions can retire at best.
#include "harness.hpp"
#include <immintrin.h>
// Both loops over accumulators must unroll, or the compiler keeps them in memory and the rate halves.
#define UNROLL _Pragma("GCC unroll 32")
#define LOOP(N, STEP)                                       \
    for (long i = 0; i < 20000; i++) {                      \
        UNROLL for (int j = 0; j < N; j++) STEP; \
    }                                                      \
    UNROLL for (int j = 0; j < N; j++) asm volatile("" ::"v"(c[j]));
template <int N> static void fp32() {
    __m512 c[N], a = _mm512_set1_ps(1.f), b = _mm512_set1_ps(1e-6f);
    UNROLL for (int j = 0; j < N; j++) c[j] = _mm512_setzero_ps();
    LOOP(N, asm volatile("vfmadd231ps %2, %1, %0" : "+v"(c[j]) : "v"(a), "v"(b)))
}
template <int N> static void bf16() {
    __m512 c[N]; __m512i a = _mm512_set1_epi32(0x3f803f80);
    UNROLL for (int j = 0; j < N; j++) c[j] = _mm512_setzero_ps();
    LOOP(N, asm volatile("vdpbf16ps %1, %1, %0" : "+v"(c[j]) : "v"(a)))
}
template <int N> static void int8() {
    __m512i c[N], a = _mm512_set1_epi8(1);
    UNROLL for (int j = 0; j < N; j++) c[j] = _mm512_setzero_si512();
    LOOP(N, asm volatile("vpdpbusd %1, %1, %0" : "+v"(c[j]) : "v"(a)))
}
static void chain() { // latency of one dependent integer add is one cycle: the clock rate
    long x = 0;
    for (int i = 0; i < 20000; i++) asm volatile(".rept 16\n add $1, %0\n .endr" : "+r"(x));
}
int main(int argc, char** argv) {
    Bench b(argc, argv);
    b.shape("registers");
    b.add("clock (GHz, as GFLOP/s)", 20000. * 16, chain);
    auto all = [&](const char* name, double ops, auto f, int n) {
        b.add(std::string(name) + " " + std::to_string(n) + " accumulators", ops * n * 20000, f);
    };
    all("fp32 fma", 32, fp32<8>, 8); all("fp32 fma", 32, fp32<16>, 16); all("fp32 fma", 32, fp32<24>, 24);
    all("bf16 dpbf16", 64, bf16<8>, 8); all("bf16 dpbf16", 64, bf16<16>, 16); all("bf16 dpbf16", 64, bf16<24>, 24);
    all("int8 dpbusd", 128, int8<8>, 8); all("int8 dpbusd", 128, int8<16>, 16); all("int8 dpbusd", 128, int8<24>, 24);
    b.run();
}
