"""How byte-level tokenizers cut text into words before they merge: by the names that GGUF files have for it.

A file says only the name (``tokenizer.ggml.pre``). What it stands for is in the tokenizer.json of the models that
are called so, and in llama.cpp: patterns that are applied one after the other, each to the pieces that the former one
left.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Final

from draftwing.errors import ConfigError, DraftwingWarning, TokenizerError, shown
from draftwing.formats.gguf import Metadata

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_NUMBER = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str) -> str:
    """Llama 3's way, which many follow; they differ in how many digits are one word."""
    return rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(digits: str, endings: str) -> str:
    """Words begin anew where small letters are followed by a capital one."""
    return (
        rf"{_BEFORE}{_UPPER}*{_LOWER}+{endings}|{_BEFORE}{_UPPER}+{_LOWER}*{endings}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


@dataclass(frozen=True)
class Split:
    """``patterns`` in their order; ``whole``: a word that is a token is one, whatever merges say.

    ``bos``: the begin token stands in front unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False


DEFAULT: Final = Split(
    (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
)
_LLAMA3 = Split((_words(r"\p{N}{1,3}"),), whole=True, bos=True)
_LIKE_LLAMA3 = Split((_words(r"\p{N}{1,3}"),))
_QWEN2 = Split((_words(_NUMBER),))
_STARCODER = Split((_NUMBER, _GPT2))
_PLAIN = Split((_GPT2,))
_GPT4O = Split((_cased(r"\p{N}{1,3}", f"{_ENDINGS}?"),))
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK = Split(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)

SPLITS: Final[dict[str, Split]] = {
    "default": DEFAULT,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _LIKE_LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo"), _QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _STARCODER),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "gigachat", "granite-docling"), _PLAIN),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
    "tekken": Split((_cased(_NUMBER, ""),), whole=True, bos=True),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _NUMBER)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK),
    "seed-coder": Split((rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "viking": Split((" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", _NUMBER)),
}


def split_of(name: str, where: str) -> Split:
    """What a name stands for; errors begin with ``where``.

    Raises:
        TokenizerError: an unknown name.
    """
    if name not in SPLITS:
        raise TokenizerError(
            f"{where}: the pre-tokenizer {name!r:.42} (`tokenizer.ggml.pre`) is not supported; expected one of "
            f"{', '.join(SPLITS)}. Use the model's Hugging Face folder instead."
        )
    return SPLITS[name]


# A GGUF file's tokenizer as ``tokenizer.json`` and ``tokenizer_config.json``, which all else here reads.
#
# Two kinds are read: byte-level BPE (``gpt2``), whose merges are in the file, and SentencePiece (``llama``), whose
# merges follow from the tokens' scores. Ids are llama.cpp's (``benchmarks/peers/tokenizer_gguf.py`` compares them).


_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4
_KEY = "tokenizer.ggml."
_NONE = 2**32 - 1  # how a missing token is written
_MOST = 1 << 20  # tokens: real vocabularies have some hundred thousand
_LONGEST = 1 << 12  # bytes of a token: real ones have some hundreds
_LONGEST_PIECE = 256  # characters of a SentencePiece token that is put together from others
_SPACE = "\u2581"
_ADVICE = "Download the file again, or convert the model again."

# Tokens that end a turn or a text, by their usual names: models have several, and a file can name three.
_ENDS: Final = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "</s>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)


def _tokens(data: Metadata) -> list[str]:
    try:
        tokens = data.texts(f"{_KEY}tokens", longest=_LONGEST)
    except ConfigError as error:
        raise TokenizerError(str(error)) from None
    if len(tokens) > _MOST:
        raise TokenizerError(f"{data.where}: expected at most {_MOST} tokens, found {len(tokens)}. {_ADVICE}")
    if len(set(tokens)) < len(tokens):
        seen: dict[str, int] = {}
        for index, token in enumerate(tokens):
            first = seen.setdefault(token, index)
            if first != index:
                raise TokenizerError(f"{data.where}: tokens {first} and {index} are both {shown(token)}. {_ADVICE}")
    return tokens


def _types(data: Metadata, tokens: list[str]) -> list[int]:
    """Each token's type; a token that ends a turn is a control token whatever the file says."""
    types = data.numbers(f"{_KEY}token_type", "iu", len(tokens)) or [_NORMAL] * len(tokens)
    ids = {token: index for index, token in enumerate(tokens)}
    for token in _ENDS:
        if token in ids:
            types[ids[token]] = _CONTROL
    return types


def _special(data: Metadata, name: str, count: int) -> int | None:
    key = f"{_KEY}{name}_token_id"
    if key not in data or data.pairs[key] == _NONE:
        return None
    found = data.integer(key)
    if found >= count:
        raise TokenizerError(f"{data.where}: `{key}` must be below the {count} tokens, found {found}. {_ADVICE}")
    return found


def end_ids(data: Metadata) -> list[int]:
    """The tokens that end a text, the file's own first.

    Raises:
        TokenizerError: no tokens, two alike, or an id beyond them.
        ConfigError: metadata of another type.
    """
    tokens = _tokens(data)
    found = [_special(data, name, len(tokens)) for name in ("eos", "eot", "eom")]
    ids = {token: index for index, token in enumerate(tokens)}
    named = [ids.get(token) for token in _ENDS]
    return list(dict.fromkeys(token for token in (*found, *named) if token is not None))


def tokenizer_json(data: Metadata, size: int) -> str:
    """The text of ``tokenizer.json`` for a model with ``size`` embeddings.

    Raises:
        TokenizerError: no tokenizer, one of another kind, or one whose parts do not fit.
        ConfigError: metadata of another type.
    """
    tokens = _tokens(data)
    if len(tokens) > size:
        raise TokenizerError(f"{data.where}: {len(tokens)} tokens for {size} embeddings. {_ADVICE}")
    kind = data.text(f"{_KEY}model", "none")
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(
            f"{data.where}: tokenizers of the kind {kind!r:.42} are not supported; expected gpt2 (byte-level BPE) or "
            "llama (SentencePiece). Use the model's Hugging Face folder instead."
        )
    types = _types(data, tokens)
    try:
        built = _byte_level(data, tokens) if kind == "gpt2" else _sentence_piece(data, tokens)
        _add_special(built, data, tokens, types)
        return str(built.to_str())
    except (TokenizerError, ConfigError):
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise TokenizerError(f"{data.where}: its tokens and merges make no tokenizer ({error}). {_ADVICE}") from error


def tokenizer_config(data: Metadata, positions: int) -> dict[str, Any]:
    """What ``tokenizer_config.json`` says: special tokens and the chat template.

    Raises:
        TokenizerError, ConfigError: as ``tokenizer_json``.
    """
    tokens = _tokens(data)
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": positions,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = _special(data, key, len(tokens))
        if token is not None:
            found[f"{name}_token"] = tokens[token]
    if "tokenizer.chat_template" in data:
        found["chat_template"] = data.text("tokenizer.chat_template")
    return found


def _split(data: Metadata) -> Split:
    name = data.text(f"{_KEY}pre", "")
    if not name and data.text("general.architecture", "").startswith("qwen"):
        name = "qwen2"  # files from before there was such a name
    if name:
        return split_of(name, data.where)
    warnings.warn(
        f"{data.where}: the file does not say how its tokenizer cuts text into words (`tokenizer.ggml.pre`): it is cut "
        "by llama.cpp's default, which may not be the model's own. Convert the model again.",
        DraftwingWarning,
        stacklevel=2,
    )
    return DEFAULT


def _byte_level(data: Metadata, tokens: list[str]) -> Any:
    """Byte-level BPE: text is cut into words, each is spelled in bytes, and merged."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    split, merges = _split(data), []
    for merge in data.texts(f"{_KEY}merges", longest=2 * _LONGEST + 1):
        middle = merge.find(" ", 1)
        if middle < 0:
            raise TokenizerError(f"{data.where}: a merge must be two tokens, found {shown(merge)}. {_ADVICE}")
        merges.append((merge[:middle], merge[middle + 1 :]))
    vocab = {token: index for index, token in enumerate(tokens)}
    built = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    built.decoder = decoders.ByteLevel()
    return built


def _sentence_piece(data: Metadata, tokens: list[str]) -> Any:
    """SentencePiece: the whole text is one word; neighbours that make a token are merged, the best score first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = data.numbers(f"{_KEY}scores", "f", len(tokens))
    if scores is None or any(score != score for score in scores):
        raise TokenizerError(f"{data.where}: a SentencePiece tokenizer needs a score for each token. {_ADVICE}")
    vocab = {token: index for index, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token) if len(token) <= _LONGEST_PIECE else 0):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                found.append((-score, left, right))
    found.sort()
    merges = [(tokens[left], tokens[right]) for _, left, right in found]
    unknown = _special(data, "unknown", len(tokens))
    built = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = data.flag(f"{_KEY}add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    built.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    ends = [decoders.Strip(" ", 1, 0)] if prefixed else []
    built.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return built


def _add_special(built: Any, data: Metadata, tokens: list[str], types: list[int]) -> None:
    """Tokens that are found in the text before anything else, and those that go in front of and behind it."""
    from tokenizers import AddedToken, processors

    # Phi-3's swallow the spaces behind them. Files do not say so; llama.cpp knows it by the model's name.
    name = data.text("general.name", "").lower()
    keep = set(tokens) if "phi-3" not in name and "phi3" not in name else {"<unk>", "<s>", "<|endoftext|>"}
    special: list[Any] = []
    plain: list[Any] = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_UNKNOWN, _CONTROL, _USER) and token:
            added = AddedToken(token, special=kind != _USER, normalized=False, rstrip=token not in keep)
            (plain if kind == _USER else special).append(added)
    built.add_special_tokens(special)
    built.add_tokens(plain)
    by_default = True if data.text(f"{_KEY}model") == "llama" else _split_bos(data)
    around = []
    for side, default in (("bos", by_default), ("eos", False)):
        found = _special(data, side, len(tokens)) if data.flag(f"{_KEY}add_{side}_token", default) else None
        around.append(None if found is None else (tokens[found], found))
    if any(around):
        before, after = around
        built.post_processor = processors.TemplateProcessing(
            single=[*([before[0]] if before else []), "$A", *([after[0]] if after else [])],
            pair=[*([before[0]] if before else []), "$A", "$B", *([after[0]] if after else [])],
            special_tokens=[each for each in around if each],
        )


def _split_bos(data: Metadata) -> bool:
    name = data.text(f"{_KEY}pre", "")
    return bool(name) and split_of(name, data.where).bos
