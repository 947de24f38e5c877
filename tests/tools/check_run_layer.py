"""Writes checkpoints with the packages safetensors and gguf, lets examples/run_layer.c run a layer of each, and compares its output
with what numpy makes of the same layer in f64: python check_run_layer.py PROGRAM FOLDER [NAME...]
Prints PASS and FAIL lines. TEST_DEVICE chooses the device, TEST_SEED other numbers. The numbers that stored weights stand for are ml_dtypes' and gguf's, integers are written here; the
routers are those of the models, written down again. Needs the packages gguf, ml_dtypes, numpy and safetensors.
"""
import json
import os
import shutil
import subprocess
import sys

import gguf
import ml_dtypes
import numpy as np
from safetensors import TensorSpec, serialize_file

PROGRAM, FOLDER, ONLY = os.path.abspath(sys.argv[1]), sys.argv[2], sys.argv[3:]
NAMES = {np.dtype(ml_dtypes.bfloat16): "bfloat16", np.dtype(ml_dtypes.float8_e4m3fn): "float8_e4m3fn", np.dtype(ml_dtypes.float8_e8m0fnu): "float8_e8m0fnu"}
BF16 = ml_dtypes.bfloat16
DEVICE = os.environ.get("TEST_DEVICE", "cpu")
E, K, H, I = 8, 3, 160, 96  # experts, top-k, hidden and intermediate size
random = np.random.default_rng(int(os.environ.get("TEST_SEED", 20260801)))
failed = False


def report(name, error=None):
    global failed
    failed |= error is not None
    print(f"PASS run_layer_{name}" if error is None else f"FAIL run_layer_{name}: {' '.join(str(error).split())[:400]}", flush=True)


# ---- files ----


def save(path, tensors):
    arrays = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    serialize_file({name: TensorSpec(dtype=NAMES.get(a.dtype, a.dtype.name), shape=list(np.shape(tensors[name])), data_ptr=a.ctypes.data, data_len=a.nbytes) for name, a in arrays.items()}, path)


def save_folder(path, tensors, config, shards=0):
    """One file, or several with an index. The scales of a matrix may lie in another shard than its codes."""
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(path)
    with open(path + "/config.json", "w") as file:
        json.dump(config, file)
    if not shards:
        save(path + "/model.safetensors", tensors)
        return path
    names = sorted(tensors)
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(files.values())):
        save(f"{path}/{file}", {name: tensors[name] for name in names if files[name] == file})
    files["model.layers.40.mlp.gate.weight"] = "model-90000-of-90000.safetensors"  # of another layer: never opened
    with open(path + "/model.safetensors.index.json", "w") as file:
        json.dump({"metadata": {"total_size": 1}, "weight_map": files}, file)
    return path


def save_gguf(path, architecture, keys, tensors, parts=0):
    """tensors: name -> array, or (blocks, type). parts: tensors a file."""
    for old in os.listdir(FOLDER):
        if old.startswith(os.path.basename(path)[:-5]):
            os.remove(f"{FOLDER}/{old}")
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=parts)
    for key, value in keys.items():
        key = key if "." in key else f"{architecture}.{key}"
        {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)](key, value)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"] * 100)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---- weights: what is stored, and the numbers that it stands for ----


def normal(*shape, scale=None):
    return random.standard_normal(shape) * (1 / np.sqrt(shape[-1]) if scale is None else scale)


def plain(dtype):
    def store(rows, inner):
        w = normal(rows, inner).astype(dtype)
        return {"weight": w}, w.astype(np.float64)

    return store


def expand(scales, rows, inner, by_rows, by_columns):
    return np.repeat(np.repeat(scales.astype(np.float64), by_rows, 0), by_columns, 1)[:rows, :inner]


def fp8_blocks(scale_dtype, name="weight_scale_inv"):
    def store(rows, inner):
        codes = (normal(rows, inner, scale=60)).astype(ml_dtypes.float8_e4m3fn)
        scales = random.uniform(0.5, 1.5, (-(-rows // 128), -(-inner // 128))) / 60 / np.sqrt(inner)
        scales = (2.0 ** np.round(np.log2(scales)) if scale_dtype == ml_dtypes.float8_e8m0fnu else scales).astype(scale_dtype)
        return {"weight": codes, name: scales}, codes.astype(np.float64) * expand(scales, rows, inner, 128, 128)

    return store


def fp8_rows(rows, inner):
    codes = (normal(rows, inner, scale=60)).astype(ml_dtypes.float8_e4m3fn)
    scales = (random.uniform(0.5, 1.5, (rows, 1)) / 60 / np.sqrt(inner)).astype(BF16)
    return {"weight": codes, "weight_scale": scales}, codes.astype(np.float64) * scales.astype(np.float64)


def fp8_tensor(rows, inner):
    codes = (normal(rows, inner, scale=60)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.array(random.uniform(0.5, 1.5) / 60 / np.sqrt(inner), np.float32)
    return {"weight": codes, "weight_scale": scale, "input_scale": np.array(1, np.float32)}, codes.astype(np.float64) * float(scale)


def int8_rows(rows, inner):
    codes = random.integers(-128, 128, (rows, inner), dtype=np.int8)
    scales = (random.uniform(0.5, 1.5, (rows, 1)) / 74 / np.sqrt(inner)).astype(np.float16)
    return {"weight": codes, "weight_scale": scales}, codes.astype(np.float64) * scales.astype(np.float64)


def words(codes, bits):
    """Codes [..., n] as int32 [..., n * bits / 32], the first in the lowest bits."""
    each = 32 // bits
    codes = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, each)
    return np.bitwise_or.reduce(codes << (np.arange(each, dtype=np.uint32) * bits), axis=-1).astype(np.uint32).view(np.int32)


def packed(bits, group, zero_points=False):
    """compressed-tensors' pack-quantized."""

    def store(rows, inner):
        half, groups = 1 << (bits - 1), -(-inner // group)
        codes = random.integers(0, 2 * half, (rows, inner))
        scales = (random.uniform(0.5, 1.5, (rows, groups)) / (0.58 * half) / np.sqrt(inner)).astype(BF16)
        zeros = random.integers(4, 12, (rows, groups)) if zero_points else np.full((rows, groups), half)
        stored = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": np.array([rows, inner], np.int64)}
        if zero_points:
            stored["weight_zero_point"] = words(zeros.T, bits).T
        return stored, (codes - expand(zeros, rows, inner, 1, group)) * expand(scales, rows, inner, 1, group)

    return store


def gptq(rows, inner, less=1):
    group = 32
    codes, groups = random.integers(0, 16, (rows, inner)), inner // group
    scales = (random.uniform(0.5, 1.5, (rows, groups)) / 4.6 / np.sqrt(inner)).astype(np.float16)
    zeros = random.integers(1, 16, (rows, groups))
    stored = {"qweight": words(codes, 4).T, "scales": scales.T, "qzeros": words((zeros - less).T, 4), "g_idx": (np.arange(inner) // group).astype(np.int32)}
    return stored, (codes - expand(zeros, rows, inner, 1, group)) * expand(scales, rows, inner, 1, group)


def e2m1(codes):
    return np.frombuffer(codes.astype(np.uint8).tobytes(), ml_dtypes.float4_e2m1fn).astype(np.float64).reshape(codes.shape)


def nibbles(codes):
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def nvfp4(style):
    def store(rows, inner):
        codes = random.integers(0, 16, (rows, inner))
        scales = random.uniform(1, 200, (rows, inner // 16)).astype(ml_dtypes.float8_e4m3fn)
        factor = np.float32(random.uniform(0.5, 1.5) / 330 / np.sqrt(inner))
        values = e2m1(codes) * expand(scales, rows, inner, 1, 16)
        if style == "modelopt":
            return {"weight": nibbles(codes), "weight_scale": scales, "weight_scale_2": np.array(factor), "input_scale": np.array(1, np.float32)}, values * float(factor)
        inverse = np.float32(1) / factor
        return {"weight_packed": nibbles(codes), "weight_scale": scales, "weight_global_scale": np.array([inverse])}, values * float(np.float32(1) / inverse)

    return store


def mxfp4(rows, inner):
    """DeepSeek-V4's files: int8 bytes, E8M0 scales."""
    codes = random.integers(0, 16, (rows, inner))
    scales = (2.0 ** (random.integers(-3, 2, (rows, inner // 32)) - np.round(np.log2(2.9 * np.sqrt(inner))))).astype(ml_dtypes.float8_e8m0fnu)
    return {"weight": nibbles(codes).view(np.int8), "scale": scales}, e2m1(codes) * expand(scales, rows, inner, 1, 32)


# Where a GGUF block has numbers in f16, and about what they are multiplied by; every other byte may be anything.
HALVES = {"Q4_0": {0: 4.6}, "Q4_1": {0: 9, 2: 2}, "Q5_0": {0: 9.2}, "Q5_1": {0: 18, 2: 2}, "Q8_0": {0: 74}, "Q2_K": {80: 17, 82: 9}, "Q3_K": {108: 43}, "Q4_K": {0: 320, 2: 37},
          "Q5_K": {0: 660, 2: 37}, "Q6_K": {208: 1350}, "IQ4_NL": {0: 69}, "IQ4_XS": {0: 1270}, "MXFP4": {}}


def blocks(name, experts, rows, inner):
    """(array for the writer, values [experts, rows, inner])"""
    if name in ("F32", "F16"):
        w = normal(experts, rows, inner).astype({"F32": np.float32, "F16": np.float16}[name])
        return w, w.astype(np.float64)
    kind = gguf.GGMLQuantizationType[name]
    if name == "BF16":
        w = normal(experts, rows, inner).astype(BF16)
        return (w.view(np.uint8), kind), w.astype(np.float64)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (experts * rows * inner // values, size), dtype=np.uint8)
    for at, factor in HALVES[name].items():
        data[:, at : at + 2] = (random.uniform(0.5, 1.5, len(data)) / factor / np.sqrt(inner)).astype("<f2").view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        data[:, 0] = 127 - int(np.log2(5.8 * np.sqrt(inner))) + random.integers(-1, 2, len(data))
    data = data.reshape(experts, rows, -1)
    return (data, kind), gguf.quants.dequantize(data, kind).astype(np.float64).reshape(experts, rows, inner)


# ---- the layer in f64 ----


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def top(scores, k):
    return np.argsort(-scores, -1, kind="stable")[..., :k]


def softmax_router(k=K, normalised=True):
    def route(logits):
        p = softmax(logits)
        ids = top(p, k)
        w = np.take_along_axis(p, ids, -1)
        return ids, w / w.sum(-1, keepdims=True) if normalised else w

    return route


def selected_softmax_router(logits):
    ids = top(logits, K)
    return ids, softmax(np.take_along_axis(logits, ids, -1))


def sigmoid_router(bias, scale=1.0, groups=1, kept=1):
    def route(logits):
        p = sigmoid(logits)
        order = p + bias
        if groups > 1:
            grouped = order.reshape(len(order), groups, -1)
            best = top(np.sort(grouped, -1)[..., -2:].sum(-1), kept)
            mask = np.zeros(grouped.shape[:2], bool)
            np.put_along_axis(mask, best, True, -1)
            order = np.where(mask[..., None], grouped, -np.inf).reshape(order.shape)
        ids = top(order, K)
        w = np.take_along_axis(p, ids, -1)
        return ids, w / w.sum(-1, keepdims=True) * scale

    return route


def silu(gate, up):
    return gate * sigmoid(gate) * up


def gelu(gate, up):
    return gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


def gpt_oss(gate, up):
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate * sigmoid(1.702 * gate) * (up + 1)


def layer(x, logits, route, gate, up, down, act=silu, biases=(0, 0, 0), on_input=False):
    """gate None: squared ReLU of up. biases: [E, n] each, or 0."""
    ids, weights = route(logits)
    y = np.zeros((len(x), down.shape[1]))
    for t in range(len(x)):
        for e, w in zip(ids[t], weights[t]):
            g, u, d = (b if np.isscalar(b) else b[e] for b in biases)
            seen = x[t] * w if on_input else x[t]
            h = np.maximum(up[e] @ seen + u, 0) ** 2 if gate is None else act(gate[e] @ seen + g, up[e] @ seen + u)
            y[t] += (1 if on_input else w) * (down[e] @ h + d)
    return y


# ---- running the program ----


def run(arguments, expect=0):
    result = subprocess.run([PROGRAM, *arguments, "--device", DEVICE], capture_output=True, text=True, errors="replace", timeout=120)
    if result.returncode != expect:
        raise AssertionError(f"exit status {result.returncode}: {result.stderr or result.stdout}")
    return result.stdout if expect == 0 else result.stderr


def compare(name, path, expected, hidden=H, number=3, says="", options=(), tokens=5):
    """expected: x [T, H] -> y; the program gets x and number, which is the layer's."""
    try:
        for dtype, kind, bound in (("f32", np.float32, 1e-5), ("bf16", BF16, 2e-2), ("f16", np.float16, 4e-3)):
            x = random.standard_normal((tokens, hidden)).astype(kind).astype(np.float32)
            x.tofile(FOLDER + "/x.f32")
            if os.path.exists(FOLDER + "/y.f32"):
                os.remove(FOLDER + "/y.f32")
            out = run([path, "--layer", str(number), "--activations", FOLDER + "/x.f32", "--output", FOLDER + "/y.f32", "--dtype", dtype, *options])
            got = np.fromfile(FOLDER + "/y.f32", np.float32).reshape(tokens, hidden).astype(np.float64)
            want = expected(x.astype(np.float64))
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            assert error < bound, f"{dtype}: the relative error is {error:.3g}\n{out}"
            assert says in out, f"it doesn't say {says}: {out}"
        report(name)
    except (AssertionError, OSError, ValueError, subprocess.SubprocessError) as error:
        report(name, error)


def need(name, part):
    """Files that another part makes, where only some parts run."""
    if not os.path.exists(f"{FOLDER}/{name}"):
        part()


def refused(name, path, *texts, options=("--layer", "3")):
    try:
        message = run([path, *options], expect=1)
        for text in texts:
            assert text in message, f"{text} isn't in: {message}"
        report("refuses_" + name)
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        report("refuses_" + name, error)


# ---- checkpoints of safetensors ----

P = "model.layers.3.mlp."


def expert_tensors(prefix, store, names=("gate_proj", "up_proj", "down_proj"), hidden=H, inner=I):
    """Tensors of single experts, and [E, rows, inner] of each projection."""
    tensors, values = {}, []
    for name, rows, columns in zip(names, [inner] * (len(names) - 1) + [hidden], [hidden] * (len(names) - 1) + [inner]):
        matrices = []
        for e in range(E):
            stored, value = store(rows, columns)
            tensors.update({f"{prefix}{e}.{name}.{parameter}": array for parameter, array in stored.items()})
            matrices.append(value)
        values.append(np.stack(matrices))
    return tensors, values


def router(name, rows=E, hidden=H, dtype=BF16):
    w = normal(rows, hidden, scale=1.5 / np.sqrt(hidden)).astype(dtype)
    return {name: w}, w.astype(np.float64)


QWEN3 = {"model_type": "qwen3_moe", "num_experts": E, "num_experts_per_tok": K, "norm_topk_prob": True, "hidden_size": H, "moe_intermediate_size": I}
DEEPSEEK = {"model_type": "deepseek_v3", "n_routed_experts": E, "num_experts_per_tok": K, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_shared_experts": 1}


def single_experts(name, store, config=QWEN3, says="", shards=0):
    """A Qwen3-MoE layer whose experts are stored one by one."""
    tensors, (gate, up, down) = expert_tensors(P + "experts.", store)
    gates, w = router(P + "gate.weight")
    path = save_folder(f"{FOLDER}/{name}", {**tensors, **gates, "model.layers.3.input_layernorm.weight": np.ones(H, BF16), "model.layers.30.mlp.gate.weight": np.ones((1, 1), BF16)}, config, shards)
    compare(name, path, lambda x: layer(x, x @ w.T, softmax_router(), gate, up, down), says=says)
    return path


def qwen3_moe():
    single_experts("bf16", plain(BF16), says="BF16")
    single_experts("f16", plain(np.float16))
    single_experts("f32_in_shards", plain(np.float32), shards=3)
    single_experts("fp8_rows", fp8_rows, says="FP8")
    single_experts("fp8_one_scale", fp8_tensor, says="FP8")
    single_experts("fp8_blocks_bf16_scales", fp8_blocks(BF16), says="a scale for 128 inputs of 128 rows")
    single_experts("fp8_blocks_e8m0_scales", fp8_blocks(ml_dtypes.float8_e8m0fnu, "scale"))
    single_experts("int8_rows", int8_rows, says="INT8")
    single_experts("int4_zero_points", packed(4, 32, True), says="zero points")
    single_experts("int4_one_scale_a_row", packed(4, 4096))
    single_experts("int8_packed", packed(8, 32), says="INT8")
    single_experts("nvfp4_modelopt", nvfp4("modelopt"), says="NVFP4")
    single_experts("nvfp4_compressed_tensors", nvfp4("compressed-tensors"), says="NVFP4")
    single_experts("mxfp4", mxfp4, says="MXFP4")
    single_experts("gptq", gptq, says="INT4")
    single_experts("gptq_v2", lambda rows, inner: gptq(rows, inner, 0), {**QWEN3, "quantization_config": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}})


def deepseek_v3():
    """FP8 by 128 x 128, biased selection among groups, a shared expert, in shards; and Kimi's INT4."""
    for name, store, says, config in (("fp8_blocks", fp8_blocks(np.float32), "FP8", {**DEEPSEEK, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}),
                                      ("int4_groups_of_32", packed(4, 32), "a scale for 32 inputs", {"model_type": "kimi_k25", "text_config": {**DEEPSEEK, "model_type": "kimi_k2"}})):
        prefix = "language_model." * ("text_config" in config) + P
        tensors, (gate, up, down) = expert_tensors(prefix + "experts.", store)
        gates, w = router(prefix + "gate.weight")
        bias = normal(E, scale=0.3).astype(np.float32)
        tensors.update(gates)
        tensors.update({prefix + "gate.e_score_correction_bias": bias, prefix + "shared_experts.gate_proj.weight": np.ones((I, H), BF16), "model.layers.2.mlp.gate_proj.weight": np.ones((2, 2), BF16)})
        path = save_folder(f"{FOLDER}/{name}", tensors, config, shards=4)
        compare(name, path, lambda x: layer(x, x @ w.T, sigmoid_router(bias.astype(np.float64), 2.5, 4, 2), gate, up, down), says=says)
        compare(name + "_by_its_index", path + "/model.safetensors.index.json", lambda x: layer(x, x @ w.T, sigmoid_router(bias.astype(np.float64), 2.5, 4, 2), gate, up, down))


def fused(name, config, prefix, gate_up_name, down_name, router_name, dtype=BF16, transposed=False, route=None, act=silu, on_input=False, extra=None, hidden=H, inner=I, expected=None):
    gate_up, down = normal(E, 2 * inner, hidden).astype(dtype), normal(E, hidden, inner).astype(dtype)
    gates, w = router(prefix + router_name, hidden=hidden)
    turn = (lambda a: a.transpose(0, 2, 1)) if transposed else (lambda a: a)
    path = save_folder(f"{FOLDER}/{name}", {prefix + gate_up_name: turn(gate_up), prefix + down_name: turn(down), **gates, **(extra or {})}, config)
    g, u, d = gate_up[:, :inner].astype(np.float64), gate_up[:, inner:].astype(np.float64), down.astype(np.float64)
    compare(name, path, expected(w, g, u, d) if expected else lambda x: layer(x, x @ w.T, route or softmax_router(), g, u, d, act, on_input=on_input), hidden=hidden)
    return path


def fused_models():
    text = {"model_type": "qwen3_5_moe_text", "num_experts": E, "num_experts_per_tok": K}
    mtp = {"mtp.layers.3.mlp.experts.gate_up_proj": np.ones((1, 1, 1), BF16)}
    fused("qwen3_5_moe", {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"hidden_size": 1}}, "model.language_model.layers.3.mlp.", "experts.gate_up_proj", "experts.down_proj", "gate.weight", extra=mtp)
    for inner in (I, H // 2, H):  # square matrices show nothing alone
        def llama(logits):
            ids = top(logits, 1)
            return ids, sigmoid(np.take_along_axis(logits, ids, -1))

        fused(f"llama4_inner_{inner}", {"model_type": "llama4", "text_config": {"model_type": "llama4_text", "num_local_experts": E, "num_experts_per_tok": 1}}, "language_model.model.layers.3.feed_forward.",
              "experts.gate_up_proj", "experts.down_proj", "router.weight", transposed=True, on_input=True, inner=inner, route=llama)
        fused(f"granitemoe_inner_{inner}", {"model_type": "granitemoe", "num_local_experts": E, "num_experts_per_tok": K}, "model.layers.3.block_sparse_moe.", "input_linear.weight", "output_linear.weight",
              "router.layer.weight", dtype=np.float16, inner=inner, route=selected_softmax_router, extra={"model.layers.3.shared_mlp.input_linear.weight": np.ones((2, 2), BF16)})
        fused(f"aria_inner_{inner}", {"model_type": "aria", "text_config": {"model_type": "aria_text", "moe_num_experts": E, "moe_topk": K}}, "language_model.model.layers.3.mlp.", "experts.fc1.weight",
              "experts.fc2.weight", "router.weight", transposed=True, inner=inner, route=selected_softmax_router)

    scale, expert_scale = random.uniform(0.5, 2, H).astype(BF16), random.uniform(0.5, 1.5, E).astype(BF16)

    def gemma(w, g, u, d):
        def y(x):
            seen = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale.astype(np.float64) / np.sqrt(H)

            def route(logits):
                ids, weights = softmax_router()(logits)
                return ids, weights * expert_scale.astype(np.float64)[ids]

            return layer(x, seen @ w.T, route, g, u, d, gelu)

        return y

    p = "model.language_model.layers.3."
    fused("gemma4", {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", "num_experts": E, "top_k_experts": K, "rms_norm_eps": 1e-6}}, p, "experts.gate_up_proj", "experts.down_proj",
          "router.proj.weight", extra={p + "router.scale": scale, p + "router.per_expert_scale": expert_scale}, expected=gemma)


def gpt_oss_model():
    p, k32 = "model.layers.3.mlp.", lambda n: n // 32
    stored, values = {}, []
    for name, rows, columns in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        codes = random.integers(0, 16, (E, rows, columns))
        scales = (127 - round(np.log2(2.9 * np.sqrt(columns))) + random.integers(-1, 2, (E, rows, k32(columns)))).astype(np.uint8)
        bias = normal(E, rows, scale=0.3).astype(BF16)
        stored.update({p + f"experts.{name}_blocks": nibbles(codes).reshape(E, rows, k32(columns), 16), p + f"experts.{name}_scales": scales, p + f"experts.{name}_bias": bias})
        values.append((e2m1(codes) * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, -1), bias.astype(np.float64)))
    gates, w = router(p + "router.weight")
    bias = normal(E, scale=0.5).astype(BF16)
    path = save_folder(FOLDER + "/gpt_oss", {**stored, **gates, p + "router.bias": bias}, {"model_type": "gpt_oss", "num_local_experts": E, "num_experts_per_tok": K, "swiglu_limit": 7.0})
    (gate_up, gate_up_bias), (down, down_bias) = values
    y = lambda x: layer(x, x @ w.T + bias.astype(np.float64), selected_softmax_router, gate_up[:, 0::2], gate_up[:, 1::2], down, gpt_oss, (gate_up_bias[:, 0::2], gate_up_bias[:, 1::2], down_bias))
    compare("gpt_oss", path, y, says="MXFP4 192 x 160, bias")
    compare("gpt_oss_from_one_file", path + "/model.safetensors", y)


def other_names():
    """Mixtral's w1, w2, w3; MiniMax-M2's and Step's biases; DBRX's turned matrix; experts without gate; identity experts."""
    p = "model.layers.3.block_sparse_moe."
    tensors, (gate, up, down) = expert_tensors(p + "experts.", plain(BF16), ("w1", "w3", "w2"))
    gates, w = router(p + "gate.weight")
    path = save_folder(FOLDER + "/mixtral", {**tensors, **gates}, {"model_type": "mixtral", "num_local_experts": E, "num_experts_per_tok": K, "router_jitter_noise": 0.0})
    compare("mixtral", path, lambda x: layer(x, x @ w.T, softmax_router(), gate, up, down))
    bias = normal(E, scale=0.3).astype(np.float32)
    path = save_folder(FOLDER + "/minimax_m2", {**tensors, **gates, p + "e_score_correction_bias": bias}, {"model_type": "minimax_m2", "num_local_experts": E, "num_experts_per_tok": K, "scoring_func": "sigmoid"})
    compare("minimax_m2", path, lambda x: layer(x, x @ w.T, sigmoid_router(bias.astype(np.float64)), gate, up, down))

    p = "model.layers.3.moe."
    stored = [normal(E, *shape).astype(BF16) for shape in ((I, H), (I, H), (H, I))]
    gates, v = router(p + "gate.weight", dtype=np.float32)
    path = save_folder(FOLDER + "/step3p5", {**{p + f"{n}_proj.weight": s for n, s in zip(("gate", "up", "down"), stored)}, **gates, p + "router_bias": bias},
                       {"model_type": "step3p5", "moe_num_experts": E, "moe_top_k": K, "moe_router_scaling_factor": 3.0, "swiglu_limits": [0, 0, 0, 0.5]})
    compare("step3p5", path, lambda x: layer(x, x @ v.T, sigmoid_router(bias.astype(np.float64), 3.0), *[s.astype(np.float64) for s in stored],
                                             act=lambda g, u: np.minimum(g * sigmoid(g), 0.5) * np.clip(u, -0.5, 0.5)))

    p = "transformer.blocks.3.ffn."
    w1, v1, w2 = (normal(E * I, H).astype(BF16) for _ in range(3))
    gates, r = router(p + "router.layer.weight")
    path = save_folder(FOLDER + "/dbrx", {p + "experts.mlp.w1": w1, p + "experts.mlp.v1": v1, p + "experts.mlp.w2": w2, **gates},
                       {"model_type": "dbrx", "d_model": H, "ffn_config": {"moe_num_experts": E, "moe_top_k": K, "ffn_hidden_size": I}})
    shaped = [a.astype(np.float64).reshape(E, I, H) for a in (w1, v1, w2)]
    compare("dbrx", path, lambda x: layer(x, x @ r.T, softmax_router(), shaped[0], shaped[1], shaped[2].transpose(0, 2, 1)))

    p = "backbone.layers.3.mixer."
    tensors, (up, down) = expert_tensors(p + "experts.", plain(BF16), ("up_proj", "down_proj"))
    gates, n = router(p + "gate.weight")
    path = save_folder(FOLDER + "/nemotron_h", {**tensors, **gates, p + "gate.e_score_correction_bias": bias}, {**DEEPSEEK, "model_type": "nemotron_h", "n_group": 1, "topk_group": 1})
    compare("nemotron_h", path, lambda x: layer(x, x @ n.T, sigmoid_router(bias.astype(np.float64), 2.5), None, up, down))

    tensors, (gate2, up2, down2) = expert_tensors(P + "experts.", plain(BF16))
    gates, z = router(P + "router.classifier.weight", E + 4, dtype=np.float32)
    zeros = normal(E + 4, scale=0.05).astype(np.float32)
    path = save_folder(FOLDER + "/longcat_flash", {**tensors, **gates, P + "router.e_score_correction_bias": zeros},
                       {"model_type": "longcat_flash", "n_routed_experts": E, "zero_expert_num": 4, "moe_topk": K, "routed_scaling_factor": 6.0, "expert_ffn_hidden_size": I})

    def longcat(x):
        p = softmax(x @ z.T)
        ids = top(p + zeros, K)
        y = np.zeros_like(x)
        for t in range(len(x)):
            for e in ids[t]:
                y[t] += 6 * p[t, e] * (x[t] if e >= E else down2[e] @ silu(gate2[e] @ x[t], up2[e] @ x[t]))
        return y

    compare("longcat_flash", path, longcat)


def softplus_router(bias, ids=None):
    """DeepSeek-V4's: by biased score, or ids of a table."""

    def route(logits):
        p = np.sqrt(np.log1p(np.exp(logits)))
        chosen = top(p + bias, K) if ids is None else ids[: len(logits)]
        w = np.take_along_axis(p, chosen, -1)
        return chosen, w / w.sum(-1, keepdims=True) * 1.5

    return route


def clamped(limit):
    return lambda g, u: np.minimum(g, limit) * sigmoid(np.minimum(g, limit)) * np.clip(u, -limit, limit)


def deepseek_v4():
    """As DeepSeek's own files name and store it: FP4 experts, a bias beside the router or a table of ids by token."""
    p = "layers.3.ffn."
    tensors, (gate, up, down) = expert_tensors(p + "experts.", mxfp4, ("w1", "w3", "w2"))
    gates, w = router(p + "gate.weight")
    config = {"model_type": "deepseek_v4", "n_routed_experts": E, "num_experts_per_tok": K, "n_shared_experts": 1, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
              "swiglu_limit": 0.7, "num_hash_layers": 3}
    bias = normal(E, scale=0.3).astype(np.float32)
    mtp = {"mtp.0.ffn.experts.0.w1.weight": np.ones((1, 1), np.int8)}
    path = save_folder(FOLDER + "/deepseek_v4", {**tensors, **gates, **mtp, p + "gate.bias": bias}, config)
    compare("deepseek_v4", path, lambda x: layer(x, x @ w.T, softplus_router(bias.astype(np.float64)), gate, up, down, clamped(0.7)), says="selection bias")
    table = np.stack([random.permutation(E)[:K] for _ in range(50)])
    tokens = random.integers(0, 50, 5).astype(np.int32)
    tokens.tofile(FOLDER + "/tokens.i32")
    given = ("--token-ids", FOLDER + "/tokens.i32")
    path = save_folder(FOLDER + "/deepseek_v4_hash", {**tensors, **gates, p + "gate.tid2eid": table.astype(np.int64)}, {**config, "num_hash_layers": 4})
    compare("deepseek_v4_hash", path, lambda x: layer(x, x @ w.T, softplus_router(0, table[tokens]), gate, up, down, clamped(0.7)), options=given)
    keys = {"expert_gating_func": 4, "expert_weights_norm": True, "expert_weights_scale": 1.5, "swiglu_clamp_exp": [0.0, 0.0, 0.0, 0.7], "hash_layer_count": 3}
    gguf_layer("gguf_deepseek4", "deepseek4", keys, ("Q4_K", "Q2_K"), softplus_router(bias.astype(np.float64)), clamped(0.7), extra={"blk.3.exp_probs_b.bias": bias})
    gguf_layer("gguf_deepseek4_hash", "deepseek4", keys, ("MXFP4", "MXFP4"), softplus_router(0, table[tokens]), clamped(0.7), hidden=96, inner=64,
               extra={"blk.3.ffn_gate_tid2eid.weight": table.astype(np.int32)}, options=given)


# ---- GGUF ----


def gguf_layer(name, architecture, keys, formats, route, act=silu, biases=False, together=False, extra=None, hidden=256, inner=256, parts=0, logits=None, options=()):
    """formats: of gate and up, and of down."""
    p = "blk.3."
    w = normal(E, hidden, scale=1.5 / np.sqrt(hidden)).astype(np.float32)
    tensors = {"blk.2.attn_norm.weight": np.ones(hidden, np.float32), p + "ffn_gate_inp.weight": w, **(extra or {})}
    gate, gate_values = blocks(formats[0], E, inner, hidden)
    up, up_values = blocks(formats[0], E, inner, hidden)
    down, down_values = blocks(formats[1], E, hidden, inner)
    if together:
        data = np.concatenate([gate[0], up[0]], 1) if isinstance(gate, tuple) else np.concatenate([gate, up], 1)
        tensors[p + "ffn_gate_up_exps.weight"] = (data, gate[1]) if isinstance(gate, tuple) else data
    else:
        tensors.update({p + "ffn_gate_exps.weight": gate, p + "ffn_up_exps.weight": up})
    tensors[p + "ffn_down_exps.weight"] = down
    values = [0, 0, 0]
    if biases:
        for i, (which, rows) in enumerate((("gate", inner), ("up", inner), ("down", hidden))):
            b = normal(E, rows, scale=0.3).astype(np.float32)
            tensors[p + f"ffn_{which}_exps.bias"] = b
            values[i] = b.astype(np.float64)
    path = save_gguf(f"{FOLDER}/{name}.gguf", architecture, {"block_count": 4, "expert_count": E, "expert_used_count": K, "embedding_length": hidden, **keys}, tensors, parts)
    if parts:
        files = sorted(f for f in os.listdir(FOLDER) if f.startswith(name + "-0"))
        assert len(files) > 1
        path = f"{FOLDER}/{files[-1]}"
    make = logits or (lambda x, w: x @ w.T)
    compare(name, path, lambda x: layer(x, make(x, w.astype(np.float64)), route, gate_values, up_values, down_values, act, values), hidden=hidden, says=formats[1], options=options)
    return path


def gguf_of_single_experts():
    """As llama.cpp wrote Mixtral in 2023: a tensor an expert."""
    w, tensors, values = normal(E, 96, scale=1.5 / np.sqrt(96)).astype(np.float32), {}, []
    for which, rows, columns in (("gate", 160, 96), ("up", 160, 96), ("down", 96, 160)):
        (data, kind), value = blocks("Q4_0", E, rows, columns)
        tensors.update({f"blk.3.ffn_{which}.{e}.weight": (data[e], kind) for e in range(E)})
        values.append(value)
    path = save_gguf(FOLDER + "/gguf_single_experts.gguf", "llama", {"expert_count": E, "expert_used_count": K}, {"blk.3.ffn_gate_inp.weight": w, **tensors})
    compare("gguf_single_experts", path, lambda x: layer(x, x @ w.T.astype(np.float64), softmax_router(), *values), hidden=96, says="and the other experts'")


def gguf_models():
    gguf_of_single_experts()
    gguf_layer("gguf_q4_k_q6_k", "qwen3moe", {"expert_feed_forward_length": 256}, ("Q4_K", "Q6_K"), softmax_router())
    gguf_layer("gguf_q8_0", "llama", {}, ("Q8_0", "Q8_0"), softmax_router(), hidden=96, inner=160)
    gguf_layer("gguf_unnormalised", "qwen2moe", {}, ("Q5_0", "Q4_1"), softmax_router(normalised=False), hidden=96, inner=160)
    gguf_layer("gguf_bf16_fused", "qwen3moe", {}, ("BF16", "F32"), softmax_router(), together=True, hidden=70, inner=30)
    for name in ("Q2_K", "Q3_K", "Q5_K", "IQ4_XS"):
        gguf_layer("gguf_" + name.lower(), "qwen3moe", {}, (name, name), softmax_router())
    for name in ("Q4_0", "Q5_1", "IQ4_NL"):
        gguf_layer("gguf_" + name.lower(), "qwen3moe", {}, (name, name), softmax_router(), hidden=96, inner=32)
    bias = normal(E, scale=0.5).astype(np.float32)
    gguf_layer("gguf_mxfp4_biases", "gpt-oss", {}, ("MXFP4", "MXFP4"), lambda l: selected_softmax_router(l + bias.astype(np.float64)), gpt_oss, True, hidden=H, inner=I, extra={"blk.3.ffn_gate_inp.bias": bias})
    groups = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_group_count": 4, "expert_group_used_count": 2}
    gguf_layer("gguf_f16_groups", "deepseek2", groups, ("F16", "F16"), sigmoid_router(bias.astype(np.float64), 2.5, 4, 2), extra={"blk.3.exp_probs_b.bias": bias}, hidden=90, inner=50)
    scale, expert_scale = random.uniform(0.5, 2, 96).astype(np.float32), random.uniform(0.5, 1.5, E).astype(np.float32)

    def scaled(logits):
        ids, weights = softmax_router()(logits)
        return ids, weights * expert_scale.astype(np.float64)[ids]

    gguf_layer("gguf_gemma4", "gemma4", {"attention.layer_norm_rms_epsilon": 1e-6}, ("Q8_0", "Q8_0"), scaled, gelu, together=True, hidden=96, inner=64,
               extra={"blk.3.ffn_gate_inp.scale": scale, "blk.3.ffn_down_exps.scale": expert_scale},
               logits=lambda x, w: (x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale.astype(np.float64) / np.sqrt(96)) @ w.T)
    gguf_layer("gguf_in_parts", "qwen3moe", {}, ("Q4_K", "Q6_K"), softmax_router(), parts=2)


def trained_layer():
    """The layer of tests/data, against what the model itself computed."""
    path = "tests/data/tiny_moe.gguf"
    tensors = {t.name: t.data for t in gguf.GGUFReader(path).tensors if t.name in ("x", "y")}
    try:
        tensors["x"][:200].tofile(FOLDER + "/x.f32")
        run([path, "--layer", "2", "--activations", FOLDER + "/x.f32", "--output", FOLDER + "/y.f32", "--dtype", "f32"])
        got, want = np.fromfile(FOLDER + "/y.f32", np.float32).reshape(200, 256), tensors["y"][:200]
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < 5e-6, f"the relative error is {error:.3g}"
        report("trained_layer")
    except (AssertionError, OSError, ValueError, subprocess.SubprocessError) as error:
        report("trained_layer", error)


# ---- what is refused ----


def rewrite(name, source, change, config=None):
    """A copy of a folder with its only file's tensors changed."""
    from safetensors.numpy import safe_open

    path = f"{FOLDER}/{name}"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(f"{FOLDER}/{source}", path)
    with open(path + "/model.safetensors", "rb") as file:
        content = bytearray(file.read())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    data = content[8 + length :]
    tensors = {k: (v["dtype"], v["shape"], bytes(data[v["data_offsets"][0] : v["data_offsets"][1]])) for k, v in header.items() if k != "__metadata__"}
    change(tensors)
    header, data = {}, b""
    for k, (dtype, shape, content) in tensors.items():
        header[k] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    with open(path + "/model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)
    if config:
        with open(path + "/config.json", "w") as file:
            json.dump(config, file)
    return path


def refusals():
    need("bf16", qwen3_moe)
    need("gemma4", fused_models)
    need("gguf_q8_0.gguf", gguf_models)
    up5 = P + "experts.5.up_proj.weight"
    refused("a_missing_expert", rewrite("a", "bf16", lambda t: t.pop(up5)), "expert 5 of 8 has no up_proj.weight")
    refused("another_shape", rewrite("b", "bf16", lambda t: t.update({up5: ("BF16", [I // 2, 2 * H], t[up5][2])})), up5 + " is BF16 [48, 320]", "[1, 96, 160, 1]")
    refused("another_type", rewrite("c", "bf16", lambda t: t.update({up5: ("F16", [I, H], t[up5][2])})), up5 + " is F16", "another type than the first expert's")
    refused("an_unknown_type", rewrite("d", "bf16", lambda t: t.update({P + "experts.0.gate_proj.weight": ("I64", [I, H], b"\0" * (I * H * 8))})), "experts.0.gate_proj.weight is I64 [96, 160]", "aren't supported")
    refused("no_router", rewrite("e", "bf16", lambda t: t.pop(P + "gate.weight")), "no router", P)
    refused("more_experts_than_the_router_has", rewrite("f", "bf16", lambda t: None, {**QWEN3, "num_experts": 9}), P + "gate.weight has 8 rows", "9 experts")
    refused("an_unknown_model", rewrite("g", "bf16", lambda t: None, {**QWEN3, "model_type": "qwen3moe"}), "qwen3moe", "qwen3_moe")
    refused("a_missing_selection_bias", rewrite("h", "bf16", lambda t: None, {**DEEPSEEK, "n_group": 1, "topk_group": 1}), "selection_bias")
    refused("experts_without_gate", rewrite("i", "bf16", lambda t: [t.pop(k) for k in list(t) if "gate_proj" in k]), "have a gate, the checkpoint's have none")
    refused("awq", rewrite("l", "gptq", lambda t: None, {**QWEN3, "quantization_config": {"quant_method": "awq"}}), "gate_proj.qweight is of quant_method awq")
    refused("reordered_inputs", rewrite("m", "gptq", lambda t: t.update({P + "experts.7.up_proj.g_idx": ("I32", [H], bytes(4 * H))})), "g_idx is I32 [160]", "reorders the inputs")
    refused("another_layer", FOLDER + "/bf16", "layer 4 has no experts", options=("--layer", "4"))
    refused("a_router_without_its_scale", rewrite("k", "gemma4", lambda t: t.pop("model.language_model.layers.3.router.scale")), "no router.scale")
    refused("a_missing_file", FOLDER + "/nothing", "config.json can't be opened")
    refused("no_configuration", FOLDER + "/bf16", "none.json can't be opened", options=("--layer", "3", "--config", "none.json"))
    two = rewrite("j", "bf16", lambda t: t.update({"talker." + k: v for k, v in list(t.items())}))
    refused("two_modules", two, "--prefix", "talker.")
    try:
        assert "checksum" in run([two, "--layer", "3", "--prefix", "talker.", "--tokens", "2"])
        report("takes_the_module_that_a_prefix_names")
    except AssertionError as error:
        report("takes_the_module_that_a_prefix_names", error)
    for i, shard in enumerate(("../bf16/model.safetensors", "/etc/passwd", 7, "nothing.safetensors")):
        path = rewrite(f"index_{i}", "bf16", lambda t: None)
        with open(path + "/model.safetensors.index.json", "w") as file:
            json.dump({"weight_map": {P + "gate.weight": shard}}, file)
        refused(f"an_index_{i}", path, "gate.weight" if i < 3 else "nothing.safetensors can't be opened")
    refused("a_type_of_gguf", save_gguf(f"{FOLDER}/r1.gguf", "qwen3moe", {"expert_count": E, "expert_used_count": K}, {
        "blk.3.ffn_gate_inp.weight": np.zeros((E, 256), np.float32), **{f"blk.3.ffn_{n}_exps.weight": (np.zeros((E, 256, 66), np.uint8), gguf.GGMLQuantizationType.IQ2_XXS) for n in ("gate", "up", "down")}}),
        "blk.3.ffn_gate_exps.weight is IQ2_XXS [8, 256, 256]")
    refused("two_types_of_gate_and_up", save_gguf(f"{FOLDER}/r2.gguf", "qwen3moe", {"expert_count": E, "expert_used_count": K}, {
        "blk.3.ffn_gate_inp.weight": np.zeros((E, 64), np.float32), "blk.3.ffn_gate_exps.weight": np.zeros((E, 32, 64), np.float16), "blk.3.ffn_up_exps.weight": np.zeros((E, 32, 64), np.float32),
        "blk.3.ffn_down_exps.weight": np.zeros((E, 64, 32), np.float32)}), "blk.3.ffn_gate_exps.weight F16", "blk.3.ffn_up_exps.weight F32")
    refused("an_unknown_architecture", save_gguf(f"{FOLDER}/r3.gguf", "grovemoe", {}, {"x": np.zeros(4, np.float32)}), "grovemoe", "--model-type")
    refused("another_gating", save_gguf(f"{FOLDER}/r4.gguf", "qwen3moe", {"expert_gating_func": 2}, {"x": np.zeros(4, np.float32)}), "expert_gating_func")
    refused("a_dense_layer", FOLDER + "/gguf_q8_0.gguf", "blk.2.ffn_gate_inp.weight", options=("--layer", "2"))
    parts = sorted(f for f in os.listdir(FOLDER) if f.startswith("gguf_in_parts-0"))
    os.rename(f"{FOLDER}/{parts[1]}", FOLDER + "/away")
    refused("a_missing_part", f"{FOLDER}/{parts[0]}", parts[1] + ": it can't be opened")
    os.rename(FOLDER + "/away", f"{FOLDER}/{parts[1]}")
    with open(FOLDER + "/x.f32", "wb") as file:
        file.write(b"\0" * (4 * H + 4))
    refused("activations_of_another_size", FOLDER + "/bf16", "x.f32 has 644 bytes", "160 f32", options=("--layer", "3", "--activations", FOLDER + "/x.f32"))


# ---- damage ----


def damage():
    """Cut and altered files: run_layer is built with AddressSanitizer here, and must end by itself."""
    environment = {"ASAN_OPTIONS": "exitcode=99:allocator_may_return_null=1", "UBSAN_OPTIONS": "halt_on_error=1:exitcode=99"}
    for made, part in (("fp8_blocks", deepseek_v3), ("dbrx", other_names), ("gpt_oss", gpt_oss_model), ("gptq", qwen3_moe), ("deepseek_v4_hash", deepseek_v4), ("gguf_f16_groups.gguf", gguf_models)):
        need(made, part)
    targets = [(f"{FOLDER}/{n}", f"{FOLDER}/{n}/{f}") for n, f in (("gpt_oss", "model.safetensors"), ("gpt_oss", "config.json"), ("gptq", "model.safetensors"), ("int4_zero_points", "model.safetensors"),
               ("fp8_blocks", "model.safetensors.index.json"), ("fp8_blocks", "config.json"), ("longcat_flash", "model.safetensors"), ("step3p5", "config.json"), ("dbrx", "model.safetensors"), ("deepseek_v4_hash", "model.safetensors"))]
    targets += [(f"{FOLDER}/{n}.gguf",) * 2 for n in ("gguf_q8_0", "gguf_f16_groups", "gguf_deepseek4_hash")]
    pieces = b'{}[]",:0123456789-eE.\x00\xff'
    accepted = refused_runs = 0
    for path, file in targets:
        with open(file, "rb") as stream:
            whole = stream.read()
        header = len(whole) if file.endswith("json") else 8 + int.from_bytes(whole[:8], "little") if file.endswith("safetensors") else min(4096, len(whole))
        try:
            for _ in range(40):
                content = bytearray(whole)
                if random.integers(5) == 0:
                    content = content[: random.integers(len(content))]
                else:
                    for _ in range(random.integers(1, 4)):
                        at = random.integers(header)
                        content[at] = random.integers(256) if random.integers(3) == 0 else pieces[random.integers(len(pieces))] if random.integers(2) else content[at] ^ 1 << random.integers(8)
                with open(file, "wb") as stream:
                    stream.write(content)
                result = subprocess.run([PROGRAM, path, "--layer", "3", "--tokens", "2", "--device", "cpu"], capture_output=True, text=True, errors="replace", timeout=60, env={**os.environ, **environment})
                if result.returncode not in (0, 1):
                    shutil.copy(file, FOLDER + "/damaged")
                    raise AssertionError(f"{file}, kept as {FOLDER}/damaged: exit status {result.returncode}: {result.stderr[:300]}")
                assert result.returncode == 0 or len(result.stderr) > 12, "refused without a message"
                accepted += result.returncode == 0
                refused_runs += result.returncode == 1
        except (AssertionError, subprocess.SubprocessError) as error:
            report("survives_damage", error)
            return
        finally:
            with open(file, "wb") as stream:
                stream.write(whole)
    report("survives_damage", None if accepted and refused_runs > accepted // 4 else f"{accepted} accepted, {refused_runs} refused")


if not ONLY:
    shutil.rmtree(FOLDER, ignore_errors=True)
os.makedirs(FOLDER, exist_ok=True)
for part in (qwen3_moe, deepseek_v3, fused_models, gpt_oss_model, other_names, deepseek_v4, gguf_models, trained_layer, refusals, damage):
    if part.__name__ in ONLY if ONLY else part is not damage:
        part()
sys.exit(failed)
