"""Hardware that the engines of a run start on: here cores of a CPU; gpu_hardware.py has a GPU.

Engines' flags, models, loads and places differ between the two. A run's measurements and their
order do not.
"""

from abc import ABC, abstractmethod
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from benchmarks.testbed.excerpt import TokenScale
from benchmarks.testbed.prerequisites import check_machine
from benchmarks.testbed.processes import OPERATORS_GROUPS
from benchmarks.testbed.production_model import SMALL, STEP_TOKENS, ModelShape
from coserve.guest import isolation
from coserve.guest.isolation import Isolation
from coserve.vllm.launch import GpuOwner, GpuShare
from examples.grpo.policy_shape import PolicyShape
from harvester.contracts.isolation import PREEMPTING, IsolationBackend


class HardwareKind(StrEnum):
    CPU = "cpu"
    GPU = "gpu"
    REHEARSAL = "gpu-rehearsal"
    """A GPU's form of the run with small models on CPU engines: for a machine without one."""


def add_hardware_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--hardware",
        type=HardwareKind,
        choices=tuple(HardwareKind),
        help="of the engines; else what is there",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLoad:
    """Turns without end on a guest."""

    concurrency: int = 16
    """The guest's batch."""
    places: int = 24
    """Turns that a gateway gives an engine: those beyond its batch take the places of turns that
    end, without the way through the gateway in between. Turns of one length end together."""
    prompt_tokens: int = 96
    turn_tokens: int = 160


class Hardware(ABC):
    """Its class attributes are those of the CPU form."""

    kind: ClassVar[HardwareKind]
    shape: ModelShape = SMALL
    """Shape of production."""
    step_tokens: int = STEP_TOKENS
    """Production's budget for one step."""
    production_requests: int = 32
    """Requests that production serves at once."""
    rollouts = RolloutLoad()
    clients: int = 8
    """Clients of a closed loop that fills one engine."""
    shares_core: bool = True
    """Whether production and guest alternate on a core; CPU time then equals use of the core."""
    starts_in_turn: bool = False
    """Production has to answer before the guest starts, and the guest before the agent does."""
    scales: tuple[TokenScale, ...]
    """Scales of the trace's token counts, from the largest: tried until requests are enough."""
    pulse_sizes: TokenScale
    """Token scale of a run that measures the cost of a request."""

    @abstractmethod
    def check(self) -> None:
        """Raises ConfigError or Unsupported where the machine lacks something, with what to do."""

    @abstractmethod
    def isolation(self) -> Isolation: ...

    @abstractmethod
    def isolate(self, pids: Sequence[int], *, first: int, backend: Isolation) -> None:
        """Put a guest's processes under `backend`, whichever they were under."""

    @abstractmethod
    def write_policy(self, directory: Path, shape: PolicyShape) -> None:
        """The guest's model, to be started with dummy weights."""

    def policy_context(self, shape: PolicyShape) -> int:
        """Tokens of a guest's longest request."""
        return shape.context_tokens

    def core(self, number: int) -> int | None:
        """CPU core to pin a process to; None leaves it to the kernel."""
        return number

    def production(self) -> GpuOwner | None:
        """None: a CPU engine; so for the two below."""
        return None

    def guest(self) -> GpuShare | None:
        return None

    def stock(self, engines: int) -> GpuOwner | None:  # noqa: ARG002 - of a GPU's form
        """Each of several engines side by side."""
        return None

    def engine_arguments(self) -> tuple[str, ...]:
        """Flags of vLLM for any engine."""
        return ()

    def guest_arguments(self) -> tuple[str, ...]:
        # Most contexts are shorter than the 128 tokens of a CPU engine's own block: no prefix
        # would ever be found again.
        return ("--block-size", "32")

    def engine_environment(self, cache: Path) -> dict[str, str]:  # noqa: ARG002 - as above
        """`cache` is kept between runs."""
        return {}

    def isolation_at_start(self, backend: Isolation) -> Isolation | None:  # noqa: ARG002 - as above
        """Isolation that is a matter of how the guest's processes start."""
        return None


class CpuHardware(Hardware):
    """Both engines on one core, the guest in the isolation backend's class."""

    kind = HardwareKind.CPU
    # From the demo's requests to ever smaller ones.
    scales = tuple(
        TokenScale(
            input_scale=scale, output_scale=scale, input_max=1024, output_min=2, output_max=128
        )
        for scale in (0.25, 0.18, 0.125, 0.09, 0.0625, 0.045, 0.03)
    )
    pulse_sizes = scales[4]

    def check(self) -> None:
        check_machine()

    def isolation(self) -> Isolation:
        return isolation.choose()

    def isolate(self, pids: Sequence[int], *, first: int, backend: Isolation) -> None:
        for pid in pids:
            OPERATORS_GROUPS.leave(pid)
            isolation.lift_from_process(pid)
            if backend.backend is IsolationBackend.IDLE_GROUP:
                OPERATORS_GROUPS.enter(pid, guest=first)
            else:
                isolation.apply_to_process(backend, pid, guest=first)

    def isolation_at_start(self, backend: Isolation) -> Isolation | None:
        # The guest looks by itself whether it holds, as one that `rosemux guest` starts.
        return backend if backend.backend in PREEMPTING else None

    def write_policy(self, directory: Path, shape: PolicyShape) -> None:
        # Imports torch, which takes seconds, and most of a run's processes do without.
        from examples.grpo.model import write_checkpoint

        write_checkpoint(directory, shape)
