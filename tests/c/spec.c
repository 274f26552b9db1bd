// Speculation as a program does it: draft, verify, judge, report; and what it may get wrong.
#include "test.h"

#include <math.h>
#include <string.h>

#define N_MAX 4

static struct les_spec *open_spec(const char *width, uint64_t seed) {
    struct les_spec_params params = { .struct_size = sizeof(params), .width = width, .n_max = N_MAX, .seed = seed };
    struct les_spec *spec = NULL;
    char err[256] = "";
    if (les_spec_open(&params, &spec, err, sizeof(err)) != LES_OK) {
        give_up("les_spec_open", err);
    }
    return spec;
}

static uint32_t width_of(struct les_spec *spec, uint64_t width) {
    struct les_spec_width of = { .struct_size = sizeof(of) };
    STATUS(LES_OK, les_spec_stats(spec, (uint32_t)width, &of));
    return (uint32_t)of.steps;
}

// a target that likes token 3 best and a drafter that knows it
static const struct les_candidate target[] = { { 1, 0.2f }, { 3, 0.7f }, { 9, 0.1f } };

static void steps(void) {
    struct les_spec *spec = open_spec(NULL, 1);
    int generated = 0;
    for (int step = 0; step < 400; step++) {
        uint32_t drafted = 4711, width = 4711;
        STATUS(LES_OK, les_spec_draft(spec, &drafted));
        CHECK(drafted <= N_MAX);
        STATUS(LES_OK, les_spec_verify(spec, NULL, drafted, &width));
        CHECK(width <= drafted);
        uint32_t stood = 0;
        int32_t token = 3;
        while (stood < width && token == 3) {
            STATUS(LES_OK, les_spec_judge(spec, 3, target, 3, NULL, 0, &token));
            stood += token == 3;
        }
        if (stood == width) {
            STATUS(LES_OK, les_spec_draw(spec, target, 3, &token));
        }
        CHECK(token == 1 || token == 3 || token == 9);
        generated += 1 + (int)stood;
        // verifying is nearly free
        struct les_spec_step done = { .struct_size = sizeof(done), .drafted = drafted, .verified = width, .stood = stood,
                                      .draft_ns = 1000, .step_ns = 100000 + 1000 * width };
        STATUS(LES_OK, les_spec_done(spec, &done));
    }
    uint64_t all = 0, tokens = 0;
    for (uint32_t width = 0; width <= N_MAX; width++) {
        struct les_spec_width of = { .struct_size = sizeof(of) };
        STATUS(LES_OK, les_spec_stats(spec, width, &of));
        all += of.steps;
        tokens += of.tokens;
        CHECK(width == 0 || fabs(of.promised - (double)of.stood) <= 0.2 * (double)of.verified + 10);
    }
    CHECK(all == 400 && tokens == (uint64_t)generated);
    CHECK(width_of(spec, N_MAX) > 200);
    STATUS(LES_OK, les_spec_free(spec));
}

static void seeds(void) {
    struct les_spec *a = open_spec("2", 7), *b = open_spec("2", 7), *c = open_spec("2", 8);
    int differ = 0;
    for (int i = 0; i < 200; i++) {
        int32_t of_a = -1, of_b = -1, of_c = -1;
        STATUS(LES_OK, les_spec_judge(a, 1, target, 3, target, 3, &of_a));
        STATUS(LES_OK, les_spec_judge(b, 1, target, 3, target, 3, &of_b));
        CHECK(of_a == 1 && of_b == 1);
        STATUS(LES_OK, les_spec_draw(a, target, 3, &of_a));
        STATUS(LES_OK, les_spec_draw(b, target, 3, &of_b));
        STATUS(LES_OK, les_spec_draw(c, target, 3, &of_c));
        CHECK(of_a == of_b);
        differ += of_a != of_c;
    }
    CHECK(differ > 0);
    uint32_t drafted = 0;
    STATUS(LES_OK, les_spec_draft(a, &drafted));
    CHECK(drafted == 2);
    STATUS(LES_OK, les_spec_free(a));
    STATUS(LES_OK, les_spec_free(b));
    STATUS(LES_OK, les_spec_free(c));
}

static void bad_spec(struct les_spec *spec, les_status expected) {
    uint32_t n = 4711;
    int32_t token = 4711;
    struct les_spec_step step = { .struct_size = sizeof(step) };
    struct les_spec_width of = { .struct_size = sizeof(of), .steps = 4711 };
    STATUS(expected, les_spec_draft(spec, &n));
    STATUS(expected, les_spec_verify(spec, NULL, 1, &n));
    STATUS(expected, les_spec_judge(spec, 1, target, 3, NULL, 0, &token));
    STATUS(expected, les_spec_draw(spec, target, 3, &token));
    STATUS(expected, les_spec_done(spec, &step));
    STATUS(expected, les_spec_stats(spec, 0, &of));
    STATUS(expected == LES_ERR_NULL ? LES_OK : expected, les_spec_free(spec));
    CHECK(n == 4711 && token == 4711 && of.steps == 4711);
}

static void misuse(void) {
    struct les_spec_params params = { .struct_size = sizeof(params), .width = "many", .n_max = N_MAX };
    struct les_spec *spec = NULL;
    char err[256] = "";
    STATUS(LES_ERR_INVALID, les_spec_open(&params, &spec, err, sizeof(err)));
    HAS(err, "off, adaptive or a number");
    params.width = "off";
    params.n_max = 100000;
    STATUS(LES_ERR_INVALID, les_spec_open(&params, &spec, err, sizeof(err)));
    params.n_max = N_MAX;
    STATUS(LES_ERR_NULL, les_spec_open(NULL, &spec, err, sizeof(err)));
    STATUS(LES_ERR_NULL, les_spec_open(&params, NULL, err, sizeof(err)));
    params.struct_size = 3;
    STATUS(LES_ERR_STRUCT_SIZE, les_spec_open(&params, &spec, err, sizeof(err)));
    CHECK(!spec);

    bad_spec(NULL, LES_ERR_NULL);
    bad_spec(never(), LES_ERR_HANDLE);
    spec = open_spec("adaptive", 0);
    STATUS(LES_ERR_NULL, les_spec_draft(spec, NULL));
    STATUS(LES_ERR_NULL, les_spec_verify(spec, NULL, 0, NULL));
    STATUS(LES_ERR_NULL, les_spec_done(spec, NULL));
    STATUS(LES_ERR_NULL, les_spec_stats(spec, 0, NULL));
    struct les_spec_width of = { .struct_size = sizeof(of) };
    STATUS(LES_ERR_INVALID, les_spec_stats(spec, N_MAX + 1, &of));

    // what is no distribution, and tokens that are none
    int32_t token = 4711;
    const struct les_candidate nan[] = { { 1, NAN } }, nothing[] = { { 1, 0 } };
    STATUS(LES_ERR_INVALID, les_spec_judge(spec, 1, nan, 1, NULL, 0, &token));
    STATUS(LES_ERR_INVALID, les_spec_judge(spec, 1, target, 3, nothing, 1, &token));
    STATUS(LES_ERR_INVALID, les_spec_draw(spec, nothing, 1, &token));
    STATUS(LES_ERR_INVALID, les_spec_draw(spec, NULL, 0, &token));
    STATUS(LES_ERR_NULL, les_spec_judge(spec, 1, NULL, 3, NULL, 0, &token));
    STATUS(LES_ERR_NULL, les_spec_judge(spec, 1, target, 3, NULL, 3, &token));
    STATUS(LES_ERR_NULL, les_spec_judge(spec, 1, target, 3, NULL, 0, NULL));
    CHECK(token == 4711);
    STATUS(LES_OK, les_spec_judge(spec, -5, target, 3, NULL, 0, &token));
    CHECK(token == 1 || token == 3 || token == 9);

    // confidences that are no numbers, more tokens than the drafter has, steps that cannot be
    const float confidences[] = { NAN, -1, INFINITY, 2, 0.5f, 0.5f };
    uint32_t width = 4711;
    STATUS(LES_OK, les_spec_verify(spec, confidences, 6, &width));
    CHECK(width <= N_MAX);
    struct les_spec_step step = { .struct_size = sizeof(step), .drafted = 99, .verified = 98, .stood = 97,
                                  .step_ns = UINT64_MAX, .draft_ns = UINT64_MAX };
    STATUS(LES_OK, les_spec_done(spec, &step));
    STATUS(LES_OK, les_spec_free(spec));
    bad_spec(spec, LES_ERR_HANDLE);
}

void test_spec(void) {
    steps();
    seeds();
    misuse();
}
