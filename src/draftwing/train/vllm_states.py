"""Import of hidden states that vLLM wrote (its method ``extract_hidden_states``) into a cache that training reads.

vLLM writes one safetensors file per request: ``hidden_states`` (T, L, H) and ``token_ids`` (T,), which are the prompt,
or the prompt and all of the output but its last token. The files name neither their layers nor the model. A layer id i
is the input of layer i, as in ``FeatureSpec.taps``, in ascending order; the number of layers is the output of the last
one *before* the final norm, which the import therefore applies. Of the target only its ends are needed
(``load_target(layers=False)``).

The files have no mask. Rows are looked up by their token ids among the dialogues that were given to vLLM, whose
answers count in the loss; without dialogues all tokens count.

Shape suffixes: T tokens of a file, L layers in the file, S hidden states kept, H hidden.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftwing.errors import ConfigError, DataError
from draftwing.methods.net import TargetId
from draftwing.models.lean import LeanTarget
from draftwing.remote import OnProgress
from draftwing.train.data import Example
from draftwing.train.feature_cache import GROWING_SHARD_BYTES, CacheRow, CacheSize, GrowingCache
from draftwing.train.features import best_tokens

DTYPES = ("F64", "F32", "F16", "BF16")  # safetensors names of floating-point types


@dataclass(frozen=True)
class Imported:
    """The result of ``import_states``."""

    size: CacheSize  # the whole cache
    num_rows: int  # in the whole cache, with those that it had
    num_kept: int  # files whose rows the cache had before
    skipped: tuple[tuple[str, str], ...]  # ``(file, why)`` of files that were left out
    num_missing: int  # dialogues that no file has
    # Share of the new rows' loss tokens that the LM head predicts from the states before them. High if the target
    # wrote them greedily; near 0 if layers or weights are not those that vLLM ran. None without new rows.
    agreement: float | None


def import_states(
    folder: Path,
    out: Path,
    target: LeanTarget,
    taps: Sequence[int],
    *,
    identity: TargetId,
    layers: Sequence[int] | None = None,
    dialogues: Sequence[Example] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = GROWING_SHARD_BYTES,
    on_progress: OnProgress | None = None,
) -> Imported:
    """Write the states of every safetensors file in ``folder`` to the cache ``out``; continue a stopped call.

    Rows are whole, and nothing is held out: both belong to the training run, as with ``data regenerate --features``.

    Args:
        target: the model that vLLM ran, with or without its layers.
        taps: the hidden states to store, besides the last; the files must have them.
        identity, dtype, shard_bytes: see ``GrowingCache``.
        layers: the ids of the files' layers, ascending; None: ``taps`` in order, and the number of layers.
        dialogues: whose answers count. A file that continues one, or is the beginning of one, has its mask.
        on_progress: called with the files read and the total.

    Raises:
        ConfigError: ``layers`` has not what the taps need.
        DataError: a file is damaged, or not of this target; or no file can be used.
    """
    last = target.num_layers
    ids = tuple(sorted({*taps, last})) if layers is None else tuple(layers)
    if list(ids) != sorted(set(ids)) or not ids or not 0 <= ids[0] <= ids[-1] <= last:
        raise ConfigError(
            f"layer ids must be different numbers from 0 to {last}, ascending (vLLM writes them in the order of the "
            f"model, whatever the order of its option), found {list(ids)}"
        )
    cache = GrowingCache(out, target, taps, identity=identity, shard_bytes=shard_bytes, dtype=dtype)
    if missing := [state for state in cache.info.states if state not in ids]:
        raise ConfigError(
            f"the layer ids lack {', '.join(map(str, missing))}, which the head reads (the last is the input of the LM "
            f"head): run vLLM with eagle_aux_hidden_state_layer_ids {sorted({*cache.info.states})}, or choose --taps "
            f"and --method for a head that reads {list(ids)}"
        )
    files = sorted(Path(folder).rglob("*.safetensors"))
    if not files:
        raise DataError(f"{folder}: has no *.safetensors file: give the shared_storage_path of vLLM's connector")
    masks = None if dialogues is None else _Masks(dialogues)
    columns = [ids.index(state) for state in cache.info.states]
    seen: set[int] = set()
    skipped: list[tuple[str, str]] = []
    num_kept = num_right = num_counted = 0
    with cache.opened():
        cache.check_room()
        with cache.filling(indexes=True) as shard:
            for number, path in enumerate(files, 1):
                tokens, states = _read(path, len(ids), target)
                key = int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), "little", signed=True)
                mask = np.arange(len(tokens)) > 0 if masks is None else masks.find(tokens)
                if key in seen:
                    skipped.append((str(path), "another file has the same tokens"))
                elif mask is None:
                    skipped.append((str(path), "its tokens are those of no dialogue in the data"))
                elif not mask.any():
                    skipped.append((str(path), "none of its tokens is part of an answer"))
                elif key not in cache.old_rows:
                    shard.rows[key] = row = _row(path, Example(tokens, mask), states[:][:, columns], target)
                    num_counted += int(mask.sum())
                    num_right += int((row.best[:-1] == tokens[1:])[mask[1:]].sum())
                elif np.array_equal(cache.old_rows[key].mask, mask):
                    num_kept += 1
                else:
                    raise cache.foreign(Path(out), "its rows have other masks, of other data")
                seen.add(key)
                if shard.rows and (number == len(files) or shard.num_bytes() >= shard_bytes):
                    cache.check_room(shard.num_bytes())
                    shard.write()
                if on_progress is not None:
                    on_progress(number, len(files))
        if cache.num_rows:
            cache.write_index()
    if not cache.num_rows:
        raise DataError(
            f"none of the {len(skipped)} files in {folder} can be used; the first one, {': '.join(skipped[0])}: give "
            f"the dialogues that vLLM read (--data), or none, and every token counts"
        )
    return Imported(
        cache.size, cache.num_rows, num_kept, tuple(skipped), 0 if masks is None else len(masks.missing),
        num_right / num_counted if num_counted else None,
    )  # fmt: skip


def _read(path: Path, num_layers: int, target: LeanTarget) -> tuple[np.ndarray, Any]:
    """Return (T,) int32 token ids and (T, L, H) states, not read yet, of a file that fits the target."""
    try:
        file: Any = safe_open(path, framework="pt", device="cpu")
        names = set(file.keys())
        if not {"hidden_states", "token_ids"} <= names:
            raise DataError(
                f"{path}: expected hidden_states and token_ids, found {', '.join(sorted(names)) or 'nothing'}: give a "
                f"folder with nothing but the output of vLLM's extract_hidden_states"
            )
        ids, states = file.get_tensor("token_ids"), file.get_slice("hidden_states")
        shape, dtype = tuple(states.get_shape()), states.get_dtype()
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise DataError(
            f"{path}: expected a whole file of hidden states, found a damaged or unfinished one ({error}): wait until "
            f"vLLM has ended, or delete it and let vLLM write it again"
        ) from error
    if ids.ndim != 1 or ids.is_floating_point() or len(shape) != 3 or dtype not in DTYPES:
        raise DataError(
            f"{path}: expected hidden_states (T, L, H) and token_ids (T,), found {shape} of {dtype} and "
            f"{tuple(ids.shape)} of {ids.dtype}: is this the output of vLLM's extract_hidden_states?"
        )
    if not len(ids) or shape[0] != len(ids):
        raise DataError(
            f"{path}: has {len(ids)} tokens and the states of {shape[0]}: run vLLM without chunked prefill, and delete "
            f"this file"
        )
    if shape[1] != num_layers:
        raise DataError(
            f"{path}: has {shape[1]} layers, and {num_layers} were expected: give what vLLM had as "
            f"eagle_aux_hidden_state_layer_ids (--layer-ids)"
        )
    if shape[2] != target.hidden_size:
        raise DataError(
            f"{path}: has states of {shape[2]} channels, and {target.name} has {target.hidden_size}: give --target the "
            f"model that vLLM ran"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= target.vocab_size:
        raise DataError(
            f"{path}: has token id {low if low < 0 else high}, and the vocabulary of {target.name} has "
            f"{target.vocab_size}: give --target the model that vLLM ran"
        )
    return ids.numpy().astype(np.int32), states


@torch.no_grad()
def _row(path: Path, example: Example, states: Tensor, target: LeanTarget) -> CacheRow:
    """Return the row of (T, S, H) states, of which the last are before the final norm."""
    states = states.to(target.net.dtype)
    normed = target.net.norm.forward(states[:, -1].to(target.device))
    states[:, -1] = normed.cpu()
    if not torch.isfinite(states).all():
        raise DataError(
            f"{path}: has hidden states that are not finite: delete it, and run vLLM with --dtype bfloat16 or float32, "
            f"or a newer vLLM"
        )
    return CacheRow(example, states.flatten(1), best_tokens(target, normed).numpy())


class _Masks:
    """Finds dialogues by their beginnings: encoded big-endian, token ids sort like their bytes."""

    def __init__(self, dialogues: Sequence[Example]) -> None:
        if not dialogues:
            raise DataError("--data has no dialogue with an answer: leave it out, and every token counts")
        self._sorted = sorted({_key(example.ids): example.mask for example in dialogues}.items())
        self.missing = {key for key, _ in self._sorted}  # dialogues that were not found yet

    def find(self, tokens: np.ndarray) -> np.ndarray | None:
        """(T,) ids -> (T,) bool: the mask of a dialogue that begins with them, or that they continue; None if none."""
        key = _key(tokens)
        place = bisect_left(self._sorted, key, key=lambda pair: pair[0])
        if place < len(self._sorted) and self._sorted[place][0].startswith(key):
            dialogue, mask = self._sorted[place]
        elif place and key.startswith(self._sorted[place - 1][0]):  # such as the prompt for another answer
            dialogue, mask = self._sorted[place - 1]
        else:
            return None
        self.missing.discard(dialogue)
        return np.pad(mask, (0, max(0, len(tokens) - len(mask))))[: len(tokens)]


def _key(ids: np.ndarray) -> bytes:
    return ids.astype(">u4").tobytes()
