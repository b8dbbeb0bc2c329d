"""Inside transformers' ``generate``: the same tokens and stops as without, and no setting silently ignored."""

from __future__ import annotations

import gc
import inspect
import weakref

import pytest
import torch
import transformers
from transformers import AutoTokenizer, DynamicCache, GenerationConfig, GenerationMixin, StopStringCriteria
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import draftwing
from conftest import SMALL, add_tokenizer, build
from draftwing import Budget, Decoder, Sampling, hf
from draftwing.errors import (
    CheckpointError,
    ConfigError,
    DraftwingWarning,
    PromptError,
    TokenizerError,
    UnsupportedError,
)
from draftwing.formats.write import write_head
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.lookup import LookupDrafter
from draftwing.methods.net import TargetId
from draftwing.models.adapter import AdapterTarget
from draftwing.models.config import ModelConfig, read_config

VOCAB, EOS, PAD, NEW = SMALL["vocab_size"], SMALL["eos_token_id"], SMALL["pad_token_id"], 12
PROMPTS = ([4, *range(3, 15)], [9], [3, 8, 12, 5, 8, 12])
FIXED = Budget(4, 2)  # where a measured one is not the point: measuring takes longer than most tests


def inputs(prompts=PROMPTS):
    """What a tokenizer with padding_side="left" gives."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    return {"input_ids": ids, "attention_mask": mask}


ALONE = inputs(PROMPTS[:1])


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def drafts(folder_of, tmp_path_factory):
    """Every kind of draft, for a family: a draft model that often agrees, and heads that hardly ever do."""
    folder = tmp_path_factory.mktemp("drafts")

    def get(family):
        if not (folder / family).exists():
            shape = ModelConfig.from_hf(read_config(folder_of("llama")))
            target = build(family)
            torch.manual_seed(2)
            for version, changes in ((1, {}), (3, {"draft_vocab_size": 40})):
                config = EagleConfig.for_target(version, shape, **changes)
                ids = torch.arange(40) + 20 if config.has_draft_vocab else None
                adapter = AdapterTarget(target)
                net = EagleNet(config, adapter.embedding, adapter.head, ids, torch.float32)
                write_head(folder / family / f"eagle{version}", net)
            near = build(family if family != "gpt2" else "llama")
            with torch.no_grad():
                for weight in near.parameters():
                    weight.add_(0.02 * torch.randn_like(weight))
            near.save_pretrained(folder / family / "causal-lm")
        return {name: folder / family / name for name in ("causal-lm", "eagle1", "eagle3")} | {"lookup": "lookup"}

    return get


@pytest.fixture(scope="module")
def drafting(drafts):
    """A draft model, made ready once: a call examines its model and loads the draft the first time."""
    return draftwing.custom_generate(drafts("llama")["causal-lm"], budget=FIXED)


@pytest.fixture(scope="module")
def lookup():
    return draftwing.custom_generate("lookup")


def assert_same(model, fast, given=ALONE, **settings):
    """With and without: the same tokens. Returns them."""
    settings = {"max_new_tokens": NEW, **settings}
    plain = model.generate(**given, **settings)
    ours = model.generate(**given, **settings, custom_generate=fast)
    assert ours.tolist() == plain.tolist()
    assert (ours.dtype, ours.device, ours.shape) == (plain.dtype, plain.device, plain.shape)
    return ours


# --- greedy: token for token -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype", "draft"),
    [
        *(("llama", torch.float64, "lookup"), ("qwen3", torch.float32, "eagle1")),
        *(("gpt2", torch.float64, "eagle3"), ("gpt2", torch.float32, "causal-lm")),
    ],
    ids=str,
)
def test_greedy_is_what_generate_writes(drafts, family, dtype, draft):
    model = build(family).to(dtype)
    fast = draftwing.custom_generate(drafts(family)[draft], budget=FIXED)
    assert_same(model, fast)
    assert fast.stats.num_drafted > 0 or draft == "lookup"
    assert_same(model, fast, inputs(), eos_token_id=None)
    assert fast.stats.num_tokens == 3 * NEW


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [2.0, 2.7, 3.4, 4.1]}
PHI3 = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 24, "sliding_window": None}
BAMBA = {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
OTHERS = {
    "mamba": ("MambaConfig", {"state_size": 4}),
    "mamba2": ("Mamba2Config", {"head_dim": 8, "num_heads": 8, "n_groups": 1, "state_size": 8}),
    "falcon-mamba": ("FalconMambaConfig", {"state_size": 4}),
    "bamba": ("BambaConfig", BAMBA),
    "rwkv": ("RwkvConfig", {"attention_hidden_size": 32, "context_length": 256}),
    "phi3-longrope": ("Phi3Config", PHI3),
}
LIKE_MAMBA = ("mamba2", "falcon-mamba", "bamba")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in LIKE_MAMBA else ()) for name in OTHERS]
)
def test_models_with_other_caches(name):
    """States instead of keys, and a cache that generate drops on its way (Phi-3 at 24 tokens)."""
    kind, extra = OTHERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**SMALL, "eos_token_id": None, **extra})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for draft in ("none", "lookup"):
        assert_same(model, draftwing.custom_generate(draft, budget=FIXED))
    if "mamba" in name:
        cache = caches_of(model(**ALONE, use_cache=True))
        with pytest.raises(UnsupportedError, match="Draftwing has its own caches"):
            model.generate(**ALONE, **cache, custom_generate=draftwing.custom_generate("none"), max_new_tokens=2)


@pytest.mark.parametrize(
    "options",
    [
        *({"budget": budget} for budget in (Budget(2), Budget(3, 4, 9))),
        *({"rule": rule} for rule in ("block", "multi-round")),
    ],
    ids=str,
)
def test_any_budget_and_any_rule(model, drafts, options):
    fast = draftwing.custom_generate(drafts("llama")["causal-lm"], **options)
    assert_same(model, fast, inputs())
    if "budget" in options:  # otherwise measured costs decide whether anything is drafted
        assert fast.stats.num_drafted > 0
        assert fast.stats.tau > 1.1
    assert_same(model, fast)


def test_the_budget_of_a_planner(model, drafts):
    for draft in ("causal-lm", "eagle3"):
        assert_same(model, draftwing.custom_generate(drafts("llama")[draft]), inputs())


def test_a_callable_makes_the_drafter(model):
    seen = []

    def make(target):
        seen.append(target)
        return LookupDrafter(target.vocab_size, 1)

    fast = draftwing.custom_generate(make, budget=Budget(4, 2))
    assert_same(model, fast, inputs())
    assert [type(each) for each in seen] == [AdapterTarget]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_length": 30, "use_cache": False},
        {"max_new_tokens": 1},
        {"bad_words_ids": [[7], [20]], "suppress_tokens": [8, 9, 30], "repetition_penalty": 1.2},
        {"sequence_bias": {(11,): 3.0, (12,): -2.5, (13,): float("-inf")}},
        {"renormalize_logits": True, "min_length": 5},
        {"generation_config": GenerationConfig(max_new_tokens=7, eos_token_id=EOS, pad_token_id=PAD)},
        {"logits_processor": LogitsProcessorList([TopKLogitsWarper(3)])},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_settings_are_followed(model, drafting, settings):
    if "max_length" in settings or "generation_config" in settings:
        settings = {"max_new_tokens": None, **settings}
    assert_same(model, drafting, inputs(), **settings)


def test_arguments_that_change_nothing(model, lookup):
    assert_same(model, lookup, {"input_ids": inputs()["input_ids"]})  # the mask is inferred from the padding
    assert_same(model, lookup, max_new_tokens=None)
    assert_same(model, lookup, output_scores=True, output_hidden_states=True)  # which are not returned


# --- where rows end --------------------------------------------------------------------------------------------------


def ends_of(model):
    """Tokens that end the three rows at three different places."""
    plain = model.generate(**inputs(), max_new_tokens=NEW, eos_token_id=None)[:, inputs()["input_ids"].shape[1] :]
    return [int(row[3 + 4 * i]) for i, row in enumerate(plain)]


@pytest.mark.parametrize(("draft", "pad"), [("lookup", PAD), ("causal-lm", 33), ("eagle3", 33)])
def test_rows_that_end_are_filled_up(model, drafts, draft, pad):
    fast, eos = draftwing.custom_generate(drafts("llama")[draft], budget=FIXED), ends_of(model)
    found = assert_same(model, fast, inputs(), eos_token_id=[*eos, -1], pad_token_id=pad)
    assert (found[:, -1] == pad).any()
    assert_same(model, fast, inputs(), eos_token_id=eos[:1], pad_token_id=pad)


class Recorder(StoppingCriteria):
    """Ends a row when it holds a token, and keeps what it was shown."""

    def __init__(self, tokens=()):
        self.tokens, self.seen = torch.tensor([*tokens, -7]), []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.tolist(), scores))
        return torch.isin(input_ids[:, -1], self.tokens)


@pytest.mark.parametrize(("given", "eos"), [(inputs(), None), (ALONE, EOS), (inputs(), 40)], ids=["no", "one", "40"])
def test_criteria_are_shown_what_plain_decoding_shows(model, drafting, given, eos):
    settings = {"max_new_tokens": NEW, "eos_token_id": eos, "pad_token_id": PAD}
    for tokens in (ends_of(model), ends_of(model)[:1]):
        shown, texts = [], []
        for custom in (None, drafting):
            criterion = Recorder(tokens)
            more = {"stopping_criteria": StoppingCriteriaList([criterion]), "custom_generate": custom}
            texts.append(model.generate(**given, **settings, **more).tolist())
            shown.append(criterion.seen)
        assert texts[0] == texts[1]
        assert shown[0] == shown[1]


def test_times_and_lengths(model, lookup):
    found = assert_same(model, lookup, inputs(), max_time=1e-9)
    assert found.shape[1] == inputs()["input_ids"].shape[1] + 1
    for length in (5, 16, 60):
        criteria = StoppingCriteriaList([MaxLengthCriteria(length)])
        assert_same(model, lookup, stopping_criteria=criteria)


def test_stop_strings(folder_of, tmp_path):
    model = build("llama", vocab_size=300)
    tokenizer = AutoTokenizer.from_pretrained(add_tokenizer(tmp_path))
    plain = model.generate(**ALONE, max_new_tokens=NEW, eos_token_id=None)[0, ALONE["input_ids"].shape[1] :]
    piece = next(s for s in (tokenizer.decode(token) for token in plain[6:]) if s.isascii() and s.strip())
    settings = {"eos_token_id": EOS, "pad_token_id": PAD}
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [piece])])
    fast = draftwing.custom_generate("lookup", budget=FIXED)
    by_criterion = assert_same(model, fast, stopping_criteria=criteria, **settings)
    assert by_criterion.shape[1] < ALONE["input_ids"].shape[1] + NEW
    for given in (tokenizer, tmp_path, str(tmp_path)):
        fast = draftwing.custom_generate("lookup", budget=FIXED, tokenizer=given)
        ours = model.generate(**ALONE, max_new_tokens=NEW, **settings, stop_strings=piece, custom_generate=fast)
        assert ours.tolist() == by_criterion.tolist()
    fast = draftwing.custom_generate("lookup")
    with pytest.raises(UnsupportedError, match=r"stop_strings.*tokenizer=tokenizer"):
        model.generate(**ALONE, stop_strings=[piece], tokenizer=tokenizer, custom_generate=fast)


def test_the_end_of_the_context_is_told():
    model = build("gpt2", n_positions=18, max_position_embeddings=18)
    fast = draftwing.custom_generate("lookup")
    assert_same(model, fast, inputs(), max_new_tokens=5)
    with pytest.warns(DraftwingWarning, match="cut after 5 new tokens, where the model's context is full, and 9"):
        found = model.generate(**inputs(), max_new_tokens=9, custom_generate=fast, eos_token_id=None)
    assert found.tolist() == model.generate(**inputs(), max_new_tokens=5, eos_token_id=None).tolist()


# --- sampling --------------------------------------------------------------------------------------------------------

HOT = {"do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.95, "min_p": 0.02, "max_new_tokens": NEW}


def test_sampled_text_depends_on_the_seed_alone(model, drafts):
    makers = [
        draftwing.custom_generate(draft, seed=5, budget=FIXED)
        for draft in ("none", "lookup", drafts("llama")["causal-lm"], drafts("llama")["eagle3"])
    ]
    texts = [model.generate(**inputs(), **HOT, custom_generate=maker).tolist() for maker in makers]
    assert all(text == texts[0] for text in texts)
    fast = draftwing.custom_generate("lookup", seed=5)
    assert model.generate(**inputs(), **HOT, custom_generate=fast, seed=6).tolist() != texts[0]
    assert model.generate(**inputs(), **HOT, custom_generate=fast, seed=5).tolist() == texts[0]


def test_the_settings_of_sampling(model):
    fast = draftwing.custom_generate("lookup", seed=3)
    more = {"repetition_penalty": 1.2, "bad_words_ids": [[30]], "eos_token_id": None}
    found = model.generate(**ALONE, **HOT, **more, custom_generate=fast)
    decoder = Decoder(AdapterTarget(model))
    fields = {name: HOT[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    sampling = Sampling(**fields, repetition_penalty=1.2, banned_tokens=(30,), seed=3, max_tokens=NEW, ignore_eos=True)
    decoder.admit(PROMPTS[0], sampling)
    expected = [token for _ in range(NEW) for token in decoder.step().rows[0].token_ids]
    assert found[0, len(PROMPTS[0]) :].tolist() == expected


def test_torch_draws_the_seed(model, lookup):
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate(**ALONE, **HOT, custom_generate=lookup).tolist())
    texts.append(model.generate(**ALONE, **HOT, custom_generate=lookup).tolist())
    assert texts[0] == texts[1]
    assert len({str(text) for text in texts}) == 3
    state = torch.get_rng_state()
    model.generate(**ALONE, max_new_tokens=4, custom_generate=lookup)
    assert torch.equal(torch.get_rng_state(), state), "greedy decoding draws nothing"


def test_several_sequences_of_one_prompt(model):
    fast = draftwing.custom_generate("lookup", seed=1)
    found = model.generate(**inputs(), **HOT, num_return_sequences=3, custom_generate=fast)
    assert len({str(row) for row in found.tolist()}) == 9
    assert found[:, : inputs()["input_ids"].shape[1]].tolist() == inputs()["input_ids"].repeat_interleave(3, 0).tolist()


# --- streaming and outputs -------------------------------------------------------------------------------------------


class Tape:
    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard.append((value.tolist(), value.dtype, value.device.type))

    def end(self):
        self.heard.append("end")


@pytest.mark.parametrize("given", [ALONE, inputs()], ids=["one", "three"])
def test_streamers_hear_what_plain_decoding_says(model, drafts, given):
    tapes = []
    for custom in (None, draftwing.custom_generate(drafts("llama")["causal-lm"])):
        tapes.append(Tape())
        eos = {"eos_token_id": ends_of(model), "pad_token_id": PAD}
        model.generate(**given, **eos, max_new_tokens=NEW, streamer=tapes[-1], custom_generate=custom)
    assert tapes[0].heard == tapes[1].heard
    assert tapes[0].heard[-1] == "end"
    assert tapes[0].heard.count("end") == 1


def test_a_wrapper_with_our_signature_still_finds_the_streamer(model, lookup):

    def wrapped(*args, **more):
        return lookup(*args, **more)

    wrapped.__signature__ = inspect.signature(lookup)
    tape = Tape()
    model.generate(**ALONE, max_new_tokens=3, streamer=tape, custom_generate=wrapped)
    assert len(tape.heard) == 5


def test_a_streamer_is_that_of_its_own_call(model, lookup):
    """A streamer that itself calls ``generate`` does not hear what that call writes."""

    class Nested(Tape):
        def end(self):
            super().end()
            model.generate(**ALONE, max_new_tokens=3, custom_generate=lookup)

    tape = Nested()
    model.generate(**ALONE, max_new_tokens=3, streamer=tape, custom_generate=lookup)
    assert len(tape.heard) == 5


def test_return_dict(model, lookup):
    found = model.generate(
        **ALONE,
        max_new_tokens=5,
        return_dict_in_generate=True,
        use_cache=False,
        custom_generate=lookup,
    )
    assert isinstance(found, GenerateDecoderOnlyOutput)
    assert found.sequences.tolist() == model.generate(**ALONE, max_new_tokens=5).tolist()
    assert found.scores is None


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_a_model_is_examined_once_and_kept_no_longer_than_it_lives(monkeypatch, drafts):
    made = []
    monkeypatch.setattr(hf, "AdapterTarget", lambda model: made.append(AdapterTarget(model)) or made[-1])
    fast = draftwing.custom_generate(drafts("llama")["eagle3"])
    one, other = build("llama"), build("llama", seed=1)
    for model in (one, other, one):
        assert_same(model, fast, max_new_tokens=4)
    assert len(made) == 2
    assert made[0].embedding.table.data_ptr() == one.get_input_embeddings().weight.data_ptr()
    one.float()  # the drafter's features are of another type now
    assert_same(one, fast, max_new_tokens=4)
    assert len(made) == 3
    gone = weakref.ref(one)
    made.clear()
    del one, model
    gc.collect()
    assert gone() is None


def test_the_model_learns_and_its_text_with_it():
    model, fast = build("llama"), draftwing.custom_generate("lookup")
    before = assert_same(model, fast).tolist()
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(build("llama", seed=1).get_output_embeddings().weight)
    assert assert_same(model, fast).tolist() != before


# --- the tokenizer ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenized(folder_of, tmp_path_factory):
    """A model with a tokenizer, a draft model with the same one, and another with another."""
    made = {}
    for name, texts in (("model", None), ("same", None), ("other", ["quick brown foxes jump over lazy dogs"])):
        folder = made[name] = tmp_path_factory.mktemp(name)
        build("llama", vocab_size=300).save_pretrained(folder)
        add_tokenizer(folder, **({} if texts is None else {"texts": texts}))
    return made


def test_a_draft_with_another_tokenizer_is_translated(tokenized):
    model = build("llama", vocab_size=300)
    loaded = AutoTokenizer.from_pretrained(tokenized["model"])
    assert_same(model, draftwing.custom_generate(tokenized["same"], tokenizer=loaded, budget=FIXED))
    for tokenizer in (str(tokenized["model"]), loaded):
        with pytest.warns(DraftwingWarning, match="another tokenizer than the target"):
            assert_same(model, draftwing.custom_generate(tokenized["other"], tokenizer=tokenizer, budget=FIXED))
    assert_same(model, draftwing.custom_generate(tokenized["other"], budget=FIXED))  # not known, and still exact
    with pytest.raises(TokenizerError, match=r"expected a fast tokenizer .* found .*object.*: give the model's folder"):
        assert_same(model, draftwing.custom_generate(tokenized["same"], tokenizer=object()))


def test_a_head_for_another_tokenizer_is_refused(tokenized, tmp_path):
    model = build("llama", vocab_size=300)
    loaded = AutoTokenizer.from_pretrained(tokenized["model"])
    target = AdapterTarget(model)
    shape = ModelConfig.from_hf(read_config(tokenized["model"]))
    own = hf.Tokenizer(tokenized["model"]).vocab_hash
    for name, vocab_hash in (("right", own), ("wrong", "0" * 16)):
        known = TargetId("m", SMALL["hidden_size"], SMALL["num_hidden_layers"], 300, vocab_hash)
        config = EagleConfig.for_target(3, shape, target=known)
        write_head(tmp_path / name, EagleNet(config, target.embedding, target.head, None, torch.float32))
    for tokenizer in (tokenized["model"], loaded):
        assert_same(model, draftwing.custom_generate(tmp_path / "right", tokenizer=tokenizer, budget=FIXED))
        with pytest.raises(CheckpointError, match="vocab_hash"):
            assert_same(model, draftwing.custom_generate(tmp_path / "wrong", tokenizer=tokenizer, budget=FIXED))


# --- what is refused -------------------------------------------------------------------------------------------------


class Counts(LogitsProcessor):
    """Keeps a state, changes the scores in place, and is called once per token: bans every third one's best token."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        if len(self.lengths) % 3 == 0:
            scores[:, scores.argmax(-1)] = -float("inf")
        return scores


class TopK(TopKLogitsWarper):
    """A subclass, which may do anything."""


def alternate(batch, ids):
    """Allow other tokens for each row, place and token before."""
    return [3 + (int(ids[-1]) + shift + batch) % 40 for shift in range(0, 20, 2)] + [EOS]


REPLAYED = {
    "least new": {"min_new_tokens": 9, "bad_words_ids": [[3, 4], [9, 4]]},
    "prefix": {"prefix_allowed_tokens_fn": alternate},
    "least": {"min_length": 24, "sequence_bias": {(3, 4): 1.0, (4, 9): 3.0}},
    "forced": {"forced_bos_token_id": 3, "forced_eos_token_id": 3, "remove_invalid_values": True},
    "ends": {"begin_suppress_tokens": [3, 4, 9, 12], "exponential_decay_length_penalty": (3, 1.4)},
    "order": {"sequence_bias": {(3,): 1.0}, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
}
ONE_ROW = {
    "encoder_repetition_penalty": lambda: {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": lambda: {"encoder_no_repeat_ngram_size": 2},
    "logits processor Counts": lambda: {"logits_processor": LogitsProcessorList([Counts()])},
    "logits processor TopK ": lambda: {"logits_processor": LogitsProcessorList([TopK(3)])},
}


@pytest.mark.parametrize("name", REPLAYED)
def test_processors_without_a_counterpart_are_called_as_by_generate(model, drafting, name):
    assert_same(model, drafting, inputs(), **REPLAYED[name], eos_token_id=[EOS, 17])
    assert drafting.stats.num_drafted > 0


@pytest.mark.parametrize("name", ONE_ROW)
def test_processors_of_any_kind_are_called_for_a_single_prompt(model, drafting, name):
    plain = model.generate(**ALONE, max_new_tokens=NEW, **ONE_ROW[name]())
    settings = ONE_ROW[name]()
    ours = model.generate(**ALONE, max_new_tokens=NEW, **settings, custom_generate=drafting)
    assert ours.tolist() == plain.tolist()
    with pytest.raises(UnsupportedError, match=r"with 3 prompts: .*one prompt per call") as caught:
        model.generate(**inputs(), max_new_tokens=NEW, **ONE_ROW[name](), custom_generate=drafting)
    assert name.strip() in str(caught.value)
    other = draftwing.custom_generate("lookup", rule="multi-round")
    with pytest.raises(UnsupportedError, match="use rule='match'"):
        model.generate(**ALONE, max_new_tokens=NEW, **ONE_ROW[name](), custom_generate=other)


@pytest.mark.parametrize("num_tokens", [1, 4, 7, NEW])
def test_processors_are_called_once_per_token_and_not_after_the_end(model, drafting, num_tokens):
    counts, width = Counts(), 13
    whole = model.generate(**ALONE, max_new_tokens=NEW, eos_token_id=None, logits_processor=[Counts()])[0].tolist()
    end = whole[width + num_tokens - 1]
    ours = model.generate(
        **ALONE, max_new_tokens=NEW, eos_token_id=end, logits_processor=[counts], custom_generate=drafting
    )[0].tolist()
    assert ours == whole[: whole.index(end, width) + 1]
    assert counts.lengths == list(range(width, len(ours)))


SAMPLED = {
    "typical_p": {"typical_p": 0.9},
    "epsilon_cutoff": {"epsilon_cutoff": 1e-2},
    "eta_cutoff": {"eta_cutoff": 1e-2},
    "top_h": {"top_h": 0.4},
    "top-p before the temperature": {
        "temperature": 0.5,
        "logits_processor": LogitsProcessorList([TopPLogitsWarper(0.6)]),
    },
    "two temperatures": {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)] * 2)},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_text_with_such_processors_does_not_depend_on_drafts(model, drafts, name):
    settings = {**ALONE, "max_new_tokens": NEW, "do_sample": True, "return_dict_in_generate": True}
    settings |= {"output_scores": True, "output_logits": True, "seed": 5, **SAMPLED[name]}
    makers = ("none", drafts("llama")["causal-lm"])
    plain, drafted = (
        model.generate(**settings, custom_generate=draftwing.custom_generate(draft, budget=FIXED)) for draft in makers
    )
    assert plain.sequences.tolist() == drafted.sequences.tolist()
    for one, other in zip(plain.scores, drafted.scores, strict=True):
        torch.testing.assert_close(one, other)
    start = ALONE["input_ids"].shape[1]
    tokens, raw = drafted.sequences[0, start:], torch.cat(drafted.logits)
    assert all(bool(torch.isfinite(scores[0, token])) for scores, token in zip(drafted.scores, tokens, strict=True))
    wanted = model(drafted.sequences).logits[0, start - 1 : -1]
    torch.testing.assert_close(raw.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "settings"),
    [("gpt2", {}), ("llama", {"repetition_penalty": 1.3}), ("qwen3", {"no_repeat_ngram_size": 2})],
    ids=str,
)
def test_logits_scores_and_cache_are_those_of_generate(drafts, family, settings):
    model = build(family)
    fast = draftwing.custom_generate(drafts(family)["causal-lm"], budget=FIXED)
    asked = {**ALONE, "max_new_tokens": NEW, "return_dict_in_generate": True, **settings}
    asked |= {"output_logits": True, "output_scores": True}
    plain, ours = model.generate(**asked), model.generate(**asked, custom_generate=fast)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for one, other in ((ours.logits, plain.logits), (ours.scores, plain.scores)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(caches_of(ours).values(), caches_of(plain).values(), strict=True):
        assert_same_cache(mine, theirs)
    with pytest.raises(UnsupportedError, match="output_scores=True with 3 prompts"):
        model.generate(**{**asked, **inputs()}, custom_generate=fast)


def caches_of(output):
    """An output's cache by its name, which is ``cache`` since transformers 5.24."""
    name = next(name for name in ("cache", "past_key_values", "cache_params") if output.get(name) is not None)
    return {name: output[name]}


def assert_same_cache(ours, plain):
    assert ours.get_seq_length() == plain.get_seq_length() > 0
    for mine, theirs in zip(ours.layers, plain.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys)
        torch.testing.assert_close(mine.values, theirs.values)


@pytest.mark.filterwarnings("ignore:.past_key_values")  # renamed in 5.24
@pytest.mark.parametrize(
    ("family", "given"),
    [("llama", ALONE), ("gpt2", inputs()), ("mistral-window", inputs())],
    ids=lambda value: value if isinstance(value, str) else str(len(value["input_ids"])),
)
def test_an_empty_cache_is_filled_and_a_filled_one_refused(drafts, family, given):
    model = build(family)
    fast = draftwing.custom_generate("lookup", budget=FIXED)
    theirs, mine = DynamicCache(config=model.config), DynamicCache(config=model.config)
    plain = model.generate(**given, max_new_tokens=NEW, past_key_values=theirs)
    ours = model.generate(**given, max_new_tokens=NEW, past_key_values=mine, custom_generate=fast)
    assert ours.tolist() == plain.tolist()
    assert_same_cache(mine, theirs)
    with pytest.raises(UnsupportedError, match="does not read others: pass an empty one"):
        model.generate(**given, max_new_tokens=NEW, past_key_values=mine, custom_generate=fast)


REFUSED = {
    "num_beams": {"num_beams": 2},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "cache_implementation": {"cache_implementation": "static"},
    "prefill_chunk_size": {"prefill_chunk_size": 4},
    "guidance_scale": {"guidance_scale": 1.5},
    "assistant_model": {"assistant_model": build("llama")},
    "synced_gpus": {"synced_gpus": True},
    "output_attentions": {"return_dict_in_generate": True, "output_attentions": True},
    "output_hidden_states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, len(PROMPTS[0]), SMALL["hidden_size"]).double()},
    "position_ids": {"position_ids": torch.arange(len(PROMPTS[0]))[None] + 1},
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_settings_are_refused_by_name(model, name, lookup):
    with pytest.raises(UnsupportedError) as caught:
        model.generate(**ALONE, max_new_tokens=9, **REFUSED[name], custom_generate=lookup)
    assert name in str(caught.value)
    assert any(mend in str(caught.value) for mend in ("leave", "without custom_generate", "draftwing.custom_generate"))


def test_a_model_sharded_over_processes_is_refused(monkeypatch, model):
    """``generate`` does not hand over ``synced_gpus``, so it is the cause that is looked at."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    fast = draftwing.custom_generate("lookup")
    assert_same(model, fast)  # two processes with a whole model each
    monkeypatch.setattr(transformers.integrations.fsdp, "is_fsdp_managed_module", lambda module: True)
    with pytest.raises(UnsupportedError, match=r"sharded over processes \(synced_gpus\).*without custom_generate"):
        model.generate(**ALONE, max_new_tokens=3, synced_gpus=False, custom_generate=fast)


def test_padding_elsewhere_and_training_are_refused(model):
    fast = draftwing.custom_generate("lookup")
    given = inputs()
    for hidden in (-1, 5):
        mask = torch.ones_like(given["attention_mask"])
        mask[1, hidden] = 0
        with pytest.raises(UnsupportedError, match=r"hides tokens of row 1 .*padding_side='left'"):
            model.generate(given["input_ids"], attention_mask=mask, custom_generate=fast)
    with pytest.raises(PromptError, match="the prompt is empty"):
        model.generate(given["input_ids"], attention_mask=given["attention_mask"] * 0, custom_generate=fast)
    with pytest.raises(UnsupportedError, match=r"call model\.eval\(\)"):
        build("gpt2").train().generate(**ALONE, custom_generate=fast)


@pytest.mark.parametrize("draft", ["lookup", "none"])
def test_a_model_without_tree_masks_runs_paths(draft, monkeypatch, model):
    monkeypatch.setattr(AdapterTarget, "is_tree_exact", lambda self: False)
    assert_same(model, draftwing.custom_generate(draft))


def test_unknown_and_lossy_rules_are_refused():
    with pytest.raises(ConfigError, match="unknown acceptance rule"):
        draftwing.custom_generate("lookup", rule="mach")
    with pytest.raises(ConfigError):
        draftwing.custom_generate("lookup", rule="typical")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"draft": object()}, "draft must be a folder, name or hub id, or a function of a target, found"),
        ({"draft": ""}, "draft must not be empty"),
        ({"budget": object()}, "budget must be a Budget or None"),
        ({"lossless": "no"}, "lossless must be True or False, found 'no'"),
        ({"seed": -1}, r"seed must be None or an int in \[0, 2\*\*63\), found -1"),
        ({"seed": 2**63}, "seed must be None or an int in"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused_at_once(options, parts):
    with pytest.raises(ConfigError, match=parts):
        draftwing.custom_generate(**{"draft": "lookup", **options})
    with pytest.raises(TokenizerError, match="expected a fast tokenizer"):
        draftwing.custom_generate("lookup", tokenizer=object())


def test_a_function_that_makes_no_drafter_is_refused(model):
    with pytest.raises(ConfigError, match="must return a Drafter, found 5"):
        model.generate(**ALONE, custom_generate=draftwing.custom_generate(lambda target: 5))


def test_every_refused_setting_exists():
    """A setting under a wrong name would be looked for in vain."""
    known = {*vars(GenerationConfig()), *inspect.signature(GenerationMixin.generate).parameters}
    assert not set(hf.SETTINGS) - known
    named = {value.split(" ")[0] for value in hf.SETTING_OF.values()}
    assert not named - known
