"""RL post-training on Megatron-Core with prefix reuse: `torchrun pretrain_rl.py ...` or `python pretrain_rl.py ...`.

The arguments are Megatron-LM's and ours (docs/arguments.md).
"""

from __future__ import annotations

import sys

from megatron.prefixflow.training import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
