// Weights as torch keeps them -> panels as the kernels read them, in the engine's type.
#pragma once
#include <math.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "model.hpp"

namespace bf {

inline int round_to(int n, int to) { return (n + to - 1) / to * to; }

inline uint16_t to_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if (x != x) return (uint16_t)(u >> 16 | 64);  // stays a NaN
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// All memory of a model, freed together; every block is 64 bytes aligned and zero. It lies in few large pieces that the
// system may back with huge pages: weights stream through, and each small page would cost a look-up.
class Memory {
   public:
    template <class T>
    T* take(size_t n) {
        const size_t bytes = (n * sizeof(T) + 63) / 64 * 64 + 64;
        if (bytes > left_) grow(bytes);
        char* p = at_;
        at_ += bytes, left_ -= bytes, bytes_ += bytes;
        return (T*)p;
    }
    size_t bytes() const { return bytes_; }

   private:
    static constexpr size_t PAGE = 2 << 20, PIECE = 8 << 20;

    void grow(size_t bytes) {
        left_ = (std::max(bytes, PIECE) + PAGE - 1) / PAGE * PAGE;
        void* p = nullptr;
        if (posix_memalign(&p, PAGE, left_)) throw std::bad_alloc();
        pieces_.emplace_back(p, free);
#if defined(MADV_HUGEPAGE)
        madvise(p, left_, MADV_HUGEPAGE);  // a wish: where it is not granted nothing is lost
#endif
        at_ = (char*)memset(p, 0, left_);
    }

    std::vector<std::unique_ptr<void, void (*)(void*)>> pieces_;
    char* at_ = nullptr;
    size_t left_ = 0, bytes_ = 0;
};

// A matrix (outputs, inputs). `rows[o]` is the source of padded output o or null, `columns[k]` the source's column for
// padded input k or -1. int8 sums are kept for every `segment` inputs.
inline Packed pack(Memory& memory, int dtype, const std::vector<const float*>& rows, const std::vector<int>& columns,
                   const std::vector<float>& bias, int segment) {
    const int outputs = (int)rows.size(), depth = (int)columns.size(), G = group_of(dtype);
    Packed p = {};
    p.panel_bytes = (long)depth * PANEL * size_of(dtype);
    char* panels = memory.take<char>((size_t)p.panel_bytes * (outputs / PANEL));
    p.panels = panels;
    p.bias = memory.take<float>(outputs);
    memcpy(p.bias, bias.data(), sizeof(float) * outputs);
    if (dtype == I8) {
        p.scale = memory.take<float>(outputs);
        p.sums = memory.take<int32_t>((size_t)(depth / segment) * outputs);
    }
    for (int o = 0; o < outputs; o++) {
        if (!rows[o]) continue;
        float inverse = 0.f;
        if (dtype == I8) {
            float most = 0.f;
            for (int k = 0; k < depth; k++)
                if (columns[k] >= 0) most = fmaxf(most, fabsf(rows[o][columns[k]]));
            p.scale[o] = most / 127.f;
            inverse = most > 0.f ? 127.f / most : 0.f;
        }
        char* panel = panels + (long)(o / PANEL) * p.panel_bytes;
        for (int k = 0; k < depth; k++) {
            if (columns[k] < 0) continue;
            const float w = rows[o][columns[k]];
            const long at = (long)(k / G) * PANEL * G + (o % PANEL) * G + k % G;
            if (dtype == F32) ((float*)panel)[at] = w;
            if (dtype == BF16) ((uint16_t*)panel)[at] = to_bf16(w);
            if (dtype == I8) {
                const int whole = (int)nearbyintf(w * inverse);
                ((int8_t*)panel)[at] = (int8_t)whole;
                p.sums[(long)(k / segment) * outputs + o] += whole;
            }
        }
    }
    return p;
}

}  // namespace bf
