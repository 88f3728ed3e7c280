"""What a step does between its matrix products, compiled for the CPU it runs on (``kernels.cpp``)."""
