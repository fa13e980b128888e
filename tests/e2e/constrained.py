"""Answers with a grammar each, beside answers with none: who gets another's mask, or none, answers with something else."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from demo.client import MODEL

#: For the server: the grammar of JSON has no blanks, of which a random model would write nothing else.
ARGUMENTS = ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']

_PATTERN = r"[a-f]{3}-[0-9]{4}"


def _schema(kinds: list[str]) -> dict:
    fields = {"stage": {"type": "integer", "minimum": 0, "maximum": 9}, "kind": {"enum": kinds}}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _fits(kinds: list[str], text: str) -> bool:
    found = json.loads(text)
    return set(found) == {"stage", "kind"} and found["kind"] in kinds and found["stage"] in range(10)


def _json(kinds: list[str]) -> tuple[dict, partial]:
    named = {"name": "part", "schema": _schema(kinds)}
    return {"response_format": {"type": "json_schema", "json_schema": named}}, partial(_fits, kinds)


#: name -> what the request asks for, and whether an answer fits it
GRAMMARS = {
    "dense": _json(["gdn", "router"]),
    "sparse": _json(["qsa", "indexer"]),
    "pattern": ({"extra_body": {"structured_outputs": {"regex": _PATTERN}}}, partial(re.fullmatch, _PATTERN)),
    "choice": ({"extra_body": {"structured_outputs": {"choice": ["two", "three"]}}}, ("two", "three").__contains__),
}


def ask(client, name: str) -> str:
    """The answer to a question of its own, held to the grammar of that name; raises where it does not fit."""
    fields, fits = GRAMMARS[name]
    question = [{"role": "user", "content": f"Which stage waits, {name}?"}]
    done = client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=64, **fields)
    (choice,) = done.choices
    assert choice.finish_reason == "stop", (name, choice)
    assert fits(choice.message.content), (name, choice.message.content)
    return choice.message.content


def all_at_once(client, beside) -> dict[str, str]:
    """Answers by grammar, all asked together with whatever `beside` asks."""
    with ThreadPoolExecutor(len(GRAMMARS) + 1) as users:
        free = users.submit(beside)
        answers = dict(zip(GRAMMARS, users.map(partial(ask, client), GRAMMARS), strict=True))
        free.result()
    return answers
