#!/usr/bin/env bash
# Trains the heads on a GPU machine from what pack.sh has packed: run.sh OUT [options of train_heads.py].
set -euo pipefail

out=$(realpath "$1")
shift
cd "$(dirname "${BASH_SOURCE[0]}")"
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
"$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check \
    --root-user-action=ignore --target site wheels/*.whl
export PYTHONPATH="$PWD/site:$PWD"
nvidia-smi -L || true
df -h /dev/shm /tmp || true
"$python" infra/smollm2/unpack.py model.gguf model
"$python" infra/smollm2/train_heads.py train --model model --tokens tokens.npz --out "$out" "$@" 2>&1 |
    tee "$out/log.txt"
