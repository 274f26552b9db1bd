#include "ggml-les-cpu.h"

#include "ggml-impl.h"
#include "ggml-cpu.h"
#include "traits.h"

#include <new>
#include <stdexcept>
#include <string>

#ifdef _WIN32
#    define WIN32_LEAN_AND_MEAN
#    ifndef NOMINMAX
#        define NOMINMAX
#    endif
#    include <windows.h>
#else
#    include <sys/mman.h>
#endif

namespace {

// address space without memory: a stray access is noticed at once
void * reserve(size_t size) {
#ifdef _WIN32
    return VirtualAlloc(nullptr, size, MEM_RESERVE, PAGE_NOACCESS);
#else
    void * addr = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return addr == MAP_FAILED ? nullptr : addr;
#endif
}

void release(void * addr, size_t size) {
#ifdef _WIN32
    GGML_UNUSED(size);
    VirtualFree(addr, 0, MEM_RELEASE);
#else
    munmap(addr, size);
#endif
}

void buffer_free(ggml_backend_buffer_t buffer) {
    auto * ctx = (ggml_les_buffer *) buffer->context;
    release(ctx->base, ctx->size);
    ggml_les_model_release(ctx->model);
    delete ctx;
}

void * buffer_get_base(ggml_backend_buffer_t buffer) {
    return ((ggml_les_buffer *) buffer->context)->base;
}

void buffer_set_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, const void *, size_t, size_t) {
    GGML_ABORT("les: %s streams from its file and cannot be written; use --les off", tensor->name);
}

void buffer_get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    char err[1024] = "";
    if (!ggml_les_read(((ggml_les_buffer *) buffer->context)->model, tensor, data, offset, size, err, sizeof(err))) {
        // what writes a copy of the model tells it, and goes on
        throw std::runtime_error(std::string("les: ") + err);
    }
}

void buffer_clear(ggml_backend_buffer_t, uint8_t) {
}

const ggml_backend_buffer_i buffer_interface = {
    /* .free_buffer     = */ buffer_free,
    /* .get_base        = */ buffer_get_base,
    /* .init_tensor     = */ nullptr,
    /* .memset_tensor   = */ nullptr,
    /* .set_tensor      = */ buffer_set_tensor,
    /* .get_tensor      = */ buffer_get_tensor,
    /* .set_tensor_2d   = */ nullptr,
    /* .get_tensor_2d   = */ nullptr,
    /* .cpy_tensor      = */ nullptr,
    /* .clear           = */ buffer_clear,
    /* .reset           = */ nullptr,
};

const char * buft_get_name(ggml_backend_buffer_type_t) {
    return "LES";
}

ggml_backend_buffer_t buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_les_model * model = ggml_les_model_of_load();
    void * base = model ? reserve(size) : nullptr;
    if (!base) {
        GGML_LOG_ERROR("les: cannot reserve %zu bytes of address space\n", size);
        ggml_les_model_release(model);
        return nullptr;
    }
    return ggml_backend_buffer_init(buft, buffer_interface, new ggml_les_buffer { model, base, size }, size);
}

size_t buft_get_alignment(ggml_backend_buffer_type_t) {
    return 64;
}

class les_buffer_type : ggml::cpu::extra_buffer_type {
    bool supports_op(ggml_backend_dev_t, const struct ggml_tensor * op) override {
        if (op->op != GGML_OP_MUL_MAT_ID) {
            return false;
        }
        // while a model is loaded the question is where its tensors shall go; later what went here stays here
        return !ggml_les_loading() || ggml_les_load_find(op->src[0]->name) >= 0;
    }

    ggml::cpu::tensor_traits * get_tensor_traits(const struct ggml_tensor *) override {
        return nullptr; // llama.cpp's own kernels compute
    }
};

// when the CPU backend's library is loaded
const bool registered = (ggml_les_set_buffer_type(ggml_backend_cpu_les_buffer_type), true);

} // namespace

ggml_backend_buffer_type_t ggml_backend_cpu_les_buffer_type(void) {
    static ggml_backend_buffer_type buft = {
        /* .iface   = */ {
            /* .get_name       = */ buft_get_name,
            /* .alloc_buffer   = */ buft_alloc_buffer,
            /* .get_alignment  = */ buft_get_alignment,
            /* .get_max_size   = */ nullptr, // no limit
            /* .get_alloc_size = */ nullptr, // the tensor's size
            /* .is_host        = */ nullptr, // no
        },
        /* .device  = */ ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0),
        /* .context = */ new les_buffer_type(),
    };
    return &buft;
}
