"""What goes wrong when a stack is started or asked, in words for the person who started it."""


class StackError(ValueError):
    """Says what happened, to what, and what to do; the command prints it without a traceback."""
