"""What this machine can compute."""

from draftwing.model.int8 import has_exact_int8
from draftwing.run.kernel.library import get_kernel


def can_int8() -> bool:
    """Whether a model runs in int8: by the CPU kernel on any processor, by PyTorch where its products are exact."""
    return get_kernel() is not None or has_exact_int8()
