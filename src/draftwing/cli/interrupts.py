"""Keep Ctrl-C from being lost where its KeyboardInterrupt is discarded.

Python only reports exceptions of weakref callbacks, ``__del__`` and generators that are being closed, and PyTorch's C
code ignores them while it imports numpy, which then stays half imported.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_DELAY_S = 0.05  # the callback must have returned, or the second interrupt would be discarded as the first was


def keep_interrupts() -> None:
    """Raise discarded interrupts again, and import numpy before torch in this process."""
    report = sys.unraisablehook

    def handle(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            report(unraisable)
            return
        timer = threading.Timer(_DELAY_S, _interrupt_main_thread)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = handle
    sys.meta_path.insert(0, _NumpyBeforeTorch())


def _interrupt_main_thread() -> None:
    if sys.platform == "win32":
        signal.raise_signal(signal.SIGINT)
    else:  # also wakes it if it waits
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


class _NumpyBeforeTorch(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torch":
            importlib.import_module("numpy")
        return None
