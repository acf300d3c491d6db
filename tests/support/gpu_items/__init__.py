"""Items in the place of those of `benchmarks.gpu`, for the tests of what runs them."""
