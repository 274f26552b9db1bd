// The command line of logits.cpp.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

struct options {
    std::string model;
    std::string other;
    std::string out;
    std::string lora;
    std::string load_mode;
    std::string save;
    std::string watch;
    std::vector<int>         threads   = { 1 };
    std::vector<std::string> scenarios = { "decode", "prompt64", "prompt512", "embd", "seqs" };
    std::vector<std::string> env_other; // KEY=VALUE, set after the first model is loaded and before the other one

    bool repack       = true;
    bool expect_error = false;
    bool interleave   = false;
    bool save_restore = false;
    bool threads_both = false;
    bool verbose      = false;

    int      retries  = 0;
    int      n_decode = 12;
    uint64_t seed     = 42;

    // done once, after so many successful decode calls
    int         act_after = 0;
    std::string act_file;
    long long   act_size   = -1; // truncate or grow the file to this size
    long long   act_offset = -1; // or invert the byte at this offset
};

static std::vector<std::string> split(const std::string & s) {
    std::vector<std::string> res;
    size_t from = 0;
    for (size_t comma; (comma = s.find(',', from)) != std::string::npos; from = comma + 1) {
        res.push_back(s.substr(from, comma - from));
    }
    res.push_back(s.substr(from));
    return res;
}

static void usage() {
    fprintf(stderr,
        "usage: logits -m MODEL -o OUT [options]\n"
        "  --scenarios A,B,..         of decode, prompt64, prompt512, embd, seqs (default: all)\n"
        "  --threads N,M,..           run everything once for each number of compute threads\n"
        "  --n-decode N               tokens of the decode scenario\n"
        "  --seed N\n"
        "  --no-repack                use_extra_bufts = false\n"
        "  --load-mode MODE           none, mmap, dio, .. (default: the library's)\n"
        "  --lora FILE\n"
        "  --save FILE                afterwards, write the model out\n"
        "  --watch PREFIX             record the multiplications with experts of this name\n"
        "  --other MODEL              afterwards, run the scenarios on this model too, as other/..\n"
        "  --env-other KEY=VALUE      environment of the other model's load (empty value: unset)\n"
        "  --expect-decode-error      succeed only if a decode of the first model fails\n"
        "  --retries N                repeat a failed decode\n"
        "  --truncate-after N FILE SIZE   set the file's size after N decode calls\n"
        "  --touch-after N FILE OFFSET    invert one byte after N decode calls\n"
        "  --two-models A B           decode on both in turns\n"
        "  --save-restore             save the state half way, go on in a new context\n"
        "  --threads-both             two threads, each with a context of the same model\n"
        "  -v                         the library's whole log\n");
    exit(1);
}

static options parse(int argc, char ** argv) {
    options opt;
    int i = 1;
    auto value = [&]() -> std::string {
        if (++i >= argc) {
            usage();
        }
        return argv[i];
    };
    for (; i < argc; i++) {
        const std::string a = argv[i];
        if      (a == "-m")                    { opt.model        = value(); }
        else if (a == "-o")                    { opt.out          = value(); }
        else if (a == "-v")                    { opt.verbose      = true; }
        else if (a == "--scenarios")           { opt.scenarios    = split(value()); }
        else if (a == "--watch")               { opt.watch        = value(); }
        else if (a == "--n-decode")            { opt.n_decode     = std::stoi(value()); }
        else if (a == "--seed")                { opt.seed         = std::stoull(value()); }
        else if (a == "--no-repack")           { opt.repack       = false; }
        else if (a == "--load-mode")           { opt.load_mode    = value(); }
        else if (a == "--lora")                { opt.lora         = value(); }
        else if (a == "--save")                { opt.save         = value(); }
        else if (a == "--other")               { opt.other        = value(); }
        else if (a == "--env-other")           { opt.env_other.push_back(value()); }
        else if (a == "--expect-decode-error") { opt.expect_error = true; }
        else if (a == "--retries")             { opt.retries      = std::stoi(value()); }
        else if (a == "--save-restore")        { opt.save_restore = true; }
        else if (a == "--threads-both")        { opt.threads_both = true; }
        else if (a == "--two-models")          { opt.model = value(); opt.other = value(); opt.interleave = true; }
        else if (a == "--truncate-after" || a == "--touch-after") {
            opt.act_after = std::stoi(value());
            opt.act_file  = value();
            (a == "--touch-after" ? opt.act_offset : opt.act_size) = std::stoll(value());
        } else if (a == "--threads") {
            opt.threads.clear();
            for (const auto & t : split(value())) {
                opt.threads.push_back(std::stoi(t));
            }
        } else {
            usage();
        }
    }
    if (opt.model.empty() || opt.out.empty()) {
        usage();
    }
    return opt;
}
