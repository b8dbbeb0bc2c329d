"""From logits to a token: the sampling parameters, the processed scores, and one noise per position.

A token is drawn as argmax(scores + g) with Gumbel noise g (the Gumbel-max trick), and g is a hash of (seed,
absolute position, token id): no generator, no state. The text is therefore a function of target, prompt and
seed alone, whatever the drafter, the tree or the batch, and a drafter that adds *the same* g to its own scores
agrees with the target more often (Daliri et al. 2024, "Coupling without communication and drafter-invariant
speculative decoding").

Shape suffixes: B rows, N nodes, D positions, V vocabulary, S slots.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor

from draftwing.errors import SamplingError
from draftwing.tree import Accepted, DraftTree

__all__ = ["History", "KeyedNoise", "Sampling", "SamplingBatch", "gumbel", "hash_bits", "uniform"]

_PENALTIES = ("repetition", "presence", "frequency")


@dataclass(frozen=True)
class Sampling:
    """How one request is sampled and when it ends. The defaults are greedy decoding of 128 tokens.

    A ``seed`` of None is drawn for every request by itself; the result says which it was.

    Applied in this order, as in transformers: repetition, presence and frequency penalties, logit bias, banned
    tokens, temperature, top-k, top-p, min-p. Repetition looks at prompt and output, presence and frequency at
    the output alone. All of it is applied at every tree node with the history of that node's own path.

    Raises:
        SamplingError: a value outside its range, named with the range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_tokens: tuple[int, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    max_tokens: int = 128
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, kind in (("stop_tokens", Integral), ("banned_tokens", Integral), ("stop", str)):
            value: object = getattr(self, name)
            lone = isinstance(value, str)  # what people write for a single stop string
            items = (value,) if lone else tuple(value) if isinstance(value, Iterable) else None
            if items is None or not all(isinstance(item, kind) for item in items):
                what = "strings" if kind is str else "token ids"
                raise SamplingError(f"{name} must be a list of {what}, found {value!r}: leave it out for none")
            object.__setattr__(self, name, items)
        whole = ("top_k", "max_tokens", "seed", "logprobs")
        for name in ("temperature", "top_p", "min_p", *whole, *(f"{of}_penalty" for of in _PENALTIES)):
            value = getattr(self, name)
            none = value is None and name in ("top_k", "logprobs", "seed")
            if not none and not isinstance(value, Integral if name in whole else Real):
                raise SamplingError(f"{name} must be {'an integer' if name in whole else 'a number'}, found {value!r}")
        ranges: list[tuple[str, bool, str]] = [
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_k", self.top_k is None or self.top_k >= 1, "None or at least 1"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "positive (1 is none)"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "finite (0 is none)"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "finite (0 is none)"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "in [0, 2**63)"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 64, "None or in [0, 64]"),
            ("stop", all(self.stop), "without empty strings"),
            ("logit_bias", all(map(math.isfinite, self.logit_bias.values())), "finite (ban tokens with banned_tokens)"),
        ]
        for name, good, wanted in ranges:
            if not good:  # NaN fails every comparison, and so lands here too
                raise SamplingError(f"{name} must be {wanted}, found {getattr(self, name)!r}")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise SamplingError where a token id lies outside the target's vocabulary."""
        for name in ("logit_bias", "banned_tokens", "stop_tokens"):
            for token in getattr(self, name):
                if not 0 <= token < vocab_size:
                    raise SamplingError(f"{name}: token id {token} is outside the target's vocabulary of {vocab_size}")
        if len(set(self.banned_tokens)) >= vocab_size:
            raise SamplingError(f"banned_tokens bans all {vocab_size} tokens: nothing is left to draw; leave one out")

    @property
    def penalises(self) -> bool:
        """Whether the scores depend on the tokens that came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


# --- noise -----------------------------------------------------------------------------------------------------------

_GOLDEN, _MIX1, _MIX2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_ALL = 2**64 - 1
DRAFT, ACCEPT, TARGET = 1, 2, 0  # streams: noise drawn for one purpose never meets another's


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al. 2014): integer arithmetic alone, so alike on every device."""
    x = _shift_right(x, 30).bitwise_xor_(x).mul_(_MIX1)  # in place: this runs over the whole vocabulary
    x = _shift_right(x, 27).bitwise_xor_(x).mul_(_MIX2)
    return _shift_right(x, 31).bitwise_xor_(x)


def _mix_int(x: int) -> int:
    """``_mix`` of one number on the host: a dozen kernels on one number each would take far longer."""
    x &= _ALL
    x = (x ^ x >> 30) * _MIX1 & _ALL
    x = (x ^ x >> 27) * _MIX2 & _ALL
    return _wrap(x ^ x >> 31)


def _wrap(x: int) -> int:
    """``x`` as an int64 holds it."""
    return (x + 2**63 & _ALL) - 2**63


def hash_bits(seed: int, counters: Sequence[int | Tensor], ids: Tensor) -> Tensor:
    """64 random bits for each id: int64 of the shape that ``counters`` and ``ids`` broadcast to.

    Each counter (an int or an int64 tensor) is absorbed in turn, so that (1, 2) and (2, 1) differ.
    """
    key: int | Tensor = _mix_int(seed + _GOLDEN)
    for counter in counters:
        key = _wrap(key + _GOLDEN) if isinstance(key, int) else key + _GOLDEN
        if isinstance(counter, Tensor):
            key = _mix(_mix(counter * _MIX2 + _GOLDEN) ^ key)
        elif isinstance(key, Tensor):
            key = _mix(key ^ _mix_int(counter * _MIX2 + _GOLDEN))
        else:
            key = _mix_int(key ^ _mix_int(counter * _MIX2 + _GOLDEN))
    return _mix(key + (ids + 1) * _GOLDEN)


def uniform(bits: Tensor) -> Tensor:
    """float64 in the open interval (0, 1) from 64 bits, on a grid of 2^-52."""
    return _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise as float32; computed in float64, so that a last-bit difference of ``log`` rounds away."""
    return uniform(bits).log_().neg_().log_().neg_().float()


class KeyedNoise:
    """Gumbel noise of a (seed, position) over the whole vocabulary, each computed once while it is near.

    The drafter, the verification and the next step's verification ask for the same positions; a bounded
    cache serves them, the least recently used going first. It holds no state that could change a result.

    Attributes:
        handle: by which the CPU kernel reads the same noise; None: it cannot.
    """

    handle: int | None = None

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", capacity: int = 256) -> None:
        self.vocab_size, self._device = vocab_size, device
        self._cache: OrderedDict[tuple[int, int], Tensor] = OrderedDict()
        self._capacity = capacity

    @cached_property
    def _ids(self) -> Tensor:
        return torch.arange(self.vocab_size, device=self._device)

    def at(self, seed: int, position: int) -> Tensor:
        """(V,) float32."""
        key = (seed, position)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = gumbel(hash_bits(seed, (TARGET, position), self._ids))
            if len(self._cache) > self._capacity:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        return found

    def block(self, seeds: Sequence[int], starts: Sequence[int], num_positions: int) -> Tensor:
        """(B, D, V): positions ``starts[b] .. starts[b] + num_positions - 1`` of every row."""
        keys = [(seed, start + i) for seed, start in zip(seeds, starts, strict=True) for i in range(num_positions)]
        rows = [self.at(seed, position) for seed, position in keys]
        return torch.stack(rows).view(len(seeds), num_positions, -1)

    def walk(self, tree: DraftTree, scores: Tensor, seeds: Sequence[int], starts: Sequence[int]) -> Accepted | None:
        """What ``accept.match`` keeps, where something faster than Python finds it; else None.

        Args:
            tree: the batch of trees.
            scores: (B, N, V) on the host.
            seeds: of the rows, -1 for greedy ones.
            starts: for each row the absolute position of the token after the root.
        """
        return None


def on_host(tensor: Tensor) -> bool:
    """Whether reading a tensor's numbers waits for nothing: then loops handle a few of them faster than operators."""
    return tensor.device.type == "cpu"


def best_of(scores: Tensor) -> Tensor:
    """argmax over the last dimension; on a CPU by numpy, many times as fast on a few rows."""
    if on_host(scores) and scores.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.asarray(scores.detach().numpy().argmax(-1)))
    return scores.argmax(-1)


# --- scores ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """What penalties look at: the committed tokens of each row.

    Attributes:
        tokens: (B, S) int64, valid up to ``lengths``.
        lengths: (B,) committed tokens (the pending token not counted).
        prompt_lengths: (B,).
    """

    tokens: Tensor
    lengths: Tensor
    prompt_lengths: Tensor


class SamplingBatch:
    """The sampling of the rows of one step, as tensors.

    Scores are float32 (float64 for a float64 target): masked tokens hold -inf, rows with a temperature are
    divided by it. Whoever draws adds noise to them; the classic rules take their softmax.
    """

    def __init__(self, rows: Sequence[Sampling], noise: KeyedNoise, device: torch.device | str = "cpu") -> None:
        self.rows = tuple(rows)
        self.noise = noise
        self.device = torch.device(device)
        self.seeds = [row.seed or 0 for row in rows]  # the loop has drawn those that were None
        self.drawing_seeds = [row.seed or 0 if row.temperature > 0 else -1 for row in rows]  # -1: greedy
        self.num_greedy = sum(row.temperature == 0 for row in rows)
        self.all_greedy = self.num_greedy == len(rows)
        self.scales = any(row.temperature not in (0.0, 1.0) for row in rows)
        self.penalises = any(row.penalises for row in rows)
        self.biases = any(row.logit_bias or row.banned_tokens for row in rows)
        self._columns: dict[str, Tensor] = {}

    def _column(self, name: str) -> Tensor:
        """One parameter of every row, (B, 1, 1) float64; it goes to the device once, since that may have to wait."""
        if name not in self._columns:
            values = [getattr(row, name) for row in self.rows]
            self._columns[name] = torch.tensor(values, dtype=torch.float64, device=self.device)[:, None, None]
        return self._columns[name]

    @cached_property
    def greedy(self) -> Tensor:
        """(B, 1, 1) bool."""
        return self._column("temperature") == 0

    @cached_property
    def temperature(self) -> Tensor:
        """(B, 1, 1) float64, 1 for greedy rows."""
        return self._column("temperature").masked_fill(self.greedy, 1.0)

    @cached_property
    def only_temperature(self) -> bool:
        """Whether the scores follow from the logits and a temperature alone."""
        filters = any(row.top_k is not None or row.top_p < 1 or row.min_p > 0 for row in self.rows)
        return not (self.penalises or self.biases or (filters and not self.all_greedy))

    def scores(self, logits: Tensor, tree: DraftTree, history: History | None) -> Tensor:
        """(B, N, V) scores of the token after each node. ``history`` may be None where nothing penalises."""
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if self.penalises:
            assert history is not None
            scores = self._penalise(scores, tree, history)
        if self.biases:
            scores = self._bias(scores)
        if self.all_greedy:
            return scores
        if self.scales:
            scores = scores / self.temperature.to(scores.dtype)
        return self._filter(scores)

    def _penalise(self, scores: Tensor, tree: DraftTree, history: History) -> Tensor:
        """Counts of the committed tokens plus those on each node's own path, then the three penalties."""
        rows, nodes, vocab = scores.shape
        slots = torch.arange(history.tokens.shape[1], device=scores.device)
        committed = slots < history.lengths[:, None]
        output = committed & (slots >= history.prompt_lengths[:, None])
        safe = history.tokens.clamp(min=0)
        path = tree.ancestors & tree.valid[:, None, :]
        # The root is output unless it is still the prompt's last token; every drafted node is.
        path_output = path.clone()
        path_output[:, :, 0] &= (history.lengths >= history.prompt_lengths)[:, None]
        path_tokens = tree.tokens.clamp(min=0)[:, None, :].expand(rows, nodes, tree.num_nodes)

        def counts(past: Tensor, on_path: Tensor) -> Tensor:
            base = torch.zeros(rows, vocab, dtype=scores.dtype, device=scores.device)
            base.scatter_add_(1, safe, past.to(scores.dtype))
            each = base[:, None, :].repeat(1, nodes, 1)
            return each.scatter_add_(2, path_tokens, on_path.to(scores.dtype))

        seen = counts(committed, path) > 0
        written = counts(output, path_output)
        penalty = self._column("repetition_penalty").to(scores.dtype)
        scores = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
        scores = scores - self._column("frequency_penalty").to(scores.dtype) * written
        return scores - self._column("presence_penalty").to(scores.dtype) * (written > 0)

    @cached_property
    def _bias_rows(self) -> Tensor:
        """(B, 1, V) float64, -inf for banned tokens."""
        bias = torch.zeros(len(self.rows), 1, self.noise.vocab_size, dtype=torch.float64)
        for b, row in enumerate(self.rows):
            for token, value in row.logit_bias.items():
                bias[b, 0, token] = value
            bias[b, 0, list(row.banned_tokens)] = -math.inf
        return bias.to(self.device)

    def _bias(self, scores: Tensor) -> Tensor:
        return scores + self._bias_rows.to(scores.dtype)

    def _filter(self, scores: Tensor) -> Tensor:
        vocab = scores.shape[-1]
        if any(row.top_k is not None and row.top_k < vocab for row in self.rows):
            scores = self._top_k(scores)
        if any(row.top_p < 1 for row in self.rows):
            scores = self._nucleus(scores)
        if any(row.min_p > 0 for row in self.rows):
            floor = scores.amax(-1, keepdim=True) + self._column("min_p").log().to(scores.dtype)
            scores = scores.masked_fill(scores < floor, -math.inf)
        return scores

    def _ks(self, vocab: int) -> Tensor:
        """(B, 1, 1) int64: of how many tokens a row keeps the best."""
        if "ks" not in self._columns:
            values = [min(row.top_k or vocab, vocab) for row in self.rows]
            self._columns["ks"] = torch.tensor(values, device=self.device)[:, None, None]
        return self._columns["ks"]

    def _top_k(self, scores: Tensor) -> Tensor:
        """Mask what lies below the k-th score; ties with it stay, as in transformers."""
        vocab, ks = scores.shape[-1], self._ks(scores.shape[-1])
        largest = max(row.top_k for row in self.rows if row.top_k is not None)
        best = scores.topk(min(largest, vocab), dim=-1).values
        cut = best.gather(-1, (ks - 1).clamp(max=best.shape[-1] - 1).expand(-1, scores.shape[1], 1))
        return scores.masked_fill((scores < cut) & (ks < vocab), -math.inf)

    def _nucleus(self, scores: Tensor) -> Tensor:
        """Keep the fewest tokens whose probability reaches top-p, and all that tie with the last of them.

        The cut is a *value*, so it does not depend on how a sort breaks ties. The few best are nearly always
        enough; a full sort (slow on a CPU) is made only where they are not.
        """
        probs = scores.softmax(-1)
        top_p = self._column("top_p").to(probs.dtype)
        vocab = probs.shape[-1]
        for count in (min(256, vocab), vocab):
            best = probs.topk(count, dim=-1).values
            before = best.cumsum(-1) - best
            inside = before < top_p
            if count == vocab or not bool(inside[..., -1].any()):
                break
        last = inside.sum(-1, keepdim=True).clamp(min=1) - 1
        cut = best.gather(-1, last)
        return scores.masked_fill((probs < cut) & (top_p < 1), -math.inf)

    def draw(self, scores: Tensor, depths: Tensor, starts: Sequence[int], max_depth: int) -> Tensor:
        """(B, N) the tokens that the scores' owner draws after each node with the noise of their positions.

        Args:
            scores: (B, N, V).
            depths: (B, N) each node's depth.
            starts: for each row the absolute position of the token after the root.
            max_depth: at least ``depths.max()``; kept on the host so that nothing waits for a device.
        """
        return best_of(self.perturb(scores, depths, starts, max_depth))

    def draw_one(self, scores: Tensor, row: int, position: int) -> int:
        """The same for one node: its ``scores`` (V,), and the absolute position of the token after it."""
        if self.rows[row].temperature > 0:
            scores = scores + self.noise.at(self.seeds[row], position)
        return int(best_of(scores))

    def perturb(self, scores: Tensor, depths: Tensor, starts: Sequence[int], max_depth: int) -> Tensor:
        """(B, N, V) scores + noise; greedy rows stay as they are. Its argmax is the drawn token."""
        if self.all_greedy:
            return scores
        noise = self.noise.block(self.seeds, starts, max_depth + 1)
        per_node = noise.gather(1, depths[:, :, None].expand(-1, -1, noise.shape[-1])) if max_depth else noise
        return self.add_noise(scores, per_node)

    def perturb_level(self, scores: Tensor, starts: Sequence[int], level: int) -> Tensor:
        """The same where all nodes have one depth: what a growing tree adds to its newest level."""
        if self.all_greedy:
            return scores
        noise = self.noise.block(self.seeds, [start + level for start in starts], 1)
        return self.add_noise(scores, noise)

    def add_noise(self, scores: Tensor, noise: Tensor) -> Tensor:
        """``scores`` (B, N, V) + ``noise`` (B, N or 1, V), but for greedy rows."""
        if not self.num_greedy:
            return scores + noise
        return torch.where(self.greedy, scores, scores + noise)

    def probs(self, scores: Tensor) -> Tensor:
        """(B, N, V) the law of a drawn token: softmax of the scores; one-hot at the argmax for greedy rows."""
        probs = scores.softmax(-1)
        if not self.num_greedy:
            return probs
        one_hot = torch.zeros_like(probs).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
        return torch.where(self.greedy, one_hot, probs)
