"""Cost of a sleeping guest and speed of its waking, alone and beside production.

The weights of an 8B model in CUDA virtual memory, once in a piece for each tensor, as vLLM has
them, and once in even pieces. Each round does the same alone (production's process idles) and
beside production's decode steps: asleep, mapped, copied back, unmapped, awake; even pieces
also with a pause after each. Contents are verified after every waking.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu_slot.decode_model import LLAMA_8B, DecodeShape
from benchmarks.gpu_slot.device import Device, device_of
from benchmarks.gpu_slot.results import Put
from benchmarks.gpu_slot.sleeping.cuda_virtual_memory import cuda_virtual_memory
from benchmarks.gpu_slot.sleeping.figures import (
    MeasuredPass,
    pass_figures,
    production_figures,
    step_figures,
    steps_during,
)
from benchmarks.gpu_slot.sleeping.pieces import Pass, SleepingPieces, even_sizes, tensor_sizes
from benchmarks.gpu_slot.sleeping.production import (
    BATCH,
    CONTEXT_TOKENS,
    ProductionProcess,
    production,
)
from benchmarks.gpu_slot.sleeping.virtual_memory import CpuVirtualMemory, VirtualMemory
from harvester.contracts.clock import Clock, MonotonicClock, monotonic_ns
from harvester.contracts.errors import Corrupt

Layouts = dict[str, SleepingPieces]

_TINY = DecodeShape(
    layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=704, vocabulary=1024
)
_PIECE_BYTES = 64 << 20
_TINY_PIECE_BYTES = 256 << 10
_EVEN = "even_pieces"
_ROUNDS_MAX = 8
_TINY_ROUNDS = 2
_BUDGET_S = 46.0
"""Time limit from the part's beginning, in s; a round that would last longer is not begun."""
_ALONE_S = 1.0
_GAP_S = 0.05
"""Gap between passes, in s: a step that one has delayed is over before the next."""

_PLAIN: tuple[tuple[str, Callable[[SleepingPieces], Pass]], ...] = (
    ("asleep", SleepingPieces.fall_asleep),
    ("mapped", SleepingPieces.remap),
    ("copied_back", SleepingPieces.write_back),
    ("unmapped", SleepingPieces.discard),
    ("awake", SleepingPieces.wake),
)
_PACED: tuple[tuple[str, Callable[[SleepingPieces], Pass]], ...] = (
    ("asleep_paced", lambda pieces: pieces.fall_asleep(pause_ratio=1.0)),
    ("awake_paced", lambda pieces: pieces.wake(pause_ratio=1.0)),
)


def measured(kind: str, *, tiny: bool, put: Put) -> None:
    clock = MonotonicClock()
    began_s = clock.now()
    with production(kind, tiny=tiny) as beside:
        device = device_of(kind)
        with device.current():
            memory: VirtualMemory = cuda_virtual_memory() if kind == "cuda" else CpuVirtualMemory()
            put("memory", {"for_rdma": getattr(memory, "rdma", None)})
            layouts = _layouts(device, memory, kind=kind, tiny=tiny, put=put)
            beside.wait_until_ready()
            put("freed", _freed(device, layouts))
            found = _spoiled_piece_found(layouts[_EVEN])
            put("spoiled_piece_found", found)
            if not found:
                raise Corrupt("verifying finds no spoiled piece, so that it proves nothing")
            put("seconds_before_rounds", clock.now() - began_s)
            _rounds(
                _Rounds(layouts, beside, alone_s=0.02 if tiny else _ALONE_S),
                clock,
                until_s=began_s + _BUDGET_S,
                rounds_max=_TINY_ROUNDS if tiny else _ROUNDS_MAX,
                put=put,
            )
            layouts.clear()
            memory.close()


def _layouts(device: Device, memory: VirtualMemory, *, kind: str, tiny: bool, put: Put) -> Layouts:
    granularity_bytes = memory.granularity_bytes
    tensors = tensor_sizes(_TINY if tiny else LLAMA_8B, granularity_bytes=granularity_bytes)
    even = even_sizes(
        sum(tensors),
        piece_bytes=_TINY_PIECE_BYTES if tiny else _PIECE_BYTES,
        granularity_bytes=granularity_bytes,
    )
    if kind == "cuda":
        # A virtual machine's memory may grow only as it is touched, and pinning does not wait.
        torch.empty(sum(tensors), dtype=torch.uint8).fill_(1)
    began_ns = monotonic_ns()
    # One layout sleeps at a time, so both have the same host memory.
    host = torch.empty(sum(tensors), dtype=torch.uint8, pin_memory=kind == "cuda")
    put(
        "setting",
        {
            "device": device.name,
            "total_bytes": sum(tensors),
            "granularity_bytes": granularity_bytes,
            "pieces": {"tensors": len(tensors), _EVEN: len(even)},
            "largest_piece_bytes": {"tensors": max(tensors), _EVEN: max(even)},
            "pinned": host.is_pinned() if kind == "cuda" else False,
            "pinning_s": (monotonic_ns() - began_ns) * 1e-9,
            "production": {"batch": BATCH, "context_tokens": CONTEXT_TOKENS},
        },
    )
    sizes = {"tensors": tensors, _EVEN: even}
    return {name: SleepingPieces(memory, device.torch_device, sizes[name], host) for name in sizes}


def _freed(device: Device, layouts: Layouts) -> dict[str, Any]:
    """Device memory that falling asleep frees, against the bytes of the pieces."""
    found: dict[str, Any] = {}
    for name, pieces in layouts.items():
        awake_bytes = device.free_bytes()
        pieces.fall_asleep()
        freed_bytes = device.free_bytes() - awake_bytes
        pieces.wake()
        found[name] = {"pieces_bytes": pieces.size_bytes, "freed_bytes": freed_bytes}
    return found


def _spoiled_piece_found(pieces: SleepingPieces) -> bool:
    """A control of the verifying: one bit of the first piece changes while it sleeps."""
    pieces.fall_asleep()
    pieces.host[0] ^= 1
    pieces.wake()
    found = pieces.damaged() == [0]
    pieces.host[0] ^= 1
    pieces.write_back()
    return found


@dataclass(slots=True)
class _Rounds:
    layouts: Layouts
    beside: ProductionProcess
    alone_s: float
    alone: dict[str, dict[str, list[Pass]]] = field(default_factory=dict)
    trials: dict[str, dict[str, list[MeasuredPass]]] = field(default_factory=dict)
    verified: int = 0
    """Passages after which all pieces held their original contents."""

    def round(self, number: int, put: Put) -> None:
        order = list(self.layouts)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            pieces = self.layouts[name]
            sides = [self._alone, self._beside]
            for side in sides if number % 2 == 0 else reversed(sides):
                side(name, pieces)
                self._put(put)

    def _alone(self, name: str, pieces: SleepingPieces) -> None:
        for action, act in _actions(name):
            self.alone.setdefault(name, {}).setdefault(action, []).append(act(pieces))
            self._verify(name, action, pieces)

    def _beside(self, name: str, pieces: SleepingPieces) -> None:
        taken: list[tuple[str, Pass]] = []
        self.beside.run()
        began_ns = monotonic_ns()
        time.sleep(self.alone_s)
        ended_ns = monotonic_ns()
        for action, act in _actions(name):
            time.sleep(_GAP_S)
            taken.append((action, act(pieces)))
        time.sleep(_GAP_S)
        steps = self.beside.stop()
        # Once for all passes of the round: verifying would take the GPU from production.
        self._verify(name, taken[-1][0], pieces)
        alone_ms = steps_during(steps, began_ns, ended_ns)
        for action, one in taken:
            trial = MeasuredPass(one, steps_during(steps, one.began_ns, one.ended_ns), alone_ms)
            self.trials.setdefault(name, {}).setdefault(action, []).append(trial)

    def _verify(self, name: str, action: str, pieces: SleepingPieces) -> None:
        """Raises Corrupt where a piece that was copied back does not hold its contents."""
        if action not in _HOLD_CONTENTS:
            return
        wrong = pieces.damaged()
        if wrong:
            raise Corrupt(f"{name}, {action}: {len(wrong)} pieces differ, the first {wrong[0]}")
        self.verified += 1

    def _put(self, put: Put) -> None:
        put("verified_passes", self.verified)
        put(
            "alone",
            {
                name: {action: pass_figures(passes) for action, passes in actions.items()}
                for name, actions in self.alone.items()
            },
        )
        put(
            "beside_production",
            {
                name: {
                    action: {
                        **pass_figures([one.taken for one in trials]),
                        "production": production_figures(trials),
                    }
                    for action, trials in actions.items()
                }
                for name, actions in self.trials.items()
            },
        )
        # Passes of one round share its steps alone.
        firsts = [trials["asleep"] for trials in self.trials.values()]
        put(
            "production_alone_step_ms",
            step_figures([ms for trials in firsts for one in trials for ms in one.alone_ms]),
        )


_HOLD_CONTENTS = frozenset({"awake", "awake_paced", "copied_back"})


def _actions(name: str) -> tuple[tuple[str, Callable[[SleepingPieces], Pass]], ...]:
    """Actions in an order that leaves the pieces awake and filled."""
    return _PLAIN + _PACED if name == _EVEN else _PLAIN


def _rounds(rounds: _Rounds, clock: Clock, *, until_s: float, rounds_max: int, put: Put) -> None:
    longest_s = 0.0
    for number in range(rounds_max):
        began_s = clock.now()
        if began_s + longest_s > until_s:
            break
        rounds.round(number, put)
        longest_s = max(longest_s, clock.now() - began_s)
        put("rounds", number + 1)
