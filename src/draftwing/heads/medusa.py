"""Medusa heads on disk: our own layout (``heads.plain``), vLLM's, and that of the paper's authors.

               config.json                                   tensors
    vllm       model_type "medusa", num_heads,               blocks.H.layers.L.weight, lm_heads.H.weight; token_map:
               num_hidden_layers, truncated_vocab_size       the target's ids of a draft vocabulary
    medusa     medusa_num_heads, medusa_num_layers           H.L.linear.weight and .bias, then H.LAYERS.weight, the LM
                                                             head; in medusa_lm_head.pt

As read in vLLM 0.10 and in Medusa's own code. What others write says nothing of the target: its last hidden state is
what such heads read. The authors' first configs name fewer heads than there are, so that tensors are counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.heads.card import copy_card
from draftwing.heads.plain import DRAFT_IDS, PlainHead, check_ids, load_plain, own_block, save_plain
from draftwing.heads.prompts import copy_stored
from draftwing.heads.read import read_pickled, read_tensors
from draftwing.heads.write import write_folder
from draftwing.model.config import read_config
from draftwing.model.rope_config import RopeConfig
from draftwing.model.weights import check_finite
from draftwing.nets.eagle_config import TargetId
from draftwing.nets.medusa import MedusaConfig

__all__ = ["MEDUSA_LAYOUTS", "convert_medusa", "is_medusa", "load_medusa"]

MEDUSA_LAYOUTS = ("draftwing", "vllm", "medusa")
FILE = "medusa_lm_head.pt"
_STORED = re.compile(r"(?:medusa_heads?\.)?(.+)")
_OURS = re.compile(r"blocks\.(\d+)\.(\d+)\.(weight|bias)|heads\.(\d+)\.weight")
_VLLM = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)|lm_heads\.(\d+)\.weight")
_AUTHORS = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)|(\d+)\.\d+\.weight")
_NO_ROPE = RopeConfig("default", 10000.0, 2, 2, 1 << 20)  # such nets have no attention


def is_medusa(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is a Medusa head's, in any layout."""
    block = config.get("draftwing")
    if isinstance(block, dict):
        return block.get("kind") == "medusa"
    return config.get("model_type") == "medusa" or "medusa_num_heads" in config


# --- reading ---------------------------------------------------------------------------------------------------------


def load_medusa(folder: Path, target: TargetId | None = None) -> PlainHead:
    """Read a head in any layout.

    Args:
        target: for which it is, where it does not say.

    Raises:
        CheckpointError: weights that are missing, damaged, of odd names or shapes, or of another target.
        ConfigError: a config that cannot be meant, or a head that does not say its target, with none given.
    """
    folder = Path(folder)
    config, where = read_config(folder), str(folder)
    stored = read_pickled(folder / FILE) if (folder / FILE).exists() else read_tensors(folder)
    tensors = _own_names(stored, where)
    if isinstance(config.get("draftwing"), dict):
        head = load_plain(folder, "medusa", MedusaConfig, tensors)
    else:
        head = _foreign(config, tensors, target, where)
    head.check_target(target, where)
    return head


def _own_names(stored: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """The tensors of any layout by our names."""
    found = {}
    for name, tensor in stored.items():
        bare = _STORED.fullmatch(name)[1]  # type: ignore[index]  # it matches anything
        if bare in (DRAFT_IDS, "token_map"):
            found[DRAFT_IDS] = tensor
            continue
        match = _OURS.fullmatch(bare) or _VLLM.fullmatch(bare) or _AUTHORS.fullmatch(bare)
        if match is None:
            raise CheckpointError(
                f"{where}: has a tensor that no Medusa head has: {name!r}: give the heads alone, without the model "
                f"that they belong to"
            )
        head, layer, part, last = match.groups()
        found[f"heads.{last}.weight" if head is None else f"blocks.{head}.{layer}.{part}"] = tensor
    return found


def _foreign(config: Mapping[str, Any], tensors: dict[str, Tensor], target: TargetId | None, where: str) -> PlainHead:
    """A head that does not say for which target it is."""
    if target is None:
        raise ConfigError(f"{where}: the head does not say for which target it is: give its target (--target)")
    ids = tensors.pop(DRAFT_IDS, None)
    for name, tensor in tensors.items():
        check_finite(f"{name} of {where}", tensor)
    blocks = [tuple(map(int, name.split(".")[1:3])) for name in tensors if name.startswith("blocks.")]
    first = tensors.get("blocks.0.0.weight")
    if first is None or first.ndim != 2:
        raise CheckpointError(
            f"{where}: lacks the first head's block: take a Medusa head from its original place again"
        )
    num_heads = 1 + max(head for head, _ in blocks)
    shared = tensors.get("heads.0.weight")
    if config.get("original_lm_head") and shared is not None:
        tensors |= {f"heads.{head}.weight": shared for head in range(num_heads)}
    rows = None if shared is None else shared.shape[0]
    if ids is not None:
        ids, tensors = _in_order(ids, tensors, target.vocab_size, where)
    elif rows not in (None, target.vocab_size):
        raise CheckpointError(
            f"{where}: its LM heads have {rows} tokens, and {target.name} has {target.vocab_size}: load it with the "
            f"target that it was trained for"
        )
    if first.shape[1] != target.hidden_size:
        raise CheckpointError(
            f"{where}: its heads read {first.shape[1]} numbers, and {target.name} has a hidden size of "
            f"{target.hidden_size}: load it with the target that it was trained for"
        )
    own = MedusaConfig(
        taps=(target.num_layers,),
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        rope=_NO_ROPE,
        num_heads=num_heads,
        num_layers=1 + max(layer for _, layer in blocks),
        has_bias="blocks.0.0.bias" in tensors,
        own_heads=shared is not None,
    )
    return PlainHead("medusa", own, tensors, ids)


def _in_order(ids: Tensor, tensors: dict[str, Tensor], vocab_size: int, where: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The draft vocabulary's ids ascending, and the LM heads' rows with them: others may store them as they like."""
    ids, order = ids.long().sort()
    check_ids(ids, vocab_size, where)
    moved = {}
    for name, tensor in tensors.items():
        is_head = name.startswith("heads.")
        if is_head and len(tensor) not in (len(ids), vocab_size):
            raise CheckpointError(
                f"{where}: {name} has {len(tensor)} rows, and the draft vocabulary {len(ids)} tokens: its tensors do "
                f"not belong together"
            )
        moved[name] = tensor[order if len(tensor) == len(ids) else ids] if is_head else tensor
    return ids, moved


# --- writing ---------------------------------------------------------------------------------------------------------

Files = tuple[dict[str, Any], dict[str, Tensor], str]


def _vllm(head: PlainHead) -> Files:
    config = head.config
    written: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": config.has_bias,
    }
    tensors = {_renamed(name, "blocks.{}.layers.{}.{}", "lm_heads.{}.weight"): t for name, t in head.tensors.items()}
    if head.target_ids is not None:
        written["truncated_vocab_size"] = len(head.target_ids)
        tensors["token_map"] = head.target_ids
    return written, tensors, "model.safetensors"


def _authors(head: PlainHead) -> Files:
    config = head.config
    if head.target_ids is not None:
        raise UnsupportedError("the layout 'medusa' has no draft vocabulary, and this head has one: use vllm")
    written = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": "" if config.target is None else config.target.name,
    }
    last = f"{{}}.{config.num_layers}.weight"
    tensors = {_renamed(name, "{}.{}.linear.{}", last): tensor for name, tensor in head.tensors.items()}
    if not config.has_bias:  # its code has no blocks without
        blocks = [name for name in tensors if name.endswith("linear.weight")]
        tensors |= {name.replace("weight", "bias"): torch.zeros(len(tensors[name])) for name in blocks}
    return written, tensors, FILE


def _renamed(name: str, block: str, head: str) -> str:
    parts = name.split(".")
    return head.format(parts[1]) if parts[0] == "heads" else block.format(*parts[1:])


_WRITERS: dict[str, Callable[[PlainHead], Files]] = {"vllm": _vllm, "medusa": _authors}


def convert_medusa(source: Path, destination: Path, to: str, *, target: TargetId | None = None, **said: Any) -> None:
    """Write a head in another layout; see ``heads.convert.convert``.

    Raises:
        CheckpointError: a source that cannot be read, or a destination that cannot be written or is the source.
        ConfigError: no such layout, or a source that does not say its target, with none given.
        UnsupportedError: a head that the layout cannot express.
    """
    source, destination = Path(source), Path(destination)
    if to not in MEDUSA_LAYOUTS:
        raise ConfigError(f"unknown layout {to!r} of a Medusa head: choose one of {', '.join(MEDUSA_LAYOUTS)}")
    if destination.exists() and source.exists() and destination.samefile(source):
        raise CheckpointError(f"{destination}: is the source itself: choose another folder for the converted head")
    head = load_medusa(source, target)
    if to == "draftwing":
        save_plain(destination, head)
    elif not head.config.own_heads:
        raise UnsupportedError(
            f"{source}: uses the target's LM head, which the layout {to!r} would have to hold: keep it as draftwing"
        )
    else:
        config, tensors, name = _WRITERS[to](head)
        write_folder(destination, {**config, "draftwing": own_block(head)}, tensors, name)
    copy_stored(source, destination)
    if to != "medusa":  # whose pickled file a card does not look into
        copy_card(source, destination, to)
