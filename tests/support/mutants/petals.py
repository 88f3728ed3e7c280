"""Wrong versions of what PETALS describes."""

from __future__ import annotations

from mutants.running import Mutation

MUTATIONS: list[Mutation] = []
