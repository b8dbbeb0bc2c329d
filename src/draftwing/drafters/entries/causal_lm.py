"""A smaller causal LM: drafted with as it is, or distilled from its target first."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwing.drafters.kind import Kind, Method, NetKind, NewDrafter, NewNet, Source
from draftwing.errors import ConfigError, UnsupportedError, shown

if TYPE_CHECKING:
    import torch

    from draftwing.drafters.base import Drafter
    from draftwing.heads.doctor.case import Finding
    from draftwing.model.target import Target
    from draftwing.nets.base import DraftNet
    from draftwing.nets.eagle_config import TargetId

__all__ = ["CAUSAL_LM"]

_NAME = "causal-lm"


def _make(source: Source) -> NewDrafter:
    from draftwing.drafters.causal_lm import CausalLMDrafter
    from draftwing.drafters.staged import StagedDrafter
    from draftwing.model.config import LEAN_MODEL_TYPES, read_config
    from draftwing.model.lean import LeanTarget
    from draftwing.text.tokenizer import Tokenizer

    folder, target = source.folder, source.target
    if source.tokenizer is not None:
        source.tokenizer.check_same(Tokenizer(folder), source.name)
    found = read_config(folder).get("model_type")
    if found not in LEAN_MODEL_TYPES:
        raise UnsupportedError(
            f"draft model {source.name} is of type {found!r}: a draft model must be one of "
            f"{', '.join(sorted(LEAN_MODEL_TYPES))}; or use draft='lookup'"
        )
    model = LeanTarget.from_folder(
        folder, target.dtype, source.device(), name=folder.name, quantize=target.quantized, fast=True
    )
    kind = StagedDrafter if source.options.get("draft") == "lookup" else CausalLMDrafter
    return partial(kind, model, target.vocab_size)


def _drafted_for_by(value: Any) -> str:
    if value not in ("lookup", "none"):
        raise ConfigError(
            f"draft_options: draft says what drafts for the draft model, found {shown(value)}: choose lookup or none"
        )
    return str(value)


def _recognises(config: Mapping[str, Any], folder: Path) -> bool:
    """One that was trained here says so; any other is what is no head."""
    from draftwing.heads.read import is_head

    block = config.get("draftwing")
    return (isinstance(block, dict) and block.get("kind") == _NAME) or not is_head(config, folder)


# --- training --------------------------------------------------------------------------------------------------------


def _read(
    folder: Path,
    embedding: Any,
    target_head: Any = None,
    target: TargetId | None = None,
    dtype: torch.dtype | None = None,
) -> DraftNet:
    import torch

    from draftwing.heads.causal_lm import read_causal_lm

    return read_causal_lm(folder, target, embedding.device, dtype or torch.float32)


def _write(folder: Path, net: Any, *, training: Mapping[str, Any] | None = None) -> None:
    from draftwing.heads.causal_lm import write_causal_lm

    write_causal_lm(folder, net, training=training)


def _new(new: NewNet) -> DraftNet:
    from draftwing.heads.causal_lm import tokenizer_files
    from draftwing.nets.causal_lm import CausalLMNet, new_config

    shape = {name: new.settings.get(name) for name in ("num_layers", "hidden_size", "num_heads")}
    config = new_config(new.like, **shape)
    files = tokenizer_files(new.folder)
    return CausalLMNet.new(config, new.embedding.device, target=new.target, files=files)


def _loss(*args: Any, **said: Any) -> Any:
    from draftwing.nets.causal_lm_loss import CausalLoss

    return CausalLoss(*args, **said)


def _drafter(net: Any, target: Target, name: str, identity: str) -> Drafter:
    from draftwing.drafters.causal_lm import CausalLMDrafter

    return CausalLMDrafter(net.as_target(), target.vocab_size)


def _as_target(net: Any) -> Target:
    found: Target = net.as_target()
    return found


def _convert(source: Path, destination: Path, to: str, **said: Any) -> None:
    raise UnsupportedError(
        f"{source}: holds a causal LM, which has no other layout: Draftwing, transformers and vLLM read the folder as "
        f"it is"
    )


def _diagnose(folder: Path, target: Path | None) -> list[Finding]:
    from draftwing.heads.causal_lm import diagnose_causal_lm

    return diagnose_causal_lm(folder, target)


CAUSAL_LM = Kind(
    _NAME,
    "a smaller causal LM with the same tokenizer",
    _make,
    _recognises,
    options={"draft": _drafted_for_by},
    net=NetKind(
        read=_read,
        write=_write,
        new=_new,
        taps=lambda num_layers: (),
        methods={_NAME: Method("fkl")},
        layouts=(),
        convert=_convert,
        diagnose=_diagnose,
        drafter=_drafter,
        settings=("num_layers", "hidden_size", "num_heads", "own_text"),
        loss=_loss,
        calibrates=False,
        as_target=_as_target,
    ),
)
