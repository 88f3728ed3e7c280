"""firsttoken: five attacks on the time to the first token, on one model, one machine and one command."""

import warnings

# tqdm without ipywidgets draws its bar as text, which is what the committed notebooks hold; its warning names a path.
warnings.filterwarnings("ignore", message="IProgress not found")

__version__ = "0.1.0"
