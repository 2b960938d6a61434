"""Decides which pipeline serves a request, and keeps the pooled beliefs."""

from eesd_dist.routing.beliefs import BeliefBook, DraftPlan, Priors
from eesd_dist.routing.directory import (
    Member,
    PipelineDirectory,
    PipelineId,
    PipelineReport,
    Promotion,
)

__all__ = [
    "BeliefBook",
    "DraftPlan",
    "Member",
    "PipelineDirectory",
    "PipelineId",
    "PipelineReport",
    "Priors",
    "Promotion",
]
