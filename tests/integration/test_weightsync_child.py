"""Tests with engines leave nothing behind on the machine."""

from pathlib import Path

from tests.integration.forked_program import output_of
from tests.integration.weightsync_child import own_temporaries

_RANKS = """
import os, tempfile
from pathlib import Path
met = Path(tempfile.gettempdir(), f"vllm_dist_{os.getpid():032x}")
met.touch()
segment = Path("/dev/shm", f"{met.name}-tp:0-[0-1]-cpushm_0")
segment.touch()
print(segment)
"""


def test_shared_memory_of_killed_ranks_is_removed(tmp_path: Path) -> None:
    with own_temporaries() as temporaries:
        environment = {"TMPDIR": str(temporaries)}
        said = output_of("-c", _RANKS, log=tmp_path / "log", env=environment)
        segment = Path(said.split("\n")[-2])
        assert segment.exists()
    assert not segment.exists()
    assert not temporaries.exists()
