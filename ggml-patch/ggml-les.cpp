#include "ggml-les.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include "ggml-les-model.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#ifdef __linux__
#    include <sys/mman.h>
#    include <unistd.h>
#endif

namespace {

const char * const option_names[] = { "mode", "cache", "io", "io-depth", "lookahead", "stats", "trace", "profile", "inputs", "spec" };

// options by the names of their flags without "les-"
struct les_options {
    std::map<std::string, std::string> values;

    // the value set by the program, else the environment's, else nothing: the default
    std::string get(const std::string & name) const {
        const auto it = values.find(name);
        if (it != values.end()) {
            return it->second;
        }
        std::string env = name == "mode" ? "LLAMA_ARG_LES" : "LLAMA_ARG_LES_" + name;
        for (char & c : env) {
            c = c == '-' ? '_' : (char) toupper((unsigned char) c);
        }
        const char * value = getenv(env.c_str());
        return value ? value : "";
    }

    les_options with_environment() const {
        les_options all;
        for (const char * name : option_names) {
            all.values[name] = get(name);
        }
        return all;
    }

    // valid as long as the options
    les_params params() const {
        const auto text = [this](const char * name) {
            const auto it = values.find(name);
            return it == values.end() ? nullptr : it->second.c_str();
        };
        les_params params;
        les_params_default(&params);
        params.mode     = text("mode");
        params.cache    = text("cache");
        params.io       = text("io");
        params.io_depth = text("io-depth");
        params.lookahead = text("lookahead");
        params.trace     = text("trace");
        params.profile   = text("profile");
        params.inputs    = text("inputs");
        return params;
    }
};

struct les_state {
    std::mutex                    mutex;
    les_options                   options;
    std::vector<ggml_les_model *> live; // that stream
    std::string                   message;
    ggml_backend_buffer_type_t    (*buft)(void) = nullptr;
};

les_state & state() {
    // never destroyed: models may be freed by static destructors
    static les_state * state = new les_state();
    return *state;
}

std::atomic<bool> any_failed { false };

thread_local bool             loading          = false;
thread_local ggml_les_model * load_model       = nullptr; // that streams
thread_local bool             load_dry         = false;   // only sizes are wanted
thread_local size_t           load_cache_bytes = 0;
// a stock file has no room for experts of several types
const char * const            TAKE_STOCK = "take the file that it was packed from, which les unpack makes unless experts differ in type";
thread_local std::string      load_why_not;               // for a packed model, which must stream

void copy_text(char * buf, size_t len, const std::string & text) {
    if (buf && len > 0) {
        const size_t n = std::min(text.size(), len - 1);
        memcpy(buf, text.data(), n);
        buf[n] = 0;
    }
}

// why a load fails: for the loader, and for the user, whom its log may not reach before the program ends
bool refuse(char * err, size_t err_len, const std::string & why) {
    copy_text(err, err_len, why);
    std::lock_guard<std::mutex> lock(state().mutex);
    state().message = why;
    return false;
}

// of the model that this thread is loading; all zeros for a number that no tensor has
les_tensor_info tensor_info(int number) {
    les_tensor_info info = {};
    info.struct_size = sizeof(info);
    if (load_model && number >= 0) {
        les_model_tensor(load_model->handle, number, &info); // fills all or nothing
    }
    return info;
}

std::string base_name(const std::string & path) {
    const size_t slash = path.find_last_of("/\\");
    return slash == std::string::npos ? path : path.substr(slash + 1);
}

std::string summary(const ggml_les_model * model) {
    les_stats s;
    s.struct_size = sizeof(s);
    if (les_model_stats(model->handle, &s) != LES_OK) {
        return model->name + ": no expert was used";
    }
    // the warm-up is one token
    const bool generated = s.decode.tokens > 1 || s.prompt.tokens == 0;
    const les_phase & p = generated ? s.decode : s.prompt;
    const double tokens = std::max<double>(p.tokens, 1);
    std::string speed;
    char buf[512];
    if (s.decode_steps > 0) {
        snprintf(buf, sizeof(buf), "%.2f tok/s, ", 1e9 * s.decode_steps / std::max<uint64_t>(s.decode_ns, 1));
        speed = buf;
    }
    snprintf(buf, sizeof(buf),
        "%s: %s%.1f%% of experts in cache, %.2f MiB read per token, waited %.2f ms per token (%s), "
        "cache %.0f MiB, peak memory %.0f MiB",
        model->name.c_str(), speed.c_str(), 100.0 * p.hits / std::max<uint64_t>(p.requests, 1),
        p.bytes_read / tokens / 1048576.0, p.wait_ns / tokens / 1e6,
        generated ? "generation" : "prompt", s.cache_bytes / 1048576.0, s.peak_rss_bytes / 1048576.0);
    return buf + ggml_les_spec_summary(model);
}

void forget_live(ggml_les_model * model) {
    std::lock_guard<std::mutex> lock(state().mutex);
    auto & live = state().live;
    live.erase(std::remove(live.begin(), live.end(), model), live.end());
}

// each model that streams has a file of its own: FILE, FILE.2, FILE.3, ...
std::string unused_path(const std::string & path, const char * option, const std::vector<ggml_les_model *> & live) {
    std::string candidate = path;
    for (int n = 2; !path.empty(); n++) {
        const auto same = [&](const ggml_les_model * model) { return model->files.at(option) == candidate; };
        if (std::none_of(live.begin(), live.end(), same)) {
            break;
        }
        candidate = path + "." + std::to_string(n);
    }
    return candidate;
}

void retain(ggml_les_model * model) {
    model->n_refs.fetch_add(1);
}

bool check_spec(const char * width, char * err, size_t err_len) {
    les_spec_params params = {};
    params.struct_size = sizeof(params);
    params.width = width;
    les_spec * spec = nullptr;
    const bool right = les_spec_open(&params, &spec, err, err_len) == LES_OK;
    les_spec_free(spec);
    return right;
}

} // namespace

std::string ggml_les_model::last_error() const {
    char buf[1024] = "";
    les_model_last_error(handle, buf, sizeof(buf));
    return buf;
}

void ggml_les_fail(const std::string & why) {
    any_failed.store(true);
    GGML_LOG_ERROR("les: %s\n", why.c_str());
}

// options

bool ggml_les_set_option(const char * name, const char * value, char * err, size_t err_len) {
    const auto same = [&](const char * other) { return strcmp(name, other) == 0; };
    if (std::none_of(std::begin(option_names), std::end(option_names), same)) {
        copy_text(err, err_len, std::string("there is no option called ") + name);
        return false;
    }
    les_options options;
    options.values[name] = value;
    const les_params params = options.params();
    if (les_params_check(&params, err, err_len) != LES_OK || (same("spec") && !check_spec(value, err, err_len))) {
        return false;
    }
    std::lock_guard<std::mutex> lock(state().mutex);
    state().options.values[name] = value;
    return true;
}

// loading

bool ggml_les_load_begin(const char * fname, const char ** splits, size_t n_splits, bool no_alloc,
                         bool * streams, char * err, size_t err_len) {
    loading  = true;
    load_dry = no_alloc;
    load_cache_bytes = 0;
    load_why_not.clear();
    *streams = false;

    les_options options;
    {
        std::lock_guard<std::mutex> lock(state().mutex);
        options = state().options.with_environment();
        // the budget is for the model that came first
        if (!state().live.empty()) {
            options.values["cache"].clear();
        }
        for (const char * file : { "stats", "trace", "profile", "inputs" }) {
            options.values[file] = unused_path(options.values[file], file, state().live);
        }
        if (!no_alloc) {
            state().message.clear();
        }
    }
    const std::string mode = options.values["mode"];
    if (mode == "off") {
        load_why_not = std::string("use --les auto or on, or ") + TAKE_STOCK;
        return true;
    }
    if (*fname == 0) {
        load_why_not = "a model that is not loaded by its path cannot stream";
        copy_text(err, err_len, load_why_not);
        return mode != "on";
    }

    les_model * handle = nullptr;
    const int status = n_splits == 0
        ? les_model_open(fname, &handle, err, err_len)
        : les_model_open_shards(splits, n_splits, &handle, err, err_len);
    if (status != LES_OK) {
        const bool needed = mode == "on";
        load_why_not = err;
        if (!needed) {
            GGML_LOG_WARN("les: %s\n", err);
        } else if (!no_alloc) {
            std::lock_guard<std::mutex> lock(state().mutex);
            state().message = err;
        }
        return !needed;
    }

    ggml_les_model * model = new ggml_les_model();
    model->handle     = handle;
    model->name       = base_name(fname);
    model->files      = options.values;

    const les_params params = options.params();
    char     text[1024] = "";
    int32_t  decision = 0;
    uint64_t budget   = 0;
    const bool decided = les_model_decide(handle, &params, &decision, &budget, text, sizeof(text)) == LES_OK;
    if (!no_alloc) {
        std::lock_guard<std::mutex> lock(state().mutex);
        state().message = text;
    }
    if (!decided || !decision) {
        ggml_les_model_release(model);
        copy_text(err, err_len, text);
        return decided;
    }

    *streams = true;
    load_model       = model;
    load_cache_bytes = budget;
    if (!no_alloc) {
        GGML_LOG_INFO("les: %s\n", text);
        std::lock_guard<std::mutex> lock(state().mutex);
        state().live.push_back(model);
    }
    return true;
}

void ggml_les_load_done(void) {
    if (!load_model || load_dry) {
        return;
    }
    if (load_model->tensors.empty()) {
        forget_live(load_model);
        std::lock_guard<std::mutex> lock(state().mutex);
        state().message = "no expert is left to the CPU, so that none streams; --cpu-moe leaves them there";
        GGML_LOG_WARN("les: %s\n", state().message.c_str());
        return;
    }
    les_model_forget_cached(load_model->handle);
}

void ggml_les_load_end(void) {
    ggml_les_model_release(load_model);
    load_model = nullptr;
    loading    = false;
}

bool ggml_les_loading(void) {
    return loading;
}

int ggml_les_load_find(const char * name) {
    uint32_t number = 0;
    if (!load_model || les_model_find(load_model->handle, name, &number) != LES_OK) {
        return -1;
    }
    return (int) number;
}

bool ggml_les_packed_name(const char * name) {
    return les_is_packed_name(name) == LES_OK;
}

struct ggml_context * ggml_les_load_packed(char * err, size_t err_len) {
    if (!load_model) {
        const std::string why = loading ? load_why_not : TAKE_STOCK;
        refuse(err, err_len, "the experts are packed for streaming: " + why);
        return nullptr;
    }
    struct les_model_info model = {};
    model.struct_size = sizeof(model);
    les_model_info(load_model->handle, &model);
    ggml_context * ctx = ggml_init({ model.n_tensors*ggml_tensor_overhead(), nullptr, true });
    for (uint32_t i = 0; i < model.n_tensors; ++i) {
        const les_tensor_info info = tensor_info(i);
        if (!info.packed) {
            continue;
        }
        const ggml_type type = (ggml_type) info.ggml_type;
        const bool known = info.ggml_type < GGML_TYPE_COUNT && ggml_blck_size(type) > 0 &&
            info.n_columns % ggml_blck_size(type) == 0 && ggml_row_size(type, info.n_columns)*info.n_rows == info.expert_bytes;
        if (!known) {
            refuse(err, err_len, std::string(info.name) + " is of a type that llama.cpp does not know; update it");
            ggml_free(ctx);
            return nullptr;
        }
        ggml_set_name(ggml_new_tensor_3d(ctx, type, info.n_columns, info.n_rows, info.n_expert), info.name);
    }
    return ctx;
}

void ggml_les_load_place(const struct ggml_tensor * packed, uint16_t * file, size_t * offset) {
    const les_tensor_info info = tensor_info(ggml_les_load_find(packed->name));
    *file   = (uint16_t) info.file;
    *offset = info.offset;
}

bool ggml_les_load_bind(struct ggml_tensor * tensor, int file, size_t offset, bool * streams, char * err, size_t err_len) {
    *streams = load_model && tensor->buffer && tensor->buffer->buft == ggml_les_load_buffer_type();
    const int number = ggml_les_load_find(tensor->name);
    const les_tensor_info info = tensor_info(number);
    if (!*streams) {
        return !info.packed || refuse(err, err_len, std::string(tensor->name) + " is packed for streaming, and experts "
            "stream only where they are left to the CPU; use --cpu-moe, or " + TAKE_STOCK);
    }
    const bool same = number >= 0 &&
        info.file == (uint32_t) file && info.offset == offset && info.expert_bytes == tensor->nb[2] &&
        info.n_expert == tensor->ne[2] && info.ggml_type == (uint32_t) tensor->type;
    if (!same) {
        return refuse(err, err_len, std::string(tensor->name) + " is not where the index says; load with --les off");
    }
    ggml_les_tensor & streamed = load_model->tensors[tensor->data];
    streamed.number = number;
    std::vector<uint32_t> types(info.n_expert);
    les_model_types(load_model->handle, number, types.data(), info.n_expert);
    if (std::any_of(types.begin(), types.end(), [&](uint32_t type) { return type != info.ggml_type; })) {
        streamed.types = types;
    }
    return true;
}

ggml_backend_buffer_type_t ggml_les_load_buffer_type(void) {
    return load_model && state().buft ? state().buft() : nullptr;
}

void ggml_les_load_buffer(ggml_backend_buffer_t buffer) {
#ifdef __linux__
    ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(buffer);
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    // the plain CPU buffer has no device; memory that another device can read (CUDA_Host, Vulkan_Host) is that device's
    const bool cpu = dev ? ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU : ggml_backend_buft_is_host(buft);
    if (!load_model || load_dry || !cpu || buft == ggml_les_load_buffer_type()) {
        return;
    }
    void * addr = ggml_backend_buffer_get_base(buffer);
    if (!addr) {
        return; // of size 0
    }
    const uintptr_t page  = sysconf(_SC_PAGESIZE);
    const uintptr_t base  = (uintptr_t) addr;
    const uintptr_t first = (base + page - 1)/page*page;
    const uintptr_t last  = (base + ggml_backend_buffer_get_size(buffer))/page*page;
    if (first < last) {
        (void) madvise((void *) first, last - first, MADV_HUGEPAGE); // a system without large pages does without
    }
#else
    GGML_UNUSED(buffer);
#endif
}

size_t ggml_les_cache_bytes(void) {
    return load_cache_bytes;
}

void ggml_les_set_buffer_type(ggml_backend_buffer_type_t (*get)(void)) {
    state().buft = get;
}

struct ggml_les_model * ggml_les_model_of_load(void) {
    if (load_model) {
        retain(load_model);
    }
    return load_model;
}

ggml_les_model * ggml_les_target(std::string * width) {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (state().live.empty()) {
        return nullptr;
    }
    *width = state().options.get("spec");
    retain(state().live[0]);
    return state().live[0];
}

void ggml_les_model_release(struct ggml_les_model * model) {
    if (!model || model->n_refs.fetch_sub(1) != 1) {
        return;
    }
    forget_live(model);
    const auto told = [model](int status) {
        if (status != LES_OK && status != LES_ERR_NOT_FOUND) {
            GGML_LOG_ERROR("les: %s\n", model->last_error().c_str());
        }
    };
    const std::string & stats = model->files["stats"];
    if (!stats.empty()) {
        told(les_model_stats_write(model->handle, stats.c_str()));
    }
    told(les_model_profile_save(model->handle));
    told(les_model_trace_close(model->handle));
    told(les_model_inputs_close(model->handle));
    les_model_free(model->handle);
    delete model;
}

bool ggml_les_read(struct ggml_les_model * model, const struct ggml_tensor * tensor, void * data, size_t offset, size_t size,
                   char * err, size_t err_len) {
    const ggml_tensor * whole = tensor->view_src ? tensor->view_src : tensor;
    const auto found = model->tensors.find(whole->data);
    if (found == model->tensors.end()) {
        copy_text(err, err_len, std::string(tensor->name) + " streams and cannot be copied; use --les off");
        return false;
    }
    if (les_model_read(model->handle, found->second.number, tensor->view_offs + offset, data, size) != LES_OK) {
        copy_text(err, err_len, model->last_error());
        return false;
    }
    return true;
}

// reports

void ggml_les_take_message(char * buf, size_t len) {
    std::lock_guard<std::mutex> lock(state().mutex);
    copy_text(buf, len, state().message);
    state().message.clear();
}

bool ggml_les_active(void) {
    std::lock_guard<std::mutex> lock(state().mutex);
    return !state().live.empty();
}

bool ggml_les_failed(void) {
    return any_failed.load();
}

bool ggml_les_summary(int i, char * buf, size_t len) {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (i < 0 || (size_t) i >= state().live.size()) {
        return false;
    }
    copy_text(buf, len, summary(state().live[i]));
    return true;
}

bool ggml_les_stats(int i, struct les_stats * stats) {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (i < 0 || (size_t) i >= state().live.size()) {
        return false;
    }
    *stats = {};
    stats->struct_size = sizeof(*stats);
    les_model_stats(state().live[i]->handle, stats); // before the first operation there is nothing to count
    return true;
}
