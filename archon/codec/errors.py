"""The one error that a client can cause here."""


class CodecError(ValueError):
    """The request cannot be rendered. ``param`` names the part of it, as a 400 should."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
