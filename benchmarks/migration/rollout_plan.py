"""The trajectories that the client rolls out and the faults beside them, both drawn from a seed.

Pure. Faults are due at a number of ended trajectories, so that a slow machine has the same faults
at the same places as a fast one.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from random import Random
from typing import Any, TypeVar

import msgspec

from benchmarks.migration.chat_plan import Chat, drawn_chat
from benchmarks.migration.model import (
    BOS_ID,
    END_THINK_ID,
    EOS_ID,
    FIRST_ID,
    THINK_ID,
    VOCABULARY,
)
from benchmarks.migration.rollout_routes import KEPT_ANSWERS, UNCARRIED, RolloutRoute

POISON_KILLS, POISON_FAILS = 3, 4
"""Second tokens of prompts that kill an engine, and that an engine answers with a failure. They
have no text, and no other prompt has them there."""
STOP_STRINGS = ["the", "ing", " o", "er", "at", "s.", "an", "tok", "re"]
"""Short, so that many turns end at one, mostly over more than one token."""
GRAMMARS = ["([a-z]{2,5}-){2,8}[0-9]", "([äöü€]{3,9}){2,4}[.]", '[{]"n": [0-9]{1,20}[}]']
"""The second makes characters of several tokens."""


class PinKind(StrEnum):
    """Versions that a turn asks for; all but the last one need an earlier turn."""

    MINIMUM = "minimum"
    """None older than the trajectory has had."""
    EXACT = "exact"
    """Exactly the one that the trajectory had last."""
    NEWEST = "newest"
    """Exactly the newest in the store, which may not be announced to the gateway yet."""
    NEXT = "next"
    """Exactly the one after it, for which there mostly is not the patience."""
    LAG = "lag"
    """At most so many versions behind the newest."""


class PlannedTurn(msgspec.Struct, frozen=True, kw_only=True):
    new_tokens: list[int]
    """Appended to the trajectory's context: the prompt, later a tool's output."""
    sampling: dict[str, Any]
    route: RolloutRoute = RolloutRoute.GENERATE
    chat: Chat | None = None
    """`new_tokens` are its prompt."""
    stream: bool = False
    pin: PinKind | None = None
    """A turn whose exact pin is refused is asked for again, with the newest."""
    patience_s: float = 0.0
    """Time for which the gateway may wait to meet an exact pin."""
    max_lag: int = 0
    equal_numerics: bool | str = False
    breaks_off_after_s: float | None = None
    """The client closes its connection then, and sends the same request again."""
    repeats: bool = False
    """The client asks for the whole answer once more."""

    @property
    def kinds(self) -> list[str]:
        """Kinds of turns that it is one of."""
        is_of = {
            self.route.label: True,
            "several samples": self.sampling.get("n", 1) > 1,
            f"{self.pin} pin": self.pin is not None,
            "equal numerics": bool(self.equal_numerics),
            f"{self.route.label}, asked again": self.repeats,
        }
        return [
            *(kind for kind, fits in is_of.items() if fits),
            *(self.chat.kinds if self.chat else []),
        ]


class PlannedTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    turns: list[PlannedTurn]
    poison: bool = False
    arm: str = ""
    """Trajectories of one arm follow each other; the client names the next arm before it begins."""


_CHATS = 0.25
"""Share of first turns."""
_ROUTES = {
    RolloutRoute.COMPLETIONS: 0.16,
    RolloutRoute.SGLANG: 0.16,
    RolloutRoute.TINKER: 0.14,
}
_SEVERAL = 0.3
"""Share of turns with a temperature that ask for two or three samples; vLLM's renderer refuses them
without one. The trajectory goes on from the first."""
_FIRST_PINS = {PinKind.LAG: 0.12}
_PINS = {
    PinKind.MINIMUM: 0.3,
    PinKind.EXACT: 0.15,
    PinKind.NEWEST: 0.12,
    PinKind.NEXT: 0.05,
    **_FIRST_PINS,
}
"""Shares of later turns."""
_TINKER_PINS = {PinKind.MINIMUM: PinKind.EXACT, PinKind.NEXT: PinKind.NEWEST, PinKind.LAG: None}
"""Tinker's samplers are pinned to one version or to none."""
_NUMERICS: dict[bool | str, float] = {True: 0.08, "wide": 0.04}
"""The label is that of the engines whose context holds every turn."""
PATIENCE_S = 10.0
TINKER_PATIENCE_S = 60.0
"""The gateway's own: Tinker's clients name none."""
T = TypeVar("T")


class FaultKind(StrEnum):
    KILL = "kill"
    """SIGKILL of an engine with its turns, then a restart."""
    STALL = "stall"
    """SIGSTOP and, some seconds later, SIGCONT."""
    STALL_GUEST = "stall_guest"
    """STALL of the guest with a turn on it, for a shorter time: its agent may end it."""
    KILL_AGENT = "kill_agent"
    """SIGKILL of the guest's agent, then a restart."""
    REVOKE = "revoke"
    """The agent's kill switch: the lease ends at once and its epoch is raised."""
    EVICTED_KV = "evicted_kv"
    """Production's KV fills up: the guest's budget is halved under its turns, three times."""
    STALE_EPOCH = "stale_epoch"
    """The next turns reach the guest with the epoch before, which it answers with 409."""
    SWITCH = "switch"
    """A new version is published, with other weights."""
    IDLE_RESTART = "idle_restart"
    """SIGKILL and restart of an engine between turns, when no turn is on any."""
    END_THEN_CUT = "end_then_cut"
    """The connection breaks right behind the chunk with the EOS or stop token."""
    END_TORN = "end_torn"
    """The connection breaks within that chunk."""


class PlannedFault(msgspec.Struct, frozen=True, kw_only=True):
    at_ended: int
    """Ended trajectories at which it is due."""
    kind: FaultKind
    engine: str = ""


def fault_script(
    seed: int, trajectories: int, *, dedicated: list[str], guest: str
) -> list[PlannedFault]:
    """Faults in the order in which they are due; each kind occurs, kills and restarts rarely."""
    random = Random(f"faults {seed}")
    # Starts of real engines take a minute: one process is away at a time.
    once = [(FaultKind.KILL, dedicated[0]), (FaultKind.IDLE_RESTART, dedicated[-1])]
    if trajectories >= 500:
        once += [(FaultKind.KILL, dedicated[-1]), (FaultKind.IDLE_RESTART, dedicated[0])]
        once[:0] = [(FaultKind.KILL, guest)] * bool(guest)
    often, seldom = max(4, trajectories // 10), max(3, trajectories // 25)
    faults = []
    for place, (kind, engine) in enumerate(once, start=1):
        at = trajectories * place // (len(once) + 1)
        faults.append(PlannedFault(at_ended=at, kind=kind, engine=engine))
    # Between so many revoked leases few turns reach the guest, and fewer end there.
    rare = max(1, trajectories // 300)
    for kind, count, engines in (
        (FaultKind.STALL, seldom, dedicated),
        (FaultKind.SWITCH, seldom, [""]),
        (FaultKind.END_THEN_CUT, often, dedicated),
        (FaultKind.END_TORN, often, dedicated),
        (FaultKind.END_THEN_CUT, rare, [guest]),
        (FaultKind.END_TORN, rare, [guest]),
        (FaultKind.REVOKE, often, [guest]),
        (FaultKind.EVICTED_KV, often, [guest]),
        (FaultKind.STALE_EPOCH, max(1, often // 3), [guest]),
        (FaultKind.STALL_GUEST, max(2, trajectories // 100), [guest]),
        (FaultKind.KILL_AGENT, max(2, trajectories // 100), [guest]),
    ):
        if engines == [guest] and not guest:
            continue
        for _ in range(count):
            engine = random.choice(engines)
            faults.append(
                PlannedFault(at_ended=_place(random, trajectories), kind=kind, engine=engine)
            )
    return sorted(faults, key=lambda fault: (fault.at_ended, fault.kind, fault.engine))


def rollout_plan(
    seed: int,
    trajectories: int,
    *,
    contexts: tuple[int, int],
    chat: Callable[[Chat], list[int]],
    blanks: Sequence[int] = (),
) -> list[Any]:
    """Trajectories of one to four turns; half of them outgrow the smaller of the two contexts.

    A tenth of the requests of routes that keep answers is broken off and sent again, as many are
    asked for again behind their answer, one trajectory in fifty is poison. `chat` gives the prompt
    of a chat, which only a first turn can be, `blanks` are tokens of white space.
    """
    random = Random(f"plan {seed}")
    plan = []
    for number in range(trajectories):
        small, large = contexts
        room = small if random.random() < 0.5 else large
        turns: list[PlannedTurn] = []
        while len(turns) < random.randint(1, 4):
            turn = _turn(random, [] if turns else _filler(random, room - small), later=bool(turns))
            if not turns and random.random() < _CHATS:
                turn = _as_chat(random, turn, chat, blanks)
            room -= len(turn.new_tokens) + turn.sampling["max_tokens"]
            if room < 0 and turns:
                break
            turns.append(turn)
        plan.append(PlannedTrajectory(name=f"t{number}", turns=turns))
    return _with_poison(plan, random)


def _turn(random: Random, filler: list[int], *, later: bool) -> PlannedTurn:
    new = [random.randrange(FIRST_ID, VOCABULARY) for _ in range(random.randint(4, 24))]
    if not later:
        new = [BOS_ID, *new, *filler]
    route = _drawn(random, _ROUTES) or RolloutRoute.GENERATE
    drawn = _sampling(random, random.randint(16, 80)) | _surface(random, route)
    uncarried = UNCARRIED.get(route, frozenset())
    sampling = {name: value for name, value in drawn.items() if name not in uncarried}
    if route is RolloutRoute.TINKER and "stop" in sampling:
        # Its field takes strings or tokens.
        del sampling["stop_token_ids"]
    if sampling["temperature"] and random.random() < _SEVERAL:
        sampling["n"] = random.randint(2, 3)
    if "structured_outputs" in sampling:
        # vLLM takes them out of the grammar, and fails a request that needs one of them.
        del sampling["stop_token_ids"]
    # vLLM searches a prompt's last characters for stop strings where it ends within one.
    new.append(FIRST_ID)
    if "thinking_token_budget" in sampling:
        new.append(THINK_ID)
    if "structured_outputs" in sampling:
        # Behind the end of reasoning a grammar rules from the first token.
        new.append(END_THINK_ID)
    pin = _drawn(random, _PINS if later else _FIRST_PINS)
    patience_s = random.uniform(0.2, 3.0) if pin is PinKind.NEXT else PATIENCE_S
    numerics = _drawn(random, _NUMERICS) if route is not RolloutRoute.TINKER else None
    if route is RolloutRoute.TINKER:
        pin, patience_s = _TINKER_PINS.get(pin, pin) if pin else None, TINKER_PATIENCE_S
    again = random.random() if route in KEPT_ANSWERS else 1.0
    return PlannedTurn(
        new_tokens=new,
        sampling=sampling,
        route=route,
        stream=route is not RolloutRoute.TINKER and random.random() < 0.5,
        pin=pin,
        patience_s=patience_s,
        max_lag=random.randint(0, 1),
        equal_numerics=numerics or False,
        breaks_off_after_s=random.uniform(0.02, 0.5) if again < 0.1 else None,
        repeats=0.1 <= again < 0.2,
    )


def _as_chat(
    random: Random,
    turn: PlannedTurn,
    chat: Callable[[Chat], list[int]],
    blanks: Sequence[int],
) -> PlannedTurn:
    """The turn with a prompt about as long, in words."""
    words = max(4, len(turn.new_tokens) // 4)
    drawn, sampling = drawn_chat(random, turn.sampling, words=words, blanks=blanks)
    return msgspec.structs.replace(
        turn,
        new_tokens=chat(drawn),
        sampling=sampling,
        route=RolloutRoute.CHAT,
        chat=drawn,
        breaks_off_after_s=None,
        repeats=False,
    )


def _drawn(random: Random, chances: dict[T, float]) -> T | None:
    """One of these, each with its chance; None with what is left."""
    at = random.random()
    for each, chance in chances.items():
        if at < chance:
            return each
        at -= chance
    return None


def _filler(random: Random, tokens: int) -> list[int]:
    return [random.randrange(FIRST_ID, VOCABULARY) for _ in range(max(0, tokens))]


def _with_poison(plan: list[PlannedTrajectory], random: Random) -> list[PlannedTrajectory]:
    """One request that kills engines, which costs two restarts, and some that fail on each."""
    kinds = [POISON_KILLS, *[POISON_FAILS] * max(2, len(plan) // 50)]
    for number, kind in enumerate(kinds):
        prompt = [BOS_ID, kind, *_filler(random, 8), FIRST_ID + number]
        turn = PlannedTurn(new_tokens=prompt, sampling=_sampling(random, 16))
        poison = PlannedTrajectory(name=f"poison{number}", turns=[turn], poison=True)
        # A death of another cause within a minute excuses a suspect once: the killer is early.
        at = len(plan) // 8 if kind == POISON_KILLS else _place(random, len(plan))
        plan.insert(at, poison)
    return plan


def _sampling(random: Random, max_tokens: int) -> dict[str, Any]:
    stops = sorted(random.sample(range(FIRST_ID, VOCABULARY), 8))
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "stop_token_ids": stops, "logprobs": 1}
    how = random.random()
    if how < 0.6:
        return sampling | {"temperature": 0.0}
    seed = {"seed": random.randrange(1 << 31)} if how < 0.8 else {}
    drawn = random.choice(
        [
            {"temperature": 1.0},
            {"temperature": 0.7, "top_k": 20},
            {"temperature": 1.0, "top_p": 0.9},
            {"temperature": 0.8, "min_p": 0.05},
        ]
    )
    return sampling | drawn | seed


def _surface(random: Random, route: RolloutRoute) -> dict[str, Any]:
    """Half of the turns are plain; a tenth each has one of these."""
    settings: list[dict[str, Any]] = [
        {"presence_penalty": 1.5, "frequency_penalty": 0.6, "repetition_penalty": 1.1},
        {"stop": random.sample(STOP_STRINGS, 3)},
        {"structured_outputs": {"regex": random.choice(GRAMMARS)}},
        {"thinking_token_budget": random.randint(0, 12), "frequency_penalty": 0.6},
        {"min_tokens": 12, "logit_bias": {str(EOS_ID): 6.0}},
    ]
    drawn = random.choice(settings) if random.random() < 0.5 else {}
    return {} if UNCARRIED.get(route, frozenset()) & drawn.keys() else drawn


def _place(random: Random, trajectories: int) -> int:
    """Neither before the first turns run nor after the last."""
    return random.randint(max(1, trajectories // 20), max(1, trajectories * 9 // 10))


def bias_plan(seed: int, turns: int, *, blocks: int, arms: tuple[str, str]) -> list[Any]:
    """Short sampled turns in alternating blocks; both arms have the same prompts and settings. Half
    of them have a seed, and half of each kind are streamed."""
    random = Random(f"bias {seed}")
    stops = sorted(random.sample(range(FIRST_ID, VOCABULARY), 24))
    each = turns // (2 * blocks)
    plan: list[PlannedTrajectory] = []
    for block in range(blocks):
        prompts = [[BOS_ID, *_filler(random, random.randint(4, 16))] for _ in range(each)]
        # The first arm of each pair is drawn, so that warming up favours neither.
        for arm in random.sample(arms, 2):
            for number, prompt in enumerate(prompts):
                sampling: dict[str, Any] = {
                    "max_tokens": 64, "temperature": 1.0, "stop_token_ids": stops, "logprobs": 1,
                }  # fmt: skip
                if number % 2:
                    sampling["seed"] = random.randrange(1 << 31)
                turn = PlannedTurn(new_tokens=prompt, sampling=sampling, stream=number % 4 >= 2)
                name = f"{arm}-{block}-{number}"
                plan.append(PlannedTrajectory(name=name, turns=[turn], arm=f"{arm} {block}"))
    return plan


ENDS = frozenset({EOS_ID})
"""Tokens that end any turn of the model."""
