"""Check on a GPU that drafts do not change a text, and what runs as a CUDA graph.

    python benchmarks/gpu/check.py --json NAME.json

Every case is a dtype, a temperature, a draft, a budget and a batch size. Its texts are compared with those of baseline
decoding, one prompt at a time. In float32 all must be equal. In bfloat16 the matrix products of different batch sizes
may round differently, so that a near-tie can break the other way: the script reports how near the tie was, as the
difference of the two tokens' scores at the first place where the texts differ. ``--device cpu`` tests the script.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from speed import check_device

import draftwing as dw
from draftwing.cli import screen
from draftwing.errors import DraftwingError
from draftwing.lab.machine import describe_machine
from draftwing.noise import KeyedNoise
from draftwing.runtime.graphs import RECORDED
from draftwing.shipped import TOY
from draftwing.text.prompts import shipped_prompts

CASES = {  # name: draft and budget
    "eagle3 chain": ("eagle3", dw.Budget(4)),
    "eagle3 tree": ("eagle3", dw.Budget(8, 10, 60)),
    "eagle3 auto": ("eagle3", None),
    "eagle1 tree": ("eagle1", dw.Budget(6, 8, 40)),
    "draft model chain": ("draft", dw.Budget(4)),
    "lookup auto": ("lookup", None),
}
TIE = {"float32": 1e-4, "bfloat16": 0.25}  # scores nearer than this may swap: some roundings of a logit of 20 to 40

Texts = list[list[int]]


def texts_of(lm: dw.LM, prompts: Texts, tokens: int, temperature: float, batch: int) -> tuple[Texts, dw.Stats]:
    engine, stats = dw.Engine(lm.decoder(), max_batch=batch), dw.Stats()
    requests = [
        engine.submit(prompt, dw.Sampling(max_tokens=tokens, ignore_eos=True, temperature=temperature, seed=seed))
        for seed, prompt in enumerate(prompts)
    ]
    for step in engine.steps():
        stats.add(step)
    return [request.token_ids for request in requests], stats


def gap_of(lm: dw.LM, prompt: list[int], ours: list[int], theirs: list[int], temperature: float, seed: int) -> float:
    """Return the difference of the scores of two texts' tokens, at the first place where they differ."""
    place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    ids = torch.tensor([[*prompt, *ours[:place]]], device=lm.target.device)
    scores = lm.target.score(ids).logits[0, -1].float()
    if temperature:
        noise = KeyedNoise(lm.target.vocab_size, lm.target.device).at(seed, ids.shape[1])
        scores = scores / temperature + noise
    return abs(float(scores[ours[place]] - scores[theirs[place]]))


def check(
    folder: Path, device: torch.device, dtypes: list[str], tokens: int, num_prompts: int, batches: list[int]
) -> Iterator[dict[str, Any]]:
    for dtype in dtypes:
        plain = dw.load(folder / "target", "none", dtype=dtype, device=str(device))
        prompts = [plain.encode(text) for text in shipped_prompts(num_prompts)]
        for temperature in (0.0, 1.0):
            expected: Texts = []
            cases = {"baseline": ("none", dw.Budget(0)), **CASES}
            for name, (draft, budget) in cases.items():
                path = str(folder / draft) if (folder / draft).exists() else draft
                maker = dw.loading.load_drafter(path, plain.target, plain.tokenizer, device=str(device))
                lm = dw.LM(plain.target, plain.tokenizer, maker, budget=budget)
                for batch in sorted({1, *batches}) if name == "baseline" else batches:
                    recorded, began = RECORDED.num, time.perf_counter()
                    with warnings.catch_warnings(record=True) as caught:
                        warnings.simplefilter("always")
                        try:
                            texts, stats = texts_of(lm, prompts, tokens, temperature, batch)
                        except Exception as error:  # report it, and check the other cases
                            yield {"dtype": dtype, "T": temperature, "case": name, "batch": batch, "error": repr(error)}
                            continue
                    expected = expected or texts
                    different = [i for i, text in enumerate(texts) if text != expected[i]]
                    gaps = [gap_of(plain, prompts[i], expected[i], texts[i], temperature, i) for i in different]
                    yield {
                        "dtype": dtype,
                        "T": temperature,
                        "case": name,
                        "batch": batch,
                        "texts": len(texts),
                        "different": len(different),
                        "largest_gap": max(gaps, default=0.0),
                        "tau": stats.tau,
                        "recorded": RECORDED.num - recorded,
                        "seconds": time.perf_counter() - began,
                        "warnings": sorted({str(warning.message) for warning in caught}),
                    }


def main(
    folder: Annotated[Path, typer.Argument(help="Folder with target/ and its drafts.")] = TOY,
    device: str = "cuda",
    dtypes: Annotated[str, typer.Option(help="Comma-separated.")] = "float32,bfloat16",
    tokens: Annotated[int, typer.Option(min=1)] = 64,
    num_prompts: Annotated[int, typer.Option("--prompts", min=1)] = 16,
    batches: Annotated[str, typer.Option(help="Comma-separated.")] = "1,16",
    output: Annotated[Path | None, typer.Option("--json", help="Write the results here, one by one.")] = None,
) -> None:
    """Compare the texts of all drafts with baseline decoding, and count CUDA graphs."""
    try:
        where = check_device(device)
        table = Table("dtype", "T", "case", "batch", "different", "largest gap", "tau", "graphs", "s")
        results: list[dict[str, Any]] = []
        at = {"machine": describe_machine(), "date": datetime.now(UTC).date().isoformat()}
        for result in check(folder, where, dtypes.split(","), tokens, num_prompts, list(map(int, batches.split(",")))):
            results.append(result)
            Console(stderr=True).print(result, soft_wrap=True)
            if output is not None:
                output.write_text(json.dumps({"results": results, **at}, indent=1) + "\n")
            if "error" not in result:
                table.add_row(
                    result["dtype"], f"{result['T']:g}", result["case"], str(result["batch"]),
                    f"{result['different']} of {result['texts']}", f"{result['largest_gap']:.2g}",
                    f"{result['tau']:.2f}", str(result["recorded"]), f"{result['seconds']:.1f}",
                )  # fmt: skip
    except DraftwingError as error:
        screen.error(str(error))
        raise typer.Exit(2) from None
    Console(width=110).print(table)
    failed = [r for r in results if "error" in r or (r["different"] and r["largest_gap"] > TIE.get(r["dtype"], 0.0))]
    for result in failed:
        screen.error(f"{result}")
    for text in sorted({text for result in results for text in result.get("warnings", ())}):
        Console().print(f"warning: {text}")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
