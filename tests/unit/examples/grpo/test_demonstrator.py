from random import Random
from statistics import mean

from examples.grpo.demonstrator import Demonstration, MistakeRates, demonstration
from examples.grpo.environment import LINE_TOKENS, Task, TaskShape, parsed_line

FLAWLESS = MistakeRates(early_answer=0.0, stale_key=0.0, wrong_digit=0.0)


def demonstrations(rates: MistakeRates) -> list[Demonstration]:
    random = Random(1)
    return [
        demonstration(Task(TaskShape(), 1, step, i), rates, random)
        for step in range(20)
        for i in range(24)
    ]


def test_without_mistakes_every_demonstration_earns_everything() -> None:
    assert {one.reward for one in demonstrations(FLAWLESS)} == {1.0}


def test_with_mistakes_there_is_clear_room_to_improve() -> None:
    assert 0.5 < mean(one.reward for one in demonstrations(MistakeRates())) < 0.75


def test_the_player_writes_whole_lines_of_the_form() -> None:
    for one in demonstrations(MistakeRates())[:50]:
        written = [i for i, own in zip(one.token_ids, one.is_output, strict=True) if own]
        lines = [
            tuple(written[at : at + LINE_TOKENS]) for at in range(0, len(written), LINE_TOKENS)
        ]
        assert all(parsed_line(each) is not None for each in lines)
        assert not one.is_output[0]
