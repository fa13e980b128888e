# SPDX-License-Identifier: Apache-2.0
"""A refusal ends a command with a sentence instead of a traceback."""

import argparse
import sys
from collections.abc import Callable

from pydantic import ValidationError

from vllm.ampere.finding import Finding


def in_a_sentence(command: Callable[[argparse.Namespace], object]) -> Callable[[argparse.Namespace], None]:
    """``command``, ending with status 1 and the messages of a refused checkpoint or setting where there are any.

    Only what was found before a process was started comes here; the place in our code that
    found it says nothing to whoever has to fetch a file again, or to change an option.
    """

    def run(args: argparse.Namespace) -> None:
        try:
            command(args)
        except Finding as finding:
            end([str(finding), *getattr(finding, "__notes__", ())])
        except ValidationError as error:
            if not (sentences := refused_settings(error)):
                raise
            end(sentences)

    return run


def refused_settings(error: ValidationError) -> list[str]:
    """What our checks of the configuration said; nothing where anything else is wrong with it too.

    They raise classes of their own, whose messages name setting, value and way out. pydantic wraps them, some dozens of
    lines below its own frames; what it finds itself, and a bare ValueError, keep their traceback.
    """
    causes = [found.get("ctx", {}).get("error") for found in error.errors(include_url=False, include_input=False)]
    ours = [cause for cause in causes if type(cause).__module__.startswith("vllm.")]
    return [str(cause) for cause in ours] if len(ours) == len(causes) else []


def end(sentences: list[str]) -> None:
    for sentence in sentences:
        print(f"refused: {sentence}", file=sys.stderr)
    sys.exit(1)
