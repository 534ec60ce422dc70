"""systemd itself judges the unit. It exits 0 on keys that it does not know, so stderr counts."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.check_expressions import DEPLOY
from harvester.cli.root import COMMANDS, load
from harvester.config_file import load_agent_config
from harvester.policy.settings import AUTO, Mode

UNIT = DEPLOY / "systemd" / "rosemux-agent.service"

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None and os.environ.get("CI") != "true",
    reason="systemd-analyze is not installed",
)


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def verify(text: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """The program is not installed where the unit expects it, any executable stands in."""
    unit = directory / UNIT.name
    unit.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text))
    return analyze("verify", "--man=no", str(unit))


@needs_systemd
def test_systemd_understands_every_line_of_the_unit(tmp_path: Path) -> None:
    result = verify(UNIT.read_text(), tmp_path)

    assert (result.returncode, result.stderr) == (0, "")


@needs_systemd
def test_a_misspelt_key_would_be_noticed(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("ProtectSystem=", "ProtectSystme=")

    assert "ProtectSystme" in verify(text, tmp_path).stderr


@needs_systemd
@pytest.mark.parametrize("service", ["agent", "guest@", "engine-proxy@", "gateway", "discover"])
def test_exposure_stays_below_two_of_ten(service: str) -> None:
    unit = DEPLOY / "systemd" / f"rosemux-{service}.service"
    result = analyze("security", "--offline=true", "--threshold=20", str(unit))

    assert result.returncode == 0, result.stdout


@needs_systemd
def test_systemd_understands_the_unit_with_its_drop_in(tmp_path: Path) -> None:
    drop_ins = tmp_path / f"{UNIT.name}.d"
    drop_ins.mkdir()
    shutil.copy(DEPLOY / "systemd" / "remote.conf", drop_ins)

    result = verify(UNIT.read_text(), tmp_path)

    assert (result.returncode, result.stderr) == (0, "")


def said(unit: Path, key: str) -> list[str]:
    return re.findall(rf"(?m)^{key}=(.*)$", unit.read_text())


def example_environment() -> dict[str, str]:
    lines = (DEPLOY / "systemd" / "agent.env").read_text().splitlines()
    pairs = (line.lstrip("#").partition("=") for line in lines if re.match(r"#?ROSEMUX_", line))
    return {name: value for name, _, value in pairs}


def test_the_agent_accepts_the_example_settings_and_only_observes() -> None:
    config = load_agent_config(DEPLOY / "systemd" / "agent.yaml", environment={})

    assert config.settings_of(config.slots[0]).mode is Mode.OBSERVE


def test_every_variable_of_the_example_is_a_field() -> None:
    environment = example_environment()

    config = load_agent_config(DEPLOY / "systemd" / "agent.yaml", environment=environment)

    assert "ROSEMUX_AGENT_MODE" in environment
    assert config.mode is Mode.OFF


def test_the_environment_file_as_shipped_overrides_nothing() -> None:
    lines = (DEPLOY / "systemd" / "agent.env").read_text().splitlines()

    assert [line for line in lines if line.strip() and not line.startswith("#")] == []


def test_the_settings_as_shipped_lend_by_what_the_guest_s_isolation_promises() -> None:
    config = load_agent_config(DEPLOY / "systemd" / "agent.yaml", environment={})

    assert {config.settings_of(slot).blocking_ratio for slot in config.slots} == {AUTO}


def test_the_unit_and_the_settings_mean_the_same_directories() -> None:
    config = load_agent_config(DEPLOY / "systemd" / "agent.yaml", environment={})
    unit = UNIT.read_text()
    directories = (DEPLOY / "systemd" / "tmpfiles.conf").read_text()

    assert f"RuntimeDirectory={config.page_root.name}\n" in unit
    assert config.page_root.parent == Path("/run")
    assert f"StateDirectory={config.state_dir.name}\n" in unit
    for slot in config.slots:
        line = rf"^d {config.pages_of(slot)} +1770 rosemux rosemux-pages -$"
        assert re.search(line, directories, re.MULTILINE)


def test_the_users_of_a_slot_are_three_and_members_of_its_directories_group() -> None:
    lines = (DEPLOY / "systemd" / "sysusers.conf").read_text().splitlines()
    users = {line.split()[1] for line in lines if line.startswith("u ")} - {"rosemux-gateway"}
    members = {line.split()[1] for line in lines if line.startswith("m ")}
    assert users == {"rosemux", "rosemux-guest"}
    assert members == users | {"vllm"}
    assert all(line.split()[2] == "rosemux-pages" for line in lines if line.startswith("m "))


GUEST_UNIT = DEPLOY / "systemd" / "rosemux-guest@.service"


GUEST_SLICE = DEPLOY / "systemd" / "rosemux.slice"
GPU_SLICE = DEPLOY / "systemd" / "rosemuxgpu.slice"


@needs_systemd
@pytest.mark.parametrize("drop_in", [None, "guest-mps.conf", "guest-gpu.conf"])
def test_systemd_understands_the_guest_s_unit(drop_in: str | None, tmp_path: Path) -> None:
    unit = tmp_path / GUEST_UNIT.name
    for file in (GUEST_SLICE, GPU_SLICE):
        shutil.copy(file, tmp_path)
    unit.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", GUEST_UNIT.read_text()))
    if drop_in is not None:
        (tmp_path / f"{GUEST_UNIT.name}.d").mkdir()
        shutil.copy(DEPLOY / "systemd" / drop_in, tmp_path / f"{GUEST_UNIT.name}.d")

    result = analyze("verify", "--man=no", str(unit), str(tmp_path / GUEST_SLICE.name))

    assert (result.returncode, result.stderr) == (0, "")


def test_guests_rank_below_everything_on_the_machine() -> None:
    # A name without a dash is a slice at the root, where every other group is.
    assert "-" not in GUEST_SLICE.stem
    assert "CPUWeight=idle\n" in GUEST_SLICE.read_text()
    assert f"Slice={GUEST_SLICE.name}\n" in GUEST_UNIT.read_text()


def test_no_thread_of_a_gpu_guest_is_starved() -> None:
    assert "-" not in GPU_SLICE.stem
    assert "CPUWeight=1\n" in GPU_SLICE.read_text()
    drop_in = (DEPLOY / "systemd" / "guest-gpu.conf").read_text()
    assert f"Slice={GPU_SLICE.name}\n" in drop_in


def test_guest_and_agent_are_two_users_that_one_file_names() -> None:
    config = load_agent_config(DEPLOY / "systemd" / "agent.yaml", environment={})
    assert said(UNIT, "User") == list(config.owners.agent) == ["rosemux"]
    assert said(GUEST_UNIT, "User") == list(config.owners.guest) == ["rosemux-guest"]
    assert list(config.owners.production) == ["vllm"]
    assert config.page_group == "rosemux-pages"
    discover = DEPLOY / "systemd" / "rosemux-discover.service"
    for reader in (GUEST_UNIT, discover):
        assert said(reader, "EnvironmentFile") == said(UNIT, "EnvironmentFile")
    (agent,), (guest,) = said(UNIT, "ExecStart"), said(GUEST_UNIT, "ExecStart")
    assert re.findall(r"--config \S+", agent) == re.findall(r"--config \S+", guest)


PROXY_UNIT = DEPLOY / "systemd" / "rosemux-engine-proxy@.service"


GATEWAY_UNIT = DEPLOY / "systemd" / "rosemux-gateway.service"


@needs_systemd
@pytest.mark.parametrize("shipped", [PROXY_UNIT, GATEWAY_UNIT], ids=lambda path: path.stem)
def test_systemd_understands_the_units_of_services_off_the_node(
    shipped: Path, tmp_path: Path
) -> None:
    unit = tmp_path / shipped.name
    unit.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", shipped.read_text()))

    result = analyze("verify", "--man=no", str(unit))

    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("shipped", [PROXY_UNIT, GATEWAY_UNIT], ids=lambda path: path.stem)
def test_units_of_services_that_report_wait_for_it_and_end_one_that_stands_still(
    shipped: Path,
) -> None:
    assert said(shipped, "Type") == ["notify"]
    assert said(shipped, "NotifyAccess") == ["main"]
    assert said(shipped, "WatchdogSec") == ["30s"]
    assert said(shipped, "OOMScoreAdjust") == ["500"], "it may run beside production"
    (families,) = said(shipped, "RestrictAddressFamilies")
    assert "AF_UNIX" in families.split()


def test_the_engine_proxy_s_unit_gives_options_that_exist() -> None:
    (command,) = re.findall(r"(?m)^ExecStart=(.*)$", PROXY_UNIT.read_text())
    _, name, *options = command.split()
    taken = load(name, COMMANDS[name])
    flags = {flag for each in taken.params for flag in each.opts}

    assert set(options[::2]) <= flags
    assert {"--cert", "--key", "--token-file"} <= set(options[::2])
    group = re.findall(r"(?m)^SupplementaryGroups=(.*)$", PROXY_UNIT.read_text())
    assert f"g {group[0]} -" in (DEPLOY / "systemd" / "sysusers.conf").read_text()


@pytest.mark.parametrize("name", ["gateway.yaml", "machines.yaml"])
def test_the_gateway_s_unit_lets_it_write_where_its_example_files_say(name: str) -> None:
    (directory,) = said(GATEWAY_UNIT, "StateDirectory")
    example = yaml.safe_load((DEPLOY.parent / "examples" / name).read_text())
    for field in ("state_file", "journal_dir"):
        assert Path("/var/lib", directory) in Path(example[field]).parents
    (user,) = said(GATEWAY_UNIT, "User")
    users = (DEPLOY / "systemd" / "sysusers.conf").read_text()
    assert re.search(rf'(?m)^u {user} +- ".*" /var/lib/{directory}$', users)


def test_the_documented_install_puts_documentation_in_place_whose_links_lead_on(
    tmp_path: Path,
) -> None:
    page = (DEPLOY.parent / "docs/install.md").read_text()
    folder = "/usr/share/doc/rosemux"
    commands = re.findall(rf"(?m)^(?:mkdir|cp) .*{folder}.*$", page)
    assert len(commands) == 2
    script = "\n".join(commands).replace(folder, str(tmp_path))
    subprocess.run(["bash", "-ec", script], cwd=DEPLOY.parent, check=True)
    for unit in (DEPLOY / "systemd").glob("rosemux*"):
        (target,) = re.findall(r"(?m)^Documentation=(.*)$", unit.read_text())
        assert Path(target.replace(f"file://{folder}", str(tmp_path))).is_file(), unit.name
    installed = {
        page
        for folder in ("docs", "deploy", "examples")
        for page in (tmp_path / folder).rglob("*.md")
    }
    assert len(installed) > 50
    for page in {*installed, *tmp_path.glob("*.md")}:
        targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        missing = [each for each in targets if not (page.parent / each).exists()]
        assert missing == [], page


def test_a_guest_takes_no_port_at_which_tokens_arrive() -> None:
    agent = yaml.safe_load((DEPLOY / "systemd/agent.yaml").read_text())["http"]["port"]
    gateway = yaml.safe_load((DEPLOY.parent / "examples/gateway.yaml").read_text())["port"]
    denied = said(DEPLOY / "systemd/rosemux-guest@.service", "SocketBindDeny")
    assert denied == [f"tcp:{agent}", f"tcp:{gateway}"]
