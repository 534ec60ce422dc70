import json
from pathlib import Path
from typing import Any

import pytest

from examples.grpo.config import JobConfig, read_config
from harvester.contracts.errors import ConfigError

GOOD: dict[str, Any] = {
    "job": "harvest",
    "gateway_url": "http://127.0.0.1:1",
    "weight_root": "weights",
    "store": "harvest",
    "cache_dir": "cache",
}


def read(tmp_path: Path, changes: dict[str, Any]) -> JobConfig:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(GOOD | changes))
    return read_config(path)


def test_an_absent_setting_has_a_default(tmp_path: Path) -> None:
    config = read(tmp_path, {"grpo": {"clip_low": 0.1}, "warm_up": {"policy": {"layers": 3}}})
    assert config.grpo.clip_low == 0.1
    assert config.warm_up.policy.layers == 3
    assert config.warm_up.policy.hidden == JobConfig(**GOOD).warm_up.policy.hidden


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"jobb": 1}, "jobb"),
        ({"warm_up": {"policy": {"hiden": 3}}}, "warm_up.policy.hiden"),
        ({"seed": "one"}, "seed"),
        ({"store": "../elsewhere"}, "store"),
        ({"job": "a b"}, "job"),
        ({"job": "j" * 41}, "40"),
        ({"samples_per_prompt": 1}, "at least 2"),
        ({"grpo": {"clip_low": 2.0}}, "clip_low"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(tmp_path, changes)


def test_a_file_that_is_missing_or_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        read_config(tmp_path / "nowhere.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json"):
        read_config(tmp_path / "broken.json")
