"""`vllm serve` for builds whose distribution is not called vllm: its own entry asks for that name.

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
