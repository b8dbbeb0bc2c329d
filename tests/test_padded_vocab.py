"""A draft model with the target's tokenizer, whose matrices have more or fewer rows of padding."""

from __future__ import annotations

import pytest
import torch
import transformers

import draftwing as dw
from conftest import SMALL, add_tokenizer, refused
from draftwing.errors import TokenizerError
from draftwing.loading import load_drafter, load_target

ROWS = {"target": 320, "larger": 384, "smaller": 304}  # the tokenizer has 300 tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same model three times. Further rows of the larger head would win everywhere."""
    root = tmp_path_factory.mktemp("padded")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**{**SMALL, "vocab_size": 512})
    weights = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    weights["lm_head.weight"][300:320] *= 0.1
    weights["lm_head.weight"][320:] = 30 * weights["lm_head.weight"][200]
    for name, rows in ROWS.items():
        model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**{**SMALL, "vocab_size": rows}))
        is_end = ("lm_head.weight", "model.embed_tokens.weight")
        model.load_state_dict({key: value[:rows] if key in is_end else value for key, value in weights.items()})
        model.save_pretrained(root / name)
        add_tokenizer(root / name)
    return root


@pytest.mark.parametrize(("draft", "dtype", "temperature"), [("larger", "float32", 1.0), ("smaller", "float64", 0.0)])
def test_it_drafts_what_the_target_writes(folders, draft, dtype, temperature):
    prompt = [1, 70, 80, 310, 90]  # one token that the smaller one does not have
    settings = {"max_tokens": 28, "temperature": temperature, "seed": 3, "ignore_eos": True}
    expected = dw.load(folders / "target", draft="none", dtype=dtype).generate([prompt], **settings)[0].token_ids
    lm = dw.load(folders / "target", folders / draft, budget=dw.Budget(3, 2), dtype=dtype)
    result = lm.generate([prompt], **settings)[0]
    assert result.token_ids == expected
    # The same model: nearly all it drafts is right, unless it misreads the token that it lacks.
    assert result.stats.tau > (3 if draft == "larger" else 1.5)


def test_without_tokenizers_only_sizes_tell_them_apart(folders):
    target = load_target(folders / "target")
    with refused(TokenizerError, "vocabulary of 384, the target 320"):
        load_drafter(str(folders / "larger"), target, None)()
