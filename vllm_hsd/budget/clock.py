"""The clock by which drafting is priced."""

from __future__ import annotations

import time

import torch

# Seconds since some moment. On a CPU the processor time of the thread that runs the model, so that
# what other processes take is not taken for the price of a token. An accelerator works while the
# thread waits.
seconds = time.perf_counter if torch.accelerator.is_available() else time.thread_time
