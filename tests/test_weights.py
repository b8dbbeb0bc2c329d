"""Opening checkpoints: what is read, and what every damaged one is told."""

import json

import pytest
import torch
from safetensors.torch import save_file

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
    """A context that expects a CheckpointError whose message has all the parts."""

    class Expect:
        def __enter__(self):
            return self

        def __exit__(self, kind, error, trace):
            assert kind is CheckpointError, f"expected CheckpointError, got {error!r}"
            for part in parts:
                assert part in str(error), f"{part!r} is not in {str(error)!r}"
            return True

    return Expect()


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


def test_get_refuses(single):
    files = WeightFiles(single)
    with refusal("weight model.norms.weight is missing among 4; the closest is model.norm.weight", "Download both"):
        files.get("model.norms.weight", torch.float32, (3,))
    with refusal("weight zzz is missing among 4. Does config.json belong"):
        files.get("zzz", torch.float32, None)
    with refusal("missing"):
        files.shape("zzz")
    with refusal("model.safetensors: model.embed_tokens.weight must have shape (3, 4), found (4, 3)", "config.json"):
        files.get("model.embed_tokens.weight", torch.float32, (3, 4))
    with refusal("packed must hold floating-point numbers", "found U8", "quantised", 'engine="transformers"'):
        files.get("packed", torch.float32)
    with refusal("model.norm.weight must hold integers or booleans, found BF16"):
        files.get("model.norm.weight", torch.int64)


def test_no_weights(tmp_path):
    with refusal("absent: expected a model folder, found none"):
        WeightFiles(tmp_path / "absent")
    with refusal("expected model.safetensors or model.safetensors.index.json, found no weights at all"):
        WeightFiles(tmp_path)
    (tmp_path / "weights.gguf").touch()
    with refusal("found weights.gguf. Give that file itself"):
        WeightFiles(tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    with refusal("found adapter_model.safetensors, a LoRA adapter. Merge it"):
        WeightFiles(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with refusal("found only pytorch_model.bin, which is pickled. Convert it: python -c", "save_pretrained"):
        WeightFiles(tmp_path)


def test_damaged_files(single):
    path = single / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:20], whole[:4], b"", b"\xff" * 64, whole + b"tail"):
        path.write_bytes(damaged)
        with refusal(
            "model.safetensors: expected a whole safetensors file, found a truncated or corrupt one of "
            f"{len(damaged)} bytes",
            "Download it again",
        ):
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
    with refusal(
        "model-00002-of-00002.safetensors: expected lost in it", "found it missing. Download shards and index"
    ):
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
    # Its sum overflows; it is finite all the same.
    check_finite("w", torch.full((64,), torch.finfo(dtype).max, dtype=dtype))
    for bad in ([float("nan")], [float("inf")], [-float("inf")], [float("inf"), -float("inf")]):
        tensor = torch.ones(10, dtype=dtype)
        tensor[2 : 2 + len(bad)] = torch.tensor(bad, dtype=dtype)
        with refusal(f"weight layer.w: expected finite numbers, found {len(bad)} of 10 that are NaN or infinite"):
            check_finite("layer.w", tensor)


def test_check_finite_takes_integers():
    check_finite("d2t", torch.tensor([1, 2]))
