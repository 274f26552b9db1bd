#include "ggml-les.h"

// Computing: the operations whose experts stream, and the layers that they make up.

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include "ggml-les-model.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

namespace {

// a shadow's mark: its extra is a ggml_les_layer
constexpr int32_t flag_layer = 1 << 30;

struct layer_memory {
    ggml_les_layer       layer = {};
    les_op               op = {};
    std::vector<uint8_t> bytes;
};

thread_local layer_memory layer_of_thread; // of the one that opened it

// this thread's wave, and its positions
thread_local uint32_t wave_number = 0;
thread_local uint32_t wave_first  = 0;
thread_local uint32_t wave_last   = 0;

les_op op_of(const ggml_tensor * dst, uint32_t tensor, int n_threads) {
    const ggml_tensor * src1 = dst->src[1];
    const ggml_tensor * ids  = dst->src[2];

    // rows that do not follow each other at one distance are not checked
    const bool rows = src1->type == GGML_TYPE_F32 && src1->nb[0] == sizeof(float) &&
        (src1->ne[1] == 1 || src1->ne[2] == 1 || src1->nb[2] == src1->nb[1]*src1->ne[1]);

    les_op op = {};
    op.struct_size  = sizeof(op);
    op.ids          = (const int32_t *) ids->data;
    op.ids_stride   = ids->nb[1];
    op.n_used       = ids->ne[0];
    op.n_tokens     = ids->ne[1];
    op.input        = rows ? (const float *) src1->data : nullptr;
    op.input_stride = src1->ne[1] == 1 ? src1->nb[2] : src1->nb[1];
    op.n_input      = src1->ne[0];
    op.n_rows       = src1->ne[1]*src1->ne[2];
    op.tensor       = tensor;
    op.n_walkers    = n_threads;
    return op;
}

void notice_once(ggml_les_model * model) {
    if (!model->told.test_and_set()) {
        char text[1024] = "";
        les_model_notice(model->handle, text, sizeof(text));
        if (*text) {
            GGML_LOG_WARN("les: %s\n", text);
        }
    }
}

} // namespace

struct ggml_les_layer * ggml_les_layer_open(struct ggml_tensor * const ops[GGML_LES_LAYER_OPS], int n_threads) {
    const ggml_tensor * x = ops[0]->src[1];
    if (ops[0]->src[2]->nb[0] != sizeof(int32_t) || x->type != GGML_TYPE_F32 || !ggml_is_contiguous(x)) {
        return nullptr;
    }

    // the layer's tensors in the model's order
    ggml_les_model * model = nullptr;
    std::vector<uint32_t> tensors;
    for (int i = 0; i < GGML_LES_LAYER_OPS; ++i) {
        if (!ops[i] || ops[i]->op != GGML_OP_MUL_MAT_ID) {
            continue;
        }
        model = ((const ggml_les_buffer *) ops[i]->src[0]->buffer->context)->model;
        const auto tensor = model->tensors.find(ops[i]->src[0]->data);
        if (tensor == model->tensors.end()) {
            return nullptr;
        }
        tensors.push_back(tensor->second.number);
    }
    std::sort(tensors.begin(), tensors.end());

    const les_op op = op_of(ops[0], tensors[0], n_threads);
    les_layer * handle = nullptr;
    if (les_layer_open(model->handle, &op, tensors.data() + 1, (uint32_t) tensors.size() - 1, &handle) != LES_OK) {
        return nullptr; // what is wrong will be met again, and told, by the first of the operations
    }
    notice_once(model);

    layer_memory & memory = layer_of_thread;
    ggml_les_layer & layer = memory.layer;
    size_t size = ggml_nbytes(x);
    for (int i = 0; i < 2; ++i) {
        size += ops[i] ? GGML_PAD(ggml_nbytes(ops[i]), 64) : 0;
    }
    if (memory.bytes.size() < size + 64) {
        memory.bytes.resize(size + 64);
    }
    uint8_t * at = (uint8_t *) GGML_PAD((uintptr_t) memory.bytes.data(), 64);
    const auto take = [&at](ggml_tensor & shadow) {
        shadow.data = at;
        at += GGML_PAD(ggml_nbytes(&shadow), 64);
    };

    layer.handle = handle;
    for (int i = 0; i < GGML_LES_LAYER_OPS; ++i) {
        layer.ops[i] = ops[i] ? *ops[i] : ggml_tensor {};
        layer.ops[i].extra  = &layer;
        layer.ops[i].flags |= flag_layer;
        if (ops[i] && i < 2) {
            take(layer.ops[i]);
        }
    }
    layer.input = *x;
    take(layer.input);
    memcpy(layer.input.data, x->data, ggml_nbytes(x));
    memory.op = op;
    memory.op.input = op.input ? (const float *) layer.input.data : nullptr;
    layer.ops[0].src[1] = &layer.input;
    layer.ops[1].src[1] = &layer.input;
    for (int i = 0; i < 2; ++i) {
        const ggml_tensor * src = ops[2]->src[i];
        if (!src) {
            continue;
        }
        ggml_tensor & whole = layer.ops[(src->view_src ? src->view_src : src) == ops[0] ? 0 : 1];
        layer.views[i] = *src;
        layer.views[i].data = (char *) whole.data + (src->view_src ? src->view_offs : 0);
        layer.ops[2].src[i] = &layer.views[i];
    }
    layer.ops[3].src[1] = &layer.ops[2];
    return &layer;
}

// by the thread that opened the layer
static void attend(const ggml_les_layer * layer, uint32_t wave, bool computing) {
    if (layer == &layer_of_thread.layer && wave < 2) {
        les_layer_attend((les_layer *) layer->handle, wave, computing, &layer_of_thread.op); // nothing depends on it
    }
}

int ggml_les_layer_wave(struct ggml_les_layer * layer, int wave) {
    les_layer * handle = (les_layer *) layer->handle;
    ggml_les_model * model = ((const ggml_les_buffer *) layer->ops[0].src[0]->buffer->context)->model;
    attend(layer, wave, false);
    uint32_t first = 0;
    uint32_t last  = 0;
    const int status = les_layer_wave(handle, wave, &first, &last);
    if (status == LES_END) {
        return 0;
    }
    if (status == LES_ERR_NULL || status == LES_ERR_HANDLE || status == LES_ERR_INVALID || status == LES_ERR_PANIC) {
        // this thread's error alone: the others would wait for it for ever
        GGML_ABORT("les: %s", model->last_error().c_str());
    }
    if (status != LES_OK) {
        if (model->failed.exchange(layer->handle) != layer->handle) {
            ggml_les_fail(model->last_error());
        }
        return -1;
    }
    wave_number = wave;
    wave_first  = first;
    wave_last   = last;
    return (int) (last - first);
}

bool ggml_les_op_open(struct ggml_tensor * dst, int n_threads) {
    if (dst->flags & flag_layer) {
        return true; // with its layer
    }
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * ids  = dst->src[2];
    ggml_les_model * model = ((const ggml_les_buffer *) src0->buffer->context)->model;

    dst->extra = nullptr;
    const auto tensor = model->tensors.find(src0->data);
    if (tensor == model->tensors.end()) {
        ggml_les_fail(std::string(src0->name) + " is a part of a tensor that streams, and cannot be used alone; use --les off");
        return false;
    }

    if (ids->nb[0] != sizeof(int32_t)) {
        ggml_les_fail(std::string("the picks for ") + src0->name + " do not follow each other");
        return false;
    }

    const les_op op = op_of(dst, tensor->second.number, n_threads);
    les_ticket * ticket = nullptr;
    if (les_ticket_open(model->handle, &op, &ticket) != LES_OK) {
        ggml_les_fail(model->last_error());
    }
    if (ticket) {
        notice_once(model);
    }
    dst->extra = ticket;
    return ticket != nullptr;
}

void ggml_les_walk_begin(struct ggml_les_walk * walk, const struct ggml_tensor * dst) {
    walk->dst        = *dst;
    walk->src0       = *dst->src[0];
    walk->dst.src[0] = &walk->src0;
    walk->layer      = dst->flags & flag_layer ? (ggml_les_layer *) dst->extra : nullptr;
    walk->ticket     = walk->layer ? nullptr : dst->extra;
    walk->position   = walk->layer ? wave_first : 0;
    walk->failed     = !walk->layer && !walk->ticket;
    if (walk->failed) {
        return;
    }
    const ggml_les_model * model = ((const ggml_les_buffer *) walk->src0.buffer->context)->model;
    const ggml_les_tensor & tensor = model->tensors.at(walk->src0.data);
    walk->tensor = tensor.number;
    walk->types  = tensor.types.empty() ? nullptr : tensor.types.data();
    if (walk->layer && dst == &walk->layer->ops[0]) {
        attend(walk->layer, wave_number, true);
    }
}

int ggml_les_walk_next(struct ggml_les_walk * walk) {
    uint32_t     expert = 0;
    const void * data   = nullptr;
    if (walk->layer) {
        if (walk->position >= wave_last) {
            return -1;
        }
        les_layer * layer = (les_layer *) walk->layer->handle;
        walk->failed = les_layer_expert(layer, walk->position++, walk->tensor, &expert, &data) != LES_OK;
    } else {
        if (!walk->ticket) {
            return -1;
        }
        const int status = les_ticket_next((les_ticket *) walk->ticket, walk->position++, &expert, &data);
        if (status != LES_OK) {
            walk->failed = status != LES_END;
            ggml_les_model * model = ((const ggml_les_buffer *) walk->src0.buffer->context)->model;
            if (walk->failed && model->failed.exchange(walk->ticket) != walk->ticket) {
                ggml_les_fail(model->last_error());
            }
            walk->ticket = nullptr; // this thread has left
            return -1;
        }
    }
    if (walk->failed) {
        return -1;
    }
    walk->src0.data = (char *) const_cast<void *>(data) - expert*walk->src0.nb[2];
    if (walk->types) {
        walk->src0.type  = (ggml_type) walk->types[expert];
        walk->src0.nb[0] = ggml_type_size(walk->src0.type);
        walk->src0.nb[1] = ggml_row_size(walk->src0.type, walk->src0.ne[0]);
    }
    return (int) expert;
}

bool ggml_les_walk_end(struct ggml_les_walk * walk) {
    if (!walk->layer) {
        // a walk that used every expert has not been told of its end yet
        ggml_les_walk_next(walk);
    }
    return !walk->failed;
}
