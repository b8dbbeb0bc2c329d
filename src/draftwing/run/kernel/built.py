"""A net as a program of the CPU kernel: traced once, whatever runs it how often.

Shape suffixes: R rows, H hidden, F features, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftwing.run.forward import Net
from draftwing.run.kernel.library import Kernel
from draftwing.run.kernel.program import Program, TracedAttention, TracedIds

__all__ = ["Built"]


@dataclass(frozen=True)
class Built:
    """A net's program, and where its values lie.

    Attributes:
        num_fuse: operations in front, which turn ``features`` into ``states``; none where these are the same.
        num_hidden: operations before those that turn ``read`` into ``logits``.
        out: what the net gives out beside the logits; -1 for nothing. So are ``features`` and ``states``.
    """

    program: Program
    num_fuse: int
    num_hidden: int
    features: int
    states: int
    read: int
    out: int
    logits: int

    @classmethod
    def of(cls, net: Net, kernel: Kernel) -> Built:
        """Trace ``net``."""
        program = Program(kernel)
        shape = net.shape
        brought = program.given(shape.feature_width) if shape.feature_width else None
        states = fused = None if brought is None else net.fuse(brought)
        if fused is not None and fused is not brought:
            states = program.given(shape.state_width)
            fused.write(states.buffer)
        num_fuse = len(program)
        read, out = net.forward(TracedIds(program), states, TracedAttention(shape.windows))
        written = -1 if out is None else program.output(out)
        num_hidden = len(program)
        logits = program.output(net.logits(read))
        program.finish()
        place = program.place
        return cls(
            program, num_fuse, num_hidden,
            features=-1 if brought is None else place(brought.buffer),
            states=-1 if states is None else place(states.buffer),
            read=place(read.buffer), out=-1 if out is None else place(written), logits=place(logits),
        )  # fmt: skip
