# SPDX-License-Identifier: Apache-2.0
"""What stops the reading of a checkpoint, or of one of its files."""

from __future__ import annotations

from vllm.ampere.finding import Finding


class NoSuchCheckpoint(Finding):
    what = "There is no checkpoint here"
    remedy = "Give the directory that holds config.json."


class NotDownloaded(Finding):
    what = "The model is not on this machine"
    remedy = "Download it first (hf download) or give its directory; this command does not use the network."


class AnotherModel(Finding):
    what = "The checkpoint is of another model"
    remedy = "Only Qwen3.8-Flash-Next and its kind (model_type qwen4_exp or qwen4_exp_text) are looked at."


class BrokenJson(Finding):
    what = "A JSON file cannot be parsed"
    remedy = "Download the file again."


class ConfigKeyMissing(Finding):
    what = "The config lacks a key without which no shape is known"
    remedy = "Take config.json from the model that the weights were made from."


class ConfigValueUnusable(Finding):
    what = "The config has a value that no model can have"
    remedy = "Take config.json from the model that the weights were made from."


class FileUnreadable(Finding):
    what = "A file cannot be read"
    remedy = "Check that it exists and that this user may read it."


class FileIsPointer(Finding):
    what = "A weight file is a Git LFS pointer, not weights"
    remedy = "Fetch the weights with git lfs pull or hf download."


class NotSafetensors(Finding):
    what = "A weight file is not a safetensors file"
    remedy = "Download the file again."


class HeaderLongerThanFile(Finding):
    what = "A weight file ends within its header"
    remedy = "Download the file again; it was cut off or its first eight bytes are damaged."


class ShardTruncated(Finding):
    what = "A weight file is shorter than its header says"
    remedy = "Download the file again; it was cut off."


class ShardTooLong(Finding):
    what = "A weight file is longer than its header says"
    remedy = "Download the file again; safetensors refuses bytes that belong to no tensor."


class OffsetsOverlap(Finding):
    what = "Two tensors of a weight file share bytes"
    remedy = "Export or download the file again; one of them would be read from the other's data."


class OffsetsLeaveHole(Finding):
    what = "A weight file has bytes between its tensors"
    remedy = "Export or download the file again; safetensors refuses such files."


class TensorBytesWrong(Finding):
    what = "A tensor's bytes are not those of its dtype and shape"
    remedy = "Export or download the file again."


class NamedTwiceInHeader(Finding):
    what = "A header names a tensor twice"
    remedy = "Export the file again; which of the two is read depends on the reader."
