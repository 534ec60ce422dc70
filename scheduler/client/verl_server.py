"""A rollout server of verl (0.9) on Ray whose engines are those behind a gateway.

verl's load balancer takes the actor for one more server: the shapes of `generate` and of its output
are verl's, and a gateway's whole fleet answers under it. Imports no verl.
"""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from harvester.contracts.errors import Exhausted, Unsupported
from harvester.contracts.wire.rollouts import Choice, FinishReason
from scheduler.client.rollout_client import AsyncRolloutClient

_CALLS_AT_ONCE = 1 << 14
"""Concurrent calls, as many as a gateway holds turns; Ray's bound would hide calls from it."""


class TokenOutput(BaseModel):
    """A turn's output in verl's fields."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    """`completed` or `aborted`."""
    num_preempted: int | None = None
    """How often the turn went on at another engine."""
    extra_fields: dict[str, Any] = {}
    """`global_steps`, and its least and greatest: versions of the weights."""


class VerlServer:
    """The class that `started` makes a Ray actor. Abort and resume are verl's partial rollouts;
    sleeping and waking are the gateway's, and calls for them do nothing.

    `prompt_length`, `response_length`: verl's settings. `client`: AsyncRolloutClient's options.
    """

    def __init__(
        self, gateway: str, job: str, *, prompt_length: int, response_length: int, **client: Any
    ) -> None:
        self._client = AsyncRolloutClient(gateway, job, **client)
        self._response_length = response_length
        self._length = prompt_length + response_length
        self._running = asyncio.Event()
        self._running.set()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        audio_data: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        trajectory: str | None = None,
    ) -> TokenOutput:
        """One turn. `trajectory`: verl gives each turn a new id; without the trajectory's name, its
        turns share no prefix. Raises Exhausted for a turn that ended early for a fault: verl's
        loops would otherwise score the truncated output."""
        if image_data or video_data or audio_data or mm_processor_kwargs:
            raise Unsupported("media is not routed; send a prompt of token ids alone")
        await self._running.wait()
        choice = await self._client.generate(
            [int(each) for each in prompt_ids],
            self._sampling(sampling_params, len(prompt_ids)),
            trajectory=trajectory or request_id,
            priority=priority,
            on_interrupt="continue",
        )
        if choice.fault:
            raise Exhausted(
                f"turn {request_id} ended after {len(choice.token_ids)} tokens: {choice.fault}"
            )
        return _output(choice, with_log_probs=bool(sampling_params.get("logprobs")))

    async def abort_all_requests(self, **_: Any) -> None:
        """Running turns return their tokens so far; new turns wait for `resume_generation`,
        whatever further arguments verl passes."""
        self._running.clear()
        self._client.abort()

    async def resume_generation(self) -> None:
        self._running.set()

    async def wake_up(self, *_: Any, **__: Any) -> None:
        """The gateway owns its engines' memory and caches: nothing to do here, nor below."""

    sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = wake_up

    async def close(self) -> None:
        await self._client.close()

    def _sampling(self, given: Mapping[str, Any], prompt_tokens: int) -> dict[str, Any]:
        """verl's and SGLang's names for the bound, within verl's lengths together: a later prompt
        holds earlier responses. Whether log-probabilities are sent back is not the gateway's
        matter."""
        sampling = {name: value for name, value in given.items() if name != "logprobs"}
        bound = sampling.pop("max_new_tokens", None) or self._response_length
        bound = min(sampling.get("max_tokens", bound), self._length - prompt_tokens)
        return sampling | {"max_tokens": max(1, bound)}


def _output(choice: Choice, *, with_log_probs: bool) -> TokenOutput:
    versions = [span.version for span in choice.spans]
    steps: dict[str, Any] = {}
    if versions:
        steps = {
            "global_steps": versions[-1],
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
        }
    aborted = choice.finish_reason is FinishReason.ABORT
    return TokenOutput(
        token_ids=list(choice.token_ids),
        log_probs=list(choice.log_probs) if with_log_probs else None,
        stop_reason="aborted" if aborted else "completed",
        num_preempted=sum(left.engine != right.engine for left, right in pairwise(choice.spans)),
        extra_fields=steps,
    )


def started(gateway: str, job: str, *, name: str | None = None, **options: Any) -> Any:
    """The handle of a new actor; Ray must be initialised. verl's balancer takes it under any id:
    `servers={"gateway": handle}`."""
    import ray

    actor = ray.remote(VerlServer).options(
        name=name, num_cpus=0, max_concurrency=_CALLS_AT_ONCE, max_restarts=-1
    )
    return actor.remote(gateway, job, **options)
