// What the C tests share. The library is used through les.h alone, as any C program would.
#ifndef TEST_H
#define TEST_H

#include <stdint.h>
#include <stdio.h>

#include "les.h"

#define N_LAYERS 8
#define N_EXPERT 64
#define N_USED 4
#define N_WIDTH 256

extern int test_checks, test_failures;
// the model, a directory for files, and the engine: "pread" or "uring"
extern const char *test_model, *test_dir, *test_io;

void check_at(int ok, const char *what, const char *file, int line);
void status_at(les_status is, les_status expected, const char *what, const char *file, int line);
// `text` is not NULL and contains `part`
void has_at(const char *text, const char *part, const char *file, int line);

#define CHECK(c) check_at((c) != 0, #c, __FILE__, __LINE__)
#define STATUS(expected, call) status_at((call), (expected), #call, __FILE__, __LINE__)
#define HAS(text, part) has_at((text), (part), __FILE__, __LINE__)

enum part { UP, GATE, DOWN };

// ends the program when the model does not open
struct les_model *open_model(void);
struct les_params params_of(const char *mode, const char *cache);
// a model with this cache, ready for tickets
struct les_model *streaming(const char *cache);
// ends the program: nothing further makes sense
void give_up(const char *what, const char *why);
uint32_t find(struct les_model *model, int layer, enum part part);
struct les_op op_of(const int32_t *ids, uint32_t n_tokens, uint32_t tensor, uint32_t n_walkers);
struct les_ticket *open_ticket(struct les_model *model, const int32_t *ids, uint32_t n_tokens, uint32_t tensor,
                               uint32_t n_walkers);
// what no handle ever was
void *never(void);
// fills `ids` with picks for `n_tokens` tokens, four different ones each
void pick(int32_t *ids, uint32_t n_tokens);
const char *in_dir(const char *name);
const char *last_error(struct les_model *model);

// where a tensor's experts are in the file
struct les_tensor_info tensor_of(struct les_model *model, uint32_t tensor);
// whether `data` is what the file has for `expert`
int same_as_file(const struct les_tensor_info *tensor, uint32_t expert, const void *data);

// one walker
struct walk {
    struct les_ticket *ticket;
    struct les_tensor_info tensor;
    uint32_t experts[N_EXPERT];
    uint32_t n;
    int wrong;
    les_status end;
};

// walks from `walk->n` to the end, comparing all bytes
void walk_on(struct walk *walk);
// walks a new ticket by 1 or 2 threads and checks that every expert came once, in one order; answers how it ended
les_status walk_all(struct les_model *model, const int32_t *ids, uint32_t n_tokens, uint32_t tensor, int n_walkers);

void test_library(void);
void test_models(void);
void test_params(void);
void test_tickets(void);
void test_layers(void);
void test_misuse(void);
void test_spec(void);
void test_drafts(void);
void test_walkers(void);
void test_files(void);
void test_profiles(void);
void test_faults(void);

#endif
