"""`vllm serve` for builds with another distribution name: its own entry asks for the name vllm.

The single-process server that the other tests start takes no `--api-server-count`.
"""

import sys

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    serve = ServeSubcommand()
    parser = FlexibleArgumentParser()
    serve.subparser_init(parser.add_subparsers())
    arguments = parser.parse_args(["serve", *sys.argv[1:]])
    serve.validate(arguments)
    serve.cmd(arguments)
