# SPDX-License-Identifier: Apache-2.0
"""Integer weights as plain torch: what the packed formats mean, and layers that use it.

``reference.py`` turns packed tensors of either layout back into the weight they stand
for.  GPU kernels are compared with it, and on the CPU, whose extension multiplies
four-bit integers only, the other files run everything else with it:

=================  ===========================================================
``linear.py``      a linear layer of any width and group
``experts.py``     routed experts
``embedding.py``   rows of a packed embedding
=================  ===========================================================
"""
