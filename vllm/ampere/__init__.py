# SPDX-License-Identifier: Apache-2.0
"""What this fork knows about the machine and the checkpoint before a weight is read: `vllm ampere …`.

    finding.py   the base of everything that can be wrong with a checkpoint
    checkpoint/  a checkpoint as its headers and JSON describe it
    findings/    what is wrong with it: one class for each way, found by one function for each module; stored_table.py
                 asks the store that would serve the n-gram table
    report/      what it holds, as numbers and as text
    repair/      corrected JSON beside links to the same weights
    command/     the subcommands; a new one is a module and a line in its `COMMANDS`
    sampling.py, repeated_targets.py   two rules that the engine's own warnings use as well

Nothing here imports torch or the engine when it is imported, so that a look at headers costs no more than itself.

At serve time, from the configuration phase:

    from vllm.ampere.checkpoint import read
    from vllm.ampere.findings import findings, refuse

    checkpoint = read(model)      # raises a Finding where there is nothing to look at
    found = findings(checkpoint)  # each with .severity ("refuse" or "warn"), .where, .expected, .found; str() is a message
    refuse(found)                 # raises the first refusal, with the others as its notes

`read` opens every safetensors file once and reads its header only: about a second for the published model.
"""
