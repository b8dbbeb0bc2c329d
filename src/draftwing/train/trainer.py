"""The training loop: batches by number, an unrolled loss, and checkpoints that survive a kill.

The next step of a run depends only on its checkpoint: the data on the number of the iteration, the noise on a seed made
of it. A killed and resumed run therefore equals an uninterrupted one, bit for bit on one machine.

Every matrix is trained in units of its inputs. A target's hidden states have a few channels a hundred times larger than
the rest, and an optimizer that changes all weights of a matrix by the same amount (Muon makes all singular values of an
update equal, Adam all its entries) changes the effect of such a channel a hundred times as much. So matrices are
trained as ``W' = W diag(s)``, with s the root mean square of each input channel on the first batch, as if every input
had size one: during an optimizer's step weights are multiplied by s, and gradients divided by it. s is a power of two,
so nothing is rounded. Nets and files keep W.
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

from draftwing.checks import Argument, check_arguments
from draftwing.errors import CheckpointError, DraftwingError, NumericsError, reason, shown
from draftwing.methods.calibration import Calibration
from draftwing.methods.net import DraftNet
from draftwing.methods.objectives import Truth
from draftwing.methods.registry import method_of_net
from draftwing.models.linear import Linear
from draftwing.storage import check_regular, locked, replacing, write_text, writing
from draftwing.torch_utils import save_pickle
from draftwing.train.features import FeatureBatch, FeatureSource
from draftwing.train.options import TrainOptions
from draftwing.train.stream import StreamedBatches

if TYPE_CHECKING:
    from accelerate import Accelerator

CHECKPOINT = "checkpoint.pt"
METRICS = "metrics.jsonl"
EVALUATED = ("iteration", "val_loss", "val_agreement", "tau", "alpha")  # metrics of an evaluation that heads store
LEAST_SIZE = 2.0**-10  # for a channel that is 0 on the first batch
UNPLANNED = 10**9  # iterations of a timed run until its speed is known
WARM_UP_ITERATIONS = 3  # slower than the rest, and left out when the speed is measured
REPLAN = (0.02, 0.25, 0.5, 0.75)  # shares of a timed run after which the number of iterations is estimated again
_LIKE_PARAMETERS = {"exp_avg", "exp_avg_sq", "momentum_buffer"}  # an optimizer keeps these, shaped like parameters
_STATE = {  # fields of a checkpoint
    **dict.fromkeys(("options", "net", "calibration"), Argument((Mapping,), "a dict")),
    "optimizers": Argument((list,), "a list"),
    "iteration": Argument((int,), "a number of iterations", least=0, most=UNPLANNED),
    "iterations": Argument((int,), "a number of iterations", least=1, most=UNPLANNED),
    "seconds": Argument((int, float), "a finite number of seconds", least=0, most=1e12),
    "replanned": Argument((int,), "a number of estimates", least=0, most=len(REPLAN)),
}


# --- units of inputs -------------------------------------------------------------------------------------------------


class _SquaredInputs(TorchFunctionMode):
    """Sums up the squares of the inputs of matrices, by name."""

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
    """Return the root mean square of each input channel of the matrices used by ``run``, which calls the net.

    They are rounded to a power of two: (in,) by the parameter's name.
    """
    matrices = {id(p): name for name, p in net.named_parameters() if p.ndim == 2 and p.requires_grad}
    with torch.no_grad(), _SquaredInputs(matrices) as inputs:
        run()
    means = {name: total / inputs.counts[name] for name, total in inputs.squares.items()}
    return {name: mean.sqrt().clamp(min=LEAST_SIZE).log2().round().exp2() for name, mean in means.items()}


@contextmanager
def in_units(net: nn.Module, sizes: Mapping[str, Tensor]) -> Iterator[None]:
    """In the block, weights and gradients are those of matrices whose inputs have size one."""
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


# --- the loop --------------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """The state of a run."""

    iteration: int  # updates done; ``iterations`` in total (an estimate while a timed run measures its speed)
    iterations: int
    # The line that was just logged: loss, lr, tokens_per_s, ``agreement`` of each step, and after an evaluation
    # ``val_*`` and ``tau``.
    metrics: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """Trains ``net``, and resumes from the checkpoint in ``out`` if there is one.

    Args:
        net: to be trained, in float32 (or float64).
        head: the target's LM head, not prepacked.
        target_ids: the tokens that losses look at, such as the net's draft vocabulary; None for all.
        source: batches with features.
        out: folder of checkpoint, metrics and head.
        evaluate: called on the main process with the net that would be saved; returns metrics such as ``tau``.
        accelerator: None makes one for ``options.precision``.
        describe: stored in the head as a description of its training.
        stream: the data of ``source`` if it is streamed; its position is stored in checkpoints.
    """

    def __init__(
        self,
        net: DraftNet,
        head: Linear,
        target_ids: Tensor | None,
        source: FeatureSource,
        options: TrainOptions,
        out: Path,
        *,
        evaluate: Callable[[DraftNet], dict[str, Any]] | None = None,
        accelerator: Accelerator | None = None,
        describe: dict[str, Any] | None = None,
        stream: StreamedBatches | None = None,
    ) -> None:
        from accelerate import Accelerator

        self._stream = stream
        self.net, self.source, self.options, self.out = net, source, options, out
        self.accelerator = accelerator or Accelerator(mixed_precision=options.precision)
        # Called on the main process: after every iteration, and with the head's folder whenever the head was written.
        self.on_progress: Callable[[Progress], None] | None = None
        self.on_saved: Callable[[Path], None] | None = None
        self.seconds = 0.0  # wall time of training in all sessions of the run
        self.stopping = False  # set it to True to stop after the present iteration
        self.iteration, self.iterations = 0, options.iterations or UNPLANNED
        self._head, self.target_ids, self._evaluate, self._describe = head, target_ids, evaluate, describe or {}
        self._evaluated: dict[str, Any] = {}  # the metrics of the last evaluation
        self._loss = method_of_net(net).loss(net, *options.recipe, options.later_share, target_ids)
        self._optimizers = make_optimizers(net, options)
        self._base_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers]
        self._wrapped, *self._prepared = self.accelerator.prepare(self._loss, *self._optimizers)
        self._sizes: dict[str, Tensor] = {}  # mean size of each matrix's inputs
        self._replanned = 0

    def run(self) -> Progress:
        """Train to the end, or until ``stopping``; always leave a checkpoint and a head behind."""
        with locked(self.out, CheckpointError) if self.accelerator.is_main_process else nullcontext():
            return self._run()

    def _run(self) -> Progress:
        self._resume()
        if not self._sizes:  # from a whole batch, so that all processes compute the same
            batch = self.source.batch(0)
            with self.accelerator.autocast():
                self._sizes = input_sizes(self.net, partial(self._loss.eval(), batch, self._truth(batch)))
        progress, saved = Progress(self.iteration, self.iterations), self.iteration
        options, began = self.options, time.perf_counter()
        while self.iteration < self.iterations and not self._must_stop():
            metrics = self._update()
            now = time.perf_counter()
            self.seconds += now - began
            began = now
            self._plan()
            is_last = self.iteration >= self.iterations
            if self._evaluate is not None and (self.iteration % options.eval_every == 0 or is_last):
                if self.accelerator.is_main_process:
                    self.net.eval()
                    with torch.no_grad():
                        metrics |= self._evaluate(self.net)
                self._evaluated = metrics
            progress = Progress(self.iteration, self.iterations, metrics)
            if self.accelerator.is_main_process:
                # Before the checkpoint: resuming drops lines after it, and adds none.
                with writing(self.out / METRICS), (self.out / METRICS).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(metrics) + "\n")
                if self.on_progress is not None:
                    self.on_progress(progress)
            if self.iteration % options.save_every == 0:
                self.save()
                saved = self.iteration
        if self.iteration != saved:
            self.save()
        return progress

    def save(self) -> None:
        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return
        write_checkpoint(
            self.out,
            {
                "options": self.options.to_dict(),
                "iteration": self.iteration,
                "iterations": self.iterations,
                "seconds": self.seconds,
                "replanned": self._replanned,
                "net": self.net.state_dict(),
                "calibration": dataclasses.asdict(self.net.config.calibration),
                "input_sizes": self._sizes,
                "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
                "stream": None if self._stream is None else self._stream.position,
            },
        )
        evaluated = {name: self._evaluated[name] for name in EVALUATED if name in self._evaluated}
        training = {**self._describe, "iterations": self.iteration, **({"held_out": evaluated} if evaluated else {})}
        method_of_net(self.net).write(self.out / "head", self.net, training=training)
        if self.on_saved is not None:
            self.on_saved(self.out / "head")

    def _resume(self) -> None:
        state = read_checkpoint(self.out)
        try:
            if state is not None:
                self._restore(state)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            if isinstance(error, DraftwingError):
                raise
            raise CheckpointError(
                f"{self.out / CHECKPOINT} does not hold the state of such a run ({type(error).__name__}: "
                f"{shown(str(error))}): delete it to restart this run, or choose another --out"
            ) from error
        if self.accelerator.is_main_process:
            self._drop_later_metrics()

    def _restore(self, state: dict[str, Any]) -> None:
        check_arguments(_STATE, state, CheckpointError)
        self.options.check_resumes(state["options"], str(self.out))
        if (self._stream is None) != (state.get("stream") is None):
            raise CheckpointError(
                f"{self.out} holds a run on data that was{' not' * (self._stream is not None)} streamed: give the "
                f"same --data, or choose another --out"
            )
        if self._stream is not None:
            self._stream.restore(state["stream"])
        self.net.load_state_dict(state["net"])
        calibration = Calibration(**state["calibration"])
        self.net.config = dataclasses.replace(self.net.config, calibration=calibration)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
            for parameter, values in optimizer.state.items():
                for name in _LIKE_PARAMETERS & values.keys():
                    if values[name].shape != parameter.shape:
                        raise ValueError(f"{name} of the optimizer has the shape {tuple(values[name].shape)}")
        self._sizes = {name: value.to(self.net.device) for name, value in state.get("input_sizes", {}).items()}
        self.iteration, self.iterations = state["iteration"], self.options.iterations or state["iterations"]
        self.seconds, self._replanned = state["seconds"], state["replanned"]

    def _drop_later_metrics(self) -> None:
        """Remove iterations after the checkpoint, which a killed run may have logged."""
        with writing(self.out / METRICS):
            lines = [line for line in read_metrics(self.out) if line["iteration"] <= self.iteration]
            if (self.out / METRICS).exists():
                write_text(self.out / METRICS, "".join(json.dumps(line) + "\n" for line in lines))
        self._evaluated = next((line for line in reversed(lines) if "val_loss" in line), {})

    def _truth(self, batch: FeatureBatch) -> Truth:
        return Truth.of(batch, self._head, self.target_ids, torch.promote_types(self.net.dtype, torch.float32))

    def _update(self) -> dict[str, Any]:
        options, accelerator = self.options, self.accelerator
        began, tokens, rate = time.perf_counter(), 0, self._rate()
        for optimizer, rates in zip(self._optimizers, self._base_rates, strict=True):
            for group, base in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = base * rate
        with_agreement = (self.iteration + 1) % 10 == 0 or self.iteration == 0
        self._wrapped.train()
        total = 0.0
        metrics: dict[str, Any] = {}
        for micro in range(options.accumulation):
            number = self.iteration * options.accumulation + micro
            torch.manual_seed(noise_seed(options.seed, number))  # the same for all processes, see ``Batch.rand``
            batch = self.source.batch(number, accelerator.process_index, accelerator.num_processes)
            is_last = micro + 1 == options.accumulation
            with nullcontext() if is_last else accelerator.no_sync(self._wrapped):
                with accelerator.autocast():
                    sums = self._wrapped(batch, self._truth(batch), agreement=with_agreement)
                counts = self._sum_over_processes(torch.tensor([float(s.count) for s in sums], device=self.net.device))
                decay = self._loss.objective.decay
                parts = [s.loss * (decay**i / max(float(counts[i]), 1.0)) for i, s in enumerate(sums)]
                # Data-parallel wrappers average gradients over the processes; these are shares of one mean.
                loss = torch.stack(parts).sum() * accelerator.num_processes / options.accumulation
                accelerator.backward(loss)
            total += float(self._sum_over_processes(loss.detach() / accelerator.num_processes))
            tokens += batch.batch.ids.numel() * accelerator.num_processes
            if with_agreement:
                agreed = torch.stack([s.agreed for s in sums if s.agreed is not None]).float()
                metrics["agreement"] = (self._sum_over_processes(agreed) / counts.clamp(min=1)).tolist()
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
        self.iteration += 1
        speed = tokens / (time.perf_counter() - began)
        lr = self._base_rates[-1][0] * rate
        return {"iteration": self.iteration, "loss": total, "lr": lr, "tokens_per_s": speed, **metrics}

    def _sum_over_processes(self, value: Tensor) -> Tensor:
        result: Tensor = self.accelerator.reduce(value, "sum") if self.accelerator.num_processes > 1 else value
        return result

    def _must_stop(self) -> bool:
        """Return True as soon as one process is stopping, since the others would wait for it forever."""
        if self.accelerator.num_processes > 1:
            stopping = torch.tensor(float(self.stopping), device=self.net.device)
            self.stopping = bool(self._sum_over_processes(stopping) > 0)
        return self.stopping

    def _rate(self) -> float:
        """Return the share of the peak learning rate: linear warm-up, then a cosine to 2%."""
        options = self.options
        if options.minutes is not None and self.iterations >= UNPLANNED:
            return min(1.0, (self.iteration + 1) / 20)
        warm = max(1, round(options.warmup * self.iterations), min(20, self.iterations // 10))
        if self.iteration < warm:
            return (self.iteration + 1) / warm
        through = (self.iteration - warm) / max(1, self.iterations - warm)
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * through))

    def _plan(self) -> None:
        """Estimate the number of iterations of a timed run. It is stored in checkpoints, for resumed runs."""
        minutes = self.options.minutes
        if minutes is None or self._replanned >= len(REPLAN) or self.iteration < 2 * WARM_UP_ITERATIONS:
            return
        if self.accelerator.num_processes > 1:  # their clocks differ, and they must make the same decision
            seconds = torch.tensor(self.seconds, dtype=torch.float64, device=self.net.device)
            self.seconds = float(self._sum_over_processes(seconds)) / self.accelerator.num_processes
        if self.seconds < REPLAN[self._replanned] * minutes * 60:
            return
        self._replanned += 1
        per_iteration = self.seconds / self.iteration
        self.iterations = self.iteration + max(1, int(max(0.0, minutes * 60 - self.seconds) / per_iteration))


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a run's metrics file; none if there is no file."""
    file = out / METRICS
    lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def noise_seed(seed: int, number: int) -> int:
    return (seed * 1_000_003 + number) * 1_009


def make_optimizers(net: DraftNet, options: TrainOptions) -> list[torch.optim.Optimizer]:
    """AdamW for everything; or Muon (Jordan et al. 2024) for the matrices between hidden states, AdamW for the rest."""
    lr = options.lr or 1e-3  # with a higher default, Muon forgets a net's start before it has learnt something better
    inner: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, p in net.named_parameters():
        if p.requires_grad:
            # Not for matrices from or to tokens, of which single rows are used.
            is_inner = p.ndim == 2 and not name.startswith(("head", "embedding"))
            (inner if options.optimizer == "muon" and is_inner else rest).append(p)
    optimizers: list[torch.optim.Optimizer] = []
    if inner:
        optimizers.append(torch.optim.Muon(inner, lr=20 * lr, weight_decay=0.0))
    if rest:
        optimizers.append(torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0))
    return optimizers


def write_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Replace the folder's checkpoint. Raises CheckpointError if it cannot be written."""
    file = folder / CHECKPOINT
    with writing(file, note="; the checkpoint before this one is whole"), replacing(file) as partial:
        save_pickle(state, partial)


def read_checkpoint(folder: Path) -> dict[str, Any] | None:
    """Return the folder's checkpoint; None if there is none."""
    file = folder / CHECKPOINT
    if not file.exists():
        return None
    try:
        check_regular(file)
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch errors of many kinds
        raise CheckpointError(
            f"{file} cannot be read ({reason(error)}): delete it to restart this run, or choose another --out"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} holds no checkpoint: delete it to restart this run, or choose another --out")
    return state
