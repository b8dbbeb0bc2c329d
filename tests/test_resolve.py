"""From the name of a model to a folder: local paths, GGUF files, the catalogue, the Hub."""

import importlib
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors as hub
from typer.testing import CliRunner

import draftwing as dw
from conftest import add_tokenizer, refused
from draftwing.cli import main as cli
from draftwing.errors import CheckpointError
from draftwing.models import catalogue
from draftwing.models.catalogue import CATALOGUE, Entry, Hub, Shipped, Wheel, entry_of
from draftwing.models.resolve import fetch, find_local, resolve
from draftwing.models.weights import WeightFiles
from draftwing.shipped import TOY


def refusal(*parts):
    return refused(CheckpointError, *parts)


@pytest.fixture
def gguf(monkeypatch):
    """Replaces the reader of GGUF files; the list of the files that it opened."""
    opened = []

    def open_gguf(path):
        opened.append(path)
        return path.parent / f"folder of {path.name}"

    monkeypatch.setattr("draftwing.formats.gguf_folder.open_gguf", open_gguf)
    return opened


@pytest.fixture
def add(monkeypatch):
    """``add("tiny", folder)``: a model of the catalogue for one test."""

    def add(name, source, **more):
        source = Shipped(str(source)) if isinstance(source, Path) else source
        entry = Entry(name, source, licence="Apache-2.0", num_parameters=1, **more)
        monkeypatch.setitem(CATALOGUE, name, entry)
        return entry

    return add


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
def test_paths_are_not_requested_from_the_hub(path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with refusal("expected a model folder or a Hugging Face Hub id such as org/name, found no such folder. Check the"):
        resolve(path)


def test_resolve_hub(tmp_path, monkeypatch):
    requested = {}

    def download(repo, **options):
        requested.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/some-model.v1", "abc") == tmp_path
    assert (requested["repo"], requested["revision"]) == ("org/some-model.v1", "abc")
    files = ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.model", "merges.txt"]
    files += ["chat_template.jinja", "pytorch_model.bin", "consolidated.safetensors", "original/params.json"]
    files += ["onnx/model.safetensors"]
    patterns = {key: requested[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(huggingface_hub.utils.filter_repo_objects(files, **patterns)) == files[:6]


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
    (hub.LocalEntryNotFoundError("no\nnet"), "Hub cannot be reached, with no complete copy in the local cache (no)"),
    (ConnectError("refused"), "the Hub cannot be reached, with no complete copy in the local cache (refused)"),
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


def test_resolve_does_not_hide_bugs(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        resolve("org/name")


def test_resolve_offline(tmp_path, monkeypatch):
    """With the real client and an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with refusal("org/name: there is no such local folder, and the Hub", "local cache", "give a local model folder"):
        resolve("org/name")


# --- files -----------------------------------------------------------------------------------------------------------


def test_resolve_gguf(tmp_path, monkeypatch, gguf):
    file = tmp_path / "model.bin"
    file.write_bytes(b"GGUF and more")
    assert resolve(str(file)) == resolve(file) == tmp_path / "folder of model.bin"
    monkeypatch.setenv("HOME", str(tmp_path))
    resolve("~/model.bin")
    assert gguf == [file, file, file]
    for content in (b"", b"GGU", b"gguf", b" GGUF"):
        file.write_bytes(content)
        with refusal("model.bin: expected a model folder, found a file. Give the folder that it is in"):
            resolve(str(file))
    assert len(gguf) == 3


# --- names -----------------------------------------------------------------------------------------------------------


def test_the_catalogue():
    for name, entry in CATALOGUE.items():
        assert name == entry.name == name.lower()
        assert "/" not in name
        assert entry.licence == "Apache-2.0"
        for kind in entry.heads:
            assert (entry.head(kind) / "config.json").exists()
        if isinstance(entry.source, Wheel):
            assert len(bytes.fromhex(entry.source.sha256)) == len(bytes.fromhex(entry.source.member_sha256)) == 32
        elif isinstance(entry.source, Hub):
            assert len(bytes.fromhex(entry.source.revision)) == 20
    weights = WeightFiles(TOY / "target")
    shapes = [weights.shape(name) for name in weights.keys()]  # noqa: SIM118
    assert catalogue.TOY.num_parameters == sum(map(math.prod, shapes))


def test_names_and_folders(tmp_path, monkeypatch, add):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    add("tiny", tmp_path / "weights")
    with refusal("weights: the model shipped with Draftwing is not installed"):
        resolve("tiny")
    (tmp_path / "weights" / "config.json").touch()
    assert resolve("tiny") == resolve("tiny", "main") == tmp_path / "weights"
    assert entry_of("tiny").name == "tiny"
    with refusal("tiny: expected a model folder or a Hugging Face Hub id such as org/name, found no such folder."):
        resolve(Path("tiny"))
    (tmp_path / "tiny").mkdir()
    assert resolve("tiny") == Path("tiny")
    assert entry_of("tiny") is None
    assert entry_of(None) is catalogue.TOY
    assert resolve(None) == TOY / "target"


def test_a_name_whose_model_is_a_gguf_file(tmp_path, monkeypatch, gguf, add):
    add("tiny", CATALOGUE["smollm2-135m-instruct"].source)
    monkeypatch.setattr("draftwing.models.resolve.fetch", lambda entry: tmp_path / f"{entry.name}.gguf")
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    assert resolve("tiny") == tmp_path / "folder of tiny.gguf"
    assert gguf == [tmp_path / "tiny.gguf"]


def test_a_name_whose_model_is_on_the_hub(tmp_path, monkeypatch, add):
    requested = []

    def download(repo, *, revision, local_files_only, **_):
        requested.append((repo, revision, local_files_only))
        if local_files_only and len(requested) == 1:
            raise hub.LocalEntryNotFoundError("not there")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    entry = add("tiny", Hub("org/tiny", "abc", 1))
    assert find_local(entry) is None
    assert resolve("tiny", "main") == fetch(entry) == find_local(entry) == tmp_path
    assert requested == [("org/tiny", "abc", local) for local in (True, False, False, True)]


@pytest.mark.parametrize(
    "text",
    [
        "smollm2-135m-instuct",
        "SmolLM2_135M_Instruct",
        "smollm2 135m",
        "./smollm2-135m-instruct",
        "org/SmolLM2-135M-Instruct",
        "Toy",
    ],
)
def test_a_misspelt_name(text, monkeypatch):
    meant = "toy" if text == "Toy" else "smollm2-135m-instruct"
    errors = [FAILURES[index][0] for index in (0, 3, 4, 7)]

    def fail(*_, **__):
        raise errors.pop()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    for _ in range(len(errors)):
        with refusal(f"{text}: ", f"Did you mean {meant} (see `draftwing list`)?"):
            resolve(text)


def test_a_misspelt_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "tiny.gguf").touch()
    for text, meant in {
        "models/mime": "models/mine",
        "model/mine": "models/mine",
        "./models/tini.gguf": "models/tiny.gguf",
        f"{tmp_path}/models/mien": f"{tmp_path}/models/mine",
    }.items():
        with refusal(f"{text}: ", f"Did you mean {meant}?"):
            resolve(Path(text) if text.startswith("model") else text)
    with pytest.raises(CheckpointError) as caught:
        resolve(Path("other/mine"))
    assert "Did you mean" not in str(caught.value)


# --- what comes with a name ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(folder_of, tmp_path_factory):
    """A target and a smaller model to draft for it, with one tokenizer."""
    root = tmp_path_factory.mktemp("named")
    sizes = {"target": {}, "draft": {"seed": 1, "num_hidden_layers": 1}}
    made = {name: folder_of("llama", vocab_size=300, **more) for name, more in sizes.items()}
    return {name: add_tokenizer(shutil.copytree(folder, root / name)) for name, folder in made.items()}


def test_a_named_target_loads_its_head(folders, add):
    add("plain", folders["target"])
    add("tiny", folders["target"], heads={"causal-lm": str(folders["draft"])})
    text = dw.load(folders["target"], "none").generate("def add(", max_tokens=8)[0].text
    for target, draft, name in [
        ("tiny", None, "causal-lm (draft)"),
        ("tiny", "causal-lm", "causal-lm (draft)"),
        ("tiny", "lookup", "lookup"),
        ("plain", None, "lookup"),
        ("plain", "tiny", "causal-lm (target)"),
        (folders["target"], None, "lookup"),
    ]:
        lm = dw.load(target, draft)
        assert lm.drafter_name == name
        assert lm.target.name == str(target)
        assert lm.generate("def add(", max_tokens=8)[0].text == text
    with refusal("plain does not come with a draft of kind eagle3: no trained draft comes with it.", "lookup"):
        dw.load("plain", "eagle3")
    with refusal("tiny does not come with a draft of kind eagle1: it comes with causal-lm.", "Give the folder of one"):
        dw.load("tiny", "eagle1")


def test_export_prints_the_path_of_a_named_target(folders, add, monkeypatch):
    add("tiny", folders["target"])
    monkeypatch.setattr("draftwing.methods.registry.convert", lambda *_, **__: None)
    places = {"tiny": folders["target"], str(folders["draft"]): folders["draft"], None: TOY / "target"}
    for name, place in places.items():
        target = [] if name is None else ["--target", name]
        shown = CliRunner().invoke(cli.app, ["export", str(TOY / "eagle3"), "--out", str(TOY / "eagle3"), *target])
        assert shown.exit_code == 0, shown.output
        assert f"vllm serve {place} " in shown.stdout
    monkeypatch.setenv("DRAFTWING_MODEL", str(folders["target"]))
    shown = CliRunner().invoke(cli.app, ["export", str(TOY / "eagle3"), "--out", str(TOY / "eagle3")])
    assert f"vllm serve {folders['target']} " in shown.stdout


def test_shipped_heads_fit_only_their_target(folders):
    with refusal("toy/eagle3", "this head is made for toy, not for", "target"):
        dw.load(folders["target"], "eagle3")
