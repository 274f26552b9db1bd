// Layers: every expert that was picked comes once, with all its matrices, and both walkers see the same waves.
#include "test.h"

#include <pthread.h>
#include <string.h>

#define N_PARTS 3

struct layer_walk {
    struct les_layer *layer;
    struct les_op op;
    struct les_tensor_info tensors[N_PARTS];
    uint32_t numbers[N_PARTS];
    int attends;
    uint32_t experts[N_EXPERT];
    uint32_t n;
    int wrong;
    les_status end;
};

static void *compute(void *arg) {
    struct layer_walk *walk = arg;
    for (uint32_t wave = 0;; wave++) {
        uint32_t first = UINT32_MAX, last = UINT32_MAX;
        if (walk->attends) {
            walk->wrong += les_layer_attend(walk->layer, wave, 0, &walk->op) != LES_OK;
        }
        walk->end = les_layer_wave(walk->layer, wave, &first, &last);
        if (walk->end != LES_OK) {
            walk->wrong += first != UINT32_MAX || last != UINT32_MAX;
            return NULL;
        }
        walk->wrong += first != walk->n || last <= first || last > N_USED;
        if (walk->attends) {
            walk->wrong += les_layer_attend(walk->layer, wave, 1, &walk->op) != LES_OK;
        }
        for (int part = 0; part < N_PARTS && !walk->wrong; part++) {
            for (uint32_t position = first; position < last; position++) {
                uint32_t expert = UINT32_MAX;
                const void *data = NULL;
                walk->wrong +=
                    les_layer_expert(walk->layer, position, walk->numbers[part], &expert, &data) != LES_OK ||
                    !same_as_file(&walk->tensors[part], expert, data);
                walk->experts[position] = expert;
            }
        }
        walk->n = last;
    }
}

static struct les_layer *open_layer(struct les_model *model, const struct les_op *op, const uint32_t *numbers) {
    struct les_layer *layer = NULL;
    if (les_layer_open(model, op, numbers + 1, N_PARTS - 1, &layer) != LES_OK) {
        give_up("les_layer_open", last_error(model));
    }
    return layer;
}

static struct layer_walk walk_of(struct les_model *model, int layer, const int32_t *ids, uint32_t n_walkers) {
    struct layer_walk walk;
    memset(&walk, 0, sizeof(walk));
    for (int part = UP; part <= DOWN; part++) {
        walk.numbers[part] = find(model, layer, (enum part)part);
        walk.tensors[part] = tensor_of(model, walk.numbers[part]);
    }
    walk.op = op_of(ids, 1, walk.numbers[0], n_walkers);
    walk.layer = open_layer(model, &walk.op, walk.numbers);
    walk.attends = 1;
    return walk;
}

static void waves(void) {
    struct les_model *model = streaming("min");
    int32_t ids[N_USED];
    for (int pass = 0; pass < 6; pass++) {
        for (int layer = 0; layer < N_LAYERS; layer++) {
            pick(ids, 1);
            struct layer_walk walks[2];
            walks[0] = walk_of(model, layer, ids, 1 + (uint32_t)pass % 2);
            // guesses are not needed
            walks[0].attends = pass < 4;
            walks[1] = walks[0];
            walks[1].attends = 0;
            pthread_t thread;
            if (pass % 2 == 1 && pthread_create(&thread, NULL, compute, &walks[1]) != 0) {
                give_up("pthread_create", "no thread");
            }
            compute(&walks[0]);
            if (pass % 2 == 1) {
                pthread_join(thread, NULL);
                CHECK(walks[1].wrong == 0 && walks[1].end == LES_END);
                CHECK(memcmp(walks[0].experts, walks[1].experts, sizeof(walks[0].experts)) == 0);
            }
            CHECK(walks[0].wrong == 0 && walks[0].end == LES_END && walks[0].n == N_USED);
            int picked[N_EXPERT] = { 0 }, came[N_EXPERT] = { 0 };
            for (int i = 0; i < N_USED; i++) {
                picked[ids[i]] = 1;
                came[walks[0].experts[i]]++;
            }
            CHECK(memcmp(picked, came, sizeof(came)) == 0);
            // the last walker has closed it
            STATUS(LES_ERR_HANDLE, les_layer_free(walks[0].layer));
        }
    }
    STATUS(LES_OK, les_model_free(model));
}

static void bad_layer(struct les_layer *handle, les_status expected) {
    uint32_t number = 4711;
    const void *data = NULL;
    int32_t ids[N_USED] = { 0, 1, 2, 3 };
    struct les_op op = op_of(ids, 1, 0, 1);
    STATUS(expected, les_layer_attend(handle, 0, 0, &op));
    STATUS(expected, les_layer_wave(handle, 0, &number, &number));
    STATUS(expected, les_layer_expert(handle, 0, 0, &number, &data));
    STATUS(expected, les_layer_leave(handle));
    STATUS(expected == LES_ERR_NULL ? LES_OK : expected, les_layer_free(handle));
    CHECK(number == 4711 && !data);
}

static void misused(void) {
    struct les_model *model = streaming("min");
    int32_t ids[N_USED];
    pick(ids, 1);
    struct layer_walk walk = walk_of(model, 0, ids, 1);
    struct les_layer *layer = walk.layer, *out = NULL;
    bad_layer(NULL, LES_ERR_NULL);
    bad_layer(never(), LES_ERR_HANDLE);
    bad_layer((struct les_layer *)model, LES_ERR_HANDLE);

    struct les_op op = walk.op;
    STATUS(LES_ERR_NULL, les_layer_open(NULL, &op, walk.numbers + 1, 2, &out));
    STATUS(LES_ERR_NULL, les_layer_open(model, NULL, walk.numbers + 1, 2, &out));
    STATUS(LES_ERR_NULL, les_layer_open(model, &op, NULL, 2, &out));
    STATUS(LES_ERR_NULL, les_layer_open(model, &op, walk.numbers + 1, 2, NULL));
    STATUS(LES_ERR_INVALID, les_layer_open(model, &op, walk.numbers + 1, UINT32_MAX, &out));
    STATUS(LES_ERR_INVALID, les_layer_open(model, &op, walk.numbers, 1, &out)); // the same one twice
    uint32_t other = find(model, 1, UP);
    STATUS(LES_ERR_INVALID, les_layer_open(model, &op, &other, 1, &out));
    op.n_walkers = 0;
    STATUS(LES_ERR_INVALID, les_layer_open(model, &op, walk.numbers + 1, 2, &out));
    op = walk.op;
    op.ids = NULL;
    STATUS(LES_ERR_NULL, les_layer_open(model, &op, walk.numbers + 1, 2, &out));
    int32_t bad[N_USED] = { 0, 1, 2, N_EXPERT };
    op.ids = bad;
    STATUS(LES_ERR_EXPERT_ID, les_layer_open(model, &op, walk.numbers + 1, 2, &out));
    // all experts of many tokens have no room at once
    int32_t many[16 * N_USED];
    for (int i = 0; i < 16 * N_USED; i++) {
        many[i] = i % N_EXPERT;
    }
    op = op_of(many, 16, walk.numbers[0], 1);
    STATUS(LES_ERR_NOT_FOUND, les_layer_open(model, &op, walk.numbers + 1, 2, &out));
    CHECK(!out);

    uint32_t first = 4711, last = 4711;
    const void *data = NULL;
    STATUS(LES_ERR_NULL, les_layer_attend(layer, 0, 0, NULL));
    STATUS(LES_ERR_NULL, les_layer_wave(layer, 0, NULL, &last));
    STATUS(LES_ERR_NULL, les_layer_wave(layer, 0, &first, NULL));
    STATUS(LES_ERR_INVALID, les_layer_wave(layer, 1, &first, &last));
    STATUS(LES_ERR_INVALID, les_layer_expert(layer, 0, walk.numbers[0], &first, &data));
    STATUS(LES_ERR_NULL, les_layer_expert(layer, 0, walk.numbers[0], NULL, &data));
    STATUS(LES_ERR_NULL, les_layer_expert(layer, 0, walk.numbers[0], &first, NULL));
    CHECK(first == 4711 && last == 4711 && !data);
    // nothing of this has harmed the layer
    compute(&walk);
    CHECK(walk.wrong == 0 && walk.end == LES_END && walk.n == N_USED);
    bad_layer(layer, LES_ERR_HANDLE);

    // one that is given up, and one that is left
    walk = walk_of(model, 1, ids, 2);
    STATUS(LES_OK, les_layer_leave(walk.layer));
    STATUS(LES_ERR_INVALID, les_layer_leave(walk.layer));
    STATUS(LES_OK, les_layer_free(walk.layer));
    bad_layer(walk.layer, LES_ERR_HANDLE);
    STATUS(LES_END, walk_all(model, ids, 1, walk.numbers[0], 1));
    STATUS(LES_OK, les_model_free(model));
}

void test_layers(void) {
    waves();
    misused();
}
