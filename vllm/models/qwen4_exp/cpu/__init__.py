# SPDX-License-Identifier: Apache-2.0
"""Qwen4Exp on the CPU: plain-torch twins of the model's Triton kernels.

Each function has the name and the signature of the kernel launcher it stands in
for, so a reader can follow the algorithm here, a kernel test can compare the two,
and a machine without a GPU runs them.  ``..kernels`` chooses between the two.
"""
