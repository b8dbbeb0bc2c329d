"""Is the speculative text the target's own? Where it is not: by what margin, against what rounding noise?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from draftwing.cpu.noise import noise_of
from draftwing.lm import LM
from draftwing.models.context import Context
from draftwing.models.target import Target
from draftwing.request import with_seed
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.text.prompts import Prompt
from draftwing.tree import Accepted, DraftTree


@dataclass(frozen=True)
class Difference:
    """Where a speculative text first leaves the plain one.

    Attributes:
        position: emitted tokens that the two share.
        plain_token, token: what each says there; -1 for both where one text ends and the other goes on.
        margin: the plain token's perturbed score minus the other's, computed plainly (0 where a text ends).
        noise: the largest change of any score there when the same tokens are forwarded in other groups.
        is_tie: the margin is within twice the noise: each of the two scores may move by that much.
    """

    prompt_index: int
    position: int
    plain_token: int
    token: int
    margin: float
    noise: float
    is_tie: bool


@dataclass(frozen=True)
class Verification:
    """What ``verify`` found."""

    num_prompts: int
    num_identical: int
    num_tokens: int
    differences: list[Difference]
    settings: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def verify(
    lm: LM,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    max_batch: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Decode every prompt plainly and speculatively and compare token ids.

    Args:
        max_batch: prompts decoded speculatively at once; plain decoding always runs one by one.
        on_progress: called with (done, total) prompts.
    """
    plain, sampling = LM(lm.target, lm.tokenizer), with_seed(sampling)
    differences, num_tokens, done = [], 0, 0
    for start in range(0, len(prompts), max_batch):
        group = list(prompts[start : start + max_batch])
        ours = lm.generate(group, sampling, max_batch=max_batch)
        for offset, own in enumerate(ours):
            if own.error is not None:
                raise own.error
            base = plain.generate([group[offset]], sampling)[0]
            num_tokens += len(base.token_ids)
            if own.token_ids != base.token_ids:
                index = start + offset
                differences.append(_explain(lm.target, base.prompt_ids, base.token_ids, own.token_ids, sampling, index))
            done += 1
            if on_progress is not None:
                on_progress(done, len(prompts))
    settings = {
        "target": lm.target.name,
        "drafter": lm.drafter_name,
        "rule": lm.rule,
        "dtype": str(lm.target.dtype).removeprefix("torch."),
        "device": str(lm.target.device),
        "max_batch": max_batch,
        "sampling": {key: value for key, value in asdict(sampling).items() if value != getattr(Sampling(), key)},
    }
    return Verification(len(prompts), len(prompts) - len(differences), num_tokens, differences, settings)


@torch.inference_mode()
def _explain(
    target: Target, prompt: list[int], plain: list[int], own: list[int], sampling: Sampling, index: int
) -> Difference:
    """Recompute the scores at the first difference in several groupings of the same tokens."""
    paired = zip(plain, own, strict=False)
    position = next((i for i, (a, b) in enumerate(paired) if a != b), min(len(plain), len(own)))
    ids = prompt + plain[:position]
    batch = SamplingBatch([sampling], noise_of(target.vocab_size, target.device), target.device)
    scores = [_scores(target, ids, len(prompt), group, batch) for group in (1, 2, 5, 16, len(ids))]
    noise = max(float((other - scores[0]).nan_to_num(0.0).abs().max()) for other in scores[1:])
    if position >= min(len(plain), len(own)):  # one ended where the other went on: an end token is the difference
        return Difference(index, position, -1, -1, 0.0, noise, is_tie=False)
    margin = float(scores[0][plain[position]] - scores[0][own[position]])
    return Difference(index, position, plain[position], own[position], margin, noise, abs(margin) <= 2 * noise)


def _scores(target: Target, ids: list[int], num_prompt: int, group: int, batch: SamplingBatch) -> Tensor:
    """(V,) perturbed scores of the token after ``ids``, all but the prompt forwarded in chains of ``group``."""
    ctx: Context = target.new_context()
    target.prefill(ctx, ids[:num_prompt] if group < len(ids) else ids)
    row = ctx.rows[0]
    while True:
        chain = ids[row.length : row.length + (group if target.supports_trees else 1)]
        row.tokens = ids
        tree = DraftTree.chain(torch.tensor([chain], device=target.device))
        output = target.forward(ctx, tree)
        if row.length + len(chain) == len(ids):
            row.prompt_length = num_prompt
            scores = batch.scores(output.logits, tree, ctx.history() if batch.penalises else None)
            depths = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
            return batch.perturb(scores[:, -1:], depths, [len(ids)], 0)[0, 0]
        _commit_all(target, ctx, tree)


def _commit_all(target: Target, ctx: Context, tree: DraftTree) -> None:
    nodes = torch.arange(tree.num_nodes, device=target.device)[None]
    num = ctx.tensor([tree.num_nodes - 1])
    target.commit(ctx, tree, Accepted(nodes, num, num))
    ctx.rows[0].length += tree.num_nodes
