"""After a call that a rank refused, the next answers are those to the next call."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.vllm.executor_replies import read_all_replies


class Queue(deque[Any]):
    def dequeue(self, timeout: float | None = None) -> Any:
        return self.popleft()


class Executor:
    """Reads as vLLM's does: the first failure ends it."""

    def __init__(self, backend: str = "rosemux") -> None:
        transfer = SimpleNamespace(backend=backend)
        self.vllm_config = SimpleNamespace(weight_transfer_config=transfer)
        self.response_mqs: list[Any] = [Queue(), Queue()]

    def collective_rpc(
        self, method: str, *, answers: tuple[Any, Any], unique_reply_rank: int | None = None
    ) -> Any:
        asked = range(2) if unique_reply_rank is None else [unique_reply_rank]
        for rank in asked:
            self.response_mqs[rank].append(answers[rank])
        heard = []
        for rank in asked:
            answer = self.response_mqs[rank].dequeue(timeout=None)
            if isinstance(answer, Exception):
                raise answer
            heard.append(answer)
        return heard[0] if unique_reply_rank is not None else heard


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    for _ in range(2):
        read_all_replies(Executor, "rosemux")


@pytest.mark.parametrize("second", ["done", RuntimeError("refused")])
def test_every_rank_s_reply_is_read_before_a_refusal_is_raised(second: object) -> None:
    executor = Executor()
    with pytest.raises(RuntimeError, match="refused"):
        executor.collective_rpc("update", answers=(RuntimeError("refused"), second))
    assert executor.collective_rpc("report", answers=("a", "b")) == ["a", "b"]
    assert executor.collective_rpc("step", answers=("a", "b"), unique_reply_rank=1) == "b"


def test_a_refusal_of_the_last_rank_leaves_nothing_to_hear() -> None:
    executor = Executor()
    with pytest.raises(RuntimeError, match="refused"):
        executor.collective_rpc("update", answers=("done", RuntimeError("refused")))
    assert executor.collective_rpc("report", answers=("a", "b")) == ["a", "b"]


def test_engines_with_another_backend_are_left_as_they_are() -> None:
    executor = Executor(backend="nccl")
    with pytest.raises(RuntimeError, match="refused"):
        executor.collective_rpc("update", answers=(RuntimeError("refused"), "done"))
    assert executor.collective_rpc("report", answers=("a", "b")) == ["a", "done"]
