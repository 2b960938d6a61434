"""Keys, flags and names of earlier versions, each with its replacement.

The only place that knows them: the configuration, the command line and the registry of controllers
refuse an unknown name by this table.
"""

from collections.abc import Mapping

REPLACEMENTS: Mapping[str, str] = {
    "speculation.draft_ahead": "leave it out: nothing is drafted before its verdict is there",
    "speculation.threshold": "leave it out, and name one of the controllers",
    "speculation.calibration_form": "leave it out: `calibration` has the beta form",
    "speculation.calibration_prior_std": "set calibration_strength instead",
    "speculation.calibration_variance_floor": "set calibration_strength instead",
    "speculation.stop_rule: steady": "use auto",
    "speculation.controller: threshold": "use smartspec, or the example in docs/extending.md",
    "speculation.controller: draft_verify": "use smartspec",
    "speculation.controller: ema": "use smartspec",
    "speculation.controller: ucb": "use smartspec",
    "reads_embedding": "train the head again with `eesd distill`, without the token's embedding",
    "--reads-embedding": "leave it out: a head reads hidden states alone",
    "--embedding": "leave it out: a head reads hidden states alone",
    "--plots": "record with --record, and draw by `python infra/draw_control.py`",
    "--reduce-s": "leave it out, and run `make fuzz-reduce CASE=FILE` in the repository",
}
"""Name as a user writes it, `key: value` for a value -> what to do instead. A key is found under
any section."""


def replacement_of(name: str) -> str | None:
    """Returns what to do instead of a removed key, flag or controller; None for other names."""
    for removed, replacement in REPLACEMENTS.items():
        if name == removed or name.endswith(f".{removed}"):
            return f"it was removed: {replacement}"
    return None
