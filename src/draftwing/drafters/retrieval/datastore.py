"""A datastore: a folder with texts in one file, and a config that says so, as other drafts have one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftwing.drafters.retrieval.array import SuffixArray
from draftwing.drafters.retrieval.store import Store, identity_of, partial_name, read_store, sweep, write_store
from draftwing.errors import CheckpointError, ConfigError
from draftwing.heads.write import write_fix
from draftwing.model.config import read_config

__all__ = ["KIND", "TEXTS", "check_new", "is_datastore", "read_datastore", "write_datastore"]

KIND = "rest"
TEXTS = "texts.bin"


def is_datastore(config: Mapping[str, Any]) -> bool:
    """Whether a folder with this ``config.json`` is one."""
    block = config.get("draftwing")
    return isinstance(block, dict) and block.get("kind") == KIND


def check_new(folder: Path) -> None:
    """Raise ConfigError where there is something already; to be called before any work is done.

    What a run that was killed has left behind is removed.
    """
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder}: is there already: choose another folder, or delete it first")
    sweep(folder)


def write_datastore(folder: Path, texts: SuffixArray, about: Mapping[str, Any]) -> Store:
    """Write a new folder: under another name, and renamed when all of it is on the disk.

    Args:
        about: ``target``, ``vocab_hash``, ``vocab_size`` and ``num_texts``, and whatever else there is to say.

    Raises:
        ConfigError: see ``check_new``.
        CheckpointError: it cannot be written.
    """
    check_new(folder)
    said = {**about, "num_tokens": len(texts) - about["num_texts"], "identity": identity_of([texts])}
    partial = partial_name(folder)
    try:
        partial.mkdir(parents=True)
        write_store(partial / TEXTS, [texts], said)
        config = {"draftwing": {"kind": KIND, **said}}
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        partial.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: the datastore cannot be written ({error}): {write_fix(error)}") from error
    finally:
        with suppress(OSError):
            shutil.rmtree(partial, ignore_errors=True)
    return read_datastore(folder)


def read_datastore(folder: Path, *, whole: bool = False) -> Store:
    """Open a datastore: see ``read_store``.

    Raises:
        CheckpointError: it is no datastore, or a damaged one.
    """
    if not is_datastore(read_config(folder)):
        raise CheckpointError(f"{folder}: is no datastore: give a folder that `draftwing datastore build` has written")
    store = read_store(folder / TEXTS, whole=whole)
    if len(store.parts) != 1:
        raise CheckpointError(f"{store.path}: expected one part, found {len(store.parts)}: it is not a datastore's")
    return store
