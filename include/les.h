// ggml-les: Lookahead Expert Scheduling. The C interface of the static library libles.a.
//
// Every function returns a status: LES_OK (0), LES_END (1) or a negative error. Outputs are written only on success.
// Handles are checked at each call: NULL, a closed handle and a wrong struct size give a status, not a crash.
// Functions may be called from any thread unless their description says otherwise.
//
// Generated from src/ffi by cbindgen; do not edit.

#ifndef LES_H
#define LES_H

#include <stddef.h>
#include <stdint.h>

// Grows with every incompatible change of this interface.
#define LES_ABI_VERSION 1

// The experts of one layer, to be walked by every thread that computes it. Never dereferenced.
struct les_layer;

// A model whose experts can stream. Never dereferenced: a closed handle is noticed, not followed.
struct les_model;

// The speculation of one sequence of tokens. Never dereferenced.
struct les_spec;

// The experts of one operation, to be walked by every thread that computes it. Never dereferenced.
struct les_ticket;

// What an exported function answers: 0 for success, 1 for the end of a walk, negative for errors.
typedef int32_t les_status;

// One operation: what the router picked, for one tensor of experts.
struct les_op {
  // `sizeof(struct les_op)`.
  size_t struct_size;
  // The router's picks: expert `i` of token `t` is the `int32_t` at `ids + t * ids_stride + i * 4`.
  const int32_t *ids;
  // Bytes from one token's picks to the next's.
  size_t ids_stride;
  // Picks per token.
  uint32_t n_used;
  // Tokens.
  uint32_t n_tokens;
  // What the experts are applied to: row `r` begins at `input + r * input_stride` and has `n_input` floats. Checked
  // to be finite once per layer, with the tensor of its up projections. NULL: not checked.
  const float *input;
  // Bytes from one row to the next.
  size_t input_stride;
  // Floats per row.
  uint32_t n_input;
  // Rows.
  uint32_t n_rows;
  // The tensor's number, from `les_model_find`.
  uint32_t tensor;
  // How many threads will walk the ticket.
  uint32_t n_walkers;
};

// What is known of a model when it is open.
struct les_model_info {
  // `sizeof(struct les_model_info)`.
  size_t struct_size;
  // Bytes of all experts.
  uint64_t expert_bytes;
  // Bytes of all other tensors.
  uint64_t dense_bytes;
  // The smallest cache, in bytes: the experts of one token.
  uint64_t floor_bytes;
  // The largest useful cache, in bytes: all experts.
  uint64_t all_bytes;
  // Tensors of experts.
  uint32_t n_tensors;
  // Files.
  uint32_t n_files;
  // Experts used per token.
  uint32_t n_expert_used;
};

// One tensor of experts.
struct les_tensor_info {
  // `sizeof(struct les_tensor_info)`.
  size_t struct_size;
  // Where expert 0 begins in its file, in bytes; expert `e` begins `e * expert_bytes` later, unless the file is packed.
  uint64_t offset;
  // Bytes of one expert of the tensor's type.
  uint64_t expert_bytes;
  // Which file (0: the first shard).
  uint32_t file;
  // The layer.
  uint32_t layer;
  // How many experts.
  uint32_t n_expert;
  // The tensor's ggml type; see `les_model_types`.
  uint32_t ggml_type;
  // Its GGUF name.
  char name[64];
  // Elements of a row.
  uint64_t n_columns;
  // Rows of one expert.
  uint64_t n_rows;
  // 1 when the file is packed, else 0.
  uint32_t packed;
};

// What a user may choose. Fill it with `les_params_default`, then change what matters.
struct les_params {
  // `sizeof(struct les_params)`.
  size_t struct_size;
  // "off", "auto" or "on"; NULL: "auto".
  const char *mode;
  // Memory for experts: "1500" (MiB), "3G", "512K", "40%" (of the experts), "min", "auto"; NULL: "auto".
  const char *cache;
  // "auto", "uring" or "pread"; NULL: "auto".
  const char *io;
  // The most reads in flight, as a number; NULL or "0": the default.
  const char *io_depth;
  // Layers to look ahead, as a number, 0: none; NULL or "auto": one, or two where reads come late.
  const char *lookahead;
  // A file for the routing trace; NULL: none.
  const char *trace;
  // A file that keeps what is learned of the model from one run to the next: read when streaming begins, written by
  // `les_model_profile_save`; NULL: none.
  const char *profile;
  // A file that records what the experts are applied to, for `les pack --inputs`; NULL: none.
  const char *inputs;
};

// The counters of one phase.
struct les_phase {
  // Tokens that passed the first tensor of experts that streams.
  uint64_t tokens;
  // Experts asked for, each once per operation with the first matrix of its layer.
  uint64_t requests;
  // Of these, in memory when asked for.
  uint64_t hits;
  // Bytes whose reading was started.
  uint64_t bytes_read;
  // Nanoseconds that the computation waited for reads.
  uint64_t wait_ns;
};

// The main counters; `les_model_stats_write` writes all.
struct les_stats {
  // `sizeof(struct les_stats)`.
  size_t struct_size;
  // Text that is generated: one token at a time, or with drafts that are verified.
  struct les_phase decode;
  // Several tokens at once.
  struct les_phase prompt;
  // Bytes of all slots.
  uint64_t cache_bytes;
  // Matrices of experts evicted.
  uint64_t evictions;
  // Reads that failed.
  uint64_t read_errors;
  // Nanoseconds from one pass that generates to the next, all but the longest.
  uint64_t decode_ns;
  // Tokens in `decode_ns`: one for each pass, and the drafts that stood.
  uint64_t decode_steps;
  // The largest resident set of the process so far, in bytes; 0 where the system does not tell.
  uint64_t peak_rss_bytes;
  // Matrices of experts that were read because they were guessed.
  uint64_t guessed;
  // Of these, in memory when they were needed.
  uint64_t guessed_in_time;
  // Of these, still being read when they were needed.
  uint64_t guessed_late;
  // Of these, not needed by the pass that they were read for.
  uint64_t guessed_wasted;
  // Passes that verified drafted tokens, see `les_model_drafted`.
  uint64_t verifications;
  // Matrices of experts that were read and that no other than drafted tokens wanted.
  uint64_t draft_reads;
  // Of these, wanted by no token that stood.
  uint64_t draft_reads_rejected;
  // Of the evictions, those of what was worth keeping, for what drafted tokens alone wanted or was guessed while they were
  // verified.
  uint64_t evictions_for_drafts;
  // Of these, evicted for what is kept instead, as tokens want it that stood.
  uint64_t evictions_for_accepted;
};

// How to speculate.
struct les_spec_params {
  // `sizeof(struct les_spec_params)`.
  size_t struct_size;
  // `off`, `adaptive` or the number of tokens to verify at most; NULL or empty: `adaptive`.
  const char *width;
  // The most tokens that the drafter drafts at once, up to 256.
  uint32_t n_max;
  // What the draws begin with: the same calls after the same seed give the same tokens.
  uint64_t seed;
  // The model that verifies; NULL: none is told. `les_spec_verify` and `les_spec_done` call `les_model_drafted` and
  // `les_model_judged` for it, and its statistics tell of the sequence when that has ended.
  const struct les_model *model;
};

// A token, and how likely it is.
struct les_candidate {
  // The token's id.
  int32_t token;
  // Its probability, up to a factor that is the same for all candidates.
  float p;
};

// What became of a step.
struct les_spec_step {
  // `sizeof(struct les_spec_step)`.
  size_t struct_size;
  // Tokens that were drafted.
  uint32_t drafted;
  // Of these, verified: as many as `les_spec_verify` said, or fewer.
  uint32_t verified;
  // Of these, standing.
  uint32_t stood;
  // Nanoseconds that drafting took.
  uint64_t draft_ns;
  // Nanoseconds that all the rest of the step took.
  uint64_t step_ns;
  // Tokens that it yielded beside those that stood and the one after them: where the target can only go back as a whole, what
  // stands is computed anew, and tells one token more.
  uint32_t more;
};

// The counters of the steps that verified one number of tokens, and of the tokens that were drafted at that place.
struct les_spec_width {
  // `sizeof(struct les_spec_width)`.
  size_t struct_size;
  // Steps.
  uint64_t steps;
  // Tokens that they yielded.
  uint64_t tokens;
  // Nanoseconds that they took, without drafting.
  uint64_t ns;
  // Of the steps, those that were made to find out whether conditions have changed.
  uint64_t tries;
  // Tokens at this place of a draft, from 1, that were verified with all those before them standing.
  uint64_t verified;
  // Of these, standing.
  uint64_t stood;
  // How many of these were expected to stand.
  double promised;
};

// Success.
#define LES_OK 0

// The walk is at its end: there are no more experts.
#define LES_END 1

// A pointer that must not be NULL is NULL.
#define LES_ERR_NULL -1

// The handle is not one that is open: it was closed, or never was one.
#define LES_ERR_HANDLE -2

// An argument makes no sense.
#define LES_ERR_INVALID -3

// `struct_size` is not the size of a known version of the struct.
#define LES_ERR_STRUCT_SIZE -4

// A file could not be opened or inspected.
#define LES_ERR_FILE -5

// A file is no GGUF that can be streamed from.
#define LES_ERR_FORMAT -6

// A read of an expert failed.
#define LES_ERR_READ -7

// A file was changed while the model was in use.
#define LES_ERR_CHANGED -8

// The cache is smaller than one token's experts.
#define LES_ERR_BUDGET -9

// The router named an expert that is not there.
#define LES_ERR_EXPERT_ID -10

// The input of the experts has a value that is not finite.
#define LES_ERR_NOT_A_NUMBER -11

// The device does not answer.
#define LES_ERR_STALLED -12

// The system refused memory or another resource.
#define LES_ERR_SYSTEM -13

// There is no such tensor, or nothing to report yet.
#define LES_ERR_NOT_FOUND -14

// A defect of this library: a panic was caught. The handle stays usable or reports errors; nothing is undefined.
#define LES_ERR_PANIC -15

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The `LES_ABI_VERSION` that the library was built with; compare it with the header's. Any thread.
uint32_t les_abi_version(void);

// The library's version, such as "0.1.0", valid forever. Any thread.
const char *les_version(void);

// Opens a layer, in place of a ticket for each of its operations: `op` is the first of them in the model's order, `later`
// are the `n_later` other tensors, in that order, whose experts are needed for the same picks.
// An expert is handed out when all its matrices are there, so that those that are can be computed, with all operations,
// while the others are read. `LES_ERR_NOT_FOUND` when the cache has no room for all of them at once: open tickets then.
// Reads are started by `les_layer_attend`, or when a walker waits. The handle is closed when the last walker leaves. Any thread.
//
// `op` and `out` as for `les_ticket_open`; `later` is NULL or readable for `n_later` numbers.
les_status les_layer_open(const struct les_model *handle,
                          const struct les_op *op,
                          const uint32_t *later,
                          uint32_t n_later,
                          struct les_layer **out);

// To be called by one walker twice for each wave: before it asks for wave `wave` with `computing` 0, and with 1 when the
// others have begun to compute it. Starts the reads, learns from the picks and reads ahead, each when the walkers have
// something to compute meanwhile, or would wait anyway. `op` is what the layer was opened with: its ids and input must be
// what they were. A layer that is not attended does without guesses. Waves 0 and 1 suffice.
//
// `op` as for `les_layer_open`.
les_status les_layer_attend(struct les_layer *layer,
                            uint32_t wave,
                            int32_t computing,
                            const struct les_op *op);

// The next experts whose matrices are all there, at least one: the positions from `*first` up to, but not with, `*last`.
// `wave` is 0 first, then 1, and so on; every walker gets the same answers. By asking for a wave a walker gives up the
// experts of the one before. Waits for the device if need be. After the last one the answer is `LES_END`, and this walker
// has left; so it has after an error, but not after `LES_ERR_NULL` or `LES_ERR_INVALID`. Each walker is a thread, as for `les_ticket_next`.
//
// `first` and `last` are NULL or writable.
les_status les_layer_wave(struct les_layer *layer,
                          uint32_t wave,
                          uint32_t *first,
                          uint32_t *last);

// The expert at `position` of the wave that this walker was given last, and its matrix of `tensor`. Both are valid until
// the walker asks for the next wave. `LES_ERR_INVALID` for a position that was not handed out, or another layer's tensor.
//
// `expert` and `data` are NULL or writable.
les_status les_layer_expert(struct les_layer *layer,
                            uint32_t position,
                            uint32_t tensor,
                            uint32_t *expert,
                            const void **data);

// Leaves a layer before its end: like asking for waves on to `LES_END`. The walker's own thread; `LES_ERR_INVALID` when it
// has left, or is one more than the op's `n_walkers`.
les_status les_layer_leave(struct les_layer *layer);

// Gives up a layer that not all walkers will leave by themselves, as `les_ticket_free` does a ticket. NULL is fine. Any
// thread.
les_status les_layer_free(struct les_layer *layer);

// Opens the model whose first (or only) shard is at `path`; reads headers only. On success `*out` is a handle for
// `les_model_free`. On failure `err`, if there is room, tells why. Any thread.
//
// `path` is NULL or a NUL-terminated string, `out` NULL or writable, `err` NULL or writable for `err_len` bytes.
les_status les_model_open(const char *path,
                          struct les_model **out,
                          char *err,
                          size_t err_len);

// Opens a model whose `n` shards are at `paths`, in their order, whatever their names. Otherwise `les_model_open`.
//
// As `les_model_open`; `paths` is NULL or points to `n` such strings.
les_status les_model_open_shards(const char *const *paths,
                                 size_t n,
                                 struct les_model **out,
                                 char *err,
                                 size_t err_len);

// Closes the handle. Tickets that are open keep what they need until they are closed. NULL is fine. Any thread.
les_status les_model_free(struct les_model *model);

// Fills `info`, whose `struct_size` the caller has set. Any thread.
//
// `info` is NULL or a writable struct that begins with its size.
les_status les_model_info(const struct les_model *handle, struct les_model_info *info);

// The number of the tensor of experts named `name`, for `les_op`. `LES_ERR_NOT_FOUND` when it does not stream. Any
// thread.
//
// `name` is NULL or a NUL-terminated string, `tensor` NULL or writable.
les_status les_model_find(const struct les_model *handle,
                          const char *name,
                          uint32_t *tensor);

// Fills `info`, whose `struct_size` the caller has set, for tensor number `tensor`. Any thread.
//
// `info` is NULL or a writable struct that begins with its size.
les_status les_model_tensor(const struct les_model *handle,
                            uint32_t tensor,
                            struct les_tensor_info *info);

// Fills `types` with the ggml type of each of the `n` experts of tensor number `tensor`: a packed file may hold some of
// another type than the tensor's own. `LES_ERR_INVALID` when it has another number of experts. Any thread.
//
// `types` is NULL or writable for `n` numbers.
les_status les_model_types(const struct les_model *handle,
                           uint32_t tensor,
                           uint32_t *types,
                           uint32_t n);

// Whether only packed files have tensors of this name: `LES_OK` for one that holds a layer's experts or checksums, else
// `LES_ERR_NOT_FOUND`. Any thread.
//
// `name` is NULL or a NUL-terminated string.
les_status les_is_packed_name(const char *name);

// Decides by `params` and the memory of the machine whether the experts stream: `*streams` is 1 or 0, `*cache_bytes`
// the memory that they will take (the least, when that depends on what is left later), `message` one line for the user
// (empty for a model without routed experts). The choice holds for everything after it. Takes no memory yet. On
// failure `message` tells why. Any thread; `LES_ERR_INVALID` when the model streams already.
//
// `params` is NULL or begins with its size and holds NULL or strings, `streams` and `cache_bytes` are NULL or
// writable, `message` is NULL or writable for `message_len` bytes.
les_status les_model_decide(const struct les_model *handle,
                            const struct les_params *params,
                            int32_t *streams,
                            uint64_t *cache_bytes,
                            char *message,
                            size_t message_len);

// Reads `n` bytes at byte `offset` of tensor number `tensor` to `data`, from its file and past the cache: for copies of the
// model, whether or not it streams. On failure `les_model_last_error` tells why, and what `data` holds is undefined. Any
// thread.
//
// `data` is NULL or writable for `n` bytes.
les_status les_model_read(const struct les_model *handle,
                          uint32_t tensor,
                          uint64_t offset,
                          void *data,
                          size_t n);

// Takes the memory and starts the I/O now; the first ticket does it otherwise. Any thread.
//
// `err` is NULL or writable for `err_len` bytes.
les_status les_model_start(const struct les_model *handle, char *err, size_t err_len);

// Drops what the page cache holds of the model's files: call it when all other weights are loaded. Any thread.
les_status les_model_forget_cached(const struct les_model *handle);

// From now on a pass over the model with exactly `n_rows` rows (tokens) verifies drafts: row 0 is certain, the others may be
// rejected. What they alone need displaces little, and nothing is learned from them before `les_model_judged` tells which of them
// stand, or, when `les_model_drafted` is called again first, all do. Passes of other numbers of rows are as ever. 0 or 1: nothing
// is drafted. Any thread.
les_status les_model_drafted(const struct les_model *handle,
                             uint32_t n_rows);

// Of the pass that `les_model_drafted` announced the first `n_rows` rows stand; 1: no draft does. Passes that follow are as ever.
// Without effect when there was no such pass. Any thread.
les_status les_model_judged(const struct les_model *handle,
                            uint32_t n_rows);

// Fills `params` with the defaults and its own size. Any thread.
//
// `params` is NULL or valid for writing a `struct les_params`.
les_status les_params_default(struct les_params *params);

// Whether `params` make sense for any model. If not, `err`, if there is room, tells why. Any thread.
//
// `params` is NULL or begins with its size and holds NULL or strings, `err` is NULL or writable for `err_len` bytes.
les_status les_params_check(const struct les_params *params,
                            char *err,
                            size_t err_len);

// What the user should know of how the files are read, and of the profile, in one line; empty when all is as it should
// be. Any thread.
//
// `buf` is NULL or writable for `len` bytes.
les_status les_model_notice(const struct les_model *handle,
                            char *buf,
                            size_t len);

// What went wrong last in a ticket of this model; empty if nothing did. Any thread.
//
// `buf` is NULL or writable for `len` bytes.
les_status les_model_last_error(const struct les_model *handle, char *buf, size_t len);

// Fills `stats`, whose `struct_size` the caller has set. `LES_ERR_NOT_FOUND` before the first ticket. Any thread.
//
// `stats` is NULL or a writable struct that begins with its size.
les_status les_model_stats(const struct les_model *handle,
                           struct les_stats *stats);

// Writes all counters as JSON to the file `path`. `LES_ERR_NOT_FOUND` before the first ticket. Any thread.
//
// `path` is NULL or a NUL-terminated string.
les_status les_model_stats_write(const struct les_model *handle,
                                 const char *path);

// Writes what was learned of the model to the file that `les_params` named as its profile, in place of what is there, at
// once or not at all. `LES_ERR_NOT_FOUND` before streaming begins, without a profile, or when the file is another's (then
// `les_model_notice` says so). Any thread; tickets wait meanwhile.
les_status les_model_profile_save(const struct les_model *handle);

// Ends the routing trace that `les_params` named, and writes what is left of it. An error is that of the first record that
// could not be written: the trace ends before it. `LES_ERR_NOT_FOUND` without a trace, or when it has been ended. Any
// thread; tickets wait meanwhile.
les_status les_model_trace_close(const struct les_model *handle);

// Ends the recording of inputs that `les_params` named, and writes what is left of it. An error is that of the first write
// that failed: the recording ends there. `LES_ERR_NOT_FOUND` without a recording, or when it has been ended. Any thread;
// tickets wait meanwhile.
les_status les_model_inputs_close(const struct les_model *handle);

// Bytes of memory that this process may still take, control groups respected; 0 where the system does not tell. Any
// thread.
uint64_t les_memory_available(void);

// Begins the speculation of a sequence of tokens. `err` is told what is wrong. Any thread.
//
// `params` is NULL or begins with its size, and its `width` is NULL or a string; `out` is NULL or writable; `err` is
// NULL or writable for `err_len` bytes.
les_status les_spec_open(const struct les_spec_params *params,
                         struct les_spec **out,
                         char *err,
                         size_t err_len);

// How many tokens to draft for the next step. Any thread.
//
// `n` is NULL or writable.
les_status les_spec_draft(struct les_spec *spec, uint32_t *n);

// How many of the `n` tokens that were drafted to verify, the first ones. `confidences` has for each how likely the
// drafter thinks that it stands when those before it do: not a number where it does not say, NULL when it never does. Any thread.
//
// `confidences` is NULL or readable for `n` floats; `width` is NULL or writable.
les_status les_spec_verify(struct les_spec *spec,
                           const float *confidences,
                           uint32_t n,
                           uint32_t *width);

// Whether the token `drafted` stands: `*token` is that one if it does, else the one in its place, after which nothing of
// the draft counts. `target` is the target's distribution after the user's samplers, `draft` that which the token was drawn from;
// `n_draft` 0 when the drafter always proposes its best. Tokens that are not there have probability 0. `LES_ERR_INVALID`
// for what is no distribution. Any thread.
//
// `target` and `draft` are readable for so many candidates, or NULL with none; `token` is NULL or writable.
les_status les_spec_judge(struct les_spec *spec,
                          int32_t drafted,
                          const struct les_candidate *target,
                          size_t n_target,
                          const struct les_candidate *draft,
                          size_t n_draft,
                          int32_t *token);

// Draws a token from the target's distribution: the one after a draft that stands as a whole. As `les_spec_judge`.
//
// As `les_spec_judge`.
les_status les_spec_draw(struct les_spec *spec,
                         const struct les_candidate *target,
                         size_t n_target,
                         int32_t *token);

// The step is over for which `les_spec_draft` and, when tokens were drafted, `les_spec_verify` were called. Any thread.
//
// `step` is NULL or begins with its size.
les_status les_spec_done(struct les_spec *spec,
                         const struct les_spec_step *step);

// The counters of the steps that verified `width` tokens. `LES_ERR_INVALID` for more than the drafter drafts. Any thread.
//
// `out` is NULL or begins with its size.
les_status les_spec_stats(struct les_spec *spec,
                          uint32_t width,
                          struct les_spec_width *out);

// As `les_spec_stats`, of all sequences of a model that have ended. Any thread.
//
// As `les_spec_stats`.
les_status les_model_spec_stats(const struct les_model *handle,
                                uint32_t width,
                                struct les_spec_width *out);

// Ends the speculation of a sequence. NULL is fine. Any thread.
les_status les_spec_free(struct les_spec *spec);

// A short English text for a status, never NULL, valid forever. Any thread.
const char *les_status_str(les_status status);

// Opens a ticket: starts the reads that the operation needs, and those that its layer will need next. The ids and the
// input are not used after the call. The handle is closed when the last walker leaves. Any thread; one ticket per
// operation.
//
// `op` is NULL or begins with its size; `op->ids` and `op->input` are NULL or readable as described there; `out` is
// NULL or writable.
les_status les_ticket_open(const struct les_model *handle,
                           const struct les_op *op,
                           struct les_ticket **out);

// The expert at `position` of the walk: 0 first, then 1, and so on; every walker sees the same order. By asking for a
// position a walker gives up the expert before. Waits for the device if need be. `*expert` and `*data` are valid until
// this walker's next call. After the last one the answer is `LES_END`, and this walker has left; so it has after an
// error, but not after `LES_ERR_NULL`. Each walker is a thread, the same for all its calls: `LES_ERR_INVALID`, without
// effect, when this thread has left, asks for another position, or is one more than the op's `n_walkers`.
//
// `expert` and `data` are NULL or writable.
les_status les_ticket_next(struct les_ticket *ticket,
                           uint32_t position,
                           uint32_t *expert,
                           const void **data);

// Leaves a walk before its end, or before its first expert: like reading on to `LES_END`. The walker's own thread;
// `LES_ERR_INVALID` when it has left, or is one more than the op's `n_walkers`.
les_status les_ticket_leave(struct les_ticket *ticket);

// Gives up a ticket that not all walkers will leave by themselves; the last one to leave closes the handle otherwise.
// No walker may use an expert of it any more, nor what a call that was under way in its thread answers. NULL is fine.
// Any thread.
les_status les_ticket_free(struct les_ticket *ticket);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* LES_H */
