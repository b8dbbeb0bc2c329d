"""``draftwing train``: a draft head for a target, from data to a folder that ``--draft`` takes."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwing.cli import progress as shown
from draftwing.cli import screen
from draftwing.cli.options import Data, Json, Target, or_of, taps_of, with_options
from draftwing.errors import ConfigError, DraftwingError
from draftwing.methods.registry import training_methods

if TYPE_CHECKING:
    from draftwing.train.session import Session
    from draftwing.train.trainer import Progress, Trainer


_STEPS = ", ".join(f"{name} {way.unroll_steps}" for name, (_, way) in training_methods().items())


def _panel(panel: str, help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel)


@dataclasses.dataclass(frozen=True)
class Training:
    """How a head is trained, as options: see ``train.options.TrainOptions``."""

    minutes: Annotated[float | None, _panel("Length", "Train for so long.")] = None
    iterations: Annotated[int | None, _panel("Length", "Or for so many updates.")] = None
    max_length: Annotated[int, _panel("Length", "Tokens of a window or dialogue.")] = 512
    tokens_per_batch: Annotated[int, _panel("Length", "Tokens of a batch.")] = 2048
    accumulation: Annotated[int, _panel("Length", "Batches of one update.")] = 1
    data_share: Annotated[float, _panel("Length", "Train on this share of the data alone.")] = 1.0
    objective: Annotated[
        str | None,
        _panel("Net", "eagle1, hass, eagle3, tv, fkl, rkl, jsd, jsd:BETA or next-token, instead of the method's own."),
    ] = None
    unroll_steps: Annotated[
        int | None, _panel("Net", f"Of training-time test; of mtp: its modules. [default: {_STEPS}]")
    ] = None
    later_share: Annotated[
        float, _panel("Net", "Share of the entries that go on after the first unrolled step; less is faster.")
    ] = 1.0
    draft_vocab_size: Annotated[int | None, _panel("Net", "EAGLE-3's draft vocabulary. [default: the whole]")] = None
    loss_vocab_size: Annotated[
        int | None, _panel("Net", "Where a net uses the target's LM head: tokens that losses look at. [default: all]")
    ] = None
    inputs: Annotated[str, _panel("Net", "token, feature, feature-unshifted or feature-shifted.")] = "feature-shifted"
    taps: Annotated[
        str | None, _panel("Net", "Other hidden states than the method's, such as 2,16,29; a cache must have them.")
    ] = None
    hidden_size: Annotated[int | None, _panel("Draft model", "Of a new one. [default: half of the target's]")] = None
    num_heads: Annotated[int | None, _panel("Draft model", "Of a new one. [default: each 64 wide]")] = None
    own_text: Annotated[
        float, _panel("Draft model", "Share of the batches whose text the draft model goes on with itself (on-policy).")
    ] = 0.0
    fc_norm: Annotated[bool, _panel("Net", "EAGLE-3.1: a norm for each tap.", "--fc-norm")] = False
    norm_output: Annotated[bool, _panel("Net", "EAGLE-3.1: feed back the normed state.", "--norm-output")] = False
    num_layers: Annotated[
        int | None, _panel("Net", "Of a new one that may have several; a draft model has a quarter of the target's.")
    ] = None
    optimizer: Annotated[str, _panel("Optimisation", "adamw, or muon for the matrices.")] = "adamw"
    lr: Annotated[float | None, _panel("Optimisation", "Peak. [default: 1e-3]")] = None
    warmup: Annotated[float, _panel("Optimisation", "Share of the run.")] = 0.04
    clip: Annotated[float, _panel("Optimisation", "Norm of the gradient (adamw).")] = 0.5
    ema: Annotated[float, _panel("Optimisation", "Decay of an average of the weights, which is then saved.")] = 0.0
    precision: Annotated[str, _panel("Optimisation", "bf16 autocast, or no.")] = "bf16"
    seed: Annotated[int, _panel("Optimisation", "Of the weights, the data's order and the noise.")] = 0
    validation_share: Annotated[float, _panel("Reports", "Share of the data held out.")] = 0.02
    eval_every: Annotated[int, _panel("Reports", "Iterations between two evaluations.")] = 200
    save_every: Annotated[int, _panel("Reports", "Iterations between two checkpoints.")] = 50
    eval_prompts: Annotated[int, _panel("Reports", "Held-out prompts on which tau is measured.")] = 8
    eval_tokens: Annotated[int, _panel("Reports", "Tokens written after each.")] = 64
    eval_depth: Annotated[int, _panel("Reports", "Length of the chain.")] = 5
    keep_prompts: Annotated[
        int, _panel("Reports", "Held-out prompts written beside the head, which `doctor` tries it on; 0 for none.")
    ] = 8


@dataclasses.dataclass(frozen=True)
class Run:
    """What a head is trained for, from what, and where it goes."""

    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the run: checkpoint, metrics, curves, head/.")]
    target: Target = None
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache",
            help="Train on the rows and features in a folder of `draftwing data cache` (--data is what that was made "
            "of) or of `draftwing data regenerate --features` (which needs no --data).",
        ),
    ] = None
    regenerated: Annotated[
        int,
        typer.Option(
            "--regenerate",
            min=0,
            help="First let the target answer so many prompts of the data greedily (256 tokens each, into "
            "OUT/regenerated.jsonl), and train on these answers instead of the data.",
        ),
    ] = 0
    initial: Annotated[
        Path | None,
        typer.Option(
            "--init-from", help="Start from this head, in any layout, or draft model, instead of from nothing."
        ),
    ] = None
    licence: Annotated[str | None, typer.Option("--licence", help="Of the head, for its card: Apache-2.0, say.")] = None
    forecast_prompts: Annotated[
        int,
        typer.Option(
            "--forecast-prompts",
            min=0,
            help="Held-out prompts on which statistics for `draftwing predict` are collected at the end; 0 for none.",
        ),
    ] = 16
    dtype: Annotated[str, typer.Option("--dtype", help="Of the target.")] = "bfloat16"
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda. [default: cuda if there is one]")] = None


@with_options
def train(
    training: Training,
    method: Annotated[str, typer.Argument(help=f"{or_of(training_methods())}.")],
    data: Data,
    run: Run,
    as_json: Json = False,
) -> None:
    """Train a draft head for a target, or resume a stopped run.

    `OUT/head` is the head, ready for `--draft`; Ctrl-C writes a checkpoint first, and the same command goes on from it.
    More GPUs: `accelerate launch -m draftwing.cli.main train ...`.

    Examples:

    - `draftwing train eagle3 --data dialogues.jsonl --out my-head --minutes 15`

    - `draftwing train eagle3 -t path/or/hub-id --data chats.jsonl --draft-vocab-size 32000 --iterations 20000 -o head`

    - `draftwing train hass --data texts/ --unroll-steps 3 --optimizer muon --minutes 60 -o head`

    - `draftwing train eagle3 --cache features --minutes 60 -o head`

    - `draftwing train causal-lm --data chats.jsonl --init-from small-model --objective rkl --minutes 60 -o draft`
    """
    session = _prepared(training, method, data, run)
    main = session.trainer.accelerator.is_main_process
    if main:
        screen.line(session.describe(), "dim")
    done = _trained(session, run.out if main else None)
    if not main:
        return
    stopped = done.iteration < done.iterations
    if not stopped and run.forecast_prompts:
        _collect(session, run.forecast_prompts)
    _tell(session, run, done, finished=not stopped, as_json=as_json)
    if stopped:
        screen.line(f"stopped at iteration {done.iteration}: run the same command again to go on", "yellow")
        raise typer.Exit(130)


def _prepared(training: Training, method: str, data: Data, run: Run) -> Session:
    """Everything that the run needs, the data answered anew where that is wanted."""
    from draftwing.train.options import TrainOptions
    from draftwing.train.session import RunFiles, prepare

    said = {**dataclasses.asdict(training), "taps": taps_of(training.taps)}
    options = TrainOptions(method=method, **said)
    if run.regenerated and run.cache is not None:
        raise ConfigError(
            "--regenerate makes data that the --cache does not have: run `draftwing data regenerate`, then `draftwing "
            "data cache` on what it wrote"
        )
    sources: Sequence[str | Path] = [_regenerated(data, run)] if run.regenerated else data.sources
    with shown.progress("reading the data") as on_data:
        files = RunFiles(run.target, sources, data.exclude, run.cache, run.initial, run.licence)
        return prepare(files, options, run.out, dtype=run.dtype, device=run.device, on_data=on_data)


def _regenerated(data: Data, run: Run) -> Path:
    """Have the target answer prompts spread over the data. Prompt lookup saves time, and changes no text."""
    from draftwing.loading import load
    from draftwing.sampling import Sampling
    from draftwing.train.answer_local import LMAnswerer
    from draftwing.train.answers import read_tasks, regenerate

    out = run.out / "regenerated.jsonl"
    lm = load(run.target, "lookup", device=run.device)
    tasks = read_tasks(
        data.sources, prompt_tokens=128, per_document=8, tokenizer=lm.tokenizer, exclude=data.exclude, output=out
    )
    chosen = sorted(tasks, key=lambda task: task.id)[: run.regenerated]  # ids are hashes: any of them
    with shown.progress("answering") as on_progress:
        regenerate(chosen, LMAnswerer(lm, Sampling(max_tokens=256), max_batch=32), out, on_progress=on_progress)
    return out


def _trained(session: Session, out: Path | None) -> Progress:
    """Run to the end, or to a signal; ``out`` gets TensorBoard's events."""
    from draftwing.train.curves import TensorBoardLog

    trainer = session.trainer
    board = None if out is None else TensorBoardLog(out)
    try:
        with shown.training() as show, _stops(trainer):
            trainer.on_progress = show if board is None else _both(show, board)
            return session.run()
    finally:
        if board is not None:
            board.close()


def _collect(session: Session, num_prompts: int) -> None:
    """The head's held-out statistics. The head is whole: Ctrl-C leaves them out, and nothing else."""
    try:
        with shown.progress("collecting statistics for draftwing predict") as on_progress:
            session.collect_held_out(num_prompts, on_progress)
    except KeyboardInterrupt:
        screen.line("no statistics were collected: `draftwing predict --collect` makes them later", "yellow")
    except DraftwingError as error:
        screen.line(f"no statistics were collected for `draftwing predict`: {error}", "yellow")


def _tell(session: Session, run: Run, done: Progress, *, finished: bool, as_json: bool) -> None:
    from draftwing.train.curves import draw_curves

    head, curves = run.out / "head", draw_curves(run.out)
    if as_json:
        result = {"head": str(head), "curves": str(curves), "iterations": done.iteration, "finished": finished}
        screen.print_json({**result, **session.final_metrics()})
        return
    screen.line(f"wrote {head}, {curves}")
    name = f" --target {run.target}" if run.target else ""
    screen.line(f"try it: draftwing compare{name} --draft {head}")


def _both(first: Callable[[Any], None], second: Callable[[Any], None]) -> Callable[[Any], None]:
    def call(progress: Any) -> None:
        first(progress)
        second(progress)

    return call


@contextmanager
def _stops(trainer: Trainer) -> Iterator[None]:
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
