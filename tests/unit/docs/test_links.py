"""Documents name what exists: files, commands, make targets, folders, decisions, versions."""

import re
from collections.abc import Callable
from pathlib import Path

from coserve.vllm.capabilities import SUPPORTED
from harvester.cli.commands import COMMANDS

TableAfter = Callable[[str, str], list[list[str]]]


def documents(repository: Path) -> list[Path]:
    folders = (repository / "docs", repository / "examples")
    pages = [page for folder in folders for page in sorted(folder.rglob("*.md"))]
    return [repository / "README.md", repository / "CHANGELOG.md", *pages]


def test_every_link_leads_to_a_file(repository: Path) -> None:
    for page in documents(repository):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_command_and_target_that_is_named_exists(repository: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (repository / "Makefile").read_text(), re.MULTILINE))
    for page in documents(repository):
        text = page.read_text()
        assert set(re.findall(r"`make ([a-z]+)", text)) <= targets, page.name
        assert set(re.findall(r"`(?:\S*/)?rosemux ([a-z]+)", text)) <= COMMANDS.keys(), page.name


def test_the_readme_s_folder_map_is_complete(repository: Path, table_after: TableAfter) -> None:
    listed = {row[0].rstrip("/") for row in table_after("README.md", "## Folders")}
    ignored = (repository / ".gitignore").read_text().replace("/", "").split()
    found = {
        path.name
        for path in repository.iterdir()
        if path.is_dir()
        and path.name not in ignored
        and path.name[0] not in "._"
        # Left by an editable installation.
        and path.suffix != ".egg-info"
    }

    assert found <= listed


def test_the_index_lists_every_decision_by_its_title(repository: Path) -> None:
    folder = repository / "docs/decisions"
    index = (folder / "README.md").read_text()
    pages = sorted(folder.glob("0*.md"))

    expected = []
    for page in pages:
        number = int(page.name[:4])
        title = page.read_text().splitlines()[0].removeprefix(f"# {number}. ")
        expected.append(f"- [{number:04d}]({page.name}) {title}")
    assert re.findall(r"^- .*$", index, re.MULTILINE) == expected


def test_the_supported_range_is_the_one_that_is_documented(repository: Path) -> None:
    versions = list(SUPPORTED)
    oldest, newest = (version.removesuffix(".0") for version in (versions[0], versions[-1]))

    assert f"Stock vLLM {oldest} to {newest}" in (repository / "README.md").read_text()
    page = repository / "docs/decisions/0009-a-capability-table-per-version.md"
    numbers = {10: "Ten", 11: "Eleven", 12: "Twelve", 13: "Thirteen"}
    said = f"{numbers[len(versions)]} releases from {versions[0]} to {versions[-1]}"
    assert said in page.read_text()
