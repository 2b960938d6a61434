"""`eesd distill`: makes exit heads.

The options of a step are those of its request, which imports torch: they are read when the step is
called.
"""

from typing import Any

from typer.core import TyperGroup
from typer.main import get_command

from eesd_dist.checks import require_extra
from eesd_dist.command_line import add_callback, add_command, group

_STEPS = {
    "run": "All of the following, restartable.",
    "collect": "Collects hidden states and logits of the target.",
    "train": "Trains a head behind one exit layer, with DeepSpeed.",
    "calibrate": "Fits how likely a draft token is to be accepted.",
    "evaluate": "Measures acceptance, and predicted and measured speed-up.",
    "sweep": "Compares exit layers and kinds of heads by measured time.",
    "refresh": "Trains a head further on what a service verified.",
}
_EXTRA = ("deepspeed", "matplotlib", "pandas", "pyarrow", "tensorboard")


class _Steps(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, arguments = super().resolve_command(ctx, args)
        if name is not None:
            require_extra("distill", *_EXTRA, what="distillation")
            from serve_app.distill.commands import step_program

            command = get_command(step_program(name))
        return name, command, arguments


def distill() -> None:
    """Makes exit heads: trained, calibrated and measured."""


def _listed() -> None:
    """Placeholder of a step in the list of commands."""


app = group("distill", cls=_Steps)
add_callback(app, distill)
for _name, _help in _STEPS.items():
    add_command(app, _listed, name=_name, help=_help)
