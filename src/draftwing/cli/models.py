"""``draftwing list | pull | rm | info | import``: models that have a name, and descriptions and imports of any."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwing.cli import screen
from draftwing.cli.options import DRAFT, JSON, Model, argument, option, with_options
from draftwing.cli.progress import progress
from draftwing.cli.screen import print_line
from draftwing.errors import CheckpointError, ConfigError
from draftwing.models.catalogue import CATALOGUE, Hub, Shipped, Wheel, entry_named

if TYPE_CHECKING:
    from draftwing.models.catalogue import Entry

_LISTED = {
    100: "name: {name} | >parameters: {millions:.0f}M | licence: {licence} | source: {source} | >size: {mb:,.0f} MB | "
    "downloaded: {is_local} | heads: {heads}",
    0: "name: {name} | >size: {mb:,.0f} MB | heads: {heads}",
}
_NAME = argument(..., "A name of `draftwing list`, or a Hub id, org/name.")


@with_options
def list_(as_json: bool = JSON) -> None:
    """List models that have a name or are downloaded: source, licence, size.

    `--target` and `--draft` take these names. The first use downloads the model, later ones need no network.

    Examples:

    - `draftwing list`
    - `draftwing run smollm2-135m-instruct "Why is the sky blue?"`
    """
    from draftwing.models.resolve import hub_models

    rows = [describe_entry(entry) for entry in CATALOGUE.values()]
    named = {row["source"] for row in rows}
    rows += [_describe_hub(*model) for model in hub_models() if f"hub {model[0]}" not in named]
    if as_json:
        screen.print_json({"models": rows})
        return
    for row in rows:
        size = {"mb": row["num_bytes"] / 1e6} | ({"millions": n / 1e6} if (n := row["num_parameters"]) else {})
        row |= {
            **size,
            "licence": row["licence"] or "-",
            "is_local": "yes" if row["path"] else "no",
            "heads": ", ".join(row["heads"]) or "-",
        }
    screen.print_table(rows, screen.layout_for_width(_LISTED))
    for row in rows:
        if row["path"]:
            print_line(f"{row['name']}: {row['path']}")


@with_options
def pull(
    name: str = _NAME,
    check: bool = option(False, "Hash the downloaded file; download it again if it is damaged."),
    as_json: bool = JSON,
) -> None:
    """Download a model unless it is downloaded; print its path.

    A wheel of the Python package index is downloaded by pip, with its settings for mirrors, proxies and credentials.
    The file is checked, and kept in `~/.cache/draftwing/models` (or in the folder that DRAFTWING_CACHE names). Models
    of the Hub are kept in its own cache.

    Examples:

    - `draftwing pull smollm2-135m-instruct`
    - `draftwing pull smollm2-135m-instruct --check`
    - `draftwing pull org/name`
    """
    from draftwing.models.resolve import fetch, fetch_hub

    entry = None if "/" in name else entry_named(name)
    path = fetch_hub(name) if entry is None else fetch(entry, check=check)
    if as_json:
        screen.print_json({"name": name, "path": str(path)} if entry is None else describe_entry(entry))
    else:
        print(path)


@with_options
def rm(name: str = _NAME, as_json: bool = JSON) -> None:
    """Delete a downloaded model; the next use downloads it again.

    Examples:

    - `draftwing rm smollm2-135m-instruct`
    - `draftwing rm org/name`
    """
    from draftwing.models.resolve import remove, remove_hub

    def report(num_bytes: int) -> None:
        if not as_json:
            size = f"removing {name} frees {num_bytes / 1e6:,.1f} MB"
            screen.line(size if num_bytes else f"{name} is not downloaded: nothing to do")

    entry = None if "/" in name else entry_named(name)
    if entry is not None and isinstance(entry.source, Shipped):
        raise ConfigError(f"{name} comes with Draftwing and cannot be removed by itself: leave it")
    if entry is None:
        freed = remove_hub(name, report)
    elif isinstance(entry.source, Hub):
        freed = remove_hub(entry.source.repo, report)
    else:
        freed = remove(name, report)
    if as_json:
        screen.print_json({"name": name, "freed_bytes": freed})


def _describe_hub(repo: str, num_bytes: int, path: str) -> dict[str, Any]:
    unknown = {"num_parameters": None, "licence": None}
    return {"name": repo, **unknown, "source": f"hub {repo}", "num_bytes": num_bytes, "path": path, "heads": []}


def describe_entry(entry: Entry) -> dict[str, Any]:
    """Return an entry of the catalogue as ``list --json`` prints it."""
    from draftwing.models.resolve import find_local
    from draftwing.shipped import SHIPPED

    source, path = entry.source, find_local(entry)
    if isinstance(source, Wheel):
        origin, num_bytes = f"wheel {source.package} {source.version}", source.member_num_bytes
    elif isinstance(source, Hub):
        origin, num_bytes = f"hub {source.repo}", source.num_bytes
    else:
        files = (file for file in (SHIPPED / source.folder).glob("*") if file.is_file())
        origin, num_bytes = "comes with Draftwing", sum(file.stat().st_size for file in files)
    about = {name: getattr(entry, name) for name in ("name", "num_parameters", "licence")}
    place = None if path is None else str(path)
    return {**about, "source": origin, "num_bytes": num_bytes, "path": place, "heads": list(entry.heads)}


@with_options
def info(
    model: Model,
    draft: str | None = DRAFT,
    bandwidth: bool = option(False, "Measure the memory bandwidth, which limits baseline decoding."),
    measure: bool = option(False, "Measure what drafts and their verification cost on this machine, in 4 seconds."),
    as_json: bool = JSON,
) -> None:
    """Describe a target, its tokenizer, a draft and this machine.

    Examples:

    - `draftwing info --bandwidth`
    - `draftwing info -t path/or/hub-id -d path/or/smaller --json`
    """
    from draftwing.lab.machine import describe_costs, describe_lm, describe_machine, read_bandwidth

    lm = model.load(draft)
    sections = {**describe_lm(lm), "machine": describe_machine()}
    if measure:
        sections["costs"] = describe_costs(lm.costs())
    if bandwidth:
        if lm.target.device.type != "cpu":
            raise ConfigError("--bandwidth measures the processor's memory: add --device cpu")
        speed = read_bandwidth(lm.target.num_weight_bytes)
        limit = speed * 1e9 / lm.target.num_weight_bytes
        sections["bandwidth"] = {"gb_per_s": round(speed, 2), "baseline_limit_tokens_per_s": round(limit, 1)}
    if as_json:
        screen.print_json(sections)
    else:
        screen.print_sections(sections)


@with_options
def import_(
    file: str = argument(..., "A GGUF file (of a split model, the first), or a name."),
    out: Path = argument(..., "Folder to write; it must be new or empty."),
    dtype: str = option("float32", "float32 (exactly the file's values), bfloat16 or float16."),
    as_json: bool = JSON,
) -> None:
    """Write a GGUF file as a Hugging Face folder: config, tokenizer, chat template, safetensors.

    Draftwing itself reads GGUF files (`--target model.gguf`); other programs may need the folder.

    Examples:

    - `draftwing import model.Q4_K_M.gguf model-folder`
    - `draftwing import model.Q8_0.gguf model-folder --dtype bfloat16`
    - `draftwing import smollm2-135m-instruct model-folder`
    """
    from draftwing.formats.gguf_folder import LINK
    from draftwing.formats.gguf_weights import import_gguf
    from draftwing.models.resolve import resolve

    path = Path(file)
    if not path.exists():  # a name, or an error that says what is meant
        folder = resolve(file)
        path = folder / LINK
        if not path.exists():
            raise CheckpointError(f"{file} is a folder already, no GGUF file: use {folder}")
    with screen.writing(out), progress("importing, bytes") as show:
        done = import_gguf(path, out, dtype, show)
    if as_json:
        screen.print_json({**asdict(done), "folder": str(done.folder)})
    else:
        formats = ", ".join(f"{count} in {kind}" for kind, count in sorted(done.formats.items()))
        screen.line(
            f"wrote {done.folder}: {done.tensors} tensors in {dtype}, {done.num_bytes / 1e6:,.0f} MB ({formats})"
        )
