"""Every number that an operator may set is refused where it would no longer protect production."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from pydantic import BaseModel

from harvester.config import (
    AgentConfig,
    HttpConfig,
    KvcachedConfig,
    MpsConfig,
    OwnersConfig,
    SlotConfig,
)
from harvester.config_file import load_agent_config, read_agent_config
from harvester.contracts.errors import ConfigError
from harvester.guest_config import GuestConfig
from harvester.interlock_config import (
    AcceleratorsConfig,
    AlertConfig,
    AlertsConfig,
    InterlocksConfig,
)
from harvester.platform.tls import Credentials, ServerTls
from harvester.policy.bounds import (
    BOUNDS,
    ITL_EDGES_S,
    TTFT_EDGES_S,
    SingleValue,
    beyond,
    slo_warnings,
)
from harvester.policy.settings import (
    LevelSettings,
    MissSettings,
    ProofSettings,
    SlotSettings,
)

Where = tuple[str | int, ...]
INF, NAN, HUGE = float("inf"), float("nan"), 1e300

GUEST = {"model": "/m", "weights": "/w", "context_tokens": 1, "kv_cache_bytes": 1}
BASES: dict[str, dict[str, Any]] = {
    "": {"slots": [{"name": "slot0"}]},
    "guest": {"slots": [{"name": "slot0", "guest": GUEST}]},
    "mps": {"slots": [{"name": "slot0", "mps": {"pipe_directory": "/p"}}]},
    "alerts": {
        "slots": [{"name": "slot0"}],
        "interlocks": {"alerts": {"url": "http://h:1", "alerts": [{"name": "A"}]}},
    },
    "kvcached": {
        "slots": [
            {
                "name": "slot0",
                "kvcached": {"production": ["p"], "guest": "g", "total_bytes": 1},
            }
        ]
    },
}
PARTS: dict[type, tuple[str, Where]] = {
    AgentConfig: ("", ()),
    HttpConfig: ("", ("http",)),
    ServerTls: ("", ("http", "tls")),
    Credentials: ("", ("guests",)),
    SlotConfig: ("", ("slots", 0)),
    GuestConfig: ("guest", ("slots", 0, "guest")),
    MpsConfig: ("mps", ("slots", 0, "mps")),
    KvcachedConfig: ("kvcached", ("slots", 0, "kvcached")),
    OwnersConfig: ("", ("owners",)),
    InterlocksConfig: ("", ("interlocks",)),
    AlertsConfig: ("alerts", ("interlocks", "alerts")),
    AlertConfig: ("alerts", ("interlocks", "alerts", "alerts", 0)),
    AcceleratorsConfig: ("", ("interlocks", "accelerators")),
}


def numbers() -> Iterator[tuple[str, Where]]:
    """Every field that may hold a number: a base that has its section, and its path."""
    for part, (base, where) in PARTS.items():
        for name in part.model_fields:
            if is_number(get_type_hints(part)[name]):
                yield base, (*where, name)
    yield from (("", where) for where in settings_numbers(SlotSettings(), ("slots", 0, "policy")))


def settings_numbers(part: Any, where: Where) -> Iterator[Where]:
    for each in fields(part):
        value = getattr(part, each.name)
        if is_dataclass(value):
            yield from settings_numbers(value, (*where, each.name))
        elif is_number(get_type_hints(type(part))[each.name]):
            yield (*where, each.name)


def is_number(kind: Any) -> bool:
    return kind in (int, float) or any(is_number(one) for one in get_args(kind) if one is not ...)


ZERO_IS_HARMLESS: dict[str, str] = {
    "http.port": "takes a free port and says which",
    "slots.kv_tokens": "unknown; only told to holders",
    "slots.policy.abort_grace_s": "guests are cut at once",
    "slots.policy.epsilon": "the strictest law: no step may delay production",
    "slots.policy.kv_budget_tokens": "leaves the guest what its engine was started with",
    "slots.policy.phantom_prompt_tokens": "draws from production's own prompts",
    "slots.policy.kv_retained_ratio": "keeps nothing",
    "slots.policy.evictions_per_hour_max": "never holds",
    "slots.policy.sleep_after_s": "never sleeps; memory is reclaimed all the same",
    "slots.policy.step_level.shrink_interval_s": "every late sample takes away",
    "slots.policy.kv_level.shrink_interval_s": "every late sample takes away",
    "slots.policy.misses.minimum_misses": "the first miss is a breach",
    "slots.policy.budget.share_ratio": "nothing of production's budget may be spent",
    "slots.policy.budget.minimum_requests": "judges earlier",
    "slots.policy.budget.minimum_misses": "judges earlier",
    "slots.policy.proof.seed": "any seed is one",
    "slots.policy.proof.proving_share_ratio": "withholds the usual share from the start",
    "slots.policy.proof.proving_s": "the same",
    "slots.policy.profile.prefill_base_s": "no profile is given",
    "slots.policy.profile.prefill_s_per_token": "no profile is given",
    "slots.policy.profile.decode_base_s": "no profile is given",
    "slots.policy.profile.decode_s_per_request": "no profile is given",
}
WRONG = [0, -1, -1e-9, INF, -INF, NAN, HUGE, 2**63, "many", True, False, [1], {"a": 1}]
ACCOUNTS = (
    *("page_group", "owners.agent", "owners.production", "owners.guest"),
    "interlocks.accelerators.xids_ignored",
)
"""Users and groups, whatever their numbers and names are, and numbers of errors."""


def dotted(where: Where) -> str:
    return ".".join(str(step) for step in where if step != 0)


def with_value(base: str, where: Where, value: Any) -> dict[str, Any]:
    text: dict[str, Any] = deepcopy(BASES[base])
    node: Any = text
    for step in where[:-1]:
        node = node[step] if isinstance(step, int) else node.setdefault(step, {})
    node[where[-1]] = value
    return text


@pytest.mark.parametrize(
    ("base", "where"), list(numbers()), ids=[dotted(where) for _, where in numbers()]
)
def test_no_number_is_taken_that_does_not_protect(base: str, where: Where, tmp_path: Path) -> None:
    if dotted(where) in ACCOUNTS:
        return
    for value in WRONG:
        given = with_value(base, where, value)
        if type(value) is int and value == 0 and dotted(where) in ZERO_IS_HARMLESS:
            load_agent_config(None, flags=given, environment={})
            continue
        with pytest.raises(ConfigError) as caught:
            load_agent_config(None, flags=given, environment={})
        assert str(where[-1]) in str(caught.value), value
    path = tmp_path / "agent.yaml"
    path.write_text(yaml.safe_dump(with_value(base, where, -1)))
    with pytest.raises(ConfigError, match=f"{path} line "):
        load_agent_config(path, environment={})


@pytest.mark.parametrize("value", [-1, 0.5, INF, NAN, HUGE, 2**32, True, "", "x" * 65, {"a": 1}])
@pytest.mark.parametrize("name", ACCOUNTS)
def test_a_user_or_a_group_is_a_name_or_a_number_of_one(name: str, value: Any) -> None:
    where = tuple(name.split("."))
    given = with_value("", where, [value] if len(where) > 1 else value)
    with pytest.raises(ConfigError, match=where[-1]):
        load_agent_config(None, flags=given, environment={})


def test_every_section_of_the_configuration_is_looked_at() -> None:
    seen: set[type] = set()

    def collect(part: type) -> None:
        seen.add(part)
        for kind in get_type_hints(part).values():
            for one in (kind, *get_args(kind)):
                if isinstance(one, type) and issubclass(one, BaseModel) and one not in seen:
                    collect(one)

    collect(AgentConfig)
    assert seen == set(PARTS)


def test_every_number_and_guard_of_the_settings_has_a_range() -> None:
    def parts(part: Any) -> Iterator[Any]:
        yield part
        for each in fields(part):
            if is_dataclass(getattr(part, each.name)):
                yield from parts(getattr(part, each.name))

    for part in parts(SlotSettings()):
        kinds = get_type_hints(type(part))
        needed = {name for name, kind in kinds.items() if is_number(kind) or kind is bool}
        assert needed <= set(BOUNDS[type(part)]), type(part)
        assert set(BOUNDS[type(part)]) <= set(kinds)


def test_the_defaults_protect() -> None:
    assert list(beyond(SlotSettings())) == []


EXPERIMENTS: list[dict[str, Any]] = [
    {"ungated": True},
    {"law": "rose"},
    {"law": "saturation"},
    {"grant_ttl_s": 86_400},
    {"epsilon": 1e6},
    {"blocking_ratio": 0.001},
    {"cooldown_s": 0},
    {"model_samples_min": 0},
    {"budget": {"enforced": False}},
    {"proof": {"share_ratio": 0, "limit_ratio": 1e6}},
    {"misses": {"limit_ratio": 0.999, "minimum_misses": 1e9}},
    {"step_level": {"floor_ratio": 1}},
]


@pytest.mark.parametrize("policy", EXPERIMENTS, ids=str)
def test_an_experiment_needs_its_one_name_and_is_logged(
    policy: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "agent.yaml"
    text = {"slots": [{"name": "slot0", "policy": policy}]}
    path.write_text(yaml.safe_dump(text))
    with pytest.raises(ConfigError, match="unsafe_experiments"):
        load_agent_config(path, environment={})
    path.write_text(yaml.safe_dump({**text, "unsafe_experiments": True}))
    notes = read_agent_config(path, environment={}).notes
    name = next(iter(policy))
    assert any("unsafe_experiments: " in note and name in note for note in notes)


@pytest.mark.parametrize(
    "policy",
    [{"cooldown_s": -5}, {"grant_ttl_s": INF}, {"epsilon": NAN}, {"proof": {"hold_s": -1}}],
    ids=str,
)
def test_a_meaningless_value_is_refused_from_an_experiment_too(
    policy: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "agent.yaml"
    slot = {"name": "slot0", "policy": policy}
    path.write_text(yaml.safe_dump({"unsafe_experiments": True, "slots": [slot]}))
    with pytest.raises(ConfigError, match="must be"):
        load_agent_config(path, environment={})


def test_a_range_that_is_given_its_ends_is_kept() -> None:
    for part in (SlotSettings, LevelSettings, MissSettings, ProofSettings):
        for bound in BOUNDS[part].values():
            if not isinstance(bound, SingleValue):
                assert bound.fault(bound.least) == bound.fault(bound.most) == ""
                assert bound.why in bound.fault(bound.most * 2 + 1)


def notes_of(tmp_path: Path, **policy: float) -> tuple[str, ...]:
    path = tmp_path / "agent.yaml"
    path.write_text(yaml.safe_dump({"slots": [{"name": "slot0", "policy": policy}]}))
    return read_agent_config(path, environment={}).notes


def test_an_slo_between_two_edges_or_in_milliseconds_is_warned_of_with_its_line(
    tmp_path: Path,
) -> None:
    assert notes_of(tmp_path) == notes_of(tmp_path, ttft_slo_s=0.5, itl_slo_s=0.1) == ()
    (between,) = notes_of(tmp_path, ttft_slo_s=0.3)
    assert "line 4: slots.0.policy.ttft_slo_s: 0.3 is no edge" in between
    assert "between 0.25 and 0.5" in between
    (long,) = notes_of(tmp_path, ttft_slo_s=250)
    assert "were 250 ms meant, 0.25?" in long
    said = notes_of(tmp_path, itl_slo_s=5)
    assert any("were 5 ms meant, 0.005?" in note for note in said)
    assert any("longer than ttft_slo_s" in note for note in said)
    (below,) = notes_of(tmp_path, itl_slo_s=0.004)
    assert "below 0.01" in below


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (
            {"itl_slo_s": 50},
            "itl_slo_s: 50 is not 0.0005 to 10 s: beyond it no token is ever late .50 ms are",
        ),
        (
            {"ttft_slo_s": 500},
            "ttft_slo_s: 500 is not 0.001 to 300 s: beyond it no request is ever late",
        ),
    ],
)
def test_an_slo_that_no_service_has_is_refused(
    policy: dict[str, float], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        notes_of(tmp_path, **policy)


def test_no_edge_of_vllms_histograms_is_warned_of() -> None:
    for ttft_slo_s in TTFT_EDGES_S:
        for itl_slo_s in ITL_EDGES_S:
            said = slo_warnings(ttft_slo_s=ttft_slo_s, itl_slo_s=itl_slo_s)
            assert not any("no edge" in text for _, text in said)


def test_the_edges_are_those_of_the_installed_vllm() -> None:
    buckets = pytest.importorskip("vllm.v1.metrics.buckets")
    assert TTFT_EDGES_S == buckets.TIME_TO_FIRST_TOKEN_BUCKETS
    assert ITL_EDGES_S == buckets.INTER_TOKEN_LATENCY_BUCKETS


@pytest.mark.parametrize(
    ("given", "notes"), [("0.5", 1), ("0.25", 0), (None, 0)], ids=["other", "same", "none"]
)
def test_a_variable_that_overrides_the_file_is_logged_and_another_is_not(
    tmp_path: Path, given: str | None, notes: int
) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text("slots: [{name: slot0, policy: {ttft_slo_s: 0.25}}]\n")
    environment = {"ROSEMUX_AGENT_HTTP__PORT": "9712"}
    if given is not None:
        environment["ROSEMUX_AGENT_SLOTS__0__POLICY__TTFT_SLO_S"] = given
    said = read_agent_config(path, environment=environment).notes
    assert len(said) == notes
    for note in said:
        assert note == (
            f"variable ROSEMUX_AGENT_SLOTS__0__POLICY__TTFT_SLO_S gives 0.5 over 0.25 in {path}"
        )
