# SPDX-License-Identifier: Apache-2.0
"""Which of a malformed request's validation errors are about what its author meant.

A field of several types is checked against each of them, and each that does not fit reports its errors.  An item of a
response's `input` has some forty types: a tool call without a name makes 203 errors, of which upstream shows the first
ten, all of types that the item is not.  The errors of one type are kept here: of that which the item names as its
`type`, else of that which has fewest.  Its name goes from the error's place, which then is a path in the request.

    body.input.str                                              Input should be a valid string
    body.input.list[…].1.EasyInputMessageParam.content          Field required
    body.input.list[…].1.EasyInputMessageParam.type             Input should be 'message'
    body.input.list[…].1.ResponseFunctionToolCallParam.name     Field required          <- body.input.1.name
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Error = dict[str, Any]

_SCALARS = {"str", "int", "float", "bool", "bytes", "none"}
#: In errors of other fields: a type that refuses the item's `type` is hardly meant.
_OTHER_TYPE = 100


def closest_errors(errors: Sequence[Any]) -> Sequence[Any]:
    """Those of one type for each field that may have several.

    Args:
        errors: of pydantic, or anything that is not of that form, which is returned as it is
    """
    if not all(isinstance(error, dict) and isinstance(error.get("loc"), tuple) for error in errors):
        return errors
    return _closest(list(errors), 0)


def _closest(errors: list[Error], depth: int) -> list[Error]:
    """Of errors that share the first `depth` segments of their places."""
    found, groups = [], {}
    for error in errors:
        if len(error["loc"]) == depth:
            found.append(error)
        else:
            groups.setdefault(error["loc"][depth], []).append(error)
    kept = [_closest(group, depth + 1) for group in groups.values()]
    if not all(map(_is_type, groups)):
        return found + sum(kept, [])
    kept = [[_without(error, depth) for error in group] for group in kept]
    return found + (_of_one_type(kept, depth) if kept else [])


def _of_one_type(groups: list[list[Error]], depth: int) -> list[Error]:
    """The errors of the type that fits best; of its `type` alone, with all that it could be, if none accepts that."""

    def about_type(error: Error) -> bool:
        return len(error["loc"]) == depth + 1 and error["loc"][-1] == "type"

    def distance(group: list[Error]) -> tuple[bool, int]:
        # A place that ends here is of a value of another kind, say a list where a string is due.
        other_kind = any(len(error["loc"]) == depth for error in group)
        return other_kind, len(group) + _OTHER_TYPE * any(map(about_type, group))

    best = min(groups, key=distance)
    wrong = [error for error in best if about_type(error) and error["type"] == "literal_error"]
    if not wrong:
        return best
    expected = [
        error["ctx"]["expected"]
        for group in groups
        for error in group
        if about_type(error) and error["type"] == "literal_error"
    ]
    names = ", ".join(dict.fromkeys(", ".join(expected).replace(" or ", ", ").split(", ")))
    return [wrong[0] | {"msg": f"Input should be one of {names}", "ctx": {"expected": names}}]


def _is_type(segment: object) -> bool:
    """Whether it names a type and not a field: a class, a scalar, or anything with brackets."""
    return isinstance(segment, str) and (
        segment in _SCALARS
        or segment[:1].isupper()
        or not (segment.isdecimal() or segment.replace("-", "_").isidentifier())
    )


def _without(error: Error, depth: int) -> Error:
    return error | {"loc": error["loc"][:depth] + error["loc"][depth + 1 :]}
