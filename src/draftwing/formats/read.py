"""Heads read from any layout: what a folder's config and tensors say together, and the net that they make."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, DraftwingWarning, UnsupportedError
from draftwing.formats.head import Head
from draftwing.formats.names import (
    EMBEDDING,
    LM_HEAD,
    UNKNOWN_TAP,
    Names,
    check_names,
    check_shapes,
    sort_names,
    version_of_names,
)
from draftwing.formats.settings import Settings, claimed_version, eagle_config, is_head_config, read_settings
from draftwing.formats.vocab import read_draft_vocab
from draftwing.methods.eagle_net import EagleConfig, EagleNet, tensor_shapes
from draftwing.methods.net import TargetId
from draftwing.models.config import read_config
from draftwing.models.linear import Embedding, Linear
from draftwing.models.weights import WeightFiles, check_finite

WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
_SHARDED = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_head(config: Mapping[str, Any], folder: Path | None = None) -> bool:
    """Whether a ``config.json`` is a draft head's and not a language model's.

    A published EAGLE-1 head has the config of a small Llama. Only its tensors tell, so that for such a config
    ``folder`` is looked into; without a folder it counts as a language model's.
    """
    sure = is_head_config(config)
    if sure is not None or folder is None:
        return bool(sure)
    return version_of_names(_names_in(folder)) is not None


def eagle_version(config: Mapping[str, Any], folder: Path) -> int | None:
    """1 or 3 where a folder looks like an EAGLE head's, by its config or else its tensors' names; None for others.

    Nothing is checked: ``load_head`` says where config and tensors differ.
    """
    block = config.get("draftwing")
    if (isinstance(block, dict) and "kind" in block) or not is_head(config, folder):
        return None
    said = block.get("version") if isinstance(block, dict) else claimed_version(config)
    return said if said in (1, 3) else version_of_names(_names_in(folder)) or 3


def _names_in(folder: Path) -> list[str]:
    """Of its tensors; none where they cannot be read, which is said by whoever loads them."""
    try:
        if weight_files(folder)[:1] == [PICKLED]:
            return list(read_tensors(folder))
        with WeightFiles(folder) as files:
            return files.keys()
    except CheckpointError:
        return []


def read_head(
    folder: Path,
    embedding: Tensor | Embedding,
    target_head: Linear | None = None,
    target: TargetId | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    *,
    taps: tuple[int, ...] | None = None,
) -> EagleNet:
    """Load a head in any layout as a net, ready for a target.

    An embedding in the head's file that is not the target's is used in its place: the head was trained with it.

    Args:
        embedding: (V, H) the target's.
        target_head: the target's LM head, which EAGLE-1 reads.
        target: which target that is; with it the head is checked to be made for it.
        dtype: of the net's weights.
        device: where to; None takes the embedding's.
        taps: read these hidden states of the target instead of those that the folder names.

    Raises:
        CheckpointError: tensors missing, unknown, of other shapes or not finite, an impossible draft vocabulary,
            or a head for another target.
        ConfigError, UnsupportedError: a config that cannot be meant, or a kind of head that has no net here.

    Warns:
        DraftwingWarning: something had to be guessed or fixed; `draftwing doctor` says more.
    """
    folder = Path(folder)
    head = load_head(folder).for_target(target, taps, str(folder))
    if not head.knows_taps:
        raise CheckpointError(
            f"{folder}: neither the head nor its loader says which hidden states of the target it reads: give the "
            f"target (of 3 layers or more, its defaults are then taken), or the taps"
        )
    wanted = (head.config.vocab_size, head.config.feature_size)
    if embedding.shape != wanted:
        raise CheckpointError(
            f"{folder}: the head is made for a target with an embedding of {wanted}, this one's is "
            f"{tuple(embedding.shape)}: load it with the target that it was trained for"
        )
    if EMBEDDING in head.copies:
        rows = embedding.plain() if isinstance(embedding, Embedding) else embedding
        head = head if same_matrix(head.copies[EMBEDDING], rows) else head.with_own_embedding()
    said = list(head.warnings)
    copy = head.copies.get(LM_HEAD)
    if copy is not None and target_head is not None and not same_matrix(copy, target_head.weight):
        said.append(
            f"{folder}: its {LM_HEAD} is not the target's own, which is used instead: if it was trained for another "
            f"version of this model, expect fewer accepted tokens, and load it with that one"
        )
    for text in said:
        warnings.warn(DraftwingWarning(text), stacklevel=2)
    device = embedding.device if device is None else torch.device(device)
    ids = None if head.target_ids is None else head.target_ids.to(device)
    own = head.tensors[EMBEDDING].to(dtype) if head.config.own_embedding else embedding
    net = EagleNet(head.config, own.to(device), target_head, ids, dtype)
    return net.load_tensors(head.tensors, str(folder))


def same_matrix(copy: Tensor, own: Tensor) -> bool:
    """Whether a head's copy of a matrix is the target's ``own``, as far as rounding to half precision lets one see.

    An ``own`` that was prepacked and dropped passes: there is nothing left to compare with.
    """
    if own.numel() == 0:
        return True
    return copy.shape == own.shape and torch.allclose(
        copy.to(own.device, torch.float32), own.float(), rtol=2**-7, atol=2**-14
    )


# --- reading without a target ----------------------------------------------------------------------------------------


def load_head(folder: Path) -> Head:
    """Read a head in any layout, as far as it can be understood without its target.

    Raises:
        CheckpointError, ConfigError, UnsupportedError: as ``read_head``.
    """
    folder = Path(folder)
    where = str(folder)
    settings = read_settings(read_config(folder), str(folder / "config.json"))
    tensors = read_tensors(folder)
    version = find_version(settings, tensors, where)
    names = sort_names(tensors, version, where, own_embedding=settings.own_embedding)
    config = find_config(settings, version, names, where)
    expected = tensor_shapes(config)
    check_names(expected, names.net, where)
    check_shapes(expected, {key: tuple(tensors[name].shape) for key, name in names.net.items()}, where)
    named = {key: tensors[name] for key, name in names.net.items()}
    for key, tensor in named.items():
        _check_numbers(key, tensor, where)
    for name in names.zeros.values():
        _check_zero(name, tensors[name], where)
    maps = {key: tensors[name] for key, name in names.maps.items()}
    vocab = read_draft_vocab(maps.get("d2t"), maps.get("t2d"), config.vocab_size, config.draft_vocab_size, where)
    config = _own_bias(config, settings, named, where)
    return Head(
        config=config,
        tensors=named,
        target_ids=vocab.target_ids,
        copies={key: tensors[name] for key, name in names.copies.items()},
        training=settings.block.training if settings.block is not None else {},
        verifier=config.target.name if config.target is not None else settings.verifier,
        warnings=tuple(_warnings(settings, names, vocab.form, where)),
    )


def _check_numbers(name: str, tensor: Tensor, where: str) -> None:
    if tensor.dtype not in _FLOATS:
        raise CheckpointError(
            f"{where}: {name} must hold numbers of 16 to 64 bits, found {tensor.dtype}: the head is quantised; take "
            f"the one that is not"
        )
    check_finite(f"{name} of {where}", tensor)


def _check_zero(name: str, tensor: Tensor, where: str) -> None:
    if tensor.any():
        raise UnsupportedError(
            f"{where}: {name} is not zero, and Draftwing's attention has no bias at its output: serve this head with "
            f"the engine that it was made for"
        )


def head_version(folder: Path) -> int:
    """1 or 3; no number of the head is read. Raises as ``load_head`` for a folder that has none."""
    folder = Path(folder)
    settings = read_settings(read_config(folder), str(folder / "config.json"))
    return find_version(settings, read_tensors(folder), str(folder))


def find_version(settings: Settings, names: Mapping[str, Any], where: str) -> int:
    """1 or 3, by the config and the tensors' names, which must agree."""
    found = version_of_names(names)
    if found is None:
        raise CheckpointError(
            f"{where}: expected an EAGLE head, found {len(names)} tensors without an fc.weight among them: is this a "
            f"language model's folder, or another kind of draft model?"
        )
    if settings.version is not None and settings.version != found:
        raise CheckpointError(
            f"{where}: config.json describes an EAGLE-{settings.version} head, but the tensors are those of "
            f"EAGLE-{found}: take both files from one place"
        )
    return found


def find_config(settings: Settings, version: int, names: Names, where: str) -> EagleConfig:
    """The net's shape, from the config and from what only the tensors' names show: which biases there are."""
    _check_claims(settings, version, names, where)
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


def _check_claims(settings: Settings, version: int, names: Names, where: str) -> None:
    """Raise CheckpointError where config and tensors differ in layers or biases."""
    has_bias = "fc.bias" in names.net
    if settings.bias is not None and settings.bias != has_bias and version == 1:
        raise CheckpointError(
            f"{where}: config.json says `bias` {str(settings.bias).lower()}, but the tensors have "
            f"{'an' if has_bias else 'no'} fc.bias: correct `bias`, or take both files from one place"
        )
    if settings.num_layers != names.num_layers:
        raise CheckpointError(
            f"{where}: config.json says `num_hidden_layers` {settings.num_layers}, but the tensors are those of "
            f"{names.num_layers}: correct `num_hidden_layers`, or take both files from one place"
        )
    said = settings.attention_bias if settings.qkv_bias is None else settings.qkv_bias
    if (said is False) if names.has_qkv_bias else settings.qkv_bias:
        raise CheckpointError(
            f"{where}: config.json says `qkv_bias` or `attention_bias` {str(said).lower()}, but the tensors have "
            f"{'' if names.has_qkv_bias else 'no '}biases of queries, keys and values: correct `qkv_bias`, or take "
            f"both files from one place"
        )


def find_taps(settings: Settings, where: str) -> tuple[int, ...] | None:
    """The taps that a config names, counted as we count; None if it names none."""
    read = settings.tap_ids
    if read is not None and settings.taps_are_outputs:
        read = tuple(tap + 1 for tap in read)
    own = settings.block.taps if settings.block is not None else None
    if own is not None and read is not None and own not in (read, settings.tap_ids):
        raise CheckpointError(
            f"{where}: config.json names the taps twice: {own} in its `draftwing` part, {settings.tap_ids} in "
            f"`eagle_aux_hidden_state_layer_ids`: remove the ones that are wrong"
        )
    taps = read if own is None else own
    if taps is not None and UNKNOWN_TAP in taps:
        raise CheckpointError(f"{where}: config.json names tap {UNKNOWN_TAP}: taps count from 0; correct it")
    return taps


def _warnings(settings: Settings, names: Names, form: str, where: str) -> list[str]:
    found = []
    if not settings.rope_theta_given:
        found.append(
            f"{where}: config.json has no `rope_theta`: 10000 is taken, as every reader does; if the head was trained "
            f"with another base it will guess badly: add `rope_theta`"
        )
    if settings.attention_bias and not names.has_qkv_bias:
        found.append(
            f"{where}: config.json says `attention_bias` true, but there are no biases, and none are used: vLLM would "
            f"take random ones: set it to false"
        )
    if form == "ids":
        found.append(
            f"{where}: d2t holds target ids where offsets are usual, and is read as such; engines would draft wrong "
            f"tokens: `draftwing convert` writes offsets"
        )
    if settings.taps_are_outputs and (settings.block is None or settings.block.taps is None):
        ids = ", ".join(map(str, settings.tap_ids or ()))
        found.append(
            f"{where}: the taps {ids} inside `eagle_config` are read as the outputs of layers, as SGLang does; vLLM "
            f"takes them for inputs: if the head was trained so, give taps=({ids})"
        )
    if settings.layout == "speculators" and settings.norm_before_residual is None:
        found.append(
            f"{where}: config.json does not say `norm_before_residual`, true is taken, as vLLM does, while "
            f"speculators' own converter meant false: add it"
        )
    return found


def _own_bias(config: EagleConfig, settings: Settings, named: dict[str, Tensor], where: str) -> EagleConfig:
    """EAGLE-1's fc as it was before an export for an engine that wants a bias (zeros were added) or none (dropped)."""
    had = settings.block.fc_bias if settings.block is not None else None
    if had is None or had == config.fc_bias:
        return config
    if had:
        named["fc.bias"] = torch.zeros(config.hidden_size, dtype=named["fc.weight"].dtype)
    elif named.pop("fc.bias").any():
        raise CheckpointError(
            f"{where}: the head was exported with an fc.bias of zeros, but its fc.bias is not zero: it was changed "
            f"since; take the head from its original place again"
        )
    return replace(config, fc_bias=had)


# --- tensors as stored -----------------------------------------------------------------------------------------------


def weight_files(folder: Path) -> list[str]:
    """The names of the weight files that a folder has; an engine may prefer any one of several."""
    folder = Path(folder)
    return [name for name in (WEIGHTS, PICKLED, *_SHARDED) if os.path.lexists(folder / name)]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a head as they are stored, on the CPU: of its safetensors, or of its ``pytorch_model.bin``.

    A pickled file is read with ``weights_only``, which runs no code from it.

    Raises:
        CheckpointError: no weights, or weights that are truncated, corrupt, or pickled with more than tensors.
    """
    folder = Path(folder)
    if folder.is_dir() and weight_files(folder) == [PICKLED]:
        return read_pickled(folder / PICKLED)
    with WeightFiles(folder) as files:
        return {name: files.get(name) for name in files.keys()}  # noqa: SIM118  (its own method, not a dict's)


def read_pickled(path: Path) -> dict[str, Tensor]:
    """All tensors of a pickled file; see ``read_tensors``."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: expected tensors alone, found something that would run code when it is read, or a damaged file "
            f"({str(error).splitlines()[0]:.120}): take the head's safetensors, or have its author save a state dict"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path}: expected a whole PyTorch checkpoint, found a truncated or corrupt one ({error}): download it "
            f"again"
        ) from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise CheckpointError(
            f"{path}: expected a dictionary from names to tensors, found {type(found).__name__} with other things in "
            f"it: have its author save the model's state dict"
        )
    return {name: value.detach() for name, value in found.items()}
