# SPDX-License-Identifier: Apache-2.0
"""Options that take a JSON object and are also given by dotted flags: one value made of both.

Upstream collects dotted flags (`--compilation-config.mode 0`) into a JSON object of their own and appends it to the
command line, where argparse keeps the last value of an option: a JSON value that the user gave for the same option
disappears without a word. The same happens to the flags of two spellings, as in `-cc.mode 0
--compilation-config.cudagraph_capture_sizes [1,2]`. Here such an option gets a single JSON value before upstream's
pass runs, and every other option is left as it was.

What the user gets:
- keys of both forms, nested ones included;
- where both set the same key, the one later on the command line, with a warning. The entries of a `--config` file
  stand before the command line's, so the command line wins over the file in either form;
- `--x.list+ a,b` adds to a list of the JSON value. A plain dotted flag replaces it, but adds to what dotted flags
  before it gave, which is upstream's rule for repeated flags;
- of several JSON values the last, as for any repeated option; upstream warns about the others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)

Path = tuple[str, ...]


@dataclass(frozen=True)
class Given:
    """One use of an option: `args[start:end]`, and the keys of its dotted form, none for the JSON form."""

    start: int
    end: int
    flag: str
    option: str
    path: Path
    text: str
    adds: bool


def merge_config_options(parser: argparse.ArgumentParser, args: list[str]) -> list[str]:
    """`args` with one JSON value for each option that stands there in more than one form.

    `args` are spelled as upstream's first pass leaves them: dashes up to the first dot. `parser` may be one with
    subcommands; those that `args` name are looked into for the option's other spellings.

    Raises:
        SystemExit: through `parser.error`, when flags are to be added to a value that is not a JSON object.
    """
    dropped: set[int] = set()
    replaced: dict[int, list[str]] = {}
    *_, complaining = reached_parsers(parser, args)
    for option, uses in uses_by_option(parser, args).items():
        # One spelling in one form is upstream's to parse.
        if len({(use.flag, bool(use.path)) for use in uses}) == 1 or not any(use.path for use in uses):
            continue
        value = merged(complaining, option, uses)
        last_json = last_json_of(uses)
        parts = [use for use in uses if use.path or use is last_json]
        for use in parts:
            dropped.update(range(use.start, use.end))
        # At the place of the last one, so that an earlier JSON value, which argparse drops, stays before it.
        replaced[parts[-1].start] = [option, json.dumps(value)]
    return [word for at, arg in enumerate(args) for word in (replaced.get(at, []) if at in dropped else [arg])]


def uses_by_option(parser: argparse.ArgumentParser, args: list[str]) -> dict[str, list[Given]]:
    """Every use of an option that takes a value, by the option's longest spelling, in the order of `args`."""
    spellings = option_spellings(parser, args)
    uses: dict[str, list[Given]] = {}
    at = 0
    while at < len(args):
        use = read_use(args, at, spellings)
        if use is not None:
            uses.setdefault(use.option, []).append(use)
        at = use.end if use is not None else at + 1
    return uses


def read_use(args: list[str], at: int, spellings: dict[str, str]) -> Given | None:
    """The use of an option that starts at `args[at]`, if one does and its value is there."""
    name, equals, text = args[at].partition("=")
    flag, *path = name.split(".")
    option = option_of(flag, spellings)
    if option is None:
        return None
    end = at + 1
    if not equals:
        # A flag without its value is argparse's to report.
        if end == len(args):
            return None
        text, end = args[end], end + 1
    adds = bool(path) and path[-1].endswith("+")
    if adds:
        path[-1] = path[-1][:-1]
    return Given(at, end, flag, option, tuple(path), text, adds)


def option_of(flag: str, spellings: dict[str, str]) -> str | None:
    """The option that argparse takes `flag` for: by its spelling, or by the beginning of a long one if it is clear."""
    if flag in spellings or not flag.startswith("--") or flag == "--":
        return spellings.get(flag)
    options = {option for spelling, option in spellings.items() if spelling.startswith(flag)}
    return options.pop() if len(options) == 1 else None


def option_spellings(parser: argparse.ArgumentParser, args: list[str]) -> dict[str, str]:
    """Flag to the longest spelling of its option, for options that take one value."""
    spellings: dict[str, str] = {}
    for reached in reached_parsers(parser, args):
        for action in reached._actions:
            if action.nargs is None and action.option_strings:
                spellings.update(dict.fromkeys(action.option_strings, max(action.option_strings, key=len)))
    return spellings


def reached_parsers(parser: argparse.ArgumentParser, args: list[str]) -> Iterator[argparse.ArgumentParser]:
    """`parser` and those of the subcommands that `args` start with: `serve`, or `bench serve`."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and args and args[0] in action.choices:
            yield from reached_parsers(action.choices[args[0]], args[1:])


def last_json_of(uses: list[Given]) -> Given | None:
    return next((use for use in reversed(uses) if not use.path), None)


def merged(parser: argparse.ArgumentParser, option: str, uses: list[Given]) -> dict[str, Any]:
    """The keys of the last JSON value and of all dotted flags; the later use wins a key."""
    value: dict[str, Any] = {}
    from_flags: set[Path] = set()
    overruled: set[Path] = set()
    last_json = last_json_of(uses)
    for use in uses:
        if use.path:
            given = parse_flag_value(use)
        elif use is last_json:
            given = parse_object(parser, option, use.text)
        else:
            continue
        for path, leaf in leaves(given, use.path):
            joins = use.adds or (bool(use.path) and path in from_flags)
            if put(value, path, leaf, joins):
                overruled.add(path)
            if use.path:
                from_flags.add(path)
    if overruled:
        logger.warning(
            "Set more than once; the last on the command line counts: %s",
            ", ".join(sorted(".".join((option, *path)) for path in overruled)),
        )
    return value


def put(tree: dict[str, Any], path: Path, leaf: Any, joins: bool) -> bool:
    """Set `path` in `tree`; a list is added to the one there if `joins`. True if another value had to give way."""
    *parents, last = path
    gave_way = False
    for key in parents:
        if not isinstance(tree.get(key), dict):
            gave_way |= key in tree
            tree[key] = {}
        tree = tree[key]
    if joins and isinstance(leaf, list) and isinstance(tree.get(last), list):
        tree[last] = tree[last] + leaf
        return gave_way
    gave_way |= last in tree and tree[last] != leaf
    tree[last] = leaf
    return gave_way


def leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Paths and values of everything in `value` that is no object with keys. An empty root has none."""
    if isinstance(value, dict) and (value or not path):
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    else:
        yield path, value


def parse_flag_value(use: Given) -> Any:
    """A dotted flag's value as upstream reads it: JSON, a number with a suffix (`80g`), or the text itself."""
    if use.adds:
        return use.text.split(",")
    # Upstream's module imports this one while it parses.
    from vllm.utils.argparse_utils import human_readable_int

    for parse in (json.loads, human_readable_int):
        try:
            return parse(use.text)
        except (ValueError, argparse.ArgumentTypeError):
            continue
    return use.text


def parse_object(parser: argparse.ArgumentParser, option: str, text: str) -> dict[str, Any]:
    """The JSON object of an option. Empty text and `None` are upstream's ways to say that there is none."""
    if text in ("", "None"):
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        parser.error(f"argument {option}: not valid JSON, so {option}.* flags cannot be added to it ({error}): {text}")
    if not isinstance(value, dict):
        parser.error(f"argument {option}: {option}.* flags can only be added to a JSON object, not to: {text}")
    return value
