"""Draft models whose tokenizer is not the target's: translated texts, and the same output as without drafts."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

import draftwing as dw
from conftest import TEXTS, add_tokenizer, build, check_engine, refused
from draftwing.errors import ConfigError, DraftwingWarning, TokenizerError
from draftwing.lab.machine import describe_lm
from draftwing.loading import load_drafter, load_target
from draftwing.methods.registry import diagnose
from draftwing.models.resolve import resolve
from draftwing.text.tokenizer import Tokenizer
from draftwing.text.translate import DraftText, Pieces, Translation

WORDS = ["the quick brown fox jumps over lazy dogs and the 12 quiet foxes, é ü ñ", *TEXTS]
STORIES = (
    "the quick brown fox",
    " leading space, then  two\n\n\nlines\t",
    "emoji 😀👍🏽 and e\u0301 combined, 日本語",
    "quickquick brownbrown dogs",
    "x",
)


def add_sentencepiece(folder, vocab_size=330):
    """A tokenizer like Llama 2's: spaces as ▁, one before every text, and bytes for characters that it lacks."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=names))
    learned = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in learned["merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE(learned["vocab"], merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    made = {}
    for name, texts in (("small", TEXTS), ("words", WORDS)):
        folder = add_tokenizer(tmp_path_factory.mktemp(name), 290 if name == "small" else 400, texts)
        made[name] = Pieces(Tokenizer(folder))
    made["spm"] = Pieces(Tokenizer(add_sentencepiece(tmp_path_factory.mktemp("spm"))))
    return made


PAIRS = [("small", "words"), ("words", "small"), ("words", "spm"), ("spm", "words"), ("spm", "spm")]


def said(one, ids):
    """The text of ids, without the space that a tokenizer puts before it."""
    return b"".join(map(one.of, ids))[one.puts_space :]


# --- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_text_that_grows_is_encoded_like_a_whole_one(pieces, ours, theirs):
    """In whatever pieces the target writes a text, the draft model reads all of it, as its tokenizer would."""
    target, draft, rng = pieces[ours], pieces[theirs], random.Random(0)
    for story in STORIES:
        tokens = target.tokenizer.encode(story)
        text, whole = DraftText(Translation(target, draft)), DraftText(Translation(target, draft))
        whole.extend_to(tokens)
        at = 0
        while at < len(tokens):
            at = min(at + rng.randint(1, 3), len(tokens))
            text.extend_to(tokens[:at])
            assert said(draft, text.ids) == said(target, tokens[:at])
        assert text.ids == whole.ids == draft.tokenizer.encode(story)


def test_ids_that_did_not_change_are_known(pieces):
    text = DraftText(Translation(pieces["small"], pieces["words"]))
    tokens = pieces["small"].tokenizer.encode("over the quick brown dogs and the quick brown fox")
    text.extend_to(tokens[:-3])
    text.settle()
    before = list(text.ids)
    text.extend_to(tokens)
    assert len(before) - 8 < text.num_stable <= len(before)
    assert text.ids[: text.num_stable] == before[: text.num_stable]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_drafts_are_encoded_as_the_target_would_go_on(pieces, ours, theirs):
    target, draft = pieces[ours], pieces[theirs]
    translation = Translation(target, draft)
    for story in STORIES:
        tokens = target.tokenizer.encode(story)
        for at in range(1, len(tokens)):
            text = DraftText(translation)
            text.extend_to(tokens[:at])
            rest = b"".join(map(target.of, tokens[at:]))
            if (future := draft.encode(rest)) is None:  # it begins inside a character
                future = draft.spell(rest)
            found, counts = translation.to_target(translation.tail(tokens[:at]), future)
            assert found == tokens[at:]
            assert counts == sorted(counts)
            assert counts[-1] == len(future)


def test_what_cannot_be_encoded_drafts_nothing(pieces):
    translation = Translation(pieces["words"], pieces["small"])
    half = pieces["small"].spell("😀".encode()[:2])
    assert translation.to_target(b"the", half) == ([], [])
    assert translation.to_target(b"the", []) == ([], [])
    text = DraftText(translation)
    text.extend_to(pieces["words"].spell(b"\xff\xf0\x9f"))  # never a character
    assert text.ids
    text.extend_to([*pieces["words"].spell(b"\xff\xf0\x9f"), *pieces["words"].encode(b" the fox")])
    assert b"".join(map(pieces["small"].of, text.ids)).endswith(b" the fox")


def test_special_tokens_are_matched_by_name_and_role(tmp_path):
    folders = [add_tokenizer(tmp_path / name) for name in ("one", "other") if (tmp_path / name).mkdir() is None]
    data = json.loads((folders[1] / "tokenizer.json").read_text())
    for token in data["added_tokens"]:
        token["content"] = {"</s>": "<end>"}.get(token["content"], token["content"])
    data["model"]["vocab"]["<end>"] = data["model"]["vocab"].pop("</s>")
    data["added_tokens"].append({**data["added_tokens"][0], "id": 300, "content": "<|turn|>"})
    (folders[1] / "tokenizer.json").write_text(json.dumps(data))
    (folders[1] / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<end>"}))
    ours, theirs = (Pieces(Tokenizer(folder)) for folder in folders)
    there, back = Translation(ours, theirs), Translation(theirs, ours)
    assert there.is_one_to_one
    assert there.to_draft[:3] == [0, 1, 2]
    assert back.to_draft[300] == -1
    text = DraftText(back)
    text.extend_to([1, 300, 70, 300, 71, 2])
    assert text.ids == [1, *ours.encode(theirs.of(70)), *ours.encode(theirs.of(71)), 2]
    assert there.to_target(b"a", [*theirs.encode(b"b"), 2]) == ([*ours.encode(b"b"), 2], [1, 2])
    assert there.to_target(b"a", [*theirs.encode(b"b"), 300]) == (ours.encode(b"b"), [1])


# --- drafts ----------------------------------------------------------------------------------------------------------


def renumbered(source, folder, extra=0):
    """A copy of a model with its tokens in another order, and with tokens that no text has."""
    shutil.copytree(source, folder)
    data = json.loads((folder / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    size = len(vocab)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0)).tolist()
    data["model"]["vocab"] = {name: order[token] for name, token in vocab.items()}
    data["model"]["vocab"].update({f"\u0120unheard{number}": size + number for number in range(extra)})
    for token in data["added_tokens"]:
        token["id"] = order[token["id"]]
    for token in data["post_processor"]["special_tokens"].values() if data["post_processor"] else ():
        token["ids"] = [order[one] for one in token["ids"]]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    config = json.loads((folder / "config.json").read_text())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config[name] = order[config[name]]
    weights, rows = load_file(folder / "model.safetensors"), torch.tensor(order).argsort()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            padding = weights[name][:1].expand(extra, -1) * 0.01
            weights[name] = torch.cat([weights[name][rows], weights[name][size:], padding])
            config["vocab_size"] = len(weights[name])
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random model, the same one in another order, and one of another tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")
    for name, texts, size in (("target", TEXTS, 300), ("other", WORDS, 340)):
        build("llama", vocab_size=size).save_pretrained(root / name)
        add_tokenizer(root / name, size, texts)
    renumbered(root / "target", root / "renumbered")
    return root


@pytest.mark.parametrize("budget", [dw.Budget(3), dw.Budget(paths=((0,), (1,), (0, 0), (0, 0, 0)))])
def test_the_same_tokens_under_other_ids_are_all_accepted(folders, budget):
    sampling = {"max_tokens": 33, "seed": 3, "ignore_eos": True}
    plain, lm = (
        dw.load(folders / "target", draft, dtype="float64", budget=budget) for draft in ("none", folders / "renumbered")
    )
    for temperature in (0.0, 1.0):
        expected = plain.generate([[1, 70, 80]], temperature=temperature, **sampling)[0]
        result = lm.generate([[1, 70, 80]], temperature=temperature, **sampling)[0]
        assert result.token_ids == expected.token_ids
        assert result.stats.num_forwards == 9  # one token, then four in every step


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The toy model with more tokens than the target, so that its drafts pass through text."""
    return renumbered(resolve("toy"), tmp_path_factory.mktemp("toy") / "draft", extra=100)


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 4.5), (1.0, 3.6)])
def test_a_model_drafts_for_its_twin_through_text(toy, temperature, least):
    prompts = ["def area(", "import os\n", "text = '😀 é"]
    sampling = {"max_tokens": 40, "temperature": temperature, "seed": 3, "ignore_eos": True}
    expected = [one.token_ids for one in dw.load("toy", "none").generate(prompts, **sampling)]
    with pytest.warns(DraftwingWarning, match=r"another tokenizer than the target \(token .* for the draft"):
        lm = dw.load("toy", toy, budget=dw.Budget(4))
    for budget in (None, dw.Budget(4, 3, 12)):
        results = lm.generate(prompts, speculation=budget, max_batch=2, **sampling)
        assert [one.token_ids for one in results] == expected
        assert sum(one.tau for one in results) / 3 > least  # a draft of 4 and the bonus make 5
    assert describe_lm(lm)["drafter"]["tokenizer"].startswith("another")


@pytest.mark.filterwarnings("ignore:draft model .* has another tokenizer")
def test_any_tokenizer_drafts_wherever_another_draft_does(folders):
    """Random models write random bytes: halves of characters, special tokens and words that no tokenizer makes."""
    prompts = [[1, 70, 80], [1, *range(60, 100)], [5]]
    sampling = {"max_tokens": 16, "temperature": 1.0, "seed": 3, "ignore_eos": True, "top_p": 0.95}
    expected = [one.token_ids for one in dw.load(folders / "target", "none").generate(prompts, **sampling)]
    lm = dw.load(folders / "target", f"{folders / 'other'}+lookup", budget=dw.Budget(3, 2, 5))
    assert [one.token_ids for one in lm.generate(prompts, max_batch=2, **sampling)] == expected


@pytest.mark.filterwarnings("ignore:draft model .* has another tokenizer")
def test_a_draft_model_of_another_tokenizer_shares_the_memory(folders):
    """Its rows may be longer than the target's: some are then not drafted for, and all texts are the same."""
    short = Pieces(Tokenizer(folders / "target")).ids[b"pen"]  # the draft model needs three tokens
    prompts = [[1, *[short] * 70], [1, *range(60, 100)], [5]]
    sampling = {"max_tokens": 16, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    plain, lm = (dw.load(folders / "target", draft, budget=dw.Budget(3)) for draft in ("none", folders / "other"))
    expected = [one.token_ids for one in plain.generate(prompts, **sampling)]
    alone = plain.engine(kv_memory=2**22).decoder.pages.num_page_bytes
    pages = lm.engine(kv_memory=2**22).decoder.pages
    assert alone < pages.num_page_bytes
    assert pages.num_pages < 2**22 / pages.num_page_bytes
    drafted = []
    for num_blocks in (7, 40):
        engine = lm.engine(kv_memory=num_blocks * pages.num_page_bytes)
        for _ in range(2):
            requests = [engine.submit(prompt, dw.Sampling(**sampling)) for prompt in prompts]
            engine.run()
            check_engine(engine)
            assert [request.token_ids for request in requests] == expected
        drafted.append(requests[0].stats.num_drafted)
    assert drafted[0] < drafted[1]


@pytest.mark.filterwarnings("ignore:draft model .* has another tokenizer")
def test_what_needs_a_q_names_match(folders):
    with refused(ConfigError, "rule 'speculative'", "another tokenizer", "use rule='match'"):
        dw.load(folders / "target", folders / "other", rule="speculative", budget=dw.Budget(3))
    with refused(ConfigError, "rule 'block'", "use rule='match'"):
        dw.load(folders / "target", f"{folders / 'other'}+lookup", rule="block", budget=dw.Budget(3))
    with refused(TokenizerError, "vocabulary of 340, the target 300"):  # nothing says how its tokens are written
        load_drafter(folders / "other", load_target(folders / "target"), None)()
    renumbered = dw.load(folders / "target", folders / "renumbered", rule="speculative", budget=dw.Budget(3))
    assert renumbered.generate([[1, 70]], max_tokens=20, temperature=1.0, seed=1, ignore_eos=True)[0].tau > 2


def test_doctor_says_so(folders):
    findings = {one.name: one for one in diagnose(folders / "other", folders / "target")}
    assert findings["target"].status == "warn"
    assert "another tokenizer than the target's" in findings["target"].detail
