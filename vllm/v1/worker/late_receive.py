# SPDX-License-Identifier: Apache-2.0
"""Activations of the stage before are asked for when they are needed, not before the inputs are prepared.

Receiving begins with a wait of the host thread for the shapes, which the stage before announces once its launches are
done (on a CPU, for the activations themselves).  Upstream waits as a step begins, so that the host threads of a
pipeline work one after the other on a micro-batch: each prepares its inputs only after the one before it has prepared
and launched.  Nothing of the preparation needs the activations.  Asked for just before the forward, all stages prepare
at once, and what is left to pass from stage to stage is the launch.

The messages are the same, in the same order: a stage still receives before it sends, once for each micro-batch.

`--additional-config '{"late_receive": false}'` waits as upstream does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config.switches import switch


def receive_late(vllm_config: Any, group: Any, **arguments: Any) -> tuple[dict, list, list[Callable[[], None]]]:
    """In place of `group.irecv_tensor_dict(**arguments)`, whose result it has the form of.

    Args:
        vllm_config: of the worker
        group: the pipeline's GroupCoordinator

    Returns: a dictionary that is empty yet, no handles, and as the only thing to do before the dictionary is read, to
        receive, wait and fill it.  AsyncIntermediateTensors does so at the first access.
    """
    if not switch(vllm_config.additional_config, "late_receive"):
        return group.irecv_tensor_dict(**arguments)
    tensors: dict[str, Any] = {}

    def receive() -> None:
        received, handles, postprocess = group.irecv_tensor_dict(**arguments)
        assert received is not None
        for handle in handles:
            handle.wait()
        for finish in postprocess:
            finish()
        tensors.update(received)

    return tensors, [], [receive]
