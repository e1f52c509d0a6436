"""A median that follows a stream of values, in two floats."""

LAST_STEP = 0.01


class RunningMedian:
    """Moves by 1 % towards each value, whatever its distance, so half of the values end up on each side."""

    __slots__ = ("_step", "value")

    def __init__(self) -> None:
        self.value = 0.0
        """The median; 0 = no values yet."""
        self._step = 0.5

    def add(self, value: float) -> None:
        """Count a value above 0."""
        if not self.value:
            self.value = value
        elif value > self.value:
            self.value *= 1 + self._step
        else:
            self.value /= 1 + self._step
        if self._step > LAST_STEP:  # the first values move it further
            self._step *= 0.8
