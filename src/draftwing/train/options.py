"""The options of a training run: one frozen dataclass, written with the checkpoint and compared on resume."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from draftwing.errors import ConfigError
from draftwing.methods.eagle_net import Inputs
from draftwing.methods.method import NetMethod
from draftwing.methods.objectives import Objective, objective_named
from draftwing.methods.registry import training_method, training_methods

# Options that only some methods have.
NET_SETTINGS = (
    "inputs", "draft_vocab_size", "fc_norm", "norm_output", "num_layers", "hidden_size", "num_heads", "own_text",
    "mask_token_id",
)  # fmt: skip
REPORTING = ("eval_every", "save_every", "eval_prompts", "eval_tokens", "eval_depth", "keep_prompts")


class Recipe(NamedTuple):
    """A ``methods.registry.TrainingMethod`` with the options that override it."""

    objective: Objective
    unroll_steps: int
    noise: float


@dataclass(frozen=True)
class TrainOptions:
    """The options of a training run."""

    method: str = "eagle3"  # one of ``training_methods()``
    objective: str | None = None  # overrides the method's; see ``objective_named``
    unroll_steps: int | None = None  # steps of training-time test, or an MTP head's modules; None: the method's number
    later_share: float = 1.0  # share of the entries that the unroll continues after its first step
    inputs: Inputs = "feature-shifted"  # inputs of an entry (the EAGLE paper's ablation)
    taps: tuple[int, ...] | None = None  # hidden states that the net reads; None: the method's choice
    draft_vocab_size: int | None = None  # size of EAGLE-3's own vocabulary; None: the whole vocabulary
    # Losses look at this number of the most frequent tokens, which is faster; None: all.
    loss_vocab_size: int | None = None
    fc_norm: bool = False  # EAGLE-3.1
    norm_output: bool = False  # EAGLE-3.1
    num_layers: int | None = None  # None: the method's number (a quarter of the target's for a new draft model)
    mask_token_id: int | None = None  # the mask, as in other projects' heads; None: a vector (P-EAGLE: the last token)
    hidden_size: int | None = None  # width of a new draft model; None: half the target's
    num_heads: int | None = None  # heads of a new draft model; None: heads of 64
    own_text: float = 0.0  # share of a draft model's batches that it continues itself
    max_length: int = 512  # tokens of a window or dialogue
    tokens_per_batch: int = 4096  # tokens of a micro-batch
    accumulation: int = 1  # micro-batches of one update
    iterations: int | None = None  # updates
    minutes: float | None = None  # wall time, from which ``iterations`` is estimated once the speed is known
    optimizer: str = "adamw"  # ``adamw``, or ``muon`` for the matrices with AdamW for the rest
    lr: float | None = None  # peak, followed by a cosine to 2% of it; None: 1e-3 (Muon's matrices use 20 times it)
    warmup: float = 0.04  # share of the run
    clip: float = 0.5  # norm of the gradient (adamw)
    precision: str | None = None  # ``bf16`` autocast, or ``no``; None: bf16 if the device has instructions for it
    validation_share: float = 0.02  # held-out share of the data
    eval_every: int = 200
    save_every: int = 100
    eval_prompts: int = 8  # to measure tau, by decoding greedily with chains of ``eval_depth``
    eval_tokens: int = 64
    eval_depth: int = 5
    keep_prompts: int = 8  # number of held-out prompts to write into the head's folder, to try it on
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            (self.method in training_methods(), "method", f"one of {', '.join(training_methods())}"),
            (self.optimizer in ("adamw", "muon"), "optimizer", "adamw or muon"),
            (self.precision in (None, "bf16", "no"), "precision", "bf16 or no"),
            (self.unroll_steps is None or 1 <= self.unroll_steps <= 16, "unroll_steps", "from 1 to 16"),
            (0 < self.later_share <= 1, "later_share", "in (0, 1]"),
            (self.hidden_size is None or self.hidden_size >= 8, "hidden_size", "at least 8"),
            (self.num_heads is None or self.num_heads >= 1, "num_heads", "at least 1"),
            (0 <= self.own_text <= 1, "own_text", "from 0 to 1"),
            (self.loss_vocab_size is None or self.loss_vocab_size >= 1, "loss_vocab_size", "at least 1"),
            (self.num_layers is None or 1 <= self.num_layers <= 32, "num_layers", "from 1 to 32"),
            (self.max_length >= 8, "max_length", "at least 8"),
            (self.accumulation >= 1, "accumulation", "at least 1"),
            (self.iterations is None or self.iterations >= 1, "iterations", "at least 1"),
            (self.minutes is None or self.minutes > 0, "minutes", "above 0"),
            (self.lr is None or self.lr > 0, "lr", "above 0"),
            (0 <= self.warmup < 1, "warmup", "in [0, 1)"),
            (self.clip > 0, "clip", "above 0"),
            (self.eval_every >= 1, "eval_every", "at least 1"),
            (self.save_every >= 1, "save_every", "at least 1"),
            (self.eval_prompts >= 0, "eval_prompts", "0 or more"),
            (self.eval_tokens >= 1, "eval_tokens", "at least 1"),
            (self.eval_depth >= 1, "eval_depth", "at least 1"),
            (0 <= self.keep_prompts <= 32, "keep_prompts", "from 0 to 32"),
            (self.seed >= 0, "seed", "0 or more"),
        )
        for is_valid, name, allowed in checks:
            if not is_valid:
                raise ConfigError(f"training: {name} must be {allowed}, found {getattr(self, name)!r}")
        if self.objective is not None:
            objective_named(self.objective)
        if (self.iterations is None) == (self.minutes is None):
            raise ConfigError("training: give either iterations or minutes")
        for field in dataclasses.fields(self):
            name = field.name
            if name in NET_SETTINGS and name not in self.net_method.settings and getattr(self, name) != field.default:
                owners = [other for other in training_methods() if name in training_method(other)[0].settings]
                raise ConfigError(
                    f"training: {name} belongs to {', '.join(owners)}, found method {self.method!r}: leave it out"
                )

    @property
    def net_method(self) -> NetMethod:
        return training_method(self.method)[0]

    @property
    def settings(self) -> dict[str, Any]:
        """The options that shape this method's nets, without the draft vocabulary: it also takes data to choose one."""
        return {name: getattr(self, name) for name in self.net_method.settings if name != "draft_vocab_size"}

    @property
    def recipe(self) -> Recipe:
        usual = training_method(self.method)[1]
        objective = self.objective or usual.objective
        return Recipe(
            objective_named(objective) if isinstance(objective, str) else objective,
            self.unroll_steps or usual.unroll_steps,
            usual.noise,
        )

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "taps": None if self.taps is None else list(self.taps)}

    def check_resumes(self, saved: dict[str, Any], where: str) -> None:
        """Raise ConfigError if a run saved with other options cannot continue with these; ``REPORTING`` may change."""
        for name, value in self.to_dict().items():
            if name not in REPORTING and saved.get(name, value) != value:
                raise ConfigError(
                    f"{where} holds a run with {name} {saved[name]!r}, and this one has {value!r}: choose "
                    f"another --out, or the same settings to continue it"
                )
