#pragma once

// What common/speculative.cpp calls, so that on a model that streams as many tokens are drafted and verified as are worth it.

#include "speculative.h"

#include <map>
#include <vector>

// for one line in the middle of another's code
#define LES_HOOK(...) __VA_ARGS__

struct les_spec;

// the sequences of one common_speculative. For several threads only if that is
class common_les_spec {
public:
    common_les_spec() = default;
    ~common_les_spec();
    common_les_spec(const common_les_spec &) = delete;
    common_les_spec & operator=(const common_les_spec &) = delete;

    // a new text
    void begin(llama_seq_id seq);
    // the target has computed the batch
    void processed(const common_batch & batch);
    // so many of the tokens that were drafted last stand
    void accepted(llama_seq_id seq, uint16_t n);

private:
    friend class common_les_drafting;

    struct sequence {
        les_spec * spec    = nullptr; // NULL when no model streams
        bool       stepped = false;   // a step is under way
        int64_t    began_us = 0;
        int64_t    draft_us = 0;
        uint32_t   drafted  = 0;
        uint32_t   verified = 0;
        uint32_t   accepted = 0;
        uint32_t   more     = 0; // tokens beside those and the one after them
        uint32_t   passes   = 0; // of the target over the sequence
    };
    std::map<llama_seq_id, sequence> sequences;
};

// exists while tokens are drafted: before it says how many may be, afterwards leaves as many as are to be verified
class common_les_drafting {
public:
    common_les_drafting(common_les_spec & of, std::vector<common_speculative_draft_params> & params, int32_t n_max);
    ~common_les_drafting();
    common_les_drafting(const common_les_drafting &) = delete;
    common_les_drafting & operator=(const common_les_drafting &) = delete;

    // another drafter has its turn
    void next();
    // the drafter's confidence in the token that it has added to the draft last
    static void confidence(const llama_tokens & draft, float p);

private:
    std::vector<common_speculative_draft_params> & params;
    std::map<llama_seq_id, common_les_spec::sequence *> asked;
    std::map<const llama_tokens *, std::vector<float>>  confidences;
};
