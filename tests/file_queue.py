"""The files of tests as pytest-xdist shares them out: long ones first, those of one slot together.

A long file that is begun last leaves the other process without work. The two engines of
`engine_slot` take a minute of a core to start, and each process that has a file with them starts
its own.
"""

import pytest

SLOT = "engine_slot"
SLOT_FILES = frozenset(
    {
        "contract/scheduler/test_engine_contract.py",
        "integration/test_guest_engine.py",
        "integration/test_guest_memory.py",
        "integration/test_guest_weights.py",
        "integration/test_lifecycle_engine.py",
        "integration/test_production_engine.py",
        "integration/test_production_past_the_middleware.py",
        "integration/test_proxied_engine.py",
    }
)
_ENGINES = (
    SLOT,
    "integration/test_weightsync_parallel.py",
    "integration/test_shipped_path.py",
    "integration/test_production_shapes.py",
    "integration/test_unlike_pairs.py",
    "integration/test_continuation_engine.py",
    "integration/test_replaced_engine.py",
    "integration/test_gateway_text_engine.py",
    "integration/test_guest_stopped.py",
    "integration/test_weightsync_vllm.py",
    "integration/test_weightsync_adapter_ranks.py",
    "integration/test_slime_hook.py",
    "integration/test_weightsync_foreign.py",
    "integration/test_weightsync_derived.py",
    "integration/test_weightsync_adapter.py",
)
_OTHERS = (
    "contract/weightsync/test_sources.py",
    "integration/test_gpu_slot_rehearsal.py",
    "integration/test_demo_learning.py",
    "sim/rollmux/test_events_tell_everything.py",
    "integration/test_several_machines.py",
    "unit/benchmarks/testbed/test_round_ratios.py",
    "integration/test_lock_install.py",
    "unit/coserve/law/test_phantom.py",
    "integration/test_agent_process.py",
    # Its six engines start at once: not beside those of the rehearsal.
    "integration/test_gpu_slot_known_device.py",
    "gpu/test_weights.py",
    "integration/test_gateway_pressure.py",
    "contract/weightsync/test_partial_pulls.py",
    "integration/test_demo_trainer.py",
    "sim/rollmux/test_harvest.py",
    "integration/test_weight_faults.py",
    "integration/test_phase_processes.py",
    "integration/test_planned_processes.py",
    "integration/test_weight_transport.py",
    "unit/benchmarks/test_weightsync_memory.py",
    "integration/test_phase_ray.py",
    "unit/benchmarks/test_weightsync_tensors.py",
)
LONGEST = (*_ENGINES, *_OTHERS)
"""From the longest; files that are not named follow as they were found. The first ones without
engines compile loops that later files find in the cache."""


def unit_of(nodeid: str) -> str:
    """The tests of one unit run one after another in one process."""
    file = nodeid.split("::", 1)[0]
    return SLOT if file.removeprefix("tests/") in SLOT_FILES else file


def place_of(item: pytest.Item) -> int:
    """Sort key."""
    unit = unit_of(item.nodeid).removeprefix("tests/")
    return LONGEST.index(unit) if unit in LONGEST else len(LONGEST)
