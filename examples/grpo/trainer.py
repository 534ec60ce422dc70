"""The trainer process: `python -m examples.grpo.trainer --config FILE.json`.

    stdin    {"cmd": "step"} | {"cmd": "stop"}, one per line
    stdout   events only, one JSON line each (examples.grpo.events)
    stderr   logs

End of stdin, SIGTERM and SIGINT end it at once and cleanly; a `stop` lets the step in hand finish.
With `--warm-only` it makes and caches the warm policy, says so on stderr and exits.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

import uvloop

from examples.grpo.config import JobConfig, read_config
from examples.grpo.events import (
    Command,
    CommandRefused,
    Emits,
    Event,
    Failed,
    Ready,
    StopCommand,
    Stopped,
    decoded_command,
    encoded_event,
)
from examples.grpo.master_weights import MasterWeights, policy_of
from examples.grpo.rollout import RolloutCollector
from examples.grpo.training_run import Collects, TrainingRun
from examples.grpo.warm_up import WarmStart, use_one_thread, warm_start
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import RoseMuxError
from scheduler import AsyncRolloutClient

_LOG = logging.getLogger(__name__)
_LINE_MAX_BYTES = 4096


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="examples.grpo.trainer")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--warm-only", action="store_true")
    given = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    use_one_thread()
    try:
        config = read_config(given.config)
        warm = warm_start(config.warm_up, config.cache_dir)
        _LOG.info("warm policy after %.1f s (cached: %s)", warm.seconds, warm.from_cache)
        if not given.warm_only:
            uvloop.run(_serve_commands(config, warm))
    except KeyboardInterrupt:
        return 130
    except RoseMuxError as error:
        _emit(Failed(reason=str(error)))
        _LOG.error("%s", error)
        return 1
    return 0


async def _serve_commands(config: JobConfig, warm: WarmStart) -> None:
    """Runs the job until it ends by itself, or a signal or the end of stdin cuts it short."""
    loop = asyncio.get_running_loop()
    job = asyncio.ensure_future(_job(config, warm))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, job.cancel)
    with suppress(asyncio.CancelledError):
        await job


async def _job(config: JobConfig, warm: WarmStart) -> None:
    weights = MasterWeights(policy_of(config.warm_up.policy, warm.state), config.adam)
    async with opened_run(config, weights) as run:
        _emit(await _ready(run, config, warm, weights))
        async with aclosing(_stdin_lines()) as lines:
            await serve(run, lines, _emit)


@asynccontextmanager
async def opened_run(
    config: JobConfig,
    weights: MasterWeights,
    *,
    around_collect: Callable[[Collects], Collects] = lambda collector: collector,
    on_progress: Callable[[float], None] = lambda _ratio: None,
) -> AsyncGenerator[TrainingRun, None]:
    """The job's run, with its gateway and its store; `around_collect` may wrap its rollouts."""
    from weightsync import Publisher
    from weightsync.encoding.codec import warm_up

    # Warms up before anything is measured, since it shares the core.
    warm_up()
    clock = MonotonicClock()
    # The demo measures the gateway, so there is no fallback.
    async with AsyncRolloutClient(config.gateway_url, config.job, fallback=False) as gateway:
        collector = RolloutCollector(
            gateway,
            job=config.job,
            seed=config.seed,
            samples_per_prompt=config.samples_per_prompt,
            clock=clock,
            on_progress=on_progress,
        )
        store, work = config.weight_root / config.store, Publisher.Work(threads=1)
        with Publisher(store, work=work) as publisher:
            yield TrainingRun(
                weights,
                tasks=config.warm_up.tasks,
                seed=config.seed,
                store=config.store,
                grpo=config.grpo,
                publisher=publisher,
                gateway=gateway,
                collector=around_collect(collector),
                clock=clock,
            )


async def _ready(
    run: TrainingRun, config: JobConfig, warm: WarmStart, weights: MasterWeights
) -> Ready:
    first = await run.publish()
    return Ready(
        job=config.job,
        version=first.receipt.version,
        parameters=sum(parameter.numel() for parameter in weights.policy.parameters()),
        warm_up_s=warm.seconds,
        warm_from_cache=warm.from_cache,
        publish_s=first.publish_s,
        switch_s=first.switch_s,
        bytes_sent=first.receipt.bytes_sent,
        bytes_dense=first.receipt.bytes_dense,
    )


async def serve(run: TrainingRun, lines: AsyncIterator[bytes], emit: Emits) -> None:
    """Obeys commands in order until `stop`, or until `lines` end, which cuts a step short."""
    commands: asyncio.Queue[Command | CommandRefused] = asyncio.Queue()
    obeying = asyncio.ensure_future(_obey(run, commands, emit))
    reading = asyncio.ensure_future(_read(lines, commands))
    try:
        await asyncio.wait({obeying, reading}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        reading.cancel()
        if not obeying.done():
            obeying.cancel()
        results = await asyncio.gather(obeying, reading, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    emit(Stopped(steps=run.steps))


async def _read(
    lines: AsyncIterator[bytes], commands: asyncio.Queue[Command | CommandRefused]
) -> None:
    async for line in lines:
        if line.strip():
            commands.put_nowait(decoded_command(line))


async def _obey(
    run: TrainingRun, commands: asyncio.Queue[Command | CommandRefused], emit: Emits
) -> None:
    while True:
        command = await commands.get()
        if isinstance(command, StopCommand):
            return
        emit(command if isinstance(command, CommandRefused) else await run.step(command.prompts))


async def _stdin_lines() -> AsyncGenerator[bytes, None]:
    reader = asyncio.StreamReader(limit=_LINE_MAX_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        while line := await reader.readline():
            yield line
    finally:
        transport.close()


def _emit(event: Event) -> None:
    sys.stdout.buffer.write(encoded_event(event))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
