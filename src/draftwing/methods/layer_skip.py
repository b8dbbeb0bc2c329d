"""Layer skipping: the target drafts for itself with some of its layers.

    Draft & Verify (2309.08168)    skips attentions and MLPs that a search found (`draftwing tune layers`)
    LayerSkip (2404.16710)         exits early: the first layers and the LM head

A draft reads the target's keys and values of every committed token, and writes those of the drafted nodes into the
slots of the tree, which the target's forward overwrites. So the drafter keeps no state, needs no prefill, and shares
weights and slots with the target. When an early exit drafts a chain, the target's forward continues from the residual
stream of its first layers (``models.subnet.StartedForward``).

Draft & Verify stops a draft below a confidence that it adapts to the acceptance rate. Here the growth rule does that,
by a table per depth of how often drafts of such a confidence were accepted. LayerSkip trains the target for early
exits; here any target is used unchanged.

A search stores the layers that it chose as a folder without weights, which ``--draft`` accepts:

    config.json   {"draftwing": {"format": 1, "kind": "layers", "target": {...}, "skip_attention": [...],
                                 "skip_mlp": [...], "tuning": {...}}}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from draftwing.errors import CheckpointError, ConfigError, shown
from draftwing.formats.identity import differences, made_for, target_id
from draftwing.formats.settings import FORMAT
from draftwing.formats.write import check_destination
from draftwing.methods.base import Budget
from draftwing.methods.calibration import Calibration
from draftwing.methods.method import DraftMethod, NewDrafter, Source, integer_option
from draftwing.methods.net import TargetId
from draftwing.methods.net_drafter import NetDrafter
from draftwing.models.config import read_config
from draftwing.models.context import Context
from draftwing.models.lean import LeanContext, LeanTarget
from draftwing.models.subnet import Parts, StartedForward, SubNet, lean_target, runner_over
from draftwing.models.target import own_context
from draftwing.runtime.forward import Runner
from draftwing.runtime.tree_builder import Drafted, DraftRequest, VerifyRequest
from draftwing.sampling import SamplingBatch
from draftwing.storage import write_text, writing
from draftwing.torch_utils import inference

LAYERS = "layers"


class LayerSkipDrafter(NetDrafter):
    """Drafts with ``net``, a sub-net of ``target``."""

    grows_by_rule = True

    def __init__(self, net: SubNet, target: LeanTarget, name: str) -> None:
        self.name, self._net, self._target = f"{name} ({net.parts})", net, target
        self.identity = f"{name} {net.parts!r}"
        self.num_bytes, self.runs_as = net.num_bytes, target.runs_as
        self._over_slots: Runner | None = None
        self._rest: Runner | None = None  # runs the layers after an early exit

    def request(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftRequest | None:
        if budget.depth == 0:
            return None
        active, roots = [True] * ctx.num_rows, [[row.tokens[row.length]] for row in ctx.rows]
        return DraftRequest(
            ctx, active, sampling, budget, Calibration(), roots, ctx.lengths, ctx.lengths, wants_places=True
        )

    @inference
    def draft(self, request: DraftRequest, verify: VerifyRequest | None = None) -> Drafted:
        ctx = own_context(request.ctx, LeanContext)
        if self._over_slots is None or self._over_slots.cache is not ctx.cache:
            self._over_slots, rest = runner_over(self._net, self._target, ctx), self._net.rest
            self._rest = None if rest is None else runner_over(rest, self._target, ctx)
        drafted = self._over_slots.draft(request)
        if drafted.states is not None and self._rest is not None:
            lengths = tuple(request.lengths)
            resume = StartedForward(self._over_slots, self._rest, drafted.tree, drafted.states, lengths)
            drafted = drafted._replace(resume=resume)
        if self._net.dtype == torch.float16:
            # Without some layers the stream may overflow although the target's does not, and a NaN in a slot spreads
            # to every row that reads the slot, masked or not.
            slots = ctx.cache.data[..., min(request.lengths) if ctx.cache.table is None else 0 :, :]
            slots.copy_(slots.nan_to_num(nan=0.0))
        return drafted


@dataclass(frozen=True)
class LayerSet:
    """The parts of a target that draft for it, as a folder; ``tuning`` is JSON about the search, for readers."""

    parts: Parts
    target: TargetId
    tuning: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write a folder atomically; replaces an older set in it, but no other model."""
        check_destination(folder)
        block = {
            "format": FORMAT,
            "kind": LAYERS,
            "target": dataclasses.asdict(self.target),
            "skip_attention": list(self.parts.skipped_attention),
            "skip_mlp": list(self.parts.skipped_mlp),
            "tuning": dict(self.tuning),
        }
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "config.json", json.dumps({"draftwing": block}, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> LayerSet:
        block, place = read_config(folder).get("draftwing"), f"{Path(folder) / 'config.json'}: draftwing"
        if not isinstance(block, dict) or block.get("kind") != LAYERS:
            raise ConfigError(
                f"{place}: expected a set of layers, found {shown(block)}: give a folder of `draftwing tune layers`"
            )
        if block.get("format") != FORMAT:
            raise CheckpointError(
                f"{place}: expected format {FORMAT}, found {shown(block.get('format'))}: it was written by another "
                f"version of Draftwing; use that one, or tune again"
            )
        target = made_for(folder)
        if target is None or type(target.num_layers) is not int:
            raise ConfigError(f"{place}: target must name the model that the layers are for: tune again")
        skipped = []
        for name in ("skip_attention", "skip_mlp"):
            layers = block.get(name)
            if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
                raise ConfigError(
                    f"{place}: {name} must be a list of layers such as [3, 7], found {shown(layers)}: tune again"
                )
            skipped.append(tuple(layers))
        try:
            parts = Parts.without(target.num_layers, *skipped)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
        tuning = block.get("tuning")
        return cls(parts, target, tuning if isinstance(tuning, dict) else {})


# --- registration ----------------------------------------------------------------------------------------------------


class Layers(DraftMethod):
    def new_drafter(self, source: Source) -> NewDrafter:
        layers, target = LayerSet.read(source.folder), lean_target(source.target, "draft 'layers'")
        loaded = target_id(target, source.tokenizer)
        if differing := differences(layers.target, loaded):
            raise CheckpointError(
                f"{source.folder}: these layers are of {layers.target.name}, not of {loaded.name} "
                f"({'; '.join(differing)}): tune the layers of {loaded.name}"
            )
        return partial(LayerSkipDrafter, SubNet.of(target.net, layers.parts), target, LAYERS)


class EarlyExit(DraftMethod):
    options: ClassVar = {"layers": integer_option("layers", 1)}

    def new_drafter(self, source: Source) -> NewDrafter:
        target = lean_target(source.target, "draft 'early-exit'")
        count = source.options.get("layers", max(1, target.num_layers // 4))
        if count > target.num_layers:
            raise ConfigError(
                f"draft_options: layers must be at most {target.num_layers}, all that {target.name} has, found {count}"
            )
        net = SubNet.of(target.net, Parts.first(target.num_layers, count))
        return partial(LayerSkipDrafter, net, target, "early-exit")
