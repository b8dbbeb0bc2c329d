"""What may be asked: the fields of ``/v1/chat/completions`` and ``/v1/completions``.

Types are strict, and unknown fields are refused by name: a setting that is ignored in silence would be worse.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from draftwing.text.grammar import MAX_LEVELS, is_deeper

_MOST_FIELDS = 256  # of one object: each that is unknown would be an error of its own


def _shallow(value: Any) -> Any:
    if is_deeper(value, MAX_LEVELS):
        raise ValueError(f"it is nested deeper than {MAX_LEVELS} levels: make it flatter")
    return value


def _off(value: bool) -> bool:
    if value:
        raise ValueError("only false is taken here")
    return value


_Text = Annotated[str, Field(max_length=2**22)]
# Not Literal[False], which 0 and 0.0 equal.
_Off = Annotated[bool, AfterValidator(_off), WithJsonSchema({"type": "boolean", "const": False})]
_Name = Annotated[str, Field(min_length=1, max_length=256)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_TokenIds = Annotated[list[_TokenId], Field(fail_fast=True)]
_Texts = Annotated[list[_Text], Field(fail_fast=True)]
_ManyTokenIds = Annotated[list[_TokenIds], Field(fail_fast=True)]
_Stop = Annotated[str, Field(min_length=1, max_length=1024)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Object = Annotated[dict[str, Any], AfterValidator(_shallow)]
_Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True), AfterValidator(_shallow)]
# Checked by ``Sampling``, which stops at the first value that is wrong.
_Biases = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _few(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > _MOST_FIELDS:
            raise ValueError(f"it has {len(given):,} fields: there are not so many")
        return given


class Message(BaseModel):
    """One message; what it has beside these is for the chat template to read."""

    model_config = ConfigDict(strict=True, extra="allow")
    _is_shallow = model_validator(mode="before")(_shallow)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Text | _Objects | None = Field(
        None, description="Text, or parts of the form {'type': 'text', 'text': ...}; others are refused."
    )
    tool_calls: _Objects | None = None
    tool_call_id: str | None = None


class Function(_Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: _Text | None = None
    parameters: _Object | None = Field(None, description="A JSON schema.")
    strict: bool | None = None


class Tool(_Strict):
    """A tool: always a function."""

    type: Literal["function"]
    function: Function


class _Called(_Strict):
    name: _Name


class _ToolChoice(_Strict):
    type: Literal["function"]
    function: _Called


class _JsonSchema(_Strict):
    name: _Name
    description: _Text | None = None
    json_schema: _Object | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """``text``, ``json_object``, or ``json_schema`` with a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class Speculation(_Strict):
    """How much is drafted for a request. It changes its speed, never its text."""

    draft: _Name | None = Field(None, description="One of the server's drafts, or none.")
    tree: Annotated[str, Field(max_length=64)] | None = Field(None, description="auto, chain:K or dynamic:N,D,W.")
    max_nodes: Annotated[int, Field(ge=0, le=4096)] | None = Field(None, description="Nodes of a tree at most.")
    detailed: bool = Field(False, description="Adds figures of every step to the metrics.")
    trace: bool | Literal["full"] = Field(
        False,
        description="Each chunk of the stream carries what its step drafted and kept; full: and the target's law "
        "at every node.",
    )


class _StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: _Off | None = None


class _Body(_Strict):
    model: Annotated[str, Field(max_length=1024)] | None = Field(None, description="As /v1/models names it.")
    temperature: _Finite | None = None
    top_p: _Finite | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: int | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=64, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logit_bias: _Biases | None = Field(None, description="Token ids, as strings, to numbers.")
    presence_penalty: _Finite | None = None
    frequency_penalty: _Finite | None = None
    user: _Text | None = Field(None, description="Taken, and not used.")
    response_format: ResponseFormat | None = None
    # Beyond OpenAI's.
    grammar: _Text | None = Field(None, description="What the answer must follow, in llguidance's Lark syntax.")
    top_k: int | None = None
    min_p: _Finite | None = None
    repetition_penalty: _Finite | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[_TokenIds, Field(max_length=1024)] | None = None
    speculation: Speculation | None = None
    # OpenAI's own clients may send these; on one server of one model they mean nothing.
    metadata: _Object | None = None
    store: _Off | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: _Text | None = None
    prompt_cache_key: _Text | None = None


class ChatBody(_Body):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=64)] | None = None
    tools: Annotated[list[Tool], Field(max_length=256, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: _Object | None = Field(None, description="Variables of the chat template.")


class CompletionBody(_Body):
    prompt: (
        _Text
        | Annotated[list[_Text], Field(fail_fast=True)]
        | _TokenIds
        | Annotated[list[_TokenIds], Field(fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=64)] | None = None
    echo: _Off | None = Field(None, description="The prompt is not repeated.")
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
