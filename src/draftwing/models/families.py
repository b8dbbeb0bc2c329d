"""Model families as data: how each differs from Llama, where config.json states it, and how tensors are named.

Another Llama-like family is a row of ``FAMILIES``. ``models.config`` reads a row together with a config.json,
``models.lean`` the tensors, ``models.layers`` computes what the row describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal


@dataclass(frozen=True)
class Key:
    """A setting that config.json may hold under ``name``; ``default`` if it is missing or null."""

    name: str
    default: Any


@dataclass(frozen=True)
class LayerNames:
    """Names of a layer's tensors after ``model.layers.N.``. Several names are stacked to make one matrix."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    # norms: of the attention's input and output, of the MLP's input and output, of queries and keys
    attention_in: str | None = "input_layernorm"
    attention_out: str | None = None
    mlp_in: str | None = "post_attention_layernorm"
    mlp_out: str | None = None
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str | None = None  # a further score of each head
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # without gates: the first matrix
    down: str = "mlp.down_proj"
    final_norm: str = "model.norm"  # not of a layer, so the whole name

    def modules(self) -> dict[str, list[str]]:
        """The names by module of a ``DecoderLayer``."""
        norms = {"input_norm": self.attention_in, "out_norm": self.attention_out, "post_norm": self.mlp_in}
        norms |= {"mlp_out_norm": self.mlp_out, "q_norm": self.q_norm, "k_norm": self.k_norm}
        norms |= {"q_norm_all": self.q_norm, "k_norm_all": self.k_norm}
        found = {module: [name] for module, name in norms.items() if name is not None}
        matrices = {"qkv": [*self.qkv], "out": [self.out], "mlp.gate_up": [*self.gate_up], "mlp.down": [self.down]}
        return {**found, **matrices}


POST_NORMS: Final = LayerNames(
    attention_in=None, attention_out="post_attention_layernorm", mlp_in=None, mlp_out="post_feedforward_layernorm"
)
SANDWICH: Final = replace(POST_NORMS, attention_in="input_layernorm", mlp_in="pre_feedforward_layernorm")
FUSED_QKV: Final = LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
PARALLEL: Final = LayerNames(mlp_in=None)  # attention and MLP read the same norm


@dataclass(frozen=True)
class ExpertTraits:
    """A family's mixtures of experts."""

    # num, num_per_token: defaults of the number of experts, and of those that each token goes through
    num: int
    num_per_token: int
    # names after ``model.layers.N.``: the router, and the matrices of expert {e}: gate, up and down, or for ``stacked``
    # ones gate and up of all experts in one tensor (experts, 2 * width, hidden), and down in another; if they are
    # transposed (experts, hidden, 2 * width), the whole name
    router: str = "mlp.gate"
    matrices: tuple[str, ...] = ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj", "mlp.experts.{e}.down_proj")
    is_transposed: bool = False
    size: Key = Key("moe_intermediate_size", 768)  # width of an expert
    dense_size: Key | None = None  # width of the MLP of layers without experts, if it is not ``intermediate_size``
    # True if the probabilities of the chosen experts are rescaled to sum to one
    normalise: bool | Key = Key("norm_topk_prob", False)
    # The weights of experts: the router's softmax, that of the chosen experts alone (chosen), or the sigmoid, which is
    # chosen by its sum with the ``bias`` tensor
    scores: Literal["softmax", "chosen", "sigmoid"] = "softmax"
    router_bias: bool = False
    score_bias: str | None = None
    # Experts are chosen from the groups with the highest maximum, or sum of the two best; None: from all.
    groups: Literal["max", "two"] | None = None
    num_groups: tuple[int, int] = (1, 1)  # defaults of their number, and of those that experts are chosen from
    sum_eps: float = 0.0  # added to the sum that the weights are divided by
    scale: Key | None = None  # factor of the weights
    scales_input: bool = False  # the weights multiply what experts read, not what they return
    # (alpha, limit) of gpt-oss's activation: (up + 1) * gate * sigmoid(alpha * gate) of clamped gate and up
    clamp: tuple[Key, Key] | None = None
    num_dense: Key | None = None  # the number of first layers without experts
    last_sparse: Key | None = None  # the last layer with experts; -1: that of the model
    every: Key | None = None  # "moe_layers" lists the layers with experts, by default every n-th
    count: str | None = None  # the key of the number of experts, if it is not ``num_experts``
    per_token: str = "num_experts_per_tok"  # the key of the number of each token's experts
    has_dense_layers: bool = False  # ``mlp_only_layers`` and ``decoder_sparse_step`` name layers without experts
    # experts next to the MLP of a layer instead of in its place, each with norms of their own, if the key is set
    beside: str | None = None
    router_scale: str | None = None  # the weight of a norm of what the router reads
    expert_scale: str | None = None  # factors of the weights, one for each expert
    shared: str | None = None  # a further expert that every token goes through, weighted by ``shared_gate``
    shared_size: Key | None = None  # its width, or
    num_shared: Key | None = None  # how many times as wide as an expert it is
    shared_gate: str | None = None

    @property
    def is_stacked(self) -> bool:
        return len(self.matrices) == 2

    @property
    def apart(self) -> tuple[str, ...]:
        """Names of the matrices of each expert. GGUF files have gate and up apart."""
        return ExpertTraits.matrices if self.is_stacked else self.matrices

    @property
    def stacked(self) -> tuple[str, str]:
        """Names of the tensors of all experts. Files of any family may have them (Qwen3.5-MoE as it is published)."""
        if self.is_stacked:
            suffix = "" if self.is_transposed else ".weight"
            return self.matrices[0] + suffix, self.matrices[1] + suffix
        experts = self.matrices[0].partition(".{e}")[0]
        return f"{experts}.gate_up_proj", f"{experts}.down_proj"

    @property
    def is_everywhere(self) -> bool:
        """True if every layer has experts, and nothing else."""
        is_partial = self.num_dense is not None or self.every is not None or self.beside is not None
        return not is_partial and not self.has_dense_layers


@dataclass(frozen=True)
class Family:
    """A model family: the defaults of its config class in transformers, and its differences from Llama.

    A ``Key`` is read from config.json; anything else is the same for all models of the family.
    """

    architecture: str
    max_positions: int
    kv_heads: int | None = None  # None for as many as query heads
    head_dim: int | None = None  # None for hidden_size / heads
    bos: int | None = None
    eos: int | tuple[int, ...] | None = None
    pad: int | None = None
    is_tied: bool = False
    names: LayerNames = LayerNames()

    # norms: ``rms`` (RMSNorm) or ``layer`` (LayerNorm, with or without a bias)
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0  # added to a norm's stored weight
    eps: Key = Key("rms_norm_eps", 1e-6)

    # attention
    qkv_bias: bool | Key = False
    o_bias: bool | Key = False
    # norms of queries and keys: of each head; of all heads together; of each head after its rotation; or the same
    # without weights, in layers that rotate (unweighted)
    qk_norm: Literal["none", "head", "all", "rotated", "unweighted"] = "none"
    uses_qk_norm: bool | Key = True  # False if a model of the family has none
    scale: Key | None = None  # factor of the scores; None for head_dim ** -0.5
    scale_power: float = 1.0  # the power of ``scale`` that is used
    # queries, keys and values pass through narrow matrices (multi-head latent attention, DeepSeek-V2, 2405.04434)
    is_latent: bool = False
    score_cap: Key | None = None  # scores are capped to cap * tanh(score / cap)
    window: int | None = 4096  # default of ``sliding_window``, or of ``attention_chunk_size``
    # Layers with a sliding window: none; all; all if "use_sliding_window" is set (switch), or then those from
    # "max_window_layers" on (layer), or every second one before it (alternate), or those without rotation
    # (unrotated); those that "layer_types" names, by default all but every n-th (pattern). Or layers that attend
    # within chunks: those that "layer_types" names, by default those with rotation (chunked).
    windows: Literal["never", "always", "switch", "layer", "alternate", "unrotated", "pattern", "chunked"] = "never"
    pattern: int | Key = 0  # n of "pattern"; 0: all layers

    # the length of the short convolutions that replace attention in layers that "layer_types" calls conv (LFM2)
    conv_size: Key | None = None
    # Layers that "layer_types" calls linear_attention, by default all but every n-th ("full_attention_interval"), have
    # the gated delta rule instead of attention: with a matrix for each input (split), or two for all, ordered by key
    # head (fused). The other layers gate what attention returns.
    delta: Literal["split", "fused"] | None = None
    # Heads are wider in layers without a window, of which the last layer is one; values are normed without weights; the
    # last layers attend to keys and values of earlier ones; each layer reads an embedding, and scales its result. The
    # factor of scores is 1 (Gemma 4).
    is_layered: bool = False

    # rotary position embeddings
    theta: float = 10000.0
    partial: float | None = None  # default of ``partial_rotary_factor``; None if the family has no such setting
    is_interleaved: bool = False  # pairs are adjacent channels, not half a rotation apart
    # layers that rotate: all; those that "no_rope_layers" marks; those with a window (windowed), or all if the model
    # has none (windowed_or_all)
    rotates: Literal["all", "listed", "windowed", "windowed_or_all"] = "all"
    # default base of layers with a window, which then have RoPE settings of their own; None if all layers share one
    local_theta: Key | float | None = None
    rope: Mapping[str, Any] = field(default_factory=dict)  # default RoPE settings
    # queries of layers that do not rotate grow with their position, if "attn_temperature_tuning" is set
    tunes_temperature: bool = False

    # MLP
    activation: Key = Key("hidden_act", "silu")
    mlp_bias: bool | Key = False
    is_gated: bool = True
    is_rounded_up: bool = False  # "intermediate_size" is that of an MLP without gates, and rounded up (LFM2)
    experts: ExpertTraits | None = None

    # factors: of embeddings (``hidden_size`` ** .5 if it is "root"), of what a layer adds, and of logits
    embedding_scale: Key | Literal["root"] | None = None
    residual_scale: Key | None = None
    logit_scale: Key | None = None
    logit_divisor: Key | None = None
    logit_cap: Key | None = None

    # Settings that no code here honours, and the values at which they change nothing.
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def is_changed_by_reading(self) -> bool:
        """True if tensors are read in another form than they are stored in, so that they are not written back."""
        return self.is_interleaved or self.is_latent or self.is_layered or self.norm_offset != 0 or self.norm_bias


_BIAS = Key("attention_bias", False)
_MLP_BIAS = Key("mlp_bias", False)
_USE_BIAS = Key("use_bias", False)
_EPS5 = Key("rms_norm_eps", 1e-5)
_LAYER_EPS = Key("layer_norm_eps", 1e-5)
_ALL_EXPERTS = ExpertTraits(128, 8, has_dense_layers=True)
_DEEPSEEK = ExpertTraits(
    64, 6, size=Key("moe_intermediate_size", 1407), scale=Key("routed_scaling_factor", 1.0),
    num_dense=Key("first_k_dense_replace", 0), count="n_routed_experts", shared="mlp.shared_experts",
    num_shared=Key("n_shared_experts", 2),
)  # fmt: skip
_GRANITE: dict[str, Any] = {
    "bos": 1,
    "eos": 2,
    "qkv_bias": _BIAS,
    "o_bias": _BIAS,
    "scale": Key("attention_multiplier", 1.0),
    "embedding_scale": Key("embedding_multiplier", 1.0),
    "residual_scale": Key("residual_multiplier", 1.0),
    "logit_divisor": Key("logits_scaling", 1.0),
}

_GEMMA: dict[str, Any] = {
    "bos": 2,
    "eos": 1,
    "pad": 0,
    "is_tied": True,
    "norm_offset": 1.0,
    "qkv_bias": _BIAS,
    "o_bias": _BIAS,
    "activation": Key("hidden_act", "gelu_pytorch_tanh"),
    "embedding_scale": "root",
}
_GEMMA_2: dict[str, Any] = {
    "activation": Key("hidden_activation", "gelu_pytorch_tanh"),
    "scale": Key("query_pre_attn_scalar", 256.0),
    "scale_power": -0.5,
    "windows": "pattern",
    "names": SANDWICH,
}
_GLM: dict[str, Any] = {
    "kv_heads": 2,
    "head_dim": 128,
    "eps": Key("rms_norm_eps", 1.5625e-07),
    "eos": (151329, 151336, 151338),
    "pad": 151329,
    "partial": 0.5,
    "is_interleaved": True,
    "qkv_bias": Key("attention_bias", True),
    "names": LayerNames(gate_up=("mlp.gate_up_proj",)),
}
_COHERE: dict[str, Any] = {
    "norm": "layer",
    "eps": _LAYER_EPS,
    "bos": 5,
    "eos": 255001,
    "pad": 0,
    "is_tied": True,
    "qkv_bias": _BIAS,
    "o_bias": _BIAS,
    "is_interleaved": True,
    "logit_scale": Key("logit_scale", 0.0625),
    "names": PARALLEL,
}

_LFM2: dict[str, Any] = {
    "kv_heads": 8,
    "eps": Key("norm_eps", 1e-5),
    "bos": 1,
    "eos": 2,
    "pad": 0,
    "is_tied": True,
    "theta": 1e6,
    "qk_norm": "head",
    "conv_size": Key("conv_L_cache", 3),
    "refused": {"conv_bias": (False,)},
    "names": LayerNames(
        out="self_attn.out_proj", attention_in="operator_norm", mlp_in="ffn_norm", q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm", gate_up=("feed_forward.w1", "feed_forward.w3"), down="feed_forward.w2",
        final_norm="model.embedding_norm",
    ),
}  # fmt: skip
_QWEN_DELTA: dict[str, Any] = {
    "head_dim": 256,
    "norm_offset": 1.0,
    "partial": 0.25,
    "qkv_bias": _BIAS,
    "o_bias": _BIAS,
    "qk_norm": "head",
}

FAMILIES: Final[dict[str, Family]] = {
    "llama": Family("LlamaForCausalLM", 2048, bos=1, eos=2, qkv_bias=_BIAS, o_bias=_BIAS, mlp_bias=_MLP_BIAS),
    "mistral": Family("MistralForCausalLM", 131072, kv_heads=8, bos=1, eos=2, windows="always"),
    "mixtral": Family(
        "MixtralForCausalLM", 131072, kv_heads=8, eps=_EPS5, theta=1e6, bos=1, eos=2, window=None, windows="always",
        experts=ExpertTraits(
            8, 2, "block_sparse_moe.gate",
            tuple(f"block_sparse_moe.experts.{{e}}.{name}" for name in ("w1", "w3", "w2")),
            size=Key("intermediate_size", 0), normalise=True,
        ),
    ),
    "qwen2": Family("Qwen2ForCausalLM", 32768, kv_heads=32, windows="layer", qkv_bias=True),
    "mimo": Family("MiMoForCausalLM", 32768, kv_heads=32, windows="layer", qkv_bias=True),  # Qwen2 with MTP modules
    "qwen3": Family(
        "Qwen3ForCausalLM", 32768, kv_heads=32, head_dim=128, windows="layer", qkv_bias=_BIAS, o_bias=_BIAS,
        qk_norm="head",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", 32768, kv_heads=4, windows="switch", qkv_bias=_BIAS, o_bias=_BIAS, qk_norm="head",
        experts=_ALL_EXPERTS,
    ),
    "phi3": Family(
        "Phi3ForCausalLM", 4096, eps=_EPS5, bos=1, eos=32000, pad=32000, window=None, windows="always", partial=1.0,
        names=FUSED_QKV,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM", 32768, kv_heads=4, bos=128000, eos=128001, pad=128004, is_tied=True, qkv_bias=_BIAS,
        o_bias=_BIAS, mlp_bias=_MLP_BIAS, theta=2e6, rotates="listed", window=None, windows="unrotated",
    ),
    "granite": Family("GraniteForCausalLM", 2048, mlp_bias=_MLP_BIAS, **_GRANITE),
    "granitemoe": Family(
        "GraniteMoeForCausalLM", 2048, **_GRANITE,
        experts=ExpertTraits(
            8, 2, "block_sparse_moe.router.layer",
            ("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
            size=Key("intermediate_size", 0), scores="chosen",
        ),
    ),
    "ministral": Family("MinistralForCausalLM", 131072, kv_heads=8, bos=1, eos=2, windows="pattern"),
    "ministral3": Family(
        "Ministral3ForCausalLM", 262144, kv_heads=8, head_dim=128, eps=_EPS5, bos=1, eos=2, pad=11, window=None,
        windows="always", theta=1e6,
        rope={
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
        },
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM", 524288, kv_heads=8, head_dim=128, bos=0, eos=2, pad=1,
        qkv_bias=Key("attention_bias", True), o_bias=Key("attention_out_bias", False), mlp_bias=_MLP_BIAS,
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM", 131072, kv_heads=2, head_dim=128, eps=_EPS5, theta=5e5, bos=1, eos=2, pad=0,
        is_tied=True, qkv_bias=_USE_BIAS, o_bias=_USE_BIAS, mlp_bias=_USE_BIAS, is_interleaved=True,
    ),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM", 2048, eps=_EPS5, bos=1, eos=2, pad=0, qkv_bias=_BIAS, o_bias=_BIAS,
        qk_norm="rotated", names=LayerNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM", 2048, eps=_EPS5, eos=50279, pad=1, qkv_bias=_BIAS, o_bias=_BIAS, qk_norm="all",
        names=POST_NORMS,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM", 2048, eps=_EPS5, eos=50279, pad=1, qkv_bias=_BIAS, o_bias=_BIAS, qk_norm="all",
        windows="pattern", pattern=4, theta=5e5, local_theta=5e5, names=POST_NORMS,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM", 32768, kv_heads=16, qkv_bias=Key("qkv_bias", True), windows="alternate",
        experts=ExpertTraits(
            60, 4, has_dense_layers=True, size=Key("moe_intermediate_size", 1408), shared="mlp.shared_expert",
            shared_size=Key("shared_expert_intermediate_size", 5632), shared_gate="mlp.shared_expert_gate",
        ),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM", 4096, eps=_EPS5, eos=50279, pad=1, qkv_bias=_BIAS, o_bias=_BIAS, qk_norm="all",
        experts=ExpertTraits(64, 8, size=Key("intermediate_size", 0)), refused={"clip_qkv": ()},
    ),
    "gemma": Family(
        "GemmaForCausalLM", 8192, kv_heads=16, head_dim=256, **_GEMMA,
        refused={"use_bidirectional_attention": (False,)},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", 8192, kv_heads=4, head_dim=256, **{**_GEMMA, **_GEMMA_2}, pattern=2,
        score_cap=Key("attn_logit_softcapping", 50.0), logit_cap=Key("final_logit_softcapping", 30.0),
        refused={"use_bidirectional_attention": (False,)},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", 131072, kv_heads=4, head_dim=256, **{**_GEMMA, **_GEMMA_2}, qk_norm="head",
        pattern=Key("sliding_window_pattern", 6), theta=1e6, local_theta=Key("rope_local_base_freq", 10000.0),
        logit_cap=Key("final_logit_softcapping", None),
        refused={"use_bidirectional_attention": (False,), "attn_logit_softcapping": ()},
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM", 131072, kv_heads=4, head_dim=256,
        **{**_GEMMA, **_GEMMA_2, "norm_offset": 0.0, "scale": None, "scale_power": 1.0}, qk_norm="head", window=512,
        pattern=6, theta=1e6, local_theta=10000.0, is_layered=True, logit_cap=Key("final_logit_softcapping", None),
        rope={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        experts=ExpertTraits(
            0, 0, router="router.proj",
            matrices=("experts.{e}.gate_proj", "experts.{e}.up_proj", "experts.{e}.down_proj"),
            size=Key("moe_intermediate_size", 0), normalise=True, per_token="top_k_experts",
            beside="enable_moe_block", router_scale="router.scale", expert_scale="router.per_expert_scale",
        ),
        refused={"use_bidirectional_attention": ("vision",)},
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM", 2048, kv_heads=32, eps=_EPS5, bos=0, eos=2, qk_norm="head", windows="pattern",
        pattern=Key("sliding_window_pattern", 4), rotates="windowed_or_all", names=POST_NORMS,
    ),
    "glm": Family("GlmForCausalLM", 131072, **_GLM),
    "glm4": Family(
        "Glm4ForCausalLM", 131072,
        **{
            **_GLM,
            "names": replace(
                _GLM["names"], attention_out="post_self_attn_layernorm", mlp_out="post_mlp_layernorm"
            ),
        },
    ),
    "cohere": Family("CohereForCausalLM", 8192, **_COHERE, theta=5e5, refused={"use_qk_norm": (False,)}),
    "cohere2": Family(
        "Cohere2ForCausalLM", 8192, **_COHERE, windows="pattern", pattern=Key("sliding_window_pattern", 4),
        rotates="windowed",
    ),
    "stablelm": Family(
        "StableLmForCausalLM", 4096, kv_heads=32, norm="layer", norm_bias=True, eps=_LAYER_EPS, bos=0, eos=0,
        partial=0.25, qkv_bias=Key("use_qkv_bias", False),
        refused={"qk_layernorm": (False,), "use_parallel_residual": (False,)},
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM", 4096, kv_heads=2, norm="layer", norm_bias=True, eps=Key("norm_epsilon", 1e-5),
        bos=50256, eos=50256, is_tied=True, window=None, windows="always",
        qkv_bias=Key("use_bias", True), o_bias=Key("use_bias", True), mlp_bias=Key("use_bias", True), is_gated=False,
        activation=Key("hidden_act", "gelu_pytorch_tanh"), names=LayerNames(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
    ),
    "nemotron": Family(
        "NemotronForCausalLM", 4096, norm="layer", norm_bias=True, norm_offset=1.0, eps=Key("norm_eps", 1e-5), bos=2,
        eos=3, partial=0.5, qkv_bias=_BIAS, o_bias=_BIAS, mlp_bias=_MLP_BIAS, is_gated=False,
        activation=Key("hidden_act", "relu2"), names=LayerNames(gate_up=("mlp.up_proj",)),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM", 131072, kv_heads=8, head_dim=64, eps=_EPS5, qkv_bias=Key("attention_bias", True),
        o_bias=Key("attention_bias", True), window=128, windows="pattern", pattern=2, theta=150000.0,
        rope={
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        experts=ExpertTraits(
            128, 4, "mlp.router", ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), is_transposed=True,
            size=Key("intermediate_size", 0), scores="chosen", router_bias=True,
            clamp=(Key("swiglu_alpha", 1.702), Key("swiglu_limit", 7.0)),
        ),
        names=LayerNames(sinks="self_attn.sinks"),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM", 2048, bos=1, eos=2, is_latent=True, is_interleaved=True, o_bias=_BIAS,
        mlp_bias=_MLP_BIAS, experts=replace(_DEEPSEEK, groups="max", normalise=False),
        refused={"norm_topk_prob": (False,), "mlp_bias": (False,), "moe_layer_freq": (1,)},
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM", 4096, bos=0, eos=1, is_latent=True, is_interleaved=True, o_bias=_BIAS,
        experts=replace(
            _DEEPSEEK, num=256, num_per_token=8, groups="two", size=Key("moe_intermediate_size", 2048),
            scores="sigmoid", score_bias="mlp.gate.e_score_correction_bias", normalise=Key("norm_topk_prob", True),
            scale=Key("routed_scaling_factor", 2.5), num_dense=Key("first_k_dense_replace", 3),
            num_shared=Key("n_shared_experts", 1), num_groups=(8, 4),
        ),
        refused={"rope_interleave": (True,), "moe_layer_freq": (1,)},
    ),
    "llama4_text": Family(
        "Llama4ForCausalLM", 131072, kv_heads=8, head_dim=128, eps=_EPS5, bos=1, eos=2, qkv_bias=_BIAS, o_bias=_BIAS,
        qk_norm="unweighted", uses_qk_norm=Key("use_qk_norm", True), window=8192, windows="chunked", theta=5e5,
        is_interleaved=True, rotates="listed", tunes_temperature=True,
        experts=ExpertTraits(
            16, 1, "feed_forward.router", ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
            is_transposed=True, size=Key("intermediate_size", 8192), dense_size=Key("intermediate_size_mlp", 16384),
            scores="sigmoid", normalise=False, scales_input=True, every=Key("interleave_moe_layer_step", 1),
            shared="feed_forward.shared_expert", shared_size=Key("intermediate_size", 8192),
        ),
        names=LayerNames(
            gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj"
        ),
    ),
    "arcee": Family(
        "ArceeForCausalLM", 4096, eps=_EPS5, bos=128000, eos=128001, qkv_bias=_BIAS, o_bias=_BIAS, mlp_bias=_MLP_BIAS,
        is_gated=False, activation=Key("hidden_act", "relu2"), names=LayerNames(gate_up=("mlp.up_proj",)),
    ),
    "lfm2": Family("Lfm2ForCausalLM", 128000, is_rounded_up=True, **_LFM2),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM", 128000, **{**_LFM2, "refused": {**_LFM2["refused"], "use_expert_bias": (True,)}},
        experts=ExpertTraits(
            32, 4, "feed_forward.gate", tuple(f"feed_forward.experts.{{e}}.{name}" for name in ("w1", "w3", "w2")),
            size=Key("moe_intermediate_size", 1792), scores="sigmoid", score_bias="feed_forward.expert_bias",
            normalise=Key("norm_topk_prob", True), sum_eps=1e-6, scale=Key("routed_scaling_factor", 1.0),
            num_dense=Key("num_dense_layers", 2),
        ),
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM", 131072, kv_heads=4, eps=_EPS5, theta=5e5, bos=1, eos=2, pad=0, is_tied=True,
        is_interleaved=True,
        experts=ExpertTraits(
            64, 6, size=Key("moe_intermediate_size", 1536), score_bias="mlp.moe_statics.e_score_correction_bias",
            normalise=True, num_dense=Key("moe_layer_start_index", 1), last_sparse=Key("moe_layer_end_index", -1),
            count="moe_num_experts", per_token="moe_k", shared="mlp.shared_experts",
            num_shared=Key("moe_num_shared_experts", 2),
        ),
        refused={"moe_layer_interval": (1,), "moe_norm_min": (1e-12,), "use_bias": (False,)},
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM", 131072, kv_heads=8, eps=_EPS5, partial=0.5, qkv_bias=_BIAS, qk_norm="head",
        uses_qk_norm=Key("use_qk_norm", False),
        experts=replace(
            _DEEPSEEK, num=128, num_per_token=8, groups="two", size=Key("moe_intermediate_size", 1408),
            scores="sigmoid", score_bias="mlp.gate.e_score_correction_bias", normalise=Key("norm_topk_prob", True),
            num_dense=Key("first_k_dense_replace", 1), num_shared=Key("n_shared_experts", 1),
        ),
    ),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", 32768, kv_heads=4, delta="split", **_QWEN_DELTA),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM", 32768, kv_heads=2, delta="split", **_QWEN_DELTA,
        experts=ExpertTraits(
            256, 8, size=Key("moe_intermediate_size", 512), shared="mlp.shared_expert",
            shared_size=Key("shared_expert_intermediate_size", 512), shared_gate="mlp.shared_expert_gate",
            normalise=True,
        ),
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM", 32768, kv_heads=2, delta="fused", **_QWEN_DELTA,
        experts=ExpertTraits(
            512, 10, has_dense_layers=True, size=Key("moe_intermediate_size", 512), shared="mlp.shared_expert",
            shared_size=Key("shared_expert_intermediate_size", 512), shared_gate="mlp.shared_expert_gate",
            normalise=Key("norm_topk_prob", True),
        ),
    ),
}  # fmt: skip

# Not a set: a damaged config may have a list where the name belongs, which cannot be looked up in one.
LEAN_MODEL_TYPES: tuple[str, ...] = tuple(sorted(FAMILIES))

# Multimodal models whose ``text_config`` may be of a family above. Without images or audio they compute the text model.
# Left out are PaliGemma, which reads its prompt in both directions, and Cohere's, which do not scale logits.
WRAPPERS: Final = (
    "deepseek_vl", "exaone4_5", "gemma3", "gemma4", "granite_speech", "idefics2", "idefics3", "internvl", "janus",
    "lfm2_vl", "llama4", "llava", "llava_next", "llava_next_video", "llava_onevision", "mistral3", "ovis2",
    "qwen2_audio", "qwen3_5", "qwen3_5_moe", "smolvlm", "video_llama_3", "video_llava", "vipllava", "voxtral",
)  # fmt: skip
