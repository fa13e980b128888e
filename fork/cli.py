"""The command line: arguments in, one sentence out when something is wrong."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fork import (
    branch,
    check,
    fetch,
    flavour,
    installed,
    onto,
    package,
    plan,
    rebase,
    requirements,
    table,
    topics,
    tree,
    upstream,
)
from fork.base import WheelBase
from fork.errors import ForkError
from fork.progress import say
from fork.repo import HERE, Repo


def main(arguments: list[str] | None = None, repo: Repo = HERE) -> int:
    """0 done, 1 a check found problems, 2 refused."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "apply":
        if options.revert and not options.installed:
            parser.error("--revert goes with --installed; a tree in DIR is simply removed")
        if options.installed and (options.folder or options.link or options.flavour):
            parser.error("--installed takes no DIR, --link or --flavour: the installed package is what it is")
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
    if options.installed:
        return _installed(repo, options)
    made = plan.make(repo, options.flavour or flavour.written(repo, options.folder))
    folder = options.folder or repo.tree(made.flavour.name)
    # Without DIR it is the tree of the editable install, whose modules are links.
    written = tree.write(made, folder, link=options.link or options.folder is None, force=options.force)
    counts = f"{len(made.outcome.files)} files edited, {len(made.outcome.added)} modules added"
    say(f"{folder}: {made.version}, {counts}" if written else f"{folder}: already applied, nothing to do")
    return 0


def _installed(repo: Repo, options: argparse.Namespace) -> int:
    found = package.find()
    if options.revert:
        say(f"{found.site}: {installed.revert(found, options.force)} files are upstream's again")
    else:
        written = installed.apply(repo, found, options.force)
        say(f"{found.site}: {'series applied' if written else 'already applied, nothing to do'}")
    return 0


def _check(repo: Repo, options: argparse.Namespace) -> int:
    report = check.run(repo, write=options.write)
    print(report.table)
    for problem in report.problems:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if report.problems else 0


def _branch(repo: Repo, options: argparse.Namespace) -> int:
    release = upstream.load(repo.upstream_toml)
    series = topics.load_all(repo)
    branch.write(repo, release, series, _pinned(release), options.folder)
    say(f"{options.folder}: vLLM {release.version} and {len(series)} topics on branch {branch.BRANCH}")
    return 0


def _rebase(repo: Repo, options: argparse.Namespace) -> int:
    release = upstream.load(repo.upstream_toml)
    with onto.base(options.onto, release) as base:
        found = rebase.verdicts(repo, topics.load_all(repo), _pinned(release), base)
    print(table.text(("topic", "file", "rule", "verdict"), [(v.topic, v.file, v.rule, v.text) for v in found]))
    broken = [verdict for verdict in found if not verdict.holds]
    print(f"{len(found) - len(broken)} of {len(found)} hold on {options.onto}")
    return 1 if broken else 0


def _pinned(release: upstream.Upstream) -> WheelBase:
    key = release.bases[0]
    return WheelBase(fetch.ensure(release, [key])[key])


def _requirements(repo: Repo, options: argparse.Namespace) -> int:
    found = plan.sources(repo, options.flavour)
    print("\n".join(requirements.derive(found.flavour, found.wheels)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fork", description=__doc__)
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
    sub.add_argument("--force", action="store_true", help="drop what was changed by hand")
    sub.add_argument("--installed", action="store_true", help="edit the installed vllm of this interpreter in place")
    sub.add_argument("--revert", action="store_true", help="with --installed: restore upstream's files")

    sub = command("check", _check, "prove the series on the pinned release, and its pages and near misses")
    sub.add_argument("--write", action="store_true", help="write the generated files instead of comparing them")

    sub = command("docs", _check, "the same as check --write")
    sub.set_defaults(write=True)

    sub = command("branch", _branch, "write the series as a git repository, one commit per topic")
    sub.add_argument("folder", type=Path, metavar="DIR")

    sub = command("rebase", _rebase, "try every rule on another upstream release")
    sub.add_argument("--onto", required=True, metavar="vllm==X|WHEEL|CHECKOUT")

    sub = command("requirements", _requirements, "print the dependencies derived for a flavour")
    with_flavour(sub)
    return parser
