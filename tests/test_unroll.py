"""Training-time test against brute force: what a net sees while it drafts, one entry, one head, one key at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from conftest import SMALL
from draftwing.decode import Decoder
from draftwing.methods.base import Budget
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.methods.unroll import unroll
from draftwing.models.config import ModelConfig, RopeConfig, read_config
from draftwing.models.context import FeatureSpec
from draftwing.models.lean import LeanTarget
from draftwing.models.linear import Linear
from draftwing.runtime.forward import EagerRunner
from draftwing.sampling import Sampling
from draftwing.tree import PAD

VOCAB, HIDDEN, LENGTH, STEPS = 13, 12, 7, 4
VARIANTS = {
    "eagle1": (1, {}),
    "eagle1-bias": (1, {"fc_bias": True}),
    "eagle1-gelu": (1, {"activation": "gelu"}),
    "eagle3": (3, {}),
    "eagle3-one-kv-head": (3, {"num_kv_heads": 1}),
    "eagle3-wide": (3, {"head_dim": 8, "rotary_dim": 4}),
    "eagle3-two-taps": (3, {"taps": (1, 2)}),
    "eagle3-norm-output": (3, {"norm_output": True}),
    "eagle3-residual": (3, {"norm_before_residual": True}),
    "eagle3-all-norms": (3, dict.fromkeys(("norm_output", "fc_norm", "norm_before_fc", "norm_before_residual"), True)),
    "eagle1-layers": (1, {"num_layers": 2, "qkv_bias": True}),
    "eagle3-layers": (3, {"num_layers": 2, "norm_before_residual": True, "qkv_bias": True}),
    "eagle3-narrow": (3, {"target_hidden_size": 20, "own_embedding": True, "fc_norm": True, "norm_before_fc": True}),
    **{
        f"eagle{version}-{inputs}": (version, {"inputs": inputs})
        for version in (1, 3)
        for inputs in ("token", "feature", "feature-unshifted")
    },
}


def shaken(net: EagleNet) -> EagleNet:
    """With norms and biases that are not their starting values."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return net


def random_net(version: int, target_ids: torch.Tensor | None = None, seed: int = 0, **changes) -> EagleNet:
    """A net in float64 over a random embedding; EAGLE-1's head is random too."""
    torch.manual_seed(seed)
    head_dim = changes.pop("head_dim", 4)
    shape = {
        "version": version,
        "hidden_size": HIDDEN,
        "intermediate_size": 10,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-3,  # large enough to matter
        "activation": "silu",
        "rope": RopeConfig("default", 100.0, head_dim, changes.pop("rotary_dim", head_dim), 64),
        "max_position_embeddings": 64,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB if target_ids is None else len(target_ids),
        "taps": (3,) if version == 1 else (0, 1, 2),
    }
    head = Linear(torch.randn(VOCAB, HIDDEN, dtype=torch.float64))
    embedding = torch.randn(VOCAB, HIDDEN, dtype=torch.float64)
    return shaken(EagleNet(EagleConfig(**{**shape, **changes}), embedding, head, target_ids, torch.float64))


def random_text(net: EagleNet, rows: int = 2, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    """ids (B, T) and features (B, T, F)."""
    width = net.config.feature_size * len(net.config.taps)
    return torch.randint(VOCAB, (rows, length)), torch.randn(rows, length, width, dtype=torch.float64)


class SlowNet:
    """A net from the papers' formulas, in vectors; weights by the names that EAGLE gave them.

    Args:
        net: whose weights are copied, unless ``weights`` are given (which may want gradients).
    """

    def __init__(self, net: EagleNet, weights: dict[str, torch.Tensor] | None = None) -> None:
        self.config, self.weights = net.config, net.tensors() if weights is None else weights
        self.embedding = self.weights.get("embed_tokens.weight", net.embedding.plain())

    def draft(self, ids: list[int], features: torch.Tensor, start: int, num_steps: int):
        """A chain of these very tokens drafted after position ``start``: (fed back, read by the head) of each step."""
        shift = 0 if self.config.inputs == "feature-unshifted" else 1
        seen: list = []  # the keys and values of the true entries, then of the chain
        for j in range(start):
            self._entry(ids[j + shift], self._state(features[j]), j, seen)
        state, found = self._state(features[start]), []
        for step in range(num_steps):
            state, read = self._entry(ids[start + shift + step], state, start + step, seen)
            found.append((state, read))
        return found

    def _state(self, feature: torch.Tensor) -> torch.Tensor:
        config = self.config
        if config.version == 1:
            return feature
        taps = [feature[i * config.feature_size : (i + 1) * config.feature_size] for i in range(len(config.taps))]
        if config.fc_norm:
            taps = [self._norm(f"fc_norm.{i}", tap) for i, tap in enumerate(taps)]
        together = torch.cat(taps)
        return self.weights["fc.weight"] @ (self._norm("input_norm", together) if config.norm_before_fc else together)

    def _entry(self, token: int, state: torch.Tensor, position: int, seen: list):
        config, weights = self.config, self.weights
        word = self.embedding[token]
        state = torch.zeros_like(state) if config.inputs == "token" else state
        word = torch.zeros_like(word) if config.inputs == "feature" else word
        if config.version == 1:
            stream = weights["fc.weight"] @ torch.cat([word, state]) + weights.get("fc.bias", 0.0)
            attended = stream  # EAGLE-1's first layer has no norm before its attention
        else:
            normed = self._norm("midlayer.hidden_norm", state)
            attended = torch.cat([self._norm("midlayer.input_layernorm", word), normed])
            stream = normed if config.norm_before_residual else state
        seen.append([])  # for each layer its keys and values
        for layer in range(config.num_layers):
            name = "midlayer" if layer == 0 and config.version == 3 else f"layers.{layer}"
            if layer > 0:
                attended = self._norm(f"{name}.input_layernorm", stream)
            stream = stream + self._attention(name, attended, layer, position, seen)
            stream = stream + self._mlp(name, self._norm(f"{name}.post_attention_layernorm", stream))
        if config.version == 1:
            return stream, stream
        read = self._norm("norm", stream)
        return (read if config.norm_output else stream), read

    def _attention(self, name: str, attended: torch.Tensor, layer: int, position: int, seen: list) -> torch.Tensor:
        config, weights = self.config, self.weights
        query, key, value = (
            (
                weights[f"{name}.self_attn.{each}_proj.weight"] @ attended
                + weights.get(f"{name}.self_attn.{each}_proj.bias", 0.0)
            ).split(config.head_dim)
            for each in "qkv"
        )
        if f"{name}.self_attn.q_norm.weight" in weights:
            query = [self._norm(f"{name}.self_attn.q_norm", each) for each in query]
            key = [self._norm(f"{name}.self_attn.k_norm", each) for each in key]
        seen[-1].append(([self._turned(each, position) for each in key], value))
        heads = []
        for head, each in enumerate(query):
            of = head // (config.num_heads // config.num_kv_heads)
            turned = self._turned(each, position)
            scores = [turned @ entry[layer][0][of] / math.sqrt(config.head_dim) for entry in seen]
            weighed = [(score - max(scores)).exp() for score in scores]
            mixed = sum(weight * entry[layer][1][of] for weight, entry in zip(weighed, seen, strict=True))
            heads.append(mixed / sum(weighed))
        return weights[f"{name}.self_attn.o_proj.weight"] @ torch.cat(heads)

    def _mlp(self, name: str, normed: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.weights[f"{name}.mlp.{each}_proj.weight"] for each in ("gate", "up", "down"))
        inner = gate @ normed
        if self.config.activation == "gelu":
            inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
        else:
            inner = inner / (1 + (-inner).exp())
        return down @ (inner * (up @ normed))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean() + self.config.rms_norm_eps).sqrt() * self.weights[f"{name}.weight"]

    def _turned(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Channels m and m + half turned by the angle position * theta^(-m / half)."""
        half = self.config.rope.rotary_dim // 2
        turned = [*x]
        for m in range(half):
            # In float32 in every precision, as models are trained.
            angle = torch.tensor(position, dtype=torch.float32) * self.config.rope.theta ** (-m / half)
            cos, sin = angle.cos().double(), angle.sin().double()
            turned[m], turned[m + half] = x[m] * cos - x[m + half] * sin, x[m + half] * cos + x[m] * sin
        return torch.stack(turned)


def run_unroll(net: EagleNet, ids, features, num_steps: int = STEPS, **options):
    """For each step the entries, and (B, C, H) what is fed back and what the head reads."""
    rows = len(ids)
    with torch.no_grad():
        steps = list(unroll(net, ids, features, num_steps, **options))
    assert [step.index for step in steps] == list(range(num_steps))
    return [
        (each.entries.tolist(), each.states.view(rows, -1, HIDDEN), each.read.view(rows, -1, HIDDEN)) for each in steps
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_entry_of_every_step_is_a_chain_drafted_from_there(variant):
    version, changes = VARIANTS[variant]
    net = random_net(version, **changes)
    ids, features = random_text(net)
    steps, slow, num_real = run_unroll(net, ids, features), SlowNet(net), 0
    for row in range(len(ids)):
        for entry in range(LENGTH - 2):
            real = min(STEPS, LENGTH - 2 - entry)  # past them there is no token to guess
            for step, wanted in enumerate(slow.draft(ids[row].tolist(), features[row], entry, real)):
                entries, *found = steps[step]
                assert entries == list(range(LENGTH - 2))
                for one, other in zip(found, wanted, strict=True):
                    torch.testing.assert_close(one[row, entry], other, rtol=1e-9, atol=1e-9)
                num_real += 1
    assert num_real == 2 * (4 + 4 + 3 + 2 + 1)


@pytest.mark.parametrize("share", [0.9, 0.4, 0.01])
@pytest.mark.parametrize("version", [1, 3])
def test_the_entries_that_go_on_are_those_of_the_full_run(version, share):
    net = random_net(version)
    ids, features = random_text(net, 3, 12)
    full = run_unroll(net, ids, features)
    kept = set()
    for seed in range(5):
        torch.manual_seed(seed)
        thin = run_unroll(net, ids, features, later_share=share)
        for step, (whole, part) in enumerate(zip(full, thin, strict=True)):
            chosen = part[0]
            assert len(chosen) == (10 if step == 0 else max(1, round(10 * share)))
            assert chosen == sorted(set(chosen))
            assert step < 2 or chosen == thin[1][0]
            for one, other in zip(whole[1:], part[1:], strict=True):
                # A matrix product's last bits depend on how many rows are beside a row.
                torch.testing.assert_close(one[:, chosen], other, rtol=1e-12, atol=1e-12)
        kept |= set(thin[1][0])
    assert len(kept) > round(10 * share)  # not the same ones in every update


# --- the drafter sees what training saw ------------------------------------------------------------------------------


class Listening(EagerRunner):
    """Keeps the logits of what it runs, by the text so far and the path below its pending token."""

    texts: list[tuple[int, ...]] | None = None  # of the rows that are drafting

    def __init__(self, net: EagleNet) -> None:
        super().__init__(net)
        self.heard: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}

    def forward(self, entries, *, want_logits=True, last=None):
        logits, states = super().forward(entries, want_logits=want_logits, last=last)
        if self.texts is None or logits is None:  # a prompt
            return logits, states
        tree = entries.tree
        for row, text in enumerate(self.texts):
            for place in range(logits.shape[1]):
                node, path = entries.first_node + place, ()
                if last is not None:
                    node = 0
                elif tree.tokens[row, node] == PAD:
                    continue
                while last is None and node > 0:
                    path, node = (int(tree.tokens[row, node]), *path), int(tree.parents[row, node])
                if len(text) > 1:  # a prompt of one token has no feature to draft from
                    self.heard[text, path] = logits[row, place].clone()
        return logits, states


class Watched(EagleDrafter):
    """Tells its runner what it drafts for."""

    def __init__(self, net: EagleNet, target: LeanTarget) -> None:
        super().__init__(net, target)
        self.runner = Listening(net)

    def admit(self, ctx, features):
        self.runner.texts = None
        super().admit(ctx, features)

    def propose(self, ctx, sampling, budget):
        self.runner.texts = [tuple(row.tokens[: row.length + 1]) for row in ctx.rows]
        return super().propose(ctx, sampling, budget)


HEADS = {
    "eagle1": (1, {}, Budget(4)),
    "eagle1-tree": (1, {"fc_bias": True}, Budget(paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)))),
    "eagle3": (3, {}, Budget(4)),
    "eagle3-unshifted-tree": (3, {"inputs": "feature-unshifted"}, Budget(3, 3, 6)),
    "eagle3-few-tokens": (3, {"draft_vocab_size": 20, "norm_before_fc": True}, Budget(3, 3, 6)),
    "eagle3.1-tree": (3, {"fc_norm": True, "norm_output": True}, Budget(3, 2)),
    "eagle1-layers": (1, {"num_layers": 2, "qkv_bias": True}, Budget(3, 3, 6)),
}


@pytest.mark.parametrize("head", HEADS)
def test_the_drafter_sees_the_numbers_of_the_unroll(head, folder_of):
    """Rows of several lengths, one joining late: every node that it drafts from, at every step of the decoding."""
    version, changes, budget = HEADS[head]
    target = LeanTarget.from_folder(folder_of("llama"), torch.float64)
    like = ModelConfig.from_hf(read_config(folder_of("llama")))
    config = EagleConfig.for_target(version, like, changes.get("draft_vocab_size"))
    config = replace(config, taps=(3,) if version == 1 else (0, 1, 3), **changes)
    torch.manual_seed(1)
    ids = torch.arange(20) * 3 if config.has_draft_vocab else None
    net = shaken(EagleNet(config, target.embedding, target.head, ids, torch.float64)).requires_grad_(False)
    drafter = Watched(net, target)
    decoder = Decoder(target, drafter, budget=budget)
    prompts = [[4, *range(3, 15)], [9], [3, 8, 12, 5]]
    for number, prompt in enumerate(prompts):
        if number == 2:
            decoder.step()
        decoder.admit(prompt, Sampling(max_tokens=4 + number, temperature=0.7 * number, seed=number, ignore_eos=True))
    while decoder.num_running:
        decoder.step()
    texts = {text for text, _ in drafter.runner.heard}
    assert len(texts) >= 7
    assert {len(path) for _, path in drafter.runner.heard} == set(range(budget.depth))
    for (text, path), logits in drafter.runner.heard.items():
        whole = torch.tensor([[*text, *path, 0]])  # the last one is what the entry guesses
        features = target.score(whole, FeatureSpec(config.taps)).features
        step = list(unroll(net, whole, features, len(path) + 1))[-1]
        own = net.draft_logits(step.read[len(text) - 2][None])[0]
        wanted = own if ids is None else torch.full((config.vocab_size,), float("-inf"), dtype=own.dtype)
        if ids is not None:
            for draft_id, token in enumerate(ids.tolist()):
                wanted[token] = own[draft_id]
        torch.testing.assert_close(logits, wanted, rtol=1e-9, atol=1e-9)
        assert wanted.isfinite().sum() == (SMALL["vocab_size"] if ids is None else len(ids))
