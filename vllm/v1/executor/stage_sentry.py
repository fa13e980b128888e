# SPDX-License-Identifier: Apache-2.0
"""A small process beside a stage on another machine: kills the stage when it falls silent.

    python stage_sentry.py PID SECONDS < beats

It stands in for stage_watchdog.py, which needs memory and a parent in common with whom it watches.  Under Ray the
engine is on another machine, and whether a silent process still works (a call that holds the interpreter while it pins
memory is silent too) shows in processor time, which only its own machine can read.  Runs without vLLM, for its size:
standard library only.
"""

import os
import select
import signal
import sys
import time

#: Seconds between two looks, by which a look may be late before what it sees is distrusted, and of processor time below
#: which a silent stage counts as standing still; as in stage_watchdog.py.
PERIOD = 1.0
LATE = 2.0
STILL = 0.05


class Silence:
    """Seconds for which a process has shown neither a beat nor work."""

    def __init__(self, now: float, worked: float):
        self.looked = self.since = now
        self.worked = worked

    def look(self, now: float, beaten: bool, worked: float) -> float:
        """Note what is seen `now` and return the silence so far.

        Args:
            now: on time.monotonic()
            beaten: whether a beat came since the last look
            worked: the process's processor time, seconds
        """
        gap = now - self.looked
        self.looked = now
        if beaten or worked - self.worked > STILL:
            self.since, self.worked = now, worked
        elif gap > PERIOD + LATE:
            # The whole machine stood still, or had no time for this process: nothing was seen, so nothing is counted.
            self.since += gap
        return now - self.since


def processor_time(pid: int) -> float:
    """User and system seconds of a process.

    Raises:
        OSError: it has ended.
    """
    with open(f"/proc/{pid}/stat") as stat:
        # The name in parentheses may hold anything; what follows the last one is numbers.
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(pid: int, limit: float, beats: int) -> bool:
    """Look until the process is gone; whether it was killed here.

    Args:
        limit: seconds of silence after which it is killed
        beats: descriptor that a byte arrives on for each beat, and the end of file when the process ends
    """
    try:
        silence = Silence(time.monotonic(), processor_time(pid))
        while True:
            beaten = bool(select.select([beats], [], [], PERIOD)[0])
            if beaten:
                if not os.read(beats, 4096):
                    return False
                # So that a beat every half second is not a look every half second.
                time.sleep(PERIOD / 2)
            if silence.look(time.monotonic(), beaten, processor_time(pid)) > limit:
                os.kill(pid, signal.SIGKILL)
                return True
    except OSError:
        return False


if __name__ == "__main__":
    if watch(int(sys.argv[1]), float(sys.argv[2]), sys.stdin.fileno()):
        print(
            f"stage (pid {sys.argv[1]}) has shown no sign of life for {sys.argv[2]} s and was killed, which ends the "
            "server. --watchdog-config.silence_limit sets the seconds; 0 waits for ever.",
            file=sys.stderr,
        )
