#pragma once

// What a model that streams is to the glue: for its own files only.

#include "les.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

// a tensor whose experts stream
struct ggml_les_tensor {
    uint32_t              number = 0; // in les.h
    std::vector<uint32_t> types;      // by expert; empty when all have the tensor's
};

struct ggml_les_model {
    les_model *            handle = nullptr;
    std::string            name;       // file name, for reports
    std::map<std::string, std::string> files; // by option: "stats", "profile", written when the model is freed, "trace", "inputs"
    std::atomic<int>       n_refs { 1 };
    std::atomic_flag       told = ATOMIC_FLAG_INIT; // how the files are read
    std::atomic<void *>    failed { nullptr };      // the ticket whose failure was told last: every walker meets it
    // by reserved address: tensor->extra would keep kernels from taking it
    std::unordered_map<const void *, ggml_les_tensor> tensors;

    std::string last_error() const;
};

// the model that verifies what is drafted: the first one that streams, and what the option "spec" says. The caller releases it;
// NULL when none streams
ggml_les_model * ggml_les_target(std::string * width);
// what became of drafts; empty when there were none
std::string ggml_les_spec_summary(const ggml_les_model * model);

// every operation that fails says so, once
void ggml_les_fail(const std::string & why);
