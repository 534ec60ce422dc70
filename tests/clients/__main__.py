"""`python -m tests.clients [NAME…]`: does each client of an RL framework, unmodified, as PyPI has
it, roll out through our gateway?

Each has an environment of its own (deploy/clients/install) and a driver that runs there, uses the
client's own public API and checks what it returns. All of them ask one gateway, over a real
dedicated engine and a real harvested one. Ends with 1 when a client fails.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harvester.contracts.clock import MonotonicClock
from tests.clients.catalogue import CLIENTS
from tests.clients.rollout_fleet import JOB, RolloutFleet, rollout_fleet
from tests.clients.verdict import Client, Counted, faults

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
_TAIL_LINES = 40


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}")
    parser.add_argument("--json", type=Path, help="where to write the facts")
    given = parser.parse_args()
    unknown = sorted(set(given.names) - set(CLIENTS))
    if unknown:
        parser.error(f"no such client: {', '.join(unknown)}; there are {', '.join(CLIENTS)}")
    clients = [CLIENTS[name] for name in given.names or CLIENTS]
    for client in clients:
        subprocess.run([CHECKOUT / "deploy/clients/install", client.environment], check=True)
    results = asyncio.run(_results(clients))
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(results, indent=1))
    sys.exit(any(result["faults"] for result in results.values()))


async def _results(clients: list[Client]) -> dict[str, Any]:
    clock = MonotonicClock()
    with tempfile.TemporaryDirectory(prefix="rosemux-clients-") as folder:
        async with rollout_fleet(Path(folder)) as fleet:
            results = {}
            for client in clients:
                began_s = clock.now()
                results[client.name] = result = await _result(fleet, client)
                result["wall_s"] = round(clock.now() - began_s, 1)
                print(_line(client, result), flush=True)
            return results


async def _result(fleet: RolloutFleet, client: Client) -> dict[str, Any]:
    before = Counted.of(await fleet.status(), JOB)
    log = fleet.logs / f"{client.name}.log"
    said, status = await _driven(fleet, client, log)
    counted = Counted.of(await fleet.status(), JOB).since(before)
    served = {"dedicated": counted.dedicated_tokens, "guest": counted.guest_tokens}
    if status != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        print(f"{client.name}: the end of its log:\n{tail}", file=sys.stderr)
        return {"faults": [f"the driver ended with {status}"], "served": served}
    facts = json.loads(said.splitlines()[-1])
    return {"faults": faults(client, facts, counted), "served": served} | facts


async def _driven(fleet: RolloutFleet, client: Client, log: Path) -> tuple[str, int | str]:
    """Standard output of the driver and its exit status; its messages go to `log`."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(CHECKOUT),
        "PYTHONUNBUFFERED": "1",
        "ROSEMUX_JOB": JOB,
        "ROSEMUX_MODEL": str(fleet.model),
        "ROSEMUX_STORE": str(fleet.store),
        "ROSEMUX_URL": fleet.url,
        "TMPDIR": str(fleet.logs.parent),
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    with log.open("wb") as messages:
        process = await asyncio.create_subprocess_exec(
            str(CHECKOUT / "build/clients" / client.environment / "bin/python"),
            str(HERE / client.driver),
            cwd=fleet.logs.parent,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=messages,
        )
        try:
            async with asyncio.timeout(client.timeout_s):
                said, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            return "", f"no result after {client.timeout_s:g} s"
    assert process.returncode is not None
    return said.decode(), process.returncode


def _line(client: Client, result: dict[str, Any]) -> str:
    verdict = "; ".join(result["faults"]) or "works"
    served = result["served"]
    return (
        f"{client.name}: {verdict} ({result.get('turns', 0)} turns, {served['dedicated']} tokens "
        f"of the dedicated engine, {served['guest']} of the harvested one, {result['wall_s']} s)"
    )


if __name__ == "__main__":
    main()
