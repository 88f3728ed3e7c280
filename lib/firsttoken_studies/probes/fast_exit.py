"""How a process that was started for one answer ends."""

import json
import os
import sys
from typing import Any, NoReturn


def tell_and_end(answer: Any) -> NoReturn:
    """Print ``answer`` as one line of JSON, and end at once: torch and transformers take another second to be taken
    down, in which the caller would wait."""
    print(json.dumps(answer), flush=True)
    sys.stderr.flush()
    os._exit(0)
