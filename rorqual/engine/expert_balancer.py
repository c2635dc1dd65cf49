"""Routed experts moved between ranks while the engine runs, so that ranks have as much to do.

Ranks count the same steps, so all of them come to move experts after the same one.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import nn

from rorqual.config import EngineConfig
from rorqual.distributed.expert_balance import (
    ExpertLayout,
    ExpertLoads,
    RearrangementSchedule,
    broadcast_layout,
    choose_replicas,
    imbalance,
    rebalance,
)
from rorqual.distributed.expert_movement import move_experts, plan_movement
from rorqual.distributed.mesh import Mesh
from rorqual.layers.moe import Experts

_log = logging.getLogger(__name__)


class ExpertBalancer:
    """Counts what tokens choose, and moves experts when it is due."""

    def __init__(self, model: nn.Module, config: EngineConfig, mesh: Mesh, device: torch.device) -> None:
        """For all experts of a model that is loaded. Raises ValueError where there are none, or none that can move."""
        layers = [layer for layer in model.modules() if isinstance(layer, Experts)]
        if not layers:
            raise ValueError("enable_eplb moves routed experts, and this model has none: leave it out")
        assert mesh.num_redundant_experts is not None
        num_experts = layers[0].num_experts
        self._mesh, self._device = mesh, device
        self._schedule = RearrangementSchedule(config.eplb_step_interval, config.eplb_window_size)
        self._weights = [layer.by_place() for layer in layers]
        self._loads = ExpertLoads(len(layers), num_experts, window=config.eplb_window_size, device=device)
        self._num_steps = 0
        self.layout = ExpertLayout.initial(
            len(layers), num_experts, num_redundant=mesh.num_redundant_experts, num_ranks=mesh.ep_size
        )
        """Where the experts are."""
        self._tables = self._chosen_places().to(device)
        for i, layer in enumerate(layers):
            layer.placement.table = self._tables[i]
            layer.on_choices = functools.partial(self._loads.record, i)

    def discard(self) -> None:
        """Forget the tokens since the last step's end: they were nobody's."""
        self._loads.discard()

    def end_step(self) -> None:
        """A step was started in which any rank has tokens. Every rank calls it; when it is due, experts move."""
        self._loads.end_step()
        self._num_steps += 1
        if self._schedule.due(self._num_steps):
            self._rearrange()

    def _rearrange(self) -> None:
        group = self._mesh.ep or self._mesh.tp  # of one replica, whose ranks exchange no tokens, they are the same
        assert group is not None, "several ranks need a group"
        old, tokens = self.layout, self._loads.tokens(group).cpu()
        new = rebalance(old, tokens) if group.rank == 0 else old
        new = broadcast_layout(new, group, device=self._device)
        move_experts(self._weights, old, new, group)
        self.layout = new
        self._tables.copy_(self._chosen_places())
        if group.rank == 0:
            before, after = (imbalance(layout.rank_loads(tokens)) for layout in (old, new))
            moved = sum(len(movement.fetches) for movement in plan_movement(old, new))
            _log.info(
                "step %d: %d experts went to other ranks, whose busiest have %.2f times the mean load, and had %.2f",
                self._num_steps,
                moved,
                after,
                before,
            )

    def _chosen_places(self) -> torch.Tensor:
        """Where this replica's tokens go for each expert: [num_layers, num_experts].

        All to one place: were they spread, what a token gets would hang on its place among others, as the sums of
        several ranks are rounded.
        """
        every = torch.arange(self.layout.num_experts)[None]
        layers = zip(self.layout.logical_to_physical, self.layout.replica_counts, strict=True)
        return torch.cat([choose_replicas(every, *tables, self._mesh.dp_rank) for tables in layers])
