"""Processors of Ray Data: batch generation as a stage between a user's two functions.

Names and meaning are those of `ray.data.llm`, so that a job written for vLLM needs another import
and another configuration:

    config = EESDEngineProcessorConfig(model_source="smollm2", batch_size=16)
    processor = build_processor(
        config,
        preprocess=lambda row: {"messages": [{"role": "user", "content": row["question"]}]},
        postprocess=lambda row: {"answer": row["generated_text"], **row},
    )
    answers = processor(ray.data.read_parquet("questions.parquet"))

A row needs `messages`, `prompt` or `tokenized_prompt`, and may have `sampling_params`, `seed`,
`speculation`, `tools` and an `id`; without a seed that is made of the id, or of the row. It gets
`generated_text`, `generated_tokens`, `num_input_tokens`, `num_generated_tokens`, `finish_reason`,
`metrics` (JSON) and `__inference_error__`, which is a text, and empty for a row with an answer.
"""

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import ray
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator
from ray.data import ActorPoolStrategy, Dataset
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.ray_compat import actor_class
from eesd_dist.config import EngineConfig
from eesd_dist.llm.settings import engine_config
from eesd_dist.model.checkpoint_folder import with_local_folder
from eesd_dist.telemetry.tracing_options import TracingOptions
from serve_app.batch.loop import Bodies, BodyOf
from serve_app.batch.pipelines import PipelineSource
from serve_app.batch.quarantine import Quarantine
from serve_app.batch.resources import default_resources, placement_of_bundles, sum_of_bundles
from serve_app.batch.results import generation_columns
from serve_app.batch.rows import row_of_columns
from serve_app.batch.sources import EngineSource, ServiceSource, Source
from serve_app.batch.stage import COLUMN, GenerateText, StageRow
from serve_app.config import ServiceConfig
from serve_app.service.serve_instance import url_of_application

UserRow = dict[str, Any]
UserFunction = Callable[[UserRow], UserRow]
ERROR_COLUMN = "__inference_error__"
_MEANINGLESS = frozenset({"detokenize", "spaces_between_special_tokens", "output_kind"})
"""Sampling parameters of vLLM that change no text."""


class ProcessorConfig(BaseModel):
    """Settings of every processor. Unknown ones are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    batch_size: PositiveInt = 32
    """Rows that travel together: fewer lose less with a process, more cost less."""
    concurrency: PositiveInt | tuple[PositiveInt, PositiveInt] = 1
    """Number of actors of the stage; `(min, max)` scales between them with the work."""
    max_concurrent_batches: PositiveInt = 8
    """Batches that an actor has at a time, so that none waits for another's longest row."""
    max_tasks_in_flight_per_actor: PositiveInt | None = None
    """Batches that Ray Data sends to an actor ahead; None: its default."""
    should_continue_on_error: bool = False
    """Gives a row that cannot be answered the error as `__inference_error__`, and leaves out
    `postprocess`; otherwise the first one ends the job."""
    runtime_env: dict[str, Any] | None = None
    """Runtime environment of the stage's actors."""
    accelerator_type: str | None = None
    """Type of accelerator of the actors' nodes."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if isinstance(self.concurrency, tuple) and self.concurrency[0] > self.concurrency[1]:
            raise ValueError(f"concurrency: found min > max in {self.concurrency}")
        return self

    @property
    def pool(self) -> ActorPoolStrategy:
        sizes = self.concurrency
        limits = (
            {"size": sizes} if isinstance(sizes, int) else dict(zip(_LIMITS, sizes, strict=True))
        )
        return ActorPoolStrategy(
            **limits,
            max_tasks_in_flight_per_actor=self.max_tasks_in_flight_per_actor,
            max_concurrent_calls_per_actor=self.max_concurrent_batches,
        )


_LIMITS = ("min_size", "max_size")


class ChatTemplateStageConfig(BaseModel):
    """Settings of the model's chat template, which the engine's actor applies."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    enabled: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    """Options of the template."""


class EESDEngineProcessorConfig(ProcessorConfig):
    """Settings of a processor with engines of its own, one in each actor."""

    model_source: str
    """Folder, GGUF file or hub name of the model, on every node."""
    engine_kwargs: dict[str, Any] = {}
    """Arguments of `eesd_dist.LLM`; vLLM's names of them are known."""
    chat_template_stage: bool | ChatTemplateStageConfig = True
    """Applies the chat template to `messages`."""
    tokenize_stage: bool = True
    """Tokenises `prompt`; without it rows have a `tokenized_prompt`."""
    detokenize_stage: bool = True
    """Writes `generated_text`, which is empty otherwise."""
    placement_group_config: dict[str, Any] | None = None
    """Resources of an actor, `{"bundles": [{"CPU": 8, "GPU": 1}]}`; None: a GPU where the cluster
    has some, else all cores of a node. For an engine of several ranks, the first bundle is that of
    each rank, and `strategy` places them."""

    @property
    def required_column(self) -> str:
        """Column that a row needs in place of the usual ones; empty: the usual ones."""
        if not self.tokenize_stage:
            return "tokenized_prompt"
        stage = self.chat_template_stage
        return "" if (stage if isinstance(stage, bool) else stage.enabled) else "prompt"

    @property
    def template_options(self) -> Mapping[str, object]:
        stage = self.chat_template_stage
        return {} if isinstance(stage, bool) else stage.chat_template_kwargs

    @property
    def _engine(self) -> EngineConfig:
        """Raises ConfigError for settings that no engine has."""
        settings = dict(self.engine_kwargs)
        num_verify = settings.pop("tensor_parallel_size", None)
        if num_verify is not None:
            settings["verify_tensor_parallel_size"] = num_verify
        return engine_config(self.model_source, settings)

    def source(self) -> Source:
        """Raises ConfigError for settings that no engine has."""
        engine = with_local_folder(self._engine)
        if engine.parallel.num_ranks > 2:
            placement = placement_of_bundles(self.placement_group_config or {})
            return PipelineSource(
                config=ServiceConfig(
                    engine=engine, model_name=self.model_source, placement=placement
                )
            )
        has_whole_node = self.placement_group_config is None and not self.resources().get("GPU")
        return EngineSource(
            engine=engine,
            model_name=self.model_source,
            tracing=TracingOptions(),
            has_whole_node=has_whole_node,
        )

    def resources(self) -> Mapping[str, float]:
        """Returns the resources that an actor reserves; none for a pipeline, which has its own."""
        if self._engine.parallel.num_ranks > 2:
            return {}
        if self.placement_group_config is None:
            return default_resources(self._engine.model.device)
        return sum_of_bundles(self.placement_group_config)


class EESDServiceProcessorConfig(ProcessorConfig):
    """Settings of a processor over a running service; its actors are clients."""

    url: str | None = None
    """Address of the service, as `eesd serve` shows it."""
    name: str | None = None
    """Name, in place of `url`, of the service's application in Serve, in this cluster."""
    api_key_env: str = "EESD_API_KEY"
    """Environment variable of this process with the service's key."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Options of the chat template."""

    detokenize_stage: ClassVar[bool] = True
    required_column: ClassVar[str] = ""

    @property
    def template_options(self) -> Mapping[str, object]:
        return self.chat_template_kwargs

    @model_validator(mode="after")
    def _is_one_service(self) -> Self:
        if (self.url is None) == (self.name is None):
            raise ValueError("expected either url or name")
        return self

    def source(self) -> ServiceSource:
        """Raises ConfigError where no service has the name."""
        url = self.url or url_of_application(self.name or "")
        return ServiceSource(url=url, api_key=os.environ.get(self.api_key_env) or None)

    def resources(self) -> Mapping[str, float]:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocess:
    """First stage: applies the user's function, and reads what the row asks for."""

    function: UserFunction | None
    template_options: Mapping[str, object]
    requires: str
    """Column that a row needs in place of the usual ones; empty: the usual ones."""

    def __call__(self, row: UserRow) -> UserRow:
        columns = {**row, **(self.function(dict(row)) if self.function else {})}
        request = row_of_columns(_request(columns), requires=self.requires)
        if request.kind == "chat" and self.template_options:
            request = request.with_fields({"chat_template_kwargs": dict(self.template_options)})
        return {COLUMN: pickle.dumps(StageRow(row=request, columns=columns))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Postprocess:
    """Last stage: adds the answer's columns, and applies the user's function."""

    function: UserFunction | None
    detokenizes: bool
    continues: bool

    def __call__(self, row: UserRow) -> UserRow:
        stage_row: StageRow = pickle.loads(row[COLUMN])
        result = stage_row.result
        assert result is not None
        columns = {
            **stage_row.columns,
            **generation_columns(result.answer),
            ERROR_COLUMN: result.error,
        }
        if not self.detokenizes:
            columns["generated_text"] = ""
        if result.has_failed or self.function is None:
            return columns
        answer = self.function(columns)
        return {**answer, ERROR_COLUMN: ""} if self.continues else answer


class Processor:
    """Turns a dataset into one with answers: preprocess, generate, postprocess."""

    def __init__(
        self,
        config: EESDEngineProcessorConfig | EESDServiceProcessorConfig,
        preprocess: UserFunction | None,
        postprocess: UserFunction | None,
        *,
        preprocess_map_kwargs: Mapping[str, Any],
        postprocess_map_kwargs: Mapping[str, Any],
    ) -> None:
        self.config = config
        self._preprocess = Preprocess(
            function=preprocess,
            template_options=config.template_options,
            requires=config.required_column,
        )
        self._postprocess = Postprocess(
            function=postprocess,
            detokenizes=config.detokenize_stage,
            continues=config.should_continue_on_error,
        )
        self._preprocess_map_kwargs = preprocess_map_kwargs
        self._postprocess_map_kwargs = postprocess_map_kwargs

    def __call__(self, dataset: Dataset) -> Dataset:
        """Returns the dataset with the stages added; they run when it is read."""
        rows = dataset.map(self._preprocess, **self._preprocess_map_kwargs)
        answers = staged(
            rows,
            self.config,
            source=self.config.source(),
            body_of=Bodies(defaults={"return_token_ids": True}),
            resources=self.config.resources(),
        )
        return answers.map(self._postprocess, **self._postprocess_map_kwargs)

    def list_stage_names(self) -> list[str]:
        """Returns the names of the stages between the user's functions."""
        return [GenerateText.__name__]


def build_processor(
    config: EESDEngineProcessorConfig | EESDServiceProcessorConfig,
    preprocess: UserFunction | None = None,
    postprocess: UserFunction | None = None,
    preprocess_map_kwargs: Mapping[str, Any] | None = None,
    postprocess_map_kwargs: Mapping[str, Any] | None = None,
) -> Processor:
    """Returns a processor. `preprocess` gets a row and returns columns that are added to it;
    `postprocess` gets all columns and returns the row of the result. The mappings are options of
    `Dataset.map` for them."""
    return Processor(
        config,
        preprocess,
        postprocess,
        preprocess_map_kwargs=preprocess_map_kwargs or {},
        postprocess_map_kwargs=postprocess_map_kwargs or {},
    )


def staged(
    rows: Dataset,
    config: ProcessorConfig,
    *,
    source: Source,
    body_of: BodyOf,
    resources: Mapping[str, float],
) -> Dataset:
    """Returns a dataset of `StageRow`s with the stage that generates."""
    rows.context.execution_no_progress_timeout_s = -1  # a batch of a slow engine takes its time
    return rows.map_batches(
        GenerateText,
        fn_constructor_args=(source, _quarantine()),
        fn_constructor_kwargs={
            "body_of": body_of,
            "raises_errors": not config.should_continue_on_error,
        },
        batch_size=config.batch_size,
        compute=config.pool,
        num_cpus=resources.get("CPU", 0.0),
        num_gpus=resources.get("GPU", 0.0),
        resources={name: n for name, n in resources.items() if name not in ("CPU", "GPU")},
        accelerator_type=config.accelerator_type,
        runtime_env=config.runtime_env,
    )


def _quarantine() -> Any:
    """Starts a `Quarantine` on the node of this process, with which the job ends anyway."""
    node = ray.get_runtime_context().get_node_id()
    strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return actor_class(Quarantine).options(num_cpus=0, scheduling_strategy=strategy).remote()


def _request(columns: UserRow) -> dict[str, object]:
    """Returns the columns that a row asks with, in Python's types."""
    names = ("id", "custom_id", "prompt", "messages", "tokenized_prompt", "sampling_params")
    request = {
        name: _plain(columns[name])
        for name in (*names, "seed", "speculation", "tools", "tool_choice")
        if columns.get(name) is not None
    }
    parameters = request.get("sampling_params")
    if isinstance(parameters, dict):
        request["sampling_params"] = {
            name: value for name, value in parameters.items() if name not in _MEANINGLESS
        }
    return request


def _plain(value: Any) -> Any:
    """Returns a value without numpy's types, and without the nulls of a table's structs."""
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
