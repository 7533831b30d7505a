// What the kernels and the C interface share: plain structs, no functions of their own.
//
// Only plain data lives here. `paths.cpp` is compiled once per instruction set; an inline function or an instantiated
// template with linkage would be merged by the linker, and baseline code could then run instructions the CPU lacks.
//
// Under the address sanitizer, memory that is handed out in pieces gets a fence after each piece, and contents that
// would be seen if they were used before they are set. Elsewhere this is nothing.
//
// Legend: T tokens of a batch, d width, dp width rounded up to panels, H heads, e size of a head (ep rounded up),
// f feed-forward neurons (fp rounded up), K depth of a product.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <string.h>
#endif

namespace bf {

constexpr int PANEL = 32;  // output columns of a packed panel; every padded size is a multiple of it

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t FENCE = 64;
static inline void fence(void* p, size_t room, size_t used) {
    if (!p) return;
    __asan_unpoison_memory_region(p, room);
    if (used == room) return;
    memset(p, 0xff, used);
    __asan_poison_memory_region((char*)p + used, room - used);
}
#else
constexpr size_t FENCE = 0;
static inline void fence(void*, size_t, size_t) {}
#endif

enum Dtype : int { F32 = 0, BF16 = 1, I8 = 2 };
enum Activation : int { GELU = 0, GELU_TANH = 1, RELU = 2, SILU = 3, TANH = 4 };
enum Estimator : int { TOP_K = 0, HARD_CONCRETE = 1, TOP_P = 2 };
enum View : int { MEAN = 0, MEAN_FIRST = 1, MEAN_MAX = 2 };

// How many successive k lie beside each other in a packed panel: what one dot-product instruction eats.
inline constexpr int group_of(int dtype) { return dtype == F32 ? 1 : dtype == BF16 ? 2 : 4; }
inline constexpr int size_of(int dtype) { return dtype == F32 ? 4 : dtype == BF16 ? 2 : 1; }

struct Spec {
    int vocab, d, layers, H, f, positions, position_offset, token_types, embedding, labels;
    int activation, pre_norm, pool_first,
        head_hidden;  // head_hidden: activation of the classifier's dense layer, or -1
    int routes, estimator, view, min_units, router_hidden;
    int blocks;  // of each feed-forward layer, that have a budget; 1: the layer is one piece
    int dtype;
    float eps;
    // derived
    int dp, e, ep, fp, seen;
};

// A matrix W (n outputs, K inputs) as panels of 32 outputs: [panel][K / G][32][G], inputs padded with zeros.
struct Packed {
    void* panels;
    float* bias;    // (outputs, padded)
    float* scale;   // int8: of each output
    int32_t* sums;  // int8: of each 32 (or one head's) inputs and output, the sum of the weights: [segment][outputs]
    long panel_bytes;
};

struct Router {
    float *up, *up_bias, *down, down_bias, *scorer, *scorer_bias;
    int32_t* place;  // of each unit among those that are stored, -1 where it was cut; null: all are stored
};

struct Layer {
    Packed qkv;   // outputs ordered [head][q, k, v][ep]; a head is one run of panels
    Packed out;   // inputs ordered [head][ep]
    Packed up;    // outputs are neurons
    Packed down;  // inputs are neurons
    int fp;       // neurons that are stored, rounded up
    float *attention_gamma, *attention_beta, *ffn_gamma, *ffn_beta;
    Router router;      // of the heads
    Router ffn_router;  // of the blocks, where they have a budget
};

struct Model {
    Spec s;
    Layer* layer;
    const float *word, *position, *type;
    float *embed_gamma, *embed_beta;
    Packed projection;  // fp32; only where the embedding is narrower
    float *final_gamma, *final_beta;
    float *dense, *dense_bias, *classifier, *classifier_bias;
};

// One batch on its way through the model.
struct Job {
    const Model* m;
    bool routed_blocks;  // routers choose the feed-forward blocks
    long T;
    int B, blocks;  // blocks: how many the feed-forward layers are cut into
    const int32_t *ids, *types, *offsets;
    const int32_t* counts;              // (B, layers) or null
    const uint8_t* gates;               // (B, layers, H) or null
    const uint8_t* ffn;                 // (B, layers, blocks) or null
    float* x;                           // (T, dp): the residual stream
    float* inner;                       // (T, dp): what attention reads; x itself in post-norm models
    void* typed;                        // (T, dp): inner in the engine's type; inner itself in fp32
    float* typed_scale;                 // int8: (T,)
    void* context;                      // rows of each input: (tokens, heads that run, ep)
    long* context_at;                   // (B,): where an input's rows start, in elements
    int *heads, *heads_count;           // (B, H), (B,): of the layer at hand, by their places in the packed weights
    int32_t *block_list, *block_count;  // (B, blocks), (B,): of the layer at hand, in the same way
    const int32_t* block_counts;        // (B, layers) or null
    uint8_t* chosen;                    // (B, layers, H): out
    uint8_t* block_chosen;              // (B, layers, blocks): out, or null
    float *wanted, *logits;             // (B, layers), (B, labels): out
    float* hidden;                      // (T, d) or null: out
};

struct Scratch {
    char* memory;
    size_t size;
};

// As `native.py` declares it.
struct Batch {
    int64_t tokens;
    int32_t inputs, blocks;
    const int32_t *ids, *types, *offsets, *counts, *block_counts;
    const uint8_t *gates, *ffn;
    uint8_t *chosen, *block_chosen;
    float *wanted, *logits, *hidden;
};

// What one instruction set brings. Rows are token rows of the packed batch.
struct Path {
    const char* name;
    bool has[3];
    size_t (*scratch)(const Model&, int longest, int blocks, int rows);
    void (*embed)(const Job&, long first, long last, Scratch&);
    void (*route)(const Job&, int layer, int input, Scratch&);
    void (*attend)(const Job&, int layer, int input, int slot, Scratch&);
    void (*rows)(const Job&, int layer, int first_input, long first, long last, Scratch&);
    // The same in two halves, between which the routers of the blocks choose.
    void (*rows_attention)(const Job&, int layer, int first_input, long first, long last, Scratch&);
    void (*route_blocks)(const Job&, int layer, int input, Scratch&);
    void (*rows_blocks)(const Job&, int layer, int first_input, long first, long last, Scratch&);
    void (*finish)(const Job&, int input, Scratch&);
    double (*gemm_rate)(int dtype, int M, int N, int K, double seconds);
    double (*peak_rate)(int dtype, double seconds);
};

}  // namespace bf
