"""What can draft: the levels of a cascade."""
