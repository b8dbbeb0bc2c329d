"""The net that a run begins with: a new one of the target's shape, or that of a head."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from draftwing.errors import ConfigError, UnsupportedError
from draftwing.methods.method import NewNet
from draftwing.methods.net import DraftNet, TargetId
from draftwing.methods.registry import method_of_folder
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.target import Target
from draftwing.train.data import DraftVocabulary
from draftwing.train.options import TrainOptions


def new_net(
    target: Target, folder: Path, options: TrainOptions, vocabulary: DraftVocabulary, own: TargetId
) -> DraftNet:
    """A net of the target's own shape, with random weights in float32."""
    kind, shape = options.kind, _shape_of(target, folder)
    whole = len(vocabulary.target_ids) == target.vocab_size
    net: DraftNet = kind.new(
        NewNet(
            like=shape,
            taps=_taps_of(options, shape.num_layers),
            target=own,
            embedding=target.embedding.plain().float(),
            head=target.head,
            target_ids=None if whole else vocabulary.target_ids.to(target.device),
            settings=options.settings,
            folder=folder,
        )
    )
    return net


def _taps_of(options: TrainOptions, num_layers: int) -> tuple[int, ...]:
    usual, wanted = options.kind.taps(num_layers), options.taps
    if wanted is None:
        return usual
    if usual in ((), (num_layers,)):
        reads = "the last hidden state" if usual else "no hidden states"
        raise ConfigError(f"training: a net of method {options.method!r} reads {reads}: leave out taps")
    if list(wanted) != sorted(set(wanted)) or not 0 <= wanted[0] <= wanted[-1] <= num_layers:
        raise ConfigError(
            f"training: taps must be different numbers from 0 to {num_layers}, in order, found {list(wanted)}: {usual} "
            f"are usual"
        )
    return wanted


def net_of_head(where: Path, model: Target, options: TrainOptions, own: TargetId) -> DraftNet:
    """The net of the head that the run starts from; the options that shape a net must be its own."""
    method = method_of_folder(where)
    if method is not options.kind:
        raise ConfigError(
            f"{where} holds a draft of kind {method.name!r}, and method {options.method!r} trains another: start from "
            f"another head, from nothing, or choose another method"
        )
    net: DraftNet = options.kind.read(where, model.embedding.plain().float(), model.head, own)
    given = [name for name in ("num_layers", "hidden_size", "num_heads") if getattr(options, name) is not None]
    if given:
        raise ConfigError(
            f"training: {given[0]} shapes a new model, and this run starts from {where}, which has its own: leave it "
            f"out, or start from nothing"
        )
    wanted: dict[str, Any] = {}
    found: dict[str, Any] = {}
    if "inputs" in options.settings:
        wanted["inputs"], found["inputs"] = options.inputs, net.config.inputs
    if options.taps:
        wanted["taps"], found["taps"] = options.taps, tuple(net.config.taps)
    if options.draft_vocab_size:
        wanted["draft_vocab_size"], found["draft_vocab_size"] = options.draft_vocab_size, net.num_draft_tokens
    for name, value in wanted.items():
        if found[name] != value:
            raise ConfigError(
                f"{where} is a head with {name} {found[name]!r}, and this run asks for {value!r}: start from another "
                f"head, from nothing, or drop the option"
            )
    return net


def training_before(where: Path) -> dict[str, int]:
    """What the head that a run starts from was trained for: updates, and tokens seen with those before its own start.

    Empty for a head that does not say, one of another project's.
    """
    block = read_config(where).get("draftwing")
    match block:
        case {
            "training": {
                "iterations": int(updates),
                "tokens_per_batch": int(tokens),
                "accumulation": int(batches),
            } as said
        }:
            initial = said.get("initial")
            before = initial.get("tokens_seen", 0) if isinstance(initial, dict) else 0
            return {"iterations": updates, "tokens_seen": updates * tokens * batches + before}
        case _:
            return {}


def _shape_of(target: Target, folder: Path) -> ModelConfig:
    """The target's shape as the lean decoder reads it; for other architectures, a Llama of their size."""
    config = read_config(folder)
    try:
        return dataclasses.replace(
            ModelConfig.from_hf(config, str(folder / "config.json")), vocab_size=target.vocab_size
        )
    except UnsupportedError:
        heads = config.get("num_attention_heads") or config.get("n_head")
        if not isinstance(heads, int) or target.hidden_size % heads:
            raise
        length = min(target.max_length, 1 << 17)
        llama = {
            "model_type": "llama",
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "intermediate_size": config.get("intermediate_size") or 4 * target.hidden_size,
            "num_hidden_layers": target.num_layers,
            "num_attention_heads": heads,
            "max_position_embeddings": length,
        }
        return ModelConfig.from_hf(llama, str(folder / "config.json"))
