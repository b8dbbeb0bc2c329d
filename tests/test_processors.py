"""The same exactness where PyTorch may use fewer of the processor's instructions, as on an older one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What goes through oneDNN: single matrices in every dtype, quantised models, and some texts of everything else.
CASES = "test_linear or test_quantised or (test_text_is_plain_decodings and ragged and (llama or kernel))"


@pytest.mark.full
@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_texts_are_exact_with_fewer_instructions(isa):
    tests = [f"tests/test_{name}.py" for name in ("linear", "quantised", "exact")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not full", "-k", CASES, *tests]
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
