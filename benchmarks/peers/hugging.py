"""The worker of transformers: ``generate``, with an assistant model or with prompt lookup."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import Any

from peers.channel import PeerError, Run, Stopwatch


class Transformers:
    """``AutoModelForCausalLM`` in float32."""

    def prepare(self, job: dict[str, Any]) -> dict[str, Any]:
        if job["precision"] != "fp32":
            raise PeerError("no int8 weights on a CPU without other packages (torchao, bitsandbytes)")
        return {}

    def load(self, job: dict[str, Any]) -> dict[str, Any]:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(job["threads"])
        load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32, trust_remote_code=False)
        self.model = load(job["target"]).eval()
        self.options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        if job["mode"] == "draft-lm":
            assistant = load(job["draft"]).eval()
            # A draft stops at the target's end token otherwise, and here nothing does.
            assistant.generation_config.eos_token_id = None
            self.options["assistant_model"] = assistant
            if job["draft_tokens"]:
                assistant.generation_config.num_assistant_tokens = job["draft_tokens"]
        elif job["mode"] == "lookup":
            self.options["prompt_lookup_num_tokens"] = job["draft_tokens"]
        self.forwards = 0
        self.model.model.register_forward_hook(self._count)
        return {"versions": {name: version(name) for name in ("transformers", "torch")}}

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def generate(self, prompt: list[int], max_tokens: int) -> Run:
        import torch

        ids = torch.tensor([prompt])
        streamer = _Streamer()
        self.forwards = 0
        with torch.inference_mode():
            self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, streamer=streamer, **self.options
            )
        return streamer.watch.stop(max_tokens, self.forwards - 1)


class _Streamer:
    """A streamer: ``generate`` calls it with the prompt first, and then with every step's tokens."""

    def __init__(self) -> None:
        self.watch = Stopwatch()
        self.prompt = True

    def put(self, tokens: Any) -> None:
        if self.prompt:
            self.prompt = False
        else:
            self.watch.take(tokens.reshape(-1).tolist())

    def end(self) -> None:
        pass


PEER = Transformers()
