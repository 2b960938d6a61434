"""Folder of the small model that comes with the package, in a module that imports nothing slow."""

from pathlib import Path

BUNDLED_MODEL = Path(__file__).parents[1] / "serve_app" / "demo_model"
