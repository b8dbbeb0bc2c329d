"""Draftwing inside transformers: ``model.generate(..., custom_generate=draftwing.custom_generate("path/to/head"))``.

``generate`` prepares everything as usual (settings, padding, processors, stopping criteria) and hands the decoding loop
to us. It does not hand over everything: what it keeps to itself is named at ``custom_generate``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.accept import get_rule
from draftwing.api import load_drafter
from draftwing.budget.measure import planner_for
from draftwing.budget.planner import Planner
from draftwing.drafters.base import Budget, Drafter
from draftwing.engine.decode import Decoder, loop_of
from draftwing.engine.engine import Engine
from draftwing.engine.request import with_seed
from draftwing.errors import TokenizerError, UnsupportedError
from draftwing.hf.columns import Columns, Ends
from draftwing.hf.settings import pad_id, read_prompts, read_sampling, refuse
from draftwing.model.adapter import AdapterTarget
from draftwing.model.resolve import resolve
from draftwing.model.target import Target
from draftwing.stats import Stats
from draftwing.text.tokenizer import Tokenizer

__all__ = ["CustomGenerate", "custom_generate"]

Draft = str | Path | Callable[[Target], Drafter]


def custom_generate(
    draft: Draft,
    *,
    budget: Budget | None = None,
    rule: str = "match",
    lossless: bool = True,
    seed: int | None = None,
    tokenizer: Any = None,
) -> CustomGenerate:
    """Make a decoding loop for transformers' ``generate``::

        fast = draftwing.custom_generate("path/to/head")
        output = model.generate(**inputs, custom_generate=fast, max_new_tokens=64)

    Keep what this returns: the drafter is loaded, and the model examined, at the first call with each model object.
    The model itself is the target; its weights are shared, not copied. Greedy text is that of plain ``generate`` as far
    as arithmetic goes: in half precision a forward over several tokens rounds otherwise than one over a single token,
    and two tokens with equal logits may change places. Rows of a batch are run one by one: it is made for batch 1.

    Of what is given to it, ``generate`` keeps three things to itself:

    - ``streamer``: it hears the prompt and then nothing, not even the end. Give it as ``stream_to`` instead:
      ``model.generate(**inputs, custom_generate=fast, stream_to=streamer)``.
    - ``assistant_model`` is not used: the draft model is the one given here. The text does not depend on it.
    - ``tokenizer``: give it here, where ``stop_strings`` need it.

    Args:
        draft: a folder, name or hub id of an EAGLE head (in any layout) or of a smaller causal LM with the same
            tokenizer, ``"lookup"``, ``"none"``, or a callable that is given the target and makes a drafter with empty
            state.
        budget: how much to draft in every step; None decides it step by step.
        rule, lossless: see ``Decoder``.
        seed: of sampled text; None draws one for each call from torch's generator, which ``torch.manual_seed``
            governs. The first row has this seed, every other one its own. ``generate(..., seed=3)`` overrides it.
        tokenizer: the model's, as an object of transformers, a folder or a hub id. With it a head or a draft model is
            checked to have the same one; ``stop_strings`` need it too.

    Raises:
        ConfigError: an unknown or lossy rule.
    """
    get_rule(rule, lossless=lossless)
    return CustomGenerate(draft, budget, rule, lossless, seed, tokenizer)


@dataclass
class _Kept:
    """What is made once for a model object, and what it was made from."""

    stamp: tuple[Any, ...]
    target: AdapterTarget
    new_drafter: Callable[[], Drafter]
    planner: Planner | None = None
    turn: threading.RLock = field(default_factory=threading.RLock)  # held while the planner is asked or told


@dataclass(eq=False)
class CustomGenerate:
    """What ``custom_generate`` returns: the callable that ``generate`` takes.

    Attributes:
        stats: of the last call; ``stats.tau`` is the number to look at.
    """

    draft: Draft
    budget: Budget | None
    rule: str
    lossless: bool
    seed: int | None
    tokenizer: Any
    stats: Stats = field(default_factory=Stats, init=False, repr=False)
    _kept: MutableMapping[Any, _Kept] = field(default_factory=weakref.WeakKeyDictionary, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        generation_config: Any,
        stop_strings: str | Sequence[str] | None = None,
        seed: int | None = None,
        stream_to: Any = None,
        **prepared: Any,
    ) -> Any:
        """What ``generate`` calls once everything is prepared; not meant to be called by hand.

        ``stop_strings``, ``seed`` and ``stream_to`` are arguments that ``generate`` leaves to us because they stand in
        this signature.

        Args:
            prepared: logits processors, stopping criteria and the model's inputs.

        Returns:
            (B, prompt + new) token ids, or ``GenerateDecoderOnlyOutput`` with ``return_dict_in_generate``.

        Raises:
            UnsupportedError: a setting or an input that Draftwing cannot follow, by name.
            DraftwingError: see ``load_drafter``, ``Sampling`` and ``Decoder``.

        Warns:
            DraftwingWarning: the text was cut where the model's context ends.
        """
        processors, criteria = prepared.pop("logits_processor", ()), [*prepared.pop("stopping_criteria", ())]
        refuse(model, generation_config, prepared)
        prompts = read_prompts(input_ids, prepared.get("attention_mask"), prepared.get("position_ids"))
        sampling = read_sampling(processors, bool(generation_config.do_sample), input_ids.shape[1])
        sampling = with_seed(replace(sampling, seed=self.seed if seed is None else seed))
        if stop_strings is not None:
            criteria.append(self._stop_criterion(stop_strings))
        kept = self._prepare(model)
        engine = Engine(self._decoder(kept), max_batch=1 if len(prompts) == 1 else None)
        ends = Ends(criteria, input_ids, min(kept.target.max_length - len(prompt) for prompt in prompts))
        if stream_to is not None:  # as generate does with a streamer
            stream_to.put(input_ids.cpu())
        columns = Columns(ends, pad_id(generation_config), stream_to)
        self.stats = columns.decode(engine, prompts, sampling, kept.target.vocab_size)
        new = torch.tensor(columns.columns, dtype=input_ids.dtype, device=input_ids.device).T
        sequences = torch.cat([input_ids, new], 1)
        if not generation_config.return_dict_in_generate:
            return sequences
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]

    def _decoder(self, kept: _Kept) -> Decoder:
        """A decode loop with nothing in it."""
        drafter = kept.new_drafter()
        drafts = drafter.traits.drafts
        if drafts and not kept.target.supports_trees:
            raise UnsupportedError(
                f"{kept.target.name}: {kept.target.reason}, so nothing can be drafted for it: load it with "
                f"attn_implementation='sdpa' or 'eager' if it has another, or take draftwing.custom_generate('none')"
            )
        with kept.turn:
            if drafts and self.budget is None and kept.planner is None:
                kept.planner = planner_for(kept.target, kept.new_drafter, self.rule, loop_of(kept.target))
        return Decoder(
            kept.target,
            drafter,
            self.rule,
            self.budget,
            lossless=self.lossless,
            planner=kept.planner,
            turn=kept.turn,
        )

    def _stop_criterion(self, stop_strings: str | Sequence[str]) -> Any:
        """What ``generate`` would make of stop strings, had it not lost its tokenizer on the way."""
        from transformers import AutoTokenizer, StopStringCriteria

        if self.tokenizer is None:
            raise UnsupportedError(
                "stop_strings need the model's tokenizer, which generate does not hand to a custom_generate: give it "
                "to draftwing.custom_generate(..., tokenizer=tokenizer)"
            )
        found: Any = self.tokenizer
        if isinstance(found, str | Path):
            found = AutoTokenizer.from_pretrained(resolve(found))
        strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
        return StopStringCriteria(tokenizer=found, stop_strings=strings)

    def _prepare(self, model: Any) -> _Kept:
        """The target and the maker of drafters for a model object, made anew where the model was moved or changed."""
        head = model.get_output_embeddings()
        weight = getattr(head, "weight", None)
        stamp = (
            *(() if weight is None else (weight.device, weight.dtype, weight.shape)),
            getattr(model.config, "_attn_implementation", None),
        )
        with self._lock:
            kept = self._kept.get(model)
            if kept is None or kept.stamp != stamp:
                target = AdapterTarget(model)
                # The model is the key of a weak dictionary: what hangs on it must not keep it alive.
                target.model = weakref.proxy(model)
                kept = self._kept[model] = _Kept(stamp, target, self._new_drafter(target))
            return kept

    def _new_drafter(self, target: Target) -> Callable[[], Drafter]:
        if not isinstance(self.draft, str | Path):
            return partial(self.draft, target)
        return load_drafter(self.draft, target, self._own_tokenizer(), device=target.device)

    def _own_tokenizer(self) -> Tokenizer | None:
        if self.tokenizer is None:
            return None
        if isinstance(self.tokenizer, str | Path):
            return Tokenizer(resolve(self.tokenizer))
        if not hasattr(self.tokenizer, "backend_tokenizer"):
            raise TokenizerError(
                f"tokenizer: expected a fast tokenizer of transformers, a folder or a hub id, found "
                f"{type(self.tokenizer).__name__}: give the model's folder"
            )
        return Tokenizer.from_transformers(self.tokenizer)
