"""The weight-transfer engine for vLLM 0.24, where a worker does most of an update itself.

There an engine is made without its worker's settings, `start_weight_update` takes the model apart
by default, and `update_weights` waits for an accelerator that a CPU does not have. So
the three calls of a worker go to our engine, where it is ours, and leave the model as it is;
their callers see no difference from engine.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.v1.worker.gpu_worker import Worker

from harvester.contracts.errors import ConfigError, Unsupported
from harvester.contracts.wire.engines import WorkerMethod
from weightsync.receive.rank_sums import RankSums, SumVerdict
from weightsync.vllm.layers import check_layers
from weightsync.vllm.paced_pool import Pace
from weightsync.vllm.worker_weights import InitInfo, UpdateInfo, WorkerWeights, add_worker_methods

_REDIRECTED = "rosemux_redirected"


class LoaderShapedEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One engine per worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: Any, parallel_config: Any, model: torch.nn.Module) -> None:
        super().__init__(config, parallel_config, model)
        check_layers(model)
        self._weights: WorkerWeights | None = None
        self._pace: Pace | None = None
        redirect(Worker)

    def attach(self, worker: Any) -> None:
        """Learns the worker's settings, which vLLM does not pass to an engine; called once."""
        if self._weights is None:
            self._weights = WorkerWeights(self.model, worker.vllm_config, worker.device)
            if self._pace is not None:
                self._weights.paced_by(self._pace)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """No rendezvous: an engine may join at any time."""

    def receive_weights(
        self,
        update_info: UpdateInfo,
        load_weights: Callable[..., None],  # noqa: ARG002 - the map of the loader is our own
    ) -> None:
        self._attached.load(update_info)

    def stage(self, update_info: UpdateInfo) -> dict[str, str]:
        return self._attached.stage(update_info)

    def sums(self, update_info: UpdateInfo, **asked: Any) -> RankSums:
        return self._attached.sums(update_info, **asked)

    def judge(self, verdict: SumVerdict) -> None:
        self._attached.judge(verdict)

    def paced_by(self, pace: Pace) -> None:
        self._pace = pace
        if self._weights is not None:
            self._weights.paced_by(pace)

    def set_asleep(self, **state: Any) -> None:
        if self._weights is not None:
            self._weights.set_asleep(**state)

    def finish(self) -> None:
        self._attached.finish()

    def report(self) -> dict[str, Any]:
        return self._weights.report() if self._weights is not None else {}

    def shutdown(self) -> None:
        if self._weights is not None:
            self._weights.close()

    def trainer_send_weights(*_: object, **__: object) -> None:
        raise Unsupported("publish with weightsync.publisher.Publisher")

    @property
    def _attached(self) -> WorkerWeights:
        if self._weights is None:
            raise ConfigError("call start_weight_update first")
        return self._weights


def redirect(worker_class: Any) -> None:
    """Make workers with a RoseMux engine update through it. Idempotent."""
    if hasattr(worker_class, _REDIRECTED):
        return
    setattr(worker_class, _REDIRECTED, True)
    add_worker_methods(worker_class)
    _wrap(worker_class, "start_weight_update", _start)
    _wrap(worker_class, "update_weights", _update)
    _wrap(worker_class, "finish_weight_update", _finish)
    _wrap(worker_class, WorkerMethod.STAGE, _stage)


def _wrap(worker_class: Any, name: str, ours: Callable[..., Any]) -> None:
    upstream: Callable[..., Any] = getattr(worker_class, name)

    def redirected(worker: Any, *given: Any, **named: Any) -> Any:
        engine = worker.weight_transfer_engine
        if not isinstance(engine, LoaderShapedEngine):
            return upstream(worker, *given, **named)
        return ours(upstream, worker, engine, *given, **named)

    setattr(worker_class, name, redirected)


def _start(
    upstream: Callable[..., None],
    worker: Any,
    engine: LoaderShapedEngine,
    is_checkpoint_format: bool = True,  # noqa: ARG001 - set by vLLM's clients, ignored here
) -> None:
    engine.attach(worker)
    upstream(worker, is_checkpoint_format=False)


def _update(
    _upstream: Callable[..., None],
    worker: Any,
    engine: LoaderShapedEngine,
    update_info: dict[str, Any],
) -> None:
    if not worker._weight_update_active:
        raise RuntimeError("start_weight_update must be called before update_weights.")
    try:
        engine.receive_weights(engine.parse_update_info(update_info), load_weights=_never)
    except BaseException:
        worker._weight_update_active = False
        raise


def _finish(upstream: Callable[..., None], worker: Any, engine: LoaderShapedEngine) -> None:
    if worker._weight_update_active:
        engine.finish()
    upstream(worker)


def _stage(
    upstream: Callable[..., dict[str, str]],
    worker: Any,
    engine: LoaderShapedEngine,
    *given: Any,
    **named: Any,
) -> dict[str, str]:
    engine.attach(worker)
    return upstream(worker, *given, **named)


def _never(_weights: object) -> None:
    raise Unsupported("this engine takes weights from a store: name store and version")
