"""The server as the official client sees it: shapes, fields, errors, and the library's own texts."""

import asyncio
import json
import threading
from types import SimpleNamespace

import openai
import pytest
import torch

import draftwing as dw
from conftest import add_tokenizer, refused
from draftwing.budget.costs import Costs, Curve
from draftwing.budget.planner import Planner
from draftwing.engine import EngineStats
from draftwing.errors import SamplingError
from draftwing.methods.lookup import LookupDrafter
from draftwing.request import Request
from draftwing.sampling import Sampling, nth_seed
from draftwing.serve.app import Settings, make_app
from draftwing.serve.auth import Guard
from draftwing.serve.convert import Defaults
from draftwing.serve.metrics import Metrics
from draftwing.serve.stream import speculation_metrics
from draftwing.stats import RowStep
from draftwing.worker import Ticket
from serving import PATIENT, TEMPLATE, TEXTS, app_of, ask, chat, chat_folder, complete, load, make, question, send


@pytest.fixture(scope="module")
def folder(folder_of, tmp_path_factory):
    return chat_folder(folder_of, tmp_path_factory)


@pytest.fixture(scope="module")
def lm(folder):
    return load(folder, f"{folder}+lookup", draft_options={"min_match": 1})


def own(lm, prompt, **options):
    """What the library itself writes."""
    return lm.generate([prompt], Sampling(**{"max_tokens": 12, **options}))[0]


# --- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_chat_is_the_librarys_own_text(lm, temperature):
    answer = chat(app_of(lm), TEXTS[0], max_tokens=12, temperature=temperature, seed=7)
    expected = own(lm, question(TEXTS[0]), temperature=temperature, seed=7)
    (choice,), usage = answer.choices, answer.usage
    assert choice.message.content == expected.text
    assert (choice.message.role, answer.object) == ("assistant", "chat.completion")
    assert (choice.finish_reason, choice.logprobs) == (expected.finish_reason, None)
    num_prompt, num_written = len(expected.prompt_ids), len(expected.token_ids)
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, num_written)
    assert usage.total_tokens == num_prompt + num_written


def test_a_seed_writes_the_same_text_among_others_with_any_speculation(lm):
    wishes = [
        {"draft": "none"},
        {"tree": "chain:2"},
        {"tree": "dynamic:6,3,2", "detailed": True},
        {"draft": "lookup"},
        {"tree": "dynamic:9,4,3", "max_nodes": 2, "detailed": True},
        {"max_nodes": 0},
        {"tree": "auto", "detailed": True},
        {"tree": "auto", "max_nodes": 1, "detailed": True},
        None,
    ]

    async def work(client):
        common = {"max_tokens": 12, "temperature": 1, "seed": 5}
        bodies = [None if wish is None else {"speculation": wish} for wish in wishes]
        return await asyncio.gather(
            *(
                make(client.completions, prompt=TEXTS[number % 3], extra_body=body, **common)
                for number, body in enumerate(bodies)
            )
        )

    answers = ask(app_of(lm, max_batch=4), work)
    for number, answer in enumerate(answers):
        assert answer.choices[0].text == own(lm, TEXTS[number % 3], temperature=1, seed=5).text
    found = [answer.metrics["speculative_decoding"] for answer in answers]
    assert found[0]["num_spec_steps"] == found[5]["num_draft_tokens"] == 0 < found[1]["num_spec_steps"]
    assert len(found[6]["per_step_drafted"]) == found[6]["num_spec_steps"]
    assert set(found[7]["per_step_drafted"]) == {1} != set(found[6]["per_step_drafted"])
    assert max(found[4]["per_step_drafted"]) <= 2


def test_the_automatic_budget_keeps_to_a_limit(folder, monkeypatch):
    """With costs that make drafts worth it, alone and in a batch."""
    observe = Planner.observe
    monkeypatch.setattr(Planner, "observe", lambda *args: observe(*args[:-1], 1.0))
    flat = Costs(Curve(((1, 1.0), (64, 1.01))), Curve(((1, 0.001), (8, 0.002))), Curve(((1, 0.001), (8, 0.002))), 4)
    monkeypatch.setattr("draftwing.lm.planner_for", lambda *args, **options: Planner(flat, dw.Budget(8, 4, 40)))
    lm = dw.load(folder, str(folder), device="cpu")
    limits = [1, 3, 7, None]

    async def work(client):
        async def write(limit):
            body = {"speculation": {"detailed": True, **({} if limit is None else {"max_nodes": limit})}}
            return await make(client.completions, prompt=TEXTS[0], max_tokens=20, temperature=0, extra_body=body)

        return [await write(limit) for limit in limits], await asyncio.gather(*map(write, limits))

    alone, together = ask(app_of(lm), work)
    expected = own(lm, TEXTS[0], max_tokens=20).text
    for answers in (alone, together):
        assert [answer.choices[0].text for answer in answers] == [expected] * 4
        drafted = [answer.metrics["speculative_decoding"]["per_step_drafted"] for answer in answers]
        assert all(max(nums) <= limit for nums, limit in zip(drafted[:3], limits, strict=False))
        assert max(drafted[3]) > 7
    assert max(alone[1].metrics["speculative_decoding"]["per_step_drafted"]) > 1


def test_usage_tells_how_much_of_a_prompt_was_read_before(lm):
    """And in stated memory the texts are the same."""
    prompt = lm.encode(TEXTS[2]) * 8
    assert len(prompt) > 130

    async def work(client):
        given = {"max_tokens": 4, "temperature": 0}
        usage = {"include_usage": True, "continuous_usage_stats": True}
        first = await make(client.completions, prompt=prompt, **given)
        again = await make(client.completions, prompt=prompt, n=2, **given)
        both = await make(client.completions, prompt=[prompt, [*prompt[:70], 5, 6]], **given)
        return [
            first,
            again,
            both,
            *await make(client.completions, prompt=prompt, stream=True, stream_options=usage, **given),
        ]

    answers = ask(app_of(lm, kv_memory=2**22), work)
    found = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    most = len(prompt) - 2
    assert (found[0], found[1], found[-1]) == (0, most, most)
    assert found[2] == most + 69
    assert set(found[3:]) <= {0, most}
    assert answers[1].choices[1].text == own(lm, prompt, max_tokens=4).text
    assert ask(app_of(lm), work)[1].usage.prompt_tokens_details.cached_tokens == 0
    for choice in complete(app_of(lm, kv_memory=2**20), TEXTS * 3, max_tokens=12, temperature=0).choices:
        assert choice.text == own(lm, TEXTS[choice.index % 3]).text


def test_faults_of_drafters_are_counted_and_change_no_text(folder, monkeypatch):
    lm, calls, propose = load(folder), [], LookupDrafter.propose

    def fails(*args):
        calls.append(1)
        if len(calls) in (2, 5):
            raise ZeroDivisionError
        return propose(*args)

    monkeypatch.setattr(LookupDrafter, "propose", fails)

    async def work(http):
        text = await http.post("/v1/completions", json={"prompt": TEXTS[2], "max_tokens": 20, "temperature": 0})
        return text.json()["choices"][0]["text"], (await http.get("/metrics")).text

    for settings in ({}, {"kv_memory": 2**20}):
        calls.clear()
        text, metrics = send(app_of(lm, **settings), work)
        assert 'draftwing_drafter_faults_total{model_name="tiny"} 2.0' in metrics
        assert "vllm:drafter_faults" not in metrics
        assert text == lm.generate([TEXTS[2]], max_tokens=20, speculation="none")[0].text


def test_prompts_of_every_form_and_n_texts_of_each(lm):
    app, ids, common = app_of(lm, max_batch=3), lm.encode(TEXTS[0]), {"max_tokens": 6, "temperature": 1, "seed": 3}
    texts, one, two = ask(
        app,
        lambda client: asyncio.gather(
            make(client.completions, prompt=TEXTS[:2], n=2, **common),
            make(client.completions, prompt=ids, **common),
            make(client.completions, prompt=[ids, ids], **common),
        ),
    )
    seeds = [3, nth_seed(3, 1)]
    expected = [own(lm, text, temperature=1, seed=seed, max_tokens=6).text for text in TEXTS[:2] for seed in seeds]
    assert [choice.text for choice in texts.choices] == expected
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    assert texts.usage.prompt_tokens == sum(len(lm.encode(text)) for text in TEXTS[:2])
    assert [choice.text for choice in (*one.choices, *two.choices)] == [expected[0]] * 3


def test_settings_reach_the_sampling(lm):
    plain = own(lm, TEXTS[1], max_tokens=24)
    stop, end = plain.text[6:8], plain.token_ids[3]
    given = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 3, "stop_token_ids": [40, 41]}
    biased = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {"70": 4.0, "71": -3}, "top_p": 0.9}
    common = {"prompt": TEXTS[1], "max_tokens": 24, "seed": 2}
    answers = ask(
        app_of(lm),
        lambda client: asyncio.gather(
            make(client.completions, **common, temperature=0.7, **biased, extra_body=given),
            make(client.completions, **common, temperature=0, stop=stop),
            make(client.completions, **common, temperature=0, extra_body={"stop_token_ids": [end]}),
            *(make(client.completions, **common, extra_body={"top_k": top_k}) for top_k in (0, -1)),
        ),
    )
    first, stopped, ended, *all_tokens = answers
    assert ended.usage.completion_tokens == plain.token_ids.index(end) + 1
    bias = {int(token): value for token, value in biased.pop("logit_bias").items()}
    given["stop_tokens"] = given.pop("stop_token_ids")
    expected = own(lm, TEXTS[1], max_tokens=24, seed=2, temperature=0.7, logit_bias=bias, **given, **biased)
    assert (first.choices[0].text, first.choices[0].finish_reason) == (expected.text, expected.finish_reason)
    assert stop not in stopped.choices[0].text
    assert stopped.choices[0].finish_reason == "stop"
    free = own(lm, TEXTS[1], max_tokens=24, seed=2, temperature=1).text
    assert [answer.choices[0].text for answer in all_tokens] == [free] * 2


def test_messages_of_every_form_reach_the_template(lm):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "def "}, {"type": "text", "text": "add"}]},
        {"role": "assistant", "content": "(a)"},
        {"role": "user", "content": "go on", "name": "me"},
    ]
    ids = lm.tokenizer.encode_plain("[calm]<system>Be brief.<user>def add<assistant>(a)<user>go on<bot>")
    mood = {"chat_template_kwargs": {"mood": "calm"}}
    limits = {"max_completion_tokens": 5, "max_tokens": 9}  # the new name counts
    answer = chat(app_of(lm), messages, **limits, temperature=0, user="me", extra_body=mood)
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.choices[0].message.content == own(lm, ids, max_tokens=5).text


def test_options_of_the_tokenizer_are_no_variables_of_a_template(folder_of, tmp_path_factory):
    lm = load(chat_folder(folder_of, tmp_path_factory, TEMPLATE + "{% if padding %} {% endif %}"))
    body = {"messages": question("x"), "max_tokens": 1, "chat_template_kwargs": {"padding": True}}
    answer = send(app_of(lm), lambda http: http.post("/v1/chat/completions", json=body))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs"


def test_refusals_and_prefixes_reach_the_template(lm):
    refusals = [{"content": [{"type": "refusal", "refusal": "No."}]}, {"content": None, "refusal": "No."}]
    refusals.append({"content": "No.", "refusal": None})
    prefix = {"role": "assistant", "content": "It is", "prefix": True}
    ids = lm.tokenizer.encode_plain("<user>x<assistant>No.<user>Why?<assistant>It is")
    for refusal in refusals:
        messages = [*question("x"), {"role": "assistant", **refusal}, *question("Why?"), prefix]
        answer = chat(app_of(lm), messages, max_tokens=5, temperature=0)
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.choices[0].message.content == own(lm, ids, max_tokens=5).text


def test_paths_and_methods(lm):
    async def work(http):
        unknown = ["/v1/responses", "/v1/embeddings", "/v1", "/api/chat", "/docs", "/app.js/x"]
        found = [await http.request(method, path) for path in unknown for method in ("POST", "GET", "DELETE")]
        wrong = [("GET", "/v1/chat/completions"), ("DELETE", "/v1/models/tiny"), ("PUT", "/health")]
        return found, [await http.request(*each) for each in wrong], await http.get("/"), await http.head("/app.js")

    unknown, wrong, *page = send(app_of(lm), work)
    assert {answer.status_code for answer in unknown} == {404}
    assert all("/openapi.json lists all paths" in answer.json()["error"]["message"] for answer in unknown)
    assert [(answer.status_code, answer.headers["allow"]) for answer in wrong] == [(405, "POST"), *[(405, "GET")] * 2]
    assert [answer.status_code for answer in page] == [200, 200]


def test_errors_show_no_local_path(folder_of, tmp_path_factory):
    folder = chat_folder(folder_of, tmp_path_factory)
    for settings in ({"chat_template": "{{ raise_exception('no') }}"}, {}):
        app = app_of(load(add_tokenizer(folder, **settings)))
        answer = send(app, lambda http: http.post("/v1/chat/completions", json={"messages": question("x")}))
        assert answer.status_code == 400
        assert "/" not in answer.json()["error"]["message"]


def test_defaults_come_from_the_model_and_the_server(folder_of, tmp_path_factory):
    folder = chat_folder(folder_of, tmp_path_factory, max_position_embeddings=64)
    config = {"eos_token_id": 2, "temperature": 0.3, "top_k": 4}
    (folder / "generation_config.json").write_text(json.dumps(config))
    lm = load(folder)
    text = complete(app_of(lm), TEXTS[0], seed=1)
    assert text.choices[0].text == own(lm, TEXTS[0], seed=1, temperature=0.3, top_k=4, max_tokens=16).text
    room = lm.target.max_length - len(lm.encode(question("x")))
    whole = own(lm, question("x"), seed=1, temperature=0.3, top_k=4, max_tokens=room)
    assert chat(app_of(lm), "x", seed=1).choices[0].message.content == whole.text
    for fields, num_tokens in (({}, 5), ({"max_tokens": 7}, 7)):
        answer = chat(app_of(lm, max_tokens=5), "x", temperature=0, extra_body={"ignore_eos": True}, **fields)
        assert answer.usage.completion_tokens == num_tokens


@pytest.mark.parametrize(
    ("content", "expected"),
    [({"top_k": -1}, None), ({"top_k": 0}, None), ({"top_k": 50.0}, 50), ({"top_k": 4}, 4)],
    ids=str,
)
def test_defaults_as_other_servers_read_them(content, expected, folder_of, tmp_path_factory):
    folder = chat_folder(folder_of, tmp_path_factory)
    (folder / "generation_config.json").write_text(json.dumps(content))
    lm = load(folder)
    assert Defaults.for_model(lm, lm.engine()).sampling.top_k == expected


@pytest.mark.parametrize("content", [{"top_p": 0.0}, {"repetition_penalty": 0}, {"top_k": 1.5}, {"top_k": -2}], ids=str)
def test_defaults_that_are_wrong_name_the_file(content, folder_of, tmp_path_factory):
    folder = chat_folder(folder_of, tmp_path_factory)
    (folder / "generation_config.json").write_text(json.dumps(content))
    lm = load(folder)
    with refused(SamplingError, "generation_config.json: ", *content, "found", "correct it, or remove it"):
        Defaults.for_model(lm, lm.engine())


# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_says_the_role_the_text_the_end_and_the_usage(lm):
    usage = {"include_usage": True}
    *chunks, last = chat(app_of(lm), TEXTS[0], max_tokens=12, temperature=0, n=2, stream=True, stream_options=usage)
    expected = own(lm, question(TEXTS[0]))
    for index in (0, 1):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        assert "".join(choice.delta.content or "" for choice in mine) == expected.text
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + [expected.finish_reason]
    assert all(chunk.usage is None and chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == 2 * len(expected.token_ids)
    assert last.metrics["speculative_decoding"]["num_draft_tokens"] > 0
    assert len({chunk.id for chunk in (*chunks, last)}) == 1


@pytest.mark.parametrize("trace", [True, "full"])
def test_traces_of_a_stream_are_those_of_its_own_texts(lm, trace):
    """A chunk's trace belongs to its own sequence, although both sequences share each step."""
    fields = {"prompt": TEXTS[:2], "max_tokens": 12, "temperature": 0, "stream": True}
    body = {"speculation": {"trace": trace}, "ignore_eos": True}
    chunks = ask(app_of(lm), lambda client: make(client.completions, **fields, extra_body=body))
    for index, text in enumerate(TEXTS[:2]):
        mine = [chunk for chunk in chunks if chunk.choices[0].index == index]
        traces = [chunk.draftwing for chunk in mine if hasattr(chunk, "draftwing")]
        expected = own(lm, text, max_tokens=12, ignore_eos=True)
        assert [token for each in traces for token in each["token_ids"]] == expected.token_ids
        assert traces[0]["position"] == len(lm.encode(text))
        assert [each["at"] for each in traces] == sorted(each["at"] for each in traces)
        assert traces[0]["at"] > 0
        nodes = [node for each in traces for node in each["nodes"]]
        assert {"distribution" in node for node in nodes} == {trace == "full"}


def test_a_stream_of_completions_ends_with_done(lm):
    body = {"model": "tiny", "prompt": TEXTS[0], "max_tokens": 9, "temperature": 0, "stream": True, "ignore_eos": True}

    async def work(http):
        return [
            await http.post("/v1/completions", json={**body, **options})
            for options in ({}, *({"stream_options": {"include_usage": each}} for each in (False, True)))
        ]

    def chunks_of(answer):
        *events, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    answer, without, with_usage = send(app_of(lm), work)
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks, text = chunks_of(answer), own(lm, TEXTS[0], max_tokens=9, ignore_eos=True).text
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert '"usage"' not in answer.text + without.text
    *chunks, last = chunks_of(with_usage)
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["usage"]["completion_tokens"] > 0


# --- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_of_chats_streamed_or_not(lm):
    common = {"max_tokens": 10, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole, chunks = (chat(app_of(lm), TEXTS[0], stream=stream, **common) for stream in (False, True))
    expected = own(lm, question(TEXTS[0]), max_tokens=10, logprobs=3)
    found = whole.choices[0].logprobs.content
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in expected.logprobs])
    assert [len(each.top_logprobs) for each in found] == [3] * len(expected.token_ids)
    read = b"".join(bytes(each.bytes) for each in found)
    assert read.decode("utf-8", "replace").removesuffix("</s>") == expected.text
    streamed = [each for c in chunks if c.choices[0].logprobs for each in c.choices[0].logprobs.content]
    assert streamed == found


def test_logprobs_of_completions(lm):
    common = {"max_tokens": 8, "temperature": 0, "logprobs": 2}
    found = complete(app_of(lm), TEXTS[0], **common).choices[0].logprobs
    expected = own(lm, TEXTS[0], max_tokens=8, logprobs=2)
    assert found.token_logprobs == pytest.approx([each.logprob for each in expected.logprobs])
    assert all(name in top for name, top in zip(found.tokens, found.top_logprobs, strict=True))
    offsets = [sum(map(len, found.tokens[:place])) for place in range(len(found.tokens))]
    assert found.text_offset == offsets
    sampled = {"max_tokens": 8, "seed": 3, "logprobs": 1}
    traced = {"extra_body": {"speculation": {"trace": True, "tree": "chain:2"}}}  # a chunk for each step, however late
    greedy, sampled = (
        [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
        for chunks in (complete(app_of(lm), TEXTS[0], stream=True, **fields, **traced) for fields in (common, sampled))
    )
    assert len(greedy) > 1
    assert [offset for each in greedy for offset in each.text_offset] == offsets
    pairs = [pair for each in sampled for pair in zip(each.tokens, each.top_logprobs, strict=True)]
    assert all(name in top for name, top in pairs)
    assert any(len(top) == 2 for _, top in pairs)  # a token that is not the likeliest is listed next to it


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "status", "param", "words"),
    [
        ({"model": "other"}, 404, "model", "there is no model 'other' here: choose tiny"),
        ({"messages": []}, 400, "messages", "at least 1 item"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages.0.role", "'system'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content", "type text"),
        ({"messages": [{**question("x")[0], "prefix": True}]}, 400, "messages", "only the last message"),
        ({"messages": [{**question("x")[0], "prefix": 1}]}, 400, "messages.0.prefix", "valid boolean"),
        ({"messages": question("a" * 3000)}, 400, "messages", "tokens"),
        ({"temperature": -1}, 400, "temperature", "temperature must be 0 (greedy)"),
        ({"temperature": "hot"}, 400, "temperature", "valid number"),
        ({"top_p": 0}, 400, "top_p", "in (0, 1]"),
        ({"n": 1000}, 400, "n", "128"),
        ({"stop": [""]}, 400, "stop.0", "at least 1 character"),
        ({"stop": ["x"] * 65}, 400, "stop", "at most 64 items"),
        ({"stop": 5}, 400, "stop", "valid string"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", "token ids as keys"),
        ({"logit_bias": {"999": 1}}, 400, None, "outside the target's vocabulary"),
        ({"logit_bias": {"9": "much"}}, 400, None, "must be a number"),
        ({"top_logprobs": 2}, 400, "top_logprobs", "needs logprobs"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", "set stream"),
        ({"functions": []}, 400, "functions", "unknown field 'functions'"),
        ({"store": 0.0}, 400, "store", "valid boolean"),
        ({"store": True}, 400, "store", "only false is supported"),
        ({"speculation": {"trace": 1}}, 400, "speculation.trace", "valid boolean"),
        ({"frobnicate": 1}, 400, "frobnicate", "unknown field 'frobnicate'"),
        ({"min_tokens": 50}, 400, "min_tokens", "max_tokens = 4"),
        ({"speculation": {"draft": "eagle9"}}, 400, None, "'eagle9' is not loaded"),
        ({"speculation": {"tree": "oak"}}, 400, "speculation", "chain:K"),
        ({"speculation": {"tree": "chain:99999"}}, 400, "speculation", "a budget needs depth"),
        ({"speculation": {"tree": "chain:65"}}, 400, "speculation", "at most 64 nodes"),
        ({"speculation": {"tree": "dynamic:65,8,8"}}, 400, "speculation", "at most 64 nodes"),
        ({"speculation": {"tree": "dynamic:64,17,16"}}, 400, "speculation", "DEPTH times WIDTH at most 256"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema", "needs one"),
        ({"grammar": "start: ("}, 400, "grammar", "cannot be followed"),
        ({"grammar": 'start: "a"', "response_format": {"type": "json_object"}}, 400, "grammar", "give one of them"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, 400, "chat_template_kwargs", "no variable"),
        ({"chat_template_kwargs": {"padding": "x"}}, 400, "chat_template_kwargs", "no variable"),
        ({"tool_choice": "required"}, 400, "tool_choice", "not in tools"),
    ],
)
def test_what_is_wrong_is_named(lm, change, status, param, words):
    body = {"model": "tiny", "messages": question("x"), "max_tokens": 4, **change}

    async def work(http):
        return await http.post("/v1/chat/completions", json=body)

    answer = send(app_of(lm), work)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert error["param"] == param, error
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is empty: send one JSON object"),
        (b"{", "the body is not JSON: send one JSON object"),
        (b"[" * 100_000, "the body cannot be read: send one JSON object that is not nested too deep"),
    ],
    ids=["empty", "no JSON", "nested"],
)
def test_a_body_that_is_no_object(lm, body, words):
    headers = {"content-type": "application/json"}
    answer = send(app_of(lm), lambda http: http.post("/v1/completions", content=body, headers=headers))
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, words)


def test_the_most_that_a_request_may_ask_for(lm):
    """A text more than 128: of prompts, of n, of both; a prompt that leaves no room, and one that leaves a token's."""
    room = lm.target.max_length

    async def work(http):
        bodies = [{"prompt": ["x"] * 129}, {"prompt": ["x"] * 65, "n": 2}, {"prompt": [5] * room}]
        bodies.append({"prompt": [5] * (room - 1), "ignore_eos": True})
        return [await http.post("/v1/completions", json={"max_tokens": 2, **body}) for body in bodies]

    *refused, last = send(app_of(lm), work)
    assert [answer.status_code for answer in refused] == [400] * 3
    errors = [answer.json()["error"] for answer in refused]
    assert [error["param"] for error in errors] == ["prompt", "n", "prompt"]
    assert ["found 129" in errors[0]["message"], "found 130" in errors[1]["message"]] == [True, True]
    assert errors[2]["code"] == "context_length_exceeded"
    assert last.json()["usage"] == {
        "prompt_tokens": room - 1,
        "completion_tokens": 1,
        "total_tokens": room,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert last.json()["choices"][0]["finish_reason"] == "length"


def test_the_largest_trees_that_requests_may_choose(lm):
    async def work(http):
        async def status(tree, **speculation):
            body = {"prompt": "x", "max_tokens": 2, "speculation": {"tree": tree, **speculation}}
            return (await http.post("/v1/completions", json=body)).status_code

        trees = ["chain:7", "chain:8", "dynamic:7,7,4", "dynamic:8,7,4", "dynamic:7,5,6"]
        return [await status(tree) for tree in trees], await status("dynamic:60,8,8", max_nodes=5)

    assert send(app_of(lm, max_nodes=7), work) == ([200, 400, 200, 400, 400], 200)


def test_the_client_raises_its_own_errors_and_lists_models(lm):
    async def work(client):
        for kind, change in (
            (openai.NotFoundError, {"model": "other"}),
            (openai.BadRequestError, {"echo": True}),
            (openai.BadRequestError, {"suffix": "end"}),
            (openai.BadRequestError, {"prompt": []}),
            (openai.BadRequestError, {"prompt": ""}),
            (openai.BadRequestError, {"prompt": [300]}),
        ):
            with pytest.raises(kind) as caught:
                await client.completions.create(**{"model": "tiny", "prompt": "x", **change})
            assert caught.value.body["message"]
        names = ("tiny", "small")
        found = [await client.completions.create(model=name, prompt="x", max_tokens=2) for name in names]
        models = [await client.models.retrieve(name) for name in names]
        return [each.id async for each in client.models.list()], [m.id for m in models], [a.model for a in found]

    for names in ask(make_app(lm, Settings(names=("tiny", "small"))), work):
        assert names == ["tiny", "small"]


def test_too_many_texts_are_refused_at_once_and_leave_none_behind(lm, monkeypatch):
    """While the engine stands still: the second text of a request finds no place, and takes the first one with it."""
    app = app_of(lm, max_batch=1, max_waiting=0)
    engine, go_on, made = app.state.worker.engine, threading.Event(), []
    steps, submit = engine.steps, engine.submit

    def held():
        assert go_on.wait(PATIENT)
        return steps()

    def noted(*args, **options):
        made.append(submit(*args, **options))
        return made[-1]

    monkeypatch.setattr(engine, "steps", held)
    monkeypatch.setattr(engine, "submit", noted)

    async def work(http):
        busy = await http.post("/v1/completions", json={"prompt": "x", "n": 2, "max_tokens": 9, "ignore_eos": True})
        go_on.set()
        return busy

    busy = send(app, work)
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
    assert (busy.json()["error"]["type"], busy.json()["error"]["code"]) == ("rate_limit_error", "too_many_requests")
    assert [request.finish_reason for request in made] == ["cancelled"]


def test_a_server_that_shuts_down_says_so(lm):
    app = app_of(lm)

    async def work(http):
        before = await http.get("/health")
        app.state.worker.drain()
        return before, await http.get("/health"), await http.post("/v1/completions", json={"prompt": "x"})

    before, after, refused = send(app, work)
    assert (before.status_code, before.json()["status"]) == (200, "ok")
    assert (after.status_code, after.json()["status"]) == (503, "draining")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("place", [0, 1, 3])
def test_every_stop_string_of_a_request_counts(lm, place):
    whole = own(lm, TEXTS[0], max_tokens=12).text
    found = next(piece for piece in whole[1:] if not piece.isspace())
    stops = ["\x01never"] * 4
    stops[place] = found
    answer = complete(app_of(lm), TEXTS[0], max_tokens=12, temperature=0, stop=stops).choices[0]
    assert (answer.text, answer.finish_reason) == (whole[: whole.index(found)], "stop")


def test_the_inspector_shows_costs_as_soon_as_steps_were_observed(folder):
    app = app_of(dw.load(folder, "lookup", device="cpu"))

    async def work(http):
        before = (await http.get("/inspector/costs")).json()
        await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 12, "ignore_eos": True})
        return before, (await http.get("/inspector/costs")).json()

    before, after = send(app, work)
    assert "learned from requests" in before["why"]
    assert [count for count, _ in after["verify"]][:3] == [1, 2, 3]
    assert all(seconds > 0 for _, seconds in after["verify"])
    assert after["chain"] == after["tree"] == []


def test_the_inspector_shows_the_costs_of_chains_and_trees(lm, monkeypatch):
    costs = Costs(Curve(((1, 1.0), (2, 1.5))), Curve(((1, 0.25),)), Curve(((1, 0.5),)), 4)
    monkeypatch.setattr(dw.LM, "observed_costs", costs)
    shown = send(app_of(lm), lambda http: http.get("/inspector/costs")).json()
    assert shown == {"verify": [[1, 1.0], [2, 1.5]], "chain": [[1, 0.25]], "tree": [[1, 0.5]]}


def test_a_text_that_fails_is_an_error_and_the_others_are_not(folder):
    lm = load(folder, dtype="float64")
    with torch.no_grad():
        lm.target.embedding.table[7] = torch.nan
    bad = {"prompt": [5, 7, 5], "max_tokens": 4, "logit_bias": {"7": -100}}

    async def work(http):
        good = {**bad, "prompt": [5, 6, 5], "temperature": 0}
        return await asyncio.gather(
            *(http.post("/v1/completions", json=each) for each in (bad, good, {**bad, "stream": True}))
        )

    failed, fine, stream = send(app_of(lm), work)
    assert failed.status_code == 500
    assert "hold NaN" in failed.json()["error"]["message"]
    assert fine.json()["usage"]["completion_tokens"] > 0
    error, done, rest = stream.text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["type"] == "server_error"
    assert (done, rest) == ("data: [DONE]", "")


def test_bodies_that_are_none(lm):
    message = '{"model": "tiny", "messages": [{"role": "user", "content": "x"%s}]%s}'
    bodies = [
        *(b"{", b"[" * 60_000, b"null", b'"x"', b"\xff\xfe", b"", message.replace('"x"', '"\\ud800"') % ("", "")),
        *(message % more for more in (("", ', "temperature": NaN'), ("", ', "seed": ' + "9" * 4000))),
        message % (', "more": ' + "[" * 500 + "]" * 500, ""),
        json.dumps({"prompt": "x", **{f"f{n}": 1 for n in range(5000)}}),
    ]
    fits = json.dumps({"prompt": "x", "max_tokens": 1}).encode().ljust(65_536)

    async def pieces(*parts):
        for part in parts:
            yield part

    async def work(http):
        async def post(content, kind="application/json", path="/v1/completions"):
            return await http.post(path, content=content, headers={"content-type": kind})

        invalid = [await post(body, path="/v1/chat/completions") for body in bodies]
        invalid += [await post(b'{"prompt": "x"}', kind="text/plain")]
        large = [await post(b"x" * 65_537), await post(pieces(*[b"x" * 1000] * 100))]
        return invalid, large, [await post(fits), await post(pieces(fits[:40_000], fits[40_000:]))]

    invalid, large, fitting = send(app_of(lm, max_body=65_536), work)
    for status, answers in ((400, invalid), (413, large), (200, fitting)):
        assert [answer.status_code for answer in answers] == [status] * len(answers)
    assert all(answer.json()["error"]["message"] for answer in (*invalid, *large))


def test_a_body_that_does_not_come_is_not_waited_for():
    """Nor does it reach the app; one that comes in time does."""
    reached, sent = [], []

    async def app(scope, receive, send):
        reached.append((await receive())["body"])

    async def never():
        await asyncio.Event().wait()

    async def at_once():
        return {"type": "http.request", "body": b"x"}

    async def send(message):
        sent.append(message)

    async def work(receive, patience):
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await Guard(app, max_body=9, patience=patience)(scope, receive, send)

    asyncio.run(asyncio.wait_for(work(never, 0.01), PATIENT))
    assert (reached, sent[0]["status"]) == ([], 408)
    assert json.loads(sent[1]["body"])["error"]["type"] == "invalid_request_error"
    asyncio.run(work(at_once, PATIENT))
    assert (reached, len(sent)) == ([b"x"], 2)


def test_a_length_of_any_number_of_digits_is_refused():
    """Python refuses to make a number of thousands of them."""
    sent = []

    async def unused(*_):
        raise AssertionError

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"content-length", b"9" * 5000)]}
    asyncio.run(Guard(unused, max_body=9)(scope, unused, send))
    assert sent[0]["status"] == 413


def test_keys_and_hosts(lm):
    settings = {"api_keys": ("secret", "other"), "hosts": ("localhost", "Test", "::1")}

    async def work(http):
        found = []
        for key in (
            *("Bearer secret", "bearer other", "Bearer wrong", "Basic secret", "secret", ""),
            "Bearer sécret".encode(),
        ):
            found.append((await http.get("/v1/models", headers={"authorization": key})).status_code)
        open_to_all = [(await http.get(path)).status_code for path in ("/health", "/metrics", "/openapi.json")]
        hosts = ["localhost:80", "[::1]:80", "[::1]", "evil.example", "localhost.evil.example:80", ""]
        asked = [(await http.get("/health", headers={"host": host})).status_code for host in hosts]
        spaced = await http.get("/v1/models", headers={"authorization": "Bearer  secret"})
        writes = [(await http.post(path)).status_code for path in ("/health", "/other")]
        refused = await http.post("/v1/completions", json={"prompt": "x"})
        return [*found, spaced.status_code], open_to_all, asked, writes, refused

    keys, open_to_all, hosts, writes, refused = send(app_of(lm, **settings), work)
    assert keys == [200, 200, 401, 401, 401, 401, 401, 200]
    assert writes == [401] * 2
    assert open_to_all == [200] * 3
    assert hosts == [200, 200, 200, 403, 403, 403]
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert "access-control-allow-origin" not in refused.headers


# --- figures ---------------------------------------------------------------------------------------------------------


def test_figures_count_the_steps_that_drafted():
    """By vLLM's definitions: a mean length counts the bonus, a histogram the drafts by what was kept of them."""
    rows = [RowStep(1, (5,) * (kept + 1), drafted, kept, drafted) for drafted, kept in ((0, 0), (4, 2), (3, 0), (5, 2))]
    assert speculation_metrics(rows, detailed=True) == {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + 4 / 3,
            "draft_acceptance_rate": 4 / 12,
            "acceptance_histogram": [1, 0, 2],
            "num_spec_steps": 3,
            "num_accepted_draft_tokens": 4,
            "num_draft_tokens": 12,
            "per_step_accepted": [2, 0, 2],
            "per_step_drafted": [4, 3, 5],
        }
    }
    plainly = speculation_metrics(rows[:1])["speculative_decoding"]
    assert (plainly["mean_acceptance_length"], plainly["acceptance_histogram"]) == (1, [])


def test_times_are_counted_by_text_and_by_token():
    """Of a text that comes at 100.0 s: its first token 0.5 s later, three together 0.3 s after that, its end at 1 s."""
    metrics, request = Metrics("tiny"), Request(4, [5, 6, 7], Sampling())
    ticket = Ticket(request, lambda: None)
    ticket.submitted_at = 100.0
    for now, tokens in ((100.5, (1,)), (100.8, (2, 3, 4))):
        row = RowStep(4, tokens, 0, 0, 0)
        metrics.add_step(SimpleNamespace(rows=[row]), {4: ticket}, now)
    request.finish_reason = "length"
    metrics.add_end(ticket, 101.0)

    def value(name, **labels):
        return metrics.registry.get_sample_value(f"draftwing_{name}", {"model_name": "tiny", **labels})

    first, between, whole = (
        f"{name}_seconds" for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    )
    assert [value(f"{name}_count") for name in (first, between, whole)] == [1, 3, 1]
    assert [value(f"{name}_sum") for name in (first, between, whole)] == pytest.approx([0.5, 0.3, 1.0])
    assert [value(f"{first}_bucket", le=bound) for bound in ("0.2", "0.5", "1.0", "+Inf")] == [0, 1, 1, 1]
    assert [value(f"{between}_bucket", le=bound) for bound in ("0.075", "0.15", "+Inf")] == [0, 3, 3]
    assert [value(f"{whole}_bucket", le=bound) for bound in ("0.5", "1.0")] == [0, 1]  # a bound is in its bucket
    metrics.add_step(SimpleNamespace(rows=[RowStep(4, (5,), 0, 0, 0)]), {4: ticket}, 102.0)
    assert value(f"{first}_count") == 2  # nothing was kept of the request that ended
    metrics.add_step(SimpleNamespace(rows=[RowStep(5, (), 0, 0, 0)]), {5: ticket}, 103.0)
    assert value(f"{first}_count") == 2  # a row that failed has no first token
    for _ in range(2):
        metrics.add_end(ticket, 103.0)
    assert value("requests_total", finished_reason="length") == 3


def test_how_busy_the_engine_is_under_both_names():
    metrics = Metrics("tiny")
    metrics.watch(SimpleNamespace(stats=EngineStats(1, 2, 3, 40, 5, 80, 20, 6)))
    for own_name, theirs, value in (
        ("requests_running", "num_requests_running", 1),
        ("requests_waiting", "num_requests_waiting", 2),
        ("preemptions_total", "num_preemptions_total", 3),
        ("prefix_queries_total", "prefix_cache_queries_total", 40),
        ("prefix_hits_total", "prefix_cache_hits_total", 5),
        ("kv_slots_used_share", "kv_cache_usage_perc", 0.25),
    ):
        for name in (f"draftwing_{own_name}", f"vllm:{theirs}"):
            assert metrics.registry.get_sample_value(name, {"model_name": "tiny"}) == value, name
    assert metrics.registry.get_sample_value("draftwing_drafter_faults_total", {"model_name": "tiny"}) == 6


def test_prometheus_reads_both_names(lm):
    async def work(http):
        body = {"model": "tiny", "prompt": TEXTS[2], "max_tokens": 20, "temperature": 0}
        body["speculation"] = {"detailed": True}
        answer = await http.post("/v1/completions", json=body)
        found = await http.get("/metrics", headers={"accept": "text/plain"})
        return answer.json(), found.text

    answer, text = send(app_of(lm, kv_memory=2**20), work)
    figures = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            figures[name.replace(',model_name="tiny"', "").replace('{model_name="tiny"}', "")] = float(value)
    ours = answer["metrics"]["speculative_decoding"]
    latencies = figures["vllm:inter_token_latency_seconds_count"]
    requests = ('requests_total{finished_reason="length"}', 'request_success_total{finished_reason="length"}')
    for ours_name, theirs, value in (
        ("draft_tokens_total", "spec_decode_num_draft_tokens_total", ours["num_draft_tokens"]),
        ("drafts_total", "spec_decode_num_drafts_total", ours["num_spec_steps"]),
        ("accepted_tokens_total", "spec_decode_num_accepted_tokens_total", ours["num_accepted_draft_tokens"]),
        ("prompt_tokens_total", "prompt_tokens_total", answer["usage"]["prompt_tokens"]),
        ("generation_tokens_total", "generation_tokens_total", 20),
        ("requests_running", "num_requests_running", 0),
        ("prefix_queries_total", "prefix_cache_queries_total", answer["usage"]["prompt_tokens"] - 1),
        (*requests, 1),
        ("time_to_first_token_seconds_count", "time_to_first_token_seconds_count", 1),
        ("inter_token_latency_seconds_count", "inter_token_latency_seconds_count", latencies),
        ("e2e_request_latency_seconds_count", "e2e_request_latency_seconds_count", 1),
    ):
        assert figures[f"draftwing_{ours_name}"] == figures[f"vllm:{theirs}"] == value, ours_name
    by_depth = [
        value
        for name, value in figures.items()
        if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    ]
    accepted = ours["per_step_accepted"]
    assert by_depth == [sum(num > depth for num in accepted) for depth in range(max(accepted))]
    assert len(by_depth) > 1
    assert 0 < figures["vllm:inter_token_latency_seconds_count"] < 20
