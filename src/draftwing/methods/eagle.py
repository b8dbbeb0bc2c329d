"""EAGLE-1, EAGLE-2, HASS, EAGLE-3, EAGLE-3.1 and P-EAGLE as draft methods: one network, several trainings.

    eagle_net      the networks
    net_drafter    the drafter, which other networks share
    unroll         training: HASS and EAGLE-3's training-time test

Training starts from the best linear prediction from a network's inputs, and for EAGLE-3 from attention that finds
repeated text. Both are solved in closed form on a few batches of the target's features, in seconds. Only the start of
training changes: all weights are trained, and the format is the same.

Shape suffixes: N entries, H hidden, F features (all taps), C channels of a code, D head dimension, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.formats.doctor import Finding, diagnose
from draftwing.formats.read import eagle_version, read_head
from draftwing.formats.settings import is_parallel
from draftwing.formats.write import convert, write_head
from draftwing.methods.base import Drafter
from draftwing.methods.eagle_net import EagleConfig, EagleNet, default_taps
from draftwing.methods.method import NetMethod, NewNet
from draftwing.methods.net import Scored
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.models.attention import CausalAttention
from draftwing.models.layers import DecoderLayer, GatedMLP
from draftwing.models.linear import Linear
from draftwing.models.rope import inverse_frequencies
from draftwing.models.target import Target
from draftwing.runtime.forward import Entries
from draftwing.runtime.tree_builder import Drafted, DraftRequest, VerifyRequest

SLOW_TOKENS = 100  # distance over which a rotated channel that carries a code turns by less than one radian
MATCH_SCORE = 12.0  # attention score of a key that matches both tokens of the query
COPY_SCALE = 2.0  # size of attention's output relative to the state that it is added to
NOISE, QUERY_NOISE = 0.3, 0.5  # share of the random start that is added to the solution
NUM_SCORED = 1024  # entries on which the head's scale is solved
RIDGE = 1e-2  # share of the inputs' mean variance


@dataclass(frozen=True)
class _Entries:
    """Entries of the training data."""

    features: Tensor  # (N, F) at position i, the input of ``fc``
    # previous, present, following: (N,) the tokens at i - 1, i and i + 1
    previous: Tensor
    present: Tensor
    following: Tensor
    # (N, H) the LM head's input at i + 1, from which the target predicts the token that this entry predicts
    goal: Tensor

    @classmethod
    def from_batches(cls, net: EagleNet, batches: Sequence[Scored]) -> _Entries:
        weight = net.fc.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        parts = []
        for scored in batches:
            # Entries before the last two tokens of a row: the last one may have no states (``FeatureBatch``).
            ids, real = scored.batch.ids, scored.batch.real[:, 3:]
            features = scored.features[:, 1:-2][real].to(weight.dtype)
            features = features if net.config.version == 1 else net.fc_input(features)
            tokens = [ids[:, start : start + real.shape[1]][real] for start in range(3)]
            parts.append((features.to(wide), *tokens, scored.last[:, 2:-1][real].to(wide)))
        return cls(*(torch.cat(part) for part in zip(*parts, strict=True)))


@torch.no_grad()
def initialise(net: EagleNet, target_head: Linear, batches: Sequence[Scored]) -> None:
    """Set a new network's random weights, from about 16,000 tokens of ``batches``.

    ``fc`` becomes the linear map from its inputs to the input of the target's LM head (not prepacked) one token later,
    by ridge regression on inputs normalised per channel: hidden states have a few channels a hundred times larger than
    the rest, which would hide all others from a random ``fc``. The layer starts by adding little to it.

    EAGLE-3's head starts as the target's, and its attention as an induction head (2209.11895): the features at a
    position encode linearly the token there and the one before it, so that a query made of an entry's last two tokens
    finds earlier entries after the same two, and copies the token that followed.
    """
    entries = _Entries.from_batches(net, batches)
    for layer in net.layers:
        assert isinstance(layer, DecoderLayer)
        assert isinstance(layer.mlp, GatedMLP)
        layer.out.weight.mul_(NOISE)
        layer.mlp.down.weight.mul_(NOISE)
    if net.config.version == 1:
        _solve_eagle1(net, entries)
    else:
        _solve_eagle3(net, target_head, entries)
        _solve_temperature(net, target_head, batches)


def _solve_eagle1(net: EagleNet, entries: _Entries) -> None:
    """Make EAGLE-1's fc(embedding, feature) predict the next feature."""
    inputs, features = net.config.inputs, entries.features
    ids = entries.present if inputs == "feature-unshifted" else entries.following
    tokens = net.embedding(ids).to(entries.goal.dtype) * (inputs != "feature")
    features = features * (inputs != "token")
    read, size = _normalise(torch.cat([tokens, features], -1))
    solved = _regress(read, entries.goal).T
    net.fc.weight.copy_((solved + NOISE * _rms(entries.goal) * net.fc.weight) / size)


def _solve_eagle3(net: EagleNet, target_head: Linear, entries: _Entries) -> None:
    """Make EAGLE-3's fc predict from the features, and its attention look up repeated tokens."""
    assert net.head is not None
    assert net.norm is not None
    config, fc = net.config, net.fc.weight
    head = target_head.weight.to(entries.goal.dtype)
    draft_head = head if net.target_ids is None else head[net.target_ids]
    size_of_goal = _rms(entries.goal)
    net.head.weight.copy_(draft_head * size_of_goal)
    net.norm.weight.fill_(1.0)  # the head's input, and so its gradients, have the same size for every target
    features, size_of_features = _normalise(entries.features)
    guess = _regress(features, entries.goal / size_of_goal).T + NOISE * fc
    guess /= _rms(features @ guess.T)
    channels = _slow_channels(net)[: config.hidden_size // 8]
    if config.inputs == "feature-shifted" and len(channels) >= 3:
        # (H, C) directions that the head hardly uses
        quiet = torch.linalg.eigh(draft_head.T @ draft_head)[1][:, : len(channels)]
        codes = _look_up(net, channels, quiet, entries, features)
        _copy_tokens(net, head, entries)
        guess = guess - quiet @ (quiet.T @ guess) + quiet @ codes
    fc.copy_(guess / size_of_features)


def _solve_temperature(net: EagleNet, target_head: Linear, batches: Sequence[Scored]) -> None:
    """Scale the head to minimise the first step's cross-entropy against the target.

    Regression finds the likely token but not its probability: the prediction has the goal's size even if it is poor, so
    its logits are too sharp. The loss is convex in the scale; its slope is the mean logit under q minus that under p.
    """
    assert net.head is not None
    shape, logits, probs = net.shape, [], []
    for scored in batches:
        ids, real = scored.batch.ids, scored.batch.real[:, 2:]
        rows, count = real.shape
        positions, first = torch.arange(count, device=ids.device).repeat(rows), int(shape.is_shifted)
        cis = net.rotary.cis(positions, upto=count).view(rows * count, 1, -1)
        attend = CausalAttention(rows, count, shape.windows, shape.head_dim**-0.5, cis)
        states = net.fuse(scored.features[:, :count].reshape(rows * count, -1).to(net.dtype))
        read = net.forward(ids[:, first : first + count].reshape(-1), states, attend)[0][real.flatten()]
        last = scored.last[:, 1:-1][real]
        some = torch.randperm(len(read), generator=torch.Generator().manual_seed(0))[: NUM_SCORED // len(batches)]
        truth = target_head.forward(last[some.to(last.device)])
        truth = truth if net.target_ids is None else truth[:, net.target_ids]
        wide = torch.promote_types(truth.dtype, torch.float32)
        logits.append(net.draft_logits(read[some.to(read.device)]).to(wide))
        probs.append(truth.to(wide).softmax(-1))
    z, p = torch.cat(logits), torch.cat(probs)
    mean_logit = (p * z).sum(-1).mean()
    low, high = -7.0, 3.0  # bounds of the scale's logarithm
    for _ in range(20):
        middle = (low + high) / 2
        slope = ((z * math.exp(middle)).softmax(-1) * z).sum(-1).mean() - mean_logit
        low, high = (low, middle) if slope > 0 else (middle, high)
    net.head.weight.mul_(math.exp((low + high) / 2))


def _look_up(net: EagleNet, channels: Tensor, quiet: Tensor, entries: _Entries, features: Tensor) -> Tensor:
    """Set queries and keys that match entries with the same last two tokens, by codes of these.

    A code is the token's embedding in its directions of most variance, whitened. Two thirds of ``channels`` hold the
    code of the last token, one third that of the one before. A query has its last token from the embedding and the
    other from its state; a key has both from its state.

    Returns:
        (C, F) the map from the features of i to the codes of the tokens at i and i - 1, for the state's ``quiet``.
    """
    config, hidden = net.config, net.config.hidden_size
    before = len(channels) // 3
    last = len(channels) - before
    tokens = _normed_tokens(net, entries.following)
    mean = F.normalize(tokens.mean(0), dim=0)
    centred = tokens - (tokens @ mean)[:, None] * mean
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(centred))
    code = directions[:, -last:] / variances[-last:].clamp(min=1e-6).sqrt()
    code = (code - mean[:, None] * (mean @ code)).flip(1)  # (H, C) by variance, descending

    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    q, k, _ = torch.split(cast(Linear, net.layer.qkv).weight, [query, key, key])
    gain = (MATCH_SCORE * config.head_dim**0.5 / len(channels)) ** 0.5
    for weight in (q, k):
        weight.mul_(QUERY_NOISE)
        weight.view(-1, config.head_dim, 2 * hidden)[:, channels] = 0
    queries, keys = (weight.view(-1, config.head_dim, 2 * hidden) for weight in (q, k))
    queries[:, channels[:last], :hidden] = gain * code.T
    queries[:, channels[last:], hidden:] = gain * quiet[:, :before].T
    keys[:, channels, hidden:] = gain * quiet.T
    of_present = _regress(features, _normed_tokens(net, entries.present) @ code)
    of_previous = _regress(features, _normed_tokens(net, entries.previous) @ code[:, :before])
    return torch.cat([of_present, of_previous], 1).T


def _copy_tokens(net: EagleNet, head: Tensor, entries: _Entries) -> None:
    """Set values that hold an entry's token, and an output projection that raises this token's logit.

    Together they map a token's embedding to its row of the LM head, in as many directions as the KV heads have
    channels; the query heads of a KV head share its part equally.
    """
    config, hidden = net.config, net.config.hidden_size
    tokens = _normed_tokens(net, entries.following)
    rows = F.normalize(head, dim=1)[entries.following]
    to_rows = _regress(tokens, rows - rows.mean(0))
    predicted = tokens @ to_rows
    room = min(config.num_kv_heads * config.head_dim, hidden)
    directions = torch.linalg.eigh(predicted.T @ predicted)[1][:, -room:].flip(1)  # (H, room)
    gain = (COPY_SCALE / _rms(predicted @ directions @ directions.T)).sqrt()
    values = cast(Linear, net.layer.qkv).weight[-config.num_kv_heads * config.head_dim :]
    values[:room].mul_(QUERY_NOISE)
    values[:room, :hidden] += gain * (to_rows @ directions).T
    group = config.num_heads // config.num_kv_heads
    out = net.layer.out.weight.view(hidden, config.num_heads, config.head_dim)
    for query_head in range(config.num_heads):
        start = query_head // group * config.head_dim
        part = directions[:, start : start + config.head_dim]
        out[:, query_head, : part.shape[1]] += gain / group * part


def _normed_tokens(net: EagleNet, ids: Tensor) -> Tensor:
    """(N,) -> (N, H) normed embeddings, as in EAGLE-3's attention."""
    assert net.token_norm is not None
    tokens = net.embedding(ids).to(net.fc.weight.dtype)
    normed: Tensor = net.token_norm.forward(tokens).to(torch.promote_types(tokens.dtype, torch.float32))
    return normed


def _slow_channels(net: EagleNet) -> Tensor:
    """Return the channels of an attention head that rotate little over ``SLOW_TOKENS`` tokens, slowest first."""
    rope = net.config.rope
    half = rope.rotary_dim // 2
    slow = (inverse_frequencies(rope) * SLOW_TOKENS <= 1).nonzero().flatten().flip(0)
    pairs = torch.stack([slow, slow + half], 1).flatten()
    return torch.cat([torch.arange(rope.rotary_dim, net.config.head_dim), pairs]).to(net.fc.weight.device)


def _normalise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows (N, W) with every channel divided by its root mean square, and that (W,)."""
    size = rows.square().mean(0).sqrt().clamp(min=1e-4)
    return rows / size, size


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()


def _regress(inputs: Tensor, goal: Tensor) -> Tensor:
    """(N, A) and (N, B) -> (A, B), by ridge regression."""
    gram = inputs.T @ inputs / len(inputs)
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    solved: Tensor = torch.linalg.solve(gram, inputs.T @ goal / len(inputs))
    return solved


# --- P-EAGLE ---------------------------------------------------------------------------------------------------------


class ParallelDrafter(EagleDrafter):
    """Drafts with a P-EAGLE head: one forward reads the unread entries and a mask for every further level.

    A mask entry pairs the mask token with learned features instead of the target's, and sees what an entry of a chain
    does. All nodes of a level share one distribution, as Medusa's do.
    """

    net: EagleNet

    def draft(self, request: DraftRequest, verify: VerifyRequest | None = None) -> Drafted:
        net, config = self.net, self.net.config
        request = request.within(config.num_levels)
        num_masks, width = request.budget.depth - 1, request.num_entries
        lengths = torch.tensor([[len(ids)] for ids in request.tokens], device=net.device)
        order = torch.arange(width + num_masks, device=net.device)
        assert request.features is not None
        features = F.pad(request.features[:, :width], (0, 0, 0, num_masks))
        features = torch.where((order < lengths)[:, :, None], features, net.mask_hidden)
        tokens = [[*ids, *[config.mask_token_id or 0] * num_masks] for ids in request.tokens]
        chain, last, states = self.runner.catch_up(replace(request, tokens=tokens, features=features))
        logits, _ = self.runner.forward(Entries(chain, request.lengths, states=states))
        assert logits is not None
        builder, place = request.builder(), (last - num_masks).clamp(min=0).expand(-1, -1, logits.shape[2])
        while not builder.done:
            builder.extend(logits.gather(1, place + builder.level))
        return builder.finish()


# --- registration ----------------------------------------------------------------------------------------------------


class Eagle1(NetMethod):
    """An EAGLE-1 head, whose trees are EAGLE-2's; HASS is a way of training one."""

    version = 1
    layouts: tuple[str, ...] = ("draftwing", "eagle", "vllm", "sglang")
    settings: tuple[str, ...] = ("inputs",)

    drafts_at_once = False

    def recognises(self, config: Mapping[str, Any], folder: Path) -> bool:
        return eagle_version(config, folder) == self.version and is_parallel(config) == self.drafts_at_once

    def read(self, folder: Path, *args: Any, **options: Any) -> EagleNet:
        return read_head(folder, *args, **options)

    def write(self, folder: Path, net: Any, *, training: Mapping[str, Any] | None = None) -> None:
        write_head(folder, net, training=training)

    def convert(self, source: Path, destination: Path, to: str, **options: Any) -> None:
        convert(source, destination, to, **options)

    def diagnose(self, folder: Path, target: Path | None) -> list[Finding]:
        return diagnose(folder, target)

    def new(self, new: NewNet) -> EagleNet:
        size = None if new.target_ids is None else len(new.target_ids)
        config = EagleConfig.for_target(self.version, new.like, size, taps=new.taps, target=new.target, **new.settings)
        return EagleNet(config, new.embedding, new.head, new.target_ids)

    def start(self, net: Any, target_head: Linear, batches: Iterable[Scored]) -> None:
        initialise(net, target_head, list(batches))


class Eagle3(Eagle1):
    """An EAGLE-3 or EAGLE-3.1 head."""

    version = 3
    layouts = (*Eagle1.layouts, "speculators", "gguf")
    settings: tuple[str, ...] = ("inputs", "draft_vocab_size", "fc_norm", "norm_output")

    def taps(self, num_layers: int) -> tuple[int, ...]:
        return default_taps(num_layers)


class PEagle(Eagle3):
    """A P-EAGLE head: an EAGLE-3 head that drafts a chain of ``unroll_steps`` in one forward."""

    drafts_at_once = True
    layouts = ("draftwing", "vllm", "speculators")
    settings = (*Eagle3.settings[1:], "unroll_steps", "num_layers", "mask_token_id")
    options: ClassVar = {}

    def new(self, new: NewNet) -> EagleNet:
        """Return a net; by default of 4 layers, as in the paper, with the target's last token as the mask."""
        given = {name: value for name, value in new.settings.items() if value is not None}
        given["num_levels"] = given.pop("unroll_steps", EagleConfig.num_levels)
        return super().new(replace(new, settings={"num_layers": 4, "mask_token_id": new.like.vocab_size - 1, **given}))

    def start(self, net: Any, target_head: Linear, batches: Iterable[Scored]) -> None:
        """Start as an EAGLE-3 head, with the mean of the target's features for the mask."""
        batches = list(batches)
        super().start(net, target_head, batches)
        features = torch.cat([scored.features[:, :-2][scored.batch.real[:, 2:]] for scored in batches])
        net.mask_hidden.data.copy_(features.mean(0))

    def drafter(self, net: Any, target: Target, name: str = "", identity: str = "") -> Drafter:
        return ParallelDrafter(net, target, name, identity)
