#include "common-les.h"

#include "ggml-les.h"
#include "les.h"
#include "log.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>

struct les_flag {
    const char * flag;
    const char * option;
    const char * hint;
    const char * env;
    const char * help;
};

static const les_flag les_flags[] = {
    { "--les", "mode", "{off,auto,on}", "LLAMA_ARG_LES",
      "stream the experts of a Mixture-of-Experts model from its file: auto streams when they do not fit in memory (default: auto)" },
    { "--les-cache", "cache", "N", "LLAMA_ARG_LES_CACHE",
      "memory for the experts that stream: MiB, or a size such as 3G, or 40% of the experts, or min, or auto: what is left (default: auto)" },
    { "--les-io", "io", "{auto,uring,pread}", "LLAMA_ARG_LES_IO",
      "how the experts are read (default: auto)" },
    { "--les-io-depth", "io-depth", "N", "LLAMA_ARG_LES_IO_DEPTH",
      "how many reads are in flight at most (default: 16)" },
    { "--les-lookahead", "lookahead", "N", "LLAMA_ARG_LES_LOOKAHEAD",
      "how many layers ahead experts are predicted and read, 0: none, auto: one, or two where one is too late (default: auto)" },
    { "--les-stats", "stats", "FILE", "LLAMA_ARG_LES_STATS",
      "write the counters of streaming to FILE as JSON when the model is freed" },
    { "--les-trace", "trace", "FILE", "LLAMA_ARG_LES_TRACE",
      "write what the routers pick to FILE, for les sim" },
    { "--les-profile", "profile", "FILE", "LLAMA_ARG_LES_PROFILE",
      "begin with what FILE knows of the model from earlier runs, and write it anew when the model is freed" },
    { "--les-inputs", "inputs", "FILE", "LLAMA_ARG_LES_INPUTS",
      "record in FILE what the experts are applied to, for les pack --inputs" },
    { "--les-spec", "spec", "{off,adaptive,N}", "LLAMA_ARG_LES_SPEC",
      "of the tokens that a --spec-type drafts, how many to verify at once: as many as pay, or up to N (default: adaptive)" },
};

static void les_set(const char * option, const std::string & value) {
    char err[512] = "";
    if (!ggml_les_set_option(option, value.c_str(), err, sizeof(err))) {
        throw std::invalid_argument(err);
    }
}

// a handler is a plain function: the template parameter tells it which flag it serves
template <size_t I>
static void les_handle(common_params &, const std::string & value) {
    les_set(les_flags[I].option, value);
}

template <size_t I>
static common_arg les_arg() {
    const les_flag & f = les_flags[I];
    return common_arg({ f.flag }, f.hint, f.help, les_handle<I>).set_env(f.env);
}

std::vector<common_arg> common_les_args() {
#ifndef _WIN32
    // the log is written by a thread, and a tool that ends does not wait for it: the last lines would be lost
    static const bool waits = atexit([] { common_log_pause(common_log_main()); }) == 0;
    GGML_UNUSED(waits);
#endif
    return { les_arg<0>(), les_arg<1>(), les_arg<2>(), les_arg<3>(), les_arg<4>(), les_arg<5>(), les_arg<6>(), les_arg<7>(), les_arg<8>(), les_arg<9>() };
}

bool common_les_parse(int argc, char ** argv, int & i) {
    for (const les_flag & f : les_flags) {
        if (strcmp(argv[i], f.flag) == 0) {
            if (i + 1 >= argc) {
                throw std::invalid_argument(std::string(f.flag) + " needs a value");
            }
            les_set(f.option, argv[++i]);
            return true;
        }
    }
    return false;
}

std::string common_les_usage() {
    std::string usage;
    for (const les_flag & f : les_flags) {
        char line[512];
        const std::string flag = std::string(f.flag) + " <" + f.hint + ">";
        snprintf(line, sizeof(line), "  %-43s %s\n", flag.c_str(), f.help);
        usage += line;
    }
    return usage;
}

// on stderr: what a user must see does not depend on a tool's verbosity
void common_les_announce() {
    char text[1024] = "";
    ggml_les_take_message(text, sizeof(text));
    if (*text) {
        fprintf(stderr, "les: %s\n", text);
    }
}

void common_les_report() {
    char text[1024] = "";
    for (int i = 0; ggml_les_summary(i, text, sizeof(text)); i++) {
        fprintf(stderr, "les: %s\n", text);
    }
}

struct les_metric {
    const char * name;
    const char * type;
    const char * help;
    double    (* value)(const les_stats & s);
};

static const les_metric les_metrics[] = {
    { "requests_total", "counter", "Experts asked for",
      [](const les_stats & s) { return (double) (s.decode.requests + s.prompt.requests); } },
    { "hits_total", "counter", "Experts in memory when asked for",
      [](const les_stats & s) { return (double) (s.decode.hits + s.prompt.hits); } },
    { "bytes_read_total", "counter", "Bytes of experts read from the file",
      [](const les_stats & s) { return (double) (s.decode.bytes_read + s.prompt.bytes_read); } },
    { "wait_seconds_total", "counter", "Time that the computation waited for experts",
      [](const les_stats & s) { return (s.decode.wait_ns + s.prompt.wait_ns) / 1e9; } },
    { "guessed_total", "counter", "Matrices of experts read because they were predicted",
      [](const les_stats & s) { return (double) s.guessed; } },
    { "guessed_in_time_total", "counter", "Predicted matrices in memory when they were needed",
      [](const les_stats & s) { return (double) s.guessed_in_time; } },
    { "guessed_late_total", "counter", "Predicted matrices still being read when they were needed",
      [](const les_stats & s) { return (double) s.guessed_late; } },
    { "guessed_wasted_total", "counter", "Predicted matrices that were not needed",
      [](const les_stats & s) { return (double) s.guessed_wasted; } },
    { "evictions_total", "counter", "Matrices of experts evicted from the cache",
      [](const les_stats & s) { return (double) s.evictions; } },
    { "verifications_total", "counter", "Passes that verified drafted tokens",
      [](const les_stats & s) { return (double) s.verifications; } },
    { "evictions_for_drafts_total", "counter", "Matrices of experts evicted for others that only drafted tokens wanted",
      [](const les_stats & s) { return (double) s.evictions_for_drafts; } },
    { "read_errors_total", "counter", "Reads of experts that failed",
      [](const les_stats & s) { return (double) s.read_errors; } },
    { "cache_bytes", "gauge", "Memory for the experts that stream",
      [](const les_stats & s) { return (double) s.cache_bytes; } },
};

std::string common_les_metrics() {
    std::vector<les_stats> models;
    for (les_stats s; ggml_les_stats((int) models.size(), &s);) {
        models.push_back(s);
    }
    if (models.empty()) {
        return "";
    }
    std::ostringstream text;
    text.precision(15); // every digit of a count
    for (const les_metric & m : les_metrics) {
        double sum = 0;
        for (const les_stats & s : models) {
            sum += m.value(s);
        }
        const std::string name = std::string("llamacpp:les_") + m.name;
        text << "# HELP " << name << " " << m.help << "\n"
             << "# TYPE " << name << " " << m.type << "\n"
             << name << " " << sum << "\n";
    }
    return text.str();
}
