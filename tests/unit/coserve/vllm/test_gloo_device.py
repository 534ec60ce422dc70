"""Groups of a single rank share one gloo device; all other groups are torch's own."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest

from coserve.vllm import gloo_device

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
c10d = pytest.importorskip("torch.distributed.distributed_c10d")

_LATER = timedelta(seconds=30)


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one rank without a group, as when an engine starts."""
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def made_groups(groups: int) -> list[Any]:
    """Groups made as vLLM makes them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return [dist.new_group([0], backend="gloo", timeout=_LATER) for _ in range(groups)]


def threads_of(groups: int, *, ranks: int) -> int:
    before = threads()
    with gloo_device.share_gloo_device(ranks=ranks):
        made_groups(groups)
    more = threads() - before
    dist.destroy_process_group()
    return more


def test_a_dozen_groups_of_one_rank_look_after_one_device(alone: None) -> None:
    threads_of(1, ranks=1)  # Excludes threads that torch starts once.
    assert threads_of(12, ranks=2) - threads_of(12, ranks=1) == 12


def test_each_group_keeps_its_own_name(alone: None) -> None:
    with gloo_device.share_gloo_device(ranks=1):
        groups = made_groups(3)
    assert all(dist.get_backend(group) == "gloo" for group in groups)
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    assert [one.options.group_name for one in backends] == [one.group_name for one in groups]
    assert len({one.options.group_name for one in backends}) == 3


def test_such_groups_do_what_gloo_does_and_end_alone(alone: None) -> None:
    with gloo_device.share_gloo_device(ranks=1):
        groups = made_groups(3)
    dist.destroy_process_group(groups.pop(0))
    for group in groups:
        mine, all_of_it = torch.arange(4), [torch.zeros(4, dtype=torch.int64)]
        dist.all_gather(all_of_it, mine, group=group)
        assert torch.equal(all_of_it[0], mine)
        dist.all_reduce(mine, group=group)
        assert torch.equal(mine, torch.arange(4))
        dist.barrier(group=group)
        objects: list[Any] = [None]
        dist.all_gather_object(objects, {"rank": 0}, group=group)
        assert objects == [{"rank": 0}]


def failing_start() -> None:
    with gloo_device.share_gloo_device(ranks=1):
        raise MemoryError


def test_groups_made_after_the_start_are_torch_s_own() -> None:
    stock = c10d.ProcessGroupGloo
    with gloo_device.share_gloo_device(ranks=1):
        assert c10d.ProcessGroupGloo is not stock
    assert c10d.ProcessGroupGloo is stock
    with pytest.raises(MemoryError):
        failing_start()
    assert c10d.ProcessGroupGloo is stock


def test_an_engine_of_several_ranks_is_left_alone() -> None:
    stock = c10d.ProcessGroupGloo
    with gloo_device.share_gloo_device(ranks=2):
        assert c10d.ProcessGroupGloo is stock


class Recorded:
    """Torch's class of some other version: what it was asked to make."""

    made: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.made.append((*arguments, *named))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    Recorded.made = []
    monkeypatch.setattr(c10d, "ProcessGroupGloo", Recorded)
    return Recorded.made


def test_a_group_of_several_ranks_is_made_as_torch_makes_it(
    recorded: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    with gloo_device.share_gloo_device(ranks=1):
        for size in (1, 2, 2):
            group = c10d.ProcessGroupGloo("store", 0, size, timeout=_LATER)
            assert isinstance(group, c10d.ProcessGroupGloo)
            assert isinstance(group, Recorded)
    assert recorded == [("store", 0, size, "timeout") for size in (1, 2, 2)]
    assert not caplog.text


def test_a_torch_with_other_options_stays_as_it_is_and_is_logged_once(
    recorded: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    with gloo_device.share_gloo_device(ranks=1):
        for _ in range(3):
            c10d.ProcessGroupGloo("store", 0, 1, timeout=_LATER)
    assert recorded == [("store", 0, 1, "timeout")] * 3
    assert caplog.text.count("wakes a thread of its own") == 1
