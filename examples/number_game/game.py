"""The number game: find a number from 1 to 4 in at most three turns.

The environment alone; it knows neither a model nor a network. Every move is answered with one of
three words, and whoever finds the number is paid 1 less 0.08 for each turn already used: 1.00,
0.92 or 0.84. Nothing is paid to who does not find it. A move that is not one of the four numbers
ends the game unpaid: there is no honest answer to it, and an answer made up would teach the
policy that words are moves.
"""

from __future__ import annotations

from dataclasses import dataclass

NUMBERS = 4
MAX_TURNS = 3
TURN_COST = 0.08
OPENING = "guess"
LOW, HIGH, RIGHT = "low", "high", "right"


@dataclass
class NumberGame:
    """`answer` is what the player is told next; it is None once nothing is left to say."""

    target: int
    turns: int = 0
    reward: float = 0.0
    done: bool = False
    answer: str | None = OPENING

    def __post_init__(self) -> None:
        if not 1 <= self.target <= NUMBERS:
            raise ValueError(f"target {self.target}: must be from 1 to {NUMBERS}")

    def move(self, text: str | None) -> None:
        """Play one move. `text` is whatever the player said."""
        if self.done:
            raise ValueError(f"the game is over after {self.turns} turns")
        self.turns += 1
        number = parse_move(text)
        if number is None:
            self.done, self.answer = True, None
            return
        if number == self.target:
            self.done, self.answer = True, RIGHT
            self.reward = 1.0 - TURN_COST * (self.turns - 1)
            return
        self.answer = LOW if number < self.target else HIGH
        self.done = self.turns == MAX_TURNS


def parse_move(text: str | None) -> int | None:
    """The number said, or None where it was not one of the four."""
    text = (text or "").strip()
    return int(text) if text in {str(number) for number in range(1, NUMBERS + 1)} else None
