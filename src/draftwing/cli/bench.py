"""The tables of ``draftwing bench``: sets, their categories and turns, and what stands under them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from draftwing.cli import bench as bench_tables
from draftwing.cli import screen
from draftwing.cli.options import (
    AllDrafts,
    Drafting,
    Drafts,
    Json,
    Model,
    drafts_compared,
    every_draft,
    sampling_option,
    with_options,
)
from draftwing.cli.progress import progress
from draftwing.cli.screen import format_alpha, new_console, printable, put_line
from draftwing.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from draftwing.lab.bench import Journal, Method
    from draftwing.lab.bench_results import Estimate, Group, Row
    from draftwing.lab.bench_sets import QuestionSet
    from draftwing.lm import LM
    from draftwing.sampling import Sampling


_NAMED = 5  # skipped turns and differing texts that are named; the page has all
_DEPTHS = 3  # of alpha; the page and the JSON have more


def print_groups(groups: Sequence[Group]) -> None:
    """A table for each group of equal settings."""
    console = new_console()
    if not groups:
        put_line(console, "nothing is measured yet", "yellow")
    if len(groups) > 1:
        put_line(console, "results of different settings or machines, which do not compare: a table each", "yellow")
    for group in groups:
        _print_group(console, group)


def _print_group(console: Console, group: Group) -> None:
    put_line(console, f"\n{_title(group.settings)}", "bold")
    console.print(_table(group.wholes, _columns(console.width)))
    if group.parts:
        put_line(console, "by turn and category")
        console.print(_table(group.parts, _columns(min(console.width - 18, _WIDE - 1)), parts=True))
    put_line(
        console,
        "n: questions; speedup: mean of the ratios to plain decoding, question by question, with a 95% interval; "
        "of means: ratio of mean tokens/s; prompt: with the prompt's prefill in both times",
        "dim",
    )
    settings = {key: value for key, value in group.settings.items() if key not in ("machine", "target_identity")}
    put_line(console, f"settings: {_pairs(settings)}", "dim")
    put_line(console, f"machine: {_pairs(group.settings['machine'])}", "dim")
    for each in group.skipped[:_NAMED]:
        put_line(
            console,
            f"skipped: {_where(each)}: {each['prompt_tokens']:,} tokens leave no room for an answer in a context of "
            f"{each['context']:,}",
            "yellow",
        )
    _put_rest(console, len(group.skipped), "turns were skipped, for want of room")
    for each in group.differences[:_NAMED]:
        told = "the target's law is kept, not its text" if each["promise"] == "law" else "NOT plain decoding's text"
        style = "dim" if each["promise"] == "law" else "red"
        what = f"{each['draft']}, {each['budget']}, from token {each['differs_at'] + 1} on"
        put_line(console, f"differs: {_where(each)}: {what}: {told}", style)
    _put_rest(console, len(group.differences), "texts differ; the page shows them")


def _put_rest(console: Console, count: int, what: str) -> None:
    if count > _NAMED:
        put_line(console, f"in all, {count:,} {what}", "yellow")


def _where(each: Mapping[str, Any]) -> str:
    return f"{each['set']}, question {each['id']}, turn {each['turn']}, {each['sampling']}"


def _title(settings: Mapping[str, Any]) -> str:
    weights = "" if settings["quantize"] == "none" else f", {settings['quantize']}"
    return f"{settings['target']}, {settings['dtype']}{weights}, {settings['tokens']} tokens, batch 1"


# Terminal columns that the whole table takes, and one without all that can be worked out of the rest.
_WIDE, _MIDDLE = 155, 110


def _columns(width: int) -> tuple[str, ...]:
    if width >= _WIDE:
        return ("n", "tau", "speedup", "of means", "prompt", "tokens/s", "plain", "alpha by depth", "identical")
    if width >= _MIDDLE:
        return ("n", "tau", "speedup", "tokens/s", "plain", "identical")
    return ("n", "tau", "speedup", "identical")


def _table(rows: Sequence[Row], figures: Sequence[str], *, parts: bool = False) -> Table:
    table = Table("set", *(("part",) if parts else ()), "sampling", "draft", "tree")
    for name in figures:
        is_text = name in ("alpha by depth", "identical")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        cells = _cells(row)
        part = (Text(printable(row.part)),) if parts else ()
        rule = "" if row.method["rule"] == "match" else f" ({row.method['rule']})"
        named = (Text(printable(row.set)), *part, row.sampling, Text(printable(row.method["draft"]) + rule))
        style = "bold" if row.set == "mean of sets" else ""
        table.add_row(*named, row.method["budget"], *(cells[name] for name in figures), style=style)
    return table


def _cells(row: Row) -> dict[str, str | Text]:
    more = " ..." if len(row.alpha) > _DEPTHS else ""
    return {
        "n": str(row.num_questions),
        "tau": _span(row.figures["tau"]),
        "speedup": _span(row.figures["speedup"], "x"),
        "of means": f"{row.figures['speedup_ratio_of_means'].value:.2f}x",
        "prompt": f"{row.figures['speedup_with_prompt'].value:.2f}x",
        "tokens/s": f"{row.tokens_per_s:.1f}",
        "plain": f"{row.plain_tokens_per_s:.1f}",
        "alpha by depth": format_alpha(row.alpha[:_DEPTHS]) + more or "-",
        "identical": _identical(row),
    }


def _span(estimate: Estimate, unit: str = "") -> str:
    ends = "" if estimate.low is None or estimate.high is None else f" [{estimate.low:.2f}-{estimate.high:.2f}]"
    return f"{estimate.value:.2f}{unit}{ends}".replace("[", "\\[")


def _identical(row: Row) -> Text:
    text = f"{row.num_identical} of {row.num_answers}"
    if row.promise == "law":
        return Text(f"{text} (same law)", style="green")
    return Text(text if row.lossless else f"{text}, LOSSY rule", style="green" if row.keeps_promise else "red")


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in values.items() if value is not None)


# ``draftwing bench``: the field's question sets, every draft against plain decoding, with what was measured kept.


RESULTS, PAGE = "results.json", "index.html"


@dataclasses.dataclass(frozen=True)
class Asked:
    """Which questions."""

    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            "-s",
            metavar="[NAME=]FILE",
            help="Questions: a .jsonl or .json file, or a folder of such files. Repeatable.",
        ),
    ] = None
    num_prompts: Annotated[
        int | None,
        typer.Option("--num-prompts", min=1, help="Questions of each set, evenly over its categories. [default: all]"),
    ] = None

    def read(self, more: Sequence[str] | None) -> list[QuestionSet]:
        """The sets."""
        from draftwing.lab.bench_sets import find_files, read_set

        return [read_set(name, file) for name, file in find_files([*(self.sets or ()), *(more or ())]).items()]


@dataclasses.dataclass(frozen=True)
class Measured:
    """What drafts, and how much."""

    draft: Drafts = None
    every: AllDrafts = False
    tree: Annotated[
        list[str] | None,
        typer.Option(
            "--tree",
            help="auto, chain:K, dynamic:NODES,DEPTH,WIDTH, static or a JSON file, as in compare. Repeatable: every "
            "draft with each. [default: auto]",
        ),
    ] = None
    rule: Annotated[str, typer.Option("--rule", help="Of acceptance, as in compare.")] = "match"
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Allow a rule that changes what the target says (typical).")
    ] = False

    def check(self) -> list[Drafting]:
        """The trees; refused before a model is loaded for them."""
        found = [Drafting(self.rule, each, self.lossy) for each in dict.fromkeys(self.tree or ["auto"])]
        for each in found:
            each.check()
            each.budget()
        return found

    def load(self, plain: LM, model: Model) -> list[Method]:
        """Every draft with every tree, on the target of ``plain``."""
        from draftwing.lab.bench import Method
        from draftwing.lm import LM
        from draftwing.loading import load_drafter

        names = [name for name in dict.fromkeys(self.draft or drafts_compared(model.target)) if name != "none"]
        makers = [(name, load_drafter(name, plain.target, plain.tokenizer, device=model.device)) for name in names]
        if self.every:
            makers += every_draft(plain, model.target, model.device, but=names)
        found = []
        for name, maker in makers:
            called = Path(name).name if Path(name).exists() else name
            for each in self.check():
                lm = LM(plain.target, plain.tokenizer, maker, each.rule, each.budget(), lossless=not each.lossy)
                found.append(Method(called, lm))
        if not found:
            raise ConfigError("bench measures drafts against plain decoding: give a --draft besides none")
        return found


@dataclasses.dataclass(frozen=True)
class Sampled:
    """How answers are sampled."""

    temperature: Annotated[
        list[str] | None,
        sampling_option(
            "Such as 0, 1 or 0.2,top_p=0.9; model: as the model's own generation_config.json says. Repeatable. "
            "[default: 0 and 1]",
            "--temperature",
            "-T",
        ),
    ] = None
    tokens: Annotated[int, sampling_option("Of each answer at most.", "--tokens", "--max-tokens", "-n")] = 128
    seed: Annotated[int, sampling_option("Each question gets one of its own made of it.", "--seed")] = 0

    def to_samplings(self, folder: Path) -> list[Sampling]:
        """The checked parameters, each once; ``folder`` is the target's."""
        from draftwing.lab.bench import name_of_sampling, parse_sampling

        parsed = [parse_sampling(each, folder) for each in self.temperature or ("0", "1")]
        found = [dataclasses.replace(each, max_tokens=self.tokens, seed=self.seed) for each in parsed]
        return list({name_of_sampling(each): each for each in found}.values())


@with_options
def bench(
    model: Model,
    asked: Asked,
    measured: Measured,
    sampled: Sampled,
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="More files for --set, or folders for --report, as from a wildcard."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for records, results.json and index.html.")
    ] = None,
    report: Annotated[
        list[Path] | None,
        typer.Option("--report", help="Measure nothing: show what is in this folder. Repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure drafts on standard question sets: MT-bench, HumanEval, GSM8K, Spec-Bench, ...

    Batch 1, every turn of every question, plain decoding and each draft in alternation. Every finished answer is in the
    folder at once: stop it at any time, and the same command goes on. Settings that differ are never put in one table.
    Exits with 1 where a text is not plain decoding's under a rule that promises it.

    Examples:

    - `draftwing bench --set mt_bench.jsonl --set gsm8k=questions.jsonl --out results`

    - `draftwing bench -t MODEL -d path/or/head -d lookup --tree auto --tree chain:5 --set sets/*.jsonl --out results`

    - `draftwing bench --set spec_bench/question.jsonl --num-prompts 20 -T 0 -T model --out quick`

    - `draftwing bench --report results --report other/results --out both`
    """
    if report:
        _report([*report, *map(Path, more or ())], out, as_json=as_json)
        return
    if out is None:
        raise ConfigError("bench keeps what it measures in a folder: give --out, such as --out results")
    sets = asked.read(more)
    measured.check()
    from draftwing.lab.bench import Plan, describe_settings, open_journal, run
    from draftwing.loading import load

    plain = load(**vars(model), draft="none")
    samplings = sampled.to_samplings(plain.tokenizer.folder)
    plan = Plan(plain, measured.load(plain, model), sets, samplings, asked.num_prompts)
    with open_journal(out) as journal:
        journal.begin(describe_settings(plain, samplings[0]))
        try:
            with progress("answers") as on_progress:
                run(plan, journal, on_progress)
        except KeyboardInterrupt:
            _finish([journal], out, as_json=as_json)
            screen.line(f"interrupted: finished answers are in {out}, the same command goes on with the rest", "yellow")
            raise typer.Exit(130) from None
        groups = _finish([journal], out, as_json=as_json)
    _judge(groups)


def _report(folders: Sequence[Path], out: Path | None, *, as_json: bool) -> None:
    from draftwing.lab.bench import read_journal

    journals = [read_journal(each) for each in dict.fromkeys(folders)]
    if out is None and len(folders) == 1:
        out = folders[0]
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {out}: cannot be made ({error}): give another folder") from error
    _judge(_finish(journals, out, as_json=as_json))


def _finish(journals: Sequence[Journal], out: Path | None, *, as_json: bool) -> list[Group]:
    """Tables on stdout; results and page in ``out``."""
    from draftwing.formats.write import write_text
    from draftwing.lab.bench_page import render
    from draftwing.lab.bench_results import gather, to_dict

    groups = gather([each for each in journals if each.answers or each.skipped])
    if out is not None and groups:
        write_text(out / RESULTS, screen.to_json(to_dict(groups)) + "\n")
        write_text(out / PAGE, render(groups))
    if as_json:
        screen.print_json(to_dict(groups))
    else:
        bench_tables.print_groups(groups)
        if out is not None and groups:
            screen.line(f"page: {out / PAGE}, figures: {out / RESULTS}", "dim")
    return groups


def _judge(groups: Sequence[Group]) -> None:
    if not all(each.keeps_promises for each in groups):
        raise typer.Exit(1)
