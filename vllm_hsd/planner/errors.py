"""The one exception of the planner."""


class PlannerError(ValueError):
    """Input that cannot be planned with; the message is one sentence for the user."""
