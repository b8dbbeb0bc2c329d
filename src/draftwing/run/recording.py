"""Recording a function once and replaying it: CUDA graphs, or, without a GPU, the function itself run again.

A recording repeats the same kernels on the same memory. ``Record`` is the seam that tests and machines without graphs
put another recorder into; ``Recordings`` and ``Pool`` keep what was recorded with the slots that it was recorded over.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from draftwing.errors import DraftwingWarning
from draftwing.model.cache import KVCache

__all__ = ["CudaRecorder", "Outputs", "Pool", "Record", "Recorder", "Recording", "Recordings"]

WARM_UPS = 2  # runs before a capture: libraries set themselves up in the first, and may not while it is recorded
CAPACITY = 64  # recordings over one cache; the least recently used goes first

Outputs = tuple[Tensor, ...]
T = TypeVar("T")


class Record(Protocol):
    """Records a function without arguments, and gives back what replays it.

    The function may run any number of times while it is recorded: it must write the same whenever its inputs are the
    same. All replays return the same tensors, which each of them overwrites.
    """

    num_recorded: int

    def __call__(self, function: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """What replays ``function``."""
        ...


class Recorder:
    """Replays by running the function again: for tests, and for machines without graphs.

    It is as strict as a graph about outputs: every replay writes over those of the last.
    """

    def __init__(self) -> None:
        self.num_recorded = self.num_replays = 0

    def __call__(self, function: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """See ``Record``."""
        self.num_recorded += 1
        static = tuple(output.clone() for output in function())

        def replay() -> Outputs:
            self.num_replays += 1
            for kept, fresh in zip(static, function(), strict=True):
                kept.copy_(fresh)
            return static

        return replay


class CudaRecorder:
    """Records CUDA graphs on one device. They share a memory pool: one replay's outputs are gone at the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # PyTorch's handle of it
        self.num_recorded = 0

    def __call__(self, function: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """See ``Record``. A function that cannot be captured runs eagerly instead, and a warning says why."""
        self.num_recorded += 1
        with torch.cuda.device(self._device):
            stream, current = torch.cuda.Stream(self._device), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    function()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads may go on with CUDA calls of their own while this one captures.
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    outputs = function()
            except RuntimeError as error:
                warnings.warn(
                    f"a CUDA graph could not be captured, so this part of decoding runs kernel by kernel, slower and "
                    f"with the same result: {str(error).splitlines()[0]}",
                    DraftwingWarning,
                    stacklevel=2,
                )
                return function
            self._pool = self._pool or graph.pool()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay


class Recording:
    """A function over static inputs. It is recorded at its first run, when these hold something real.

    Made before, a recording would write keys and values of nothing into the slots of the first tokens.
    """

    def __init__(self, record: Record, function: Callable[[], Outputs]) -> None:
        self._record, self._function = record, function
        self._replay: Callable[[], Outputs] | None = None

    def run(self) -> Outputs:
        """The outputs for what the inputs hold now, good until the next run of anything of the same ``Record``."""
        if self._replay is None:
            self._replay = self._record(self._function)
        return self._replay()


class Recordings(Generic[T]):
    """What was recorded over one cache, by key; forgotten when its slots move, since a graph knows addresses alone."""

    def __init__(self, cache: KVCache) -> None:
        self._cache, self._data = cache, cache.data
        self._found: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The one for ``key``, made where there is none. Slots must be reserved before."""
        if self._cache.data is not self._data:
            self._found.clear()
            self._data = self._cache.data
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = make()
            if len(self._found) > CAPACITY:
                self._found.popitem(last=False)
        else:
            self._found.move_to_end(key)
        return found


class Pool(Generic[T]):
    """Things with slots, lent to one holder at a time: the next gets the graphs that the last one has recorded.

    Args:
        keep: how many may lie idle; more are let go, and their memory with them.
    """

    def __init__(self, keep: int = 1) -> None:
        self._free: list[T] = []
        self._keep = keep

    def lend(self, holder: object, make: Callable[[], T]) -> T:
        """One for as long as ``holder`` lives, which it must not refer to."""
        lent = self._free.pop() if self._free else make()
        weakref.finalize(holder, self._take_back, lent).atexit = False
        return lent

    def _take_back(self, lent: T) -> None:
        if len(self._free) < self._keep:
            self._free.append(lent)
