"""Runs `uv pip install`, with the indexes, folders and certificates that pip is configured with.

uv unpacks in parallel where pip takes minutes, but reads neither pip's files nor its variables.
Called by `deploy/lock/install` with the environment's Python, which has pip and the locked uv.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
}
"""pip's setting, to uv's variable and what separates its values. No option of a command: an index's
address may hold a password, and every user sees commands."""


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
    for setting, (variable, separator) in VARIABLES.items():
        if values := settings.get(setting, "").split():
            os.environ.setdefault(variable, separator.join(values))
    uv = Path(sys.executable).with_name("uv")
    # The hashes decide which file is taken, so any index may have it.
    command = [str(uv), "pip", "install", "--python", sys.executable]
    command += ["--index-strategy", "unsafe-best-match", *sys.argv[1:]]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        command.append("--no-index")
    os.execv(uv, command)


if __name__ == "__main__":
    main()
