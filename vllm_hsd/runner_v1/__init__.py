"""Hosting in the V1 model runner of vLLM."""
