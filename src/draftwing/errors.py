"""Every error that Draftwing raises on purpose.

    DraftwingError
    ├── ConfigError        a config.json, or an option, that cannot mean anything
    │   └── UnsupportedError   it means something that Draftwing does not do; says what to do instead
    ├── CheckpointError    a folder or a file of weights: missing, truncated, foreign, wrong shapes
    ├── TokenizerError     no tokenizer, or one that is not the target's
    ├── PromptError        empty, too long, or with ids outside the vocabulary
    ├── DataError          training data, or a source of it, that is missing, malformed or empty
    ├── SamplingError      a sampling parameter outside its range
    ├── TreeError          a draft tree that is not one
    ├── NumericsError      NaN or infinity where a probability should be
    ├── BusyError          too many requests wait already; try again later
    ├── ClosedError        the decoding worker takes no more requests
    ├── SlotsError         KV slots that are used up, or rows and slots that do not add up
    └── DraftwingWarning   (a warning) work continues, but slower or differently than expected

Each message names the thing, says what was expected and what was found, and ends with the fix. All are
``ValueError`` too where a Python user would expect one.
"""

from __future__ import annotations

import reprlib

# Messages show only the beginning of a bad value: a prompt may be long, and a list deep.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxlevel = 4


def shown(value: object) -> str:
    """Return any value as a short text on one line, for a message."""
    try:
        text = " ".join(_SHORT.repr(value).split())
    except Exception:  # an int of thousands of digits, or a class whose repr fails
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def reason(error: BaseException) -> str:
    """Return an error's message on one line, or its class if it has none, such as EOFError."""
    return " ".join(str(error).split()) or type(error).__name__


class DraftwingError(Exception):
    """The root: catch this to catch everything below."""


class ConfigError(DraftwingError, ValueError):
    """A configuration that cannot mean anything."""


class UnsupportedError(ConfigError):
    """A configuration that is valid elsewhere but not here; the message says what to do instead."""


class CheckpointError(DraftwingError):
    """A folder or file of weights that is missing, truncated, foreign or of the wrong shapes."""


class TokenizerError(DraftwingError):
    """No tokenizer, or one whose ids do not mean what the target's mean."""


class PromptError(DraftwingError, ValueError):
    """An empty prompt, one longer than the context, or ids outside the vocabulary."""


class DataError(DraftwingError, ValueError):
    """Training data that is missing, malformed or empty, or a server of it that does not answer."""


class SamplingError(DraftwingError, ValueError):
    """A sampling parameter outside its range."""


class TreeError(DraftwingError, ValueError):
    """A draft tree that breaks the tree's invariants."""


class NumericsError(DraftwingError, ArithmeticError):
    """NaN or infinity in the target's logits."""


class BusyError(DraftwingError):
    """Too many requests wait already: the same one may be taken later."""


class ClosedError(DraftwingError):
    """The decoding worker takes no more requests: it is shutting down, or it failed."""


class SlotsError(DraftwingError):
    """KV slots that are used up, or whose account with rows and requests is wrong."""


class DraftwingWarning(UserWarning):
    """Work continues, but slower or differently than the caller may expect."""
