"""Host memory of a process tree."""

from contextlib import suppress


def resident_bytes(pid: int) -> int:
    """Proportional set size of `pid` and everything below it.

    Proportional, because the stages share torch's and vLLM's pages, and counting those once per process would hide
    a table behind them.  Pages of a file that was read with `pread` belong to no process and are not in it: the page
    cache gives them up when memory is asked for.
    """
    import psutil

    total = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            # A process may end in between.
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().pss
    return total
