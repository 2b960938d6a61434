"""Default of warm spares for a service on this machine alone.

A spare on a CPU costs memory and no device. On a machine with GPUs each would hold one.
"""

from pathlib import Path

import psutil

from serve_app.config import ServiceConfig, SparesConfig

_GPU_DRIVER = Path("/proc/driver/nvidia")
_PROCESS_BYTES = 2 * 2**30
"""Memory that stays free for the service itself and for one spare of each stage without weights."""


def with_default_spares(config: ServiceConfig) -> ServiceConfig:
    """Returns the configuration with numbers in place of `None`: one spare of each stage where one
    pipeline computes on CPUs and memory has room for the weights twice more, otherwise none."""
    spares = config.recovery.spares
    default = int(_has_room(config))
    chosen = SparesConfig(
        draft=default if spares.draft is None else spares.draft,
        verify=default if spares.verify is None else spares.verify,
    )
    recovery = config.recovery.model_copy(update={"spares": chosen})
    return config.model_copy(update={"recovery": recovery})


def _has_room(config: ServiceConfig) -> bool:
    model = config.engine.model
    if config.pipelines.max_count > 1 or model.device == "cuda":
        return False
    if model.device == "auto" and _GPU_DRIVER.exists():
        return False
    folders = [folder for folder in (model.path, model.head) if folder is not None]
    weights = sum(file.stat().st_size for f in folders for file in f.rglob("*.safetensors"))
    # The verify ranks and a spare of each stage, all with float32 weights of 16-bit files.
    return int(psutil.virtual_memory().available) > _PROCESS_BYTES + 4 * weights
