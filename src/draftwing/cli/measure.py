"""``draftwing compare | verify | predict | tune layers``: speed and exactness of drafts on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.panel import Panel
from rich.text import Text

from draftwing.cli import screen
from draftwing.cli.generate import token_namer
from draftwing.cli.options import (
    DRAFT,
    JSON,
    PROMPTS,
    Compared,
    Drafting,
    Examples,
    Model,
    SamplingOptions,
    best_head,
    option,
    with_options,
)
from draftwing.cli.progress import progress
from draftwing.cli.screen import format_alpha, format_pairs, new_console, print_line, print_table, printable
from draftwing.errors import CheckpointError, ConfigError
from draftwing.methods.registry import METHODS
from draftwing.models.catalogue import entry_of

if TYPE_CHECKING:
    from draftwing.lab.compare import Comparison, MethodResult, Verification
    from draftwing.lab.forecast import HeldOut
    from draftwing.lm import LM
    from draftwing.text.prompts import Prompt

_DISTRIBUTION_ONLY = "at a temperature above 0 this rule keeps the distribution of the text, not the text itself"


_COMPARED = {
    100: "drafter: {name} | >tokens/s: {tokens_per_s:.1f} | >speedup: {speedup:.2f}x | >tau: {tau:.2f} | "
    ">efficiency: {efficiency:.2f} | alpha by depth: {alpha}",
    0: "drafter: {name} | >tokens/s: {tokens_per_s:.1f} | >speedup: {speedup:.2f}x | >tau: {tau:.2f}",
}
_VERIFIED = (
    "prompt: {prompt} | position: {position} | baseline token: {plain_token} | drafted token: {token} | "
    "margin: {margin:.2e} | noise: {noise:.2e} | verdict: {verdict}"
)
_FORECAST = (
    "T: {temperature:g} | tree: {tree} | >tau: {tau:.2f} | >95%: {tau_low:.2f}-{tau_high:.2f} | >nodes: {nodes} | "
    ">speedup: {speedup:.2f}x"
)


@with_options
def compare(
    compared: Compared,
    model: Model,
    drafting: Drafting,
    sampling: SamplingOptions,
    examples: Examples,
    rounds: int = option(1, "Decode every prompt N times.", min=1),
    texts: bool = option(False, "Show what each draft wrote after the first prompt."),
    as_json: bool = JSON,
) -> None:
    """Measure drafts against baseline decoding on the same prompts.

    Exits with 1 if a text differs from baseline decoding's under a rule that promises it.

    Examples:

    - `draftwing compare`
    - `draftwing compare --all`
    - `draftwing compare -t path/or/hub-id -d path/or/smaller -d lookup --prompts prompts.jsonl -T 0.8`
    """
    from draftwing.lab.compare import compare as run

    checked = sampling.to_sampling()
    prompts = examples.read(model.target)
    lms = model.load_many(compared, drafting)
    with progress("comparing") as on_progress:
        comparison = run(lms, sampling.encode_all(prompts, lms[0]), checked, rounds=rounds, on_progress=on_progress)
    if as_json:
        screen.print_json(comparison.to_dict())
    else:
        _print_comparison(comparison, texts=texts)
    if not comparison.all_identical:
        raise typer.Exit(1)
    if not comparison.is_complete:
        settings = comparison.settings
        screen.line(f"stopped: {settings['rounds']} rounds of {settings['num_prompts']} prompts are finished", "yellow")
        raise typer.Exit(130)


def _print_comparison(comparison: Comparison, *, texts: bool) -> None:
    is_sampled = any(method.promise == "distribution" for method in comparison.methods)
    records = [
        {**asdict(method), "alpha": format_alpha(method.alpha), "identical": _identical(method)}
        for method in comparison.methods
    ]
    records[0] |= {"name": "none (baseline decoding)", "identical": "baseline"}
    for method in comparison.methods if texts else ():
        name = "baseline decoding" if method is comparison.methods[0] else printable(method.name)
        title = f"{name}: {method.tokens_per_s:.0f} tokens/s"
        text = Text(printable(comparison.texts[method.name].strip("\n")))
        new_console().print(Panel(text, title=Text(title), title_align="left", expand=False))
    print_table(
        records, f"{screen.layout_for_width(_COMPARED)} | {'text' if is_sampled else 'text identical'}: {{identical}}"
    )
    settings = dict(comparison.settings)
    rules, budgets = settings.pop("rules"), settings.pop("budgets")
    print_line(f"baseline: {comparison.baseline}")
    print_line(f"settings: {format_pairs(settings)}")
    for name in rules:
        print_line(f"{name}: rule {rules[name]}, tree {budgets[name]}")
    print_line(f"machine: {format_pairs(comparison.machine)}")
    if is_sampled:
        print_line(f"text: {_DISTRIBUTION_ONLY}; texts differ from baseline decoding's as those of two seeds do")


def _identical(method: MethodResult) -> Text:
    same = method.num_identical == method.num_prompts
    if method.promise == "distribution":
        return Text(f"same distribution, {'same' if same else 'other'} text", style="green")
    text = f"{'yes' if same else 'no'} ({method.num_identical} of {method.num_prompts})"
    return Text(text if method.lossless else f"{text}, LOSSY rule", style="green" if same else "red")


@with_options
def verify(
    model: Model,
    drafting: Drafting,
    sampling: SamplingOptions,
    examples: Examples,
    draft: str | None = DRAFT,
    allow_ties: bool = option(False, "Accept differences within the rounding noise of the logits."),
    as_json: bool = JSON,
) -> None:
    """Check that drafted text equals baseline decoding's, token by token; exit with 1 if it does not.

    Each difference is shown with baseline decoding's margin and with how far rounding alone moves a logit there.

    Examples:

    - `draftwing verify`
    - `draftwing verify -t path/or/hub-id -d path/or/smaller --prompts prompts.jsonl -T 0.8 --allow-ties`
    """
    from draftwing.accept import get_rule
    from draftwing.lab.compare import verify as run

    checked = sampling.to_sampling()
    if drafting.rule != "match" and checked.temperature > 0 and get_rule(drafting.rule, lossless=False).lossless:
        raise ConfigError(
            f"rule {drafting.rule!r}: {_DISTRIBUTION_ONLY}: verify it with --temperature 0, or use --rule match"
        )
    prompts = examples.read(model.target)
    lm = model.load(draft, drafting)
    if not lm.drafter.drafts:
        raise ConfigError("verify compares drafted text with the baseline's, and nothing drafts here: choose a --draft")
    with progress("verifying") as on_progress:
        verification = run(lm, sampling.encode_all(prompts, lm), checked, on_progress=on_progress)
    if as_json:
        screen.print_json(asdict(verification))
    else:
        _print_verification(verification, lm)
    if any(not (allow_ties and difference.is_tie) for difference in verification.differences):
        raise typer.Exit(1)


def _print_verification(verification: Verification, lm: LM) -> None:
    settings = dict(verification.settings)
    sampling = format_pairs(settings.pop("sampling", {})) or "greedy"
    print_line(
        f"{verification.num_identical} of {verification.num_prompts} texts identical to baseline decoding's "
        f"({verification.num_tokens} tokens compared)",
        "red" if verification.differences else "green",
    )
    print_line(f"settings: {format_pairs(settings)}, sampling: {sampling}")
    if not verification.differences:
        return
    name_of = token_namer(lm)
    records = []
    for difference in verification.differences:
        verdict = ("a tie within the rounding noise", "yellow") if difference.is_tie else ("DIFFERENT", "red")
        record = {**asdict(difference), "prompt": difference.prompt_index + 1, "verdict": Text(*verdict)}
        for name in ("plain_token", "token"):
            record[name] = f"{name_of(record[name])} ({record[name]})" if record[name] >= 0 else "the end"
        records.append(record)
    print_table(records, _VERIFIED)


TREES = "chain:3 chain:5 static dynamic:24,6,4 dynamic:59,8,10"


@with_options
def predict(
    model: Model,
    draft: str | None = DRAFT,
    tree: list[str] | None = option(
        None, f"Shape of drafts (see `draftwing compare --help`); repeatable. [default: {TREES}]"
    ),
    temperature: list[float] | None = option(
        None, "Temperature, of those that the statistics cover; repeatable. [default: all]", "-T"
    ),
    collect: bool = option(
        False,
        "First collect the head's statistics on the prompts and store them with the head, or in the cache folder for "
        "a head that ships with Draftwing.",
    ),
    prompts: str | None = PROMPTS,
    num_prompts: int = option(40, "Collect on only the first N prompts.", min=1),
    tau_only: bool = option(False, "Load no model and measure no costs: predict tau alone.", expert=True),
    as_json: bool = JSON,
) -> None:
    """Predict tau and speedup of a head for any tree, from its held-out statistics and this machine's costs.

    Training stores the statistics in the head's folder; --collect makes them for any other head. `draftwing bench` and
    `draftwing compare` measure instead.

    Examples:

    - `draftwing predict`
    - `draftwing predict --tree chain:5 --tree dynamic:59,8,10 -T 0`
    - `draftwing predict -t path/or/hub-id -d path/or/head --collect --prompts held-out.jsonl`
    """
    from draftwing.lab.forecast import HeldOut, forecast
    from draftwing.lab.machine import describe_machine

    if collect and tau_only:
        raise ConfigError("--collect and --tau-only exclude each other: leave one of them out")
    if collect and prompts is None and model.target is not None:
        raise ConfigError(
            "--collect needs held-out prompts of the kind that the head is for: give some 40 with --prompts"
        )
    budgets = {}
    for name in tree or TREES.split():
        if (budget := Drafting(tree=name).budget()) is None:
            raise ConfigError(
                "auto changes its trees from step to step: name others, or measure with draftwing compare"
            )
        budgets[name] = budget
    folder = head_folder(model.target, draft)
    costs = machine = None
    if tau_only:
        held_out = HeldOut.read(folder)
    else:
        examples = Examples(prompts, num_prompts).read(model.target) if collect else ()
        lm = model.load(str(folder))
        held_out = _collect(lm, folder, examples, temperature or (0.0, 1.0)) if collect else HeldOut.read(folder)
        with progress("measuring this machine's costs"):
            costs, machine = lm.costs(), describe_machine()
    forecasts = list(map(asdict, forecast(held_out, budgets, temperature or sorted(held_out.texts), costs)))
    statistics = held_out.describe()
    if as_json:
        screen.print_json({"forecasts": forecasts, "statistics": statistics, "machine": machine})
        return
    print_table(forecasts, _FORECAST)
    texts = ", ".join(f"{count} texts at T={name}" for name, count in statistics["texts"].items())
    print_line(
        f"from held-out statistics: {texts}, target {statistics['target']}, drafts by "
        f"{statistics['runs_as'] or 'PyTorch'}"
    )
    if machine is not None:
        print_line(f"speedup over baseline decoding at batch 1; machine: {format_pairs(machine)}")


def head_folder(target: str | None, draft: str | None) -> Path:
    """Return a head's folder without loading the target. Raises ConfigError if the draft has no statistics."""
    from draftwing.models.resolve import resolve

    entry = entry_of(target)
    draft = draft or best_head(target)
    method = METHODS.get(str(draft))
    if entry is not None and draft is not None and draft in entry.heads:
        return entry.head(draft)
    if draft is not None and (method is None or method.needs == "folder"):
        return resolve(draft)
    raise ConfigError(
        f"a forecast needs a head's held-out statistics, and {draft or 'lookup'} has none: give a head with --draft, "
        f"or measure with `draftwing compare`"
    )


def _collect(lm: LM, folder: Path, prompts: Sequence[Prompt], temperatures: Sequence[float]) -> HeldOut:
    """Collect statistics, join them with those that the head has, and write them to its folder."""
    from draftwing.formats.identity import head_id
    from draftwing.lab.forecast import HeldOut, collect

    ids = SamplingOptions().encode_all(prompts, lm)
    with progress("collecting") as on_progress:
        held_out = collect(lm.target, lm.new_drafter, head_id(folder), ids, temperatures, on_progress=on_progress)
    with suppress(CheckpointError):  # there are none yet, or they belong to other weights
        held_out = held_out.joined(HeldOut.read(folder))
    screen.line(f"wrote {held_out.write(folder)}")
    return held_out


tune_app = typer.Typer(no_args_is_help=True, help="Tune a draft by measuring on this machine: `layers`.")


@tune_app.command()
@with_options
def layers(
    model: Model,
    out: Path = option(..., "Folder for the layers, which --draft then takes.", "-o"),
    data: str | None = option(None, "Held-out prompts: a text or .jsonl file. [default: prompts that ship]"),
    num_prompts: int = option(8, "Use only the first N prompts.", min=1),
    max_tokens: int = option(64, "Number of tokens that the target writes after each prompt.", "-n", min=8),
    trials: int = option(200, "Number of sets to try.", min=1),
    exits: bool = option(False, "Only try early exits: the first layer, the first two, and so on."),
    seed: int = option(0, "Seed of the search.", min=0),
    as_json: bool = JSON,
) -> None:
    """Find the layers that a target can skip while it drafts for itself (Draft & Verify, 2309.08168).

    A local search chooses the attentions and MLPs to skip, from texts of the target and times on this machine. Ctrl-C
    keeps the best set so far, and the same command continues from it.

    Examples:

    - `draftwing tune layers --target path/or/hub-id --data held-out.jsonl --out my-layers`
    - `draftwing tune layers --exits --out first-layers`, then `draftwing compare --draft first-layers`
    """
    from draftwing.formats.identity import target_id_of_folder
    from draftwing.lab.tune import DEPTH, Recorded, Trial, measure_pace, tune
    from draftwing.loading import find_model, load_target
    from draftwing.models.subnet import lean_target

    prompts = Examples(data, num_prompts).read(model.target)
    (folder, lora), best = find_model(model.target, lora=model.lora), ""
    lm, texts = model.load("none"), []
    plain = load_target(folder, dtype=model.dtype, lora=lora, device=model.device, engine=model.engine, prepack=False)
    with progress("writing texts") as show:
        for number, ids in enumerate(SamplingOptions().encode_all(prompts, lm), 1):
            texts.append((ids, lm.generate([ids], temperature=0.0, max_tokens=max_tokens)[0].token_ids))
            show(number, len(prompts))
    with progress("measuring this machine's costs"):
        pace = measure_pace(lean_target(lm.target, "draft 'layers'"))
    recorded = Recorded(lean_target(plain, "draft 'layers'"), texts, DEPTH)
    with progress("trying sets of layers", lambda: best) as show:

        def on_progress(done: int, total: int, trial: Trial | None) -> None:
            nonlocal best
            best = "" if trial is None else f"best {trial.tokens_per_s:,.1f} tokens/s expected, {trial.parts}"
            show(done, total)

        found, finished = tune(
            out,
            target_id_of_folder(folder, model.name),
            lambda parts: pace.trial(parts, recorded.accepted(parts)),
            num_trials=trials,
            seed=seed,
            only_exits=exits,
            on_progress=on_progress,
        )
    speedup, parts = found.tokens_per_s / pace.plain, found.parts
    skipped = {"skip_attention": parts.skipped_attention, "skip_mlp": parts.skipped_mlp}
    if as_json:
        figures = {"accepted": found.accepted, "tokens_per_s": found.tokens_per_s, "depth": found.depth}
        screen.print_json({"out": str(out), "finished": finished, **skipped, **figures, "speedup": speedup})
    else:
        screen.line(
            f"{parts}: {found.tokens_per_s:,.1f} tokens/s expected with chains of {found.depth}, {speedup:.2f}x of "
            f"baseline decoding",
            "" if speedup > 1 else "yellow",
        )
        for name, numbers in skipped.items():
            screen.line(f"{name.replace('_', ' ')}: {', '.join(map(str, numbers)) or 'none'}", "dim")
        screen.line(f"wrote {out}: measure it with draftwing compare --draft {out}")
    if not finished:
        screen.line("stopped: run the same command again to continue", "yellow")
        raise typer.Exit(130)
