"""``draftwing info``: a target, its tokenizer, a drafter and this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from draftwing.cli import screen, tables
from draftwing.cli.drafts import Draft
from draftwing.cli.options import Drafting, Json, Model, with_options
from draftwing.errors import ConfigError

__all__ = ["register"]


@with_options
def info(
    model: Model,
    draft: Draft = None,
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth", help="Measure how fast memory is read: the limit of plain decoding.")
    ] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Measure what a step costs here anew.")] = False,
    as_json: Json = False,
) -> None:
    """Describe a target, its tokenizer, a drafter and this machine.

    Examples:

    - `draftwing info --bandwidth`

    - `draftwing info -t path/or/hub-id -d path/or/smaller --json`
    """
    from draftwing.evaluate.machine import describe_machine, read_bandwidth
    from draftwing.evaluate.predict import describe_costs
    from draftwing.evaluate.report import describe_lm

    lm = model.load(draft, Drafting())
    sections = {**describe_lm(lm), "machine": describe_machine()}
    if measure or lm.traits.drafts:
        sections["costs"] = describe_costs(lm.costs(again=measure))
    if bandwidth:
        if lm.target.device.type != "cpu":
            raise ConfigError("--bandwidth measures the processor's memory: add --device cpu")
        speed = read_bandwidth(lm.target.num_weight_bytes)
        limit = speed * 1e9 / lm.target.num_weight_bytes
        sections["bandwidth"] = {"gb_per_s": round(speed, 2), "plain_decoding_limit_tokens_per_s": round(limit, 1)}
    if as_json:
        screen.print_json(sections)
    else:
        tables.print_info(sections)


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command()(info)
