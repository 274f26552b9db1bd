// Writes the raw logits of fixed scenarios, so that two builds of llama.cpp can be compared bit for bit.
//
// Public headers only: the same source is built against a stock and against a patched tree. What a patched tree shall
// do is told by the environment (LLAMA_ARG_LES*, LES_FAULT), so this program has no notion of it.
//
// OUT.bin holds float32 rows, OUT.idx one line per record: name, rows, columns. Every record is one llama_decode call.
// Exit codes: 0 done, 1 usage or file error, 2 model or adapter not loaded, 3 no context, 4 a decode failed and no
// failure was expected, 5 a failure was expected and none came.

#include "ggml.h"
#include "llama.h"

#include "logits-options.h"

#include <sys/stat.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

// A generator of our own: the C++ distributions may differ between standard libraries.
struct prng {
    uint64_t s;
    uint64_t next() {
        uint64_t z = (s += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
};

struct writer {
    FILE * bin = nullptr;
    FILE * idx = nullptr;
    std::mutex mutex;

    bool open(const std::string & path) {
        bin = fopen((path + ".bin").c_str(), "wb");
        idx = fopen((path + ".idx").c_str(), "w");
        return bin && idx;
    }
    void record(const std::string & name, const std::vector<float> & rows, int n_rows) {
        std::lock_guard<std::mutex> lock(mutex);
        fprintf(idx, "%s %d %d\n", name.c_str(), n_rows, n_rows ? (int) (rows.size() / n_rows) : 0);
        if (fwrite(rows.data(), sizeof(float), rows.size(), bin) != rows.size()) {
            perror("write");
            exit(1);
        }
    }
    bool close() {
        return (fclose(bin) == 0) & (fclose(idx) == 0);
    }
};

static options opt;
static writer  out;
static int     n_errors = 0; // failed decode calls
static int     n_calls  = 0; // successful decode calls
static int     n_watched = 0;
static std::mutex count_mutex;

static void act_on_file() {
    const int fd = open(opt.act_file.c_str(), O_RDWR);
    unsigned char byte = 0;
    bool ok = fd >= 0;
    if (opt.act_size >= 0) {
        ok = ok && ftruncate(fd, opt.act_size) == 0;
    } else {
        ok = ok && pread(fd, &byte, 1, opt.act_offset) == 1;
        byte = ~byte;
        ok = ok && pwrite(fd, &byte, 1, opt.act_offset) == 1;
    }
    if (!ok) {
        perror(opt.act_file.c_str());
        exit(1);
    }
    close(fd);
    printf("acted after call %d\n", n_calls);
}

// One batch: explicit sequences and positions, every token an output.
struct batch {
    std::vector<llama_token>    token;
    std::vector<float>          embd;
    std::vector<llama_pos>      pos;
    std::vector<llama_seq_id>   seq;
    std::vector<llama_seq_id *> seq_ptr;
    std::vector<int32_t>        n_seq;
    std::vector<int8_t>         output;

    void add(llama_token id, llama_pos p, llama_seq_id s) {
        token.push_back(id);
        pos.push_back(p);
        seq.push_back(s);
    }
    size_t size() const {
        return seq.size();
    }
    llama_batch view() {
        const size_t n = size();
        n_seq.assign(n, 1);
        output.assign(n, 1);
        seq_ptr.resize(n);
        for (size_t i = 0; i < n; i++) {
            seq_ptr[i] = &seq[i];
        }
        llama_batch b = {};
        b.n_tokens = n;
        b.token    = embd.empty() ? token.data() : nullptr;
        b.embd     = embd.empty() ? nullptr : embd.data();
        if (b.embd) {
            // models with M-RoPE want four positions for each embedding, the others read the first n
            pos.resize(n);
            for (int j = 1; j < 4; j++) {
                for (size_t i = 0; i < n; i++) {
                    pos.push_back(pos[i]);
                }
            }
        }
        b.pos      = pos.data();
        b.n_seq_id = n_seq.data();
        b.seq_id   = seq_ptr.data();
        b.logits   = output.data();
        return b;
    }
};

struct run {
    llama_model   * model = nullptr;
    llama_context * ctx   = nullptr;
    llama_adapter_lora * lora = nullptr;
    std::string name; // prefix of the records
    uint64_t    seed = 0;
    int         threads = 1;

    int n_vocab() const {
        return llama_vocab_n_tokens(llama_model_get_vocab(model));
    }
    std::vector<llama_token> tokens(int n) const {
        prng rng = { seed };
        std::vector<llama_token> res(n);
        for (auto & id : res) {
            id = rng.next() % n_vocab();
        }
        return res;
    }
};

// Asks for the operations to watch alone, which multiply with experts, and then looks at them.
static bool watch(ggml_tensor * t, bool ask, void *) {
    if (ask) {
        return opt.watch.compare(0, std::string::npos, t->name, opt.watch.size()) == 0;
    }
    std::lock_guard<std::mutex> lock(count_mutex);
    const std::string name = "watched." + std::to_string(n_watched++) + "." + t->name;
    for (const auto & [what, x] : { std::make_pair(".input", t->src[1]), std::make_pair(".output", t) }) {
        const float * data = (const float *) x->data;
        out.record(name + what, std::vector<float>(data, data + ggml_nelements(x)), (int) ggml_nrows(x));
    }
    std::vector<float> picks;
    for (int64_t i = 0; i < ggml_nelements(t->src[2]); i++) {
        const ggml_tensor * ids = t->src[2];
        picks.push_back(*(const int32_t *) ((const char *) ids->data + i/ids->ne[0]*ids->nb[1] + i%ids->ne[0]*ids->nb[0]));
    }
    out.record(name + ".picks", picks, 1);
    return true;
}

static void context_open(run & r, int n_ctx, int n_ubatch, int n_seq_max) {
    llama_context_params cp = llama_context_default_params();
    cp.n_ctx           = n_ctx;
    cp.n_batch         = n_ctx;
    cp.n_ubatch        = n_ubatch;
    cp.n_seq_max       = n_seq_max;
    cp.n_threads       = r.threads;
    cp.n_threads_batch = r.threads;
    cp.cb_eval         = opt.watch.empty() ? nullptr : watch;

    // a model without a cache (diffusion, encoder only) takes a batch in one piece only
    if (llama_model_has_encoder(r.model) || llama_model_is_diffusion(r.model)) {
        cp.n_ubatch = n_ctx;
    }

    r.ctx = llama_init_from_model(r.model, cp);
    float scale = 1.0f;
    if (!r.ctx || (r.lora && llama_set_adapters_lora(r.ctx, &r.lora, 1, &scale) != 0)) {
        fprintf(stderr, "%s: no context\n", r.name.c_str());
        exit(3);
    }
}

static void context_close(run & r) {
    llama_free(r.ctx);
    r.ctx = nullptr;
}

// Decodes and records. After a failure the positions of the batch are taken back and the call is repeated, up to
// opt.retries times: a context has to work again once the fault is over.
static bool decode(run & r, const std::string & record, batch & b) {
    llama_batch view = b.view();
    int32_t rc = 0;
    for (int attempt = 0; ; attempt++) {
        rc = llama_model_has_encoder(r.model) ? llama_encode(r.ctx, view) : 0;
        if (rc == 0 && (llama_model_has_decoder(r.model) || !llama_model_has_encoder(r.model))) {
            rc = llama_decode(r.ctx, view);
        }
        if (rc == 0) {
            break;
        }
        std::lock_guard<std::mutex> lock(count_mutex);
        n_errors++;
        printf("rc %s%s attempt %d code %d\n", r.name.c_str(), record.c_str(), attempt, rc);
        if (attempt == opt.retries) {
            return false;
        }
        std::map<llama_seq_id, llama_pos> first;
        for (size_t i = 0; i < b.size(); i++) {
            auto it = first.emplace(b.seq[i], b.pos[i]).first;
            it->second = std::min(it->second, b.pos[i]);
        }
        for (auto & [seq, pos] : first) {
            llama_memory_seq_rm(llama_get_memory(r.ctx), seq, pos, -1);
        }
    }

    std::vector<float> rows;
    for (int i = 0; i < view.n_tokens; i++) {
        const float * row = llama_get_logits_ith(r.ctx, i);
        int n_cols = r.n_vocab();
        if (!row) {
            row    = llama_get_embeddings_ith(r.ctx, i);
            n_cols = llama_model_n_embd_out(r.model);
        }
        if (!row) {
            fprintf(stderr, "%s%s: no output for token %d\n", r.name.c_str(), record.c_str(), i);
            exit(1);
        }
        rows.insert(rows.end(), row, row + n_cols);
    }
    out.record(r.name + record, rows, view.n_tokens);

    std::lock_guard<std::mutex> lock(count_mutex);
    if (++n_calls == opt.act_after) {
        act_on_file();
    }
    return true;
}

static bool decode_one(run & r, const std::string & record, llama_token id, llama_pos pos) {
    batch b;
    b.add(id, pos, 0);
    return decode(r, record, b);
}

static bool scenario_prompt(run & r, const std::string & name, int n, int n_ubatch) {
    batch b;
    const auto ids = r.tokens(n);
    for (int i = 0; i < n; i++) {
        b.add(ids[i], i, 0);
    }
    context_open(r, n, n_ubatch, 1);
    const bool ok = decode(r, name, b);
    context_close(r);
    return ok;
}

static bool scenario_decode(run & r) {
    const auto ids = r.tokens(opt.n_decode);
    bool ok = true;
    context_open(r, 256, 256, 1);
    for (int i = 0; ok && i < opt.n_decode; i++) {
        ok = decode_one(r, "decode." + std::to_string(i), ids[i], i);
    }
    context_close(r);
    return ok;
}

static bool scenario_embd(run & r) {
    const int n = 16;
    batch b;
    for (int i = 0; i < n; i++) {
        b.add(0, i, 0);
    }
    prng rng = { r.seed };
    b.embd.resize((size_t) n * llama_model_n_embd_inp(r.model));
    for (float & v : b.embd) {
        v = (float) (rng.next() >> 40) / (1 << 24) - 0.5f;
    }
    context_open(r, 256, 256, 1);
    const bool ok = decode(r, "embd", b);
    context_close(r);
    return ok;
}

// Three sequences of different lengths, interleaved in one batch, then two steps of all three together.
static bool scenario_seqs(run & r) {
    const int len[3] = { 20, 13, 7 };
    const auto ids = r.tokens(3*32);
    bool ok = true;
    context_open(r, 3*256, 256, 3);
    batch b;
    for (int i = 0; i < len[0]; i++) {
        for (int s = 0; s < 3; s++) {
            if (i < len[s]) {
                b.add(ids[s*32 + i], i, s);
            }
        }
    }
    ok = decode(r, "seqs.prompt", b);
    for (int step = 0; ok && step < 2; step++) {
        batch d;
        for (int s = 0; s < 3; s++) {
            d.add(ids[s*32 + len[s] + step], len[s] + step, s);
        }
        ok = decode(r, "seqs.step" + std::to_string(step), d);
    }
    context_close(r);
    return ok;
}

static bool run_scenarios(run & r) {
    bool all = true;
    for (const auto & name : opt.scenarios) {
        bool ok = true;
        if (name == "decode") {
            ok = scenario_decode(r);
        } else if (name == "prompt64") {
            ok = scenario_prompt(r, name, 64, 64);
        } else if (name == "prompt512") {
            ok = scenario_prompt(r, name, 512, 128);
        } else if (name == "embd") {
            ok = scenario_embd(r);
        } else if (name == "seqs") {
            ok = scenario_seqs(r);
        } else {
            fprintf(stderr, "unknown scenario %s\n", name.c_str());
            exit(1);
        }
        all = all && ok;
    }
    return all;
}

// Both models decode in turns, each in its own context.
static bool run_interleaved(run & a, run & b) {
    const auto ids_a = a.tokens(opt.n_decode);
    const auto ids_b = b.tokens(opt.n_decode);
    bool ok = true;
    context_open(a, 256, 256, 1);
    context_open(b, 256, 256, 1);
    for (int i = 0; ok && i < opt.n_decode; i++) {
        ok = decode_one(a, "turns." + std::to_string(i), ids_a[i], i) &&
             decode_one(b, "turns." + std::to_string(i), ids_b[i], i);
    }
    context_close(a);
    context_close(b);
    return ok;
}

// The second half of the tokens is decoded twice: straight on, and in a new context from the saved state.
static bool run_save_restore(run & r) {
    const int half = opt.n_decode / 2;
    const auto ids = r.tokens(opt.n_decode);
    bool ok = true;
    context_open(r, 256, 256, 1);
    for (int i = 0; ok && i < half; i++) {
        ok = decode_one(r, "first." + std::to_string(i), ids[i], i);
    }
    std::vector<uint8_t> state(llama_state_get_size(r.ctx));
    const size_t n_state = llama_state_get_data(r.ctx, state.data(), state.size());
    run straight = r;
    straight.name += "straight";
    for (int i = half; ok && i < opt.n_decode; i++) {
        ok = decode_one(straight, "." + std::to_string(i), ids[i], i);
    }
    context_close(r);

    run restored = r;
    restored.name += "restored";
    context_open(restored, 256, 256, 1);
    if (llama_state_set_data(restored.ctx, state.data(), n_state) != n_state) {
        fprintf(stderr, "the state was not restored\n");
        exit(1);
    }
    for (int i = half; ok && i < opt.n_decode; i++) {
        ok = decode_one(restored, "." + std::to_string(i), ids[i], i);
    }
    context_close(restored);
    return ok;
}

// Two threads, each with a context of its own on the same model: first one after the other, then at once.
static bool run_threads_both(const run & r) {
    auto one = [&](const std::string & name, uint64_t seed) {
        run x = r;
        x.name += name;
        x.seed  = seed;
        return scenario_decode(x);
    };
    bool ok = one("alone0/", r.seed) && one("alone1/", r.seed + 1);
    bool ok_0 = false;
    bool ok_1 = false;
    std::thread t_0([&] { ok_0 = one("both0/", r.seed); });
    std::thread t_1([&] { ok_1 = one("both1/", r.seed + 1); });
    t_0.join();
    t_1.join();
    return ok && ok_0 && ok_1;
}

static llama_model * model_load(const std::string & path) {
    llama_model_params mp = llama_model_default_params();
    mp.use_extra_bufts = opt.repack;
    if (!opt.load_mode.empty()) {
        mp.load_mode = llama_load_mode_from_str(opt.load_mode.c_str());
    }
    llama_model * model = llama_model_load_from_file(path.c_str(), mp);
    if (!model) {
        fprintf(stderr, "%s: not loaded\n", path.c_str());
        exit(2);
    }
    return model;
}

static void log_callback(ggml_log_level level, const char * text, void *) {
    if (opt.verbose || level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

static void set_environment(const std::vector<std::string> & settings) {
    for (const auto & s : settings) {
        const size_t eq = s.find('=');
        if (eq == std::string::npos || eq + 1 == s.size()) {
            unsetenv(s.substr(0, eq).c_str());
        } else {
            setenv(s.substr(0, eq).c_str(), s.substr(eq + 1).c_str(), 1);
        }
    }
}

int main(int argc, char ** argv) {
    opt = parse(argc, argv);
    // a crash must not lose what was printed before it
    setvbuf(stdout, nullptr, _IOLBF, 0);
    llama_log_set(log_callback, nullptr);
    llama_backend_init();
    if (!out.open(opt.out)) {
        perror(opt.out.c_str());
        return 1;
    }

    run a;
    a.model = model_load(opt.model);
    a.seed  = opt.seed;
    if (!opt.lora.empty() && !(a.lora = llama_adapter_lora_init(a.model, opt.lora.c_str()))) {
        fprintf(stderr, "%s: not loaded\n", opt.lora.c_str());
        return 2;
    }
    run b;
    b.seed = opt.seed;
    if (opt.interleave) {
        set_environment(opt.env_other);
        b.model = model_load(opt.other);
    }

    bool ok = true;
    for (int n : opt.threads) {
        a.threads = b.threads = n;
        a.name = "t" + std::to_string(n) + "/";
        b.name = a.name + "other/";
        ok = (opt.interleave   ? run_interleaved(a, b)
            : opt.save_restore ? run_save_restore(a)
            : opt.threads_both ? run_threads_both(a)
            : run_scenarios(a)) && ok;
    }
    const int n_errors_first = n_errors;

    // a failure of one model must not touch another one
    if (!opt.other.empty() && !opt.interleave) {
        set_environment(opt.env_other);
        b.model = model_load(opt.other);
        for (int n : opt.threads) {
            b.threads = n;
            b.name = "t" + std::to_string(n) + "/other/";
            if (!run_scenarios(b)) {
                return 4;
            }
        }
    }
    if (!opt.save.empty()) {
        llama_model_save_to_file(a.model, opt.save.c_str());
    }
    if (b.model) {
        llama_model_free(b.model);
    }
    llama_model_free(a.model);
    llama_backend_free();

    printf("errors %d calls %d\n", n_errors_first, n_calls);
    if (!out.close()) {
        perror(opt.out.c_str());
        return 1;
    }
    if (opt.expect_error) {
        return n_errors_first > 0 ? 0 : 5;
    }
    return ok ? 0 : 4;
}
