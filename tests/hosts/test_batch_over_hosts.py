"""A batch job over hosts, of which one is lost. Oracle: the same job in one process."""

from pathlib import Path

from tests.support.batch_kills import BatchOverHosts, texts_of
from tests.support.ray_hosts import RayHosts


def test_a_lost_host_costs_a_job_nothing_but_time(
    cluster: RayHosts, tiny_model: Path, tmp_path: Path
) -> None:
    job = BatchOverHosts(cluster, tiny_model, tmp_path)
    expected = job.undisturbed()
    output = tmp_path / "out.jsonl"
    # One engine on each host, and one for which there is no room: nothing waits for it.
    process = job.start(output, num_engines=4)
    try:
        job.wait_for_rows(output, 40)
        cluster.power_off(2)
        assert process.wait(240) == 0, output.with_suffix(".log").read_text()
    finally:
        process.kill()
        cluster.repair()
    assert texts_of(output) == expected
