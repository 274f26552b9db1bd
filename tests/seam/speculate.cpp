// Generates with speculative decoding, in the order of calls in which llama-server does, and holds each pass to what
// speculation promises: at temperature 0, a drafted token that is accepted is the likeliest by the logits of the very
// pass that verified it, and the first one that is rejected is not.
//
// llama.cpp's common library only: the same source is built against a stock and against a patched tree. What a patched
// tree shall do is told by the environment (LLAMA_ARG_LES*).
//
// OUT has a line per pass whose tokens count, and some about all of it:
//     pass DRAFTED STOOD SUM TOKEN..   SUM: a checksum of the logits of the tokens
//     memory HOW                       part: takes back any tokens; snapshots: some; full: none, but by a checkpoint
//     back N                           passes after which a checkpoint was restored
//     refused N                        passes that failed, and were done again without the draft
//     again ROWS OFF WORST             rows of logits; those that differ by more than rounding; the most that one does
// and with --draws those of draws() instead.
// Exit codes: 0 done, 1 usage or file error, 2 a model or context that cannot be used, 3 the rule is broken, 4 a pass
// failed.

#include "arg.h"
#include "common.h"
#include "llama.h"
#include "llama-cpp.h"
#include "sampling.h"
#include "speculative.h"

#include "speculate-options.h"

#include <algorithm>
#include <cinttypes>
#include <climits>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

static const llama_seq_id SEQ = 0;
static const auto PARTIAL = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;

static uint64_t checksum(uint64_t sum, const float * row, int n) {
    for (const char * c = (const char *) row, * end = (const char *) (row + n); c < end; c++) {
        sum = (sum ^ (unsigned char) *c) * 0x100000001b3ull;
    }
    return sum;
}

static llama_token likeliest(const float * row, int n) {
    return std::max_element(row, row + n) - row;
}

// The models, their contexts and the drafter.
struct speculation {
    const options &    opt;
    common_params      params;
    llama_model_ptr    model;
    llama_context_ptr  ctx;
    common_speculative_init_result_ptr drafter;
    common_speculative_ptr spec;
    llama_context *    ctx_dft = nullptr;
    common_context_seq_rm_type goes_back = COMMON_CONTEXT_SEQ_RM_TYPE_NO;
    int                n_vocab = 0;
    llama_tokens       prompt;

    explicit speculation(options & opt) : opt(opt) {
        if (!common_params_parse(opt.others.size(), opt.others.data(), params, LLAMA_EXAMPLE_SPECULATIVE)) {
            exit(1);
        }
        const auto limits = common_speculative_get_output_limits(
            params.n_batch, 1, common_speculative_n_max(&params.speculative));
        params.n_outputs_max         = limits.total;
        params.n_outputs_max_per_seq = limits.per_seq;
        llama_backend_init();
        model.reset(llama_model_load_from_file(params.model.path.c_str(), common_model_params_to_llama(params)));
        if (!model) {
            give_up(2, params.model.path + " cannot be loaded");
        }
        n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
        ctx = context();
        goes_back = common_context_can_seq_rm(ctx.get());
        if (params.speculative.has_dft()) {
            common_params params_dft = common_base_params_to_speculative(params);
            drafter = common_speculative_init_from_params(params_dft, model.get(), ctx.get());
            ctx_dft = drafter->context();
            if (!ctx_dft) {
                give_up(2, params_dft.model.path + " cannot be used for drafting");
            }
        }
        params.speculative.draft.ctx_tgt = ctx.get();
        params.speculative.draft.ctx_dft = ctx_dft;
        try {
            spec.reset(common_speculative_init(params.speculative, 1));
        } catch (const std::exception & e) {
            give_up(2, e.what());
        }
        if (ctx_dft && common_context_can_seq_rm(ctx_dft) != COMMON_CONTEXT_SEQ_RM_TYPE_PART) {
            give_up(2, "the drafter cannot go back token by token");
        }
        prompt = opt.noise > 0 ? noise(opt.noise) : common_tokenize(ctx.get(), params.prompt, true, true);
        if (prompt.size() < 2 || prompt.size() >= llama_n_ctx(ctx.get())) {
            give_up(1, "a prompt of two tokens or more is needed that the context has room for");
        }
    }

    llama_context_ptr context() const {
        llama_context_params cparams = common_context_params_to_llama(params);
        if (opt.snapshots >= 0) {
            cparams.n_rs_seq = opt.snapshots;
        }
        llama_context_ptr made(llama_init_from_model(model.get(), cparams));
        if (!made) {
            give_up(2, "no context");
        }
        return made;
    }

    llama_tokens noise(int n) const {
        std::mt19937 rng(7);
        llama_tokens tokens(n);
        for (auto & t : tokens) {
            t = rng() % n_vocab;
        }
        return tokens;
    }

    // whether the target can go back by so many tokens only as a whole, to a checkpoint
    bool by_checkpoint(size_t n) const {
        return goes_back == COMMON_CONTEXT_SEQ_RM_TYPE_FULL ||
            (goes_back == COMMON_CONTEXT_SEQ_RM_TYPE_RS && n > llama_n_rs_seq(ctx.get()));
    }

    // by the older call: common_batch ends the program for a token that is none
    bool pass_of_anything(const common_batch & batch) {
        llama_batch raw = llama_batch_init(batch.size(), 0, 1);
        for (const auto & t : batch.tokens) {
            const int i = raw.n_tokens++;
            raw.token[i]     = t.id;
            raw.pos[i]       = t.pos[0];
            raw.n_seq_id[i]  = 1;
            raw.seq_id[i][0] = SEQ;
            raw.logits[i]    = t.output;
        }
        const bool done = llama_decode(ctx.get(), raw) == 0;
        llama_batch_free(raw);
        return done;
    }

    // false when llama.cpp refuses it
    bool pass(common_batch & batch) {
        for (const auto & t : batch.tokens) {
            if (t.id < 0 || t.id >= n_vocab) {
                if (pass_of_anything(batch)) {
                    give_up(3, "a token that is none is computed");
                }
                return false;
            }
        }
        if (llama_process(ctx.get(), LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0) {
            return false;
        }
        if (!common_speculative_process(spec.get(), batch)) {
            give_up(4, "the drafter does not follow");
        }
        return true;
    }

    // all of the prompt but its last token
    void begin() {
        common_batch batch(ctx.get());
        for (size_t i = 0; i + 1 < prompt.size(); i++) {
            batch.add(prompt[i], i, SEQ, false);
        }
        if (!pass(batch)) {
            give_up(4, "the prompt fails");
        }
        common_speculative_begin(spec.get(), SEQ, llama_tokens(prompt.begin(), prompt.end() - 1));
    }

    // what goes on after these tokens, of which the last one is not computed yet
    llama_tokens draft(const llama_tokens & text, int n_max) {
        llama_tokens drafted;
        if (!spec || n_max < 1) {
            return drafted;
        }
        const llama_tokens before(text.begin(), text.end() - 1);
        common_speculative_get_draft_params(spec.get(), SEQ) = {
            /* .drafting = */ true,
            /* .n_max    = */ n_max,
            /* .pos0     = */ (llama_pos) before.size(),
            /* .id_last  = */ text.back(),
            /* .prompt   = */ &before,
            /* .result   = */ &drafted,
        };
        common_speculative_draft(spec.get());
        if ((int) drafted.size() > n_max) {
            give_up(3, "more is drafted than there is room for");
        }
        forget_drafts(before.size());
        return drafted;
    }

    void forget_drafts(llama_pos from) {
        if (ctx_dft && !llama_memory_seq_rm(llama_get_memory(ctx_dft), SEQ, from, -1)) {
            give_up(3, "the drafter cannot go back");
        }
    }

    void go_back(llama_pos to) {
        if (!llama_memory_seq_rm(llama_get_memory(ctx.get()), SEQ, to, -1)) {
            give_up(3, "the target cannot go back");
        }
        forget_drafts(to);
    }
};

// Spoils drafts, turn by turn in another way.
struct spoiler {
    const options & opt;
    int             n_vocab;
    size_t          turn = 0;

    // unlikely: a token that is surely not the likeliest one
    void operator()(llama_tokens & draft, llama_token unlikely, size_t most) {
        if (draft.empty()) {
            return;
        }
        const llama_token nonsense[] = { -5, n_vocab, INT_MAX };
        const size_t at = turn % draft.size();
        switch (opt.bad) {
            case worse::no:       break;
            case worse::wrong:    std::fill(draft.begin(), draft.end(), unlikely); break;
            case worse::spoiled:  if (turn % 3 > 0) { draft[at] = unlikely; } break;
            case worse::nonsense: if (turn % 2 > 0) { draft[at] = nonsense[turn/2 % 3]; } break;
            case worse::too_long: draft.resize(std::max(most, draft.size()), draft.back()); break;
        }
        turn++;
    }
};

// Of the tokens that the sampler took, with the pass's logits.
static void check_rule(const speculation & s, const llama_tokens & draft, const llama_tokens & taken) {
    const llama_vocab * vocab = llama_model_get_vocab(s.model.get());
    if (taken.empty() || taken.size() > draft.size() + 1) {
        give_up(3, "not as many tokens as a draft yields");
    }
    for (size_t i = 0; i < taken.size(); i++) {
        const float * row = llama_get_logits_ith(s.ctx.get(), i);
        if (taken[i] != likeliest(row, s.n_vocab)) {
            give_up(3, "token " + std::to_string(i) + " of a pass is not its likeliest");
        }
        const bool last = i + 1 == taken.size();
        if (!last && taken[i] != draft[i]) {
            give_up(3, "token " + std::to_string(i) + " was not drafted and something was taken after it");
        }
        // nothing is taken after the end of a text, whatever was drafted
        if (last && i < draft.size() && taken[i] == draft[i] && !llama_vocab_is_eog(vocab, taken[i])) {
            give_up(3, "token " + std::to_string(i) + " was drafted rightly and rejected");
        }
    }
}

// Decodes the text token by token in a fresh context and compares: rows has the logits of all after the prompt.
static void decode_again(const speculation & s, const llama_tokens & text, const std::vector<float> & rows,
                         FILE * out) {
    llama_context_ptr ctx = s.context();
    int   off   = 0;
    float worst = 0;
    const size_t n_rows = rows.size() / s.n_vocab;
    common_batch batch(ctx.get());
    for (size_t i = 0; i < s.prompt.size() + n_rows - 1; i++) {
        const bool counts = i + 1 >= s.prompt.size();
        batch.add(text[i], i, SEQ, counts);
        if (i + 2 < s.prompt.size()) {
            continue;
        }
        if (llama_process(ctx.get(), LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0) {
            give_up(4, "decoding again fails");
        }
        batch.clear();
        if (!counts) {
            continue;
        }
        const float * a = llama_get_logits_ith(ctx.get(), -1);
        const float * b = rows.data() + (i + 1 - s.prompt.size()) * s.n_vocab;
        const auto range = std::minmax_element(a, a + s.n_vocab);
        float most = 0;
        for (int j = 0; j < s.n_vocab; j++) {
            most = std::max(most, std::fabs(a[j] - b[j]));
        }
        most /= *range.second - *range.first;
        off  += !(most <= s.opt.rounding);
        worst = std::max(worst, most);
    }
    fprintf(out, "again %zu %d %g\n", n_rows, off, worst);
}

static void generate(speculation & s, FILE * out) {
    common_sampler_ptr sampler(common_sampler_init(s.model.get(), s.params.sampling));
    spoiler      spoil    = { s.opt, s.n_vocab };
    llama_tokens text     = s.prompt; // the last token is not computed yet
    llama_tokens draft;
    llama_token  unlikely = 0;
    bool         bare     = false; // without a draft
    int          backs    = 0;
    int          refused  = 0;
    const size_t end      = s.prompt.size() + s.params.n_predict;
    const size_t n_ctx    = llama_n_ctx(s.ctx.get());
    std::vector<float>       rows;
    common_prompt_checkpoint checkpoint;

    s.begin();
    while (text.size() < std::min(end, n_ctx)) {
        const llama_pos past = text.size() - 1;
        if (draft.empty()) {
            const auto memory = llama_get_memory(s.ctx.get());
            checkpoint.update_pos(past, llama_memory_seq_pos_min(memory, SEQ), llama_memory_seq_pos_max(memory, SEQ));
            if (!bare) {
                draft = s.draft(text, std::min((int) n_ctx - past - 2, (int) (end - text.size()) - 1));
                spoil(draft, unlikely, common_speculative_n_max(s.spec.get()));
            }
            if (!draft.empty() && s.by_checkpoint(draft.size())) {
                checkpoint.update_tgt(s.ctx.get(), SEQ, PARTIAL);
            }
        }
        common_batch batch(s.ctx.get());
        batch.add(text.back(), past, SEQ, true);
        for (size_t i = 0; i < draft.size(); i++) {
            batch.add(draft[i], past + 1 + i, SEQ, true);
        }
        if (!s.pass(batch)) {
            if (bare || draft.empty()) {
                give_up(4, "a pass without a draft fails");
            }
            draft.clear();
            bare = true;
            refused++;
            continue;
        }
        bare = false;
        common_sampler_ptr before(common_sampler_clone(sampler.get()));
        llama_tokens taken = common_sampler_sample_and_accept_n(sampler.get(), s.ctx.get(), draft);
        if (s.params.sampling.temp <= 0) {
            check_rule(s, draft, taken);
        }
        const size_t undone = draft.size() + 1 - taken.size();
        if (undone > 0 && s.by_checkpoint(undone)) {
            checkpoint.load_tgt(s.ctx.get(), SEQ, PARTIAL);
            s.go_back(checkpoint.pos_max + 1);
            sampler = std::move(before);
            draft   = std::move(taken); // is verified once more, with what came after it
            backs++;
            continue;
        }
        if (!draft.empty()) {
            common_speculative_accept(s.spec.get(), SEQ, taken.size() - 1);
        }
        uint64_t sum = 0xcbf29ce484222325ull;
        for (size_t i = 0; i < taken.size(); i++) {
            const float * row = llama_get_logits_ith(s.ctx.get(), i);
            sum = checksum(sum, row, s.n_vocab);
            unlikely = std::min_element(row, row + s.n_vocab) - row;
            if (s.opt.rounding > 0) {
                rows.insert(rows.end(), row, row + s.n_vocab);
            }
        }
        fprintf(out, "pass %zu %zu %016" PRIx64, draft.size(), taken.size() - 1, sum);
        for (const llama_token t : taken) {
            fprintf(out, " %d", t);
        }
        fprintf(out, "\n");
        text.insert(text.end(), taken.begin(), taken.end());
        s.go_back(text.size() - 1);
        draft.clear();
    }
    const bool part = s.goes_back == COMMON_CONTEXT_SEQ_RM_TYPE_PART;
    fprintf(out, "memory %s\n", part ? "part" : s.goes_back == COMMON_CONTEXT_SEQ_RM_TYPE_RS ? "snapshots" : "full");
    fprintf(out, "back %d\nrefused %d\n", backs, refused);
    if (s.opt.rounding > 0) {
        decode_again(s, text, rows, out);
    }
}

// Verifies one draft and samples many times from it. OUT:
//     draft TOKEN
//     row LOGIT..          of the token that comes first; then of that which comes second
//     counts N TOKEN N ..  how often each came first; then how often each came second when the drafted one came first
static void draws(speculation & s, FILE * out) {
    s.begin();
    llama_tokens draft = s.draft(s.prompt, 1);
    if (draft.empty()) {
        give_up(4, "nothing was drafted");
    }
    common_batch batch(s.ctx.get());
    batch.add(s.prompt.back(), s.prompt.size() - 1, SEQ, true);
    batch.add(draft[0], s.prompt.size(), SEQ, true);
    if (!s.pass(batch)) {
        give_up(4, "the draft fails");
    }
    fprintf(out, "draft %d\n", draft[0]);
    for (int i = 0; i < 2; i++) {
        fprintf(out, "row");
        for (int j = 0; j < s.n_vocab; j++) {
            fprintf(out, " %.9g", llama_get_logits_ith(s.ctx.get(), i)[j]);
        }
        fprintf(out, "\n");
    }
    std::mt19937 rng(1);
    std::bernoulli_distribution accepted_at_once(0.1);
    std::map<llama_token, int> counts[2];
    common_sampler_ptr sampler(common_sampler_init(s.model.get(), s.params.sampling));
    for (int i = 0; i < s.opt.draws; i++) {
        llama_tokens taken = common_sampler_sample_and_accept_n(sampler.get(), s.ctx.get(), draft);
        if (s.opt.wrong_rule && accepted_at_once(rng)) {
            taken[0] = draft[0];
            taken.resize(1);
        }
        for (size_t place = 0; place < taken.size(); place++) {
            counts[place][taken[place]]++;
        }
    }
    for (const auto & count : counts) {
        fprintf(out, "counts");
        for (const auto & [token, n] : count) {
            fprintf(out, " %d %d", token, n);
        }
        fprintf(out, "\n");
    }
}

int main(int argc, char ** argv) {
    options opt(argc, argv);
    FILE * out = fopen(opt.out.c_str(), "w");
    if (!out) {
        give_up(1, opt.out + " cannot be written");
    }
    {
        speculation s(opt);
        if (opt.draws > 0) {
            draws(s, out);
        } else {
            generate(s, out);
        }
    }
    llama_backend_free();
    if (fclose(out) != 0) {
        give_up(1, opt.out + " cannot be written");
    }
    return 0;
}
