"""``draftwing bench``: every draft against baseline decoding on standard question sets, with resumable results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from rich.text import Text

from draftwing.cli import screen
from draftwing.cli.options import JSON, Compared, Drafting, Model, argument, default_drafts, option, with_options
from draftwing.cli.progress import progress
from draftwing.cli.screen import format_pairs, new_console, print_line
from draftwing.errors import ConfigError

if TYPE_CHECKING:
    from draftwing.lab.bench import Journal, Method
    from draftwing.lab.bench_results import Group, ResultRow
    from draftwing.lm import LM
    from draftwing.sampling import Sampling

RESULTS = "results.json"


@dataclasses.dataclass(frozen=True)
class Methods(Compared):
    tree: list[str] | None = option(
        None, "Shape of drafts (see `draftwing compare --help`). Repeatable: every draft with each. [default: auto]"
    )
    rule: str = option("match", "Acceptance rule (see `draftwing compare --help`).", expert=True)
    lossy: bool = option(False, "Allow a rule that changes the output distribution (typical).", expert=True)

    def settings(self) -> list[dict[str, Any]]:
        """Return keyword arguments for ``LM`` for each tree, checked before a model is loaded."""
        return [Drafting(self.rule, name, self.lossy).for_lm() for name in dict.fromkeys(self.tree or ["auto"])]

    def load_methods(self, baseline: LM, model: Model) -> list[Method]:
        """Return every draft with every tree, on the target of ``baseline``."""
        from draftwing.lab.bench import Method
        from draftwing.lm import LM

        unique = dataclasses.replace(self, draft=list(dict.fromkeys(self.draft or default_drafts(model.target))))
        methods = []
        for name, maker in unique.load(baseline, model):
            label = Path(name).name if Path(name).exists() else name
            lms = [LM(baseline.target, baseline.tokenizer, maker, **settings) for settings in self.settings()]
            methods += [Method(label, lm) for lm in lms]
        if not methods:
            raise ConfigError("bench measures drafts against baseline decoding: give a --draft besides none")
        return methods


@dataclasses.dataclass(frozen=True)
class Sampled:
    PANEL: ClassVar = "Sampling"

    temperature: list[str] | None = option(
        None,
        "0, 1 or 0.2,top_p=0.9; model: as in the model's generation_config.json. Repeatable. [default: 0 and 1]",
        "-T",
    )
    tokens: int = option(128, "Maximum number of tokens of an answer.", "--tokens", "--max-tokens", "-n")
    seed: int = option(0, "Base seed, from which each question derives its own.")

    def to_samplings(self, folder: Path) -> list[Sampling]:
        """Return the checked parameters without duplicates; ``folder`` is the target's."""
        from draftwing.lab.bench import name_of_sampling, parse_sampling

        parsed = [parse_sampling(text, folder) for text in self.temperature or ("0", "1")]
        samplings = [dataclasses.replace(one, max_tokens=self.tokens, seed=self.seed) for one in parsed]
        return list({name_of_sampling(one): one for one in samplings}.values())


@with_options
def bench(
    model: Model,
    methods: Methods,
    sampled: Sampled,
    sets: list[str] | None = option(
        None,
        "Questions: a .jsonl or .json file, a folder of them, or a URL. Repeatable.",
        "--set",
        "-s",
        metavar="[NAME=]FILE",
    ),
    num_prompts: int | None = option(None, "Questions of each set, evenly over its categories. [default: all]", min=1),
    files: list[str] | None = argument(None, "More files for --set, or folders for --report.", metavar="FILE"),
    out: Path | None = option(None, "Folder for records and results.json.", "-o"),
    report: list[Path] | None = option(None, "Measure nothing: show the results in this folder. Repeatable."),
    as_json: bool = JSON,
) -> None:
    """Measure drafts on standard question sets: MT-bench, HumanEval, GSM8K, Spec-Bench, ...

    Batch 1, every turn of every question, baseline decoding and each draft in alternation. Answers are written at once:
    stop at any time, and the same command continues. Results of different settings are never put in one table. Exits
    with 1 if a text differs from baseline decoding's under a rule that promises it.

    Examples:

    - `draftwing bench --set mt_bench.jsonl --set gsm8k=questions.jsonl --out results`
    - `draftwing bench -t MODEL -d path/or/head -d lookup --tree auto --tree chain:5 --set sets/*.jsonl --out results`
    - `draftwing bench --set spec_bench/question.jsonl --num-prompts 20 -T 0 -T model --out quick`
    - `draftwing bench --report results --report other/results --out both`
    """
    if report:
        from draftwing.lab.bench import read_journal

        folders = list(dict.fromkeys([*report, *map(Path, files or ())]))
        journals = [read_journal(folder) for folder in folders]
        groups = _write(journals, folders[0] if out is None and len(folders) == 1 else out, as_json=as_json)
    elif out is None:
        raise ConfigError("bench keeps what it measures in a folder: give --out, such as --out results")
    else:
        from draftwing.lab.bench import Plan, describe_settings, find_files, open_journal, read_set, run
        from draftwing.loading import load

        found = find_files([*(sets or ()), *(files or ())], progress)
        questions = [read_set(name, file) for name, file in found.items()]
        methods.settings()
        baseline = load(**vars(model), draft="none")
        samplings = sampled.to_samplings(baseline.tokenizer.folder)
        plan = Plan(baseline, methods.load_methods(baseline, model), questions, samplings, num_prompts)
        with open_journal(out) as journal:
            journal.begin(describe_settings(baseline, samplings[0]))
            try:
                with progress("answers") as on_progress:
                    run(plan, journal, on_progress)
            except KeyboardInterrupt:
                _write([journal], out, as_json=as_json)
                screen.line(f"interrupted: finished answers are in {out}, the same command continues", "yellow")
                raise typer.Exit(130) from None
            groups = _write([journal], out, as_json=as_json)
    if not all(group.keeps_promises for group in groups):
        raise typer.Exit(1)


def _write(journals: Sequence[Journal], out: Path | None, *, as_json: bool) -> list[Group]:
    """Print the tables, and write the results to ``out``."""
    from draftwing.lab.bench_results import gather, to_dict
    from draftwing.storage import write_text

    groups = gather([journal for journal in journals if journal.answers or journal.skipped])
    if out is not None and groups:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {out}: cannot be made ({error}): give another folder") from error
        write_text(out / RESULTS, screen.to_json(to_dict(groups)) + "\n")
    if as_json:
        screen.print_json(to_dict(groups))
        return groups
    if not groups:
        print_line("nothing is measured yet", "yellow")
    if len(groups) > 1:
        print_line("results of different settings or machines do not compare: a table each", "yellow")
    for group in groups:
        _print_group(group)
    if out is not None and groups:
        screen.line(f"wrote {out / RESULTS}", "dim")
    return groups


_NUM_NAMED = 5  # skipped turns and differing texts in the terminal; results.json has all
# Figures by the terminal's width.
_LAYOUTS = {
    155: ">n: {n} | >tau: {tau} | >speedup: {speedup} | >of means: {of means} | >with prompt: {with prompt} | "
    ">tokens/s: {tokens/s} | >baseline: {plain} | alpha by depth: {alpha by depth} | identical: {identical}",
    110: ">n: {n} | >tau: {tau} | >speedup: {speedup} | >tokens/s: {tokens/s} | >baseline: {plain} | "
    "identical: {identical}",
    0: ">n: {n} | >tau: {tau} | >speedup: {speedup} | identical: {identical}",
}


def _print_group(group: Group) -> None:
    settings = dict(group.settings)
    weights = "" if settings["quantize"] == "none" else f", {settings['quantize']}"
    title = f"{settings['target']}, {settings['dtype']}{weights}, {settings['tokens']} tokens, batch 1"
    print_line(f"\n{title}", "bold")
    _print_rows(group.wholes, new_console().width)
    if group.parts:
        print_line("by turn and category")
        _print_rows(group.parts, new_console().width - 18)
    print_line(
        "n: questions; speedup: mean of the ratios to baseline decoding, question by question, with a 95% interval; "
        "of means: ratio of mean tokens/s; with prompt: including the prompt's prefill in both times"
    )
    machine = settings.pop("machine")
    settings.pop("target_identity", None)
    print_line(f"settings: {format_pairs(settings)}")
    print_line(f"machine: {format_pairs(machine)}")
    for turn in group.skipped[:_NUM_NAMED]:
        print_line(
            f"skipped: {_place(turn)}: {turn['prompt_tokens']:,} tokens leave no room for an answer in a context of "
            f"{turn['context']:,}",
            "yellow",
        )
    if len(group.skipped) > _NUM_NAMED:
        print_line(f"in all, {len(group.skipped):,} turns were skipped because they do not fit", "yellow")
    for answer in group.differences[:_NUM_NAMED]:
        is_promised = answer["promise"] != "distribution"
        meaning = "NOT baseline decoding's text" if is_promised else "the same distribution, not the same text"
        start = f"{answer['draft']}, {answer['budget']}, from token {answer['differs_at'] + 1} on"
        print_line(f"differs: {_place(answer)}: {start}: {meaning}", "red" if is_promised else "dim")
    if len(group.differences) > _NUM_NAMED:
        print_line(f"in all, {len(group.differences):,} texts differ; {RESULTS} has them", "yellow")


def _place(answer: Mapping[str, Any]) -> str:
    return f"{answer['set']}, question {answer['id']}, turn {answer['turn']}, {answer['sampling']}"


def _print_rows(rows: Sequence[ResultRow], room: int) -> None:
    records: list[dict[str, str | Text]] = []
    for row in rows:
        cells = row.cells()
        style = "green" if row.promise == "distribution" or row.keeps_promise else "red"
        records.append({**cells, "identical": Text(cells["identical"], style)})
    layout = screen.layout_for_width(_LAYOUTS, room)
    screen.print_table(
        records,
        f"set: {{set}} | part: {{part}} | sampling: {{sampling}} | draft: {{draft}} | tree: {{tree}} | {layout}",
    )
