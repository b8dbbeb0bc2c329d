"""The doctor: a sound head passes, and every trap is found by the check that is named for it, and by no other."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import add_tokenizer
from draftwing.formats.doctor import CHECKS, diagnose
from draftwing.formats.identity import chat_template_hash, target_id_of_folder
from draftwing.formats.read import Head
from draftwing.formats.write import convert, save_head, write_head
from draftwing.methods.eagle_net import EagleConfig, EagleNet, tensor_shapes
from draftwing.models.config import ModelConfig, read_config
from draftwing.models.linear import Linear

VOCAB, HIDDEN, LAYERS, DRAFT = 300, 32, 8, 100
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
KEPT = torch.cat([torch.arange(60), torch.arange(70, 109), torch.tensor([299])])  # with the end token, 2


@pytest.fixture(scope="module")
def target(folder_of, tmp_path_factory):
    model = folder_of("llama", vocab_size=VOCAB, num_hidden_layers=LAYERS, rope_theta=500000.0)
    folder = shutil.copytree(model, tmp_path_factory.mktemp("doctor") / "model")
    return add_tokenizer(folder, VOCAB, chat_template=TEMPLATE)


@pytest.fixture
def training(target):
    return {"chat_template": chat_template_hash(target), "coverage": 0.98}


def net_for(target, version=3, dtype=torch.float32, **changes):
    config = EagleConfig.for_target(
        version, ModelConfig.from_hf(read_config(target)), changes.pop("draft_vocab_size", DRAFT), **changes
    )
    config = replace(config, target=target_id_of_folder(target))
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"].to(dtype)
    torch.manual_seed(0)
    return EagleNet(config, embedding, Linear(embedding), KEPT if config.has_draft_vocab else None, dtype)


@pytest.fixture
def head(target, training, tmp_path):
    write_head(tmp_path / "head", net_for(target), training=training)
    return tmp_path / "head"


@pytest.fixture
def first(target, training, tmp_path):
    write_head(tmp_path / "first", net_for(target, 1), training=training)
    return tmp_path / "first"


def set_config(folder, *drop, **changes):
    file = folder / "config.json"
    found = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in found.items() if key not in drop}))


def set_block(folder, *drop, **changes):
    block = {**json.loads((folder / "config.json").read_text())["draftwing"], **changes}
    set_config(folder, draftwing={key: value for key, value in block.items() if key not in drop})


def set_weights(folder, **changes):
    weights = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: each for name, each in weights.items() if each is not None}, folder / "model.safetensors")


def config(*drop, **changes):
    return lambda head: set_config(head, *drop, **changes)


def block(*drop, **changes):
    return lambda head: set_block(head, *drop, **changes)


def both(one, other):
    return lambda head: (one(head), other(head))


def weights(**changes):
    return lambda head: set_weights(head, **{name.replace("__", "."): tensor for name, tensor in changes.items()})


def troubles(folder, target=None):
    """Every finding that is not ok, by name."""
    return {finding.name: finding for finding in diagnose(folder, target) if finding.status != "ok"}


def found(folder, target, name, status, *parts):
    """Exactly one finding is not ok; it has the name and the status, and its text has the parts and a fix."""
    wrong = troubles(folder, target)
    assert list(wrong) == [name], wrong
    finding = wrong[name]
    assert finding.status == status, finding
    for part in parts:
        assert part in f"{finding.detail} -> {finding.fix}", finding
    assert finding.fix


# --- sound heads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("version", "changes"),
    [
        (1, {}),
        (3, {}),
        (3, {"draft_vocab_size": None}),
        (3, {"fc_norm": True, "norm_output": True}),
        (3, {"taps": (1, 3, 6)}),
    ],
)
def test_a_sound_head_passes(target, training, tmp_path, version, changes, dtype):
    write_head(tmp_path / "head", net_for(target, version, dtype, **changes), training=training)
    findings = diagnose(tmp_path / "head", target)
    assert [(finding.name, finding.detail) for finding in findings if finding.status != "ok"] == []
    assert len(findings) == len(CHECKS) == len({finding.name for finding in findings})
    assert all(finding.detail and not finding.fix for finding in findings)


@pytest.mark.parametrize("layout", ["eagle", "vllm", "sglang", "speculators"])
@pytest.mark.parametrize("version", [1, 3])
def test_a_sound_export_passes(target, head, first, tmp_path, version, layout):
    if (version, layout) == (1, "speculators"):
        return
    convert(head if version == 3 else first, tmp_path / "out", layout)
    assert troubles(tmp_path / "out", target) == {}


def test_without_a_target_nothing_is_guessed(head):
    wrong = troubles(head)
    assert {finding.status for finding in wrong.values()} == {"unknown"}
    assert set(wrong) == {
        "rope-theta", "max-positions", "hidden-size", "num-layers", "vocabulary", "chat-template"
    }  # fmt: skip
    assert all(finding.fix == "give the target's folder" for finding in wrong.values())


def test_a_foreign_head_leaves_some_things_open(target, head):
    set_config(head, "draftwing")
    wrong = troubles(head, target)
    assert {name: finding.status for name, finding in wrong.items()} == dict.fromkeys(
        ("draft-coverage", "num-layers", "vocabulary", "chat-template"), "unknown"
    )
    assert "the text that they were chosen for is not named" in wrong["draft-coverage"].detail
    assert "does not name its target's tokenizer" in wrong["vocabulary"].detail


# --- folders that cannot be read -------------------------------------------------------------------------------------


def test_nothing_about_a_head_raises(target, head, tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        wrong = troubles(folder, target)
        assert wrong["config"].status == wrong["weights"].status == "fail"
        assert wrong["missing-tensors"].status == "unknown"
    (head / "config.json").write_text("{")
    assert "expected JSON" in troubles(head, target)["config"].detail
    model = troubles(target, target)
    assert model["config"].status == "fail"
    assert "without an fc.weight among them: is this a language model's folder" in model["config"].detail


def test_damaged_weights(target, head):
    whole = (head / "model.safetensors").read_bytes()
    (head / "model.safetensors").write_bytes(whole[:-50])
    assert "truncated or corrupt" in troubles(head, target)["weights"].detail
    (head / "model.safetensors").write_bytes(whole)
    torch.save({}, head / "pytorch_model.bin")
    found(head, target, "weights", "warn", "side by side", "remove the older one")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (config(num_hidden_layers=2), "says `num_hidden_layers` 2, but the tensors are those of 1"),
        (lambda head: set_block(head, version=1), "those of EAGLE-3"),
        (config(hidden_size="wide"), "`hidden_size` must be an integer"),
    ],
)
def test_a_config_of_another_kind(target, head, change, part):
    change(head)
    wrong = troubles(head, target)["config"]
    assert (wrong.status, part in wrong.detail) == ("fail", True)


def test_a_model_type_beside_speculators(target, head, tmp_path):
    convert(head, tmp_path / "out", "speculators")
    set_config(tmp_path / "out", model_type="llama")
    found(tmp_path / "out", target, "config", "warn", "misses the format", "remove the outer `model_type`")


# --- one change, one finding -----------------------------------------------------------------------------------------


TAP_IDS, USUAL, OTHER_TAPS = "eagle_aux_hidden_state_layer_ids", [1, 3, 4], [0, 2, 5]
NESTED, OTHER_NESTED = ({"use_aux_hidden_state": True, TAP_IDS: taps} for taps in (USUAL, OTHER_TAPS))
OFF_BY_ONE, LAST = {TAP_IDS: USUAL}, {TAP_IDS: [2, 4, LAYERS]}
ONES, TWO, NAN = torch.ones(HIDDEN), torch.ones(2), torch.full((HIDDEN,), float("nan"))
LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "case",
    [
        (weights(midlayer__hidden_norm__weight=None), "missing-tensors", "fail", "1 missing: midlayer.hidden", "take"),
        (weights(fc_norm__0__weight=ONES, more=TWO), "unknown-tensors", "fail", "2 that", "fc_norm.0.weight, more"),
        (weights(norm__weight=ONES[1:]), "shapes", "fail", "1 differ from", "norm.weight (31,) for (32,)", "place"),
        (weights(norm__weight=NAN), "finite", "fail", "NaN or infinity in norm.weight", "bfloat16"),
        (weights(d2t=KEPT.clone()), "draft-map", "fail", "target ids, not offsets", "draftwing convert"),
        (config("rope_theta"), "rope-theta", "warn", "missing: all engines take 10000, the target has 500000", "add"),
        (config(rope_theta=1e4), "rope-theta", "warn", "10000, the target has 500000", "compare acceptance"),
        (config(rope_scaling=LINEAR), "rope-theta", "warn", "type 'linear', the target's is 'default'", "rope_scaling"),
        (config(max_position_embeddings=128), "max-positions", "warn", "128 tokens, the target has 256", "to 256"),
        (config(bias=True), "fc-bias", "fail", "biases in attention", "there is no fc.bias either"),
        (config(attention_bias=True), "attention-bias", "warn", "none, but config.json has `attention_bias`", "false"),
        (config(tie_word_embeddings=True), "lm-head", "warn", "SGLang then reads the embedding", "set it to false"),
        (config(eagle_config=NESTED), "taps", "warn", "(1, 3, 4), the outputs", "for inputs", "these are the defaults"),
        (both(block(taps=None), config(eagle_config=OTHER_NESTED)), "taps", "warn", "read the outputs", "ask the head"),
        (both(block(taps=None), config(**OFF_BY_ONE)), "taps", "warn", "below the usual (2, 4, 5)", "one higher each"),
        (block(taps=[2, 4, 9]), "taps", "fail", "(2, 4, 9) of a target with 8 layers", "its own target"),
        (block(taps=[5, 4, 2]), "taps", "warn", "not different ones, low to high", "with Draftwing"),
    ],
    ids=lambda case: f"{case[1]}: {case[3]}",
)
def test_one_change_is_one_finding(target, head, case):
    change, name, status, *parts = case
    change(head)
    found(head, target, name, status, *parts)


# --- the draft vocabulary --------------------------------------------------------------------------------------------


def test_a_map_that_is_none(target, head):
    mask = load_file(head / "model.safetensors")["t2d"]
    set_weights(head, t2d=mask.roll(1))
    wrong = troubles(head, target)
    assert "disagree" in wrong["draft-map"].detail
    assert wrong["draft-map"].status == "fail"
    set_weights(head, d2t=None, t2d=mask)
    assert "there is no d2t" in troubles(head, target)["draft-map"].detail


def test_a_draft_vocabulary_of_other_text(target, training, head, tmp_path):
    write_head(tmp_path / "whole", net_for(target, draft_vocab_size=None), training=training)
    set_weights(tmp_path / "whole", d2t=torch.zeros(VOCAB, dtype=torch.int64))
    found(tmp_path / "whole", target, "draft-map", "warn", "vLLM stops at tensors", "leaves it out")
    set_block(head, training={"chat_template": chat_template_hash(target)})
    found(head, target, "draft-coverage", "unknown", "100 of 300 tokens", "your own prompts")
    set_block(head, training={"chat_template": chat_template_hash(target), "coverage": 0.9})
    found(head, target, "draft-coverage", "warn", "90.0% of the training text", "larger draft vocabulary")


def test_an_end_token_that_is_never_drafted(target, head):
    weights = load_file(head / "model.safetensors")
    ids = KEPT.clone()
    ids[:60] = torch.cat([torch.arange(2), torch.arange(3, 61)])  # all but 2
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ids] = True
    set_weights(head, **{**weights, "d2t": ids - torch.arange(DRAFT), "t2d": mask})
    found(head, target, "draft-coverage", "warn", "end token 2 is not among them", "has the end tokens")


# --- settings ---------------------------------------------------------------------------------------------------------


def test_a_missing_theta_that_is_right(head, folder_of, tmp_path):
    plain = folder_of("llama", vocab_size=VOCAB, num_hidden_layers=LAYERS)
    set_config(head, "rope_theta")
    assert "rope-theta" not in troubles(head, plain)


def test_a_residual_that_engines_disagree_about(target, training, head, tmp_path):
    write_head(tmp_path / "normed", net_for(target, norm_before_residual=True), training=training)
    found(tmp_path / "normed", target, "norm-before-residual", "warn", "SGLang and EAGLE's own code ignore it", "vLLM")
    convert(head, tmp_path / "out", "speculators")
    set_config(tmp_path / "out", "norm_before_residual")
    found(tmp_path / "out", target, "norm-before-residual", "warn", "missing: vLLM takes true", "add")
    set_config(head, "norm_before_residual")
    assert troubles(head, target) == {}


def test_biases(target, training, first, tmp_path):
    write_head(tmp_path / "bias", net_for(target, 1, fc_bias=True), training=training)
    assert troubles(tmp_path / "bias", target) == {}  # zeros
    set_weights(tmp_path / "bias", **{"fc.bias": torch.ones(HIDDEN)})
    found(tmp_path / "bias", target, "fc-bias", "warn", "not zero: vLLM has no place for it", "serve it with SGLang")
    set_config(tmp_path / "bias", bias=True)
    found(tmp_path / "bias", target, "fc-bias", "warn", "biases in attention", "remove `bias`")
    set_config(tmp_path / "bias", bias=False)
    wrong = troubles(tmp_path / "bias", target)
    assert (wrong["fc-bias"].status, wrong["fc-bias"].detail[:11]) == ("fail", "config.json")

    set_config(first, "bias")
    found(first, target, "fc-bias", "warn", "a random one", "set `bias` to false")


def random_head(target, training, folder, version, **changes):
    """A head of a shape for which no net is needed to write it."""
    shape = {**read_config(target), "hidden_size": changes.pop("hidden_size", HIDDEN)}
    config = EagleConfig.for_target(version, ModelConfig.from_hf(shape), DRAFT, **changes)
    config = replace(config, target=target_id_of_folder(target))
    tensors = {name: torch.randn(shape) for name, shape in tensor_shapes(config).items()}
    ids = KEPT if config.has_draft_vocab else None
    save_head(folder, Head(config, tensors, ids, training=training), "draftwing")
    return folder


def test_layers(target, training, tmp_path):
    two = random_head(target, training, tmp_path / "two", 3, num_layers=2)
    found(two, target, "layers", "warn", "EAGLE-3 of 2 layers", "SGLang drops the residual", "serve it with vLLM")
    assert troubles(random_head(target, training, tmp_path / "first", 1, num_layers=2), target) == {}


def test_biases_in_attention(target, training, tmp_path):
    third = random_head(target, training, tmp_path / "third", 3, qkv_bias=True)
    found(third, target, "attention-bias", "warn", "SGLang and EAGLE's own code drop them", "serve it with vLLM")
    first = random_head(target, training, tmp_path / "first", 1, qkv_bias=True)
    assert troubles(first, target) == {}
    set_config(first, "qkv_bias", "attention_bias")
    found(first, target, "attention-bias", "warn", "has no `qkv_bias`: EAGLE's own code drops them", "set `qkv_bias`")


def test_a_head_narrower_than_its_target(target, training, tmp_path, folder_of):
    changes = {"hidden_size": 16, "target_hidden_size": HIDDEN, "own_embedding": True}
    narrow = random_head(target, training, tmp_path / "narrow", 3, **changes)
    assert set(troubles(narrow, target)) == {"embedding"}
    wide = folder_of("llama", vocab_size=VOCAB, num_hidden_layers=LAYERS, hidden_size=64)
    assert troubles(narrow, wide)["hidden-size"].detail == "target_hidden_size 32, the target has 64"


def test_lm_heads(target, head, first):
    set_weights(first, **{"lm_head.weight": torch.randn(VOCAB, HIDDEN)})
    found(first, target, "lm-head", "warn", "vLLM stops at it", "--to vllm")
    set_weights(head, **{"lm_head.weight": None})
    assert troubles(head, target)["lm-head"].status == "fail"


# --- taps ------------------------------------------------------------------------------------------------------------


def test_taps_of_foreign_heads(target, head):
    set_config(head, **{TAP_IDS: [1, 2, 3]})
    wrong = troubles(head, target)["taps"]
    assert (wrong.status, "twice" in wrong.detail) == ("fail", True)
    set_config(head, "draftwing", **LAST)
    wrong = troubles(head, target)["taps"]
    assert (wrong.status, "before its final norm" in wrong.detail) == ("fail", True)
    set_config(head, **{TAP_IDS: [1, 3, 6]})
    wrong = troubles(head, target)["taps"]
    assert (wrong.status, "SGLang only `eagle_config`" in wrong.detail) == ("warn", True)
    assert troubles(head)["taps"].status == "unknown"


def test_a_shallow_target_has_no_three_taps(folder_of, head, tmp_path):
    set_config(head, "draftwing")
    shallow = folder_of("llama", vocab_size=VOCAB, num_hidden_layers=5, rope_theta=500000.0)
    assert "(2, 2, 2) are not different ones" in troubles(head, shallow)["taps"].detail


# --- the target ------------------------------------------------------------------------------------------------------


def test_another_target(target, head, folder_of):
    other = folder_of("llama", vocab_size=61, num_hidden_layers=5, hidden_size=64)
    wrong = troubles(head, other)
    assert {name for name, finding in wrong.items() if finding.status == "fail"} == {
        "hidden-size", "num-layers", "vocabulary"
    }  # fmt: skip
    assert wrong["hidden-size"].detail == "hidden_size 32, the target has 64"
    assert wrong["num-layers"].detail == "target.num_layers 8, the target has 5"
    assert wrong["vocabulary"].detail == "vocab_size 300, the target has 61"


def test_another_tokenizer(target, head, tmp_path):
    other = shutil.copytree(target, tmp_path / "other")
    add_tokenizer(other, VOCAB, texts=["quite other words " * 5], chat_template=TEMPLATE)
    found(head, other, "vocabulary", "fail", "another tokenizer", "ids mean other words", "trained for")
    (other / "tokenizer.json").unlink()
    (other / "tokenizer_config.json").unlink()
    (other / "chat_template.jinja").write_text(TEMPLATE)
    found(head, other, "vocabulary", "unknown", "target's folder has no tokenizer", "the same model")
    set_config(head, "draftwing")
    add_tokenizer(head, VOCAB, chat_template=TEMPLATE)  # foreign heads may bring their own
    wrong = troubles(head, target)
    assert {"vocabulary", "chat-template"}.isdisjoint(wrong)


def test_another_chat_template(target, head, tmp_path):
    other = shutil.copytree(target, tmp_path / "other")
    add_tokenizer(other, VOCAB, chat_template="{{ messages }}")
    found(head, other, "chat-template", "warn", "another template", "the template that it was trained with")
    set_block(head, training={"coverage": 0.98})
    found(head, target, "chat-template", "unknown", "does not name the template", "compare")


def test_a_copy_of_the_embedding(target, head):
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    set_weights(head, **{"embed_tokens.weight": embedding.to(torch.bfloat16)})
    assert troubles(head, target) == {}
    assert troubles(head)["embedding"].status == "unknown"
    set_weights(head, **{"embed_tokens.weight": embedding + 0.5})
    found(head, target, "embedding", "warn", "it is not the target's", "SGLang takes the target's", "outdated copy")
    set_block(head, own_embedding=True)
    found(head, target, "embedding", "warn", "config.json says so", "SGLang takes the target's")


def test_targets_of_other_families(head, folder_of):
    """What is not a lean family is still compared by its sizes."""
    wrong = troubles(head, folder_of("gpt2"))
    assert wrong["vocabulary"].detail == "vocab_size 300, the target has 61"
    assert wrong["max-positions"].status == "unknown"
    assert wrong["rope-theta"].status == "unknown"
