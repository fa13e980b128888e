"""A worker extension that makes one stage run out of memory: `--worker-extension-cls` of the server under test.

The extension is imported by every worker before it loads the model, so that the product needs no hook for this.
FAULT_STAGE and FAULT_CALL, set by the runner, name the stage and the worker's method that raises; FAULT_FILE, if set,
is a file whose appearance makes the next call raise, so that a fault can wait for its phase.
"""

import functools
import os
from pathlib import Path

from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname


class OutOfMemory:
    """Nothing is added to the worker; importing this module is what counts."""


def _guarded(call, stage: int, trigger: Path | None):
    @functools.wraps(call)
    def wrapped(self, *args, **kwargs):
        if get_pp_group().rank_in_group == stage and (trigger is None or trigger.exists()):
            raise MemoryError("injected: this stage is out of memory")
        return call(self, *args, **kwargs)

    return wrapped


def _arm() -> None:
    name = os.environ.get("FAULT_CALL")
    if not name:
        return
    module = "vllm.v1.worker.cpu_worker.CPUWorker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker.Worker"
    worker = resolve_obj_by_qualname(module)
    trigger = os.environ.get("FAULT_FILE")
    call = _guarded(getattr(worker, name), int(os.environ["FAULT_STAGE"]), Path(trigger) if trigger else None)
    setattr(worker, name, call)


_arm()
