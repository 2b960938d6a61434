"""What every test may rely on: one thread a process, no trace export, no Ray found by chance."""

import os
import tempfile

from hypothesis import settings

# Before torch or Ray is imported anywhere, and inherited by every process a test starts. Two
# threads on two busy cores wait for each other longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray would otherwise write a token to the home directory and disagree with itself about using it.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# What is killed here Ray would report on stdout, amid what a test reads there.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^")
# Self-checks are asked again in every run, and once in it.
_cache = tempfile.TemporaryDirectory(prefix="self-checks-")
os.environ.setdefault("EESD_CACHE_DIR", _cache.name)
# A collector or cluster of the person running the tests is none of the tests' business.
for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "RAY_ADDRESS"):
    os.environ.pop(name, None)
# Nothing a test needs lies on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# On a busy machine an example takes as long as it takes.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
