"""Tools and formats: tools in prompts, calls in answers, and answers that follow a grammar."""

import asyncio
import json
from dataclasses import replace
from typing import Literal

import pytest
from pydantic import BaseModel

from draftwing.serve.convert import call_schemas, forced_schema, messages_with_tools, parse_chat, template_messages
from draftwing.serve.models import ChatBody
from draftwing.serve.tool_calls import ToolReader
from draftwing.text.grammar import Grammar
from serving import TEXTS, app_of, ask, chat, chat_folder, load, make, question, running, send

NAMES = ("weather", "add")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.fixture(scope="module")
def lm(folder_of, tmp_path_factory):
    return load(chat_folder(folder_of, tmp_path_factory, max_position_embeddings=1024), draft_options={"min_match": 1})


def read(text, size, most=None):
    """What a reader makes of a text that comes in pieces of a size."""
    reader = ToolReader(NAMES, most)
    said, calls = "", []
    for at in range(0, len(text), size):
        more, deltas = reader.push(text[at : at + size])
        said += more
        for delta in deltas:
            if delta.call is not None:
                calls.append([delta.call.name, ""])
            assert delta.index == len(calls) - 1
            calls[-1][1] += delta.arguments
    assert not reader.is_open
    return said + reader.flush(), [(name, json.loads(arguments)) for name, arguments in calls]


ROME, TWO = ("weather", {"city": "Rome"}), ("add", {"a": 1, "b": [2]})
BARE_ROME, BARE_TWO = (json.dumps({"name": name, "parameters": given}) for name, given in (ROME, TWO))
QUOTED = {"q": 'a " } </tool_call> \\', "d": [{}]}
CALL = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', "", [ROME]),
        (
            'Wait.\n<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>\n'
            '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>',
            "Wait.\n",
            [ROME, TWO],
        ),
        ('{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
        (f"{BARE_ROME}; {BARE_TWO}", "", [ROME, TWO]),
        ('<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
        ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]', "", [ROME]),
        (f"[{BARE_ROME}, {BARE_TWO}]", "", [ROME, TWO]),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', "", [ROME]),
        ('weather{"city": "Rome"}', "", [ROME]),
        ('{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}', "", [ROME]),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
        ('{"name": "weather", "arg', '{"name": "weather", "arg', []),
        ('{"parameters": {"city": "Rome"}, "type": "x", "name": "weather"}', "", [ROME]),
        ('{"name": "weather", "id": [{"a": "]}"}, 1], "arguments": {"city": "Rome"}} ', "", [ROME]),
        ('{"name": "weather"}', "", [("weather", {})]),
        ('{"arguments": {"city": "Rome"}, "name": "weather", "parameters": {"city": "Oslo"}}', "", [ROME]),
        ('{"name": "weather", "arguments": "{\\"city\\":\n\\"Rome\\"}"}', "", [ROME]),
        ('{"name": "add", "arguments": {"q": "a \\" } </tool_call> \\\\", "d": [{}]}}', "", [("add", QUOTED)]),
        ('wea<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}', "wea", [TWO]),
        ("<tool_call>none</tool_call> weather", "<tool_call>none</tool_call> weather", []),
        ('Hm <tool_call>no <tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}', "Hm <tool_call>no ", [TWO]),
        ('{"a": 1} [TOOL_CALLS]add {"a": 1, "b": [2]}', '{"a": 1} ', [TWO]),
        (f"<tool_call>{BARE_ROME}</tool_call> So I <tool_call>{BARE_TWO}</tool_call> did", "", [ROME, TWO]),
        ('{"name": "weather" oops', '{"name": "weather" oops', []),
        ('{"name": 3}', '{"name": 3}', []),
        ("[TOOL_CALLS]weather[ARGS", "[TOOL_CALLS]weather[ARGS", []),
        ("weathercock <tool_cal", "weathercock <tool_cal", []),
        ("[1, 2] is a list", "[1, 2] is a list", []),
        ("a < b and <b>", "a < b and <b>", []),
        ("", "", []),
        ("  \n", "  \n", []),
    ],
)  # fmt: skip
def test_calls_are_read_in_every_form(text, said, calls):
    for size in (1, 3, 1000):
        assert read(text, size) == (said, calls)


def test_limits_of_calls_and_certain_text():
    text = '{"name": "add", "parameters": {"a": 1}}' * 2
    assert read(text, 1000, most=1) == ("", [("add", {"a": 1})])
    reader = ToolReader(NAMES)
    said = [reader.push(piece)[0] for piece in ("Well", ", <to", "ol", " <tool_call>{")]
    assert said == ["Well", ", ", "", "<tool "]


def test_arguments_come_as_they_are_written():
    reader, found = ToolReader(NAMES), []
    pieces = ('So <tool_call>{"name": "we', 'ather", "arguments": {"ci', 'ty": "Ro', 'me"}', "}</tool_call>", "\n{")
    for piece in pieces:
        said, deltas = reader.push(piece)
        found.append((said, [delta.call and delta.call.name for delta in deltas], "".join(d.arguments for d in deltas)))
        assert reader.is_open == (len(found) in (2, 3, 4))
    assert found == [
        ("So ", [], ""), ("", ["weather", None], '{"ci'), ("", [None], 'ty": "Ro'), ("", [None], 'me"}'),
        ("", [], ""), ("", [], ""),
    ]  # fmt: skip
    assert reader.flush() == ""


def test_a_template_without_tools_is_told_of_them(lm):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Warm?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "yes", "tool_call_id": "1"},
    ]
    told = messages_with_tools(messages, TOOLS)
    assert told[0]["content"].startswith("Be brief.\n\n# Tools")
    assert '"description": "Of a city."' in told[0]["content"]
    assert told[2]["content"] == '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert told[3] == {"role": "user", "content": "<tool_response>\nyes\n</tool_response>"}


# Gemma's: no system messages, and turns alternate.
ALTERNATING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
TWO_CALLS = [
    {"role": "user", "content": "Warm?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": name, "type": "function", **CALL} for name in "ab"]},
    {"role": "tool", "tool_call_id": "a", "content": "12"},
    {"role": "tool", "tool_call_id": "b", "content": "14"},
    {"role": "user", "content": "And now?"},
]


def test_tools_of_a_template_whose_turns_alternate(folder_of, tmp_path_factory):
    lm = load(chat_folder(folder_of, tmp_path_factory, ALTERNATING, max_position_embeddings=1024))
    called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    results = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in (12, 14))
    turns = f"<assistant>{called}\n{called}<user>{results}"
    description = messages_with_tools([], TOOLS)[0]["content"]

    async def work(http):
        bodies = [{"messages": TWO_CALLS[:num], "tools": tools} for num in (1, 4, 5) for tools in (TOOLS, [])]
        return [await http.post("/v1/chat/completions", json={**body, "max_tokens": 1}) for body in bodies]

    for place, answer in enumerate(send(app_of(lm), work)):
        text = ("<user>Warm?", f"<user>Warm?{turns}", f"<user>Warm?{turns}\nAnd now?")[place // 2]
        text = text if place % 2 else text.replace("Warm?", f"{description}\n\nWarm?")
        assert answer.json()["usage"]["prompt_tokens"] == len(lm.tokenizer.encode_plain(text)), answer.text


def test_turns_that_are_not_results_stay_as_they_are():
    messages = [{"role": "user", "content": text} for text in ("a", "b")]
    assert messages_with_tools(messages, []) == messages
    result = {"role": "tool", "content": "1"}
    merged = messages_with_tools([messages[0], result, messages[1]], [])
    assert merged == [{"role": "user", "content": "a\n<tool_response>\n1\n</tool_response>\nb"}]
    prefix = {"role": "assistant", "content": "c", "prefix": True}
    assert messages_with_tools([prefix], TOOLS, reads_system=False)[1] == prefix


def test_arguments_of_earlier_calls_are_objects():
    """Those that are not JSON stay as they are."""
    for given, expected in (("", {}), (None, {}), ('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("{", "{")):
        call = {"function": {"name": "f", "arguments": given}}
        body = ChatBody.model_validate({"messages": [{"role": "assistant", "tool_calls": [call]}]})
        (message,) = template_messages(body)
        assert message["tool_calls"][0]["function"]["arguments"] == expected


def test_a_template_with_tools_gets_them(folder_of, tmp_path_factory):
    last = "messages[-1].tool_calls[0].function.arguments.city"
    template = "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}{{ " + last + " }}"
    lm = load(chat_folder(folder_of, tmp_path_factory, template))
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    answer = chat(app_of(lm), [{"role": "assistant", "tool_calls": [call]}], tools=TOOLS, max_tokens=1)
    assert answer.usage.prompt_tokens == len(lm.tokenizer.encode_plain("(weather)(stop)Rome"))


@pytest.mark.parametrize(
    ("choice", "stream"), [("required", False), ({"type": "function", "function": {"name": "weather"}}, True)]
)
def test_a_call_can_be_forced(lm, choice, stream):
    tools = TOOLS[:1] if choice == "required" else TOOLS
    fields = {"temperature": 1, "seed": 1, "max_tokens": 150}
    answer = chat(app_of(lm), "x", tools=tools, tool_choice=choice, stream=stream, **fields)
    if not stream:
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls
        assert choice.message.content is None
    else:
        deltas = [delta for chunk in answer for delta in chunk.choices[0].delta.tool_calls or ()]
        call, choice = deltas[0], answer[-1].choices[0]
        call.function.arguments = "".join(delta.function.arguments for delta in deltas)
        assert not any(chunk.choices[0].delta.content for chunk in answer)
        assert call.index == 0
    assert choice.finish_reason == "tool_calls"
    assert (call.type, call.function.name) == ("function", "weather")
    found = json.loads(call.function.arguments)
    assert found["city"] in ("Rome", "Oslo")
    assert isinstance(found["warm"], bool)


def test_of_several_tools_any_may_have_to_be_called():
    """Or the one that is named; or none."""

    def names(choice):
        body = ChatBody.model_validate({"messages": question("x"), "tools": TOOLS, "tool_choice": choice})
        schema = forced_schema(body, TOOLS)
        schemas = (schema or {"anyOf": []}).get("anyOf", [schema])
        return [each["properties"]["name"]["const"] for each in schemas]

    assert names("required") == ["weather", "stop"]
    for name in ("weather", "stop"):
        assert names({"type": "function", "function": {"name": name}}) == [name]
    assert names("auto") == names("none") == []


def test_no_choice_of_tools_tells_the_model_of_none(lm):
    options = ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS, "tool_choice": "auto"}, {"tools": TOOLS})
    answers = (chat(app_of(lm), "x", max_tokens=1, **each) for each in options)
    without, none, auto, default = (answer.usage.prompt_tokens for answer in answers)
    assert without == none < auto == default


SAID = 'Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Rome", "warm": true}}</tool_call>'
SECOND = '\n<tool_call>{"name": "stop", "arguments": {}}</tool_call>'


@pytest.fixture
def writes(lm, monkeypatch):
    """Makes the model write a given text, token by token as it decodes."""

    def use(text):
        def asked(body, *args):
            parsed = parse_chat(body, *args)
            held = {"constraint": lm.constraint(Grammar.lark(f"start: {json.dumps(text)}"))}
            return replace(parsed, options=parsed.options | held)

        monkeypatch.setattr("draftwing.serve.app.parse_chat", asked)

    return use


def test_the_official_client_adds_streamed_calls_up(lm, writes):
    writes(SAID + SECOND)
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    given = {
        "messages": question("x"), "tools": strict, "max_tokens": 300, "temperature": 0, "n": 2,
        "extra_body": {"speculation": {"tree": "chain:3"}},
    }  # fmt: skip

    async def work(client):
        whole = await make(client.chat.completions, **given)
        alone = await make(client.chat.completions, **given, parallel_tool_calls=False)
        assert [len(choice.message.tool_calls) for choice in alone.choices] == [1, 1]
        chunks = await make(client.chat.completions, **given, stream=True)
        async with client.chat.completions.stream(model="tiny", **given) as stream:
            events = [event async for event in stream]
            return whole, chunks, events, await stream.get_final_completion()

    whole, chunks, events, final = ask(app_of(lm), work)
    wanted = [("weather", '{"city": "Rome", "warm": true}'), ("stop", "{}")]
    for answer in (whole, final):
        for choice in answer.choices:
            assert choice.message.content == "Let me see. "
            assert choice.finish_reason == "tool_calls"
            assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == wanted
    for index in (0, 1):
        mine = [chunk.choices[0].delta for chunk in chunks if chunk.choices[0].index == index]
        deltas = [delta for each in mine for delta in each.tool_calls or ()]
        firsts = [delta for delta in deltas if delta.id is not None]
        assert [(each.index, each.type, each.function.name) for each in firsts] == [
            (place, "function", name) for place, (name, _) in enumerate(wanted)
        ]
        assert all(each.function.arguments == "" for each in firsts)
        assert len({each.id for each in firsts}) == len(wanted)
        assert [each.index for each in deltas] == sorted(each.index for each in deltas)
    fragments = [e.arguments_delta for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert sorted("".join(fragments)) == sorted(2 * "".join(arguments for _, arguments in wanted))  # of both choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_may_end_like_the_beginning_of_a_call(lm, writes, stream):
    writes("5 <tool")
    answer = chat(app_of(lm), "x", tools=TOOLS, max_tokens=30, temperature=0, stream=stream)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
    else:
        text = answer.choices[0].message.content
    assert text == "5 <tool"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_is_told_as_far_as_it_goes(lm, writes, stream):
    writes(SAID)
    answer = chat(app_of(lm), "x", tools=TOOLS, max_tokens=58, temperature=0, stream=stream)
    if stream:
        deltas = [delta for chunk in answer for delta in chunk.choices[0].delta.tool_calls or ()]
        arguments, reason = "".join(delta.function.arguments for delta in deltas), answer[-1].choices[0].finish_reason
    else:
        (choice,) = answer.choices
        arguments, reason = choice.message.tool_calls[0].function.arguments, choice.finish_reason
    assert reason == "length"
    assert '{"city": "Rome", "warm": true}'.startswith(arguments)
    assert arguments


def test_answers_follow_schemas_and_grammars_with_any_speculation(lm):
    def text(**fields):
        answer = chat(app_of(lm), TEXTS[0], max_tokens=150, temperature=1, seed=4, **fields)
        return answer.choices[0].message.content

    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    wishes = ({"draft": "none"}, {"tree": "chain:3"}, {"tree": "dynamic:7,3,3"})
    texts = [text(response_format=shape, extra_body={"speculation": wish}) for wish in wishes]
    assert texts == texts[:1] * 3
    assert set(json.loads(texts[0])) == {"city", "warm"}
    assert text(extra_body={"grammar": 'start: "yes" | "no"'}) in ("yes", "no")
    assert text(response_format={"type": "json_object"}).startswith("{")


def test_a_call_may_take_the_place_of_a_formatted_answer(lm):
    """With tools and a response format the model writes one or the other, and calls are parsed."""
    answer = {"$ref": "#/$defs/p", "$defs": {"p": {"const": "fine"}}}
    parameters = {"type": "object", "properties": {"at": {"$ref": "#/$defs/p"}}, "$defs": {"p": {"const": 5}}}
    parameters |= {"required": ["at"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("go", "stop")]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": answer}}

    async def work(client):
        async def write(first):
            given = {"tools": tools, "response_format": schema, "max_tokens": 150, "temperature": 0}
            bias = {str(lm.encode(first)[-1]): 50}
            return await make(client.chat.completions, messages=question("x"), logit_bias=bias, **given)

        return [await write(first) for first in '"{']

    formatted, called = (each.choices[0] for each in ask(app_of(lm), work))
    assert (formatted.message.content, formatted.message.tool_calls) == ('"fine"', None)
    assert (formatted.finish_reason, called.finish_reason) == ("stop", "tool_calls")
    (call,) = called.message.tool_calls
    assert call.function.name in ("go", "stop")
    assert json.loads(call.function.arguments) == {"at": 5}


def test_references_of_parameters_stay_within_them():
    """A property named like a keyword and literal values are no references."""
    here = {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#"}, "c": {"$ref": "http://x/#/y"}, "$ref": {"type": "string"}}
    literal = {"const": {"$ref": "#/z"}, "enum": [{"$ref": "#/z"}]}
    tools = [{"function": {"name": "f", "parameters": {"properties": here, "anyOf": [{"$ref": "#/q"}], **literal}}}]
    found = call_schemas(tools)[0]["properties"]["arguments"]
    assert found["properties"] == {
        "a": {"$ref": "#/properties/arguments/$defs/x"},
        "b": {"$ref": "#/properties/arguments"},
        "c": {"$ref": "http://x/#/y"},
        "$ref": {"type": "string"},
    }
    assert found["anyOf"] == [{"$ref": "#/properties/arguments/q"}]
    assert {key: found[key] for key in literal} == literal


class Report(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    warm: bool


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_reads_structured_output(lm, method):
    from langchain_openai import ChatOpenAI  # takes long, and each worker of pytest-xdist imports this file

    async def main():
        async with running(app_of(lm)) as http:
            chat = ChatOpenAI(
                model="tiny", api_key="x", base_url="http://test/v1", http_async_client=http, temperature=1, seed=1,
                max_tokens=500, max_retries=0,
            )  # fmt: skip
            return await chat.with_structured_output(Report, method=method).ainvoke("How is Rome?")

    assert isinstance(asyncio.run(main()), Report)
