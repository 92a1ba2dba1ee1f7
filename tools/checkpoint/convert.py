"""Convert checkpoints: `python tools/checkpoint/convert.py {hf-to-megatron,megatron-to-hf} ...`, as `prefixflow convert`."""

from __future__ import annotations

import sys

from megatron.prefixflow.convert import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
