"""Check that a head learns the same from the hidden states that vLLM wrote as from our own.

    python benchmarks/vllm_handover.py --setup              # once: vLLM's CPU build
    python benchmarks/vllm_states.py

The toy answers prompts, vLLM reads the dialogues with ``extract_hidden_states``, and EAGLE-3 is trained on both caches
from one start, in float32, with all dialogues in every update. vLLM's connector copies through memory pinned for a
GPU and waits for the GPU's events, which a CPU has not: both are replaced in the worker. The rest is vLLM's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_handover import ROOT, ask_vllm, env_python, read_job

LAYERS = (2, 4, 5, 8)  # EAGLE-3's taps in the toy, and the output of its last layer
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"


# --- vLLM's side -----------------------------------------------------------------------------------------------------


def work() -> None:
    """Read a job on standard input, and write hidden states to its folder."""
    job, answer = read_job()

    from importlib import import_module

    from vllm import LLM, SamplingParams

    _run_without_gpu(import_module(CONNECTOR).ExampleHiddenStatesConnector)
    llm = LLM(
        model=job["target"],
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=8,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": job["layers"]}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": job["out"], "use_synchronization_lock": False},
        },
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    # In one process states are written in the step after a request's last one: the first prompt is read again.
    for prompts in (job["prompts"], job["prompts"][:1]):
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    with answer:
        json.dump({"done": True}, answer)


def _run_without_gpu(connector: Any) -> None:
    import torch

    submit = connector._submit_async_write

    def submit_on_cpu(self: Any, pending: Any) -> None:
        empty_like = torch.empty_like
        torch.empty_like = lambda *args, pin_memory=False, **options: empty_like(*args, **options)
        try:
            submit(self, pending)
        finally:
            torch.empty_like = empty_like
        type(self._req_copy_events[pending.req_id]).query = lambda event: True

    connector._submit_async_write = submit_on_cpu


# --- our side --------------------------------------------------------------------------------------------------------


def compare(args: argparse.Namespace, work_dir: Path) -> None:
    import torch

    import draftwing as dw
    from draftwing.formats.identity import target_id
    from draftwing.loading import load_target
    from draftwing.models.resolve import resolve
    from draftwing.text.prompts import shipped_prompts
    from draftwing.text.tokenizer import Tokenizer
    from draftwing.train.data import Batches, read_examples
    from draftwing.train.feature_cache import write_cache
    from draftwing.train.options import TrainOptions
    from draftwing.train.session import RunFiles, prepare
    from draftwing.train.vllm_states import import_states

    prompts = [str(prompt) for prompt in shipped_prompts(args.num_prompts)]
    answers = dw.load("toy").generate(prompts, max_tokens=args.max_tokens)
    pairs = zip(prompts, answers, strict=True)
    data = work_dir / "answers.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt, "completion": a.text}) + "\n" for prompt, a in pairs))

    folder, taps = resolve("toy"), LAYERS[:-1]
    tokenizer = Tokenizer(folder)
    target = load_target(folder, dtype="float32", device="cpu", prepack=False)
    corpus = read_examples([data], tokenizer, max_length=1024)
    num_tokens = sum(len(example.ids) for example in corpus.examples)
    job = {
        "target": str(folder),
        "layers": LAYERS,
        "out": str(work_dir / "states"),
        "prompts": [example.ids.tolist() for example in corpus.examples],
    }
    ask_vllm(args.env, job, Path(__file__))
    own = {"identity": target_id(target, tokenizer), "dtype": torch.float32}
    done = import_states(work_dir / "states", work_dir / "vllm", target, taps, dialogues=corpus.examples, **own)
    print(f"{done.num_rows} dialogues from vLLM, {done.num_missing} missing; the LM head predicts {done.agreement:.0%}")
    write_cache(work_dir / "own", target, Batches(corpus, num_tokens, 1024), taps, **own)

    options = TrainOptions(
        "eagle3", iterations=args.updates, max_length=1024, tokens_per_batch=1024 * len(corpus.examples),
        validation_share=0, precision="no", taps=taps,
    )  # fmt: skip
    sessions = [
        prepare(
            RunFiles("toy", [], cache=work_dir / name), options, work_dir / f"run-{name}",
            dtype="float32", device="cpu", layers=name == "own",
        )
        for name in ("own", "vllm")
    ]  # fmt: skip
    sessions[1].trainer.net.load_state_dict(sessions[0].trainer.net.state_dict())
    losses: list[list[float]] = [[], []]
    for session, found in zip(sessions, losses, strict=True):
        session.trainer.on_progress = lambda step, found=found: found.append(step.metrics["loss"])
        session.run()
    for ours, theirs in zip(*losses, strict=True):
        print(f"loss {ours:.6f} on our states, {theirs:.6f} on vLLM's, difference {abs(theirs - ours) / ours:.1e}")
    if done.num_missing or any(abs(theirs - ours) > 1e-5 * ours for ours, theirs in zip(*losses, strict=True)):
        sys.exit("the losses differ by more than 1e-5")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--env", type=Path, default=ROOT / "build" / "vllm-env", help="vLLM's virtual environment")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--updates", type=int, default=5)
    args = parser.parse_args()
    if not env_python(args.env).exists():
        sys.exit(f"there is no vLLM in {args.env}: run benchmarks/vllm_handover.py --setup")
    with tempfile.TemporaryDirectory() as folder:
        compare(args, Path(folder))


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        work()
    else:
        main()
