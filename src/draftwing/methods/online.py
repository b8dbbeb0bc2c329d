"""A network that learns while it serves, from tokens it drafted wrongly (online speculative decoding, 2310.07177).

A float32 copy is trained. Its weights are copied in place into the network that drafts, whose matrices may be packed.
If fewer drafts are accepted than before, the earlier weights are restored. The output never depends on the drafts.

- Time: an update runs once its share of the steps' time has paid for earlier updates, including packing; unused time
  does not accumulate. Packing takes about 3 ns per number on a CPU: 30 ms for a head of 10 million, or ten drafts.
- Memory: the copy, its gradients, two averages of AdamW, and two sets of weights to restore: six times the network in
  float32; the target's LM head in float32 if the network reads it; and ``LearningPace.ring`` stretches with features.
  Stretches contain tokens of requests and answers; they stay in memory and are never written to disk.

Shape suffixes: T tokens of a stretch, M places in it, K tokens of a place, F features.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftwing.methods.base import Budget, Drafter, swap_remove
from draftwing.methods.net import DraftNet
from draftwing.methods.net_drafter import NetDrafter
from draftwing.methods.objectives import head_loss, soft_cross_entropy
from draftwing.methods.unroll import unroll
from draftwing.models.context import Context, Row, TargetOutput
from draftwing.models.linear import Embedding, Linear
from draftwing.runtime.tree_builder import Drafted, DraftRequest, VerifyRequest
from draftwing.sampling import SamplingBatch
from draftwing.tree import Accepted, DraftTree

Weights = Mapping[str, Tensor]
STEP_DECAY = 0.8  # weight of an unrolled step relative to the one before, as in EAGLE-3
MAX_GRADIENT_NORM = 0.5
MAX_FALL = 3.0  # standard errors by which the rate may fall before earlier weights are put back


@dataclass(frozen=True, eq=False)
class Stretch:
    """Part of a request's tokens, with the target's distribution after each wrong draft."""

    ids: Tensor  # (T,) int64
    features: Tensor  # (T - 1, F) of all tokens but the last
    # (M,) ascending, each at least 1: positions after which the target emitted another token than drafted
    places: Tensor
    # tokens, probs: (M, K) draft ids of the target's most likely tokens there, and their probabilities
    tokens: Tensor
    probs: Tensor


@dataclass(frozen=True)
class LearningPace:
    share: float = 0.1  # share of the steps' time that updates may take
    lr: float = 1e-4  # learning rate of AdamW
    num_steps: int = 3  # steps of the unroll
    batch: int = 4  # stretches of an update, half of them the newest
    ring: int = 64  # newest stretches that are kept
    length: int = 64  # tokens after which a stretch ends
    places: int = 16  # wrong drafts after which a stretch ends
    window: int = 256  # drafted levels after which the serving weights are judged and replaced


@dataclass(frozen=True)
class Tally:
    """The number of drafted levels that were verified, and of those that were accepted."""

    levels: int = 0
    hits: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.levels + other.levels, self.hits + other.hits)

    @property
    def rate(self) -> float:
        return self.hits / max(self.levels, 1)

    def fell_from(self, before: Tally) -> bool:
        """Return True if the rate is significantly below another."""
        rate = (self + before).rate
        variance = rate * (1 - rate) * (1 / max(self.levels, 1) + 1 / max(before.levels, 1))
        return self.rate < before.rate - MAX_FALL * math.sqrt(variance)


class Learner:
    """Trains a network that serves (``serving``, possibly packed). Decoders in several threads may share it.

    ``copy`` is the same network in float32, not packed; ``clock`` returns seconds.
    """

    def __init__(
        self,
        serving: DraftNet,
        copy: DraftNet,
        pace: LearningPace | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.net, self.pace = copy, pace or LearningPace()
        self.serving, self._clock, self._lock = serving, clock, threading.Lock()
        copy.requires_grad_(False)
        tables = {id(table) for part in copy.modules() if isinstance(part, Embedding) for table in part.parameters()}
        self._trained = {name: value for name, value in copy.named_parameters() if id(value) not in tables}
        for parameter in self._trained.values():
            parameter.requires_grad_(True)
        self._head = None if copy.head is not None else _unpacked(copy.read_head)
        self._random = random.Random(0)
        self.ring: deque[Stretch] = deque(maxlen=self.pace.ring)
        self._serving_weights = self._good_weights = self._weights()  # those that serve, and those to restore
        self._owed = 0.0  # seconds of learning that steps have not paid for yet
        self.num_updates = self.num_handed = self.num_taken_back = 0
        self._restart()

    def _restart(self) -> None:
        self.ring.clear()
        self._optimizer = torch.optim.AdamW(
            list(self._trained.values()), lr=self.pace.lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._num_unused = self._num_pending = 0  # stretches that no update used, and updates that do not serve yet
        self._tally, self._before = Tally(), Tally()

    def _weights(self) -> Weights:
        return {name: parameter.detach().clone() for name, parameter in self._trained.items()}

    def learn(self, stretches: Sequence[Stretch], tally: Tally, seconds: float) -> bool:
        """Add the results of steps that took ``seconds``, and learn from them if there is time.

        Returns False if they were not added, since another thread is learning.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            with torch.inference_mode(False):
                self.ring.extend(stretches)
                self._num_unused += len(stretches)
                self._tally += tally
                self._owed = max(self._owed - self.pace.share * seconds, 0.0)
                start = self._clock()
                if self._tally.levels >= self.pace.window:
                    self._judge()
                if self._owed == 0 and self._num_unused:
                    self._update()
                self._owed += self._clock() - start
        finally:
            self._lock.release()
        return True

    def _judge(self) -> None:
        """After a window, restore the earlier weights if fewer drafts were accepted than before, or serve new ones."""
        latest, self._tally = self._tally, Tally()
        if latest.fell_from(self._before):
            with torch.no_grad():
                for name, parameter in self._trained.items():
                    parameter.copy_(self._good_weights[name])
            hand_over(self.net, self.serving)
            self._serving_weights = self._good_weights
            self._restart()
            self.num_taken_back += 1
            return
        self._good_weights, self._before = self._serving_weights, latest
        if self._num_pending:
            self._serving_weights, self._num_pending = self._weights(), 0
            hand_over(self.net, self.serving)
            self.num_handed += 1

    def _update(self) -> None:
        stretches, num_newest = list(self.ring), min(self._num_unused, (self.pace.batch + 1) // 2)
        newest, others = stretches[-num_newest:], stretches[:-num_newest]
        chosen = [*newest, *self._random.sample(others, min(len(others), self.pace.batch - len(newest)))]
        self._num_unused = 0
        parameters = list(self._trained.values())
        with torch.enable_grad():
            gradients = torch.autograd.grad(self.loss(chosen), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        if torch.isfinite(norm):
            self._optimizer.step()
            self._num_pending += 1
            self.num_updates += 1
        self._optimizer.zero_grad()

    def loss(self, stretches: Sequence[Stretch]) -> Tensor:
        """Return the soft cross-entropy at the stretches' places: a mean per unrolled step, weighted 0.8^s.

        The token after place k is predicted by entry k - 1 at step 0, and by entry k - 1 - s at step s.
        """
        net, device = self.net, self.net.device
        ids = pad_sequence([stretch.ids for stretch in stretches], batch_first=True).to(device)
        features = pad_sequence([stretch.features for stretch in stretches], batch_first=True).to(device, net.dtype)
        count = ids.shape[1] - 2
        tokens, probs = (torch.cat([getattr(stretch, name) for stretch in stretches]) for name in ("tokens", "probs"))
        weight = net.head_weight if self._head is None else self._head
        truth = torch.zeros(len(tokens), weight.shape[0], dtype=net.dtype, device=device)
        truth.scatter_(1, tokens.to(device), probs.to(device, net.dtype))
        counts = torch.tensor([len(stretch.places) for stretch in stretches])
        row = torch.arange(len(stretches)).repeat_interleave(counts).to(device)
        entry = torch.cat([stretch.places for stretch in stretches]).to(device) - 1
        total = torch.zeros((), dtype=net.dtype, device=device)
        for step in unroll(net, ids, features, self.pace.num_steps):
            (which,) = (entry >= step.index).nonzero(as_tuple=True)
            read = step.read[row[which] * count + entry[which] - step.index]
            loss = head_loss(read, weight, truth, which, soft_cross_entropy, net.dtype)
            total = total + STEP_DECAY**step.index * loss / max(len(which), 1)
        return total


@torch.no_grad()
def hand_over(source: DraftNet, into: DraftNet) -> None:
    """Copy the weights of one network into another of the same shape, packed or not, except embeddings.

    A draft that another thread makes meanwhile reads some of each, which only makes it less accurate.
    """
    for name, part in source.named_modules():
        destination = into.get_submodule(name)
        if isinstance(part, Linear) and isinstance(destination, Linear):
            destination.refill(part.weight, part.bias)
        elif not isinstance(part, Embedding):
            pairs = zip(destination.parameters(recurse=False), part.parameters(recurse=False), strict=True)
            for parameter, weight in pairs:
                parameter.copy_(weight)


def _unpacked(head: Linear) -> Tensor:
    """Return the matrix (V, H) in float32."""
    with torch.inference_mode(False), torch.no_grad():
        if head.weight.numel():
            return head.weight.detach().float()
        matrix: Tensor = head.forward(torch.eye(head.num_in, dtype=head.dtype)).float().T.contiguous()
        return matrix


# --- the drafter -----------------------------------------------------------------------------------------------------

NUM_SHARED = 16  # last tokens of a stretch with which the next one of its row begins
NUM_BEST = 64  # most likely tokens that are kept for a place


@dataclass
class _Trail:
    """The end of a row: features from position ``start`` on, and the wrong drafts: place, best tokens, their probs."""

    start: int
    features: list[Tensor]
    places: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)


class OnlineDrafter(NetDrafter):
    """Drafts with ``drafter``, whose network ``learner`` trains, and records the target's answers to wrong drafts.

    Drafters of several decoders may share a learner.
    """

    def __init__(self, drafter: Drafter, learner: Learner) -> None:
        self._drafter, self.learner = cast(NetDrafter, drafter), learner
        self.copy_capabilities(drafter)
        self.name, self.learns, self.identity = f"{drafter.name}, online", True, f"{drafter.identity} online"
        self._trails: list[_Trail] = []
        self.stretches: list[Stretch] = []
        self._tally, self._seconds, self._start = Tally(), 0.0, 0.0

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        self._drafter.admit(ctx, features)
        assert features is not None
        last = _cloned(features[0, -NUM_SHARED:])
        self._trails.append(_Trail(ctx.rows[-1].length - len(last), [last]))

    def request(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftRequest | None:
        self._end_long(ctx)
        return self._drafter.request(ctx, sampling, budget)

    def draft(self, request: DraftRequest, verify: VerifyRequest | None = None) -> Drafted:
        return self._drafter.draft(request, verify)

    def receive(self, ctx: Context, drafted: Drafted) -> DraftTree:
        return self._drafter.receive(ctx, drafted)

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        self._end_long(ctx)
        return self._drafter.propose(ctx, sampling, budget)

    def _end_long(self, ctx: Context) -> None:
        """End the stretches that are long enough: all of their tokens are known here."""
        self._start, pace = time.perf_counter(), self.learner.pace
        for row, trail in zip(ctx.rows, self._trails, strict=True):
            if sum(map(len, trail.features)) >= pace.length or len(trail.places) >= pace.places:
                self._end(row, trail)

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Record the features of the accepted path, and the target's distribution after it."""
        self._drafter.observe(ctx, tree, accepted, output)
        features = output.features_on(tree, accepted.path)
        assert features is not None
        paths, counts, parents = accepted.path.tolist(), accepted.num.tolist(), tree.parents.tolist()
        for number, (row, trail) in enumerate(zip(ctx.rows, self._trails, strict=True)):
            path = paths[number][: counts[number] + 1]
            trail.features.append(_cloned(features[number, : len(path)]))
            is_wrong = path[-1] in parents[number]
            self._tally += Tally(len(path) - 1 + is_wrong, len(path) - 1)
            place = row.length + len(path) - 1
            if is_wrong and place > trail.start:
                best = self._best(output.logits[number, path[-1]])
                trail.places += [] if best is None else [(place, *best)]
        self._seconds += time.perf_counter() - self._start

    def remove(self, ctx: Context, row: int) -> None:
        """Keep the row's last stretch."""
        self._end(ctx.rows[row], self._trails[row])
        swap_remove(self._trails, row)
        self._drafter.remove(ctx, row)

    @property
    def num_read(self) -> list[int]:
        return self._drafter.num_read

    def read_on(self, ctx: Context, row: Row, features: Tensor | None, stop: int) -> None:
        self._drafter.read_on(ctx, row, features, stop)

    def learn(self) -> None:
        """Hand the stretches since the last call to the learner."""
        if self.learner.learn(self.stretches, self._tally, self._seconds):
            self.stretches, self._tally, self._seconds = [], Tally(), 0.0
        else:
            del self.stretches[: -self.learner.pace.ring]

    def _end(self, row: Row, trail: _Trail) -> None:
        """Make a stretch of the trail, which continues with its last tokens."""
        features = torch.cat(trail.features)[: max(len(row.tokens) - 1 - trail.start, 0)]
        ids = row.tokens[trail.start : trail.start + len(features) + 1]
        wrong = [place for place in trail.places if place[0] < trail.start + len(features)]
        if wrong and len(ids) > 2:
            with torch.inference_mode(False):
                places = torch.tensor([place - trail.start for place, _, _ in wrong])
                tokens, probs = torch.stack([best for _, best, _ in wrong]), torch.stack([prob for _, _, prob in wrong])
                self.stretches.append(Stretch(torch.tensor(ids), _cloned(features), places, tokens, probs))
        kept = _cloned(features[-NUM_SHARED:])
        trail.start += len(features) - len(kept)
        trail.features, trail.places = [kept], []

    def _best(self, logits: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return (K,) draft ids and probabilities of the likeliest tokens; None if the best one cannot be drafted."""
        ids = self.learner.net.target_ids
        with torch.inference_mode(False), torch.no_grad():
            draftable = logits.float() if ids is None else logits.index_select(0, ids.to(logits.device)).float()
            if not torch.isfinite(logits.max()) or draftable.max() < logits.max():
                return None
            best = draftable.topk(min(NUM_BEST, len(draftable)))
            return best.indices, best.values.softmax(0)


def _cloned(features: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return features.clone()
