"""Whether to draft in a step at all: where drafting does not pay, nothing is drafted but for a short probe.

Drafts in doubt may lose a small share of the time, whatever each takes: what they have lost beyond it is waited for in
plain steps (``DARE``). A few plain steps now and then say what plain decoding takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from draftwing.budget.account import Account
from draftwing.budget.clock import LOOKS, SETTLED, Clock

__all__ = ["KNOWN", "Gate"]

PLAIN = 4  # plain steps at first: a loop of them may take less than one among others, by what stays in the caches
FIRST, LEAST = 16, 8  # drafts of one row that are tried before they are judged; of many rows at once, at least
GAIN = 1.06  # speedup over plain steps among drafts from which drafting is worth it: a plain text has shorter ones
DOUBT = 0.25  # of a speedup, over the root of the drafts that it was seen in, which their chances tell
WARMER = 0.75  # of what first drafts take, against what was measured: later ones may come down to it
HOPE = 1.0  # forecast, of shapes that know nothing of their text, from which drafts are tried once more from the start
PROBE, PATIENCE, PROBES = 16, 160, 2  # plain steps between two probes, at first and at most; drafts of a probe
NEAR, RARER = 0.8, 3  # speedup from which drafts may pay in another text; doublings of PROBE where they never did
EARLY, HOPELESS = 6, 0.8  # drafts from which on so low a speedup, with twice the doubt, is given up at once
MANY, SURE = 4, 3  # the same of a batch of so many rows, each of which tells something, from so many drafts on
LOST, LONGEST = 0.01, 640  # share of time that probes of such may lose; plain steps between these at most
CARRIED = 10.0  # drafts of other texts that count in one that begins
FADE = 0.7  # of what drafts brought before a probe: texts change, and two drafts would not be heard beside many
CHECK, CHECKS = 24, 0.005  # steps after which plain ones are measured anew at least, and the time that this may take,
SMALL = 0.33  # twice as long where less is gained;
FIRM, EARLY_CHECKS = 2, 0.015  # as the first steps of all told little, checks at first that come early, and their share
DARE, CREDIT = 0.015, 8.0  # plain steps that drafts in doubt may lose, of each step; and of such, saved up at most
MISSED = 3  # texts in a row in which drafts lost time, from which on some are passed over as a whole: PATIENCE plain
# steps of them between two probes, twice as many after each further one, LONGEST at most
RESTING = 32  # plain steps of a long run, of which one is looked at
KNOWN = 64  # drafts from which on some steps are not looked at
FRESH, GROWN = 8, (256, 1024)  # steps between two that are learnt from; twice as many from each of these steps on


class Gate:
    """Whether to draft in a step at all.

    Args:
        clock: what steps take.
        forecast: the speedup to be expected by all that was learnt.
        trusts_forecast: whether drafts follow the forecast: what was drafted before is then of other shapes than what
            would be now, and both count.
        stays_dear: whether a draft takes as much however little it is worth (``Traits.scores``): then a few tell.

    Attributes:
        rows: of the next step.
        every: where much is known, one of so many steps that draft is looked at.
    """

    def __init__(
        self, clock: Clock, forecast: Callable[[], float], *, trusts_forecast: bool = False, stays_dear: bool = False
    ) -> None:
        self._clock, self._forecast, self._trusts, self._stays_dear = clock, forecast, trusts_forecast, stays_dear
        self.drafts = Account()  # of steps that drafted,
        self.all = Account()  # and of every step
        self.steps, self.rows, self.every = 0, 1, 1
        self.is_open = False
        self._plain, self._patience, self._probes = 0, PROBE, 0
        self._checked = self._checking = 0  # the step of the last check, and steps that are left of it;
        self._due = 0  # the step of the next one, by what is known
        self._has_news = False  # whether drafts were judged since it was last decided whether they are worth it
        self._num_checks = 0
        self._debt = -CREDIT  # plain steps that drafts have lost beyond what they may
        self._reform = 0  # the step from which drafts may be judged anew
        self._misses = -1  # texts in a row in which drafts were not worth it
        self._lost = 0.0  # plain steps that drafts have lost in this text,
        self._lossy, self._hottest = 0, 0.0  # texts in a row in which they lost any, and the hottest of these and this

    @property
    def fresh(self) -> int:
        """Steps that are looked at between two that these are learnt from."""
        return FRESH << sum(self.steps >= grown for grown in GROWN)

    @property
    def rests(self) -> bool:
        """Whether a plain step tells nothing new: in a long run all but one in ``RESTING``, and the last ones."""
        waits = self._plain < self._patience - LOOKS
        return waits and self._clock.run >= SETTLED and self._clock.run % RESTING > 0

    def sleeps(self) -> bool:
        """Whether the next step is plain and tells nothing new. Of many such steps each should take next to nothing."""
        if self.is_open or not self._plain or not self.rests:
            return False
        self._clock.run += 1
        self.rest(1)
        return True

    @property
    def goes_on_plainly(self) -> bool:
        """Whether the next step is one of several plain ones by which drafts are measured."""
        return self._checking > 0 or 0 < self.steps < PLAIN

    def measures(self) -> bool:
        """Whether the next step is such a one. What is done between them makes them slower than in plain decoding."""
        if not self.goes_on_plainly:
            return False
        self.steps, self._checking = self.steps + 1, max(self._checking - 1, 0)
        self._pay(DARE)
        return True

    def coasts(self) -> bool:
        """Whether the next step drafts as the one before it did, since nothing new is known: steps may be short."""
        if not self._holds(self.steps + 1):
            return False
        self.steps += 1
        self._pay(DARE)
        return True

    def looks(self, step: int) -> bool:
        """Whether a step that drafts is looked at: all are at first and after plain ones, later as much is known."""
        return step % self.every == 0 or self._clock.num_drafts <= KNOWN or self._clock.run > 0

    def _holds(self, step: int) -> bool:
        """Whether it was decided to draft, and nothing new is known."""
        return self.is_open and not self._has_news and step < self._due and not self._probes

    def passes_over(self, num_steps: int, temperature: float) -> bool:
        """Whether a text of so many steps at most, which is about to begin, is decoded plainly as a whole.

        Where drafts lost time in several texts in a row, none of them hotter: the cooler a text, the more of its drafts
        come true.
        """
        lossy = self._lossy_by_now
        if lossy >= MISSED and temperature >= self._hottest and self.drafts.steps >= self._num_first:
            most = LONGEST if self._debt > 0 else min(PATIENCE << min(lossy - MISSED, RARER), LONGEST)
            if not (self.is_open or self._probes) and self._plain + num_steps <= most:
                return True
        self._hottest = max(self._hottest, temperature) if lossy else temperature
        return False

    @property
    def _lossy_by_now(self) -> int:
        """Texts in a row in which drafts lost time, the latest one counted; one without drafts tells nothing."""
        return 0 if self._lost < 0 else self._lossy + (self._lost > 0)

    def rest(self, num_steps: int) -> None:
        """Plain steps that nothing is learnt from."""
        self.steps, self._plain = self.steps + num_steps, self._plain + num_steps
        self._pay(DARE * num_steps)

    def lose(self, lost: float) -> None:
        """A step that drafted took so many plain steps more than its tokens would have; gains are negative."""
        self._lost, self._has_news = self._lost + lost, True
        if self.drafts.steps > self._num_first:
            self._pay(-lost)

    @property
    def _num_first(self) -> int:
        """Drafts that are tried in any case."""
        return max(FIRST // self.rows, LEAST)

    def _pay(self, plain_steps: float) -> None:
        self._debt = max(self._debt - plain_steps, -CREDIT)

    @property
    def _owes(self) -> int:
        """Plain steps until drafts in doubt may be tried again."""
        return min(math.ceil(max(self._debt, 0.0) / DARE), LONGEST)

    def decide(self) -> bool:
        """For the next step."""
        self.steps += 1
        self._pay(DARE)
        if self._holds(self.steps):
            return True
        self._has_news = False
        waits = not self.is_open and 0 < self._plain < self._patience - 1  # nothing is learnt from plain steps
        if self.steps > PLAIN and waits:
            self._plain += 1
        else:
            self.is_open = self.steps > PLAIN and not self._must_check() and self._is_worth_it()
        return self.is_open

    def _is_worth_it(self) -> bool:
        drafts = self.drafts
        early = EARLY if self.rows < MANY else SURE
        hopeless = (self._stays_dear or self.rows >= MANY) and drafts.steps >= early and self._is_hopeless()
        if drafts.steps < self._num_first and not hopeless:
            return True
        if self._probes:
            self._probes -= 1
            return True
        # With the benefit of the doubt (an upper confidence bound): a few unlucky steps prove little.
        speedup, seen = drafts.speedup, drafts.weight
        if self._trusts:
            speedup, seen = (speedup + self._forecast()) / 2, drafts.steps
        if speedup * (1 + DOUBT / math.sqrt(seen * self.rows)) >= GAIN:
            self._plain, self._patience, self._misses = 0, PROBE, 0
            return True
        if hopeless:
            self._patience = max(self._patience, min(round(PROBES * drafts.lost / LOST), LONGEST))
        self._plain += 1
        if self._plain < self._patience:
            return False
        if owes := self._owes:
            self._patience = self._plain + owes
            return False
        self._plain, self._probes = 0, PROBES - 1
        self._patience = max(self._patience, min(2 * self._patience, PATIENCE))
        if not self._trusts:
            drafts.fade(FADE)
        if self.steps >= self._reform and self._hoped() > max(HOPE, 1.05 * speedup):
            # What drafts brought was brought by others than would be drafted now: the first ones knew nothing yet of
            # what comes true, and slow as first ones are. Ever rarer, should that prove wrong.
            self._reform = self.steps + 2 * (self.steps + FIRST)
            self.drafts = Account()
        return True

    def _hoped(self) -> float:
        """The forecast, were drafts as fast as was measured, or a third faster: the first ones are slow."""
        return self._forecast() / min(max(self._clock.alone, WARMER), 1.0)

    def _is_hopeless(self) -> bool:
        drafts = self.drafts
        return drafts.speedup * (1 + 4 * DOUBT / math.sqrt(drafts.weight * self.rows)) < HOPELESS

    def begin_text(self) -> None:
        """Another text begins, which may be of another kind: believe what drafts bring in it, and try them soon.

        Less soon where they did not pay in one text after another, and not where they were far from worth it: texts
        differ by less than that, and such drafts are dear. What they lost in other texts is not held against them
        where they paid lately.
        """
        self._lossy = self._lossy_by_now
        if self._lossy < MISSED:
            self._debt = min(self._debt, -CREDIT / 2**self._lossy)
        self._lost = 0.0
        self._misses += 1
        if self._lossy and self._plain and self._debt <= 0:
            # Here or hardly at all in a short text: later on all that was not read would have to be read first.
            self._patience = max(PATIENCE // 2, min(self._patience, self._plain + 1))
            self._plain = max(self._plain, self._patience - 1)
        elif self.drafts.speedup > NEAR:
            self._patience = min(self._patience, PROBE << min(max(self._misses - 1, 0), RARER))
        if self.drafts.weight > CARRIED and not self._trusts:
            self.drafts.fade(CARRIED / self.drafts.weight)

    def _must_check(self) -> bool:
        """Whether to step plainly for once: what that takes decides, and the first steps of all told little of it."""
        if self._checking:
            self._checking -= 1
            return True
        gained = max(1 - 1 / max(self.all.speedup, 1.0), 0.0)
        is_small = gained < SMALL
        length = 2 * PLAIN if is_small else PLAIN
        share = EARLY_CHECKS if is_small and self._num_checks < FIRM else CHECKS
        is_soon = self._clock.is_in_doubt or (is_small and not self._num_checks)
        rest = CHECK if is_soon else max(CHECK, round(length * gained / share))
        self._due = self._checked + rest
        if not PLAIN or self.steps < self._due:
            return False
        if not self._checked:
            self._clock.forget_plain()
        self._checked, self._checking, self._num_checks = self.steps, length - 1, self._num_checks + 1
        return True
