"""The comparison with peers: order of modes, failures, figures of recorded rounds, and conversions."""

import importlib
import importlib.util
import json
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FILE = BENCHMARKS / "peers.py"


@pytest.fixture(scope="module", autouse=True)
def _importable():
    """Make ``peers`` importable, like ``python benchmarks/peers.py`` does."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def script(_importable):
    spec = importlib.util.spec_from_file_location("peers_command", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def parts(_importable):
    """The modules of ``peers``, imported at first use."""

    class Parts:
        def __getattr__(self, name):
            return importlib.import_module(f"peers.{name}")

    return Parts()


def settings_for(parts, folder, **changes):
    (folder / "target").mkdir(exist_ok=True)
    (folder / "target" / "config.json").write_text("{}")
    made = parts.modes.Settings(folder / "target", {"eagle3": None}, "fp32", 2, 4, folder / "cache")
    return replace(made, **changes)


# --- arguments -------------------------------------------------------------------------------------------------------


def test_modes_and_draft_tokens(script, parts):
    args = script.read_arguments([])
    assert {mode.peer for mode in args.modes} == set(parts.modes.PEERS)
    assert str(args.modes[0]) == parts.modes.BASELINE
    assert args.threads >= 1
    assert args.draft_tokens == parts.modes.DRAFT_TOKENS
    args = script.read_arguments(["--peers", "llama.cpp, openvino/lookup,openvino/plain"])
    expected = ["openvino/plain", "openvino/lookup", "llama.cpp/plain", "llama.cpp/lookup", "llama.cpp/eagle3"]
    assert [str(mode) for mode in args.modes] == ["draftwing/plain", *expected]  # every text is compared with the first
    args = script.read_arguments(["--draft-tokens", "vllm/eagle3=7"])
    assert args.draft_tokens == {**parts.modes.DRAFT_TOKENS, "vllm/eagle3": 7}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "sglang"], "'sglang' is none of draftwing, transformers, openvino"),
        (["--peers", "vllm/medusa"], "'vllm/medusa' is none of vllm/plain, vllm/lookup"),
        (["--draft-tokens", "vllm/plain=3"], "'vllm/plain' is none of"),
        (["--draft-tokens", "vllm/eagle3=0"], "expected a number of tokens, such as vllm/eagle3=4"),
        (["--rounds", "0"], "--rounds must be at least 1, found 0"),
        (["--max-tokens", "1"], "--max-tokens must be at least 2"),
        (["--precision", "int2"], "invalid choice"),
    ],
)
def test_bad_arguments_are_named(script, capsys, arguments, message):
    with pytest.raises(SystemExit):
        script.read_arguments(arguments)
    assert message in " ".join(capsys.readouterr().err.split())


def test_every_peer_is_complete(script, parts):
    drafting = {f"{peer}/{name}" for peer, names in parts.modes.PEERS.items() for name in names if name != "plain"}
    assert {name for name in drafting if not name.startswith("draftwing/")} == set(parts.modes.DRAFT_TOKENS)
    assert set(script.FILES) == set(parts.modes.PEERS)
    for file in script.FILES.values():
        peer = getattr(parts, file).PEER  # the peers' packages are not installed here
        assert all(callable(getattr(peer, name)) for name in ("prepare", "load", "generate"))


def test_shipped_drafts_serve_the_shipped_target_only(script, parts, tmp_path):
    shipped = tmp_path / "shipped"
    for name in ("target", "eagle3", "eagle1", "draft"):
        (shipped / name).mkdir(parents=True)
    own = script.settings_of(script.read_arguments([]), shipped)
    assert own.drafts["draft-lm"] == shipped / "draft"
    other = script.read_arguments(["--target", str(tmp_path), "--eagle1", str(shipped / "eagle1")])
    other = script.settings_of(other, shipped)
    assert other.drafts == {"eagle3": None, "eagle1": shipped / "eagle1", "draft-lm": None}
    mode = parts.modes.Mode("openvino", "eagle3-tree")
    assert other.lacks(mode) == "no --eagle3 was given for this target"
    assert own.draft_of(mode) == shipped / "eagle3"
    assert other.lacks(parts.modes.Mode("vllm", "plain")) is None
    assert "give --target model.gguf" in own.lacks(parts.modes.Mode("llama.cpp", "eagle3"))
    in_four_bits = replace(own, precision="int4")
    assert "give --target model.gguf" in in_four_bits.lacks(parts.modes.Mode("llama.cpp", "plain"))
    assert in_four_bits.lacks(mode) is None


def test_a_gguf_file_is_read_unchanged(script, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    args = script.read_arguments(["--target", str(tmp_path)])
    assert script.settings_of(args, tmp_path / "shipped").precision == "gguf"
    args = script.read_arguments(["--target", str(tmp_path), "--precision", "int8"])
    with pytest.raises(SystemExit, match="leave out --precision"):
        script.settings_of(args, tmp_path / "shipped")


def test_a_conversion_is_reused_only_for_the_same_files(parts, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    before = parts.modes.fingerprint(tmp_path)
    assert parts.modes.fingerprint(tmp_path) == before
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert parts.modes.fingerprint(tmp_path) != before


class FakeLlamaServer(BaseHTTPRequestHandler):
    """Answers like llama.cpp's server, with the end of the prompt counted on."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["temperature"], asked["ignore_eos"], asked["cache_prompt"]) == (0.0, True, False)
        tokens = [asked["prompt"][-1] + 1 + step for step in range(asked["n_predict"])]
        timings = {"prompt_ms": 500.0, "predicted_ms": 1500.0, "draft_n": 9, "draft_n_accepted": 3}
        body = json.dumps({"tokens": tokens, "timings": timings}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_llama_cpp_reports_its_servers_clock(parts):
    peer = parts.llamacpp.LlamaCpp()
    with HTTPServer(("127.0.0.1", 0), FakeLlamaServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        peer.url = f"http://127.0.0.1:{server.server_port}"
        run = peer.generate([4, 5], 8)
        server.shutdown()
    # Seven tokens after the first one, three of which were drafted.
    assert run == parts.channel.Run([6, 7, 8, 9, 10, 11, 12, 13], 2.0, 0.5, 1, 4)


def test_memory_of_a_server_counts(parts):
    before = parts.channel.peak_memory()
    source = "held = bytearray(100 << 20); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        server.stdout.readline()
        assert parts.channel.peak_memory() - before > 100 << 20
        server.communicate(b"\n")


# --- rounds ----------------------------------------------------------------------------------------------------------


def test_the_order_rotates_from_round_to_round(parts):
    assert parts.modes.turns(3, 4) == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]


FAKE = """
import json, os, sys
for line in sys.stdin:
    job = json.loads(line)
    with open(sys.argv[1], "a") as log:
        print(job["op"], job.get("mode", sys.argv[2]), len(job.get("prompts", [])), file=log)
    answer = {}
    if job["op"] == "load":
        answer = {"versions": {"fake": "1"}, "notes": [], "memory": 100}
    if job["op"] == "generate":
        CRASH
        run = {"seconds": 2.0, "first_seconds": 1.0, "first_tokens": 1, "forwards": 2}
        answer = {"memory": 100, "runs": [{**run, "token_ids": [7] * job["max_tokens"]} for _ in job["prompts"]]}
    print(json.dumps(answer), flush=True)
"""
CRASH = "print('no such instruction', file=sys.stderr); os.abort()"
REFUSE = "print(json.dumps({'error': 'too long'}), flush=True); continue"
HANG = "import time; time.sleep(60)"


@pytest.fixture
def measured(parts, tmp_path):
    """Measure two fake modes, the second of which executes ``statement``; return outcomes and the log of jobs."""

    def run(statement="pass", rounds=2, available=1000, seconds=20.0):
        log = tmp_path / "log"

        def start(peer):
            source = FAKE.replace("CRASH", statement if peer == "vllm" else "pass")
            return parts.channel.Worker([sys.executable, "-c", source, str(log), peer], seconds=seconds)

        modes = [parts.modes.Mode("draftwing", "plain"), parts.modes.Mode("vllm", "plain")]
        settings = settings_for(parts, tmp_path)
        measurement = parts.rounds.Measurement(modes, settings, start, available=lambda: available)
        measurement.prepare()
        measurement.run([[1, 2], [3]], rounds)
        return measurement.outcomes, log.read_text().splitlines()

    return run


@pytest.mark.parametrize(("available", "num_loads"), [(1000, 2), (50, 4)])
def test_rounds_are_recorded_and_workers_kept_if_memory_permits(measured, available, num_loads):
    (ours, other), log = measured(available=available)
    assert len(ours.rounds) == len(other.rounds) == 2
    assert [len(runs) for runs in ours.rounds] == [2, 2]
    assert ours.rounds[0][0].token_ids == [7] * 4
    assert sum(line.startswith("load") for line in log) == num_loads
    # A warm-up for each load, and each mode once per round.
    assert sum(line.startswith("generate") for line in log) == num_loads + 4


@pytest.mark.parametrize(
    ("statement", "seconds", "parts_of_failure"),
    [
        (CRASH, 20.0, ["ended by signal SIGABRT", "no such instruction"]),
        (REFUSE, 20.0, ["too long"]),
        (HANG, 2.0, ["no answer within 2 s"]),
    ],
    ids=["crash", "refusal", "hang"],
)
def test_a_failure_is_reported_and_the_others_continue(measured, statement, seconds, parts_of_failure):
    (ours, other), log = measured(statement, seconds=seconds)
    assert (len(ours.rounds), ours.failure, other.rounds) == (2, None, [])
    assert all(part in other.failure for part in parts_of_failure)
    assert sum(line.startswith("load") for line in log) == 2  # the failed mode is not tried again


def test_a_peer_that_cannot_be_installed_is_reported(parts, tmp_path):
    def start(peer):
        raise parts.channel.PeerError(f"cannot be installed: no wheel of {peer}")

    modes = [parts.modes.Mode("llama.cpp", "plain"), parts.modes.Mode("openvino", "eagle3")]
    measurement = parts.rounds.Measurement(modes, settings_for(parts, tmp_path), start)
    measurement.prepare()
    measurement.run([[1]], 1)
    assert [each.failure for each in measurement.outcomes] == [
        "cannot be installed: no wheel of llama.cpp",
        "no --eagle3 was given for this target",
    ]


def test_the_real_worker_answers_and_survives_a_bad_job(parts, tmp_path):
    worker = parts.channel.Worker(parts.channel.worker_command(sys.executable, "transformers"), seconds=60)
    job = {"op": "prepare", "precision": "int8"}
    with pytest.raises(parts.channel.PeerError, match="no int8 weights"):
        worker.ask(job)
    assert worker.ask({**job, "precision": "fp32"}) == {}
    with pytest.raises(parts.channel.PeerError, match="KeyError: 'prompts'"):
        worker.ask({"op": "generate"})
    worker.close()


def test_a_peer_that_stops_early_is_not_measured(parts):
    class Short:
        def generate(self, prompt, max_tokens):
            return parts.channel.Run([1], 0.1)

    with pytest.raises(parts.channel.PeerError, match="wrote 1 tokens instead of 4"):
        parts.channel.run_job(Short(), {"op": "generate", "prompts": [[1]], "max_tokens": 4})


def test_a_stopwatch_separates_the_first_tokens(parts):
    watch = parts.channel.Stopwatch()
    watch.take([])  # a streamer's first call may be empty
    watch.take([5, 6])
    watch.take([7, 8, 9])
    run = watch.stop(4, 1)
    assert run.token_ids == [5, 6, 7, 8]
    assert (run.first_tokens, run.forwards) == (2, 1)
    assert 0 <= run.first_seconds <= run.seconds


# --- figures ---------------------------------------------------------------------------------------------------------


def outcome(parts, name, rates, texts=((1, 2, 3, 4, 5),), forwards=2, first=1.0, failure=None):
    """Rounds in which the four tokens after the first came at ``rates``."""
    runs = [
        [
            parts.channel.Run(list(text), (first or 0) + 4 / rate, first, None if first is None else 1, forwards)
            for text in texts
        ]
        for rate in rates
    ]
    return parts.rounds.Outcome(parts.modes.Mode(*name.split("/")), runs, failure)


def test_figures_are_medians_of_ratios_in_the_same_round(parts):
    outcomes = [
        outcome(parts, "draftwing/plain", [10, 20, 40]),
        outcome(parts, "vllm/plain", [5, 5, 40]),
        outcome(parts, "vllm/lookup", [10, 20, 40], forwards=1),
    ]
    ours, plain, lookup = parts.report.figures_of(outcomes)
    assert ours.tokens_per_s == pytest.approx(20)
    assert plain.over_ours == pytest.approx(0.5)  # of 0.5, 0.25 and 1
    assert lookup.over_own_plain == pytest.approx(2)  # of 2, 4 and 1
    assert lookup.over_ours == pytest.approx(1)
    assert (ours.tau, lookup.tau) == (2, 4)


def test_texts_are_compared_with_ours_and_with_the_peers_own(parts):
    first, second, other = (1, 2, 3, 4, 5), (6, 7, 8, 9, 9), (6, 7, 8, 9, 0)
    outcomes = [
        outcome(parts, "draftwing/plain", [10], [first, second]),
        outcome(parts, "llama.cpp/plain", [10], [first, other]),
        outcome(parts, "llama.cpp/lookup", [10], [first, other]),
    ]
    lookup = parts.report.figures_of(outcomes)[2]
    assert (lookup.as_ours, lookup.as_own_plain) == (1, 2)
    # A text counts only if it is the same in every round.
    outcomes[2].rounds.append(outcome(parts, "llama.cpp/lookup", [10], [first, second]).rounds[0])
    lookup = parts.report.figures_of(outcomes)[2]
    assert (lookup.as_ours, lookup.as_own_plain) == (1, 1)


def test_prefill_counts_for_all_if_one_peer_does_not_report_it(parts):
    outcomes = [outcome(parts, "draftwing/plain", [8]), outcome(parts, "vllm/plain", [8], first=None, forwards=None)]
    ours, other = parts.report.figures_of(outcomes)
    assert ours.tokens_per_s == pytest.approx(5 / 1.5)
    assert other.tokens_per_s == pytest.approx(5 / 0.5)
    assert other.tau is None
    assert any("with the prompt's prefill" in note for note in parts.report.notes_of(outcomes, "fp32", None))


def test_a_failed_mode_is_in_the_table_and_in_the_json(parts):
    outcomes = [
        outcome(parts, "draftwing/plain", [10, 10]),
        outcome(parts, "vllm/plain", [5], failure="ended with exit code 1"),  # after a round that went well
        outcome(parts, "vllm/lookup", [], failure="no wheel"),
        outcome(parts, "vllm/eagle3", [], failure="no wheel"),
    ]
    figures = parts.report.figures_of(outcomes)
    console = Console(width=140, record=True, file=sys.stderr)
    console.print(parts.report.table_of(figures, 1, "a title"))
    rows = [line for line in console.export_text().splitlines() if "vllm" in line]
    assert len(rows) == 3
    assert "5.0" in rows[0]
    assert "not measured" in rows[1]
    assert parts.report.failures_of(figures) == [
        "failed: vllm/plain after 1 round: ended with exit code 1",
        "failed: vllm/lookup, vllm/eagle3: no wheel",
    ]
    result = json.loads(json.dumps(parts.report.result_of(outcomes, {"target": "t"})))
    assert result["target"] == "t"
    assert [mode["failure"] for mode in result["modes"]] == [None, "ended with exit code 1", "no wheel", "no wheel"]
    assert result["modes"][0]["rounds"][1][0]["num_tokens"] == 5
    assert result["modes"][1]["tokens_per_s"] == 5


def test_an_inflated_target_is_the_first_note(parts):
    notes = parts.report.notes_of(
        [outcome(parts, "draftwing/plain", [10])], "int8", "Inflated: the text is a small one's."
    )
    assert notes[0] == "NOT A REAL MODEL of its size. Inflated: the text is a small one's."
    assert any("rounds in its own way" in note for note in notes)


def test_the_picture_shows_failures_too(parts, tmp_path):
    figures = parts.report.figures_of(
        [outcome(parts, "draftwing/plain", [10]), outcome(parts, "vllm/plain", [], failure="no wheel")]
    )
    parts.report.draw(figures, "a title", "", tmp_path / "new" / "chart.png")
    assert (tmp_path / "new" / "chart.png").stat().st_size > 1000


# --- conversions -----------------------------------------------------------------------------------------------------

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": 8,
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
}


def test_rotating_adjacent_channels_equals_rotating_halves(parts):
    """llama.cpp rotates channels 2i and 2i + 1 together, the checkpoint i and i + half."""
    torch.manual_seed(0)
    heads, width, angle = 2, 6, torch.tensor([0.3, 1.1, 2.0])
    weight, state = torch.randn(heads * width, 5), torch.randn(5)

    def turned(x, first, second):
        out = x.clone()
        out[:, first] = x[:, first] * angle.cos() - x[:, second] * angle.sin()
        out[:, second] = x[:, first] * angle.sin() + x[:, second] * angle.cos()
        return out

    halves = turned((weight @ state).view(heads, width), slice(0, 3), slice(3, 6))
    permuted = torch.from_numpy(parts.gguf_file.permuted(weight.numpy(), heads).copy())
    pairs = turned((permuted @ state).view(heads, width), slice(0, 6, 2), slice(1, 6, 2))
    # A permutation of channels within a head changes no product of queries and keys.
    assert torch.allclose(pairs[:, 0::2], halves[:, :3], atol=1e-6)
    assert torch.allclose(pairs[:, 1::2], halves[:, 3:], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_read_without_torch(parts, tmp_path, dtype):
    numbers = torch.randn(3, 5).to(dtype)
    save_file({"a": numbers, "b": torch.ones(2)}, tmp_path / "model.safetensors")
    source = parts.gguf_file.Tensors(tmp_path)
    assert set(source.names) == {"a", "b"}
    assert source.shape("a") == (3, 5)
    assert torch.equal(torch.from_numpy(source.read("a").copy()), numbers.float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "model_type 'qwen2'"),
        ({"attention_bias": True}, "biases"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "RoPE of type 'llama3'"),
    ],
)
def test_unsupported_checkpoints_are_refused(parts, change, message):
    parts.gguf_file.check(CONFIG)
    with pytest.raises(parts.channel.PeerError, match=message):
        parts.gguf_file.check({**CONFIG, **change})


def checkpoint(parts, folder):
    torch.manual_seed(0)
    shapes = {"q": (128, 64), "k": (64, 64), "v": (64, 64), "o": (64, 128)}
    shapes |= {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}
    tensors = {}
    for name in parts.gguf_file.names_of(CONFIG):
        kind = name.removesuffix("_proj.weight").rpartition(".")[2]
        tensors[name] = torch.randn(shapes.get(kind, (8, 64) if "embed" in name else (64,)))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = {"type": "BPE", "vocab": {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4}, "merges": [["a", "b"]]}
    added = [{"id": 0, "content": "<s>", "special": True}, {"id": 1, "content": "</s>", "special": True}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    return tensors


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_gguf_read_back(parts, tmp_path, precision):
    gguf = pytest.importorskip("gguf")
    tensors = checkpoint(parts, tmp_path)
    parts.gguf_file.write_gguf(tmp_path, tmp_path / "out.gguf", precision)
    reader = gguf.GGUFReader(tmp_path / "out.gguf")

    def value(key):
        return reader.get_field(key).contents()

    assert value("general.architecture") == "llama"
    assert value("llama.attention.head_count_kv") == 2
    assert value("llama.rope.dimension_count") == value("llama.attention.key_length") == 32
    assert value("llama.rope.freq_base") == 5e5
    assert value("tokenizer.ggml.tokens") == ["<s>", "</s>", "a", "b", "ab", "[unused5]", "[unused6]", "[unused7]"]
    assert value("tokenizer.ggml.merges") == ["a b"]
    assert value("tokenizer.ggml.eos_token_id") == 1
    found = {each.name: each for each in reader.tensors}
    assert "output.weight" not in found  # tied
    numbers = {name: torch.tensor(gguf.dequantize(each.data, each.tensor_type)) for name, each in found.items()}
    keys = parts.gguf_file.permuted(tensors["model.layers.0.self_attn.k_proj.weight"].numpy(), 2)
    close = 0.02 if precision == "int8" else 0
    assert torch.allclose(numbers["blk.0.attn_k.weight"], torch.from_numpy(keys.copy()), atol=close)
    assert torch.equal(numbers["blk.0.ffn_norm.weight"], tensors["model.layers.0.post_attention_layernorm.weight"])
    assert not (tmp_path / "out.gguf.partial").exists()


def test_openvino_gets_the_taps_as_outputs_of_layers(parts, tmp_path):
    head, target = tmp_path / "head", tmp_path / "target"
    for folder, config in ((head, {}), (target, {"num_hidden_layers": 16})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    assert parts.genai.taps_of(head, target) == [2, 8, 13]
    (head / "config.json").write_text(json.dumps({"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}))
    assert parts.genai.taps_of(head, target) == [2, 6, 9]
    (head / "openvino_model.xml").write_text('<rt_info>\n\t\t<eagle3_mode value="True" />\n</rt_info>')
    for _ in range(2):  # the second time, it exists already
        parts.genai.write_taps(head, [2, 6, 9])
    text = (head / "openvino_model.xml").read_text()
    assert text.count('<hidden_layers_list value="1 5 8" />') == 1
    assert text.endswith("</rt_info>")


def test_vllms_counters_become_forwards(parts, monkeypatch):
    from types import SimpleNamespace as Namespace

    counts = iter([(3, 4), (5, 9)])  # drafts and accepted, before and after

    def get_metrics():
        drafts, accepted = next(counts)
        names = parts.vllm_cpu.COUNTERS
        return [Namespace(name=names["drafts"], value=drafts), Namespace(name=names["accepted"], value=accepted)]

    output = Namespace(outputs=[Namespace(token_ids=list(range(9)))], metrics=Namespace(first_token_latency=0.5))
    worker = parts.vllm_cpu.Vllm()
    worker.llm = Namespace(get_metrics=get_metrics, generate=lambda *_, **__: [output])
    monkeypatch.setitem(sys.modules, "vllm", Namespace(SamplingParams=lambda **_: None))
    run = worker.generate([1], 9)
    assert (run.forwards, run.first_tokens, run.first_seconds) == (3, 1, 0.5)  # 8 tokens after the first, 5 accepted


def test_int8_for_vllm_quantises_only_matrices_of_layers(parts, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    tensors = checkpoint(parts, source)
    parts.int8_file.write_int8(source, tmp_path / "int8")
    index = json.loads((tmp_path / "int8" / "model.safetensors.index.json").read_text())["weight_map"]
    written = load_file(tmp_path / "int8" / "model.safetensors")
    assert set(index) == set(written)
    name = "model.layers.0.mlp.down_proj.weight"
    assert written[name].dtype == torch.int8
    assert written[f"{name}_scale"].shape == (64, 1)
    error = written[name] * written[f"{name}_scale"] - tensors[name]
    assert bool((error.abs() <= written[f"{name}_scale"] / 2 + 1e-6).all())
    assert torch.equal(written["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]
    assert (tmp_path / "int8" / "tokenizer.json").exists()
