"""An installation without extras: its commands work, or name the extra that they need."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.check_expressions import DEPLOY
from harvester.cli.root import COMMANDS
from harvester.contracts.audit import SCHEMA, AuditEvent
from harvester.contracts.ids import Epoch
from harvester.contracts.journal import JournalWriter, Opened, config_hash
from harvester.contracts.page import Grant, GrantMode, PageDirectory
from harvester.distribution import _EXTRAS
from harvester.policy.sample import GuestReading, LeaseView, SlotSample
from harvester.policy.settings import SlotSettings
from harvester.policy.slot import SlotPolicy

ROOT = DEPLOY.parent
ABSENT = ("fsspec", "jinja2", "llvmlite", "matplotlib", "numba", "numpy", "ray", "safetensors")
ABSENT += ("scipy", "torch", "transformers", "vllm")
PRELUDE = f"""
import importlib, importlib.abc, io, json, pkgutil, sys, traceback
from contextlib import redirect_stderr, redirect_stdout

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
COMMAND_LINES = """
from harvester.cli import main

done = []
for arguments in json.loads(sys.argv[1]):
    printed, code = io.StringIO(), 0
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            main(arguments)
        except SystemExit as left:
            code = left.code
        except BaseException:
            code = traceback.format_exc()
    done.append([code, printed.getvalue()])
print(json.dumps(done))
"""
IMPORTS = """
failed = {}
for root in json.loads(sys.argv[1]):
    package = importlib.import_module(root)
    for module in pkgutil.walk_packages(package.__path__, root + "."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except Exception as error:
                failed[module.name] = repr(error)
print(json.dumps(failed))
"""


def without_extras(code: str, words: Any) -> Any:
    """Runs `code`, and decodes its print, where no module of an extra is found."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, json.dumps(words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run(*command_lines: list[str]) -> list[tuple[Any, str]]:
    return [tuple(done) for done in without_extras(COMMAND_LINES, command_lines)]


@pytest.fixture(scope="module")
def project() -> Mapping[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[a-z0-9-]+", each)[0] for each in requirements}  # type: ignore[index]


def journal(path: Path) -> Path:
    """A slot's journal of one decision."""
    policy = SlotPolicy(SlotSettings())
    policy.begin("life")
    config = msgspec.to_builtins(policy.settings)
    writer = JournalWriter(path, packed=True)
    writer.opened(
        Opened(
            actor="agent:slot0",
            policy=SlotPolicy.NAME,
            config=config,
            config_hash=config_hash(config),
            snapshot=policy.snapshot(),
        )
    )
    sample = SlotSample(pulses=(), guest=GuestReading(fault=None), lease=LeaseView(epoch=Epoch(1)))
    writer.decided(now=1.0, sample=sample, effects=policy.observe(sample, now=1.0))
    writer.close()
    return path


def test_agent_gateway_and_client_import_no_module_of_an_extra() -> None:
    rooms = ["harvester", "scheduler.gateway", "scheduler.client"]
    assert without_extras(IMPORTS, rooms) == {}


def test_a_node_without_extras_has_the_operators_commands(tmp_path: Path) -> None:
    event = AuditEvent(
        schema=SCHEMA,
        time="2026-01-01T00:00:00.000+00:00",
        t_s=1.0,
        node="n",
        event="agent_started",
    )
    (tmp_path / "audit.jsonl").write_bytes(msgspec.json.encode(event) + b"\n")
    recorded = str(journal(tmp_path / "slot0.journal"))
    config = tmp_path / "agent.yaml"
    config.write_text(
        (ROOT / "examples/agent.yaml")
        .read_text()
        .replace("/run/rosemux", f"{tmp_path}/run")
        .replace("/var/lib/rosemux", str(tmp_path))
    )
    (tmp_path / "run/slot0").mkdir(parents=True)
    with closing(PageDirectory(tmp_path / "run/slot0").grant_writer()) as grant:
        closed = Grant(epoch=Epoch(1), mode=GrantMode.CLOSED)
        grant.write(closed, now_ns=1, ttl_ns=1)
    expected = (
        ("good; node node-0", "agent", "--config", str(config), "--check-config"),
        ("slot0", "status", "--pages", str(tmp_path / "run")),
        ("127.0.0.1:9", "top", "http://127.0.0.1:9", "--once"),
        ("agent_started", "audit", str(tmp_path / "audit.jsonl"), "--json"),
        ("identical: 1 decisions", "replay", recorded),
        ("changed: nothing", "replay", recorded, "--config", str(config)),
        ("is good", "gateway", "--config", "examples/gateway.yaml", "--check-config"),
        ("removed", "undo", "--config", str(config)),
    )
    done = run(*([*words] for _, *words in expected))
    for (text, *words), (code, said) in zip(expected, done, strict=True):
        assert text in said, f"{words}: {code} {said}"
        assert isinstance(code, int), said


def test_a_command_that_lacks_an_extra_says_which_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store, copy = str(tmp_path / "store"), str(tmp_path / "copy")
    lines = (
        ("rollmux", "plan", "examples/jobs.yaml"),
        ("rollmux", "simulate"),
        ("rollmux", "phases", "serve", "--socket", str(tmp_path / "socket")),
        ("weights", "weights", "pull", store, copy),
        ("weights", "weights", "ls", "s3://bucket/job"),
    )
    for (extra, *words), (code, said) in zip(
        lines, run(*([*words] for _, *words in lines)), strict=True
    ):
        assert code == 2, f"{words}: {code}"
        assert said.count("\n") == 1, said
        assert said.endswith(f"pip install 'rosemux[{extra}]'\n"), said


def test_an_import_that_needs_an_extra_says_which() -> None:
    code = """
said = []
for module, name in json.loads(sys.argv[1]):
    try:
        getattr(importlib.import_module(module), name)
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
print(json.dumps(said))
"""
    publisher, control = without_extras(
        code, [["weightsync", "Publisher"], ["scheduler", "PhaseClient"]]
    )
    assert publisher.startswith("Unsupported: weightsync.Publisher needs numpy"), publisher
    assert publisher.endswith("'rosemux[weights]'")
    assert control.endswith("'rosemux[rollmux]'"), control


def test_the_sentences_name_the_extras_of_pyproject(project: Mapping[str, Any]) -> None:
    extras = project["optional-dependencies"]
    for extra, modules in _EXTRAS.items():
        assert {*modules} == names(extras[extra]), extra
    assert {command.extra for command in COMMANDS.values()} <= {"", *_EXTRAS}


def test_no_dependency_is_a_kernel_or_a_framework(project: Mapping[str, Any]) -> None:
    assert not names(project["dependencies"]) & {*ABSENT}


def test_the_agent_s_part_of_the_lock_is_closed_and_locked(project: Mapping[str, Any]) -> None:
    locked = dict(re.findall(r"(?m)^([a-z0-9-]+)==(\S+)", (ROOT / "requirements.lock").read_text()))
    part = {
        line
        for line in (ROOT / "deploy/lock/agent.txt").read_text().split("\n")
        if line and not line.startswith("#")
    }
    assert part <= locked.keys()
    assert names(project["dependencies"]) <= part
    assert not part & {*ABSENT}
