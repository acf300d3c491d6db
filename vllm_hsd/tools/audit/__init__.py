"""Statistical verification that an engine's text follows its target; see docs/lossless.md."""
