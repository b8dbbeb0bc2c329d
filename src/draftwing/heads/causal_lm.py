"""A draft model on disk: a Hugging Face folder like any other, as transformers, vLLM and ``load(draft=...)`` read it.

config.json         the model's own, with ``{"draftwing": {"kind": "causal-lm", "target": ..., "training": ...}}``
model.safetensors   the weights in float32, named as its family names them
tokenizer.json ...  the target's tokenizer
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from draftwing.errors import DraftwingError, TokenizerError, UnsupportedError
from draftwing.heads.doctor.case import Finding
from draftwing.heads.head import checked_training
from draftwing.heads.identity import differences, has_tokenizer, made_for, target_id_of_folder
from draftwing.heads.settings import FORMAT
from draftwing.heads.write import write_folder
from draftwing.model.config import LEAN_MODEL_TYPES, read_config
from draftwing.model.weights import WeightFiles
from draftwing.nets.causal_lm import CausalLMNet
from draftwing.nets.eagle_config import TargetId
from draftwing.text.tokenizer import Tokenizer

__all__ = ["diagnose_causal_lm", "read_causal_lm", "tokenizer_files", "write_causal_lm"]

_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a model folder that make its tokenizer."""
    return [folder / name for name in _TOKENIZER if (folder / name).is_file()]


def read_causal_lm(
    folder: Path, target: TargetId | None, device: torch.device, dtype: torch.dtype = torch.float32
) -> CausalLMNet:
    """The model in a folder, to be trained.

    Args:
        target: for which it is to draft; None is not checked.

    Raises:
        CheckpointError, ConfigError: no such folder, or one that cannot be read.
        UnsupportedError: of another family than the lean decoder's, or a mixture of experts.
        TokenizerError: its tokenizer is not the target's.
    """
    folder = Path(folder)
    source = read_config(folder)
    found = source.get("model_type")
    if found not in LEAN_MODEL_TYPES:
        raise UnsupportedError(
            f"{folder}: a model of type {found!r} is not trained as a draft model: start from one of "
            f"{', '.join(sorted(LEAN_MODEL_TYPES))}, or from nothing"
        )
    WeightFiles(folder).close()  # safetensors alone: a GGUF file's blocks have no gradients
    own = target_id_of_folder(folder)
    if target is not None:
        same = own.vocab_size == target.vocab_size
        if not same or (own.vocab_hash and target.vocab_hash and own.vocab_hash != target.vocab_hash):
            raise TokenizerError(
                f"{folder}: the draft model has another tokenizer than the target (vocabularies of {own.vocab_size} "
                f"and {target.vocab_size}): start from a model that shares the target's, or from nothing"
            )
    kept = {name: value for name, value in source.items() if name not in ("draftwing", "dtype", "torch_dtype")}
    files = tokenizer_files(folder)
    return CausalLMNet.of_folder(folder, kept, device, dtype=dtype, target=target or made_for(folder), files=files)


def write_causal_lm(folder: Path, net: CausalLMNet, *, training: Mapping[str, Any] | None = None) -> None:
    """Write a draft model; an older one in the folder is replaced, whole or not at all.

    Raises:
        CheckpointError: the folder cannot be written, or holds another model.
        ConfigError: ``training`` is not JSON.
    """
    target = net.config.target
    block = {
        "format": FORMAT,
        "kind": net.kind,
        "target": None if target is None else dataclasses.asdict(target),
        "training": checked_training(training),
    }
    dtype = str(net.dtype).removeprefix("torch.")
    config = {**net.config.source, "torch_dtype": dtype, "draftwing": block}
    write_folder(
        Path(folder), config, net.tensors(), copies=[file for file in net.files if file.parent != Path(folder)]
    )


def diagnose_causal_lm(folder: Path, target: Path | None) -> list[Finding]:
    """Can it be read, and does it share the target's tokenizer? For ``draftwing doctor``.

    Raises:
        CheckpointError, ConfigError, TokenizerError: the target's folder cannot be read.
    """
    own = None if target is None else target_id_of_folder(target)
    try:
        net = read_causal_lm(folder, None, torch.device("cpu"))
    except DraftwingError as error:
        return [Finding("head", "fail", str(error), "give a folder of a causal LM or of a head, or download it again")]
    size = sum(parameter.numel() for parameter in net.parameters())
    findings = [Finding("head", "ok", f"a {net.config.shape.model_type} causal LM of {size:,} numbers")]
    if target is None or own is None or not has_tokenizer(folder) or not has_tokenizer(target):
        return [*findings, Finding("target", "unknown", "no target was given, or one of both has no tokenizer")]
    try:
        Tokenizer(target).check_same(Tokenizer(folder), folder.name)
    except TokenizerError as error:
        return [*findings, Finding("target", "fail", str(error), "draft with a model that shares its tokenizer")]
    known = made_for(folder)
    odd = differences(known, own) if known is not None else []
    if odd:
        told = f"it was trained for another target ({'; '.join(odd)})"
        return [*findings, Finding("target", "warn", told, "train it for this one: it will agree more often")]
    return [*findings, Finding("target", "ok", "it shares the target's tokenizer")]
