"""Turn a GGUF file's tokenizer into ``tokenizer.json`` and ``tokenizer_config.json``.

Three kinds are supported: byte-level BPE (``gpt2``), whose merges are in the file, SentencePiece (``llama``), whose
merges follow from the tokens' scores, and Gemma 4's, which is SentencePiece's with merges in the file. Ids are
llama.cpp's (compared by ``benchmarks/peers/tokenizer_gguf.py``).

A byte-level tokenizer first cuts text into words. The file holds only the name of the patterns
(``tokenizer.ggml.pre``); the patterns themselves are from llama.cpp and the tokenizer.json of such models.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Final

from draftwing.errors import ConfigError, DraftwingWarning, TokenizerError, shown
from draftwing.formats.gguf import ADVICE, Metadata

NO_TOKEN = 2**32 - 1  # the id that files give to a missing token
_CONTROL_TYPES, _CONTROL, _USER_DEFINED = (2, 3), 3, 4  # 2: unknown
_KEY = "tokenizer.ggml."
_MAX_TOKENS = 1 << 20  # real vocabularies have some hundred thousand
_MAX_TOKEN_BYTES = 1 << 12  # real tokens have some hundreds
_MAX_MERGED_CHARS = 256  # longer SentencePiece tokens are never the result of a merge
_SPACE = "\u2581"

# The usual names of tokens that end a turn or a text: models have several, and a file can name three.
_END_TOKENS: Final = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "</s>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)


_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_NUMBER = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str) -> str:
    """Return Llama 3's pattern, which many models share except for the number of digits in a word."""
    return rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(digits: str, endings: str) -> str:
    """Return a pattern that also starts a word at a capital letter after a small one."""
    return (
        rf"{_BEFORE}{_UPPER}*{_LOWER}+{endings}|{_BEFORE}{_UPPER}+{_LOWER}*{endings}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


@dataclass(frozen=True)
class Split:
    """How a pre-tokenizer cuts text into words."""

    patterns: tuple[str, ...]  # applied one after the other, each to the pieces that the one before left
    ignore_merges: bool = False  # a word that is a token becomes that token without merges
    add_bos: bool = False  # the text starts with the BOS token unless the file says otherwise


_LLAMA3 = Split((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_LIKE_LLAMA3 = Split((_words(r"\p{N}{1,3}"),))
_QWEN2 = Split((_words(_NUMBER),))
_STARCODER = Split((_NUMBER, _GPT2))
_GPT2_ONLY = Split((_GPT2,))
_GPT4O = Split((_cased(r"\p{N}{1,3}", f"{_ENDINGS}?"),))
# Letters with case that DeepSeek-V2's first pattern leaves out: Armenian, Georgian, mathematical ones and others.
_UNCASED = (
    "\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    "\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001d7cb\U0001df00-\U0001df1e"
)
_QWEN35 = Split((rf"{_ENDINGS}|{_BEFORE}[\p{{L}}\p{{M}}]+|{_NUMBER}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",))
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
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _LIKE_LLAMA3),
    "glm4": Split(_LIKE_LLAMA3.patterns, ignore_merges=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _STARCODER),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "gigachat", "granite-docling", "exaone4"), _GPT2_ONLY
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
    "tekken": Split((_cased(_NUMBER, ""),), ignore_merges=True, add_bos=True),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _NUMBER)),
    "deepseek-llm": Split(
        (
            r"[\r\n]",
            rf"\s?(?:(?![{_UNCASED}])[\p{{Lu}}\p{{Ll}}\p{{Lt}}])+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK),
    "seed-coder": Split((rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "viking": Split((" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", _NUMBER)),
}


def get_split(name: str, where: str) -> Split:
    """Return the patterns for a name. Raises TokenizerError, starting with ``where``, for an unknown one."""
    if name not in SPLITS:
        raise TokenizerError(
            f"{where}: the pre-tokenizer {name!r:.42} (`tokenizer.ggml.pre`) is not supported; expected one of "
            f"{', '.join(SPLITS)}. Use the model's Hugging Face folder instead."
        )
    return SPLITS[name]


def _read_tokens(data: Metadata) -> dict[str, int]:
    """Return the ids of all tokens, in order."""
    try:
        tokens = data.texts(f"{_KEY}tokens", max_bytes=_MAX_TOKEN_BYTES)
    except ConfigError as error:
        raise TokenizerError(str(error)) from None
    if len(tokens) > _MAX_TOKENS:
        raise TokenizerError(f"{data.where}: expected at most {_MAX_TOKENS} tokens, found {len(tokens)}. {ADVICE}")
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        first = ids.setdefault(token, index)
        if first != index:
            raise TokenizerError(f"{data.where}: tokens {first} and {index} are both {shown(token)}. {ADVICE}")
    return ids


def special_id(data: Metadata, name: str, count: int = NO_TOKEN) -> int | None:
    """Return the id of the token with this role, below ``count``; None if there is none."""
    key = f"{_KEY}{name}_token_id"
    token = data.integer(key, NO_TOKEN, maximum=NO_TOKEN)
    if token == NO_TOKEN:
        return None
    if token >= count:
        raise TokenizerError(f"{data.where}: `{key}` must be below the {count} tokens, found {token}. {ADVICE}")
    return token


def end_ids(data: Metadata) -> list[int]:
    """Return the ids of the tokens that end a text: those that the file names, then those with a usual name."""
    ids = _read_tokens(data)
    ends = [special_id(data, name, len(ids)) for name in ("eos", "eot", "eom")]
    ends += [ids.get(token) for token in _END_TOKENS]
    return list(dict.fromkeys(token for token in ends if token is not None))


def tokenizer_json(data: Metadata, size: int) -> str:
    """Return the text of ``tokenizer.json`` for a model with ``size`` embeddings."""
    ids = _read_tokens(data)
    if len(ids) > size:
        raise TokenizerError(f"{data.where}: {len(ids)} tokens for {size} embeddings. {ADVICE}")
    kind = data.text(f"{_KEY}model", "none")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise TokenizerError(
            f"{data.where}: tokenizers of the kind {kind!r:.42} are not supported; expected gpt2 (byte-level BPE), "
            "llama (SentencePiece) or gemma4. Use the model's Hugging Face folder instead."
        )
    try:
        make = {"gpt2": _byte_level, "llama": _sentence_piece, "gemma4": _gemma4}[kind]
        tokenizer = make(data, ids)
        _add_special_tokens(tokenizer, data, ids)
        return str(tokenizer.to_str())
    except (TokenizerError, ConfigError):
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise TokenizerError(f"{data.where}: its tokens and merges make no tokenizer ({error}). {ADVICE}") from error


def tokenizer_config(data: Metadata, positions: int) -> dict[str, Any]:
    """Return ``tokenizer_config.json``: special tokens and the chat template."""
    tokens = list(_read_tokens(data))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": positions,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = special_id(data, key, len(tokens))
        if token is not None:
            config[f"{name}_token"] = tokens[token]
    if "tokenizer.chat_template" in data:
        config["chat_template"] = data.text("tokenizer.chat_template")
    return config


def _byte_level(data: Metadata, ids: dict[str, int]) -> Any:
    """Return a byte-level BPE: text is cut into words, each is spelled in bytes, and merged."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = data.text(f"{_KEY}pre", "")
    if not name and data.text("general.architecture", "").startswith("qwen"):
        name = "qwen2"  # old files lack the name
    if not name:
        warnings.warn(
            f"{data.where}: the file does not name its pre-tokenizer (`tokenizer.ggml.pre`): llama.cpp's default is "
            "used, which may not be the model's own. Convert the model again.",
            DraftwingWarning,
            stacklevel=2,
        )
    split = get_split(name or "default", data.where)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=_merges(data), ignore_merges=split.ignore_merges))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(data: Metadata) -> list[tuple[str, str]]:
    """Return the merges that the file has."""
    merges = []
    for merge in data.texts(f"{_KEY}merges", max_bytes=2 * _MAX_TOKEN_BYTES + 1):
        middle = merge.find(" ", 1)
        if middle < 0:
            raise TokenizerError(f"{data.where}: a merge must be two tokens, found {shown(merge)}. {ADVICE}")
        merges.append((merge[:middle], merge[middle + 1 :]))
    return merges


def _sentence_piece(data: Metadata, ids: dict[str, int]) -> Any:
    """Return a SentencePiece BPE: the text is one word; adjacent pieces that form a token are merged, best first."""
    tokens = list(ids)
    scores = data.numbers(f"{_KEY}scores", "f", len(tokens))
    if scores is None or any(score != score for score in scores):
        raise TokenizerError(f"{data.where}: a SentencePiece tokenizer needs a score for each token. {ADVICE}")
    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token) if len(token) <= _MAX_MERGED_CHARS else 0):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-score, left, right))
    merges = [(tokens[left], tokens[right]) for _, left, right in sorted(ranked)]
    return _one_word(data, ids, merges, prefixed=data.flag(f"{_KEY}add_space_prefix", True))


def _gemma4(data: Metadata, ids: dict[str, int]) -> Any:
    return _one_word(data, ids, _merges(data), prefixed=False)


def _one_word(data: Metadata, ids: dict[str, int], merges: list[tuple[str, str]], *, prefixed: bool) -> Any:
    """Return a BPE of a text whose spaces are characters, and whose unknown characters are bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = special_id(data, "unknown", len(ids))
    unknown_token = None if unknown is None else [*ids][unknown]
    tokenizer = Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def _add_special_tokens(tokenizer: Any, data: Metadata, ids: dict[str, int]) -> None:
    """Add the tokens that are matched in the text before anything else, and those put before and after a text."""
    from tokenizers import AddedToken, processors

    tokens = list(ids)
    types = data.numbers(f"{_KEY}token_type", "iu", len(tokens)) or [1] * len(tokens)
    for token in _END_TOKENS:  # control tokens even if the file calls them ordinary
        if token in ids:
            types[ids[token]] = _CONTROL
    # Phi-3's control tokens swallow the spaces behind them. llama.cpp, too, recognises it by the model's name.
    name = data.text("general.name", "").lower()
    keep_spaces = set(tokens) if "phi-3" not in name and "phi3" not in name else {"<unk>", "<s>", "<|endoftext|>"}
    added: dict[bool, list[Any]] = {True: [], False: []}
    for token, kind in zip(tokens, types, strict=True):
        if kind in (*_CONTROL_TYPES, _USER_DEFINED) and token:
            special = kind != _USER_DEFINED
            added[special].append(AddedToken(token, special=special, normalized=False, rstrip=token not in keep_spaces))
    tokenizer.add_special_tokens(added[True])
    tokenizer.add_tokens(added[False])
    split = data.text(f"{_KEY}pre", "")
    kind = data.text(f"{_KEY}model")
    add_bos = kind == "llama" or bool(split and get_split(split, data.where).add_bos)
    around: dict[str, list[str]] = {}
    for side, default in (("bos", add_bos), ("eos", False)):
        adds = data.flag(f"{_KEY}add_{side}_token", default) or (side == "bos" and kind == "gemma4")
        token_id = special_id(data, side, len(tokens)) if adds else None
        around[side] = [] if token_id is None else [tokens[token_id]]
    first, last = around["bos"], around["eos"]
    if first or last:
        special_tokens = [(token, ids[token]) for token in (*first, *last)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], pair=[*first, "$A", "$B", *last], special_tokens=special_tokens
        )
