"""torch_layer.py: a layer on PyTorch's tensors: data_ptr() for addresses, the current stream for launches. On CUDA tensors where
PyTorch sees a GPU, on CPU tensors otherwise (always with --cpu); on numpy arrays where there is no PyTorch. Compares with the
same layer written in tensor operations.

    make lib && MOE_ROUTE_LIBRARY=build/libmoe_route.so python3 examples/torch_layer.py
"""
import sys

import moe_route

try:
    import torch
except ImportError:
    torch = None
    import numpy

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 16, 4, 64, 32, 5

on_gpu = torch is not None and torch.cuda.is_available() and "--cpu" not in sys.argv
if torch is not None:
    torch.manual_seed(1)
    device = "cuda" if on_gpu else "cpu"
    numbers = lambda *shape: torch.randn(*shape, device=device)
    empty = lambda *shape: torch.empty(*shape, device=device)
    raw = lambda size: torch.empty(size + 256, dtype=torch.uint8, device=device)
    address = lambda tensor: tensor.data_ptr()
else:
    generator = numpy.random.default_rng(1)
    numbers = lambda *shape: generator.standard_normal(shape, dtype=numpy.float32)
    empty = lambda *shape: numpy.empty(shape, dtype=numpy.float32)
    raw = lambda size: numpy.empty(size + 256, dtype=numpy.uint8)
    address = lambda array: array.ctypes.data


def reference(logits, x, gate_up, down):
    """The layer in plain operations, which torch and numpy spell alike."""
    exp = torch.exp if torch is not None else numpy.exp
    y = x * 0
    for t in range(TOKENS):
        order = (-logits[t]).argsort()[:TOP_K]
        weights = exp(logits[t][order] - logits[t].max())
        weights = weights / weights.sum()
        for j in range(TOP_K):
            both = gate_up[order[j]] @ x[t]
            gate, up = both[:INTERMEDIATE], both[INTERMEDIATE:]
            y[t] += weights[j] * (down[order[j]] @ (gate / (1 + exp(-gate)) * up))
    return y


gate_up, down = numbers(EXPERTS, 2 * INTERMEDIATE, HIDDEN) * 0.2, numbers(EXPERTS, HIDDEN, INTERMEDIATE) * 0.2
logits, x, y = numbers(TOKENS, EXPERTS), numbers(TOKENS, HIDDEN), empty(TOKENS, HIDDEN)

desc = moe_route.LayerDesc()
desc.router.num_experts = EXPERTS
desc.router.top_k = TOP_K
desc.router.renormalize = moe_route.RENORMALIZE_SUM
desc.experts.hidden_size = HIDDEN
desc.experts.intermediate_size = INTERMEDIATE
desc.experts.dtype = moe_route.F32
desc.experts.gate_up = moe_route.Weights(format=moe_route.FORMAT_F32, data=address(gate_up))
desc.experts.down = moe_route.Weights(format=moe_route.FORMAT_F32, data=address(down))
layer = moe_route.Layer(moe_route.load(), desc, moe_route.DEVICE_GPU if on_gpu else moe_route.DEVICE_CPU)

size = layer.workspace_size(TOKENS)
workspace = raw(size)
layer.run(num_tokens=TOKENS, logits=address(logits), x=address(x), y=address(y),
          workspace=(address(workspace) + 255) // 256 * 256, workspace_size=size,
          stream=torch.cuda.current_stream().cuda_stream if on_gpu else None)

error = float(abs(y - reference(logits, x, gate_up, down)).max())  # on the stream, after the layer
print("on %s: largest difference %.1e" % ("PyTorch's GPU" if on_gpu else "CPU tensors" if torch is not None else "numpy arrays", error))
layer.close()
sys.exit(0 if error < 1e-4 else 1)
