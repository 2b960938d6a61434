"""Sampling that a checkpoint's authors want: `generation_config.json`, read as vLLM reads it."""

import json
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from eesd_dist.errors import CheckpointError


class SamplingDefaults(BaseModel):
    """Values for requests that state none. None: the file names none either."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: NonNegativeInt | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    max_new_tokens: PositiveInt | None = None
    """The most tokens that any answer has."""

    @classmethod
    def of_folder(cls, folder: Path, *, mode: Literal["auto", "none"] = "auto") -> Self:
        """Reads a checkpoint's file; all values are None where there is none, and in the mode
        `none`. Raises CheckpointError for values that no request could have."""
        file = folder / "generation_config.json"
        if mode == "none" or not file.exists():
            return cls()
        try:
            return cls.model_validate(json.loads(file.read_bytes()))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                file=file,
                found=_problem(error),
                expected="values that a request could have",
                advice="mend the file, or set model.generation_config to none",
            ) from error

    def stated(self) -> dict[str, float | int]:
        """Returns the values that the file names."""
        return self.model_dump(exclude_none=True)


def _problem(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"])) or "the file"
        return f"{name} = {first['input']!r:.80} ({first['msg']})"
    return str(error)[:200]
