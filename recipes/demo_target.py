"""Train the toy target: a Llama of 1.6M parameters that writes Python, from the standard library's source.

    python recipes/demo_target.py train  --out build/target            # resumes where it was stopped
    python recipes/demo_target.py report --out build/target            # held-out loss, and does it loop?
    python recipes/demo_target.py export --out build/target --to src/draftwing/shipped

Deep and narrow on purpose: a draft of one layer is then cheap beside it.
"""

from __future__ import annotations

import json
import math
import platform
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM

import corpus
import training

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)

VOCAB = 2048
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Out = Annotated[Path, typer.Option(help="Folder of the run: tokenizer, tokens, checkpoint, metrics.")]


def build_model() -> LlamaForCausalLM:
    return training.llama(VOCAB, hidden=128, intermediate=320, layers=8, heads=4, kv_heads=2)


@app.command()
def train(
    out: Out = Path("build/target"),
    iterations: Annotated[int, typer.Option(help="Training updates; may be changed on resume.")] = 2000,
    every: Annotated[int, typer.Option(help="Iterations between two checkpoints.")] = 50,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = DEVICE,
    compiled: Annotated[bool, typer.Option(help="torch.compile the loss (1.3x on a CPU).")] = True,
) -> None:
    """Train, or resume. Ctrl-C writes a checkpoint first; kill -9 loses at most --every iterations."""
    tokenizer, stream = training.load_tokens(out, VOCAB)
    windows = training.Windows(stream, tokenizer.token_to_id(corpus.BOS))
    model = build_model().to(device)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        hidden = model.model(input_ids=x, use_cache=False).last_hidden_state
        return F.cross_entropy(model.lm_head(hidden).float().flatten(0, 1), y.flatten())

    training.run(model, loss_of, windows, out, iterations, every, compiled)


def trained(out: Path) -> LlamaForCausalLM:
    model = build_model()
    model.load_state_dict(torch.load(out / "checkpoint.pt", map_location="cpu")["model"])
    return model.eval()


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, tokenizer: Tokenizer, window: int = 1024) -> dict[str, float]:
    """Held-out loss over whole files, in windows that share half their tokens so that each token has a context."""
    nats = num_tokens = num_bytes = 0.0
    for _, text in corpus.documents(held_out=True):
        ids = torch.tensor([tokenizer.encode(text).ids])
        num_bytes += len(text.encode())
        num_tokens += ids.shape[1] - 1
        for start in range(0, max(ids.shape[1] - 1 - window // 2, 1), window // 2):
            piece = ids[:, start : start + window + 1]
            fresh = 0 if start == 0 else window // 2
            logits = model(piece[:, :-1]).logits[:, fresh:]
            nats += F.cross_entropy(logits.flatten(0, 1), piece[:, 1 + fresh :].flatten(), reduction="sum").item()
    return {
        "bits_per_byte": round(nats / math.log(2) / num_bytes, 4),
        "nats_per_token": round(nats / num_tokens, 4),
        "bytes_per_token": round(num_bytes / num_tokens, 4),
    }


def repeated_share(texts: list[list[int]], n: int = 8) -> float:
    """Share of n-grams that stood earlier in the same text: looping text flatters every drafter."""
    repeated = total = 0
    for ids in texts:
        seen: set[tuple[int, ...]] = set()
        for start in range(len(ids) - n + 1):
            gram = tuple(ids[start : start + n])
            repeated += gram in seen
            total += 1
            seen.add(gram)
    return round(repeated / max(total, 1), 4)


def write_texts(folder: Path, temperature: float, num: int) -> list[list[int]]:
    """What an exported model writes after the held-out prompts."""
    import draftwing as dw

    lm = dw.load(folder, draft="none")
    found = lm.generate(corpus.prompts(num), temperature=temperature, max_tokens=256, ignore_eos=True)
    return [each.token_ids for each in found]


@app.command()
def report(
    out: Out = Path("build/target"),
    num: Annotated[int, typer.Option(help="Prompts for the share of repeated 8-grams.")] = 40,
) -> None:
    """Held-out bits per byte of the checkpoint, and the share of repeated 8-grams in what it writes."""
    tokenizer, _ = training.load_tokens(out, VOCAB)
    model = trained(out)
    result: dict[str, float] = bits_per_byte(model, tokenizer)
    folder = out / "float32"
    save(model, tokenizer, folder, torch.float32)
    held_out = [tokenizer.encode(text).ids for _, text in corpus.documents(held_out=True)]
    result["repeated_8grams_real_text"] = repeated_share(
        [ids[i : i + 256] for ids in held_out for i in range(0, len(ids), 256)]
    )
    for temperature in (0.0, 1.0):
        result[f"repeated_8grams_T{temperature:.0f}"] = repeated_share(write_texts(folder, temperature, num))
    (out / "report.json").write_text(json.dumps(result, indent=2) + "\n")
    typer.echo(json.dumps(result, indent=2))


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, to: Path, dtype: torch.dtype) -> None:
    """A Hugging Face folder: safetensors, config, generation config, tokenizer."""
    to.mkdir(parents=True, exist_ok=True)
    model = model.to(dtype)
    model.config.dtype = dtype
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    model.save_pretrained(to)
    tokenizer.save(str(to / "tokenizer.json"))
    special = {"bos_token": corpus.BOS, "eos_token": corpus.EOS, "pad_token": corpus.PAD}
    settings = {**special, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048}
    (to / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


CARD = """# toy

A Llama of {millions:.1f}M parameters (8 layers, hidden 128, byte-level BPE of {vocab} tokens) that writes Python. It
is the target of Draftwing's tests: small enough for a repository, and available offline. Measure speed on real models.

- Trained by `recipes/demo_target.py` on the standard library's source of Python {python} ({iterations} iterations of
  {tokens} tokens, {epochs:.1f} epochs, bf16 autocast, two CPU cores); files held out by name: `recipes/held_out.txt`.
- Held out: **{bits_per_byte} bits per byte** ({nats_per_token} nats per token, {bytes_per_token} bytes per token).
- Share of 8-grams that stood earlier in the same text of 256 tokens: {t0} written greedily, {t1} at temperature 1,
  {real} in the held-out files themselves. Looping text flatters every drafter; read greedy figures with that in mind.
- Trained on windows of up to 1024 tokens. It knows Python's look, not its meaning: do not run what it writes.
- The training text is under the Python Software Foundation License; these weights are under Apache-2.0.
"""


@app.command()
def export(
    out: Out = Path("build/target"),
    to: Annotated[Path, typer.Option(help="Folder that gets toy/target/ and prompts.jsonl.")] = Path(
        "src/draftwing/shipped"
    ),
) -> None:
    """Write the bf16 folder with its model card, and the held-out prompts. Run ``report`` first."""
    tokenizer, stream = training.load_tokens(out, VOCAB)
    result = json.loads((out / "report.json").read_text())
    state = torch.load(out / "checkpoint.pt", map_location="cpu")
    model = trained(out)
    save(model, tokenizer, to / "toy" / "target", torch.bfloat16)
    card = CARD.format(
        millions=sum(p.numel() for p in model.parameters()) / 1e6,
        vocab=VOCAB,
        python=platform.python_version(),
        iterations=state["iteration"],
        tokens=training.TOKENS_PER_ITERATION,
        epochs=state["consumed"] / len(stream),
        t0=result["repeated_8grams_T0"],
        t1=result["repeated_8grams_T1"],
        real=result["repeated_8grams_real_text"],
        **{key: result[key] for key in ("bits_per_byte", "nats_per_token", "bytes_per_token")},
    )
    (to / "toy" / "target" / "README.md").write_text(card)
    lines = [json.dumps({"prompt": prompt}) for prompt in corpus.prompts(100)]
    (to / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    typer.echo(f"wrote {to / 'toy' / 'target'} and {to / 'prompts.jsonl'}")


if __name__ == "__main__":
    app()
