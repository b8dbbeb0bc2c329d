"""A draft model that lookup drafts for: the very draft that it makes alone, in fewer passes."""

from __future__ import annotations

import pytest
import torch

from conftest import add_tokenizer, refused
from draftwing.decode import Decoder
from draftwing.errors import ConfigError
from draftwing.loading import load
from draftwing.methods import causal_lm
from draftwing.methods.base import Budget
from draftwing.methods.causal_lm import CausalLMDrafter, StagedDrafter, StagedRow, SuffixAutomaton
from draftwing.models.context import Row
from draftwing.models.lean import LeanTarget
from draftwing.sampling import Sampling

VOCAB = 61
# Texts that repeat themselves: what comes next is often guessed.
PROMPTS = ([3, 4, 5, 6, 3, 4, 5, 6, 3, 4], [9], [8, 8, 8, 8, 8, 8])


@pytest.fixture(scope="module")
def target(folder_of) -> LeanTarget:
    return LeanTarget.from_folder(folder_of("llama", initializer_range=0.15), torch.float64)


@pytest.fixture(scope="module")
def model(folder_of) -> LeanTarget:
    return LeanTarget.from_folder(folder_of("llama", seed=3, initializer_range=0.15), torch.float64)


def drafts(target: LeanTarget, drafter: CausalLMDrafter, budget: Budget) -> list[tuple[list, float]]:
    """Every draft of a decode loop whose rows join and leave: the first child of each level, and the levels run.

    The second row is greedy.
    """
    decoder, found = Decoder(target, drafter, budget=budget), []
    for row, prompt in enumerate(PROMPTS):
        temperature = float(row != 1)
        decoder.admit(prompt, Sampling(temperature, max_tokens=18 + 6 * row, ignore_eos=True, seed=row))
        found.append((*state(decoder.step()),))
    while decoder.num_running:
        found.append((*state(decoder.step()),))
    return found


def state(step) -> tuple[list, float]:
    tree = step.tree
    rows = []
    for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        trunk, node = [], 0
        while node in parents:
            node = parents.index(node)
            trunk.append(tokens[node])
        rows.append(trunk)
    return [[row.request_id for row in step.rows], rows], tree.num_draft_forwards or 0.0


def test_it_drafts_what_the_model_drafts_alone(target, model):
    wanted = drafts(target, CausalLMDrafter(model, VOCAB), Budget(6))
    found = drafts(target, StagedDrafter(model, VOCAB), Budget(6))
    assert [each for each, _ in found] == [each for each, _ in wanted]
    assert sum(levels for _, levels in found) <= sum(levels for _, levels in wanted)


class Knows:
    """Stands for lookup, and guesses the model's own draft: all of it, or the second token wrongly."""

    def __init__(self, drafts: dict[tuple[int, ...], list[int]], is_right: bool) -> None:
        self.drafts, self.is_right, self.text = drafts, is_right, []

    def __len__(self) -> int:
        return len(self.text)

    def extend_all(self, tokens) -> None:
        self.text += tokens

    def after(self, extra, most, least) -> tuple[int, list[int]]:
        draft = self.drafts[tuple(self.text)]
        assert extra == draft[: len(extra)]  # it goes on from the model's own tokens
        guess = draft[len(extra) :][:most]
        if not self.is_right and len(guess) > 1:
            guess[1] = (guess[1] + 1) % VOCAB
        return len(guess), guess


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_save_passes(temperature, is_right, target, model, monkeypatch):
    sampling = Sampling(max_tokens=100, ignore_eos=True, seed=1, temperature=temperature)
    alone, known = Decoder(target, CausalLMDrafter(model, VOCAB), budget=Budget(6)), {}
    alone.admit(PROMPTS[0], sampling)
    for _ in range(8):
        text = tuple(alone.ctx.rows[0].tokens)
        known[text] = alone.step().tree.tokens[0, 1:].tolist()
    monkeypatch.setattr(causal_lm, "SuffixAutomaton", lambda: Knows(known, is_right))
    decoder = Decoder(target, StagedDrafter(model, VOCAB), budget=Budget(6))
    decoder.admit(PROMPTS[0], sampling)
    for _ in range(8):
        text = tuple(decoder.ctx.rows[0].tokens)
        tree = decoder.step().tree
        draft = tree.tokens[0, 1:].tolist()
        assert draft == known[text]
        # One pass for all of them; or a right guess and the model's own word against the wrong one in each.
        assert len(draft) == 6
        assert tree.num_draft_forwards == (1 if is_right else 3)


@pytest.mark.parametrize(
    ("drafter", "budget", "temperature"),
    [(StagedDrafter, Budget(5, 3, 15), 1.0), (StagedDrafter, Budget(5), 0.0), (CausalLMDrafter, Budget(5), 1.0)],
)
def test_a_model_is_always_right_for_itself(drafter, budget, temperature, target):
    """Accepted draft tokens are not read again, except for the last one, which was not read before."""
    decoder = Decoder(target, drafter(target, VOCAB), budget=budget)
    decoder.admit(PROMPTS[0], Sampling(max_tokens=30, ignore_eos=True, seed=1, temperature=temperature))
    kept = [decoder.step().rows[0].num_accepted for _ in range(5)]
    assert kept == [5] * 5


def test_siblings_are_drafted_next_to_its_own_tokens(target):
    steps = drafts(target, StagedDrafter(target, VOCAB), Budget(5, 3, 12))
    assert any(len(row) > 1 for (_, rows), _ in steps for row in rows)


def test_the_option_that_chooses_it(folder_of, tmp_path):
    folder = add_tokenizer(folder_of("llama", vocab_size=300))
    lm = load(folder, folder, dtype="float64", draft_options={"draft": "lookup"})
    assert lm.drafter_name == f"causal-lm ({folder.name}, drafted for by lookup)"
    alone = load(folder, folder, dtype="float64", draft_options={"draft": "none"})
    assert alone.drafter_name == f"causal-lm ({folder.name})"
    with refused(ConfigError, "what drafts for the draft model, found 'eagle3'", "choose lookup or none"):
        load(folder, folder, dtype="float64", draft_options={"draft": "eagle3"})


def test_slots_after_another_drafters_token_are_read_anew():
    """What was drafted here holds as far as the row's tokens are those; others may have drafted the rest of them."""
    text = StagedRow(SuffixAutomaton(), start=2, run=[5, 6, 7])
    for tokens, kept in (([1, 2, 5, 6, 7, 8], 5), ([1, 2, 5, 9, 7, 8], 3), ([1, 2, 9], 2), ([1, 2, 5, 6], 4)):
        assert text.num_kept(Row(tokens, len(tokens) - 1, 2)) == kept
