"""What is wrong with a head, before it is blamed on speculative decoding.

A head that does not fit still decodes the same text, only slowly: nothing ever says that its taps are off by one or
that its map holds ids. Each check here is one such trap, met in heads that people published.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from draftwing.heads.doctor import checks, checks_target
from draftwing.heads.doctor.case import Case, Finding, Status, examine, look_at_target

__all__ = ["CHECKS", "Finding", "Status", "diagnose"]

CHECKS: tuple[Callable[[Case], Finding], ...] = (
    checks.check_config,
    checks.check_weights,
    checks.check_missing,
    checks.check_unknown,
    checks.check_shape,
    checks.check_finite_numbers,
    checks.check_taps,
    checks.check_draft_map,
    checks_target.check_coverage,
    checks_target.check_rope,
    checks_target.check_positions,
    checks.check_layers,
    checks.check_bias,
    checks.check_attention_bias,
    checks.check_residual,
    checks.check_lm_head,
    checks_target.check_hidden_size,
    checks_target.check_num_layers,
    checks_target.check_vocabulary,
    checks_target.check_chat_template,
    checks_target.check_embedding,
)


def diagnose(head_folder: Path, target_folder: Path | None = None) -> list[Finding]:
    """Look at a head from every side, in any layout, and with its target from both.

    Nothing about the head raises: a folder that cannot be read is a finding.

    Args:
        target_folder: of the model that the head is to draft for; without it half of the checks are ``unknown``.

    Raises:
        CheckpointError, ConfigError, TokenizerError: the target's folder cannot be read.
    """
    target = None if target_folder is None else look_at_target(Path(target_folder))
    case = examine(Path(head_folder), target)
    return [check(case) for check in CHECKS]
