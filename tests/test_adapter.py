"""Models of transformers as a target: trees, features and commits, and models that do not support trees."""

import gc
import inspect
import sys
import warnings
from dataclasses import replace

import pytest
import torch
import transformers

from conftest import FAMILIES, SMALL, add_tokenizer, refused
from draftwing.decode import Decoder
from draftwing.errors import CheckpointError, DraftwingWarning, TokenizerError, UnsupportedError
from draftwing.loading import load_target
from draftwing.methods.base import Budget, NoDrafter
from draftwing.methods.lookup import LookupDrafter
from draftwing.models.adapter import AdapterTarget
from draftwing.models.context import FeatureSpec
from draftwing.models.lean import LeanTarget
from draftwing.sampling import Sampling
from draftwing.text.tokenizer import Tokenizer
from draftwing.tree import Accepted, DraftTree
from known_texts import Knows

VOCAB = SMALL["vocab_size"]
# The windows are shorter than the prompts, and not all layers have one.
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
ATTENTION = {
    "gpt2": FAMILIES["gpt2"],
    "gemma2": ("Gemma2Config", {**FAMILIES["gemma2"][1], "layer_types": MIXED}),
    "gpt-neox": ("GPTNeoXConfig", {}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "falcon": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    "smollm3": ("SmolLM3Config", {}),
    "cohere2": ("Cohere2Config", {"sliding_window": 6, "layer_types": MIXED, "logit_scale": 1.0}),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 4, "head_dim": 8, "sliding_window": 6, "layer_types": MIXED}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 6}),
}
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 4, "num_experts": 2}
LINEAR = {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
LINEAR |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "layer_types": HYBRID, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {"shared_expert_intermediate_size": 16}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
GRANITE = {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4, "shared_intermediate_size": 16}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 4, "head_dim": 8}
NEMOTRON |= {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}
ZAMBA2 = {"mamba_d_state": 4, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1}
ZAMBA2 |= {"layers_block_type": ["mamba", "hybrid", "mamba"]}
CONVOLVED = {"layer_types": ["conv", "full_attention", "conv"]}
RECURRENT = {
    "mamba2": ("Mamba2Config", {"head_dim": 8, "num_heads": 8, "n_groups": 1, "state_size": 8}),
    "qwen3.5": ("Qwen3_5TextConfig", LINEAR),
    "lfm2": ("Lfm2Config", CONVOLVED),
    "nemotron-h": ("NemotronHConfig", NEMOTRON),
    # Further ones, whose caches are like those above, or which other tests decode.
    "qwen3-next": ("Qwen3NextConfig", {**LINEAR, **EXPERTS, **SHARED}),
    "granite-4h": ("GraniteMoeHybridConfig", {**MAMBA2, **GRANITE}),
    "falcon-h1": ("FalconH1Config", {**MAMBA2, "mamba_d_ssm": 64, "head_dim": 8}),
    "mamba": ("MambaConfig", {"state_size": 4}),
    "rwkv": ("RwkvConfig", {"attention_hidden_size": 32, "context_length": 256}),
    "jamba": ("JambaConfig", {**JAMBA, "use_mamba_kernels": False, "mamba_d_state": 4}),
    "bamba": ("BambaConfig", {**MAMBA2, "attn_layer_indices": [1]}),
    "falcon-mamba": ("FalconMambaConfig", {"state_size": 4}),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**LINEAR, **EXPERTS, **SHARED}),
    "lfm2-moe": ("Lfm2MoeConfig", {**CONVOLVED, **EXPERTS}),
    "olmo-hybrid": ("OlmoHybridConfig", LINEAR),
    "minimax": ("MiniMaxConfig", {"num_local_experts": 2, "head_dim": 8, "layer_types": HYBRID, "block_size": 4}),
    "zamba2": ("Zamba2Config", ZAMBA2),
}
RARE = list(RECURRENT)[4:]
# Attention models without trees, whose cache can be cropped: distances counted in slots, windows of other names, and
# decoders that share their code with an encoder.
GLOBAL = [[["global", "local", "global"], 1]]
HALF = {"d_model": 32, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_layers": 1}
HALF |= {"encoder_attention_heads": 4, "encoder_ffn_dim": 48, "is_decoder": True, "is_encoder_decoder": False}
ODD = {
    "mpt": ("MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 3}),
    "bloom": ("BloomConfig", {"n_head": 4, "n_layer": 3}),
    "gpt-neo": ("GPTNeoConfig", {"num_layers": 3, "num_heads": 4, "attention_types": GLOBAL, "window_size": 6}),
    "llama4": (
        "Llama4TextConfig",
        {"num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8, "attention_chunk_size": 8},
    ),
    "falcon-alibi": ("FalconConfig", {"alibi": True, "new_decoder_architecture": False}),
    "roformer": ("RoFormerConfig", {"is_decoder": True, "embedding_size": 32}),
    "rembert": ("RemBertConfig", {"is_decoder": True, "input_embedding_size": 32, "output_embedding_size": 32}),
    "megatron-bert": ("MegatronBertConfig", {"is_decoder": True}),
    "Bart": ("BartConfig", dict(HALF)),
}
LIKE_BART = ("Marian", "MBart", "PLBart", "TrOCR", "Mvp", "Pegasus", "Blenderbot")  # which are copies of its code
ODD |= {name: (f"{name}Config", dict(HALF)) for name in LIKE_BART}
TREE = ([5, 9, 11, 9, 3, 7, 8], [-1, 0, 0, 1, 1, 2, 5])
PATHS = [[0, 1, 3], [0, 1, 4], [0, 2, 5, 6]]  # to each leaf
PROMPTS = [list(range(3, 23)), [4], [9, 9, 30, 31, 32]]


def make(name, dtype=torch.float64):
    """A tiny random model whose norms and biases are not just ones and zeros."""
    kind, extra = {**ATTENTION, **RECURRENT, **ODD}[name]
    config = getattr(transformers, kind)(**{**SMALL, **extra})
    config._experts_implementation = "eager"  # the grouped kernel knows no float64
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                weight.add_(0.1 * torch.randn_like(weight))
    return model


def reference(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)


def check_nodes(model, output, before, taps, row=0, **close):
    """The logits and features of every node of ``TREE`` are those of its path after these tokens."""
    for path in PATHS:
        whole = reference(model, [*before, *(TREE[0][i] for i in path[1:])])
        own = slice(len(before) - 1, None)
        assert torch.allclose(output.logits[row, path], whole.logits[0, own], **close)
        hidden = torch.cat([whole.hidden_states[i][0, own] for i in taps.taps], -1)
        assert torch.allclose(output.features[row, path], hidden, **close)


def greedy(model, prompt, count):
    """transformers' own decoding."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return made[0, len(prompt) :].tolist()


def decode(target, prompts, drafter=None, budget=None, **options):
    decoder, texts = Decoder(target, drafter, budget=budget), {}
    sampling = Sampling(**{"max_tokens": 12, "ignore_eos": True, "seed": 0, **options})
    for prompt in prompts:
        texts[decoder.admit(prompt, sampling)] = ()
    while decoder.num_running:
        for row in decoder.step().rows:
            texts[row.request_id] += row.token_ids
    return [list(text) for text in texts.values()]


# --- trees -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float64) for name in ATTENTION), ("gpt2", torch.float32), ("gemma2", torch.float32)],
)
def test_logits_and_features(name, dtype):
    """Ragged rows with a tree each, then a commit of different paths, then the removal of a row."""
    model = make(name, dtype)
    target = AdapterTarget(model)
    # Some of these compute in float32 here and there, whatever the model's dtype.
    close = {"atol": 1e-5 if dtype == torch.float64 else 1e-3, "rtol": 0}
    assert target.supports_trees
    assert (target.vocab_size, target.num_layers, target.hidden_size) == (VOCAB, 3, 32)
    assert (target.max_length, target.dtype, target.eos_ids) == (256, dtype, (2,))
    taps = FeatureSpec((0, 2, 3))
    ctx = target.new_context(taps)
    for prompt in PROMPTS:
        features = target.prefill(ctx, prompt)
        assert features.shape == (1, len(prompt) - 1, 3 * 32)
        if len(prompt) > 1:
            hidden = reference(model, prompt[:-1]).hidden_states
            assert torch.allclose(features, torch.cat([hidden[i] for i in taps.taps], -1), **close)
    tokens = [[prompt[-1], *TREE[0][1:]] for prompt in PROMPTS]
    tree = DraftTree.from_lists(tokens, [TREE[1]] * 3)
    for _ in range(2):  # a step that failed after its forward is taken back by the next one's
        output = target.forward(ctx, tree)
    for row, prompt in enumerate(PROMPTS):
        check_nodes(model, output, prompt, taps, row, **close)
    kept = [PATHS[2], PATHS[1], [0]]
    path = torch.tensor([[*path, *[-1] * (4 - len(path))] for path in kept])
    accepted = Accepted(path, (path >= 0).sum(1) - 1, torch.tensor([13, 13, 13]))
    target.commit(ctx, tree, accepted)
    for row, nodes in zip(ctx.rows, kept, strict=True):
        row.tokens += [*(TREE[0][i] for i in nodes[1:]), 13]
        row.length += len(nodes)
    target.remove(ctx, 0)
    second = target.forward(ctx, DraftTree.chain(torch.tensor([[13, 4, 6], [13, 6, -1]])))
    for row, drafted in enumerate([[4, 6], [6]]):
        state = ctx.rows[row]
        expected = reference(model, [*state.tokens[: state.length], 13, *drafted])
        nodes = slice(-len(drafted) - 1, None)
        assert torch.allclose(second.logits[row, : len(drafted) + 1], expected.logits[0, nodes], **close)
        wanted = torch.cat([expected.hidden_states[i][0, nodes] for i in taps.taps], -1)
        assert torch.allclose(second.features[row, : len(drafted) + 1], wanted, **close)


@pytest.mark.parametrize(("name", "temperature"), [("gpt2", 1.0), ("gemma2", 0.0), ("cohere2", 1.0)])
def test_drafts_change_nothing(name, temperature):
    model = make(name)
    target = AdapterTarget(model)
    plain = decode(target, PROMPTS, temperature=temperature)
    assert decode(target, PROMPTS, LookupDrafter(VOCAB, 1), Budget(4), temperature=temperature) == plain
    if temperature == 0:
        assert plain == [greedy(model, prompt, 12) for prompt in PROMPTS]


def test_half_precision_tells_right_from_wrong():
    for dtype in (torch.bfloat16, torch.float16):
        assert AdapterTarget(make("gemma2", dtype)).supports_trees
        broken = make("mpt", dtype)
        forget_when_several(broken, 1)
        assert AdapterTarget(broken).runs_nodes_alone


def test_a_window_in_the_config_that_the_layers_ignore():
    """Few tokens would not show that a mask with the window is wrong, so paths are run without."""
    model = make("gpt-neox")
    model.config.sliding_window = 128
    target = AdapterTarget(model, "odd")
    assert model.config.sliding_window == 128
    long = [[5, 9, 11] * 45]
    found = decode(target, long, LookupDrafter(VOCAB, 1), Budget(4), temperature=0.0)
    assert found == [plain_greedy(model, long[0], 12)]


# --- paths -----------------------------------------------------------------------------------------------------------


def plain_greedy(model, prompt, count):
    """The best token after each forward of the whole text: some generation configs force tokens."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(reference(model, ids).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in LIKE_BART else ()) for name in ODD]
)
def test_cropped_caches_draft_path_by_path(name):
    model = make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DraftwingWarning)  # it drafts
        target = AdapterTarget(model)
    assert target.runs_paths
    prompts = [[5, 9, 5, 9, 5, 9, 11, 5, 9], [4], [9, 9, 30, 31, 9, 9]]
    expected = [plain_greedy(model, prompt, 8) for prompt in prompts]
    drafter = LookupDrafter(VOCAB, 1)
    assert decode(target, prompts, drafter, Budget(4, 3, 9), temperature=0.0, max_tokens=8) == expected
    sampled = decode(target, prompts, temperature=1.0, max_tokens=8)
    assert decode(target, prompts, LookupDrafter(VOCAB, 1), Budget(4), temperature=1.0, max_tokens=8) == sampled
    taps = FeatureSpec((1, 3))
    ctx = target.new_context(taps)
    target.prefill(ctx, prompts[0])
    output = target.forward(ctx, DraftTree.from_lists([[9, *TREE[0][1:]]], [TREE[1]]))
    check_nodes(model, output, prompts[0], taps, atol=1e-4)


def forget_when_several(model, length):
    """Several tokens after ``length`` cached ones, or as many as that setting says, are misread; trees do not run."""
    real = model.forward

    def forward(input_ids=None, attention_mask=None, **options):
        if attention_mask is not None and attention_mask.ndim == 4:
            raise ValueError("no tree mask")
        cache = options.get("past_key_values", options.get("cache"))
        limit = length if isinstance(length, int) else getattr(model.config, length)
        if cache is not None and input_ids.shape[1] > 1 and cache.get_seq_length() >= limit:
            input_ids = (input_ids + 1) % VOCAB
        return real(input_ids=input_ids, attention_mask=attention_mask, **options)

    model.forward = forward


@pytest.mark.parametrize(
    ("name", "window", "length"),
    [
        ("gpt-neox", 20, 20),  # the layers do not read it
        ("gpt-neox", 1 << 7, 100),
        ("llama4", 250, "attention_chunk_size"),  # longer than a text that could cross it
    ],
)
def test_paths_that_are_wrong_beyond_a_window_are_found(name, window, length):
    model = make(name)
    setattr(model.config, "attention_chunk_size" if name == "llama4" else "window_size", window)
    forget_when_several(model, length)
    target = AdapterTarget(model)
    assert target.runs_nodes_alone
    expected = [plain_greedy(model, PROMPTS[0], 12)]
    assert decode(target, PROMPTS[:1], Knows([PROMPTS[0] + expected[0]], 5, 4), temperature=0.0) == expected


# --- node by node ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in RARE else ()) for name in RECURRENT]
)
def test_recurrent_models_draft_node_by_node(name):
    """Trees and chains have the bits of decoding token by token."""
    model = make(name, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DraftwingWarning)  # it drafts
        target = AdapterTarget(model)
    assert target.runs_nodes_alone
    prompts = PROMPTS[:2]
    plain = decode(target, prompts, max_tokens=6)
    if name not in ("nemotron-h", "zamba2"):  # whose own steps differ from their forward over a whole text
        assert plain[1] == greedy(model, prompts[1], 6)
    sampled = decode(target, prompts, temperature=1.0, max_tokens=6)
    for texts, temperature in ((plain, 0.0), (sampled, 1.0)):
        drafter = Knows([[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)], 5, 4)
        assert decode(target, prompts, drafter, temperature=temperature, max_tokens=6) == texts


def test_features_of_a_walked_tree():
    target, taps = AdapterTarget(make("lfm2", torch.float32)), FeatureSpec((1, 3))
    ctx = target.new_context(taps)
    target.prefill(ctx, PROMPTS[0])
    tree = target.forward(ctx, DraftTree.from_lists([[PROMPTS[0][-1], *TREE[0][1:]]], [TREE[1]]))
    for path in PATHS:
        alone = target.new_context(taps)
        target.prefill(alone, PROMPTS[0])
        row = alone.rows[0]
        for node, follows in zip(path, [*path[1:], 0], strict=True):
            output = target.forward(alone, alone.roots())
            assert torch.equal(tree.logits[:, node], output.logits[:, 0])
            assert torch.equal(tree.features[:, node], output.features[:, 0])
            row.tokens.append(TREE[0][follows])
            row.length += 1


def test_the_states_of_a_tree_grow_with_its_depth():
    """A tree of 60 nodes takes no more than twice the memory of a chain as deep as it."""
    kind, settings = RECURRENT["qwen3.5"]
    config = getattr(transformers, kind)(
        **{**SMALL, **settings, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    )
    target, sizes = AdapterTarget(transformers.AutoModelForCausalLM.from_config(config).eval()), []
    for parents in ([-1, *range(7)], [-1, *(i // 9 * 9 for i in range(60))]):
        ctx, alive = target.new_context(), []
        target.prefill(ctx, PROMPTS[0])
        gc.collect()  # tensors of earlier tests must not be freed between two counts

        def count(*_, alive=alive):
            if len(alive) < 12:  # the deepest path comes first
                tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype == torch.float32]
                storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
                alive.append(sum(storages.values()))

        count()
        hook = target.model.register_forward_pre_hook(count)
        target.forward(ctx, DraftTree.from_lists([[PROMPTS[0][-1], *[5] * (len(parents) - 1)]], [parents]))
        hook.remove()
        sizes.append(max(alive) - alive[0])
    assert sizes[0] > 7 * 2 * 4 * 64 * 64 * 4  # states of two layers
    assert sizes[1] < 2 * sizes[0]


def keep_state_outside(model):
    """Let a model hand out a cache that holds no state, as if its modules kept it."""
    real, caches = model.forward, {}
    name = "cache" if "cache" in inspect.signature(real).parameters else "cache_params"  # before transformers 5.24

    def forward(**options):
        handle = options.pop(name, None)
        output = real(**options, **({} if handle is None else {name: caches[handle]}))
        if (cache := getattr(output, name)) is not None:
            handle = handle or str(len(caches))
            caches[handle] = cache
            setattr(output, name, handle)
        return output

    model.forward = forward


def test_a_state_that_cannot_be_copied_is_decoded_without_drafts():
    model = make("mamba")
    expected = [greedy(model, prompt, 12) for prompt in PROMPTS]
    keep_state_outside(model)
    with pytest.warns(DraftwingWarning, match="linear_attention layers cannot be.*; it is decoded without speculation"):
        target = AdapterTarget(model, "snake")
    assert not target.supports_trees
    assert decode(target, PROMPTS) == expected
    assert decode(target, PROMPTS, NoDrafter()) == expected
    with pytest.raises(UnsupportedError, match=r"cannot be rolled back.*decode it plainly with draft='none'"):
        Decoder(target, LookupDrafter(VOCAB))
    ctx = target.new_context()
    target.prefill(ctx, [3, 4])
    with refused(UnsupportedError, "snake: a tree was drafted, but ", "without speculation with draft='none'"):
        target.forward(ctx, DraftTree.chain(torch.tensor([[4, 5]])))


@pytest.mark.parametrize("drafts", [False, True])
def test_a_recurrent_state_is_not_read_twice(drafts):
    """A failed step has changed it, so the next one uses the output that is already there."""
    model = make("mamba")
    target = AdapterTarget(model)
    expected = greedy(model, [3, 4], 6)
    decoder, text = Decoder(target, Knows([[3, 4, *expected]], 5, 4) if drafts else None), []
    decoder.admit([3, 4], Sampling(temperature=0.0, max_tokens=6, ignore_eos=True))
    good = decoder.rule
    while decoder.num_running:
        decoder.rule = replace(good, apply=lambda *args: 1 / 0, early=lambda *args: None)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                decoder.step()
        decoder.rule = good
        text += decoder.step().rows[0].token_ids
    assert text == expected


def test_a_model_without_a_cache_is_refused():
    config = transformers.OpenAIGPTConfig(**{**SMALL, "n_embd": 32, "n_layer": 2, "n_head": 4})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with refused(UnsupportedError, "returns no cache, ", "choose another model"):
        AdapterTarget(model, "old")


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_that_the_lean_decoder_reads_too(folder_of):
    folder = folder_of("qwen3")
    targets = [AdapterTarget.from_folder(folder, torch.float64), LeanTarget.from_folder(folder, torch.float64)]
    texts = [decode(target, PROMPTS, temperature=1.0, seed=3) for target in targets]
    assert texts[0] == texts[1]
    assert targets[0].num_weight_bytes == pytest.approx(targets[1].num_weight_bytes, rel=0.02)
    assert targets[0].name == folder.name


def test_folders_that_cannot_be_loaded(tmp_path):
    model = make("gpt2")
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in model.state_dict().items() if "h.1.mlp" not in k})
    with refused(CheckpointError, "weight transformer.h.1.mlp", "is missing", "Download both again"):
        load_target(tmp_path)
    with torch.no_grad():
        model.transformer.h[2].attn.c_proj.weight[3, 4] = torch.nan
    model.save_pretrained(tmp_path)
    with refused(CheckpointError, "h.2.attn.c_proj.weight: ", "NaN", "Download the checkpoint again"):
        load_target(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with refused(CheckpointError, "transformers cannot load this model", "Check that the folder is complete"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "none_such"}')
    with refused(CheckpointError, "none_such", "your version of transformers"):
        load_target(tmp_path)


def test_a_broken_transformers_is_one_of_our_errors(folder_of, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # its import now fails
    with refused(CheckpointError, "transformers cannot load this model", "transformers"):
        load_target(folder_of("gpt2"))
    with refused(TokenizerError, "transformers cannot load this tokenizer", "install what is missing"):
        _ = Tokenizer(add_tokenizer(tmp_path)).pretrained


def test_loading_without_warnings(folder_of):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target = load_target(folder_of("gpt2"), dtype="float64")
    assert isinstance(target, AdapterTarget)
