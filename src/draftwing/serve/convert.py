"""Tools: how a model is told of them, and how it is held to calling one. ``calls`` reads what it then writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draftwing.engine import Engine
from draftwing.errors import ConfigError, DraftwingError, SamplingError, shown
from draftwing.limits import AtMost, cut_to_nodes
from draftwing.lm import LM
from draftwing.methods.base import Budget
from draftwing.sampling import Sampling
from draftwing.sampling_options import nth_seed
from draftwing.serve.errors import Refusal, of_error
from draftwing.serve.models import ChatBody, CompletionBody, Message, Speculation
from draftwing.serve.tool_calls import CLOSE, OPEN
from draftwing.stats import RowStep
from draftwing.text.grammar import Grammar
from draftwing.text.tokenizer import Tokenizer

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


# Speculation chosen per request, and what it brought, in vLLM's words.


def budget_of(wish: Speculation) -> Budget | AtMost | str | None:
    """How much to draft: a budget, ``none``, or what the server does by itself: None, or up to a size.

    Raises:
        ConfigError: a tree that is none.
    """
    if wish.draft == "none" or wish.max_nodes == 0:
        return "none"
    tree = wish.tree or "auto"
    kind, _, numbers = tree.partition(":")
    try:
        if kind == "chain":
            budget = Budget(int(numbers))
        elif kind == "dynamic":
            nodes, depth, width = map(int, numbers.split(","))
            budget = Budget(depth, width, nodes)
        elif tree == "auto":
            return None if wish.max_nodes is None else AtMost(wish.max_nodes)
        else:
            raise ValueError
    except ConfigError as error:
        raise ConfigError(f"speculation.tree {shown(tree)}: {error}") from error
    except ValueError:
        raise ConfigError(
            f"speculation.tree must be auto, chain:K or dynamic:NODES,DEPTH,WIDTH, found {shown(tree)}: write chain:5, "
            f"or dynamic:59,8,10"
        ) from None
    return budget if wish.max_nodes is None else cut_to_nodes(budget, wish.max_nodes)


def figures(rows: Iterable[RowStep], *, detailed: bool = False) -> dict[str, Any]:
    """What speculation brought in these steps.

    Args:
        rows: of all steps; those that drafted nothing count nowhere.
        detailed: with two lists that have an entry for each step that drafted.
    """
    drafted, accepted = [], []
    for row in rows:
        if row.num_drafted:
            drafted.append(row.num_drafted)
            accepted.append(row.num_accepted)
    histogram = [0] * (max(accepted, default=-1) + 1)
    for num in accepted:
        histogram[num] += 1
    found: dict[str, Any] = {
        "mean_acceptance_length": 1 + sum(accepted) / max(len(accepted), 1),
        "draft_acceptance_rate": sum(accepted) / max(sum(drafted), 1),
        "acceptance_histogram": histogram,
        "num_spec_steps": len(drafted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
    }
    if detailed:
        found |= {"per_step_accepted": accepted, "per_step_drafted": drafted}
    return {"speculative_decoding": found}


# From the fields of a body to what the engine is asked for.


MOST_TEXTS = 128  # of one request: prompts times n
_COMPLETED = 16  # tokens of a completion that does not say it, as in OpenAI's and vLLM's servers
_NUM_LAWS = 6  # tokens of each law that a full trace names
_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "min_tokens", "ignore_eos"),
)


@dataclass(frozen=True)
class Defaults:
    """What holds where a request does not say it.

    Attributes:
        sampling: fields of ``Sampling``, from the model's generation_config.json.
        max_tokens: of an answer, None for what is left of the context.
        room_for: see ``Engine``.
    """

    room_for: Callable[[int], int]
    sampling: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None

    @classmethod
    def of(cls, lm: LM, engine: Engine, max_tokens: int | None = None) -> Defaults:
        """Temperature 1, or what the model's own generation_config.json says."""
        found: dict[str, Any] = {"temperature": 1.0}
        folder = getattr(lm.target, "folder", None)
        file = None if folder is None else folder / "generation_config.json"
        if file is not None and file.exists():
            own = json.loads(file.read_text(encoding="utf-8"))  # load has read it before: it is JSON
            names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            said = {name: own[name] for name in names if own.get(name) is not None}
            if said.get("top_k") == 0:  # transformers' word for all tokens
                del said["top_k"]
            found |= said
        Sampling(**found)
        return cls(engine.room_for, found, max_tokens)


@dataclass(frozen=True)
class Text:
    """One text that is to be written: what ``Worker.submit`` takes."""

    prompt_ids: list[int]
    sampling: Sampling
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """A request as it is carried out.

    Attributes:
        texts: in the order of the choices.
        n: of them follow from each prompt.
        detailed, traced: see ``fields.Speculation``.
        tool_names: of the functions that may be called; None where calls are not looked for.
        most_calls: of one text; None: any number.
    """

    texts: list[Text]
    n: int = 1
    stream: bool = False
    with_usage: bool = False
    usage_always: bool = False
    detailed: bool = False
    traced: bool = False
    tool_names: tuple[str, ...] | None = None
    most_calls: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counted once."""
        return sum(len(text.prompt_ids) for text in self.texts[:: self.n])


def asked_of_chat(body: ChatBody, lm: LM, defaults: Defaults) -> Asked:
    """What a chat asks for. Takes a moment: templates, tokens, grammars.

    Raises:
        Refusal: what cannot be answered, and why.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs: true", "top_logprobs")
    named = [tool.function.name for tool in body.tools or ()]
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if body.tool_choice != "none" else []
    schema = forced_schema(body, tools)
    messages = [_plain(message, number) for number, message in enumerate(body.messages)]
    variables = _variables(body, lm)
    try:
        if tools:
            messages, own = calling_messages(messages, tools, lm.tokenizer)
            variables |= own
        ids = lm.tokenizer.encode_chat(messages, **variables)
    except DraftwingError as error:
        raise of_error(error, "messages") from error
    top = (body.top_logprobs or 0) if body.logprobs else None
    most = body.max_completion_tokens or body.max_tokens
    asked = _asked(body, lm, defaults, [ids], top, most, schema)
    most_calls = 1 if body.parallel_tool_calls is False else None
    reads_calls = schema is not None or (bool(tools) and "constraint" not in asked.texts[0].options)
    return replace(asked, tool_names=tuple(named) if reads_calls else None, most_calls=most_calls)


def asked_of_completion(body: CompletionBody, lm: LM, defaults: Defaults) -> Asked:
    """What a completion asks for.

    Raises:
        Refusal: what cannot be answered, and why.
    """
    given: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if not given or isinstance(given[0], int):
        given = [given]
    if len(given) > MOST_TEXTS:
        raise Refusal(400, f"a request may have {MOST_TEXTS} prompts, found {len(given)}: send several", "prompt")
    try:
        prompts = [lm.encode(prompt) for prompt in given]
    except DraftwingError as error:
        raise of_error(error, "prompt") from error
    return _asked(body, lm, defaults, prompts, body.logprobs, body.max_tokens or _COMPLETED, None)


def _asked(
    body: ChatBody | CompletionBody,
    lm: LM,
    defaults: Defaults,
    prompts: Sequence[list[int]],
    logprobs: int | None,
    most: int | None,
    schema: dict[str, Any] | None,
) -> Asked:
    n = body.n or 1
    if n * len(prompts) > MOST_TEXTS:
        raise Refusal(400, f"a request may ask for {MOST_TEXTS} texts, found {n * len(prompts)}: ask for fewer", "n")
    if body.stream_options is not None and not body.stream:
        raise Refusal(400, "stream_options are for streams: set stream to true, or leave them out", "stream_options")
    options, wish = _constraint(body, schema, lm), body.speculation
    if wish is not None:
        try:
            options["speculation"] = budget_of(wish)
            if wish.draft not in (None, "none"):
                options["drafts"] = str(wish.draft).split("+")
        except DraftwingError as error:
            raise of_error(error, "speculation") from error
    texts = []
    for ids in prompts:
        room = defaults.room_for(len(ids))
        if room < 1:
            raise Refusal(
                400,
                f"the prompt has {len(ids):,} tokens, and {room + len(ids):,} are read and written at most: shorten it",
                "messages" if isinstance(body, ChatBody) else "prompt",
                "context_length_exceeded",
            )
        sampling = _sampling(body, defaults, logprobs, min(most or defaults.max_tokens or room, room))
        if wish is not None and wish.trace == "full" and body.stream:
            sampling = replace(sampling, laws=_NUM_LAWS)
        for number in range(n):
            own = sampling.seed if sampling.seed is None else nth_seed(sampling.seed, number)
            texts.append(Text(ids, replace(sampling, seed=own), options))
    usage = body.stream_options
    return Asked(
        texts,
        n,
        bool(body.stream),
        bool(usage and usage.include_usage),
        bool(usage and usage.continuous_usage_stats),
        bool(wish and wish.detailed),
        bool(wish and wish.trace and body.stream),
    )


def _sampling(body: ChatBody | CompletionBody, defaults: Defaults, logprobs: int | None, most: int) -> Sampling:
    said = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    if said.get("min_tokens") == 0:
        del said["min_tokens"]
    if said.get("top_k") in (0, -1):  # vLLM's words for all tokens
        said["top_k"] = None
    try:
        bias = {_token_of(token): value for token, value in (body.logit_bias or {}).items()}
        return Sampling(
            **{**defaults.sampling, **said},
            logit_bias=bias,
            stop_tokens=tuple(body.stop_token_ids or ()),
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            max_tokens=most,
            logprobs=logprobs,
        )
    except SamplingError as error:
        name = str(error).split(" ", 1)[0].strip(":")
        raise of_error(error, name if name in type(body).model_fields else None) from error


def _token_of(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        raise SamplingError(f"logit_bias must have token ids as keys, found {shown(text)}: write {{'42': -1.5}}")
    return int(text)


def _constraint(body: ChatBody | CompletionBody, schema: dict[str, Any] | None, lm: LM) -> dict[str, Any]:
    """What the answer has to follow, as an option of ``Engine.submit``; empty for anything.

    Args:
        schema: of a call that has to be the answer, which goes before any other format.
    """
    wanted, param = _grammar_of(body)
    try:
        grammar = Grammar.json_schema(schema) if schema is not None else None if wanted is None else wanted()
        return {} if grammar is None else {"constraint": lm.constraint(grammar)}
    except DraftwingError as error:
        raise of_error(error, "tools" if schema is not None else param) from error


def _grammar_of(body: ChatBody | CompletionBody) -> tuple[Callable[[], Grammar] | None, str]:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        source = body.grammar
        return (None if source is None else lambda: Grammar.lark(source)), "grammar"
    if body.grammar is not None:
        raise Refusal(400, "there are a grammar and a response_format: give one of them", "grammar")
    if wanted.type == "json_object":
        return Grammar.json_object, "response_format"
    schema = None if wanted.json_schema is None else wanted.json_schema.json_schema
    if schema is None:
        raise Refusal(
            400,
            "response_format of type json_schema needs one: {'json_schema': {'name': ..., 'schema': {...}}}",
            "response_format.json_schema",
        )
    return (lambda: Grammar.json_schema(schema)), "response_format.json_schema.schema"


def _variables(body: ChatBody, lm: LM) -> dict[str, Any]:
    """What a request sets in the chat template: variables that the template reads, and nothing of how it is applied."""
    given = dict(body.chat_template_kwargs or {})
    own = ("messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt")
    for name in given:
        if name in own or name in lm.tokenizer.template_options or not lm.tokenizer.template_reads(name):
            raise Refusal(
                400,
                f"the chat template has no variable {shown(name)} that a request may set: leave it out",
                "chat_template_kwargs",
            )
    return given


def _plain(message: Message, number: int) -> dict[str, Any]:
    """A message for the chat template: parts joined, arguments of calls as objects, nothing that is null."""
    found = {name: value for name, value in message if value is not None}
    if found["role"] == "developer":  # OpenAI's new word for it, which chat templates do not know
        found["role"] = "system"
    if isinstance(message.content, list):
        found["content"] = "".join(_text_of(part, number) for part in message.content)
    found.setdefault("content", "")
    if message.tool_calls is not None:
        found["tool_calls"] = [_call_of(call, number) for call in message.tool_calls]
    return found


def _text_of(part: dict[str, Any], number: int) -> str:
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        raise Refusal(
            400,
            f"message {number + 1} has a part of type {shown(part.get('type'))}: this model reads parts of type text",
            f"messages.{number}.content",
        )
    return text


def _call_of(call: dict[str, Any], number: int) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        where = f"messages.{number}.tool_calls"
        raise Refusal(400, "a tool call must have a function with a name", where)
    given = function.get("arguments")
    try:
        parsed = json.loads(given) if isinstance(given, str) and given else given or {}
    except (ValueError, RecursionError):
        parsed = given
    return {**call, "function": {**function, "arguments": parsed}}
