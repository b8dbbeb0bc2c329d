"""From request bodies to arguments of the engine: prompts, sampling, constraints, speculation and tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from draftwing.engine import Engine
from draftwing.errors import ConfigError, DraftwingError, SamplingError, shown
from draftwing.lm import LM
from draftwing.methods.base import Budget, cut_to_nodes
from draftwing.request import AtMost
from draftwing.sampling import Sampling, nth_sampling, sampling_of
from draftwing.serve.errors import Refusal, refusal_for
from draftwing.serve.models import ChatBody, CompletionBody, Speculation
from draftwing.serve.tool_calls import CLOSE, OPEN
from draftwing.text.grammar import Grammar
from draftwing.text.prompts import join_parts

MAX_SEQUENCES = 128  # per request: prompts times n
_COMPLETION_TOKENS = 16  # default of completions, as in OpenAI's and vLLM's servers
_DRAFTED_PER_NODE = 4  # drafted tokens from which a node of a dynamic tree is chosen
_NUM_DISTRIBUTION_TOKENS = 6  # tokens per distribution in a full trace
_SAMPLING_FIELDS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "min_tokens", "ignore_eos"),
)
_TOOLS_PROMPT = """# Tools

You may call these functions:
<tools>
{tools}
</tools>

To call one, answer with a JSON object inside of <tool_call></tool_call> and nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"its": "arguments"}}}}
</tool_call>"""


@dataclass(frozen=True)
class Defaults:
    """Values for fields that a request leaves out."""

    room_for: Callable[[int], int]  # see ``Engine.room_for``
    sampling: Sampling
    max_tokens: int | None = None  # the limit of chat answers; None is the rest of the context
    max_nodes: int = 64  # the largest tree that a request may choose

    @classmethod
    def for_model(cls, lm: LM, engine: Engine, max_tokens: int | None = None, max_nodes: int = 64) -> Defaults:
        """Read the sampling defaults from the model's ``generation_config.json``; without one, temperature is 1."""
        folder = getattr(lm.target, "folder", None)
        sampling = Sampling(temperature=1.0) if folder is None else sampling_of(folder)
        return cls(engine.room_for, sampling, max_tokens, max_nodes)


@dataclass(frozen=True)
class ParsedRequest:
    sequences: list[tuple[list[int], Sampling]]  # the prompt ids and sampling of each choice, in order
    options: dict[str, Any]  # further options of ``Engine.submit``, for all sequences
    tool_names: tuple[str, ...] | None = None  # functions whose calls are parsed; None parses no calls
    max_calls: int | None = None  # calls per sequence; None is no limit


def parse_chat(body: ChatBody, lm: LM, defaults: Defaults) -> ParsedRequest:
    """Validate and encode a chat request. Slow: applies the template and compiles grammars."""
    if body.top_logprobs is not None and not body.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs: true", "top_logprobs")
    tools = [] if body.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    schema = forced_schema(body, tools)
    messages = template_messages(body)
    shows_tools = bool(tools) or any(each["role"] == "tool" or "tool_calls" in each for each in messages)
    variables = dict(body.chat_template_kwargs or {})
    reserved = ("messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt")
    for name in variables:
        if name in reserved or name in lm.tokenizer.template_options or not lm.tokenizer.template_reads(name):
            message = f"the chat template has no variable {shown(name)} that a request may set: leave it out"
            raise Refusal(400, message, "chat_template_kwargs")
    try:
        if tools and lm.tokenizer.template_reads("tools"):
            variables["tools"] = tools
        elif shows_tools and not lm.tokenizer.template_reads("tools"):
            messages = messages_with_tools(messages, tools, reads_system=lm.tokenizer.template_reads_system)
        ids = lm.tokenizer.encode_chat(messages, **variables)
    except DraftwingError as error:
        raise refusal_for(error, "messages") from error
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = body.max_completion_tokens or body.max_tokens
    parsed = _parse(body, lm, defaults, [ids], logprobs, max_tokens, schema, call_schemas(tools))
    names = tuple(tool["function"]["name"] for tool in tools) if tools else None
    return replace(parsed, tool_names=names, max_calls=1 if body.parallel_tool_calls is False else None)


def forced_schema(body: ChatBody, tools: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the JSON schema of the tool call that the answer must be; None if the model may choose."""
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto"):
        return None
    name = None if isinstance(choice, str) else choice.function.name
    functions = [tool for tool in tools if name in (None, tool["function"]["name"])]
    if not functions:
        raise Refusal(400, "tool_choice names a function that is not in tools: add it there", "tool_choice")
    return _any_of(call_schemas(functions))


def call_schemas(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": _moved(tool["function"].get("parameters") or {"type": "object"}, "/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]


def _any_of(schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(schemas) == 1:
        return schemas[0]
    return {"anyOf": [_moved(schema, f"/anyOf/{place}") for place, schema in enumerate(schemas)]}


def _moved(schema: Any, path: str) -> Any:
    """Return a schema that will be a part of another one, at ``path``: its references must begin there."""
    if isinstance(schema, list):
        return [_moved(each, path) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = f"#{path}{value[1:]}"
        else:
            moved[key] = value if key in ("const", "enum", "default", "examples") else _moved(value, path)
    return moved


def template_messages(body: ChatBody) -> list[dict[str, Any]]:
    """Return the messages for a chat template: parts joined, arguments of calls as objects, null fields left out.

    A refusal of an earlier answer is its text.
    """
    messages = []
    for number, message in enumerate(body.messages):
        fields = {name: value for name, value in message if value is not None}
        if fields["role"] == "developer":  # OpenAI's new name, which chat templates do not know
            fields["role"] = "system"
        if isinstance(message.content, list):
            try:
                fields["content"] = join_parts(message.content, message.role, number + 1)
            except DraftwingError as error:
                raise refusal_for(error, f"messages.{number}.content") from error
        if message.role == "assistant" and isinstance(refusal := fields.pop("refusal", None), str):
            fields["content"] = fields.get("content") or refusal
        fields.setdefault("content", "")
        if message.tool_calls is not None:
            fields["tool_calls"] = []
            for call in message.tool_calls:
                function = call.get("function")
                if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                    param = f"messages.{number}.tool_calls"
                    raise Refusal(400, "a tool call must have a function with a name", param)
                arguments = function.get("arguments")
                with suppress(ValueError, RecursionError):  # the template gets a string that is not JSON unchanged
                    arguments = json.loads(arguments) if isinstance(arguments, str) and arguments else arguments or {}
                fields["tool_calls"].append({**call, "function": {**function, "arguments": arguments}})
        messages.append(fields)
    return messages


def messages_with_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], *, reads_system: bool = True
) -> list[dict[str, Any]]:
    """Return messages that describe tools, their calls and results as text, for templates without tools.

    Results become a turn of the user, together with other results and a question next to them, since templates may
    want turns to alternate. The description is in the system message, or in the user's first turn if the template has
    no place for system messages.
    """
    plain: list[dict[str, Any]] = []
    has_results = False  # in the last turn
    for message in messages:
        calls = [
            f"{OPEN}\n{json.dumps({name: call['function'].get(name) for name in ('name', 'arguments')})}\n{CLOSE}"
            for call in message.get("tool_calls", ())
        ]
        role, content = message["role"], "\n".join([message["content"], *calls]).strip("\n")
        is_result = role == "tool"
        if is_result:
            role, content = "user", f"<tool_response>\n{message['content']}\n</tool_response>"
        if plain and role == plain[-1]["role"] == "user" and (is_result or has_results):
            plain[-1]["content"] += f"\n{content}"
            has_results = True
            continue
        has_results = is_result
        plain.append({"role": role, "content": content})
        if "prefix" in message:
            plain[-1]["prefix"] = message["prefix"]
    if not tools:
        return plain
    description = _TOOLS_PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        plain[0]["content"] += f"\n\n{description}"
    elif reads_system:
        plain.insert(0, {"role": "system", "content": description})
    elif plain and plain[0]["role"] == "user":
        plain[0]["content"] = f"{description}\n\n{plain[0]['content']}"
    else:
        plain.insert(0, {"role": "user", "content": description})
    return plain


def parse_completion(body: CompletionBody, lm: LM, defaults: Defaults) -> ParsedRequest:
    prompts: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if not prompts or isinstance(prompts[0], int):
        prompts = [prompts]
    if len(prompts) > MAX_SEQUENCES:
        message = f"a request may have {MAX_SEQUENCES} prompts, found {len(prompts)}: send several requests"
        raise Refusal(400, message, "prompt")
    try:
        encoded = [lm.encode(prompt) for prompt in prompts]
    except DraftwingError as error:
        raise refusal_for(error, "prompt") from error
    return _parse(body, lm, defaults, encoded, body.logprobs, body.max_tokens or _COMPLETION_TOKENS, None)


def _parse(
    body: ChatBody | CompletionBody,
    lm: LM,
    defaults: Defaults,
    prompts: Sequence[list[int]],
    logprobs: int | None,
    max_tokens: int | None,
    schema: dict[str, Any] | None,
    calls: Sequence[dict[str, Any]] = (),
) -> ParsedRequest:
    n, num = body.n or 1, (body.n or 1) * len(prompts)
    if num > MAX_SEQUENCES:
        raise Refusal(400, f"a request may ask for {MAX_SEQUENCES} sequences, found {num}: ask for fewer", "n")
    if body.stream_options is not None and not body.stream:
        raise Refusal(400, "stream_options are for streams: set stream to true, or leave them out", "stream_options")
    options, speculation = _constraint(body, schema, calls, lm), body.speculation
    if speculation is not None:
        try:
            options["speculation"] = _budget(speculation, defaults.max_nodes)
            if speculation.draft not in (None, "none"):
                options["drafts"] = str(speculation.draft).split("+")
        except DraftwingError as error:
            raise refusal_for(error, "speculation") from error
    sequences = []
    for ids in prompts:
        room = defaults.room_for(len(ids))
        if room < 1:
            raise Refusal(
                400,
                f"the prompt has {len(ids):,} tokens, but prompt and answer may have {room + len(ids):,}: shorten it",
                "messages" if isinstance(body, ChatBody) else "prompt",
                "context_length_exceeded",
            )
        sampling = _sampling(body, defaults, logprobs, min(max_tokens or defaults.max_tokens or room, room))
        sequences += [(ids, nth_sampling(sampling, number)) for number in range(n)]
    return ParsedRequest(sequences, options)


def _constraint(
    body: ChatBody | CompletionBody, schema: dict[str, Any] | None, calls: Sequence[dict[str, Any]], lm: LM
) -> dict[str, Any]:
    """Return the option ``constraint`` of ``Engine.submit``, or nothing.

    Args:
        schema: overrides any other format.
        calls: schemas of the calls that the model may write instead of an answer in ``response_format``.
    """
    kind = "text" if body.response_format is None else body.response_format.type
    if kind != "text" and body.grammar is not None:
        raise Refusal(400, "there are a grammar and a response_format: give one of them", "grammar")
    form = None if body.response_format is None else body.response_format.json_schema
    if kind == "json_schema" and (form is None or form.json_schema is None):
        message = "response_format of type json_schema needs one: {'json_schema': {'name': ..., 'schema': {...}}}"
        raise Refusal(400, message, "response_format.json_schema")
    param = "grammar"
    if schema is not None:
        param = "tools"
    elif kind == "json_object":
        param, schema = "response_format", {"type": "object"}  # calls are objects too
    elif kind == "json_schema" and form is not None:
        param, schema = "response_format.json_schema.schema", _any_of([form.json_schema or {}, *calls])
    elif body.grammar is None:
        return {}
    try:
        grammar = Grammar.lark(body.grammar or "") if schema is None else Grammar.json_schema(schema)
        return {"constraint": lm.constraint(grammar)}
    except DraftwingError as error:
        raise refusal_for(error, param) from error


def _budget(speculation: Speculation, most_nodes: int) -> Budget | AtMost | str | None:
    """Return the option ``speculation`` of ``Engine.submit``."""
    if speculation.draft == "none" or speculation.max_nodes == 0:
        return "none"
    tree, max_nodes = speculation.tree or "auto", speculation.max_nodes
    if tree == "auto":
        return None if max_nodes is None else AtMost(max_nodes)
    try:
        budget = Budget.parse(tree)
    except ConfigError as error:
        raise ConfigError(f"speculation.tree {shown(tree)}: {error}") from error
    except ValueError:
        raise ConfigError(
            f"speculation.tree must be auto, chain:K or dynamic:NODES,DEPTH,WIDTH, found {shown(tree)}: write chain:5, "
            f"or dynamic:59,8,10"
        ) from None
    budget = budget if max_nodes is None else cut_to_nodes(budget, max_nodes)
    num_drafted = budget.depth * budget.width
    if (budget.nodes or num_drafted) > most_nodes or num_drafted > _DRAFTED_PER_NODE * most_nodes:
        raise ConfigError(
            f"speculation.tree {shown(tree)} is too large: this server's trees have at most {most_nodes} nodes, and "
            f"DEPTH times WIDTH at most {_DRAFTED_PER_NODE * most_nodes} (--max-nodes)"
        )
    return budget


def _sampling(body: ChatBody | CompletionBody, defaults: Defaults, logprobs: int | None, max_tokens: int) -> Sampling:
    fields = {name: getattr(body, name) for name in _SAMPLING_FIELDS if getattr(body, name) is not None}
    if fields.get("top_k") in (0, -1):  # in vLLM, all tokens
        fields["top_k"] = None
    try:
        logit_bias = {}
        for token, bias in (body.logit_bias or {}).items():
            if not token.isascii() or not token.isdigit() or len(token) > 10:
                raise SamplingError(
                    f"logit_bias must have token ids as keys, found {shown(token)}: write {{'42': -1.5}}"
                )
            logit_bias[int(token)] = bias
        return replace(
            defaults.sampling,
            **fields,
            logit_bias=logit_bias,
            stop_tokens=tuple(body.stop_token_ids or ()),
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            max_tokens=max_tokens,
            logprobs=logprobs,
            node_distributions=_NUM_DISTRIBUTION_TOKENS
            if body.speculation is not None and body.speculation.trace == "full" and body.stream
            else 0,
        )
    except SamplingError as error:
        name = str(error).split(" ", 1)[0].strip(":")
        raise refusal_for(error, name if name in type(body).model_fields else None) from error
