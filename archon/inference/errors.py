"""What can go wrong between Archon and an engine, one class for each thing a caller does next."""


class EngineError(Exception):
    """Base of all errors of an engine; `url` names the replica."""

    def __init__(self, url: str, message: str) -> None:
        super().__init__(f"engine {url}: {message}")
        self.url = url
        self.message = message


class EngineUnavailable(EngineError):
    """Nothing was sampled: no connection, no weights yet or a full queue. Try it again later."""

    def __init__(self, url: str, message: str, retry_after: float = 1.0) -> None:
        super().__init__(url, message)
        self.retry_after = retry_after


class EngineDied(EngineError):
    """The answer broke off after `received` tokens; what came before is a partial answer."""

    def __init__(self, url: str, message: str, received: int = 0) -> None:
        super().__init__(url, f"{message} (after {received} tokens)")
        self.received = received


class EngineRefused(EngineError):
    """The request is wrong (4xx); sending it again cannot help."""

    def __init__(self, url: str, message: str, code: int = 400) -> None:
        super().__init__(url, message)
        self.code = code


class VersionConflict(EngineRefused):
    """The engine has a newer version, or the same one with another digest (409)."""

    def __init__(self, url: str, message: str) -> None:
        super().__init__(url, message, 409)
