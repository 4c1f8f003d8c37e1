"""Dynamic loss scale for fp16, after Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2."""

from __future__ import annotations

from lctrain.config.precision import Fp16Config, PrecisionConfig


class LossScale:
    """A factor on the loss that keeps fp16 gradients in range; always 1 outside fp16.

    Every rank updates it from the same all-reduced gradient norm, so all ranks skip together.
    """

    def __init__(self, config: PrecisionConfig) -> None:
        self.dynamic = isinstance(config, Fp16Config)
        self.value = config.initial_scale if isinstance(config, Fp16Config) else 1.0
        self._interval = config.growth_interval if isinstance(config, Fp16Config) else 0
        self._good_steps = 0

    def update(self, *, finite: bool) -> None:
        """Halve after an overflow; double after growth_interval good steps."""
        if not self.dynamic:
            return
        if not finite:
            self.value = max(1.0, self.value / 2)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._interval:
            self.value *= 2
            self._good_steps = 0

    def state_dict(self) -> dict[str, float]:
        """For the checkpoint."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """From the checkpoint."""
        if self.dynamic:
            self.value, self._good_steps = float(state["value"]), int(state["good_steps"])
