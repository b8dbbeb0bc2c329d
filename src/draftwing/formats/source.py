"""Where a model folder's weights come from: safetensors, or the GGUF file that the folder was made for."""

from __future__ import annotations

from pathlib import Path

from draftwing.formats.gguf_folder import LINK
from draftwing.formats.gguf_weights import GgufWeights
from draftwing.models.weights import WeightFiles, Weights


def open_weights(folder: Path) -> Weights:
    """The tensors of a model folder, by the names of a Hugging Face checkpoint.

    Raises:
        CheckpointError, ConfigError, UnsupportedError: see ``WeightFiles`` and ``GgufWeights``.
    """
    return GgufWeights.from_folder(folder) if (folder / LINK).exists() else WeightFiles(folder)
