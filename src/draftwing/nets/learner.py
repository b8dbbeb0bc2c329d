"""A net that learns while it serves, from the tokens at which it was wrong (online speculative decoding, 2310.07177).

A float32 copy is trained. What serves is another net, whose matrices may be packed: it gets the copy's weights now and
then, in the memory that its own lie in. Then it is judged: where drafts come true less often than before, the weights
from before are put back. Whatever happens here, drafts change no text.

- Time: an update runs once the share of the steps' time that is set aside for it has paid for what was done before,
  packing included; what is not spent does not pile up. Packing takes about 3 ns for each
  number on a CPU: 30 ms for a head of 10 million, as long as some ten drafts.
- Memory: the copy, its gradients, two averages of AdamW's, and two sets of weights to go back to: six times the net in
  float32; the target's LM head in float32 where the net reads that; and ``Pace.ring`` stretches of text with features.

Shape suffixes: T tokens of a stretch, M places in it, K tokens of a place, B stretches, F features, V draft vocabulary.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftwing.model.embedding import Embedding
from draftwing.model.linear import Linear
from draftwing.nets.base import DraftNet
from draftwing.nets.objectives import head_loss, soft_cross_entropy
from draftwing.nets.unroll import unroll

__all__ = ["Learner", "Pace", "Stretch", "Tally", "hand_over"]

Weights = Mapping[str, Tensor]
DECAY = 0.8  # of a step's weight, as EAGLE-3's
CLIP = 0.5
FELL = 3.0  # standard errors by which drafts must come true less often before weights are taken back


@dataclass(frozen=True, eq=False)
class Stretch:
    """Text that was written, and what the target thought where the draft was wrong.

    Attributes:
        ids: (T,) int64.
        features: (T - 1, F) of all tokens but the last.
        places: (M,) ascending, each at least 1: the target spoke after the token there, and not as was drafted.
        tokens, probs: (M, K) draft ids of what it thought likeliest, and how likely among these.
    """

    ids: Tensor
    features: Tensor
    places: Tensor
    tokens: Tensor
    probs: Tensor


@dataclass(frozen=True)
class Pace:
    """How much is learnt.

    Attributes:
        share: of the steps' time that updates may take.
        lr: AdamW's rate.
        num_steps: of the unroll.
        batch: stretches of an update, half of them the newest.
        ring: stretches that are kept, the newest ones.
        length, places: tokens of a stretch, and wrong drafts in it, at which it ends.
        window: drafted levels after which what serves is judged, and gets other weights.
    """

    share: float = 0.1
    lr: float = 1e-4
    num_steps: int = 3
    batch: int = 4
    ring: int = 64
    length: int = 64
    places: int = 16
    window: int = 256


@dataclass(frozen=True)
class Tally:
    """How many drafted levels were verified, and how many of them came true."""

    levels: int = 0
    hits: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.levels + other.levels, self.hits + other.hits)

    @property
    def rate(self) -> float:
        """Share that came true."""
        return self.hits / max(self.levels, 1)

    def fell_from(self, before: Tally) -> bool:
        """Whether it is below another by more than chance has it."""
        both = self + before
        spread = both.rate * (1 - both.rate) * (1 / max(self.levels, 1) + 1 / max(before.levels, 1))
        return self.rate < before.rate - FELL * math.sqrt(spread)


class Learner:
    """Trains a net in service. Several decoders, on threads of their own, may share it.

    Args:
        serving: the net that drafts, laid out for whatever runs it.
        copy: the same net in float32, not prepacked.
        pace: how much is learnt.
        clock: in seconds.

    Attributes:
        net: the copy.
        num_updates, num_handed, num_taken_back: what has happened so far.
    """

    def __init__(
        self,
        serving: DraftNet,
        copy: DraftNet,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.net, self.pace = copy, pace or Pace()
        self._serving, self._clock, self._lock = serving, clock, threading.Lock()
        copy.requires_grad_(False)
        tables = {id(each) for part in copy.modules() if isinstance(part, Embedding) for each in part.parameters()}
        self._trained = {name: each for name, each in copy.named_parameters() if id(each) not in tables}
        for parameter in self._trained.values():
            parameter.requires_grad_(True)
        self._head = None if copy.head is not None else _plain(copy.read_head)
        self._ring: deque[Stretch] = deque(maxlen=self.pace.ring)
        self._random = random.Random(0)
        self._optimizer = self._new_optimizer()
        self._out = self._good = self._weights()  # those that serve, and those to go back to
        self._fresh = self._unseen = 0  # stretches, and updates that what serves has not got yet
        self._tally, self._before = Tally(), Tally()
        self._owed = 0.0  # seconds that were spent, and that the steps since have not paid for yet
        self.num_updates = self.num_handed = self.num_taken_back = 0

    # --- what a drafter calls --------------------------------------------------------------------------------------

    def learn(self, stretches: Sequence[Stretch], tally: Tally, seconds: float) -> bool:
        """Take in what steps that took so long have shown, and learn from it as far as there is time.

        Returns:
            Whether it was taken in: not while another thread is here.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            with torch.inference_mode(False):
                self._ring.extend(stretches)
                self._fresh += len(stretches)
                self._tally += tally
                self._owed = max(self._owed - self.pace.share * seconds, 0.0)
                began = self._clock()
                if self._tally.levels >= self.pace.window:
                    self._judge()
                if self._owed == 0 and self._fresh:
                    self._update()
                self._owed += self._clock() - began
        finally:
            self._lock.release()
        return True

    def snapshot(self) -> Weights:
        """Copies of the weights that serve, by name."""
        with self._lock:
            return {name: weight.clone() for name, weight in self._out.items()}

    def restore(self, weights: Weights) -> None:
        """Serve with these again, to the bit, and learn on from them with nothing else remembered."""
        with self._lock, torch.inference_mode(False):
            self._put_back({name: weight.clone() for name, weight in weights.items()})

    # --- how it learns ---------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """A window is full: go back where drafts came true less often than in the one before, else go on."""
        found, self._tally = self._tally, Tally()
        if self._before.levels and found.fell_from(self._before):
            self._put_back(self._good)
            self.num_taken_back += 1
            return
        self._good, self._before = self._out, found
        if self._unseen:
            self._out, self._unseen = self._weights(), 0
            hand_over(self.net, self._serving)
            self.num_handed += 1

    def _put_back(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(weights[name])
        hand_over(self.net, self._serving)
        self._out = self._good = weights
        self._ring.clear()
        self._optimizer = self._new_optimizer()
        self._tally, self._before = Tally(), Tally()
        self._fresh = self._unseen = 0

    def _update(self) -> None:
        """One step of AdamW on some stretches, the newest among them."""
        newest = list(self._ring)[-min(self._fresh, (self.pace.batch + 1) // 2) :]
        others = [each for each in self._ring if all(each is not one for one in newest)]
        chosen = [*newest, *self._random.sample(others, min(len(others), self.pace.batch - len(newest)))]
        self._fresh = 0
        with torch.enable_grad():
            gradients = torch.autograd.grad(self.loss(chosen), list(self._trained.values()), allow_unused=True)
        for parameter, gradient in zip(self._trained.values(), gradients, strict=True):
            parameter.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(list(self._trained.values()), CLIP)
        if torch.isfinite(norm):
            self._optimizer.step()
            self._unseen += 1
            self.num_updates += 1
        self._optimizer.zero_grad()

    def loss(self, stretches: Sequence[Stretch]) -> Tensor:
        """The soft cross-entropy at the places of some stretches: at each step of the unroll a mean, weighted 0.8^s.

        The guess for the token after place k is that of entry k - 1 at step 0, and of entry k - 1 - s at step s.
        """
        net, device = self.net, self.net.device
        ids = pad_sequence([each.ids for each in stretches], batch_first=True).to(device)
        features = pad_sequence([each.features for each in stretches], batch_first=True).to(device, net.dtype)
        count = ids.shape[1] - 2
        tokens, probs = (torch.cat([getattr(each, name) for each in stretches]) for name in ("tokens", "probs"))
        weight = net.head_weight if self._head is None else self._head
        wanted = torch.zeros(len(tokens), weight.shape[0], dtype=net.dtype, device=device)
        wanted.scatter_(1, tokens.to(device), probs.to(device, net.dtype))
        row = torch.cat([torch.full_like(each.places, number) for number, each in enumerate(stretches)]).to(device)
        entry = torch.cat([each.places for each in stretches]).to(device) - 1
        total = torch.zeros((), dtype=net.dtype, device=device)
        for step in unroll(net, ids, features, self.pace.num_steps):
            (which,) = (entry >= step.index).nonzero(as_tuple=True)
            read = step.read[row[which] * count + entry[which] - step.index]
            found = head_loss(read, weight, wanted, which, soft_cross_entropy, net.dtype)
            total = total + DECAY**step.index * found / max(len(which), 1)
        return total

    def _weights(self) -> Weights:
        return {name: parameter.detach().clone() for name, parameter in self._trained.items()}

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(self._trained.values()), lr=self.pace.lr, betas=(0.9, 0.95), weight_decay=0.0)


@torch.no_grad()
def hand_over(source: DraftNet, into: DraftNet) -> None:
    """The weights of one net into another of its like, however that lies; embeddings stay.

    A draft that another thread makes meanwhile reads some of each: it guesses as well as it can.
    """
    for name, part in source.named_modules():
        own = into.get_submodule(name)
        if isinstance(part, Linear) and isinstance(own, Linear):
            own.refill(part.weight, part.bias)
        elif not isinstance(part, Embedding):
            for mine, weight in zip(own.parameters(recurse=False), part.parameters(recurse=False), strict=True):
                mine.copy_(weight)


def _plain(head: Linear) -> Tensor:
    """(V, H) float32: what a matrix stands for, however it lies."""
    with torch.inference_mode(False), torch.no_grad():
        if head.weight.numel():
            return head.weight.detach().float()
        unit = torch.eye(head.num_in, dtype=head.dtype)
        found: Tensor = head.forward(unit).float().T.contiguous()
        return found
