"""A reward is a finite number, or is kept with the reason why it does not count."""

import pytest

from archon.records import parse_reward


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (1.0, 1.0),
        (0.0, 0.0),
        (-2, -2.0),
        (True, 1.0),
        ("0.5", 0.5),
        ({"value": 1}, 1.0),
        ({"reward": 0}, 0.0),
        ({"value": "1e-3"}, 0.001),
    ],
)
def test_numbers_in_any_form_count(raw: object, value: float) -> None:
    parsed = parse_reward(raw)
    assert (parsed.value, parsed.rejected) == (value, "")


@pytest.mark.parametrize(
    "raw",
    [None, "good", {}, {"value": None}, [1], {"value": [1]}, {"value": {"value": 1}},
     float("nan"), float("inf"), "-inf", "nan", {"value": "infinity"}, object()],
)  # fmt: skip
def test_everything_else_is_kept_with_a_reason(raw: object) -> None:
    parsed = parse_reward(raw)
    assert parsed.value is None
    assert parsed.rejected
    assert parsed.raw


def test_zero_is_not_missing_and_the_slot_is_read() -> None:
    parsed = parse_reward(
        {"value": 0.0, "component": "intent", "source": "judge", "interaction_id": "int_1",
         "idempotency_key": 7}
    )  # fmt: skip
    assert parsed.value == 0.0
    assert (parsed.component, parsed.source) == ("intent", "judge")
    assert (parsed.interaction_id, parsed.idempotency_key) == ("int_1", "7")
