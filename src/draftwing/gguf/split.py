"""How byte-level tokenizers cut text into words before they merge: by the names that GGUF files have for it.

A file says only the name (``tokenizer.ggml.pre``). What it stands for is in the tokenizer.json of the models that
are called so, and in llama.cpp: patterns that are applied one after the other, each to the pieces that the former one
left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from draftwing.errors import TokenizerError

__all__ = ["DEFAULT", "SPLITS", "Split", "split_of"]

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
