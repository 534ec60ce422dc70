"""Documents name what exists: files, commands, make targets, folders, decisions, versions."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from coserve.vllm.capabilities import SUPPORTED
from harvester.cli.root import COMMANDS, load

TableAfter = Callable[[str, str], list[list[str]]]

MOST_DECISIONS = 50
IMAGE_BYTES_MAX = 300_000


FOLDERS = ("docs", "examples", "benchmarks", "deploy", "tests")


def documents(repository: Path) -> list[Path]:
    inner = [page for folder in FOLDERS for page in sorted((repository / folder).rglob("*.md"))]
    return [*sorted(repository.glob("*.md")), *inner]


def anchors(page: Path) -> set[str]:
    """Headings as GitHub names them, and the names that a page gives itself."""
    text = re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text())
    headings = (re.sub(r"[^\w\- ]", "", found) for found in re.findall(r"(?m)^#+ (.*)$", text))
    named = re.findall(r'<a id="([\w-]+)">', text)
    return {heading.lower().replace(" ", "-") for heading in headings} | {*named}


def test_every_link_leads_to_a_file_and_a_heading(repository: Path) -> None:
    for page in documents(repository):
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            if target.startswith("https://"):
                continue
            found = page.parent / target if target else page
            assert found.exists(), f"{page}: {target}"
            assert not anchor or anchor in anchors(found), f"{page}: {target}#{anchor}"


def test_every_image_on_a_page_is_there_small_and_described(repository: Path) -> None:
    shown = [
        (page.parent / target, text)
        for page in documents(repository)
        for text, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text())
    ]
    for image, text in shown:
        assert image.is_file(), image
        assert image.stat().st_size < IMAGE_BYTES_MAX, image
        assert len(text) > 20, f"{image}: what does it show?"


def test_every_command_and_target_that_is_named_exists(repository: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (repository / "Makefile").read_text(), re.MULTILINE))
    for page in documents(repository):
        text = page.read_text()
        assert set(re.findall(r"`make ([a-z]+)", text)) <= targets, page.name
        named = set(re.findall(r"`(?:\S*/)?rosemux ([a-z][a-z-]*)", text))
        assert named <= COMMANDS.keys(), page.name


def flags_shown(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Words and flags of each `rosemux` command in a page, in a block or in a line."""
    for line in re.findall(r"(?<![\w-])rosemux ([a-z][^\n`|;&#]*)", text.replace("\\\n", " ")):
        words = [word.strip("[]'\"(),.") for word in line.split()]
        yield words, [word.partition("=")[0] for word in words if re.match("--[a-z]", word)]


def test_every_flag_of_a_command_that_is_shown_exists(repository: Path) -> None:
    checked = 0
    for page in documents(repository):
        for words, flags in flags_shown(page.read_text()):
            if not flags or words[0] not in COMMANDS:
                continue
            command = load(words[0], COMMANDS[words[0]])
            for word in words[1:]:
                command = getattr(command, "commands", {}).get(word, command)
            known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
            assert {*flags} <= known | {"--help"}, f"{page}: rosemux {' '.join(words)}"
            checked += len(flags)
    assert checked > 100, "the commands on the pages were not found"


def test_forms_of_commands_are_read() -> None:
    page = "Run `rosemux drain --slot s`.\n```\nrosemux phases serve --socket=F \\\n"
    page += "  [--nodes F] # --no\n"
    assert [flags for _, flags in flags_shown(page)] == [["--slot"], ["--socket", "--nodes"]]


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


def test_a_decision_has_its_number_a_status_and_a_line_in_the_index(repository: Path) -> None:
    folder = repository / "docs/decisions"
    index = (folder / "README.md").read_text()
    pages = sorted(folder.glob("[0-9]*.md"))
    numbers = {int(page.name[:4]) for page in pages}

    assert len(pages) <= MOST_DECISIONS
    for page in pages:
        title, gap, status, *_ = page.read_text().splitlines()
        number = int(page.name[:4])
        assert title.startswith(f"# {number}. "), page.name
        assert gap == "", page.name
        found = re.fullmatch(r"Status: (?:accepted|superseded by \[(\d+)\]\(\S+\.md\))", status)
        assert found, f"{page.name}: {status}"
        assert found[1] is None or int(found[1]) in numbers - {number}, page.name
        entry = f"- **{number}** [{title.removeprefix(f'# {number}. ')}]({page.name}): "
        assert index.count(entry) == 1, page.name
    assert len(re.findall(r"^- \*\*\d+\*\* ", index, re.MULTILINE)) == len(pages)


def test_a_folded_decision_leads_to_the_page_that_holds_it(
    repository: Path, table_after: TableAfter
) -> None:
    folder = repository / "docs/decisions"
    numbers = {int(page.name[:4]) for page in folder.glob("[0-9]*.md")}
    rows = table_after("docs/decisions/README.md", "## Folded numbers")

    folded = [int(number) for number, _page in rows]
    assert len(set(folded)) == len(folded)
    assert numbers.isdisjoint(folded)
    for _number, page in rows:
        target = re.fullmatch(r"\[(\d+)\]\((\d{4})-\S+\)", page)
        assert target, page
        assert int(target[1]) == int(target[2]), page
        assert int(target[1]) in numbers, page


def test_each_number_of_a_decision_is_a_page_folded_or_unused(
    repository: Path, table_after: TableAfter
) -> None:
    folder = repository / "docs/decisions"
    pages = [int(page.name[:4]) for page in folder.glob("[0-9]*.md")]
    folded = [int(row[0]) for row in table_after("docs/decisions/README.md", "## Folded numbers")]
    unused = (folder / "README.md").read_text().partition("## Unused numbers")[2]

    numbers = [*pages, *folded, *map(int, re.findall(r"\d+", unused))]
    assert sorted(numbers) == list(range(1, max(pages) + 1))


def test_the_supported_range_is_the_one_that_is_documented(repository: Path) -> None:
    versions = list(SUPPORTED)
    oldest, newest = (version.removesuffix(".0") for version in (versions[0], versions[-1]))

    assert f"Stock vLLM {oldest} to {newest}" in (repository / "README.md").read_text()
    page = repository / "docs/decisions/0009-capability-table-per-version.md"
    numbers = {10: "Ten", 11: "Eleven", 12: "Twelve", 13: "Thirteen"}
    said = f"{numbers[len(versions)]} releases from {versions[0]} to {versions[-1]}"
    assert said in page.read_text()
