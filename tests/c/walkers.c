// Walkers that go astray, leave, or outlive their model.
#define _POSIX_C_SOURCE 200809L

#include "test.h"

#include <pthread.h>
#include <string.h>

#define MANY 32

// One call in a thread of its own, which is another walker than the caller.
struct call {
    struct les_ticket *ticket;
    // from here on, so many positions
    uint32_t position, n;
    int leave;
    les_status status;
};

static void *call_thread(void *arg) {
    struct call *call = arg;
    uint32_t expert;
    const void *data;
    call->status = LES_OK;
    for (uint32_t i = 0; i < call->n && call->status == LES_OK; i++) {
        call->status = les_ticket_next(call->ticket, call->position + i, &expert, &data);
    }
    if (call->leave && call->status == LES_OK) {
        call->status = les_ticket_leave(call->ticket);
    }
    return NULL;
}

static les_status elsewhere(struct les_ticket *ticket, uint32_t position, uint32_t n, int leave) {
    struct call call = { ticket, position, n, leave, LES_ERR_PANIC };
    pthread_t thread;
    if (pthread_create(&thread, NULL, call_thread, &call) == 0) {
        pthread_join(thread, NULL);
    }
    return call.status;
}

// However one walker errs, the other's expert stays what it is.
static void astray(struct les_model *model) {
    int32_t ids[MANY * N_USED];
    pick(ids, MANY);
    uint32_t tensor = find(model, 0, UP), other = find(model, 1, UP);
    struct les_tensor_info info = tensor_of(model, tensor);
    struct les_ticket *ticket = open_ticket(model, ids, 1, tensor, 2);
    uint32_t expert = 4711, none = 4711;
    const void *data = NULL, *nothing = NULL;
    STATUS(LES_ERR_INVALID, les_ticket_next(ticket, 1, &none, &nothing));
    STATUS(LES_ERR_INVALID, les_ticket_next(ticket, UINT32_MAX, &none, &nothing));
    STATUS(LES_OK, les_ticket_next(ticket, 0, &expert, &data));
    STATUS(LES_ERR_INVALID, les_ticket_next(ticket, 0, &none, &nothing));
    STATUS(LES_ERR_INVALID, les_ticket_next(ticket, 2, &none, &nothing));
    HAS(last_error(model), "position");
    CHECK(none == 4711 && !nothing);
    // the other walks to the end, and three more come who are none
    STATUS(LES_END, elsewhere(ticket, 0, N_USED + 1, 0));
    STATUS(LES_ERR_INVALID, elsewhere(ticket, 0, 1, 0));
    STATUS(LES_ERR_INVALID, elsewhere(ticket, N_USED, 1, 0));
    STATUS(LES_ERR_INVALID, elsewhere(ticket, 0, 0, 1));
    HAS(last_error(model), "walkers");
    // others need every slot that is to be had
    STATUS(LES_END, walk_all(model, ids, MANY, other, 1));
    CHECK(same_as_file(&info, expert, data));
    struct walk walk = { .ticket = ticket, .tensor = info, .experts = { expert }, .n = 1 };
    walk_on(&walk);
    CHECK(walk.end == LES_END && walk.n == N_USED && walk.wrong == 0);
    STATUS(LES_ERR_HANDLE, les_ticket_next(ticket, N_USED, &none, &nothing));
}

// After the end, and after leaving, while another walker goes on.
static void twice(struct les_model *model) {
    int32_t ids[MANY * N_USED];
    pick(ids, MANY);
    uint32_t tensor = find(model, 2, UP), expert, none = 4711;
    const void *data, *nothing = NULL;
    struct les_tensor_info info = tensor_of(model, tensor);
    for (int leave = 0; leave < 2; leave++) {
        struct les_ticket *ticket = open_ticket(model, ids, 1, tensor, 2);
        struct walk walk = { .ticket = ticket, .tensor = info };
        if (leave) {
            STATUS(LES_OK, les_ticket_next(ticket, 0, &expert, &data));
            CHECK(same_as_file(&info, expert, data));
            STATUS(LES_OK, les_ticket_leave(ticket));
        } else {
            walk_on(&walk);
            CHECK(walk.end == LES_END && walk.wrong == 0);
        }
        for (uint32_t position = 0; position < N_USED + 2; position++) {
            STATUS(LES_ERR_INVALID, les_ticket_next(ticket, position, &none, &nothing));
        }
        STATUS(LES_ERR_INVALID, les_ticket_leave(ticket));
        STATUS(LES_ERR_INVALID, les_ticket_leave(ticket));
        HAS(last_error(model), "has left");
        CHECK(none == 4711 && !nothing);
        STATUS(LES_END, elsewhere(ticket, 0, N_USED + 1, 0));
        STATUS(LES_ERR_HANDLE, les_ticket_leave(ticket));
        STATUS(LES_ERR_HANDLE, les_ticket_next(ticket, 0, &none, &nothing));
        STATUS(LES_ERR_HANDLE, les_ticket_free(ticket));
    }
}

// One that has left keeps no slots from the others: there are fewer than experts.
static void left_early(struct les_model *model) {
    int32_t ids[MANY * N_USED];
    pick(ids, MANY);
    for (uint32_t n = 0; n < 3; n++) {
        uint32_t tensor = find(model, (int)n, DOWN);
        struct walk walk = { .tensor = tensor_of(model, tensor) };
        walk.ticket = open_ticket(model, ids, MANY, tensor, 2);
        STATUS(LES_OK, elsewhere(walk.ticket, 0, n, 1));
        walk_on(&walk);
        CHECK(walk.end == LES_END && walk.n > 4 * N_USED && walk.wrong == 0);
    }
    // all of them leave
    struct les_ticket *ticket = open_ticket(model, ids, MANY, find(model, 0, DOWN), 2);
    STATUS(LES_OK, elsewhere(ticket, 0, 1, 1));
    STATUS(LES_OK, les_ticket_leave(ticket));
    STATUS(LES_ERR_HANDLE, les_ticket_free(ticket));
    STATUS(LES_END, walk_all(model, ids, MANY, find(model, 1, DOWN), 2));
}

static void freed_in_mid_walk(struct les_model *model) {
    int32_t ids[MANY * N_USED];
    uint32_t expert = 0;
    const void *data = NULL;
    for (uint32_t n = 0; n < 4; n++) {
        pick(ids, MANY);
        struct les_ticket *ticket = open_ticket(model, ids, MANY, find(model, 4, DOWN), 2);
        for (uint32_t i = 0; i < n; i++) {
            STATUS(LES_OK, les_ticket_next(ticket, i, &expert, &data));
        }
        STATUS(LES_OK, les_ticket_free(ticket));
        STATUS(LES_ERR_HANDLE, les_ticket_next(ticket, n, &expert, &data));
        STATUS(LES_ERR_HANDLE, les_ticket_leave(ticket));
        STATUS(LES_ERR_HANDLE, les_ticket_free(ticket));
    }
    // nothing of it is left behind
    STATUS(LES_END, walk_all(model, ids, MANY, find(model, 4, DOWN), 2));
    STATUS(LES_END, walk_all(model, ids, MANY, find(model, 5, DOWN), 1));
}

static void outlives_its_model(void) {
    for (int n_walkers = 1; n_walkers <= 2; n_walkers++) {
        struct les_model *model = streaming("min");
        int32_t ids[MANY * N_USED];
        pick(ids, MANY);
        uint32_t tensor = find(model, 7, DOWN);
        struct walk walk = { .tensor = tensor_of(model, tensor) };
        walk.ticket = open_ticket(model, ids, MANY, tensor, (uint32_t)n_walkers);
        STATUS(LES_OK, les_model_free(model));
        STATUS(LES_ERR_HANDLE, les_model_free(model));
        struct les_model *other = open_model();
        if (n_walkers == 2) {
            STATUS(LES_OK, elsewhere(walk.ticket, 0, 1, 1));
        }
        walk_on(&walk);
        CHECK(walk.end == LES_END && walk.n > 4 * N_USED && walk.wrong == 0);
        STATUS(LES_ERR_HANDLE, les_ticket_leave(walk.ticket));
        STATUS(LES_OK, les_model_free(other));
    }
    // not walked at all: reads are under way
    struct les_model *model = streaming("50%");
    int32_t ids[MANY * N_USED];
    pick(ids, MANY);
    struct les_ticket *ticket = open_ticket(model, ids, MANY, find(model, 7, UP), 1);
    STATUS(LES_OK, les_model_free(model));
    STATUS(LES_OK, les_ticket_free(ticket));
}

void test_walkers(void) {
    struct les_model *model = streaming("min");
    astray(model);
    twice(model);
    left_early(model);
    freed_in_mid_walk(model);
    struct les_stats stats;
    stats.struct_size = sizeof(stats);
    STATUS(LES_OK, les_model_stats(model, &stats));
    CHECK(stats.evictions > 0 && stats.read_errors == 0);
    STATUS(LES_OK, les_model_free(model));
    outlives_its_model();
}
