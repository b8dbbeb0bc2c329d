"""The options that commands share, as dataclasses: one field, one option.

``with_options`` turns a command's dataclass parameters into the options of their fields.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from draftwing.cli.drafts import drafts_compared, every_draft
from draftwing.errors import ConfigError, shown

if TYPE_CHECKING:
    from draftwing.api import LM
    from draftwing.drafters.base import Budget
    from draftwing.sampling import Sampling
    from draftwing.text.prompts import Prompt
    from draftwing.text.tokenizer import Tokenizer

__all__ = [
    "CHAT_MODEL",
    "ChatModel",
    "ChatSampling",
    "Data",
    "Drafting",
    "Examples",
    "FewExamples",
    "Json",
    "Model",
    "NumPrompts",
    "Prompts",
    "SamplingOptions",
    "Target",
    "sampling_option",
    "taps_of",
    "with_options",
]


_TARGETS = "Folder, GGUF file, name (see draftwing models) or hub id. [default: the model that comes with Draftwing]"
_MOST_BYTES = 2**20  # of a tree's file: more than all the nodes that a budget may have take
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]
Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", help="Text file (one prompt), .jsonl file (one a line), or - for stdin."),
]
NumPrompts = Annotated[int, typer.Option("--num-prompts", min=1, help="Use the first so many prompts.")]


Target = Annotated[str | None, typer.Option("--target", "-t", help=_TARGETS)]


def _option(help: str, *names: str, panel: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel)


_model = functools.partial(_option, panel="Model")
_draft = functools.partial(_option, panel="Drafting")
sampling_option = functools.partial(_option, panel="Sampling")


@dataclasses.dataclass(frozen=True)
class Model:
    """Which target, and how it runs."""

    target: Annotated[str | None, _model(_TARGETS, "--target", "-t")] = None
    dtype: Annotated[str, _model("float32, bfloat16, float16, float64, or auto: the checkpoint's own.")] = "float32"
    quantize: Annotated[
        str | None,
        _model(
            "int8: matrices of a quarter of the size, up to three times as fast on a CPU; the text is then the "
            "quantised model's, drafted or not, to the token."
        ),
    ] = None
    device: Annotated[str | None, _model("cpu or cuda. [default: cuda where there is one]")] = None
    engine: Annotated[str, _model("lean, transformers, or auto: lean where it can.")] = "auto"

    def load(self, draft: str | None, drafting: Drafting) -> LM:
        """The target with one drafter."""
        from draftwing.api import load

        budget = drafting.budget()
        return load(**vars(self), draft=draft, rule=drafting.rule, budget=budget, lossless=not drafting.lossy)

    def load_many(self, drafts: Sequence[str] | None, drafting: Drafting, *, every: bool = False) -> list[LM]:
        """Plain decoding, then one ``LM`` for each drafter, all on one target; ``every``: with ``every_draft``."""
        from draftwing.api import LM, load, load_drafter

        budget = drafting.budget()
        plain = load(**vars(self), draft="none")
        wanted = list(drafts or drafts_compared(self.target))
        makers = [
            load_drafter(draft, plain.target, plain.tokenizer, device=self.device)
            for draft in wanted
            if draft != "none"  # that is plain decoding again
        ]
        if every:
            makers += [maker for _, maker in every_draft(plain, self.target, self.device, but=wanted)]
        drafted = functools.partial(LM, plain.target, plain.tokenizer, lossless=not drafting.lossy)
        return [plain, *(drafted(maker, drafting.rule, budget) for maker in makers)]


CHAT_MODEL = "smollm2-135m-instruct"  # whom commands that talk talk to, unless they are told another target


@dataclasses.dataclass(frozen=True)
class ChatModel(Model):
    """The same for commands that talk: the model that comes with Draftwing writes Python only."""

    target: Annotated[
        str, _model(_TARGETS.replace("the model that comes with Draftwing", CHAT_MODEL), "--target", "-t")
    ] = CHAT_MODEL


@dataclasses.dataclass(frozen=True)
class Drafting:
    """How much is drafted, and what is kept of it."""

    rule: Annotated[
        str, _draft("match, match-top, speculative, multi-round, multi-round-replacement, block or typical.")
    ] = "match"
    tree: Annotated[
        str,
        _draft(
            "auto (decided step by step from measured costs), chain:K, dynamic:NODES,DEPTH,WIDTH (EAGLE-2; its "
            "total_token=60, depth=7, top_k=10 is dynamic:59,8,10), static (EAGLE-1), medusa, or a JSON file with a "
            "list of paths of ranks.",
            "--tree",
        ),
    ] = "auto"
    lossy: Annotated[bool, _draft("Allow a rule that changes what the target says (typical).", "--lossy")] = False

    def check(self) -> None:
        """Refuse a rule before a model is loaded for it."""
        from draftwing.accept import get_rule

        if not (get_rule(self.rule, lossless=False).lossless or self.lossy):
            raise ConfigError(f"rule {self.rule!r} changes what the target says: add --lossy to accept that")

    def keeps_law_alone(self, sampling: Sampling) -> bool:
        """Whether the rule is lossless, and yet the text need not be plain decoding's: other noise, the same law."""
        from draftwing.accept import get_rule

        return self.rule != "match" and sampling.temperature > 0 and get_rule(self.rule, lossless=False).lossless

    def budget(self) -> Budget | None:
        """What ``--tree`` says; None for auto.

        Raises:
            ConfigError: it says nothing that is known.
        """
        from draftwing.drafters.base import STATIC_TREES, Budget

        if self.tree == "auto":
            return None
        if self.tree in STATIC_TREES:
            return Budget(paths=STATIC_TREES[self.tree])
        kind, _, numbers = self.tree.partition(":")
        try:
            if kind == "chain":
                return Budget(int(numbers))
            if kind == "dynamic":
                nodes, depth, width = map(int, numbers.split(","))
                return Budget(depth, width, nodes)
            return Budget(paths=_read_paths(Path(self.tree)))
        except ConfigError as error:
            raise ConfigError(f"--tree {shown(self.tree)}: {error}") from error
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--tree must be auto, chain:5, dynamic:59,8,10, static, medusa, or a JSON file with a list of paths "
                f"such as [[0], [1], [0, 0]], found {shown(self.tree)} ({error})"
            ) from error


def _read_paths(file: Path) -> Any:
    """The JSON of a tree's file."""
    from draftwing.text.records import parse_json

    with file.open("rb") as stream:
        content = stream.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
    return parse_json(content)


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """``Sampling`` as options, and how a prompt is put."""

    temperature: Annotated[float, sampling_option("0 is greedy.", "--temperature", "-T")] = 0.0
    top_k: Annotated[int | None, sampling_option("Draw from the k best tokens.")] = None
    top_p: Annotated[float, sampling_option("Draw from the fewest tokens of this probability.")] = 1.0
    min_p: Annotated[float, sampling_option("Drop tokens less probable than this share of the best one's.")] = 0.0
    repetition_penalty: Annotated[float, sampling_option("Divides scores of tokens seen.")] = 1.0
    presence_penalty: Annotated[float, sampling_option("Taken from scores of tokens written.")] = 0.0
    frequency_penalty: Annotated[float, sampling_option("Taken once for each time written.")] = 0.0
    logit_bias: Annotated[
        list[str] | None, sampling_option("ID:VALUE, added to that token's score; repeatable.", "--logit-bias")
    ] = None
    ban: Annotated[list[int] | None, sampling_option("Token id never to write; repeatable.", "--ban")] = None
    stop: Annotated[list[str] | None, sampling_option("String that ends the text; repeatable.", "--stop")] = None
    max_tokens: Annotated[int, sampling_option("Tokens to write at most.", "--max-tokens", "-n")] = 128
    min_tokens: Annotated[int, sampling_option("Tokens before anything ends the text.", "--min-tokens")] = 0
    seed: Annotated[int, sampling_option("The text is a function of target, prompt and seed.")] = 0
    ignore_eos: Annotated[bool, sampling_option("Go on after an end token.", "--ignore-eos")] = False
    chat: Annotated[
        bool | None,
        sampling_option("Put the prompt through the chat template. [default: where there is one]", "--chat/--no-chat"),
    ] = None

    def to_sampling(self, logprobs: int | None = None) -> Sampling:
        """The checked parameters."""
        from draftwing.sampling import Sampling

        same = {f.name for f in dataclasses.fields(Sampling)} & {f.name for f in dataclasses.fields(self)}
        same -= {"stop", "logit_bias"}
        return Sampling(
            **{name: value for name, value in vars(self).items() if name in same},
            logit_bias=dict(map(_parse_bias, self.logit_bias or ())),
            banned_tokens=tuple(self.ban or ()),
            stop=tuple(self.stop or ()),
            logprobs=logprobs,
        )

    def put(self, prompt: Prompt, tokenizer: Tokenizer) -> Prompt:
        """The prompt as a dialogue where there is a template, or as plain text: see ``text.prompts.as_put``."""
        from draftwing.text.prompts import as_put

        return as_put(prompt, tokenizer.has_chat_template if self.chat is None else self.chat)


@dataclasses.dataclass(frozen=True)
class ChatSampling(SamplingOptions):
    """The same with room for an answer."""

    max_tokens: Annotated[int, sampling_option("Tokens of an answer at most.", "--max-tokens", "-n")] = 512
    chat: Annotated[
        bool,
        sampling_option(
            "Without a chat template messages are plain text, with an empty line between two.", "--chat/--no-chat"
        ),
    ] = True


def _parse_bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition(":")
    try:
        return int(token), float(value)
    except ValueError:
        raise ConfigError(f"--logit-bias must be ID:VALUE (such as 42:-1.5), found {text!r}") from None


@dataclasses.dataclass(frozen=True)
class Data:
    """What is trained on."""

    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="JSONL of dialogues (conversations, messages, turns, prompt and completion, question and answer, "
            "instruction and output) or texts, plain text files, or folders of them; repeatable.",
        ),
    ] = None
    exclude: Annotated[
        Path | None, typer.Option("--exclude", help="File of names (globs, or prefix/) to leave out of folders.")
    ] = None

    @property
    def sources(self) -> list[str]:
        """The files and folders; none where none were given, which readers refuse."""
        return self.data or []


@dataclasses.dataclass(frozen=True)
class Examples:
    """Prompts that something is measured on."""

    prompts: Prompts = None
    num_prompts: NumPrompts = 10

    def read(self) -> Sequence[Prompt]:
        """Those of the file, or those that come with Draftwing."""
        from draftwing.text.prompts import read_prompts, shipped_prompts

        return read_prompts(self.prompts, self.num_prompts) if self.prompts else shipped_prompts(self.num_prompts)


@dataclasses.dataclass(frozen=True)
class FewExamples(Examples):
    """The same where each takes longer."""

    num_prompts: NumPrompts = 4


def taps_of(text: str | None) -> tuple[int, ...] | None:
    """The numbers of ``--taps``."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--taps must be numbers such as 2,16,29, found {shown(text)}") from None


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of its dataclass parameters: how commands share options."""
    groups: dict[str, Any] = {}
    parameters = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        own = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        if not dataclasses.is_dataclass(hints[name]):
            parameters.append(own)
            continue
        groups[name] = hints[name]
        kinds = get_type_hints(hints[name], include_extras=True)
        for f in dataclasses.fields(groups[name]):
            default = inspect.Parameter.empty if f.default is dataclasses.MISSING else f.default
            parameters.append(own.replace(name=f.name, default=default, annotation=kinds[f.name]))

    def run(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{f.name: values.pop(f.name) for f in dataclasses.fields(kind)})
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
