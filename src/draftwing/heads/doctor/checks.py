"""What can be wrong with a head by itself, one function for each trap."""

from __future__ import annotations

import torch

from draftwing.errors import DraftwingError
from draftwing.heads.doctor.case import Case, Finding
from draftwing.heads.head import usual_taps
from draftwing.heads.names import LM_HEAD
from draftwing.heads.read import find_taps, weight_files
from draftwing.heads.settings import TAP_IDS, Settings
from draftwing.heads.vocab import read_draft_vocab

__all__ = [
    "check_attention_bias",
    "check_bias",
    "check_config",
    "check_draft_map",
    "check_finite_numbers",
    "check_layers",
    "check_lm_head",
    "check_missing",
    "check_residual",
    "check_shape",
    "check_taps",
    "check_unknown",
    "check_weights",
]

_AGAIN = "take config.json and weights from the head's original place again"


def check_config(case: Case) -> Finding:
    """Can the config be read, and does it describe a head that there is a net for?"""
    reason = case.failures.get("config") or case.failures.get("kind")
    if reason is not None:
        return Finding("config", "fail", reason, "correct config.json, or take the head from its original place again")
    if case.settings is None:
        return _unread("config")
    if case.settings.layout == "speculators" and "model_type" in case.raw:
        return Finding(
            "config",
            "warn",
            f"speculators' layout with `model_type` {case.raw['model_type']!r} at the top: vLLM then reads it as a "
            f"plain model and misses the format",
            "remove the outer `model_type` from config.json",
        )
    kind = "unreadable" if case.version is None else f"EAGLE-{case.version}"
    return Finding("config", "ok", f"{kind} in the layout of {case.settings.layout}")


def check_weights(case: Case) -> Finding:
    """One weight file, and can it be read?"""
    if "weights" in case.failures:
        return Finding("weights", "fail", case.failures["weights"], "download the head again")
    files = weight_files(case.folder)
    if len(files) > 1:
        return Finding(
            "weights",
            "warn",
            f"{' and '.join(files)} lie side by side: EAGLE's own code reads the pickled one first, others safetensors",
            "remove the one that is older",
        )
    return Finding("weights", "ok", f"{files[0]}, {len(case.tensors or ())} tensors")


def check_missing(case: Case) -> Finding:
    """Tensors that engines would leave at random, or at zero, without a word."""
    if case.config is None or case.names is None:
        return _unread("missing-tensors")
    missing = sorted(case.expected.keys() - case.names.net.keys())
    if missing:
        return Finding("missing-tensors", "fail", f"{len(missing)} missing: {_some(missing)}", _AGAIN)
    return Finding("missing-tensors", "ok", f"all {len(case.expected)} are there")


def check_unknown(case: Case) -> Finding:
    """Tensors that SGLang and EAGLE's code skip without a word, and vLLM refuses."""
    if case.config is None or case.names is None:
        return _unread("unknown-tensors")
    unknown = [case.names.net[key] for key in sorted(case.names.net.keys() - case.expected.keys())]
    if unknown:
        return Finding(
            "unknown-tensors",
            "fail",
            f"{len(unknown)} that the config has no place for: {_some(unknown)}; SGLang would skip them silently, vLLM "
            f"would stop",
            "set the flag of config.json that they belong to (`fc_norm`, `norm_before_fc`), or remove them",
        )
    return Finding("unknown-tensors", "ok", "none")


def check_shape(case: Case) -> Finding:
    """Do the tensors have the shapes that the config asks for?"""
    if case.config is None or case.names is None:
        return _unread("shapes")
    found = {key: tuple(tensor.shape) for key in case.names.net if (tensor := case.tensor(key)) is not None}
    wrong = [
        f"{key} {found[key]} for {shape}" for key, shape in case.expected.items() if found.get(key, shape) != shape
    ]
    if wrong:
        return Finding("shapes", "fail", f"{len(wrong)} differ from the config: {_some(wrong)}", _AGAIN)
    return Finding("shapes", "ok", "as the config says")


def check_finite_numbers(case: Case) -> Finding:
    """NaN or infinity anywhere, the target's copies included."""
    if case.tensors is None:
        return _unread("finite")
    bad = [
        name
        for name, tensor in sorted(case.tensors.items())
        if tensor.is_floating_point() and not torch.isfinite(tensor).all()
    ]
    if bad:
        return Finding(
            "finite",
            "fail",
            f"NaN or infinity in {_some(bad)}",
            "download the head again; if it was converted to float16, use bfloat16",
        )
    return Finding("finite", "ok", "every number is finite")


def check_draft_map(case: Case) -> Finding:
    """``d2t`` as offsets, as ids, missing, or where it should not be."""
    name = "draft-map"
    if case.config is None or case.names is None:
        return _unread(name)
    config = case.config
    if config.version == 1:
        return Finding(name, "ok", "EAGLE-1 has no draft vocabulary")
    try:
        vocab = read_draft_vocab(
            case.tensor("d2t"), case.tensor("t2d"), config.vocab_size, config.draft_vocab_size, "the head"
        )
    except DraftwingError as error:
        return Finding(name, "fail", str(error), "take the head's d2t and t2d from its original place again")
    if vocab.form == "ids":
        return Finding(
            name,
            "fail",
            "d2t holds target ids, not offsets: Draftwing reads them, every engine drafts wrong tokens",
            "run `draftwing convert`, which writes offsets",
        )
    if vocab.target_ids is None and "d2t" in case.names.maps:
        return Finding(
            name,
            "warn",
            "d2t for a draft vocabulary that is the whole vocabulary: vLLM stops at tensors that it does not expect",
            "run `draftwing convert`, which leaves it out",
        )
    if vocab.target_ids is None:
        return Finding(name, "ok", "the whole vocabulary, no map needed")
    return Finding(name, "ok", f"offsets to {config.draft_vocab_size} of {config.vocab_size} tokens")


def check_lm_head(case: Case) -> Finding:
    """Does an engine take the LM head that the head was trained with?"""
    name = "lm-head"
    if case.settings is None or case.version is None:
        return _unread(name)
    if case.version == 1:
        if case.tensor(LM_HEAD) is not None:
            return Finding(
                name,
                "warn",
                "EAGLE-1 with a copy of the target's lm_head.weight: vLLM stops at it, the others skip it",
                "run `draftwing convert --to vllm` for vLLM, which leaves it out",
            )
        return Finding(name, "ok", "EAGLE-1 reads the target's")
    if case.settings.shape.get("tie_word_embeddings"):
        return Finding(
            name,
            "warn",
            "`tie_word_embeddings` is true: SGLang then reads the embedding in the place of the head's own lm_head",
            "set it to false in config.json",
        )
    if case.tensor(LM_HEAD) is None:
        return Finding(
            name,
            "fail",
            "EAGLE-3 without an lm_head.weight: engines take the target's, Draftwing wants it in the file",
            "copy the target's lm_head.weight into the head's file",
        )
    return Finding(name, "ok", "its own")


def check_bias(case: Case) -> Finding:
    """EAGLE-1's fc.bias, which one engine wants and another drops."""
    name = "fc-bias"
    if case.settings is None or case.version is None:
        return _unread(name)
    bias, said = case.tensor("fc.bias"), case.settings.bias
    if said:
        return Finding(
            name,
            "fail" if bias is None else "warn",
            "config.json says `bias` true: SGLang and vLLM read that as biases in attention, which the head lacks"
            + (", and there is no fc.bias either" if bias is None else ""),
            "remove `bias` from config.json if fc has one, else set it to false",
        )
    if case.version == 3:
        if bias is None:
            return Finding(name, "ok", "EAGLE-3's fc has none")
        return Finding(name, "warn", "EAGLE-3 with an fc.bias: engines drop it", "use it with Draftwing alone")
    if said is False and bias is not None:
        return Finding(name, "fail", "config.json says `bias` false, but there is an fc.bias", "remove `bias`")
    if bias is None and said is None:
        return Finding(
            name,
            "warn",
            "no fc.bias, and config.json does not say so: EAGLE's own code and SGLang then run with a random one",
            "set `bias` to false in config.json for EAGLE's code, or run `draftwing convert --to sglang` for SGLang",
        )
    if bias is None:
        return Finding(name, "ok", "none, and config.json says so; for SGLang run `draftwing convert --to sglang`")
    if bias.any():
        return Finding(
            name,
            "warn",
            "fc.bias is not zero: vLLM has no place for it, and some versions drop it without a word",
            "serve it with SGLang or Draftwing, or train a head without one for vLLM",
        )
    return Finding(name, "ok", "zeros, as SGLang wants; for vLLM run `draftwing convert --to vllm`")


def check_layers(case: Case) -> Finding:
    """EAGLE-3 of more than one layer, which few engines run as it was trained."""
    name = "layers"
    if case.config is None:
        return _unread(name)
    number = case.config.num_layers
    if case.config.version == 3 and number > 1:
        return Finding(
            name,
            "warn",
            f"EAGLE-3 of {number} layers: vLLM and Draftwing run them; EAGLE's own code reads the first alone, SGLang "
            f"drops the residual between them",
            "serve it with vLLM or Draftwing",
        )
    return Finding(name, "ok", "one" if number == 1 else f"{number}, which everyone runs in EAGLE-1")


def check_attention_bias(case: Case) -> Finding:
    """Biases of queries, keys and values, which some engines have no place for."""
    name = "attention-bias"
    if case.settings is None or case.config is None:
        return _unread(name)
    if not case.config.qkv_bias:
        if case.settings.attention_bias:
            return Finding(
                name,
                "warn",
                "none, but config.json says `attention_bias` true: vLLM then adds biases that hold random numbers",
                "set `attention_bias` to false in config.json",
            )
        return Finding(name, "ok", "none")
    if case.config.version == 3:
        return Finding(
            name,
            "warn",
            "EAGLE-3 with biases of queries, keys and values: vLLM and Draftwing use them, SGLang and EAGLE's own code "
            "drop them",
            "serve it with vLLM or Draftwing",
        )
    if not case.settings.qkv_bias:
        return Finding(
            name,
            "warn",
            "biases of queries, keys and values, and config.json has no `qkv_bias`: EAGLE's own code drops them",
            "set `qkv_bias` to true in config.json",
        )
    return Finding(name, "ok", "of queries, keys and values, and config.json says so")


def check_residual(case: Case) -> Finding:
    """``norm_before_residual``: what the residual of EAGLE-3's layer is."""
    name = "norm-before-residual"
    if case.settings is None:
        return _unread(name)
    said = case.settings.norm_before_residual
    if not case.is_third:
        return Finding(name, "ok", "EAGLE-1 has no such norm")
    if said is None and case.settings.layout == "speculators":
        return Finding(
            name,
            "warn",
            "not said: vLLM takes true, speculators' converter meant false",
            "add `norm_before_residual` to config.json: false for a head that was converted",
        )
    if said:
        return Finding(
            name,
            "warn",
            "true: vLLM and Draftwing follow it, SGLang and EAGLE's own code ignore it and guess worse",
            "serve it with vLLM or Draftwing",
        )
    return Finding(name, "ok", "false" if said is False else "not said, which everyone takes for false")


def check_taps(case: Case) -> Finding:
    """Which of the target's hidden states it reads, and whether everyone reads the same."""
    name = "taps"
    if case.settings is None:
        return _unread(name)
    settings, num_layers = case.settings, None
    if case.target is not None:
        num_layers = case.target.id.num_layers
    elif settings.block is not None and settings.block.target is not None:
        num_layers = settings.block.target.num_layers
    try:
        taps = find_taps(settings, str(case.folder))
    except DraftwingError as error:
        return Finding(name, "fail", str(error), "correct the taps in config.json")
    if not case.is_third:
        return Finding(name, "ok", "EAGLE-1 reads the last hidden state")
    usual: tuple[int, ...] | None = None if num_layers is None else usual_taps(3, num_layers)
    if taps is not None and num_layers is not None and max(taps) > num_layers:
        return Finding(name, "fail", f"{taps} of a target with {num_layers} layers", "load it with its own target")
    read = usual if taps is None else taps
    if read is not None and list(read) != sorted(set(read)):
        return Finding(
            name,
            "warn",
            f"{read} are not different ones, low to high: engines read each once and in order, then fail or misread",
            "use it with Draftwing, or train one with other taps",
        )
    if taps is None:
        return Finding(name, "ok", "not named: everyone takes the inputs of layers 2, L // 2 and L - 3")
    if num_layers in taps and settings.block is None:
        return Finding(
            name,
            "fail",
            f"{taps}: the last is the target's last state, before its final norm, which Draftwing does not tap",
            "serve it with the engine that it was made for",
        )
    if taps == usual:
        return _usual_taps(settings, taps)
    return _named_taps(settings, taps, usual)


def _usual_taps(settings: Settings, taps: tuple[int, ...]) -> Finding:
    if settings.taps_are_outputs and settings.tap_ids is not None:
        return Finding(
            "taps",
            "warn",
            f"`eagle_config` names {settings.tap_ids}, the outputs of the layers before the usual {taps}: SGLang "
            f"reads them so, vLLM takes them for inputs and reads one layer too early",
            f"remove `{TAP_IDS}` from config.json, or run `draftwing convert`: these are the defaults",
        )
    return Finding("taps", "ok", f"{taps}, the inputs of layers 2, L // 2 and L - 3")


def _named_taps(settings: Settings, taps: tuple[int, ...], usual: tuple[int, ...] | None) -> Finding:
    if settings.taps_are_outputs:
        return Finding(
            "taps",
            "warn",
            f"`eagle_config` names {settings.tap_ids}: SGLang and Draftwing read the outputs of these layers, vLLM "
            f"their inputs",
            "ask the head's author how they count, and convert it with the taps given",
        )
    if usual is not None and tuple(tap + 1 for tap in taps) == usual:
        return Finding(
            "taps",
            "warn",
            f"{taps} are one below the usual {usual}: they look like the outputs of layers, and are read as inputs",
            "convert the head with the taps given, one higher each, and compare the acceptance of both",
        )
    if usual is None:
        return Finding("taps", "unknown", f"{taps} are named; whether they are the usual ones depends on the target")
    detail = f"{taps}, not the usual {usual}: vLLM reads `{TAP_IDS}`, SGLang only `eagle_config`"
    if settings.block is not None or settings.layout == "speculators":
        return Finding("taps", "ok", f"{detail}; `draftwing convert` writes either")
    return Finding("taps", "warn", detail, "run `draftwing convert` for the engine that is to serve it")


def _unread(name: str) -> Finding:
    return Finding(name, "unknown", "cannot be seen before config.json and the weights can be read", "fix those first")


def _some(items: list[str], most: int = 4) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
