"""Schemathesis, in an environment of its own, tries the service by its own OpenAPI document: no
answer may be an internal error, or one that the document does not have. Downloads Schemathesis."""

import os
import re
import subprocess
import sys
import venv
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.fuzz_service import facts_of
from tests.support.served import served

VERSION = "4.32.5"
KEY = "schemathesis-key"
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "response_headers_conformance", "unsupported_method"),
    *("allow_header_conformance", "missing_required_header", "ignored_auth"),
    "negative_data_rejection",
)
"""All of single requests but `positive_data_acceptance`: grammars, token ids and lengths that fit
no model have no JSON schema."""
SETTINGS = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 408, 413, 431]  # by default without 408, 413, 431
"""
HOOKS = """
import schemathesis

LENGTHS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/responses": "max_output_tokens",
}
# Random values of these are refused for what they mean: no engine would see most requests.
MEANINGFUL = (
    *("model", "response_format", "structured_outputs", "guided_json", "guided_regex"),
    *("guided_choice", "guided_grammar", "guided_whitespace_pattern", "allowed_token_ids"),
    *("stop_token_ids", "logit_bias", "min_tokens", "tools", "tool_choice", "prompt_logprobs"),
    *("top_logprobs", "continue_final_message", "text", "chat_template_kwargs"),
)
num_seen = 0


@schemathesis.hook
def before_call(context, case, kwargs):
    global num_seen
    length = LENGTHS.get(case.operation.path)
    if length is None or not isinstance(case.body, dict):
        return
    asked = case.body.get(length)
    if asked is None or (isinstance(asked, int) and asked > 8):
        case.body[length] = 8
    meta = case.meta
    if meta is None or not meta.generation.mode.is_positive:
        return
    if isinstance(case.body.get("n"), int):
        case.body["n"] = min(case.body["n"], 2)
    num_seen += 1
    if num_seen % 3:
        case.headers.pop("Last-Event-ID", None)
        for name in MEANINGFUL:
            case.body.pop(name, None)
"""


@pytest.fixture(scope="module")
def schemathesis(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the command of an environment with it."""
    folder = tmp_path_factory.mktemp("schemathesis")
    venv.create(folder, with_pip=True)
    words = ["-m", "pip", "install", "--quiet", "--retries", "1", f"schemathesis=={VERSION}"]
    done = subprocess.run(
        [folder / "bin" / "python", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot install schemathesis {VERSION}: {done.stderr.strip()[-300:]}")
    return folder / "bin" / "st"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_answer_is_one_that_the_document_has(schemathesis: Path, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    (tmp_path / "eesd_hooks.py").write_text(HOOKS)
    with served(api_key=KEY) as port:
        done = subprocess.run(
            [
                *(schemathesis, "--no-color", "--config-file", tmp_path / "schemathesis.toml"),
                *("run", f"http://127.0.0.1:{port}/openapi.json"),
                *("--header", f"Authorization: Bearer {KEY}", "--checks", ",".join(CHECKS)),
                # The one pipeline has to stay; the fuzz sends drains of pipelines that are none.
                *("--exclude-path-regex", "/drain$", "--phases", "examples,coverage,fuzzing"),
                *("--max-examples", "100", "--seed", "1", "--generation-database", "none"),
                # In threads, Python 3.11's parser miscounts its recursion: SystemError.
                *("--workers", "1", "--no-shrink", "--continue-on-failure"),
                *("--request-timeout", "60"),
            ],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"SCHEMATHESIS_HOOKS": "eesd_hooks", "PYTHONPATH": str(tmp_path)},
            timeout=1500,
            check=False,
        )
        with facts_of(port, api_key=KEY) as facts:
            num_in_engine = facts.metrics()["router_requests_total"]
            holdings = facts.holdings_at_the_end()
            interruptions = [number for _, _, number in facts.processes()]
    sys.stdout.write(f"{done.stdout[-4000:]}\nrequests of the engine: {num_in_engine:g}\n")
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    totals = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert totals is not None
    assert int(totals[2]) > 2000
    assert num_in_engine > 300
    assert not any(asdict(holdings).values())
    assert interruptions == [0]
