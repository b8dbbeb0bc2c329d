"""What `draftwing doctor` looks at in a Medusa head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError, DraftwingError
from draftwing.heads.doctor.case import Finding
from draftwing.heads.identity import target_id_of_folder
from draftwing.heads.medusa import load_medusa
from draftwing.heads.plain import PlainHead
from draftwing.model.config import read_config

__all__ = ["diagnose_medusa"]


def diagnose_medusa(folder: Path, target: Path | None) -> list[Finding]:
    """Can it be read, does it belong to the target in the folder ``target``, and does its config say what is there?

    Raises:
        CheckpointError, ConfigError, TokenizerError: the target's folder cannot be read.
    """
    own = None if target is None else target_id_of_folder(target)
    try:
        head = load_medusa(folder, own)
    except CheckpointError as error:
        return [Finding("head", "fail", str(error), "give the head that was trained for this target, whole")]
    except DraftwingError as error:
        return [Finding("head", "fail", str(error), "give its target, or download the head again")]
    config = head.config
    count = sum(tensor.numel() for tensor in head.tensors.values())
    findings = [Finding("head", "ok", f"{config.num_heads} heads of {count:,} numbers in all")]
    findings.append(_heads(read_config(folder), head))
    if config.target is None:
        findings.append(Finding("target", "unknown", "the head does not say for which target it was trained"))
    elif own is None:
        findings.append(Finding("target", "unknown", f"it is for {config.target.name}, and no target was given"))
    else:
        findings.append(Finding("target", "ok", "the one that it was trained for"))
    if head.target_ids is not None:
        share = f"{len(head.target_ids):,} of {config.vocab_size:,} tokens"
        findings.append(Finding("vocabulary", "ok", f"drafts {share}, the others never"))
    return findings


def _heads(config: Mapping[str, Any], head: PlainHead) -> Finding:
    """The first published configs name 2 heads where there are 5: some engines then use 2."""
    said = config.get("medusa_num_heads", config.get("num_heads"))
    found = head.config.num_heads
    if said in (None, found):
        return Finding("count", "ok", f"{found} heads, as its config says" if said else f"{found} heads")
    return Finding(
        "count",
        "warn",
        f"its config says {said} heads, and it has {found}: Draftwing uses all that are there",
        f"for engines that go by the config, write {found} there, or convert the head",
    )
