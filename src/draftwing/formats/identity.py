"""Which head a folder holds, and which target it belongs to: sizes, and fingerprints of weights and tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError, ConfigError
from draftwing.methods.net import TargetId
from draftwing.models.config import read_config
from draftwing.models.target import Target
from draftwing.text.tokenizer import Tokenizer

# The names that config classes give to the same size.
_SIZES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "vocab_size": ("vocab_size",),
}
_WHOLE = 64 * 2**20  # bytes of a weight file that are read whole; of a larger one, ``_SAMPLES`` blocks
_SAMPLES, _BLOCK = 512, 1 << 14
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def target_id(target: Target, tokenizer: Tokenizer | None = None, name: str | None = None) -> TargetId:
    """The identity of a loaded target; without a tokenizer its vocabulary's fingerprint stays empty."""
    return TargetId(
        name=name or target.name,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        vocab_size=target.vocab_size,
        vocab_hash="" if tokenizer is None else tokenizer.vocab_hash,
    )


def target_id_of_folder(folder: Path, name: str | None = None) -> TargetId:
    """The identity of a model folder, from its config and its tokenizer (if it has one); no weights are read.

    Raises:
        CheckpointError, ConfigError: no such folder, or a config without a size that is needed.
        TokenizerError: it has a tokenizer that cannot be read.
    """
    folder = Path(folder)
    config = read_config(folder)
    text = config.get("text_config")
    inner: Mapping[str, Any] = {**config, **text} if isinstance(text, dict) else config
    sizes = {}
    for size, names in _SIZES.items():
        found = next((inner[key] for key in names if inner.get(key) is not None), None)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise ConfigError(
                f"{folder / 'config.json'}: `{names[0]}` must be an integer of at least 1, found {found!r:.60}: is "
                f"this a causal LM's folder? Download the model's config.json again."
            )
        sizes[size] = found
    hashed = Tokenizer(folder).vocab_hash if has_tokenizer(folder) else ""
    return TargetId(name=name or folder.name, vocab_hash=hashed, **sizes)


def head_id(folder: Path) -> str:
    """16 hexadecimal digits that stand for a head: its config and its weights, wherever the folder lies.

    Two trainings differ in it, for all that they have one shape. Of a large weight file evenly spaced parts are read,
    its beginning (where safetensors says what is in it) and its end among them: it takes milliseconds.

    Raises:
        CheckpointError: no such folder, no weights in it, or files that cannot be read.
    """
    folder, digest = Path(folder), hashlib.sha256()
    try:
        weights = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pt"))
        if not weights:
            raise CheckpointError(f"{folder}: expected a head with its weights, found none: give a head's folder")
        for path in (folder / "config.json", *weights):
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                if size <= _WHOLE:
                    digest.update(file.read())
                else:
                    for number in range(_SAMPLES):
                        file.seek(number * (size - _BLOCK) // (_SAMPLES - 1))
                        digest.update(file.read(_BLOCK))
    except OSError as error:
        raise CheckpointError(f"{folder}: the head cannot be read ({error}): give a head's folder") from error
    return digest.hexdigest()[:16]


def made_for(folder: Path) -> TargetId | None:
    """For which target a head says that it was trained; None where it does not say. Nothing else of it is read.

    Raises:
        CheckpointError: no such folder, or a config that cannot be read.
    """
    block = read_config(folder).get("draftwing")
    found = block.get("target") if isinstance(block, dict) else None
    try:
        return TargetId(**found) if isinstance(found, dict) else None
    except TypeError:  # other fields than ours
        return None


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has any file of a tokenizer."""
    return any((Path(folder) / file).exists() for file in _TOKENIZER_FILES)


def differences(head: TargetId, target: TargetId) -> list[str]:
    """What tells two targets apart, as ``vocab_size 61 and 300``; names may differ, and what is unknown does not."""
    found = []
    for field in ("hidden_size", "num_layers", "vocab_size", "vocab_hash"):
        ours, theirs = getattr(head, field), getattr(target, field)
        if ours != theirs and ours and theirs:
            found.append(f"{field} {ours} and {theirs}")
    return found


def chat_template_hash(folder: Path) -> str:
    """16 hexadecimal digits that stand for a folder's chat template; empty where there is none.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    folder = Path(folder)
    template: Any = None
    try:
        if (file := folder / "chat_template.jinja").exists():
            template = file.read_text(encoding="utf-8")
        elif (file := folder / "tokenizer_config.json").exists():
            found = json.loads(file.read_text(encoding="utf-8"))
            template = found.get("chat_template") if isinstance(found, dict) else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable ({error}): download it again") from error
    if not template:
        return ""
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
