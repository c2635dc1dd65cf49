"""The parameters around a sublayer whose residual is several streams; the maths is in ops/hyper_connection.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rorqual.loader.layer import Layer, WantedTensor, copy_into, weight_parameter
from rorqual.ops.hyper_connection import StreamMix, prepare_mix


class HyperConnection(Layer):
    """fn, base and scale of one mix, all float32; in the checkpoint their names are the layer's, "_" and these.

    Args:
        num_streams: N.
        hidden_size: channels of one stream.
        norm_eps: of the norm over all streams of a token.
        eps: what is added to weights and sums.
        iterations: Sinkhorn's. 0 is for the head, which has weights for its input alone.
        device: of the parameters.
    """

    def __init__(
        self,
        num_streams: int,
        hidden_size: int,
        *,
        norm_eps: float,
        eps: float,
        iterations: int = 0,
        device: torch.device,
    ) -> None:
        super().__init__()
        rows, kinds = ((2 + num_streams) * num_streams, 3) if iterations else (num_streams, 1)
        shapes = {"fn": (rows, num_streams * hidden_size), "base": (rows,), "scale": (kinds,)}
        for name, shape in shapes.items():
            self.register_parameter(name, weight_parameter(*shape, dtype=torch.float32, device=device))
        self.num_streams, self.norm_eps, self.eps, self.iterations = num_streams, norm_eps, eps, iterations
        self._prepared: torch.Tensor | None = None

    def prepare(self) -> None:
        """Lay fn out for the implementation that will read it."""
        self._prepared = prepare_mix(self.mix(), self.num_streams).prepared

    def mix(self) -> StreamMix:
        """For the ops."""
        fn, base, scale = (parameter.data for parameter in self.parameters())
        return StreamMix(fn, base, scale, self.norm_eps, self.eps, self.iterations, self._prepared)

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """fn, base and scale."""
        for name, parameter in self.named_parameters():

            def copy(whole: torch.Tensor, parameter: torch.nn.Parameter = parameter) -> None:
                copy_into(parameter, whole)

            yield WantedTensor(f"{prefix}_{name}", tuple(parameter.shape), copy)
