#pragma once

// What the tools share: flags, the line that says what was decided, the line that sums up, the server's metrics.

#include "arg.h"

#include <string>
#include <vector>

std::vector<common_arg> common_les_args();

// the flags of a program with a parser of its own: true when argv[i] was one; i is moved past its value
// throws std::invalid_argument
bool common_les_parse(int argc, char ** argv, int & i);

// the flags' help for such a program
std::string common_les_usage();

// prints what was decided about the model that was loaded last
void common_les_announce();
// prints a summary of each model that streams
void common_les_report();

// counters for Prometheus, summed over the models that stream; empty when none does
std::string common_les_metrics();
