"""``custom_generate``: Draftwing as the decoding loop of transformers' ``generate``.

``generate`` prepares prompts, logits processors and stopping criteria as usual. The processors are translated into a
``Sampling``; a setting without a counterpart is refused by name, since ignoring it would change the text. Rows advance
at different speeds, but streamers and stopping criteria see them column by column, as in ``generate``.
"""

from __future__ import annotations

import inspect
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from draftwing.accept import get_rule
from draftwing.budget.measure import planner_for
from draftwing.budget.planner import Planner
from draftwing.checks import Argument, check_arguments
from draftwing.decode import Decoder, loop_of
from draftwing.engine import Engine
from draftwing.errors import ConfigError, DraftwingWarning, TokenizerError, UnsupportedError, shown
from draftwing.loading import load_drafter
from draftwing.methods.base import BUDGET_ARGUMENT, Budget, Drafter, check_drafter
from draftwing.models.adapter import CACHES, AdapterTarget
from draftwing.models.resolve import resolve
from draftwing.models.target import Target
from draftwing.request import with_seed
from draftwing.sampling import Sampling
from draftwing.sampling_options import nth_seed
from draftwing.stats import Stats
from draftwing.text.tokenizer import Tokenizer

Draft = str | Path | Callable[[Target], Drafter]

_ARGUMENTS = {
    "draft": Argument((str, Path, Callable), "a folder, name or hub id, or a function of a target"),  # type: ignore[arg-type]
    "budget": BUDGET_ARGUMENT,
    "seed": Argument((int, NoneType), "None or an int in [0, 2**63)", least=0, most=2**63 - 1),
}

_WITHOUT = "generate without custom_generate"
_LEAVE_OUT = "Draftwing drafts by itself: leave it out"
# Settings that do not show in the processors and criteria: their neutral values, and the fix.
SETTINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), f"set num_beams=1, or {_WITHOUT}"),
    "num_beam_groups": ((1,), f"leave it out, or {_WITHOUT}"),
    "constraints": ((), f"leave it out, or {_WITHOUT}"),
    "force_words_ids": ((), f"leave it out, or {_WITHOUT}"),
    "penalty_alpha": ((0,), f"leave it out, or {_WITHOUT}"),
    "dola_layers": ((), f"leave it out, or {_WITHOUT}"),
    "prompt_lookup_num_tokens": ((), "use draftwing.custom_generate('lookup') instead"),
    "assistant_early_exit": ((), _LEAVE_OUT),
    "speculation_type": ((), _LEAVE_OUT),
    "use_mtp": ((False,), _LEAVE_OUT),
    "cache_implementation": (("dynamic",), "Draftwing keeps a dynamic cache for every row: leave it out"),
    "prefill_chunk_size": ((), "prompts are read in one forward: leave it out"),
}
# The settings behind processors without a counterpart in ``Sampling``.
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
# Inputs that are checked elsewhere, or that do not affect the text.
_INPUTS = {
    *("attention_mask", "position_ids", *CACHES),
    *("use_cache", "logits_to_keep", "num_logits_to_keep", "cache_position", "output_attentions"),
    "output_hidden_states",
}
_PENALTY, _BIAS, _BANNED, _TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = range(7)  # the order in which Sampling applies them


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

    Reuse the returned object: it loads the drafter and examines the model at the first call with each model. The model
    is the target; its weights are shared, not copied. Greedy text equals that of plain ``generate`` up to rounding: in
    half precision a forward over several tokens rounds differently, and tokens with equal logits may swap. It is made
    for batch 1; the rows of a batch are decoded separately.

    ``generate`` does not pass all of its arguments on. ``streamer`` is found nevertheless; ``assistant_model`` and
    ``synced_gpus`` are refused by name; ``tokenizer`` must be passed here if ``stop_strings`` are used. Draftwing does
    not return its cache, so ``return_dict_in_generate`` needs ``use_cache=False``.

    Args:
        draft: a folder, name or hub id of an EAGLE head (in any layout) or of a smaller causal LM with the same
            tokenizer, ``"lookup"``, ``"none"``, or a callable that receives the target and returns a new drafter.
        budget: how much to draft per step; None chooses it step by step.
        rule, lossless: see ``Decoder``.
        seed: for sampling; None draws one per call from torch's generator (``torch.manual_seed``). The first row uses
            it, other rows derive theirs from it. ``generate(..., seed=3)`` overrides it.
        tokenizer: the model's: a transformers tokenizer, a folder or a hub id. With it, heads and draft models are
            checked to have the same tokenizer; ``stop_strings`` need it too.

    Raises:
        ConfigError: an unknown or lossy rule, or an argument of a wrong type.
        TokenizerError: ``tokenizer`` is none of those.
    """
    get_rule(rule, lossless=lossless)
    check_arguments(_ARGUMENTS, {"draft": draft, "budget": budget, "seed": seed})
    if isinstance(draft, str) and not draft:
        raise ConfigError("draft must not be empty: use 'none' for no drafts")
    if not (tokenizer is None or isinstance(tokenizer, str | Path) or hasattr(tokenizer, "backend_tokenizer")):
        raise TokenizerError(
            f"tokenizer: expected a fast tokenizer of transformers, a folder or a hub id, found {shown(tokenizer)}: "
            f"give the model's folder"
        )
    return CustomGenerate(draft, budget, rule, lossless, seed, tokenizer)


@dataclass
class _Prepared:
    stamp: tuple[Any, ...]
    target: AdapterTarget
    new_drafter: Callable[[], Drafter]
    planner: Planner | None = None
    turn: threading.RLock = field(default_factory=threading.RLock)  # held while the planner is used


@dataclass(eq=False)
class CustomGenerate:
    """The callable that ``custom_generate`` returns.

    Attributes:
        stats: of the last call, such as ``stats.tau``.
    """

    draft: Draft
    budget: Budget | None
    rule: str
    lossless: bool
    seed: int | None
    tokenizer: Any
    stats: Stats = field(default_factory=Stats, init=False, repr=False)
    _prepared: MutableMapping[Any, _Prepared] = field(default_factory=weakref.WeakKeyDictionary, init=False, repr=False)
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
        """Decode; called by ``generate``.

        ``generate`` passes ``stop_strings``, ``seed`` and ``stream_to`` on because they are in this signature.

        Args:
            stream_to: a second streamer, which receives the same tokens as ``generate``'s own.
            prepared: logits processors, stopping criteria and the model's inputs.

        Returns:
            (B, prompt + new) token ids, or ``GenerateDecoderOnlyOutput`` with ``return_dict_in_generate``.

        Raises:
            UnsupportedError: a setting or an input without a counterpart, by name.
            DraftwingError: see ``load_drafter``, ``Sampling`` and ``Decoder``.

        Warns:
            DraftwingWarning: the text was cut at the end of the model's context.
        """
        from transformers import StopStringCriteria
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        processors, criteria = prepared.pop("logits_processor", ()), [*prepared.pop("stopping_criteria", ())]
        streamer = _read_arguments(model)
        _check_settings(model, generation_config)
        if generation_config.return_dict_in_generate and prepared.get("use_cache", True):
            raise UnsupportedError(
                f"generate's return_dict_in_generate=True would return the cache, which Draftwing does not: add "
                f"use_cache=False, or {_WITHOUT}"
            )
        _check_inputs(prepared)
        check_arguments(_ARGUMENTS, {"seed": seed})
        if stream_to is not None and not (
            callable(getattr(stream_to, "put", None)) and callable(getattr(stream_to, "end", None))
        ):
            raise ConfigError(f"stream_to must be a streamer with put() and end(), found {shown(stream_to)}")
        prompts = _read_prompts(input_ids, prepared.get("attention_mask"), prepared.get("position_ids"))
        sampling = _read_sampling(processors, bool(generation_config.do_sample), input_ids.shape[1])
        sampling = with_seed(replace(sampling, seed=self.seed if seed is None else seed))
        if stop_strings is not None:
            tokenizer = self.tokenizer
            if tokenizer is None:
                raise UnsupportedError(
                    "stop_strings need the model's tokenizer, which generate does not pass to a custom_generate: pass "
                    "it to draftwing.custom_generate(..., tokenizer=tokenizer)"
                )
            if isinstance(tokenizer, str | Path):
                tokenizer = Tokenizer(resolve(tokenizer)).pretrained
            strings = Sampling(stop=stop_strings).stop  # type: ignore[arg-type]  # checks them
            criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=list(strings)))
        setup = self._prepare(model)
        target, drafter = setup.target, setup.new_drafter()
        check_drafter(drafter)
        drafts = drafter.drafts
        if drafts and not target.supports_trees:
            raise UnsupportedError(
                f"{target.name}: {target.reason}, so nothing can be drafted for it: load it with "
                f"attn_implementation='sdpa' or 'eager' if it has another, or use draftwing.custom_generate('none')"
            )
        with setup.turn:
            if drafts and self.budget is None and setup.planner is None:
                setup.planner = planner_for(target, setup.new_drafter, self.rule, loop_of(target))
        decoder = Decoder(
            target, drafter, self.rule, self.budget, lossless=self.lossless, planner=setup.planner, turn=setup.turn
        )
        engine = Engine(decoder, max_batch=1 if len(prompts) == 1 else None)
        ends = _Ends(criteria, input_ids, min(target.max_length - len(prompt) for prompt in prompts))
        pad = getattr(generation_config, "_pad_token_tensor", None)
        pad = getattr(generation_config, "pad_token_id", None) if pad is None else pad
        if stream_to is not None:
            stream_to.put(input_ids.cpu())
        vocab_size = target.vocab_size
        streamers = [each for each in (streamer, stream_to) if each is not None]
        columns, self.stats = _decode(engine, prompts, sampling, ends, int(pad or 0), vocab_size, streamers)
        new = torch.tensor(columns, dtype=input_ids.dtype, device=input_ids.device).T
        sequences = torch.cat([input_ids, new], 1)
        if not generation_config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]

    def _prepare(self, model: Any) -> _Prepared:
        """Return the target and drafters for a model object, created again if the model was moved or changed."""
        weight = getattr(model.get_output_embeddings(), "weight", None)
        stamp = (
            *(() if weight is None else (weight.device, weight.dtype, weight.shape)),
            getattr(model.config, "_attn_implementation", None),
        )
        with self._lock:
            prepared = self._prepared.get(model)
            if prepared is not None and prepared.stamp == stamp:
                return prepared
            target = AdapterTarget(model)
            target.model = weakref.proxy(model)  # values of a weak dictionary must not keep their key alive
            if isinstance(self.draft, str | Path):
                tokenizer = self.tokenizer
                if isinstance(tokenizer, str | Path):
                    tokenizer = Tokenizer(resolve(tokenizer))
                elif tokenizer is not None:
                    tokenizer = Tokenizer.from_transformers(tokenizer)
                new_drafter = load_drafter(self.draft, target, tokenizer, device=target.device)
            else:
                new_drafter = partial(self.draft, target)
            prepared = self._prepared[model] = _Prepared(stamp, target, new_drafter)
            return prepared


def _read_arguments(model: Any) -> Any:
    """Return the streamer that ``generate`` was called with; None without one.

    ``generate`` does not pass ``streamer``, ``assistant_model`` and ``synced_gpus`` to a custom loop, and ignoring them
    would leave a streamer's reader waiting forever. So they are read from its frame.

    Raises:
        UnsupportedError: ``assistant_model`` or ``synced_gpus`` is given.
    """
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_name == "generate" and frame.f_locals.get("self") is model):
        frame = frame.f_back
    given = {} if frame is None else frame.f_locals
    if given.get("assistant_model") is not None:
        raise UnsupportedError(
            "generate's assistant_model is not supported by Draftwing: save it to a folder and use "
            "draftwing.custom_generate(folder), or leave it out"
        )
    if given.get("synced_gpus"):
        raise UnsupportedError(
            f"generate's synced_gpus=True is not supported: Draftwing decodes within one process: leave it out, or "
            f"{_WITHOUT}"
        )
    return given.get("streamer")


def _check_settings(model: Any, config: Any) -> None:
    """Raise UnsupportedError for the first setting that Draftwing does not support."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name} is an encoder-decoder, Draftwing decodes only causal LMs: {_WITHOUT}")
    if model.training:
        raise UnsupportedError(f"{name} is in training mode, whose dropout changes the text: call model.eval()")
    for setting, (neutral, fix) in SETTINGS.items():
        value = getattr(config, setting, None)
        if value is not None and value not in neutral:
            raise UnsupportedError(f"generate's {setting}={shown(value)} is not supported by Draftwing: {fix}")
    for setting in _OUTPUTS if config.return_dict_in_generate else ():
        if getattr(config, setting, None):
            raise UnsupportedError(
                f"generate's {setting}=True: speculative decoding returns only the sequences: leave it out, or "
                f"{_WITHOUT}"
            )
    # Sharded over processes, all of them must run every forward, but rows here end independently.
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    is_sharded = is_fsdp_managed_module(model) or is_deepspeed_zero3_enabled()  # type: ignore[no-untyped-call]
    if distributed and torch.distributed.get_world_size() > 1 and is_sharded:
        raise UnsupportedError(
            f"{name} is sharded over processes (synced_gpus): Draftwing decodes within one: {_WITHOUT}"
        )


def _check_inputs(inputs: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for the first input that Draftwing does not support."""
    for name in CACHES:
        cache = inputs.get(name)
        if _is_filled(cache) or getattr(cache, "_is_user_defined", False):  # generate itself passes an empty one
            raise UnsupportedError(
                f"generate's {name}: Draftwing has its own caches and does not read or fill others: leave it out and "
                f"pass the whole text as input_ids"
            )
    for name, value in inputs.items():
        if value is not None and name not in _INPUTS:
            raise UnsupportedError(
                f"generate's input {name}: Draftwing reads only input_ids and attention_mask: leave it out, or "
                f"{_WITHOUT}"
            )


def _is_filled(cache: Any) -> bool:
    """True if a cache holds tokens. One without attention layers has no length."""
    layers = getattr(cache, "layers", None)
    if layers is None:
        return cache is not None and (not hasattr(cache, "get_seq_length") or cache.get_seq_length() > 0)
    return any(_has_tokens(layer) for layer in layers)


def _has_tokens(layer: Any) -> bool:
    state = getattr(layer, "has_previous_state", False)
    has_state = any(state.values()) if isinstance(state, Mapping) else bool(state)
    return has_state or (hasattr(layer, "get_seq_length") and layer.get_seq_length() > 0)


def _read_prompts(input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> list[list[int]]:
    """Return the tokens of each row without its left padding."""
    rows: list[list[int]] = input_ids.tolist()
    if mask is not None:
        if mask.shape != input_ids.shape:
            raise UnsupportedError(
                f"generate's attention_mask has the shape {tuple(mask.shape)}, input_ids {tuple(input_ids.shape)}: "
                f"Draftwing needs a mask with one entry per token; leave it out if nothing is padded"
            )
        for index, flags in enumerate((mask != 0).tolist()):
            if flags != sorted(flags):
                raise UnsupportedError(
                    f"generate's attention_mask hides tokens of row {index} after visible ones: Draftwing supports "
                    f"only left padding; set tokenizer.padding_side='left'"
                )
            rows[index] = rows[index][len(flags) - sum(flags) :]
    if position_ids is not None:
        for index, row in enumerate(rows):
            given = position_ids[..., min(index, position_ids.shape[-2] - 1), -len(row) :]
            if row and not bool((given == torch.arange(len(row), device=given.device)).all()):
                raise UnsupportedError(
                    f"generate's position_ids do not count the tokens of row {index} from 0, as Draftwing does: leave "
                    f"them out, or {_WITHOUT}"
                )
    return rows


def _read_sampling(processors: Iterable[Any], do_sample: bool, width: int) -> Sampling:
    """Translate logits processors into a ``Sampling`` that applies them in the same order."""
    fields: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    banned: list[int] = []
    last = -1
    for processor in processors:
        rank, found = _sampling_fields(processor, width)
        if rank is None:  # shifts all scores equally, which of all later steps only the penalty would notice
            last = max(last, _BIAS)
            continue
        if rank < last or (rank == last and rank != _BANNED):
            raise UnsupportedError(
                f"generate would apply {type(processor).__name__} at a place where Draftwing cannot (its order is "
                f"repetition penalty, biases, banned tokens, temperature, top-k, top-p, min-p, each once): leave out "
                f"it or what comes before it, or {_WITHOUT}"
            )
        banned += found.pop("banned_tokens", ())
        if do_sample or rank < _TEMPERATURE:  # later ones do not change which score is the largest
            fields |= found
        last = rank
    # Only the stopping criteria end a row; the model's end tokens are among them.
    return Sampling(**fields, banned_tokens=tuple(banned), ignore_eos=True)


def _sampling_fields(processor: Any, width: int) -> tuple[int | None, dict[str, Any]]:
    """Return a processor's place in ``Sampling``'s order (None if it has no effect) and its fields there."""
    kind = type(processor)
    # A subclass, or another class of the same name, may do anything.
    name = kind.__name__ if kind.__module__ == "transformers.generation.logits_process" else ""
    fills_inf = getattr(processor, "filter_value", -math.inf) == -math.inf
    is_default = fills_inf and getattr(processor, "min_tokens_to_keep", 1) == 1
    if name == "RepetitionPenaltyLogitsProcessor":
        ignored = getattr(processor, "prompt_ignore_length", None)
        if not isinstance(ignored, int) or ignored == 0:  # a tensor covers the padding, which is removed here
            return _PENALTY, {"repetition_penalty": float(processor.penalty)}
    elif name in ("SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor"):
        biases = dict(processor.sequence_bias)
        if all(len(sequence) == 1 for sequence in biases):
            banned = tuple(int(token) for (token,), bias in biases.items() if bias == -math.inf)
            finite = {int(token): float(bias) for (token,), bias in biases.items() if bias != -math.inf}
            if not finite:
                return _BANNED, {"banned_tokens": banned}
            return _BIAS, {"logit_bias": finite, "banned_tokens": banned}
    elif name == "SuppressTokensLogitsProcessor":
        return _BANNED, {"banned_tokens": tuple(torch.as_tensor(processor.suppress_tokens).tolist())}
    elif name == "TemperatureLogitsWarper":
        return _TEMPERATURE, {"temperature": float(processor.temperature)}
    elif name == "TopKLogitsWarper" and fills_inf:
        return _TOP_K, {"top_k": int(processor.top_k)}  # already at least min_tokens_to_keep
    elif name == "TopPLogitsWarper" and is_default:
        return _TOP_P, {"top_p": float(processor.top_p)}
    elif name == "MinPLogitsWarper" and is_default:
        return _MIN_P, {"min_p": float(processor.min_p)}
    elif name == "LogitNormalization" or (name == "MinLengthLogitsProcessor" and processor.min_length <= width):
        return None, {}
    what = f"generate's {SETTING_OF[name]}" if name in SETTING_OF else f"the logits processor {kind.__name__}"
    raise UnsupportedError(f"{what} is not supported by Draftwing's sampling: leave it out, or {_WITHOUT}")


class _Ends:
    """Decides which rows end: end tokens, lengths, times, stop strings and custom criteria.

    Lengths and end tokens are checked here; other criteria are called as in ``generate``, once per column of new
    tokens, with all rows up to it.

    Attributes:
        tokens: end tokens.
        length: maximum new tokens.
        pads: True if ended rows are padded while others continue; without end tokens they continue too.
    """

    def __init__(self, criteria: list[Any], input_ids: Tensor, room: int) -> None:
        from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

        width = input_ids.shape[1]
        lengths = [one.max_length - width for one in criteria if type(one) is MaxLengthCriteria]
        ids = [torch.as_tensor(one.eos_token_id) for one in criteria if type(one) is EosTokenCriteria]
        self.tokens = tuple(dict.fromkeys(token for tensor in ids for token in tensor.reshape(-1).tolist()))
        self.pads = any(hasattr(one, "eos_token_id") for one in criteria)
        self._max_new = max(min(lengths, default=room + 1), 1)  # generate writes at least one token
        self.length = min(self._max_new, max(room, 1))
        others = [one for one in criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)]
        self._others: Any = StoppingCriteriaList(others)
        self._sequences = input_ids

    def __call__(self, column: Sequence[int], number: int) -> list[bool]:
        """Return the rows that end with the ``number``-th column."""
        is_full = number >= self.length
        if is_full and self.length < self._max_new:
            warnings.warn(
                f"the text was cut after {self.length} new tokens, where the model's context is full, and "
                f"{self._max_new} were requested: lower max_new_tokens, or shorten the prompt",
                DraftwingWarning,
                stacklevel=2,
            )
        ended = [is_full or token in self.tokens for token in column]
        if self._others:
            new = torch.tensor(column, dtype=self._sequences.dtype, device=self._sequences.device)
            self._sequences = torch.cat([self._sequences, new[:, None]], 1)
            stops = self._others(self._sequences, None).tolist()
            ended = [old or new for old, new in zip(ended, stops, strict=True)]
        return ended


def _decode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    ends: _Ends,
    pad: int,
    vocab_size: int,
    streamers: Sequence[Any],
) -> tuple[list[list[int]], Stats]:
    """Return the new tokens as columns with one token per row, and the statistics.

    A column is complete, and sent to the streamers, when the last row has reached it. Rows that have ended are filled
    with ``pad``. Rows after the first derive their seeds from the first one's.
    """
    end_tokens = tuple(token for token in ends.tokens if 0 <= token < vocab_size)  # some models use -1 for none
    sampling = replace(sampling, max_tokens=ends.length, stop_tokens=end_tokens if ends.pads else ())
    requests = [
        engine.submit(prompt, replace(sampling, seed=nth_seed(sampling.seed or 0, row)))
        for row, prompt in enumerate(prompts)
    ]
    columns, stats = list[list[int]](), Stats()
    ended = [False] * len(requests)
    for step in engine.steps():
        stats.add(step)
        for request in requests:
            if request.error is not None:
                raise request.error
        while not all(ended):
            live = [not (ends.pads and is_over) for is_over in ended]
            rows = [request.token_ids if is_live else None for request, is_live in zip(requests, live, strict=True)]
            if any(row is not None and len(row) <= len(columns) for row in rows):
                break
            columns.append([pad if row is None else row[len(columns)] for row in rows])
            ended = [old or new for old, new in zip(ended, ends(columns[-1], len(columns)), strict=True)]
            for streamer in streamers:
                streamer.put(torch.tensor(columns[-1]))
        for request, is_over in zip(requests, ended, strict=True):
            if is_over and (ends.pads or all(ended)):
                engine.cancel(request)
    for streamer in streamers:
        streamer.end()
    return columns, stats
