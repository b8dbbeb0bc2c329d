"""Models of transformers whose RoPE changes with the length, and positions that a model counts in another way."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import transformers

from conftest import SMALL, refused
from draftwing.decode import Decoder
from draftwing.errors import UnsupportedError
from draftwing.methods.base import Budget
from draftwing.models.adapter import AdapterTarget
from draftwing.models.context import FeatureSpec
from draftwing.reference import generate
from draftwing.sampling import Sampling
from known_texts import Knows

LIMIT = 24
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": LIMIT, "short_factor": [1.0] * 4,
    "long_factor": [2.0, 2.7, 3.4, 4.1],
}  # fmt: skip
PHI3 = {"sliding_window": None, "original_max_position_embeddings": LIMIT}
PHIMOE = {"num_local_experts": 4, "original_max_position_embeddings": LIMIT}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MODELS = {
    "llama-longrope": ("LlamaConfig", {"rope_parameters": {**LONG, "factor": 4.0}}),
    "phi3": ("Phi3Config", {"rope_parameters": LONG, **PHI3}),
    "phimoe": ("PhimoeConfig", {"rope_parameters": {**LONG, "short_mscale": 1.2, "long_mscale": 1.5}, **PHIMOE}),
    "llama-dynamic": ("LlamaConfig", {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT}),
}
HALF = {"partial_rotary_factor": 0.5, "short_factor": [1.0] * 2, "long_factor": [2.0, 3.4]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PROPHETNET = {
    "num_decoder_layers": 2, "num_encoder_layers": 2, "num_decoder_attention_heads": 4, "decoder_ffn_dim": 48,
    "num_encoder_attention_heads": 4, "is_decoder": True, "is_encoder_decoder": False, "num_hidden_layers": None,
}  # fmt: skip
BAMBA = {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
WITHOUT_TREES = {
    "bamba": ("BambaConfig", BAMBA),
    "bamba-dynamic": ("BambaConfig", {**BAMBA, "rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT}),
    "bamba-longrope": ("BambaConfig", {**BAMBA, "rope_parameters": {**LONG, **HALF, "factor": 4.0}}),
    "rwkv": ("RwkvConfig", {"attention_hidden_size": 32, "context_length": 256}),
}  # fmt: skip
ROBERTA = {"is_decoder": True, "type_vocab_size": 1}


def make(name, dtype=torch.float32):
    kind, extra = deepcopy((MODELS | WITHOUT_TREES)[name])  # configs write into their RoPE settings
    config = getattr(transformers, kind)(**{**SMALL, "eos_token_id": None, **extra})
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def adapter(name):
    return AdapterTarget(make(name))


def prompt_of(length):
    return [(5 * i * i + 3 * i + 7) % 60 + 1 for i in range(length)]


PROMPTS = [prompt_of(length) for length in (LIMIT - 6, LIMIT - 1, LIMIT, LIMIT + 1, LIMIT + 5)]


def written(name, prompt, count):
    """Return the text of ``generate`` from a fresh model, since dynamic RoPE remembers earlier texts."""
    ids = torch.tensor([prompt])
    return make(name).generate(ids, max_new_tokens=count, do_sample=False)[0].tolist()


def decode(target, prompts, count, drafter=None, budget=None):
    decoder, texts, accepted = Decoder(target, drafter, budget=budget), [list(prompt) for prompt in prompts], 0
    ids = [decoder.admit(prompt, Sampling(max_tokens=count, temperature=0.0, ignore_eos=True)) for prompt in prompts]
    while decoder.num_running:
        for row in decoder.step().rows:
            texts[ids.index(row.request_id)] += row.token_ids
            accepted += row.num_accepted
    return texts, accepted


RARE = ("phimoe", "bamba", "bamba-longrope", "bamba-dynamic")  # combinations of what the others have
NAMES = [pytest.param(name, marks=pytest.mark.full if name in RARE else ()) for name in (*MODELS, *WITHOUT_TREES)]


@pytest.mark.parametrize("name", NAMES)
def test_texts_across_a_limit_are_those_of_generate(name):
    """All rows at once: a longer row must not change the frequencies of the others."""
    target, count = adapter(name), 9
    expected = [written(name, prompt, count) for prompt in PROMPTS]
    assert decode(target, PROMPTS, count)[0] == expected
    if target.supports_trees:
        drafter, budget = Knows(expected, 7), Budget(4)
        texts, accepted = decode(target, PROMPTS, count, drafter, budget)
        assert texts == expected
        assert accepted > (3 if "dynamic" in name else 10)  # which drafts nothing beyond the limit
        sampling = Sampling(max_tokens=count, temperature=0.0, ignore_eos=True)
        assert PROMPTS[0] + generate(target, drafter, PROMPTS[0], sampling, budget=budget) == expected[0]


def test_phi3_also_equals_its_full_forward_beyond_the_limit():
    """generate reads the text again at the limit; llama's keeps the keys, so its cached text has no full forward."""
    model, text = make("phi3"), written("phi3", PROMPTS[0], 16)
    with torch.no_grad():
        for length in range(LIMIT, len(text)):
            assert int(model(torch.tensor([text[:length]]), use_cache=False).logits[0, -1].argmax()) == text[length]


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_are_read_again(name):
    """The prompt at once, the rest as if it had been decoded: the same keys, so the same logits and features."""
    target, prompt, rest = adapter(name), prompt_of(LIMIT - 3), [9, 4, 40, 3, 17, 8, 30]
    taps = FeatureSpec((1, 3))
    ctx = target.new_context(taps)
    features = [target.prefill(ctx, prompt)]
    row = ctx.rows[0]
    for token in [*rest, 5]:
        step = target.forward(ctx, ctx.roots())
        features.append(step.features)
        row.tokens.append(token)
        row.length += 1
        again = target.new_context(taps)
        reread = target.prefill(again, row.tokens, len(prompt))
        assert reread.shape == (1, row.length, 64)
        if not name.startswith("phi"):  # which drops the earlier keys on its way, and with them its features
            assert torch.allclose(reread, torch.cat(features, 1), atol=1e-4)
        expected = target.forward(again, again.roots())
        state = target.new_context(taps)
        target.prefill(state, row.tokens[:-1], len(prompt))
        assert torch.allclose(target.forward(state, state.roots()).logits, step.logits, atol=1e-4)
    assert torch.allclose(target.forward(ctx, ctx.roots()).logits, expected.logits, atol=1e-4)


@pytest.mark.parametrize("name", ["phi3", "llama-dynamic"])
def test_a_forward_that_fails_halfway(name):
    """Its layers have changed some of the cache; the next step must not see that."""
    model = make(name)
    target = adapter(name)
    last = [module for module in target.model.modules() if module.__class__.__name__.endswith("DecoderLayer")][-1]
    expected = written(name, PROMPTS[0], 12)
    decoder, text = Decoder(target), list(PROMPTS[0])
    decoder.admit(text, Sampling(max_tokens=12, temperature=0.0, ignore_eos=True))
    while decoder.num_running:
        hook = last.register_forward_pre_hook(lambda *_: 1 / 0)
        if len(text) % 3 == 0 and len(text) > len(PROMPTS[0]):
            with pytest.raises(ZeroDivisionError):
                decoder.step()
        hook.remove()
        text += decoder.step().rows[0].token_ids
    assert text == expected
    assert model is not target.model


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 1024),
        (DYNAMIC, 1024),
        ({**YARN, "original_max_position_embeddings": 256}, 1024),
        ({**YARN, "original_max_position_embeddings": 64}, 256),
        ({**LONG, "original_max_position_embeddings": 256, "factor": 2.0}, 512),
        ({**LONG, "factor": 4.0}, 256),
        ({**LLAMA3, "original_max_position_embeddings": 64}, 256),
        (None, 256),
    ],
)
def test_contexts_that_rope_stretches(rope, length):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, rope_parameters=deepcopy(rope)))
    assert AdapterTarget(model).max_length == length


@pytest.mark.parametrize(
    ("kind", "extra", "length"),
    [
        ("GPT2Config", {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 48}, 48),
        ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 48}, 48),
        ("WhisperConfig", {"d_model": 32, "decoder_layers": 1, "encoder_layers": 1, "max_target_positions": 48}, 48),
    ],
)
def test_tables_of_positions_end_somewhere(kind, extra, length):
    """A text that fills the table, to its last position."""
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    settings = {key: value for key, value in SMALL.items() if key != "max_position_embeddings"}
    config = getattr(transformers, kind)(**{**settings, **(heads if kind == "WhisperConfig" else {}), **extra})
    target = AdapterTarget(transformers.AutoModelForCausalLM.from_config(config).eval())
    assert target.max_length == length
    assert len(decode(target, [prompt_of(9)], 100)[0][0]) == length


def test_the_model_is_as_before():
    """The check lowers limits for a moment, and dynamic RoPE has no memory of it."""
    for name in MODELS:
        model, fresh = make(name), make(name)
        AdapterTarget(model)
        assert model.config.to_dict() == fresh.config.to_dict()
        ids = torch.tensor([prompt_of(LIMIT + 5)])
        assert torch.equal(model(ids).logits, fresh(ids).logits)


# --- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["RobertaConfig", "Data2VecTextConfig"])  # XLM-RoBERTa and CamemBERT copy the first
def test_positions_from_behind_the_padding(kind):
    """generate counts them from 0, which is not what the model was trained with: its bare forward is right."""
    config = getattr(transformers, kind)(**{**SMALL, **ROBERTA, "max_position_embeddings": 40, "pad_token_id": 1})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    target = AdapterTarget(model)
    assert target.max_length == 38  # positions 0 and 1 are those of padding
    text = [4, *prompt_of(22)]
    text = [token + (token == 1) for token in text]
    ours = decode(target, [text], 50)[0][0]
    assert len(ours) == 38
    with torch.no_grad():
        for length in range(len(text), 38):
            assert int(model(torch.tensor([ours[:length]]), use_cache=False).logits[0, -1].argmax()) == ours[length]


@pytest.mark.parametrize(
    ("kind", "extra", "parts"),
    [
        ("CpmAntConfig", {"dim_head": 8, "dim_ff": 48}, ["one token at a time", "choose another model"]),
        ("ProphetNetConfig", PROPHETNET, ["one token at a time", "transformers' own generate"]),
        ("BertConfig", {"is_decoder": False}, ["returns no cache"]),
    ],
)
def test_models_that_never_match_are_refused(kind, extra, parts):
    settings = {key: value for key, value in {**SMALL, **extra}.items() if value is not None}
    config = getattr(transformers, kind)(**settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with refused(UnsupportedError, "odd: ", *parts):
        AdapterTarget(model, "odd")


def test_a_model_that_sees_later_tokens_is_refused():
    """Its cached steps cannot give the logits of its full forward."""
    model = make("llama-longrope")
    forward = model.model.forward

    def backwards(input_ids=None, **options):
        if options.get("cache") is None:
            input_ids = input_ids.flip(1)
        return forward(input_ids=input_ids, **options)

    model.model.forward = backwards
    with refused(UnsupportedError, "one token at a time", "whole text"):
        AdapterTarget(model)


def test_several_texts_in_one_config_are_refused():
    model = make("llama-dynamic")
    model.config.get_text_config = lambda: (_ for _ in ()).throw(ValueError("Multiple valid text configs"))
    with refused(UnsupportedError, "no causal LM", "Multiple valid text configs", "choose another model"):
        AdapterTarget(model)


@pytest.mark.parametrize(("dtype", "is_refused"), [(torch.float32, True), (torch.bfloat16, False)])
def test_half_precision_is_no_reason_to_refuse(dtype, is_refused):
    """Forwards of different widths may round that much there, and nowhere else."""
    model = make("bamba", dtype)
    forward = model.forward

    def rounded(*, use_cache, **options):
        output = forward(use_cache=use_cache, **options)
        output.logits = output.logits * (1.1 if use_cache else 1.0)
        return output

    model.forward = rounded
    if is_refused:
        with refused(UnsupportedError, "whole text"):
            AdapterTarget(model)
    else:
        assert AdapterTarget(model).runs_nodes_alone
