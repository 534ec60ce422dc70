from dataclasses import replace
from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.grpo.environment import (
    KEY_DIGITS,
    LINE_TOKENS,
    Episode,
    Key,
    Line,
    Task,
    TaskShape,
    parsed_line,
)
from examples.grpo.vocabulary import VOCABULARY_SIZE, encoded
from harvester.contracts.errors import ConfigError

SHAPE = TaskShape()


def task_of(hops: int, *, seed: int = 7) -> Task:
    return next(
        task
        for i in range(SHAPE.prompts_per_step)
        if (task := Task(SHAPE, seed, 3, i)).hops == hops
    )


def line(turn: int, left: int, key: Key, *, answer: bool = False) -> tuple[int, ...]:
    return Line(turn=turn, left=left, key=key, is_answer=answer).ids()


def played(task: Task, *, calls: int) -> tuple[Episode, Key]:
    episode, key = Episode(task), task.start
    for turn in range(calls):
        episode.act(line(turn + 1, task.hops - turn, key))
        key = task.key_after(key)
    return episode, key


def test_a_task_is_a_function_of_seed_step_and_prompt() -> None:
    one, same = Task(SHAPE, 1, 2, 3), Task(SHAPE, 1, 2, 3)
    assert one.prompt_ids() == same.prompt_ids()
    assert one.latency_s(one.start) == same.latency_s(same.start)
    others = [Task(SHAPE, 2, 2, 3), Task(SHAPE, 1, 3, 3), Task(SHAPE, 1, 2, 4)]
    assert all(other.start != one.start for other in others)


def test_the_number_of_hops_is_long_tailed_with_a_mean_of_two_and_a_half() -> None:
    hops = [
        Task(SHAPE, 1, step, i).hops for step in range(40) for i in range(SHAPE.prompts_per_step)
    ]
    assert min(hops) == 1
    assert max(hops) == 8
    assert 2.3 < mean(hops) < 2.7
    assert hops.count(1) > hops.count(2) > hops.count(3) > hops.count(5)


def test_every_step_has_nearly_the_same_mix_of_hops() -> None:
    sums = [
        sum(Task(SHAPE, 1, step, i).hops for i in range(SHAPE.prompts_per_step))
        for step in range(30)
    ]
    assert max(sums) - min(sums) <= 0.2 * mean(sums)


def test_tool_latencies_are_long_tailed_and_capped() -> None:
    all_s = sorted(
        (task := Task(SHAPE, 1, step, i)).latency_s(task.start)
        for step in range(60)
        for i in range(SHAPE.prompts_per_step)
    )
    assert 0.012 < median(all_s) < 0.018
    assert all_s[int(0.99 * len(all_s))] > 8 * median(all_s)
    assert all_s[-1] <= SHAPE.latency_max_s
    capped = Task(replace(SHAPE, latency_max_s=0.001), 1, 0, 0)
    assert capped.latency_s(capped.start) <= 0.001


@pytest.mark.parametrize("hops", [1, 3, 5])
def test_calling_every_key_and_answering_with_the_last_earns_everything(hops: int) -> None:
    task = task_of(hops)
    episode, last = played(task, calls=hops)
    end = episode.act(line(hops + 1, 0, last, answer=True))
    assert end.done
    assert end.reward == 1.0
    assert end.ids == ()


def test_the_tool_returns_the_next_key_after_its_latency() -> None:
    task = task_of(2)
    told = Episode(task).act(line(1, 2, task.start))
    next_digits = " ".join(str(digit) for digit in task.key_after(task.start))
    assert told.ids == encoded(f"is {next_digits} ;")
    assert told.latency_s == task.latency_s(task.start)
    assert not told.done


def test_an_answer_given_too_early_earns_only_the_calls_so_far() -> None:
    task = task_of(3)
    episode, key = played(task, calls=2)
    end = episode.act(line(3, 1, key, answer=True))
    assert end.done
    assert end.reward == pytest.approx(2 / 4)


def test_a_wrong_answer_earns_only_the_calls() -> None:
    task = task_of(3)
    episode, _ = played(task, calls=3)
    assert episode.act(line(4, 0, task.start, answer=True)).reward == pytest.approx(3 / 4)


def test_a_wrong_key_leads_off_the_chain_and_earns_nothing_more() -> None:
    task = task_of(3)
    episode, key = played(task, calls=1)
    wrong: Key = ((key[0] + 1) % 10, *key[1:])
    off = episode.act(line(2, 2, wrong))
    assert not off.done
    assert off.latency_s == task.latency_s(wrong)
    again = episode.act(line(3, 1, task.key_after(wrong)))
    assert again.reward == pytest.approx(1 / 4)


def test_a_key_called_twice_uses_a_hop_up() -> None:
    task = task_of(3)
    episode, key = played(task, calls=2)
    episode.act(line(3, 1, task.key_after(task.start)))
    end = episode.act(line(4, 0, key, answer=True))
    assert end.reward < 1.0


def test_a_call_where_the_answer_is_due_ends_the_episode() -> None:
    task = task_of(2)
    episode, last = played(task, calls=2)
    end = episode.act(line(3, 0, last))
    assert end.done
    assert end.reward == pytest.approx(2 / 3)


def test_a_malformed_line_ends_the_episode_with_what_was_earned() -> None:
    task = task_of(3)
    episode, _ = played(task, calls=1)
    end = episode.act(encoded("turn 2 left ;"))
    assert end.done
    assert end.reward == pytest.approx(1 / 4)
    with pytest.raises(ValueError, match="over"):
        episode.act(())


@given(
    turn=st.integers(0, 9),
    left=st.integers(0, 9),
    key=st.tuples(*[st.integers(0, 9)] * KEY_DIGITS),
    answer=st.booleans(),
)
def test_every_line_parses_back(turn: int, left: int, key: Key, answer: bool) -> None:
    written = Line(turn=turn, left=left, key=key, is_answer=answer)
    assert parsed_line(written.ids()) == written
    assert len(written.ids()) == LINE_TOKENS


@given(
    place=st.integers(0, LINE_TOKENS - 1),
    token_id=st.integers(-1, VOCABULARY_SIZE),
)
def test_one_changed_token_parses_only_where_the_form_leaves_a_choice(
    place: int, token_id: int
) -> None:
    right = line(1, 2, (5,) * KEY_DIGITS)
    changed = (*right[:place], token_id, *right[place + 1 :])
    read = parsed_line(changed)
    assert read is None or read.ids() == changed


@given(st.lists(st.lists(st.integers(-3, 70), max_size=30).map(tuple), max_size=12))
def test_any_output_keeps_the_reward_between_zero_and_one(outputs: list[tuple[int, ...]]) -> None:
    episode = Episode(task_of(2))
    for output in outputs:
        if episode.done:
            break
        assert 0.0 <= episode.act(output).reward <= 1.0


@pytest.mark.parametrize("wrong", [{"hops_max": 9}, {"prompts_per_step": 0}, {"hops_go_on": 1.0}])
def test_a_shape_that_cannot_be_played_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        TaskShape(**wrong)  # type: ignore[arg-type]
