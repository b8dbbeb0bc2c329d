"""A GGUF file's tokenizer: text to ids as the tokenizer that it was made from, words cut as its name says."""

import json
import shutil
from itertools import pairwise

import gguf
import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from typer.testing import CliRunner

from conftest import add_tokenizer, refused
from draftwing.cli import main as cli
from draftwing.errors import DraftwingWarning, TokenizerError
from draftwing.formats.gguf import open_file
from draftwing.formats.gguf_folder import folder_files, open_gguf
from draftwing.formats.gguf_tokenizer import SPLITS, get_split
from draftwing.models.catalogue import CATALOGUE
from draftwing.text.tokenizer import Tokenizer
from gguf_files import add_byte_level, write

SPACE = "\u2581"
PROMPTS = ["def add(a, b):\n    return a", "  row 12345  ", "naïve 東京 😀", "a\r\n\tb", "<s>for row in rows</s>", "'s"]


@pytest.fixture(scope="module")
def source(folder_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "source"
    return add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=300), folder))


def file_with(path, **settings):
    """A file without tensors whose tokenizer's settings are these."""
    writer = gguf.GGUFWriter(path, settings.pop("architecture", "llama"))
    writer.add_name(settings.pop("name", "model"))
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for key, value in settings.items():
        add[type(value)](f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def tokenizer_of(path, size=10**6):
    from tokenizers import Tokenizer as Fast

    from draftwing.formats.gguf_tokenizer import tokenizer_json

    file = open_file(path)
    try:
        return Fast.from_str(tokenizer_json(file.metadata, size))
    finally:
        file.close()


LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(path, tokens=(), kinds=(), merges=(), **settings):
    """Every byte is a token; more tokens go behind them, and one that a merge needs."""
    return file_with(
        path,
        model="gpt2",
        tokens=[*LETTERS, *tokens, "zz"],
        token_type=[1] * len(LETTERS) + list(kinds or [1] * len(tokens)) + [1],
        merges=[*merges, "z z"],
        **{"pre": "gpt-2", **settings},
    )


def pieces(path, added=(), **settings):
    """A SentencePiece vocabulary: bytes, letters, some words with scores, and tokens that the user added."""
    words = {"he": -3.0, "el": -1.0, "ll": -2.0, "lo": -2.5, "hel": -5.0, "ello": -6.0, "hello": -7.0, "llo": -4.0}
    words |= {f"{SPACE}w": -3.2, "wo": -3.5, "or": -6.5, f"{SPACE}wor": -7.5, "rl": -5.5, f"{SPACE}hello": -8.0}
    letters = {letter: -20.0 - index for index, letter in enumerate(f"{SPACE}helowrd ".replace(" ", ""))}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words, "<|user|>", *added]
    scores = [0.0] * 259 + [*letters.values(), *words.values(), *[-1000.0] * (1 + len(added))]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(letters) + len(words)), 3, *[4] * len(added)]
    return file_with(
        path,
        tokens=tokens,
        scores=scores,
        token_type=kinds,
        **{"model": "llama", "unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **settings},
    )


def test_ids_and_text_are_the_checkpoints(source, tmp_path):
    ours, theirs = Tokenizer(open_gguf(write(source, tmp_path / "m.gguf"))), Tokenizer(source)
    for prompt in PROMPTS:
        assert ours.encode(prompt) == theirs.encode(prompt)
        assert ours.decode(ours.encode(prompt)) == theirs.decode(theirs.encode(prompt))
    assert ours.fast.get_vocab_size() == 300


def test_the_chat_template_and_the_tokens_that_it_names(source, tmp_path):
    folder = open_gguf(write(source, tmp_path / "m.gguf"))
    tokenizer = Tokenizer(folder)
    assert tokenizer.has_chat_template
    ids = tokenizer.encode_chat([{"role": "user", "content": "row"}])
    assert tokenizer.decode(ids) == "user: row\n"
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")
    assert all(theirs(prompt).input_ids == tokenizer.encode(prompt) for prompt in PROMPTS)


def test_tokens_that_end_a_text(tmp_path):
    path = byte_level(
        tmp_path / "m.gguf",
        ["<|start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>"],
        [3, 1, 3, 3],
        bos_token_id=256,
        eos_token_id=257,
        eot_token_id=259,
    )
    from draftwing.formats.gguf_tokenizer import end_ids

    file = open_file(path)
    assert end_ids(file.metadata) == [257, 259, 258]
    file.close()
    # The one that is called ordinary is special all the same: else text could not be told from the end of it.
    fast = tokenizer_of(path)
    assert fast.encode("a<|im_end|>").ids == [LETTERS.index("a"), 257]
    assert fast.decode([LETTERS.index("a"), 257, 258]) == "a"


def test_control_tokens_are_not_shown_and_the_users_own_are(tmp_path):
    fast = tokenizer_of(byte_level(tmp_path / "m.gguf", ["<|x|>", "<think>", "<unused>"], [3, 4, 5]))
    ids = fast.encode("a<|x|><think>b<unused>").ids
    assert ids[:4] == [LETTERS.index("a"), 256, 257, LETTERS.index("b")]
    assert 258 not in ids
    assert fast.decode(ids) == "a<think>b<unused>"


@pytest.mark.parametrize(
    ("pre", "settings", "expected"),
    [
        ("gpt-2", {}, []),
        ("gpt-2", {"add_bos_token": True}, [256]),
        ("llama-bpe", {}, [256]),
        ("llama-bpe", {"add_bos_token": False}, []),
        ("tekken", {}, [256]),
    ],
)
def test_the_begin_token_stands_in_front_where_the_file_says_so(tmp_path, pre, settings, expected):
    path = byte_level(tmp_path / "m.gguf", ["<s>"], [3], pre=pre, bos_token_id=256, **settings)
    fast = tokenizer_of(path)
    assert fast.encode("a").ids == [*expected, LETTERS.index("a")]
    assert fast.encode("a", add_special_tokens=False).ids == [LETTERS.index("a")]


def test_an_end_token_behind(tmp_path):
    path = byte_level(tmp_path / "m.gguf", ["</s>"], [3], eos_token_id=256, add_eos_token=True)
    assert tokenizer_of(path).encode("a").ids == [LETTERS.index("a"), 256]


def test_a_word_that_is_a_token_needs_no_merges_where_the_model_says_so(tmp_path):
    for pre, expected in (("llama-bpe", [257]), ("glm4", [257]), ("qwen2", [256, LETTERS.index("c")])):
        path = byte_level(tmp_path / "m.gguf", ["ab", "abc"], merges=["a b"], pre=pre, add_bos_token=False)
        assert tokenizer_of(path).encode("abc").ids == expected


# What the tokenizer.json of such models cuts: one for each pattern.
CUT = {
    "gpt-2": ["I", "'ll", " pay", " 1234", " $", "  ", " (", "now", ")", "\n\n"],
    "smollm": ["I", "'ll", " pay", " ", "1", "2", "3", "4", " $", "  ", " (", "now", ")", "\n\n"],
    "llama-bpe": ["I", "'ll", " pay", " ", "123", "4", " $", "  ", " (", "now", ")\n\n"],
    "qwen2": ["I", "'ll", " pay", " ", "1", "2", "3", "4", " $", "  ", " (", "now", ")\n\n"],
    "tekken": ["I", "'ll", " pay", " ", "1", "2", "3", "4", " $", "  ", " (", "now", ")\n\n"],
    "gpt-4o": ["I'll", " pay", " ", "123", "4", " $", "  ", " (", "now", ")\n\n"],
    "falcon": ["I", "'", "ll", " pay", " ", "123", "4", " ", "$", "   ", "(", "now", ")", "\n\n"],
    "default": ["I", "'", "ll", " pay", " ", "123", "4", " ", "$", "   ", "(", "now", ")", "\n\n"],
    "deepseek-coder": ["I", "'", "ll", " pay", " ", "1", "2", "3", "4", " $  ", " (", "now", ")", "\n", "\n"],
    "deepseek-v3": ["I", "'ll", " pay", " ", "123", "4", " $", "  ", " (", "now", ")\n\n"],
    "deepseek-llm": ["I", "'", "ll", " pay", " ", "1234", " $", "  ", " (", "now", ")", "\n", "\n"],
    "qwen35": ["I", "'ll", " pay", " ", "1", "2", "3", "4", " $", "  ", " (", "now", ")\n\n"],
}


def cut(name, text):
    patterns = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in get_split(name, "here").patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(patterns).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", CUT)
def test_words_are_cut_as_the_name_says(name):
    assert cut(name, "I'll pay 1234 $   (now)\n\n") == CUT[name]


def test_marks_and_other_alphabets():
    assert cut("qwen35", "\u0939\u093f\u0928") == ["\u0939\u093f\u0928"]  # a mark is a part of a word
    assert cut("qwen2", "\u0939\u093f\u0928") == ["\u0939", "\u093f\u0928"]
    assert cut("qwen35", "\u0561\u0416") == ["\u0561\u0416"]
    assert cut("deepseek-llm", "\u0561\u0416") == ["\u0561", "\u0416"]  # Armenian letters are none for DeepSeek-V2


def test_gemma4_has_merges_in_the_file_and_spaces_that_are_characters(tmp_path):
    path = pieces(tmp_path / "m.gguf", model="gemma4", merges=[f"{SPACE} w", "l o", "l lo", "h e"])
    fast = tokenizer_of(path)
    assert fast.encode("hello w\u00e9").tokens == ["<s>", "he", "llo", f"{SPACE}w", "<0xC3>", "<0xA9>"]
    assert fast.decode(fast.encode("hello  w\u00e9").ids) == "hello  w\u00e9"


def test_capitals_begin_a_word():
    assert cut("gpt-4o", "parseHTTPHeader") == ["parse", "HTTPHeader"]
    assert cut("llama-bpe", "parseHTTPHeader") == ["parseHTTPHeader"]


@pytest.mark.parametrize("name", SPLITS)
@settings(max_examples=12, deadline=None)
@given(text=st.text(max_size=60))
def test_no_character_is_lost(name, text):
    assert "".join(cut(name, text)) == text


def test_a_file_that_does_not_say_how_words_are_cut(tmp_path):
    path = byte_level(tmp_path / "m.gguf", pre="")
    with pytest.warns(DraftwingWarning, match=r"m\.gguf.*tokenizer\.ggml\.pre"):
        assert len(tokenizer_of(path).encode("1 2").ids) == 3
    path = byte_level(tmp_path / "m.gguf", ["12"], merges=["1 2"], pre="", architecture="qwen2")
    assert len(tokenizer_of(path).encode("12").ids) == 2  # digits stand alone
    with refused(TokenizerError, "'klingon'", "llama-bpe"):
        tokenizer_of(byte_level(tmp_path / "m.gguf", pre="klingon"))


def best_first(text, tokens, scores):
    """SentencePiece as it is defined: of neighbours that make a token, the best score first, the leftmost of equals."""
    known = {token: (score, index) for index, (token, score) in enumerate(zip(tokens, scores, strict=True))}
    parts = list(text)
    while True:
        pairs = [(known[a + b][0], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in known]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    bytes_ = {byte: known[f"<0x{byte:02X}>"][1] for byte in range(256)}
    return [i for part in parts for i in ([known[part][1]] if part in known else [bytes_[b] for b in part.encode()])]


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="helowrd 東\n", min_size=1, max_size=20))
@example(text="hello world")
@example(text="hellohello wor world\n\n")
def test_sentence_piece_merges_the_best_first(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "pieces.gguf"
    if not path.exists():
        pieces(path)
    file = open_file(path)
    tokens = file.metadata.texts("tokenizer.ggml.tokens")
    scores = file.metadata.numbers("tokenizer.ggml.scores", "f", len(tokens))
    file.close()
    fast = tokenizer_of(path)
    expected = best_first(SPACE + text.replace(" ", SPACE), tokens, scores)
    assert fast.encode(text).ids == [1, *expected]
    assert fast.decode(expected) == text


def test_the_space_in_front(tmp_path):
    fast = tokenizer_of(pieces(tmp_path / "m.gguf"))
    word = fast.encode("wor", add_special_tokens=False).ids
    user = fast.token_to_id("<|user|>")
    assert word == [fast.token_to_id(f"{SPACE}wor")]
    assert fast.encode("<|user|>wor").ids == [1, user, *word]
    without = tokenizer_of(pieces(tmp_path / "m.gguf", add_space_prefix=False, add_bos_token=False))
    assert without.encode("wor").ids == [without.token_to_id("wo"), without.token_to_id("r")]
    assert without.decode(without.encode(" wor").ids) == " wor"


def test_gemmas_runs_of_spaces_are_tokens(tmp_path):
    """The converter writes the spaces of such tokens as they are in a text, unlike those of all others."""
    fast = tokenizer_of(pieces(tmp_path / "m.gguf", ["  ", "   ", "\n\n"], add_space_prefix=False, add_bos_token=False))
    for text, tokens in (("he  lo\n\n", ["he", "  ", "lo", "\n\n"]), ("   wor", ["   ", "wo", "r"])):
        ids = fast.encode(text).ids
        assert ids == [fast.token_to_id(token) for token in tokens]
        assert fast.decode(ids) == text


def test_phi3s_special_tokens_swallow_the_spaces_behind_them(tmp_path):
    for name, spaces in (("Phi 3 mini", True), ("phi-3-mini", False), ("Phi3", False)):
        fast = tokenizer_of(pieces(tmp_path / "m.gguf", name=name, architecture="phi3"))
        alone, apart = fast.encode("<|user|>wor").ids, fast.encode("<|user|> \nwor").ids
        assert (alone != apart) == spaces
        assert fast.encode("<s> wor").ids != fast.encode("<s>wor").ids


def test_there_are_no_more_tokens_than_embeddings(source, tmp_path):
    path = write(source, tmp_path / "m.gguf")
    file = open_file(path)
    assert json.loads(folder_files(file)["config.json"])["vocab_size"] == 300
    file.close()
    writer = gguf.GGUFWriter(tmp_path / "n.gguf", "llama")
    add_byte_level(writer, source, 310)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with refused(TokenizerError, "310 tokens for 300 embeddings"):
        tokenizer_of(tmp_path / "n.gguf", 300)


def test_the_command_writes_a_folder_and_says_what(source, tmp_path):
    file, runner = write(source, tmp_path / "m.gguf", lambda name, weight: "F16"), CliRunner()
    done = runner.invoke(cli.app, ["import", str(file), str(tmp_path / "out"), "--dtype", "bfloat16", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["folder"] == str(tmp_path / "out")
    assert (found["dtype"], sum(found["formats"].values())) == ("bfloat16", found["tensors"])
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > found["num_bytes"]
    assert Tokenizer(tmp_path / "out").encode("row") == Tokenizer(source).encode("row")
    again = runner.invoke(cli.app, ["import", str(file), str(tmp_path / "out")])
    assert again.exit_code == 2
    assert "found something in it" in again.stderr
    plain = runner.invoke(cli.app, ["import", str(file), str(tmp_path / "other")])
    assert plain.exit_code == 0
    assert "float32" in plain.stderr


def test_the_command_takes_a_name(source, tmp_path, monkeypatch):
    (tmp_path / "kept").mkdir()
    write(source, tmp_path / "kept" / "model.gguf", lambda name, weight: "F16")
    monkeypatch.setitem(CATALOGUE, "named", CATALOGUE["toy"])
    monkeypatch.setattr("draftwing.models.resolve.resolve", lambda name: tmp_path / "kept")
    done = CliRunner().invoke(cli.app, ["import", "named", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "model.safetensors").exists()
    monkeypatch.undo()
    shipped = CliRunner().invoke(cli.app, ["import", "toy", str(tmp_path / "other")])
    assert shipped.exit_code == 2
    assert "is a folder already" in shipped.stderr
