"""`rosemux guest`: from the agent's file to a started engine, with programs that play the driver,
the MPS daemon and vLLM."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from coserve.guest import isolation
from coserve.vllm.capabilities import installed_vllm_version
from harvester.agent.guest_engine import GuestEngine
from harvester.cli import main
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import Grant, GrantMode, PageDirectory, ProductionModel, Pulse
from harvester.contracts.process import process_ids
from tests.mps_daemon import EXECUTABLE, MpsDaemon

SLOT = """\
mode: harvest
page_root: {folder}/pages
state_dir: {folder}/state
slots:
  - name: slot0
    engine_url: http://127.0.0.1:8001
    concurrency: 4
    policy: {{blocking_ratio: 0.2}}
    guest:
      model: {folder}
      weights: {folder}
      context_tokens: 512
      kv_cache_bytes: 2147483648
"""
# vLLM's server: it writes down how it was started and waits for its end.
SERVER = """
import json, os, sys, time
from pathlib import Path
folder = Path(os.environ["ROSEMUX_WEIGHT_ROOT"])
said = {"arguments": sys.argv[1:], "environment": dict(os.environ),
        "policy": os.sched_getscheduler(0), "pid": os.getpid()}
(folder / "new").write_text(json.dumps(said))
(folder / "new").rename(folder / "started.json")
time.sleep(300)
"""
Write = Callable[..., Path]


def prepare(folder: Path) -> None:
    """The files that a guest needs, in one folder."""
    (folder / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    PageDirectory.create(folder / "pages/slot0")


def fake_vllm(folder: Path, text: str) -> None:
    """A stand-in for vLLM in a process with `folder` on its path: the real import takes seconds."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm/__init__.py").write_text(text)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(*more: str) -> Path:
        """Lines added to the guest, or, with four spaces less, to the slot."""
        prepare(tmp_path)
        file = tmp_path / "agent.yaml"
        text = SLOT.format(folder=tmp_path) + "".join(f"      {line}\n" for line in more)
        file.write_text(text.replace("      ^", "    "))
        return file

    return write


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs found before any real ones."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "300")
    fake_vllm(tmp_path / "fake", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/fake:{os.environ.get('PYTHONPATH', '')}")
    return folder


@pytest.fixture
def driver(programs: Path) -> Callable[[str], None]:
    def says(text: str) -> None:
        (programs / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{text}'\n")
        (programs / "nvidia-smi").chmod(0o755)

    return says


@pytest.fixture
def daemon(tmp_path: Path, programs: Path) -> MpsDaemon:
    (programs / "nvidia-cuda-mps-control").symlink_to(EXECUTABLE)
    (tmp_path / "pipes").mkdir()
    return MpsDaemon(tmp_path / "pipes")


def said(
    config: Path, capsys: pytest.CaptureFixture[str], *more: str, dry_run: bool = True
) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main(["guest", "--config", str(config), *(["--dry-run"] if dry_run else []), *more])
    shown = capsys.readouterr()
    return int(left.value.code or 0), " ".join((shown.out + shown.err).split())


def test_a_gpu_guest_without_consent_takes_turns_and_joins_no_daemon(
    write: Write, driver: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    driver("GPU-1, Default\\n")
    code, shown = said(write(), capsys)
    assert code == 0
    assert "time-slicing │ taken" in shown
    assert "mps │ not here │ mps takes an operator's consent" in shown
    assert "static │ taken │ 2.00 GiB of KV on each GPU" in shown
    assert "blocking_ratio 0.2 is yours: time-slicing promises 1" in shown
    assert "CUDA_VISIBLE_DEVICES=GPU-1 " in shown
    assert "--kv-cache-memory-bytes 2147483648" in shown
    # CUDA would silently join a daemon in its default directory.
    assert "CUDA_MPS_PIPE_DIRECTORY=/nonexistent " in shown
    assert "production needs" not in shown


@pytest.mark.parametrize("idle", [True, False])
def test_a_gpu_guest_in_an_idle_group_is_warned_of(
    write: Write,
    driver: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    idle: bool,
) -> None:
    driver("GPU-1, Default\\n")
    monkeypatch.setattr("harvester.cli.guest.is_under_idle", lambda group: idle)
    code, shown = said(write(), capsys)
    assert code == 0
    assert ("WARNING: this control group is idle" in shown) is idle


def test_engines_get_the_users_of_trusted_pages(
    tmp_path: Path,
    write: Write,
    driver: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver("")
    monkeypatch.setenv("ROSEMUX_AGENT_PAGE_GROUP", "5")
    own, pages = os.geteuid(), tmp_path / "pages/slot0"
    PageDirectory.create(pages)
    named = f"^owners: {{agent: [{own}], production: [4242], guest: [{own}]}}"
    _, shown = said(write(named), capsys)
    assert f"pages: good: {pages}" in shown
    owners = f"ROSEMUX_PAGE_OWNERS=agent:{own},production:4242,guest:{own}"
    assert f"production needs, with one restart: {owners}" in shown
    assert shown.count(owners) == 2


def test_no_guest_starts_beside_production_that_does_not_fit(
    tmp_path: Path,
    write: Write,
    driver: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    driver("")
    pages = PageDirectory.create(tmp_path / "pages/slot0")
    pulse = Pulse(unfit="a replica over 2 nodes; harvest replicas of one node")
    writer = pages.pulse_writer("production", 0)
    writer.write(pulse, now_ns=monotonic_ns(), ttl_ns=10**11)
    code, shown = said(write(), capsys)
    assert code == 2
    assert "production (pulse.production.0) does not fit: a replica over 2 nodes" in shown
    assert "harvest replicas of one node" in shown


def test_no_guest_starts_on_a_gpu_of_another_production(
    tmp_path: Path,
    write: Write,
    driver: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    driver("GPU-1, Default\\nGPU-2, Default\\n")
    pages = PageDirectory.create(tmp_path / "pages/slot0")
    writer = pages.pulse_writer("production", 0)
    for used, code in ((("GPU-2",), 75), (("GPU-1", "GPU-2"), 0), ((), 0)):
        writer.write(Pulse(gpus=used), now_ns=monotonic_ns(), ttl_ns=10**11)
        left, shown = said(write("gpus: [GPU-1]"), capsys)
        assert left == code, shown
        refused = "would be on GPU-1, and production runs on GPU-2: name those in guest.gpus"
        assert (refused in shown) is bool(code)


def test_a_guest_of_a_user_that_the_agent_would_not_believe_is_not_started(
    tmp_path: Path,
    write: Write,
    driver: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver("")
    monkeypatch.setenv("ROSEMUX_AGENT_PAGE_GROUP", "5")
    PageDirectory.create(tmp_path / "pages/slot0")
    stranger = os.geteuid() + 1
    code, shown = said(write(f"^owners: {{guest: [{stranger}]}}"), capsys, dry_run=False)
    assert (code, f"owners.guest names user {stranger}" in shown) == (2, True), shown


def test_mps_is_consent_in_the_slot_and_a_word_in_the_guest(
    write: Write,
    driver: Callable[[str], None],
    daemon: MpsDaemon,
    capsys: pytest.CaptureFixture[str],
) -> None:
    driver("GPU-1, Exclusive_Process\\n")
    agreed = f"^mps: {{pipe_directory: {daemon.pipes}, timeout_s: 30}}"
    asked = ("isolation: mps", "active_thread_percentage: 25")
    code, shown = said(write(*asked), capsys)
    assert code == 2
    assert "rosemux: mps takes an operator's consent" in shown
    code, shown = said(write(*asked, agreed), capsys)
    assert code == 0
    assert "mps │ taken" in shown
    assert "shared fate: a fault of the guest ends production" in shown
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25 " in shown
    assert f"production needs, with one restart: CUDA_MPS_PIPE_DIRECTORY={daemon.pipes}" in shown
    assert "this MPS daemon has no client" in shown
    driver("GPU-1, Default\\n")
    code, shown = said(write(agreed), capsys)
    assert code == 0
    assert "mps has consent but no guest uses it" in shown
    daemon.stop()
    code, shown = said(write(*asked, agreed), capsys)
    assert code == 2
    assert "mps │ not here │ no MPS daemon answers" in shown
    daemon.serve({70: [7]})
    code, shown = said(write(*asked, agreed), capsys)
    assert (code, "daemon has no client" in shown) == (0, False)
    asked_of_it = {command.split()[0] for command in daemon.commands()}
    assert asked_of_it == {"get_server_list", "get_client_list"}, "nothing of it is changed"


def test_kv_is_shared_by_consent_where_this_vllm_can(
    write: Write, driver: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    driver("GPU-1, Default\\n")
    agreed = "^kvcached: {production: [prod_kv], guest: guest_kv, total_bytes: 4294967296}"
    code, shown = said(write(agreed), capsys)
    assert code == 2
    assert "shared │ not here │ memory level `shared` needs kvcached beside vLLM" in shown


def test_the_slot_s_gpus_are_named_where_there_are_several(
    write: Write, driver: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    driver("GPU-1, Default\\nGPU-2, Default\\nGPU-3, Default\\n")
    code, shown = said(write(), capsys)
    assert code == 2
    assert shown.endswith("rosemux: gpus: name the slot's GPUs out of GPU-1, GPU-2, GPU-3")
    code, shown = said(write("gpus: [GPU-9]"), capsys)
    assert (code, "no GPU-9 here; nvidia-smi lists GPU-1" in shown) == (2, True)
    code, shown = said(write("gpus: [GPU-3, GPU-1]", "arguments: [--seed, '7']"), capsys)
    assert code == 0
    assert "CUDA_VISIBLE_DEVICES=GPU-3,GPU-1 " in shown
    assert "--tensor-parallel-size 2 --seed 7" in shown


def test_a_discovered_slot_waits_for_the_gpus_that_production_states(
    tmp_path: Path,
    write: Write,
    driver: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Status 2 would end its unit for good."""
    driver("GPU-1, Default\\nGPU-2, Default\\n")
    agent = write()
    settings = yaml.safe_load(agent.read_text())
    slots = tmp_path / "slots.yaml"
    slots.write_text(yaml.safe_dump({"slots": settings.pop("slots")}))
    agent.write_text(yaml.safe_dump({**settings, "slots_file": str(slots)}))
    code, shown = said(agent, capsys)
    assert (code, "until production states its own" in shown) == (75, True), shown
    slots.write_text(slots.read_text().replace("guest:", "guest:\n    gpus: [GPU-2]"))
    code, shown = said(agent, capsys)
    assert (code, "CUDA_VISIBLE_DEVICES=GPU-2 " in shown) == (0, True), shown


def test_a_driver_that_is_ill_is_no_machine_without_a_gpu(
    write: Write, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (programs / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (programs / "nvidia-smi").chmod(0o755)
    code, shown = said(write(), capsys)
    assert (code, "its driver has failed" in shown) == (2, True)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("    guest:", "    x_guest:"), "x_guest"),
        (("127.0.0.1:8001", "127.0.0.1"), "engine_url needs a port"),
        (("  - name: slot0", "  - name: other\n  - name: slot0"), "choose one of other, slot0"),
        (("model: {folder}", "model: {folder}/absent"), "guest.model"),
        (("kv_cache_bytes: 2147483648", "kv_cache_bytes: 7"), "at least one"),
        (("2147483648", "1099511627776"), "1024.00 GiB of KV do not fit into the "),
        (("  - name: slot0", "  - name: slot0\n    memory_group: {folder}"), "into the 1.00 GiB"),
        ((" ", " "), "start `rosemux agent` first"),
        (("weights: {folder}", "weights: {folder}/absent"), "guest.weights"),
    ],
)
def test_a_fault_for_the_operator_is_one_line(
    change: tuple[str, str],
    complaint: str,
    tmp_path: Path,
    programs: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(SLOT.replace(*change).format(folder=tmp_path))
    group = {"memory.current": "0", "memory.max": f"{1 << 30}", "memory.stat": "inactive_file 0"}
    for name, text in group.items():
        (tmp_path / name).write_text(text)
    code, shown = said(file, capsys, dry_run=False)
    assert (code, complaint in shown) == (2, True), shown


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGHUP])
def test_starts_the_engine_and_leaves_nothing(
    asked: signal.Signals,
    tmp_path: Path,
    write: Write,
    driver: Callable[[str], None],
    daemon: MpsDaemon,
) -> None:
    driver("GPU-1, Default\\n")
    agreed = f"^mps: {{pipe_directory: {daemon.pipes}, timeout_s: 30}}"
    config = write("isolation: mps", agreed)
    server = tmp_path / "python/vllm/entrypoints/openai/api_server.py"
    server.parent.mkdir(parents=True)
    server.write_text(SERVER)
    for package in [*server.parents][:3]:
        (package / "__init__.py").touch()
    path = f"{tmp_path / 'python'}:{os.environ.get('PYTHONPATH', '')}"
    command = subprocess.Popen(
        [sys.executable, "-m", "harvester.cli", "guest", "--config", str(config)],
        env=os.environ | {"PYTHONPATH": path},
    )
    try:
        while not (tmp_path / "started.json").exists():
            assert command.poll() is None, "it ended before its engine began"
            time.sleep(0.05)
        started = json.loads((tmp_path / "started.json").read_text())
        daemon.serve({70: [7, started["pid"]]})
        command.send_signal(asked)
        assert command.wait(120) == 0
    finally:
        command.kill()
        command.wait()
    environment, arguments = started["environment"], started["arguments"]
    assert environment["ROSEMUX_ISOLATION"] == "mps"
    assert environment["ROSEMUX_PAGE_DIR"] == str(tmp_path / "pages/slot0")
    assert environment["ROSEMUX_SLOT"] == "slot0"
    assert environment["CUDA_MPS_PIPE_DIRECTORY"] == str(daemon.pipes)
    assert arguments[arguments.index("--max-num-seqs") + 1] == "4"
    assert started["policy"] == os.SCHED_BATCH, "a GPU guest ranks below production on the host"
    assert f"terminate_client 70 {started['pid']}" in daemon.commands()
    assert not Path(f"/proc/{started['pid']}").exists()


def test_a_guest_that_may_not_leave_the_idle_class_ends_as_asked(
    write: Write,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def run(_: GuestEngine) -> int:
        return 0

    def refuse() -> None:
        raise PermissionError("no LimitNICE in the unit")

    monkeypatch.setattr(GuestEngine, "run", run)
    monkeypatch.setattr(isolation, "apply_to_process", lambda _: None)
    monkeypatch.setattr(isolation, "lift_from_process", refuse)
    code, shown = said(write(), capsys, dry_run=False)
    assert code == 0, shown


def test_a_dry_run_says_of_each_thing_that_a_guest_needs_whether_it_is_there(
    write: Write, programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write()
    code, shown = said(config, capsys)
    assert code == 0, shown
    assert f"vLLM: good: {installed_vllm_version()}, run by {sys.executable}" in shown
    assert "model: good: Qwen2ForCausalLM" in shown
    assert "weights: good" in shown
    assert "pages: good" in shown
    assert "grant missing: the guest would wait for `rosemux agent`" in shown
    pages = PageDirectory(tmp_path / "pages/slot0")
    pages.grant_writer().write(
        Grant(epoch=1, mode=GrantMode.CLOSED, reason="hold: rack [/b]\x1b[2J"),
        now_ns=monotonic_ns(),
        ttl_ns=3_600_000_000_000,
    )
    assert "grant closed (hold: rack [/b] [2J)" in said(config, capsys)[1]


def test_a_dry_run_looks_whether_the_isolation_holds_beside_production(
    write: Write, programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, pages = write("isolation: idle"), PageDirectory(tmp_path / "pages/slot0")
    assert "DOES NOT HOLD, its steps count whole: no grant names" in said(config, capsys)[1]
    for_an_hour_ns = 3_600_000_000_000
    grant = Grant(epoch=1, mode=GrantMode.CLOSED, pulses=("pulse.production.0",))
    pages.grant_writer().write(grant, now_ns=monotonic_ns(), ttl_ns=for_an_hour_ns)
    pulses = pages.pulse_writer("production", 0)
    idle, fault = ("chrt", "--idle", "0"), "has no effect: threads of the guest are in"
    other = ("chrt", "--other", "0")
    for before, text in ((other, "from here holds"), (idle, fault)):
        with subprocess.Popen([*before, "sleep", "60"]) as production:
            (root,) = process_ids([production.pid])
            pulses.write(Pulse(root=root), now_ns=monotonic_ns(), ttl_ns=for_an_hour_ns)
            code, shown = said(config, capsys)
            production.kill()
        assert (code, text in shown) == (0, True), shown
    command = [sys.executable, "-m", "harvester.cli", "guest", "--config", str(config), "--dry-run"]
    once = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "DOES NOT HOLD" in once.stdout
    assert once.stderr == "", "the log does not say it a second time"


def test_a_dry_run_states_what_the_law_lends_by_the_isolation_and_the_prompts_on_the_pages(
    write: Write, driver: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver("GPU-1, Default\\n")
    config, pages = write(), PageDirectory(tmp_path / "pages/slot0")
    unknown = "what production's pulse and the agent's grant permit: they are not there yet"
    assert f"the guest is lent {unknown}" in said(config, capsys)[1]
    for_an_hour_ns = 3_600_000_000_000
    model = ProductionModel(
        prefill_base_s=0.008, prefill_s_per_token=8e-5, decode_base_s=9e-3, decode_s_per_request=0.0
    )
    grant = Grant(epoch=1, mode=GrantMode.CLOSED, pulses=("pulse.production.0",), production=model)
    pages.grant_writer().write(grant, now_ns=monotonic_ns(), ttl_ns=for_an_hour_ns)
    assert f"the guest is lent {unknown}" in said(config, capsys)[1], "no pulse yet"
    prompts = Pulse(prompt_tokens_quantiles=(1000,) * 10, prompt_tokens_p99=1000)
    pulses = pages.pulse_writer("production", 0)
    pulses.write(prompts, now_ns=monotonic_ns(), ttl_ns=for_an_hour_ns)
    text = config.read_text()
    config.write_text(text.replace("blocking_ratio: 0.2", "blocking_ratio: auto"))
    code, shown = said(config, capsys)
    assert code == 0
    assert "until it has learned its own step times, the guest is lent steps of at most" in shown
    config.write_text(config.read_text().replace("mode: harvest", "mode: observe"))
    assert "the guest would, if mode were harvest, be lent steps" in said(config, capsys)[1]
    assert "% of production's idle time" in shown
    tight = text.replace("blocking_ratio: 0.2", "ttft_slo_s: 0.02, epsilon: 0.01")
    config.write_text(tight)
    shown = said(config, capsys)[1]
    assert "is lent nothing: the guest's shortest step takes 30" in shown
    assert "raise ttft_slo_s" in shown
    rose = text.replace("blocking_ratio: 0.2", "law: rose")
    config.write_text(f"unsafe_experiments: true\n{rose}")
    assert "is lent what its law admits" in said(config, capsys)[1]


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"architectures": []}', "\x00"])
def test_a_model_that_cannot_be_loaded_is_found_before_the_start(
    text: str | None,
    write: Write,
    programs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = write()
    if text is None:
        (tmp_path / "config.json").unlink()
    else:
        (tmp_path / "config.json").write_text(text)
    code, shown = said(config, capsys)
    assert (code, "model: WRONG: guest.model" in shown) == (2, True), shown
    assert "the guest would not start: guest.model" in shown


@pytest.mark.parametrize(
    ("more", "flag", "good"),
    [
        ({}, "--seed=1", False),
        ({"rope_parameters": {"rope_type": "default"}}, "--seed=1", False),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "--seed=1", True),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "--seed=1", True),
        ({"model_max_length": 131072}, "--seed=1", True),
        ({"max_position_embeddings": 512}, "--seed=1", True),
        ({}, "--hf_overrides={}", True),
        ({}, "--hf-overr={}", True),
        ({}, "--hf-config-path=/x", True),
    ],
)
def test_turns_longer_than_the_model_are_found_before_the_start(
    more: dict[str, object],
    flag: str,
    good: bool,
    write: Write,
    programs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = write(f"arguments: ['{flag}']")
    model = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(model | more))
    code, shown = said(config, capsys)
    assert code == (0 if good else 2), shown
    says = "guest.context_tokens: 512 is more than the model's max_position_embeddings, 256"
    assert (says in shown) is not good


def test_an_environment_without_vllm_is_reported_with_its_path_and_all_other_faults(
    write: Write,
    programs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = write()
    (tmp_path / "config.json").unlink()
    monkeypatch.setattr("coserve.vllm.capabilities.DISTRIBUTIONS", ())
    code, shown = said(config, capsys)
    assert code == 2
    assert "No vLLM is installed in this environment" in shown
    assert f"({sys.executable} would run the guest)" in shown
    assert "model: WRONG" in shown


def test_a_vllm_that_cannot_be_imported_is_found_by_a_dry_run(
    write: Write,
    programs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_vllm(tmp_path / "python", "raise ImportError('libcudart is not here')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/python:{os.environ.get('PYTHONPATH', '')}")
    code, shown = said(write(), capsys)
    assert (code, "libcudart is not here" in shown) == (2, True), shown
