"""Reference implementations and developer tools for the kernels; not part of the wheel."""
