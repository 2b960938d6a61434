"""Writes the weights of SmolLM2's GGUF file into FOLDER, which has the rest of the checkpoint.

python infra/smollm2/unpack.py FILE.gguf FOLDER

A GPU machine without transformers cannot write the tokenizer, which `pack.sh` therefore packs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from eesd_dist.model.config_fields import read_json
from eesd_dist.model.gguf.config import named_tensors
from eesd_dist.model.gguf.folder import write_weights
from eesd_dist.model.gguf.header import read_header


def main() -> None:
    file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    tensors = named_tensors(file, read_header(file), read_json(folder / "config.json"))
    write_weights(file, tensors, folder)


if __name__ == "__main__":
    main()
