class UserError(ValueError):
    """A mistake of the user's; the message is one sentence that names the key or file and says what to do."""
