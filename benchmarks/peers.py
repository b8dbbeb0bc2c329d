"""Compare how fast peers decode the same checkpoint on this machine, with and without drafts.

    python benchmarks/peers.py --json benchmarks/results/NAME.json --png benchmarks/results/NAME.png
    python benchmarks/peers.py --precision int8 --peers draftwing,openvino,llama.cpp
    python benchmarks/peers.py --target /tmp/inflated-1b/target --eagle3 /tmp/inflated-1b/eagle3 \\
        --eagle1 /tmp/inflated-1b/eagle1 --peers draftwing,openvino/plain,openvino/lookup,llama.cpp --max-tokens 64
    python benchmarks/peers.py --target model.gguf --peers draftwing/plain,draftwing/lookup,openvino,llama.cpp
    python benchmarks/peers.py --num-prompts 1 --rounds 1 --max-tokens 16    # does everything run?

Same checkpoint, prompts (as token ids), precision and number of threads; greedy, batch 1, end tokens ignored. Each
mode has a separate process, which loads its model before the clock starts. In every round each mode decodes all
prompts once; figures are medians over the rounds. What a peer needs is installed into ``build/peers`` at first use
(gigabytes, minutes), and converted checkpoints are kept there. A peer that cannot be installed, or fails, is in the
table and in the JSON with the reason.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peers.channel import PeerError, Worker, serve, worker_command
from peers.modes import PEERS, Settings, parse_draft_tokens, parse_modes

ROOT = Path(__file__).resolve().parents[1]
# Peer: its file in ``peers``.
FILES = {
    "draftwing": "ours",
    "transformers": "hugging",
    "openvino": "genai",
    "llama.cpp": "llamacpp",
    "vllm": "vllm_cpu",
}


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    about, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = "; ".join(f"{peer}: {', '.join(names)}" for peer, names in PEERS.items())
    parser.add_argument(
        "--target", type=Path, help="a Hugging Face folder or an unchanged GGUF file [default: the shipped target]"
    )
    parser.add_argument("--eagle3", type=Path, help="a folder with an EAGLE-3 head [default: the shipped one]")
    parser.add_argument("--eagle1", type=Path, help="a folder with an EAGLE-1 head [default: the shipped one]")
    parser.add_argument("--draft-lm", type=Path, help="a folder with a small causal LM [default: the shipped one]")
    parser.add_argument("--prompts", type=Path, help="a .jsonl file [default: the shipped prompts]")
    parser.add_argument("--num-prompts", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--precision",
        choices=("fp32", "int8", "int4"),
        help="int8, int4: each peer's usual one [default: fp32; a GGUF file has its own]",
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="[default: the cores]")
    parser.add_argument("--peers", help=f"peers or modes, with commas between [default: all] ({known})")
    parser.add_argument(
        "--draft-tokens", action="append", default=[], metavar="MODE=N", help="such as vllm/eagle3=5; repeatable"
    )
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM without its compiler, which takes minutes")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that a worker's answer may take")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "peers", help="environments and conversions")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--png", type=Path, help="write a bar chart here")
    args = parser.parse_args(arguments)
    for name, least in (("num_prompts", 1), ("max_tokens", 2), ("rounds", 1), ("threads", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, found {getattr(args, name)}")
    try:
        args.modes = parse_modes(args.peers)
        args.draft_tokens = parse_draft_tokens(args.draft_tokens)
    except ValueError as error:
        parser.error(str(error))
    return args


def settings_of(args: argparse.Namespace, shipped: Path) -> Settings:
    """The folders filled in: what ships with Draftwing drafts for the shipped target only."""
    from draftwing.models.resolve import resolve

    target = resolve(args.target).resolve() if args.target else (shipped / "target").resolve()
    own, is_gguf = target == (shipped / "target").resolve(), (target / "model.gguf").exists()
    if is_gguf and args.precision:
        raise SystemExit(f"{args.target} is a GGUF file, which every peer reads unchanged: leave out --precision")
    given = {"eagle3": args.eagle3, "eagle1": args.eagle1, "draft-lm": args.draft_lm}
    defaults = {"eagle3": shipped / "eagle3", "eagle1": shipped / "eagle1", "draft-lm": shipped / "draft"}
    drafts = {name: folder or (defaults[name] if own else None) for name, folder in given.items()}
    return Settings(
        target,
        {name: None if folder is None else folder.resolve() for name, folder in drafts.items()},
        "gguf" if is_gguf else args.precision or "fp32",
        args.threads,
        args.max_tokens,
        args.folder.resolve() / "models",
        args.draft_tokens,
        args.vllm_eager,
    )


def starter(args: argparse.Namespace, say: Callable[[str], None]) -> Callable[[str], Worker]:
    """Return a function that starts a worker; a peer that cannot be installed is tried once."""
    from peers.environments import python_of

    pythons: dict[str, Path | PeerError] = {}

    def start(peer: str) -> Worker:
        if peer not in pythons:
            try:
                pythons[peer] = python_of(peer, args.folder.resolve(), say)
            except PeerError as error:
                pythons[peer] = error
        python = pythons[peer]
        if isinstance(python, PeerError):
            raise python
        threads = {"OMP_NUM_THREADS": str(args.threads), "MKL_NUM_THREADS": str(args.threads)}
        return Worker(worker_command(python, peer), threads, args.timeout)

    return start


def measure(args: argparse.Namespace) -> None:
    """Prepare, measure and report."""
    from rich.console import Console

    from draftwing.models.config import read_config
    from draftwing.shipped import SHIPPED
    from peers import report
    from peers.rounds import Measurement

    told = Console(stderr=True, highlight=False)

    def say(text: str) -> None:
        told.print(text, style="dim", markup=False)

    settings = settings_of(args, SHIPPED)
    inflated = (read_config(settings.target).get("draftwing_inflated") or {}).get("notice")
    prompts = prompts_of(args, settings.target)
    measurement = Measurement(args.modes, settings, starter(args, say), say)
    try:
        measurement.prepare()
        measurement.run(prompts, args.rounds)
    finally:
        measurement.close()
    outcomes = measurement.outcomes
    figures, notes = report.figures_of(outcomes), report.notes_of(outcomes, settings.precision, inflated)
    name = args.target.resolve().parent.name if inflated else (args.target or settings.target).name
    title = (
        f"{name}{' (inflated)' if inflated else ''}, {settings.precision}, {len(prompts)} prompts of {args.max_tokens} "
        f"tokens, {args.rounds} rounds, {args.threads} threads"
    )
    out = Console(width=None if sys.stdout.isatty() else 130)
    out.print(report.table_of(figures, len(prompts), title))
    for line in [*notes, *report.failures_of(figures)]:
        out.print(line, markup=False, highlight=False)
    if args.json is not None:
        write_json(
            args.json,
            report.result_of(outcomes, {**about_of(args, settings, prompts), "inflated": inflated, "notes": notes}),
        )
    if args.png is not None:
        report.draw(figures, title, notes[0] if inflated else "", args.png)


def prompts_of(args: argparse.Namespace, target: Path) -> list[list[int]]:
    """Encode the prompts with the target's tokenizer."""
    from draftwing.text.prompts import read_prompts, shipped_prompts
    from draftwing.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(target)
    found: Sequence[Any] = (
        read_prompts(args.prompts, args.num_prompts) if args.prompts else shipped_prompts(args.num_prompts)
    )
    return [tokenizer.encode(each) if isinstance(each, str) else tokenizer.encode_chat(each) for each in found]


def about_of(args: argparse.Namespace, settings: Settings, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Describe the run; folders by name, since paths mean nothing on other machines."""
    from draftwing.lab.machine import describe_machine
    from plain_decoding import commit

    machine = describe_machine()
    machine["threads"] = args.threads
    return {
        "target": f"{settings.target.parent.name}/{settings.target.name}",
        "drafts": {name: None if folder is None else folder.name for name, folder in settings.drafts.items()},
        "precision": settings.precision,
        "prompts": args.prompts.name if args.prompts else "shipped",
        "num_prompts": len(prompts),
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "max_tokens": args.max_tokens,
        "rounds": args.rounds,
        "threads": args.threads,
        "draft_tokens": settings.draft_tokens,
        "machine": machine,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
    }


def write_json(file: Path, result: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    args = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the workers are ended too

    from draftwing.errors import DraftwingError

    try:
        measure(args)
    except DraftwingError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(importlib.import_module(f"peers.{FILES[sys.argv[2]]}").PEER)
    else:
        main()
