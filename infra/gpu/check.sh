#!/usr/bin/env bash
# Runs the checks that need a GPU; prints a table and writes JSON.
#
#   infra/gpu/check.sh [--device cuda|cpu] [--minutes M] [--section NAME]... [--out FILE]
#
# Works from a copy of this repository, with no network, no Ray and no installation: it needs a Python
# with torch, transformers and safetensors ($PYTHON, else python3). Other missing packages are taken
# from infra/gpu/wheels, which infra/gpu/wheels.sh fills on a machine with network access.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error

if ! "$python" -c 'import llguidance, msgspec, pydantic' 2>/dev/null; then
    if ! compgen -G "$here/wheels/*.whl" >/dev/null; then
        echo "$python lacks llguidance, msgspec or pydantic, and $here/wheels is empty: run infra/gpu/wheels.sh on a" \
            "machine with network access, and copy that folder to this machine" >&2
        exit 2
    fi
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --disable-pip-version-check --root-user-action=ignore --target "$site" "$here"/wheels/*.whl
    export PYTHONPATH="$site:$PYTHONPATH"
fi

"$python" -m eesd_dist.bench.gpu_check "$@"
