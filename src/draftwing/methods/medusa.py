"""Medusa (2401.10774): K heads on the target's last hidden state; head k guesses the k-th drafted token.

    head k:  x = h + SiLU(W1 h), once per residual block;  logits = W2 x

h is the feature that the pending token was sampled from. A new head predicts as the target does: W1 is zero, W2 the
target's LM head. The target stays frozen (Medusa-1), and acceptance is exact rather than "typical".

Heads are read and written in three layouts, as of vLLM 0.10 and Medusa's code:

               config.json                                   tensors
    draftwing  see ``formats.plain``                         blocks.H.L.weight and .bias, heads.H.weight; draft_ids
    vllm       model_type "medusa", num_heads,               blocks.H.layers.L.weight, lm_heads.H.weight; token_map:
               num_hidden_layers, truncated_vocab_size       the target's ids of a draft vocabulary
    medusa     medusa_num_heads, medusa_num_layers           H.L.linear.weight and .bias, then H.LAYERS.weight, the LM
                                                             head; in medusa_lm_head.pt

The last two name no target. Tensors are counted, because the authors' first configs name fewer heads than there are.

Shape suffixes: see ``methods.block``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import CheckpointError, ConfigError, DraftwingError, UnsupportedError
from draftwing.formats.doctor import Finding
from draftwing.formats.identity import target_id_of_folder
from draftwing.formats.plain import DRAFT_IDS, PlainHead, check_ids, load_plain, own_block, target_finding
from draftwing.formats.read import read_pickled, read_tensors
from draftwing.formats.settings import is_medusa
from draftwing.formats.write import write_folder
from draftwing.methods.block import BlockMethod, BlockNet, Guess
from draftwing.methods.net import DraftNet, PlainConfig, TargetId
from draftwing.models.config import RopeConfig, read_config
from draftwing.models.linear import Linear
from draftwing.models.weights import check_finite

MAX_HEADS = 64  # heads, and layers of each: more is a mistake in a config


@dataclass(frozen=True)
class HeadsConfig(PlainConfig):
    """The shape of heads on the target's last hidden state, Medusa's or Hydra's: K heads of ``num_layers`` each."""

    num_heads: int = 5
    num_layers: int = 1
    has_one_tap: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.num_heads, self.num_layers) > MAX_HEADS:
            raise ConfigError(
                f"a net has up to {MAX_HEADS} heads of up to {MAX_HEADS} layers, found {self.num_heads} and "
                f"{self.num_layers}: correct num_heads and num_layers"
            )

    @staticmethod
    def for_levels(num_levels: int) -> dict[str, int]:
        return {"num_heads": num_levels}


@dataclass(frozen=True)
class MedusaConfig(HeadsConfig):
    """The shape of a Medusa net: ``num_heads`` heads of ``num_layers`` residual blocks."""

    has_bias: bool = True  # the residual blocks have biases
    own_heads: bool = True  # every head has its own LM head; False: all use the target's


class MedusaNet(BlockNet):
    """K independent heads."""

    kind = "medusa"
    config: MedusaConfig

    def __init__(self, config: MedusaConfig, *parts: Any, **options: Any) -> None:
        super().__init__(config, *parts, **options)
        width = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(self.new_matrix(width, width, bias=config.has_bias) for _ in range(config.num_layers))
            for _ in range(config.num_heads)
        )
        num_own = config.num_heads if config.own_heads else 0
        self.heads = nn.ModuleList(self.new_matrix(self.num_draft_tokens, width) for _ in range(num_own))
        if num_own:
            self.head = self.level_head(0)

    @torch.no_grad()
    def start_from(self, target_head: Linear) -> Self:
        """Start every head as the target's LM head, as in the paper."""
        for level in range(self.num_levels):
            for layer in self._blocks(level):
                layer.weight.zero_()
        weight = heads_weight(self, target_head)
        for head in self.heads:
            cast(Linear, head).weight.copy_(weight)
        return self

    @property
    def num_levels(self) -> int:
        return self.config.num_heads

    def level_head(self, level: int) -> Linear:
        return cast(Linear, self.heads[level]) if self.config.own_heads else self.read_head

    def _blocks(self, level: int) -> list[Linear]:
        return [cast(Linear, layer) for layer in cast(nn.ModuleList, self.blocks[level])]

    def residual(self, level: int, state: Tensor) -> Tensor:
        """Return the input (R, H) of a level's LM head."""
        for layer in self._blocks(level):
            state = state + F.silu(layer.forward(state))
        return state

    def guess(self, level: int, block: Tensor, tokens: Tensor, carried: Tensor | None) -> Guess:
        """Heads do not see each other's tokens, so a level has one distribution."""
        logits = self.level_logits(level, self.residual(level, block.flatten(0, 1)))
        return Guess(logits[:, None])

    def levels(
        self, ids: Tensor, features: Tensor, entries: Tensor, num_levels: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        states = features[:, entries].flatten(0, 1)
        for level in range(num_levels):
            yield self.residual(level, states), self.level_head(level).weight


def heads_weight(net: DraftNet, target_head: Linear) -> Tensor:
    """Return the rows (V_draft, H) of the target's LM head that belong to a net's draft vocabulary."""
    weight = target_head.plain()
    return weight if net.target_ids is None else weight[net.target_ids.to(weight.device)]


# --- reading heads ---------------------------------------------------------------------------------------------------

PICKLE = "medusa_lm_head.pt"
_NAMES = tuple(
    re.compile(pattern)
    for pattern in (
        r"blocks\.(\d+)\.(\d+)\.(weight|bias)|heads\.(\d+)\.weight",
        r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)|lm_heads\.(\d+)\.weight",
        r"(\d+)\.(\d+)\.linear\.(weight|bias)|(\d+)\.\d+\.weight",
    )
)
_NO_ROPE = RopeConfig("default", 10000.0, 2, 2, 1 << 20)  # the heads have no attention


def load_medusa(folder: Path, target: TargetId | None = None) -> PlainHead:
    """Read a head in any layout; ``target`` is its target, for layouts that do not name it."""
    config, where = read_config(folder), str(folder)
    stored = read_pickled(folder / PICKLE) if (folder / PICKLE).exists() else read_tensors(folder)
    tensors = {}
    for name, tensor in stored.items():
        bare = re.sub(r"^medusa_heads?\.", "", name)
        if bare in (DRAFT_IDS, "token_map"):
            tensors[DRAFT_IDS] = tensor
            continue
        match = next((match for pattern in _NAMES if (match := pattern.fullmatch(bare))), None)
        if match is None:
            raise CheckpointError(
                f"{where}: has a tensor that no Medusa head has: {name!r}: give the heads without their model"
            )
        block, layer, part, head = match.groups()
        tensors[f"heads.{head}.weight" if block is None else f"blocks.{block}.{layer}.{part}"] = tensor
    if isinstance(config.get("draftwing"), dict):
        medusa = load_plain(folder, "medusa", MedusaConfig, tensors)
    else:
        medusa = _from_other_layout(config, tensors, target, where)
    medusa.check_target(target, where)
    return medusa


def _from_other_layout(
    config: Mapping[str, Any], tensors: dict[str, Tensor], target: TargetId | None, where: str
) -> PlainHead:
    """Return a head whose shape is deduced from its tensors."""
    if target is None:
        raise ConfigError(f"{where}: the head does not name its target: give it (--target)")
    ids = tensors.pop(DRAFT_IDS, None)
    for name, tensor in tensors.items():
        check_finite(f"{name} of {where}", tensor)
    blocks = [tuple(map(int, name.split(".")[1:3])) for name in tensors if name.startswith("blocks.")]
    first = tensors.get("blocks.0.0.weight")
    if first is None or first.ndim != 2:
        raise CheckpointError(f"{where}: lacks the first head's block: download the head again")
    num_heads = 1 + max(head for head, _ in blocks)
    shared = tensors.get("heads.0.weight")
    if config.get("original_lm_head") and shared is not None:
        tensors |= {f"heads.{head}.weight": shared for head in range(num_heads)}
    if ids is not None:  # others may list the ids in any order; the LM heads' rows follow them
        ids, order = ids.long().sort()
        check_ids(ids, target.vocab_size, where)
        for name in [name for name in tensors if name.startswith("heads.")]:
            rows = len(tensors[name])
            if rows not in (len(ids), target.vocab_size):
                raise CheckpointError(
                    f"{where}: {name} has {rows} rows, and the draft vocabulary {len(ids)} tokens: its tensors do not "
                    f"belong together"
                )
            tensors[name] = tensors[name][order if rows == len(ids) else ids]
    num_tokens = target.vocab_size if shared is None or ids is not None else len(shared)
    if (first.shape[1], num_tokens) != (target.hidden_size, target.vocab_size):
        raise CheckpointError(
            f"{where}: its heads read {first.shape[1]} numbers and know {num_tokens} tokens, and {target.name} has a "
            f"hidden size of {target.hidden_size} and {target.vocab_size} tokens: load it with its own target"
        )
    shape = MedusaConfig(
        taps=(target.num_layers,),
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        rope=_NO_ROPE,
        num_heads=num_heads,
        num_layers=1 + max(layer for _, layer in blocks),
        has_bias="blocks.0.0.bias" in tensors,
        own_heads=shared is not None,
    )
    return PlainHead("medusa", shape, tensors, ids)


# --- writing heads ---------------------------------------------------------------------------------------------------


def _vllm(head: PlainHead) -> tuple[dict[str, Any], dict[str, Tensor], str]:
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
    tensors = _renamed(head, "blocks.{}.layers.{}.{}", "lm_heads.{}.weight")
    if head.target_ids is not None:
        written["truncated_vocab_size"] = len(head.target_ids)
        tensors["token_map"] = head.target_ids
    return written, tensors, "model.safetensors"


def _authors(head: PlainHead) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    config = head.config
    if head.target_ids is not None:
        raise UnsupportedError("the layout 'medusa' has no draft vocabulary, and this head has one: use vllm")
    written = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": "" if config.target is None else config.target.name,
    }
    tensors = _renamed(head, "{}.{}.linear.{}", f"{{}}.{config.num_layers}.weight")
    if not config.has_bias:  # the authors' code requires biases
        blocks = [name for name in tensors if name.endswith("linear.weight")]
        tensors |= {name.replace("weight", "bias"): torch.zeros(len(tensors[name])) for name in blocks}
    return written, tensors, PICKLE


def _renamed(medusa: PlainHead, block: str, head: str) -> dict[str, Tensor]:
    """Return the tensors under names made from two patterns, for residual blocks and LM heads."""
    tensors = {}
    for name, tensor in medusa.tensors.items():
        first, *rest = name.split(".")
        tensors[head.format(rest[0]) if first == "heads" else block.format(*rest)] = tensor
    return tensors


# --- registration ----------------------------------------------------------------------------------------------------


class Medusa(BlockMethod):
    """One head per token to guess."""

    net = MedusaNet
    config = MedusaConfig
    settings = ("unroll_steps", "draft_vocab_size", "num_layers")
    layouts = ("draftwing", "vllm", "medusa")

    def recognises(self, config: Mapping[str, Any], folder: Path) -> bool:
        return is_medusa(config)

    def read_head(self, folder: Path, target: TargetId | None) -> PlainHead:
        return load_medusa(folder, target)

    def save_head(self, folder: Path, head: PlainHead, layout: str, target: TargetId | None) -> str | None:
        if layout == "draftwing":
            return super().save_head(folder, head, layout, target)
        if not head.config.own_heads:
            raise UnsupportedError(
                f"this head uses the target's LM head, which the layout {layout!r} would have to hold: keep it as "
                f"draftwing"
            )
        config, tensors, file = _vllm(head) if layout == "vllm" else _authors(head)
        write_folder(folder, {**config, "draftwing": own_block(head)}, tensors, file)
        return "" if layout == "vllm" else None

    def diagnose(self, folder: Path, target: Path | None) -> list[Finding]:
        target_id = None if target is None else target_id_of_folder(target)
        try:
            head = load_medusa(folder, target_id)
        except DraftwingError as error:
            return [Finding("head", "fail", str(error), "give the whole head and its target, or download it again")]
        config, count, source = head.config, head.config.num_heads, read_config(folder)
        num_weights = sum(tensor.numel() for tensor in head.tensors.values())
        findings = [Finding("head", "ok", f"{count} heads of {num_weights:,} numbers in all")]
        stated = source.get("medusa_num_heads", source.get("num_heads"))
        if stated in (None, count):
            findings.append(Finding("count", "ok", f"{count} heads" + (", as its config says" if stated else "")))
        else:  # the first published configs name 2 heads of 5: some engines then use 2
            detail = f"its config says {stated} heads, and it has {count}: Draftwing uses all that are there"
            fix = f"for engines that go by the config, write {count} there, or convert the head"
            findings.append(Finding("count", "warn", detail, fix))
        findings.append(target_finding(head, target_id))
        if head.target_ids is not None:
            share = f"{len(head.target_ids):,} of {config.vocab_size:,} tokens"
            findings.append(Finding("vocabulary", "ok", f"drafts {share}, the others never"))
        return findings
