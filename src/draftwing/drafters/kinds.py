"""The table of the kinds of drafts: one entry each says how a kind is recognised, read, run, trained and written.

Loading, training, converting, examining and the command line read it, and a kind of one's own joins it by ``register``
(``docs/extending.md``). What an entry needs is imported when it is used: the command line reads names and help here,
and does not wait for PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from draftwing.drafters.built_in import BUILT_IN
from draftwing.drafters.kind import Kind, Method, NetKind, NewDrafter, NewNet, Source
from draftwing.drafters.own import net_kind
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError, shown
from draftwing.model.catalogue import CATALOGUE, SHIPPED_TARGET, entry_of

if TYPE_CHECKING:
    import torch

    from draftwing.heads.doctor.case import Finding
    from draftwing.model.target import Target
    from draftwing.nets.base import DraftNet
    from draftwing.text.tokenizer import Tokenizer

__all__ = [
    "KINDS",
    "Kind",
    "Method",
    "NetKind",
    "NewNet",
    "Source",
    "convert",
    "diagnose",
    "drafter_maker",
    "kind_of_folder",
    "method_named",
    "methods",
    "net_kind",
    "net_kind_of",
    "register",
]

KINDS: dict[str, Kind] = {kind.name: kind for kind in BUILT_IN}


def register(kind: Kind) -> Kind:
    """Add a kind to the table. Its heads are then loaded, trained, converted and examined like the others.

    Raises:
        ConfigError: the name, or that of one of its methods, is taken.
    """
    if not kind.name or kind.name in KINDS:
        raise ConfigError(f"a kind of draft called {kind.name!r} cannot be added: choose a name that is not taken")
    taken = set(methods()) & set(kind.net.methods if kind.net is not None else ())
    if taken:
        raise ConfigError(f"a training method called {min(taken)!r} is there already: choose another name")
    KINDS[kind.name] = kind
    return kind


# --- looking things up -----------------------------------------------------------------------------------------------


def kind_of_folder(folder: Path) -> Kind:
    """The kind of draft that a folder holds.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: a head of a kind that is not registered.
    """
    from draftwing.model.config import read_config

    folder = Path(folder)
    config = read_config(folder)
    # Nets first: what none of them knows is a language model's.
    for kind in sorted(KINDS.values(), key=lambda kind: kind.net is None):
        if kind.recognises is not None and kind.recognises(config, folder):
            return kind
    block = config.get("draftwing")
    found = shown(block.get("kind")) if isinstance(block, dict) else "none"
    raise ConfigError(
        f"{folder}: holds a draft of kind {found}, which is not known here: import the module that registers it first "
        f"(known: {', '.join(KINDS)})"
    )


def net_kind_of(net: DraftNet) -> NetKind:
    """The entry of a net. Raises ConfigError where its kind is not registered."""
    found = KINDS.get(net.kind)
    if found is None or found.net is None:
        raise ConfigError(
            f"{type(net).__name__} is a net of kind {net.kind!r}, which is not registered: call draftwing.register "
            f"first"
        )
    return found.net


def methods() -> dict[str, tuple[Kind, Method]]:
    """Every way of training, by name."""
    return {
        name: (kind, method)
        for kind in KINDS.values()
        if kind.net is not None
        for name, method in kind.net.methods.items()
    }


def method_named(name: str) -> tuple[NetKind, Method]:
    """A way of training. Raises ConfigError where there is none of this name."""
    known = methods()
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"unknown training method {shown(name)}: choose one of {', '.join(known)}")
    kind, method = known[name]
    return cast(NetKind, kind.net), method


def drafter_maker(
    draft: str | Path,
    target: Target,
    tokenizer: Tokenizer | None,
    *,
    device: Callable[[], torch.device],
    options: Mapping[str, Any] | None = None,
) -> NewDrafter:
    """A maker of drafters with empty state: see ``api.load_drafter``.

    Args:
        device: see ``Source``.

    Raises:
        ConfigError: an option that this draft does not have, or a value that it does not take.
    """
    parts = _several(draft)
    found = [_found(part, target, tokenizer) for part in parts]
    kinds = [kind for kind, _ in found]
    for option in options or {}:
        if not any(option in kind.options for kind in kinds):
            known = sorted({name for kind in kinds for name in kind.options})
            has = f"it has {', '.join(known)}" if known else "it has none, leave draft_options out"
            raise ConfigError(f"draft_options: {draft} has no option {option!r}: {has}")
    makers = []
    for part, (kind, folder) in zip(parts, found, strict=True):
        own = {name: kind.options[name](value) for name, value in (options or {}).items() if name in kind.options}
        makers.append(kind.make(Source(target, tokenizer, str(part), folder, device, own)))
    return makers[0] if len(makers) == 1 else _all_of(makers, list(map(str, parts)))


def _several(draft: str | Path) -> Sequence[str | Path]:
    """The drafts that a name such as ``eagle3+lookup`` joins; a folder may have a plus in its name all the same."""
    name = str(draft)
    if "+" not in name or isinstance(draft, Path) or Path(name).expanduser().exists():
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


def _all_of(makers: list[NewDrafter], names: list[str]) -> NewDrafter:
    """One drafter of several; what is learnt of their claims is shared by all that are made."""
    from draftwing.drafters.several.claims import Claims
    from draftwing.drafters.several.combined import CombinedDrafter

    claims = Claims(len(makers))
    return lambda: CombinedDrafter([make() for make in makers], claims, names)


def _found(draft: str | Path, target: Target, tokenizer: Tokenizer | None) -> tuple[Kind, Path]:
    """The kind of one draft, and its folder where it has one."""
    from draftwing.model.resolve import resolve

    name = str(draft)
    kind = KINDS.get(name)
    if kind is not None and kind.of_target is not None:
        return kind, kind.of_target(target)
    if kind is not None and kind.recognises is None:
        return kind, Path()
    folder = _shipped_head(name, target, tokenizer) or resolve(draft)
    return kind_of_folder(folder), folder


def _shipped_head(kind: str, target: Target, tokenizer: Tokenizer | None) -> Path | None:
    """The folder of a draft that comes with Draftwing; None where the name is not that of such a kind.

    A target without a name in the catalogue may be one that has a name all the same, held by transformers or under
    another path, in whatever precision: it gets the first draft that says that it was made for such a target, else that
    of the shipped target, which is refused when it is read if it does not fit.
    """
    if kind not in KINDS or not any(kind in entry.heads for entry in CATALOGUE.values()):
        return None
    entry = entry_of(target.name)
    if entry is None and KINDS[kind].net is not None:
        from draftwing.heads.identity import differences, made_for, target_id

        own = target_id(target, tokenizer)
        folders = [each.head(kind) for each in CATALOGUE.values() if kind in each.heads]
        for folder in folders:
            known = made_for(folder)
            if known is not None and not differences(known, own):
                return folder
    return (entry or SHIPPED_TARGET).head(kind)


def convert(source: Path, destination: Path, to: str, **said: Any) -> None:
    """Write a head in another layout, whatever its kind: see ``heads.convert.convert``, which has EAGLE's.

    Raises:
        UnsupportedError: a layout that this kind of head has not.
    """
    kind = _head_kind(source)
    known = {layout for each in KINDS.values() if each.net is not None for layout in each.net.layouts}
    if kind.layouts and to in known and to not in kind.layouts:
        raise UnsupportedError(f"{source}: such a head can only be written as {', '.join(kind.layouts)}, found {to!r}")
    kind.convert(source, destination, to, **said)


def diagnose(folder: Path, target: Path | None = None) -> list[Finding]:
    """Look at a head, whatever its kind: see ``heads.doctor.examine.diagnose``, which has EAGLE's checks."""
    return _head_kind(folder).diagnose(folder, target)


def _head_kind(folder: Path) -> NetKind:
    """Of a folder; EAGLE-3's where it is no head or cannot be read: what reads it then says why not."""
    try:
        found = kind_of_folder(Path(folder)).net
    except CheckpointError:
        found = None
    return found or cast(NetKind, KINDS["eagle3"].net)
