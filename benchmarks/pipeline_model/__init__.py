"""A discrete-event model of the pipeline: real schedulers over simulated stages.

configs     a real scheduler with real options, without weights or a device
cost        milliseconds of a stage's GPU: roofline or a measured table
pipeline    host threads and GPUs of all stages, in order
engine      the engine core's loop around scheduler and stages, in simulated time (clock)
workloads   who asks what and when
results     rates, waits, idle shares; timeline draws them, tables puts them into pages
published   two machines with RTX 3090s, and parameters from their single-user rates
cases       the predictions that are committed
arranged    users held in a chosen number of micro-batches; compare: any scheduler classes side by side
"""
