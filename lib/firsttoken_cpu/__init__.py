"""An accelerator for CPUs: kernels, fused layers, a start without transformers, answers before torch."""
