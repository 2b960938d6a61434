"""The steps of distillation that need Ray or a running service."""
