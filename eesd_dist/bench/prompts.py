"""Default model and prompts of the benchmarks."""

from pathlib import Path

BUNDLED_MODEL = Path(__file__).parents[2] / "serve_app" / "demo_model"
SHIPPED_PROMPTS = Path(__file__).with_name("prompts.jsonl")
"""JSON lines, with a workload each."""
