"""Which drafts a command may be given, and what its help says of them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from draftwing.errors import ConfigError, DraftwingError, shown
from draftwing.methods.registry import METHODS
from draftwing.models.catalogue import entry_of

if TYPE_CHECKING:
    from draftwing.lm import LM
    from draftwing.methods.base import Budget
    from draftwing.methods.method import NewDrafter
    from draftwing.sampling import Sampling
    from draftwing.text.prompts import Prompt
    from draftwing.text.tokenizer import Tokenizer


def or_of(names: Iterable[str]) -> str:
    """``a, b or c``."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def _shipped(target: str | None) -> list[str]:
    entry = entry_of(target)
    return [name for name in METHODS if entry is not None and name in entry.heads]


def drafts_at_hand(target: str | None) -> list[str]:
    """The drafts that need no path: those that suit any target, and those that come with Draftwing for this one."""
    return [*(name for name, entry in METHODS.items() if entry.needs == "nothing"), *_shipped(target)]


def drafts_compared(target: str | None) -> list[str]:
    """The drafts that are measured where none is named: as the help of ``Drafts`` says."""
    return ["lookup", *_shipped(target)]


def every_draft(
    plain: LM, target: str | None, device: str | None, but: Sequence[str] = ()
) -> list[tuple[str, NewDrafter]]:
    """Name and maker of every draft that needs no path; what the target of ``plain`` cannot have is left out aloud.

    Args:
        target, device: as the command line has them.
        but: those that are there already.
    """
    from draftwing.cli import screen
    from draftwing.loading import load_drafter

    brought = [name for name, entry in METHODS.items() if entry.needs == "target"]
    entry = entry_of(target)
    joined = [] if entry is None or entry.best_head is None else [f"{entry.best_head}+lookup"]
    found = []
    for name in [*drafts_at_hand(target), *joined, *brought]:
        if name == "none" or name in but:
            continue
        try:
            found.append((name, load_drafter(name, plain.target, plain.tokenizer, device=device)))
        except DraftwingError as error:
            screen.line(f"left out: {name}: {error}", "yellow")
    return found


def head_folder(target: str | None, draft: str | None) -> Path:
    """Of a head as the command line has it, found without loading the target.

    Raises:
        ConfigError: a draft without a head's statistics.
    """
    from draftwing.models.resolve import resolve

    entry = entry_of(target)
    draft = draft or (entry.best_head if entry is not None else None)
    method = METHODS.get(str(draft))
    folder: Path | None = None
    if entry is not None and draft is not None and draft in entry.heads:
        folder = entry.head(draft)
    elif draft is not None and (method is None or method.needs == "folder"):
        folder = resolve(draft)
    if folder is None:
        raise ConfigError(
            f"a forecast is made from a head's held-out statistics, and {draft or 'lookup'} has none: give a head with "
            f"--draft, or measure with `draftwing compare` or --formulas"
        )
    return folder


_DRAFTS = (
    "Draft method: eagle3, lookup, suffix, causal-lm, none, or the folder or hub id of a head or a small model; join "
    "several with +, as in eagle3+lookup. All methods: docs/methods.md."
)
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "-d",
        help=f"{_DRAFTS} [default: the head that ships for the target, else lookup]",
    ),
]
Drafts = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        "-d",
        help=f"{_DRAFTS} Repeatable. [default: lookup, and the heads that ship for the target]",
    ),
]


AllDrafts = Annotated[
    bool, typer.Option("--all", help="Beside these every draft that needs no path, and that this target can have.")
]


@dataclasses.dataclass(frozen=True)
class Compared:
    """The drafts that are measured side by side."""

    draft: Drafts = None
    every: AllDrafts = False


# The options that commands share, as dataclasses: one field, one option.
#
# ``with_options`` turns a command's dataclass parameters into the options of their fields.


_CHOSEN = "DRAFTWING_MODEL, or smollm2-135m-instruct"
_TARGETS = f"Folder, GGUF file, name (see draftwing models) or hub id. [default: {_CHOSEN}]"
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
        from draftwing.loading import load

        budget = drafting.budget()
        return load(**vars(self), draft=draft, rule=drafting.rule, budget=budget, lossless=not drafting.lossy)

    def load_many(self, drafts: Sequence[str] | None, drafting: Drafting, *, every: bool = False) -> list[LM]:
        """Plain decoding, then one ``LM`` for each drafter, all on one target; ``every``: with ``every_draft``."""
        from draftwing.lm import LM
        from draftwing.loading import load, load_drafter

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


CHAT_MODEL = "smollm2-135m-instruct"  # the default of commands that need a chat template


@dataclasses.dataclass(frozen=True)
class ChatModel(Model):
    """The same for commands that need a chat template, which a DRAFTWING_MODEL may lack."""

    target: Annotated[str, _model(_TARGETS.replace(_CHOSEN, CHAT_MODEL), "--target", "-t")] = CHAT_MODEL


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
        from draftwing.methods.base import STATIC_TREES, Budget

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
    from draftwing.text.prompts import parse_json

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

    def read(self, target: str | None) -> Sequence[Prompt]:
        """Read the file, or the prompts that ship: questions for a chat model, else beginnings of Python files."""
        from draftwing.models.resolve import resolve
        from draftwing.text.prompts import read_prompts, shipped_prompts, shipped_questions
        from draftwing.text.tokenizer import Tokenizer

        if self.prompts:
            return read_prompts(self.prompts, self.num_prompts)
        chats = Tokenizer(resolve(target)).has_chat_template
        return shipped_questions(self.num_prompts) if chats else shipped_prompts(self.num_prompts)


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
