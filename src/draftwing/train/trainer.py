"""Every matrix learns in the units of what it reads.

A target's hidden states have a few channels a hundred times larger than the rest. An optimizer that moves all weights
of a matrix alike (Muon makes all singular values of an update equal, Adam all its entries) moves what such a channel
adds a hundred times as far. So matrices are trained as ``W' = W diag(s)``, where s is the root mean square of each
input channel on the first batch, as if every input had size one: around an optimizer's step weights are multiplied by
s, and gradients divided by it. s is a power of two, so nothing is rounded. Nets and files keep W.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from draftwing.errors import CheckpointError, NumericsError
from draftwing.methods.calibration import Calibration
from draftwing.methods.net import DraftNet
from draftwing.methods.registry import method_of_net
from draftwing.train.checkpoint import locked, read_checkpoint, write_atomically, write_checkpoint, writing
from draftwing.train.features import FeatureSource
from draftwing.train.loss import Teacher, loss_of
from draftwing.train.options import TrainOptions

LEAST = 2.0**-10  # of a channel that is silent on the first batch

if TYPE_CHECKING:
    from accelerate import Accelerator


class _Inputs(TorchFunctionMode):
    """Adds up the squares of what matrices are multiplied by."""

    def __init__(self, matrices: Mapping[int, str]) -> None:
        super().__init__()
        self._matrices = matrices
        self.squares: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and (name := self._matrices.get(id(args[1]))) is not None:
            rows = args[0].detach().flatten(0, -2).float()
            self.squares[name] = self.squares.get(name, 0) + rows.square().sum(0)
            self.counts[name] = self.counts.get(name, 0) + len(rows)
        return func(*args, **(kwargs or {}))


def input_sizes(net: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """The root mean square of each input channel of each trained matrix, to the nearest power of two.

    Args:
        run: calls the net on a batch.

    Returns:
        (in,) by the parameter's name; of matrices that ``run`` does not multiply with, nothing.
    """
    matrices = {id(p): name for name, p in net.named_parameters() if p.ndim == 2 and p.requires_grad}
    with torch.no_grad(), _Inputs(matrices) as seen:
        run()
    means = {name: total / seen.counts[name] for name, total in seen.squares.items()}
    return {name: mean.sqrt().clamp(min=LEAST).log2().round().exp2() for name, mean in means.items()}


@contextmanager
def in_units(net: nn.Module, sizes: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it, weights and gradients are those of matrices that read inputs of size one."""
    with torch.no_grad():
        scaled = [(p, sizes[name].to(p.dtype)) for name, p in net.named_parameters() if name in sizes]
        for p, size in scaled:
            p.mul_(size)
            if p.grad is not None:
                p.grad.div_(size)
        try:
            yield
        finally:
            for p, size in scaled:
                p.div_(size)


# The training loop: batches by number, an unrolled loss, checkpoints that survive a kill, and tau as it will be used.
#
# What a run does next depends only on its checkpoint: the data by the iteration's number, the noise by a seed made of
# it. A killed and resumed run therefore equals an unbroken one, bit for bit on one machine.


METRICS = "metrics.jsonl"
_JUDGED = ("iteration", "val_loss", "val_agreement", "tau", "alpha")  # what is said of an evaluation in the head
WARM_UP_ITERATIONS = 3  # slower than the rest, and left out when the speed is measured
REPLAN = (0.02, 0.25, 0.5, 0.75)  # shares of a timed run at which the number of iterations is reckoned anew


@dataclass
class Progress:
    """Where a run stands; ``metrics`` is the line that was just logged.

    Attributes:
        iteration: updates done; ``iterations`` in all (an estimate while a timed run measures its speed).
        metrics: loss, lr, tokens_per_s, ``agreement`` of each step, and after an evaluation ``val_*`` and ``tau``.
    """

    iteration: int
    iterations: int
    metrics: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """Trains ``net``, and resumes from ``out`` where a checkpoint lies there.

    Args:
        net: to be trained, in float32 (or float64).
        teacher: the target's LM head, and the tokens that losses look at.
        source: batches with features.
        options: see ``TrainOptions``.
        out: folder of checkpoint, metrics and head.
        evaluate: called with the net as it would be saved; returns metrics such as ``tau``. On the main process only.
        accelerator: None makes one for ``options.precision``.
        describe: what is written into the head about its training.

    Attributes:
        on_progress: set it to be called after every iteration on the main process.
        on_saved: set it to be called on the main process with the head's folder whenever the head was written.
        stopping: set it (from a signal handler) to stop after the present iteration.
    """

    def __init__(
        self,
        net: DraftNet,
        teacher: Teacher,
        source: FeatureSource,
        options: TrainOptions,
        out: Path,
        *,
        evaluate: Callable[[DraftNet], dict[str, Any]] | None = None,
        accelerator: Accelerator | None = None,
        describe: dict[str, Any] | None = None,
    ) -> None:
        self.net, self.source, self.options, self.out = net, source, options, out
        from accelerate import Accelerator

        self.accelerator = accelerator or Accelerator(mixed_precision=options.precision)
        self._teacher, self._evaluate = teacher, evaluate
        self.on_progress: Callable[[Progress], None] | None = None
        self.on_saved: Callable[[Path], None] | None = None
        self._judged: dict[str, Any] = {}  # the last evaluation's metrics
        self._describe = describe or {}
        recipe = options.recipe
        self._loss = loss_of(
            net, recipe.objective, recipe.unroll_steps, recipe.noise, options.later_share, teacher.target_ids
        )
        self._optimizers = _optimizers(net, options)
        self._base_rates = [[group["lr"] for group in each.param_groups] for each in self._optimizers]
        prepared = self.accelerator.prepare(self._loss, *self._optimizers)
        self._wrapped, self._prepared = prepared[0], list(prepared[1:])
        self._average = {name: p.detach().clone() for name, p in net.named_parameters()} if options.ema else {}
        self._wide = torch.promote_types(net.dtype, torch.float32)
        self.iteration, self.iterations = 0, options.iterations or 10**9
        self._sizes: dict[str, Tensor] = {}  # of what each matrix reads
        self._seconds = 0.0  # of training in all sessions, for timed runs
        self._replanned = 0
        self.stopping = False

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, in all its sessions."""
        return self._seconds

    # --- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> Progress:
        """Train to the end, or until ``stopping``; always leaves a checkpoint and a head behind.

        Raises:
            NumericsError: the loss is no longer finite.
            ConfigError: the folder holds another run.
            CheckpointError: the folder cannot be written, another process trains into it, or its checkpoint cannot be
                read.
        """
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        with locked(self.out, CheckpointError) if self.accelerator.is_main_process else nullcontext():
            return self._run()

    def _run(self) -> Progress:
        self._resume()
        self._sizes = self._sizes or self._measured()
        progress, saved = Progress(self.iteration, self.iterations), self.iteration
        options, began = self.options, time.perf_counter()
        while self.iteration < self.iterations and not self._everyone_stops():
            metrics = self._update()
            now = time.perf_counter()
            self._seconds += now - began
            began = now
            self._plan()
            last = self.iteration >= self.iterations
            if self._evaluate is not None and (self.iteration % options.eval_every == 0 or last):
                metrics |= self._evaluated()
                self._judged = metrics
            progress = Progress(self.iteration, self.iterations, metrics)
            if self.accelerator.is_main_process:
                self._log(metrics)  # before the checkpoint: lines that it lacks are dropped on resume, none are added
                if self.on_progress is not None:
                    self.on_progress(progress)
            if self.iteration % options.save_every == 0:
                self.save()
                saved = self.iteration
        if self.iteration != saved:
            self.save()
        return progress

    def save(self) -> None:
        """Write the checkpoint, and the head as it stands."""
        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return
        write_checkpoint(
            self.out,
            {
                "options": self.options.to_dict(),
                "iteration": self.iteration,
                "iterations": self.iterations,
                "seconds": self._seconds,
                "replanned": self._replanned,
                "net": self.net.state_dict(),
                "calibration": dataclasses.asdict(self.net.config.calibration),
                "average": self._average,
                "input_sizes": self._sizes,
                "optimizers": [each.state_dict() for each in self._optimizers],
            },
        )
        with self._averaged():
            training = {**self._describe, "iterations": self.iteration}
            judged = {name: self._judged[name] for name in _JUDGED if name in self._judged}
            training |= {"held_out": judged} if judged else {}
            method_of_net(self.net).write(self.out / "head", self.net, training=training)
        if self.on_saved is not None:
            self.on_saved(self.out / "head")

    def _resume(self) -> None:
        state = read_checkpoint(self.out)
        if state is None:
            if self.accelerator.is_main_process:
                self._drop_later_metrics()  # of a run that was killed before its first checkpoint
            return
        self.options.check_resumes(state["options"], str(self.out))
        self.net.load_state_dict(state["net"])
        calibration = Calibration(**state["calibration"])
        self.net.config = dataclasses.replace(self.net.config, calibration=calibration)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        device = self.net.device
        self._average = {name: each.to(device) for name, each in state["average"].items()}
        self._sizes = {name: each.to(device) for name, each in state.get("input_sizes", {}).items()}
        self.iteration, self.iterations = state["iteration"], self.options.iterations or state["iterations"]
        self._seconds, self._replanned = state["seconds"], state["replanned"]
        if self.accelerator.is_main_process:
            self._drop_later_metrics()

    def _measured(self) -> dict[str, Tensor]:
        """The sizes of what matrices read: of one batch whole, so that all processes find the same."""
        found = self.source.batch(0)
        with self.accelerator.autocast():
            truth = self._teacher.truth(found, self._wide)
            return input_sizes(self.net, partial(self._loss.eval(), found, truth))

    def _update(self) -> dict[str, Any]:
        options, accelerator = self.options, self.accelerator
        began, tokens = time.perf_counter(), 0
        rate = self._rate()
        for optimizer, rates in zip(self._optimizers, self._base_rates, strict=True):
            for group, base in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = base * rate
        watched = (self.iteration + 1) % 10 == 0 or self.iteration == 0
        self._wrapped.train()
        total = 0.0
        agreement: list[float] = []
        for micro in range(options.accumulation):
            number = self.iteration * options.accumulation + micro
            torch.manual_seed(_mixed(options.seed, number, accelerator.process_index))
            found = self.source.batch(number, accelerator.process_index, accelerator.num_processes)
            with accelerator.autocast():
                truth = self._teacher.truth(found, self._wide)
            last = micro + 1 == options.accumulation
            with nullcontext() if last else accelerator.no_sync(self._wrapped):
                with accelerator.autocast():
                    sums = self._wrapped(found, truth, agreement=watched)
                counts = self._everywhere(torch.tensor([float(s.count) for s in sums], device=self.net.device))
                decay = self._loss.objective.decay
                parts = [s.loss * (decay**i / max(float(counts[i]), 1.0)) for i, s in enumerate(sums)]
                # Data-parallel wrappers average gradients over the processes; these are shares of one mean.
                loss = torch.stack(parts).sum() * accelerator.num_processes / options.accumulation
                accelerator.backward(loss)
            total += float(self._everywhere(loss.detach() / accelerator.num_processes))
            tokens += found.batch.ids.numel() * accelerator.num_processes
            if watched:
                agreed = self._everywhere(torch.stack([s.agreed for s in sums if s.agreed is not None]).float())
                agreement = (agreed / counts.clamp(min=1)).tolist()
        if not math.isfinite(total):
            raise NumericsError(
                f"the loss is {total} at iteration {self.iteration + 1}: lower --lr, or train with --precision no; the "
                f"last checkpoint in {self.out} is whole"
            )
        with in_units(self.net, self._sizes):
            if options.optimizer == "adamw":
                accelerator.clip_grad_norm_(self.net.parameters(), options.clip)
            for optimizer in self._prepared:
                optimizer.step()
                optimizer.zero_grad()
        self._update_average()
        self.iteration += 1
        seconds = time.perf_counter() - began
        metrics = {
            "iteration": self.iteration,
            "loss": total,
            "lr": self._base_rates[-1][0] * rate,
            "tokens_per_s": tokens / seconds,
        }
        return {**metrics, "agreement": agreement} if agreement else metrics

    def _everywhere(self, value: Tensor) -> Tensor:
        found: Tensor = self.accelerator.reduce(value, "sum") if self.accelerator.num_processes > 1 else value
        return found

    def _everyone_stops(self) -> bool:
        """Whether to stop here: as soon as one process was told to, since the others would wait for it forever."""
        if self.accelerator.num_processes > 1:
            told = torch.tensor(float(self.stopping), device=self.net.device)
            self.stopping = bool(self._everywhere(told) > 0)
        return self.stopping

    # --- its parts -------------------------------------------------------------------------------------------------

    def _rate(self) -> float:
        """Share of the peak learning rate: linear warm-up, then a cosine to 2%."""
        options = self.options
        if options.minutes is not None and self.iterations >= 10**9:
            return min(1.0, (self.iteration + 1) / 20)  # until the speed is known
        warm = max(1, round(options.warmup * self.iterations), min(20, self.iterations // 10))
        if self.iteration < warm:
            return (self.iteration + 1) / warm
        through = (self.iteration - warm) / max(1, self.iterations - warm)
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * through))

    def _plan(self) -> None:
        """For a timed run: how many iterations fit. The number is kept in checkpoints, so that a resumed run has it."""
        minutes = self.options.minutes
        if minutes is None or self._replanned >= len(REPLAN) or self.iteration < 2 * WARM_UP_ITERATIONS:
            return
        if self.accelerator.num_processes > 1:  # whose clocks differ: they must come to the same decision
            seconds = torch.tensor(self._seconds, dtype=torch.float64, device=self.net.device)
            self._seconds = float(self._everywhere(seconds)) / self.accelerator.num_processes
        if self._seconds < REPLAN[self._replanned] * minutes * 60:
            return
        self._replanned += 1
        each = self._seconds / self.iteration
        self.iterations = self.iteration + max(1, int(max(0.0, minutes * 60 - self._seconds) / each))

    def _evaluated(self) -> dict[str, Any]:
        if self._evaluate is None or not self.accelerator.is_main_process:
            return {}
        self.net.eval()
        with self._averaged(), torch.no_grad():
            return self._evaluate(self.net)

    def _update_average(self) -> None:
        if self.options.ema:
            with torch.no_grad():
                for name, p in self.net.named_parameters():
                    self._average[name].lerp_(p, 1 - self.options.ema)

    def _averaged(self) -> _Swapped:
        """Within it the net has its averaged weights."""
        return _Swapped(self.net, self._average)

    def _log(self, metrics: dict[str, Any]) -> None:
        with writing(self.out / METRICS), (self.out / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")

    def _drop_later_metrics(self) -> None:
        """A killed run may have logged iterations that its checkpoint does not have."""
        file = self.out / METRICS
        with writing(file):
            if file.exists():
                lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.endswith("}")]
                kept = [line for line in lines if json.loads(line)["iteration"] <= self.iteration]
                write_atomically(file, "".join(line + "\n" for line in kept))
                judged = [found for line in reversed(kept) if "val_loss" in (found := json.loads(line))][:1]
                self._judged = judged[0] if judged else {}


class _Swapped:
    """Puts other weights into a net for a while."""

    def __init__(self, net: nn.Module, weights: dict[str, Tensor]) -> None:
        self._net, self._weights = net, weights

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: object) -> None:
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, p in self._net.named_parameters():
            if name in self._weights:
                own = p.detach().clone()
                p.copy_(self._weights[name])
                self._weights[name].copy_(own)


def _mixed(seed: int, number: int, rank: int) -> int:
    return (seed * 1_000_003 + number) * 1_009 + rank


def _optimizers(net: DraftNet, options: TrainOptions) -> list[torch.optim.Optimizer]:
    """AdamW for everything; or Muon (Jordan et al. 2024) for the matrices between hidden states, AdamW for the rest."""
    lr = options.peak_lr
    trained = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    if options.optimizer == "adamw":
        return [torch.optim.AdamW([p for _, p in trained], lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]
    # What maps from or to tokens is none of them: its rows are used one at a time.
    outer = ("head", "embedding")
    inner = [p for name, p in trained if p.ndim == 2 and not name.startswith(outer)]
    rest = [p for name, p in trained if p.ndim != 2 or name.startswith(outer)]
    muon = torch.optim.Muon(inner, lr=20 * lr, weight_decay=0.0)
    return [muon, torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)] if rest else [muon]
