"""What this fork knows about the machine and the checkpoint before a weight is read: `vllm ampere …`.

    finding.py   one class per way in which a checkpoint is wrong
    checkpoint/  a checkpoint as its headers and JSON describe it; imports neither torch nor the rest of vLLM
    findings/    what is wrong with it
    report/      what it holds, as numbers and as text
    repair/      corrected JSON beside links to the same weights
    command/     the subcommands

At serve time, from the configuration phase:

    from vllm.ampere.checkpoint import read
    from vllm.ampere.findings import findings, refuse

    checkpoint = read(model)            # raises a Finding where there is nothing to look at
    for finding in findings(checkpoint):
        ...                             # finding.severity is "refuse" or "warn"; str(finding) is the message
    refuse(checkpoint)                  # or: raise the first refusal, with all others in its text

`read` opens every safetensors file once and reads its header only: about a second for the published model.
"""
