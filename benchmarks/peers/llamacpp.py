"""The worker of llama.cpp, through llama-cpp-python."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers.channel import Run, Stopwatch

MIN_CONTEXT = 2048


class LlamaCpp:
    """GGUF in float32 with a float32 cache; Q8_0 and given files with llama.cpp's default float16 cache."""

    def prepare(self, job: dict[str, Any]) -> dict[str, Any]:
        from peers.gguf_file import write_gguf

        if job["precision"] == "gguf":
            return {"model": str((Path(job["target"]) / "model.gguf").resolve())}
        file = Path(job["cache"]) / ("Q8_0.gguf" if job["precision"] == "int8" else "F32.gguf")
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_gguf(Path(job["target"]), file, job["precision"])
        return {"model": str(file)}

    def load(self, job: dict[str, Any]) -> dict[str, Any]:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = LlamaPromptLookupDecoding(num_pred_tokens=job["draft_tokens"]) if job["mode"] == "lookup" else None
        cache = (
            {} if job["precision"] != "fp32" else {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
        )
        self.llama = llama_cpp.Llama(
            job["model"],
            n_ctx=MIN_CONTEXT,
            n_threads=job["threads"],
            n_threads_batch=job["threads"],
            n_gpu_layers=0,
            draft_model=draft,
            verbose=False,
            **cache,
        )
        self.forwards = 0
        self._eval = self.llama.eval
        self.llama.eval = self._count  # type: ignore[method-assign]
        system = llama_cpp.llama_print_system_info().decode()
        return {
            "versions": {name: version(name) for name in ("llama_cpp_python", "gguf")},
            "notes": [" ".join(system.split())],
        }

    def _count(self, tokens: Any) -> None:
        self.forwards += 1
        self._eval(tokens)

    def generate(self, prompt: list[int], max_tokens: int) -> Run:
        self.llama.reset()  # or a prompt that it has seen would cost nothing
        self.forwards = 0
        watch = Stopwatch()
        for token in self.llama.generate(prompt, temp=0.0):
            watch.take([token])
            if len(watch.token_ids) == max_tokens:
                break
        return watch.stop(max_tokens, self.forwards - 1)


PEER = LlamaCpp()
