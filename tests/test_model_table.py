"""Every causal LM of transformers decodes exactly or is rejected, as docs/models.md says."""

import importlib
import sys
from pathlib import Path

import pytest
import transformers

sys.path.append(str(Path(__file__).parents[1] / "tools"))
script = importlib.import_module("model_table")
VERSION, DOCUMENTED = script.documented()


@pytest.mark.full
@pytest.mark.parametrize("model_type", script.MODEL_TYPES)
def test_a_model_of_every_type_decodes_exactly_or_is_rejected(model_type):
    row = script.examine(model_type)
    assert not row.failure
    if transformers.__version__ == VERSION:
        assert row.runs == DOCUMENTED[model_type]


def test_the_page_lists_every_model_type():
    if transformers.__version__ == VERSION:
        assert sorted(DOCUMENTED) == script.MODEL_TYPES
    assert list(DOCUMENTED.values()).count("native") >= 30


def test_the_table_is_read_as_it_is_written(tmp_path, monkeypatch):
    page = tmp_path / "models.md"
    page.write_text(f"before\n{script.BEGIN}\nold\n{script.END}\nafter")
    monkeypatch.setattr(script, "PAGE", page)
    rejected = script.Row("odd", "rejected", "odd: its own forward fails (KeyError: 'a (b)'): try another dtype")
    script.write([script.Row("llama", "native"), script.Row("gpt2", "trees"), script.Row("opt", "trees"), rejected])
    assert script.documented() == (
        transformers.__version__,
        {"llama": "native", "gpt2": "trees", "opt": "trees", "odd": "rejected"},
    )
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter")
    assert "| `odd` | its own forward fails |" in text
