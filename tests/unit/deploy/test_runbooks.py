"""Every alert has a runbook, and every runbook an alert."""

import re
from pathlib import Path

import yaml

from deploy.check_expressions import DEPLOY, RULES

SECTIONS = ["Meaning", "Impact", "Diagnosis", "Mitigation"]


def alerts() -> dict[str, list[dict[str, dict[str, str]]]]:
    found: dict[str, list[dict[str, dict[str, str]]]] = {}
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                found.setdefault(rule["alert"], []).append(rule)
    return found


def test_every_alert_names_a_runbook_that_exists() -> None:
    for name, rules in alerts().items():
        for rule in rules:
            runbook = rule["annotations"]["runbook_url"]
            assert runbook == f"deploy/runbooks/{name}.md"
            assert (DEPLOY.parent / runbook).is_file()


def test_every_runbook_belongs_to_an_alert_and_has_the_four_sections() -> None:
    runbooks = sorted((DEPLOY / "runbooks").glob("*.md"))

    assert {path.stem for path in runbooks} == alerts().keys()
    for path in runbooks:
        lines = path.read_text().splitlines()
        assert lines[0] == f"# {path.stem}"
        assert [line[3:] for line in lines if line.startswith("## ")] == SECTIONS, path


def test_only_what_production_feels_pages() -> None:
    paging = {
        n for n, rules in alerts().items() for r in rules if r["labels"]["severity"] == "page"
    }

    assert paging == {"RoseMuxErrorBudgetBurn", "RoseMuxHarvestImpact"}


def test_each_ticket_has_its_runbook_a_first_command_and_what_to_do() -> None:
    page = Path(DEPLOY.parent, "docs/operations.md").read_text()
    rows = re.findall(
        r"(?m)^\| \[(\w+)\]\(\.\./deploy/runbooks/(\w+)\.md\)(?:, ticket)? "
        r"\| [^|]+ \| `(?:[^|`]|\\\|)+` \| [^|]+ \|$",
        page,
    )
    tickets = {
        n for n, rules in alerts().items() for r in rules if r["labels"]["severity"] == "ticket"
    }
    assert sorted(rows) == sorted((name, name) for name in tickets)


def test_documents_list_every_alert_and_no_other() -> None:
    docs = Path(DEPLOY.parent, "docs")
    named = {
        word
        for page in ("slo.md", "operations.md")
        for word in re.findall(r"\bRoseMux[A-Z]\w+", (docs / page).read_text())
    }

    assert named == alerts().keys()
