// Files that are not what they should be, and devices that fail.
#define _POSIX_C_SOURCE 200809L

#include "test.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void fails(const char *path, les_status expected) {
    struct les_model *model = NULL;
    char err[1024] = "";
    STATUS(expected, les_model_open(path, &model, err, sizeof(err)));
    CHECK(!model);
    HAS(err, path);
}

static void copy(const char *to) {
    static char buf[1 << 16];
    FILE *in = fopen(test_model, "rb"), *out = fopen(to, "wb");
    size_t n;
    CHECK(in && out);
    while (in && out && (n = fread(buf, 1, sizeof(buf), in)) > 0) {
        CHECK(fwrite(buf, 1, n, out) == n);
    }
    if (in) {
        fclose(in);
    }
    CHECK(out && fclose(out) == 0);
}

// The file changes while it is in use.
static void changed(const char *path, long size) {
    const char *real = test_model;
    test_model = path;
    struct les_model *model = streaming("min");
    int32_t ids[N_USED];
    pick(ids, 1);
    STATUS(LES_END, walk_all(model, ids, 1, find(model, 0, UP), 1));
    CHECK(truncate(path, size) == 0);
    ids[0] ^= 1;
    STATUS(LES_ERR_CHANGED, walk_all(model, ids, 1, find(model, 0, UP), 2));
    HAS(last_error(model), path);
    STATUS(LES_OK, les_model_free(model));
    test_model = real;
}

void test_files(void) {
    char path[1024];
    struct les_model *model = NULL;
    fails(in_dir("missing.gguf"), LES_ERR_FILE);
    fails(test_dir, LES_ERR_FILE);

    snprintf(path, sizeof(path), "%s", in_dir("text.gguf"));
    FILE *file = fopen(path, "wb");
    CHECK(file && fputs("This is a text, and as such no model.\n", file) >= 0 && fclose(file) == 0);
    fails(path, LES_ERR_FORMAT);

    snprintf(path, sizeof(path), "%s", in_dir("copy.gguf"));
    copy(path);
    changed(path, 36000000);
    static const long sizes[] = { 36000000, 20000000, 2000000, 1000, 24, 4, 0 };
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        CHECK(truncate(path, sizes[i]) == 0);
        fails(path, LES_ERR_FORMAT);
    }
    CHECK(remove(path) == 0);

    // a name of any bytes
    snprintf(path, sizeof(path), "%s", in_dir("m\xff.gguf"));
    remove(path);
    CHECK(symlink(test_model, path) == 0);
    const char *paths[] = { path };
    STATUS(LES_OK, les_model_open(path, &model, NULL, 0));
    STATUS(LES_OK, les_model_free(model));
    STATUS(LES_OK, les_model_open_shards(paths, 1, &model, NULL, 0));
    // no room for the counters, and no such place
    STATUS(LES_OK, les_model_start(model, NULL, 0));
    STATUS(LES_ERR_FILE, les_model_stats_write(model, in_dir("missing/stats.json")));
    HAS(last_error(model), "missing/stats.json");
    if (access("/dev/full", W_OK) == 0) {
        STATUS(LES_ERR_FILE, les_model_stats_write(model, "/dev/full"));
        HAS(last_error(model), "/dev/full");
    }
    STATUS(LES_OK, les_model_free(model));
}

// a model that has learned a little; answers what saving that said
static les_status profile(const char *path, const char *notice, int known) {
    struct les_model *model = open_model();
    struct les_params params = params_of("on", "min");
    params.profile = path;
    int32_t ids[N_USED], streams = -1;
    uint64_t bytes = 0;
    char text[1024] = "";
    STATUS(LES_OK, les_model_decide(model, &params, &streams, &bytes, text, sizeof(text)));
    STATUS(LES_ERR_NOT_FOUND, les_model_profile_save(model));
    pick(ids, 1);
    STATUS(LES_END, walk_all(model, ids, 1, find(model, 0, UP), 1));
    STATUS(LES_OK, les_model_notice(model, text, sizeof(text)));
    HAS(text, notice);
    STATUS(LES_OK, les_model_stats_write(model, in_dir("stats.json")));
    char json[16384] = "";
    FILE *file = fopen(in_dir("stats.json"), "rb");
    CHECK(file && fread(json, 1, sizeof(json) - 1, file) > 0 && fclose(file) == 0);
    HAS(json, known ? "\"profile_loaded\": true" : "\"profile_loaded\": false");
    les_status status = les_model_profile_save(model);
    if (status == LES_ERR_FILE) {
        HAS(last_error(model), path);
    }
    STATUS(LES_OK, les_model_free(model));
    return status;
}

void test_profiles(void) {
    char path[1024], missing[1024];
    snprintf(path, sizeof(path), "%s", in_dir("profile.json"));
    snprintf(missing, sizeof(missing), "%s", in_dir("missing/profile.json"));
    STATUS(LES_OK, profile(path, "", 0));
    STATUS(LES_OK, profile(path, "", 1));
    CHECK(truncate(path, 1000) == 0);
    STATUS(LES_OK, profile(path, "damaged", 0));
    STATUS(LES_OK, profile(path, "", 1));
    STATUS(LES_ERR_NOT_FOUND, profile(test_model, "not a profile", 0));
    STATUS(LES_ERR_FILE, profile(missing, "directory", 0));
    STATUS(LES_ERR_NOT_FOUND, profile(NULL, "", 0));
    STATUS(LES_ERR_NOT_FOUND, profile("", "", 0));

    // a program that was compiled before there were profiles
    struct les_model *model = open_model();
    struct les_params params = params_of("on", "min");
    params.struct_size = offsetof(struct les_params, profile);
    params.profile = path;
    int32_t streams = -1;
    uint64_t bytes = 0;
    STATUS(LES_OK, les_model_decide(model, &params, &streams, &bytes, NULL, 0));
    STATUS(LES_OK, les_model_start(model, NULL, 0));
    STATUS(LES_ERR_NOT_FOUND, les_model_profile_save(model));
    STATUS(LES_OK, les_model_free(model));
}

// The third read fails.
static void fault(const char *plan, const char *said, int n_walkers) {
    CHECK(setenv("LES_FAULT", plan, 1) == 0);
    struct les_model *model = streaming("min");
    int32_t ids[N_USED];
    pick(ids, 1);
    uint32_t tensor = find(model, 3, UP);
    STATUS(LES_ERR_READ, walk_all(model, ids, 1, tensor, n_walkers));
    HAS(last_error(model), test_model);
    HAS(last_error(model), "blk.3.ffn_up_exps.weight");
    HAS(last_error(model), said);
    struct les_stats stats;
    stats.struct_size = sizeof(stats);
    STATUS(LES_OK, les_model_stats(model, &stats));
    CHECK(stats.read_errors == 1);
    // the next ones are read again
    for (int part = UP; part <= DOWN; part++) {
        STATUS(LES_END, walk_all(model, ids, 1, find(model, 3, (enum part)part), n_walkers));
    }
    STATUS(LES_OK, les_model_free(model));
    CHECK(unsetenv("LES_FAULT") == 0);
}

void test_faults(void) {
    for (int n_walkers = 1; n_walkers <= 2; n_walkers++) {
        fault("eio@3", "os error 5", n_walkers);
        fault("short@3", "truncated", n_walkers);
    }
    CHECK(setenv("LES_FAULT", "explode@3", 1) == 0);
    struct les_model *model = open_model();
    struct les_params params = params_of("on", "min");
    int32_t streams = -1;
    uint64_t bytes = 0;
    char err[512] = "";
    STATUS(LES_ERR_INVALID, les_model_decide(model, &params, &streams, &bytes, err, sizeof(err)));
    HAS(err, "explode@3");
    // it streams when the reason is gone
    CHECK(unsetenv("LES_FAULT") == 0);
    STATUS(LES_OK, les_model_decide(model, &params, &streams, &bytes, err, sizeof(err)));
    int32_t ids[N_USED];
    pick(ids, 1);
    STATUS(LES_END, walk_all(model, ids, 1, 0, 1));
    STATUS(LES_OK, les_model_free(model));
}
