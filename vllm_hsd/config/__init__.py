"""A cascade's keys: what users write, its checks, and what vLLM is given."""
