# SPDX-License-Identifier: Apache-2.0
"""Numbers of 16 bits, two to a register, worked on two at a time."""

from vllm.triton_utils import tl, triton


@triton.jit
def two_of_each(pairs, PTX: tl.constexpr):
    """int16 -> two tensors of fp16, each register's ``$0`` and ``$1`` made of ``$2`` by ``PTX``.

    Written in Triton, the compiler would take numbers of 16 bits out of their register first.
    """
    return tl.inline_asm_elementwise(PTX, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
