"""What transformers' ``generate`` prepared, translated into a ``Sampling``.

A setting that Draftwing does not support is refused by name, since one that is silently left out is a text that is
silently another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import UnsupportedError
from draftwing.model.adapter import CACHES
from draftwing.sampling import Sampling

__all__ = ["SETTINGS", "SETTING_OF", "pad_id", "read_prompts", "read_sampling", "refuse"]

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
