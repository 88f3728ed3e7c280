"""Tests of the engine, and of what computes for it, share their models."""

from engine_fixtures import *  # noqa: F403
