"""Wrong versions of what CPS describes."""

from __future__ import annotations

from mutants.running import Mutation

MUTATIONS: list[Mutation] = []
