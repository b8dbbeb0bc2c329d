"""Multi-token prediction: modules out of a target's checkpoint, their forward and their loss against references."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import mtp_files
from conftest import SMALL, build, kernel_size, refused
from draftwing.decode import Decoder
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.loading import load_drafter, load_target
from draftwing.methods.base import Budget
from draftwing.methods.mtp import LAMBDA, MtpConfig, MtpLoss, MtpNet, read_modules
from draftwing.methods.objectives import OBJECTIVES, Truth
from draftwing.models.attention import CausalAttention
from draftwing.models.config import RopeConfig, read_config
from draftwing.models.lean import LeanTarget
from draftwing.models.linear import Linear
from draftwing.noise import KeyedNoise
from draftwing.runtime.forward import Entries
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.train.data import Batch
from draftwing.train.features import FeatureBatch
from draftwing.tree import PAD, DraftTree

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


# Experts with latent attention, experts with gated attention between recurrent layers, norms that hold 1 + w, and norms
# after attention and MLP.
OWN_LAYERS = {
    "deepseek-v3": ("deepseek", {}),
    "glm4-moe": ("deepseek", {}),
    "qwen3-next": ("qwen", {"layer_types": ["linear_attention", "full_attention"] * 2, "mlp_only_layers": []}),
    "olmo2": ("deepseek", {}),
}


def by_transformers(model, weights, tokens, states):
    """A module over a text, (T, H), whose decoder layer is the last one of a transformers model."""
    inner = model.model
    inner.layers = nn.ModuleList([inner.layers[-1]])
    model.config.layer_types = ["full_attention"]

    def norm(name):
        made = copy.deepcopy(inner.norm)
        made.weight = nn.Parameter(weights[name])
        return made

    both = torch.cat([norm("enorm")(tokens), norm("hnorm")(states)], -1) @ weights["join"].T
    inner.norm = norm("norm")
    with torch.no_grad():
        return inner(inputs_embeds=both[None], use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize("family", OWN_LAYERS)
def test_modules_with_the_targets_own_layers(family, tmp_path):
    """In PyTorch and in the kernel; they draft the target's text."""
    layout, changes = OWN_LAYERS[family]
    changes = {**kernel_size(family), **changes}
    (weights,) = mtp_files.write_target(tmp_path, layout, 1, family, **changes)
    model = build(family, num_hidden_layers=mtp_files.LAYERS + 1, **changes)
    tokens = model.get_input_embeddings()(torch.tensor(PROMPT)).detach()
    states = 3 * torch.randn(tokens.shape).double()
    wanted = by_transformers(model, weights, tokens, states)
    for dtype in ("float64", "float32"):
        target = load_target(tmp_path, dtype=dtype)
        net = read_modules(tmp_path, target.embedding, target.head, dtype=target.dtype).prepack()
        assert net.runs.name == target.runtime
        chain = DraftTree.chain(torch.tensor([PROMPT]))
        _, out = net.runs.runner(net, net).forward(Entries(chain, [0], states=states[None].to(target.dtype)))
        # Not closer: transformers norms in float32 alone.
        torch.testing.assert_close(out[0].double(), wanted, rtol=1e-4, atol=1e-4)
    texts = []
    for drafter in (None, load_drafter("mtp", target, None)()):
        decoder = Decoder(target, drafter, budget=Budget(3, 2))
        decoder.admit(PROMPT, Sampling(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True))
        steps = [decoder.step() for _ in range(12) if decoder.num_running]
        texts.append([token for step in steps for token in step.rows[0].token_ids])
    assert texts[0] == texts[1]
    assert any(step.tree.num_nodes > 1 for step in steps)


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


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name not in ("deepseek", "mimo", "qwen")])
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
        decoder.admit(PROMPT, Sampling(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True))
        texts.append([token for _ in range(12) if decoder.num_running for token in decoder.step().rows[0].token_ids])
    assert texts[0] == texts[1]
    assert len(texts[0]) == 12


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


MIMO = "model.mtp_layers.0.{}.weight".format


@pytest.mark.parametrize(
    ("name", "change", "kind", "parts"),
    [
        *(
            ("deepseek", {f"model.layers.3.{odd}": torch.ones(HIDDEN)}, UnsupportedError, [odd, "draft with lookup"])
            for odd in ("mlp.experts.0.gate_proj.weight", "self_attn.q_norm.weight")
        ),
        *(
            (
                "deepseek", {f"model.layers.3.{part}.weight": torch.ones(VOCAB, HIDDEN).double()}, UnsupportedError,
                [f"model.layers.3.{part}.weight is not the target's {original}.weight"],
            )
            for part, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head"))
        ),
        ("mimo", {MIMO("final_layernorm"): None}, CheckpointError, ["final_layernorm.weight is missing"]),
        (
            "mimo", {MIMO("self_attn.o_proj"): torch.ones(3, 4)}, CheckpointError,
            ["model.mtp_layers.0.self_attn.o_proj.weight must have shape (32, 32), found (3, 4)"],
        ),
        (
            "mimo", {MIMO("input_proj"): torch.full((32, 64), torch.nan)}, CheckpointError,
            ["input_proj.weight", "NaN"],
        ),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_run(name, change, kind, parts, target_of, tmp_path):
    """Layers that are not dense, an embedding or LM head other than the target's, and damage."""
    place = shutil.copytree(target_of(name)[0], tmp_path / "changed")
    mtp_files.change_tensors(place, **change)
    with refused(kind, *parts):
        load_drafter("mtp", load_target(place), None)


def test_an_architecture_whose_layers_we_lack(tmp_path):
    """The target is decoded all the same; its modules are refused by the architecture's name."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.PhiConfig(**SMALL)).float()
    model.save_pretrained(tmp_path)
    mtp_files.change_tensors(tmp_path, **{"model.layers.3.eh_proj.weight": torch.randn(HIDDEN, 2 * HIDDEN)})
    mtp_files.change_config(tmp_path, num_nextn_predict_layers=1)
    with refused(UnsupportedError, "MTP modules of PhiForCausalLM cannot be run", "draft with lookup"):
        load_drafter("mtp", load_target(tmp_path), None)


# --- the loss --------------------------------------------------------------------------------------------------------


def tiny_net(modules, **changes):
    torch.manual_seed(4)
    rope = RopeConfig("default", 10000.0, 8, 8, 64)
    sizes = {"intermediate_size": 10, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6}
    config = MtpConfig(
        (3,), 13, 12, rope, num_modules=modules, activation="silu", **{**sizes, "qk_norm": True, **changes}
    )
    head = Linear(torch.randn(13, 12).double())
    net = MtpNet(config, torch.randn(13, 12).double(), head, dtype=torch.float64)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return net, head


def scored(head):
    """Three rows of 9, 7 and 4 tokens, of which some do not count."""
    torch.manual_seed(6)
    lengths = torch.tensor([9, 7, 4])
    ids = torch.randint(13, (3, 9)) * (torch.arange(9) < lengths[:, None])
    mask = (torch.rand(3, 9) < 0.8) & (torch.arange(9) < lengths[:, None])
    features, last = torch.randn(3, 9, 12).double(), torch.randn(3, 9, 12).double()
    return FeatureBatch(Batch(ids, mask, lengths), features, last, last @ head.weight.T)


def loss_by_hand(net, found, judge, agreed):
    """lambda / D * the sum over modules of the mean over what counts: one text and one entry at a time.

    ``judge``: what a guess is worth, of its logits, the row and the position guessed; None if it does not count.
    ``agreed`` gets the logits and the target's best token of each guess that counts, module by module.
    """
    total, num = 0, net.config.num_modules
    states = [found.features[row] for row in range(3)]
    for k, module in enumerate(net.modules_in_order, 1):
        weights, terms, pairs = mtp_files.weights_of(module, heads_of(net)), [], []
        for row in range(3):
            ids = found.batch.ids[row]
            tokens = net.embedding.plain()[ids[k:]]  # entry i reads token i + k
            states[row] = mtp_files.by_hand(weights, tokens, states[row][: len(tokens)], heads_of(net))
            for i in range(len(tokens)):
                guessed = i + k + 1
                if guessed < 9 and found.batch.mask[row, guessed]:
                    logits = net.head_weight @ states[row][i]
                    worth = judge(logits, row, guessed)
                    if worth is not None:
                        terms.append(worth)
                        pairs.append((logits, int(found.logits[row, guessed - 1].argmax())))
        agreed.append(pairs)
        total = total + LAMBDA / num * sum(terms) / len(terms)
    return total


def compared(net, found, truth, objective, judge, ids=None):
    loss = MtpLoss(net, OBJECTIVES[objective], net.config.num_modules, target_ids=ids)
    sums, agreed = loss(found, truth, agreement=True), []
    ours = sum(each.loss / each.count for each in sums)
    theirs = loss_by_hand(net, found, judge, agreed)
    known = torch.arange(13) if ids is None else ids
    for each, pairs in zip(sums, agreed, strict=True):
        assert each.count == len(pairs)
        assert int(each.agreed) == sum(int(known[q[known].argmax()]) == best for q, best in pairs)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    parameters = list(net.parameters())
    pairs = zip(torch.autograd.grad(ours, parameters), torch.autograd.grad(theirs, parameters), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("modules", "objective"), [(3, "next-token"), (2, "eagle3")])
def test_the_loss_of_the_texts_own_tokens(modules, objective):
    """And against the target's distribution."""
    net, head = tiny_net(modules)
    found = scored(head)

    def judge(logits, row, guessed):
        if objective == "next-token":
            return -logits.log_softmax(0)[found.batch.ids[row, guessed]]
        return -(found.logits[row, guessed - 1].softmax(0) * logits.log_softmax(0)).sum()

    compared(net, found, Truth.of(found, head, None, torch.float64), objective, judge)


def test_the_loss_over_some_tokens():
    """What is guessed counts where the text's token, and the target's best, are among them."""
    net, head = tiny_net(2, qkv_bias=True)
    found, ids = scored(head), torch.tensor([1, 2, 4, 5, 6, 7, 9, 11])

    def judge(logits, row, guessed):
        token, best = int(found.batch.ids[row, guessed]), int(found.logits[row, guessed - 1].argmax())
        if token not in ids or best not in ids:
            return None
        return -logits[ids].log_softmax(0)[ids.tolist().index(token)]

    compared(net, found, Truth.of(found, head, ids, torch.float64), "next-token", judge, ids)


def test_losses_that_cannot_be_meant():
    net, _ = tiny_net(2)
    with refused(ConfigError, "mtp head guesses 2 tokens", "unroll_steps is 3: give 2"):
        MtpLoss(net, OBJECTIVES["next-token"], 3)
    with refused(ConfigError, "later_share is 0.5", "leave it out"):
        MtpLoss(net, OBJECTIVES["next-token"], 2, 0.0, 0.5)
    with refused(ConfigError, "'mtp' predicts no features", "--objective"):
        MtpLoss(net, OBJECTIVES["eagle1"], 2)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_heads": 3}, ["multiple of num_kv_heads", "3 and 2"]),
        ({"head_dim": 4}, ["head_dim must be that of rope", "4 and 8"]),
        ({"intermediate_size": 0}, ["intermediate_size must be at least 1, found 0"]),
    ],
)
def test_configs_that_cannot_be_meant(changes, parts):
    with refused(ConfigError, *parts):
        tiny_net(1, **changes)
    with refused(ConfigError, "one hidden state of the target, found taps (1, 2)"):
        replace(tiny_net(1)[0].config, taps=(1, 2))


# --- all modules of a head draft -------------------------------------------------------------------------------------


def test_every_token_is_guessed_by_its_own_module(target_of):
    """Ragged rows that leave, steps without drafts, four tokens by three modules: the last one continues on its own."""
    folder, weights = target_of("deepseek-three")
    target = load_target(folder, dtype="float64")
    drafter = load_drafter("mtp", target, None, options={"modules": 3})()
    assert drafter.name.endswith("3 modules")
    decoder = Decoder(target, drafter, budget=Budget(0))
    for row, prompt in enumerate((PROMPT, [9, 2], [5])):
        decoder.admit(prompt, Sampling(max_tokens=12 - row, ignore_eos=True))
    seen = 0
    for number in range(8):
        decoder.step()
        if number == 2:
            continue  # what two steps left is read at once
        if number in (5, 6):
            decoder.retire(number - 5)  # the first row leaves, and the last one takes its place
        sampling = SamplingBatch([Sampling()] * decoder.num_running, KeyedNoise(VOCAB))
        tree = drafter.propose(decoder.ctx, sampling, Budget(4))
        for row, found in enumerate(tree.tokens.tolist()):
            text = decoder.ctx.rows[row].tokens
            if decoder.ctx.rows[row].length < 3:
                assert set(found[1:]) <= {PAD}
                continue
            assert found == [text[-1], *drafted_by_hand(folder, weights, drafter, text)]
            seen += 1
    assert seen > 12


def drafted_by_hand(folder, weights, drafter, text):
    """Four tokens after a text, greedily, by three modules over all of it."""
    files, eps = load_file(folder / "model.safetensors"), read_config(folder)["rms_norm_eps"]
    embedding, head = files["model.embed_tokens.weight"], files["lm_head.weight"]
    states, ids, read = hidden_states(folder, text[:-1]), list(text), torch.empty(0)
    for k in (1, 2, 3, 3):
        is_again = len(ids) == len(text) + 3  # the third module once more: one entry more, of its own state
        read = torch.cat([read, states[-1:]]) if is_again else states
        tokens = embedding[torch.tensor(ids[k:])]
        states = mtp_files.by_hand(weights[k - 1], tokens, read, heads_of(drafter.net), eps=eps)
        ids.append(int((states[-1] @ head.T).argmax()))
    return ids[len(text) :]


def test_modules_that_a_head_has_not(target_of):
    target = load_target(target_of("deepseek-three")[0])
    for value, part in ((4, "modules is 4, and mtp has 3: ask for fewer"), (0, "at least 1, found 0"), (True, "True")):
        with refused(ConfigError, "draft_options: ", part):
            load_drafter("mtp", target, None, options={"modules": value})
