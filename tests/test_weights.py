"""Opening checkpoints, and the errors of damaged ones."""

import json

import pytest
import torch
from safetensors.torch import save_file

from conftest import refused
from draftwing.errors import CheckpointError
from draftwing.models.weights import WeightFiles, check_finite

TENSORS = {
    "model.embed_tokens.weight": torch.arange(12.0).view(4, 3),
    "model.norm.weight": torch.ones(3, dtype=torch.bfloat16),
    "d2t": torch.tensor([1, 2, 3]),
    "packed": torch.tensor([1, 2], dtype=torch.uint8),
}


@pytest.fixture
def single(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    names = sorted(TENSORS)
    shards = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for file, part in shards.items():
        save_file({name: TENSORS[name] for name in part}, tmp_path / file)
    write_index(tmp_path, {name: file for file, part in shards.items() for name in part})
    return tmp_path


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(*parts):
    return refused(CheckpointError, *parts)


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_reads_every_tensor(layout, request):
    with WeightFiles(request.getfixturevalue(layout)) as files:
        assert files.keys() == sorted(TENSORS)
        assert "d2t" in files
        assert "d2" not in files
        for name, tensor in TENSORS.items():
            found = files.get(name)
            assert found.dtype == tensor.dtype
            assert found.equal(tensor)
            assert files.shape(name) == tuple(tensor.shape)
        assert files.get("model.norm.weight", torch.float64, (3,)).equal(torch.ones(3, dtype=torch.float64))
        assert files.get("d2t", torch.int32).dtype == torch.int32
        assert files.unused({"d2t", "model.norm.weight"}) == ["model.embed_tokens.weight", "packed"]
        assert files.unused(set(TENSORS)) == []
        kept = files.get("model.embed_tokens.weight", torch.float32)
    assert kept.equal(TENSORS["model.embed_tokens.weight"])
    with refusal("the weight files are closed"):
        files.get("d2t")


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "parts"),
    [
        (
            "model.norms.weight", torch.float32, (3,),
            ["weight model.norms.weight is missing among 4; the closest is model.norm.weight. Does", "Download both"],
        ),
        ("zzz", torch.float32, None, ["weight zzz is missing among 4. Does config.json belong"]),
        (
            "model.embed_tokens.weight", torch.float32, (3, 4),
            ["model.safetensors: model.embed_tokens.weight must have shape (3, 4), found (4, 3)", "config.json"],
        ),
        (
            "packed", torch.float32, None,
            ["packed must hold floating-point numbers", "found U8", "quantised", 'engine="transformers"'],
        ),
        ("model.norm.weight", torch.int64, None, ["model.norm.weight must hold integers or booleans, found BF16"]),
    ],
)  # fmt: skip
def test_get_refuses(name, dtype, shape, parts, single):
    with refusal(*parts):
        WeightFiles(single).get(name, dtype, shape)


def test_shape_refuses(single):
    with refusal("weight zzz is missing"):
        WeightFiles(single).shape("zzz")


def test_no_weights(tmp_path):
    with refusal("absent: expected a model folder, found none"):
        WeightFiles(tmp_path / "absent")
    with refusal("expected model.safetensors or model.safetensors.index.json, found no weights at all"):
        WeightFiles(tmp_path)
    for name, parts in (
        ("weights.gguf", ["found weights.gguf. Give that file itself"]),
        ("adapter_model.safetensors", ["found adapter_model.safetensors, a LoRA adapter. Give its base"]),
        ("pytorch_model.bin", ["only pytorch_model.bin, which is pickled. Convert it: python -c", "save_pretrained"]),
    ):
        (tmp_path / name).touch()
        with refusal(*parts):
            WeightFiles(tmp_path)


def test_damaged_files(single):
    path = single / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:20], whole[:4], b"", b"\xff" * 64, whole + b"tail"):
        path.write_bytes(damaged)
        with refusal("model.safetensors: ", f"a truncated or corrupt one of {len(damaged)} bytes", "Download it again"):
            WeightFiles(single)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with refusal("found a Git LFS pointer", "git lfs pull"):
        WeightFiles(single)
    path.unlink()
    path.symlink_to(single / "gone")
    with refusal("expected a weight file, found none (or a link to a file that is gone). Download it again"):
        WeightFiles(single)


def test_a_file_that_was_cut_short_after_it_was_opened(single):
    file = single / "model.safetensors"
    with WeightFiles(single) as files:
        assert files.stored("model.embed_tokens.weight").data.shape == (4, 3)
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 8)
        with refusal("model.safetensors", "model.embed_tokens.weight", "cut short", "Download it again"):
            files.stored("model.embed_tokens.weight")


def test_damaged_indices(sharded):
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    write_index(sharded, {**weight_map, "lost": "model-00002-of-00002.safetensors"})
    with refusal("model-00002-of-00002.safetensors: expected lost in it", "missing. Download shards and index"):
        WeightFiles(sharded)
    for outside in ("../model.safetensors", "/etc/passwd", "..", "a\\b", ""):
        write_index(sharded, {**weight_map, "lost": outside})
        with refusal(f"expected names of files in its folder, found {outside!r}"):
            WeightFiles(sharded)
    for broken in ("{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'):
        index.write_text(broken)
        with refusal("model.safetensors.index.json: expected", "Download it again"):
            WeightFiles(sharded)
    write_index(sharded, weight_map)
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with refusal("1 of 2 shards are missing, first model-00002-of-00002.safetensors. Download the model again"):
        WeightFiles(sharded)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_check_finite(dtype):
    check_finite("w", torch.ones(3, 4, dtype=dtype))
    check_finite("w", torch.empty(0, dtype=dtype))
    # The sum of finite numbers may overflow.
    check_finite("w", torch.full((64,), torch.finfo(dtype).max, dtype=dtype))
    for bad in ([float("nan")], [float("inf")], [-float("inf")], [float("inf"), -float("inf")]):
        tensor = torch.ones(10, dtype=dtype)
        tensor[2 : 2 + len(bad)] = torch.tensor(bad, dtype=dtype)
        with refusal(f"weight layer.w: expected finite numbers, found {len(bad)} of 10 that are NaN or infinite"):
            check_finite("layer.w", tensor)
    check_finite("d2t", torch.tensor([1, 2]))
