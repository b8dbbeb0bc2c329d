"""Calibrations: which scale of log q guesses best under the target's noise, and which chances that gives."""

import pytest
import torch

from draftwing.errors import ConfigError
from draftwing.methods.calibration import Calibration
from draftwing.train.evaluate import fit_calibration

ROWS, VOCAB = 4000, 64


def planted(flatness, spread, seed=0):
    """Positions at which q is p's logits, made flatter and disturbed."""
    generator = torch.Generator().manual_seed(seed)
    p = 2.0 * torch.randn(ROWS, VOCAB, generator=generator)
    q = (flatness * p + spread * torch.randn(p.shape, generator=generator)).log_softmax(-1)
    noise = -(-torch.rand(p.shape, generator=generator).clamp(min=1e-30).log()).log()
    return q, noise, (p + noise).argmax(-1)


def fitted(flatness, spread):
    return fit_calibration(lambda: iter([planted(flatness, spread)]))


def test_a_net_that_is_right_is_left_as_it_is():
    found = fitted(1.0, 0.0)
    assert found.scale == 1
    assert found.miss == 0


def test_a_net_that_is_too_flat_is_sharpened():
    found = fitted(0.6, 0.0)
    assert found.scale in (1.5, 1.7)  # 1 / 0.6, or next to it


def test_a_gain_that_may_be_chance_changes_nothing():
    """One position of 200 is right with a larger scale alone."""
    log_q, noise = torch.tensor([[0.0, -10.0]]).repeat(200, 1), torch.zeros(200, 2)
    log_q[0, 1], noise[0, 1] = -1.0, 1.05
    drawn = torch.zeros(200, dtype=torch.int64)
    assert fit_calibration(lambda: iter([(log_q, noise, drawn)])).scale == 1


def test_more_first_guesses_come_true_with_the_scale():
    found = fitted(0.6, 0.4)
    q, noise, drawn = planted(0.6, 0.4, seed=1)  # other positions than it was fitted on

    def right(scale):
        return float(((scale * q + noise).argmax(-1) == drawn).float().mean())

    assert found.scale > 1
    assert right(found.scale) > 1.05 * right(1.0)


def test_chances_are_those_under_the_scale():
    found = fitted(0.6, 0.4)
    q, noise, drawn = planted(0.6, 0.4, seed=1)
    ranked = found.scale * q + noise
    tokens = ranked.topk(4, dim=-1).indices
    told = found.log_chance(ranked, tokens).exp()
    true = tokens == drawn[:, None]
    for rank in range(4):
        assert abs(float(told[:, rank].mean() - true[:, rank].float().mean())) < 0.03


def test_what_is_missed_is_left_over():
    """The chances of all compared tokens are those of a hit."""
    ranked, tokens = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.arange(4).expand(3, -1)
    chances = Calibration(sharpness=2.0, miss=0.25).log_chance(ranked, tokens).exp()
    torch.testing.assert_close(chances.sum(-1), torch.full((3,), 0.75))
    assert torch.equal(chances.argmax(-1), ranked.argmax(-1))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_is_a_number_above_zero(scale):
    with pytest.raises(ConfigError, match="a scale above 0"):
        Calibration(scale=scale)
