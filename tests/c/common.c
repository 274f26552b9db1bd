#define _POSIX_C_SOURCE 200809L

#include "test.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

int test_checks, test_failures;
const char *test_model, *test_dir, *test_io;

void check_at(int ok, const char *what, const char *file, int line) {
    test_checks++;
    if (!ok) {
        test_failures++;
        printf("%s:%d: failed: %s\n", file, line, what);
    }
}

void status_at(les_status is, les_status expected, const char *what, const char *file, int line) {
    test_checks++;
    if (is != expected) {
        test_failures++;
        printf("%s:%d: failed: %s\n    is %d (%s), not %d (%s)\n", file, line, what, (int)is, les_status_str(is),
               (int)expected, les_status_str(expected));
    }
}

void has_at(const char *text, const char *part, const char *file, int line) {
    test_checks++;
    if (!text || !strstr(text, part)) {
        test_failures++;
        printf("%s:%d: failed: \"%s\" has no \"%s\"\n", file, line, text ? text : "(NULL)", part);
    }
}

void give_up(const char *what, const char *why) {
    printf("%s: %s\n", what, why);
    exit(1);
}

struct les_model *open_model(void) {
    struct les_model *model = NULL;
    char err[512] = "";
    if (les_model_open(test_model, &model, err, sizeof(err)) != LES_OK) {
        give_up("les_model_open", err);
    }
    return model;
}

struct les_params params_of(const char *mode, const char *cache) {
    struct les_params params;
    STATUS(LES_OK, les_params_default(&params));
    params.mode = mode;
    params.cache = cache;
    params.io = test_io;
    return params;
}

struct les_model *streaming(const char *cache) {
    struct les_model *model = open_model();
    struct les_params params = params_of("on", cache);
    int32_t streams = -1;
    uint64_t bytes = 0;
    char message[512] = "";
    if (les_model_decide(model, &params, &streams, &bytes, message, sizeof(message)) != LES_OK || streams != 1) {
        give_up("les_model_decide", message);
    }
    return model;
}

uint32_t find(struct les_model *model, int layer, enum part part) {
    static const char *const parts[] = { "up", "gate", "down" };
    char name[64];
    uint32_t tensor = UINT32_MAX;
    snprintf(name, sizeof(name), "blk.%d.ffn_%s_exps.weight", layer, parts[part]);
    if (les_model_find(model, name, &tensor) != LES_OK) {
        give_up("les_model_find", name);
    }
    return tensor;
}

struct les_op op_of(const int32_t *ids, uint32_t n_tokens, uint32_t tensor, uint32_t n_walkers) {
    struct les_op op;
    memset(&op, 0, sizeof(op));
    op.struct_size = sizeof(op);
    op.ids = ids;
    op.ids_stride = N_USED * sizeof(*ids);
    op.n_used = N_USED;
    op.n_tokens = n_tokens;
    op.tensor = tensor;
    op.n_walkers = n_walkers;
    return op;
}

struct les_ticket *open_ticket(struct les_model *model, const int32_t *ids, uint32_t n_tokens, uint32_t tensor,
                               uint32_t n_walkers) {
    struct les_op op = op_of(ids, n_tokens, tensor, n_walkers);
    struct les_ticket *ticket = NULL;
    if (les_ticket_open(model, &op, &ticket) != LES_OK) {
        give_up("les_ticket_open", last_error(model));
    }
    return ticket;
}

void *never(void) {
    static char thing;
    return &thing;
}

void pick(int32_t *ids, uint32_t n_tokens) {
    static uint32_t state = 1;
    for (uint32_t t = 0; t < n_tokens; t++) {
        for (int i = 0; i < N_USED; i++) {
            state = state * 1664525 + 1013904223;
            // of four quarters, so that they differ; the higher bits are the more random ones
            ids[t * N_USED + i] = (int32_t)(i * (N_EXPERT / N_USED) + (state >> 24) % (N_EXPERT / N_USED));
        }
    }
}

const char *in_dir(const char *name) {
    static char path[1024];
    snprintf(path, sizeof(path), "%s/%s", test_dir, name);
    return path;
}

const char *last_error(struct les_model *model) {
    static char text[1024];
    text[0] = 0;
    STATUS(LES_OK, les_model_last_error(model, text, sizeof(text)));
    return text;
}

struct les_tensor_info tensor_of(struct les_model *model, uint32_t tensor) {
    struct les_tensor_info info;
    memset(&info, 0, sizeof(info));
    info.struct_size = sizeof(info);
    STATUS(LES_OK, les_model_tensor(model, tensor, &info));
    return info;
}

int same_as_file(const struct les_tensor_info *tensor, uint32_t expert, const void *data) {
    size_t n = (size_t)tensor->expert_bytes;
    char *bytes = malloc(n);
    FILE *file = fopen(test_model, "rb");
    int same = bytes && file && expert < tensor->n_expert &&
        fseek(file, (long)(tensor->offset + expert * tensor->expert_bytes), SEEK_SET) == 0 &&
        fread(bytes, 1, n, file) == n && memcmp(bytes, data, n) == 0;
    if (file) {
        fclose(file);
    }
    free(bytes);
    return same;
}

void walk_on(struct walk *walk) {
    for (;;) {
        uint32_t expert = UINT32_MAX;
        const void *data = NULL;
        walk->end = les_ticket_next(walk->ticket, walk->n, &expert, &data);
        if (walk->end != LES_OK) {
            // outputs are written only on success
            walk->wrong += expert != UINT32_MAX || data != NULL;
            return;
        }
        if (walk->n == N_EXPERT) {
            walk->wrong++;
            return;
        }
        walk->wrong += !same_as_file(&walk->tensor, expert, data);
        walk->experts[walk->n++] = expert;
    }
}

static void *walk_thread(void *walk) {
    walk_on(walk);
    return NULL;
}

les_status walk_all(struct les_model *model, const int32_t *ids, uint32_t n_tokens, uint32_t tensor, int n_walkers) {
    struct walk walks[2];
    memset(walks, 0, sizeof(walks));
    for (int w = 0; w < n_walkers; w++) {
        walks[w].tensor = tensor_of(model, tensor);
    }
    struct les_ticket *ticket = open_ticket(model, ids, n_tokens, tensor, (uint32_t)n_walkers);
    walks[0].ticket = walks[1].ticket = ticket;
    pthread_t thread;
    if (n_walkers == 2 && pthread_create(&thread, NULL, walk_thread, &walks[1]) != 0) {
        give_up("pthread_create", "no thread");
    }
    walk_on(&walks[0]);
    if (n_walkers == 2) {
        pthread_join(thread, NULL);
        CHECK(walks[1].wrong == 0);
        CHECK(walks[1].end == walks[0].end);
        uint32_t n = walks[0].n < walks[1].n ? walks[0].n : walks[1].n;
        CHECK(memcmp(walks[0].experts, walks[1].experts, n * sizeof(uint32_t)) == 0);
    }
    CHECK(walks[0].wrong == 0);
    // the last walker has closed it
    STATUS(LES_ERR_HANDLE, les_ticket_free(ticket));
    if (walks[0].end == LES_END) {
        int picked[N_EXPERT] = { 0 }, came[N_EXPERT] = { 0 };
        for (uint32_t i = 0; i < n_tokens * N_USED; i++) {
            picked[ids[i]] = 1;
        }
        for (uint32_t i = 0; i < walks[0].n; i++) {
            came[walks[0].experts[i]]++;
        }
        CHECK(memcmp(picked, came, sizeof(came)) == 0);
    }
    return walks[0].end;
}
