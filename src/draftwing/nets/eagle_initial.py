"""How a net starts: as the best linear guess from what it reads, and with attention that looks up repeated text.

Both are solved in closed form on a few batches of the target's features, in seconds. Only where training begins is
changed by it: the net and its format are the same, and every weight goes on learning.

Shape suffixes: N entries, H hidden, F features (all taps), C channels of a code, D head dimension, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.model.attention import CausalAttention
from draftwing.model.layers import GatedMLP
from draftwing.model.linear import Linear
from draftwing.model.rope import inverse_frequencies
from draftwing.nets.base import Scored
from draftwing.nets.eagle import EagleNet

__all__ = ["initialise"]

REACH = 100  # tokens over which a rotated channel must turn by less than one radian for a key to carry a code
MATCH = 12.0  # score of the key that agrees with the query in both of its tokens
COPY = 2.0  # size of what attention copies from there, against the state's that it is added to
NOISE, NOISE_OF_QUERIES = 0.3, 0.5  # how much of the random start is kept beside what is solved
SCORED = 1024  # entries on which the head's scale is solved
RIDGE = 1e-2  # share of the inputs' mean variance


@dataclass(frozen=True)
class _Entries:
    """Entries of the training text, one position of it each.

    Attributes:
        features: (N, F) at position i, as ``fc`` reads them.
        previous, present, following: (N,) the tokens at i - 1, i and i + 1.
        goal: (N, H) what the LM head reads at i + 1, where the target guesses what this entry has to guess.
    """

    features: Tensor
    previous: Tensor
    present: Tensor
    following: Tensor
    goal: Tensor

    @classmethod
    def of(cls, net: EagleNet, batches: Sequence[Scored]) -> _Entries:
        weight = net.fc.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        parts = []
        for found in batches:
            # Entries before the last two tokens of a row: there may be no states of the last one (``FeatureBatch``).
            ids, real = found.batch.ids, found.batch.real[:, 3:]
            features = found.features[:, 1:-2][real].to(weight.dtype)
            features = features if net.config.version == 1 else net.fc_input(features)
            tokens = [ids[:, start : start + real.shape[1]][real] for start in range(3)]
            parts.append((features.to(wide), *tokens, found.last[:, 2:-1][real].to(wide)))
        return cls(*(torch.cat(each) for each in zip(*parts, strict=True)))


@torch.no_grad()
def initialise(net: EagleNet, target_head: Linear, batches: Sequence[Scored]) -> None:
    """Set a new net's weights.

    ``fc`` becomes the linear map from what it reads to what the target's LM head reads one token later, by ridge
    regression with every channel taken in its own size: hidden states have a few channels a hundred times larger than
    the rest, behind which a random ``fc`` would see nothing else. The layer starts by adding little to it.

    EAGLE-3's head starts as the target's, and its attention as an induction head (2209.11895): the features at a
    position say linearly which token stands there and which before it, so that a query made of its last two tokens
    finds earlier entries after the same two, and copies the token that followed.

    Args:
        net: random, as ``EagleNet`` makes it.
        target_head: the target's LM head, plain.
        batches: of about 16,000 tokens, which are enough to solve on.
    """
    entries = _Entries.of(net, batches)
    mlp = net.layer.mlp
    assert isinstance(mlp, GatedMLP)
    net.layer.out.weight.mul_(NOISE)
    mlp.down.weight.mul_(NOISE)
    if net.config.version == 1:
        _solve_first(net, entries)
    else:
        _solve_third(net, target_head, entries)
        _solve_temperature(net, target_head, batches)


def _solve_first(net: EagleNet, entries: _Entries) -> None:
    """EAGLE-1: fc(embedding, feature) guesses the next feature."""
    tokens = net.embedding(entries.following).to(entries.goal.dtype)
    features = entries.features
    if net.config.inputs == "feature":
        tokens = torch.zeros_like(tokens)
    elif net.config.inputs == "token":
        features = torch.zeros_like(features)
    elif net.config.inputs == "feature-unshifted":
        tokens = net.embedding(entries.present).to(entries.goal.dtype)
    read, size = _in_own_size(torch.cat([tokens, features], -1))
    solved = _regress(read, entries.goal).T
    net.fc.weight.copy_((solved + NOISE * _rms(entries.goal) * net.fc.weight) / size)


def _solve_third(net: EagleNet, target_head: Linear, entries: _Entries) -> None:
    """EAGLE-3: fc guesses from the features, attention looks up."""
    assert net.head is not None
    assert net.norm is not None
    config, fc = net.config, net.fc.weight
    head = target_head.weight.to(entries.goal.dtype)
    own = head if net.target_ids is None else head[net.target_ids]
    size_of_goal = _rms(entries.goal)
    net.head.weight.copy_(own * size_of_goal)
    net.norm.weight.fill_(1.0)  # what the head reads has one size whatever the target: so have its gradients
    features, size_of_features = _in_own_size(entries.features)
    guess = _regress(features, entries.goal / size_of_goal).T + NOISE * fc
    guess /= _rms(features @ guess.T)
    channels = _slow_channels(net)[: config.hidden_size // 8]
    if config.inputs == "feature-shifted" and len(channels) >= 3:
        quiet = torch.linalg.eigh(own.T @ own)[1][:, : len(channels)]  # (H, C) directions that the head hardly reads
        codes = _look_up(net, channels, quiet, entries, features)
        _copy_tokens(net, head, entries)
        guess = guess - quiet @ (quiet.T @ guess) + quiet @ codes
    fc.copy_(guess / size_of_features)


def _solve_temperature(net: EagleNet, target_head: Linear, batches: Sequence[Scored]) -> None:
    """Scale the head so that the first step's cross-entropy against the target is least.

    A regression says which token is likely, not how likely: its guess has the size of the goal however poor it is, and
    the poorer, the sharper are its logits against what they know. The loss is convex in the scale, and its slope there
    is the mean logit under q less that under p.
    """
    assert net.head is not None
    logits, probs = [], []
    for found in batches:
        read, known = _first_step(net, found)
        some = torch.randperm(len(read), generator=torch.Generator().manual_seed(0))[: SCORED // len(batches)]
        truth = target_head.forward(known[some.to(known.device)])
        truth = truth if net.target_ids is None else truth[:, net.target_ids]
        wide = torch.promote_types(truth.dtype, torch.float32)
        logits.append(net.draft_logits(read[some.to(read.device)]).to(wide))
        probs.append(truth.to(wide).softmax(-1))
    z, p = torch.cat(logits), torch.cat(probs)
    wanted = (p * z).sum(-1).mean()
    low, high = -7.0, 3.0  # of the scale's logarithm
    for _ in range(20):
        middle = (low + high) / 2
        slope = ((z * math.exp(middle)).softmax(-1) * z).sum(-1).mean() - wanted
        low, high = (low, middle) if slope > 0 else (middle, high)
    net.head.weight.mul_(math.exp((low + high) / 2))


def _first_step(net: EagleNet, found: Scored) -> tuple[Tensor, Tensor]:
    """(N, H) what the head reads at the first step of every entry, and (N, H) what the target's reads to guess it."""
    ids, real = found.batch.ids, found.batch.real[:, 2:]
    rows, count = real.shape
    shape, config = net.shape, net.config
    states = net.fuse(found.features[:, :count].reshape(rows * count, -1).to(net.dtype))
    first = 1 if shape.is_shifted else 0
    positions = torch.arange(count, device=ids.device).repeat(rows)
    attend = CausalAttention(
        rows,
        count,
        shape.windows,
        config.head_dim**-0.5,
        net.rotary.cis(positions, upto=count).view(rows * count, 1, -1),
    )
    read, _ = net.forward(ids[:, first : first + count].reshape(-1), states, attend)
    return read[real.flatten()], found.last[:, 1:-1][real]


def _look_up(net: EagleNet, channels: Tensor, quiet: Tensor, entries: _Entries, features: Tensor) -> Tensor:
    """Queries and keys that match entries by two tokens, through codes of them.

    A code is the token's embedding in its directions of most variance, whitened. Two thirds of ``channels`` hold the
    last token's, one third the one's before it. A query knows its last token from the embedding that it reads and the
    other from its state; a key knows both from its state.

    Returns:
        (C, F) the codes of the tokens at i and i - 1 from the features of i, which belong into the state's ``quiet``.
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
    q, k, _ = torch.split(net.layer.qkv.weight, [query, key, key])
    gain = (MATCH * config.head_dim**0.5 / len(channels)) ** 0.5
    for weight in (q, k):
        weight.mul_(NOISE_OF_QUERIES)
        weight.view(-1, config.head_dim, 2 * hidden)[:, channels] = 0
    queries, keys = (weight.view(-1, config.head_dim, 2 * hidden) for weight in (q, k))
    queries[:, channels[:last], :hidden] = gain * code.T
    queries[:, channels[last:], hidden:] = gain * quiet[:, :before].T
    keys[:, channels, hidden:] = gain * quiet.T
    of_present = _regress(features, _normed_tokens(net, entries.present) @ code)
    of_previous = _regress(features, _normed_tokens(net, entries.previous) @ code[:, :before])
    return torch.cat([of_present, of_previous], 1).T


def _copy_tokens(net: EagleNet, head: Tensor, entries: _Entries) -> None:
    """Values that hold the token which an entry reads, and an output that raises this token's logit.

    The map from a token's embedding to its row of the LM head, in as many directions as the KV heads have room for:
    each KV head holds its part of them, and its query heads write a like share each.
    """
    config, hidden = net.config, net.config.hidden_size
    tokens = _normed_tokens(net, entries.following)
    rows = F.normalize(head, dim=1)[entries.following]
    to_rows = _regress(tokens, rows - rows.mean(0))
    said = tokens @ to_rows
    room = min(config.num_kv_heads * config.head_dim, hidden)
    directions = torch.linalg.eigh(said.T @ said)[1][:, -room:].flip(1)  # (H, room)
    gain = (COPY / _rms(said @ directions @ directions.T)).sqrt()
    values = net.layer.qkv.weight[-config.num_kv_heads * config.head_dim :]
    values[:room].mul_(NOISE_OF_QUERIES)
    values[:room, :hidden] += gain * (to_rows @ directions).T
    group = config.num_heads // config.num_kv_heads
    written = net.layer.out.weight.view(hidden, config.num_heads, config.head_dim)
    for query_head in range(config.num_heads):
        start = query_head // group * config.head_dim
        part = directions[:, start : start + config.head_dim]
        written[:, query_head, : part.shape[1]] += gain / group * part


def _normed_tokens(net: EagleNet, ids: Tensor) -> Tensor:
    """(N,) -> (N, H) embeddings as EAGLE-3's attention reads them."""
    assert net.token_norm is not None
    tokens = net.embedding(ids).to(net.fc.weight.dtype)
    normed: Tensor = net.token_norm.forward(tokens).to(torch.promote_types(tokens.dtype, torch.float32))
    return normed


def _slow_channels(net: EagleNet) -> Tensor:
    """Channels of a head that rotation leaves nearly alone over ``REACH`` tokens, slowest first."""
    rope = net.config.rope
    half = rope.rotary_dim // 2
    slow = (inverse_frequencies(rope) * REACH <= 1).nonzero().flatten().flip(0)
    pairs = torch.stack([slow, slow + half], 1).flatten()
    return torch.cat([torch.arange(rope.rotary_dim, net.config.head_dim), pairs]).to(net.fc.weight.device)


def _in_own_size(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (N, W) with every channel divided by its root mean square, and that (W,)."""
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
