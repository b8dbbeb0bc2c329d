"""The lean decoder against transformers: the same logits for trees, ragged rows and after commits."""

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from conftest import FURTHER, LEAN, build, float64_norms, kernel_size, refused
from draftwing.cpu.library import get_kernel
from draftwing.decode import Decoder
from draftwing.errors import CheckpointError, ConfigError
from draftwing.models.context import Context, FeatureSpec, TargetOutput
from draftwing.models.lean import LeanTarget, resized
from draftwing.sampling import Sampling
from draftwing.tree import PAD, Accepted, DraftTree

TREE = ([5, 9, 11, 9, 3, 7, 8], [-1, 0, 0, 1, 1, 2, 5])
PATHS = [[0, 1, 3], [0, 1, 4], [0, 2, 5, 6]]  # to each leaf
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
}


def reference(model, *texts):
    """transformers' own forward of texts of the same length."""
    with torch.no_grad():
        return model(torch.tensor(texts), output_hidden_states=True, use_cache=False)


def check_trees(model, target, prompts):
    """Ragged rows, a tree each, commit of different paths, and another tree on top of that."""
    taps = FeatureSpec((0, 2, target.num_layers))
    ctx = target.new_context(taps)
    prefilled = [target.prefill(ctx, prompt) for prompt in prompts]
    tokens = [[prompt[-1], *TREE[0][1:]] for prompt in prompts]
    tree = DraftTree.from_lists(tokens, [TREE[1]] * len(prompts))
    output = target.forward(ctx, tree)
    for row, prompt in enumerate(prompts):
        length = len(prompt) + 3  # shorter paths are continued with a token that none of their nodes looks at
        texts = ([*prompt[:-1], *(tokens[row][i] for i in path), 0, 0][:length] for path in PATHS)
        expected = reference(model, *texts)
        states = torch.cat([expected.hidden_states[i] for i in taps.taps], -1)
        assert torch.allclose(prefilled[row][0], states[0, : len(prompt) - 1], atol=1e-9, rtol=0)
        for place, path in enumerate(PATHS):
            nodes = slice(len(prompt) - 1, len(prompt) - 1 + len(path))
            assert torch.allclose(output.logits[row, path], expected.logits[place, nodes], atol=1e-10, rtol=0)
            assert torch.allclose(output.features[row, path], states[place, nodes], atol=1e-9, rtol=0)
    kept = [PATHS[2], PATHS[1], [0]][: len(prompts)]
    width = max(map(len, kept))
    accepted = Accepted(
        torch.tensor([[*path, *[-1] * (width - len(path))] for path in kept]),
        torch.tensor([len(path) - 1 for path in kept]),
        torch.tensor([13] * len(kept)),
    )
    target.commit(ctx, tree, accepted)
    for row, path in enumerate(kept):
        ctx.rows[row].tokens += [*(tokens[row][i] for i in path[1:]), 13]
        ctx.rows[row].length += len(path)
    target.remove(ctx, 0)
    second = target.forward(ctx, DraftTree.chain(torch.tensor([[13, 4, 6]] * ctx.num_rows)))
    for row, state in enumerate(ctx.rows):
        expected = reference(model, [*state.tokens[: state.length], 13, 4, 6]).logits[0, -3:]
        assert torch.allclose(second.logits[row], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", [*LEAN, *FURTHER])
def test_logits_of_every_family(family, folder_of):
    target = LeanTarget.from_folder(folder_of(family), torch.float64)
    check_trees(float64_norms(build(family)), target, [list(range(3, 23)), [4], [9, 9, 30, 31, 32]])


GEMMA_4 = {
    "all": {},
    "no inputs, nothing shared": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
    "values of their own": {"attention_k_eq_v": False, "num_global_key_value_heads": None, "attention_bias": True},
}


@pytest.mark.parametrize("changes", GEMMA_4.values(), ids=GEMMA_4)
def test_whole_texts_of_gemma_4(changes, folder_of):
    """In one causal forward, also by a draft model whose tokens have other ids."""
    target, ids = LeanTarget.from_folder(folder_of("gemma4", **changes), torch.float64), torch.arange(3, 43)[None]
    found, wanted = target.score(ids).logits, reference(float64_norms(build("gemma4", **changes)), ids[0].tolist())
    torch.testing.assert_close(found, wanted.logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(resized(target, 50).score(ids).logits, found[..., :50], rtol=0, atol=1e-10)
    rows = [*reversed(range(61)), -1]
    other = LeanTarget.from_folder(folder_of("gemma4", **changes), torch.float64, rows=rows).score(60 - ids).logits
    torch.testing.assert_close(other[..., :61], found.flip(-1), rtol=0, atol=1e-10)
    assert (other[..., 61] == -torch.inf).all()


def test_experts_in_blocks_of_4_bits(tmp_path):
    """gpt-oss as it is published: MXFP4, expanded as transformers does, and in the CPU kernel as it is stored."""
    model, generator = (
        build("gpt-oss", intermediate_size=64, **kernel_size("gpt-oss")),
        torch.Generator().manual_seed(0),
    )
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            parameter, where = getattr(layer.mlp.experts, name), f"model.layers.{index}.mlp.experts.{name}"
            experts, num_in, num_out = parameter.shape
            blocks = torch.randint(0, 256, (experts, num_out, num_in // 32, 16), generator=generator).byte()
            scales = torch.randint(123, 127, (experts, num_out, num_in // 32), generator=generator).byte()
            parameter.data = convert_moe_packed_tensors(blocks, scales).double()
            del tensors[where]
            tensors |= {f"{where}_blocks": blocks, f"{where}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    model.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    model.config.save_pretrained(tmp_path)
    target = LeanTarget.from_folder(tmp_path, torch.float64)
    ids = list(range(3, 30))
    wanted = reference(float64_norms(model), ids).logits
    torch.testing.assert_close(target.score(torch.tensor([ids])).logits, wanted, rtol=0, atol=1e-10)
    if get_kernel() is not None:
        target = LeanTarget.from_folder(tmp_path, torch.float32, arithmetic="float32")
        assert "MXFP4 weights in float32 arithmetic" in target.runs_as
        found = target.score(torch.tensor([ids])).logits.double()
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)
    damaged = "model.layers.1.mlp.experts.down_proj"
    tensors[f"{damaged}_scales"][2, 3, 0] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    for dtype in (torch.float64, torch.float32):
        with refused(CheckpointError, f"{damaged}_blocks"):
            LeanTarget.from_folder(tmp_path, dtype)


@pytest.mark.parametrize("rope", ROPES)
def test_every_rope(rope, folder_of):
    changes = {"rope_parameters": ROPES[rope]}
    target = LeanTarget.from_folder(folder_of("llama", **changes), torch.float64)
    check_trees(float64_norms(build("llama", **changes)), target, [list(range(3, 50)), [7, 8]])


@pytest.mark.parametrize(("rope", "room"), [("linear", 128), ("dynamic", 64), ("yarn", 256)])
def test_a_stretched_context_is_used_and_equals_generate(rope, room, folder_of):
    """Prompt and text lie beyond the length before stretching; dynamic angles then move with every token."""
    changes = {"rope_parameters": ROPES[rope], "max_position_embeddings": 32}
    target = LeanTarget.from_folder(folder_of("llama", **changes), torch.float64)
    assert target.max_length == room
    model = float64_norms(build("llama", **changes))
    prompt = list(range(3, 40))
    decoder = Decoder(target)
    decoder.admit(prompt, Sampling(max_tokens=12, ignore_eos=True))
    ours = []
    while decoder.num_running:
        ours += decoder.step().rows[0].token_ids
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :]
    assert ours == theirs.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_follows_float64(dtype, folder_of):
    exact = LeanTarget.from_folder(folder_of("qwen3", initializer_range=0.1), torch.float64)
    rough = LeanTarget.from_folder(folder_of("qwen3", initializer_range=0.1), dtype)
    tree = DraftTree.from_lists([[5, 9, 11, 9]], [[-1, 0, 0, 1]])
    logits = []
    for target in (exact, rough):
        ctx = target.new_context()
        target.prefill(ctx, [3, 8, 12, 5])
        logits.append(target.forward(ctx, tree).logits.double())
    scale = logits[0].abs().max()
    assert (logits[1] - logits[0]).abs().max() < 0.05 * scale
    assert (logits[1] - logits[0]).abs().max() > 0


def test_a_context_of_another_target_is_refused(folder_of):
    target = LeanTarget.from_folder(folder_of("llama"))
    foreign = Context(target.device)
    for call in (
        lambda: target.prefill(foreign, [1, 2]),
        lambda: target.forward(foreign, DraftTree.root(torch.tensor([1]))),
        lambda: target.remove(foreign, 0),
    ):
        with refused(ConfigError, "another class of target", "new_context()"):
            call()


@pytest.mark.parametrize("num_rows", [1, 2])
def test_features_are_those_of_the_kept_path(num_rows):
    """In its order, from trees; where they will not be there after the next forward, as a copy."""
    lines = DraftTree.chain(torch.tensor([[5, 6, 7, 8]] * num_rows))
    bushes = DraftTree.from_lists([[5, 6, 7, 8]] * num_rows, [[-1, 0, 0, 2]] * num_rows)
    logits, features = torch.zeros(num_rows, 4, 9), torch.arange(num_rows * 8.0).view(num_rows, 4, 2)
    for tree, path, is_kept in (
        *((lines, [0, 1, 2], each) for each in (True, False)),
        *((bushes, [0, 2, 3], each) for each in (True, False)),
    ):
        paths = torch.tensor([path, [0, path[1], PAD]][:num_rows])
        output = TargetOutput(logits, features.clone(), is_kept=is_kept)
        found = output.features_on(tree, paths)
        if not is_kept:
            output.features.zero_()  # the next forward
        for row, count in enumerate((3, 2)[:num_rows]):
            assert torch.equal(found[row, :count], features[row, paths[row, :count]])
    walked = TargetOutput(logits, features[:, :3], accepted=Accepted(paths, torch.tensor([2]), torch.tensor([1])))
    assert walked.features_on(bushes, paths) is walked.features  # the forward has put them in order itself
    assert TargetOutput(logits).features_on(bushes, paths) is None


def test_a_long_prompts_features_are_those_of_all_its_pieces(folder_of, monkeypatch):
    monkeypatch.setattr("draftwing.runtime.forward.PREFILL_CHUNK", 8)
    target, spec = LeanTarget.from_folder(folder_of("llama"), torch.float64), FeatureSpec((0, 2, 3))
    prompt = [5 + i % 40 for i in range(27)]
    features = target.prefill(target.new_context(spec), prompt)
    wanted = target.score(torch.tensor([prompt]), spec).features[:, :-1]
    torch.testing.assert_close(features, wanted, rtol=1e-9, atol=1e-9)


def test_a_text_may_go_on_for_a_while_before_its_slots_move(folder_of):
    target = LeanTarget.from_folder(folder_of("llama"), torch.float32)
    ctx = target.new_context()
    target.prefill(ctx, list(range(3, 40)))
    before = ctx.cache.data
    for _ in range(80):
        target.forward(ctx, ctx.roots())
        row = ctx.rows[0]
        row.tokens.append(5)
        row.length += 1
    assert ctx.cache.data is before
