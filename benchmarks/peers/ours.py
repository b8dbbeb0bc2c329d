"""Draftwing's own worker."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from peers.channel import Run, Stopwatch

QUANTIZE = {"int8": "int8", "int4": "q4"}
# Our mode: what ``draftwing.loading`` calls it, or the key of the job under which its folder stands.
DRAFTS = {"plain": "none", "lookup": "lookup"}


class Draftwing:
    """``draftwing.loading`` with the automatic budget."""

    def prepare(self, job: dict[str, Any]) -> dict[str, Any]:
        return {}

    def load(self, job: dict[str, Any]) -> dict[str, Any]:
        import torch

        import draftwing as dw

        torch.set_num_threads(job["threads"])
        self.lm = dw.load(
            job["target"],
            DRAFTS.get(job["mode"]) or job["draft"],
            quantize=QUANTIZE.get(job["precision"]),
            device="cpu",
        )
        self.lm.decoder()  # measures once what steps cost here, if that is not known yet
        return {"versions": {name: version(name) for name in ("draftwing", "torch")}}

    def generate(self, prompt: list[int], max_tokens: int) -> Run:
        import draftwing as dw

        watch = Stopwatch()
        engine = dw.Engine(self.lm.decoder())
        engine.submit(prompt, dw.Sampling(max_tokens=max_tokens, ignore_eos=True))
        for step in engine.steps():
            watch.take(step.rows[0].token_ids)
        return watch.stop(max_tokens, watch.steps - 1)


PEER = Draftwing()
