"""``draftwing tune``: what is chosen by measuring on this machine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwing.cli import screen
from draftwing.cli.options import Drafting, Examples, Json, Model, SamplingOptions, with_options
from draftwing.cli.progress import progress

if TYPE_CHECKING:
    from draftwing.lab.tune import Basis, Plan, Trial, Tuned
    from draftwing.lm import LM
    from draftwing.models.lean import LeanTarget
    from draftwing.text.prompts import Prompt


tune_app = typer.Typer(no_args_is_help=True, help="Tune a draft by measuring on this machine: `layers`.")


@dataclasses.dataclass(frozen=True)
class Search:
    """What is tried, and on what."""

    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the layers, which --draft then takes.")]
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="Held-out prompts: a text file (one prompt) or a .jsonl file (one a line). [default: those that come "
            "with Draftwing]",
        ),
    ] = None
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Use the first so many prompts.")] = 8
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=8, help="Tokens that the target writes after each.")
    ] = 64
    trials: Annotated[int, typer.Option("--trials", min=1, help="Sets to try, those of a stopped run counted.")] = 200
    exits: Annotated[
        bool, typer.Option("--exits", help="Try early exits alone: the first layer, the first two, and so on.")
    ] = False
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the search.")] = 0
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Decode the prompts with what was found, and without.")
    ] = True

    def prompts(self, target: str | None) -> Sequence[Prompt]:
        """The first so many."""
        return Examples(self.data, self.num_prompts).read(target)


@tune_app.command()
@with_options
def layers(model: Model, search: Search, as_json: Json = False) -> None:
    """Find the layers that a target can spare while it drafts for itself (Draft & Verify, 2309.08168).

    Attentions and MLPs are skipped or not, as Bayesian optimisation finds best: by how many tokens a second a set
    gives, from texts that the target writes once and the times that its parts take here. Needs `pip install
    'draftwing[tune]'` but for --exits. Ctrl-C keeps the best set so far, and the same command goes on.

    Examples:

    - `draftwing tune layers --target path/or/hub-id --data held-out.jsonl --out my-layers`

    - `draftwing tune layers --exits --out first-layers`, then `draftwing compare --draft first-layers`
    """
    from draftwing.lab.tune import tune

    prompts, best = search.prompts(model.target), _Best()
    plan = _plan(model, search, prompts)
    with progress("trying sets of layers", best.text, resumes=True) as show:

        def on_progress(done: int, total: int, trial: Trial | None) -> None:
            best.trial = trial
            show(done, total)

        found = tune(plan, lambda: _basis(model, search, prompts), lambda: _plain(model), on_progress)
    measured = _measured(model, search, prompts) if found.finished and search.measure else None
    _tell(plan, found, measured, as_json=as_json)
    if not found.finished:
        screen.line(f"stopped after {found.num_trials} sets: run the same command again to go on", "yellow")
        raise typer.Exit(130)


class _Best:
    trial: Trial | None = None

    def text(self) -> str:
        if self.trial is None:
            return ""
        return f"best {self.trial.tokens_per_s:,.1f} tokens/s expected, {self.trial.parts}"


def _plan(model: Model, search: Search, prompts: Sequence[Prompt]) -> Plan:
    from draftwing.formats.identity import target_id_of_folder
    from draftwing.lab.tune import Plan
    from draftwing.models.catalogue import default_model
    from draftwing.models.resolve import resolve

    digest = hashlib.sha256(json.dumps([search.max_tokens, list(map(_plain_json, prompts))]).encode())
    about = {"dtype": model.dtype, "quantize": model.quantize, "texts": digest.hexdigest()[:16]}
    target = target_id_of_folder(resolve(model.target), str(model.target or default_model()))
    return Plan(search.out, target, search.trials, search.seed, search.exits, about)


def _plain_json(prompt: Prompt) -> Any:
    return prompt if isinstance(prompt, str) else [each if isinstance(each, int) else dict(each) for each in prompt]


def _basis(model: Model, search: Search, prompts: Sequence[Prompt]) -> Basis:
    from draftwing.lab.tune import Basis, Text, measure_pace
    from draftwing.models.subnet import lean_target

    lm = model.load("none", Drafting())
    target = lean_target(lm.target, "draft 'layers'")
    texts = []
    for prompt in _put(lm, prompts):
        ids = lm.encode(prompt)
        written = lm.generate([ids], temperature=0.0, max_tokens=search.max_tokens)[0].token_ids
        texts.append(Text((*ids, *written), len(ids)))
    return Basis(tuple(texts), measure_pace(target))


def _put(lm: LM, prompts: Sequence[Prompt]) -> list[Prompt]:
    return [SamplingOptions().put(each, lm.tokenizer) for each in prompts]


def _plain(model: Model) -> LeanTarget:
    from draftwing.loading import load_target
    from draftwing.models.resolve import resolve
    from draftwing.models.subnet import lean_target

    folder = resolve(model.target)
    loaded = load_target(folder, dtype=model.dtype, device=model.device, engine=model.engine, prepack=False)
    return lean_target(loaded, "draft 'layers'")


def _measured(model: Model, search: Search, prompts: Sequence[Prompt]) -> dict[str, float]:
    from draftwing.lab.compare import compare
    from draftwing.sampling import Sampling

    lms = model.load_many([str(search.out)], Drafting())
    with progress("decoding with them") as on_progress:
        sampling = Sampling(max_tokens=search.max_tokens)
        found = compare(lms, _put(lms[0], prompts), sampling, on_progress=on_progress)
    plain, drafted = found.methods
    return {
        "plain_tokens_per_s": plain.tokens_per_s,
        "tokens_per_s": drafted.tokens_per_s,
        "speedup": drafted.speedup,
        "tau": drafted.tau,
    }


def _tell(plan: Plan, found: Tuned, measured: dict[str, float] | None, *, as_json: bool) -> None:
    best = found.best
    if as_json:
        result = {"out": str(plan.out), "trials": found.num_trials, "finished": found.finished, **best.to_dict()}
        result |= {"plain_tokens_per_s": found.plain, "speedup": found.speedup, "measured": measured}
        screen.print_json(result)
        return
    screen.line(
        f"{best.parts}: {best.tokens_per_s:,.1f} tokens/s expected with chains of {best.depth}, "
        f"{found.speedup:.2f}x of plain decoding"
    )
    for name, layers in (("attention", best.parts.skipped_attention), ("MLP", best.parts.skipped_mlp)):
        screen.line(f"skipped {name}: {', '.join(map(str, layers)) or 'none'}", "dim")
    if measured is not None:
        screen.line(
            f"measured: {measured['tokens_per_s']:,.1f} tokens/s, {measured['speedup']:.2f}x, tau {measured['tau']:.2f}"
        )
    elif found.speedup <= 1:
        screen.line("no set is expected to be faster than plain decoding here", "yellow")
    screen.line(f"wrote {plan.out}")
