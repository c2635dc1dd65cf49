"""What GPUs have and reach: memory, rates, links. The numbers behind a plan, each of which its options can replace.

Sources: NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM, L40S and HGX B200, and of DGX A100, H100 and B200
for the network (one ConnectX-6 of 200 Gb/s or ConnectX-7 of 400 Gb/s beside each GPU); products are dense, without
sparsity. H800 is an H100 with NVLink of 400 GB/s, H20 one with 96 GB and fewer cores, as their vendors' servers state.
Memory is what the driver shows, of the H200 what a process sees of it. An L40S has no NVLink: its link is PCIe 4.0 x16,
and its servers have a 200 Gb/s port for it at best.

Nobody reaches a data sheet. On an H200 a copy reaches 4.28 of 4.8 TB/s, a bfloat16 product 763 of 989 TFLOP/s and an
FP8 one 1,287 of 1,979, all measured; a GPU that was not measured is taken to reach the same shares of its own numbers.
Links are taken to reach 0.85 of theirs: published exchanges of tokens between H800s reach 0.77 of NVLink and 0.86 to
0.94 of the network. That, and how long an exchange takes at least, were not measured here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rorqual.config import did_you_mean

_COPY, _PRODUCT, _FP8_PRODUCT, _LINK = 4.28 / 4.8, 763 / 989, 1287 / 1979, 0.85
"""Shares of the data sheet that are reached."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU of a host of several, with what it reaches and not what its data sheet says."""

    name: str
    memory_bytes: int
    bytes_per_s: float
    """Read from its memory."""
    bf16_flops_per_s: float
    fp8_flops_per_s: float
    """Those of bfloat16 where it has no such products."""
    link_bytes_per_s: float
    """To the other GPUs of its host, one way."""
    network_bytes_per_s: float
    """To GPUs of other hosts, one way."""
    link_latency_s: float
    """What one exchange of a few bytes takes within a host."""
    network_latency_s: float
    """Between hosts."""


def _facts(
    name: str, *, mib: int, gb_per_s: float, tflops: float, fp8: float | None, link: float, network: float
) -> GpuFacts:
    """From a data sheet: GB/s, dense TFLOP/s, GB/s one way of the link and of the network."""
    bf16_flops = tflops * 1e12 * _PRODUCT
    return GpuFacts(
        name=name,
        memory_bytes=mib << 20,
        bytes_per_s=gb_per_s * 1e9 * _COPY,
        bf16_flops_per_s=bf16_flops,
        fp8_flops_per_s=bf16_flops if fp8 is None else fp8 * 1e12 * _FP8_PRODUCT,
        link_bytes_per_s=link * 1e9 * _LINK,
        network_bytes_per_s=network * 1e9 * _LINK,
        link_latency_s=10e-6,
        network_latency_s=25e-6,
    )


_KNOWN = (
    _facts("a100", mib=81920, gb_per_s=2039, tflops=312, fp8=None, link=300, network=25),
    _facts("h100", mib=81559, gb_per_s=3350, tflops=989, fp8=1979, link=450, network=50),
    _facts("h800", mib=81559, gb_per_s=3350, tflops=989, fp8=1979, link=200, network=50),
    _facts("h20", mib=97871, gb_per_s=4000, tflops=148, fp8=296, link=450, network=50),
    _facts("h200", mib=143155, gb_per_s=4800, tflops=989, fp8=1979, link=450, network=50),
    _facts("l40s", mib=46068, gb_per_s=864, tflops=362, fp8=733, link=32, network=25),
    _facts("b200", mib=183359, gb_per_s=8000, tflops=2250, fp8=4500, link=900, network=50),
)
GPUS = {facts.name: facts for facts in _KNOWN}


def gpu_facts(name: str, **replaced: Any) -> GpuFacts:
    """A known GPU, in any case, with other numbers where they are given (None leaves one as it is).

    Raises ValueError for a GPU that is not known.
    """
    facts = GPUS.get(name.lower())
    if facts is None:
        raise ValueError(
            f"unknown GPU {name!r}: {did_you_mean(name.lower(), GPUS)}; another one is planned by the name of the "
            "nearest, with --gpu-memory, --hbm-rate and the other rates of its own"
        )
    return dataclasses.replace(facts, **{field: value for field, value in replaced.items() if value is not None})
