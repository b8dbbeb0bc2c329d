"""Cards: what is known of a head is said, what is not is left out, and nobody's own words are overwritten."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from conftest import SMALL, refused
from draftwing.cli import main as cli
from draftwing.errors import CheckpointError
from draftwing.formats.card import copy_card, read_stored, render_card, write_card, write_stored
from draftwing.formats.write import convert, write_head
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.net import TargetId
from draftwing.models.config import ModelConfig
from draftwing.models.linear import Linear
from draftwing.train.session import training_of

SHAPE = {**SMALL, "model_type": "llama", "vocab_size": 90, "num_hidden_layers": 8}
TRAINING = {
    "method": "eagle3",
    "unroll_steps": 5,
    "optimizer": "muon",
    "ema": 0.0,
    "seed": 0,
    "tokens_per_batch": 2048,
    "accumulation": 2,
    "iterations": 1000,
    "seconds": 9000,
    "coverage": 0.981,
    "data": ["chats.jsonl"],
    "num_dialogues": 12345,
    "tokens_in_data": 4_000_000,
    "eval_depth": 5,
    "held_out": {"iteration": 1000, "val_agreement": [0.55, 0.47], "tau": 1.804},
    "results": {"MT-bench": {"tau": 2.2, "tree": "chain of 5"}, "GSM8K": {"tau": 2.6}},
    "machine": {"cpu": "Some Processor", "threads": 2, "torch": "2.13.0"},
    "licence": "Apache-2.0",
}


def head_of(folder, version=3, training=None):
    like = ModelConfig.from_hf({**SHAPE, "architectures": ["LlamaForCausalLM"]}, "")
    target = TargetId("org/model", 32, 8, 90, "0" * 16)
    torch.manual_seed(0)
    embedding = torch.randn(90, 32)
    config = EagleConfig.for_target(version, like, 40 if version == 3 else None, target=target)
    ids = torch.arange(40) * 2 if version == 3 else None
    write_head(folder, EagleNet(config, embedding, Linear(embedding), ids, torch.bfloat16), training=training)
    return folder


@pytest.fixture
def head(tmp_path):
    return head_of(tmp_path / "head", training=TRAINING)


def test_what_is_known_is_said(head):
    card = render_card(head)
    for part in (
        "---\nlibrary_name: draftwing\nlicense: apache-2.0\ntags:\n- speculative-decoding\n- eagle-3\n---",
        "# EAGLE-3 head for org/model",
        "| target | org/model, layers 8, hidden size 32, vocabulary 90 |",
        "parameters in bfloat16 |",
        "| reads | the target's hidden states 2, 4, 5 |",
        "| draft vocabulary | 40 of 90 tokens (98.1% of the training tokens) |",
        "- method: eagle3, unrolled steps 5, optimizer muon",
        "- data: `chats.jsonl`, 12,345 dialogues, 4,000,000 tokens to train on",
        "- length: 1,000 updates, 4,096,000 tokens seen, 2.5 hours",
        "- machine: Some Processor, 2 threads, torch 2.13.0",
        "| draft step | 1 | 2 |\n| --- | --- | --- |\n| agrees with the target | 55.0% | 47.0% |",
        "Tau 1.80: tokens per forward of the target, greedy, chains of 5.",
        "| set | tau | tree |\n| --- | --- | --- |\n| MT-bench | 2.2 | chain of 5 |\n| GSM8K | 2.6 |  |",
        'draftwing generate --target org/model --draft head "..."',
        "draftwing export head --to vllm --target org/model --out head-vllm",
        "## Licence\n\nApache-2.0.",
    ):
        assert part in card, part


def test_training_adds_up_over_the_heads_that_it_began_as(head, tmp_path):
    before = training_of(head)
    assert before == {"iterations": 1000, "tokens_seen": 4_096_000}
    second = head_of(
        tmp_path / "second", training={**TRAINING, "iterations": 10, "initial": {"name": "head", **before}}
    )
    assert "40,960 tokens seen, 2.5 hours, after 4,096,000 tokens seen by the head it began as" in render_card(second)
    assert training_of(second) == {"iterations": 10, "tokens_seen": 4_136_960}
    silent = head_of(tmp_path / "silent")
    assert training_of(silent) == {}
    third = head_of(tmp_path / "third", training={**TRAINING, "initial": {"name": "silent"}})
    assert "2.5 hours, after the training of the head it began as" in render_card(third)


def test_what_is_not_known_is_left_out(tmp_path):
    card = render_card(head_of(tmp_path / "head", 1))
    assert "# EAGLE-1 head for org/model" in card
    assert not any(word in card for word in ("Training", "Held-out", "Measured", "license:", "None", "()"))
    assert "Not stated" in card


@pytest.mark.parametrize("layout", ["draftwing", "eagle", "vllm", "sglang", "speculators"])
def test_card_and_prompts_go_along(head, tmp_path, layout):
    write_stored(head, ['{"text": "def add("}'])
    out = tmp_path / "out"
    convert(head, out, layout, depth=3)
    card = (out / "README.md").read_text()
    assert read_stored(out) == ["def add("]
    assert f"| layout | {layout} |" in card
    assert "Tau 1.80" in card  # what was said of the training goes through every layout
    assert "| draft vocabulary | 40 of 90 tokens" in card
    command = {
        "vllm": 'vllm serve org/model --speculative-config \'{"method": "eagle3", "model": "out", "num_spec',
        "speculators": "vllm serve org/model --speculative-config",
        "sglang": "python -m sglang.launch_server --model-path org/model --speculative-algorithm EAGLE3",
    }.get(layout, "draftwing export out --to vllm")
    assert command in card
    assert str(tmp_path) not in card
    # Another head in the same place takes both with it.
    other = head_of(tmp_path / "other")
    convert(other, out, layout)
    assert read_stored(out) == []
    assert "Tau" not in (out / "README.md").read_text()


def test_an_export_says_one_command(head, tmp_path):
    """The card's and the printed command draft as deep, and a GGUF file is not handed to an engine in silence."""
    shown = CliRunner().invoke(cli.app, ["export", str(head), "--depth", "2", "--out", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    assert '"num_speculative_tokens": 2' in shown.stdout
    assert '"num_speculative_tokens": 2' in (tmp_path / "out" / "README.md").read_text()
    assert "GGUF" not in shown.stderr


def test_nobodys_own_card_is_overwritten(head, tmp_path):
    (head / "README.md").write_text("By its author. MIT.")
    write_card(head)
    assert (head / "README.md").read_text() == "By its author. MIT."
    convert(head, tmp_path / "out", "vllm")
    assert (tmp_path / "out" / "README.md").read_text() == "By its author. MIT."
    convert(head_of(tmp_path / "other"), tmp_path / "out", "vllm")
    assert (tmp_path / "out" / "README.md").read_text() == "By its author. MIT."
    mine = shutil.copytree(head, tmp_path / "mine")
    (mine / "README.md").write_text(render_card(mine).replace("<!--", ""))  # edited, and the mark taken out
    edited = (mine / "README.md").read_text()
    write_card(mine)
    assert (mine / "README.md").read_text() == edited


def test_a_card_of_ours_is_replaced(head):
    write_card(head)
    config = json.loads((head / "config.json").read_text())
    config["draftwing"]["training"]["held_out"]["tau"] = 2.5
    (head / "config.json").write_text(json.dumps(config))
    write_card(head)
    assert "Tau 2.50" in (head / "README.md").read_text()


def test_what_cannot_be_written_is_said(head, tmp_path):
    gone = tmp_path / "gone"
    with refused(CheckpointError, "gone"):
        write_card(gone)
    with refused(CheckpointError, "prompts.jsonl", "cannot be written"):
        write_stored(gone, ['{"text": "a"}'])
    with refused(CheckpointError):
        copy_card(head, gone, "draftwing")
