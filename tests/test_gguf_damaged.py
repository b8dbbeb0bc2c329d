"""GGUF files from elsewhere: whatever is wrong with one is said, by name, in bounded memory and time."""

import os
import re
import struct
import time
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from conftest import refused
from draftwing.errors import (
    CheckpointError,
    ConfigError,
    DraftwingError,
    DraftwingWarning,
    TokenizerError,
    UnsupportedError,
)
from draftwing.formats.gguf import open_file
from draftwing.formats.gguf_folder import folder_files
from draftwing.formats.gguf_weights import GgufWeights

U8, I8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 1, 4, 5, 6, 7, 8, 9, 10
SPECIAL = ["<unk>", "<s>", "</s>"]


@cache
def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def strings(key, values):
    return pair(key, ARRAY, struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values)))


def number(key, value):
    return pair(key, U32, struct.pack("<I", value))


def tensor(name, dims, kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def container(pairs=(), tensors=(), data=b"", *, version=3, counts=None, magic=b"GGUF"):
    """A file, put together by hand."""
    num_tensors, num_pairs = counts or (len(tensors), len(pairs))
    head = magic + struct.pack("<IQQ", version, num_tensors, num_pairs) + b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


def read_all(path):
    """Everything that anybody reads of a file."""
    file = open_file(path)
    try:
        folder_files(file)
    finally:
        file.close()
    with GgufWeights(path) as weights:
        for name in weights.keys():  # noqa: SIM118
            weights.get(name, torch.float32)
            if len(weights.shape(name)) == 2:
                weights.stored(name)


def entry(key, value):
    """A key-value pair of a Python value, in the type that models use for it."""
    if isinstance(value, bool):
        return pair(key, BOOL, bytes([value]))
    if isinstance(value, float):
        return pair(key, F32, struct.pack("<f", value))
    if isinstance(value, str):
        return pair(key, STRING, text(value))
    if isinstance(value, int):
        return number(key, value)
    if isinstance(value[0], int | float):
        kind, code = (I32, "i") if isinstance(value[0], int) else (F32, "f")
        return pair(key, ARRAY, struct.pack(f"<IQ{len(value)}{code}", kind, len(value), *value))
    return strings(key, value)


METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*SPECIAL, *"abcde", "ab"],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": True,
}


def tiny(changes=None, **tokenizer):
    """A whole model in some 20 KB, with other metadata; None leaves a key out."""
    changes = {**(changes or {}), **{f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}}
    pairs = [entry(key, value) for key, value in {**METADATA, **changes}.items() if value is not None]
    random = np.random.default_rng(0)
    plan = {
        "token_embd.weight": ((32, 9), "Q8_0"), "output_norm.weight": ((32,), "F32"),
        "blk.0.attn_norm.weight": ((32,), "F32"), "blk.0.ffn_norm.weight": ((32,), "F32"),
        "blk.0.attn_q.weight": ((32, 32), "F16"), "blk.0.attn_k.weight": ((32, 16), "Q4_0"),
        "blk.0.attn_v.weight": ((32, 16), "Q4_1"), "blk.0.attn_output.weight": ((32, 32), "BF16"),
        "blk.0.ffn_gate.weight": ((32, 32), "Q5_0"), "blk.0.ffn_up.weight": ((32, 32), "F32"),
        "blk.0.ffn_down.weight": ((32, 32), "IQ4_NL"),
    }  # fmt: skip
    tensors, data = [], b""
    for name, (dims, kind) in plan.items():
        number_of = gguf.GGMLQuantizationType[kind]
        weight = random.standard_normal(dims[::-1]).astype(np.float32)
        if kind == "IQ4_NL":
            raw = np.tile(np.frombuffer(np.float16(0.01).tobytes() + bytes(range(16)), np.uint8), 32)
        else:
            raw = weight if kind == "F32" else gguf.quants.quantize(weight, number_of)
        tensors.append(tensor(name, dims, int(number_of), len(data)))
        data += raw.tobytes()
        data += b"\0" * (-len(data) % 32)
    return container(pairs, tensors, data)


TINY = tiny()
SENTENCE_PIECE = tiny(
    {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0},
    model="llama",
    scores=[float(score) for score in range(9)],
)
HEADER = TINY.index(b"blk.0.ffn_down.weight") + 60


def opened(tmp_path, data, name="bad.gguf"):
    path = tmp_path / name
    path.write_bytes(data)
    read_all(path)


def test_the_tiny_files_are_whole(tmp_path):
    opened(tmp_path, TINY)
    opened(tmp_path, SENTENCE_PIECE)
    (tmp_path / "m.gguf").write_bytes(TINY)
    with GgufWeights(tmp_path / "m.gguf") as weights:
        assert len(weights.keys()) == 11


@pytest.mark.parametrize("end", [*range(4, 200, 7), *range(200, len(TINY) - 1, 997), len(TINY) - 1])
def test_truncated_anywhere(tmp_path, end):
    with refused(CheckpointError, "bad.gguf", "lie within the file" if end > 24 + 32 * 11 else "truncated"):
        opened(tmp_path, TINY[:end])


HUGE = (2**64 - 1, 2**63, 2**40, 70000)


def pairs_of(*pairs):
    return container(pairs)


def tensors_of(*tensors, data=128):
    return container((), tensors, b"\0" * data)


def array(kind, count):
    return pair("a", ARRAY, struct.pack("<IQ", kind, count) + b"\0" * 64)


# A damaged file by what is wrong with it, and the parts of the message, for each class of error.
CHECKPOINT = {
    "another magic": (container(magic=b"GGML"), "expected a GGUF file", "GGML"),
    **{f"{n} tensors": (container(counts=(n, 0)), f"{n} tensors", "can hold at most 1.") for n in (*HUGE, 2)},
    **{f"{n} pairs": (container(counts=(0, n)), f"{n} metadata pairs") for n in HUGE},
    "more metadata than any model has": (
        container([number(f"{index:05}", 0) for index in range(70000)]),
        "70000 metadata pairs",
        "can hold at most 65536.",
    ),
    "a key of 2**64 bytes": (
        pairs_of(struct.pack("<Q", 2**64 - 1) + b"k" * 32),
        "the key of metadata pair 0",
        "at most",
    ),
    "a key that is no text": (pairs_of(pair(b"\xff\xfe", U8, b"\0" * 9)), "must be UTF-8"),
    "a string of 2**64 bytes": (
        pairs_of(pair("a", STRING, struct.pack("<Q", 2**64 - 1) + b"x")),
        "metadata `a`",
        str(2**64 - 1),
    ),
    **{
        f"an array of {n}, type {kind}": (pairs_of(array(kind, n)), "metadata `a`", "must lie within the file")
        for n in HUGE
        for kind in (U8, BOOL, U64, STRING)
    },
    **{
        f"a string of {n} bytes in an array": (
            pairs_of(pair("a", ARRAY, struct.pack("<IQQ", STRING, 2, n) + b"\0" * 64)),
            "metadata `a`",
            "must lie within the file",
        )
        for n in HUGE
    },
    "arrays in arrays": (
        pairs_of(pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 50 + b"\0" * 64)),
        "metadata `a`",
        "array of arrays",
    ),
    "an unknown type": (pairs_of(pair("a", 13, b"\0" * 8)), "`a`", "unknown type 13"),
    "an array of an unknown type": (pairs_of(array(99, 0)), "`a`", "unknown type 99"),
    "neither true nor false": (pairs_of(pair("a", BOOL, b"\2")), "`a`", "true or false"),
    "a key twice": (pairs_of(number("a", 1), number("a", 1)), "`a` occurs twice"),
    "5 dimensions": (tensors_of(tensor("t", (1,) * 5), data=0), "tensor t has 5 dimensions"),
    "no dimensions": (tensors_of(tensor("t", ()), data=32), "tensor t has 0 dimensions"),
    "a dimension of 0": (tensors_of(tensor("t", (32, 0)), data=32), "tensor t", "[0, 32]"),
    "a product above 2**64": (tensors_of(tensor("t", (2**62, 2**62)), data=32), "tensor t", "lie within the file"),
    "rows that are no blocks": (tensors_of(tensor("t", (33, 2), 8)), "tensor t has rows of 33", "32 (Q8_0)"),
    "an offset that is not aligned": (tensors_of(tensor("t", (4,), 0, 16)), "tensor t", "aligned to 32"),
    "an offset beyond the end": (tensors_of(tensor("t", (4,), 0, 2**64 - 32)), "tensor t", "lie within the file"),
    "tensors over each other": (tensors_of(tensor("t", (16,)), tensor("u", (4,), 0, 32)), "t and u overlap"),
    "a tensor twice": (tensors_of(tensor("t", (4,)), tensor("t", (4,), 0, 32)), "tensor t occurs twice"),
    "no embedding": (pairs_of(*map(entry, METADATA, METADATA.values())), "token_embd.weight", "none"),
    "heads that are not whole": (
        tiny(
            {
                "llama.attention.head_count": 3,
                "llama.attention.head_count_kv": 3,
                "llama.attention.key_length": 16,
                "llama.rope.dimension_count": 16,
            }
        ),
        "blk.0.attn_",
        "a multiple of 6 rows",
    ),
}
UNSUPPORTED = {
    "version 1": (container(version=1), "version 1", "2 or 3"),
    "version 4": (container(version=4), "version 4"),
    "big-endian": (container(version=3 << 24), "big-endian"),
    "an unknown format": (tensors_of(tensor("t", (32,), 4)), "tensor t", "format 4"),
}
CONFIG = {
    "no metadata": (container(), "general.architecture", "missing"),
    **{f"alignment {n}": (pairs_of(number("general.alignment", n)), "general.alignment") for n in (0, 3, 2**31)},
    **{
        f"without {key}": (tiny({key: None}), f"`{key}` is missing")
        for key in METADATA
        if key.startswith("llama") and not key.endswith("_kv")
    },
    "types of other tokens": (tiny(token_type=[1, 1]), "tokenizer.ggml.token_type", "9 numbers", "found 2"),
}
TOKENIZER = {
    "no tokens": (tiny(tokens=None), "tokenizer.ggml.tokens", "missing"),
    "tokens that are numbers": (tiny(tokens=3), "tokenizer.ggml.tokens", "array of strings"),
    "a token twice": (tiny(tokens=[*"abcdefgha"]), "tokens 0 and 8 are both 'a'"),
    "a token that is no text": (
        tiny(tokens=[*"abcdefgh", b"\xff"]),
        "string 8 of `tokenizer.ggml.tokens`",
        "UTF-8",
    ),
    "a token without an end": (tiny(tokens=[*"abcdefgh", "x" * 5000]), "string 8", "at most 4096 bytes"),
    "more tokens than embeddings": (
        tiny(tokens=[*SPECIAL, *"abcdefgh"], token_type=None),
        "11 tokens for 9 embeddings",
    ),
    "a merge of one": (tiny(merges=["ab"]), "a merge must be two tokens", "'ab'"),
    "a merge of no token": (tiny(merges=["a zz"]), "make no tokenizer"),
    "an end that is no token": (tiny(eos_token_id=9), "tokenizer.ggml.eos_token_id", "below the 9 tokens"),
    "tokens without an end": (tiny(tokens=[""] * (2**20 + 1)), "at most 1048576 tokens"),
    "another tokenizer": (tiny(model="bert"), "'bert'", "gpt2"),
    "another pre-tokenizer": (tiny(pre="klingon"), "'klingon'", "llama-bpe"),
    "no scores": (tiny(model="llama"), "a score for each token"),
}
KINDS = {
    CheckpointError: CHECKPOINT, UnsupportedError: UNSUPPORTED, ConfigError: CONFIG, TokenizerError: TOKENIZER,
}  # fmt: skip
REFUSED = {what: (kind, *case) for kind, cases in KINDS.items() for what, case in cases.items()}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(tmp_path, what):
    kind, data, *parts = REFUSED[what]
    with refused(kind, "bad.gguf", *parts):
        opened(tmp_path, data)


def test_experts_without_an_end(tmp_path):
    pairs = [pair("general.architecture", STRING, text("qwen3moe"))]
    data = container(pairs, [tensor("blk.0.ffn_up_exps.weight", (1, 1, 2000))], b"\0" * 8000)
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with refused(CheckpointError, "blk.0.ffn_up_exps.weight", "at most 1024 experts"):
        GgufWeights(path)


def errors_of(tmp_path, data):
    """What is said of a file, if it is refused; any other kind of error goes through."""
    try:
        opened(tmp_path, data)
    except DraftwingError as error:
        yield str(error)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    whole=st.sampled_from([TINY, SENTENCE_PIECE]),
    changes=st.lists(
        st.tuples(
            st.one_of(st.integers(0, HEADER), st.integers(0, len(TINY) - 1)),
            st.one_of(
                st.integers(0, 255).map(lambda value: bytes([value])),
                st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7, b"\0\0\0\0\0\0\0\x80", b"\x09\0\0\0"]),
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    cut=st.one_of(st.just(len(TINY)), st.integers(0, len(TINY))),
)
@example(whole=TINY, changes=[(TINY.index(b"tokenizer.ggml.tokens") + 33, b"\xff" * 8)], cut=len(TINY))
def test_any_change_is_read_or_refused(tmp_path, whole, changes, cut):
    data = bytearray(whole)
    for at, value in changes:
        data[at : at + len(value)] = value[: len(data) - at]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DraftwingWarning)  # where `tokenizer.ggml.pre` is gone
        refusal = next(iter(errors_of(tmp_path, bytes(data[:cut]))), "bad.gguf")
    assert "bad.gguf" in refusal


def peak_memory() -> int:
    """The most KB that the process has held since the last reset."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="this system resets no peaks of memory")
def test_a_kilobyte_takes_no_memory(tmp_path):
    path, num_read, began = tmp_path / "small.gguf", 0, time.perf_counter()
    for _, data, *_ in REFUSED.values():
        if len(data) >= 4096:
            continue
        path.write_bytes(data)
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_memory()
        with suppress(DraftwingError):
            read_all(path)
        assert peak_memory() - before < 8 * 1024
        num_read += 1
    assert num_read > 40
    assert time.perf_counter() - began < 60
