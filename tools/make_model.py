"""Write SmolLM2-135M-Instruct as a Hugging Face folder and print the folder's path.

    python tools/make_model.py [DIR]

Quick when the folder is already there. The printed path is the last line of the output.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.prefixflow.smollm2 import DEFAULT_DIR, make_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_DIR)
    print(make_model(parser.parse_args().folder))


if __name__ == "__main__":
    main()
