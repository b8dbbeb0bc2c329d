"""``draftwing train | doctor | convert | export``: draft heads, from data to a folder that ``--draft`` takes."""

from __future__ import annotations

import difflib
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from rich.text import Text

from draftwing.cli import progress, screen
from draftwing.cli.options import (
    JSON,
    PROMPTS,
    TARGET,
    Data,
    Model,
    SamplingOptions,
    argument,
    option,
    parse_taps,
    with_options,
)
from draftwing.cli.screen import format_alpha, print_line, print_table
from draftwing.errors import CheckpointError, ConfigError, DraftwingError
from draftwing.methods.registry import shipped_head_for, training_methods
from draftwing.models.catalogue import default_model, entry_of
from draftwing.storage import similar_paths, writing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from draftwing.formats.doctor import Finding
    from draftwing.lab.fit import Fit
    from draftwing.train.session import Session
    from draftwing.train.trainer import Trainer

_STEPS = ", ".join(f"{name} {way.unroll_steps}" for name, (_, way) in training_methods().items())


@dataclass(frozen=True)
class Run:
    out: Path = option(..., "Folder of the run: checkpoint, metrics, curves, head/.", "-o")
    target: str | None = TARGET
    cache: str | None = option(
        None,
        "Features of `draftwing data cache`, `data regenerate --features` or `data import-states`, instead of --data: "
        "a folder or its URL.",
    )
    ends_only: bool = option(
        False,
        "With --cache: load no more of the target than embedding, norm and LM head. tau is not measured.",
        "--ends-only",
        expert=True,
    )
    init_from: Path | None = option(None, "Start from this head, in any layout, or from this draft model.")
    licence: str | None = option(None, "Licence for the head's card, such as Apache-2.0.")
    device: str | None = option(None, "cpu or cuda. [default: cuda if available]")
    dtype: str | None = option(
        None, "Data type of the target. [default: bfloat16, if the device is fast at it]", expert=True
    )
    forecast_prompts: int = option(16, "Prompts for the statistics of `draftwing predict`.", min=0, expert=True)


@dataclass(frozen=True)
class Training:
    PANEL: ClassVar = "Training"

    minutes: float | None = option(None, "Train for N minutes.")
    iterations: int | None = option(None, "Train for N updates.")
    max_length: int = option(512, "Maximum number of tokens of a window or dialogue.")
    objective: str | None = option(None, "eagle1, hass, eagle3, tv, fkl, rkl, jsd, jsd:BETA or next-token.")
    unroll_steps: int | None = option(None, f"Steps of training-time test; modules of mtp. [default: {_STEPS}]")
    draft_vocab_size: int | None = option(None, "EAGLE-3's draft vocabulary. [default: the whole vocabulary]")
    lr: float | None = option(None, "Peak learning rate. [default: 1e-3]")
    seed: int = option(0, "Seed of the weights, the order of the data and the noise.")
    loss_vocab_size: int | None = option(
        None, "EAGLE-1, HASS: loss over the N most frequent tokens. [default: all]", expert=True
    )
    tokens_per_batch: int = option(2048, "Tokens of a batch.", expert=True)
    accumulation: int = option(1, "Batches of one update.", expert=True)
    later_share: float = option(1.0, "Share of the entries in unrolled steps after the first.", expert=True)
    taps: str | None = option(None, "Hidden states to read, such as 2,16,29. [default: the method's]", expert=True)
    fc_norm: bool = option(False, "EAGLE-3.1: a norm for each tap.", expert=True)
    norm_output: bool = option(False, "EAGLE-3.1: feed back the normed state.", expert=True)
    num_layers: int | None = option(None, "Layers of a new net. [default: the method's]", expert=True)
    mask_token_id: int | None = option(
        None,
        "DFlash, DSpark, Domino, P-EAGLE: an unused token as the mask, for other engines. [default: a vector; P-EAGLE: "
        "the last token]",
        expert=True,
    )
    hidden_size: int | None = option(None, "Width of a new draft model. [default: half of the target's]", expert=True)
    num_heads: int | None = option(None, "Attention heads of a new draft model. [default: each 64 wide]", expert=True)
    own_text: float = option(0.0, "Share of the batches that the draft model writes itself.", expert=True)
    optimizer: str = option("adamw", "adamw, or muon for the matrices.", expert=True)
    precision: str | None = option(
        None, "bf16 autocast, or no. [default: bf16, if the device is fast at it]", expert=True
    )
    validation_share: float = option(0.02, "Share of the data held out.", expert=True)
    eval_every: int = option(200, "Iterations between two evaluations.", expert=True)
    eval_prompts: int = option(8, "Held-out prompts on which tau is measured.", expert=True)


@with_options
def train(
    run: Run,
    data: Data,
    training: Training,
    method: str = argument(..., f"{', '.join(training_methods())}."),
    as_json: bool = JSON,
) -> None:
    """Train a draft head for a target, or resume a stopped run.

    `OUT/head` is the head, ready for `--draft`. Ctrl-C writes a checkpoint, and the same command continues from it. A
    head learns best from the target's own answers: see `draftwing data regenerate`. More GPUs: `accelerate launch -m
    draftwing.cli.main train ...`.

    Examples:

    - `draftwing train eagle3 --data dialogues.jsonl --out my-head --minutes 15`
    - `draftwing train eagle3 -t path/or/hub-id --data chats.jsonl --draft-vocab-size 32000 --iterations 20000 -o head`
    - `draftwing train hass --data texts/ --unroll-steps 3 --optimizer muon --minutes 60 -o head`
    - `draftwing train eagle3 --cache features --minutes 60 -o head`
    - `draftwing train causal-lm --data chats.jsonl --init-from small-model --objective rkl --minutes 60 -o draft`
    """
    from draftwing.train.options import TrainOptions
    from draftwing.train.session import RunFiles, prepare

    options = TrainOptions(method, save_every=50, **{**asdict(training), "taps": parse_taps(training.taps)})
    files = RunFiles(run.target, data.sources, run.cache, run.init_from, run.licence)
    title = ""

    def phase(name: str) -> AbstractContextManager[Callable[[int, int], None]]:
        nonlocal title
        title = name.partition(",")[0]
        return progress.progress(name)

    try:
        session = prepare(
            files,
            options,
            run.out,
            dtype=run.dtype,
            device=run.device,
            layers=not run.ends_only,
            phase=phase,
        )
    except KeyboardInterrupt:
        _report_no_update(run.out, title)
        raise
    is_main = session.trainer.accelerator.is_main_process
    if is_main:
        screen.line(session.describe(), "dim")
    with progress.training(session.evaluation) as on_progress, _stop_on_signals(session.trainer):
        session.trainer.on_progress = on_progress
        done = session.run()
    if not is_main:
        return
    if not done.iteration:
        _report_no_update(run.out, "training")
        raise typer.Exit(130)
    finished = done.iteration >= done.iterations
    if finished and run.forecast_prompts and not run.ends_only:
        _collect_statistics(session, run.forecast_prompts)
    head, curves = run.out / "head", draw_curves(run.out)
    if as_json:
        result = {"head": str(head), "curves": str(curves), "iterations": done.iteration, "finished": finished}
        screen.print_json({**result, **session.final_metrics()})
    else:
        target = f" --target {run.target}" if run.target else ""
        screen.line(f"wrote {head}, {curves}")
        screen.line(f"try it: draftwing compare{target} --draft {head}")
    if not finished:
        screen.line(f"stopped at iteration {done.iteration}: run the same command again to continue", "yellow")
        raise typer.Exit(130)


def _report_no_update(out: Path, phase: str) -> None:
    """Report what a run keeps that is stopped before it has trained."""
    from draftwing.train.trainer import CHECKPOINT, read_metrics

    kept = "nothing was written, downloads are kept"
    if (out / CHECKPOINT).exists():
        last = max((line["iteration"] for line in read_metrics(out)), default=0)
        kept = f"{out} still has the {last} updates of earlier runs"
    screen.line(f"stopped before the first update ({phase or 'starting'}): {kept}", "yellow")


@contextmanager
def _stop_on_signals(trainer: Trainer) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run after the present iteration, with a checkpoint; a second one ends it at once."""

    def stop(number: int, frame: object) -> None:
        if trainer.stopping:
            raise KeyboardInterrupt
        trainer.stopping = True
        screen.line("stopping after this iteration (again to stop at once) ...", "yellow")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def draw_curves(out: Path) -> Path:
    """Write ``out/curves.png``: loss, agreement of each unrolled step, and tau on the validation prompts."""
    from matplotlib.figure import Figure

    from draftwing.train.trainer import read_metrics

    metrics, figure = read_metrics(out), Figure(figsize=(13, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)

    def points(name: str) -> tuple[list[int], list[Any]]:
        return [line["iteration"] for line in metrics if name in line], [line[name] for line in metrics if name in line]

    left.plot(*points("loss"), lw=0.6, alpha=0.6, label="training")
    left.plot(*points("val_loss"), "o-", label="validation")
    left.set(title="loss", xlabel="iteration")
    left.legend()
    iterations, agreement = points("agreement")
    for step, values in enumerate(zip(*agreement, strict=True)):
        middle.plot(iterations, values, label=f"step {step}")
    middle.set(title="greedy agreement with the target (training)", xlabel="iteration", ylim=(0, 1))
    if agreement:
        middle.legend()
    right.plot(*points("tau"), "o-")
    right.set(title="tau, greedy, validation prompts (chain)", xlabel="iteration")
    file = out / "curves.png"
    with writing(file):
        figure.savefig(file, dpi=110)
    return file


def _collect_statistics(session: Session, num_prompts: int) -> None:
    try:
        with progress.progress("collecting statistics for draftwing predict") as on_progress:
            session.collect_held_out(num_prompts, on_progress)
    except KeyboardInterrupt:  # the head is complete
        screen.line("no statistics were collected: `draftwing predict --collect` makes them later", "yellow")
    except DraftwingError as error:
        screen.line(f"no statistics were collected for `draftwing predict`: {error}", "yellow")


_HEAD = argument(..., "Folder of a head, in any layout, or the name of one that ships with the target, such as eagle3.")
_STATUS_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "unknown": "dim"}


@with_options
def doctor(
    model: Model,
    head: Path = _HEAD,
    prompts: str | None = PROMPTS,
    num_prompts: int = option(4, "Use only the first N prompts.", min=1),
    measure: bool = option(True, "Decode a few prompts with the head.", "--measure/--no-measure"),
    as_json: bool = JSON,
) -> None:
    """Check a head for a target: known causes of silent failure, and whether its drafts are accepted.

    The head is tried on prompts that its training held out and stored with it, else on questions through the target's
    chat template, else (for targets without one) on beginnings of Python files. If another trainer's EAGLE-3 head names
    the layers that it reads, it is tried with their inputs and with their outputs. Exits with 1 if a check fails, or if
    the head drafts no better than chance.

    Examples:

    - `draftwing doctor my-head/head`
    - `draftwing doctor downloaded-eagle3 --target path/or/hub-id --prompts prompts.jsonl`
    """
    from draftwing.formats.doctor import other_taps
    from draftwing.lab.fit import measure_fit, trial_of
    from draftwing.loading import find_model, load
    from draftwing.methods.registry import diagnose, method_of_folder
    from draftwing.remote import public_name
    from draftwing.text.prompts import read_prompts

    head = _head_folder(head, model.target)
    findings = diagnose(head, find_model(model.target)[0])
    failed = any(finding.status == "fail" for finding in findings)
    fit = None
    if measure and not failed:
        lm = load(**vars(model), draft=head)
        given = None if prompts is None else SamplingOptions().encode_all(read_prompts(prompts, num_prompts), lm)
        where = "" if prompts is None else public_name(prompts)
        other = other_taps(head, lm.target.num_layers) if method_of_folder(head).name == "eagle3" else None
        fit = measure_fit(lm, trial_of(head, lm.tokenizer, num_prompts, given, where=where), other_taps=other)
        failed = fit.verdict == "does not fit"
    if as_json:
        rows = [asdict(finding) for finding in findings]
        screen.print_json({"findings": rows, "fit": None if fit is None else asdict(fit)})
    else:
        _print_findings(findings, fit)
    if failed:
        raise typer.Exit(1)


def _print_findings(findings: Sequence[Finding], fit: Fit | None) -> None:
    records = []
    for finding in findings:
        detail = f"{finding.detail}\n{finding.fix}" if finding.fix and finding.status != "ok" else finding.detail
        status = Text(finding.status, _STATUS_STYLES.get(finding.status, ""))
        records.append({"name": finding.name, "status": status, "detail": detail})
    print_table(records, "check: {name} | status: {status} | finding: {detail}")
    if fit is None:
        return
    style = {"fits": "green", "weak": "yellow"}.get(fit.verdict, "bold red")
    print_line(f"acceptance by depth {format_alpha(fit.alpha)}, tau {fit.tau:.2f}: {fit.verdict}", style)
    print_line(f"tried on {fit.tried_on}: {fit.num_drafts} drafts, greedy")
    low, high = fit.interval
    print_line(
        f"first token accepted: {low:.0%} to {high:.0%} (95%); shuffled drafts: {fit.chance:.0%}; tau of prompt lookup "
        f"on the same prompts: {fit.lookup_tau:.2f}"
    )
    if fit.other is not None:
        read, other = (",".join(map(str, taps)) for taps in (fit.taps, fit.other.taps))
        counted = "inputs" if fit.other.taps < fit.taps else "outputs"
        is_better = fit.other.tau > fit.tau
        advice = f"these agree better, so convert the head with --taps {other}" if is_better else "not better"
        print_line(
            f"taps {read}: tau {fit.tau:.2f}; if its ids count {counted} of layers, {other}: tau {fit.other.tau:.2f}, "
            f"{advice}",
            "yellow" if is_better else "green",
        )


# Layouts of all methods, listed here because the methods' classes import PyTorch.
_LAYOUTS = ("draftwing", "eagle", "vllm", "sglang", "speculators", "gguf", "medusa")
_OUT = option(..., "Folder to write, or a file that ends in .gguf.", "-o")
_DTYPE = option(None, "float32, float16 or bfloat16: data type of a GGUF head's matrices. [default: the head's]")


@with_options
def convert(
    head: Path = _HEAD,
    out: Path = _OUT,
    to: str = option("draftwing", f"{', '.join(_LAYOUTS)}."),
    target: str | None = option(None, "The head's target: for gguf, and if the head does not name it.", "-t"),
    dtype: str | None = _DTYPE,
    taps: str | None = option(None, "Its hidden states, such as 2,16,29, if the head does not name them."),
    depth: int = option(5, "Number of draft tokens in the config of speculators.", min=1, expert=True),
) -> None:
    """Convert a head to another layout without changing a number, unless --dtype rounds them.

    Examples:

    - `draftwing convert my-head/head --to speculators -o my-head-speculators`
    - `draftwing convert downloaded-eagle3 -o head --target path/or/hub-id`
    - `draftwing convert my-head/head --to gguf --target target.gguf --dtype float16 -o head.gguf`
    """
    from draftwing.methods.registry import convert as run

    options = _gguf_options(out, to, target, dtype)
    settings = {"target": _target_id(target), "taps": parse_taps(taps), "depth": depth, **options}
    with screen.writing(out):
        run(_head_folder(head, target), out, to, **settings)
    screen.line(f"wrote {out} in the layout {to!r}")


@with_options
def export(
    head: Path = _HEAD,
    out: Path = _OUT,
    to: str = option("vllm", "vllm, sglang, speculators (read by vLLM) or gguf (llama.cpp)."),
    target: str | None = option(None, "Folder, name, hub id or GGUF file of the model that the engine serves.", "-t"),
    dtype: str | None = _DTYPE,
    depth: int = option(3, "Number of draft tokens in a row.", min=1),
) -> None:
    """Write a head in another engine's layout, and print the command that serves it.

    Examples:

    - `draftwing export my-head/head --to vllm --target path/or/hub-id -o my-head-vllm`
    - `draftwing export my-head/head --to gguf --target target.gguf -o my-head.gguf`
    """
    from draftwing.formats.write import SERVED_BY, serve_command
    from draftwing.methods.registry import convert as run
    from draftwing.models.resolve import fetch

    if to not in SERVED_BY:
        raise ConfigError(f"no engine serves the layout {to!r}: choose {', '.join(SERVED_BY)} (or use convert)")
    options = _gguf_options(out, to, target, dtype)
    with screen.writing(out):
        run(_head_folder(head, target), out, to, target=_target_id(target), depth=depth, **options)
    entry = entry_of(target)  # engines do not know our names
    served = str((target or default_model()) if entry is None else fetch(entry))
    if served.endswith(".gguf") and to != "gguf":
        screen.line("engines read GGUF files in part or not at all: the first command makes a folder of it", "yellow")
        folder = f"{out}-target"
        print(f"draftwing import {shlex.quote(served if entry is None else entry.name)} {shlex.quote(folder)}")
        served = folder
    print(serve_command(to, served, out, depth))


def _head_folder(head: Path, target: str | None) -> Path:
    """Return the folder of a head, of a GGUF file, or of a head that ships with the target (None: the default)."""
    from draftwing.models.resolve import resolve

    if head.exists():
        return resolve(head)
    entry = entry_of(target)
    shipped = {} if entry is None else entry.heads
    if str(head) in shipped and entry is not None:
        return entry.head(str(head))
    if entry is None and (found := shipped_head_for(str(head), _target_id(target or default_model()))) is not None:
        return found  # the file or folder of a model that has a name, too
    close = [*similar_paths(head), *difflib.get_close_matches(str(head), shipped, n=2)]
    hint = f"Did you mean {' or '.join(close)}? " if close else ""
    names = f", or a name: {', '.join(shipped)}" if shipped else ""
    raise CheckpointError(f"{head}: there is no such folder. {hint}Give the folder of a head{names}.")


def _gguf_options(out: Path, to: str, target: str | None, dtype: str | None) -> dict[str, Any]:
    """Return the options of the layout gguf alone, which holds the tokenizer of the target's GGUF file."""
    from draftwing.formats.gguf_folder import link_of
    from draftwing.models.resolve import resolve

    if to == "gguf":
        return {"target_file": None if target is None else link_of(resolve(target)), "dtype": dtype}
    if out.suffix == ".gguf":
        raise ConfigError(f"--out {out}: the layout {to!r} is a folder: add --to gguf, or name a folder")
    if dtype is not None:
        raise ConfigError(f"--dtype belongs to --to gguf, found {to!r}: leave it out, the numbers are kept")
    return {}


def _target_id(target: str | None) -> Any:
    from draftwing.formats.identity import target_id_of_folder
    from draftwing.models.resolve import resolve

    return None if target is None else target_id_of_folder(resolve(target), target)
