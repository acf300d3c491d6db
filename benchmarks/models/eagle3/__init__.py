"""The recipe of an EAGLE-3 head for a Llama target: chats, features, training, evaluation.

    python -m benchmarks.models.eagle3.chats --count 1024   # the target writes chats (vLLM)
    python -m benchmarks.models.eagle3.features             # its states on them, 8 kB a token
    python -m benchmarks.models.eagle3.train --steps 2000   # goes on where it stopped
    python -m benchmarks.models.eagle3.evaluate             # figures on held-out chats, curve

All of it is in `results/models/smollm2-eagle3-training` (`--work`). Each command may be stopped
at any time and started again; new chats become shards, new shards join at the next epoch.
"""

import torch

# Matrix products in bfloat16 take four times float32's time on a CPU that has to emulate them.
FAST_DTYPE = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
