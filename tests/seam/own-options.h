// The command line of a driver: its own options among llama.cpp's.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

// what the driver calls itself
extern const char * const program;

[[noreturn]] static void give_up(int code, const std::string & why) {
    fprintf(stderr, "%s: %s\n", program, why.c_str());
    exit(code);
}

// gives each option to take(name, value), which answers whether it is one of the driver's, and calls value() for what follows it
// returns the others, which are llama.cpp's
template <typename taker>
static std::vector<char *> others_of(int argc, char ** argv, taker take) {
    std::vector<char *> others = { argv[0] };
    for (int i = 1; i < argc; i++) {
        const std::string name = argv[i];
        const auto value = [&]() -> std::string {
            if (i + 1 == argc) {
                give_up(1, name + " needs a value");
            }
            return argv[++i];
        };
        if (!take(name, value)) {
            others.push_back(argv[i]);
        }
    }
    return others;
}
