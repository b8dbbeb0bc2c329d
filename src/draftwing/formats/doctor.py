"""What a doctor looks at: a head read as far as it can be, and its target's folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from draftwing.errors import DraftwingError
from draftwing.formats.head import usual_taps
from draftwing.formats.identity import chat_template_hash, has_tokenizer, target_id_of_folder
from draftwing.formats.names import EMBEDDING, LM_HEAD, Names, sort_names
from draftwing.formats.read import find_config, find_taps, find_version, read_tensors, same_matrix, weight_files
from draftwing.formats.settings import TAP_IDS, Settings, read_settings
from draftwing.formats.source import open_weights
from draftwing.formats.vocab import read_draft_vocab
from draftwing.methods.eagle_net import EagleConfig, tensor_shapes
from draftwing.methods.net import TargetId
from draftwing.models.config import ModelConfig, read_config
from draftwing.text.tokenizer import Tokenizer

Status = Literal["ok", "warn", "fail", "unknown"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: of the check, stable.
        status: ``warn``: it works, but perhaps worse than it could; ``unknown``: it cannot be seen from here.
        detail: what was found.
        fix: what to do about it; empty where nothing is to be done.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class TargetFolder:
    """The folder of the model that a head is for. ``config`` is flat: a multimodal model's text part."""

    folder: Path
    config: Mapping[str, Any]
    id: TargetId

    @cached_property
    def model(self) -> ModelConfig | None:
        """Its shape, where it is of a family that the lean decoder knows."""
        try:
            return ModelConfig.from_hf(read_config(self.folder))
        except DraftwingError:
            return None


@dataclass
class Case:
    """A head as far as it could be read; what could not is None, and ``failures`` says why."""

    folder: Path
    target: TargetFolder | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)
    settings: Settings | None = None
    tensors: Mapping[str, Tensor] | None = None
    version: int | None = None
    names: Names | None = None
    config: EagleConfig | None = None
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def is_third(self) -> bool:
        """EAGLE-3, or what claims to be."""
        return (self.version or (self.settings.version if self.settings is not None else None)) == 3

    @cached_property
    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes that the config asks for; empty where it could not be read."""
        return {} if self.config is None else tensor_shapes(self.config)

    def tensor(self, name: str) -> Tensor | None:
        """A tensor by EAGLE's name."""
        if self.names is None or self.tensors is None:
            return None
        stored = {**self.names.net, **self.names.maps, **self.names.copies}.get(name)
        return None if stored is None else self.tensors[stored]


def examine(folder: Path, target: TargetFolder | None) -> Case:
    """Read a head step by step, and go on after a step that fails with those that do not need it."""
    case = Case(Path(folder), target)
    where = str(folder)
    try:
        case.raw = read_config(case.folder)
        case.settings = read_settings(case.raw, f"{where}/config.json")
        find_taps(case.settings, where)
    except DraftwingError as error:
        case.failures["config"] = str(error)
    try:
        case.tensors = read_tensors(case.folder)
    except DraftwingError as error:
        case.failures["weights"] = str(error)
    if case.settings is None or case.tensors is None:
        return case
    try:
        case.version = find_version(case.settings, case.tensors, where)
        case.names = sort_names(case.tensors, case.version, where, own_embedding=case.settings.own_embedding)
    except DraftwingError as error:
        case.failures["kind"] = str(error)
        return case
    try:
        case.config = find_config(case.settings, case.version, case.names, where)
    except DraftwingError as error:
        case.failures.setdefault("config", str(error))
    return case


def look_at_target(folder: Path) -> TargetFolder:
    """What a doctor needs of a target: its config and its identity, not its weights.

    Raises:
        CheckpointError, ConfigError, TokenizerError: it cannot be read.
    """
    config = read_config(folder)
    text = config.get("text_config")
    return TargetFolder(
        Path(folder), {**config, **text} if isinstance(text, dict) else config, target_id_of_folder(folder)
    )


# What can be wrong with a head by itself, one function for each trap.


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


# What can be wrong between a head and its target, one function for each trap.


_GIVE_TARGET = "give the target's folder"
_OTHER = "use the head with the target that it was trained for"
# Where families keep the embedding.
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "transformer.wte.weight",
)
_GOOD_COVERAGE = 0.95  # below it, more than one guess in twenty is lost before the net is asked


def check_hidden_size(case: Case) -> Finding:
    """The features that the head reads must be as wide as the target's states."""
    if case.settings is not None and case.settings.target_hidden_size is not None:
        return _same_number(case, "hidden-size", "target_hidden_size", case.settings.target_hidden_size)
    return _same_number(case, "hidden-size", "hidden_size", _size(case, "hidden_size"))


def check_num_layers(case: Case) -> Finding:
    """Taps are counted in the target's layers; only a head of ours says how many those were."""
    name = "num-layers"
    own = _own_target(case)
    if own is None or not own["num_layers"]:
        return Finding(name, "unknown", "the head does not say how many layers its target has", "")
    if case.target is None:
        return Finding(name, "unknown", f"made for {own['num_layers']} layers", _GIVE_TARGET)
    theirs = case.target.id.num_layers
    if own["num_layers"] != theirs:
        return Finding(name, "fail", f"made for {own['num_layers']} layers, the target has {theirs}", _OTHER)
    return Finding(name, "ok", f"{theirs}, as the target")


def check_vocabulary(case: Case) -> Finding:
    """The tokens and their ids must be the target's."""
    name = "vocabulary"
    sizes = _same_number(case, name, "vocab_size", _size(case, "vocab_size"))
    if sizes.status != "ok" or case.target is None:
        return sizes
    own, theirs = _own_target(case), case.target.id.vocab_hash
    known = str(own["vocab_hash"]) if own is not None else ""
    if not known and has_tokenizer(case.folder):
        try:
            known = Tokenizer(case.folder).vocab_hash
        except DraftwingError as error:
            return Finding(name, "unknown", f"the head's own tokenizer cannot be read: {error}", "")
    if not known or not theirs:
        lacking = "target's folder has no tokenizer" if known else "head does not say which tokenizer it was made for"
        return Finding(
            name,
            "unknown",
            f"{sizes.detail}; whether the tokens are the same cannot be seen: the {lacking}",
            "make sure that both come from the same model",
        )
    if known != theirs:
        return Finding(
            name,
            "fail",
            f"another tokenizer: fingerprint {known}, the target's is {theirs}: ids mean other words",
            _OTHER,
        )
    return Finding(name, "ok", f"{sizes.detail}, fingerprint {theirs}")


def check_chat_template(case: Case) -> Finding:
    """A head trained on dialogues in another template guesses badly at the turns."""
    name = "chat-template"
    if case.target is None:
        return Finding(name, "unknown", "the target is not known", _GIVE_TARGET)
    try:
        theirs = chat_template_hash(case.target.folder)
        block = case.settings.block if case.settings is not None else None
        said = block.training.get("chat_template") if block is not None else None
        own = said if isinstance(said, str) else chat_template_hash(case.folder)
    except DraftwingError as error:
        return Finding(name, "unknown", str(error), "")
    if not theirs:
        return Finding(name, "ok", "the target has none")
    if not own:
        return Finding(
            name,
            "unknown",
            "the head does not say with which template it was trained",
            "compare acceptance on dialogues and on plain text",
        )
    if own != theirs:
        return Finding(
            name,
            "warn",
            f"trained with another template: fingerprint {own}, the target's is {theirs}",
            "prompt with the template that it was trained with, or train it on dialogues in the target's",
        )
    return Finding(name, "ok", f"the target's, fingerprint {theirs}")


def check_coverage(case: Case) -> Finding:
    """A token outside the draft vocabulary is never drafted."""
    name = "draft-coverage"
    config = case.config
    if config is None:
        return Finding(
            name, "unknown", "cannot be seen before config.json and the weights can be read", "fix those first"
        )
    if not config.has_draft_vocab:
        return Finding(name, "ok", "every token can be drafted")
    try:
        ids = read_draft_vocab(
            case.tensor("d2t"), case.tensor("t2d"), config.vocab_size, config.draft_vocab_size, "the head"
        ).target_ids
    except DraftwingError:
        return Finding(name, "unknown", "the draft vocabulary cannot be read", "see draft-map")
    share = f"{config.draft_vocab_size} of {config.vocab_size} tokens"
    eos = _eos_ids(case.target.config) if case.target is not None else []
    lost = [token for token in eos if ids is not None and token not in ids.tolist()]
    if lost:
        return Finding(
            name,
            "warn",
            f"{share}, and the target's end token {lost[0]} is not among them: the last token of every text is lost",
            "train a head whose draft vocabulary has the end tokens",
        )
    block = case.settings.block if case.settings is not None else None
    coverage = block.training.get("coverage") if block is not None else None
    if not isinstance(coverage, int | float) or isinstance(coverage, bool):
        return Finding(
            name,
            "unknown",
            f"{share}; on which text they were chosen is not said, and on other text many guesses are lost",
            "measure the acceptance on prompts of your own",
        )
    if coverage < _GOOD_COVERAGE:
        return Finding(
            name, "warn", f"{share}, {coverage:.1%} of the training text", "train a head with a larger draft vocabulary"
        )
    return Finding(name, "ok", f"{share}, {coverage:.1%} of the training text")


def check_rope(case: Case) -> Finding:
    """The base of the rotation, which everyone takes for 10000 where it is missing."""
    name = "rope-theta"
    if case.settings is None or case.config is None:
        return Finding(name, "unknown", "cannot be seen before config.json can be read", "fix that first")
    theta, given = case.config.rope.theta, case.settings.rope_theta_given
    theirs = _target_theta(case)
    if not given:
        if theirs == 10000:
            return Finding(name, "ok", "missing, which everyone takes for 10000, as the target has it")
        return Finding(
            name,
            "warn",
            "missing: everyone takes 10000"
            + (f", the target has {theirs:g}" if theirs is not None else "")
            + ". Right for a head of EAGLE's own trainer, which ignored the target's; wrong for most others",
            "add the `rope_theta` that it was trained with to config.json",
        )
    if theirs is None:
        return Finding(name, "unknown", f"{theta:g}; the target's is not known", _GIVE_TARGET)
    own_type, their_rope = case.config.rope.type, case.target.model if case.target is not None else None
    if theta != theirs:
        return Finding(
            name,
            "warn",
            f"{theta:g}, the target has {theirs:g}: right only if the head was trained with it",
            "compare acceptance with the target's `rope_theta` in the head's config.json",
        )
    if their_rope is not None and their_rope.rope.type != own_type:
        return Finding(
            name,
            "warn",
            f"{theta:g} as the target, but rotation of type {own_type!r}, the target's is {their_rope.rope.type!r}: "
            f"right only if the head was trained with it",
            "compare acceptance with the target's `rope_scaling` in the head's config.json",
        )
    return Finding(name, "ok", f"{theta:g}, as the target")


def check_positions(case: Case) -> Finding:
    """A head made for short texts fails on long ones."""
    name = "max-positions"
    if case.config is None:
        return Finding(name, "unknown", "cannot be seen before config.json can be read", "fix that first")
    own = case.config.max_position_embeddings
    theirs = case.target.config.get("max_position_embeddings") if case.target is not None else None
    if not isinstance(theirs, int):
        return Finding(name, "unknown", f"{own} tokens; the target's are not known", _GIVE_TARGET)
    if own < theirs:
        return Finding(
            name,
            "warn",
            f"{own} tokens, the target has {theirs}: engines that size their tables by it fail on longer prompts",
            f"set `max_position_embeddings` to {theirs} in the head's config.json, and expect worse guesses there",
        )
    return Finding(name, "ok", f"{own} tokens, the target has {theirs}")


def check_embedding(case: Case) -> Finding:
    """A head with an embedding of its own: SGLang takes the target's all the same."""
    name = "embedding"
    if case.names is None:
        return Finding(name, "unknown", "cannot be seen before the weights can be read", "fix those first")
    found = case.tensor(EMBEDDING)
    if found is None:
        return Finding(name, "ok", "none in the file: the target's is used")
    if case.settings is not None and case.settings.own_embedding:
        return _own_embedding("config.json says so")
    if case.target is None:
        return Finding(name, "unknown", "the file has a copy of the target's, or one of its own", _GIVE_TARGET)
    try:
        with open_weights(case.target.folder) as files:
            key = next((key for key in _EMBEDDINGS if key in files), None)
            if key is None:
                return Finding(name, "unknown", "the target's embedding was not found in its files", "")
            same = same_matrix(found, files.get(key))
    except DraftwingError as error:
        return Finding(name, "unknown", f"the target's weights cannot be read: {error}", "")
    return Finding(name, "ok", "a copy of the target's") if same else _own_embedding("it is not the target's")


def _own_embedding(why: str) -> Finding:
    return Finding(
        "embedding",
        "warn",
        f"an embedding of its own ({why}): Draftwing, vLLM and EAGLE's own code use it, SGLang takes the target's",
        "serve it with one of those that use it, or remove embed_tokens.weight if it is a stale copy of the target's",
    )


def _own_target(case: Case) -> Mapping[str, Any] | None:
    block = case.settings.block if case.settings is not None else None
    return None if block is None or block.target is None else vars(block.target)


def _size(case: Case, key: str) -> object:
    return None if case.settings is None else case.settings.shape.get(key)


def _same_number(case: Case, name: str, key: str, own: object) -> Finding:
    """Is the head's ``own`` size, called ``key`` in its config, the target's?"""
    if own is None:
        return Finding(name, "unknown", f"the head's config.json has no `{key}`", "see config")
    if case.target is None:
        return Finding(name, "unknown", f"{key} {own}; the target's is not known", _GIVE_TARGET)
    theirs = case.target.id.vocab_size if key == "vocab_size" else case.target.id.hidden_size
    if own != theirs:
        return Finding(name, "fail", f"{key} {own}, the target has {theirs}", _OTHER)
    return Finding(name, "ok", f"{key} {own}, as the target")


def _target_theta(case: Case) -> float | None:
    if case.target is None:
        return None
    if case.target.model is not None:
        return case.target.model.rope.theta
    tables = [case.target.config, case.target.config.get("rope_parameters")]
    found = [table["rope_theta"] for table in tables if isinstance(table, Mapping) and "rope_theta" in table]
    return float(found[0]) if found and isinstance(found[0], int | float) else None


def _eos_ids(config: Mapping[str, Any]) -> list[int]:
    eos = config.get("eos_token_id")
    return [token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int)]


# What is wrong with a head, before it is blamed on speculative decoding.
#
# A head that does not fit still decodes the same text, only slowly: nothing ever says that its taps are off by one or
# that its map holds ids. Each check here is one such trap, met in heads that people published.


CHECKS: tuple[Callable[[Case], Finding], ...] = (
    check_config,
    check_weights,
    check_missing,
    check_unknown,
    check_shape,
    check_finite_numbers,
    check_taps,
    check_draft_map,
    check_coverage,
    check_rope,
    check_positions,
    check_layers,
    check_bias,
    check_attention_bias,
    check_residual,
    check_lm_head,
    check_hidden_size,
    check_num_layers,
    check_vocabulary,
    check_chat_template,
    check_embedding,
)


def diagnose(head_folder: Path, target_folder: Path | None = None) -> list[Finding]:
    """Look at a head from every side, in any layout, and with its target from both.

    Nothing about the head raises: a folder that cannot be read is a finding.

    Args:
        target_folder: of the model that the head is to draft for; without it half of the checks are ``unknown``.

    Raises:
        CheckpointError, ConfigError, TokenizerError: the target's folder cannot be read.
    """
    target = None if target_folder is None else look_at_target(Path(target_folder))
    case = examine(Path(head_folder), target)
    return [check(case) for check in CHECKS]
