"""Heads of any net except EAGLE's: the config as JSON, tensors by the net's own names.

    config.json         {"draftwing": {"format": 1, "kind": ..., "config": {...}, "training": {...}}}
    model.safetensors   the net's tensors, and ``draft_ids`` if it has a draft vocabulary

EAGLE heads have layouts that other projects share (``formats.write``).
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, ConfigError, DraftwingError, shown
from draftwing.formats.doctor import Finding
from draftwing.formats.identity import check_same_target, target_id_of_folder
from draftwing.formats.read import checked_training, read_tensors
from draftwing.formats.settings import FORMAT
from draftwing.formats.tensors import EMBEDDING
from draftwing.formats.write import write_folder
from draftwing.methods.net import DraftNet, TargetId
from draftwing.models.config import read_config
from draftwing.models.weights import check_finite

DRAFT_IDS = "draft_ids"


@dataclass(frozen=True)
class PlainHead:
    """The contents of a head's folder."""

    kind: str  # kind of its net
    config: Any  # config of its net, a frozen dataclass
    tensors: Mapping[str, Tensor]  # by the names of ``DraftNet.tensors``
    target_ids: Tensor | None = None  # (V_draft,) ascending int64, or None for the whole vocabulary
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # how it was trained, for people; any JSON
    # The target's own embedding, if the file holds it. It is written again but not run.
    copies: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    num_target_layers: int | None = None  # for a head that does not name its target

    @classmethod
    def from_net(cls, net: DraftNet, training: Mapping[str, Any] | None = None) -> PlainHead:
        """Return the head of a net that is not prepacked. Raises ConfigError if ``training`` is not JSON."""
        return cls(net.kind, net.config, net.tensors(), net.target_ids, checked_training(training))

    def check_target(self, target: TargetId | None, where: str) -> None:
        """Raise CheckpointError if it was trained for another target."""
        check_same_target(self.config.target, target, where)
        if target is None:
            return
        if self.num_target_layers not in (None, target.num_layers):
            raise CheckpointError(
                f"{where}: the head is made for a target of {self.num_target_layers} layers, {target.name} has "
                f"{target.num_layers}: load it with the target that it was trained for"
            )
        last = max(self.config.taps)
        if last > target.num_layers:
            raise CheckpointError(
                f"{where}: the head reads hidden state {last}, and {target.name} has {target.num_layers} layers: load "
                f"it with the target that it was trained for"
            )


def save_plain(folder: Path, head: PlainHead) -> None:
    """Write a head; an older one in the folder is replaced, whole or not at all."""
    ids = {} if head.target_ids is None else {DRAFT_IDS: head.target_ids}
    write_folder(Path(folder), {"draftwing": own_block(head)}, {**head.tensors, **ids, **head.copies})


def own_block(head: PlainHead) -> dict[str, Any]:
    """Return the ``draftwing`` part of a head's config, the same in every layout."""
    return {
        "format": FORMAT,
        "kind": head.kind,
        "config": dataclasses.asdict(head.config),
        "training": dict(head.training),
    }


def load_plain(folder: Path, kind: str, config_type: type, tensors: Mapping[str, Tensor] | None = None) -> PlainHead:
    """Read a head of a kind, without its target; ``tensors`` if they are stored under other names than here."""
    folder = Path(folder)
    block, where = read_config(folder).get("draftwing"), f"{folder / 'config.json'}: draftwing"
    stored_kind = block.get("kind") if isinstance(block, dict) else None
    if not isinstance(block, dict) or stored_kind != kind:
        raise CheckpointError(
            f"{where}: expected a head of kind {kind!r}, found {stored_kind!r}: give a folder of that kind"
        )
    if block.get("format") != FORMAT:
        raise CheckpointError(
            f"{where}: expected format {FORMAT}, found {shown(block.get('format'))}: this head was written by another "
            f"version of Draftwing; use that one"
        )
    config = _parse(config_type, block.get("config"), f"{where}: config")
    tensors = dict(read_tensors(folder) if tensors is None else tensors)
    ids = tensors.pop(DRAFT_IDS, None)
    copies = {EMBEDDING: tensors.pop(EMBEDDING)} if EMBEDDING in tensors else {}
    for name, tensor in tensors.items():
        check_finite(f"{name} of {folder}", tensor)
    if ids is not None:
        check_ids(ids, config.vocab_size, str(folder))
    training = block.get("training")
    return PlainHead(kind, config, tensors, ids, training if isinstance(training, dict) else {}, copies)


def diagnose_plain(folder: Path, target: Path | None, kind: str, read: Callable[[Path], PlainHead]) -> list[Finding]:
    """Check that a head can be read and belongs to the target in the folder ``target``, for ``draftwing doctor``."""
    target_id = None if target is None else target_id_of_folder(target)
    try:
        head = read(folder)
    except DraftwingError as error:
        return [Finding("head", "fail", str(error), "write the head again, or download it again")]
    readable = Finding("head", "ok", f"a {kind} head of {sum(t.numel() for t in head.tensors.values()):,} numbers")
    try:
        head.check_target(target_id, str(folder))
    except CheckpointError as error:
        return [readable, Finding("target", "fail", str(error), "load it with its own target")]
    return [readable, target_finding(head, target_id)]


def target_finding(head: PlainHead, target: TargetId | None) -> Finding:
    """Return the finding for a head that fits ``target``, as far as both are known."""
    if target is None or head.config.target is None:
        return Finding("target", "unknown", "the head does not name its target, or no target was given")
    return Finding("target", "ok", "the target that it was trained for")


def check_ids(ids: Tensor, vocab_size: int, where: str) -> None:
    """Raise CheckpointError unless these can be the ids of a draft vocabulary."""
    is_list = ids.dtype == torch.int64 and ids.ndim == 1 and len(ids) > 0
    if not is_list or not bool((ids.diff() > 0).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise CheckpointError(
            f"{where}: {DRAFT_IDS} must hold ascending int64 ids from 0 to {vocab_size - 1}, found others: take the "
            f"head from its original place again"
        )


def _parse(kind: Any, value: Any, where: str) -> Any:
    """Convert JSON to an annotated type: dataclasses, tuples and lists of one type, unions, numbers and strings."""
    if get_origin(kind) in (Union, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        kind = next(option for option in get_args(kind) if option is not type(None))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be an object, found {shown(value)}: take the head's own config.json")
        hints = get_type_hints(kind)
        fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
        required = [name for name, field in fields.items() if field.default is field.default_factory is MISSING]
        problems = [f"has an unknown field {shown(name)}" for name in value if name not in fields]
        problems += [f"lacks the field {name!r}" for name in required if name not in value]
        if problems:
            raise ConfigError(f"{where} {problems[0]}: take config.json and the code of its net from one place")
        return kind(**{name: _parse(hints[name], item, f"{where}: {name}") for name, item in value.items()})
    if get_origin(kind) in (tuple, list):
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list, found {shown(value)}: correct it")
        return get_origin(kind)(_parse(get_args(kind)[0], item, where) for item in value)
    if kind is float and type(value) is int:
        return float(value)
    if kind in (int, float, bool, str) and type(value) is not kind:
        raise ConfigError(f"{where} must be of type {kind.__name__}, found {shown(value)}: correct it")
    return value
