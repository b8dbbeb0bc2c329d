"""The card of a head, ``README.md`` in its folder: what it is, how it was trained, how good it is, how it is used."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwing.errors import CheckpointError
from draftwing.formats.write import write_fix, write_text
from draftwing.models.config import read_config
from draftwing.models.weights import WeightFiles
from draftwing.text.prompts import Prompt, read_prompts

_FILE = "README.md"
_MARK = "<!-- Written by Draftwing; without this line it is left as it is. -->"
_MAPS = ("d2t", "t2d", "draft_ids")
Facts = Mapping[str, Any]


def write_card(folder: Path, layout: str = "draftwing", serve: str = "", *, seconds: float | None = None) -> None:
    """Write the card of the head in ``folder``, unless somebody wrote one of their own there.

    Args:
        layout: in which the head is written.
        serve: the command that serves it, where an engine reads this layout.
        seconds: that it was trained, where its config does not say.

    Raises:
        CheckpointError, ConfigError: no head in the folder, or the card cannot be written.
    """
    file = Path(folder) / _FILE
    if not _is_ours(file):
        return
    write_text(file, render_card(Path(folder), layout, serve, seconds=seconds))


def copy_card(source: Path, destination: Path, layout: str, serve: str = "") -> None:
    """The card of a head that was converted: a new one, or its author's own as it stands, licence and all.

    Raises:
        CheckpointError, ConfigError: see ``write_card``.
    """
    own, file = Path(source) / _FILE, Path(destination) / _FILE
    if _is_ours(own) or not _is_ours(file):
        write_card(destination, layout, serve)
        return
    try:
        shutil.copyfile(own, file)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be written ({error}): {write_fix(error)}") from error


def _is_ours(file: Path) -> bool:
    """Whether there is no card, or one that was written here and may be replaced."""
    try:
        return not file.exists() or _MARK in file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


# --- the text --------------------------------------------------------------------------------------------------------


def render_card(folder: Path, layout: str = "draftwing", serve: str = "", *, seconds: float | None = None) -> str:
    """The text of a card, from the head's config and the names and shapes of its tensors.

    What is not known is left out. Beside what training writes, ``training`` may have ``seconds``, ``licence`` (an
    SPDX identifier) and ``results``: for each set of prompts what was measured on it, ``{"MT-bench": {"tau": 2.4}}``.

    Raises:
        CheckpointError, ConfigError: no head in the folder.
    """
    config = read_config(folder)
    block = _table(config.get("draftwing"))
    training = {"seconds": seconds, **_table(block.get("training"))}
    target = _table(block.get("target") or _table(block.get("config")).get("target"))
    kind = str(block.get("kind") or f"EAGLE-{block.get('version', 3)}")
    name = str(target.get("name") or "a target that is not named")
    parts = [
        _front(kind, training),
        f"# {kind} head for {name}",
        "A draft head for speculative decoding: it guesses what the target says next, and the target checks every "
        "guess. The text stays the target's own.",
        _rows(_net(folder, config, block, target, kind, layout)),
        *_section("Training", _bullets(_training(training))),
        *_section("Held-out data", _held_out(_table(training.get("held_out")), training)),
        *_section("Measured", _results(_table(training.get("results")))),
        *_section("Use", _use(folder.name, str(target.get("name") or "TARGET"), "kind" in block, layout, serve)),
        *_section("Licence", _licence(training)),
        _MARK,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front(kind: str, training: Facts) -> str:
    licence = [f"license: {str(training['licence']).lower()}"] if training.get("licence") else []
    tags = ["tags:", "- speculative-decoding", f"- {kind.lower()}"]
    return "\n".join(["---", "library_name: draftwing", *licence, *tags, "---"])


def _net(folder: Path, config: Facts, block: Facts, target: Facts, kind: str, layout: str) -> list[tuple[str, str]]:
    shape = _table(config.get("transformer_layer_config")) or config
    with WeightFiles(folder) as files:
        sizes = [files.shape(name) for name in files.keys() if name not in _MAPS]  # noqa: SIM118
    millions = sum(map(math.prod, sizes)) / 1e6
    dtype = f" in {shape['torch_dtype']}" if isinstance(shape.get("torch_dtype"), str) else ""
    rows = [("net", f"{kind}, {millions:.1f}M parameters{dtype}")]
    if target:
        rows.insert(0, ("target", _target(target)))
    taps = block.get("taps") or _table(block.get("config")).get("taps")
    if isinstance(taps, list):
        rows.append(("reads", f"the target's hidden states {', '.join(map(str, taps))}"))
    draft, whole = config.get("draft_vocab_size"), shape.get("vocab_size")
    if isinstance(draft, int) and isinstance(whole, int):
        covered = _table(block.get("training")).get("coverage")
        share = f" ({covered:.1%} of the training tokens)" if isinstance(covered, float) and draft < whole else ""
        rows.append(("draft vocabulary", f"{draft:,} of {whole:,} tokens{share}"))
    return [*rows, ("layout", layout)]


def _target(target: Facts) -> str:
    sizes = [
        f"{label} {target[key]:,}"
        for key, label in (("num_layers", "layers"), ("hidden_size", "hidden size"), ("vocab_size", "vocabulary"))
        if isinstance(target.get(key), int)
    ]
    return ", ".join([str(target.get("name") or "not named"), *sizes])


def _training(training: Facts) -> list[tuple[str, str]]:
    get = training.get
    method = [
        f"{get('method')}",
        *(f"{label} {get(key)}" for key, label in _OPTIONS.items() if get(key) not in (None, 0, 0.0, False)),
    ]
    data = [
        ", ".join(f"`{each}`" for each in get("data") or ()),
        *(f"{get(key):,} {label}" for key, label in _COUNTS.items() if isinstance(get(key), int) and get(key)),
    ]
    per_update = (get("tokens_per_batch") or 0) * (get("accumulation") or 1)
    length = [
        f"{get('iterations'):,} updates" if isinstance(get("iterations"), int) else "",
        f"{per_update * get('iterations', 0):,} tokens seen"
        if per_update and isinstance(get("iterations"), int)
        else "",
        _duration(get("seconds") or 60 * (get("minutes") or 0)),
        _before(_table(get("initial"))),
    ]
    machine = _table(get("machine"))
    hardware = [
        str(machine.get("gpu") or ""),
        str(machine.get("cpu") or ""),
        f"{machine.get('threads')} threads" if machine.get("threads") else "",
        f"torch {machine['torch']}" if machine.get("torch") else "",
    ]
    rows = (("method", method if get("method") else []), ("data", data), ("length", length), ("machine", hardware))
    return [(label, text) for label, found in rows if (text := ", ".join(each for each in found if each))]


# Options by what a reader calls them; those at their usual value of nothing are left out.
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


def _duration(seconds: object) -> str:
    if not isinstance(seconds, int | float) or not seconds:
        return ""
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{max(1, round(seconds / 60))} minutes"


def _before(initial: Facts) -> str:
    if not initial:
        return ""
    seen = initial.get("tokens_seen")
    return f"after {f'{seen:,} tokens seen by' if isinstance(seen, int) else 'the training of'} the head it began as"


def _held_out(found: Facts, training: Facts) -> str:
    agreement = found.get("val_agreement")
    lines = []
    if isinstance(agreement, list) and agreement:
        steps = [str(step) for step in range(1, len(agreement) + 1)]
        lines += [
            _table_of(["draft step", *steps], [["agrees with the target", *(f"{each:.1%}" for each in agreement)]])
        ]
    if isinstance(found.get("tau"), float):
        depth = f", chains of {training['eval_depth']}" if training.get("eval_depth") else ""
        lines.append(f"Tau {found['tau']:.2f}: tokens per forward of the target, greedy{depth}.")
    if lines and isinstance(found.get("iteration"), int):
        lines.append(f"Measured after update {found['iteration']:,}, on data that the head was not trained on.")
    return "\n\n".join(lines)


def _results(found: Facts) -> str:
    rows = {name: _table(row) for name, row in found.items()}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    return _table_of(["set", *columns], [[name, *(str(row.get(c, "")) for c in columns)] for name, row in rows.items()])


def _use(name: str, target: str, is_plain: bool, layout: str, serve: str) -> str:
    ours = f'```\ndraftwing generate --target {target} --draft {name} "..."\n```'
    lines = ["In Draftwing, on the command line and as `dw.load(target, draft=folder)`:", ours]
    if serve:
        lines += [f"Served in the layout {layout}:", f"```\n{serve}\n```"]
    elif not is_plain:
        exported = f"draftwing export {name} --to vllm --target {target} --out {name}-vllm"
        lines += [
            "In vLLM and SGLang: write it in their layout, which prints the command that serves it.",
            f"```\n{exported}\n```",
        ]
    return "\n\n".join([*lines, "`draftwing doctor` tries it on the prompts of `prompts.jsonl`, where there are some."])


def _licence(training: Facts) -> str:
    said = training.get("licence")
    return f"{said}." if said else "Not stated: that of the target and of the training data count."


# --- markdown --------------------------------------------------------------------------------------------------------


def _section(title: str, body: str) -> list[str]:
    return [f"## {title}", body] if body else []


def _bullets(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- {label}: {text}" for label, text in rows)


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    return _table_of(["", ""], [list(row) for row in rows])


def _table_of(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def _table(value: object) -> Facts:
    return value if isinstance(value, Mapping) else {}


# A few prompts in a head's folder, held out of its training: what it is tried on by whoever gets it.
#
# prompts.jsonl    a prompt a line: ``{"messages": [...]}`` up to a question, or ``{"text": ...}``, a document's
# beginning


_FILE_prompts = "prompts.jsonl"
MOST_BYTES = 1024  # of one prompt: a head is a few megabytes, and what it carries along stays small beside that


def line_of(record: Mapping[str, Any]) -> str | None:
    """A record as a line of the file; None where it is too long for it."""
    line = json.dumps(record, ensure_ascii=False)
    return line if len(line.encode()) <= MOST_BYTES else None


def write_stored(folder: Path, lines: Sequence[str]) -> None:
    """Put prompts into a head's folder in place of those that lie there; none removes the file.

    Args:
        lines: of ``line_of``.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    file = Path(folder) / _FILE_prompts
    if lines:
        write_text(file, "".join(f"{line}\n" for line in lines))
        return
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be written ({error}): {write_fix(error)}") from error


def read_stored(folder: Path, limit: int | None = None) -> list[Prompt]:
    """The prompts in a head's folder; none where there is no such file.

    Raises:
        CheckpointError, PromptError: the file is there and cannot be read.
    """
    file = Path(folder) / _FILE_prompts
    return read_prompts(file, limit) if file.exists() else []


def copy_stored(source: Path, destination: Path) -> None:
    """The prompts of one head's folder into another's, which keeps none of its own.

    Raises:
        CheckpointError: the destination cannot be written.
    """
    found, file = Path(source) / _FILE_prompts, Path(destination) / _FILE_prompts
    try:
        if found.exists():
            shutil.copyfile(found, file)
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be written ({error}): {write_fix(error)}") from error
