"""The request bodies of ``/v1/chat/completions`` and ``/v1/completions``.

Types are strict, and unknown fields are refused by name, since ignoring a setting would be worse.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from draftwing.text.grammar import MAX_LEVELS, is_deeper

_MAX_FIELDS = 256  # per object: every unknown field would be one more error


def _shallow(value: Any) -> Any:
    if is_deeper(value, MAX_LEVELS):
        raise ValueError(f"it is nested deeper than {MAX_LEVELS} levels: make it flatter")
    return value


def _off(value: bool) -> bool:
    if value:
        raise ValueError("only false is supported")
    return value


_Text = Annotated[str, Field(max_length=2**22)]
# Literal[False] would accept 0 and 0.0.
_Off = Annotated[bool, AfterValidator(_off), WithJsonSchema({"type": "boolean", "const": False})]
_Name = Annotated[str, Field(min_length=1, max_length=256)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_TokenIds = Annotated[list[_TokenId], Field(fail_fast=True)]
_Texts = Annotated[list[_Text], Field(fail_fast=True)]
_TokenIdLists = Annotated[list[_TokenIds], Field(fail_fast=True)]
_Stop = Annotated[str, Field(min_length=1, max_length=1024)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Object = Annotated[dict[str, Any], AfterValidator(_shallow)]
_Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True), AfterValidator(_shallow)]
# Checked by ``Sampling``, which stops at the first invalid value.
_Biases = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MAX_FIELDS:
            raise ValueError(f"it has {len(value):,} fields: send at most {_MAX_FIELDS}")
        return value


class Message(BaseModel):
    """A message; the chat template may read further fields."""

    model_config = ConfigDict(strict=True, extra="allow")
    _is_shallow = model_validator(mode="before")(_shallow)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Text | _Objects | None = Field(
        None, description="Text, or parts of the form {'type': 'text', 'text': ...}; others are refused."
    )
    tool_calls: _Objects | None = None
    tool_call_id: str | None = None
    prefix: bool | None = Field(None, description="The last message is the beginning of the answer, to be continued.")


class Function(_Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: _Text | None = None
    parameters: _Object | None = Field(None, description="A JSON schema.")
    strict: bool | None = None


class Tool(_Strict):
    """A tool, which is always a function."""

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
    """How much to draft for a request. This changes its speed, never its text."""

    draft: _Name | None = Field(None, description="One of the server's drafts, or none.")
    tree: Annotated[str, Field(max_length=64)] | None = Field(None, description="auto, chain:K or dynamic:N,D,W.")
    max_nodes: Annotated[int, Field(ge=0, le=4096)] | None = Field(None, description="Maximum nodes of a tree.")
    detailed: bool = Field(False, description="Add lists with an entry per step to the metrics.")
    trace: bool | Literal["full"] = Field(
        False,
        description="Add the draft tree and the accepted path of each step to the chunks of a stream; full adds the "
        "target's distribution at every node.",
    )


class _StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: _Off | None = None


class _Body(_Strict):
    model: Annotated[str, Field(max_length=1024)] | None = Field(None, description="A name from /v1/models.")
    temperature: _Finite | None = None
    top_p: _Finite | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: int | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=64, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logit_bias: _Biases | None = Field(None, description="Token ids, as strings, mapped to numbers.")
    presence_penalty: _Finite | None = None
    frequency_penalty: _Finite | None = None
    user: _Text | None = Field(None, description="Accepted and ignored.")
    response_format: ResponseFormat | None = None
    # Not in OpenAI's protocol.
    grammar: _Text | None = Field(None, description="A grammar for the answer, in llguidance's Lark syntax.")
    top_k: int | None = None
    min_p: _Finite | None = None
    repetition_penalty: _Finite | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[_TokenIds, Field(max_length=1024)] | None = None
    speculation: Speculation | None = None
    # OpenAI's clients may send these; they have no effect.
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
    prompt: _Text | _Texts | _TokenIds | _TokenIdLists
    logprobs: Annotated[int, Field(ge=0, le=64)] | None = None
    echo: _Off | None = Field(None, description="The prompt is not repeated.")
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
