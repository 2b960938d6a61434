#!/usr/bin/env bash
# Downloads the packages that a bare GPU machine (Python 3.12 with torch and transformers) lacks: 6 MB
# in infra/gpu/wheels, to be copied with the repository. The folder is never committed.
#
#   infra/gpu/wheels.sh [PYTHON_VERSION]     default 3.12
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
version=${1:-3.12}

mkdir -p "$here/wheels"
rm -f "$here"/wheels/*.whl
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps \
    --only-binary=:all: --implementation cp --python-version "$version" \
    --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --constraint "$here/../constraints.txt" --dest "$here/wheels" \
    llguidance msgspec pydantic pydantic-core annotated-types typing-inspection typing-extensions \
    pytest pytest-timeout pluggy iniconfig packaging pygments hypothesis sortedcontainers
ls -l "$here/wheels"
