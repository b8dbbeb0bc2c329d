"""A head between two layouts: an EAGLE net's shape and tensors, without the target that it needs to run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.formats.identity import differences
from draftwing.formats.names import EMBEDDING, UNKNOWN_TAP
from draftwing.methods.eagle_net import EagleConfig, EagleNet, default_taps
from draftwing.methods.net import TargetId


@dataclass(frozen=True)
class Head:
    """What a head's folder holds.

    Attributes:
        config: the net's shape; ``taps`` are ``UNKNOWN_TAP`` where nobody says which they are.
        tensors: by EAGLE's names, as ``EagleNet.tensors()`` gives them, dtypes as stored.
        target_ids: (V_draft,) ascending int64, or None for the whole vocabulary.
        copies: the target's own ``embed_tokens.weight`` and, in an EAGLE-1 head, ``lm_head.weight`` where the file
            carries them. They travel along and are not run; an embedding that turns out not to be the target's
            belongs to the net instead (``with_own_embedding``).
        training: how it was trained, for people; any JSON.
        verifier: the target's name or path, if it is known.
        warnings: what had to be guessed or fixed to read it.
    """

    config: EagleConfig
    tensors: Mapping[str, Tensor]
    target_ids: Tensor | None = None
    copies: Mapping[str, Tensor] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    verifier: str | None = None
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_net(cls, net: EagleNet, training: Mapping[str, Any] | None = None) -> Head:
        """The head of a net that has not been prepacked. Raises ConfigError if ``training`` is no JSON."""
        name = net.config.target.name if net.config.target is not None else None
        ids = None if net.target_ids is None else net.target_ids.to("cpu", torch.int64)
        return cls(net.config, net.tensors(), ids, training=checked_training(training), verifier=name)

    @property
    def knows_taps(self) -> bool:
        """Whether the taps are known, and not just how many there are."""
        return UNKNOWN_TAP not in self.config.taps

    @property
    def has_default_taps(self) -> bool:
        """Whether an engine that is told no taps reads the right ones."""
        if not self.knows_taps:
            return True
        target = self.config.target
        if target is None:
            return False
        return self.config.taps == usual_taps(self.config.version, target.num_layers)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["fc.weight"].dtype

    def with_own_embedding(self) -> Head:
        """This head with the embedding among its ``copies`` as a part of the net."""
        copies = dict(self.copies)
        tensors = {**self.tensors, EMBEDDING: copies.pop(EMBEDDING)}
        return replace(self, config=replace(self.config, own_embedding=True), tensors=tensors, copies=copies)

    def for_target(self, target: TargetId | None, taps: tuple[int, ...] | None, where: str) -> Head:
        """This head with its target known, and its taps where they follow from that.

        Args:
            target: what it is going to run with; None if that is not known.
            taps: read these instead of what the folder says.

        Raises:
            CheckpointError: it was made for another target, or for another number of taps.
            UnsupportedError: it reads a state of the target that Draftwing does not tap.
        """
        config = self.config
        if target is not None:
            _check_target(config, target, where)
            config = replace(config, target=config.target or target)
        if taps is not None and len(taps) != len(config.taps):
            raise CheckpointError(
                f"{where}: the head reads {len(config.taps)} of the target's hidden states, but {len(taps)} taps are "
                f"given ({', '.join(map(str, taps))}): give {len(config.taps)}"
            )
        known = config.target
        if taps is None and known is not None and UNKNOWN_TAP in config.taps:
            # Only three have defaults; a head of another number that does not name them stays unknown.
            usual = usual_taps(config.version, known.num_layers)
            taps = usual if usual is not None and len(usual) == len(config.taps) else None
        elif taps is None and target is not None and self.config.target is None:
            _check_last_tap(config, target, where)
        if taps is not None:
            config = replace(config, taps=taps)
        if taps is not None or self.knows_taps:
            _check_taps(config.taps, known, where)
        return replace(self, config=config, verifier=self.verifier or (known.name if known else None))


def checked_training(training: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is said of a head's training, as JSON gives it back. Raises ConfigError if it is none."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(training or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"what is said of a head's training must be JSON ({error}): give plain numbers, strings, lists and "
            f"dictionaries"
        ) from error
    return found


def usual_taps(version: int, num_layers: int) -> tuple[int, ...] | None:
    """What every engine reads of a target of ``num_layers`` layers that is told nothing; None where it cannot."""
    if version == 1:
        return (num_layers,)
    return default_taps(num_layers) if num_layers >= 3 else None


def _check_target(config: EagleConfig, target: TargetId, where: str) -> None:
    own = config.target or TargetId("", config.feature_size, 0, config.vocab_size)
    wrong = differences(own, target)
    if wrong:
        name = f" {own.name}" if own.name else " another target"
        raise CheckpointError(
            f"{where}: this head is made for{name}, not for {target.name} ({'; '.join(wrong)}): load it with the "
            f"target that it was trained for, or train one for {target.name}"
        )


def _check_taps(taps: tuple[int, ...], target: TargetId | None, where: str) -> None:
    wrong = [tap for tap in taps if tap < 0 or (target is not None and tap > target.num_layers)]
    if wrong:
        layers = "" if target is None else f" to {target.num_layers}, the layers of {target.name}"
        raise CheckpointError(
            f"{where}: tap {wrong[0]} is no hidden state of the target: taps run from 0{layers}; correct the taps in "
            f"config.json, or give others"
        )


def _check_last_tap(config: EagleConfig, target: TargetId, where: str) -> None:
    # Ours is the state after the final norm, which EAGLE-1 reads everywhere; in EAGLE-3 engines give the one before.
    if config.version == 3 and target.num_layers in config.taps:
        raise UnsupportedError(
            f"{where}: the head reads the target's last hidden state before the final norm (tap {target.num_layers}), "
            f"which Draftwing does not tap: serve it with the engine that it was made for"
        )
