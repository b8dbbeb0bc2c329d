"""Heads read from any layout, and written in our own.

Ours is the layout that EAGLE published, ``config.json`` beside ``model.safetensors`` with the published names, so
that vLLM and SGLang read it as directly as they read anybody's; a ``draftwing`` part in the config holds what it
has no word for: which target the head belongs to, its taps, its inputs and how it was trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, DraftwingWarning
from draftwing.heads.files import PICKLED, read_tensors, weight_files, write_folder
from draftwing.heads.head import EMBEDDING, LM_HEAD, UNKNOWN_TAP, Head, expected_shapes
from draftwing.heads.layouts import head_files
from draftwing.heads.names import Names, check_names, check_shapes, sort_names, version_of_names
from draftwing.heads.settings import Settings, eagle_config, is_head_config, read_settings
from draftwing.heads.vocab import read_draft_vocab
from draftwing.model.config import read_config
from draftwing.model.linear import Linear
from draftwing.model.weights import WeightFiles, check_finite
from draftwing.nets.eagle import EagleNet
from draftwing.nets.eagle_config import EagleConfig, TargetId

__all__ = [
    "check_destination",
    "find_config",
    "find_taps",
    "find_version",
    "head_version",
    "is_head",
    "load_head",
    "read_config",
    "read_head",
    "same_matrix",
    "save_head",
    "write_head",
]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_head(config: Mapping[str, Any], folder: Path | None = None) -> bool:
    """Whether a ``config.json`` is a draft head's and not a language model's.

    A published EAGLE-1 head has the config of a small Llama. Only its tensors tell, so that for such a config
    ``folder`` is looked into; without a folder it counts as a language model's.
    """
    sure = is_head_config(config)
    if sure is not None or folder is None:
        return bool(sure)
    names: list[str] = []
    try:
        if weight_files(folder)[:1] == [PICKLED]:
            names = list(read_tensors(folder))
        else:
            with WeightFiles(folder) as files:
                names = files.keys()
    except CheckpointError:
        pass  # what is wrong with the weights is said by whoever loads them
    return version_of_names(names) is not None


def write_head(folder: Path, net: EagleNet, *, training: Mapping[str, Any] | None = None) -> None:
    """Write a net as a head folder of ours; an older head in it is replaced, whole or not at all.

    Args:
        net: not prepacked.
        training: how it was trained: any JSON. `draftwing doctor` knows two keys: ``chat_template`` (see
            ``chat_template_hash``) and ``coverage``, the share of the training tokens that the draft vocabulary has.

    Raises:
        CheckpointError: the folder cannot be written, or holds another model.
        ConfigError: ``training`` is not JSON.
    """
    save_head(Path(folder), Head.from_net(net, training), "draftwing")


def save_head(folder: Path, head: Head, layout: str, *, depth: int = 5) -> None:
    """Write a head in one of the ``LAYOUTS``; ``depth`` is how many tokens speculators' config proposes.

    Raises:
        UnsupportedError: the layout cannot express this head.
        CheckpointError: the folder cannot be written, or holds another model.
    """
    config, tensors = head_files(head, layout, depth)
    check_destination(folder)
    write_folder(folder, config, tensors)


def check_destination(folder: Path) -> None:
    """Raise CheckpointError where writing a head would overwrite something that is not one."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a folder to write into, found a file: choose another path")
    if (folder / "config.json").exists() and not is_head(read_config(folder), folder):
        raise CheckpointError(
            f"{folder}: holds another model, which a head would overwrite: choose a folder of its own for the head"
        )


def read_head(
    folder: Path,
    embedding: Tensor,
    target_head: Linear | None = None,
    target: TargetId | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    *,
    taps: tuple[int, ...] | None = None,
) -> EagleNet:
    """Load a head in any layout as a net, ready for a target.

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
        DraftwingWarning: something had to be guessed or mended; `draftwing doctor` says more.
    """
    folder = Path(folder)
    head = load_head(folder).for_target(target, taps, str(folder))
    if not head.knows_taps:
        raise CheckpointError(
            f"{folder}: neither the head nor its loader says which hidden states of the target it reads: give the "
            f"target, whose defaults are usual, or the taps"
        )
    if embedding.shape != (head.config.vocab_size, head.config.hidden_size):
        raise CheckpointError(
            f"{folder}: the head is made for a target with an embedding of "
            f"{(head.config.vocab_size, head.config.hidden_size)}, this one's is {tuple(embedding.shape)}: load it "
            f"with the target that it was trained for"
        )
    own = {EMBEDDING: embedding, LM_HEAD: None if target_head is None else target_head.weight}
    for text in (*head.warnings, *_differing_copies(head, own, str(folder))):
        warnings.warn(DraftwingWarning(text), stacklevel=2)
    device = embedding.device if device is None else torch.device(device)
    ids = None if head.target_ids is None else head.target_ids.to(device)
    net = EagleNet(head.config, embedding.to(device), target_head, ids, dtype)
    return net.load_tensors(head.tensors, str(folder))


def _differing_copies(head: Head, own: Mapping[str, Tensor | None], where: str) -> list[str]:
    return [
        f"{where}: its {name} is not the target's own, which is used instead: if it was trained for another version of "
        f"this model, expect fewer accepted tokens, and load it with that one"
        for name, tensor in own.items()
        if name in head.copies and tensor is not None and not same_matrix(head.copies[name], tensor)
    ]


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
    names = sort_names(tensors, version, where)
    config = find_config(settings, version, names, where)
    expected = expected_shapes(config)
    check_names(expected, names.net, where)
    check_shapes(expected, {key: tuple(tensors[name].shape) for key, name in names.net.items()}, where)
    named = {key: tensors[name] for key, name in names.net.items()}
    for key, tensor in named.items():
        _check_numbers(key, tensor, where)
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
        warnings=tuple(_warnings(settings, vocab.form, where)),
    )


def _check_numbers(name: str, tensor: Tensor, where: str) -> None:
    if tensor.dtype not in _FLOATS:
        raise CheckpointError(
            f"{where}: {name} must hold numbers of 16 to 64 bits, found {tensor.dtype}: the head is quantised; take "
            f"the one that is not"
        )
    check_finite(f"{name} of {where}", tensor)


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
    """The net's shape, from the config and from what only the tensors' names show: whether fc has a bias."""
    has_bias = "fc.bias" in names.net
    if settings.bias is not None and settings.bias != has_bias and version == 1:
        raise CheckpointError(
            f"{where}: config.json says `bias` {str(settings.bias).lower()}, but the tensors have "
            f"{'an' if has_bias else 'no'} fc.bias: correct `bias`, or take both files from one place"
        )
    taps = find_taps(settings, where)
    num_taps = settings.num_taps or (1 if version == 1 else 3 if taps is None else len(taps))
    config = eagle_config(settings, version, num_taps, fc_bias=has_bias, where=f"{where}/config.json")
    if taps is None:
        return config
    if len(taps) != num_taps:
        raise CheckpointError(
            f"{where}: config.json names {len(taps)} taps ({', '.join(map(str, taps))}), but says that there are "
            f"{num_taps}: correct it"
        )
    return replace(config, taps=taps)


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


def _warnings(settings: Settings, form: str, where: str) -> list[str]:
    found = []
    if not settings.rope_theta_given:
        found.append(
            f"{where}: config.json has no `rope_theta`: 10000 is taken, as every reader does; if the head was trained "
            f"with another base it will guess badly: add `rope_theta`"
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
