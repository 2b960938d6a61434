"""What a benchmark measures with unless it is told otherwise: the bundled model and its prompts."""

from pathlib import Path

BUNDLED_MODEL = Path(__file__).parents[2] / "serve_app" / "demo_model"
SHIPPED_PROMPTS = Path(__file__).with_name("prompts.jsonl")
"""JSON lines, by workload."""
