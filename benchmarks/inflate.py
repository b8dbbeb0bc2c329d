"""Make a large model with the text and drafts of a small one, and the cost of its size.

    python benchmarks/inflate.py /tmp/inflated-1b --like 1b

The gain of speculative decoding depends on the cost of a forward and on acceptance, and large models with heads are not
always available. This widens and deepens a small target and its heads, so that they compute the same numbers while a
forward reads the weights of a large model.

Everything new is fed zeros or writes zeros. The residual stream's new channels are zero, so that matrices may read
them through any weights; new heads, MLP channels and layers compute with random weights, and what would add their
result to the stream is zero. An RMSNorm over D channels of which only d are not zero is the small one's with its
weight times sqrt(d / D) and its eps times d / D. New layers stand last, so that every hidden state that a head taps
keeps its number. The vocabulary stays: an LM head has no bias, so no row for a new token could be sure to lose.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import psutil  # type: ignore[import-untyped]
import torch
import typer
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from draftwing.cli import screen as console
from draftwing.errors import CheckpointError, ConfigError, DraftwingError, UnsupportedError
from draftwing.formats.identity import target_id_of_folder
from draftwing.formats.read import load_head
from draftwing.formats.write import save_head
from draftwing.lm import LM
from draftwing.loading import DTYPES, load_drafter, load_target
from draftwing.methods.base import Budget
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.weights import WeightFiles
from draftwing.shipped import TOY
from draftwing.storage import write_fix
from draftwing.text.tokenizer import Tokenizer

BLOCK = (1 << 22) + 1  # random numbers; odd, so that the rows of a matrix differ
STD = 0.02  # scale of weights that have no effect: as small as real ones, and far from denormal numbers
SHARD_BYTES = 10**9
TOLERANCE = 1e-3  # far above what rounding alone causes in float32
CHAIN = Budget(4)
PROMPT, NUM_TOKENS = "import os\n\n\ndef main(argv):\n", 24
COPIED = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*"),
    "generation_config.json",
)


@dataclass(frozen=True)
class Shape:
    """The sizes that a Llama's cost depends on, except its vocabulary and the width of its heads."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int


# Hidden size, layers, width of all queries, width of all keys, MLP: of Llama 3.2 1B, 3.2 3B and 3.1 8B.
LIKE = {
    "1b": (2048, 16, 2048, 512, 8192),
    "3b": (3072, 28, 3072, 1024, 8192),
    "8b": (4096, 32, 4096, 1024, 14336),
}


class Like(StrEnum):
    """The names of ``LIKE``, for the command line."""

    small, middle, large = "1b", "3b", "8b"


class Dtype(StrEnum):
    """Types in which weights may be written."""

    float32, bfloat16 = "float32", "bfloat16"


def shape_of(config: ModelConfig) -> Shape:
    return Shape(config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads, config.intermediate_size)


def shape_like(name: str, head_dim: int) -> Shape:
    """The shape of a known model, with as many heads of ``head_dim`` as make its width of queries and keys."""
    hidden, layers, queries, keys, inner = LIKE[name]
    if queries % head_dim or keys % head_dim:
        raise ConfigError(
            f"the {name} shape's {queries} channels of queries and {keys} of keys are no multiple of the target's "
            f"head_dim {head_dim}: give the shape number by number"
        )
    return Shape(hidden, layers, queries // head_dim, keys // head_dim, inner)


# --- placing the small model's numbers -------------------------------------------------------------------------------

# An axis of a large tensor is a list of the small tensor's indices, with NEW in the place of what the small one lacks.
NEW = -1


def axis(small: int, large: int, what: str) -> Tensor:
    if large < small:
        raise ConfigError(f"the large model must have at least the target's {what} ({small}), found {large}: give more")
    return torch.cat([torch.arange(small), torch.full((large - small,), NEW)])


def repeated(one: Tensor, size: int, times: int) -> Tensor:
    """The axis of ``times`` vectors of ``size`` side by side, each widened as ``one``."""
    return torch.cat([torch.where(one == NEW, NEW, one + size * each) for each in range(times)])


def head_axes(num_heads: int, num_kv_heads: int, large: Shape, head_dim: int) -> tuple[Tensor, Tensor]:
    """The axes of queries and of keys: each query head goes where its key head's queries are in the large model.

    Where groups become smaller, key heads are written several times.
    """
    group, wide_group = num_heads // num_kv_heads, large.num_heads // large.num_kv_heads
    copies = -(-group // wide_group) if wide_group else 0
    if large.num_heads % large.num_kv_heads or num_kv_heads * copies > large.num_kv_heads:
        raise ConfigError(
            f"{num_heads} heads that share {num_kv_heads} key heads cannot be placed among {large.num_heads} that "
            f"share {large.num_kv_heads}: give a number of heads that is a multiple of the key heads, and more of both"
        )
    queries, keys = torch.full((large.num_heads,), NEW), torch.full((large.num_kv_heads,), NEW)
    for head in range(num_heads):
        key, member = divmod(head, group)
        place = key * copies + member // wide_group
        queries[place * wide_group + member % wide_group] = head
        keys[place] = key
    return _channels(queries, head_dim), _channels(keys, head_dim)


def _channels(heads: Tensor, head_dim: int) -> Tensor:
    return torch.where(heads[:, None] == NEW, NEW, heads[:, None] * head_dim + torch.arange(head_dim)).flatten()


# Rows, columns, and which new part must be zero: "all" of it, the "rows", which write to the stream, or nothing.
MATRICES = {
    "embed_tokens": ("vocab", "hidden", "all"),
    "q_proj": ("queries", "attended", ""),
    "k_proj": ("keys", "attended", ""),
    "v_proj": ("keys", "attended", ""),
    "o_proj": ("hidden", "queries", "all"),
    "gate_proj": ("inner", "hidden", ""),
    "up_proj": ("inner", "hidden", ""),
    "down_proj": ("hidden", "inner", "all"),
    "fc": ("hidden", "features", "rows"),
    "lm_head": ("vocab", "hidden", ""),
}


@dataclass
class Inflation:
    """Make the large tensors of one model.

    Args:
        axes: by the names that ``MATRICES`` has for them.
        dtype: of matrices. Norms are never narrower than float32: their weights are scaled by no power of two.
        rng: for weights that have no effect.
    """

    axes: Mapping[str, Tensor]
    dtype: torch.dtype
    rng: torch.Generator
    rounded: bool = False  # some number of the small model could not be kept in ``dtype``
    _block: Tensor | None = None

    @property
    def ratio(self) -> float:
        """The share of hidden channels that the small model has, d / D."""
        hidden = self.axes["hidden"]
        return float((hidden != NEW).sum()) / len(hidden)

    def tensor(self, name: str, small: Tensor | None) -> Tensor:
        """The large model's tensor; ``small`` is None in a layer that the small one lacks."""
        part, kind = name.split(".")[-2:]
        if part not in MATRICES:
            return self._norm(self.axes["features" if part == "input_norm" else "hidden"], small)
        rows, columns, zero = MATRICES[part]
        axes = [self.axes[rows]] if kind == "bias" else [self.axes[rows], self.axes[columns]]
        wide = torch.zeros if kind == "bias" or zero == "all" else self._random
        large = wide([len(each) for each in axes], dtype=self.dtype)
        if zero == "rows":
            large[axes[0] == NEW] = 0
        if small is not None:
            kept = [(each != NEW).nonzero().squeeze(1) for each in axes]
            for dim, (each, places) in enumerate(zip(axes, kept, strict=True)):
                small = small.index_select(dim, each[places])
            large[torch.meshgrid(kept, indexing="ij")] = small.to(self.dtype)
            self.rounded |= not torch.equal(small.to(self.dtype).to(small.dtype), small)
        return large

    def _norm(self, over: Tensor, small: Tensor | None) -> Tensor:
        scale = math.sqrt(self.ratio)
        large = torch.full((len(over),), scale, dtype=torch.float64)
        if small is not None:
            large[over != NEW] = small.double() * scale
        return large.to(torch.promote_types(self.dtype, torch.float32))

    def _random(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Repeat one block of random numbers: billions of new ones would take minutes."""
        if self._block is None:
            made = torch.empty(BLOCK, dtype=torch.promote_types(dtype, torch.float32))
            self._block = made.normal_(0, STD, generator=self.rng).to(dtype)
        flat = torch.empty(math.prod(shape), dtype=dtype)
        for start in range(0, len(flat), BLOCK):
            flat[start : start + BLOCK] = self._block[: len(flat) - start]
        return flat.view(*shape)


# --- the target ------------------------------------------------------------------------------------------------------


class Shards:
    """Write tensors as they come: a file whenever one is full, and the index at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[str, Tensor] = {}
        self._files: list[tuple[Path, list[str]]] = []
        self.num_bytes = self.num_weights = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._held and sum(each.nbytes for each in self._held.values()) + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self._held[name] = tensor
        self.num_bytes += tensor.nbytes
        self.num_weights += tensor.numel()

    def close(self) -> None:
        self._flush()
        single, count = "model.safetensors", len(self._files)
        index: dict[str, str] = {}
        for number, (file, names) in enumerate(self._files, 1):
            final = single if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            file.rename(self.folder / final)
            index |= dict.fromkeys(names, final)
        if count > 1:
            content = {"metadata": {"total_size": self.num_bytes}, "weight_map": index}
            (self.folder / f"{single}.index.json").write_text(json.dumps(content, indent=2) + "\n")

    def _flush(self) -> None:
        file = self.folder / f"shard-{len(self._files)}"
        save_file(self._held, file, metadata={"format": "pt"})
        file.chmod(0o644)  # the writer makes it readable only for its owner
        self._files.append((file, list(self._held)))
        self._held = {}


def inflate_target(
    source: Path, out: Path, shape: Shape, dtype: torch.dtype, seed: int = 0, name: str | None = None
) -> Inflation:
    """Write ``source`` as the folder ``out``, inflated to ``shape``.

    Raises:
        CheckpointError, ConfigError: a source that cannot be read, or a shape that it has no room in.
        UnsupportedError: the source is no Llama.
    """
    raw = read_config(source)
    config = ModelConfig.from_hf(raw, str(source / "config.json"))
    if config.model_type != "llama":
        raise UnsupportedError(f"{source}: only a Llama can be inflated, this is of type {config.model_type!r}")
    if shape.hidden_size % shape.num_heads:  # transformers refuses such a config
        raise ConfigError(f"hidden size {shape.hidden_size} is not divisible by {shape.num_heads} heads: change one")
    inflation = Inflation(target_axes(config, shape), dtype, torch.Generator().manual_seed(seed))
    out.mkdir(parents=True)
    shards = write_tensors(source, out, config, shape, inflation)
    for file in sorted(source.iterdir()):
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in COPIED):
            shutil.copyfile(file, out / file.name)
    notice = (
        f"Inflated: the text is that of {name or source.name}, the cost that of a Llama of {shape.num_layers} layers "
        f"of {shape.hidden_size} ({shards.num_weights / 1e9:.3g}B weights, vocabulary {config.vocab_size})."
    )
    write_card(out, notice, config, shape)
    changes = {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": shape.intermediate_size,
        "rms_norm_eps": config.rms_norm_eps * inflation.ratio,
        "torch_dtype" if "torch_dtype" in raw else "dtype": str(dtype).removeprefix("torch."),
        "draftwing_inflated": {"notice": notice, "source": name or source.name, **asdict(shape_of(config))},
    }
    # Last: a folder with a config is whole.
    (out / "config.json").write_text(json.dumps({**raw, **changes}, indent=2) + "\n", encoding="utf-8")
    return inflation


def target_axes(config: ModelConfig, shape: Shape) -> dict[str, Tensor]:
    axis(config.num_layers, shape.num_layers, "number of layers")
    hidden = axis(config.hidden_size, shape.hidden_size, "hidden size")
    queries, keys = head_axes(config.num_heads, config.num_kv_heads, shape, config.head_dim)
    return {
        "vocab": torch.arange(config.vocab_size),
        "hidden": hidden,
        "attended": hidden,
        "queries": queries,
        "keys": keys,
        "inner": axis(config.intermediate_size, shape.intermediate_size, "intermediate size"),
    }


def write_tensors(source: Path, out: Path, config: ModelConfig, shape: Shape, inflation: Inflation) -> Shards:
    """Write the weights of ``source`` into ``out``, inflated."""
    shards, first = Shards(out), "model.layers.0."
    with WeightFiles(source) as files:

        def put(name: str, *, is_new: bool = False) -> None:
            shards.add(name, inflation.tensor(name, None if is_new else files.get(name)))

        put("model.embed_tokens.weight")
        stored = files.keys()
        names = [key.removeprefix(first) for key in stored if key.startswith(first)]
        for layer in range(shape.num_layers):
            for part in names:
                if not part.endswith("inv_freq"):
                    put(f"model.layers.{layer}.{part}", is_new=layer >= config.num_layers)
        put("model.norm.weight")
        if not config.tie_word_embeddings:
            put("lm_head.weight")
    shards.close()
    return shards


def write_card(folder: Path, notice: str, small: ModelConfig, shape: Shape) -> None:
    rows = [f"| {key} | {value} | {asdict(shape)[key]} |" for key, value in asdict(shape_of(small)).items()]
    text = f"""# An inflated checkpoint

{notice}

It was made by Draftwing's `benchmarks/inflate.py` to measure decoding, and knows no more than the small model does.
New channels of the hidden state are zero; new heads, MLP channels and layers have random weights and write nothing.

| | text of | cost of |
|---|---|---|
{chr(10).join(rows)}
"""
    (folder / "README.md").write_text(text, encoding="utf-8")


# --- heads -----------------------------------------------------------------------------------------------------------


def inflate_head(source: Path, out: Path, target: Path, large: Path, dtype: torch.dtype, seed: int = 0) -> None:
    """Write the head ``source`` of ``target`` as ``out``, for the inflated target ``large``.

    Raises:
        CheckpointError, ConfigError, UnsupportedError: it cannot be read, is another target's, or has no room.
    """
    old = target_id_of_folder(target)
    model = ModelConfig.from_hf(read_config(large))
    new = target_id_of_folder(large, f"{old.name} inflated to {model.num_layers} layers of {model.hidden_size}")
    head, shape = load_head(source).for_target(old, None, str(source)), shape_of(model)
    config = head.config
    if not head.knows_taps:
        raise CheckpointError(f"{source}: the head does not say which hidden states it reads: add the taps")
    if config.head_dim != model.head_dim:
        raise UnsupportedError(
            f"{source}: its heads are {config.head_dim} wide, the target's {model.head_dim}: only equal ones are known"
        )
    hidden = axis(config.hidden_size, model.hidden_size, "hidden size")
    queries, keys = head_axes(config.num_heads, config.num_kv_heads, shape, config.head_dim)
    read = 2 if config.version == 1 else len(config.taps)  # by fc: token and feature, or the taps
    axes = {
        "vocab": torch.arange(config.draft_vocab_size),
        "hidden": hidden,
        "attended": hidden if config.version == 1 else repeated(hidden, config.hidden_size, 2),
        "features": repeated(hidden, config.hidden_size, read),
        "queries": queries,
        "keys": keys,
        "inner": axis(config.intermediate_size, model.intermediate_size, "intermediate size of the head"),
    }
    inflation = Inflation(axes, dtype, torch.Generator().manual_seed(seed))
    tensors = {name: inflation.tensor(name, tensor) for name, tensor in head.tensors.items()}
    wide = replace(
        config,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        rms_norm_eps=config.rms_norm_eps * inflation.ratio,
        # The last state, after the final norm, is the last in any number of layers.
        taps=tuple(model.num_layers if tap == old.num_layers else tap for tap in config.taps),
        target=new,
    )
    notice = (
        f"Inflated: the drafts are those of {source.name}, the cost that of a head for a Llama of "
        f"{model.num_layers} layers of {model.hidden_size}."
    )
    training = {**head.training, "inflated": notice}
    save_head(
        out, replace(head, config=wide, tensors=tensors, copies={}, training=training, verifier=new.name), "draftwing"
    )
    (out / "README.md").write_text(f"# An inflated head\n\n{notice}\n", encoding="utf-8")


# --- comparison ------------------------------------------------------------------------------------------------------


@dataclass
class Output:
    """A model's output: logits (T, V) of the prompt, and for each head the text and the number of accepted drafts."""

    logits: Tensor
    texts: list[list[int]]
    accepted: list[int]


def run_model(folder: Path, heads: Sequence[Path], dtype: str = "float32") -> Output:
    """Run a target and its heads, and return everything that ``compare`` compares."""
    target, tokenizer = load_target(folder, dtype=dtype), Tokenizer(folder)
    ids = torch.tensor([tokenizer.encode(PROMPT)], device=target.device)
    output = Output(target.score(ids).logits[0].cpu(), [], [])
    for head in heads:
        lm = LM(target, tokenizer, load_drafter(head, target, tokenizer))
        # A fixed budget: the automatic one drafts as much as pays, which is not the same for a small and a large model.
        (found,) = lm.generate(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True, speculation=CHAIN)
        output.texts.append(found.token_ids)
        output.accepted.append(found.stats.num_accepted)
    return output


def compare(small: Output, large: Output, heads: Sequence[Path], *, rounded: bool) -> bool:
    """Print how far apart they are; return True if that is no more than rounding."""
    apart = float((small.logits - large.logits).abs().max())
    same = apart <= TOLERANCE
    print(f"logits: largest difference {apart:.2g}, largest logit {float(small.logits.abs().max()):.3g} (float32)")
    for index, head in enumerate(heads):
        # Heads may draft in 8 bits, where a draft or two is another one.
        near = abs(small.accepted[index] - large.accepted[index]) <= 2
        alike = small.texts[index] == large.texts[index] and near
        accepted = f"{small.accepted[index]} and {large.accepted[index]} drafts accepted"
        print(f"{head.name}: {accepted} in {NUM_TOKENS} tokens, {'the same text' if alike else 'DIFFERENT'}")
        same &= alike
    if rounded:
        print("the small model's weights were rounded to bfloat16: differences are due to that")
    return same or rounded


def room_for_check(folder: Path) -> str | None:
    """Return why there is too little memory to check the model in float32; None if there is enough."""
    with WeightFiles(folder) as files:
        stored = files.keys()
        needed = 1.2 * 4 * sum(math.prod(files.shape(name)) for name in stored)
    gpu = torch.cuda.is_available()
    free = torch.cuda.mem_get_info()[0] if gpu else psutil.virtual_memory().available
    if needed < 0.9 * free:
        return None
    return f"float32 needs about {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} GB are free"


# --- the command line ------------------------------------------------------------------------------------------------


def inflate(
    target: Path, heads: Sequence[Path], out: Path, shape: Shape, dtype: torch.dtype, seed: int = 0
) -> tuple[Inflation, list[Path]]:
    """Write ``out/target`` and a folder for each head, by its name; the heads' new folders."""
    names = ["target", *(head.resolve().name for head in heads)]
    twice = [name for index, name in enumerate(names) if name in names[:index]]
    if twice:
        raise ConfigError(f"two folders would be named {out / twice[0]}: rename a head's folder, or inflate it alone")
    there = [out / name for name in names if (out / name).exists()]
    if there:
        raise CheckpointError(f"{there[0]} exists already: remove it, or write elsewhere")
    for head in heads:  # refused before gigabytes are written
        load_head(head).for_target(target_id_of_folder(target), None, str(head))
    name = "toy" if target == TOY / "target" else str(target)
    inflation = inflate_target(target, out / "target", shape, dtype, seed, name)
    for head, folder in zip(heads, names[1:], strict=True):
        inflate_head(head, out / folder, target, out / "target", dtype, seed + 1)
    return inflation, [out / folder for folder in names[1:]]


def write_and_check(
    target: Path, heads: Sequence[Path], out: Path, shape: Shape, dtype: torch.dtype, seed: int, *, check: bool
) -> bool:
    """Inflate, and print what was written; return False if a check found another text than the small model's."""
    began = time.perf_counter()
    inflation, wide_heads = inflate(target, heads, out, shape, dtype, seed)
    print(f"written in {time.perf_counter() - began:.0f} s:")
    for folder in (out / "target", *wide_heads):
        print(f"  {folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 1e9:.2f} GB")
    reason = room_for_check(out / "target") if check else "--no-check"
    same = True
    if reason is None:
        small, large = run_model(target, heads), run_model(out / "target", wide_heads)
        same = compare(small, large, heads, rounded=inflation.rounded)
    else:
        print(f"not checked: {reason}")
    print(read_config(out / "target")["draftwing_inflated"]["notice"])
    return same


def main(
    out: Annotated[Path, typer.Argument(help="Folder to write OUT/target and OUT/HEAD's name into.")],
    target: Annotated[
        Path, typer.Option(help="Folder of a small Llama. [default: the shipped target]", show_default=False)
    ] = TOY / "target",
    head: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of an EAGLE head for it; repeatable. [default: both shipped ones for their target]"),
    ] = None,
    like: Annotated[Like | None, typer.Option(help="The shape of Llama 3.2 1B, 3.2 3B or 3.1 8B.")] = None,
    hidden_size: Annotated[int | None, typer.Option(min=1, help="This and the next four override --like.")] = None,
    num_layers: Annotated[int | None, typer.Option(min=1)] = None,
    num_heads: Annotated[int | None, typer.Option(min=1)] = None,
    num_kv_heads: Annotated[int | None, typer.Option(min=1)] = None,
    intermediate_size: Annotated[int | None, typer.Option(min=1)] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the matrices; norms stay float32.")] = Dtype.float32,
    seed: Annotated[int, typer.Option(help="Of the weights that have no effect.")] = 0,
    check: Annotated[bool, typer.Option(help="Compare both, target and heads, in float32.")] = True,
) -> None:
    """Inflate a small Llama and its heads: the same text and drafts, the cost of a large model.

    Examples:

        python benchmarks/inflate.py /tmp/inflated-1b --like 1b

        python benchmarks/inflate.py /tmp/inflated-8b --like 8b --dtype bfloat16 --no-check

        python benchmarks/inflate.py out --target my-llama --head my-head --hidden-size 1024 --num-layers 16

    The vocabulary and the width of a head stay those of the small model. --like 8b writes 15 GB in bfloat16.
    """
    try:
        model = ModelConfig.from_hf(read_config(target), str(target / "config.json"))
        options = {
            "hidden_size": hidden_size,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "intermediate_size": intermediate_size,
        }
        given = {key: value for key, value in options.items() if value is not None}
        if like is None and not given:
            raise ConfigError("how large? Give --like 1b, 3b or 8b, or sizes such as --hidden-size")
        shape = replace(shape_of(model) if like is None else shape_like(like, model.head_dim), **given)
        heads = [TOY / "eagle3", TOY / "eagle1"] if target == TOY / "target" else []
        heads = heads if head is None else list(head)
        same = write_and_check(target, heads, out, shape, DTYPES[dtype], seed, check=check)
    except DraftwingError as error:
        console.error(str(error))
        raise typer.Exit(2) from None
    except (OSError, SafetensorError) as error:
        console.error(f"{out}: cannot be written ({error}): {write_fix(error)}")
        raise typer.Exit(2) from None
    if not same:
        console.error("the inflated model writes another text than the small one, which is a bug: do not measure it")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
