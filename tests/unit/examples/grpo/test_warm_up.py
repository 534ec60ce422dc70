import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.grpo import warm_up as module
from examples.grpo.demonstrator import MistakeRates
from examples.grpo.environment import TaskShape
from examples.grpo.policy_shape import PolicyShape
from examples.grpo.warm_up import WarmUp, trained, warm_start
from tests.virtual_clock import VirtualClock


@pytest.fixture
def short(tiny: PolicyShape) -> WarmUp:
    return WarmUp(policy=tiny, steps=2, demonstrations_per_step=2)


def test_the_second_start_comes_from_the_cache_bit_for_bit(short: WarmUp, tmp_path: Path) -> None:
    first = warm_start(short, tmp_path, clock=VirtualClock())
    second = warm_start(short, tmp_path, clock=VirtualClock())
    assert (first.from_cache, second.from_cache) == (False, True)
    assert first.state.keys() == second.state.keys()
    assert all(torch.equal(first.state[name], second.state[name]) for name in first.state)


def test_training_it_again_gives_the_same_weights(short: WarmUp) -> None:
    one, again = trained(short), trained(short)
    assert all(torch.equal(one[name], again[name]) for name in one)


def test_every_input_is_in_the_key(short: WarmUp, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [
        replace(short, seed=2),
        replace(short, steps=3),
        replace(short, learning_rate=1.0),
        replace(short, demonstrations_per_step=3),
        replace(short, policy=replace(short.policy, layers=3)),
        replace(short, tasks=TaskShape(hops_max=3)),
        replace(short, mistakes=MistakeRates(stale_key=0.5)),
    ]
    keys = {short.key(), *(other.key() for other in others)}
    monkeypatch.setattr(module, "CODE_VERSION", module.CODE_VERSION + 1)
    assert len(keys | {short.key()}) == len(others) + 2


def test_an_interrupt_while_writing_leaves_nothing_behind(
    short: WarmUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            warm_start(short, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not warm_start(short, tmp_path).from_cache


@pytest.mark.parametrize("damage", [b"", b"not a safetensors file", None])
def test_a_damaged_cache_entry_is_made_again(
    short: WarmUp, tmp_path: Path, damage: bytes | None
) -> None:
    first = warm_start(short, tmp_path)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(entry.read_bytes()[:-10] if damage is None else damage)
    again = warm_start(short, tmp_path)
    assert not again.from_cache
    assert all(torch.equal(first.state[name], again.state[name]) for name in first.state)


def test_the_learning_rate_rises_and_then_falls() -> None:
    warm_up = WarmUp(steps=100)
    rates = [warm_up.learning_rate_at(step) for step in range(100)]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert max(rates) == pytest.approx(warm_up.learning_rate)
