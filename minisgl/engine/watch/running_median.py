"""A median that follows a stream of values, in two floats."""

LAST_STEP = 0.01


class RunningMedian:
    """Moves by 1 % towards each value, whatever its distance, so half of the values end up on each side."""

    __slots__ = ("_step", "value")

    def __init__(self) -> None:
        self.value = 0.0
        """The median; 0 = no values yet."""
        self._step = 0.5

    def add(self, *values: float) -> None:
        """Count values in their order. Those that are not above 0 count nothing."""
        median, step = self.value, self._step
        for value in values:
            if value <= 0:
                continue
            if value > median:
                median = median * (1 + step) if median else value
            else:
                median /= 1 + step
            if step > LAST_STEP:  # the first values move it further
                step *= 0.8
        self.value, self._step = median, step
