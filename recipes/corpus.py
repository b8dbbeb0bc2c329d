"""The corpus of the demo models: the Python standard library's own source.

Nothing is downloaded. Files are held out *by name* (``held_out.txt``), so that a model trained here is
measured on files that it has never seen, and demo prompts are cut from those files alone.
"""

from __future__ import annotations

import hashlib
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
HELD_OUT = HERE / "held_out.txt"
BOS, EOS, PAD = "<s>", "</s>", "<pad>"

# Identifiers keep their underscores and take one leading mark (``.bar``, ``(self``): 7% fewer tokens than GPT-2's rule.
WORDS = r"[^\s\p{L}\p{N}_]?[\p{L}_]+| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"

# Tables written by a program, not by a person: a model learns nothing about Python from them.
GENERATED = ("encodings/", "pydoc_data/", "lib2to3/tests/data/", "test/encoded_modules/")


def source_files() -> list[tuple[str, Path]]:
    """Every hand-written ``.py`` file of the running interpreter as ``(name, path)``, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        parts = set(Path(name).parts)
        if parts & {"site-packages", "dist-packages", "__pycache__"} or name.startswith(GENERATED):
            continue
        if name.startswith("config-") or "/bad" in name or path.stat().st_size < 64:
            continue
        found.append((name, path))
    return sorted(found)


def read(path: Path) -> str | None:
    """The file's text with plain newlines; None where it is not UTF-8 (a few test files are not)."""
    try:
        return path.read_text(encoding="utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None


def choose_held_out(share: float = 0.025) -> list[str]:
    """The rule that wrote ``held_out.txt``: a hash of the name, so that nobody's taste enters."""
    limit = int(share * 2**32)
    return [n for n, _ in source_files() if int(hashlib.sha256(n.encode()).hexdigest()[:8], 16) < limit]


def held_out_names() -> set[str]:
    return set(HELD_OUT.read_text().split())


def documents(*, held_out: bool) -> Iterator[tuple[str, str]]:
    """``(name, text)`` of the training files, or of the held-out ones."""
    names = held_out_names()
    for name, path in source_files():
        if (name in names) == held_out:
            text = read(path)
            if text is not None:
                yield name, text


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE over the training files alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, text in documents(held_out=False)), trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, *, held_out: bool) -> np.ndarray:
    """All documents as one stream of ids, each closed by EOS. Shape (num_tokens,), uint16."""
    eos = tokenizer.token_to_id(EOS)
    ids: list[int] = []
    for _, text in documents(held_out=held_out):
        ids.extend(tokenizer.encode(text, add_special_tokens=False).ids)
        ids.append(eos)
    return np.asarray(ids, dtype=np.uint16)


def prompts(num: int, seed: int = 0) -> list[str]:
    """Beginnings cut from held-out files at the start of a definition's body: a few hundred characters each.

    Files take turns, so that one long file does not fill the list.
    """
    rng = random.Random(seed)
    piles: list[list[str]] = []
    for _, text in documents(held_out=True):
        lines = text.splitlines(keepends=True)
        cuts = [i for i, line in enumerate(lines) if re.match(r"\s*(async )?(def|class) ", line) and i >= 8]
        rng.shuffle(cuts)
        found = ["".join(lines[max(0, i - rng.randint(8, 24)) : i + 1]) for i in cuts]
        piles.append([each.rstrip("\n") for each in found if 200 <= len(each) <= 1600])
    chosen = []
    while len(chosen) < num and any(piles):
        for pile in piles:
            if pile and len(chosen) < num:
                chosen.append(pile.pop())
    return chosen
