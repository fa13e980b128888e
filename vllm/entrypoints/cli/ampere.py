# SPDX-License-Identifier: Apache-2.0
"""`vllm ampere`: enters the commands of `vllm.ampere.command` into vLLM's own command line."""

from __future__ import annotations

import argparse
import sys

from vllm.ampere.command import main
from vllm.entrypoints.cli.types import CLISubcommand

_NAME = "ampere"


def run_if_asked() -> None:
    """End the process with a command's status if this is `vllm ampere …`; else do nothing.

    Called before the other subcommands are imported: these bring in the whole engine, and a look at headers should
    not wait for it.
    """
    if sys.argv[1:2] == [_NAME]:
        sys.exit(main(sys.argv[2:]))


class AmpereSubcommand(CLISubcommand):
    """The entry in `vllm --help`."""

    name = _NAME

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        sys.exit(main(args.arguments))

    def subparser_init(self, subparsers):
        parser = subparsers.add_parser(
            _NAME,
            help="Look at a checkpoint before it is served (vllm ampere check); vllm ampere --help lists more.",
            add_help=False,
        )
        parser.add_argument("arguments", nargs=argparse.REMAINDER)
        return parser


def cmd_init() -> list[CLISubcommand]:
    return [AmpereSubcommand()]
