"""The faults part: seeded scenarios, virtual and real, and what the judge says of them."""

import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.agent.judge import INVARIANTS, ScenarioVerdict, judged
from benchmarks.agent.real_faults import STRIKES, run_real
from benchmarks.agent.virtual_scenario import run_in, was_open
from harvester.contracts.errors import ConfigError

_CHUNK = 20
_NOTES_MAX = 50


def faults(*, virtual: int, real: int, seed: int, keep: Path | None = None) -> dict[str, Any]:
    """`violations` counts each invariant's over all scenarios; `unstruck` names those in which the
    fault could not strike, which prove nothing. `keep` is a folder for the files of convicted real
    ones."""
    violations = Counter[str](dict.fromkeys(INVARIANTS, 0))
    notes: list[str] = []
    unstruck: list[str] = []
    struck = {"virtual": Counter[str](), "real": Counter[str]()}

    def add(verdict: ScenarioVerdict) -> None:
        violations.update(verdict.violations)
        notes.extend(verdict.notes)
        for note in verdict.notes:
            print(note, file=sys.stderr, flush=True)

    with TemporaryDirectory(dir="/dev/shm", prefix="rosemux-") as folder:
        for verdict, names, opened in _virtual(Path(folder), range(seed, seed + virtual)):
            add(verdict)
            struck["virtual"].update(names if opened else ())
    for number in range(real):
        name = tuple(STRIKES)[number % len(STRIKES)]
        with (
            TemporaryDirectory(prefix="rosemux-") as folder,
            TemporaryDirectory(dir="/dev/shm", prefix="rosemux-") as shared,
        ):
            root, before = Path(folder) / "node", len(notes) + len(unstruck)
            try:
                verdict = judged(run_real(name, seed + number, root, Path(shared)))
            except ConfigError as error:
                unstruck.append(str(error))
            else:
                add(verdict)
                struck["real"][name] += 1
            if keep is not None and len(notes) + len(unstruck) > before:
                shutil.copytree(root, keep / f"{number}", dirs_exist_ok=True)
        print(f"real {number + 1} of {real}: {name}", file=sys.stderr, flush=True)
    return {
        "virtual": virtual,
        "real": sum(struck["real"].values()),
        "violations": dict(violations),
        "notes": notes[:_NOTES_MAX],
        "unstruck": unstruck,
        "struck": {kind: dict(sorted(counts.items())) for kind, counts in struck.items()},
    }


def _virtual(root: Path, seeds: Iterable[int]) -> Iterable[tuple[ScenarioVerdict, list[str], bool]]:
    with ProcessPoolExecutor() as executor:
        yield from executor.map(partial(_judged_virtual, root), seeds, chunksize=_CHUNK)


def _judged_virtual(root: Path, seed: int) -> tuple[ScenarioVerdict, list[str], bool]:
    evidence, names = run_in(root, seed)
    return judged(evidence), names, was_open(evidence)


def convicted(found: dict[str, Any]) -> dict[str, Any]:
    """Reasons for which a run fails; nothing if it has none."""
    counters = {name: count for name, count in found["violations"].items() if count}
    return counters | ({"unstruck": found["unstruck"]} if found["unstruck"] else {})
