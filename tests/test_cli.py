"""The command line on a tiny model: what it prints, where, and with which exit code."""

import errno
import io
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

import draftwing as dw
import gguf_files
from conftest import CHAT_TEMPLATE, PROCESS_SECONDS, TEXTS, add_tokenizer
from draftwing.cli import main as cli
from draftwing.cli import progress
from draftwing.cli import screen as console
from draftwing.cli.options import Compared, Model
from draftwing.errors import DraftwingWarning
from draftwing.formats import gguf_weights
from draftwing.formats import write as write_module
from draftwing.lab import compare as compare_module
from draftwing.shipped import TOY
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.trainer import Progress as TrainProgress

PROMPT = TEXTS[0]
DISK_FULL = "[Errno 28] No space left on device: the disk is full: make room, or write elsewhere"


@pytest.fixture(scope="module")
def target(folder_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "target"
    return add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=300, head_dim=32), folder))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return file


def run(*args, stdin="", **env):
    return CliRunner().invoke(cli.app, list(map(str, args)), input=stdin, env=env)


def check_refused(result, *words):
    """One line says why."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert all(word in result.stderr for word in words), result.stderr


@pytest.fixture(scope="module")
def expected(target):
    return dw.load(target, draft="none").generate(PROMPT, max_tokens=12)[0]


# --- generate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "draft"), [("argument", "lookup"), ("stdin", "model"), ("-", "none"), ("file", "lookup")]
)
def test_generate_writes_the_text_alone_on_stdout(target, expected, tmp_path, source, draft):
    args = ["generate", "-t", target, "-d", target if draft == "model" else draft, "-n", 12]
    if source in ("argument", "-"):
        args.append(PROMPT if source == "argument" else source)
    elif source == "file":
        (tmp_path / "prompt.txt").write_text(PROMPT)
        args += ["--prompts", tmp_path / "prompt.txt"]
    result = run(*args, stdin=PROMPT if source in ("stdin", "-") else "")
    assert result.exit_code == 0, result.output
    assert result.stdout == expected.text.rstrip("\n") + "\n"
    assert "\x1b" not in result.stderr
    assert re.search(r"12 tokens \| [\d.]+ tokens/s \| tau \d", result.stderr)


def test_generate_json(target, expected):
    args = ["generate", PROMPT, "-t", target, "-d", target, "-n", 12, "--tree", "chain:3", "--json"]
    stop = expected.text[4:6]
    for more, want in (
        ([], expected),
        (["--stop", stop], dw.load(target, draft="none").generate(PROMPT, max_tokens=12, stop=(stop,))[0]),
    ):
        result = run(*args, *more, "--logprobs", 2)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert found["budget"] == "chain:3"
        assert found["sampling"]["max_tokens"] == 12
        (one,) = found["generations"]
        assert (one["text"], one["token_ids"]) == (want.text, want.token_ids)
        assert one["finish_reason"] == ("stop" if more else "length")
        assert one["tau"] > 1
        assert [entry["token"] for entry in one["logprobs"]] == want.token_ids
        assert len(one["logprobs"][0]["top"]) == 2


def test_generate_takes_every_sampling_option(target):
    options = "-T 0.9 --top-k 50 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.1 --presence-penalty 0.1 "
    options += "--frequency-penalty 0.1 --logit-bias 40:2.5 --logit-bias 41:-1 --stop zz --seed 3"
    args = [*options.split(), "--ignore-eos", "-n", 9, "--min-tokens", 2]
    result = run("generate", PROMPT, "-t", target, "-d", "lookup", "--json", *args)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["sampling"]
    wanted = dw.Sampling(
        0.9, 50, 0.9, 0.01, 1.1, 0.1, 0.1, {40: 2.5, 41: -1.0}, (), (), ("zz",), True, 9, 3, min_tokens=2
    )
    assert found == json.loads(json.dumps(wanted.__dict__))


def test_a_text_follows_a_schema_or_a_grammar(target, tmp_path):
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    schema["additionalProperties"] = False
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    (tmp_path / "names.lark").write_text('start: "Rome" | "Oslo"')
    args = ["generate", PROMPT, "-t", target, "-n", 60, "-T", 1, "--seed", 3]
    drafted, plain = [*args, "-d", target, "--tree", "chain:3", "--json"], [*args, "-d", "none"]
    for option, forms in (
        ("--json-schema", (json.dumps(schema), tmp_path / "schema.json")),
        ("--grammar", ('start: "Rome" | "Oslo"', tmp_path / "names.lark")),
    ):
        (one,) = json.loads(run(*drafted, option, forms[0]).stdout)["generations"]
        found = json.loads(one["text"])["city"] if option == "--json-schema" else one["text"]
        assert found in ("Rome", "Oslo")
        assert one["finish_reason"] == "stop"
        assert one["text"] in run(*plain, option, forms[1]).stdout


def test_colours_on_a_terminal_leave_the_text_as_it_is(target, expected):
    result = run("generate", PROMPT, "-t", target, "-d", target, "-n", 12, FORCE_COLOR="1", TERM="xterm-256color")
    assert result.exit_code == 0, result.output
    bare = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    assert bare.startswith(PROMPT + console.printable(expected.text))
    assert "\x1b[" in result.stdout
    assert "accepted at once: 0 1 2 3 4+" in bare
    assert "tokens/s" in bare


def test_chat_templates(target, tmp_path):
    """Without one, questions are plain text as in training: messages have an empty line between two."""
    messages = [("user", "add"), ("assistant", "b"), ("user", "c")]
    record = {"messages": [{"role": role, "content": content} for role, content in messages]}
    (tmp_path / "p.jsonl").write_text(f"{json.dumps({'question': PROMPT})}\n{json.dumps(record)}")
    template = shutil.copytree(target, tmp_path / "chat")
    add_tokenizer(template, chat_template=CHAT_TEMPLATE)
    plain = [PROMPT, "add\n\nb\n\nc"]
    wrapped = [f"<user>{PROMPT}<bot>", "<user>add<assistant>b<user>c<bot>"]
    lm = dw.load(target, draft="none")
    for folder, more, texts, bos in (
        (target, [], plain, 1),
        (template, ["--no-chat"], plain, 1),
        (template, [], wrapped, 0),
    ):
        result = run("generate", "--prompts", tmp_path / "p.jsonl", "-t", folder, "-n", 2, "--json", *more)
        assert result.exit_code == 0, result.output
        lengths = [one["num_prompt_tokens"] for one in json.loads(result.stdout)["generations"]]
        assert lengths == [bos + len(lm.tokenizer.encode_plain(text)) for text in texts]
    check_refused(run("generate", "hello", "-t", target, "-d", "none", "--chat"), "chat template")
    shown = run("generate", "--prompts", tmp_path / "p.jsonl", "-t", target, "-n", 2, "--logprobs", 1).stderr
    assert "prompt 2 of 2" in shown
    assert "logprob" in shown


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt, 130, ""),
        (BrokenPipeError, 1, ""),
        (OSError(errno.ENOSPC, "No space left on device"), 2, f"error: {DISK_FULL}\n"),
    ],
)
def test_an_interrupt_keeps_the_text_so_far_and_a_reader_that_is_gone_is_no_error(
    target, expected, monkeypatch, error, code, says
):
    write, texts = console.Screen.write, []

    def fail(self, text, num_accepted):
        write(self, text, num_accepted)
        texts.append(text)
        if len(texts) == 5:
            raise error

    monkeypatch.setattr(console.Screen, "write", fail)
    result = run("generate", PROMPT, "-t", target, "-d", "none", "-n", 12)
    assert result.exit_code == code
    assert result.stdout.rstrip("\n") == "".join(texts).rstrip("\n")
    assert expected.text.startswith("".join(texts))
    assert result.stderr == says


@pytest.mark.parametrize("command", [["generate"], ["verify", "--no-chat"]], ids=lambda command: command[0])
def test_a_prompt_is_tokenized_once(target, tmp_path, monkeypatch, command):
    encode, texts = Tokenizer.encode, []

    def count(self, text, *args, **options):
        texts.append(text)
        return encode(self, text, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", count)
    (tmp_path / "prompt.txt").write_text(PROMPT)
    result = run(*command, "--prompts", tmp_path / "prompt.txt", "-t", target, "-d", "lookup", "-n", 3)
    assert result.exit_code == 0, result.output
    assert texts.count(PROMPT) == 1


_LOSES_AN_INTERRUPT = {
    "a weakref callback": """
        class Thing: pass
        thing = Thing()
        reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
        del thing
        select.select([os.pipe()[0]], [], [], 60)
    """,
    "PyTorch imports numpy": """
        class Interrupting:
            def find_spec(self, name, path, target=None):
                if name == "numpy.lib":
                    signal.raise_signal(signal.SIGINT)
        sys.meta_path.insert(0, Interrupting())
        import torch
    """,
}


@pytest.mark.parametrize("code", _LOSES_AN_INTERRUPT.values(), ids=_LOSES_AN_INTERRUPT)
def test_no_interrupt_is_lost(code):
    """Exceptions in these places are only reported, or not even that."""
    script = f"""if True:
    import os, select, signal, sys, weakref
    from draftwing.__main__ import main
    from draftwing.cli.main import app

    @app.command()
    def lose():
        {code}

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["draftwing", "lose"]
    main()
    """
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PROCESS_SECONDS)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_an_interrupt_at_stdin_is_quiet(target, monkeypatch, capsys):
    """Ctrl-C while it waits for the end of stdin."""

    class Waiting(io.TextIOBase):
        def isatty(self):
            return False

        def read(self, size=-1):
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Waiting())
    monkeypatch.setattr(sys, "argv", ["draftwing", "generate", "-t", str(target), "-d", "none"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")


# --- errors ----------------------------------------------------------------------------------------------------------

ERRORS = {
    "no such target": (["-t", "/nowhere/model"], "/nowhere/model"),
    "no such file": (["-t", "missing.gguf"], "missing.gguf: there is no such file"),
    "a draft's name": (["x", "-d", "eagle4"], "Did you mean peagle or eagle3?"),
    "empty prompt": ([""], "prompt is empty"),
    "no prompt on stdin": ([], "no prompt"),
    "two prompts": (["x", "--prompts", "y"], "two prompts"),
    "no such prompts": (["--prompts", "/nowhere/p.jsonl"], "/nowhere/p.jsonl"),
    "rule": (["x", "--rule", "guess"], "'guess'"),
    "lossy": (["x", "--rule", "typical"], "--lossy"),
    "bias": (["x", "--logit-bias", "5"], "--logit-bias"),
    "tree": (["x", "-d", "lookup", "--tree", "bush"], "--tree must be auto"),
    "dynamic": (["x", "-d", "lookup", "--tree", "dynamic:9,0"], "neither chain:DEPTH nor dynamic:NODES,DEPTH,WIDTH"),
    "digits": (["x", "-d", "lookup", "--tree", "chain:" + "9" * 5000], "--tree must be auto"),
    "endless tree": (["x", "-d", "lookup", "--tree", "/dev/zero"], "more than 1,048,576 bytes"),
    "no file": (["x", "-d", "lookup", "--tree", "a\0b"], "--tree must be auto"),
    "no text": (["x\udcff"], "give valid text"),
    "no number": (["x", "--seed", "1e5"], "'--seed'"),
    "no such option": (["x", "--sede", "1"], "No such option: --sede"),
    "a shortened option": (["x", "--temp", "1"], "--temperature"),
    "unlike any option": (["x", "--model", "y"], "No such option: --model (see "),
    "no such schema": (["x", "--json-schema", "nowhere.json"], "'nowhere.json' cannot be read"),
    "no schema": (["x", "--json-schema", "{"], "JSON schema"),
    "empty grammar": (["x", "--grammar", ""], "cannot be read"),
    "two grammars": (["x", "--grammar", 'start: "x"', "--json-schema", "{}"], "give one of them"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_line_and_name_the_thing(target, name):
    args, wanted = ERRORS[name]
    args = ["x", *args] if args[:1] == ["-t"] else [*args, "-t", target]
    check_refused(run("generate", *args), wanted)


def test_a_cache_excludes_data(tmp_path):
    train = ("train", "eagle3", "-t", "toy", "--iterations", 1, "--precision", "no", "--device", "cpu", "-o", tmp_path)
    check_refused(run(*train, "--cache", tmp_path, "--data", tmp_path), "give --cache without --data")
    check_refused(run(*train), "give at least one file or folder (--data)")


def test_a_head_that_ships_goes_by_its_name(tmp_path):
    shipped = run("convert", "eagle3", "-t", "toy", "-o", tmp_path / "head")
    assert shipped.exit_code == 0, shipped.output
    assert (tmp_path / "head" / "config.json").exists()
    assert run("doctor", "eagle3", "-t", "toy", "--no-measure").exit_code == 0
    check_refused(run("import", "missing.gguf", tmp_path / "other"), "missing.gguf: there is no such file.")
    for command in (["doctor", "eagle4"], ["export", "eagle4", "-o", tmp_path / "other"]):
        check_refused(run(*command, "-t", "toy"), "eagle4: there is no such folder. Did you mean eagle3 or eagle1?")
    check_refused(
        run("doctor", tmp_path / "haed", "-t", "toy"), f"Did you mean {tmp_path / 'head'}?", "or a name: eagle3"
    )
    for command in ("convert", "export"):
        file = tmp_path / "other.gguf"
        check_refused(run(command, "eagle3", "-t", "toy", "-o", file), "is a folder: add --to gguf")
        assert not file.exists()


def test_verify_needs_a_draft(target):
    check_refused(run("verify", "-t", target, "-d", "none"), "nothing drafts here: choose a --draft")


def test_commands_for_engines_with_a_gguf_target_can_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = gguf_files.write(TOY / "target", tmp_path / "my model.gguf")
    done = run("export", TOY / "eagle3", "-t", file, "-o", "head", "--to", "vllm")
    assert done.exit_code == 0, done.output
    make, serve = map(shlex.split, done.stdout.splitlines())
    assert run(*make[1:]).exit_code == 0
    assert make[:2] == ["draftwing", "import"]
    assert serve[:2] == ["vllm", "serve"]
    assert (tmp_path / serve[2] / "config.json").exists()


def test_a_head_is_written_into_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for head in ("eagle1", "eagle3"):
        assert run("convert", head, "-t", "toy", "-o", ".").exit_code == 0
        assert os.path.samefile(os.curdir, tmp_path)  # the empty folder was filled, not replaced
        assert run("doctor", ".", "-t", "toy", "--no-measure").exit_code == 0


@pytest.mark.parametrize("is_new", [True, False])
def test_an_interrupted_conversion_leaves_what_was_there(is_new, tmp_path, monkeypatch):
    head = tmp_path / "head"
    if not is_new:
        shutil.copytree(TOY / "eagle3", head)
    before = {path.name: path.read_bytes() for path in head.glob("*")}

    def stop(tensors, file, metadata):
        file.write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(write_module, "save_file", stop)
    result = run("convert", "eagle1", "-t", "toy", "-o", head)
    assert result.exit_code == 130
    assert result.stderr == f"stopped before {head} was complete: run the same command again\n"
    assert {path.name: path.read_bytes() for path in head.glob("*")} == before
    assert list(tmp_path.iterdir()) == ([] if is_new else [head])


def test_an_import_that_stops_leaves_nothing(tmp_path, monkeypatch):
    file = gguf_files.write(TOY / "target", tmp_path / "model.gguf")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        check_refused(run("import", file, tmp_path / "out"), "out: cannot be written", "exceed the size limit")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    check_refused(run("import", file, file / "out"), "out: cannot be written", "part of the path is a file")
    monkeypatch.setattr(gguf_weights, "check_finite", interrupt)
    result = run("import", file, tmp_path / "out")
    assert result.exit_code == 130
    assert f"stopped before {tmp_path / 'out'} was complete: run the same command again\n" in result.stderr
    assert list(tmp_path.iterdir()) == [file]


def interrupt(*args):
    raise KeyboardInterrupt


def test_a_killed_import_is_hidden_and_removed_by_the_next(tmp_path):
    file, out = gguf_files.write(TOY / "target", tmp_path / "model.gguf"), tmp_path / "out"
    child = os.fork()
    if child == 0:
        gguf_weights.open = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # the weights, after the other files
        try:
            gguf_weights.import_gguf(file, out)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    assert not out.exists()
    assert run("import", file, out).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "out"]


TREES = {
    "deep": ("[" * 100_000, "nested too deep"),
    "an orphan": ("[[0, 0]]", "each path's parent in its list"),
    "no JSON": ("[[0]", "--tree must be auto"),
}


@pytest.mark.parametrize("name", ["a tree", *TREES])
def test_trees_of_files(target, tmp_path, expected, name):
    content, words = TREES.get(name, ("[[0], [1], [0, 0]]", ""))
    (tmp_path / "tree.json").write_text(content)
    args = ["generate", PROMPT, "-t", target, "-d", target, "-n", 12, "--tree", tmp_path / "tree.json", "--json"]
    result = run(*args)
    if not words:
        found = json.loads(result.stdout)
        assert found["budget"] == "static of 3 nodes"
        assert found["generations"][0]["token_ids"] == expected.token_ids
        return
    check_refused(result, "error: --tree ", words)


@pytest.mark.parametrize("content", [b'{"messages": ["x"]}\n', b"\xff\xfe", b""])
def test_prompts_that_are_none(target, tmp_path, content):
    (tmp_path / "prompts.jsonl").write_bytes(content)
    for stdin, args in (content, []), (b"", ["--prompts", tmp_path / "prompts.jsonl"]):
        check_refused(run("generate", "-t", target, "-d", "none", "-n", 2, *args, stdin=stdin))


@pytest.mark.parametrize("command", ["generate", "verify", "doctor"])
def test_a_prompt_that_is_too_long_is_named(command, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x"}\n\n' + json.dumps({"prompt": "x " * 9000}))
    args = {"generate": ["-d", "none"], "verify": [], "doctor": [TOY / "eagle3"]}[command]
    check_refused(run(command, *args, "-t", "toy", "--prompts", file), f"{file}, line 3: the prompt has 9002 tokens")


def test_typical_with_lossy_says_so(target):
    result = run("generate", PROMPT, "-t", target, "-d", target, "-n", 4, "--rule", "typical", "--lossy")
    assert result.exit_code == 0
    assert "LOSSY" in result.stderr


# --- compare ---------------------------------------------------------------------------------------------------------


def test_compare_table(target, prompts):
    args = ["compare", "-t", target, "--prompts", prompts, "--num-prompts", 2, "-n", 6, "--rounds", 2]
    result = run(*args, "-d", "lookup", "-d", target, "-d", "none", "--texts")
    assert result.exit_code == 0, result.output
    table = [line for line in result.stdout.splitlines() if "yes (2 of 2)" in line]
    assert len(table) == 2
    for title in ("drafter", "tokens/s", "speedup", "tau", "efficiency", "alpha by depth", "text identical"):
        assert title in result.stdout
    baseline = "baseline: the same settings without drafts, batch 1, engine lean"
    for line in (baseline, "machine: cpu", "num prompts 2", "─ baseline decoding: ", "─ lookup: "):
        assert line in result.stdout


def test_tables_for_narrow_terminals(target, prompts, monkeypatch):
    monkeypatch.setattr(console, "FILE_WIDTH", 60)
    result = run("compare", "-t", target, "-d", "lookup", "--prompts", prompts, "--num-prompts", 1, "-n", 6)
    assert result.exit_code == 0, result.output
    assert "yes (1 of 1)" in result.stdout
    assert "alpha" not in result.stdout
    assert "…" not in result.stdout
    listed = run("list").stdout.split("toy:")[0]
    assert "smollm2-135m-instruct" in listed
    assert "licence" not in listed


def test_compare_json_and_default_drafters(target, prompts):
    args = ["compare", "-t", target, "--prompts", prompts, "--num-prompts", 1, "-n", 5]
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [method["name"] for method in found["methods"]] == ["none", "lookup"]
    assert found["all_identical"] is True
    assert found["texts"]["none"] == found["texts"]["lookup"]
    assert "─ lookup: " not in run(*args).stdout


@pytest.mark.parametrize(("runs_before", "kept"), [(7, (1, 2)), (8, (2, 2)), (3, (1, 1)), (1, None)])
def test_ctrl_c_keeps_finished_rounds_of_a_comparison(target, runs_before, kept):
    lms = [dw.load(target, draft=draft) for draft in ("none", "lookup")]

    def stop(done, total):
        assert total == 14  # 2 for the warm-up, 4 for each round
        if done == 2 + runs_before:
            raise KeyboardInterrupt

    arguments = (lms, TEXTS[:2], dw.Sampling(max_tokens=4))
    if kept is None:
        with pytest.raises(KeyboardInterrupt):
            compare_module.compare(*arguments, rounds=3, on_progress=stop)
        return
    found = compare_module.compare(*arguments, rounds=3, on_progress=stop)
    assert not found.is_complete
    assert (found.settings["rounds"], found.settings["num_prompts"]) == kept
    assert [method.num_identical for method in found.methods] == [kept[1], kept[1]]
    whole = compare_module.compare(lms, TEXTS[: kept[1]], arguments[2], rounds=kept[0])
    assert whole.is_complete
    assert [method.tau for method in found.methods] == [method.tau for method in whole.methods]


def test_a_stopped_comparison_prints_its_table(target, prompts, monkeypatch):
    real = compare_module.compare
    monkeypatch.setattr(compare_module, "compare", lambda *a, **more: replace(real(*a, **more), is_complete=False))
    stopped = run("compare", "-t", target, "-d", "lookup", "--prompts", prompts, "--num-prompts", 2, "-n", 3)
    assert stopped.exit_code == 130
    assert "lookup" in stopped.stdout
    assert "stopped: 1 rounds of 2 prompts are finished" in stopped.stderr


def test_compare_fails_where_a_text_differs(target, prompts, monkeypatch):
    real = compare_module.compare

    def differs(*args, **options):
        found = real(*args, **options)
        found.methods[1] = replace(found.methods[1], num_identical=0)
        return found

    monkeypatch.setattr(compare_module, "compare", differs)
    args = ["compare", "-t", target, "-d", target, "--prompts", prompts, "--num-prompts", 1, "-n", 3]
    result = run(*args)
    assert result.exit_code == 1
    assert "no (0 of 1)" in result.stdout
    assert json.loads(run(*args, "--json").stdout)["methods"][1]["promise"] == "text"
    # The classic rules promise the distribution of the text, not the text.
    args += ["--rule", "speculative", "-T", 1]
    result = run(*args)
    assert result.exit_code == 0
    assert "distribution of the text" in result.stdout
    assert "same distribution, other text" in result.stdout
    assert "identical" not in result.stdout
    assert json.loads(run(*args, "--json").stdout)["methods"][1]["promise"] == "distribution"


# --- verify ----------------------------------------------------------------------------------------------------------


def test_verify(target, prompts):
    args = ["verify", "-t", target, "-d", target, "--prompts", prompts, "--num-prompts", 2, "-n", 8, "-T", 0.7]
    args += ["--dtype", "float64"]
    result = run(*args)
    assert result.exit_code == 0, result.output
    assert "2 of 2 texts identical" in result.stdout
    found = json.loads(run(*args, "--json").stdout)
    assert (found["num_identical"], found["differences"]) == (2, [])
    check_refused(run(*args, "--rule", "block"), "'block'")


@pytest.mark.parametrize(
    ("ties", "options", "code"),
    [([True], [], 1), ([True], ["--allow-ties"], 0), ([True, False], ["--allow-ties"], 1)],
)
def test_verify_exit_codes(target, prompts, monkeypatch, ties, options, code):
    found = [
        compare_module.Difference(index, 4, 60, 61, 1e-7 if tie else float("inf"), 1e-6, tie)
        for index, tie in enumerate(ties)
    ]
    fake = compare_module.Verification(3, 3 - len(found), 30, found, {"target": "x"})
    monkeypatch.setattr(compare_module, "verify", lambda *args, **options: fake)
    args = ["verify", "-t", target, "-d", "lookup", "--prompts", prompts, *options]
    result = run(*args)
    assert result.exit_code == code
    assert "(60)" in result.stdout
    assert "(61)" in result.stdout
    assert "1.00e-07" in result.stdout
    assert "tie within the rounding noise" in result.stdout
    assert ("DIFFERENT" in result.stdout) is (False in ties)
    result = run(*args, "--json")
    assert result.exit_code == code
    margins = [each["margin"] for each in json.loads(result.stdout)["differences"]]
    assert margins == [1e-7 if tie else None for tie in ties]


# --- info and the rest -----------------------------------------------------------------------------------------------


def test_info(folder_of, tmp_path):
    target = add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=300), tmp_path / "target"))  # not packed
    result = run("info", "-t", target, "-d", target, "--bandwidth", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    weights = dw.load(target, draft="none").target
    embedding = weights.vocab_size * weights.hidden_size
    assert found["target"]["family"] == "llama"
    assert found["target"]["parameters"] == weights.num_weight_bytes // 4 + embedding + norms(weights)
    assert found["tokenizer"] == {"vocabulary": 300, "chat_template": False}
    assert found["drafter"]["name"].startswith("causal-lm")
    assert found["target"]["matrices"] == weights.runs_as == weights.head.runs_as
    assert found["target"]["exactness"].startswith("to the bit")
    drafts = dw.load(target, draft=target)
    assert found["drafter"]["matrices"].startswith(drafts.drafter.runs_as)
    assert ("stays the target's" in found["drafter"]["matrices"]) is ("int8" in drafts.drafter.runs_as)
    assert found["drafter"]["mb_per_token"] == drafts.drafter.num_bytes / 1e6
    assert found["bandwidth"]["baseline_limit_tokens_per_s"] > 0
    table = run("info", "-t", target, "-d", "lookup")
    assert table.exit_code == 0
    for word in ("target", "tokenizer", "drafter", "machine", "lookup", "mb per token", "matrices", "exactness"):
        assert word in table.stdout


def norms(target):
    return (2 * target.num_layers + 1) * target.hidden_size


def test_train(target, expected, tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text * 6}) + "\n" for text in TEXTS * 8))
    data = ["-t", target, "--data", tmp_path / "texts.jsonl", "--max-length", 32, "--tokens-per-batch", 64]
    computing = ["--device", "cpu", "--dtype", "float32", "--precision", "no", "--eval-prompts", 1]
    args = ["train", "eagle1", "-o", tmp_path / "run", *data, *computing, "--iterations", 2]
    check_refused(run(*args, "--minutes", 1), "either iterations or minutes")
    result = run(*args, "--licence", "MIT", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["iterations"], found["finished"]) == (2, True)
    assert "iteration 2: loss " in result.stderr
    assert "license: mit" in (tmp_path / "run" / "head" / "README.md").read_text().lower()
    assert dw.load(target, draft=found["head"]).generate(PROMPT, max_tokens=12)[0].token_ids == expected.token_ids


def test_warnings_are_one_line(capsys):
    with console.short_warnings():
        warnings.simplefilter("always")
        warnings.warn("slow\nindeed", DraftwingWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: slow indeed\n"


def test_help_and_public_names_import_nothing_that_takes_long():
    program = """
import sys
import draftwing as dw
assert set(dw.__all__) <= set(dir(dw))
from draftwing.cli.main import main
for args in (["--help"], ["generate", "--help"], ["data", "cache", "--help"], ["--version"]):
    sys.argv = ["draftwing", *args]
    try:
        main()
    except SystemExit as error:
        print("code", error.code, {"torch", "transformers", "numpy"} & set(sys.modules))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_SECONDS, check=True)
    shown = done.stdout.split("code 0 set()\n")
    assert shown.pop() == ""
    for text, words in zip(
        shown,
        (("generate", "compare", "verify", "info"), ("--draft",), ("--out",), (f"draftwing {dw.__version__}",)),
        strict=True,
    ):
        assert all(word in text for word in words)


@pytest.mark.parametrize(
    "args",
    [
        ["convert", TOY / "eagle3", "-t", "toy", "-o", ""],
        ["convert", "", "-t", "toy", "-o", "head"],
        ["bench", "--report", ""],
        ["train", "eagle1", "--init-from", "", "-o", "run"],
        ["import", "file.gguf", ""],
    ],
    ids=lambda args: args[0],
)
def test_an_empty_path_is_not_the_current_folder(args, tmp_path, monkeypatch):
    """Such as that of a variable that is not set."""
    monkeypatch.chdir(tmp_path)
    result = run(*args)
    assert result.exit_code == 2
    assert "it is empty: name a file or folder, or the current folder as '.'" in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_module_is_the_command_and_stops_quietly_while_it_is_imported():
    done = subprocess.run(
        [sys.executable, "-m", "draftwing", "--version"],
        capture_output=True, text=True, timeout=PROCESS_SECONDS, check=True,
    )  # fmt: skip
    assert done.stdout == f"draftwing {dw.__version__}\n"
    program = """
import runpy, sys
class Interrupted:
    def find_spec(name, *_):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted)
runpy.run_module("draftwing", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def commands(app=cli.app, path=()):
    for command in app.registered_commands:
        yield (*path, command.name or command.callback.__name__)
    for group in app.registered_groups:
        yield from commands(group.typer_instance, (*path, group.name))


@pytest.mark.parametrize("path", [pytest.param(path, id=" ".join(path)) for path in commands()])
def test_every_help_has_examples_and_json_but_for_commands_without_figures(path):
    shown = run(*path, "--help", COLUMNS="200", NO_COLOR="1", TERM="dumb").output
    assert re.search(rf"Examples:.*• .*draftwing {' '.join(path[:1])}", shown, re.S), shown
    assert ("--json" in shown) == (path[0] not in ("convert", "export", "serve"))
    if re.search("--draft +-d", shown) and path[0] != "data":
        for word in ("eagle3 (", "lookup (", "suffix (", "early-exit (", "none;", "docs/methods.md"):
            assert word in " ".join(re.sub("[│\\n]", " ", shown).split())


# --- what a shell does -----------------------------------------------------------------------------------------------


def shell(command, *args):
    """A command line with ``$0`` for the program and ``$@`` for bytes of any kind."""
    program = [sys.executable, "-m", "draftwing.cli.main"]
    words = " ".join(map(shlex.quote, program))
    return subprocess.run(
        ["bash", "-c", command.replace("draftwing", words), "bash", *args],
        capture_output=True,
        timeout=PROCESS_SECONDS,
        check=False,
    )


def test_arguments_that_are_not_utf_8():
    done = shell('draftwing pull "$1"', b"caf\xe9")
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: caf")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    "way", ["list | true", "--version >&-", "list >/dev/full", "--version >/dev/full", "--version 2>&-"]
)
def test_a_stdout_that_takes_nothing(way):
    done = shell(f"draftwing {way}; exit ${{PIPESTATUS[0]}}")
    assert done.returncode in ((2,) if "full" in way else (0, 1))
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr
    assert done.stderr.decode() == (f"error: {DISK_FULL}\n" if "full" in way else "")


def test_every_draft_that_a_target_can_have(capsys):
    plain = dw.load(draft="none")
    found = [name for name, _ in Compared(["lookup"], every=True).load(plain, Model())]
    assert {"eagle1", "eagle3", "eagle3+lookup", "causal-lm", "lookahead", "suffix", "self-window"} <= set(found)
    assert not {"none", "mtp"} & set(found)
    assert "skipped mtp: toy (LlamaForCausalLM) has no MTP modules" in capsys.readouterr().err


# --- progress in files and pipes -------------------------------------------------------------------------------------


def test_a_long_run_in_a_pipe_tells_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a notebook
    monkeypatch.setattr(progress, "EVERY", 0.05)
    with progress.progress("answering") as on_progress:
        time.sleep(0.2)
        on_progress(1, 4000)
        time.sleep(0.2)  # one answer that takes long
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 4
    assert lines[0] == "answering, 0:00 so far"
    assert re.fullmatch(r"answering: 1 of 4,000, 0:00 so far, about \d+:\d\d(:\d\d)? left", lines[-1])
    time.sleep(0.15)
    assert capsys.readouterr().err == ""  # and no more once it has ended


def test_a_bar_shows_the_present_detail(monkeypatch):
    out, count = io.StringIO(), 0
    monkeypatch.setattr(progress, "new_console", lambda **_: Console(file=out, force_terminal=True, width=120))
    with progress.progress("answering", lambda: f"{count} tokens") as on_progress:
        on_progress(1, 4)
        count = 77  # and no further call
    assert "77 tokens" in out.getvalue()


def test_a_resumed_run_tells_its_own_speed(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.05)
    now = iter(range(0, 10**6, 10))
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(now))
    rate = progress.token_rate(lambda: 1200)
    assert rate() == "1,200 tokens, 120 tokens/s"
    with progress.progress("answering", lambda: "1,200 tokens", resumes=True) as on_progress:
        on_progress(3000, 4000)
        on_progress(3010, 4000)
        time.sleep(0.1)
    line = capsys.readouterr().err.splitlines()[0]
    found = re.fullmatch(r"answering: 3,010 of 4,000, 1,200 tokens, 0:10 so far, about (.*) left", line)
    assert found[1] == "16:30"  # ten took ten seconds, and 990 are left


def test_training_in_a_pipe_tells_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.05)
    with progress.training() as show:
        metrics = {"loss": 2.0, "tokens_per_s": 100.0, "agreement": [0.5, 0.25]}
        show(TrainProgress(7, 100, metrics))
        time.sleep(0.2)
        show(TrainProgress(8, 10**9, {**metrics, "tau": 2.5, "alpha": [0.75]}))  # of minutes: the number is unknown
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training: 7 of 100, loss 2.000, 100 tokens/s, agreement .50 .25, 0:00 so far"
    assert "iteration 8: loss 2.000, 100 tokens/s, agreement .50 .25, tau 2.50 (.75)" in lines
    assert lines[-1] == "training: 8, loss 2.000, 100 tokens/s, agreement .50 .25, 0:00 so far"


@pytest.mark.parametrize("command", ["compare", "verify"])
def test_commands_tell_how_far_they_are(target, prompts, monkeypatch, command):
    monkeypatch.setattr(progress, "EVERY", 1e-3)
    args = ["-t", target, "-d", "lookup", "--prompts", prompts, "-n", 20]
    result = run(command, *args)
    assert result.exit_code == 0, result.output
    assert re.search(r"^(comparing|verifying): \d of \d, \d:\d\d so far", result.stderr, re.M)
