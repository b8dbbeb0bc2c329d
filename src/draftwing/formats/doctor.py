"""Check a head for known causes of silent failure, by itself and together with its target.

A head that does not fit still produces the same text, only slowly: nothing reports that its taps are off by one or that
its map holds ids. Each check here is one such trap, found in published heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from draftwing.errors import DraftwingError
from draftwing.formats.gguf_weights import open_weights
from draftwing.formats.identity import chat_template_hash, has_tokenizer, target_id_of_folder
from draftwing.formats.read import (
    find_config,
    find_taps,
    find_version,
    read_tensors,
    same_matrix,
    usual_taps,
    weight_files,
)
from draftwing.formats.settings import TAP_IDS, HeadSettings, read_settings
from draftwing.formats.tensors import EMBEDDING, LM_HEAD, MapForm, Names, read_draft_vocab, sort_names
from draftwing.methods.eagle_net import EagleConfig, tensor_shapes
from draftwing.methods.net import TargetId
from draftwing.models.config import ModelConfig, read_config, text_config
from draftwing.text.tokenizer import Tokenizer

Status = Literal["ok", "warn", "fail", "unknown"]
Shapes = Mapping[str, tuple[int, ...]]

_ORIGINAL = "take config.json and weights from the head's original place again"
_GIVE_TARGET = "give the target's folder"
_OTHER = "use the head with the target that it was trained for"
_VLLM_ONLY = "serve it with vLLM or Draftwing"
# The embedding's name in several families.
_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight")
_GOOD_COVERAGE = 0.95  # below it, more than one token in twenty can never be drafted


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str  # name of the check, stable
    status: Status  # ``warn``: it works, but perhaps worse than it could; ``unknown``: it cannot be checked
    detail: str  # the finding
    fix: str = ""  # the remedy; empty if there is nothing to do


class Result(NamedTuple):
    """A finding without its name."""

    status: Status
    detail: str
    fix: str = ""


_ok, _warn, _fail, _unknown = (partial(Result, status) for status in get_args(Status))


@dataclass(frozen=True)
class _Target:
    """The folder of the head's target; ``model`` is None for families that only transformers runs."""

    folder: Path
    config: Mapping[str, Any]
    id: TargetId
    model: ModelConfig | None


@dataclass
class _Case:
    """A head as far as it could be read; the rest is None, with the reason in ``failures``."""

    folder: Path
    target: _Target | None
    raw: Mapping[str, Any] = field(default_factory=dict)
    settings: HeadSettings | None = None
    tensors: Mapping[str, Tensor] | None = None
    version: int | None = None
    names: Names | None = None
    config: EagleConfig | None = None
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def is_eagle3(self) -> bool:
        return (self.version or (self.settings.version if self.settings is not None else None)) == 3

    @property
    def training(self) -> Mapping[str, Any]:
        return {} if self.settings is None else self.settings.block.training

    @cached_property
    def expected(self) -> Shapes | None:
        return None if self.config is None else tensor_shapes(self.config)

    def draft_vocab(self, config: EagleConfig) -> tuple[Tensor | None, MapForm]:
        d2t, t2d = self.tensor("d2t"), self.tensor("t2d")
        return read_draft_vocab(d2t, t2d, config.vocab_size, config.draft_vocab_size, "the head")

    def tensor(self, name: str) -> Tensor | None:
        """Return a tensor by EAGLE's name."""
        if self.names is None or self.tensors is None:
            return None
        stored = {**self.names.net, **self.names.maps, **self.names.copies}.get(name)
        return None if stored is None else self.tensors[stored]


def diagnose(head_folder: Path, target_folder: Path | None = None) -> list[Finding]:
    """Run all checks on a head in any layout; without its target, half of them are ``unknown``.

    A head that cannot be read raises nothing: that is a finding.
    """
    target = None
    if target_folder is not None:
        config = read_config(target_folder)
        try:
            model = ModelConfig.from_hf(config)
        except DraftwingError:
            model = None
        target = _Target(Path(target_folder), text_config(config), target_id_of_folder(target_folder), model)
    case = _read_case(Path(head_folder), target)
    findings = []
    for name, (check, needs) in CHECKS.items():
        values = [getattr(case, need) for need in needs]
        if all(value is not None for value in values):
            findings.append(Finding(name, *check(case, *values)))
        elif needs == ("target",):
            findings.append(Finding(name, "unknown", "the target is unknown", _GIVE_TARGET))
        else:
            detail = "can be checked only if config.json and the weights can be read"
            findings.append(Finding(name, "unknown", detail, "fix those first"))
    return findings


def other_taps(head_folder: Path, num_layers: int) -> tuple[int, ...] | None:
    """Return the taps of a foreign head if its ids count outputs of layers instead of inputs, or the other way round.

    None if it names no ids, or if the taps would not be hidden states of a target with ``num_layers``.
    """
    try:
        settings = read_settings(read_config(head_folder), f"{head_folder}/config.json")
        taps = find_taps(settings, str(head_folder))
    except DraftwingError:
        return None
    if settings.has_block or taps is None:
        return None
    taps = tuple(tap - 1 if settings.taps_are_outputs else tap + 1 for tap in taps)
    return taps if min(taps) >= 0 and max(taps) < num_layers else None


def _read_case(folder: Path, target: _Target | None) -> _Case:
    """Read a head step by step; after a step that fails, continue with those that do not need it."""
    case, where = _Case(folder, target), str(folder)
    try:
        case.raw = read_config(folder)
        case.settings = read_settings(case.raw, f"{where}/config.json")
        find_taps(case.settings, where)
    except DraftwingError as error:
        case.failures["config"] = str(error)
    try:
        case.tensors = read_tensors(folder)
    except DraftwingError as error:
        case.failures["weights"] = str(error)
    if case.settings is None or case.tensors is None:
        return case
    try:
        case.version = find_version(case.settings, case.tensors, where)
        case.names = sort_names(case.tensors, case.version, where, own_embedding=case.settings.net["own_embedding"])
        case.config = find_config(case.settings, case.version, case.names, where)
    except DraftwingError as error:
        case.failures.setdefault("config", str(error))
    return case


CHECKS: dict[str, tuple[Callable[..., Result], tuple[str, ...]]] = {}


def _check(*needs: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Register a check. It is called with the case and the attributes of it that it needs, none of them None."""

    def register(check: Callable[..., Result]) -> Callable[..., Result]:
        CHECKS[check.__name__.removeprefix("check_").replace("_", "-")] = (check, needs)
        return check

    return register


def _listed(items: list[str]) -> str:
    return ", ".join(items[:4]) + (f" and {len(items) - 4} more" if len(items) > 4 else "")


# --- files and tensors -----------------------------------------------------------------------------------------------


@_check()
def check_config(case: _Case) -> Result:
    if "config" in case.failures:
        return _fail(case.failures["config"], "correct config.json, or take the head from its original place again")
    layout = case.settings.layout if case.settings is not None else ""
    if layout == "speculators" and "model_type" in case.raw:
        return _warn(
            f"speculators' layout with `model_type` {case.raw['model_type']!r} at the top: vLLM then reads it as a "
            f"plain model and misses the format",
            "remove the outer `model_type` from config.json",
        )
    return _ok(f"{'unreadable' if case.version is None else f'EAGLE-{case.version}'} in the layout of {layout}")


@_check()
def check_weights(case: _Case) -> Result:
    if "weights" in case.failures:
        return _fail(case.failures["weights"], "download the head again")
    files = weight_files(case.folder)
    if len(files) > 1:
        return _warn(
            f"{' and '.join(files)} lie side by side: EAGLE's own code reads the pickled one first, others safetensors",
            "remove the older one",
        )
    return _ok(f"{files[0]}, {len(case.tensors or ())} tensors")


@_check("names", "expected")
def check_missing_tensors(case: _Case, names: Names, expected: Shapes) -> Result:
    """Engines leave missing tensors random, or zero, without a message."""
    missing = sorted(expected.keys() - names.net.keys())
    if missing:
        return _fail(f"{len(missing)} missing: {_listed(missing)}", _ORIGINAL)
    return _ok(f"all {len(expected)} are there")


@_check("names", "expected")
def check_unknown_tensors(case: _Case, names: Names, expected: Shapes) -> Result:
    unknown = [names.net[key] for key in sorted(names.net.keys() - expected.keys())]
    if unknown:
        return _fail(
            f"{len(unknown)} that the config has no place for: {_listed(unknown)}; SGLang would skip them silently, "
            f"vLLM would stop",
            "set the flag of config.json that they belong to (`fc_norm`, `norm_before_fc`), or remove them",
        )
    return _ok("none")


@_check("names", "expected")
def check_shapes(case: _Case, names: Names, expected: Shapes) -> Result:
    shapes = {key: tuple(tensor.shape) for key in names.net if (tensor := case.tensor(key)) is not None}
    wrong = [f"{key} {shapes[key]} for {shape}" for key, shape in expected.items() if shapes.get(key, shape) != shape]
    if wrong:
        return _fail(f"{len(wrong)} differ from the config: {_listed(wrong)}", _ORIGINAL)
    return _ok("as in the config")


@_check("tensors")
def check_finite(case: _Case, tensors: Mapping[str, Tensor]) -> Result:
    bad = sorted(key for key, value in tensors.items() if value.is_floating_point() and not value.isfinite().all())
    if bad:
        fix = "download the head again; if it was converted to float16, use bfloat16"
        return _fail(f"NaN or infinity in {_listed(bad)}", fix)
    return _ok("every number is finite")


# --- taps and draft vocabulary ---------------------------------------------------------------------------------------


@_check("settings")
def check_taps(case: _Case, settings: HeadSettings) -> Result:
    """Engines may read other hidden states of the target than the head was trained on."""
    source = settings.net.get("target") if case.target is None else case.target.id
    num_layers = None if source is None else source.num_layers
    try:
        taps = find_taps(settings, str(case.folder))
    except DraftwingError as error:
        return _fail(str(error), "correct the taps in config.json")
    if not case.is_eagle3:
        return _ok("EAGLE-1 reads the last hidden state")
    usual = None if num_layers is None else usual_taps(3, num_layers)
    if taps is not None and num_layers is not None and max(taps) > num_layers:
        return _fail(f"{taps} of a target with {num_layers} layers", "load it with its own target")
    read = usual if taps is None else taps
    if read is not None and list(read) != sorted(set(read)):
        return _warn(
            f"{read} are not different ones, low to high: engines read each once and in order, then fail or misread",
            "use it with Draftwing, or train one with other taps",
        )
    if taps is None:
        return _ok("not named: all engines take the inputs of layers 2, L // 2 and L - 3")
    if num_layers in taps and not settings.has_block:
        return _fail(
            f"{taps}: the last is the target's last state, before its final norm, which Draftwing does not tap",
            "serve it with the engine that it was made for",
        )
    if taps == usual:
        if settings.taps_are_outputs:
            return _warn(
                f"`eagle_config` names {settings.tap_ids}, the outputs of the layers before the usual {taps}: SGLang "
                f"reads them so, vLLM takes them for inputs and reads one layer too early",
                f"remove `{TAP_IDS}` from config.json, or run `draftwing convert`: these are the defaults",
            )
        return _ok(f"{taps}, the inputs of layers 2, L // 2 and L - 3")
    if settings.taps_are_outputs:
        return _warn(
            f"`eagle_config` names {settings.tap_ids}: SGLang and Draftwing read the outputs of these layers, vLLM "
            f"their inputs",
            "ask the head's author how they count, and convert it with the taps given",
        )
    if usual is not None and tuple(tap + 1 for tap in taps) == usual:
        return _warn(
            f"{taps} are one below the usual {usual}: they look like the outputs of layers, and are read as inputs",
            "convert the head with the taps given, one higher each, and compare the acceptance of both",
        )
    if usual is None:
        return _unknown(f"{taps} are named; only the target shows if they are the usual ones")
    detail = f"{taps}, not the usual {usual}: vLLM reads `{TAP_IDS}`, SGLang only `eagle_config`"
    if settings.has_block or settings.layout == "speculators":
        return _ok(f"{detail}; `draftwing convert` writes either")
    return _warn(detail, "run `draftwing convert` for the engine that will serve it")


@_check("config")
def check_draft_map(case: _Case, config: EagleConfig) -> Result:
    if config.version == 1:
        return _ok("EAGLE-1 has no draft vocabulary")
    try:
        ids, form = case.draft_vocab(config)
    except DraftwingError as error:
        return _fail(str(error), "take the head's d2t and t2d from its original place again")
    if form == "ids":
        return _fail(
            "d2t holds target ids, not offsets: Draftwing reads them, every engine drafts wrong tokens",
            "run `draftwing convert`, which writes offsets",
        )
    if ids is not None:
        return _ok(f"offsets to {config.draft_vocab_size} of {config.vocab_size} tokens")
    if case.tensor("d2t") is not None:
        return _warn(
            "d2t for a draft vocabulary that is the whole vocabulary: vLLM stops at tensors that it does not expect",
            "run `draftwing convert`, which leaves it out",
        )
    return _ok("the whole vocabulary, no map needed")


@_check("config")
def check_draft_coverage(case: _Case, config: EagleConfig) -> Result:
    """A token outside the draft vocabulary is never drafted."""
    if not config.has_draft_vocab:
        return _ok("every token can be drafted")
    try:
        ids, _ = case.draft_vocab(config)
    except DraftwingError:
        return _unknown("the draft vocabulary cannot be read", "see draft-map")
    share = f"{config.draft_vocab_size} of {config.vocab_size} tokens"
    eos = None if case.target is None else case.target.config.get("eos_token_id")
    ends = [token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int)]
    lost = [token for token in ends if ids is not None and token not in ids.tolist()]
    if lost:
        return _warn(
            f"{share}, and the target's end token {lost[0]} is not among them: the last token of every text is lost",
            "train a head whose draft vocabulary has the end tokens",
        )
    coverage = case.training.get("coverage")
    if not isinstance(coverage, int | float) or isinstance(coverage, bool):
        return _unknown(
            f"{share}; the text that they were chosen for is not named, and other text may need other tokens",
            "measure the acceptance on your own prompts",
        )
    share = f"{share}, {coverage:.1%} of the training text"
    return _ok(share) if coverage >= _GOOD_COVERAGE else _warn(share, "train a head with a larger draft vocabulary")


# --- flags of the config ---------------------------------------------------------------------------------------------


@_check("settings", "config")
def check_rope_theta(case: _Case, settings: HeadSettings, config: EagleConfig) -> Result:
    target, target_theta = case.target, None
    model = None if target is None else target.model
    if model is not None:
        target_theta = model.rope.theta
    elif target is not None:
        tables = [target.config, target.config.get("rope_parameters")]
        values = [table["rope_theta"] for table in tables if isinstance(table, Mapping) and "rope_theta" in table]
        target_theta = float(values[0]) if values and isinstance(values[0], int | float) else None
    theta = config.rope.theta
    if not settings.rope_theta_given:
        if target_theta == 10000:
            return _ok("missing, which all engines take for 10000, the target's value")
        found = "" if target_theta is None else f", the target has {target_theta:g}"
        return _warn(
            f"missing: all engines take 10000{found}. Right for a head of EAGLE's own trainer, which ignored the "
            f"target's; wrong for most others",
            "add the `rope_theta` that it was trained with to config.json",
        )
    if target_theta is None:
        return _unknown(f"{theta:g}; the target's is unknown", _GIVE_TARGET)
    if theta != target_theta:
        return _warn(
            f"{theta:g}, the target has {target_theta:g}: right only if the head was trained with it",
            "compare acceptance with the target's `rope_theta` in the head's config.json",
        )
    if model is not None and model.rope.type != config.rope.type:
        return _warn(
            f"{theta:g} as the target, but rotation of type {config.rope.type!r}, the target's is "
            f"{model.rope.type!r}: right only if the head was trained with it",
            "compare acceptance with the target's `rope_scaling` in the head's config.json",
        )
    return _ok(f"{theta:g}, as the target")


@_check("config")
def check_max_positions(case: _Case, config: EagleConfig) -> Result:
    limit = config.max_position_embeddings
    target_limit = case.target.config.get("max_position_embeddings") if case.target is not None else None
    if not isinstance(target_limit, int):
        return _unknown(f"{limit} tokens; the target's are unknown", _GIVE_TARGET)
    if limit < target_limit:
        return _warn(
            f"{limit} tokens, the target has {target_limit}: engines with tables of this size fail on longer prompts",
            f"set `max_position_embeddings` to {target_limit} in the head's config.json, and expect worse drafts there",
        )
    return _ok(f"{limit} tokens, the target has {target_limit}")


@_check("config")
def check_layers(case: _Case, config: EagleConfig) -> Result:
    number = config.num_layers
    if config.version == 3 and number > 1:
        return _warn(
            f"EAGLE-3 of {number} layers: vLLM and Draftwing run them; EAGLE's own code reads only the first, SGLang "
            f"drops the residual between them",
            _VLLM_ONLY,
        )
    return _ok("one" if number == 1 else f"{number}, which all engines run in EAGLE-1")


@_check("settings", "version")
def check_fc_bias(case: _Case, settings: HeadSettings, version: int) -> Result:
    """One engine needs EAGLE-1's fc.bias, another drops it."""
    bias, flag = case.tensor("fc.bias"), settings.bias
    if flag:
        detail = "config.json has `bias` true: SGLang and vLLM read that as biases in attention, which the head lacks"
        fix = "remove `bias` from config.json if fc has one, else set it to false"
        return _fail(f"{detail}, and there is no fc.bias either", fix) if bias is None else _warn(detail, fix)
    if version == 3:
        if bias is None:
            return _ok("EAGLE-3's fc has none")
        return _warn("EAGLE-3 with an fc.bias: engines drop it", "use it only with Draftwing")
    if flag is False and bias is not None:
        return _fail("config.json has `bias` false, but there is an fc.bias", "remove `bias`")
    if bias is None and flag is None:
        return _warn(
            "no fc.bias, and no `bias` in config.json: EAGLE's own code and SGLang then run with a random one",
            "set `bias` to false in config.json for EAGLE's code, or run `draftwing convert --to sglang` for SGLang",
        )
    if bias is None:
        return _ok("none, as in config.json; for SGLang run `draftwing convert --to sglang`")
    if bias.any():
        return _warn(
            "fc.bias is not zero: vLLM has no place for it, and some versions drop it silently",
            "serve it with SGLang or Draftwing, or train a head without one for vLLM",
        )
    return _ok("zeros, which SGLang needs; for vLLM run `draftwing convert --to vllm`")


@_check("settings", "config")
def check_attention_bias(case: _Case, settings: HeadSettings, config: EagleConfig) -> Result:
    if not config.qkv_bias:
        if settings.attention_bias:
            return _warn(
                "none, but config.json has `attention_bias` true: vLLM then adds biases that hold random numbers",
                "set `attention_bias` to false in config.json",
            )
        return _ok("none")
    biases = "biases of queries, keys and values"
    if config.version == 3:
        return _warn(
            f"EAGLE-3 with {biases}: vLLM and Draftwing use them, SGLang and EAGLE's own code drop them", _VLLM_ONLY
        )
    if not settings.qkv_bias:
        return _warn(
            f"{biases}, and config.json has no `qkv_bias`: EAGLE's own code drops them",
            "set `qkv_bias` to true in config.json",
        )
    return _ok(f"{biases}, as in config.json")


@_check("settings")
def check_norm_before_residual(case: _Case, settings: HeadSettings) -> Result:
    value = settings.norm_before_residual
    if not case.is_eagle3:
        return _ok("EAGLE-1 has no such norm")
    if value is None and settings.layout == "speculators":
        return _warn(
            "missing: vLLM takes true, speculators' converter meant false",
            "add `norm_before_residual` to config.json: false for a head that was converted",
        )
    if value:
        return _warn(
            "true: vLLM and Draftwing follow it, SGLang and EAGLE's own code ignore it and draft worse", _VLLM_ONLY
        )
    return _ok("missing, which all engines take for false" if value is None else "false")


@_check("settings", "version")
def check_lm_head(case: _Case, settings: HeadSettings, version: int) -> Result:
    is_stored = case.tensor(LM_HEAD) is not None
    if version == 1:
        if is_stored:
            return _warn(
                "EAGLE-1 with a copy of the target's lm_head.weight: vLLM stops at it, the others skip it",
                "run `draftwing convert --to vllm` for vLLM, which leaves it out",
            )
        return _ok("EAGLE-1 reads the target's")
    if settings.shape.get("tie_word_embeddings"):
        return _warn(
            "`tie_word_embeddings` is true: SGLang then reads the embedding instead of the head's own lm_head",
            "set it to false in config.json",
        )
    if not is_stored:
        return _fail(
            "EAGLE-3 without an lm_head.weight: engines take the target's, Draftwing needs it in the file",
            "copy the target's lm_head.weight into the head's file",
        )
    return _ok("its own")


# --- the target ------------------------------------------------------------------------------------------------------


def _compare_size(case: _Case, key: str, size: object, name: str) -> Result:
    """Compare a size in the head's config with that of the target, called ``name`` in its identity."""
    if not size:
        return _unknown(f"the head's config.json has no `{key}`", "see config")
    if case.target is None:
        return _unknown(f"{key} {size}; the target's is unknown", _GIVE_TARGET)
    target_size = getattr(case.target.id, name)
    if size != target_size:
        return _fail(f"{key} {size}, the target has {target_size}", _OTHER)
    return _ok(f"{key} {size}, as the target")


@_check("settings")
def check_hidden_size(case: _Case, settings: HeadSettings) -> Result:
    key = "hidden_size" if settings.net["target_hidden_size"] is None else "target_hidden_size"
    return _compare_size(case, key, {**settings.shape, **settings.net}.get(key), "hidden_size")


@_check("settings")
def check_num_layers(case: _Case, settings: HeadSettings) -> Result:
    """Taps are counted in the target's layers, whose number only heads written by Draftwing have."""
    target = settings.net.get("target")
    return _compare_size(case, "target.num_layers", 0 if target is None else target.num_layers, "num_layers")


@_check("settings")
def check_vocabulary(case: _Case, settings: HeadSettings) -> Result:
    sizes = _compare_size(case, "vocab_size", settings.shape.get("vocab_size"), "vocab_size")
    if sizes.status != "ok" or case.target is None:
        return sizes
    target = settings.net.get("target")
    expected = "" if target is None else target.vocab_hash
    actual = case.target.id.vocab_hash
    if not expected and has_tokenizer(case.folder):
        try:
            expected = Tokenizer(case.folder).vocab_hash
        except DraftwingError as error:
            return _unknown(f"the head's own tokenizer cannot be read: {error}")
    if not expected or not actual:
        reason = "target's folder has no tokenizer" if expected else "head does not name its target's tokenizer"
        return _unknown(
            f"{sizes.detail}; the tokens cannot be compared: the {reason}",
            "check that both come from the same model",
        )
    if expected != actual:
        return _fail(
            f"another tokenizer: fingerprint {expected}, the target's is {actual}: ids mean other words", _OTHER
        )
    return _ok(f"{sizes.detail}, fingerprint {actual}")


@_check("target")
def check_chat_template(case: _Case, target: _Target) -> Result:
    """A head trained on dialogues in another template drafts badly at the turns."""
    try:
        actual = chat_template_hash(target.folder)
        noted = case.training.get("chat_template")
        expected = noted if isinstance(noted, str) else chat_template_hash(case.folder)
    except DraftwingError as error:
        return _unknown(str(error))
    if not actual:
        return _ok("the target has none")
    if not expected:
        return _unknown(
            "the head does not name the template that it was trained with",
            "compare acceptance on dialogues and on plain text",
        )
    if expected != actual:
        return _warn(
            f"trained with another template: fingerprint {expected}, the target's is {actual}",
            "prompt with the template that it was trained with, or train it on dialogues in the target's",
        )
    return _ok(f"the target's, fingerprint {actual}")


@_check("names", "settings")
def check_embedding(case: _Case, names: Names, settings: HeadSettings) -> Result:
    copy = case.tensor(EMBEDDING)
    if copy is None:
        return _ok("none in the file: the target's is used")
    reason = "config.json says so"
    if not settings.net["own_embedding"]:
        if case.target is None:
            return _unknown("the file has a copy of the target's, or its own", _GIVE_TARGET)
        try:
            with open_weights(case.target.folder) as files:
                key = next((key for key in _EMBEDDINGS if key in files), None)
                if key is None:
                    return _unknown("the target's embedding was not found in its files")
                if same_matrix(copy, files.get(key)):
                    return _ok("a copy of the target's")
        except DraftwingError as error:
            return _unknown(f"the target's weights cannot be read: {error}")
        reason = "it is not the target's"
    return _warn(
        f"its own embedding ({reason}): Draftwing, vLLM and EAGLE's own code use it, SGLang takes the target's",
        "serve it with one of those that use it, or remove embed_tokens.weight if it is an outdated copy",
    )
