# SPDX-License-Identifier: Apache-2.0
"""Transformers' image and video sizing for the Qwen vision models, imported when used.

Their modules import torchvision at the top.  A text-only server, or one on a CPU
build whose torch has no matching torchvision, never sizes an image and must not
need it.  Asking for a size without torchvision raises ImportError and says so.
"""

from typing import Any


def _missing(what: str) -> ImportError:
    return ImportError(
        f"{what} input needs torchvision, which cannot be imported here; "
        "install a torchvision that matches this torch, or send text only"
    )


def image_smart_resize(*args: Any, **kwargs: Any) -> tuple[int, int]:
    """``smart_resize`` of transformers' Qwen2-VL image processor."""
    try:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
    except ImportError as error:
        raise _missing("image") from error
    return smart_resize(*args, **kwargs)


def video_smart_resize(*args: Any, **kwargs: Any) -> tuple[int, int]:
    """``smart_resize`` of transformers' Qwen3-VL video processor."""
    try:
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize
    except ImportError as error:
        raise _missing("video") from error
    return smart_resize(*args, **kwargs)
