"""vLLM's own parser on command lines of a GPU machine: `LINES.json`, one list of arguments a name.

A process of its own: importing vLLM changes its process. No device is asked for anything.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

_MODULES = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
"""Newest first."""


def _cli_args() -> Any:
    for name in _MODULES:
        try:
            return import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(" and ".join(_MODULES))


def main(lines: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_args = _cli_args()
    found: dict[str, Any] = {}
    for name, arguments in json.loads(lines.read_text()).items():
        parsed = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
        cli_args.validate_parsed_serve_args(parsed)
        engine = AsyncEngineArgs.from_cli_args(parsed)
        compilation = engine.compilation_config
        found[name] = {
            "memory_ratio": engine.gpu_memory_utilization,
            "kv_bytes": engine.kv_cache_memory_bytes,
            "mode": int(compilation.mode),
            "graphs": str(compilation.cudagraph_mode),
            "eager": engine.enforce_eager,
            "requests": engine.max_num_seqs,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
