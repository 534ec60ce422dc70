"""The committed dashboard is the one that the code makes."""

import json
from collections import Counter

import pytest

from deploy.check_expressions import DASHBOARD

# Grafana's SDK recommends the v2 schema; Grafana 10 and 11, which vLLM's dashboards support, read
# only the classic one.
pytestmark = pytest.mark.filterwarnings("ignore:Prefer using dashboardv2:DeprecationWarning")


def test_the_committed_json_is_current() -> None:
    from deploy.grafana.dashboard import to_json

    assert DASHBOARD.read_text() == to_json(), "run: python -m deploy.grafana.dashboard"


def test_variables_are_named_as_in_the_dashboards_of_vllm() -> None:
    board = json.loads(DASHBOARD.read_text())

    names = [variable["name"] for variable in board["templating"]["list"]]

    assert names[:4] == ["datasource", "job", "model_name", "instance"]


def test_panels_have_titles_of_their_own_and_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    cells = Counter(
        (x, y)
        for panel in panels
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    )

    assert len({panel["title"] for panel in panels}) == len(panels)
    assert max(cells.values()) == 1
    assert max(x for x, _ in cells) < 24
