# SPDX-License-Identifier: Apache-2.0
"""Packed weights as plain torch: what the formats mean, and layers that use it.

``reference.py`` turns packed integers of either layout back into the weight they stand
for; of NVFP4 a function of upstream's does.  GPU kernels are compared with both, and on
the CPU, whose extension multiplies four-bit integers only, the other files run everything
else with them:

=====================  ===========================================================
``linear.py``          a linear layer of any width and group, or in NVFP4
``experts.py``         routed experts
``nvfp4_experts.py``   routed experts in NVFP4
``embedding.py``       rows of a packed embedding
=====================  ===========================================================
"""
