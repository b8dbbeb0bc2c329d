"""The layout of any net's head: its config as JSON, its tensors by their own names.

    config.json         {"draftwing": {"format": 1, "kind": ..., "config": {...}, "training": {...}}}
    model.safetensors   the net's tensors, and ``draft_ids`` where it has a draft vocabulary

EAGLE heads have layouts of the field's (``layouts``); this one is for nets that nobody else runs.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, ConfigError, DraftwingError, shown
from draftwing.formats.doctor import Finding
from draftwing.formats.head import checked_training
from draftwing.formats.identity import differences, target_id_of_folder
from draftwing.formats.read import read_tensors
from draftwing.formats.settings import FORMAT
from draftwing.formats.write import write_folder
from draftwing.methods.net import DraftNet, TargetId
from draftwing.models.config import read_config
from draftwing.models.weights import check_finite

DRAFT_IDS = "draft_ids"


@dataclass(frozen=True)
class PlainHead:
    """What a head's folder holds.

    Attributes:
        kind: of its net.
        config: of its net, a frozen dataclass.
        tensors: as ``DraftNet.tensors`` names them.
        target_ids: (V_draft,) ascending int64, or None for the whole vocabulary.
        training: how it was trained, for people; any JSON.
    """

    kind: str
    config: Any
    tensors: Mapping[str, Tensor]
    target_ids: Tensor | None = None
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_net(cls, net: DraftNet, training: Mapping[str, Any] | None = None) -> PlainHead:
        """The head of a net that has not been prepacked. Raises ConfigError if ``training`` is no JSON."""
        return cls(net.kind, net.config, net.tensors(), net.target_ids, checked_training(training))

    def check_target(self, target: TargetId | None, where: str) -> None:
        """Raise CheckpointError if it was trained for another target."""
        own = getattr(self.config, "target", None)
        wrong = [] if own is None or target is None else differences(own, target)
        if own is not None and target is not None and wrong:
            raise CheckpointError(
                f"{where}: this head is made for {own.name}, not for {target.name} ({'; '.join(wrong)}): load it with "
                f"the target that it was trained for, or train one for {target.name}"
            )


def save_plain(folder: Path, head: PlainHead) -> None:
    """Write a head; an older one in the folder is replaced, whole or not at all.

    Raises:
        CheckpointError: the folder cannot be written, or holds another model.
    """
    ids = {} if head.target_ids is None else {DRAFT_IDS: head.target_ids}
    write_folder(Path(folder), {"draftwing": own_block(head)}, {**head.tensors, **ids})


def own_block(head: PlainHead) -> dict[str, Any]:
    """What a config says of the head for ourselves, in whatever layout."""
    return {
        "format": FORMAT,
        "kind": head.kind,
        "config": dataclasses.asdict(head.config),
        "training": dict(head.training),
    }


def load_plain(folder: Path, kind: str, config_type: type, tensors: Mapping[str, Tensor] | None = None) -> PlainHead:
    """Read a head, without its target.

    Args:
        kind: that it must be of.
        config_type: of its net's config.
        tensors: as this layout names them, where they were stored under other names.

    Raises:
        CheckpointError: another kind of head, or weights that are missing, damaged or not finite.
        ConfigError: a config that does not fit ``config_type``.
    """
    folder = Path(folder)
    block, where = read_config(folder).get("draftwing"), f"{folder / 'config.json'}: draftwing"
    said = block.get("kind") if isinstance(block, dict) else None
    if not isinstance(block, dict) or said != kind:
        raise CheckpointError(f"{where}: expected a head of kind {kind!r}, found {said!r}: give a folder of that kind")
    if block.get("format") != FORMAT:
        raise CheckpointError(
            f"{where}: expected format {FORMAT}, found {shown(block.get('format'))}: this head was written by another "
            f"version of Draftwing; use that one"
        )
    config = _parse(config_type, block.get("config"), f"{where}: config")
    found = dict(read_tensors(folder) if tensors is None else tensors)
    ids = found.pop(DRAFT_IDS, None)
    for name, tensor in found.items():
        check_finite(f"{name} of {folder}", tensor)
    if ids is not None:
        check_ids(ids, config.vocab_size, str(folder))
    training = block.get("training")
    return PlainHead(kind, config, found, ids, training if isinstance(training, dict) else {})


def diagnose_plain(folder: Path, target: Path | None, kind: str, config_type: type) -> list[Finding]:
    """Can it be read, and does it belong to the target in the folder ``target``? For ``draftwing doctor``.

    Raises:
        CheckpointError, ConfigError, TokenizerError: the target's folder cannot be read.
    """
    own = None if target is None else target_id_of_folder(target)
    try:
        head = load_plain(folder, kind, config_type)
    except DraftwingError as error:
        return [Finding("head", "fail", str(error), "write the head again, or download it again")]
    findings = [Finding("head", "ok", f"a {kind} head of {sum(t.numel() for t in head.tensors.values()):,} numbers")]
    try:
        head.check_target(own, str(folder))
    except CheckpointError as error:
        return [*findings, Finding("target", "fail", str(error), "load it with its own target")]
    known = own is not None and getattr(head.config, "target", None) is not None
    unknown = Finding("target", "unknown", "the head does not say for which target it was trained, or none was given")
    return [*findings, Finding("target", "ok", "the one that it was trained for") if known else unknown]


def check_ids(ids: Tensor, vocab_size: int, where: str) -> None:
    """Raise CheckpointError unless these can be the ids of a draft vocabulary."""
    good = ids.dtype == torch.int64 and ids.ndim == 1 and len(ids) > 0
    if not good or not bool((ids.diff() > 0).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise CheckpointError(
            f"{where}: {DRAFT_IDS} must hold ascending int64 ids from 0 to {vocab_size - 1}, found others: take the "
            f"head from its original place again"
        )


def _parse(kind: Any, value: Any, where: str) -> Any:
    """JSON as a value of an annotated type: dataclasses, tuples and lists of one type, unions, numbers and strings."""
    if get_origin(kind) in (Union, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        kind = next(each for each in get_args(kind) if each is not type(None))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be an object, found {shown(value)}: take the head's own config.json")
        hints = get_type_hints(kind)
        fields = {each.name: each for each in dataclasses.fields(kind) if each.init}
        odd = next((name for name in value if name not in fields), None)
        lacks = next((name for name in fields if name not in value and _is_required(fields[name])), None)
        if odd is not None or lacks is not None:
            what = f"has an unknown field {shown(odd)}" if odd is not None else f"lacks the field {lacks!r}"
            raise ConfigError(f"{where} {what}: take config.json and the code of its net from one place")
        return kind(**{name: _parse(hints[name], each, f"{where}: {name}") for name, each in value.items()})
    if get_origin(kind) in (tuple, list):
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list, found {shown(value)}: correct it")
        return get_origin(kind)(_parse(get_args(kind)[0], each, where) for each in value)
    if kind is float and type(value) is int:
        return float(value)
    if kind in (int, float, bool, str) and type(value) is not kind:
        raise ConfigError(f"{where} must be of type {kind.__name__}, found {shown(value)}: correct it")
    return value


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
