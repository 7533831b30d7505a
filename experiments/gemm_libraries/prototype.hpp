// The 8x32 micro-kernel of the first prototype, word for word but for its int8 twin.
#pragma once
#include "kernels.hpp"
namespace proto {
typedef uint16_t bf;
template<int MR> INL void ukr(const float*A,long lda,const float*const*Bs,int nseg,int Kseg,long ldb,__m512 (&c)[MR][2]){
#pragma GCC unroll 8
  for(int i=0;i<MR;i++){c[i][0]=_mm512_setzero_ps();c[i][1]=_mm512_setzero_ps();}
  for(int s=0;s<nseg;s++){
    const float*b=Bs[s]; const float*a=A+(long)s*Kseg;
    for(int k=0;k<Kseg;k++){
      __m512 b0=_mm512_loadu_ps(b),b1=_mm512_loadu_ps(b+16); b+=ldb;
#pragma GCC unroll 8
      for(int i=0;i<MR;i++){__m512 av=_mm512_set1_ps(a[i*lda+k]); c[i][0]=_mm512_fmadd_ps(av,b0,c[i][0]); c[i][1]=_mm512_fmadd_ps(av,b1,c[i][1]);}
    }
  }
}
template<int MR> INL void ukr(const bf*A,long lda,const bf*const*Bs,int nseg,int Kseg,long ldb,__m512 (&c)[MR][2]){
  // ldb: elements between successive k (so k-pair stride = 2*ldb), pairs interleaved
#pragma GCC unroll 8
  for(int i=0;i<MR;i++){c[i][0]=_mm512_setzero_ps();c[i][1]=_mm512_setzero_ps();}
  for(int s=0;s<nseg;s++){
    const bf*b=Bs[s]; const bf*a=A+(long)s*Kseg;
    for(int k=0;k<Kseg;k+=2){
      __m512bh b0=(__m512bh)_mm512_loadu_si512(b),b1=(__m512bh)_mm512_loadu_si512(b+32); b+=2*ldb;
#pragma GCC unroll 8
      for(int i=0;i<MR;i++){ int32_t w; memcpy(&w,a+i*lda+k,4); __m512bh av=(__m512bh)_mm512_set1_epi32(w); c[i][0]=_mm512_dpbf16_ps(c[i][0],av,b0); c[i][1]=_mm512_dpbf16_ps(c[i][1],av,b1);}
    }
  }
}
template<int MR,class T,class E> INL void blk(const T*A,long lda,int m,const T*const*Bs,int nseg,int Kseg,long ldb,E&epi){
  __m512 c[MR][2]; ukr<MR>(A+(long)m*lda,lda,Bs,nseg,Kseg,ldb,c);
#pragma GCC unroll 8
  for(int i=0;i<MR;i++) epi(m+i,c[i][0],c[i][1]);
}
template<int MR> INL void ukr(const uint8_t*A,long lda,const int8_t*const*Bs,int nseg,int Kseg,long ldb,__m512i (&c)[MR][2]){
#pragma GCC unroll 8
  for(int i=0;i<MR;i++){c[i][0]=_mm512_setzero_si512();c[i][1]=_mm512_setzero_si512();}
  for(int s=0;s<nseg;s++){
    const int8_t*b=Bs[s]; const uint8_t*a=A+(long)s*Kseg;
    for(int k=0;k<Kseg;k+=4){
      __m512i b0=_mm512_loadu_si512(b),b1=_mm512_loadu_si512(b+64); b+=4*ldb;
#pragma GCC unroll 8
      for(int i=0;i<MR;i++){ int32_t w; memcpy(&w,a+i*lda+k,4); __m512i av=_mm512_set1_epi32(w); c[i][0]=_mm512_dpbusd_epi32(c[i][0],av,b0); c[i][1]=_mm512_dpbusd_epi32(c[i][1],av,b1);}
    }
  }
}
template<int MR,class E> INL void blk(const uint8_t*A,long lda,int m,const int8_t*const*Bs,int nseg,int Kseg,long ldb,E&epi){
  __m512i c[MR][2]; ukr<MR>(A+(long)m*lda,lda,Bs,nseg,Kseg,ldb,c);
#pragma GCC unroll 8
  for(int i=0;i<MR;i++) epi(m+i,c[i][0],c[i][1]);
}
template<class T,class W,class E> INL void gemm_rows(const T*A,long lda,int M,const W*const*Bs,int nseg,int Kseg,long ldb,E epi){
  int m=0; for(;m+8<=M;m+=8) blk<8>(A,lda,m,Bs,nseg,Kseg,ldb,epi);
  if(M-m>=4){blk<4>(A,lda,m,Bs,nseg,Kseg,ldb,epi);m+=4;}
  if(M-m>=2){blk<2>(A,lda,m,Bs,nseg,Kseg,ldb,epi);m+=2;}
  if(M-m>=1){blk<1>(A,lda,m,Bs,nseg,Kseg,ldb,epi);m+=1;}
}
} // namespace proto
template <class A, class B, class C> static __attribute__((noinline)) void prototype(const A* a, long lda, int M, int N, const B* const* panels, int nseg, int Kseg, C* c) {
    for (int p = 0; p < N / 32; p++)
        proto::gemm_rows(a, lda, M, panels + (long)p * nseg, nseg, Kseg, 32, [&](int i, auto x, auto y) {
            C* o = c + (long)i * N + p * 32;
            _mm512_storeu_si512(o, (__m512i)x); _mm512_storeu_si512(o + 16, (__m512i)y);
        });
}
