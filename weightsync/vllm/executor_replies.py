"""Keeps the ranks of an engine in step after a call that one of them refused.

vLLM's executor of several processes stops reading at the first rank that failed. The replies of the
ranks after it stay in their queues and are taken for the answer to the call that follows: a report
of another time or, from the last rank of a pipeline, the output of a step, which ends the engine.
A refused update is such a call. Here all replies are read before the failure is passed on.
"""

from contextlib import suppress
from typing import Any

_ORIGINAL = "rosemux_original"
_QUEUES = "response_mqs"
_FOR_ALL = 4
"""Number of leading arguments that do not select the replying rank."""


def install(backend: str) -> None:
    """Makes engines with our backend read the replies of all their ranks. Idempotent."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    read_all_replies(MultiprocExecutor, backend)


def read_all_replies(executor_class: Any, backend: str) -> None:
    """See `install`; `executor_class` is one with vLLM's `collective_rpc` and `response_mqs`."""
    original: Any = executor_class.collective_rpc
    if hasattr(original, _ORIGINAL):
        return

    def collective_rpc(executor: Any, *given: Any, **named: Any) -> Any:
        one_answers = named.get("unique_reply_rank") is not None or named.get("non_block")
        transfer = executor.vllm_config.weight_transfer_config
        if one_answers or len(given) > _FOR_ALL or transfer is None or transfer.backend != backend:
            return original(executor, *given, **named)
        queues = getattr(executor, _QUEUES)
        replies = [_ReplyQueue(queue) for queue in queues]
        setattr(executor, _QUEUES, replies)
        try:
            return original(executor, *given, **named)
        except TimeoutError:
            raise
        except Exception:
            # Where no rank answered the call was never made.
            if any(queue.answered for queue in replies):
                _read_rest(replies)
            raise
        finally:
            # An executor that has ended meanwhile has no queues.
            if getattr(executor, _QUEUES) is replies:
                setattr(executor, _QUEUES, queues)

    setattr(collective_rpc, _ORIGINAL, original)
    executor_class.collective_rpc = collective_rpc


class _ReplyQueue:
    """A rank's queue of answers that knows whether it was read."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.answered = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def dequeue(self, *given: Any, **named: Any) -> Any:
        answer = self._queue.dequeue(*given, **named)
        self.answered = True
        return answer


def _read_rest(replies: list[_ReplyQueue]) -> None:
    # An executor that ends meanwhile says so here; the failure that is passed on came first.
    with suppress(RuntimeError):
        for queue in replies:
            if not queue.answered:
                queue.dequeue()
