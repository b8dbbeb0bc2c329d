"""``draftwing bench``: the field's question sets, every draft against plain decoding, with what was measured kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwing.cli import bench_tables, screen
from draftwing.cli.drafts import AllDrafts, Drafts, drafts_compared, every_draft
from draftwing.cli.options import Drafting, Json, Model, sampling_option, with_options
from draftwing.cli.progress import progress
from draftwing.errors import ConfigError

if TYPE_CHECKING:
    from draftwing.api import LM
    from draftwing.evaluate.bench.records import Journal
    from draftwing.evaluate.bench.results import Group
    from draftwing.evaluate.bench.sets import QuestionSet
    from draftwing.evaluate.bench.settings import Method
    from draftwing.sampling import Sampling

__all__ = ["register"]

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
        from draftwing.evaluate.bench.sets import find_files, read_set

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
        from draftwing.api import LM, load_drafter
        from draftwing.evaluate.bench.settings import Method

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
        from draftwing.evaluate.bench.settings import name_of_sampling, parse_sampling

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
    """Measure drafts on the field's question sets: MT-bench, HumanEval, GSM8K, Spec-Bench, ...

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
    from draftwing.api import load
    from draftwing.evaluate.bench.protocol import Plan, run
    from draftwing.evaluate.bench.records import open_journal
    from draftwing.evaluate.bench.settings import describe_settings

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
    """What was measured earlier, once more as tables and page."""
    from draftwing.evaluate.bench.records import read_journal

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
    from draftwing.evaluate.bench.page import render
    from draftwing.evaluate.bench.results import gather, to_dict
    from draftwing.heads.write import write_text

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


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command()(bench)
