"""The guest's scheduler: stock vLLM's, with the gate asked before every step.

Give it to vLLM with `--scheduler-cls coserve.vllm.scheduler.CoserveScheduler`. While the gate is
closed the engine loop sleeps in its input queue (gated_loop.py), where aborts, pauses and weight
updates still pass; vLLM's questions about requests are answered truthfully all the while.
"""

import logging
import os
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from coserve.guest.guest_slot import GuestSlot
from coserve.guest.memory_deadline import end_guest
from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.environment import Role, slot_environment, work_gate
from coserve.vllm.gated_loop import GatedLoop
from coserve.vllm.kv_reserve import KvReserve
from coserve.vllm.kv_shared import KvcachedLimit, check, is_shared
from coserve.vllm.launch import AUTOPATCH_VARIABLE, SEGMENT_VARIABLE, WORKER_EXTENSION
from coserve.vllm.memory_report import largest
from coserve.vllm.prefix_keeper import PrefixKeeper
from coserve.vllm.residency import LEVEL, WAKE, sleeps, wake
from coserve.vllm.waker import Waker
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, Unsupported
from harvester.contracts.isolation import IsolationBackend
from harvester.contracts.process import process_ids
from harvester.platform.kv_segment import KvSegment

_log = logging.getLogger(__name__)

_WAKE_BYTES_PER_S = 10e9
"""Assumed rate of copying weights back from host memory, until it is measured."""

_BY_ITSELF = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
"""Final states of a turn whose trajectory may return with another turn."""


class CoserveScheduler(AsyncScheduler):
    """One scheduler per guest engine core. The engine loop's thread calls `attach`."""

    _granted_tokens: int | None = None
    """Token cap of the next step; None if no step is admitted."""
    _drains_since_s: float | None = None
    """Start of a pause that waits for turns behind a closed gate."""
    in_step = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        environment = slot_environment()
        if environment is None or environment.role is not Role.GUEST:
            raise ConfigError("CoserveScheduler runs in a guest: set ROSEMUX_ROLE=guest")
        self.max_num_scheduled_tokens: int
        self._token_limit = self.max_num_scheduled_tokens
        self._slot = GuestSlot(
            environment.directory, token_limit=self._token_limit, owners=environment.owners
        )
        self._slot.load.isolation = environment.isolation or ""
        self._isolation = self._slot.isolation_watch()
        self._vllm = capabilities(installed_vllm_version())
        self._core: Any = None
        self._waker: Waker | None = None
        self.kv_cache_manager: Any
        self._extended = self.vllm_config.parallel_config.worker_extension_cls == WORKER_EXTENSION
        self._kv = self._memory()
        manager = self.kv_cache_manager
        # Layers of unlike caches (sliding windows, states) have prefixes of more than one kind.
        self._retains = manager.enable_caching and manager.num_kv_cache_groups == 1
        self._prefixes = PrefixKeeper(manager.block_pool, tokens_per_block=self.block_size)
        self._clock = MonotonicClock()

    def _memory(self) -> KvReserve | KvcachedLimit:
        """The memory mechanism that fits the engine's pool."""
        pool = self.kv_cache_manager.block_pool
        if is_shared(pool):
            check(self._vllm)
            name = os.environ.get(SEGMENT_VARIABLE)
            segment = None if name is None else KvSegment(name)
            return KvcachedLimit(pool, tokens_per_block=self.block_size, segment=segment)
        if os.environ.get(AUTOPATCH_VARIABLE, "").lower() in {"1", "true"}:
            raise ConfigError(f"{AUTOPATCH_VARIABLE} is set, and kvcached is not in force here")
        give_back = self._give_back if self._extended and current_platform.is_cpu() else None
        return KvReserve(pool, tokens_per_block=self.block_size, give_back=give_back)

    def attach(self, core: Any, wake_loop: Any) -> None:
        """Called with the engine core whenever its loop is about to run."""
        if self._core is not None:
            return
        self._core = core
        shared_kv = isinstance(self._kv, KvcachedLimit)
        self._slot.sleeps = sleeps(
            self.vllm_config, core.model_executor, self._vllm, shared_kv=shared_kv
        )
        self._kv.give_back_unused()
        self._ask_workers()
        self._work = work_gate()
        self._work.expect(WAKE, self._slot.load.memory.weights_bytes / _WAKE_BYTES_PER_S)
        if self._extended:
            core.model_executor.collective_rpc("rosemux_pace")
        self._measure_load()
        if self._isolation is not None:
            self._isolation.start()
        GatedLoop(core, self, self._vllm)
        # Killing an MPS client in the middle of a kernel takes production with it: the agent ends
        # it in order.
        by_itself = self._slot.load.isolation != IsolationBackend.MPS
        self._waker = Waker(self._slot, wake_loop, end=end_guest if by_itself else None)
        self._waker.start()

    def add_request(self, request: Any) -> None:
        # The slack law cuts prefills, and vLLM's CPU runner fails on a cut prefill of a request
        # with its own seed: CPU generators cannot be rewound. Turns that move repeat no seed.
        if current_platform.is_cpu() and request.sampling_params is not None:
            request.sampling_params.seed = None
        self._prefixes.arrive(request, now=self._clock.now())
        super().add_request(request)

    def has_requests(self) -> bool:
        """vLLM's own answer; within a step, whether a step is to be launched."""
        if self.in_step:
            return self._granted_tokens is not None
        with self._slot.own_work:
            self._keep_within_budget()
        return bool(super().has_requests())

    def admits(self) -> bool:
        """Decide once whether a step may be launched now: there is work and the gate is open."""
        with self._slot.own_work:
            tokens = self._granted_tokens = self._admitted_tokens()
            if tokens is not None:
                self.max_num_scheduled_tokens = tokens
                self._prefixes.make_room(self._blocks_of_step(), now=self._clock.now())
        return tokens is not None

    @property
    def sleep_s(self) -> float | None:
        """Seconds until a pause aborts the turns that it waits for: the grace of a lost grant,
        counted while no step starts. None without a pause."""
        if self._drains_since_s is None:
            return None
        waited_s = self._clock.now() - self._drains_since_s
        return max(0.0, self._slot.abort_grace_s - waited_s)

    def _admitted_tokens(self) -> int | None:
        drains_since_s, self._drains_since_s = self._drains_since_s, None
        if not super().has_requests():
            return None
        if not self._core.is_running():
            # The engine must be able to flush and end; other engines continue its turns.
            self._abort(list(self.requests))
            return self._token_limit
        self._measure_step()
        decision = self._slot.decide(for_step=True)
        if not (decision.open and self.running):
            self._measure_load()
        if self._slot.grace_over():
            self._abort(list(self.requests))
        # A grant may have come after the last sleep check: no step without weights.
        if decision.open and not self._slot.load.weights_away:
            return decision.tokens
        if self.has_unfinished_requests() and self.pause_state is PauseState.PAUSED_NEW:
            self._drains_since_s = drains_since_s or self._clock.now()
            if self.sleep_s == 0.0:
                self._abort(list(self.requests))
        if self.finished_req_ids and not self.has_unfinished_requests():
            # This step tells the workers which requests have ended and computes nothing: without
            # it, an engine without turns behind a closed gate would never be idle, and no pause
            # would complete.
            self._drains_since_s = None
            return 0
        # For offloaded weights the waker comes by itself, at most once a beat.
        if self._waker is not None and not self._slot.load.weights_away:
            self._waker.arm()
        return None

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self._granted_tokens is None:
            raise Unsupported(
                "no gate holds this engine loop: run the guest as a vLLM server with one "
                "data-parallel rank and the plugin 'rosemux_coserve' enabled"
            )
        self._granted_tokens = None
        output = super().schedule(*args, **kwargs)
        with self._slot.own_work:
            stepping = output.num_scheduled_tokens
            self._prefixes.stepped(stepping, open_requests=self.requests, now=self._clock.now())
            if (total := output.total_num_scheduled_tokens) > 0:
                decodes = list(stepping.values()).count(1)
                self._slot.launched(decodes=decodes, prefill_tokens=total - decodes)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        with self._slot.own_work:
            stepped = [self.requests.get(name) for name in scheduler_output.num_scheduled_tokens]
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        with self._slot.own_work:
            for request in stepped:
                if request is not None and request.status in _BY_ITSELF:
                    most_blocks = self._most_retained()
                    self._prefixes.leave(request, most_blocks=most_blocks, now=self._clock.now())
            if scheduler_output.total_num_scheduled_tokens > 0:
                self._slot.finished()
                if self._slot.page_due():
                    self._measure_load()
                    self._slot.publish()
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._prefixes.drop_all()
        reset = super().reset_prefix_cache
        return self._kv.released(lambda: reset(*args, **kwargs))

    def shutdown(self) -> None:
        if self._waker is not None:
            self._waker.stop()
            self._waker.join(timeout=1.0)
        if self._isolation is not None:
            self._isolation.stop()
        self._slot.close()
        super().shutdown()

    def _measure_step(self) -> None:
        """The load by which a step is decided."""
        load = self._slot.load
        load.running = len(self.running)
        load.kv_tokens = self._kv.tokens_held - self._prefixes.tokens

    def _measure_load(self) -> None:
        """The load as the guest page shows it."""
        self._measure_step()
        load = self._slot.load
        load.waiting = len(self.waiting) + len(getattr(self, "skipped_waiting", ()))
        load.kv_tokens_total = self._kv.tokens_total
        load.kv_tokens_withheld = self._kv.tokens_withheld
        load.kv_tokens_retained = self._prefixes.tokens
        load.prefix_tokens_used_total = self._prefixes.tokens_used_total
        load.prefix_tokens_dropped_total = self._prefixes.tokens_dropped_total
        load.weight_version = str(getattr(self._core, "_weight_version", ""))

    def _keep_within_budget(self) -> None:
        """Obey a changed budget: cached prefixes go first, then kept prefixes of least worth, then
        the youngest requests."""
        if self._slot.owes_memory():
            # Judge by the present pages: a grant may have returned since the last decision.
            self._slot.decide()
        if self._slot.owes_memory():
            if not self._weights_are_there():
                return
            budget_tokens = self._slot.kv_budget_tokens()
            short_tokens = self._kv.keep_within(budget_tokens)
            if short_tokens:
                short_blocks = short_tokens // self.block_size
                self._prefixes.make_room(short_blocks, now=self._clock.now())
                short_tokens = self._kv.keep_within(budget_tokens)
            if short_tokens:
                self._abort(self._youngest_holding(short_tokens))
                short_tokens = self._kv.keep_within(budget_tokens)
            self._prefixes.keep_within(self._most_retained(), now=self._clock.now())
            self._slot.kv_obeyed_tokens = budget_tokens
            self._slot.kv_short_tokens = short_tokens
            self._offload_weights()
            self._measure_load()
            self._slot.publish()
        if self._kv.tokens_withheld and not self.running and self._all_waiting():
            # These requests would wait for ever here; another engine continues them. First the page
            # is read again, since the budget may have just grown.
            self._slot.decide()
            if self._slot.owes_memory():
                self._keep_within_budget()
                return
            room = self._kv.tokens_total - self._kv.tokens_withheld
            self._abort([r.request_id for r in self._all_waiting() if r.num_tokens >= room])

    def _all_waiting(self) -> list[Any]:
        """Waiting requests. Up to 0.30 requests that a step has passed over have a separate queue,
        for example one that was preempted with steps in flight."""
        return [*self.waiting, *getattr(self, "skipped_waiting", ())]

    def _weights_asleep(self) -> bool:
        return self._slot.sleeps and bool(self._core.model_executor.is_sleeping)

    def _weights_are_there(self) -> bool:
        """Wake the weights before the first block is allocated again, unless the slot sleeps. False
        without slack for waking: the loop then sleeps on and returns here after a beat."""
        if not self._weights_asleep() or self._slot.granted.asleep:
            return True
        if not self._work.admits(WAKE):
            return False
        with self._work.measured(WAKE):
            wake(self._core.model_executor)
        self._report_residency(away=False)
        return True

    def _offload_weights(self) -> None:
        """Offload the weights once no request, no launched step and no cached prefix is left."""
        if not self._slot.sleeps or self._weights_asleep() or not self._slot.granted.asleep:
            return
        if self.requests or self._core.batch_queue or self._kv.blocks_usable:
            return
        self._core.model_executor.sleep(LEVEL)
        self._report_residency(away=True)

    def _report_residency(self, *, away: bool) -> None:
        self._slot.load.weights_away = away
        self._ask_workers()

    def _most_retained(self) -> int:
        ratio = self._slot.granted.kv_retained_ratio if self._retains else 0.0
        return int(ratio * self._kv.blocks_usable)

    def _blocks_of_step(self) -> int:
        """Blocks that the next step may take, so that no running request is preempted for a kept
        prefix.

        A waiting request yields to kept prefixes, unless no other request could go on.
        """
        blocks: int = self.max_num_scheduled_tokens // self.block_size + len(self.running)
        if self.requests and not self.running:
            blocks += max(one.num_tokens for one in self.requests.values()) // self.block_size + 1
        return blocks

    def _give_back(self, blocks: list[int], total: int) -> None:
        rpc = self._core.model_executor.collective_rpc
        returned = sum(rpc("rosemux_give_back", args=(blocks, total)))
        if returned == 0 and len(blocks) > total // 2:
            _log.warning("no KV memory is given back: this engine's cache has an unknown layout")

    def _ask_workers(self) -> None:
        """Record the workers' processes and memory, as far as they can report them."""
        pids, rpc = [os.getpid()], self._core.model_executor.collective_rpc
        if self._extended:
            pids += rpc("rosemux_pid")
            self._slot.load.memory = largest(rpc("rosemux_memory"))
        self._slot.load.processes = process_ids(pids)

    def _abort(self, request_ids: list[str]) -> None:
        """End requests with the output so far, and reply to their clients."""
        if not request_ids:
            return
        aborted = self.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self._core._send_abort_outputs(aborted)
        self._slot.aborted(len(request_ids))
        # The gate may stay closed, so that no step updates the load.
        self._measure_load()

    def _youngest_holding(self, tokens: int) -> list[str]:
        """The running requests that arrived last and together hold at least `tokens`."""
        victims: list[str] = []
        for request in sorted(self.running, key=lambda r: r.arrival_time, reverse=True):
            if tokens <= 0:
                break
            victims.append(request.request_id)
            tokens -= request.num_computed_tokens
        return victims
