"""The weights of one vLLM worker, and the arguments of the calls that update them.

Decides which objects a worker's model and settings need, and the allowed order of calls.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from harvester.contracts.errors import (
    ConfigError,
    PeerProtocolError,
    RoseMuxError,
    Unsupported,
)
from harvester.contracts.ids import checked_name
from harvester.contracts.wire.engines import WorkerMethod
from weightsync.encoding.codec import WIDTHS_BYTES, warm_up
from weightsync.layout import box_delta
from weightsync.reading.memory_budget import STAGING_BYTES
from weightsync.receive.rank_sums import RankSums, SumVerdict, without_boxes
from weightsync.transport.base_checkpoint import VARIABLE as BASE_VARIABLE
from weightsync.transport.base_checkpoint import BaseCheckpoint, has_shards
from weightsync.transport.location import StoreRoot
from weightsync.vllm import cpu_linear
from weightsync.vllm.adapted_weights import AdaptedWeights
from weightsync.vllm.adapter_stores import AdapterStores
from weightsync.vllm.engine_weights import KEEPING_LEVEL, EngineWeights
from weightsync.vllm.layers import check_experts_beside_adapters
from weightsync.vllm.lora_slots import LoraSlots
from weightsync.vllm.paced_pool import Pace
from weightsync.vllm.prepared_version import RequestedVersion
from weightsync.vllm.rank_agreement import JUDGE_METHOD, SUMS_METHOD
from weightsync.vllm.rank_parts import is_partial
from weightsync.vllm.stager import StageState, StageStatus

ROOT_VARIABLE = "ROSEMUX_WEIGHT_ROOT"
PACKED_AHEAD_VARIABLE = "ROSEMUX_PACKED_AHEAD_BYTES"
PACKED_AHEAD_BYTES = 2 << 30
STAGING_VARIABLE = "ROSEMUX_STAGING_BYTES"
_ORIGINAL = "rosemux_original"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Empty: each update names its store."""


class UpdateInfo(WeightTransferUpdateInfo):
    """Arguments of an update: the fields of RequestedVersion, checked."""

    def __init__(self, **fields: Any) -> None:
        self.requested = requested = RequestedVersion(**fields)
        checked_name(requested.store, what="store")
        if requested.adapter is not None:
            checked_name(requested.adapter, what="adapter")
        if type(requested.version) is not int or requested.version < 1:
            raise PeerProtocolError(f"version {requested.version!r}: use a number from 1")


class WorkerWeights:
    """The worker's own thread calls its methods."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> None:
        _refuse_moving_weights(vllm_config)
        root = _weight_root(vllm_config.model_config)
        if device.type == "cpu":
            cpu_linear.check_installed()
        warm_up({tensor.element_size() for tensor in model.state_dict().values()} & WIDTHS_BYTES)
        # Ranks of expert parallelism alone are data-parallel engines, each with its own world.
        sliced = vllm_config.parallel_config.world_size > 1 or is_partial(model)
        if sliced:
            box_delta.warm_up()
        base = EngineWeights(
            model,
            vllm_config.model_config,
            root,
            packed_ahead_bytes=_bytes_of(PACKED_AHEAD_VARIABLE, PACKED_AHEAD_BYTES),
            staging_bytes=_bytes_of(STAGING_VARIABLE, STAGING_BYTES),
            sliced=sliced,
            is_dummy=getattr(vllm_config.load_config, "load_format", None) == "dummy",
            settle=None if device.type == "cpu" else partial(_await_stream, device),
        )
        self._pace: Pace | None = None
        self._device = device
        self._asleep = False
        self._weights: EngineWeights | AdaptedWeights = base
        if vllm_config.lora_config is not None:
            from vllm.triton_utils import HAS_TRITON

            check_experts_beside_adapters(model, has_triton=HAS_TRITON)
            slots = LoraSlots(model, vllm_config, device)
            self._weights = AdaptedWeights(base, AdapterStores(root), slots)

    def stage(self, update_info: UpdateInfo) -> dict[str, str]:
        """Prepare a version in the background; returns its state and a message. A missing
        store is a failure like one of its versions: the caller gets its message."""
        if self._asleep:
            return {"state": "asleep", "message": "the update prepares by itself"}
        try:
            status = self._weights.stage(update_info.requested)
        except (RoseMuxError, OSError) as error:
            message = f"{type(error).__name__}: {error}"
            status = StageStatus(state=StageState.FAILED, message=message)
        return {"state": status.state.value, "message": status.message}

    def sums(
        self, update_info: UpdateInfo, *, anew: bool = False, known: Sequence[str] = ()
    ) -> RankSums:
        """This rank's words for the verdict of all; `known`: ids of boxes that the caller knows."""
        if self._asleep:
            return RankSums()
        # A step may still read the weights after its call has returned.
        self._await_device()
        return without_boxes(self._weights.sums(update_info.requested, anew=anew), known)

    def judge(self, verdict: SumVerdict) -> None:
        """Take the verdict, before the update is loaded."""
        self._weights.judge(verdict)

    def set_asleep(self, *, asleep: bool, level: int = KEEPING_LEVEL) -> None:
        """Record that the weights fall asleep, by vLLM's level, or are awake again. Nothing touches
        them while they sleep, and preparations that read them are dropped."""
        self._asleep = asleep
        if asleep:
            with nullcontext() if self._pace is None else self._pace.hurry():
                self._weights.fall_asleep(level)

    def paced_by(self, pace: Pace) -> None:
        """Make each piece of weight work ask from now on: production is beside this engine."""
        self._pace = pace
        self._weights.paced_by(pace)

    def load(self, update_info: UpdateInfo) -> None:
        """Load the version; raises if the engine does not hold exactly it afterwards."""
        # A step may still read the weights after its call has returned.
        self._await_device()
        self._weights.load(update_info.requested)
        self._await_device()

    def finish(self) -> None:
        """Raises ConfigError if the update has loaded no version."""
        self._weights.release()
        if not self._weights.is_loaded:
            raise ConfigError("no version is loaded: call update_weights first")

    def report(self) -> dict[str, Any]:
        """The loaded version; empty before the first update, `in_doubt` while it is unknown."""
        return self._weights.report()

    def close(self) -> None:
        self._weights.close()

    def _await_device(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def add_worker_methods(worker_class: Any) -> None:
    """Add the methods to workers that `/collective_rpc` calls by name, and let engines know of
    their worker's sleep."""

    def rosemux_weights(worker: Any) -> dict[str, Any]:
        report: dict[str, Any] = worker.weight_transfer_engine.report()
        return report

    def rosemux_stage(worker: Any, store: str, version: int, **more: Any) -> dict[str, str]:
        update_info = UpdateInfo(store=store, version=version, **more)
        status: dict[str, str] = worker.weight_transfer_engine.stage(update_info)
        return status

    def rosemux_sums(
        worker: Any, update_info: dict[str, Any], anew: bool, known: Sequence[str]
    ) -> RankSums:
        update = UpdateInfo(**update_info)
        words: RankSums = worker.weight_transfer_engine.sums(update, anew=anew, known=known)
        return words

    def rosemux_judge(worker: Any, verdict: SumVerdict) -> None:
        worker.weight_transfer_engine.judge(verdict)

    setattr(worker_class, SUMS_METHOD, rosemux_sums)
    setattr(worker_class, JUDGE_METHOD, rosemux_judge)
    setattr(worker_class, WorkerMethod.WEIGHTS, rosemux_weights)
    setattr(worker_class, WorkerMethod.STAGE, rosemux_stage)
    _follow_sleep(worker_class)


def _follow_sleep(worker_class: Any) -> None:
    """Idempotent. Workers of a CPU keep their own `sleep`, which does nothing."""
    sleep, wake_up = worker_class.sleep, worker_class.wake_up
    if hasattr(sleep, _ORIGINAL):
        return

    def fall_asleep(worker: Any, level: int = KEEPING_LEVEL) -> Any:
        _set_asleep(worker, asleep=True, level=level)
        return sleep(worker, level)

    def wake(worker: Any, tags: list[str] | None = None) -> Any:
        done = wake_up(worker, tags)
        if tags is None or "weights" in tags:
            _set_asleep(worker, asleep=False)
        return done

    setattr(fall_asleep, _ORIGINAL, sleep)
    worker_class.sleep, worker_class.wake_up = fall_asleep, wake


def _set_asleep(worker: Any, **state: Any) -> None:
    # Engines of other backends have no such method.
    set_asleep = getattr(getattr(worker, "weight_transfer_engine", None), "set_asleep", None)
    if set_asleep is not None:
        set_asleep(**state)


def _refuse_moving_weights(vllm_config: Any) -> None:
    """Raises Unsupported for engines that move weights: the loader's map would be wrong."""
    if getattr(vllm_config.parallel_config, "enable_eplb", False):
        raise Unsupported("backend rosemux: leave out --enable-eplb, which moves experts")
    offload: Any = getattr(vllm_config, "offload_config", None)
    group = getattr(getattr(offload, "prefetch", None), "offload_group_size", 0)
    if group > 0 and offload.offload_backend != "uva":
        raise Unsupported(
            "backend rosemux: leave out --offload-group-size, with which steps read copies that no "
            "update reaches"
        )


def _await_stream(device: torch.device) -> None:
    """Wait for a thread's work on its own stream, which engine steps do not use. The device is
    explicit: a pool's thread defaults to the first one."""
    torch.accelerator.current_stream(device).synchronize()


def _weight_root(model_config: Any) -> StoreRoot:
    """Root of the stores. Version 0 of another trainer's store is the engine's own model."""
    location = os.environ.get(ROOT_VARIABLE, "")
    model = str(getattr(model_config, "model", ""))
    base = os.environ.get(BASE_VARIABLE) or (model if has_shards(model) else None)
    if base is not None:
        BaseCheckpoint(base)
    try:
        if not location:
            raise ConfigError(
                f"{ROOT_VARIABLE} is not set in this worker; vLLM's legacy executor on Ray passes "
                "it on with VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY=ROSEMUX_"
            )
        return StoreRoot(location, base_checkpoint=base)
    except ConfigError as error:
        raise ConfigError(
            f"{ROOT_VARIABLE}={location!r}: set it to the directory that holds the weight stores, "
            "or to the URL of their server"
        ) from error


def _bytes_of(variable: str, default: int) -> int:
    given = os.environ.get(variable, str(default))
    if not given.isdecimal():
        raise ConfigError(f"{variable}={given!r}: use a number of bytes")
    return int(given)
