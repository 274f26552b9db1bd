#include "common-les-spec.h"

#include "ggml-les.h"
#include "les.h"

#include <algorithm>
#include <cmath>

// of this thread's draft; NULL when there is none
static thread_local common_les_drafting * les_drafting = nullptr;

common_les_spec::~common_les_spec() {
    for (auto & it : sequences) {
        ggml_les_spec_free(it.second.spec);
    }
}

void common_les_spec::begin(llama_seq_id seq) {
    // the last step of another text: nobody knows what it took
    const auto it = sequences.find(seq);
    if (it != sequences.end()) {
        it->second.stepped = false;
    }
}

void common_les_spec::processed(const common_batch & batch) {
    for (auto & it : sequences) {
        const auto is_in = [&](const common_batch::token & token) { return token.seq_id == it.first; };
        it.second.passes += std::any_of(batch.tokens.begin(), batch.tokens.end(), is_in);
    }
}

void common_les_spec::accepted(llama_seq_id seq, uint16_t n) {
    const auto it = sequences.find(seq);
    if (it == sequences.end()) {
        return;
    }
    // where the target can only go back as a whole, what stands is computed anew, with the token after it
    it->second.more     = it->second.passes > 1 && n > 0 ? 1 : 0;
    it->second.accepted = std::min(n - it->second.more, it->second.verified);
}

common_les_drafting::common_les_drafting(common_les_spec & of, std::vector<common_speculative_draft_params> & params,
                                         int32_t n_max) : params(params) {
    const int64_t now = ggml_time_us();
    for (size_t seq = 0; seq < params.size(); seq++) {
        auto & dp = params[seq];
        if (!dp.drafting) {
            continue;
        }
        const auto [it, is_new] = of.sequences.try_emplace(seq);
        auto & s = it->second;
        if (is_new) {
            s.spec = ggml_les_spec_open(std::max(n_max, 0));
        }
        if (!s.spec) {
            continue;
        }
        if (s.stepped) {
            les_spec_step step = {};
            step.struct_size = sizeof(step);
            step.drafted  = s.drafted;
            step.verified = s.verified;
            step.stood    = s.accepted;
            step.more     = s.more;
            step.draft_ns = 1000*s.draft_us;
            step.step_ns  = 1000*std::max<int64_t>(now - s.began_us - s.draft_us, 0);
            ggml_les_spec_done(s.spec, &step);
        }
        les_spec * spec = s.spec;
        s = {};
        s.spec     = spec;
        s.stepped  = true;
        s.began_us = now;
        const int32_t n = ggml_les_spec_draft(spec);
        if (n == 0) {
            dp.drafting = false;
            continue;
        }
        dp.n_max = dp.n_max > 0 ? std::min(dp.n_max, n) : n;
        asked[seq] = &s;
    }
    les_drafting = this;
}

common_les_drafting::~common_les_drafting() {
    les_drafting = nullptr;
    const int64_t now = ggml_time_us();
    for (auto & it : asked) {
        auto & draft = *params[it.first].result;
        auto & s     = *it.second;
        // none where the drafter does not say
        auto & told  = confidences[&draft];
        told.resize(draft.size(), NAN);
        s.draft_us = now - s.began_us;
        s.drafted  = draft.size();
        s.verified = ggml_les_spec_verify(s.spec, told.data(), told.size());
        draft.resize(s.verified);
    }
}

void common_les_drafting::next() {
    confidences.clear();
}

void common_les_drafting::confidence(const llama_tokens & draft, float p) {
    if (les_drafting && !draft.empty()) {
        auto & told = les_drafting->confidences[&draft];
        told.resize(draft.size() - 1, NAN);
        told.push_back(p);
    }
}
