"""From the fields of a body to what the engine is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draftwing.engine.engine import Engine
from draftwing.errors import DraftwingError, SamplingError, shown
from draftwing.lm import LM, nth_seed
from draftwing.sampling import Sampling
from draftwing.serve.fields import ChatBody, CompletionBody, Message
from draftwing.serve.refusal import Refusal, of_error
from draftwing.serve.speculation import budget_of
from draftwing.serve.tools import calling_messages, forced_schema
from draftwing.text.grammar import Grammar

__all__ = ["MOST_TEXTS", "Asked", "Defaults", "Text", "asked_of_chat", "asked_of_completion"]

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
    """What both ask for."""
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
    """What makes the grammar that a body asks for, and the field that does."""
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
