"""What can be wrong between a head and its target, one function for each trap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftwing.errors import DraftwingError
from draftwing.gguf.source import open_weights
from draftwing.heads.doctor.case import Case, Finding
from draftwing.heads.identity import chat_template_hash, has_tokenizer
from draftwing.heads.names import EMBEDDING
from draftwing.heads.read import same_matrix
from draftwing.heads.vocab import read_draft_vocab
from draftwing.text.tokenizer import Tokenizer

__all__ = [
    "check_chat_template",
    "check_coverage",
    "check_embedding",
    "check_hidden_size",
    "check_num_layers",
    "check_positions",
    "check_rope",
    "check_vocabulary",
]

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
