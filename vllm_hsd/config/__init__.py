"""A cascade's keys: what users write, their defaults, checks, and the sizes that follow."""
