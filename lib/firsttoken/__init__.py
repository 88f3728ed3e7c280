"""firsttoken: five attacks on the time to the first token, on one model, one machine and one command."""

import sys

from firsttoken import old_names

if "ipykernel.zmqshell" in sys.modules:
    # Other packages' bars (tqdm.auto) stay text in a notebook: of a widget it would keep a reference to what is gone.
    import tqdm.std

    sys.modules.setdefault("tqdm.autonotebook", tqdm.std)

__version__ = "0.1.0"

old_names.install()
