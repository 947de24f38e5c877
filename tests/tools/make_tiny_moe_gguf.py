"""Wrote tests/data/tiny_moe.gguf from the safetensors file that the model's own run left, bit by bit, with the names and keys
that llama.cpp gives to a Qwen3-MoE layer: python make_tiny_moe_gguf.py FROM.safetensors tests/data/tiny_moe.gguf
Needs the packages gguf and numpy.
"""
import json
import struct
import sys

import gguf
import numpy

NAMES = {"gate.weight": "blk.2.ffn_gate_inp.weight", "experts.gate_up_proj": "blk.2.ffn_gate_up_exps.weight", "experts.down_proj": "blk.2.ffn_down_exps.weight"}
KINDS = {"F32": ("<f4", gguf.GGMLQuantizationType.F32), "I32": ("<i4", gguf.GGMLQuantizationType.I32), "BF16": ("<u2", gguf.GGMLQuantizationType.BF16)}


def main(source, target):
    with open(source, "rb") as file:
        content = file.read()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    described = header.pop("__metadata__")
    writer = gguf.GGUFWriter(target, "qwen3moe")
    writer.add_name("a byte-level Qwen3-MoE model, trained on technical text")
    writer.add_block_count(4)
    writer.add_embedding_length(int(described["hidden_size"]))
    writer.add_expert_count(int(described["experts"]))
    writer.add_expert_used_count(int(described["top_k"]))
    writer.add_expert_feed_forward_length(int(described["moe_intermediate_size"]))
    expected = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        numbers, kind = KINDS[entry["dtype"]]
        data = numpy.frombuffer(content[8 + length + begin : 8 + length + end], numbers).reshape(entry["shape"])
        name = NAMES.get(name, name)
        writer.add_tensor(name, data.view(numpy.uint8) if entry["dtype"] == "BF16" else data, raw_dtype=kind)
        expected[name] = data
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for tensor in gguf.GGUFReader(target).tensors:
        data = expected.pop(tensor.name)
        assert tensor.data.tobytes() == data.tobytes() and tensor.shape.tolist() == list(reversed(data.shape)), tensor.name
    assert not expected


main(*sys.argv[1:])
