#pragma once

// Computes a layer's experts as they arrive: all operations on those that are in memory, then on those that have been read
// meanwhile. Included by ggml-cpu.c alone, whose functions it calls.

#include "ggml-les-cpu.h"

// the next node from i on that computes something, or the graph's end
static int ggml_les_next_node(const struct ggml_cgraph * cgraph, int i) {
    while (i < cgraph->n_nodes && ggml_op_is_empty(cgraph->nodes[i]->op)) {
        ++i;
    }
    return i;
}

static const struct ggml_tensor * ggml_les_root(const struct ggml_tensor * t) {
    return t && t->view_src ? t->view_src : t;
}

// node i if it multiplies with experts that stream, for the same tokens as `first` (or any, if that is NULL)
static struct ggml_tensor * ggml_les_experts_node(const struct ggml_cgraph * cgraph, int i, const struct ggml_tensor * first) {
    struct ggml_tensor * node = i < cgraph->n_nodes ? cgraph->nodes[i] : NULL;
    if (!node || node->op != GGML_OP_MUL_MAT_ID || ggml_is_empty(node) || !ggml_les_streams(node->src[0]) || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) {
        return NULL;
    }
    return first && node->src[2] != first->src[2] ? NULL : node;
}

// whether nobody but the layer, which uses it n_uses times, sees what node i computes
static bool ggml_les_inner_node(const struct ggml_cgraph * cgraph, int i, int n_uses) {
    return ggml_node_get_use_count(cgraph, i) == n_uses && !(cgraph->nodes[i]->flags & GGML_TENSOR_FLAG_OUTPUT);
}

// whether the nodes from first on are those of a layer: one or two multiplications (gate and up, in one tensor or two), their
// activation, and another one (down). Returns the number of the last, or -1
static int ggml_les_match_layer(const struct ggml_cgraph * cgraph, int first, struct ggml_tensor * ops[GGML_LES_LAYER_OPS]) {
    ops[0] = ggml_les_experts_node(cgraph, first, NULL);
    if (!ops[0] || ops[0]->src[2]->ne[1] > GGML_LES_LAYER_TOKENS) {
        return -1;
    }
    int j  = ggml_les_next_node(cgraph, first + 1);
    ops[1] = ggml_les_experts_node(cgraph, j, ops[0]);
    if (ops[1]) {
        if (!ggml_les_inner_node(cgraph, j, 1) || ops[1]->src[1] != ops[0]->src[1]) {
            return -1;
        }
        j = ggml_les_next_node(cgraph, j + 1);
    }
    if (j >= cgraph->n_nodes || cgraph->nodes[j]->op != GGML_OP_GLU || !ggml_les_inner_node(cgraph, j, 1)) {
        return -1;
    }
    ops[2] = cgraph->nodes[j];
    // a tensor of both gate and up may be used as two views
    if (!ggml_les_inner_node(cgraph, first, !ops[1] && ops[2]->src[1] ? 2 : 1)) {
        return -1;
    }
    const struct ggml_tensor * a = ggml_les_root(ops[2]->src[0]);
    const struct ggml_tensor * b = ops[2]->src[1] ? ggml_les_root(ops[2]->src[1]) : a;
    const struct ggml_tensor * second = ops[1] ? ops[1] : ops[0];
    if (!(a == ops[0] && b == second) && !(a == second && b == ops[0])) {
        return -1;
    }
    j = ggml_les_next_node(cgraph, j + 1);
    ops[3] = ggml_les_experts_node(cgraph, j, ops[0]);
    if (!ops[3] || ops[3]->src[1] != ops[2]) {
        return -1;
    }
    // nor may anybody else see it by way of a view
    for (int i = first + 1; i < j; ++i) {
        const struct ggml_tensor * whole = cgraph->nodes[i]->view_src;
        if (whole && (whole == ops[0] || whole == ops[1] || whole == ops[2]) && !ggml_les_inner_node(cgraph, i, 1)) {
            return -1;
        }
    }
    return j;
}

// computes the layer that begins with node node_n, if one does and it can be had as a whole. Every thread. Returns how many
// nodes after this one are computed, 0 if none
static int ggml_les_compute_layer(const struct ggml_cgraph * cgraph, int node_n, struct ggml_compute_params * params) {
    struct ggml_tensor * ops[GGML_LES_LAYER_OPS];
    const int last = ggml_les_match_layer(cgraph, node_n, ops);
    if (last < 0) {
        return 0;
    }
    if (params->ith == 0) {
        ops[3]->extra = ggml_les_layer_open(ops, params->nth);
    }
    ggml_barrier(params->threadpool);
    struct ggml_les_layer * layer = ops[3]->extra;
    if (!layer) {
        return 0;
    }
    for (int wave = 0; ; ++wave) {
        const int n = ggml_les_layer_wave(layer, wave);
        if (n < 0) {
            params->threadpool->ec = GGML_STATUS_FAILED;
        }
        if (n <= 0) {
            return last - node_n;
        }
        for (int i = 0; i < GGML_LES_LAYER_OPS; ++i) {
            if (layer->ops[i].op != GGML_OP_NONE) {
                ggml_compute_forward(params, &layer->ops[i]);
                ggml_barrier(params->threadpool);
            }
        }
    }
}
