"""``custom_generate``: Draftwing as the decoding loop of transformers' ``generate``.

``generate`` prepares prompts, logits processors and stopping criteria as usual. The processors are translated into a
``Sampling``; if one has no counterpart, all of them are called as ``generate`` would, once per token and in order. A
setting that cannot be supported is refused by name, since ignoring it would change the text. Rows advance at different
speeds, but streamers and stopping criteria see them column by column, as in ``generate``.
"""

from __future__ import annotations

import copy
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

from draftwing.accept import Rule, children_of, get_rule
from draftwing.budget.planner import Planner, planner_for
from draftwing.checks import Argument, check_arguments
from draftwing.decode import Decoder
from draftwing.engine import Engine
from draftwing.errors import ConfigError, DraftwingWarning, TokenizerError, UnsupportedError, shown
from draftwing.loading import load_drafter
from draftwing.methods.base import BUDGET_ARGUMENT, Budget, Drafter, check_drafter
from draftwing.models.adapter import CACHES, AdapterTarget
from draftwing.models.resolve import resolve
from draftwing.models.target import Target
from draftwing.request import with_seed
from draftwing.sampling import Sampling, SamplingBatch, nth_seed
from draftwing.stats import Stats
from draftwing.text.tokenizer import Tokenizer
from draftwing.tree import PAD, Accepted, DraftTree

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
# The settings behind processors that keep a state or look at all rows, so that they only work for a single prompt.
SETTING_OF = {
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
    "WatermarkLogitsProcessor": "watermarking_config",
}
# Processors that treat each row for itself.
_ROWWISE = {
    *("EpsilonLogitsWarper", "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor"),
    *("ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor"),
    *("MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor"),
    *("NoRepeatNGramLogitsProcessor", "PrefixConstrainedLogitsProcessor", "RepetitionPenaltyLogitsProcessor"),
    *("SequenceBiasLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor"),
    *("TemperatureLogitsWarper", "TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper"),
}
_OUTPUTS = ("output_attentions", "output_hidden_states")
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
    ``synced_gpus`` are refused by name; ``tokenizer`` must be passed here if ``stop_strings`` are used. A cache that is
    returned, or an empty one that was passed, is filled by one more forward over the whole text.

    Args:
        draft: a folder, name or hub id of an EAGLE head (in any layout) or of a smaller causal LM, ``"lookup"``,
            ``"none"``, or a callable that receives the target and returns a new drafter.
        budget: how much to draft per step; None chooses it step by step.
        rule: see ``Decoder``.
        lossless: see ``Decoder``.
        seed: for sampling; None draws one per call from torch's generator (``torch.manual_seed``). The first row uses
            it, other rows derive theirs from it. ``generate(..., seed=3)`` overrides it.
        tokenizer: the model's: a transformers tokenizer, a folder or a hub id. With it, heads are checked to have the
            same tokenizer, and draft models may have another; ``stop_strings`` need it too.

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
        **prepared: Any,
    ) -> Any:
        """Decode; called by ``generate``.

        ``generate`` passes ``stop_strings`` and ``seed`` on because they are in this signature.

        Args:
            prepared: logits processors, stopping criteria and the model's inputs.

        Returns:
            (B, prompt + new) token ids, or ``GenerateDecoderOnlyOutput`` with ``return_dict_in_generate``.

        Raises:
            UnsupportedError: a setting or an input that is not supported, by name.
            DraftwingError: see ``load_drafter``, ``Sampling`` and ``Decoder``.

        Warns:
            DraftwingWarning: the text was cut at the end of the model's context.
        """
        from transformers import StopStringCriteria
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        processors, criteria = prepared.pop("logits_processor", ()), [*prepared.pop("stopping_criteria", ())]
        streamer = _read_arguments(model)
        _check_settings(model, generation_config)
        _check_inputs(prepared)
        is_dict = bool(generation_config.return_dict_in_generate)
        cache = _cache_to_fill(prepared, is_returned=is_dict)
        check_arguments(_ARGUMENTS, {"seed": seed})
        prompts = _read_prompts(input_ids, prepared.get("attention_mask"), prepared.get("position_ids"))
        names = [name for name in ("output_scores", "output_logits") if is_dict and getattr(generation_config, name)]
        sampling, replay = self._read_processors(processors, bool(generation_config.do_sample), input_ids, names)
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
                setup.planner = planner_for(self.rule, drafter, target.device)
        rule = self.rule if replay is None else replay.rule
        decoder = Decoder(
            target, drafter, rule, self.budget, lossless=self.lossless, planner=setup.planner, turn=setup.turn
        )
        engine = Engine(decoder, max_batch=1 if len(prompts) == 1 else None)
        ends = _Ends(criteria, input_ids, min(target.max_length - len(prompt) for prompt in prompts))
        pad = getattr(generation_config, "_pad_token_tensor", None)
        pad = getattr(generation_config, "pad_token_id", None) if pad is None else pad
        if replay is not None:
            replay.decoder, replay.end_tokens = decoder, ends.tokens if ends.pads else ()
        columns, self.stats = _decode(engine, prompts, sampling, ends, int(pad or 0), target.vocab_size, streamer)
        new = torch.tensor(columns, dtype=input_ids.dtype, device=input_ids.device).T
        sequences = torch.cat([input_ids, new], 1)
        if cache is not None:
            _fill_cache(model, *cache, sequences, prepared.get("attention_mask"))
        if not is_dict:
            return sequences
        outputs: dict[str, Any] = {"sequences": sequences}
        if replay is not None:
            lists = {"output_scores": ("scores", replay.scores), "output_logits": ("logits", replay.logits)}
            outputs |= {lists[name][0]: tuple(lists[name][1][: len(columns)]) for name in names}
        output = GenerateDecoderOnlyOutput(**outputs)
        if cache is not None:
            output["cache" if hasattr(output, "cache") else "past_key_values"] = cache[1]  # since 5.24, before that
        return output

    def _read_processors(
        self, processors: Iterable[Any], do_sample: bool, input_ids: Tensor, outputs: Sequence[str]
    ) -> tuple[Sampling, _Replay | None]:
        """Translate the processors into a ``Sampling``, or call them as they are, also to return ``outputs``."""
        processors, (rows, width) = list(processors), input_ids.shape
        try:
            sampling = _read_sampling(processors, do_sample, width)
            if not outputs:
                return sampling, None
            what = outputs[0]
        except UnsupportedError as error:
            what = str(error)
            if outputs:
                what = outputs[0]
        rule, names = get_rule(self.rule, lossless=self.lossless), {type(one).__name__ for one in processors}
        if not rule.is_match:
            raise UnsupportedError(
                f"generate's {what} needs a rule that only looks at the target's own token: use rule='match'"
            )
        if "UnbatchedClassifierFreeGuidanceLogitsProcessor" in names:
            raise UnsupportedError(
                f"generate's guidance_scale is not supported: it runs the model a second time for every token: leave "
                f"it out, or {_WITHOUT}"
            )
        if rows > 1:
            if outputs:
                raise UnsupportedError(
                    f"generate's {what}=True with {rows} prompts: the logits of rows that have ended are not computed: "
                    f"give one prompt per call, or {_WITHOUT}"
                )
            for processor in processors:
                kind = type(processor)
                is_own = kind.__module__ != "transformers.generation.logits_process"
                if is_own or kind.__name__ not in _ROWWISE:
                    what = SETTING_OF.get(kind.__name__, f"logits processor {kind.__name__}")
                    raise UnsupportedError(
                        f"generate's {what} with {rows} prompts: it may keep a state or look at all rows, which "
                        f"advance at different speeds: give one prompt per call, or {_WITHOUT}"
                    )
        replay = _Replay(rule, processors, input_ids, keeps=bool(outputs))
        return Sampling(temperature=1.0 if do_sample else 0.0, ignore_eos=True), replay

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
        if _is_filled(cache):
            raise UnsupportedError(
                f"generate's {name}: Draftwing has its own caches and does not read others: pass an empty one, or "
                f"leave it out, and pass the whole text as input_ids"
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


def _cache_to_fill(prepared: Mapping[str, Any], *, is_returned: bool) -> tuple[str, Any] | None:
    """Return the name and the empty cache that ``generate`` would fill for its caller, or None.

    Raises:
        UnsupportedError: the model makes its own cache, which would be returned.
    """
    name = next((name for name in CACHES if prepared.get(name) is not None), None)
    if name is None:
        if is_returned and prepared.get("use_cache", True):
            raise UnsupportedError(
                f"generate's return_dict_in_generate=True would return a cache that the model makes itself: add "
                f"use_cache=False, or {_WITHOUT}"
            )
        return None
    is_own = getattr(prepared[name], "_is_user_defined", False)
    return (name, prepared[name]) if is_returned or is_own else None


@torch.inference_mode()
def _fill_cache(model: Any, name: str, cache: Any, sequences: Tensor, mask: Tensor | None) -> None:
    """Read the text into a cache as ``generate`` does: all tokens but the last, padding masked."""
    ids, parameters = sequences[:, :-1], inspect.signature(model.forward).parameters
    mask = torch.ones_like(ids) if mask is None else torch.nn.functional.pad(mask, (0, 1 + ids.shape[1]), value=1)
    mask = mask[:, : ids.shape[1]]
    options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    if "position_ids" in parameters:
        options["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    model(input_ids=ids, attention_mask=mask, use_cache=True, **{name: cache}, **options)


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


class _Replay:
    """Calls ``generate``'s logits processors along the accepted path: once per token, in order, as ``generate`` does.

    Args:
        rule: the match rule that this replaces.
        processors: all of them.
        input_ids: (B, T) the prompts with their padding.
        keeps: keep logits and scores.

    Attributes:
        rule: the rule that calls them.
        decoder: the one that uses the rule; set before the first step.
        end_tokens: after which a row has ended.
        logits, scores: (1, V) for each token of a single row.
    """

    def __init__(self, rule: Rule, processors: Sequence[Any], input_ids: Tensor, *, keeps: bool) -> None:
        self._input_ids, self._keeps = input_ids, keeps
        self._processors = [[_of_row(one, row) for one in processors] for row in range(input_ids.shape[0])]
        self.rule = replace(rule, apply=self._apply, early=lambda *_: None)
        self.decoder: Decoder | None = None
        self.end_tokens: Sequence[int] = ()
        self.logits: list[Tensor] = []
        self.scores: list[Tensor] = []

    def _apply(self, tree: DraftTree, scores: Tensor, sampling: SamplingBatch, starts: Sequence[int]) -> Accepted:
        assert self.decoder is not None
        paths, bonuses = [], []
        trees = zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)
        for row, (request, (tokens, parents)) in enumerate(zip(self.decoder.running, trees, strict=True)):
            prompt = self._input_ids[request.id : request.id + 1]
            written, path, token = list(request.token_ids), [0], None
            while token not in self.end_tokens:
                if token is not None:
                    written.append(token)
                    node = next((n for n in children_of(parents, path[-1]) if tokens[n] == token), None)
                    if node is None:
                        break
                    path.append(node)
                ids = torch.cat([prompt, prompt.new_tensor([written])], 1)
                logits = scores[row : row + 1, path[-1]].to(torch.float32, copy=True)
                processed = logits  # a processor that writes into them also changes the logits that generate returns
                for processor in self._processors[request.id]:
                    processed = processor(ids, processed)
                if self._keeps:
                    self.logits.append(logits)
                    self.scores.append(processed)
                token = sampling.draw_one(processed[0].to(scores.dtype), row, starts[row] + len(path) - 1)
            paths.append(path)
            bonuses.append(token)
        width = max(map(len, paths))
        device = scores.device
        padded = torch.tensor([path + [PAD] * (width - len(path)) for path in paths], device=device)
        counts = torch.tensor([len(path) - 1 for path in paths], device=device)
        return Accepted(padded, counts, torch.tensor(bonuses, device=device))


def _of_row(processor: Any, row: int) -> Any:
    """Return a processor for a row alone: with its index for ``prefix_allowed_tokens_fn``, and its padding."""
    from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

    if row and type(processor) is PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored[row : row + 1]
    return processor


def _read_sampling(processors: Iterable[Any], do_sample: bool, width: int) -> Sampling:
    """Translate logits processors into a ``Sampling`` that applies them in the same order.

    Raises:
        UnsupportedError: one has no counterpart, or not at its place.
    """
    fields: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    banned: list[int] = []
    last = -1
    for processor in processors:
        rank, found = _sampling_fields(processor, width)
        if rank is None:  # shifts all scores equally, which of all later steps only the penalty would notice
            last = max(last, _BIAS)
            continue
        if rank < last or (rank == last and rank != _BANNED):
            raise UnsupportedError(f"order of {type(processor).__name__}")
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
    raise UnsupportedError(f"logits processor {kind.__name__}")


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
    streamer: Any,
) -> tuple[list[list[int]], Stats]:
    """Return the new tokens as columns with one token per row, and the statistics.

    A column is complete, and sent to the streamer, when the last row has reached it. Rows that have ended are filled
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
            if streamer is not None:
                streamer.put(torch.tensor(columns[-1]))
        for request, is_over in zip(requests, ended, strict=True):
            if is_over and (ends.pads or all(ended)):
                engine.cancel(request)
    if streamer is not None:
        streamer.end()
    return columns, stats
