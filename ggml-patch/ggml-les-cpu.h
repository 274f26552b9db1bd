#pragma once

// What the CPU backend needs of ggml-les: a buffer type for tensors that stream.

#include "ggml-backend-impl.h"
#include "ggml-les.h"

#ifdef __cplusplus
extern "C" {
#endif

ggml_backend_buffer_type_t ggml_backend_cpu_les_buffer_type(void);

static inline bool ggml_les_streams(const struct ggml_tensor * src0) {
    return src0->buffer && src0->buffer->buft == ggml_backend_cpu_les_buffer_type();
}

#ifdef __cplusplus
}
#endif
