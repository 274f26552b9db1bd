// Passes that verify drafted tokens, as a program announces and judges them.
#include "test.h"

static struct les_stats stats_of(struct les_model *model) {
    struct les_stats stats = { .struct_size = sizeof(stats) };
    STATUS(LES_OK, les_model_stats(model, &stats));
    return stats;
}

// one pass over the model, of `n_tokens` rows whose picks begin with expert `first`
static void pass(struct les_model *model, int32_t first, uint32_t n_tokens) {
    int32_t ids[4 * N_USED];
    for (uint32_t i = 0; i < n_tokens * N_USED; i++) {
        ids[i] = (first + (int32_t)i) % N_EXPERT;
    }
    for (int layer = 0; layer < N_LAYERS; layer++) {
        for (int part = UP; part <= DOWN; part++) {
            STATUS(LES_END, walk_all(model, ids, n_tokens, find(model, layer, (enum part)part), 1));
        }
    }
}

void test_drafts(void) {
    struct les_model *model = streaming("25%");
    // a verdict on nothing
    STATUS(LES_OK, les_model_judged(model, 1));
    pass(model, 0, 3);
    CHECK(stats_of(model).verifications == 0);

    STATUS(LES_OK, les_model_drafted(model, 3));
    pass(model, 20, 1);
    pass(model, 24, 2);
    CHECK(stats_of(model).verifications == 0);
    pass(model, 32, 3);
    struct les_stats stats = stats_of(model);
    CHECK(stats.verifications == 1 && stats.draft_reads_rejected == 0);
    CHECK(stats.draft_reads == 2 * N_USED * 3 * N_LAYERS);
    STATUS(LES_OK, les_model_judged(model, 2));
    stats = stats_of(model);
    CHECK(stats.draft_reads_rejected == N_USED * 3 * N_LAYERS);
    // the first verdict counts, and what follows is no verification
    STATUS(LES_OK, les_model_judged(model, 1));
    pass(model, 0, 3);
    stats = stats_of(model);
    CHECK(stats.verifications == 1 && stats.draft_reads_rejected == N_USED * 3 * N_LAYERS);

    // the next one before the verdict: all stand
    STATUS(LES_OK, les_model_drafted(model, 4));
    pass(model, 16, 4);
    STATUS(LES_OK, les_model_drafted(model, 2));
    STATUS(LES_OK, les_model_judged(model, 0));
    stats = stats_of(model);
    CHECK(stats.verifications == 2 && stats.draft_reads_rejected == N_USED * 3 * N_LAYERS);
    CHECK(stats.evictions_for_drafts > 0 && stats.evictions_for_drafts < stats.evictions);

    // one that is taken back
    STATUS(LES_OK, les_model_drafted(model, UINT32_MAX));
    STATUS(LES_OK, les_model_drafted(model, 4));
    STATUS(LES_OK, les_model_drafted(model, 1));
    pass(model, 48, 1);
    pass(model, 40, 4);
    CHECK(stats_of(model).verifications == 2);
    STATUS(LES_OK, les_model_free(model));
}
