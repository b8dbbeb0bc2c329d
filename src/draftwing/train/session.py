"""A training run from names to a head: load the target and the data, make the net, and train it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch

from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.formats.card import write_card, write_stored
from draftwing.formats.identity import chat_template_hash, head_id, target_id
from draftwing.lab.forecast import FILE, HeldOut, collect, fitting
from draftwing.lab.machine import describe_machine
from draftwing.loading import load_target, training_dtype
from draftwing.methods.method import NewNet
from draftwing.methods.net import DraftNet, TargetId
from draftwing.methods.registry import method_of_folder, method_of_net
from draftwing.models.catalogue import default_model
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.resolve import resolve
from draftwing.models.target import Target
from draftwing.remote import OnProgress, Phase, download, public_name
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data import (
    Batches,
    Corpus,
    DataSet,
    DialogueEncoder,
    coverage_of,
    download_sources,
    draft_vocabulary,
    find_files,
    held_out,
    read_examples,
    split,
)
from draftwing.train.evaluate import Evaluation, held_out_prompts, validation_prompts
from draftwing.train.feature_cache import CachedFeatures, FeatureCache
from draftwing.train.features import FeatureSource, OnlineFeatures, OnPolicyFeatures
from draftwing.train.options import TrainOptions
from draftwing.train.stream import StreamedBatches
from draftwing.train.trainer import CHECKPOINT, Progress, Trainer, read_metrics

T = TypeVar("T")
START_TOKENS = 16384  # on which a new net's weights are solved before it is trained, or one epoch


@dataclass
class Session:
    """A run that is ready to start."""

    trainer: Trainer  # the training loop
    target: Target
    tokenizer: Tokenizer
    training: Corpus
    validation: Corpus
    coverage: float  # share of the training tokens in the draft vocabulary
    is_streamed: bool = False  # ``training`` is only the beginning of the data
    evaluation: Evaluation | None = None  # None without held-out data

    def run(self) -> Progress:
        return self.trainer.run()

    def describe(self) -> str:
        """Return one line about the net and the data."""
        net, options = self.trainer.net, self.trainer.options
        millions = sum(p.numel() for p in net.parameters()) / 1e6
        vocabulary = f"{net.num_draft_tokens} of {net.config.vocab_size} tokens"
        return (
            f"{options.method} head of {millions:.2f}M parameters for {self.target.name}, draft vocabulary "
            f"{vocabulary} ({self.coverage:.1%} of the data), {self.training.num_tokens:,} tokens to train on"
            f"{' at first, then more of the stream' if self.is_streamed else ''}, {self.validation.num_tokens:,} held "
            f"out"
        )

    def collect_held_out(self, num_prompts: int, on_progress: OnProgress | None = None) -> Path | None:
        """Collect the head's held-out statistics, from which `draftwing predict` forecasts.

        Returns their file, which may exist before; None if no prompt is held out, or none is short enough.
        """
        folder, target = self.trainer.out / "head", self.target
        with suppress(CheckpointError):  # no statistics yet, or of other weights
            HeldOut.read(folder)
            return folder / FILE
        prompts = fitting(validation_prompts(self.validation, num_prompts), target)
        if not prompts:
            return None
        method, identity = self.trainer.options.net_method, head_id(folder)
        net = method.read(folder, target.embedding.plain().float(), target.head, target_id(target, self.tokenizer))
        new_drafter = partial(method.drafter, net, target, folder.name, identity)
        return collect(target, new_drafter, identity, prompts, on_progress=on_progress).write(folder)

    def final_metrics(self) -> dict[str, Any]:
        """Return the coverage, and the results of the last evaluation."""
        last: dict[str, Any] = next(
            (line for line in reversed(read_metrics(self.trainer.out)) if "val_loss" in line), {}
        )
        return {"coverage": self.coverage, **{key: last[key] for key in ("val_loss", "tau", "alpha") if key in last}}


@dataclass(frozen=True)
class RunFiles:
    target: str | Path | None  # folder, name or hub id; None for the shipped one
    data: Sequence[str | Path]  # files, folders and URLs, see ``read_examples``
    cache: str | Path | None = None  # train on its rows, and read the target's features from it, instead of ``data``
    initial: Path | None = None  # a head to start from, in any layout; the run has its shape and draft vocabulary
    licence: str | None = None  # SPDX identifier for the head's card; None if unknown


def prepare(
    files: RunFiles,
    options: TrainOptions,
    out: Path,
    *,
    dtype: str | None = None,
    device: str | None = None,
    layers: bool = True,
    phase: Phase = lambda title: nullcontext(lambda done, total: None),
) -> Session:
    """Load the target and the data, and make the net.

    Args:
        dtype: of the target; None for ``training_dtype``.
        layers: False loads only the target's embedding, final norm and LM head: a cache has the features, and tau is
            not measured.
        phase: ``phase(title)`` is entered for each part that takes long, and returns a function to call with the amount
            done and the total.
    """
    for package in ("accelerate", "matplotlib"):
        try:
            import_module(package)
        except ImportError as error:
            raise ConfigError(
                f"training needs the package {package} ({error}): run pip install 'draftwing[train]'"
            ) from error
    from accelerate import Accelerator

    if not layers and (files.cache is None or options.own_text):
        raise ConfigError(
            "training: the target's layers are needed without a cache, and for own_text: give --cache and no "
            "--own-text, or load all of the target (drop --ends-only)"
        )
    if files.cache is not None and files.data:
        raise ConfigError("training: a cache holds its own texts: give --cache without --data")
    usual = training_dtype(device)
    precision = options.precision or ("bf16" if usual == torch.bfloat16 else "no")
    accelerator = Accelerator(mixed_precision=precision, cpu=device == "cpu")
    torch.manual_seed(options.seed)
    folder = resolve(files.target)
    tokenizer = Tokenizer(folder)
    if files.cache is None:
        download_sources(files.data, phase)
    else:
        download([files.cache], phase)
    with phase("reading the data") as on_data:
        training, validation, cache, held_cache, stream = _read_data(files, options, tokenizer, on_data)
    name = str(files.target or default_model())
    with phase("loading the target"):
        target = load_target(folder, dtype=dtype or usual, device=device, name=name, prepack=False, layers=layers)
    identity = target_id(target, tokenizer)
    if cache is not None:
        cache.check(target, identity)
    if files.initial is None:
        net = _new_net(target, folder, options, training, identity)
    else:
        net = _net_of_head(files.initial, target, options, identity)
    coverage = coverage_of(training, net.target_ids, target.vocab_size)
    target_ids = net.target_ids
    if options.loss_vocab_size is not None:
        if net.head is not None:
            raise ConfigError(
                f"training: loss_vocab_size belongs to nets that use the target's LM head, and a net of method "
                f"{options.method!r} trains its own: leave it out, or give draft_vocab_size"
            )
        target_ids = draft_vocabulary(training, target.vocab_size, options.loss_vocab_size, target.eos_ids)
        target_ids = target_ids.to(target.device)
    taps = net.config.taps
    source = _features(target, stream or training, options, taps, cache)
    if options.own_text:
        writer = method_of_net(net).as_target(net)
        source = OnPolicyFeatures(source, target, taps, writer, options.own_text, options.seed)
    if files.initial is None and not (out / CHECKPOINT).exists():  # a checkpoint has later weights
        num_batches = min(-(-START_TOKENS // options.tokens_per_batch), source.num_batches_per_epoch)
        with phase("first weights: scoring text and solving, steps") as on_progress:
            scored = map(source.batch, range(num_batches))
            method_of_net(net).start(net, target.head, _reported(scored, num_batches + 1, on_progress))
            on_progress(num_batches + 1, num_batches + 1)
    evaluate = None
    if validation.num_tokens:
        held = _features(target, validation, options, taps, held_cache)
        evaluate = Evaluation(target, validation, held, options)
    describe = {
        **{key: value for key, value in options.to_dict().items() if value is not None},
        "precision": precision,
        "coverage": coverage,
        "chat_template": chat_template_hash(folder),
        "data": [Path(public_name(source)).name for source in files.data],  # without the folders
        **(
            {"streamed": True}
            if stream
            else {"tokens_in_data": training.num_tokens, "num_dialogues": len(training.examples)}
        ),
        "tokens_held_out": validation.num_tokens,
        **({} if files.licence is None else {"licence": files.licence}),
        **({} if files.initial is None else {"initial": {"name": files.initial.name, **training_of(files.initial)}}),
        "machine": describe_machine(),
    }
    trainer = Trainer(
        net, target.head, target_ids, source, options, out,
        evaluate=evaluate, accelerator=accelerator, describe=describe, stream=stream,
    )  # fmt: skip
    if accelerator.is_main_process:
        prompts = held_out_prompts(validation, tokenizer, options.keep_prompts)

        def add_to_head(head: Path) -> None:
            write_stored(head, prompts)
            write_card(head, seconds=trainer.seconds)  # not in the config, which equals that of an uninterrupted run

        trainer.on_saved = add_to_head
    return Session(trainer, target, tokenizer, training, validation, coverage, stream is not None, evaluate)


def _reported(items: Iterable[T], total: int, on_progress: OnProgress) -> Iterator[T]:
    """Yield the items, and report each that has been made."""
    on_progress(0, total)
    for done, item in enumerate(items, 1):
        on_progress(done, total)
        yield item


# --- data ------------------------------------------------------------------------------------------------------------


def _read_data(
    files: RunFiles, options: TrainOptions, tokenizer: Tokenizer, on_data: OnProgress | None
) -> tuple[Corpus, Corpus, FeatureCache | None, FeatureCache | None, StreamedBatches | None]:
    """Return training and held-out data, the caches of their features if there are any, and the data's stream.

    Of data that is streamed, which is any with a ``DataSet``, the first two are parts of the first block.
    """
    if files.cache is None:
        sources = find_files(files.data)
        if not any(isinstance(source, DataSet) for source in sources):
            corpus = read_examples(files.data, tokenizer, max_length=options.max_length, on_progress=on_data)
            return *split(corpus, options.validation_share, options.seed), None, None, None
        stream = StreamedBatches(
            sources,
            DialogueEncoder(tokenizer, options.max_length),
            options.tokens_per_batch,
            options.seed,
            validation_share=options.validation_share,
            on_progress=on_data,
        )
        return stream.training, stream.validation, None, None, stream
    cache = FeatureCache(files.cache).cut(options.max_length)
    cache, held_cache = split_cache(cache, options.validation_share, options.seed)
    return cache.corpus, held_cache.corpus, cache, held_cache, None


def split_cache(cache: FeatureCache, share: float, seed: int) -> tuple[FeatureCache, FeatureCache]:
    """Split a cache's rows into training and held-out rows, like ``data.split``."""
    held = held_out([row.ids for row in cache.corpus.examples], share, seed)
    return cache.part(~held), cache.part(held)


def _features(
    target: Target,
    data: Corpus | StreamedBatches,
    options: TrainOptions,
    taps: tuple[int, ...],
    cache: FeatureCache | None,
) -> FeatureSource:
    tokens, seed = options.tokens_per_batch, options.seed
    if cache is None:
        batches = Batches(data, tokens, options.max_length, seed) if isinstance(data, Corpus) else data
        return OnlineFeatures(target, batches, taps)
    return CachedFeatures(cache, taps, tokens, seed, device=target.device, dtype=target.dtype)


# --- the net ---------------------------------------------------------------------------------------------------------


def _new_net(target: Target, folder: Path, options: TrainOptions, training: Corpus, identity: TargetId) -> DraftNet:
    """Make a net with random weights in float32, of the target's own shape."""
    size = options.draft_vocab_size or target.vocab_size
    target_ids = draft_vocabulary(training, target.vocab_size, size, target.eos_ids)
    shape = _target_shape(target, folder)
    net: DraftNet = options.net_method.new(
        NewNet(
            like=shape,
            taps=_taps(options, shape.num_layers),
            target=identity,
            embedding=target.embedding.plain().float(),
            head=target.head,
            target_ids=None if len(target_ids) == target.vocab_size else target_ids.to(target.device),
            settings=options.settings,
            folder=folder,
        )
    )
    return net


def _taps(options: TrainOptions, num_layers: int) -> tuple[int, ...]:
    usual, taps = options.net_method.taps(num_layers), options.taps
    if taps is None:
        return usual
    if usual in ((), (num_layers,)):
        reads = "the last hidden state" if usual else "no hidden states"
        raise ConfigError(f"training: a net of method {options.method!r} reads {reads}: leave out taps")
    if list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] <= num_layers:
        raise ConfigError(
            f"training: taps must be different numbers from 0 to {num_layers}, in order, found {list(taps)}: {usual} "
            f"are usual"
        )
    return taps


def _target_shape(target: Target, folder: Path) -> ModelConfig:
    """Return the target's shape; for architectures that the lean decoder does not have, a Llama of their size."""
    config, where = read_config(folder), str(folder / "config.json")
    try:
        return dataclasses.replace(ModelConfig.from_hf(config, where), vocab_size=target.vocab_size)
    except UnsupportedError:
        heads = config.get("num_attention_heads") or config.get("n_head")
        if not isinstance(heads, int) or target.hidden_size % heads:
            raise
        llama = {
            "model_type": "llama",
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "intermediate_size": config.get("intermediate_size") or 4 * target.hidden_size,
            "num_hidden_layers": target.num_layers,
            "num_attention_heads": heads,
            "max_position_embeddings": min(target.max_length, 1 << 17),
        }
        return ModelConfig.from_hf(llama, where)


def _net_of_head(folder: Path, target: Target, options: TrainOptions, identity: TargetId) -> DraftNet:
    """Read the head that the run starts from; options that shape a net must agree with it."""
    method = method_of_folder(folder)
    if method is not options.net_method:
        raise ConfigError(
            f"{folder} holds a draft of kind {method.name!r}, and method {options.method!r} trains another: start from "
            f"another head, from nothing, or choose another method"
        )
    net: DraftNet = options.net_method.read(folder, target.embedding.plain().float(), target.head, identity)
    for name in ("num_layers", "hidden_size", "num_heads"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"training: {name} shapes a new model, and this run starts from {folder}, which has its own: leave it "
                f"out, or start from nothing"
            )
    of_net = {"taps": tuple(net.config.taps), "draft_vocab_size": net.num_draft_tokens}
    if "inputs" in options.settings:
        of_net["inputs"] = net.config.inputs
    for name, stored in of_net.items():
        value = getattr(options, name)
        if value and value != stored:
            raise ConfigError(
                f"{folder} is a head with {name} {stored!r}, and this run has {value!r}: start from another head, from "
                f"nothing, or drop the option"
            )
    return net


def training_of(folder: Path) -> dict[str, int]:
    """Return the updates of a head's training, and the tokens that it and its predecessors have seen; {} if unknown."""
    match read_config(folder).get("draftwing"):
        case {
            "training": {
                "iterations": int(updates), "tokens_per_batch": int(tokens), "accumulation": int(batches), **training
            }
        }:  # fmt: skip
            initial = training.get("initial")
            before = initial.get("tokens_seen", 0) if isinstance(initial, dict) else 0
            return {"iterations": updates, "tokens_seen": updates * tokens * batches + before}
        case _:
            return {}
