"""Every kind of bad input: the class of the error, and a message that names the problem and the fix."""

import itertools
import json
import os
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import draftwing as dw
from conftest import SMALL, add_tokenizer, refused
from draftwing.accept import RULES
from draftwing.decode import Decoder
from draftwing.errors import (
    CheckpointError,
    ConfigError,
    DraftwingError,
    NumericsError,
    PromptError,
    SamplingError,
    TokenizerError,
    TreeError,
    UnsupportedError,
    shown,
)
from draftwing.loading import load_target
from draftwing.methods import registry
from draftwing.methods.base import Budget
from draftwing.methods.causal_lm import CausalLMDrafter
from draftwing.methods.lookup import LookupDrafter
from draftwing.models.lean import LeanTarget
from draftwing.sampling import Sampling
from draftwing.tree import DraftTree

VOCAB = SMALL["vocab_size"]
PROMPTS = ([5, 6, 9, 5, 6], [8, *range(20, 35)], [11, 12])


def id_of(value):
    """A test's id without addresses, so that all processes agree on it."""
    return re.sub(r" at 0x\w+", "", shown(value))


@pytest.fixture
def folder(folder_of, tmp_path):
    """A whole folder, to be damaged."""
    return add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=300), tmp_path / "model"))


@pytest.fixture(scope="module")
def target(folder_of):
    return LeanTarget.from_folder(folder_of("llama"), torch.float64, name="tiny")


def load(folder, *args, **options):
    return dw.load(folder, *args, **{"dtype": "float64", "device": "cpu", **options})


@pytest.fixture(scope="module")
def lm(folder_of, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "model"
    return load(add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=300), path)))


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def remove(name):
    return lambda folder: (folder / name).unlink()


def set_config(**changes):
    """Change keys of config.json; None removes one."""

    def change(folder):
        config = {**json.loads((folder / "config.json").read_text()), **changes}
        write("config.json", json.dumps({key: value for key, value in config.items() if value is not None}))(folder)

    return change


def change_weights(change):
    def damage(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return damage


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def fill_row(value):
    return change_weights(lambda weights: weights["model.layers.2.self_attn.k_proj.weight"][3].fill_(value))


# --- folders and weights ---------------------------------------------------------------------------------------------

NOT_FINITE = ("layers.2.self_attn.k_proj.weight", "32 of 512", "NaN or infinite", "Download")
NO_TOKENIZER = ("no tokenizer can be read", "put the model's tokenizer.json next to")
NO_TOKENS = ("the tokens that tokenizer_config.json", "adds cannot be read", "download these files again")
NO_SETTING = ("generation_config.json: `", "must be a number, found", "correct it, or download the file again")
NO_GENERATION_CONFIG = ("generation_config.json: expected", "JSON", "Download it again")
NO_EOS = ("`eos_token_id` must be a token id below 300", "found", "correct it, or download")
DEEP = '{"a":' * 100_000


def pipe(name):
    def replace(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return replace


def without_tokens(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"] |= {"vocab": {}, "merges": []}
    write("tokenizer.json", json.dumps({**tokenizer, "added_tokens": [], "post_processor": None}))(folder)


SPIRAL = {"rope_type": "spiral", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("damage", "error", "parts"),
    [
        (remove("config.json"), CheckpointError, ("expected config.json", "found none", "download the model again")),
        (write("config.json", "{"), ConfigError, ("config.json: expected JSON", "Download it again")),
        (write("config.json", "[1]"), ConfigError, ("expected a JSON object, found list", "Download it again")),
        (set_config(hidden_size=None), ConfigError, ("config.json: required key `hidden_size` is missing", "Add it")),
        (
            set_config(rope_parameters=SPIRAL),
            UnsupportedError,
            ('RoPE type "spiral"', "expected one of default, linear", 'engine="transformers"'),
        ),
        (
            set_config(quantization_config={"quant_method": "gptq", "bits": 4}),
            UnsupportedError,
            ("`quantization_config` is set", 'Use engine="transformers"'),
        ),
        (write("generation_config.json", "{"), CheckpointError, NO_GENERATION_CONFIG),
        (write("generation_config.json", "[2]"), CheckpointError, NO_GENERATION_CONFIG),
        (write("generation_config.json", '{"eos_token_id": "</s>"}'), CheckpointError, NO_EOS),
        (write("generation_config.json", '{"eos_token_id": [2, null]}'), CheckpointError, NO_EOS),
        (write("generation_config.json", '{"eos_token_id": {"id": 2}}'), CheckpointError, NO_EOS),
        (write("generation_config.json", '{"eos_token_id": true}'), CheckpointError, NO_EOS),
        (write("generation_config.json", '{"eos_token_id": [2, 300]}'), CheckpointError, NO_EOS),
        (set_config(eos_token_id=300), CheckpointError, ("config.json", *NO_EOS)),
        (write("config.json", DEEP), ConfigError, ("config.json: expected JSON", "nested too deep")),
        (write("generation_config.json", DEEP), CheckpointError, NO_GENERATION_CONFIG),
        (set_config(model_type=["llama"], architectures=None), CheckpointError, ("transformers cannot load",)),
        *(
            (pipe(name), CheckpointError, (f"{name} is not a regular file", "Check the file"))
            for name in ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")
        ),
        (without_tokens, TokenizerError, ("tokenizer.json: the tokenizer has no tokens", "download it again")),
        *(
            (write("tokenizer.json", content), TokenizerError, ("tokenizer.json: cannot be read (", "download it"))
            for content in ("{}", "", "{", DEEP)
        ),
        *(
            (write(name, "[1]"), TokenizerError, (f"{name}: expected a JSON object, found [1]", "download it again"))
            for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
        ),
        (write("added_tokens.json", '{"<x>": null, "<y>": 5}'), TokenizerError, NO_TOKENS),
        (write("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}'), TokenizerError, NO_TOKENS),
        (write("tokenizer_config.json", '{"added_tokens_decoder": [1]}'), TokenizerError, NO_TOKENS),
        (write("generation_config.json", '{"temperature": NaN}'), CheckpointError, NO_SETTING),
        (write("generation_config.json", '{"top_p": 1e999}'), CheckpointError, NO_SETTING),
        (write("generation_config.json", '{"top_k": "50"}'), CheckpointError, NO_SETTING),
        (write("generation_config.json", '{"min_p": true}'), CheckpointError, NO_SETTING),
        (
            remove("model.safetensors"),
            CheckpointError,
            ("expected model.safetensors", "found no weights", "download the model again"),
        ),
        (truncate, CheckpointError, ("model.safetensors", "truncated or corrupt", "Download it again")),
        (
            change_weights(lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight")),
            CheckpointError,
            ("weight model.layers.1.mlp.up_proj.weight is missing", "Download both again"),
        ),
        (
            set_config(intermediate_size=40),
            CheckpointError,
            ("mlp.", "must have shape (40, 32), found (48, 32)", "Download both again"),
        ),
        (
            change_weights(lambda weights: weights.update({"model.layers.7.extra.weight": torch.ones(2)})),
            CheckpointError,
            ("1 weights have no place in a llama model", "layers.7.extra", "is config.json that"),
        ),
        (fill_row(float("nan")), CheckpointError, NOT_FINITE),
        (fill_row(float("inf")), CheckpointError, NOT_FINITE),
        (remove("tokenizer.json"), TokenizerError, NO_TOKENIZER),
    ],
)
def test_damaged_folders(damage, error, parts, folder):
    damage(folder)
    with refused(error, *parts):
        load(folder)


def test_what_is_not_a_folder(folder, folder_of, tmp_path):
    for load_any in (load, load_target):
        with refused(CheckpointError, "nowhere: expected a model folder", "found no", "Check the path"):
            load_any(tmp_path / "nowhere")
    with refused(CheckpointError, "model.safetensors: expected a model folder, found a file", "Give the folder"):
        load(folder / "model.safetensors")
    with refused(CheckpointError, "some-org/some-model", "no such local folder", "switched off", "Unset it, or give"):
        load("some-org/some-model")
    with refused(UnsupportedError, "GPT2LMHeadModel is not supported", "expected one of", 'Use engine="transformers"'):
        load_target(folder_of("gpt2"), engine="lean")


# --- tokenizers and draft models -------------------------------------------------------------------------------------


def test_end_tokens_at_the_ends_of_the_vocabulary(folder):
    set_config(eos_token_id=[0, 299, -1])(folder)
    write("generation_config.json", '{"eos_token_id": -1}')(folder)
    assert load(folder).target.eos_ids == (0, 299)


def test_drafts_and_targets_that_are_pipes(folder, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    pipe("model.safetensors")(shutil.copytree(folder, tmp_path / "draft"))
    for arguments, part in (
        ((tmp_path / "pipe",), "found a pipe or a device"),
        ((folder, tmp_path / "pipe"), "found a pipe or a device"),
        ((folder, tmp_path / "draft"), "is not a regular file"),
    ):
        with refused(CheckpointError, part):
            load(*arguments)


def test_names_that_no_file_can_have(folder):
    for name in ("x" * 300, "y" * 100_000, "a+" + "b" * 300, "~nobody-of-this-name/x"):
        with refused(CheckpointError, "model folder"):
            load(folder, name)


@pytest.mark.parametrize("content", ["{", DEEP])
def test_tokenizer_config_that_is_no_json(folder, content):
    (folder / "tokenizer_config.json").write_text(content)
    with refused(TokenizerError, "tokenizer_config.json: not readable as JSON", "download it again"):
        load(folder)


def test_drafts_that_do_not_fit(folder, folder_of, tmp_path):
    large, gpt2 = tmp_path / "large", tmp_path / "gpt2"
    add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=310), large))
    assert load(folder, large) is not None  # the same tokenizer, and ten rows of padding
    add_tokenizer(shutil.copytree(folder_of("gpt2", vocab_size=300), gpt2))
    with refused(UnsupportedError, "is of type 'gpt2'", "must be one of ", "mimo, ministral", "or use draft='lookup'"):
        load(folder, gpt2)
    listed = shutil.copytree(folder, tmp_path / "listed")
    set_config(model_type=["llama"])(listed)
    with refused(UnsupportedError, "is of type ['llama']", "must be one of ", "mimo, ministral"):
        load(folder, listed)
    with refused(CheckpointError, "./draft: expected a model folder", "Check the path"):
        load(folder, "./draft")


# --- options of load -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"dtype": "int8"}, ("unknown dtype 'int8'", "choose one of float64, float32")),
        ({"engine": "warp"}, ("unknown engine 'warp'", "choose auto, lean or transformers")),
        ({"device": "nonsense"}, ("unknown device 'nonsense'", "use cpu or cuda")),
        ({"device": "meta"}, ("device 'meta'", "use cpu or cuda")),
        ({"rule": []}, ("unknown acceptance rule []", "choose one of match, match-top, speculative")),
        ({"rule": None}, ("unknown acceptance rule None", "choose one of match, match-top, speculative")),
        ({"rule": "none"}, ("unknown acceptance rule 'none'", "choose one of match, match-top, speculative")),
        ({"lossless": np.array([5, 6])}, ("lossless must be True or False, found array([5, 6])",)),
        ({"lossless": None}, ("lossless must be True or False, found None",)),
        ({"draft_options": 5}, ("draft_options must be a dict of options, found 5", "leave it out")),
        ({"draft_options": {5: 6}}, ("draft_options must be a dict of options, found {5: 6}", "leave it out")),
        ({"budget": 5}, ("budget must be a Budget or None, found 5", "write Budget(5) for chains of 5")),
        ({"revision": 5}, ("revision must be a branch, tag or commit, or None, found 5",)),
        ({"rule": "typical"}, ("'typical' changes what the target says", "pass lossless=False")),
        ({"rule": "block", "budget": Budget(3, 2)}, ("'block' takes chains, found width 2", "use width 1 or 'match'")),
    ],
)
def test_options_of_load(options, parts, folder):
    with refused(ConfigError, *parts):
        load(folder, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(folder):
    for device in ("cuda", "cuda:1"):
        with refused(ConfigError, f"device '{device}'", "no CUDA devices", "use device='cpu'"):
            load(folder, device=device)


@pytest.mark.parametrize(
    ("budget", "parts"),
    [
        ({"depth": -1}, ("needs depth from 0 to 1,024", "found depth -1")),
        ({"depth": 5000}, ("needs depth from 0 to 1,024", "found depth 5000")),
        ({"depth": 10**5000}, ("needs depth from 0 to 1,024", "found depth a value of type int")),
        ({"depth": 1.5}, ("depth must be an integer", "found 1.5")),
        ({"depth": "5"}, ("depth must be an integer", "found '5'")),
        ({"depth": True}, ("depth must be an integer", "found True")),
        ({"width": 0}, ("needs width from 1 to 256", "found width 0")),
        ({"depth": 3, "width": 60000, "nodes": 10}, ("needs width from 1 to 256", "found width 60000")),
        ({"depth": 1000, "width": 200, "nodes": 10}, ("may draft 4,096 nodes", "1000 times 200", "smaller")),
        ({"nodes": 0}, ("needs nodes from 1 to 4,096", "found nodes 0", "depth 0 drafts none")),
        ({"nodes": 2**31}, ("needs nodes from 1 to 4,096", "found nodes 2147483648")),
        ({"paths": 5}, ("a static tree is a list of 1 to 4,096 paths", "found 5")),
        ({"paths": ()}, ("a static tree is a list of 1 to 4,096 paths", "found 0 paths")),
        ({"paths": "ab"}, ("a static tree is a list of 1 to 4,096 paths", "found 'ab'")),
        ({"paths": [[0]] * 5000}, ("a static tree is a list of 1 to 4,096 paths", "found 5,000 paths")),
        ({"paths": [[True]]}, ("a path of a static tree is a list of 1 to 1,024 ranks", "found [True]")),
        ({"paths": [b"a"]}, ("a path of a static tree is a list of 1 to 1,024 ranks", "found b'a'")),
        ({"paths": [[99999999999]]}, ("ranks from 0 to 255", "found [99999999999]")),
        ({"paths": [[]]}, ("a path of a static tree is a list of 1 to 1,024 ranks", "found []")),
        ({"paths": [[0] * 5000]}, ("a path of a static tree is a list of 1 to 1,024 ranks", "found [0, 0")),
        ({"paths": [[0, 1]]}, ("each path's parent in its list", "found (0, 1)")),
        ({"paths": [[0], [0]]}, ("each of its paths once",)),
        ({"paths": [[0]], "nodes": 3}, ("give either paths or nodes",)),
        ({"rule": object()}, ("a budget's rule must be a GrowthRule or None, found <object object",)),
        ({"children": "many"}, ("children must be one of keyed, top, sampled, distinct", "found 'many'")),
        ({"children": ["top"]}, ("children must be one of", "found ['top']")),
    ],
    ids=lambda value: None if isinstance(value, tuple) else repr(list(value))[:40],
)
def test_budgets(budget, parts):
    with refused(ConfigError, *parts):
        Budget(**budget)


def test_budgets_at_their_limits():
    assert Budget(1024).depth == 1024
    assert Budget(16, 256, 4096).nodes == 4096
    assert Budget(paths=[[255], [255, 0]]) == Budget(paths=((255,), (255, 0)))
    assert Budget(paths=[[255], [255, 0]]).width == 256


# --- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("", ("the prompt is empty", "give some text")),
        ([1, 300], ("token id 300 is outside the vocabulary of 300", "another tokenizer?")),
        ([1, -1, 299], ("token id -1 is outside the vocabulary of 300", "another tokenizer?")),
        ([5] * 256, ("the prompt has 256 tokens", "room for 256 with at least one new token", "shorten it")),
        ("x" * 300, ("the prompt has 301 tokens", "room for 256 with at least one new token", "shorten it")),
        ([1, "x"], ("must be a text, token ids (ints) or messages, found str 'x'", "give ids")),
        ([1, 2.0], ("must be a text, token ids (ints) or messages, found float 2.0", "give ids")),
        (None, ("must be a text, token ids (ints) or messages, found NoneType None",)),
        ({5, 6}, ("must be a text, token ids (ints) or messages, found set",)),
        ("a\ud83d", ("invalid character U+D83D at position 1 of the prompt", "give valid text")),
        (b"ab", ("a prompt must be a text, found bytes", ".decode()")),
        (torch.tensor([[1, 2]]), ("must have one dimension, found 2 (Tensor)", "one row")),
        (torch.tensor([1.0, 2.0]), ("found float 1.0", "give ids")),
        ([1, float("nan")], ("found float nan", "give ids")),
        ([1, True], ("found bool True", "give ids")),
        ([1, 10**400], ("token id 1000", "is outside any vocabulary")),
        ([{"text": "x"}], ("message 1 of the prompt must have a role and a content", "found {'text': 'x'}")),
        ([{"role": "user", "content": "a\udcff"}], ("invalid character U+DCFF at position 1", "give valid text")),
        ([{"role": "user", "content": "x"}, "x"], ("found", "list of messages with role and content")),
    ],
    ids=id_of,
)
def test_prompts(prompt, parts, lm):
    for call, prompts in ((lm.generate, [prompt]), (lm.stream, prompt)):
        with refused(PromptError, *parts):
            list(call(prompts, max_tokens=2))


@pytest.mark.parametrize("prompts", [None, 5, b"ab", {"role": "user", "content": "x"}, [1.0, 2.0], [True], 1.5])
def test_what_is_no_list_of_prompts(prompts, lm):
    lone = ("found a lone dict", "put a message into a list") if isinstance(prompts, dict) else ()
    with refused(PromptError, "a prompt must be", *lone):
        lm.generate(prompts, max_tokens=2)
    with refused(PromptError, "a prompt must be"):
        list(lm.stream(prompts, max_tokens=2))


def test_prompts_as_arrays(lm):
    wanted = [each.token_ids for each in lm.generate([[5, 6, 9], [7, 8, 9]], max_tokens=3)]
    for ids in (torch.tensor([[5, 6, 9], [7, 8, 9]]), np.array([[5, 6, 9], [7, 8, 9]])):
        assert [each.token_ids for each in lm.generate(ids, max_tokens=3)] == wanted
        assert [each.token_ids for each in lm.generate(ids[0], max_tokens=3)] == wanted[:1]
        assert [each.token_ids for each in lm.generate(list(ids), max_tokens=3)] == wanted


def test_prompts_without_a_token(lm):
    empty = ("the prompt is empty", "give at least one token")
    for prompts in ([[]], [[1, 2], []]):
        with refused(PromptError, *empty):
            lm.generate(prompts)
    with refused(PromptError, *empty):
        next(lm.stream([]))


def test_messages(folder, lm):
    messages = [{"role": "user", "content": ""}]
    with refused(TokenizerError, "has no chat template", "prompt it with plain text"):
        lm.generate(messages)
    loaded = load(add_tokenizer(folder, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"))
    with refused(PromptError, "the prompt is empty", "give at least one token"):
        loaded.generate(messages)
    loaded = load(add_tokenizer(folder, chat_template="{{ raise_exception('no system role') }}"))
    with refused(TokenizerError, "the chat template refuses these messages", "no system role", "correct the template"):
        loaded.generate(messages)


@pytest.mark.parametrize(
    ("ids", "parts"),
    [
        ([True], ("token ids must be ints, found bool True", ".tolist()")),
        ([5, 1.5, 2.5], ("token ids must be ints, found float 1.5", ".tolist()")),
        ([np.int32(5)], ("token ids must be ints, found int32", ".tolist()")),
        (np.array([5]), ("must be a list of token ids, found ndarray", ".tolist()")),
        (torch.tensor([5]), ("must be a list of token ids, found Tensor", ".tolist()")),
        ("ab", ("must be a list of token ids, found str 'ab'", "encode a text first")),
        (b"ab", ("must be a list of token ids, found bytes b'ab'",)),
        (iter([5]), ("must be a list of token ids, found list_iterator",)),
        (None, ("must be a list of token ids, found NoneType None",)),
        (range(10**9), ("has room for 256 with at least one new token",)),
        ([10**400], ("token id 1000", "outside the vocabulary of 61")),
        ([61], ("token id 61 is outside the vocabulary of 61",)),
        ([5, -1], ("token id -1 is outside the vocabulary of 61",)),
    ],
    ids=id_of,
)
def test_prompts_that_are_no_token_ids(ids, parts, target):
    decoder = Decoder(target)
    for call in (decoder.admit, dw.Engine(decoder).submit):
        with refused(PromptError, *parts):
            call(ids, Sampling())
    assert decoder.num_running == 0


def test_prompts_of_every_kind_of_list(target):
    texts = []
    for ids in ([5, 6, 7], (5, 6, 7), range(5, 8), [0], [60]):
        engine = dw.Engine(Decoder(target))
        request = engine.submit(ids, Sampling(max_tokens=3))
        engine.run()
        texts.append(request.token_ids)
    assert texts[0] == texts[1] == texts[2]


# --- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"temperature": -0.1}, ("temperature must be 0 (greedy) or in [1e-10, 1e10]", "found -0.1")),
        ({"temperature": float("nan")}, ("temperature must be 0 (greedy) or in [1e-10, 1e10]", "found nan")),
        ({"temperature": None}, ("temperature must be a number", "found None")),
        ({"temperature": "hot"}, ("temperature must be a number", "found 'hot'")),
        ({"top_p": 0}, ("top_p must be in (0, 1]", "found 0")),
        ({"top_k": 0}, ("top_k must be None or at least 1", "found 0")),
        ({"max_tokens": 0}, ("max_tokens must be at least 1", "found 0")),
        ({"max_tokens": 2.5}, ("max_tokens must be an integer", "found 2.5")),
        ({"max_tokens": None}, ("max_tokens must be an integer", "found None")),
        ({"stop": ""}, ("stop must be without empty strings", "found ('',)")),
        ({"stop": ("a", "")}, ("stop must be without empty strings", "found ('a', '')")),
        ({"stop": None}, ("stop must be a list of strings, found None", "leave it out")),
        ({"stop": ["a", 3]}, ("stop must be a list of strings, found ['a', 3]", "leave it out")),
        ({"stop_tokens": "</s>"}, ("stop_tokens must be a list of token ids, found '</s>'", "leave it out")),
        ({"banned_tokens": 5}, ("banned_tokens must be a list of token ids, found 5", "leave it out")),
        ({"banned_tokens": (3, 300)}, ("banned_tokens: token id 300 is outside the target's vocabulary of 300",)),
        ({"stop_tokens": (-1,)}, ("stop_tokens: token id -1 is outside the target's vocabulary of 300",)),
        ({"temperature": 1e-40}, ("temperature must be 0 (greedy) or in [1e-10, 1e10]", "found 1e-40")),
        ({"temperature": True}, ("temperature must be a number", "found True")),
        ({"frequency_penalty": 10**400}, ("frequency_penalty must be in [-1e20, 1e20]", "found inf")),
        ({"top_k": True}, ("top_k must be an integer", "found True")),
        ({"ignore_eos": "no"}, ("ignore_eos must be True or False", "found 'no'")),
        ({"stop_tokens": b"ab"}, ("stop_tokens must be a list of token ids, found b'ab'",)),
        ({"stop_tokens": {5: 6}}, ("stop_tokens must be a list of token ids, found {5: 6}",)),
        ({"stop_tokens": [10**5000]}, ("stop_tokens: token id a value of type int is outside",)),
        ({"logit_bias": None}, ("logit_bias must be a dict of token ids to numbers", "found None", "leave it out")),
        ({"logit_bias": [1, 2]}, ("logit_bias must be a dict of token ids to numbers", "found [1, 2]")),
        ({"logit_bias": {"5": 1}}, ("logit_bias must have token ids (ints) as keys", "found '5'")),
        ({"logit_bias": {5: "x"}}, ("each value of logit_bias must be a number", "found 'x'")),
        ({"logit_bias": {5: 1e39}}, ("logit_bias must be in [-1e20, 1e20]", "found 1e+39 for token 5")),
        ({"logit_bias": {5: 10**400}}, ("logit_bias must be in [-1e20, 1e20]", "for token 5")),
        ({"logit_bias": {300: 1.0}}, ("logit_bias: token id 300 is outside the target's vocabulary of 300",)),
        ({"banned_tokens": range(300)}, ("banned_tokens bans all 300 tokens", "leave one out")),
        ({"banned_tokens": range(10**9)}, ("banned_tokens must be a list of token ids", "at most 1,048,576")),
        ({"stop_tokens": itertools.count()}, ("stop_tokens must be a list of token ids", "at most 1,048,576")),
        ({"max_tokens": 10**5000, "min_tokens": -1}, ("min_tokens must be in [0, max_tokens = a value of type int]",)),
    ],
    ids=id_of,
)
def test_sampling(options, parts, lm):
    with refused(SamplingError, *parts):
        lm.generate("x", **options)
    with refused(SamplingError, *parts):
        next(lm.stream("x", **options))


def test_options_of_generate(lm):
    with refused(ConfigError, "unknown sampling option 'temprature'", "the options are temperature, top_k"):
        lm.generate("x", temprature=1.0)
    for name in ("n", "max_batch"):
        for value in (0, -1, 1.0, True, "2", 65_537, 10**400):
            with refused(ConfigError, f"{name} must be at least 1, found", "at most 65,536"):
                lm.generate("x", **{name: value})
    assert len(lm.generate([5], max_tokens=1, n=3, max_batch=65_536)) == 3


def test_memory_that_no_machine_has(lm):
    for kv_memory in (2**62, 2**63, 10**400):
        with refused(ConfigError, "kv_memory=", "more than the", "it needs at least", "GiB"):
            lm.engine(kv_memory=kv_memory)
    with refused(
        ConfigError, "kv_memory=100,000 bytes is too small", "it needs at least", "blocks of 64 tokens", "GiB"
    ):
        lm.engine(kv_memory=100_000)
    for kv_memory in (0, True, 1e9, float("inf")):
        with refused(ConfigError, "kv_memory must be a number of bytes", "found", shown(kv_memory)):
            lm.engine(kv_memory=kv_memory)


# --- the caller's own classes ----------------------------------------------------------------------------------------


class Rule:
    """A constraint that allows everything; it fails where ``fails`` says."""

    def __init__(self, fails=None):
        self.fails = fails

    def start(self):
        return self._or_fail("start", self)

    def fork(self):
        return self._or_fail("fork", self)

    def take(self, token):
        self._or_fail("take", None)

    def allowed(self):
        if self.fails == "mask":
            return np.ones(10)
        return self._or_fail("allowed", np.full(2, 0xFFFFFFFF, np.uint32))

    def _or_fail(self, name, value):
        if self.fails == name:
            raise RuntimeError("no more")
        return value


@pytest.mark.parametrize("fails", ["start", "fork", "take", "allowed", "mask"])
def test_a_constraint_that_fails_ends_its_request_alone(fails, target):
    engine = dw.Engine(Decoder(target, LookupDrafter(VOCAB, 1), budget=Budget(3)))
    sampling = Sampling(max_tokens=12, ignore_eos=False, min_tokens=12)
    wanted = plain(target, PROMPTS[0], sampling)
    bad, good = engine.submit(PROMPTS[0], sampling, constraint=Rule(fails)), engine.submit(PROMPTS[0], sampling)
    free = engine.submit(PROMPTS[0], sampling, constraint=Rule())
    engine.run()
    assert (tuple(good.token_ids), tuple(free.token_ids)) == (wanted, wanted)
    assert bad.finish_reason == "error"
    with refused(
        ConfigError, "a NumPy array" if fails == "mask" else "the constraint failed (RuntimeError: 'no more')"
    ):
        raise bad.error


@pytest.mark.parametrize("constraint", [range(5), 5, "x", object()], ids=id_of)
def test_what_is_no_constraint(constraint, target):
    engine = dw.Engine(Decoder(target))
    with refused(ConfigError, "constraint must have a start() that returns a state, found", "LM.constraint"):
        engine.submit(PROMPTS[0], constraint=constraint)
    engine.submit(PROMPTS[0], Sampling(max_tokens=2))
    engine.run()


def test_drafters_that_are_none(target):
    for drafter in (object(), "lookup", 5):
        with refused(ConfigError, "drafter must be a Drafter, a function that makes one, or None, found"):
            Decoder(target, drafter)
    with refused(ConfigError, "a function that makes drafters must return a Drafter, found 5"):
        Decoder(target, lambda: 5)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"path": "nothing"}, ("'mine' must be a class or 'module:Class', found 'nothing'",)),
        ({"help": 5}, ("the help of draft method 'mine' must be one line of text, found 5",)),
        ({"needs": "money"}, ("needs must be 'nothing', 'folder' or 'target', found 'money'",)),
        ({"training": {"mine": 5}}, ("training must be a dict of names to TrainingMethod, found {'mine': 5}",)),
        ({"name": ["mine"]}, ("a draft method called ['mine'] cannot be added",)),
    ],
)
def test_methods_that_cannot_be_registered(arguments, parts):
    with refused(ConfigError, *parts):
        dw.register(**{"name": "mine", "path": "draftwing.methods.lookup:Lookup", "help": "", **arguments})


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("draftwing.nowhere:Lookup", ("draft method 'mine': draftwing.nowhere:Lookup cannot be imported",)),
        ("draftwing.methods.lookup:Nothing", ("Nothing cannot be imported",)),
        ("draftwing.methods.lookup:LookupDrafter", ("its class must derive from DraftMethod, found",)),
    ],
)
def test_methods_that_cannot_be_imported(path, parts, folder, monkeypatch):
    monkeypatch.setattr(registry, "METHODS", dict(registry.METHODS))
    dw.register("mine", path, "")
    with refused(ConfigError, *parts):
        load(folder, "mine")


# --- the decode loop -------------------------------------------------------------------------------------------------


def test_steps_and_retirements_of_nothing(target):
    decoder = Decoder(target)
    with refused(ConfigError, "nothing to decode", "admit a prompt first"):
        decoder.step()
    request = decoder.admit(PROMPTS[0], Sampling(max_tokens=1))
    with refused(ConfigError, "request 7 is not running", "retire only ids from admit()"):
        decoder.retire(7)
    decoder.step()
    with refused(ConfigError, f"request {request} is not running", "retire only ids from admit()"):
        decoder.retire(request)


@pytest.mark.parametrize(
    ("tokens", "parents", "device", "parts"),
    [
        ([], [], "cpu", ("tokens must be one list of ints for each row, found []",)),
        ([[]], [[]], "cpu", ("tokens must be one list of ints for each row, found [[]]",)),
        (["ab"], [[-1, 0]], "cpu", ("tokens must be one list of ints for each row, found ['ab']",)),
        ([[5, True]], [[-1, 0]], "cpu", ("tokens must be one list of ints",)),
        ([[5, 2**63]], [[-1, 0]], "cpu", ("tokens must be one list of ints",)),
        ([[5, 6]], None, "cpu", ("parents must be one list of ints for each row, found None",)),
        ([[5, 6]], [[-1]], "cpu", ("tokens and parents must be lists of the same lengths",)),
        ([[5, 6]], [[-1, 0], [-1]], "cpu", ("tokens and parents must be lists of the same lengths",)),
        ([[5, 6]], [[-1, 0]], "nowhere", ("device must be a device of this machine, found 'nowhere'", "use 'cpu'")),
    ],
)
def test_lists_that_make_no_trees(tokens, parents, device, parts):
    with refused(TreeError, *parts):
        DraftTree.from_lists(tokens, parents, device)


def test_tensors_that_make_no_trees():
    ids = torch.tensor([[5, 6]])
    for tokens in (ids[0], ids.float(), ids.to("meta"), ids.int(), [[5, 6]], None):
        with refused(TreeError, "tokens must be an int64 tensor of 2 dimensions, found"):
            DraftTree.chain(tokens)
        with refused(TreeError, "tokens must be an int64 tensor of 2 dimensions, found"):
            DraftTree(tokens, ids).check()
    with refused(TreeError, "pending must be an int64 tensor of 1 dimension, found"):
        DraftTree.root(ids)


def decode(decoder, wanted=()):
    texts = dict.fromkeys(wanted, ())
    while decoder.num_running:
        for row in decoder.step().rows:
            texts[row.request_id] = texts.get(row.request_id, ()) + row.token_ids
    return texts


def plain(target, prompt, sampling):
    decoder = Decoder(target)
    request = decoder.admit(prompt, sampling)
    return decode(decoder)[request]


class Picky(LookupDrafter):
    """Fails on some prompts, after the target has read them."""

    def admit(self, ctx, features):
        if ctx.rows[-1].tokens[0] == 13:
            raise DraftwingError("no thirteen")
        super().admit(ctx, features)


@pytest.mark.parametrize("drafter", ["lookup", "lm"])
def test_a_bad_request_leaves_the_others_alone(drafter, target):
    drafters = {"lookup": Picky(VOCAB, 1), "lm": CausalLMDrafter(target, VOCAB)}
    decoder = Decoder(target, drafters[drafter], budget=Budget(3))
    requests = [Sampling(max_tokens=15, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(3)]
    texts = {decoder.admit(prompt, sampling): () for prompt, sampling in zip(PROMPTS[:2], requests[:2], strict=True)}
    bad = [
        ([], Sampling()),
        ([5, VOCAB], Sampling()),
        ([5] * 256, Sampling()),
        ([5], Sampling(banned_tokens=range(VOCAB))),
        *([([13, 5, 6], Sampling())] if drafter == "lookup" else []),
    ]
    for prompt, sampling in bad:
        with pytest.raises(DraftwingError):
            decoder.admit(prompt, sampling)
        assert decoder.num_running == 2
        assert decoder.ctx.num_rows == 2
        for row in decoder.step().rows:
            texts[row.request_id] += row.token_ids
    last = decoder.admit(PROMPTS[2], requests[2])
    assert last == 2
    for request, text in decode(decoder, range(3)).items():
        assert texts.get(request, ()) + text == plain(target, PROMPTS[request], requests[request])


# --- NaN -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(folder_of):
    """A target of its own, to be poisoned."""
    return LeanTarget.from_folder(folder_of("llama"), torch.float64, name="tiny")


def poison(target, where):
    with torch.no_grad():
        if where == "norm":
            target.net.norm.weight[3] = torch.nan
        elif where == "embedding":
            target.embedding.table[5] = torch.nan
        else:
            target.head.weight[17] = torch.nan


@pytest.mark.parametrize("where", ["norm", "embedding", "head"])
@pytest.mark.parametrize("rule", RULES)
def test_nan_while_decoding(rule, where, broken):
    """No rule draws from a distribution with NaN."""
    poison(broken, where)
    decoder = Decoder(broken, LookupDrafter(VOCAB, 1), rule, lossless=rule != "typical")
    for number in range(4):
        decoder.admit(PROMPTS[2 - number // 2 * 2], Sampling(temperature=float(number % 2)))
    step = decoder.step()
    bad = [2, 3] if where == "embedding" else [0, 1, 2, 3]  # only the other prompt has that token
    assert [row.request_id for row in step.rows if row.finish_reason == "error"] == bad
    for row in (step.rows[request] for request in bad):
        assert row.token_ids == ()
        logits = f"tiny: the logits of request {row.request_id} at"
        with refused(NumericsError, logits, "NaN", "check the weights", "'float32'"):
            raise row.error
    assert [request.id for request in decoder.running] == [request for request in range(4) if request not in bad]


def test_one_request_with_nan_ends_alone(broken):
    """The other rows, and one that takes its place, continue unchanged."""
    sampling = Sampling(max_tokens=12, banned_tokens=(5,), ignore_eos=True)
    wanted = [plain(broken, prompt, sampling) for prompt in PROMPTS[1:]]
    poison(broken, "embedding")
    decoder = Decoder(broken, CausalLMDrafter(broken, VOCAB), budget=Budget(2))
    first, bad = decoder.admit(PROMPTS[1], sampling), decoder.admit([*range(14, 34), 5, 6], sampling)
    rows = decoder.step().rows
    with refused(NumericsError, f"request {bad} at position 22", "check the weights"):
        raise rows[1].error
    after = decoder.admit(PROMPTS[2], sampling)
    texts = decode(decoder)
    assert {**texts, first: rows[0].token_ids + texts[first]} == {first: wanted[0], after: wanted[1]}


# --- a draft model with a shorter context ----------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "rule"), [(1.0, "match"), (0.0, "multi-round")])
def test_a_draft_with_a_shorter_context(temperature, rule, target, folder_of):
    """Rows within it get drafts; longer ones, and those that grow beyond it, get none."""
    draft = LeanTarget.from_folder(folder_of("llama", max_position_embeddings=24), torch.float64)
    prompts = [list(range(3, 43)), [8, 9], list(range(30, 50)), list(range(5, 29)), [4]]
    sampling = [
        Sampling(max_tokens=20, temperature=temperature, seed=seed, ignore_eos=True, repetition_penalty=1.1)
        for seed in range(5)
    ]
    decoder = Decoder(target, CausalLMDrafter(draft, VOCAB), rule, Budget(4, 3))
    texts, drafted = {}, {}
    for number in range(100):
        if number < len(prompts):  # they come one by one, and the short ones after the long one
            texts[decoder.admit(prompts[number], sampling[number])] = ()
        if not decoder.num_running:
            break
        lengths = {request.id: row.length for request, row in zip(decoder.running, decoder.ctx.rows, strict=True)}
        step = decoder.step()
        step.tree.check(VOCAB)
        for row in step.rows:
            texts[row.request_id] += row.token_ids
            drafted.setdefault(row.request_id, []).append(row.num_drafted > 0)
            assert (row.num_drafted > 0) <= (lengths[row.request_id] < 22)
    assert {request for request, steps in drafted.items() if any(steps)} == {1, 2, 4}
    assert not any(steps[-1] for request, steps in drafted.items() if request in (0, 2, 3))
    for request, text in texts.items():
        assert text == plain(target, prompts[request], sampling[request])


def test_a_draft_too_short_for_every_row(target, folder_of):
    draft = LeanTarget.from_folder(folder_of("llama", max_position_embeddings=24), torch.float64)
    sampling = Sampling(max_tokens=6, ignore_eos=True)
    prompts = [list(range(3, 43)), list(range(5, 29))]
    decoder = Decoder(target, CausalLMDrafter(draft, VOCAB))
    gone, *rest = [decoder.admit(prompt, sampling) for prompt in (prompts[0], *prompts)]
    retired = decoder.running[0]
    decoder.retire(gone)
    assert retired.finish_reason == "cancelled"
    texts = decode(decoder)
    assert [texts[request] for request in rest] == [plain(target, prompt, sampling) for prompt in prompts]
