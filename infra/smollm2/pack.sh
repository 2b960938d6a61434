#!/usr/bin/env bash
# Packs what train_heads.py needs on a bare GPU machine into five parts of 23 MB, build/smollm2/part-0 to part-4:
# the GGUF file, config and tokenizer, the prompts as tokens, this package's sources and wheels.
#
#   infra/smollm2/pack.sh FILE.gguf FOLDER TOKENS.npz
#
# FOLDER is the one that `eesd serve --model FILE.gguf` has made in the cache: a head fits its target by the hash of
# config.json and tokenizer.json.
#
# There: cat part-* | tar x -C DIR && bash DIR/run.sh OUT [options of train_heads.py]
set -euo pipefail

gguf=$(realpath "$1") folder=$(realpath "$2") tokens=$(realpath "$3")
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT

mkdir -p "$stage/model" "$stage/wheels" "$stage/infra" build/smollm2
cp "$gguf" "$stage/model.gguf"
cp "$folder"/{config.json,generation_config.json,tokenizer.json,tokenizer_config.json,chat_template.jinja} "$stage/model"
cp "$tokens" "$stage/tokens.npz"
cp -r eesd_dist "$stage/eesd_dist"
cp -r infra/smollm2 "$stage/infra/smollm2"
cp infra/smollm2/run.sh "$stage/run.sh"
find "$stage" -name __pycache__ -prune -exec rm -rf {} +
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --implementation cp --python-version 3.12 --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --constraint infra/constraints.txt \
    --dest "$stage/wheels" gguf llguidance msgspec pydantic pydantic-core annotated-types typing-inspection \
    typing-extensions
tar -C "$stage" -cf "$stage.tar" .
trap 'rm -rf "$stage" "$stage.tar"' EXIT
size=$(stat -c %s "$stage.tar")
rm -f build/smollm2/part-*
split -b $(((size + 4) / 5)) -d -a 1 "$stage.tar" build/smollm2/part-
ls -l build/smollm2
