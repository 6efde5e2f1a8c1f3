"""A clock for tests of what takes how long: how busy the machine is does not show on it."""


class Clock:
    """Stands in for the module `time`. Moves on by `work`, and by `tick` seconds each time that it is read."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 0.0, tick

    def monotonic(self) -> float:
        self.now += self.tick
        return self.now

    perf_counter = monotonic

    def work(self, seconds: float) -> float:
        """What takes `seconds`; returns them."""
        self.now += seconds
        return seconds
