"""Lets the ranks of an engine compare a version with its trainer's sums before they change.

No rank alone can tell whether its boxes are the published ones (rank_sums.py). The executor, which
speaks to all ranks of an engine, asks each for its sums before it passes an update on. A version
that does not add up is prepared again from a full checkpoint; if that does not add up either, or a
rank cannot prepare it, every rank refuses it with nothing touched. Ranks never wait for each other.

Imported in every vLLM process, so it imports nothing heavy before an update.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from weightsync.receive.rank_sums import SumJudge, SumVerdict

_logger = logging.getLogger("vllm.rosemux.weightsync")

SUMS_METHOD = "rosemux_sums"
JUDGE_METHOD = "rosemux_judge"
_UPDATE = "update_weights"
_ORIGINAL = "rosemux_sums_original"
_JUDGE = "rosemux_sum_judge"
_Call: TypeAlias = Callable[..., list[Any]]
"""(method, named arguments): the answers of all ranks."""


def install(backend: str) -> None:
    """Makes engines with our backend compare before they update. Idempotent; after the executor
    reads all replies (executor_replies.py)."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    compare_before_updates(MultiprocExecutor, backend)


def compare_before_updates(executor_class: Any, backend: str) -> None:
    """See `install`; `executor_class` is one with vLLM's `collective_rpc`."""
    original: Any = executor_class.collective_rpc
    if hasattr(original, _ORIGINAL):
        return

    def collective_rpc(executor: Any, method: Any, *given: Any, **named: Any) -> Any:
        update_info = _update_info(method, given, named)
        transfer = executor.vllm_config.weight_transfer_config
        if update_info is not None and transfer is not None and transfer.backend == backend:

            def ask(method: str, **arguments: Any) -> list[Any]:
                return list(original(executor, method, kwargs=arguments))

            _compare(ask, executor, update_info)
        return original(executor, method, *given, **named)

    setattr(collective_rpc, _ORIGINAL, original)
    executor_class.collective_rpc = collective_rpc


def _update_info(
    method: Any, given: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Any] | None:
    """Arguments of an update that all ranks take alike; None for any other call."""
    if method != _UPDATE or named.get("non_block"):
        return None
    arguments = named.get("kwargs") or (given[2] if len(given) > 2 else None) or {}
    found = arguments.get("update_info")
    return found if isinstance(found, dict) else None


def _compare(ask: _Call, executor: Any, update_info: dict[str, Any]) -> None:
    from weightsync.receive.rank_sums import SumJudge

    if executor.vllm_config.parallel_config.world_size < 2:
        return
    judge = getattr(executor, _JUDGE, None) or SumJudge()
    setattr(executor, _JUDGE, judge)
    ask(JUDGE_METHOD, verdict=agreed(ask, judge, update_info))


def agreed(ask: _Call, judge: "SumJudge", update_info: dict[str, Any]) -> "SumVerdict":
    """The verdict of all ranks on a version that they have prepared, at first or from a full
    checkpoint."""
    for anew in (False, True):
        words = ask(SUMS_METHOD, update_info=update_info, anew=anew, known=judge.known)
        verdict = judge.judged(words)
        if not verdict.wrong:
            break
        _logger.warning("%s: %s", "from a full checkpoint" if anew else "prepared", verdict.refusal)
    return verdict
