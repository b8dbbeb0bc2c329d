"""The commands around draft heads: ``draftwing train | data | convert | doctor | export``."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from draftwing.cli import screen, screen_heads
from draftwing.cli.options import Json, Model, NumPrompts, Prompts, sampling_option, with_options
from draftwing.errors import ConfigError

__all__ = ["data_app", "register"]

Sources = Annotated[
    list[str],
    typer.Option(
        "--data",
        help="JSONL of dialogues (conversations, messages, prompt and response) or texts, plain text files, or folders "
        "of them; repeatable.",
    ),
]
Exclude = Annotated[
    Path | None, typer.Option("--exclude", help="File of names (globs, or prefix/) to leave out of folders.")
]
Target = Annotated[
    str | None, typer.Option("--target", "-t", help="Folder or hub id. [default: the model that comes with Draftwing]")
]

data_app = typer.Typer(no_args_is_help=True, help="Prepare training data: `regenerate`, `cache`.")


def _panel(panel: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


@dataclasses.dataclass(frozen=True)
class Training:
    """How a head is trained, as options: see ``train.options.TrainOptions``."""

    minutes: Annotated[float | None, _panel("Length", "Train for so long.")] = None
    iterations: Annotated[int | None, _panel("Length", "Or for so many updates.")] = None
    max_length: Annotated[int, _panel("Length", "Tokens of a window or dialogue.")] = 512
    tokens_per_batch: Annotated[int, _panel("Length", "Tokens of a batch.")] = 2048
    accumulation: Annotated[int, _panel("Length", "Batches of one update.")] = 1
    data_share: Annotated[float, _panel("Length", "Train on this share of the data alone.")] = 1.0
    objective: Annotated[str | None, _panel("Net", "eagle1, hass, eagle3 or tv, instead of the method's own.")] = None
    unroll_steps: Annotated[int | None, _panel("Net", "Of training-time test. [default: 1, hass 3, eagle3 5]")] = None
    later_share: Annotated[
        float, _panel("Net", "Share of the entries that go on after the first unrolled step; less is faster.")
    ] = 1.0
    draft_vocab_size: Annotated[int | None, _panel("Net", "EAGLE-3's draft vocabulary. [default: the whole]")] = None
    inputs: Annotated[str, _panel("Net", "token, feature, feature-unshifted or feature-shifted.")] = "feature-shifted"
    fc_norm: Annotated[bool, _panel("Net", "EAGLE-3.1: a norm for each tap.", "--fc-norm")] = False
    norm_output: Annotated[bool, _panel("Net", "EAGLE-3.1: feed back the normed state.", "--norm-output")] = False
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


@with_options
def train(
    training: Training,
    method: Annotated[str, typer.Argument(help="eagle1, eagle3 or hass.")],
    data: Sources,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the run: checkpoint, metrics, curves, head/.")],
    target: Target = None,
    exclude: Exclude = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache",
            help="Read the target's features from a folder of `draftwing data cache`; --data is what that was made of.",
        ),
    ] = None,
    regenerated: Annotated[
        int,
        typer.Option(
            "--regenerate",
            min=0,
            help="First let the target answer so many prompts of the data greedily (256 tokens each, into "
            "OUT/regenerated.jsonl), and train on these answers instead of the data.",
        ),
    ] = 0,
    initial: Annotated[
        Path | None, typer.Option("--init-from", help="Start from this head, in any layout, instead of from nothing.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Of the target.")] = "bfloat16",
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda. [default: cuda if there is one]")] = None,
    as_json: Json = False,
) -> None:
    """Train a draft head for a target, or go on with a run that was stopped.

    `OUT/head` is the head, ready for `--draft`; Ctrl-C writes a checkpoint first, and the same command goes on from it.
    More GPUs: `accelerate launch -m draftwing.cli.main train ...`.

    Examples:

    - `draftwing train eagle3 --data dialogues.jsonl --out my-head --minutes 15`

    - `draftwing train eagle3 -t path/or/hub-id --data chats.jsonl --draft-vocab-size 32000 --iterations 20000 -o head`

    - `draftwing train hass --data texts/ --unroll-steps 3 --optimizer muon --minutes 60 -o head`
    """
    from draftwing.train.curves import TensorBoardLog, draw_curves
    from draftwing.train.options import TrainOptions
    from draftwing.train.session import RunFiles, prepare

    given = dataclasses.asdict(training)
    options = TrainOptions(method=method, **given)
    if regenerated and cache is not None:
        raise ConfigError(
            "--regenerate makes data that the --cache does not have: run `draftwing data regenerate`, then `draftwing "
            "data cache` on what it wrote"
        )
    if regenerated:
        data = [str(_regenerated(target, device, data, exclude, out / "regenerated.jsonl", regenerated))]
    with screen.progress("reading the data") as on_data:
        files = RunFiles(target, data, exclude, cache, initial)
        session = prepare(files, options, out, dtype=dtype, device=device, on_data=on_data)
    trainer = session.trainer
    main = trainer.accelerator.is_main_process
    if main:
        screen_heads.line(session.describe(), "dim")
    board = TensorBoardLog(out) if main else None
    try:
        with screen_heads.training() as show, _stops(trainer):
            trainer.on_progress = show if board is None else _both(show, board)
            done = session.run()
    finally:
        if board is not None:
            board.close()
    if not main:
        return
    curves = draw_curves(out)
    stopped = done.iteration < done.iterations
    result = {"head": str(out / "head"), "curves": str(curves), "iterations": done.iteration, "finished": not stopped}
    result |= session.final_metrics()
    if as_json:
        screen.print_json(result)
    else:
        screen_heads.line(f"wrote {out / 'head'}, {curves}")
        name = f" --target {target}" if target else ""
        screen_heads.line(f"try it: draftwing compare{name} --draft {out / 'head'}")
    if stopped:
        screen_heads.line(f"stopped at iteration {done.iteration}: run the same command again to go on", "yellow")
        raise typer.Exit(130)


def _regenerated(
    target: str | None, device: str | None, data: list[str], exclude: Path | None, out: Path, num: int
) -> Path:
    """Have the target answer prompts spread over the data. Prompt lookup saves time, and changes no text."""
    from draftwing.api import load
    from draftwing.sampling import Sampling
    from draftwing.train.answers.regenerate import LMAnswerer, read_tasks
    from draftwing.train.answers.regenerate import regenerate as run

    lm = load(target, "lookup", device=device)
    tasks = read_tasks(data, prompt_tokens=128, per_document=8, tokenizer=lm.tokenizer, exclude=exclude, output=out)
    chosen = sorted(tasks, key=lambda task: task.id)[:num]  # ids are hashes: any of them
    with screen.progress("answering") as on_progress:
        run(chosen, LMAnswerer(lm, Sampling(max_tokens=256), max_batch=32), out, on_progress=on_progress)
    return out


def _both(first: Callable[[Any], None], second: Callable[[Any], None]) -> Callable[[Any], None]:
    def call(progress: Any) -> None:
        first(progress)
        second(progress)

    return call


@contextmanager
def _stops(trainer: Any) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run after the present iteration, with a checkpoint; a second one ends it at once."""

    def stop(number: int, frame: object) -> None:
        if trainer.stopping:
            raise KeyboardInterrupt
        trainer.stopping = True
        screen_heads.line("stopping after this iteration (again to stop at once) ...", "yellow")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- data ------------------------------------------------------------------------------------------------------------


@data_app.command("regenerate")
@with_options
def regenerate(
    model: Model,
    data: Sources,
    out: Annotated[Path, typer.Option("--out", "-o", help="JSONL file, appended to: run again to go on.")],
    draft: Annotated[str | None, typer.Option("--draft", "-d", help="As in generate; it only saves time.")] = None,
    server: Annotated[
        str | None, typer.Option("--server", help="Ask an OpenAI-compatible server at this URL instead.")
    ] = None,
    served_model: Annotated[
        str | None, typer.Option("--served-model", help="The target's name on that server.")
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="Of the server.")] = None,
    num_parallel: Annotated[int, typer.Option("--num-parallel", min=1, help="Requests to it at once.")] = 16,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Prompts decoded at once here.")] = 16,
    max_tokens: Annotated[int, sampling_option("Of each answer.", "--max-tokens", "-n")] = 512,
    temperature: Annotated[float, sampling_option("0 is greedy.", "--temperature", "-T")] = 0.0,
    top_p: Annotated[float, sampling_option("Draw from the fewest tokens of this probability.", "--top-p")] = 1.0,
    seed: Annotated[int, sampling_option("Each prompt gets one of its own made of it.", "--seed")] = 0,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Of a document, as its prompt.")] = 64,
    per_document: Annotated[int, typer.Option("--per-document", help="Prompts cut from a document at most.")] = 1,
    limit: Annotated[int | None, typer.Option("--limit", help="The first so many prompts alone.")] = None,
    exclude: Exclude = None,
    as_json: Json = False,
) -> None:
    """Answer the data's prompts with the target itself: a head learns to guess what its own target says.

    Examples:

    - `draftwing data regenerate --data dialogues.jsonl -o answered.jsonl -T 0.7`

    - `draftwing data regenerate --data chats.jsonl -o out.jsonl --server http://localhost:8000 --served-model my-model`
    """
    from draftwing.api import load
    from draftwing.sampling import Sampling
    from draftwing.text.tokenizer import Tokenizer
    from draftwing.train.answers.regenerate import Answerer, LMAnswerer, read_tasks
    from draftwing.train.answers.regenerate import regenerate as run
    from draftwing.train.answers.server import ServerAnswerer

    sampling = Sampling(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    tokenizer: Tokenizer | None = None
    answerer: Answerer
    if server is not None:
        if served_model is None:
            raise ConfigError("--server needs --served-model: the name under which the server knows the target")
        answerer = ServerAnswerer(server, served_model, sampling, num_parallel=num_parallel, api_key=api_key)
    else:
        lm = load(**vars(model), draft=draft)
        tokenizer = lm.tokenizer
        answerer = LMAnswerer(lm, sampling, max_batch=max_batch)
    tasks = read_tasks(
        data,
        prompt_tokens=prompt_tokens,
        per_document=per_document,
        tokenizer=tokenizer,
        exclude=exclude,
        output=out,
        limit=limit,
    )
    with screen.progress("answering") as on_progress:
        done = run(tasks, answerer, out, on_progress=on_progress)
    if as_json:
        screen.print_json({"out": str(out), **dataclasses.asdict(done)})
        return
    screen_heads.line(
        f"wrote {done.num_written} records ({done.num_tokens} tokens) to {out}; {done.num_kept} were there"
    )
    if done.skipped:
        where, why = done.skipped[0]
        screen_heads.line(f"{len(done.skipped)} could not be answered, the first {where}: {why}", "yellow")


@data_app.command("cache")
@with_options
def cache(
    data: Sources,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the cache: run again to go on.")],
    target: Target = None,
    method: Annotated[
        str, typer.Option("--method", help="eagle1, eagle3 or hass: what eagle3 reads serves the others too.")
    ] = "eagle3",
    taps: Annotated[
        str | None, typer.Option("--taps", help="Other hidden states than the method's, such as 2,16,29.")
    ] = None,
    max_length: Annotated[int, typer.Option("--max-length", help="Tokens of a window or dialogue.")] = 512,
    tokens_per_batch: Annotated[int, typer.Option("--tokens-per-batch", help="Tokens run at once.")] = 2048,
    validation_share: Annotated[
        float, typer.Option("--validation-share", help="Share of the data held out: as `train` will have it.")
    ] = 0.02,
    seed: Annotated[int, typer.Option("--seed", help="Of what is held out, and where documents are cut.")] = 0,
    exclude: Exclude = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Of the target.")] = "bfloat16",
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda. [default: cuda if there is one]")] = None,
    as_json: Json = False,
) -> None:
    """Write the target's hidden states to disk, for `draftwing train --cache`: many runs, one pass of the target.

    It says first how much it will write: about 2 bytes for each token, hidden state and channel.

    Examples:

    - `draftwing data cache --data dialogues.jsonl -o features`

    - `draftwing train eagle3 --data dialogues.jsonl --cache features --minutes 15 -o my-head`
    """
    from draftwing.api import load_target
    from draftwing.heads.identity import target_id
    from draftwing.model.weights import resolve
    from draftwing.nets.eagle_config import default_taps
    from draftwing.shipped import SHIPPED
    from draftwing.text.tokenizer import Tokenizer
    from draftwing.train.data.batches import Batches
    from draftwing.train.data.files import read_examples, split
    from draftwing.train.features.cache_writer import estimate, write_cache
    from draftwing.train.options import METHODS

    if method not in METHODS:
        raise ConfigError(f"--method must be one of {', '.join(METHODS)}, found {method!r}")
    chosen = _taps(taps)
    folder = resolve(target) if target is not None else SHIPPED / "target"
    tokenizer = Tokenizer(folder)
    with screen.progress("reading the data") as on_data:
        corpus = read_examples(data, tokenizer, max_length=max_length, exclude=exclude, on_progress=on_data)
    training, _ = split(corpus, validation_share, seed)
    batches = Batches(training, tokens_per_batch, max_length, seed)
    name = str(target or "draftwing/target")
    model = load_target(folder, dtype=dtype, device=device, name=name, prepack=False)
    if chosen is None:
        chosen = default_taps(model.num_layers) if METHODS[method].version == 3 else ()
    screen_heads.line(f"the cache will have {estimate(model, batches, chosen)}")
    identity = target_id(model, tokenizer)
    with screen.progress("running the target") as on_progress:
        done = write_cache(
            out, model, batches, chosen, identity=identity, validation_share=validation_share, on_progress=on_progress
        )
    if as_json:
        screen.print_json({"out": str(out), **dataclasses.asdict(done)})
        return
    screen_heads.line(f"wrote {done.num_shards - done.num_kept} shards to {out}; {done.num_kept} were there")
    settings = f"--max-length {max_length} --validation-share {validation_share}"
    screen_heads.line(f"train on it: draftwing train {method} ... --cache {out} {settings}", "dim")


# --- formats ---------------------------------------------------------------------------------------------------------

Head = Annotated[Path, typer.Argument(help="Folder of a head, in any layout.")]


def convert(
    head: Head,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    to: Annotated[str, typer.Option("--to", help="draftwing, eagle, speculators, vllm or sglang.")] = "draftwing",
    target: Annotated[str | None, typer.Option("--target", "-t", help="The head's target, if it does not say.")] = None,
    taps: Annotated[
        str | None, typer.Option("--taps", help="The hidden states that it reads, such as 2,16,29, if it does not say.")
    ] = None,
    depth: Annotated[int, typer.Option("--depth", min=1, help="Draft tokens that speculators' config proposes.")] = 5,
) -> None:
    """Write a head in another layout. No number changes; what a layout cannot say is an error.

    Examples:

    - `draftwing convert my-head/head --to speculators -o my-head-speculators`

    - `draftwing convert downloaded-eagle3 -o head --target path/or/hub-id`
    """
    from draftwing.heads.convert import convert as run

    run(head, out, to, target=_target_id(target), taps=_taps(taps), depth=depth)
    screen_heads.line(f"wrote {out} in the layout {to!r}")


def export(
    head: Head,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    to: Annotated[str, typer.Option("--to", help="vllm or sglang.")] = "vllm",
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="Folder or hub id that the engine shall serve.")
    ] = None,
    depth: Annotated[int, typer.Option("--depth", min=1, help="Draft tokens in a row.")] = 3,
) -> None:
    """Write a head as an engine takes it, and print the command that serves it.

    Examples:

    - `draftwing export my-head/head --to vllm --target path/or/hub-id -o my-head-vllm`
    """
    from draftwing.heads.convert import SERVED_BY, serve_command
    from draftwing.heads.convert import convert as run
    from draftwing.shipped import SHIPPED

    if to not in SERVED_BY:
        raise ConfigError(f"no engine serves the layout {to!r}: choose vllm or sglang (or use convert)")
    run(head, out, to, target=_target_id(target))
    print(serve_command(to, target or str(SHIPPED / "target"), out, depth))


@with_options
def doctor(
    model: Model,
    head: Head,
    prompts: Prompts = None,
    num_prompts: NumPrompts = 4,
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="Decode a few prompts with it.")] = True,
    as_json: Json = False,
) -> None:
    """Look at a head for a target: every trap that fails silently elsewhere, and whether the target accepts its drafts.

    Exits with 1 where a check fails.

    Examples:

    - `draftwing doctor my-head/head`

    - `draftwing doctor downloaded-eagle3 --target path/or/hub-id --prompts prompts.jsonl`
    """
    from draftwing.api import load
    from draftwing.evaluate.fit import measure_fit
    from draftwing.heads.doctor.examine import diagnose
    from draftwing.model.weights import resolve
    from draftwing.shipped import SHIPPED
    from draftwing.text.prompts import read_prompts, shipped_prompts

    findings = diagnose(head, resolve(model.target) if model.target else SHIPPED / "target")
    failed = any(each.status == "fail" for each in findings)
    fit = None
    if measure and not failed:
        lm = load(**vars(model), draft=head)
        fit = measure_fit(lm, read_prompts(prompts, num_prompts) if prompts else shipped_prompts(num_prompts))
        failed = fit.verdict == "does not fit"
    if as_json:
        found = [dataclasses.asdict(each) for each in findings]
        screen.print_json({"findings": found, "fit": None if fit is None else dataclasses.asdict(fit)})
    else:
        screen_heads.print_findings(findings, fit)
    if failed:
        raise typer.Exit(1)


def _target_id(target: str | None) -> Any:
    from draftwing.heads.identity import target_id_of_folder
    from draftwing.model.weights import resolve

    return None if target is None else target_id_of_folder(resolve(target), target)


def _taps(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--taps must be numbers such as 2,16,29, found {text!r}") from None


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    for command in (train, convert, export, doctor):
        app.command()(command)
    app.add_typer(data_app, name="data")
