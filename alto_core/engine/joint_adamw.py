"""AdamW of all slots in one pass over the flat buffers, every number of it read on the device.

Shape suffixes: R rank rows, J slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alto_core.engine.active_job import ActiveJob
from alto_core.engine.optimizer import BETA_1, BETA_2, EPSILON
from alto_core.engine.slots import AdapterSlots
from alto_core.engine.staging import StagedFields


@dataclass(frozen=True, kw_only=True)
class Update:
    """One job's next update."""

    active: ActiveJob
    step: int
    """Its number, 1-based."""
    learning_rate: float


class JointAdamW:
    """The optimizer of an engine on Triton kernels. It leaves the rank rows of all others as they are.

    Args:
        slots: whose buffers it updates.
    """

    def __init__(self, slots: AdapterSlots):
        from kernels.triton_adamw import AdamWState

        self._slots, device = slots, slots.params_RW.device
        per_job = ("learning_rate", "weight_decay", "max_grad_norm", "a_ratio", "b_ratio")
        per_slot = (*per_job, "correction1", "correction2_sqrt")
        fields = {f"{name}_J": (slots.num_slots, torch.float32) for name in per_slot}
        fields["is_updated_J"] = (slots.num_slots, torch.int32)
        fields["job_of_row_R"] = (slots.rank_rows, torch.int32)
        self._staged = StagedFields(fields, device)
        constants = {"beta1_J": BETA_1, "beta2_J": BETA_2, "epsilon_J": EPSILON}
        self._state = AdamWState(
            **self._staged.on_device,
            **{name: torch.full((slots.num_slots,), value, device=device) for name, value in constants.items()},
            is_b_W=slots.by_side(0.0, 1.0).to(torch.int8),
        )
        self.has_sides = False
        """Whether A and B of a job in the update that is prepared have learning rates of their own."""
        self._knows_sides = False

    def prepare(self, updates: Sequence[Update]) -> None:
        """Bring the numbers of the next update to the device."""
        self.has_sides = any(update.active.side_ratios_W is not None for update in updates)
        if self.has_sides and not self._knows_sides:
            self._compile_sides()
        host = self._staged.begin()
        for array in host.values():
            array[:] = 0
        host["job_of_row_R"][:] = -1
        # Slots without an update divide by these all the same.
        host["correction1_J"][:] = host["correction2_sqrt_J"][:] = 1.0
        for update in updates:
            active, slot = update.active, update.active.block.slot
            block = active.block
            host["job_of_row_R"][block.rank_start : block.rank_start + active.job.trained_rows] = slot
            host["is_updated_J"][slot] = 1
            host["learning_rate_J"][slot] = update.learning_rate
            host["weight_decay_J"][slot] = active.job.weight_decay
            host["max_grad_norm_J"][slot] = active.job.max_grad_norm
            host["a_ratio_J"][slot], host["b_ratio_J"][slot] = active.job.side_ratios
            host["correction1_J"][slot] = 1.0 - BETA_1**update.step
            host["correction2_sqrt_J"][slot] = (1.0 - BETA_2**update.step) ** 0.5
        self._staged.send()

    def update(self, losses_J: Tensor) -> Tensor:
        """Clip and update what was prepared, except jobs whose loss or gradient is not finite.

        Args:
            losses_J: of the update, by slot.

        Returns:
            norms_J, float32: of the gradients before clipping; 0 for slots without an update.
        """
        from kernels.triton_adamw import adamw_update_

        slots = self._slots
        return adamw_update_(
            slots.params_RW,
            slots.grads_RW,
            slots.exp_avg_RW,
            slots.exp_avg_sq_RW,
            self._state,
            losses_J=losses_J,
            shadow_RW=slots.shadow_RW,
            by_side=self.has_sides,
        )

    def _compile_sides(self) -> None:
        """Run the kernels once on nobody's rows, so that no pass is captured while they are compiled."""
        from kernels.triton_adamw import adamw_update_

        slots, nobody_R = self._slots, torch.full_like(self._state.job_of_row_R, -1)
        buffers = (slots.params_RW, slots.grads_RW, slots.exp_avg_RW, slots.exp_avg_sq_RW)
        state = dataclasses.replace(self._state, job_of_row_R=nobody_R)
        adamw_update_(*buffers, state, shadow_RW=slots.shadow_RW, by_side=True)
        self._knows_sides = True
