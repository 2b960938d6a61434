"""Parameters of a request's answer, checked once for the HTTP API, batches and `eesd_dist.LLM`."""

from eesd_dist.parameters.conversation import (
    MAX_MESSAGES,
    ContentPart,
    Message,
    Messages,
    conversation_of,
)
from eesd_dist.parameters.fields import Fields, check_json
from eesd_dist.parameters.sampling import (
    NumAlternatives,
    SamplingFields,
    Seed,
    Temperature,
    check_ids,
    choice_seed,
    sampling_params,
    with_defaults,
)
from eesd_dist.parameters.structured_output import (
    AskedGrammar,
    JsonObject,
    StructuredFields,
    StructuredOutputs,
    asked_grammar,
    has_grammar,
    naming,
)

__all__ = [
    "MAX_MESSAGES",
    "AskedGrammar",
    "ContentPart",
    "Fields",
    "JsonObject",
    "Message",
    "Messages",
    "NumAlternatives",
    "SamplingFields",
    "Seed",
    "StructuredFields",
    "StructuredOutputs",
    "Temperature",
    "asked_grammar",
    "check_ids",
    "check_json",
    "choice_seed",
    "conversation_of",
    "has_grammar",
    "naming",
    "sampling_params",
    "with_defaults",
]
