#include "ggml-les.h"

#include "ggml-impl.h"

#include "ggml-les-model.h"

#include <cstdio>

// how many tokens some drafters draft at once is limited by the context alone
static const uint32_t most_drafted = 256;

struct les_spec * ggml_les_spec_open(uint32_t n_max) {
    std::string width;
    ggml_les_model * target = ggml_les_target(&width);
    if (!target) {
        return nullptr;
    }
    les_spec_params params = {};
    params.struct_size = sizeof(params);
    params.width = width.c_str();
    params.n_max = n_max < most_drafted ? n_max : most_drafted;
    params.model = target->handle;
    les_spec * spec = nullptr;
    char err[512] = "";
    if (les_spec_open(&params, &spec, err, sizeof(err)) != LES_OK) {
        GGML_LOG_WARN("les: %s\n", err);
    }
    ggml_les_model_release(target);
    return spec;
}

std::string ggml_les_spec_summary(const ggml_les_model * model) {
    uint64_t steps = 0, tokens = 0, verified = 0, stood = 0;
    les_spec_width s = {};
    s.struct_size = sizeof(s);
    for (uint32_t width = 0; les_model_spec_stats(model->handle, width, &s) == LES_OK; ++width) {
        steps    += s.steps;
        tokens   += s.tokens;
        verified += s.steps*width;
        stood    += s.stood;
    }
    if (steps == 0) {
        return "";
    }
    char buf[128];
    snprintf(buf, sizeof(buf), ", speculation: %.2f tokens per step, %.2f verified, %.2f of these right",
        (double) tokens/steps, (double) verified/steps, (double) stood/steps);
    return buf;
}

void ggml_les_spec_free(struct les_spec * spec) {
    les_spec_free(spec);
}

uint32_t ggml_les_spec_draft(struct les_spec * spec) {
    uint32_t n = 0; // on failure nothing is drafted
    les_spec_draft(spec, &n);
    return n;
}

uint32_t ggml_les_spec_verify(struct les_spec * spec, const float * confidences, uint32_t n) {
    uint32_t width = 0;
    les_spec_verify(spec, confidences, n, &width);
    return width;
}

void ggml_les_spec_done(struct les_spec * spec, const struct les_spec_step * step) {
    les_spec_done(spec, step);
}
