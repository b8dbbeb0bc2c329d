"""The same text with any drafter: under the keyed rule, token ids equal baseline decoding's.

A drafter is under test when it stands in ``DRAFTERS``: every entry decodes a single request and a batch of rows with
different sampling that join late, stop and leave early, in the kernel and in PyTorch. The rest of the product, every
entry with every family and every sampling, is marked ``full``: ``make test-all`` runs it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import count, cycle, product
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import numpy as np
import pytest
import torch

import conftest
from conftest import FURTHER, SMALL, TEXTS, add_tokenizer, build, kernel_size, refused
from draftwing.accept import RULES, get_rule
from draftwing.cpu.library import get_kernel
from draftwing.decode import Decoder
from draftwing.errors import ConfigError, UnsupportedError
from draftwing.formats.identity import target_id
from draftwing.methods.base import EAGLE_TREE, MEDUSA_TREE, Budget, Drafter, NoDrafter
from draftwing.methods.block import BlockDrafter
from draftwing.methods.causal_lm import CausalLMDrafter, TranslatingDrafter
from draftwing.methods.eagle import ParallelDrafter
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.ensemble import CombinedDrafter, DraftCalibration
from draftwing.methods.kangaroo import KangarooConfig, KangarooDrafter, KangarooNet
from draftwing.methods.layer_skip import LayerSkipDrafter
from draftwing.methods.lookahead import LookaheadDrafter
from draftwing.methods.lookup import LookupDrafter
from draftwing.methods.magicdec import SelfDrafter, SnapKVSlots, WindowSlots
from draftwing.methods.method import NewNet
from draftwing.methods.mtp import ChainDrafter, MtpConfig, MtpLoss, MtpNet
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.methods.objectives import OBJECTIVES, AlignedLoss, Truth
from draftwing.methods.online import Learner, LearningPace, OnlineDrafter
from draftwing.methods.registry import get_method
from draftwing.methods.retrieval import LlmaDrafter, Memory, RestDrafter, SuffixDrafter
from draftwing.methods.suffix_array import SuffixArray, join_texts
from draftwing.methods.unroll import UnrolledLoss
from draftwing.models.adapter import AdapterTarget
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.context import FeatureSpec
from draftwing.models.lean import LeanTarget
from draftwing.models.subnet import Parts, SubNet
from draftwing.models.target import Target
from draftwing.noise import KeyedNoise
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.stats import Logprob, Stats, Step
from draftwing.text.tokenizer import Tokenizer
from draftwing.text.translate import Pieces, Translation
from draftwing.train.data import Batch
from draftwing.train.features import FeatureBatch
from draftwing.tree import PAD, DraftTree, GrowthRule

VOCAB = SMALL["vocab_size"]
MAX_TOKENS = 18
LENGTH = 20  # tokens in each training text
UPDATES, LR = 6, 3e-2  # for the nets that are trained here
# The longest is longer than the window of mistral-window, the shortest leaves nothing to prefill.
PROMPTS = ((9,), (4, *range(3, 23)), (3, 8, 12, 5, 8, 12))
KERNEL = {
    "head_dim": 32,
    "sliding_window": 7,
}  # a mistral that the CPU kernel runs; -half: weights in bfloat16, -bfloat16: products too, -int8: weights and slots
CAN_RUN = {
    **dict.fromkeys(("kernel", "kernel-half", "kernel-bfloat16"), get_kernel()),
    "kernel-int8": get_kernel(),
}
FUSED = [name for name, runs in CAN_RUN.items() if runs]
FLOAT32, INT8 = (FUSED[0], FUSED[-1]) if FUSED else ("llama", "llama")
TARGETS = ("llama", "qwen3", "mistral-window", "mixtral", "gpt2", *FUSED)
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "t1": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.1, "frequency_penalty": 0.2},
}
# The sampling of each row of a batch. A batch that is greedy as a whole is drafted for by other code.
BATCHES = {
    "mixed": ("penalties", "greedy", "t1"),
    "all-greedy": ("greedy",) * 3,
    "learned": ("penalties", "greedy", "t1", "t1", "top-p", "penalties"),  # the texts that heads learn from
}


# --- the drafters under test -----------------------------------------------------------------------------------------


class Scripted(Drafter):
    """A drafter that knows what the target is going to say, and makes of it what ``grow`` will."""

    name = "scripted"

    def __init__(self, grow, futures: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self.grow, self.futures = grow, futures

    def propose(self, ctx, sampling, budget) -> DraftTree:
        tokens, parents = [], []
        for row in ctx.rows:
            prompt, written = tuple(row.tokens[: row.prompt_length]), len(row.tokens) - row.prompt_length
            future = [*self.futures[prompt][written : written + 9], *[0] * 9][:9]
            grown = self.grow(random.Random(1000 * len(prompt) + written), future)
            tokens.append([row.tokens[-1], *grown[0]])
            parents.append([-1, *grown[1]])
        return DraftTree.from_lists(tokens, parents)

    def admit(self, ctx, features) -> None: ...

    def observe(self, ctx, tree, accepted, output) -> None: ...

    def remove(self, ctx, row) -> None: ...


def always_wrong(rng: random.Random, future: list[int]):
    """A wrong token, and the right ones below it: none may be kept."""
    return [(future[0] + 1) % VOCAB, *future[1:4]], [0, 1, 2, 3]


def twins(rng: random.Random, future: list[int]):
    """Equal siblings, of which the second (and its own second child) goes on rightly: nodes 2, 6, 7 are the path."""
    a, b, c = future[:3]
    return [a, a, (a + 1) % VOCAB, (b + 1) % VOCAB, b, b, c], [0, 0, 0, 1, 2, 2, 6]


def scattered(rng: random.Random, future: list[int]):
    """Any shape, unused nodes anywhere, any token of the vocabulary, and often the right one."""
    tokens, parents, depths = [], [], {0: 0}
    for node in range(1, 1 + rng.randint(0, 9)):
        token, parent = PAD, -1
        if rng.random() < 0.8:
            parent, wrong = rng.choice(list(depths)), rng.choice((0, 2, VOCAB - 1, rng.randrange(VOCAB)))
            token = future[depths[parent]] if rng.random() < 0.6 else wrong
            depths[node] = depths[parent] + 1
        tokens.append(token)
        parents.append(parent)
    return tokens, parents


@dataclass(frozen=True)
class Case:
    """A drafter, its budget, and what its statistics must show where it drafts for its own family.

    ``is_own``: it is the target itself, which only the lean decoder can be.
    """

    make: Callable[[Lab, str], Drafter]
    budget: Budget
    shows: Callable[[Stats], bool] = lambda stats: stats.num_accepted > 0
    is_own: bool = False


def scripted(grow) -> Callable[[Lab, str], Drafter]:
    return lambda lab, kind: Scripted(grow, {PROMPTS[row]: lab.plain(kind, row) for row in range(3)})


def all_taken(stats: Stats) -> bool:
    return 0 < stats.num_accepted == stats.num_drafted


def eagle(version: int, **changes) -> Callable[[Lab, str], Drafter]:
    return lambda lab, kind: EagleDrafter(lab.head(version, tuple(changes.items())), lab.target)


def parallel(lab: Lab, kind: str) -> Drafter:
    return ParallelDrafter(lab.head(3, (("mask_token_id", 7), ("num_layers", 2))), lab.target)


def lm(lab: Lab, kind: str) -> Drafter:
    return CausalLMDrafter(lab.perturbed, VOCAB)


def oneself(lab: Lab, kind: str) -> Drafter:
    return CausalLMDrafter(lab.itself, VOCAB)


def lookup(lab: Lab, kind: str) -> Drafter:
    return LookupDrafter(VOCAB, 1)


def all_of(*makers: Callable[[Lab, str], Drafter]) -> Callable[[Lab, str], Drafter]:
    return lambda lab, kind: CombinedDrafter([make(lab, kind) for make in makers], DraftCalibration(len(makers)))


def begun_right(stats: Stats) -> bool:
    """Whatever others propose beside: of a model that drafts for itself, a first guess is right.

    Deeper in a tree its right guess may not be among the likeliest of a level.
    """
    return stats.alpha[0] == 1


@cache
def translation() -> Translation:
    """Between two tokenizers, of which both models know the first tokens: single characters."""
    with TemporaryDirectory() as root:
        ours, theirs = (
            Pieces(Tokenizer(add_tokenizer(Path(mkdtemp(dir=root)), 300, texts))) for texts in (TEXTS, ["QUICK BROWN"])
        )
        return Translation(ours, theirs)


def translated(lab: Lab, kind: str) -> Drafter:
    return TranslatingDrafter(lab.perturbed, VOCAB, translation())


def lookahead(*sizes: int) -> Callable[[Lab, str], Drafter]:
    return lambda lab, kind: LookaheadDrafter(VOCAB, *sizes)


def mtp(lab: Lab, kind: str) -> Drafter:
    return EagleDrafter(lab.drafting(new_mtp, 1), lab.target)


def mtp_chain(lab: Lab, kind: str) -> Drafter:
    net = lab.drafting(new_mtp, 2)
    return ChainDrafter([net.part(0), net.part(1)], lab.target)


class Restless(OnlineDrafter):
    """Learns before every step, and much; what it has learnt is drafted with at once."""

    def propose(self, ctx, sampling, budget) -> DraftTree:
        self.learn()
        return super().propose(ctx, sampling, budget)


def online(version: int, **changes) -> Callable[[Lab, str], Drafter]:
    def make(lab: Lab, kind: str) -> Drafter:
        serving, trained = lab.learning(version, tuple(changes.items()))
        learner = Learner(serving, trained, LearningPace(share=1e9, lr=1e-2, window=4, places=2))
        return Restless(EagleDrafter(serving, lab.target), learner)

    return make


def sublayers(attention: tuple[int, ...], mlp: tuple[int, ...]) -> Callable[[Lab, str], Drafter]:
    """The target without some of its three layers; for a target whose layers cannot run alone, nothing."""

    def make(lab: Lab, kind: str) -> Drafter:
        if not isinstance(lab.target, LeanTarget):
            return NoDrafter()
        net = SubNet.of(lab.target.net, Parts.without(3, attention, mlp))
        return LayerSkipDrafter(net, lab.target, "layers")

    return make


def kangaroo(lab: Lab, kind: str) -> Drafter:
    return KangarooDrafter(lab.drafting(new_adapter), lab.target) if isinstance(lab.target, LeanTarget) else NoDrafter()


def block(kind: str, num_draft: int | None = None, **settings) -> Callable[[Lab, str], Drafter]:
    args = (kind, num_draft, tuple(settings.items()))
    return lambda lab, _: BlockDrafter(lab.drafting(new_block, *args), lab.target)


def anything(stats: Stats) -> bool:
    return stats.num_drafted > 0


def now_and_then(stats: Stats) -> bool:
    """A head that a few updates have trained guesses some tokens of all the texts together, about one in each."""
    return stats.num_accepted > 0


def texts_of(lab: Lab, kind: str) -> list[list[int]]:
    """What the target says, with a wrong turn in it, and beside it what it says of its other prompts."""
    found = [[*PROMPTS[row], *lab.plain(kind, row)] for row in range(3)]
    return [*found, *([*text[:-6], *text[4:9], *text[-6:]] for text in found)]


def rest(lab: Lab, kind: str) -> Drafter:
    return RestDrafter(VOCAB, SuffixArray(join_texts(texts_of(lab, kind))), min_match=1)


def remembering(lab: Lab, kind: str) -> Drafter:
    memory = Memory(200)  # which is soon full
    for text in texts_of(lab, kind):
        memory.add(text)
    return SuffixDrafter(VOCAB, memory)


def itself(slots) -> Callable[[Lab, str], Drafter]:
    return lambda lab, kind: SelfDrafter(lab.target, slots())


def erratic(depth: int, width: int, most: int | None = None, seed: int = 4) -> Budget:
    """A budget whose rule is made by dice and believes in odd chances: no decision may change the text."""
    rng = np.random.default_rng(seed)

    def some(*shape, upto):
        return (upto * rng.random(shape)).astype(np.float32)

    reach = most or depth
    rule = GrowthRule(
        knots=np.sort(some(3, 6, upto=1.0)),
        rates=some(3, 6, upto=1.0),
        gains=some(depth, upto=3.0),
        costs=some(depth, upto=0.3),
        verify=np.sort(some(reach + 3, upto=1.0)),
        worth=0.5 + float(rng.random()),
        share=0.1,
    )
    return Budget(depth, width, most, rule=rule)


DRAFTERS = {
    "lm-chain": Case(lambda lab, kind: CausalLMDrafter(lab.perturbed, VOCAB), Budget(4)),
    "lm-tree": Case(lambda lab, kind: CausalLMDrafter(lab.perturbed, VOCAB), Budget(4, 3)),
    "self-chain": Case(lambda lab, kind: CausalLMDrafter(lab.itself, VOCAB), Budget(4), all_taken),
    "lm-dynamic": Case(lambda lab, kind: CausalLMDrafter(lab.perturbed, VOCAB), Budget(4, 4, 9)),
    "lm-static": Case(
        lambda lab, kind: CausalLMDrafter(lab.perturbed, VOCAB), Budget(paths=((0,), (1,), (0, 0), (1, 2), (1, 2, 0)))
    ),
    "eagle1-chain": Case(eagle(1), Budget(4), now_and_then),
    "eagle1-static": Case(eagle(1), Budget(paths=MEDUSA_TREE), now_and_then),
    "eagle1-unshifted": Case(eagle(1, inputs="feature-unshifted"), Budget(3, 4), now_and_then),
    "eagle3-chain": Case(eagle(3), Budget(5), now_and_then),
    "eagle3-level": Case(eagle(3), Budget(3, 6), now_and_then),
    "eagle3-dynamic": Case(eagle(3), Budget(4, 8, 24), now_and_then),
    "eagle3-few-tokens": Case(eagle(3, draft_vocab_size=40), Budget(4, 8, 24), now_and_then),
    "eagle3.1-dynamic": Case(eagle(3, fc_norm=True, norm_output=True), Budget(3, 8, 20), now_and_then),
    "peagle-chain": Case(parallel, Budget(4), now_and_then),
    "peagle-dynamic": Case(parallel, Budget(9, 4, 12), now_and_then),
    "peagle-rule": Case(parallel, erratic(5, 4, 12), now_and_then),
    "mtp-chain": Case(mtp, Budget(4), now_and_then),
    "mtp-dynamic": Case(mtp, Budget(3, 6, 14), now_and_then),
    "mtp-modules-chain": Case(mtp_chain, Budget(4), now_and_then),
    "mtp-modules-tree": Case(mtp_chain, Budget(3, 4, 10), now_and_then),
    "mtp-modules-rule": Case(mtp_chain, erratic(4, 3, 9), now_and_then),
    "lm-rule-chain": Case(lambda lab, kind: CausalLMDrafter(lab.perturbed, VOCAB), erratic(4, 1)),
    "lm-rule": Case(lambda lab, kind: CausalLMDrafter(lab.perturbed, VOCAB), erratic(4, 3, 9)),
    "eagle1-rule": Case(eagle(1), erratic(5, 4, 12), now_and_then),
    "eagle3-rule": Case(eagle(3), erratic(5, 4, 12), now_and_then),
    "eagle3-rule-few-tokens": Case(eagle(3, draft_vocab_size=40), erratic(6, 9, 30), now_and_then),
    "eagle1-rule-chain": Case(eagle(1), erratic(6, 1), now_and_then),
    "eagle3-rule-20": Case(eagle(3), erratic(4, 4, 20), now_and_then),
    "eagle3-rule-few-tokens-20": Case(eagle(3, draft_vocab_size=40), erratic(6, 4, 20), now_and_then),
    "eagle1-online": Case(online(1), Budget(4), now_and_then),
    "eagle3-online": Case(online(3), Budget(3, 4, 9), now_and_then),
    "eagle3-online-rule": Case(online(3, draft_vocab_size=40), erratic(5, 4, 12), now_and_then),
    "medusa-chain": Case(block("medusa"), Budget(5), now_and_then),
    "medusa-static": Case(block("medusa"), Budget(paths=MEDUSA_TREE), now_and_then),
    "medusa-dynamic": Case(block("medusa"), Budget(8, 6, 20), now_and_then),
    "medusa-rule": Case(block("medusa"), erratic(5, 4, 12), now_and_then),
    "medusa-few-tokens": Case(block("medusa", 40), Budget(3, 8), now_and_then),
    "hydra-dynamic": Case(block("hydra"), Budget(8, 6, 20), now_and_then),
    "hydra-static": Case(block("hydra"), Budget(paths=MEDUSA_TREE), now_and_then),
    "hydra-rule": Case(block("hydra"), erratic(5, 4, 12), now_and_then),
    "dflash-chain": Case(block("dflash", num_layers=2), Budget(5), now_and_then),
    "dflash-dynamic": Case(block("dflash", num_layers=1, unroll_steps=3), Budget(4, 4, 9), now_and_then),
    "dflash-rule": Case(block("dflash", num_layers=1, unroll_steps=4), erratic(5, 4, 12), now_and_then),
    "dspark-dynamic": Case(block("dspark", num_layers=1, rank=4), Budget(4, 4, 9), now_and_then),
    "dspark-rule": Case(block("dspark", num_layers=1, rank=4), erratic(5, 4, 12), now_and_then),
    "domino-dynamic": Case(block("domino", num_layers=1, rank=4, state_size=6), Budget(4, 4, 9), now_and_then),
    "domino-rule": Case(block("domino", num_layers=1, rank=4, state_size=6), erratic(5, 4, 12), now_and_then),
    "self-tree": Case(lambda lab, kind: CausalLMDrafter(lab.itself, VOCAB), Budget(3, 3)),
    "lookup-chain": Case(lambda lab, kind: LookupDrafter(VOCAB, 1), Budget(6), lambda stats: True),
    "lookup-tree": Case(lambda lab, kind: LookupDrafter(VOCAB, 1), Budget(4, 3), lambda stats: True),
    "llma-chain": Case(lambda lab, kind: LlmaDrafter(VOCAB, texts_of(lab, kind), 1), Budget(5)),
    "llma-tree": Case(lambda lab, kind: LlmaDrafter(VOCAB, texts_of(lab, kind), 1), Budget(4, 3)),
    "rest-chain": Case(rest, Budget(5)),
    "rest-tree": Case(rest, Budget(5, 4, 12)),
    "rest-rule": Case(rest, erratic(4, 3, 9), anything),
    "suffix-chain": Case(remembering, Budget(6)),
    "suffix-tree": Case(remembering, Budget(5, 4, 12)),
    "suffix-rule": Case(remembering, erratic(4, 3, 9), anything),
    "eagle3+lookup": Case(all_of(eagle(3), lookup), Budget(4, 4, 12), now_and_then),
    "eagle3+lookup-rule": Case(all_of(eagle(3), lookup), erratic(5, 4, 20), now_and_then),
    "eagle3+lookup-rule-chain": Case(all_of(eagle(3), lookup), erratic(5, 1), now_and_then),
    "eagle1+eagle3": Case(all_of(eagle(1), eagle(3)), Budget(3, 6, 24), now_and_then),
    "lm+lookup": Case(all_of(lookup, lm), Budget(3)),
    "self+lookup": Case(all_of(lookup, oneself), Budget(3, 2, 40), begun_right),
    "self+lm+lookup-rule": Case(all_of(oneself, lookup, lm), erratic(4, 3, 30), anything),
    "translated-chain": Case(translated, Budget(4), anything),
    "translated-static": Case(translated, Budget(paths=((0,), (1,), (0, 0), (1, 2), (1, 2, 0))), anything),
    "translated-rule": Case(translated, erratic(4, 3, 9), anything),
    "translated+lookup": Case(all_of(lookup, translated), Budget(4, 2, 12), anything),
    "lookahead": Case(lookahead(5, 4, 5), Budget(4, 3), lambda stats: True),
    "lookahead-chain": Case(lookahead(3, 2, 2), Budget(4), lambda stats: True),
    "lookahead-rule": Case(lookahead(4, 3, 4), erratic(4, 3, 9), lambda stats: True),
    "lookahead+eagle3": Case(all_of(lookahead(4, 3, 4), eagle(3)), Budget(4, 3, 12), now_and_then),
    "lookahead+lookup-rule": Case(all_of(lookahead(4, 3, 4), lookup), erratic(4, 3, 12), lambda stats: True),
    "skip-nothing-chain": Case(sublayers((), ()), Budget(4), all_taken),
    "skip-chain": Case(sublayers((1,), ()), Budget(4), anything),
    "skip-tree": Case(sublayers((1,), (2,)), Budget(3, 3), anything),
    "skip-rule": Case(sublayers((), (1,)), erratic(5, 4, 12), anything),
    "exit-chain": Case(sublayers((2,), (2,)), Budget(4), anything),
    "exit-rule-chain": Case(sublayers((1, 2), (1, 2)), erratic(6, 1), anything),
    "exit-dynamic": Case(sublayers((2,), (2,)), Budget(4, 4, 9), anything),
    "exit-static": Case(sublayers((1, 2), (1, 2)), Budget(paths=EAGLE_TREE), anything),
    "kangaroo-chain": Case(kangaroo, Budget(4), now_and_then),
    "kangaroo-dynamic": Case(kangaroo, Budget(4, 4, 9), now_and_then),
    "kangaroo-rule": Case(kangaroo, erratic(5, 4, 12), now_and_then),
    "view-window": Case(itself(lambda: WindowSlots(30, 2)), Budget(4), is_own=True),
    "view-whole": Case(itself(WindowSlots), Budget(4), all_taken, is_own=True),
    "view-snapkv": Case(itself(lambda: SnapKVSlots(28, 3, 3, 2, 5)), Budget(3, 3), is_own=True),
    "view-snapkv-shared": Case(
        itself(lambda: SnapKVSlots(16, 4, 1, 1, 0, per_head=False)), erratic(4, 3, 9), anything, is_own=True
    ),
    "view-rule-chain": Case(itself(lambda: WindowSlots(6, 0)), erratic(4, 1), anything, is_own=True),
    "always-wrong": Case(scripted(always_wrong), Budget(), lambda stats: stats.num_accepted == 0 < stats.num_drafted),
    "twins": Case(scripted(twins), Budget(), lambda stats: stats.alpha == [1.0, 1.0, 1.0]),
    "scattered": Case(scripted(scattered), Budget()),
}
LEARNED = [name for name, case in DRAFTERS.items() if case.shows is now_and_then]
# Another shape of a tree, or another setting of a net, of a drafter that is there already.
VARIANTS = (
    "lm-static", "lm-dynamic", "lm-rule-chain", "self-tree", "eagle1-unshifted", "eagle3-level", "eagle3-few-tokens",
    "eagle1-rule-chain", "eagle3-rule-20", "eagle3-rule-few-tokens-20", "medusa-chain", "medusa-static",
    "medusa-rule", "medusa-few-tokens", "hydra-static", "hydra-dynamic", "dflash-dynamic", "dflash-rule",
    "dspark-dynamic", "mtp-chain", "mtp-modules-chain", "mtp-modules-rule", "eagle1-online", "eagle3-online",
    "llma-chain", "rest-chain", "rest-tree", "suffix-chain", "suffix-tree", "eagle3+lookup-rule-chain",
    "eagle1+eagle3", "self+lookup", "self+lm+lookup-rule",
    "exit-static", "kangaroo-chain", "kangaroo-dynamic", "domino-dynamic", "peagle-chain", "peagle-dynamic",
)  # fmt: skip
# What a target's family may matter to: its features, its LM head, its slots. Others meet a few families.
EVERYWHERE = (
    *("lm-tree", "self-chain", "eagle1-static", "eagle3-rule", "eagle3-few-tokens", "lookup-chain"),
    *("skip-nothing-chain", "scattered"),
)
OWN = tuple(name for name, case in DRAFTERS.items() if case.is_own)
# Drafters of other kinds that also draft for a transformers target.
STRANGERS = ("medusa-dynamic", "mtp-dynamic", "lm+lookup")
WEIGHED = (
    "lm-chain",
    "self-chain",
    "skip-chain",
    "lookup-chain",
    "eagle3-chain",
    "mtp-modules-chain",
    "llma-chain",
    "rest-chain",
    "lm+lookup",
    "lookahead-chain",
)  # they give q, for the classic rules
CLASSIC = {
    "speculative": Budget(4),
    "block": Budget(4),
    "multi-round": Budget(3, 2),
    "multi-round-replacement": Budget(3, 2),
}


# Each net's class, config, number of draft tokens (None for all), and loss.


def new_eagle(lab: Lab, version: int, changes: tuple[tuple[str, object], ...]):
    config = EagleConfig.for_target(version, lab.shape, **dict(changes))
    num_draft = config.draft_vocab_size if config.has_draft_vocab else None
    num_steps = 2 if config.mask_token_id is None else config.num_levels
    return EagleNet, config, num_draft, partial(UnrolledLoss, num_steps=num_steps)


def new_mtp(lab: Lab, num_modules: int):
    config = MtpConfig.for_target(lab.shape, (lab.target.num_layers,), num_modules=num_modules)
    return MtpNet, config, None, partial(MtpLoss, num_steps=num_modules)


def new_block(lab: Lab, kind: str, num_draft: int | None, settings: tuple[tuple[str, object], ...]):
    """A net that guesses several tokens in one pass."""
    method, target = get_method(kind), lab.plain_target
    ids = None if num_draft is None else torch.arange(num_draft) + 20
    rows, shape = target.embedding.plain().float(), dict(settings)
    made = method.new(
        NewNet(lab.shape, method.taps(target.num_layers), target_id(target), rows, target.head, ids, shape)
    )
    return type(made), made.config, num_draft, partial(method.loss, num_steps=made.num_levels)


def new_adapter(lab: Lab):
    """Kangaroo's net, after two layers."""
    return KangarooNet, KangarooConfig.for_target(lab.shape, (2,)), None, partial(AlignedLoss, num_steps=1)


# --- the laboratory --------------------------------------------------------------------------------------------------


class Lab:
    """A target, models that draft for it, and what it says when it decodes plainly: each made once."""

    def __init__(self, family: str, folder_of, tmp_path_factory, like: Lab | None) -> None:
        """``like``: the laboratory of the same model in other numbers; the nets that were trained there serve here."""
        self.is_lean = family != "gpt2"
        ours = family if self.is_lean else "llama"  # only the lean decoder drafts, so gpt2's drafter is a stranger
        self.is_fused, changes = family.startswith("kernel"), {}
        if self.is_fused:
            ours, changes = "mistral-window", KERNEL
        self.dtype = torch.float32 if self.is_fused else torch.float64
        load = {"dtype": self.dtype}
        if family == "kernel-int8":
            load |= {"quantize": "int8", "kv_dtype": "int8"}
        if family == "kernel-bfloat16":
            load["dtype"] = torch.bfloat16
        stored = torch.bfloat16 if family == "kernel-half" else torch.float64
        own = tmp_path_factory.mktemp("half") if family == "kernel-half" else folder_of(ours, **changes)
        if family == "kernel-half":
            build(ours, **changes).to(stored).save_pretrained(own)
        self.itself = LeanTarget.from_folder(own, **load)
        assert self.itself.runtime == ("kernel" if self.is_fused else "torch")
        self.target: Target = self.itself if self.is_lean else AdapterTarget(build(family))
        self.plain_target = LeanTarget.from_folder(own, self.dtype, prepack=False) if self.is_fused else self.target
        model, folder = build(ours, **changes), tmp_path_factory.mktemp("perturbed")
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.02 * torch.randn_like(weight))
        model.to(stored).save_pretrained(folder)
        self.perturbed = LeanTarget.from_folder(folder, **load)
        self.written, self.plain_logprobs = cache(self._written), cache(self.logprobs)
        self.trained = cache(self._trained) if like is None else like.trained
        self.drafting = cache(lambda make, *args: self._decoding(self.trained(make, *args)))
        self.shape = ModelConfig.from_hf(read_config(own))

    def head(self, version: int, changes: tuple[tuple[str, object], ...]) -> EagleNet:
        return self.drafting(new_eagle, version, changes)

    def learning(self, version: int, changes: tuple[tuple[str, object], ...]) -> tuple[EagleNet, EagleNet]:
        """The same twice, as nobody else has it: as it drafts, and as it learns."""
        net = self.trained(new_eagle, version, changes)
        serving = self._again(net, self.target).requires_grad_(False)
        return serving.prepack(self.target.quantized) if self.is_fused else serving, self._again(net, self.plain_target)

    def _trained(self, make, *args):
        """A net that has seen a little of what the target says: some of its drafts are right, and some are not."""
        torch.manual_seed(2)
        target = self.plain_target  # not prepacked
        embedding, head = target.embedding, target.head
        if self.is_lean:
            head.weight.requires_grad_(False)
        kind, config, num_draft, new_loss = make(self, *args)
        ids = None if num_draft is None else torch.arange(num_draft) + 20
        net = kind(config, embedding, head, ids, self.dtype)
        found = self._scored(config.taps)
        truth = Truth.of(found, head, ids, self.dtype)
        loss = new_loss(net, OBJECTIVES["eagle3"])
        optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
        for _ in range(UPDATES):
            optimizer.zero_grad()
            sum(each.loss / max(each.count, 1) for each in loss(found, truth)).backward()
            optimizer.step()
        return net.requires_grad_(False)

    def _decoding(self, net):
        return self._again(net, self.target).prepack(self.target.quantized) if self.is_fused else net

    def _again(self, net, target: Target):
        """With the fused head of the target where it is to be fused itself."""
        found = type(net)(net.config, target.embedding, target.head, net.target_ids, self.dtype)
        found.load_state_dict(net.state_dict())
        return found

    def _scored(self, taps: tuple[int, ...]) -> FeatureBatch:
        """What the target says of its own texts."""
        learned = [sampling_of("learned", row) for row in range(len(BATCHES["learned"]))]
        texts = torch.tensor([[*PROMPTS[place], *self.written(kind, place)][-LENGTH:] for kind, place in learned])
        batch = Batch(texts, torch.ones_like(texts, dtype=torch.bool), torch.tensor([LENGTH] * len(texts)))
        spec, width = FeatureSpec((*taps, self.plain_target.num_layers)), self.shape.hidden_size
        output = self.plain_target.score(texts, spec)
        return FeatureBatch(batch, output.features[..., :-width], output.features[..., -width:], output.logits)

    def plain(self, kind: str, row: int) -> tuple[int, ...]:
        """The row by itself, without a drafter."""
        return self.written(*sampling_of(kind, row))[:MAX_TOKENS]

    def _written(self, kind: str, row: int) -> tuple[int, ...]:
        """The same, and some tokens more to train on."""
        texts, stats = run(self.target, [self.request(kind, row, max_tokens=LENGTH)])
        assert stats.num_forwards == LENGTH == len(texts[0])
        return texts[0]

    def logprobs(self, drafter: Drafter | None = None, budget: Budget | None = None) -> list[Logprob]:
        """Log-probabilities of the longest prompt's continuation."""
        decoder, found = Decoder(self.target, drafter, budget=budget), []
        decoder.admit(*self.request("penalties", 1, logprobs=64))
        while decoder.num_running:
            found += decoder.step().rows[0].logprobs
        return found

    def request(self, kind: str, row: int, **changes) -> tuple[Sequence[int], Sampling]:
        kind, place = sampling_of(kind, row)
        usual = {"max_tokens": MAX_TOKENS, "seed": 10 + place, "ignore_eos": True, **SAMPLINGS[kind]}
        return PROMPTS[place], Sampling(**usual | changes)


def sampling_of(kind: str, row: int) -> tuple[str, int]:
    """The sampling of a row of a batch, or of a single request, and the place of its prompt."""
    return BATCHES[kind][row] if kind in BATCHES else kind, row if row < len(PROMPTS) else 1


def run(
    target: Target,
    requests: Sequence[tuple[Sequence[int], Sampling]],
    drafter: Drafter | None = None,
    budget: Budget | None = None,
    rule: str = "match",
    joins: Sequence[int] = (),
    leaves: dict[int, int] | None = None,
    lossless: bool = True,
) -> tuple[dict[int, tuple[int, ...]], Stats]:
    """Decode to the end and check every step.

    ``joins``: before which step each request is admitted; ``leaves``: after which step a request is retired.
    """
    decoder = Decoder(target, drafter, rule, budget, lossless=lossless)
    waiting = list(zip(requests, joins or [0] * len(requests), strict=True))
    texts, stats = {}, Stats()
    for number in count():
        while waiting and waiting[0][1] <= number:
            texts[decoder.admit(*waiting.pop(0)[0])] = ()
        if not decoder.num_running:
            assert not waiting
            return texts, stats
        step = decoder.step()
        check_step(step)
        assert step.lossless == get_rule(rule, lossless=lossless).lossless
        stats.add(step)
        for row in step.rows:
            prompt, sampling = requests[row.request_id]
            room = min(sampling.max_tokens, target.max_length - len(prompt)) - len(texts[row.request_id])
            assert row.depth < room  # nothing is drafted that could not be emitted
            texts[row.request_id] += row.token_ids
        for request in (request for request, last in (leaves or {}).items() if last == number):
            decoder.retire(request)
    raise AssertionError


def check_step(step: Step) -> None:
    """The kept nodes are a path from the root; what is emitted is that path and the bonus, cut where the row ended."""
    step.tree.check(VOCAB)
    accepted, tree = step.accepted, step.tree
    columns = (accepted.path, accepted.num, accepted.bonus, tree.tokens, tree.parents)
    for row, path, num, bonus, tokens, parents in zip(step.rows, *(x.tolist() for x in columns), strict=True):
        assert set(path[num + 1 :]) <= {PAD}
        assert [parents[node] for node in path[: num + 1]] == [-1, *path[:num]]
        emitted = [*(tokens[node] for node in path[1 : num + 1]), bonus]
        assert list(row.token_ids) == emitted[: len(row.token_ids)]
        assert row.token_ids
        assert row.finish_reason or len(row.token_ids) == num + 1
        assert num == row.num_accepted <= row.depth <= row.num_drafted == sum(token != PAD for token in tokens) - 1


# --- the keyed rule: equality ----------------------------------------------------------------------------------------


FACTORS = {"family": TARGETS, "drafter": tuple(DRAFTERS), "kind": (*SAMPLINGS, *BATCHES)}
TURNS = ("mixed", "t1", "all-greedy", "greedy", "mixed", "top-p", "penalties")


def families_of(drafter: str) -> tuple[str, ...]:
    """The families that a drafter meets: those of the kernel, which are fast, and some of the others."""
    if drafter in ("lm-tree", "eagle3-rule", "scattered"):
        return TARGETS
    if drafter in EVERYWHERE:
        return ("llama", "gpt2", *FUSED)
    more = {**dict.fromkeys(OWN, ("mistral-window", "gpt2")), **dict.fromkeys(STRANGERS, ("gpt2",))}
    return (*dict.fromkeys(("llama", FLOAT32, INT8)), *more.get(drafter, ()))


def chosen() -> set[tuple[str, str, str]]:
    """One kind for each drafter and family: where there are two of the kernel, one is a batch and the other is not."""
    cases = set()
    for number, drafter in enumerate(DRAFTERS):
        for place, family in enumerate(families_of(drafter)):
            kind = TURNS[(number + place) % len(TURNS)]
            if drafter not in EVERYWHERE:
                is_alone = family in FUSED[:1] or (drafter in VARIANTS and family not in FUSED)
                is_greedy = family in FUSED[1:] and drafter not in VARIANTS and number % 3 == 0
                batch = "all-greedy" if is_greedy else "mixed"
                kind = tuple(SAMPLINGS)[(number + place) % len(SAMPLINGS)] if is_alone else batch
            if drafter in LEARNED and (family == "llama" or kind == "mixed"):
                kind = "learned"
            cases.add((family, drafter, kind))
    return cases


CHOSEN = chosen()


@pytest.mark.parametrize(
    tuple(FACTORS),
    [
        pytest.param(*case, id="-".join(case), marks=() if case in CHOSEN else pytest.mark.full)
        for case in product(*FACTORS.values())  # family by family
        if case in CHOSEN or (conftest.runs_full and case[2] != ("mixed" if case[1] in LEARNED else "learned"))
    ],
)
def test_text_is_plain_decodings(family, drafter, kind, lab):
    """A single request, or a batch of rows: one joins late, one leaves early, one stops inside a draft."""
    here, case = lab(family), DRAFTERS[drafter]
    if case.is_own and not here.is_lean:
        with refused(UnsupportedError, "cannot draft for itself"):
            case.make(here, kind)
        return
    made = case.make(here, kind)
    if kind not in BATCHES:
        texts, stats = run(here.target, [here.request(kind, 1)], made, case.budget)
        assert texts[0] == here.plain(kind, 1)
    else:
        plain = [here.plain(kind, row) for row in range(len(BATCHES[kind]))]
        stop = plain[1][12]
        requests = [here.request(kind, row, stop_tokens=(stop,) if row == 1 else ()) for row in range(len(plain))]
        joins = (0, 0, *[1] * (len(plain) - 2))
        texts, stats = run(here.target, requests, made, case.budget, joins=joins, leaves={0: 1})
        assert 0 < len(texts[0]) < MAX_TOKENS
        assert texts[0] == plain[0][: len(texts[0])]
        assert texts[1] == plain[1][: plain[1].index(stop) + 1]
        assert [texts[row] for row in range(2, len(plain))] == plain[2:]
    assert stats.num_tokens == sum(map(len, texts.values()))
    assert stats.num_forwards <= stats.num_tokens
    assert stats.num_accepted <= stats.num_drafted
    if here.is_lean and (drafter not in LEARNED or kind == "learned"):
        assert case.shows(stats)


@pytest.mark.parametrize("drafter", ["lm-tree", "lm-dynamic", "eagle1-static", "eagle3-dynamic"])
def test_children_without_the_targets_noise_change_no_text(drafter, lab):
    """EAGLE-2's way of choosing children, under the keyed rule."""
    here, case = lab(INT8 if "lm" in drafter else "llama"), DRAFTERS[drafter]
    requests = [here.request("mixed", row) for row in range(3)]
    texts, stats = run(here.target, requests, case.make(here, "mixed"), case.budget, "match-top")
    assert texts == {row: here.plain("mixed", row) for row in range(3)}
    assert stats.num_drafted > 0


IN_KERNEL = (
    {"dtype": torch.float32},
    {"dtype": torch.float32, "quantize": "int8"},
    {"dtype": torch.bfloat16},
)


@pytest.mark.parametrize("family", FURTHER)
def test_text_of_further_families(family, folder_of):
    """Trees of any shape, in a ragged batch, in PyTorch and in one of the kernel's arithmetics."""
    number, folder = list(FURTHER).index(family), folder_of(family, **kernel_size(family))
    chosen = [{"dtype": torch.float64}]
    if get_kernel() is not None:
        chosen.append(IN_KERNEL[number % len(IN_KERNEL)])
    kind = tuple(SAMPLINGS)[number % len(SAMPLINGS)]
    for options in chosen:
        target = LeanTarget.from_folder(folder, **options)
        common = {"max_tokens": 8, "ignore_eos": True, **SAMPLINGS[kind]}
        requests = [(prompt, Sampling(seed=row, **common)) for row, prompt in enumerate(PROMPTS)]
        plain = {row: run(target, [request])[0][0] for row, request in enumerate(requests)}
        drafter = Scripted(scattered, {PROMPTS[row]: text for row, text in plain.items()})
        texts, stats = run(target, requests, drafter, Budget())
        assert texts == plain
        assert stats.num_accepted > 0


@pytest.mark.parametrize("length", [20, 250])
def test_capped_scores_in_pytorch(length, folder_of, monkeypatch):
    """Their products are computed in pieces of a fixed size: a tree's bits do not depend on how many slots are read."""
    monkeypatch.setenv("DRAFTWING_KERNEL", "off")
    folder = folder_of("gemma2-capped", **kernel_size("gemma2-capped"), max_position_embeddings=400)
    target = LeanTarget.from_folder(folder, torch.float32)
    prompt = tuple(3 + number * 7 % 50 for number in range(length))
    request = prompt, Sampling(max_tokens=MAX_TOKENS, seed=1, temperature=1.0, ignore_eos=True)
    plain, _ = run(target, [request])
    texts, stats = run(target, [request], Scripted(scattered, {prompt: plain[0]}), Budget())
    assert texts == plain
    assert stats.num_accepted > 0


@pytest.mark.parametrize("family", dict.fromkeys(("llama", INT8)))
@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if "few-tokens" in name])
def test_what_is_drafted_are_the_targets_tokens(family, drafter, lab):
    """A head that drafts tokens 20 to 59 alone proposes them under the target's ids, and some come true."""
    here, case, kind = lab(family), DRAFTERS[drafter], "mixed"
    decoder = Decoder(here.target, case.make(here, kind), budget=case.budget)
    for row in range(3):
        decoder.admit(*here.request(kind, row))
    drafted, accepted = set(), 0
    while decoder.num_running:
        step = decoder.step()
        drafted |= set(step.tree.tokens[:, 1:].flatten().tolist())
        accepted += sum(row.num_accepted for row in step.rows)
    assert drafted <= {PAD, *range(20, 60)}
    assert max(drafted) >= 40
    assert accepted > 0


@pytest.mark.parametrize(("width", "draft_length"), [(3, 40), (1, 34), (3, 20)])
def test_the_end_of_the_context(width, draft_length, folder_of):
    """A row ends where its target's positions do; where its drafter's do it is drafted for no longer, others are."""
    target, draft = (
        LeanTarget.from_folder(folder_of("llama", max_position_embeddings=length), torch.float64)
        for length in (40, draft_length)
    )
    long = (range(3, 33), Sampling(max_tokens=24, temperature=1.0, ignore_eos=True, seed=0))
    short = ([7, 8], Sampling(max_tokens=9, ignore_eos=True))
    for batch in ([long], [long, short], [short, long]):
        plain, _ = run(target, batch)
        assert len(plain[batch.index(long)]) == 10
        texts, stats = run(target, batch, CausalLMDrafter(draft, VOCAB), Budget(4, width))
        assert texts == plain
        assert (stats.num_drafted > 0) == (len(batch) == 2 or draft_length > 32)


# Log-probabilities are read from the tree: chains, trees of every growth, unused nodes, equal siblings, own slots.
SHAPES = (
    *("lm-tree", "eagle1-static", "eagle3-rule", "eagle3+lookup-rule", "skip-nothing-chain", "view-window", "twins"),
    "scattered",
)


@pytest.mark.parametrize(
    "drafter", [pytest.param(name, marks=() if name in SHAPES else pytest.mark.full) for name in DRAFTERS]
)
def test_logprobs_are_those_of_plain_decoding(drafter, lab):
    here, case = lab("llama"), DRAFTERS[drafter]
    plain, drafted = here.plain_logprobs(), here.logprobs(case.make(here, "penalties"), case.budget)
    assert [found.token for found in drafted] == [found.token for found in plain] == list(here.plain("penalties", 1))
    for one, other in zip(plain, drafted, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert len(one.top) == len(other.top) == VOCAB
        assert [token for token, _ in one.top[:3]] == [token for token, _ in other.top[:3]]
        assert one.logprob <= one.top[0][1]


# --- the classic rules -----------------------------------------------------------------------------------------------


# Every drafter with one rule, two of them with every rule, in PyTorch and in the kernel, and one in other families.
ONE_RULE = dict(zip((*WEIGHED, "suffix-chain", "eagle1-online"), cycle(CLASSIC)))
RULED = {*product(("lm-chain", "eagle3-chain"), CLASSIC), *ONE_RULE.items()}
RULED_CASES = [(*case, ("llama", FLOAT32)[number % 2]) for number, case in enumerate(sorted(RULED))]
RULED_CASES += [("eagle3-chain", "block", "mistral-window"), ("eagle3-chain", "multi-round", "gpt2")]


@pytest.mark.parametrize(
    ("drafter", "rule", "family"),
    [
        pytest.param(*case, marks=() if case in RULED_CASES else pytest.mark.full)
        for case in product(ONE_RULE, CLASSIC, ("llama", "mistral-window", "gpt2", *FUSED[:1]))
    ],
)
def test_classic_rules_are_greedy_at_temperature_zero_and_give_a_seed_one_text(drafter, rule, family, lab):
    """Whatever shares the batch, except for drafters that remember it. (test_distributions.py checks probabilities.)"""
    here, case = lab(family), DRAFTERS[drafter]
    requests = [here.request(("t1", "greedy", "penalties")[row], row) for row in range(3)]
    together, stats = run(here.target, requests, case.make(here, "mixed"), CLASSIC[rule], rule)
    assert together[1] == here.plain("greedy", 1)
    assert stats.lossless
    seldom = ("lookup-chain", "eagle3-chain", "mtp-modules-chain", "lookahead-chain", "eagle1-online")
    if here.is_lean and drafter not in seldom:
        assert stats.num_accepted > 0
    if here.is_lean and drafter == "self-chain":
        assert stats.alpha[0] == 1.0  # p and q are equal: the first draft is always taken
    if drafter in WEIGHED:
        alone, _ = run(here.target, requests[2:], case.make(here, "mixed"), CLASSIC[rule], rule)
        assert alone[0] == together[2]


@pytest.mark.parametrize("drafter", ["lm-chain", "eagle3-chain"])
def test_siblings_are_drawn_as_the_rule_asks(drafter, lab):
    """Without replacement for ``multi-round``, independently for its sister: the distributions of both hang on it."""
    here = lab("llama")
    for rule, distinct in (("multi-round", True), ("multi-round-replacement", False)):
        decoder = Decoder(here.target, DRAFTERS[drafter].make(here, "t1"), rule, Budget(2, 3))
        for row in range(3):
            decoder.admit(*here.request("t1", row))
        equal = 0
        while decoder.num_running:
            tree = decoder.step().tree
            for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
                children = Counter((above, token) for above, token in zip(parents, tokens, strict=True) if above >= 0)
                equal += sum(children.values()) - len(children)
        assert (equal == 0) == distinct


# Proven for every outcome in test_distributions.py; here each way of handing over q meets one rule.
DISTRIBUTIONS = (
    *(("eagle3-chain", "block"), ("eagle3-chain", "multi-round")),
    *(("lm-chain", "multi-round-replacement"), ("eagle1-online", "speculative")),
)


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        pytest.param(*case, marks=() if case in DISTRIBUTIONS else pytest.mark.full)
        for case in product(["lm-chain", "eagle3-chain", "eagle1-online"], ["match", "match-top", *CLASSIC])
    ],
)
def test_the_distribution_of_the_text_through_the_decoder(rule, drafter, lab):
    """Chi-square of the first two tokens over many seeds: the q that a drafter hands over is the one it drew from."""
    family, num_seeds = "llama" if rule == "block" else INT8, 300
    here, place = lab(family), 0 if family == "llama" else 4
    settings = {"temperature": 1.0, "top_k": 3, "max_tokens": 3, "ignore_eos": True}
    prompt = [here.plain("t1", 1)[place]]  # from a training text of the head, after which some drafts are right
    requests = [(prompt, Sampling(seed=seed, **settings)) for seed in range(num_seeds)]
    made = DRAFTERS[drafter].make(here, "t1")
    texts, stats = run(here.target, requests, made, CLASSIC.get(rule, Budget(3, 2)), rule)
    assert 0 < stats.num_accepted < stats.num_drafted
    batch = SamplingBatch([Sampling(**settings)], KeyedNoise(VOCAB))

    def distribution(ids: list[int]) -> dict[int, float]:
        ctx = here.target.new_context()
        here.target.prefill(ctx, ids)
        tree = DraftTree.root(ctx.pending())
        probs = batch.probs(batch.scores(here.target.forward(ctx, tree).logits, tree, None))[0, 0]
        return {int(token): float(probs[token]) for token in probs.nonzero()}

    wanted = {(a, b): pa * pb for a, pa in distribution(prompt).items() for b, pb in distribution([*prompt, a]).items()}
    found = Counter(text[:2] for text in texts.values())
    assert set(found) <= set(wanted)
    chi_square = sum((found[pair] - num_seeds * p) ** 2 / (num_seeds * p) for pair, p in wanted.items())
    assert len(wanted) == 9
    assert chi_square < 26.1  # 99.9% of a chi-square of 8 degrees of freedom


# --- what is refused -------------------------------------------------------------------------------------------------


def test_typical_is_lossy_and_says_so(lab):
    here, make = lab("llama"), DRAFTERS["lm-tree"].make
    for rule in ("typical", RULES["typical"]):
        with pytest.raises(ConfigError, match="changes what the target says: pass lossless=False"):
            Decoder(here.target, make(here, "t1"), rule)
    for kind, width in product(("greedy", "t1"), (1, 3)):
        requests = [here.request(kind, row) for row in range(3)]
        texts, stats = run(here.target, requests, make(here, kind), Budget(3, width), "typical", lossless=False)
        assert not stats.lossless
        assert all(len(text) == MAX_TOKENS for text in texts.values())


def test_rules_refuse_what_they_cannot_take(lab):
    here = lab("llama")
    with pytest.raises(ConfigError, match="unknown acceptance rule 'none': choose one of match, "):
        Decoder(here.target, rule="none")
    for rule in ("speculative", "block"):
        with pytest.raises(ConfigError, match=f"rule '{rule}' takes chains, found width 2"):
            Decoder(here.target, rule=rule, budget=Budget(3, 2))
    for rule in CLASSIC:
        with pytest.raises(ConfigError, match="weighs the draft's probabilities, and the drafter gives none"):
            run(here.target, [here.request("t1", 0)], DRAFTERS["twins"].make(here, "t1"), Budget(3), rule)
        texts, _ = run(here.target, [here.request("greedy", 0)], rule=rule)
        assert texts[0] == here.plain("greedy", 0)
