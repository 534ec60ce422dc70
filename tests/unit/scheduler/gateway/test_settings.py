"""The gateway's settings and tokens: refusals, and messages with the remedy."""

import json
from pathlib import Path
from typing import Any

import pytest

from harvester.contracts.errors import ConfigError, NotYet
from harvester.platform.tenants import Tenants
from scheduler.gateway.settings import load_settings

GOOD: dict[str, Any] = {
    "engines": [{"id": "e0", "url": "http://127.0.0.1:8000"}],
    "jobs": [{"id": "job"}],
}


def _write(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps({**GOOD, **changes}))
    return path


def test_loads_a_file_and_fills_in_the_defaults(tmp_path: Path) -> None:
    settings = load_settings(_write(tmp_path / "g.json", capacity={"duration_s": 5}))
    assert settings.host == "127.0.0.1"
    assert settings.engines[0].concurrency == 32


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prot": 1}, "prot: no such field; did you mean 'port'"),
        ({"engines": [{"id": "../x", "url": "http://h:1"}]}, "engines.0.id"),
        ({"engines": [{"id": "x", "url": "file:///etc/passwd"}]}, "engines.0.url"),
        ({"engines": [{"id": "x", "url": "http://h:1", "kind": "guest"}]}, "slot"),
        ({"engines": GOOD["engines"] * 2}, "listed twice"),
        (
            {"engines": [{"id": "a", "url": "http://h:1"}, {"id": "b", "url": "http://h:1"}]},
            "engine's url http://h:1 is listed twice",
        ),
        (
            {"engines": [{"id": each, "kind": "guest", "slot": "s0"} for each in ("a", "b")]},
            "engine's slot s0 is listed twice",
        ),
        (
            {
                "engines": [{"id": "guest.s0", "url": "http://h:1"}],
                "agents": [{"id": "x", "url": "http://h:2"}],
            },
            "engine guest.s0 has the id of the guest on slot s0",
        ),
        (
            {
                "engines": [{"id": "guest.s1", "kind": "guest", "slot": "s0"}],
                "agents": [{"id": "x", "url": "http://h:2"}],
            },
            "engine guest.s1 has the id of the guest on slot s1",
        ),
        ({"engines": []}, "at least one engine"),
        (
            {
                "engines": [{"id": "g", "kind": "guest", "slot": "s0"}],
                "agents": [{"id": each, "url": f"http://{each}:1"} for each in ("x", "y")],
            },
            "slot s0: with several agents it is AGENT.s0",
        ),
        ({"jobs": []}, "jobs"),
        ({"jobs": [{"id": "a", "active": True}, {"id": "b", "active": True}]}, "one job"),
        ({"capacity": {"duration": 5}}, "capacity: .*duration: .* mean 'duration_s'"),
        (
            {"agents": [{"id": "x", "url": "http://h:1"}], "capacity": {"duration_s": 3.0}},
            "renewed after 1 s and given up 1 s before .* every 1 s, or raise capacity.duration_s",
        ),
        ({"routing": {"queue_turns": "x"}}, "routing: .*queue_turns"),
        ({"jobs": [{"id": "a", "harvest": True}]}, r"jobs\.0\.harvest: .* mean 'harvesting'"),
        ({"answers": {"keep_s": -1}}, "answers.keep_s"),
        ({"engines": [{"id": "e", "url": "http://127.0.0.1:99999"}]}, "url"),
        ({"answers": {"size_byte": 1}}, "answers.size_byte: .* mean 'size_bytes'"),
        ({"host": "0.0.0.0"}, "token_file"),
        ({"host": "0.0.0.0", "token_file": "t"}, "plain_http"),
        ({"tls": {"cert_file": "c"}}, "tls.key_file"),
        ({"engines": [{"id": "x", "url": "http://h:1", "token_file": "t"}]}, "engines.0.*https"),
        ({"agents": [{"id": "x", "url": "http://h:1", "token_file": "t"}]}, "agents.0.*https"),
        ({"renderers": [{"url": "http://h:1", "token_file": "t"}]}, "renderers.0.*https"),
        ({"engines": [{"id": "x", "cert_file": "c"}]}, "cert_file and key_file"),
    ],
)
def test_says_which_field_is_wrong(tmp_path: Path, changes, said) -> None:
    with pytest.raises(ConfigError, match=said):
        load_settings(_write(tmp_path / "g.json", **changes))


def test_an_engine_may_have_the_id_of_a_guest_that_is_its_own_or_cannot_come(
    tmp_path: Path,
) -> None:
    own = [{"id": "guest.s0", "kind": "guest", "slot": "s0"}]
    agents = [{"id": "x", "url": "http://h:2"}]
    load_settings(_write(tmp_path / "g.json", engines=own, agents=agents))
    load_settings(_write(tmp_path / "g.json", engines=[{"id": "guest.s0", "url": "http://h:1"}]))


def test_says_which_file_is_missing_or_not_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        load_settings(tmp_path / "nothing.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"bad\.yaml line 1: not YAML"):
        load_settings(tmp_path / "bad.yaml")


def test_listens_to_other_machines_by_tls_or_by_consent(tmp_path: Path) -> None:
    tls = {"cert_file": "c", "key_file": "k"}
    for safe in (
        {"tls": tls, "token_file": "t"},
        {"tls": {**tls, "client_ca_file": "a"}},
        {"plain_http": True, "token_file": "t"},
    ):
        assert load_settings(_write(tmp_path / "g.json", host="0.0.0.0", **safe)).host == "0.0.0.0"
    with pytest.raises(ConfigError, match="token_file"):
        load_settings(_write(tmp_path / "g.json", host="0.0.0.0", tls=tls))


def test_a_renderer_is_a_url_or_a_url_with_its_files(tmp_path: Path) -> None:
    listed = ["http://h:1", {"url": "https://h:2", "ca_file": "ca"}]
    renderers = load_settings(_write(tmp_path / "g.json", renderers=listed)).renderers
    assert [(each.url, each.ca_file) for each in renderers] == [
        ("http://h:1", None),
        ("https://h:2", Path("ca")),
    ]


def test_tokens_of_a_tenant_change_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens"
    path.touch(mode=0o600)
    old, new = "o" * 20, "n" * 21
    path.write_text(f"alice: {old}")
    tenants = Tenants.load(path)
    path.write_text(f"alice: [{new}, {old}]")
    assert {tenants.tenant_of(f"Bearer {token}") for token in (old, new)} == {"alice"}
    path.write_text(f"alice: {new}")
    assert tenants.tenant_of(f"Bearer {old}") is None
    for broken in ("alice: short", "", "../a: " + old, "["):
        path.write_text(broken)
        assert tenants.tenant_of(f"Bearer {new}") == "alice"
    path.unlink()
    assert tenants.tenant_of(f"Bearer {new}") == "alice"
    assert not tenants.open_to_all
    assert new not in caplog.text


def test_knows_a_tenant_by_its_token_alone(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"alice: {'a' * 20}\nbob: {'b' * 20}\n")
    path.chmod(0o600)
    tenants = Tenants.load(path)
    assert tenants.tenant_of(f"Bearer {'a' * 20}") == "alice"
    assert tenants.tenant_of(f"bearer {'b' * 20}") == "bob"
    for wrong in (
        "",
        f"Basic {'a' * 20}",
        "Bearer ",
        f"Bearer {'a' * 19}",
        "Bearer ü",
        "Bearer \udcff",
    ):
        assert tenants.tenant_of(wrong) is None
    assert Tenants.load(None).open_to_all


def test_a_token_file_that_is_not_there_yet_may_come(tmp_path: Path) -> None:
    with pytest.raises(NotYet, match="cannot read token file"):
        Tenants.load(tmp_path / "tokens")


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (f"a: {'a' * 20}", 0o644, "chmod 600"),
        (f"a: {'a' * 20}", 0o640, "chmod 600"),
        ("a: short", 0o600, "16 characters"),
        ("", 0o600, "tenant: token"),
        ("[]", 0o600, "field: value"),
        (f"a: {'a' * 20}\nb: {'a' * 20}", 0o600, "b and a have one token"),
        ("a: []", 0o600, "16 characters"),
        (f"a: {'a' * 20}\na: {'b' * 20}", 0o600, "line 2: not YAML: 'a' is given twice"),
    ],
)
def test_refuses_a_token_file_that_protects_nothing(tmp_path: Path, text, mode, said) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=said) as caught:
        Tenants.load(path)
    assert "aaaa" not in str(caught.value)


_AGENTS = [{"id": each, "url": f"http://127.0.0.{at}:1"} for at, each in enumerate("abc", 1)]
_MOVED = {"id": "b", "url": "http://127.0.0.9:1"}


@pytest.mark.parametrize(
    ("before", "after", "listed", "waiting"),
    [
        (_AGENTS[:2], {"agents": _AGENTS}, "abc", ()),
        (_AGENTS[:2], {"agents": [_AGENTS[2], *_AGENTS[:2]], "port": 1}, "abc", ("port",)),
        (_AGENTS[:2], {"agents": _AGENTS[1:]}, "ab", ("agents",)),
        (_AGENTS[:1], {"agents": _AGENTS}, "a", ("agents",)),
        (_AGENTS[:1], {"agents": _AGENTS[:1], "jobs": [{"id": "other"}]}, "a", ("jobs",)),
        (_AGENTS[:2], {"agents": [_AGENTS[0], _MOVED]}, "ab", ("agents",)),
    ],
    ids=["more", "order", "fewer", "first", "none", "moved"],
)  # fmt: skip
def test_a_reload_takes_over_more_agents_and_names_what_needs_a_restart(
    tmp_path: Path, before: Any, after: Any, listed: str, waiting: tuple[str, ...]
) -> None:
    old = load_settings(_write(tmp_path / "old.json", agents=before))
    merged, found = old.with_new(load_settings(_write(tmp_path / "new.json", **after)))
    assert ("".join(agent.id for agent in merged.agents), found) == (listed, waiting)
    assert merged == old.model_copy(update={"agents": merged.agents})


def test_a_reload_takes_over_the_bounds_that_tenants_share_whatever_else_needs_a_restart(
    tmp_path: Path,
) -> None:
    followed = {
        "answers": {"turns": 7},
        "max_open_bytes": 1 << 20,
        "routing": {"queue_turns": 9},
    }
    old = load_settings(_write(tmp_path / "old.json", agents=_AGENTS[:2]))
    changed = {"agents": _AGENTS[:1], "max_body_bytes": 1 << 19, **followed}
    given = load_settings(_write(tmp_path / "new.json", **changed))
    merged, waiting = old.with_new(given)
    assert waiting == ("agents", "max_body_bytes")
    assert merged == old.model_copy(update={name: getattr(given, name) for name in followed})
    assert merged.routing_config.queue_turns == 9
    assert merged.answer_bounds.turns == 7
