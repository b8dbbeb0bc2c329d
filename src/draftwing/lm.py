"""A target with its tokenizer and a way to draft: prompts in, texts out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from draftwing.budget.costs import Costs
from draftwing.budget.measure import costs_of, planner_for
from draftwing.budget.planner import Planner
from draftwing.constraint import Constraint
from draftwing.drafters.base import Budget, Drafter, NoDrafter
from draftwing.engine.decode import Decoder, loop_of
from draftwing.engine.engine import Engine, Speculation
from draftwing.engine.load import SlotEngine
from draftwing.engine.paged import SlotDecoder, check_memory
from draftwing.engine.request import Request
from draftwing.errors import ConfigError, DraftwingError, shown
from draftwing.model.target import Target
from draftwing.sampling import Sampling
from draftwing.sampling_options import nth_sampling, one_each, sampling_from
from draftwing.stats import Logprob, Stats, Step
from draftwing.text.grammar import GrammarLike, Grammars, as_grammar
from draftwing.text.prompts import Prompt, as_list, check_prompt
from draftwing.text.tokenizer import Tokenizer

__all__ = ["LM", "Generation", "StreamStep"]

D = TypeVar("D", bound=Decoder)


@dataclass(frozen=True)
class StreamStep:
    """What one decode step adds to a stream.

    Attributes:
        text: newly printable text; may be empty while a character or a possible stop string is incomplete.
        token_ids: the tokens of this step, cut where the text ends.
        step: the step itself.
        finish_reason: None but for the last one: ``stop`` (a stop token or string) or ``length``.
    """

    text: str
    token_ids: tuple[int, ...]
    step: Step
    finish_reason: str | None = None


@dataclass
class Generation:
    """A finished text.

    Attributes:
        text: without the prompt, special tokens and the stop string.
        token_ids: the emitted ids, up to and including the one that ended the text.
        finish_reason: ``stop`` (a stop token or string), ``length``, or ``error``.
        stats: steps folded; ``tau`` is the number to look at.
        logprobs: one per token where asked for.
        seed: with which the same text is written again.
        error: why there is no more text than this.
    """

    prompt_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    stats: Stats = field(default_factory=Stats)
    logprobs: list[Logprob] | None = None
    seed: int = 0
    error: DraftwingError | None = None

    @classmethod
    def of(cls, request: Request) -> Generation:
        """What has become of a request."""
        return cls(
            list(request.prompt_ids),
            request.text,
            request.token_ids,
            request.finish_reason or "cancelled",
            request.stats,
            None if request.sampling.logprobs is None else request.logprobs,
            request.sampling.seed or 0,
            request.error,
        )

    @property
    def tau(self) -> float:
        """Tokens emitted per target forward, the bonus token counted."""
        return self.stats.tau

    @property
    def lossless(self) -> bool:
        """Whether the rule keeps the target's law."""
        return self.stats.lossless


class LM:
    """A target, its tokenizer and a way to make drafters. Threads may share it: their steps take turns.

    Args:
        target: from ``load_target``.
        tokenizer: the target's.
        new_drafter: makes a drafter with empty state for each decode loop; None decodes plainly.
        rule, lossless: see ``Decoder``.
        budget: how much to draft in every step; None decides it step by step from measured costs (``budget.planner``).

    Attributes:
        drafter_name, traits: what its drafters are called and what they are like.

    Raises:
        ConfigError, UnsupportedError: see ``Decoder``.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        new_drafter: Callable[[], Drafter] | None = None,
        rule: str = "match",
        budget: Budget | None = None,
        *,
        lossless: bool = True,
    ) -> None:
        if budget is not None and not isinstance(budget, Budget):
            raise ConfigError(f"budget must be a Budget or None, found {budget!r:.60}: write Budget(5) for chains of 5")
        self.target, self.tokenizer = target, tokenizer
        self.new_drafter: Callable[[], Drafter] = new_drafter or NoDrafter
        self.rule, self.lossless = rule, lossless
        self.budget = budget
        self._planner: Planner | None = None
        self._turn = threading.RLock()  # what the planner learns is shared, so steps that ask it take turns
        # A rule or budget that cannot work is refused here, not at the first prompt.
        decoder = Decoder(target, self.new_drafter, rule, budget, lossless=lossless)
        self.drafter_name, self.traits = decoder.drafter.name, decoder.drafter.traits

    @property
    def is_auto(self) -> bool:
        """Whether what to draft is decided step by step."""
        return self.budget is None and self.traits.drafts

    def describe_budget(self) -> str:
        """Such as ``auto``, ``chain:5``, ``dynamic:60,8,10`` or ``static`` with its number of nodes."""
        return "none" if not self.traits.drafts else "auto" if self.budget is None else str(self.budget)

    def costs(self, *, again: bool = False) -> Costs:
        """What a step takes here: measured in a few seconds at the first call ever, then kept on disk."""
        return costs_of(self.target, self.new_drafter, loop_of(self.target), again=again)

    def forget(self) -> None:
        """Drop what drafters have kept of former requests, where they keep anything: a measurement starts from here."""
        if self.traits.forget is not None:
            self.traits.forget()

    def decoder(self) -> Decoder:
        """A new decode loop with nothing in it. What an automatic budget learns goes on from one to the next."""
        return self._decoder(Decoder)

    def _decoder(self, make: Callable[..., D]) -> D:
        with self._turn:
            if self.is_auto and self._planner is None:
                self._planner = planner_for(self.target, self.new_drafter, self.rule, loop_of(self.target))
        planner, turn = self._planner, None if self._planner is None else self._turn
        return make(
            self.target,
            self.new_drafter,
            self.rule,
            self.budget,
            lossless=self.lossless,
            planner=planner,
            turn=turn,
        )

    def engine(self, *, max_batch: int | None = None, kv_memory: int | None = None) -> Engine:
        """A new engine with nothing in it: a decode loop, a queue, and text of what is emitted.

        Args:
            max_batch: requests decoded at once; None for all, with ``kv_memory`` for at most 256.
            kv_memory: bytes for the KV slots of target and drafter together. They are taken at once and never exceeded:
                requests wait for room, prompts are read in pieces beside the decoding, and what was read is kept for
                prompts that begin alike (``engine.paged``). None: slots grow with what is decoded, as one tensor.

        Raises:
            ConfigError, UnsupportedError: ``kv_memory`` holds no text, or the target runs in transformers.
        """
        if kv_memory is None:
            return Engine(self.decoder(), max_batch=max_batch, tokenizer=self.tokenizer)
        make = partial(SlotDecoder, max_batch, check_memory(kv_memory))
        return SlotEngine(self._decoder(make), max_batch=max_batch, tokenizer=self.tokenizer)

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of a text, of a dialogue (a list of ``{"role", "content"}``), or the ids themselves.

        Raises:
            PromptError: it is none of these, or empty.
            TokenizerError: see ``Tokenizer.encode_chat``.
        """
        checked: Any = check_prompt(prompt)
        if isinstance(checked, str):
            return self.tokenizer.encode(checked)
        return self.tokenizer.encode_chat(checked) if checked and isinstance(checked[0], Mapping) else checked

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.target.vocab_size, self.target.eos_ids)

    def constraint(self, grammar: GrammarLike | None) -> Constraint | None:
        """What ``Engine.submit`` takes of a ``Grammar``, a JSON schema as a dict, or ``"json"`` for any JSON object.

        Raises:
            ConfigError: none of these, or one that cannot be followed.
            UnsupportedError: llguidance is not installed.
        """
        return None if grammar is None else self._grammars.constraint(as_grammar(grammar))

    def _encode_references(self, references: Sequence[str]) -> list[list[int]]:
        if not isinstance(references, list | tuple) or not all(isinstance(text, str) for text in references):
            raise ConfigError(f"references must be a list of texts, found {shown(references)}: put each text into it")
        return [self.tokenizer.encode_plain(text) for text in references]

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | Mapping[str, Any] | None = None,
        *,
        speculation: Speculation = None,
        references: Sequence[str] = (),
        grammar: GrammarLike | None = None,
        **options: Any,
    ) -> Iterator[StreamStep]:
        """Decode one prompt and yield the text of every step as it comes.

        ``options`` are ``Sampling``'s fields (``temperature=0.8, seed=1``), or pass a ``Sampling``. Stop
        strings never show, not even in part. The last step's text holds what was held back.

        Args:
            prompt: a text, a dialogue or token ids.
            sampling: how to sample, on which ``options`` are laid.
            speculation: how much to draft: a ``Budget``, ``"none"``, or None for what this ``LM`` does by default.
            references: texts that are likely to be repeated; draft ``"llma"`` copies from them.
            grammar: what a text must follow: a ``Grammar``, a JSON schema as a dict, or ``"json"``.

        Raises:
            PromptError, SamplingError, ConfigError: refused at once, before any work is done.
            NumericsError: the target's logits are not finite.
        """
        engine, ids = self.engine(max_batch=1), self._encode_references(references)
        sampling = sampling_from(sampling, options)
        held = self.constraint(grammar)
        request = engine.submit(self.encode(prompt), sampling, speculation=speculation, references=ids, constraint=held)
        return self._stream(engine, request)

    def _stream(self, engine: Engine, request: Request) -> Iterator[StreamStep]:
        for step in engine.steps():
            row = step.rows[0]
            if row.error is not None:
                raise row.error
            yield StreamStep(row.text, row.token_ids, step, row.finish_reason)
        if request.error is not None:
            raise request.error

    async def astream(
        self,
        prompt: Prompt,
        sampling: Sampling | Mapping[str, Any] | None = None,
        *,
        speculation: Speculation = None,
        references: Sequence[str] = (),
        grammar: GrammarLike | None = None,
        **options: Any,
    ) -> AsyncIterator[StreamStep]:
        """``stream`` for asyncio: each step runs in a worker thread, so that the event loop goes on meanwhile.

        Whoever stops listening, by ``break``, ``aclose`` or cancelling the task, ends the text after the step that is
        under way.
        """
        chosen: Any = {"speculation": speculation, "references": references, "grammar": grammar}
        steps = self.stream(prompt, sampling, **chosen, **options)
        loop, under_way = asyncio.get_running_loop(), None
        while True:
            under_way = loop.run_in_executor(None, next, steps, None)
            try:
                found = await asyncio.shield(under_way)
            except asyncio.CancelledError:
                under_way.add_done_callback(_ignore)  # nobody will ask what it came to
                raise
            if found is None:
                return
            yield found

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Mapping[str, Any] | Sequence[Sampling] | None = None,
        *,
        n: int = 1,
        max_batch: int = 8,
        speculation: Speculation = None,
        references: Sequence[str] = (),
        grammar: GrammarLike | None = None,
        on_step: Callable[[int, StreamStep], None] | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Decode prompts, at most ``max_batch`` at once; rows that end make room for waiting ones.

        Args:
            prompts: one or many; a text, token ids or a dialogue is one.
            sampling: for all, or a list with one for each prompt; ``options`` are laid on each. A seed is that of
                every prompt; where there is none, every text has its own, drawn and named in its ``Generation``.
            n: texts of each prompt. With a seed, the first one has it, and each other one another that follows from it.
            max_batch: texts decoded at once.
            speculation: how much to draft: a ``Budget``, ``"none"``, or None for what this ``LM`` does by default.
            references: texts that are likely to be repeated; draft ``"llma"`` copies from them.
            grammar: what every text must follow: see ``constraint``.
            on_step: called with a text's place in the result and what a step adds to it.
            options: ``Sampling``'s fields.

        Returns:
            The generations in the order of the prompts, the ``n`` of a prompt one after another. Where one of several
            fails while it is decoded, the others are whole, and its ``error`` says why.

        Raises:
            ConfigError, PromptError, SamplingError: refused at once, before any work is done.
            NumericsError: the logits of the only text are not finite.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ConfigError(f"n must be at least 1, found {n!r}: give a whole number")
        wanted = as_list(prompts)
        each = one_each(sampling, len(wanted), options)
        rows = 1 if len(wanted) * n == 1 and isinstance(max_batch, int) and max_batch > 1 else max_batch
        engine, given = self.engine(max_batch=rows), self._encode_references(references)
        wishes: Any = {"speculation": speculation, "references": given, "constraint": self.constraint(grammar)}
        requests = [
            engine.submit(ids, nth_sampling(own, number), **wishes)
            for ids, own in zip([self.encode(prompt) for prompt in wanted], each, strict=True)
            for number in range(n)
        ]
        if on_step is None:
            engine.run()
        else:
            for step in engine.steps():
                for row in step.rows:
                    alone = replace(step, rows=(row,))
                    on_step(row.request_id, StreamStep(row.text, row.token_ids, alone, row.finish_reason))
        if len(requests) == 1 and requests[0].error is not None:
            raise requests[0].error
        return [Generation.of(request) for request in requests]


def _ignore(done: asyncio.Future[Any]) -> None:
    """A future's result that nobody waits for; without this its exception would be reported as lost."""
    if not done.cancelled():
        done.exception()
