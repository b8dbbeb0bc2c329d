"""Rows run ahead of each other here, but are handed out column by column, as plain decoding writes them."""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwing.accept import get_rule
from draftwing.budget.measure import planner_for
from draftwing.budget.planner import Planner
from draftwing.decode import Decoder, loop_of
from draftwing.engine import Engine
from draftwing.errors import DraftwingWarning, TokenizerError, UnsupportedError
from draftwing.loading import load_drafter
from draftwing.methods.base import Budget, Drafter
from draftwing.models.adapter import CACHES, AdapterTarget
from draftwing.models.resolve import resolve
from draftwing.models.target import Target
from draftwing.request import with_seed
from draftwing.sampling import Sampling
from draftwing.sampling_options import nth_seed
from draftwing.stats import Stats
from draftwing.text.tokenizer import Tokenizer


class Ends:
    """When rows end: what ``generate`` made of eos tokens, lengths, times, stop strings and the caller's criteria.

    Lengths and end tokens are looked at on the host; all others are called as plain decoding calls them, once for
    each column, with all rows as far as that column.

    Attributes:
        tokens: end tokens.
        length: new tokens at most.
        pads: whether a row that ended is filled up while the others go on; without end tokens it is written on.
    """

    def __init__(self, criteria: Iterable[Any], input_ids: Tensor, room: int) -> None:
        from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

        criteria = [*criteria]
        self._room, width = room, input_ids.shape[1]
        lengths = [each.max_length - width for each in criteria if type(each) is MaxLengthCriteria]
        ids = [torch.as_tensor(each.eos_token_id) for each in criteria if type(each) is EosTokenCriteria]
        others = [each for each in criteria if type(each) not in (MaxLengthCriteria, EosTokenCriteria)]
        self.tokens = tuple(dict.fromkeys(token for each in ids for token in each.reshape(-1).tolist()))
        self.pads = any(hasattr(each, "eos_token_id") for each in criteria)
        self._wanted = max(min(lengths, default=room + 1), 1)  # plain decoding writes one token whatever the length is
        self.length = min(self._wanted, max(room, 1))
        self._others: Any = StoppingCriteriaList(others)
        self._sequences = input_ids

    def __call__(self, column: Sequence[int], number: int) -> list[bool]:
        """Which rows end with a column, the ``number``-th."""
        full = number >= self.length
        if full and self.length < self._wanted:
            warnings.warn(
                f"the text was cut after {self.length} new tokens, where the model's context is full, and "
                f"{self._wanted} were asked for: lower max_new_tokens, or shorten the prompt",
                DraftwingWarning,
                stacklevel=2,
            )
        ended = [full or token in self.tokens for token in column]
        if self._others:
            fresh = torch.tensor(column, dtype=self._sequences.dtype, device=self._sequences.device)
            self._sequences = torch.cat([self._sequences, fresh[:, None]], 1)
            found = self._others(self._sequences, None).tolist()
            ended = [one or other for one, other in zip(ended, found, strict=True)]
        return ended


class Columns:
    """The new tokens, column by column, each with a token of every row.

    A step gives every row as many tokens as it may; a column is complete when the last row has reached it.

    Args:
        ends: when rows end.
        pad: what rows are filled up with once they ended.
        streamer: hears every column as soon as it is complete; None: nobody does.
    """

    def __init__(self, ends: Ends, pad: int, streamer: Any) -> None:
        self._ends, self._pad, self._streamer = ends, pad, streamer
        self.columns: list[list[int]] = []

    def decode(self, engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, vocab_size: int) -> Stats:
        """Fill ``columns``; every row but the first draws a seed that follows from the first one's."""
        ends, stats = self._ends, Stats()
        inside = tuple(token for token in ends.tokens if 0 <= token < vocab_size)  # -1 means never to some
        sampling = replace(sampling, max_tokens=ends.length, stop_tokens=inside if ends.pads else ())
        requests = [
            engine.submit(prompt, replace(sampling, seed=nth_seed(sampling.seed or 0, row)))
            for row, prompt in enumerate(prompts)
        ]
        written = [request.token_ids for request in requests]
        ended = [False] * len(requests)
        for step in engine.steps():
            stats.add(step)
            for request in requests:
                if request.error is not None:
                    raise request.error
            self._complete(written, ended)
            for request, is_over in zip(requests, ended, strict=True):
                if is_over and (ends.pads or all(ended)):
                    engine.cancel(request)
        if self._streamer is not None:
            self._streamer.end()
        return stats

    def _complete(self, written: Sequence[Sequence[int]], ended: list[bool]) -> None:
        """Hand out the columns that all rows have reached, and mark in ``ended`` the rows that end with them."""
        pads, number = self._ends.pads, len(self.columns)
        while not all(ended):
            live = [not (pads and over) for over in ended]
            if any(lives and len(row) <= number for lives, row in zip(live, written, strict=True)):
                return
            column = [row[number] if lives else self._pad for lives, row in zip(live, written, strict=True)]
            self.columns.append(column)
            number += 1
            ended[:] = [old or new for old, new in zip(ended, self._ends(column, number), strict=True)]
            if self._streamer is not None:
                self._streamer.put(torch.tensor(column))


# What transformers' ``generate`` prepared, translated into a ``Sampling``.
#
# A setting that Draftwing does not support is refused by name, since one that is silently left out is a text that is
# silently another one.


_PLAINLY = "generate without custom_generate"
_ANOTHER = "Draftwing drafts by itself: leave it out"
# Settings that leave no trace in the processors and criteria that generate prepares: what asks for nothing, the fix.
SETTINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), f"set num_beams=1, or {_PLAINLY}"),
    "num_beam_groups": ((1,), f"leave it out, or {_PLAINLY}"),
    "constraints": ((), f"leave it out, or {_PLAINLY}"),
    "force_words_ids": ((), f"leave it out, or {_PLAINLY}"),
    "penalty_alpha": ((0,), f"leave it out, or {_PLAINLY}"),
    "dola_layers": ((), f"leave it out, or {_PLAINLY}"),
    "prompt_lookup_num_tokens": ((), "use draftwing.custom_generate('lookup') in its place"),
    "assistant_early_exit": ((), _ANOTHER),
    "speculation_type": ((), _ANOTHER),
    "use_mtp": ((False,), _ANOTHER),
    "cache_implementation": (("dynamic",), "Draftwing keeps a dynamic cache for every row: leave it out"),
    "prefill_chunk_size": ((), "prompts are read in one forward: leave it out"),
}
# The settings behind the processors that have no counterpart here.
SETTING_OF = {
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "MinLengthLogitsProcessor": "min_length (or min_new_tokens)",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
    "NoBadWordsLogitsProcessor": "bad_words_ids (of more than one token)",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "RepetitionPenaltyLogitsProcessor": "prompt_ignore_length of the repetition penalty",
    "SequenceBiasLogitsProcessor": "sequence_bias (of more than one token)",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
    "TopHLogitsWarper": "top_h",
    "TypicalLogitsWarper": "typical_p",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "WatermarkLogitsProcessor": "watermarking_config",
}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# Inputs that are looked at elsewhere, or that no text depends on.
_INPUTS = {
    *("attention_mask", "position_ids", *CACHES),
    *("use_cache", "logits_to_keep", "num_logits_to_keep", "cache_position", "output_attentions"),
    "output_hidden_states",
}


def refuse(model: Any, config: Any, inputs: Mapping[str, Any]) -> None:
    """Raise UnsupportedError, by name, where ``generate`` was asked for what is not done here."""
    _refuse_settings(model, config)
    _refuse_sharded(model)
    _refuse_inputs(inputs)


def _refuse_settings(model: Any, config: Any) -> None:
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name} is an encoder-decoder, Draftwing decodes only causal LMs: {_PLAINLY}")
    if model.training:
        raise UnsupportedError(f"{name} is in training mode, whose dropout makes every text another: call model.eval()")
    for setting, (neutral, fix) in SETTINGS.items():
        value = getattr(config, setting, None)
        if value is not None and value not in neutral:
            raise UnsupportedError(f"generate's {setting}={value!r:.60} is not supported by Draftwing: {fix}")
    if config.return_dict_in_generate:
        for setting in _OUTPUTS:
            if getattr(config, setting, None):
                raise UnsupportedError(
                    f"generate's {setting}=True: speculative decoding keeps no such record, only the sequences: leave "
                    f"it out, or {_PLAINLY}"
                )


def _refuse_sharded(model: Any) -> None:
    """Where several processes hold one model, all must run every forward, and rows here end when they end."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not several or torch.distributed.get_world_size() == 1:
        return
    if is_fsdp_managed_module(model) or is_deepspeed_zero3_enabled():  # type: ignore[no-untyped-call]
        raise UnsupportedError(
            f"{type(model).__name__} is sharded over processes (synced_gpus): Draftwing decodes within one: {_PLAINLY}"
        )


def _refuse_inputs(inputs: Mapping[str, Any]) -> None:
    for name in CACHES:
        cache = inputs.get(name)
        filled = cache is not None and hasattr(cache, "get_seq_length") and cache.get_seq_length() > 0
        if filled or getattr(cache, "_is_user_defined", False):  # an empty one of generate's own making means nothing
            raise UnsupportedError(
                f"generate's {name}: Draftwing keeps caches of its own, and neither reads nor fills another: leave it "
                f"out and give the whole text as input_ids"
            )
    odd = next((name for name, value in inputs.items() if value is not None and name not in _INPUTS), None)
    if odd is not None:
        raise UnsupportedError(
            f"generate's input {odd}: Draftwing's loop reads input_ids and attention_mask alone: give only these, or "
            f"{_PLAINLY}"
        )


def read_prompts(input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> list[list[int]]:
    """The tokens of each row without the padding in front of them."""
    rows: list[list[int]] = input_ids.tolist()
    if mask is not None:
        if mask.shape != input_ids.shape:
            raise UnsupportedError(
                f"generate's attention_mask has the shape {tuple(mask.shape)}, input_ids {tuple(input_ids.shape)}: "
                f"Draftwing takes a mask with one entry for every token; leave it out if nothing is padded"
            )
        kept: list[list[bool]] = (mask != 0).tolist()
        for index, flags in enumerate(kept):
            if flags != sorted(flags):
                raise UnsupportedError(
                    f"generate's attention_mask hides tokens of row {index} behind others that it shows: Draftwing "
                    f"takes padding in front alone; set tokenizer.padding_side='left'"
                )
        rows = [row[len(row) - sum(flags) :] for row, flags in zip(rows, kept, strict=True)]
    if position_ids is not None:
        for index, row in enumerate(rows):
            given = position_ids[..., min(index, position_ids.shape[-2] - 1), -len(row) :]
            if row and not bool((given == torch.arange(len(row), device=given.device)).all()):
                raise UnsupportedError(
                    f"generate's position_ids do not count the tokens of row {index} from 0 on, and Draftwing's always "
                    f"do: leave them out, or {_PLAINLY}"
                )
    return rows


def read_sampling(processors: Iterable[Any], do_sample: bool, width: int) -> Sampling:
    """The prepared processors as a ``Sampling``, where it says the same in the same order."""
    words: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    banned: list[int] = []
    last = -1
    for each in processors:
        rank, found = _words(each, width)
        if rank is None:  # shifts all scores alike, which no later step but the penalty would notice
            last = max(last, _BIAS)
            continue
        if rank < last or (rank == last and rank != _BANNED):
            raise UnsupportedError(
                f"generate would apply {type(each).__name__} at a place where Draftwing cannot (its order is "
                f"repetition penalty, biases, banned tokens, temperature, top-k, top-p, min-p, each once): leave out "
                f"it or what comes before it, or {_PLAINLY}"
            )
        banned += found.pop("banned_tokens", ())
        if do_sample or rank < _TEMPERATURE:  # the rest does not change which score is the largest
            words |= found
        last = rank
    # Draftwing stops where the criteria say so and nowhere else: the model's own end tokens are among them.
    return Sampling(**words, banned_tokens=tuple(banned), ignore_eos=True)


_PENALTY, _BIAS, _BANNED, _TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = range(7)  # as Sampling applies them


def _words(each: Any, width: int) -> tuple[int | None, dict[str, Any]]:
    """A processor's place in ``Sampling``'s order, and its words there; no place where it changes nothing."""
    kind = type(each)
    # A subclass, or a class of the same name, may do anything.
    name = kind.__name__ if kind.__module__ == "transformers.generation.logits_process" else ""
    plain = getattr(each, "filter_value", -math.inf) == -math.inf and getattr(each, "min_tokens_to_keep", 1) == 1
    if name == "RepetitionPenaltyLogitsProcessor":
        ignored = getattr(each, "prompt_ignore_length", None)
        if not isinstance(ignored, int) or ignored == 0:  # else a tensor: the padding, which is cut here
            return _PENALTY, {"repetition_penalty": float(each.penalty)}
    elif name in ("SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor"):
        biases = dict(each.sequence_bias)
        if all(len(sequence) == 1 for sequence in biases):
            bans = tuple(int(token) for (token,), bias in biases.items() if bias == -math.inf)
            finite = {int(token): float(bias) for (token,), bias in biases.items() if bias != -math.inf}
            if not finite:
                return _BANNED, {"banned_tokens": bans}
            return _BIAS, {"logit_bias": finite, "banned_tokens": bans}
    elif name == "SuppressTokensLogitsProcessor":
        return _BANNED, {"banned_tokens": tuple(torch.as_tensor(each.suppress_tokens).tolist())}
    elif name == "TemperatureLogitsWarper":
        return _TEMPERATURE, {"temperature": float(each.temperature)}
    elif name == "TopKLogitsWarper" and getattr(each, "filter_value", -math.inf) == -math.inf:
        return _TOP_K, {"top_k": int(each.top_k)}  # at least min_tokens_to_keep already
    elif name == "TopPLogitsWarper" and plain:
        return _TOP_P, {"top_p": float(each.top_p)}
    elif name == "MinPLogitsWarper" and plain:
        return _MIN_P, {"min_p": float(each.min_p)}
    elif name == "LogitNormalization" or (name == "MinLengthLogitsProcessor" and each.min_length <= width):
        return None, {}
    setting = SETTING_OF.get(name)
    what = f"generate's {setting}" if setting else f"the logits processor {kind.__name__}"
    raise UnsupportedError(f"{what} is not supported by Draftwing's sampling: leave it out, or {_PLAINLY}")


def pad_id(config: Any) -> int:
    """What rows are filled up with once they ended."""
    pad = getattr(config, "_pad_token_tensor", None)
    pad = getattr(config, "pad_token_id", None) if pad is None else pad
    return 0 if pad is None else int(pad)


# Draftwing inside transformers: ``model.generate(..., custom_generate=draftwing.custom_generate("path/to/head"))``.
#
# ``generate`` prepares everything as usual (settings, padding, processors, stopping criteria) and hands the decoding
# loop
# to us. It does not hand over everything: what it keeps to itself is named at ``custom_generate``.


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
        drafter = kept.new_drafter()
        drafts = drafter.drafts
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
