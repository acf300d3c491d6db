"""What runs inside vLLM's V2 model runner; nothing outside this package imports it but entrance."""
