// What can be asked of the library and of a model, and what its options do.
#include "test.h"

#include <string.h>

void test_library(void) {
    CHECK(les_abi_version() == LES_ABI_VERSION);
    CHECK(strlen(les_version()) >= strlen("0.0.0"));
    CHECK(les_version() == les_version());
    CHECK(les_memory_available() > 0);
    for (les_status a = LES_ERR_PANIC; a <= LES_END; a++) {
        CHECK(strlen(les_status_str(a)) > 0);
        CHECK(strcmp(les_status_str(a), les_status_str(12345)) != 0);
        for (les_status b = LES_ERR_PANIC; b < a; b++) {
            CHECK(strcmp(les_status_str(a), les_status_str(b)) != 0);
        }
    }
    HAS(les_status_str(INT32_MIN), "unknown");
    HAS(les_status_str(INT32_MAX), "unknown");
}

static long file_size(void) {
    FILE *file = fopen(test_model, "rb");
    long size = file && fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
    if (file) {
        fclose(file);
    }
    return size;
}

void test_models(void) {
    uint64_t size = (uint64_t)file_size();
    struct les_model *model = open_model();
    struct les_model_info info;
    memset(&info, 0, sizeof(info));
    info.struct_size = sizeof(info);
    STATUS(LES_OK, les_model_info(model, &info));
    CHECK(info.struct_size == sizeof(info));
    CHECK(info.n_files == 1 && info.n_tensors == 3 * N_LAYERS && info.n_expert_used == N_USED);
    CHECK(info.expert_bytes == 32 << 20);
    CHECK(info.dense_bytes > 0 && info.dense_bytes + info.expert_bytes < size);
    CHECK(info.floor_bytes >= info.expert_bytes / N_EXPERT * N_USED);
    CHECK(info.floor_bytes < info.all_bytes && info.all_bytes >= info.expert_bytes);

    uint64_t sum = 0;
    int seen[3 * N_LAYERS] = { 0 };
    for (int layer = 0; layer < N_LAYERS; layer++) {
        for (int part = UP; part <= DOWN; part++) {
            uint32_t number = find(model, layer, (enum part)part);
            struct les_tensor_info tensor = tensor_of(model, number);
            CHECK(number < info.n_tensors && !seen[number]++);
            CHECK(tensor.struct_size == sizeof(tensor));
            CHECK(tensor.layer == (uint32_t)layer && tensor.file == 0 && tensor.n_expert == N_EXPERT);
            CHECK(tensor.offset + tensor.n_expert * tensor.expert_bytes <= size);
            CHECK(tensor.n_columns > 0 && tensor.n_rows > 0 && tensor.expert_bytes % tensor.n_rows == 0 && !tensor.packed);
            uint32_t again = UINT32_MAX;
            STATUS(LES_OK, les_model_find(model, tensor.name, &again));
            static char expert[1 << 20];
            CHECK(tensor.expert_bytes <= sizeof(expert));
            STATUS(LES_OK, les_model_read(model, number, 5 * tensor.expert_bytes, expert, tensor.expert_bytes));
            CHECK(same_as_file(&tensor, 5, expert));
            CHECK(again == number);
            sum += tensor.n_expert * tensor.expert_bytes;
        }
    }
    CHECK(sum == info.expert_bytes);

    uint32_t number = 4711;
    STATUS(LES_ERR_NOT_FOUND, les_model_find(model, "token_embd.weight", &number));
    STATUS(LES_ERR_NOT_FOUND, les_model_find(model, "", &number));
    uint32_t types[N_EXPERT] = { 0 };
    STATUS(LES_OK, les_model_types(model, 0, types, N_EXPERT));
    CHECK(types[0] == tensor_of(model, 0).ggml_type && types[N_EXPERT - 1] == types[0]);
    STATUS(LES_ERR_INVALID, les_model_types(model, 0, types, N_EXPERT - 1));
    STATUS(LES_ERR_NULL, les_model_types(model, 0, NULL, N_EXPERT));
    STATUS(LES_ERR_NULL, les_model_types(NULL, 0, types, N_EXPERT));
    STATUS(LES_ERR_NOT_FOUND, les_model_types(model, UINT32_MAX, types, N_EXPERT));
    STATUS(LES_OK, les_is_packed_name("blk.3.les_experts"));
    STATUS(LES_ERR_NOT_FOUND, les_is_packed_name("token_embd.weight"));
    STATUS(LES_ERR_NULL, les_is_packed_name(NULL));
    CHECK(number == 4711);
    struct les_tensor_info none = { .struct_size = sizeof(none), .layer = 4711 };
    STATUS(LES_ERR_NOT_FOUND, les_model_tensor(model, info.n_tensors, &none));
    STATUS(LES_ERR_NOT_FOUND, les_model_tensor(model, UINT32_MAX, &none));
    CHECK(none.layer == 4711);

    struct les_stats stats;
    stats.struct_size = sizeof(stats);
    STATUS(LES_ERR_NOT_FOUND, les_model_stats(model, &stats));
    STATUS(LES_ERR_NOT_FOUND, les_model_stats_write(model, in_dir("none.json")));
    char text[512] = "?";
    STATUS(LES_OK, les_model_notice(model, text, sizeof(text)));
    CHECK(text[0] != '?');
    CHECK(strcmp(last_error(model), "") == 0);
    STATUS(LES_OK, les_model_forget_cached(model));
    STATUS(LES_OK, les_model_free(model));

    const char *paths[] = { test_model, test_model };
    STATUS(LES_OK, les_model_open_shards(paths, 1, &model, NULL, 0));
    STATUS(LES_OK, les_model_info(model, &info));
    CHECK(info.n_files == 1);
    STATUS(LES_OK, les_model_free(model));
    text[0] = 0;
    STATUS(LES_ERR_FORMAT, les_model_open_shards(paths, 2, &model, text, sizeof(text)));
    HAS(text, test_model);
}

static les_status check(const char *mode, const char *cache, const char *io, const char *depth, char *err, size_t len) {
    struct les_params params = params_of(mode, cache);
    params.io = io;
    params.io_depth = depth;
    return les_params_check(&params, err, len);
}

static void nonsense(const char *mode, const char *cache, const char *io, const char *depth, const char *named) {
    char err[512] = "";
    STATUS(LES_ERR_INVALID, check(mode, cache, io, depth, err, sizeof(err)));
    HAS(err, named);
    STATUS(LES_ERR_INVALID, check(mode, cache, io, depth, NULL, 0));

    struct les_model *model = open_model();
    struct les_params params = params_of(mode, cache);
    params.io = io;
    params.io_depth = depth;
    int32_t streams = 4711;
    uint64_t bytes = 4711;
    err[0] = 0;
    STATUS(LES_ERR_INVALID, les_model_decide(model, &params, &streams, &bytes, err, sizeof(err)));
    HAS(err, named);
    CHECK(streams == 4711 && bytes == 4711);
    STATUS(LES_OK, les_model_free(model));
}

static les_status decide(struct les_model *model, const char *mode, const char *cache, int32_t *streams,
                         uint64_t *bytes, char *message, size_t len) {
    struct les_params params = params_of(mode, cache);
    *streams = 4711;
    *bytes = 4711;
    return les_model_decide(model, &params, streams, bytes, message, len);
}

void test_params(void) {
    static const char *const modes[] = { NULL, "", "off", "auto", "on" };
    static const char *const caches[] = { NULL, "", "auto", "min", "1500", "1500M", "3G", "2.5G", "512K", "40%" };
    static const char *const engines[] = { NULL, "", "auto", "uring", "pread" };
    for (size_t i = 0; i < sizeof(modes) / sizeof(*modes); i++) {
        STATUS(LES_OK, check(modes[i], NULL, NULL, NULL, NULL, 0));
    }
    for (size_t i = 0; i < sizeof(caches) / sizeof(*caches); i++) {
        STATUS(LES_OK, check(NULL, caches[i], NULL, "1", NULL, 0));
    }
    for (size_t i = 0; i < sizeof(engines) / sizeof(*engines); i++) {
        STATUS(LES_OK, check(NULL, NULL, engines[i], "4096", NULL, 0));
    }
    nonsense("maybe", NULL, NULL, NULL, "maybe");
    nonsense("ON", NULL, NULL, NULL, "ON");
    nonsense(NULL, "-1", NULL, NULL, "-1");
    nonsense(NULL, "3T", NULL, NULL, "3T");
    nonsense(NULL, "101%", NULL, NULL, "101%");
    nonsense(NULL, "much", NULL, NULL, "much");
    nonsense(NULL, NULL, "dma", NULL, "dma");
    nonsense(NULL, NULL, NULL, "4097", "4097");
    nonsense(NULL, NULL, NULL, "4294967295", "4294967295");
    nonsense(NULL, NULL, NULL, "many", "many");
    nonsense("\xff", NULL, NULL, NULL, les_status_str(LES_ERR_INVALID));

    struct les_model *model = open_model();
    struct les_model_info info;
    info.struct_size = sizeof(info);
    STATUS(LES_OK, les_model_info(model, &info));
    int32_t streams;
    uint64_t bytes;
    char message[512];
    STATUS(LES_OK, decide(model, "off", "min", &streams, &bytes, message, sizeof(message)));
    CHECK(streams == 0 && bytes == 0);
    HAS(message, "off");
    if (les_memory_available() > (uint64_t)1 << 30) {
        STATUS(LES_OK, decide(model, "auto", "auto", &streams, &bytes, message, sizeof(message)));
        CHECK(streams == 0 && bytes == 0);
        HAS(message, "fit");
        STATUS(LES_OK, decide(model, NULL, NULL, &streams, &bytes, message, sizeof(message)));
        CHECK(streams == 0 && bytes == 0);
    }
    STATUS(LES_OK, decide(model, "auto", "50%", &streams, &bytes, message, sizeof(message)));
    CHECK(streams == 1 && bytes == info.all_bytes / 2);
    STATUS(LES_OK, decide(model, "on", "auto", &streams, &bytes, message, sizeof(message)));
    CHECK(streams == 1 && bytes == info.floor_bytes);
    STATUS(LES_OK, decide(model, "on", "100%", &streams, &bytes, message, sizeof(message)));
    CHECK(streams == 1 && bytes == info.all_bytes);
    STATUS(LES_OK, decide(model, "on", "1000G", &streams, &bytes, message, sizeof(message)));
    CHECK(streams == 1 && bytes == info.all_bytes);

    char floor[64];
    snprintf(floor, sizeof(floor), "at least %u MiB", (unsigned)((info.floor_bytes + (1 << 20) - 1) >> 20));
    static const char *const small[] = { "0", "1", "512K", "1%" };
    for (size_t i = 0; i < sizeof(small) / sizeof(*small); i++) {
        STATUS(LES_ERR_BUDGET, decide(model, "on", small[i], &streams, &bytes, message, sizeof(message)));
        CHECK(streams == 4711 && bytes == 4711);
        HAS(message, floor);
    }
    // the text is cut to what fits, and ends with NUL
    memset(message, '?', sizeof(message));
    STATUS(LES_ERR_BUDGET, decide(model, "on", "0", &streams, &bytes, message, 8));
    CHECK(strlen(message) == 7 && message[8] == '?');
    memset(message, '?', sizeof(message));
    STATUS(LES_ERR_BUDGET, decide(model, "on", "0", &streams, &bytes, message, 1));
    CHECK(message[0] == 0 && message[1] == '?');
    STATUS(LES_ERR_BUDGET, decide(model, "on", "0", &streams, &bytes, message + 1, 0));
    CHECK(message[1] == '?');
    STATUS(LES_ERR_BUDGET, decide(model, "on", "0", &streams, &bytes, NULL, 8));

    STATUS(LES_OK, decide(model, "on", "min", &streams, &bytes, message, sizeof(message)));
    CHECK(streams == 1 && bytes == info.floor_bytes);
    HAS(message, "stream");
    STATUS(LES_OK, les_model_start(model, message, sizeof(message)));
    STATUS(LES_OK, les_model_start(model, NULL, 0));
    struct les_stats stats;
    stats.struct_size = sizeof(stats);
    STATUS(LES_OK, les_model_stats(model, &stats));
    CHECK(stats.cache_bytes == info.floor_bytes && stats.decode.requests == 0 && stats.prompt.requests == 0);
    // too late: what was promised holds
    STATUS(LES_ERR_INVALID, decide(model, "on", "50%", &streams, &bytes, message, sizeof(message)));
    HAS(message, "already");
    STATUS(LES_OK, les_model_free(model));
}
