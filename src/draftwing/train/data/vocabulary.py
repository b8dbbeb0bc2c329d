"""A draft vocabulary: the few thousand tokens that a draft head may propose (EAGLE-3, 2503.01840)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftwing.errors import ConfigError, DataError
from draftwing.train.data.corpus import Corpus, Example

__all__ = ["DraftVocabulary", "coverage_of"]


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """Which of the target's tokens a draft head knows.

    Attributes:
        target_ids: (Vd,) int64, ascending: the target's id of each draft id.
        coverage: share of the corpus's loss tokens that are among them; no draft can be right elsewhere.
        vocab_size: V of the target.
    """

    target_ids: Tensor
    coverage: float
    vocab_size: int

    @classmethod
    def build(
        cls,
        corpus: Corpus | Sequence[Example],
        vocab_size: int,
        draft_vocab_size: int,
        always: Iterable[int] = (),
    ) -> DraftVocabulary:
        """The most frequent loss tokens of a corpus; of equally frequent ones the lower ids.

        Args:
            corpus: or its dialogues alone.
            vocab_size: V of the target's logits.
            draft_vocab_size: Vd; at V or above, the vocabulary is the whole one.
            always: ids that are in it whatever their frequency: end tokens and other special ones.

        Raises:
            ConfigError: Vd is too small, or ``always`` names ids outside the vocabulary.
            DataError: the corpus has no loss tokens, or ids outside the vocabulary.
        """
        kept = np.unique(np.fromiter(always, dtype=np.int64))
        if draft_vocab_size < max(1, len(kept)):
            raise ConfigError(
                f"draft_vocab_size must be at least {max(1, len(kept))} ({len(kept)} ids are always in), found "
                f"{draft_vocab_size}"
            )
        if len(kept) and not (kept[0] >= 0 and kept[-1] < vocab_size):
            raise ConfigError(
                f"always names ids outside the vocabulary of {vocab_size}: {kept.tolist()}; leave them out"
            )
        counts = _count(corpus, vocab_size)
        wanted = counts.astype(np.float64)
        wanted[kept] = np.inf
        best = np.argsort(-wanted, kind="stable")[:draft_vocab_size]
        chosen = np.sort(best)
        coverage = float(counts[chosen].sum() / counts.sum())
        return cls(torch.from_numpy(chosen.astype(np.int64)), coverage, vocab_size)

    @property
    def d2t(self) -> Tensor:
        """(Vd,) int64: the target's id minus the draft id, as EAGLE-3 checkpoints store it."""
        return self.target_ids - torch.arange(len(self.target_ids), device=self.target_ids.device)

    @property
    def t2d(self) -> Tensor:
        """(V,) bool: whether the target's id is in the draft vocabulary."""
        return torch.zeros(self.vocab_size, dtype=torch.bool).index_fill_(0, self.target_ids, True)


def coverage_of(corpus: Corpus | Sequence[Example], target_ids: Tensor | None, vocab_size: int) -> float:
    """Share of a corpus's loss tokens in a draft vocabulary (None: the whole one)."""
    counts = _count(corpus, vocab_size)
    return 1.0 if target_ids is None else float(counts[target_ids.cpu().numpy()].sum() / counts.sum())


def _count(corpus: Corpus | Sequence[Example], vocab_size: int) -> np.ndarray:
    """(V,) how often each token is predicted."""
    corpus = corpus if isinstance(corpus, Corpus) else Corpus(tuple(corpus))
    counts = np.bincount(corpus.stream, minlength=vocab_size)
    loss_tokens = [example.ids[example.mask] for example in corpus.examples]
    if loss_tokens:
        found = np.bincount(np.concatenate(loss_tokens), minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    if len(counts) > vocab_size:
        raise DataError(
            f"the data has token id {len(counts) - 1}, and the vocabulary has {vocab_size}: encode the data with the "
            f"target's own tokenizer"
        )
    if not counts.sum():
        raise DataError("the data has no token that counts in the loss: give documents, or dialogues with answers")
    return counts
