// The command line of speculate.cpp: its own options, and llama.cpp's.

#pragma once

#include "own-options.h"

#include <string>
#include <vector>

const char * const program = "speculate";

// What is done to a draft before it is verified, as if a bad drafter had made it.
enum class worse {
    no,
    wrong,    // no token is right
    spoiled,  // one token is wrong, now this one, now that
    nonsense, // one token is none
    too_long, // as long as the drafter drafts at most, whether or not there is room
};

struct options {
    std::string out;
    worse       bad        = worse::no;
    int         snapshots  = -1; // of recurrent states; -1: as many as llama.cpp's programs keep
    int         noise      = 0;  // a prompt of so many arbitrary tokens, for models that have no words
    float       rounding   = 0;  // of a row of logits, as a part of its range; 0: is not decoded again
    int         draws      = 0;
    bool        wrong_rule = false;
    std::vector<char *> others; // llama.cpp's

    options(int argc, char ** argv) {
        others = others_of(argc, argv, [&](const std::string & arg, const auto & value) {
            if      (arg == "-o")           { out        = value(); }
            else if (arg == "--bad")        { bad        = worse_from(value()); }
            else if (arg == "--snapshots")  { snapshots  = std::stoi(value()); }
            else if (arg == "--noise")      { noise      = std::stoi(value()); }
            else if (arg == "--again")      { rounding   = std::stof(value()); }
            else if (arg == "--draws")      { draws      = std::stoi(value()); }
            else if (arg == "--wrong-rule") { wrong_rule = true; }
            else                            { return false; }
            return true;
        });
        if (out.empty()) {
            give_up(1,
                "usage: speculate -o OUT -m MODEL -n TOKENS [llama.cpp's flags] [options]\n"
                "  --bad WAY        spoil the drafts: wrong, spoiled, nonsense, too-long\n"
                "  --snapshots N    that recurrent layers keep, to go back by so many tokens (0: only by checkpoints)\n"
                "  --noise N        a prompt of so many arbitrary tokens\n"
                "  --again PART     afterwards, decode the text without speculation and compare the logits: they may\n"
                "                   differ by this part of their range, as rounding depends on the size of a batch\n"
                "  --draws N        instead, verify one draft and sample so often from it\n"
                "  --wrong-rule     which then accepts tokens that it must not accept");
        }
    }

private:
    static worse worse_from(const std::string & name) {
        if (name == "wrong")    { return worse::wrong; }
        if (name == "spoiled")  { return worse::spoiled; }
        if (name == "nonsense") { return worse::nonsense; }
        if (name == "too-long") { return worse::too_long; }
        give_up(1, "there is no bad drafter called " + name);
    }
};
