from pathlib import Path
from typing import Any

import pytest
import yaml

from harvester.config_file import load_agent_config, read_agent_config
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import PageOwners
from harvester.platform.bearer import is_loopback
from harvester.policy.settings import Mode

GOOD = """\
node: node-7
slots:
  - name: slot0
    policy:
      ttft_slo_s: 0.2
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "agent.yaml"
        path.write_text(text)
        return path

    return write


def test_observes_and_listens_on_loopback_by_default(write: Any) -> None:
    config = load_agent_config(write(GOOD), environment={})
    assert config.mode is Mode.OBSERVE
    assert is_loopback(config.http.host)
    assert config.settings_of(config.slots[0]).mode is Mode.OBSERVE
    assert config.settings_of(config.slots[0]).ttft_slo_s == 0.2
    assert config.pages_of(config.slots[0]) == config.page_root / "slot0"


def test_flags_beat_variables_and_variables_beat_the_file(write: Any) -> None:
    path = write(GOOD + "http: {port: 1}\nmode: off\nlease_ttl_s: 3\n")
    environment = {
        "ROSEMUX_AGENT_HTTP__PORT": "2",
        "ROSEMUX_AGENT_MODE": "observe",
        "ROSEMUX_PAGE_DIR": "/elsewhere",
    }
    config = load_agent_config(path, flags={"http.port": 3}, environment=environment)
    assert (config.http.port, config.mode, config.lease_ttl_s) == (3, Mode.OBSERVE, 3.0)


def test_a_variable_reaches_into_a_slot(write: Any) -> None:
    environment = {"ROSEMUX_AGENT_SLOTS__0__POLICY__EPSILON": "0.2"}
    config = load_agent_config(write(GOOD), environment=environment)
    assert config.slots[0].policy.epsilon == 0.2
    assert config.slots[0].policy.ttft_slo_s == 0.2


def test_a_variable_reaches_one_slot_of_two_that_share_an_alias(write: Any) -> None:
    text = """\
slots:
  - {name: slot0, policy: &law {epsilon: 0.1}}
  - {name: slot1, policy: *law}
"""
    environment = {"ROSEMUX_AGENT_SLOTS__0__POLICY__EPSILON": "0.2"}
    config = load_agent_config(write(text), environment=environment)
    assert [slot.policy.epsilon for slot in config.slots] == [0.2, 0.1]


def test_the_more_careful_mode_of_node_and_slot_holds(write: Any) -> None:
    config = load_agent_config(write(GOOD + "mode: harvest\n"), environment={})
    assert config.settings_of(config.slots[0]).mode is Mode.HARVEST
    text = GOOD.replace("policy:", "policy:\n      mode: off") + "mode: harvest\n"
    config = load_agent_config(write(text), environment={})
    assert config.settings_of(config.slots[0]).mode is Mode.OFF


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slots: []\n", "slots: give one, or a slots_file"),
        (GOOD + "modus: off\n", "line 6: modus: no such field; did you mean 'mode'?"),
        (GOOD.replace("0.2", "fast"), "line 5: slots.0.policy.ttft_slo_s: "),
        (
            GOOD.replace("ttft_slo_s", "ttft_slo"),
            "line 5: slots.0.policy.ttft_slo: no such field; did you mean 'ttft_slo_s'?",
        ),
        (
            GOOD.replace("0.2", "-1"),
            "slots.0.policy: Value error, ttft_slo_s must be a finite number, above 0",
        ),
        (
            GOOD.replace("0.2", "0"),
            "slots.0.policy: Value error, ttft_slo_s must be a finite number, above 0",
        ),
        (
            GOOD.replace("0.2", "2000"),
            "line 5: slots.0.policy.ttft_slo_s: 2000 is not 0.001 to 300",
        ),
        (GOOD.replace("0.2", "true"), "line 5: slots.0.policy.ttft_slo_s: true is no number"),
        (GOOD + "lease_ttl_s: 3600\n", "line 6: lease_ttl_s: 3600 is not 1 to 300 s: a holder"),
        (GOOD + "mode: off\nmode: harvest\n", "line 7: not YAML: 'mode' is given twice"),
        (
            GOOD.replace("ttft_slo_s: 0.2", "{ungated: true}"),
            "only experiments go beyond (unsafe_experiments)",
        ),
        (GOOD.replace("slot0", "../../etc"), "line 3: slots.0.name: "),
        (GOOD.replace("    policy", "    pulses: [../x]\n    policy"), "slots.0.pulses"),
        (
            GOOD.replace("    policy", "    metrics_url: 127.0.0.1:8000/metrics\n    policy"),
            "slots.0.metrics_url: Value error, use a URL such as http://HOST:PORT/metrics",
        ),
        (
            GOOD.replace("    policy", "    metrics_url: http://h:99999/metrics\n    policy"),
            "slots.0.metrics_url: Value error, Port out of range",
        ),
        (GOOD + "http: {host: 0.0.0.0}\n", "set token_file"),
        ("slots: [\n", "line 2: not YAML"),
        ("- 1\n", "expected `field: value`"),
        (GOOD + "  - name: slot0\n", "every name may appear once"),
        (
            GOOD + "  - {name: slot1, pages: /dev/shm/rosemux/slot0}\n",
            "every slot needs pages of its own",
        ),
        (GOOD.replace("slot0", "kill"), "slots: kill: its pages are the agent's own: rename"),
        (GOOD.replace("slot0", "stop"), "slots: stop: its pages are the agent's own: rename"),
        (GOOD.replace("slot0", "launch"), "slots: launch: its pages are the agent's own: rename"),
        (GOOD + "stop_file: /dev/shm/rosemux/slot0\n", "slots: slot0: its pages are the agent's"),
        (
            GOOD.replace("ttft_slo_s: 0.2", "grant_ttl_s: 0.1"),
            "grant_ttl_s must be at least two beats",
        ),
    ],
)
def test_a_mistake_names_its_field_and_line(write: Any, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_agent_config(write(text), environment={})
    assert says in str(caught.value)


_GUEST = "model: /m, weights: /w, context_tokens: 4096, kv_cache_bytes: 1000"
_KV = "kvcached: {{production: [{}], guest: {}, total_bytes: 1000}}"


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (
            f"guest: {{{_GUEST}, gpus: [GPU-1, GPU-2]}}",
            f"guest: {{{_GUEST}, gpus: [GPU-2]}}",
            "guest.gpus: slots a and b both have GPU-2: each slot needs its own",
        ),
        (
            "engine_url: http://localhost:8001",
            "engine_url: http://127.0.0.1:8001/",
            "engine_url: slots a and b both have http://127.0.0.1:8001",
        ),
        ("offered_url: https://n:8443", "offered_url: https://n:8443", "offered_url: slots a"),
        ("memory_group: /g", "memory_group: /g/", "memory_group: slots a and b both have /g"),
        (_KV.format("p", "g"), _KV.format("q", "p"), "kvcached: slots a and b both have p"),
    ],
)
def test_two_slots_with_what_only_one_may_have_are_refused_by_name(
    tmp_path: Path, write: Any, first: str, second: str, says: str
) -> None:
    slots = f"slots: [{{name: a, {first}}}, {{name: b, {second}}}]\n"
    with pytest.raises(ConfigError) as caught:
        load_agent_config(write(slots), environment={})
    assert says in str(caught.value)
    one, more = f"slots: [{{name: a, {first}}}]\n", f"slots: [{{name: b, {second}}}]\n"
    (tmp_path / "slots.yaml").write_text(more)
    with pytest.raises(ConfigError, match=r"slots\.yaml") as caught:
        load_agent_config(write(f"{one}slots_file: {tmp_path / 'slots.yaml'}\n"), environment={})
    assert says in str(caught.value)


def test_slots_that_share_what_they_may_are_two(write: Any) -> None:
    shared = "service: s, metrics_url: http://h:1/m, mps: {pipe_directory: /mps}"
    slots = f"slots: [{{name: a, {shared}}}, {{name: b, {shared}, engine_url: 'http://h:1'}}]"
    assert len(load_agent_config(write(slots), environment={}).slots) == 2


def test_a_missing_file_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read configuration .*absent\.yaml"):
        load_agent_config(tmp_path / "absent.yaml", environment={})


def test_a_misspelt_variable_is_refused(write: Any) -> None:
    with pytest.raises(ConfigError, match="modus"):
        load_agent_config(write(GOOD), environment={"ROSEMUX_AGENT_MODUS": "off"})
    with pytest.raises(ConfigError, match="ROSEMUX_AGENT_SLOTS__9__NAME"):
        load_agent_config(write(GOOD), environment={"ROSEMUX_AGENT_SLOTS__9__NAME": "x"})


OWNERS = "owners: {agent: [1], production: [2], guest: [3]}\n"


def test_owners_of_a_node_hold_for_its_slots_unless_a_slot_names_its_own(write: Any) -> None:
    text = OWNERS + "page_group: 5\n" + GOOD + "  - name: slot1\n    owners: {production: [4]}\n"
    config = load_agent_config(write(text), environment={})
    node, own = (config.owners_of(slot) for slot in config.slots)
    assert node == PageOwners(agent=frozenset({1}), production=frozenset({2}), guest=frozenset({3}))
    assert own == PageOwners(production=frozenset({4}))
    assert config.page_gid == 5


def test_users_without_access_to_the_pages_are_refused_with_a_remedy(write: Any) -> None:
    config = load_agent_config(write(OWNERS + GOOD), environment={})
    with pytest.raises(ConfigError, match="page_group: name a group"):
        config.owners_of(config.slots[0])


def test_an_agent_that_scrapes_is_production_of_that_slot(write: Any) -> None:
    text = GOOD + "    metrics_url: http://127.0.0.1:8000/metrics\n" + OWNERS + "page_group: 5\n"
    config = load_agent_config(write(text), environment={})
    assert config.owners_of(config.slots[0]).production == {1, 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("owners: {guest: [no-such-user]}\n", "no user 'no-such-user'"),
        ("page_group: no-such-group\nowners: {guest: [3]}\n", "no group 'no-such-group'"),
    ],
)
def test_users_and_groups_that_are_not_here_are_named(write: Any, text: str, said: str) -> None:
    config = load_agent_config(write(text + GOOD), environment={})
    with pytest.raises(ConfigError, match=said):
        config.check_here()


GUEST = """\
slots:
  - name: slot0
    engine_url: {url}
    guest: {{model: /m, weights: /w, context_tokens: 64, kv_cache_bytes: 1, arguments: {arguments}}}
"""


@pytest.mark.parametrize(
    "arguments",
    [
        "[--host, 0.0.0.0]",
        "[--host=0.0.0.0]",
        "[--hos, 0.0.0.0]",
        "[--seed, '7', --port, '80']",
        "[--uds, /tmp/open]",
        "[--config, more.yaml]",
        "[--scheduler_cls, other.Scheduler]",
        "[--weight-transfer-config.backend, nccl]",
        "[--data-parallel-backend, ray]",
    ],
)
def test_flags_that_are_rosemux_s_own_are_refused_for_a_guest(write: Any, arguments: str) -> None:
    """Behind `--host 0.0.0.0` any machine could change the guest's weights."""
    text = GUEST.format(url="http://127.0.0.1:8001", arguments=arguments)
    with pytest.raises(ConfigError, match=r"line 4: slots\.0\.guest\.arguments: .*--"):
        load_agent_config(write(text), environment={})


def test_other_flags_are_a_guest_s_own(write: Any) -> None:
    arguments = "[--seed, '7', --load-format, dummy, --model-impl, auto, --hf-overrides, '{}']"
    text = GUEST.format(url="http://[::1]:8001", arguments=arguments)
    guest = load_agent_config(write(text), environment={}).slots[0].guest
    assert guest is not None
    assert guest.arguments[:2] == ("--seed", "7")


@pytest.mark.parametrize(
    "arguments",
    [
        "[--distributed-executor-backend, mp]",
        "[--distributed-executor-backend=uni]",
        "[--data-parallel-size=1]",
        "[--nnodes, '1']",
    ],
)
def test_a_shape_is_judged_by_the_engine_since_its_flags_may_be_harmless(
    write: Any, arguments: str
) -> None:
    text = GUEST.format(url="http://127.0.0.1:8001", arguments=arguments)
    assert load_agent_config(write(text), environment={}).slots[0].guest


def test_a_guest_s_url_is_one_that_it_listens_on(write: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine_url: 10\.9\.9\.9 is not served.*offered_url"):
        load_agent_config(
            write(GUEST.format(url="http://10.9.9.9:8001", arguments="[]")), environment={}
        )
    elsewhere = "slots: [{name: s, engine_url: 'http://10.9.9.9:8001'}]"
    assert load_agent_config(write(elsewhere), environment={})
    with pytest.raises(ConfigError, match="offered_url: use http"):
        load_agent_config(write("slots: [{name: s, offered_url: 'host:80'}]"), environment={})


def test_the_service_links_of_kubernetes_are_no_fields(write: Any) -> None:
    links = {
        "SERVICE_HOST": "10.96.7.7",
        "SERVICE_PORT": "8301",
        "SERVICE_PORT_HTTP": "8301",
        "PORT": "tcp://10.96.7.7:8301",
        "PORT_8301_TCP": "tcp://10.96.7.7:8301",
        "PORT_8301_TCP_PROTO": "tcp",
        "PORT_8301_TCP_PORT": "8301",
        "PORT_8301_TCP_ADDR": "10.96.7.7",
        "METRICS_PORT": "udp://10.96.7.7:8301",
        "METRICS_SERVICE_HOST": "10.96.7.7",
    }
    environment = {f"ROSEMUX_AGENT_{name}": value for name, value in links.items()}
    loaded = read_agent_config(write(GOOD), environment=environment)
    assert loaded == read_agent_config(write(GOOD), environment={})


@pytest.mark.parametrize("name", ["PORT", "SERVICE", "HTTP__PORT_80_TCP", "HTTP__SERVICE_HOST"])
def test_a_misspelt_variable_is_no_service_link(write: Any, name: str) -> None:
    with pytest.raises(ConfigError):
        load_agent_config(write(GOOD), environment={f"ROSEMUX_AGENT_{name}": "9711"})


@pytest.mark.parametrize(
    ("more", "warned"),
    [
        ({"owners": {"agent": ["root"], "guest": ["nobody"]}}, True),
        ({"owners": {"agent": ["root"], "guest": ["root"]}}, False),
        ({"owners": {"agent": ["root"], "guest": ["nobody"]}, "http": {"token_file": "/t"}}, False),
        ({}, False),
    ],
)
def test_a_guest_of_another_user_beside_an_agent_without_tokens_is_warned_of(
    tmp_path: Path, more: dict[str, Any], warned: bool
) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(yaml.safe_dump({"slots": [{"name": "slot0"}], **more}))
    notes = read_agent_config(path, environment={}).notes
    assert [("lift the operator's stops" in note) for note in notes] == [True] * warned
