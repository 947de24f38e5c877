#!/usr/bin/env python3
"""Drives the routers of the installed Hugging Face transformers and writes what they choose, for tests/test_presets.c.

    python tests/tools/transformers_routers.py OUTPUT [--rows 16] [--seed 1]

Writes OUTPUT.safetensors and OUTPUT.json in the form of tests/data/routers.safetensors and goldens.json: logits, ids
and weights of each case; biases; and its configuration, under the keys that the model's config.json has.

Each case makes the model's own MoE block from a small configuration, with a router that is as wide as its input, so that an
identity as its weight gives exactly the wanted logits. In the place of its experts the block gets a recorder of the ids and
weights that they would have received. The recorder returns ones: what the block makes of them is the factor that it applies
to the sum of its experts, and the weights are multiplied by that.

Needs torch, numpy, safetensors and transformers. Says at the end which types of transformers have experts but no case.
"""
import argparse
import importlib
import json
import types
import warnings

import numpy as np
import torch
from safetensors.numpy import save_file

warnings.filterwarnings("ignore")
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# The keys of config.json that describe a router.
KEYS = """num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts
moe_top_k n_group num_expert_group topk_group topk_method n_shared_experts zero_expert_num norm_topk_prob moe_renormalize routed_scaling_factor
route_scale router_scaling_factor moe_router_scaling_factor moe_routed_scaling_factor moe_router_logit_softcapping router_jitter_noise
moe_norm_min scoring_func expert_selection_fn swiglu_limit""".split()

# Those that a moe_route_model may leave out: its 0 stands for the default of the configuration's class.
OPTIONAL = "norm_topk_prob moe_renormalize router_jitter_noise moe_norm_min scoring_func expert_selection_fn swiglu_limit".split()

CASES = []


def case(model_type, block, experts=64, top_k=6, config=None, extra=0, make=None, drive=None, name=None, bias=0.3, bias_mean=0.0, accept=None, **settings):
    """experts, top_k and settings are set on the configuration; extra: rows of the router beside the experts'; bias: its deviation;
    accept: says of a row of logits whether to keep it."""
    CASES.append(types.SimpleNamespace(model_type=model_type, block=block, experts=experts, top_k=top_k, config=config, extra=extra,
                                       make=make, drive=drive, name=name or model_type, bias=bias, bias_mean=bias_mean,
                                       accept=accept, settings=settings))


# ---- ways to reach a router other than as block.gate or block.router, with block.experts beside it ----


def from_router_alone(router, hidden, _):
    """The router gives (anything, weights, ids)."""
    out = router(hidden)
    return out[2], out[1]


def from_sparse_scores(block, hidden, c):
    """Llama-4: scores of all experts, 0 where they aren't chosen."""
    scores = block.router(hidden)[0]
    weights, ids = scores.topk(c.top_k, dim=-1)
    return ids, weights


def from_sorted_pairs(block, hidden, c):
    """JetMoE: the pairs sorted by expert."""
    _, tokens, weights, sizes, _ = block.router(hidden)
    experts = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    rows = [torch.where(tokens == t)[0] for t in range(hidden.shape[0])]
    return torch.stack([experts[r] for r in rows]), torch.stack([weights[r] for r in rows])


def from_one_hot(block, hidden, _):
    """Switch Transformers, with room for every token."""
    chosen, weights, _ = block.router(hidden[None])
    return chosen[0].argmax(-1, keepdim=True), weights[0]


def from_gates(block, hidden, c):
    """NLLB-MoE, with room for every token."""
    gates = block.router(hidden)[1]
    weights, ids = gates.topk(c.top_k, dim=-1)
    return ids, weights


def from_vision_router(router, hidden, _):
    out = router(hidden, router.bias_of_the_block)
    return out[2], out[1]


def gemma(cls):
    def make(config):
        router = cls(config)
        router.norm = torch.nn.Identity()
        router.scalar_root_size = 1.0
        with torch.no_grad():
            router.per_expert_scale.uniform_(0.5, 1.5)
        return router

    return make


def zaya(cls):
    def make(config):
        block = cls(config, 0)
        block.gate.down_proj = torch.nn.Identity()
        block.gate.router_mlp = torch.nn.Identity()
        return block

    return make


def vision_layer(c, width):
    """The configuration of one layer of Dots3-Note's vision tower, whose layers differ."""
    return types.SimpleNamespace(num_local_experts=c.experts, num_experts_per_tok=c.top_k, hidden_size=width, _experts_implementation="eager", **c.settings)


def dots_vision(cls):
    def make(config):
        router = cls(config)
        router.bias_of_the_block = torch.randn(config.num_local_experts) * 0.1
        return router

    return make


def hash_gate(cls):
    def make(config):
        config.mlp_layer_types = ["hash_moe"] * len(config.mlp_layer_types)
        block = cls(config, 0)
        table = np.stack([np.random.permutation(config.n_routed_experts)[: config.num_experts_per_tok] for _ in range(config.vocab_size)])
        block.gate.tid2eid = torch.from_numpy(table)
        return block

    return make


def talker(cls):
    def make(config):
        config.shared_expert_intermediate_size = 8
        return cls(config)

    return make


def first_layer(cls):
    return lambda config: cls(config, 0)


def score_layer(cls):
    def make(config):
        config.mlp_layer_types = ["moe"] * len(config.mlp_layer_types)
        return cls(config, 0)

    return make


def zeros_fill_up(row, bias, c):
    """For two groups of which one stays: its experts of positive score, and all of the dropped ones, which count 0, are top_k."""
    order = (1 / (1 + np.exp(-row.astype(np.float64))) + bias).reshape(2, -1)
    kept = order[np.argmax(np.sort(order, axis=1)[:, -2:].sum(axis=1))]
    return (kept > 1e-3).sum() + kept.size == c.top_k and np.abs(kept).min() > 1e-3


# ---- the cases: the type, its block, sizes and settings that differ from the class's ----

case("afmoe", "AfmoeSparseMoeBlock", 128, 8, route_scale=2.448)
case("aria_text", "AriaTextMoELayer", 64, 6)
case("axk1", "AXK1MoE", 96, 8)
case("axk2", "AXK2MoE", 64, 8)
case("axk2", "AXK2MoE", 64, 8, name="axk2_grouped", n_group=8, topk_group=3)
case("axk2", "AXK2MoE", 16, 12, name="axk2_zeros", n_group=2, topk_group=1, bias_mean=-0.5, accept=zeros_fill_up)
case("bailing_hybrid", "BailingHybridMoE", 128, 8)
case("bailing_hybrid", "BailingHybridMoE", 64, 8, name="bailing_hybrid_unnormalised", moe_renormalize=False)
case("beam", "BeamMoE", 128, 8)
case("cohere2_moe", "Cohere2MoeSparseMoeBlock", 32, 4)
case("cohere2_moe", "Cohere2MoeSparseMoeBlock", 32, 4, name="cohere2_moe_sigmoid", expert_selection_fn="sigmoid")
case("cohere2_moe", "Cohere2MoeSparseMoeBlock", 32, 4, name="cohere2_moe_sigmoid_unnormalised", expert_selection_fn="sigmoid", norm_topk_prob=False)
case("dbrx", "DbrxFFN", 16, 4)
case("deepseek_ocr2_text", "DeepseekOcr2TextMoe", 64, 6)
case("deepseek_v2", "DeepseekV2Moe", 64, 6)
case("deepseek_v2", "DeepseekV2Moe", 160, 6, name="deepseek_v2_grouped", topk_method="group_limited_greedy", n_group=8, topk_group=3, routed_scaling_factor=16.0)
case("deepseek_v3", "DeepseekV3MoE", 256, 8)
case("deepseek_v3", "DeepseekV3MoE", 96, 8, name="deepseek_v3_one_group", n_group=1, topk_group=1, routed_scaling_factor=2.827)
case("deepseek_v3", "DeepseekV3MoE", 64, 8, name="deepseek_v3_unnormalised", norm_topk_prob=False)
case("deepseek_v32", "DeepseekV32MoE", 128, 8)
case("deepseek_v4", "DeepseekV4SparseMoeBlock", 96, 6, make=score_layer)
case("deepseek_v4", "DeepseekV4SparseMoeBlock", 96, 6, make=score_layer, name="deepseek_v4_sigmoid", scoring_func="sigmoid")
case("deepseek_v4", "DeepseekV4SparseMoeBlock", 96, 6, make=hash_gate, name="deepseek_v4_hash", vocab_size=40)
case("diffusion_gemma_text", "DiffusionGemmaTextRouter", 64, 8, make=gemma, drive=from_router_alone)
case("dots1", "Dots1MoE", 64, 6, n_shared_experts=1)
case("dots1", "Dots1MoE", 64, 6, name="dots1_normalised", n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=2.5)
case("dots1", "Dots1MoE", 64, 6, name="dots1_grouped", n_shared_experts=1, n_group=8, topk_group=2, routed_scaling_factor=2.5)
case("dots3_note_text", "Dots3NoteTextMoE", 64, 8)
case("dots3_note_vision_encoder", "Dots3NoteVisionTopKRouter", 64, 2, config=vision_layer, make=dots_vision, drive=from_vision_router, router_scaling_factor=1.5)
case("ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", 64, 6, bias=0.02)
case("ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", 64, 6, bias=0.02, name="ernie4_5_moe_large_minimum", moe_norm_min=0.25)
case("ernie4_5_vl_moe_text", "Ernie4_5_VLMoeSparseMoeBlock", 64, 6, bias=0.02, make=lambda cls: lambda config: cls(config, 8))
case("exaone_moe", "ExaoneMoeSparseMoEBlock", 64, 8)
case("flex_olmo", "FlexOlmoSparseMoeBlock", 7, 5)
case("flint", "FlintSparseMoeBlock", 64, 6)
case("flint", "FlintSparseMoeBlock", 64, 6, name="flint_unnormalised", norm_topk_prob=False)
case("gemma4_text", "Gemma4TextRouter", 128, 8, make=gemma, drive=from_router_alone)
case("glm4_moe", "Glm4MoeMoE", 96, 8, routed_scaling_factor=2.5)
case("glm4_moe_lite", "Glm4MoeLiteMoE", 64, 4)
case("glm4v_moe_text", "Glm4vMoeTextMoE", 64, 8)
case("glm5_next_text", "Glm5NextTextMoE", 72, 8)
case("glm_moe_dsa", "GlmMoeDsaMoE", 64, 8)
case("gpt_oss", "GptOssMLP", 32, 4)
case("granitemoe", "GraniteMoeMoE", 40, 8)
case("granitemoe_swa", "GraniteMoeSWAMoE", 32, 8)
case("granitemoehybrid", "GraniteMoeHybridMoE", 62, 6)
case("granitemoeshared", "GraniteMoeSharedMoE", 32, 8)
case("hunyuan_v1_moe", "HunYuanMoEV1Moe", 64, 8)
case("hy_v3", "HYV3MoE", 96, 8)
case("hy_v4", "HYV4MoE", 64, 8)
case("hy_v4_vl_text", "HYV4VLMoE", 64, 8)
case("inkling2_loop_text", "Inkling2LoopSparseMoeBlock", 64, 8)
case("inkling2_text", "Inkling2SparseMoeBlock", 96, 8)
case("inkling2_text", "Inkling2SparseMoeBlock", 64, 8, name="inkling2_text_sqrtsoftplus", scoring_func="sqrtsoftplus")
case("inkling_text", "InklingMoE", 128, 6, extra=2)
case("jamba", "JambaSparseMoeBlock", 16, 2)
case("jetmoe", "JetMoeMoE", 8, 2, drive=from_sorted_pairs)
case("kimi_linear", "KimiLinearMoE", 128, 8)
case("kolibri1", "Kolibri1SparseMoeBlock", 64, 6)
case("kolibri1", "Kolibri1SparseMoeBlock", 64, 6, name="kolibri1_normalised", norm_topk_prob=True)
case("laguna", "LagunaSparseMoeBlock", 64, 8, moe_routed_scaling_factor=2.5)
case("laguna", "LagunaSparseMoeBlock", 64, 8, name="laguna_capped", moe_routed_scaling_factor=1.5, moe_router_logit_softcapping=4.0)
case("lara_mini", "LaraMiniSparseMoeBlock", 64, 4)
case("lfm2_moe", "Lfm2MoeSparseMoeBlock", 32, 4)
case("lfm2_moe", "Lfm2MoeSparseMoeBlock", 32, 4, name="lfm2_moe_unnormalised", norm_topk_prob=False, routed_scaling_factor=1.5)
case("llama4_text", "Llama4TextMoe", 16, 1, drive=from_sparse_scores)
case("llama4_text", "Llama4TextMoe", 128, 2, drive=from_sparse_scores, name="llama4_text_two")
case("longcat_flash", "LongcatFlashMoE", 64, 12, bias=0.02, extra=32, zero_expert_num=32)
case("mellum", "MellumSparseMoeBlock", 64, 8)
case("mimo_v2_flash", "MiMoV2FlashMoE", 64, 8)
case("minimax", "MiniMaxSparseMoeBlock", 32, 2)
case("minimax_m2", "MiniMaxM2SparseMoeBlock", 96, 8)
case("minimax_m3_vl_text", "MiniMaxM3VLSparseMoeBlock", 64, 4)
case("mistral4", "Mistral4MoE", 64, 4)
case("mistral4", "Mistral4MoE", 64, 4, name="mistral4_grouped", n_group=8, topk_group=3, routed_scaling_factor=1.5)
case("mistral4", "Mistral4MoE", 64, 4, name="mistral4_unnormalised", n_group=4, topk_group=2, norm_topk_prob=False)
case("mistral_large4_text", "MistralLarge4TextMoE", 64, 4, n_group=4, topk_group=2)
case("mixtral", "MixtralSparseMoeBlock", 8, 2)
case("muse_spark_text", "MuseSparkMoE", 64, 8, routed_scaling_factor=1.25)
case("nemotron_h", "NemotronHMoE", 64, 22, routed_scaling_factor=5.0)
case("nllb-moe", "NllbMoeSparseMLP", 32, 2, make=lambda cls: lambda config: cls(config, 8), drive=from_gates, moe_eval_capacity_token_fraction=4.0)
case("olmoe", "OlmoeSparseMoeBlock", 64, 8)
case("openai_privacy_filter", "OpenAIPrivacyFilterMLP", 64, 4)
case("phimoe", "PhimoeSparseMoeBlock", 16, 2)
case("qwen2_moe", "Qwen2MoeSparseMoeBlock", 60, 4)
case("qwen2_moe", "Qwen2MoeSparseMoeBlock", 60, 4, name="qwen2_moe_normalised", norm_topk_prob=True)
case("qwen3_5_moe_text", "Qwen3_5MoeSparseMoeBlock", 64, 8)
case("qwen3_moe", "Qwen3MoeSparseMoeBlock", 128, 8, norm_topk_prob=True)
case("qwen3_moe", "Qwen3MoeSparseMoeBlock", 64, 8, name="qwen3_moe_unnormalised", norm_topk_prob=False)
case("qwen3_next", "Qwen3NextSparseMoeBlock", 128, 10)
case("qwen3_omni_moe_talker_text", "Qwen3OmniMoeTalkerTextSparseMoeBlock", 64, 6, make=talker)
case("qwen3_omni_moe_text", "Qwen3OmniMoeThinkerTextSparseMoeBlock", 64, 8)
case("qwen3_vl_moe_text", "Qwen3VLMoeTextSparseMoeBlock", 60, 4)
case("qwen4_exp_text", "Qwen4ExpTextSparseMoeBlock", 64, 10)
case("sarvam_mla", "deepseek_v3.DeepseekV3MoE", 64, 8)
case("sarvam_moe", "glm4_moe.Glm4MoeMoE", 64, 6)
case("solar_open", "SolarOpenMoE", 64, 8)
case("step3p5", "Step3p7SparseMoeBlock", 72, 8, make=first_layer, moe_router_scaling_factor=3.0)
case("switch_transformers", "SwitchTransformersSparseMLP", 8, 1, drive=from_one_hot, expert_capacity=1 << 20)
case("unlimited_ocr_text", "UnlimitedOcrTextMoe", 64, 6)
case("zaya", "ZayaSparseMoeBlock", 16, 1, bias=0.02, extra=1, make=zaya)
case("zaya", "ZayaSparseMoeBlock", 16, 3, bias=0.02, extra=1, make=zaya, name="zaya_three")


# ---- driving ----


class Recorder(torch.nn.Module):
    def forward(self, hidden, ids=None, weights=None, **named):
        self.ids = ids if ids is not None else named.get("router_indices")
        self.weights = weights if weights is not None else named.get("routing_weights")
        return torch.ones_like(hidden)


class Silence(torch.nn.Module):
    def forward(self, hidden, **_):
        return torch.zeros_like(hidden)


def set_first(config, names, value):
    for name in names:
        if hasattr(config, name):
            setattr(config, name, value)
            return
    raise SystemExit(f"{type(config).__name__} has none of {names}")


def make_config(c, width, intermediate):
    if c.config:
        return (c.config(c, width),) * 2
    config = CONFIG_MAPPING[c.model_type]()
    inner = getattr(config, "ffn_config", None) if c.model_type == "dbrx" else config
    set_first(inner, ["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"], c.experts)
    if c.model_type not in ("switch_transformers", "nllb-moe"):  # which always choose 1 and 2
        set_first(inner, ["num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k"], c.top_k)
    for name in ("hidden_size", "d_model"):
        if hasattr(inner, name):
            setattr(inner, name, width)
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size", "d_ff", "expert_ffn_hidden_size", "moe_hidden_size"):
        if hasattr(inner, name) and not isinstance(getattr(inner, name), (list, tuple)):
            setattr(inner, name, intermediate)
    for name, value in c.settings.items():
        if not hasattr(inner, name):
            raise SystemExit(f"{type(inner).__name__} has no {name}")
        setattr(inner, name, value)
    return config, inner


def find_class(c):
    module_name, class_name = c.block.rsplit(".", 1) if "." in c.block else (CONFIG_MAPPING[c.model_type].__module__.split(".")[-2], c.block)
    return getattr(importlib.import_module(f"transformers.models.{module_name}.modeling_{module_name}"), class_name)


def find_router(block):
    return getattr(block, "gate", None) or getattr(block, "router", None) or block


def set_identity(router, width):
    """Makes the router's linear layer hand its input on."""
    done = 0
    with torch.no_grad():
        for name, parameter in router.named_parameters():
            if tuple(parameter.shape) == (width, width):
                parameter.copy_(torch.eye(width))
                done += 1
    return done


def biases(router, block, c, width):
    """Random values for every bias that a router or its block holds; returned by what they do."""
    found = {}
    for owner in (router, block):
        for name, value in list(owner.named_parameters()) + list(owner.named_buffers()):
            if value.numel() in (c.experts, width) and (
                name.endswith(("e_score_correction_bias", "expert_bias", "balancing_biases")) and "experts." not in name
            ):
                with torch.no_grad():
                    value.copy_((torch.randn(value.shape) * c.bias + c.bias_mean).to(value.dtype))
                found["bias"] = value
    if hasattr(router, "bias_of_the_block"):
        found["bias"] = router.bias_of_the_block
    if isinstance(getattr(router, "bias", None), torch.nn.Parameter):
        with torch.no_grad():
            router.bias.copy_(torch.randn(router.bias.shape) * 0.5)
        found["logit_bias"] = router.bias
    if hasattr(router, "per_expert_scale"):
        found["per_expert_scale"] = router.per_expert_scale
    if hasattr(router, "tid2eid"):
        found["id_table"] = router.tid2eid
    return {k: v.detach().reshape(-1, v.shape[-1])[0].numpy() if v.dim() == 2 and k != "id_table" else v.detach().numpy() for k, v in found.items()}


def make_logits(rng, rows, width, accept=None):
    """Five eighths normal, then large, nearly flat and close to each other; no two in a row are equal."""
    out = rng.standard_normal((rows, width)).astype(np.float32)
    for t in range(rows):
        if accept:
            while not accept(out[t]):
                out[t] = rng.standard_normal(width)
            continue
        kind = t % 8
        if kind == 5:
            out[t] *= 12.0
        elif kind == 6:
            out[t] *= 0.01
        elif kind == 7:
            out[t] = np.float32(-3.0) + out[t] * np.float32(0.25)
    for t in range(rows):
        while len(np.unique(out[t])) != width:
            out[t] += (rng.standard_normal(width) * 1e-3).astype(np.float32)
    return out


def describe(c, config):
    """What config.json says of the router and the experts; and which of what may be left out is as if it were."""
    described = vars(config) if c.config else config.to_dict()
    entry = {k: described[k] for k in KEYS if k in described}
    usual = {} if c.config or c.model_type == "dbrx" else CONFIG_MAPPING[c.model_type]().to_dict()
    entry["defaults"] = " ".join(k for k in OPTIONAL if k in entry and entry[k] == usual.get(k))
    if c.model_type in ("switch_transformers", "nllb-moe"):
        entry["num_experts_per_tok"] = c.top_k
    return entry


def run(c, rng, rows):
    width = c.experts + c.extra
    config, inner = make_config(c, width, 8)
    cls = find_class(c)
    block = c.make(cls)(config) if c.make else cls(config)
    block = block.eval().float()
    router = block if c.drive in (from_router_alone, from_vision_router) else find_router(block)
    tensors = biases(router, block, c, width)
    if hasattr(router, "global_scale"):
        with torch.no_grad():
            router.global_scale.fill_(0.75)
    passes = set_identity(router, width)
    if not passes and c.model_type != "zaya":
        raise SystemExit(f"{c.name}: the router has no square weight")
    logits = make_logits(rng, rows, width, c.accept and (lambda row: c.accept(row, tensors["bias"], c)))
    hidden = torch.from_numpy(logits.copy())
    factor = 1.0
    shared = None
    with torch.no_grad():
        if c.drive:
            ids, weights = c.drive(block, hidden, c)
        else:
            block.experts = Recorder()
            for name in ("shared_experts", "shared_expert", "shared_mlp"):
                if isinstance(getattr(block, name, None), torch.nn.Module):
                    setattr(block, name, Silence())
            for name in ("pre_expert_proj", "pre_expert_norm", "post_expert_proj", "post_mlp_layernorm"):
                if hasattr(block, name):
                    setattr(block, name, torch.nn.Identity())
            seen = []
            router.register_forward_hook(lambda _m, _i, out: seen.append(out))
            arguments = (hidden[None],)
            if "id_table" in tensors:
                token_ids = rng.integers(0, tensors["id_table"].shape[0], rows)
                tensors["token_ids"] = token_ids.astype(np.int32)
                arguments += (torch.from_numpy(token_ids)[None],)
            if c.block.startswith("Ernie4_5_VL"):
                arguments = (hidden,)
            out = block(*arguments)
            out = out[0] if isinstance(out, tuple) else out
            factor = float(out.float().mean())
            if not torch.all(out == out.reshape(-1)[0]):
                raise SystemExit(f"{c.name}: the block doesn't hand on what its experts return")
            ids, weights = block.experts.ids, block.experts.weights
            if c.model_type == "inkling_text":
                shared = seen[0][3]
            if c.model_type == "muse_spark_text":
                logits = seen[0][0].numpy().copy()
            if c.model_type == "zaya":
                ids = torch.where((ids == 0) & (weights == 0), torch.full_like(ids, c.experts), ids)
    weights = weights.reshape(rows, -1).float().numpy() * np.float32(factor)
    ids = ids.reshape(rows, -1).numpy().astype(np.int32)
    assert ids.shape == weights.shape == (rows, c.top_k), (c.name, ids.shape, weights.shape)
    order = np.argsort(ids, axis=1, kind="stable")
    result = {"logits": logits, "ids": np.take_along_axis(ids, order, 1), "weights": np.take_along_axis(weights, order, 1)}
    if shared is not None:
        result["shared_weights"] = shared.reshape(rows, -1).float().numpy()
    result.update({k: v.astype(np.int32 if k in ("id_table", "token_ids") else np.float32) for k, v in tensors.items()})
    entry = {"model_type": c.model_type, "router": type(router).__name__, "width": width, "top_k": c.top_k}
    entry.update(describe(c, inner))
    if hasattr(router, "global_scale"):
        entry["global_scale"] = router.global_scale.item()
    if factor != 1.0:
        entry["factor_of_the_block"] = factor
    if "id_table" in tensors:
        entry["hash_layer"] = 1
        entry["vocab_size"] = int(tensors["id_table"].shape[0])
    return result, entry


# ---- the experts: small ones, with random weights, ids and router weights ----

# Whose experts a moe_route_experts can't say: soft-capped, followed by a norm, or ReLU without gate.
OTHER_EXPERTS = ("inkling2_text", "inkling2_loop_text", "muse_spark_text", "nllb-moe", "switch_transformers")
HIDDEN, INTERMEDIATE = 12, 8


def expert_module(c, block, config):
    """The module that gets (x, ids, weights)."""
    if c.drive in (from_router_alone, from_vision_router):
        module = importlib.import_module(type(block).__module__)
        return getattr(module, {"Gemma4TextRouter": "Gemma4TextExperts", "DiffusionGemmaTextRouter": "DiffusionGemmaTextExperts",
                                "Dots3NoteVisionTopKRouter": "Dots3NoteExperts"}[type(block).__name__])(config)
    return block.experts


def expert_matrices(c, block, experts, count):
    """gate_up [E, N, H], down [E, H, I] and their biases, wherever the model keeps them."""
    if c.model_type == "jetmoe":
        return {"gate_up": block.input_linear.weight, "down": block.output_linear.weight}
    if c.model_type == "dbrx":
        split = [getattr(experts.mlp, name).view(count, INTERMEDIATE, HIDDEN) for name in ("w1", "v1", "w2")]
        return {"gate_up": torch.cat(split[:2], 1), "down": split[2].transpose(1, 2)}
    found = {"gate_up": experts.gate_up_proj if hasattr(experts, "gate_up_proj") else experts.up_proj, "down": experts.down_proj}
    if found["down"].shape[1:] == (INTERMEDIATE, HIDDEN):
        found = {name: value.transpose(1, 2) for name, value in found.items()}
    for name in ("gate_up", "down"):
        if hasattr(experts, name + "_proj_bias"):
            found[name + "_bias"] = getattr(experts, name + "_proj_bias")
        found[name] = found[name][:count]
    return found


def run_experts(c, tokens):
    identity = 2 if c.model_type == "longcat_flash" else 0
    settings = {k: v for k, v in c.settings.items() if k not in ("n_group", "topk_group", "topk_method", "zero_expert_num")}
    small = types.SimpleNamespace(**{**vars(c), "experts": 3, "top_k": 1 if c.model_type == "llama4_text" else 2, "settings": settings})
    config, inner = make_config(small, HIDDEN, INTERMEDIATE)
    for name in ("n_group", "topk_group"):
        if getattr(inner, name, None) is not None:
            setattr(inner, name, 1)
    if identity:
        inner.zero_expert_num = identity
    if c.model_type == "step3p5":
        inner.swiglu_limits = [7.0] * 64
    if c.config:
        inner.moe_intermediate_size, inner.hidden_act = INTERMEDIATE, "silu"
    cls = find_class(c)
    block = (c.make if c.model_type != "ernie4_5_vl_moe_text" else lambda cls: lambda config: cls(config, INTERMEDIATE))(cls)(config) if c.make else cls(config)
    block = block.eval().float()
    experts = expert_module(c, block, config).eval().float() if c.model_type != "jetmoe" else None
    x = torch.randn(tokens, HIDDEN)
    with torch.no_grad():
        for owner in (block, experts):
            for parameter in owner.parameters() if owner is not None else ():
                parameter.normal_(std=1.5)  # large enough for clamps to matter
        if c.model_type in ("jetmoe", "llama4_text"):  # experts that only the whole block can run
            ids, weights = c.drive(block, x, small)
            if c.model_type == "llama4_text":
                block.shared_expert = Silence()
            out = block(x[None])
            y = (out[0] if isinstance(out, tuple) else out).reshape(tokens, HIDDEN) - (block.bias if c.model_type == "jetmoe" else 0)
        else:
            ids = torch.stack([torch.randperm(small.experts + identity)[: small.top_k] for _ in range(tokens)])
            weights = torch.rand(tokens, small.top_k) + 0.1
            y = experts(x, ids, weights).reshape(tokens, HIDDEN)
        result = {"x": x, "y": y, "ids": ids, "expert_weights": weights}
        result.update(expert_matrices(c, block, experts, small.experts))
    entry = {"model_type": c.model_type}
    entry.update(describe(small, inner))
    entry.update({"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE})
    if c.model_type == "step3p5":
        entry["swiglu_limit"] = 7.0
    return {k: v.detach().numpy().astype(np.int32 if k == "ids" else np.float32) for k, v in result.items()}, entry


# ---- everything ----


def text_type(config):
    """The type of the language model inside a composite configuration."""
    for name in ("text_config", "thinker_config"):
        inner = getattr(config, name, None)
        if isinstance(inner, transformers.PretrainedConfig):
            return text_type(inner) or inner.model_type
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    driven = {c.model_type for c in CASES}
    outer, missing = {}, []
    for model_type in sorted(CONFIG_MAPPING.keys()):
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception:  # one that can't be made without arguments; its parts have types of their own
            continue
        inner = text_type(config)
        if inner in driven and model_type not in driven:
            outer.setdefault(inner, []).append(model_type)
        elif model_type not in driven and any(k in config.to_dict() for k in KEYS[:4]):
            missing.append(model_type)
    tensors, routers, experts = {}, {}, {}
    for index, c in enumerate(CASES):
        torch.manual_seed(args.seed * 1000 + index)
        np.random.seed(args.seed * 1000 + index)
        result, entry = run(c, np.random.default_rng(args.seed * 1000 + index), args.rows)
        entry["outer_types"] = " ".join(outer.get(c.model_type, []))
        routers[c.name] = entry
        tensors.update({f"{c.name}.{k}": np.ascontiguousarray(v) for k, v in result.items()})
        if c.name == c.model_type and c.model_type not in OTHER_EXPERTS:
            result, experts[c.name] = run_experts(c, 6)
            tensors.update({f"{c.name}.experts.{k}": np.ascontiguousarray(v) for k, v in result.items()})
    save_file(tensors, args.output + ".safetensors")
    with open(args.output + ".json", "w") as out:
        json.dump({"source": "Hugging Face transformers, float32, CPU", "transformers": transformers.__version__, "torch": torch.__version__, "rows": args.rows,
                   "seed": args.seed, "routers": routers, "experts": experts}, out, indent=1)
        out.write("\n")
    print(f"experts of {len(experts)} types, {len(routers)} routers of {len(driven)} types and {sum(map(len, outer.values()))} outer types")
    print("types with experts and without a case:", " ".join(missing) or "none")


if __name__ == "__main__":
    main()
