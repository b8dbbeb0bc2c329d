"""Reading config.json: all families against transformers' config classes, and the text of every error."""

import json
from contextlib import suppress
from dataclasses import replace
from types import NoneType

import pytest
import torch
import transformers

import conftest
from conftest import FURTHER, LEAN, SMALL, refused
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.models.config import LayerSizes, ModelConfig, read_config
from draftwing.models.families import LEAN_MODEL_TYPES


class MiMoConfig(transformers.Qwen2Config):
    """MiMo's class, which transformers lacks, only adds the number of MTP modules."""

    model_type = "mimo"


def config_class(family):
    return MiMoConfig if family == "mimo" else transformers.CONFIG_MAPPING[family]


USUAL = ("llama", "mistral", "mixtral", "mimo", "qwen2", "qwen3", "qwen3_moe", "phi3")
# 32 heads, because the default key-value heads of some families (32, 8, 4) must divide them.
SIZES = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 32,
}  # fmt: skip


def written(family, **settings):
    """A config.json as transformers 5 writes it."""
    return json.loads(json.dumps(config_class(family)(**{**SIZES, **settings}).to_dict()))


def as_version_4(config):
    """The same config.json in transformers 4's spelling."""
    config = dict(config)
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    config["partial_rotary_factor"] = rope.pop("partial_rotary_factor", 1.0)
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    return config


def llama(**changes):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, **changes}
    return {key: value for key, value in config.items() if value is not ...}


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("family", USUAL)
def test_reads_what_transformers_writes(family, version):
    theirs = config_class(family)(
        **SIZES, max_position_embeddings=512, rms_norm_eps=1e-4, bos_token_id=None, dtype="float32"
    )
    config = json.loads(json.dumps(theirs.to_dict()))
    ours = ModelConfig.from_hf(as_version_4(config) if version == 4 else config)
    expected = {
        "model_type": family, "vocab_size": 64, "hidden_size": 128, "intermediate_size": 96, "num_layers": 4,
        "num_heads": 32, "num_kv_heads": theirs.num_key_value_heads, "head_dim": getattr(theirs, "head_dim", None) or 4,
        "rms_norm_eps": 1e-4, "activation": "silu", "max_position_embeddings": 512, "tie_word_embeddings": False,
        "sliding_windows": (4096 if family == "mistral" else None,) * 4, "bos_id": None, "pad_id": theirs.pad_token_id,
        "eos_ids": () if theirs.eos_token_id is None else (theirs.eos_token_id,), "dtype": "float32",
    }  # fmt: skip
    assert {name: getattr(ours, name) for name in expected} == expected
    assert (ours.rope.type, ours.rope.theta) == ("default", theirs.rope_parameters["rope_theta"])
    assert ours.rope.rotary_dim == ours.rope.head_dim == ours.head_dim


@pytest.mark.parametrize("family", LEAN_MODEL_TYPES)
def test_defaults_are_those_of_transformers(family):
    # Only the sizes given: everything else must come out as transformers' class fills it in.
    # DeepSeek-V3's default number of KV heads fits its default number of heads alone.
    more = {"hidden_size": 256, **({"num_key_value_heads": 32} if family == "deepseek_v3" else {})}
    ours = ModelConfig.from_hf({"model_type": family, **SIZES, **more})
    assert ours == ModelConfig.from_hf(written(family, **more))


# Settings of the classes that do not change what a model computes, or that only some models of a class have.
HARMLESS = {
    "attention_dropout", "initializer_range", "output_router_logits", "pretraining_tp", "residual_dropout",
    "router_aux_loss_coef", "router_jitter_noise", "use_cache", "hidden_dropout", "embedding_dropout", "eod_token_id",
    "embd_pdrop", "resid_pdrop", "original_max_position_embeddings",
    "no_rope_layer_interval", "_sliding_window_pattern", "sliding_window_pattern", "num_nextn_predict_layers",
    "interleave_moe_layer_step",
}  # fmt: skip


def changed(value):
    if isinstance(value, bool | NoneType):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    if isinstance(value, list):
        return [changed(item) for item in value] or [0]
    swapped = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
    return {**value, "rope_theta": 77.0, "full_attention": {}} if isinstance(value, dict) else swapped.get(value, "x")


@pytest.mark.parametrize("name", [*LEAN, *FURTHER])
def test_no_setting_is_ignored(name):
    """Each is read, or refused: a change of it changes the config, or raises."""
    kind, settings = {**conftest.FAMILIES, **FURTHER}[name]
    kind = getattr(transformers, kind)
    config = json.loads(json.dumps(kind(**{**SMALL, **settings}).to_dict()))
    if "use_sliding_window" in config:
        more = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "layer_types": None}
        config |= {key: value for key, value in more.items() if key in config}
    base, ignored = ModelConfig.from_hf(config), set()
    harmless = HARMLESS | ({"head_dim", "qk_head_dim"} if base.latent else set())
    if base.layer_sizes and base.moe is None:
        harmless |= {"num_experts", "top_k_experts", "moe_intermediate_size"}
    elif base.layer_sizes:
        harmless |= {"vocab_size_per_layer_input"}
    for key in set(config) - set(transformers.PretrainedConfig().to_dict()) - harmless:
        with suppress(ConfigError):
            if ModelConfig.from_hf({**config, key: changed(config[key])}) == base:
                ignored.add(key)
    assert not ignored


@pytest.mark.parametrize("family", USUAL)
def test_null_key_value_heads_are_the_query_heads(family):
    assert ModelConfig.from_hf({"model_type": family, **SIZES, "num_key_value_heads": None}).num_kv_heads == 32


def test_keys_of_lfm2s_first_configs():
    """``full_attn_idxs`` instead of ``layer_types``, and other names for two settings."""
    old = {"model_type": "lfm2", **SIZES, "num_hidden_layers": 4, "full_attn_idxs": [1, 3], "block_ff_dim": 6656}
    config = ModelConfig.from_hf({**old, "tie_embedding": False})
    assert config.convolves == (True, False, True, False)
    assert (config.intermediate_size, config.tie_word_embeddings) == (4608, False)
    kinds = ["conv", "full_attention"] * 2
    new = {**old, "layer_types": kinds, "full_attn_idxs": None, "block_ff_dim": 4608, "block_auto_adjust_ff_dim": False}
    assert ModelConfig.from_hf({**new, "tie_word_embeddings": False}) == config
    with refused(UnsupportedError, "`layer_types` has", "conv"):
        ModelConfig.from_hf({**new, "model_type": "llama"})


def test_biases_and_query_norms():
    def flags(family, **changes):
        config = ModelConfig.from_hf({**written(family), **changes})
        return config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm

    assert flags("llama") == (False, False, False, False)
    assert flags("llama", attention_bias=True) == (True, True, False, False)
    assert flags("llama", mlp_bias=True) == (False, False, True, False)
    assert flags("qwen2") == (True, False, False, False)
    assert flags("qwen3", attention_bias=True) == (True, True, False, True)
    assert flags("qwen3_moe") == (False, False, False, True)
    # Their models have no biases, whatever the config says.
    assert flags("mistral", attention_bias=True) == flags("phi3", attention_bias=True) == (False,) * 4


def test_flags_match_the_models_of_transformers():
    for family in USUAL:
        kind = transformers.Qwen2Config if family == "mimo" else config_class(family)  # MiMo has Qwen2's layers
        with torch.device("meta"):
            theirs = kind(**{**SIZES, "num_hidden_layers": 1, "pad_token_id": 0})
            names = {name for name, _ in transformers.AutoModelForCausalLM.from_config(theirs).named_parameters()}
        ours = ModelConfig.from_hf(written(family, num_hidden_layers=1))
        assert ours.qkv_bias == any(name.endswith(("q_proj.bias", "qkv_proj.bias")) for name in names)
        assert ours.o_bias == any(name.endswith("o_proj.bias") for name in names)
        assert ours.qk_norm == any(name.endswith("q_norm.weight") for name in names)
        assert (ours.moe is not None) == any(".experts." in name for name in names)


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        ({"eos_token_id": [5, 7]}, "eos_ids", (5, 7)),
        ({"eos_token_id": None}, "eos_ids", ()),
        ({}, "eos_ids", (2,)),
        ({"pad_token_id": -1}, "pad_id", None),  # as in several Llama configs on the Hub
        ({"bos_token_id": 0}, "bos_id", 0),
        *(({"hidden_act": name}, "activation", name) for name in ("silu", "gelu", "gelu_pytorch_tanh")),
        ({"hidden_act": "swish"}, "activation", "silu"),
    ],
)
def test_token_ids_and_activations(changes, field, expected):
    assert getattr(ModelConfig.from_hf(llama(**changes)), field) == expected


def windows(family, **settings):
    return ModelConfig.from_hf({**written(family), **settings}).sliding_windows


def test_sliding_windows():
    assert windows("llama", sliding_window=8) == (None,) * 4
    assert windows("mistral") == (4096,) * 4
    assert windows("mistral", sliding_window=None) == (None,) * 4
    assert windows("mixtral", sliding_window=8) == (8,) * 4
    assert windows("phi3", sliding_window=8) == (8,) * 4
    assert windows("qwen3_moe", sliding_window=8) == (None,) * 4
    assert windows("qwen3_moe", sliding_window=8, use_sliding_window=True) == (8,) * 4


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_sliding_windows_by_layer(family):
    switched = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    assert ModelConfig.from_hf({"model_type": family, **SIZES, **switched}).sliding_windows == (None, None, None, 8)
    assert windows(family, **written(family, **switched)) == (None, None, None, 8)
    named = ["sliding_attention", "attention", "full_attention", "sliding_attention"]
    assert windows(family, **{**switched, "layer_types": named}) == (8, None, None, 8)
    assert windows(family, sliding_window=8, max_window_layers=0, layer_types=None) == (None,) * 4


def test_experts():
    moe = ModelConfig.from_hf(written("mixtral")).moe
    assert (moe.num_experts, moe.num_experts_per_token, moe.intermediate_size) == (8, 2, 96)
    assert moe.norm_topk_prob
    assert moe.sparse_layers == (True,) * 4

    def qwen(**changes):
        return ModelConfig.from_hf({**written("qwen3_moe", num_experts=6, num_experts_per_tok=2), **changes}).moe

    moe = qwen(moe_intermediate_size=48, mlp_only_layers=[1])
    assert (moe.num_experts, moe.num_experts_per_token, moe.intermediate_size) == (6, 2, 48)
    assert not moe.norm_topk_prob
    assert moe.sparse_layers == (True, False, True, True)
    assert qwen(decoder_sparse_step=2, norm_topk_prob=True).sparse_layers == (False, True, False, True)
    assert qwen(num_local_experts=0) is None
    assert qwen(mlp_only_layers=[0, 1, 2, 3]) is None
    # Version 4 wrote num_experts where version 5 writes num_local_experts.
    assert qwen(num_local_experts=None, num_experts=6) == qwen()
    # A config without dense layers may have no width for them; groups must hold as many experts as a token chooses.
    assert ModelConfig.from_hf({**written("qwen3_5_moe_text"), "intermediate_size": None}).moe.intermediate_size == 512
    glm = {**written("glm4_moe"), "n_group": 32, "topk_group": 1}
    assert ModelConfig.from_hf({**glm, "num_experts_per_tok": 4}).moe.groups == (32, 1)
    with refused(ConfigError, "`n_group` 32 and `topk_group` 1 do not fit 128 experts"):
        ModelConfig.from_hf({**glm, "num_experts_per_tok": 5})


def test_layers_of_llama_4():
    def read(**changes):
        return ModelConfig.from_hf({"model_type": "llama4_text", **SIZES, **changes})

    assert read().sliding_windows == (-8192, -8192, -8192, None)
    assert read().query_scale == (0.1, 8192, 1)
    assert read().moe.sparse_layers == (True,) * 4
    assert read(interleave_moe_layer_step=2).moe.sparse_layers == (False, True, False, True)
    assert read(interleave_moe_layer_step=2, moe_layers=[0]).moe.sparse_layers == (True, False, False, False)
    assert read(moe_layers=[]).moe is None
    assert (read().moe.intermediate_size, read().intermediate_size) == (96, 16384)
    assert read(attention_chunk_size=None).sliding_windows == (None,) * 4
    assert read(no_rope_layers=[1, 1, 1, 1]).query_scale is None
    kinds = ["full_attention", "chunked_attention"] * 2
    assert read(attention_chunk_size=5, layer_types=kinds).sliding_windows == (None, -5, None, -5)
    with refused(ConfigError, "chunked_attention, but no window", "`attention_chunk_size`"):
        read(attention_chunk_size=None, layer_types=kinds)


def test_layers_of_gemma_4():
    usual = {"model_type": "gemma4_text", **SIZES, "head_dim": 8, "num_hidden_layers": 12, "num_key_value_heads": 4}
    usual["vocab_size_per_layer_input"] = SIZES["vocab_size"]

    def read(**changes):
        return ModelConfig.from_hf({**usual, **changes})

    model = read(num_kv_shared_layers=4, global_head_dim=16)
    assert model.sliding_windows == ((512,) * 5 + (None,)) * 2
    assert [size.source for size in model.layer_sizes] == [*range(8), 7, 7, 7, 5]
    narrow = (0, 0), (0, 8), (1, 0), (1, 8), (2, 0)
    assert model.slots == (*narrow, (3, 0), (2, 8), *[(4, 0)] * 4, (3, 0))
    assert read(global_head_dim=16).slots[5::6] == ((3, 0), (6, 0))
    assert (model.num_slot_layers, model.slot_width, replace(model, kv_dtype="int8").slot_width) == (5, 16, 6)
    assert (model.head_dim, model.rope.head_dim, model.local_rope.head_dim) == (16, 16, 8)
    assert (model.rope.type, model.rope.partial_rotary_factor, model.rope.theta) == ("proportional", 0.25, 1e6)
    assert (model.local_rope.type, model.local_rope.theta, model.attention_scale) == ("default", 1e4, 1.0)
    wide = read(attention_k_eq_v=True, num_global_key_value_heads=2, global_head_dim=16)
    assert wide.layer_sizes[5] == LayerSizes(16, 2, wide.intermediate_size, 5, repeats_keys=True)
    assert wide.layer_sizes[4] == LayerSizes(8, 4, wide.intermediate_size, 4)
    written = {str(layer): {"head_dim": 16, "num_key_value_heads": 2} for layer in (5, 11)}
    assert read(attention_k_eq_v=True, per_layer_config=written) == wide
    assert read(num_global_key_value_heads=2).num_kv_heads == 4  # only for values that are keys
    assert read(hidden_size_per_layer_input=0, vocab_size_per_layer_input=1).layer_inputs is None
    widened = read(num_kv_shared_layers=4, use_double_wide_mlp=True)
    assert [size.intermediate_size // widened.intermediate_size for size in widened.layer_sizes] == [1] * 8 + [2] * 4
    for changes, text in (
        ({"num_kv_shared_layers": 7}, "leaves layer 5 no earlier one"),
        ({"num_kv_shared_layers": 12}, "leaves layer 0 no earlier one"),
        ({"global_head_dim": 4}, "heads of [(4, 4)] in layers without a window and [(8, 4)]"),
        ({"per_layer_config": {**written, "11": {"head_dim": 32}}}, "heads of [(16, 2), (32, 4)]"),
        ({"per_layer_config": {"5": {"sliding_window": 3}}}, "`per_layer_config` must give"),
        ({"per_layer_config": {"full_attention": {"head_dim": 16}}}, "`per_layer_config` must give"),
        ({"vocab_size_per_layer_input": 3}, "`vocab_size_per_layer_input` 3 is below"),
        ({"rope_parameters": {"rope_type": "default"}}, "settings for full_attention and sliding_attention"),
    ):
        with refused(UnsupportedError, text, 'engine="transformers"'):
            read(**changes)
    with refused(ConfigError, "head widths must be even", "(15, 4)"):
        read(global_head_dim=15)


def test_rope_in_all_spellings():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    read = [
        ModelConfig.from_hf(llama(**{"rope_theta": 5e5, **spelling})).rope
        for spelling in (
            {"rope_scaling": {"rope_type": "llama3", **scaling}},
            {"rope_scaling": {"type": "llama3", **scaling}},
            {"rope_scaling": None, "rope_parameters": {"rope_type": "llama3", **scaling}},
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}, "rope_theta": ...},
        )
    ]
    assert read[0].type == "llama3"
    assert read[0].theta == 5e5
    assert read[0].factor == 8
    assert all(rope == read[0] for rope in read)


@pytest.mark.parametrize("spelling", [dict, as_version_4])
def test_phi3_rotates_a_part(spelling):
    rope = ModelConfig.from_hf(spelling(written("phi3", partial_rotary_factor=0.5))).rope
    assert (rope.head_dim, rope.rotary_dim) == (4, 2)


WRONG = [
    (llama(hidden_size=...), "required key `hidden_size` is missing"),
    (llama(vocab_size=None), "required key `vocab_size` is missing"),
    (llama(hidden_size="128"), "`hidden_size` must be an integer of at least 1, found str '128'"),
    (llama(hidden_size=128.0), "`hidden_size` must be an integer of at least 1, found float 128.0"),
    (llama(hidden_size=True), "`hidden_size` must be an integer of at least 1, found bool True"),
    (llama(num_hidden_layers=0), "`num_hidden_layers` must be an integer of at least 1, found int 0"),
    (llama(num_hidden_layers=10**9), "`num_hidden_layers` must be an integer of at most 10000, found int 1000000000"),
    (llama(vocab_size=10**5000), "`vocab_size` must be an integer of at most 2147483647, found int of hundreds of"),
    (llama(rope_theta=10**400), "`rope_theta` must be a finite number"),
    (llama(hidden_size=100), "`hidden_size` 100 is not divisible by `num_attention_heads` 32"),
    (llama(num_key_value_heads=5), "`num_attention_heads` 32 is not divisible by `num_key_value_heads` 5"),
    (
        {**llama(num_attention_heads=4, hidden_size=64), "model_type": "mistral", "architectures": None},
        "`num_attention_heads` 4 is not divisible by `num_key_value_heads` 8, its default",
    ),
    (llama(head_dim=5), "`head_dim` must be even, because RoPE rotates pairs, found 5"),
    (llama(hidden_size=96), "`head_dim` must be even, because RoPE rotates pairs, found 3"),
    (llama(rms_norm_eps="1e-6"), "`rms_norm_eps` must be a finite number of at least 0, found str '1e-6'"),
    (llama(rms_norm_eps=float("nan")), "`rms_norm_eps` must be a finite number"),
    (llama(tie_word_embeddings="no"), "`tie_word_embeddings` must be true or false, found str 'no'"),
    (llama(eos_token_id="</s>"), "`eos_token_id` must be a token id, a list of them or null, found str '</s>'"),
    (llama(bos_token_id=[1]), "`bos_token_id` must be a token id or null, found list [1]"),
    (llama(architectures="LlamaForCausalLM"), "`architectures` must be a list of str"),
    (llama(architectures=..., model_type=...), "expected `architectures` or `model_type`, found neither"),
    (llama(model_type="qwen2"), '`architectures` is LlamaForCausalLM, of model type "llama", but `model_type` is'),
    (llama(layer_types=["full_attention"]), "`layer_types` must have one entry per layer (`num_hidden_layers` 4)"),
    (llama(rope_scaling=3), "`rope_scaling` must be an object, found 3"),
    (llama(rope_scaling={"type": "linear"}), "rope_scaling: required key `factor` is missing"),
    (llama(rope_scaling={"type": "linear", "factor": -1}), "factor must be above 0, found -1.0"),
    (llama(rope_theta="big"), "`rope_theta` must be a finite number, found str 'big'"),
    (llama(rope_theta=1), "rope_theta must be above 1, found 1.0"),
    ({**written("phi3"), "rope_scaling": {"type": "linear", "factor": 2.0}}, '"linear" does not exist for phi3'),
    ({**written("phi3"), "partial_rotary_factor": 0.8, "rope_parameters": None}, "rotary_dim (head_dim times"),
    ({**written("mixtral"), "num_local_experts": 1}, "`num_experts_per_tok` 2 is more than the 1 experts"),
    ({**written("mixtral"), "num_experts": 9}, "`num_experts` and `num_local_experts` differ"),
    (
        {**written("qwen2"), "layer_types": ["sliding_attention"] * 4},
        "`layer_types` has sliding_attention, but no window",
    ),
]


LACKING = [
    (llama(architectures=["FalconForCausalLM"]), "architecture FalconForCausalLM is not supported by the lean decoder"),
    (llama(architectures=["LlamaForSequenceClassification"]), "architecture LlamaForSequenceClassification is not"),
    (llama(architectures=None, model_type="gpt2"), "architecture gpt2 is not supported by the lean decoder"),
    (llama(hidden_act="xielu"), 'activation `hidden_act` "xielu" is not supported'),
    (llama(quantization_config={"bits": 4}), "`quantization_config` is set: the weights are quantised"),
    (llama(rope_scaling={"type": "su"}), 'rope_scaling: RoPE type "su" is not supported'),
    (llama(rope_scaling={"rope_type": "longrope"}), 'rope_scaling: RoPE type "longrope" is not supported'),
    ({**written("phi3"), "rope_scaling": {"type": "yarn"}}, 'RoPE type "longrope" is not supported'),
    (llama(rope_parameters={"full_attention": {"rope_type": "default"}}), "found several (full_attention)"),
    (llama(partial_rotary_factor=0.5), "`partial_rotary_factor` 0.5 has no meaning for llama"),
    (llama(layer_types=["chunked_attention"] * 4), '`layer_types` has "chunked_attention", which the lean decoder'),
    (
        {**written("mistral"), "layer_types": ["sliding_attention", "full_attention"] * 2},
        "`layer_types` disagrees with MistralForCausalLM",
    ),
    ({"architectures": ["FalconForCausalLM"]}, "expected one of LlamaForCausalLM, MistralForCausalLM"),
]


@pytest.mark.parametrize(
    ("config", "text", "kind"),
    [*((*case, ConfigError) for case in WRONG), *((*case, UnsupportedError) for case in LACKING)],
    ids=[text[:50] for _, text in WRONG + LACKING],
)
def test_refusals(config, text, kind):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(config, "there/config.json")
    message = str(caught.value)
    assert type(caught.value) is kind
    assert message.startswith("there/config.json: ")
    assert text in message
    fixes = ("Correct", "Add", "Remove", "ownload") if kind is ConfigError else ('engine="transformers"',)
    assert any(fix in message for fix in fixes)


@pytest.mark.parametrize(
    ("content", "kind", "text"),
    [
        (None, CheckpointError, "expected config.json in the model folder, found none"),
        ("{", ConfigError, "config.json: expected JSON, "),
        (b"\xff\xfe", ConfigError, "config.json: expected JSON, "),
        ("[1]", ConfigError, "expected a JSON object, found list [1]. "),
    ],
)
def test_damaged_files(content, kind, text, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(kind, text, "ownload"):
        read_config(tmp_path)


def test_read_config(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_config(tmp_path) == {"model_type": "llama"}
    with refused(CheckpointError, "absent: expected a model folder, found none. Check the path"):
        read_config(tmp_path / "absent")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with refused(CheckpointError, "cannot be read"):
        read_config(tmp_path)
