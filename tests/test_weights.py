"""Opening checkpoints: what is read, and what every damaged one is told."""

import importlib
import json
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub
from safetensors.torch import save_file

from draftwing.errors import CheckpointError
from draftwing.model.weights import WeightFiles, check_finite, resolve

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
    with refusal("found weights.gguf. Save the model in Hugging Face format"):
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
        with refusal(f"expected the names of files beside it, found {outside!r}"):
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


def test_resolve_local(tmp_path, monkeypatch):
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve(tmp_path, "main") == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve("org/name").resolve() == tmp_path / "org" / "name"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/org").resolve() == tmp_path / "org"
    (tmp_path / "file").touch()
    with refusal("file: expected a model folder, found a file. Give the folder"):
        resolve("file")


@pytest.mark.parametrize(
    "path", ["./absent", "../absent", "/absent/model", "~/absent", "a/b/c", "a\\b", "", "org/", "-x"]
)
def test_resolve_does_not_ask_the_hub_for_paths(path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with refusal("expected a model folder or a Hugging Face Hub id such as org/name, found no such folder. Check the"):
        resolve(path)


def test_resolve_hub(tmp_path, monkeypatch):
    asked = {}

    def download(repo, **options):
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/some-model.v1", "abc") == tmp_path
    assert (asked["repo"], asked["revision"]) == ("org/some-model.v1", "abc")
    files = [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/params.json",
        "onnx/model.safetensors",
    ]
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == files[:6]


def response(status):
    return SimpleNamespace(headers={}, request=None, status_code=status)


# The HTTP library differs with the client's version.
http = importlib.import_module(hub.HfHubHTTPError.__bases__[0].__module__.split(".")[0])
ConnectError = getattr(http, "ConnectError", None) or http.ConnectionError

FAILURES = [
    (hub.RepositoryNotFoundError("404", response=response(404)), "no such model on the Hub. Check the spelling"),
    (hub.GatedRepoError("403", response=response(403)), "gated. Accept its terms on its page"),
    (hub.RevisionNotFoundError("404", response=response(404)), "the Hub model has no revision 'v9'. Check the branch"),
    (hub.HFValidationError("bad id"), "it is not a valid Hub id (bad id)"),
    (hub.LocalEntryNotFoundError("no\nnet"), "the Hub cannot be reached, with no whole copy in the local cache (no)"),
    (ConnectError("refused"), "the Hub cannot be reached, with no whole copy in the local cache (refused)"),
    (ConnectionError("reset"), "the Hub cannot be reached"),
    (hub.OfflineModeIsEnabled("off"), "the Hub is switched off (HF_HUB_OFFLINE)"),
    (OSError(28, "No space left on device"), "the download failed (OSError: [Errno 28] No space left on device)"),
    (hub.HfHubHTTPError("500 Server Error", response=response(500)), "the download failed (HfHubHTTPError: 500"),
]


@pytest.mark.parametrize(("error", "text"), FAILURES, ids=[type(error).__name__ for error, _ in FAILURES])
def test_resolve_explains_failed_downloads(error, text, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with refusal("org/name: there is no such local folder, and ", text):
        resolve("org/name", "v9")


def test_resolve_lets_bugs_through(monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ZeroDivisionError):
        resolve("org/name")


def test_resolve_offline(tmp_path, monkeypatch):
    # The real client, told to stay offline, with an empty cache.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with refusal("org/name: there is no such local folder, and the Hub", "local cache", "give a local model folder"):
        resolve("org/name")
