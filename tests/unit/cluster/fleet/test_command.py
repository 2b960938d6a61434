"""`eesd plan-fleet`: exit status, and options that cannot be."""

import json
import subprocess
import sys

import pytest

from serve_app.cli.main import main

Output = pytest.CaptureFixture[str]


def test_the_command_prints_a_summary(capsys: Output) -> None:
    assert main(["plan-fleet", "--hours", "0.1", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert summary["requests"] > 0
    assert summary["lost"] == 0


def test_lost_requests_are_an_exit_status(capsys: Output) -> None:
    """Prompts take minutes here, and no node lives as long."""
    words = ["--rate", "0.05", "--hours", "0.1", "--prompt-tokens", "1e6", "--spot-hours", "0.0003"]
    assert main(["plan-fleet", *words, "--birth-s", "600", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["summary"]["lost"] > 0


def test_without_simpy_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['simpy'] = None; "
        "from serve_app.cli.main import main; sys.exit(main(['plan-fleet']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "needs simpy, not found here: pip install 'eesd-dist[fleet]'" in ended.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--min-count 0 --max-count 0", "max_count 0"),
        ("--target-live-requests 0", "live_requests is 0.0"),
        ("--target-first-token-s 0", "first_token_s is 0.0"),
        ("--birth-s -1", "birth_s is -1"),
        ("--load-s -1", "load_s is -1"),
        ("--up-delay-s -1", "up_delay_s -1"),
        ("--load day --trough 3", "trough is 3: expected a share"),
        ("--round-ms 0", "round_ms is 0.0"),
        ("--request-ms 50", "expected 0 to round_ms, 30"),
        ("--draft-length -1", "draft_length is -1"),
        ("--rate nan", "rate is nan"),
        ("--hours inf", "hours is inf"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: str, message: str, capsys: Output) -> None:
    assert main(["plan-fleet", *words.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err
