"""On which machine, with which program a published row ran: the catalogue's entry and the stack's profile it names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from plait.planner.stack import Stack, load_stack
from plait.spec.cluster import Cluster, load_cluster

Cells = Mapping[str, str]

CLUSTERS: Mapping[str, str] = {
    "V100": "v100-dgx", "A100": "a100-80-dgx", "H100": "h100-dgx", "H200": "h200-dgx", "H800": "h800",
    "B200": "b200-dgx", "B300": "b300-dgx", "GB200": "gb200-nvl72", "GB300": "gb300-nvl72", "MI300X": "mi300x",
}  # fmt: skip

OWN_MACHINES = ((r"SimuMax docs/b200", "b200-limited"),)  # sources whose machine is an entry of its own

# How a source writes a network -> bytes per second of one GPU in one direction.
NETWORKS: tuple[tuple[str, Callable[[re.Match[str], int], float]], ...] = (
    (r"(\d+)x(\d+)\s*G(?:b(?:/s)?)?\b.*(?:/|per )node", lambda m, node: float(m[1]) * float(m[2]) / 8 / node),
    (r"(\d+)x\D*(\d+)\s*Gb/s per node", lambda m, node: float(m[1]) * float(m[2]) / 8 / node),
    (r"(\d+)x OmniPath (\d+)", lambda m, node: float(m[1]) * float(m[2]) / 8 / node),
    (r"(\d+)\s*G(?:bps)?/node|(\d+)\s*Gbps/node", lambda m, node: float(m[1] or m[2]) / 8 / node),
    (r"(\d+)G(?:b/s)?/GPU", lambda m, node: float(m[1]) / 8),
    (r"TCPX", lambda m, node: 4 * 200 / 8 / node),
    (r"^(\d+) Gbps$", lambda m, node: float(m[1]) / 8 / node),
)

STAGED = "OmniPath"  # networks whose adapters do not read the device's memory

STACKS: tuple[tuple[str, str], ...] = (  # pattern of "framework version" -> profile; the first that matches
    (r"AutoModel", "automodel"),
    (r"torchtitan|Meta internal|TorchTitan", "torchtitan"),
    (r"Megatron-LM.*(2020|2021|6985e589|SC21)", "megatron-2021"),
    (r"Megatron-DeepSpeed", "megatron-deepspeed"),
    (r"MegaScale", "megascale"),
    (r"Megatron-Bridge (26\.0[4-9]|26\.1|2[7-9])|HAI-LLM", "megatron"),
    (r"Megatron-Bridge|TE 2\.(9|1\d)", "megatron-2025"),
    (r"NeMo(?! AutoModel)|Megatron", "megatron-2024"),
    (r"llm-foundry", "llm-foundry"),
    (r"fms-fsdp|FSDP", "fsdp"),
    (r"DeepSpeed|gpt-neox", "deepspeed"),
    (r"MaxText|PaXML|Paxml|JAX", "maxtext"),
    (r"InternEvo", "internevo"),
)


class Unclear(Exception):
    """A row that says too little; turned into Refused where it is read."""


def number(cells: Cells, name: str, default: int | None = None) -> int:
    """A whole number of a row. Raises where it is blank and nothing stands in for it."""
    text = cells.get(name, "") or ""
    if text:
        return int(float(text))
    if default is None:
        raise Unclear(f"{name} is not stated")
    return default


def stack_of(cells: Cells) -> Stack:
    """The profile of the program that a row ran, with the habits that the row itself states."""
    name = f"{cells.get('framework', '')} {cells.get('framework_version', '')} {cells['source']}"
    found = next((stack for pattern, stack in STACKS if re.search(pattern, name)), None)
    if found is None:
        raise Unclear(f"framework {cells.get('framework')!r} has no stack profile")
    static = CLUSTERS.get(cells["gpu"], "") if "tokendrop" in cells.get("notes", "") else ""
    return _tuned(found, cells.get("overlap", ""), static)


@lru_cache(maxsize=64)
def _tuned(name: str, overlap: str, static: str) -> Stack:
    """A profile, with what a row says of overlap. `static`: the cluster whose experts take tokens up to a limit.

    Then no shape depends on the data: the host waits for no counts, and graphs start the kernels.
    """
    stack, off = load_stack(name), overlap.startswith("no")
    if static:
        stack = stack.model_copy(update={"graphs": (load_cluster(static).device.family,)})
    axes = [
        axis for axis in ("dp", "tp", "ep", "pp") if overlap.startswith("none") or (off and axis.upper() in overlap)
    ]
    return stack.model_copy(update={f"overlap_{axis}": False for axis in axes}) if axes else stack


def cluster_of(cells: Cells) -> Cluster:
    """The machine that a row ran on: the catalogue's, with the node, the domain and the network that the row states."""
    gpu, memory = cells["gpu"], cells.get("gpu_mem_gb", "")
    if gpu not in CLUSTERS:
        raise Unclear(f"gpu {gpu!r} is not in the catalogue")
    own = next((name for pattern, name in OWN_MACHINES if re.search(pattern, cells["source"])), None)
    name = own or ("a100-40-dgx" if (gpu, memory) == ("A100", "40") else CLUSTERS[gpu])
    node = number(cells, "gpus_per_node", load_cluster(name).node)
    domain = number(cells, "nvlink_domain", load_cluster(name).domain)
    return _wired(name, node, domain, cells.get("interconnect", ""))


@lru_cache(maxsize=256)
def _wired(name: str, node: int, domain: int, network: str) -> Cluster:
    """A cluster of the catalogue with the row's node size and network."""
    known = load_cluster(name)
    fast, wide = known.links[0].model_copy(update={"domain": domain}), known.links[-1]
    for pattern, rate in NETWORKS:
        if network and (match := re.search(pattern, network)):
            wide = wide.model_copy(
                update={"bandwidth": rate(match, node) * 1e9, "staged": bool(re.search(STAGED, network))}
            )
            break
    return known.model_copy(update={"node": node, "links": (fast, wide)})
