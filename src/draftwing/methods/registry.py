"""One table of all draft methods, by name.

A method's module is imported when it is used: the command line reads names and help here without waiting for PyTorch.
Loading, training, converting and examining go through the table; ``register`` adds to it (``docs/dev/extending.md``).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from draftwing.checks import pairs
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError, shown
from draftwing.models.catalogue import CATALOGUE, TOY, entry_of
from draftwing.storage import exists

if TYPE_CHECKING:
    import torch

    from draftwing.formats.doctor import Finding
    from draftwing.methods.method import DraftMethod, NetMethod, NewDrafter
    from draftwing.methods.net import DraftNet, TargetId
    from draftwing.methods.objectives import Objective
    from draftwing.models.target import Target
    from draftwing.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TrainingMethod:
    """A recipe for training."""

    objective: str | Objective  # a name is one of ``objectives.OBJECTIVES``
    unroll_steps: int = 1
    noise: float = 0.0  # width of the uniform noise that is added to the target's features


@dataclass(frozen=True)
class Registration:
    """A line of the table; see ``register``."""

    name: str
    path: str | type[DraftMethod]
    help: str
    needs: Literal["nothing", "folder", "target"] = "nothing"
    training: Mapping[str, TrainingMethod] = field(default_factory=dict)

    @cached_property
    def method(self) -> Any:
        """The ``DraftMethod``, imported at first use; a ``NetMethod`` if it drafts with a network."""
        path = self.path
        if isinstance(path, str):
            module, name = path.split(":")
            try:
                path = getattr(import_module(module), name)
            except (ImportError, AttributeError, TypeError) as error:
                raise ConfigError(f"draft method {self.name!r}: {path} cannot be imported ({error})") from error
        from draftwing.methods.method import DraftMethod

        if not isinstance(path, type) or not issubclass(path, DraftMethod):
            raise ConfigError(
                f"draft method {self.name!r}: its class must derive from DraftMethod, found {shown(path)}"
            )
        method = path()
        method.name = self.name
        return method


METHODS: dict[str, Registration] = {}


def training_methods() -> dict[str, tuple[Registration, TrainingMethod]]:
    """Return every recipe, with the method whose networks it trains, by name."""
    return {name: (entry, recipe) for entry in METHODS.values() for name, recipe in entry.training.items()}


def register(
    name: str,
    path: str | type[DraftMethod],
    help: str,
    *,
    needs: Literal["nothing", "folder", "target"] = "nothing",
    training: Mapping[str, TrainingMethod] | None = None,
) -> None:
    """Add a draft method. It can then be used like the built-in ones.

    Args:
        name: for ``draft=``, and in the config of its heads.
        path: its class, or "module:Class", which is imported at first use.
        help: one line.
        needs: ``folder`` if drafts of this method are files (or come with Draftwing: ``models.catalogue``), ``target``
            if they are part of the target's checkpoint.
        training: recipes for training its network, by name; such a method is a ``NetMethod``, and needs a folder.

    Raises:
        ConfigError: the name, or that of a recipe, is taken, or an argument is of a wrong type.
    """
    if not isinstance(name, str) or not name or name in METHODS:
        raise ConfigError(f"a draft method called {shown(name)} cannot be added: choose a name that is not taken")
    if not isinstance(path, type) and not (isinstance(path, str) and re.fullmatch(r"[\w.]+:\w+", path)):
        raise ConfigError(f"the class of draft method {name!r} must be a class or 'module:Class', found {shown(path)}")
    if not isinstance(help, str):
        raise ConfigError(f"the help of draft method {name!r} must be one line of text, found {shown(help)}")
    if not isinstance(needs, str) or needs not in ("nothing", "folder", "target"):
        raise ConfigError(f"needs must be 'nothing', 'folder' or 'target', found {shown(needs)}")
    recipes = dict(() if training is None else pairs(training, 1000) or ((None, None),))
    if not all(isinstance(key, str) and isinstance(value, TrainingMethod) for key, value in recipes.items()):
        raise ConfigError(f"training must be a dict of names to TrainingMethod, found {shown(training)}: leave it out")
    taken = training_methods().keys() & recipes.keys()
    if taken:
        raise ConfigError(f"a training method called {min(taken)!r} is there already: choose another name")
    needs = "folder" if recipes and needs == "nothing" else needs
    METHODS[name] = Registration(name, path, help, needs, recipes)


_HERE = "draftwing.methods."
register("none", _HERE + "lookup:Baseline", "baseline decoding")
register("lookup", _HERE + "lookup:Lookup", "what followed the same words before")
register("lookahead", _HERE + "lookahead:Lookahead", "n-grams that the target predicts in parallel")
_EAGLE1 = {"eagle1": TrainingMethod("eagle1", 1, 0.2), "hass": TrainingMethod("hass", 3)}
register("eagle1", _HERE + "eagle:Eagle1", "an EAGLE-1 or EAGLE-2 head", training=_EAGLE1)
register("eagle3", _HERE + "eagle:Eagle3", "an EAGLE-3 head", training={"eagle3": TrainingMethod("eagle3", 5)})
_MTP = {"mtp": TrainingMethod("next-token", 1)}  # as many modules as steps
register("mtp", _HERE + "mtp:Mtp", "MTP modules", needs="target", training=_MTP)
register("medusa", _HERE + "medusa:Medusa", "Medusa heads", training={"medusa": TrainingMethod("medusa", 5)})
register("hydra", _HERE + "hydra:Hydra", "Hydra heads", training={"hydra": TrainingMethod("medusa", 5)})
register("dflash", _HERE + "dflash:DFlash", "a DFlash net", training={"dflash": TrainingMethod("dflash", 7)})
register("dspark", _HERE + "dspark:DSpark", "a DSpark net", training={"dspark": TrainingMethod("dflash", 7)})
register("domino", _HERE + "domino:Domino", "a Domino net", training={"domino": TrainingMethod("dflash", 7)})
register("peagle", _HERE + "eagle:PEagle", "a P-EAGLE head", training={"peagle": TrainingMethod("eagle3", 8)})
register("kangaroo", _HERE + "kangaroo:Kangaroo", "a Kangaroo adapter", training={"kangaroo": TrainingMethod("eagle3")})
register("layers", _HERE + "layer_skip:Layers", "layers that draftwing tune layers chose", needs="folder")
register("early-exit", _HERE + "layer_skip:EarlyExit", "the target's first layers")
register("self-window", _HERE + "magicdec:SelfWindow", "MagicDec: the target looking at its first and last tokens")
register("self-snapkv", _HERE + "magicdec:SelfSnapKV", "MagicDec: the target looking at the tokens that matter most")
register("llma", _HERE + "retrieval:Llma", "what follows in reference texts")
register("suffix", _HERE + "retrieval:Suffix", "what followed in this and former requests")
register("rest", _HERE + "retrieval:Rest", "a datastore of draftwing datastore build (REST)", needs="folder")
_SMALLER, _CAUSAL_LM = "a smaller causal LM", {"causal-lm": TrainingMethod("fkl")}
register("causal-lm", _HERE + "causal_lm:CausalLM", _SMALLER, training=_CAUSAL_LM)


# --- look-ups --------------------------------------------------------------------------------------------------------


def get_method(name: str) -> Any:
    """Return a registered method: a ``DraftMethod``, or a ``NetMethod`` if it drafts with a network."""
    return METHODS[name].method


def method_of_folder(folder: Path) -> DraftMethod:
    """Return the method of the draft in a folder.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: a head of a method that is not registered.
    """
    from draftwing.models.config import read_config

    folder = Path(folder)
    config = read_config(folder)
    # Networks first: what none of them recognises is a language model.
    for entry in sorted(METHODS.values(), key=lambda entry: not entry.training):
        if entry.needs != "nothing" and entry.method.recognises(config, folder):
            method: DraftMethod = entry.method
            return method
    block = config.get("draftwing")
    kind = shown(block.get("kind")) if isinstance(block, dict) else "none"
    raise ConfigError(
        f"{folder}: holds a draft of kind {kind}, which is not known here: import the module that registers it first "
        f"(known: {', '.join(METHODS)})"
    )


def method_of_net(net: DraftNet) -> NetMethod:
    """Return the method of a network. Raises ConfigError if it is not registered."""
    entry = METHODS.get(net.kind)
    if entry is None or not entry.training:
        raise ConfigError(
            f"{type(net).__name__} is a net of kind {net.kind!r}, which is not registered: call draftwing.register "
            f"first"
        )
    method: NetMethod = entry.method
    return method


def training_method(name: str) -> tuple[NetMethod, TrainingMethod]:
    """Return a recipe, and the method whose networks it trains. Raises ConfigError if there is none."""
    recipes = training_methods()
    if not isinstance(name, str) or name not in recipes:
        raise ConfigError(f"unknown training method {shown(name)}: choose one of {', '.join(recipes)}")
    entry, recipe = recipes[name]
    return entry.method, recipe


def drafter_maker(
    draft: str | Path,
    target: Target,
    tokenizer: Tokenizer | None,
    *,
    device: Callable[[], torch.device],
    options: Mapping[str, Any] | None = None,
) -> NewDrafter:
    """Return a function that makes drafters with empty state: see ``loading.load_drafter`` and ``Source``.

    Raises ConfigError for an option that this draft does not have, or a value that it does not take.
    """
    from draftwing.methods.method import Source

    given = () if options is None else pairs(options, 1000)
    if given is None or not all(isinstance(name, str) for name, _ in given):
        raise ConfigError(f"draft_options must be a dict of options, found {shown(options)}: leave it out for none")
    options, parts = dict(given), _split(draft)
    methods = [_find(part, target, tokenizer) for part in parts]
    for option in options:
        if not any(option in method.options for method, _ in methods):
            names = sorted({name for method, _ in methods for name in method.options})
            has = f"it has {', '.join(names)}" if names else "it has none, leave draft_options out"
            raise ConfigError(f"draft_options: {draft} has no option {option!r}: {has}")
    makers = []
    for part, (method, folder) in zip(parts, methods, strict=True):
        checked = {name: method.options[name](value) for name, value in options.items() if name in method.options}
        makers.append(method.new_drafter(Source(target, tokenizer, str(part), folder, device, checked)))
    if len(makers) == 1:
        return makers[0]
    from draftwing.methods.ensemble import CombinedDrafter, DraftCalibration

    calibration, names = DraftCalibration(len(makers)), list(map(str, parts))  # shared by all drafters that are made
    return lambda: CombinedDrafter([make() for make in makers], calibration, names)


def _split(draft: str | Path) -> Sequence[str | Path]:
    """Return the drafts that a name such as ``eagle3+lookup`` joins; a folder's own name may contain a plus."""
    name = str(draft)
    if "+" not in name or isinstance(draft, Path) or exists(name):
        return [draft]
    parts = [part.strip() for part in name.split("+")]
    if not all(parts):
        raise ConfigError(f"draft {name!r} joins a draft without a name: write it like eagle3+lookup")
    if "none" in parts:
        raise ConfigError(f"draft {name!r} joins drafts with none at all: leave none out")
    twice = next((part for part in parts if parts.count(part) > 1), None)
    if twice is not None:
        raise ConfigError(f"draft {name!r} names {twice!r} twice: each proposes the same every time, so name it once")
    return parts


def _find(draft: str | Path, target: Target, tokenizer: Tokenizer | None) -> tuple[DraftMethod, Path]:
    from draftwing.models.resolve import resolve

    entry = METHODS.get(str(draft))
    if entry is not None and entry.needs != "folder":
        return entry.method, entry.method.own_folder(target) if entry.needs == "target" else Path()
    try:
        folder = (entry and _shipped_head(entry, target, tokenizer)) or resolve(draft)
    except CheckpointError as error:
        close = [] if entry is not None else difflib.get_close_matches(str(draft), METHODS, n=2, cutoff=0.65)
        if not close:
            raise
        raise CheckpointError(f"{error} Did you mean {' or '.join(close)}?") from error
    return method_of_folder(folder), folder


def _shipped_head(entry: Registration, target: Target, tokenizer: Tokenizer | None) -> Path | None:
    """Return the folder of a draft that comes with Draftwing; None if there is none of this method.

    A target that the catalogue does not have by name may be in it under another path, in another precision or held by
    transformers. It gets the first head made for such a target, else that of the toy target, which is refused when it
    is read if it does not fit.
    """
    if not any(entry.name in model.heads for model in CATALOGUE.values()):
        return None
    model = entry_of(target.name)
    if model is None and entry.training:
        from draftwing.formats.identity import target_id

        folder = shipped_head_for(entry.name, target_id(target, tokenizer))
        if folder is not None:
            return folder
    return (model or TOY).head(entry.name)


def shipped_head_for(method: str, identity: TargetId) -> Path | None:
    """Return the folder of the first head that comes with Draftwing, is of a method and was made for such a target."""
    from draftwing.formats.identity import differences, made_for

    for model in CATALOGUE.values():
        if method in model.heads:
            trained_for = made_for(model.head(method))
            if trained_for is not None and not differences(trained_for, identity):
                return model.head(method)
    return None


def convert(source: Path, destination: Path, to: str, **options: Any) -> None:
    """Write a head of any method in another layout: see ``formats.write.convert`` for EAGLE's options.

    Raises UnsupportedError for a layout that heads of this method do not have, ConfigError for one that none has.
    """
    method = _method_of_head(source)
    if method.layouts and to not in method.layouts:
        layouts = ", ".join(method.layouts)
        if any(to in entry.method.layouts for entry in METHODS.values() if entry.training):
            raise UnsupportedError(f"{source}: such a head can only be written as {layouts}, found {to!r}")
        raise ConfigError(f"unknown head layout {to!r}: choose one of {layouts}")
    method.convert(source, destination, to, **options)


def diagnose(folder: Path, target: Path | None = None) -> list[Finding]:
    """Examine a head of any method: see ``formats.doctor.diagnose`` for EAGLE's checks."""
    return _method_of_head(folder).diagnose(folder, target)


def _method_of_head(folder: Path) -> NetMethod:
    """Return the method of a head; EAGLE-3 if it is none or cannot be read: reading it then explains why."""
    from draftwing.methods.method import NetMethod

    try:
        method = method_of_folder(Path(folder))
    except CheckpointError:
        method = get_method("eagle3")
    return method if isinstance(method, NetMethod) else get_method("eagle3")
