#!/usr/bin/env bash
# Runs the tests that need a GPU; writes gpu-check.xml.
#
#   infra/gpu/check.sh [--device cpu] [--model FOLDER] [-k NAMES] [other options of pytest]
#
# Works from a copy of this repository, with no network, no Ray and no installation: it needs a Python
# with torch, transformers and safetensors ($PYTHON, else python3). Other missing packages are taken
# from infra/gpu/wheels, which infra/gpu/wheels.sh fills on a machine with network access.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
python=${PYTHON:-python3}

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error
# The tests of a machine without a GPU interpret kernels.
export TRITON_INTERPRET=0

if ! "$python" -c 'import hypothesis, llguidance, msgspec, pydantic, pytest, pytest_timeout' 2>/dev/null; then
    if ! compgen -G "$here/wheels/*.whl" >/dev/null; then
        echo "$python lacks pytest, hypothesis, llguidance, msgspec or pydantic, and $here/wheels is empty: run" \
            "infra/gpu/wheels.sh on a machine with network access, and copy that folder to this machine" >&2
        exit 2
    fi
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --disable-pip-version-check --root-user-action=ignore --target "$site" "$here"/wheels/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi

# Warnings are errors for the pinned versions; this machine may have others. A test that hangs in its device ends
# the run.
"$python" -m pytest tests/gpu -m gpu -p no:cacheprovider -o filterwarnings=default -o timeout_method=thread \
    --durations=10 --junitxml=gpu-check.xml "$@"
