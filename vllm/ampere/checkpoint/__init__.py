# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as its headers and JSON files describe it.

    errors.py    what stops the reading
    resolve.py   a path or a hub id -> a directory
    documents.py config.json, generation_config.json, the index
    headers.py   a safetensors file -> its tensors' dtypes, shapes and places
    names.py     a tensor's name -> module, part of it, class of module
    config.py    the text config, with defaults
    geometry.py  the config -> every module that the model has, with its shape
    table.py     rows of the n-gram table
    storage.py   a module's tensors -> how its weight is stored
    declared.py  quantization_config -> how it is said to be stored
    read.py      all of it together

Only the standard library is used here, so that a look at a checkpoint costs no import of torch.
"""

from vllm.ampere.checkpoint.read import Checkpoint, read

__all__ = ["Checkpoint", "read"]
