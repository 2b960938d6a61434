"""Routing of requests to pipelines, and the beliefs pooled over requests."""

from eesd_dist.routing.beliefs import BeliefBook, DraftPlan, Priors
from eesd_dist.routing.choice import PipelineChoice, PipelineChooser
from eesd_dist.routing.directory import (
    Listed,
    PipelineDirectory,
    PipelineId,
    PipelineRecord,
    PipelineReport,
    Promotion,
)

__all__ = [
    "BeliefBook",
    "DraftPlan",
    "Listed",
    "PipelineChoice",
    "PipelineChooser",
    "PipelineDirectory",
    "PipelineId",
    "PipelineRecord",
    "PipelineReport",
    "Priors",
    "Promotion",
]
