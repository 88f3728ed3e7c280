"""The work of a step between its matrix products, compiled for the CPU it runs on (``kernels.cpp``)."""
