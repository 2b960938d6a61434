"""`eesd preflight` on this machine; `tests/hosts/test_preflight.py` runs it over a cluster."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.link_figures import read_links
from cluster.preflight.findings import error, warning
from cluster.preflight.link_checks import LinkTime, MeasuredLink
from cluster.preflight.probe import probe_node
from cluster.preflight.report import Report, print_report
from serve_app.cli.main import main

ONPREM = Path(__file__).parents[3] / "cluster" / "configs" / "onprem.yaml"
MODEL = Path(__file__).parents[3] / "serve_app" / "demo_model"


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the command sets what Ray reads
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret-of-the-test")


def test_the_command_exits_with_one_when_something_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["preflight", "--cpus", "100000"]) == 1
    assert "100000 requested" in capsys.readouterr().out


def test_the_command_takes_the_auth_mode_from_the_cluster_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert main(["preflight", "--json", "--cluster-file", str(ONPREM)]) == 1
    (finding,) = [
        finding
        for finding in json.loads(capsys.readouterr().out)["findings"]
        if finding["severity"] == "error"
    ]
    assert finding["message"] == "RAY_AUTH_MODE is disabled here and token in the cluster file"
    assert finding["fix"] == "export RAY_AUTH_MODE=token"


def test_a_broken_cluster_file_exits_with_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preflight", "--cluster-file", str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml" in capsys.readouterr().err


_SMALL = ["preflight", "--shm-gib", "0.01", "--disk-gib", "0.01", "--model", str(MODEL)]


def test_a_healthy_node_may_join_and_no_secret_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*_SMALL, "--json"]) == 0
    printed = capsys.readouterr().out
    report = json.loads(printed)
    assert report["healthy"] is True
    assert "weights" in report["checks"]
    assert "secret-of-the-test" not in printed


@pytest.mark.parametrize("spans_nodes", [False, True])
def test_names_and_interfaces_are_reported_where_they_were_checked(
    spans_nodes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*_SMALL, *(["--spans-nodes"] if spans_nodes else []), "--json"])
    checks = set(json.loads(capsys.readouterr().out)["checks"])
    assert {"name", "interface"} & checks == ({"name", "interface"} if spans_nodes else set())


def test_the_table_has_a_row_for_each_check_and_for_each_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*_SMALL[:-1], str(tmp_path / "absent")]) == 1
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("│")[1:] for line in lines if line.startswith("│")]
    states = {cells[0].strip(): cells[2].strip() for cells in rows if cells[0].strip()}
    assert states["weights"] == "error"
    assert states["disk"] == "ok"


def _link(*nodes: str, microseconds: float) -> MeasuredLink:
    times = (
        LinkTime(
            operation="sendrecv",
            size_bytes=4096,
            typical_us=microseconds,
            fastest_us=microseconds,
        ),
    )
    return MeasuredLink(
        nodes=nodes, num_ranks=2, backend="gloo", source="torch", times=times, num_wrong=0
    )


def _report() -> Report:
    return Report(
        checks=("disk", "links"),
        nodes=("a", "b"),
        facts=(("a", probe_node()),),
        findings=(
            warning("open_files", "few", fix="more", nodes=["a"]),
            warning("open_files", "few", fix="more", nodes=["b"]),
            error("ports", "[closed]", fix="open", nodes=["a", "b"]),
        ),
        links=(_link("a", "b", microseconds=100.0), _link("a", "c", microseconds=300.0)),
    )


def test_the_planner_reads_the_links_of_the_json(tmp_path: Path) -> None:
    path = tmp_path / "preflight.json"
    path.write_text(json.dumps(_report().as_json()))
    (figures,) = read_links(path)
    assert (figures.operation, figures.scope, figures.num_ranks) == ("sendrecv", "nodes", 2)
    assert figures.times == ((4096, pytest.approx(200e-6)),)  # of a typical link


def test_errors_come_first_and_equal_faults_of_nodes_share_a_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_report(_report())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [line.split("│")[1].strip() for line in lines] == [
        *("ports", "open_files", "disk", "links", "links"),
    ]
    assert "[closed]" in lines[0]  # no markup
    assert "a, b" in lines[1]


def test_warnings_alone_are_healthy() -> None:
    report = _report()
    assert not report.is_healthy
    assert replace(report, findings=report.findings[:2]).is_healthy


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "no Ray cluster at 127.0.0.1:1: [Errno 111] Connection refused"),
        ("nowhere", "--address is 'nowhere': expected HOST:PORT"),
        ("127.0.0.1:99999", "no Ray cluster at 127.0.0.1:99999"),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(
    address: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preflight", "--address", address]) == 2
    assert message in capsys.readouterr().err
