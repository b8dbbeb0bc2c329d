"""Distil the toy draft model: a 0.4M Llama of the target's tokenizer, by forward KL from the target.

    python recipes/demo_draft.py train  --target src/draftwing/shipped/toy/target --out build/draft
    python recipes/demo_draft.py export --out build/draft --to src/draftwing/shipped/toy

The student reads the target's own training windows and learns the target's whole distribution at each token
(forward KL, as in DistillSpec 2310.08461). Its embedding starts as the target's principal components.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import corpus
import training
from demo_target import DEVICE, VOCAB, bits_per_byte, save

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
Out = Annotated[Path, typer.Option(help="Folder of the run: checkpoint, metrics.")]
TargetRun = Annotated[Path, typer.Option(help="Folder of the target's run: its tokenizer and tokens.")]


def build_model() -> LlamaForCausalLM:
    return training.llama(VOCAB, hidden=96, intermediate=256, layers=2, heads=3, kv_heads=1)


@torch.no_grad()
def start_from(student: LlamaForCausalLM, teacher: torch.nn.Module) -> None:
    """The embedding as the principal components of the target's, at the student's own scale."""
    matrix = teacher.get_input_embeddings().weight.float()
    _, _, directions = torch.linalg.svd(matrix, full_matrices=False)
    reduced = matrix @ directions[: student.config.hidden_size].T
    student.model.embed_tokens.weight.copy_(reduced / reduced.std() * 0.05)


@app.command()
def train(
    target: Annotated[Path, typer.Option(help="The target's Hugging Face folder.")] = Path(
        "src/draftwing/shipped/toy/target"
    ),
    target_run: TargetRun = Path("build/target"),
    out: Out = Path("build/draft"),
    iterations: Annotated[int, typer.Option(help="Training updates; may be changed on resume.")] = 500,
    every: Annotated[int, typer.Option(help="Iterations between two checkpoints.")] = 50,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = DEVICE,
    compiled: Annotated[bool, typer.Option(help="torch.compile the loss.")] = True,
) -> None:
    """Distil, or resume. Ctrl-C writes a checkpoint first."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer, stream = training.load_tokens(target_run, VOCAB)
    windows = training.Windows(stream, tokenizer.token_to_id(corpus.BOS))
    teacher = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16, trust_remote_code=False)
    teacher = teacher.to(device).eval().requires_grad_(False)
    student = build_model().to(device)
    start_from(student, teacher)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(input_ids=x, use_cache=False).logits.float().log_softmax(-1)
        found = student(input_ids=x, use_cache=False).logits.float().log_softmax(-1)
        return F.kl_div(found.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True)

    training.run(student, loss_of, windows, out, iterations, every, compiled)


CARD = """# toy/draft

A Llama of {millions:.1f}M parameters (2 layers, hidden 96) with the tokenizer of the toy target, distilled from it
by forward KL on the target's training text (`recipes/demo_draft.py`, {iterations} iterations of {tokens} tokens). It is
the draft model `causal-lm` of the toy. Held out: {bits_per_byte} bits per byte. Apache-2.0.
"""


@app.command()
def export(
    out: Out = Path("build/draft"),
    target_run: TargetRun = Path("build/target"),
    to: Annotated[Path, typer.Option(help="Folder that gets draft/.")] = Path("src/draftwing/shipped/toy"),
) -> None:
    """Write the bf16 folder with its model card."""
    tokenizer, _ = training.load_tokens(target_run, VOCAB)
    state = torch.load(out / "checkpoint.pt", map_location="cpu")
    model = build_model()
    model.load_state_dict(state["model"])
    found = bits_per_byte(model.eval(), tokenizer)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    save(model, tokenizer, to / "draft", torch.bfloat16)
    card = CARD.format(millions=millions, iterations=state["iteration"], tokens=training.TOKENS_PER_ITERATION, **found)
    (to / "draft" / "README.md").write_text(card)
    typer.echo(f"wrote {to / 'draft'}: {found}")


if __name__ == "__main__":
    app()
