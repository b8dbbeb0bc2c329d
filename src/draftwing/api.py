"""From two names to text: ``load`` a target and a drafter, then ``stream`` or ``generate``."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from draftwing.budget.costs import Costs
from draftwing.budget.measure import costs_of, planner_for
from draftwing.budget.planner import Planner
from draftwing.drafters.base import Budget, Drafter, NoDrafter
from draftwing.drafters.causal_lm import CausalLMDrafter
from draftwing.drafters.feature import EagleDrafter
from draftwing.drafters.lookup import LookupDrafter
from draftwing.engine.decode import Decoder
from draftwing.errors import CheckpointError, ConfigError, PromptError, UnsupportedError
from draftwing.heads.identity import target_id
from draftwing.heads.read import is_head, read_head
from draftwing.model.adapter import AdapterTarget
from draftwing.model.config import LEAN_MODEL_TYPES, read_config
from draftwing.model.lean import LeanTarget
from draftwing.model.target import Target
from draftwing.model.weights import resolve
from draftwing.sampling import Sampling
from draftwing.shipped import SHIPPED
from draftwing.stats import Logprob, RowStep, Stats, Step
from draftwing.text.prompts import Prompt
from draftwing.text.stream import TextStream
from draftwing.text.tokenizer import Tokenizer

__all__ = [
    "DTYPES",
    "LM",
    "Generation",
    "StreamStep",
    "load",
    "load_drafter",
    "load_target",
]

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
SHIPPED_DRAFTS = {"eagle3": "eagle3", "eagle1": "eagle1", "causal-lm": "draft"}  # for the shipped target


@dataclass(frozen=True)
class StreamStep:
    """What one decode step adds to a stream.

    Attributes:
        text: newly printable text; may be empty while a character or a possible stop string is incomplete.
        token_ids: the tokens of this step.
        step: the step itself.
    """

    text: str
    token_ids: tuple[int, ...]
    step: Step


@dataclass
class Generation:
    """A finished text.

    Attributes:
        text: without the prompt, special tokens and the stop string.
        token_ids: the emitted ids, up to and including the one that ended the text.
        finish_reason: ``stop`` (a stop token or string) or ``length``.
        stats: steps folded; ``tau`` is the number to look at.
        logprobs: one per token where asked for.
    """

    prompt_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    stats: Stats = field(default_factory=Stats)
    logprobs: list[Logprob] | None = None

    @property
    def tau(self) -> float:
        """Tokens emitted per target forward, the bonus token counted."""
        return self.stats.tau

    @property
    def lossless(self) -> bool:
        """Whether the rule keeps the target's law."""
        return self.stats.lossless


class LM:
    """A target, its tokenizer and a way to make drafters.

    Args:
        target: from ``load_target``.
        tokenizer: the target's.
        new_drafter: makes a drafter with empty state for each decode loop; None decodes plainly.
        rule, lossless: see ``Decoder``.
        budget: how much to draft in every step; None decides it step by step from measured costs (``budget.planner``).

    Raises:
        ConfigError, UnsupportedError: see ``Decoder``.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        new_drafter: Callable[[], Drafter] | None = None,
        rule: str = "match",
        budget: Budget | None = None,
        *,
        lossless: bool = True,
    ) -> None:
        self.target, self.tokenizer = target, tokenizer
        self.new_drafter: Callable[[], Drafter] = new_drafter or NoDrafter
        self.rule, self.lossless = rule, lossless
        drafter = self.new_drafter()
        self.drafter_name = drafter.name
        self.budget = budget
        self._planner: Planner | None = None
        # A rule or budget that cannot work is refused here, not at the first prompt.
        Decoder(target, drafter, rule, budget, lossless=lossless)

    @property
    def is_auto(self) -> bool:
        """Whether what to draft is decided step by step."""
        return self.budget is None and self.drafter_name != NoDrafter.name

    def describe_budget(self) -> str:
        """Such as ``auto``, ``chain:5``, ``dynamic:60,8,10`` or ``static`` with its number of nodes."""
        return "none" if self.drafter_name == NoDrafter.name else "auto" if self.budget is None else str(self.budget)

    def costs(self, *, again: bool = False) -> Costs:
        """What a step takes here: measured in a few seconds at the first call ever, then kept on disk."""
        return costs_of(self.target, self.new_drafter, partial(_loop, self.target), again=again)

    def decoder(self) -> Decoder:
        """A new decode loop with nothing in it. What an automatic budget learns goes on from one to the next."""
        if self.is_auto and self._planner is None:
            self._planner = planner_for(self.target, self.new_drafter, self.rule, partial(_loop, self.target))
        return Decoder(
            self.target, self.new_drafter(), self.rule, self.budget, lossless=self.lossless, planner=self._planner
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of a text, of a dialogue (a list of ``{"role", "content"}``), or the ids themselves.

        Raises:
            PromptError: it is none of these, or empty.
            TokenizerError: see ``Tokenizer.encode_chat``.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        items: list[Any] = list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            return self.tokenizer.encode_chat(items)
        odd = next((item for item in items if not isinstance(item, Integral)), None)
        if odd is not None:
            raise PromptError(
                f"a prompt must be a text, token ids (ints) or messages, found {type(odd).__name__} {odd!r:.40} in it: "
                f"give ids with .tolist(), or a list of messages with role and content"
            )
        return [int(token) for token in items]

    def stream(self, prompt: Prompt, sampling: Sampling | None = None, **options: Any) -> Iterator[StreamStep]:
        """Decode one prompt and yield the text of every step as it comes.

        ``options`` are ``Sampling``'s fields (``temperature=0.8, seed=1``), or pass a ``Sampling``. Stop
        strings never show, not even in part. The last step's text holds what was held back.
        """
        request = _Request(self, prompt, _sampling(sampling, options))
        decoder = self.decoder()
        request.id = decoder.admit(request.result.prompt_ids, request.sampling)
        while not request.done:
            step = decoder.step()
            text = request.take(step, step.rows[0])
            yield StreamStep(text, step.rows[0].token_ids, step)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        max_batch: int = 8,
        **options: Any,
    ) -> list[Generation]:
        """Decode prompts, at most ``max_batch`` at once; rows that end make room for waiting ones.

        Returns:
            One generation per prompt, in order.

        Raises:
            ConfigError: ``max_batch`` below 1.
        """
        if max_batch < 1:
            raise ConfigError(f"max_batch must be at least 1, found {max_batch}")
        wanted = _sampling(sampling, options)
        # A bad prompt is refused here, before any work is done.
        requests = [_Request(self, prompt, wanted) for prompt in _as_list(prompts)]
        decoder, waiting, running = self.decoder(), deque(requests), dict[int, _Request]()
        while waiting or running:
            while waiting and decoder.num_running < max_batch:
                request = waiting.popleft()
                request.id = decoder.admit(request.result.prompt_ids, request.sampling)
                running[request.id] = request
            step = decoder.step()
            for row in step.rows:
                request = running[row.request_id]
                request.take(step, row)
                if request.done:
                    del running[request.id]
                    if row.finish_reason is None:  # a stop string: the decoder does not know of it
                        decoder.retire(request.id)
        return [request.result for request in requests]


def _loop(target: Target, drafter: Drafter, budget: Budget) -> Decoder:
    """What costs are measured with."""
    return Decoder(target, drafter, budget=budget)


class _Request:
    """A generation under way: what the loop emits becomes text here."""

    def __init__(self, lm: LM, prompt: Prompt, sampling: Sampling) -> None:
        self.sampling, self.id, self.done = sampling, -1, False
        self.result = Generation(lm.encode(prompt), logprobs=None if sampling.logprobs is None else [])
        lm.target.check_prompt(self.result.prompt_ids)
        self._text = TextStream(lm.tokenizer, self.result.prompt_ids, sampling.stop)

    def take(self, step: Step, row: RowStep) -> str:
        """Fold one step; returns the newly printable text."""
        result = self.result
        text = self._text.push(row.token_ids)
        result.token_ids.extend(row.token_ids)
        if result.logprobs is not None:
            result.logprobs.extend(row.logprobs or ())
        if self._text.stopped is not None:
            result.finish_reason, self.done = "stop", True
            del result.token_ids[self._text.num_tokens_kept :]
            if result.logprobs is not None:
                del result.logprobs[self._text.num_tokens_kept :]
        elif row.finish_reason is not None:
            result.finish_reason, self.done = row.finish_reason, True
            text += self._text.flush()
        result.stats.add(replace(step, rows=(row,)))
        result.text += text
        return text


def _sampling(sampling: Sampling | None, options: dict[str, Any]) -> Sampling:
    unknown = set(options) - {each.name for each in fields(Sampling)}
    if unknown:
        known = ", ".join(each.name for each in fields(Sampling))
        raise ConfigError(f"unknown sampling option {min(unknown)!r}: the options are {known}")
    return replace(sampling or Sampling(), **options)


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or many: a string, ids or a dialogue is one."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    return [items] if items and isinstance(items[0], Integral | Mapping) else items


# --- loading ---------------------------------------------------------------------------------------------------------


def load(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    dtype: str = "float32",
    weights: str | None = None,
    device: str | None = None,
    engine: str = "auto",
    rule: str = "match",
    budget: Budget | None = None,
    lossless: bool = True,
    revision: str | None = None,
) -> LM:
    """Load a target and a drafter.

    Args:
        target: a folder or a hub id; None is the small Python-writing model that comes with Draftwing.
        draft: a folder or hub id of an EAGLE head (in any layout) or of a smaller causal LM with the same tokenizer,
            ``"lookup"`` or ``"none"``. None takes the shipped EAGLE-3 head for the shipped
            target, ``"lookup"`` for any other, and ``"none"`` for one with recurrent layers, which cannot take drafted
            tokens back.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``float64``.
        weights: ``int8`` quantises the matrices of the target and of what drafts for it: on a CPU up to thrice as fast.
            The text is then the quantised model's, drafted or not, to the token. None: as ``dtype`` says.
        device: ``cpu`` or ``cuda``; None takes a GPU where there is one.
        engine: ``lean``, ``transformers`` (any architecture, slower), or ``auto``: lean where it can.
        rule, lossless: see ``Decoder``.
        budget: how much to draft in every step; None decides it step by step.
        revision: of a hub id.

    Raises:
        CheckpointError, ConfigError, TokenizerError: what is wrong, and the mend.
    """
    folder = resolve(target, revision) if target is not None else _shipped("target")
    name = str(target or "draftwing/target")
    model = load_target(folder, dtype=dtype, weights=weights, device=device, engine=engine, name=name)
    tokenizer = Tokenizer(folder)
    if draft is None:
        draft = "eagle3" if target is None else "lookup" if model.supports_trees else "none"
    new_drafter = load_drafter(draft, model, tokenizer, dtype=dtype, device=device)
    return LM(model, tokenizer, new_drafter, rule, budget, lossless=lossless)


def load_target(
    folder: Path,
    *,
    dtype: str = "float32",
    weights: str | None = None,
    device: str | None = None,
    engine: str = "auto",
    name: str | None = None,
    prepack: bool = True,
) -> Target:
    """Load a folder as a ``Target``. Arguments and errors as ``load``; ``prepack=False`` keeps plain weights."""
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    if engine not in ("auto", "lean", "transformers"):
        raise ConfigError(f"unknown engine {engine!r}: choose auto, lean or transformers")
    where = _device(device)
    config = read_config(folder)
    lean = config.get("model_type") in LEAN_MODEL_TYPES
    model: Target
    if engine == "lean" or (engine == "auto" and lean):
        model = LeanTarget.from_folder(folder, DTYPES[dtype], where, prepack=prepack, name=name, weights=weights)
    elif weights is not None:
        raise UnsupportedError(
            f"weights={weights!r} need the lean decoder, and {folder} would run on transformers: "
            f"{'choose engine=' + repr('lean') + ', or ' if lean else ''}leave weights out"
        )
    else:
        model = AdapterTarget.from_folder(folder, DTYPES[dtype], where, name=name)
    model.eos_ids = tuple(dict.fromkeys([*model.eos_ids, *_generation_eos(folder)]))
    return model


def load_drafter(
    draft: str | Path, target: Target, tokenizer: Tokenizer | None, *, dtype: str = "float32", device: str | None = None
) -> Callable[[], Drafter]:
    """A maker of drafters for ``target``: ``"none"``, ``"lookup"``, or a folder or hub id of a head or a causal LM.

    For the shipped target there are ``"eagle3"``, ``"eagle1"`` and ``"causal-lm"`` too. ``tokenizer`` is the target's;
    without it nothing is known of what the draft's ids mean but their number. What drafts for a quantised target is
    quantised like it, and in float32 too where the CPU kernel drafts faster so: the text is the target's either way.

    Raises:
        TokenizerError: the draft model's tokenizer is not the target's.
        CheckpointError: a head that was trained for another target, or is damaged.
        UnsupportedError: the draft model is not one of the lean decoder's families.
    """
    if str(draft) == "none":
        return NoDrafter
    if str(draft) == "lookup":
        return partial(LookupDrafter, target.vocab_size)
    folder = _shipped(SHIPPED_DRAFTS[str(draft)]) if str(draft) in SHIPPED_DRAFTS else resolve(draft)
    config = read_config(folder)
    weights = target.weights
    if is_head(config, folder):
        own = target_id(target, tokenizer)
        net = read_head(folder, target.embedding, target.head, own, target.dtype).prepack(weights, fast=True)
        return partial(EagleDrafter, net, target, folder.name)
    if tokenizer is not None:
        tokenizer.check_same(Tokenizer(folder), str(draft))
    if config.get("model_type") not in LEAN_MODEL_TYPES:
        raise UnsupportedError(
            f"draft model {draft} is of type {config.get('model_type')!r}: a draft model must be one of "
            f"{', '.join(sorted(LEAN_MODEL_TYPES))}; or use draft='lookup'"
        )
    model = LeanTarget.from_folder(folder, DTYPES[dtype], _device(device), name=folder.name, weights=weights, fast=True)
    return partial(CausalLMDrafter, model, target.vocab_size)


def _device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}: use cpu or cuda") from error
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is none that Draftwing runs on: use cpu or cuda")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ConfigError(
            f"device {device!r}: PyTorch sees {count or 'no'} CUDA device{'s' * (count != 1)} here: "
            f"use {'a lower number' if count else 'device=' + repr('cpu')}"
        )
    return found


def _shipped(name: str) -> Path:
    folder = SHIPPED / name
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder}: the model shipped with Draftwing is not installed: reinstall the package")
    return folder


def _generation_eos(folder: Path) -> list[int]:
    """End tokens that only generation_config.json names (Llama 3 has three)."""
    file = folder / "generation_config.json"
    if not file.exists():
        return []
    try:
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file}: not readable as a JSON object ({error}): download it again") from error
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) for token in ids):
        raise CheckpointError(
            f"{file}: `eos_token_id` must be a token id, a list of them or null, found {eos!r:.60}: correct it, or "
            f"download the file again"
        )
    return ids
