// The C interface: build a model from tensors, run batches. Everything that can fail is caught here and told by
// `bf_error`; nothing thrown leaves the library.
#include <stdlib.h>

#include <algorithm>
#include <map>

#include "pack.hpp"
#include "threads.hpp"

#define BF_API extern "C" __attribute__((visibility("default")))

namespace bf {

extern const Path path_plain;
#if defined(BF_HAVE_AVX2)
extern const Path path_avx2;
#endif
#if defined(BF_HAVE_AVX512)
extern const Path path_avx512;
#endif
#if defined(BF_HAVE_AVX512_BF16)
extern const Path path_avx512_bf16;
#endif

namespace {

thread_local std::string message;

// The paths that were compiled and that this processor can run, the best last.
std::vector<const Path*> usable() {
    std::vector<const Path*> paths = {&path_plain};
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vnni");
    (void)avx2, (void)avx512;
#if defined(BF_HAVE_AVX2)
    if (avx2) paths.push_back(&path_avx2);
#endif
#if defined(BF_HAVE_AVX512)
    if (avx512) paths.push_back(&path_avx512);
#endif
#if defined(BF_HAVE_AVX512_BF16)
    if (avx512 && __builtin_cpu_supports("avx512bf16")) paths.push_back(&path_avx512_bf16);
#endif
#endif
    return paths;
}

const Path& path_named(const char* name) {
    for (const Path* path : usable())
        if (strcmp(path->name, name) == 0) return *path;
    throw std::invalid_argument(std::string("no such path on this processor: ") + name);
}

// Memory for batches: grows, and is kept. What is never touched costs nothing.
struct Buffer {
    void* at = nullptr;
    size_t size = 0;
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    ~Buffer() {
        fence(at, size, size);
        free(at);
    }
    template <class T>
    T* take(size_t n) {
        const size_t bytes = n * sizeof(T) + 64;
        if (bytes > size) {
            fence(at, size, size);
            free(at);
            at = nullptr, size = 0;
            if (posix_memalign(&at, 64, bytes)) {
                at = nullptr;
                throw std::bad_alloc();
            }
            size = bytes;
        }
        fence(at, size, n * sizeof(T));
        return (T*)at;
    }
};

struct Item {
    int input, slot;
};

struct Engine {
    const Path& path;
    Model model = {};
    Memory memory;
    std::map<std::string, const float*> given;
    std::map<std::string, int64_t> sizes;
    std::vector<Layer> layers;
    Pool pool;
    // One batch at a time. After a fork the parent's lock may be held by a thread that the child does not have, so the
    // child makes its own, whichever of its threads comes first.
    struct Lock {
        const pid_t process;
        std::mutex mutex;
    };
    std::atomic<Lock*> lock{new Lock{getpid(), {}}};
    bool ready = false;
    Buffer x, inner, typed, scale, context, context_at, heads, heads_count, block_list, block_count;
    std::vector<std::unique_ptr<Buffer>> scratch;

    Engine(const char* name, int threads) : path(path_named(name)), pool(threads) {
        for (int i = 0; i < threads; i++) scratch.push_back(std::make_unique<Buffer>());
    }

    const float* tensor(const std::string& name, int64_t n) {
        auto found = given.find(name);
        if (found == given.end()) throw std::invalid_argument("tensor missing: " + name);
        if (sizes[name] != n)
            throw std::invalid_argument("tensor " + name + " has " + std::to_string(sizes[name]) + " numbers, not " +
                                        std::to_string(n));
        return found->second;
    }

    float* padded(const std::string& name, int n, int padded_n) {
        float* to = memory.take<float>(padded_n);
        memcpy(to, tensor(name, n), sizeof(float) * n);
        return to;
    }

    // (rows, columns) with each row padded; a row may consist of several equal parts, each padded by itself.
    float* padded_rows(const std::string& name, int rows, int parts, int n, int padded_n) {
        const float* from = tensor(name, (int64_t)rows * parts * n);
        float* to = memory.take<float>((size_t)rows * parts * padded_n);
        for (long r = 0; r < (long)rows * parts; r++) memcpy(to + r * padded_n, from + r * n, sizeof(float) * n);
        return to;
    }

    ~Engine() {
        if (Lock* mine = lock.load(); mine->process == getpid()) delete mine;
    }

    std::mutex& own_lock() {
        Lock* found = lock.load();
        if (found->process != getpid()) {
            Lock* made = new Lock{getpid(), {}};
            if (lock.compare_exchange_strong(found, made)) found = made;
            else delete made;  // another thread was first; `found` is its lock now
        }
        return found->mutex;
    }

    Router router_of(const std::string& at, int units) {
        const Spec& s = model.s;
        const int parts = s.view == MEAN ? 1 : 2, hidden = s.router_hidden;
        Router router = {};
        router.up = padded_rows(at + "controller.0.weight", hidden, parts, s.d, s.dp);
        router.up_bias = padded(at + "controller.0.bias", hidden, hidden);
        router.down = padded(at + "controller.2.weight", hidden, hidden);
        router.down_bias = *tensor(at + "controller.2.bias", 1);
        router.scorer = padded_rows(at + "scorer.weight", units, parts, s.d, s.dp);
        router.scorer_bias = padded(at + "scorer.bias", units, units);
        return router;
    }

    // How many of `units` are stored, and the place of each among them.
    int stored(const std::string& name, int units, int32_t*& place) {
        if (!given.count(name)) return units;
        const float* kept = tensor(name, units);
        place = memory.take<int32_t>(units);
        int n = 0;
        for (int u = 0; u < units; u++) place[u] = kept[u] != 0.f ? n++ : -1;
        if (n == 0) throw std::invalid_argument(name + " keeps no unit");
        return n;
    }

    void build();
    void run(const Batch& batch);
};

std::vector<int> columns(int n, int padded) {
    std::vector<int> c(padded, -1);
    for (int k = 0; k < n; k++) c[k] = k;
    return c;
}

void Engine::build() {
    Spec& s = model.s;
    s.dp = round_to(s.d, PANEL), s.e = s.d / s.H, s.ep = round_to(s.e, PANEL), s.fp = round_to(s.f, PANEL);
    s.seen = s.view == MEAN ? s.dp : 2 * s.dp;
    layers.resize(s.layers);
    model.layer = layers.data();
    model.word = tensor("embeddings.word.weight", (int64_t)s.vocab * s.embedding);
    model.position = tensor("embeddings.position.weight", (int64_t)(s.positions + s.position_offset) * s.embedding);
    if (s.token_types) model.type = tensor("embeddings.token_type.weight", (int64_t)s.token_types * s.embedding);
    const int ep = round_to(s.embedding, PANEL);
    model.embed_gamma = padded("embeddings.norm.weight", s.embedding, ep);
    model.embed_beta = padded("embeddings.norm.bias", s.embedding, ep);

    auto rows_of = [&](const float* w, int n, int width, int padded_n) {
        std::vector<const float*> rows(padded_n, nullptr);
        for (int o = 0; o < n; o++) rows[o] = w + (long)o * width;
        return rows;
    };
    auto bias_of = [&](const float* b, int n, int padded_n) {
        std::vector<float> bias(padded_n, 0.f);
        std::copy(b, b + n, bias.begin());
        return bias;
    };
    if (s.embedding != s.d) {
        const float* w = tensor("embeddings.projection.weight", (int64_t)s.d * s.embedding);
        model.projection = pack(memory, F32, rows_of(w, s.d, s.embedding, s.dp), columns(s.embedding, ep),
                                bias_of(tensor("embeddings.projection.bias", s.d), s.d, s.dp), ep);
    }
    for (int l = 0; l < s.layers; l++) {
        Layer& layer = layers[l];
        const std::string at = "layers." + std::to_string(l) + ".";
        layer.router = router_of(at + "attention.router.", s.H);
        if (s.blocks > 1) layer.ffn_router = router_of(at + "feed_forward.router.", s.blocks);
        const int heads = stored(at + "kept_heads", s.H, layer.router.place), width = heads * s.e;
        const float* w = tensor(at + "attention.in_proj_weight", 3LL * width * s.d);
        const float* b = tensor(at + "attention.in_proj_bias", 3LL * width);
        std::vector<const float*> rows(3 * heads * s.ep, nullptr);
        std::vector<float> bias(3 * heads * s.ep, 0.f);
        std::vector<int> slots(heads * s.ep, -1);
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < s.e; i++) {
                slots[h * s.ep + i] = h * s.e + i;
                for (int part = 0; part < 3; part++) {
                    const int from = part * width + h * s.e + i, to = (h * 3 + part) * s.ep + i;
                    rows[to] = w + (long)from * s.d;
                    bias[to] = b[from];
                }
            }
        layer.qkv = pack(memory, s.dtype, rows, columns(s.d, s.dp), bias, s.dp);
        w = tensor(at + "attention.out_proj.weight", (int64_t)s.d * width);
        layer.out = pack(memory, s.dtype, rows_of(w, s.d, width, s.dp), slots,
                         bias_of(tensor(at + "attention.out_proj.bias", s.d), s.d, s.dp), s.ep);
        const int f = s.f / s.blocks * stored(at + "kept_blocks", s.blocks, layer.ffn_router.place);
        layer.fp = round_to(f, PANEL);
        w = tensor(at + "feed_forward.up.weight", (int64_t)f * s.d);
        layer.up = pack(memory, s.dtype, rows_of(w, f, s.d, layer.fp), columns(s.d, s.dp),
                        bias_of(tensor(at + "feed_forward.up.bias", f), f, layer.fp), s.dp);
        w = tensor(at + "feed_forward.down.weight", (int64_t)s.d * f);
        layer.down = pack(memory, s.dtype, rows_of(w, s.d, f, s.dp), columns(f, layer.fp),
                          bias_of(tensor(at + "feed_forward.down.bias", s.d), s.d, s.dp), PANEL);
        layer.attention_gamma = padded(at + "attention_norm.weight", s.d, s.dp);
        layer.attention_beta = padded(at + "attention_norm.bias", s.d, s.dp);
        layer.ffn_gamma = padded(at + "feed_forward_norm.weight", s.d, s.dp);
        layer.ffn_beta = padded(at + "feed_forward_norm.bias", s.d, s.dp);
    }
    if (s.pre_norm) {
        model.final_gamma = padded("norm.weight", s.d, s.dp);
        model.final_beta = padded("norm.bias", s.d, s.dp);
    }
    if (s.head_hidden >= 0) {
        model.dense = padded_rows("classifier.dense.weight", s.d, 1, s.d, s.dp);
        model.dense_bias = padded("classifier.dense.bias", s.d, s.d);
    }
    model.classifier = padded_rows("classifier.out.weight", s.labels, 1, s.d, s.dp);
    model.classifier_bias = padded("classifier.out.bias", s.labels, s.labels);
    given.clear();
    ready = true;
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void check(const Spec& s, const Batch& b) {
    using std::to_string;
    if (b.inputs < 1) refuse("the batch is empty");
    if (b.offsets[0] != 0 || b.offsets[b.inputs] != b.tokens)
        refuse("offsets do not begin at 0 or end at the last token");
    for (int i = 0; i < b.inputs; i++) {
        const int64_t n = (int64_t)b.offsets[i + 1] - b.offsets[i];
        if (n < 1) refuse("input " + to_string(i) + " has no tokens");
        if (n > s.positions)
            refuse("input " + to_string(i) + " has " + to_string(n) + " tokens, the model has " +
                   to_string(s.positions) + " positions");
    }
    for (int64_t t = 0; t < b.tokens; t++) {
        if (b.ids[t] < 0 || b.ids[t] >= s.vocab)
            refuse("token " + to_string(t) + " has the id " + to_string(b.ids[t]) + ", the model knows 0 to " +
                   to_string(s.vocab - 1));
        if (b.types && (b.types[t] < 0 || b.types[t] >= std::max(s.token_types, 1)))
            refuse("token " + to_string(t) + " has the type " + to_string(b.types[t]) + ", the model knows 0 to " +
                   to_string(std::max(s.token_types, 1) - 1));
    }
    if (!b.ffn && b.blocks != s.blocks)
        refuse("blocks: " + to_string(b.blocks) + ", the model has " + to_string(s.blocks));
    if (b.blocks < 1 || (b.blocks > 1 && (s.f % b.blocks || s.f / b.blocks % PANEL)))
        refuse(to_string(b.blocks) + " blocks do not cut " + to_string(s.f) + " neurons into multiples of " +
               to_string(PANEL));
}

void Engine::run(const Batch& b) {
    const Spec& s = model.s;
    check(s, b);
    std::lock_guard<std::mutex> alone(own_lock());
    const int threads = pool.count(), B = b.inputs;
    const long T = b.tokens;
    Job job = {};
    job.m = &model, job.T = T, job.B = B, job.blocks = b.blocks;
    job.ids = b.ids, job.types = s.token_types ? b.types : nullptr, job.offsets = b.offsets;
    job.counts = b.counts, job.gates = b.gates, job.ffn = b.ffn, job.block_counts = b.block_counts;
    job.routed_blocks = s.blocks > 1 && !b.ffn && (s.routes || b.block_counts);
    job.chosen = b.chosen, job.block_chosen = b.block_chosen, job.wanted = b.wanted, job.logits = b.logits,
    job.hidden = b.hidden;
    job.x = x.take<float>(T * s.dp);
    job.inner = s.pre_norm ? inner.take<float>(T * s.dp) : job.x;
    job.typed = s.dtype == F32 ? (void*)job.inner : typed.take<char>((size_t)T * s.dp * size_of(s.dtype));
    job.typed_scale = scale.take<float>(T);
    // In the type of attention itself, which for int8 is bf16 where there is one.
    job.context = context.take<char>((size_t)T * s.H * s.ep * (s.dtype == F32 || !path.has[BF16] ? 4 : 2));
    job.context_at = context_at.take<long>(B);
    job.heads = heads.take<int32_t>((size_t)B * s.H);
    job.heads_count = heads_count.take<int32_t>(B);
    job.block_list = block_list.take<int32_t>((size_t)B * b.blocks);
    job.block_count = block_count.take<int32_t>(B);

    // Blocks of rows: enough of them to keep all threads busy, whole tiles. Larger ones are no faster (24 to 120
    // measured).
    const int most = 48;
    const int block_rows =
        threads == 1 ? most : std::min<long>(most, std::max<long>(12, round_to((int)(T / (2 * threads)) + 1, 12)));
    std::vector<int> first_input;
    for (long r = 0, i = 0; r < T; r += block_rows) {
        while (b.offsets[i + 1] <= r) i++;
        first_input.push_back((int)i);
    }
    int longest = 0;
    for (int i = 0; i < B; i++) longest = std::max(longest, b.offsets[i + 1] - b.offsets[i]);
    const size_t bytes = path.scratch(model, longest, b.blocks, block_rows);
    std::vector<Scratch> own(threads);
    for (int i = 0; i < threads; i++) own[i] = {scratch[i]->take<char>(bytes), bytes};

    // Attention's work: head by head, so that a head's weights are read once for all inputs that chose it; the longest
    // inputs first, so that the last item is a short one. A thread takes neighbours together.
    std::vector<int> order(B), next(B);
    for (int i = 0; i < B; i++) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](int i, int j) { return b.offsets[i + 1] - b.offsets[i] > b.offsets[j + 1] - b.offsets[j]; });
    std::vector<Item> items;
    std::vector<int> chunks;
    items.reserve((size_t)B * s.H);
    chunks.reserve((size_t)B * s.H + 1);  // `plan` must not fail: it runs where nothing can be caught
    auto plan = [&](int layer) {
        long at = 0, work = 0;
        for (int i = 0; i < B; i++) {
            const long tokens = b.offsets[i + 1] - b.offsets[i];
            job.context_at[i] = at;
            at += tokens * job.heads_count[i] * s.ep;
            work += tokens * job.heads_count[i];
            next[i] = 0;
        }
        items.clear(), chunks.clear();
        const long enough = std::min<long>(128, std::max<long>(1, work / (4 * threads)));
        for (int h = 0; h < s.H; h++) {
            long held = enough;
            for (int i : order)
                if (b.chosen[((size_t)i * s.layers + layer) * s.H + h]) {
                    if (held >= enough) chunks.push_back((int)items.size()), held = 0;
                    items.push_back({i, next[i]++});
                    held += b.offsets[i + 1] - b.offsets[i];
                }
        }
        chunks.push_back((int)items.size());
    };

    std::vector<std::atomic<int>> counters(5 * s.layers + 2);
    for (auto& counter : counters) counter = 0;
    Barrier barrier(threads);
    const int row_blocks = (int)first_input.size();
    auto nothing = [] {};
    pool.run([&](int me) {
        Scratch& memory = own[me];
        auto each = [&](int counter, int count, auto work) {
            for (int i; (i = counters[counter].fetch_add(1)) < count;) work(i);
        };
        each(0, row_blocks, [&](int i) {
            path.embed(job, (long)i * block_rows, std::min<long>(T, (long)(i + 1) * block_rows), memory);
        });
        barrier.meet(nothing);
        for (int l = 0; l < s.layers; l++) {
            each(5 * l + 1, B, [&](int i) { path.route(job, l, i, memory); });
            barrier.meet([&] { plan(l); });
            each(5 * l + 2, (int)chunks.size() - 1, [&](int c) {
                for (int i = chunks[c]; i < chunks[c + 1]; i++)
                    path.attend(job, l, items[i].input, items[i].slot, memory);
            });
            barrier.meet(nothing);
            auto each_row = [&](int counter, auto work) {
                each(counter, row_blocks, [&](int i) {
                    const long first = (long)i * block_rows;
                    work(job, l, first_input[i], first, std::min(T, first + block_rows), memory);
                });
                barrier.meet(nothing);
            };
            if (!job.routed_blocks) {
                each_row(5 * l + 3, path.rows);
            } else {
                each_row(5 * l + 3, path.rows_attention);
                each(5 * l + 4, B, [&](int i) { path.route_blocks(job, l, i, memory); });
                barrier.meet(nothing);
                each_row(5 * l + 5, path.rows_blocks);
            }
        }
        each(5 * s.layers + 1, B, [&](int i) { path.finish(job, i, memory); });
    });
}

template <class F>
int guarded(F work) {
    try {
        work();
        return 0;
    } catch (const std::invalid_argument& error) {
        message = error.what();
        return 1;
    } catch (const std::bad_alloc&) {
        message = "not enough memory";
        return 2;
    } catch (const std::exception& error) {
        message = error.what();
        return 3;
    }
}

}  // namespace
}  // namespace bf

using namespace bf;

// Rises with every change of this interface; `native.py` knows the same number and takes no other library.
BF_API int bf_interface() { return 3; }

BF_API const char* bf_error() { return message.c_str(); }

// The names of the paths that this processor can run, the best last, with spaces between.
BF_API const char* bf_paths() {
    static const std::string names = [] {
        std::string all;
        for (const Path* path : usable()) all += (all.empty() ? "" : " ") + std::string(path->name);
        return all;
    }();
    return names.c_str();
}

BF_API int bf_has(const char* path, int dtype) {
    int answer = 0;
    guarded([&] { answer = dtype >= 0 && dtype <= 2 && path_named(path).has[dtype]; });
    return answer;
}

// spec: the fields of Spec up to `dtype`, in order.
BF_API void* bf_new(const char* path, const int32_t* spec, int count, float eps, int threads) {
    Engine* engine = nullptr;
    const int code = guarded([&] {
        if (count != 21) throw std::invalid_argument("another version of this library is installed; build it again");
        auto made = std::make_unique<Engine>(path, std::max(1, threads));
        memcpy(&made->model.s, spec, sizeof(int32_t) * count);
        made->model.s.eps = eps;
        if (!made->path.has[made->model.s.dtype]) throw std::invalid_argument("this path lacks the type asked for");
        engine = made.release();
    });
    return code ? nullptr : engine;
}

// `data` must stay where it is: until bf_build for what is packed, for good for the embedding tables.
BF_API int bf_set(void* engine, const char* name, const float* data, int64_t count) {
    return guarded([&] {
        ((Engine*)engine)->given[name] = data;
        ((Engine*)engine)->sizes[name] = count;
    });
}

BF_API int bf_build(void* engine) {
    return guarded([&] { ((Engine*)engine)->build(); });
}

BF_API int64_t bf_bytes(void* engine) { return (int64_t)((Engine*)engine)->memory.bytes(); }

BF_API int bf_run(void* engine, const Batch* batch) {
    return guarded([&] {
        if (!((Engine*)engine)->ready) throw std::invalid_argument("bf_build was not called");
        ((Engine*)engine)->run(*batch);
    });
}

BF_API void bf_free(void* engine) { delete (Engine*)engine; }

BF_API double bf_gemm_rate(const char* path, int dtype, int M, int N, int K, double seconds) {
    double answer = 0;
    guarded([&] { answer = path_named(path).gemm_rate(dtype, M, N, K, seconds); });
    return answer;
}

BF_API double bf_peak_rate(const char* path, int dtype, double seconds) {
    double answer = 0;
    guarded([&] { answer = path_named(path).peak_rate(dtype, seconds); });
    return answer;
}
