"""EAGLE-1, EAGLE-2, HASS, EAGLE-3 and EAGLE-3.1 as draft methods: one network, one drafter, several trainings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.formats.convert import convert
from draftwing.formats.doctor import Finding, diagnose
from draftwing.formats.read import eagle_version, read_head
from draftwing.formats.write import write_head
from draftwing.methods.eagle_init import initialise
from draftwing.methods.eagle_net import EagleConfig, EagleNet, default_taps
from draftwing.methods.method import NetMethod, NewNet
from draftwing.methods.net import Scored, TargetId
from draftwing.models.linear import Embedding, Linear


class Eagle1(NetMethod):
    """An EAGLE-1 head, whose trees are EAGLE-2's; HASS is a way of training one."""

    version = 1
    layouts: tuple[str, ...] = ("draftwing", "eagle", "vllm", "sglang")
    settings: tuple[str, ...] = ("inputs",)

    def recognises(self, config: Mapping[str, Any], folder: Path) -> bool:
        return eagle_version(config, folder) == self.version

    def read(
        self,
        folder: Path,
        embedding: Tensor | Embedding,
        target_head: Linear | None = None,
        target: TargetId | None = None,
        dtype: torch.dtype | None = None,
    ) -> EagleNet:
        return read_head(folder, embedding, target_head, target, dtype or torch.float32)

    def write(self, folder: Path, net: Any, *, training: Mapping[str, Any] | None = None) -> None:
        write_head(folder, net, training=training)

    def convert(self, source: Path, destination: Path, to: str, **options: Any) -> None:
        convert(source, destination, to, **options)

    def diagnose(self, folder: Path, target: Path | None) -> list[Finding]:
        return diagnose(folder, target)

    def new(self, new: NewNet) -> EagleNet:
        size = None if new.target_ids is None else len(new.target_ids)
        shape = {name: value for name, value in new.settings.items() if name != "draft_vocab_size"}
        config = EagleConfig.for_target(self.version, new.like, size, taps=new.taps, target=new.target, **shape)
        return EagleNet(config, new.embedding, new.head, new.target_ids)

    def start(self, net: Any, target_head: Linear, batches: Iterable[Scored]) -> None:
        initialise(net, target_head, list(batches))


class Eagle3(Eagle1):
    """An EAGLE-3 or EAGLE-3.1 head."""

    version = 3
    layouts = (*Eagle1.layouts, "speculators")
    settings = ("inputs", "draft_vocab_size", "fc_norm", "norm_output")

    def taps(self, num_layers: int) -> tuple[int, ...]:
        return default_taps(num_layers)
