"""Decides which pipeline serves a request, and keeps the pooled beliefs."""

from eesd_dist.routing.beliefs import BeliefBook, DraftPlan, Priors
from eesd_dist.routing.choice import Choice, PipelineChooser
from eesd_dist.routing.directory import (
    Listed,
    Member,
    PipelineDirectory,
    PipelineId,
    PipelineReport,
    Promotion,
)

__all__ = [
    "BeliefBook",
    "Choice",
    "DraftPlan",
    "Listed",
    "Member",
    "PipelineChooser",
    "PipelineDirectory",
    "PipelineId",
    "PipelineReport",
    "Priors",
    "Promotion",
]
