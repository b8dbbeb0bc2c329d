"""GGUF files: every family and format, compared with the checkpoint that they were written from."""

import dataclasses
import json
import math
import os
import shutil
import threading

import gguf
import numpy as np
import pytest
import torch
import transformers

import draftwing as dw
from conftest import add_tokenizer, refused
from draftwing.cpu.layout import BLOCKS
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.formats.gguf_folder import link_of, open_gguf
from draftwing.formats.gguf_weights import GgufWeights, import_gguf, open_weights
from draftwing.models.config import ModelConfig
from draftwing.text.tokenizer import Tokenizer
from gguf_files import (
    ARCHITECTURES,
    FURTHER,
    SHIFTED,
    architecture_of,
    changes_of,
    expert_by_expert,
    gguf_tensors,
    tensors_of,
    write,
)

FAMILIES = {
    "llama": {},
    "llama-bias-tied": {},
    "mistral-window": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3-moe": {"mlp_only_layers": [], "norm_topk_prob": True},
    "phi3": {},
}
# Families whose checkpoints have some tensors that files have in another form.
REARRANGED = (
    "granitemoe", "llama4", "deepseek-v2", "deepseek-v3", "qwen3.5", "qwen3.5-moe", "qwen3-next", "gemma4-moe"
)  # fmt: skip
EXPANDED = ["Q5_0", "Q5_1", "Q2_K", "Q3_K", "IQ3_S"]


@pytest.fixture(scope="session")
def source_of(folder_of):
    """A saved tiny model with a tokenizer."""

    def get(family="llama", **changes):
        usual = changes_of(family) if family in FURTHER else {"vocab_size": 300, **FAMILIES.get(family, {})}
        folder = folder_of(family, **{**usual, **changes})
        if not (folder / "tokenizer.json").exists():
            add_tokenizer(folder)
        return folder

    return get


@pytest.fixture(scope="session")
def wide(source_of):
    """A model whose rows are whole blocks of every format."""
    return source_of(hidden_size=256, intermediate_size=512, num_hidden_layers=1)


def config_of(folder):
    return ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("family", [*FAMILIES, *FURTHER])
def test_a_file_is_its_checkpoint_again(source_of, tmp_path, family):
    source = source_of(family)
    shifts = architecture_of(json.loads((source / "config.json").read_text())) in SHIFTED
    folder = open_gguf(write(source, tmp_path / "m.gguf"))
    ours, theirs = config_of(folder), config_of(source)
    same = {"eos_ids": theirs.eos_ids, "pad_id": theirs.pad_id, "dtype": theirs.dtype}
    if family in ("mixtral", "mistral-window"):  # the same model; llama.cpp knows one name for all of them
        same["model_type"] = theirs.model_type
    assert dataclasses.replace(ours, **same) == theirs
    assert ours.eos_ids == (2,)
    expected = expert_by_expert(tensors_of(source)) if family == "gpt-oss" else tensors_of(source)
    with open_weights(folder) as weights:
        if family in REARRANGED:
            expected = {name: weight for name, weight in expected.items() if name in weights}
        else:
            assert weights.keys() == sorted(expected)
        for name, weight in expected.items():
            assert weights.shape(name) == tuple(weight.shape)
            found = weights.get(name, torch.float32, tuple(weight.shape))
            if name.endswith("A_log") or (shifts and name.endswith("norm.weight")):  # -exp(w) or 1 + w was rounded
                assert (found - weight).abs().max() <= torch.finfo(torch.float32).eps
            else:
                assert torch.equal(found, weight), name
            if weight.ndim == 2:
                stored = weights.stored(name)
                assert (stored.format, stored.num_in) == ("float32", weight.shape[1])
                assert torch.equal(stored.data, weight), name
        last = next(name for name in expected if name.endswith("norm.weight") and "layers" not in name)
        assert weights.unused(set(weights.keys()) - {last}) == [last]


@pytest.mark.parametrize(("family", "architecture"), [("qwen2", "qwen2vl"), ("qwen3-moe", "qwen3vlmoe")])
def test_text_models_of_multimodal_ones(source_of, tmp_path, monkeypatch, family, architecture):
    source = source_of(family)
    monkeypatch.setitem(ARCHITECTURES, json.loads((source / "config.json").read_text())["model_type"], architecture)

    def change(writer):
        writer.add_rope_dimension_sections([2, 1, 1, 0])
        if architecture == "qwen3vlmoe":
            writer.add_num_deepstack_layers(3)

    folder = open_gguf(write(source, tmp_path / "m.gguf", change=change))
    assert replace_ids(config_of(folder)) == replace_ids(config_of(source))
    with open_weights(folder) as weights:
        assert weights.keys() == sorted(tensors_of(source))


def replace_ids(config):
    return dataclasses.replace(config, eos_ids=(), pad_id=None, dtype=None)


@pytest.mark.parametrize("family", ["qwen2", "mixtral", "gpt-oss", "glm"])
def test_tensors_that_the_converter_fused(source_of, tmp_path, family):
    """Adjacent pairs, biases, experts and biases of experts; keys of half the queries' width, and of all."""
    source = source_of(family, **({"num_key_value_heads": 4} if family == "qwen2" else {}))
    plain, fused = (write(source, tmp_path / f"{fuses}.gguf", is_fused=fuses) for fuses in (False, True))
    with GgufWeights(plain) as theirs, GgufWeights(fused) as ours:
        assert ours.keys() == theirs.keys()
        for name in ours.keys():  # noqa: SIM118
            assert torch.equal(ours.get(name), theirs.get(name)), name
            if len(ours.shape(name)) == 2:
                assert torch.equal(ours.stored(name).data, theirs.stored(name).data), name
    assert config_of(open_gguf(fused)) == config_of(open_gguf(plain))

    def change(writer):
        writer.add_tensor("blk.0.attn_qkv.weight", np.zeros((3, 32), np.float32))

    other = write(source, tmp_path / "other.gguf", change=change, keep=lambda name: ".attn_" not in name)
    with refused(CheckpointError, "blk.0.attn_qkv.weight must hold attn_q, attn_k, attn_v, found shape [3, 32]"):
        GgufWeights(other)


@pytest.mark.parametrize("counts", [[0, 0, 0], [0, 1, 2], [1, 0], 1])
def test_layers_of_lfm2_have_no_kv_heads_or_one_number_of_them(source_of, tmp_path, counts):
    def change(writer):
        del writer.kv_data[0]["lfm2.attention.head_count_kv"]
        writer.add_head_count_kv(counts)

    with pytest.raises((CheckpointError, ConfigError), match=r"lfm2\.attention\.head_count_kv"):
        open_gguf(write(source_of("lfm2"), tmp_path / "m.gguf", change=change))


STRETCHED = {"factor": 32.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **STRETCHED},
    ],
)
def test_a_context_that_is_stretched(source_of, tmp_path, rope):
    source = source_of("llama", head_dim=64, rope_parameters={"rope_theta": 500000.0, **rope})
    model = transformers.AutoModelForCausalLM.from_pretrained(source)

    def change(writer):
        if rope["rope_type"] == "llama3":
            usual = 1 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
            writer.add_tensor("rope_freqs.weight", (usual / model.model.rotary_emb.inv_freq).float().numpy())

    folder = open_gguf(write(source, tmp_path / "m.gguf", change=change))
    assert config_of(folder).rope == config_of(source).rope
    with open_weights(folder) as weights:
        assert weights.keys() == sorted(tensors_of(source))


def test_phi3_that_turns_a_part_of_a_head(source_of, tmp_path):
    source = source_of("phi3", hidden_size=64, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.75})
    rope = config_of(open_gguf(write(source, tmp_path / "m.gguf"))).rope
    assert (rope.head_dim, rope.rotary_dim) == (16, 12)


@pytest.mark.parametrize("kind", [*BLOCKS, *EXPANDED, "F16", "BF16"])
def test_every_format_is_what_the_package_says(wide, tmp_path, kind):
    file = write(wide, tmp_path / "m.gguf", lambda name, weight: kind)
    reader = gguf.GGUFReader(file)
    known = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    with GgufWeights(file) as weights:
        down = weights.get("model.layers.0.mlp.down_proj.weight", torch.float32)
        assert np.array_equal(down.numpy(), known["blk.0.ffn_down.weight"])
        key = torch.from_numpy(known["blk.0.attn_k.weight"]).view(2, 32, 2, 256)
        usual = torch.cat((key[:, :, 0], key[:, :, 1]), dim=1).reshape(-1, 256)
        assert torch.equal(weights.get("model.layers.0.self_attn.k_proj.weight", torch.float32), usual)
        for name, value in (("mlp.down_proj", down), ("self_attn.k_proj", usual)):
            stored = weights.stored(f"model.layers.0.{name}.weight", tuple(value.shape))
            assert torch.equal(stored.expand(), value)
            assert stored.was == (kind if kind in EXPANDED else "")
            expected = {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32" if kind in EXPANDED else kind)
            assert stored.format == expected
        half = weights.get("model.layers.0.mlp.down_proj.weight", torch.bfloat16)
        assert torch.equal(half, down.bfloat16())
        joined = torch.cat(list(weights.pieces("model.layers.0.mlp.down_proj.weight", torch.float32)))
        assert torch.equal(joined, down)


@pytest.mark.parametrize("kind", ["Q4_1", "MXFP4"])
def test_an_expert_is_a_piece_of_its_tensor(kind, source_of, tmp_path):
    source = source_of("mixtral", hidden_size=64, intermediate_size=64)
    file = write(source, tmp_path / "m.gguf", lambda name, weight: kind)
    stacked = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for old, new in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        tensor = stacked[f"blk.1.ffn_{old}_exps.weight"]
        known = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        with GgufWeights(file) as weights:
            for expert in range(4):
                name = f"model.layers.1.block_sparse_moe.experts.{expert}.{new}.weight"
                assert weights.shape(name) == (64, 64)
                stored = weights.stored(name)
                assert stored.format == kind
                assert torch.equal(stored.expand(), known[expert])
                assert torch.equal(weights.get(name), known[expert])


def test_matrices_are_the_files_memory_and_can_be_given_back(wide, tmp_path):
    file = write(wide, tmp_path / "m.gguf", lambda name, weight: "Q8_0")
    weights = GgufWeights(file)
    stored = weights.stored("model.layers.0.mlp.up_proj.weight")
    again = weights.stored("model.layers.0.mlp.up_proj.weight")
    assert stored.data.data_ptr() == again.data.data_ptr()
    before = stored.data.clone()
    weights.drop(stored)
    assert torch.equal(stored.data, before)
    weights.close()
    assert torch.equal(stored.data, before)  # what was read stays
    with refused(CheckpointError, "closed"):
        weights.get("model.norm.weight")


def test_numbers_that_do_not_lie_as_the_processor_wants_them(source_of, tmp_path):
    source = source_of()
    file = write(source, tmp_path / "m.gguf", change=lambda writer: setattr(writer, "data_alignment", 1))
    # The writer does not say so by itself.
    file = write(source, file, change=lambda writer: writer.add_custom_alignment(1))
    with GgufWeights(file) as weights:
        for name, weight in tensors_of(source).items():
            assert torch.equal(weights.get(name), weight)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_transformers_reads_the_same(source_of, tmp_path, family):
    # It takes head widths of qwen3 for 128 whatever the file says, and phi3's padding for 32000 where it says nothing.
    source = source_of(family, **({"head_dim": 128} if family == "qwen3" else {}))
    kind = lambda name, weight: "BF16" if "ffn" in name else "F32"  # noqa: E731
    file = write(source, tmp_path / "m.gguf", kind, change=lambda writer: writer.add_pad_token_id(0))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    with GgufWeights(file) as weights:
        theirs = {name: weight for name, weight in model.state_dict().items() if name in weights}
        assert sorted(theirs) == weights.keys()
        for name, weight in theirs.items():
            assert torch.equal(weights.get(name, torch.float32), weight), name


def test_a_split_model(source_of, tmp_path):
    source = source_of("llama", tie_word_embeddings=True)
    write(source, tmp_path / "m.gguf", split_max_tensors=10)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 1
    expected = tensors_of(source)
    with open_weights(open_gguf(parts[0])) as weights:
        assert weights.keys() == sorted(expected)
        assert all(torch.equal(weights.get(name), weight) for name, weight in expected.items())
    with refused(CheckpointError, parts[1].name, "later part", parts[0].name):
        open_gguf(parts[1])
    (tmp_path / "other.gguf").write_bytes(parts[0].read_bytes())
    with refused(CheckpointError, "other.gguf", "must be called like"):
        open_gguf(tmp_path / "other.gguf")
    names = [[info.name for info in gguf.GGUFReader(part).tensors] for part in parts[:2]]
    first, second = next((a, b) for a in names[0] for b in names[1] if len(a) == len(b))
    whole = parts[1].read_bytes()
    parts[1].write_bytes(whole.replace(second.encode(), first.encode()))
    with refused(CheckpointError, parts[1].name, "an earlier part has tensor", first):
        GgufWeights(parts[0])
    parts[1].write_bytes(whole)
    shutil.copy(parts[1], parts[2])
    with refused(CheckpointError, parts[2].name, "split.no"):
        GgufWeights(parts[0])
    parts[2].unlink()
    with refused(CheckpointError, parts[2].name, "missing"):
        GgufWeights(parts[0])


def test_the_folder_is_made_once_and_anew_for_another_file(source_of, tmp_path):
    file = write(source_of(), tmp_path / "my model.gguf")
    folder = open_gguf(file)
    assert folder.name.startswith("my_model-")
    assert link_of(folder) == file
    assert (folder / "config.json").stat().st_mtime_ns == (open_gguf(file) / "config.json").stat().st_mtime_ns
    (folder / "tokenizer.json").unlink()
    assert open_gguf(file) == folder
    assert (folder / "tokenizer.json").exists()
    os.utime(file, ns=(1, 1))
    assert open_gguf(file) != folder
    assert link_of(tmp_path) is None
    file.unlink()
    with refused(CheckpointError, "model.gguf", "expected a link"):
        open_weights(folder)


def test_a_damaged_folder_is_written_again(source_of, tmp_path):
    file = write(source_of(), tmp_path / "m.gguf")
    folder = open_gguf(file)
    whole = {path.name: path.read_bytes() for path in folder.iterdir() if not path.is_symlink()}
    for name, content in whole.items():
        for damage in (b"", content[: len(content) // 2], bytes([content[0] ^ 1]) + content[1:]):
            (folder / name).write_bytes(damage)
            assert open_gguf(file) == folder
            assert (folder / name).read_bytes() == content
    (folder / "model.gguf").unlink()
    (folder / "model.gguf").symlink_to(tmp_path / "other.gguf")
    assert link_of(open_gguf(file)) == file


def test_folders_of_files_that_are_gone_go_with_the_next_new_one(source_of, tmp_path):
    gone, there = write(source_of(), tmp_path / "gone.gguf"), write(source_of(), tmp_path / "there.gguf")
    old, kept = open_gguf(gone), open_gguf(there)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.gguf").symlink_to(tmp_path / "nothing")
    link, other = old.parent / "link", old.parent / "other"
    link.symlink_to(elsewhere)
    other.mkdir(exist_ok=True)
    gone.unlink()
    assert open_gguf(there) == kept
    assert old.exists()
    new = open_gguf(write(source_of(), tmp_path / "new.gguf"))
    assert not old.exists()
    assert all(each.exists() for each in (new, kept, other))
    assert (elsewhere / "model.gguf").is_symlink()
    link.unlink()
    other.rmdir()


def test_a_file_that_was_cut_short_after_it_was_opened(source_of, tmp_path):
    file = write(source_of(), tmp_path / "short.gguf")
    with GgufWeights(file) as weights:
        os.truncate(file, file.stat().st_size // 2)
        with refused(CheckpointError, "short.gguf", "cut short", "Download the file again"):
            weights.get("model.embed_tokens.weight")


def test_many_make_one_folder(source_of, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTWING_CACHE", str(tmp_path / "cache"))  # what others are making is not seen there
    file, found = write(source_of(), tmp_path / "race.gguf"), []
    threads = [threading.Thread(target=lambda: found.append(open_gguf(file))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    files = "config.json files.sha256 generation_config.json model.gguf tokenizer.json tokenizer_config.json"
    assert sorted(path.name for path in found[0].iterdir()) == files.split()
    assert not [path for path in found[0].parent.iterdir() if path.name.startswith(".")]


def test_a_cache_that_cannot_be_written(source_of, tmp_path, monkeypatch):
    file = write(source_of(), tmp_path / "m.gguf")
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("DRAFTWING_CACHE", str(tmp_path / "cache"))
    folder = open_gguf(file)
    assert tmp_path not in folder.parents
    assert open_gguf(file) == folder
    assert Tokenizer(folder).encode("def")[0] == 1


def test_the_imported_folder_is_the_checkpoint(source_of, tmp_path):
    source, out, progress = source_of(), tmp_path / "out", []
    out.mkdir()
    found = import_gguf(write(source, tmp_path / "m.gguf"), out, on_progress=lambda *at: progress.append(at))
    expected = tensors_of(source)
    assert (found.tensors, found.dtype, found.formats) == (len(expected), "float32", {"F32": len(expected)})
    assert progress[-1] == (found.num_bytes, found.num_bytes)
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("family", ["llama-bias-tied", "mixtral", "phi3"])
def test_a_file_writes_the_checkpoints_text(source_of, tmp_path, family):
    source = source_of(family)
    folder = import_gguf(write(source, tmp_path / "m.gguf"), tmp_path / "out").folder
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ours = dw.load(str(tmp_path / "m.gguf"), draft="lookup")
    ids = ours.tokenizer.encode("def add(a")
    expected = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False, eos_token_id=2)[0, len(ids) :]
    assert list(ours.generate(["def add(a"], max_tokens=16)[0].token_ids) == expected.tolist()
    assert config_of(folder) == config_of(open_gguf(tmp_path / "m.gguf"))


# Whose config.json has settings of their own.
UNUSUAL = ["gemma2-capped", "gemma3", "cohere2", "granite", "hunyuan", "ministral3"]
UNUSUAL += ["olmo3", "lfm2", "exaone4", "smollm3", "stablelm"]


@pytest.mark.parametrize("family", UNUSUAL)
def test_transformers_computes_the_same_from_an_import(source_of, tmp_path, family):
    source, ids = source_of(family), torch.arange(5, 25)[None]
    folder = import_gguf(write(source, tmp_path / "m.gguf"), tmp_path / "out").folder
    logits = []
    for each in (folder, source):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            each, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert torch.allclose(*logits, rtol=0, atol=1e-5 * float(logits[1].abs().max()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_import_into_shards_of_16_bits(source_of, tmp_path, dtype):
    source = source_of("mixtral")
    file = write(source, tmp_path / "m.gguf", lambda name, weight: "F32")
    import_gguf(file, tmp_path / "out", dtype, shard_bytes=20000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    from draftwing.models.weights import WeightFiles

    with WeightFiles(tmp_path / "out") as files:
        expected = tensors_of(source)
        assert files.keys() == sorted(expected)
        for name, weight in expected.items():
            assert torch.equal(files.get(name), weight.to(getattr(torch, dtype)))


def test_an_import_that_is_refused_leaves_nothing(source_of, tmp_path, monkeypatch):
    file = write(source_of(), tmp_path / "m.gguf")
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    with refused(CheckpointError, "full", "expected a new or an empty folder"):
        import_gguf(file, full)
    with refused(ConfigError, "float64", "float32"):
        import_gguf(file, tmp_path / "out", "float64")
    for family, part in (
        ("gpt-oss", "all experts in one tensor"),
        ("gemma4-moe", "all experts in one tensor"),
        ("deepseek-v3", "one matrix for latent keys and values"),
        ("qwen3-next", "other matrices of the gated delta rule"),
    ):
        other = write(source_of(family), tmp_path / f"{family}.gguf")
        with refused(UnsupportedError, f"{family}.gguf", part, "Use the GGUF file itself"):
            import_gguf(other, tmp_path / "out")
        other.unlink()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with refused(CheckpointError, "out", "the disk has 0.00 GB left"):
        import_gguf(file, tmp_path / "out")
    monkeypatch.undo()

    def fails(done, total):
        raise OSError(28, "No space left on device")

    with refused(CheckpointError, "the disk is full"):
        import_gguf(file, tmp_path / "out", on_progress=fails)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "m.gguf"]
    assert (full / "notes.txt").read_text() == "mine"


def test_an_import_counts_the_room_that_a_killed_one_took(source_of, tmp_path, monkeypatch):
    file, leftover = write(source_of(), tmp_path / "m.gguf"), tmp_path / f".out.0.{2**31 - 1}.partial"
    leftover.mkdir()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0 if leftover.exists() else 10**9))
    assert import_gguf(file, tmp_path / "out").num_bytes > 0


def test_an_import_for_a_user_who_does_not_exist(source_of, tmp_path, monkeypatch):
    """A shell takes such a path as it is."""
    monkeypatch.chdir(tmp_path)
    import_gguf(write(source_of(), tmp_path / "m.gguf"), "~nobody-has-this-name/out")
    assert (tmp_path / "~nobody-has-this-name" / "out" / "model.safetensors").exists()


def change_number(file, tensor, at, number):
    """Return a copy of a file with another number in a tensor, ``at`` bytes from its start."""
    start = next(each.data_offset for each in gguf.GGUFReader(file).tensors if each.name == tensor) + at
    data = bytearray(file.read_bytes())
    data[start : start + number.nbytes] = number.tobytes()
    bad = file.with_name("bad.gguf")
    bad.write_bytes(data)
    return bad


def test_an_import_that_float16_cannot_hold(source_of, tmp_path):
    file = change_number(write(source_of(), tmp_path / "m.gguf"), "output.weight", 0, np.float32(1e6))
    with refused(CheckpointError, "lm_head.weight", "finite", "bfloat16"):
        import_gguf(file, tmp_path / "out", "float16")
    import_gguf(file, tmp_path / "out", "bfloat16")


@pytest.mark.parametrize(("at", "value"), [(0, np.inf), (2, np.nan), (20, -np.inf)])
def test_a_scale_that_is_not_finite(wide, tmp_path, at, value):
    file = write(wide, tmp_path / "m.gguf", lambda name, weight: "Q4_1")
    bad = change_number(file, "blk.0.ffn_down.weight", at, np.float16(value))
    with refused(CheckpointError, "mlp.down_proj", "finite numbers"):
        import_gguf(bad, tmp_path / "out")


def test_what_is_missing_is_said(source_of, tmp_path):
    with GgufWeights(write(source_of(), tmp_path / "m.gguf")) as weights:
        with refused(CheckpointError, "m.gguf", "model.norm.wight is missing", "model.norm.weight"):
            weights.get("model.norm.wight")
        with refused(CheckpointError, "model.norm.weight", "(33,)", "(32,)"):
            weights.get("model.norm.weight", shape=(33,))
        with refused(CheckpointError, "model.norm.weight", "must be a matrix"):
            weights.stored("model.norm.weight")
        with refused(CheckpointError, "model.norm.weight", "floating-point"):
            weights.get("model.norm.weight", torch.int64)


def test_experts_of_old_files_are_tensors_of_their_own(source_of, tmp_path):
    source = source_of("mixtral")
    single = {}
    for name, weight in gguf_tensors(source).items():
        if "_exps" in name:
            single.update({name.replace("_exps", f".{index}"): weight[index] for index in range(len(weight))})

    def change(writer):
        for name, weight in single.items():
            writer.add_tensor(name, weight)

    file = write(source, tmp_path / "m.gguf", change=change, keep=lambda name: "_exps" not in name)
    with GgufWeights(file) as weights:
        assert weights.keys() == sorted(tensors_of(source))
        assert all(torch.equal(weights.get(name), weight) for name, weight in tensors_of(source).items())


def extra(name, *values):
    return lambda writer: writer.add_tensor(name, np.array(values, np.float32))


ATTENTION_FACTOR = "olmo2.rope.scaling.attn_factor"


def without(key):
    return lambda writer: writer.kv_data[0].pop(key)


def without_yarn(writer):
    """Change Ministral 3's metadata to those of Mistral Small 3, which has the same architecture in files."""
    for key in [key for key in writer.kv_data[0] if ".rope.scaling." in key or "temperature" in key]:
        del writer.kv_data[0][key]


TURNS = 8192 * 5e5 ** (-np.arange(0, 32, 2) / 32) / (2 * math.pi)


def stating(key, value, kind="UINT32"):
    """A change of a file that puts a value in a key."""
    return lambda writer: writer.kv_data[0].update({key: gguf.GGUFValue(value, gguf.GGUFValueType[kind])})


@pytest.mark.parametrize(
    ("family", "change", "setting", "expected"),
    [
        ("gemma2-capped", stating("gemma2.block_count", 3), "query_pre_attn_scalar", 32),
        ("gemma2-capped", stating("gemma2.block_count", 46), "query_pre_attn_scalar", 8),
        ("gemma3", stating("gemma3.block_count", 62), "query_pre_attn_scalar", 8),
        ("gemma2-capped", without("gemma2.attention.sliding_window"), "sliding_window", 4096),
        ("gemma2-capped", without("gemma2.final_logit_softcapping"), "final_logit_softcapping", None),
        ("gemma3", without("gemma3.attention.sliding_window"), "layer_types", ["full_attention"] * 7),
        ("gemma3", stating("gemma3.attention.sliding_window_pattern", 1), "layer_types", ["full_attention"] * 7),
        ("gemma3", without("gemma3.rope.freq_base_swa"), ("rope_parameters", "sliding_attention", "rope_theta"), 1e4),
        ("olmo3", without("olmo2.rope.freq_base_swa"), ("rope_parameters", "sliding_attention", "rope_theta"), 5e5),
        ("olmo3", stating(ATTENTION_FACTOR, 0.1 * math.log(4) + 1, "FLOAT32"), "model_type", "olmo3"),
        ("exaone4", without("exaone4.attention.sliding_window"), "sliding_window", None),
        ("granite", without("granite.attention.scale"), "attention_multiplier", 32**-0.5),
        ("granite", stating("granite.rope.scaling.finetuned", True, "BOOL"), "model_type", "granite"),
        ("stablelm", stating("stablelm.use_parallel_residual", True, "BOOL"), "model_type", "stablelm"),
        ("qwen2-moe", stating("qwen2moe.expert_weights_norm", True, "BOOL"), "norm_topk_prob", True),
        ("olmoe", stating("olmoe.expert_gating_func", 1), "norm_topk_prob", False),
        ("qwen2", stating("qwen2.attention.sliding_window", 256), "use_sliding_window", False),
        ("ministral3", without_yarn, "model_type", "mistral"),
        ("llama4", extra("rope_freqs.weight", *np.where(TURNS > 1, 1, 8)), ("rope_scaling", "high_freq_factor"), 1.0),
        ("llama4", stating("llama4.expert_count", 128), "use_qk_norm", False),
        ("deepseek-v2", without("deepseek2.rope.scaling.yarn_log_multiplier"), ("rope_scaling", "mscale"), None),
        ("qwen3-next", without("qwen3next.full_attention_interval"), "layer_types", ["linear_attention"] * 3),
    ],
)
def test_what_a_file_leaves_to_llama_cpp(source_of, tmp_path, family, change, setting, expected):
    folder = open_gguf(write(source_of(family), tmp_path / "m.gguf", change=change))
    config = json.loads((folder / "config.json").read_text())
    for key in (setting,) if isinstance(setting, str) else setting:
        config = config.get(key)
    assert config == expected


@pytest.mark.parametrize(
    ("family", "change", "parts"),
    [
        ("llama", stating("llama.final_logit_softcapping", 30.0, "FLOAT32"), ("llama.final_logit_softcapping` 30.0",)),
        ("qwen2", stating("qwen2.attention.sliding_window", 64), ("qwen2.attention.sliding_window` 64",)),
        ("gemma3", stating("gemma3.attention.scale", 0.1, "FLOAT32"), ("gemma3.attention.scale` 0.1",)),
        ("gemma3", stating("gemma3.rope.local.freq_base", 1e4, "FLOAT32"), ("gemma3.rope.local.freq_base` 10000.0",)),
        ("olmo3", stating(ATTENTION_FACTOR, 1.5, "FLOAT32"), ("olmo2.rope.scaling.attn_factor` 1.5",)),
        ("cohere2", stating("cohere2.rope.freq_base_swa", 5.0, "FLOAT32"), ("base_swa` 5.0", "freq_base` 10000.0")),
        (
            "granite",
            stating("granite.rope.scaling.finetuned", False, "BOOL"),
            ("granite.rope.scaling.finetuned` False",),
        ),
        ("olmoe", stating("olmoe.attention.clamp_kqv", 8.0, "FLOAT32"), ("olmoe.attention.clamp_kqv` 8.0",)),
        ("olmoe", stating("olmoe.expert_gating_func", 2), ("olmoe.expert_gating_func` 2",)),
        ("glm4", lambda writer: writer.add_rope_dimension_sections([8, 12, 12, 0]), ("glm4.rope.dimension_sections",)),
        ("stablelm", extra("blk.0.attn_q_norm.weight", *[1] * 32), ("blk.0.attn_q_norm.weight", "stablelm")),
        ("llama4", stating("llama4.attention.sliding_window", 0), ("llama4.attention.sliding_window` 0",)),
        ("gemma4-moe", stating("gemma4.expert_gating_func", 2), ("gemma4.expert_gating_func` 2",)),
        ("gemma4", lambda writer: writer.add_feed_forward_length([64, 64, 96, 128, 128, 128]), ("widths [64, 64, 96",)),
        ("qwen3.5", stating("qwen35.ssm.inner_size", 64), ("qwen35.ssm.inner_size` 64", "time_step_rank` 6")),
        ("deepseek-v2", stating("deepseek2.expert_weights_norm", True, "BOOL"), ("deepseek2.expert_weights_norm",)),
        (
            "deepseek-v3",
            stating("deepseek2.attention.temperature_scale", 0.1, "FLOAT32"),
            ("deepseek2.attention.temperature_scale` 0.1",),
        ),
    ],
)
def test_what_changes_the_computation_is_honoured_or_refused(source_of, tmp_path, family, change, parts):
    file = write(source_of(family), tmp_path / "m.gguf", change=change)
    with refused(UnsupportedError, "m.gguf", *parts, "Use the model's Hugging Face folder"):
        open_gguf(file)


def test_latent_attention_as_files_had_it_at_first(source_of, tmp_path):
    """One matrix for keys and values, and the widths of the model's own heads."""
    source = source_of("deepseek-v3")
    tensors = {name: weight for name, weight in tensors_of(source).items() if "kv_b_proj" in name}

    def change(writer):
        for name in ("key_length", "value_length"):
            pairs = writer.kv_data[0]
            pairs[f"deepseek2.attention.{name}"] = pairs.pop(f"deepseek2.attention.{name}_mla")
        for name, weight in tensors.items():
            writer.add_tensor(f"blk.{name.split('.')[2]}.attn_kv_b.weight", weight.numpy())

    is_new = ("attn_k_b", "attn_v_b")
    file = write(source, tmp_path / "m.gguf", change=change, keep=lambda name: not any(part in name for part in is_new))
    folder = open_gguf(file)
    assert config_of(folder).latent == config_of(source).latent
    with open_weights(folder) as weights:
        assert all(torch.equal(weights.get(name), weight) for name, weight in tensors.items())

    def flat(writer):
        writer.add_tensor("blk.0.attn_k_b.weight", np.zeros((128, 32), np.float32))

    file = write(source, tmp_path / "flat.gguf", change=flat, keep=lambda name: "attn_k_b" not in name)
    with refused(CheckpointError, "blk.0.attn_k_b.weight must hold the matrices of all heads, found shape [128, 32]"):
        GgufWeights(file)


def test_gemma4_needs_the_pattern_of_its_windows(source_of, tmp_path):
    change = without("gemma4.attention.sliding_window_pattern")
    with refused(ConfigError, "required metadata `gemma4.attention.sliding_window_pattern` is missing"):
        open_gguf(write(source_of("gemma4"), tmp_path / "m.gguf", change=change))


LONGROPE = gguf.RopeScalingType.LONGROPE
TWICE = np.ones((32, 32), np.float32)


@pytest.mark.parametrize(
    ("kind", "change", "parts"),
    [
        (UnsupportedError, lambda w: w.add_string("general.architecture", "mamba"), ("'mamba'", "one of llama")),
        (UnsupportedError, lambda w: w.add_type("adapter"), ('"adapter"',)),
        (ConfigError, lambda w: w.add_nextn_predict_layers(3), ("llama.nextn_predict_layers` 3 leaves no layers",)),
        (UnsupportedError, lambda w: w.add_quantization_version(1), ("version 1",)),
        (UnsupportedError, lambda w: w.add_head_count([4, 4, 2]), ("llama.attention.head_count", "differs")),
        (ConfigError, lambda w: w.add_head_count(0), ("llama.attention.head_count", "from 1")),
        (ConfigError, lambda w: w.add_head_count(3), ("llama.embedding_length", "key_length")),
        (ConfigError, lambda w: w.add_head_count_kv(3), ("num_key_value_heads",)),
        (UnsupportedError, lambda w: w.add_value_length(16), ("keys of 8", "values of 16")),
        (CheckpointError, lambda w: w.add_embedding_length(36), ("token_embd.weight", "[300, 32]")),
        (ConfigError, lambda w: w.add_block_count(2**31), ("llama.block_count", "10000")),
        (ConfigError, lambda w: w.add_layer_norm_rms_eps(float("nan")), ("layer_norm_rms_epsilon", "finite")),
        (ConfigError, lambda w: w.add_string("llama.context_length", "8k"), ("llama.context_length", "8k")),
        (UnsupportedError, lambda w: w.add_rope_dimension_count(4), ("RoPE turns 4", "8")),
        (UnsupportedError, lambda w: w.add_rope_scaling_type(LONGROPE), ("longrope",)),
        (UnsupportedError, extra("rope_freqs.weight", 1, 2, 3, 8), ("rope_freqs.weight", "Llama 3")),
        (CheckpointError, extra("rope_freqs.weight", 1, 2, 3), ("rope_freqs.weight", "4 numbers", "[3]")),
        (UnsupportedError, extra("rope_factors_long.weight", 1, 1, 1, 1), ("longrope",)),
        (CheckpointError, lambda w: w.add_tensor("blk.00.attn_q.weight", TWICE), ("both model.layers.0.self_attn.q",)),
    ],
)
def test_metadata_that_cannot_be_meant(source_of, tmp_path, kind, change, parts):
    def replace(writer):
        before = dict(writer.kv_data[0])
        change(writer)
        writer.kv_data[0] = {**before, **writer.kv_data[0]}

    file = write(source_of(), tmp_path / "m.gguf", change=replace)
    with refused(kind, "m.gguf", *parts):
        open_weights(open_gguf(file))


def test_what_is_no_gguf_file(tmp_path):
    with refused(CheckpointError, "absent.gguf", "found none"):
        open_gguf(tmp_path / "absent.gguf")
    for name, data in (("empty", b""), ("text", b"hello"), ("lfs", b"version https://git-lfs.github.com/spec/v1\n")):
        path = tmp_path / name
        path.write_bytes(data)
        with refused(CheckpointError, name, "expected a GGUF file"):
            open_gguf(path)
        with refused(CheckpointError, name, "git lfs pull" if name == "lfs" else "GGUF"):
            GgufWeights(path)
    with refused(CheckpointError, str(tmp_path)):
        open_gguf(tmp_path)
