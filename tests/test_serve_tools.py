"""Tools and formats: models are told of tools, their calls are read, and grammars hold answers to a form."""

import asyncio
import json
from typing import Literal

import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from draftwing.serve.tools import ToolReader, calling_messages
from serving import TEXTS, app_of, ask, chat_folder, load, question, running

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
    said = "".join(reader.push(text[at : at + size]) for at in range(0, len(text), size))
    rest, calls = reader.flush()
    return said + rest, [(call.name, json.loads(call.arguments)) for call in calls]


ROME, TWO = ("weather", {"city": "Rome"}), ("add", {"a": 1, "b": [2]})
BARE_ROME, BARE_TWO = (json.dumps({"name": name, "parameters": given}) for name, given in (ROME, TWO))
CALL = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}


@pytest.mark.parametrize("size", [1, 3, 1000])
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
        ("weathercock <tool_cal", "weathercock <tool_cal", []),
        ("[1, 2] is a list", "[1, 2] is a list", []),
        ("a < b and <b>", "a < b and <b>", []),
        ("", "", []),
        ("  \n", "  \n", []),
    ],
)  # fmt: skip
def test_calls_are_read_in_every_form(text, said, calls, size):
    assert read(text, size) == (said, calls)


def test_only_so_many_calls_count():
    text = '{"name": "add", "parameters": {"a": 1}}' * 2
    assert read(text, 1000, most=1) == ("", [("add", {"a": 1})])


def test_what_is_certain_is_said_at_once():
    reader = ToolReader(NAMES)
    assert [reader.push(piece) for piece in ("Well", ", <to", "ol", " <tool_call>{")] == ["Well", ", ", "", "<tool "]


def test_a_template_without_tools_is_told_of_them(lm):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Warm?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [CALL],
        },
        {"role": "tool", "content": "yes", "tool_call_id": "1"},
    ]
    told, variables = calling_messages(messages, TOOLS, lm.tokenizer)
    assert variables == {}
    assert told[0]["content"].startswith("Be brief.\n\n# Tools")
    assert '"description": "Of a city."' in told[0]["content"]
    assert told[2]["content"] == '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert told[3] == {"role": "user", "content": "<tool_response>\nyes\n</tool_response>"}


def test_a_template_with_tools_gets_them(folder_of, tmp_path_factory):
    last = "messages[-1].tool_calls[0].function.arguments.city"
    template = "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}{{ " + last + " }}"
    lm = load(chat_folder(folder_of, tmp_path_factory, template))
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}

    async def work(client):
        messages = [{"role": "assistant", "tool_calls": [call]}]
        return await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=1)

    assert ask(app_of(lm), work).usage.prompt_tokens == len(lm.tokenizer.encode_plain("(weather)(stop)Rome"))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_can_be_forced(lm, choice, stream):
    tools = TOOLS[:1] if choice == "required" else TOOLS

    async def work(client):
        found = await client.chat.completions.create(
            model="tiny", messages=question("x"), tools=tools, tool_choice=choice, temperature=1, seed=1, stream=stream,
            max_tokens=150,
        )  # fmt: skip
        return [chunk async for chunk in found] if stream else found

    answer = ask(app_of(lm), work)
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


def test_answers_follow_schemas_and_grammars_with_any_speculation(lm):
    async def work(client):
        make = client.chat.completions.create
        common = {"model": "tiny", "messages": question(TEXTS[0]), "max_tokens": 150, "temperature": 1, "seed": 4}
        shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
        found = [
            await make(**common, response_format=shape, extra_body={"speculation": wish})
            for wish in ({"draft": "none"}, {"tree": "chain:3"}, {"tree": "dynamic:7,3,3"})
        ]
        lark = await make(**common, extra_body={"grammar": 'start: "yes" | "no"'})
        return found, lark, await make(**common, response_format={"type": "json_object"})

    found, lark, free = ask(app_of(lm), work)
    texts = [answer.choices[0].message.content for answer in found]
    assert texts == texts[:1] * 3
    assert set(json.loads(texts[0])) == {"city", "warm"}
    assert lark.choices[0].message.content in ("yes", "no")
    assert free.choices[0].message.content.startswith("{")


class Report(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    warm: bool


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_reads_structured_output(lm, method):
    async def main():
        async with running(app_of(lm)) as http:
            chat = ChatOpenAI(
                model="tiny", api_key="x", base_url="http://test/v1", http_async_client=http, temperature=1, seed=3,
                max_tokens=500, max_retries=0,
            )  # fmt: skip
            return await chat.with_structured_output(Report, method=method).ainvoke("How is Rome?")

    assert isinstance(asyncio.run(main()), Report)
