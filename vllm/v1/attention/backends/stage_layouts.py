# SPDX-License-Identifier: Apache-2.0
"""One KV cache layout for workers whose attention backends differ.

A stage that holds only linear-attention layers declares no layout and so reports the whole default list; a
stage with sparse attention reports the two that its kernels can address. Both are right, and the engine
needs what they have in common.
"""

from __future__ import annotations

from collections.abc import Sequence


class NoCommonKVCacheLayout(ValueError):
    """No layout is supported by every worker."""


def common_layouts(supported: Sequence[Sequence[str]]) -> list[str]:
    """Names of the layouts that every worker supports, most preferred first.

    `supported` holds one non-empty list per worker, by rank, each most preferred first. The order of the
    result is that of the shortest list: a worker without a preference reports the default order, and a list
    that excludes something was declared by a backend. Of equally short lists the lowest rank's counts. The
    engine core computes this once and sends the outcome to every rank.

    Raises:
        NoCommonKVCacheLayout: with the set of each group of workers.
    """
    shared = set(supported[0]).intersection(*supported[1:])
    if not shared:
        raise NoCommonKVCacheLayout(
            f"no KV cache layout is supported by every worker: {_by_worker(supported)}; move layers between stages "
            "(VLLM_PP_LAYER_PARTITION) or choose attention backends that share a layout"
        )
    return [name for name in min(supported, key=len) if name in shared]


def _by_worker(supported: Sequence[Sequence[str]]) -> str:
    workers_of: dict[tuple[str, ...], list[int]] = {}
    for rank, names in enumerate(supported):
        workers_of.setdefault(tuple(names), []).append(rank)
    return ", ".join(
        f"worker{'s' if len(ranks) > 1 else ''} {' '.join(map(str, ranks))}: {'/'.join(names)}"
        for names, ranks in workers_of.items()
    )
