"""moe_route.py: moe_route for Python by ctypes: the structs of moe_route.h that a layer takes, field for field, and calls that
raise with the library's message. Needs the shared library (`make lib`) and nothing else; addresses are integers, such as
tensor.data_ptr() of PyTorch or array.ctypes.data of numpy. Copy it, and add what you need from the header in the same way.
"""
import ctypes
import os

i32, u32, f32, enum, size_t = ctypes.c_int32, ctypes.c_uint32, ctypes.c_float, ctypes.c_int, ctypes.c_size_t
address, text, pointer = ctypes.c_ulonglong, ctypes.c_char_p, ctypes.c_void_p
VERSION = "0.1.0"  # of the header that the structs below follow

DEVICE_GPU, DEVICE_CPU = 1, 2
F32, F16, BF16 = 1, 2, 3
RENORMALIZE_SUM = 1
FORMAT_F32, FORMAT_F16, FORMAT_BF16, FORMAT_INT8, FORMAT_INT4, FORMAT_FP8, FORMAT_MXFP4, FORMAT_NVFP4 = range(1, 9)
OPERATION_LAYER, OPERATION_ROUTE = 1, 2


class ContextDesc(ctypes.Structure):
    _fields_ = [("device", enum), ("device_ordinal", i32), ("cuda_context", pointer), ("compile_target", u32), ("cache_dir", text),
                ("cache_read_only_dirs", pointer), ("num_cache_read_only_dirs", u32), ("cache_limit", ctypes.c_uint64),
                ("trust_shared_cache", i32), ("nvrtc_path", text), ("allocator", pointer * 3), ("logger", pointer * 2)]


class Router(ctypes.Structure):
    _fields_ = [("num_experts", u32), ("top_k", u32), ("num_shared_experts", u32), ("num_skip_experts", u32), ("logits_dtype", enum),
                ("weights_dtype", enum), ("logit_bias", address), ("softcap", f32), ("score", enum), ("score_expression", text),
                ("score_function", pointer), ("score_user", pointer), ("jitter", f32), ("selection_bias", address), ("group_rule", enum),
                ("num_groups", u32), ("topk_groups", u32), ("dropped", enum), ("ids", enum), ("id_table", address), ("id_table_rows", u32),
                ("weight", enum), ("renormalize", enum), ("renormalize_epsilon", f32), ("scale", f32), ("expert_scale", address),
                ("divide_by_top_k", i32)]


class Weights(ctypes.Structure):
    _fields_ = [("format", enum), ("data", address), ("scales", address), ("scales_dtype", enum), ("group_size", u32), ("group_rows", u32),
                ("codes", enum), ("zero_points", address), ("global_scales", address), ("global_scales_shape", enum), ("bias", address),
                ("bias_dtype", enum)]


class Experts(ctypes.Structure):
    _fields_ = [("hidden_size", u32), ("intermediate_size", u32), ("dtype", enum), ("gate_up", Weights), ("down", Weights), ("up", Weights),
                ("gate_up_order", enum), ("activation", enum), ("activation_alpha", f32), ("situ_beta", f32), ("situ_up_beta", f32),
                ("up_offset", f32), ("clamp", f32), ("clamp_position", enum), ("weight_on_input", i32), ("first_expert", u32),
                ("num_local_experts", u32), ("num_identity_experts", u32), ("expert_map", address), ("expert_map_columns", u32),
                ("num_physical_experts", u32), ("num_ranks", u32), ("rank_experts", pointer)]


class LayerDesc(ctypes.Structure):
    _fields_ = [("router", Router), ("experts", Experts), ("needs", u32), ("max_tokens", u32), ("operations", u32), ("dependent_launch", enum),
                ("fused_combine", enum), ("rows_dtype", enum), ("sums_of_max_tokens", u32), ("tuned", enum),
                ("grouped_rows", u32), ("cub_maps", enum)]


class LayerArgs(ctypes.Structure):
    _fields_ = [("num_tokens", u32), ("logits", address), ("ids", address), ("weights", address), ("shared_weights", address),
                ("token_ids", address), ("expert_load", address), ("x", address), ("y", address), ("shared_output", address),
                ("shared_output_weights", address), ("residual", address), ("num_valid_tokens", address), ("workspace", address),
                ("workspace_size", size_t), ("stream", pointer)]


def load(path=None):
    """The shared library, checked to be of the structs' version."""
    library = ctypes.CDLL(path or os.environ.get("MOE_ROUTE_LIBRARY", "libmoe_route.so"))
    library.moe_route_version.restype = text
    library.moe_route_message.restype = size_t
    if library.moe_route_version().decode() != VERSION:
        raise RuntimeError("the library is version %s, moe_route.py follows %s" % (library.moe_route_version().decode(), VERSION))
    return library


class Layer:
    """A context with one layer. The description's addresses must stay valid for its life: keep the tensors."""

    def __init__(self, library, desc, device):
        self.library, self.context, self.layer = library, pointer(), pointer()
        self._must(library.moe_route_context_create(ctypes.byref(ContextDesc(device=device)), ctypes.byref(self.context)))
        self._must(library.moe_route_layer_create(self.context, ctypes.byref(desc), ctypes.byref(self.layer)))

    def _must(self, status):
        if status:
            message = ctypes.create_string_buffer(16384)
            if self.context:
                self.library.moe_route_message(self.context, message, size_t(len(message)))
            raise RuntimeError(message.value.decode() or "status %d" % status)

    def workspace_size(self, num_tokens):
        size = size_t()
        self._must(self.library.moe_route_layer_workspace_size(self.layer, u32(num_tokens), ctypes.byref(size)))
        return size.value

    def run(self, **args):
        self._must(self.library.moe_route_layer_run(self.layer, ctypes.byref(LayerArgs(**args))))

    def close(self):
        self.library.moe_route_layer_destroy(self.layer)
        self.library.moe_route_context_destroy(self.context)
        self.layer = self.context = pointer()
