"""The tensors of an EAGLE net by the names that the field gives them: EAGLE's own, and vLLM's for what EAGLE lacks.

The net's own parameters are fewer, since matrices that read the same rows are one: a name stands for some of the rows
of a parameter.

    EAGLE-1   layers.{i}.*; the first layer has no input_layernorm
    EAGLE-3   midlayer.* for the first layer, layers.{i}.* (i from 1) for more, fc_norm and input_norm (EAGLE-3.1)
    both      *.self_attn.{q,k,v}_proj.bias, embed_tokens.weight where the net has an embedding of its own
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor, nn

from draftwing.errors import CheckpointError
from draftwing.nets.eagle_config import EagleConfig

__all__ = ["copy_tensors", "fill_tensors", "tensor_shapes"]


@dataclass(frozen=True)
class _Place:
    """Rows from ``start`` on of the parameter at ``path`` in the net; ``shape`` is the tensor's own."""

    path: str
    shape: tuple[int, ...]
    start: int = 0


def tensor_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a head of ``config`` has."""
    return {name: place.shape for name, place in _places(config).items()}


def copy_tensors(net: nn.Module, config: EagleConfig) -> dict[str, Tensor]:
    """Copies of a net's tensors; the net must not have been prepacked."""
    return {name: view.clone() for name, view in _views(net, config).items()}


def fill_tensors(net: nn.Module, config: EagleConfig, tensors: Mapping[str, Tensor], where: str) -> None:
    """Put ``tensors`` into a net: all that it has, and no others.

    Args:
        where: begins every error message.

    Raises:
        CheckpointError: a name is missing, unknown, or has another shape.
    """
    views = _views(net, config)
    missing, unknown = sorted(views.keys() - tensors.keys()), sorted(tensors.keys() - views.keys())
    if missing or unknown:
        what = f"lacks {missing[0]!r}" if missing else f"has a tensor {unknown[0]!r} that no such net has"
        raise CheckpointError(
            f"{where} {what} (missing {len(missing)}, unknown {len(unknown)}): its config.json and its weights do "
            f"not belong together; `draftwing doctor` names what differs"
        )
    for name, view in views.items():
        if tensors[name].shape != view.shape:
            raise CheckpointError(
                f"{where}: {name} has shape {tuple(tensors[name].shape)}, expected {tuple(view.shape)}: was it "
                f"trained for another target?"
            )
    for name, view in views.items():
        view.copy_(tensors[name])


def _views(net: nn.Module, config: EagleConfig) -> dict[str, Tensor]:
    return {
        name: attrgetter(place.path)(net).data[place.start : place.start + place.shape[0]]
        for name, place in _places(config).items()
    }


def _places(config: EagleConfig) -> dict[str, _Place]:
    is_third, hidden = config.version == 3, config.hidden_size
    taps = config.feature_size * len(config.taps)
    found = {"fc.weight": _Place("fc.weight", (hidden, taps if is_third else 2 * hidden))}
    if config.fc_bias:
        found["fc.bias"] = _Place("fc.bias", (hidden,))
    for index in range(config.num_layers):
        found |= _layer_places(config, index)
    if is_third:
        found |= {
            "midlayer.input_layernorm.weight": _Place("token_norm.weight", (hidden,)),
            "midlayer.hidden_norm.weight": _Place("state_norm.weight", (hidden,)),
            "norm.weight": _Place("norm.weight", (hidden,)),
            "lm_head.weight": _Place("head.weight", (config.draft_vocab_size, hidden)),
        }
    if config.norm_before_fc:
        found["input_norm.weight"] = _Place("input_norm.weight", (taps,))
    if config.fc_norm:
        for index in range(len(config.taps)):
            found[f"fc_norm.{index}.weight"] = _Place(f"tap_norms.{index}.weight", (config.feature_size,))
    if config.own_embedding:
        found["embed_tokens.weight"] = _Place("embedding.table", (config.vocab_size, hidden))
    return found


def _layer_places(config: EagleConfig, index: int) -> dict[str, _Place]:
    is_first = index == 0
    base = "midlayer" if is_first and config.version == 3 else f"layers.{index}"
    own = f"layers.{index}"
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width = 2 * hidden if is_first and config.version == 3 else hidden
    found = {
        f"{base}.self_attn.o_proj.weight": _Place(f"{own}.out.weight", (hidden, query)),
        f"{base}.mlp.gate_proj.weight": _Place(f"{own}.mlp.gate_up.weight", (inner, hidden)),
        f"{base}.mlp.up_proj.weight": _Place(f"{own}.mlp.gate_up.weight", (inner, hidden), inner),
        f"{base}.mlp.down_proj.weight": _Place(f"{own}.mlp.down.weight", (hidden, inner)),
        f"{base}.post_attention_layernorm.weight": _Place(f"{own}.post_norm.weight", (hidden,)),
    }
    for name, rows, start in (("q", query, 0), ("k", key, query), ("v", key, query + key)):
        found[f"{base}.self_attn.{name}_proj.weight"] = _Place(f"{own}.qkv.weight", (rows, width), start)
        if config.qkv_bias:
            found[f"{base}.self_attn.{name}_proj.bias"] = _Place(f"{own}.qkv.bias", (rows,), start)
    if not is_first:
        found[f"{base}.input_layernorm.weight"] = _Place(f"{own}.input_norm.weight", (hidden,))
    return found
