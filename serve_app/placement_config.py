"""The part of the configuration that says where a pipeline's actors are placed."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from eesd_dist.config import Section
from eesd_dist.workers.messages import PlacementMode

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""Ray's strategies: on one node or on several if possible; STRICT_*: or not at all."""


class BundleConfig(Section):
    """Resources that one actor of a stage reserves on its node, and the placement of the stage's
    actors."""

    num_cpus: PositiveFloat = 0.5
    """Logical CPUs: for placing actors, not a limit on what they use."""

    num_gpus: NonNegativeFloat | None = None
    """None: one where the model's device is `cuda`, or `auto` in a cluster with GPUs."""

    resources: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Custom Ray resources, for nodes that offer them."""

    labels: dict[str, str] = Field(default_factory=dict)
    """Labels the node must have (`ray start --labels`), e.g. `eesd.io/stage: draft`; Ray's
    `"!x"`, `"in(a,b)"` and `"!in(a,b)"` are understood."""

    strategy: Strategy | None = None
    """Placement of this stage's ranks relative to each other; None: STRICT_PACK if a node or node
    type is large enough for all of them, otherwise PACK, which fills whole nodes."""

    @field_validator("labels")
    @classmethod
    def _no_blanks(cls, labels: dict[str, str]) -> dict[str, str]:
        for name, selector in labels.items():
            if len((name + selector).split()) != 1:
                raise ValueError(
                    f"{name}: {selector} has a blank, which Ray takes for a part of the value: "
                    "write in(a,b)"
                )
        return labels


class PlacementConfig(Section):
    """Placement of one pipeline's actors: one bundle each, in one placement group or two."""

    mode: PlacementMode | None = None
    """`dedicated`: the drafting actor has a process and a GPU of its own; `shared`: it holds verify
    rank 0 too, in the bundle of `draft`. None: dedicated, or shared where a GPU is missing."""

    strategy: Strategy | None = None
    """Short form: one strategy for all actors of the pipeline. Excludes the three others."""

    stages: Strategy | None = None
    """The two stages relative to each other; None: PACK. PACK and SPREAD are preferences;
    STRICT_PACK: one node; STRICT_SPREAD: no node holds ranks of both."""

    draft: BundleConfig = BundleConfig()
    """The drafting actor, and the other draft ranks."""

    verify: BundleConfig = BundleConfig()
    """Bundle of every verify rank."""

    front: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Custom Ray resources for HTTP replicas, pipelines' replicas and the router, which hold
    connections and ledgers, e.g. {stable: 0.001}; else any node, short-lived ones included."""

    @model_validator(mode="after")
    def _is_said_once(self) -> Self:
        others = {
            "stages": self.stages,
            "draft.strategy": self.draft.strategy,
            "verify.strategy": self.verify.strategy,
        }
        settings = [f"{name} is {value}" for name, value in others.items() if value is not None]
        if self.strategy is not None and settings:
            raise ValueError(
                f"strategy is {self.strategy}, which places everything, and {settings[0]}: drop "
                "strategy, or the keys per stage"
            )
        return self
