"""Loops are compiled ahead of any change, and import where nothing can be written."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from weightsync.elements.compiled import compiled

ROOT = Path(__file__).parents[4]
PACKAGES = ("weightsync", "harvester")

_PUBLISH_AND_PULL = """
import gc, sys, tempfile
from pathlib import Path
import torch
from numba.core.dispatcher import Dispatcher
from weightsync.encoding.codec import WIDTHS_BYTES, warm_up
from weightsync.publish.settings import VersionSettings
from weightsync.publisher import Publisher
from weightsync.receiver import Receiver
from weightsync.receive.target import TensorTarget

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64,
          "f8": torch.float8_e4m3fn, "i8": torch.int8, "i64": torch.int64}
SHARES = (0.0, 0.01, 0.3, 0.9, 0.001, 0.5)

def state(at):
    draw = torch.Generator().manual_seed(at)
    made = {}
    for name, dtype in DTYPES.items():
        for elements in (9, 700, 60_000):
            bits = torch.zeros(elements).to(dtype)
            low = bits.view(torch.uint8)[:: bits.element_size()]
            low[torch.rand(elements, generator=draw) < SHARES[at]] ^= 1
            made[f"{name}.{elements}"] = bits
    return made

def compiled_forms():
    # Machine code forms of all loops so far, one for each combination of element types.
    loops = [each for each in gc.get_objects() if issubclass(type(each), Dispatcher)]
    return sum(len(loop.signatures) for loop in loops)

warm_up(WIDTHS_BYTES)
before = compiled_forms()
assert before > 0
root = Path(tempfile.mkdtemp(dir=sys.argv[1]))
with Publisher(root / "store", versions=VersionSettings(anchor_every=3)) as publisher:
    for at in range(len(SHARES)):
        publisher.publish(state(at))
for held in (None, 1, 4, 5):
    tensors = {k: v.clone() for k, v in state((held or 1) - 1).items()}
    receiver = Receiver(root / "store")
    receiver.sync(held, 6, TensorTarget(tensors))
    receiver.close()
print("compiled later:", compiled_forms() - before)
"""


def _run(code: str, *arguments: str, **environment: str) -> str:
    made = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd="/",
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


def test_no_change_of_any_element_type_compiles_anything_after_the_warm_up(tmp_path: Path) -> None:
    said = _run(_PUBLISH_AND_PULL, str(tmp_path), PYTHONPATH=str(ROOT), HOME=os.environ["HOME"])
    assert said.split() == ["compiled", "later:", "0"]


def test_a_loop_has_one_form_for_constant_numbers_and_others() -> None:
    @compiled
    def inner(number: int) -> int:
        return number + 1

    @compiled
    def outer(number: int) -> int:
        return inner(3) + inner(number)

    assert outer(4) == 9
    assert len(cast(Any, inner).signatures) == 1


def test_an_edited_callee_in_another_file_is_compiled_into_its_caller_again(tmp_path: Path) -> None:
    rules, loop = tmp_path / "rules", "from weightsync.elements.compiled import compiled\n"
    rules.mkdir()
    outer = "from rules.inner import inner\n@compiled\ndef outer(x):\n    return 10 * inner(x)\n"
    (rules / "outer.py").write_text(loop + outer)
    code = "from rules.outer import outer; print(outer(1), sum(outer.stats.cache_hits.values()))"
    # Python's own cache tells no two sources of one second and size apart.
    environment = {
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
        "HOME": os.environ["HOME"],
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def says(added: int) -> list[str]:
        inner = f"@compiled\ndef inner(x):\n    return x + {added}\n"
        (rules / "inner.py").write_text(loop + inner)
        return _run(code, **environment).split()

    assert says(1) == ["20", "0"]
    assert says(1) == ["20", "1"]
    assert says(2) == ["30", "0"]


@pytest.fixture
def read_only_packages(tmp_path: Path) -> Path:
    """Copies of the packages without a writable cache directory: a file stands in its place."""
    for name in PACKAGES:
        for source in (ROOT / name).rglob("*.py"):
            copy = tmp_path / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
            (copy.parent / "__pycache__").touch()
    return tmp_path


def test_weightsync_works_in_a_container_without_a_writable_place(read_only_packages: Path) -> None:
    code = """
import numpy as np
from weightsync.elements import kernels
import weightsync.publisher, weightsync.receiver
print(kernels.count_changes(np.zeros(3, np.uint16), np.array([0, 1, 1], np.uint16)))
"""
    said = _run(code, PYTHONPATH=str(read_only_packages), HOME="/dev/null")
    assert said.split() == ["2"]


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("save", "OSError(28, 'No space left on device')"),
        # Files of a release whose classes had other names.
        ("load", "AttributeError('no class Room')"),
    ],
)
def test_a_cache_that_cannot_be_used_costs_time_and_no_version(
    tmp_path: Path, call: str, fault: str
) -> None:
    code = """
import logging, sys
import numpy as np
from numba.core.caching import IndexDataCacheFile
logging.basicConfig(stream=sys.stdout)
def unusable(self, *_):
    raise FAULT
IndexDataCacheFile.CALL = unusable
from weightsync.encoding import codec
from weightsync.elements.compiled import forget_cache
saved = []
codec._warm_up, real = lambda width: (saved.append(width), _fails_once())[0], codec._warm_up
def _fails_once():
    if len(saved) == 1:
        from weightsync.elements import kernels
        kernels.count_changes(np.zeros(3, np.uint16), np.zeros(3, np.uint16))
codec.warm_up((2,))
print(len(saved))
"""
    code = code.replace("FAULT", fault).replace("CALL", call)
    said = _run(code, PYTHONPATH=str(ROOT), NUMBA_CACHE_DIR=str(tmp_path))
    *warned, saves = said.splitlines()
    assert (len(warned), saves) == (1, "2")
    assert "set NUMBA_CACHE_DIR" in warned[0]
