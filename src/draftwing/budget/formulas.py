"""The papers' formulas: what speculation with chains is worth where all that counts is a chance and a ratio of times.

    alpha   chance that a drafted token is accepted            gamma   tokens drafted in a step
    c       time of a draft step / time of a target forward    tau     tokens emitted per target forward

Papers: Leviathan et al. 2211.17192 (alpha, gamma, c, operations, memory), MagicDec 2408.11049 (T_V). With measured
times: ``budget.costs``.
"""

from __future__ import annotations

from draftwing.errors import ConfigError

__all__ = [
    "best_gamma",
    "expected_tokens",
    "least_speedup",
    "memory_factor",
    "operations_factor",
    "pays",
    "predicted_speedup",
]


def _check(alpha: float, gamma: float = 0, c: float = 0.0) -> None:
    if not 0 <= alpha <= 1 or gamma < 0 or not c >= 0:
        raise ConfigError(
            f"the cost model needs alpha in [0, 1], gamma and c of at least 0, found {alpha}, {gamma} and {c}"
        )


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens per target forward with a chain of ``gamma``: (1 - alpha^(gamma + 1)) / (1 - alpha) (2211.17192, eq. 1).

    Raises:
        ConfigError: values that are no chance or number, here and below.
    """
    _check(alpha, gamma)
    return float(gamma + 1) if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def predicted_speedup(alpha: float, gamma: int, c: float, verify_ratio: float = 1.0) -> float:
    """Wall time of plain decoding over that with chains of ``gamma`` (2211.17192, theorem 3.8).

    Args:
        c: T_D / T_T.
        verify_ratio: T_V(gamma + 1) / T_T: 1 in the paper; MagicDec's form (2408.11049, eq. 1) has the measured one.
    """
    _check(alpha, gamma, c)
    return expected_tokens(alpha, gamma) / (gamma * c + verify_ratio)


def pays(alpha: float, c: float) -> bool:
    """Whether any gamma gives a gain where verification is free: alpha > c (2211.17192, corollary 3.9)."""
    _check(alpha, 0, c)
    return alpha > c


def least_speedup(alpha: float, c: float) -> float:
    """What is gained at least where it pays: (1 + alpha) / (1 + c), gamma being 1 (2211.17192, corollary 3.9)."""
    return predicted_speedup(alpha, 1, c)


def best_gamma(alpha: float, c: float, upto: int = 64) -> int:
    """The chain length of the greatest predicted speedup where verification is free; 0 where none gains."""
    _check(alpha, upto, c)
    if not pays(alpha, c):  # not left to the last bit of equal speedups
        return 0
    return max(range(upto + 1), key=lambda gamma: (predicted_speedup(alpha, gamma, c), -gamma))


def operations_factor(alpha: float, gamma: int, c_operations: float) -> float:
    """Arithmetic per token over plain decoding's (2211.17192, theorem 3.11).

    Args:
        c_operations: arithmetic of a draft step / of a target's token.
    """
    _check(alpha, gamma, c_operations)
    return (gamma * c_operations + gamma + 1) / expected_tokens(alpha, gamma)


def memory_factor(alpha: float, gamma: int) -> float:
    """Reads of the target's weights per token over plain decoding's: 1 / tau (2211.17192, section 3.4)."""
    return 1 / expected_tokens(alpha, gamma)
