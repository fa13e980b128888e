"""A clock that moves when it is told to, and work that takes a known time."""

from collections.abc import Callable


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float, result: object = None) -> Callable[..., object]:
        """A function that takes that long, whatever it is given."""

        def run(*args: object, **kwargs: object) -> object:
            self.now += seconds
            return result

        return run
