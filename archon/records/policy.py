"""The settings of one policy: how its sessions close, how its batches are made, how it learns.

Invariant: an instance is valid. A value out of bounds, or a combination that would erase the
signal, is refused when the record is made, with what to change.
"""

from dataclasses import dataclass, field


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} = {value}: must be between {low} and {high}")


@dataclass(frozen=True)
class AlgorithmSettings:
    """How a step turns returns into a gradient. Sources are named in ``engine/algorithms``.

    ``behaviour_cap`` bounds the importance weight between the behaviour and the proximal policy;
    ``normalize_std`` divides group-centred returns by the group's standard deviation (GRPO).
    """

    name: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    behaviour_cap: float = 5.0
    epochs: int = 4
    minibatches: int = 1
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    normalize_std: bool = True
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in ("grpo", "rloo"):
            raise ValueError(f"algorithm.name = {self.name!r}: known are grpo, rloo")
        _check("algorithm.clip_low", self.clip_low, 0.0, 1.0)
        _check("algorithm.clip_high", self.clip_high, 0.0, 10.0)
        _check("algorithm.behaviour_cap", self.behaviour_cap, 1.0, 1e6)
        _check("algorithm.epochs", self.epochs, 1, 64)
        _check("algorithm.minibatches", self.minibatches, 1, 1024)
        if self.kl_coef:
            raise ValueError("algorithm.kl_coef: batches name no reference policy yet; set it to 0")
        _check("algorithm.lr", self.lr, 0.0, 1.0)
        _check("algorithm.max_grad_norm", self.max_grad_norm, 1e-6, 1e6)
        _check("algorithm.temperature", self.temperature, 1e-3, 100.0)
        if self.dual_clip is not None:
            _check("algorithm.dual_clip", self.dual_clip, 1.0, 1e6)
        if self.name == "rloo" and self.normalize_std:
            raise ValueError("algorithm: rloo does not divide by a std; set normalize_std = false")


@dataclass(frozen=True)
class PolicySettings:
    """Everything that is particular to one policy. Times are seconds.

    ``model`` is the folder of the initial weights and of the tokenizer and chat template.
    ``batch_groups`` whole groups make a step. ``close_on`` is ``reward`` (a session-level reward
    closes the episode after ``close_grace``), ``end`` or ``idle``.
    ``group_timeout``: a group that is not whole by then is claimed with what it has.
    ``samples`` is ``concat`` (a root-to-leaf branch per sample) or ``individual``.
    """

    model: str
    max_tokens: int = 1024
    max_model_len: int = 4096
    close_on: str = "reward"
    close_grace: float = 2.0
    idle_timeout: float = 600.0
    reward_timeout: float = 3600.0
    late_window: float = 3600.0
    group_timeout: float = 3600.0
    gamma: float = 1.0
    samples: str = "concat"
    batch_groups: int = 8
    max_staleness: int = 2
    max_ahead: int = 1
    step_timeout: float = 3600.0
    probe_tolerance: float = 1e-3
    admission: bool = True
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)

    def __post_init__(self) -> None:
        if self.close_on not in ("reward", "end", "idle"):
            raise ValueError(f"close_on = {self.close_on!r}: known are reward, end, idle")
        if self.samples not in ("concat", "individual"):
            raise ValueError(f"samples = {self.samples!r}: known are concat, individual")
        _check("gamma", self.gamma, 0.0, 1.0)
        _check("batch_groups", self.batch_groups, 1, 65536)
        _check("max_staleness", self.max_staleness, 0, 1000)
        _check("max_tokens", self.max_tokens, 1, 1 << 20)
        _check("max_model_len", self.max_model_len, 2, 1 << 24)
        if not 0 <= self.max_ahead <= self.max_staleness:
            raise ValueError(
                f"max_ahead = {self.max_ahead}: must be between 0 and max_staleness "
                f"= {self.max_staleness}, or every token would be too stale to train"
            )
        for name in ("close_grace", "idle_timeout", "reward_timeout", "late_window",
                     "group_timeout", "step_timeout"):  # fmt: skip
            _check(name, getattr(self, name), 0.0, 365 * 86400.0)
