"""Identify heads and their targets: sizes, and fingerprints of weights, tokenizer and chat template."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError, ConfigError
from draftwing.methods.net import TargetId
from draftwing.models.config import read_config, text_config
from draftwing.models.target import Target
from draftwing.storage import read_json
from draftwing.text.tokenizer import Tokenizer

# The names that config classes give to the same size.
_SIZES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "vocab_size": ("vocab_size",),
}
_WHOLE = 64 * 2**20  # bytes: larger weight files are sampled in ``_SAMPLES`` blocks of ``_BLOCK`` bytes
_SAMPLES, _BLOCK = 512, 1 << 14
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def target_id(target: Target, tokenizer: Tokenizer | None = None, name: str | None = None) -> TargetId:
    """Return the identity of a loaded target; without a tokenizer its vocabulary's fingerprint is empty."""
    return TargetId(
        name=name or target.name,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        vocab_size=target.vocab_size,
        vocab_hash="" if tokenizer is None else tokenizer.vocab_hash,
    )


def target_id_of_folder(folder: Path, name: str | None = None) -> TargetId:
    """Return the identity of a model folder, from its config and its tokenizer (if any); no weights are read."""
    folder = Path(folder)
    config = text_config(read_config(folder))
    sizes = {}
    for size, names in _SIZES.items():
        value = next((config[key] for key in names if config.get(key) is not None), None)
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"{folder / 'config.json'}: `{names[0]}` must be an integer of at least 1, found {value!r:.60}: is "
                f"this a causal LM's folder? Download the model's config.json again."
            )
        sizes[size] = value
    vocab_hash = Tokenizer(folder).vocab_hash if has_tokenizer(folder) else ""
    return TargetId(name=name or folder.name, vocab_hash=vocab_hash, **sizes)


def head_id(folder: Path) -> str:
    """Return a fingerprint of a head's config and weights, 16 hexadecimal digits, independent of the folder's place.

    Of a large weight file evenly spaced blocks are read, including its start (which lists the tensors) and its end.
    """
    folder, digest = Path(folder), hashlib.sha256()
    try:
        weights = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pt", ".gguf"))
        if not weights:
            raise CheckpointError(f"{folder}: expected a head with its weights, found none: give a head's folder")
        for path in (folder / "config.json", *weights):
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            if size <= _WHOLE:
                digest.update(path.read_bytes())
            else:
                hash_blocks(path, _SAMPLES, digest)
    except OSError as error:
        raise CheckpointError(f"{folder}: the head cannot be read ({error}): give a head's folder") from error
    return digest.hexdigest()[:16]


def hash_blocks(path: Path, count: int, digest: Any) -> None:
    """Add evenly spaced blocks of a file to a digest, from its start to its end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for number in range(count):
            file.seek(max(size - _BLOCK, 0) * number // (count - 1))
            digest.update(file.read(_BLOCK))


def made_for(folder: Path) -> TargetId | None:
    """Return the target named in a head's config, or None; nothing else of the head is read."""
    block = read_config(folder).get("draftwing")
    target = block.get("target") if isinstance(block, dict) else None
    try:
        return TargetId(**target) if isinstance(target, dict) else None
    except TypeError:  # unknown fields
        return None


def has_tokenizer(folder: Path) -> bool:
    """Return True if a folder has any file of a tokenizer."""
    return any((Path(folder) / file).exists() for file in _TOKENIZER_FILES)


def differences(head: TargetId, target: TargetId) -> list[str]:
    """List differences between two targets, as ``vocab_size 61 and 300``. Names and unknown values do not count."""
    pairs = [
        (name, getattr(head, name), getattr(target, name))
        for name in ("hidden_size", "num_layers", "vocab_size", "vocab_hash")
    ]
    return [f"{name} {one} and {other}" for name, one, other in pairs if one and other and one != other]


def check_same_target(made_for: TargetId | None, target: TargetId | None, where: str) -> None:
    """Raise CheckpointError if a head made for one target does not fit another; None is unknown and fits."""
    if made_for is not None and target is not None and (wrong := differences(made_for, target)):
        raise CheckpointError(
            f"{where}: this head is made for {made_for.name or 'another target'}, not for {target.name} "
            f"({'; '.join(wrong)}): load it with its own target, or train one for {target.name}"
        )


def chat_template_hash(folder: Path) -> str:
    """Return a fingerprint of a folder's chat template, 16 hexadecimal digits; empty if it has none."""
    folder = Path(folder)
    template: Any = None
    try:
        if (file := folder / "chat_template.jinja").exists():
            template = file.read_text(encoding="utf-8")
        elif (file := folder / "tokenizer_config.json").exists():
            config = read_json(file)
            template = config.get("chat_template") if isinstance(config, dict) else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable ({error}): download it again") from error
    if not template:
        return ""
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
