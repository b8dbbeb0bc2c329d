"""The worker of OpenVINO GenAI; optimum-intel converts the checkpoint."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers.channel import Run

CACHE_GIB = 1
LONGEST_NGRAM = 3
DEPTH, BRANCHES = 5, 4  # shape of its EAGLE-3 trees
# As float32 as it gets: by default it keeps keys and values in 8 bits.
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


class GenAI:
    """``LLMPipeline`` on the CPU; int8 and int4 use its defaults, but no groups longer than 64."""

    def prepare(self, job: dict[str, Any]) -> dict[str, Any]:
        if job["precision"] == "gguf":  # it reads such files itself
            return {"model": str((Path(job["target"]) / "model.gguf").resolve())}
        found = {"model": str(converted(Path(job["target"]), Path(job["cache"]), job["precision"]))}
        if job["draft"] is not None:
            draft = converted(Path(job["draft"]), Path(job["draft_cache"]), job["precision"])
            if job["mode"].startswith("eagle3"):
                write_taps(draft, taps_of(Path(job["draft"]), Path(job["target"])))
            found["draft_model"] = str(draft)
        return found

    def load(self, job: dict[str, Any]) -> dict[str, Any]:
        import openvino_genai as genai

        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": job["threads"]}
        if job["precision"] == "fp32":
            properties |= FLOAT32
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.enable_prefix_caching = False  # or a prompt that it has seen would cost nothing
        options: dict[str, Any] = {"scheduler_config": scheduler}
        self.options: dict[str, Any] = {"ignore_eos": True, "do_sample": False, "apply_chat_template": False}
        if job["mode"] != "plain":
            self.options["num_assistant_tokens"] = job["draft_tokens"]
        if job["mode"] == "lookup":
            options["prompt_lookup"] = True
            self.options["max_ngram_size"] = LONGEST_NGRAM
        elif job["draft"] is not None:
            options["draft_model"] = genai.draft_model(job["draft_model"], "CPU", **properties)
        if job["mode"] == "eagle3-tree":
            self.options |= {"tree_depth": DEPTH, "branching_factor": BRANCHES}
        self.pipeline = genai.LLMPipeline(job["model"], "CPU", **options, **properties)
        names = ("openvino-genai", "openvino", "optimum-intel", "nncf", "transformers")
        return {"versions": {name: version(name) for name in names}}

    def generate(self, prompt: list[int], max_tokens: int) -> Run:
        import time

        import numpy as np
        import openvino
        import openvino_genai as genai

        ids = np.array([prompt], np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        config = genai.GenerationConfig(**self.options, max_new_tokens=max_tokens)
        began = time.perf_counter()
        found = self.pipeline.generate(inputs, config)
        seconds = time.perf_counter() - began
        raw = found.perf_metrics.raw_metrics
        first = raw.m_times_to_first_token[0] / 1e6  # microseconds
        steps = list(raw.m_batch_sizes)  # tokens of each step, the first being the prefill
        return Run(list(found.tokens[0]), seconds, first, steps[0], len(steps) - 1)


def converted(folder: Path, out: Path, precision: str) -> Path:
    """Convert the checkpoint in ``folder`` to OpenVINO's IR below ``out``, unless that exists; return its folder."""
    done = out / precision
    if done.exists():
        return done
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig, OVWeightQuantizationConfig

    # Said outright, since optimum-intel quantises models of more than a billion weights unasked. Its groups of 128 do
    # not divide every width.
    quantised = {"int8": {"bits": 8}, "int4": {"bits": 4, "group_size": 64}}
    config = (
        OVConfig(quantization_config=OVWeightQuantizationConfig(**quantised[precision]))
        if precision in quantised
        else OVConfig(dtype="fp32")
    )
    architectures = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    partial = done.with_name(done.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    main_export(
        str(folder),
        partial,
        task="text-generation-with-past",
        library_name="transformers",
        ov_config=config,
        convert_tokenizer="Eagle3" not in architectures[0],  # a pair of models is compared by their tokenizers
        trust_remote_code="Eagle3" in architectures[0],  # its own EAGLE-3 net comes by way of remote code
    )
    partial.replace(done)
    return done


def taps_of(head: Path, target: Path) -> list[int]:
    """Return the hidden states that an exported head reads, numbered as the inputs of layers."""
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    named = {**config, **(config.get("eagle_config") or {})}.get("eagle_aux_hidden_state_layer_ids")
    layers = json.loads((target / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    return list(named or (2, layers // 2, layers - 3))


def write_taps(model: Path, taps: list[int]) -> None:
    """Write which hidden states the head reads into its model file.

    OpenVINO numbers them as outputs of layers, one less. They must be in the model's description, because the property
    ``hidden_layers_list`` must be a vector of 32-bit numbers, which Python cannot pass.
    """
    file = model / "openvino_model.xml"
    text = file.read_text(encoding="utf-8")
    before, mark, after = text.partition('<eagle3_mode value="True" />')
    told = f'\n\t\t<hidden_layers_list value="{" ".join(str(tap - 1) for tap in taps)}" />'
    if "hidden_layers_list" not in after:
        file.write_text(before + mark + told + after, encoding="utf-8")


PEER = GenAI()
