"""Multi-token prediction modules (MTP, DeepSeek-V3, 2412.19437) in a target's checkpoint: their number and names.

    DeepSeek-V3, GLM-4.5     model.layers.{N + k}.    enorm, hnorm, eh_proj, shared_head.norm
    MiMo                     model.mtp_layers.{k}.    token_layernorm, hidden_layernorm, input_proj, final_layernorm
    Qwen3-Next, Mellum       mtp.                     pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm

N is the target's number of layers, k counts modules from 0. Next to these lies a decoder layer with the names that the
target's layers have, in ``mtp.layers.{k}.`` for the last row. MiMo's projection reads states first, the others' tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from draftwing.models.config import ConfigReader

# The number of modules in configs of DeepSeek, GLM and MiMo; of transformers; of Qwen3.5.
_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class MtpNames:
    """The names of the modules' tensors.

    Attributes:
        base, block: prefixes of a module's tensors and of its decoder layer's, for ``str.format``.
        token_norm, state_norm, join, norm: after ``base``, without ``.weight``: the norms of token and state, the
            matrix that joins them, and the norm of the output.
        states_first: the matrix reads states before tokens.
        num_layers: N.
    """

    base: str
    block: str
    token_norm: str
    state_norm: str
    join: str
    norm: str
    states_first: bool = False
    num_modules: int = 0
    num_layers: int = 0

    def base_of(self, module: int) -> str:
        """Return the prefix of a module's tensors."""
        return self.base.format(k=module, n=self.num_layers + module)

    def block_of(self, module: int) -> str:
        """Return the prefix of its decoder layer's tensors."""
        return self.block.format(k=module, n=self.num_layers + module)

    def owns(self, name: str) -> bool:
        """Return True if a tensor of this name belongs to a module."""
        return name.startswith(tuple(self.base_of(module) for module in range(self.num_modules)))


_LAYOUTS = (
    MtpNames("model.layers.{n}.", "model.layers.{n}.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    MtpNames(
        "model.mtp_layers.{k}.", "model.mtp_layers.{k}.", "token_layernorm", "hidden_layernorm", "input_proj",
        "final_layernorm", states_first=True,
    ),
    MtpNames("mtp.", "mtp.layers.{k}.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
)  # fmt: skip


def num_modules(config: Mapping[str, Any], where: str) -> int:
    """Return how many modules a checkpoint has by its config. Raises ConfigError for an impossible number."""
    return max(_reader(config, where).integer(key, 0, minimum=0, maximum=1000) for key in _KEYS)


def module_names(config: Mapping[str, Any], tensors: Iterable[str], where: str) -> MtpNames | None:
    """Return the names of a checkpoint's modules, given those of all its tensors; None if it has no modules.

    Raises:
        ConfigError: an impossible number in the config.
    """
    names = set(tensors)
    count, num_layers = num_modules(config, where), _reader(config, where).integer("num_hidden_layers", 0, minimum=0)
    if not count:  # Qwen3-Next's config does not count them
        matches = (re.match(r"mtp\.layers\.(\d{1,3})\.", name) for name in names)
        count = max((1 + int(match[1]) for match in matches if match is not None), default=0)
    for layout in _LAYOUTS:
        layout = replace(layout, num_modules=count, num_layers=num_layers)
        if count and f"{layout.base_of(0)}{layout.join}.weight" in names:
            return layout
    return None


def _reader(config: Mapping[str, Any], where: str) -> ConfigReader:
    text = config.get("text_config")
    return ConfigReader({**config, **text} if isinstance(text, dict) else config, where)


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the architecture that a config names, for messages."""
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    return str(first)[:80]
