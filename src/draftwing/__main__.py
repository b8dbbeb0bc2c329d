"""The command line: ``draftwing`` and ``python -m draftwing``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback also while its modules are imported."""
    try:
        from draftwing.cli.interrupts import keep_interrupts

        keep_interrupts()
        from draftwing.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
