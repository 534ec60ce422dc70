"""A GPU guest asks for slack while it starts: each pass that vLLM makes to measure and warm up.

Only where one process works for the engine. With several ranks one that waits keeps the others
spinning on their GPUs, which production would feel more than the pass itself. Loading weights is
not paced: it is copies. On a CPU the guest's idle group bounds its start as everything else.

The first pass waits as the others and is not measured: vLLM compiles the model in it, for a minute
of the host's time that no later pass takes, and after a minute the next one would wait for twenty.
"""

from collections.abc import Callable
from typing import Any

from coserve.law.work_gate import WorkGate

_KIND = "start"
_PIECE_S = 0.05
"""A decode batch's pass, before one was measured."""

_paced: tuple[Any, Callable[..., Any]] | None = None


def begin(runner: Any, gate: WorkGate, synchronize: Callable[[], None]) -> None:
    """Make each dummy pass of the runner's class wait for the gate, until `end`."""
    global _paced
    if _paced is not None:
        return
    stock = runner._dummy_run
    gate.expect(_KIND, _PIECE_S)
    compiled = False

    def paced_dummy_run(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal compiled
        if not compiled:
            compiled = True
            with gate.piece(_KIND):
                pass
            return stock(self, *arguments, **options)
        with gate.piece(_KIND):
            made = stock(self, *arguments, **options)
            # A pass is over when the GPU is done with it, not when it was launched.
            synchronize()
        return made

    runner._dummy_run = paced_dummy_run
    _paced = (runner, stock)


def end() -> None:
    """The engine's loop is about to run: a dummy pass is a step's from here on."""
    global _paced
    if _paced is not None:
        runner, stock = _paced
        runner._dummy_run = stock
        _paced = None
