"""Runs `uv pip install`, with the indexes, folders and certificates that pip is configured with.

uv unpacks in parallel where pip takes minutes, but reads neither pip's files nor its variables.
Called by `deploy/lock/install` with the environment's Python, which has pip and the locked uv.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

# Setting of pip -> uv's option. Each may hold several values, one after another.
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}


def pip_settings() -> dict[str, str]:
    """Setting by its plain name; a variable wins over the section `install`, that over `global`."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in said.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in sections:
            sections[section][name] = ast.literal_eval(value)
    return sections["global"] | sections["install"] | sections[":env:"]


def main() -> None:
    settings = pip_settings()
    uv = Path(sys.executable).with_name("uv")
    # The hashes decide which file is taken, so any index may have it.
    command = [str(uv), "pip", "install", "--python", sys.executable]
    command += ["--index-strategy", "unsafe-best-match", *sys.argv[1:]]
    for setting, option in OPTIONS.items():
        for value in settings.get(setting, "").split():
            command += [option, value]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        command.append("--no-index")
    if certificates := settings.get("cert"):
        os.environ.setdefault("SSL_CERT_FILE", certificates)
    os.execv(uv, command)


if __name__ == "__main__":
    main()
