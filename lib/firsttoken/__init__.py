"""firsttoken: five reports on serving large language models, run on an ordinary machine with one command."""

import sys

if "ipykernel.zmqshell" in sys.modules:
    # Other packages' bars (tqdm.auto) stay text in a notebook: of a widget it would keep a reference to what is gone.
    import tqdm.std

    from firsttoken.study.machine import kernels_multiply
    from firsttoken.study.system.openmp import set_wait_policy

    sys.modules.setdefault("tqdm.autonotebook", tqdm.std)
    set_wait_policy(kernels_multiply())  # before torch, unless the reader has imported that first

__version__ = "0.1.0"
