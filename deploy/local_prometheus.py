"""Runs Debian's Prometheus on a free loopback port with the committed configuration and rules.

    python -m deploy.local_prometheus --scrape rosemux-agent=127.0.0.1:9711 ...

Only the addresses and the intervals differ from `prometheus/prometheus.yml`. Its data lie in a
temporary directory; neither that nor a listener is left when it ends, by Ctrl-C and SIGTERM too.
"""

import argparse
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError

CONFIG = Path(__file__).with_name("prometheus") / "prometheus.yml"
READY_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0


def render(targets: Mapping[str, Sequence[str]], *, interval: str) -> dict[str, Any]:
    """The committed configuration with these addresses by scrape job; other jobs are left out."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    known = {job["job_name"] for job in config["scrape_configs"]}
    if unknown := sorted(targets.keys() - known):
        raise ConfigError(f"no scrape job {unknown[0]!r}; use one of {', '.join(sorted(known))}")
    config["global"] = {"scrape_interval": interval, "evaluation_interval": interval}
    config["rule_files"] = [str(CONFIG.parent / pattern) for pattern in config["rule_files"]]
    config["scrape_configs"] = [
        {**job, "static_configs": [{"targets": list(targets[job["job_name"]])}]}
        for job in config["scrape_configs"]
        if job["job_name"] in targets
    ]
    return config


@contextmanager
def run_prometheus(
    targets: Mapping[str, Sequence[str]], *, interval: str = "1s", port: int = 0
) -> Iterator[str]:
    """The URL of a Prometheus that scrapes `targets`, until the block ends."""
    program = shutil.which("prometheus")
    if program is None:
        raise ConfigError(
            "prometheus is not installed: apt-get install --no-install-recommends prometheus"
        )
    with tempfile.TemporaryDirectory(prefix="rosemux-prometheus-") as name:
        directory = Path(name)
        (directory / "prometheus.yml").write_text(
            yaml.safe_dump(render(targets, interval=interval))
        )
        address = f"127.0.0.1:{port or _free_port()}"
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    program,
                    f"--config.file={directory / 'prometheus.yml'}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address={address}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            _wait_until_ready(process, f"http://{address}", directory / "log")
            yield f"http://{address}"
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    clock = MonotonicClock()
    deadline = clock.now() + READY_TIMEOUT_S
    while clock.now() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=1.0):
                return
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.05)
    raise ConfigError(f"prometheus did not start on {url}: {log.read_text()[-2000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--scrape", action="append", required=True, metavar="JOB=HOST:PORT[,...]")
    parser.add_argument("--port", type=int, default=0, help="0 chooses a free one")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    pairs = (entry.partition("=") for entry in options.scrape)
    targets = {job: addresses.split(",") for job, _, addresses in pairs}
    try:
        with run_prometheus(targets, port=options.port) as url:
            print(url, flush=True)
            while True:
                signal.pause()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
