"""Write a head's card, ``README.md``: what it is, how it was trained, how good it is, and how to use it.

``prompts.jsonl`` next to it holds a few prompts held out of the training, one a line: ``{"messages": [...]}`` up to a
question, or ``{"text": ...}``, the start of a document. ``draftwing doctor`` tries the head on them.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwing.models.config import read_config
from draftwing.models.weights import WeightFiles
from draftwing.storage import write_text, writing
from draftwing.text.prompts import Prompt, read_prompts

_FILE, _PROMPTS = "README.md", "prompts.jsonl"
_MARK = "<!-- Written by Draftwing; without this line it is left as it is. -->"
_MAPS = ("d2t", "t2d", "draft_ids")
MOST_BYTES = 1024  # per prompt: small next to a head of a few megabytes
# Training options by their names in the card. Those that are 0 are left out.
_OPTIONS = {
    "objective": "objective",
    "unroll_steps": "unrolled steps",
    "later_share": "later share",
    "inputs": "inputs",
    "max_length": "rows of at most",
    "optimizer": "optimizer",
    "lr": "peak rate",
    "ema": "average with decay",
    "precision": "precision",
    "seed": "seed",
}
_COUNTS = {"num_dialogues": "dialogues", "tokens_in_data": "tokens to train on", "tokens_held_out": "held out"}
_TARGET_SIZES = {"num_layers": "layers", "hidden_size": "hidden size", "vocab_size": "vocabulary"}
Facts = Mapping[str, Any]


def write_card(folder: Path, layout: str = "draftwing", serve: str = "", *, seconds: float | None = None) -> None:
    """Write the card (see ``render_card``) of the head in ``folder``, unless it has one by another author."""
    file = Path(folder) / _FILE
    if _is_ours(file):
        write_text(file, render_card(Path(folder), layout, serve, seconds=seconds))


def copy_card(source: Path, destination: Path, layout: str, serve: str = "") -> None:
    """Write the card of a converted head, or copy its author's own, licence included."""
    card, copy = Path(source) / _FILE, Path(destination) / _FILE
    if _is_ours(card) or not _is_ours(copy):
        write_card(destination, layout, serve)
    else:
        _copy(card, copy)


def _is_ours(file: Path) -> bool:
    """Return True if there is no card, or one that Draftwing wrote and may replace."""
    try:
        return not file.exists() or _MARK in file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _copy(source: Path | None, destination: Path) -> None:
    """Copy a file; without a source, remove the destination."""
    with writing(destination):
        if source is not None and source.exists():
            shutil.copyfile(source, destination)
        else:
            destination.unlink(missing_ok=True)


def render_card(folder: Path, layout: str = "draftwing", serve: str = "", *, seconds: float | None = None) -> str:
    """Return the text of a card, from the head's config and the names and shapes of its tensors.

    Unknown facts are left out. Apart from what training writes, ``training`` may have ``seconds``, ``licence`` (an
    SPDX identifier) and ``results``: measurements by set of prompts, ``{"MT-bench": {"tau": 2.4}}``.

    Args:
        serve: the command that serves the head, if an engine reads this layout.
        seconds: training time, if the head's config lacks it.
    """
    config = read_config(folder)
    block = _object(config.get("draftwing"))
    training = {"seconds": seconds, **_object(block.get("training"))}
    target = _object(block.get("target") or _object(block.get("config")).get("target"))
    kind = str(block.get("kind") or f"EAGLE-{block.get('version', 3)}")
    licence = training.get("licence")
    tags = ["tags:", "- speculative-decoding", f"- {kind.lower()}", "---"]
    results = {name: _object(row) for name, row in _object(training.get("results")).items()}
    columns = list(dict.fromkeys(column for row in results.values() for column in row))
    sections = {
        "Training": "\n".join(f"- {label}: {text}" for label, text in _describe_training(training)),
        "Held-out data": _describe_held_out(_object(training.get("held_out")), training),
        "Measured": _table(
            ["set", *columns], [[name, *(str(row.get(key, "")) for key in columns)] for name, row in results.items()]
        ),
        "Use": _describe_use(folder.name, str(target.get("name") or "TARGET"), "kind" in block, layout, serve),
        "Licence": f"{licence}." if licence else "Not stated: the licences of the target and of the data apply.",
    }
    parts = [
        "\n".join(
            ["---", "library_name: draftwing", *([f"license: {str(licence).lower()}"] if licence else []), *tags]
        ),
        f"# {kind} head for {target.get('name') or 'an unnamed target'}",
        "A draft head for speculative decoding: it predicts the target's next tokens, and the target verifies every "
        "prediction. The output is the target's own.",
        _table(["", ""], _describe_net(folder, config, block, target, kind, layout)),
        *(f"## {title}\n\n{body}" for title, body in sections.items() if body),
        _MARK,
    ]
    return "\n\n".join(parts) + "\n"


def _describe_net(folder: Path, config: Facts, block: Facts, target: Facts, kind: str, layout: str) -> list[list[str]]:
    shape = _object(config.get("transformer_layer_config")) or config
    with WeightFiles(folder) as files:
        sizes = [files.shape(name) for name in files.keys() if name not in _MAPS]  # noqa: SIM118
    millions = sum(map(math.prod, sizes)) / 1e6
    dtype = f" in {shape['torch_dtype']}" if isinstance(shape.get("torch_dtype"), str) else ""
    rows = []
    if target:
        known = [f"{label} {target[key]:,}" for key, label in _TARGET_SIZES.items() if isinstance(target.get(key), int)]
        rows.append(["target", ", ".join([str(target.get("name") or "unnamed"), *known])])
    rows.append(["net", f"{kind}, {millions:.1f}M parameters{dtype}"])
    taps = block.get("taps") or _object(block.get("config")).get("taps")
    if isinstance(taps, list):
        rows.append(["reads", f"the target's hidden states {', '.join(map(str, taps))}"])
    draft, whole = config.get("draft_vocab_size"), shape.get("vocab_size")
    if isinstance(draft, int) and isinstance(whole, int):
        covered = _object(block.get("training")).get("coverage")
        share = f" ({covered:.1%} of the training tokens)" if isinstance(covered, float) and draft < whole else ""
        rows.append(["draft vocabulary", f"{draft:,} of {whole:,} tokens{share}"])
    return [*rows, ["layout", layout]]


def _describe_training(training: Facts) -> list[tuple[str, str]]:
    get = training.get
    iterations = get("iterations")
    is_known = isinstance(iterations, int)
    seen = (iterations or 0) * (get("tokens_per_batch") or 0) * (get("accumulation") or 1)
    machine, initial = _object(get("machine")), _object(get("initial"))
    before = initial.get("tokens_seen")
    before_text = f"{before:,} tokens seen by" if isinstance(before, int) else "the training of"
    options = [f"{label} {get(key)}" for key, label in _OPTIONS.items() if get(key) not in (None, 0, 0.0, False)]
    rows = {
        "method": [str(get("method")), *options] if get("method") else [],
        "data": [
            *(f"`{name}`" for name in get("data") or ()),
            *(f"{get(key):,} {label}" for key, label in _COUNTS.items() if isinstance(get(key), int) and get(key)),
        ],
        "length": [
            f"{iterations:,} updates" if is_known else "",
            f"{seen:,} tokens seen" if is_known and seen else "",
            _duration(get("seconds") or 60 * (get("minutes") or 0)),
            f"after {before_text} the head it began as" if initial else "",
        ],
        "machine": [
            str(machine.get("gpu") or ""),
            str(machine.get("cpu") or ""),
            f"{machine['threads']} threads" if machine.get("threads") else "",
            f"torch {machine['torch']}" if machine.get("torch") else "",
        ],
    }
    texts = {label: ", ".join(item for item in items if item) for label, items in rows.items()}
    return [(label, text) for label, text in texts.items() if text]


def _duration(seconds: object) -> str:
    if not isinstance(seconds, int | float) or not seconds:
        return ""
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{max(1, round(seconds / 60))} minutes"


def _describe_held_out(measured: Facts, training: Facts) -> str:
    agreement, tau = measured.get("val_agreement"), measured.get("tau")
    lines = []
    if isinstance(agreement, list) and agreement:
        steps = [str(step) for step in range(1, len(agreement) + 1)]
        row = ["agrees with the target", *(f"{share:.1%}" for share in agreement)]
        lines.append(_table(["draft step", *steps], [row]))
    if isinstance(tau, float):
        depth = f", chains of {training['eval_depth']}" if training.get("eval_depth") else ""
        lines.append(f"Tau {tau:.2f}: tokens per forward of the target, greedy{depth}.")
    if lines and isinstance(measured.get("iteration"), int):
        lines.append(f"Measured after update {measured['iteration']:,}, on data that the head was not trained on.")
    return "\n\n".join(lines)


def _describe_use(name: str, target: str, is_plain: bool, layout: str, serve: str) -> str:
    lines = [
        "In Draftwing, on the command line and as `dw.load(target, draft=folder)`:",
        f'```\ndraftwing generate --target {target} --draft {name} "..."\n```',
    ]
    if serve:
        lines += [f"To serve it in the layout {layout}:", f"```\n{serve}\n```"]
    elif not is_plain:
        lines += [
            "In vLLM and SGLang: convert it to their layout. This command also prints the one that serves it.",
            f"```\ndraftwing export {name} --to vllm --target {target} --out {name}-vllm\n```",
        ]
    return "\n\n".join([*lines, "`draftwing doctor` tries it on the prompts in `prompts.jsonl`, if there are any."])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def _object(value: object) -> Facts:
    return value if isinstance(value, Mapping) else {}


# --- prompts ---------------------------------------------------------------------------------------------------------


def line_of(record: Mapping[str, Any]) -> str | None:
    """Return a record as a line of ``prompts.jsonl``; None if it is too long."""
    line = json.dumps(record, ensure_ascii=False)
    return line if len(line.encode()) <= MOST_BYTES else None


def write_stored(folder: Path, lines: Sequence[str]) -> None:
    """Replace the prompts in a head's folder by lines of ``line_of``; an empty list removes the file."""
    file = Path(folder) / _PROMPTS
    if lines:
        write_text(file, "".join(f"{line}\n" for line in lines))
    else:
        _copy(None, file)


def read_stored(folder: Path) -> list[Prompt]:
    """Return the prompts in a head's folder; none if there is no such file."""
    file = Path(folder) / _PROMPTS
    return read_prompts(file) if file.exists() else []


def copy_stored(source: Path, destination: Path) -> None:
    """Replace the prompts in one head's folder by those of another."""
    _copy(Path(source) / _PROMPTS, Path(destination) / _PROMPTS)
