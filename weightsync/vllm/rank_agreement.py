"""Lets the ranks of an engine compare a version with its trainer's sums before they change.

No rank alone can tell whether its boxes are the published ones (rank_sums.py). The executor, which
speaks to all ranks of an engine, asks each for its sums once all have staged a version, and again
before it passes an update on. A version that does not add up is prepared again from a full
checkpoint, while the engine runs if it was staged; if that does not add up either, or a rank cannot
prepare it, every rank refuses it with nothing touched. Ranks never wait for each other.

Imported in every vLLM process, so it imports nothing heavy before an update.
"""

import logging
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeAlias

from harvester.contracts.wire.engines import WorkerMethod

if TYPE_CHECKING:
    from weightsync.receive.rank_sums import SumJudge, SumVerdict

_logger = logging.getLogger("vllm.rosemux.weightsync")

SUMS_METHOD = "rosemux_sums"
JUDGE_METHOD = "rosemux_judge"
_UPDATE = "update_weights"
_READY = "ready"
_ORIGINAL = "rosemux_sums_original"
_JUDGE = "rosemux_sum_judge"
_Call: TypeAlias = Callable[..., list[Any]]
"""(method, named arguments): the answers of all ranks."""


def install(backend: str) -> None:
    """Makes engines with our backend compare before they update. Idempotent; after the executor
    reads all replies (executor_replies.py)."""
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    compare_before_updates(MultiprocExecutor, backend)
    follow_ray(Executor, backend)


def follow_ray(executor_class: Any, backend: str) -> None:
    """Makes executors on Ray compare too, from when one is made: importing their module would
    import Ray in every vLLM process. vLLM's newer one is a MultiprocExecutor, its legacy one
    (VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0) has calls of its own. Idempotent."""
    original: Any = executor_class.__init__
    if hasattr(original, _ORIGINAL):
        return

    @wraps(original)
    def init(executor: Any, vllm_config: Any) -> None:
        if executor.uses_ray:
            compare_before_updates(type(executor), backend)
        original(executor, vllm_config)

    setattr(init, _ORIGINAL, original)
    executor_class.__init__ = init


def compare_before_updates(executor_class: Any, backend: str) -> None:
    """See `install`; `executor_class` is one with vLLM's `collective_rpc`."""
    original: Any = executor_class.collective_rpc
    if hasattr(original, _ORIGINAL):
        return

    def collective_rpc(executor: Any, method: Any, *given: Any, **named: Any) -> Any:
        transfer = executor.vllm_config.weight_transfer_config
        is_ours = transfer is not None and transfer.backend == backend
        arguments = _arguments(method, given, named) if is_ours else None
        if arguments is None or executor.vllm_config.parallel_config.world_size < 2:
            return original(executor, method, *given, **named)

        def ask(method: str, **arguments: Any) -> list[Any]:
            return list(original(executor, method, kwargs=arguments))

        judge = _judge_of(executor)
        if method == WorkerMethod.STAGE:
            stage = partial(original, executor, method, *given, **named)
            return staged(stage, ask, judge, arguments)
        if isinstance(update_info := arguments.get("update_info"), dict):
            ask(JUDGE_METHOD, verdict=agreed(ask, judge, update_info))
        return original(executor, method, *given, **named)

    setattr(collective_rpc, _ORIGINAL, original)
    executor_class.collective_rpc = collective_rpc


def _arguments(method: Any, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments of a call that stages or loads a version; None for any other call."""
    if method not in {_UPDATE, WorkerMethod.STAGE} or named.get("non_block"):
        return None
    found = named.get("kwargs") or (given[2] if len(given) > 2 else None)
    return found if isinstance(found, dict) else None


def _judge_of(executor: Any) -> "SumJudge":
    from weightsync.receive.rank_sums import SumJudge

    judge: SumJudge = getattr(executor, _JUDGE, None) or SumJudge()
    setattr(executor, _JUDGE, judge)
    return judge


def staged(
    stage: Callable[[], list[dict[str, str]]],
    ask: _Call,
    judge: "SumJudge",
    update_info: dict[str, Any],
) -> list[dict[str, str]]:
    """How far the ranks are with a version: ready only if all together find it the trainer's.
    `stage` calls all of them."""
    statuses = stage()
    if any(status["state"] != _READY for status in statuses):
        return statuses
    words = ask(SUMS_METHOD, update_info=update_info, anew=False, known=judge.known)
    verdict = judge.judged(words)
    ask(JUDGE_METHOD, verdict=verdict)
    if not verdict.refusal:
        return statuses
    _logger.warning("staged: %s", verdict.refusal)
    # Each rank now begins from a full checkpoint, or says that it did so before.
    return stage()


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
