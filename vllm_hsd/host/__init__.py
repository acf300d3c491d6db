"""The only folder that imports vLLM's runner: what it gives, what it owes, and what is replaced."""
