"""LoRA adapters in peft's folders (2106.09685), merged into a model's weights while these are read.

    W + scale * B A                                    LoRA; scale is alpha / r, or alpha / sqrt(r) (rsLoRA, 2312.03732)
    m * (W + scale * B A) / |W + scale * B A|          DoRA (2402.09353): a magnitude m for each row of the matrix
    another W                                          a module that was trained as a whole (``modules_to_save``)

A merged matrix is computed in float32, or float64 if the model is stored in it, and then has the precision of the
checkpoint, as after peft's ``merge_and_unload``; one from a GGUF file's blocks has float32. Quantisation comes after.

Shape suffixes: r rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftwing.cpu.layout import format_of
from draftwing.errors import CheckpointError, UnsupportedError, shown
from draftwing.models.catalogue import ADAPTER_CONFIG
from draftwing.models.weights import Stored, Weights
from draftwing.storage import check_regular, read_json_object

WEIGHTS = "adapter_model.safetensors"
_HEAD, _EMBEDDING = "lm_head", "model.embed_tokens"
_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+?)\.(?:base_layer\.|modules_to_save\.)?"
    r"(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|weight|bias)(?:\.weight)?"
)
# Settings of variants that are more than a change of a matrix, or that change the base model too.
_REFUSED = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias", "megatron_config",
    "monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # values of ``init_lora_weights``
_FIX = "merge it with peft's merge_and_unload, and load the result"


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read an adapter's settings. Raises CheckpointError if there are none, UnsupportedError for other adapters."""
    try:
        config = read_json_object(folder / ADAPTER_CONFIG)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: expected a LoRA adapter with {ADAPTER_CONFIG}, found none. Give a folder that peft's "
            f"save_pretrained wrote."
        ) from None
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"{folder}: an adapter of type {shown(kind)}, and only LORA is supported: {_FIX}")
    return config


@dataclass
class _Change:
    """The changes of one module: tensors by their part of the name."""

    module: str  # its name in the adapter
    tensors: dict[str, Tensor] = field(default_factory=dict)
    scale: float = 1.0

    def applied(self, weight: Tensor, part: str) -> Tensor:
        """Return the changed weight (out, in), or (vocabulary, hidden) of an embedding; or the changed bias."""
        tensors = {name: tensor.to(weight.dtype) for name, tensor in self.tensors.items()}
        if part in tensors:
            weight = tensors[part]
        if part == "bias":
            return weight
        if "lora_embedding_A" in tensors:
            return weight + self.scale * (tensors["lora_embedding_B"] @ tensors["lora_embedding_A"]).T
        if "lora_A" not in tensors:
            return weight
        weight = weight + self.scale * (tensors["lora_B"] @ tensors["lora_A"])
        if "lora_magnitude_vector" in tensors:
            weight = weight * (tensors["lora_magnitude_vector"] / torch.linalg.norm(weight, dim=1))[:, None]
        return weight


class LoraWeights(Weights):
    """The tensors of ``base`` with an adapter's changes.

    Args:
        folder: the adapter's.
        is_tied: the model's LM head is its embedding.

    Attributes:
        unties: the adapter changes only one of LM head and embedding, or each in its own way.

    Raises:
        CheckpointError: the adapter is damaged, or was not made for this model.
        UnsupportedError: a kind of adapter that is not supported, by name.
    """

    def __init__(self, base: Weights, folder: Path, *, is_tied: bool) -> None:
        self.folder, self._base, self._adapter, self._is_tied = base.folder, base, folder, is_tied
        config = read_adapter_config(folder)
        for name in _REFUSED:
            if config.get(name):
                raise UnsupportedError(f"{folder}: {name}={shown(config[name])} is not supported: {_FIX}")
        start = config.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
            raise UnsupportedError(
                f"{folder}: init_lora_weights={start!r} changes the base model too, and is not supported: {_FIX}"
            )
        self._changes = self._read()
        for module, change in self._changes.items():
            self._check(module, change, config)
        self.unties = is_tied and not {_HEAD, _EMBEDDING}.isdisjoint(self._changes)
        if self.unties and config.get("ensure_weight_tying") and _EMBEDDING in self._changes:
            self._changes.pop(_HEAD, None)  # the same as the embedding's
            self.unties = False

    def _read(self) -> dict[str, _Change]:
        """Read the adapter's tensors by module."""
        file = self._adapter / WEIGHTS
        try:
            check_regular(file)
            tensors = load_file(file)
        except FileNotFoundError:
            pickled = (self._adapter / "adapter_model.bin").exists()
            found = "only adapter_model.bin, which is pickled. Save it again with a newer peft" if pickled else "none"
            raise CheckpointError(f"{self._adapter}: expected {WEIGHTS}, found {found}.") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{file}: cannot be read ({error}). Download it again.") from error
        changes: dict[str, _Change] = {}
        for name, tensor in tensors.items():
            match = _KEY.fullmatch(name)
            if match is None or not tensor.is_floating_point():
                raise UnsupportedError(f"{file}: {name} is no weight of a LoRA adapter that is supported: {_FIX}")
            module = self._base.text_name(f"{match['module']}.")
            if module is not None:  # otherwise it belongs to a multimodal model's images or audio
                change = changes.setdefault(module.removesuffix("."), _Change(match["module"]))
                change.tensors[match["part"]] = tensor
        if not changes:
            raise CheckpointError(f"{file}: it holds no weights. Download it again.")
        return changes

    def _check(self, module: str, change: _Change, config: Mapping[str, Any]) -> None:
        """Compare a module's change with the model and the adapter's settings, and set its scale."""
        for part in ("weight", "bias"):
            name = f"{module}.{part}"
            if self._source(name) not in self._base and (part == "weight" or part in change.tensors):
                raise CheckpointError(
                    f"{self._adapter}: it changes {name}, which {self.folder} does not have. Give the model that it "
                    f"was trained for, {shown(config.get('base_model_name_or_path'))}."
                )
        size = self._base.shape(self._source(f"{module}.weight"))
        expected = {"weight": size, "bias": size[:1], "lora_magnitude_vector": size[:1]}
        for first, second in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
            if (first in change.tensors) != (second in change.tensors):
                raise CheckpointError(
                    f"{self._adapter}: {module} has only one of {first} and {second}: download it again"
                )
            if first in change.tensors and len(size) == 2:
                rank, alpha = (
                    _setting(config, pattern, change.module, default)
                    for pattern, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
                )
                out, width = size if first == "lora_A" else size[::-1]
                expected |= {first: (rank, width), second: (out, rank)}
                change.scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        if "lora_magnitude_vector" in change.tensors and "lora_A" not in change.tensors:
            raise UnsupportedError(f"{self._adapter}: DoRA of {module} is supported for matrices alone: {_FIX}")
        for part, tensor in change.tensors.items():
            if tuple(tensor.shape) != expected.get(part):
                raise CheckpointError(
                    f"{self._adapter}: {part} of {module} must have shape {expected.get(part)} for {self.folder}, "
                    f"found {tuple(tensor.shape)}. Give the model that the adapter was trained for, "
                    f"{shown(config.get('base_model_name_or_path'))}."
                )

    def _source(self, name: str) -> str:
        """Return the name of a tensor in the base model."""
        return f"{_EMBEDDING}.weight" if self._is_tied and name == f"{_HEAD}.weight" else name

    def _change(self, name: str) -> _Change | None:
        if self._is_tied and not self.unties:
            name = self._source(name)
        return self._changes.get(name.rpartition(".")[0])

    # --- the interface of Weights ----------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return self._source(name) in self._base

    def close(self) -> None:
        self._base.close()

    def keys(self) -> list[str]:
        return self._base.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(self._source(name))

    def get(self, name: str, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        change = self._change(name)
        if change is None:
            return self._base.get(self._source(name), dtype, shape)
        stored = self._base.get(self._source(name), None, shape)
        wide = torch.float64 if stored.dtype == torch.float64 else torch.float32
        if stored.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            stored = self._base.get(self._source(name), wide, shape)  # explains what is wrong with a quantised model
        merged = change.applied(stored.to(wide), name.rpartition(".")[2]).to(stored.dtype)
        return merged if dtype is None else merged.to(dtype)

    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> Stored:
        if self._change(name) is None:
            return self._base.stored(self._source(name), shape)
        merged = self.get(name, None, shape)
        kind = format_of(merged.dtype)
        if kind is None:
            merged = merged.float()
        return Stored("float32" if kind is None else kind.name, merged.shape[-1], merged)

    def drop(self, stored: Stored) -> None:
        self._base.drop(stored)


def _setting(config: Mapping[str, Any], patterns: str, module: str, default: str) -> int:
    """Return a module's rank or alpha: that of the first pattern that matches its name, as in peft."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return _positive(value, f"{patterns} of {pattern}")
    return _positive(config.get(default), default)


def _positive(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"{ADAPTER_CONFIG}: {name} must be an integer of at least 1, found {shown(value)}. Correct it."
        )
    return value
