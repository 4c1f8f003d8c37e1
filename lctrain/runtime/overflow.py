"""Overflow on chips that give the largest fp16 number instead of infinity, and raise a flag.

The first Ascend 910 cannot do otherwise; later ones do so with INF_NAN_MODE_ENABLE=0.
"""

from __future__ import annotations

from lctrain.runtime.device import Accelerator, is_planned


class OverflowFlag:
    """The current NPU's, raised by any operator since it was cleared."""

    def clear(self) -> None:
        """Forget what happened before."""
        from torch_npu.npu.utils import clear_npu_overflow_flag

        clear_npu_overflow_flag()

    def raised(self) -> bool:
        """Whether an operator overflowed. Waits for the device."""
        from torch_npu.npu.utils import get_npu_overflow_flag

        return bool(get_npu_overflow_flag())


def overflow_flag(device: Accelerator) -> OverflowFlag | None:
    """The flag to watch beside the gradients' norm, or None where an overflow gives infinity."""
    if device.type != "npu" or is_planned():
        return None
    from torch_npu.npu.utils import is_support_inf_nan

    return None if is_support_inf_nan() else OverflowFlag()
