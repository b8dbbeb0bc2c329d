"""Compare the token ids of a GGUF file's tokenizer with those of llama.cpp, string by string.

    python benchmarks/peers/tokenizer_gguf.py model.gguf --python other-venv/bin/python --text src/draftwing/*.py

Strings are cut from the given files or generated: chat, emoji, spaces, special tokens, numbers, any Unicode. With
``--pre`` the file's vocabulary is read again under the names of other pre-tokenizers, and with ``--sentencepiece`` like
a SentencePiece one, which also covers tokenizers without an available file. llama.cpp may be installed in another
environment, whose Python ``--python`` names.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = [
    "the",
    "quick",
    "Brown",
    "FOX",
    "can't",
    "won't",
    "I'LL",
    "they've",
    "self.items[0]",
    "x_1",
    "naïve",
    "Straße",
    "привет",
    "мир",
    "東京",
    "서울",
    "مرحبا",
]
SPACES = (
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    "\u00a0",
    "\u2003",
    "\u3000",
    "\u200b",
    " \n ",
    "\t\t",
    "\v",
    "\f",
)
EMOJI = ("😀", "👍🏽", "👨‍👩‍👧‍👦", "🇫🇷", "❤️", "1️⃣", "🏴‍☠️", "✨", "→", "√2", "…", "—", "“q”")
NUMBERS = ("0", "7", "42", "123", "1234", "12345678901", "3.14159", "1,000,000", "0x1F", "1e-5", "٣٤", "½", "²", "Ⅷ")
BLOCKS = (
    (0x20, 0x7F),
    (0xA0, 0x250),
    (0x300, 0x530),
    (0x590, 0x700),
    (0x900, 0xE80),
    (0x1E00, 0x2200),
    (0x3040, 0x3100),
)
BLOCKS += (
    (0x4E00, 0x9FA0),
    (0xAC00, 0xD7A4),
    (0xE000, 0xE100),
    (0xFB00, 0xFE00),
    (0x1F300, 0x1FA00),
    (0x20000, 0x20100),
)


def strings(count: int, seed: int, texts: list[str], special: list[str]) -> list[tuple[str, str]]:
    """Return (kind, text) pairs."""
    random_ = random.Random(seed)
    pick = random_.choice

    def mixed(*parts: Any) -> str:
        return "".join(pick(pick(parts)) for _ in range(random_.randint(1, 24)))

    def cut() -> str:
        text = pick(texts)
        start = random_.randrange(max(1, len(text) - 10))
        return text[start : start + random_.randint(1, 400)]

    def chat() -> str:
        turns = [f"{pick(special)}{pick(('user', 'assistant', 'system'))}\n{mixed(WORDS, SPACES)}" for _ in range(3)]
        return f"{pick(special)}\n".join(turns)

    def any_unicode() -> str:
        return "".join(chr(random_.randrange(*pick(BLOCKS))) for _ in range(random_.randint(1, 40)))

    kinds: dict[str, Callable[[], str]] = {
        "emoji": lambda: mixed(EMOJI, WORDS, (" ", "")),
        "spaces": lambda: mixed(SPACES, SPACES, WORDS),
        "numbers": lambda: mixed(NUMBERS, (" ", ",", "-", "")),
        "words": lambda: mixed(WORDS, (" ",), (".", ", ", "'s", "'S ", "'", "!?")),
        "unicode": any_unicode,
    }
    if texts:
        kinds["files"] = cut
    if special:
        kinds["chat"] = chat
        kinds["special"] = lambda: mixed(special, special, WORDS, SPACES)
    found = []
    for index in range(count):
        kind = list(kinds)[index % len(kinds)]
        found.append((kind, kinds[kind]() or " "))
    return found


def variant(source: Path, out: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Write a GGUF file without tensors, with changed metadata of a file."""
    import gguf

    reader = gguf.GGUFReader(source)
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    types = {key: field.types for key, field in reader.fields.items()}
    before = dict(values)
    change(values)
    writer = gguf.GGUFWriter(out, values.pop("general.architecture"))
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif key in types and before.get(key) == value:
            writer.add_key_value(key, value, types[key][0])
        else:
            kind = gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.UINT32
            writer.add_key_value(key, value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return out


def as_sentence_piece(values: dict[str, Any]) -> None:
    """Convert a byte-level vocabulary to SentencePiece: the tokens that are text, in order, and one for each byte."""
    from tokenizers.decoders import ByteLevel

    decode = ByteLevel().decode
    texts = [decode([token]).replace(" ", "\u2581") for token in values["tokenizer.ggml.tokens"]]
    kinds = values["tokenizer.ggml.token_type"]
    control = [text for text, kind in zip(texts, kinds, strict=True) if kind == 3]
    normal = [text for text, kind in zip(texts, kinds, strict=True) if kind == 1 and "\ufffd" not in text]
    first = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = list(dict.fromkeys([*first, *bytes_, *control, "\u2581", *normal]))
    values["tokenizer.ggml.model"] = "llama"
    values["tokenizer.ggml.tokens"] = tokens
    values["tokenizer.ggml.scores"] = [-float(index) for index in range(len(tokens))]
    special = dict.fromkeys(bytes_, 6) | dict.fromkeys(control, 3) | {"<unk>": 2, "<s>": 3, "</s>": 3}
    values["tokenizer.ggml.token_type"] = [special.get(token, 1) for token in tokens]
    for name, index in (("unknown", 0), ("bos", 1), ("eos", 2), ("padding", 0)):
        values[f"tokenizer.ggml.{name}_token_id"] = index
    for key in ("tokenizer.ggml.merges", "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.add_bos_token"):
        values.pop(key, None)
    values["llama.vocab_size"] = len(tokens)


def compare(file: Path, python: str, count: int, seed: int, texts: list[str]) -> dict[str, Any]:
    """Return the differences between the two tokenizers of one file."""
    from tokenizers import Tokenizer

    from draftwing.formats.gguf import open_file
    from draftwing.formats.gguf_tokenizer import end_ids, tokenizer_json

    opened = open_file(file)
    try:
        tokens = opened.metadata.texts("tokenizer.ggml.tokens")
        types = opened.metadata.numbers("tokenizer.ggml.token_type", "iu", len(tokens)) or []
        ours = Tokenizer.from_str(tokenizer_json(opened.metadata, len(tokens)))
        ends = sorted(end_ids(opened.metadata))
    finally:
        opened.close()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind in (3, 4)]
    asked = strings(count, seed, texts, special)
    theirs = json.loads(
        subprocess.run(
            [python, __file__, "--worker", str(file)],
            input=json.dumps([text for _, text in asked]),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    total: Counter[str] = Counter()
    differ: Counter[str] = Counter()
    shown = []
    for (kind, text), (raw, full) in zip(asked, theirs["ids"], strict=True):
        total[kind] += 1
        mine = (ours.encode(text, add_special_tokens=False).ids, ours.encode(text).ids)
        if mine != (raw, full):
            differ[kind] += 1
            pairs = enumerate(zip(mine[1], full, strict=False))
            at = next((at for at, (a, b) in pairs if a != b), min(len(mine[1]), len(full)))
            shown.append({"text": text, "at": at, "ours": mine[1][at : at + 8], "llama.cpp": full[at : at + 8]})
    return {
        "strings": sum(total.values()),
        "different": sum(differ.values()),
        "by_kind": {kind: {"strings": number, "different": differ[kind]} for kind, number in sorted(total.items())},
        "end_ids": {"ours": ends, "llama.cpp": theirs["ends"]},
        "differences": shown[:5],
        "llama_cpp_python": theirs["version"],
    }


def worker(file: str) -> None:
    """Read a list of strings; print llama.cpp's ids of each, without and with leading special tokens."""
    import ctypes
    from importlib.metadata import version

    import llama_cpp

    model = llama_cpp.Llama(file, vocab_only=True, verbose=False)
    ids = [
        [model.tokenize(text.encode(), add_bos=full, special=True) for full in (False, True)]
        for text in json.load(sys.stdin)
    ]
    vocab = llama_cpp.llama_model_get_vocab(model.model)
    ends = [i for i in range(model.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, ctypes.c_int32(i))]
    print(json.dumps({"ids": ids, "ends": ends, "version": version("llama_cpp_python")}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--strings", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="files to cut strings out of")
    parser.add_argument("--python", default=sys.executable, help="of an environment with llama-cpp-python")
    parser.add_argument("--pre", nargs="*", default=[], help="other pre-tokenizers to read the vocabulary with; or all")
    parser.add_argument("--sentencepiece", action="store_true")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    from draftwing.formats.gguf_tokenizer import SPLITS

    texts = [path.read_text(encoding="utf-8") for path in options.text]
    files: dict[str, Callable[[dict[str, Any]], None] | None] = {"as it is": None}
    for name in SPLITS if options.pre == ["all"] else options.pre:
        files[f"pre {name}"] = lambda values, name=name: values.update({"tokenizer.ggml.pre": name})
    if options.sentencepiece:
        files["sentencepiece"] = as_sentence_piece
    result: dict[str, Any] = {"file": options.file.name, "seed": options.seed, "read": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, change in files.items():
            file = options.file if change is None else variant(options.file, Path(folder) / "variant.gguf", change)
            found = compare(file, options.python, options.strings, options.seed, texts)
            result["read"][name] = found
            print(f"{name}: {found['different']} of {found['strings']} differ {found['by_kind']}", file=sys.stderr)
    text = re.sub(r"\[[\d,\s]*\]", lambda ids: " ".join(ids[0].split()), json.dumps(result, indent=1)) + "\n"
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2])
    else:
        main()
