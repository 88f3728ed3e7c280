"""The models that tests of the engine have, and a bench: the same is asked of an accelerator."""

from bench_fixtures import *  # noqa: F403
from engine_fixtures import *  # noqa: F403
