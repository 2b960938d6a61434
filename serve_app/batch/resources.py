"""Ray's resources for engines of a batch: a GPU, or the cores of a node."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray
from pydantic import ValidationError

from eesd_dist.config import complaint_of
from eesd_dist.errors import ConfigError
from serve_app.placement_config import BundleConfig, PlacementConfig


def uses_gpus(device: str) -> bool:
    """Returns whether engines with this `model.device` compute on GPUs of the cluster."""
    if device == "auto":
        return any(node.get("GPU", 0) for node in _nodes())
    return device != "cpu"


def default_resources(device: str) -> Mapping[str, float]:
    """Returns the resources of an engine's actor: a GPU, else more than half of the largest node's
    cores, so that each large node has one engine, and small ones none."""
    if uses_gpus(device):
        return {"CPU": 1.0, "GPU": 1.0}
    num_cores = max((node.get("CPU", 0.0) for node in _nodes()), default=0.0) or 2.0
    return {"CPU": (num_cores + 1) / 2 if num_cores > 2 else num_cores / 2}


def shared_resources(num_engines: int, device: str) -> Mapping[str, float]:
    """Returns the resources of an actor where there are so many: a GPU, or as many cores as let all
    of them fit the present nodes, at least one."""
    if uses_gpus(device):
        return {"CPU": 1.0, "GPU": 1.0}
    sizes = [int(node.get("CPU", 0.0)) for node in _nodes()]
    cores = range(max(sizes, default=1), 1, -1)
    fitting = (n for n in cores if sum(size // n for size in sizes) >= num_engines)
    return {"CPU": float(next(fitting, 1))}


def max_engines(resources: Mapping[str, float]) -> int:
    """Returns how many actors with such resources the present nodes hold: one for each GPU, or for
    each large node."""
    nodes = _nodes()
    if resources.get("GPU", 0):
        return max(1, int(sum(node.get("GPU", 0) for node in nodes)))
    return max(1, sum(node.get("CPU", 0.0) >= resources["CPU"] for node in nodes))


def max_pipelines(num_ranks: int, device: str) -> int:
    """Returns how many pipelines of so many ranks the present GPUs hold; one without GPUs."""
    if not uses_gpus(device):
        return 1
    num_gpus = sum(node.get("GPU", 0) for node in _nodes())
    return max(1, int(num_gpus // num_ranks))


def sum_of_bundles(group: Mapping[str, Any]) -> Mapping[str, float]:
    """Returns what the bundles of a placement group reserve together."""
    total: Counter[str] = Counter()
    for bundle in group.get("bundles") or ():
        total.update({name: float(amount) for name, amount in bundle.items()})
    return total


def placement_of_bundles(group: Mapping[str, Any]) -> PlacementConfig:
    """Returns the placement of a pipeline's ranks: each has the first bundle of a placement group.
    Raises ConfigError for bundles that no rank can have."""
    bundle: Mapping[str, Any] = next(iter(group.get("bundles") or ()), {})
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    settings: dict[str, Any] = {"resources": others, "num_gpus": bundle.get("GPU")}
    if "CPU" in bundle:
        settings["num_cpus"] = bundle["CPU"]
    try:
        rank = BundleConfig.model_validate(settings)
        return PlacementConfig(strategy=group.get("strategy"), draft=rank, verify=rank)
    except ValidationError as error:
        raise ConfigError(
            f"placement_group_config: {complaint_of(error, PlacementConfig)}"
        ) from error


def _nodes() -> list[Mapping[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
