"""The spelling of a scheduler in a profile and in a row: "sarathi 512" is Sarathi with a budget of 512 tokens."""

from __future__ import annotations


def place_of(text: str) -> dict[str, str | int]:
    """Return the place in a summary of the scheduler ``text``: {"scheduler": "sarathi", "budget_tokens": 512}, without
    the budget where it names none."""
    name, _, last = text.rpartition(" ")
    return {"scheduler": name, "budget_tokens": int(last)} if name and last.isdigit() else {"scheduler": text}
