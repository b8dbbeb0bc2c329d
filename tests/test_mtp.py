"""Multi-token prediction: modules out of a target's checkpoint, their forward and their loss against references."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

import mtp_files
from conftest import SMALL, refused
from draftwing.api import load_drafter, load_target
from draftwing.drafters.base import Budget
from draftwing.engine.decode import Decoder
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.heads.mtp import read_modules
from draftwing.model.attention import CausalAttention
from draftwing.model.config import read_config
from draftwing.model.lean import LeanTarget
from draftwing.sampling import Sampling

VOCAB, HIDDEN = SMALL["vocab_size"], SMALL["hidden_size"]
PROMPT = [4, 7, 7, 1, 30, 12, 5, 60]
# layout, modules, family and what is changed in it; eps and head widths follow the family.
CHECKPOINTS = {
    "deepseek": ("deepseek", 1, "llama", {}),
    "deepseek-three": ("deepseek", 3, "llama", {}),
    "deepseek-qwen3": ("deepseek", 1, "qwen3", {}),
    "deepseek-window": ("deepseek", 1, "mistral-window", {}),
    "deepseek-phi3": ("deepseek", 1, "phi3", {}),
    "deepseek-biases": ("deepseek", 1, "llama-bias-tied", {"tie_word_embeddings": False}),
    "mimo": ("mimo", 1, "qwen2", {}),
    "mimo-two": ("mimo", 2, "qwen2", {}),
    "qwen": ("qwen", 1, "qwen3", {}),
    "qwen-two": ("qwen", 2, "qwen3", {}),
}
PLAIN = [name for name in CHECKPOINTS if name != "deepseek-phi3"]  # whose matrices ``by_hand`` knows by their names


@pytest.fixture(scope="module")
def target_of(tmp_path_factory):
    """``target_of("mimo")``: a folder, and the weights of its modules."""
    made = {}

    def get(name):
        if name not in made:
            layout, modules, family, changes = CHECKPOINTS[name]
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, mtp_files.write_target(folder, layout, modules, family, **changes)
        return made[name]

    return get


def heads_of(net):
    return net.config.num_heads, net.config.num_kv_heads, net.config.head_dim


def hidden_states(folder, ids):
    """(T, H) of a text by transformers: what the LM head reads, in float64."""
    config = read_config(folder)
    if config["model_type"] == "mimo":
        config = {**config, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    kind = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    model = transformers.AutoModelForCausalLM.from_config(kind).double().eval()
    found = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not found.missing_keys
    with torch.no_grad():
        return model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]


# --- a module's forward ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_modules_compute_what_they_do_by_hand(name, target_of):
    """Each module of a checkpoint, in float64, with states of the wrong size to see that norms are taken."""
    folder, weights = target_of(name)
    target = LeanTarget.from_folder(folder, torch.float64, prepack=False)
    net = read_modules(folder, target.embedding, target.head, dtype=torch.float64)
    assert len(net.chain) == len(weights) == net.config.num_modules
    ids, states = torch.tensor(PROMPT), 3 * torch.randn(len(PROMPT), HIDDEN).double()
    tokens = load_file(folder / "model.safetensors")["model.embed_tokens.weight"][ids]
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    for place, each in enumerate(weights):
        part = net.part(place)
        cis = part.rotary.cis(torch.arange(len(ids)))[:, None]
        attend = CausalAttention(1, len(ids), part.shape.windows, part.config.head_dim**-0.5, cis)
        with torch.no_grad():
            read, out = part.forward(ids, states, attend)
            logits = part.logits(read)
        eps = read_config(folder)["rms_norm_eps"]
        wanted = mtp_files.by_hand(each, tokens, states, heads_of(net), window=net.config.window, eps=eps)
        # Not closer: the frequencies of RoPE are float32 numbers in every precision, as in transformers.
        torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(logits, wanted @ head.T, rtol=1e-6, atol=1e-6)


def test_fused_matrices_are_read_like_separate_ones(target_of, tmp_path):
    """Phi-3 writes queries, keys and values, gate and up as one matrix each."""
    folder, (weights,) = target_of("deepseek-phi3")
    target = LeanTarget.from_folder(folder, torch.float64, prepack=False)
    (module,) = read_modules(folder, target.embedding, target.head, dtype=torch.float64).modules_in_order
    assert torch.equal(module.block.qkv.weight, weights["self_attn.qkv_proj.weight"])
    assert torch.equal(module.block.mlp.gate_up.weight, weights["mlp.gate_up_proj.weight"])


@pytest.mark.parametrize("name", ["deepseek", "deepseek-window", "mimo", "qwen"])
def test_what_is_drafted_first(name, target_of):
    """A chain of two: the state before the pending token with that token, then the module's own state with its guess.

    The states are transformers' last ones, after the final norm; nothing but the module's first weights is used.
    """
    folder, weights = target_of(name)
    target = load_target(folder, dtype="float64")
    drafter = load_drafter("mtp", target, None)()
    decoder = Decoder(target, drafter, budget=Budget(2))
    decoder.admit(PROMPT, Sampling(max_tokens=8, ignore_eos=True))
    tree = decoder.step().tree
    files, eps = load_file(folder / "model.safetensors"), read_config(folder)["rms_norm_eps"]
    embedding, head = files["model.embed_tokens.weight"], files["lm_head.weight"]
    states, ids = hidden_states(folder, PROMPT[:-1]), list(PROMPT[1:])
    for _ in range(2):
        tokens = embedding[torch.tensor(ids)]
        window = drafter.net.config.window
        out = mtp_files.by_hand(weights[0], tokens, states, heads_of(drafter.net), window=window, eps=eps)
        ids.append(int((out[-1] @ head.T).argmax()))
        states = torch.cat([states, out[-1:]])
    assert tree.tokens.tolist() == [[PROMPT[-1], *ids[-2:]]]


# --- a target whose checkpoint has modules ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_target_is_what_it_is_without_its_modules(name, target_of):
    """And drafts by them: one text, drafted or not."""
    folder, _ = target_of(name)
    target = load_target(folder)
    wanted = hidden_states(folder, PROMPT) @ load_file(folder / "model.safetensors")["lm_head.weight"].T
    logits = target.score(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-3, atol=1e-3)
    texts = []
    for drafter in (None, load_drafter("mtp", target, None)()):
        decoder = Decoder(target, drafter, budget=Budget(3, 2))
        decoder.admit(PROMPT, Sampling(max_tokens=16, temperature=1.0, seed=3, ignore_eos=True))
        texts.append([token for _ in range(16) if decoder.num_running for token in decoder.step().rows[0].token_ids])
    assert texts[0] == texts[1]
    assert len(texts[0]) == 16


def test_what_no_module_owns_is_still_refused(target_of, tmp_path):
    folder, _ = target_of("deepseek")
    for change, said in (
        ({"model.layers.4.enorm.weight": torch.ones(HIDDEN)}, {}),  # a second module, and the config says one
        ({"mtp.fc.weight": torch.ones(HIDDEN, 2 * HIDDEN)}, {}),  # of another layout
        ({}, {"num_nextn_predict_layers": 0}),
    ):
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(folder, place)
        mtp_files.change_tensors(place, **change)
        mtp_files.change_config(place, **said)
        with refused(CheckpointError, str(place), "have no place in a llama model"):
            load_target(place)


def test_numbers_of_modules_that_cannot_be_meant(target_of, tmp_path):
    shutil.copytree(target_of("deepseek")[0], tmp_path / "odd")
    for odd in (-1, "two", 1.5, True):
        mtp_files.change_config(tmp_path / "odd", num_nextn_predict_layers=odd)
        with refused(ConfigError, "`num_nextn_predict_layers` must be an integer of at least 0"):
            load_target(tmp_path / "odd")


# --- what cannot be run ----------------------------------------------------------------------------------------------


def test_a_target_without_modules(folder_of):
    target = load_target(folder_of("llama"))
    with refused(CheckpointError, "(LlamaForCausalLM) has no MTP modules", "draftwing train mtp", "lookup"):
        load_drafter("mtp", target, None)
    with refused(CheckpointError, "LlamaForCausalLM has no MTP modules"):
        read_modules(folder_of("llama"), target.embedding, target.head)
    target.folder = None
    with refused(CheckpointError, "was not loaded from a folder"):
        load_drafter("mtp", target, None)


def test_blocks_that_no_dense_layer_has(target_of, tmp_path):
    folder, _ = target_of("deepseek")
    for odd in ("mlp.experts.0.gate_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "self_attn.q_norm.weight"):
        place = tmp_path / odd
        shutil.copytree(folder, place)
        mtp_files.change_tensors(place, **{f"model.layers.3.{odd}": torch.ones(HIDDEN)})
        target = load_target(place)
        with refused(UnsupportedError, "an MTP module of LlamaForCausalLM has", odd, "draft with lookup"):
            load_drafter("mtp", target, None)


def test_an_embedding_or_head_of_its_own(target_of, tmp_path):
    folder, _ = target_of("deepseek")
    for name, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        place = tmp_path / name
        shutil.copytree(folder, place)
        mtp_files.change_tensors(place, **{f"model.layers.3.{name}.weight": torch.randn(VOCAB, HIDDEN).double()})
        with refused(UnsupportedError, f"model.layers.3.{name}.weight is not the target's {original}.weight"):
            load_drafter("mtp", load_target(place), None)


def test_modules_that_are_damaged(target_of, tmp_path):
    folder, _ = target_of("mimo")
    name = "model.mtp_layers.0.{}.weight".format
    for number, (change, parts) in enumerate((
        ({name("final_layernorm"): None}, ["final_layernorm.weight is missing"]),
        ({name("self_attn.o_proj"): torch.ones(3, 4)}, ["chain.0.block.out.weight has shape (3, 4)", "(32, 32)"]),
        ({name("input_proj"): torch.full((32, 64), torch.nan)}, ["input_proj.weight", "NaN"]),
    )):  # fmt: skip
        place = tmp_path / str(number)
        shutil.copytree(folder, place)
        mtp_files.change_tensors(place, **change)
        with refused(CheckpointError, *parts):
            load_drafter("mtp", load_target(place), None)


FOREIGN = {
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "qk_nope_head_dim": 8, "num_key_value_heads": 4,
    }),
    "Glm4MoeForCausalLM": ("Glm4MoeConfig", {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "head_dim": 8,
    }),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "num_hidden_layers": 4,
    }),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::draftwing.errors.DraftwingWarning")  # of recurrent layers
@pytest.mark.parametrize("architecture", FOREIGN)
def test_architectures_whose_layers_we_lack(architecture, tmp_path):
    """The target is decoded all the same; its modules are refused by the architecture's name."""
    kind, changes = FOREIGN[architecture]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{**SMALL, **changes}))
    model.float().save_pretrained(tmp_path)
    layers = model.config.num_hidden_layers
    base = "mtp." if "Next" in architecture else f"model.layers.{layers}."
    join = "fc" if "Next" in architecture else "eh_proj"
    mtp_files.change_tensors(
        tmp_path,
        **{f"{base}{join}.weight": torch.randn(HIDDEN, 2 * HIDDEN), "mtp.layers.0.input_layernorm.weight": None},
        **({"mtp.layers.0.mlp.gate.weight": torch.randn(4, HIDDEN)} if "Next" in architecture else {}),
    )
    if "Next" not in architecture:
        mtp_files.change_config(tmp_path, num_nextn_predict_layers=1)
    target = load_target(tmp_path)
    with refused(UnsupportedError, f"MTP modules of {architecture} cannot be run", "Draft with lookup"):
        load_drafter("mtp", target, None)
