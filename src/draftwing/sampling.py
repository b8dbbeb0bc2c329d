"""Sampling parameters, and scores: logits after penalties, biases, temperature and cuts, with one noise per position.

A token is drawn as argmax(scores + g) with Gumbel noise g (the Gumbel-max trick). g is a hash of (seed, absolute
position, token id); there is no generator and no state. The text is therefore a function of target, prompt and seed
alone, whatever the drafter, the tree or the batch, and a drafter that adds the same g to its own scores agrees with the
target more often (Daliri et al. 2024, "Coupling without communication and drafter-invariant speculative decoding").

Shape suffixes: B rows, N nodes, D positions, V vocabulary, S slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwing.checks import MAX_BATCH, listed, pairs
from draftwing.errors import CheckpointError, ConfigError, SamplingError, shown
from draftwing.noise import Filters, KeyedNoise, hash_bits
from draftwing.storage import read_json_object
from draftwing.tree import DraftTree


@dataclass(frozen=True)
class History:
    """The committed tokens of each row, which penalties depend on.

    Attributes:
        tokens: (B, S) int64, valid up to ``lengths``.
        lengths: (B,) committed tokens, without the pending token.
        prompt_lengths: (B,).
    """

    tokens: Tensor
    lengths: Tensor
    prompt_lengths: Tensor


@dataclass(frozen=True)
class Penalties:
    """One value per row, (B, 1, 1) float64. Repetition counts prompt and output, the others only the output."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor


def penalised(scores: Tensor, tree: DraftTree, history: History, by: Penalties) -> Tensor:
    """Return the scores (B, N, V) with penalties by the counts of the committed tokens and of each node's path."""
    rows, nodes, vocab = scores.shape
    slots = torch.arange(history.tokens.shape[1], device=scores.device)
    committed = slots < history.lengths[:, None]
    output = committed & (slots >= history.prompt_lengths[:, None])
    ids = history.tokens.clamp(min=0)
    path = tree.ancestors & tree.valid[:, None, :]
    # The root is output unless it is the prompt's last token; every drafted node is.
    path_output = path.clone()
    path_output[:, :, 0] &= (history.lengths >= history.prompt_lengths)[:, None]
    path_ids = tree.tokens.clamp(min=0)[:, None, :].expand(rows, nodes, tree.num_nodes)

    def counts(past: Tensor, on_path: Tensor) -> Tensor:
        in_past = torch.zeros(rows, vocab, dtype=scores.dtype, device=scores.device)
        in_past.scatter_add_(1, ids, past.to(scores.dtype))
        return in_past[:, None, :].repeat(1, nodes, 1).scatter_add_(2, path_ids, on_path.to(scores.dtype))

    seen, written = counts(committed, path) > 0, counts(output, path_output)
    penalty = by.repetition.to(scores.dtype)
    scores = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    scores = scores - by.frequency.to(scores.dtype) * written
    return scores - by.presence.to(scores.dtype) * (written > 0)


def penalised_on_host(scores: Tensor, tree: DraftTree, history: History, by: Penalties) -> Tensor:
    """Do the same, to the bit, for float32 or float64 scores on the host.

    Only tokens that occurred are touched, in one thread.
    """
    whole = np.array(scores.detach().numpy())  # a copy
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    lengths, prompts = history.lengths.tolist(), history.prompt_lengths.tolist()
    committed, dtype = history.tokens.numpy(), whole.dtype.type

    def change(scores: np.ndarray, written: np.ndarray) -> np.ndarray:
        scores = np.where(scores > 0, scores / repetition, scores * repetition)
        scores = scores - frequency * written
        changed: np.ndarray = scores - presence * (written > 0).astype(dtype)
        return changed

    amounts = zip(*(values.flatten().tolist() for values in (by.repetition, by.presence, by.frequency)), strict=True)
    for row, penalties in enumerate(amounts):
        if penalties == (1.0, 0.0, 0.0):
            continue
        repetition, presence, frequency = map(dtype, penalties)
        ids, place = np.unique(committed[row, : lengths[row]], return_inverse=True)
        written = np.bincount(place[prompts[row] :], minlength=len(ids)).astype(dtype)
        before = {int(token): float(count) for token, count in zip(ids, written, strict=True)}
        root_counts = lengths[row] >= prompts[row]
        paths: list[list[int]] = []
        nodes, path_ids, counts = list[int](), list[int](), list[float]()
        for node, (token, above) in enumerate(zip(tokens[row], parents[row], strict=True)):
            paths.append([*(paths[above] if above >= 0 else []), *([node] if token >= 0 else [])])
            on_path: dict[int, float] = {}
            for step in paths[-1]:
                token = tokens[row][step]
                on_path[token] = on_path.get(token, before.get(token, 0.0)) + (step > 0 or root_counts)
            nodes += [node] * len(on_path)
            path_ids += on_path
            counts += on_path.values()
        changed = change(whole[row, nodes, path_ids], np.array(counts, dtype=dtype))
        whole[row][:, ids] = change(whole[row][:, ids], written)
        whole[row, nodes, path_ids] = changed
    return torch.from_numpy(whole)


PENALTIES = ("repetition", "presence", "frequency")
# Limits of a setting's factor and addend: all of them together stay far inside float32, so that settings never make
# scores that are not finite.
_MAX_FACTOR, _MAX_ADDEND = 1e10, 1e20
_MAX_ITEMS = 1 << 20  # more tokens than any vocabulary has
_OR_GREEDY, _OR_NONE = "0 (greedy) or in [1e-10, 1e10]", "in [-1e20, 1e20] (0 is none)"


@dataclass(frozen=True)
class Sampling:
    """How one request is sampled and when it ends. The defaults are greedy decoding of 128 tokens.

    Applied in this order, as in transformers: repetition, presence and frequency penalties, logit bias, banned tokens,
    temperature, top-k, top-p, min-p. Repetition counts prompt and output, presence and frequency only the output. All
    of it is applied at every tree node with the tokens of that node's path.

    Attributes:
        seed: None draws one per request; the result reports it.
        min_tokens: tokens before anything ends the text. Until then end tokens and ``stop_tokens`` are not drawn, and
            a stop string that is complete by then is ignored. A complete grammar still ends its text.
        logprobs: most likely tokens to report with the log-probability of each emitted token; None reports nothing.
        node_distributions: most likely tokens to report for each node of the trees; 0 reports nothing.

    Raises:
        SamplingError: a value outside its range; the message states the range.
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
    min_tokens: int = 0
    node_distributions: int = 0

    def __post_init__(self) -> None:
        for name, kind in (("stop_tokens", Integral), ("banned_tokens", Integral), ("stop", str)):
            self._set(name, _items(name, getattr(self, name), kind))
        for name in ("top_k", "max_tokens", "min_tokens", "seed", "logprobs", "node_distributions"):
            value = getattr(self, name)
            if value is None and name in ("top_k", "logprobs", "seed"):
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise SamplingError(f"{name} must be an integer, found {shown(value)}")
            self._set(name, int(value))
        for name in ("temperature", "top_p", "min_p", *(f"{of}_penalty" for of in PENALTIES)):
            self._set(name, _number(name, getattr(self, name)))
        if not isinstance(self.ignore_eos, bool):
            raise SamplingError(f"ignore_eos must be True or False, found {shown(self.ignore_eos)}")
        self._set("logit_bias", _biases(self.logit_bias))
        ranges = [
            ("temperature", self.temperature == 0 or 1 / _MAX_FACTOR <= self.temperature <= _MAX_FACTOR, _OR_GREEDY),
            ("top_k", self.top_k is None or self.top_k >= 1, "None or at least 1"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            (
                "repetition_penalty",
                1 / _MAX_FACTOR <= self.repetition_penalty <= _MAX_FACTOR,
                "in [1e-10, 1e10] (1 is none)",
            ),
            ("presence_penalty", abs(self.presence_penalty) <= _MAX_ADDEND, _OR_NONE),
            ("frequency_penalty", abs(self.frequency_penalty) <= _MAX_ADDEND, _OR_NONE),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"in [0, max_tokens = {shown(self.max_tokens)}]"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "None (drawn) or in [0, 2**63)"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 64, "None or in [0, 64]"),
            ("node_distributions", 0 <= self.node_distributions <= 64, "in [0, 64] (0 is none)"),
            ("stop", all(self.stop), "without empty strings"),
        ]
        for name, is_valid, allowed in ranges:
            if not is_valid:  # also for NaN, which fails every comparison
                raise SamplingError(f"{name} must be {allowed}, found {shown(getattr(self, name))}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise SamplingError if a token id is outside the target's vocabulary."""
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, int):
            raise SamplingError(f"vocab_size must be a whole number, found {shown(vocab_size)}")
        for name in ("logit_bias", "banned_tokens", "stop_tokens"):
            for token in getattr(self, name):
                if not 0 <= token < vocab_size:
                    raise SamplingError(
                        f"{name}: token id {shown(token)} is outside the target's vocabulary of {vocab_size}"
                    )
        if len(set(self.banned_tokens)) >= vocab_size:
            raise SamplingError(f"banned_tokens bans all {vocab_size} tokens: nothing is left to draw; leave one out")

    @property
    def penalises(self) -> bool:
        """True if the scores depend on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SamplingError(f"{name} must be a number, found {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _items(name: str, value: object, kind: type) -> tuple[Any, ...]:
    """Return a field that lists token ids or stop strings; a single string is one stop string."""
    items: list[Any] | None = [value] if isinstance(value, str) else None
    if not isinstance(value, str | Mapping | bytes | bytearray):
        items = listed(value, _MAX_ITEMS)
    if items is not None and any(
        "\ud800" <= char <= "\udfff" for item in items if isinstance(item, str) for char in item
    ):
        raise SamplingError(f"{name} must be text, found {shown(value)}: remove the unpaired surrogate")
    if items is None or any(isinstance(item, bool) or not isinstance(item, kind) for item in items):
        content = "strings" if kind is str else "token ids"
        raise SamplingError(
            f"{name} must be a list of {content}, found {shown(value)}: leave it out for none, or give at most "
            f"{_MAX_ITEMS:,}"
        )
    return tuple(map(str, items)) if kind is str else tuple(map(int, items))


def _biases(value: object) -> dict[int, float]:
    items = pairs(value, _MAX_ITEMS)
    if items is None:
        raise SamplingError(
            f"logit_bias must be a dict of token ids to numbers, as {{42: -1.5}}, found {shown(value)}: leave it out"
        )
    biases = {}
    for token, bias in items:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise SamplingError(
                f"logit_bias must have token ids (ints) as keys, found {shown(token)}: write {{42: -1.5}}"
            )
        number = biases[int(token)] = _number("each value of logit_bias", bias)
        if not abs(number) <= _MAX_ADDEND:
            raise SamplingError(
                f"logit_bias must be in [-1e20, 1e20] (ban tokens with banned_tokens), found {shown(bias)} for token "
                f"{shown(token)}"
            )
    return biases


def on_host(tensor: Tensor) -> bool:
    """Return True if reading numbers does not wait for a device; loops over a few are then faster than operators."""
    return tensor.device.type == "cpu"


def best_of(scores: Tensor) -> Tensor:
    """Return the argmax over the last dimension; on a CPU by NumPy, many times as fast on a few rows."""
    if on_host(scores) and scores.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.asarray(scores.detach().numpy().argmax(-1)))
    return scores.argmax(-1)


# --- scores ----------------------------------------------------------------------------------------------------------


class SamplingBatch:
    """The sampling of the rows of one step, as tensors.

    Scores are float32 (float64 for a float64 target): masked tokens hold -inf, rows with a temperature are divided by
    it. Keyed sampling adds noise to them; the classic rules take their softmax.
    """

    def __init__(self, rows: Sequence[Sampling], noise: KeyedNoise, device: torch.device | str = "cpu") -> None:
        self.rows = tuple(rows)
        self.noise = noise
        self.device = torch.device(device)
        self.seeds = [row.seed or 0 for row in rows]  # the decode loop has replaced None
        self.drawing_seeds = [row.seed or 0 if row.temperature > 0 else -1 for row in rows]  # -1: greedy
        self.num_greedy = sum(row.temperature == 0 for row in rows)
        self.all_greedy = self.num_greedy == len(rows)
        self.scales = any(row.temperature not in (0.0, 1.0) for row in rows)
        self.penalises = any(row.penalises for row in rows)
        self.biases = any(row.logit_bias or row.banned_tokens for row in rows)
        self.adjusts = self.penalises or self.biases
        self.has_node_distributions = any(row.node_distributions for row in rows)
        vocab = noise.vocab_size
        top_ks = [0 if row.top_k is None or row.top_k >= vocab else row.top_k for row in rows]
        self._cuts = any(row.top_k is not None or row.top_p < 1 or row.min_p > 0 for row in rows)
        self.all_filters: Filters = (
            [row.temperature for row in rows], top_ks, [row.top_p for row in rows], [row.min_p for row in rows],
        )  # fmt: skip
        # None if there is nothing to apply
        self.filters = self.all_filters if not self.all_greedy and (self.scales or self._cuts) else None
        self._columns: dict[str, Tensor] = {}

    def _column(self, name: str) -> Tensor:
        """Return a parameter of every row, (B, 1, 1) float64; copied to the device once, since copies may wait."""
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
        """True if the scores follow from the logits and a temperature alone."""
        return not (self.penalises or self.biases or (self._cuts and not self.all_greedy))

    def scores(self, logits: Tensor, tree: DraftTree, history: History | None) -> Tensor:
        """Return the scores (B, N, V) of the token after each node. ``history`` may be None without penalties."""
        return self.filtered(self.adjusted(logits, tree, history))

    def adjusted(self, logits: Tensor, tree: DraftTree, history: History | None) -> Tensor:
        """Apply penalties and biases, which depend on earlier tokens or concern a few tokens.

        On a CPU by NumPy: PyTorch's threads would busy-wait on the processors that the kernel needs.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if self.penalises:
            if history is None:
                raise SamplingError("penalties need the tokens so far: pass ctx.history()")
            by = Penalties(*(self._column(f"{name}_penalty") for name in PENALTIES))
            scores = (penalised_on_host if on_host(scores) else penalised)(scores, tree, history, by)
        if not self.biases:
            return scores
        if not on_host(scores):
            return scores + self._bias_rows.to(scores.dtype)
        array = scores.detach().numpy()
        array = array if self.penalises else np.array(array, order="C")  # penalties have made a copy
        for row, (ids, amounts) in enumerate(self._host_biases):
            if len(ids):
                array[row, :, ids] += amounts.astype(array.dtype)[:, None]
        return torch.from_numpy(array)

    @cached_property
    def _host_biases(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """``token_biases`` as ids and float64 amounts."""
        rows = [(list(row), list(row.values())) for row in self.token_biases]
        return [(np.array(ids, dtype=np.int64), np.array(amounts, dtype=np.float64)) for ids, amounts in rows]

    def filtered(self, scores: Tensor) -> Tensor:
        """Apply temperature, top-k, top-p and min-p."""
        if self.all_greedy:
            return scores
        if self.scales:
            scores = scores / self.temperature.to(scores.dtype)
        return self._filter(scores)

    @cached_property
    def _bias_rows(self) -> Tensor:
        """(B, 1, V) float64, -inf for banned tokens."""
        bias = torch.zeros(len(self.rows), 1, self.noise.vocab_size, dtype=torch.float64)
        for b, row in enumerate(self.token_biases):
            for token, value in row.items():
                bias[b, 0, token] = value
        return bias.to(self.device)

    @cached_property
    def token_biases(self) -> list[dict[int, float]]:
        """The addends of each row by token id, -inf for banned tokens."""
        return [{**row.logit_bias, **dict.fromkeys(row.banned_tokens, -math.inf)} for row in self.rows]

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

    def _top_k(self, scores: Tensor) -> Tensor:
        """Mask scores below the k-th; ties with it stay, as in transformers."""
        vocab = scores.shape[-1]
        if "ks" not in self._columns:
            values = [min(row.top_k or vocab, vocab) for row in self.rows]
            self._columns["ks"] = torch.tensor(values, device=self.device)[:, None, None]
        ks = self._columns["ks"]
        largest = max(row.top_k for row in self.rows if row.top_k is not None)
        best = scores.topk(min(largest, vocab), dim=-1).values
        cut = best.gather(-1, (ks - 1).clamp(max=best.shape[-1] - 1).expand(-1, scores.shape[1], 1))
        return scores.masked_fill((scores < cut) & (ks < vocab), -math.inf)

    def _nucleus(self, scores: Tensor) -> Tensor:
        """Keep the fewest tokens whose probability reaches top-p, and all that tie with the last of them.

        The cut is a *value*, so it does not depend on how a sort breaks ties. The 256 best are nearly always enough; a
        full sort, slow on a CPU, is made only if they are not.
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
        """Return the tokens (B, N) drawn after each node with the noise of their positions.

        Args:
            scores: (B, N, V).
            depths: (B, N) each node's depth.
            starts: for each row the absolute position of the token after the root.
            max_depth: at least ``depths.max()``; given by the host, so that nothing waits for a device.
        """
        return best_of(self.perturb(scores, depths, starts, max_depth))

    def draw_one(self, scores: Tensor, row: int, position: int) -> int:
        """Return the token drawn from the ``scores`` (V,) of one node; ``position`` is the token's, absolute."""
        if self.rows[row].temperature > 0:
            scores = scores + self.noise.at(self.seeds[row], position)
        return int(best_of(scores))

    def perturb(self, scores: Tensor, depths: Tensor, starts: Sequence[int], max_depth: int) -> Tensor:
        """Return scores + noise (B, N, V), greedy rows unchanged. The argmax is the drawn token."""
        if self.all_greedy:
            return scores
        noise = self.noise.block(self.seeds, starts, max_depth + 1)
        per_node = noise.gather(1, depths[:, :, None].expand(-1, -1, noise.shape[-1])) if max_depth else noise
        return self.add_noise(scores, per_node)

    def perturb_level(self, scores: Tensor, starts: Sequence[int], level: int) -> Tensor:
        """Do the same for nodes of one depth: the newest level of a growing tree."""
        if self.all_greedy:
            return scores
        noise = self.noise.block(self.seeds, [start + level for start in starts], 1)
        return self.add_noise(scores, noise)

    def add_noise(self, scores: Tensor, noise: Tensor) -> Tensor:
        """Return ``scores`` (B, N, V) + ``noise`` (B, N or 1, V), greedy rows unchanged."""
        if not self.num_greedy:
            return scores + noise
        return torch.where(self.greedy, scores, scores + noise)

    def probs(self, scores: Tensor) -> Tensor:
        """Return the distribution (B, N, V) of a drawn token: softmax; one-hot at the argmax for greedy rows."""
        probs = scores.softmax(-1)
        if not self.num_greedy:
            return probs
        one_hot = torch.zeros_like(probs).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
        return torch.where(self.greedy, one_hot, probs)


# --- from user input: options by name, dicts, one for each prompt, several texts from one seed ------------------------

# Names for the options of transformers and vLLM.
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens, which does not count the prompt",
    "do_sample": "temperature (0 is greedy, 1 samples)",
    "num_return_sequences": "n",
    "eos_token_id": "stop_tokens",
    "stop_token_ids": "stop_tokens",
    "stop_strings": "stop",
    "bad_words_ids": "banned_tokens",
    "suppress_tokens": "banned_tokens",
    "sequence_bias": "logit_bias",
    "assistant_model": "draft, an option of load",
    "num_assistant_tokens": "speculation=Budget(...)",
    "prompt_lookup_num_tokens": "draft='lookup', an option of load",
    "streamer": "LM.stream",
}


def model_settings(folder: Path) -> dict[str, Any]:
    """Return the sampling settings of a model's ``generation_config.json``; {} without one.

    Raises CheckpointError if one is no number. Ranges are only checked when the settings are used: see ``sampling_of``.
    """
    file = folder / "generation_config.json"
    config = read_json_object(file) if file.exists() else {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    settings = {name: config[name] for name in names if config.get(name) is not None}
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(
                f"{file}: `{name}` must be a number, found {shown(value)}: correct it, or download the file again"
            )
    top_k = settings.get("top_k")
    if top_k in (0, -1):  # all tokens, in transformers and in vLLM
        del settings["top_k"]
    elif isinstance(top_k, float) and top_k.is_integer():
        settings["top_k"] = int(top_k)
    return settings


def sampling_of(folder: Path) -> Sampling:
    """Return a model's own sampling; without ``generation_config.json``, temperature is 1. Raises SamplingError."""
    try:
        return Sampling(**{"temperature": 1.0, **model_settings(folder)})
    except SamplingError as error:
        raise SamplingError(
            f"{folder}/generation_config.json: {error}: correct it, or remove it for the default"
        ) from error


def nth_seed(seed: int, number: int) -> int:
    """Return the seed of one of several samples; sample 0 has ``seed`` itself."""
    if number == 0:
        return seed
    return int(hash_bits(seed, (number,), torch.zeros(1, dtype=torch.int64))) & (2**63 - 1)


def nth_sampling(sampling: Sampling, number: int) -> Sampling:
    """Return the sampling of the ``number``-th text of a prompt."""
    if number == 0 or sampling.seed is None:
        return sampling
    return replace(sampling, seed=nth_seed(sampling.seed, number))


def one_each(sampling: Any, count: int, options: Mapping[str, Any]) -> list[Sampling]:
    """Return the sampling of every prompt. Raises ConfigError if their number is wrong."""
    if not isinstance(sampling, list | tuple):
        return [sampling_from(sampling, options)] * count
    entries = listed(sampling, MAX_BATCH)
    if entries is None or len(entries) != count:
        raise ConfigError(
            f"sampling has {len(sampling)} entries for {count} prompts: give one for each prompt, or one for all"
        )
    return [sampling_from(entry, options) for entry in entries]


def sampling_from(sampling: Any, options: Mapping[str, Any]) -> Sampling:
    """Return a ``Sampling``, given as such, as a dict of its fields or as None, with ``options`` replaced.

    Raises:
        ConfigError: another type, or an unknown option.
        SamplingError: a value outside its range.
    """
    if isinstance(sampling, Mapping):
        own = pairs(sampling, 1000)
        if own is None:
            raise ConfigError(f"sampling must be a dict of Sampling's fields, found {shown(sampling)}")
        sampling, options = None, {**dict(own), **options}
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ConfigError(
            f"sampling must be a Sampling, a dict of its fields or None, found {shown(sampling)}: write "
            f"Sampling(temperature=0.8), or temperature=0.8"
        )
    names = [entry.name for entry in fields(Sampling)]
    unknown = next((name for name in options if name not in names), None)
    if unknown is not None:
        name = unknown if isinstance(unknown, str) else ""
        near = [_OTHER_NAMES[name]] if name in _OTHER_NAMES else get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"unknown sampling option {shown(unknown)}: {hint}the options are {', '.join(names)}")
    return replace(Sampling() if sampling is None else sampling, **options)
