"""Base classes of draft methods: how a draft is recognised on disk, loaded, run, trained, written and examined.

A method is one class in one file, and one line in ``methods.registry``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from draftwing.errors import CheckpointError, ConfigError, shown
from draftwing.formats.card import copy_card, copy_stored
from draftwing.formats.doctor import Finding
from draftwing.formats.identity import head_id, target_id
from draftwing.formats.plain import PlainHead, diagnose_plain, load_plain, save_plain
from draftwing.formats.write import check_source
from draftwing.methods.base import Drafter
from draftwing.methods.net import DraftNet, Scored, TargetId
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.methods.online import Learner, LearningPace, OnlineDrafter
from draftwing.methods.unroll import UnrolledLoss
from draftwing.models.config import ModelConfig
from draftwing.models.linear import Embedding, Linear
from draftwing.models.target import Target

if TYPE_CHECKING:
    from draftwing.text.tokenizer import Tokenizer

NewDrafter = Callable[[], Drafter]


def integer_option(name: str, least: int, most: int | None = None) -> Callable[[Any], int]:
    """Return a check for ``DraftMethod.options``: an integer in a range. The check raises ConfigError."""

    def check(value: Any) -> int:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or value < least or (most is not None and value > most):
            allowed = f"at least {least:,}" if most is None else f"from {least:,} to {most:,}"
            raise ConfigError(f"draft_options: {name} must be {allowed}, found {shown(value)}: give a whole number")
        return int(value)

    return check


def number_option(name: str, most: float, hint: str) -> Callable[[Any], float]:
    """Return a check for ``DraftMethod.options``: a number above 0. Its ConfigError ends in ``hint``."""

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            allowed = f"above 0 and at most {most:,}"
            raise ConfigError(f"draft_options: {name} must be {allowed}, found {shown(value)}: {hint}")
        return float(value)

    return check


def bool_option(name: str) -> Callable[[Any], bool]:
    """Return a check for ``DraftMethod.options``: True or False. The check raises ConfigError."""

    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ConfigError(f"draft_options: {name} must be True or False, found {shown(value)}")
        return value

    return check


def _learning_share(value: Any) -> float:
    if isinstance(value, bool):
        return 0.1 if value else 0.0
    return number_option("online", 1, "give True, False, or the share of the time that learning may take")(value)


@dataclass(frozen=True)
class Source:
    """The arguments of ``DraftMethod.new_drafter``."""

    target: Target  # the model to draft for
    tokenizer: Tokenizer | None  # the target's; None if unknown
    name: str  # the draft as the user wrote it
    folder: Path  # the draft's folder, if it has one
    device: Callable[[], torch.device]  # returns the device of a draft model; a head is on the target's device
    options: Mapping[str, Any]  # the user's ``draft_options`` for this method, checked


@dataclass(frozen=True)
class NewNet:
    """The arguments of ``NetMethod.new``."""

    like: ModelConfig  # the target's shape
    taps: tuple[int, ...]  # the target's hidden states to read
    target: TargetId
    embedding: Tensor  # the target's, not prepacked, like ``head``
    head: Linear
    target_ids: Tensor | None  # (V_draft,) ascending, or None for the whole vocabulary
    settings: Mapping[str, Any]  # the training options named in ``NetMethod.settings``; None: by default
    folder: Path = Path()  # the target's


class DraftMethod:
    """A draft method; a subclass overrides ``new_drafter`` and what else differs.

    Attributes:
        name: set by the registry.
        options: the ``draft_options`` it takes, each with a check that returns the value or raises ConfigError.
    """

    name: str = ""
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}

    def new_drafter(self, source: Source) -> NewDrafter:
        """Return a function that makes drafters with empty state. Called once per ``load``."""
        raise NotImplementedError

    def recognises(self, config: Mapping[str, Any], folder: Path) -> bool:
        """Return True if a folder with this ``config.json`` holds such a draft; by default by ``draftwing.kind``."""
        block = config.get("draftwing")
        return isinstance(block, dict) and block.get("kind") == self.name

    def own_folder(self, target: Target) -> Path:
        """Return the folder of the draft that comes with a target's checkpoint.

        Raises CheckpointError if the target has none.
        """
        raise NotImplementedError


class NetMethod(DraftMethod):
    """A method that drafts with a trained network.

    By default heads are written in Draftwing's own layout (``formats.plain``), and the network is unrolled on the
    target's features as an EAGLE head is.

    Attributes:
        net: class of the network; its ``kind`` is the method's name.
        config: class of its config, by default a ``PlainConfig``.
        layouts: head layouts that it can be written in.
        settings: training options that shape the network (``train.options.NET_SETTINGS``); a network with its own LM
            head may have ``draft_vocab_size``.
        loss: makes the training loss, a ``DraftLoss``, from the arguments of ``UnrolledLoss``.
        calibrates: fit scores to probabilities during training (``train.evaluate``).
    """

    net: type[Any]
    config: type[Any]
    layouts: tuple[str, ...] = ("draftwing",)
    settings: tuple[str, ...] = ()
    loss: Callable[..., Any] = UnrolledLoss
    calibrates: bool = True
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "online": _learning_share,
        "online_lr": number_option("online_lr", 1, "1e-4 is usual"),
    }

    # --- drafting --------------------------------------------------------------------------------------------------

    def new_drafter(self, source: Source) -> NewDrafter:
        target, options = source.target, source.options
        net = self.load(source).prepack(target.quantized, fast=True)
        make = partial(self.drafter, net, target, source.folder.name, head_id(source.folder))
        if options.get("online"):
            rows = target.embedding if target.embedding.dtype == torch.float32 else target.embedding.plain().float()
            copy = self.read(source.folder, rows, target.head, target_id(target, source.tokenizer))
            pace = LearningPace(share=options["online"], lr=options.get("online_lr", LearningPace.lr))
            learner = Learner(net, copy, pace)
            return lambda: OnlineDrafter(make(), learner)
        if "online_lr" in options:
            raise ConfigError("draft_options: online_lr goes with online: add 'online': True, or leave it out")
        return make

    def drafter(self, net: Any, target: Target, name: str = "", identity: str = "") -> Drafter:
        """Return a drafter for a loaded network; ``identity`` is its ``formats.identity.head_id``."""
        return EagleDrafter(net, target, name, identity)

    # --- on disk ---------------------------------------------------------------------------------------------------

    def load(self, source: Source) -> Any:
        """Read the network of ``source``, in the precision of its target."""
        target, identity = source.target, target_id(source.target, source.tokenizer)
        return self.read(source.folder, target.embedding, target.head, identity, dtype=target.embedding.dtype)

    def read(
        self,
        folder: Path,
        embedding: Tensor | Embedding,
        target_head: Linear | None = None,
        target: TargetId | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Any:
        """Read a head's folder as a network with weights in ``dtype``, for a target's embedding and LM head.

        ``target`` is compared with the target that the head was trained for.
        """
        head, where = self.read_head(folder, target), str(folder)
        head = self.fit_head(head, embedding, target_head, where)
        expected = (head.config.vocab_size, head.config.hidden_size)
        if tuple(embedding.shape) != expected:
            raise CheckpointError(
                f"{where}: the head is made for a target with an embedding of {expected}, this one's is "
                f"{tuple(embedding.shape)}: load it with the target that it was trained for"
            )
        ids = None if head.target_ids is None else head.target_ids.to(embedding.device)
        net: DraftNet = self.net(head.config, embedding, target_head, ids, dtype)
        return net.load_tensors(head.tensors, where)

    def read_head(self, folder: Path, target: TargetId | None) -> PlainHead:
        """Read a head's folder. Raises CheckpointError if it was trained for another target."""
        head = load_plain(folder, self.name, self.config)
        head.check_target(target, str(folder))
        return head

    def fit_head(
        self, head: PlainHead, embedding: Tensor | Embedding, target_head: Linear | None, where: str
    ) -> PlainHead:
        """Return a head without what its target has too. Raises UnsupportedError for a copy that is another's."""
        return head

    def write(self, folder: Path, net: Any, *, training: Mapping[str, Any] | None = None) -> None:
        """Write a network that has not been prepacked; ``training`` is stored as JSON."""
        save_plain(folder, PlainHead.from_net(net, training))

    def convert(self, source: Path, destination: Path, to: str, **options: Any) -> None:
        """Write a head in one of ``layouts``, with prompts and card; see ``formats.write.convert`` for the options."""
        check_source(source, destination)
        target = options.get("target")
        command = self.save_head(destination, self.read_head(source, target), to, target)
        copy_stored(source, destination)
        if command is not None:
            copy_card(source, destination, to, command)

    def save_head(self, folder: Path, head: PlainHead, layout: str, target: TargetId | None) -> str | None:
        """Write a head, of ``target`` if it is known, in one of ``layouts``.

        Returns:
            The command that serves it, empty if no engine reads the layout; None for pickled weights without a card.
        """
        save_plain(folder, head)
        return ""

    def diagnose(self, folder: Path, target: Path | None) -> list[Finding]:
        """Examine a head, given the folder of its target or None, for ``draftwing doctor``."""
        return diagnose_plain(folder, target, self.name, lambda folder: self.read_head(folder, None))

    # --- training --------------------------------------------------------------------------------------------------

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Return the hidden states that a new network reads of a target with ``num_layers``; by default the last."""
        return (num_layers,)

    def new(self, new: NewNet) -> Any:
        """Return an untrained network; ``unroll_steps`` is the number of tokens that it guesses at once."""
        fields = {name: value for name, value in new.settings.items() if value is not None}
        if "unroll_steps" in fields:
            fields |= self.config.for_levels(fields.pop("unroll_steps"))
        config = self.config.for_target(new.like, new.taps, target=new.target, **fields)
        return self.net(config, new.embedding, new.head, new.target_ids)

    def start(self, net: Any, target_head: Linear, batches: Iterable[Scored]) -> None:
        """Set a new network's weights from texts that the target scored; by default they stay random."""

    def as_target(self, net: Any) -> Target:
        """Return the network as a model that generates by itself, for the training option ``own_text``."""
        raise NotImplementedError
