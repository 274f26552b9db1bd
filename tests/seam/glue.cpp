// The seam's own functions: glue MODEL.gguf PACKED.gguf, a model with experts, and the same packed.
#include "ggml-les.h"

#include <cstdio>

static int failures = 0;

#define CHECK(c) ((c) ? (void) 0 : (void) (failures++, printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #c)))

int main(int argc, char ** argv) {
    if (argc != 3) {
        return 2;
    }
    char err[256] = "";
    CHECK(!ggml_les_set_option("cach", "min", err, sizeof(err)));
    CHECK(std::string(err).find("cach") != std::string::npos);
    CHECK(!ggml_les_set_option("cache", "lots", err, sizeof(err)));
    CHECK(std::string(err).find("lots") != std::string::npos);
    CHECK(ggml_les_set_option("cache", "min", err, sizeof(err)));
    CHECK(ggml_les_set_option("mode", "on", err, sizeof(err)));

    // a load that cannot begin has ended
    std::string why;
    try {
        ggml_les_load load("/nowhere/model.gguf", {}, false);
    } catch (const std::runtime_error & e) {
        why = e.what();
    }
    CHECK(why.find("/nowhere/model.gguf") != std::string::npos);
    CHECK(!ggml_les_loading() && !ggml_les_active() && ggml_les_cache_bytes() == 0);
    {
        ggml_les_load load(argv[1], {}, false);
        CHECK(load.streams && ggml_les_loading() && ggml_les_active() && ggml_les_cache_bytes() > 0);
        CHECK(ggml_les_load_find("blk.1.ffn_up_exps.weight") >= 0 && ggml_les_load_find("output.weight") < 0);
        // has no buffer, so that it cannot be one of those that stream
        const ggml_init_params params = { 1 << 16, nullptr, true };
        ggml_context * ctx = ggml_init(params);
        CHECK(!ggml_les_load::bind(ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 1), 0, 0));
        ggml_free(ctx);
    }
    CHECK(!ggml_les_loading() && !ggml_les_active());
    {
        // what is packed has nowhere to be loaded from
        ggml_les_load load(argv[2], {}, false);
        ggml_context * ctx = ggml_les_load_packed(err, sizeof(err));
        CHECK(load.streams && ctx);
        why.clear();
        try {
            ggml_les_load::bind(ggml_get_tensor(ctx, "blk.1.ffn_up_exps.weight"), 0, 0);
        } catch (const std::runtime_error & e) {
            why = e.what();
        }
        CHECK(why.find("blk.1.ffn_up_exps.weight") != std::string::npos && why.find("--cpu-moe") != std::string::npos);
        char told[256] = "";
        ggml_les_take_message(told, sizeof(told));
        CHECK(why == std::string("les: ") + told);
        ggml_free(ctx);
    }
    CHECK(!ggml_les_load_packed(err, sizeof(err)) && std::string(err).find("les unpack") != std::string::npos);
    CHECK(!ggml_les_failed());
    return failures ? 1 : 0;
}
