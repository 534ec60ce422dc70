"""Decides whether a prompt kills engines, however long after its arrival each of them dies.

    d          engines that died with the prompt on them, but in a burst that took others as well
    expected   its time on engines * (other deaths + 1) / (other engines' time + PRIOR_S)
    blamed     d >= LEAST_DEATHS, no other prompt was on all of those engines, and
               P(Poisson(expected) >= d) < CHANCE; then, and HELD_S later
    apart      as blamed, but others were on all of those engines: they share no engine any more

Others' deaths and times count from the prompt's first placement: what kills engines anyway excuses
every prompt. Engines count while they have turns. The samples of one prompt count together, each
engine once, and so does a prompt that is sent again within FORGET_S of a death. Reads no clock.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from math import exp

from harvester.contracts.ids import EngineId

LEAST_DEATHS = 3
CHANCE = 1e-5
"""Chance of a prompt to be blamed for deaths that only happened beside it."""
PRIOR_S = 600.0
"""Engines die once in this time where nothing else is known: more often than they do."""
RESTART_BURST_S = 1.0
"""Engines that are stopped together die within this time."""
HELD_S = 5.0
"""A prompt waits this long for its verdict: another prompt's engines may die meanwhile."""
FORGET_S = 3600.0
_REMEMBERED = 4096
_DEATHS = 256


@dataclass(frozen=True, slots=True)
class _PromptsDeath:
    at_s: float
    prompts: frozenset[str]


@dataclass(slots=True)
class _Life:
    """Times of one prompt, since its first placement."""

    fleet_s: float
    """Reading of the fleet's clock at its beginning."""
    fleet_deaths: int
    changed_s: float
    own_s: float = 0.0
    engines: int = 0
    """Engines on which it is now."""
    died_s: float | None = None
    judged_s: float | None = None
    apart: bool = False

    def move(self, engines: int, now: float) -> None:
        self.own_s += self.engines * (now - self.changed_s)
        self.engines, self.changed_s = self.engines + engines, now


class RepeatedDeaths:
    def __init__(self) -> None:
        self._on: dict[EngineId, Counter[str]] = {}
        """Attempts on each engine, by prompt."""
        self._lives: OrderedDict[str, _Life] = OrderedDict()
        """Prompts on engines, and prompts with deaths, the latest death last."""
        self._deaths: deque[_PromptsDeath] = deque(maxlen=_DEATHS)
        self._died = 0
        self._fleet_s = 0.0
        """Time of all engines with turns, together."""
        self._changed_s = 0.0

    def began(self, prompt: str, engine: EngineId, *, now: float) -> None:
        """An attempt of the prompt begins there."""
        self._pass(now)
        life = self._lives.get(prompt)
        if life is None or (not life.engines and now - (life.died_s or now) > FORGET_S):
            life = self._lives[prompt] = _Life(self._fleet_s, self._died, now)
        on_engine = self._on.setdefault(engine, Counter())
        if not on_engine[prompt]:
            life.move(1, now)
        on_engine[prompt] += 1

    def ended(self, prompt: str, engine: EngineId, *, now: float) -> None:
        self._pass(now)
        on_engine = self._on[engine]
        on_engine[prompt] -= 1
        if on_engine[prompt]:
            return
        del on_engine[prompt]
        if not on_engine:
            del self._on[engine]
        self._lives[prompt].move(-1, now)
        self._forget(prompt)

    def died(self, prompts: Iterable[str], *, now: float) -> None:
        """An engine died with these prompts on it. Their attempts end later; if it was silent
        first, they have ended."""
        self._pass(now)
        death = _PromptsDeath(now, frozenset(prompts))
        self._deaths.append(death)
        self._died += 1
        for prompt in sorted(death.prompts):
            life = self._lives.setdefault(prompt, _Life(self._fleet_s, self._died - 1, now))
            life.died_s = now
            self._lives.move_to_end(prompt)
            reason, alone = self._evidence(prompt, life, now)
            life.apart = bool(reason) and not alone
            if life.judged_s is None and reason and alone:
                life.judged_s = now + HELD_S
        # Removes as many as came: an engine dies with all of its prompts.
        for prompt in tuple(islice(self._lives, max(0, len(self._lives) - _REMEMBERED))):
            self._forget(prompt, dead=True)

    def verdict_in_s(self, prompt: str, *, now: float) -> float:
        """Time until its verdict, for which it is not placed, in s; 0 without one to come."""
        life = self._lives.get(prompt)
        return max(0.0, life.judged_s - now) if life and life.judged_s is not None else 0.0

    def blamed(self, prompt: str, *, now: float) -> str:
        """The reason; empty where the prompt may run."""
        life = self._lives.get(prompt)
        if life is None or life.judged_s is None or now < life.judged_s:
            return ""
        self._pass(now)
        reason, alone = self._evidence(prompt, life, now)
        if not (reason and alone):
            life.judged_s = None
            return ""
        return reason

    def apart(self, prompt: str) -> bool:
        """Whether it must not share an engine with others for which this holds."""
        life = self._lives.get(prompt)
        return life is not None and life.apart

    def _evidence(self, prompt: str, life: _Life, now: float) -> tuple[str, bool]:
        """Why the prompt is to blame, empty where chance explains it; and whether no other one
        is."""
        recent = [each for each in self._deaths if now - each.at_s <= FORGET_S]
        bursts = [each.at_s for each in recent if prompt not in each.prompts]
        own = [
            each.prompts
            for each in recent
            if prompt in each.prompts
            and all(abs(each.at_s - at_s) > RESTART_BURST_S for at_s in bursts)
        ]
        if len(own) < LEAST_DEATHS:
            return "", True
        own_s = life.own_s + life.engines * (now - life.changed_s)
        others_s = max(0.0, self._fleet_s - life.fleet_s - own_s)
        others = max(0, self._died - life.fleet_deaths - len(own))
        expected = own_s * (others + 1) / (others_s + PRIOR_S)
        if _chance_of(len(own), expected) >= CHANCE:
            return "", True
        reason = f"{len(own)} engines died under this prompt, where chance explains {expected:.2g}"
        return f"{reason}; it is not tried again", len(frozenset.intersection(*own)) == 1

    def _forget(self, prompt: str, *, dead: bool = False) -> None:
        life = self._lives[prompt]
        if not life.engines and (dead or life.died_s is None):
            del self._lives[prompt]

    def _pass(self, now: float) -> None:
        self._fleet_s += len(self._on) * (now - self._changed_s)
        self._changed_s = now


def _chance_of(deaths: int, expected: float) -> float:
    """Probability of at least `deaths` deaths, by Poisson's law."""
    term, fewer = exp(-expected), 0.0
    for count in range(deaths):
        fewer += term
        term *= expected / (count + 1)
    return 1.0 - fewer
