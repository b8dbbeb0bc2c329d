"""A training run from names to a head: load the target and the data, make the net, train, draw the curves."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from draftwing.decode import Decoder
from draftwing.engine import Engine
from draftwing.errors import CheckpointError, ConfigError
from draftwing.formats.card import write_card, write_stored
from draftwing.formats.identity import chat_template_hash, head_id, target_id
from draftwing.lab.forecast import FILE, HeldOut, collect, fitting
from draftwing.lab.machine import describe_machine
from draftwing.loading import load_target
from draftwing.methods.base import Budget, Drafter
from draftwing.methods.net import DraftNet, TargetId
from draftwing.methods.registry import method_of_net
from draftwing.models.catalogue import default_model
from draftwing.models.resolve import resolve
from draftwing.models.target import Target
from draftwing.sampling import Sampling
from draftwing.stats import Stats
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.begin import net_of_head, new_net, training_before
from draftwing.train.calibrate import fit_calibration
from draftwing.train.curves import read_metrics
from draftwing.train.data import Batches, Corpus, DraftVocabulary, coverage_of, held_out, read_examples, split
from draftwing.train.feature_cache import CachedFeatures, CacheInfo, FeatureCache
from draftwing.train.features import FeatureSource, OnlineFeatures, OwnText
from draftwing.train.held_out import held_out_prompts
from draftwing.train.loss import Teacher, Truth, loss_of
from draftwing.train.options import TrainOptions
from draftwing.train.trainer import Progress, Trainer

PROMPT_LENGTH = 128  # tokens of a document from which tau is measured
VALIDATION_BATCHES = 4
ENTRIES = 16384  # tokens on which a new net is solved before it is trained


@dataclass
class Session:
    """A run that is ready to start.

    Attributes:
        trainer: its loop.
        training, validation: the data.
        coverage: share of the training tokens in the draft vocabulary.
    """

    trainer: Trainer
    target: Target
    tokenizer: Tokenizer
    training: Corpus
    validation: Corpus
    coverage: float

    def run(self) -> Progress:
        """Train; see ``Trainer.run``."""
        return self.trainer.run()

    def describe(self) -> str:
        """One line: what is trained, on what."""
        net, options = self.trainer.net, self.trainer.options
        millions = sum(p.numel() for p in net.parameters()) / 1e6
        vocabulary = f"{net.num_draft_tokens} of {net.config.vocab_size} tokens"
        return (
            f"{options.method} head of {millions:.2f}M parameters for {self.target.name}, draft vocabulary "
            f"{vocabulary} ({self.coverage:.1%} of the data), {self.training.num_tokens:,} tokens to train on, "
            f"{self.validation.num_tokens:,} held out"
        )

    def collect_held_out(self, num_prompts: int, on_progress: Callable[[int, int], None] | None = None) -> Path | None:
        """Collect the written head's held-out statistics, from which `draftwing predict` forecasts.

        Args:
            on_progress: called with (done, total) tokens.

        Returns:
            Their file, made now or before; None where no prompt is held out, or none is short enough.
        """
        folder, target = self.trainer.out / "head", self.target
        with suppress(CheckpointError):  # there are none yet, or they are of other weights
            HeldOut.read(folder)
            return folder / FILE
        prompts = fitting(validation_prompts(self.validation, num_prompts), target)
        if not prompts:
            return None
        kind = self.trainer.options.kind
        own = target_id(target, self.tokenizer)
        net = kind.read(folder, target.embedding.plain().float(), target.head, own)
        identity = head_id(folder)

        def new_drafter() -> Drafter:
            return kind.drafter(net, target, folder.name, identity)

        return collect(target, new_drafter, identity, prompts, on_progress=on_progress).write(folder)

    def final_metrics(self) -> dict[str, Any]:
        """The last evaluation's, and coverage."""
        judged = [each for each in read_metrics(self.trainer.out) if "val_loss" in each]
        last = judged[-1] if judged else {}
        return {
            "coverage": self.coverage,
            **{name: last[name] for name in ("val_loss", "tau", "alpha") if name in last},
        }


@dataclass(frozen=True)
class RunFiles:
    """What a run reads.

    Attributes:
        target: folder, name or hub id; None is the shipped one.
        data: files and folders, see ``read_examples``.
        exclude: a file of names to leave out of folders.
        cache: from which the run then reads the target's features, and what it trains on. Where the cache held out
            some of its data (``data cache``), that is read from ``data`` to evaluate; else the run holds out some of
            the cache's rows, and needs no ``data``.
        initial: a head to start from, in any layout; its shape and draft vocabulary are then this run's.
        licence: of the head that comes of it, an SPDX identifier for its card; None where nothing is said.
    """

    target: str | Path | None
    data: Sequence[str | Path]
    exclude: Path | None = None
    cache: Path | None = None
    initial: Path | None = None
    licence: str | None = None


def check_packages() -> None:
    """Raise ConfigError if a package of the extra ``train`` is missing."""
    for package in ("accelerate", "tensorboard", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"training needs the package {package}: run pip install 'draftwing[train]'")


def prepare(
    files: RunFiles,
    options: TrainOptions,
    out: Path,
    *,
    dtype: str = "bfloat16",
    device: str | None = None,
    on_data: Callable[[int, int], None] | None = None,
) -> Session:
    """Load everything that a run needs.

    Args:
        dtype: of the target.
        on_data: called with bytes read and bytes in all.

    Raises:
        ConfigError, CheckpointError, DataError, TokenizerError: what is wrong, and the fix.
        UnsupportedError: an architecture whose shape is unknown here.
    """
    check_packages()
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision=options.precision, cpu=device == "cpu")
    torch.manual_seed(options.seed)
    folder = resolve(files.target)
    tokenizer = Tokenizer(folder)
    data = _read(files, options, tokenizer, on_data)
    training, validation = data.training, data.validation
    name = str(files.target or default_model())
    model = load_target(folder, dtype=dtype, device=device, name=name, prepack=False)
    own = target_id(model, tokenizer)
    if data.cached is not None:
        data.cached.check(model, own)
    net, coverage = _net_of(files.initial, folder, options, model, training, own)
    teacher = _teacher_of(model, net, training, options)
    source = _source_of(model, training, options, net.config.taps, data.cached)
    if options.own_text:
        writer = method_of_net(net).as_target(net)
        source = OwnText(source, model, net.config.taps, writer, options.own_text, options.seed)
    if files.initial is None:
        num_batches = -(-ENTRIES // options.tokens_per_batch)
        method_of_net(net).start(net, model.head, (source.batch(number) for number in range(num_batches)))
    describe = {
        **{key: value for key, value in options.to_dict().items() if value is not None},
        "tokens_in_data": training.num_tokens,
        "coverage": coverage,
        "chat_template": chat_template_hash(folder),
        **_about_data(files, training, validation),
        "machine": describe_machine(),
    }
    evaluate = _evaluation(model, validation, options, net.config.taps, data.held)
    trainer = Trainer(net, teacher, source, options, out, evaluate=evaluate, accelerator=accelerator, describe=describe)
    if accelerator.is_main_process:
        prompts = held_out_prompts(validation, tokenizer, files.data, options.keep_prompts, exclude=files.exclude)
        trainer.on_saved = partial(_add_to_head, trainer, prompts)
    return Session(trainer, model, tokenizer, training, validation, coverage)


def _net_of(
    initial: Path | None, folder: Path, options: TrainOptions, model: Target, training: Corpus, own: TargetId
) -> tuple[DraftNet, float]:
    """The net to train, and the share of the training tokens in its draft vocabulary."""
    if initial is not None:
        net = net_of_head(initial, model, options, own)
        return net, coverage_of(training, net.target_ids, model.vocab_size)
    wanted = options.draft_vocab_size or model.vocab_size
    vocabulary = DraftVocabulary.build(training, model.vocab_size, wanted, always=model.eos_ids)
    return new_net(model, folder, options, vocabulary, own), vocabulary.coverage


def _teacher_of(model: Target, net: DraftNet, training: Corpus, options: TrainOptions) -> Teacher:
    if options.loss_vocab_size is None:
        return Teacher(model.head, net.target_ids)
    if net.head is not None:
        raise ConfigError(
            f"training: loss_vocab_size belongs to nets that use the target's LM head, and a net of method "
            f"{options.method!r} trains its own, all of it: leave it out, or give draft_vocab_size"
        )
    found = DraftVocabulary.build(training, model.vocab_size, options.loss_vocab_size, always=model.eos_ids)
    return Teacher(model.head, found.target_ids.to(model.device))


def _about_data(files: RunFiles, training: Corpus, validation: Corpus) -> dict[str, Any]:
    """What a head's card says of its data: names, without the folders that they lay in."""
    found: dict[str, Any] = {
        "data": [Path(each).name for each in files.data],
        "num_dialogues": len(training.examples),
        "tokens_held_out": validation.num_tokens,
    }
    if files.licence is not None:
        found["licence"] = files.licence
    if files.initial is not None:
        found["initial"] = {"name": files.initial.name, **training_before(files.initial)}
    return found


def _add_to_head(trainer: Trainer, prompts: Sequence[str], folder: Path) -> None:
    """What lies beside a head that was written: prompts to try it on, and its card."""
    write_stored(folder, prompts)
    write_card(folder, seconds=trainer.seconds)  # not in the head: a resumed run's is to the bit an unbroken one's


@dataclass(frozen=True)
class _Data:
    """What to train on and what is held out.

    Attributes:
        cached, held: the features of both, where a cache has them.
    """

    training: Corpus
    validation: Corpus
    cached: FeatureCache | None = None
    held: FeatureCache | None = None


def _read(
    files: RunFiles, options: TrainOptions, tokenizer: Tokenizer, on_data: Callable[[int, int], None] | None
) -> _Data:
    if files.cache is None:
        return _Data(*_read_data(files, options, tokenizer, on_data))
    return _read_cached(FeatureCache(files.cache), files, options, tokenizer, on_data)


def _read_data(
    files: RunFiles, options: TrainOptions, tokenizer: Tokenizer, on_data: Callable[[int, int], None] | None
) -> tuple[Corpus, Corpus]:
    corpus = read_examples(
        files.data, tokenizer, max_length=options.max_length, exclude=files.exclude, on_progress=on_data
    )
    training, validation = split(corpus, options.validation_share, options.seed)
    if options.data_share < 1:
        _, training = split(training, options.data_share, options.seed + 1)
    return training, validation


def _read_cached(
    cached: FeatureCache,
    files: RunFiles,
    options: TrainOptions,
    tokenizer: Tokenizer,
    on_data: Callable[[int, int], None] | None,
) -> _Data:
    """Rows to train on; what is held out is data, where the cache held it out, or else rows too."""
    info = cached.info
    _check_cached(info, options, cached.folder)
    if info.max_length is None:
        cached = cached.cut(options.max_length)
    held = None
    if info.validation_share:
        as_then = dataclasses.replace(options, seed=info.seed, data_share=1.0)
        _, validation = _read_data(files, as_then, tokenizer, on_data)
    else:
        cached, held = split_cache(cached, options.validation_share, options.seed)
        validation = held.corpus
    if options.data_share < 1:
        ids = [row.ids for row in cached.corpus.examples]
        cached = cached.part(held_out(ids, options.data_share, options.seed + 1))
    return _Data(cached.corpus, validation, cached, held)


def split_cache(cached: FeatureCache, share: float, seed: int) -> tuple[FeatureCache, FeatureCache]:
    """What is trained on, and what is held out: the same for a cache, whoever asks."""
    held = held_out([row.ids for row in cached.corpus.examples], share, seed)
    return cached.part(~held), cached.part(held)


def _source_of(
    model: Target, training: Corpus, options: TrainOptions, taps: tuple[int, ...], cached: FeatureCache | None
) -> FeatureSource:
    if cached is None:
        batches = Batches(training, options.tokens_per_batch, options.max_length, options.seed)
        return OnlineFeatures(model, batches, taps)
    return CachedFeatures(cached, taps, options.tokens_per_batch, options.seed, device=model.device, dtype=model.dtype)


def _check_cached(info: CacheInfo, options: TrainOptions, where: Path) -> None:
    """A run must cut its rows and hold out its data as the cache did that it reads; what that left open is free."""
    for name, is_open in (("max_length", info.max_length is None), ("validation_share", not info.validation_share)):
        kept, wanted = getattr(info, name), getattr(options, name)
        if kept != wanted and not is_open:
            raise ConfigError(
                f"{where}: the cache was made with {name} {kept}, and this run has {wanted}: give it --"
                f"{name.replace('_', '-')} {kept}, or make another cache"
            )


# --- evaluation ------------------------------------------------------------------------------------------------------


def validation_prompts(corpus: Corpus, num: int) -> list[list[int]]:
    """Prompts cut from held-out data: dialogues up to their first answer, documents after ``PROMPT_LENGTH`` tokens."""
    prompts = [ids[: int(e.mask.argmax())].tolist() for e in corpus.examples for ids in [e.ids] if e.mask.argmax() > 1]
    room = len(corpus.stream) - PROMPT_LENGTH
    if room > 0:
        # Even steps through the stream, so that a run with more prompts sees other places too.
        starts = [int(room * (i + 0.5) / max(num, 1)) for i in range(num)]
        prompts += [[*corpus.prefix, *corpus.stream[at : at + PROMPT_LENGTH].tolist()] for at in starts]
    step = max(1, len(prompts) // max(num, 1))
    return prompts[::step][:num]


@torch.inference_mode()
def measure_tau(target: Target, net: DraftNet, prompts: Sequence[Sequence[int]], budget: Budget, tokens: int) -> Stats:
    """Decode greedily with the net as it stands, all prompts in one batch."""
    engine = Engine(Decoder(target, method_of_net(net).drafter(net, target, "", ""), budget=budget))
    for prompt in prompts:
        engine.submit(prompt, Sampling(max_tokens=tokens, ignore_eos=True))
    return Stats.of(engine.steps())


def _evaluation(
    model: Target, validation: Corpus, options: TrainOptions, taps: tuple[int, ...], held: FeatureCache | None
) -> Callable[[DraftNet], dict[str, Any]] | None:
    """What judges a net; None where nothing was held out. Features come from the cache where that has them."""
    if not validation.num_tokens:
        return None
    return partial(_evaluate, model, validation, _source_of(model, validation, options, taps, held), options)


def _evaluate(
    target: Target, validation: Corpus, source: FeatureSource, options: TrainOptions, net: DraftNet
) -> dict[str, Any]:
    """Loss and agreement on held-out data, tau through the real decoder; the net's calibration is fitted too."""
    began = time.perf_counter()
    recipe = options.recipe
    scorer = loss_of(net, recipe.objective, recipe.unroll_steps).eval()
    wide = torch.promote_types(net.dtype, torch.float32)
    loss = torch.zeros(recipe.unroll_steps)
    count, agreed = torch.zeros_like(loss), torch.zeros_like(loss)
    batches = [source.batch(number) for number in range(min(VALIDATION_BATCHES, source.num_batches_per_epoch))]
    for found in batches:
        sums = scorer(found, Truth.of(found, target.head, net.target_ids, wide), agreement=True)
        loss += torch.tensor([float(s.loss) for s in sums])
        count += torch.tensor([float(s.count) for s in sums])
        agreed += torch.tensor([float(s.agreed) for s in sums if s.agreed is not None])
    if method_of_net(net).calibrates:
        net.config = dataclasses.replace(net.config, calibration=fit_calibration(scorer, target.head, batches))
    result: dict[str, Any] = {
        **dataclasses.asdict(net.config.calibration),
        "val_loss": float((loss / count.clamp(min=1)).sum()),
        "val_agreement": (agreed / count.clamp(min=1)).tolist(),
    }
    prompts = validation_prompts(validation, options.eval_prompts)
    prompts = [prompt for prompt in prompts if len(prompt) + options.eval_tokens < target.max_length]
    if prompts:
        stats = measure_tau(target, net, prompts, Budget(options.eval_depth), options.eval_tokens)
        result |= {"tau": stats.tau, "alpha": stats.alpha}
    return {**result, "eval_seconds": time.perf_counter() - began}
