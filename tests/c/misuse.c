// What a program may get wrong: each call answers with the documented status, and does nothing else.
#include "test.h"

#include <limits.h>
#include <string.h>

// every call that takes a model, with a handle that is none; freeing NULL is fine
static void bad_model(struct les_model *handle, les_status expected) {
    struct les_model_info info = { .struct_size = sizeof(info), .n_files = 4711 };
    struct les_tensor_info tensor = { .struct_size = sizeof(tensor), .layer = 4711 };
    struct les_stats stats = { .struct_size = sizeof(stats), .evictions = 4711 };
    struct les_params params = params_of("on", "min");
    int32_t ids[N_USED] = { 0, 1, 2, 3 };
    struct les_op op = op_of(ids, 1, 0, 1);
    struct les_ticket *ticket = NULL;
    uint32_t number = 4711;
    int32_t streams = 4711;
    uint64_t bytes = 4711;
    char text[64] = "";
    STATUS(expected, les_model_info(handle, &info));
    STATUS(expected, les_model_find(handle, "blk.0.ffn_up_exps.weight", &number));
    STATUS(expected, les_model_tensor(handle, 0, &tensor));
    STATUS(expected, les_model_read(handle, 0, 0, ids, sizeof(ids)));
    STATUS(expected, les_model_decide(handle, &params, &streams, &bytes, text, sizeof(text)));
    HAS(text, les_status_str(expected));
    text[0] = 0;
    STATUS(expected, les_model_start(handle, text, sizeof(text)));
    HAS(text, les_status_str(expected));
    text[0] = 0;
    STATUS(expected, les_model_forget_cached(handle));
    STATUS(expected, les_model_notice(handle, text, sizeof(text)));
    STATUS(expected, les_model_last_error(handle, text, sizeof(text)));
    STATUS(expected, les_model_stats(handle, &stats));
    STATUS(expected, les_model_stats_write(handle, in_dir("never.json")));
    STATUS(expected, les_model_profile_save(handle));
    STATUS(expected, les_model_drafted(handle, 2));
    STATUS(expected, les_model_judged(handle, 1));
    STATUS(expected, les_ticket_open(handle, &op, &ticket));
    STATUS(expected == LES_ERR_NULL ? LES_OK : expected, les_model_free(handle));
    CHECK(info.n_files == 4711 && tensor.layer == 4711 && stats.evictions == 4711 && number == 4711);
    CHECK(streams == 4711 && bytes == 4711 && !ticket && text[0] == 0);
}

static void bad_ticket(struct les_ticket *handle, les_status expected) {
    uint32_t expert = 4711;
    const void *data = NULL;
    STATUS(expected, les_ticket_next(handle, 0, &expert, &data));
    STATUS(expected, les_ticket_leave(handle));
    STATUS(expected == LES_ERR_NULL ? LES_OK : expected, les_ticket_free(handle));
    CHECK(expert == 4711 && !data);
}

static void handles(void) {
    bad_model(NULL, LES_ERR_NULL);
    bad_ticket(NULL, LES_ERR_NULL);
    bad_model(never(), LES_ERR_HANDLE);
    bad_ticket(never(), LES_ERR_HANDLE);

    struct les_model *model = streaming("min"), *closed = open_model();
    STATUS(LES_OK, les_model_free(closed));
    bad_model(closed, LES_ERR_HANDLE);
    // a new model is not taken for the closed one
    struct les_model *other = open_model();
    CHECK(other != closed);
    bad_model(closed, LES_ERR_HANDLE);
    STATUS(LES_OK, les_model_free(other));

    // a handle of one kind is none of the other
    int32_t ids[N_USED];
    pick(ids, 1);
    struct les_ticket *ticket = open_ticket(model, ids, 1, 0, 1);
    bad_model((struct les_model *)ticket, LES_ERR_HANDLE);
    bad_ticket((struct les_ticket *)model, LES_ERR_HANDLE);
    STATUS(LES_OK, les_ticket_free(ticket));
    bad_ticket(ticket, LES_ERR_HANDLE);
    STATUS(LES_END, walk_all(model, ids, 1, 0, 1));
    STATUS(LES_OK, les_model_free(model));
    bad_model(model, LES_ERR_HANDLE);
}

static void null_pointers(void) {
    struct les_model *out = NULL, *model = streaming("min");
    const char *paths[] = { test_model, NULL };
    char text[256] = "";
    STATUS(LES_ERR_NULL, les_params_default(NULL));
    STATUS(LES_ERR_NULL, les_params_check(NULL, text, sizeof(text)));
    HAS(text, "NULL");
    STATUS(LES_ERR_NULL, les_params_check(NULL, NULL, sizeof(text)));
    text[0] = 0;
    STATUS(LES_ERR_NULL, les_model_open(NULL, &out, text, sizeof(text)));
    HAS(text, "NULL");
    STATUS(LES_ERR_NULL, les_model_open(test_model, NULL, text, sizeof(text)));
    STATUS(LES_ERR_FILE, les_model_open(in_dir("missing"), &out, NULL, 100));
    STATUS(LES_ERR_NULL, les_model_open_shards(NULL, 1, &out, text, sizeof(text)));
    STATUS(LES_ERR_NULL, les_model_open_shards(paths, 2, &out, text, sizeof(text)));
    STATUS(LES_ERR_NULL, les_model_open_shards(paths, 1, NULL, text, sizeof(text)));
    STATUS(LES_ERR_INVALID, les_model_open_shards(paths, 0, &out, text, sizeof(text)));
    STATUS(LES_ERR_INVALID, les_model_open_shards(paths, SIZE_MAX, &out, NULL, 0));
    CHECK(!out);

    struct les_params params = params_of("on", "min");
    int32_t streams = 4711;
    uint64_t bytes = 4711;
    uint32_t number = 4711;
    STATUS(LES_ERR_NULL, les_model_info(model, NULL));
    STATUS(LES_ERR_NULL, les_model_find(model, NULL, &number));
    STATUS(LES_ERR_NULL, les_model_find(model, "blk.0.ffn_up_exps.weight", NULL));
    STATUS(LES_ERR_NULL, les_model_tensor(model, 0, NULL));
    STATUS(LES_ERR_NULL, les_model_read(model, 0, 0, NULL, 1));
    STATUS(LES_ERR_INVALID, les_model_read(model, 3 * N_LAYERS, 0, &number, sizeof(number)));
    STATUS(LES_ERR_INVALID, les_model_read(model, 0, UINT64_MAX, &number, sizeof(number)));
    STATUS(LES_ERR_INVALID, les_model_read(model, 0, 0, &number, SIZE_MAX));
    HAS(last_error(model), "expert tensor 0");
    STATUS(LES_ERR_NULL, les_model_decide(model, NULL, &streams, &bytes, text, sizeof(text)));
    STATUS(LES_ERR_NULL, les_model_decide(model, &params, NULL, &bytes, text, sizeof(text)));
    STATUS(LES_ERR_NULL, les_model_decide(model, &params, &streams, NULL, text, sizeof(text)));
    CHECK(streams == 4711 && bytes == 4711 && number == 4711);
    STATUS(LES_OK, les_model_notice(model, NULL, 100));
    STATUS(LES_OK, les_model_last_error(model, NULL, 100));
    STATUS(LES_OK, les_model_start(model, NULL, 100));
    STATUS(LES_ERR_NULL, les_model_stats(model, NULL));
    STATUS(LES_ERR_NULL, les_model_stats_write(model, NULL));

    int32_t ids[N_USED];
    pick(ids, 1);
    struct les_op op = op_of(ids, 1, 0, 1);
    struct les_ticket *ticket = NULL;
    STATUS(LES_ERR_NULL, les_ticket_open(model, NULL, &ticket));
    STATUS(LES_ERR_NULL, les_ticket_open(model, &op, NULL));
    op.ids = NULL;
    STATUS(LES_ERR_NULL, les_ticket_open(model, &op, &ticket));
    CHECK(!ticket);

    ticket = open_ticket(model, ids, 1, 0, 1);
    uint32_t expert = 4711;
    const void *data = NULL;
    STATUS(LES_ERR_NULL, les_ticket_next(ticket, 0, NULL, &data));
    STATUS(LES_ERR_NULL, les_ticket_next(ticket, 0, &expert, NULL));
    CHECK(expert == 4711 && !data);
    // the walker has not left
    struct walk walk = { .ticket = ticket, .tensor = tensor_of(model, 0) };
    walk_on(&walk);
    CHECK(walk.end == LES_END && walk.n == N_USED && walk.wrong == 0);
    STATUS(LES_OK, les_model_free(model));
}

#define TAIL 64

// `T` as a newer header may declare it
#define LONGER(T) struct { T known; unsigned char tail[TAIL]; }

static int is_filled(const unsigned char *tail) {
    int n = 0;
    for (int i = 0; i < TAIL; i++) {
        n += tail[i] == 0xa5;
    }
    return n == TAIL;
}

// Each struct, whose first version had `least` bytes, with a size that none of its versions has, then with one that a
// newer one may have.
#define SIZES(T, least, call)                                                       \
    do {                                                                            \
        static const size_t wrong[] = { 0, 1, (least) - 1, 1 << 20, SIZE_MAX };     \
        T before;                                                                   \
        memcpy(&before, &s.known, sizeof(T));                                       \
        memset(s.tail, 0xa5, TAIL);                                                 \
        for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {               \
            s.known.struct_size = before.struct_size = wrong[i];                    \
            STATUS(LES_ERR_STRUCT_SIZE, call);                                      \
            CHECK(memcmp(&s.known, &before, sizeof(T)) == 0);                       \
        }                                                                           \
        s.known.struct_size = sizeof(s);                                            \
        STATUS(LES_OK, call);                                                       \
        CHECK(s.known.struct_size == sizeof(s) && is_filled(s.tail));               \
    } while (0)

static void sizes_of_params(struct les_model *model) {
    LONGER(struct les_params) s;
    int32_t streams;
    uint64_t bytes;
    s.known = params_of("on", "min");
    SIZES(struct les_params, offsetof(struct les_params, profile), les_params_check(&s.known, NULL, 0));
    SIZES(struct les_params, offsetof(struct les_params, profile),
          les_model_decide(model, &s.known, &streams, &bytes, NULL, 0));
}

static void sizes_of_info(struct les_model *model) {
    LONGER(struct les_model_info) s;
    memset(&s, 0, sizeof(s));
    SIZES(struct les_model_info, sizeof(s.known), les_model_info(model, &s.known));
    CHECK(s.known.n_expert_used == N_USED);
}

static void sizes_of_tensor(struct les_model *model) {
    LONGER(struct les_tensor_info) s;
    memset(&s, 0, sizeof(s));
    enum { FIRST = offsetof(struct les_tensor_info, n_columns) };
    SIZES(struct les_tensor_info, FIRST, les_model_tensor(model, 0, &s.known));
    CHECK(s.known.n_expert == N_EXPERT && strlen(s.known.name) > 0);
    // a program that was compiled before shapes were told
    s.known = (struct les_tensor_info) { .struct_size = FIRST, .n_columns = 4711 };
    STATUS(LES_OK, les_model_tensor(model, 0, &s.known));
    CHECK(s.known.struct_size == FIRST && s.known.n_expert == N_EXPERT && s.known.n_columns == 4711);
}

static void sizes_of_stats(struct les_model *model) {
    LONGER(struct les_stats) s;
    memset(&s, 0, sizeof(s));
    STATUS(LES_OK, les_model_start(model, NULL, 0));
    enum { FIRST = offsetof(struct les_stats, guessed) };
    SIZES(struct les_stats, FIRST, les_model_stats(model, &s.known));
    CHECK(s.known.peak_rss_bytes > 0);
    // a program that was compiled before guesses were counted
    s.known = (struct les_stats) { .struct_size = FIRST, .guessed = 4711 };
    STATUS(LES_OK, les_model_stats(model, &s.known));
    CHECK(s.known.struct_size == FIRST && s.known.peak_rss_bytes > 0 && s.known.guessed == 4711);
}

static void sizes_of_op(struct les_model *model) {
    LONGER(struct les_op) s;
    int32_t ids[N_USED];
    struct les_ticket *ticket = NULL;
    pick(ids, 1);
    s.known = op_of(ids, 1, 0, 1);
    SIZES(struct les_op, sizeof(s.known), les_ticket_open(model, &s.known, &ticket));
    STATUS(LES_OK, les_ticket_free(ticket));
}

static void wrong_op(struct les_model *model, const struct les_op *op) {
    struct les_ticket *ticket = NULL;
    // so that the text is this operation's
    int32_t bad[N_USED] = { -7, 0, 0, 0 };
    struct les_op other = op_of(bad, 1, 0, 1);
    STATUS(LES_ERR_EXPERT_ID, les_ticket_open(model, &other, &ticket));
    HAS(last_error(model), "-7");
    STATUS(LES_ERR_INVALID, les_ticket_open(model, op, &ticket));
    CHECK(!ticket && strlen(last_error(model)) > 0 && !strstr(last_error(model), "-7"));
}

static void operations(void) {
    struct les_model *model = streaming("min");
    int32_t ids[4 * N_USED];
    float input[2 * N_WIDTH] = { 0 };
    pick(ids, 4);
    struct les_op good = op_of(ids, 2, 0, 1), op = good;
    op.n_walkers = 0;
    wrong_op(model, &op);
    op = good;
    op.tensor = 3 * N_LAYERS;
    wrong_op(model, &op);
    op.tensor = UINT32_MAX;
    wrong_op(model, &op);
    op = good;
    op.n_used = N_EXPERT + 1;
    wrong_op(model, &op);
    op.n_used = UINT32_MAX;
    wrong_op(model, &op);
    op = good;
    op.ids_stride = 0;
    wrong_op(model, &op);
    op.ids_stride = N_USED * sizeof(int32_t) + 1;
    wrong_op(model, &op);
    op = good;
    op.ids = (const int32_t *)(const void *)((const char *)ids + 1);
    wrong_op(model, &op);
    op = good;
    op.input = (const float *)(const void *)((const char *)input + 2);
    op.n_rows = 1;
    wrong_op(model, &op);
    op.input = input;
    op.n_rows = 2;
    op.input_stride = 3;
    wrong_op(model, &op);
    // one token has no next one
    good.n_tokens = 1;
    good.ids_stride = 0;
    struct les_ticket *ticket = NULL;
    STATUS(LES_OK, les_ticket_open(model, &good, &ticket));
    STATUS(LES_OK, les_ticket_free(ticket));
    STATUS(LES_OK, les_model_free(model));
}

void test_misuse(void) {
    handles();
    null_pointers();
    struct les_model *model = open_model();
    sizes_of_params(model);
    sizes_of_info(model);
    sizes_of_tensor(model);
    sizes_of_stats(model);
    sizes_of_op(model);
    STATUS(LES_OK, les_model_free(model));
    operations();
}
