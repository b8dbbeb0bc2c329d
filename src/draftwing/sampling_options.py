"""``Sampling`` from user input: keyword options, dicts, one for each prompt, several texts from one seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from draftwing.checks import MAX_BATCH, listed, pairs
from draftwing.errors import ConfigError, shown
from draftwing.noise import hash_bits
from draftwing.sampling import Sampling
from draftwing.storage import read_json

# Names for the options of transformers and vLLM.
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens, which does not count the prompt",
    "do_sample": "temperature (0 is greedy, 1 samples)",
    "num_return_sequences": "n",
    "eos_token_id": "stop_tokens",
    "stop_token_ids": "stop_tokens",
    "stop_strings": "stop",
    "bad_words_ids": "banned_tokens",
    "suppress_tokens": "banned_tokens",
    "sequence_bias": "logit_bias",
    "assistant_model": "draft, an option of load",
    "num_assistant_tokens": "speculation=Budget(...)",
    "prompt_lookup_num_tokens": "draft='lookup', an option of load",
    "streamer": "LM.stream",
}


def model_settings(folder: Path) -> dict[str, Any]:
    """Return the sampling settings of a model's ``generation_config.json``; {} without one."""
    file = folder / "generation_config.json"
    config = read_json(file) if file.exists() else {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    settings = {name: config[name] for name in names if config.get(name) is not None}
    top_k = settings.get("top_k")
    if top_k in (0, -1):  # all tokens, in transformers and in vLLM
        del settings["top_k"]
    elif isinstance(top_k, float) and top_k.is_integer():
        settings["top_k"] = int(top_k)
    return settings


def nth_seed(seed: int, number: int) -> int:
    """Return the seed of one of several samples; sample 0 has ``seed`` itself."""
    if number == 0:
        return seed
    return int(hash_bits(seed, (number,), torch.zeros(1, dtype=torch.int64))) & (2**63 - 1)


def nth_sampling(sampling: Sampling, number: int) -> Sampling:
    """Return the sampling of the ``number``-th text of a prompt."""
    if number == 0 or sampling.seed is None:
        return sampling
    return replace(sampling, seed=nth_seed(sampling.seed, number))


def one_each(sampling: Any, count: int, options: Mapping[str, Any]) -> list[Sampling]:
    """Return the sampling of every prompt. Raises ConfigError if their number is wrong."""
    if not isinstance(sampling, list | tuple):
        return [sampling_from(sampling, options)] * count
    entries = listed(sampling, MAX_BATCH)
    if entries is None or len(entries) != count:
        raise ConfigError(
            f"sampling has {len(sampling)} entries for {count} prompts: give one for each prompt, or one for all"
        )
    return [sampling_from(entry, options) for entry in entries]


def sampling_from(sampling: Any, options: Mapping[str, Any]) -> Sampling:
    """Return a ``Sampling``, given as such, as a dict of its fields or as None, with ``options`` replaced.

    Raises:
        ConfigError: another type, or an unknown option.
        SamplingError: a value outside its range.
    """
    if isinstance(sampling, Mapping):
        own = pairs(sampling, 1000)
        if own is None:
            raise ConfigError(f"sampling must be a dict of Sampling's fields, found {shown(sampling)}")
        sampling, options = None, {**dict(own), **options}
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ConfigError(
            f"sampling must be a Sampling, a dict of its fields or None, found {shown(sampling)}: write "
            f"Sampling(temperature=0.8), or temperature=0.8"
        )
    names = [entry.name for entry in fields(Sampling)]
    unknown = next((name for name in options if name not in names), None)
    if unknown is not None:
        name = unknown if isinstance(unknown, str) else ""
        near = [_OTHER_NAMES[name]] if name in _OTHER_NAMES else get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"unknown sampling option {shown(unknown)}: {hint}the options are {', '.join(names)}")
    return replace(Sampling() if sampling is None else sampling, **options)
