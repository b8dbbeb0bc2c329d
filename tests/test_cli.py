"""The command line on a tiny model: what it prints, where, and with which exit code."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner

import draftwing as dw
from draftwing.cli import main as cli
from draftwing.cli import progress
from draftwing.cli import screen as console
from draftwing.cli.options import every_draft
from draftwing.errors import DraftwingWarning
from draftwing.lab import compare as compare_module
from draftwing.train.trainer import Progress as TrainProgress

PROMPT = "def add(a, b):\n    return a"
TEXTS = [
    PROMPT,
    "class Table:\n    def add(self, row):\n        self.rows.append(row)\n",
    "for row in rows: print(row)",
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def add_tokenizer(folder):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>"]
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@pytest.fixture(scope="module")
def target(folder_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "target"
    return add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=300), folder))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return file


def run(*args, stdin="", **env):
    return CliRunner().invoke(cli.app, list(map(str, args)), input=stdin, env=env)


@pytest.fixture(scope="module")
def expected(target):
    return dw.load(target, draft="none").generate(PROMPT, max_tokens=12)[0]


# --- generate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["argument", "stdin", "file"])
@pytest.mark.parametrize("draft", ["lookup", "itself"])
def test_generate_writes_the_text_alone_on_stdout(target, expected, tmp_path, source, draft):
    args = ["generate", "-t", target, "-d", target if draft == "itself" else draft, "-n", 12]
    stdin = PROMPT if source == "stdin" else ""
    if source == "argument":
        args.append(PROMPT)
    elif source == "file":
        (tmp_path / "prompt.txt").write_text(PROMPT)
        args += ["--prompts", tmp_path / "prompt.txt"]
    result = run(*args, stdin=stdin)
    assert result.exit_code == 0, result.output
    assert result.stdout == expected.text.rstrip("\n") + "\n"
    assert "\x1b" not in result.stderr
    assert "tokens/s" in result.stderr
    assert "tau" in result.stderr


def test_generate_json(target, expected):
    args = ["generate", PROMPT, "-t", target, "-d", target, "-n", 12, "--tree", "chain:3", "--json", "--compare"]
    result = run(*args, "--logprobs", 2)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["budget"] == "chain:3"
    assert found["sampling"]["max_tokens"] == 12
    (one,) = found["generations"]
    assert one["text"] == expected.text
    assert one["token_ids"] == expected.token_ids
    assert one["tau"] > 1
    assert one["plain"]["identical"] is True
    assert one["plain"]["efficiency"] == pytest.approx(one["plain"]["speedup"] / one["tau"])
    assert [entry["token"] for entry in one["logprobs"]] == expected.token_ids
    assert len(one["logprobs"][0]["top"]) == 2


def test_generate_takes_every_sampling_option(target):
    options = "-T 0.9 --top-k 50 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.1 --presence-penalty 0.1 "
    options += "--frequency-penalty 0.1 --logit-bias 40:2.5 --logit-bias 41:-1 --ban 7 --ban 8 --stop zz --seed 3"
    args = [*options.split(), "--ignore-eos", "-n", 9, "--min-tokens", 2]
    result = run("generate", PROMPT, "-t", target, "-d", "lookup", "--json", *args)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["sampling"]
    wanted = dw.Sampling(
        0.9, 50, 0.9, 0.01, 1.1, 0.1, 0.1, {40: 2.5, 41: -1.0}, (7, 8), (), ("zz",), True, 9, 3, min_tokens=2
    )
    assert found == json.loads(json.dumps(wanted.__dict__))


def test_a_text_follows_a_schema_or_a_grammar(target, tmp_path):
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    schema["additionalProperties"] = False
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    (tmp_path / "names.lark").write_text('start: "Rome" | "Oslo"')
    args = ["generate", PROMPT, "-t", target, "-n", 60, "-T", 1, "--seed", 3]
    drafted, plain = [*args, "-d", target, "--tree", "chain:3", "--compare", "--json"], [*args, "-d", "none"]
    for option, forms in (
        ("--json-schema", (json.dumps(schema), tmp_path / "schema.json")),
        ("--grammar", ('start: "Rome" | "Oslo"', tmp_path / "names.lark")),
    ):
        (one,) = json.loads(run(*drafted, option, forms[0]).stdout)["generations"]
        found = json.loads(one["text"])["city"] if option == "--json-schema" else one["text"]
        assert found in ("Rome", "Oslo")
        assert one["finish_reason"] == "stop"
        assert one["plain"]["identical"]
        assert one["text"] in run(*plain, option, forms[1]).stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--json-schema", "nowhere.json"], "'nowhere.json' cannot be read"),
        (["--json-schema", "{"], "JSON schema"),
        (["--grammar", "start: ("], "cannot be followed"),
        (["--grammar", ""], "cannot be read"),
        (["--grammar", 'start: "x"', "--json-schema", "{}"], "give one of them"),
        (["--grammar", 'start: "x"', "--ignore-eos"], "leave one of them out"),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused(target, args, words):
    result = run("generate", PROMPT, "-t", target, "-d", "none", *args)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split())


def test_a_stop_string_ends_text_and_ids(target, expected):
    stop = expected.text[4:6]
    want = dw.load(target, draft="none").generate(PROMPT, max_tokens=12, stop=(stop,), logprobs=0)[0]
    result = run("generate", PROMPT, "-t", target, "-d", target, "-n", 12, "--stop", stop, "--logprobs", 0, "--json")
    (one,) = json.loads(result.stdout)["generations"]
    assert (one["text"], one["token_ids"], one["finish_reason"]) == (want.text, want.token_ids, "stop")
    assert len(one["logprobs"]) == len(want.token_ids)


def test_several_prompts_and_comparison_lines(target, prompts):
    result = run("generate", "--prompts", prompts, "-t", target, "-d", "lookup", "-n", 5, "--compare", "--logprobs", 1)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("identical yes") == 3
    assert result.stderr.count("speedup") == 3
    assert "prompt 3 of 3" in result.stderr
    assert "logprob" in result.stderr


def test_colours_on_a_terminal_leave_the_text_as_it_is(target, expected):
    result = run("generate", PROMPT, "-t", target, "-d", target, "-n", 12, FORCE_COLOR="1", TERM="xterm-256color")
    assert result.exit_code == 0, result.output
    bare = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    assert bare.startswith(PROMPT + console.printable(expected.text))
    assert "\x1b[" in result.stdout
    assert "accepted at once: 0 1 2 3 4+" in bare
    assert "tokens/s" in bare


def test_model_text_is_neither_markup_nor_terminal_commands(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    screen = console.Screen()
    screen.write("[bold]x[/bold]\t \x1b[2J\r", 0)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert shown == "[bold]x[/bold]\t ␛[2J␍"


def test_chat_template(target, tmp_path):
    folder = shutil.copytree(target, tmp_path / "chat")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    lengths = []
    for extra in ([], ["--no-chat"]):
        result = run("generate", "hello", "-t", folder, "-d", "none", "-n", 2, "--json", *extra)
        assert result.exit_code == 0, result.output
        lengths.append(json.loads(result.stdout)["generations"][0]["num_prompt_tokens"])
    lm = dw.load(folder, draft="none")
    assert lengths == [len(lm.encode("<user>hello<bot>")), len(lm.encode("hello"))]
    refused = run("generate", "hello", "-t", target, "-d", "none", "--chat")
    assert refused.exit_code == 2
    assert "chat template" in refused.stderr


def test_interruption_keeps_what_was_written(target, expected, monkeypatch):
    write = console.Screen.write
    count = []

    def interrupted(self, text, num_accepted):
        write(self, text, num_accepted)
        count.append(text)
        if len(count) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(console.Screen, "write", interrupted)
    result = run("generate", PROMPT, "-t", target, "-d", "none", "-n", 12)
    assert result.exit_code == 130
    assert result.stdout.rstrip("\n") == "".join(count).rstrip("\n")
    assert expected.text.startswith("".join(count))
    assert "Traceback" not in result.output


def test_a_reader_that_goes_away_is_no_error(target, monkeypatch):
    def gone(self, text, num_accepted):
        raise BrokenPipeError

    monkeypatch.setattr(console.Screen, "write", gone)
    result = run("generate", PROMPT, "-t", target, "-d", "none", "-n", 3)
    assert result.exit_code == 1
    assert result.stderr == ""


# --- errors ----------------------------------------------------------------------------------------------------------

ERRORS = {
    "no such target": (["-t", "/nowhere/model"], "/nowhere/model"),
    "empty prompt": ([""], "prompt is empty"),
    "no prompt on stdin": ([], "no prompt"),
    "two prompts": (["x", "--prompts", "y"], "two prompts"),
    "no such prompts": (["--prompts", "/nowhere/p.jsonl"], "/nowhere/p.jsonl"),
    "temperature": (["x", "-T", "-1"], "temperature"),
    "max tokens": (["x", "-n", "0"], "max_tokens"),
    "rule": (["x", "--rule", "guess"], "'guess'"),
    "lossy": (["x", "--rule", "typical"], "--lossy"),
    "dtype": (["x", "--dtype", "int3"], "'int3'"),
    "bias": (["x", "--logit-bias", "5"], "--logit-bias"),
    "bias token": (["x", "--logit-bias", "5000:1"], "5000"),
    "tree": (["x", "-d", "lookup", "--tree", "bush"], "--tree must be auto"),
    "chain": (["x", "-d", "lookup", "--tree", "chain:-1"], "depth"),
    "dynamic": (["x", "-d", "lookup", "--tree", "dynamic:9,0"], "--tree must be auto"),
    "endless chain": (["x", "-d", "lookup", "--tree", "chain:99999999999999999999"], "depth from 0 to 1,024"),
    "digits": (["x", "-d", "lookup", "--tree", "chain:" + "9" * 5000], "--tree must be auto"),
    "wide": (["x", "-d", "lookup", "--tree", "dynamic:60,2,40000"], "width from 1 to 256"),
    "endless tree": (["x", "-d", "lookup", "--tree", "/dev/zero"], "more than 1,048,576 bytes"),
    "no file": (["x", "-d", "lookup", "--tree", "a\0b"], "--tree must be auto"),
    "no text": (["x\udcff"], "give valid text"),
    "no text for a stop": (["x", "--stop", "\udcff"], "stop must be text"),
    "no number": (["x", "--seed", "1e5"], "'--seed'"),
    "no such option": (["x", "--sede", "1"], "No such option: --sede"),
    "huge bias": (["x", "--logit-bias", "5:1e999"], "logit_bias must be in"),
    "draft": (["x", "-d", "/nowhere/draft"], "/nowhere/draft"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_line_and_name_the_thing(target, name):
    args, wanted = ERRORS[name]
    args = ["x", *args] if args[:1] == ["-t"] else [*args, "-t", target]
    result = run("generate", *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert wanted in result.stderr


TREES = {
    "a huge rank": ("[[99999999999]]", "ranks from 0 to 255"),
    "deep": ("[" * 100_000, "nested too deep"),
    "booleans": ("[[true]]", "found [True]"),
    "no list": ('{"a": 1}', "a static tree is a list"),
    "an orphan": ("[[0, 0]]", "each path's parent in its list"),
    "no JSON": ("[[0]", "--tree must be auto"),
    "empty": ("", "--tree must be auto"),
}


@pytest.mark.parametrize("name", TREES)
def test_trees_that_are_none(target, tmp_path, name):
    content, wanted = TREES[name]
    (tmp_path / "tree.json").write_text(content)
    result = run("generate", "x", "-t", target, "-d", "lookup", "--tree", tmp_path / "tree.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: --tree ")
    assert result.stderr.count("\n") == 1
    assert wanted in result.stderr


def test_a_tree_of_a_file(target, tmp_path, expected):
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0]]")
    args = ["generate", PROMPT, "-t", target, "-d", target, "-n", 12, "--tree", tmp_path / "tree.json", "--json"]
    found = json.loads(run(*args).stdout)
    assert found["budget"] == "static of 3 nodes"
    assert found["generations"][0]["token_ids"] == expected.token_ids


NO_PROMPTS = [b'{"messages": ["x"]}\n', b"\xff\xfe", b'{"prompt": {}}', b""]


@pytest.mark.parametrize(
    ("source", "content"),
    [
        *(("stdin", content) for content in NO_PROMPTS),
        *(("file", content) for content in (*NO_PROMPTS, b"[" * 100_000)),
    ],
)
def test_prompts_that_are_none(target, tmp_path, source, content):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    stdin, args = (content, []) if source == "stdin" else (b"", ["--prompts", str(file)])
    result = CliRunner().invoke(cli.app, ["generate", "-t", str(target), "-d", "none", "-n", "2", *args], input=stdin)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_questions_without_a_chat_template_are_plain_text(target, tmp_path):
    """As in training, where messages have an empty line between two."""
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    lm = dw.load(target, draft="none")
    for record, text in (({"question": PROMPT}, PROMPT), ({"messages": messages}, "add\n\nb\n\nc")):
        (tmp_path / "p.jsonl").write_text(json.dumps(record))
        result = run("generate", "--prompts", tmp_path / "p.jsonl", "-t", target, "-d", "none", "-n", 2, "--json")
        assert result.exit_code == 0, result.output
        (one,) = json.loads(result.stdout)["generations"]
        assert one["num_prompt_tokens"] == len(lm.encode(text))


def test_typical_with_lossy_says_so(target):
    result = run("generate", PROMPT, "-t", target, "-d", target, "-n", 4, "--rule", "typical", "--lossy")
    assert result.exit_code == 0
    assert "LOSSY" in result.stderr


# --- compare ---------------------------------------------------------------------------------------------------------


def test_compare_table(target, prompts):
    args = ["--prompts", prompts, "--num-prompts", 2, "-n", 6, "--rounds", 2]
    result = run("compare", "-t", target, "-d", "lookup", "-d", target, "-d", "none", *args)
    assert result.exit_code == 0, result.output
    table = [line for line in result.stdout.splitlines() if "yes (2 of 2)" in line]
    assert len(table) == 2
    for title in ("drafter", "tokens/s", "speedup", "tau", "efficiency", "alpha by depth", "text identical"):
        assert title in result.stdout
    assert "baseline: plain decoding" in result.stdout
    assert "machine: cpu" in result.stdout
    assert "num prompts 2" in result.stdout


def test_compare_shows_the_texts(target, prompts):
    args = ["compare", "-t", target, "--prompts", prompts, "--num-prompts", 1, "-n", 5]
    shown, plain = run(*args, "--texts").stdout, run(*args).stdout
    for title in ("plain decoding: ", "lookup: "):
        assert f"─ {title}" in shown
        assert f"─ {title}" not in plain


def test_compare_json_and_default_drafters(target, prompts):
    result = run("compare", "-t", target, "--prompts", prompts, "--num-prompts", 1, "-n", 5, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [method["name"] for method in found["methods"]] == ["none", "lookup"]
    assert found["all_identical"] is True
    assert found["texts"]["none"] == found["texts"]["lookup"]


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
    # The classic rules promise the law of the text, not the text.
    args += ["--rule", "speculative", "-T", 1]
    result = run(*args)
    assert result.exit_code == 0
    assert "law of the text" in result.stdout
    assert "same law, other text" in result.stdout
    assert "no (0 of 1)" not in result.stdout
    assert "identical" not in result.stdout
    assert json.loads(run(*args, "--json").stdout)["methods"][1]["promise"] == "law"


# --- verify ----------------------------------------------------------------------------------------------------------


def test_verify(target, prompts):
    args = ["verify", "-t", target, "-d", target, "--prompts", prompts, "--num-prompts", 2, "-n", 8, "-T", 0.7]
    args += ["--dtype", "float64"]
    result = run(*args)
    assert result.exit_code == 0, result.output
    assert "2 of 2 texts identical" in result.stdout
    found = json.loads(run(*args, "--json").stdout)
    assert (found["num_identical"], found["differences"]) == (2, [])


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


def test_verify_refuses_rules_that_keep_the_law_alone(target, prompts):
    result = run("verify", "-t", target, "-d", target, "--prompts", prompts, "--rule", "block", "-T", 1)
    assert result.exit_code == 2
    assert "'block'" in result.stderr


# --- info and the rest -----------------------------------------------------------------------------------------------


def test_info(target):
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
    assert found["bandwidth"]["plain_decoding_limit_tokens_per_s"] > 0
    table = run("info", "-t", target, "-d", "lookup")
    assert table.exit_code == 0
    for word in ("target", "tokenizer", "drafter", "machine", "lookup", "mb per token", "matrices", "exactness"):
        assert word in table.stdout


def norms(target):
    return (2 * target.num_layers + 1) * target.hidden_size


def test_warnings_are_one_line(capsys):
    with console.quiet():
        warnings.simplefilter("always")
        warnings.warn("slow\nindeed", DraftwingWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: slow indeed\n"


def test_version():
    result = run("--version")
    assert result.stdout == f"draftwing {dw.__version__}\n"


def test_the_module_starts_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "draftwing.cli.main", "--help"], capture_output=True, text=True, timeout=120, check=True
    )
    for command in ("generate", "compare", "verify", "info"):
        assert command in done.stdout


def test_help_imports_nothing_that_takes_long():
    program = (
        "import sys; sys.argv = ['draftwing', *sys.argv[1:]]\n"
        "from draftwing.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as ended: print(ended.code, {'torch', 'transformers', 'numpy'} & set(sys.modules))\n"
    )
    for args in (["--help"], ["generate", "--help"], ["data", "cache", "--help"], ["--version"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *args], capture_output=True, text=True, timeout=120, check=True
        )
        assert done.stdout.splitlines()[-1] == "0 set()", args


def test_public_names_come_at_first_use():
    program = (
        "import sys, draftwing as dw; assert 'torch' not in sys.modules; assert set(dw.__all__) <= set(dir(dw))\n"
        "from draftwing import Budget, load; assert dw.load is load; assert 'torch' in sys.modules\n"
        "try: dw.lode\n"
        "except AttributeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "module 'draftwing' has no attribute 'lode'\n"


# --- what a shell does -----------------------------------------------------------------------------------------------


def shell(command, *args):
    """A command line with ``$0`` for the program and ``$@`` for bytes of any kind."""
    program = [sys.executable, "-m", "draftwing.cli.main"]
    words = " ".join(map(shlex.quote, program))
    return subprocess.run(
        ["bash", "-c", command.replace("draftwing", words), "bash", *args],
        capture_output=True,
        timeout=120,
        check=False,
    )


def test_arguments_that_are_not_utf_8(target):
    done = shell('draftwing generate "$1" -t "$2" -d none -n 2', b"caf\xe9", str(target))
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: the prompt has ")
    assert done.stderr.count(b"\n") == 1
    done = shell('draftwing info -t "$1"', b"/nowhere/\xe9")
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: ")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("way", ["| true", ">&-", "> /dev/full", "2>&-"])
def test_a_stdout_that_takes_nothing(target, way):
    done = shell(f'draftwing generate "$1" -t "$2" -d none -n 2 {way}; exit ${{PIPESTATUS[0]}}', PROMPT, str(target))
    assert done.returncode in ((2,) if "full" in way else (0, 1))
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr
    assert done.stderr.startswith(b"error: ") == ("full" in way)


def settled(process) -> None:
    """Wait until it computes nothing any more: Python itself may lose an interrupt in the middle of an import."""
    stat, before = Path(f"/proc/{process.pid}/stat"), None
    for _ in range(300):
        state, *fields = stat.read_text().rpartition(")")[2].split()
        if state == "S" and fields[10:12] == before:  # user and system time
            return
        before = fields[10:12]
        time.sleep(0.2)
    raise AssertionError("it never waits")


def test_every_draft_that_a_target_can_have(capsys):
    plain = dw.load(draft="none")
    found = [name for name, _ in every_draft(plain, None, None, but=["lookup"])]
    assert {"eagle1", "eagle3", "eagle3+lookup", "causal-lm", "lookahead", "suffix", "self-window"} <= set(found)
    assert not {"none", "lookup", "mtp"} & set(found)
    assert "left out: mtp: toy (LlamaForCausalLM) has no MTP modules" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_an_interrupt_is_quiet(target):
    """Ctrl-C while it waits for the end of stdin."""
    program = "from draftwing.cli.main import main\nprint('ready', flush=True)\nmain()"
    command = [sys.executable, "-c", program, "generate", "-t", str(target), "-d", "none", "-n", "100"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    settled(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == (b"", b"")


# --- progress in files and pipes -------------------------------------------------------------------------------------


def test_a_long_run_in_a_pipe_tells_how_far_it_is(monkeypatch, capsys):
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
        monkeypatch.setattr(progress, "EVERY", 60)
        show(TrainProgress(8, 100, {**metrics, "tau": 2.5, "alpha": [0.75]}))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "iteration 7/100  loss 2.000  100 tokens/s  agreement .50 .25"
    assert lines[-1] == "iteration 8/100  loss 2.000  100 tokens/s  agreement .50 .25  tau 2.50 (.75)"


@pytest.mark.parametrize("command", ["compare", "verify"])
def test_commands_tell_how_far_they_are(target, prompts, monkeypatch, command):
    monkeypatch.setattr(progress, "EVERY", 1e-3)
    args = ["-t", target, "-d", "lookup", "--prompts", prompts, "-n", 20]
    result = run(command, *args)
    assert result.exit_code == 0, result.output
    assert re.search(r"^(comparing|verifying): \d of \d, \d:\d\d so far", result.stderr, re.M)
