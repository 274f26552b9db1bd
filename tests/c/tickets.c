// Walks: every expert that was picked comes, with the file's bytes, through a cache that cannot hold them all.
#include "test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MANY 32

static struct les_stats stats_of(struct les_model *model) {
    struct les_stats stats;
    memset(&stats, 0, sizeof(stats));
    stats.struct_size = sizeof(stats);
    STATUS(LES_OK, les_model_stats(model, &stats));
    return stats;
}

// all layers and parts, as a model would ask for them
static void token(struct les_model *model, uint32_t n_tokens, int n_walkers) {
    int32_t ids[MANY * N_USED];
    for (int layer = 0; layer < N_LAYERS; layer++) {
        pick(ids, n_tokens);
        for (int part = UP; part <= DOWN; part++) {
            STATUS(LES_END, walk_all(model, ids, n_tokens, find(model, layer, (enum part)part), n_walkers));
        }
    }
}

static void counted(struct les_model *model) {
    struct les_stats stats = stats_of(model);
    CHECK(stats.struct_size == sizeof(stats));
    CHECK(stats.evictions > 0 && stats.read_errors == 0);
    CHECK(stats.decode.tokens == 4 && stats.prompt.tokens == 2 * MANY);
    CHECK(stats.decode.requests == 4 * N_LAYERS * N_USED);
    CHECK(stats.prompt.requests > stats.decode.requests);
    CHECK(stats.decode.hits < stats.decode.requests);
    CHECK(stats.decode.bytes_read > 0 && stats.prompt.bytes_read > stats.decode.bytes_read);
    // two steps from one generated token to the next, of which the longest does not count
    CHECK(stats.decode_steps == 1 && stats.decode_ns > 0);
    CHECK(stats.peak_rss_bytes > 0);

    const char *path = in_dir("stats.json");
    char json[16384] = "", field[64];
    STATUS(LES_OK, les_model_stats_write(model, path));
    FILE *file = fopen(path, "rb");
    size_t n = file ? fread(json, 1, sizeof(json) - 1, file) : 0;
    if (file) {
        fclose(file);
    }
    CHECK(n > 2 && json[0] == '{' && json[n - 1] == '}');
    snprintf(field, sizeof(field), "\"evictions\": %u,", (unsigned)stats.evictions);
    HAS(json, field);
    snprintf(field, sizeof(field), "\"engine\": \"%s\"", test_io);
    HAS(json, field);
    snprintf(field, sizeof(field), "\"requests\": %u,", (unsigned)stats.decode.requests);
    HAS(json, field);
    HAS(json, "\"layers\": [");
    // a longer file is replaced as a whole
    struct les_model *other = streaming("min");
    STATUS(LES_OK, les_model_start(other, NULL, 0));
    STATUS(LES_OK, les_model_stats_write(other, path));
    STATUS(LES_OK, les_model_free(other));
}

static void two_models(void) {
    struct les_model *a = streaming("min"), *b = streaming("50%");
    int32_t ids[2 * N_USED];
    for (int layer = 0; layer < 2; layer++) {
        pick(ids, 2);
        STATUS(LES_END, walk_all(a, ids, 2, find(a, layer, UP), 1));
        STATUS(LES_END, walk_all(b, ids, 2, find(b, layer, UP), 2));
    }
    CHECK(stats_of(a).cache_bytes < stats_of(b).cache_bytes);
    // one's end is not the other's
    STATUS(LES_OK, les_model_free(a));
    STATUS(LES_END, walk_all(b, ids, 2, find(b, 0, DOWN), 1));
    STATUS(LES_OK, les_model_free(b));
}

static void three_ops_at_once(void) {
    struct les_model *model = streaming("min");
    int32_t ids[N_USED];
    struct walk walks[3];
    memset(walks, 0, sizeof(walks));
    for (int layer = 0; layer < 2; layer++) {
        pick(ids, 1);
        for (int part = UP; part <= DOWN; part++) {
            uint32_t tensor = find(model, layer, (enum part)part);
            walks[part].tensor = tensor_of(model, tensor);
            walks[part].ticket = open_ticket(model, ids, 1, tensor, 1);
            walks[part].n = 0;
        }
        for (int part = DOWN; part >= UP; part--) {
            walk_on(&walks[part]);
            CHECK(walks[part].end == LES_END && walks[part].n == N_USED && walks[part].wrong == 0);
        }
    }
    STATUS(LES_OK, les_model_free(model));
}

// Picks and rows that do not follow each other closely; picks that are the same.
static void strides(void) {
    struct les_model *model = streaming("min");
    int32_t ids[3][10];
    float input[2][N_WIDTH + 3];
    // what lies between the rows is not looked at
    memset(ids, 0xff, sizeof(ids));
    for (int t = 0; t < 3; t++) {
        for (int i = 0; i < N_USED; i++) {
            ids[t][i] = 10 * t;
        }
    }
    for (int r = 0; r < 2; r++) {
        for (int i = 0; i < N_WIDTH + 3; i++) {
            input[r][i] = i < N_WIDTH ? 1.0f : NAN;
        }
    }
    uint32_t tensor = find(model, 0, UP);
    struct les_op op = op_of(&ids[0][0], 3, tensor, 1);
    op.ids_stride = sizeof(ids[0]);
    op.input = &input[0][0];
    op.input_stride = sizeof(input[0]);
    op.n_input = N_WIDTH;
    op.n_rows = 2;
    struct walk walk;
    memset(&walk, 0, sizeof(walk));
    walk.tensor = tensor_of(model, tensor);
    STATUS(LES_OK, les_ticket_open(model, &op, &walk.ticket));
    walk_on(&walk);
    CHECK(walk.end == LES_END && walk.n == 3 && walk.wrong == 0);

    // no tokens, no picks
    op.n_tokens = 0;
    STATUS(LES_OK, les_ticket_open(model, &op, &walk.ticket));
    walk.n = 0;
    walk_on(&walk);
    CHECK(walk.end == LES_END && walk.n == 0);
    op.n_tokens = 3;
    op.n_used = 0;
    STATUS(LES_OK, les_ticket_open(model, &op, &walk.ticket));
    walk_on(&walk);
    CHECK(walk.end == LES_END && walk.n == 0);
    STATUS(LES_OK, les_model_free(model));
}

static void not_finite(void) {
    struct les_model *model = streaming("min");
    int32_t ids[N_USED];
    pick(ids, 1);
    static const float bad[] = { NAN, INFINITY, -INFINITY };
    for (int i = 0; i < 3; i++) {
        float input[N_WIDTH] = { 0 };
        input[N_WIDTH - 1] = bad[i];
        struct les_op op = op_of(ids, 1, find(model, 1, UP), 1);
        op.input = input;
        op.input_stride = sizeof(input);
        op.n_input = N_WIDTH;
        op.n_rows = 1;
        struct les_ticket *ticket = NULL;
        STATUS(LES_ERR_NOT_A_NUMBER, les_ticket_open(model, &op, &ticket));
        CHECK(!ticket);
        HAS(last_error(model), "blk.1.ffn_up_exps.weight");
        // once per layer is enough
        op.tensor = find(model, 1, DOWN);
        STATUS(LES_OK, les_ticket_open(model, &op, &ticket));
        STATUS(LES_OK, les_ticket_free(ticket));
        // not read: not counted
        op.tensor = find(model, 1, UP);
        op.n_input = N_WIDTH - 1;
        STATUS(LES_OK, les_ticket_open(model, &op, &ticket));
        STATUS(LES_OK, les_ticket_free(ticket));
    }
    STATUS(LES_END, walk_all(model, ids, 1, find(model, 1, UP), 2));
    STATUS(LES_OK, les_model_free(model));
}

static void no_such_expert(void) {
    struct les_model *model = streaming("min");
    static const int32_t bad[] = { -1, N_EXPERT, INT32_MAX, INT32_MIN };
    uint32_t tensor = find(model, 2, GATE);
    for (int i = 0; i < 4; i++) {
        int32_t ids[2 * N_USED];
        char number[32];
        pick(ids, 2);
        ids[N_USED + i] = bad[i];
        struct les_op op = op_of(ids, 2, tensor, 1);
        struct les_ticket *ticket = NULL;
        STATUS(LES_ERR_EXPERT_ID, les_ticket_open(model, &op, &ticket));
        CHECK(!ticket);
        snprintf(number, sizeof(number), "%d", (int)bad[i]);
        HAS(last_error(model), number);
        HAS(last_error(model), "blk.2.ffn_gate_exps.weight");
        ids[N_USED + i] = N_EXPERT - 1;
        STATUS(LES_END, walk_all(model, ids, 2, tensor, 1));
    }
    STATUS(LES_OK, les_model_free(model));
}

void test_tickets(void) {
    struct les_model *model = streaming("min");
    for (int n_walkers = 1; n_walkers <= 2; n_walkers++) {
        token(model, 1, n_walkers);
        token(model, 1, n_walkers);
        token(model, MANY, n_walkers);
    }
    counted(model);
    STATUS(LES_OK, les_model_free(model));
    two_models();
    three_ops_at_once();
    strides();
    not_finite();
    no_such_expert();
}
