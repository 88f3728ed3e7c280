"""Tests of attention share a bench."""

from bench_fixtures import *  # noqa: F403
