"""Float32 rows and bfloat16 weights on matrix tiles: which matrices split rows, and models that do."""

import pytest
import torch

from conftest import build
from draftwing.cpu.layout import RowForm
from draftwing.cpu.library import get_kernel
from draftwing.decode import Decoder
from draftwing.methods.base import Budget
from draftwing.methods.causal_lm import CausalLMDrafter
from draftwing.models.context import FeatureSpec
from draftwing.models.lean import LeanTarget
from draftwing.models.linear import Linear
from draftwing.models.weights import Stored
from draftwing.sampling import Sampling
from draftwing.tree import DraftTree

pytestmark = pytest.mark.skipif(get_kernel() is None, reason="no kernel here")
# --- which weights ----------------------------------------------------------------------------------------------------


def test_only_bfloat16_on_tiles_is_multiplied_so(tiles):
    for name, num_in, form in (
        ("bfloat16", 32, RowForm.SPLIT),
        ("bfloat16", 31, RowForm.AS_THEY_ARE),  # less than a step
        ("float16", 64, RowForm.AS_THEY_ARE),
        ("float32", 64, RowForm.AS_THEY_ARE),
    ):
        part = Stored(name, num_in, torch.randn(70, num_in).to(getattr(torch, name)))
        assert Linear.of_stored([part], None).packed[0].row_form == form, name
    rounded = Linear(torch.randn(70, 64))
    rounded.pack(rounds=True)
    assert rounded.packed[0].row_form == RowForm.ROUNDED


def test_without_tiles_rows_stay_as_they_are():
    kernel = get_kernel()
    before = kernel.has_tiles
    kernel.use_tiles(False)
    try:
        part = Stored("bfloat16", 64, torch.randn(70, 64).bfloat16())
        assert Linear.of_stored([part], None).packed[0].row_form == RowForm.AS_THEY_ARE
    finally:
        kernel.use_tiles(before)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a checkpoint in bfloat16."""
    folder = tmp_path_factory.mktemp("bfloat16")
    build("llama", hidden_size=64, head_dim=32, intermediate_size=80).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_a_tree_and_a_path_of_it_have_the_same_bits(folder, tiles):
    target = LeanTarget.from_folder(folder, torch.float32)
    assert {part.row_form for part in target.net.layers[0].qkv.packed} == {RowForm.SPLIT}
    ctx = target.new_context(FeatureSpec((1, 2)))
    target.prefill(ctx, [3, 8, 12, 5, 9, 30, 41])
    tokens, parents = [5, 9, 11, 9, 7, 6, 2], [-1, 0, 0, 1, 1, 2, 5]
    whole = target.forward(ctx, DraftTree.from_lists([tokens], [parents])).logits
    for path in ([0, 2, 5, 6], [0, 1, 4], [0]):
        alone = target.forward(ctx, DraftTree.from_lists([[tokens[n] for n in path]], [[*range(-1, len(path) - 1)]]))
        assert torch.equal(alone.logits[0], whole[0, path])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_with_drafts_are_those_without(folder, tiles, temperature):
    texts = []
    for drafted in (False, True):
        target = LeanTarget.from_folder(folder, torch.float32)
        drafter = CausalLMDrafter(LeanTarget.from_folder(folder, torch.float32), target.vocab_size) if drafted else None
        decoder, text = Decoder(target, drafter, "match", Budget(4, 3, 8)), {}
        for seed, prompt in enumerate(([4, 9, 30], [8])):
            sampling = Sampling(temperature=temperature, seed=seed, max_tokens=24, ignore_eos=True)
            text[decoder.admit(prompt, sampling)] = ()
        while decoder.num_running:
            for row in decoder.step().rows:
                text[row.request_id] += row.token_ids
        texts.append(list(text.values()))
    assert texts[0] == texts[1]
