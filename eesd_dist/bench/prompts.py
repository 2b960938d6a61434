"""The prompts that every benchmark uses unless it is given others: JSON lines, by workload."""

from pathlib import Path

SHIPPED_PROMPTS = Path(__file__).with_name("prompts.jsonl")
