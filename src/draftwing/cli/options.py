"""Options that commands share, and the decorator that makes options of dataclass fields."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_type_hints

import typer

from draftwing.errors import ConfigError, DraftwingError, shown
from draftwing.methods.registry import METHODS
from draftwing.models.catalogue import default_model, entry_of

if TYPE_CHECKING:
    from draftwing.lm import LM
    from draftwing.methods.base import Budget
    from draftwing.methods.method import NewDrafter
    from draftwing.sampling import Sampling
    from draftwing.text.prompts import Prompt
    from draftwing.text.tokenizer import Tokenizer

EXPERT = "Expert"
_MAX_TREE_FILE_BYTES = 2**20  # more than every node that a budget may have takes


def option(default: Any, help: str, *names: str, panel: str | None = None, expert: bool = False, **rules: Any) -> Any:
    """Return a default value that ``with_options`` makes an option; ``...`` is a required one.

    Args:
        names: a short name, such as ``-t``, next to the long one, which is the field's name; or all names.
        panel: of the help; a dataclass may set ``PANEL`` for all of its fields.
        rules: for ``typer.Option``.
    """
    info = typer.Option(help=help, rich_help_panel=EXPERT if expert else panel, **rules)
    info.param_decls = names
    return _field(default, info)


def path(text: str) -> Path:
    """Return the path that an option names; an empty one, such as an unset variable's, would be the current folder."""
    if not text:
        raise typer.BadParameter("it is empty: name a file or folder, or the current folder as '.'")
    return Path(text)


def argument(default: Any, help: str, **rules: Any) -> Any:
    """Return a default value that ``with_options`` makes a positional argument."""
    return _field(default, typer.Argument(help=help, **rules))


def _field(default: Any, info: Any) -> Any:
    return dataclasses.field(default=dataclasses.MISSING if default is ... else default, metadata={"info": info})


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Make a typer command of a function whose defaults are ``option`` and ``argument``.

    A parameter that is a dataclass becomes an option for each of its fields: this is how commands share options. In the
    docstring, items of lists become paragraphs, which is what typer makes lists of.
    """
    groups: dict[str, Any] = {}
    parameters = []
    for name, hint in get_type_hints(command, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            groups[name] = hint
            types = get_type_hints(hint, include_extras=True)
            parameters += [_parameter(f.name, types[f.name], f, hint) for f in dataclasses.fields(hint)]
        elif name != "return":
            parameters.append(_parameter(name, hint, inspect.signature(command).parameters[name].default))
    parameters.sort(
        key=lambda one: any(getattr(i, "rich_help_panel", None) == EXPERT for i in get_args(one.annotation))
    )

    def run(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{f.name: values.pop(f.name) for f in dataclasses.fields(kind)})
        command(**values)

    run.__name__ = command.__name__
    run.__doc__ = re.sub(r"(?<!\n)\n(?= *- )", "\n\n", command.__doc__ or "")
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _parameter(name: str, hint: Any, field: Any, group: Any = None) -> inspect.Parameter:
    default = inspect.Parameter.empty
    if isinstance(field, dataclasses.Field):  # else a typer.Context
        info = copy.copy(field.metadata["info"])
        info.rich_help_panel = info.rich_help_panel or getattr(group, "PANEL", None)
        if info.param_decls is not None and not any(one.startswith("--") for one in info.param_decls):
            info.param_decls = (f"--{name.replace('_', '-')}", *info.param_decls)
        if Path in (hint, *get_args(hint), *itertools.chain(*map(get_args, get_args(hint)))):
            info.parser, info.metavar = path, "<path>"
        hint = Annotated[hint, info]
        default = default if field.default is dataclasses.MISSING else field.default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


_DRAFTS = (
    "eagle3 (the head that ships with the target), lookup (repeats of the prompt), suffix (repeats of earlier outputs "
    "too), early-exit (the target's first layers), none; or the folder or hub id of a head or a smaller model. Join "
    "several with +, as in eagle3+lookup. All methods: docs/methods.md."
)
DRAFT = option(None, f"{_DRAFTS} [default: the head that ships with the target, else lookup]", "-d")
JSON = option(False, "Print JSON on stdout and nothing else.", "--json")


def best_head(target: str | None) -> str | None:
    """Return the method of the head that ships with the target and is used by default."""
    entry = entry_of(target)
    return None if entry is None else entry.best_head


def drafts_without_path(target: str | None) -> list[str]:
    """Return the methods that suit any target, and those that ship with Draftwing for this one."""
    return [*(name for name, method in METHODS.items() if method.needs == "nothing"), *default_drafts(target)[1:]]


def default_drafts(target: str | None) -> list[str]:
    """Return the drafts that are measured if none is named: lookup and the heads that ship with the target."""
    entry = entry_of(target)
    return ["lookup", *(name for name in METHODS if entry is not None and name in entry.heads)]


@dataclasses.dataclass(frozen=True)
class Compared:
    draft: list[str] | None = option(
        None, f"{_DRAFTS} Repeatable. [default: lookup and the heads that ship with the target]", "-d"
    )
    every: bool = option(False, "Also measure every method that needs no path and suits the target.", "--all")

    def load(self, baseline: LM, model: Model) -> list[tuple[str, NewDrafter]]:
        """Return name and factory of each draft but ``none``; report those of ``--all`` that the target lacks."""
        from draftwing.cli import screen
        from draftwing.loading import load_drafter

        def load(draft: str) -> NewDrafter:
            return load_drafter(draft, baseline.target, baseline.tokenizer, device=model.device)

        names = [name for name in self.draft or default_drafts(model.target) if name != "none"]
        drafters = [(name, load(name)) for name in names]
        if not self.every:
            return drafters
        head = best_head(model.target)
        more = drafts_without_path(model.target) + ([f"{head}+lookup"] if head else [])
        more += [name for name, method in METHODS.items() if method.needs == "target"]
        for name in more:
            if name not in ("none", *names):
                try:
                    drafters.append((name, load(name)))
                except DraftwingError as error:
                    screen.line(f"skipped {name}: {error}", "yellow")
        return drafters


@dataclasses.dataclass(frozen=True)
class Drafting:
    PANEL: ClassVar = "Drafting"

    rule: str = option(
        "match",
        "Acceptance rule: match, match-top, speculative, multi-round, multi-round-replacement, block or typical.",
        expert=True,
    )
    tree: str = option(
        "auto",
        "auto (by observed costs), chain:K, dynamic:NODES,DEPTH,WIDTH (EAGLE-2: its total_token=60, depth=7, top_k=10 "
        "is dynamic:59,8,10), static (EAGLE-1), medusa, or a JSON file with a list of paths of ranks.",
    )
    lossy: bool = option(False, "Allow a rule that changes the output distribution (typical).", expert=True)

    def for_lm(self) -> dict[str, Any]:
        """Return keyword arguments for ``LM``. Raises ConfigError."""
        from draftwing.accept import get_rule

        if not (get_rule(self.rule, lossless=False).lossless or self.lossy):
            raise ConfigError(f"rule {self.rule!r} changes the output distribution: add --lossy to accept that")
        return {"rule": self.rule, "budget": self.budget(), "lossless": not self.lossy}

    def budget(self) -> Budget | None:
        """Return the budget that ``--tree`` names; None for auto. Raises ConfigError."""
        from draftwing.methods.base import STATIC_TREES, Budget

        if self.tree == "auto":
            return None
        if self.tree in STATIC_TREES:
            return Budget(paths=STATIC_TREES[self.tree])
        try:
            if self.tree.startswith(("chain:", "dynamic:")):
                return Budget.parse(self.tree)
            return Budget(paths=_read_paths(Path(self.tree)))
        except ConfigError as error:
            raise ConfigError(f"--tree {shown(self.tree)}: {error}") from error
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--tree must be auto, chain:5, dynamic:59,8,10, static, medusa, or a JSON file with a list of paths "
                f"such as [[0], [1], [0, 0]], found {shown(self.tree)} ({error})"
            ) from error


def _read_paths(file: Path) -> Any:
    from draftwing.storage import parse_json

    with file.open("rb") as stream:
        content = stream.read(_MAX_TREE_FILE_BYTES + 1)
    if len(content) > _MAX_TREE_FILE_BYTES:
        raise ValueError(f"it has more than {_MAX_TREE_FILE_BYTES:,} bytes")
    return parse_json(content)


TARGET = option(
    None,
    "Folder, GGUF file, name (see draftwing list) or hub id. [default: DRAFTWING_MODEL, or smollm2-135m-instruct]",
    "-t",
)


@dataclasses.dataclass(frozen=True)
class Model:
    PANEL: ClassVar = "Model"

    target: str | None = TARGET
    dtype: str = option("float32", "float32, bfloat16, float16, float64, or auto: the checkpoint's.")
    quantize: str | None = option(
        None,
        "int8 or q4 (4 bits): a quarter or a sixth of the memory, faster on CPUs. The output is the quantized model's.",
    )
    arithmetic: str | None = option(
        None, "Products with a GGUF file's blocks: int8, or float32 (slower). [default: int8]", expert=True
    )
    kv_dtype: str | None = option(
        None,
        "int8: keys and values in 8 bits on CPUs, a quarter of the memory. The output is this cache's.",
        expert=True,
    )
    lora: str | None = option(None, "LoRA adapter to merge into the target: a folder that peft wrote, or a hub id.")
    device: str | None = option(None, "cpu or cuda. [default: cuda if available]")
    engine: str = option("auto", "lean, transformers, or auto: lean if it supports the model.", expert=True)

    @property
    def name(self) -> str:
        return self.target or default_model()

    def load(self, draft: str | None, drafting: Drafting | None = None) -> LM:
        from draftwing.loading import load

        return load(**vars(self), draft=draft, **(drafting or Drafting()).for_lm())

    def check_kv_memory(self, kv_memory: int, drafting: Drafting) -> None:
        """Raise ConfigError if the config alone shows that the memory is too little, or more than there is."""
        from draftwing.loading import check_kv_memory

        try:
            check_kv_memory(kv_memory, **vars(self), budget=drafting.budget())
        except ConfigError as error:
            raise ConfigError(f"--kv-memory {kv_memory / 2**30:g}: {error}") from error

    def load_many(self, compared: Compared, drafting: Drafting | None = None) -> list[LM]:
        """Load the target once; return baseline decoding, then an ``LM`` for each draft."""
        from draftwing.lm import LM

        settings = (drafting or Drafting()).for_lm()
        baseline = self.load("none")
        makers = [maker for _, maker in compared.load(baseline, self)]
        return [baseline, *(LM(baseline.target, baseline.tokenizer, maker, **settings) for maker in makers)]


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    PANEL: ClassVar = "Sampling"

    temperature: float = option(0.0, "0 is greedy.", "-T")
    top_k: int | None = option(None, "Sample from the k most probable tokens.")
    top_p: float = option(1.0, "Sample from the fewest tokens whose probabilities add up to P.")
    min_p: float = option(0.0, "Drop tokens below this share of the most probable token's probability.")
    repetition_penalty: float = option(1.0, "Divides the logits of tokens in the prompt and output.", expert=True)
    presence_penalty: float = option(0.0, "Subtracted from the logit of every generated token.", expert=True)
    frequency_penalty: float = option(0.0, "Subtracted from a token's logit each time it was generated.", expert=True)
    logit_bias: list[str] | None = option(None, "ID:VALUE, added to a logit (-1e20: ban); repeatable.", expert=True)
    stop: list[str] | None = option(None, "String that ends the output; repeatable.")
    max_tokens: int = option(128, "Maximum number of new tokens.", "-n")
    min_tokens: int = option(0, "Number of tokens before an end token or stop string counts.", expert=True)
    seed: int = option(0, "The output is a function of target, prompt and seed.")
    ignore_eos: bool = option(False, "Continue after an end token.", expert=True)
    chat: bool | None = option(None, "Use the chat template. [default: if the model has one]", "--chat/--no-chat")

    def to_sampling(self, logprobs: int | None = None) -> Sampling:
        """Return the checked parameters."""
        from draftwing.sampling import Sampling

        values = {name: value for name, value in vars(self).items() if name != "chat"}
        values["logit_bias"] = dict(map(_parse_bias, self.logit_bias or ()))
        values["stop"] = tuple(self.stop or ())
        return Sampling(**values, logprobs=logprobs)

    def put(self, prompt: Prompt, tokenizer: Tokenizer) -> Prompt:
        """Return the prompt as messages for the chat template, or as plain text: see ``text.prompts.as_put``."""
        from draftwing.text.prompts import as_put

        return as_put(prompt, tokenizer.has_chat_template if self.chat is None else self.chat)

    def encode_all(self, prompts: Iterable[Prompt], lm: LM) -> list[list[int]]:
        """Return the tokens of every prompt as ``put`` gives it to ``lm``. Raises PromptError if one is too long."""
        from draftwing.text.prompts import PromptList, located

        places = prompts.places if isinstance(prompts, PromptList) else itertools.repeat("")
        encoded = []
        for where, prompt in zip(places, prompts, strict=False):
            with located(where):
                encoded.append(lm.encode(self.put(prompt, lm.tokenizer)))
                lm.target.check_prompt(encoded[-1])
        return encoded


@dataclasses.dataclass(frozen=True)
class ChatSampling(SamplingOptions):
    max_tokens: int = option(512, "Maximum number of tokens of an answer.", "-n")
    chat: bool = option(True, "Use the chat template, or plain text with empty lines.", "--chat/--no-chat")


def _parse_bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition(":")
    try:
        return int(token), float(value)
    except ValueError:
        raise ConfigError(f"--logit-bias must be ID:VALUE (such as 42:-1.5), found {text!r}") from None


PROMPTS = option(None, "Text file (one prompt), .jsonl file (one per line), a URL of one, or - for stdin.")


@dataclasses.dataclass(frozen=True)
class Examples:
    prompts: str | None = PROMPTS
    num_prompts: int = option(10, "Use only the first N prompts.", min=1)

    def read(self, target: str | None) -> Sequence[Prompt]:
        """Read the file, or the prompts that ship: questions for a chat model, else beginnings of Python files."""
        from draftwing.cli.progress import progress
        from draftwing.loading import find_model
        from draftwing.remote import download
        from draftwing.text.prompts import read_prompts, shipped_prompts, shipped_questions
        from draftwing.text.tokenizer import Tokenizer

        if self.prompts:
            download([self.prompts], progress)
            return read_prompts(self.prompts, self.num_prompts)
        shipped = shipped_questions if Tokenizer(find_model(target)[0]).has_chat_template else shipped_prompts
        return shipped(self.num_prompts)


@dataclasses.dataclass(frozen=True)
class Data:
    data: list[str] | None = option(
        None,
        "JSONL of dialogues (conversations, messages, turns, prompt and completion, question and answer, instruction "
        "and output) or texts, plain text files, or folders or URLs of them. Streamed: Parquet files, and "
        "hf://datasets/org/name?split=NAME. Repeatable.",
    )

    @property
    def sources(self) -> list[str]:
        """The files and folders; readers refuse an empty list."""
        return self.data or []


def parse_taps(text: str | None, name: str = "--taps") -> tuple[int, ...] | None:
    """Return the layer numbers of an option. Raises ConfigError."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{name} must be numbers such as 2,16,29, found {shown(text)}") from None
