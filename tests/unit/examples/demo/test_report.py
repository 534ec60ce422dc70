import re
from pathlib import Path

import pytest

from examples.demo.records import Record
from examples.demo.report import report_html, write_report
from examples.demo.result import DemoFacts, result_of
from examples.demo.schema import Result


@pytest.fixture(scope="module")
def page(whole_run: tuple[Record, ...], whole_result: Result) -> str:
    return report_html(whole_result, whole_run)


def test_the_page_loads_nothing_and_stays_small(page: str) -> None:
    assert page.count("<svg ") == 5
    assert not re.search(r'(?:src|href)="(?!#)|@import|url\((?!#)', page)
    assert "<script" not in page
    assert len(page) < 3_000_000


def test_every_check_is_on_the_page_with_its_verdict(page: str, whole_result: Result) -> None:
    for check in whole_result.checks:
        assert f"<th>{check.name}</th>" in page
    assert page.count("✗ not ok") == sum(not check.ok for check in whole_result.checks)
    assert page.count("✓ ok") == sum(check.ok for check in whole_result.checks)


def test_names_from_outside_are_text(page: str) -> None:
    assert "a &lt;trace&gt;.csv" in page
    assert "a <trace>" not in page


def test_every_figure_has_a_text_description(page: str) -> None:
    assert len(re.findall(r'<svg role="img" aria-label="[^"]+"', page)) == 5


def test_a_run_cut_short_still_makes_a_page(tmp_path: Path, facts: DemoFacts) -> None:
    path = tmp_path / "report.html"
    write_report(path, result_of([], facts), [])
    assert "nothing can be compared" in path.read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
