# SPDX-License-Identifier: Apache-2.0
"""Whether a table fits into pinned memory, asked where nobody said where it is to lie.

Upstream pins it: 95.4 GiB for the published model in BF16. Half of the machines that have three cards for it do not
have that, and were refused while the model was built; rows from the checkpoint's files need none of it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from vllm.ampere.checkpoint.config import table_config
from vllm.ampere.finding import Finding
from vllm.logger import init_logger
from vllm.utils.free_memory import available_bytes

from .errors import PLEStoreError
from .formats import locate_table
from .locate import tables_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)


def exceeds_memory(vllm_config: "VllmConfig", model_config: "ModelConfig") -> bool:
    """Whether the tables are known to be larger than the memory that can be had here.

    Not where they may be pinned on another machine, or are not on this one yet.
    """
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "ray" or parallel.nnodes > 1:
        return False
    needed, free = table_bytes(model_config), available_bytes()
    if needed is None or needed <= free:
        return False
    logger.info_once(
        "The n-gram table takes %.1f GiB of pinned memory, and %.1f GiB can be had: its rows are read from the "
        "checkpoint's files. --engram-config '{\"host_file_gather\": true}' says so without looking, false insists.",
        needed / 2**30,
        free / 2**30,
    )
    return True


def table_bytes(model_config: "ModelConfig") -> int | None:
    """Bytes of all tables of a model directory, from headers; None where there is none, or something is wrong with it.

    What is wrong is said by whoever reads the table.
    """
    parsed = model_config.hf_text_config
    if not getattr(parsed, "ple_layer_ids", None) or not Path(model_config.model).is_dir():
        return None
    try:
        wanted = tables_of(table_config(parsed.to_dict()))
        tables = [locate_table(model_config.model, name, shape) for _, name, shape in wanted]
    except (Finding, PLEStoreError):
        return None
    return sum(table.count * table.row_bytes for table in tables)
