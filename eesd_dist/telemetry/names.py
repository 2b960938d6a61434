"""Names of spans and attributes, in one place.

`eesd.*` is this project's namespace: no convention covers speculation. The `gen_ai.*` names are
those of open-telemetry/semantic-conventions-genai, all still in development. They are constants
here because the released Python package marks its own as deprecated.
"""

SPAN_ROUTE = "eesd.route"
SPAN_ROUND = "eesd.round"
SPAN_PLAN = "eesd.plan"
SPAN_DRAFT = "eesd.draft"
SPAN_TRANSFER = "eesd.transfer"
SPAN_VERIFY = "eesd.verify"
SPAN_COMMIT = "eesd.commit"
SPAN_VERIFY_RANK = "eesd.verify.rank"

STAGES = ("plan", "draft", "transfer", "verify", "commit")

HOP_DRAFT_TO_VERIFY = "draft_to_verify"
HOP_VERIFY_TO_DRAFT = "verify_to_draft"
HOP_VERIFY_GROUP = "verify_group"
HOP_DRAFT_GROUP = "draft_group"
HOPS = (HOP_DRAFT_TO_VERIFY, HOP_VERIFY_TO_DRAFT, HOP_VERIFY_GROUP, HOP_DRAFT_GROUP)

REQUEST_ID = "eesd.request.id"
PIPELINE = "eesd.pipeline"
ROUND_ID = "eesd.round.id"
MICROBATCH = "eesd.round.microbatch"
NUM_REQUESTS = "eesd.round.requests"
NUM_ROWS = "eesd.round.rows"
PREFILL_ROWS = "eesd.round.prefill_rows"
DRAFT_TOKENS = "eesd.draft.tokens"
LOOKUP_TOKENS = "eesd.draft.lookup_tokens"
ACCEPTED_TOKENS = "eesd.accepted.tokens"
EMITTED_TOKENS = "eesd.emitted.tokens"
TRANSFER_BYTES = "eesd.transfer.bytes"
REPLY_BYTES = "eesd.transfer.reply_bytes"
QUEUED_SECONDS = "eesd.transfer.queued_seconds"
COLLECTIVE_SECONDS = "eesd.verify.collective_seconds"
COLLECTIVE_SENT_BYTES = "eesd.verify.collective_sent_bytes"
COLLECTIVE_RECEIVED_BYTES = "eesd.verify.collective_received_bytes"
RANK = "eesd.rank"

GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED = "gen_ai.request.seed"
GEN_AI_REQUEST_STREAM = "gen_ai.request.stream"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"

PROVIDER = "eesd"
