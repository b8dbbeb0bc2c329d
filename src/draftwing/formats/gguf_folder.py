"""A GGUF file as a model folder: config, tokenizer and a link to the file, made once and kept in the private cache.

So the rest of Draftwing has one kind of model: a folder. What a folder with ``model.gguf`` in it holds beside it was
read from that file.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError
from draftwing.formats.gguf import GgufFile, is_gguf, open_file
from draftwing.formats.gguf_config import config_of
from draftwing.formats.gguf_tokenizer import tokenizer_config, tokenizer_json
from draftwing.storage import private_folder

LINK = "model.gguf"
_FORM = 1  # of what is written here: a higher one makes all folders anew
_HEADER = 1 << 16  # bytes of a file that stand for it, together with its path, size and time
_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")

_temporary: dict[str, Path] = {}  # by name, where the cache cannot be written


def open_gguf(path: Path) -> Path:
    """The model folder of a GGUF file, made where it is missing.

    Raises:
        CheckpointError: no such file, no GGUF, truncated or damaged.
        ConfigError, UnsupportedError: metadata that is missing, cannot be meant, or is not supported.
        TokenizerError: no tokenizer, or one that cannot be read.
    """
    path = Path(path).expanduser().absolute()  # links are kept: parts of a split model lie beside the one named here
    name = _name(path)
    try:
        with private_folder() as cache:
            base = cache.path / "gguf"
            base.mkdir(mode=0o700, exist_ok=True)
            if not _is_whole(base / name, path):
                with cache.locked("gguf.lock"):
                    _prune(base)
            return _made(base, name, path)
    except OSError:  # nothing can be kept there
        if name not in _temporary:
            base = Path(tempfile.mkdtemp(prefix="draftwing-gguf-"))
            atexit.register(shutil.rmtree, base, ignore_errors=True)
            _temporary[name] = _made(base, name, path)
        return _temporary[name]


def link_of(folder: Path) -> Path | None:
    """The GGUF file that a folder stands for; None for any other folder."""
    try:
        return Path(os.readlink(Path(folder) / LINK))
    except OSError:
        return None


def folder_files(file: GgufFile) -> dict[str, str]:
    """The text of each file of a model folder, by its name.

    Raises:
        CheckpointError, ConfigError, UnsupportedError, TokenizerError: as ``open_gguf``.
    """
    config = config_of(file)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None}
    return {
        "config.json": _json(config),
        "generation_config.json": _json(ids),
        "tokenizer.json": tokenizer_json(file.metadata, config["vocab_size"]),
        "tokenizer_config.json": _json(tokenizer_config(file.metadata, config["max_position_embeddings"])),
    }


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _name(path: Path) -> str:
    if not path.exists():
        raise CheckpointError(f"{path}: expected a GGUF file, found none. Check the path.")
    if not is_gguf(path):
        raise CheckpointError(f"{path}: expected a GGUF file, found another one. Download it again.")
    state = path.stat()
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(_HEADER))
    digest.update(f"{_FORM} {path} {state.st_size} {state.st_mtime_ns}".encode(errors="surrogateescape"))
    stem = re.sub(r"[^\w.-]", "_", path.stem, flags=re.ASCII)[:80].lstrip(".") or "model"
    return f"{stem}-{digest.hexdigest()[:16]}"


def _made(base: Path, name: str, path: Path) -> Path:
    """The folder ``name`` in ``base``: built beside, then renamed, so that nobody ever sees half of one."""
    final = base / name
    if _is_whole(final, path):
        return final
    file = open_file(path)
    try:
        files = folder_files(file)
    finally:
        file.close()
    fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=base))
    try:
        for each, text in files.items():
            (fresh / each).write_text(text, encoding="utf-8")
        _link(path, fresh / LINK)
        if final.exists():  # parts of it were deleted
            os.rename(final, fresh / "old")
        with suppress(OSError):  # another process was faster
            os.rename(fresh, final)
        if not _is_whole(final, path):
            raise OSError(f"{final}: cannot be made")
        shutil.rmtree(final / "old", ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return final


def _prune(base: Path) -> None:
    """Remove folders whose file is gone. Links are not followed: what they name may be anybody's."""
    if base.is_symlink():
        return
    with os.scandir(base) as entries:
        for entry in entries:
            file = link_of(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else None
            if file is not None and not os.path.lexists(file):
                shutil.rmtree(entry.path, ignore_errors=True)


def _link(path: Path, link: Path) -> None:
    try:
        os.symlink(path, link)
    except OSError:  # Windows allows it to few
        os.link(path, link)


def _is_whole(folder: Path, path: Path) -> bool:
    link = folder / LINK
    try:
        return link.samefile(path) and all((folder / each).is_file() for each in _FILES)
    except OSError:
        return False
