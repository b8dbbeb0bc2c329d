"""Tools: how a model is told of them, and how it is held to calling one. ``calls`` reads what it then writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from draftwing.serve.calls import CLOSE, OPEN
from draftwing.serve.fields import ChatBody
from draftwing.serve.refusal import Refusal
from draftwing.text.tokenizer import Tokenizer

__all__ = ["calling_messages", "forced_schema"]

_TOLD = """# Tools

You may call these functions:
<tools>
{tools}
</tools>

To call one, answer with a JSON object inside of <tool_call></tool_call> and nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"its": "arguments"}}}}
</tool_call>"""


def forced_schema(body: ChatBody, tools: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The JSON schema of the call that has to be the answer; None where the model may choose.

    Raises:
        Refusal: a choice among tools that are not there.
    """
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto"):
        return None
    name = None if isinstance(choice, str) else choice.function.name
    wanted = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if not wanted:
        raise Refusal(400, "tool_choice names a function that is not in tools: add it there", "tool_choice")
    kinds = [
        {
            "type": "object",
            "properties": {"name": {"const": each["name"]}, "arguments": each.get("parameters") or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for each in wanted
    ]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def calling_messages(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], tokenizer: Tokenizer
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and variables for a chat template.

    Where the template has no place for tools, the model is told of them in a system message, and calls and results
    in former messages are written into their text.
    """
    if tokenizer.template_reads("tools"):
        return list(messages), {"tools": list(tools)}
    told = _TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    plain = [_as_text(message) for message in messages]
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]], {}
    return [{"role": "system", "content": told}, *plain], {}


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        f"{OPEN}\n{json.dumps({name: call['function'].get(name) for name in ('name', 'arguments')})}\n{CLOSE}"
        for call in message.get("tool_calls", ())
    ]
    return {"role": message["role"], "content": "\n".join([message["content"], *calls]).strip("\n")}
