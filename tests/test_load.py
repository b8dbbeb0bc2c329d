"""From a folder on disk to text: loading, generating, streaming, and how a text ends."""

import json
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import draftwing as dw
from conftest import CHAT_TEMPLATE, add_tokenizer, build, float64_norms, refused
from draftwing.errors import UnsupportedError
from draftwing.models.adapter import AdapterTarget
from draftwing.models.lean import LeanTarget
from test_adapter import make

PROMPTS = ["def add(a, b):", "class Table:\n    def", "for row in rows: print(row)\nfor row in", "é", "x"]
DRAFTS = ("none", "lookup", "itself", "other")


@pytest.fixture(scope="module")
def folders(folder_of, tmp_path_factory):
    """A target, another model to draft for it, and gpt2, all with one tokenizer."""
    root = tmp_path_factory.mktemp("models")
    made = {
        "llama": folder_of("llama", vocab_size=300),
        "other": folder_of("llama", seed=1, vocab_size=300, num_hidden_layers=1),
        "gpt2": folder_of("gpt2", vocab_size=300),
    }
    return {name: add_tokenizer(shutil.copytree(folder, root / name)) for name, folder in made.items()}


@pytest.fixture(scope="module")
def lm(folders):
    """``lm("lookup")``: the target with a drafter, loaded once."""
    loaded = {}

    def get(draft="none"):
        if draft not in loaded:
            path = {"itself": folders["llama"], "other": folders["other"]}.get(draft, draft)
            loaded[draft] = dw.load(folders["llama"], path, dtype="float64", device="cpu")
        return loaded[draft]

    return get


def readable(model):
    """Tokens to ban so that every token is printable ASCII."""
    texts = {token: model.tokenizer.decode([token]) for token in range(300)}
    return [token for token, text in texts.items() if token > 2 and not (text.isascii() and text.isprintable())]


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_is_its_prompts_one_by_one(temperature, lm):
    options = {"temperature": temperature, "max_tokens": 12, "seed": 4}
    alone = [lm().generate(prompt, **options)[0] for prompt in PROMPTS]
    for number, draft in enumerate(DRAFTS):
        max_batch = (2, 8)[(number + int(temperature)) % 2]
        together = lm(draft).generate(PROMPTS, max_batch=max_batch, **options)
        for one, other in zip(alone, together, strict=True):
            for name in ("token_ids", "text", "finish_reason", "prompt_ids"):
                assert getattr(other, name) == getattr(one, name)
            assert other.stats.num_tokens == len(one.token_ids)


def test_tau_is_tokens_per_forward(lm):
    options = {"max_tokens": 24, "ignore_eos": True}
    (plain,) = lm().generate(PROMPTS[0], **options)
    assert plain.tau == 1.0
    assert plain.stats.num_forwards == 24
    depth, itself = 3, lm("itself")
    chains = dw.LM(itself.target, itself.tokenizer, itself.new_drafter, budget=dw.Budget(depth))
    (best,) = chains.generate(PROMPTS[0], **options)
    assert best.stats.num_accepted == best.stats.num_drafted > 0
    assert best.stats.num_forwards == -(-24 // (depth + 1))
    assert best.tau == 24 / best.stats.num_forwards
    assert best.lossless


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_auto_prefers_the_lean_decoder(family, folders):
    kind = {"llama": LeanTarget, "gpt2": AdapterTarget}[family]
    loaded = dw.load(folders[family], dtype="float64", device="cpu")
    assert isinstance(loaded.target, kind)
    assert loaded.drafter_name == "lookup"
    assert loaded.target.name == str(folders[family])
    adapter = dw.load(folders[family], "none", dtype="float64", device="cpu", engine="transformers")
    assert isinstance(adapter.target, AdapterTarget)
    texts = [model.generate(PROMPTS, max_tokens=12, temperature=1.0, seed=0) for model in (loaded, adapter)]
    assert [one.token_ids for one in texts[0]] == [one.token_ids for one in texts[1]]


def test_a_setting_of_a_native_family_that_only_transformers_honours(tmp_path):
    """The automatic engine falls back; the lean one and quantisation say which setting it is."""
    build("stablelm", qk_layernorm=True).save_pretrained(tmp_path)
    add_tokenizer(tmp_path, 61, [""])
    loaded = dw.load(tmp_path, "none", dtype="float64", device="cpu")
    assert isinstance(loaded.target, AdapterTarget)
    for options in ({"engine": "lean"}, {"quantize": "int8"}):
        with refused(UnsupportedError, "`qk_layernorm` True is not supported by the lean decoder"):
            dw.load(tmp_path, "none", device="cpu", **options)


def test_a_recurrent_model_drafts_only_if_told_to(tmp_path):
    """Its nodes run one by one, so the default is none."""
    make("mamba").save_pretrained(tmp_path)
    add_tokenizer(tmp_path, 61, [""])
    loaded = dw.load(tmp_path, dtype="float64", device="cpu")
    assert loaded.drafter_name == "none"
    text = loaded.generate([[3, 4]], max_tokens=9, ignore_eos=True)[0]
    assert text.tau == 1.0
    drafted = dw.load(tmp_path, "lookup", dtype="float64", device="cpu", budget=dw.Budget(3))
    assert drafted.generate([[3, 4]], max_tokens=9, ignore_eos=True)[0].token_ids == text.token_ids


# --- kinds of prompts -------------------------------------------------------------------------------------------------


def test_prompts_as_text_ids_and_arrays(lm):
    ids = lm().tokenizer.encode(PROMPTS[0])
    assert ids[0] == 1
    expected = lm().generate(PROMPTS[0], max_tokens=8)[0].token_ids
    for prompts in (ids, [ids], [PROMPTS[0]], np.array(ids), [np.array(ids)], tuple(ids)):
        assert [result.token_ids for result in lm().generate(prompts, max_tokens=8)] == [expected]
    assert lm().generate([], max_tokens=8) == []
    assert [len(result.token_ids) for result in lm().generate([ids, ids[:1]], max_tokens=8, ignore_eos=True)] == [8, 8]


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja"])
def test_messages_go_through_the_chat_template(place, folders, tmp_path):
    folder = shutil.copytree(folders["llama"], tmp_path / "chat")
    if place == "tokenizer_config.json":
        add_tokenizer(folder, chat_template=CHAT_TEMPLATE)
    else:
        (folder / place).write_text(CHAT_TEMPLATE)
    loaded = dw.load(folder, dtype="float64", device="cpu")
    messages = [{"role": "system", "content": "row"}, {"role": "user", "content": "print"}]
    written = loaded.tokenizer.fast.encode("<system>row<user>print<bot>", add_special_tokens=False).ids
    assert loaded.encode(messages) == written
    expected = loaded.generate([written], max_tokens=6)[0].token_ids
    for prompts, count in ((messages, 1), ([messages, messages], 2)):
        assert [result.token_ids for result in loaded.generate(prompts, max_tokens=6)] == [expected] * count


# --- streams and how they end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("prompt", [PROMPTS[2], "é"])
def test_a_stream_adds_up_to_the_text(prompt, draft, lm):
    options = {"max_tokens": 20, "temperature": 1.0, "seed": 7}
    (result,) = lm().generate(prompt, **options)
    stream = lm(draft).stream(prompt, **options)
    assert isinstance(stream, Iterator)
    steps = list(stream)
    assert "".join(step.text for step in steps) == result.text
    assert [token for step in steps for token in step.token_ids] == result.token_ids
    assert [step.finish_reason for step in steps] == [None] * (len(steps) - 1) + [result.finish_reason]


@pytest.mark.parametrize("draft", ["lookup", "itself"])
def test_stop_strings(draft, lm):
    """They end the text before their first character, whatever the steps' tokens are."""
    model, plain = lm(draft), lm()
    options = {"max_tokens": 30, "ignore_eos": True, "banned_tokens": readable(plain), "temperature": 1.0, "seed": 0}
    text = plain.generate(PROMPTS[0], **options)[0].text
    assert text.isascii()
    for start, length in ((3, 1), (9, 2), (14, 5), (0, 2)):
        stop = text[start : start + length]
        kept = text[: text.index(stop)]
        (result,) = model.generate(PROMPTS[0], stop=stop, **options)
        assert (result.text, result.finish_reason) == (kept, "stop")
        # The tokens are those up to the one that completed the stop string.
        assert stop in model.tokenizer.decode(result.token_ids)
        assert stop not in model.tokenizer.decode(result.token_ids[:-1])
        shown = ""
        for step in model.stream(PROMPTS[0], stop=("\0never", stop), **options):
            shown += step.text
            assert kept.startswith(shown)
        assert (shown, step.finish_reason) == (kept, "stop")
    # The start of a stop string that is never completed is emitted in the end.
    almost = text[-2:] + "\0"
    (result,) = model.generate(PROMPTS[0], stop=almost, **options)
    assert (result.text, result.finish_reason) == (text, "length")


def test_a_stopped_row_makes_room(lm):
    model = lm("other")
    options = {"max_tokens": 16, "ignore_eos": True, "banned_tokens": readable(lm())}
    plain = lm().generate(PROMPTS, **options)
    stop = plain[1].text[4:6]
    results = model.generate(PROMPTS, stop=stop, max_batch=2, **options)
    assert results[1].finish_reason == "stop"
    for result, whole in zip(results, plain, strict=True):
        assert result.text == whole.text.split(stop)[0]
        assert result.finish_reason == ("stop" if stop in whole.text else "length")


@pytest.mark.parametrize("draft", ["lookup", "itself"])
def test_the_end_of_the_context(draft, lm):
    model = lm(draft)
    ids = [3 + i % 290 for i in range(250)]
    assert model.target.max_length == 256
    wanted = lm().generate([ids], max_tokens=100, ignore_eos=True)[0].token_ids
    for prompt, room in ((ids, 6), ([*ids, 5, 6, 7, 8, 9], 1)):
        (result,) = model.generate([prompt], max_tokens=100, ignore_eos=True)
        assert (len(result.token_ids), result.finish_reason) == (room, "length")
        if room == 6:
            assert result.token_ids == wanted


@pytest.mark.parametrize("draft", ["none", "itself"])
def test_end_tokens_of_the_generation_config(draft, lm, folders, tmp_path):
    text = lm().generate(PROMPTS[1], max_tokens=12, ignore_eos=True)[0].token_ids
    last = text[5]
    first = text.index(last)
    folder = shutil.copytree(folders["llama"], tmp_path / "copy")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, last]}))
    loaded = dw.load(folder, folder if draft == "itself" else draft, dtype="float64", device="cpu")
    assert loaded.target.eos_ids == (2, last)
    stopped = text[: first + 1], "stop"
    for options, expected in (
        ({}, stopped),
        ({"ignore_eos": True}, (text, "length")),
        ({"ignore_eos": True, "stop_tokens": [last]}, stopped),
    ):
        (result,) = loaded.generate(PROMPTS[1], max_tokens=12, **options)
        assert (result.token_ids, result.finish_reason) == expected
    # The end token is the last one that may be generated, or one more.
    assert loaded.generate(PROMPTS[1], max_tokens=first + 1)[0].finish_reason == "stop"
    assert first == 0 or loaded.generate(PROMPTS[1], max_tokens=first)[0].finish_reason == "length"


def test_special_tokens_are_not_shown(lm):
    (result,) = lm().generate(PROMPTS[0], max_tokens=12, logit_bias={2: 1e4})
    assert (result.text, result.token_ids, result.finish_reason) == ("", [2], "stop")


# --- logprobs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["none", "itself"])
def test_logprobs_are_the_models_own(draft, lm):
    """For the sampled tokens, before any processing of logits."""
    reference = float64_norms(build("llama", vocab_size=300))
    options = {"max_tokens": 12, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2, "ignore_eos": True}
    results = lm(draft).generate(PROMPTS, logprobs=3, speculation=dw.Budget(3), **options)
    assert draft == "none" or any(result.stats.num_accepted for result in results)
    for result in results:
        ids = torch.tensor([[*result.prompt_ids, *result.token_ids]])
        with torch.no_grad():
            logits = reference(ids, use_cache=False).logits[0, len(result.prompt_ids) - 1 : -1]
        assert [found.token for found in result.logprobs] == result.token_ids
        for row, found in zip(logits.log_softmax(-1), result.logprobs, strict=True):
            assert found.logprob == pytest.approx(float(row[found.token]), abs=1e-5)
            best = row.topk(3)
            assert [token for token, _ in found.top] == best.indices.tolist()
            assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert lm(draft).generate(PROMPTS[0], logprobs=0, **options)[0].logprobs[0].top == ()
    assert lm(draft).generate(PROMPTS[0], **options)[0].logprobs is None


def test_logprobs_end_with_the_text(lm):
    options = {"max_tokens": 20, "ignore_eos": True, "banned_tokens": readable(lm()), "logprobs": 1}
    text = lm().generate(PROMPTS[0], **options)[0].text
    for place in range(2, 12, 3):  # also in the middle of a step's tokens
        stop = text[place : place + 2]
        plain, result = (lm(draft).generate(PROMPTS[0], stop=stop, **options)[0] for draft in ("none", "itself"))
        assert (result.finish_reason, result.token_ids) == ("stop", plain.token_ids)
    assert [found.token for found in result.logprobs] == result.token_ids
