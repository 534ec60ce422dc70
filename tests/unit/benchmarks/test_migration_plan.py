"""The drawn plan and fault script of benchmarks.migration: complete, bounded, repeatable."""

from collections import Counter

import pytest

from benchmarks.migration.chat_plan import TOOL, Chat
from benchmarks.migration.model import END_THINK_ID, chat_text
from benchmarks.migration.rollout_plan import (
    FaultKind,
    PinKind,
    bias_plan,
    fault_script,
    rollout_plan,
)
from benchmarks.migration.rollout_routes import UNCARRIED, RolloutRoute

CONTEXTS = (256, 512)
DEDICATED = ["e0", "e1"]


def chat(asked: Chat) -> list[int]:
    """Two characters a token, as the model's tokenizer has it at best."""
    said = chat_text(asked.messages, tools=[TOOL] if asked.tool_choice else [], thinks=asked.thinks)
    return [1, *map(ord, said[::2])]


@pytest.mark.parametrize("trajectories", [20, 100, 1000])
def test_each_kind_of_fault_strikes_while_trajectories_run(trajectories: int) -> None:
    script = fault_script(0, trajectories, dedicated=DEDICATED, guest="guest")
    counted = Counter(fault.kind for fault in script)
    assert set(counted) == set(FaultKind)
    # Restarts take a minute each.
    assert counted[FaultKind.KILL] + counted[FaultKind.IDLE_RESTART] <= 5
    assert all(0 < fault.at_ended < trajectories for fault in script)
    assert [fault.at_ended for fault in script] == sorted(fault.at_ended for fault in script)
    assert script == fault_script(0, trajectories, dedicated=DEDICATED, guest="guest")
    assert script != fault_script(1, trajectories, dedicated=DEDICATED, guest="guest")


@pytest.mark.parametrize("trajectories", [20, 1000])
def test_all_turns_fit_the_larger_context_and_many_only_that(trajectories: int) -> None:
    plan = rollout_plan(0, trajectories, contexts=CONTEXTS, chat=chat)
    assert plan == rollout_plan(0, trajectories, contexts=CONTEXTS, chat=chat)
    only_large = 0
    for trajectory in plan:
        most = sum(len(t.new_tokens) + t.sampling["max_tokens"] for t in trajectory.turns)
        assert most <= CONTEXTS[1]
        only_large += most > CONTEXTS[0]
    assert only_large >= trajectories / 4
    assert len({one.name for one in plan}) == len(plan)
    settings = Counter(name for one in plan for turn in one.turns for name in turn.sampling)
    if trajectories >= 1000:
        surface = ("presence_penalty", "stop", "structured_outputs", "thinking_token_budget")
        assert min(settings[name] for name in (*surface, "min_tokens")) > trajectories / 10
        assert min(settings[name] for name in ("top_k", "top_p", "min_p")) > trajectories / 20
        kinds = Counter(kind for one in plan for turn in one.turns for kind in turn.kinds)
        assert min(kinds[route.label] for route in RolloutRoute) > trajectories / 10
        assert min(kinds[f"{pin} pin"] for pin in PinKind) > trajectories / 40
        assert kinds["several samples"] > trajectories / 10
        assert 0.07 < kinds["tinker"] / sum(kinds[route.label] for route in RolloutRoute) < 0.15
        assert kinds["equal numerics"] > trajectories / 10
        several = ("chat of several messages", "thinking chat")
        assert min(kinds[name] for name in several) > trajectories / 20
        choices = ("none", "auto", "required")
        assert min(kinds[f"chat with tools: {name}"] for name in choices) > trajectories / 60
        assert min(kinds[f"{name}, asked again"] for name in ("tinker", "generate")) > 10
    for turn in (turn for one in plan for turn in one.turns):
        assert not UNCARRIED.get(turn.route, frozenset()) & turn.sampling.keys()
        assert bool(turn.chat) == (turn.route is RolloutRoute.CHAT)
        if "structured_outputs" in turn.sampling:
            # A parser of reasoning keeps a grammar back until it has ended.
            assert turn.chat.thinks if turn.chat else turn.new_tokens[-1] == END_THINK_ID
            # Thinking that the model ends is ended again at its budget, which a grammar refuses.
            assert not turn.chat or turn.sampling["logit_bias"][str(END_THINK_ID)] == -100.0
        if turn.chat and turn.chat.thinks and "min_tokens" in turn.sampling:
            assert "stop_token_ids" not in turn.sampling, "the forced end may begin with one"
        if turn.route is RolloutRoute.TINKER:
            assert turn.pin in (None, PinKind.EXACT, PinKind.NEWEST)
            assert (turn.stream, turn.equal_numerics) == (False, False)
    poison = [one for one in plan if one.poison]
    assert len(plan) - len(poison) == trajectories
    prompts = {tuple(one.turns[0].new_tokens) for one in poison}
    assert len(prompts) == len(poison) > 1


def test_both_arms_of_the_bias_part_have_the_same_turns_but_for_their_seeds() -> None:
    plan = bias_plan(0, 400, blocks=4, arms=("calm", "moved"))
    assert len(plan) == 400
    arms: dict[str, dict[str, tuple[object, ...]]] = {"calm": {}, "moved": {}}
    for planned in plan:
        arm, _, pair = planned.name.partition("-")
        (turn,) = planned.turns
        sampling = {key: value for key, value in turn.sampling.items() if key != "seed"}
        arms[arm][pair] = (turn.new_tokens, sampling, "seed" in turn.sampling, turn.stream)
    assert arms["calm"] == arms["moved"]
    kinds = Counter(one[2:] for one in arms["calm"].values())
    assert min(kinds.values()) > 0.2 * len(arms["calm"])
    assert len(kinds) == 4
    assert len({planned.arm for planned in plan}) == 8
    assert {arm.split()[0] for arm in [plan[0].arm, plan[50].arm]} == {"calm", "moved"}
