"""The worker of vLLM's CPU build."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers.channel import Run

# As in ``vllm_handover.py``, which says why.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
METHODS = {"lookup": "ngram", "eagle3": "eagle3", "eagle1": "eagle"}
COUNTERS = {"drafts": "vllm:spec_decode_num_drafts", "accepted": "vllm:spec_decode_num_accepted_tokens"}
LONGEST_NGRAM = 3
CONTEXT = 2048


class Vllm:
    """``vllm.LLM``, one prompt at a time."""

    def prepare(self, job: dict[str, Any]) -> dict[str, Any]:
        if job["precision"] == "fp32":
            return {"model": job["target"]}
        from peers.int8_file import write_int8

        folder = Path(job["cache"]) / "int8"
        if not folder.exists():
            write_int8(Path(job["target"]), folder)
        return {"model": str(folder)}

    def load(self, job: dict[str, Any]) -> dict[str, Any]:
        os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(job["threads"]))
        from vllm import LLM

        options: dict[str, Any] = {}
        self.drafts = job["mode"] != "plain"
        if self.drafts:
            options["speculative_config"] = {
                "method": METHODS[job["mode"]],
                "num_speculative_tokens": job["draft_tokens"],
                **({"prompt_lookup_max": LONGEST_NGRAM} if job["mode"] == "lookup" else {"model": job["draft"]}),
            }
        self.llm = LLM(
            model=job["model"],
            dtype="float32",
            max_model_len=CONTEXT,
            enforce_eager=job["eager"],
            max_num_seqs=1,
            enable_prefix_caching=False,
            disable_log_stats=False,  # off, which is the default, there are no counters
            seed=0,
            **options,
        )
        return {
            "versions": {name: version(name) for name in ("vllm-cpu", "torch", "transformers")},
            "notes": ["eager" if job["eager"] else "compiled"],
        }

    def _counters(self) -> dict[str, int]:
        told = {each.name: each.value for each in self.llm.get_metrics() if hasattr(each, "value")}
        return {name: int(told.get(theirs, 0)) for name, theirs in COUNTERS.items()}

    def generate(self, prompt: list[int], max_tokens: int) -> Run:
        import time

        from vllm import SamplingParams

        before = self._counters()
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        drafted = {name: count - before[name] for name, count in self._counters().items()}
        ids = list(output.outputs[0].token_ids)
        first = getattr(output.metrics, "first_token_latency", None) or None
        # Prefill makes one token; what is accepted beyond ``max_tokens`` counts as accepted, and so the second bound.
        forwards = max(len(ids) - 1 - drafted["accepted"], drafted["drafts"])
        return Run(ids, seconds, first, 1 if first else None, forwards)


PEER = Vllm()
