"""What every draft net is: a module that is trained as it stands, and run by whatever its weights were laid out for.

A net of one's own is a subclass that says its ``shape`` and ``forward``; see ``docs/extending.md``.

Shape suffixes: R rows (any entries of any sequences), H hidden, F features (all taps together), V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from draftwing.errors import CheckpointError
from draftwing.model.attention import Attend
from draftwing.model.embedding import Embedding
from draftwing.model.int8 import has_exact_int8
from draftwing.model.layers import GatedMLP
from draftwing.model.linear import Layout, Linear
from draftwing.model.rope import Rotary
from draftwing.model.rope_config import RopeConfig
from draftwing.nets.calibration import Calibration
from draftwing.run.choose import Needs, runtime_for
from draftwing.run.eager import TorchRuntime
from draftwing.run.forward import NetShape, Runtime

__all__ = ["DraftNet", "NetConfig", "Scored", "Text"]


class NetConfig(Protocol):
    """What is asked of every net's config, a frozen dataclass.

    Attributes:
        taps: the target's hidden states that are read, counted as transformers' ``hidden_states``.
        vocab_size: of the target.
        hidden_size: of a state.
        rope: the rotation of its positions.
        calibration: how its scores become chances at T > 0.
    """

    @property
    def taps(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def rope(self) -> RopeConfig: ...  # noqa: D102
    @property
    def calibration(self) -> Calibration: ...  # noqa: D102


class Text(Protocol):
    """Tokens of a text: what a batch of the training data is."""

    @property
    def ids(self) -> Tensor:
        """(B, T)."""
        ...

    @property
    def real(self) -> Tensor:
        """(B, T) bool: which are no padding."""
        ...


class Scored(Protocol):
    """A text with what the target thinks of it: what a new net may be solved on before it is trained."""

    @property
    def batch(self) -> Text:
        """The text."""
        ...

    @property
    def features(self) -> Tensor:
        """(B, T, F) the taps that the net reads."""
        ...

    @property
    def last(self) -> Tensor:
        """(B, T, H) what the target's LM head reads."""
        ...


class DraftNet(nn.Module, ABC):
    """A net that reads the target's features and drafts: a ``run.forward.Net``.

    Args:
        config: what it is.
        embedding: (V, H) the target's rows, or a table of them, frozen and never saved with the net.
        target_head: the target's LM head, frozen, for nets that have none of their own (``head``).
        target_ids: (V_draft,) ascending target ids of the draft vocabulary; None for the whole vocabulary.
        dtype: of the matrices that ``new_matrix`` makes.

    Attributes:
        kind: the name under which ``drafters.kinds`` knows such nets.
        head: its own LM head, or None; a net with one sets it after ``super().__init__``.
        runs: what makes its runners; chosen by ``prepack``.
    """

    kind: str = ""
    embedding: Embedding
    target_ids: Tensor | None
    head: Linear | None

    def __init__(
        self,
        config: Any,
        embedding: Tensor | Embedding,
        target_head: Linear | None = None,
        target_ids: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config, self.head, self._new_dtype = config, None, dtype
        self.embedding = embedding.view() if isinstance(embedding, Embedding) else Embedding(embedding)
        self.register_buffer("target_ids", target_ids, persistent=False)
        # Kept in a list, so that the target's head is no parameter of this module.
        self._target_head = [] if target_head is None else [target_head]
        self.runs = cast(Runtime, TorchRuntime())
        self._rotary: tuple[tuple[torch.dtype, torch.device], Rotary] | None = None

    def new_matrix(self, num_out: int, num_in: int, *, bias: bool = False) -> Linear:
        """A new matrix of small random numbers, to be trained; a bias starts at zero."""
        place: dict[str, Any] = {"dtype": self._new_dtype, "device": self.embedding.device}
        weight = torch.empty(num_out, num_in, **place).normal_(0, num_in**-0.5)
        zeros = torch.zeros(num_out, requires_grad=True, **place) if bias else None
        return Linear(weight.requires_grad_(), zeros)

    # --- what it computes ------------------------------------------------------------------------------------------

    @property
    def shape(self) -> NetShape:
        """See ``run.forward.Net``: as it stands, that of a net without attention.

        It reads its taps side by side, each as wide as its states. A net with attention says its layers and heads.
        """
        width = self.config.hidden_size
        return NetShape(
            num_layers=0,
            num_heads=0,
            num_kv_heads=0,
            head_dim=0,
            windows=(),
            vocab_size=self.config.vocab_size,
            feature_width=width * len(self.config.taps),
            state_width=width,
            out_width=width,
            is_sparse=self.target_ids is not None,
        )

    def fuse(self, features: Any) -> Any:
        """The target's features (R, F) as the states (R, H) of entries: the same, where there is one tap."""
        return features

    @abstractmethod
    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """One draft step of any number of entries.

        Args:
            ids: (R,) the token of each entry.
            states: (R, H) from ``fuse``, or what an earlier step fed back.
            attend: mixes each entry with those that it sees; called once for each layer that ``shape`` names.

        Returns:
            (R, H) what ``logits`` reads, and (R, H) the states to feed back.
        """

    def logits(self, read: Any) -> Any:
        """(R, H) -> (R, V) of the target's tokens: those outside the draft vocabulary get -inf."""
        head = self.read_head
        return head.spread(read.to(head.dtype), self.target_ids, self.config.vocab_size)

    def draft_logits(self, read: Tensor) -> Tensor:
        """(R, H) -> (R, V_draft) in the draft vocabulary."""
        head = self.read_head
        found: Tensor = head.forward(read.to(head.dtype))
        return found

    @property
    def read_head(self) -> Linear:
        """The LM head that ``logits`` uses: its own, or the target's."""
        return self._target_head[0] if self.head is None else self.head

    @property
    def num_draft_tokens(self) -> int:
        """V_draft."""
        return self.config.vocab_size if self.target_ids is None else len(self.target_ids)

    @property
    def head_weight(self) -> Tensor:
        """(V_draft, H) of the head that ``logits`` uses."""
        return self.read_head.weight

    # --- how it is run ---------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights and states, which may be wider than the target's."""
        return next(module.dtype for module in self.modules() if isinstance(module, Linear))

    @property
    def device(self) -> torch.device:
        """Of its weights."""
        return self.embedding.device

    @property
    def rotary(self) -> Rotary:
        """The rotation of its positions."""
        key = self.dtype, self.device
        if self._rotary is None or self._rotary[0] != key:  # the net was moved
            self._rotary = key, Rotary(self.config.rope, *key)
        return self._rotary[1]

    @property
    def is_traceable(self) -> bool:
        """Whether ``forward`` uses nothing but what can be traced for the CPU kernel (``model.layers``)."""
        return True

    def run_by(self, runtime: Runtime) -> DraftNet:
        """Let ``runtime`` make its runners: the target's own, whose recordings then share memory with its drafts'."""
        if self.runs.name == "torch" == runtime.name:
            self.runs = runtime
        return self

    def prepack(self, quantize: str | None = None, *, fast: bool = False) -> Any:
        """Choose what runs it and lay the matrices out for that, quantised where ``quantize`` says so (see ``Linear``).

        ``fast`` takes 8 bits too where the CPU kernel makes drafting faster by them: it changes what is guessed a
        little, and the target's text not at all.

        The net cannot be trained or saved after it.
        """
        self.requires_grad_(False)
        mlps = [module for module in self.modules() if isinstance(module, GatedMLP)]
        activation, head_dim = mlps[0].activation_name if mlps else "silu", self.shape.head_dim
        needs = Needs(self.dtype, self.device, head_dim, activation, self.is_traceable)
        runtime, layout = runtime_for(needs, quantize=quantize, fast=fast)
        if runtime.name == "kernel" and self._target_head:
            head = self._target_head[0].for_drafts(layout.quantize)
            if head is None:  # it was laid out for PyTorch: then this net runs there too
                runtime, layout = TorchRuntime(), Layout("torch", self._target_head[0].quantized)
            else:
                self._target_head = [head]
        if layout.runs != "kernel" and not has_exact_int8():
            layout = replace(layout, quantize=None)  # AVX2 alone: a guess need not be in 8 bits because the target is
        gates = [mlp.gate_up for mlp in mlps]
        self.embedding.lay_out(layout)
        for module in self.modules():
            if isinstance(module, Linear):
                module.lay_out(layout, gated=any(module is gate for gate in gates))
        self.runs = runtime
        return self

    # --- its tensors -----------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Copies of its tensors, by the names that a head's file gives them."""
        return {name: tensor.detach().clone() for name, tensor in self.named_parameters()}

    def load_tensors(self, tensors: Mapping[str, Tensor], where: str = "the head") -> Any:
        """Take tensors named as in ``tensors``; all of them, and no others.

        Raises:
            CheckpointError: a name is missing, unknown, or has another shape.
        """
        own = dict(self.named_parameters())
        odd = sorted(own.keys() ^ tensors.keys())
        if odd:
            what = "lacks" if odd[0] in own else "has a tensor that no such net has:"
            raise CheckpointError(f"{where} {what} {odd[0]!r}: its config.json and its weights do not belong together")
        for name, parameter in own.items():
            if parameter.shape != tensors[name].shape:
                raise CheckpointError(
                    f"{where}: {name} has shape {tuple(tensors[name].shape)}, expected {tuple(parameter.shape)}: was "
                    f"it trained for another target?"
                )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(tensors[name])
        return self
