"""Handing heads to vLLM: both sides are alike, and what chance explains is no failure. vLLM itself is not run here."""

import importlib.util
import sys
from pathlib import Path

import pytest

from draftwing.methods.net_drafter import EagleDrafter
from draftwing.shipped import TOY

FILE = Path(__file__).parents[1] / "benchmarks" / "vllm_handover.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("vllm_handover", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def handover(script, ours, drafts=(900, 905), vllm=(0.363, 0.196, 0.125), same=6):
    return script.Handover("eagle3", "head", 6, 6, same, drafts, list(vllm), list(ours))


def test_what_chance_explains_is_no_failure(script):
    """A head's figures on vLLM 0.32: ours in float32, and in 8 bits."""
    assert handover(script, (0.360, 0.199, 0.124)).passed
    found = handover(script, (0.386, 0.209, 0.120))
    assert found.tolerances == pytest.approx([0.0446, 0.0371, 0.0303], abs=2e-4)
    assert found.differences == pytest.approx([0.023, 0.013, 0.005])
    assert found.passed
    # With more drafts the same difference means something, and so does a larger one with as many.
    assert not handover(script, (0.386, 0.209, 0.120), drafts=(9000, 9050)).passed
    assert not handover(script, (0.300, 0.199, 0.124)).passed
    assert not handover(script, (0.360, 0.199, 0.124), same=5).passed
    assert handover(script, (0.0, 0.0, 0.0), vllm=(0.0, 0.0, 0.0)).passed


def test_both_sides_draft_in_float32(script):
    ours = script.load_ours(None, str(TOY / "eagle3"), 3)
    fast = script.load_ours(None, str(TOY / "eagle3"), 3, "fast")
    assert isinstance(ours.new_drafter(), EagleDrafter)
    assert "int8" not in ours.drafter.runs_as
    # Where 8-bit drafts are faster they are what users get, and other guesses.
    text = ours.generate("def add(", max_tokens=24, ignore_eos=True)[0]
    again = fast.generate("def add(", max_tokens=24, ignore_eos=True)[0]
    assert text.token_ids == again.token_ids
    assert str(ours.budget) == str(fast.budget) == "chain:3"
    draft = script.load_ours(None, str(TOY / "draft"), 2)
    assert draft.drafter_name.startswith("causal-lm")
    assert "int8" not in draft.drafter.runs_as
    assert draft.generate("def add(", max_tokens=24, ignore_eos=True)[0].token_ids == text.token_ids
