"""Write a Llama folder with 8-bit matrices in the layout of ``compressed-tensors``, which vLLM reads.

Like the usual tools without calibration: a scale for each output channel of a weight, and dynamically quantised
activations with a scale for each token. The embedding and the LM head are unchanged.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

LARGEST = 127
SCHEME: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTISATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**SCHEME, "strategy": "channel", "dynamic": False},
            "input_activations": {**SCHEME, "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}


def write_int8(folder: Path, out: Path) -> None:
    """Write ``folder`` quantised into the folder ``out``, file by file."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in sorted(folder.iterdir()):
        if file.name.startswith("tokenizer") or file.name in ("generation_config.json", "special_tokens_map.json"):
            shutil.copy(file, partial)
    places: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors: dict[str, Any] = {}
        with safe_open(file, "pt") as source:
            for name in source.keys():  # noqa: SIM118 - not a dict
                tensors |= quantised(name, source.get_tensor(name))
        save_file(tensors, partial / file.name, {"format": "pt"})
        places |= dict.fromkeys(tensors, file.name)
    index = json.dumps({"metadata": {}, "weight_map": places})
    (partial / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (partial / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTISATION}), encoding="utf-8")
    partial.replace(out)


def quantised(name: str, tensor: Any) -> dict[str, Any]:
    """Return the tensors to store: 8 bits and a scale for matrices of layers, everything else unchanged."""
    if not name.endswith("_proj.weight"):
        return {name: tensor}
    import torch

    scale = tensor.float().abs().amax(1, keepdim=True).clamp(min=1e-8) / LARGEST
    rounded = (tensor.float() / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return {name: rounded, f"{name}_scale": scale}
