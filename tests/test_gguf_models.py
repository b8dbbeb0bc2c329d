"""Whole models out of GGUF files, drafted or not: in float32 arithmetic the numbers of their float32 expansion."""

import resource
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import draftwing as dw
import draftwing.cli.main as cli
import mtp_files
from conftest import add_tokenizer, refused
from draftwing.cpu.layout import BLOCKS
from draftwing.cpu.library import get_kernel
from draftwing.errors import CheckpointError, ConfigError, UnsupportedError
from draftwing.formats.gguf import open_file
from draftwing.formats.gguf_folder import open_gguf
from draftwing.formats.gguf_weights import import_gguf
from draftwing.formats.identity import target_id_of_folder
from draftwing.loading import load_target
from draftwing.methods.base import Budget
from draftwing.methods.calibration import Calibration
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.registry import convert, get_method, method_of_folder
from draftwing.models.config import read_config
from draftwing.models.context import FeatureSpec
from draftwing.models.lean import LeanTarget
from draftwing.models.weights import WeightFiles
from draftwing.tree import DraftTree
from gguf_files import FURTHER, changes_of, write, write_head_file
from test_gguf import REARRANGED

pytestmark = pytest.mark.skipif(get_kernel() is None, reason="no compiler")
SHAPE = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_gate": "Q5_K", "token_embd": "Q8_0"}  # as llama.cpp mixes them
PROMPTS = [[4, 9, 30, 7], [8, 8], [11] * 40]


@pytest.fixture(scope="module")
def source(folder_of):
    folder = folder_of("llama", **SHAPE, initializer_range=0.05)
    if not (folder / "tokenizer.json").exists():
        add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def file_of(source, tmp_path_factory):
    """A maker of files whose matrices are in one format, or ``mixed``."""
    made = {}

    def make(kind):
        if kind not in made:
            kind_of = lambda name, weight: next((to for part, to in MIXED.items() if part in name), "Q4_K")  # noqa: E731
            out = tmp_path_factory.mktemp("gguf") / f"{kind}.gguf"
            made[kind] = write(source, out, kind_of if kind == "mixed" else lambda name, weight: kind)
        return made[kind]

    return make


def logits_of(target):
    ctx = target.new_context(FeatureSpec((0, target.num_layers)))
    features = [target.prefill(ctx, prompt) for prompt in PROMPTS]
    tree = DraftTree.from_lists([[prompt[-1], 5, 9, 7] for prompt in PROMPTS], [[-1, 0, 0, 1]] * len(PROMPTS))
    output = target.forward(ctx, tree)
    return [output.logits, output.features, *features]


@pytest.mark.parametrize("kind", [*BLOCKS, "BF16", "F16", "F32", "mixed", "Q5_0"])
def test_a_file_is_its_expansion(kind, file_of, without_tiles):
    folder = open_gguf(file_of(kind))
    own, wide = (LeanTarget.from_folder(folder, expand=expand, arithmetic="float32") for expand in (False, True))
    assert own.runtime == "kernel"
    for ours, theirs in zip(logits_of(own), logits_of(wide), strict=True):
        assert torch.isfinite(ours).all()
        assert torch.equal(ours, theirs)
    assert wide.net.head.formats == ("float32",)
    if kind in BLOCKS:
        assert own.net.head.formats == (kind,)
        assert f"{kind} weights in float32 arithmetic" in own.runs_as
        assert own.num_weight_bytes < 0.3 * wide.num_weight_bytes
    elif kind == "mixed":
        assert own.net.layers[0].qkv.formats == ("Q4_K", "Q6_K")
        assert own.net.layers[0].mlp.gate_up.formats == ("float32",)
        assert own.net.head.formats == ("Q4_K",)
    elif kind == "Q5_0":
        assert "float32 expanded from Q5_0" in own.runs_as


@pytest.mark.parametrize(
    ("kind", "arithmetic", "temperature"),
    [("mixed", "float32", 0.0), ("Q8_0", "int8", 0.0), ("mixed", "int8", 1.0), ("MXFP4", "int8", 0.0)],
)
def test_texts_of_a_file(kind, arithmetic, temperature, file_of, tmp_path):
    """Drafted by itself in 8 bits, by lookup, not at all, in float32 out of the imported float32 folder: one text."""
    file, options = file_of(kind), {"temperature": temperature, "seed": 3, "max_tokens": 16, "ignore_eos": True}
    texts = []
    for draft, budget in (("none", None), ("lookup", Budget(4, 2, 6)), (file, Budget(4, 2, 6)), (file, Budget(3))):
        lm = dw.load(file, draft, device="cpu", arithmetic=arithmetic)
        assert f"weights in {arithmetic} arithmetic" in lm.target.runs_as
        texts.append([one.token_ids for one in lm.generate(PROMPTS, speculation=budget, **options)])
    if arithmetic == "float32":
        import_gguf(file, tmp_path / "whole")
        lm = dw.load(tmp_path / "whole", "none", device="cpu")
        texts.append([one.token_ids for one in lm.generate(PROMPTS, **options)])
    assert texts.count(texts[0]) == len(texts)


@pytest.fixture(scope="module")
def further(folder_of):
    """A maker of tiny models of further families, with a tokenizer."""

    def make(family):
        source = folder_of(family, **changes_of(family))
        return source if (source / "tokenizer.json").exists() else add_tokenizer(source)

    return make


@pytest.mark.parametrize("family", [*REARRANGED, "gpt-oss", "gemma3"])
def test_rearranged_tensors(family, further, tmp_path, without_tiles):
    """A file in F32 computes what the checkpoint does. Those of other families are the same: see ``test_gguf``."""
    source = further(family)
    folders = open_gguf(write(source, tmp_path / "m.gguf")), source
    for dtype in ("float32", "float64") if family == "qwen3.5" else ("float32",):  # its heads are moved in PyTorch, too
        targets = (load_target(folder, dtype=dtype, device="cpu") for folder in folders)
        for found, expected in zip(*map(logits_of, targets), strict=True):
            assert torch.allclose(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


IN_8_BITS = ("gemma2-capped", "lfm2-moe", "gpt-oss", "qwen3.5", "deepseek-v2")  # by make test


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in IN_8_BITS else pytest.mark.full) for name in FURTHER]
)
def test_further_families_in_8_bits(family, further, tmp_path, without_tiles):
    """A file drafts without changing its own text."""
    file, texts = write(further(family), tmp_path / "m.gguf", lambda name, weight: "Q8_0"), []
    for draft in ("none", file):
        lm = dw.load(file, draft, device="cpu")
        assert lm.target.runtime == "kernel"
        answers = lm.generate(PROMPTS, speculation=Budget(3), ignore_eos=True, max_tokens=16)
        texts.append([answer.token_ids for answer in answers])
    assert all(answer.stats.num_drafted for answer in answers)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("family", "layout"), [("glm4-moe", "deepseek"), ("qwen3.5", "qwen")])
def test_mtp_modules_of_a_file(family, layout, tmp_path, without_tiles):
    """They draft what the checkpoint's modules do."""
    changes = changes_of(family)
    if family == "qwen3.5":
        changes["layer_types"] = ["linear_attention", "full_attention"] * 2
    mtp_files.write_target(tmp_path, layout, 1, family, **changes)
    add_tokenizer(tmp_path)
    found = []
    for source in (tmp_path, write(tmp_path, tmp_path / "m.gguf")):
        lm = dw.load(source, "mtp", device="cpu")
        answers = lm.generate(PROMPTS, speculation=Budget(3, 2), max_tokens=12, ignore_eos=True)
        found.append([(answer.token_ids, answer.stats.num_drafted, answer.stats.num_accepted) for answer in answers])
    assert found[0] == found[1]
    assert all(drafted for _, drafted, _ in found[0])


def test_int8_arithmetic_is_close_to_float32(file_of):
    folder = open_gguf(file_of("mixed"))
    ours, exact = (logits_of(LeanTarget.from_folder(folder, arithmetic=each))[0] for each in ("int8", "float32"))
    assert (ours - exact).norm() < 0.05 * exact.norm()
    assert not torch.equal(ours, exact)
    assert "int8" in LeanTarget.from_folder(folder).runs_as  # the default


def test_arithmetic_is_refused_where_nothing_has_it(file_of, source):
    for folder, options in ((source, {}), (open_gguf(file_of("Q4_1")), {"dtype": "bfloat16"})):
        with refused(UnsupportedError, "arithmetic='int8' is for GGUF files in Q8_0", "quantize='int8'"):
            load_target(folder, device="cpu", arithmetic="int8", **options)
        assert load_target(folder, device="cpu", arithmetic="float32", **options)
    with refused(ConfigError, "arithmetic must be int8, float32 or None, found 'int4'"):
        load_target(source, device="cpu", arithmetic="int4")


def test_without_the_kernel_a_file_is_expanded(file_of, monkeypatch):
    """And decodes as it does with it, up to rounding."""
    folder = open_gguf(file_of("Q4_K"))
    ours = logits_of(load_target(folder, device="cpu", arithmetic="float32"))[0]
    exact = load_target(folder, dtype="float64", device="cpu")
    monkeypatch.setenv("DRAFTWING_KERNEL", "off")
    plain = load_target(folder, device="cpu")
    assert plain.runtime == "torch"
    wanted = logits_of(exact)[0]
    for found in (ours, logits_of(plain)[0]):
        assert torch.allclose(found.double(), wanted, atol=1e-4 * float(wanted.abs().max()))


def test_what_a_file_cannot_do_is_said(file_of, tmp_path):
    with refused(UnsupportedError, "draftwing import", "leave engine out"):
        load_target(open_gguf(file_of("Q4_1")), engine="transformers")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.Q4_1.gguf").write_bytes(b"GGUF")
    with refused(CheckpointError, "a.Q4_1.gguf. Give that file itself"):
        WeightFiles(tmp_path)


def test_a_head_is_trained_and_read_for_a_file(file_of, tmp_path):
    """A file is a model folder like any other: its name and what it is stand in the head."""
    from draftwing.formats.write import write_head

    file = file_of("Q4_1")
    target = load_target(open_gguf(file), device="cpu")
    torch.manual_seed(1)
    config = EagleConfig.for_target(3, target.config)
    write_head(tmp_path / "head", EagleNet(config, target.embedding, target.head))
    drafted, plain = dw.load(file, tmp_path / "head", device="cpu"), dw.load(file, "none", device="cpu")
    options = {"max_tokens": 16, "ignore_eos": True, "temperature": 1.0, "seed": 1}
    found = drafted.generate(PROMPTS, speculation=Budget(3), **options)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain.generate(PROMPTS, **options)]
    assert all(one.stats.num_drafted for one in found)


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_heads_as_files(kind, source, tmp_path):
    """llama.cpp's files have the numbers of the folder that they were made from, and draft the same."""
    target, own = load_target(source, prepack=False), target_id_of_folder(source)
    torch.manual_seed(4)
    if kind == "eagle3":
        taps, ids = (0, 1, 2), torch.arange(20, 80, 2)
        config = EagleConfig.for_target(3, target.config, len(ids), taps=taps, norm_before_residual=True)
        net = EagleNet(config, target.embedding, target.head, ids)
        fields = {"target_layers": [*taps], "target_hidden_size": target.hidden_size, "norm_before_residual": True}
    else:
        taps, method = (1, 2), get_method(kind)
        config = method.config.for_target(target.config, taps, num_layers=1, mask_token_id=7, block_size=4)
        net = method.net(config, target.embedding, target.head)
        fields = {"target_layers": [*taps], "block_size": 4, "tokenizer.ggml.mask_token_id": 7}
    get_method(kind).write(tmp_path / "head", net)
    convert(tmp_path / "head", tmp_path / "folder", "vllm", target=own)
    file = write_head_file(tmp_path / "folder", source, tmp_path / "head.gguf", kind, **fields)
    read = get_method(kind).read(open_gguf(file), target.embedding, target.head, own)
    assert replace(read.config, target=None) == replace(config, target=None)
    assert all(torch.equal(tensor, net.tensors()[name]) for name, tensor in read.tensors().items())
    options = {"max_tokens": 8, "ignore_eos": True, "speculation": Budget(3)}
    texts = [dw.load(source, draft, device="cpu").generate(PROMPTS[:1], **options)[0] for draft in (file, "none")]
    assert texts[0].token_ids == texts[1].token_ids
    assert texts[0].stats.num_drafted
    with refused(CheckpointError, "head.gguf", "is a draft head, not a language model"):
        dw.load(file, "none", device="cpu")
    for name, value, part in (
        ("target_layers", None, f"lacks `{kind}.target_layers`"),
        ("embedding_scale", 2, f"`{kind}.embedding_scale` 2 is not supported"),
        (
            f"{kind}.attention.sliding_window",
            5,
            f"`{kind}.attention.sliding_window` 5 is not"
            if kind == "eagle3"
            else "Windows without `dflash.attention.slid",
        ),
    ):
        changed = {key: each for key, each in {**fields, name: value}.items() if each is not None}
        other = write_head_file(tmp_path / "folder", source, tmp_path / f"{name}.gguf", kind, **changed)
        with refused(ConfigError if value is None else UnsupportedError, part):
            open_gguf(other)


WRITTEN = {
    "eagle3": {
        "norm_before_residual": True,
        "norm_before_fc": True,
        "rope": ("llama3", {"factor": 4.0, "original_max_position_embeddings": 64}),
    },
    "eagle3-narrow": {"target_hidden_size": 256, "own_embedding": True, "hidden_size": 16},
    "dflash-windows": {"windows": (8, None), "num_layers": 2},
    "dflash-causal": {"windows": (8,), "causal": (True,), "own_head": True},
    "dspark": {"rank": 4, "rope": ("yarn", {"factor": 2.0, "original_max_position_embeddings": 64})},
    "dspark-masks": {"rank": 4, "from_anchor": False, "own_head": True},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_written_heads(name, source, file_of, tmp_path):
    """A head's file drafts as its folder does: it has the numbers, the calibration and the target's tokenizer."""
    target_file, changes = file_of("F32"), dict(WRITTEN[name])
    target, kind = load_target(open_gguf(target_file), prepack=False), name.partition("-")[0]
    method, own = get_method(kind), target_id_of_folder(open_gguf(target_file))
    rope = changes.pop("rope", None)
    if rope is not None:
        changes["rope"] = replace(target.config.rope, type=rope[0], **rope[1])
    changes |= {"calibration": Calibration(1.5, 0.125, 1.25), "target": own}
    embedding, ids = target.embedding.plain(), torch.arange(20, 80, 2)
    torch.manual_seed(4)
    if kind == "eagle3":
        config = EagleConfig.for_target(3, target.config, len(ids), taps=(0, 1, 2), **changes)
        table = torch.randn(target.vocab_size, config.hidden_size) if config.own_embedding else embedding
        net = EagleNet(config, table, target.head, ids)
    else:
        fields = {"num_layers": 1, "mask_token_id": 7, "block_size": 4, "from_anchor": kind == "dspark", **changes}
        config = method.config.for_target(target.config, (1, 2), **fields)
        net = method.net(config, embedding, target.head, ids if config.own_head else None)
    method.write(tmp_path / "head", net, training={"steps": 3})
    written = tmp_path / "head.gguf"
    convert(tmp_path / "head", written, "gguf", target=own, target_file=target_file)
    folder = open_gguf(written)
    assert method_of_folder(folder) is method
    read = method.read(folder, embedding, target.head, own)
    assert read.config == config
    assert read.tensors().keys() == net.tensors().keys()
    assert all(torch.equal(tensor, net.tensors()[name]) for name, tensor in read.tensors().items())
    assert (read.target_ids is None) == (net.target_ids is None)
    drafts = []
    options = {"max_tokens": 8, "ignore_eos": True, "temperature": 1.0, "seed": 1, "speculation": Budget(3)}
    for draft in (tmp_path / "head", written):
        (text,) = dw.load(target_file, draft, device="cpu").generate(PROMPTS[:1], **options)
        drafts.append((text.token_ids, text.stats.num_drafted, text.stats.num_accepted))
    assert drafts[0] == drafts[1]
    with closing(open_file(target_file)) as file, closing(open_file(written)) as head:
        tokenizer = {key for key in file.metadata.pairs if key.startswith("tokenizer.")}
        assert tokenizer <= head.metadata.pairs.keys()
        assert list(head.metadata.pairs["tokenizer.ggml.tokens"]) == list(file.metadata.pairs["tokenizer.ggml.tokens"])
        assert {info.kind for info in head.tensors.values()} <= {"F32", "I64"}
    convert(tmp_path / "head", written, "gguf", target=own, target_file=target_file, dtype="float16")  # replaces it
    with closing(open_file(written)) as head:
        assert {info.kind for info in head.tensors.values() if len(info.shape) == 2} == {"F16"}
    convert(open_gguf(written), tmp_path / "again", "draftwing")
    assert read_config(tmp_path / "again")["draftwing"]["training"] == {"steps": 3}


def test_what_a_heads_file_cannot_express(source, file_of, tmp_path):
    target, target_file = load_target(source, prepack=False), file_of("F32")
    own, out = target_id_of_folder(source), tmp_path / "head.gguf"

    def written(kind, name, **changes):
        method, folder = get_method(kind), tmp_path / name
        if kind.startswith(("eagle", "peagle")):
            taps = (0, 1, 2) if kind != "eagle1" else (4,)
            config = EagleConfig.for_target(
                1 if kind == "eagle1" else 3, target.config, **{"taps": taps, "target": own, **changes}
            )
            net = EagleNet(config, target.embedding, target.head)
        else:
            fields = {"num_layers": 1, "block_size": 4, "mask_token_id": 7, **changes}
            config = method.config.for_target(target.config, (1, 2), **fields)
            net = method.net(config, target.embedding, target.head)
        method.write(folder, net)
        return folder

    rope = replace(target.config.rope, type="dynamic", factor=2.0)
    for kind, changes, reason in (
        ("eagle1", {}, "such a head can only be written as draftwing, eagle, vllm, sglang, found 'gguf'"),
        (
            "peagle",
            {"mask_token_id": 5},
            "such a head can only be written as draftwing, vllm, speculators, found 'gguf'",
        ),
        ("eagle3", {"fc_norm": True}, "the gguf layout cannot express fc_norm or norm_output"),
        ("eagle3", {"norm_output": True}, "fc_norm or norm_output (EAGLE-3.1)"),
        ("eagle3", {"taps": (0, 1)}, "2 taps (llama.cpp takes three)"),
        ("eagle3", {"num_layers": 2}, "EAGLE-3 of 2 layers"),
        ("eagle3", {"qk_norm": True}, "norms of queries and keys"),
        ("eagle3", {"rope": rope}, "RoPE of type 'dynamic'"),
        ("dflash", {"mask_token_id": None}, "a trained mask vector (train with `--mask-token-id`"),
        ("dflash", {"from_anchor": True}, "a prediction at the pending token's position"),
        ("dflash", {"attention_bias": True}, "biases of attention"),
        ("dflash", {"windows": (8, None), "causal": (True, False), "num_layers": 2}, "some causal layers"),
        ("dspark", {"rope": rope}, "RoPE of type 'dynamic'"),
    ):
        folder = written(kind, f"{kind}-{'-'.join(changes)}", **changes)
        with refused(UnsupportedError, reason):
            convert(folder, out, "gguf", target=own, target_file=target_file)
    assert not out.exists()
    head = written("eagle3", "plain")
    with refused(ConfigError, "holds the tokenizer of its target", "--target"):
        convert(head, out, "gguf", target=own)
    with refused(ConfigError, "dtype 'int8' is not supported in GGUF: choose float32, float16, bfloat16"):
        convert(head, out, "gguf", target_file=target_file, dtype="int8")
    with refused(CheckpointError, "one file: choose a name that ends in .gguf"):
        convert(head, tmp_path / "folder", "gguf", target_file=target_file)
    with refused(CheckpointError, "holds something that is no head"):
        convert(head, target_file, "gguf", target_file=target_file)
    large = written("eagle3", "large")
    weights = load_file(large / "model.safetensors")
    weights["fc.weight"][0, 0] = 1e6
    save_file(weights, large / "model.safetensors")
    with refused(CheckpointError, "fc.weight", "infinite"):
        convert(large, out, "gguf", target_file=target_file, dtype="float16")
    assert not out.exists()
    convert(head, out, "gguf", target_file=target_file)
    size, before = out.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    out.unlink()
    for num_bytes in (0, 4096, size // 2, size - 1):  # a disk that is full in the metadata or in the tensors
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
        try:
            with refused(CheckpointError, f"{out}: cannot be written", "exceed the size limit"):
                convert(head, out, "gguf", target_file=target_file)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not out.exists()
    assert not list(tmp_path.glob("*.partial"))
    for draft, kind, depth in ((head, "eagle3", "3"), ("block", "dspark", "4")):
        folder = written("dspark", draft, from_anchor=True) if draft == "block" else draft
        command = ["export", str(folder), "--to", "gguf", "-t", str(target_file), "--dtype", "float16", "-o", str(out)]
        shown = CliRunner().invoke(cli.app, command)
        assert shown.exit_code == 0, shown.output
        assert shown.stdout.split() == [
            *("llama-server", "-m", str(target_file), "-md", str(out)),
            *("--spec-type", f"draft-{kind}", "--spec-draft-n-max", depth),
        ]
    shown = CliRunner().invoke(cli.app, ["export", str(head), "--to", "vllm", "--dtype", "float16", "-o", "head"])
    assert "--dtype belongs to --to gguf" in shown.output


def test_a_models_file_is_no_head(file_of, tmp_path):
    with refused(UnsupportedError, "holds a causal LM, which has no other layout"):
        convert(open_gguf(file_of("Q4_1")), tmp_path / "out", "vllm")
