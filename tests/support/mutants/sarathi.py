"""Wrong versions of what Sarathi-Serve describes."""

from __future__ import annotations

from mutants.running import Mutation

MUTATIONS: list[Mutation] = []
