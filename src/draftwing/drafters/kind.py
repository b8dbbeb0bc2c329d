"""What a kind of draft says of itself: an entry of the table in ``drafters.kinds``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from draftwing.drafters.base import Drafter
    from draftwing.heads.doctor.case import Finding
    from draftwing.model.config import ModelConfig
    from draftwing.model.linear import Linear
    from draftwing.model.target import Target
    from draftwing.nets.base import DraftNet, Scored
    from draftwing.nets.eagle_config import TargetId
    from draftwing.nets.objectives import Objective
    from draftwing.text.tokenizer import Tokenizer

__all__ = ["Kind", "Method", "NetKind", "NewDrafter", "NewNet", "Source"]

NewDrafter = Callable[[], "Drafter"]


@dataclass(frozen=True)
class Method:
    """A recipe for training: which objective, how many unrolled steps, how much noise.

    Attributes:
        objective: a name of ``nets.objectives.OBJECTIVES``, or an objective of one's own.
        noise: width of the uniform noise that is added to the target's features.
    """

    objective: str | Objective
    unroll_steps: int = 1
    noise: float = 0.0


@dataclass(frozen=True)
class NewNet:
    """What an untrained net is made from.

    Attributes:
        like: the target's shape.
        taps: the target's hidden states that it is to read.
        target: which target it is for.
        embedding, head: the target's, plain.
        target_ids: (V_draft,) ascending, or None for the whole vocabulary.
        settings: the training options that ``NetKind.settings`` names.
        folder: the target's.
    """

    like: ModelConfig
    taps: tuple[int, ...]
    target: TargetId
    embedding: Tensor
    head: Linear
    target_ids: Tensor | None
    settings: Mapping[str, Any]
    folder: Path = Path()


@dataclass(frozen=True)
class Source:
    """What a maker of drafters is made from.

    Attributes:
        target: for which it drafts; ``tokenizer`` is the target's, None where nothing is known of it.
        name: of the draft, as the user wrote it; ``folder`` where it has one.
        device: of a draft model, which alone asks where to go; a head is where the target is.
        options: those that the user gave, checked by ``Kind.options``.
    """

    target: Target
    tokenizer: Tokenizer | None
    name: str
    folder: Path
    device: Callable[[], torch.device]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class NetKind:
    """What there is to know of a kind whose drafts come from a trained net.

    Attributes:
        read: a head's folder, the target's embedding and LM head, and which target that is (or None), as a net;
            ``dtype=`` of its weights.
        write: a folder and a net that was not prepacked, ``training=`` what is said of its training.
        new: an untrained net.
        taps: the hidden states that a new net reads of a target of so many layers.
        methods: its ways of training, by name.
        layouts: that its heads can be written in.
        convert: source, destination and layout; see ``heads.convert.convert`` for what else may be said.
        diagnose: a head's folder, and its target's or None.
        drafter: of a net, its target, the head's name and its identity (``heads.identity.head_id``); as an EAGLE head
            drafts unless given.
        start: sets a new net's weights from the target's LM head and texts that it scored; None leaves them random.
        settings: names of the training options that shape its nets (``train.options.NET_SETTINGS``).
        loss: makes what an update minimises, of the arguments of ``train.loss.batch.UnrolledLoss``, which it is
            unless given: a module called as that one is, with sums for every drafted token; a ``loss.batch.Scorer``.
        calibrates: whether scores of its nets are fitted to chances as training goes (``train.calibrate``).
        as_target: such a net as a model that writes text by itself, with the weights that it has at the time; for the
            training option ``own_text``.
    """

    read: Callable[..., DraftNet]
    write: Callable[..., None]
    new: Callable[[NewNet], DraftNet]
    taps: Callable[[int], tuple[int, ...]]
    methods: Mapping[str, Method]
    layouts: tuple[str, ...]
    convert: Callable[..., None]
    diagnose: Callable[[Path, Path | None], list[Finding]]
    drafter: Callable[[Any, Target, str, str], Drafter]
    start: Callable[[Any, Linear, Sequence[Scored]], None] | None = None
    settings: tuple[str, ...] = ()
    loss: Callable[..., Any] | None = None
    calibrates: bool = True
    as_target: Callable[[Any], Target] | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of draft.

    Attributes:
        name: what ``draft=`` calls it where it needs no folder or comes with Draftwing (``model.catalogue``), and its
            heads' configs say.
        help: one line.
        make: a maker of drafters with empty state.
        recognises: whether a folder, given its ``config.json`` and path, holds one; None for a kind without folders.
        options: what ``draft_options`` may say, each with a check that returns the value or raises ConfigError.
        net: of a kind that drafts by a trained net.
        of_target: the folder to take where the kind's name is all that is said: of a draft that targets bring along.
            Raises CheckpointError for a target that brings none.
    """

    name: str
    help: str
    make: Callable[[Source], NewDrafter]
    recognises: Callable[[Mapping[str, Any], Path], bool] | None = None
    options: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    net: NetKind | None = None
    of_target: Callable[[Target], Path] | None = None
