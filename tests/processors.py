"""What this machine can compute."""

from draftwing.cpu.library import get_kernel
from draftwing.models.linear import has_exact_int8


def can_int8() -> bool:
    """Whether a model runs in int8: by the CPU kernel on any processor, by PyTorch where its products are exact."""
    return get_kernel() is not None or has_exact_int8()
