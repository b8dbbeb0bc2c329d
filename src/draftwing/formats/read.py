"""Read EAGLE heads in any layout: what a folder's config and tensors say together, and the net that they make."""

from __future__ import annotations

import json
import os
import pickle
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, ConfigError, DraftwingWarning, UnsupportedError, reason
from draftwing.formats.gguf_folder import link_of
from draftwing.formats.gguf_weights import open_weights
from draftwing.formats.identity import check_same_target
from draftwing.formats.settings import (
    MAX_LAYERS,
    TAP_IDS,
    UNKNOWN_TAP,
    HeadSettings,
    claimed_version,
    dflash_kind,
    eagle_config,
    is_head_config,
    is_medusa,
    read_settings,
)
from draftwing.formats.tensors import (
    EMBEDDING,
    LM_HEAD,
    Names,
    check_tensors,
    read_draft_vocab,
    sort_names,
    version_of_names,
)
from draftwing.methods.eagle_net import EagleConfig, EagleNet, default_taps, tensor_shapes
from draftwing.methods.net import TargetId
from draftwing.models.config import read_config
from draftwing.models.linear import Embedding, Linear
from draftwing.models.weights import check_finite

WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
_SHARDED = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ONE_PLACE = "or take both files from one place"


@dataclass(frozen=True)
class Head:
    """An EAGLE net's shape and tensors, without the target that it needs to run."""

    config: EagleConfig  # the net's shape; ``taps`` are ``UNKNOWN_TAP`` if the head does not name them
    tensors: Mapping[str, Tensor]  # by EAGLE's names, as ``EagleNet.tensors()`` returns them, dtypes as stored
    target_ids: Tensor | None = None  # (V_draft,) ascending int64, or None for the whole vocabulary
    # The target's own ``embed_tokens.weight`` and, in an EAGLE-1 head, ``lm_head.weight`` if the file holds them. They
    # are exported again but not run.
    copies: Mapping[str, Tensor] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)  # how it was trained, for people; any JSON
    verifier: str | None = None  # the target's name or path, if known
    warnings: tuple[str, ...] = ()  # guesses and repairs that were needed to read it

    @property
    def knows_taps(self) -> bool:
        """False if only the number of taps is known."""
        return UNKNOWN_TAP not in self.config.taps

    @property
    def has_default_taps(self) -> bool:
        """True if an engine that is given no taps reads the right ones."""
        target = self.config.target
        if not self.knows_taps or target is None:
            return not self.knows_taps
        return self.config.taps == usual_taps(self.config.version, target.num_layers)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["fc.weight"].dtype

    def for_target(self, target: TargetId | None, taps: tuple[int, ...] | None, where: str) -> Head:
        """Return this head for ``target`` (None: unknown) with ``taps``, its own taps, or the target's usual ones."""
        config, num_taps = self.config, len(self.config.taps)
        check_same_target(config.target or TargetId("", config.feature_size, 0, config.vocab_size), target, where)
        target = config.target or target
        if taps is not None and len(taps) != num_taps:
            raise CheckpointError(
                f"{where}: the head reads {num_taps} of the target's hidden states, but {len(taps)} taps are given "
                f"({', '.join(map(str, taps))}): give {num_taps}"
            )
        if taps is None and target is not None:
            if not self.knows_taps:
                usual = usual_taps(config.version, target.num_layers)
                # Only three taps have defaults; another number stays unknown.
                taps = usual if usual is not None and len(usual) == num_taps else None
            elif config.target is None and config.version == 3 and target.num_layers in config.taps:
                # Our last tap is the state after the final norm; other engines give EAGLE-3 the one before.
                raise UnsupportedError(
                    f"{where}: the head reads the target's last hidden state before the final norm (tap "
                    f"{target.num_layers}), which Draftwing does not tap: serve it with the engine that it was made for"
                )
        config = replace(config, target=target, taps=config.taps if taps is None else taps)
        last = sys.maxsize if target is None else target.num_layers
        named_taps = config.taps if taps is not None or self.knows_taps else ()
        wrong_tap = next((tap for tap in named_taps if not 0 <= tap <= last), None)
        if wrong_tap is not None:
            layers = "" if target is None else f" to {last}, the layers of {target.name}"
            raise CheckpointError(
                f"{where}: tap {wrong_tap} is no hidden state of the target: taps run from 0{layers}; correct the "
                f"taps in config.json, or give others"
            )
        return replace(self, config=config, verifier=self.verifier or (target.name if target else None))


def checked_training(training: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return notes on a head's training as JSON gives them back. Raises ConfigError if they are not JSON."""
    try:
        notes: dict[str, Any] = json.loads(json.dumps(dict(training or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"notes on a head's training must be JSON ({error}): give plain numbers, strings, lists and dictionaries"
        ) from error
    return notes


def usual_taps(version: int, num_layers: int) -> tuple[int, ...] | None:
    """Return the taps that every engine reads by default; None if the target has too few layers."""
    if version == 1:
        return (num_layers,)
    return default_taps(num_layers) if num_layers >= 3 else None


# --- kinds of folders ------------------------------------------------------------------------------------------------


def is_head(config: Mapping[str, Any], folder: Path | None = None) -> bool:
    """Return True if a ``config.json`` is a draft head's and not a language model's.

    A published EAGLE-1 head has the config of a small Llama, and only its tensors tell: for such a config ``folder`` is
    inspected; without a folder it counts as a language model's.
    """
    certain = is_head_config(config)
    if certain is not None or folder is None:
        return bool(certain)
    return version_of_names(_names_in(folder)) is not None


def eagle_version(config: Mapping[str, Any], folder: Path) -> int | None:
    """Return 1 or 3 if a folder looks like an EAGLE head's, by config or tensor names, unchecked; None for others."""
    block = config.get("draftwing")
    is_other = (isinstance(block, dict) and "kind" in block) or dflash_kind(config) or is_medusa(config)
    if is_other or not is_head(config, folder):
        return None
    claimed = block.get("version") if isinstance(block, dict) else claimed_version(config)
    return claimed if claimed in (1, 3) else version_of_names(_names_in(folder)) or 3


def _names_in(folder: Path) -> list[str]:
    """Return the tensors' names; none if they cannot be read, which loading them will report."""
    try:
        if weight_files(folder)[:1] == [PICKLED]:
            return list(read_tensors(folder))
        with open_weights(folder) as files:
            return files.keys()
    except CheckpointError:
        return []


# --- reading a head --------------------------------------------------------------------------------------------------


def read_head(
    folder: Path,
    embedding: Tensor | Embedding,
    target_head: Linear | None = None,
    target: TargetId | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    taps: tuple[int, ...] | None = None,
) -> EagleNet:
    """Load a head in any layout as a net, ready for a target. Warns if something had to be guessed or fixed.

    An embedding in the head's file that is not the target's replaces it: the head was trained with it.

    Args:
        embedding: (V, H) the target's; the net goes to its device.
        target_head: the target's LM head, which EAGLE-1 reads.
        target: the target's identity; if given, the head must be made for it.
        taps: read these hidden states of the target instead of those that the folder names.
    """
    folder = Path(folder)
    head = load_head(folder).for_target(target, taps, str(folder))
    if not head.knows_taps:
        raise CheckpointError(
            f"{folder}: the head does not name the hidden states of the target that it reads: give the target (of 3 "
            f"layers or more, which have defaults), or the taps"
        )
    expected = (head.config.vocab_size, head.config.feature_size)
    if embedding.shape != expected:
        raise CheckpointError(
            f"{folder}: the head is made for a target with an embedding of {expected}, this one's is "
            f"{tuple(embedding.shape)}: load it with the target that it was trained for"
        )
    if EMBEDDING in head.copies:
        rows = embedding.plain() if isinstance(embedding, Embedding) else embedding
        if not same_matrix(head.copies[EMBEDDING], rows):
            tensors = {**head.tensors, EMBEDDING: head.copies[EMBEDDING]}
            head = replace(head, config=replace(head.config, own_embedding=True), tensors=tensors)
    for text in head.warnings:
        warnings.warn(DraftwingWarning(text), stacklevel=2)
    copy = head.copies.get(LM_HEAD)
    if copy is not None and target_head is not None and not same_matrix(copy, target_head.weight):
        text = (
            f"{folder}: its {LM_HEAD} is not the target's own, which is used instead: if it was trained for another "
            f"version of this model, expect fewer accepted tokens, and load it with that one"
        )
        warnings.warn(DraftwingWarning(text), stacklevel=2)
    device = embedding.device
    ids = None if head.target_ids is None else head.target_ids.to(device)
    used = head.tensors[EMBEDDING].to(dtype) if head.config.own_embedding else embedding
    net = EagleNet(head.config, used.to(device), target_head, ids, dtype)
    return net.load_tensors(head.tensors, str(folder))


def same_matrix(copy: Tensor, original: Tensor) -> bool:
    """Return True if two matrices are equal up to half precision, or the original was prepacked and dropped."""
    if original.numel() == 0:
        return True
    return copy.shape == original.shape and torch.allclose(
        copy.to(original.device, torch.float32), original.float(), rtol=2**-7, atol=2**-14
    )


def load_head(folder: Path) -> Head:
    """Read a head in any layout, as far as possible without its target."""
    folder = Path(folder)
    where = str(folder)
    settings = read_settings(read_config(folder), str(folder / "config.json"))
    stored = read_tensors(folder)
    version = find_version(settings, stored, where)
    names = sort_names(stored, version, where, own_embedding=settings.net["own_embedding"])
    config = find_config(settings, version, names, where)
    tensors = {key: stored[name] for key, name in names.net.items()}
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].flatten()
    check_tensors(tensor_shapes(config), {key: tuple(tensor.shape) for key, tensor in tensors.items()}, where)
    for key, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{where}: {key} must hold numbers of 16 to 64 bits, found {tensor.dtype}: the head is quantised; take "
                f"the original one"
            )
        check_finite(f"{key} of {where}", tensor)
    for name in names.zeros.values():
        if stored[name].any():
            raise UnsupportedError(
                f"{where}: {name} is not zero, and Draftwing's attention has no bias at its output: serve this head "
                f"with the engine that it was made for"
            )
    maps = {key: stored[name] for key, name in names.maps.items()}
    target_ids, map_form = read_draft_vocab(
        maps.get("d2t"), maps.get("t2d"), config.vocab_size, config.draft_vocab_size, where
    )
    # Undo an export for an engine that needs fc to have a bias (zeros were added) or not (one was dropped).
    had_bias = settings.block.fc_bias
    if had_bias is not None and had_bias != config.fc_bias:
        config = replace(config, fc_bias=had_bias)
        if had_bias:
            tensors["fc.bias"] = torch.zeros(config.hidden_size, dtype=tensors["fc.weight"].dtype)
        elif tensors.pop("fc.bias").any():
            raise CheckpointError(
                f"{where}: the head was exported with an fc.bias of zeros, but its fc.bias is not zero: it was changed "
                f"since; take the head from its original place again"
            )
    return Head(
        config=config,
        tensors=tensors,
        target_ids=target_ids,
        copies={key: stored[name] for key, name in names.copies.items()},
        training=settings.block.training,
        verifier=config.target.name if config.target is not None else settings.verifier,
        warnings=tuple(f"{where}: {text}" for text in _warnings(settings, names, map_form)),
    )


def find_version(settings: HeadSettings, names: Mapping[str, Any], where: str) -> int:
    """Return 1 or 3, by the config and the tensors' names, which must agree."""
    version = version_of_names(names)
    if version is None:
        raise CheckpointError(
            f"{where}: expected an EAGLE head, found {len(names)} tensors without an fc.weight among them: is this a "
            f"language model's folder, or another kind of draft model?"
        )
    if settings.version is not None and settings.version != version:
        raise CheckpointError(
            f"{where}: config.json describes an EAGLE-{settings.version} head, but the tensors are those of "
            f"EAGLE-{version}: take both files from one place"
        )
    return version


def find_config(settings: HeadSettings, version: int, names: Names, where: str) -> EagleConfig:
    """Return the net's shape, from the config and from the names of the tensors, which must agree."""
    has_bias = "fc.bias" in names.net
    if settings.bias is not None and settings.bias != has_bias and version == 1:
        raise CheckpointError(
            f"{where}: config.json says `bias` {str(settings.bias).lower()}, but the tensors have "
            f"{'an' if has_bias else 'no'} fc.bias: correct `bias`, {_ONE_PLACE}"
        )
    is_targets = settings.num_layers > MAX_LAYERS and names.num_layers == 1  # copied, as some trainers do
    if settings.num_layers != names.num_layers and not is_targets:
        raise CheckpointError(
            f"{where}: config.json says `num_hidden_layers` {settings.num_layers}, but the tensors are those of "
            f"{names.num_layers}: correct `num_hidden_layers`, {_ONE_PLACE}"
        )
    claim = settings.attention_bias if settings.qkv_bias is None else settings.qkv_bias
    if (claim is False) if names.has_qkv_bias else settings.qkv_bias:
        raise CheckpointError(
            f"{where}: config.json says `qkv_bias` or `attention_bias` {str(claim).lower()}, but the tensors have "
            f"{'' if names.has_qkv_bias else 'no '}biases of queries, keys and values: correct `qkv_bias`, {_ONE_PLACE}"
        )
    taps = find_taps(settings, where)
    num_taps = settings.num_taps or (1 if version == 1 else 3 if taps is None else len(taps))
    config = eagle_config(settings, version, num_taps, names, f"{where}/config.json")
    if taps is None:
        return config
    if len(taps) != num_taps:
        raise CheckpointError(
            f"{where}: config.json names {len(taps)} taps ({', '.join(map(str, taps))}), but says that there are "
            f"{num_taps}: correct it"
        )
    return replace(config, taps=taps)


def find_taps(settings: HeadSettings, where: str) -> tuple[int, ...] | None:
    """Return the taps that a config names, counted as inputs of layers; None if it names none."""
    read = settings.tap_ids
    if read is not None and settings.taps_are_outputs:
        read = tuple(tap + 1 for tap in read)
    block_taps = settings.block.taps
    if block_taps is not None and read is not None and block_taps not in (read, settings.tap_ids):
        raise CheckpointError(
            f"{where}: config.json names the taps twice: {block_taps} in its `draftwing` part, {settings.tap_ids} in "
            f"`{TAP_IDS}`: remove the wrong ones"
        )
    taps = read if block_taps is None else block_taps
    if taps is not None and UNKNOWN_TAP in taps:
        raise CheckpointError(f"{where}: config.json names tap {UNKNOWN_TAP}: taps count from 0; correct it")
    return taps


def _warnings(settings: HeadSettings, names: Names, form: str) -> list[str]:
    ids = ", ".join(map(str, settings.tap_ids or ()))
    cases = (
        (
            settings.num_layers != names.num_layers,
            f"config.json says `num_hidden_layers` {settings.num_layers}, a number copied from the target, and the "
            f"tensors are those of 1, which is read: correct it for vLLM, which would make layers of random numbers",
        ),
        (
            not settings.rope_theta_given,
            "config.json has no `rope_theta`: 10000 is taken, as every reader does; if the head was trained with "
            "another base, few drafts will be accepted: add `rope_theta`",
        ),
        (
            settings.attention_bias and not names.has_qkv_bias,
            "config.json says `attention_bias` true, but there are no biases, and none are used: vLLM would take "
            "random ones: set it to false",
        ),
        (
            form == "ids",
            "d2t holds target ids instead of the usual offsets, and is read as such; engines would draft wrong "
            "tokens: `draftwing convert` writes offsets",
        ),
        (
            settings.taps_are_outputs and settings.layout == "model-optimizer" and settings.block.taps is None,
            f"the taps {ids} inside `eagle_config` are read as the outputs of layers, as SGLang does; vLLM takes them "
            f"for inputs: if the head was trained so, give taps=({ids})",
        ),
        (
            settings.layout == "speculators"
            and settings.norm_before_residual is None
            and settings.net["mask_token_id"] is None,
            "config.json lacks `norm_before_residual`: true is taken, as vLLM does, while speculators' own converter "
            "meant false: add it",
        ),
    )
    return [text for applies, text in cases if applies]


# --- stored tensors --------------------------------------------------------------------------------------------------


def weight_files(folder: Path) -> list[str]:
    """Return the names of the weight files in a folder; an engine may prefer any one of several."""
    return [name for name in (WEIGHTS, PICKLED, *_SHARDED) if os.path.lexists(Path(folder) / name)]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a head as stored, on the CPU; a pickled file is read without running code from it."""
    folder = Path(folder)
    if folder.is_dir() and weight_files(folder) == [PICKLED]:
        return read_pickled(folder / PICKLED)
    with open_weights(folder) as files:
        tensors = {name: files.get(name) for name in files.keys()}  # noqa: SIM118  (not a dict)
    if link_of(folder) is not None and "d2t" in tensors:  # llama.cpp's files hold target ids
        ids = tensors["d2t"]
        tensors["t2d"] = torch.isin(torch.arange(read_config(folder)["vocab_size"]), ids)
        tensors["d2t"] = ids - torch.arange(len(ids))
    return tensors


def read_pickled(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a pickled file; see ``read_tensors``."""
    stored = unpickle(path)
    if not isinstance(stored, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in stored.items()
    ):
        raise CheckpointError(
            f"{path}: expected a dictionary from names to tensors, found {type(stored).__name__} with other things in "
            f"it: have its author save the model's state dict"
        )
    return {name: value.detach() for name, value in stored.items()}


def unpickle(path: Path) -> Any:
    """Return a pickled object of tensors, read without running code from the file."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: expected only tensors, found something that would run code when it is read, or a damaged file "
            f"({str(error).splitlines()[0]:.120}): take the head's safetensors, or have its author save a state dict"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path}: expected a whole PyTorch checkpoint, found a damaged one ({reason(error)}): download it again"
        ) from error
