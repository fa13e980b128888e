"""The command line: arguments in, one sentence out when something is wrong."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fork import plan, requirements, tree
from fork.errors import ForkError
from fork.progress import say
from fork.repo import HERE, Repo


def main(arguments: list[str] | None = None, repo: Repo = HERE) -> int:
    """0 done, 1 a check found problems, 2 refused."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(repo, options)
    except ForkError as error:
        print(f"fork {options.command}: {error}", file=sys.stderr)
        return 2


def _fetch(repo: Repo, options: argparse.Namespace) -> int:
    for path in plan.sources(repo, options.flavour).wheels.values():
        print(path)
    return 0


def _apply(repo: Repo, options: argparse.Namespace) -> int:
    made = plan.make(repo, options.flavour)
    folder = options.folder or repo.tree(made.flavour.name)
    # Without DIR it is the tree of the editable install, whose modules are links.
    written = tree.write(made, folder, link=options.link or options.folder is None, force=options.force)
    counts = f"{len(made.outcome.files)} files edited, {len(made.outcome.added)} modules added"
    say(f"{folder}: {made.version}, {counts}" if written else f"{folder}: already applied, nothing to do")
    return 0


def _requirements(repo: Repo, options: argparse.Namespace) -> int:
    found = plan.sources(repo, options.flavour)
    print("\n".join(requirements.derive(found.flavour, found.wheels)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fork", description=sys.modules["fork"].__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    def with_flavour(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--flavour", help="cuda or cpu; default: VLLM_TARGET_DEVICE, else what the machine has")

    sub = command("fetch", _fetch, "download and verify the upstream wheels of a flavour")
    with_flavour(sub)

    sub = command("apply", _apply, "write the forked tree")
    with_flavour(sub)
    sub.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="default: the editable install's tree")
    sub.add_argument("--link", action="store_true", help="link added modules to the repository instead of copying")
    sub.add_argument("--force", action="store_true", help="drop what was changed by hand in DIR")

    sub = command("requirements", _requirements, "print the dependencies derived for a flavour")
    with_flavour(sub)
    return parser
