"""The interface of targets to the decode loop.

Shape suffixes: B rows, N nodes, V vocabulary, F features (width of all taps together), T prompt tokens.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from draftwing.errors import ConfigError, PromptError, UnsupportedError, shown
from draftwing.methods.base import Budget, Drafter
from draftwing.models.context import NO_FEATURES, Context, FeatureSpec, Row, TargetOutput
from draftwing.models.linear import Embedding, Linear
from draftwing.noise import AcceptArgs
from draftwing.runtime.tree_builder import Drafted, DraftRequest
from draftwing.sampling import SamplingBatch
from draftwing.torch_utils import inference, record_event
from draftwing.tree import Accepted, DraftTree


class DraftFailed(Exception):
    """A drafter raised ``error``; no slot or state that counts has changed."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class StepResult(NamedTuple):
    """Draft trees and the target's forward of them.

    Attributes:
        tree: the proposed trees, after ``revise``, with what the forward has computed of them.
        output: the target's forward of ``tree``.
        draft_seconds, verify_seconds: durations on the host.
        events: on a GPU, recorded before the draft, between draft and forward, and after the forward.
    """

    tree: DraftTree
    output: TargetOutput
    draft_seconds: float
    verify_seconds: float
    events: tuple[torch.cuda.Event, ...] = ()

    def seconds(self) -> tuple[float, float]:
        """Durations of draft and forward; on a GPU those of its work, which must be complete."""
        if not self.events:
            return self.draft_seconds, self.verify_seconds
        start, drafted, verified = self.events
        return start.elapsed_time(drafted) / 1000, drafted.elapsed_time(verified) / 1000


class Target(ABC):
    """A causal LM that scores draft trees and commits the accepted nodes to its KV slots.

    Attributes:
        name: for reports.
        vocab_size: V of its logits.
        max_length: tokens of a row at most, prompt included.
        num_layers, hidden_size: for drafters that tap features.
        dtype: of its arithmetic; logits, features and caches have the same or a wider one.
        device: of its logits and caches.
        eos_ids: end-of-sequence tokens.
        folder: from which it was loaded, if known.
        has_layers: False if only its embedding, final norm and LM head were loaded: it runs no text.
        supports_trees: False if its state cannot be rolled back; then only lone roots are allowed.
        runs_nodes_alone: every node of a tree takes one forward, so drafts save no time.
        supports_views: whether it can draft for itself from some of its rows' slots (``draft`` and ``watch``).
        supports_pages: whether its slots may be paged (``models.paged``), and prompts read in chunks (``read``).
        applies_match: whether ``forward`` can apply ``accept.match`` itself, given an ``AcceptArgs``.
    """

    name: str
    vocab_size: int
    max_length: int
    num_layers: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    eos_ids: tuple[int, ...]
    folder: Path | None = None
    has_layers: bool = True
    supports_trees: bool = True
    runs_nodes_alone: bool = False
    supports_views: bool = False
    supports_pages: bool = False
    applies_match: bool = False

    @property
    def quantized(self) -> str | None:
        """How its matrices are quantised; None if they are not."""
        return None

    @property
    def runtime(self) -> str:
        """The runtime of its layers: ``torch``, or the CPU ``kernel``."""
        return "torch"

    @property
    def runs_as(self) -> str:
        """The code that computes its matrices: see ``Linear.runs_as``."""
        return "transformers"

    @property
    @abstractmethod
    def num_weight_bytes(self) -> int:
        """Bytes of weights read by one forward of one token (for bandwidth figures)."""

    @property
    @abstractmethod
    def embedding(self) -> Embedding:
        """(V, H) the input embedding, which draft networks read too."""

    @property
    @abstractmethod
    def head(self) -> Linear:
        """The LM head: (R, H) after the final norm -> (R, V)."""

    @abstractmethod
    def new_context(self, features: FeatureSpec = NO_FEATURES) -> Context:
        """An empty context, whose forwards return these hidden states."""

    @inference
    def prefill(self, ctx: Context, prompt_ids: Sequence[int], prompt_length: int | None = None) -> Tensor | None:
        """Add a row at the end: cache all of the prompt but its last token, which becomes pending.

        Args:
            prompt_length: the number of tokens of the prompt itself, if the others were generated after it.

        Returns:
            (1, T - 1, F) features of the cached tokens if the context requests them, else None.
        """
        self.check_prompt(prompt_ids)
        ids = list(prompt_ids)
        row = Row(ids, len(ids) - 1, prompt_length or len(ids))
        features = self.read(ctx, row, 0, row.length)
        ctx.rows.append(row)
        return features

    def room(self, length: int) -> int:
        """Return the number of tokens that the next step may emit for a row of ``length`` committed tokens."""
        return self.max_length - length - 1

    @abstractmethod
    def read(self, ctx: Context, row: Row, start: int, stop: int) -> Tensor | None:
        """Read the tokens from ``start`` to before ``stop`` of a row that will be added to the context.

        Earlier tokens must have been read into the same slots; if ``supports_pages`` is False, all are read at once.
        Call it in inference mode. A row's bits do not depend on other rows.

        Returns:
            (1, stop - start, F) features if the context requests them, else None.
        """

    def step(
        self,
        drafter: Drafter,
        ctx: Context,
        sampling: SamplingBatch,
        budget: Budget,
        accept: AcceptArgs | None = None,
        revise: Callable[[DraftTree], DraftTree] | None = None,
    ) -> StepResult:
        """Draft trees and score them: ``drafter.propose``, then ``forward``. A target may do
        both in one call (``propose``). Call it in inference mode.

        Args:
            accept: how tokens are drawn, if ``applies_match``.
            revise: changes the proposed trees before they are scored; None to score them as they are.

        Raises:
            DraftFailed: the drafter raised an exception.
        """
        start, device = time.perf_counter(), self.device
        events = [record_event(device)] if device.type == "cuda" else []
        try:
            drafted = self.propose(drafter, ctx, sampling, budget, accept if revise is None else None)
        except Exception as error:
            raise DraftFailed(error) from error
        tree = drafted.tree if revise is None else revise(drafted.tree)
        drafted_at, verified = time.perf_counter(), drafted.verified
        if verified is not None and verified.tree is tree:
            return StepResult(tree, verified, drafted_at - start - verified.seconds, verified.seconds)
        events += [record_event(device)] if events else []
        if drafted.resume is not None and tree is drafted.tree and not ctx.features.taps:
            output = TargetOutput(drafted.resume(), None, tree)
        else:
            output = self.forward(ctx, tree, None if tree.num_extra_nodes else accept)
        events += [record_event(device)] if events else []
        seconds = drafted_at - start, time.perf_counter() - drafted_at
        return StepResult(output.tree or tree, output, *seconds, tuple(events))

    def propose(
        self, drafter: Drafter, ctx: Context, sampling: SamplingBatch, budget: Budget, accept: AcceptArgs | None
    ) -> Drafted:
        """The drafter's trees; with ``accept`` also their verification, if one call can do both."""
        return Drafted(drafter.propose(ctx, sampling, budget))

    @abstractmethod
    def forward(self, ctx: Context, tree: DraftTree, accept: AcceptArgs | None = None) -> TargetOutput:
        """Score every node. Writes the nodes' slots, commits nothing.

        Args:
            accept: how tokens are drawn, if ``applies_match``: the target may then apply ``accept.match`` itself and
                commit the kept nodes (``TargetOutput.accepted``), which changes no slot committed before.
        """

    @abstractmethod
    def score(self, ids: Tensor, features: FeatureSpec = NO_FEATURES) -> TargetOutput:
        """Whole sequences in one causal forward without a cache, for training.

        Args:
            ids: (B, T) int64, padded with any token at the ends of rows.
            features: which hidden states to return.

        Returns:
            logits (B, T, V) and features (B, T, F).
        """

    @abstractmethod
    def commit(self, ctx: Context, tree: DraftTree, accepted: Accepted) -> None:
        """Add the accepted paths to the rows' caches. ``ctx.rows`` still has the lengths before the step."""

    @abstractmethod
    def remove(self, ctx: Context, row: int) -> None:
        """Drop a row; the last row takes its place."""

    def draft(self, request: DraftRequest) -> Drafted:
        """Grow trees by forwards of the target itself, which read only the committed slots of ``request.view``.

        Writes only slots after the committed ones: those of the trees, which ``forward`` writes again.

        Raises:
            UnsupportedError: ``supports_views`` is False.
        """
        raise self._no_views()

    def watch(self, ctx: Context, row: int, start: int) -> Tensor:
        """Attention weights of a row's committed tokens from ``start`` on (see ``Runner.watch``).

        Raises:
            UnsupportedError: ``supports_views`` is False.
        """
        raise self._no_views()

    def _no_views(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self.name} runs in transformers, which cannot look at some of its slots alone: load it with "
            f"engine='lean' if the lean decoder supports its family, or use another draft method"
        )

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raise PromptError if the prompt cannot be decoded."""
        # Only these classes: a subclass, an array or an iterator may give other ids each time it is read.
        if type(prompt_ids) not in (list, tuple, range):
            raise PromptError(
                f"a prompt must be a list of token ids, found {type(prompt_ids).__name__} {shown(prompt_ids)}: encode "
                f"a text first, and convert an array with .tolist()"
            )
        if not prompt_ids:
            raise PromptError("the prompt is empty: give at least one token (to write freely, the BOS token alone)")
        if len(prompt_ids) >= self.max_length:
            raise PromptError(
                f"the prompt has {len(prompt_ids)} tokens, and {self.name} has room for {self.max_length} with at "
                f"least one new token: shorten it"
            )
        if set(map(type, prompt_ids)) != {int}:  # the kernel reads 64-bit integers: a bool or a float would be garbage
            wrong = next(token for token in prompt_ids if type(token) is not int)
            raise PromptError(
                f"token ids must be ints, found {type(wrong).__name__} {shown(wrong)}: convert an array with .tolist()"
            )
        least, most = min(prompt_ids), max(prompt_ids)
        if least < 0 or most >= self.vocab_size:
            raise PromptError(
                f"token id {shown(least if least < 0 else most)} is outside the vocabulary of {self.vocab_size} of "
                f"{self.name}: was the prompt encoded with another tokenizer?"
            )


C = TypeVar("C", bound=Context)


def own_context(ctx: Context, kind: type[C]) -> C:
    """Narrow the context to a target's class. Raises ConfigError if another class of target made it."""
    if not isinstance(ctx, kind):
        raise ConfigError("this context was made by another class of target: use one from this target's new_context()")
    return ctx
