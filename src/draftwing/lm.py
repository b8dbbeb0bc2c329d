"""The public API: a target with its tokenizer and a drafter; prompts in, generations out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import NoneType
from typing import Any

from draftwing.budget.costs import Costs
from draftwing.budget.planner import Planner, planner_for
from draftwing.checks import AT_MOST_BATCH, BATCH_SIZE, MAX_BATCH, Argument, check_arguments
from draftwing.constraint import Constraint
from draftwing.decode import Decoder
from draftwing.engine import Engine, Speculation
from draftwing.errors import ConfigError, DraftwingError, shown
from draftwing.measure import measure
from draftwing.methods.base import BUDGET_ARGUMENT, Budget, Drafter, NoDrafter
from draftwing.models.target import Target
from draftwing.request import Request
from draftwing.sampling import Sampling, nth_sampling, one_each, sampling_from
from draftwing.stats import Logprob, Stats, Step
from draftwing.text.grammar import GrammarLike, Grammars, as_grammar
from draftwing.text.prompts import Prompt, as_list, check_prompt, located
from draftwing.text.tokenizer import Tokenizer

_ARGUMENTS = {
    "target": Argument((Target,), "a Target, as from load_target()"),
    "tokenizer": Argument((Tokenizer,), "a Tokenizer, as from Tokenizer(folder)"),
    "new_drafter": Argument((Callable, NoneType), "a function that makes a drafter, or None"),  # type: ignore[arg-type]
    "budget": BUDGET_ARGUMENT,
    "n": Argument((int,), "at least 1", AT_MOST_BATCH, 1, MAX_BATCH),
    "max_batch": BATCH_SIZE,
    "on_step": Argument((Callable, NoneType), "a function of an index and a StreamStep, or None"),  # type: ignore[arg-type]
}


@dataclass(frozen=True)
class StreamStep:
    """The result of one decode step of a stream.

    Attributes:
        text: newly printable text; may be empty while a character or a possible stop string is incomplete.
        token_ids: the tokens of this step, up to the end of the generation.
        step: the step itself.
        finish_reason: ``stop`` (a stop token or string) or ``length`` in the last step, None before.
    """

    text: str
    token_ids: tuple[int, ...]
    step: Step
    finish_reason: str | None = None


@dataclass
class Generation:
    """A finished generation.

    Attributes:
        text: without the prompt, special tokens and the stop string.
        token_ids: the emitted ids, including the one that ended the generation.
        finish_reason: ``stop`` (a stop token or string), ``length``, or ``error``.
        stats: over all steps; ``tau`` is the main one.
        logprobs: one per token if requested.
        seed: reproduces this text.
        error: why the generation ended early.
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
        """Return the result of a request."""
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
        """Tokens emitted per target forward, including the bonus token."""
        return self.stats.tau

    @property
    def lossless(self) -> bool:
        """True if the rule preserves the target's distribution."""
        return self.stats.lossless


class LM:
    """A target, its tokenizer and a way to make drafters. Threads may share it: their steps take turns.

    Args:
        target: from ``load_target``.
        tokenizer: the target's.
        new_drafter: makes a drafter with empty state for each decode loop; None decodes without drafts.
        rule: see ``Decoder``.
        lossless: see ``Decoder``.
        budget: how much to draft in every step; None decides step by step from observed costs (``budget.planner``).

    Attributes:
        drafter: an idle drafter, which describes what this model drafts with (see ``Drafter``).
        drafter_name: its name.

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
        values = {"target": target, "tokenizer": tokenizer, "new_drafter": new_drafter, "budget": budget}
        check_arguments(_ARGUMENTS, values)
        self.target, self.tokenizer = target, tokenizer
        self.new_drafter: Callable[[], Drafter] = NoDrafter if new_drafter is None else new_drafter
        self.rule, self.lossless = rule, lossless
        self.budget = budget
        self._costs: Costs | None = None
        self._planner: Planner | None = None
        self._turn = threading.RLock()  # the planner is shared, so steps that use it take turns
        # A rule or budget that cannot work is refused here, not at the first prompt.
        decoder = Decoder(target, self.new_drafter, rule, budget, lossless=lossless)
        self.drafter, self.drafter_name = decoder.drafter, decoder.drafter.name

    @property
    def is_auto(self) -> bool:
        """True if the budget is decided step by step."""
        return self.budget is None and self.drafter.drafts

    def describe_budget(self) -> str:
        """Return the budget as text: ``auto``, ``chain:5``, ``dynamic:60,8,10`` or ``static of N nodes``."""
        return "none" if not self.drafter.drafts else "auto" if self.budget is None else str(self.budget)

    def costs(self) -> Costs:
        """Return the costs of a step on this machine, which the first call measures in four seconds.

        Only forecasts need them: an automatic budget learns costs while it decodes.

        Raises:
            ConfigError: the target's context is too short to measure.
        """
        if self._costs is None:
            self._costs = measure(self.target, self.new_drafter)
        return self._costs

    @property
    def observed_costs(self) -> Costs | None:
        """The costs that the automatic budget has learned from requests decoded alone; None before, or if fixed."""
        return None if self._planner is None else self._planner.observed_costs

    def forget(self) -> None:
        """Drop everything that drafters remember from earlier requests, for example before a measurement."""
        self.drafter.forget()

    def decoder(self, *, max_batch: int | None = None, kv_memory: int | None = None) -> Decoder:
        """Return an empty decode loop; see ``engine``. An automatic budget is shared by all of them."""
        with self._turn:
            if self.is_auto and self._planner is None:
                self._planner = planner_for(self.rule, self.drafter, self.target.device)
        return Decoder(
            self.target,
            self.new_drafter,
            self.rule,
            self.budget,
            lossless=self.lossless,
            planner=self._planner,
            turn=None if self._planner is None else self._turn,
            kv_memory=kv_memory,
            max_batch=max_batch,
        )

    def engine(self, *, max_batch: int | None = None, kv_memory: int | None = None) -> Engine:
        """Return an empty engine: a decode loop, a queue, and detokenization.

        Args:
            max_batch: requests decoded at once; None for all, or at most 256 with ``kv_memory``.
            kv_memory: bytes for the KV slots of target and drafter together, allocated at once and never exceeded:
                requests wait for free blocks, prompts are prefilled in chunks between decode steps, and blocks are
                shared by prompts with the same prefix. None: one tensor that grows with the sequences.

        Raises:
            ConfigError, UnsupportedError: ``kv_memory`` is too small, or the target runs on transformers.
        """
        decoder = self.decoder(max_batch=max_batch, kv_memory=kv_memory)
        return Engine(decoder, max_batch=max_batch, tokenizer=self.tokenizer)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the ids of a text or of a dialogue (a list of ``{"role", "content"}``), or the given ids.

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
        """Return a constraint for ``Engine.submit`` from a ``Grammar``, a JSON schema as a dict, or ``"json"``.

        Raises:
            ConfigError: none of these, or an invalid grammar.
            UnsupportedError: llguidance is not installed.
        """
        return None if grammar is None else self._grammars.constraint(as_grammar(grammar))

    def _encode_references(self, references: Sequence[str]) -> list[list[int]]:
        if type(references) not in (list, tuple) or not all(isinstance(text, str) for text in references):
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
        engine: Engine | None = None,
        **options: Any,
    ) -> Generator[StreamStep]:
        """Decode one prompt and yield the text of every step.

        ``options`` are ``Sampling``'s fields (``temperature=0.8, seed=1``), or pass a ``Sampling``. Stop strings are
        never emitted, not even in part; text that may begin one is held back until that is decided.

        Args:
            prompt: a text, a dialogue or token ids.
            sampling: how to sample; ``options`` override its fields.
            speculation: how much to draft: a ``Budget``, ``"none"``, or None for the default of this ``LM``.
            references: texts that are likely to be repeated; draft ``"llma"`` copies from them.
            grammar: constrains the output: a ``Grammar``, a JSON schema as a dict, or ``"json"``.
            engine: an idle one of this ``LM``, which does not read again what its ``kv_memory`` holds of the prompt.
                None makes one.

        Raises:
            PromptError, SamplingError, ConfigError: invalid arguments; raised before any work is done.
            NumericsError: the target's logits are not finite.
        """
        engine, ids = engine or self.engine(max_batch=1), self._encode_references(references)
        sampling = sampling_from(sampling, options)
        constraint = self.constraint(grammar)
        prompt_ids = self.encode(prompt)
        request = engine.submit(prompt_ids, sampling, speculation=speculation, references=ids, constraint=constraint)
        return self._stream(engine, request)

    def _stream(self, engine: Engine, request: Request) -> Generator[StreamStep]:
        try:
            for step in engine.steps():
                row = step.rows[0]
                if row.error is not None:
                    raise row.error
                yield StreamStep(row.text, row.token_ids, step, row.finish_reason)
            if request.error is not None:
                raise request.error
        finally:
            engine.cancel(request)  # if the caller has stopped

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
        """``stream`` for asyncio: each step runs in a worker thread, so that the event loop is not blocked.

        ``break``, ``aclose`` or cancelling the task ends the generation after the current step.
        """
        chosen: Any = {"speculation": speculation, "references": references, "grammar": grammar}
        steps = self.stream(prompt, sampling, **chosen, **options)
        loop = asyncio.get_running_loop()
        while True:
            running = loop.run_in_executor(None, next, steps, None)
            try:
                step = await asyncio.shield(running)
            except asyncio.CancelledError:
                # An unused exception is retrieved, or asyncio would report that it never was.
                running.add_done_callback(lambda done: None if done.cancelled() else done.exception())
                raise
            if step is None:
                return
            yield step

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
        """Decode prompts, at most ``max_batch`` at once; finished ones make room for waiting ones.

        Args:
            prompts: one or many; a text, token ids or a dialogue is one.
            sampling: for all, or a list with one for each prompt; ``options`` override fields of each. A seed applies
                to every prompt; without one, every generation draws its own and reports it.
            n: generations per prompt. With a seed, the first one has it, and the others have seeds derived from it.
            max_batch: sequences decoded at once.
            speculation: how much to draft: a ``Budget``, ``"none"``, or None for the default of this ``LM``.
            references: texts that are likely to be repeated; draft ``"llma"`` copies from them.
            grammar: constrains every generation: see ``constraint``.
            on_step: called with the index of a generation in the result and the result of its step.
            options: ``Sampling``'s fields.

        Returns:
            The generations in the order of the prompts, the ``n`` of a prompt one after another. If one of several
            fails, the others are complete, and its ``error`` says why.

        Raises:
            ConfigError, PromptError, SamplingError: invalid arguments; raised before any work is done.
            NumericsError: the logits of the only generation are not finite.
        """
        check_arguments(_ARGUMENTS, {"n": n, "max_batch": max_batch, "on_step": on_step})
        listed = as_list(prompts)
        samplings = one_each(sampling, len(listed), options)
        rows = 1 if len(listed) * n == 1 and max_batch is not None and max_batch > 1 else max_batch
        engine, reference_ids = self.engine(max_batch=rows), self._encode_references(references)
        limits: Any = {"speculation": speculation, "references": reference_ids, "constraint": self.constraint(grammar)}
        requests = []
        for place, (prompt, own) in enumerate(zip(listed, samplings, strict=True), 1):
            with located(f"prompt {place} of {len(listed)}" if len(listed) > 1 else ""):
                ids = self.encode(prompt)
                requests += [engine.submit(ids, nth_sampling(own, number), **limits) for number in range(n)]
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
