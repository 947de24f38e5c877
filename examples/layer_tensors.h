/*
  layer_tensors.h: the tensors of one MoE layer of a checkpoint, on the host, as a moe_route_layer_desc asks for them.

      layer_tensors tensors;
      if (layer_open(&tensors, &checkpoint, layer, num_experts) && ... moe_route_preset() ... && layer_load(&tensors, &desc)) ...
      layer_close(&tensors);

  What can't be used is refused with a message in checkpoint.error that names the tensor, its type and its shape.
*/
#ifndef LAYER_TENSORS_H
#define LAYER_TENSORS_H

#include "layer_formats.h"

/* DBRX stores w2 [E, I, H] beside w1 and v1 [E, I, H]. */
static int layer_down_is_transposed(const layer_tensors *l) { return l->transposed || strcmp(l->down, "mlp.w2") == 0; }

/* Ids by token. Those that can't be become -1. */
static int layer_load_table(layer_tensors *l, const moe_route_layer_desc *desc) {
    const checkpoint_tensor *table = l->table;
    void *raw;
    size_t i, count;
    int done;
    if (table->rank != 2 || !layer_is(table, "I32 I64") || table->shape[0] != desc->router.id_table_rows ||
        table->shape[1] != desc->router.top_k)
        return layer_refuse(l, table, "a table of I32 or I64 [vocabulary, top_k] is expected");
    count = (size_t)layer_count(table);
    raw = malloc(table->size ? (size_t)table->size : 1);
    done = raw != NULL || LAYER_FAIL(l, "out of memory");
    done = done && layer_alloc(l, &l->id_table, count, sizeof(int32_t));
    done = done && checkpoint_read(l->from, table, raw, 0, (size_t)table->size);
    for (i = 0; done && i < count; i++) {
        const int64_t id = strcmp(table->type, "I32") == 0 ? ((const int32_t *)raw)[i] : ((const int64_t *)raw)[i];
        ((int32_t *)l->id_table.data)[i] = id >= 0 && id < desc->router.num_experts ? (int32_t)id : -1;
    }
    free(raw);
    return done;
}

static int layer_load_router(layer_tensors *l, const moe_route_layer_desc *desc) {
    static const char *const biases[] = {"e_score_correction_bias", "expert_bias",      "router_bias",
                                         "balancing_biases",        "exp_probs_b.bias", "exp_probs_b"};
    static const char *const expert_scales[] = {"per_expert_scale", "ffn_down_exps.scale"};
    static const char *const router_scales[] = {"router.scale", "ffn_gate_inp.scale"};
    const checkpoint_tensor *bias = layer_find_ending(l, biases, sizeof biases / sizeof biases[0]), *logit_bias;
    const checkpoint_tensor *expert_scale = layer_find_ending(l, expert_scales, 2),
                            *router_scale = layer_find_ending(l, router_scales, 2);
    char name[LAYER_MAX_NAME];
    snprintf(name, sizeof name, "%.*sbias", (int)(strlen(l->router->name) - strlen("weight")), l->router->name);
    logit_bias = checkpoint_find(l->from, name);
    if ((desc->needs & MOE_ROUTE_NEED_SELECTION_BIAS) && !bias) { /* DeepSeek's own files */
        bias = logit_bias;
        logit_bias = NULL;
    }
    if ((desc->needs & MOE_ROUTE_NEED_EXPERT_SCALE) && !router_scale)
        return LAYER_FAIL(l, "%.200s: there is no router.scale, which the router's input is multiplied by", l->module);
    if (!layer_vector(l, l->router, (uint64_t)l->num_logits * l->hidden_size, &l->router_weight)) return 0;
    if (logit_bias && logit_bias != bias && !layer_vector(l, logit_bias, l->num_logits, &l->logit_bias)) return 0;
    if ((desc->needs & MOE_ROUTE_NEED_SELECTION_BIAS) && bias &&
        !layer_vector(l, bias, desc->router.num_experts, &l->selection_bias))
        return 0;
    if ((desc->needs & MOE_ROUTE_NEED_EXPERT_SCALE) && expert_scale &&
        !layer_vector(l, expert_scale, desc->router.num_experts, &l->expert_scale))
        return 0;
    if ((desc->needs & MOE_ROUTE_NEED_EXPERT_SCALE) && router_scale &&
        !layer_vector(l, router_scale, l->hidden_size, &l->router_scale))
        return 0;
    return !(desc->needs & MOE_ROUTE_NEED_ID_TABLE) || !l->table || layer_load_table(l, desc);
}

/* Loads everything; `desc` is the preset's. */
FILES_FUNCTION int layer_load(layer_tensors *l, const moe_route_layer_desc *desc) {
    const uint32_t rows = l->intermediate_size;
    const char *first = l->gate ? l->gate : l->up;
    if (!l->gate != (desc->experts.gate_up_order == MOE_ROUTE_GATE_UP_NO_GATE)) {
        return LAYER_FAIL(l, "%.200s: the model's experts have %s gate, the checkpoint's have %s", l->experts,
                          l->gate ? "no" : "a", l->gate ? "one" : "none");
    }
    if (l->from->is_gguf && !(desc->needs & MOE_ROUTE_NEED_EXPERT_SCALE) && layer_parameter(l, l->down, 0, "scale")) {
        return LAYER_FAIL(l, "%.200s%s has scales of its own, which aren't supported", l->experts, l->down);
    }
    if (!layer_load_router(l, desc)) return 0;
    if (!layer_load_matrix(l, first, l->gate && !l->up ? 2 * rows : rows, l->hidden_size, l->transposed, &l->gate_up)) return 0;
    if (l->gate && l->up && !layer_load_matrix(l, l->up, rows, l->hidden_size, l->transposed, &l->up_matrix)) return 0;
    if (l->gate && l->up && memcmp(&l->gate_up.weights, &l->up_matrix.weights, sizeof l->gate_up.weights) != 0) {
        return LAYER_FAIL(l, "gate and up are stored in different formats: %.150s; %.150s", l->gate_up.text, l->up_matrix.text);
    }
    return layer_load_matrix(l, l->down, l->hidden_size, rows, layer_down_is_transposed(l), &l->down_matrix);
}

static void layer_matrix_close(layer_matrix *m) {
    layer_free(&m->data);
    layer_free(&m->scales);
    layer_free(&m->zero_points);
    layer_free(&m->global_scales);
    layer_free(&m->bias);
}

/* Also what a failure left. */
FILES_FUNCTION void layer_close(layer_tensors *l) {
    layer_matrix_close(&l->gate_up);
    layer_matrix_close(&l->up_matrix);
    layer_matrix_close(&l->down_matrix);
    layer_free(&l->router_weight);
    layer_free(&l->logit_bias);
    layer_free(&l->selection_bias);
    layer_free(&l->expert_scale);
    layer_free(&l->router_scale);
    layer_free(&l->id_table);
}

#endif /* LAYER_TENSORS_H */
