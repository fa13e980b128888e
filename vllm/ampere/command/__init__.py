# SPDX-License-Identifier: Apache-2.0
"""`vllm ampere …`: the subcommands, each a module that is imported when it is asked for.

Such a module has `add_arguments(parser)` and `run(args) -> int`, the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import sys

#: name -> (module, what it does in a line)
COMMANDS = {
    "check": ("vllm.ampere.command.check", "say what a checkpoint holds and what is wrong with it, from its headers"),
    "flatten-ple": ("vllm.ampere.command.flatten_ple", "write a checkpoint's n-gram table into one file of its own"),
}


def main(argv: list[str] | None = None) -> int:
    """Run `vllm ampere ARGV`; returns the exit status. Usage errors exit with 2, as argparse does."""
    # On use: its module brings in torch. Options of a server are spelled as there, JSON objects by dotted flags too.
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        # A server's shows groups of options only, of which there are none here.
        format_help = argparse.ArgumentParser.format_help

    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(
        prog="vllm ampere",
        description="Tools for Qwen3.8-Flash-Next on several cards.",
        formatter_class=argparse.HelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, (module, summary) in COMMANDS.items():
        sub = subparsers.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == chosen:
            command = importlib.import_module(module)
            sub.description = command.__doc__
            command.add_arguments(sub)
            sub.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    return args.run(args)
