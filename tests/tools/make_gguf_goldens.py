"""Writes tests/data/gguf.safetensors: blocks of every GGUF format that the library reads, and what they mean by the
reference implementation in the PyPI package gguf. Rows of 512 with scales of every kind; and single blocks of ordinary size, of
which tests make up whole matrices. Run: python make_gguf_goldens.py tests/data/gguf.safetensors
Needs the packages gguf and numpy; the versions go into the file's metadata.
"""
import importlib.metadata
import json
import struct
import sys

import gguf
import numpy

ROWS, VALUES = 3, 512
FORMATS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
# Where a block has numbers in f16; every other byte may be anything.
HALVES = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "MXFP4": []}
# About how much the codes of a block multiply these numbers by.
FACTORS = {"Q4_0": [4.6], "Q4_1": [9, 2], "Q5_0": [9.2], "Q5_1": [18, 2], "Q8_0": [74], "Q2_K": [17, 9], "Q3_K": [43], "Q4_K": [320, 37], "Q5_K": [660, 37], "Q6_K": [1350], "IQ4_NL": [69], "IQ4_XS": [1270]}
random = numpy.random.default_rng(20240607)


def random_blocks(name):
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    count = ROWS * VALUES // values
    blocks = random.integers(0, 256, (count, size), dtype=numpy.uint8)
    for at in HALVES.get(name, [0]):
        scale = random.normal(size=count) * 0.05
        scale[0] = 3e-7  # subnormal
        scale[-1] = 0
        blocks[:, at : at + 2] = scale.astype("<f2").view(numpy.uint8).reshape(count, 2)
    if name == "MXFP4":
        blocks[:, 0] = random.integers(90, 150, count)
        blocks[:6, 0] = [0, 1, 2, 127, 240, 250]
    return blocks.reshape(ROWS, -1)


def single_blocks(name):
    """Values of a deviation of about 0.05."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = random.integers(0, 256, (24 if values == 256 else 96, size), dtype=numpy.uint8)
    for at, factor in zip(HALVES.get(name, [0]), FACTORS.get(name, [])):
        scale = random.uniform(0.5, 1.5, len(blocks)) * random.choice([-1, 1], len(blocks)) * 0.05 / factor
        blocks[:, at : at + 2] = scale.astype("<f2").view(numpy.uint8).reshape(-1, 2)
    if name == "MXFP4":
        blocks[:, 0] = random.integers(120, 123, len(blocks))
    return blocks


def main(path):
    tensors = {}
    for name in FORMATS:
        blocks = random_blocks(name)
        values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]).astype("<f4")
        assert values.shape == (ROWS, VALUES) and numpy.isfinite(values).all()
        tensors[name + ".blocks"] = ("U8", blocks)
        tensors[name + ".values"] = ("F32", values)
    for name in FORMATS:
        blocks = single_blocks(name)
        tensors[name + ".single.blocks"] = ("U8", blocks)
        tensors[name + ".single.values"] = ("F32", gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]).astype("<f4"))
    header = {"__metadata__": {package: importlib.metadata.version(package) for package in ("gguf", "numpy")}}
    data = b""
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


main(sys.argv[1])
