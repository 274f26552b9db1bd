// How fast a text is generated with a drafter that replays it, and is wrong as often as it is told to be: what speculation
// is worth on a model, without a drafter for it. The ways of choosing how many tokens to verify take turns, a segment of
// the text each, so that they meet the same conditions. What a step computes and reads is real. How many tokens stood was luck:
// how many were to be expected of the same steps is printed beside it.
//
//     replay -m MODEL.gguf --record TEXT.tokens -n 600
//     replay -m MODEL.gguf --replay TEXT.tokens --right 0.8 --widths off,2,7,adaptive --segment 16 --rounds 6 [llama.cpp's flags]
//
// With --learning N, the first segment of `adaptive` has N tokens.
// Prints a line of JSON per segment. Exit codes: 0 done, 1 usage or file error, 2 model not loaded, 3 a pass failed.

#include "../seam/own-options.h"

#include "arg.h"
#include "common-les-spec.h"
#include "common.h"
#include "ggml-les.h"
#include "les.h"
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

const char * const program = "replay";

static const int BLOCK = 7;         // tokens that the drafter drafts
static const llama_token FIRST = 1; // of a text that is recorded

struct options {
    std::string record;
    std::string replay;
    double      right   = 0.8;
    int         segment = 16;
    int         learning = 0;
    int         rounds  = 6;
    std::string widths  = "off,2,7,adaptive";
    std::vector<char *> others; // llama.cpp's

    options(int argc, char ** argv) {
        others = others_of(argc, argv, [&](const std::string & arg, const auto & value) {
            if (arg == "--record") {
                record = value();
            } else if (arg == "--replay") {
                replay = value();
            } else if (arg == "--right") {
                right = std::stod(value());
            } else if (arg == "--segment") {
                segment = std::stoi(value());
            } else if (arg == "--learning") {
                learning = std::stoi(value());
            } else if (arg == "--rounds") {
                rounds = std::stoi(value());
            } else if (arg == "--widths") {
                widths = value();
            } else {
                return false;
            }
            return true;
        });
        if (record.empty() == replay.empty() || segment < 2 || !(right >= 0 && right <= 1)) {
            give_up(1, "give --record FILE or --replay FILE, --right from 0 to 1, and --segment of 2 or more");
        }
    }
};

// the target, and where it is in the text
struct target {
    common_params   params;
    llama_model   * model = nullptr;
    llama_context * ctx   = nullptr;
    llama_pos       past  = 0;

    explicit target(std::vector<char *> & args) {
        if (!common_params_parse(args.size(), args.data(), params, LLAMA_EXAMPLE_COMMON)) {
            exit(1);
        }
        llama_backend_init();
        model = llama_model_load_from_file(params.model.path.c_str(), common_model_params_to_llama(params));
        llama_context_params cparams = common_context_params_to_llama(params);
        cparams.n_rs_seq = BLOCK; // so that recurrent layers can go back
        cparams.n_outputs_max = BLOCK + 1;
        ctx = model ? llama_init_from_model(model, cparams) : nullptr;
        if (!ctx) {
            give_up(2, "the model was not loaded");
        }
    }

    ~target() {
        llama_free(ctx);
        llama_model_free(model);
        llama_backend_free();
    }

    // computes the batch, which follows what was computed and kept
    void pass(common_batch & batch) {
        if (llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0) {
            give_up(3, "a pass failed");
        }
    }

    // so many tokens of what was computed stay
    void keep(int n) {
        past += n;
        if (!llama_memory_seq_rm(llama_get_memory(ctx), 0, past, -1)) {
            give_up(3, "the model cannot go back");
        }
    }
};

// at temperature 1, from all tokens: other sampling falls into loops that no text has
static llama_token drawn(const float * logits, int n, std::mt19937_64 & rng) {
    float most = -INFINITY;
    for (int i = 0; i < n; i++) {
        most = std::max(most, logits[i]);
    }
    std::vector<double> p(n);
    for (int i = 0; i < n; i++) {
        p[i] = std::exp((double) logits[i] - most);
    }
    return std::discrete_distribution<llama_token>(p.begin(), p.end())(rng);
}

static void record(target & t, const options & opt) {
    FILE * out = fopen(opt.record.c_str(), "w");
    if (!out) {
        give_up(1, opt.record + " cannot be written");
    }
    std::mt19937_64 rng(1);
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(t.model));
    llama_token token = FIRST;
    for (int i = 0; i < t.params.n_predict; i++) {
        fprintf(out, "%d\n", token);
        common_batch batch(t.ctx);
        batch.add(token, t.past, 0, true);
        t.pass(batch);
        t.keep(1);
        token = drawn(llama_get_logits_ith(t.ctx, -1), n_vocab, rng);
    }
    if (fclose(out) != 0) {
        give_up(1, opt.record + " cannot be written");
    }
}

static std::vector<llama_token> recorded(const std::string & path) {
    std::vector<llama_token> text;
    FILE * in = fopen(path.c_str(), "r");
    for (llama_token token; in && fscanf(in, "%d", &token) == 1;) {
        text.push_back(token);
    }
    if (!in || text.empty()) {
        give_up(1, path + " holds no recorded text");
    }
    fclose(in);
    return text;
}

struct counters {
    uint64_t bytes_read           = 0;
    uint64_t evictions_for_drafts = 0;

    counters() {
        les_stats s;
        if (ggml_les_stats(0, &s)) {
            bytes_read           = s.decode.bytes_read + s.prompt.bytes_read;
            evictions_for_drafts = s.evictions_for_drafts;
        }
    }
};

// one way of choosing how many tokens to verify
struct way {
    std::string     name;
    common_les_spec spec;

    explicit way(const std::string & name) : name(name) {
    }

    // goes on with the text at `at`, for a segment of `n_tokens`; drafts are right with probability `p`
    void segment(target & t, const std::vector<llama_token> & text, size_t & at, size_t n_tokens, double p, std::mt19937_64 & rng) {
        char err[256] = "";
        // read when the first token is drafted
        if (!ggml_les_set_option("spec", name.c_str(), err, sizeof(err))) {
            give_up(1, err);
        }
        const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(t.model));
        std::uniform_int_distribution<llama_token> any(0, n_vocab - 1);
        std::bernoulli_distribution right(p);
        std::vector<common_speculative_draft_params> drafting(1);
        const size_t   begin = at;
        const counters before;
        int drafted = 0, stood = 0, steps = 0;
        double expected = 0;
        const auto began = std::chrono::steady_clock::now();
        spec.begin(0);
        while (at < begin + n_tokens) {
            llama_tokens draft;
            drafting[0] = { true, BLOCK, t.past, text[at], nullptr, &draft };
            {
                common_les_drafting les(spec, drafting, BLOCK);
                while (drafting[0].drafting && (int) draft.size() < drafting[0].n_max) {
                    draft.push_back(right(rng) ? text[at + draft.size() + 1] : any(rng));
                }
            }
            common_batch batch(t.ctx);
            batch.add(text[at], t.past, 0, true);
            for (size_t i = 0; i < draft.size(); i++) {
                batch.add(draft[i], t.past + i + 1, 0, true);
            }
            t.pass(batch);
            spec.processed(batch);
            size_t n = 0;
            while (n < draft.size() && draft[n] == text[at + n + 1]) {
                n++;
            }
            if (!draft.empty()) {
                spec.accepted(0, n);
            }
            t.keep(n + 1);
            at += n + 1;
            drafted += draft.size();
            stood   += n;
            steps++;
            double all_right = 1;
            for (size_t i = 0; i <= draft.size(); i++) {
                expected  += all_right;
                all_right *= p;
            }
        }
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
        const counters after;
        printf("{\"width\": \"%s\", \"tokens\": %zu, \"expected\": %.6f, \"seconds\": %.6f, \"steps\": %d, \"verified\": %d, \"stood\": %d, "
            "\"bytes_read\": %llu, \"evictions_for_drafts\": %llu}\n",
            name.c_str(), at - begin, expected, took.count(), steps, drafted, stood, (unsigned long long) (after.bytes_read - before.bytes_read),
            (unsigned long long) (after.evictions_for_drafts - before.evictions_for_drafts));
        fflush(stdout);
    }
};

int main(int argc, char ** argv) {
    options opt(argc, argv);
    target  t(opt.others);
    if (!opt.record.empty()) {
        record(t, opt);
        return 0;
    }
    const std::vector<llama_token> text = recorded(opt.replay);
    std::vector<std::unique_ptr<way>> ways;
    for (const std::string & name : string_split<std::string>(opt.widths, ',')) {
        ways.push_back(std::make_unique<way>(name));
    }
    std::mt19937_64 rng(1), order(2);
    const size_t end = std::min<size_t>(text.size(), llama_n_ctx(t.ctx) - BLOCK);
    size_t at = 0;
    const size_t turns = opt.rounds*ways.size();
    for (size_t turn = 0; turn < turns; turn++) {
        // each way finds what another one has left in the cache, in each round another one
        if (turn % ways.size() == 0) {
            std::shuffle(ways.begin(), ways.end(), order);
        }
        way & next = *ways[turn % ways.size()];
        const bool   learns = turn < ways.size() && next.name == "adaptive";
        const size_t n      = learns ? std::max(opt.segment, opt.learning) : opt.segment;
        if (at + n + 2*BLOCK >= end) {
            break;
        }
        next.segment(t, text, at, n, opt.right, rng);
    }
}
