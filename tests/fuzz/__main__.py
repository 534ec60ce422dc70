"""`python -m tests.fuzz [NAME…]`: does each API do what its OpenAPI document says, whatever it is
sent?

schemathesis makes requests from the document of each service, valid ones and wrong ones, and holds
replies to it: no 5xx, the statuses, content types and schemas that it names. Ends with 1 where one
does not, or where an operation was never served: then no handler was tested.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from tests.fuzz.services import CHECKOUT, SERVICES

_ENVIRONMENT = "schemathesis"
_CHECKS = (
    *("not_a_server_error", "status_code_conformance"),
    *("content_type_conformance", "response_schema_conformance"),
)
_QUICK = ("--phases", "examples,fuzzing", "--max-examples", "2")
_SEED = 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SERVICES)}")
    parser.add_argument("--examples", type=int, default=15, help="for each operation")
    parser.add_argument("--quick", action="store_true", help="a few requests of each, in seconds")
    given = parser.parse_args()
    unknown = sorted(set(given.names) - set(SERVICES))
    if unknown:
        parser.error(f"no such API: {', '.join(unknown)}; there are {', '.join(SERVICES)}")
    names = given.names or list(SERVICES)
    bounds = _QUICK if given.quick else ("--max-examples", str(given.examples))
    failed = [name for name in names if not asyncio.run(_conforms(name, bounds))]
    sys.exit(f"not as their documents say: {', '.join(failed)}" if failed else 0)


async def _conforms(name: str, bounds: tuple[str, ...]) -> bool:
    install = await asyncio.create_subprocess_exec(
        CHECKOUT / "deploy/clients/install", _ENVIRONMENT
    )
    if await install.wait():
        return False
    with tempfile.TemporaryDirectory(prefix="rosemux-fuzz-") as folder:
        async with SERVICES[name](Path(folder)) as service:
            document = await _document(service.url)
            service.known.narrow(document)
            file = Path(folder) / "document.json"
            file.write_bytes(msgspec.json.encode(document))
            fuzzer = await asyncio.create_subprocess_exec(
                CHECKOUT / f"build/clients/{_ENVIRONMENT}/bin/python",
                *("-m", "schemathesis.cli", "run", str(file), "--url", service.url),
                *("--checks", ",".join(_CHECKS), "--warnings", "off", *bounds),
                *("--seed", str(_SEED), "--request-timeout", "30", "--no-color"),
                cwd=folder,
            )
            status = await fuzzer.wait()
    missing = service.served.missing(document) - service.known.refused
    for operation in sorted(missing):
        print(f"{name}: never served: {operation}", file=sys.stderr)
    return not (status or missing)


async def _document(url: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/openapi.json") as reply:
        return await reply.json()


if __name__ == "__main__":
    main()
