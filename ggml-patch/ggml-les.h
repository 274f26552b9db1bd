#pragma once

// The seam between llama.cpp and ggml-les. Everything here may be called whether or not a model streams; nothing here
// knows how streaming works: that is les.h's.

#include "ggml.h"
#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// options: hold for the models that are loaded from now on. A program that sets none gets the environment's
// (LLAMA_ARG_LES, LLAMA_ARG_LES_CACHE, ...). While a model streams, the next ones are given what memory is left

// set one option by the name of its flag without "les-": "mode", "cache", "io", "io-depth", "lookahead", "stats", "trace",
// "profile", "inputs", "spec"
// returns false and fills err when there is no such option, or the value makes no sense
GGML_API bool ggml_les_set_option(const char * name, const char * value, char * err, size_t err_len);

// reports

// what was decided about the model that was loaded last, for the user, once: empty afterwards
GGML_API void ggml_les_take_message(char * buf, size_t len);
// whether a model streams
GGML_API bool ggml_les_active(void);
// whether an operation of any model has failed since the program began
GGML_API bool ggml_les_failed(void);
// one line about each model that streams; returns false when i is past the last one
GGML_API bool ggml_les_summary(int i, char * buf, size_t len);
// the counters of each model that streams, as in les.h; returns false when i is past the last one
struct les_stats;
GGML_API bool ggml_les_stats(int i, struct les_stats * stats);
// memory that the experts of the model that this thread loaded last will take (also for a load without allocation)
GGML_API size_t ggml_les_cache_bytes(void);

// loading: the model loader's calls

// begins the load of a model by this thread, and decides whether its experts stream
// splits: the shards when their names do not follow the naming scheme; no_alloc: only sizes are wanted
// returns false and fills err when the load cannot succeed
GGML_API bool ggml_les_load_begin(const char * fname, const char ** splits, size_t n_splits, bool no_alloc,
                                  bool * streams, char * err, size_t err_len);
// the weights are loaded
GGML_API void ggml_les_load_done(void);
// ends the load, whatever became of it
GGML_API void ggml_les_load_end(void);

// whether this thread is loading a model, whether or not it streams
GGML_API bool ggml_les_loading(void);
// the number of a tensor of the model that this thread is loading, or -1 when it does not stream
GGML_API int ggml_les_load_find(const char * name);
// whether only packed files have a tensor of this name. Of these the loader must know nothing
GGML_API bool ggml_les_packed_name(const char * name);
// the tensors whose experts are packed in the files of the model that this thread is loading, as llama.cpp knows them
// returns their context, without memory for their data, for the caller to free; NULL, and fills err, when none can stream
GGML_API struct ggml_context * ggml_les_load_packed(char * err, size_t err_len);
// where the experts of such a tensor begin
GGML_API void ggml_les_load_place(const struct ggml_tensor * packed, uint16_t * file, size_t * offset);
// streams: the loader must not load the tensor
// returns false and fills err when file and offset are not what the index says, or a packed tensor would not stream
GGML_API bool ggml_les_load_bind(struct ggml_tensor * tensor, int file, size_t offset,
                                 bool * streams, char * err, size_t err_len);
// the buffer type of tensors that stream; NULL when the CPU backend has none, or this thread loads no model that streams
GGML_API ggml_backend_buffer_type_t ggml_les_load_buffer_type(void);

// a buffer for weights was allocated and is not written yet: has it take large pages, when this thread loads a model that
// streams. Its weights are read, not mapped, and small pages of memory are slower than those of a mapped file
GGML_API void ggml_les_load_buffer(ggml_backend_buffer_t buffer);

// speculative decoding: how many tokens to draft and to verify, as in les.h

// the sequence of a drafter that drafts up to n_max tokens, by the option "spec"; NULL when no model streams
struct les_spec;
GGML_API struct les_spec * ggml_les_spec_open(uint32_t n_max);
GGML_API void ggml_les_spec_free(struct les_spec * spec);
GGML_API uint32_t ggml_les_spec_draft(struct les_spec * spec);
GGML_API uint32_t ggml_les_spec_verify(struct les_spec * spec, const float * confidences, uint32_t n);
struct les_spec_step;
GGML_API void ggml_les_spec_done(struct les_spec * spec, const struct les_spec_step * step);

// computing: the CPU backend's calls

// the CPU backend tells how to get its buffer type
GGML_API void ggml_les_set_buffer_type(ggml_backend_buffer_type_t (*get)(void));

// a buffer for tensors that stream takes address space and no memory; it keeps the model open
struct ggml_les_model;
struct ggml_les_buffer { // the buffer's context
    struct ggml_les_model * model;
    void *                  base;
    size_t                  size;
};
GGML_API struct ggml_les_model * ggml_les_model_of_load(void); // NULL outside of a load; the caller releases it
GGML_API void ggml_les_model_release(struct ggml_les_model * model);

// a part of a tensor of such a buffer, from the file, for copies of the model
// returns false and fills err when it cannot be read
GGML_API bool ggml_les_read(struct ggml_les_model * model, const struct ggml_tensor * tensor, void * data, size_t offset,
                            size_t size, char * err, size_t err_len);

// one thread's walk over the experts of one operation
struct ggml_les_walk {
    struct ggml_tensor dst;  // shadows of the operation's tensors, so that kernels that compute an expert's address
    struct ggml_tensor src0; // from src0->data find it in its slot
    void *   ticket;
    struct ggml_les_layer * layer; // in place of a ticket, if the operation is one of a layer's
    const uint32_t * types; // by expert; NULL when all have the tensor's
    uint32_t tensor;
    uint32_t position;
    bool     failed;
};

// a layer's operations as a whole: the multiplications before the activation (one or two), the activation, the last one
#define GGML_LES_LAYER_OPS 4
// for how many tokens at most that is worth it: more need too many experts, and memory for their rows
#define GGML_LES_LAYER_TOKENS 8
struct ggml_les_layer {
    // shadows. Those before the activation have memory of their own: what the graph gives them may be the result's too, and
    // then a wave would overwrite what the next one needs. What there is not has GGML_OP_NONE
    struct ggml_tensor ops[GGML_LES_LAYER_OPS];
    struct ggml_tensor input;
    struct ggml_tensor views[2]; // of the activation's sources
    void * handle;
};

// opens the layer of these operations (ops[1] may be NULL) for n_threads walkers; one thread, before a barrier. Returns NULL
// when its operations must be opened one by one. The layer is the thread's, until it opens the next one
GGML_API struct ggml_les_layer * ggml_les_layer_open(struct ggml_tensor * const ops[GGML_LES_LAYER_OPS], int n_threads);
// every thread, after a barrier: waits for the next experts, on which layer->ops are to be computed. The thread that opened
// the layer looks ahead, here and while it walks
// returns how many they are: 0 when there are no more, -1 when a read failed (every thread is told so); then the thread has left
GGML_API int  ggml_les_layer_wave(struct ggml_les_layer * layer, int wave);

// opens the operation dst = mul_mat_id(src0, src1, ids) for n_threads walkers; one thread, before a barrier
// returns false when that failed
GGML_API bool ggml_les_op_open(struct ggml_tensor * dst, int n_threads);
// every thread, after the barrier
GGML_API void ggml_les_walk_begin(struct ggml_les_walk * walk, const struct ggml_tensor * dst);
// the next expert, with its address and type in walk->src0 (whose nb[2] stays the tensor's); -1 at the end or when a read failed (then walk->failed)
GGML_API int  ggml_les_walk_next(struct ggml_les_walk * walk);
// every thread, after its last expert; returns false when the operation failed
GGML_API bool ggml_les_walk_end(struct ggml_les_walk * walk);

#ifdef __cplusplus
}

#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

// one load of a model on this thread; failures are exceptions
struct ggml_les_load {
    // once the other constructor has run there is an object, whose destructor runs whatever is thrown
    ggml_les_load(const std::string & fname, const std::vector<std::string> & splits, bool no_alloc) : ggml_les_load() {
        std::vector<const char *> paths;
        for (const auto & split : splits) {
            paths.push_back(split.c_str());
        }
        char err[1024] = "";
        if (!ggml_les_load_begin(fname.c_str(), paths.data(), paths.size(), no_alloc, &streams, err, sizeof(err))) {
            throw std::runtime_error(std::string("les: ") + err);
        }
    }
    ~ggml_les_load() {
        ggml_les_load_end();
    }

    ggml_les_load(const ggml_les_load &) = delete;
    ggml_les_load & operator=(const ggml_les_load &) = delete;

    // whether the tensor, which lies there, streams: the loader must not load it
    static bool bind(struct ggml_tensor * tensor, int file, size_t offset) {
        bool streams  = false;
        char err[512] = "";
        if (!ggml_les_load_bind(tensor, file, offset, &streams, err, sizeof(err))) {
            throw std::runtime_error(std::string("les: ") + err);
        }
        return streams;
    }

    // puts a packed file's experts in the place of the tensors that hold them, when all files have been read
    template <typename loader>
    static void unpack(loader & ml) {
        auto & weights = ml.weights_map;
        std::vector<typename std::decay_t<decltype(weights)>::mapped_type> holders;
        for (auto it = weights.begin(); it != weights.end();) {
            if (ggml_les_packed_name(it->first.c_str())) {
                holders.push_back(it->second);
                it = weights.erase(it);
            } else {
                ++it;
            }
        }
        if (holders.empty()) {
            return;
        }
        char err[1024] = "";
        auto * ctx = ggml_les_load_packed(err, sizeof(err));
        if (!ctx) {
            throw std::runtime_error(std::string("les: ") + err);
        }
        ml.contexts.emplace_back(ctx);
        for (const auto & holder : holders) {
            ml.n_elements -= ggml_nelements(holder.tensor);
            ml.n_bytes    -= ggml_nbytes(holder.tensor);
        }
        auto weight = holders[0]; // copied: the constructor would look for the tensor in the file's list
        for (auto * cur = ggml_get_first_tensor(ctx); cur; cur = ggml_get_next_tensor(ctx, cur)) {
            ggml_les_load_place(cur, &weight.idx, &weight.offs);
            weight.tensor = cur;
            ml.n_elements += ggml_nelements(cur);
            ml.n_bytes    += ggml_nbytes(cur);
            weights.emplace(cur->name, weight);
        }
    }

    bool streams = false;

private:
    ggml_les_load() = default;
};
#endif
