"""46 · On the stated GPUs, without one."""
