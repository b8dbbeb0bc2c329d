"""A draft vocabulary on disk: ``d2t`` and ``t2d``, read by what they can mean and written in the published form.

``d2t`` (V_draft,) is published as offsets, ``target_id = draft_id + d2t[draft_id]``. Some tools write the target ids
themselves under the same name, and nothing but the numbers tells the two apart: offsets never fall, ids always
rise, and both must end inside the vocabulary. ``t2d`` (V,) is True where a target id is drafted, and decides.

Shape suffixes: V the target's vocabulary, V_draft the draft's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftwing.errors import CheckpointError

MapForm = Literal["none", "offsets", "ids"]


@dataclass(frozen=True)
class DraftVocab:
    """``target_ids`` (V_draft,) ascending, or None for the whole vocabulary; ``form``: how ``d2t`` held them."""

    target_ids: Tensor | None
    form: MapForm


def to_maps(target_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """``d2t`` (V_draft,) int64 offsets and ``t2d`` (V,) bool of ascending ``target_ids`` (V_draft,)."""
    ids = target_ids.to("cpu", torch.int64)
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}


def read_draft_vocab(
    d2t: Tensor | None, t2d: Tensor | None, vocab_size: int, draft_vocab_size: int, where: str
) -> DraftVocab:
    """What the maps of a head mean.

    Args:
        d2t, t2d: as stored, or None where the file has none.
        where: begins every error message.

    Raises:
        CheckpointError: a map is missing, of another length or type, ambiguous, out of range, or the two disagree.
    """
    d2t = None if d2t is None else _integers("d2t", d2t, draft_vocab_size, where)
    t2d = None if t2d is None else _integers("t2d", t2d, vocab_size, where).bool()
    if draft_vocab_size == vocab_size:
        return _whole(d2t, t2d, where)
    if d2t is None:
        raise CheckpointError(
            f"{where}: the draft vocabulary has {draft_vocab_size} of {vocab_size} tokens, but there is no d2t to say "
            f"which: take the head from its original place again"
        )
    readings: dict[MapForm, Tensor] = {"offsets": d2t + torch.arange(draft_vocab_size), "ids": d2t}
    fitting = {form: ids for form, ids in readings.items() if _is_map(ids, vocab_size)}
    if not fitting:
        raise CheckpointError(
            f"{where}: d2t is no map into a vocabulary of {vocab_size}: expected offsets that never fall (or "
            f"ascending ids), found {_shown(d2t)}: was the head made for another target, or its map rounded to "
            f"floats on the way? Take it from its original place again"
        )
    if t2d is not None:
        drafted = t2d.nonzero().flatten()
        fitting = {form: ids for form, ids in fitting.items() if torch.equal(ids, drafted)}
        if not fitting:
            raise CheckpointError(
                f"{where}: t2d and d2t disagree: t2d marks {len(drafted)} tokens ({_shown(drafted)}), d2t maps "
                f"{draft_vocab_size} ({_shown(readings['offsets'])} as offsets): they come from two heads; take both "
                f"from the head's original place again"
            )
    if len(fitting) > 1:
        raise CheckpointError(
            f"{where}: d2t can be read as offsets and as target ids ({_shown(d2t)}), and there is no t2d to decide: "
            f"add t2d, {vocab_size} booleans that are true for every token that the head drafts"
        )
    form, ids = next(iter(fitting.items()))
    return DraftVocab(ids, form)


def _whole(d2t: Tensor | None, t2d: Tensor | None, where: str) -> DraftVocab:
    """A draft vocabulary of every token: maps are not needed, but some trainers write them all the same."""
    form: MapForm = "none"
    if d2t is not None and d2t.any():
        form = "ids"
        if not torch.equal(d2t, torch.arange(len(d2t))):
            raise CheckpointError(
                f"{where}: the draft vocabulary is the whole vocabulary of {len(d2t)} tokens, but d2t moves tokens "
                f"({_shown(d2t)}): correct `draft_vocab_size` in config.json, or take the head from its original "
                f"place again"
            )
    if t2d is not None and not t2d.all():
        raise CheckpointError(
            f"{where}: the draft vocabulary is the whole vocabulary, but t2d leaves out {int((~t2d).sum())} of "
            f"{len(t2d)} tokens: correct `draft_vocab_size` in config.json, or take the head from its original place "
            f"again"
        )
    return DraftVocab(None, form)


def _integers(name: str, found: Tensor, length: int, where: str) -> Tensor:
    """int64 of a map of ``length``."""
    if found.is_floating_point() or found.is_complex():
        raise CheckpointError(
            f"{where}: {name} must hold integers, found {found.dtype}, which rounds large ids: convert the head again "
            f"and leave its maps as they are"
        )
    if found.shape != (length,):
        raise CheckpointError(
            f"{where}: {name} has shape {tuple(found.shape)}, expected ({length},) from "
            f"`{'draft_vocab_size' if name == 'd2t' else 'vocab_size'}` in config.json: the two belong to different "
            f"heads; take both from one place"
        )
    return found.to("cpu", torch.int64)


def _is_map(ids: Tensor, vocab_size: int) -> bool:
    rising = bool((ids[1:] > ids[:-1]).all())
    return rising and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size


def _shown(values: Tensor) -> str:
    head = ", ".join(str(value) for value in values[:3].tolist())
    return head if len(values) <= 3 else f"{head} ... {int(values[-1])}"
